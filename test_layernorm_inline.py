# SPDX-License-Identifier: MIT
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.0", "ninja", "setuptools", "cuda-toolkit[nvcc,crt,cccl]"]
# ///
"""Verifies and times layernorm_inline.py against nn.LayerNorm.

    python test_layernorm_inline.py                 assert allclose, print the speedup
    python test_layernorm_inline.py --problem 34    the same for ConvTranspose3d, LayerNorm, GELU, scaling
    python test_layernorm_inline.py --sweep         a table of shapes and dtypes, forward and backward
    python test_layernorm_inline.py --plot FILE     the sweep, drawn (needs matplotlib)
    python test_layernorm_inline.py --json FILE     the sweep, as data
    python test_layernorm_inline.py --models        a training step of real models, before and after replace_layer_norm
    python test_layernorm_inline.py --models vit    the same for the models whose names contain vit
    pytest test_layernorm_inline.py                 all tests (needs pytest)

The input is KernelBench's level 1 problem 40, or level 2 problem 34. Times are medians of triton.testing.do_bench: CUDA
events around each run, warmed up, the L2 cache flushed before each. What is compared is timed in rounds, each of
which begins with another one; the median over rounds counts. The sweep replays backward from a CUDA graph: called from
Python, it can wait for the host. "Floor" is the time of a device copy of the bytes that LayerNorm cannot avoid moving,
measured in the same run: input in and output out, plus weight and bias; for backward 1.5 times a copy (input and
grad_output in, grad_input out).
"""

import argparse
import collections
import contextlib
import copy
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import inspect
import json
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import typing
import warnings

import torch
from torch import nn

import layernorm_inline
from layernorm_inline import ConvTranspose3dLayerNormGELUScaling, ModelNew, layer_norm, replace_layer_norm

# ============================================================================
# The benchmark's problem
# ============================================================================

BATCH_SIZE, FEATURES, DIM1, DIM2 = 16, 64, 256, 256


class Model(nn.Module):
    """The reference: one nn.LayerNorm over all but the first dimension."""

    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape=normalized_shape)

    def forward(self, x):
        return self.ln(x)


def get_inputs():
    return [torch.rand(BATCH_SIZE, FEATURES, DIM1, DIM2)]


def get_init_inputs():
    return [(FEATURES, DIM1, DIM2)]


class Model34(nn.Module):
    """The reference of level 2 problem 34."""

    def __init__(
        self, in_channels, out_channels, kernel_size, stride, padding, bias=True, eps=1e-5, scaling_factor=1.0
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )
        self.layer_norm = nn.LayerNorm(out_channels, eps=eps)
        self.scaling_factor = scaling_factor

    def forward(self, x):
        return nn.functional.gelu(self.layer_norm(self.conv_transpose(x))) * self.scaling_factor


INPUT_34, ARGUMENTS_34 = (32, 32, 16, 32, 32), (32, 64, 4, 2, 1)

# ============================================================================
# Timing
# ============================================================================

MINIMUM_SPEEDUP = 1.2


def milliseconds(run, warmup=25, rep=100):
    """Median device time of run(), L2 flushed before each repeat; warmup and rep are milliseconds."""
    from triton.testing import do_bench

    return do_bench(run, warmup=warmup, rep=rep, return_mode="median")


def milliseconds_in_turns(runs, **options):
    """Milliseconds of each function in the dict runs. Each is first in one round, so that clocks favour none."""
    names, times = list(runs), {name: [] for name in runs}
    for first in range(len(names)):
        for name in names[first:] + names[:first]:
            times[name].append(milliseconds(runs[name], **options))
    return {name: statistics.median(t) for name, t in times.items()}


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


def copying(x):
    """A function that copies x on the device."""
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def architecture():
    """What the kernels were compiled for: sm_90a. It is in the name of the library's folder."""
    paths = [path for path in torch.ops.loaded_libraries if layernorm_inline._NAME in path]
    return " ".join(os.path.basename(os.path.dirname(path)).partition("-")[2] for path in paths) or "none"


def versions():
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"kernels: {architecture()}"
    )


def randomize(module):
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def verify_and_time(original, new, x, atol, grad=False, modes=("default",)):
    """Asserts allclose, prints times, of torch.compile that of its fastest mode. Returns milliseconds of new, or None
    after a failure."""
    with torch.set_grad_enabled(grad):
        with torch.no_grad():
            expected, result = original(x), new(x)
            error = (result - expected).abs().max().item()
            # KernelBench's tolerance for 16 bits, which PyTorch rounds after each of its operations.
            if not torch.allclose(result, expected, atol=atol, rtol=atol if x.element_size() == 2 else 1e-5):
                print(f"FAILED: the new model differs from the original by up to {error:.2e}; atol is {atol:.0e}")
                return None
            del expected, result
        torch._dynamo.reset()
        models = {"original": original, **{mode: torch.compile(original, mode=mode) for mode in modes}, "new": new}
        ms = milliseconds_in_turns({name: functools.partial(model, x) for name, model in models.items()})
    original_ms, new_ms, mode = ms["original"], ms["new"], min(modes, key=ms.get)
    speedup = original_ms / new_ms
    print(f"allclose(atol={atol:.0e}): yes, largest difference {error:.1e}; gradients {'on' if grad else 'off'}")
    print(f"Original time: {original_ms:.2f} ms, New time: {new_ms:.3f} ms, Speedup: {speedup:.2f}x")
    print(f"torch.compile ({mode}): {ms[mode]:.3f} ms, New is {ms[mode] / new_ms:.2f}x as fast")
    if speedup < MINIMUM_SPEEDUP:
        print(f"FAILED: the speedup is under {MINIMUM_SPEEDUP}x")
        return None
    return new_ms


def time_training_step(original, new, x):
    """Prints time and memory of forward and backward, with gradients of the input and of all parameters."""
    torch._dynamo.reset()
    with torch.no_grad():
        dy = torch.randn_like(original(x))
    x = x.clone().requires_grad_()
    steps, peaks = {}, {}
    for name, model in (("Original", original), ("torch.compile", torch.compile(original)), ("New", new)):
        wanted = [x, *model.parameters()]

        def step(model=model, wanted=wanted):
            torch.autograd.grad(model(x), wanted, dy)

        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        steps[name], peaks[name] = step, (torch.cuda.max_memory_allocated() - before) / 2**30
    for name, ms in milliseconds_in_turns(steps).items():
        print(f"training step, {name}: {ms:.2f} ms, {peaks[name]:.2f} GiB")


def verify_on_the_cpu(problem):
    torch.manual_seed(0)
    if problem == 40:
        original, new, x = nn.LayerNorm((8, 16)), ModelNew((8, 16)), torch.rand(4, 8, 16)
    else:
        original, new = Model34(*ARGUMENTS_34), ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34)
        x = torch.rand(1, *INPUT_34[1:])
    new.load_state_dict(randomize(original).state_dict())
    names = "ModelNew and nn.LayerNorm" if problem == 40 else "the model of problem 34 and its reference"
    with torch.no_grad():
        if not torch.allclose(new(x), original(x), atol=1e-5):
            print(f"FAILED: on the CPU {names} differ")
            return 1
    built = "built" if layernorm_inline._ops else f"not built: {layernorm_inline._why_not}"
    print(f"Nothing was timed: there is no CUDA GPU. On the CPU {names} agree; kernels {built}.")
    return 0


def problem_40():
    torch.manual_seed(0)
    original, new = randomize(Model(*get_init_inputs()).cuda()), ModelNew(*get_init_inputs()).cuda()
    new.load_state_dict(original.ln.state_dict())
    (x,) = (t.cuda() for t in get_inputs())
    # Not "max-autotune": besides the same kernels, its CUDA graphs copy x to a place of their own in every call.
    new_ms = verify_and_time(original, new, x, atol=1e-5, modes=("default", "max-autotune-no-cudagraphs"))
    if new_ms is None:
        return 1
    floor_ms = milliseconds(copying(x)) * (1 + 1 / BATCH_SIZE)  # weight and bias are as long as a row
    print(f"Copy floor: {floor_ms:.3f} ms, New / floor: {floor_ms / new_ms:.2f} of copy speed")
    print(versions())
    return 0


def problem_34():
    for name, dtype, allow_tf32, atol in (
        ("float32, TF32 allowed for convolutions (the default)", torch.float32, True, 1e-4),
        ("float32, TF32 off", torch.float32, False, 1e-5),
        ("bfloat16", torch.bfloat16, True, 1e-2),
        ("float16", torch.float16, True, 1e-2),
    ):
        torch.manual_seed(0)
        original, new = Model34(*ARGUMENTS_34).to("cuda", dtype), ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34)
        randomize(original.layer_norm)
        new.to("cuda", dtype).load_state_dict(original.state_dict())
        x = torch.rand(INPUT_34, device="cuda", dtype=dtype)
        print(f"{name}:")
        torch.backends.cudnn.allow_tf32 = allow_tf32
        for grad in (False, True):
            if verify_and_time(original, new, x, atol, grad) is None:
                return 1
        time_training_step(original, new, x)
    print(versions())
    return 0


