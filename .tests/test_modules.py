"""Tests of LayerNorm, ModelNew and replace_layer_norm, with torch.nn, TorchScript, torch.fx and real models."""

import collections
import copy
import inspect
import operator
import pickle
import re
import shutil
import sys
import typing
import warnings

import pytest
import torch
from processes import SOURCE, package, run, run_here
from reference import assert_no_worse
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import layernorm_inline
from test_layernorm_inline import Model, randomize


@pytest.mark.parametrize(
    "arguments",
    [dict(normalized_shape=5), dict(normalized_shape=(3, 5)), dict(normalized_shape=[5], eps=1e-3),
     dict(normalized_shape=5, elementwise_affine=False), dict(normalized_shape=5, bias=False),
     dict(normalized_shape=torch.Size([5]), dtype=torch.float64), dict(normalized_shape=5, device="meta")],
    ids=str,
)  # fmt: skip
def test_layer_norm_agrees_with_nn_layer_norm(backend, arguments):
    """Construction, repr, state_dict, copying, pickling, conversion to other dtypes, and results."""
    if "bias" in arguments and "bias" not in nn.LayerNorm.__init__.__code__.co_varnames:
        pytest.skip("this PyTorch's nn.LayerNorm has no bias argument")
    original, new = nn.LayerNorm(**arguments), backend.LayerNorm(**arguments)
    assert isinstance(new, nn.LayerNorm)
    assert repr(new) == repr(original)
    assert list(new.state_dict()) == list(original.state_dict())
    assert [p.dtype for p in new.parameters()] == [p.dtype for p in original.parameters()]
    if arguments.get("device") == "meta":
        assert new(torch.empty(3, 5, device="meta")).shape == (3, 5)
        original.to_empty(device="cpu").reset_parameters()
        new.to_empty(device="cpu").reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), original.parameters()))
    randomize(original)
    new.load_state_dict(original.state_dict())
    original.load_state_dict(new.state_dict())
    x = torch.randn(2, 3, 5, dtype=arguments.get("dtype", torch.float32), device=backend.device)
    original.to(backend.device)
    for module in (new, copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        torch.testing.assert_close(module.to(backend.device)(x), original(x))
    for dtype in (torch.float64, torch.float16, torch.float32):
        torch.testing.assert_close(new.to(x.device, dtype)(x.to(dtype)), original.to(dtype)(x.to(dtype)))


def test_replace_layer_norm_converts_modules_in_place(backend):
    """Objects, parameters, hooks and results stay the same."""

    class Custom(nn.LayerNorm):
        pass

    LayerNorm = backend.LayerNorm

    class Derived(LayerNorm):
        pass

    def norms():
        return [type(m) for m in model.modules() if isinstance(m, nn.LayerNorm)]

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.LayerNorm(8), Custom(8), Derived(8)))
    model.to(backend.device)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    objects = [*model.parameters(), *model.modules()]
    x = torch.randn(4, 8, device=backend.device)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"skipped test_modules\..*\.Custom \(1\): name .* in types") as warned:
        assert backend.replace_layer_norm(model) is model
    assert len(warned) == 1 and warned[0].filename == __file__
    assert norms() == [LayerNorm, LayerNorm, Custom, Derived]
    with pytest.warns(UserWarning, match=r"skipped torch\.nn\.modules\.normalization\.LayerNorm \(1\):"):
        backend.replace_layer_norm(nn.Sequential(nn.LayerNorm(3), Custom(3)), types=Custom)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(backend.replace_layer_norm(nn.LayerNorm(3))) is LayerNorm
        assert type(backend.replace_layer_norm(Custom(3), types=Custom)) is LayerNorm
        backend.replace_layer_norm(model, types=(nn.LayerNorm, Custom))
        assert norms() == [LayerNorm] * 3 + [Derived]
        backend.replace_layer_norm(model)  # does nothing, and does not warn
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.modules()]))
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)
    assert len(calls) == 2
    for types in ((nn.GroupNorm,), "LayerNorm", None, (cls for cls in [nn.LayerNorm])):
        with pytest.raises(TypeError, match="types to be nn.LayerNorm or subclasses of it, but got .*"):
            backend.replace_layer_norm(model, types=types)
    for wrong in (None, nn.LayerNorm):
        with pytest.raises(TypeError, match=f"to be an nn.Module, but got {type(wrong).__name__}"):
            backend.replace_layer_norm(wrong)


