"""Streams, threads, CUDA graphs, other processes, other GPUs: the same bits whatever else goes on."""


@some_cases
def test_the_same_bits_every_time(backend, case):
    function = functools.partial(layer_norm, **case.epilogue)
    tensors = case.tensors(seed=1)
    first = run_case(function, *tensors)
    for _ in range(5):
        with poisoned():
            again = run_case(function, *tensors)
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, again))


@some_cases
def test_runs_on_the_current_stream(backend, case):
    """Inputs come late, on a stream of their own: a kernel on another one would read what was there before."""
    tensors = case.tensors()
    late = [None if t is None else t.fill_(torch.nan) for t in case.tensors()]  # lie as the others do
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for to, t in zip(late, tensors):
            if t is not None:
                to.copy_(t)
        results = run_case(functools.partial(layer_norm, **case.epilogue), *late)
    stream.synchronize()
    compare_with_float64([(results, tensors)], **case.epilogue)


@some_cases
def test_cuda_graph_of_a_training_step(backend, case):
    function = functools.partial(layer_norm, **case.epilogue)
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
            if t is not None:
                t.copy_(new)
        for t in captured:
            if t is not None:
                t.fill_(torch.nan)
        graph.replay()
        results = [None if t is None else t.clone() for t in captured]
        assert all(a is b or torch.equal(a, b) for a, b in zip(results, run_case(function, *tensors)))
        compare_with_float64([(results, tensors)], **case.epilogue)


@two_gpus
@some_cases
def test_a_device_that_is_not_current(case):
    with torch.cuda.device(0):
        tensors = case.tensors(device="cuda:1")
        torch.cuda.synchronize("cuda:1")
        with torch.cuda.device(1):
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.device(0):
            results = run_case(functools.partial(layer_norm, **case.epilogue), *tensors)
        torch.cuda.synchronize("cuda:1")
    assert all(t.device.index == 1 for t in results if t is not None)
    compare_with_float64([(results, tensors)], **case.epilogue)


@pytest.mark.parametrize("rows,cols", [(1000, 64), (300, 9000), (9, 262144), (4, 4194304), (3, 4194304)])
def test_many_streams_and_threads_at_once(backend, rows, cols):
    import concurrent.futures

    cases = [random_case(rows, cols, torch.float32, "both", seed=i, device=backend.device) for i in range(3)]
    expected = [run_case(layer_norm, *case) for case in cases]

    def work(i):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [run_case(layer_norm, *cases[i]) for _ in range(5)]
        stream.synchronize()
        return all(torch.equal(a, b) for result in results for a, b in zip(expected[i], result))

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


# Of one kernel, rows of several lengths take different amounts of shared memory.
def test_threads_with_rows_of_different_lengths(backend):
    import concurrent.futures

    calls = [case for case in SOME if case.elements < 10**7 and case.off in ("", "x") and case.affine == "both"]
    tensors = [case.tensors(seed=i) for i, case in enumerate(calls)]

    def result(i):
        x, weight, bias, _ = tensors[i]
        return backend.layer_norm(x, x.shape[1:], weight, bias, **calls[i].epilogue)

    expected = [result(i) for i in range(len(calls))]
    torch.cuda.synchronize()

    def work(thread):
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(thread)).tolist()
        wrong = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in order * 3:
                wrong.append((result(i) != expected[i]).any())
            return torch.stack(wrong).any().item()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))


@pytest.mark.parametrize("rows,cols", [(500, 4096), (16, 262144)])
def test_beside_a_process_that_fills_the_gpu(backend, rows, cols):
    busy = "import torch\na = torch.randn(4096, 4096, device='cuda')\nprint('on', flush=True)\nwhile True: b = a @ a"
    case = random_case(rows, cols, torch.float32, "both", seed=0, device=backend.device)
    expected = run_case(layer_norm, *case)
    other = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "on\n"
        start = time.time()
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(expected, run_case(layer_norm, *case)))
        assert time.time() - start < 60
    finally:
        other.kill()
        other.wait()


def compare_before_hopper():
    """Calls whose kernels have other instructions before Hopper, or go elsewhere. Where a block goes from row to row,
    there are more of them than SMs."""
    for rows, columns, dtypes, affine in (
        (5, (768, 8192, 20000, 262144), ("fp32",), "both"),
        (300, (12288, 16384), ("fp32", "fp16", "bf16"), "both"),
        (300, (4104, 9000, 32768), ("fp32",), "weight"),
        (300, (7001, 20001), ("fp32", "fp16", "bf16"), "both"),
        (300, (49152, 65536), ("fp16", "bf16"), "both"),
        (300, (12288, 65536), ("bf16",), "float32 bias"),
    ):
        for cols, dtype, form in [(c, d, f) for c in columns for d in dtypes for f in ("plain", "gelu")]:
            activation, scale = FORMS[form]
            function = functools.partial(layer_norm, activation=activation, scale=scale)
            tensors = random_case(rows, cols, TYPES[dtype], affine, seed=cols, device=backend.device)
            with poisoned():
                results = [run_case(function, *tensors) for _ in range(2)]
            compare_with_float64([(results[0], tensors)], activation=activation, scale=scale)
            assert all(a is b or torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("architecture", ["7.5", "8.0"])  # older than the GPU; 7.5 than the kernel of problem 34, too
def test_ptx_of_an_older_architecture_runs(backend, tmp_path, architecture):
    code = """
        import torch, layernorm_inline
        torch.manual_seed(0)
        model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1).to(backend.device)
        x = torch.randn(1, 32, 2, 3, 32, device=backend.device)
        with torch.no_grad():
            exact = torch.nn.functional.gelu(model.double().layer_norm(model.conv_transpose(x.double())))
            for torch.backends.cudnn.allow_tf32, atol in ((True, 1e-2), (False, 2e-5)):
                torch.testing.assert_close(model.float()(x).double(), exact, atol=atol, rtol=atol)
        import test_layernorm_inline
        test_layernorm_inline.compare_before_hopper()
    """
    environment = dict(TORCH_CUDA_ARCH_LIST=architecture + "+PTX", PYTHONPATH=os.path.dirname(SOURCE))
    done = import_in_subprocess(tmp_path, code, **environment)
    assert done.returncode == 0, done.stderr


# Rows on 16-byte boundaries, but not on those of cache lines: what is copied with them must not be taken for theirs.
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 40])
@pytest.mark.parametrize("cols", [8712, 10008, 20008, 50264, 131080])
def test_rows_between_lines(backend, cols, offset, dtype):
    assert_close_to_float64(
        random_case(150, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset), device=backend.device)
    )


