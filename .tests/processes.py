"""Python in processes of their own, which end with the one that started them, and before its time limit."""

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
CACHE = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
TIMEOUT = 500  # seconds: less than a test has
PR_SET_PDEATHSIG = 1


def end_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command, **options):
    return subprocess.Popen(command, preexec_fn=end_with_parent, text=True, **options)


def run(command, timeout=TIMEOUT, **options):
    """The completed process, with what it printed."""
    return subprocess.run(
        command, preexec_fn=end_with_parent, capture_output=True, text=True, timeout=timeout, **options
    )


def environment_with(**changes):
    """A name whose value is None is not set."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def import_in_subprocess(folder, code="import layernorm_inline", **environment):
    """Runs code where layernorm_inline.py lies in `folder`, with a cache of its own; returns the completed process."""
    if not Path(folder, SOURCE.name).exists():
        shutil.copy(SOURCE, folder)
    variables = environment_with(**{"TORCH_EXTENSIONS_DIR": os.path.join(folder, "cache"), **environment})
    return run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, env=variables)


def run_here(code, **environment):
    """Runs code in the tests' folder, with the tests' modules and the cache that there is."""
    path = f"{ROOT / '.tests'}:{ROOT}"
    variables = environment_with(**{"TORCH_EXTENSIONS_DIR": CACHE, "PYTHONPATH": path, **environment})
    return run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT / ".tests", env=variables)


def package(name):
    """Imports what not everybody has installed; CI, which can, has to."""
    if importlib.util.find_spec(name) is None:
        needed = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        needed(f"{name} is not installed")
    return importlib.import_module(name)
