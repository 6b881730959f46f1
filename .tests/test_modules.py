"""Tests of LayerNorm, ModelNew and replace_layer_norm, together with torch.nn, TorchScript, torch.fx and real models."""

import copy
import inspect
import pickle
import re
import shutil
import sys
import typing
import warnings

import pytest
import torch
from processes import SOURCE, package, run, run_here
from reference import assert_no_worse, random_case, run_case
from torch import nn

import layernorm_inline
from test_layernorm_inline import randomize


@pytest.mark.parametrize(
    "arguments",
    [dict(normalized_shape=5), dict(normalized_shape=(3, 5)), dict(normalized_shape=[5], eps=1e-3),
     dict(normalized_shape=5, elementwise_affine=False), dict(normalized_shape=5, bias=False),
     dict(normalized_shape=torch.Size([5]), dtype=torch.float64), dict(normalized_shape=5, device="meta")],
    ids=str,
)  # fmt: skip
def test_layer_norm_agrees_with_nn_layer_norm(backend, arguments):
    """Construction, repr, state_dict, copying, pickling and results are those of nn.LayerNorm."""
    if "bias" in arguments and "bias" not in nn.LayerNorm.__init__.__code__.co_varnames:
        pytest.skip("this PyTorch's nn.LayerNorm has no bias argument")
    original, new = nn.LayerNorm(**arguments), backend.LayerNorm(**arguments)
    assert isinstance(new, nn.LayerNorm)
    assert repr(new) == repr(original)
    assert list(new.state_dict()) == list(original.state_dict())
    assert [p.dtype for p in new.parameters()] == [p.dtype for p in original.parameters()]
    if arguments.get("device") == "meta":
        return
    for p in original.parameters():
        nn.init.normal_(p)
    new.load_state_dict(original.state_dict())
    original.load_state_dict(new.state_dict())
    x = torch.randn(2, 3, 5, dtype=arguments.get("dtype", torch.float32), device=backend.device)
    original.to(backend.device)
    for module in (new, copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        torch.testing.assert_close(module.to(backend.device)(x), original(x))
    torch.testing.assert_close(new.float()(x.float()), original.float()(x.float()))


def test_replace_layer_norm_converts_modules_in_place(backend):
    """Exactly the modules of the given classes are converted, and objects, parameters, hooks and results stay the same."""

    class Custom(nn.LayerNorm):
        pass

    LayerNorm = backend.LayerNorm

    class Derived(LayerNorm):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.LayerNorm(8), Custom(8), Derived(8)))
    model.to(backend.device)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    parameters, modules = list(model.parameters()), list(model.modules())
    x = torch.randn(4, 8, device=backend.device)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"skipped test_modules\..*\.Custom \(1\): name .* in types") as warned:
        assert backend.replace_layer_norm(model) is model
    assert len(warned) == 1 and warned[0].filename == __file__
    assert [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)] == [LayerNorm, LayerNorm, Custom, Derived]
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert all(a is b for a, b in zip(modules, model.modules()))
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)
    assert len(calls) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(backend.replace_layer_norm(nn.LayerNorm(3))) is LayerNorm
        assert type(backend.replace_layer_norm(Custom(3), types=Custom)) is LayerNorm
    with pytest.warns(UserWarning, match=r"skipped torch\.nn\.modules\.normalization\.LayerNorm \(1\):"):
        backend.replace_layer_norm(nn.Sequential(nn.LayerNorm(3), Custom(3)), types=Custom)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.replace_layer_norm(model, types=(nn.LayerNorm, Custom))
        assert [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)] == [LayerNorm] * 3 + [Derived]
        backend.replace_layer_norm(model)  # does nothing, and does not warn
        for types in ((nn.GroupNorm,), "LayerNorm", None, (cls for cls in [nn.LayerNorm])):
            with pytest.raises(TypeError, match="types to be nn.LayerNorm or subclasses of it, but got .*"):
                backend.replace_layer_norm(model, types=types)
        for wrong in (None, nn.LayerNorm):
            with pytest.raises(TypeError, match=f"to be an nn.Module, but got {type(wrong).__name__}"):
                backend.replace_layer_norm(wrong)
        torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)


