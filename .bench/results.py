"""RESULTS.md: what the scripts of this folder have printed, each in a section of its own.

    python .bench/results.py        prints README's tables of the sweep and of the models from it

README's first two rows are what test_layernorm_inline.py prints, without and with --problem 34.
"""

import re
from pathlib import Path

FILE = Path(__file__).parent / "RESULTS.md"
TITLE = "# Results\n\nWritten by sweep.py, sizes.py and models.py of this folder; do not edit.\n"

# Rows of README's tables: of the first GPU in milliseconds, and of all GPUs in fractions of copy speed.
GAINS = [f"{what} | {n} x 1024 | bf16" for n in (8192, 65536) for what in ("forward", "training step")]
GAINS += ["forward | 32768 x 2041 | bf16", "GPT-2 124M 8 x 1024, autocast", "pair stack 256 x 256 x 128, bf16"]
SPEED = {
    "forward": "8192 x 768 bf16, 8192 x 1024 bf16, 65536 x 1024 bf16, 65536 x 1024 fp32, 1048576 x 64 bf16, "
    "16384 x 4096 bf16, 32768 x 2041 bf16, 4096 x 16384 fp32, 256 x 262144 fp32",
    "backward": "8192 x 768 bf16, 65536 x 1024 bf16, 32768 x 320 bf16, 32768 x 2041 bf16, 8192 x 8192 bf16",
}
SPEED = [f"{what} | {' | '.join(case.rsplit(' ', 1))}" for what, cases in SPEED.items() for case in cases.split(", ")]


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


def tables_of(text, kind):
    """{GPU: {first words of a row: a list of its other words}} of RESULTS.md's sections of this kind."""
    keys = {"Sweep": 3, "Models": 1}[kind]  # cells that say what a row is
    tables = {}
    for section in text.split(f"\n## {kind}, ")[1:]:
        gpu, _, body = section.split("\n## ")[0].partition("\n")
        rows = [line.strip("| ").split(" | ") for line in body.split("\n") if line.startswith("| ")]
        tables[gpu] = {" | ".join(row[:keys]): row[keys:] for row in rows}
    return tables


def readme_tables(text):
    """What README's tables say of RESULTS.md's text: of the first GPU, how long, and of all, how near to copy speed."""
    sweeps, models = tables_of(text, "Sweep"), tables_of(text, "Models")
    gpu, gains = next(iter(sweeps)), []
    for key in GAINS:
        row = sweeps[gpu].get(key) or models.get(gpu, {}).get(key)
        if row:  # of a model: eager, replaced, torch.compile
            eager, compiled, ours = row[1:4] if key in sweeps[gpu] else (row[1], row[3], row[2])
            times = [f"{float(ms):#.3g}" for ms in (eager, compiled, ours)]
            factors = [f"{float(ms) / float(ours):.3g}x" for ms in (eager, compiled)]
            what = key.replace(" | ", ", ") if key in sweeps[gpu] else f"training step, {key}"
            gains.append([what, *times[:2], f"**{times[2]}**", *factors])
    speed = []
    for key in SPEED:
        row = [key.replace(" | ", ", ")]
        for table in sweeps.values():
            eager, compiled, ours = (f"{float(share):.2f}" for share in table[key][4:7])
            row += [eager, compiled, f"**{ours}**"]
        speed.append(row)
    names = ["eager", "torch.compile", "**ours**"]
    shares = ["fraction of copy speed"]
    for gpu_of_columns in sweeps:
        shares += [f"{gpu_of_columns.replace('NVIDIA ', '')}: {names[0]}", *names[1:]]
    gains = markdown_table([f"ms on an {gpu}", *names, "faster than eager", "than torch.compile"], gains)
    return gains + "\n\n" + markdown_table(shares, speed)


if __name__ == "__main__":
    print(readme_tables(FILE.read_text()))
