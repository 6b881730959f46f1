"""Tests of the file as a KernelBench submission (its static rules, its harness), and of the code in README and .docs."""

import importlib.util
import inspect
import os
import re
import sys
import textwrap
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest
import torch
from processes import CACHE, ROOT, SOURCE, environment_with, package, run
from torch import nn

import layernorm_inline
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


# A clone of KernelBench in small: the files that .bench/kernelbench.py needs, with the evaluator's signatures.
CLONE = {
    "src/kernelbench/__init__.py": "",
    "src/kernelbench/eval.py": """
        import requests
        from types import SimpleNamespace
        import torch
        from dotenv import load_dotenv
        from litellm import completion
        from openai import OpenAI
        from tqdm import tqdm
        from . import timing

        calls = []

        def eval_kernel_against_ref(
            original_model_src, custom_model_src, num_correct_trials=1, num_perf_trials=10, measure_performance=False,
            timing_method="cuda_event", backend="cuda", precision=torch.float32,
        ):
            calls.append((timing_method, precision, num_correct_trials, num_perf_trials, measure_performance, backend))
            namespace, outputs = {}, []
            exec(original_model_src, namespace)
            exec(custom_model_src, namespace)
            for name in ("Model", "ModelNew"):
                torch.manual_seed(42)
                model = namespace[name](*namespace["get_init_inputs"]()).to(precision)
                outputs.append(model(namespace["get_inputs"]()[0].to(precision)))
            right = torch.allclose(*outputs, atol=1e-2, rtol=1e-2)
            return SimpleNamespace(correctness=right, runtime=0.5, ref_runtime=8.0, metadata={"trials": "(0 / 5)"})
        """,
    "src/kernelbench/kernel_static_checker.py": """
        def validate_kernel_static(code, backend="cuda", precision="fp16", forbidden=None, warnings=None):
            errors = [] if "load_inline" in code and (backend, precision) == ("cuda", "fp32") else ["no kernel"]
            return not errors, errors, ["a warning"]
        """,
    "src/kernelbench/timing.py": """
        def measure_ref_program_time(
            ref_arch_name, ref_arch_src, num_warmup=5, num_trials=100, discard_first=1, timing_method="cuda_event",
            use_torch_compile=False, precision="fp32",
        ):
            return {"mean": 1.0 if use_torch_compile and "class Model" in ref_arch_src else 9.0}
        """,
}  # fmt: skip
PROBLEM = """
import torch
import torch.nn as nn

{model}

def get_inputs():
    return [torch.rand({shape})]

def get_init_inputs():
    return [*{arguments}]
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Returns (the module .bench/kernelbench.py, a folder that stands in for a clone of KernelBench)."""
    problems = {
        "level1/40_LayerNorm.py": (Model, (2, 4, 6, 8), ((4, 6, 8),)),
        "level2/34_ConvTranspose3d_LayerNorm_GELU_Scaling.py": (Model34, (2, 32, 3, 4, 32), ARGUMENTS_34),
    }
    files = {name: textwrap.dedent(text) for name, text in CLONE.items()}
    for name, (model, shape, arguments) in problems.items():
        text = inspect.getsource(model).replace(model.__name__, "Model")
        files[f"KernelBench/{name}"] = PROBLEM.format(model=text, shape=shape, arguments=arguments)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("bench_kernelbench", ROOT / ".bench" / "kernelbench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module, tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernelbench"]:
        del sys.modules[name]


@pytest.mark.parametrize("problem", [40, 34])
def test_the_evaluator_gets_the_submission(problem, clone, capsys):
    """The stand-in runs both models on the CPU, and the script prints what it returns."""
    module, folder = clone
    rows, right = module.evaluated(folder, problem, ["fp32"])
    assert right and rows == [
        ["fp32", clock, "yes", "8.00", "1.00", "0.500", "16.0", "2.00"] for clock in module.CLOCKS
    ]
    calls = sys.modules["kernelbench.eval"].calls
    assert calls == [(clock, torch.float32, 5, 100, True, "cuda") for clock in ("cuda_event", "do_bench")]
    out = capsys.readouterr().out
    assert "Static checker, fp32: 0 errors, 1 warnings\n    a warning\n" in out
    assert f"Problem {problem}, precision: fp32, clock: do_bench, correct: yes, eager, ms: 8.00" in out
    assert not any(isinstance(sys.modules.get(name), MagicMock) for name in module.UNUSED)  # the stand-ins are gone


