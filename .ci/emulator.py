"""Builds and loads the kernels of CUDA_SOURCE for the CPU (see emulator.h), so that they can be tried without a GPU.

from emulator import layer_norm     takes what layernorm_inline.layer_norm takes, CPU tensors, with gradients
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import layernorm_inline  # noqa: E402

# What replaces the bodies of functions that are made of instructions.
BODIES = {
    "opaque": "return x;",
    "shared_address": "return 0;",
    "copy_or_zero": "emulator::copy_async(shared, global, exists);",
    "copy_async": "emulator::copy_async(shared, global);",
    "wait_for_copies": "emulator::wait_for_copies();",
    "barrier_init": "emulator::mbarriers[barrier] = {arrivals, arrivals, 0, 0};",
    "barriers_initialized": "",
    "barrier_arrive": "emulator::arrive(barrier, 0);",
    "barrier_wait": "emulator::wait(barrier, parity);",
    "barrier_arrive_expecting": "emulator::arrive(barrier, bytes);",
    "bulk_copy": "emulator::bulk_copy(shared, global, bytes, barrier);",
    "writes_before_copies": "",
    "named_barrier_wait": "emulator::named_barrier(name, threads, true);",
    "named_barrier_arrive": "emulator::named_barrier(name, threads, false);",
    "multiply_add": "emulator::multiply_add<T>(c, a, b);",
    "l2_policy": "return 0;",
    "prefetch_to_l2": "",
}
STATEMENTS = {  # instructions inside of functions
    r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x);",
    r'asm\("rcp\.approx.*?\)\);': "y = 1 / x;",
    r'asm volatile\("and\.b32.*?\)\)\);': "first = first_part(x) & 0xffffe000u;",
    r'asm volatile\("" : "\+r"\(activation\)\);': "",
    r"bool complete = true;": "bool complete = true; emulator::yield();",  # look: others must get on meanwhile
    r"#include <cooperative_groups.h>": "",
}

WRAPPER = r"""
namespace ln = TORCH_EXTENSION_NAME;
static std::string message, names;
template <typename Call>
static const char* emulate(const Call& call) {
  std::vector<std::vector<unsigned char>> memory;
  const auto allocate = [](size_t bytes, void* owner) -> void* {
    auto& memory = *static_cast<std::vector<std::vector<unsigned char>>*>(owner);
    memory.emplace_back(bytes + 128, 0xff);
    return reinterpret_cast<void*>((uintptr_t(memory.back().data()) + 127) / 128 * 128);
  };
  message.clear();
  try {
    const cudaError_t error = ln::launch(call, {allocate, &memory}, nullptr);
    if (error != cudaSuccess) message = "cudaError " + std::to_string(int(error));
  } catch (const std::exception& e) {
    message = e.what();
  }
  return message.c_str();
}
extern "C" {
void emulate_gpu(int sms, int shared_bytes, int code, int seed, int refuse) {
  emulator::gpu = {sms, 1 << 20, shared_bytes, code};
  emulator::random_numbers.seed(seed);
  emulator::cooperative_error = refuse ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
  emulator::kernels_run.clear();
}
const char* emulated_kernels() {
  names.clear();
  for (const auto& name : emulator::kernels_run) names += name + "\n";
  return names.c_str();
}
const char* emulate_forward(const ln::Forward* call) { return emulate(*call); }
const char* emulate_backward(const ln::Backward* call) { return emulate(*call); }
const char* emulate_convolution(const ln::Convolution* call) { return emulate(*call); }
}
"""


def end_of(text, start, opening="{", closing="}"):
    """The place after the bracket that closes the one at text[start]."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced")


