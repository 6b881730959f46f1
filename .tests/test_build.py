"""Tests of the build: for which GPUs it compiles, where it stores libraries, which files it trusts, and its messages.

Most tests need neither a GPU nor CUDA. They replace _compile by a function that writes a library of ten bytes (the
fixture `builds`), or nvcc by a shell script (the fixture `toolkit`). Most tests that compile use two tiny sources
(TINY) instead of the real ones.
"""

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import machine_code
import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import layernorm_inline  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_nvcc = pytest.mark.skipif(layernorm_inline._ops is None, reason="needs nvcc, and a GPU or TORCH_CUDA_ARCH_LIST")
FOR_9_0 = dict(TORCH_CUDA_ARCH_LIST="9.0", CUDA_VISIBLE_DEVICES="")
NAME = "layernorm_inline_of_a_test"
TINY = '''
CUDA_SOURCE = "__global__ void kernel() {}\\n"
CPP_SOURCE = """#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  m.def("layer_norm(Tensor input) -> Tensor", [](const at::Tensor& input) { return input.clone(); });
}
"""
_NAME = '''


def _load(name=NAME):
    return layernorm_inline._load(name)


def write_copy(folder, name="layernorm_inline", old="_NAME = ", new="_NAME = "):
    """Writes a copy of layernorm_inline.py into the folder, in which the first `old` is replaced by `new`."""
    text = (ROOT / "layernorm_inline.py").read_text()
    assert old in text
    Path(folder, f"{name}.py").write_text(text.replace(old, new, 1))


def start(folder, code="import layernorm_inline", **environment):
    """Starts a process that runs code in the folder, with its own copy of layernorm_inline.py and its own cache."""
    if not (folder / "layernorm_inline.py").exists():
        write_copy(folder)
    variables = {**os.environ, "TORCH_EXTENSIONS_DIR": folder / "cache", "PYTHONPATH": "", **environment}
    variables = {key: str(value) for key, value in variables.items() if value is not None}
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True)