@pytest.mark.parametrize("collection", [
    list, tuple, set, frozenset, collections.deque, dict.fromkeys, lambda types: dict.fromkeys(types).keys(),
    lambda types: dict(enumerate(types)).values(),
])  # fmt: skip
def test_replace_layer_norm_accepts_any_collection_of_types(backend, collection):
    """And no iterator: it would be exhausted after the first module."""

    class Custom(nn.LayerNorm):
        pass

    class Other(nn.LayerNorm):
        pass

    def converted(types):
        model = nn.Sequential(nn.LayerNorm(3), Custom(3), Other(3), nn.LayerNorm(3), Custom(3))
        backend.replace_layer_norm(model, types)
        return [type(norm) is backend.LayerNorm for norm in model]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it skips the others
        assert converted(collection([nn.LayerNorm, Custom])) == [True, True, False, True, True]
        assert converted(collection([Custom])) == [False, True, False, False, True]
        assert converted(collection([])) == [False] * 5
    for iterator in (iter(collection([nn.LayerNorm])), (cls for cls in collection([nn.LayerNorm]))):
        with pytest.raises(TypeError, match="types to be nn.LayerNorm or subclasses of it, but got .*"):
            converted(iterator)


def test_replace_layer_norm_warns_about_skipped_modules(backend):
    """PyTorch gives a parametrized module a generated class, and accelerate sets the attribute forward."""
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


def test_replace_layer_norm_converts_classes_of_packages_whose_names_begin_with_torch(backend, recwarn):
    """Classes of PyTorch itself stay, because it generates them; torchvision's and torchtune's are a user's choice."""
    for package_name, converted in (("torchvision.ops", True), ("torch.nn.modules", False)):
        cls = type("Norm", (nn.LayerNorm,), {"__module__": package_name})
        module = backend.replace_layer_norm(cls(3), types=cls)
        assert (type(module) is backend.LayerNorm) == converted, package_name
        assert len(recwarn) == (not converted), package_name
        recwarn.clear()


