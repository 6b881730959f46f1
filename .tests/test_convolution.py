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

# "tf32": convolutions may round float32 to TF32
INPUT_PRECISIONS = dict(tf32=torch.float32, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16)
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
on_cuda = pytest.mark.parametrize("backend", ["cuda"], indirect=True)
on_emulated = pytest.mark.parametrize("backend", [pytest.param("emulated", marks=pytest.mark.emulated)], indirect=True)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
fused_calls = [pytest.param("cuda", name, marks=needs_hopper) for name in ("tf32", "float16", "bfloat16")]
fused_on_cuda = pytest.mark.parametrize("backend,precision", fused_calls, indirect=True)


def has_same_bits(precision):
    """Returns True if the kernel runs. PyTorch's convolution in full float32 adds in another order in each run."""
    return precision != torch.float32 or torch.backends.cudnn.allow_tf32


@contextlib.contextmanager
def convolutions_in_tf32(allowed):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=INPUT_PRECISIONS)
def precision(request, restored_settings):
    """Returns a dtype, and allows or forbids for the test that convolutions round float32 to TF32."""
    torch.backends.cudnn.allow_tf32 = request.param == "tf32"
    return INPUT_PRECISIONS[request.param]


def convolution_call(backend, name, gradients=True):
    """Returns a function that runs forward and backward of the fused model."""
    model = backend.Convolution(*SCALED).to(backend.device, INPUT_PRECISIONS[name])
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device, dtype=INPUT_PRECISIONS[name])

    @convolutions_in_tf32(name == "tf32")
    def run():
        with torch.set_grad_enabled(gradients):
            y = model(x)
        if gradients:
            y.sum().backward()

    return run


def rounded_to_tf32(t):
    scaled = (2**13 + 1) * t  # Veltkamp's splitting: the gradient is that of t
    return scaled - (scaled - t)


class ModelInTF32(Model34):
    """The reference on CPUs, where PyTorch's convolution never rounds to TF32 by itself."""

    def forward(self, x):
        conv = self.conv_transpose
        x, weight = rounded_to_tf32(x), rounded_to_tf32(conv.weight)
        y = nn.functional.conv_transpose3d(x, weight, conv.bias, conv.stride, conv.padding)
        return nn.functional.gelu(self.layer_norm(y)) * self.scaling_factor


def models(backend, arguments, dtype=torch.float32):
    """Returns (reference, fused): PyTorch's modules and the model of layernorm_inline, with the same parameters."""
    torch.manual_seed(0)
    reference = Model34(*arguments)
    torch.manual_seed(0)
    fused = backend.Convolution(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), fused.parameters()))
    randomize(reference.layer_norm)
    fused.load_state_dict(reference.state_dict())
    return reference.to(backend.device, dtype), fused.to(backend.device, dtype)


def results_of(backend, module, x, grad):
    """Returns [output] or, if grad is true, [output, gradient of the input, gradients of all parameters]."""
    leaf = x.to(next(module.parameters()).dtype).requires_grad_(grad)
    with torch.set_grad_enabled(grad), backend.poisoned(device=x.device):
        y = module(leaf)
    if not grad:
        return [y]
    torch.manual_seed(1)
    dy = torch.randn(y.shape, device=x.device).to(x.dtype).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]


def check(backend, reference, fused, x, grad):
    """Asserts that the largest error against float64 is at most 1.5 times the reference's, plus a few roundings."""
    exact_model = copy.deepcopy(reference).double()
    if x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32 and not backend.is_cuda and fused._in_one_kernel(x):
        reference.__class__ = ModelInTF32
    exact, expected, results = (results_of(backend, module, x, grad) for module in (exact_model, reference, fused))
    assert expected[0].shape == results[0].shape and expected[0].stride() == results[0].stride()
    names = ["output", "input", *(name for name, _ in fused.named_parameters())]
    for name, right, pytorch, result in zip(names, exact, expected, results):
        assert result.dtype == pytorch.dtype == x.dtype
        largest = right.abs().max().item()
        factor = 1.5 if largest > 1e-6 else 6  # the gradient of the convolution's bias consists of rounding errors
        rounding = max(4 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(x.dtype).eps) * max(1, largest)
        error, pytorch_error = ((t.double() - right).abs().max().item() for t in (result, pytorch))
        assert error <= factor * pytorch_error + rounding, name


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
    if has_same_bits(precision):
        with backend.on(gpu, seed=2):
            assert same_bits(first, results_of(backend, fused, x, False))


@pytest.mark.full
@two_gpus
@on_cuda
def test_conv_on_a_device_that_is_not_current(backend, precision):
    with torch.cuda.device(0):
        x = torch.randn(2, 32, 3, 4, 32, device="cuda:1", dtype=precision)
        check(backend, *(module.to(x.device) for module in models(backend, SCALED, precision)), x, False)