def test_wrong_results_and_errors_of_the_checker_are_reported(clone, monkeypatch, capsys):
    module, folder = clone
    assert module.evaluated(folder, 40, ["bf16"])[1] is False  # the stand-in's checker rejects this precision
    assert "Static checker, bf16: 1 errors, 1 warnings\n    no kernel\n" in capsys.readouterr().out
    wrong = "\nclass ModelNew(ModelNew):\n    def forward(self, x):\n        return super().forward(x) + 1\n"
    monkeypatch.setitem(module.PROBLEMS, 40, (module.PROBLEMS[40][0], wrong))
    assert module.evaluated(folder, 40, ["fp32"]) == ([], False)
    assert "WRONG: problem 40, fp32, cuda_event: {'trials': '(0 / 5)'}" in capsys.readouterr().out


def test_arguments_of_the_evaluators_script(clone, monkeypatch, capsys):
    module, folder = clone
    monkeypatch.setitem(sys.modules, "pydantic", importlib.util.module_from_spec(ModuleSpec("pydantic", None)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernelbench.py", "--problem", "40", str(folder)])
    assert module.main() == 1 and "no CUDA GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(module, "PRECISIONS", {"fp32": torch.float32})
    monkeypatch.setattr(module.results.write_section, "__defaults__", (folder / "RESULTS.md",))
    assert module.main() == 0
    written = (folder / "RESULTS.md").read_text()
    columns = written[written.index("| ") : written.index("\n| fp32")]
    assert "## Evaluator of problem 40, a GPU\n" in written
    assert columns in (ROOT / ".bench" / "RESULTS.md").read_text()  # from which README's figures come
    for arguments in (["--problem", "41", str(folder)], ["--problem", "40", str(folder / "src")], [str(folder)]):
        monkeypatch.setattr(sys, "argv", ["kernelbench.py", *arguments])
        with pytest.raises(SystemExit):
            module.main()


# ---- The code and the commands of README and .docs ----

PAGES = [ROOT / "README.md", *sorted((ROOT / ".docs").glob("*.md")), ROOT / ".github" / "CONTRIBUTING.md"]
BLOCKS = [  # (page, language, text)
    (page.name, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.S | re.M)
]
COMMANDS = [
    pytest.param(language, text, id=f"{page}-{language}") for page, language, text in BLOCKS if language != "python"
]


EXAMPLES = [text for _, language, text in BLOCKS if language == "python"]  # of timm, of use, and the submission


def example_of_use(module, monkeypatch, capsys):
    """Runs README's example of use with this module, and returns what it prints: which operation a norm ran."""
    monkeypatch.setitem(sys.modules, "layernorm_inline", module)
    namespace = {}
    exec(EXAMPLES[1], namespace)
    x = namespace["x"]
    expected = nn.functional.gelu(nn.functional.layer_norm(x.double(), (768,))) * 0.5
    torch.testing.assert_close(namespace["y"], expected.float(), atol=1e-5, rtol=1e-5)
    assert type(namespace["norm"]) is module.LayerNorm and x.is_cuda == torch.cuda.is_available()
    return capsys.readouterr().out.strip()


def test_code_in_the_readme_works(monkeypatch, capsys):
    assert len(EXAMPLES) == 3 and EXAMPLES[2] == SUBMISSION_34
    name = "LayerNormBackward" if torch.cuda.is_available() else "NativeLayerNormBackward0"
    assert example_of_use(layernorm_inline, monkeypatch, capsys) == name
    comment = re.search(r"print.*# (\w+) if the kernels run, (\w+) if", EXAMPLES[1])
    assert name == comment[1 if torch.cuda.is_available() else 2]


@pytest.mark.parametrize("backend", [pytest.param("emulated", marks=pytest.mark.emulated)], indirect=True)
def test_the_example_shows_that_kernels_run(backend, monkeypatch, capsys):
    assert example_of_use(backend.module, monkeypatch, capsys) == "LayerNormBackward"


def test_the_example_with_timm_converts_its_norms():
    timm = package("timm")
    namespace = {}
    with pytest.warns(UserWarning, match=r"skipped timm\.layers\.norm\.LayerNorm2d \(5\)"):
        exec(EXAMPLES[0], namespace)
    norms = [m for m in namespace["model"].modules() if isinstance(m, nn.LayerNorm)]
    skipped = [m for m in norms if type(m) is timm.layers.LayerNorm2d]
    assert len(norms) == 41 and len(skipped) == 5  # as README says
    assert all(type(m) is layernorm_inline.LayerNorm and m.autocast_output for m in norms if m not in skipped)


def as_script(language, text):
    """Returns the commands of a block of bash, or those that Docker would run for a Dockerfile."""
    if language != "dockerfile":
        return text
    instructions = [line.split(None, 1) for line in text.splitlines()]
    assert instructions[0][0] == "FROM" and len(instructions) <= 10
    shell = {"ENV": "export {}", "WORKDIR": "mkdir -p .{0} && cd .{0}", "COPY": f"cp {ROOT}/{{}}", "RUN": "{}"}
    return "\n".join(shell[name].format(arguments) for name, arguments in instructions[1:])


@pytest.mark.full
@pytest.mark.parametrize("language,text", COMMANDS)
def test_commands_of_the_pages_run(language, text, clone, tmp_path):
    """Commands run without a GPU. Those that need the network or root do nothing, and no tests run within a test."""
    tools = tmp_path / "tools"
    tools.mkdir()
    real = f'exec "{sys.executable}" "$@"'
    venv = 'mkdir -p "$3/bin" && touch "$3/bin/activate"'
    scripts = dict.fromkeys(("git", "pip", "apt", "apt-get"), "exit 0")
    scripts["python"] = f'[ "$2" = pytest ] || {real}'
    scripts["python3"] = f'if [ "$2" = venv ]; then {venv}; else {real}; fi'
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    for path in (*ROOT.glob("*.py"), ROOT / ".bench"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "pydantic.py").touch()
    (tmp_path / "src").rename(tmp_path / "source")  # the stand-in for the clone of KernelBench
    (tmp_path / "KernelBench").rename(tmp_path / "problems")
    (tmp_path / "KernelBench").mkdir()
    (tmp_path / "source").rename(tmp_path / "KernelBench" / "src")
    (tmp_path / "problems").rename(tmp_path / "KernelBench" / "KernelBench")
    path = f"{tools}:{os.environ['PATH']}"
    variables = environment_with(
        PATH=path, CUDA_VISIBLE_DEVICES="", TORCH_EXTENSIONS_DIR=CACHE, PYTHONPATH=str(tmp_path)
    )
    script = as_script(language, text).replace("/opt/torch_extensions", CACHE)
    done = run(["bash", "-uc", f"trap 'echo FAILED: $BASH_COMMAND' ERR\n{script}"], cwd=tmp_path, env=variables)
    evaluations = script.count("kernelbench.py")  # they end with an error, because there is no GPU
    assert done.stdout.count("FAILED: ") == evaluations, done.stdout + done.stderr
    assert done.stdout.count("Nothing was timed, because there is no CUDA GPU") == evaluations + ("venv" in script)


def test_links_of_the_pages_lead_somewhere():
    titles = {}
    for page in (
        *PAGES,
        ROOT / ".tests" / "README.md",
        ROOT / ".bench" / "RESULTS.md",
        ROOT / ".bench" / "EXPERIMENTS.md",
    ):
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        titles[page.resolve()] = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
    for page in titles:
        for file, title in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page.name, file)
            assert not title or title in titles[target], (page.name, title)
