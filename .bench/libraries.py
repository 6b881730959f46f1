"""Times the layer norms of Liger-Kernel and QuACK beside eager PyTorch, torch.compile and layernorm_inline.

    pip install liger-kernel "quack-kernels[cu13]"
    python .bench/libraries.py

prints a table, and writes it to .bench/RESULTS.md. Times are measured as in sweep.py: CUDA graphs, in turns, with L2
overwritten before each call. The shapes are those of README's table of speed, and one that all libraries do well. A library
that is not installed is skipped with a message. A shape whose result a library cannot compute, or computes with an error
of more than roundings, has "-".

QuACK's weight and bias are float32, because it accepts no others. Its forward and backward are functions of their own; here
an autograd function calls them.
"""

import importlib
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


class Liger:
    """Liger-Kernel with the one function of layernorm_inline that sweep.time_case needs."""

    name, package, module = "Liger-Kernel", "liger-kernel", "liger_kernel"

    @staticmethod
    def replace_layer_norm(norm):
        """Returns a function of the input that computes the same as an nn.LayerNorm, with its parameters."""
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x: LigerLayerNormFunction.apply(x, norm.weight, norm.bias, norm.eps)


class QuackFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        quack = importlib.import_module("quack.rmsnorm")
        if not any(ctx.needs_input_grad):
            return quack.layernorm_fwd(x, weight, bias, eps)
        y, rstd, mean = quack.layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, rstd, mean = ctx.saved_tensors
        return (*importlib.import_module("quack.rmsnorm").layernorm_bwd(x, weight, grad_output, rstd, mean), None)


class Quack:
    """QuACK, like Liger."""

    name, package, module = "QuACK", "quack-kernels", "quack.rmsnorm"

    @staticmethod
    def replace_layer_norm(norm):
        weight, bias = (p.detach().float().requires_grad_() for p in (norm.weight, norm.bias))

        def function(x):
            # Without gradients the statistics are not written, as with the other libraries.
            affine = (weight, bias) if torch.is_grad_enabled() else (weight.detach(), bias.detach())
            return QuackFunction.apply(x, *affine, norm.eps)

        function.weight, function.bias = weight, bias  # sweep.time_case needs their gradients
        return function


LIBRARIES = [Liger, Quack]


def installed():
    """Returns {library: version} of those that can be imported, and prints why others cannot."""
    versions_of = {}
    for library in LIBRARIES:
        try:
            importlib.import_module(library.module)
            versions_of[library] = importlib.metadata.version(library.package)
        except Exception as error:  # whatever an import of a stranger raises
            print(f"{library.name} is skipped: {type(error).__name__}: {error}")
    return versions_of


def why_wrong(library, rows, cols, dtype, is_backward, device="cuda"):
    """Returns why the library cannot be timed: its error, or how much it differs from PyTorch. None if it is right."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(cols, device=device, dtype=dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, grad_output = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_(is_backward)
    tensors = []
    try:
        for function in (norm, library.replace_layer_norm(norm)):
            with torch.set_grad_enabled(is_backward):
                y = function(x)
            tensors.append([y])
            if is_backward:
                leaves = x, getattr(function, "weight", norm.weight), getattr(function, "bias", norm.bias)
                tensors[-1] += torch.autograd.grad(y, leaves, grad_output)
        if x.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # whatever a library raises
        return f"{type(error).__name__}: {str(error)[:200]}"
    for expected, actual in zip(*tensors):
        error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
        if not error < 2e-2:
            return f"differs from PyTorch by {error:.1e}"
    return None


def cases():
    """Yields (operation, rows, cols, dtype name)."""
    also = [f"{operation} | 16384 x 4096 | bf16" for operation in ("forward", "backward")]
    for line in [*results.SPEED, *also]:
        operation, shape, dtype = line.split(" | ")
        rows, cols = map(int, shape.split(" x "))
        yield operation, rows, cols, dtype


def as_markdown(table, versions_of):
    """Returns the text of the section in RESULTS.md. table: dicts, as sweep.time_case returns them."""
    names = ["operation", "rows x cols", "dtype", "eager", "torch.compile"]
    names += [f"{library.name} {version}" for library, version in versions_of.items()]
    rows = []
    for row in table:
        keys = ["eager", "compile", *(library.name for library in versions_of), "new"]
        times = [f"{row[key]:.4f}" if key in row else "-" for key in keys]
        rows.append([row["operation"], f"{row['rows']} x {row['cols']}", row["dtype"], *times])
    return f"{versions()}\n\nMilliseconds.\n\n{results.markdown_table([*names, 'layernorm_inline'], rows)}"


def main():
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    versions_of = installed()
    if not versions_of:
        print("Nothing was timed, because no library can be imported.")
        return 1
    table = []
    for operation, rows, cols, dtype in cases():
        files = [("new", layernorm_inline)]
        for library in versions_of:
            why = why_wrong(library, rows, cols, sweep.DTYPES[dtype], operation == "backward")
            if why is None:
                files.append((library.name, library))
            else:
                print(f"{library.name} is not timed in {operation} of {rows} x {cols} {dtype}: {why}", flush=True)
        table.append(sweep.time_case(operation, rows, cols, dtype, files=files))
        print(table[-1], flush=True)
    text = as_markdown(table, versions_of)
    print(text)
    results.write_section(f"Other libraries, {torch.cuda.get_device_name()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