# (rows, cols, dtypes); "x[1:]" rows start 4 bytes (2 for 16-bit types) past a 16-byte boundary.
SWEEP_FORWARD = [
    *[(2**26 // n, n, "fp32 bf16 fp16") for n in (64, 256, 1024)],
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
SWEEP_MISALIGNED = [(16384, 4096, "fp32 bf16")]
SWEEP_BACKWARD = [
    *[(2**26 // n, n, "fp32 bf16") for n in (64, 256, 1024, 4096, 8192, 16384, 32768)],
    (65536, 768, "fp32 bf16"),
    (32768, 2041, "fp32 bf16"),
    *[(2**26 // n, n, "fp32 bf16") for n in (131072, 262144, 1048576)],
    (16, 4194304, "fp32"),
]
SWEEP_GELU = [*[(2**26 // n, n, "fp32 bf16") for n in (64, 1024, 4096, 16384, 65536)], (16, 4194304, "fp32")]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def sweep_cases():
    """Yields (what, rows, cols, dtype name)."""
    for what, cases in (
        ("forward", SWEEP_FORWARD),
        ("forward x[1:]", SWEEP_MISALIGNED),
        ("backward", SWEEP_BACKWARD),
        ("forward GELU", SWEEP_GELU),
        ("backward GELU", SWEEP_GELU),
    ):
        for dtype in DTYPES:
            for rows, cols, dtypes in sorted(cases, key=lambda case: case[1]):
                if dtype in dtypes.split():
                    yield what, rows, cols, dtype


def sweep_row(what, rows, cols, dtype):
    """Times eager, torch.compile and ours on one shape. Returns a dict of milliseconds."""
    torch.cuda.empty_cache()  # so that a row depends less on those before it
    options = dict(device="cuda", dtype=DTYPES[dtype])
    flat = torch.randn(rows * cols + 1, **options)
    x = (flat[1:] if "x[1:]" in what else flat[:-1]).view(rows, cols)
    norm = nn.LayerNorm(cols, **options)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    # The same weight and bias for all, as it matters where in memory they lie.
    eager, ours = norm, replace_layer_norm(copy.copy(norm))

    def eager_gelu(x):
        return nn.functional.gelu(norm(x))

    def our_gelu(x):
        return layer_norm(x, (cols,), norm.weight, norm.bias, norm.eps, activation="gelu")

    if "GELU" in what:
        eager, ours = eager_gelu, our_gelu
    torch._dynamo.reset()
    compiled = torch.compile(eager, dynamic=False)
    # Called for backward, too: in a CUDA graph a copy is other kernels, slower at some sizes (PyTorch's issue 191284).
    runs = {"floor": copying(flat[:-1].view(rows, cols))}
    backward, stream = "backward" in what, torch.cuda.Stream()
    if backward:
        x.requires_grad_()
        dy = torch.randn_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    # Backward runs on forward's stream, and only a side stream can be captured.
    with torch.cuda.stream(stream), torch.set_grad_enabled(backward):
        for name, function in (("eager", eager), ("compile", compiled), ("ours", ours)):
            if backward:
                y, wanted = function(x), (x, norm.weight, norm.bias)
                runs[name] = captured(functools.partial(torch.autograd.grad, y, wanted, dy, retain_graph=True))
            else:
                runs[name] = functools.partial(function, x)
        times = milliseconds_in_turns(runs, warmup=10, rep=25)
    times["floor"] *= (1.5 if backward else 1) * (1 + 1 / rows)  # weight and bias are as long as a row
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


def sweep():
    """Prints the table of shapes and dtypes; returns its rows."""
    cases, table = list(sweep_cases()), []
    print(versions())
    print(f"{'':14}{'rows x cols':>20} {'dtype':5} {'floor ms':>9} | fraction of the floor: eager, torch.compile, ours")
    for i, case in enumerate(cases):
        print(f"\r[{i + 1}/{len(cases)}]", end=" ", file=sys.stderr, flush=True)
        row = sweep_row(*case)
        table.append(row)
        fractions = "  ".join(f"{row['floor'] / row[k]:5.3f}" for k in ("eager", "compile", "ours"))
        print(
            f"{row['what']:14}{row['rows']:>11} x {row['cols']:<8} {row['dtype']:5} {row['floor']:9.4f} | {fractions}"
        )
    x = torch.randn(8, 768, device="cuda")
    for grad in (False, True):
        eager = nn.LayerNorm(768, device="cuda")
        with torch.set_grad_enabled(grad):
            times = host_microseconds((eager, replace_layer_norm(copy.deepcopy(eager))), x)
        print(
            f"host time of a call, 8 x 768 fp32, grad {'on' if grad else 'off'}: eager {times[0]:.1f} us, ours {times[1]:.1f} us"
        )
    return table


def plot(table, file):
    """Draws fraction of copy speed against N, one panel for forward and one for backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for panel, what in zip(panels, ("forward", "backward")):
        for dtype, line in (("fp32", "-"), ("bf16", "--")):
            rows = [r for r in table if (r["what"], r["dtype"]) == (what, dtype) and r["rows"] * r["cols"] == 2**26]
            for name, color in (("eager", "tab:gray"), ("compile", "tab:orange"), ("ours", "tab:green")):
                label = f"{'torch.compile' if name == 'compile' else name}, {dtype}"
                panel.plot(
                    [r["cols"] for r in rows], [r["floor"] / r[name] for r in rows], line, color=color, label=label
                )
        panel.set(title=what, xlabel="columns N (rows x N = 67 million)", xscale="log", ylim=(0, 1.1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("fraction of copy speed")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, fontsize=8)
    figure.suptitle(versions())
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file, dpi=110)


# ============================================================================
# Real models: a training step before and after replace_layer_norm
# ============================================================================


class TriangleMultiplication(nn.Module):
    """Every pair (i, j) from the pairs (i, k) and (j, k); not outgoing: (k, i) and (k, j)."""

    def __init__(self, c, outgoing):
        super().__init__()
        self.equation = "ikc,jkc->ijc" if outgoing else "kic,kjc->ijc"
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.values, self.gates = nn.Linear(c, 2 * c), nn.Linear(c, 2 * c)
        self.out, self.out_gate = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        x = self.norm_in(z)
        a, b = (self.gates(x).sigmoid() * self.values(x)).chunk(2, dim=-1)
        return self.out_gate(x).sigmoid() * self.out(self.norm_out(torch.einsum(self.equation, a, b)))


class TriangleAttention(nn.Module):
    """Gated attention within each row of pairs; not starting: within each column."""

    def __init__(self, c, starting, heads=4):
        super().__init__()
        self.starting, self.heads = starting, heads
        self.norm = nn.LayerNorm(c)
        self.qkv, self.gate, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        x = self.norm(z if self.starting else z.transpose(0, 1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        y = self.out(self.gate(x).sigmoid() * y)
        return y if self.starting else y.transpose(0, 1)


class PairStack(nn.Module):
    """Blocks that update a pair tensor (n, n, c) as AlphaFold's do, without its biases and dropout: 7 layer norms each."""

    def __init__(self, blocks=2, c=128):
        super().__init__()
        updates = []
        for _ in range(blocks):
            updates += [TriangleMultiplication(c, outgoing=True), TriangleMultiplication(c, outgoing=False)]
            updates += [TriangleAttention(c, starting=True), TriangleAttention(c, starting=False)]
            updates.append(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.ReLU(), nn.Linear(4 * c, c)))
        self.updates = nn.ModuleList(updates)

    def forward(self, z):
        for update in self.updates:
            z = z + update(z)
        return z


def pair_stack(n, device="cuda"):
    model = PairStack().to(device, torch.bfloat16)
    z = torch.randn(n, n, 128, device=device, dtype=torch.bfloat16)
    return model, lambda model: model(z.detach().requires_grad_()).float().square().mean()


def gpt_2(batch=8, length=1024, device="cuda", **config):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **config)).to(device).train()
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    return model, loss


def timm_model(name, batch=64, device="cuda"):
    import timm

    model, images = timm.create_model(name).to(device).train(), torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.cross_entropy(model(images), labels)

    return model, loss


# name: (the package that it needs, what makes the model and its loss), all with random weights
REAL_MODELS = {
    "pair stack 256 x 256 x 128, bf16": ("torch", functools.partial(pair_stack, 256)),
    "pair stack 512 x 512 x 128, bf16": ("torch", functools.partial(pair_stack, 512)),
    "GPT-2 124M 8 x 1024, autocast": ("transformers", gpt_2),
    "ViT-B/16 64 images, autocast": ("timm", functools.partial(timm_model, "vit_base_patch16_224")),
    "ConvNeXt-S 64 images, autocast": ("timm", functools.partial(timm_model, "convnext_small")),
}


def model_row(make):
    """Times forward and backward. Returns (layer norms replaced, of how many, a list of milliseconds: as it is,
    replaced, both under torch.compile)."""
    torch.manual_seed(0)
    original, loss = make()
    # nn.LayerNorm, and timm's class of that name, which computes the same.
    types = {type(m) for m in original.modules() if type(m).__name__ == "LayerNorm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says how many were replaced
        ours = replace_layer_norm(copy.deepcopy(original), types)
    norms = [type(m) is ModelNew for m in ours.modules() if isinstance(m, nn.LayerNorm)]
    torch.testing.assert_close(loss(ours), loss(original), atol=1e-2, rtol=1e-2)
    torch._dynamo.reset()
    steps = {}
    for model, compiled in ((original, False), (ours, False), (original, True), (ours, True)):
        network = torch.compile(model) if compiled else model

        def step(model=model, network=network):
            loss(network).backward()
            model.zero_grad(set_to_none=True)

        steps[model, compiled] = step
    times = milliseconds_in_turns(steps, warmup=50, rep=250)
    return sum(norms), len(norms), list(times.values())


def models_named(words):
    """The names in REAL_MODELS that contain one of words, in whatever case; all of them where there are no words."""
    return [name for name in REAL_MODELS if not words or any(word.lower() in name.lower() for word in words)]


def real_models(names):
    """Prints a row for each model."""
    print(versions())
    print("forward and backward, ms:            norms      eager   replaced    compile   compile of the replaced")
    for name in names:
        package, make = REAL_MODELS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name:34} left out: {package} is not installed")
            continue
        replaced, norms, times = model_row(make)
        torch.cuda.empty_cache()
        print(f"{name:34} {f'{replaced}/{norms}':>7} " + " ".join(f"{ms:10.2f}" for ms in times), flush=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problem", type=int, choices=(40, 34), help="KernelBench's number (default: 40)")
    parser.add_argument("--sweep", action="store_true", help="time a table of shapes and dtypes")
    parser.add_argument("--plot", metavar="FILE", help="draw the sweep (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write the sweep as JSON")
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help=f"time a training step of real models, or of those whose names contain NAME: {'; '.join(REAL_MODELS)}",
    )
    arguments = parser.parse_args()
    to_sweep, to_models = bool(arguments.sweep or arguments.plot or arguments.json), arguments.models is not None
    if to_sweep + to_models + bool(arguments.problem) > 1:
        parser.error("--problem, --models and the sweep (--sweep, --plot, --json) exclude each other")
    for word in arguments.models or []:
        if not models_named([word]):
            parser.error(f"--models: no name contains {word!r}; there are: {'; '.join(REAL_MODELS)}")
    for file in filter(None, (arguments.plot, arguments.json)):  # now, and not after minutes
        folder = os.path.dirname(os.path.abspath(file))
        if not os.access(folder, os.W_OK) or os.path.isdir(file):
            parser.error(f"cannot write to {file}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if not torch.cuda.is_available():
        if to_sweep or to_models:
            print("Nothing was timed: there is no CUDA GPU.")
            return 1
        return verify_on_the_cpu(arguments.problem or 40)
    if to_models:
        return real_models(models_named(arguments.models))
    if not to_sweep:
        return problem_34() if arguments.problem == 34 else problem_40()
    table = sweep()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"versions": versions(), "rows": table}, file, indent=1)
    if arguments.plot:
        plot(table, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# ============================================================================
# Tests (from here on pytest is needed; the script above has ended)
# ============================================================================

import pytest  # noqa: E402

HAVE_GPU = torch.cuda.is_available()
gpu = pytest.mark.skipif(not HAVE_GPU, reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
kernels = pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")
SOURCE = os.path.abspath(layernorm_inline.__file__)
CACHE = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")


# ---- How tests run: time limits, what may be missing ----


def package(name):
    """Imports what not everybody has installed; CI, which can, has to."""
    if importlib.util.find_spec(name) is None:
        needed = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        needed(f"{name} is not installed")
    return importlib.import_module(name)


def import_in_subprocess(folder, code="import layernorm_inline", **environment):
    """Runs code where layernorm_inline.py lies in `folder`; returns the completed process."""
    path = os.path.join(folder, "layernorm_inline.py")
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write(open(SOURCE).read())
    variables = {**os.environ, "TORCH_EXTENSIONS_DIR": os.path.join(folder, "cache"), **environment}
    variables = {k: v for k, v in variables.items() if v is not None}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)


TIME_LIMIT = float(os.environ.get("TEST_TIME_LIMIT", 600))  # seconds for one test


@pytest.fixture(scope="session")
def terminal(pytestconfig):
    """stderr as it was before pytest began to capture it."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        duplicate = os.dup(2)
    with open(duplicate, "w") as file:
        yield file


@pytest.fixture(autouse=True)
def time_limit(terminal):
    """Ends the process of a test that hangs, also in a kernel, with the stack of all threads, which names the test."""
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_test_that_hangs_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time\nfrom test_layernorm_inline import terminal, time_limit\ndef test_hangs():\n    time.sleep(600)\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], cwd=tmp_path, text=True,
        env={**os.environ, "TEST_TIME_LIMIT": "2", "PYTHONPATH": folder}, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "Timeout" in done.stderr and "in test_hangs" in done.stderr, done.stderr


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
AFFINE = ["both", "weight", "bias", "none", "float32", "float32 weight", "float32 bias"]  # float32: with 16-bit input

POISON_BYTES = 1 << 30  # more than all tensors of one call, but for the largest tests


@contextlib.contextmanager
def poisoned(device="cuda"):
    """What is allocated inside on that GPU holds NaN until it is written.

    PyTorch's own setting for that fills what torch.empty returns; the kernels' outputs and scratch come straight
    from the caching allocator. So all that it has to give is NaN: small blocks, and one from which it cuts large ones.
    """
    if HAVE_GPU:
        torch.cuda.empty_cache()
        sizes = [1 << 20] * 32 + [POISON_BYTES]
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]  # NaN, of any dtype
        del blocks
    yield


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 100 << 20])
def test_what_is_not_written_is_nan(size, dtype):
    with poisoned():
        outputs = [torch.empty(size // dtype.itemsize + 1, dtype=dtype, device="cuda") for _ in range(4)]
    assert all(output.isnan().all() for output in outputs)


# ---- Comparison with float64 ----

EPS = 0.1  # of value tests: next to a variance of 1 a kernel that drops it, or has 1e-5 built in, is far off


def random_case(
    rows, cols, dtype, affine="both", seed=0, mean=3.0, std=1.0, offsets=(0, 0, 0, 0), telling=True, device="cuda"
):
    """input, weight, bias, grad_output; each starts so many elements into its buffer (offsets: in this order).

    Telling numbers, in which an error cannot hide: input has a mean; weight is around 1 and grad_output is not
    orthogonal to 1 nor to normalized input, so that each mean of backward counts; the last or first number of a row
    has a fifth of its variance, so that it counts in a row of any length; the last row has a part of grad_weight and
    grad_bias that does not vanish among many rows.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(n):
        return torch.randn(n, generator=generator, device=device)

    def placed(values, offset, dtype):
        # NaN beside the tensor, up to where its last 16 bytes end: a kernel may read that, but not use it.
        unit = 16 // dtype.itemsize
        buffer = torch.full(
            ((values.numel() + offset + unit - 1) // unit * unit,), math.nan, device=device, dtype=dtype
        )
        return buffer[offset : offset + values.numel()].view(values.shape).copy_(values)

    x = normal(rows * cols).view(rows, cols)
    if telling:
        most = 32 if dtype == torch.float16 else math.inf
        for row in range(min(8, max(1, rows - 1))):
            x[row, 0 if row % 3 == 1 else -1] = min(0.5 * cols**0.5, most) * (-1) ** row
    dy = normal(rows * cols).view(rows, cols).mul_(0.5).add_(0.5).add_(x, alpha=0.5)
    if telling:
        dy[-1] *= max(1, rows / 4)
    x = placed((x.double() if dtype == torch.float64 else x).mul_(std).add_(mean), offsets[0], dtype)
    dy = placed(dy, offsets[3], dtype)
    affine_dtype = torch.float32 if "float32" in affine else dtype
    weight, bias = normal(cols).mul_(0.5).add_(1), normal(cols)
    weight = placed(weight, offsets[1], affine_dtype) if affine.split()[-1] in ("both", "weight", "float32") else None
    bias = placed(bias, offsets[2], affine_dtype) if affine.split()[-1] in ("both", "bias", "float32") else None
    return x, weight, bias, dy


def run_case(function, x, weight, bias, dy, eps=EPS, wanted=(1, 1, 1)):
    """[output, grad_input, grad_weight, grad_bias] (None where there is none, or is not wanted)."""
    given = zip((x, weight, bias), wanted)
    leaves = [None if t is None else t.detach().requires_grad_(bool(want)) for t, want in given]
    y = function(leaves[0], x.shape[-1:], leaves[1], leaves[2], eps)
    y.backward(dy)
    for t, want in zip(leaves, wanted):
        assert t is None or (t.grad is not None) == bool(want), "another gradient than asked for"
    return [y.detach()] + [None if t is None else t.grad for t in leaves]


def chain(x, normalized_shape, weight, bias, eps, activation=None, scale=1.0):
    """What layer_norm computes, as PyTorch's operations."""
    y = nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
    if activation:
        y = nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y * scale


def activated(z, activation):
    """activation(z) and its derivative, for float64; PyTorch's gelu, by 1 + erf, loses the digits of the tail."""
    if activation is None:
        return z, torch.ones_like(z)
    if activation == "gelu":
        below = 0.5 * torch.erfc(-z * 0.5**0.5)
        return z * below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    inner, slope = (math.sqrt(8 / math.pi) * t for t in (z + 0.044715 * z**3, 1 + 0.134145 * z * z))
    s = torch.sigmoid(inner)
    return z * s, s + z * slope * s * torch.sigmoid(-inner)


ROUNDINGS = 64  # of float32, one after the other, that a result may have gone through


def exact_parts(x, weight, bias, dy, eps, activation=None, scale=1.0):
    """Yields (name, rows, exact, error): output and grad_input of some rows at a time, last grad_weight and grad_bias,
    in float64, and by how much float32 arithmetic can be off them, element by element:

        xhat    64 roundings of itself and of the row's spread, which is 1; 16 of the mean, in units of the spread
        z       xhat's times weight, 64 of itself and of bias
        output  z's times the largest slope of GELU, 1.13; of 16 bits also what the polynomial for its tail leaves
        g       the gradient of z: z's times the largest curvature, 0.8, and 64 of grad_output; rounded to 16 bits
                where there is an activation or a scale, as between PyTorch's operations
        sums    those of the summands, and 64 of their absolute sum: of each row those of grad_input, of each column
                grad_weight and grad_bias
    """
    dtype, double = x.dtype, torch.float64
    rounding = torch.finfo(double if dtype == double else torch.float32).eps
    many, is_half = ROUNDINGS * rounding, dtype.itemsize == 2
    w = torch.ones((), dtype=double, device=x.device) if weight is None else weight.double()
    b = torch.zeros((), dtype=double, device=x.device) if bias is None else bias.double()
    grad_weight, grad_bias, weight_error, bias_error = x.new_zeros((4, x.shape[1]), dtype=double)
    step = max(1, (1 << 24) // x.shape[1])
    for rows in (slice(first, first + step) for first in range(0, x.shape[0], step)):
        part = x[rows].double()
        mean = part.mean(1, keepdim=True)
        distances = part - mean
        rstd = (distances.square().mean(1, keepdim=True) + eps).rsqrt()
        xhat = distances * rstd
        xhat_error = many * (xhat.abs() + 1) + 16 * rounding * mean.abs() * rstd
        z = xhat * w + b
        z_error = w.abs() * xhat_error + many * (z.abs() + b.abs())
        y, slope = activated(z, activation)
        tail_error = 2.2e-4 * activated(-z.abs(), activation)[0].abs() if is_half and activation == "gelu" else 0
        yield "output", rows, scale * y, abs(scale) * (1.13 * z_error + tail_error)

        dz = dy[rows].double() * scale
        g, g_error = dz * slope, torch.zeros_like(z)
        if activation or scale != 1:
            g_error = dz.abs() * (0.8 * z_error * bool(activation) + many)
            if is_half:
                g_error += torch.finfo(dtype).eps * (0.505 * g.abs() + torch.finfo(dtype).tiny)
        wdy, wdy_error = g * w, g_error * w.abs()
        c1, c2 = wdy.mean(1, keepdim=True), (wdy * xhat).mean(1, keepdim=True)
        product_error = wdy_error * xhat.abs() + wdy.abs() * xhat_error
        c1_error = (wdy_error + many * wdy.abs()).mean(1, keepdim=True)
        c2_error = (product_error + many * (wdy * xhat).abs()).mean(1, keepdim=True)
        error = wdy_error + many * wdy.abs() + c1_error + (xhat.abs() + xhat_error) * c2_error + xhat_error * c2.abs()
        yield "grad_input", rows, rstd * (wdy - c1 - xhat * c2), rstd * error

        grad_weight += (g * xhat).sum(0)
        grad_bias += g.sum(0)
        weight_error += (g_error * xhat.abs() + g.abs() * xhat_error + many * (g * xhat).abs()).sum(0)
        bias_error += (g_error + many * g.abs()).sum(0)
    yield "grad_weight", slice(None), grad_weight, weight_error
    yield "grad_bias", slice(None), grad_bias, bias_error


NAMES = ("output", "grad_input", "grad_weight", "grad_bias")
SUMS = NAMES[1:]


def compare_with_float64(runs, eps=EPS, activation=None, scale=1.0, luck=NAMES):
    """Asserts that results are as near to float64 as they have to be. runs: pairs of what run_case and random_case give.

    Every element is within what float32 arithmetic can be off (exact_parts), of 16 bits half a unit in the last place
    more, for the rounding at the end: 0.505, as the rounded number is itself off.
    Beyond that, where PyTorch computes in the same precision (float32), the largest error of all cases is at most 1.5
    times PyTorch's plus one unit in the last place of the largest element. Where few numbers decide, PyTorch's error is
    a matter of luck: sums over few rows, the largest element of telling numbers. So an eighth of the first bound will
    do, too, for what luck names; tests of accuracy (luck=SUMS) do not allow it for output.
    """
    largest = {name: [0.0, 0.0, 0.0, True] for name in NAMES}  # error, PyTorch's, |exact|; whether an eighth would do
    for results, (x, weight, bias, dy) in runs:
        same_precision = x.dtype == torch.float32
        ours = theirs = dict(zip(NAMES, results))
        if same_precision:
            pytorch = functools.partial(chain, activation=activation, scale=scale)
            theirs = dict(zip(NAMES, run_case(pytorch, x, weight, bias, dy, eps)))
        for name, rows, exact, error in exact_parts(x, weight, bias, dy, eps, activation, scale):
            if ours[name] is None:
                continue
            mine = ours[name][rows]
            info = torch.finfo(mine.dtype)
            there = exact.abs() + error < 0.9 * info.max  # what its dtype has no number for may be infinite
            assert mine[there].isfinite().all(), f"{name} has elements that are not finite"
            off, size = (torch.where(there, t, 0) for t in ((mine.double() - exact).abs(), exact.abs()))
            allowed = error + info.tiny * info.eps
            if mine.dtype.itemsize == 2:
                allowed = allowed + 0.505 * info.eps * size
            if not (off <= allowed).all():
                at = (off - allowed).argmax().item()
                got, right, bound = (t.flatten()[at].item() for t in (mine, exact, allowed.expand_as(off)))
                row, col = divmod(at, x.shape[1])
                place = f"row {row + rows.start}, column {col}" if name in NAMES[:2] else f"column {col}"
                raise AssertionError(
                    f"{name}, {place}: {got:.6e} instead of {right:.6e}, which may be off by {bound:.1e}"
                )
            if same_precision:
                their = torch.where(there, (theirs[name][rows].double() - exact).abs(), 0).nan_to_num()
                new = [t.max().item() for t in (off, their, size)]
                largest[name][:3] = [max(pair) for pair in zip(new, largest[name])]
                largest[name][3] &= bool((off <= allowed / 8).all())
    for name, (error, allowed, size, an_eighth) in largest.items():
        unit = torch.finfo(torch.float32).eps * size
        assert error <= 1.5 * allowed + unit or (an_eighth and name in luck), (
            f"{name}: error {error:.3e}, PyTorch's {allowed:.3e}, unit in the last place {unit:.1e}"
        )


def assert_close_to_float64(*cases, eps=EPS, function=layer_norm, wanted=(1, 1, 1), **options):
    """Runs function on cases, what random_case gives, into memory full of NaN, and compares."""
    epilogue = {key: options[key] for key in ("activation", "scale") if key in options}
    runs = []
    for case in cases:
        with poisoned():
            runs.append((run_case(functools.partial(function, **epilogue), *case, eps, wanted), case))
    compare_with_float64(runs, eps, **options)


# ---- The comparison itself ----


@pytest.mark.parametrize("activation,scale", [(None, 1.0), (None, -1.5), ("gelu", 1.0), ("gelu_tanh", -0.5)])
@pytest.mark.parametrize("affine", AFFINE[:4])
def test_the_reference_is_pytorchs_in_float64(affine, activation, scale):
    case = random_case(7, 33, torch.float64, affine, device="cpu")
    expected = run_case(functools.partial(chain, activation=activation, scale=scale), *case)
    results = {name: [] for name in NAMES}
    for name, _, exact, _ in exact_parts(*case, EPS, activation, scale):
        results[name].append(exact)
    for name, right in zip(NAMES, expected):
        if right is not None:
            torch.testing.assert_close(torch.cat(results[name]), right, rtol=1e-10, atol=1e-12)


BUGS = [
    "eps left out", "eps of 1e-5", "no mean", "last element left out of the statistics", "count off by one",
    "mean(wdy) left out", "mean(wdy xhat) left out", "last element left out of the sums",
    "last row left out of grad_weight", "last row left out of grad_bias", "weight left out", "last bias left out",
    "last row not written", "another row's statistics",
]  # fmt: skip


class LayerNormWith(torch.autograd.Function):
    """Layer norm in float32 arithmetic, but for the mean, which is rounded once; with one of BUGS."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, activation, scale, bug):
        w, b = (
            torch.full_like(x[0], value).float() if t is None else t.float() for t, value in ((weight, 1), (bias, 0))
        )
        if bug == "weight left out":
            w = torch.ones_like(w)
        if bug == "last bias left out":
            b = b.clone()
            b[-1] = 0
        eps = {"eps left out": 0.0, "eps of 1e-5": 1e-5}.get(bug, eps)
        x32 = x.float()
        some = x32[:, :-1] if bug == "last element left out of the statistics" else x32
        mean = some.double().mean(1, keepdim=True).float() * (bug != "no mean")
        count = some.shape[1] + (bug == "count off by one")
        rstd = ((some - mean).square().sum(1, keepdim=True) / count + eps).rsqrt()
        if bug == "another row's statistics":
            mean, rstd = mean.roll(1, 0), rstd.roll(1, 0)
        xhat = (x32 - mean) * rstd
        y, slope = activated(xhat * w + b, activation)
        ctx.save_for_backward(xhat, rstd, w, scale * slope)
        ctx.bug, ctx.dtypes = bug, [t if t is None else t.dtype for t in (x, weight, bias)]
        y = (scale * y).to(x.dtype)
        if bug == "last row not written":
            y[-1] = torch.nan
        return y

    @staticmethod
    def backward(ctx, dy):
        (xhat, rstd, w, slope), bug = ctx.saved_tensors, ctx.bug
        g = dy.float() * slope
        if ctx.dtypes[0].itemsize == 2:
            g = g.to(ctx.dtypes[0]).float()
        wdy = g * w
        short = slice(-1) if bug == "last element left out of the sums" else slice(None)
        c1 = wdy[:, short].mean(1, keepdim=True) * (bug != "mean(wdy) left out")
        c2 = (wdy * xhat)[:, short].mean(1, keepdim=True) * (bug != "mean(wdy xhat) left out")
        rows = {name: slice(-1) if bug == f"last row left out of {name}" else slice(None) for name in NAMES}
        sums = rstd * (wdy - c1 - xhat * c2), (g * xhat)[rows["grad_weight"]].sum(0), g[rows["grad_bias"]].sum(0)
        return *(None if d is None else t.to(d) for t, d in zip(sums, ctx.dtypes)), None, None, None, None


TOY_SHAPES = [(3, 2), (5, 7), (1, 64), (40, 100), (1001, 24), (3, 4099), (1, 20001)]


def layer_norm_with(bug=None):
    def function(x, shape, weight, bias, eps, activation=None, scale=1.0):
        return LayerNormWith.apply(x, weight, bias, eps, activation, scale, bug)

    return function


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("rows,cols", TOY_SHAPES)
def test_the_comparison_accepts_float32_arithmetic(rows, cols, dtype):
    for seed, affine in enumerate(AFFINE if dtype.itemsize == 2 else AFFINE[:4]):
        for activation, scale in ((None, 1.0), ("gelu", 1.0), ("gelu_tanh", -1.5))[seed % 2 :]:
            case = random_case(rows, cols, dtype, affine, seed=seed, device="cpu")
            assert_close_to_float64(case, function=layer_norm_with(), activation=activation, scale=scale)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("rows,cols", TOY_SHAPES)
@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_rejects(bug, rows, cols, dtype):
    alone = rows == 1 and bug == "another row's statistics"
    many = cols > 1000 and bug == "count off by one"  # less than a unit in the last place of 16 bits
    for activation in () if alone or many else (None, "gelu"):
        case = random_case(rows, cols, dtype, seed=rows + cols, device="cpu")
        with pytest.raises(AssertionError):
            assert_close_to_float64(case, function=layer_norm_with(bug), activation=activation)


# ---- The table of cases ----
# A line: rows, columns, dtypes and forms that are tried, which tensors start one element past a 16-byte boundary (x:
# input, w: weight, b: bias, d: grad_output), affine, and the rooms that take the call on an H200, forward and backward.
# All tests of what kernels compute draw from it. The kernel that stands for a room, and no other room's:

FORWARD_KERNELS = {
    "registers": "layer_norm_rows", "shared": "layer_norm_shared_rows", "pipeline": "layer_norm_pipeline<ForwardPass",
    "joint": "layer_norm_joint_rows", "spread": "normalize_columns",
}  # fmt: skip
BACKWARD_KERNELS = {
    "registers": "layer_norm_backward_rows", "pipeline": "layer_norm_pipeline<BackwardPass", "spread": "backward_columns"
}  # fmt: skip
# Kernels that no case of the table launches, and what does.
OTHER_KERNELS = {
    "arrange_weights": "test_problem_34", "conv_transpose_layer_norm_gelu": "test_problem_34"
}  # fmt: skip

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
FORMS = {"plain": (None, 1.0), "gelu": ("gelu", 1.0), "tanh": ("gelu_tanh", -0.5), "scale": (None, 2.0)}

TABLE = [
    # Rows in registers: a load a thread; four rows a thread, where there are many short rows; two where they are not
    # aligned; four loads.
    ("7 x 1", "fp32 fp16 bf16 fp64", "plain gelu", "", "both", "registers", "registers"),
    ("300 x 33", "fp32 fp16 bf16 fp64", "plain gelu", "", "both", "registers", "registers"),
    ("77 x 100", "fp32 fp16 bf16 fp64", "plain tanh", "", "both", "registers", "registers"),
    ("40 x 256", "fp32 fp16 bf16 fp64", "plain gelu", "", "both", "registers", "registers"),
    ("2500 x 64", "fp32 fp16 bf16", "plain gelu tanh scale", "", "both", "registers", "registers"),
    ("2213 x 65", "fp32 fp16 bf16", "plain gelu tanh scale", "", "both", "registers", "registers"),
    ("2203 x 9", "fp32 fp16 bf16 fp64", "plain", "", "both", "registers", "registers"),
    ("2209 x 768", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "registers"),
    ("2213 x 255", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "registers"),
    ("2205 x 1999", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "registers"),
    ("2001 x 1536", "fp16 bf16", "plain gelu", "", "both", "registers", "registers"),
    ("19 x 2041", "fp16 bf16", "plain", "", "both", "registers", "registers"),
    ("40 x 2000", "fp32 fp16 bf16", "plain tanh", "", "both", "registers", "registers"),
    ("9 x 4096", "fp16 bf16", "plain gelu", "", "both", "registers", "registers"),
    ("3 x 2051", "fp64", "plain gelu", "", "both", "registers", "spread"),
    ("9 x 3500", "fp64", "plain gelu", "", "both", "registers", "spread"),
    ("9 x 4096", "fp32", "plain gelu", "", "both", "registers", "pipeline"),
    ("180 x 4099", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "pipeline"),
    ("9 x 5000", "fp16 bf16", "plain gelu", "", "both", "registers", "pipeline"),
    ("9 x 8192", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "pipeline"),
    ("200 x 8192", "fp32 fp16 bf16", "plain gelu", "", "both", "registers", "pipeline"),
    *[
        ("2500 x 64", "fp32 fp16 bf16", "plain gelu", off, "both", "registers", "registers")
        for off in ("x", "w", "b", "d", "xwbd")
    ],
    *[("40 x 2000", "fp32 bf16", "plain gelu", off, "both", "registers", "registers") for off in ("x", "w", "b", "d")],
    ("180 x 8192", "fp32 bf16", "plain gelu", "d", "both", "registers", "pipeline"),
    ("2213 x 8456", "fp16 bf16", "gelu scale", "", "both", "registers", "pipeline"),
    ("1000 x 16384", "bf16", "gelu", "", "both", "registers", "pipeline"),
    # Rows in shared memory: plain ones only where there are 15 for each SM.
    ("2650 x 12288", "fp32", "plain", "", "both", "shared", "pipeline"),
    ("1991 x 18432", "fp32", "plain", "", "both", "shared", "pipeline"),
    ("2400 x 16392", "fp16 bf16", "plain", "", "both", "shared", "pipeline"),
    ("2013 x 20480", "fp16 bf16", "plain", "", "both", "shared", "pipeline"),
    ("200 x 9000", "fp32", "gelu tanh scale", "", "both", "shared", "pipeline"),
    ("140 x 16392", "fp16 bf16", "gelu tanh", "", "both", "shared", "pipeline"),
    ("1000 x 16384", "fp32", "gelu", "", "both", "shared", "pipeline"),
    ("200 x 9000", "fp32", "gelu", "d", "both", "shared", "pipeline"),
    # Long rows in a pipeline: one block a row and several; with rings that wrap around, and that do not.
    ("5 x 8200", "fp32", "plain gelu", "", "both", "pipeline", "pipeline"),
    ("5 x 16392", "fp32 fp16 bf16", "plain gelu tanh", "", "both", "pipeline", "pipeline"),
    ("300 x 16384", "fp32", "plain", "", "both", "pipeline", "pipeline"),
    ("1000 x 24576", "fp32 bf16", "gelu", "", "both", "pipeline", "pipeline"),
    ("3 x 20001", "fp32 fp16 bf16", "plain gelu scale", "", "both", "pipeline", "pipeline"),
    ("180 x 6001", "fp32 fp16 bf16", "plain", "", "both", "pipeline", "pipeline"),
    ("180 x 6145", "fp32 fp16 bf16", "plain gelu", "", "both", "pipeline", "pipeline"),
    ("2000 x 6145", "fp32", "gelu", "", "both", "pipeline", "pipeline"),
    ("3000 x 6145", "bf16", "gelu", "", "both", "pipeline", "pipeline"),
    ("150 x 50257", "fp32 fp16 bf16", "plain gelu", "", "both", "pipeline", "pipeline"),
    ("9 x 262144", "fp32 fp16 bf16", "plain gelu", "", "both", "pipeline", "pipeline"),
    ("2 x 1000003", "fp32 fp16 bf16", "plain gelu", "", "both", "pipeline", "pipeline"),
    ("8 x 131075", "fp32 fp16 bf16", "plain gelu", "", "both", "pipeline", "pipeline"),
    *[("180 x 8192", "fp32 bf16", "plain gelu", off, "both", "pipeline", "pipeline") for off in "xwb"],
    *[("3 x 16392", "fp32 bf16", "plain gelu", off, "both", "pipeline", "pipeline") for off in "xwbd"],
    # Rows that many SMs hold together.
    ("4 x 2200004", "fp32", "plain", "", "both", "joint", "spread"),
    ("5 x 4194304", "fp32", "plain", "", "both", "joint", "spread"),
    ("4 x 2200004", "fp32", "plain", "d", "both", "joint", "spread"),
    # Rows spread over the GPU.
    ("3 x 4194304", "fp32", "plain gelu", "", "both", "spread", "spread"),
    ("5 x 3786816", "fp32", "gelu tanh", "", "both", "spread", "spread"),
    ("3 x 6000", "fp64", "plain gelu", "", "both", "spread", "spread"),
    ("2 x 1200001", "fp32 fp16 bf16", "plain gelu tanh", "", "both", "spread", "spread"),
    ("2 x 1200008", "fp32 fp16 bf16", "plain gelu scale", "", "both", "spread", "spread"),
    ("2 x 1196040", "fp16 bf16", "plain", "", "both", "spread", "spread"),  # the last piece has 8 columns
    ("3 x 20000", "fp64", "plain gelu", "", "both", "spread", "spread"),
    ("3 x 20001", "fp64", "plain gelu", "", "both", "spread", "spread"),
    *[("2 x 1200008", "fp32 bf16", "plain gelu", off, "both", "spread", "spread") for off in "xwbd"],
    # Weight and bias: either, none, float32 for input of 16 bits.
    *[
        (shape, dtypes, forms, "", affine, forward, backward)
        for shape, dtypes, forms, forward, backward in (
            ("2500 x 64", "fp32 bf16", "plain gelu", "registers", "registers"),
            ("40 x 2000", "fp32 fp16", "plain gelu", "registers", "registers"),
            ("140 x 16392", "bf16", "gelu", "shared", "pipeline"),
            ("5 x 16392", "fp32 bf16", "plain gelu", "pipeline", "pipeline"),
            ("180 x 6145", "fp32 bf16", "plain gelu", "pipeline", "pipeline"),
            ("4 x 2200004", "fp32", "plain", "joint", "spread"),
            ("2 x 1200008", "fp32 bf16", "plain gelu", "spread", "spread"),
        )
        for affine in ("weight", "bias", "none", "float32", "float32 weight", "float32 bias")
    ],
]  # fmt: skip


class Case(typing.NamedTuple):
    rows: int
    cols: int
    dtype: str
    form: str
    off: str
    affine: str
    forward: str
    backward: str

    def __str__(self):
        words = (f"{self.rows}x{self.cols}", self.dtype, self.form, self.off, self.affine.replace(" ", "_"))
        return "-".join(word for word in words if word not in ("", "both"))

    @property
    def epilogue(self):
        return dict(zip(("activation", "scale"), FORMS[self.form]))

    @property
    def elements(self):
        return self.rows * self.cols

    def tensors(self, seed=0, **options):
        """input, weight, bias, grad_output."""
        offsets = tuple(int(letter in self.off) for letter in "xwbd")
        return random_case(self.rows, self.cols, TYPES[self.dtype], self.affine, seed, offsets=offsets, **options)


def cases_of_the_table():
    for shape, dtypes, forms, off, affine, forward, backward in TABLE:
        rows, cols = map(int, shape.split(" x "))
        for dtype in dtypes.split():
            if "float32" in affine and TYPES[dtype].itemsize != 2:
                continue
            for form in forms.split():
                yield Case(rows, cols, dtype, form, off, affine, forward, backward)


CASES = list(cases_of_the_table())


def representatives():
    """Of all cases that the same rooms take in the same way, the smallest."""
    smallest = {}
    for case in CASES:
        alike = (case.forward, case.backward, case.dtype, case.form == "plain", case.off, case.affine)
        short = case.elements < 10**6 and case.rows > 2000  # four rows a thread
        smallest[alike, short] = min(case, smallest.get((alike, short), case), key=lambda case: case.elements)
    return [case for case in smallest.values() if case.elements < 4 * 10**7 and case.cols > 1]


SOME = representatives()
every_case = pytest.mark.parametrize("case", CASES, ids=str)
some_cases = pytest.mark.parametrize("case", SOME, ids=str)
like_an_h200 = pytest.mark.skipif(
    not HAVE_GPU or torch.cuda.get_device_properties(0).multi_processor_count != 132
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of 132 Hopper SMs: the table says what runs there",
)  # fmt: skip


@gpu
@pytest.mark.quick
@every_case
def test_values(case):
    assert_close_to_float64(case.tensors(), **case.epilogue)


def demangled(names):
    """Names of kernels as C++ writes them, without namespaces and arguments."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    for name in names:
        if name.startswith("_Z"):
            status = ctypes.c_int()
            text = demangle(name.encode(), None, None, ctypes.byref(status))
            name = ctypes.string_at(text).decode()
        name = re.sub(r"\(anonymous namespace\)::|\b[a-z_0-9]+::|^void ", "", name)
        while (shorter := re.sub(r"\([^()]*\)", "", name)) != name:  # arguments, also those of types in them
            name = shorter
        yield name.replace(" >", ">")


def kernels_of_the_library():
    """All kernels that were compiled: the name of each stands there twice, as a symbol and as what it registers as."""
    (path,) = (path for path in torch.ops.loaded_libraries if layernorm_inline._ops.name in path)
    with open(path, "rb") as library:
        names = re.findall(rb"(?<=\0)_ZN\d+layernorm_inline_\w+?_cuda_cu_\w+(?=\0)", library.read())
    return set(demangled(name.decode() for name, times in collections.Counter(names).items() if times > 1))


def is_kernel(name, base):
    return re.match(re.escape(base) + r"(?![\w])", name) is not None


@kernels
def test_the_library_has_the_kernels_of_the_table():
    found = kernels_of_the_library()
    for base in (*FORWARD_KERNELS.values(), *BACKWARD_KERNELS.values(), *OTHER_KERNELS):
        assert any(is_kernel(name, base) for name in found), base


def test_the_table_has_what_broke_before():
    """Forms and dtypes of each room, whatever lines come and go."""
    for forward, dtypes, fused in (
        ("registers", "fp32 fp16 bf16 fp64", True), ("shared", "fp32 fp16 bf16", True), ("joint", "fp32", False),
        ("pipeline", "fp32 fp16 bf16", True), ("spread", "fp32 fp16 bf16 fp64", True),
    ):  # fmt: skip
        for dtype in dtypes.split():
            here = [case for case in CASES if (case.forward, case.dtype) == (forward, dtype)]
            assert {"plain", "gelu"} <= {case.form for case in here} or not fused, (forward, dtype)
            assert {True, False} == {case.cols % 8 == 0 for case in here} or forward in ("shared", "joint")
    for form in FORMS:  # four rows a thread
        short = [case for case in CASES if case.rows > 2112 and case.cols <= 65 and case.form == form]
        assert {case.dtype for case in short} >= {"fp32", "fp16", "bf16"}
        assert len({case.cols % 8 == 0 for case in short}) == 2
    for room, key in [(r, "forward") for r in FORWARD_KERNELS] + [(r, "backward") for r in BACKWARD_KERNELS]:
        assert any(getattr(case, key) == room for case in SOME), room


def profiled(calls):
    """The kernels that each of the calls launched, in their order, from one run under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            torch.cuda._sleep(1)  # a kernel of its own: between those of two calls
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launched = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            launched.append([])
        elif "layernorm_inline" in event.name:
            launched[-1] += demangled([event.name])
    assert len(launched) == len(calls), "the profiler lost a call"
    return launched


@gpu
@like_an_h200
@pytest.mark.quick
def test_every_kernel_is_launched_and_by_the_calls_that_the_table_says(capsys):
    def call(case):
        x, weight, bias, dy = case.tensors(telling=False)
        return lambda: run_case(functools.partial(layer_norm, **case.epilogue), x, weight, bias, dy)

    def convolution(dtype, allow_tf32):
        model = ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34).to("cuda", dtype)
        x = torch.randn(1, 32, 2, 3, 32, device="cuda", dtype=dtype)

        def run():
            with convolutions_in_tf32(allow_tf32):
                model(x).sum().backward()

        return run

    reached, wrong, by = set(), [], {}
    for begin in range(0, len(CASES), 20):  # the tensors of so many at a time
        part = CASES[begin : begin + 20]
        for case, names in zip(part, profiled([call(case) for case in part])):
            for name in names:
                by.setdefault(name, str(case))
            forward, backward = (FORWARD_KERNELS[case.forward], BACKWARD_KERNELS[case.backward])
            others = {*FORWARD_KERNELS.values(), *BACKWARD_KERNELS.values()} - {forward, backward}
            right = all(any(is_kernel(name, base) for name in names) for base in (forward, backward))
            if not right or any(is_kernel(name, base) for name in names for base in others):
                wrong.append(f"{case}: {case.forward} and {case.backward} expected, launched {names}")
        torch.cuda.empty_cache()
    rest = [convolution(dtype, tf32) for dtype in FLOATS[:3] for tf32 in (True, False)]
    for names in profiled(rest):
        assert all(any(is_kernel(name, base) for base in OTHER_KERNELS) or name in by for name in names), names
        reached.update(names)
    reached.update(by)
    compiled = kernels_of_the_library()
    with capsys.disabled():
        print(f"\n{len(compiled)} kernels, each with the first case that launches it:")
        for name in sorted(compiled):
            print(f"  {name:60} {by.get(name) or ('test of its own' if name in reached else 'NOT REACHED')}")
    assert not wrong, "\n".join(wrong)
    assert not compiled - reached, f"no case of the table launches {sorted(compiled - reached)}"
    assert not reached - compiled, f"launched, but not found in the library: {sorted(reached - compiled)}"


# ---- Every room ----


@gpu
@some_cases
def test_the_same_bits_every_time(case):
    function = functools.partial(layer_norm, **case.epilogue)
    tensors = case.tensors(seed=1)
    first = run_case(function, *tensors)
    for _ in range(5):
        with poisoned():
            again = run_case(function, *tensors)
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, again))


@gpu
@some_cases
def test_a_bad_row_stays_alone(case):
    function = functools.partial(layer_norm, **case.epilogue)
    x, weight, bias, dy = case.tensors()
    bad = torch.zeros(case.rows, dtype=torch.bool, device="cuda")
    bad_x = x.clone()
    for row, value in ((case.rows // 2, torch.nan), (case.rows - 1, torch.inf))[: case.rows - 1]:
        bad_x[row, case.cols // 2], bad[row] = value, True
    bad_x = bad_x if "x" not in case.off else x.copy_(bad_x)
    for t in run_case(function, bad_x, weight, bias, dy)[:2]:
        assert t[bad].isnan().all() and t[~bad].isfinite().all()

    x, weight, bias, dy = case.tensors()
    row, col = case.rows // 2, case.cols // 3
    dy[row, col] = torch.nan
    y, dx, *sums = run_case(function, x, weight, bias, dy)
    bad[:] = False
    bad[row] = True
    assert y.isfinite().all() and dx[bad].isnan().all() and dx[~bad].isfinite().all()
    for t in (t for t in sums if t is not None):
        assert t[col].isnan() and t.isfinite().sum() == case.cols - 1


@gpu
@some_cases
def test_eps(case):
    for eps in (0.0, 1e-12, 1e-5, 1.0, 1e10):
        assert_close_to_float64(case.tensors(), eps=eps, **case.epilogue)


LARGE_MEANS = {"fp32": [(1e4, 1.0), (1e6, 0.1)], "fp16": [(1e3, 1.0)], "bf16": [(1e4, 100.0)], "fp64": [(1e9, 1.0)]}


@gpu
@some_cases
def test_large_mean_in_every_room(case):
    for mean, std in LARGE_MEANS[case.dtype]:
        tensors = case.tensors(mean=mean, std=std, telling=False)
        assert_close_to_float64(tensors, eps=1e-5, luck=NAMES if case.rows < 6 else SUMS, **case.epilogue)


@gpu
@some_cases
def test_only_the_gradients_asked_for(case):
    for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)):
        tensors = case.tensors()
        if any(want and t is not None for want, t in zip(wanted, tensors)):
            assert_close_to_float64(tensors, wanted=wanted, **case.epilogue)


@gpu
@pytest.mark.parametrize("case", [case for case in SOME if case.off == "" and case.affine == "both"], ids=str)
def test_strided_weight_bias_and_grad_output(case):
    x, *others = case.tensors()
    weight, bias, dy = (torch.stack([t, -t], -1)[..., 0] for t in others)
    assert case.cols == 1 or weight.stride()[-1] == bias.stride()[-1] == dy.stride()[-1] == 2
    assert_close_to_float64((x, weight, bias, dy), **case.epilogue)


# Lengths beside the table's: powers of two and their neighbours, primes, what models have.
SHAPES = [
    (1, 1), (7, 1), (1000, 2), (513, 7), (4096, 16), (300, 33), (1000, 64), (77, 100), (333, 128),
    (64, 129), (50, 255), (40, 256), (31, 768), (65, 1000), (200, 1024), (19, 2041), (9, 4096), (10, 4099),
    (6, 8192), (5, 8200), (7, 10007), (5, 16384), (3, 16392), (3, 20001), (5, 32768), (2, 50257), (3, 65536),
    (2, 131072), (3, 262144), (1, 1000003), (2, 1048576), (40, 40000), (3, 4194304), (180, 9000), (300, 16384),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows,cols", SHAPES)
def test_lengths(rows, cols, dtype):
    for i, affine in enumerate(AFFINE[:5] if rows * cols < 2 * 10**6 else ["both"]):
        if affine == "float32" and dtype.itemsize != 2:
            continue
        assert_close_to_float64(random_case(rows, cols, dtype, affine, seed=rows * 31 + cols + i))
    plain = random_case(rows, cols, dtype, seed=rows * 31 + cols, mean=0.0, telling=False)
    assert_close_to_float64(plain, eps=1e-5, luck=SUMS)


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cols", [8, 768, 2041, 4096, 16384, 70000, 262144])
def test_misaligned_start(cols, dtype):
    assert_close_to_float64(random_case(5, cols, dtype, "both", seed=cols, offsets=(1, 0, 0, 1)))


@gpu
@pytest.mark.parametrize("dtype,std", [
    (torch.float32, 1e-39), (torch.float32, 1e15), (torch.float16, 6e-6), (torch.float16, 1e4), (torch.bfloat16, 1e15),
])  # fmt: skip
@pytest.mark.parametrize("cols", [64, 5000, 300000])
def test_tiny_and_huge_numbers(cols, dtype, std):
    assert_close_to_float64(
        random_case(5, cols, dtype, "both", seed=cols, mean=0.0, std=std, telling=False), eps=1e-5, luck=SUMS
    )


# 1e20, whose square float32 does not have: float32 rows of numbers around it, rows with some numbers next to it.
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(
    "rows,cols",
    [(5, 768), (180, 6001), (180, 16384), (5, 20001), (9, 262144), (1, 1 << 21), (5, 3000004), (8, 4194304)],
)
def test_huge_mean(rows, cols, activation, dtype):
    x, weight, bias, dy = random_case(rows, cols, dtype, "both", seed=cols, mean=1e20, std=1e15, telling=False)
    if dtype == torch.float32:
        assert_close_to_float64((x, weight, bias, dy), eps=1e-5, activation=activation, luck=SUMS)
    x = torch.full_like(x, 1e20)
    x[:, ::50000] *= 1 + 2**-7
    assert_close_to_float64((x, weight, bias, dy), eps=1e-5, activation=activation, luck=SUMS)


# Squares that float32 does not have: rstd is 0.
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(5, 6)], ids=["everywhere", "one number"])
@pytest.mark.parametrize(
    "rows,cols",
    [(5, 768), (5, 2041), (180, 6001), (180, 9000), (2213, 9000), (5, 20001), (9, 262144), (5, 3000004), (8, 4194304)],
)
def test_a_variance_that_overflows(rows, cols, where, dtype):
    x, weight, bias, dy = random_case(rows, cols, dtype, "both", seed=cols)
    x[:, where] *= 1e28
    y, dx, grad_weight, _ = run_case(layer_norm, x, weight, bias, dy, 1e-5)
    assert (y == bias).all() and not dx.any() and not grad_weight.any()


@gpu
@pytest.mark.parametrize(
    "mean,std,dtype", [(1e4, 1, torch.float32), (1e6, 1e-1, torch.float32), (1e3, 1, torch.float16)]
)
@pytest.mark.parametrize("cols", [64, 1000, 4096, 65536, 1048576, 4194304])
def test_large_mean(cols, mean, std, dtype):
    assert_close_to_float64(
        random_case(6, cols, dtype, "both", seed=cols, mean=mean, std=std, telling=False), eps=1e-5, luck=SUMS
    )


# Numbers far from the rest of their row, also where a thread takes its first ones: what it measures from.
@gpu
@pytest.mark.parametrize("where", [slice(0, 2048), slice(0, None, 997), slice(-5, None)], ids=str)
@pytest.mark.parametrize("rows,cols", [(40, 768), (5, 20001), (300, 16384), (4, 262144), (5, 3000000)])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_numbers_far_from_the_rest(rows, cols, where, activation):
    x, weight, bias, dy = random_case(rows, cols, torch.float32, seed=cols, mean=0.0, telling=False)
    x[:, where] += 1e4
    assert_close_to_float64((x, weight, bias, dy), eps=1e-5, activation=activation, luck=SUMS)


# rstd is 316 there, so that a mean off by its last digit shows.
@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rows,cols",
    [(5, 1), (5, 7), (2207, 41), (70, 64), (2211, 255), (5, 1000), (40, 2041), (5, 4096), (180, 9000), (180, 11000),
     (180, 6001), (180, 14335), (5, 20001), (40, 50257), (3, 262144), (3, 1200001), (4, 4194304)],
)  # fmt: skip
def test_constant_rows(rows, cols, dtype):
    _, weight, bias, dy = random_case(rows, cols, dtype, "both", seed=cols)
    values = (0.0, 1.0, 1 / 3, 1e4, -3.7e4, 1234.567) + (() if dtype == torch.float16 else (-3.7e5,))
    for value in values:
        x = torch.full_like(dy, value)
        assert layer_norm(x, (cols,)).abs().max() <= nn.functional.layer_norm(x, (cols,)).abs().max() + 1e-6, value
        ours = run_case(layer_norm, x, weight, bias, dy, 1e-5)
        theirs = run_case(nn.functional.layer_norm, x, weight, bias, dy, 1e-5)
        for mine, their, exact in zip(ours[::2], theirs[::2], (bias, 0)):  # output and grad_weight
            assert (mine - exact).abs().max() <= (their - exact).abs().max() + 1e-6, value
        # With numbers that are all the same, grad_input is that of zeros: grad_output's distances from its mean.
        zeros = torch.zeros_like(x), weight, bias, dy
        compare_with_float64([([None, ours[1], None, None], zeros)], eps=1e-5)


# The same to the bit, where rstd is 10^6: in every regime, plain and with what an activation takes (a scale), from where
# rows are aligned and one element on. Sums of float16 of 11 bits have an error from 8192 on, of float32 of 24 from 3;
# the last slices of 194307 and 205923 columns have three. At last (rows of less than 300,000 columns, not float16)
# numbers whose product with rstd float32 does not have. Backward of the last numbers: grad_weight is 0, grad_input
# finite (rstd times a gradient is more than float16 has).
@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rows,cols",
    [(5, 1), (5, 7), (300, 33), (2207, 41), (2211, 255), (40, 768), (40, 2041), (5, 4096), (5, 9001), (5, 11003),
     (5, 14335), (180, 6001), (180, 9000), (180, 11000), (180, 14335), (2213, 8456), (800, 16384), (800, 18432),
     (800, 20480), (180, 24576), (5, 20001), (40, 50257), (1, 194307), (1, 205923), (3, 262144), (1, 1 << 21),
     (3, 1200001), (5, 3000004), (9, 4194304)],
)  # fmt: skip
def test_constant_rows_give_bias(rows, cols, dtype):
    if dtype == torch.float16:
        values = (1.0, 1 / 3, 2047.0, -1234.567, 16376.0, 65504.0)
    else:
        values = (1.0, 1 / 3, 100.0, 1234.567, -3.7e5, 1e20, -7.7e29, *[1e33] * (cols < 300_000))
    for offset in (0, 1):
        buffer = torch.empty(rows * cols + offset, device="cuda", dtype=dtype)
        weight, bias = (torch.randn(cols, device="cuda").to(dtype).requires_grad_() for _ in "12")
        for value in values:
            x = buffer.fill_(value)[offset:].view(rows, cols).detach().requires_grad_()
            for scale in (1.0, 2.0):
                y = layer_norm(x, (cols,), weight, bias, 1e-12, scale=scale)
                assert (y == scale * bias).all(), (offset, value, scale)
                if value != values[-1]:
                    continue
                x.grad = None
                y.backward(torch.ones_like(y))
                assert not weight.grad.any(), (offset, scale)
                assert x.grad.isfinite().all() or dtype == torch.float16, (offset, scale)


PROPERTY_CASES = int(os.environ.get("PROPERTY_CASES", 500))  # of each property test


# Kinds of shapes, as (rows, columns) of two fractions: what each room takes, borders of short rows twice as often.
KINDS = {
    "few short": lambda u, v: (1 + 399 * u, 1 + 299 * v),
    "many short": lambda u, v: (2000 + 1000 * u, 1 + 299 * v),
    "middle": lambda u, v: (1 + 399 * u, 301 + 8699 * v),
    "long": lambda u, v: (1 + 12 * u, 9001 + 141_000 * v),
    "many long": lambda u, v: (132 + 200 * u, 6001 + 15_000 * v),
    "many in shared memory": lambda u, v: (2 + 38e6 / (8200 + 10_000 * v), 8200 + 8 * (1250 * v // 1)),
    "together": lambda u, v: (4 + 4 * u, 1_100_000 + 4 * (700_000 * v // 1)),
    "spread": lambda u, v: (1 + 2 * u, 1_100_000 + 1_000_000 * v),
}
OFTEN = ["few short", "many short", "middle", "long", "many long"] * 4 + [*KINDS]


def property_test(test, capsys, examples, kinds):
    """Hypothesis drives the test; another seed each time, printed for a failure to be repeated."""
    hypothesis = package("hypothesis")
    from hypothesis import strategies as st

    seed = int(os.environ.get("PROPERTY_SEED", time.time_ns() % 10**9))
    fraction = st.integers(0, 10**6).map(lambda n: n / 10**6)
    strategy = dict(
        kind=st.sampled_from(kinds), u=fraction, v=fraction, dtype=st.sampled_from(FLOATS[:3]),
        affine=st.sampled_from(AFFINE), eps=st.sampled_from([1e-12, 1e-5, 1e-1]),
        mean=st.sampled_from([0.0, 1.0, -300.0, 1e6]), std=st.sampled_from([1e-3, 1.0, 1e3, 1e6]),
        offset=st.integers(0, 9), off=st.sampled_from(["", "x", "w", "b", "d", "xwbd"]), form=st.sampled_from([*FORMS]),
    )  # fmt: skip
    settings = hypothesis.settings(max_examples=examples, deadline=None, database=None, print_blob=True)
    with capsys.disabled():
        print(f"PROPERTY_SEED={seed} PROPERTY_CASES={examples}")
    return hypothesis.seed(seed)(settings(hypothesis.given(**strategy)(test)))()


@pytest.mark.parametrize("device,part", [("cpu", 0)] + [pytest.param("cuda", part, marks=gpu) for part in range(4)])
def test_properties(device, part, capsys):
    function = layer_norm if device == "cuda" else layer_norm_with()

    def check(kind, u, v, dtype, affine, eps, mean, std, offset, off, form):
        rows, cols = map(int, KINDS[kind](u, v))
        if "float32" in affine and dtype.itemsize != 2:
            affine = "both"
        if dtype == torch.float16:
            mean, std = min(mean, 1e4), min(std, 1e3)
        case = random_case(
            rows, cols, dtype, affine, cols, mean, std, [offset * (letter in off) for letter in "xwbd"], False, device
        )
        # A few elements can be lucky in PyTorch's favour, so that all four may keep to the bound alone.
        epilogue = dict(zip(("activation", "scale"), FORMS[form]))
        assert_close_to_float64(case, eps=eps, function=function, luck=NAMES, **epilogue)

    if device == "cpu":
        property_test(check, capsys, examples=40, kinds=["few short"])
    else:
        property_test(check, capsys, PROPERTY_CASES, OFTEN)


# ---- Elements: what lies where ----


# Rows on 16-byte boundaries, but not on those of cache lines: what is copied with them must not be taken for theirs.
@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 40])
@pytest.mark.parametrize("cols", [8712, 10008, 20008, 50264, 131080])
def test_rows_between_lines(cols, offset, dtype):
    assert_close_to_float64(random_case(150, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset)))


# The kernels read what exceeds L2 (60 MB on an H200) with another priority.
@gpu
@pytest.mark.parametrize("cols", [1024, 12288, 65536])
def test_a_large_input_gives_the_bits_of_a_small_one(cols):
    rows = (160 << 20) // (2 * cols)  # 160 MB
    x, weight, bias, dy = random_case(rows, cols, torch.bfloat16, "both", seed=cols)
    few = rows // 16
    with poisoned():
        y = layer_norm(x, (cols,), weight, bias)
        first, last = (layer_norm(part, (cols,), weight, bias) for part in (x[:few], x[-few:]))
    assert torch.equal(y[:few], first) and torch.equal(y[-few:], last)
    compare_with_float64([([last, None, None, None], (x[-few:], weight, bias, dy[-few:]))], eps=1e-5)


@gpu
@pytest.mark.parametrize("rows,cols", [(2**31 // 64 + 3, 64), (2**16 + 1, 2**15), (9, 2**28), (1, 2**31 + 16)])
def test_more_than_2_to_the_31_elements(rows, cols):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_()
    y = layer_norm(x, (cols,))
    for row in (0, rows - 1):
        piece = x[row, -4096:] if cols > 2**20 else x[row]
        mean, std = x[row].double().mean(), x[row].double().std(unbiased=False)
        expected = (piece.double() - mean) / (std**2 + 1e-5).sqrt()
        assert (y[row, -piece.numel() :].double() - expected).abs().max() < 2e-2


# ---- Statistics ----


# What is subtracted from a row is more than its mean rounded to a float, which is off by up to half a unit in the last
# place: without weight and bias it is the mean of the output that shows it. Rows of blocks that exchange their means,
# and of pieces.
@gpu
@pytest.mark.parametrize(
    "rows,cols,calls",
    [(1, 26157, 400), (2, 10006, 400), (1, 85994, 400), (2, 159866, 100), (5, 294000, 40), (1, 1 << 21, 40)],
)
def test_the_means_rest_is_subtracted_too(rows, cols, calls):
    unit = 2.0**-10  # in the last place of 1e4
    for seed in range(calls):
        x, _, _, _ = random_case(
            rows, cols, torch.float32, "none", seed=seed, mean=1e4, offsets=(seed % 6, 0, 0, 0), telling=False
        )
        y, exact = layer_norm(x, (cols,), eps=1e-12).double(), (x.double() - x.double().mean(1, keepdim=True))
        exact /= exact.square().mean(1, keepdim=True).sqrt()
        assert (y.mean(1) * x.double().std(1)).abs().max() < 0.05 * unit, seed
        rstd_is_off = (y * exact).sum(1) / exact.square().sum(1) - 1
        assert rstd_is_off.abs().max() < 4 * 2.0**-24, seed  # 46 where parts' means are off by what a sum rounds


@gpu
@pytest.mark.parametrize("rows,cols,mean,std", [(1, 85994, 1e4, 1.0), (2, 159866, 1e4, 1.0), (2, 275770, 100.0, 1e-3)])
@pytest.mark.parametrize("offset", range(6))
def test_few_long_rows_with_a_large_mean(rows, cols, mean, std, offset):
    for affine in ("both", "none"):
        options = dict(mean=mean, std=std, offsets=(offset, 0, 0, offset), telling=False)
        case = random_case(rows, cols, torch.float32, affine, seed=offset, **options)
        assert_close_to_float64(case, eps=1e-12, luck=SUMS)


# Rows of 1 and -1, whose variance is 1: their output is rstd, within 0.62 units in the last place (rsqrtf: 2).
@gpu
@pytest.mark.parametrize("rows,cols", [(4, 65536), (1, 1 << 21), (8, 1 << 21)])
def test_rstd_of_long_rows(rows, cols):
    x = torch.ones(rows, cols, device="cuda")
    x[:, 1::2] = -1
    for eps in (k * 7951 / 2**20 for k in range(400)):
        exact = (1 + eps) ** -0.5
        assert abs(layer_norm(x, (cols,), eps=eps)[0, 0].item() - exact) < 0.8 * 2**-23 * exact, eps


@gpu
@pytest.mark.parametrize("cols", [1000, 9000, 16392, 20001])
def test_rstd_whose_square_overflows(cols):
    assert_close_to_float64(
        random_case(40, cols, torch.bfloat16, seed=cols, mean=0.0, std=3e-20, telling=False), eps=0.0, luck=SUMS
    )


# ---- Epilogue: scale * activation(layer norm) ----


@gpu
@pytest.mark.parametrize(
    "rows,cols",
    [(200, 3), (1000, 64), (64, 129), (31, 768), (9, 4096), (6, 8192), (300, 9000), (2213, 8456), (300, 16392),
        (300, 20001), (300, 20008), (5, 40000), (3, 262144), (2, 1048577), (3, 4194304), (300, 14335), (300, 16384)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation,scale", [("gelu", 1.0), ("gelu_tanh", -0.5), (None, 2.0), ("gelu", 0.0)])
def test_activation(rows, cols, dtype, activation, scale):
    seeds = range(rows + cols, rows + cols + (8 if rows * cols < 1e5 else 1))
    cases = [random_case(rows, cols, dtype, seed=seed, mean=0.0, telling=False) for seed in seeds]
    assert_close_to_float64(*cases, eps=1e-5, activation=activation, scale=scale, luck=SUMS)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation,scale", [("gelu", 1.0), ("gelu_tanh", -0.5), (None, 2.0), ("gelu", 0.0)])
def test_activation_on_the_cpu(dtype, activation, scale):
    case = random_case(5, 24, dtype, device="cpu")
    ours, theirs = (
        run_case(functools.partial(f, activation=activation, scale=scale), *case) for f in (layer_norm, chain)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activation_of_every_argument(activation, dtype):
    """gelu(z) and its derivative, element by element: with a weight of 0, z is the bias."""
    huge = [-1e4, -100.0, -0.0, 100.0, 1e4] + [-1e15, 1e15] * (dtype in (torch.float32, torch.float64))
    z = torch.cat([torch.linspace(-12, 12, 1 << 20), torch.tensor(huge)]).to("cuda", dtype).requires_grad_()
    y = layer_norm(torch.randn_like(z), z.shape, torch.zeros_like(z), z, activation=activation)
    y.sum().backward()
    exact_z = z.detach().double().requires_grad_()
    if activation == "gelu":
        exact = 0.5 * exact_z * torch.erfc(-exact_z * 0.5**0.5)  # PyTorch's 1 + erf loses the digits of the tail
    else:
        exact = nn.functional.gelu(exact_z, approximate="tanh")
    exact.sum().backward()
    eps = torch.finfo(dtype).eps
    error, slope_error = (y.double() - exact).abs(), (z.grad.double() - exact_z.grad).abs()
    if dtype in (torch.float16, torch.bfloat16):  # but for the rounding of the result
        assert (error <= 0.75 * eps * exact.abs() + 1e-6).all()
        assert (slope_error <= 0.6 * eps * exact_z.grad.abs() + 1e-5).all()
    else:
        few, some = (4, 20) if dtype == torch.float64 else (2, 3)  # of float64 the reference errs as much
        assert (error <= few * eps * exact.abs().clamp_min(0.5)).all()
        assert (slope_error <= some * eps * exact_z.grad.abs().clamp_min(1)).all()
        tail = (z > -5) & (z < 0)
        assert activation != "gelu" or (error[tail] <= 100 * eps * exact[tail].abs()).all()


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    "rows,cols", [(3, 8), (300, 33), (9, 4096), (300, 16392), (300, 20001), (5, 40000), (4, 4194304)]
)
def test_gelu_of_infinity(rows, cols, activation, dtype):
    x, weight, bias, _ = random_case(rows, cols, dtype, "both", seed=cols)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], device="cuda", dtype=dtype)
    bias[:4], bias[-1], weight[:4] = special, torch.inf, 0
    y = layer_norm(x, (cols,), weight, bias, activation=activation)
    expected = nn.functional.gelu(special, approximate="tanh" if activation == "gelu_tanh" else "none")
    assert expected[0] == torch.inf and (y[:, -1] == torch.inf).all()
    torch.testing.assert_close(y[:, :4], expected.expand(rows, 4), rtol=0, atol=0, equal_nan=True)
    assert y[:, 4:-1].isfinite().all()


@gpu
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activation_gradcheck(activation):
    x, weight, bias, _ = (t.requires_grad_() for t in random_case(3, 7, torch.float64, "both", seed=0))

    def fused(x, weight, bias):
        return layer_norm(x, (7,), weight, bias, activation=activation, scale=-1.5)

    assert torch.autograd.gradcheck(fused, (x, weight, bias))
    assert torch.autograd.gradgradcheck(fused, (x, weight, bias))
    torch.testing.assert_close(
        torch.func.grad(lambda x: fused(x, weight, bias).sum())(x),
        torch.autograd.grad(fused(x, weight, bias).sum(), x)[0],
    )


@pytest.mark.parametrize("activation", ["relu", ["gelu"], 1])
def test_unknown_activation(activation):
    expected = f"Expected activation to be None, 'gelu' or 'gelu_tanh', but got {activation!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        layer_norm(torch.zeros(2, 3), (3,), activation=activation)


# ---- Device: streams, graphs, memory, other GPUs ----


@gpu
@some_cases
def test_runs_on_the_current_stream(case):
    """Inputs come late, on a stream of their own: a kernel on another one would read what was there before."""
    tensors = case.tensors()
    late = [None if t is None else t.fill_(torch.nan) for t in case.tensors()]  # lie as the others do
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for to, t in zip(late, tensors):
            if t is not None:
                to.copy_(t)
        results = run_case(functools.partial(layer_norm, **case.epilogue), *late)
    stream.synchronize()
    compare_with_float64([(results, tensors)], **case.epilogue)


@gpu
@some_cases
def test_cuda_graph_of_a_training_step(case):
    function = functools.partial(layer_norm, **case.epilogue)
    tensors = case.tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_case(function, *tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_case(function, *tensors)
    for seed in (1, 2):
        for t, new in zip(tensors, case.tensors(seed)):
            if t is not None:
                t.copy_(new)
        for t in captured:
            if t is not None:
                t.fill_(torch.nan)
        graph.replay()
        results = [None if t is None else t.clone() for t in captured]
        assert all(a is b or torch.equal(a, b) for a, b in zip(results, run_case(function, *tensors)))
        compare_with_float64([(results, tensors)], **case.epilogue)


@two_gpus
@some_cases
def test_a_device_that_is_not_current(case):
    with torch.cuda.device(0):
        tensors = case.tensors(device="cuda:1")
        torch.cuda.synchronize("cuda:1")
        with torch.cuda.device(1):
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.device(0):
            results = run_case(functools.partial(layer_norm, **case.epilogue), *tensors)
        torch.cuda.synchronize("cuda:1")
    assert all(t.device.index == 1 for t in results if t is not None)
    compare_with_float64([(results, tensors)], **case.epilogue)


@gpu
@pytest.mark.parametrize("rows,cols", [(1000, 64), (300, 9000), (9, 262144), (4, 4194304), (3, 4194304)])
def test_many_streams_and_threads_at_once(rows, cols):
    import concurrent.futures

    cases = [random_case(rows, cols, torch.float32, "both", seed=i) for i in range(3)]
    expected = [run_case(layer_norm, *case) for case in cases]

    def work(i):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [run_case(layer_norm, *cases[i]) for _ in range(5)]
        stream.synchronize()
        return all(torch.equal(a, b) for result in results for a, b in zip(expected[i], result))

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


# Of one kernel, rows of several lengths take different amounts of shared memory.
@gpu
def test_threads_with_rows_of_different_lengths():
    import concurrent.futures

    calls = [case for case in SOME if case.elements < 10**7 and case.off in ("", "x") and case.affine == "both"]
    tensors = [case.tensors(seed=i) for i, case in enumerate(calls)]

    def result(i):
        x, weight, bias, _ = tensors[i]
        return layer_norm(x, x.shape[1:], weight, bias, **calls[i].epilogue)

    expected = [result(i) for i in range(len(calls))]
    torch.cuda.synchronize()

    def work(thread):
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(thread)).tolist()
        wrong = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in order * 3:
                wrong.append((result(i) != expected[i]).any())
            return torch.stack(wrong).any().item()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))


@gpu
@pytest.mark.parametrize("rows,cols", [(500, 4096), (16, 262144)])
def test_beside_a_process_that_fills_the_gpu(rows, cols):
    busy = "import torch\na = torch.randn(4096, 4096, device='cuda')\nprint('on', flush=True)\nwhile True: b = a @ a"
    case = random_case(rows, cols, torch.float32, "both", seed=0)
    expected = run_case(layer_norm, *case)
    other = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "on\n"
        start = time.time()
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(expected, run_case(layer_norm, *case)))
        assert time.time() - start < 60
    finally:
        other.kill()
        other.wait()


@gpu
@pytest.mark.parametrize("rows,cols", [(1 << 20, 256), (64, 1 << 22)])
def test_out_of_memory_leaves_the_process_usable(rows, cols, tmp_path):
    code = f"""
        import torch, layernorm_inline
        x = torch.randn({rows}, {cols}, device="cuda")
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((x.nbytes * 1.5) / total)
        for _ in range(2):
            try:
                layernorm_inline.layer_norm(x, ({cols},))
            except torch.OutOfMemoryError:
                print("out of memory")
        small = torch.randn(2, {cols}, device="cuda")
        y, expected = (f(small, ({cols},)) for f in (layernorm_inline.layer_norm, torch.nn.functional.layer_norm))
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    """
    done = import_in_subprocess(tmp_path, code, TORCH_EXTENSIONS_DIR=CACHE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out of memory") == 2


@gpu
def test_no_statistics_without_grad():
    x = torch.randn(10000, 8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = layer_norm(x, (8,))
    assert torch.cuda.max_memory_allocated() - before == torch.cuda.memory_allocated() - before >= y.nbytes
    assert torch.cuda.max_memory_allocated() - before < y.nbytes + 512


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows,cols", [(1_000_000, 64), (40000, 1000), (4000, 16384), (64, 1 << 20), (8, 1 << 23)])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_backward_keeps_its_scratch_small(rows, cols, dtype, activation):
    x, weight, bias, dy = random_case(rows, cols, dtype, "both", seed=0)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(x, (cols,), weight, bias, activation=activation)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(y, leaves, dy)
    scratch = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)
    assert scratch <= 32 << 20, f"{scratch / 2**20:.1f} MB"


# In words of 4 bytes, which have to begin at such: input and grad_output that do not are copied.
@gpu
@pytest.mark.parametrize("offsets", [(0, 1, 1, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1)], ids=str)
def test_backward_copies_what_begins_between_words(offsets):
    x, weight, bias, dy = random_case(200_000, 255, torch.bfloat16, "both", seed=0, offsets=offsets)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(x, (255,), weight, bias)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(y, leaves, dy)
    scratch = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)
    copied = (offsets[0] + offsets[3]) * x.nbytes
    assert copied <= scratch <= copied + (32 << 20), f"{scratch / 2**20:.1f} MB"


# An allocator for PyTorch that surrounds every buffer, and fills it, with NaN: reading what nobody wrote
# spoils the result, and a write beside a buffer is counted when the buffer is given back.
GUARDS = r"""
#include <cuda_runtime_api.h>
#include <algorithm>
#include <vector>

static constexpr size_t kGuard = 1 << 16;
static int damaged = 0;

extern "C" void* allocate(ssize_t size, int, cudaStream_t) {
  void* buffer = nullptr;
  if (cudaMalloc(&buffer, size + 2 * kGuard) != cudaSuccess) return nullptr;
  cudaMemset(buffer, 0xff, size + 2 * kGuard);
  cudaDeviceSynchronize();
  return static_cast<char*>(buffer) + kGuard;
}

extern "C" void release(void* pointer, ssize_t size, int, cudaStream_t) {
  char* buffer = static_cast<char*>(pointer) - kGuard;
  std::vector<unsigned char> guards(2 * kGuard);
  cudaDeviceSynchronize();
  cudaMemcpy(guards.data(), buffer, kGuard, cudaMemcpyDeviceToHost);
  cudaMemcpy(guards.data() + kGuard, buffer + kGuard + size, kGuard, cudaMemcpyDeviceToHost);
  damaged += std::count(guards.begin(), guards.end(), 0xff) != long(2 * kGuard);
  cudaFree(buffer);
}

extern "C" int damaged_buffers() { return damaged; }
extern "C" void zero(void* pointer) { cudaMemset(pointer, 0, 1); }
"""


# Few rows of each room for the sanitizers: racecheck (2025.3) does not follow a ring whose slots are used again, where
# one lane arrives at a barrier for its warp after __syncwarp. It reports hazards in a textbook pipeline of 40 lines,
# too, and none where all lanes arrive. So what would go round a ring is left out, or only run forward.
def rings_wrap(case, room):
    return room == "pipeline" and case.elements > 3 * 10**6


SANITIZED = [
    case for case in SOME
    if not rings_wrap(case, case.forward) and case.dtype != "fp16" and case.affine in ("both", "float32")
    and case.off in ("", "xwbd", "d")
]  # fmt: skip


def every_room(compare):
    """Runs SANITIZED and the convolution, each of its own; compare: with float64, too. Yields after each."""
    for case in SANITIZED:
        function = functools.partial(layer_norm, **case.epilogue)
        tensors = case.tensors()
        backward = not rings_wrap(case, case.backward)
        if compare:
            compare_with_float64([(run_case(function, *tensors), tensors)], **case.epilogue)
        elif backward:
            assert all(t is None or t.isfinite().all() for t in run_case(function, *tensors))
        else:
            assert function(tensors[0], (case.cols,), *tensors[1:3]).isfinite().all()
        del tensors
        yield
    for dtype, allow_tf32 in (
        (torch.float32, True),
        (torch.float32, False),
        (torch.half, True),
        (torch.bfloat16, True),
    ):
        with convolutions_in_tf32(allow_tf32):
            model = ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34).cuda().to(dtype)
            y = model(torch.randn(1, 32, 2, 3, 32, device="cuda", dtype=dtype, requires_grad=True))
            y.sum().backward()
            assert all(torch.isfinite(t).all() for t in (y, *(p.grad for p in model.parameters())))
            del y, model
        yield


@gpu
def test_guard_bands_around_every_buffer(tmp_path):
    from torch.utils import cpp_extension

    (tmp_path / "guards.cpp").write_text(GUARDS)
    options = dict(build_directory=str(tmp_path), is_python_module=False, with_cuda=True)
    cpp_extension.load("guards", [str(tmp_path / "guards.cpp")], **options)
    library = str(tmp_path / "guards.so")
    code = f"""
        import ctypes, torch
        allocator = torch.cuda.memory.CUDAPluggableAllocator({library!r}, "allocate", "release")
        torch.cuda.memory.change_current_allocator(allocator)  # the import below allocates
        guards = ctypes.CDLL({library!r})
        import test_layernorm_inline
        for cases, _ in enumerate(test_layernorm_inline.every_room(compare=True), 1):
            assert guards.damaged_buffers() == 0
        buffer = torch.empty(10, device="cuda")
        guards.zero(ctypes.c_void_p(buffer.data_ptr() + buffer.nbytes))
        del buffer
        assert guards.damaged_buffers() == 1, "a write beside a buffer is noticed"
        print(cases, "cases")
    """
    done = import_in_subprocess(tmp_path, code, TORCH_EXTENSIONS_DIR=CACHE, PYTHONPATH=os.path.dirname(SOURCE))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(SANITIZED) + 4} cases\n"


@gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tmp_path, tool):
    script = tmp_path / "rooms.py"
    script.write_text(
        "import test_layernorm_inline\n"
        "print(len(list(test_layernorm_inline.every_room(compare=False))), 'cases')\n"
    )  # fmt: skip
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": CACHE, "PYTHONPATH": os.path.dirname(SOURCE)}
    if tool == "memcheck":  # one allocation a tensor: memcheck then knows where each one ends
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = ["compute-sanitizer", "--tool", tool]
    if tool != "initcheck":  # which has to see PyTorch's kernels write what ours read
        command += ["--kernel-name", "kns=layernorm_inline"]
    command += [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and f"{len(SANITIZED) + 4} cases" in done.stdout, done.stdout + done.stderr
    assert re.search("ERROR SUMMARY: 0 errors|0 hazards displayed", done.stdout), done.stdout


DISTRIBUTED = """
    import os, sys, copy, torch
    from torch import nn
    import torch.distributed as dist
    from layernorm_inline import ModelNew, replace_layer_norm

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    kind = sys.argv[1]

    def losses(replace):
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]).cuda()
        if replace:
            replace_layer_norm(model)
            assert sum(type(m) is ModelNew for m in model.modules()) == 3
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        else:
            from torch.distributed.fsdp import fully_shard
            for m in model:
                if isinstance(m, (nn.Linear, nn.LayerNorm)):
                    fully_shard(m)
            fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        torch.manual_seed(rank + 1)
        x, target = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
        result = []
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.append(loss.detach())
        return torch.stack(result)

    theirs, ours = losses(False), losses(True)
    assert theirs[-1] < theirs[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    dist.destroy_process_group()
    print("agree")
"""


@two_gpus
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_training(kind, tmp_path):
    import_in_subprocess(tmp_path, "print()")
    (tmp_path / "train.py").write_text(textwrap.dedent(DISTRIBUTED))
    port = str(29500 + os.getpid() % 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    done = subprocess.run(
        [*command, "train.py", kind], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree") == 2


# ---- Rows in registers ----


# So many rows that a thread of the forward kernel takes several of them, and not a multiple of what a block takes.
@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "rows,cols",
    [(2207, 9), (2501, 150), (2211, 255), (1103, 2041), (1103, 2048), (703, 4099), (401, 6001), (301, 14335), (211, 50257),
     (103, 100004), (37, 131075)],
)  # fmt: skip
def test_many_unaligned_rows(rows, cols, offset, dtype):
    assert_close_to_float64(random_case(rows, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset)))


# So many bytes that blocks bring to L2 what later blocks read (40 KB for each SM ahead), up to the last row.
@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "cols,offset", [(64, 0), (255, 1), (768, 0), (1024, 0), (2041, 0), (4096, 1), (6001, 0), (10008, 0), (16384, 0)]
)
def test_rows_brought_to_l2_for_later_blocks(cols, offset, dtype):
    rows = (24 << 20) // (cols * dtype.itemsize) + 1
    assert_close_to_float64(random_case(rows, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset)))


@gpu
@pytest.mark.parametrize("rows", [1_000_000, 3_000_001])
def test_gradients_over_millions_of_rows(rows):
    assert_close_to_float64(random_case(rows, 24, torch.float32, "both", seed=rows))


# ---- Rows that many SMs hold together, rows spread over the GPU ----


@gpu
def test_main_shape():
    x, weight, bias, dy = random_case(16, 64 * 256 * 256, torch.float32, mean=0.0, telling=False)
    assert_close_to_float64((x, weight, bias, dy), eps=1e-5, luck=SUMS)


# One group of blocks and several; slices with and without an incomplete last stage, and with one stage more in some
# blocks than in others; on 132 SMs as long as they can be, and just longer.
@gpu
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("affine,mean", [("both", 3.0), ("weight", 1e6), ("bias", 0.0), ("none", 1e4)])
@pytest.mark.parametrize(
    "rows,cols", [(4, 2200004), (13, 1100004), (5, 3000000), (5, 3786816), (7, 4325376), (4, 4325380), (9, 3300000)]
)
def test_rows_that_many_sms_hold_together(rows, cols, affine, mean, activation):
    case = random_case(rows, cols, torch.float32, affine, seed=cols, mean=mean, telling=False)
    epilogue = dict(activation=activation, scale=-1.5 if activation else 1.0)
    assert_close_to_float64(case, eps=1e-5, luck=SUMS, **epilogue)


@gpu
@pytest.mark.parametrize("rows,cols", [(8, 262144), (1, 262144), (2, 65536), (1, 1 << 21), (4, 2200004)])
def test_gradients_of_rows_with_outliers(rows, cols):
    cases = [random_case(rows, cols, torch.float32, "both", seed=seed, mean=0.0, telling=False) for seed in range(5)]
    for x, *_ in cases:
        x[:, :: cols // 5] = 1e4
    assert_close_to_float64(*cases, eps=1e-5, luck=SUMS)


# ---- Convolution: ConvTranspose3d, LayerNorm, GELU, scaling ----


MODELS_34 = [
    ((32, 64, 4, 2, 1), (2, 32, 3, 5, 32)),  # the kernel's family
    ((32, 64, 4, 2, 1), (1, 32, 1, 1, 32)),
    ((32, 64, 4, 2, 1), (3, 32, 2, 17, 32)),
    ((32, 64, 4, 2, 1, False, 1e-3, -0.5), (1, 32, 4, 8, 32)),
    ((32, 64, 4, 2, 1, True, 1e-5, 0.0), (1, 32, 2, 2, 32)),
    ((3, 8, 4, 2, 1), (2, 3, 3, 5, 4)),  # PyTorch's convolution
    ((3, 9, 3, 1, 1, False), (2, 3, 3, 5, 9)),
    ((4, 7, (3, 3, 4), (1, 2, 1), (0, 1, 0)), (1, 4, 2, 3, 4)),
]


@contextlib.contextmanager
def convolutions_in_tf32(allowed):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=["tf32", "float32", "float16", "bfloat16"])
def dtype_34(request):
    """What problem 34 is computed in; with "tf32", convolutions of float32 may round to it."""
    with convolutions_in_tf32(request.param == "tf32"):
        yield torch.float32 if request.param == "tf32" else getattr(torch, request.param)


def models_34(arguments, device, dtype=torch.float32):
    """(reference, ours) with the same parameters."""
    torch.manual_seed(0)
    reference = Model34(*arguments)
    torch.manual_seed(0)
    ours = ConvTranspose3dLayerNormGELUScaling(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), ours.parameters()))
    randomize(reference.layer_norm)
    ours.load_state_dict(reference.state_dict())
    reference.load_state_dict(ours.state_dict())
    return reference.to(device, dtype), ours.to(device, dtype)


def assert_problem_34(reference, ours, x, grad):
    """Output and gradients of ours are no further from float64 than 1.5 times the reference's, plus rounding."""
    results = []
    for module in (copy.deepcopy(reference).double(), reference, ours):
        leaf = x.to(next(module.parameters()).dtype).requires_grad_(grad)
        with torch.set_grad_enabled(grad), poisoned(x.device if x.is_cuda else "cuda"):
            y = module(leaf)
        outputs = [y.detach()]
        if grad:
            generator = torch.Generator(x.device).manual_seed(1)
            dy = torch.randn(y.shape, device=x.device, generator=generator).to(x.dtype).to(y.dtype)
            outputs += torch.autograd.grad(y, [leaf, *module.parameters()], dy)
        results.append(outputs)
    assert results[1][0].shape == results[2][0].shape and results[1][0].stride() == results[2][0].stride()
    for i, (exact, theirs, mine) in enumerate(zip(*results)):
        assert mine.dtype == theirs.dtype == x.dtype
        error, allowed = ((t.double() - exact).abs().max().item() for t in (mine, theirs))
        scale = max(exact.abs().max().item(), 1)
        if not x.is_cuda and not allowed < 0.1 * scale:  # 2.6: the gradient of a bfloat16 weight
            pytest.skip("this PyTorch's own convolution is wrong on the CPU")
        if exact.abs().max() < 1e-6:
            allowed *= 4  # the gradient of the convolution's bias: nothing but rounding
        rounding = max(4 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(x.dtype).eps) * scale
        assert error <= 1.5 * allowed + rounding, (i, error, allowed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arguments,shape", MODELS_34)
def test_problem_34(arguments, shape, grad, device, dtype_34):
    if device == "cpu" and dtype_34 != torch.float32:
        pytest.skip("16-bit convolutions are for the GPU")
    x = torch.randn(shape, device=device, dtype=dtype_34)
    assert_problem_34(*models_34(arguments, device, dtype_34), x, grad)


@gpu
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_problem_34_where_blocks_take_many_rounds(grad, dtype_34):
    """Every block goes through depths, and on to other lines. Backward takes 256 MB of the convolution at a time:
    of these five, two in float32 and four in 16 bits."""
    x = torch.randn(5, 32, 16, 128, 32, device="cuda", dtype=dtype_34)
    assert_problem_34(*models_34(ARGUMENTS_34, "cuda", dtype_34), x, grad)


@two_gpus
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_problem_34_on_a_device_that_is_not_current(grad, dtype_34):
    """(In backward autograd makes it current by itself.)"""
    with torch.cuda.device(0):
        x = torch.randn(2, 32, 3, 4, 32, device="cuda:1", dtype=dtype_34)
        assert_problem_34(*models_34(ARGUMENTS_34, "cuda:1", dtype_34), x, grad)


@gpu
def test_problem_34_on_other_inputs(dtype_34):
    reference, ours = models_34(ARGUMENTS_34, "cuda", dtype_34)
    atol = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype_34, 1e-4 if torch.backends.cudnn.allow_tf32 else 1e-5)
    tolerance = dict(atol=atol, rtol=atol)
    with torch.no_grad():
        flat = torch.randn(2 * 32 * 3 * 4 * 32 + 1, device="cuda", dtype=dtype_34)
        x = flat[:-1].view(2, 32, 3, 4, 32)
        expected = reference(x)
        for given in (
            x.contiguous(memory_format=torch.channels_last_3d),
            torch.cat([flat[-1:], flat])[1:-1].view_as(x),
        ):
            torch.testing.assert_close(ours(given), expected, **tolerance)
        assert ours(x[:0]).shape == (0, *expected.shape[1:])
        torch.testing.assert_close(ours(x[0]), expected[0], **tolerance)  # no batch: PyTorch's convolution
        assert torch.equal(ours(x), ours(x))
        if dtype_34 == torch.float32:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                torch.testing.assert_close(ours(x), reference(x), atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(ours(x[:0]).sum(), list(ours.parameters()))
    assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, ours.parameters()))


@gpu
def test_problem_34_one_gradient_at_a_time(dtype_34):
    _, ours = models_34(ARGUMENTS_34, "cuda", dtype_34)
    x = torch.randn(3, 32, 3, 5, 32, device="cuda", dtype=dtype_34)
    leaves = [x, *ours.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    all_of_them = torch.autograd.grad(ours(x).square().sum(), leaves)
    for wanted, expected in zip(leaves, all_of_them):
        for leaf in leaves:
            leaf.requires_grad_(leaf is wanted)
        (grad,) = torch.autograd.grad(ours(x).square().sum(), wanted)
        torch.testing.assert_close(grad, expected, atol=1e-3, rtol=1e-3)  # PyTorch's convolution may add in any order


@gpu
@pytest.mark.skipif(
    HAVE_GPU and torch.cuda.get_device_capability() != (9, 0), reason="the order of cuDNN's sums on Hopper"
)
def test_problem_34_rounds_as_pytorch_does(dtype_34):
    """One unit in the last place of a convolution of bfloat16 can be more than KernelBench allows at the end."""
    if dtype_34 == torch.float32 and not torch.backends.cudnn.allow_tf32:
        pytest.skip("PyTorch's convolution in full float32 adds in another order")
    torch.manual_seed(0)
    reference, ours = Model34(*ARGUMENTS_34), ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34)
    ours.load_state_dict(reference.state_dict())
    x = torch.rand(8, *INPUT_34[1:], device="cuda", dtype=dtype_34)
    tolerance = 1e-4 if dtype_34 == torch.float32 else 1e-2  # KernelBench's
    with torch.no_grad():
        reference, ours = reference.to(x), ours.to(x)
        torch.testing.assert_close(ours(x), reference(x), atol=tolerance, rtol=tolerance)


@gpu
def test_problem_34_keeps_only_its_input():
    """A step keeps its input and its output; backward adds what parts of the batch take."""
    _, ours = models_34(ARGUMENTS_34, "cuda")
    x = torch.randn(32, 32, 8, 32, 32, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ours(x)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * y.nbytes
    y.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 3.4 * y.nbytes  # of which autograd's copy of ones: 1 times


@gpu
def test_problem_34_double_backward():
    reference, ours = models_34(ARGUMENTS_34, "cuda")
    with convolutions_in_tf32(False):
        x = torch.randn(1, 32, 2, 3, 32, device="cuda", requires_grad=True)
        results = []
        for module in (copy.deepcopy(reference).double(), reference, ours):
            leaf = x.detach().to(module.conv_transpose.weight.dtype).requires_grad_()
            wanted = [leaf, module.conv_transpose.weight, module.layer_norm.weight, module.layer_norm.bias]
            first = torch.autograd.grad(module(leaf).square().mean(), wanted, create_graph=True)
            wanted.pop()
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    for exact, theirs, mine in zip(*results):
        error, allowed = ((t.double() - exact).abs().max().item() for t in (mine, theirs))
        assert error <= 3 * allowed + 1e-5 * exact.abs().max().item(), (error, allowed)


@gpu
@pytest.mark.parametrize("training", [False, True])
def test_problem_34_compiled_in_one_graph(training, dtype_34):
    _, ours = models_34(ARGUMENTS_34, "cuda", dtype_34)
    x = torch.randn(2, 32, 3, 4, 32, device="cuda", dtype=dtype_34, requires_grad=training)
    compiled = torch.compile(ours, fullgraph=True)
    with torch.set_grad_enabled(training):
        y, expected = compiled(x), ours(x)
    assert torch.equal(y, expected)
    if training:
        wanted = [x, *ours.parameters()]
        for mine, other in zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (y, expected))):
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)


@gpu
def test_problem_34_opcheck():
    _, ours = models_34(ARGUMENTS_34, "cuda")
    x = torch.randn(2, 32, 2, 3, 32, device="cuda", requires_grad=True)
    conv, norm = ours.conv_transpose, ours.layer_norm
    arguments = (x, conv.weight, conv.bias, norm.weight, norm.bias, 1e-5, 0.5)
    newer = "atol" in inspect.signature(torch.library.opcheck).parameters  # than 2.6
    with convolutions_in_tf32(False):
        torch.library.opcheck(
            layernorm_inline._ops.conv_transpose3d_layer_norm_gelu.default, arguments,
            **(dict(atol=1e-3, rtol=1e-3) if newer else {}),
        )  # fmt: skip


@gpu
def test_problem_34_cuda_graph_of_a_training_step(dtype_34):
    _, ours = models_34(ARGUMENTS_34, "cuda", dtype_34)
    x = torch.randn(2, 32, 3, 5, 32, device="cuda", dtype=dtype_34)

    def step():
        for p in ours.parameters():
            p.grad = None
        y = ours(x)
        y.square().mean().backward()
        return y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    grads = [p.grad for p in ours.parameters()]
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [t.clone() for t in (captured, *grads)]
    expected = [step(), *(p.grad for p in ours.parameters())]
    assert torch.equal(replayed[0], expected[0])
    for mine, other in zip(replayed[1:], expected[1:]):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)


@gpu
def test_problem_34_with_hooks():
    """Hooks of the inner modules run, forward and backward, and change nothing else."""
    _, ours = models_34(ARGUMENTS_34, "cuda")
    x = torch.randn(1, 32, 2, 3, 32, device="cuda")
    expected, seen = ours(x), []
    for module in (ours.conv_transpose, ours.layer_norm):
        for register in (module.register_forward_hook, module.register_full_backward_hook):
            hook = register(lambda *_: seen.append(1))
            y = ours(x)
            y.sum().backward()
            hook.remove()
            torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    assert len(seen) == 4


@gpu
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this PyTorch has one setting for all of cuDNN")
def test_problem_34_asks_for_the_setting_of_convolutions():
    """allow_tf32 raises when it is asked for where convolutions and RNNs differ."""
    reference, ours = models_34(ARGUMENTS_34, "cuda")
    x, before = torch.randn(2, 32, 3, 5, 32, device="cuda"), torch.backends.cudnn.conv.fp32_precision
    with torch.no_grad():
        exact, errors = copy.deepcopy(reference).double()(x.double()), {}
        for precision in ("ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = precision
            errors[precision] = (ours(x) - exact).abs().max().item()
        torch.backends.cudnn.enabled = False  # PyTorch's own convolutions take no TF32
        errors["without cuDNN"] = (ours(x) - exact).abs().max().item()
        torch.backends.cudnn.enabled = True
        torch.backends.cudnn.conv.fp32_precision = before
    assert errors["ieee"] < 1e-5 < errors["tf32"]
    assert errors["without cuDNN"] < 1e-5


@kernels
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_problem_34_takes_one_kernel_where_nobody_would_notice(dtype, grad):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def model_of(padding):
        torch.set_default_dtype(dtype)
        model = ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, padding)
        torch.set_default_dtype(torch.float32)
        return model

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").uniform_()
        except RuntimeError:  # PyTorch 2.6
            pytest.skip("this PyTorch asks the driver for random numbers on a fake GPU")
    with FakeTensorMode(), torch.device("cuda"), torch.set_grad_enabled(grad):
        model, x = model_of(padding=1), torch.empty(2, 32, 3, 5, 32, dtype=dtype)
        y = model(x)
        assert model._in_one_kernel(x) and (y.shape, y.dtype) == ((2, 64, 6, 10, 64), dtype)
        if grad:
            assert y.grad_fn.name() == "ConvTranspose3dLayerNormGELUBackward"
            inputs = (x, *model.parameters())
            grads = layernorm_inline._ops.convolution_backward(y, *inputs, 1e-5, 1.0, [True] * 5)
            assert all(g.shape == t.shape and g.dtype == dtype for g, t in zip(grads, inputs))
        assert not model._in_one_kernel(x[:, :, :, :, :31])
        assert not model._in_one_kernel(x[0])
        assert not model._in_one_kernel(x.double())
        for module in (model.conv_transpose, model.layer_norm):
            for register in (module.register_forward_hook, module.register_full_backward_hook):
                hook = register(lambda *_: None)
                assert not model._in_one_kernel(x)
                hook.remove()
        assert model._in_one_kernel(x)
        assert not model_of(padding=0)._in_one_kernel(x)
        for changed in (dict(output_padding=(1, 1, 0)), dict(dilation=(2, 1, 1)), dict(groups=2)):
            model = model_of(padding=1)
            outs = 64 * changed.get("groups", 1)
            model.conv_transpose = nn.ConvTranspose3d(32, outs, 4, 2, 1, dtype=dtype, bias=False, **changed)
            assert not model._in_one_kernel(x)
        for norm in (ModelNew((4, 64), elementwise_affine=False), nn.Identity()):
            model = model_of(padding=1)
            model.layer_norm = norm
            assert not model._in_one_kernel(x)
        model = model_of(padding=1)
        model.scaling_factor = torch.tensor(2.0)
        assert not model._in_one_kernel(x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_problem_34_scaled_by_a_parameter(device):
    model = ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34).to(device)
    x = torch.randn(1, 32, 1, 2, 32, device=device)
    y = model(x)
    model.scaling_factor = nn.Parameter(torch.tensor(3.0, device=device))
    tripled = model(x)
    torch.testing.assert_close(tripled, 3 / ARGUMENTS_34[-1] * y, atol=2e-3, rtol=2e-3)  # TF32
    tripled.sum().backward()
    torch.testing.assert_close(3 * model.scaling_factor.grad, tripled.sum(), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("shape,channels", [((1, 32, 2, 2, 31), 64), ((1, 3, 2, 2, 4), 9)])
def test_problem_34_normalizes_the_width(shape, channels, device):
    arguments = (shape[1], channels, 4, 2, 1)
    for module in models_34(arguments, device):
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"normalized_shape=\\[{channels}\\], expected input"):
            module(torch.randn(shape, device=device))


# ---- Dispatch and binding: shapes, strides, errors ----


@gpu
@pytest.mark.parametrize(
    "shape,normalized", [((3, 4, 5, 6), 1), ((3, 4, 5, 6), 2), ((3, 4, 5, 6), 4), ((6,), 1), ((2, 8, 64, 64), 3)]
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last", "expanded", "sliced"])
def test_shapes_and_strides(shape, normalized, layout):
    x = torch.randn(shape, device="cuda")
    if layout == "transposed" and x.dim() > 1:
        x = torch.randn(shape[:-2] + (shape[-1], shape[-2]), device="cuda").transpose(-1, -2)
    elif layout == "channels_last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    elif layout == "expanded":
        x = torch.randn(shape[-1:], device="cuda").expand(shape)
    elif layout == "sliced":
        x = torch.randn(shape[:-1] + (2 * shape[-1],), device="cuda")[..., ::2]
    normalized_shape = x.shape[-normalized:]
    theirs, ours = nn.LayerNorm(normalized_shape).cuda(), ModelNew(normalized_shape).cuda()
    gradients = []
    for module in (theirs, ours):
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        (y * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
        gradients.append((y.detach(), leaf.grad, module.weight.grad, module.bias.grad))
    assert gradients[0][0].stride() == gradients[1][0].stride()
    for their, mine in zip(*gradients):
        torch.testing.assert_close(mine, their, atol=2e-5, rtol=1e-4)


@gpu
@pytest.mark.parametrize("shape,normalized_shape", [((0, 5), (5,)), ((3, 0, 8), (8,)), ((0, 40000), (40000,))])
def test_no_rows(shape, normalized_shape):
    module = ModelNew(normalized_shape).cuda()
    x = torch.empty(shape, device="cuda", requires_grad=True)
    with poisoned():
        y = module(x)
        y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape
    assert (module.weight.grad == 0).all() and (module.bias.grad == 0).all()


BAD = [
    (RuntimeError, "normalized_shape", lambda d: layer_norm(torch.zeros(2, 5, device=d), (4,))),
    (RuntimeError, "normalized_shape", lambda d: layer_norm(torch.zeros(5, device=d), (2, 5))),
    (RuntimeError, "at least 1-dimensional", lambda d: layer_norm(torch.zeros(2, 5, device=d), ())),
    (RuntimeError, "weight", lambda d: layer_norm(torch.zeros(2, 5, device=d), (5,), torch.zeros(4, device=d))),
    (RuntimeError, "bias", lambda d: layer_norm(torch.zeros(2, 5, device=d), (5,), None, torch.zeros(1, 5, device=d))),
    (RuntimeError, "not implemented|Long", lambda d: layer_norm(torch.zeros(2, 5, device=d, dtype=torch.int64), (5,))),
    (RuntimeError, "not implemented|Complex", lambda d: layer_norm(torch.zeros(2, 5, device=d, dtype=torch.cfloat), (5,))),
    (TypeError, "list", lambda d: layer_norm([1.0, 2.0], (2,))),
    (TypeError, "not int", lambda d: layer_norm(torch.zeros(2, 5, device=d), 5)),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("error,words,call", BAD)
def test_bad_input(error, words, call, device):
    with pytest.raises(error, match=words):
        call(device)
    assert torch.isfinite(layer_norm(torch.randn(2, 5, device=device), (5,))).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_scale_with_a_gradient_is_refused(device):
    x, scale = torch.randn(2, 5, device=device), torch.tensor(2.0, requires_grad=True)
    with pytest.raises(TypeError, match="scale to be a number"):
        layer_norm(x, (5,), scale=scale)


@pytest.mark.parametrize("call", [call for _, _, call in BAD])
def test_errors_on_the_cpu_are_pytorchs(call, monkeypatch):
    errors = []
    for function in (nn.functional.layer_norm, layer_norm):
        monkeypatch.setitem(globals(), "layer_norm", function)
        with pytest.raises(Exception) as caught:  # noqa: B017
            call("cpu")
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@gpu
def test_bad_dtypes_and_devices():
    x, w = torch.zeros(2, 5, device="cuda"), torch.zeros(5, device="cuda")
    for weight, bias, words in [
        (w.half(), None, "Expected weight of dtype Float"),
        (None, w.double(), "Expected bias of dtype Float"),
        (w.cpu(), None, "same device"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            layer_norm(x, (5,), weight, bias)
    with pytest.raises(RuntimeError, match="same dtype"):
        layer_norm(x.half(), (5,), w, w.half())


@kernels
@pytest.mark.parametrize(
    "words,change",
    [
        ("input of shape \\[\\*, 32, \\*, \\*, 32\\], but got \\[1, 31, 2, 2, 32\\]", dict(input=(1, 31, 2, 2, 32))),
        ("conv_weight of shape .* but got \\[32, 64, 3, 3, 3\\]", dict(conv_weight=(32, 64, 3, 3, 3))),
        ("dtype Float, Half or BFloat16, but got Double", dict(dtype=torch.float64)),
        ("conv_bias of shape \\[64\\], but got \\[63\\]", dict(conv_bias=(63,))),
        ("Expected weight to be of same shape", dict(weight=(63,))),
        ("Expected bias to be of same shape", dict(bias=(65,))),
    ],
)
def test_bad_input_of_the_convolution(words, change):
    shapes = dict(input=(1, 32, 2, 2, 32), conv_weight=(32, 64, 4, 4, 4), conv_bias=(64,), weight=(64,), bias=(64,))
    dtype = change.get("dtype", torch.float32)
    tensors = [torch.empty(change.get(k, v), device="meta", dtype=dtype) for k, v in shapes.items()]
    with pytest.raises(RuntimeError, match=words):
        layernorm_inline._ops.conv_transpose3d_layer_norm_gelu(*tensors, 1e-5, 1.0)


# ---- Python API: autograd ----


@contextlib.contextmanager
def ops_on_the_cpu():
    """Yields the op layer_norm, with PyTorch's functions as kernels for CPU tensors: what lies above the kernels
    (autograd, vmap) runs without a GPU."""

    def forward(x, shape, weight, bias, eps, activation=0, scale=1.0):
        y, *statistics = torch.native_layer_norm(x, shape, weight, bias, eps)
        if activation:
            y = nn.functional.gelu(y, approximate=("none", "tanh")[activation - 1])
        return y * scale, torch.stack([s.flatten() for s in statistics])

    def backward(dy, x, shape, _, weight, bias, activation, scale, wanted):
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
            y, _ = forward(leaves[0], shape, *leaves[1:], 1e-5, activation, scale)
            gradients = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy))
        return tuple(torch.empty(0) if t is None else next(gradients) for t in leaves)

    library = torch.library.Library(layernorm_inline._ops.name, "IMPL")
    library.impl("layer_norm", lambda *arguments: forward(*arguments)[0], "CPU")
    library.impl("forward", forward, "CPU")
    library.impl("backward", backward, "CPU")
    yield layernorm_inline._ops.layer_norm.default
    del library


@gpu
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 8), (2, 5000)])
def test_gradcheck_and_gradgradcheck(shape, affine):
    x, weight, bias, _ = random_case(1, shape[-1], torch.float64, affine, seed=0)
    x = torch.randn(shape, dtype=torch.float64, device="cuda", requires_grad=True)
    inputs = [x] + [None if t is None else t.requires_grad_() for t in (weight, bias)]

    def function(*tensors):
        return layer_norm(tensors[0], shape[-1:], *tensors[1:])

    assert torch.autograd.gradcheck(function, inputs, fast_mode=shape[-1] > 1000)
    if shape[-1] < 1000:
        assert torch.autograd.gradgradcheck(function, inputs)


@kernels
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_third_derivatives(device, activation):
    x, weight, bias, _ = random_case(3, 5, torch.float64, "both", seed=0, telling=False, device=device)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    with ops_on_the_cpu() as op:

        def loss(x, weight, bias):  # of the op, one input is computed from another
            return op(x * weight, [5], weight, bias, 1e-5, layernorm_inline._ACTIVATIONS[activation], 1.5).sin().sum()

        def slope(*tensors):
            return torch.autograd.grad(loss(*tensors), tensors, create_graph=True)

        assert torch.autograd.gradcheck(slope, inputs)
        assert torch.autograd.gradgradcheck(slope, inputs)
        rest = [t.detach() for t in inputs[1:]]
        forward_last = torch.func.jacfwd(torch.func.jacrev(loss))(x.detach(), *rest)
        torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(x.detach(), *rest), forward_last)


@gpu
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("rows,cols", [(6, 40), (9, 16384), (150, 20001), (3, 262144)])
def test_copy_on_write_tensors_stay_shared(rows, cols, activation):
    if not hasattr(torch, "_lazy_clone"):
        pytest.skip("this PyTorch has no copy-on-write tensors")
    case = random_case(rows, cols, torch.float32, "both", seed=0)
    x, weight, bias, dy = (torch._lazy_clone(t) for t in case)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(x, (cols,), weight, bias, activation=activation)
    torch.autograd.grad(y, leaves, dy)
    assert all(torch._C._is_cow_tensor(t) for t in (*leaves, dy))


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    module = nn.LayerNorm(768).cuda()
    x = torch.randn(4, 768, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        expected = module(x)
        y = replace_layer_norm(copy.deepcopy(module))(x)
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert x.grad.dtype == dtype


FUNCTIONS = dict(kernels=layer_norm, pytorch=nn.functional.layer_norm)


@gpu
def test_functional_transforms():
    x, weight, bias, dy = random_case(6, 8, torch.float64, "both", seed=0)
    results = []
    for function in FUNCTIONS.values():

        def loss(x, weight, bias):
            return (function(x, (8,), weight, bias) * dy[: x.numel() // 8].view_as(x)).sin().sum()

        results.append([
            torch.func.vmap(lambda row: function(row, (8,), weight, bias))(x),
            *torch.func.grad(loss, argnums=(0, 1, 2))(x, weight, bias),
            torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None, None))(x, weight, bias),
            torch.func.jvp(lambda x: function(x, (8,), weight, bias), (x,), (dy,))[1],
            torch.func.jacrev(lambda x: function(x, (8,), weight, bias))(x[0]),
            torch.func.hessian(lambda x: loss(x, weight, bias))(x[0]),
        ])  # fmt: skip
    torch.testing.assert_close(*results)


@pytest.fixture
def no_vmap_fallback():
    """vmap raises where an operation has no batching rule; else it loops over the slices and warns."""
    if not hasattr(torch.library, "register_vmap"):
        pytest.skip("this PyTorch cannot register a batching rule")
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@kernels
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", 2.0)])
@pytest.mark.parametrize(
    "x,weight,bias,in_dims",
    [
        ((3, 5, 8), (8,), (8,), (0, None, None)),
        ((5, 3, 8), (8,), None, (1, None, None)),
        ((3, 8), None, None, (0, None, None)),
        ((3, 8), (3, 8), (3, 8), (0, 0, 0)),
        ((5, 8), (3, 8), (8,), (None, 0, None)),
        ((5, 8), (8,), (8, 3), (None, None, 1)),
        ((5, 2, 3, 8), (3, 8), (8, 3), (2, 0, 1)),
        ((5, 4, 3, 2), (4, 2), (4, 3, 2), (2, None, 1)),
        ((4, 2), (3, 4, 2), None, (None, 0, None)),
    ],
)
def test_vmap(x, weight, bias, in_dims, activation, scale, dtype, device, no_vmap_fallback):
    normalized_shape = (4, 2) if x[-1] == 2 else (8,)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        t and torch.randn(t, generator=generator).to(device, dtype).requires_grad_() for t in (x, weight, bias)
    )
    given = [t for t in (x, weight, bias) if t is not None]
    given_dims = tuple(d for d, t in zip(in_dims, (x, weight, bias)) if t is not None)
    results = []
    with ops_on_the_cpu() as op:

        def ours(x, weight=None, bias=None):
            return op(x, normalized_shape, weight, bias, 1e-5, layernorm_inline._ACTIVATIONS[activation], scale)

        def pytorch(x, weight=None, bias=None):
            return chain(x, normalized_shape, weight, bias, 1e-5, activation, scale)

        for function in (ours, pytorch):

            def loss(*tensors):
                return function(*tensors).double().sin().sum()

            def mapped_loss(*tensors):
                return torch.vmap(function, given_dims)(*tensors).double().sin().sum()

            every = tuple(range(len(given)))
            detached = [t.detach() for t in given]
            results.append([
                torch.vmap(function, given_dims)(*given),
                torch.autograd.grad(mapped_loss(*given), given),
                torch.vmap(torch.func.grad(loss, every), given_dims)(*detached),
                torch.func.grad(mapped_loss, every)(*detached),
                torch.vmap(lambda *t: torch.vmap(function, given_dims)(*t), (0,) * len(given))(
                    *(torch.stack([t, 2 * t]) for t in detached)
                ),
            ])  # fmt: skip
    loose = dict(atol=0.15, rtol=0.05) if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*results, **loose)


@kernels
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_vmap_over_backward(device, no_vmap_fallback):
    x, weight, bias, _ = random_case(5, 8, torch.float64, "both", seed=0, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    gradients = torch.randn(3, 5, 8, dtype=x.dtype, device=device)
    results = []
    with ops_on_the_cpu() as op:
        for function in (op, nn.functional.layer_norm):
            y = function(x, (8,), weight, bias, 1e-5)
            results.append(torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(gradients))
    torch.testing.assert_close(*results)


@kernels
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_vmap_checks_the_slices(device, no_vmap_fallback):
    x, weights = torch.zeros(2, 5, device=device), torch.zeros(3, 5, device=device)
    with ops_on_the_cpu() as op:
        for words, call in [
            ("normalized_shape", lambda: torch.vmap(lambda row: op(row, [2, 5], None, None, 1e-5))(x)),
            ("weight", lambda: torch.vmap(lambda w: op(x, [5], w[:1], None, 1e-5))(weights)),
            ("bias", lambda: torch.vmap(lambda b: op(x, [5], None, b[None], 1e-5))(weights)),
            ("dtype|type", lambda: torch.vmap(lambda w: op(x, [5], w.double(), None, 1e-5))(weights)),
        ]:
            with pytest.raises(RuntimeError, match=words):
                call()


@gpu
def test_forward_mode():
    x, weight, bias, tangent = random_case(6, 8, torch.float64, "both", seed=0)
    results = []
    for function in FUNCTIONS.values():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            results.append(torch.autograd.forward_ad.unpack_dual(function(dual, (8,), weight, bias)))
    torch.testing.assert_close(*results)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@gpu
def test_the_node_in_the_graph():
    norm, x = randomize(ModelNew(64).cuda()), torch.randn(5, 64, device="cuda", requires_grad=True)
    y = norm(x)
    assert "LayerNorm" in y.grad_fn.name() and len(y.grad_fn.next_functions) == 3
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()

    changed = x * 2
    y = norm(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

    wanted, dy = (x, norm.weight, norm.bias), torch.randn_like(x)
    right = torch.autograd.grad(norm(x), wanted, dy)
    with torch.autograd.graph.save_on_cpu():
        y = norm(x)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, wanted, dy), right))
    assert torch.autograd.grad(NoGradient.apply(norm(x)).sum(), wanted, allow_unused=True) == (None, None, None)
    (only,) = torch.autograd.grad(layer_norm(x.detach(), (64,), norm.weight), [norm.weight], dy)
    assert torch.equal(only, right[1])


@kernels
def test_threads_in_backward_over_one_graph():
    inside = []
    most = 0

    def unpack(tensor):
        nonlocal most
        inside.append(tensor)
        most = max(most, len(inside))
        time.sleep(0.05)
        inside.pop()
        return tensor

    def backward(y, ends):
        try:
            y.sum().backward()
            ends.append("")
        except RuntimeError as error:
            ends.append(str(error))

    with ops_on_the_cpu() as op:
        x, weight, bias, _ = (t.requires_grad_() for t in random_case(6, 8, torch.float32, "both", 0, device="cpu"))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = op(x, [8], weight, bias, 1e-5)
        ends = []
        threads = [threading.Thread(target=backward, args=(y, ends)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 1  # as PyTorch's own nodes: one thread at a time
    # Those who wait for the first may come before it releases what is saved.
    assert "" in ends and all("second time" in end for end in ends if end)


@gpu
def test_a_deep_graph_can_be_freed():
    x = torch.randn(1, 8, device="cuda", requires_grad=True)
    for _ in range(50_000):
        x = layer_norm(x, (8,))
    del x  # node by node: each freed from within the last one, they would fill the stack


@gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_gradient_accumulation(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    theirs = randomize(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()).cuda())
    ours = replace_layer_norm(copy.deepcopy(theirs))
    batches = [torch.randn(5, 32, device="cuda", requires_grad=True) for _ in range(3)]
    for x in batches:
        theirs(x).square().sum().backward()
        checkpoint(ours, x, use_reentrant=use_reentrant).square().sum().backward()
    for a, b in zip(theirs.parameters(), ours.parameters()):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4)


@gpu
def test_mixed_precision_training_step():
    theirs = randomize(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).cuda())
    ours = replace_layer_norm(copy.deepcopy(theirs))
    x = torch.randn(16, 64, device="cuda")
    gradients = []
    for model in (theirs, ours):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        (loss * 128).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-2)


