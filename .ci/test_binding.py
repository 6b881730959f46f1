"""Tests of test_layernorm_inline.py that are for a GPU, without one: the binding compiled for CPU tensors, with the
kernels on an emulated GPU (see emulator.py).

    pytest .ci/test_binding.py        (-n 2 with pytest-xdist)

Both files are taken as they are, but for what a CPU calls by another name, and what would take long.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FOLDER = tempfile.TemporaryDirectory()
sys.path[:0] = [str(HERE), FOLDER.name]
from emulator import replaced  # noqa: E402

MODULE = {
    r"= _load\(\)": "= __import__('emulator').load_binding(), None",
    r"\.is_cuda\b": ".is_cpu",
    r"is_autocast_enabled\(\)": "is_autocast_enabled('cpu')",
}
TESTS = {
    r'\["cpu", pytest\.param\("cuda", marks=gpu\)\]': '["cpu"]',
    r'device == "cpu" and dtype_34 != torch\.float32': "False",
    r'params=\["tf32", ': "params=[",  # which no CPU rounds to
    r'"cuda"': '"cpu"',
    r"\.cuda\(\)": ".cpu()",
    r"\bw\.cpu\(\)": "w.to('meta')",  # on another device
    r"\blayernorm_inline\b(?!\.py)": "layernorm_emulated",
    r"if dtype_34 == torch\.float32(?=:\n +with torch\.autocast)": "if False",  # another rule on CPUs
    r"randn\(3, 32, 3, 5, 32": "randn(3, 32, 1, 2, 32",
    r"(?m)^gpu = .*": "gpu = pytest.mark.skipif(False, reason='')",
    r"list\(cases_of_the_table\(\)\)": "[case for case in cases_of_the_table() if is_small(case)]",
    r"(?m)^CASES = ": "is_small = lambda case: case.elements <= (20_000 if case.affine == 'both' else 100_000)\nCASES = ",
    r"test_layernorm_inline(?=.*Custom)": "test_layernorm_emulated",
}
for name, replacements in (("layernorm_inline", MODULE), ("test_layernorm_inline", TESTS)):
    text = replaced((HERE.parent / f"{name}.py").read_text(), replacements)
    Path(FOLDER.name, name.replace("inline", "emulated") + ".py").write_text(text)

pytest.register_assert_rewrite("test_layernorm_emulated")
tests = importlib.import_module("test_layernorm_emulated")

# Those of the binding and of what lies above it. Left out: streams, CUDA graphs, memory, what PyTorch rounds in another
# way on CPUs.
CHOSEN = """
    test_values test_only_the_gradients_asked_for test_strided_weight_bias_and_grad_output test_shapes_and_strides
    test_no_rows test_bad_input test_a_scale_is_a_number test_arguments_of_other_types test_bad_dtypes_and_devices test_bad_input_of_the_convolution
    test_backward_checks_every_tensor test_backward_of_what_has_changed_since
    test_gradcheck_and_gradgradcheck test_float64_is_pytorchs test_third_derivatives test_copy_on_write_tensors_stay_shared
    test_functional_transforms test_vmap test_vmap_over_backward test_vmap_checks_the_slices test_forward_mode test_forward_over_reverse
    test_the_node_in_the_graph test_threads_in_backward_over_one_graph test_checkpoint_and_gradient_accumulation
    test_torch_compile_in_one_graph test_opcheck test_export_and_no_recompiling
    test_replace_layer_norm test_with_the_rest_of_nn test_torchscript_and_fx test_what_overrides_functions_is_asked test_meta_device_then_materialized
    test_real_models test_problem_34 test_problem_34_on_other_inputs test_problem_34_one_gradient_at_a_time test_problem_34_double_backward test_problem_34_with_hooks
    test_problem_34_compiled_in_one_graph test_problem_34_opcheck
    test_problem_34_asks_for_the_setting_of_convolutions test_problem_34_normalizes_the_width
"""
FIXTURES = "terminal time_limit dtype_34 no_vmap_fallback"
globals().update({name: getattr(tests, name) for name in (CHOSEN + FIXTURES).split()})


def test_autocast():
    """PyTorch's own layer norm has another rule on CPUs."""
    x = torch.randn(4, 768, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(768)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tests.layer_norm(x, (768,), weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, torch.layer_norm(x.float(), (768,), weight))
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["x", "dy", "weight", "bias"])
def test_problem_34_gradients_are_nan_where_pytorchs_are(where):
    """Of a NaN as arithmetic on a GPU makes it: also that of the convolution's bias, which is 0 else."""
    x, dy = torch.randn(2, 32, 1, 1, 32), torch.randn(2, 64, 2, 2, 64)
    results = []
    for module in tests.models_34(tests.ARGUMENTS_34, "cpu"):
        place = {"x": x, "dy": dy}.get(where, getattr(module.conv_transpose, where, None))
        place.detach().view(torch.int32).view(-1)[20] = 0x7FFFFFFF
        for wanted in ([x.requires_grad_(), *module.parameters()], [module.conv_transpose.bias]):
            results.append([g.isnan() for g in torch.autograd.grad(module(x), wanted, dy)])
    theirs, their_bias, mine, my_bias = results
    assert all(map(torch.equal, theirs + their_bias, mine + my_bias))
    assert theirs[-1].any() and my_bias[0].any()
