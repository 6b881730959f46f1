"""Tests of autograd: higher derivatives, vmap, torch.func, forward mode, autocast, and the node of the graph."""

import concurrent.futures
import copy
import functools
import time

import pytest
import torch
from reference import EPS, assert_no_worse, chain, formula, random_case, run_case, same_bits
from test_convolution import SCALED, convolutions_in_tf32, models
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from test_layernorm_inline import randomize


def derivatives(function, tensors, order):
    """Returns the derivatives of this order, along random directions, of the sum of sin(function(*tensors))."""
    generator = torch.Generator().manual_seed(0)
    leaves = [t for t in tensors if t is not None]
    total = function(*tensors).sin().sum()
    for i in range(order):
        gradients = torch.autograd.grad(total, leaves, create_graph=i + 1 < order)
        directions = [torch.randn(t.shape, generator=generator).to(t) for t in leaves]
        total = sum((g * d).sum() for g, d in zip(gradients, directions))
    return gradients


def assert_derivatives(function, exact, tensors, highest_order):
    """Asserts that the float32 derivatives of function are close to the float64 derivatives of exact."""
    tensors, doubles = (
        [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
        for dtype in (torch.float32, torch.float64)
    )
    for order in range(1, highest_order + 1):
        for actual, expected in zip(derivatives(function, tensors, order), derivatives(exact, doubles, order)):
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("affine,activation,scale", [
    ("both", None, 1.0), ("weight", None, 1.0), ("bias", None, 1.0), ("none", None, 1.0),
    ("both", "gelu", -1.5), ("both", "gelu_tanh", -1.5),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 8), pytest.param((2, 5000), marks=pytest.mark.full)])
