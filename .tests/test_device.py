"""Tests on a GPU in use: streams, threads, CUDA graphs, other processes and devices, and very large inputs."""

import concurrent.futures
import functools
import os

import emulator
import pytest
import torch
from cases import SOME, parameters
from processes import ROOT, run_here
from reference import EPS, FLOATS, SUMS, assert_close_to_float64, compare_with_float64, random_case, run_case, same_bits
from test_convolution import on_cuda, two_gpus

pytestmark = pytest.mark.full
on_cuda_cases = parameters([case for case in SOME if case.gpu.name == "cuda"])


@on_cuda_cases
def test_every_run_gives_the_same_bits(backend, case):
    backend.need_memory(case.nbytes)
    function = functools.partial(backend.layer_norm, **case.epilogue)
    tensors = case.tensors(seed=1)
    first = run_case(function, *tensors)
    for _ in range(5):
        with backend.poisoned():
            again = run_case(function, *tensors)
        assert same_bits(first, again)


@on_cuda_cases
def test_runs_on_the_current_stream(backend, case):
    """The inputs are written late on the current stream, so that a kernel on another stream would read NaN."""
    tensors, function = case.tensors(), functools.partial(backend.layer_norm, **case.epilogue)
    run_case(function, *tensors)  # loads the kernels, which waits for all streams
    late = [t.fill_(torch.nan) for t in case.tensors()]  # with the same alignment
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # 50 ms: the host launches all that follows in less time
        for destination, t in zip(late, tensors):
            destination.copy_(t)
        results = run_case(function, *late)
    stream.synchronize()
    compare_with_float64([(results, tensors)], **case.epilogue)


@on_cuda_cases
def test_cuda_graph_of_a_training_step(backend, case):
    """A captured forward and backward, replayed with other inputs, gives the bits of an eager call."""
    backend.need_memory(case.nbytes)
    function = functools.partial(backend.layer_norm, **case.epilogue)
    tensors = case.tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_case(function, *tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_case(function, *tensors)
    for seed in (1, 2):
        for t, new in zip(tensors, case.tensors(seed)):
            t.copy_(new)
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        assert same_bits(captured, run_case(function, *tensors))
        compare_with_float64([(captured, tensors)], **case.epilogue)


@two_gpus
@on_cuda_cases
def test_device_that_is_not_current(backend, case):
    backend.need_memory(case.nbytes)
    with torch.cuda.device(0):
        tensors = case.tensors(device="cuda:1")
        torch.cuda.synchronize("cuda:1")
        with torch.cuda.device(1):
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.device(0), backend.poisoned(device="cuda:1"):
            results = run_case(functools.partial(backend.layer_norm, **case.epilogue), *tensors)
        torch.cuda.synchronize("cuda:1")
    assert all(t.device.index == 1 for t in results)
    compare_with_float64([(results, tensors)], **case.epilogue)


@on_cuda
@pytest.mark.parametrize("rows,cols", [(1000, 64), (300, 9000), (9, 262144), (4, 4194304), (3, 4194304)])
def test_many_streams_and_threads_at_once(backend, rows, cols):
    backend.need_memory(40 * rows * cols * 4)
    cases = [random_case(rows, cols, torch.float32, seed=i, device=backend.device) for i in range(3)]
    expected = [run_case(backend.layer_norm, *case) for case in cases]

    def work(i):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [run_case(backend.layer_norm, *cases[i]) for _ in range(5)]
        stream.synchronize()
        return all(same_bits(expected[i], result) for result in results)

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


@on_cuda
def test_threads_with_rows_of_different_lengths(backend):
    """A kernel needs another amount of shared memory for each row length."""
    calls = [case for case in SOME if case.gpu.name == "cuda" and case.elements < 10**7]
    assert len(calls) > 5
    tensors = [case.tensors(seed=i) for i, case in enumerate(calls)]

    def result(i):
        x, weight, bias, _ = tensors[i]
        return backend.layer_norm(x, x.shape[1:], weight, bias, **calls[i].epilogue)

    expected = [result(i) for i in range(len(calls))]
    torch.cuda.synchronize()

    def work(thread):
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(thread)).tolist()
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.stack([(result(i) != expected[i]).any() for i in order * 3]).any().item()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))


