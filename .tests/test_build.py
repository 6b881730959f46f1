"""Tests of the build: for which GPUs it compiles, where it stores libraries, which files it trusts, and its messages.

The fixture `builds` replaces _compile, `compiled` replaces load_inline, and `toolkit` makes an nvcc that is a shell
script. Most tests that compile use two tiny sources (TINY).
"""

import atexit
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import emulator
import machine_code
import processes
import pytest
import torch
from processes import SOURCE, import_in_subprocess
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension

import layernorm_inline

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_nvcc = pytest.mark.skipif(layernorm_inline._ops is None, reason="needs nvcc, and a GPU or TORCH_CUDA_ARCH_LIST")
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


def library_of(name=NAME, cuda_source="", macros=()):
    return layernorm_inline._Library(name, "layer_norm", "a binding", cuda_source, [*macros])


def _load(name=NAME):
    return layernorm_inline._load(library_of(name))


def _compile(folder, codes):
    layernorm_inline._compile(library_of(), str(folder), codes)


def write_copy(folder, name="layernorm_inline", old="_NAME = ", new=TINY):
    text = SOURCE.read_text()
    assert text.count(old) == 1
    Path(folder, f"{name}.py").write_text(text.replace(old, new))


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Replaces the compiler by one that writes a file, and hides all GPUs. Returns what is built and loaded."""
    log = SimpleNamespace(built=[], loaded=[], lacking=[], cache=tmp_path / "cache", folder=tmp_path / "cache" / NAME)

    def compile_(library, folder, codes):
        log.built.append((library.name, codes))
        log.temporary = folder, os.environ["TMPDIR"], tempfile.gettempdir()
        Path(folder, f"{library.name}.so").write_text("a library")
        return [code for code in codes if code not in log.lacking]

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(log.cache))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(layernorm_inline, "_gpus", lambda: [])
    monkeypatch.setattr(torch.ops, "load_library", log.loaded.append)
    monkeypatch.setattr(layernorm_inline, "_compile", compile_)
    return log


def raises_for_folder(folder, why="must (not lie in|be)"):
    return pytest.raises(RuntimeError, match=f"^layernorm_inline: {folder} {why}.*TORCH_EXTENSIONS_DIR.$")


# ---- Architectures ----


@pytest.mark.parametrize("cuda,gpus,arch_list,expected", [
    ("13.0", [(9, 0)], "", "sm_90a"),
    ("12.1", [(8, 6), (9, 0), (9, 0)], "", "sm_86 sm_90a"),
    ("12.8", [(12, 0), (10, 3)], "", "sm_103 sm_120"),
    ("11.8", [(7, 5), (8, 9), (9, 0)], "", "sm_75 compute_80 sm_89"),
    ("12.8", [(7, 0), (9, 0)], "", "sm_90a"),  # older than Turing
    *(("13.0", [(9, 0)], names, "sm_90a") for names in (None, "8.0+PTX", "native", "nonsense", "[*?")),
    ("13.0", [], None, ""),
    *(("13.0", [], nothing, "") for nothing in ("", " ", ";", "native", "native;", "7.0")),
    *(("13.0", [], names, "sm_90a") for names in ("9.0", "9.0a", "9.0 ", " 9.0", ";9.0;", "9.0; ")),
    ("13.0", [], "10.0a;10.3a 12.0a", "sm_100 sm_103 sm_120"),
    ("13.0", [], "8.0 8.6;9.0+PTX", "sm_80 sm_86 compute_90 sm_90a"),
    ("13.0", [], "Volta 7.0+PTX 8.0", "sm_80"),
])  # fmt: skip
def test_codes_follow_from_gpus_and_arch_list(monkeypatch, cuda, gpus, arch_list, expected):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if arch_list is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    monkeypatch.setattr(layernorm_inline, "_gpus", lambda: gpus)
    assert layernorm_inline._codes(layernorm_inline._architectures()) == expected.split()


def test_one_namespace_of_ops_for_all_libraries(builds, monkeypatch):
    """Other versions, flags or architectures need another library, but its ops have the same names."""
    _load()
    for owner, attribute, value in (
        (os, "uname", lambda: SimpleNamespace(machine="another", nodename="here")),
        (torch.version, "cuda", "13.1"),
        (torch, "__version__", "99.9"),
        (torch, "compiled_with_cxx11_abi", lambda: None),
        (layernorm_inline, "_CUDA_FLAGS", ["-O0"]),
        (layernorm_inline, "_CPP_FLAGS", ["-O0"]),
        (os, "environ", {**os.environ, "TORCH_CUDA_ARCH_LIST": "8.0;9.0"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            _load()
    assert len(builds.built) == len(set(builds.loaded)) == 8, "each setting needs its own library"
    assert {name for name, _ in builds.built} == {NAME}, "the namespace of the ops must be the same"


def test_the_name_of_the_ops_follows_from_both_sources_and_batch_invariance(monkeypatch):
    """A change of either source gives other names, and a change of Python code does not. Nothing is compiled."""
    monkeypatch.delenv("LAYERNORM_INLINE_BATCH_INVARIANT", raising=False)
    text, end = SOURCE.read_text(), "_ops, _why_not = _load(_LAYER_NORM)"
    assert text.count(end) == 1

    def names(text):
        namespace = {"__name__": "layernorm_names"}
        exec(compile(text.replace(end, "_ops, _why_not = None, ''"), str(SOURCE), "exec"), namespace)
        return namespace["_NAME"], namespace["_epilogue_ops"].name

    name, epilogue_name = names(text)
    assert epilogue_name.startswith(name) and epilogue_name != name
    assert names(text + "\n# Python\n") == (name, epilogue_name)
    others = set()
    for source in ("_INTERFACE = ", "_CPP_COMMON = ", "_CPP_LAYER_NORM = ", "_CUDA_COMMON = ", "_CUDA_LAYER_NORM = "):
        start = text.index('r"""', text.index(f"\n{source}")) + len('r"""')
        others |= {*names(text[:start] + "\n// changed" + text[start:])}
    monkeypatch.setenv("LAYERNORM_INLINE_BATCH_INVARIANT", "1")
    others |= {*names(text)}
    assert len(others) == 12 and not others & {name, epilogue_name}


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_macro_that_python_passes_is_a_condition_of_the_sources(monkeypatch, switch):
    """Otherwise a flag with another name would change nothing. Each condition has its macro with one of the settings."""
    monkeypatch.setenv("LAYERNORM_INLINE_BATCH_INVARIANT", switch)
    module = emulator.definitions.__wrapped__(SOURCE.read_text())
    conditions = {}
    for name in ("_LAYER_NORM", "_EPILOGUE", "_CONVOLUTION"):
        library = module[name]
        lines = re.findall(r"^#\s*(?:if|ifdef|ifndef|elif)\b(.*)$", library.cuda_source, re.M)
        conditions[name] = {*re.findall(r"\bLAYERNORM_\w+", " ".join(lines))}
        flags = [*module["_CUDA_FLAGS"], *module["_CPP_FLAGS"], *library.macros]
        passed = {flag[2:].partition("=")[0] for flag in flags if flag.startswith("-D")}
        assert passed <= conditions[name], name
        assert ("LAYERNORM_HAS_EPILOGUE" in passed) == (name == "_EPILOGUE")
        assert ("LAYERNORM_BATCH_INVARIANT" in passed) == (switch == "1")
    assert (
        conditions["_LAYER_NORM"] == conditions["_EPILOGUE"] >= {"LAYERNORM_HAS_EPILOGUE", "LAYERNORM_BATCH_INVARIANT"}
    )


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
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    _load()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    for gpus in ([(9, 0)], [(8, 0), (8, 6), (9, 0)], [(9, 0)]):
        monkeypatch.setattr(layernorm_inline, "_gpus", lambda: gpus)
        _load()
    assert (builds.loaded[0] == builds.loaded[1]) == loaded
    assert builds.loaded[1] == builds.loaded[3] != builds.loaded[2], "a larger library is used only if it is needed"


@pytest.mark.parametrize("visible,driver,refused,expected", [
    (None, 13000, "", [(8, 0), (10, 0)]),  # this process is not allowed to use GPU 1
    (None, 12080, "", []),  # PyTorch's CUDA 13 needs a newer driver
    *((None, 13000, what, [(7, 5)]) for what in ("init", "count", "handle", "capability")),  # so CUDA is used
    (None, 12080, "driver", [(8, 0), (10, 0)]),  # its version is unknown
    (None, 12080, "capability", []),
    *((hidden, 13000, "", []) for hidden in ("", "-1", "NoDevFiles", "[*?")),
    *((some, 13000, "", [(8, 0), (10, 0)]) for some in ("1", "0,2", " 2", "GPU-12ab", "MIG-12ab")),
])  # fmt: skip
def test_gpus_are_found_without_initializing_cuda(monkeypatch, visible, driver, refused, expected):
    def set_value(reference, value, what):
        reference._obj.value = value
        return 4 if what == refused else 0  # no permission; the value then means nothing

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: refused == "init",
        nvmlShutdown=lambda: 0,
        nvmlSystemGetCudaDriverVersion_v2=lambda version: set_value(version, driver, "driver"),
        nvmlDeviceGetCount_v2=lambda count: set_value(count, 3, "count"),
        nvmlDeviceGetHandleByIndex_v2=lambda index, gpu: 4 if index == 1 else set_value(gpu, 8 + index, "handle"),
        nvmlDeviceGetCudaComputeCapability=lambda gpu, major, minor: (
            set_value(major, gpu.value, "capability") + set_value(minor, 0, "capability")
        ),
    )
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": nvml}.get)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, result in (("device_count", 1), ("get_device_capability", (7, 5))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert layernorm_inline._gpus() == expected


@pytest.mark.full
@needs_gpu
@pytest.mark.parametrize("is_forked", [False, True])
def test_the_import_does_not_initialize_cuda(tmp_path, is_forked):
    write_copy(tmp_path)
    code = f"""
        import os, sys, torch
        if {is_forked}:
            torch.zeros(1, device="cuda")
            if child := os.fork():
                sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        import layernorm_inline
        assert layernorm_inline.LayerNorm(4)(torch.ones(2, 4)).shape == (2, 4)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert {is_forked} or not (torch.cuda.is_initialized() or torch.cuda.is_available())
    """
    for _ in range(2):  # the first import compiles
        done = import_in_subprocess(tmp_path, code, PYTHONPATH="")
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


def test_a_library_without_a_gpus_code_is_built_again_when_nvcc_supports_it(builds, monkeypatch):
    """Until then it is loaded, with an nvcc that still lacks the code, and without one."""
    gpus, supported = [(9, 0), (12, 0)], []
    monkeypatch.setattr(layernorm_inline, "_gpus", lambda: gpus)
    monkeypatch.setattr(layernorm_inline, "_find_cuda_home", lambda: ("a toolkit", "12.4"))
    monkeypatch.setattr(layernorm_inline, "_supported", lambda codes, home: ([*{*codes} & {*supported}], ""))
    builds.lacking = ["sm_120"]
    _load()
    _load()
    with monkeypatch.context() as patch:
        patch.setattr(layernorm_inline, "_find_cuda_home", Mock(side_effect=RuntimeError("no nvcc")))
        _load()
    assert len(builds.built) == 1 and len({*builds.loaded}) == 1
    assert builds.loaded[0].endswith("-sm_90a-no_sm_120.so")
    gpus[:] = [(9, 0)]
    _load()
    assert len(builds.built) == 1, "a machine without the new GPU needs no other library"
    gpus[:] = [(12, 0)]
    with monkeypatch.context() as patch:
        patch.setattr(layernorm_inline, "_compile", Mock(side_effect=RuntimeError("nvcc does not support sm_120")))
        with pytest.raises(RuntimeError, match="nvcc does not support sm_120"):
            _load()  # the library has nothing for this machine
    gpus[:], builds.lacking, supported[:] = [(9, 0), (12, 0)], [], ["sm_90a", "sm_120"]
    _load()
    assert len(builds.built) == 2 and builds.loaded[-1].endswith("-sm_90a-sm_120.so")
    monkeypatch.setattr(layernorm_inline, "_find_cuda_home", Mock(side_effect=AssertionError("nvcc is not needed")))
    _load()
    assert len(builds.built) == 2 and builds.loaded[-1] == builds.loaded[-2]


def test_the_error_of_the_second_library_says_why_it_is_missing(builds, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(layernorm_inline, "_ops", SimpleNamespace())
    monkeypatch.setattr(layernorm_inline, "_EPILOGUE", library_of(NAME + "_epilogue"))
    monkeypatch.setattr(layernorm_inline, "_is_epilogue_loaded", False)
    with pytest.raises(RuntimeError, match="activations and scale were not compiled: there was no usable GPU"):
        layernorm_inline._load_epilogue()


def test_a_library_that_was_compiled_can_be_loaded_without_compiling(builds, monkeypatch, capsys):
    """As the import does with the second library and that of problem 34. Nothing is written if there is none."""
    ops = getattr(torch.ops, NAME)
    ask = functools.partial(layernorm_inline._load, library_of(), may_compile=False)
    assert ask()[0] is None and not builds.cache.exists()
    _load()
    assert ask()[0] is ops and len(builds.loaded) == 2
    monkeypatch.setattr(torch.ops, "load_library", Mock(side_effect=OSError("GLIBC_2.99 not found")))
    assert ask()[0] is None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert ask()[0] is None
    assert len(builds.built) == 1 and capsys.readouterr().err == ""


def test_the_cache_is_in_torch_extensions_dir_or_xdg_cache_home(builds, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "relative")
    _load()
    for variable in ("TORCH_EXTENSIONS_DIR", "HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    _load()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, folder in (("XDG_CACHE_HOME", "~/xdg"), ("TORCH_EXTENSIONS_DIR", "~/ext")):
        monkeypatch.setenv(variable, folder)
        _load()
    roots = [Path(path).parent.parent.relative_to(tmp_path) for path in builds.loaded]
    assert [*map(str, roots)] == ["relative", "xdg/torch_extensions", "home/xdg/torch_extensions", "home/ext"]


@pytest.mark.parametrize("value", [None, "", "[x]*?"])
@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_with_a_variable_that_is_unset_or_empty_or_has_wildcards(
    builds, monkeypatch, tmp_path, variable, value
):
    """An empty variable is like one that is not set. A folder with wildcards in its name is a folder like any other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path / "of the user")))
    if variable == "HOME":
        monkeypatch.delenv("XDG_CACHE_HOME")
    if value is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, str(tmp_path / value) if value and variable == "HOME" else value)
    below = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": "torch_extensions", "HOME": ".cache/torch_extensions"}
    default = {
        "TORCH_EXTENSIONS_DIR": tmp_path / "xdg/torch_extensions",
        "XDG_CACHE_HOME": tmp_path / "home/.cache/torch_extensions",
        "HOME": tmp_path / "of the user/.cache/torch_extensions",
    }
    expected = tmp_path / value / below[variable] if value else default[variable]
    if (variable, value) == ("HOME", ""):  # as for PyTorch and Python, the root folder
        monkeypatch.setattr(os, "makedirs", Mock(side_effect=PermissionError))
        with raises_for_folder(f"/.cache/torch_extensions/{NAME}"):
            _load()
        return
    left = expected / NAME / f"build-{os.uname().nodename}+of_a_killed_process"
    left.mkdir(parents=True)
    for architectures in ("8.0;9.0", "9.0"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        _load()
    assert [Path(path).parent for path in builds.loaded] == [expected / NAME] * 2 and len(builds.built) == 1
    assert not left.exists()


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "~/xdg"}, {"TORCH_EXTENSIONS_DIR": "~/ext"}])
def test_the_error_without_a_home_names_torch_extensions_dir(builds, monkeypatch, tmp_path, variables):
    """A container runs as a user without an entry in the user database. No folder with the name ~ appears."""
    monkeypatch.chdir(tmp_path)
    for variable in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    with raises_for_folder("the home folder", "is unknown"):
        _load()
    assert not builds.built and not list(tmp_path.iterdir())


