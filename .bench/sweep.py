"""Times shapes and dtypes, forward and backward: eager PyTorch, torch.compile and ours, next to a device copy.

    python .bench/sweep.py                  prints a table, and writes it to .bench/RESULTS.md
    python .bench/sweep.py --plot FILE      draws it, too (needs matplotlib)
    python .bench/sweep.py --json FILE      writes it as data, too

"Floor" is the time of a copy of the bytes that LayerNorm cannot avoid moving, measured in the same run: input in and
output out, plus weight and bias; for backward 1.5 times a copy (input and grad_output in, grad_input out), for a training
step, forward and backward of the norm alone, both. How times are taken: milliseconds() in test_layernorm_inline.py. All but
the copy is replayed from a CUDA graph: called from Python, it can wait for the host.
"""

import argparse
import copy
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from layernorm_inline import layer_norm, replace_layer_norm  # noqa: E402
from test_layernorm_inline import milliseconds, versions  # noqa: E402

# (rows, cols, dtypes); "x[1:]" rows start 4 bytes (2 for 16-bit types) past a 16-byte boundary.
FORWARD = [
    *[(2**26 // n, n, "fp32 bf16 fp16") for n in (64, 256, 1024)],
    *[(8192, n, "bf16") for n in (768, 1024)],
    (65536, 768, "fp32 bf16"),
    (32768, 1536, "fp32"),
    (32768, 2041, "fp32 bf16 fp16"),
    (32768, 2047, "fp32 bf16"),
    (16384, 4096, "fp32 bf16 fp16"),
    (16384, 4099, "fp32 bf16"),
    (8192, 5120, "fp32"),
    *[(2**26 // n, n, "fp32 bf16") for n in (8192, 16384, 32768)],
    (1024, 50257, "fp32 bf16"),
    *[(2**26 // n, n, "fp32 bf16") for n in (65536, 262144, 1048576)],
    (512, 131072, "fp32"),
    (4194304, 16, "fp32"),
    (16, 4194304, "fp32"),
    (4, 16777216, "fp32"),
    (1, 67108864, "fp32"),
]
MISALIGNED = [(16384, 4096, "fp32 bf16")]
BACKWARD = [
    *[(2**26 // n, n, "fp32 bf16") for n in (64, 256, 1024, 4096, 8192, 16384, 32768)],
    (8192, 768, "bf16"),
    (65536, 768, "fp32 bf16"),
    (32768, 320, "bf16"),
    (32768, 2041, "fp32 bf16"),
    *[(2**26 // n, n, "fp32 bf16") for n in (131072, 262144, 1048576)],
    (16, 4194304, "fp32"),
]
TRAINING = [(8192, 1024, "bf16"), (65536, 1024, "bf16")]
GELU = [*[(2**26 // n, n, "fp32 bf16") for n in (64, 1024, 4096, 16384, 65536)], (16, 4194304, "fp32")]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cases():
    """Yields (what, rows, cols, dtype name)."""
    for what, shapes in (
        ("forward", FORWARD),
        ("forward x[1:]", MISALIGNED),
        ("backward", BACKWARD),
        ("training step", TRAINING),
        ("forward GELU", GELU),
        ("backward GELU", GELU),
    ):
        for dtype in DTYPES:
            for rows, cols, dtypes in sorted(shapes, key=lambda shape: shape[1]):
                if dtype in dtypes.split():
                    yield what, rows, cols, dtype


def captured(run):
    """A function that replays run() from a CUDA graph. The current stream must not be the default one."""
    run()  # compiles and tunes
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # what it frees may call CUDA (kernels of Triton's do), which ends a capture
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    gc.enable()

    def replay(run=run):  # which holds the tensors that the graph reads
        graph.replay()

    return replay


def models(cols, gelu, options):
    """(eager, ours, weight, bias), with the same weight and bias, as it matters where in memory they lie."""
    norm = nn.LayerNorm(cols, **options)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    if not gelu:
        return norm, replace_layer_norm(copy.copy(norm)), norm.weight, norm.bias

    def eager(x):
        return nn.functional.gelu(norm(x))

    def ours(x):
        return layer_norm(x, (cols,), norm.weight, norm.bias, norm.eps, activation="gelu")

    return eager, ours, norm.weight, norm.bias


def time_case(what, rows, cols, dtype):
    """A dict of what it is and of milliseconds."""
    torch.cuda.empty_cache()  # so that a row depends less on those before it
    options = dict(device="cuda", dtype=DTYPES[dtype])
    flat = torch.randn(rows * cols + 1, **options)
    x = (flat[1:] if "x[1:]" in what else flat[:-1]).view(rows, cols)
    eager, ours, weight, bias = models(cols, "GELU" in what, options)
    torch._dynamo.reset()
    compiled = torch.compile(eager, dynamic=False)
    # Called, not replayed: in a CUDA graph a copy is other kernels, slower at some sizes (PyTorch's issue 191284).
    source, target = flat[:-1].view(rows, cols), torch.empty_like(x)
    runs = {"floor": lambda: target.copy_(source)}
    step, stream = what.split()[0], torch.cuda.Stream()  # forward, backward or training
    if step != "forward":
        x.requires_grad_()
        dy = torch.randn_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    # Backward runs on forward's stream, and only a side stream can be captured.
    with torch.cuda.stream(stream), torch.set_grad_enabled(step != "forward"):
        for name, function in (("eager", eager), ("compile", compiled), ("ours", ours)):
            run = functools.partial(function, x)
            if step != "forward":
                y = function(x) if step == "backward" else None

                def run(function=function, y=y):
                    output = function(x) if y is None else y
                    torch.autograd.grad(output, (x, weight, bias), dy, retain_graph=y is not None)

            runs[name] = captured(run)
        times = milliseconds(runs)
    copies = {"forward": 1, "backward": 1.5, "training": 2.5}[step]
    times["floor"] *= copies * (1 + 1 / rows)  # weight and bias are as long as a row
    return {"what": what, "rows": rows, "cols": cols, "dtype": dtype, **times}


def host_microseconds(modules, x, calls=100, repeats=41):
    """Host time of one call of each module, medians, in turns: the device keeps up, nothing waits for it."""
    times = [[] for _ in modules]
    for _ in range(repeats):
        for module, of_module in zip(modules, times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                module(x)
            of_module.append((time.perf_counter() - start) / calls * 1e6)
    return [statistics.median(t) for t in times]


def host_lines():
    x = torch.randn(8, 768, device="cuda")
    for grad in (False, True):
        eager = nn.LayerNorm(768, device="cuda")
        with torch.set_grad_enabled(grad):
            theirs, ours = host_microseconds((eager, replace_layer_norm(copy.deepcopy(eager))), x)
        yield f"Host time of a call, 8 x 768 fp32, grad {'on' if grad else 'off'}: eager {theirs:.1f} us, ours {ours:.1f} us."


def fractions(row):
    """Of copy speed: eager, torch.compile, ours."""
    return [f"{row['floor'] / row[name]:.3f}" for name in ("eager", "compile", "ours")]


def sweep():
    """Prints the table; returns (its rows, lines on the host's time)."""
    todo, table = list(cases()), []
    print(versions())
    print(f"{'':14}{'rows x cols':>20} {'dtype':5} {'floor ms':>9} | fraction of the floor: eager, torch.compile, ours")
    for i, case in enumerate(todo):
        print(f"\r[{i + 1}/{len(todo)}]", end=" ", file=sys.stderr, flush=True)
        row = time_case(*case)
        table.append(row)
        shape = f"{row['rows']:>11} x {row['cols']:<8}"
        print(f"{row['what']:14}{shape} {row['dtype']:5} {row['floor']:9.4f} | {'  '.join(fractions(row))}", flush=True)
    host = list(host_lines())
    print(*host, sep="\n")
    return table, host


def as_markdown(table, host):
    names = ["eager", "torch.compile", "ours"]
    columns = ["", "rows x cols", "dtype", "floor, ms", *[f"{name}, ms" for name in names], *names]
    rows = []
    for r in table:
        times = [f"{r[name]:.4f}" for name in ("floor", "eager", "compile", "ours")]
        rows.append([r["what"], f"{r['rows']} x {r['cols']}", r["dtype"], *times, *fractions(r)])
    text = "Milliseconds, and fractions of the speed of a copy of the bytes that must move (floor)."
    return f"{versions()}\n\n{text}\n\n{results.markdown_table(columns, rows)}\n\n" + "\n".join(host)


def plot(table, file):
    """Draws the fraction of copy speed against N, one panel for forward and one for backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for panel, what in zip(panels, ("forward", "backward")):
        for dtype, line in (("fp32", "-"), ("bf16", "--")):
            rows = [r for r in table if (r["what"], r["dtype"]) == (what, dtype) and r["rows"] * r["cols"] == 2**26]
            for name, color in (("eager", "tab:gray"), ("compile", "tab:orange"), ("ours", "tab:green")):
                label = f"{'torch.compile' if name == 'compile' else name}, {dtype}"
                shares = [r["floor"] / r[name] for r in rows]
                panel.plot([r["cols"] for r in rows], shares, line, color=color, label=label)
        panel.set(title=what, xlabel="columns N (rows x N = 67 million)", xscale="log", ylim=(0, 1.1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("fraction of copy speed")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, fontsize=8)
    figure.suptitle(versions())
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the sweep (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write the sweep as JSON")
    arguments = parser.parse_args()
    for file in filter(None, (arguments.plot, arguments.json)):  # now, and not after minutes
        if not os.access(os.path.dirname(os.path.abspath(file)), os.W_OK) or os.path.isdir(file):
            parser.error(f"cannot write to {file}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if not torch.cuda.is_available():
        print("Nothing was timed: there is no CUDA GPU.")
        return 1
    table, host = sweep()
    results.write_section(f"Sweep, {torch.cuda.get_device_name()}", as_markdown(table, host))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"versions": versions(), "rows": table}, file, indent=1)
    if arguments.plot:
        plot(table, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
