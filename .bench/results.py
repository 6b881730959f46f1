"""Reads and writes RESULTS.md, in which each script of this folder has sections of its own.

python .bench/results.py        prints README's tables and sentences with results from RESULTS.md
"""

import re
from pathlib import Path

FILE = Path(__file__).parent / "RESULTS.md"
TITLE = """# Results

Written by the scripts of this folder. Do not edit.

Times are medians, measured with CUDA events. Unless a section says otherwise, the L2 cache is overwritten before each
call, and norms are replayed from CUDA graphs, so that no time of the CPU is included. torch.compile runs in its default
mode and compiles each norm alone, except under "Models". Copy bandwidth is the speed of a device copy of the bytes that
must move: input, output, weight and bias in forward, and 1.5 times as many in backward. A kernel can be slightly faster
than that, because PyTorch's copy is not the fastest for all sizes.
"""

# The (rows, cols) of TritonBench's LayerNorm operator, which Helion's benchmark runs, too.
TRITONBENCH = [(4096, 512 * i) for i in range(2, 32)]

# README's first table: the key of a row, and what README calls it. Times are those of the first GPU of RESULTS.md.
FIRST = {
    "problem 40, float32": "KernelBench level 1, 40: 16 rows of 4,194,304, fp32",
    "problem 34, float32, TF32 allowed for convolutions (the default)": "KernelBench level 2, 34: ConvTranspose3d, "
    "LayerNorm, GELU, scaling",
    "training step | 8192 x 1024 | bf16": "forward and backward, 8192 x 1024, bf16",
    "forward | 32768 x 2041 | bf16": "forward, 32768 x 2041, bf16",
    "ViT-B/16 128 images, autocast": "ViT-B/16, a training step, not compiled",
}

# README's table of operations on all GPUs.
SPEED = {
    "forward": "8192 x 768 bf16, 65536 x 1024 fp32, 1048576 x 64 bf16, 16384 x 4096 bf16",
    "backward": "8192 x 768 bf16, 65536 x 1024 bf16",
}
SPEED = [f"{step} | {' | '.join(case.rsplit(' ', 1))}" for step, cases in SPEED.items() for case in cases.split(", ")]

# Kind of section -> number of cells that identify a row of its table.
KEY_CELLS = {"Sweep": 3, "KernelBench": 1, "Models": 1, "Other libraries": 3}


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


def times_of(text):
    """Returns {GPU: {key: milliseconds of eager, torch.compile and layernorm_inline}} of sweeps and problems."""
    sweeps, problems = tables_of(text, "Sweep"), tables_of(text, "KernelBench")
    times = {}
    for gpu in sweeps:
        cells = {**problems[gpu], **{key: row[1:4] for key, row in sweeps[gpu].items()}}
        times[gpu] = {key: [float(ms) for ms in cells[key]] for key in [*FIRST, *SPEED] if key in cells}
    return times


def span(ratios):
    """Returns the smallest and the largest of some ratios as text, for example "1.01 to 1.02"."""
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))


def first_table(gpu, times, models):
    """Returns the table on README's first screen. times, models: {key: milliseconds} of this GPU."""
    rows = []
    for key, title in FIRST.items():
        if key in models:
            eager, new, *_ = models[key]
            rows.append([title, f"{eager:#.3g}", "-", f"**{new:#.3g}**", f"{eager / new:#.3g}"])
        else:
            eager, compiled, new = times[key]
            ratios = f"{eager / new:#.3g}, {compiled / new:#.3g}"
            rows.append([title, f"{eager:#.3g}", f"{compiled:#.3g}", f"**{new:#.3g}**", ratios])
    names = [f"{gpu}, ms", "nn.LayerNorm", "torch.compile", "layernorm_inline", "times as fast as each"]
    return markdown_table(names, rows)


def speed_table(times):
    """Returns README's table of operations. times: a value of times_of."""
    header = ["operation"]
    for gpu in times:
        header += [
            f"{gpu.replace('NVIDIA ', '').split()[0]}, ms",
            "times as fast as eager",
            "times as fast as torch.compile",
        ]
    rows = []
    for key in SPEED:
        ratios = [(new, eager / new, compiled / new) for eager, compiled, new in (t[key] for t in times.values())]
        rows.append([key.replace(" | ", ", "), *(f"{number:#.3g}" for numbers in ratios for number in numbers)])
    return markdown_table(header, rows)


def readme_tables(text):
    """Returns README's tables, and its sentences with results, as Markdown, made from RESULTS.md's text."""
    times = times_of(text)
    gpu = next(iter(times))
    models = {
        name: [float(ms) for ms in cells[1:5]]
        for name, cells in tables_of(text, "Models")[gpu].items()
        if name not in ("model", "---")
    }
    kinds = ("GPT-2", "ViT-B/16", "ConvNeXt-S", "pair stack")
    gpt, vit, convnext, pairs = (span([m[0] / m[1] for name, m in models.items() if kind in name]) for kind in kinds)
    eager_step = (
        f"a training step is {gpt} times as fast (GPT-2, bf16), {vit} (ViT-B/16), {convnext} (ConvNeXt-S), "
        f"{pairs} (two blocks of an AlphaFold-like pair stack)"
    )
    compiled_step = f"a compiled training step is {span([m[2] / m[3] for m in models.values()])} times as fast"
    other = next(iter(tables_of(text, "Other libraries").values()))
    forward, backward = (
        span([float(cells[2]) / float(cells[3]) for key, cells in other.items() if key.startswith(step)])
        for step in ("forward", "backward")
    )
    liger = f"{forward} times as fast in forward, {backward} in backward"
    tables = [first_table(gpu, times[gpu], models), speed_table(times)]
    eager, _, new = zip(*(times["NVIDIA H100 80GB HBM3"][problem] for problem in list(FIRST)[:2]))
    problems = f"On an H100, they are {eager[0] / new[0]:#.3g} and {eager[1] / new[1]:#.3g} times as fast"
    return "\n\n".join([*tables, problems, eager_step, compiled_step, liger])


if __name__ == "__main__":
    print(readme_tables(FILE.read_text()))
