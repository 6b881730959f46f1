"""Tests of LAYERNORM_INLINE_BATCH_INVARIANT=1: forward gives a row the same bits in every batch."""

import emulator
import pytest
import torch
from cases import FORMS, TYPES
from processes import run_here
from reference import AFFINE, EPS, compare_with_float64, random_case, same_bits
from test_convolution import on_cuda, on_emulated

FLAGS = ("-DLAYERNORM_BATCH_INVARIANT",)
BATCHES = (1, 2, 7, 64, 4096)

# (SMs of an emulated GPU, rows, columns), and (rows, columns) for a GPU with as many SMs as an H100: rows of all lengths,
# for which the number of rows or their alignment would decide something.
SHAPES = [
    (8, 1030, 64), (2, 300, 255), (2, 40, 250), (2, 40, 513), (2, 80, 768), (8, 40, 2048), (2, 9, 2041), (2, 9, 4096), (2, 9, 8192), (2, 4, 7167), (2, 4, 14335), (2, 4, 14337),
    (8, 9, 20000), (8, 7, 70000), (2, 4, 40000), (2, 4, 70000), (8, 3, 100001),
]  # fmt: skip
LARGE_SHAPES = [
    (5000, 64), (5000, 255), (5000, 513), (5000, 768), (5000, 2048), (4100, 2041), (4100, 4096), (4097, 8192), (100, 14337),
    (4100, 20000), (100, 262144), (70, 1048576), (17, 4194304), (9, 2000001), (5, 8388608),
]  # fmt: skip


def first_difference(layer_norm, rows, cols, dtype, affine, form, device="cpu"):
    """Returns (first row, number of rows) of a batch whose bits differ from those of all rows together, or None.

    Asserts that all rows together are accurate.
    """
    x, weight, bias, _ = random_case(rows, cols, TYPES[dtype], affine, emphasized=False, device=device)

    def forward(rows):
        return layer_norm(rows, (cols,), weight, bias, EPS, activation=FORMS[form][0], scale=FORMS[form][1])

    together = forward(x)
    compare_with_float64([([together, None, None, None], (x, weight, bias, x))], EPS, *FORMS[form])
    for count in [count for count in BATCHES if count < rows]:
        for first in (0, rows - count):
            part = slice(first, first + count)
            if not same_bits([forward(x[part])], [together[part]]):
                return first, count
    if not same_bits([torch.vmap(forward)(x[:2].view(2, 1, cols)).view(2, cols)], [together[:2]]):
        return "vmap"
    return None


def affine_of(dtype):
    return AFFINE if dtype != "fp32" else AFFINE[:4]


@on_emulated
@pytest.mark.parametrize("sms,rows,cols", SHAPES)
@pytest.mark.parametrize("dtype,form", [
    pytest.param(dtype, form, marks=[] if (dtype, form) == ("fp32", "plain") else pytest.mark.full)
    for dtype in TYPES for form in ("plain", "gelu")
])  # fmt: skip
def test_a_row_has_the_same_bits_in_every_batch(backend, sms, rows, cols, dtype, form):
    with emulator.on(emulator.GPUS["hopper"](sms), flags=FLAGS):
        for affine in affine_of(dtype)[:: 1 if cols < 9000 else 4] if form == "plain" else ("both",):
            assert first_difference(backend.layer_norm, rows, cols, dtype, affine, form) is None, affine


@on_emulated
def test_the_grid_of_blocks_that_wait_for_others_does_not_depend_on_rows(backend):
    """A grid that does not fit runs in two passes, with other bits, so all batches must fit or none."""
    launched = []
    with emulator.on(emulator.GPUS["hopper"](8), dry=True, flags=FLAGS) as libraries:
        for rows in (1, 3, 40):
            backend.layer_norm(torch.randn(rows, 20_000), (20_000,))
            launched += [line.split(" of ")[0] for line in emulator.launches(libraries)]
    assert len(launched) == 3 and "cooperative" in launched[0] and len({*launched}) == 1, launched


@on_emulated
@pytest.mark.parametrize("sms,rows,cols", [(2, 80, 768), (2, 9, 2041), (8, 9, 20000), (2, 4, 40000), (8, 3, 100001)])
def test_without_the_switch_the_number_of_rows_decides(backend, sms, rows, cols):
    """One shape for each choice that the switch fixes."""
    with emulator.on(emulator.GPUS["hopper"](sms)):
        assert first_difference(backend.layer_norm, rows, cols, "fp32", "both", "plain") is not None


def differences_on_a_gpu():
    """Yields the shapes, and how they are called, in which bits differ. For a process in which the switch is on."""
    from layernorm_inline import layer_norm

    for rows, cols in LARGE_SHAPES:
        for dtype in TYPES:
            for affine in affine_of(dtype):
                for form in ("plain", "gelu") if affine == "both" else ("plain",):
                    found = first_difference(layer_norm, rows, cols, dtype, affine, form, "cuda")
                    if found is not None:
                        yield rows, cols, dtype, affine, form, found
        torch.cuda.empty_cache()


@pytest.mark.full
@on_cuda
def test_a_row_has_the_same_bits_in_every_batch_on_a_gpu(backend):
    backend.need_memory(8 << 30)
    code = "from test_batches import *; differences = [*differences_on_a_gpu()]; assert not differences, differences"
    done = run_here(code, LAYERNORM_INLINE_BATCH_INVARIANT="1")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("switch,left", [("1", False), ("0", True)])
def test_batch_invariant_rows_are_not_left_to_inductor(switch, left):
    """Nobody promises that the kernels of torch.compile give a row the same bits in every batch."""
    code = "import torch, torch.fx.experimental.symbolic_shapes, layernorm_inline as l\n"
    code += "print(l._is_left_to_pytorch(torch.empty(2, 768), (768,), 1e-5, 1.0))"
    done = run_here(code, LAYERNORM_INLINE_BATCH_INVARIANT=switch, LAYERNORM_INLINE_DISABLE="1")
    assert done.stdout.split() == [str(left)], done.stderr[-2000:]
