"""Compares which kernels two versions of layernorm_inline.py launch, without a GPU.

    python .tests/launches.py HEAD          compares layernorm_inline.py with the last commit
    python .tests/launches.py other.py      compares layernorm_inline.py with another file

Runs every emulated case of cases.py, and calls with float32 and bfloat16 rows of 8, 16, 24, ... 2560 columns, each with
three rows and with 0.8, 4 and 10 waves of rows (see launch_forward of the register kernels). Prints each call whose
kernel, grid, block or dynamic shared memory differs. The exit status is 0 if none does, and 1 otherwise.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import emulator
from cases import CASES, TYPES, Case


def print_launches(path):
    """Prints one line per launch of a version of the file: case, direction, grid, block, bytes and kernel."""
    emulator.SOURCE = Path(path)
    module = emulator.load_module()
    cases = [case for case in CASES if case.gpu.name != "cuda"]
    gpu = emulator.GPUS["hopper"](2)
    wave = 2048 * gpu.sms  # 16-byte loads, as in launch_forward
    for dtype, cols, waves in itertools.product(("fp32", "bf16"), range(8, 2561, 8), (0, 0.8, 4, 10)):
        loads = cols * TYPES[dtype].itemsize // 16
        cases.append(Case(gpu, max(3, round(waves * wave / loads)), cols, dtype, "plain"))
    for case in cases:
        *leaves, dy = case.tensors(emphasized=False)
        x, *affine = (t if t is None else t.requires_grad_() for t in leaves)
        with emulator.on(case.gpu, dry=True) as libraries:
            output = module.layer_norm(x, (case.cols,), *affine, **case.epilogue)
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
        path = Path(folder, "old.py")
        path.write_text(emulator.version(arguments.version))
        found = list(differences(path, emulator.SOURCE))
    for call, old, new in found:
        print(f"{call}\n    old: {old}\n    new: {new}")
    print(f"{len(found)} calls differ" if found else "all calls launch the same kernels")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
