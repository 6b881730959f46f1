"""Tests of the build: for which GPUs it compiles, where it stores libraries, which files it trusts, and its messages.

Most tests need neither a GPU nor CUDA: the fixture `builds` replaces _compile, and `toolkit` makes an nvcc that is a
shell script. Most tests that compile use two tiny sources (TINY).
"""

import concurrent.futures
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
import sysconfig
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import machine_code
import pytest
import torch
from processes import SOURCE, import_in_subprocess
from torch.utils import cpp_extension

import layernorm_inline

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_nvcc = pytest.mark.skipif(layernorm_inline._ops is None, reason="needs nvcc, and a GPU or TORCH_CUDA_ARCH_LIST")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FOR_9_0 = dict(TORCH_CUDA_ARCH_LIST="9.0", CUDA_VISIBLE_DEVICES="", PYTHONPATH="")
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


def write_copy(folder, name="layernorm_inline", old="_NAME = ", new=TINY):
    """Writes a copy of layernorm_inline.py into the folder, in which `old` is replaced by `new`."""
    text = SOURCE.read_text()
    assert text.count(old) == 1
    Path(folder, f"{name}.py").write_text(text.replace(old, new))


def raises(error):
    """Returns a function that raises the error."""

    def function(*_, **__):
        raise error

    return function


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Replaces the compiler by one that writes a file, and hides all GPUs, so that _load() works everywhere.

    Returns a log: the name and codes of each build (`built`), the path of each loaded library (`loaded`), and folders.
    """
    log = SimpleNamespace(built=[], loaded=[], cache=tmp_path / "cache", folder=tmp_path / "cache" / NAME)

    def compile_(name, folder, codes):
        log.built.append((name, codes))
        Path(folder, f"{name}.so").write_text("a library")

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


@pytest.mark.parametrize("cuda,gpus,arch_list,expected", [
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
])  # fmt: skip
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
    assert {name for name, _ in builds.built} == {NAME}, "the namespace of the ops must be the same"


@pytest.mark.full
@needs_nvcc
def test_a_traced_program_loads_with_a_library_for_other_architectures(tmp_path):
    write_copy(tmp_path)
    save = """
        import torch, layernorm_inline
        torch.jit.save(torch.jit.trace(lambda x: layernorm_inline._ops.layer_norm(x), torch.ones(2)), "program.pt")
    """
    load = "import torch, layernorm_inline; assert torch.jit.load('program.pt')(torch.ones(3)).shape == (3,)"
    for code, arch_list in ((save, "9.0"), (load, "8.0")):
        done = import_in_subprocess(tmp_path, code, **{**FOR_9_0, "TORCH_CUDA_ARCH_LIST": arch_list})
        assert done.returncode == 0 and "compiling" in done.stderr, done.stderr


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
@needs_compiler
@pytest.mark.parametrize("variables,expected", [
    ({}, [(8, 0), (9, 0)]),  # this process is not allowed to use the second GPU
    ({"NVML_DRIVER": "12080"}, []),  # PyTorch's CUDA 13 needs a newer driver
    ({"NVML_BROKEN": "1"}, "CUDA is used"),
    *(({"CUDA_VISIBLE_DEVICES": hidden}, []) for hidden in ("", "-1", "NoDevFiles")),
    *(({"CUDA_VISIBLE_DEVICES": some}, [(8, 0), (9, 0)]) for some in ("1", "0,2", " 2", "GPU-12ab", "MIG-12ab")),
], ids=str)  # fmt: skip
def test_gpus_are_found_without_initializing_cuda(tmp_path, variables, expected):
    """GPUs are found through NVML. CUDA is used only if NVML does not work."""
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"], check=True)
    code = """
        import torch
        torch.version.cuda = "13.0"
        torch.cuda.is_available = lambda: print("CUDA is used") or False
        import layernorm_inline
        print(layernorm_inline._gpus())
    """
    write_copy(tmp_path, old="\n_ops, _why_not = _load(_NAME)", new="\n_ops, _why_not = None, None")
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "NVML_DRIVER": "13000", "CUDA_VISIBLE_DEVICES": None, **variables}
    done = import_in_subprocess(tmp_path, code, PYTHONPATH="", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("CUDA is used\n[]\n" if expected == "CUDA is used" else f"{expected}\n")


@pytest.mark.full
@needs_gpu
@pytest.mark.parametrize("imports", ["import", "import in a forked child"])
def test_the_import_does_not_initialize_cuda(tmp_path, imports):
    """Neither an import that compiles nor a later one initializes CUDA, so that a child of a CUDA process can import."""
    write_copy(tmp_path)
    fork = """
        torch.zeros(1, device="cuda")
        child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    code = """
        import layernorm_inline
        assert layernorm_inline.LayerNorm(4)(torch.ones(2, 4)).shape == (2, 4)
    """
    check = """
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert not torch.cuda.is_initialized() and not torch.cuda.is_available()
    """
    parts = [code, check] if imports == "import" else [fork, code]
    text = "import os, sys, torch\n" + "".join(map(textwrap.dedent, parts))
    for _ in range(2):
        done = import_in_subprocess(tmp_path, text, PYTHONPATH="")
        assert done.returncode == 0, done.stderr