def wait(process):
    """Waits until the process ends. Returns (exit status, stdout, stderr)."""
    output = process.communicate(timeout=600)
    return process.returncode, *output


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Replaces the compiler by one that writes ten bytes, and hides all GPUs, so that _load() works everywhere.

    Returns a log: the codes of each build (`built`), the path of each loaded library (`loaded`), and the folders.
    """
    log = SimpleNamespace(built=[], loaded=[], cache=tmp_path / "cache", folder=tmp_path / "cache" / NAME)

    def compile_(folder, codes):
        log.built.append(codes)
        Path(layernorm_inline._library_path(folder)).write_text("0123456789")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(log.cache))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(layernorm_inline, "_gpus", lambda: [])
    monkeypatch.setattr(torch.ops, "load_library", log.loaded.append)
    monkeypatch.setattr(layernorm_inline, "_compile", compile_)
    return log


def pretend_gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(layernorm_inline, "_gpus", lambda: list(capabilities))


def raises_for_folder(folder, why="must (not lie in|be)"):
    """Expects a RuntimeError that names the folder, says why it cannot be used, and how to choose another one."""
    return pytest.raises(RuntimeError, match=f"^layernorm_inline: {folder} {why}.*TORCH_EXTENSIONS_DIR.$")


# ---- Architectures ----


@pytest.mark.parametrize(
    "cuda,gpus,arch_list,expected",
    [
        ("13.0", [(9, 0)], "", "sm_90a"),
        ("12.1", [(8, 6), (9, 0), (9, 0)], "", "sm_86 sm_90a"),
        ("12.8", [(12, 0), (10, 3)], "", "sm_103 sm_120"),
        ("11.8", [(7, 5), (8, 9), (9, 0)], "", "sm_75 compute_80 sm_89"),
        ("12.8", [(7, 0), (9, 0)], "", "sm_90a"),  # older than Turing
        ("12.8", [(7, 0)], "8.0", ""),
        # If there is a GPU, TORCH_CUDA_ARCH_LIST is not read.
        *(("13.0", [(9, 0)], names, "sm_90a") for names in ("9.0", "8.0+PTX", "Hopper", "native", "nonsense")),
        ("13.0", [(8, 0), (9, 0)], "9.0", "sm_80 sm_90a"),
        # Without a GPU, PyTorch parses TORCH_CUDA_ARCH_LIST.
        *(("13.0", [], nothing, "") for nothing in ("", " ", ";", "native", "native;", "7.0")),
        *(("13.0", [], names, "sm_90a") for names in ("9.0;", "9.0 ", " 9.0", ";9.0;", "9.0; ")),
        ("13.0", [], "9.0", "sm_90a"),
        ("13.0", [], "9.0a", "sm_90a"),
        ("13.0", [], "8.0 8.6;9.0+PTX", "sm_80 sm_86 compute_90 sm_90a"),
        ("13.0", [], "Turing;Ada", "compute_75 sm_75 compute_89 sm_89"),
        ("13.0", [], "Volta 7.0+PTX 8.0", "sm_80"),
        ("11.8", [], "8.0;9.0+PTX", "compute_80 sm_80"),
    ],
)
def test_codes_follow_from_gpus_and_arch_list(monkeypatch, cuda, gpus, arch_list, expected):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    pretend_gpus(monkeypatch, *gpus)
    assert layernorm_inline._codes(layernorm_inline._architectures()) == expected.split()


def test_pytorch_parses_the_names_of_architectures(monkeypatch):
    pretend_gpus(monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;sm_90")
    with pytest.raises(ValueError, match="Unknown CUDA arch .sm_90."):
        layernorm_inline._architectures()
    flags = ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_107,code=sm_107"]
    monkeypatch.setattr(cpp_extension, "_get_cuda_arch_flags", lambda: flags)  # a future PyTorch
    assert layernorm_inline._architectures() == ["sm_90", "sm_107"]


def test_one_namespace_of_ops_for_all_libraries(builds, monkeypatch):
    """Other versions, flags or architectures need another library, but its ops have the same names."""
    _load()
    for owner, attribute, value in (
        (os, "uname", lambda: SimpleNamespace(machine="another")),
        (torch.version, "cuda", "13.1"),
        (torch, "__version__", "99.9"),
        (torch, "compiled_with_cxx11_abi", lambda: None),
        (layernorm_inline, "_CUDA_FLAGS", ["-O0"]),
        (layernorm_inline, "_CPP_FLAGS", ["-O0"]),
        (os, "environ", {**os.environ, "TORCH_CUDA_ARCH_LIST": "8.0"}),
        (os, "environ", {**os.environ, "TORCH_CUDA_ARCH_LIST": "8.0;9.0"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            _load()
    assert len(builds.built) == len(set(builds.loaded)) == 9, "each setting needs its own library"
    assert {os.path.basename(path) for path in builds.loaded} == {NAME + ".so"}, (
        "the namespace of the ops must be the same"
    )


@pytest.mark.full
@needs_nvcc
def test_a_traced_program_loads_with_a_library_for_other_architectures(tmp_path):
    write_copy(tmp_path, new=TINY)
    save = """
        import torch, layernorm_inline
        torch.jit.save(torch.jit.trace(lambda x: layernorm_inline._ops.layer_norm(x), torch.ones(2)), "program.pt")
    """
    load = "import torch, layernorm_inline; assert torch.jit.load('program.pt')(torch.ones(3)).shape == (3,)"
    for code, arch_list in ((save, "9.0"), (load, "8.0")):
        status, _, err = wait(start(tmp_path, code, **{**FOR_9_0, "TORCH_CUDA_ARCH_LIST": arch_list}))
        assert status == 0 and "compiling" in err, err


@pytest.mark.parametrize("arch_list,loaded", [("8.0;9.0", True), ("9.0+PTX", True), ("8.0+PTX", False)])
def test_a_library_of_a_container_image_is_loaded_on_its_gpus(builds, monkeypatch, arch_list, loaded):
    """A library that was compiled without a GPU, for TORCH_CUDA_ARCH_LIST, is later loaded on a GPU of that list."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    _load()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    for gpus in ([(9, 0)], [(8, 0), (8, 6), (9, 0)], [(9, 0)]):
        pretend_gpus(monkeypatch, *gpus)
        _load()
    assert (builds.loaded[0] == builds.loaded[1]) == loaded
    assert builds.loaded[1] == builds.loaded[3] != builds.loaded[2], (
        "the largest library is used only if all of its codes are needed"
    )


