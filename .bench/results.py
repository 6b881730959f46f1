"""Reads and writes RESULTS.md, in which each script of this folder has sections of its own.

python .bench/results.py        prints README's tables from RESULTS.md
"""

import math
import re
from pathlib import Path

FILE = Path(__file__).parent / "RESULTS.md"
TITLE = "# Results\n\nWritten by the scripts of this folder. Do not edit.\n"

# The (rows, cols) of TritonBench's LayerNorm operator, which Helion's benchmark runs, too.
TRITONBENCH = [(4096, 512 * i) for i in range(2, 32)]

# README's first table: single operations, in milliseconds, on the first GPU of RESULTS.md.
OPERATIONS = {
    "problem 40, float32": "KernelBench level 1, problem 40: forward of 16 rows of 4 million, fp32",
    "problem 34, float32, TF32 allowed for convolutions (the default)": "KernelBench level 2, problem 34: forward of "
    "ConvTranspose3d, LayerNorm, GELU and scaling, fp32 (TF32)",
    "forward | 8192 x 1024 | bf16": "forward, 8192 x 1024, bf16",
    "training step | 8192 x 1024 | bf16": "forward and backward, 8192 x 1024, bf16",
    "forward | 65536 x 1024 | bf16": "forward, 65536 x 1024, bf16",
    "training step | 65536 x 1024 | bf16": "forward and backward, 65536 x 1024, bf16",
    "forward | 65536 x 1024 | fp32": "forward, 65536 x 1024, fp32",
    "backward | 65536 x 1024 | fp32": "backward, 65536 x 1024, fp32",
    "forward | 32768 x 2041 | bf16": "forward, 32768 x 2041, bf16",
}

# README's table of fractions of copy bandwidth, on all GPUs.
SPEED = {
    "forward": "8192 x 768 bf16, 8192 x 1024 bf16, 65536 x 1024 bf16, 65536 x 1024 fp32, 1048576 x 64 bf16, "
    "16384 x 4096 bf16, 32768 x 2041 bf16, 4096 x 16384 fp32, 256 x 262144 fp32",
    "backward": "8192 x 768 bf16, 65536 x 1024 bf16, 65536 x 1024 fp32, 32768 x 320 bf16, 32768 x 2041 bf16, "
    "16384 x 4096 fp32, 8192 x 8192 bf16",
}
SPEED = [f"{step} | {' | '.join(case.rsplit(' ', 1))}" for step, cases in SPEED.items() for case in cases.split(", ")]

# Kind of section -> number of cells that identify a row of its table.
KEY_CELLS = {"Sweep": 3, "KernelBench": 1, "Models": 1, "Two GPUs": 2, "Other libraries": 3}


def write_section(heading, text, file=FILE):
    """Replaces the section with this heading, or adds it at the end."""
    before = file.read_text() if file.exists() else TITLE
    section = f"\n## {heading}\n\n{text.strip()}\n"
    place = re.search(rf"\n## {re.escape(heading)}\n.*?(?=\n## |\Z)", before, re.S)
    file.write_text(before[: place.start()] + section + before[place.end() :] if place else before + section)


def markdown_table(names, rows):
    """Returns a table. names: the column names; rows: lists of cells."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tables_of(text, kind):
    """Returns {GPU: {key: cells}} of the sections "kind, GPU" in RESULTS.md's text. A key is the row's first cells."""
    keys = KEY_CELLS[kind]
    tables = {}
    for section in text.split(f"\n## {kind}, ")[1:]:
        gpu, _, body = section.split("\n## ")[0].partition("\n")
        rows = [line.strip("| ").split(" | ") for line in body.split("\n") if line.startswith("| ")]
        tables[gpu] = {" | ".join(row[:keys]): row[keys:] for row in rows}
    return tables


def times_row(title, eager, compiled, new):
    """Returns the cells of a row of README's first table. Times are in milliseconds."""
    times = [f"{ms:#.3g}" for ms in (eager, compiled, new)]
    return [title, *times, f"{eager / new:.3g}x", f"{compiled / new:.3g}x"]