@pytest.mark.full
def test_conv_op_without_parameters_or_with_float32_parameters(backend, precision):
    """Absent parameters are zeros and ones, and LayerNorm's parameters may be float32 with 16-bit input."""
    _, fused = models(backend, SCALED, precision)
    x = torch.randn(1, 32, 2, 4, 32, device=backend.device, dtype=precision)
    conv_weight, conv_bias, weight, bias = (p.detach() for p in fused.parameters())
    zeros, ones, atol = torch.zeros_like(bias), torch.ones_like(bias), 1e-5 if precision == torch.float32 else 1e-2
    for given, same in (
        ((None, None, None), (zeros, ones, zeros)),
        ((conv_bias, weight.float(), bias.float()), (conv_bias, weight, bias)),
    ):
        op = backend.convolution_ops.conv_transpose3d_layer_norm_gelu
        y, expected = (op(x, conv_weight, *parameters, 0.1, -0.5) for parameters in (given, same))
        torch.testing.assert_close(y, expected, atol=atol, rtol=atol)


@pytest.mark.full
def test_conv_of_other_layouts_and_batches(backend, precision):
    """The module accepts unaligned and channels_last input, an empty batch, no batch dimension, and autocast."""
    reference, fused = models(backend, SCALED, precision)
    atol = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(precision, 1e-5)
    if precision == torch.float32 and torch.backends.cudnn.allow_tf32:
        atol = 1e-4 if backend.is_cuda else 2e-3  # PyTorch's convolution on CPUs does not round to TF32
    with torch.no_grad():
        x = torch.randn(2 * 32 * 3 * 4 * 32 + 1, device=backend.device, dtype=precision)[1:].view(2, 32, 3, 4, 32)
        expected, channels_last = reference(x), x.contiguous(memory_format=torch.channels_last_3d)
        for other, right in ((x, expected), (channels_last, expected), (x[0], expected[0])):
            torch.testing.assert_close(fused(other), right, atol=atol, rtol=atol)
        assert fused(x[:0]).shape == (0, *expected.shape[1:])
        if precision == torch.float32 and backend.is_cuda:  # autocast has other rules for CPUs
            with torch.autocast("cuda", dtype=torch.bfloat16):
                torch.testing.assert_close(fused(x), reference(x), atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(fused(x[:0]).sum(), list(fused.parameters()))
    assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, fused.parameters()))