# A C library in place of NVML. It has three GPUs: 0 and 2 have compute capability 8.0 and 9.0, 1 returns an error.
NVML = """
#include <stdlib.h>
#include <string.h>
static int version = 2;
int nvmlInit_v2() { return getenv("NVML_BROKEN") != NULL; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* driver) { *driver = atoi(getenv("NVML_DRIVER")); return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) { *gpu = (void*)(1L + index); return index == 1 ? 4 : 0; }
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) { *major = 8 + (long)gpu / 3; *minor = 0; return 0; }
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "variables,expected",
    [
        ({}, [(8, 0), (9, 0)]),  # this process is not allowed to use the second GPU
        ({"NVML_DRIVER": "12080"}, []),  # PyTorch's CUDA 13 needs a newer driver
        ({"NVML_BROKEN": "1"}, "CUDA is used"),
        *(({"CUDA_VISIBLE_DEVICES": hidden}, []) for hidden in ("", "-1", "NoDevFiles")),
        *(({"CUDA_VISIBLE_DEVICES": some}, [(8, 0), (9, 0)]) for some in ("1", "0,2", " 2", "GPU-12ab", "MIG-12ab")),
    ],
    ids=str,
)
def test_gpus_are_found_without_initializing_cuda(tmp_path, variables, expected):
    """GPUs are found through NVML. CUDA is used only if NVML does not work."""
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"], check=True)
    code = """
        import torch
        torch.version.cuda = "13.0"
        torch.cuda.is_available = lambda: print("CUDA is used") or False
        import layernorm_inline
        print(layernorm_inline._gpus())
    """
    write_copy(tmp_path, old="\n_ops, _why_not = _load(_NAME)", new="\n_ops, _why_not = None, None")
    environment = {"LD_LIBRARY_PATH": tmp_path, "NVML_DRIVER": "13000", "CUDA_VISIBLE_DEVICES": None, **variables}
    status, out, err = wait(start(tmp_path, code, **environment))
    assert status == 0 and out == ("CUDA is used\n[]\n" if expected == "CUDA is used" else f"{expected}\n"), out + err


@pytest.mark.full
@needs_gpu
def test_the_import_does_not_initialize_cuda(tmp_path):
    """Neither the first import, which compiles, nor a later one initializes CUDA.

    The import also works in a forked child of a process that used CUDA.
    """
    write_copy(tmp_path, new=TINY)
    code = """
        import os, sys, torch
        if "fork" in sys.argv:
            torch.zeros(1, device="cuda")
            child = os.fork()
            if child:
                sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        import layernorm_inline
        assert layernorm_inline.LayerNorm(4)(torch.ones(2, 4)).shape == (2, 4)
        if "fork" not in sys.argv:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            assert not torch.cuda.is_initialized() and not torch.cuda.is_available()
    """
    for mode in ("", "", "fork"):
        status, _, err = wait(start(tmp_path, f"import sys; sys.argv.append({mode!r})" + textwrap.dedent(code)))
        assert status == 0, err


# ---- The cache ----


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_library_is_built_once_then_loaded(builds, umask):
    before = os.umask(umask)
    try:
        _load()
        _load()
    finally:
        os.umask(before)
    (path,) = builds.folder.glob("*-sm_90a")
    assert builds.built == [["sm_90a"]] and builds.loaded == [str(path / f"{NAME}.so")] * 2
    assert (builds.folder / "build.lock").stat().st_mode & 0o777 == 0o600, "other users must not be able to lock it"


def test_the_two_libraries_are_independent(builds):
    names = [NAME, NAME + "_epilogue"] * 2
    for name in names:
        _load(name)
    assert [Path(path).name for path in builds.loaded] == [name + ".so" for name in names]
    assert len(builds.built) == len(set(builds.loaded)) == 2


def test_the_error_of_the_second_library_says_why_it_is_missing(builds, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(layernorm_inline, "_ops", SimpleNamespace())
    monkeypatch.setattr(layernorm_inline, "_epilogue_ops", SimpleNamespace(name=NAME + "_epilogue"))
    with pytest.raises(RuntimeError, match="activations and scale were not compiled: there was no GPU"):
        layernorm_inline._load_epilogue()


def test_the_cache_is_in_torch_extensions_dir_or_xdg_cache_home(builds, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "relative")
    _load()
    for variable in ("TORCH_EXTENSIONS_DIR", "HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    _load()
    roots = [Path(path).parent.parent.parent for path in builds.loaded]
    assert roots == [tmp_path / "relative", tmp_path / "xdg" / "torch_extensions"]


@pytest.mark.parametrize("which", ["folder of the sources", "folder", "library", "complete"])
@pytest.mark.parametrize("foreign", ["another user's", "root's", "group's", "others'", "link"])
def test_only_trusted_files_are_loaded(builds, tmp_path, monkeypatch, which, foreign):
    _load()
    library = Path(builds.loaded[0])
    paths = {"folder of the sources": builds.folder, "folder": library.parent, "library": library}
    path = paths.get(which, library.parent / "complete")
    lstat, theirs = os.lstat, 0 if foreign == "root's" else os.getuid() + 1

    def foreign_lstat(p, **options):  # replaces os.lstat, because only root could change the owner of a file
        status = lstat(p, **options)
        changed = foreign == "root's" or str(p) == str(path)
        return os.stat_result([*status[:4], theirs, *status[5:]]) if changed else status

    if foreign in ("group's", "others'"):
        path.chmod(path.stat().st_mode | (0o020 if foreign == "group's" else 0o002))
    elif foreign == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "lstat", foreign_lstat)
        me = os.getuid() or 1000  # another user than root, even if root runs this test
        monkeypatch.setattr(os, "getuid", lambda: me)
    trusted = foreign in ("root's", "group's")  # Kubernetes lets a group write to its volumes (g+rwX)
    if which == "folder of the sources" and not trusted:
        with raises_for_folder(builds.folder, "must belong to you or root, and must not be writable by others"):
            _load()
        assert len(builds.built) == 1
    else:
        _load()
        assert len(builds.built) == (1 if trusted else 2)
    assert foreign != "link" or (tmp_path / "elsewhere").exists(), "the target of a link must not be deleted"


@pytest.mark.parametrize("mode,trusted", [(0o777, False), (0o775, True), (0o1777, True), (None, False)])
def test_the_parent_of_the_cache_must_not_be_writable_by_others(builds, mode, trusted):
    """The cache is not used if other users can rename its folder, and put another folder in its place.

    In a sticky parent folder like /tmp, only the owner of a folder can do that. With mode None, the parent is a file.
    """
    builds.cache.mkdir() if mode else builds.cache.touch()
    builds.cache.chmod(mode or 0o644)
    with contextlib.nullcontext() if trusted else raises_for_folder(builds.folder):
        _load()
    assert len(builds.built) == trusted


@pytest.mark.parametrize("how", ["killed", "cut short", "garbage"])
def test_an_incomplete_library_is_built_again(builds, how):
    """An incomplete library is not loaded, because loading a truncated one ends the process with SIGBUS."""
    _load()
    folder = Path(builds.loaded[0]).parent
    (folder / "lock").touch()  # a file for whose removal PyTorch would wait forever
    (builds.folder / "unrelated").mkdir()
    if how == "cut short":
        os.truncate(builds.loaded[0], 5)
    elif how == "garbage":
        (folder / "complete").write_bytes(b"\xff\xfe")
    else:
        (folder / "complete").unlink()
    _load()
    assert len(builds.built) == 2 and os.path.getsize(builds.loaded[1]) == 10
    assert not (folder / "lock").exists() and (builds.folder / "unrelated").exists()


@pytest.mark.parametrize("curable", [True, False])
def test_a_library_that_cannot_be_loaded_is_built_again_once(builds, monkeypatch, capsys, curable):
    def load_library(path):
        if not curable or len(builds.built) == 1:
            raise OSError("version `GLIBC_2.99' not found")

    _load()
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    with contextlib.nullcontext() if curable else pytest.raises(OSError, match="GLIBC_2.99"):
        _load()
    assert len(builds.built) == 2
    assert "so it is compiled again: version `GLIBC_2.99' not found" in capsys.readouterr().err


def test_the_error_of_a_library_that_can_neither_be_loaded_nor_replaced(builds, monkeypatch):
    """If a library in a read-only cache cannot be loaded, the message contains both errors and says what to do."""

    def fail(error):
        raise error

    _load()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: fail(OSError("invalid ELF header")))
    monkeypatch.setattr(
        layernorm_inline.Path,
        "unlink",
        lambda path, missing_ok=False: fail(OSError(errno.EROFS, "Read-only file system")),
    )
    with pytest.raises(RuntimeError, match="cannot load .*invalid ELF header.*Read-only file system.*EXTENSIONS_DIR"):
        _load()


def test_a_cache_on_a_file_system_without_execution_is_an_error(builds, monkeypatch):
    """A cache on a file system that is mounted noexec raises an error before anything is compiled."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NODEV))
    with raises_for_folder(builds.folder, "is on a file system that is mounted noexec"):
        _load()
    assert not builds.built