# ---- The cache ----


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_library_is_built_once_then_loaded(builds, umask):
    before = os.umask(umask)
    try:
        _load()
        _load()
    finally:
        os.umask(before)
    (path,) = builds.folder.glob("*.so")
    assert builds.built == [(NAME, ["sm_90a"])] and builds.loaded == [str(path)] * 2
    assert path.name.endswith("-sm_90a.so") and path.stat().st_mode & 0o777 == 0o644
    assert sorted(builds.folder.iterdir()) == sorted([path, builds.folder / "build.lock"])
    assert (builds.folder / "build.lock").stat().st_mode & 0o777 == 0o600, "other users must not be able to lock it"


def test_the_two_libraries_are_independent(builds):
    names = [NAME, NAME + "_epilogue"]
    for name in names * 2:
        _load(name)
    assert [name for name, _ in builds.built] == [Path(path).parent.name for path in builds.loaded[:2]] == names
    assert builds.loaded[:2] == builds.loaded[2:]


def test_the_error_of_the_second_library_says_why_it_is_missing(builds, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(layernorm_inline, "_ops", SimpleNamespace())
    monkeypatch.setattr(layernorm_inline, "_epilogue_ops", SimpleNamespace(name=NAME + "_epilogue"))
    with pytest.raises(RuntimeError, match="activations and scale were not compiled: there was no usable GPU"):
        layernorm_inline._load_epilogue()


def test_the_cache_is_in_torch_extensions_dir_or_xdg_cache_home(builds, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "relative")
    _load()
    for variable in ("TORCH_EXTENSIONS_DIR", "HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    _load()
    roots = [Path(path).parent.parent for path in builds.loaded]
    assert roots == [tmp_path / "relative", tmp_path / "xdg" / "torch_extensions"]


@pytest.mark.parametrize("which", ["folder", "library"])
@pytest.mark.parametrize("foreign", ["another user's", "root's", "group's", "others'", "link"])
def test_only_trusted_files_are_loaded(builds, tmp_path, monkeypatch, which, foreign):
    _load()
    path = builds.folder if which == "folder" else Path(builds.loaded[0])
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
    if which == "folder" and not trusted:
        with raises_for_folder(builds.folder, "must belong to you or root, and must not be writable by others"):
            _load()
        assert len(builds.built) == 1
    else:
        _load()
        assert len(builds.built) == (1 if trusted else 2)
    assert foreign != "link" or (tmp_path / "elsewhere").exists(), "the target of a link must not be deleted"


@pytest.mark.parametrize("mode,trusted", [(0o777, False), (0o775, True), (0o1777, True), (None, False)])
def test_the_parent_of_the_cache_must_not_be_writable_by_others(builds, mode, trusted):
    """Otherwise they could replace the folder, unless the parent is sticky like /tmp. With mode None, it is a file."""
    builds.cache.mkdir() if mode else builds.cache.touch()
    builds.cache.chmod(mode or 0o644)
    with contextlib.nullcontext() if trusted else raises_for_folder(builds.folder):
        _load()
    assert len(builds.built) == trusted


@pytest.mark.parametrize("how", ["killed", "fails", "writes no library"])
def test_an_unfinished_build_leaves_no_library(builds, monkeypatch, how):
    """A library appears in the cache when it is complete. Files of a killed process do not disturb later builds."""
    works = layernorm_inline._compile

    def compile_(name, folder, codes):
        if how == "fails":
            works(name, folder, codes)
            raise RuntimeError("the linker failed")
        if how == "killed":
            shutil.copytree(folder, f"{folder}_of_a_killed_process")
            raise KeyboardInterrupt

    monkeypatch.setattr(layernorm_inline, "_compile", compile_)
    with pytest.raises((RuntimeError, KeyboardInterrupt, FileNotFoundError)):
        _load()
    assert not list(builds.folder.glob("*.so")) and len(list(builds.folder.iterdir())) == 1 + (how == "killed")
    monkeypatch.setattr(layernorm_inline, "_compile", works)
    _load()
    assert len(builds.loaded) == 1 and Path(builds.loaded[0]).read_text() == "a library"


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


def test_the_error_of_a_library_that_can_neither_be_loaded_nor_replaced(builds, monkeypatch, capsys):
    """If a library in a read-only cache cannot be loaded, both reasons are printed, and what to do."""
    _load()
    monkeypatch.setattr(torch.ops, "load_library", raises(OSError("invalid ELF header")))
    for function in ("unlink", "open"):
        monkeypatch.setattr(os, function, raises(OSError(errno.EROFS, "Read-only file system")))
    with raises_for_folder(builds.folder, "must be a folder that you can write and lock: .*Read-only file system"):
        _load()
    assert "invalid ELF header" in capsys.readouterr().err


@pytest.mark.parametrize("error", [None, BlockingIOError(), OSError(errno.ENOLCK, "No locks available")], ids=str)
def test_the_lock_of_another_process_is_waited_for(builds, monkeypatch, capsys, error):
    """If another process holds the lock, a message says so, and the build waits. Other errors are raised."""
    calls = []

    def flock(file, operation):
        if operation == fcntl.LOCK_UN:
            return
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

    def make(release, folder="toolkit", codes="printf 'sm_80\\nsm_90\\n'", mode=0o755):
        home = tmp_path / folder
        for file in ("bin/nvcc", "include/cuda_runtime_api.h"):
            (home / file).parent.mkdir(parents=True)
            (home / file).touch(mode=mode)
        (home / "bin/nvcc").write_text(
            f"#!/bin/sh\ncase $1 in --version) echo release {release}, V{release}.1;;\n"
            f"--list-gpu-code) {codes};;\n*) echo nvcc says no; exit 1;; esac\n"
        )
        return str(home)

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: not str(p).startswith("/usr/local/cuda") and exists(p))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    return make


@pytest.fixture
def compiled(tmp_path, monkeypatch, toolkit):
    """Replaces load_inline and nvcc. Returns the dict of load_inline's arguments, to which CUDA_HOME is added."""
    used = {}

    def load_inline(name, **options):
        used.update(options, name=name, home=cpp_extension.CUDA_HOME)
        if sys.stderr is None:
            raise AttributeError("PyTorch's load_inline flushes sys.stderr")
        Path(options["build_directory"], f"{name}.so").write_text("a library")

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    used["toolkit"] = toolkit("12.4", "nvidia/cu12")
    return used


@pytest.mark.parametrize("cuda,release,folder,message", [
    ("13.0", "12.4", "toolkit", r"^layernorm_inline: the nvcc in \S*/toolkit belongs to CUDA 12.4; .* pip install"),
    ("12.8", "13.0", "toolkit", "belongs to CUDA 13.0; PyTorch .* was built with CUDA 12.8 .*toolkit 12 .*CUDA_HOME"),
    ("11.8", "11.7", "toolkit", "belongs to CUDA 11.7; PyTorch .*toolkit 11.8 .*CUDA_HOME"),
    ("13.0", "", "toolkit", r"the nvcc in \S*/toolkit does not run \(no output\); PyTorch"),
    ("12.1", "12.1", "elsewhere", "nvcc was not found in CUDA_HOME.*toolkit 12 .*CUDA_HOME"),
    ("12.4", "12.4", "toolkit", None),
    ("12.4", "12.4", "nvidia/cu12", None),
    ("13.0", "13.0", "nvidia/cu13", None),
])  # fmt: skip
def test_a_toolkit_must_match_pytorch(monkeypatch, toolkit, cuda, release, folder, message):
    """The error says what was found instead, and what to install."""
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


def test_an_error_of_nvcc_reaches_the_user(monkeypatch, tmp_path, toolkit):
    """An error of nvcc itself, for example if TMPDIR is not a folder, is shown."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    message = "nvcc fatal   : Could not open output file '/nonexistent/tmpxft'"
    toolkit("13.0", codes=f'echo "{message}" >&2; exit 1')
    with pytest.raises(RuntimeError, match=f"nvcc --list-gpu-code printed: {message}"):
        layernorm_inline._compile(NAME, str(tmp_path), ["sm_90a"])


def test_the_error_names_setuptools_if_they_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install setuptools"):
        layernorm_inline._cpp_extension()


def test_looking_for_pytorchs_compiler_leaves_logging_unchanged():
    """The logger whose warning about a missing GPU is hidden is enabled again."""
    layernorm_inline._cpp_extension()
    assert not logging.getLogger("torch.utils.cpp_extension").disabled


def test_a_process_without_stderr_compiles(tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(sys, "stderr", None)
    layernorm_inline._compile(NAME, str(tmp_path), ["sm_90a"])
    assert sys.stderr is None and compiled["name"] == NAME


def test_a_failed_build_does_not_rename_the_library(tmp_path, compiled):
    """PyTorch would append a number to the name of a library that it compiles in another folder than before."""
    cpp_extension.JIT_EXTENSION_VERSIONER.entries[NAME] = "an earlier build"
    layernorm_inline._compile(NAME, str(tmp_path), ["sm_90a"])
    assert NAME not in cpp_extension.JIT_EXTENSION_VERSIONER.entries


def test_architectures_that_nvcc_does_not_support_are_left_out(tmp_path, capsys, compiled):
    """Unsupported architectures are not named in the library. If none remains, that is an error."""
    home = cpp_extension.CUDA_HOME
    layernorm_inline._compile(NAME, str(tmp_path), ["sm_80", "sm_90a", "sm_120"])
    message = "compiling CUDA kernels for sm_80, sm_90a, about 30 s"  # 10 s, and 10 s for each architecture
    assert message in capsys.readouterr().err and compiled["cpp_sources"][0].endswith('"sm_80, sm_90a"')
    assert compiled["home"] == compiled["toolkit"]
    assert cpp_extension.CUDA_HOME == home, "CUDA_HOME must be restored after the build"
    assert re.findall(",code=([a-z0-9_]+)", " ".join(compiled["extra_cuda_cflags"])) == ["sm_80", "sm_90a"]
    assert "-DLAYERNORM_HAS_EPILOGUE" not in compiled["extra_cuda_cflags"] + compiled["extra_cflags"]
    with pytest.raises(RuntimeError, match="the nvcc of CUDA 12.4 does not support sm_120: install a newer one"):
        layernorm_inline._compile(NAME, str(tmp_path), ["sm_120"])


@pytest.mark.parametrize("expected", [False, True])
def test_the_second_library_has_the_same_source_and_a_macro(monkeypatch, tmp_path, capsys, compiled, expected):
    """load_inline gets the arguments that this version of PyTorch supports."""
    record = cpp_extension.load_inline
    if expected:
        monkeypatch.setattr(cpp_extension, "load_inline", lambda name, no_implicit_headers=None, **options: record(
            name, no_implicit_headers=no_implicit_headers, **options))  # fmt: skip
    layernorm_inline._compile("sources_epilogue", str(tmp_path), ["sm_90a"])
    assert compiled["name"] == "sources_epilogue" and compiled["cuda_sources"] == layernorm_inline.CUDA_SOURCE
    assert all("-DLAYERNORM_HAS_EPILOGUE" in compiled[flags] for flags in ("extra_cuda_cflags", "extra_cflags"))
    assert "compiling CUDA kernels for activations and scale for sm_90a" in capsys.readouterr().err
    assert ("no_implicit_headers" in compiled) == expected


@needs_compiler
@pytest.mark.parametrize("break_build,message", [
    ("", "Error building extension.*\nnvcc says no\n"),
    ("import shutil, sys, sysconfig; sys.modules['ninja'] = None; sysconfig.get_path = lambda *_, **__: '/none'; os.environ.update(CXX=shutil.which('c++'), PATH='')", "Ninja is required"),
    # A write beyond this file size fails, as on a full disk.
    ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, resource.RLIM_INFINITY))", "File too large"),
], ids=["compiler", "no ninja", "disk full"])  # fmt: skip
def test_an_error_of_the_build_reaches_the_user_at_each_import(tmp_path, toolkit, break_build, message):
    """Both imports raise the error. They restore the process, and leave no library."""
    code = f"""
        import os, signal, torch
        from torch.utils import cpp_extension
        cpp_extension.CUDA_HOME, torch.version.cuda = {toolkit("13.0")!r}, "13.0"
        {break_build}
        before = dict(os.environ), cpp_extension.CUDA_HOME
        for _ in "12":
            try:
                import layernorm_inline
            except (RuntimeError, OSError) as error:
                print("the error", error)
        assert before == (dict(os.environ), cpp_extension.CUDA_HOME)
    """
    done = import_in_subprocess(tmp_path, code, **FOR_9_0)
    errors = done.stdout.split("the error")[1:]
    assert done.returncode == 0 and len(errors) == 2, done.stdout + done.stderr
    assert all(re.search(message, error, re.S) for error in errors), errors
    assert not list(tmp_path.glob("cache/*/*.so"))


@pytest.mark.full
@needs_compiler
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
def test_pytorchs_warning_about_no_gpu_is_not_shown(tmp_path, toolkit):
    done = import_in_subprocess(tmp_path, CUDA_HOME=toolkit(torch.version.cuda), **FOR_9_0)
    start = "layernorm_inline: compiling CUDA kernels for sm_90a, about 20 s"
    assert done.returncode == 1 and done.stderr.startswith(start), done.stderr


# ---- The import ----


@pytest.mark.full
@pytest.mark.slow
@needs_nvcc
def test_one_of_many_processes_builds(tmp_path):
    """If eight processes import at the same time, one compiles each library. A later import needs less than 2 s."""
    code = "import layernorm_inline; assert layernorm_inline._ops; layernorm_inline._load_epilogue()"
    shutil.copy(SOURCE, tmp_path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: import_in_subprocess(tmp_path, code), range(8)))
    messages = "".join(done.stderr for done in results)
    assert not any(done.returncode for done in results), messages
    for what in ("CUDA kernels for sm", "CUDA kernels for activations and scale for"):
        assert messages.count(f"compiling {what}") == 1
    assert messages.count("compiling") == 2 and messages.count("waiting for another process") <= 14
    done = import_in_subprocess(tmp_path, f"import torch, time; t = time.time(); {code}; print(time.time() - t)")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 2, "an import that compiles nothing needs a fraction of a second"


@pytest.mark.full
@pytest.mark.parametrize("library", machine_code.MACROS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_110", "sm_120"])
def test_no_kernel_has_local_memory(tmp_path, arch, library):
    """A kernel has local memory if registers spill, or if an array's index is only known at run time."""
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
        write_copy(tmp_path, name)
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
    done = import_in_subprocess(tmp_path, code)
    assert done.returncode == 0 and done.stderr.count("compiling") == 1, done.stderr


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
    done = import_in_subprocess(folder, code)
    assert done.returncode == 0 and done.stderr.count("compiling") == 2, done.stderr


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
    done = import_in_subprocess(tmp_path, code)
    why = f"its compute capability is {major}.{minor}, and the kernels were compiled for {other}"
    assert done.returncode == 0 and f"cannot run on cuda:0: {why}" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("cuda,arch_list,why", [
    ("torch.version.cuda", " ", "(there was no usable GPU|PyTorch)"),
    ("None", None, "PyTorch .* without CUDA"),
    ("'11.7'", "9.0", "PyTorch .* is built with CUDA 11.7, and 11.8 is the oldest supported"),
    ("'13.0'", "7.0+PTX", "compute capability 7.5 is the oldest supported, not compute_70, sm_70"),
])  # fmt: skip
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
    done = import_in_subprocess(tmp_path, code, **{**FOR_9_0, "TORCH_CUDA_ARCH_LIST": arch_list})
    if "Found no NVIDIA driver" in done.stderr or "Torch not compiled with CUDA" in done.stderr:
        pytest.skip("this PyTorch cannot make fake CUDA tensors without a GPU")
    assert re.search(f"RuntimeError: layernorm_inline: cannot run on cuda:0: {why}", done.stderr), done.stderr
    assert done.returncode == 1 and not (tmp_path / "cache").exists()


# ---- Unusual environments ----


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    "value", [None, SimpleNamespace(write=lambda text: None), "closed"], ids=["None", "write", "closed"]
)
def test_a_process_compiles_whose_output_cannot_be_flushed(tmp_path, monkeypatch, compiled, stream, value):
    record = cpp_extension.load_inline
    if value == "closed":
        value = open(os.devnull, "w")
        value.close()

    def load_inline(name, **options):
        sys.stdout.flush()  # as PyTorch does
        sys.stderr.flush()
        record(name, **options)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(layernorm_inline, "print", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(sys, stream, value)
    layernorm_inline._compile(NAME, str(tmp_path), ["sm_90a"])
    assert getattr(sys, stream) is value


@pytest.mark.parametrize("foreign", [False, True])
def test_ninja_is_found_beside_python_and_where_pip_has_put_it(tmp_path, monkeypatch, compiled, foreign):
    """A package of the same name without BIN_DIR, such as django-ninja, does not matter."""
    seen, record = [], cpp_extension.load_inline
    monkeypatch.setattr(
        cpp_extension, "load_inline", lambda *a, **k: (seen.extend(os.environ["PATH"].split(":")), record(*a, **k))
    )
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(**({} if foreign else {"BIN_DIR": "/where/ninja/is"})))
    layernorm_inline._compile(NAME, str(tmp_path), ["sm_90a"])
    assert sysconfig.get_path("scripts") in seen and ("/where/ninja/is" in seen) != foreign
    assert "/where/ninja/is" not in os.environ["PATH"]