def test_second_derivatives_are_those_of_the_formula(backend, shape, affine, activation, scale):
    _, weight, bias, _ = random_case(1, shape[-1], torch.float32, affine, device=backend.device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(backend.device)

    def function(x, weight, bias):
        return backend.layer_norm(x, shape[-1:], weight, bias, EPS, activation, scale)

    exact = functools.partial(formula, activation=activation, scale=scale)
    assert_derivatives(function, exact, (x, weight, bias), 2)


def test_second_derivatives_of_large_float16_gradients_are_finite(backend):
    """The products of two float16 gradients, up to 1e6 here, are computed in float32."""
    generator = torch.Generator().manual_seed(0)
    x, dy, g = (1000 * torch.randn(4, 64, generator=generator) for _ in range(3))
    results = []
    for dtype, layer_norm in ((torch.float16, backend.layer_norm), (torch.float64, torch.nn.functional.layer_norm)):
        leaf, grad_output, direction = (t.half().to(backend.device, dtype) for t in (x, dy, g))
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(layer_norm(leaf, (64,)), leaf, grad_output, create_graph=True)
        results += torch.autograd.grad(grad, leaf, direction)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-2, atol=1e-3 * results[1].abs().max().item())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_second_derivatives_of_16_bits_are_rounded_once(backend, activation):
    """Input reaches them in several ways, whose float32 gradients are added up before they are rounded."""
    x, dy, g = (torch.randn(64, 96, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        function = backend.layer_norm if dtype == torch.bfloat16 else formula
        leaf, grad_output, direction = (t.to(backend.device, dtype) for t in (x, dy, g))
        leaf.requires_grad_()
        arguments = ((96,), None, None, EPS) if dtype == torch.bfloat16 else (None, None)
        (grad,) = torch.autograd.grad(function(leaf, *arguments, activation), leaf, grad_output, create_graph=True)
        results += torch.autograd.grad(grad, leaf, direction)
    error, bound = (results[0].double() - results[1]).abs(), 0.51 * torch.finfo(torch.bfloat16).eps * results[1].abs()
    assert (error <= bound + 2e-4).all()


@pytest.mark.parametrize("activation,scale", [
    (None, 1.0), *(pytest.param(activation, 1.5, marks=pytest.mark.full) for activation in ("gelu", "gelu_tanh"))
])  # fmt: skip
def test_third_derivatives_are_those_of_the_formula(backend, activation, scale):
    inputs = random_case(3, 5, torch.float32, emphasized=False, device=backend.device)[:3]

    def function(x, weight, bias):  # the input depends on another argument, weight
        return backend.layer_norm(x * weight, (5,), weight, bias, EPS, activation, scale)

    def exact(x, weight, bias):
        return formula(x * weight, weight, bias, activation, scale)

    def loss(*tensors):
        return function(*tensors).sin().sum()

    assert_derivatives(function, exact, inputs, 3)
    forward_last = torch.func.jacfwd(torch.func.jacrev(loss))(*inputs)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(*inputs), forward_last)


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


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_pytorchs_operation(backend, layout, activation):
    rows, weight, bias = [torch.randn(n, 8) for n in (2, 3)], torch.randn(8), torch.randn(8)
    rows, (weight, bias) = ([t.to(backend.device).requires_grad_() for t in ts] for ts in (rows, (weight, bias)))
    results = []
    for norm in (backend.layer_norm, chain):
        nested = torch.nested.as_nested_tensor(rows, layout=layout)
        y = torch.cat(norm(nested, (8,), weight, bias, EPS, activation, 2.0).unbind())
        results.append([y, *torch.autograd.grad(y.square().sum(), [*rows, weight, bias])])
    torch.testing.assert_close(*results)


def test_distributed_tensors_run_pytorchs_operation(backend, mesh):
    tensor = torch.distributed.tensor
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    placed = [(x, tensor.Shard(0)), (weight, tensor.Replicate()), (bias, tensor.Replicate())]
    leaves = [tensor.distribute_tensor(t, mesh, [where]).requires_grad_() for t, where in placed]
    dy = tensor.distribute_tensor(dy, mesh, [tensor.Shard(0)])
    results = []
    for norm in (backend.layer_norm, chain):
        y = norm(leaves[0], (8,), leaves[1], leaves[2], EPS)
        results.append([t.full_tensor() for t in (y, *torch.autograd.grad(y, leaves, dy))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("distributed", [(True, False), (False, True), (True, True)], ids=["weight", "bias", "both"])
def test_implicitly_replicated_parameters_run_pytorchs_operation(backend, mesh, distributed):
    """As in a model that is only partly tensor-parallel. Without the context manager, PyTorch's error is raised."""
    tensor, experimental = torch.distributed.tensor, pytest.importorskip("torch.distributed.tensor.experimental")
    x, *affine, dy = random_case(6, 31, torch.float32, device=backend.device)
    affine = [tensor.distribute_tensor(t, mesh, [tensor.Replicate()]) if d else t for t, d in zip(affine, distributed)]
    leaves, results = [t.requires_grad_() for t in (x, *affine)], []
    for norm in (backend.layer_norm, nn.functional.layer_norm, torch.compile(backend.layer_norm, backend="eager")):
        with experimental.implicit_replication():
            y = norm(leaves[0], (31,), leaves[1], leaves[2], EPS)
            gradients = torch.autograd.grad(y.to_local(), leaves, dy)
        results.append([t.full_tensor() if isinstance(t, tensor.DTensor) else t for t in (y, *gradients)])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[1])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        backend.layer_norm(leaves[0], (31,), leaves[1], leaves[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(backend, dtype):
    """Expected is what nn.LayerNorm computes on a GPU. On CPUs, PyTorch's autocast has another rule."""
    x = torch.randn(4, 768, device=backend.device, dtype=dtype, requires_grad=True)
    for affine_dtype in (torch.float32, dtype):
        module = randomize(nn.LayerNorm(768, eps=EPS)).to(backend.device, affine_dtype)
        expected = nn.functional.layer_norm(x.float(), (768,), module.weight.float(), module.bias.float(), EPS)
        with torch.autocast(backend.device, dtype=dtype):
            y = backend.replace_layer_norm(module)(x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected)
        leaves = (x, module.weight, module.bias)
        gradients, right = (torch.autograd.grad(output.square().sum(), leaves) for output in (y, expected))
        assert [gradient.dtype for gradient in gradients] == [dtype, affine_dtype, affine_dtype]
        torch.testing.assert_close(gradients, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("model,dtype,forward", [
    *(("layer_norm", dtype, forward) for dtype in (torch.float32, torch.float16) for forward in (False, True)),
    *(("layer_norm, gelu", dtype, False) for dtype in (torch.float32, torch.float16)),
    *(("problem_34", dtype, False) for dtype in (torch.float32, torch.float16)),
    ("problem_34, tf32", torch.float32, False),
])  # fmt: skip
def test_backward_inside_of_autocast_gives_the_bits_of_backward_outside(backend, model, dtype, forward, monkeypatch):
    """forward: whether forward runs inside of autocast. Second derivatives, too, but not those of cuDNN's convolution.

    PyTorch computes the latter with convolutions, whose dtype autocast chooses.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    if "layer_norm" in model:
        norm, shape = randomize(nn.LayerNorm(40, eps=EPS).to(backend.device)), (6, 40)
        activation = "gelu" if "gelu" in model else None
        parameters = [norm.weight, norm.bias]

        def function(x):
            return backend.layer_norm(x, (40,), *parameters, EPS, activation)
    else:
        function, shape = models(backend, SCALED, dtype)[1], (1, 32, 1, 2, 32)
        parameters = [*function.parameters()]
    x = torch.randn(shape, device=backend.device, dtype=dtype, requires_grad=True)
    results = []
    with convolutions_in_tf32("tf32" in model):
        for is_inside in (False, True):
            torch.manual_seed(0)
            with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=forward):
                y = function(x)
            with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=is_inside):
                dy, leaves = torch.randn_like(y), [x, *parameters]
                plain = torch.autograd.grad(y, leaves, dy, retain_graph=True)
                first = torch.autograd.grad(y, leaves, dy, create_graph=True)
                directions = [torch.randn_like(t) for t in first[:2]]
                second = torch.autograd.grad(first[:2], leaves, directions, allow_unused=True)
            results.append([*plain, *first, *(() if backend.is_cuda and "problem_34" in model else second)])
    assert same_bits(*results)


def test_forward_mode_and_functional_transforms_agree_with_pytorch(backend):
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    results = []
    for function in (backend.layer_norm, nn.functional.layer_norm):

        def norm(x, weight=weight, bias=bias, function=function):
            return function(x, (8,), weight, bias, EPS)

        results.append([
            torch.func.vmap(norm)(x),
            torch.func.jvp(norm, (x,), (dy,))[1],
            torch.func.jvp(lambda w, b: norm(x, w, b), (weight, bias), (bias, weight))[1],
            torch.func.jacrev(norm)(x[0]),
            torch.func.hessian(lambda x: (norm(x) * dy[0]).sin().sum())(x[0]),
        ])  # fmt: skip
        for duals in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]):
            with forward_ad.dual_level():
                pairs = zip((x, weight, bias), (dy, bias, weight), duals)
                y = norm(*(forward_ad.make_dual(t, tangent) if is_dual else t for t, tangent, is_dual in pairs))
                results[-1] += forward_ad.unpack_dual(y)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.fixture
def no_vmap_fallback():
    """Makes vmap raise an error if an operation has no batching rule. By default it loops over the slices and warns."""
    if not hasattr(torch.library, "register_vmap"):
        pytest.skip("this PyTorch cannot register a batching rule")
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


# The shapes of x, weight and bias, and the dimension of each over which vmap maps. These shapes include that dimension.
mapped = pytest.mark.parametrize("shapes,in_dims", [
    ([(3, 5, 8), (8,), (8,)], (0, None, None)), ([(5, 3, 8), (8,), None], (1, None, None)),
    ([(3, 8), None, None], (0, None, None)), ([(3, 8), (3, 8), (3, 8)], (0, 0, 0)),
    ([(5, 8), (3, 8), (8,)], (None, 0, None)), ([(5, 8), (8,), (8, 3)], (None, None, 1)),
    ([(5, 2, 3, 8), (3, 8), (8, 3)], (2, 0, 1)), ([(5, 4, 3, 2), (4, 2), (4, 3, 2)], (2, None, 1)),
    ([(4, 2), (3, 4, 2), None], (None, 0, None)),
])  # fmt: skip


def mapped_case(device, dtype, shapes, in_dims):
    """Returns tensors of the shapes that exist, their dimensions, and a decorator for functions of x, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes if s]

    def of_tensors(function):
        def wrapped(*tensors):
            given = iter(tensors)
            return function(*(next(given) if shape else None for shape in shapes))

        return wrapped

    return tensors, tuple(dim for shape, dim in zip(shapes, in_dims) if shape), of_tensors


@pytest.mark.full
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.5)])
@pytest.mark.parametrize("outer", ["autograd", "torch.func"])
@mapped
def test_gradients_of_mapped_gradients_are_those_of_the_formula(
    backend, shapes, in_dims, outer, activation, scale, no_vmap_fallback
):
    normalized_shape = (4, 2) if shapes[0][-1] == 2 else (8,)
    tensors, in_dims, of_tensors = mapped_case(backend.device, torch.float32, shapes, in_dims)
    doubles = [t.detach().double().requires_grad_() for t in tensors]

    @of_tensors
    def layernorm_inline(x, weight, bias):
        return backend.layer_norm(x, normalized_shape, weight, bias, EPS, activation, scale)

    @of_tensors
    def exact(x, weight, bias):
        return formula(x, weight, bias, activation, scale, dims=tuple(range(-len(normalized_shape), 0)))

    argnums = tuple(range(len(tensors)))
    for wanted in {(0,), argnums[-1:], argnums}:
        results = []
        for function, arguments in ((layernorm_inline, tensors), (exact, doubles)):

            def total(*tensors, function=function):
                gradients = torch.func.grad(lambda *t: function(*t).sin().sum(), wanted)
                return sum(gradient.cos().sum() for gradient in torch.vmap(gradients, in_dims)(*tensors))

            if outer == "autograd":
                results.append(torch.autograd.grad(total(*arguments), arguments, allow_unused=True))
            else:
                results.append(torch.func.grad(total, argnums)(*(t.detach() for t in arguments)))
        for actual, expected in zip(*results):
            if expected is not None:
                atol = 1e-5 * max(1, expected.abs().max().item())
                torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


def test_mapped_gradients_inside_of_a_transform_that_does_not_differentiate_them(backend):
    """The gradient by y wraps x once more, and this wrapper requires no gradient. An outer one differentiates x."""
    x, weight = torch.randn(3, 4, 8, device=backend.device), torch.rand(8, device=backend.device)

    def total(x, of_samples):
        def unrelated(y):
            gradients = torch.vmap(torch.func.grad(of_samples), (None, 0))(weight, x * 1.0)
            return y * y, gradients.cos().sum()

        return torch.func.grad(unrelated, has_aux=True)(torch.ones((), device=backend.device))[1]

    def layernorm_inline(weight, x):
        return backend.layer_norm(x, (8,), weight, eps=EPS).sin().sum()

    def exact(weight, x):
        return formula(x, weight, None).sin().sum()

    actual, expected = (torch.func.grad(total)(x, of_samples) for of_samples in (layernorm_inline, exact))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("number", range(4))
def test_the_tangent_of_one_tensor_reaches_the_results_of_the_backward_op(backend, number, activation):
    """With an activation, every gradient depends on grad_output, input, weight and bias."""
    tensors = [torch.randn(shape, device=backend.device) for shape in ((3, 8), (3, 8), (8,), (8,))]
    tangent, which = torch.randn_like(tensors[number]), backend.module._ACTIVATIONS[activation][0]
    ops = backend.epilogue_ops
    statistics = ops.layer_norm_forward(tensors[1], [8], *tensors[2:], EPS, which, 1.0)[1]

    def exact(t):
        dy, *others = [*tensors[:number], t, *tensors[number + 1 :]]
        return torch.func.vjp(lambda x, weight, bias: formula(x, weight, bias, activation), *others)[1](dy)

    with forward_ad.dual_level():
        tensors[number] = forward_ad.make_dual(tensors[number], tangent)
        dy, x, weight, bias = tensors
        results = ops.layer_norm_backward(dy, x, [8], statistics, weight, bias, EPS, which, 1.0, [True] * 3)
        actual = tuple(forward_ad.unpack_dual(t).tangent for t in results)
        primal = forward_ad.unpack_dual(tensors[number]).primal
    expected = torch.func.jvp(exact, (primal,), (tangent,))[1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation,scale", [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", 2.0)])
