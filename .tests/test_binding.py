"""Tests of the binding: shapes and strides, inputs without rows, and the errors for wrong arguments."""

import functools
import itertools

import emulator
import pytest
import torch
from cases import some_cases
from reference import AFFINE, EPS, assert_close_to_float64, random_case
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layernorm_inline import layer_norm

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x[(0,) * (x.dim() - 1)].expand(x.shape),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize(
    "shape,normalized", [((3, 4, 5, 6), 1), ((3, 4, 5, 6), 2), ((3, 4, 5, 6), 4), ((6,), 1), ((2, 8, 64, 64), 3)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_strides_match_pytorch(backend, shape, normalized, layout):
    x, results = LAYOUTS[layout](torch.randn(shape, device=backend.device)), []
    for module in (nn.LayerNorm(shape[-normalized:]), backend.ModelNew(shape[-normalized:])):
        leaf = x.detach().requires_grad_()
        y = module.to(backend.device)(leaf)
        (y * torch.linspace(-1, 1, y.numel(), device=backend.device).view_as(y)).sum().backward()
        results.append((y.detach(), leaf.grad, module.weight.grad, module.bias.grad))
    assert results[0][0].stride() == results[1][0].stride()
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape,normalized_shape", [((0, 5), (5,)), ((3, 0, 8), (8,)), ((0, 40000), (40000,))])
def test_no_rows_give_empty_output_and_zero_gradients(backend, shape, normalized_shape):
    module = backend.ModelNew(normalized_shape).to(backend.device)
    x = torch.empty(shape, device=backend.device, requires_grad=True)
    with backend.poisoned():
        y = module(x)
        y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape
    assert (module.weight.grad == 0).all() and (module.bias.grad == 0).all()


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_error_without_code_for_the_gpu_says_what_to_install(activation):
    if not emulator.can_build():
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    module, x = emulator.load_module(), torch.ones(2, 5)
    if activation:
        module._load_epilogue()
    for emulate_on in emulator.BINDINGS.values():
        emulate_on(None)  # no library of kernels, until the next on()
    message = "compute capability is 0.0, and the kernels were compiled for .* install an nvcc that supports it"
    with pytest.raises(RuntimeError, match=message):
        module.layer_norm(x, (5,), activation=activation)


BAD_CALLS = [  # (type of the error, pattern of its message, call of a function f with x of shape (2, 5))
    (RuntimeError, "normalized_shape", lambda f, x: f(x, (4,))),
    (RuntimeError, "normalized_shape", lambda f, x: f(x[0], (2, 5))),
    (RuntimeError, "at least 1-dimensional", lambda f, x: f(x, ())),
    (RuntimeError, "weight", lambda f, x: f(x, (5,), x[0, :4])),
    (RuntimeError, "bias", lambda f, x: f(x, (5,), None, x[:1])),
    (RuntimeError, "not implemented|Long", lambda f, x: f(x.long(), (5,))),
    (RuntimeError, "not implemented|Complex", lambda f, x: f(x.cfloat(), (5,))),
    (TypeError, "list", lambda f, x: f([1.0, 2.0], (2,))),
    (TypeError, "not int", lambda f, x: f(x, 5)),
    (TypeError, "normalized_shape.* float", lambda f, x: f(x, (5.0,))),
    (TypeError, "normalized_shape.* float", lambda f, x: f(x, [2, 5.0])),
    (TypeError, "normalized_shape.* bool", lambda f, x: f(x[:, :1], (True,))),
    (TypeError, "'weight'.* not list", lambda f, x: f(x, (5,), [1.0] * 5)),
    (TypeError, "'bias'.* not float", lambda f, x: f(x, (5,), None, 0.0)),
    (TypeError, "'eps'.* not NoneType", lambda f, x: f(x, (5,), eps=None)),
    (TypeError, "'eps'.* not Tensor", lambda f, x: f(x, (5,), eps=torch.ones((), requires_grad=True))),
]


OTHER_BAD_CALLS = [  # as above, but no calls of nn.functional.layer_norm
    (RuntimeError, "Expected weight of dtype Float", lambda f, x: f(x, (5,), x[0].half())),
    (RuntimeError, "Expected bias of dtype Float", lambda f, x: f(x, (5,), None, x[0].double())),
    (RuntimeError, "same device", lambda f, x: f(x, (5,), x[0].to("meta"))),
    (RuntimeError, "same dtype", lambda f, x: f(x.half(), (5,), x[0], x[0].half())),
    (TypeError, "scale to be a number, but got Tensor", lambda f, x: f(x, (5,), scale=torch.ones(()))),
    (TypeError, "scale to be a number, but got NoneType", lambda f, x: f(x, (5,), scale=None)),
    (TypeError, "scale to be a number, but got complex", lambda f, x: f(x, (5,), scale=1j)),
    (ValueError, r"one of \(None, 'gelu', 'gelu_tanh'\), but got 'relu'", lambda f, x: f(x, (5,), activation="relu")),
    (ValueError, r"activation to be .* but got \['gelu'\]", lambda f, x: f(x, (5,), activation=["gelu"])),
]  # fmt: skip


@pytest.mark.parametrize("error,words,call", BAD_CALLS + OTHER_BAD_CALLS)
def test_bad_input_raises(backend, error, words, call):
    with pytest.raises(error, match=words) as raised:
        call(backend.layer_norm, torch.zeros(2, 5, device=backend.device))
    assert "layernorm_" not in str(raised.value)  # the name of the op contains a hash
    assert torch.isfinite(backend.layer_norm(torch.randn(2, 5, device=backend.device), (5,))).all()


def test_arguments_of_other_types_that_pytorch_accepts(backend):
    x = torch.randn(2, 5, device=backend.device)
    for eps, size in ((1, torch.tensor(5)), (torch.tensor(1.0), 5), (True, 5)):
        torch.testing.assert_close(backend.layer_norm(x, [size], eps=eps), nn.functional.layer_norm(x, (5,), eps=1.0))


@pytest.mark.parametrize("device", ["meta", None])
def test_backward_checks_every_tensor(backend, device):
    device = device or backend.device
    other = "cpu" if device == "meta" else "meta"
    dy, x, statistics, weight, bias = (torch.empty(s, device=device) for s in ((3, 8), (3, 8), (2, 3), (8,), (8,)))
    arguments = [dy, x, [8], statistics, weight, bias, 1e-5, 0, 1.0, [True] * 3]
    backend.ops.layer_norm_backward(*arguments)
    for i, t in enumerate(arguments):
        if not isinstance(t, torch.Tensor):
            continue
        # grad_output of float32 input may have 16 bits.
        for wrong in (t.double() if i == 0 else t.half(), t[..., :-1], torch.empty_like(t, device=other)):
            with pytest.raises(RuntimeError, match="^(Expected|Given)"):
                backend.ops.layer_norm_backward(*arguments[:i], wrong, *arguments[i + 1 :])


@pytest.mark.parametrize("call", [call for _, _, call in BAD_CALLS])
def test_errors_on_the_cpu_equal_pytorchs(call):
    errors = []
    for function in (nn.functional.layer_norm, layer_norm):
        with pytest.raises(Exception) as caught:  # noqa: B017
            call(function, torch.zeros(2, 5))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_op_accepts_only_what_its_library_has(backend):
    first, second, unknown = backend.ops, backend.epilogue_ops, len(backend.module._ACTIVATION_NAMES)
    for ops, activation, scale in (
        (first, 1, 1.0), (first, 0, 2.0), (second, -1, 1.0), (second, unknown, 1.0), (second, 1 << 32, 2.0)
    ):  # fmt: skip
        for rows in (2, 0):
            x, statistics = (torch.zeros(shape, device=backend.device) for shape in ((rows, 5), (2, rows)))
            with pytest.raises(RuntimeError, match=f"but got activation {activation} and scale {scale:g}"):
                ops.layer_norm(x, [5], None, None, 1e-5, activation, scale)
            with pytest.raises(RuntimeError, match="Expected activation"):
                ops.layer_norm_backward(x, x, [5], statistics, None, None, 1e-5, activation, scale, [True] * 3)


@pytest.mark.full
@some_cases
def test_strided_weight_bias_and_grad_output(backend, case):
    x, *others = case.tensors()
    weight, bias, dy = (torch.stack([t, -t], -1)[..., 0] for t in others)
    assert case.cols == 1 or weight.stride()[-1] == bias.stride()[-1] == dy.stride()[-1] == 2
    with backend.on(case.gpu):
        assert_close_to_float64(backend, (x, weight, bias, dy), **case.epilogue)


def called_ops(function):
    """Returns (name of the op, its arguments) of each op of this file that the function calls below autograd."""
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "layernorm_" in op.namespace:
                calls.append((op._schema.name.split("::")[1], args))
            return op(*args, **(kwargs or {}))

    with Record():
        function()
    return calls


def test_each_output_mask_gives_these_gradients_only(backend):
    """The op returns exactly the gradients that output_mask names, and they do not depend on the others."""
    for ops, activation in ((backend.ops, 0), (backend.epilogue_ops, 1)):
        for affine in AFFINE:
            dtype = torch.float16 if "float32" in affine else torch.float32
            x, weight, bias, dy = random_case(6, 40, dtype, affine, device=backend.device)
            _, statistics = ops.layer_norm_forward(x, [40], weight, bias, EPS, activation, 1.0)
            arguments = (dy, x, [40], statistics, weight, bias, EPS, activation, 1.0)
            every = ops.layer_norm_backward(*arguments, [True] * 3)
            given = (x, weight, bias)
            for mask in itertools.product((False, True), repeat=3):
                gradients = ops.layer_norm_backward(*arguments, mask)
                for gradient, expected, t, wanted in zip(gradients, every, given, mask):
                    assert (gradient is not None) == (wanted and t is not None), (affine, mask)
                    assert gradient is None or (torch.equal(gradient, expected) and gradient.dtype == t.dtype)


@pytest.mark.parametrize("affine", AFFINE)
def test_each_output_mask_under_vmap_gives_the_gradients_of_each_sample(backend, affine):
    """With their shapes and dtypes, which PyTorch would correct if it called the op for autograd."""
    dtype = torch.float16 if "float32" in affine else torch.bfloat16
    tensors = random_case(6, 12, dtype, affine, device=backend.device)
    x, weight, bias, dy = (t if t is None else torch.stack([t, t.flip(-1)]) for t in tensors)
    x, dy = (t.view(2, 6, 4, 3) for t in (x, dy))
    weight, bias = (t if t is None else t.view(2, 4, 3) for t in (weight, bias))

    def gradients(ops, activation, mask, dy, x, weight, bias):
        _, statistics = ops.layer_norm_forward(x, [4, 3], weight, bias, EPS, activation, 1.0)
        results = ops.layer_norm_backward(dy, x, [4, 3], statistics, weight, bias, EPS, activation, 1.0, mask)
        return tuple(t for t in results if t is not None)

    for ops, activation in ((backend.ops, 0), (backend.epilogue_ops, 1)):
        for mask in itertools.product((False, True), repeat=3):
            function = functools.partial(gradients, ops, activation, mask)
            expected = [function(*(t if t is None else t[i] for t in (dy, x, weight, bias))) for i in (0, 1)]
            if not expected[0]:
                continue
            in_dims = tuple(None if t is None else 0 for t in (dy, x, weight, bias))
            results = torch.vmap(function, in_dims)(dy, x, weight, bias)
            for result, *right in zip(results, *expected):
                torch.testing.assert_close(result, torch.stack(right), atol=2e-2, rtol=2e-2)


def test_only_needed_results_are_computed(backend):
    """Forward saves statistics only for a gradient, and backward computes only the gradients that are needed."""
    for activation in (None, "gelu"):
        x, weight, bias, _ = random_case(6, 40, torch.float32, device=backend.device)
        for wanted in itertools.product((False, True), repeat=3):
            leaves = [t.detach().requires_grad_(want) for t, want in zip((x, weight, bias), wanted)]
            outputs = []

            def forward():
                outputs.append(backend.layer_norm(leaves[0], (40,), *leaves[1:], activation=activation))  # noqa: B023

            forward_name = "layer_norm_forward" if any(wanted) else "layer_norm"
            assert [name for name, _ in called_ops(forward)] == [forward_name]
            with torch.no_grad():
                assert [name for name, _ in called_ops(forward)] == ["layer_norm"]
            if any(wanted):
                ((name, arguments),) = called_ops(outputs[0].sum().backward)
                assert (name, tuple(arguments[9])) == ("layer_norm_backward", wanted)
                assert [t.grad is not None for t in leaves] == list(wanted)


@pytest.mark.parametrize("changed,activation,order", [
    *((changed, activation, 1) for changed in ("input", "weight", "bias") for activation in (None, "gelu")),
    *((changed, None, 2) for changed in ("input", "weight", "grad_output")),
])  # fmt: skip
def test_a_change_in_place_before_backward_raises(backend, changed, activation, order):
    """With an activation, the second derivatives use other tensors than these."""
    names = ("input", "weight", "bias", "grad_output")
    leaves = [t.requires_grad_() for t in random_case(6, 40, torch.float32, device=backend.device)]
    used = {name: t * 1 for name, t in zip(names, leaves)}  # leaves themselves cannot be changed in place
    y = backend.layer_norm(used["input"], (40,), used["weight"], used["bias"], EPS, activation)
    if order == 2:
        y = sum(g.sum() for g in torch.autograd.grad(y, leaves[:3], used["grad_output"], create_graph=True))
    with torch.no_grad():
        used[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_step_of_an_optimizer_before_backward_raises(backend):
    """Parameters are leaves, which an optimizer changes in place."""
    for parameter in ("weight", "bias"):
        norm = backend.LayerNorm(40).to(backend.device)
        y = norm(torch.randn(6, 40, device=backend.device, requires_grad=True))
        with torch.no_grad():
            getattr(norm, parameter).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
