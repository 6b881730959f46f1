"""RESULTS.md: what the scripts of this folder have printed, each in a section of its own."""

import re
from pathlib import Path

FILE = Path(__file__).parent / "RESULTS.md"
TITLE = "# Results\n\nWritten by the scripts of this folder; do not edit.\n"


def write_section(heading, text, file=FILE):
    """Replaces the section of this heading, or adds it at the end."""
    before = file.read_text() if file.exists() else TITLE
    section = f"\n## {heading}\n\n{text.strip()}\n"
    place = re.search(rf"\n## {re.escape(heading)}\n.*?(?=\n## |\Z)", before, re.S)
    file.write_text(before[: place.start()] + section + before[place.end() :] if place else before + section)


def markdown_table(names, rows):
    """names: of the columns; rows: of words."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
