"""Tests of the file as a KernelBench submission (its static rules, its harness), and of the code in README and .docs."""

import gc
import inspect
import os
import re
import shutil
import subprocess
import sys
import types

import emulator
import pytest
import torch
from processes import ROOT, SOURCE, environment_with, import_in_subprocess, package, run
from torch import nn

from test_layernorm_inline import ARGUMENTS_34, Model, Model34


def test_file_follows_the_static_rules():
    """The code has what KernelBench's static checks require, and nothing that they forbid.

    It compares no version of PyTorch: NVIDIA's containers have versions such as 2.7.0a0, which is older than 2.7.
    """
    text = SOURCE.read_text()
    code = "\n".join(line.split("#")[0].split("//")[0] for line in text.split("\n"))
    for pattern in (
        r"\btry\s*:", r"\bexcept\b", r"\bpass\b", r"torch\.nn\.(?!(Module|Parameter|init)\b)", r"\bF\.(conv|linear|relu|gelu|softmax|batch_norm|layer_norm|dropout)",
        r"nn\.functional\.\w+", r"torch\.(layer_norm|gelu|tanh|clamp|conv\w*|linear|mm|matmul)\b", r"import\s+threading",
        r"multiprocessing", r"concurrent\.futures", r"cuda\.Stream\s*\(", r"\.wait_stream|\.record_stream",
        r"__float2half(_rn)?\s*\(", r"\(\s*__half\s*\)\s*[\w]", r"static_cast\s*<\s*(__half|half)\s*>", r"\.half\s*\(",
        r"__file__", r"getsource", r"\.to\s*\(\s*torch\.float16", r"torch\.__version__ *[<>=]",
    ):  # fmt: skip
        assert not re.search(pattern, code), pattern
    assert "__global__" in code and "load_inline" in code and "threadIdx." in code
    assert text.startswith("# SPDX-License-Identifier: MIT\n")


def python_blocks(page):
    """Returns the blocks of Python in README.md or a page of .docs."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


SUBMISSION_34 = "ModelNew = ConvTranspose3dLayerNormGELUScaling\n"  # the line that README appends for problem 34


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("problem", [40, 34])
def test_submission_runs_like_in_the_harness(problem, grad):
    """The submission gives the results of the reference if both run as KernelBench's harness runs them.

    The harness executes their sources in one namespace, and constructs both models from the same seed.
    """
    reference, appended, arguments, shape = {
        40: (Model, "", ((4, 6, 8),), (2, 4, 6, 8)),
        34: (Model34, "\n" + SUBMISSION_34, ARGUMENTS_34, (2, 32, 3, 4, 32)),
    }[problem]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = "import torch\nimport torch.nn as nn\nbatch_size = 16\nbias = True\neps = 1e-5\nD, H, W = 16, 32, 32\nfeatures = 64\ndim1 = dim2 = 256\n"
    text = inspect.getsource(reference).replace(reference.__name__, "Model")
    namespace = {}
    exec(compile(header + text, "<reference>", "exec"), namespace)
    reserved = dict(namespace)
    exec(compile(SOURCE.read_text() + appended, "<submission>", "exec"), namespace)
    assert all(
        namespace[name] is value for name, value in reserved.items() if name not in ("torch", "nn", "__builtins__")
    )
    models = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        models.append(namespace[name](*arguments).to(device))
    x = torch.rand(shape, device=device)
    with torch.set_grad_enabled(grad):
        expected, y = (model(x) for model in models)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    assert y.requires_grad == grad
    if problem == 34:  # the appended line rebinds ModelNew, which no other code may depend on
        norm = namespace["replace_layer_norm"](nn.Sequential(nn.LayerNorm(8)))[0]
        assert norm(torch.rand(3, 8)).shape == (3, 8)


@pytest.mark.full
def test_submission_of_problem_34_on_a_gpu(backend):
    """The whole file with the appended line runs the kernel, also when the harness executes it again."""
    reference = "import torch\nimport torch.nn as nn\n" + inspect.getsource(Model34).replace("Model34", "Model")
    text = SOURCE.read_text() if backend.is_cuda else emulator.module_text()
    torch.backends.cudnn.allow_tf32 = True
    x = torch.rand(2, 32, 3, 4, 32, device=backend.device)
    for _ in range(2):
        namespace = {}
        exec(compile(reference, "<reference>", "exec"), namespace)
        exec(compile(text + "\n" + SUBMISSION_34, "<submission>", "exec"), namespace)
        models = []
        for name in ("Model", "ModelNew"):
            torch.manual_seed(42)
            models.append(namespace[name](*ARGUMENTS_34).to(backend.device))
        assert models[1]._in_one_kernel(x)
        expected, y = (model(x) for model in models)
        # PyTorch's convolution on CPUs does not round to TF32.
        torch.testing.assert_close(y, expected, atol=1e-4 if backend.is_cuda else 5e-3, rtol=1e-4)
    # The first namespace is gone, but its op still loads the second library.
    del namespace, models[0]
    gc.collect()
    y.sum().backward()


# ---- The file without its last part ----


def layer_norm_only():
    """Returns the file without its last part."""
    text = SOURCE.read_text()
    (start,) = (match.start() for match in re.finditer("^# 7  KernelBench problem 34", text, re.M))
    assert "Everything from here on can be deleted if you only want LayerNorm." in text[start:].split("\n")[1]
    return text[:start]


def test_the_last_part_can_be_deleted(tmp_path):
    """No code above refers to the part, and LayerNorm works without it."""
    text = layer_norm_only()
    (tmp_path / SOURCE.name).write_text(text)
    assert not re.search("convolution|conv_transpose|ConvTranspose3d", text, re.I)
    code = """
        import torch, layernorm_inline
        from layernorm_inline import *
        x, norm = torch.randn(3, 8), torch.nn.LayerNorm(8)
        assert all(hasattr(layernorm_inline, name) for name in layernorm_inline.__all__)
        assert torch.equal(layer_norm(x, (8,), norm.weight, norm.bias), norm(x))
        assert type(replace_layer_norm(norm)) is LayerNorm and torch.equal(norm(x), ModelNew(8)(x))
    """
    done = import_in_subprocess(tmp_path, code, TORCH_CUDA_ARCH_LIST=" ", CUDA_VISIBLE_DEVICES="", PYTHONPATH=None)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_no_name_is_undefined_without_the_last_part(tmp_path):
    package("ruff")
    (tmp_path / SOURCE.name).write_text(layer_norm_only())
    rules = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path / SOURCE.name)]
    done = subprocess.run(rules, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not emulator.can_build(), reason="needs g++ and the headers of a CUDA toolkit")
def test_layer_norm_without_the_last_part(tmp_path):
    """The short selection of LayerNorm's tests succeeds on emulated GPUs if the last part is deleted."""
    for name in (".tests", "test_layernorm_inline.py", ".pytest.ini"):
        path = ROOT / name
        shutil.copytree(path, tmp_path / name) if path.is_dir() else shutil.copy(path, tmp_path)
    (tmp_path / SOURCE.name).write_text(layer_norm_only())
    files = [f".tests/test_{name}.py" for name in ("values", "binding", "autograd", "modules")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ".pytest.ini", *files]
    cache = os.environ.get("TORCH_EXTENSIONS_DIR")
    environment = environment_with(CUDA_VISIBLE_DEVICES="", PYTHONPATH=None, TORCH_EXTENSIONS_DIR=cache)
    done = run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


