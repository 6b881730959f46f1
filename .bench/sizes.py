"""Times forward at the sizes that norms have inside models: 1 to 16 million elements.

    python .bench/sizes.py           prints a table, and writes it to .bench/RESULTS.md

Compares eager PyTorch, torch.compile and layernorm_inline. Calls are replayed from CUDA graphs, so that host time does not
count.

"cold": each call uses another input, weight, bias and output. There are enough of them that L2 holds none when it is used
again. Overwriting L2 between calls would not be enough: data that a kernel reads with the priority evict_last, as some
kernels of torch.compile do, stays in L2.
"warm": 20 calls in a row use the same tensors, which stay in L2 if they fit.
"""

import functools
import itertools
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from layernorm_inline import layer_norm  # noqa: E402
from test_layernorm_inline import versions  # noqa: E402

COLUMNS = (256, 768, 1024, 4096)
MILLIONS = {1: ("cold", "warm"), 4: ("cold", "warm"), 16: ("cold",)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLD_BYTES = 300 << 20  # of all inputs together: several times the size of L2
WARM_CALLS, REPEATS = 20, 7


def graph_of(calls):
    """Returns a CUDA graph of these calls, one after the other. It keeps all outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.outputs = [call() for call in calls]
    graph.replay()
    return graph


def milliseconds_of(graph):
    """Returns the median time of a replay. A first replay keeps the GPU busy while the host queues the timed ones."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in zip(events, events[1:]))


def microseconds(function, sets, mode):
    """Returns the time of a call of `function`. sets: tuples (input, weight, bias)."""
    sets = sets[:1] * WARM_CALLS if mode == "warm" else sets
    calls = [functools.partial(function, *tensors) for tensors in sets]
    if mode == "warm":  # the output is dropped, so that all calls write to the same memory
        calls = [lambda call=call: call() is None for call in calls]
    return milliseconds_of(graph_of(calls)) * 1e3 / len(calls)


def functions_of(cols):
    """Returns the functions that are compared: eager PyTorch, torch.compile and layernorm_inline."""

    def eager(x, weight, bias):
        return functional.layer_norm(x, (cols,), weight, bias)

    return [eager, torch.compile(eager, dynamic=False), lambda x, weight, bias: layer_norm(x, (cols,), weight, bias)]


def time_case(millions, cols, dtype, modes, functions_of=functions_of):
    """Yields (mode, microseconds of each function). A time is the median of three, measured in turns."""
    options = dict(device="cuda", dtype=DTYPES[dtype])
    rows = (millions << 20) // cols
    count = COLD_BYTES // (rows * cols * DTYPES[dtype].itemsize)
    sets = [[torch.randn(shape, **options) for shape in ((rows, cols), cols, cols)] for _ in range(count)]
    torch._dynamo.reset()
    functions = functions_of(cols)
    for function in functions:
        torch.testing.assert_close(function(*sets[0]), functions[0](*sets[0]), rtol=2e-2, atol=2e-2)
    for mode in modes:
        times = [[microseconds(function, sets, mode) for function in functions] for _ in range(3)]
        yield mode, [statistics.median(of_function) for of_function in zip(*times)]


def main():
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    rows = []
    print(versions())
    for dtype, cols, millions in itertools.product(DTYPES, COLUMNS, MILLIONS):
        for mode, (eager, compiled, new) in time_case(millions, cols, dtype, MILLIONS[millions]):
            words = [mode, f"{millions}M", cols, dtype, *(f"{t:.2f}" for t in (eager, compiled, new))]
            rows.append([*words, f"{compiled / new:.2f}"])
            print(
                "{:5}{:>4} x {:<5}{:5} eager {:>6} compile {:>6} layernorm_inline {:>6} us, {}".format(*rows[-1]),
                flush=True,
            )
    rows.sort(key=lambda row: row[0])
    names = [
        "L2",
        "elements",
        "columns",
        "dtype",
        "eager, us",
        "torch.compile, us",
        "layernorm_inline, us",
        "torch.compile / layernorm_inline",
    ]
    text = f"{versions()}\n\nForward, from CUDA graphs.\n\n{results.markdown_table(names, rows)}"
    results.write_section(f"Sizes that models have, {torch.cuda.get_device_name()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