def emulated(source):
    """CUDA C++ as C++ for emulator.h."""
    for name, body in BODIES.items():
        found = list(
            re.finditer(rf"^(?:\[\[maybe_unused\]\] )?__device__ [^;{{}}]*?\b{name}\([^{{;]*?\)\s*{{", source, re.M)
        )
        assert found, f"no function {name}"
        for match in reversed(found):
            end = end_of(source, match.end() - 1)
            source = source[: match.end()] + " " + body + " }" + source[end:]
    for pattern, statement in STATEMENTS.items():
        source, count = re.subn(pattern, lambda _: statement, source)  # noqa: B023
        assert count, f"no {pattern}"

    # Shared memory: a reference to the block's own, found by the address of a static variable.
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
        r"auto* \2 = reinterpret_cast<\1*>(emulator::current->block->dynamic);", source,
    )  # fmt: skip

    def declarations(match):
        text, result = match[1], ""
        text = re.sub(r"__align__\(\d+\) ", "", text)
        head = re.match(r"(?:typename )?[\w:]+(?:<(?:[^<>]|<[^<>]*>)*>)? ", text)
        for declarator in re.split(r",\s*(?![^<\[]*[>\]])", text[head.end() :]):
            name, dims = re.fullmatch(r"(\w+)((?:\[[^\]]*\])*)", declarator.strip()).groups()
            result += (
                f"static const char {name}_declared = 0; using {name}_type = {head[0].strip()}{dims}; "
                f"auto& {name} = emulator::shared<{name}_type>(&{name}_declared);"
            )
        return result

    source = re.sub(r"__shared__ ([^;]+);", declarations, source)

    # Kernels tell that they ran.
    position = 0
    while match := re.compile(r"__global__ ").search(source, position):
        declared = (
            source.index("(", source.index(")", match.end()) + 1)
            if "__launch_bounds__" in source[match.end() : match.end() + 30]
            else match.end()
        )
        position = match.end()
        brace, semicolon = source.find("{", declared), source.find(";", declared)
        if 0 <= semicolon < brace:
            continue
        source = (
            source[: brace + 1]
            + " if (threadIdx.x + blockIdx.x == 0) emulator::kernels_run.insert(__PRETTY_FUNCTION__);"
            + source[brace + 1 :]
        )

    # Launches.
    while (at := source.find("<<<")) >= 0:
        start = re.search(r"(\w+(?:<[^;{}()]*>)?)\s*$", source[:at]).start()
        close = source.index(">>>", at)
        arguments_end = end_of(source, source.index("(", close), "(", ")")
        kernel, configuration = source[start:at].strip(), source[at + 3 : close]
        arguments = source[close + 3 : arguments_end].strip()
        parts = split_arguments(configuration)
        source = (
            f"{source[:start]}emulator::run({parts[0]}, {parts[1]}, {parts[2]}, false, [&] {{ {kernel}{arguments}; }})"
            + source[arguments_end:]
        )
    return '#include "emulator.h"\n' + source + WRAPPER


def split_arguments(text):
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    return [*parts, text[last:].strip()]


def build():
    """The path of the library, compiled once for each source."""
    cuda_home, _ = layernorm_inline._find_cuda_home()
    text = emulated(layernorm_inline.CUDA_SOURCE)
    key = hashlib.sha256((text + (HERE / "emulator.h").read_text()).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tempfile.gettempdir()), "layernorm_emulator_" + key)
    library = folder / "emulator.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.cpp").write_text(text)
        flags = [
            "-std=c++17",
            "-O1",
            "-mfma",
            "-ffp-contract=fast",
            "-fPIC",
            "-shared",
            "-Wl,-Bsymbolic",
            "-w",
            "-DTORCH_EXTENSION_NAME=emulated",
        ]
        new = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["g++", *flags, f"-I{HERE}", f"-I{cuda_home}/include", str(folder / "kernels.cpp"), "-o", str(new)],
            check=True,
        )
        new.rename(library)
    return library


POINTER, LONG, DOUBLE, INT, BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int, ctypes.c_bool


def structure(name, text):
    return type(name, (ctypes.Structure,), {"_fields_": [(n, t) for t, names in text for n in names.split()]})


