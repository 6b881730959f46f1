"""Times Liger-Kernel's layer norm beside eager PyTorch, torch.compile and layernorm_inline.

    pip install liger-kernel
    python .bench/libraries.py

prints a table, and writes it to .bench/RESULTS.md. Times are measured as in sweep.py: CUDA graphs, in turns, with L2
overwritten before each call. The shapes are those of README's table of speed with at most 65536 columns, because
Liger-Kernel rejects longer rows. Its results are compared with PyTorch's before they are timed.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402
import sweep  # noqa: E402

import layernorm_inline  # noqa: E402
from test_layernorm_inline import versions  # noqa: E402

MAX_COLUMNS = 65536  # of Liger-Kernel


class Liger:
    """Liger-Kernel with the one function of layernorm_inline that sweep.time_case needs."""

    @staticmethod
    def replace_layer_norm(norm):
        """Returns a function of the input that computes the same as an nn.LayerNorm, with its parameters."""
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x: LigerLayerNormFunction.apply(x, norm.weight, norm.bias, norm.eps)


def check(cols, dtype):
    """Raises AssertionError if Liger-Kernel's output or gradients differ from PyTorch's by more than roundings."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(cols, device="cuda", dtype=dtype)
    x, grad_output = (torch.randn(64, cols, device="cuda", dtype=dtype) for _ in range(2))
    x.requires_grad_()
    tensors = []
    for function in (norm, Liger.replace_layer_norm(norm)):
        y = function(x)
        tensors.append([y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), grad_output)])
    for expected, actual in zip(*tensors):
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error < 2e-2, f"rows of {cols}, {dtype}: Liger-Kernel's result differs by {error:.1e}"


def cases():
    """Yields (operation, rows, cols, dtype name)."""
    for line in results.SPEED:
        operation, shape, dtype = line.split(" | ")
        rows, cols = map(int, shape.split(" x "))
        if cols <= MAX_COLUMNS:
            yield operation, rows, cols, dtype


def as_markdown(table, version):
    """Returns the text of the section in RESULTS.md. table: dicts, as sweep.time_case returns them."""
    names = [
        "operation",
        "rows x cols",
        "dtype",
        "eager",
        "torch.compile",
        f"Liger-Kernel {version}",
        "layernorm_inline",
    ]
    rows = []
    for row in table:
        times = [f"{row[name]:.4f}" for name in ("eager", "compile", "Liger", "new")]
        rows.append([row["operation"], f"{row['rows']} x {row['cols']}", row["dtype"], *times])
    return f"{versions()}\n\nMilliseconds.\n\n{results.markdown_table(names, rows)}"


def main():
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    if importlib.util.find_spec("liger_kernel") is None:
        print("Nothing was timed, because Liger-Kernel is not installed: pip install liger-kernel")
        return 1
    table = []
    for operation, rows, cols, dtype in cases():
        check(cols, sweep.DTYPES[dtype])
        files = [("new", layernorm_inline), ("Liger", Liger)]
        table.append(sweep.time_case(operation, rows, cols, dtype, files=files))
    text = as_markdown(table, importlib.metadata.version("liger-kernel"))
    print(text)
    results.write_section(f"Other libraries, {torch.cuda.get_device_name()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
