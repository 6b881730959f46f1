"""The float64 reference, how far from it a result may be, and random inputs in which an error cannot hide.

case = random_case(rows, cols, dtype)                       input, weight, bias, grad_output
results = run_case(layer_norm, *case)                       output and gradients
compare_with_float64([(results, case)])                     asserts
assert_close_to_float64(backend, case)                      all three, into memory full of NaN
assert_no_worse(mine, theirs, exact)                        within k times PyTorch's error, for what has no bound
"""

import functools
import math

import torch
from torch import nn

FIRST_SEED = 0  # conftest.py sets it
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
AFFINE = ["both", "weight", "bias", "none", "float32", "float32 weight", "float32 bias"]  # float32: with 16-bit input
EPS = 0.1  # of value tests: next to a variance of 1 a kernel that drops it, or has 1e-5 built in, is far off
LINE_BYTES = 128  # what a GPU's memory is allocated in begins on a cache line


# ---- Random inputs ----


def placed(values, offset=0, dtype=None):
    """A copy that begins so many elements after a cache line, with NaN beside it up to where its last 16 bytes end: a
    kernel may read that, but not use it. None of None."""
    if values is None:
        return None
    dtype = dtype or values.dtype
    count, line, unit = values.numel(), LINE_BYTES // dtype.itemsize, 16 // dtype.itemsize
    buffer = torch.full(
        (line + (count + offset + unit - 1) // unit * unit,), math.nan, device=values.device, dtype=dtype
    )
    first = -buffer.data_ptr() % LINE_BYTES // dtype.itemsize + offset
    return buffer[first : first + count].view(values.shape).copy_(values)


def random_case(
    rows, cols, dtype, affine="both", seed=0, mean=3.0, std=1.0, offsets=(0, 0, 0, 0), telling=True, device="cpu"
):
    """input, weight, bias, grad_output; each starts so many elements into its buffer (offsets: in this order).

    Telling numbers, in which an error cannot hide: input has a mean; weight is around 1 and grad_output is not
    orthogonal to 1 nor to normalized input, so that each mean of backward counts; the last or first number of a row
    has a fifth of its variance, so that it counts in a row of any length; the last row has a part of grad_weight and
    grad_bias that does not vanish among many rows.
    """
    generator = torch.Generator(device).manual_seed(FIRST_SEED + seed)

    def normal(n):
        return torch.randn(n, generator=generator, device=device)

    x = normal(rows * cols).view(rows, cols)
    if telling:
        most = 32 if dtype == torch.float16 else math.inf
        for row in range(min(8, max(1, rows - 1))):
            x[row, 0 if row % 3 == 1 else -1] = min(0.5 * cols**0.5, most) * (-1) ** row
    dy = normal(rows * cols).view(rows, cols).mul_(0.5).add_(0.5).add_(x, alpha=0.5)
    if telling:
        dy[-1] *= max(1, min(rows / 4, 4000 if dtype == torch.float16 else math.inf))  # float16 ends at 65504
    x = placed(x.mul_(std).add_(mean), offsets[0], dtype)
    dy = placed(dy, offsets[3], dtype)
    affine_dtype = torch.float32 if "float32" in affine else dtype
    weight, bias = normal(cols).mul_(0.5).add_(1), normal(cols)
    weight = placed(weight, offsets[1], affine_dtype) if affine.split()[-1] in ("both", "weight", "float32") else None
    bias = placed(bias, offsets[2], affine_dtype) if affine.split()[-1] in ("both", "bias", "float32") else None
    return x, weight, bias, dy


def run_case(function, x, weight, bias, dy, eps=EPS, wanted=(1, 1, 1)):
    """[output, grad_input, grad_weight, grad_bias] (None where there is none, or is not wanted)."""
    given = zip((x, weight, bias), wanted)
    leaves = [None if t is None else t.detach().requires_grad_(bool(want)) for t, want in given]
    y = function(leaves[0], x.shape[-1:], leaves[1], leaves[2], eps)
    y.backward(dy)
    for t, want in zip(leaves, wanted):
        assert t is None or (t.grad is not None) == bool(want), "another gradient than asked for"
    return [y.detach()] + [None if t is None else t.grad for t in leaves]


# PyTorch's operations of the activations.
ACTIVATIONS = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def chain(x, normalized_shape, weight, bias, eps, activation=None, scale=1.0):
    """What layer_norm computes, as PyTorch's operations."""
    y = nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
    return (ACTIVATIONS[activation](y) if activation else y) * scale


def activated(z, activation):
    """activation(z) and its derivative, for float64; PyTorch's gelu, by 1 + erf, loses the digits of the tail."""
    if activation is None:
        return z, torch.ones_like(z)
    if activation == "gelu":
        below = 0.5 * torch.erfc(-z * 0.5**0.5)
        return z * below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    assert activation == "gelu_tanh"
    inner, slope = (math.sqrt(8 / math.pi) * t for t in (z + 0.044715 * z**3, 1 + 0.134145 * z * z))
    s = torch.sigmoid(inner)
    return z * s, s + z * slope * s * torch.sigmoid(-inner)


ROUNDINGS = 64  # of float32, one after the other, that a result may have gone through


def exact_parts(x, weight, bias, dy, eps, activation=None, scale=1.0):
    """Yields (name, rows, exact, error): output and grad_input of some rows at a time, last grad_weight and grad_bias,
    in float64, and by how much float32 arithmetic can be off them, element by element:

        xhat    64 roundings of itself and of the row's spread, which is 1; 16 of the mean, in units of the spread
        z       xhat's times weight, 64 of itself and of bias
        output  z's times the largest slope of GELU, 1.13; of 16 bits also what the polynomial for its tail leaves
        g       the gradient of z: z's times the largest curvature, 0.8, and 64 of grad_output; rounded to 16 bits
                where there is an activation or a scale, as between PyTorch's operations
        sums    those of the summands, and 64 of their absolute sum: of each row those of grad_input, of each column
                grad_weight and grad_bias
    """
    dtype, double = x.dtype, torch.float64
    rounding = torch.finfo(double if dtype == double else torch.float32).eps
    many, is_half = ROUNDINGS * rounding, dtype.itemsize == 2
    w = torch.ones((), dtype=double, device=x.device) if weight is None else weight.double()
    b = torch.zeros((), dtype=double, device=x.device) if bias is None else bias.double()
    grad_weight, grad_bias, weight_error, bias_error = x.new_zeros((4, x.shape[1]), dtype=double)
    step = max(1, (1 << 22) // x.shape[1])  # rows at a time: some 20 numbers of 8 bytes each
    for rows in (slice(first, first + step) for first in range(0, x.shape[0], step)):
        part = x[rows].double()
        mean = part.mean(1, keepdim=True)
        distances = part - mean
        rstd = (distances.square().mean(1, keepdim=True) + eps).rsqrt()
        xhat = distances * rstd
        xhat_error = many * (xhat.abs() + 1) + 16 * rounding * mean.abs() * rstd
        z = xhat * w + b
        z_error = w.abs() * xhat_error + many * (z.abs() + b.abs())
        y, slope = activated(z, activation)
        tail_error = 2.2e-4 * activated(-z.abs(), activation)[0].abs() if is_half and activation == "gelu" else 0
        yield "output", rows, scale * y, abs(scale) * (1.13 * z_error + tail_error)

        dz = dy[rows].double() * scale
        g, g_error = dz * slope, torch.zeros_like(z)
        if activation or scale != 1:
            g_error = dz.abs() * (0.8 * z_error * bool(activation) + many)
            if is_half:
                g_error += torch.finfo(dtype).eps * (0.505 * g.abs() + torch.finfo(dtype).tiny)
        wdy, wdy_error = g * w, g_error * w.abs()
        c1, c2 = wdy.mean(1, keepdim=True), (wdy * xhat).mean(1, keepdim=True)
        product_error = wdy_error * xhat.abs() + wdy.abs() * xhat_error
        c1_error = (wdy_error + many * wdy.abs()).mean(1, keepdim=True)
        c2_error = (product_error + many * (wdy * xhat).abs()).mean(1, keepdim=True)
        error = wdy_error + many * wdy.abs() + c1_error + (xhat.abs() + xhat_error) * c2_error + xhat_error * c2.abs()
        yield "grad_input", rows, rstd * (wdy - c1 - xhat * c2), rstd * error

        grad_weight += (g * xhat).sum(0)
        grad_bias += g.sum(0)
        weight_error += (g_error * xhat.abs() + g.abs() * xhat_error + many * (g * xhat).abs()).sum(0)
        bias_error += (g_error + many * g.abs()).sum(0)
    yield "grad_weight", slice(None), grad_weight, weight_error
    yield "grad_bias", slice(None), grad_bias, bias_error


NAMES = ("output", "grad_input", "grad_weight", "grad_bias")
SUMS = NAMES[1:]


def compare_with_float64(runs, eps=EPS, activation=None, scale=1.0, luck=NAMES):
    """Asserts that results are as near to float64 as they have to be. runs: pairs of what run_case and random_case give.

    Every element is within what float32 arithmetic can be off (exact_parts), of 16 bits half a unit in the last place
    more, for the rounding at the end: 0.505, as the rounded number is itself off.
    Beyond that, where PyTorch computes in the same precision (float32), the largest error of all cases is at most 1.5
    times PyTorch's plus one unit in the last place of the largest element. Where few numbers decide, PyTorch's error is
    a matter of luck: sums over few rows, the largest element of telling numbers. So an eighth of the first bound will
    do, too, for what luck names; tests of accuracy (luck=SUMS) do not allow it for output.
    """
    largest = {name: [0.0, 0.0, 0.0, True] for name in NAMES}  # error, PyTorch's, |exact|; whether an eighth would do
    for results, (x, weight, bias, dy) in runs:
        same_precision = x.dtype == torch.float32
        ours = theirs = dict(zip(NAMES, results))
        if same_precision:
            pytorch = functools.partial(chain, activation=activation, scale=scale)
            theirs = dict(zip(NAMES, run_case(pytorch, x, weight, bias, dy, eps)))
        for name, rows, exact, error in exact_parts(x, weight, bias, dy, eps, activation, scale):
            if ours[name] is None:
                continue
            mine = ours[name][rows]
            info = torch.finfo(mine.dtype)
            there = exact.abs() + error < 0.9 * info.max  # what its dtype has no number for may be infinite
            assert mine[there].isfinite().all(), f"{name} has elements that are not finite"
            off, size = (torch.where(there, t, 0) for t in ((mine.double() - exact).abs(), exact.abs()))
            allowed = error + info.tiny * info.eps
            if mine.dtype.itemsize == 2:
                allowed = allowed + 0.505 * info.eps * size
            if not (off <= allowed).all():
                at = (off - allowed).argmax().item()
                got, right, bound = (t.flatten()[at].item() for t in (mine, exact, allowed.expand_as(off)))
                row, col = divmod(at, x.shape[1])
                place = f"row {row + rows.start}, column {col}" if name in NAMES[:2] else f"column {col}"
                raise AssertionError(
                    f"{name}, {place}: {got:.6e} instead of {right:.6e}, which may be off by {bound:.1e}"
                )
            if same_precision:
                their = torch.where(there, (theirs[name][rows].double() - exact).abs(), 0).nan_to_num()
                new = [t.max().item() for t in (off, their, size)]
                largest[name][:3] = [max(pair) for pair in zip(new, largest[name])]
                largest[name][3] &= bool((off <= allowed / 8).all())
    for name, (error, allowed, size, an_eighth) in largest.items():
        unit = torch.finfo(torch.float32).eps * size
        assert error <= 1.5 * allowed + unit or (an_eighth and name in luck), (
            f"{name}: error {error:.3e}, PyTorch's {allowed:.3e}, unit in the last place {unit:.1e}"
        )


def assert_close_to_float64(backend, *cases, eps=EPS, wanted=(1, 1, 1), luck=NAMES, **epilogue):
    """Runs cases, what random_case gives, into memory full of NaN, and compares."""
    runs = []
    for case in cases:
        with backend.poisoned(4 * case[0].nbytes + (1 << 26)):
            results = run_case(functools.partial(backend.layer_norm, **epilogue), *case, eps, wanted)
        runs.append((results, case))
    compare_with_float64(runs, eps, luck=luck, **epilogue)


def same_bits(a, b):
    """Whether two lists of tensors (or None) are the same to the bit, NaNs too."""
    return all(
        x is y or torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b)
    )


def assert_no_worse(mine, theirs, exact, factor=1.5, rounding=0.0, name=""):
    """The largest error is at most factor times PyTorch's, plus rounding next to the largest element."""
    error, allowed = ((t.double() - exact).abs().max().item() for t in (mine, theirs))
    bound = factor * allowed + rounding * exact.abs().max().item()
    assert error <= bound, f"{name}: error {error:.3e}, PyTorch's {allowed:.3e}, at most {bound:.3e}"