def test_compilers_use_the_folder_of_the_build_for_temporary_files(builds, tmp_path, monkeypatch):
    """TMPDIR may name the folder of an ended job. Python remembers TMPDIR, so it must not be asked during the build."""
    seen, compile_ = [], layernorm_inline._compile

    def check(name, folder, codes):
        seen.append((os.environ["TMPDIR"] == folder, tempfile.gettempdir() == folder))
        compile_(name, folder, codes)

    monkeypatch.setattr(layernorm_inline, "_compile", check)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "ended"))
    _load()
    assert seen == [(True, False)] and os.environ["TMPDIR"] == str(tmp_path / "ended")


@pytest.mark.parametrize("name,gpu", [("9.0a", (9, 0)), ("10.0a", (10, 0)), ("10.3a", (10, 3)), ("12.0a", (12, 0))])
def test_a_library_for_one_architecture_is_found_on_its_gpu(builds, monkeypatch, name, gpu):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", name)
    _load()
    pretend_gpus(monkeypatch, gpu)
    _load()
    assert len(builds.built) == 1 and builds.loaded[0] == builds.loaded[1]


def test_the_message_says_why_a_library_does_not_load(builds, monkeypatch, capsys):
    """The error of PyTorch 2.14 only names the library. Its cause has the reason."""

    def load_library(path):
        if len(builds.built) == 1:
            raise OSError(f"Could not load this library: {path}") from OSError("invalid ELF header")

    _load()
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    _load()
    assert "compiled again: invalid ELF header" in capsys.readouterr().err


def test_a_child_that_was_forked_during_a_build_does_not_keep_the_lock(tmp_path):
    with layernorm_inline._acquire_lock(str(tmp_path)):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    with open(tmp_path / "build.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error if the child keeps it
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