Forward = structure("Forward", [
    (POINTER, "input weight bias output mean rstd"), (LONG, "rows cols"), (DOUBLE, "eps"), (INT, "dtype"), (BOOL, "affine_float32"),
    (INT, "activation"), (DOUBLE, "scale"),
])  # fmt: skip
Backward = structure("Backward", [
    (POINTER, "grad_output input mean rstd weight grad_input grad_weight grad_bias"), (LONG, "rows cols"), (INT, "dtype"),
    (BOOL, "affine_float32"), (POINTER, "bias"), (INT, "activation"), (DOUBLE, "scale"),
])  # fmt: skip
Convolution = structure("Convolution", [
    (POINTER, "input conv_weight conv_bias weight bias output rstd"), (LONG, "batch"), (INT, "depth height"), (DOUBLE, "eps scale"),
    (INT, "dtype"), (BOOL, "affine_float32 tf32"),
])  # fmt: skip
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2}


def pointer(t):
    return None if t is None else t.data_ptr()


class Emulator:
    """A GPU of a few SMs. The numbers are those of Hopper unless given."""

    libraries = {}  # by GPU, as the host code asks only once what it runs on

    def __init__(self, sms=8, shared_bytes=227 << 10, code=90, seed=0, refuse=False):
        gpu = (sms, shared_bytes, code)
        if gpu not in self.libraries:
            library = build()
            copy = library.with_name(f"{os.getpid()}_{sms}_{shared_bytes}_{code}.so")
            shutil.copy(library, copy)
            self.libraries[gpu] = ctypes.CDLL(str(copy))
            copy.unlink()
            for name in ("emulate_forward", "emulate_backward", "emulate_convolution", "emulated_kernels"):
                getattr(self.libraries[gpu], name).restype = ctypes.c_char_p
        self.library = self.libraries[gpu]
        self.library.emulate_gpu(*gpu, seed, int(refuse))

    def run(self, name, call):
        message = getattr(self.library, name)(ctypes.byref(call)).decode()
        if message:
            raise RuntimeError(message)

    def kernels(self):
        """The kernels that ran since this GPU was made, each as "name [with template arguments]"."""
        return {
            re.search(r"(\w+)\(", name)[1] + name[name.find(" [with") :].replace("emulated::{anonymous}::", "")
            for name in self.library.emulated_kernels().decode().split("\n")[:-1]
        }

    def layer_norm(self, x, normalized_shape, weight=None, bias=None, eps=1e-5, activation=None, scale=1.0):
        return Function.apply(x, normalized_shape, weight, bias, eps, activation, scale, self)


def like(t):
    """Of t's shape, its misalignment, full of NaNs."""
    memory = torch.full((t.numel() + 64,), float("nan"), dtype=t.dtype)
    wanted, each = t.data_ptr() % 64, t.element_size()
    first = (wanted - memory.data_ptr()) % 64 // each
    return memory[first : first + t.numel()].view(t.shape)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shape, weight, bias, eps, activation, scale, gpu):
        cols = 1
        for size in shape:
            cols *= size
        rows = x.numel() // cols
        affine = weight if weight is not None else bias
        statistics = torch.full((2, rows), float("nan"), dtype=x.dtype if x.dtype == torch.float64 else torch.float32)
        y = like(x)
        common = dict(
            rows=rows, cols=cols, dtype=DTYPES[x.dtype], activation=ACTIVATIONS[activation], scale=scale,
            affine_float32=affine is not None and affine.dtype == torch.float32,
        )  # fmt: skip
        gpu.run("emulate_forward", Forward(
            input=pointer(x), weight=pointer(weight), bias=pointer(bias), output=pointer(y),
            mean=pointer(statistics[0]), rstd=pointer(statistics[1]), eps=eps, **common,
        ))  # fmt: skip
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.common, ctx.gpu = common, gpu
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, statistics = ctx.saved_tensors
        wanted = [t is not None and ctx.needs_input_grad[i] for i, t in ((0, x), (2, weight), (3, bias))]
        grads = [like(t) if want else None for want, t in zip(wanted, (x, weight, bias))]
        ctx.gpu.run("emulate_backward", Backward(
            grad_output=pointer(dy), input=pointer(x), mean=pointer(statistics[0]), rstd=pointer(statistics[1]),
            weight=pointer(weight), bias=pointer(bias) if ctx.common["activation"] else None,
            grad_input=pointer(grads[0]), grad_weight=pointer(grads[1]), grad_bias=pointer(grads[2]), **ctx.common,
        ))  # fmt: skip
        return grads[0], None, grads[1], grads[2], None, None, None, None
