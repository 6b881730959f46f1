"""Tests that the output and the gradients are close to float64. reference.py defines how close a result must be."""

import functools
import math
import random

import emulator
import pytest
import torch
from cases import CASES, EMULATED, FORMS, OFFSETS, SOME, TYPES, Case, every_case, parameters, some_cases, this_gpu
from reference import AFFINE, EPS, NAMES, SUMS, activated, chain, compare_with_float64, random_case, run_case, same_bits
from test_convolution import on_cuda, on_emulated
from torch import nn

from layernorm_inline import layer_norm


def run(backend, case, tensors, eps=EPS, wanted=(1, 1, 1), seed=0):
    """Returns [output, grad_input, grad_weight, grad_bias] from the case's GPU, computed in memory full of NaN."""
    backend.need_memory(case.nbytes)
    with backend.on(case.gpu, seed), backend.poisoned(4 * tensors[0].nbytes + (1 << 26)):
        return run_case(functools.partial(backend.layer_norm, **case.epilogue), *tensors, eps, wanted)


def check(backend, case, tensors, eps=EPS, wanted=(1, 1, 1), luck=NAMES):
    """Runs the case and compares its results with float64."""
    compare_with_float64([(run(backend, case, tensors, eps, wanted), tensors)], eps, luck=luck, **case.epilogue)


@every_case
def test_values(backend, case):
    """An emulated GPU must also give the same bits if it runs threads and copies in another order."""
    tensors = case.tensors(seed=CASES.index(case))
    results = run(backend, case, tensors, seed=1)
    compare_with_float64([(results, tensors)], **case.epilogue)
    if not backend.is_cuda:
        assert same_bits(results, run(backend, case, tensors, seed=2))


