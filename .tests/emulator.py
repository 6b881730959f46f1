"""layernorm_inline on the CPU, on an emulated GPU (see emulator.h): the module, whose ops are those of the binding
compiled for CPU tensors, which launches the kernels compiled by g++.

    module = load_module()          as `import layernorm_inline`, for CPU tensors
    with on(GPUS["hopper"](8)):     the calls inside run on such a GPU
        y = module.layer_norm(x, (768,))
    kernels()                       the names of those that ran since

The sources are compiled as they are, but for what C++ does not have: kernel launches, shared memory, and functions made
of instructions, whose bodies this file replaces. Where such a function is new or renamed, add it to BODIES.
"""

import contextlib
import ctypes
import fcntl
import functools
import glob
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import typing
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE.parent / "layernorm_inline.py"

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
    "let_next_start": "",
    "wait_for_previous": "emulator::wait_for_previous();",
    "l2_policy": "return 0;",
    "prefetch_to_l2": "emulator::check_prefetch(global, bytes);",
    "exceeds_green_context": "return false;",
}
STATEMENTS = {  # instructions inside of functions
    r"defined\(__CUDA_ARCH_FEAT_SM90_ALL\)": "!defined(EMULATED_ARCH)",
    r'asm volatile\("(?:wgmma\.(?:fence|commit|wait)|setmaxnreg).*?\);': "",
    r"attributes\.maxThreadsPerBlock": "Layout<T, layout.kSplit>::kThreads",
    r"__CUDA_ARCH__": "EMULATED_ARCH",
    r'asm volatile\("ld\.global\.L2.*?\)\);': "bits = *reinterpret_cast<const uint4*>(p);",
    r'asm volatile\("prefetch\.global\.L2::evict_last.*?\)\);': "emulator::check_prefetch(static_cast<const char*>(global) + at, 16);",
    r'asm volatile\("prefetch\.global\.L2 \[.*?\)\);': "emulator::check_prefetch(static_cast<const char*>(affine) + at);",
    r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x);",
    r'asm\("rcp\.approx.*?\)\);': "y = 1 / x;",
    r'asm volatile\("and\.b32.*?\);': "high = first[i] & 0xffffe000u;",
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
  template <typename T>
  void read(const T*& p, size_t bytes, const char* name) {
    if (p == nullptr) return;
    void* copy = add(p, bytes, name);
    memcpy(copy, p, bytes);
    emulator::tensors.back()->forbid_writes();
    p = static_cast<const T*>(copy);
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
  const size_t of_cols = call.cols * (call.affine_float32 ? 4 : each), of_rows = call.rows * 4;
  tensors.read(call.input, all, "input");
  tensors.read(call.weight, of_cols, "weight");
  tensors.read(call.bias, of_cols, "bias");
  tensors.written(call.output, all, "output");
  tensors.written(call.mean, of_rows, "mean");
  tensors.written(call.rstd, of_rows, "rstd");
}

