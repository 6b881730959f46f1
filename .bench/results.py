"""Reads and writes RESULTS.md, in which each script of this folder has sections of its own.

python .bench/results.py        prints README's tables and sentences with results from RESULTS.md
python .bench/results.py FILE   draws README's picture from RESULTS.md (needs matplotlib)
"""

import re
import statistics
import sys
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

# README's table of operations on all GPUs.
SPEED = {
    "forward": "8192 x 768 bf16, 32768 x 2041 bf16, 1024 x 65536 bf16",
    "backward": "8192 x 768 bf16",
}
SPEED = [f"{step} | {' | '.join(case.rsplit(' ', 1))}" for step, cases in SPEED.items() for case in cases.split(", ")]

# Kind of section -> number of cells that identify a row of its table.
KEY_CELLS = {
    "Sweep": 3,
    "Autocast": 3,
    "Models": 2,
    "Other libraries": 3,
    "Evaluator of problem 40": 2,
    "Evaluator of problem 34": 2,
}


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


def floats(cells):
    return [float(cell) for cell in cells]


def short(gpu):
    return gpu.removeprefix("NVIDIA ").split()[0]  # H200


def is_odd(columns, dtype):
    return columns * (4 if dtype == "fp32" else 2) % 16 != 0


def gain_of_norms(sweep, is_meant):
    """Returns the median gains over eager and torch.compile of all forward and backward shapes that are meant."""
    gains = []
    for key, cells in sweep.items():
        operation, shape, dtype = key.split(" | ")
        if operation in ("forward", "backward") and is_meant(int(shape.split(" x ")[1]), dtype):
            eager, compiled, new = floats(cells[1:4])
            gains.append((eager / new, compiled / new))
    return [statistics.median(of_kind) for of_kind in zip(*gains)]


def over_both(gains):
    eager, compiled = (f"{gain:.1f}x" if gain < 10 else f"{gain:.0f}x" for gain in gains)
    return f"{eager} eager, {compiled} torch.compile"


def gains_of_models(models):
    """Returns what a training step gains that is not compiled. models: the table of one GPU."""
    gains = {name.split(" | ")[0]: cells[5] for name, cells in models.items() if name.endswith(" | training")}
    words = (f"{name} {gain}{'' if 'no' in gain else 'x'}" for name, gain in gains.items() if "parameters" not in name)
    return ", ".join(words)


def evaluated(text, problem):
    """Returns {GPU: milliseconds of eager, torch.compile and layernorm_inline} by KernelBench's clock do_bench.

    The default clock, cuda_event, waits for the GPU before each call, so that its mean contains pauses of the host.
    """
    tables = tables_of(text, f"Evaluator of problem {problem}")
    return {gpu: floats(table["fp32 | do_bench"][1:4]) for gpu, table in tables.items()}


def first_table(text):
    """Returns the table on README's first screen."""
    sweeps, models = tables_of(text, "Sweep"), tables_of(text, "Models")
    kernels = {
        "a norm alone, 16,384 columns or more (median)": lambda columns, dtype: columns >= 16384,
        "a norm alone, rows not a multiple of 16 bytes (median)": is_odd,
        "a norm alone, other rows, as in most models (median)": lambda columns, dtype: (
            columns < 16384 and not is_odd(columns, dtype)
        ),
    }
    rows = {"a model without `torch.compile`: a training step": [gains_of_models(models[gpu]) for gpu in sweeps]}
    compiled = "nothing: the compiler fuses rows of up to 8192 bf16 columns with their neighbours, "
    compiled += "and this file leaves them to it"
    rows["a model with `torch.compile`"] = [compiled, *["nothing"] * (len(sweeps) - 1)]
    for name, is_meant in kernels.items():
        rows[name] = [over_both(gain_of_norms(sweep, is_meant)) for sweep in sweeps.values()]
    for level, problem in ((1, 40), (2, 34)):
        times = evaluated(text, problem)
        gains = [[ms / times[gpu][2] for ms in times[gpu][:2]] for gpu in sweeps]
        rows[f"[KernelBench](#kernelbench) level {level}, problem {problem}"] = [over_both(of_gpu) for of_gpu in gains]
    rows["A100, RTX 30 to 50, B200"] = ["unknown: compiled and emulated, but never run", ""]
    header = ["you run", *(f"you gain on an {short(gpu)}" for gpu in sweeps)]
    return markdown_table(header, [[name, *cells] for name, cells in rows.items()])


