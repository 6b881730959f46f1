"""Builds and loads the kernels of CUDA_SOURCE for the CPU (see emulator.h), so that they can be tried without a GPU.

    gpu = Emulator(sms=4)
    y = gpu.layer_norm(x, (cols,), weight, bias)    as layernorm_inline.layer_norm, of CPU tensors, with gradients
    gpu.convolution(x, conv_weight, ...)            as the C++ struct Convolution
    gpu.kernels                                     which ran

The source is compiled as it is, but for what C++ does not have: kernel launches, shared memory, and functions made of
instructions, whose bodies this file replaces. Where such a function is new or renamed, add it to BODIES.
"""

import ctypes
import fcntl
import hashlib
import math
import os
import platform
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
    "keep_pointer": "return pointer;",
    "shared_address": "return static_cast<const unsigned char*>(p) - emulator::current->block->dynamic;",
    "copy_or_zero": "emulator::copy_async(shared, global, exists);",
    "copy_async": "emulator::copy_async(shared, global);",
    "copy_float": "emulator::copy_async(shared, global, true, 4);",
    "wait_for_copies": "emulator::wait_for_copies();",
    "barrier_init": "emulator::mbarriers[barrier] = {arrivals, arrivals, 0, 0};",
    "barriers_initialized": "",
    "barrier_arrive": "emulator::arrive(barrier, 0);",
    "barrier_arrive_with_copies": "emulator::arrive_with_copies(barrier);",
    "barrier_wait": "emulator::wait(barrier, parity);",
    "barrier_arrive_expecting": "emulator::arrive(barrier, bytes);",
    "bulk_copy": "emulator::bulk_copy(shared, global, bytes, barrier);",
    "writes_before_copies": "",
    "named_barrier_wait": "emulator::named_barrier(name, threads, true);",
    "named_barrier_arrive": "emulator::named_barrier(name, threads, false);",
    "multiply_add": "emulator::multiply_add<T>(c, a, b);",
    "multiply_add_async": "emulator::multiply_add_async<T>(c, a, b);",
    "keep_in_registers": "",
    "wait_for_previous": "emulator::wait_for_previous();",
    "l2_policy": "return 0;",
    "prefetch_to_l2": "emulator::check_prefetch(global, bytes);",
}
STATEMENTS = {  # instructions inside of functions
    r"defined\(__CUDA_ARCH_FEAT_SM90_ALL\)": "!defined(EMULATED_ARCH)",
    r'asm volatile\("(?:wgmma\.(?:fence|commit|wait)|setmaxnreg).*?\);': "",
    r"attributes\.maxThreadsPerBlock": "kThreads<split.value>",
    r"__CUDA_ARCH__": "EMULATED_ARCH",
    r'asm volatile\("ld\.global\.L2.*?\)\);': "bits = *reinterpret_cast<const uint4*>(p);",
    r'asm volatile\("prefetch\.global\.L2.*?\)\);': "emulator::check_prefetch(static_cast<const char*>(global) + at, 16);",
    r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x);",
    r'asm\("rcp\.approx.*?\)\);': "y = 1 / x;",
    r'asm volatile\("and\.b32.*?\)\)\);': "first = first_part(x) & 0xffffe000u;",
    r'asm volatile\("" : "\+r"\(activation\)\);': "",
    r"bool complete = true;": "bool complete = true; emulator::poll();",
    r"uint64_t\(__float_as_uint\(pair.y\)\) << 32 \| __float_as_uint\(pair.x\)": (
        "uint64_t(emulator::bits_of_arithmetic(pair.y)) << 32 | emulator::bits_of_arithmetic(pair.x)"
    ),
    r"#include <cooperative_groups.h>": "",
}