@pytest.mark.full
def test_conv_output_mask_selects_gradients(backend, precision):
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
@fused_on_cuda
def test_conv_rounds_like_pytorch(backend, precision):
    """The results are within KernelBench's tolerance, which one unit in the last place of the convolution can exceed."""
    torch.manual_seed(0)
    reference, fused = Model34(*ARGUMENTS_34), backend.Convolution(*ARGUMENTS_34)
    fused.load_state_dict(reference.state_dict())
    x = torch.rand(8, *INPUT_34[1:], device="cuda", dtype=precision)
    tolerance = 1e-4 if precision == torch.float32 else 1e-2  # the tolerances of KernelBench
    with torch.no_grad():
        reference, fused = reference.to(x), fused.to(x)
        torch.testing.assert_close(fused(x), reference(x), atol=tolerance, rtol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("where", ["input", "conv_weight", "conv_bias"])
def test_conv_of_nan_is_nan_only_where_the_reference_is(backend, where, precision):
    """Each number that is not finite is in another sample of the batch, or in another output channel of a parameter."""
    reference, fused = models(backend, SCALED, precision)
    x = torch.randn(6, 32, 1, 1, 32, device=backend.device, dtype=precision)
    # The NaN that arithmetic on a GPU returns, its negation, float("nan"), and both infinities.
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    numbers = bits.view(torch.bfloat16)[1::2] if precision == torch.bfloat16 else bits.view(torch.float32).to(precision)
    with torch.no_grad():
        weight, bias = fused.conv_transpose.weight, fused.conv_transpose.bias
        places = dict(input=x[:5, 3, 0, 0, 7], conv_weight=weight[3, :50:10, 1, 2, 0], conv_bias=bias[:50:10])
        places[where].copy_(numbers)
        reference.load_state_dict(fused.state_dict())
        expected = reference.double()(x.double()).isnan()
        assert expected.any() and not expected.all()
        assert torch.equal(fused(x).isnan(), expected)


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_double_backward_is_accurate(backend):
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
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
    results = []
    for module in models(backend, SCALED):
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        for name, p in parameters.items():
            call = functools.partial(torch.func.functional_call, module, args=x)
            results.append(torch.func.jvp(lambda q: call({**parameters, name: q}), (p,), (torch.ones_like(p),))[1])
    torch.testing.assert_close(results[4:], results[:4], atol=1e-3, rtol=1e-3)


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_of_distributed_tensors_runs_pytorchs_operations(backend, mesh):
    tensor = torch.distributed.tensor
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
    results = []
    for model in models(backend, SCALED):
        model = tensor.distribute_module(model, mesh)
        try:
            y = model(tensor.distribute_tensor(x, mesh, [tensor.Replicate()]))
        except RuntimeError as error:  # PyTorch 2.11 has no such convolution with padding and a stride
            results.append(str(error))
            continue
        results.append([t.full_tensor() for t in (y, *torch.autograd.grad(y.sum(), [*model.parameters()]))])
    assert type(results[0]) is type(results[1]), results
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_conv_compiled_in_one_graph(backend, training, precision, tmp_path, monkeypatch):
    # PyTorch's cache does not know the setting of TF32, and would return the graph of the other setting.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
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
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.full
@convolutions_in_tf32(True)
def test_conv_passes_opcheck(backend):
    _, fused = models(backend, SCALED)
    x = torch.randn(2, 32, 2, 3, 32, device=backend.device, requires_grad=True)
    op = backend.convolution_ops.conv_transpose3d_layer_norm_gelu.default
    torch.library.opcheck(op, (x, *fused.parameters(), 1e-5, 0.5), atol=1e-3, rtol=1e-3)


@pytest.mark.full
@on_cuda
def test_conv_cuda_graph_of_a_training_step(backend, precision):
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


@pytest.mark.full
@pytest.mark.parametrize("size", [1.0, 100.0])
@convolutions_in_tf32(True)
def test_conv_of_equal_numbers_gives_bias(backend, size):
    """A row is 64 equal sums, as the input is constant along the width, and only two equal columns of weights are not 0."""
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
    """Hooks and patches of the inner modules run, and change nothing else."""
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


@pytest.mark.full
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this PyTorch has one setting for cuDNN")
def test_conv_reads_the_setting_of_convolutions(backend, restored_settings):
    """The kernel follows cudnn.conv.fp32_precision. Reading cudnn.allow_tf32 raises if RNNs have another setting."""
    reference, fused = models(backend, SCALED)
    x, cudnn, errors = torch.randn(2, 32, 3, 5, 32, device=backend.device), torch.backends.cudnn, []
    exact, before = reference.double()(x.double()), cudnn.conv.fp32_precision
    try:
        for cudnn.conv.fp32_precision, cudnn.enabled in (("ieee", True), ("tf32", True), ("tf32", False)):
            with torch.no_grad():
                errors.append((fused(x) - exact).abs().max().item())
    finally:
        cudnn.conv.fp32_precision = before
    assert errors[0] < 1e-5 < errors[1] and errors[2] < 1e-5  # without cuDNN, PyTorch does not use TF32


@pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_conv_fused_conditions(dtype, grad, restored_settings):
    """The fused kernel runs only for the calls that it supports."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").uniform_()
        except RuntimeError:  # PyTorch 2.6
            pytest.skip("this PyTorch needs a driver for random numbers on a fake GPU")
    torch.set_default_dtype(dtype)
    with FakeTensorMode(), torch.device("cuda"), torch.set_grad_enabled(grad):
        model, x = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(*ARGUMENTS_34), torch.empty(2, 32, 3, 5, 32)
        y = model(x)
        assert model._in_one_kernel(x) and (y.shape, y.dtype) == ((2, 64, 6, 10, 64), dtype)
        if grad:
            assert y.grad_fn.name() == "ConvTranspose3dLayerNormGELUBackward"
        for other in (x[:, :, :, :, :31], x[0], x.double()):
            assert not model._in_one_kernel(other)
        for name, other in (
            ("conv_transpose", nn.ConvTranspose3d(32, 64, 4, 2, 1, output_padding=(1, 1, 0))),
            ("conv_transpose", nn.ConvTranspose3d(32, 64, 4, 2, 1, dilation=(2, 1, 1))),
            ("conv_transpose", nn.ConvTranspose3d(32, 128, 4, 2, 1, groups=2)),
            ("conv_transpose", nn.ConvTranspose3d(32, 64, 4, 2, 0)),
            ("layer_norm", layernorm_inline.ModelNew((4, 64), elementwise_affine=False)),
            ("layer_norm", nn.Identity()),
            ("scaling_factor", torch.tensor(2.0)),
        ):
            original = getattr(model, name)
            setattr(model, name, other)
            assert not model._in_one_kernel(x), other
            setattr(model, name, original)
        assert model._in_one_kernel(x)


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
        backend.convolution_ops.conv_transpose3d_layer_norm_gelu(*tensors, 1e-5, 1.0)


def test_conv_scaled_by_a_parameter(backend):
    model = backend.Convolution(*ARGUMENTS_34).to(backend.device)
    x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
    y = model(x)
    model.scaling_factor = nn.Parameter(torch.tensor(3.0, device=backend.device))
    tripled = model(x)
    torch.testing.assert_close(tripled, 3 * y, atol=6e-3, rtol=2e-3)  # convolutions may round to TF32
    tripled.sum().backward()
    torch.testing.assert_close(3 * model.scaling_factor.grad, tripled.sum(), atol=1e-2, rtol=1e-4)


@pytest.mark.full
@fused_on_cuda
def test_conv_saves_only_its_input(backend, precision):
    backend.need_memory(4 << 30)
    _, fused = models(backend, SCALED, precision)
    x = torch.randn(32, 32, 8, 32, 32, device="cuda", dtype=precision, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fused(x)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * y.nbytes


VMAPPED = {  # name -> in_dims of x and the parameters: of the convolution, then of LayerNorm, weight and bias of each
    "input, dimension 0": (0, None, None, None, None),
    "input, dimension 1": (1, None, None, None, None),
    "input, last dimension": (-1, None, None, None, None),
    "weight of the convolution": (None, 2, None, None, None),
    "LayerNorm's parameters": (None, None, None, 0, 1),
    "everything": (3, 0, 1, 1, 0),
}


@pytest.mark.full
@pytest.mark.parametrize("in_dims", VMAPPED.values(), ids=VMAPPED)
@convolutions_in_tf32(True)
def test_conv_under_vmap(backend, in_dims):
    """torch.vmap gives the results and gradients of a loop over the samples, also around and inside of torch.func.grad."""
    _, fused = models(backend, SCALED)
    op = backend.convolution_ops.conv_transpose3d_layer_norm_gelu
    plain = [torch.randn(2, 32, 1, 2, 32, device=backend.device), *(p.detach() for p in fused.parameters())]
    tensors = [t if d is None else torch.stack([t, t + 0.1, t - 0.2], d) for t, d in zip(plain, in_dims)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    samples = [[t if d is None else t.select(d, i) for t, d in zip(leaves, in_dims)] for i in range(3)]

    def call(*inputs):
        return op(*inputs, 0.1, -0.5)

    def loss(*inputs):
        return call(*inputs).square().sum()

    def close(a, b):
        """Only one of the two may round to TF32. The gradient of the convolution's bias is a sum that cancels to 0."""
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other, atol=0.02 + 0.01 * other.abs().max().item(), rtol=0)

    y, expected = torch.vmap(call, in_dims)(*leaves), torch.stack([call(*sample) for sample in samples])
    close(y, expected)
    dy = torch.randn_like(y)
    gradients, of_loop = (torch.autograd.grad(out, leaves, dy) for out in (y, expected))
    close(gradients, of_loop)
    every = tuple(range(5))
    of_samples = torch.vmap(torch.func.grad(loss, every), in_dims)(*tensors)
    close(
        of_samples, [torch.stack(g) for g in zip(*(torch.autograd.grad(loss(*sample), sample) for sample in samples))]
    )
    of_all = torch.func.grad(lambda *inputs: torch.vmap(loss, in_dims)(*inputs).sum(), every)(*tensors)
    close(of_all, torch.autograd.grad(sum(loss(*sample) for sample in samples), leaves))


class Mapped(nn.Module):
    """A model that a function calls for all samples of x, whose first two dimensions count them."""

    def __init__(self, call, model):
        super().__init__()
        self.call, self.model = call, model

    def forward(self, x):
        return self.call(self.model, x).contiguous()

    def _in_one_kernel(self, x):
        return False


def nested_vmaps(model, x):
    return torch.vmap(torch.vmap(model))(x)


def vmap_of_dimension_1(model, x):
    return torch.vmap(torch.vmap(model), 1, 1)(x)


@pytest.mark.full
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("call", [nested_vmaps, vmap_of_dimension_1])
def test_conv_under_vmap_is_accurate(backend, call, grad, precision):
    """As PyTorch's modules under vmap, through the model and by a call of the op, without PyTorch's slow loop."""
    reference, fused = models(backend, SCALED, precision)
    op = backend.convolution_ops.conv_transpose3d_layer_norm_gelu

    def call_op(model, x):
        return call(lambda x: op(x, *model.parameters(), 0.1, -0.5), x)

    x = torch.randn(2, 3, 1, 32, 1, 2, 32, device=backend.device, dtype=precision)
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        for function in (call, call_op):
            check(backend, Mapped(call, reference), Mapped(function, fused), x, grad)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)
