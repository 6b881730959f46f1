"""Tests of the binding: shapes and strides, inputs without rows, and the errors for wrong arguments."""

import itertools
import re

import pytest
import torch
from cases import some_cases
from reference import ACTIVATIONS, assert_close_to_float64
from torch import nn

from layernorm_inline import layer_norm


@pytest.mark.parametrize(
    "shape,normalized", [((3, 4, 5, 6), 1), ((3, 4, 5, 6), 2), ((3, 4, 5, 6), 4), ((6,), 1), ((2, 8, 64, 64), 3)]
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last", "expanded", "sliced"])
def test_shapes_and_strides_match_pytorch(backend, shape, normalized, layout):
    x = torch.randn(shape, device=backend.device)
    if layout == "transposed" and x.dim() > 1:
        x = torch.randn(shape[:-2] + (shape[-1], shape[-2]), device=backend.device).transpose(-1, -2)
    elif layout == "channels_last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    elif layout == "expanded":
        x = torch.randn(shape[-1:], device=backend.device).expand(shape)
    elif layout == "sliced":
        x = torch.randn(shape[:-1] + (2 * shape[-1],), device=backend.device)[..., ::2]
    normalized_shape = x.shape[-normalized:]
    reference = nn.LayerNorm(normalized_shape).to(backend.device)
    module_under_test = backend.ModelNew(normalized_shape).to(backend.device)
    results = []
    for module in (reference, module_under_test):
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        (y * torch.linspace(-1, 1, y.numel(), device=backend.device).view_as(y)).sum().backward()
        results.append((y.detach(), leaf.grad, module.weight.grad, module.bias.grad))
    assert results[0][0].stride() == results[1][0].stride()
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape,normalized_shape", [((0, 5), (5,)), ((3, 0, 8), (8,)), ((0, 40000), (40000,))])
def test_no_rows_give_empty_output_and_zero_gradients(backend, shape, normalized_shape):
    module = backend.ModelNew(normalized_shape).to(backend.device)
    x = torch.empty(shape, device=backend.device, requires_grad=True)
    with backend.poisoned():
        y = module(x)
        y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape
    assert (module.weight.grad == 0).all() and (module.bias.grad == 0).all()


BAD_CALLS = [  # (type of the error, pattern of its message, call of a function f with tensors on a device d)
    (RuntimeError, "normalized_shape", lambda f, d: f(torch.zeros(2, 5, device=d), (4,))),
    (RuntimeError, "normalized_shape", lambda f, d: f(torch.zeros(5, device=d), (2, 5))),
    (RuntimeError, "at least 1-dimensional", lambda f, d: f(torch.zeros(2, 5, device=d), ())),
    (RuntimeError, "weight", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), torch.zeros(4, device=d))),
    (RuntimeError, "bias", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), None, torch.zeros(1, 5, device=d))),
    (RuntimeError, "not implemented|Long", lambda f, d: f(torch.zeros(2, 5, device=d, dtype=torch.int64), (5,))),
    (RuntimeError, "not implemented|Complex", lambda f, d: f(torch.zeros(2, 5, device=d, dtype=torch.cfloat), (5,))),
    (TypeError, "list", lambda f, d: f([1.0, 2.0], (2,))),
    (TypeError, "not int", lambda f, d: f(torch.zeros(2, 5, device=d), 5)),
    (TypeError, "normalized_shape.* float", lambda f, d: f(torch.zeros(2, 5, device=d), (5.0,))),
    (TypeError, "normalized_shape.* float", lambda f, d: f(torch.zeros(2, 5, device=d), [2, 5.0])),
    (TypeError, "normalized_shape.* bool", lambda f, d: f(torch.zeros(2, 1, device=d), (True,))),
    (TypeError, "normalized_shape.* range", lambda f, d: f(torch.zeros(2, 5, device=d), range(5, 6))),
    (TypeError, "'weight'.* not list", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), [1.0] * 5)),
    (TypeError, "'bias'.* not float", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), None, 0.0)),
    (TypeError, "'eps'.* not NoneType", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), eps=None)),
    (TypeError, "'eps'.* not str", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), eps="1")),
    (TypeError, "'eps'.* not Tensor", lambda f, d: f(torch.zeros(2, 5, device=d), (5,), eps=torch.ones((), requires_grad=True))),
]  # fmt: skip


@pytest.mark.parametrize("error,words,call", BAD_CALLS)
def test_bad_input_raises(backend, error, words, call):
    """A wrong argument raises an error that describes it, and later calls work."""
    with pytest.raises(error, match=words) as raised:
        call(backend.layer_norm, backend.device)
    assert "layernorm_" not in str(raised.value)  # the name of the op contains a hash
    assert torch.isfinite(backend.layer_norm(torch.randn(2, 5, device=backend.device), (5,))).all()


