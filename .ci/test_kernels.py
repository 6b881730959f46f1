"""The kernels of CUDA_SOURCE on emulated GPUs of a few SMs (see emulator.h), compared with float64: for machines without
a GPU, and for what a GPU does not show, threads and copies in any order.

    pytest .ci/test_kernels.py        (-n 2 with pytest-xdist)
"""

import functools
import math
import random
import sys
import typing
from pathlib import Path

import pytest
import torch
from emulator import Emulator, empty, placed
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_layernorm_inline import (  # noqa: E402, F401, I001
    AFFINE, EPS, FLOATS, FORMS, TYPES, activated, compare_with_float64, random_case, run_case, terminal, time_limit,
)  # fmt: skip

torch.set_num_threads(1)

# ============================================================================
# The table of cases
# ============================================================================

GPUS = {
    "hopper": dict(code=90, shared_bytes=227 << 10),
    "blackwell": dict(code=120, shared_bytes=99 << 10),
    "ampere": dict(code=80, shared_bytes=163 << 10),
    "ada": dict(code=89, shared_bytes=99 << 10),
    "turing": dict(code=75, shared_bytes=64 << 10),
    "refusing": dict(code=90, shared_bytes=227 << 10, refuse=True),
}


class Case(typing.NamedTuple):
    gpu: str
    sms: int
    rows: int
    cols: int
    dtype: str
    form: str
    off: str = ""
    affine: str = "both"

    def __str__(self):
        words = (f"{self.gpu}_{self.sms}", f"{self.rows}x{self.cols}", self.dtype, self.form, self.off)
        return "-".join(word for word in (*words, self.affine.replace(" ", "_")) if word not in ("", "both"))

    @property
    def epilogue(self):
        return dict(zip(("activation", "scale"), FORMS[self.form]))

    def emulator(self, **options):
        return Emulator(self.sms, **GPUS[self.gpu], **options)

    def tensors(self, seed=0, **options):
        """input, weight, bias, grad_output: those named in off begin an element after a line's beginning."""
        options.setdefault("std", 1.0)
        tensors = random_case(self.rows, self.cols, TYPES[self.dtype], self.affine, seed, device="cpu", **options)
        return tuple(placed(t, int(letter in self.off)) for t, letter in zip(tensors, "xwbd"))