def test_no_home_folder_is_an_error(builds, monkeypatch, tmp_path):
    """Without a home folder, the error names TORCH_EXTENSIONS_DIR.

    For example, a container that runs under a user id without an entry in /etc/passwd has no home folder.
    """
    monkeypatch.chdir(tmp_path)
    for variable in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(RuntimeError, match="no home folder.*TORCH_EXTENSIONS_DIR"):
        _load()
    assert not list(tmp_path.iterdir())


def test_a_build_without_a_library_is_not_complete(builds, monkeypatch):
    monkeypatch.setattr(layernorm_inline, "_compile", lambda *arguments: None)
    with pytest.raises(FileNotFoundError):
        _load()
    assert not list(builds.folder.glob("*/complete"))


@pytest.mark.parametrize("error", [None, BlockingIOError(), OSError(errno.ENOLCK, "No locks available")], ids=str)
def test_the_lock_of_another_process_is_waited_for(builds, monkeypatch, capsys, error):
    """If another process holds the lock, a message says so, and the build waits. Other errors are raised."""
    calls = []

    def flock(file, operation):
        calls.append(operation)
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY, (
            "on NFS, only a file that is open for writing can be locked"
        )
        if error and operation & fcntl.LOCK_NB:
            raise error

    monkeypatch.setattr(fcntl, "flock", flock)
    if type(error) is OSError:
        with raises_for_folder(builds.folder, "must be a folder that you can write and lock: .*No locks available"):
            _load()
        return
    _load()
    waited = capsys.readouterr().err.count(f"waiting for another process, which compiles in {builds.folder}\n")
    assert waited == len(calls) - 1 == bool(error) and calls[-1] & fcntl.LOCK_EX