# The kernels read what exceeds L2 (60 MB on an H200) with another priority.
@pytest.mark.parametrize("cols", [1024, 12288, 65536])
def test_a_large_input_gives_the_bits_of_a_small_one(backend, cols):
    rows = (160 << 20) // (2 * cols)  # 160 MB
    x, weight, bias, dy = random_case(rows, cols, torch.bfloat16, "both", seed=cols, device=backend.device)
    few = rows // 16
    with poisoned():
        y = backend.layer_norm(x, (cols,), weight, bias)
        first, last = (backend.layer_norm(part, (cols,), weight, bias) for part in (x[:few], x[-few:]))
    assert torch.equal(y[:few], first) and torch.equal(y[-few:], last)
    compare_with_float64([([last, None, None, None], (x[-few:], weight, bias, dy[-few:]))], eps=1e-5)


@pytest.mark.parametrize("rows,cols", [(2**31 // 64 + 3, 64), (2**16 + 1, 2**15), (9, 2**28), (1, 2**31 + 16)])
def test_more_than_2_to_the_31_elements(backend, rows, cols):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    x = torch.empty(rows, cols, device=backend.device, dtype=torch.bfloat16).normal_()
    y = backend.layer_norm(x, (cols,))
    for row in (0, rows - 1):
        piece = x[row, -4096:] if cols > 2**20 else x[row]
        mean, std = x[row].double().mean(), x[row].double().std(unbiased=False)
        expected = (piece.double() - mean) / (std**2 + 1e-5).sqrt()
        assert (y[row, -piece.numel() :].double() - expected).abs().max() < 2e-2


# So many bytes that blocks bring to L2 what later blocks read (40 KB for each SM ahead), up to the last row.
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "cols,offset", [(64, 0), (255, 1), (768, 0), (1024, 0), (2041, 0), (4096, 1), (6001, 0), (10008, 0), (16384, 0)]
)
def test_rows_brought_to_l2_for_later_blocks(backend, cols, offset, dtype):
    rows = (24 << 20) // (cols * dtype.itemsize) + 1
    assert_close_to_float64(
        random_case(rows, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset), device=backend.device)
    )


@pytest.mark.parametrize("rows", [1_000_000, 3_000_001])
def test_gradients_over_millions_of_rows(backend, rows):
    assert_close_to_float64(random_case(rows, 24, torch.float32, "both", seed=rows, device=backend.device))


# One group of blocks and several; slices with and without an incomplete last stage, and with one stage more in some
# blocks than in others; on 132 SMs as long as they can be, and just longer.
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("affine,mean", [("both", 3.0), ("weight", 1e6), ("bias", 0.0), ("none", 1e4)])
@pytest.mark.parametrize(
    "rows,cols", [(4, 2200004), (13, 1100004), (5, 3000000), (5, 3786816), (7, 4325376), (4, 4325380), (9, 3300000)]
)
def test_rows_that_many_sms_hold_together(backend, rows, cols, affine, mean, activation):
    case = random_case(rows, cols, torch.float32, affine, seed=cols, mean=mean, telling=False, device=backend.device)
    epilogue = dict(activation=activation, scale=-1.5 if activation else 1.0)
    assert_close_to_float64(case, eps=1e-5, luck=SUMS, **epilogue)


def test_main_shape(backend):
    x, weight, bias, dy = random_case(16, 64 * 256 * 256, torch.float32, mean=0.0, telling=False, device=backend.device)
    assert_close_to_float64((x, weight, bias, dy), eps=1e-5, luck=SUMS)


# So many rows that a thread of the forward kernel takes several of them, and not a multiple of what a block takes.
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "rows,cols",
    [(2207, 9), (2501, 150), (2211, 255), (1103, 2041), (1103, 2048), (703, 4099), (401, 6001), (301, 14335), (211, 50257),
     (103, 100004), (37, 131075)],
)  # fmt: skip
def test_many_unaligned_rows(backend, rows, cols, offset, dtype):
    assert_close_to_float64(
        random_case(rows, cols, dtype, "both", seed=cols, offsets=(offset, 0, 0, offset), device=backend.device)
    )
