"""Times forward at the sizes that a model's step has, 1 to 16 million elements: eager, torch.compile and ours.

    python .bench/sizes.py           prints a table, and writes it to .bench/RESULTS.md

Calls are replayed from CUDA graphs, so that the host does not count. "flushed": another tensor is written before each
call, whose time is subtracted; "warm": 20 calls in a row on one tensor, which L2 has as long as it fits.
"""

import itertools
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from layernorm_inline import layer_norm  # noqa: E402
from test_layernorm_inline import versions  # noqa: E402

COLUMNS = (256, 768, 1024, 4096)
MILLIONS = {1: ("flushed", "warm"), 4: ("flushed", "warm"), 16: ("flushed",)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLUSH_BYTES = 256 << 20  # several times an L2
FLUSHED_CALLS, WARM_CALLS, REPEATS = 8, 20, 7


def graph_of(calls):
    """A CUDA graph of these calls, one after the other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def milliseconds_of(graphs):
    """Medians of some replays of each graph, in turns. One more goes first: the GPU is busy while the host queues the rest."""
    times = []
    for _ in range(REPEATS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        graphs[0].replay()
        events[0].record()
        for graph, event in zip(graphs, events[1:]):
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times.append([before.elapsed_time(after) for before, after in zip(events, events[1:])])
    return [statistics.median(of_graph) for of_graph in zip(*times)]


def microseconds(run, mode, flush):
    if mode == "warm":
        return milliseconds_of([graph_of([run] * WARM_CALLS)])[0] * 1e3 / WARM_CALLS
    both, alone = milliseconds_of([graph_of([flush, run] * FLUSHED_CALLS), graph_of([flush] * FLUSHED_CALLS)])
    return (both - alone) * 1e3 / FLUSHED_CALLS


def functions_of(norm):
    """Eager, torch.compile and ours."""
    return [
        norm,
        torch.compile(norm, dynamic=False),
        lambda x: layer_norm(x, norm.normalized_shape, norm.weight, norm.bias),
    ]


def time_case(millions, cols, dtype, modes, flush):
    """For each mode microseconds of each function: medians of three, in turns."""
    x = torch.randn((millions << 20) // cols, cols, device="cuda", dtype=DTYPES[dtype])
    norm = nn.LayerNorm(cols, device="cuda", dtype=x.dtype).requires_grad_(False)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    torch._dynamo.reset()
    functions = functions_of(norm)
    for function in functions:
        torch.testing.assert_close(function(x), norm(x), rtol=2e-2, atol=2e-2)
    for mode in modes:
        times = [[microseconds(lambda f=f: f(x), mode, flush) for f in functions] for _ in range(3)]
        yield mode, [statistics.median(of_function) for of_function in zip(*times)]


def main():
    if not torch.cuda.is_available():
        print("Nothing was timed: there is no CUDA GPU.")
        return 1
    flush = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8).zero_
    rows = []
    print(versions())
    for dtype, cols, millions in itertools.product(DTYPES, COLUMNS, MILLIONS):
        for mode, (eager, compiled, ours) in time_case(millions, cols, dtype, MILLIONS[millions], flush):
            words = [mode, f"{millions}M", cols, dtype, *(f"{t:.2f}" for t in (eager, compiled, ours))]
            rows.append([*words, f"{compiled / ours:.2f}"])
            print("{:8}{:>4} x {:<5}{:5} eager {:>6} compile {:>6} ours {:>6} us, {}".format(*rows[-1]), flush=True)
    rows.sort(key=lambda row: row[0])
    names = ["L2", "elements", "columns", "dtype", "eager, us", "torch.compile, us", "ours, us", "compile / ours"]
    text = f"{versions()}\n\nForward, from CUDA graphs.\n\n{results.markdown_table(names, rows)}"
    results.write_section(f"Sizes that models have, {torch.cuda.get_device_name()}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
