"""Times a training step of wide layer norms on two GPUs, alone and with DistributedDataParallel.

    python -m torch.distributed.run --standalone --nproc-per-node 2 .bench/ddp.py

prints a table, and writes it to .bench/RESULTS.md.

For such rows several blocks share a row and wait for one another, beside NCCL's kernels, which wait for the other GPU.
The table shows whether that costs time. The model consists of norms only, before and after replace_layer_norm. The
modes:

"local": each GPU runs the step alone.
"reduced after": when backward has ended, one all-reduce adds the gradients of both GPUs.
"overlapped": DistributedDataParallel adds the gradients in buckets of 1 MB while backward runs.
"""

import contextlib
import copy
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from layernorm_inline import replace_layer_norm  # noqa: E402
from test_layernorm_inline import versions  # noqa: E402

COLUMNS = (12288, 65536, 262144, 1048576)
ELEMENTS = 1 << 25  # of the input
NORMS = 6
MODES = ("local", "reduced after", "overlapped")
NAMES = ["columns", "dtype", *(f"{model}, {mode}" for model in ("nn.LayerNorm", "layernorm_inline") for mode in MODES)]
STEPS, REPEATS = 10, 5  # steps per measurement, and measurements, of which the table shows the median


def run_step(model, x, grad_output, mode):
    """Runs forward and backward of a model in DistributedDataParallel, and adds the gradients as the mode says."""
    with contextlib.nullcontext() if mode == "overlapped" else model.no_sync():
        model(x).backward(grad_output)
    if mode == "reduced after":
        distributed.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for tensor in (x, *model.parameters()):
        tensor.grad = None


def milliseconds(model, x, grad_output, mode):
    """Returns the median time of a step on this GPU. Both GPUs start each measurement together."""
    synchronize = torch.cuda.synchronize if x.is_cuda else lambda: None
    times = []
    for _ in range(REPEATS + 1):  # the first one is not counted: it allocates memory and buckets
        synchronize()
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            run_step(model, x, grad_output, mode)
        synchronize()
        times.append((time.perf_counter() - start) * 1000 / STEPS)
    return statistics.median(times[1:])


def time_width(cols, elements, dtype, device):
    """Returns a row of the table: the columns, the dtype, and the time of each model and mode."""
    torch.manual_seed(0)
    original = nn.Sequential(*(nn.LayerNorm(cols) for _ in range(NORMS))).to(device, dtype)
    x, grad_output = (torch.randn(elements // cols, cols, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    row = [cols, str(dtype).replace("torch.", "")]
    for model in (original, replace_layer_norm(copy.deepcopy(original))):
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        row += [f"{milliseconds(parallel, x, grad_output, mode):.2f}" for mode in MODES]
    return row


def main(device="cuda", columns=COLUMNS, elements=ELEMENTS):
    """Runs in both processes. The first one prints the table. Without GPUs, main("cpu") tests the script with gloo."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        print("Nothing was timed, because there are fewer than two CUDA GPUs.")
        return 1
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rows = [time_width(cols, elements, dtype, device) for dtype in (torch.bfloat16, torch.float32) for cols in columns]
    if distributed.get_rank() == 0:
        table = results.markdown_table(NAMES, rows)
        print(table)
        if device == "cuda":
            text = f"{versions()}\n\nMilliseconds per training step of {NORMS} norms, {elements >> 20}M elements.\n\n{table}"
            results.write_section(f"Two GPUs, {torch.cuda.get_device_name()}", text)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
