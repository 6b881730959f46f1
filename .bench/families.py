"""Measures what each kernel family of layernorm_inline.py costs and gains, and draws the picture of the families.

    python .bench/families.py --picture   writes .github/families.png: where a row stays between its two uses
                                          (needs matplotlib; no GPU)
    python .bench/families.py --lines     prints lines, and seconds of nvcc, without each family (needs nvcc; no GPU)
    python .bench/families.py             times the shapes of each family on a GPU, without it and with the whole file

The last two print rows of the table in .docs/kernels.md. A family is deleted with its `if`s in dispatch, and with the
sections that only deleted families use. In the last form, both versions run in one process, in turns.
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / ".tests")]
import emulator  # noqa: E402

SOURCE = ROOT / "layernorm_inline.py"

# ---- Deleting families ----

# name: (how the title of its section begins, what its `if`s in dispatch call)
FAMILIES = {
    "register forward": ("Register kernels, forward", "registers::launch_forward"),
    "register backward": ("Register kernels, backward", "registers::launch_backward"),
    "pipelined": ("Pipelined kernels", "pipelined::supports"),
    "grid-resident": ("Grid-resident kernel", "grid_resident::launch_grid_resident"),
}
LAST_PART = "# 7  KernelBench problem 34"


def without(text, names):
    """Returns the text of layernorm_inline.py without these families. "problem 34" deletes the last part."""

    def is_deleted(section):
        of_one = any(section.startswith(f"// ==== {FAMILIES[name][0]}") for name in names if name in FAMILIES)
        users = re.match(r".*\n// Only for (.*)\.\n", section)
        return of_one or (users and {*re.split(", | and ", users[1])} <= {*names})

    if "problem 34" in names:
        text = text[: text.index(LAST_PART)]
    text = "".join(section for section in re.split("^(?=// ==== )", text, flags=re.M) if not is_deleted(section))
    for name in names:
        while name in FAMILIES and (called := text.find(FAMILIES[name][1])) >= 0:
            start = text.rindex("if (", 0, called)
            end = emulator.end_of(text, text.index("(", start))
            block = re.compile(r"\s*\{").match(text, end)
            end = emulator.end_of(text, block.end() - 1) if block else text.index(";", end) + 1
            text = text[:start] + text[end:]
    return text


# ---- Lines, and seconds of nvcc ----


def nvcc_seconds(text):
    """Returns the user seconds of cicc and of all steps of nvcc for the first library of a version of the file."""
    from machine_code import nvcc

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cu").write_text(emulator.sources(text)[""].cuda)
        flags = "-std=c++17 --expt-relaxed-constexpr -DTORCH_EXTENSION_NAME=timed -gencode=arch=compute_90a,code=sm_90a"
        command = [nvcc(), "--dryrun", "-cubin", "-o", "kernels.cubin", *flags.split(), "kernels.cu"]
        listed = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, check=True).stderr
        steps = [line.removeprefix("#$ ") for line in listed.splitlines()]
        setting = next(step for step in steps if step.startswith("CICC_PATH="))
        seconds = {"cicc": 0.0, "all": 0.0}
        for step in steps:
            if re.match(r"\w+=", step):
                continue
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run(
                ["bash", "-c", f"{setting}; PATH=$CICC_PATH:{Path(nvcc()).parent}:$PATH; {step}"],
                cwd=folder,
                check=True,
            )
            took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            seconds["all"] += took
            seconds["cicc"] += took * ("cicc" in step.split()[0])
        return seconds["cicc"], seconds["all"]


def print_lines():
    """Prints for each family how many lines and seconds its deletion saves."""
    whole = SOURCE.read_text()
    before = nvcc_seconds(whole)
    print(f"whole file: {whole.count(chr(10))} lines; cicc {before[0]:.1f} s, nvcc {before[1]:.1f} s (user, sm_90a)")
    for names in (*((name,) for name in FAMILIES), (*FAMILIES,)):
        text = without(whole, names)
        cicc, nvcc = (a - b for a, b in zip(before, nvcc_seconds(text)))
        lines = whole.count("\n") - text.count("\n")
        print(f"| {', '.join(names)} | {lines} | | {cicc:.1f}; {nvcc:.1f} |", flush=True)
    lines = whole.count("\n") - without(whole, ["problem 34"]).count("\n")
    print(f"| problem 34 | {lines} | | a library of its own |")


# ---- Times ----

# family: (operation, rows, columns, dtype), as in sweep.py
SHAPES = {
    "register forward": [
        ("forward", 65536, 256, "bf16"), ("forward", 8192, 768, "bf16"), ("forward", 65536, 768, "fp32"),
        ("forward", 32768, 2041, "bf16"), ("forward", 16384, 4096, "fp32"), ("forward", 4096, 16384, "bf16"),
        ("forward GELU", 65536, 1024, "bf16"),
    ],
    "register backward": [
        ("backward", 65536, 256, "bf16"), ("backward", 8192, 768, "bf16"), ("backward", 65536, 768, "fp32"),
        ("backward", 32768, 2041, "bf16"), ("backward", 16384, 4096, "bf16"), ("backward GELU", 65536, 1024, "bf16"),
    ],
    "pipelined": [
        ("forward", 4096, 16384, "fp32"), ("forward", 1024, 65536, "bf16"), ("forward", 64, 1048576, "fp32"),
        ("backward", 8192, 8192, "bf16"), ("backward", 2048, 32768, "fp32"), ("backward", 64, 1048576, "bf16"),
    ],
    "grid-resident": [
        ("forward", 16, 4194304, "fp32"), ("forward", 16, 4194304, "bf16"), ("forward", 64, 2097152, "bf16"),
    ],
}  # fmt: skip


def problem_34_ratios():
    """Yields (setting, milliseconds with the last part, milliseconds with PyTorch's convolution and layer_norm)."""
    import torch

    import layernorm_inline
    from test_layernorm_inline import milliseconds, settings_34

    for setting in settings_34("cuda"):
        conv, norm, scale = setting.new.conv_transpose, setting.new.layer_norm, setting.new.scaling_factor

        def without_part(x=setting.x, conv=conv, norm=norm, scale=scale):
            y = conv(x)
            return layernorm_inline.layer_norm(y, (64,), norm.weight, norm.bias, norm.eps, "gelu", scale)

        with torch.no_grad():
            ms = milliseconds({"new": lambda: setting.new(setting.x), "without": without_part})
        yield setting.name, ms["new"], ms["without"]


def print_times():
    """Times the shapes of each family with the whole file and without the family, and prints both and the ratio."""
    import sweep

    import layernorm_inline

    print(sweep.versions())
    for name, shapes in SHAPES.items():
        ratios = []
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SOURCE.name).write_text(without(SOURCE.read_text(), [name, "problem 34"]))
            files = [("new", layernorm_inline), ("without", sweep.loaded(folder))]
            for case in shapes:
                ms = sweep.time_case(*case, compiled=False, files=files)
                ratios.append(ms["without"] / ms["new"])
                operation, rows, cols, dtype = case
                print(
                    f"{name}: {operation} {rows} x {cols} {dtype}: {ms['new']:.4f} -> {ms['without']:.4f} ms",
                    flush=True,
                )
        each = ", ".join(f"{o} {r} x {c} {d} {ratio:.2f}" for (o, r, c, d), ratio in zip(shapes, ratios))
        print(f"| {name} | | {each}; median {statistics.median(ratios):.2f} | |", flush=True)
    each = ", ".join(f"{name} {after / before:.2f}" for name, before, after in problem_34_ratios())
    print(f"| problem 34 | | {each} | |")


