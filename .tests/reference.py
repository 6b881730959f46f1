"""The float64 reference, error bounds, and random inputs that expose bugs."""

import functools
import math

import torch
from torch import nn

FIRST_SEED = 0  # conftest.py sets it
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Which of weight and bias exist, in input's dtype, or in float32 for 16-bit input.
AFFINE = ["both", "weight", "bias", "none", "float32", "float32 weight", "float32 bias"]
EPS = 0.1  # large enough, for a variance of 1, that a kernel that ignores eps or uses 1e-5 gives wrong results
LINE_BYTES = 128  # a cache line; every allocation of GPU memory starts on one


def placed(values, offset=0, dtype=None):
    """Returns a copy that starts `offset` elements after the beginning of a cache line; None for None.

    The memory before the copy, and after it up to the next 16-byte boundary, is NaN. Kernels may read it.
    """
    if values is None:
        return None
    dtype = dtype or values.dtype
    count, line, unit = values.numel(), LINE_BYTES // dtype.itemsize, 16 // dtype.itemsize
    size = line + (count + offset + unit - 1) // unit * unit
    buffer = torch.full((size,), math.nan, device=values.device, dtype=dtype)
    first = -buffer.data_ptr() % LINE_BYTES // dtype.itemsize + offset
    return buffer[first : first + count].view(values.shape).copy_(values)


def random_case(
    rows, cols, dtype, affine="both", seed=0, mean=3.0, std=1.0, offsets=(0, 0, 0, 0), emphasized=True, device="cpu"
):
    """Returns random input, weight, bias and grad_output. offsets: elements that each starts after a cache line begins.

    The numbers are chosen so that a bug changes the results measurably: grad_output is orthogonal neither to 1 nor to
    the normalized input, so that both means of backward matter. With `emphasized`, so do single numbers and rows: in up
    to eight rows, the last or first number has a fifth of the row's variance, whatever the length of the row, and the
    last row's part of grad_weight and grad_bias is visible among many rows.
    """
    generator = torch.Generator(device).manual_seed(FIRST_SEED + seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    x = normal(rows, cols)
    if emphasized:
        most = 32 if dtype == torch.float16 else math.inf
        for row in range(min(8, max(1, rows - 1))):
            x[row, 0 if row % 3 == 1 else -1] = min(0.5 * cols**0.5, most) * (-1) ** row
    dy = normal(rows, cols).mul_(0.5).add_(0.5).add_(x, alpha=0.5)
    if emphasized:
        dy[-1] *= max(1, min(rows / 4, 4000 if dtype == torch.float16 else math.inf))  # the largest float16 is 65504
    x = placed(x.mul_(std).add_(mean), offsets[0], dtype)
    dy = placed(dy, offsets[3], dtype)
    weight, bias = normal(cols).mul_(0.5).add_(1), normal(cols)
    kind, affine_dtype = affine.split()[-1], torch.float32 if "float32" in affine else dtype
    weight = placed(weight, offsets[1], affine_dtype) if kind in ("both", "weight", "float32") else None
    bias = placed(bias, offsets[2], affine_dtype) if kind in ("both", "bias", "float32") else None
    return x, weight, bias, dy


def run_case(function, x, weight, bias, dy, eps=EPS, wanted=(1, 1, 1)):
    """Returns [output, grad_input, grad_weight, grad_bias]. Gradients that do not exist or are not wanted are None."""
    given = zip((x, weight, bias), wanted)
    leaves = [None if t is None else t.detach().requires_grad_(bool(want)) for t, want in given]
    y = function(leaves[0], x.shape[-1:], leaves[1], leaves[2], eps)
    y.backward(dy)
    for t, want in zip(leaves, wanted):
        assert t is None or (t.grad is not None) == bool(want), "exactly the wanted gradients must be set"
    return [y.detach()] + [None if t is None else t.grad for t in leaves]


ACTIVATIONS = {"gelu": nn.functional.gelu, "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh")}


def chain(x, normalized_shape, weight, bias, eps, activation=None, scale=1.0):
    """Computes the function of layer_norm with PyTorch's operations."""
    y = nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
    return (ACTIVATIONS[activation](y) if activation else y) * scale