# ---- Python API: training ----


def train(model, batches, steps, replacement=None, rate=1e-3):
    """Losses of some steps of Adam on random but fixed batches. batches: list of (input, target)."""
    model = copy.deepcopy(model)
    if replacement is not None:
        replacement(model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    for step in range(steps):
        x, target = batches[step % len(batches)]
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double()


class OtherSummationOrder(nn.LayerNorm):
    """LayerNorm that rounds elsewhere: what remains of two such runs' difference is noise."""

    def forward(self, x):
        mean = x.mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        distance = x - mean
        variance = distance.square().mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        return distance / (variance + self.eps).sqrt() * self.weight + self.bias


def with_other_order(model):
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = OtherSummationOrder


class ConvNet(nn.Sequential):
    def __init__(self):
        layers = []
        for i, size in enumerate((32, 16, 8)):
            layers += [nn.Conv2d(3 if i == 0 else 16, 16, 3, stride=1 if i == 0 else 2, padding=1)]
            layers += [nn.LayerNorm((16, size, size)), nn.GELU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 4))


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(64), nn.Linear(64, 4)
    )


# Networks and steps in which rounding errors do not grow: losses differ by some 2e-7. With ReLU, whose derivative jumps,
# it can be 3e-5, and later more; after 270 steps the convnet's loss is 1e-11, and what Adam then divides by their own
# size are gradients that consist of rounding errors.
@gpu
@pytest.mark.parametrize("make,shape,target", [
    (transformer, (16, 24, 64), (16, 24, 4)), (ConvNet, (16, 3, 32, 32), (16, 4)),
    (lambda: nn.Sequential(models_34(ARGUMENTS_34, "cpu")[0]), (2, 32, 3, 5, 32), (2, 64, 6, 10, 64)),
], ids=["transformer", "convnet", "problem 34"])  # fmt: skip
def test_training_follows_pytorch(make, shape, target):
    def replace(model):
        replace_layer_norm(model)
        if isinstance(model[0], Model34):
            original, model[0] = model[0], ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34).cuda()
            model[0].load_state_dict(original.state_dict())
            assert model[0]._in_one_kernel(batches[0][0])

    torch.manual_seed(0)
    model = make().cuda()
    batches = [(torch.randn(shape, device="cuda"), torch.randn(target, device="cuda")) for _ in range(4)]
    with convolutions_in_tf32(False):
        theirs = train(model, batches, 60)
        noise = (train(model, batches, 60, with_other_order) - theirs).abs().max()
        difference = (train(model, batches, 60, replace) - theirs).abs().max()
    assert theirs[-1] < 0.9 * theirs[0], "it learns"
    assert difference <= 5 * noise + 1e-6, f"differs by {difference:.2e}, noise is {noise:.2e}"