# ---- Code in the documents ----


def test_the_evaluators_call_in_the_docs(tmp_path, monkeypatch, capsys):
    """The call in .docs/kernelbench.md passes the texts of both files. A stand-in takes the place of KernelBench."""

    def eval_kernel_against_ref(reference, submission, *, backend, precision, measure_performance, **numbers):
        assert (reference, submission) == ("the reference", SOURCE.read_text())
        assert (backend, precision, measure_performance) == ("cuda", torch.float32, True)
        assert numbers == {"num_correct_trials": 5, "num_perf_trials": 100, "timing_method": "do_bench"}
        return types.SimpleNamespace(correctness=True, runtime=1.0, ref_runtime=2.0)

    stand_in = types.SimpleNamespace(eval_kernel_against_ref=eval_kernel_against_ref)
    monkeypatch.setitem(sys.modules, "kernelbench", types.SimpleNamespace(eval=stand_in))
    monkeypatch.setitem(sys.modules, "kernelbench.eval", stand_in)
    for absent in ("openai", "litellm", "dotenv", "datasets", "tqdm"):  # which the call replaces, until the test ends
        monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "KernelBench/level1").mkdir(parents=True)
    (tmp_path / "KernelBench/level1/40_LayerNorm.py").write_text("the reference")
    (tmp_path / "layernorm_inline.py").write_text(SOURCE.read_text())
    (call,) = python_blocks(".docs/kernelbench.md")
    exec(call, {})
    assert capsys.readouterr().out == "True 1.0 2.0\n"


def test_code_in_the_readme_works():
    first, use, submission = python_blocks("README.md")
    assert submission == SUBMISSION_34
    namespace = {"model": nn.Sequential(nn.LayerNorm(768))}
    exec(first, namespace)
    assert type(namespace["norm"]) is type(namespace["model"][0]) is namespace["LayerNorm"]
    exec(use, namespace)
    x, weight, bias, model = (namespace[name] for name in ("x", "weight", "bias", "model"))
    expected = nn.functional.gelu(nn.functional.layer_norm(x, (768,), weight, bias)) * 0.5
    torch.testing.assert_close(namespace["y"], expected)
    assert type(model[0]) is namespace["LayerNorm"] and x.is_cuda == torch.cuda.is_available()