def formula(x, weight, bias, activation=None, scale=1.0, dims=(-1,), eps=EPS):
    """Computes the function of layer_norm. PyTorch's layer_norm has wrong derivatives of third order and in vmap."""
    distance = x - x.mean(dims, keepdim=True)
    y = distance * (distance.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (ACTIVATIONS[activation](y) if activation else y) * scale


def activated(z, activation):
    """Returns activation(z) and its derivative. PyTorch's gelu computes 1 + erf, which cancels for very negative z."""
    if activation is None:
        return z, torch.ones_like(z)
    if activation == "gelu":
        below = 0.5 * torch.erfc(-z * 0.5**0.5)
        return z * below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    assert activation == "gelu_tanh"
    inner, slope = (math.sqrt(8 / math.pi) * t for t in (z + 0.044715 * z**3, 1 + 0.134145 * z * z))
    s = torch.sigmoid(inner)
    return z * s, s + z * slope * s * torch.sigmoid(-inner)


def exact_parts(x, weight, bias, dy, eps, activation=None, scale=1.0):
    """Yields (name, rows, exact, error): float64 results, and the largest error that float32 arithmetic can make.

    Yields output and grad_input for some rows at a time, then grad_weight and grad_bias. A rounding of x is the float32
    epsilon times |x|. The error of each intermediate result is the sum of:

        xhat    64 roundings of xhat and of 1, the row's standard deviation; 16 of the mean divided by it
        z       (input of the activation) the error of xhat times weight; 64 roundings of z and of bias
        output  the error of z times 1.13, the largest slope of GELU; for 16-bit GELU, that of its tail's polynomial
        g       (gradient of z) the error of z times 0.8, the largest curvature of GELU; 64 roundings of grad_output;
                one rounding to 16 bits, which PyTorch's operations have as well
        sums    the errors of the terms, and 64 roundings of the sum of their absolute values
    """
    dtype, double = x.dtype, torch.float64
    rounding = torch.finfo(double if dtype == double else torch.float32).eps
    many, is_half = 64 * rounding, dtype.itemsize == 2
    w = torch.ones((), dtype=double, device=x.device) if weight is None else weight.double()
    b = torch.zeros((), dtype=double, device=x.device) if bias is None else bias.double()
    grad_weight, grad_bias, weight_error, bias_error = x.new_zeros((4, x.shape[1]), dtype=double)
    step = max(1, (1 << 22) // x.shape[1])  # limits memory: about 20 float64 tensors have this many rows
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
    """Asserts that results are accurate. runs: a list of pairs (result of run_case, result of random_case).

    First, every element must be within the error of float32 arithmetic (see exact_parts). 16-bit results may be off by
    half a unit in the last place more. (The factor is 0.505, because the rounded number already has an error.)

    Second, the largest error of all runs must be at most 1.5 times the largest error of PyTorch's float32 results, plus
    one unit in the last place of the largest element. PyTorch's error may be small by chance if few numbers determine
    it, as in sums over few rows. Results that are named in `luck` therefore pass as well if every error is at most an
    eighth of the first bound. Tests of accuracy pass luck=SUMS, so that this exception does not apply to output.
    """
    largest = {name: [0.0] * 4 for name in NAMES}  # error, its share of the first bound, PyTorch's error, |exact|
    for results, (x, weight, bias, dy) in runs:
        results = pytorch = dict(zip(NAMES, results))
        if x.dtype == torch.float32:
            function = functools.partial(chain, activation=activation, scale=scale)
            pytorch = dict(zip(NAMES, run_case(function, x, weight, bias, dy, eps)))
        for name, rows, exact, error in exact_parts(x, weight, bias, dy, eps, activation, scale):
            if results[name] is None:
                continue
            result = results[name][rows]
            info = torch.finfo(result.dtype)
            in_range = exact.abs() + error < 0.9 * info.max  # other elements may overflow to infinity
            assert result[in_range].isfinite().all(), f"{name} has elements that are not finite"
            off, pytorch_off = (
                torch.where(in_range, (t.double() - exact).abs(), 0) for t in (result, pytorch[name][rows])
            )
            size = torch.where(in_range, exact.abs(), 0)
            allowed = error + info.tiny * info.eps + 0.505 * info.eps * size * (result.dtype.itemsize == 2)
            share = off / allowed
            if not (share <= 1).all():
                worst = share.argmax().item()
                row, col = divmod(worst, x.shape[1])
                got, right, bound = (t.flatten()[worst].item() for t in (result, exact, allowed))
                raise AssertionError(
                    f"{name}, row {row + (rows.start or 0)}, column {col}: "
                    f"got {got:.6e}, expected {right:.6e} with an error of at most {bound:.1e}"
                )
            if x.dtype == torch.float32:
                new = [t.max().item() for t in (off, share, pytorch_off.nan_to_num(), size)]
                largest[name] = [max(pair) for pair in zip(new, largest[name])]
    for name, (error, share, pytorch_error, size) in largest.items():
        bound = 1.5 * pytorch_error + torch.finfo(torch.float32).eps * size
        assert error <= bound or (share <= 1 / 8 and name in luck), (
            f"{name}: error {error:.3e}, PyTorch's error {pytorch_error:.3e}, allowed {bound:.3e}"
        )


def assert_close_to_float64(backend, *cases, eps=EPS, wanted=(1, 1, 1), luck=NAMES, **epilogue):
    """Runs cases (results of random_case) in memory that is full of NaN, and compares the results with float64."""
    runs = []
    for case in cases:
        with backend.poisoned(4 * case[0].nbytes + (1 << 26)):
            results = run_case(functools.partial(backend.layer_norm, **epilogue), *case, eps, wanted)
        runs.append((results, case))
    compare_with_float64(runs, eps, luck=luck, **epilogue)


def same_bits(a, b):
    """Returns True if two lists of tensors (or None) are equal bit by bit, including NaNs."""
    return all(x is y or torch.equal(*(t.contiguous().view(torch.uint8) for t in (x, y))) for x, y in zip(a, b))


def assert_no_worse(result, pytorch, exact, factor=1.5, rounding=0.0, name=""):
    """Asserts that the largest error is at most `factor` times PyTorch's plus `rounding` times the largest |exact|."""
    error, pytorch_error = ((t.double() - exact).abs().max().item() for t in (result, pytorch))
    bound = factor * pytorch_error + rounding * exact.abs().max().item()
    assert error <= bound, f"{name}: error {error:.3e}, PyTorch's error {pytorch_error:.3e}, allowed {bound:.3e}"
