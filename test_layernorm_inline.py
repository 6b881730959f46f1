# SPDX-License-Identifier: MIT
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.0", "ninja", "setuptools", "cuda-toolkit[nvcc,nvvm,crt,cccl]"]
# ///
"""Verifies layernorm_inline.py against PyTorch, and times both.

    python test_layernorm_inline.py                 KernelBench level 1, problem 40: LayerNorm, 16 rows of 4 million
    python test_layernorm_inline.py --problem 34    level 2, problem 34: ConvTranspose3d, LayerNorm, GELU, scaling
    python test_layernorm_inline.py --json FILE     also writes the times to FILE
    pytest test_layernorm_inline.py                 values, state_dict and errors for small shapes (needs pytest)

verify() says what is asserted. milliseconds() says how times are measured, and milliseconds_of_graphs() how those of
small steps are. The script prints FAILED and the reason, and
its exit status is 1, if a result is wrong, or if a model that runs in one kernel is not 1.2 times as fast as PyTorch.
Without a GPU, nothing is timed: the script verifies the file on the CPU, where PyTorch's own operations run.
"""

import argparse
import functools
import gc
import json
import math
import os
import random
import re
import statistics
import sys
import typing

import torch
from torch import nn

try:
    import layernorm_inline
except Exception as error:  # compiling the kernels failed
    if __name__ != "__main__":
        raise
    print(f"FAILED: {error}")
    sys.exit(1)

from layernorm_inline import LayerNorm, ModelNew, layer_norm, replace_layer_norm

# ---- The two benchmark problems, and a shape of models ----

BATCH_SIZE, FEATURES, DIM1, DIM2 = 16, 64, 256, 256