# GPU and SMs, shapes, dtypes, forms, the tensors that begin one element after a line's beginning (x: input, w: weight,
# b: bias, d: grad_output; some words: each of them), affine.
TABLE = [
    # Rows in registers, on two SMs: a load a thread, four loads, four rows, two rows that are not aligned.
    ("hopper 2", "3x1 5x7 5x104 5x2056 40x64 40x256", "fp32", "plain gelu", "", "both"),
    ("hopper 2", "5x104 5x4104 40x128 40x1000", "fp16 bf16", "plain tanh", "", "both"),
    ("hopper 2", "5x33 3x2051 41x65 41x255 67x97", "fp32", "plain gelu", "", "both"),
    ("hopper 2", "5x33 3x4099 41x65 41x511 67x97", "fp16 bf16", "plain gelu", "", "both"),
    ("hopper 2", "40x64 5x768", "fp32 fp16 bf16", "tanh scale", "", "both"),
    ("hopper 2", "40x64 40x768", "fp32 bf16", "plain gelu", "x w b d xwbd", "both"),
    ("hopper 2", "41x255 5x2049", "fp16 bf16", "plain gelu", "x w b d xwbd", "both"),
    ("hopper 2", "40x96 9x256", "fp32 fp16", "plain gelu", "", "weight bias none"),
    ("hopper 2", "40x96 9x256 41x65", "fp16 bf16", "plain gelu", "", "float32 float32_weight float32_bias none"),
    ("hopper 3", "301x24 333x9", "fp32 bf16", "plain", "", "both"),
    ("hopper 2", "5x2560 67x2560 9x4096", "fp16 bf16", "plain gelu", "", "both"),  # backward: two packs of a row
    # Rows in shared memory.
    ("hopper 2", "31x9000", "fp32", "plain", "", "both none"),
    ("hopper 2", "31x16392", "fp16 bf16", "plain", "", "both float32"),
    ("ampere 2", "31x9000", "fp32", "plain", "", "both none"),
    ("ampere 2", "31x16392 31x20480", "fp16 bf16", "plain", "", "both"),
    ("ada 2", "31x10000", "fp32", "plain", "", "both"),
    # Long rows in a pipeline: a block a row, several, many; rings that wrap around.
    ("hopper 2", "5x16384 40x8200", "fp32", "plain", "", "both"),
    ("hopper 4", "5x20000 13x16392", "fp32 fp16 bf16", "plain", "", "both"),
    ("hopper 8", "5x16392 19x20008", "fp32 fp16 bf16", "plain", "", "both"),
    ("hopper 4", "3x16392 30x8192", "fp32 bf16", "plain", "b d", "both"),
    ("hopper 4", "3x16392", "fp32", "plain", "", "none weight bias"),
    ("hopper 4", "3x16392", "fp16 bf16", "plain", "", "none float32"),
    ("hopper 2", "60x6000 40x8192", "fp32 bf16", "plain", "", "both"),
    ("hopper 8", "2x65536 1x50264", "fp32 bf16", "plain", "", "both"),
    ("hopper 20", "2x163840 2x150008", "fp32 bf16", "plain", "", "both"),
    ("hopper 36", "3x280000", "fp32 fp16", "plain", "", "both"),  # more peers than a warp has lanes
    ("blackwell 4", "9x6000 5x16384 5x15008", "fp32 bf16", "plain", "", "both"),
    # The same before Hopper, where warps copy.
    ("ampere 2", "5x12288 3x16384", "fp32 fp16 bf16", "plain", "", "both"),
    ("ampere 2", "5x12288", "bf16", "plain", "", "weight float32 none"),
    ("ampere 4", "13x16392", "fp32 fp16 bf16", "plain", "", "both"),
    ("ampere 4", "3x16392 30x8192", "fp32 bf16", "plain", "b d", "both"),
    ("ampere 8", "19x20008", "fp32 fp16 bf16", "plain", "", "both"),
    ("ampere 20", "2x163840 2x150008", "fp32 bf16", "plain", "", "both"),
    ("ampere 36", "3x280000", "fp32 fp16", "plain", "", "both"),
    ("ada 2", "3x16392", "bf16", "plain", "", "weight"),
    ("ada 4", "7x10000 5x16384 5x15008", "fp32 bf16", "plain", "", "both"),
    # Rows that many SMs hold together.
    ("hopper 8", "5x200004 4x131136", "fp32", "plain", "", "both none"),
    ("hopper 8", "9x200000", "fp32", "plain", "d", "both"),
    ("hopper 16", "9x200004", "fp32", "plain", "", "weight bias"),
    # Rows spread over the GPU.
    ("turing 2", "3x9000 2x30000", "fp32", "plain gelu", "", "both"),
    ("turing 2", "3x9001", "fp32", "plain tanh", "", "both none"),
    ("turing 2", "3x16400", "fp16 bf16", "plain gelu", "", "both float32"),
    ("turing 2", "3x16401", "fp16 bf16", "plain gelu", "", "both"),
    ("hopper 2", "3x9000 5x8192", "fp32", "gelu scale", "", "both"),
    ("hopper 2", "3x16392 5x8192", "fp16 bf16", "tanh", "", "both float32"),  # 8192: registers
    ("hopper 8", "9x7001 5x16391 2x20001", "fp32 fp16 bf16", "plain gelu scale", "", "both"),
    ("hopper 4", "3x16392", "fp32 bf16", "plain gelu", "x w b d", "both"),
    ("hopper 4", "5x20001", "fp32 bf16", "plain tanh", "", "none weight bias float32"),
    ("ampere 8", "19x7001 3x16391", "fp32 fp16 bf16", "plain gelu", "", "both"),
    ("turing 2", "19x8200", "fp32 bf16", "plain", "", "both"),
    ("ampere 2", "1x70000", "fp32 bf16", "plain gelu", "w", "both"),
    ("hopper 2", "2x40000", "fp32 bf16", "plain", "", "both"),
    ("refusing 8", "5x20000", "fp32 bf16", "plain", "", "both"),
    ("refusing 8", "5x200004", "fp32", "plain", "", "both"),
    ("refusing 8", "9x8192", "fp16 bf16", "plain", "", "both"),  # registers hold them
]  # fmt: skip


