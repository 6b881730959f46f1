"""Formats the C++ and CUDA strings in layernorm_inline.py with clang-format.

Does not wrap comments: clang-format would break the last word of a list's item off to a line of its own. With --check,
changes nothing, and fails if a string is not formatted, or if one of its lines has more than 120 characters.
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
assert count == 8, f"expected 8 strings of C++ and CUDA, but found {count}"
if "--check" not in sys.argv:
    FILE.write_text(after)
    sys.exit()
if after != before:
    sys.exit("layernorm_inline.py is not formatted. Run: python .ci/clang_format.py")
for match in SOURCES.finditer(before):
    for number, line in enumerate(match[1].split("\n"), before[: match.start(1)].count("\n") + 1):
        if len(line) > 120:
            sys.exit(f"layernorm_inline.py, line {number} has {len(line)} characters: wrap it at 120")