class Model(nn.Module):
    """The reference of problem 40: one nn.LayerNorm over all but the first dimension."""

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
    """The reference of problem 34: ConvTranspose3d, LayerNorm over the last dimension, GELU and scaling."""

    def __init__(
        self, in_channels, out_channels, kernel_size, stride, padding, bias=True, eps=1e-5, scaling_factor=1.0
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.layer_norm = nn.LayerNorm(out_channels, eps=eps)
        self.scaling_factor = scaling_factor

    def forward(self, x):
        return nn.functional.gelu(self.layer_norm(self.conv_transpose(x))) * self.scaling_factor


INPUT_34, ARGUMENTS_34 = (32, 32, 16, 32, 32), (32, 64, 4, 2, 1)


class Setting(typing.NamedTuple):
    """Two models with the same parameters, an input, and how close their results must be."""

    name: str
    original: nn.Module
    new: nn.Module
    x: torch.Tensor
    atol: float  # tolerances of the output
    rtol: float
    gradient: float  # tolerance of a gradient, relative to its largest element
    shift: float  # added to the input in one trial
    constant: float  # fills one sample of the input in one trial, so that LayerNorm sees equal numbers
    minimum: float = 0.0  # the script fails if the new model is not this many times as fast as the original
    is_small: bool = False  # PyTorch needs longer to launch a step than the GPU needs to run it


def randomize(module):
    """Fills all parameters with random numbers. With the initial 1 and 0, a kernel could ignore weight and bias."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def settings_40(device):
    torch.manual_seed(0)
    shape = get_init_inputs()[0] if device == "cuda" else (8, 16)
    original, new = randomize(Model(shape)).to(device), ModelNew(shape).to(device)
    new.load_state_dict(original.state_dict(), strict=True)
    x = get_inputs()[0].to(device) if device == "cuda" else torch.rand(4, *shape)
    yield Setting("float32", original, new, x, 1e-5, 1e-5, 1e-4, 5.0, 0.5, MINIMUM_SPEEDUP)


def settings_34(device):
    """Yields one setting per precision.

    The tolerances of 16-bit outputs are KernelBench's, because PyTorch rounds after each operation: the last bit of the
    convolution is more than 1e-3 of the output.
    """
    for name, dtype, allow_tf32, atol, gradient in (
        ("float32, TF32 allowed for convolutions (the default)", torch.float32, True, 1e-4, 1e-2),
        ("float32, TF32 off", torch.float32, False, 1e-5, 1e-4),
        ("bfloat16", torch.bfloat16, True, 1e-2, 5e-2),
        ("float16", torch.float16, True, 1e-2, 1e-2),
    ):
        if device == "cpu" and name != "float32, TF32 off":
            continue
        torch.manual_seed(0)
        original = Model34(*ARGUMENTS_34)
        new = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34)
        randomize(original.layer_norm)
        new.load_state_dict(original.state_dict(), strict=True)
        x = torch.rand(INPUT_34 if device == "cuda" else (2, 32, 2, 3, 32), device=device, dtype=dtype)
        torch.backends.cudnn.allow_tf32 = allow_tf32
        rtol = atol if torch.finfo(dtype).bits == 16 else 1e-5  # for 16 bits, KernelBench's tolerance
        # Elsewhere, PyTorch computes the convolution.
        in_one_kernel = (
            device == "cuda" and torch.cuda.get_device_capability() == (9, 0) and name != "float32, TF32 off"
        )
        minimum = MINIMUM_SPEEDUP if in_one_kernel else 0.0
        yield Setting(name, original.to(x), new.to(x), x, atol, rtol, gradient, -0.5, 0.0, minimum)


def setting_of_models(device):
    """Returns a shape that models have. It is timed beside problem 40."""
    options = dict(device=device, dtype=torch.bfloat16)
    original, new = nn.LayerNorm(1024, **options), LayerNorm(1024, **options)
    x = torch.randn(8192, 1024, **options)
    return Setting("8192 x 1024, bfloat16", original, new, x, 1e-2, 1e-2, 1e-2, 1.0, 0.5, is_small=True)


# ---- Verification ----


class Failed(Exception):
    """Raised if the verification fails. The message says in a sentence what differs."""


def trials(setting):
    """Yields pairs (description, input). All inputs differ, so that a remembered output cannot be right."""
    x = setting.x
    yield "the benchmark's input", x
    yield "another random input", torch.rand_like(x)
    yield "ten times a random input", 10 * torch.rand_like(x)
    yield f"a random input plus {setting.shift:g}", torch.rand_like(x) + setting.shift
    yield "normally distributed numbers", torch.randn_like(x)
    constant = torch.rand_like(x)
    constant[0] = setting.constant
    yield "a sample of equal numbers", constant


def poison(like):
    """Fills the memory of the next tensors of this size with NaN, so that elements that are not written are noticed."""
    blocks = [torch.full_like(like, math.nan) for _ in range(2)]
    del blocks


def training_step(model, x, seed):
    """Returns the output, and a dict of the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    y = model(x.to(next(model.parameters()).dtype)).to(x.dtype)
    torch.manual_seed(seed)
    y.backward(torch.randn_like(y))
    gradients = {"the input": x.grad, **{name.split("ln.")[-1]: p.grad for name, p in model.named_parameters()}}
    model.zero_grad(set_to_none=True)
    # LayerNorm subtracts what this bias adds to a row, so its gradient consists of rounding errors.
    gradients.pop("conv_transpose.bias", None)
    return y.detach(), gradients


def compare_outputs(setting, what, output, expected):
    """Returns the largest difference. Raises Failed if it exceeds the tolerances."""
    if output.shape != expected.shape or output.dtype != expected.dtype:
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (output, expected)]
        raise Failed(f"{what}: output is {kinds[0]}, but the original's is {kinds[1]}")
    difference = (output.double() - expected.double()).abs().max().item()
    if not torch.allclose(output, expected, atol=setting.atol, rtol=setting.rtol):
        raise Failed(f"{what}: the output differs by up to {difference:.2e}; atol is {setting.atol:.0e}")
    return difference


def verify(setting):
    """Returns a sentence about the verified results. Raises Failed if a result differs from the original's.

    For six inputs, with and without gradients, the output must be close to the original's (torch.allclose), and so must
    the gradients of the input and of each parameter.
    """
    largest, largest_gradient = 0.0, 0.0
    for count, (what, x) in enumerate(trials(setting)):
        # In float64, because the error of the original of problem 40 is up to 5e-5 if 5 is added to the input.
        exact = setting.original.double() if isinstance(setting.original, Model) else setting.original
        expected, right = training_step(exact, x, seed=count)
        with torch.no_grad():
            poison(expected)
            largest = max(largest, compare_outputs(setting, what, setting.new(x), expected))
        poison(expected)
        output, gradients = training_step(setting.new, x, seed=count)
        largest = max(largest, compare_outputs(setting, f"{what}, in training", output, expected))
        for name, exact in right.items():
            gradient = gradients.get(name)
            if gradient is None:
                raise Failed(f"{what}: there is no gradient of {name}")
            off = ((gradient - exact).double().abs().max() / exact.double().abs().max()).item()
            if not off <= setting.gradient:  # also true for NaN
                allowed = f"of its largest element; {setting.gradient:.0e} is allowed"
                raise Failed(f"{what}: the gradient of {name} differs by up to {off:.2e} {allowed}")
            largest_gradient = max(largest_gradient, off)
    setting.original.to(setting.x)
    compared = f"the output and {len(right)} gradients for {count + 1} inputs"
    differences = f"{largest:.1e}, in a gradient {largest_gradient:.1e} of its largest element"
    return f"Verified ({setting.name}): {compared}. The largest difference is {differences}."