@pytest.mark.parametrize("which", ["folder", "library"])
@pytest.mark.parametrize(
    "foreign,trusted",
    # Kubernetes lets a group write to its volumes (g+rwX).
    [("another user's", False), ("root's", True), ("group's", True), ("others'", False), ("link", False)],
)
def test_only_trusted_files_are_loaded(builds, tmp_path, monkeypatch, which, foreign, trusted):
    _load()
    path = builds.folder if which == "folder" else Path(builds.loaded[0])
    if foreign in ("group's", "others'"):
        path.chmod(0o775 if foreign == "group's" else 0o757)
    elif foreign == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        me = os.getuid() or 1000  # another user than root, even if root runs this test
        owner = 0 if foreign == "root's" else me + 1
        lstat = os.lstat

        def foreign_lstat(p, **options):  # only root could change the owner of a file
            status = lstat(p, **options)
            return os.stat_result([*status[:4], owner, *status[5:]]) if str(p) == str(path) else status

        monkeypatch.setattr(os, "lstat", foreign_lstat)
        monkeypatch.setattr(os, "getuid", lambda: me)
    rejected = which == "folder" and not trusted
    expected = raises_for_folder(path, "must belong to you or root, and must not be writable by others")
    with expected if rejected else contextlib.nullcontext():
        _load()
    assert len(builds.built) == (1 if trusted or rejected else 2)
    assert foreign != "link" or (tmp_path / "elsewhere").exists(), "the target of a link must not be deleted"


