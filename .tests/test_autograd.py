"""Tests of autograd: higher derivatives, vmap, torch.func, forward mode, autocast, and the node in the autograd graph.

Some code of layernorm_inline repeats the formula of layer normalization: the formula composed of PyTorch's operations,
and the batching rule for vmap. The tests of this code use eps = 0.1, because a copy that always used 1e-5 would then
give a clearly wrong result. Weights and biases are random, and have tangents of their own.
"""

import copy
import functools
import threading
import time

import pytest
import torch
from reference import ACTIVATIONS, EPS, assert_no_worse, chain, random_case, run_case
from test_convolution import SCALED, convolutions_in_tf32, models
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from test_layernorm_inline import randomize


def formula(x, weight, bias, activation=None, scale=1.0, eps=EPS):
    """Computes layer normalization over the last dimension from operations that can be differentiated to any order.

    PyTorch's own layer_norm is not used, because its third derivatives are wrong.
    """
    distance = x - x.mean(-1, keepdim=True)
    y = distance * (distance.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (ACTIVATIONS[activation](y) if activation else y) * scale


def derivatives(function, tensors, order):
    """Returns the derivatives of this order, along random directions, of the sum of sin(function(*tensors)).

    With the sine, all second derivatives contribute to the result.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = [t for t in tensors if t is not None]
    total = function(*tensors).sin().sum()
    for i in range(order):
        gradients = torch.autograd.grad(total, leaves, create_graph=i + 1 < order)
        directions = [torch.randn(t.shape, generator=generator).to(t) for t in leaves]
        total = sum((g * d).sum() for g, d in zip(gradients, directions))
    return gradients


def assert_derivatives(function, tensors, highest_order, exact=formula):
    """Asserts that the float32 derivatives of function are close to the float64 derivatives of exact."""
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    for order in range(1, highest_order + 1):
        for actual, expected in zip(derivatives(function, tensors, order), derivatives(exact, doubles, order)):
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 8), pytest.param((2, 5000), marks=pytest.mark.full)])
def test_second_derivatives_are_those_of_the_formula(backend, shape, affine):
    _, weight, bias, _ = random_case(1, shape[-1], torch.float32, affine, device=backend.device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(backend.device).requires_grad_()
    inputs = [x] + [None if t is None else t.requires_grad_() for t in (weight, bias)]

    def function(*tensors):
        return backend.layer_norm(tensors[0], shape[-1:], *tensors[1:], eps=EPS)

    assert_derivatives(function, inputs, 2)


def test_second_derivatives_of_large_float16_gradients_are_finite(backend):
    """The products of two float16 gradients, up to 1e6 here, are computed in float32."""
    generator = torch.Generator().manual_seed(0)
    x, dy, g = (torch.randn(4, 64, generator=generator) * scale for scale in (1000, 1000, 1000))
    results = []
    for dtype, layer_norm in ((torch.float16, backend.layer_norm), (torch.float64, torch.nn.functional.layer_norm)):
        leaf, grad_output, direction = (t.half().to(backend.device, dtype) for t in (x, dy, g))
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(layer_norm(leaf, (64,)), leaf, grad_output, create_graph=True)
        results += torch.autograd.grad(grad, leaf, direction)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-2, atol=1e-3 * results[1].abs().max().item())


@pytest.mark.full
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
def test_third_derivatives_are_those_of_the_formula(backend, activation):
    x, weight, bias, _ = random_case(3, 5, torch.float32, emphasized=False, device=backend.device)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    op = backend.epilogue_ops.layer_norm.default

    def function(x, weight, bias):  # the input of the op depends on another argument, weight
        return op(x * weight, [5], weight, bias, EPS, backend.module._ACTIVATIONS[activation][0], 1.5)

    def exact(x, weight, bias):
        return formula(x * weight, weight, bias, activation, 1.5)

    assert_derivatives(function, inputs, 3, exact)

    def loss(*tensors):
        return function(*tensors).sin().sum()

    inputs = [t.detach() for t in inputs]
    forward_last = torch.func.jacfwd(torch.func.jacrev(loss))(*inputs)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(*inputs), forward_last)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_second_derivatives_with_an_activation_are_those_of_the_formula(backend, activation):
    case = random_case(3, 7, torch.float32, emphasized=False, device=backend.device)
    x, weight, bias, _ = (t.requires_grad_() for t in case)

    def fused(x, weight, bias):
        return backend.layer_norm(x, (7,), weight, bias, EPS, activation=activation, scale=-1.5)

    assert_derivatives(fused, (x, weight, bias), 2, functools.partial(formula, activation=activation, scale=-1.5))
    torch.testing.assert_close(
        torch.func.grad(lambda x: fused(x, weight, bias).sum())(x),
        torch.autograd.grad(fused(x, weight, bias).sum(), x)[0],
    )


@pytest.mark.full
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("rows,cols", [(6, 40), (9, 16384), (20, 20001)])
def test_copy_on_write_tensors_stay_shared(backend, rows, cols, activation):
    """Neither forward nor backward copies a copy-on-write tensor, because they only read it."""
    if not hasattr(torch, "_lazy_clone"):
        pytest.skip("this PyTorch has no copy-on-write tensors")
    case = random_case(rows, cols, torch.float32, "both", seed=0, device=backend.device)
    x, weight, bias, dy = (torch._lazy_clone(t) for t in case)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = backend.layer_norm(x, (cols,), weight, bias, activation=activation)
    torch.autograd.grad(y, leaves, dy)
    assert all(torch._C._is_cow_tensor(t) for t in (*leaves, dy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(backend, dtype):
    """Under autocast, the result is computed in float32, also for 16-bit weights, like nn.LayerNorm on a GPU.

    The expected result is computed without autocast, because PyTorch's autocast has another rule on CPUs.
    """
    x = torch.randn(4, 768, device=backend.device, dtype=dtype, requires_grad=True)
    for affine_dtype in (torch.float32, dtype):
        module = randomize(nn.LayerNorm(768, eps=EPS)).to(backend.device, affine_dtype)
        expected = nn.functional.layer_norm(x.float(), (768,), module.weight.float(), module.bias.float(), EPS)
        with torch.autocast(backend.device, dtype=dtype):
            y = backend.replace_layer_norm(copy.deepcopy(module))(x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected)
        (gradient,), (right,) = (torch.autograd.grad(output.square().sum(), x) for output in (y, expected))
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, right, atol=1e-2, rtol=1e-2)


def test_functional_transforms_agree_with_pytorch(backend):
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    results = []
    for function in (backend.layer_norm, nn.functional.layer_norm):

        def loss(x, weight, bias):
            return (function(x, (8,), weight, bias, EPS) * dy[: x.numel() // 8].view_as(x)).sin().sum()

        results.append([
            torch.func.vmap(lambda row: function(row, (8,), weight, bias, EPS))(x),
            *torch.func.grad(loss, argnums=(0, 1, 2))(x, weight, bias),
            torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None, None))(x, weight, bias),
            torch.func.jvp(lambda x: function(x, (8,), weight, bias, EPS), (x,), (dy,))[1],
            torch.func.jvp(lambda w, b: function(x, (8,), w, b, EPS), (weight, bias), (bias, weight))[1],
            torch.func.jacrev(lambda x: function(x, (8,), weight, bias, EPS))(x[0]),
            torch.func.hessian(lambda x: loss(x, weight, bias))(x[0]),
        ])  # fmt: skip
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.fixture
def no_vmap_fallback():
    """Makes vmap raise an error if an operation has no batching rule. By default it loops over the slices and warns."""
    if not hasattr(torch.library, "register_vmap"):
        pytest.skip("this PyTorch cannot register a batching rule")
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


# The shapes of x, weight and bias, and the dimension of each over which vmap maps. These shapes include that dimension.
MAPPED = [
    ((3, 5, 8), (8,), (8,), (0, None, None)),
    ((5, 3, 8), (8,), None, (1, None, None)),
    ((3, 8), None, None, (0, None, None)),
    ((3, 8), (3, 8), (3, 8), (0, 0, 0)),
    ((5, 8), (3, 8), (8,), (None, 0, None)),
    ((5, 8), (8,), (8, 3), (None, None, 1)),
    ((5, 2, 3, 8), (3, 8), (8, 3), (2, 0, 1)),
    ((5, 4, 3, 2), (4, 2), (4, 3, 2), (2, None, 1)),
    ((4, 2), (3, 4, 2), None, (None, 0, None)),
]


@pytest.mark.full
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.5)])
@pytest.mark.parametrize("outer", ["autograd", "torch.func"])
@pytest.mark.parametrize("x,weight,bias,in_dims", MAPPED)
def test_gradients_of_mapped_gradients_are_those_of_the_formula(
    backend, x, weight, bias, in_dims, outer, activation, scale, no_vmap_fallback
):
    """Gradients of gradients under vmap are those of the formula.

    PyTorch's layer_norm is not the reference, because it is wrong here: its gradients under vmap treat mean and rstd as
    constants.
    """
    dims = (-2, -1) if x[-1] == 2 else (-1,)
    present = [(shape, dim) for shape, dim in zip((x, weight, bias), in_dims) if shape is not None]
    in_dims = tuple(dim for _, dim in present)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(backend.device).requires_grad_() for shape, _ in present]

    def layernorm_inline(x, *affine):
        affine = [next(affine) if shape else None for affine in [iter(affine)] for shape in (weight, bias)]
        return backend.layer_norm(x, x.shape[dims[0] :], *affine, 0.1, activation, scale)

    def exact(x, *affine):
        distance = x - x.mean(dims, keepdim=True)
        y = distance * (distance.square().mean(dims, keepdim=True) + 0.1).rsqrt()
        given = iter(affine)
        y = y * next(given) if weight else y
        y = y + next(given) if bias else y
        return (ACTIVATIONS[activation](y) if activation else y) * scale

    for wanted in {(0,), (len(tensors) - 1,), tuple(range(len(tensors)))}:
        results = []
        doubles = [t.detach().double().requires_grad_() for t in tensors]
        for function, arguments in ((layernorm_inline, tensors), (exact, doubles)):

            def total(*tensors, function=function):
                gradients = torch.func.grad(lambda *t: function(*t).sin().sum(), wanted)
                return sum(gradient.cos().sum() for gradient in torch.vmap(gradients, in_dims)(*tensors))

            if outer == "autograd":
                results.append(torch.autograd.grad(total(*arguments), arguments, allow_unused=True))
            else:
                argnums = tuple(range(len(tensors)))
                results.append(torch.func.grad(total, argnums)(*(t.detach() for t in arguments)))
        for actual, expected in zip(*results):
            if expected is not None:
                atol = 1e-5 * max(1, expected.abs().max().item())
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", 2.0)])
@pytest.mark.parametrize("x,weight,bias,in_dims", MAPPED)
def test_vmap_is_as_accurate_as_pytorch(backend, x, weight, bias, in_dims, activation, scale, dtype, no_vmap_fallback):
    normalized_shape = (4, 2) if x[-1] == 2 else (8,)
    generator = torch.Generator().manual_seed(0)
    present = [(shape, dim) for shape, dim in zip((x, weight, bias), in_dims) if shape is not None]
    tensors = [torch.randn(s, generator=generator).to(backend.device, dtype).requires_grad_() for s, _ in present]
    dims = tuple(dim for _, dim in present)
    ops = backend.ops if activation is None and scale == 1 else backend.epilogue_ops
    op = ops.layer_norm.default

    def with_none(tensors):
        """Returns x, weight and bias, with None for those that this case does not have."""
        given = iter(tensors)
        return [None if shape is None else next(given) for shape in (x, weight, bias)]

    def layernorm_inline(*tensors):
        x, weight, bias = with_none(tensors)
        return op(x, normalized_shape, weight, bias, EPS, backend.module._ACTIVATIONS[activation][0], scale)

    def pytorch(*tensors):
        x, weight, bias = with_none(tensors)
        return chain(x, normalized_shape, weight, bias, EPS, activation, scale)

    actual, theirs = mapped_in_every_way(layernorm_inline, tensors, dims), mapped_in_every_way(pytorch, tensors, dims)
    exact = mapped_in_every_way(pytorch, [t.detach().double().requires_grad_() for t in tensors], dims)
    for result, pytorch_result, right in zip(actual, theirs, exact):
        assert_no_worse(result, pytorch_result, right, rounding=max(2 * torch.finfo(dtype).eps, 1e-5))


def mapped_in_every_way(function, tensors, dims):
    """Returns a list of tensors: function under vmap, gradients outside and inside of vmap, and vmap inside of vmap."""

    def loss(*tensors):
        return function(*tensors).double().sin().sum()

    def mapped_loss(*tensors):
        return torch.vmap(function, dims)(*tensors).double().sin().sum()

    argnums = tuple(range(len(tensors)))
    detached = [t.detach() for t in tensors]
    twice = torch.vmap(lambda *t: torch.vmap(function, dims)(*t), (0,) * len(tensors))
    return [
        torch.vmap(function, dims)(*tensors),
        *torch.autograd.grad(mapped_loss(*tensors), tensors),
        *torch.vmap(torch.func.grad(loss, argnums), dims)(*detached),
        *torch.func.grad(mapped_loss, argnums)(*detached),
        twice(*(torch.stack([t, 2 * t]) for t in detached)),
    ]


class RecordOperations(TorchDispatchMode):
    """Records the names of the operations that run inside of this context, after autograd has dispatched them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["func.grad", "func.grad in func.grad", "create_graph"])
