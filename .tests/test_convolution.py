"""Tests of ConvTranspose3d, LayerNorm, GELU and scaling in one kernel (problem 34 of KernelBench's level 2).

The kernel runs on Hopper GPUs, for 16 bits and TF32. Otherwise, and for gradients, PyTorch's convolution runs.
"""

import contextlib
import copy
import functools

import emulator
import pytest
import torch
from reference import assert_no_worse, same_bits
from torch import nn

import layernorm_inline
from test_layernorm_inline import ARGUMENTS_34, INPUT_34, Model34, randomize

INPUT_PRECISIONS = {  # "tf32": convolutions may round float32 to TF32
    "tf32": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip
SCALED = (*ARGUMENTS_34, True, 0.1, -0.5)  # eps and scale are far from the values that a kernel might hard-code
MODELS = [
    (SCALED, (2, 32, 3, 5, 32)),  # this and the next four run the fused kernel
    (ARGUMENTS_34, (1, 32, 1, 1, 32)),
    (SCALED, (3, 32, 2, 17, 32)),
    ((32, 64, 4, 2, 1, False, 1e-3, -0.5), (1, 32, 4, 8, 32)),
    ((32, 64, 4, 2, 1, True, 1e-5, 0.0), (1, 32, 2, 2, 32)),
    ((3, 8, 4, 2, 1), (2, 3, 3, 5, 4)),  # this and the next two run PyTorch's convolution
    ((3, 9, 3, 1, 1, False), (2, 3, 3, 5, 9)),
    ((4, 7, (3, 3, 4), (1, 2, 1), (0, 1, 0)), (1, 4, 2, 3, 4)),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
kernels = pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")


@contextlib.contextmanager
def convolutions_in_tf32(allowed):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=INPUT_PRECISIONS)
def precision(request):
    """Returns a dtype, and allows or forbids for the test that convolutions round float32 to TF32."""
    with convolutions_in_tf32(request.param == "tf32"):
        yield INPUT_PRECISIONS[request.param]


def has_same_bits(precision):
    """Returns True if the kernel runs. PyTorch's convolution in full float32 adds in another order in each run."""
    return precision != torch.float32 or torch.backends.cudnn.allow_tf32


def convolution_call(backend, name, gradients=True):
    """Returns a function that runs forward and backward of the fused model."""
    model = backend.Convolution(*SCALED).to(backend.device, INPUT_PRECISIONS[name])
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device, dtype=INPUT_PRECISIONS[name])

    def run():
        with convolutions_in_tf32(name == "tf32"):
            with torch.set_grad_enabled(gradients):
                y = model(x)
            if gradients:
                y.sum().backward()

    return run


def rounded_to_tf32(t):
    """Returns t, rounded like operands of tensor cores. The gradient is that of t."""
    bits = t.detach().view(torch.int32)
    rounded = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
    return t + (rounded - t.detach())  # exact


class ModelInTF32(Model34):
    """The reference on CPUs, where PyTorch's convolution never rounds to TF32 by itself."""

    def forward(self, x):
        conv = self.conv_transpose
        x, weight = rounded_to_tf32(x), rounded_to_tf32(conv.weight)
        y = nn.functional.conv_transpose3d(x, weight, conv.bias, conv.stride, conv.padding)
        return nn.functional.gelu(self.layer_norm(y)) * self.scaling_factor


def models(backend, arguments, dtype=torch.float32, device=None):
    """Returns (reference, fused): PyTorch's modules and the model of layernorm_inline, with the same parameters."""
    torch.manual_seed(0)
    reference = Model34(*arguments)
    torch.manual_seed(0)
    fused = backend.Convolution(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), fused.parameters()))
    randomize(reference.layer_norm)
    fused.load_state_dict(reference.state_dict())
    reference.load_state_dict(fused.state_dict())
    return reference.to(device or backend.device, dtype), fused.to(device or backend.device, dtype)