@pytest.mark.parametrize("mode,trusted", [(0o777, False), (0o775, True), (0o1777, True), (None, False)])
def test_the_parent_of_the_cache_must_not_be_writable_by_others(builds, mode, trusted):
    """Otherwise they could replace the folder, unless the parent is sticky. With mode None, it is a file."""
    builds.cache.mkdir() if mode else builds.cache.touch()
    builds.cache.chmod(mode or 0o644)
    with contextlib.nullcontext() if trusted else raises_for_folder(builds.folder):
        _load()
    assert len(builds.built) == trusted


def test_a_folder_that_is_mounted_noexec_raises_an_error(builds, monkeypatch):
    """Nothing is compiled for it, and a library that was copied there is not deleted."""
    _load()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    monkeypatch.setattr(torch.ops, "load_library", Mock(side_effect=OSError("Operation not permitted")))
    for _ in "12":
        with raises_for_folder(builds.folder, "must not lie on a file system that is mounted noexec"):
            _load()
    assert len(builds.built) == 1 and len(list(builds.folder.glob("*.so"))) == 1


def test_an_unfinished_build_leaves_no_library(builds, monkeypatch):
    compile_ = layernorm_inline._compile

    def fails(*arguments):
        compile_(*arguments)
        raise RuntimeError("the linker failed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the linker failed"):
        patch.setattr(layernorm_inline, "_compile", fails)
        _load()
    assert [path.name for path in builds.folder.iterdir()] == ["build.lock"]
    _load()
    assert len(builds.loaded) == 1


