"""Gradients of gradients, vmap, torch.func, forward mode, autocast, hooks on saved tensors, the node in the graph.

eps is 0.1 wherever a formula is written again (composed of PyTorch's operations, or as vmap's rule), so that one that
has 1e-5 built in is far off; weights and biases are random, with tangents of their own.
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
    """Over the last dimension, of operations that PyTorch differentiates to any order (its layer norm's third are wrong)."""
    distance = x - x.mean(-1, keepdim=True)
    y = distance * (distance.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (ACTIVATIONS[activation](y) if activation else y) * scale


def derivatives(function, tensors, order):
    """Of the order given, along random directions, of a sum in which all second derivatives count."""
    generator = torch.Generator().manual_seed(0)
    leaves = [t for t in tensors if t is not None]
    total = function(*tensors).sin().sum()
    for i in range(order):
        gradients = torch.autograd.grad(total, leaves, create_graph=i + 1 < order)
        directions = [torch.randn(t.shape, generator=generator).to(t) for t in leaves]
        total = sum((g * d).sum() for g, d in zip(gradients, directions))
    return gradients


def assert_derivatives(function, tensors, most, exact=formula):
    """Those of function, of float32, are the formula's in float64."""
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    for order in range(1, most + 1):
        for mine, right in zip(derivatives(function, tensors, order), derivatives(exact, doubles, order)):
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 8), pytest.param((2, 5000), marks=pytest.mark.full)])
def test_second_derivatives(backend, shape, affine):
    _, weight, bias, _ = random_case(1, shape[-1], torch.float32, affine, device=backend.device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(backend.device).requires_grad_()
    inputs = [x] + [None if t is None else t.requires_grad_() for t in (weight, bias)]

    def function(*tensors):
        return backend.layer_norm(tensors[0], shape[-1:], *tensors[1:], eps=EPS)

    assert_derivatives(function, inputs, 2)


@pytest.mark.full
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
def test_third_derivatives(backend, activation):
    x, weight, bias, _ = random_case(3, 5, torch.float32, telling=False, device=backend.device)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    op = backend.epilogue_ops.layer_norm.default

    def function(x, weight, bias):  # of the op, one input is computed from another
        return op(x * weight, [5], weight, bias, EPS, backend.module._ACTIVATION_NUMBERS[activation], 1.5)

    def exact(x, weight, bias):
        return formula(x * weight, weight, bias, activation, 1.5)

    assert_derivatives(function, inputs, 3, exact)

    def loss(*tensors):
        return function(*tensors).sin().sum()

    inputs = [t.detach() for t in inputs]
    forward_last = torch.func.jacfwd(torch.func.jacrev(loss))(*inputs)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(*inputs), forward_last)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_second_derivatives_of_an_activation(backend, activation):
    case = random_case(3, 7, torch.float32, telling=False, device=backend.device)
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
    if not hasattr(torch, "_lazy_clone"):
        pytest.skip("this PyTorch has no copy-on-write tensors")
    case = random_case(rows, cols, torch.float32, "both", seed=0, device=backend.device)
    x, weight, bias, dy = (torch._lazy_clone(t) for t in case)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = backend.layer_norm(x, (cols,), weight, bias, activation=activation)
    torch.autograd.grad(y, leaves, dy)
    assert all(torch._C._is_cow_tensor(t) for t in (*leaves, dy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(backend, dtype):
    """Computed in float32, as nn.LayerNorm on a GPU, also from weights of 16 bits. (On CPUs PyTorch has another rule.)"""
    x = torch.randn(4, 768, device=backend.device, dtype=dtype, requires_grad=True)
    for affine_dtype in (torch.float32, dtype):
        module = randomize(nn.LayerNorm(768, eps=EPS)).to(backend.device, affine_dtype)
        expected = nn.functional.layer_norm(x.float(), (768,), module.weight.float(), module.bias.float(), EPS)
        with torch.autocast(backend.device, dtype=dtype):
            y = backend.replace_layer_norm(copy.deepcopy(module))(x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected)
        (mine,), (right,) = (torch.autograd.grad(output.square().sum(), x) for output in (y, expected))
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, right, atol=1e-2, rtol=1e-2)


def test_functional_transforms(backend):
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
    """vmap raises where an operation has no batching rule; else it loops over the slices and warns."""
    if not hasattr(torch.library, "register_vmap"):
        pytest.skip("this PyTorch cannot register a batching rule")
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


# Shapes of x, weight and bias, and the dimension of each that vmap maps over.
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
def test_gradients_of_mapped_gradients(backend, x, weight, bias, in_dims, outer, activation, scale, no_vmap_fallback):
    """PyTorch's layer_norm is wrong here: under vmap its gradients treat mean and rstd as constants."""
    dims = (-2, -1) if x[-1] == 2 else (-1,)
    there = [(t, d) for t, d in zip((x, weight, bias), in_dims) if t is not None]
    in_dims = tuple(d for _, d in there)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(t, generator=generator).to(backend.device).requires_grad_() for t, _ in there]

    def ours(x, *affine):
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
        for function, numbers in ((ours, tensors), (exact, [t.detach().double().requires_grad_() for t in tensors])):

            def total(*tensors, function=function):
                gradients = torch.func.grad(lambda *t: function(*t).sin().sum(), wanted)
                return sum(gradient.cos().sum() for gradient in torch.vmap(gradients, in_dims)(*tensors))

            every = tuple(range(len(tensors)))
            if outer == "autograd":
                results.append(torch.autograd.grad(total(*numbers), numbers, allow_unused=True))
            else:
                results.append(torch.func.grad(total, every)(*(t.detach() for t in numbers)))
        for mine, right in zip(*results):
            if right is not None:
                atol = 1e-5 * max(1, right.abs().max().item())
                torch.testing.assert_close(mine.double(), right, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", 2.0)])
@pytest.mark.parametrize("x,weight,bias,in_dims", MAPPED)
def test_vmap(backend, x, weight, bias, in_dims, activation, scale, dtype, no_vmap_fallback):
    normalized_shape = (4, 2) if x[-1] == 2 else (8,)
    generator = torch.Generator().manual_seed(0)
    there = [(t, d) for t, d in zip((x, weight, bias), in_dims) if t is not None]
    tensors = [torch.randn(t, generator=generator).to(backend.device, dtype).requires_grad_() for t, _ in there]
    dims = tuple(d for _, d in there)
    ops = backend.ops if activation is None and scale == 1 else backend.epilogue_ops
    op = ops.layer_norm.default

    def parts(of_three):  # those that are absent are None
        given = iter(of_three)
        return [None if t is None else next(given) for t in (x, weight, bias)]

    def ours(*tensors):
        x, weight, bias = parts(tensors)
        return op(x, normalized_shape, weight, bias, EPS, backend.module._ACTIVATION_NUMBERS[activation], scale)

    def pytorch(*tensors):
        x, weight, bias = parts(tensors)
        return chain(x, normalized_shape, weight, bias, EPS, activation, scale)

    mine, theirs = mapped_in_every_way(ours, tensors, dims), mapped_in_every_way(pytorch, tensors, dims)
    exact = mapped_in_every_way(pytorch, [t.detach().double().requires_grad_() for t in tensors], dims)
    for our, their, right in zip(mine, theirs, exact):
        assert_no_worse(our, their, right, rounding=max(2 * torch.finfo(dtype).eps, 1e-5))


def mapped_in_every_way(function, tensors, dims):
    """A list of tensors: function under vmap, gradients of that and in that, vmap in vmap."""

    def loss(*tensors):
        return function(*tensors).double().sin().sum()

    def mapped_loss(*tensors):
        return torch.vmap(function, dims)(*tensors).double().sin().sum()

    every = tuple(range(len(tensors)))
    detached = [t.detach() for t in tensors]
    twice = torch.vmap(lambda *t: torch.vmap(function, dims)(*t), (0,) * len(tensors))
    return [
        torch.vmap(function, dims)(*tensors),
        *torch.autograd.grad(mapped_loss(*tensors), tensors),
        *torch.vmap(torch.func.grad(loss, every), dims)(*detached),
        *torch.func.grad(mapped_loss, every)(*detached),
        twice(*(torch.stack([t, 2 * t]) for t in detached)),
    ]


class Operations(TorchDispatchMode):
    """The names of operations that run inside, from below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["func.grad", "func.grad in func.grad", "create_graph"])
def test_derivatives_of_the_first_order_are_the_kernels(backend, how):
    """Also where they are differentiated again: composed of PyTorch's operations they would cost five times as much."""
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def loss(*tensors):
        return (backend.layer_norm(tensors[0], (8,), *tensors[1:]) * dy).sum()

    with Operations() as operations:
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


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_second_derivatives_of_many_rows(backend, dtype):
    """Rows are treated in several parts (as all are on emulated GPUs). Memory stays below twice nn.LayerNorm's."""
    x, weight, _, dy = random_case(5000, 2048, dtype, telling=False, device=backend.device)
    leaves, peaks, results = [t.requires_grad_() for t in (x, weight)], [], []
    for function in (backend.layer_norm, nn.functional.layer_norm):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (gradient,) = torch.autograd.grad(function(x, (2048,), weight), x, dy, create_graph=True)
        results.append(torch.autograd.grad((gradient.float() ** 2).sum(), leaves))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del gradient
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    (gradient,) = torch.autograd.grad(
        formula(doubles[0], doubles[1], None, eps=1e-5), doubles[0], dy.double(), create_graph=True
    )
    for mine, theirs, exact in zip(*results, torch.autograd.grad(gradient.square().sum(), doubles)):
        assert_no_worse(mine, theirs, exact, rounding=2 * torch.finfo(dtype).eps)
    assert peaks[0] < 1.2 * peaks[1]


def test_vmap_over_backward(backend, no_vmap_fallback):
    x, weight, bias, _ = random_case(5, 8, torch.float32, device=backend.device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    gradients = torch.randn(3, 5, 8, dtype=x.dtype, device=backend.device)
    results = []
    op = backend.ops.layer_norm.default
    for function in (op, nn.functional.layer_norm):
        y = function(x, (8,), weight, bias, EPS)
        results.append(torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(gradients))
    torch.testing.assert_close(*results)


def test_vmap_checks_the_slices(backend, no_vmap_fallback):
    x, weights = torch.zeros(2, 5, device=backend.device), torch.zeros(3, 5, device=backend.device)
    op = backend.ops.layer_norm.default
    for words, call in [
        ("normalized_shape", lambda: torch.vmap(lambda row: op(row, [2, 5], None, None, 1e-5))(x)),
        ("weight", lambda: torch.vmap(lambda w: op(x, [5], w[:1], None, 1e-5))(weights)),
        ("bias", lambda: torch.vmap(lambda b: op(x, [5], None, b[None], 1e-5))(weights)),
        ("dtype|type", lambda: torch.vmap(lambda w: op(x, [5], w.double(), None, 1e-5))(weights)),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call()


def test_forward_mode(backend):
    """Tangents of the input, of weight, of bias, and of all."""
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
def test_forward_over_reverse(backend, create_graph):
    """A tangent that comes in with grad_output alone."""
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
def test_float64_is_pytorchs(backend, activation, scale):
    """Results, derivatives, forward mode, transforms, torch.compile: by PyTorch's own operations, to the bit."""
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
        assert (
            backend.layer_norm(torch.empty(3, 8, dtype=x.dtype), (8,), torch.empty(8, dtype=x.dtype)).dtype == x.dtype
        )
    with pytest.raises(NotImplementedError, match="Float, Half or BFloat16, but got Double"):
        backend.ops.layer_norm(x, [8], weight, bias, EPS)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_the_node_in_the_graph(backend):
    norm, x = (
        randomize(backend.ModelNew(64).to(backend.device)),
        torch.randn(5, 64, device=backend.device, requires_grad=True),
    )
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
    (only,) = torch.autograd.grad(backend.layer_norm(x.detach(), (64,), norm.weight), [norm.weight], dy)
    assert torch.equal(only, right[1])


def test_backward_of_what_has_changed_since(backend):
    def change(t, to):
        t.data = to

    for words, do in [
        ("weight of dtype Float .*, but got Half", lambda norm, x: norm.half()),
        ("weight of dtype Float .*, but got Double", lambda norm, x: norm.double()),
        ("bias to be of same shape", lambda norm, x: change(norm.bias, norm.bias[:8].detach().clone())),
        ("Float, Half or BFloat16, but got Double", lambda norm, x: change(x, x.detach().double())),
        ("expected input with shape", lambda norm, x: change(x, x.detach()[0, :8].clone())),
        ("grad_output of shape", lambda norm, x: change(x, x.detach()[:3].clone())),
    ]:
        norm, x = backend.ModelNew(64).to(backend.device), torch.randn(5, 64, device=backend.device, requires_grad=True)
        y = norm(x)
        do(norm, x)
        with pytest.raises(RuntimeError, match=words):
            y.sum().backward()
    norm, x, dy = (
        backend.ModelNew(64).to(backend.device),
        torch.randn(5, 64, device=backend.device, requires_grad=True),
        torch.randn(5, 64, device=backend.device),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 2 else t):
        y = norm(x)
    assert all(torch.equal(*g) for g in zip(*(torch.autograd.grad(f, [x, norm.weight], dy) for f in (y, norm(x)))))


def test_threads_in_backward_over_one_graph(backend):
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

    op = backend.ops.layer_norm.default
    x, weight, bias, _ = (t.requires_grad_() for t in random_case(6, 8, torch.float32, seed=0, device=backend.device))
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


@pytest.mark.full
def test_a_deep_graph_can_be_freed(backend):
    x = torch.randn(1, 8, device=backend.device, requires_grad=True)
    for _ in range(50_000 if backend.is_cuda else 2_000):
        x = backend.layer_norm(x, (8,))
    del x  # node by node: each freed from within the last one, they would fill the stack


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_gradient_accumulation(backend, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    theirs = randomize(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()).to(backend.device))
    ours = backend.replace_layer_norm(copy.deepcopy(theirs))
    batches = [torch.randn(5, 32, device=backend.device, requires_grad=True) for _ in range(3)]
    for x in batches:
        theirs(x).square().sum().backward()
        checkpoint(ours, x, use_reentrant=use_reentrant).square().sum().backward()
    for a, b in zip(theirs.parameters(), ours.parameters()):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4)


def test_mixed_precision_training_step(backend):
    theirs = randomize(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(backend.device))
    ours = backend.replace_layer_norm(copy.deepcopy(theirs))
    x = torch.randn(16, 64, device=backend.device)
    gradients = []
    for model in (theirs, ours):
        with torch.autocast(backend.device, dtype=torch.float16):
            loss = model(x).float().square().mean()
        (loss * 128).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-2)