# ---- Python API: torch.compile, fake tensors ----


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_tensors_have_the_right_shapes(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6, 8, 5, device="cuda", dtype=dtype).transpose(0, 1)
        y = layer_norm(x, (8, 5), torch.empty(8, 5, device="cuda", dtype=dtype))
        assert (y.shape, y.dtype, y.stride(), y.device.type) == ((6, 4, 8, 5), dtype, (160, 40, 5, 1), "cuda")
        with pytest.raises(RuntimeError, match="normalized_shape"):
            layer_norm(x, (8, 6))


@gpu
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_in_one_graph(training):
    module = nn.Sequential(nn.Linear(64, 64), ModelNew(64), nn.ReLU()).cuda()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(training):
        for batch in (3, 5, 8):
            x = torch.randn(batch, 64, device="cuda")
            torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
            if training:
                gradients = []
                for m in (compiled, module):
                    module.zero_grad()
                    m(x).square().sum().backward()
                    gradients.append([p.grad.clone() for p in module.parameters()])
                torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@gpu
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_opcheck(affine):
    if not hasattr(torch.library, "opcheck"):
        pytest.skip("this PyTorch has no opcheck")
    x, weight, bias, dy = random_case(6, 40, torch.float32, affine, seed=0)
    ops = layernorm_inline._ops
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    for activation, scale in ((0, 1.0), (1, 2.0)):
        torch.library.opcheck(ops.layer_norm.default, (leaves[0], [40], *leaves[1:], 1e-5, activation, scale))
        forward = (x, [40], weight, bias, 1e-5, activation, scale)
        torch.library.opcheck(ops.forward.default, forward)
        _, statistics = ops.forward(*forward)
        backward = (dy, x, [40], statistics, weight, bias, activation, scale, [True, weight is not None, False])
        torch.library.opcheck(ops.backward.default, backward)
    model = ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34).cuda()
    norm, conv = (tuple(p.detach() for p in m.parameters()) for m in (model.layer_norm, model.conv_transpose))
    arguments = (torch.randn(1, 32, 2, 3, 32, device="cuda"), *conv, *norm, 1e-5, 1.0)
    torch.library.opcheck(ops.conv_transpose3d_layer_norm_gelu.default, arguments)


