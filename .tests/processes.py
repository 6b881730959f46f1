"""Runs Python in child processes. A child is killed when its parent ends, and before the time limit of a test."""

import ctypes
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "layernorm_inline.py"
CACHE = os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions")


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(command, **options):
    """Starts a child process, and returns it as a Popen object."""
    return subprocess.Popen(command, preexec_fn=end_with_parent, text=True, **options)


def run(command, timeout=500, **options):  # less than TIME_LIMIT in conftest.py
    """Runs a child process, and returns the CompletedProcess with its output."""
    options.update(preexec_fn=end_with_parent, capture_output=True, text=True, timeout=timeout)
    return subprocess.run(command, **options)


def environment_with(**changes):
    """Returns a copy of the environment with changed variables. The value None removes a variable."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def import_in_subprocess(folder, code="import layernorm_inline", **environment):
    """Runs code in a folder with a build cache, and with a copy of layernorm_inline.py unless it has one."""
    if not Path(folder, SOURCE.name).exists():
        shutil.copy(SOURCE, folder)
    variables = environment_with(**{"TORCH_EXTENSIONS_DIR": os.path.join(folder, "cache"), **environment})
    return run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, env=variables)


def run_here(code, **environment):
    """Runs code in the folder of the tests, with the modules of the tests on the path and the existing build cache."""
    path = f"{ROOT / '.tests'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    variables = environment_with(**{"TORCH_EXTENSIONS_DIR": CACHE, "PYTHONPATH": path, **environment})
    return run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT / ".tests", env=variables)


def lacks(what):
    """Skips a test that lacks something, or fails it with REQUIRE_PACKAGES=1."""
    report = pytest.fail if os.environ.get("REQUIRE_PACKAGES") == "1" else pytest.skip
    report(what)


def package(name):
    """Imports an optional package. If it is not installed, the test is skipped or fails."""
    if importlib.util.find_spec(name) is None:
        lacks(f"{name} is not installed")
    return importlib.import_module(name)