def test_the_next_build_deletes_what_a_killed_build_left(builds, monkeypatch):
    compile_ = layernorm_inline._compile

    def is_killed(*arguments):
        compile_(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in "12":
        if (child := os.fork()) == 0:
            layernorm_inline._compile = is_killed
            try:
                _load()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = builds.folder.glob("build-*")
    node = os.uname().nodename
    others = [left.with_name(left.name.replace(node, other)) for other in ("another", f"{node}-1", f"{node}_1")]
    for other in others:
        other.mkdir()  # another machine may build, if the file system locks for each machine alone
    _load()
    assert sorted(builds.folder.iterdir()) == sorted([Path(*builds.loaded), builds.folder / "build.lock", *others])


@pytest.mark.parametrize("curable", [True, False])
def test_a_library_that_cannot_be_loaded_is_built_again_once(builds, monkeypatch, capsys, curable):
    def load_library(path):
        if not curable or len(builds.built) == 1:
            raise OSError("Could not load this library") from OSError("GLIBC_2.99 not found")  # as PyTorch 2.14

    _load()
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    with contextlib.nullcontext() if curable else pytest.raises(OSError, match="Could not load this library"):
        _load()
    assert len(builds.built) == 2
    assert "so it is compiled again: GLIBC_2.99 not found" in capsys.readouterr().err
    monkeypatch.setattr(torch.ops, "load_library", Mock(side_effect=OSError("GLIBC_2.99 not found")))
    monkeypatch.setattr(layernorm_inline, "_compile", Mock(side_effect=RuntimeError("no nvcc")))
    with pytest.raises(RuntimeError, match="no nvcc"):
        _load()
    assert list(builds.folder.glob("*.so")), "another machine may be able to load it"


def test_the_error_of_a_library_that_can_neither_be_loaded_nor_replaced(builds, monkeypatch, capsys):
    _load()
    monkeypatch.setattr(torch.ops, "load_library", Mock(side_effect=OSError("invalid ELF header")))
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError("Read-only file system")))
    with raises_for_folder(builds.folder, "must be a folder that you can write and lock: .*Read-only file system"):
        _load()
    assert "invalid ELF header" in capsys.readouterr().err


@pytest.mark.parametrize("is_held", [False, True])
def test_the_lock_of_another_process_is_waited_for(builds, monkeypatch, capsys, is_held):
    calls = []

    def flock(file, operation):
        calls.append(operation)
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        assert mode == os.O_WRONLY, "on NFS, only a file that is open for writing can be locked"
        if is_held and operation & fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    _load()
    assert calls == [fcntl.LOCK_EX | fcntl.LOCK_NB, *[fcntl.LOCK_EX] * is_held, fcntl.LOCK_UN]
    message = f"waiting for another process, which compiles in {builds.folder}\n"
    assert (message in capsys.readouterr().err) == is_held


