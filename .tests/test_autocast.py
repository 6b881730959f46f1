"""Tests of autocast_output: dtypes, bits, what is saved for backward, and where the option does nothing."""

import contextlib
import copy
import functools
import io
import itertools
import math
import pickle
import warnings

import emulator
import pytest
import torch
from cases import this_gpu
from reference import AFFINE, EPS, placed, random_case, same_bits
from test_convolution import on_emulated
from torch import nn
from torch.utils.checkpoint import checkpoint

import layernorm_inline

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def gpu_of(backend):
    return this_gpu()[0] if backend.is_cuda else emulator.GPUS["hopper"](2)


def rows_of(waves, cols, sms):
    """Returns a number of float32 rows, whose 16-byte loads are a bit more than `waves` times what all SMs hold."""
    return math.floor(waves * 2048 * sms / (cols // 4)) + 1


def shapes(sms):
    """Returns {(rows, cols): whether (forward, backward) run kernels that convert}: both sides of each boundary."""
    few = [4, 8, 32, 36, 128, 132, 252, 256, 260, 384, 388, 512, 516, 640, 644, 1024, 1028, 2044, 2048]
    converting = [(9, cols) for cols in few]
    # Short rows, from half a wave on, and the longer ones with more than 1 and 8 waves.
    converting += [(rows_of(0.5, cols, sms), cols) for cols in (64, 124)]
    converting += [(rows_of(waves, cols, sms), cols) for waves in (1, 8) for cols in (644, 772, 1024)]
    return {
        **dict.fromkeys(converting, (True, True)),
        **dict.fromkeys([(9, 2052), (5, 4096), (3, 4100), (3, 8192)], (True, False)),
        **dict.fromkeys([(7, 1), (9, 5), (40, 33), (9, 255), (5, 257), (5, 2041), (2, 8193), (2, 8196), (2, 16384)], (False, False)),
    }  # fmt: skip


def step(backend, tensors, dtype, option, shape=None):
    """Returns [output, gradients of input, weight and bias] of a norm and the conversion of the layer after it."""
    *inputs, dy = tensors
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    given = [t for t in leaves if t is not None]
    with torch.autocast(backend.device, dtype=dtype):
        y = backend.layer_norm(leaves[0], shape or dy.shape[-1:], *leaves[1:], EPS, autocast_output=option)
    assert y.dtype == (dtype if option else torch.float32) and y.is_contiguous()
    return [y.to(dtype).detach(), *torch.autograd.grad(y.to(dtype), given, dy)]


def assert_same_bits(backend, tensors, dtype, shape=None):
    """Asserts that the option gives the bits of a conversion. Returns the kernels that ran on an emulated GPU."""
    expected = step(backend, tensors, dtype, False, shape)
    context = contextlib.nullcontext() if backend.is_cuda else backend.on(gpu_of(backend))
    with backend.poisoned(4 * tensors[0].nbytes + (1 << 20)), context as libraries:
        results = step(backend, tensors, dtype, True, shape)
        launched = emulator.kernels(libraries) if libraries else set()
    assert [t.dtype for t in results] == [t.dtype for t in expected]
    assert same_bits(results, expected)
    return launched


def case_of(backend, rows, cols, dtype, affine="both", offsets=(0, 0, 0), seed=0):
    """Returns float32 input, weight and bias, and a 16-bit grad_output."""
    x, weight, bias, dy = random_case(
        rows, cols, torch.float32, affine, seed, offsets=(*offsets, 0), device=backend.device
    )
    return [x, weight, bias, dy.to(dtype)]


@every_dtype
def test_the_bits_are_those_of_a_conversion(backend, dtype):
    """At every boundary of the ladder. Aligned rows convert in the kernel, and longer ones beside it."""
    gpu = gpu_of(backend)
    with backend.on(gpu):
        for (rows, cols), converts in shapes(gpu.sms).items():
            launched = assert_same_bits(backend, case_of(backend, rows, cols, dtype), dtype)
            if backend.is_cuda:
                continue
            element = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}[dtype]
            for kernel, expected in zip(("layer_norm_rows", "layer_norm_backward_rows"), converts):
                assert any(f"{kernel}<float, {element}," in name for name in launched) == expected, (
                    rows,
                    cols,
                    launched,
                )


@every_dtype
@pytest.mark.parametrize("cols", [36, pytest.param(768, marks=pytest.mark.full), 1028, 2052, 33])
def test_the_bits_with_every_kind_of_weight_and_offset(backend, cols, dtype):
    """Input, weight and bias one element past a cache line; grad_output 2, 4, 8 and 16 bytes past it, and strided."""
    gpu = gpu_of(backend)
    with backend.on(gpu):
        for affine in AFFINE[:4]:
            assert_same_bits(backend, case_of(backend, 9, cols, dtype, affine), dtype)
        for offsets in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (2, 0, 0)):
            assert_same_bits(backend, case_of(backend, 9, cols, dtype, offsets=offsets), dtype)
        *inputs, dy = case_of(backend, 9, cols, dtype)
        for grad in (*(placed(dy, offset) for offset in (1, 2, 4, 8)), dy[:1].expand(9, cols), dy.t().contiguous().t()):
            assert_same_bits(backend, [*inputs, grad], dtype)
        strided = inputs[0].t().contiguous().t()
        assert_same_bits(backend, [strided, *inputs[1:], dy], dtype)