def test_replace_layer_norm_warns_about_skipped_modules(backend):
    """PyTorch gives a parametrized module a generated class, and accelerate's hooks set the module's attribute forward."""
    parametrized, patched = nn.LayerNorm(3).to(backend.device), nn.LayerNorm(3).to(backend.device)
    x = torch.randn(2, 3, device=backend.device)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched.forward = lambda x: 2 * type(patched).forward(patched, x)
    for module, message in [
        (parametrized, r"skipped torch\..*ParametrizedLayerNorm \(1\):.* before"),
        (nn.Sequential(patched, nn.LayerNorm(3).to(x)), r"skipped torch\..*LayerNorm \(1\):.* before"),
        (nn.Sequential(nn.Linear(3, 3)).to(backend.device), "found no nn.LayerNorm in Sequential"),
    ]:
        expected = module(x)
        for types in (nn.LayerNorm, [nn.LayerNorm, type(parametrized)]):
            with pytest.warns(UserWarning, match=message) as warned:
                backend.replace_layer_norm(module, types)
            assert len(warned) == 1
            torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-6)


def test_model_new_loads_the_reference_model_of_problem_40(backend):
    """KernelBench's Model has its norm in the attribute `ln`. ModelNew's own state_dict has nn.LayerNorm's names."""
    reference = nn.Module()
    reference.ln = randomize(nn.LayerNorm((3, 8)))
    for model in (backend.ModelNew((3, 8)), nn.Sequential(backend.ModelNew((3, 8)))):
        prefix = "0." if isinstance(model, nn.Sequential) else ""
        state = {prefix + name: value for name, value in reference.state_dict().items()}
        names = list(state)
        model.load_state_dict(state, strict=True)
        assert list(state) == names, "the caller's dict must not change"
        assert list(model.state_dict()) == [f"{prefix}weight", f"{prefix}bias"]
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), reference.state_dict().values()))
        model.load_state_dict(model.state_dict(), strict=True)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**state, f"{prefix}ln.other": torch.ones(1)}, strict=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        backend.LayerNorm((3, 8)).load_state_dict(reference.state_dict(), strict=True)