@pytest.mark.parametrize("finishes", [True, False])
def test_a_library_that_another_process_compiles_is_waited_for(builds, finishes):
    """If the other process ends without a library, this one compiles it."""
    builds.folder.mkdir(parents=True)
    path = layernorm_inline._library_path(str(builds.folder), ["sm_90a"])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lock = layernorm_inline._acquire_lock(str(builds.folder))
        os.write(write, b"locked")
        time.sleep(1)
        if finishes:
            Path(path).write_text("the child's library")
        lock.close()
        os._exit(0)
    assert os.read(read, 6) == b"locked"
    _load()
    os.waitpid(child, 0)
    assert builds.loaded == [path]
    assert builds.built == ([] if finishes else [(NAME, ["sm_90a"])])


def test_two_libraries_have_their_own_folders_and_locks(builds):
    for name in (NAME, NAME + "_epilogue"):
        with layernorm_inline._acquire_lock(layernorm_inline._cache(name)):
            other = NAME if name != NAME else NAME + "_epilogue"
            _load(other)
            assert sorted(path.name for path in (builds.cache / name).iterdir()) == ["build.lock"]
            shutil.rmtree(builds.cache / other)
    assert [name for name, _ in builds.built] == [NAME + "_epilogue", NAME]


# ---- Toolkits and compilers ----


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Hides all CUDA toolkits. Returns a function that makes a toolkit whose nvcc is a script, and returns its path."""

    def make(release, folder="toolkit", mode=0o755):
        home = tmp_path / folder
        for file in ("bin/nvcc", "include/cuda_runtime_api.h"):
            (home / file).parent.mkdir(parents=True)
            (home / file).touch(mode=mode)
        (home / "bin/nvcc").write_text(
            f"#!/bin/sh\ncase $1 in --version) echo release {release}, V{release}.1;;\n"
            "--list-gpu-code) printf 'sm_80\\nsm_90\\n'; echo a warning >&2;;\n*) echo nvcc says no; exit 1;; esac\n"
        )
        return str(home)

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: not str(p).startswith("/usr/local/cuda") and exists(p))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "toolkit")  # becomes absolute: compilers run in another folder
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    return make


@pytest.fixture
def compiled(tmp_path, monkeypatch, toolkit):
    """Replaces load_inline and nvcc. Returns the dict of load_inline's arguments, with CUDA_HOME and PATH during it."""
    used = {}

    def load_inline(name, **options):
        for stream in (sys.stdout, sys.stderr):  # as PyTorch does
            stream.flush()
        used.update(options, name=name, home=cpp_extension.CUDA_HOME, path=os.environ["PATH"].split(":"))

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
    monkeypatch.setattr(torch.version, "cuda", cuda)
    home = toolkit(release, folder, mode=0o755 if release else 0o644)
    if message is None:
        assert layernorm_inline._find_cuda_home() == (home, cuda)
    else:
        with pytest.raises(RuntimeError, match=message):
            layernorm_inline._find_cuda_home()


def test_the_headers_of_condas_toolkit_are_found(tmp_path, compiled):
    home = Path(compiled["toolkit"])
    _compile(tmp_path, ["sm_90a"])
    assert compiled["extra_include_paths"] == []
    (home / "targets/sbsa-linux").mkdir(parents=True)
    (home / "include").rename(home / "targets/sbsa-linux/include")
    (tmp_path / "other").mkdir()
    _compile(tmp_path / "other", ["sm_90a"])
    assert compiled["extra_include_paths"] == [str(home / "targets/sbsa-linux/include")]


def test_the_error_names_setuptools_if_they_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install setuptools"):
        layernorm_inline._cpp_extension()


@pytest.mark.parametrize("wildcards", [False, True])
@pytest.mark.parametrize("layout", ["include", "targets/x86_64-linux/include"])
def test_a_toolkit_in_a_folder_with_wildcards_in_its_name(tmp_path, monkeypatch, toolkit, compiled, layout, wildcards):
    """The library of the runtime is found there, too. An empty CUDA_HOME is like none."""
    home = Path(toolkit("12.4", "[x]*?" if wildcards else "plain"))
    if layout != "include":
        (home / layout).parent.mkdir(parents=True)
        (home / "include").rename(home / layout)
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.12").touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(home))
    assert layernorm_inline._find_cuda_home() == (str(home), "12.4")
    (tmp_path / "build").mkdir()
    _compile(tmp_path / "build", ["sm_90a"])
    assert compiled["home"] == str(home)
    assert os.readlink(tmp_path / "build/libcudart.so") == str(home / "lib/libcudart.so.12")
    for nothing in ("", None):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", nothing)
        assert layernorm_inline._find_cuda_home() == (compiled["toolkit"], "12.4")


@pytest.mark.parametrize("cxx", ["g++ -m64", "g++", "no-such-ccache g++", ""])
def test_the_first_word_of_cxx_must_be_a_program(tmp_path, monkeypatch, compiled, cxx):
    """PyTorch runs CXX as it is, so that it can be a compiler with an option, or ccache with a compiler."""
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    is_right = cxx.startswith("g++")
    with contextlib.nullcontext() if is_right else pytest.raises(RuntimeError, match=r"Install g\+\+, or set CXX"):
        _compile(tmp_path, ["sm_90a"])
    assert ("name" in compiled) == is_right and os.environ["CXX"] == cxx