# ---- Toolkits and compilers ----


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Hides all CUDA toolkits. Returns a function that makes a toolkit whose nvcc is a script, and returns its path."""

    def make(release, folder="toolkit", script="echo nvcc says no; exit 1", mode=0o755):
        home = tmp_path / folder
        for file in ("bin/nvcc", "include/cuda_runtime_api.h"):
            (home / file).parent.mkdir(parents=True)
            (home / file).touch(mode=mode)
        (home / "bin/nvcc").write_text(
            f"#!/bin/sh\ncase $1 in --version) echo release {release}, V{release}.1;;\n"
            f"--list-gpu-code) printf 'sm_80\\nsm_90\\n';;\n*) {script};; esac\n"
        )
        return str(home)

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: not str(p).startswith("/usr/local/cuda") and exists(p))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    return make


@pytest.mark.parametrize(
    "cuda,release,folder,message",
    [
        (
            "13.0",
            "12.4",
            "toolkit",
            r"^layernorm_inline: the nvcc in \S*/toolkit belongs to CUDA 12.4; .* pip install",
        ),
        (
            "12.8",
            "13.0",
            "toolkit",
            "belongs to CUDA 13.0; PyTorch .* was built with CUDA 12.8 .*toolkit 12 .*CUDA_HOME",
        ),
        ("11.8", "11.7", "toolkit", "belongs to CUDA 11.7; PyTorch .*toolkit 11.8 .*CUDA_HOME"),
        ("13.0", "", "toolkit", r"the nvcc in \S*/toolkit does not run \(no output\); PyTorch"),
        ("12.1", "12.1", "elsewhere", "nvcc was not found in CUDA_HOME.*toolkit 12 .*CUDA_HOME"),
        ("12.4", "12.4", "toolkit", None),
        ("12.4", "12.4", "nvidia/cu12", None),
        ("13.0", "13.0", "nvidia/cu13", None),
    ],
)
def test_a_toolkit_must_match_pytorch(monkeypatch, toolkit, cuda, release, folder, message):
    """A toolkit is used if it has PyTorch's major CUDA version and is not older than 11.8.

    If there is none, the error says what was found instead, and what to install.
    """
    monkeypatch.setattr(torch.version, "cuda", cuda)
    home = toolkit(release, folder, mode=0o755 if release else 0o644)
    if message is None:
        assert layernorm_inline._find_cuda_home() == (home, cuda)
    else:
        with pytest.raises(RuntimeError, match=message):
            layernorm_inline._find_cuda_home()


@pytest.mark.parametrize("relative", [False, True])
def test_a_relative_cuda_home_becomes_absolute(monkeypatch, tmp_path, toolkit, relative):
    """The path of the toolkit is absolute, because the compilers run in another folder."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home = toolkit("13.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "toolkit" if relative else home)
    assert layernorm_inline._find_cuda_home() == (home, "13.0")


def test_the_toolkit_of_a_wrapper_on_path_is_found(monkeypatch, tmp_path, toolkit):
    """If the nvcc on PATH is a wrapper in another folder than the toolkit, a dry run prints the toolkit's folder."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home = toolkit("13.0", "far/away")
    wrapper = tmp_path / "wrappers" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\ncase $1 in --dryrun) echo '#$ TOP={home}/bin/..' >&2; exit 1;; esac\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    assert layernorm_inline._find_cuda_home() == (home, "13.0")


def test_an_error_of_nvcc_reaches_the_user(monkeypatch, tmp_path, toolkit):
    """An error of nvcc itself, for example if TMPDIR is not a folder, is shown, and not reported as an old nvcc."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home = Path(toolkit("13.0"))
    message = "nvcc fatal   : Could not open output file '/nonexistent/tmpxft'"
    text = (home / "bin/nvcc").read_text().replace("printf 'sm_80\\nsm_90\\n'", f'echo "{message}" >&2; exit 1')
    assert message in text
    (home / "bin/nvcc").write_text(text)
    with pytest.raises(RuntimeError, match=f"nvcc --list-gpu-code failed: {message}"):
        layernorm_inline._compile(str(tmp_path), ["sm_90a"])


def test_the_error_names_setuptools_if_they_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install setuptools"):
        layernorm_inline._cpp_extension()


def test_looking_for_pytorchs_compiler_leaves_logging_unchanged():
    """The filter that hides a warning of torch.utils.cpp_extension is removed again."""
    filters = list(logging.getLogger("torch.utils.cpp_extension").filters)
    layernorm_inline._cpp_extension()
    assert logging.getLogger("torch.utils.cpp_extension").filters == filters


def write_library(name, build_directory, **options):
    """Writes a library of ten bytes. It replaces load_inline, and has some of its arguments."""
    Path(build_directory, name + ".so").write_text("0123456789")


class Replacement:
    """A callable object that replaces PyTorch's load_inline, as a benchmark harness may do."""

    def __init__(self, renames):
        self.renames = renames

    def __call__(self, name, **options):
        self.options = options
        write_library("harness_" + name if self.renames else name, **options)


@pytest.mark.parametrize("version,expected", [("2.7.1", False), ("2.8.0", True), ("2.11.0+cu130", True)])
def test_a_replaced_load_inline_must_write_the_library(monkeypatch, tmp_path, toolkit, version, expected):
    """A replacement of load_inline gets the arguments that this version of PyTorch supports.

    If it writes the library under another name, the error names the replacement.
    """
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    toolkit("12.4", "nvidia/cu12")
    for renames in (False, True):
        replacement = Replacement(renames)
        monkeypatch.setattr(cpp_extension, "load_inline", replacement)
        error = pytest.raises(RuntimeError, match="load_inline did not write .*Replacement of test_build has replaced")
        with error if renames else contextlib.nullcontext():
            layernorm_inline._compile(tempfile.mkdtemp(dir=tmp_path), ["sm_90a"])
        assert ("no_implicit_headers" in replacement.options) == expected