def cases_of_the_table():
    for gpu, shapes, dtypes, forms, off, affines in TABLE:
        for shape in shapes.split():
            for dtype in dtypes.split():
                for form in forms.split():
                    for letters in off.split() or [""]:
                        for affine in affines.split():
                            name, sms = gpu.split()
                            rows, cols = map(int, shape.split("x"))
                            yield Case(name, int(sms), rows, cols, dtype, form, letters, affine.replace("_", " "))


CASES = list(cases_of_the_table())


every_case = pytest.mark.parametrize("case", CASES, ids=str)

# Of each room, and each way in which it takes rows, one; plain and with GELU in turns, where the room has both.
BOTH, PLAIN = ("plain", "gelu"), ("plain", "plain")
SOME = [
    Case(*gpu.split()[:1], int(gpu.split()[1]), rows, cols, dtype, forms[(i + j) % 2])
    for i, (gpu, rows, cols, dtypes, forms) in enumerate([
        ("hopper 2", 5, 104, "fp32 fp16 bf16", BOTH),
        ("hopper 2", 41, 65, "fp32 fp16 bf16", BOTH),
        ("hopper 2", 40, 256, "fp32 bf16", BOTH),
        ("hopper 2", 41, 255, "fp32", BOTH),
        ("hopper 2", 41, 511, "fp16 bf16", BOTH),
        ("hopper 2", 5, 2560, "fp32 fp16", BOTH),
        ("hopper 2", 3, 4099, "bf16", BOTH),
        ("hopper 2", 30, 9000, "fp32", PLAIN),
        ("ampere 2", 30, 9000, "fp32", PLAIN),
        ("ampere 2", 30, 16392, "fp16 bf16", PLAIN),
        ("ampere 4", 5, 16392, "fp32 fp16 bf16", PLAIN),
        ("hopper 4", 5, 16392, "fp32 fp16 bf16", PLAIN),
        ("hopper 8", 5, 20008, "fp32 fp16 bf16", PLAIN),
        ("hopper 8", 5, 20001, "fp32 fp16 bf16", BOTH),
        ("hopper 8", 9, 7001, "fp32 bf16", BOTH),
        ("hopper 8", 5, 200004, "fp32", PLAIN),
        ("turing 2", 3, 9000, "fp32", BOTH),
        ("turing 2", 3, 16401, "fp16 bf16", BOTH),
        ("turing 2", 3, 16400, "fp16 bf16", BOTH),
    ])
    for j, dtype in enumerate(dtypes.split())
]  # fmt: skip
some_cases = pytest.mark.parametrize("case", SOME, ids=str)

# ============================================================================
# Tests
# ============================================================================


def run(case, tensors, seed=0, eps=EPS, wanted=(1, 1, 1)):
    """[output, grad_input, grad_weight, grad_bias]; the seed is that of all that happens by chance on the GPU."""
    return run_case(functools.partial(case.emulator(seed=seed).layer_norm, **case.epilogue), *tensors, eps, wanted)


def same_bits(a, b):
    return all(
        x is y or torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b)
    )


@every_case
def test_values(case):
    """As near to float64 as they have to be, and the same bits with threads and copies in another order."""
    tensors = case.tensors(seed=CASES.index(case))
    results = run(case, tensors, seed=1)
    compare_with_float64([(results, tensors)], **case.epilogue)
    assert same_bits(results, run(case, tensors, seed=2))


def random_case_of(number):
    """A call of any kind."""
    rng = random.Random(number)
    gpu, sms = rng.choice(["hopper", *GPUS]), rng.randint(2, 9)
    cols = int(rng.choice([300, 9000, 70000]) ** rng.random())
    cols = rng.choice([cols, (cols + 7) // 8 * 8])
    rows = max(1, int(min(500, 2e5 / cols) ** rng.random()))
    dtype, form = rng.choice(list(TYPES)), rng.choice(list(FORMS))
    affine = rng.choice(AFFINE if TYPES[dtype].itemsize == 2 else AFFINE[:4])
    off = "".join(letter for letter in "xwbd" if rng.random() < 0.15)
    return Case(gpu, sms, rows, cols, dtype, form, off, affine)


@pytest.mark.parametrize("case", [random_case_of(number) for number in range(150)], ids=str)
def test_values_of_any_call(case):
    tensors = case.tensors()
    compare_with_float64([(run(case, tensors), tensors)], **case.epilogue)


def test_every_kernel_is_launched():
    """By the cases of the table and the convolution's, all that the library has."""
    launched = set()
    for case in CASES:
        gpu = case.emulator(dry=True)
        shapes = (case.rows, case.cols), (case.cols,), (case.cols,), (case.rows, case.cols)
        dtype = TYPES[case.dtype]
        affine = torch.float32 if "float32" in case.affine else dtype
        tensors = [empty(s, d, int(o in case.off)) for s, d, o in zip(shapes, (dtype, affine, affine, dtype), "xwbd")]
        run_case(functools.partial(gpu.layer_norm, **case.epilogue), *tensors)
        launched |= gpu.kernels
    for form in FORMS_34:
        gpu = Emulator(4, dry=True)
        gpu.convolution(*convolution_case((1, 1, 1), form), eps=EPS, tf32=form == "tf32")
        launched |= gpu.kernels
    assert gpu.all_kernels() - launched == set()


@some_cases
def test_only_the_gradients_asked_for(case):
    tensors = case.tensors()
    for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)):
        compare_with_float64([(run(case, tensors, wanted=wanted), tensors)], **case.epilogue)