@pytest.mark.parametrize("cxx,named", [(None, "c++"), ("no-such-g++ -m64", "no-such-g++")])
def test_the_error_names_the_compiler_if_it_is_missing(tmp_path, monkeypatch, compiled, cxx, named):
    """The compiler may also lie beside Python, as in an environment of conda that is not activated."""
    monkeypatch.delenv("CXX", raising=False)
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    with pytest.raises(RuntimeError, match=f"the C.. compiler {re.escape(named)} was not found. Install g..,"):
        layernorm_inline._compile(library_of(), str(tmp_path), ["sm_90a"])
    assert "name" not in compiled
    (tmp_path / "scripts").mkdir()
    shutil.copy(sys.executable, tmp_path / "scripts" / named)
    layernorm_inline._compile(library_of(), str(tmp_path), ["sm_90a"])
    assert compiled["name"] == NAME


def test_a_failed_build_does_not_rename_the_library(tmp_path, compiled):
    """PyTorch would append a number to the name of a library that it compiles in another folder than before."""
    cpp_extension.JIT_EXTENSION_VERSIONER.entries[NAME] = "an earlier build"
    _compile(tmp_path, ["sm_90a"])
    assert NAME not in cpp_extension.JIT_EXTENSION_VERSIONER.entries


@pytest.mark.parametrize("cores,seconds", [(2, 90), (16, 30)])
def test_architectures_that_nvcc_does_not_support_are_left_out(tmp_path, monkeypatch, capsys, compiled, cores, seconds):
    home = cpp_extension.CUDA_HOME
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    _compile(tmp_path, ["sm_80", "sm_90a", "sm_120"])
    message = f"compiling {NAME} for sm_80, sm_90a, about {seconds} s"
    assert message in capsys.readouterr().err and compiled["cpp_sources"][0].endswith('"sm_80, sm_90a"')
    assert compiled["home"] == compiled["toolkit"]
    assert cpp_extension.CUDA_HOME == home, "CUDA_HOME must be restored after the build"
    assert re.findall(",code=([a-z0-9_]+)", " ".join(compiled["extra_cuda_cflags"])) == ["sm_80", "sm_90a"]
    assert "-DLAYERNORM_HAS_EPILOGUE" not in compiled["extra_cuda_cflags"] + compiled["extra_cflags"]
    assert "no_implicit_headers" not in compiled, "older versions of PyTorch do not have it"
    message = r"the nvcc of CUDA 12.4 does not support sm_120: install a newer one.* printed: sm_80\nsm_90\na warning"
    with pytest.raises(RuntimeError, match=message):
        _compile(tmp_path, ["sm_120"])


def test_each_library_has_its_sources_and_macros(monkeypatch, tmp_path, capsys, compiled):
    record = cpp_extension.load_inline

    def load_inline(name, no_implicit_headers=None, **options):  # as in PyTorch 2.8
        record(name, no_implicit_headers=no_implicit_headers, **options)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    first, second, third = (getattr(layernorm_inline, f"_{name}") for name in ("LAYER_NORM", "EPILOGUE", "CONVOLUTION"))
    assert first[2:4] == second[2:4] == (layernorm_inline.CPP_SOURCE, layernorm_inline.CUDA_SOURCE)
    assert len({first.name, second.name, third.name}) == 3
    for library in (first, second, third):
        layernorm_inline._compile(library, str(tmp_path), ["sm_90a"])
        assert compiled["name"] == library.name and f"compiling {library.name} for sm_90a" in capsys.readouterr().err
        assert (compiled["cpp_sources"][1], compiled["cuda_sources"]) == library[2:4]
        for flags in ("extra_cuda_cflags", "extra_cflags"):
            assert ("-DLAYERNORM_HAS_EPILOGUE" in compiled[flags]) == (library is second)
        assert compiled["no_implicit_headers"] is True


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_an_error_of_the_build_reaches_the_user_at_each_import(tmp_path, toolkit):
    """PyTorch's warning that there is no GPU is not shown, and all settings are restored."""
    code = """
        import logging, os, torch
        torch.version.cuda, torch.cuda._is_compiled = "13.0", lambda: True
        before = dict(os.environ)
        for _ in "12":
            try:
                import layernorm_inline
            except RuntimeError as error:
                print("the error", error)
        from torch.utils import cpp_extension
        assert before == dict(os.environ) and cpp_extension.CUDA_HOME == os.environ["CUDA_HOME"]
        assert not logging.getLogger("torch.utils.cpp_extension").disabled
    """
    done = import_in_subprocess(tmp_path, code, CUDA_HOME=toolkit("13.0"), **FOR_9_0)
    assert done.returncode == 0 and done.stderr.startswith("layernorm_inline: compiling"), done.stderr
    assert len(re.findall("the error Error building extension.*?\nnvcc says no\n", done.stdout, re.S)) == 2, done.stdout
    assert not list(tmp_path.glob("cache/*/*.so"))


# ---- The import ----


@pytest.mark.full
@pytest.mark.slow
@needs_nvcc
def test_one_of_many_processes_builds(tmp_path):
    code = "import layernorm_inline; assert layernorm_inline._ops; layernorm_inline._load_epilogue()"
    shutil.copy(SOURCE, tmp_path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: import_in_subprocess(tmp_path, code), range(8)))
    messages = "".join(done.stderr for done in results)
    assert not any(done.returncode for done in results), messages
    names = layernorm_inline._NAME, layernorm_inline._NAME + "_epilogue"
    assert all(messages.count(f"compiling {name} for sm") == 1 for name in names)
    assert messages.count("compiling") == 2 and messages.count("waiting for another process") <= 14
    done = import_in_subprocess(tmp_path, f"import torch, time; t = time.time(); {code}; print(time.time() - t)")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 2, "an import that compiles nothing needs a fraction of a second"


