"""Runs layernorm_inline on an emulated GPU, with CPU tensors.

    module = load_module()                         # like `import layernorm_inline`
    with on(GPUS["hopper"](8)) as libraries:       # calls inside run on a Hopper GPU with 8 SMs
        y = module.layer_norm(x, (768,))
        print(kernels(libraries))                  # the names of the kernels that ran

The file's Python code, its C++ binding, compiled for CPU tensors, and its CUDA kernels, compiled by g++ as C++, run
almost unchanged. emulator.h explains how the kernels run.
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
import time
import typing
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE.parent / "layernorm_inline.py"

# ---- The kernels, as C++ ----

# Name of a function of the kernels -> its body on an emulated GPU.
BODIES = {
    "keep_pointer": "return pointer;",
    "shared_address": "return static_cast<const unsigned char*>(p) - emulator::current->block->dynamic;",
    "wait_for_previous": "emulator::wait_for_previous();",
    "l2_policy": "return 0;",
    "prefetch_to_l2": "emulator::check_units(global, bytes); emulator::check_in_tensor(global, bytes - 15);",
}
# Pattern in the kernels -> its replacement: inline assembly, macros of nvcc, and the loop that polls mailboxes.
STATEMENTS = {
    r'asm volatile\("(?:wgmma\.(?:fence|commit)|setmaxnreg|fence\.|griddepcontrol\.launch|" : "\+f").*?\);': ";",
    r"__CUDA_ARCH__": "EMULATED_ARCH",
    r'asm volatile\("ld\.global\.L2.*?\)\);': "bits = *reinterpret_cast<const uint4*>(p);",
    r'asm volatile\("prefetch\.global\.L2.*?"l"\((.*?)\)\);': r"emulator::check_in_tensor(\1, 1);",
    r'asm\("ex2\.approx.*?\)\);': "y = std::exp2(x);",
    r'asm\("rcp\.approx.*?\)\);': "y = 1 / x;",
}

# Those of the two libraries of LayerNorm only, and those of the convolution only.
BODIES_OF_LAYER_NORM = {
    "copy_async": "emulator::start({shared, global, 16}, emulator::current->copies);",
    "barrier_init": "emulator::mbarriers[barrier] = {0, arrivals};",
    "barrier_arrive": "emulator::arrive(barrier, 0);",
    "barrier_arrive_with_copies": "emulator::arrive_with_copies(barrier);",
    "barrier_wait": "emulator::wait(barrier, parity);",
    "barrier_arrive_expecting": "emulator::arrive(barrier, bytes);",
    "bulk_copy": "emulator::start({shared, global, bytes, barrier}, emulator::bulk_copies);",
}
STATEMENTS_OF_LAYER_NORM = {
    r"#include <cooperative_groups.h>": "",
    r"cooperative_groups::this_grid\(\)\.sync\(\)": "emulator::sync_grid()",
    r'asm volatile\("ld\.relaxed.*?"memory"\);': "bits = mailboxes[block];",
    r'asm volatile\("st\.relaxed.*?"memory"\);': "*mailbox = emulator::bits_of_arithmetic(pair);",
    r"bool complete = true;": "bool complete = true; emulator::poll();",
}
BODIES_OF_CONVOLUTION = {
    "copy_or_zero": "emulator::start({shared, exists ? global : nullptr, 16}, emulator::current->copies);",
    "named_barrier_wait": "emulator::named_barrier(name, 2 * kWarpgroupThreads, true);",
    "named_barrier_arrive": "emulator::named_barrier(name, 2 * kWarpgroupThreads, false);",
    "multiply_add_async": "emulator::multiply_add_async<T>(c, a, b);",
}
STATEMENTS_OF_CONVOLUTION = {
    r"defined\(__CUDA_ARCH_FEAT_SM90_ALL\)": "!defined(EMULATED_ARCH)",
    r'asm volatile\("cp\.async\.wait_all;".*?\);': "emulator::wait_for_copies();",
    r"attributes\.maxThreadsPerBlock": "(emulator::gpu.code == 90 ? kThreads : 32)",
}

# The functions that Python and the emulated binding call. They run a call in guarded memory.
WRAPPER = r"""
namespace TORCH_EXTENSION_NAME {
static std::string answer;  // holds the text that a function below returned last

// Runs a call, and returns an error message, which is empty if there was no error. The kernels get guarded scratch
// memory, but the binding's `allocate` is called, too.
template <typename Call> static const char* emulate(Call call, const Allocate& allocate) {
  using emulator::tensors;
  answer.clear();
  try {
    guard_tensors(call);
    emulator::follows_caller = true;
    const auto allocate_guarded = [](void* of_binding, size_t bytes) -> void* {
      memset((*static_cast<const Allocate*>(of_binding))(bytes), 0xff, bytes);
      // The previous piece is freed, so that any later access to it ends the kernel.
      if (!tensors.empty() && tensors.back()->name == "scratch") tensors.pop_back();
      tensors.push_back(std::make_unique<emulator::Guarded>("scratch", bytes, nullptr, false));
      return tensors.back()->data;
    };
    emulator::last_error = cudaSuccess;
    const cudaError_t error = launch(call, {allocate_guarded, const_cast<Allocate*>(&allocate)}, nullptr);
    if (error == cudaErrorNotSupported) {
      answer = "not supported";
    } else if (error != cudaSuccess) {
      emulator::fail("cudaError " + std::to_string(int(error)));
    }
    if (cudaGetLastError() != cudaSuccess) emulator::fail("a rejected launch did not clear its error");
    for (const auto& tensor : tensors) tensor->finish();
  } catch (const std::exception& e) {
    answer = e.what();
  }
  tensors.clear();
  return answer.c_str();
}

extern "C" {
void emulate_gpu(int device, int sms, int code, int shared_bytes, int cooperative_error, int seed, bool dry) {
  emulator::gpu = {device, sms, shared_bytes, code, cudaError_t(cooperative_error)};
  emulator::random_numbers.seed(seed);
  emulator::dry = dry;
}
// The next call but `calls_before` of a function of the runtime fails once with this error. An empty name ends that.
// Returns whether an earlier request still waits.
bool emulate_error(const char* function, int calls_before, int error) {
  const bool waits = !emulator::failing.empty();
  emulator::failing = function;
  emulator::calls_before_failure = calls_before;
  emulator::failure = cudaError_t(error);
  return waits;
}
// Returns the names of all kernels, or of those that ran since the last call of this function, one per line.
const char* emulated_kernels(bool all) {
  answer.clear();
  for (auto* kernel = emulator::Kernel::last; kernel != nullptr; kernel = kernel->previous) {
    if (all || kernel->ran) answer += kernel->name + "\n";
    if (!all) kernel->ran = false;
  }
  return answer.c_str();
}
// Returns a line for each launch since the last call of this function.
const char* emulated_launches() {
  answer = std::exchange(emulator::launches, "");
  return answer.c_str();
}
CALLS
}
}  // namespace TORCH_EXTENSION_NAME
"""
# Before it: functions that make a call use guarded memory. CALLS: the calls of the library.
GUARD_LAYER_NORM = r"""
namespace TORCH_EXTENSION_NAME {
template <typename Call> static void guard_tensors(Call& call) {
  using emulator::guard;
  const size_t each = size_of(call.dtype), affine = call.affine_float32 ? 4 : each;
  const size_t all = call.rows * call.cols * each, of_rows = call.rows * 4;
  const size_t all_output = call.rows * call.cols * size_of(call.output_dtype);
  guard(call.input, all, "input");
  guard(call.weight, call.cols * affine, "weight");
  guard(call.bias, call.cols * affine, "bias");
  guard(call.mean, of_rows, "mean");
  guard(call.rstd, of_rows, "rstd");
  if constexpr (std::is_same_v<Call, Forward>) {
    guard(call.output, all_output, "output");
  } else {
    guard(call.grad_output, all_output, "grad_output");
    guard(call.grad_input, all, "grad_input");
    guard(call.grad_weight, call.cols * affine, "grad_weight");
    guard(call.grad_bias, call.cols * affine, "grad_bias");
  }
}
}  // namespace TORCH_EXTENSION_NAME
"""
CALLS_LAYER_NORM = """
const char* emulate_forward(const Forward* call, const Allocate* allocate) { return emulate(*call, *allocate); }
const char* emulate_backward(const Backward* call, const Allocate* allocate) { return emulate(*call, *allocate); }
"""
GUARD_CONVOLUTION = r"""
namespace TORCH_EXTENSION_NAME {
static void guard_tensors(Convolution& call) {
  using emulator::guard;
  const size_t each = size_of(call.dtype), affine = call.affine_float32 ? 4 : each;
  const size_t places = call.batch * call.depth * call.height;
  guard(call.input, places * 32 * 32 * each, "input");
  guard(call.conv_weight, 32 * 64 * 64 * each, "conv_weight");
  guard(call.conv_bias, 64 * each, "conv_bias");
  guard(call.weight, 64 * affine, "weight");
  guard(call.bias, 64 * affine, "bias");
  guard(call.output, places * 4 * 64 * 64 * each, "output");
}
}  // namespace TORCH_EXTENSION_NAME
"""
CALLS_CONVOLUTION = """
const char* emulate_convolution(const Convolution* call, const Allocate* allocate) { return emulate(*call, *allocate); }
bool emulate_has_convolution_kernel() { return has_convolution_kernel(); }
"""


def replaced(text, replacements, is_partial=False):
    """Returns the text with every pattern replaced. Each pattern must occur, unless is_partial."""
    for pattern, replacement in replacements.items():
        text, count = re.subn(pattern, replacement, text, flags=re.S)
        assert count or is_partial, f"layernorm_inline.py does not contain {pattern}: edit {__file__}"
    return text


def end_of(text, start):
    """Returns the index after the bracket that closes the one at text[start]."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "{(") - (text[i] in "})")
        if depth == 0:
            return i + 1
    raise ValueError("a bracket is not closed")


