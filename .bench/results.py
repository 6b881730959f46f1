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

# Rows of README's tables of norms alone, of other libraries, and of norms under autocast.
SHAPES = ["8192 x 768 | bf16", "32768 x 2041 | bf16", "2048 x 32768 | bf16"]
SPEED = [f"{step} | {shape}" for shape in SHAPES for step in ("forward", "backward")]
LONG = SHAPES[2]
OTHERS = ["16384 x 4096 | bf16"]
AUTOCAST = {"ViT-B/16": "25216 x 768 | fp32", "ConvNeXt-S": "401408 x 96 | bf16"}

UNCHANGED = "{} (within noise)"  # a quotient within the spread

PENDING = "<!-- figures: pending -->"  # where RESULTS.md has none yet

# Kind of section -> number of cells that identify a row of its table.
KEY_CELLS = {
    "Sweep": 3,
    "Autocast": 3,
    "Models": 2,
    "Training losses": 1,
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


def is_measured(cell):
    return cell != "-"


def gains_of_norms(sweep):
    """Returns ({operation: median gain over eager}, number of shapes) of norms alone."""
    gains = {"forward": [], "backward": []}
    for key, cells in sweep.items():
        operation = key.split(" | ")[0]
        if operation in gains:
            eager, _, new = floats(cells[1:4])
            gains[operation].append(eager / new)
    return {name: statistics.median(of_name) for name, of_name in gains.items()}, sum(map(len, gains.values()))


def times(gain):
    return f"{gain:.1f}x" if gain < 10 else f"{gain:.0f}x"


def training_steps(models):
    """Yields (model, its cells) of training steps that are not compiled. models: the table of one GPU."""
    for key, cells in models.items():
        name, _, step = key.partition(" | ")
        if step == "training" and "parameters" not in name:
            yield name, cells


def gain_cell(original, new, gain, no_change="no change"):
    """Returns the quotient of the two times that README shows, and `no_change` if the cell `gain` is that."""
    quotient = f"{float(original) / float(new):.2f}x"
    return no_change.format(quotient) if "no" in gain else quotient


def gains_of_models(models):
    """Returns what a training step under autocast gains by default. models: the table of one GPU."""
    gains = [f"{name} {gain_cell(*cells[3:6])}" for name, cells in training_steps(models) if "autocast" in cells[1]]
    return ", ".join(gains)


def gains_with_autocast_output(models):
    """Returns what a training step gains with autocast_output, and the memory that it saves, if that is 2% or more."""
    texts = []
    for name, (_, precision, _, original, _, _, _, output, gain, _, before, _, after) in training_steps(models):
        if "autocast" in precision and is_measured(gain):
            saved = 1 - float(after) / float(before)
            memory = f" ({saved:.0%} less memory)" if saved >= 0.02 else ""
            texts.append(f"{name} {gain_cell(original, output, gain)}{memory}")
    return ", ".join(texts) or "not measured"


def evaluated(text, problem):
    """Returns {GPU: milliseconds of eager, torch.compile and layernorm_inline} by KernelBench's clock do_bench.

    The default clock, cuda_event, waits for the GPU before each call, so that its mean contains pauses of the host.
    """
    tables = tables_of(text, f"Evaluator of problem {problem}")
    return {gpu: floats(table["fp32 | do_bench"][1:4]) for gpu, table in tables.items()}


def first_table(text):
    """Returns the table on README's first screen."""
    sweeps, models = tables_of(text, "Sweep"), tables_of(text, "Models")
    rows = {
        "a training step without `torch.compile`, autocast bf16": [gains_of_models(models[gpu]) for gpu in sweeps],
        "the same, norms return bf16 instead of float32 ([`autocast_output`](#autocast))": [
            gains_with_autocast_output(models[gpu]) for gpu in sweeps
        ],
    }
    compiled, alone = [], []
    for sweep in sweeps.values():
        medians, count = gains_of_norms(sweep)
        alone.append(", ".join(f"{operation} {times(gain)}" for operation, gain in medians.items()))
        long = {operation: floats(sweep[f"{operation} | {LONG}"][2:4]) for operation in medians}
        compiled.append(", ".join(f"{operation} {times(before / new)}" for operation, (before, new) in long.items()))
    fused = ["nothing: PyTorch's own norms run, fused with their neighbours", *["nothing"] * (len(sweeps) - 1)]
    rows["a model with `torch.compile`, rows of up to 16 KB (8192 bf16 columns)"] = fused
    rows["a norm with `torch.compile`, longer rows (here 32768 columns)"] = compiled
    rows[f"a norm without `torch.compile` (medians of {count} shapes)"] = alone
    gains = {gpu: [] for gpu in sweeps}
    for problem in (40, 34):
        for gpu, (eager, compiled, new) in evaluated(text, problem).items():
            gains[gpu].append(f"problem {problem}: {times(eager / new)}, {times(compiled / new)}")
    rows["[KernelBench](#kernelbench): over eager, torch.compile"] = ["; ".join(gains[gpu]) for gpu in sweeps]
    others = "other GPUs, from Turing to Blackwell (compiled and [emulated](.tests/README.md), never run)"
    rows[others] = ["not measured"] * len(sweeps)
    header = ["you run", *(f"you gain on an {short(gpu)}" for gpu in sweeps)]
    return markdown_table(header, [[name, *cells] for name, cells in rows.items()])


def speed_table(sweeps):
    """Returns README's table of norms alone."""
    header = ["bf16 rows: ms, over eager"]
    header += [f"{short(gpu)} {operation}" for gpu in sweeps for operation in ("forward", "backward")]
    rows = []
    for shape in SHAPES:
        row = [shape.split(" | ")[0]]
        for sweep in sweeps.values():
            for operation in ("forward", "backward"):
                eager, _, new = floats(sweep[f"{operation} | {shape}"][1:4])
                row.append(f"{new:#.3g}, {eager / new:.2f}x")
        rows.append(row)
    return markdown_table(header, rows)


def autocast_table(tables):
    """Returns README's table of norms under autocast, of the first GPU."""
    if not tables:
        return PENDING
    gpu, table = next(iter(tables.items()))
    header, columns = [f"ms, {short(gpu)}"], []
    for model, shape in AUTOCAST.items():
        for operation in ("forward", "backward"):
            header.append(f"{model} ({shape.replace(' |', '')}): {operation}")
            columns.append([f"{ms:#.3g}" for ms in floats(table[f"{operation} | {shape}"])])
    default, output = table["operation | rows x cols | input"][1:3]
    rows = [[way, *cells] for way, cells in zip(["nn.LayerNorm", default, f"`{output}`"], zip(*columns))]
    return markdown_table(header, rows)


def models_table(models):
    """Returns README's table of training steps that are not compiled, as far as they were also run with autocast_output."""
    header = ["model, input, GPU", "eager, ms", "default: ms, gain", "`autocast_output`: ms, gain"]
    header.append("GiB: eager, default, `autocast_output`")
    rows = []
    for gpu, table in models.items():
        for name, cells in training_steps(table):
            size, _, _, original, new, gain, _, output, output_gain, _, *memory = cells
            if is_measured(output):
                row = [
                    f"{name}, {size.split(' of ')[0]}, {short(gpu)}",
                    original,
                    f"{new}, {gain_cell(original, new, gain, UNCHANGED)}",
                ]
                rows.append(
                    [*row, f"{output}, {gain_cell(original, output, output_gain, UNCHANGED)}", ", ".join(memory)]
                )
    return markdown_table(header, rows)


def models_sentences(models):
    """Returns what README says about compiled models, and about the spread of the training steps in its table."""
    cells = [(gpu, key, row) for gpu, table in models.items() for key, row in table.items() if " | " in key]
    compiled = [row[5] for _, key, row in cells if key.endswith("training, compiled") and "no" not in row[5]]
    spreads = [
        float(row[i]) for _, key, row in cells if key.endswith(" | training") for i in (6, 9) if is_measured(row[i])
    ]
    change = f"gains {min(compiled)}x to {max(compiled)}x" if compiled else "does not change"
    return [f"Compiled training {change}", f"gains vary by up to {max(spreads):.3f}x"]


def losses_sentences(tables):
    """Returns what README says about the losses of trainings on the first GPU."""
    if not tables:
        return [PENDING]
    table = {name: cells for name, cells in next(iter(tables.values())).items() if name not in ("model", "---")}
    _, output, reordered = (f"{max(column):.2g}" for column in zip(*(floats(cells[2:]) for cells in table.values())))
    *names, last = table
    return [
        f"steps of {', '.join(names)} and {last}, losses with it differed from eager's by up to {output}",
        f"differently differed by up to {reordered}",
    ]


def libraries_table(tables):
    """Returns README's table of other libraries: milliseconds of norms alone."""
    gpu, table = next(iter(tables.items()))
    rows = []
    for shape in OTHERS:
        for operation in ("forward", "backward"):
            if cells := table.get(f"{operation} | {shape}"):
                name = f"{operation}, {shape.split(' | ')[0]}"
                rows.append([name, *(cell if is_measured(cell) else "fails" for cell in cells)])
    header = [f"bf16 rows, {short(gpu)}, ms", *table["operation | rows x cols | dtype"]]
    return markdown_table(header, rows)


def problems_table(text):
    """Returns README's table of the two benchmark problems, whose gains are in the first table."""
    problems = {problem: evaluated(text, problem) for problem in (40, 34)}
    header = ["ms: eager, torch.compile, layernorm_inline", *map(short, problems[40])]
    rows = []
    for problem, of_gpus in problems.items():
        rows.append([f"problem {problem}", *(", ".join(f"{ms:#.3g}" for ms in times) for times in of_gpus.values())])
    return markdown_table(header, rows)


def readme_tables(text):
    """Returns README's tables, and its sentences with results, as Markdown, made from RESULTS.md's text."""
    models = {
        gpu: {key: cells for key, cells in table.items() if key not in ("model | step", "--- | ---")}
        for gpu, table in tables_of(text, "Models").items()
    }
    tables = [first_table(text), models_table(models), *models_sentences(models)]
    tables += losses_sentences(tables_of(text, "Training losses"))
    tables += [autocast_table(tables_of(text, "Autocast")), speed_table(tables_of(text, "Sweep"))]
    tables += [libraries_table(tables_of(text, "Other libraries")), problems_table(text)]
    return "\n\n".join(table.replace("| ", "|").replace(" |", "|") for table in tables)


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