@pytest.mark.full
@pytest.mark.parametrize("library", emulator.sources())
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_110", "sm_120"])
def test_no_kernel_has_local_memory(tmp_path, arch, library):
    """A kernel has local memory if registers spill, or if an array's index is only known at run time.

    No warning either: ptxas warns if the launch bounds ask for more threads than an SM has.
    """
    try:
        nvcc = machine_code.nvcc()
    except RuntimeError as error:
        processes.lacks(str(error))
    if arch not in subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout + " sm_90a":
        processes.lacks(f"this nvcc does not support {arch}")
    source = emulator.sources()[library]
    source = source._replace(macros=(*source.macros, "-Werror=all-warnings", "-Wno-deprecated-gpu-targets"))
    _, kernels = machine_code.compile_kernels(source, arch, tmp_path)
    assert len(kernels) > 30 or (library == "convolution" and len(kernels) == 6)
    assert {name: local for name, (_, local) in kernels.items() if local > 0} == {}


@pytest.mark.full
@needs_nvcc
def test_threads_import_copies_of_the_file(tmp_path):
    """Equal copies share a library, which is compiled once. A copy with other sources has another one.

    The cache lies in a folder whose name has a blank, where nvcc is told to use threads.
    """
    folder = tmp_path / "näm e"
    folder.mkdir()
    for name in ("first", "second", "third"):
        write_copy(folder, name)
    write_copy(folder, "changed", new=TINY.replace("kernel", "changed"))
    code = """
        import importlib, logging, os, sys, threading, torch
        from concurrent.futures import ThreadPoolExecutor
        barrier = threading.Barrier(4)
        def load(name):
            barrier.wait()
            return importlib.import_module(name)._ops
        before = sys.stdout, sys.stderr, logging.root.manager.disable, dict(os.environ)
        with ThreadPoolExecutor(4) as pool:
            first, second, third, changed = pool.map(load, ("first", "second", "third", "changed"))
        assert before == (sys.stdout, sys.stderr, logging.root.manager.disable, dict(os.environ))
        assert first is second is third is not changed and None not in (first, changed)
    """
    done = import_in_subprocess(folder, code, NVCC_APPEND_FLAGS="--threads 2")
    assert done.returncode == 0 and done.stderr.count("compiling") == 2, done.stderr


@pytest.mark.full
@needs_gpu
def test_the_error_on_a_gpu_that_nothing_was_compiled_for(tmp_path):
    major, minor = torch.cuda.get_device_capability()
    other = "sm_80" if major == 7 else "sm_75"
    write_copy(tmp_path, old="codes = _codes(architectures)", new=f"codes = [{other!r}]")
    why = f"its compute capability is {major}.{minor}, and the kernels were compiled for {other}"
    code = f"""
        import pytest, torch, layernorm_inline
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError, match="cannot run on cuda:0: {why}"):
            layernorm_inline.layer_norm(x, (4,))
        assert (x + 1).sum().item() == 16
    """
    done = import_in_subprocess(tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_the_switch_makes_every_call_run_pytorchs_operations(tmp_path):
    """With shapes and dtypes that the kernels would take, in fake CUDA tensors."""
    code = """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode
        import layernorm_inline as L

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                ops.append(function.name())
                return function(*args, **(kwargs or {}))

        def run(function):
            ops.clear()
            y = function()
            print(*[op[6:].split(".")[0] for op in ops if "norm" in op or "gelu" in op or "mul" in op or "conv" in op])
            assert y.is_cuda and not any("layernorm_inline" in op for op in ops)

        ops, device = [], dict(device="cuda")
        with FakeTensorMode(), Record():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.empty(2, 40001, dtype=dtype, **device)
                w = torch.empty(40001, **device)
                run(lambda: L.layer_norm(x, (40001,)))
                run(lambda: L.layer_norm(x, (40001,), w, w, activation="gelu_tanh", scale=2.0))
                run(lambda: L.LayerNorm(40001, dtype=dtype, **device)(x))
                run(lambda: L.ModelNew(40001, dtype=dtype, **device)(x))
                run(lambda: L.replace_layer_norm(torch.nn.LayerNorm(40001, dtype=dtype, **device))(x))
            with torch.device("cuda"):
                model = L.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1, scaling_factor=2.0)
            run(lambda: model(torch.empty(1, 32, 8, 8, 32, **device)))
    """
    done = import_in_subprocess(tmp_path, code, **{**FOR_9_0, "LAYERNORM_INLINE_DISABLE": "1"})
    norms = ["native_layer_norm", "native_layer_norm gelu mul", *["native_layer_norm"] * 3]
    assert done.stdout.splitlines() == [*norms, *norms, "convolution native_layer_norm gelu mul"], done.stderr
    assert (
        done.stderr.count("\n") == 1
        and "LAYERNORM_INLINE_DISABLE=1" in done.stderr
        and not (tmp_path / "cache").exists()
    )


@pytest.mark.parametrize("value", [None, "", "0", "[*?", " 1", "1"])
@pytest.mark.parametrize("switch", ["DISABLE", "BATCH_INVARIANT"])
def test_only_the_value_1_turns_a_switch_on(monkeypatch, capsys, switch, value):
    for name in ("DISABLE", "BATCH_INVARIANT"):
        monkeypatch.delenv(f"LAYERNORM_INLINE_{name}", raising=False)
    if value is not None:
        monkeypatch.setenv(f"LAYERNORM_INLINE_{switch}", value)
    module = emulator.definitions.__wrapped__(SOURCE.read_text())
    is_on = value == "1"
    assert ("-DLAYERNORM_BATCH_INVARIANT" in module["_CUDA_FLAGS"]) == (is_on and switch == "BATCH_INVARIANT")
    is_disabled = is_on and switch == "DISABLE"
    assert ("DISABLE" in module["_why_not"], "DISABLE" in capsys.readouterr().err) == (is_disabled, is_disabled)


@pytest.mark.parametrize("cuda,arch_list,why", [
    ("13.0", " ", "there was no usable GPU"),
    (None, "9.0", "PyTorch .* without CUDA"),
    ("11.7", "9.0", "PyTorch .* is built with CUDA 11.7, which is older than 11.8"),
    ("13.0", "7.0+PTX", "compute capability 7.5 is the oldest supported, not compute_70, sm_70"),
])  # fmt: skip
def test_a_cuda_tensor_raises_if_there_was_nothing_to_compile_for(builds, monkeypatch, cuda, arch_list, why):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    op, why_not = _load()
    monkeypatch.setattr(layernorm_inline, "_layer_norm_op", op)
    monkeypatch.setattr(layernorm_inline, "_why_not", why_not)
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"layernorm_inline: cannot run on cuda:0: {why}"):
        layernorm_inline.layer_norm(torch.empty(2, 4, device="cuda"), (4,))
    assert not builds.cache.exists()