def test_a_process_without_stderr_compiles(tmp_path, monkeypatch, toolkit):
    """A process whose sys.stderr is None can compile, although PyTorch's load_inline flushes sys.stderr."""

    def load_inline(name, **options):
        sys.stderr.flush()
        write_library(name, **options)

    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(sys, "stderr", None)
    toolkit("12.4", "nvidia/cu12")
    layernorm_inline._compile(str(tmp_path), ["sm_90a"])
    assert sys.stderr is None


def test_architectures_that_nvcc_does_not_support_are_left_out(monkeypatch, tmp_path, capsys, toolkit):
    """Unsupported architectures are named in the message and in the library. If none remains, that is an error."""
    used = {}

    def load_inline(name, **options):
        used.update(options, home=cpp_extension.CUDA_HOME)
        write_library(name, **options)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    homes = [cpp_extension.CUDA_HOME, toolkit("12.4", "nvidia/cu12")]
    layernorm_inline._compile(str(tmp_path), ["sm_80", "sm_90a", "sm_120"])
    why = "the nvcc of CUDA 12.4 does not support sm_120: install a newer one"
    err = capsys.readouterr().err
    assert f"compiling CUDA kernels for sm_80, sm_90a ({why}" in err and "about 30 s" in err, (
        "10 s, and 10 s for each architecture"
    )
    assert f"sm_80, sm_90a ({why}, and delete the folder {tmp_path.name})" in used["cpp_sources"][0]
    assert [cpp_extension.CUDA_HOME, used["home"]] == homes, "CUDA_HOME must be restored after the build"
    assert re.findall(",code=([a-z0-9_]+)", " ".join(used["extra_cuda_cflags"])) == ["sm_80", "sm_90a"]
    assert "-DLAYERNORM_HAS_EPILOGUE" not in used["extra_cuda_cflags"] + used["extra_cflags"]
    with pytest.raises(RuntimeError, match=why):
        layernorm_inline._compile(str(tmp_path), ["sm_120"])


def test_the_second_library_has_the_same_source_and_a_macro(monkeypatch, tmp_path, capsys, toolkit):
    used = {}

    def load_inline(name, **options):
        used.update(options, name=name)
        write_library(name, **options)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    toolkit("12.4", "nvidia/cu12")
    folder = tmp_path / "sources_epilogue" / "key"
    folder.mkdir(parents=True)
    layernorm_inline._compile(str(folder), ["sm_90a"])
    assert used["name"] == "sources_epilogue" and used["cuda_sources"] == layernorm_inline.CUDA_SOURCE
    assert all("-DLAYERNORM_HAS_EPILOGUE" in used[flags] for flags in ("extra_cuda_cflags", "extra_cflags"))
    assert "compiling CUDA kernels for activations and scale for sm_90a" in capsys.readouterr().err


def with_toolkit(home, code):
    """Returns code that first selects this toolkit and CUDA 13.0, whatever PyTorch is installed."""
    setting = f"cpp_extension.CUDA_HOME, torch.version.cuda = {home!r}, '13.0'"
    return f"import os, signal, torch\nfrom torch.utils import cpp_extension\n{setting}\n{textwrap.dedent(code)}"


@pytest.mark.full
@pytest.mark.parametrize("signal_", ["SIGKILL", "SIGINT"])
def test_compilers_end_with_the_process(tmp_path, toolkit, signal_):
    """No compiler keeps running after the Python process was killed or interrupted.

    After an interrupt, as in a notebook, PyTorch kills ninja.
    """
    home = toolkit("13.0", script=f"sleep 600 & echo $! >{tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/nvcc; wait")
    code = "signal.signal(signal.SIGINT, signal.default_int_handler)\nimport layernorm_inline"
    process, deadline = start(tmp_path, with_toolkit(home, code), **FOR_9_0), time.time() + 120
    while not (tmp_path / "nvcc").exists():
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.1)
    process.send_signal(getattr(signal, signal_))
    process.wait()
    stat, deadline = Path("/proc", (tmp_path / "nvcc").read_text().strip(), "stat"), time.time() + 10
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.time() < deadline, "a compiler is still running"
        time.sleep(0.05)


def test_the_ninja_of_an_old_package_is_called_without_its_script(monkeypatch, tmp_path, toolkit):
    """The program in the package's data folder is called directly.

    The ninja 1.11.1 on PATH is a script. A signal would end the script, but not the program that it runs.
    """
    program = tmp_path / "ninja/data/bin/ninja"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho program "$@"; exit 3\n')
    program.chmod(0o755)
    folder = tmp_path / "näm e"
    folder.mkdir()
    before = dict(os.environ)
    with contextlib.ExitStack() as restored:
        layernorm_inline._add_ninja_to_path(restored, str(folder))
        done = subprocess.run(["ninja", "-v", "a b"], capture_output=True, text=True)
    assert dict(os.environ) == before
    assert (done.returncode, done.stdout) == (3, "program -v a b\n"), done.stderr


