"""Options and fixtures of all tests: the backend, the selection without --full, seeds, cleanup and the time limit."""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import emulator  # noqa: E402
import processes  # noqa: E402
import reference  # noqa: E402

import layernorm_inline  # noqa: E402

torch.set_num_threads(1)
TIME_LIMIT = int(os.environ.get("TEST_TIME_LIMIT", 600))  # seconds for one test

# ---- Backends ----


class Backend:
    """layernorm_inline on a real GPU ("cuda"), or for CPU tensors whose calls run on an emulated GPU ("emulated")."""

    def __init__(self, name):
        self.name, self.is_cuda = name, name == "cuda"
        self.device = "cuda" if self.is_cuda else "cpu"
        self.module = layernorm_inline if self.is_cuda else emulator.load_module()
        self.layer_norm, self.ModelNew = self.module.layer_norm, self.module.ModelNew
        self.LayerNorm, self.replace_layer_norm = self.module.LayerNorm, self.module.replace_layer_norm
        self.ops = self.module._ops

    @property
    def epilogue_ops(self):
        """The ops of the second library, which is loaded on the first use."""
        self.module._load_epilogue()
        return self.module._epilogue_ops

    @property
    def convolution_ops(self):
        """The ops of the library of problem 34, which is loaded on the first use."""
        self.module._load_convolution()
        return self.module._convolution_ops

    @property
    def Convolution(self):
        """The model of problem 34, in the part of the file that can be deleted."""
        return self.module.ConvTranspose3dLayerNormGELUScaling

    def on(self, gpu=None, seed=0):
        """Returns a context manager. Emulated calls inside run on this GPU, in the order of threads that seed gives."""
        return contextlib.nullcontext() if self.is_cuda else emulator.on(gpu or emulator.GPUS["hopper"](8), seed)

    def poisoned(self, nbytes=1 << 28, device="cuda"):
        """Returns a context manager. Memory that is allocated inside is full of NaN (always so on an emulated GPU)."""
        return poisoned(nbytes, device) if self.is_cuda else contextlib.nullcontext()

    def need_memory(self, nbytes):
        """Skips the test if nbytes of GPU memory are not free. Waits for other tests for up to a minute."""
        if not self.is_cuda:
            return
        # Half a GB for each other process of pytest-xdist, because most tests do not call this function.
        others = (int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) - 1) << 29
        deadline = time.time() + 60
        while True:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            if free - others >= nbytes:
                return
            if total - others < nbytes or time.time() > deadline:
                pytest.skip(f"needs {nbytes / 2**30:.1f} GB of GPU memory; {(free - others) / 2**30:.1f} are free")
            time.sleep(1)


@contextlib.contextmanager
def poisoned(nbytes, device):
    """Fills the free memory of PyTorch's caching allocator with NaN: blocks between tensors, small ones, a large one."""
    torch.cuda.empty_cache()
    index = torch.empty(0, device=device).device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    between = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    sizes = sorted(between) + [1 << 20] * 32 + [nbytes]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]  # NaN in any dtype
    del blocks
    yield


HAVE_GPU = torch.cuda.is_available()
backend_named = functools.cache(Backend)


@pytest.fixture(params=["cuda", pytest.param("emulated", marks=pytest.mark.emulated)])
def backend(request):
    name = request.param
    if name == "cuda" and not HAVE_GPU:
        pytest.skip("needs a CUDA GPU")
    if name == "emulated" and not emulator.can_build():
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    with backend_named(name).on():
        yield backend_named(name)


# ---- The order of tests, and the selection without --full ----

BUILDS = pytest.StashKey()  # the child process that compiles the kernels of emulated GPUs


def pytest_collection_modifyitems(config, items):
    """Sorts slow tests to the front. Without --full or ::, deselects tests that are marked `full`, and one backend."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    other_backend = "emulated" if HAVE_GPU else "cuda"
    chosen, not_run = [], []
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if item.get_closest_marker("full") or backend == other_backend:
            not_run.append(item)
        else:
            chosen.append(item)
    config.hook.pytest_deselected(items=not_run)
    items[:] = chosen


def pytest_collection_finish(session):
    """Starts to compile the kernels of emulated GPUs beside the first tests, unless -k or :: selects a few."""
    selects = session.config.option.keyword or any("::" in argument for argument in session.config.args)
    is_first_process = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    emulated = any(item.get_closest_marker("emulated") for item in session.items)
    if emulated and is_first_process and not selects and emulator.can_build():
        command = [sys.executable, "-c", "import emulator; emulator.build_all_kernels()"]
        session.config.stash[BUILDS] = processes.start(command, cwd=emulator.HERE, stderr=emulator.TERMINAL)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Says at the end that no kernel was tested, which is easily overlooked among the reasons of skipped tests."""
    yield
    if not HAVE_GPU and not emulator.can_build():
        needed = 'g++ and the headers of a CUDA toolkit (pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]")'
        terminalreporter.line(f"No kernel was tested: there is no GPU, and emulated GPUs need {needed}.", red=True)


# ---- Seeds ----


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run all tests, not only the selection for three minutes")
    parser.addoption("--first-seed", type=int, default=0, help="another number draws other random numbers")


def pytest_configure(config):
    reference.FIRST_SEED = config.option.first_seed
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        emulator.TERMINAL = os.dup(2)  # pytest does not capture it


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(reference.FIRST_SEED)
    return reference.FIRST_SEED


# ---- Cleanup ----


@pytest.fixture(autouse=True)
def restored_settings():
    """Restores PyTorch's settings after the test, and frees cached GPU memory."""
    cudnn, dtype = torch.backends.cudnn, torch.get_default_dtype()
    before = cudnn.enabled, cudnn.allow_tf32
    yield
    cudnn.enabled, cudnn.allow_tf32 = before
    torch.set_default_dtype(dtype)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its caches hold tensors, whose memory could not be filled with NaN
    if HAVE_GPU:
        torch.cuda.empty_cache()


@pytest.fixture
def mesh(backend, tmp_path):
    """Returns a device mesh of one process."""
    pytest.importorskip("torch.distributed.tensor")
    kind = "nccl" if backend.is_cuda else "gloo"
    torch.distributed.init_process_group(kind, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh(backend.device, (1,))
    torch.distributed.destroy_process_group()


# ---- Time limit ----


@pytest.fixture(autouse=True)
def time_limit():
    """While a kernel hangs, Python cannot handle the signal: the process prints all stacks and exits 30 s later."""

    def on_alarm(*_):
        pytest.fail(f"the test ran for more than {TIME_LIMIT} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(TIME_LIMIT)
    faulthandler.dump_traceback_later(TIME_LIMIT + 30, exit=True, file=emulator.TERMINAL)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
