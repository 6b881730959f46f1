"""Tests of the comparison in reference.py.

Its float64 results equal PyTorch's, it accepts float32 arithmetic, and it rejects every bug of a list.
"""

import functools

import pytest
import torch
from reference import (
    AFFINE,
    EPS,
    FLOATS,
    NAMES,
    activated,
    chain,
    compare_with_float64,
    exact_parts,
    random_case,
    run_case,
)


@pytest.mark.parametrize("activation,scale", [(None, 1.0), (None, -1.5), ("gelu", 1.0), ("gelu_tanh", -0.5)])
@pytest.mark.parametrize("affine", AFFINE[:4])
def test_reference_equals_pytorch_in_float64(affine, activation, scale):
    case = random_case(7, 33, torch.float64, affine)
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
    """Layer norm in float32 arithmetic, with one of BUGS or, if bug is None, without.

    The mean is computed in float64 and rounded once.
    """

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
        measured = x32[:, :-1] if bug == "last element left out of the statistics" else x32
        mean = measured.double().mean(1, keepdim=True).float() * (bug != "no mean")
        count = measured.shape[1] + (bug == "count off by one")
        rstd = ((measured - mean).square().sum(1, keepdim=True) / count + eps).rsqrt()
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


def layer_norm_with(bug, case, epilogue):
    """Returns the results of a case, computed with a bug."""

    def function(x, shape, weight, bias, eps):
        return LayerNormWith.apply(x, weight, bias, eps, *epilogue, bug)

    return run_case(function, *case)


EPILOGUES = [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", -1.5)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparison_accepts_float32_arithmetic(dtype):
    compared = 0
    for rows, cols in ((3, 2), (5, 7), (1, 64), (40, 100), (1001, 24), (3, 4099), (1, 20001)):
        for number, affine in enumerate(AFFINE if dtype.itemsize == 2 else AFFINE[:4]):
            case, epilogue = random_case(rows, cols, dtype, affine, seed=number), EPILOGUES[number % 3]
            results = layer_norm_with(None, case, epilogue)
            compare_with_float64([(results, case)], activation=epilogue[0], scale=epilogue[1])
            compared += 1
    assert compared >= 28


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bug", BUGS)
def test_comparison_rejects_every_bug(bug, dtype):
    """The comparison rejects each bug in short and in long rows, without an activation and with GELU.

    A count that is off by one is only compared in short rows, because 16 bits cannot show it in long ones.
    """
    for rows, cols in ((5, 7), (40, 100)) if bug == "count off by one" else ((5, 7), (1001, 24), (3, 4099)):
        for epilogue in EPILOGUES[:2]:
            case = random_case(rows, cols, dtype, seed=rows + cols)
            results = layer_norm_with(bug, case, epilogue)
            with pytest.raises(AssertionError):
                compare_with_float64([(results, case)], activation=epilogue[0], scale=epilogue[1])