@pytest.mark.slow
@on_cuda
@pytest.mark.parametrize("architecture", [75, 80])  # both older than the GPU; 7.5 has no convolution kernel
def test_ptx_of_an_older_architecture_runs(backend, tmp_path, architecture):
    text, codes = emulator.SOURCE.read_text(), "codes = _codes(architectures)"
    assert text.count(codes) == 1
    (tmp_path / "layernorm_inline.py").write_text(text.replace(codes, f'codes = ["compute_{architecture}"]'))
    code = f"""
        import torch, layernorm_inline
        torch.manual_seed(0)
        model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1).cuda()
        x = torch.randn(1, 32, 2, 3, 32, device="cuda")
        with torch.no_grad():
            exact = torch.nn.functional.gelu(model.double().layer_norm(model.conv_transpose(x.double())))
            for torch.backends.cudnn.allow_tf32, atol in ((True, 1e-2), (False, 2e-5)):
                torch.testing.assert_close(model.float()(x).double(), exact, atol=atol, rtol=atol)
        import cases, conftest, functools, reference
        assert layernorm_inline.__file__.startswith({str(tmp_path)!r})
        for case in cases.CASES:
            if case.gpu.name != "cuda" or case.cols < 4000 or case.elements > 10**7:
                continue
            tensors, function = case.tensors(), functools.partial(layernorm_inline.layer_norm, **case.epilogue)
            with conftest.poisoned(4 * tensors[0].nbytes + (1 << 26), "cuda"):
                results = [reference.run_case(function, *tensors) for _ in range(2)]
            reference.compare_with_float64([(results[0], tensors)], **case.epilogue)
            assert reference.same_bits(*results)
    """
    path = os.pathsep.join(map(str, (tmp_path, ROOT / ".tests", ROOT)))
    done = run_here(code, PYTHONPATH=path, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 40])
@pytest.mark.parametrize("cols", [8712, 10008, 20008, 50264, 131080])
def test_rows_off_cache_lines(backend, cols, offset, dtype):
    """Kernels copy whole cache lines, and must not use the elements of neighbouring rows that they copy."""
    if not backend.is_cuda and cols > 8192 * 8:
        pytest.skip("the row is too long for eight emulated SMs")
    options = dict(seed=cols, offsets=(offset, 0, 0, offset), device=backend.device)
    assert_close_to_float64(backend, random_case(150 if backend.is_cuda else 5, cols, dtype, **options))