@gpu
def test_export_and_no_recompiling():
    module = nn.Sequential(ModelNew(16)).cuda()
    batches = [torch.randn(n, 6, 16, device="cuda") for n in (4, 9, 17)]
    dynamic = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(module, (batches[0],), dynamic_shapes=dynamic).module()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter, dynamic=True, fullgraph=True)
    for x in batches:
        torch.testing.assert_close(exported(x), module(x), rtol=0, atol=0)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    assert counter.frame_count == 1


@gpu
def test_reduce_overhead():
    module = nn.Sequential(nn.Linear(64, 64), ModelNew(64), nn.Linear(64, 8)).cuda()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(5, 64, device="cuda")
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        module.zero_grad()
        compiled(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], expected, atol=1e-4, rtol=1e-4)


def compare_samples_of_pytorchs_own_tests():
    import types
    import unittest

    # PyTorch's test utilities import expecttest, which nothing here needs.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.layer_norm")
    samples = 0
    for dtype in FLOATS:
        for sample in info.sample_inputs("cuda", dtype, requires_grad=True):
            results = []
            for function in (info.op, layer_norm):
                y = function(sample.input, *sample.args, **sample.kwargs)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), sample.input)])
            torch.testing.assert_close(results[0][0], results[1][0])
            torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-2)  # rows of two: all cancels
            samples += 1
    for bad in info.error_inputs("cuda") if info.error_inputs_func else ():
        with pytest.raises(bad.error_type, match=bad.error_regex):
            layer_norm(bad.sample_input.input, *bad.sample_input.args, **bad.sample_input.kwargs)
    assert samples > 20