WRAPPER = r"""
namespace ln = TORCH_EXTENSION_NAME;

// The tensors of a call, in guarded memory while it runs.
class Tensors {
 public:
  void read(const void*& p, size_t bytes, const char* name) {
    if (p == nullptr) return;
    void* copy = add(p, bytes, name);
    memcpy(copy, p, bytes);
    emulator::tensors.back()->forbid_writes();
    p = copy;
  }
  template <typename T>
  void written(T*& p, size_t bytes, const char* name) {
    if (p == nullptr) return;
    outputs_.push_back({p, add(p, bytes, name), bytes});
    p = static_cast<T*>(outputs_.back().copy);
  }
  // The piece before, if there is one, is given back: it can no longer be touched.
  void* scratch(size_t bytes) {
    if (has_scratch_) emulator::tensors.pop_back(), names_.pop_back();
    has_scratch_ = true;
    return add(nullptr, bytes, "scratch");
  }
  void finish() {
    for (size_t i = 0; i < names_.size(); ++i) emulator::tensors[i]->check(names_[i]);
    for (const Output& output : outputs_) memcpy(output.to, output.copy, output.bytes);
  }
  ~Tensors() { emulator::tensors.clear(); }

 private:
  struct Output {
    void *to, *copy;
    size_t bytes;
  };
  std::vector<std::string> names_;
  std::vector<Output> outputs_;
  bool has_scratch_ = false;

  void* add(const void* like, size_t bytes, const char* name) {
    emulator::tensors.push_back(std::make_unique<emulator::Guarded>(bytes, like));
    names_.push_back(name);
    return emulator::tensors.back()->data();
  }
};

static void guard(ln::Forward& call, Tensors& tensors) {
  const size_t each = ln::size_of(call.dtype), all = call.rows * call.cols * each;
  const size_t of_cols = call.cols * (call.affine_float32 ? 4 : each), of_rows = call.rows * (each == 8 ? 8 : 4);
  tensors.read(call.input, all, "input");
  tensors.read(call.weight, of_cols, "weight");
  tensors.read(call.bias, of_cols, "bias");
  tensors.written(call.output, all, "output");
  tensors.written(call.mean, of_rows, "mean");
  tensors.written(call.rstd, of_rows, "rstd");
}

static void guard(ln::Backward& call, Tensors& tensors) {
  const size_t each = ln::size_of(call.dtype), all = call.rows * call.cols * each;
  const size_t of_cols = call.cols * (call.affine_float32 ? 4 : each), of_rows = call.rows * (each == 8 ? 8 : 4);
  tensors.read(call.grad_output, all, "grad_output");
  tensors.read(call.input, all, "input");
  tensors.read(call.mean, of_rows, "mean");
  tensors.read(call.rstd, of_rows, "rstd");
  tensors.read(call.weight, of_cols, "weight");
  tensors.read(call.bias, of_cols, "bias");
  tensors.written(call.grad_input, all, "grad_input");
  tensors.written(call.grad_weight, of_cols, "grad_weight");
  tensors.written(call.grad_bias, of_cols, "grad_bias");
}

static void guard(ln::Convolution& call, Tensors& tensors) {
  const size_t each = ln::size_of(call.dtype), places = call.batch * call.depth * call.height;
  const size_t affine = 64 * (call.affine_float32 ? 4 : each);
  tensors.read(call.input, places * 32 * 32 * each, "input");
  tensors.read(call.conv_weight, 32 * 64 * 64 * each, "conv_weight");
  tensors.read(call.conv_bias, 64 * each, "conv_bias");
  tensors.read(call.weight, affine, "weight");
  tensors.read(call.bias, affine, "bias");
  tensors.written(call.output, places * 4 * 64 * 64 * each, "output");
  tensors.written(call.rstd, places * 4 * 64 * 4, "rstd");
}

static std::string answer;

template <typename Call>
static const char* emulate(Call call) {
  const auto allocate = [](size_t bytes, void* owner) { return static_cast<Tensors*>(owner)->scratch(bytes); };
  answer.clear();
  try {
    Tensors tensors;
    guard(call, tensors);
    const cudaError_t error = ln::launch(call, {allocate, &tensors}, nullptr);
    if (error != cudaSuccess) emulator::fail("cudaError " + std::to_string(int(error)));
    tensors.finish();
  } catch (const std::exception& e) {
    answer = e.what();
  }
  return answer.c_str();
}

extern "C" {
void emulate_gpu(int sms, int shared_bytes, int code, int seed, bool refuse, bool dry) {
  emulator::gpu = {sms, 1 << 20, shared_bytes, code};
  emulator::random_numbers.state = seed;
  emulator::dry = dry;
  emulator::cooperative_error = refuse ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
  for (emulator::Kernel* kernel : emulator::Kernel::all()) kernel->ran = false;
}
const char* emulated_kernels(bool all) {
  answer.clear();
  for (const emulator::Kernel* kernel : emulator::Kernel::all()) {
    if (all || kernel->ran) answer += kernel->name + "\n";
  }
  return answer.c_str();
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
        source, count = re.subn(pattern, lambda _: statement, source, flags=re.S)  # noqa: B023
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

    # Kernels begin by telling so, with their launch bounds.
    kernel = re.compile(r"__global__ void (?:__launch_bounds__(?=\())?")
    position = 0
    while match := kernel.search(source, position):
        position = match.end()
        bounds_end = end_of(source, position, "(", ")") if source[position] == "(" else position
        brace, semicolon = source.find("{", bounds_end), source.find(";", bounds_end)
        if 0 <= semicolon < brace:
            continue  # declared only
        bounds = source[position:bounds_end]
        source = f"{source[: brace + 1]} struct Here {{}}; emulator::begin<Here>{bounds};{source[brace + 1 :]}"

    # Launches.
    while (at := source.find("<<<")) >= 0:
        start = re.search(r"(\w+(?:<[^;{}()]*>)?)\s*$", source[:at]).start()
        close = source.index(">>>", at)
        arguments_end = end_of(source, source.index("(", close), "(", ")")
        kernel, configuration = source[start:at].strip(), source[at + 3 : close]
        arguments = source[close + 3 : arguments_end].strip()
        parts = split_arguments(configuration)
        source = (
            f"{source[:start]}emulator::run({parts[0]}, {parts[1]}, {parts[2]}, emulator::Launch::Plain, [&] {{ {kernel}{arguments}; }})"
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


FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-w", "-DTORCH_EXTENSION_NAME=emulated",
    "-ffp-contract=fast", *(["-mfma"] if platform.machine() == "x86_64" else []),
    "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another fiber for an error
]  # fmt: skip


def build(before_hopper=False):
    """The path of the library, compiled once for each source: from code for sm_80, or for Hopper and newer."""
    cuda_home, _ = layernorm_inline._find_cuda_home()
    text = emulated(layernorm_inline.CUDA_SOURCE)
    flags = [*FLAGS, *(["-DEMULATED_ARCH=800"] if before_hopper else [])]
    key = hashlib.sha256("".join([text, (HERE / "emulator.h").read_text(), *flags]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tempfile.gettempdir()), "layernorm_emulator_" + key)
    folder.mkdir(parents=True, exist_ok=True)
    source, library, unfinished = folder / "kernels.cpp", folder / "emulator.so", folder / "unfinished.so"
    with open(folder / "lock", "w") as lock:  # of several processes one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source.write_text(text)
            folders = [HERE, *Path(cuda_home).glob("include"), *Path(cuda_home).glob("targets/*/include")]
            includes = [f"-I{folder}" for folder in folders]
            subprocess.run(["g++", *flags, *includes, str(source), "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


# ---- The binding, for CPU tensors ----

# What a CPU calls by another name, or would take long.
BINDING = {
    r"#include <(?:c10|ATen)/cuda/.*?>\n": "",
    r"_IMPL\(TORCH_EXTENSION_NAME, CUDA, m\)": "_IMPL(TORCH_EXTENSION_NAME, CPU, m)",
    r"AutocastCUDA": "AutocastCPU",
    r"cached_cast\(at::kFloat, (\w+)\)": r"cached_cast(at::kFloat, \1, at::kCPU)",
    r"kConvolutionBytes = int64_t\(1\) << 28": "kConvolutionBytes = int64_t(1) << 19",  # still several inputs
}
BINDING_BEGINS = r"""
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <cstring>
#include <mutex>
#include <dlfcn.h>
#include <cuda_runtime_api.h>

