"""Formats the C++ and CUDA strings in layernorm_inline.py with clang-format.

With --check, changes nothing, and fails if a string is not formatted.
"""

import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent.parent / "layernorm_inline.py"
SOURCES = re.compile(r'(?<=r""")\n(.*?)(?=""")', re.S)


def formatted(match):
    """Returns the formatted text of a string that SOURCES matched."""
    command = [
        "clang-format",
        "--assume-filename=source.cu",
        f"--style=file:{Path(__file__).parent.parent}/.clang-format",
    ]
    return "\n" + subprocess.run(command, input=match[1], capture_output=True, text=True, check=True).stdout


before = FILE.read_text()
after, count = SOURCES.subn(formatted, before)
assert count == 20, f"expected 20 strings of C++ and CUDA, but found {count}"
if "--check" not in sys.argv:
    FILE.write_text(after)
elif after != before:
    sys.exit("layernorm_inline.py is not formatted. Run: python .ci/clang_format.py")
