"""Tests of torch.compile, torch.export, ONNX, fake tensors and opcheck."""

import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import this_gpu
from conftest import Backend
from processes import package, run_here
from reference import EPS, FLOATS, random_case
from test_convolution import convolutions_in_tf32
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import layernorm_inline
from test_layernorm_inline import ARGUMENTS_34

kernels = pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_tensors_have_the_right_shapes(dtype):
    with FakeTensorMode():
        x = torch.empty(4, 6, 8, 5, device="cuda", dtype=dtype).transpose(0, 1)
        y = layernorm_inline.layer_norm(x, (8, 5), torch.empty(8, 5, device="cuda", dtype=dtype))
        assert (y.shape, y.dtype, y.stride(), y.device.type) == ((6, 4, 8, 5), dtype, (160, 40, 5, 1), "cuda")
        with pytest.raises(RuntimeError, match="normalized_shape"):
            layernorm_inline.layer_norm(x, (8, 6))


def functions_in_graph(function, *arguments):
    """Returns the names of the functions in the graph that torch.compile makes. Raises an error at a graph break."""
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    torch._dynamo.reset()
    strict = {name: True for name in ("only_allow_pt2_compliant_ops",) if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(strict):
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return " ".join(names)


@pytest.mark.parametrize("dtype,cols,autocast,keeps_op", [
    (torch.float32, 8, False, False),
    (torch.float32, 4096, False, False),
    (torch.float32, 4100, False, True),  # more than 16 KB
    (torch.float32, 2041, False, True),  # not a multiple of 16 bytes
    (torch.bfloat16, 8192, False, False),
    (torch.bfloat16, 8200, False, True),
    (torch.bfloat16, 1020, False, True),
    (torch.float32, 2041, True, False),  # under autocast, Inductor fuses the casts
    (torch.float32, 16384, True, False),
    (torch.bfloat16, 16388, True, True),
])  # fmt: skip
def test_rows_that_are_left_to_inductor(backend, dtype, cols, autocast, keeps_op):
    """torch.compile records PyTorch's layer_norm, or the op of layernorm_inline if keeps_op is True."""
    x = torch.randn(2, cols, device=backend.device, dtype=dtype)
    norm = backend.LayerNorm(cols, device=backend.device, dtype=dtype)
    shape = (2, cols // 2) if cols % 2 == 0 else (cols,)
    with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=autocast):
        names = [
            functions_in_graph(norm, x),
            functions_in_graph(lambda x: backend.layer_norm(x.view(2, *shape), shape, activation="gelu"), x),
        ]
        expected = "layernorm_" if keeps_op else "layer_norm"
        assert all((backend.ops.name in name) == keeps_op and expected in name for name in names), names
        torch.testing.assert_close(torch.compile(norm, backend="aot_eager")(x), norm(x), atol=2e-2, rtol=2e-2)


FIRST_USE = """
    import glob, os
    found = glob.glob
    glob.glob = lambda path, **options: [] if "_epilogue" in path else found(path, **options)
    import test_compile
    backend = test_compile.Backend({name!r})
    glob.glob = found
    test_compile.{function}(backend)
"""


def run_first_use(function, backend):
    """Runs the function in a new process, whose import has not found the second library, although it was compiled."""
    return run_here(textwrap.dedent(FIRST_USE).format(name=backend.name, function=function.__name__))


def compile_the_first_use(backend):
    """Asserts that torch.compile works if the second library is loaded while Dynamo traces."""

    def function(x, weight, bias, activation):
        return backend.layer_norm(x, (64,), weight, bias, activation=activation, scale=0.5).sin()

    with backend.on():
        tensors = [torch.randn(size, device=backend.device, requires_grad=True) for size in ((5, 64), 64, 64)]
        x, weight, bias = tensors
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        assert not hasattr(backend.module._epilogue_ops, "layer_norm")
        for rows in (x, x[:3]):
            for activation in (None, "gelu", "gelu_tanh"):
                results = []
                for f in (compiled, function):
                    y = f(rows, weight, bias, activation)
                    results.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
                torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
        mapped = torch.vmap(function, (0, None, None, None))
        torch.testing.assert_close(mapped(x, weight, bias, "gelu"), function(x, weight, bias, "gelu"))


@pytest.mark.full
def test_first_use_of_an_activation_in_torch_compile(backend):
    """The call runs in a new process, which has not loaded the second library."""
    done = run_first_use(compile_the_first_use, backend)
    assert done.returncode == 0, done.stderr


OPS_OF_PROBLEM_34 = "layer_norm", "conv_transpose3d_layer_norm_gelu"


def train_problem_34(backend):
    """Asserts that the import has not loaded problem 34's library without that with an activation, which backward needs.

    The constructor loads both.
    """
    with backend.on(), convolutions_in_tf32(True):
        libraries = backend.module._epilogue_ops, backend.module._convolution_ops
        assert not any(hasattr(ops, name) for ops, name in zip(libraries, OPS_OF_PROBLEM_34))
        model = backend.Convolution(*ARGUMENTS_34).to(backend.device)
        assert all(hasattr(ops, name) for ops, name in zip(libraries, OPS_OF_PROBLEM_34))
        x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
        y = model(x)
        assert y.grad_fn.name() == "ConvTranspose3dLayerNormGELUBackward"
        y.sum().backward()
        norm = model.layer_norm
        z = nn.functional.layer_norm(model.conv_transpose(x), (64,), norm.weight, norm.bias)
        expected = torch.autograd.grad(nn.functional.gelu(z).sum(), model.parameters())
        torch.testing.assert_close([p.grad for p in model.parameters()], [*expected], atol=2e-2, rtol=1e-3)


def compile_problem_34(backend):
    """Asserts that a compiled training step works in a process that has not loaded the second library, twice."""
    with backend.on(), convolutions_in_tf32(True):
        model = backend.Convolution(*ARGUMENTS_34).to(backend.device)
        x = torch.randn(1, 32, 1, 2, 32, device=backend.device)
        gradients = []
        for call in (torch.compile(model, fullgraph=True), model):
            gradients.append(torch.autograd.grad(call(x).square().sum(), [*model.parameters()]))
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("step", [train_problem_34, compile_problem_34])
def test_first_step_of_problem_34(backend, step):
    """Each call runs in a new process. The second one finds the compiled graphs of the first one in PyTorch's cache."""
    if backend.is_cuda and this_gpu()[0].code != 90:
        pytest.skip("needs a Hopper GPU")
    for _ in range(2):
        done = run_first_use(step, backend)
        assert done.returncode == 0, done.stderr


def call_from_threads(backend):
    """Asserts that several threads can make the first call with an activation, which loads the second library."""
    barrier = threading.Barrier(8)
    assert not hasattr(backend.module._epilogue_ops, "layer_norm")
    sys.setswitchinterval(1e-6)

    def function(x):
        return backend.layer_norm(x, (16,), activation="gelu")

    def call(function):
        barrier.wait()
        return function(x)

    with backend.on(), ThreadPoolExecutor(8) as pool:
        x = torch.randn(6, 16, device=backend.device)
        expected = nn.functional.gelu(nn.functional.layer_norm(x, (16,)))
        for result in pool.map(call, [function, torch.vmap(function)] * 4):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_first_use_of_an_activation_in_many_threads(backend):
    assert backend.epilogue_ops  # compiles the second library if necessary, so that the new process only loads it
    done = run_first_use(call_from_threads, backend)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="this PyTorch has no opcheck")
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_opcheck_accepts_the_ops(backend, affine):
    x, weight, bias, dy = random_case(6, 40, torch.float32, affine, seed=0, device=backend.device)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    for ops, activation, scale in ((backend.ops, 0, 1.0), (backend.epilogue_ops, 1, 2.0)):
        torch.library.opcheck(ops.layer_norm.default, (leaves[0], [40], *leaves[1:], EPS, activation, scale))
        forward = (x, [40], weight, bias, EPS, activation, scale)
        torch.library.opcheck(ops.layer_norm_forward.default, forward)
        _, statistics = ops.layer_norm_forward(*forward)
        backward = (dy, x, [40], statistics, weight, bias, EPS, activation, scale, [True, weight is not None, False])
        torch.library.opcheck(ops.layer_norm_backward.default, backward)