@every_dtype
def test_the_bits_with_several_dimensions(backend, dtype):
    x, weight, bias, dy = case_of(backend, 6, 24, dtype)
    tensors = [x.view(2, 3, 4, 6), weight.view(4, 6), bias.view(4, 6), dy.view(2, 3, 4, 6)]
    assert_same_bits(backend, tensors, dtype, (4, 6))
    assert_same_bits(backend, [x[:0], weight, bias, dy[:0]], dtype)


@every_dtype
def test_large_numbers_overflow_as_in_a_conversion(backend, dtype):
    """float16 has infinities where float32 has none; NaN in input makes NaN in its row."""
    x, weight, bias, dy = case_of(backend, 9, 64, dtype)
    weight[3], bias[5], x[2, 7] = 1e7, -1e38, math.nan
    expected, result = (step(backend, [x, weight, bias, dy], dtype, option)[0] for option in (False, True))
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert result[2].isnan().all() and (result[:2, 5].isinf().all() or dtype == torch.bfloat16)


@every_dtype
def test_only_one_conversion_is_left(backend, dtype):
    """Neither float32 input nor 16-bit input is converted, and no float32 output is allocated."""
    x, weight, bias, dy = case_of(backend, 9, 768, dtype)
    for given in (x, x.to(dtype)):
        with torch.profiler.profile() as profile:
            step(backend, [given, weight, bias, dy], dtype, True)
        names = [event.name for event in profile.events()]
        assert "aten::_to_copy" not in names and "aten::copy_" not in names, sorted(set(names))


@every_dtype
@pytest.mark.parametrize("rows,cols", [(9, 96), (5, 255), (3, 768), (3, 8192), (2, 20008)])
def test_16_bit_input_is_read_directly(backend, rows, cols, dtype):
    """The results are those of the op without autocast, with float32 weight and bias; the errors are of 16 bits."""
    x, weight, bias, dy = case_of(backend, rows, cols, dtype)
    x = x.to(dtype)
    results = step(backend, [x, weight, bias, dy], dtype, True)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = backend.layer_norm(leaves[0], (cols,), *leaves[1:], EPS)
    assert same_bits(results, [y.detach(), *torch.autograd.grad(y, leaves, dy)])
    converted = step(backend, [x, weight, bias, dy], dtype, False)
    rounding = 2 * torch.finfo(dtype).eps  # the statistics of 16-bit rows are approximate
    for result, expected, eps in zip(results, converted, (rounding, rounding, 1e-5, 1e-5)):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=eps, atol=eps * expected.float().abs().max().item())