# ---- Timing ----

MINIMUM_SPEEDUP = 1.2
L2_BYTES = 256 << 20  # more than any GPU's L2 cache


def milliseconds(runs, repeats=100, warm_up=5):
    """Returns the median time of each function in the dict `runs`, measured with CUDA events around its call.

    The functions run in rounds, and in each round in another random order, so that none benefits from the GPU's clock
    rate or from the function that ran before it. The L2 cache is overwritten before each call. The time is the GPU's if
    the host launches the function before the overwriting is over, as it does for a kernel or a CUDA graph.
    """
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    for run in runs.values():
        for _ in range(warm_up):
            run()
    events, order = {name: [] for name in runs}, random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            runs[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(begin.elapsed_time(end) for begin, end in pairs) for name, pairs in events.items()}


def captured(run):
    """Returns a function that replays run() from a CUDA graph. The current stream must not be the default stream."""
    for _ in range(3):  # compiles and tunes
        run()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # a finalizer may call CUDA (those of Triton's kernels do), which would end the capture
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    gc.enable()

    def replay(run=run):  # the default argument keeps the tensors alive that the graph reads
        graph.replay()

    return replay


def milliseconds_of_graphs(runs, repeats=100):
    """Returns what milliseconds() returns, with each function replayed from a CUDA graph, so that no host time counts."""
    stream = torch.cuda.Stream()  # the default stream cannot be captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return milliseconds({name: captured(run) for name, run in runs.items()}, repeats)


def time_forward(setting, modes):
    """Returns a dict with the milliseconds of the original, torch.compile, the new model and a device copy of x.

    For torch.compile, it contains the time and the name of the fastest of `modes`.
    """
    torch._dynamo.reset()
    x, copy = setting.x, torch.empty_like(setting.x)
    models = {mode: torch.compile(setting.original, mode=mode) for mode in modes}
    runs = {name: functools.partial(model, x) for name, model in models.items()}
    runs.update(original=functools.partial(setting.original, x), new=functools.partial(setting.new, x))
    runs["copy"] = functools.partial(copy.copy_, x)
    with torch.no_grad():
        times = (milliseconds_of_graphs if setting.is_small else milliseconds)(runs)
    mode = min(modes, key=times.get)
    return {"mode": mode, "compile": times[mode], **{name: times[name] for name in ("original", "new", "copy")}}


def time_training(setting):
    """Returns a dict with the milliseconds of forward and backward of the original, torch.compile and the new model."""
    torch._dynamo.reset()
    with torch.no_grad():
        grad_output = torch.randn_like(setting.original(setting.x))
    x, runs = setting.x.clone().requires_grad_(), {}
    models = {"original": setting.original, "compile": torch.compile(setting.original), "new": setting.new}
    for name, model in models.items():

        def step(model=model):
            torch.autograd.grad(model(x), [x, *model.parameters()], grad_output)

        runs[name] = step
    return (milliseconds_of_graphs if setting.is_small else milliseconds)(runs, repeats=30)


def versions():
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    software = f"torch {torch.__version__}, CUDA {torch.version.cuda}, layernorm_inline {layernorm_inline.__version__}"
    return f"{gpu}, {software}"