@pytest.mark.parametrize(
    "case,value",
    [
        (Case("hopper", 1, 1100, 2056, "fp32", "plain"), 0.931),
        (Case("ada", 2, 600, 4104, "fp32", "plain"), 0.847),  # two blocks share all rows
    ],
    ids=str,
)
def test_gradients_of_many_rows(case, value):
    """Of a constant grad_output, rows added up one by one would be off by 136 and 74 roundings."""
    x, weight, bias, dy = case.tensors(mean=0.0, telling=False)
    dy.fill_(value)
    grad_bias = run(case, (x, weight, bias, dy))[3]
    exact = case.rows * dy[0, 0].double()
    assert ((grad_bias - exact).abs() <= 48 * 2**-23 * exact).all()


@some_cases
def test_eps(case):
    tensors = case.tensors()
    for eps in (0.0, 1e-5, 1e10):
        compare_with_float64([(run(case, tensors, eps=eps), tensors)], eps, **case.epilogue)


@some_cases
def test_a_bad_row_stays_alone(case):
    x, weight, bias, dy = case.tensors()
    bad_x, bad_dy, row, col = x.clone(), dy.clone(), case.rows // 2, case.cols // 3
    bad_x[row, case.cols // 2], bad_x[-1, case.cols // 2] = math.nan, math.inf
    bad = torch.zeros(case.rows, dtype=torch.bool)
    bad[[row, -1]] = True
    for t in run(case, (placed(bad_x), weight, bias, dy))[:2]:
        assert t[bad].isnan().all() and t[~bad].isfinite().all()

    bad_dy[row, col] = math.nan
    bad[-1] = False
    y, dx, *sums = run(case, (x, weight, bias, placed(bad_dy)))
    assert y.isfinite().all() and dx[bad].isnan().all() and dx[~bad].isfinite().all()
    for t in sums:
        assert t[col].isnan() and t.isfinite().sum() == case.cols - 1


LARGE_MEANS = {"fp32": [(1e4, 1.0), (1e6, 0.1)], "fp16": [(1e3, 1.0)], "bf16": [(1e4, 100.0)]}


@some_cases
def test_large_mean(case):
    for mean, std in LARGE_MEANS[case.dtype]:
        tensors = case.tensors(mean=mean, std=std, telling=False)
        compare_with_float64([(run(case, tensors, eps=1e-5), tensors)], 1e-5, **case.epilogue)


@pytest.mark.parametrize("case", [case for case in SOME if case.dtype in ("fp32", "bf16")], ids=str)
def test_huge_mean(case):
    """1e20, whose square float32 does not have: numbers around it, rows with some numbers next to it."""
    tensors = case.tensors(mean=1e20, std=1e15, telling=False)
    if case.dtype == "fp32":
        compare_with_float64([(run(case, tensors, eps=1e-5), tensors)], 1e-5, **case.epilogue)
    tensors[0].fill_(1e20)[:, ::5000] *= 1 + 2**-7
    compare_with_float64([(run(case, tensors, eps=1e-5), tensors)], 1e-5, **case.epilogue)


@some_cases
def test_outliers_where_a_row_is_sampled(case):
    """Means are then distances from an outlier (see reference_of), and parts of a row without columns are far from the rest."""
    tensors = case.tensors()
    tensors[0][:, [case.cols * 5 // 13, case.cols // 2, case.cols * 8 // 13]] = 30
    compare_with_float64([(run(case, tensors), tensors)], **case.epilogue)


# Sums of float16, of 11 bits, have an error from 8192 columns on.
ROUNDED_SUMS = [
    Case("hopper", 2, 3, 16384, "fp16", "plain"),
    Case("turing", 2, 3, 14335, "fp16", "plain"),
    Case("ampere", 2, 3, 65544, "fp16", "plain"),
    Case("hopper", 8, 3, 60000, "fp16", "plain"),
    Case("turing", 2, 3, 70003, "fp16", "plain"),
]


@pytest.mark.parametrize("case", SOME + ROUNDED_SUMS, ids=str)
@pytest.mark.parametrize("off", ["", "x"])
def test_constant_rows_give_bias(case, off):
    """To the bit, where rstd is 10^6; so large that float32 does not have mean * rstd, too."""
    values = (1.0, 1 / 3, 100.0, 1234.567, -3.7e5, 1e20, -7.7e29, 1e33)
    if case.dtype == "fp16":
        values = (1.0, 1 / 3, 2047.0, -1234.567, 16376.0, 65504.0)
    case = case._replace(off=off)
    x, weight, bias, dy = case.tensors()
    for first in range(0, len(values), case.rows):
        for row in range(case.rows):
            x[row] = values[(first + row) % len(values)]
        for scale in (1.0, 2.0):
            function = functools.partial(case.emulator().layer_norm, scale=scale)
            y, dx, grad_weight, _ = run_case(function, x, weight, bias, dy, 1e-12)
            assert (y == scale * bias).all() and not grad_weight.any()
            assert dx.isfinite().all() or case.dtype == "fp16"


@pytest.mark.parametrize("case", [case for case in SOME if case.dtype != "fp16"], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(5, 6)], ids=["everywhere", "one number"])
def test_a_variance_that_overflows(case, where):
    """Is infinite, and rows are 0 before weight and bias: also where the mean's own rounding is multiplied by it."""
    large = 1e200 if case.dtype == "fp64" else 1e28
    x, weight, bias, dy = case.tensors()
    x[:, where] *= large
    y, dx, grad_weight, _ = run(case, (x, weight, bias, dy), eps=1e-5)
    expected = case.epilogue["scale"] * activated(bias.double(), case.epilogue["activation"])[0]
    assert ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    assert not dx.any() and not grad_weight.any()


@pytest.mark.parametrize("case", [case for case in SOME if case.dtype in ("fp32", "bf16")], ids=str)
def test_sums_that_float32_does_not_have(case):
    """Are NaN in the end, or right, but nothing between."""
    x, weight, bias, dy = case.tensors()
    y = run(case, (x.fill_(2e36), weight, bias, dy), eps=1e-5)[0]
    expected = case.epilogue["scale"] * activated(bias.double(), case.epilogue["activation"])[0]
    assert (y.isnan() | ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-6)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cols", [7, 9000])
def test_no_rows(cols, dtype):
    x, weight, bias = empty((0, cols), dtype), empty((cols,), dtype), empty((cols,), torch.float32)
    assert not any(t.any() for t in run_case(Emulator(2).layer_norm, x, weight, None, x)[2:3])
    if dtype.itemsize == 2:
        assert not any(t.any() for t in run_case(Emulator(2).layer_norm, x, None, bias, x)[3:])


# ---- Convolution ----

FORMS_34 = {"tf32": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def convolution_case(places, form, affine="both", off=0):
    """input of (batch, depth, height), conv_weight, conv_bias, weight, bias."""
    dtype, generator = FORMS_34[form], torch.Generator().manual_seed(sum(places))
    batch, depth, height = places

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, conv_weight = normal(batch, 32, depth, height, 32), normal(32, 64, 4, 4, 4).mul_(0.1)
    affine_dtype = torch.float32 if affine == "float32" else dtype
    conv_bias, weight, bias = normal(64), normal(64, dtype=affine_dtype), normal(64, dtype=affine_dtype)
    if affine == "none":
        conv_bias = weight = bias = None
    return tuple(map(placed, (x, conv_weight, conv_bias, weight, bias)))


def to_tf32(t):
    bits = t.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def convolution_in(number, x, conv_weight, conv_bias, weight, bias, eps, scale, rounded=lambda t: t):
    """(output, distances from the mean, rstd), computed in a dtype, rounded after each of PyTorch's operations."""
    x, conv_weight, conv_bias, weight, bias = (
        t if t is None else t.to(number) for t in (x, conv_weight, conv_bias, weight, bias)
    )
    y = rounded(nn.functional.conv_transpose3d(x, conv_weight, None, 2, 1))
    if conv_bias is not None:
        y = rounded(y + conv_bias.view(-1, 1, 1, 1))
    distances = y - y.mean(-1, keepdim=True)
    rstd = (distances.square().mean(-1) + eps).rsqrt()
    z = rounded(nn.functional.layer_norm(y, (64,), weight, bias, eps))
    return rounded(rounded(activated(z, "gelu")[0]) * scale), rounded(distances), rstd


@pytest.mark.parametrize("for_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", FORMS_34)
@pytest.mark.parametrize(
    "sms,code,places,affine",
    [
        (4, 90, (1, 1, 1), "both"),
        (4, 90, (2, 1, 5), "both"),
        (4, 80, (2, 1, 5), "both"),
        (8, 90, (1, 2, 4), "none"),
        (13, 90, (2, 1, 9), "float32"),
        (13, 80, (2, 1, 9), "float32"),
        (4, 80, (1, 3, 3), "both"),
    ],
)
def test_convolution(sms, code, places, affine, form, for_backward):
    """No further from float64 than 1.5 times PyTorch's operations, plus rounding; the same bits in another order."""
    dtype, eps, scale = FORMS_34[form], 0.1, 0.5
    tensors = convolution_case(places, form, affine)
    exact = convolution_in(torch.float64, *tensors, eps, scale)
    if form == "tf32":
        theirs = convolution_in(torch.float32, *map(to_tf32, tensors[:2]), *tensors[2:], eps, scale)
    elif form == "float32":
        theirs = convolution_in(torch.float32, *tensors, eps, scale)
    else:
        theirs = convolution_in(torch.float64, *tensors, eps, scale, lambda t: t.to(dtype).double())
    options = dict(eps=eps, scale=scale, tf32=form == "tf32", for_backward=for_backward)
    y, rstd = Emulator(sms, code=code, seed=1).convolution(*tensors, **options)
    pairs = [(y, 1, dtype), (rstd, 2, torch.float32)] if for_backward else [(y, 0, dtype)]
    for mine, i, rounded_to in pairs:
        error, allowed = ((t.double() - exact[i]).abs().max().item() for t in (mine, theirs[i]))
        largest = max(exact[i].abs().max().item(), 1)
        rounding = max(4 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(rounded_to).eps) * largest
        assert error <= 1.5 * allowed + rounding, (error, allowed)
    if not for_backward:
        assert torch.equal(y, Emulator(sms, code=code, seed=2).convolution(*tensors, **options)[0])


# As int32: NaN as arithmetic on a GPU makes it, the same negated, float("nan"), infinities.
NOT_FINITE = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000]


@pytest.mark.parametrize("for_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", FORMS_34)
@pytest.mark.parametrize("where", ["input", "conv_weight", "conv_bias"])
@pytest.mark.parametrize("code", [90, 80])
def test_convolution_of_nan(code, where, form, for_backward):
    """Each in another input of the batch, or for another channel: rows are NaN where PyTorch's are, and no others."""
    x, conv_weight, conv_bias, *affine = convolution_case((6, 1, 1), form)
    numbers = torch.tensor(NOT_FINITE, dtype=torch.int32).view(torch.float32)
    if x.dtype.itemsize == 2:  # their first halves
        numbers = numbers.view(torch.bfloat16)[1::2] if form == "bfloat16" else numbers.half()
    places = {
        "input": x[:5, 3, 0, 0, 7],
        "conv_weight": conv_weight[3, :50:10, 1, 2, 0],
        "conv_bias": conv_bias[:50:10],
    }
    places[where].copy_(numbers)
    tensors = x, conv_weight, conv_bias, *affine
    expected = convolution_in(torch.float64, *tensors, EPS, 1)[0].isnan()
    assert expected.any() and not expected.all()
    y, rstd = Emulator(4, code=code).convolution(*tensors, eps=EPS, tf32=form == "tf32", for_backward=for_backward)
    assert torch.equal((y if rstd is None else y * rstd.unsqueeze(-1)).isnan(), expected)
