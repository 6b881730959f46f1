"""How the tests run: where (a GPU, or emulated ones), from which seed, with which time and memory; what is restored."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import emulator  # noqa: E402
import reference  # noqa: E402

import layernorm_inline  # noqa: E402

torch.set_num_threads(1)
TIME_LIMIT = int(os.environ.get("TEST_TIME_LIMIT", 600))  # seconds for one test

# ---- Where ----


class Backend:
    """Where tests run: on "cuda", or "emulated", where tensors are the CPU's and a call runs on an emulated GPU."""

    def __init__(self, name):
        self.name, self.is_cuda = name, name == "cuda"
        self.device = "cuda" if self.is_cuda else "cpu"
        self.module = layernorm_inline if self.is_cuda else emulator.load_module()
        self.layer_norm, self.ModelNew = self.module.layer_norm, self.module.ModelNew
        self.LayerNorm, self.replace_layer_norm = self.module.LayerNorm, self.module.replace_layer_norm
        self.Convolution = self.module.ConvTranspose3dLayerNormGELUScaling
        self.ops = self.module._ops

    @property
    def epilogue_ops(self):
        """Of the second library, loaded by whoever asks first."""
        self.module._load_epilogue()
        return self.module._epilogue_ops

    def on(self, gpu=None, seed=0):
        """Calls inside run on this emulated GPU. The seed is that of the order of its threads and copies."""
        return contextlib.nullcontext() if self.is_cuda else emulator.on(gpu or emulator.GPUS["hopper"](8), seed)

    def poisoned(self, nbytes=1 << 28, device="cuda"):
        """What is allocated inside is full of NaN. (The emulated binding does that by itself.)"""
        return poisoned(nbytes, device) if self.is_cuda else contextlib.nullcontext()

    def ask_for(self, nbytes):
        """Skips the test if it cannot have so many bytes of the GPU's memory; waits for other processes' tests to end."""
        if not self.is_cuda:
            return
        deadline = time.time() + 60
        while (free := memory()[0]) < nbytes:
            if nbytes > memory()[1] or time.time() > deadline:
                pytest.skip(f"needs {nbytes / 2**30:.1f} GB of GPU memory; {free / 2**30:.1f} are free")
            time.sleep(1)


def memory():
    """Bytes of GPU memory that this process can have now, and at most (torch.cuda.set_per_process_memory_fraction);
    half a GB for each other process is left, as most tests do not ask."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = (int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) - 1) << 29
    limit = int(total * getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)())
    return min(free - others, limit - torch.cuda.memory_reserved()), min(total - others, limit)


@contextlib.contextmanager
def poisoned(nbytes, device):
    """PyTorch's own setting for that fills what torch.empty returns; the kernels' outputs and scratch come straight
    from the caching allocator. So all that it has to give is NaN: small blocks, and one from which it cuts large ones.
    """
    torch.cuda.empty_cache()
    sizes = [1 << 20] * 32 + [nbytes]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]  # NaN, of any dtype
    del blocks
    yield


HAVE_GPU = torch.cuda.is_available()
MADE = {}  # backends, by name


@pytest.fixture(params=["cuda", pytest.param("emulated", marks=pytest.mark.emulated)])
def backend(request):
    name = request.param
    if name == "cuda" and not HAVE_GPU:
        pytest.skip("needs a CUDA GPU")
    if name == "emulated" and not emulator.can_build():
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    if name not in MADE:
        MADE[name] = Backend(name)
    with MADE[name].on():
        yield MADE[name]


# ---- Which tests ----

NOT_RUN = pytest.StashKey()  # (tests of the full suite that do not run, how many of them need a GPU)


def pytest_collection_modifyitems(config, items):
    """Without --full, deselects the tests that are marked `full`, and those for the kind of GPU that is not there: a CUDA
    GPU, or emulated ones beside a CUDA GPU."""
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    chosen, not_run, need_gpu = [], [], 0
    for item in items:
        backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        lacks_gpu = backend == "cuda" and not HAVE_GPU
        if lacks_gpu or item.get_closest_marker("full") or (backend == "emulated" and HAVE_GPU):
            not_run.append(item)
            need_gpu += lacks_gpu
        else:
            chosen.append(item)
    config.stash[NOT_RUN] = (len(not_run), need_gpu)
    config.hook.pytest_deselected(items=not_run)
    items[:] = chosen


def pytest_terminal_summary(terminalreporter, config):
    not_run, need_gpu = config.stash.get(NOT_RUN, (0, 0))
    if not_run > 0:
        needs = f" ({need_gpu} of them need a CUDA GPU)" if need_gpu else ""
        terminalreporter.write_line(f"{not_run} tests of the full suite{needs} were not run: python -m pytest --full")


# ---- Seeds ----


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run all tests, not only those that take three minutes")
    parser.addoption("--new-seeds", action="store_true", help="draw other random numbers than in the run before")
    parser.addoption("--first-seed", type=int, default=0, help="as a run with --new-seeds printed it")


def pytest_configure(config):
    if config.getoption("--new-seeds") and not hasattr(
        config, "workerinput"
    ):  # which pytest-xdist's processes are told
        config.option.first_seed = time.time_ns() % 10**9
    reference.FIRST_SEED = config.option.first_seed


def pytest_report_header(config):
    return f"--first-seed {config.option.first_seed}"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(reference.FIRST_SEED)
    return reference.FIRST_SEED


# ---- What a test leaves behind ----


@pytest.fixture(autouse=True)
def restored():
    """Settings of the process, and the GPU's memory."""
    cudnn, dtype = torch.backends.cudnn, torch.get_default_dtype()
    before = cudnn.enabled, cudnn.allow_tf32
    yield
    cudnn.enabled, cudnn.allow_tf32 = before
    torch.set_default_dtype(dtype)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its caches keep tensors, so that later tests would not find the memory poisoned
    if HAVE_GPU:
        torch.cuda.empty_cache()


# ---- Time ----


@pytest.fixture(scope="session")
def terminal(pytestconfig):
    """stderr as it was before pytest began to capture it."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        duplicate = os.dup(2)
    with open(duplicate, "w") as file:
        yield file


@pytest.fixture(autouse=True)
def time_limit(terminal):
    """A test that hangs fails. Where it hangs in a kernel, no signal reaches it: then its process ends a little later,
    with the stack of all threads, which names the test."""

    def on_alarm(*_):
        pytest.fail(f"it takes more than {TIME_LIMIT} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(TIME_LIMIT)
    faulthandler.dump_traceback_later(TIME_LIMIT + 30, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