class EveryNorm(nn.Module):
    """Rows for which torch.compile uses layernorm_inline, an activation, and the model of problem 34."""

    def __init__(self, module):
        super().__init__()
        self.norm, self.layer_norm = module.LayerNorm(31), module.layer_norm
        self.model = module.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1)

    def forward(self, x, z):
        return self.layer_norm(self.norm(x), (31,), activation="gelu_tanh", scale=2.0), self.model(z)


class StoredNorms(nn.Module):
    """Rows that are left to the compiler, rows for which it calls layernorm_inline, and an activation."""

    def __init__(self, module):
        super().__init__()
        self.short, self.norm, self.layer_norm = module.LayerNorm(32), module.LayerNorm(31), module.layer_norm

    def forward(self, x):
        # All arguments of the function are given, because PyTorch 2.11 stores guards on defaults that it cannot load.
        x = self.norm(self.short(x)[:, 1:] * 2)
        return self.layer_norm(x, (31,), None, None, 1e-5, "gelu_tanh", 2.0, autocast_output=False)


def use_stored_program(name):
    """Compiles norms, unless the program is on disk. Prints which of the two."""
    from torch._dynamo.precompile_context import PrecompileContext

    backend = Backend(name)
    assert hasattr(backend.module._epilogue_ops, "layer_norm")
    assert hasattr(backend.module._convolution_ops, OPS_OF_PROBLEM_34[1])
    torch.manual_seed(0)
    with torch.no_grad(), backend.on(), torch._dynamo.config.patch(caching_precompile=True):
        model, x = StoredNorms(backend.module).to(backend.device), torch.randn(3, 32, device=backend.device)
        y = torch.compile(model, fullgraph=True)(x)
        torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)
        PrecompileContext.save_to_dynamo_cache()
    print("found" if torch._dynamo.utils.counters["dynamo_cache"]["dynamo_cache_hit"] else "compiled")


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < "2.9", reason="older versions store no programs")
def test_stored_programs_run_in_other_processes(backend, tmp_path):
    """Nothing is traced in the second process, so the import must have loaded what the program needs."""
    assert backend.epilogue_ops and backend.convolution_ops  # compiles them if necessary
    for expected in ("compiled", "found"):
        code = f"import test_compile; test_compile.use_stored_program({backend.name!r})"
        done = run_here(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_COMPILE_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == expected


RECORDERS = {
    "torch.export": lambda m, x: torch.export.save(torch.export.export(m, x, strict=False), "program"),
    "torch.export, strict": lambda m, x: torch.export.save(torch.export.export(m, x, strict=True), "program"),
    "torch.jit.trace": lambda m, x: torch.jit.save(torch.jit.trace(m, x), "program"),
    "torch.jit.script": lambda m, x: torch.jit.save(torch.jit.script(m.norm), "program"),
}


@pytest.mark.skipif(torch.__version__ < "2.7", reason="older versions have no flag for export")
@pytest.mark.parametrize(
    "recorder", ["torch.export", *(pytest.param(name, marks=pytest.mark.full) for name in list(RECORDERS)[1:])]
)
def test_recorded_programs_load_without_layernorm_inline(backend, recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = EveryNorm(backend.module).to(backend.device).eval()
    inputs = tuple(torch.randn(shape).to(backend.device) for shape in ((3, 31), (1, 32, 1, 2, 32)))
    with torch.no_grad(), convolutions_in_tf32(False):
        RECORDERS[recorder](module, inputs)
        expected = module.norm(inputs[0]) if "script" in recorder else module(*inputs)
        torch.save((inputs[: 1 if "script" in recorder else 2], expected), "data")
        code = f"""
            import torch
            torch.backends.cudnn.allow_tf32 = False
            program = {"torch.export.load('program').module()" if "export" in recorder else "torch.jit.load('program')"}
            inputs, expected = torch.load({str(tmp_path / "data")!r})
            torch.testing.assert_close(program(*inputs), expected)
        """
        done = run_here(textwrap.dedent(code).replace("'program'", repr(str(tmp_path / "program"))), PYTHONPATH="")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_contains_layer_normalization(backend, dynamo, tmp_path):
    onnx = package("onnx")
    package("onnxscript")
    module = nn.Sequential(nn.Linear(31, 31), backend.LayerNorm(31), nn.GELU()).to(backend.device).eval()
    x, path, version = torch.randn(4, 31, device=backend.device), tmp_path / "model.onnx", 18 if dynamo else 17
    torch.onnx.export(module, (x,), path, dynamo=dynamo, opset_version=version)
    graph = onnx.load(path).graph
    assert "LayerNormalization" in {node.op_type for node in graph.node}


def test_arguments_of_numpy_work_under_torch_compile(backend):
    numpy = package("numpy")
    x = torch.randn(3, 31, device=backend.device)
    expected = nn.functional.layer_norm(x, (31,), eps=0.25)
    for size, eps in (((31,), numpy.float64(0.25)), ([numpy.int64(31)], 0.25), (numpy.prod((31, 1)), 0.25)):
        norm = backend.LayerNorm(size, eps=eps, device=backend.device)
        for function in (norm, torch.compile(norm, backend="aot_eager", fullgraph=True)):
            torch._dynamo.reset()
            torch.testing.assert_close(function(x), expected)


def test_export_and_torch_compile_accept_dynamic_batches(backend):
    module = nn.Sequential(backend.ModelNew(16)).to(backend.device)
    batches = [torch.randn(n, 6, 16, device=backend.device) for n in (4, 9, 17)]
    dynamic = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(module, (batches[0],), dynamic_shapes=dynamic).module()
    graphs = []
    compiled = torch.compile(module, backend=lambda g, _: graphs.append(g) or g, dynamic=True, fullgraph=True)
    for x in batches:
        torch.testing.assert_close(exported(x), module(x))
        torch.testing.assert_close(compiled(x), module(x))
    assert len(graphs) == 1


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_reduce_overhead_agrees_with_eager(backend):
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


# ---- What torch.compile, torch.export and torch.jit.trace record ----


class RejectsMixedDtypes(TorchDispatchMode):
    """Fails if weight and bias have another dtype than input, as PyTorch's CUDA kernels do. Its CPU kernels accept it."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        dtypes = {a.dtype for a in arguments if isinstance(a, torch.Tensor)}
        assert len(dtypes) <= 1 or "native_layer_norm" not in str(function)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("cols", [31, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_with_float32_weight_can_be_recorded(backend, cols, dtype):
    module = nn.Sequential(backend.LayerNorm(cols, device=backend.device))  # float32
    x, graphs = torch.randn(3, cols, device=backend.device, dtype=dtype), []
    torch.compile(module, backend=lambda graph, inputs: graphs.append((graph, inputs)) or graph, fullgraph=True)(x)
    exported = [torch.export.export(module, (x,), strict=strict).module() for strict in (False, True)]
    for program in (lambda x: graphs[0][0](*graphs[0][1])[0], *exported, torch.jit.trace(module, x)):
        with RejectsMixedDtypes():
            torch.testing.assert_close(program(x), module(x))


@pytest.mark.skipif(not hasattr(symbolic_shapes, "has_static_value"), reason="this PyTorch cannot tell what is dynamic")
def test_dynamic_columns_are_left_to_pytorch_without_guards(backend):
    def function(x):
        return backend.layer_norm(x, x.shape[-1:]) + 1

    graphs = []
    compiled = torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    for cols in (31, 32, 8000):  # not a multiple of 16 bytes; fused; more than 16 KB
        x = torch.randn(3, cols, device=backend.device)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), function(x))
    assert len(graphs) == 1
    x = torch.randn(3, 31, device=backend.device)
    torch._dynamo.decorators.mark_unbacked(x, 1)
    assert backend.ops.name not in functions_in_graph(function, x)


def test_make_fx_does_not_specialize_dynamic_columns(backend):
    graph = make_fx(lambda x: backend.layer_norm(x, x.shape[-1:]), tracing_mode="symbolic")
    graph = graph(torch.randn(3, 31, device=backend.device))
    x = torch.randn(2, 40, device=backend.device)
    torch.testing.assert_close(graph(x), nn.functional.layer_norm(x, (40,)))


class Scaled(nn.Module):
    def __init__(self, layer_norm, scale):
        super().__init__()
        self.layer_norm, self.scale = layer_norm, scale

    def forward(self, x, t):
        return self.layer_norm(x, (31,), scale=self.scale(x, t))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("scale", [lambda x, t: x.shape[0], lambda x, t: x.shape[0] ** -0.5, lambda x, t: t.item()])
def test_a_scale_that_depends_on_the_input_can_be_exported(backend, scale, strict):
    x, t = torch.randn(4, 31, device=backend.device), torch.tensor(0.5)
    dynamic = ({0: torch.export.Dim("rows", min=1, max=100)}, None)
    exported = torch.export.export(Scaled(backend.layer_norm, scale), (x, t), dynamic_shapes=dynamic, strict=strict)
    rows = torch.randn(7, 31, device=backend.device)
    expected = nn.functional.layer_norm(rows, (31,)) * scale(rows, 3 * t)
    torch.testing.assert_close(exported.module()(rows, 3 * t), expected)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("cols", [31, 64])
def test_scales_of_numpy_and_subclasses_of_tensor_under_torch_compile(backend, cols):
    number = package("numpy").float32(0.5)
    x = torch.randn(3, cols, device=backend.device)
    compiled = torch.compile(lambda x, s: backend.layer_norm(x, (cols,), scale=s), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, number), backend.layer_norm(x, (cols,), scale=0.5))
    with pytest.raises(Exception, match="Expected scale to be a number, but got Tensor|TypeError"):
        compiled(x, torch.tensor(0.5))
    y = compiled(x.as_subclass(Subclass), 1.0)
    assert type(y) is Subclass and torch.equal(y.as_subclass(torch.Tensor), compiled(x, 1.0))
