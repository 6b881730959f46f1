"""Tests of parts that can be deleted: the last part (problem 34, which can also be submitted) and kernel families."""

import gc
import importlib
import inspect
import re
import shutil
import subprocess
import sys

import emulator
import pytest
import torch
from cases import CASES
from processes import CACHE, ROOT, SOURCE, environment_with, import_in_subprocess, package, run
from reference import compare_with_float64, run_case
from test_convolution import on_emulated
from test_kernelbench import SUBMISSION_34

from test_layernorm_inline import ARGUMENTS_34, Model34

sys.path.append(str(ROOT / ".bench"))
families = importlib.import_module("families")


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
    # The first namespace is gone, but its op still finds the second library.
    del namespace, models[0]
    gc.collect()
    y.sum().backward()


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
    assert not re.search(
        r"convolution(?!s\b)|conv_transpose|ConvTranspose3d", text, re.I
    )  # LayerNorm feeds convolutions
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
    command = [sys.executable, *"-m pytest -q -x -p no:cacheprovider -c .pytest.ini".split(), *files]
    command += ["-k", "not problem_34 and not ConvTranspose3d"]
    environment = environment_with(CUDA_VISIBLE_DEVICES="", PYTHONPATH=None, TORCH_EXTENSIONS_DIR=CACHE)
    done = run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


# ---- Kernel families ----


def few_cases():
    """Returns the smallest plain case of each pair of families in float32 and bfloat16, on Hopper with 2 or 8 SMs."""
    smallest = {}
    for case in sorted(CASES, key=lambda case: case.elements):
        is_plain = case.form == "plain" and not case.off and case.affine == "both"
        if case.gpu.name == "hopper" and case.gpu.sms < 36 and is_plain and case.dtype != "fp16" and case.cols >= 60:
            smallest.setdefault((case.forward, case.backward, case.dtype, case.has_aligned_rows), case)
    return list(smallest.values())


@pytest.mark.full
@pytest.mark.slow
@on_emulated
@pytest.mark.parametrize("names", [*((name,) for name in families.FAMILIES), (*families.FAMILIES,)], ids=", ".join)
def test_kernel_families_can_be_deleted(backend, names):
    """Without families and problem 34, the file compiles, nothing is unused, and the next family runs the calls."""
    text = families.without(SOURCE.read_text(), (*names, "problem 34"))
    code = re.sub("//.*", "", emulator.sources(text)[""].cuda)
    templates = re.findall(r"^template <[^;{}]*?>\s+[^;{}()=]*?\b(\w+)\(", code, re.M)
    assert not [name for name in templates if len(re.findall(rf"\b{name}\b", code)) == 1]
    for case in few_cases():
        tensors = case.tensors()
        with emulator.on(case.gpu, partial=text):
            compare_with_float64([(run_case(backend.layer_norm, *tensors), tensors)])