static void guard(ln::Backward& call, Tensors& tensors) {
  const size_t each = ln::size_of(call.dtype), all = call.rows * call.cols * each;
  const size_t of_cols = call.cols * (call.affine_float32 ? 4 : each), of_rows = call.rows * 4;
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

#ifdef LAYERNORM_WITH_EPILOGUE
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
#endif

static std::string answer;

template <typename Call>
static const char* emulate(Call call) {
  answer.clear();
  try {
    Tensors tensors;
    guard(call, tensors);
    const cudaError_t error = ln::launch(call, [&](size_t bytes) { return tensors.scratch(bytes); }, nullptr);
    if (error != cudaSuccess) emulator::fail("cudaError " + std::to_string(int(error)));
    if (cudaGetLastError() != cudaSuccess) emulator::fail("a launch that was refused leaves its error behind");
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
}
// Of all kernels, or of those that ran since it was last asked.
const char* emulated_kernels(bool all) {
  answer.clear();
  for (emulator::Kernel* kernel : emulator::Kernel::all()) {
    if (all || kernel->ran) answer += kernel->name + "\n";
    if (!all) kernel->ran = false;
  }
  return answer.c_str();
}
const char* emulate_forward(const ln::Forward* call) { return emulate(*call); }
const char* emulate_backward(const ln::Backward* call) { return emulate(*call); }
#ifdef LAYERNORM_WITH_EPILOGUE
const char* emulate_convolution(const ln::Convolution* call) { return emulate(*call); }
bool emulate_fits(ln::DType dtype, bool tf32) { return ln::fits_convolution(dtype, tf32); }
#endif
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
            re.finditer(
                rf"^(?:\[\[maybe_unused\]\] )?(?:__device__|bool) [^;{{}}]*?\b{name}\([^{{;]*?\)\s*{{", source, re.M
            )
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
    "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-fno-gnu-unique", "-w", "-DTORCH_EXTENSION_NAME=emulated",
    "-ffp-contract=fast", *(["-mfma"] if platform.machine() == "x86_64" else []),
    "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another fiber for an error
]  # fmt: skip


def cuda_include():
    """The folders of CUDA's headers, of whatever toolkit there is; None without one."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))]
    homes += ["/usr/local/cuda", *glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/cu[0-9]*")]
    for home in filter(None, homes):
        folders = [path.parent for path in Path(home).glob("**/include/cuda_runtime_api.h")]
        if folders:
            return folders
    return None


def can_build():
    return shutil.which("g++") is not None and cuda_include() is not None


def cache(name, *texts):
    """A folder for what is built from these texts."""
    key = hashlib.sha256("".join(texts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or tempfile.gettempdir(), f"layernorm_{name}_{key}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def lock(folder):
    """Of several processes one builds. (PyTorch waits for a file named lock.)"""
    with open(folder / "one_builds", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.lru_cache
def sources():
    """layernorm_inline as it is: for its sources. The environment keeps it from compiling anything."""
    text = SOURCE.read_text()
    namespace = {"__name__": "layernorm_sources"}
    exec(compile(re.sub(r"= _load\(_NAME\)", "= None, ''", text), str(SOURCE), "exec"), namespace)
    return namespace["CUDA_SOURCE"], namespace["CPP_SOURCE"]


EPILOGUE = ["-DLAYERNORM_WITH_EPILOGUE"]  # for the second library of a source


def build_kernels(before_hopper=False, macros=()):
    """The path of a library, compiled once for each source: from code for sm_80, or for Hopper and newer."""
    text = emulated(sources()[0])
    flags = [*FLAGS, *macros, *(["-DEMULATED_ARCH=800"] if before_hopper else [])]
    folder = cache("kernels", text, (HERE / "emulator.h").read_text(), *flags)
    source, library, unfinished = folder / "kernels.cpp", folder / "emulator.so", folder / "unfinished.so"
    with lock(folder):
        if not library.exists():
            source.write_text(text)
            includes = [f"-I{path}" for path in (HERE, *cuda_include())]
            subprocess.run(["g++", *flags, *includes, str(source), "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


# ---- The binding, for CPU tensors ----

# What a CPU calls by another name, or would take long.
BINDING = {
    r"#include <(?:c10|ATen)/cuda/.*?>\n": "",
    r"c10::kCUDA": "c10::kCPU",
    r"AutocastCUDA": "AutocastCPU",
    r"kConvolutionBytes = int64_t\(1\) << 28": "kConvolutionBytes = int64_t(1) << 19",  # still several inputs
    r"kDoubleBackwardElements = 1 << 22": "kDoubleBackwardElements = 1 << 6",  # several parts
}
BINDING_BEGINS = r"""
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <cstring>
#include <map>
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
static void* kernels = nullptr;  // the library of the GPU that calls run on
template <typename F>
F* of_kernels(const char* name) {
  return reinterpret_cast<F*>(dlsym(kernels, name));
}
extern "C" const char* emulate_on(const char* library) {
  static std::map<std::string, void*> libraries;
  void*& handle = libraries[library];
  if (handle == nullptr) handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  kernels = handle;
  return handle == nullptr ? dlerror() : nullptr;
}

namespace TORCH_EXTENSION_NAME {
template <typename Call>
cudaError_t emulate(const char* function, const Call& call, const Allocate& allocate, cudaStream_t stream) {
  TORCH_CHECK(guards > 0, "the tensors' device is not current");
  TORCH_CHECK(stream == c10::cuda::getCurrentCUDAStream(), "not the current stream");
  memset(allocate(100), 0xff, 100);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string message = of_kernels<const char*(const Call*)>(function)(&call);
  TORCH_CHECK(message.empty(), message);
  return cudaSuccess;
}
cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_forward", call, allocate, stream);
}
cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_backward", call, allocate, stream);
}
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_convolution", call, allocate, stream);
}
bool fits_convolution(DType dtype, bool tf32) {
  TORCH_CHECK(guards > 0, "the tensors' device is not current");
  return of_kernels<bool(DType, bool)>("emulate_fits")(dtype, tf32);
}
}  // namespace TORCH_EXTENSION_NAME
"""


def replaced(text, replacements):
    for pattern, replacement in replacements.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"no {pattern}"
    return text


@functools.lru_cache
def binding():
    """(CPP_SOURCE for CPU tensors, the folder of its libraries)."""
    text = BINDING_BEGINS + replaced(sources()[1], BINDING) + BINDING_ENDS
    text = f'#define LAYERNORM_COMPILED_FOR ""\n{text}'
    return text, cache("binding", text, torch.__version__)


def binding_name():
    return binding()[1].name


BINDINGS = {}  # those loaded, by the macros that they were compiled with


def load_binding(name):
    """Takes _load's place."""
    from torch.utils import cpp_extension

    macros = tuple(EPILOGUE if name.endswith("_epilogue") else ())
    text, folder = binding()
    folder /= name
    folder.mkdir(exist_ok=True)
    with lock(folder):
        cpp_extension.load_inline(
            name, text, extra_cflags=["-O0", "-w", *macros], extra_ldflags=["-Wl,-Bsymbolic"],
            extra_include_paths=[str(path) for path in cuda_include()], build_directory=str(folder),
            is_python_module=False,
        )  # fmt: skip
    BINDINGS[macros] = ctypes.CDLL(str(folder / f"{name}.so")).emulate_on
    BINDINGS[macros].restype = ctypes.c_char_p
    if CURRENT:
        switch_to(CURRENT[-1])
    return getattr(torch.ops, name), None