def tritonbench_row(sweep):
    """Returns the row of README's first table that sums up TritonBench's shapes."""
    times = [map(float, sweep[f"forward | {rows} x {cols} | fp16"][1:4]) for rows, cols in TRITONBENCH]
    pairs = [(eager / new, compiled / new) for eager, compiled, new in times]
    means = [f"{math.exp(sum(map(math.log, column)) / len(pairs)):.2f}x" for column in zip(*pairs)]
    wins = sum(min(pair) > 1 for pair in pairs)
    title = (
        f"forward, TritonBench's {len(pairs)} shapes, fp16: geometric mean (faster than both in {wins} of {len(pairs)})"
    )
    return [title, "", "", "", *means]


def short(gpu):
    """Returns a GPU's name without its manufacturer and memory."""
    return gpu.replace("NVIDIA ", "").split()[0]


def libraries_table(gpu, table):
    """Returns README's table of other libraries. table: a value of tables_of(text, "Other libraries")."""
    rows = []
    for key, cells in table.items():
        if key.startswith("operation"):
            header = [f"ms on an {gpu}", *cells]
        elif not key.startswith("---"):
            rows.append([key.replace(" | ", ", "), *(f"{float(ms):#.3g}" for ms in cells)])
    return markdown_table(header, rows)


def two_gpus_table(gpu, table):
    """Returns README's table of two GPUs, without the mode "reduced after".

    table: a value of tables_of(text, "Two GPUs").
    """
    header = [
        f"ms per training step, two {gpu}",
        "nn.LayerNorm, without DDP",
        "with DDP",
        "this file, without DDP",
        "with DDP",
    ]
    rows = []
    for key, cells in table.items():
        cols, dtype = key.split(" | ")
        if cols.isdigit():
            rows.append([f"{cols} columns, {dtype}", cells[0], cells[2], cells[3], cells[5]])
    return markdown_table(header, rows)


def readme_tables(text):
    """Returns README's tables of results as Markdown, made from RESULTS.md's text."""
    sweeps, models = tables_of(text, "Sweep"), tables_of(text, "Models")
    gpu = next(iter(sweeps))
    problems = tables_of(text, "KernelBench")[gpu]
    operations = []
    for key, title in OPERATIONS.items():
        cells = problems[key] if key in problems else sweeps[gpu][key][1:4]
        operations.append(times_row(title, *map(float, cells)))
    operations.append(tritonbench_row(sweeps[gpu]))
    header = [f"ms on an {gpu}", "eager", "torch.compile", "layernorm_inline", "over eager", "over torch.compile"]
    tables = [markdown_table(header, operations)]
    steps = [[name, *cells[1:5]] for name, cells in models[gpu].items() if name not in ("model", "---")]
    header = [f"training step, ms on an {gpu}", "eager", "eager, replaced", "compiled", "compiled, replaced"]
    tables.append(markdown_table(header, steps))
    speed = []
    for key in SPEED:
        row = [key.replace(" | ", ", ")]
        for table in sweeps.values():
            row += [f"{float(share):.2f}" for share in table[key][4:7]]
        speed.append(row)
    header = ["fraction of copy bandwidth"]
    for name in sweeps:
        header += [f"{short(name)}: eager", "torch.compile", "layernorm_inline"]
    tables.append(markdown_table(header, speed))
    problems = tables_of(text, "KernelBench")
    header = ["forward, ms"]
    for name in problems:
        header += [f"{short(name)}: eager", "torch.compile", "layernorm_inline"]
    keys = [key for key in problems[gpu] if key.startswith("problem")]
    rows = [[key, *(f"{float(ms):#.3g}" for table in problems.values() for ms in table[key])] for key in keys]
    tables.append(markdown_table(header, rows))
    tables += [libraries_table(*item) for item in tables_of(text, "Other libraries").items()]
    tables += [two_gpus_table(*item) for item in tables_of(text, "Two GPUs").items()]
    return "\n\n".join(tables)


if __name__ == "__main__":
    print(readme_tables(FILE.read_text()))