def verify_and_time(setting, problem):
    """Prints the verified results and the times. Returns the times. Raises Failed if the speedup is too small."""
    print(verify(setting))
    # The mode "max-autotune" is left out. It uses the same kernels, but its CUDA graphs copy x in every call.
    modes = ("default", "max-autotune-no-cudagraphs") if problem == 40 else ("default",)
    ms, training = time_forward(setting, modes), time_training(setting)
    speedup = ms["original"] / ms["new"]
    print(f"Original time: {ms['original']:.2f} ms, New time: {ms['new']:.3f} ms, Speedup: {speedup:.2f}x")
    print(f"    torch.compile ({ms['mode']}): {ms['compile']:.3f} ms. New is {ms['compile'] / ms['new']:.2f}x as fast.")
    steps = ", ".join(f"{name} {training[name]:.3f} ms" for name in ("original", "compile", "new"))
    print(f"    Forward and backward: {steps}. Speedup: {training['original'] / training['new']:.2f}x")
    if problem == 40:
        # The copy reads the input and writes the output. Weight and bias have the size of one row each.
        floor = ms["copy"] * (1 + 1 / len(setting.x))
        part = f"New runs at {floor / ms['new']:.2f} of copy bandwidth."
        print(f"    A device copy of the same bytes: {floor:.3f} ms. {part}")
    if speedup < setting.minimum:
        raise Failed(f"the speedup is less than {setting.minimum}x")
    return {"setting": setting.name, "forward": ms, "training": training}


def time_models_shape(setting):
    """Prints one line with the times of a shape that models have. Returns the times."""
    times = {"forward": time_forward(setting, ("default",)), "training": time_training(setting)}
    parts = []
    for what, ms in zip(("forward", "forward and backward"), times.values()):
        parts.append(what + " " + ", ".join(f"{name} {ms[name]:.3f} ms" for name in ("original", "compile", "new")))
    print(f"LayerNorm of {setting.name}, replayed from CUDA graphs: {'; '.join(parts)}")
    return {"setting": setting.name, **times}


# ---- The script ----


def broken_driver():
    """Returns the reason why the GPU cannot be used, or "" if it can, or if there is none."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        none_there = "Found no NVIDIA driver" in str(error) or "No CUDA GPUs are available" in str(error)
        return "" if none_there else str(error)
    return "torch.cuda.is_available() is False, though CUDA starts"


def run(problem, file=None):
    """Verifies and times a problem, and writes the times to `file` as JSON. Returns the exit status of the script."""
    if reason := broken_driver():
        print(f"FAILED: the GPU cannot be used: {reason}")
        return 1
    if layernorm_inline._is_disabled:
        print(f"FAILED: {layernorm_inline._why_not}, so that PyTorch would be compared with itself")
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        built = "were built" if layernorm_inline._ops else f"were not built: {layernorm_inline._why_not}"
        print(f"Nothing was timed, because there is no CUDA GPU. The kernels {built}.")
    results = []
    try:
        for setting in (settings_34 if problem == 34 else settings_40)(device):
            if device == "cpu":
                print(f"On the CPU, with PyTorch's own operations: {verify(setting)}")
            else:
                results.append(verify_and_time(setting, problem))
        if problem == 40 and device == "cuda":
            results.append(time_models_shape(setting_of_models(device)))
    except (Failed, RuntimeError, OSError) as error:  # load_state_dict, kernels and builds raise the last two
        print(f"FAILED: {error}")
        return 1
    print(versions())
    if file:
        with open(file, "w") as output:
            json.dump({"problem": problem, "versions": versions(), "results": results}, output, indent=1)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problem", type=int, choices=(40, 34), default=40, help="KernelBench's number (default: 40)")
    parser.add_argument("--json", metavar="FILE", help="write the times as JSON")
    arguments = parser.parse_args()
    if arguments.json:  # checked before the measurement, which needs a minute
        folder = os.path.dirname(os.path.abspath(arguments.json))
        if not os.access(folder, os.W_OK) or os.path.isdir(arguments.json):
            parser.error(f"cannot write to {arguments.json}")
    return run(arguments.problem, arguments.json)


# ---- Tests ----

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 7), (5, 64), (513, 100), (64, 768), (300, 1000), (40, 2041), (33, 4096), (9, 3, 32, 64), (7, 20001)]
SHAPES += [(200, 16384), (3, 262144), (4, 2200004)]
PARAMETERS = {  # of the tests
    "shape": SHAPES,
    "dtype": [torch.float32, torch.float16, torch.bfloat16, torch.float64],
    "options": [{}, {"eps": 0.1}, {"elementwise_affine": False}, {"dtype": torch.float64}],
    "activation": [None, "gelu", "gelu_tanh"],
    "problem": [40, 34],
}


def pytest_generate_tests(metafunc):  # pytest calls it, so that the script does not need pytest
    for name, values in PARAMETERS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=str)


def setup_function():
    torch.manual_seed(0)


def results_of(function, tensors, grad_output, dtype):
    """Returns the output and the gradients of a layer norm function in this precision, converted to float64."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    y = function(leaves[0], leaves[0].shape[1:], *leaves[1:], 1e-5)
    return [t.double() for t in (y, *torch.autograd.grad(y, leaves, grad_output.to(dtype)))]