def results_of(backend, module, x, grad):
    """Returns [output] or, if grad is true, [output, gradient of the input, gradients of all parameters]."""
    leaf = x.to(next(module.parameters()).dtype).requires_grad_(grad)
    with torch.set_grad_enabled(grad), backend.poisoned(device=x.device):
        y = module(leaf)
    if not grad:
        return [y]
    generator = torch.Generator(x.device).manual_seed(1)
    dy = torch.randn(y.shape, device=x.device, generator=generator).to(x.dtype).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]


def check(backend, reference, fused, x, grad):
    """Asserts that the largest error against float64 is at most 1.5 times the reference's, plus a few roundings.

    This is required of the output and of every gradient.
    """
    exact_model = copy.deepcopy(reference).double()
    in_tf32 = x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32 and not backend.is_cuda
    if in_tf32 and fused._in_one_kernel(x):
        reference.__class__ = ModelInTF32
    exact, expected, results = (results_of(backend, module, x, grad) for module in (exact_model, reference, fused))
    assert expected[0].shape == results[0].shape and expected[0].stride() == results[0].stride()
    names = ["output", "input", *(name for name, _ in fused.named_parameters())]
    for name, right, pytorch, result in zip(names, exact, expected, results):
        assert result.dtype == pytorch.dtype == x.dtype
        rounding = max(4 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(x.dtype).eps)
        if right.abs().max() < 1e-6:  # the gradient of the convolution's bias: both results are rounding errors
            assert result.abs().max() <= 6 * pytorch.abs().max() + rounding, name
            continue
        relative_rounding = rounding * max(1, 1 / right.abs().max().item()) if right.any() else rounding
        assert_no_worse(result, pytorch, right, rounding=relative_rounding, name=name)


# ---- Results ----


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "arguments,shape", [MODELS[0], *(pytest.param(*m, marks=pytest.mark.full) for m in MODELS[1:])]
)
def test_conv_values(backend, arguments, shape, grad, precision):
    x = torch.randn(shape, device=backend.device, dtype=precision)
    check(backend, *models(backend, arguments, precision), x, grad)


@pytest.mark.full
@pytest.mark.parametrize("name,gpu,shape", [
    ("cuda", None, (5, 16, 128)), ("emulated", emulator.GPUS["hopper"](4), (2, 1, 5)),
    ("emulated", emulator.GPUS["hopper"](13), (2, 1, 9)), ("emulated", emulator.GPUS["ampere"](4), (1, 1, 2)),
], ids=str)  # fmt: skip
def test_conv_blocks_that_compute_many_lines(backend, name, gpu, shape, precision):
    """Results are accurate, and have the same bits if an emulated GPU runs threads and copies in another order."""
    if backend.name != name:
        pytest.skip(f"this shape is for the backend {name}")
    backend.need_memory(8 << 30)
    batch, depth, height = shape
    x = torch.randn(batch, 32, depth, height, 32, device=backend.device, dtype=precision)
    reference, fused = models(backend, SCALED, precision)
    with backend.on(gpu, seed=1):
        check(backend, reference, fused, x, False)
        first = results_of(backend, fused, x, False)
    with backend.on(gpu, seed=2):
        assert same_bits(first, results_of(backend, fused, x, False)) or not has_same_bits(precision)


@pytest.mark.full
@two_gpus
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_conv_on_a_device_that_is_not_current(backend, precision):
    """The kernel runs on the device of its input, even if another one is current."""
    with torch.cuda.device(0):
        x = torch.randn(2, 32, 3, 4, 32, device="cuda:1", dtype=precision)
        check(backend, *models(backend, SCALED, precision, "cuda:1"), x, False)