@pytest.mark.parametrize(
    "break_build,message",
    [
        ("", "Error building extension.*\nnvcc says no\n"),
        ("os.environ['CXX'] = 'no-such-compiler -O2'", "compiler no-such-compiler -O2 was not found.*apt install g++"),
        (
            "torch.__version__ = type(torch.__version__)('2.7.1'); import sysconfig; sysconfig.get_path = lambda *_: '/none'",
            "Python.h.*not found in /none.*apt install python3-dev",
        ),
        (
            "import shutil, sysconfig; sysconfig.get_path = lambda *_, **__: '/none'; os.environ.update(CXX=shutil.which('c++'), PATH='')",
            "Ninja is required",
        ),
        # A write beyond this file size fails, as on a full disk.
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, resource.RLIM_INFINITY))",
            "File too large",
        ),
    ],
    ids=["compiler", "no compiler", "no headers of Python", "no ninja", "disk full"],
)
def test_an_error_of_the_build_reaches_the_user_at_each_import(tmp_path, toolkit, break_build, message):
    """Both imports raise the error. They restore the process, and leave no library that counts as complete."""
    code = f"""
        {break_build}
        before = dict(os.environ), cpp_extension.CUDA_HOME
        for _ in "12":
            try:
                import layernorm_inline
            except (RuntimeError, OSError) as error:
                print("the error", error)
        assert before == (dict(os.environ), cpp_extension.CUDA_HOME)
    """
    status, out, err = wait(start(tmp_path, with_toolkit(toolkit("13.0"), code), **FOR_9_0))
    errors = out.split("the error")[1:]
    assert status == 0 and len(errors) == 2 and all(re.search(message, error, re.S) for error in errors), out + err
    assert not list(tmp_path.glob("cache/*/*/complete"))


@pytest.mark.full
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
def test_pytorchs_warning_about_no_gpu_is_not_shown(tmp_path, toolkit):
    status, _, err = wait(start(tmp_path, CUDA_HOME=toolkit(torch.version.cuda), **FOR_9_0))
    assert status == 1 and err.startswith("layernorm_inline: compiling CUDA kernels for sm_90a, about 20 s"), err


# ---- The import ----


@pytest.mark.full
@pytest.mark.slow
@needs_nvcc
def test_one_of_many_processes_builds(tmp_path):
    """If eight processes import at the same time, one compiles each library. A later import needs less than 2 s."""
    code = "import layernorm_inline; assert layernorm_inline._ops; layernorm_inline._load_epilogue()"
    processes = [start(tmp_path, code) for _ in range(8)]
    results = [wait(process) for process in processes]
    messages = "".join(err for _, _, err in results)
    assert not any(status for status, _, _ in results), messages
    for what in ("CUDA kernels for sm", "CUDA kernels for activations and scale for"):
        assert messages.count(f"compiling {what}") == 1
    assert messages.count("compiling") == 2 and messages.count("waiting for another process") <= 14
    timed = f"import torch, time; t = time.time(); {code}; print(time.time() - t)"
    status, out, err = wait(start(tmp_path, timed))
    assert (status, err) == (0, "") and float(out) < 2, "an import that compiles nothing needs a fraction of a second"


@pytest.mark.full
@pytest.mark.parametrize("library", machine_code.MACROS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_110", "sm_120"])
def test_no_kernel_has_local_memory(tmp_path, arch, library):
    """No kernel uses local memory.

    A kernel uses it if registers spill, or if an array is indexed with a number that is only known at run time.
    """
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on PATH")
    if arch not in subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True).stdout + " sm_90a":
        pytest.skip(f"this nvcc does not support {arch}")
    macros = machine_code.MACROS[library]
    _, kernels = machine_code.compile_kernels(layernorm_inline.CUDA_SOURCE, arch, macros, tmp_path)
    assert len(kernels) > 30
    assert {name: local for name, (_, local) in kernels.items() if local > 0} == {}


@pytest.mark.full
@needs_nvcc
def test_threads_import_copies_of_the_file(tmp_path):
    """Threads that import equal copies of the file at the same time compile once, and restore the process."""
    names = ["first", "second", "third", "fourth"]
    for name in names:
        write_copy(tmp_path, name, new=TINY)
    code = f"""
        import importlib, logging, os, sys, threading, torch
        before = sys.stdout, sys.stderr, logging.root.manager.disable, dict(os.environ)
        modules, barrier = [], threading.Barrier(4)
        def work(name):
            barrier.wait()
            modules.append(importlib.import_module(name))
        threads = [threading.Thread(target=work, args=(name,)) for name in {names}]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(modules) == 4 and all(m._ops is modules[0]._ops is not None for m in modules)
        assert before == (sys.stdout, sys.stderr, logging.root.manager.disable, dict(os.environ))
    """
    status, _, err = wait(start(tmp_path, code))
    assert status == 0 and err.count("compiling") == 1, err


@pytest.mark.full
@needs_nvcc
def test_two_versions_and_two_names_in_one_process(tmp_path):
    """Two copies of the file with equal sources share a library. A copy with other sources has another library."""
    folder = tmp_path / "näm e"
    folder.mkdir()
    for name, tiny in (("layernorm_inline", TINY), ("vendored", TINY), ("changed", TINY.replace("kernel", "changed"))):
        write_copy(folder, name, new=tiny)
    code = """
        import layernorm_inline, vendored, changed
        assert layernorm_inline._ops is vendored._ops
        assert changed._ops is not None and changed._ops is not vendored._ops
    """
    status, _, err = wait(start(folder, code))
    assert status == 0 and err.count("compiling") == 2, err


