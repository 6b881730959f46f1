"""Prints what calls on each side of every condition of the host code launch on emulated GPUs.

    python .tests/launches.py > .tests/launches.txt

writes the file that test_launches_at_every_condition compares with. Do this after retuning, and read the difference.
A line has a case of cases.py, and for forward and backward each kernel, its blocks, threads, and bytes of dynamic shared
memory if it has any.
"""

import itertools
import re

import emulator
import torch
from cases import TYPES, Case

HOPPER, AMPERE, TURING, BLACKWELL = (emulator.GPUS[name] for name in ("hopper", "ampere", "turing", "blackwell"))


def register_cases():
    """Yields calls for the ladder of the register kernels: both sides of each number of 16-byte loads and of waves."""
    gpu = HOPPER(8)
    aligned = [(32, 256), (32, 257), *((n, 9) for n in (33, 64, 65, 96, 97, 128, 129, 160, 161)), (256, 64), (256, 65)]
    aligned += [(257, 9), (512, 32), (512, 33), (513, 31), (513, 32), (1024, 16), (1024, 17), (1024, 128), (1024, 129)]
    aligned += [(1025, 9), (1025, 120), (2048, 9), (2049, 9)]
    unaligned = [(32, 9), (33, 9), (1536, 10), (1536, 11), (1537, 11), (1792, 11), (1793, 11)]
    for dtype, per_load in (("fp32", 4), ("bf16", 8)):
        for form in ("plain", "gelu"):
            yield from (Case(gpu, rows, loads * per_load, dtype, form) for loads, rows in aligned)
            yield from (Case(gpu, rows, loads * per_load + 1, dtype, form) for loads, rows in unaligned)
            # Backward: the longest rows, and those from which the pipelined kernels run.
            yield from (Case(gpu, 40, cols, dtype, form) for cols in (8, 256, 264, 2041, 2048, 2056, 4095, 4096, 4097))
            yield from (Case(gpu, 20, cols, dtype, form) for cols in (4104, 8191, 8192, 8200))
    for cols in (256, 264, 16384):  # late loads of float32 weight
        yield from (Case(gpu, 9, cols, "fp16", "plain", "", affine) for affine in ("both", "float32", "float32 bias"))
    for rows in (2047, 2048, 2049, 4097, 40_000):  # many rows per thread in backward
        yield from (Case(gpu, rows, cols, dtype, "plain") for cols in (8, 9) for dtype in ("fp32", "bf16"))
    for gpu in (AMPERE(2), TURING(2), BLACKWELL(4)):
        for cols in (64, 2048, 2056, 4104, 4099, 8200):
            yield from (Case(gpu, 20, cols, dtype, "plain") for dtype in ("fp32", "bf16"))


def long_cases():
    """Yields rows that several blocks share, or that are read twice."""
    for gpu in (HOPPER(8), AMPERE(2), BLACKWELL(4)):
        for dtype in ("fp32", "bf16"):
            longest = 8192 * gpu.sms
            for rows, cols in (
                (1, 20_008),
                (2, 20_008),
                (gpu.sms, 16_448),
                (gpu.sms + 1, 16_448),
                (3, longest),
                (3, longest + 8),
            ):
                yield Case(gpu, rows, cols, dtype, "plain")
            yield Case(gpu, 9, 20_001, dtype, "plain")
            yield Case(gpu, 9, 20_008, dtype, "gelu")
    for gpu in (TURING(2), emulator.GPUS["mps"](8)):
        yield from (Case(gpu, 3, cols, "fp32", "plain") for cols in (16_448, 65_536))
    # Slices that would fit the grid-resident kernel's ring, but the GPU lacks its instructions.
    yield from (Case(AMPERE(3), 4, 32_776, dtype, "plain") for dtype in ("fp32", "bf16"))
    for cols in range(6000, 8200, 256):  # three stages of a slice no longer fit into shared memory
        yield from (Case(gpu, 3, 2 * cols, "fp32", "plain") for gpu in (AMPERE(2), BLACKWELL(2)))
    for rows in (1, 7, 300, 520, 3000):  # pieces, ranges of rows and partial sums of the two-pass kernels
        yield from (Case(HOPPER(8), rows, cols, "fp32", "gelu") for cols in (8200, 16_392))


def grid_resident_cases():
    """Yields rows around each condition of the grid-resident kernel's plan."""
    for sms in (2, 4):
        gpu, longest = HOPPER(sms), 32_768 * sms
        for dtype in ("fp32", "bf16"):
            for rows, cols in itertools.product((3, 4, 8), (16_384 * sms, 16_384 * sms + 8, longest, longest + 8)):
                yield Case(gpu, rows, cols, dtype, "plain")
        for affine in ("both", "float32", "float32 weight", "float32 bias"):
            yield Case(gpu, 4, 16_668 * sms, "fp16", "plain", "", affine)
    for step in range(24):
        yield from (Case(HOPPER(2), 4, 16_640 + 2048 * step, dtype, "plain") for dtype in ("fp32", "bf16"))


CASES = list(dict.fromkeys([*register_cases(), *long_cases(), *grid_resident_cases()]))


def short(launch):
    """Returns a line of emulator.launches in fewer words."""
    name, *numbers = re.fullmatch(r"(\S.*?) (\d+)x(\d+) (\d+)x(\d+) (\d+)(.*)", launch).groups()
    name = re.sub(r"layer_norm_(backward_)?|__nv_bfloat16, |__half, |float, |\w+::k?|<(For|Back)ward.*", "", name)
    blocks, threads = ("x".join(n for n in pair if n != "1") or "1" for pair in (numbers[:2], numbers[2:4]))
    return f"{name} {blocks} of {threads}" + f" {numbers[4]}{numbers[5]}".replace(" 0", "")


def lines(backend):
    """Yields the line of each case."""
    for case in CASES:
        x, weight, bias = (
            torch.empty(size, dtype=dtype).requires_grad_()
            for size, dtype in zip(((case.rows, case.cols), case.cols, case.cols), dtypes_of(case))
        )
        kind = case.affine.split()[-1]
        weight, bias = None if kind in ("none", "bias") else weight, None if kind in ("none", "weight") else bias
        with emulator.on(case.gpu, dry=True) as libraries:
            y = backend.layer_norm(x, (case.cols,), weight, bias, **case.epilogue)
            forward = emulator.launches(libraries)
            y.backward(y)
            backward = emulator.launches(libraries)
        what = [case.gpu, f"{case.rows}x{case.cols}", case.dtype, case.form.replace("plain", ""), case.affine]
        calls = ["; ".join(map(short, launches)) for launches in (forward, backward)]
        yield f"{' '.join(str(word) for word in what if word not in ('', 'both'))} | {' | '.join(calls)}"


def dtypes_of(case):
    affine = torch.float32 if "float32" in case.affine else TYPES[case.dtype]
    return TYPES[case.dtype], affine, affine


if __name__ == "__main__":
    from conftest import Backend

    print("\n".join(lines(Backend("emulated"))))
