"""Compares the machine code of two versions of layernorm_inline.py, kernel by kernel, without a GPU.

    python .tests/machine_code.py HEAD                        against the last commit, for sm_90a
    python .tests/machine_code.py HEAD~3 --arch sm_80 sm_90a  against an older commit, for two architectures
    python .tests/machine_code.py other.py                    against another file

Prints every kernel whose instructions, registers or local memory differ, and every kernel that only one version has,
unless it was renamed. The exit status is 0 if all kernels are equal, and 1 otherwise. Needs Triton, and an nvcc, which
is searched as layernorm_inline.py does.
"""

import argparse
import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulator


def cuobjdump():
    """Returns the path of cuobjdump, or None if Triton is not installed."""
    triton = importlib.util.find_spec("triton")
    path = triton and Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return path if path and path.exists() else None


@functools.lru_cache
def nvcc():
    """Returns the path of nvcc. Raises RuntimeError with the advice of layernorm_inline.py if there is none."""
    return emulator.definitions(emulator.SOURCE.read_text())["_find_cuda_home"]()[0] + "/bin/nvcc"


def compile_kernels(source, arch, folder):
    """Returns the path of the cubin, and {kernel: (registers, bytes of local memory per thread)}."""
    cu, cubin = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
    cu.write_text(source.cuda)
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-DTORCH_EXTENSION_NAME=version", "-Xptxas=-v", *source.macros]
    target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
    command = [nvcc(), "-cubin", target, *flags, "-o", str(cubin), str(cu)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    kernel = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    found = re.findall(kernel, done.stderr, re.S)
    return cubin, {name: (int(registers), int(stack)) for name, stack, registers in found}


def demangled(names):
    """Returns the C++ names of mangled kernel names, without namespaces that all share and without parameters."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    lines = done.stdout.replace("version::(anonymous namespace)::", "").splitlines()
    return [re.sub(r"\([\w:]+\)(?=\d)|\(.*", "", line) for line in lines]  # also without the types of enum values


def kernels_of(source, arch):
    """Returns {demangled name: (instructions, registers, bytes of local memory)} for a library."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, usage = compile_kernels(source, arch, folder)
        sass = subprocess.run([cuobjdump(), "-sass", cubin], capture_output=True, text=True, check=True).stdout
    names, _, bodies = zip(*(part.partition("\n") for part in sass.split("Function : ")[1:]))
    code = [re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?;)", body) for body in bodies]  # without addresses and encodings
    names = [name.strip() for name in names]
    return {short: (lines, *usage[name]) for name, short, lines in zip(names, demangled(names), code)}


def differences(old, new):
    """Yields (name, old kernel, new kernel) for results of kernels_of. A kernel is None if only one version has it."""
    gone = [old[name] for name in {*old} - {*new}]
    added = [new[name] for name in {*new} - {*old}]
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        is_renamed = (a is None and b in gone) or (b is None and a in added)
        if a != b and not is_renamed:
            yield name, a, b


def size(kernel):
    return f"{len(kernel[0])} instructions, {kernel[1]} registers, {kernel[2]} B local" if kernel else "absent"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("revision", help="the version to compare with: a Git revision or a file")
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], help="architectures to compile for")
    arguments = parser.parse_args()
    if cuobjdump() is None:
        parser.error("cuobjdump was not found: pip install triton")
    try:
        nvcc()
    except RuntimeError as error:
        parser.error(str(error))
    versions = [emulator.version(arguments.revision), emulator.SOURCE.read_text()]
    differ = total = 0
    for arch in arguments.arch:
        kernels = []  # of all libraries of each version, because a kernel can move from one library to another
        for libraries in map(emulator.sources, versions):
            with ThreadPoolExecutor(2) as pool:
                found = pool.map(lambda source, a=arch: kernels_of(source, a), libraries.values())
            of_all = [(f"{library} {k}".strip(), v) for library, of in zip(libraries, found) for k, v in of.items()]
            kernels.append(dict(of_all))
        total += len(kernels[1])
        for name, a, b in differences(*kernels):
            differ += 1
            print(f"{arch} {name}: {size(a)} -> {size(b)}")
    print(f"{differ} kernels differ" if differ else f"all {total} kernels are equal")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