# ---- The picture ----

FILE = ROOT / ".github" / "families.png"
MEMORY, CHIP, REGISTERS, SHARED = "#dbe4ee", "#f4f4f4", "#f6c667", "#8fc1a9"

# (title, where rows stay: a list of blocks (SM, registers or shared, label), arrows from input, caption)
PANELS = [
    ("register kernels", [(1, REGISTERS, "row 0"), (2, REGISTERS, "row 1")], "One warp or block per row.\nThe row stays in registers."),
    ("pipelined kernels", [(1, SHARED, "rows 0-8,\nleft half"), (2, SHARED, "rows 0-8,\nright half")], "One or more blocks share a row.\nEach keeps columns of several rows."),
    ("grid-resident kernel", [(0, SHARED, "first\nslice"), (1, SHARED, "..."), (2, SHARED, "..."), (3, SHARED, "last\nslice")], "All SMs share one row,\nwhich fills the whole chip."),
    ("two-pass kernels", [(1, CHIP, "sums of\nrow 0"), (2, CHIP, "sums of\nrow 1")], "Nothing stays. Input is read\nagain for the output."),
]  # fmt: skip


def arrow(panel, start, end, style="-|>", color="black"):
    from matplotlib.patches import FancyArrowPatch

    panel.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=9, color=color, linewidth=1))


def draw(panel, title, blocks, caption):
    """Draws global memory with input and output, four multiprocessors (SMs), and the path of the rows."""
    from matplotlib.patches import Rectangle

    panel.set(xlim=(-0.1, 4.1), ylim=(-1.35, 3.2))
    panel.axis("off")
    panel.set_title(title, fontsize=10, fontweight="bold")
    for x, name in ((0, "input"), (2.1, "output")):
        panel.add_patch(Rectangle((x, 2.3), 1.9, 0.6, facecolor=MEMORY, edgecolor="black", linewidth=0.8))
        panel.text(x + 0.95, 2.6, name, ha="center", va="center", fontsize=8)
    for sm in range(4):
        panel.add_patch(Rectangle((sm + 0.04, 0), 0.92, 1.4, facecolor=CHIP, edgecolor="black", linewidth=0.8))
        panel.text(sm + 0.5, -0.2, "SM", ha="center", va="center", fontsize=7)
    for sm, color, label in blocks:
        panel.add_patch(Rectangle((sm + 0.1, 0.25), 0.8, 0.9, facecolor=color, edgecolor="black", linewidth=0.6))
        panel.text(sm + 0.5, 0.7, label, ha="center", va="center", fontsize=6.5)
        for shift in (-0.12, 0.02) if "two-pass" in title else (-0.1,):
            arrow(panel, (0.6 + 0.25 * sm, 2.3), (sm + 0.5 + shift, 1.15))
        arrow(panel, (sm + 0.62, 1.15), (2.5 + 0.35 * sm, 2.3), color="tab:blue")
    panel.text(2, -0.85, caption, ha="center", va="center", fontsize=7.5)


def draw_picture():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, panels = plt.subplots(1, len(PANELS), figsize=(12, 3.1))
    for panel, family in zip(panels, PANELS):
        draw(panel, *family)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="black") for color in (MEMORY, REGISTERS, SHARED)]
    names = ["global memory", "kept in registers", "kept in shared memory"]
    figure.legend(handles, names, loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(FILE, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--picture", action="store_true", help="draw the picture instead")
    parser.add_argument("--lines", action="store_true", help="count lines and seconds of nvcc instead")
    arguments = parser.parse_args()
    if arguments.picture:
        draw_picture()
        return 0
    if arguments.lines:
        print_lines()
        return 0
    import torch

    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    print_times()
    return 0


if __name__ == "__main__":
    sys.exit(main())