def test_replace_layer_norm_leaves_its_own_classes_after_a_reload(backend):
    # importlib.reload makes new classes of the same names.
    attributes = {"__module__": backend.LayerNorm.__module__, "__qualname__": backend.LayerNorm.__qualname__}
    before = type("LayerNorm", (nn.LayerNorm,), attributes)
    derived = type("ModelNew", (before,), {})
    model = nn.Sequential(before(8), derived(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.replace_layer_norm(model)


def test_model_new_loads_the_reference_model_of_problem_40(backend):
    reference = randomize(Model((3, 8)))
    for prefix, model in (("", backend.ModelNew((3, 8))), ("0.", nn.Sequential(backend.ModelNew((3, 8))))):
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


@pytest.mark.parametrize("when", ["before the import", pytest.param("after the import", marks=pytest.mark.full)])
def test_a_program_that_assigns_nn_layer_norm_works(when):
    """Libraries and users do this to change all models that are constructed later."""
    code = f"""
        import torch, warnings
        from torch import nn
        warnings.simplefilter("error")
        original, x = nn.LayerNorm, torch.randn(3, 8)
        model = nn.Sequential(nn.LayerNorm(8))
        if {when == "before the import"}:
            nn.LayerNorm = type("Foreign", (nn.Module,), {{}})
        import layernorm_inline as L
        nn.LayerNorm = L.LayerNorm
        assert issubclass(L.LayerNorm, original)
        torch.testing.assert_close(L.LayerNorm(8)(x), original(8)(x))
        assert type(L.replace_layer_norm(model)[0]) is L.LayerNorm
        L.replace_layer_norm(nn.Sequential(nn.LayerNorm(8)))  # does nothing, and does not warn
    """
    done = run_here(code)
    assert done.returncode == 0, done.stderr


def test_layer_norm_calls_torch_function_overrides(backend):
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


def test_layer_norm_works_with_the_rest_of_nn(backend):
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
    for module in (original, new):
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    torch.testing.assert_close(new(x), original(x))


def test_torchscript_and_fx_agree_with_pytorch(backend):
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


def test_what_the_readme_excludes_raises(backend):
    """README, Limits, "Not with": an error, and no wrong result."""
    model = nn.Sequential(nn.Linear(8, 8), backend.LayerNorm(8)).to(backend.device)
    x = torch.randn(4, 8, device=backend.device)
    y = model(x)
    with pytest.raises(RuntimeError, match="cannot handle function layer_norm"):
        call_for_per_sample_grads(model)(x)
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(backend.layer_norm)
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with pytest.raises((RuntimeError, NotImplementedError), match="LayerNormBackward"):
        with enable(torch.compile(backend="eager")):
            y.sum().backward()


def test_a_quantized_model_raises():
    model = nn.Sequential(torch.ao.quantization.QuantStub(), layernorm_inline.LayerNorm(8)).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        prepared = torch.ao.quantization.prepare(model)
        prepared(torch.randn(4, 8))
        converted = torch.ao.quantization.convert(prepared)
        with pytest.raises(NotImplementedError, match="QuantizedCPU"):
            converted(torch.randn(4, 8))


def real_model(name):
    """Returns a small model with random parameters, and its keyword arguments."""
    if name in ("convnext_tiny", "swin_t"):
        return getattr(package("torchvision").models, name)(num_classes=10), dict(x=torch.randn(2, 3, 64, 64))
    transformers = package("transformers")
    small = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    options = dict(Bert=small, GPT2=dict(n_embd=96, n_layer=2, n_head=4), ViT=dict(small, image_size=64))[name]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    if name == "ViT":
        return model, dict(pixel_values=torch.randn(2, 3, 64, 64))
    return model, dict(input_ids=torch.randint(0, 1000, (2, 40)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["Bert", "GPT2", "ViT", "convnext_tiny", "swin_t"])
def test_real_models_are_as_accurate_as_with_pytorch(backend, name):
    torch.manual_seed(0)
    model, inputs = real_model(name)
    original = model.to(backend.device).eval()
    converted, exact = backend.replace_layer_norm(copy.deepcopy(original)), copy.deepcopy(original).double()
    # torchvision's ConvNeXt also has a subclass of nn.LayerNorm that normalizes channels. It is not converted.
    assert sum(type(m) is backend.LayerNorm for m in converted.modules()) >= 2
    results = []
    for network in (exact, original, converted):
        dtype = next(network.parameters()).dtype
        given = {k: v.to(backend.device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
        y = network(**given)
        y = getattr(y, "last_hidden_state", y)
        y.square().mean().backward()
        results.append([("output", y.detach())] + [(k, p.grad) for k, p in network.named_parameters()])
    for (key, right), (_, pytorch_result), (_, result) in zip(*results):
        if right is None:
            assert result is None
        else:
            assert_no_worse(result, pytorch_result, right, factor=5, rounding=1e-5, name=key)


@pytest.mark.parametrize("name", [
    "layer_norm", "LayerNorm.forward", "replace_layer_norm", "ConvTranspose3dLayerNormGELUScaling.forward"
])  # fmt: skip
def test_all_arguments_are_annotated(name):
    function = operator.attrgetter(name)(layernorm_inline)
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    assert {*hints} == {*parameters, "return"} - {"self"}


@pytest.mark.parametrize("name", ["layer_norm", "replace_layer_norm", "ConvTranspose3dLayerNormGELUScaling"])
def test_the_examples_of_docstrings_run_without_a_gpu(name):
    (example,) = re.findall(r"Example: (.*)", getattr(layernorm_inline, name).__doc__)
    exec(example, {**vars(layernorm_inline), "nn": nn, "torch": torch})


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