def test_values_are_as_accurate_as_pytorchs(shape, dtype):
    """Output and gradients are about as close to float64 as those of nn.functional.layer_norm."""
    x, weight, bias = (torch.randn(s, device=DEVICE).to(dtype).double() for s in (shape, shape[1:], shape[1:]))
    tensors, grad_output = (x + 1, weight, bias), torch.randn(shape, device=DEVICE).to(dtype)
    reference = nn.functional.layer_norm
    exact = results_of(reference, tensors, grad_output, torch.float64)
    pytorch, new = (results_of(f, tensors, grad_output, dtype) for f in (reference, layer_norm))
    for name, right, pytorch_result, result in zip(("output", "input", "weight", "bias"), exact, pytorch, new):
        error, pytorch_error = ((t - right).abs().max().item() for t in (result, pytorch_result))
        unit = torch.finfo(dtype).eps * right.abs().max().item()
        assert error <= 2 * pytorch_error + 4 * unit, f"{name}: off by {error:.2e}, PyTorch by {pytorch_error:.2e}"


def test_state_dict_can_be_exchanged_with_nn_layer_norm(options):
    original = randomize(nn.LayerNorm((3, 8), device=DEVICE, **options))
    new = LayerNorm((3, 8), device=DEVICE, **options)
    new.load_state_dict(original.state_dict(), strict=True)
    original.load_state_dict(new.state_dict(), strict=True)
    x = torch.randn(5, 3, 8, device=DEVICE, dtype=options.get("dtype"))
    assert repr(new) == repr(original)
    torch.testing.assert_close(new(x), original(x))
    assert type(replace_layer_norm(nn.Sequential(original))[0]) is LayerNorm
    torch.testing.assert_close(original(x), new(x), rtol=0, atol=0)


def test_wrong_arguments_raise_errors():
    x = torch.zeros(2, 5, device=DEVICE)
    for error, message, call in (
        (RuntimeError, "normalized_shape", lambda: layer_norm(x, (4,))),
        (RuntimeError, "weight", lambda: layer_norm(x, (5,), x[0, :4])),
        (RuntimeError, "not implemented|Long", lambda: layer_norm(x.long(), (5,))),
        (TypeError, "normalized_shape", lambda: layer_norm(x, 5)),
        (ValueError, "activation", lambda: layer_norm(x, (5,), activation="relu")),
    ):
        try:
            call()
        except error as raised:
            assert re.search(message, str(raised))
        else:
            raise AssertionError(f"there was no {error.__name__}")
    assert (layer_norm(x, (5,)) == 0).all()


def test_activation_and_scale_agree_with_pytorch(activation):
    x, weight, bias = (torch.randn(s, device=DEVICE) for s in ((200, 768), (768,), (768,)))
    expected = nn.functional.layer_norm(x, (768,), weight, bias)
    if activation:
        expected = nn.functional.gelu(expected, approximate="none" if activation == "gelu" else "tanh")
    y = layer_norm(x, (768,), weight, bias, activation=activation, scale=-1.5)
    torch.testing.assert_close(y, -1.5 * expected, atol=2e-6, rtol=1e-5)


def test_verification_of_the_benchmark_problems_succeeds(problem, monkeypatch):
    """The script's verification succeeds for small inputs."""
    small = dict(BATCH_SIZE=2, FEATURES=4, DIM1=8, DIM2=16, INPUT_34=(2, 32, 2, 4, 32))
    for name, value in small.items():
        monkeypatch.setitem(globals(), name, value)
    # settings_34 changes this flag. Setting it here makes monkeypatch restore it after the test.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    lines = [verify(setting) for setting in (settings_34 if problem == 34 else settings_40)(DEVICE)]
    assert lines and all(line.startswith("Verified") and "for 6 inputs" in line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