@mapped
def test_vmap_is_as_accurate_as_pytorch(backend, shapes, in_dims, activation, scale, dtype, no_vmap_fallback):
    normalized_shape = (4, 2) if shapes[0][-1] == 2 else (8,)
    tensors, in_dims, of_tensors = mapped_case(backend.device, dtype, shapes, in_dims)
    op = (backend.epilogue_ops if activation else backend.ops).layer_norm.default

    @of_tensors
    def layernorm_inline(x, weight, bias):
        return op(x, normalized_shape, weight, bias, EPS, backend.module._ACTIVATIONS[activation][0], scale)

    @of_tensors
    def pytorch(x, weight, bias):
        return chain(x, normalized_shape, weight, bias, EPS, activation, scale)

    doubles = [t.detach().double().requires_grad_() for t in tensors]
    actual, theirs, exact = (
        mapped_in_every_way(function, arguments, in_dims)
        for function, arguments in ((layernorm_inline, tensors), (pytorch, tensors), (pytorch, doubles))
    )
    for result, pytorch_result, right in zip(actual, theirs, exact):
        assert_no_worse(result, pytorch_result, right, rounding=max(2 * torch.finfo(dtype).eps, 1e-5))


def mapped_in_every_way(function, tensors, dims):
    """Returns a list of tensors: function under vmap, gradients outside and inside of vmap, and vmap inside of vmap."""

    def loss_of(function):
        return lambda *tensors: function(*tensors).double().sin().sum()

    once, argnums = torch.vmap(function, dims), tuple(range(len(tensors)))
    detached = [t.detach() for t in tensors]
    return [
        once(*tensors),
        *torch.autograd.grad(loss_of(once)(*tensors), tensors),
        *torch.vmap(torch.func.grad(loss_of(function), argnums), dims)(*detached),
        *torch.func.grad(loss_of(once), argnums)(*detached),
        torch.vmap(once)(*(torch.stack([t, 2 * t]) for t in detached)),
    ]


