"""Tests of the comparison in reference.py."""

import functools

import pytest
import torch
from reference import AFFINE, EPS, FLOATS, activated, chain, compare_with_float64, exact_parts, random_case, run_case


@pytest.mark.parametrize("activation,scale", [(None, 1.0), (None, -1.5), ("gelu", 1.0), ("gelu_tanh", -0.5)])
@pytest.mark.parametrize("affine", AFFINE[:4])
def test_reference_equals_pytorch_in_float64(affine, activation, scale):
    case = random_case(7, 33, torch.float64, affine)
    expected = run_case(functools.partial(chain, activation=activation, scale=scale), *case)
    for (_, _, exact, _), right in zip(exact_parts(*case, EPS, activation, scale), expected):
        if right is not None:
            torch.testing.assert_close(exact, right, rtol=1e-10, atol=1e-12)


BUGS = [
    "eps left out", "eps of 1e-5", "no mean", "last element left out of the statistics", "count off by one",
    "mean(wdy) left out", "mean(wdy xhat) left out", "last element left out of the sums",
    "last row left out of grad_weight", "last row left out of grad_bias", "weight left out", "last bias left out",
    "last row not written", "another row's statistics",
]  # fmt: skip


def results_with(bug, case, activation, scale):
    """Returns the results of a case in float32 arithmetic, but for the mean (rounded from float64), with a bug or None."""
    x, weight, bias, dy = case
    w = torch.ones_like(x[0]).float() if weight is None or bug == "weight left out" else weight.float()
    b = torch.zeros_like(x[0]).float() if bias is None else bias.float()
    if bug == "last bias left out":
        b = torch.nn.functional.pad(b[:-1], (0, 1))
    eps = {"eps left out": 0.0, "eps of 1e-5": 1e-5}.get(bug, EPS)
    x32 = x.float()
    measured = x32[:, :-1] if bug == "last element left out of the statistics" else x32
    mean = measured.double().mean(1, keepdim=True).float() * (bug != "no mean")
    count = measured.shape[1] + (bug == "count off by one")
    rstd = ((measured - mean).square().sum(1, keepdim=True) / count + eps).rsqrt()
    if bug == "another row's statistics":
        mean, rstd = mean.roll(1, 0), rstd.roll(1, 0)
    xhat = (x32 - mean) * rstd
    y, slope = activated(xhat * w + b, activation)
    y = (scale * y).to(x.dtype)
    if bug == "last row not written":
        y[-1] = torch.nan
    g = (dy.float() * (scale * slope)).to(x.dtype).float()
    wdy = g * w
    short = slice(-1 if bug == "last element left out of the sums" else None)
    c1 = wdy[:, short].mean(1, keepdim=True) * (bug != "mean(wdy) left out")
    c2 = (wdy * xhat)[:, short].mean(1, keepdim=True) * (bug != "mean(wdy xhat) left out")
    weight_rows = slice(-1 if bug == "last row left out of grad_weight" else None)
    bias_rows = slice(-1 if bug == "last row left out of grad_bias" else None)
    sums = rstd * (wdy - c1 - xhat * c2), (g * xhat)[weight_rows].sum(0), g[bias_rows].sum(0)
    return [y, *(None if t is None else result.to(t) for result, t in zip(sums, case))]


EPILOGUES = [(None, 1.0), ("gelu", 1.0), ("gelu_tanh", -1.5)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparison_accepts_float32_arithmetic(dtype):
    for rows, cols in ((3, 2), (5, 7), (1, 64), (40, 100), (1001, 24), (3, 4099), (1, 20001)):
        for number, affine in enumerate(AFFINE if dtype.itemsize == 2 else AFFINE[:4]):
            case, epilogue = random_case(rows, cols, dtype, affine, seed=number), EPILOGUES[number % 3]
            results = results_with(None, case, *epilogue)
            compare_with_float64([(results, case)], activation=epilogue[0], scale=epilogue[1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bug", BUGS)
def test_comparison_rejects_every_bug(bug, dtype):
    """A count that is off by one is only compared in short rows, because 16 bits cannot show it in long ones."""
    for rows, cols in ((5, 7), (40, 100)) if bug == "count off by one" else ((5, 7), (1001, 24), (3, 4099)):
        for epilogue in EPILOGUES[:2]:
            case = random_case(rows, cols, dtype, seed=rows + cols)
            results = results_with(bug, case, *epilogue)
            with pytest.raises(AssertionError):
                compare_with_float64([(results, case)], activation=epilogue[0], scale=epilogue[1])