# Functions that return (rows, columns) of random calls, from the number of SMs and two random fractions. On a GPU with
# as many SMs as an H100, they reach every kernel family.
SHAPE_KINDS = {
    "few short": lambda s, u, v: (1 + 3 * s * u, 1 + 299 * v),
    "many short": lambda s, u, v: (15 * s + 8 * s * u, 1 + 299 * v),
    "middle": lambda s, u, v: (1 + 3 * s * u, 301 + 8699 * v),
    "long": lambda s, u, v: (1 + 12 * u, 9001 + 1068 * s * v),
    "many long": lambda s, u, v: (s + 2 * s * u, 6001 + 15_000 * v),
    "many in shared memory": lambda s, u, v: (2 + 17 * s * u, 8200 + 8 * (1250 * v // 1)),
    "grid_resident": lambda s, u, v: (4 + 4 * u, 8334 * s + 4 * (5300 * s * v // 1)),
    "two_pass": lambda s, u, v: (1 + 2 * u, 8334 * s + 7576 * s * v),
}


def random_call(gpu, rng, max_elements):
    """Returns (a case of at most max_elements, eps, options of random_case)."""
    while True:
        kind, u, v = rng.choice(list(SHAPE_KINDS)), rng.random(), rng.random()
        rows, cols = map(int, SHAPE_KINDS[kind](gpu.sms, u, v))
        if rows * cols <= max_elements:
            break
    dtype = rng.choice(list(TYPES))
    affine = rng.choice(AFFINE if TYPES[dtype].itemsize == 2 else AFFINE[:4])
    off = rng.choice(["", "", *OFFSETS])
    mean, std = rng.choice([0.0, 1.0, -300.0, 1e6]), rng.choice([1e-3, 1.0, 1e3, 1e6])
    if dtype == "fp16":  # its largest number is 65504
        mean, std = min(mean, 1e4), min(std, 1e3)
    numbers = dict(mean=mean, std=std, emphasized=False)
    return Case(gpu, rows, cols, dtype, rng.choice(list(FORMS)), off, affine), rng.choice([1e-12, 1e-5, 1e-1]), numbers


@pytest.mark.full
@pytest.mark.parametrize("part", range(50))
def test_random_calls(backend, part, seed):
    for number in range(20 if backend.is_cuda else 4):
        number += 1000 * part + 100_000 * seed
        gpu = this_gpu()[0] if backend.is_cuda else random.Random(number).choice(EMULATED[:2] + EMULATED)
        case, eps, numbers = random_call(gpu, random.Random(number), 4 * 10**7 if backend.is_cuda else 10**5)
        check(backend, case, case.tensors(**numbers), eps)


@some_cases
def test_output_mask_selects_gradients(backend, case):
    for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)):
        check(backend, case, case.tensors(), wanted=wanted)


@parameters([case for case in SOME if case.form == "plain"])
def test_backward_without_weight_gradients_allocates_no_sums(backend, case):
    """Beside grad_input, it allocates 8 bytes for each mailbox (at most 160 per row) and each piece of a row."""
    x, weight, bias, dy = case.tensors()
    with backend.on(case.gpu):
        _, statistics = backend.ops.layer_norm_forward(x, [case.cols], weight, bias, EPS, 0, 1.0)
        call = (dy, x, [case.cols], statistics, weight, bias, EPS, 0, 1.0, [True, False, False])
        with torch.profiler.profile(profile_memory=True) as profile:
            grad_input = backend.ops.layer_norm_backward(*call)[0]
    events = profile.profiler.kineto_results.events()
    allocated = sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")
    pieces = max(160, case.cols // 8192 + 2)
    rounding = 2 << 20 if backend.is_cuda and grad_input.nbytes > 1 << 20 else 0  # of PyTorch's allocator
    assert grad_input.nbytes <= allocated <= grad_input.nbytes + rounding + 8 * case.rows * pieces + 1024


@pytest.mark.full
@some_cases
def test_eps_of_any_size(backend, case):
    for eps in (0.0, 1e-12, 1e-5, 1.0, 1e10):
        check(backend, case, case.tensors(), eps)


@some_cases
def test_nan_stays_in_its_row(backend, case):
    """NaN in input spoils a row of output and grad_input; in grad_output, a row of grad_input and a column of sums."""
    x, weight, bias, dy = case.tensors()
    row, col = case.rows // 2, case.cols // 3
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[row, case.cols // 2], bad_x[-1, case.cols // 2] = math.nan, math.inf
    bad = torch.zeros(case.rows, dtype=torch.bool, device=x.device)
    bad[[row, -1]] = True
    for t in run(backend, case, (bad_x, weight, bias, dy))[:2]:
        assert t[bad].isnan().all() and t[~bad].isfinite().all()

    bad_dy[row, col] = math.nan
    bad[-1] = row == case.rows - 1
    y, dx, *sums = run(backend, case, (x, weight, bias, bad_dy))
    assert y.isfinite().all() and dx[bad].isnan().all() and dx[~bad].isfinite().all()
    for t in sums:
        assert t[col].isnan() and t.isfinite().sum() == case.cols - 1


@pytest.mark.full
@parameters([case for case in SOME if case.form == "plain"])
def test_saved_statistics_of_a_row_with_nan_are_nan(backend, case):
    x, weight, bias, _ = case.tensors()
    row = case.rows // 2
    x[row, case.cols // 2] = math.nan
    with backend.on(case.gpu):
        _, statistics = backend.ops.layer_norm_forward(x, [case.cols], weight, bias, EPS, 0, 1.0)
    is_nan = statistics.isnan()
    assert is_nan[:, row].all() and is_nan.sum() == 2


@pytest.mark.full
@parameters([case for case in SOME if case.dtype != "fp16"])
@pytest.mark.parametrize("where", [slice(None), slice(5, 6)], ids=["everywhere", "one number"])
def test_variance_that_overflows_is_infinite(backend, case, where):
    """The normalized row is then 0, also where a kernel multiplies the rounding error of the mean by rstd."""
    x, weight, bias, dy = case.tensors()
    x[:, where] *= 1e28
    y, dx, grad_weight, _ = run(backend, case, (x, weight, bias, dy), eps=1e-5)
    expected = case.epilogue["scale"] * activated(bias.double(), case.epilogue["activation"])[0]
    assert ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    assert not dx.any() and not grad_weight.any()


LARGE_MEANS = {"fp32": [(1e4, 1.0), (1e6, 0.1)], "fp16": [(1e3, 1.0)], "bf16": [(1e4, 100.0)]}


@some_cases
def test_large_mean_is_accurate(backend, case):
    for mean, std in LARGE_MEANS[case.dtype]:
        tensors = case.tensors(mean=mean, std=std, emphasized=False)
        check(backend, case, tensors, 1e-5, luck=NAMES if case.rows < 6 or not backend.is_cuda else SUMS)


@pytest.mark.full
@parameters([case for case in SOME if case.dtype != "fp16"])
def test_huge_numbers_are_accurate_or_nan(backend, case):
    """Around 1e20, results are accurate. If the sum of a constant row overflows, output is NaN or what bias gives."""
    if case.dtype == "fp32":
        check(backend, case, case.tensors(mean=1e20, std=1e15, emphasized=False), 1e-5)
    tensors = case.tensors(mean=1e20, std=1e15, emphasized=False)
    tensors[0].fill_(1e20)[:, :: min(5000, case.cols - 1)] *= 1 + 2**-7
    check(backend, case, tensors, 1e-5)
    x, weight, bias, dy = case.tensors()
    y = run(backend, case, (x.fill_(2e36), weight, bias, dy), eps=1e-5)[0]
    expected = case.epilogue["scale"] * activated(bias.double(), case.epilogue["activation"])[0]
    assert (y.isnan() | ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-6)).all()


@pytest.mark.full
@some_cases
def test_outliers_do_not_spoil_their_row(backend, case):
    """Outliers may be anywhere in a row, also in the columns from which kernels measure the others of a part."""
    cols = case.cols
    for where in (slice(0, None, 128), [0], [cols // 2, cols - 1]):
        tensors = case.tensors()
        tensors[0][:, where] = 300 if case.dtype == "fp32" else 30
        check(backend, case, tensors)
    if not backend.is_cuda or case.dtype != "fp32":
        return
    for where in (slice(0, min(2048, cols // 2)), slice(0, None, 997), slice(-5, None), slice(0, None, cols // 5)):
        tensors = case.tensors(mean=0.0, emphasized=False)
        tensors[0][:, where] += 1e4
        check(backend, case, tensors, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("std,dtype,eps", [
    (1e-39, "fp32", 1e-5), (1e15, "fp32", 1e-5), (6e-6, "fp16", 1e-5), (1e4, "fp16", 1e-5), (1e15, "bf16", 1e-5),
    (3e-20, "bf16", 0.0),  # rstd^2 overflows
])  # fmt: skip
@pytest.mark.parametrize("cols", [64, 5000, 20001, 60000])
def test_tiny_and_huge_numbers_are_accurate(backend, cols, std, dtype, eps):
    case = Case(emulator.GPUS["hopper"](8), 5, cols, dtype, "plain")
    tensors = case.tensors(seed=cols, mean=0.0, std=std, emphasized=False, device=backend.device)
    check(backend, case, tensors, eps, luck=SUMS)


def rounded_sums():
    """Yields float16 cases in which float32 rounds the sum of equal numbers: those of more than 8192 columns."""
    of_this_gpu = ((3, 16384), (5, 14335), (40, 50257), (1, 194307), (1, 205923), (3, 262144), (3, 1200001))
    hopper, turing, ampere = (emulator.GPUS[name] for name in ("hopper", "turing", "ampere"))
    for gpu, rows, cols in (
        (hopper(2), 3, 16384), (turing(2), 3, 14335), (ampere(2), 3, 65544), (hopper(8), 3, 60000),
        (turing(2), 3, 70003), *((gpu, *shape) for gpu in this_gpu() for shape in of_this_gpu),
    ):  # fmt: skip
        yield Case(gpu, rows, cols, "fp16", "plain")


@parameters([*SOME, *rounded_sums()])
@pytest.mark.parametrize("off", ["", "x"])
def test_constant_rows_give_bias(backend, case, off):
    """The output of a constant row is bias, bit for bit, even if mean * rstd overflows. The gradient of weight is 0.

    For values below 10^6, grad_input is close to that of a row of zeros.
    """
    values = (0.0, 1.0, 1 / 3, 100.0, 1234.567, -3.7e5, 1e20, -7.7e29, *[1e33] * (case.cols < 300_000))
    if case.dtype == "fp16":
        values = (0.0, 1.0, 1 / 3, 2047.0, -1234.567, 16376.0, 65504.0)
    case = case._replace(off=off)
    x, weight, bias, dy = case.tensors()
    for first in range(0, len(values), case.rows):
        rows = [values[(first + row) % len(values)] for row in range(case.rows)]
        for row, value in enumerate(rows):
            x[row] = value
        for scale in (1.0, 2.0):
            function = functools.partial(backend.layer_norm, scale=scale)
            with backend.on(case.gpu):
                y, dx, grad_weight, _ = run_case(function, x, weight, bias, dy, 1e-12)
            assert (y == scale * bias).all() and not grad_weight.any()
            assert dx.isfinite().all() or case.dtype == "fp16"
        if max(map(abs, rows)) < 1e6:
            with backend.on(case.gpu):
                dx = run_case(backend.layer_norm, x, weight, bias, dy, 1e-5)[1]
            compare_with_float64([([None, dx, None, None], (torch.zeros_like(x), weight, bias, dy))], eps=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("gpu,rows,cols,value", [
    (emulator.GPUS["hopper"](1), 1100, 2056, 0.931),
    (emulator.GPUS["ada"](2), 600, 4104, 0.847),  # two blocks share all rows
    (emulator.GPUS["hopper"](1), 1100, 4095, 0.931),  # register kernels: more blocks than run at once
    (emulator.GPUS["hopper"](1), 300, 16387, 0.847),  # two-pass kernels: a thread adds to its partial sums
], ids=str)  # fmt: skip
def test_gradients_of_many_rows_are_accurate(backend, gpu, rows, cols, value):
    """If rows were added one by one, grad_bias would be off by 136 roundings in the first case."""
    if backend.is_cuda:
        rows = min(700 * 132, 2**28 // cols)
    case = Case(gpu, rows, cols, "fp32", "plain")
    x, weight, bias, dy = case.tensors(mean=0.0, emphasized=False, device=backend.device)
    grad_bias = run(backend, case, (x, weight, bias, dy.fill_(value)))[3]
    exact = rows * dy[0, 0].double()
    assert ((grad_bias - exact).abs() <= 48 * 2**-23 * exact).all()


@pytest.mark.full
@on_emulated
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_odd_rows_on_an_odd_number_of_sms(backend, dtype):
    """Blocks of 16-bit backward have either even or odd rows, because the words of both differ."""
    case = Case(emulator.GPUS["hopper"](3), 40, 4095, dtype, "plain")
    check(backend, case, case.tensors())


@pytest.mark.full
@pytest.mark.parametrize("rows,cols,calls", [
    (1, 26157, 400), (2, 10006, 400), (1, 85994, 400), (2, 159866, 100), (5, 294000, 40), (1, 1 << 21, 40)
])  # fmt: skip
def test_mean_is_as_precise_as_float32(backend, rows, cols, calls):
    """Without weight and bias, the mean of the output shows the error of the mean that is subtracted."""
    if not backend.is_cuda and cols > 60_000:
        pytest.skip("emulated GPUs run only the shorter rows")
    unit = 2.0**-10  # one unit in the last place of the mean, 1e4
    options = dict(mean=1e4, emphasized=False, device=backend.device)
    for number in range(calls if backend.is_cuda else 8):
        offsets = (number % 6, 0, 0, 0)
        x = random_case(rows, cols, torch.float32, "none", seed=number, offsets=offsets, **options)[0]
        y, exact = backend.layer_norm(x, (cols,), eps=1e-12).double(), x.double() - x.double().mean(1, keepdim=True)
        exact /= exact.square().mean(1, keepdim=True).sqrt()
        assert (y.mean(1) * x.double().std(1)).abs().max() < 1.25 * unit, number  # those of pieces are rounded, too
        rstd_error = (y * exact).sum(1) / exact.square().sum(1) - 1  # relative
        assert rstd_error.abs().max() < 4e-5, number  # the means of a row's parts are off by half a unit each


@pytest.mark.full
@on_cuda  # the emulated rsqrtf is exact
@pytest.mark.parametrize("rows,cols", [(9, 64), (4, 512), (4, 4096), (4, 65536), (1, 1 << 21), (8, 1 << 21)])
def test_rstd_is_accurate(backend, rows, cols):
    """The output of a row of 1 and -1, whose variance is 1, is rstd to within 0.8 units in the last place."""
    x = torch.ones(rows, cols, device=backend.device)
    x[:, 1::2] = -1
    for eps in (k * 7951 / 2**20 for k in range(400)):
        exact = (1 + eps) ** -0.5
        assert abs(backend.layer_norm(x, (cols,), eps=eps)[0, 0].item() - exact) < 0.8 * 2**-23 * exact, eps


@pytest.mark.full
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activation_of_every_argument_is_accurate(backend, activation, dtype):
    """The weight is 0, so that bias is the argument of the activation."""
    dtype = TYPES[dtype]
    huge = [-1e4, -100.0, -0.0, 100.0, 1e4] + [-1e15, 1e15] * (dtype == torch.float32)
    line = torch.linspace(-12, 12, 1 << (20 if backend.is_cuda else 14))
    z = torch.cat([line, torch.tensor(huge)]).to(backend.device, dtype).requires_grad_()
    y = backend.layer_norm(torch.randn_like(z), z.shape, torch.zeros_like(z), z, activation=activation)
    y.sum().backward()
    exact_z = z.detach().double().requires_grad_()
    if activation == "gelu":
        exact = 0.5 * exact_z * torch.erfc(-exact_z * 0.5**0.5)  # PyTorch's 1 + erf loses the digits of the tail
    else:
        exact = nn.functional.gelu(exact_z, approximate="tanh")
    exact.sum().backward()
    eps = torch.finfo(dtype).eps
    error, slope_error = (y.double() - exact).abs(), (z.grad.double() - exact_z.grad).abs()
    if dtype in (torch.float16, torch.bfloat16):  # beyond the rounding of the result
        assert (error <= 0.75 * eps * exact.abs() + 1e-6).all()
        assert (slope_error <= 0.6 * eps * exact_z.grad.abs() + 1e-5).all()
        return
    assert (error <= 2 * eps * exact.abs().clamp_min(0.5)).all()
    assert (slope_error <= 3 * eps * exact_z.grad.abs().clamp_min(1)).all()
    tail = (z > -5) & (z < 0)
    assert activation != "gelu" or (error[tail] <= 100 * eps * exact[tail].abs()).all()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows,cols", [(3, 8), (30, 33), (9, 4096), (9, 16392), (5, 20001), (3, 70000)])
def test_gelu_of_infinity_nan_and_zero(backend, rows, cols, activation, dtype):
    """GELU of infinity, -infinity, NaN and -0 is infinity, NaN, NaN and -0."""
    x, weight, bias, _ = random_case(rows, cols, TYPES[dtype], seed=cols, device=backend.device)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], device=backend.device, dtype=TYPES[dtype])
    bias[:4], bias[-1], weight[:4] = special, torch.inf, 0
    y = backend.layer_norm(x, (cols,), weight, bias, activation=activation)
    expected = torch.tensor([torch.inf, torch.nan, torch.nan, -0.0]).to(special)  # the results of z / 2 * (1 + erf)
    assert (y[:, -1] == torch.inf).all()
    torch.testing.assert_close(y[:, :4], expected.expand(rows, 4), rtol=0, atol=0, equal_nan=True)
    assert y[:, 4:-1].isfinite().all()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation,scale", [("gelu", 1.0), ("gelu_tanh", -0.5), (None, 2.0), ("gelu", 0.0)])
def test_activation_on_the_cpu_equals_pytorchs_operations(dtype, activation, scale):
    case = random_case(5, 24, TYPES[dtype])
    results, expected = (
        run_case(functools.partial(f, activation=activation, scale=scale), *case) for f in (layer_norm, chain)
    )
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