def consumers(backend, option, converts, dtype):
    """Returns the gradients of a norm with three consumers, which convert its output once or each by itself."""
    x, weight, bias, _ = case_of(backend, 16, 64, dtype, seed=1)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(16, 64, generator=generator).to(backend.device, dtype) for _ in range(3)]
    with torch.autocast(backend.device, dtype=dtype):
        y = backend.layer_norm(leaves[0], (64,), *leaves[1:], EPS, autocast_output=option)
    once = y.to(dtype) if converts == "once" else None
    loss = sum(((y.to(dtype) if once is None else once) * d).float().sum() for d in directions)
    return torch.autograd.grad(loss, leaves)


@every_dtype
def test_three_consumers(backend, dtype):
    """One conversion: equal. If each consumer converts, gradients are added up in 16 bits instead of float32."""
    assert same_bits(*(consumers(backend, option, "once", dtype) for option in (False, True)))
    in_float32, in_16_bits = (consumers(backend, option, "each", dtype) for option in (False, True))
    for wide, narrow in zip(in_float32, in_16_bits):
        eps = 2 * torch.finfo(dtype).eps  # two additions, each rounded by half of it; sums over 16 rows or 64 columns
        torch.testing.assert_close(narrow, wide, rtol=eps, atol=eps * 4 * wide.abs().max().item())


@every_dtype
def test_a_change_in_place_of_16_bit_input(backend, dtype):
    """By default a copy is saved, so that gradients are right. With the option, backward raises an error."""
    weight = torch.ones(64, device=backend.device, requires_grad=True)
    for option in (False, True):
        leaf = torch.randn(5, 64, device=backend.device, dtype=dtype, requires_grad=True)
        with torch.autocast(backend.device, dtype=dtype):
            x = leaf * 1
            y = backend.layer_norm(x, (64,), weight, autocast_output=option)
            x += y.to(dtype)
        if option:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                x.sum().backward()
        else:
            x.sum().backward()
            assert leaf.grad.isfinite().all()


def test_inference_tensors_that_weight_needs_for_its_gradient(backend):
    """They cannot be saved for backward, so they are converted as by default. Without gradients they are read."""
    with torch.inference_mode():
        x = torch.randn(5, 64, device=backend.device, dtype=torch.bfloat16)
    weight = torch.randn(64, device=backend.device, requires_grad=True)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = backend.layer_norm(x, (64,), weight, autocast_output=True)
        expected = backend.layer_norm(x, (64,), weight).bfloat16()
    assert torch.equal(y, expected) and y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), weight)[0].isfinite().all()
    with (
        torch.inference_mode(),
        torch.autocast(backend.device, dtype=torch.bfloat16),
        torch.profiler.profile() as profile,
    ):
        backend.layer_norm(x, (64,), weight, autocast_output=True)
    assert "aten::_to_copy" not in [event.name for event in profile.events()]


OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}


@every_dtype
def test_what_is_computed_as_by_default_and_converted_once(backend, dtype):
    """16-bit input of another dtype, 16-bit weights, activations: the bits of the default and a conversion."""
    x, weight, bias, dy = case_of(backend, 9, 64, dtype)
    narrow = [weight.to(dtype), bias.to(dtype)]
    calls = [
        ((x.to(OTHER[dtype]), weight, bias), {}), ((x.to(dtype), *narrow), {}), ((x, *narrow), {}),
        ((x.to(dtype), narrow[0], None), {}), ((x.to(dtype), None, narrow[1]), {}),
        ((x.to(dtype), narrow[0], bias), {}), ((x.to(dtype), weight, narrow[1]), {}),
        ((x, weight, bias), dict(activation="gelu")), ((x.to(dtype), weight, bias), dict(activation="gelu_tanh")),
        ((x, weight, bias), dict(scale=0.5)), ((x.to(dtype), weight, bias), dict(activation="gelu", scale=2)),
    ]  # fmt: skip
    for tensors, options in calls:
        results = []
        for option in (False, True):
            leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
            with torch.autocast(backend.device, dtype=dtype):
                y = backend.layer_norm(leaves[0], (64,), *leaves[1:], EPS, **options, autocast_output=option)
            assert y.dtype == (dtype if option else torch.float32)
            gradients = torch.autograd.grad(y.to(dtype), [t for t in leaves if t is not None], dy)
            results.append([y.to(dtype).detach(), *gradients])
        assert same_bits(*results), options