# ---- Unusual environments ----


@pytest.mark.parametrize(
    "stream,how", [("stderr", "None"), ("stderr", "closed"), ("stderr", "only write"), ("stdout", "closed")]
)
def test_a_process_compiles_whose_output_cannot_be_flushed(tmp_path, monkeypatch, capfd, compiled, stream, how):
    closed = open(os.devnull, "w")
    closed.close()
    value = {"None": None, "only write": SimpleNamespace(write=lambda text: None), "closed": closed}[how]
    monkeypatch.setattr(sys, stream, value)
    _compile(tmp_path, ["sm_90a"])
    assert getattr(sys, stream) is value and compiled["name"] == NAME
    assert capfd.readouterr().out == "", "messages must not get into the program's output"


def test_the_message_about_another_build_needs_no_stderr(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    flock, calls = fcntl.flock, []

    def is_held_once(file, operation):
        calls.append(operation)
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", is_held_once)
    with layernorm_inline._acquire_lock(str(tmp_path)):
        assert len(calls) == 2 and capfd.readouterr().out == ""


@pytest.mark.parametrize("ninja", [SimpleNamespace(BIN_DIR="/where/ninja/is"), SimpleNamespace(), None])
def test_ninja_is_found_beside_python_and_where_pip_has_put_it(tmp_path, monkeypatch, compiled, ninja):
    """A package of the same name without BIN_DIR, such as django-ninja, does not matter."""
    monkeypatch.setitem(sys.modules, "ninja", ninja)
    _compile(tmp_path, ["sm_90a"])
    assert sysconfig.get_path("scripts") in compiled["path"]
    assert ("/where/ninja/is" in compiled["path"]) == hasattr(ninja, "BIN_DIR")
    assert "/where/ninja/is" not in os.environ["PATH"]


def test_compilers_use_the_folder_of_the_build_for_temporary_files(builds, tmp_path, monkeypatch):
    """TMPDIR may name the folder of an ended job. Python remembers TMPDIR, so it must not be asked during the build.

    ninja runs the compilers in the folder of the build, whose name may have a blank, which nvcc cannot use.
    """
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "ended"))
    _load()
    folder, variable, remembered = builds.temporary
    assert variable == "." and folder != remembered and os.environ["TMPDIR"] == str(tmp_path / "ended")


def test_variables_that_another_thread_removes_do_not_matter(monkeypatch):
    monkeypatch.setenv("BEFORE", "value")
    monkeypatch.delenv("ADDED", raising=False)
    with layernorm_inline._environment(BEFORE="x", ADDED="x"):
        del os.environ["BEFORE"], os.environ["ADDED"]
    assert os.environ["BEFORE"] == "value" and "ADDED" not in os.environ

    class Changing(dict):
        def __contains__(self, name):
            return True

    monkeypatch.setattr(os, "environ", Changing())  # the variable disappears after the question whether it exists
    with layernorm_inline._environment(ADDED="x"):
        assert os.environ["ADDED"] == "x"
    assert not list(os.environ)


def test_a_child_that_was_forked_while_another_thread_builds_can_build(builds, monkeypatch):
    """It has the environment from before the build, neither waits for the thread nor deletes the thread's folder."""
    started, may_end, before = threading.Event(), threading.Event(), dict(os.environ)

    def compile_(name, folder, codes, compile_=layernorm_inline._compile):
        with layernorm_inline._environment(PATH="of the build"):
            started.set()
            may_end.wait(60)
        return compile_(name, folder, codes)

    monkeypatch.setattr(layernorm_inline, "_compile", compile_)
    thread = threading.Thread(target=_load)
    thread.start()
    started.wait(60)
    assert os.environ["PATH"] == "of the build"
    if (child := os.fork()) == 0:
        signal.alarm(60)  # ends a child that waits for ever
        is_right = False
        try:
            may_end.set()
            is_restored = dict(os.environ) == before
            _load(NAME + "_epilogue")
            gc.collect()
            atexit._run_exitfuncs()
            is_right = is_restored and len(builds.built) == 1 and len(list(builds.folder.glob("build-*"))) == 1
        finally:
            os._exit(0 if is_right else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    may_end.set()
    thread.join()
    assert status == 0 and len(builds.loaded) == 1 and dict(os.environ) == before


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