# What the Python code asks of CUDA tensors.
MODULE = {
    r"(def _load\(name\):\n.*\n)": r"\1    return __import__('emulator').load_binding(name)\n",
    r"\n_NAME = .*": r"\n_NAME = __import__('emulator').binding_name()",
    r"\.is_cuda\b": ".is_cpu",
    r"is_autocast_enabled\(\)": "is_autocast_enabled('cpu')",
}


@functools.lru_cache
def load_module():
    """layernorm_inline for CPU tensors, as the module layernorm_emulated."""
    text = replaced(SOURCE.read_text(), MODULE)
    path = cache("module", text) / "layernorm_emulated.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("layernorm_emulated", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- GPUs ----


class Gpu(typing.NamedTuple):
    """What the rooms ask about."""

    name: str
    sms: int
    code: int  # 90: machine code for sm_90
    shared_bytes: int  # of a block, at most
    refuses: bool = False  # blocks that wait for one another, as under MPS

    def __str__(self):
        return f"{self.name}_{self.sms}"


GPUS = {
    "hopper": functools.partial(Gpu, "hopper", code=90, shared_bytes=227 << 10),
    "blackwell": functools.partial(Gpu, "blackwell", code=120, shared_bytes=99 << 10),
    "ampere": functools.partial(Gpu, "ampere", code=80, shared_bytes=163 << 10),
    "ada": functools.partial(Gpu, "ada", code=89, shared_bytes=99 << 10),
    "turing": functools.partial(Gpu, "turing", code=75, shared_bytes=64 << 10),
    "refusing": functools.partial(Gpu, "refusing", code=90, shared_bytes=227 << 10, refuses=True),
}


@functools.lru_cache
def libraries_of(sms, code, shared_bytes):
    """The kernels for a GPU, by the macros that they were compiled with: copies for each, as the host code asks only
    once what it runs on."""
    loaded = {}
    for macros in ((), tuple(EPILOGUE)):
        library = build_kernels(80 <= code < 90, macros)
        copy = library.with_name(f"{os.getpid()}_{sms}_{code}_{shared_bytes}.so")
        shutil.copy(library, copy)
        loaded[macros] = ctypes.CDLL(str(copy))
        loaded[macros].emulated_kernels.restype = ctypes.c_char_p
        copy.unlink()
    return loaded


def switch_to(libraries):
    """Calls of the bindings that are loaded run on these."""
    for macros, emulate_on in BINDINGS.items():
        error = emulate_on(libraries[macros]._name.encode())
        assert error is None, error


CURRENT = []  # the libraries of GPUs, innermost last


@contextlib.contextmanager
def on(gpu, seed=0, dry=False):
    """Calls inside run on this GPU. The seed is that of all that happens by chance. dry: kernels end as they begin."""
    libraries = libraries_of(gpu.sms, gpu.code, gpu.shared_bytes)
    CURRENT.append(libraries)
    switch_to(libraries)
    for loaded in libraries.values():
        loaded.emulate_gpu(gpu.sms, gpu.shared_bytes, gpu.code, seed, gpu.refuses, dry)
        loaded.emulated_kernels(False)
    try:
        yield libraries
    finally:
        CURRENT.pop()
        if CURRENT:
            switch_to(CURRENT[-1])


def kernels(libraries, every=False):
    """Names of the kernels that ran on what on() gave, as "room::name<template arguments>", or of all there are."""
    names = {macros: loaded.emulated_kernels(every).decode().splitlines() for macros, loaded in libraries.items()}
    return {f"{'epilogue::' if macros else ''}{name}" for macros in names for name in names[macros]}