@gpu
def test_samples_of_pytorchs_own_tests(tmp_path):
    """In a process of its own: PyTorch's test utilities forbid their process to set cuDNN's flags."""
    code = "import test_layernorm_inline; test_layernorm_inline.compare_samples_of_pytorchs_own_tests()"
    done = import_in_subprocess(tmp_path, code, TORCH_EXTENSIONS_DIR=CACHE, PYTHONPATH=os.path.dirname(SOURCE))
    assert done.returncode == 0, done.stderr


# ---- Python API: the module, models ----


@pytest.mark.parametrize(
    "arguments",
    [dict(normalized_shape=5), dict(normalized_shape=(3, 5)), dict(normalized_shape=[5], eps=1e-3),
     dict(normalized_shape=5, elementwise_affine=False), dict(normalized_shape=5, bias=False),
     dict(normalized_shape=torch.Size([5]), dtype=torch.float64), dict(normalized_shape=5, device="meta")],
    ids=str,
)  # fmt: skip
def test_module_parity(arguments):
    if "bias" in arguments and "bias" not in nn.LayerNorm.__init__.__code__.co_varnames:
        pytest.skip("this PyTorch's nn.LayerNorm has no bias argument")
    theirs, ours = nn.LayerNorm(**arguments), ModelNew(**arguments)
    assert isinstance(ours, nn.LayerNorm)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [p.dtype for p in ours.parameters()] == [p.dtype for p in theirs.parameters()]
    if arguments.get("device") == "meta":
        return
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 5, dtype=arguments.get("dtype", torch.float32))
    for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(module(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.float()(x.float()), theirs.float()(x.float()), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_replace_layer_norm(device):
    class Custom(nn.LayerNorm):
        pass

    class Mine(ModelNew):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.LayerNorm(8), Custom(8), Mine(8))).to(
        device
    )
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    parameters, modules = list(model.parameters()), list(model.modules())
    x = torch.randn(4, 8, device=device)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"left subclasses .*: test_layernorm_inline\..*\.Custom \(1\)\.") as warned:
        assert replace_layer_norm(model) is model
    assert len(warned) == 1 and warned[0].filename == __file__
    assert [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)] == [ModelNew, ModelNew, Custom, Mine]
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert all(a is b for a, b in zip(modules, model.modules()))
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)
    assert len(calls) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(replace_layer_norm(nn.LayerNorm(3))) is ModelNew
        assert type(replace_layer_norm(Custom(3), types=Custom)) is ModelNew
        replace_layer_norm(model, types=(nn.LayerNorm, Custom))
        assert [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)] == [ModelNew] * 3 + [Mine]
        with pytest.raises(TypeError, match="subclasses of nn.LayerNorm, but got GroupNorm"):
            replace_layer_norm(model, types=(nn.GroupNorm,))
        torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(not hasattr(torch.backends, "mha"), reason="this PyTorch has no such switch")