@on_cuda
@pytest.mark.parametrize("cols", [1024, 12288, 65536])
def test_large_input_gives_the_same_bits_as_a_small_one(backend, cols):
    """Kernels read an input that is larger than the L2 cache with another L2 priority."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows = max(160 << 20, 2 * l2_bytes) // (2 * cols)
    backend.need_memory(30 * rows * cols)
    x, weight, bias, dy = random_case(rows, cols, torch.bfloat16, seed=cols, device="cuda")
    few = rows // 16
    with backend.poisoned():
        y = backend.layer_norm(x, (cols,), weight, bias)
        first, last = (backend.layer_norm(part, (cols,), weight, bias) for part in (x[:few], x[-few:]))
    assert torch.equal(y[:few], first) and torch.equal(y[-few:], last)
    compare_with_float64([([last, None, None, None], (x[-few:], weight, bias, dy[-few:]))], eps=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cols,offset", [
    (64, 0), (255, 1), (768, 0), (1024, 0), (2041, 0), (4096, 1), (6001, 0), (10008, 0), (16384, 0)
])  # fmt: skip
def test_input_longer_than_the_l2_prefetch_distance(backend, cols, offset, dtype):
    """Blocks prefetch the rows of later blocks, 40 KB per SM ahead, up to the last row."""
    rows = ((24 << 20) if backend.is_cuda else 600 << 10) // (cols * dtype.itemsize) + 1
    with backend.on(emulator.GPUS["hopper"](2)):
        options = dict(seed=cols, offsets=(offset, 0, 0, offset), device=backend.device)
        assert_close_to_float64(backend, random_case(rows, cols, dtype, **options))


def assert_row_close_to_float64(x, y, dy, dx, **tolerance):
    """Compares output and grad_input of a row without weight and bias, in pieces: in float64, a row can have 17 GB."""

    def pieces(*tensors):
        return zip(*((piece.double() for piece in t.split(1 << 24)) for t in tensors))

    mean = sum(p.sum() for (p,) in pieces(x)) / len(x)
    rstd = (sum((p - mean).square().sum() for (p,) in pieces(x)) / len(x) + EPS).rsqrt()
    c1 = sum(d.sum() for (d,) in pieces(dy)) / len(x)
    c2 = sum((d * (p - mean) * rstd).sum() for p, d in pieces(x, dy)) / len(x)
    for p, of_y, d, of_dx in pieces(x, y, dy, dx):
        xhat = (p - mean) * rstd
        torch.testing.assert_close(of_y, xhat, **tolerance)
        torch.testing.assert_close(of_dx, (d - c1 - xhat * c2) * rstd, **tolerance)


@on_cuda
@pytest.mark.parametrize("rows,cols,dtype", [
    (2**31 // 64 + 3, 64, torch.bfloat16), (2**16 + 1, 2**15, torch.bfloat16), (2**18 + 3, 2**13, torch.bfloat16),
    (9, 2**28, torch.bfloat16), (1, 2**31 + 16, torch.bfloat16), (520, 4194304, torch.float32),
], ids=str)  # fmt: skip
def test_more_than_2_to_the_31_elements(backend, rows, cols, dtype):
    """The shapes run the register, pipelined, grid-resident (float32) and two-pass kernels. One is a single row."""
    backend.need_memory(4 * rows * cols * dtype.itemsize + (2 << 30))
    x = torch.empty(rows, cols, device="cuda", dtype=dtype).normal_(1).requires_grad_()
    y = backend.layer_norm(x, (cols,), eps=EPS)
    dy = torch.empty_like(x).normal_(0.5).add_(x.detach(), alpha=0.5)  # not orthogonal to x
    (dx,) = torch.autograd.grad(y, x, dy)
    tensors = [t.detach() for t in (x, y, dy, dx)]
    assert all(t.shape == x.shape for t in tensors)
    tolerance = dict(atol=2e-2, rtol=2e-2) if dtype == torch.bfloat16 else dict(atol=1e-5, rtol=1e-4)
    for row in {0, rows - 1}:
        assert_row_close_to_float64(*(t[row] for t in tensors), **tolerance)


@on_cuda
@pytest.mark.parametrize("rows", [1_000_000, 3_000_001])
def test_gradients_over_millions_of_rows(backend, rows):
    backend.need_memory(4 << 30)
    assert_close_to_float64(backend, random_case(rows, 24, torch.float32, seed=rows, device="cuda"))


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("affine,mean", [("both", 3.0), ("weight", 1e6), ("bias", 0.0), ("none", 1e4)])
@pytest.mark.parametrize("rows,cols_per_sm", [
    (4, 16667), (13, 8334), (5, 22727), (5, 28688), (7, 32768), (4, 32769), (9, 25000)
])  # fmt: skip
def test_grid_resident_kernel_is_accurate(backend, rows, cols_per_sm, affine, mean, activation):
    """The shapes have one group of blocks and several, slices whose last stage is incomplete or that have another number
    of stages than others, the longest supported rows, and slightly longer ones."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count if backend.is_cuda else 8
    if not backend.is_cuda and (activation or rows * cols_per_sm > 120_000 or affine in ("weight", "bias")):
        pytest.skip("too slow on emulated GPUs")
    cols = cols_per_sm * sms // 4 * 4
    backend.need_memory(20 * rows * cols * 4 + (1 << 30))
    options = dict(seed=cols, mean=mean, emphasized=False, device=backend.device)
    bounds = dict(eps=1e-5, luck=SUMS) if backend.is_cuda else dict(eps=1e-5)
    epilogue = dict(activation=activation, scale=-1.5 if activation else 1.0)
    assert_close_to_float64(backend, random_case(rows, cols, torch.float32, affine, **options), **bounds, **epilogue)