inline thread_local int guards = 0;  // that make the tensors' device current
namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(Device) { ++guards; }
  ~CUDAGuard() { --guards; }
};
inline cudaStream_t getCurrentCUDAStream() { return reinterpret_cast<cudaStream_t>(1); }  // not the default one
inline int device_count() { return 1; }
}  // namespace c10::cuda
namespace at::detail {
inline Tensor empty_cuda(IntArrayRef sizes, TensorOptions options) {
  const Tensor t = at::empty(sizes, options);
  memset(t.data_ptr(), 0xff, t.nbytes());  // NaN
  return t;
}
}  // namespace at::detail
#define C10_CUDA_CHECK(error) TORCH_CHECK(error == cudaSuccess)
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
"""
BINDING_ENDS = r"""
namespace TORCH_EXTENSION_NAME {
template <typename Call>
cudaError_t emulate(const char* function, const Call& call, Scratch scratch, cudaStream_t stream) {
  TORCH_CHECK(guards > 0, "the tensors' device is not current");
  TORCH_CHECK(stream == c10::cuda::getCurrentCUDAStream(), "not the current stream");
  memset(scratch.allocate(100, scratch.owner), 0xff, 100);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  static void* const library = [] {
    void* handle = dlopen(EMULATED_KERNELS, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(handle != nullptr, dlerror());
    reinterpret_cast<void (*)(int, int, int, int, bool, bool)>(dlsym(handle, "emulate_gpu"))(8, 227 << 10, 90, 0, false, false);
    return handle;
  }();
  const std::string message = reinterpret_cast<const char* (*)(const Call*)>(dlsym(library, function))(&call);
  TORCH_CHECK(message.empty(), message);
  return cudaSuccess;
}
cudaError_t launch(const Forward& call, Scratch scratch, cudaStream_t stream) {
  return emulate("emulate_forward", call, scratch, stream);
}
cudaError_t launch(const Backward& call, Scratch scratch, cudaStream_t stream) {
  return emulate("emulate_backward", call, scratch, stream);
}
cudaError_t launch(const Convolution& call, Scratch scratch, cudaStream_t stream) {
  return emulate("emulate_convolution", call, scratch, stream);
}
bool fits_convolution(DType, bool) { return true; }
}  // namespace TORCH_EXTENSION_NAME
"""


def replaced(text, replacements):
    for pattern, replacement in replacements.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"no {pattern}"
    return text


def load_binding():
    """The ops of CPP_SOURCE for CPU tensors, which run the emulated kernels."""
    from torch.utils import cpp_extension

    cuda_home, _ = layernorm_inline._find_cuda_home()
    kernels = build()
    text = BINDING_BEGINS + replaced(layernorm_inline.CPP_SOURCE, BINDING) + BINDING_ENDS
    text = f'#define LAYERNORM_COMPILED_FOR ""\n#define EMULATED_KERNELS "{kernels}"\n{text}'
    name = "layernorm_emulated_" + hashlib.sha256("".join([text, torch.__version__]).encode()).hexdigest()[:16]
    folder = kernels.parent.with_name(name)
    folder.mkdir(exist_ok=True)
    cpp_extension.load_inline(
        name, text, extra_cflags=["-O0", "-w"], extra_ldflags=["-Wl,-Bsymbolic"], extra_include_paths=[f"{cuda_home}/include"],
        build_directory=str(folder), is_python_module=False,
    )  # fmt: skip
    return getattr(torch.ops, name)


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
    """A GPU of a few SMs. Numbers are those of Hopper unless given; the seed is that of all that happens by chance.

