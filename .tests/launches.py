"""Compares which kernels two versions of layernorm_inline.py launch, without a GPU.

    python .tests/launches.py HEAD          compares layernorm_inline.py with the last commit
    python .tests/launches.py other.py      compares layernorm_inline.py with another file

Runs every emulated case of cases.py, and calls with float32 and bfloat16 rows of 8, 16, 24, ... 2560 columns, each with
three rows and with 0.8, 4 and 10 waves of rows (see launch_forward of the register kernels). Prints each call whose
kernel, grid, block or dynamic shared memory differs. The exit status is 0 if none does, and 1 otherwise. It compiles both
versions for the CPU, and needs two to three minutes on two cores.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPU = "hopper"


def calls():
    """Yields the cases to run."""
    import emulator
    from cases import CASES, TYPES, Case

    yield from (case for case in CASES if case.gpu.name != "cuda")
    gpu = emulator.GPUS[GPU](2)
    wave = 2048 * gpu.sms  # 16-byte loads, as in launch_forward
    for dtype, cols, waves in itertools.product(("fp32", "bf16"), range(8, 2561, 8), (0, 0.8, 4, 10)):
        loads = cols * TYPES[dtype].itemsize // 16
        yield Case(gpu, max(3, round(waves * wave / loads)), cols, dtype, "plain")


def print_launches(path):
    """Prints one line per launch of a version of the file: case, direction, grid, block, bytes and kernel."""
    import emulator
    import torch

    emulator.SOURCE = Path(path)
    module = emulator.load_module()
    for case in calls():
        x, weight, bias, dy = (torch.empty(0) if t is None else t for t in case.tensors(emphasized=False))
        leaves = [t.requires_grad_() if t.numel() else None for t in (x, weight, bias)]
        with emulator.on(case.gpu, dry=True) as libraries:
            output = module.layer_norm(leaves[0], (case.cols,), *leaves[1:], **case.epilogue)
            print("\n".join(f"{case}, forward:{line}" for line in emulator.launches(libraries)))
            output.backward(dy)
            print("\n".join(f"{case}, backward:{line}" for line in emulator.launches(libraries)), flush=True)


def launches_of(path):
    """Returns {case and direction: list of launches} of a version of the file. Loads the version in a child process."""
    command = [sys.executable, __file__, "--print", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nThe emulated GPUs know only the names of today's kernels.")
    launches = {}
    for line in filter(None, done.stdout.splitlines()):
        call, _, launch = line.partition(": ")
        launches.setdefault(call, []).append(launch)
    return launches


def differences(old_path, new_path):
    """Yields (case and direction, old launches, new launches) for every call whose launches differ."""
    old, new = launches_of(old_path), launches_of(new_path)
    for call in sorted({*old, *new}):
        if old.get(call) != new.get(call):
            yield call, old.get(call), new.get(call)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", help="the version to compare with: a Git revision or a file")
    parser.add_argument("--print", action="store_true", help="only print the launches of a file")
    arguments = parser.parse_args()
    if arguments.print:
        return print_launches(arguments.version)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.version)
        if not path.exists():
            path = Path(folder, "old.py")
            show = ["git", "-C", ROOT, "show", f"{arguments.version}:layernorm_inline.py"]
            path.write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
        found = list(differences(path, ROOT / "layernorm_inline.py"))
    for call, old, new in found:
        print(f"{call}\n    old: {old}\n    new: {new}")
    print(f"{len(found)} calls differ" if found else "all calls launch the same kernels")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