def test_derivatives_of_first_order_run_the_kernels(backend, how):
    """The kernels compute first derivatives, even if these are differentiated again.

    The formula composed of PyTorch's operations would need five times as much time.
    """
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def loss(*tensors):
        return (backend.layer_norm(tensors[0], (8,), *tensors[1:]) * dy).sum()

    with RecordOperations() as operations:
        if how == "create_graph":
            gradients = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        elif how == "func.grad":
            gradients = torch.func.grad(loss, (0, 1, 2))(*leaves)
        else:
            torch.func.grad(lambda *t: torch.func.grad(loss)(*t).sin().sum())(*leaves)
            gradients = None
    assert operations.names.count("layer_norm_forward") == operations.names.count("layer_norm_backward") == 1
    if gradients is not None:
        assert not {"rsqrt", "mean", "native_layer_norm"} & {*operations.names}
        expected = torch.autograd.grad(loss(*leaves), leaves)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected))


def test_vmap_over_backward_agrees_with_pytorch(backend, no_vmap_fallback):
    x, weight, bias, _ = random_case(5, 8, torch.float32, device=backend.device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    gradients = torch.randn(3, 5, 8, dtype=x.dtype, device=backend.device)
    results = []
    op = backend.ops.layer_norm.default
    for function in (op, nn.functional.layer_norm):
        y = function(x, (8,), weight, bias, EPS)
        results.append(torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(gradients))
    torch.testing.assert_close(*results)


def test_vmap_checks_the_shapes_and_dtypes_of_slices(backend, no_vmap_fallback):
    x, weights = torch.zeros(2, 5, device=backend.device), torch.zeros(3, 5, device=backend.device)
    op = backend.ops.layer_norm.default
    for message, call in [
        ("normalized_shape", lambda: torch.vmap(lambda row: op(row, [2, 5], None, None, 1e-5))(x)),
        ("weight", lambda: torch.vmap(lambda w: op(x, [5], w[:1], None, 1e-5))(weights)),
        ("bias", lambda: torch.vmap(lambda b: op(x, [5], None, b[None], 1e-5))(weights)),
        ("dtype|type", lambda: torch.vmap(lambda w: op(x, [5], w.double(), None, 1e-5))(weights)),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_forward_mode_agrees_with_pytorch(backend):
    """Forward mode agrees with PyTorch for tangents of the input, of weight, of bias, and of all three."""
    x, weight, bias, tangent = random_case(6, 8, torch.float32, device=backend.device)
    results = []
    for function in (backend.layer_norm, nn.functional.layer_norm):
        for dual in ("x", "weight", "bias", "x weight bias"):
            with torch.autograd.forward_ad.dual_level():
                tensors = [
                    torch.autograd.forward_ad.make_dual(t, direction) if name in dual.split() else t
                    for name, t, direction in (("x", x, tangent), ("weight", weight, bias), ("bias", bias, weight))
                ]
                y = function(tensors[0], (8,), *tensors[1:], EPS)
                results.append(torch.autograd.forward_ad.unpack_dual(y))
    torch.testing.assert_close(results[4:], results[:4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_over_reverse_agrees_with_pytorch(backend, create_graph):
    """Forward mode through the backward pass agrees with PyTorch if only grad_output has a tangent."""
    forward_ad = torch.autograd.forward_ad
    norm = randomize(nn.LayerNorm(8, eps=EPS).to(backend.device))
    for modules, shape in (
        ((norm, backend.replace_layer_norm(copy.deepcopy(norm))), (6, 8)),
        (models(backend, SCALED), (1, 32, 1, 2, 32)),
    ):
        x, results = torch.randn(shape, device=backend.device, requires_grad=True), []
        with convolutions_in_tf32(False):
            tangent, dy = torch.randn((2, *modules[0](x).shape), device=backend.device)
            for module in modules:
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(dy, tangent)
                    (grad,) = torch.autograd.grad(module(x), x, dual, create_graph=create_graph)
                    results.append(forward_ad.unpack_dual(grad))
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", -0.5)])
def test_float64_runs_pytorchs_operations(backend, activation, scale):
    """For float64, PyTorch's operations compute everything, so all results are equal to PyTorch's, bit for bit.

    This includes derivatives, forward mode, functional transforms and torch.compile.
    """
    x, weight, bias, dy = random_case(6, 8, torch.float64, device=backend.device)
    results = []
    for function in (backend.layer_norm, chain):

        def norm(x, weight=weight, bias=bias, function=function):
            return function(x, (8,), weight, bias, EPS, activation=activation, scale=scale)

        results.append([
            *run_case(lambda *arguments: norm(arguments[0], *arguments[2:4]), x, weight, bias, dy),
            *torch.func.jvp(norm, (x,), (dy,)),
            torch.func.vmap(norm)(x),
            torch.func.hessian(lambda x: norm(x).sin().sum())(x[0]),
        ])  # fmt: skip
        if function is backend.layer_norm:
            compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(*results)) and torch.equal(compiled, results[1][0])
    with torch.device("meta"):
        y = backend.layer_norm(torch.empty(3, 8, dtype=x.dtype), (8,), torch.empty(8, dtype=x.dtype))
    assert y.dtype == x.dtype
    with pytest.raises(NotImplementedError, match="Float, Half or BFloat16, but got Double"):
        backend.ops.layer_norm(x, [8], weight, bias, EPS)


class NoGradient(torch.autograd.Function):
    """A copy whose backward returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_the_node_in_the_autograd_graph(backend):
    """The node of the op in the autograd graph behaves like a node of PyTorch.

    It has a name and inputs. It frees saved tensors and detects changed ones. It supports hooks on saved tensors,
    undefined gradients, and gradients that are not needed.
    """
    norm = randomize(backend.ModelNew(64).to(backend.device))
    x = torch.randn(5, 64, device=backend.device, requires_grad=True)
    y = norm(x)
    assert "LayerNorm" in y.grad_fn.name() and len(y.grad_fn.next_functions) == 4
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
    (only,) = torch.autograd.grad(backend.layer_norm(x.detach(), (64,), norm.weight), [norm.weight], dy)
    assert torch.equal(only, right[1])


def test_backward_raises_if_saved_tensors_were_changed_since(backend):
    """Backward raises an error if a saved tensor has another shape or dtype than in forward.

    A hook that returns a saved tensor with other strides does not change the gradients.
    """

    def set_data(tensor, data):
        tensor.data = data

    for message, change in [
        ("weight of dtype Float .*, but got Half", lambda norm, x: norm.half()),
        ("weight of dtype Float .*, but got Double", lambda norm, x: norm.double()),
        ("bias to be of same shape", lambda norm, x: set_data(norm.bias, norm.bias[:8].detach().clone())),
        ("Float, Half or BFloat16, but got Double", lambda norm, x: set_data(x, x.detach().double())),
        ("expected input with shape", lambda norm, x: set_data(x, x.detach()[0, :8].clone())),
        ("grad_output of shape", lambda norm, x: set_data(x, x.detach()[:3].clone())),
    ]:
        norm, x = backend.ModelNew(64).to(backend.device), torch.randn(5, 64, device=backend.device, requires_grad=True)
        y = norm(x)
        change(norm, x)
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()
    norm, x = backend.ModelNew(64).to(backend.device), torch.randn(5, 64, device=backend.device, requires_grad=True)
    dy = torch.randn(5, 64, device=backend.device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 2 else t):
        y = norm(x)
    assert all(torch.equal(*g) for g in zip(*(torch.autograd.grad(f, [x, norm.weight], dy) for f in (y, norm(x)))))


def test_threads_run_the_backward_of_one_graph_one_after_another(backend):
    """If several threads call backward on one graph, only one thread at a time runs the node, as in PyTorch's nodes."""
    running = []
    most_at_once = 0

    def unpack(tensor):
        nonlocal most_at_once
        running.append(tensor)
        most_at_once = max(most_at_once, len(running))
        time.sleep(0.05)
        running.pop()
        return tensor

    def backward(y, errors):
        try:
            y.sum().backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))

    op = backend.ops.layer_norm.default
    x, weight, bias, _ = (t.requires_grad_() for t in random_case(6, 8, torch.float32, seed=0, device=backend.device))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = op(x, [8], weight, bias, 1e-5)
    errors = []
    threads = [threading.Thread(target=backward, args=(y, errors)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most_at_once == 1
    # The other threads fail only if the first one has already released the saved tensors.
    assert "" in errors and all("second time" in error for error in errors if error)


@pytest.mark.full
def test_a_deep_graph_can_be_freed(backend):
    """Freeing a graph of many nodes does not overflow the stack."""
    x = torch.randn(1, 8, device=backend.device, requires_grad=True)
    for _ in range(50_000 if backend.is_cuda else 2_000):
        x = backend.layer_norm(x, (8,))
    del x  # nodes must be freed one by one; if each node freed the next one recursively, the stack would overflow


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_gradient_accumulation_agree_with_pytorch(backend, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    original = randomize(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()).to(backend.device))
    converted = backend.replace_layer_norm(copy.deepcopy(original))
    batches = [torch.randn(5, 32, device=backend.device, requires_grad=True) for _ in range(3)]
    for x in batches:
        original(x).square().sum().backward()
        checkpoint(converted, x, use_reentrant=use_reentrant).square().sum().backward()
    for a, b in zip(original.parameters(), converted.parameters()):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4)


def test_a_mixed_precision_training_step_agrees_with_pytorch(backend):
    original = randomize(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(backend.device))
    converted = backend.replace_layer_norm(copy.deepcopy(original))
    x = torch.randn(16, 64, device=backend.device)
    gradients = []
    for model in (original, converted):
        with torch.autocast(backend.device, dtype=torch.float16):
            loss = model(x).float().square().mean()
        (loss * 128).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-2)
