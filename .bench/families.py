"""Draws the picture of the kernel families in .docs/kernels.md: where a row stays between its two uses.

python .bench/families.py           writes .github/families.png (needs matplotlib; no GPU)
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

FILE = Path(__file__).parent.parent / ".github" / "families.png"
MEMORY, CHIP, REGISTERS, SHARED = "#dbe4ee", "#f4f4f4", "#f6c667", "#8fc1a9"

# (title, where rows stay: a list of blocks (SM, registers or shared, label), arrows from input, caption)
FAMILIES = [
    ("register kernels", [(1, REGISTERS, "row 0"), (2, REGISTERS, "row 1")], "One warp or block per row.\nThe row stays in registers."),
    ("pipelined kernels", [(1, SHARED, "rows 0-8,\nleft half"), (2, SHARED, "rows 0-8,\nright half")], "One or more blocks share a row.\nEach keeps columns of several rows."),
    ("grid-resident kernel", [(0, SHARED, "first\nslice"), (1, SHARED, "..."), (2, SHARED, "..."), (3, SHARED, "last\nslice")], "All SMs share one row,\nwhich fills the whole chip."),
    ("two-pass kernels", [(1, CHIP, "sums of\nrow 0"), (2, CHIP, "sums of\nrow 1")], "Nothing stays. Input is read\nagain for the output."),
]  # fmt: skip


def arrow(panel, start, end, style="-|>", color="black"):
    panel.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=9, color=color, linewidth=1))


def draw(panel, title, blocks, caption):
    """Draws global memory with input and output, four multiprocessors (SMs), and the path of the rows."""
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


def main():
    figure, panels = plt.subplots(1, len(FAMILIES), figsize=(12, 3.1))
    for panel, family in zip(panels, FAMILIES):
        draw(panel, *family)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="black") for color in (MEMORY, REGISTERS, SHARED)]
    names = ["global memory", "kept in registers", "kept in shared memory"]
    figure.legend(handles, names, loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(FILE, dpi=110)


if __name__ == "__main__":
    main()