def test_scale_is_a_number_or_raises(backend):
    x = torch.randn(2, 5, device=backend.device)
    for scale in (torch.ones((), requires_grad=True), "2", None, 1j):
        with pytest.raises(TypeError, match=f"scale to be a number, but got {type(scale).__name__}"):
            backend.layer_norm(x, (5,), scale=scale)


def test_arguments_of_other_types_that_pytorch_accepts(backend):
    """eps may be an int, a bool or a tensor, and a number in normalized_shape may be a tensor."""
    x = torch.randn(2, 5, device=backend.device)
    for eps, size in ((1, torch.tensor(5)), (torch.tensor(1.0), 5), (True, 5)):
        torch.testing.assert_close(backend.layer_norm(x, [size], eps=eps), nn.functional.layer_norm(x, (5,), eps=1.0))


@pytest.mark.parametrize("device", ["meta", None])
def test_backward_checks_every_tensor(backend, device):
    """The op layer_norm_backward raises an error if any of its tensors has a wrong dtype, shape or device."""
    device = device or backend.device
    other = "cpu" if device == "meta" else "meta"
    dy, x, statistics, weight, bias = (torch.empty(s, device=device) for s in ((3, 8), (3, 8), (2, 3), (8,), (8,)))
    arguments = [dy, x, [8], statistics, weight, bias, 1e-5, 0, 1.0, [True] * 3]
    backend.ops.layer_norm_backward(*arguments)
    for i, t in enumerate(arguments):
        for wrong in (t.half(), t[..., :-1], torch.empty_like(t, device=other)) if isinstance(t, torch.Tensor) else ():
            with pytest.raises(RuntimeError, match="^(Expected|Given)"):
                backend.ops.layer_norm_backward(*arguments[:i], wrong, *arguments[i + 1 :])


@pytest.mark.parametrize("call", [call for _, _, call in BAD_CALLS])
def test_errors_on_the_cpu_equal_pytorchs(call):
    errors = []
    for function in (nn.functional.layer_norm, layer_norm):
        with pytest.raises(Exception) as caught:  # noqa: B017
            call(function, "cpu")
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_bad_dtypes_and_devices_raise(backend):
    x, w = torch.zeros(2, 5, device=backend.device), torch.zeros(5, device=backend.device)
    for weight, bias, words in [
        (w.half(), None, "Expected weight of dtype Float"),
        (None, w.double(), "Expected bias of dtype Float"),
        (w.to("meta"), None, "same device"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            backend.layer_norm(x, (5,), weight, bias)
    with pytest.raises(RuntimeError, match="same dtype"):
        backend.layer_norm(x.half(), (5,), w, w.half())


@pytest.mark.parametrize("activation", ["relu", ["gelu"], 1])
def test_unknown_activation_raises(backend, activation):
    expected = f"Expected activation to be one of {(None, *ACTIVATIONS)}, but got {activation!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        backend.layer_norm(torch.zeros(2, 3, device=backend.device), (3,), activation=activation)


def test_op_accepts_only_what_its_library_has(backend):
    """An op raises an error for an activation or a scale that its library lacks, also if there is nothing to compute."""
    unknown = len(backend.module._ACTIVATION_NAMES)
    for ops, arguments in (
        (backend.ops, [(1, 1.0), (0, 2.0)]),
        (backend.epilogue_ops, [(-1, 1.0), (unknown, 1.0), (1 << 32, 2.0)]),
    ):
        for (activation, scale), rows in itertools.product(arguments, (2, 0)):
            x, statistics = (torch.zeros(shape, device=backend.device) for shape in ((rows, 5), (2, rows)))
            with pytest.raises(RuntimeError, match=f"but got activation {activation} and scale {scale:g}"):
                ops.layer_norm(x, [5], None, None, 1e-5, activation, scale)
            with pytest.raises(RuntimeError, match="Expected activation"):
                ops.layer_norm_backward(x, x, [5], statistics, None, None, 1e-5, activation, scale, [True] * 3)


@pytest.mark.full
@some_cases
def test_strided_weight_bias_and_grad_output(backend, case):
    """A weight, bias and grad_output with a stride of 2 give accurate results."""
    x, *others = case.tensors()
    weight, bias, dy = (torch.stack([t, -t], -1)[..., 0] for t in others)
    assert case.cols == 1 or weight.stride()[-1] == bias.stride()[-1] == dy.stride()[-1] == 2
    with backend.on(case.gpu):
        assert_close_to_float64(backend, (x, weight, bias, dy), **case.epilogue)
