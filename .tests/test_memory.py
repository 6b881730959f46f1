"""Tests of memory: how much is allocated, accesses outside of a tensor, and running out of memory."""

import functools
import re
import shutil
import sys

import pytest
import torch
from cases import SOME
from processes import CACHE, ROOT, environment_with, run, run_here
from reference import FLOATS, random_case, run_case
from test_convolution import INPUT_PRECISIONS, convolution_call, on_cuda

pytestmark = pytest.mark.full


@on_cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 100 << 20])
def test_poisoned_memory_is_nan(backend, size, dtype):
    """Tensors that are allocated inside backend.poisoned() are full of NaN. Other tests rely on that."""
    alive = [torch.zeros(size // dtype.itemsize + 1, dtype=dtype, device=backend.device) for _ in range(8)]
    del alive[::2]  # leaves free blocks of zeros between tensors
    with backend.poisoned(1 << 30):
        outputs = [torch.empty(size // dtype.itemsize + 1, dtype=dtype, device=backend.device) for _ in range(4)]
    assert all(output.isnan().all() for output in outputs)


@on_cuda
@pytest.mark.parametrize("rows,cols", [(1 << 20, 256), (64, 1 << 22)])
def test_out_of_memory_leaves_the_process_usable(backend, rows, cols):
    backend.need_memory(3 << 30)
    code = f"""
        import torch, layernorm_inline
        x = torch.randn({rows}, {cols}, device="cuda")
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((x.nbytes * 1.5) / total)
        for _ in range(2):
            try:
                layernorm_inline.layer_norm(x, ({cols},))
            except torch.OutOfMemoryError:
                print("out of memory")
        small = torch.randn(2, {cols}, device="cuda")
        y, expected = (f(small, ({cols},)) for f in (layernorm_inline.layer_norm, torch.nn.functional.layer_norm))
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    """
    done = run_here(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out of memory") == 2


@on_cuda
def test_no_statistics_are_allocated_without_grad(backend):
    x = torch.randn(10000, 8, device=backend.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = backend.layer_norm(x, (8,))
    assert y.nbytes <= torch.cuda.max_memory_allocated() - before < y.nbytes + 512


def scratch_of_backward(backend, x, weight, bias, dy, activation=None):
    """Returns the bytes that backward allocates in addition to the gradients."""
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = backend.layer_norm(x, x.shape[1:], weight, bias, activation=activation)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(y, leaves, dy)
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows,cols", [
    (1_000_000, 64), (40000, 1000), (4000, 16384), (64, 1 << 20), (8, 1 << 23), (8, 2160640), (265, 2810034)
])  # fmt: skip
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_backward_needs_little_scratch_memory(backend, rows, cols, dtype, activation):
    backend.need_memory(24 * rows * cols + (1 << 30))
    tensors = random_case(rows, cols, dtype, device=backend.device)
    assert scratch_of_backward(backend, *tensors, activation) <= max(32 << 20, tensors[0].nbytes / 64)


@on_cuda
@pytest.mark.parametrize("offsets", [(0, 1, 1, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1)], ids=str)
def test_backward_copies_only_tensors_that_start_between_words(backend, offsets):
    """The kernels load 16-bit elements in pairs, so that input and grad_output must start at a multiple of 4 bytes."""
    tensors = random_case(200_000, 255, torch.bfloat16, offsets=offsets, device=backend.device)
    copied = (offsets[0] + offsets[3]) * tensors[0].nbytes
    assert copied <= scratch_of_backward(backend, *tensors) <= copied + (32 << 20)


def reuses_ring_slots(case, family):
    """Returns True if pipelined kernels reuse their ring's slots. racecheck (2025.3) then reports false hazards."""
    return family == "pipelined" and case.elements > 3 * 10**6


def run_every_family(backend):
    """Runs cases of every family, and the convolution. Returns the number of calls."""
    cases = [case for case in SOME if case.gpu.name == "cuda" and case.dtype != "fp16"]
    cases = [case for case in cases if not reuses_ring_slots(case, case.forward)]
    for case in cases:
        function, tensors = functools.partial(backend.layer_norm, **case.epilogue), case.tensors()
        if reuses_ring_slots(case, case.backward):
            assert function(tensors[0], (case.cols,), *tensors[1:3]).isfinite().all()
        else:
            assert all(t.isfinite().all() for t in run_case(function, *tensors))
    for name in INPUT_PRECISIONS:
        convolution_call(backend, name, gradients=False)()  # racecheck does not support cuDNN's gradients
    return len(cases) + len(INPUT_PRECISIONS)


@on_cuda
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(backend, tmp_path, tool):
    script = tmp_path / "families.py"
    script.write_text(
        "import conftest, test_memory\nprint(test_memory.run_every_family(conftest.Backend('cuda')), 'calls')\n"
    )
    changes = {"TORCH_EXTENSIONS_DIR": CACHE, "PYTHONPATH": f"{ROOT / '.tests'}:{ROOT}"}
    if tool == "memcheck":  # one allocation per tensor, so that memcheck sees where each one ends
        changes["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = ["compute-sanitizer", "--tool", tool]
    if tool != "initcheck":  # initcheck must also see PyTorch's kernels, which write the inputs
        command += ["--kernel-name", "kns=layernorm_inline"]
    done = run([*command, sys.executable, str(script)], env=environment_with(**changes))
    assert done.returncode == 0 and re.search(r"^\d\d+ calls$", done.stdout, re.M), done.stdout + done.stderr
    assert re.search("ERROR SUMMARY: 0 errors|0 hazards displayed", done.stdout), done.stdout
