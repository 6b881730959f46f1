"""Formats the C++ and CUDA strings in layernorm_inline.py with clang-format (--check: only compares)."""

import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent.parent / "layernorm_inline.py"
SOURCES = re.compile(r'(?<=r""")\n((?:#[id]|namespace|// ----).*?)(?=""")', re.S)


def formatted(match):
    command = [
        "clang-format",
        "--assume-filename=source.cu",
        f"--style=file:{Path(__file__).parent.parent}/.clang-format",
    ]
    return "\n" + subprocess.run(command, input=match[1], capture_output=True, text=True, check=True).stdout


before = FILE.read_text()
after, count = SOURCES.subn(formatted, before)
assert count == 14, "expected the interface, twelve rooms of CUDA, and the C++ source"
if "--check" not in sys.argv:
    FILE.write_text(after)
elif after != before:
    sys.exit("layernorm_inline.py: run python .ci/clang_format.py")