def speed_table(sweeps):
    """Returns README's table of operations."""
    header = ["operation"]
    for gpu in sweeps:
        header += [f"{short(gpu)}, ms", "over eager", "over compile"]
    rows = []
    for key in SPEED:
        row = [key.replace(" | ", ", ")]
        for sweep in sweeps.values():
            eager, compiled, new = floats(sweep[key][1:4])
            row += [f"{new:#.3g}", f"{eager / new:.2f}", f"{compiled / new:.2f}"]
        rows.append(row)
    return markdown_table(header, rows)


def models_table(models):
    """Returns README's table of training steps that are not compiled."""
    header, rows = ["model, input, precision"], {}
    for gpu, table in models.items():
        header += [f"{short(gpu)}: eager, ms", "replaced, ms", "gain"]
        for key, (size, precision, _, original, new, gain, *_) in table.items():
            name, step = key.split(" | ")
            if step == "training" and "parameters" not in name:
                row = rows.setdefault(f"{name}, {size}, {precision}", {})
                row[gpu] = [original, new, gain if "no" in gain else f"{gain}x"]
    return markdown_table(
        header, [[n, *(c for g in models for c in row.get(g, ["", "", ""]))] for n, row in rows.items()]
    )


def models_sentences(models):
    """Returns what README says about compiled models, and about the spread of the training steps in its table."""
    cells = [(gpu, key, row) for gpu, table in models.items() for key, row in table.items() if " | " in key]
    compiled = [float(row[5]) for _, key, row in cells if "compiled" in key and "no" not in row[5]]
    spreads = [float(row[6]) for _, key, row in cells if key.endswith(" | training") and row[6] != "-"]
    spread = f"gains vary by up to {max(spreads):.3f}" if spreads else "one run"
    change = f"{min(compiled)}x to {max(compiled)}x" if compiled else "no change"
    return [f"Compiled: {change}", spread]


def problems_table(text):
    """Returns README's table of the two benchmark problems, whose gains are in the first table."""
    rows = []
    for problem in (40, 34):
        for gpu, times in evaluated(text, problem).items():
            rows.append([f"{problem}, {short(gpu)}", *(f"{ms:#.3g}" for ms in times)])
    return markdown_table(["problem, GPU", "eager, ms", "torch.compile, ms", "layernorm_inline, ms"], rows)


def readme_tables(text):
    """Returns README's tables, and its sentences with results, as Markdown, made from RESULTS.md's text."""
    models = {
        gpu: {key: cells for key, cells in table.items() if key not in ("model | step", "--- | ---")}
        for gpu, table in tables_of(text, "Models").items()
    }
    other = next(iter(tables_of(text, "Other libraries").values()))
    gains = [float(cells[2]) / float(cells[3]) for key, cells in other.items() if key in SPEED]
    tables = [first_table(text), speed_table(tables_of(text, "Sweep")), models_table(models), problems_table(text)]
    liger = f"{min(gains):.1f} to {max(gains):.1f} times as fast"
    return "\n\n".join([*tables, *models_sentences(models), liger])


def plot(sweep, gpu, file):
    """Draws the fraction of copy bandwidth against the row length, one panel for forward and one for backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    names = {"eager": "tab:gray", "torch.compile": "tab:orange", "layernorm_inline": "tab:green"}
    for panel, operation in zip(panels, ("forward", "backward")):
        for dtype, line in (("fp32", "-"), ("bf16", "--")):
            points = []
            for key, cells in sweep.items():
                rows, _, columns = key.split(" | ")[1].partition(" x ")
                if key == f"{operation} | {rows} x {columns} | {dtype}" and int(rows) * int(columns) == 2**26:
                    points.append((int(columns), *floats(cells[4:7])))
            lengths, *fractions = zip(*points)
            for of_kind, (name, color) in zip(fractions, names.items()):
                panel.plot(lengths, of_kind, line, color=color, label=f"{name}, {dtype}")
        panel.set(title=f"{operation}, {gpu}", xlabel="columns N (rows x N = 67 million)", xscale="log", ylim=(0, 1.1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("fraction of copy bandwidth")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:]:
        gpu, sweep = next(iter(tables_of(FILE.read_text(), "Sweep").items()))
        plot(sweep, gpu, sys.argv[1])
    else:
        print(readme_tables(FILE.read_text()))