    refuse: the device has no room for cooperative launches. dry: kernels end as soon as they have begun.
    """

    libraries = {}  # by GPU, as the host code asks only once what it runs on

    def __init__(self, sms=8, shared_bytes=227 << 10, code=90, seed=0, refuse=False, dry=False):
        gpu = (sms, shared_bytes, code)
        if gpu not in self.libraries:
            library = build(80 <= code < 90)
            copy = library.with_name(f"{os.getpid()}_{sms}_{shared_bytes}_{code}.so")
            shutil.copy(library, copy)
            self.libraries[gpu] = ctypes.CDLL(str(copy))
            copy.unlink()
            for name in ("emulate_forward", "emulate_backward", "emulate_convolution", "emulated_kernels"):
                getattr(self.libraries[gpu], name).restype = ctypes.c_char_p
        self.library = self.libraries[gpu]
        self.state = (*gpu, seed, refuse, dry)
        self.kernels = set()  # that ran, as "room::name<template arguments>"

    def run(self, name, call):
        self.library.emulate_gpu(*self.state)
        message = getattr(self.library, name)(ctypes.byref(call)).decode()
        self.kernels |= set(self.library.emulated_kernels(False).decode().split("\n")[:-1])
        if message:
            raise RuntimeError(message)

    def all_kernels(self):
        """That the library has, whether they ran or not."""
        return set(self.library.emulated_kernels(True).decode().split("\n")[:-1])

    def layer_norm(self, x, normalized_shape, weight=None, bias=None, eps=1e-5, activation=None, scale=1.0):
        return Function.apply(x, normalized_shape, weight, bias, eps, activation, scale, self)

    def convolution(self, x, conv_weight, conv_bias, weight, bias, *, eps, scale=1.0, tf32=False, for_backward=False):
        """(output, rstd): see Convolution in layernorm_inline.py; without for_backward, rstd is None."""
        batch, _, depth, height, _ = x.shape
        y = empty((batch, 64, 2 * depth, 2 * height, 64), x.dtype)
        rstd = empty(y.shape[:-1], torch.float32) if for_backward else None
        affine = weight if weight is not None else bias
        self.run("emulate_convolution", Convolution(
            input=pointer(x), conv_weight=pointer(conv_weight), conv_bias=pointer(conv_bias), weight=pointer(weight),
            bias=pointer(bias), output=pointer(y), rstd=pointer(rstd), batch=batch, depth=depth, height=height, eps=eps,
            scale=scale, dtype=DTYPES[x.dtype], affine_float32=affine is not None and affine.dtype == torch.float32,
            tf32=tf32,
        ))  # fmt: skip
        return y, rstd


LINE = 128  # bytes; what a GPU's memory is allocated in begins on one


def empty(shape, dtype, offset=0):
    """A tensor of NaNs that begins so many elements after a line's beginning."""
    count, each = math.prod(shape), dtype.itemsize
    memory = torch.full((count + offset + LINE // each,), math.nan, dtype=dtype)
    first = -memory.data_ptr() % LINE // each + offset
    return memory[first : first + count].view(shape)


def placed(t, offset=0):
    """A copy of t, as empty() places it."""
    return None if t is None else empty(t.shape, t.dtype, offset).copy_(t)


class Function(torch.autograd.Function):
    """layer_norm as the binding calls the kernels: outputs begin on a line, statistics are saved for gradients."""

    @staticmethod
    def forward(ctx, x, shape, weight, bias, eps, activation, scale, gpu):
        cols = math.prod(shape)
        rows = x.numel() // cols
        affine = weight if weight is not None else bias
        y = empty(x.shape, x.dtype)
        common = dict(
            rows=rows, cols=cols, dtype=DTYPES[x.dtype], activation=ACTIVATIONS[activation], scale=scale,
            affine_float32=affine is not None and affine.dtype == torch.float32,
        )  # fmt: skip
        statistics = [empty((rows,), torch.promote_types(x.dtype, torch.float32)) for _ in "12"]
        mean, rstd = statistics if any(ctx.needs_input_grad) else (None, None)
        if rows > 0:
            gpu.run("emulate_forward", Forward(
                input=pointer(x), weight=pointer(weight), bias=pointer(bias), output=pointer(y), mean=pointer(mean),
                rstd=pointer(rstd), eps=eps, **common,
            ))  # fmt: skip
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.common, ctx.gpu = common, gpu
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = [t is not None and ctx.needs_input_grad[i] for i, t in ((0, x), (2, weight), (3, bias))]
        grads = [empty(t.shape, t.dtype) if want else None for want, t in zip(wanted, (x, weight, bias))]
        ctx.gpu.run("emulate_backward", Backward(
            grad_output=pointer(dy), input=pointer(x), mean=pointer(mean), rstd=pointer(rstd), weight=pointer(weight),
            bias=pointer(bias) if ctx.common["activation"] else None, grad_input=pointer(grads[0]),
            grad_weight=pointer(grads[1]), grad_bias=pointer(grads[2]), **ctx.common,
        ))  # fmt: skip
        return grads[0], None, grads[1], grads[2], None, None, None, None