@pytest.mark.full
@pytest.mark.parametrize("affine", ["none", "float32"])
def test_conv_op_without_parameters_or_with_float32_parameters(backend, affine, precision):
    """The op, called directly, accepts absent biases and weight, and float32 LayerNorm parameters with 16-bit input."""
    reference, fused = models(backend, SCALED, precision)
    x = torch.randn(1, 32, 2, 4, 32, device=backend.device, dtype=precision)
    conv, norm = fused.conv_transpose, reference.layer_norm
    weight, bias = (None, None) if affine == "none" else (norm.weight.float(), norm.bias.float())
    conv_bias = None if affine == "none" else conv.bias
    with torch.no_grad():
        op = backend.epilogue_ops.conv_transpose3d_layer_norm_gelu
        y = op(x, conv.weight, conv_bias, weight, bias, 0.1, -0.5)
        as_double = [t if t is None else t.double() for t in (x, conv.weight, conv_bias, weight, bias)]
        z = nn.functional.conv_transpose3d(*as_double[:3], stride=2, padding=1)
        exact = -0.5 * nn.functional.gelu(nn.functional.layer_norm(z, (64,), *as_double[3:], 0.1))
    atol = 1e-5 if precision == torch.float32 and not torch.backends.cudnn.allow_tf32 else 2e-2
    torch.testing.assert_close(y.double(), exact, atol=3 * atol if precision == torch.bfloat16 else atol, rtol=atol)


@pytest.mark.full
def test_conv_of_other_layouts_and_batches(backend, precision):
    """The module accepts channels_last input, unaligned input, an empty batch, no batch dimension, and autocast."""
    reference, fused = models(backend, SCALED, precision)
    atol = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(precision, 1e-5)
    if precision == torch.float32 and torch.backends.cudnn.allow_tf32:
        atol = 1e-4 if backend.is_cuda else 2e-3  # PyTorch's convolution on CPUs does not round to TF32
    tolerance = dict(atol=atol, rtol=atol)
    with torch.no_grad():
        flat = torch.randn(2 * 32 * 3 * 4 * 32 + 1, device=backend.device, dtype=precision)
        x = flat[:-1].view(2, 32, 3, 4, 32)
        expected = reference(x)
        off = torch.cat([flat[-1:], flat])[1:-1].view_as(x)  # does not start on a 16-byte boundary
        for other in (x.contiguous(memory_format=torch.channels_last_3d), off):
            torch.testing.assert_close(fused(other), expected, **tolerance)
        assert fused(x[:0]).shape == (0, *expected.shape[1:])
        # Input without a batch dimension runs PyTorch's convolution.
        torch.testing.assert_close(fused(x[0]), expected[0], **tolerance)
        assert torch.equal(fused(x), fused(x)) or not has_same_bits(precision)
        if precision == torch.float32 and backend.is_cuda:  # autocast has other rules for CPUs
            with torch.autocast("cuda", dtype=torch.bfloat16):
                torch.testing.assert_close(fused(x), reference(x), atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(fused(x[:0]).sum(), list(fused.parameters()))
    assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, fused.parameters()))


@pytest.mark.full
def test_conv_output_mask_selects_gradients(backend, precision):
    """Each gradient can be computed alone, and is then close to the one that is computed with all others."""
    _, fused = models(backend, SCALED, precision)
    leaves = [torch.randn(2, 32, 1, 2, 32, device=backend.device, dtype=precision), *fused.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    all_gradients = torch.autograd.grad(fused(leaves[0]).square().sum(), leaves)
    for wanted, expected in zip(leaves, all_gradients):
        for leaf in leaves:
            leaf.requires_grad_(leaf is wanted)
        (grad,) = torch.autograd.grad(fused(leaves[0]).square().sum(), wanted)
        torch.testing.assert_close(grad, expected, atol=1e-3, rtol=1e-3)  # PyTorch's convolution may add in any order


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs cuDNN's convolution of a Hopper GPU",
)
def test_conv_rounds_like_pytorch(backend, precision):
    """The results are within KernelBench's tolerance of PyTorch's.

    A difference of one unit in the last place of a bfloat16 convolution can already exceed that tolerance.
    """
    if precision == torch.float32 and not torch.backends.cudnn.allow_tf32:
        pytest.skip("PyTorch's convolution in full float32 adds in another order")
    torch.manual_seed(0)
    reference, fused = Model34(*ARGUMENTS_34), backend.Convolution(*ARGUMENTS_34)
    fused.load_state_dict(reference.state_dict())
    x = torch.rand(8, *INPUT_34[1:], device="cuda", dtype=precision)
    tolerance = 1e-4 if precision == torch.float32 else 1e-2  # the tolerances of KernelBench
    with torch.no_grad():
        reference, fused = reference.to(x), fused.to(x)
        torch.testing.assert_close(fused(x), reference(x), atol=tolerance, rtol=tolerance)


