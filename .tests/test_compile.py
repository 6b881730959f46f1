"""torch.compile in one graph, export, CUDA graphs by reduce-overhead, fake tensors, opcheck, PyTorch's own samples."""

import sys

import pytest
import torch
from processes import run_here
from reference import EPS, FLOATS, random_case
from torch import nn

import layernorm_inline

kernels = pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_tensors_have_the_right_shapes(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6, 8, 5, device="cuda", dtype=dtype).transpose(0, 1)
        y = layernorm_inline.layer_norm(x, (8, 5), torch.empty(8, 5, device="cuda", dtype=dtype))
        assert (y.shape, y.dtype, y.stride(), y.device.type) == ((6, 4, 8, 5), dtype, (160, 40, 5, 1), "cuda")
        with pytest.raises(RuntimeError, match="normalized_shape"):
            layernorm_inline.layer_norm(x, (8, 6))


@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_in_one_graph(backend, training):
    module = nn.Sequential(nn.Linear(64, 64), backend.ModelNew(64), nn.ReLU()).to(backend.device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(training):
        for batch in (3, 5, 8):
            x = torch.randn(batch, 64, device=backend.device)
            torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
            if training:
                gradients = []
                for m in (compiled, module):
                    module.zero_grad()
                    m(x).square().sum().backward()
                    gradients.append([p.grad.clone() for p in module.parameters()])
                torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def compile_the_first_use(name):
    """The second library is loaded while Dynamo traces."""
    from conftest import Backend

    backend = Backend(name)

    def function(x, activation):
        return backend.layer_norm(x, (64,), activation=activation, scale=0.5).sin()

    with backend.on():
        x = torch.randn(5, 64, device=backend.device, requires_grad=True)
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        assert not hasattr(backend.module._epilogue_ops, "layer_norm")
        for rows in (x, x[:3]):
            for activation in (None, "gelu", "gelu_tanh"):
                results = []
                for f in (compiled, function):
                    y = f(rows, activation)
                    results.append([y, *torch.autograd.grad(y.square().sum(), x)])
                torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.vmap(function, (0, None))(x, "gelu"), function(x, "gelu"))


def test_first_use_of_an_activation_in_torch_compile(backend):
    """In a process of its own, which has not loaded the second library."""
    done = run_here(f"import test_compile; test_compile.compile_the_first_use({backend.name!r})")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="this PyTorch has no opcheck")
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_opcheck(backend, affine):
    x, weight, bias, dy = random_case(6, 40, torch.float32, affine, seed=0, device=backend.device)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    for ops, activation, scale in ((backend.ops, 0, 1.0), (backend.epilogue_ops, 1, 2.0)):
        torch.library.opcheck(ops.layer_norm.default, (leaves[0], [40], *leaves[1:], EPS, activation, scale))
        forward = (x, [40], weight, bias, EPS, activation, scale)
        torch.library.opcheck(ops.forward.default, forward)
        _, statistics = ops.forward(*forward)
        backward = (dy, x, [40], statistics, weight, bias, activation, scale, [True, weight is not None, False])
        torch.library.opcheck(ops.backward.default, backward)


def test_export_and_no_recompiling(backend):
    module = nn.Sequential(backend.ModelNew(16)).to(backend.device)
    batches = [torch.randn(n, 6, 16, device=backend.device) for n in (4, 9, 17)]
    dynamic = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(module, (batches[0],), dynamic_shapes=dynamic).module()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter, dynamic=True, fullgraph=True)
    for x in batches:
        torch.testing.assert_close(exported(x), module(x), rtol=0, atol=0)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_reduce_overhead(backend):
    module = nn.Sequential(nn.Linear(64, 64), backend.ModelNew(64), nn.Linear(64, 8)).to(backend.device)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(5, 64, device=backend.device)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        module.zero_grad()
        compiled(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], expected, atol=1e-4, rtol=1e-4)


def compare_samples_of_pytorchs_own_tests():
    import types
    import unittest

    # PyTorch's test utilities import expecttest, which nothing here needs.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.layer_norm")
    samples = 0
    for dtype in FLOATS:
        for sample in info.sample_inputs("cuda", dtype, requires_grad=True):
            results = []
            for function in (info.op, layernorm_inline.layer_norm):
                y = function(sample.input, *sample.args, **sample.kwargs)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), sample.input)])
            torch.testing.assert_close(results[0][0], results[1][0])
            torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-2)  # rows of two: all cancels
            samples += 1
    for bad in info.error_inputs("cuda") if info.error_inputs_func else ():
        with pytest.raises(bad.error_type, match=bad.error_regex):
            layernorm_inline.layer_norm(bad.sample_input.input, *bad.sample_input.args, **bad.sample_input.kwargs)
    assert samples >= 6 * len(FLOATS)


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_samples_of_pytorchs_own_tests(backend):
    """In a process of its own: PyTorch's test utilities forbid their process to set cuDNN's flags."""
    done = run_here("import test_compile; test_compile.compare_samples_of_pytorchs_own_tests()")
    assert done.returncode == 0, done.stderr
