"""PyTorch's own samples of layer_norm and nn.LayerNorm, and samples of problem 34's model, under every transform."""

import pytest
import torch
from processes import package, run_here
from reference import FIRST_SEED, FLOATS
from test_convolution import ARGUMENTS_34, SCALED, convolutions_in_tf32
from torch import nn
from transforms import TRANSFORMS, composed, difference

# Runs in a process of its own, because PyTorch's test utilities change global settings when they are imported.
SAVE_SAMPLES = """
    import itertools, torch
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    (op,) = (op for op in op_db if op.name == "nn.functional.layer_norm")
    (module,) = (m for m in module_db if m.module_cls is torch.nn.LayerNorm)
    functions, modules = [], []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for sample in itertools.chain(op.sample_inputs("cpu", dtype), op.reference_inputs("cpu", dtype)):
            functions.append((sample.input, *sample.args, sample.kwargs))
    for inputs in module.module_inputs_func(module, "cpu", torch.float32, requires_grad=False, training=True):
        constructor, forward = inputs.constructor_input, inputs.forward_input
        modules.append((constructor.args, constructor.kwargs, *forward.args))
    torch.save((functions, modules), {path!r})
"""
LARGE = ("jacobians", "hessians")  # transforms whose results have one entry for each pair of elements
full = pytest.mark.full
# Without --full, the samples of modules run with these, because test_transforms.py runs all.
FEW = ("forward", "backward", "double_backward", "jvp", "vjp_of_vjp", "vmap_over_all", "vmap_of_grad", "grad_of_vmap")
few_transforms = pytest.mark.parametrize(
    "transform", [name if name in FEW else pytest.param(name, marks=full) for name in TRANSFORMS]
)
every_transform = pytest.mark.parametrize(  # linearize is slow
    "transform", [pytest.param(name, marks=full) if name == "linearize" else name for name in TRANSFORMS]
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Returns lists of (input, normalized_shape, weight, bias, options), and of (arguments, options, input)."""
    package("expecttest")
    path = str(tmp_path_factory.getbasetemp() / "samples")
    done = run_here(SAVE_SAMPLES.format(path=path))
    assert done.returncode == 0, done.stderr
    return torch.load(path, weights_only=False)


def function_samples(samples, device, dtype):
    """Yields different samples as (input, weight, bias, normalized_shape, eps)."""
    known = set()
    for x, shape, *affine, options in samples[0]:
        weight, bias = (*affine, None, None)[:2]
        key = x.shape, shape, weight is None, bias is None
        if x.dtype == dtype and key not in known:
            known.add(key)
            yield *(t if t is None else t.to(device) for t in (x, weight, bias)), shape, options.get("eps", 1e-5)


def compared(transform, function, reference, tensors, rounding=2e-5, factor=3.0):
    """Returns the problem, as a sentence. function and reference take None for tensors that are not given."""

    def of_given(function):
        def given_only(*arguments):
            given = iter(arguments)
            return function(*(None if t is None else next(given) for t in tensors))

        return given_only

    given = tuple(t for t in tensors if t is not None)
    try:
        return difference(transform, of_given(function), of_given(reference), given, rounding, factor)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


@every_transform
@pytest.mark.parametrize("activation,scale", [
    (None, 1.0), ("gelu", 1.0), pytest.param("gelu_tanh", -1.5, marks=full),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(t, marks=full) for t in FLOATS[1:])], ids=str)
def test_samples_of_layer_norm(backend, samples, transform, activation, scale, dtype):
    problems = []
    for x, weight, bias, shape, eps in function_samples(samples, backend.device, dtype):
        for autocast in (False, True):

            def function(x, weight, bias):
                with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=autocast):  # noqa: B023
                    return backend.layer_norm(x, shape, weight, bias, eps, activation, scale)  # noqa: B023

            def reference(x, weight, bias):
                result = torch.float32 if autocast else None  # noqa: B023
                return composed(x, shape, weight, bias, eps, activation, scale, result)  # noqa: B023

            problem = compared(transform, function, reference, (x, weight, bias))
            if problem:
                problems.append(f"{[*x.shape]} {shape} eps {eps}{', autocast' * autocast}: {problem}")
    assert not problems, "\n".join(problems)


@few_transforms
@pytest.mark.parametrize("cls", ["LayerNorm", pytest.param("ModelNew", marks=full)])
def test_samples_of_nn_layer_norm(backend, samples, cls, transform):
    problems = []
    for arguments, options, x in samples[1]:
        if x.numel() > 200 and transform in LARGE:
            continue
        module = getattr(backend, cls)(*arguments, **options).to(backend.device)
        generator = torch.Generator().manual_seed(FIRST_SEED)
        parameters = [
            None if p is None else torch.randn(p.shape, generator=generator).to(backend.device)
            for p in (module.weight, module.bias)
        ]

        def function(x, weight, bias):
            given = {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}
            return torch.func.functional_call(module, given, (x,))  # noqa: B023

        def reference(x, weight, bias):
            return composed(x, module.normalized_shape, weight, bias, module.eps)  # noqa: B023

        problem = compared(transform, function, reference, (x.to(backend.device), *parameters))
        if problem:
            problems.append(f"{arguments} {options} {[*x.shape]}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_samples_as_meta_tensors(backend, samples, dtype):
    """The ops return tensors of the same shape, dtype and strides for meta tensors as for others."""
    for *tensors, shape, eps in function_samples(samples, backend.device, dtype):
        results = []
        for device in (backend.device, "meta"):
            x, weight, bias = (t if t is None else t.to(device) for t in tensors)
            y, statistics = backend.ops.layer_norm_forward(x, shape, weight, bias, eps, 0, 1.0)
            gradients = backend.ops.layer_norm_backward(
                y, x, shape, statistics, weight, bias, eps, 0, 1.0, [True, weight is not None, bias is not None]
            )
            given = [t for t in (y, statistics, *gradients) if t is not None]
            results.append([(t.shape, t.dtype, t.stride()) for t in given])
        assert results[0] == results[1]


# The arguments of the model, the shape of input, dtype, and autocast.
MODELS = {
    "TF32, one kernel": (SCALED, (1, 32, 1, 1, 32), torch.float32, False),
    "bfloat16, one kernel": (SCALED, (1, 32, 1, 1, 32), torch.bfloat16, False),
    "float16, one kernel": (SCALED, (1, 32, 1, 1, 32), torch.float16, False),
    "float32": (ARGUMENTS_34, (1, 32, 1, 1, 32), torch.float32, False),
    "autocast": (SCALED, (1, 32, 1, 1, 32), torch.float32, True),
    "other arguments": ((3, 8, 4, 2, 1, True, 0.1, 0.5), (2, 3, 2, 3, 4), torch.float32, False),
    "no bias": ((3, 9, 3, 1, 1, False), (2, 3, 3, 2, 9), torch.float32, False),
}


def samples_of_problem_34():
    """Yields the names of models and transforms. Without --full, the kernel runs in two of them."""
    for name in MODELS:
        for transform in TRANSFORMS:
            is_short = name == "other arguments" and transform in FEW
            is_short |= name == "bfloat16, one kernel" and transform in FEW[:2]
            if transform not in LARGE:
                yield pytest.param(name, transform, marks=[] if is_short else [full])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name,transform", [*samples_of_problem_34()])
def test_samples_of_problem_34(backend, name, transform):
    arguments, size, dtype, autocast = MODELS[name]
    model = backend.Convolution(*arguments).to(backend.device, dtype)
    conv, norm = model.conv_transpose, model.layer_norm
    names = [name for name, _ in model.named_parameters()]
    generator = torch.Generator().manual_seed(FIRST_SEED)
    x, *parameters = (
        torch.randn(size, generator=generator).to(backend.device, dtype)
        for size in (size, *(p.shape for p in model.parameters()))
    )
    parameters[0] *= 0.1

    def function(x, *parameters):
        with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=autocast):
            return torch.func.functional_call(model, dict(zip(names, parameters)), (x,))

    def reference(x, *parameters):
        given = dict(zip(names, parameters))
        weight, bias = given["conv_transpose.weight"], given.get("conv_transpose.bias")
        if autocast and x.dtype != torch.float64:
            x, weight, bias = (t if t is None else t.bfloat16() for t in (x, weight, bias))
        y = nn.functional.conv_transpose3d(x, weight, bias, conv.stride, conv.padding)
        affine, dtype = (given["layer_norm.weight"], given["layer_norm.bias"]), torch.float32 if autocast else None
        return composed(y, norm.normalized_shape, *affine, norm.eps, "gelu", model.scaling_factor, dtype)

    tf32 = name.startswith("TF32")
    rounding = 5e-3 if tf32 else max(2e-5, 4 * torch.finfo(torch.bfloat16 if autocast else dtype).eps)
    factor = 3.0 if dtype == torch.float32 else 5.0  # the gradient of the convolution's bias is 0 plus rounding errors
    with convolutions_in_tf32(tf32):
        assert compared(transform, function, reference, (x, *parameters), rounding, factor) == ""