# ---- NaN, infinity ----

# Bits of float32 numbers: the NaN that arithmetic on a GPU returns, its negation, float("nan"), and both infinities.
NOT_FINITE = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000]


@pytest.mark.full
@pytest.mark.parametrize("where", ["input", "conv_weight", "conv_bias"])
def test_conv_of_nan_is_nan_only_where_the_reference_is(backend, where, precision):
    """The output is NaN where the reference's is, and nowhere else, for each number of NOT_FINITE.

    Each number is placed in another sample of the batch, or in another output channel of a parameter.
    """
    reference, fused = models(backend, SCALED, precision)
    x = torch.randn(6, 32, 1, 1, 32, device=backend.device, dtype=precision)
    numbers = torch.tensor(NOT_FINITE, dtype=torch.int32).view(torch.float32)
    if precision.itemsize == 2:  # bfloat16: the upper halves of the bits
        numbers = numbers.view(torch.bfloat16)[1::2] if precision == torch.bfloat16 else numbers.half()
    with torch.no_grad():
        conv = fused.conv_transpose
        places = {
            "input": x[:5, 3, 0, 0, 7], "conv_weight": conv.weight[3, :50:10, 1, 2, 0], "conv_bias": conv.bias[:50:10]
        }  # fmt: skip
        places[where].copy_(numbers)
        reference.load_state_dict(fused.state_dict())
        expected = reference.double()(x.double()).isnan()
        assert expected.any() and not expected.all()
        assert torch.equal(fused(x).isnan(), expected)


@pytest.mark.full
@pytest.mark.parametrize("where", ["x", "dy", "weight", "bias"])
def test_conv_gradients_are_nan_where_pytorchs_are(backend, where):
    """Gradients are NaN where PyTorch's are, after one element becomes the NaN that arithmetic on a GPU returns."""
    x, dy = (torch.randn(s, device=backend.device) for s in ((2, 32, 1, 1, 32), (2, 64, 2, 2, 64)))
    results = []
    for module in models(backend, SCALED):
        place = {"x": x, "dy": dy}.get(where, getattr(module.conv_transpose, where, None))
        place.detach().view(torch.int32).view(-1)[20] = 0x7FFFFFFF
        for wanted in ([x.requires_grad_(), *module.parameters()], [module.conv_transpose.bias]):
            results.append([g.isnan() for g in torch.autograd.grad(module(x), wanted, dy)])
    expected, expected_bias, actual, actual_bias = results
    assert all(map(torch.equal, expected + expected_bias, actual + actual_bias))
    assert expected[-1].any() and actual_bias[0].any()