def emulated(source, library="", is_partial=False):
    """Returns C++ that includes emulator.h, for the CUDA C++ of a library.

    is_partial: the source may lack kernel families, and a compiler can warn of unused functions, also inline ones.
    """
    if library == "convolution":
        bodies, statements = BODIES_OF_CONVOLUTION, STATEMENTS_OF_CONVOLUTION
        guard, calls = GUARD_CONVOLUTION, CALLS_CONVOLUTION
    else:
        bodies, statements = BODIES_OF_LAYER_NORM, STATEMENTS_OF_LAYER_NORM
        guard, calls = GUARD_LAYER_NORM, CALLS_LAYER_NORM
    for name, body in {**BODIES, **bodies}.items():
        function = rf"^(?:template <[^;{{}}]*> )?__device__ [^;{{}}]*?\b{name}\([^{{;]*?\)\s*{{"
        found = list(re.finditer(function, source, re.M))
        assert found or is_partial, f"the kernels have no function {name}: edit BODIES"
        for match in reversed(found):
            end = end_of(source, match.end() - 1)
            source = f"{source[: match.end()]} {body} }}{source[end:]}"
    source = replaced(source, {**STATEMENTS, **statements}, is_partial)
    if is_partial:
        source = re.sub(r"(__device__|__host__) inline\b", r"\1", source)
        source = source.replace(
            "__device__ unsigned shared_address", "[[maybe_unused]] __device__ unsigned shared_address"
        )

    # Shared memory. A declaration becomes a reference to memory of the current block.
    dynamic = r"auto* \2 = reinterpret_cast<\1*>(emulator::current->block->dynamic);"
    source = re.sub(r"extern __shared__ __align__\(\d+\) ([\w ]+) (\w+)\[\];", dynamic, source)
    static = r"__shared__ (?:__align__\(\d+\) )?([^;]+?) (\w+)((?:\[[^\]]*\])*);"
    source = re.sub(static, r"auto& \2 = emulator::shared<\1\3, __LINE__>();", source)
    assert "__shared__" not in source

    # Every kernel begins with a call of emulator::begin, whose arguments are its launch bounds.
    for match in reversed(list(re.finditer(r"__global__ void __launch_bounds__(?=\()", source))):
        end = end_of(source, match.end())
        brace = source.index("{", end) + 1
        begin = f" struct Here {{}}; emulator::begin<Here>{source[match.end() : end]};"
        source = source[:brace] + begin + source[brace:]
    return f'#include "emulator.h"\n{source}{guard}{WRAPPER.replace("CALLS", calls)}'


FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-fno-gnu-unique",
    "-DTORCH_EXTENSION_NAME=emulated", "-ffp-contract=fast", *(["-mfma"] if platform.machine() == "x86_64" else []),
    "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error",
    "-U_FORTIFY_SOURCE",  # it reports jumps between fibers as errors
]  # fmt: skip


def cuda_include():
    """Returns the folders of CUDA's headers, from any toolkit of the machine, or None if there is none."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    homes += Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu[0-9]*")
    for home in filter(None, homes):
        folders = [path.parent for path in Path(home).glob("**/include/cuda_runtime_api.h")]
        if any((folder / "crt/host_defines.h").exists() for folder in folders):  # PyTorch brings the other headers only
            return folders
    return None


def can_build():
    return shutil.which("g++") is not None and cuda_include() is not None


def cache(name, *texts):
    """Returns the folder for files that are built from these texts, and creates it. Deletes what nobody used lately."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    folder = root / "layernorm_tests" / f"layernorm_{name}_{hashlib.sha256(''.join(texts).encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # another process deletes it
            if time.time() - other.stat().st_mtime > 7 * 24 * 3600:
                shutil.rmtree(other)
    return folder


TERMINAL = 2  # where building() writes; conftest.py opens a file that pytest does not capture


def compile_with_gxx(source, library, *flags):
    """Compiles C++ that includes emulator.h. The library, if it is not None, appears when it is complete."""
    unfinished = library and library.with_suffix(".unfinished")
    output = ["-o", unfinished] if library else []
    includes = [f"-I{path}" for path in (HERE, *cuda_include())]
    done = subprocess.run(["g++", *FLAGS, *flags, *includes, source, *output], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    if library:
        unfinished.rename(library)


ERRORS = {}  # library -> the error of its build


@contextlib.contextmanager
def building(library, what):
    """Lets only one process at a time build the library, and says so. After an error, later calls raise it again."""
    if library in ERRORS:
        raise RuntimeError(ERRORS[library])
    # The file is not named "lock", because PyTorch waits until a file of that name disappears.
    with open(library.parent / "one_builds", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not library.exists():
            message = f"\nemulated GPUs: compiling {what} with g++, which takes about a minute, only once\n"
            os.write(TERMINAL, message.encode())
        try:
            yield
        except (RuntimeError, subprocess.CalledProcessError) as error:
            ERRORS[library] = (re.findall(r".*\berror:.*", str(error)) or [str(error)])[0]
            raise


def version(name):
    """Returns the text of layernorm_inline.py in a Git revision, or of another file."""
    if Path(name).exists():
        return Path(name).read_text()
    show = ["git", "-C", HERE.parent, "show", f"{name}:{SOURCE.name}"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


class Source(typing.NamedTuple):
    """The sources of a library."""

    cuda: str
    cpp: str
    macros: tuple


@functools.lru_cache
def definitions(text):
    """Returns the names of a version of the file, as a dict, without loading its kernels."""
    text = re.sub(r"(def _load\([^)]*\):\n)", r"\1    return None, 'not loaded'\n", text)
    namespace = {"__name__": "layernorm_sources"}
    exec(compile(text, str(SOURCE), "exec"), namespace)
    return namespace


def sources(text=None):
    """Returns {name of a library: its Source} for a version of the file, without loading its kernels.

    The libraries are "", which the import loads, "epilogue" and, if the file has its last part, "convolution".
    """
    namespace = definitions(text or SOURCE.read_text())
    cuda, cpp = namespace["CUDA_SOURCE"], namespace["CPP_SOURCE"]
    found = {"": Source(cuda, cpp, ()), "epilogue": Source(cuda, cpp, ("-DLAYERNORM_HAS_EPILOGUE",))}
    if convolution := namespace.get("_CONVOLUTION"):
        found["convolution"] = Source(convolution.cuda_source, convolution.cpp_source, ())
    return found


def numbered(kind, library):
    """Returns which of all libraries this is that a run compiles at most. kind: before_hopper, or "binding"."""
    everything = [(kind, library) for kind in (False, True, "binding") for library in sources()]
    return f"library {everything.index((kind, library)) + 1} of {len(everything)}"


@functools.lru_cache
def build_kernels(before_hopper=False, library="", more_flags=(), partial=None):
    """Compiles the kernels, for sm_80 or for Hopper and newer, if necessary, and returns the path of the library.

    partial: the text of layernorm_inline.py without some kernel families. Unused functions are then errors.
    """
    source = sources(partial)[library]
    text = emulated(source.cuda, library, partial is not None)
    flags = [*source.macros, *more_flags, *(["-DEMULATED_ARCH=800"] if before_hopper else [])]
    flags += ["-O0", "-Werror=unused-function"] if partial is not None else []
    folder = cache("kernels", text, (HERE / "emulator.h").read_text(), *FLAGS, *flags)
    path = folder / "kernels.so"
    with building(path, numbered(before_hopper, library)):
        if not path.exists():
            (folder / "kernels.cpp").write_text(text)
            compile_with_gxx(folder / "kernels.cpp", path, *flags)
    return path


def build_all_kernels():
    for before_hopper in (False, True):
        for library in sources():
            build_kernels(before_hopper, library)


# ---- The binding, for CPU tensors ----


def for_both_autocasts(statement):
    """Returns a statement with AutocastCUDA for CPU tensors, and for fake CUDA tensors where they need it."""
    text = statement[0]
    cpu, key = text.replace("AutocastCUDA", "AutocastCPU"), "c10::DispatchKey::Autocast"
    if "m.impl(" in text:
        return cpu + text
    return text.replace(f"{key}CUDA", f"c10::DispatchKeySet({{{key}CPU, {key}CUDA}})") if "Exclude" in text else cpu


# Pattern in a binding -> its replacement: names that differ for CPU tensors.
BINDING = {
    r"#include <(?:c10|ATen)/cuda/.*?>\n": "",
    r"c10::kCUDA": "c10::kCPU",
    r"[^\n;{}]*AutocastCUDA[^;{]*[;{]": for_both_autocasts,
}
BINDING_BEGINS = r"""
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <cstring>
#include <mutex>
#include <dlfcn.h>
#include <cuda_runtime_api.h>

inline thread_local int guards = 0;  // number of CUDAGuards, which make the tensors' device current
namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(Device) { ++guards; }
  ~CUDAGuard() { --guards; }
};
inline cudaStream_t getCurrentCUDAStream() { return reinterpret_cast<cudaStream_t>(1); }  // not the default stream
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
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
"""
BINDING_ENDS = r"""
static void* kernels = nullptr;  // dlopen's handle of the kernels' library: that of the emulated GPU that is current
extern "C" void emulate_on(void* library) { kernels = library; }
template <typename F> F* of_kernels(const char* name) { return reinterpret_cast<F*>(dlsym(kernels, name)); }

namespace TORCH_EXTENSION_NAME {
template <typename Call>
cudaError_t emulate(const char* function, const Call& call, const Allocate& allocate, cudaStream_t stream) {
  TORCH_CHECK(guards > 0, "the device of the tensors is not current");
  TORCH_CHECK(stream == c10::cuda::getCurrentCUDAStream(), "the kernels do not run on the current stream");
  if (kernels == nullptr) return cudaErrorNoKernelImageForDevice;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string message = of_kernels<const char*(const Call*, const Allocate*)>(function)(&call, &allocate);
  if (message == "not supported") return cudaErrorNotSupported;
  TORCH_CHECK(message.empty(), message);
  return cudaSuccess;
}
LAUNCHES
}  // namespace TORCH_EXTENSION_NAME
"""
LAUNCHES_OF_LAYER_NORM = r"""
cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_forward", call, allocate, stream);
}
cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_backward", call, allocate, stream);
}
"""
LAUNCHES_OF_CONVOLUTION = r"""
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream) {
  return emulate("emulate_convolution", call, allocate, stream);
}
bool has_convolution_kernel() {
  TORCH_CHECK(guards > 0, "the device of the tensors is not current");
  return of_kernels<bool()>("emulate_has_convolution_kernel")();
}
"""


def binding(source, launches):
    """Returns a binding for CPU tensors, and the folder of the libraries that are compiled from it."""
    text = '#define LAYERNORM_COMPILED_FOR ""\n' + BINDING_BEGINS + replaced(source, BINDING)
    text += BINDING_ENDS.replace("LAUNCHES", launches)
    return text, cache("binding", text, torch.__version__)


def name_of_binding():
    """Returns what replaces _NAME, which is not the name of the libraries for real GPUs."""
    return binding(sources()[""].cpp, LAUNCHES_OF_LAYER_NORM)[1].name


BINDINGS = {}  # name of a library -> function emulate_on of its binding, once that is loaded


def load_binding(library, may_compile):
    """Compiles and loads the binding of a _Library. Replaces the function _load of layernorm_inline.py."""
    from torch.utils import cpp_extension

    kind = next((kind for kind in ("epilogue", "convolution") if library.name.endswith(f"_{kind}")), "")
    launches = LAUNCHES_OF_CONVOLUTION if kind == "convolution" else LAUNCHES_OF_LAYER_NORM
    text, folder = binding(library.cpp_source, launches)
    path = folder / library.name / f"{library.name}.so"
    if not may_compile and not glob.glob(str(path)):
        return None, "it was never compiled"
    path.parent.mkdir(exist_ok=True)
    # PyTorch 2.8 and newer need not include torch/extension.h, the slowest part.
    has_option = "no_implicit_headers" in cpp_extension.load_inline.__code__.co_varnames
    without_headers = {"no_implicit_headers": True} if has_option else {}
    with building(path, numbered("binding", kind)):
        cpp_extension.load_inline(
            library.name, text, extra_cflags=["-O0", "-w", *library.macros], extra_ldflags=["-Wl,-Bsymbolic"],
            extra_include_paths=[str(path) for path in cuda_include()], build_directory=str(path.parent),
            is_python_module=False, **without_headers,
        )  # fmt: skip
    BINDINGS[kind] = ctypes.CDLL(str(path)).emulate_on
    switch_to_current()
    return getattr(torch.ops, library.name), None


# Pattern in layernorm_inline.py -> its replacement: the loading of libraries, and queries about CUDA tensors.
LIBRARIES = {
    r"(def _load\(library, may_compile=True\):\n[^\n]*\n)": (
        r"\1    return __import__('emulator').load_binding(library, may_compile)\n"
    ),
    r"\n_NAME = [^\n]*": r"\n_NAME = __import__('emulator').name_of_binding()",
}
MODULE = {
    **LIBRARIES,
    r"\.is_cuda\b": ".is_cpu",
    r"is_autocast_enabled\(\)": "is_autocast_enabled('cpu')",
    r'get_autocast_dtype\("cuda"\)': "get_autocast_dtype('cpu')",
}


def module_text():
    """Returns the text of layernorm_inline.py for CPU tensors."""
    return replaced(SOURCE.read_text(), MODULE)


def load_text(text, name):
    path = cache("module", text) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache
def load_module():
    """Returns layernorm_inline for CPU tensors. The module is named layernorm_emulated."""
    return load_text(module_text(), "layernorm_emulated")


def load_for_fake_tensors():
    """Returns a new copy of layernorm_inline for fake CUDA tensors, with the ops of the emulated binding."""
    return load_text(replaced(SOURCE.read_text(), LIBRARIES), "layernorm_for_fake_tensors")


# ---- GPUs ----


class Gpu(typing.NamedTuple):
    """The properties of a GPU that decide which kernels run."""

    name: str
    sms: int
    code: int  # the architecture: 90 for sm_90
    shared_bytes: int  # the most shared memory that a block can have
    cooperative_error: int = 0  # of cooperative launches

    def __str__(self):
        return f"{self.name}_{self.sms}"

    @property
    def lacks_cooperative_launches(self):
        return self.cooperative_error != 0

    @property
    def device(self):
        """The index of the device. GPUs with other properties are other devices."""
        return DEVICES.setdefault((self.sms, self.code, self.shared_bytes), len(DEVICES))


DEVICES = {}
TOO_LARGE, NOT_SUPPORTED = 720, 801  # the errors of cooperative launches under MPS or MIG, and without support
GPUS = {
    name: functools.partial(Gpu, name, code=code, shared_bytes=kb << 10, cooperative_error=error)
    for name, code, kb, error in (
        ("hopper", 90, 227, 0), ("mps", 90, 227, TOO_LARGE), ("vgpu", 90, 227, NOT_SUPPORTED),
        ("blackwell", 120, 99, 0), ("ada", 89, 99, 0), ("ampere", 80, 163, 0), ("turing", 75, 64, 0),
    )
}  # fmt: skip


@functools.lru_cache
def libraries_of(before_hopper, flags, partial):
    """Returns {name: the library of kernels}."""
    names = sources() if partial is None else ("",)
    loaded = {name: ctypes.CDLL(str(build_kernels(before_hopper, name, flags, partial))) for name in names}
    for library in loaded.values():
        for function in (library.emulated_kernels, library.emulated_launches):
            function.restype = ctypes.c_char_p
    return loaded


CURRENT = []  # (libraries, arguments of emulate_gpu) of nested on() blocks, innermost last


def switch_to_current():
    if CURRENT:
        libraries, arguments = CURRENT[-1]
        for loaded in libraries.values():
            loaded.emulate_gpu(*arguments)
        for name, emulate_on in BINDINGS.items():
            if name in libraries:
                emulate_on(ctypes.c_void_p(libraries[name]._handle))


@contextlib.contextmanager
def on(gpu, seed=0, dry=False, flags=(), partial=None):
    """Runs the calls inside on this GPU, and yields its libraries. dry: kernels return at once, but are recorded.

    flags: with which the kernels are compiled. partial: see build_kernels; inside are only calls of the first library.
    """
    libraries = libraries_of(80 <= gpu.code < 90, flags, partial)
    CURRENT.append((libraries, (gpu.device, gpu.sms, gpu.code, gpu.shared_bytes, gpu.cooperative_error, seed, dry)))
    switch_to_current()
    for loaded in libraries.values():
        loaded.emulated_kernels(False)
        loaded.emulated_launches()
    try:
        yield libraries
    finally:
        CURRENT.pop()
        switch_to_current()


def kernels(libraries, every=False):
    """Returns the names of the kernels that ran since the last call, or of all: "family::name<template arguments>"."""
    names = {library: loaded.emulated_kernels(every).decode().splitlines() for library, loaded in libraries.items()}
    return {f"{library}::{name}" if library else name for library in names for name in names[library]}


def launches(libraries):
    """Returns a line for each launch since the last call: kernel, blocks, threads, bytes of shared memory, and kind."""
    return [line for loaded in libraries.values() for line in loaded.emulated_launches().decode().splitlines()]