def test_the_encoder_layer_of_pytorch():
    """In evaluation PyTorch's own path calls none of its modules, unless that is turned off."""
    encoder = replace_layer_norm(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    calls = []
    x, before = torch.randn(2, 3, 8), torch.backends.mha.get_fastpath_enabled()
    forward = ModelNew.forward
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(ModelNew, "forward", lambda norm, x: calls.append(1) or forward(norm, x))
        for enabled, expected in ((True, 0), (False, 2)):
            torch.backends.mha.set_fastpath_enabled(enabled)
            encoder(x)
            torch.backends.mha.set_fastpath_enabled(before)
            assert len(calls) == expected


@gpu
def test_with_the_rest_of_nn():
    theirs = randomize(nn.LayerNorm(32).cuda())
    ours = replace_layer_norm(copy.deepcopy(theirs))
    x = torch.randn(4, 32, device="cuda")
    expected = theirs(x)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(torch.func.functional_call(ours, dict(theirs.named_parameters()), (x,)), expected)
    calls = []
    for register in (ours.register_forward_hook, ours.register_forward_pre_hook, ours.register_full_backward_hook):
        register(lambda *_: calls.append(1))
    ours(x.clone().requires_grad_()).sum().backward()
    assert len(calls) == 3

    tied = nn.ModuleList([ModelNew(32), ModelNew(32)]).cuda()
    tied[1].weight = tied[0].weight
    tied[1](tied[0](x)).square().sum().backward()
    twice = [nn.functional.layer_norm, layer_norm]
    gradients = []
    for function in twice:
        w = tied[0].weight.detach().clone().requires_grad_()
        function(function(x, (32,), w), (32,), w).square().sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(tied[0].weight.grad, gradients[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrized = copy.deepcopy(theirs)
    parametrized.__class__ = ModelNew
    nn.utils.parametrize.register_parametrization(parametrized, "weight", Double())
    torch.testing.assert_close(parametrized(x) - theirs.bias, 2 * (expected - theirs.bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_torchscript_and_fx(device):
    theirs = randomize(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)))
    ours = replace_layer_norm(copy.deepcopy(theirs)).to(device)
    x = torch.randn(2, 8, device=device, requires_grad=True)
    expected = theirs.to(device)(x)
    graph = torch.fx.symbolic_trace(ours)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [layer_norm] * 2
    for module in (torch.jit.script(ours), torch.jit.trace(ours, x), graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(*(torch.autograd.grad(m(x).sum(), x) for m in (module, theirs)))
    torch.testing.assert_close(torch.jit.script(ours[1])(x), theirs[1](x))


@gpu
def test_meta_device_then_materialized():
    with torch.device("meta"):
        module = ModelNew(24)
    assert module(torch.empty(3, 24, device="meta")).shape == (3, 24)
    module = module.to_empty(device="cuda")
    module.reset_parameters()
    x = torch.randn(3, 24, device="cuda")
    torch.testing.assert_close(module(x), nn.functional.layer_norm(x, (24,)))


def hugging_face(name):
    transformers = package("transformers")
    small = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    ids = dict(input_ids=torch.randint(0, 1000, (2, 40)))
    if name == "BERT":
        return transformers.BertModel(transformers.BertConfig(**small)), ids
    if name == "GPT-2":
        return transformers.GPT2Model(transformers.GPT2Config(n_embd=96, n_layer=2, n_head=4)), ids
    config = transformers.ViTConfig(**small, image_size=64)
    return transformers.ViTModel(config), dict(pixel_values=torch.randn(2, 3, 64, 64))


def torch_vision(name):
    models = package("torchvision").models
    make = models.convnext_tiny if name == "ConvNeXt" else models.swin_t
    return make(num_classes=10), torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT", "ConvNeXt", "Swin"])
def test_real_models(name, device):
    """Each gradient next to its own largest element, and to what PyTorch's float32 is off float64."""
    torch.manual_seed(0)
    model, inputs = (torch_vision if name in ("ConvNeXt", "Swin") else hugging_face)(name)
    theirs = model.to(device).eval()
    ours, exact = replace_layer_norm(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
    replaced = sum(type(m) is ModelNew for m in ours.modules())
    # torchvision's ConvNeXt also has a subclass for channels first, which stays as it is.
    assert replaced >= 2
    results = []
    for network in (exact, theirs, ours):
        dtype = next(network.parameters()).dtype
        if isinstance(inputs, dict):
            given = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
            y = network(**given).last_hidden_state
        else:
            y = network(inputs.to(device, dtype))
        y.square().mean().backward()
        results.append([("output", y.detach())] + [(k, p.grad) for k, p in network.named_parameters()])
    for (key, right), (_, their), (_, mine) in zip(*results):
        if right is None:
            assert mine is None
            continue
        error, allowed = ((t.double() - right).abs().max().item() for t in (mine, their))
        assert error <= 5 * allowed + 1e-5 * right.abs().max().item(), (key, error, allowed)


def test_layer_norm_on_the_cpu():
    x, weight, bias, dy = random_case(4, 6, torch.float64, "both", seed=0, device="cpu")
    for ours, theirs in zip(
        run_case(layer_norm, x, weight, bias, dy), run_case(nn.functional.layer_norm, x, weight, bias, dy)
    ):
        assert torch.equal(ours, theirs)


def test_half_and_double_modules():
    module = ModelNew(8)
    assert module.double().weight.dtype == torch.float64
    assert module.half().weight.dtype == torch.float16
    if HAVE_GPU:
        assert module.cuda()(torch.randn(2, 8, device="cuda", dtype=torch.float16)).dtype == torch.float16


# ---- The file: what KernelBench's static rules and its harness ask for ----


def test_static_rules():
    text = open(SOURCE).read()
    code = "\n".join(line.split("#")[0].split("//")[0] for line in text.split("\n"))
    for pattern in (
        r"\btry\s*:", r"\bexcept\b", r"\bpass\b", r"torch\.nn\.(?!(Module|Parameter|init)\b)", r"\bF\.(conv|linear|relu|gelu|softmax|batch_norm|layer_norm|dropout)",
        r"nn\.functional\.\w+", r"torch\.(layer_norm|gelu|tanh|clamp|conv\w*|linear|mm|matmul)\b", r"import\s+threading",
        r"multiprocessing", r"concurrent\.futures", r"cuda\.Stream\s*\(", r"\.wait_stream|\.record_stream",
        r"__float2half(_rn)?\s*\(", r"\(\s*__half\s*\)\s*[\w]", r"static_cast\s*<\s*(__half|half)\s*>", r"\.half\s*\(",
        r"__file__", r"getsource", r"\.to\s*\(\s*torch\.float16",
    ):  # fmt: skip
        assert not re.search(pattern, code), pattern
    assert "__global__" in code and "load_inline" in code and "threadIdx." in code
    assert text.startswith("# SPDX-License-Identifier: MIT\n")


@pytest.mark.parametrize(
    "function", [layer_norm, ModelNew.forward, replace_layer_norm, ConvTranspose3dLayerNormGELUScaling.forward]
)
def test_types_are_annotated(function):
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    assert {*hints} == {*parameters, "return"} - {"self"}


def readme_blocks(language):
    with open(os.path.join(os.path.dirname(SOURCE), "README.md")) as readme:
        return re.findall(rf"^```{language}\n(.*?)^```", readme.read(), re.S | re.M)


SUBMISSION_34 = "ModelNew = ConvTranspose3dLayerNormGELUScaling\n"  # README's line for problem 34


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("problem", [40, 34])
def test_runs_as_the_harness_runs_it(problem, grad, device):
    """Reference and submission, as texts in one namespace; both models from the same seed."""
    reference, appended, arguments, shape = {
        40: (Model, "", ((4, 6, 8),), (2, 4, 6, 8)),
        34: (Model34, "\n" + SUBMISSION_34, ARGUMENTS_34, (2, 32, 3, 4, 32)),
    }[problem]
    header = "import torch\nimport torch.nn as nn\nbatch_size = 16\nbias = True\neps = 1e-5\nD, H, W = 16, 32, 32\n"
    text = inspect.getsource(reference).replace(reference.__name__, "Model")
    namespace = {}
    exec(compile(header + text, "<reference>", "exec"), namespace)
    exec(compile(open(SOURCE).read() + appended, "<submission>", "exec"), namespace)
    models = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        models.append(namespace[name](*arguments).to(device))
    x = torch.rand(shape, device=device)
    with torch.set_grad_enabled(grad):
        expected, y = (model(x) for model in models)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    assert y.requires_grad == grad
    if problem == 34:  # what the line rebinds is used nowhere else
        norm = namespace["replace_layer_norm"](nn.Sequential(nn.LayerNorm(8)))[0]
        assert norm(torch.rand(3, 8)).shape == (3, 8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_the_code_in_the_readme(device):
    use, submission = readme_blocks("python")
    assert submission == SUBMISSION_34
    if device == "cpu":
        assert use.count("cuda") == 4
        use = use.replace("cuda", "cpu")
    namespace = {}
    exec(use, namespace)
    x, weight, bias, model = (namespace[name] for name in ("x", "weight", "bias", "model"))
    expected = nn.functional.gelu(nn.functional.layer_norm(x, (768,), weight, bias)) * 0.5
    torch.testing.assert_close(namespace["y"], expected)
    assert type(model[0]) is ModelNew and x.device.type == device


def test_runs_inside_the_harness_namespace():
    reserved = (
        "Model get_inputs get_init_inputs batch_size features dim1 dim2 in_channels out_channels D H W kernel_size"
    )
    reserved = dict.fromkeys((reserved + " stride padding bias eps scaling_factor").split(), "reference")
    namespace = dict(reserved)
    exec(compile(open(SOURCE).read(), "<submission>", "exec"), namespace)
    assert {name: namespace[name] for name in reserved} == reserved
    assert namespace["ModelNew"]((3, 4))(torch.randn(2, 3, 4)).shape == (2, 3, 4)


# ---- The script, and the commands of the README ----


def run_script(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("arguments,what", [([], "ModelNew"), (["--problem", "34"], "the model of problem 34")])
def test_the_script_without_a_gpu(arguments, what):
    done = run_script(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing was timed") and f"On the CPU {what}" in done.stdout


@pytest.mark.parametrize("arguments", [["--sweep"], ["--models"]])
def test_the_script_where_only_a_gpu_will_do(arguments):
    done = run_script(*arguments)
    assert done.returncode == 1 and done.stdout.startswith("Nothing was timed"), done.stderr


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--sweep", "--problem", "34"], "exclude each other"),
        (["--models", "--sweep"], "exclude each other"),
        (["--json", "no/such/folder/table.json"], "cannot write to no/such/folder/table.json"),
        (["--plot", "no/such/folder/picture.png"], "cannot write to no/such/folder/picture.png"),
        (["--json", os.path.dirname(os.path.abspath(__file__))], "cannot write to"),
    ],
)
def test_the_script_refuses_at_once(arguments, words):
    done = run_script(*arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_plot_asks_for_matplotlib_at_once(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(sys, "argv", ["test_layernorm_inline.py", "--plot", str(tmp_path / "picture.png")])
    with pytest.raises(SystemExit):
        main()
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_row_of_a_real_model(device, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setitem(globals(), "milliseconds", lambda step, **_: step() or 1.0)
    assert model_row(lambda: pair_stack(6, device))[:2] == (14, 14)


# What the README's commands print is checked on a few small shapes.
@gpu
@pytest.mark.parametrize("option", ["--sweep", "--json", "--plot"])
def test_the_sweep_of_the_readme(option, monkeypatch, tmp_path, capsys):
    if option == "--plot":
        package("matplotlib")
    file = tmp_path / "out"
    few = {"SWEEP_FORWARD": "fp32 bf16", "SWEEP_MISALIGNED": "bf16", "SWEEP_BACKWARD": "fp32", "SWEEP_GELU": "fp16"}
    for name, dtypes in few.items():
        monkeypatch.setitem(globals(), name, [(64, 256, dtypes)])
    monkeypatch.setattr(sys, "argv", ["test_layernorm_inline.py", option] + [str(file)] * (option != "--sweep"))
    assert main() == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"64 x 256 ", out)) == 6 and "host time of a call" in out
    if option == "--json":
        rows = json.loads(file.read_text())["rows"]
        assert len(rows) == 6 and all(row[k] > 0 for row in rows for k in ("floor", "eager", "compile", "ours"))
    elif option == "--plot":
        assert any(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_plot_of_a_table(tmp_path, monkeypatch):
    package("matplotlib")
    monkeypatch.setitem(globals(), "versions", lambda: "a GPU")
    table = [
        dict(what=what, rows=2**26 // cols, cols=cols, dtype=dtype, floor=1.0, eager=4.0, compile=2.0, ours=1.1)
        for what in ("forward", "backward") for dtype in ("fp32", "bf16") for cols in (64, 1024)
    ]  # fmt: skip
    plot(table, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@gpu
@pytest.mark.parametrize("arguments", [[], ["--problem", "34"]])
def test_the_script_of_the_readme(arguments, monkeypatch, capsys):
    monkeypatch.setitem(globals(), "INPUT_34", (2, 32, 2, 4, 32))
    monkeypatch.setitem(globals(), "BATCH_SIZE", 2)
    monkeypatch.setitem(globals(), "MINIMUM_SPEEDUP", 0.0)
    monkeypatch.setattr(sys, "argv", ["test_layernorm_inline.py", *arguments])
    assert main() == 0
    out = capsys.readouterr().out
    assert out.count("Speedup: ") == (8 if arguments else 1) and "FAILED" not in out
    assert torch.cuda.get_device_name() in out


def test_the_commands_of_the_readme_are_the_scripts():
    with open(os.path.join(os.path.dirname(SOURCE), "README.md")) as readme:
        text = readme.read()
    options = set(re.findall(r"test_layernorm_inline\.py\s+(--[a-z]+)", text))
    assert {"--sweep", "--models", "--problem"} <= options
    helped = subprocess.run([sys.executable, __file__, "--help"], capture_output=True, text=True, timeout=600).stdout
    assert all(option in helped for option in options)
    named = set(re.findall(r"`(test_\w+?)(?:_\.\.\.)?`", text)) - {"test_layernorm_inline"}
    files = (__file__, os.path.join(os.path.dirname(SOURCE), ".tests", "test_build.py"))
    tests = "".join(open(file).read() for file in files)
    assert all(f"def {name}" in tests for name in named), "README names a test that is not there"