# ---- Second derivatives, forward mode, torch.compile, CUDA graphs ----


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_double_backward_is_accurate(backend):
    """First and second derivatives have at most three times PyTorch's error, plus rounding."""
    reference, fused = models(backend, SCALED)
    x, dy = (torch.randn(s, device=backend.device) for s in ((1, 32, 2, 3, 32), (1, 64, 4, 6, 64)))
    results = []
    for module in (copy.deepcopy(reference).double(), reference, fused):
        leaf = x.to(module.conv_transpose.weight.dtype).requires_grad_()
        wanted = [leaf, module.conv_transpose.weight, module.layer_norm.weight, module.layer_norm.bias]
        first = torch.autograd.grad(module(leaf), wanted, dy.to(leaf.dtype), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        results.append([*first, *second])
    for exact, pytorch, result in zip(*results):
        assert_no_worse(result, pytorch, exact, factor=3, rounding=1e-5)


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_forward_mode_matches_pytorch(backend):
    """The forward-mode derivative for a tangent of each parameter is PyTorch's."""
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
    results = []

    def output(module, others, name, p):
        return torch.func.functional_call(module, {**others, name: p}, (x,))

    for module in models(backend, SCALED):
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        for name, p in parameters.items():
            function = functools.partial(output, module, parameters, name)
            results.append(torch.func.jvp(function, (p,), (torch.ones_like(p),))[1])
    half = len(results) // 2
    torch.testing.assert_close(results[half:], results[:half], atol=1e-3, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_conv_compiled_in_one_graph(backend, training, precision):
    _, fused = models(backend, SCALED, precision)
    x = torch.randn(2, 32, 3, 4, 32, device=backend.device, dtype=precision, requires_grad=training)
    compiled = torch.compile(fused, fullgraph=True)
    with torch.set_grad_enabled(training):
        y, expected = compiled(x), fused(x)
    assert torch.equal(y, expected) or not has_same_bits(precision)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    if training:
        wanted = [x, *fused.parameters()]
        gradients = (torch.autograd.grad(out.square().sum(), wanted) for out in (y, expected))
        for compiled_gradient, gradient in zip(*gradients):
            torch.testing.assert_close(compiled_gradient, gradient, atol=1e-3, rtol=1e-3)


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_passes_opcheck(backend):
    _, fused = models(backend, SCALED)
    x = torch.randn(2, 32, 2, 3, 32, device=backend.device, requires_grad=True)
    conv, norm = fused.conv_transpose, fused.layer_norm
    arguments = (x, conv.weight, conv.bias, norm.weight, norm.bias, 1e-5, 0.5)
    op = backend.epilogue_ops.conv_transpose3d_layer_norm_gelu.default
    torch.library.opcheck(op, arguments, atol=1e-3, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_conv_cuda_graph_of_a_training_step(backend, precision):
    """A captured training step, replayed with another input, gives the results of an eager step."""
    _, fused = models(backend, SCALED, precision)
    x = torch.randn(2, 32, 3, 5, 32, device="cuda", dtype=precision)

    def step():
        y = fused(x)
        return [y, *torch.autograd.grad(y.square().mean(), list(fused.parameters()))]

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = step()
    assert torch.equal(replayed[0], expected[0]) or not has_same_bits(precision)
    torch.testing.assert_close(replayed, expected, atol=1e-3, rtol=1e-3)


# ---- Constant rows, hooks, when the kernel runs, errors ----


@pytest.mark.full
@pytest.mark.parametrize("size", [1.0, 100.0])
@convolutions_in_tf32(True)
def test_conv_of_equal_numbers_gives_bias(backend, size):
    """A row of 64 equal sums gives gelu(bias).

    The sums are equal because the input is constant along the width, and only the two middle columns of the weights are
    not 0, and are equal. If each sum were added one by one, float32 outputs would be off by 5e-3.
    """
    model = backend.Convolution(32, 64, 4, 2, 1).to(backend.device)
    with torch.no_grad():
        weight = model.conv_transpose.weight.zero_()
        weight[..., 1:3] = torch.randn(*weight.shape[:-1], 1).to(weight) * 0.05
        model.conv_transpose.bias.zero_()
        model.layer_norm.bias.copy_(torch.randn(64))
        x = (torch.randn(1, 32, 2, 3, 1) * size).expand(-1, -1, -1, -1, 32).contiguous().to(backend.device)
        expected = nn.functional.gelu(model.layer_norm.bias.double())
        assert (model(x).double() - expected).abs().max() < 1e-5


@pytest.mark.full
@convolutions_in_tf32(False)
def test_conv_with_hooks(backend):
    """Hooks and patches of the inner modules run, and change nothing else. A wrong argument raises a TypeError."""
    _, fused = models(backend, SCALED)
    x = torch.randn(1, 32, 2, 3, 32, device=backend.device, requires_grad=True)
    expected, parts = fused(x), (fused.conv_transpose, fused.layer_norm)
    of_one = [getattr(part, f"register_{kind}_hook") for part in parts for kind in ("forward", "full_backward")]
    kinds = ("forward_pre", "forward", "full_backward_pre", "full_backward")
    of_all = [getattr(nn.modules.module, f"register_module_{kind}_hook") for kind in kinds]
    for register in (*of_one, *of_all):
        seen, hook = [], register(lambda module, *_: seen.append(module))
        y = fused(x)
        y.sum().backward()
        hook.remove()
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        assert {*seen} >= ({register.__self__} if register in of_one else {*parts})
    for part in parts:
        for owner in (part, type(part)):
            with pytest.MonkeyPatch.context() as patch:
                seen, original = [], owner.forward
                patch.setattr(owner, "forward", lambda *arguments: seen.append(1) or original(*arguments))
                torch.testing.assert_close(fused(x), expected, atol=1e-4, rtol=1e-4)
            vars(part).pop("forward", None)  # monkeypatch restores the method as an attribute of the instance
            assert seen == [1] and fused._in_one_kernel(x)
    with pytest.raises(TypeError, match="argument 'input'.* not NoneType"):
        fused(None)
    fused.scaling_factor = "2"
    with pytest.raises(TypeError, match="scale to be a number"):
        fused(x)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this PyTorch has one setting for cuDNN")
def test_conv_reads_the_setting_of_convolutions(backend, monkeypatch):
    """The kernel follows cudnn.conv.fp32_precision. Reading cudnn.allow_tf32 raises if RNNs have another setting."""
    reference, fused = models(backend, SCALED)
    x, before = torch.randn(2, 32, 3, 5, 32, device=backend.device), torch.backends.cudnn.conv.fp32_precision
    with torch.no_grad():
        exact, errors = copy.deepcopy(reference).double()(x.double()), {}
        try:
            for precision in ("ieee", "tf32"):
                torch.backends.cudnn.conv.fp32_precision = precision
                errors[precision] = (fused(x) - exact).abs().max().item()
            torch.backends.cudnn.enabled = False  # PyTorch's own convolutions do not use TF32
            errors["without cuDNN"] = (fused(x) - exact).abs().max().item()
        finally:
            torch.backends.cudnn.enabled = True
            torch.backends.cudnn.conv.fp32_precision = before
    assert errors["ieee"] < 1e-5 < errors["tf32"]
    assert errors["without cuDNN"] < 1e-5


def models_without_a_kernel(module_of):
    """Yields seven models that the fused kernel does not support."""
    for changed in (dict(output_padding=(1, 1, 0)), dict(dilation=(2, 1, 1)), dict(groups=2)):
        model, outs = module_of(padding=1), 64 * changed.get("groups", 1)
        dtype = model.conv_transpose.weight.dtype
        model.conv_transpose = nn.ConvTranspose3d(32, outs, 4, 2, 1, dtype=dtype, bias=False, **changed)
        yield model
    for norm in (layernorm_inline.ModelNew((4, 64), elementwise_affine=False), nn.Identity()):
        model = module_of(padding=1)
        model.layer_norm = norm
        yield model
    model = module_of(padding=1)
    model.scaling_factor = torch.tensor(2.0)
    yield model
    yield module_of(padding=0)


@kernels
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_conv_fused_conditions(dtype, grad, restored_settings):
    """The fused kernel runs only for the calls that it supports, and only if no hook would be skipped."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def module_of(padding):
        torch.set_default_dtype(dtype)
        model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, padding)
        torch.set_default_dtype(torch.float32)
        return model

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").uniform_()
        except RuntimeError:  # PyTorch 2.6
            pytest.skip("this PyTorch needs a driver for random numbers on a fake GPU")
    with FakeTensorMode(), torch.device("cuda"), torch.set_grad_enabled(grad):
        model, x = module_of(padding=1), torch.empty(2, 32, 3, 5, 32, dtype=dtype)
        y = model(x)
        assert model._in_one_kernel(x) and (y.shape, y.dtype) == ((2, 64, 6, 10, 64), dtype)
        if grad:
            assert y.grad_fn.name() == "ConvTranspose3dLayerNormGELUBackward"
        for other in (x[:, :, :, :, :31], x[0], x.double()):
            assert not model._in_one_kernel(other)
        for module in (model.conv_transpose, model.layer_norm):
            for register in (module.register_forward_hook, module.register_full_backward_hook):
                hook = register(lambda *_: None)
                assert not model._in_one_kernel(x)
                hook.remove()
        assert model._in_one_kernel(x)
        assert [other._in_one_kernel(x) for other in models_without_a_kernel(module_of)] == [False] * 7


@pytest.mark.parametrize("words,change", [
    ("input of shape \\[\\*, 32, \\*, \\*, 32\\], but got \\[1, 31, 2, 2, 32\\]", dict(input=(1, 31, 2, 2, 32))),
    ("conv_weight of shape .* but got \\[32, 64, 3, 3, 3\\]", dict(conv_weight=(32, 64, 3, 3, 3))),
    ("dtype Float, Half or BFloat16, but got Double", dict(dtype=torch.float64)),
    ("conv_bias of shape \\[64\\], but got \\[63\\]", dict(conv_bias=(63,))),
    ("Expected weight to be of same shape", dict(weight=(63,))),
    ("Expected bias to be of same shape", dict(bias=(65,))),
])  # fmt: skip
@pytest.mark.parametrize("device", ["meta", None])
def test_conv_rejects_bad_arguments(backend, words, change, device):
    shapes = dict(input=(1, 32, 2, 2, 32), conv_weight=(32, 64, 4, 4, 4), conv_bias=(64,), weight=(64,), bias=(64,))
    dtype, device = change.get("dtype", torch.float32), device or backend.device
    tensors = [torch.empty(change.get(k, v), device=device, dtype=dtype) for k, v in shapes.items()]
    with pytest.raises(RuntimeError, match=words):
        backend.epilogue_ops.conv_transpose3d_layer_norm_gelu(*tensors, 1e-5, 1.0)


def test_conv_scaled_by_a_parameter(backend):
    """scaling_factor may be a parameter, which then gets a gradient."""
    model = backend.Convolution(*ARGUMENTS_34).to(backend.device)
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
    y = model(x)
    model.scaling_factor = nn.Parameter(torch.tensor(3.0, device=backend.device))
    tripled = model(x)
    torch.testing.assert_close(tripled, 3 * y, atol=6e-3, rtol=2e-3)  # convolutions may round to TF32
    tripled.sum().backward()
    torch.testing.assert_close(3 * model.scaling_factor.grad, tripled.sum(), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("shape,channels", [((1, 32, 2, 2, 31), 64), ((1, 3, 2, 2, 4), 9)])
def test_conv_rejects_a_width_that_is_not_the_normalized_shape(backend, shape, channels):
    """LayerNorm normalizes the width of the convolution's output, which must be the number of output channels."""
    for module in models(backend, (shape[1], channels, 4, 2, 1)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"normalized_shape=\\[{channels}\\], expected input"):
            module(torch.randn(shape, device=backend.device))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_conv_saves_only_its_input(backend, precision):
    """Forward allocates the output only, where the kernel runs."""
    if precision == torch.float32 and not torch.backends.cudnn.allow_tf32 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel does not run")
    backend.need_memory(4 << 30)
    _, fused = models(backend, SCALED, precision)
    x = torch.randn(32, 32, 8, 32, 32, device="cuda", dtype=precision, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fused(x)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * y.nbytes