class Foreign(nn.Module):
    """A layer norm like one of another library. It is not a subclass of nn.LayerNorm, and has other arguments."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))


@pytest.mark.parametrize("assigned", ["L.LayerNorm", pytest.param("Foreign", marks=pytest.mark.full)])
@pytest.mark.parametrize("when", ["before the import", pytest.param("after the import", marks=pytest.mark.full)])
def test_a_program_that_assigns_nn_layer_norm_works(assigned, when):
    """Libraries and users do this to change all models that are constructed later."""
    code = f"""
        import torch, warnings
        from torch import nn
        from test_modules import Foreign
        warnings.simplefilter("error")
        original, x = nn.LayerNorm, torch.randn(3, 8)
        model = nn.Sequential(nn.LayerNorm(8))
        if {when == "before the import"}:
            import sys
            del sys.modules["layernorm_inline"]
            nn.LayerNorm = Foreign
        import layernorm_inline as L
        nn.LayerNorm = {assigned}
        assert issubclass(L.LayerNorm, original)
        torch.testing.assert_close(L.LayerNorm(8)(x), original(8)(x))
        assert type(L.replace_layer_norm(model)[0]) is L.LayerNorm
        if nn.LayerNorm is L.LayerNorm:
            L.replace_layer_norm(nn.Sequential(nn.LayerNorm(8)))  # does nothing, and does not warn
    """
    done = run_here(code)
    assert done.returncode == 0, done.stderr


def test_layer_norm_calls_torch_function_overrides(backend):
    """layer_norm calls the __torch_function__ of modes, of other classes, and of subclasses of Tensor."""
    calls = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    class Duck:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, args[1], kwargs["scale"]

    x, weight = torch.randn(2, 8, device=backend.device), torch.randn(8, device=backend.device)
    expected = backend.layer_norm(x, (8,), weight)
    with Mode():
        assert torch.equal(backend.layer_norm(x, (8,), weight), expected)
    assert calls[0] is backend.layer_norm
    for arguments in ((Duck(), (8,)), (x, (8,), Duck()), (x, (8,), None, Duck())):
        assert backend.layer_norm(*arguments, scale=2.0) == (backend.layer_norm, (8,), 2.0)
    subclass = backend.layer_norm(x.as_subclass(type("Subclass", (torch.Tensor,), {})), (8,), weight)
    assert type(subclass).__name__ == "Subclass" and torch.equal(subclass.as_subclass(torch.Tensor), expected)


@pytest.mark.skipif(not hasattr(torch.backends, "mha"), reason="this PyTorch cannot turn its fast path off")
def test_pytorchs_encoder_layer_calls_layer_norm_without_fast_path(backend):
    """In evaluation mode, PyTorch's fast path calls none of the encoder layer's modules, unless it is turned off."""
    LayerNorm = backend.LayerNorm
    encoder = backend.replace_layer_norm(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(backend.device)
    )
    calls = []
    x, before = torch.randn(2, 3, 8, device=backend.device), torch.backends.mha.get_fastpath_enabled()
    forward = LayerNorm.forward
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LayerNorm, "forward", lambda norm, x: calls.append(1) or forward(norm, x))
        for enabled, expected in ((True, 0), (False, 2)):
            torch.backends.mha.set_fastpath_enabled(enabled)
            try:
                encoder(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(before)
            assert len(calls) == expected


def test_layer_norm_works_with_the_rest_of_nn(backend):
    """Inference mode, functional_call, hooks, tied parameters and parametrizations work."""
    original = randomize(nn.LayerNorm(32).to(backend.device))
    new = backend.replace_layer_norm(copy.deepcopy(original))
    x = torch.randn(4, 32, device=backend.device)
    expected = original(x)
    with torch.inference_mode():
        torch.testing.assert_close(new(x), expected)
    torch.testing.assert_close(torch.func.functional_call(new, dict(original.named_parameters()), (x,)), expected)
    calls = []
    for register in (new.register_forward_hook, new.register_forward_pre_hook, new.register_full_backward_hook):
        register(lambda *_: calls.append(1))
    new(x.clone().requires_grad_()).sum().backward()
    assert len(calls) == 3

    tied = nn.ModuleList([backend.LayerNorm(32), backend.LayerNorm(32)]).to(backend.device)
    tied[1].weight = tied[0].weight
    tied[1](tied[0](x)).square().sum().backward()
    gradients = []
    for function in (nn.functional.layer_norm, backend.layer_norm):
        w = tied[0].weight.detach().clone().requires_grad_()
        function(function(x, (32,), w), (32,), w).square().sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(tied[0].weight.grad, gradients[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrized = copy.deepcopy(original)
    parametrized.__class__ = backend.LayerNorm
    nn.utils.parametrize.register_parametrization(parametrized, "weight", Double())
    torch.testing.assert_close(parametrized(x) - original.bias, 2 * (expected - original.bias), atol=1e-5, rtol=1e-5)


def test_torchscript_and_fx_agree_with_pytorch(backend):
    """torch.jit.script, torch.jit.trace and torch.fx.symbolic_trace can record LayerNorm and layer_norm."""
    original = randomize(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)))
    converted = backend.replace_layer_norm(copy.deepcopy(original)).to(backend.device)
    x = torch.randn(2, 8, device=backend.device, requires_grad=True)
    expected = original.to(backend.device)(x)
    graph = torch.fx.symbolic_trace(converted)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [backend.layer_norm] * 2
    scripted, traced = torch.jit.script(converted), torch.jit.trace(converted, x)
    for module in (scripted, traced, graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(*(torch.autograd.grad(m(x).sum(), x) for m in (module, original)))
    torch.testing.assert_close(torch.jit.script(converted[1])(x), original[1](x))

    layer_norm = backend.layer_norm

    def function(x):  # calls layer_norm through a variable, not as an attribute of a module
        return layer_norm(x, (8,), activation="gelu")

    graph = torch.fx.symbolic_trace(function)
    assert [node.target for node in graph.graph.nodes][-2] is backend.layer_norm
    for traced in (graph, torch.jit.trace(function, x), torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(traced(x), function(x))


def test_a_module_on_the_meta_device_can_be_materialized(backend):
    with torch.device("meta"):
        module = backend.LayerNorm(24)
    assert module(torch.empty(3, 24, device="meta")).shape == (3, 24)
    module = module.to_empty(device=backend.device)
    module.reset_parameters()
    x = torch.randn(3, 24, device=backend.device)
    torch.testing.assert_close(module(x), nn.functional.layer_norm(x, (24,)))


def hugging_face(name):
    transformers = package("transformers")
    small = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    ids = dict(input_ids=torch.randint(0, 1000, (2, 40)))
    if name == "BERT":
        return transformers.BertModel(transformers.BertConfig(**small)), ids
    if name == "GPT-2":
        return transformers.GPT2Model(transformers.GPT2Config(n_embd=96, n_layer=2, n_head=4)), ids
    config = transformers.ViTConfig(**small, image_size=64)
    return transformers.ViTModel(config), dict(pixel_values=torch.randn(2, 3, 64, 64))


def torch_vision(name):
    models = package("torchvision").models
    make = models.convnext_tiny if name == "ConvNeXt" else models.swin_t
    return make(num_classes=10), torch.randn(2, 3, 64, 64)


@pytest.mark.full
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT", "ConvNeXt", "Swin"])
def test_real_models_are_as_accurate_as_with_pytorch(backend, name):
    """The output and each gradient are about as close to float64 as with nn.LayerNorm.

    The error of a gradient is compared with PyTorch's error, and with the gradient's largest element.
    """
    torch.manual_seed(0)
    model, inputs = (torch_vision if name in ("ConvNeXt", "Swin") else hugging_face)(name)
    original = model.to(backend.device).eval()
    converted, exact = backend.replace_layer_norm(copy.deepcopy(original)), copy.deepcopy(original).double()
    # torchvision's ConvNeXt also has a subclass of nn.LayerNorm that normalizes channels. It is not converted.
    assert sum(type(m) is backend.LayerNorm for m in converted.modules()) >= 2
    results = []
    for network in (exact, original, converted):
        dtype = next(network.parameters()).dtype
        if isinstance(inputs, dict):
            given = {k: v.to(backend.device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
            y = network(**given).last_hidden_state
        else:
            y = network(inputs.to(backend.device, dtype))
        y.square().mean().backward()
        results.append([("output", y.detach())] + [(k, p.grad) for k, p in network.named_parameters()])
    for (key, right), (_, pytorch_result), (_, result) in zip(*results):
        if right is None:
            assert result is None
            continue
        assert_no_worse(result, pytorch_result, right, factor=5, rounding=1e-5, name=key)


def test_layer_norm_on_the_cpu_is_equal_to_pytorchs():
    x, weight, bias, dy = random_case(4, 6, torch.float64)
    results = run_case(layernorm_inline.layer_norm, x, weight, bias, dy)
    expected = run_case(nn.functional.layer_norm, x, weight, bias, dy)
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


def test_modules_can_be_converted_to_half_and_double(backend):
    module = backend.LayerNorm(8)
    assert module.double().weight.dtype == torch.float64
    assert module.half().weight.dtype == torch.float16
    x = torch.randn(2, 8, device=backend.device, dtype=torch.float16)
    assert module.to(backend.device)(x).dtype == torch.float16


@pytest.mark.parametrize(
    "function",
    [
        layernorm_inline.layer_norm,
        layernorm_inline.LayerNorm.forward,
        layernorm_inline.replace_layer_norm,
        layernorm_inline.ConvTranspose3dLayerNormGELUScaling.forward,
    ],
)
def test_all_arguments_are_annotated(function):
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    assert {*hints} == {*parameters, "return"} - {"self"}


@pytest.mark.parametrize("name", ["layer_norm", "replace_layer_norm", "ConvTranspose3dLayerNormGELUScaling"])
def test_the_examples_of_docstrings_run_without_a_gpu(name):
    (example,) = re.findall(r"Example: (.*)", getattr(layernorm_inline, name).__doc__)
    exec(example, {**vars(layernorm_inline), "nn": nn, "torch": torch})


def test_no_version_of_pytorch_is_compared():
    """NVIDIA's containers have versions such as 2.7.0a0, which compare as older than 2.7."""
    assert not re.search(r"torch\.__version__ *[<>=]", SOURCE.read_text())


@pytest.mark.full
def test_mypy_reports_nothing_for_a_project_that_uses_the_file(tmp_path):
    package("mypy")
    shutil.copy(SOURCE, tmp_path)
    (tmp_path / "user.py").write_text(
        "import torch\nfrom layernorm_inline import LayerNorm, layer_norm, replace_layer_norm\n"
        "y: torch.Tensor = layer_norm(torch.ones(2, 8), (8,), torch.ones(8), activation='gelu', scale=0.5)\n"
        "replace_layer_norm(torch.nn.Sequential(LayerNorm(8)), types=torch.nn.LayerNorm)\n"
    )
    done = run([sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "user.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