@pytest.mark.full
@needs_gpu
@pytest.mark.parametrize("architecture", ["compute_75", "compute_80"])
def test_code_for_an_older_architecture_runs(tmp_path, architecture):
    """Code for an older architecture gives correct results on a newer GPU. CUDA 11 compiles such code for Hopper.

    These kernels use other instructions, and some calls run another kernel family. compute_75 does not support the
    kernel of problem 34, so that PyTorch's convolution runs.
    """
    write_copy(tmp_path, old="codes = _codes(architectures)", new=f"codes = [{architecture!r}]")
    code = """
        import torch, layernorm_inline
        from torch.nn import functional as F

        torch.manual_seed(0)
        for rows, cols in [(5, 768), (5, 20000), (5, 262144), (300, 7001), (300, 12288), (300, 20001), (300, 65536)]:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                *given, grad = (torch.randn(s, device="cuda").to(dtype) for s in ((rows, cols), cols, cols, (rows, cols)))
                runs = []
                layer_norm = layernorm_inline.layer_norm
                for function, precision in ((layer_norm, dtype), (layer_norm, dtype), (F.layer_norm, torch.double)):
                    tensors = [t.to(precision, copy=True).requires_grad_() for t in given]
                    y = function(tensors[0], (cols,), *tensors[1:])
                    runs.append([y, *torch.autograd.grad(y, tensors, grad.to(precision))])
                for a, b, exact in zip(*runs):
                    bound = 16 * torch.finfo(dtype).eps * exact.abs().max()
                    assert torch.equal(a, b) and (a - exact).abs().max() <= bound, (rows, cols, dtype)
        model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1).cuda()
        x = torch.randn(1, 32, 2, 3, 32, device="cuda")
        with torch.no_grad():
            exact = F.gelu(model.double().layer_norm(model.conv_transpose(x.double())))
            for torch.backends.cudnn.allow_tf32, atol in ((True, 1e-2), (False, 2e-5)):
                torch.testing.assert_close(model.float()(x).double(), exact, atol=atol, rtol=atol)
    """
    status, _, err = wait(start(tmp_path, code))
    assert status == 0, err


@pytest.mark.full
@needs_gpu
def test_the_error_on_a_gpu_that_nothing_was_compiled_for(tmp_path):
    """The error names the compute capability of the GPU and the compiled architectures. CUDA still works after it."""
    major, minor = torch.cuda.get_device_capability()
    other = "sm_80" if major == 7 else "sm_75"
    write_copy(tmp_path, old="codes = _codes(architectures)", new=f"codes = [{other!r}]")
    code = """
        import torch, layernorm_inline
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        try:
            layernorm_inline.layer_norm(x, (4,))
        except RuntimeError as error:
            print(error)
        assert (x + 1).sum().item() == 16
    """
    status, out, err = wait(start(tmp_path, code))
    why = f"its compute capability is {major}.{minor}, and the kernels were compiled for {other}"
    assert status == 0 and f"cannot run on cuda:0: {why}" in out, out + err


@pytest.mark.full
@pytest.mark.parametrize(
    "cuda,arch_list,why",
    [
        ("torch.version.cuda", " ", "(there was no GPU|PyTorch)"),
        ("None", None, "PyTorch .* without CUDA"),
        ("'11.7'", "9.0", "PyTorch .* is built with CUDA 11.7, and 11.8 is the oldest supported"),
        ("'13.0'", "7.0+PTX", "compute capability 7.5 is the oldest supported, and only compute_70, sm_70 was found"),
    ],
)
def test_the_import_works_if_there_is_nothing_to_compile_for(tmp_path, cuda, arch_list, why):
    """Without compiled kernels, tensors on the CPU work, and a CUDA tensor causes an error that says why."""
    code = f"""
        import torch
        torch.version.cuda = {cuda}
        import layernorm_inline
        assert layernorm_inline._ops is None
        assert layernorm_inline.ModelNew(4)(torch.randn(2, 4)).shape == (2, 4)
        assert layernorm_inline.layer_norm(torch.randn(2, 4), (4,), activation="gelu", scale=2).shape == (2, 4)
        model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(1, 4, 1, 1, 0)
        assert model(torch.randn(1, 1, 2, 3, 4)).shape == (1, 4, 2, 3, 4)
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            layernorm_inline.layer_norm(torch.empty(2, 4, device="cuda"), (4,))
    """
    status, _, err = wait(start(tmp_path, code, **{**FOR_9_0, "TORCH_CUDA_ARCH_LIST": arch_list}))
    if "Found no NVIDIA driver" in err or "Torch not compiled with CUDA" in err:
        pytest.skip("this PyTorch cannot make fake CUDA tensors without a GPU")
    assert re.search(f"RuntimeError: layernorm_inline: cannot run on cuda:0: {why}", err), err
    assert status == 1 and not (tmp_path / "cache").exists()