@pytest.mark.parametrize("how", ["func.grad", "func.grad in func.grad", "create_graph"])
def test_derivatives_of_first_order_run_the_kernels(backend, how):
    """The formula composed of PyTorch's operations would need five times as much time."""
    x, weight, bias, dy = random_case(6, 8, torch.float32, device=backend.device)
    leaves, names = [t.requires_grad_() for t in (x, weight, bias)], []

    class RecordNames(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function._schema.name.split("::")[1])
            return function(*args, **(kwargs or {}))

    def loss(x, weight, bias):
        return (backend.layer_norm(x, (8,), weight, bias) * dy).sum()

    with RecordNames():
        if how == "create_graph":
            torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        elif how == "func.grad":
            torch.func.grad(loss, (0, 1, 2))(*leaves)
        else:
            torch.func.grad(lambda *t: torch.func.grad(loss)(*t).sin().sum())(*leaves)
    assert names.count("layer_norm_forward") == names.count("layer_norm_backward") == 1
    assert how == "func.grad in func.grad" or not {"rsqrt", "mean", "native_layer_norm"} & {*names}


def test_vmap_over_backward_agrees_with_pytorch(backend, no_vmap_fallback):
    x, weight, bias, _ = random_case(5, 8, torch.float32, device=backend.device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    gradients = torch.randn(3, 5, 8, dtype=x.dtype, device=backend.device)
    results = []
    for function in (backend.ops.layer_norm.default, nn.functional.layer_norm):
        y = function(x, (8,), weight, bias, EPS)
        results.append(torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(gradients))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_float32_bias_of_each_sample_are_sums_in_float32(backend, dtype):
    """Neither 2049 nor 257 is a number of 16 bits."""
    rows = 2049 if dtype == torch.float16 else 257
    x, bias = torch.randn(2, rows, 8, device=backend.device, dtype=dtype), torch.zeros(8, device=backend.device)

    def total(bias, x):
        return backend.layer_norm(x, (8,), None, bias).float().sum()

    gradients = torch.vmap(torch.func.grad(total), (None, 0))(bias, x)
    assert gradients.dtype == torch.float32 and (gradients == rows).all()


def test_xhat_of_mapped_weight_is_not_rounded_to_16_bits(backend):
    """Bias removes all of the output but its last digits, which a rounded xhat would not have."""
    x = torch.ones(2, 8, device=backend.device, dtype=torch.bfloat16)
    x[:, ::2] = -1
    weight = torch.full((3, 8), 1000.0, device=backend.device)
    bias = 0.01 - 1000 * x[0].double() * (1 + EPS) ** -0.5
    y = torch.vmap(lambda weight: backend.layer_norm(x, (8,), weight, bias.float(), EPS))(weight)
    assert y.dtype == x.dtype and (y.double() - 0.01).abs().max() < 1e-3


def test_gradients_in_forward_mode_are_added_up_in_float32(backend):
    """The mean of grad_output cancels. If it were rounded to 16 bits first, its roundings would remain."""
    generator = torch.Generator().manual_seed(0)
    x, tangent, dy = (torch.randn(3, 64, generator=generator).half().to(backend.device) for _ in range(3))
    x, dy = x.requires_grad_(), dy + 1000
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(backend.layer_norm(forward_ad.make_dual(x, tangent), (64,), eps=EPS)).primal
        (actual,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(formula(exact, None, None), exact, dy.double())
    assert (actual.double() - expected).abs().max() < 0.01 * expected.abs().max()


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


@pytest.mark.parametrize("model", ["layer_norm", "problem_34"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_over_reverse_agrees_with_pytorch(backend, create_graph, model):  # only grad_output has a tangent
    if model == "layer_norm":
        norm = randomize(nn.LayerNorm(8, eps=EPS).to(backend.device))
        modules, shape = (norm, backend.replace_layer_norm(copy.deepcopy(norm))), (6, 8)
    else:
        modules, shape = models(backend, SCALED), (1, 32, 1, 2, 32)
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
    x, weight, bias, dy = random_case(6, 8, torch.float64, device=backend.device)
    results = []
    for function in (backend.layer_norm, chain):
        function = functools.partial(function, activation=activation, scale=scale)

        def norm(x, function=function):
            return function(x, (8,), weight, bias, EPS)

        results.append([
            *run_case(function, x, weight, bias, dy),
            *torch.func.jvp(norm, (x,), (dy,)),
            torch.func.vmap(norm)(x),
            torch.func.hessian(lambda x: norm(x).sin().sum())(x[0]),
            torch.compile(norm, fullgraph=True, backend="aot_eager")(x),
        ])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results))
    with torch.device("meta"):
        y = backend.layer_norm(torch.empty(3, 8, dtype=x.dtype), (8,), torch.empty(8, dtype=x.dtype))
    assert y.dtype == x.dtype
    with pytest.raises(NotImplementedError, match="Float, Half or BFloat16, but got Double"):
        backend.ops.layer_norm(x, [8], weight, bias, EPS)


def test_the_node_in_the_autograd_graph(backend):
    norm = randomize(backend.ModelNew(64).to(backend.device))
    x = torch.randn(5, 64, device=backend.device, requires_grad=True)
    y = norm(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), norm.weight, create_graph=True)
    for node in (y.grad_fn, gradient.grad_fn):  # as those of nn.LayerNorm
        assert "LayerNorm" in node.name() and len(node.next_functions) == 3
    assert len(y.grad_fn(torch.ones_like(y))) == 3
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
    undefined = torch._C._functions.UndefinedGrad()(norm(x))
    assert torch.autograd.grad(undefined.sum(), wanted, allow_unused=True) == (None, None, None)


def test_backward_checks_tensors_that_were_changed_since_forward(backend):
    for message, change in [
        ("weight of dtype Float .*, but got Half", lambda norm, x: norm.half()),
        ("bias to be of same shape", lambda norm, x: setattr(norm.bias, "data", norm.bias.data[:8].clone())),
        ("grad_output of shape", lambda norm, x: setattr(x, "data", x.data[:3].clone())),
    ]:
        norm, x = backend.ModelNew(64).to(backend.device), torch.randn(5, 64, device=backend.device, requires_grad=True)
        y = norm(x)
        change(norm, x)
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()


def test_a_hook_may_return_saved_tensors_with_other_strides(backend):
    x, weight, _, dy = random_case(5, 64, torch.float32, device=backend.device)
    leaves, gradients = [x.requires_grad_(), weight.requires_grad_()], []
    for unpack in (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 2 else t):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = backend.layer_norm(x, (64,), weight)
        gradients.append(torch.autograd.grad(y, leaves, dy))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_threads_run_the_backward_of_one_graph_one_after_another(backend):
    running, counts = [], []

    def unpack(tensor):
        running.append(tensor)
        counts.append(len(running))
        time.sleep(0.05)
        running.pop()
        return tensor

    def backward(_):
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    x, weight, bias, _ = (t.requires_grad_() for t in random_case(6, 8, torch.float32, device=backend.device))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = backend.ops.layer_norm.default(x, [8], weight, bias, 1e-5)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(backward, range(3)))
    assert {*counts} == {1}
    # The other threads fail only if the first one has already released the saved tensors.
    assert "" in errors and all("second time" in error for error in errors if error)


@pytest.mark.full
def test_a_deep_graph_can_be_freed(backend):
    x = torch.randn(1, 8, device=backend.device, requires_grad=True)
    for _ in range(50_000 if backend.is_cuda else 2_000):
        x = backend.layer_norm(x, (8,))
    del x  # if each node freed the next one recursively, the stack would overflow


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_gradient_accumulation_agree_with_pytorch(backend, use_reentrant):
    original = randomize(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()).to(backend.device))
    converted = backend.replace_layer_norm(copy.deepcopy(original))
    batches = [torch.randn(5, 32, device=backend.device, requires_grad=True) for _ in range(3)]
    for x in batches:
        original(x).square().sum().backward()
        checkpoint(converted, x, use_reentrant=use_reentrant).square().sum().backward()
    for a, b in zip(original.parameters(), converted.parameters()):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4)