def test_where_the_option_does_nothing(backend):
    """Without autocast, with autocast off inside, and for float64, the output is that of the default."""
    linear = nn.Linear(64, 8, device=backend.device)
    norm = backend.LayerNorm(64, device=backend.device, autocast_output=True)
    default = backend.LayerNorm(64, device=backend.device)
    x = torch.randn(5, 64, device=backend.device)
    y = norm(x)
    assert y.dtype == torch.float32 and torch.equal(y, default(x)) and linear(y).dtype == torch.float32
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        with torch.autocast(backend.device, enabled=False):
            y = norm(x)
            assert y.dtype == torch.float32 and linear(y).dtype == torch.float32
        assert norm(x).dtype == linear(norm(x)).dtype == torch.bfloat16
        double = norm.double()(x.double())
    assert double.dtype == torch.float64 and torch.equal(double, default.double()(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_in_32_and_64_bits(backend, monkeypatch, dtype):
    """PyTorch accepts these as autocast's dtype. Linear layers then do not compute in 16 bits."""
    norm = backend.LayerNorm(64, device=backend.device, autocast_output=True)
    with torch.autocast(backend.device, dtype=torch.bfloat16), monkeypatch.context() as patch:
        patch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
        assert norm(torch.randn(5, 64, device=backend.device)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cpu_tensors_are_left_alone(dtype):
    """CUDA's autocast does not concern them, nor does that for CPUs, in which PyTorch chooses the dtype."""
    x = torch.randn(5, 64, dtype=dtype)
    norm, default = (module(64, dtype=dtype) for module in (layernorm_inline.LayerNorm, nn.LayerNorm))
    norm.autocast_output = True
    for device in ("cpu", "cuda"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a GPU
            with torch.autocast(device, dtype=torch.bfloat16):
                assert same_bits([norm(x)], [default(x)]) and norm(x).dtype == default(x).dtype


def test_the_attribute_and_the_arguments(backend):
    """Modules without the attribute have the default, and replace_layer_norm sets it, or leaves it as it is."""
    norm = backend.LayerNorm(8, autocast_output=True)
    assert repr(norm) == "LayerNorm((8,), eps=1e-05, elementwise_affine=True, autocast_output=True)".replace(
        "elementwise_affine=True", nn.LayerNorm(8).extra_repr().split("eps=1e-05, ")[1]
    )
    assert "autocast_output" not in repr(backend.LayerNorm(8)) and not backend.LayerNorm(8).autocast_output
    assert copy.deepcopy(norm).autocast_output and norm.state_dict().keys() == nn.LayerNorm(8).state_dict().keys()
    old = nn.LayerNorm(8)
    old.__class__ = backend.LayerNorm
    assert not old.autocast_output and "autocast_output" not in vars(old)
    assert backend.ModelNew((4, 2), autocast_output=True).autocast_output
    with pytest.raises(TypeError):
        backend.layer_norm(torch.ones(2, 8), (8,), None, None, 1e-5, None, 1.0, True)

    class Derived(backend.LayerNorm):
        pass

    model = nn.Sequential(nn.LayerNorm(8), backend.LayerNorm(8), Derived(8), nn.Linear(8, 8))
    for value, expected in ((None, False), (True, True), (None, True), (False, False)):
        backend.replace_layer_norm(model, autocast_output=value)
        assert [module.autocast_output for module in model[:3]] == [expected] * 3
        assert not hasattr(model[3], "autocast_output")
    model = backend.replace_layer_norm(nn.Sequential(nn.LayerNorm(8)), autocast_output=True)
    assert model[0].autocast_output


def test_a_module_of_an_older_version_is_loaded(backend):
    """A pickle has the attributes of the module, but not that of the class."""
    norm = backend.LayerNorm(8, device=backend.device)
    del norm.autocast_output
    loaded = pickle.loads(pickle.dumps(norm))
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        assert loaded(torch.ones(2, 8, device=backend.device)).dtype == torch.float32
    assert "autocast_output" not in repr(loaded)


class Block(nn.Module):
    """A residual block, whose norm has float32 input, as in GPT-2."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def model_of(backend, option):
    torch.manual_seed(3)
    norms = [backend.LayerNorm(64, autocast_output=option) for _ in range(3)]
    return nn.Sequential(Block(norms[0]), Block(norms[1]), norms[2], nn.Linear(64, 4)).to(backend.device)


def test_torch_compile_records_one_graph(backend):
    """It records PyTorch's operation and the conversion, and recompiles if the attribute or autocast changes."""
    graphs = []

    def record(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    norm = backend.LayerNorm(64, device=backend.device, autocast_output=True)
    x = torch.randn(5, 64, device=backend.device)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend=record, fullgraph=True)

    def dtype_of(enabled, dtype=torch.bfloat16):
        with torch.autocast(backend.device, dtype=dtype, enabled=enabled):
            y, expected = compiled(x), norm(x)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
            return y.dtype

    assert dtype_of(True) == torch.bfloat16 and len(graphs) == 1
    assert "layer_norm" in graphs[0] and backend.ops.name not in graphs[0]
    assert dtype_of(True, torch.float16) == torch.float16
    assert dtype_of(False) == torch.float32
    norm.autocast_output = False
    assert dtype_of(False) == torch.float32


def test_torch_compile_of_long_rows_records_the_op(backend):
    x = torch.randn(2, 16388, device=backend.device, dtype=torch.float32, requires_grad=True)
    norm = backend.LayerNorm(16388, device=backend.device, autocast_output=True)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    results = []
    for f in (compiled, norm):
        with torch.autocast(backend.device, dtype=torch.bfloat16):
            y = f(x)
        results.append([y, *torch.autograd.grad(y, [x, *norm.parameters()], torch.ones_like(y))])
    assert results[0][0].dtype == torch.bfloat16 and same_bits(*results)


def test_exported_traced_and_scripted_programs_ignore_it(backend):
    """They run without autocast, where a linear layer of float32 weights rejects 16-bit input."""
    model, x = model_of(backend, True).eval(), torch.randn(5, 64, device=backend.device)
    norm, expected = model[2], model[2](x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [torch.jit.script(norm)]
        with torch.autocast(backend.device, dtype=torch.bfloat16, cache_enabled=False):
            programs.append(torch.jit.trace(norm, x))
            if hasattr(torch.compiler, "_is_exporting_flag"):  # PyTorch 2.7
                programs.append(torch.export.export(norm, (x,)).module())
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    for program in programs:
        y = program(x)
        assert y.dtype == torch.float32 and model[3](y).dtype == torch.float32
        torch.testing.assert_close(y, expected)


@every_dtype
def test_training_steps_have_equal_bits(backend, dtype):
    """Losses and gradients of several steps, with GradScaler, if each output has one consumer."""
    results = []
    for option in (False, True):
        model = model_of(backend, option)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(backend.device, init_scale=256.0) if hasattr(torch.amp, "GradScaler") else None
        found = []
        for number in range(4):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(backend.device)
            with torch.autocast(backend.device, dtype=dtype):
                loss = model(x).float().square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            found += [loss.detach().view(1), *(p.grad.clone() for p in model.parameters())]
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        results.append(found)
    assert same_bits(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(backend, use_reentrant):
    results = []
    for option in (False, True):
        model = model_of(backend, option)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(backend.device).requires_grad_()
        with torch.autocast(backend.device, dtype=torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), x)] if not use_reentrant else [y.detach()])
        if use_reentrant:
            y.float().sum().backward()
            results[-1] += [x.grad, *(p.grad for p in model.parameters())]
    assert same_bits(*results)


def test_under_ddp(backend, mesh):
    """One process, whose gradients are averaged with nobody's: they have the bits of those without DDP."""
    x, results = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(backend.device), []
    for wrap in (lambda model: model, nn.parallel.DistributedDataParallel):
        model = model_of(backend, True)
        with torch.autocast(backend.device, dtype=torch.bfloat16):
            y = wrap(model)(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    assert same_bits(*results)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_in_a_cuda_graph(backend, given):
    if not backend.is_cuda:
        pytest.skip("emulated GPUs have no graphs")
    x = torch.randn(64, 768, device="cuda", dtype=given)
    norm = backend.LayerNorm(768, device="cuda", autocast_output=True)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        expected = norm(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = norm(x)
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, expected)


def test_arguments_of_the_ops_are_checked(backend):
    ops = backend.ops
    x, weight, bias, dy = case_of(backend, 5, 64, torch.bfloat16)
    for given, dtype in (
        (x, torch.float64),
        (x, torch.int32),
        (x.bfloat16(), torch.float16),
        (x.half(), torch.float32),
    ):
        with pytest.raises(RuntimeError, match="Expected dtype of input's dtype"):
            ops.layer_norm(given, [64], None, None, EPS, 0, 1.0, dtype)
    _, statistics = ops.layer_norm_forward(x, [64], weight, bias, EPS, 0, 1.0, torch.bfloat16)
    backward = functools.partial(ops.layer_norm_backward, normalized_shape=[64], statistics=statistics, weight=weight)
    backward = functools.partial(backward, bias=bias, eps=EPS, activation=0, scale=1.0, output_mask=[True] * 3)
    assert [t.dtype for t in backward(dy, x)] == [torch.float32] * 3
    for grad, given in ((dy.double(), x), (dy, x.half()), (dy.float(), x.bfloat16())):
        with pytest.raises(RuntimeError, match="Expected grad_output of input's dtype"):
            backward(grad, given)


def test_nested_and_distributed_tensors_are_converted_once(backend, mesh):
    tensor = torch.distributed.tensor
    x, weight, bias, _ = random_case(6, 8, torch.float32, device=backend.device)
    placed = [tensor.distribute_tensor(t, mesh, [tensor.Replicate()]) for t in (x, weight, bias)]
    nested = torch.nested.as_nested_tensor(list(x.split([2, 4])), layout=torch.jagged)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = backend.layer_norm(placed[0], (8,), placed[1], placed[2], autocast_output=True)
        z = backend.layer_norm(nested, (8,), weight, bias, autocast_output=True)
    expected = nn.functional.layer_norm(x, (8,), weight, bias)
    for result in (y.full_tensor(), z.values()):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, expected.bfloat16(), rtol=2e-2, atol=2e-2)


@on_emulated
@every_dtype
def test_on_gpus_without_newer_instructions(backend, dtype):
    for name, sms in (("turing", 2), ("ampere", 2), ("blackwell", 4), ("mps", 8)):
        with backend.on(emulator.GPUS[name](sms)):
            for rows, cols in itertools.product((9, 300), (36, 512, 1028, 2052)):
                tensors = case_of(backend, rows, cols, dtype)
                assert same_bits(*(step(backend, tensors, dtype, option) for option in (False, True)))


def test_the_switch_converts_as_well(monkeypatch, backend):
    """With LAYERNORM_INLINE_DISABLE=1, the dtype is the same, so that models do not change."""
    monkeypatch.setattr(backend.module, "_is_disabled", True)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = backend.layer_norm(torch.randn(3, 8, device=backend.device), (8,), autocast_output=True)
    assert y.dtype == torch.bfloat16


def test_saved_modules_have_the_attribute(backend):
    buffer = io.BytesIO()
    torch.save(backend.LayerNorm(8, autocast_output=True), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).autocast_output
