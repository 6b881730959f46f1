"""Tests of test_layernorm_inline.py as a script, of the scripts in .bench, and of README's commands and tables.

For each thing that the script verifies, a module that is wrong in this way must make it fail.
"""

import importlib
import json
import re
import sys
import time
from unittest.mock import Mock

import pytest
import torch
from processes import ROOT, environment_with, package, run
from torch import nn

import layernorm_inline
import test_layernorm_inline as companion

sys.path.append(str(ROOT / ".bench"))
libraries, models, results, sweep = map(importlib.import_module, ("libraries", "models", "results", "sweep"))


def run_script(script, *arguments):
    """Runs a script of the repository without a GPU."""
    return run([sys.executable, str(ROOT / script), *arguments], env=environment_with(CUDA_VISIBLE_DEVICES=""))


# ---- Modules that are wrong ----


def scaled(t):
    """Returns t, with a gradient that is scaled by 1.001."""
    return t.detach() + 1.001 * (t - t.detach())


def with_parameters(module, x, weight, bias):
    return companion.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def without_eps(module, x, right):
    distance, std = x - x.mean((1, 2), keepdim=True), x.std((1, 2), keepdim=True, unbiased=False)
    return distance / std * module.weight + module.bias


WRONG = {  # name -> forward(module, x, right), where right(x) is the right output
    "output": lambda module, x, right: right(x) + 1e-4,
    "in training": lambda module, x, right: right(x) * (1 + 1e-3 * torch.is_grad_enabled()),
    "remembered": lambda m, x, right: vars(m).setdefault("y", right(x).detach()) + right(x) - right(x).detach(),
    "no bias": lambda module, x, right: right(x) - module.bias,
    "no eps": without_eps,
    "small numbers only": lambda module, x, right: right(x.clamp(-1, 1)),
    "another dtype": lambda module, x, right: right(x).double(),
    "gradient of input": lambda module, x, right: right(scaled(x)),
    "gradient of weight": lambda m, x, _: with_parameters(m, x, scaled(m.weight), m.bias),
    "gradient of bias": lambda m, x, _: with_parameters(m, x, m.weight, scaled(m.bias)),
    "no gradient of weight": lambda m, x, _: with_parameters(m, x, m.weight.detach(), m.bias),
}


@pytest.mark.parametrize("problem,name", [*((40, name) for name in WRONG), (34, "output")])
def test_a_wrong_module_fails(problem, name, monkeypatch, capsys):
    owner, new = (companion, "ModelNew") if problem == 40 else (layernorm_inline, "ConvTranspose3dLayerNormGELUScaling")

    class Wrong(getattr(owner, new)):
        def forward(self, x):
            return WRONG[name](self, x, super().forward)

    monkeypatch.setattr(owner, new, Wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(companion, "broken_driver", lambda: "")
    assert companion.run(problem) == 1
    assert "FAILED: " in capsys.readouterr().out


# ---- Times ----


@pytest.fixture
def timed(monkeypatch):
    """Makes the script believe that the CPU is a GPU, on which everything takes the returned times (ms).

    From a CUDA graph, the time of a function is an eighth.
    """
    times = dict(original=8.0, new=0.5, copy=0.25, default=1.0, compile=2.0)
    times["max-autotune-no-cudagraphs"] = 0.75
    small = list(companion.settings_40("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(companion, "settings_40", lambda device: small)
    monkeypatch.setattr(companion, "setting_of_models", lambda device: small[0]._replace(is_small=True))
    monkeypatch.setattr(companion, "versions", lambda: "a GPU")
    monkeypatch.setattr(companion, "milliseconds", lambda runs, **_: {name: times[name] for name in runs})
    replayed = lambda runs, **_: {name: times[name] / 8 for name in runs}  # noqa: E731
    monkeypatch.setattr(companion, "milliseconds_of_graphs", replayed)
    return times


def test_the_printed_lines(timed, capsys, tmp_path):
    assert companion.run(40, str(tmp_path / "times.json")) == 0
    out = capsys.readouterr().out
    first, second, *rest = out.split("\n")
    assert first.startswith("Verified (float32): the output and 3 gradients for 6 inputs. The largest difference is ")
    assert second == "Original time: 8.00 ms, New time: 0.500 ms, Speedup: 16.00x"
    assert "    torch.compile (max-autotune-no-cudagraphs): 0.750 ms. New is 1.50x as fast." in rest
    assert "    A device copy of the same bytes: 0.312 ms. New runs at 0.62 of copy bandwidth." in rest
    steps = "original 1.000 ms, compile {} ms, new 0.062 ms"
    line = "LayerNorm of float32, replayed from CUDA graphs: "
    line += f"forward {steps.format('0.125')}; forward and backward {steps.format('0.250')}"
    assert rest[-3:] == [line, "a GPU", ""]
    result, _ = json.loads((tmp_path / "times.json").read_text())["results"]
    assert result["forward"]["new"] == 0.5 and result["training"]["compile"] == 2.0


def test_a_speedup_that_is_too_small_fails(timed, capsys):
    timed["new"] = timed["original"] / 1.1
    assert companion.run(40) == 1
    assert "FAILED: the speedup is less than 1.2x" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("problem", [40, 34])
def test_times_on_a_gpu(backend, problem, monkeypatch, capsys):
    for name, value in dict(BATCH_SIZE=2, DIM1=64, DIM2=64, INPUT_34=(2, 32, 2, 4, 32), MINIMUM_SPEEDUP=0.0).items():
        monkeypatch.setattr(companion, name, value)
    assert companion.run(problem) == 0
    out = capsys.readouterr().out
    assert out.count("Speedup: ") == (2 if problem == 40 else 8) and "FAILED" not in out
    assert torch.cuda.get_device_name() in out


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_the_clock(backend):
    x = torch.ones(64 << 20, device="cuda")
    times = companion.milliseconds({"two": lambda: (x.add_(1), x.add_(1)), "one": lambda: x.add_(1)})
    assert 1.5 < times["two"] / times["one"] < 2.5


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_the_clock_of_small_steps_does_not_wait_for_the_host(backend):
    """A step whose host part needs 5 ms, as autograd's steps need longer than the GPU's kernels."""
    norm = companion.LayerNorm(64, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    y = {}

    def step():
        time.sleep(5e-3)
        y["gradients"] = torch.autograd.grad(norm(x).sum(), [x, *norm.parameters()])

    assert companion.milliseconds({"step": step}, repeats=5)["step"] > 4
    y["gradients"][0].zero_()
    assert companion.milliseconds_of_graphs({"step": step}, repeats=5)["step"] < 1
    right = torch.autograd.grad(torch.nn.functional.layer_norm(x.double(), (64,)).sum(), x)[0]
    torch.testing.assert_close(y["gradients"][0], right.float(), atol=1e-5, rtol=1e-5)  # the graph runs the whole step


# ---- Without a GPU ----


@pytest.mark.full
@pytest.mark.parametrize("arguments", [[], ["--problem", "34"]])
def test_the_script_without_a_gpu(arguments):
    done = run_script("test_layernorm_inline.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing was timed") and "for 6 inputs" in done.stdout


@pytest.mark.parametrize(
    "message,status", [("Found no NVIDIA driver", 0), ("No CUDA GPUs are available", 0), ("The driver is too old", 1)]
)
def test_a_driver_that_does_not_work(message, status, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(message)))
    assert companion.run(40) == status
    out = capsys.readouterr().out
    assert out.startswith("Nothing was timed" if status == 0 else f"FAILED: the GPU cannot be used: {message}")


def test_the_script_fails_if_the_switch_disables_the_kernels():
    command = [sys.executable, ROOT / "test_layernorm_inline.py"]
    done = run(command, env=environment_with(LAYERNORM_INLINE_DISABLE="1"))
    assert done.returncode == 1 and done.stdout.startswith("FAILED: LAYERNORM_INLINE_DISABLE=1"), done.stderr


def test_pytest_says_at_the_end_that_no_kernel_was_tested(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", ".tests/test_binding.py", "-k", "no_rows"]
    hidden = dict(PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="", TORCH_CUDA_ARCH_LIST="")  # no g++
    lines = run(command, cwd=ROOT, env=environment_with(**hidden)).stdout.splitlines()
    assert lines[-2].startswith("No kernel was tested") and "skipped" in lines[-1], lines


@pytest.mark.full
@pytest.mark.parametrize("script", ["sweep", "models", "sizes", "ddp", "libraries", "families"])
def test_the_benchmarks_need_a_gpu(script):
    done = run_script(f".bench/{script}.py")
    assert done.returncode == 1 and done.stdout.startswith("Nothing was timed"), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("script,arguments,words", [
    ("test_layernorm_inline.py", ["--json", "no/such/folder/times.json"], "cannot write to no/such/folder/times.json"),
    ("test_layernorm_inline.py", ["--json", str(ROOT)], "cannot write to"),
    ("test_layernorm_inline.py", ["--problem", "35"], "invalid choice: 35"),
    (".bench/sweep.py", ["--only", "8192:bf16"], "expected ROWSxCOLS:DTYPE"),
    (".bench/sweep.py", ["--only", "8x0:bf16"], "expected ROWSxCOLS:DTYPE"),
    (".bench/sweep.py", ["--only", "8x8:int8"], "expected ROWSxCOLS:DTYPE"),
    (".bench/sweep.py", ["--only", "8x8:bf16", "--json", "times.json"], "cannot be combined"),
    (".bench/sweep.py", ["--against", "."], "--against needs --only"),
    (".bench/sweep.py", ["--only", "8x8:bf16", "--against", "no/such/folder"], "no layernorm_inline.py in no/such/folder"),
    (".bench/sweep.py", ["--autocast", "--only", "8x8:bf16"], "cannot be combined with --only or --json"),
    (".bench/models.py", ["no such model"], "no model name contains 'no such model'"),
])  # fmt: skip
def test_wrong_arguments_fail_at_once(script, arguments, words):
    done = run_script(script, *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


# ---- .bench ----

TABLE = [
    dict(operation=operation, rows=2**26 // cols, cols=cols, dtype=dtype, floor=1.0, eager=4.0, compile=2.0, new=1.1)
    for operation in ("forward", "backward") for dtype in ("fp32", "bf16") for cols in (64, 1024)
]  # fmt: skip


def test_results_are_written(tmp_path):
    file = tmp_path / "RESULTS.md"
    for heading, text in (("Sweep", "former"), ("Models", "kept"), ("Sweep", "new")):
        results.write_section(heading, text, file)
    assert file.read_text() == results.TITLE + "\n## Sweep\n\nnew\n\n## Models\n\nkept\n"


def test_tables_of_the_readme(monkeypatch):
    """README shows the tables of RESULTS.md, which have the columns and rows that the scripts write."""
    monkeypatch.setattr(sweep, "time_forward", lambda setting, modes: dict(original=8.0, compile=0.5, new=0.25))
    monkeypatch.setattr(sweep, "settings_40", lambda device: companion.settings_40("cpu"))
    monkeypatch.setattr(sweep, "settings_34", lambda device: [])
    text, other = (ROOT / ".bench" / "RESULTS.md").read_text(), [{**TABLE[0], "Liger-Kernel": 1.5}]
    for written, row in (
        (sweep.as_markdown(TABLE, []), "| fp32 | 1.0000 | 4.0000 | 2.0000 | 1.1000 | 0.250 | 0.500 | 0.909 |"),
        (sweep.problems_as_markdown(), "| problem 40, float32 | 8.0000 | 0.5000 | 0.2500 |"),
        (libraries.as_markdown(other, {libraries.Liger: "0.8.5"}), "| fp32 | 4.0000 | 2.0000 | 1.5000 | 1.1000 |"),
        (results.markdown_table(models.COLUMNS, []), "| model |"),
    ):
        columns = written[written.index("| ") : written.index("\n| ---")]
        assert columns in text and row in written
    cases = {f"{operation} | {rows} x {cols} | {dtype}" for operation, rows, cols, dtype in sweep.cases()}
    assert {*results.SPEED} <= cases
    timed = {key.split(" | ")[0] for table in results.tables_of(text, "Models").values() for key in table}
    assert timed - {"model", "---"} <= models.REAL_MODELS.keys()
    shown = " ".join((ROOT / "README.md").read_text().split())
    lines = (" ".join(line.split()) for line in results.readme_tables(text).split("\n"))
    assert [line for line in lines if line not in shown] == []


def test_figures_of_autocast_in_the_readme():
    """RESULTS.md as a run on one GPU writes it."""
    row = ["GPT-2", "training", "8 x 8", "autocast bf16", "1 of 1", *models.cells_of([(100, 90, 80)] * 3, (3, 2.5, 2))]
    other = ["Blocks", "training", "8 x 8", "bf16", "1 of 1", *models.cells_of([(100, 90)] * 3, (3, 2.5))]
    columns = ["operation", "rows x cols", "input", *sweep.WAYS]
    keys = [f"{operation} | {shape}" for operation in ("forward", "backward") for shape in results.AUTOCAST.values()]
    rows = [[*key.split(" | "), *(f"{i + 1}e-3" for i in range(4))] for key in keys]
    sections = {"Models": (models.COLUMNS, [row, other]), "Autocast": (columns, rows)}
    tables = {
        kind: results.tables_of(f"\n## {kind}, NVIDIA X200\n\n{results.markdown_table(*table)}\n", kind)
        for kind, table in sections.items()
    }
    table = tables["Models"]["NVIDIA X200"]
    assert results.gains_of_models(table) == "GPT-2 1.11x"
    assert results.gains_with_autocast_output(table) == "GPT-2 1.25x (33% less memory)"
    shown = results.models_table(tables["Models"])
    assert "| GPT-2, 8 x 8, X200 | 100.00 | 90.00, 1.11x | 80.00, 1.25x | 3.00, 2.50, 2.00 |" in shown
    assert "Blocks" not in shown  # it did not run with autocast_output
    shown = results.autocast_table(tables["Autocast"])
    assert shown.startswith("| ms, X200 | ViT-B/16 (25216 x 768 fp32): forward |")
    for i, way in enumerate(["nn.LayerNorm", "layernorm_inline", "`autocast_output`"], 1):
        (line,) = (line for line in shown.split("\n") if line.startswith(f"| {way} |"))
        assert line == f"| {way} | {' | '.join([f'0.00{i}00'] * 4)} |"
    assert results.autocast_table({}) == results.PENDING


def test_norms_under_autocast(monkeypatch, capsys):
    """Times are fake, but all ways run, on the CPU, and their errors are those of 16 bits."""
    monkeypatch.setattr(
        sweep, "milliseconds_of_graphs", lambda runs: {name: (run() or run()) or 0.5 for name, run in runs.items()}
    )
    monkeypatch.setattr(sweep, "AUTOCAST", [(8, 96, "fp32"), (8, 64, "bf16 fp16")])
    monkeypatch.setattr(sweep, "AUTOCAST_ERRORS", [(8, 96, "fp32"), (8, 64, "bf16")])
    text = f"\n## Autocast, a GPU\n\n{sweep.autocast_as_markdown('cpu')}\n"
    table = results.tables_of(text, "Autocast")["a GPU"]
    for operation in ("forward", "backward"):
        for shape in ("8 x 96 | fp32", "8 x 64 | bf16", "8 x 64 | fp16"):
            assert table[f"{operation} | {shape}"] == ["0.5000"] * 4
    for quantity in ("output", "gradient of input", "gradient of weight", "gradient of bias"):
        for shape in ("8 x 96 | fp32", "8 x 64 | bf16"):
            errors = results.floats(table[f"{quantity} | {shape}"])
            assert len(errors) == 4 and 0 <= min(errors) and max(errors) < 2e-2 and errors[3] > 1e-4


def test_a_library_that_fails_is_not_timed(monkeypatch, capsys):
    class Wrong(libraries.Liger):
        replace_layer_norm = staticmethod(lambda norm: lambda x: 1.1 * norm(x))

    class Raises(libraries.Liger):
        replace_layer_norm = staticmethod(lambda norm: lambda x: 1 / 0)

    class Right(libraries.Liger):
        @staticmethod
        def replace_layer_norm(norm):
            """Returns a function with float32 parameters of its own, like QuACK's."""
            weight, bias = (p.detach().float().requires_grad_() for p in (norm.weight, norm.bias))

            def function(x):
                return torch.nn.functional.layer_norm(x.float(), norm.normalized_shape, weight, bias).to(x.dtype)

            function.weight, function.bias = weight, bias
            return function

    for is_backward in (False, True):
        arguments = 4, 16, torch.bfloat16, is_backward, "cpu"
        assert "differs from PyTorch by " in libraries.why_wrong(Wrong, *arguments)
        assert libraries.why_wrong(Raises, *arguments).startswith("ZeroDivisionError")
        assert libraries.why_wrong(Right, *arguments) is None
    monkeypatch.setattr(
        libraries, "LIBRARIES", [type("Absent", (Wrong,), dict(name="Absent", module="no_such_module"))]
    )
    assert libraries.installed() == {} and capsys.readouterr().out.startswith("Absent is skipped: ModuleNotFoundError")


def test_the_picture_of_the_readme(tmp_path):
    package("matplotlib")
    sweeps = results.tables_of((ROOT / ".bench" / "RESULTS.md").read_text(), "Sweep")
    results.plot(next(iter(sweeps.values())), "a GPU", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10000


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_the_sweep_on_a_gpu(backend, monkeypatch, tmp_path):
    shapes = dict(FORWARD="fp32 bf16", UNALIGNED="bf16", BACKWARD="fp32", TRAINING="bf16", GELU="fp16")
    for name, dtypes in shapes.items():
        monkeypatch.setattr(sweep, name, [(64, 256, dtypes)])
    monkeypatch.setattr(sweep, "problems_as_markdown", lambda: "the problems")
    monkeypatch.setattr(results.write_section, "__defaults__", (tmp_path / "RESULTS.md",))
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--json", str(tmp_path / "table.json")])
    assert sweep.main() == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert len(rows) == 7 and all(row[k] > 0 for row in rows for k in ("floor", "eager", "compile", "new"))
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("| 64 x 256 |") == 7 and "the problems" in text and "Host time of a call" in text


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_one_shape_against_another_version(backend, monkeypatch, capsys):
    monkeypatch.delattr(results, "write_section")  # a partial run must not write RESULTS.md
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--only", "64x256:bf16", "--against", str(ROOT)])
    assert sweep.main() == 0
    lines = capsys.readouterr().out.split("\n")
    timed = [line.split(" 64 x 256 bf16: ")[0].strip() for line in lines if "against / new = " in line]
    assert timed == ["forward", "backward"]


@pytest.mark.full
def test_two_processes_time_a_training_step(tmp_path):
    (tmp_path / "small.py").write_text(
        "import ddp, os, sys\n"
        "ddp.main('cpu', columns=(64, 96), elements=1 << 12)\n"
        "sys.stdout.flush()\n"
        "os._exit(0)  # DistributedDataParallel leaves gloo's threads behind. While Python ends, one of them may abort.\n"
    )
    environment = environment_with(PYTHONPATH=str(ROOT / ".bench"), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "small.py"]
    done = run(command, cwd=tmp_path, env=environment)
    lines = [line.strip("| ").split(" | ") for line in done.stdout.split("\n") if line.startswith("| ")]
    assert done.returncode == 0 and len(lines) == 2 + 2 * 2, done.stderr
    assert [line[:2] for line in lines[2:]] == [[c, d] for d in ("bfloat16", "float32") for c in ("64", "96")]
    assert all(len(line) == 2 + 2 * 3 and min(map(float, line[2:])) >= 0 for line in lines[2:])


@pytest.mark.parametrize("precision,others", [("bf16", ()), ("autocast bf16", ("updates.0.norm_out", "updates.4.0"))])
def test_row_of_a_real_model(precision, others, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    one_step = lambda steps, **_: {name: step() or 1.0 for name, step in steps.items()}  # noqa: E731
    monkeypatch.setattr(models, "milliseconds", one_step)
    outputs = []  # the number of norms with autocast_output of each model whose memory is measured

    def peak_gib(model, loss):
        outputs.append(sum(getattr(m, "autocast_output", False) for m in model.modules()))
        return float(len(outputs))

    monkeypatch.setattr(models, "peak_gib", peak_gib)
    real = models.RealModel("torch", "", precision, lambda: models.pair_stack(6, backend.device), others)
    replaced, norms, times, memory = models.time_model(real, is_compiled=True)
    assert (replaced, norms) == (14, 14)
    variants = 3 if others else 2
    steps = ["training", "inference", "training, compiled", "inference, compiled"]
    assert times == {step: [[0.2] * variants] * models.RUNS for step in steps}
    assert outputs == [0, 0, 14 - len(others)][:variants] * 2
    numbers = [float(i + 1) for i in range(2 * variants)]
    assert memory == {"training": numbers[:variants], "training, compiled": numbers[variants:]}
    _, _, times, _ = models.time_model(real, is_compiled=False)
    assert [*times] == steps[:2]


def test_a_model_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    real = models.RealModel("torch", "8 x 8", "bf16", None)
    monkeypatch.setattr(models, "REAL_MODELS", dict(wrong=real, right=real._replace(precision="autocast bf16")))

    def time_model(real, is_compiled):
        assert real.precision == "autocast bf16", "a wrong result"
        return 1, 1, {"training": [[3, 2, 1]] * models.RUNS}, {"training": [3, 2, 1]}

    monkeypatch.setattr(models, "time_model", time_model)
    written = []
    assert models.time_models(models.REAL_MODELS, False, written.append) == ["wrong"]
    assert "a wrong result" in capsys.readouterr().err and len(written) == 1
    row = "| right | training | 8 x 8 | autocast bf16 | 1 of 1 | 3.00 | 2.00 | 1.50 | 0.000 | 1.00 | 3.00 | 0.000 |"
    assert f"{row} 3.00 | 2.00 | 1.00 |" in models.as_markdown(written[0])


def test_rows_of_other_models_stay(tmp_path):
    file, cells = tmp_path / "RESULTS.md", ["-"] * (len(models.COLUMNS) - 2)
    file.write_text(results.TITLE)
    for rows in (
        [["GPT-2", "training", *cells], ["ViT", "training", *cells]],
        [["GPT-2", "training", "new", *cells[1:]]],
    ):
        models.write_rows("NVIDIA X200", rows, file)
    models.write_rows("NVIDIA X100", [["ViT", "training", *cells]], file)
    tables = results.tables_of(file.read_text(), "Models")
    first, second = ({k: v[0] for k, v in of.items() if k not in models.HEADER} for of in tables.values())
    assert first == {"GPT-2 | training": "new", "ViT | training": "-"} and second == {"ViT | training": "-"}


def test_the_models_have_the_norms_that_the_script_names():
    """Small models of the same classes. The norms whose output is a residual, or leaves autocast, are found by name."""
    package("transformers")
    timm = package("timm")
    small = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, max_source_positions=8)
    whisper, loss = models.whisper_encoder(batch=1, device="cpu", **small)
    assert loss(whisper).dtype is torch.float32
    for name, model in (
        ("Whisper small encoder", whisper),
        ("Swin-T", timm.create_model("swin_tiny_patch4_window7_224", embed_dim=8, depths=(1, 1), num_heads=(1, 1))),
    ):
        others = models.REAL_MODELS[name].others
        replaced = models.with_replaced_norms(model, autocast_output=True, others=others)
        norms = {n: m for n, m in replaced.named_modules() if isinstance(m, layernorm_inline.LayerNorm)}
        assert others and {n for n, m in norms.items() if not m.autocast_output} == {*others}


def test_trainings_are_compared():
    package("transformers")
    small = lambda **config: models.gpt_2(**{**config, "n_layer": 1, "n_embd": 32, "n_head": 2})  # noqa: E731

    def other_gpt_2(**config):
        """Returns GPT-2 whose copies differ in the second step."""
        model, loss = small(**config)
        steps = []  # deepcopy of a function leaves it as it is, so the copies share it

        def hook(module, arguments, keywords):
            steps.append(module)
            if len(steps) == 4:
                with torch.no_grad():
                    module.transformer.ln_f.weight[0] += 1e-3

        model.register_forward_pre_hook(hook, with_kwargs=True)
        return model, loss

    assert models.compare_trainings(steps=2, device="cpu", make=small) is None
    assert models.compare_trainings(steps=3, device="cpu", make=other_gpt_2) == 2


def test_losses_of_trainings_are_compared(monkeypatch):
    def make():
        model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1)), torch.randn(8, 64)
        return model, lambda model: model(x).square().mean()

    real = models.RealModel("torch", "8 x 64", "autocast bf16", make)
    monkeypatch.setattr(models, "REAL_MODELS", {"Small": real, "No autocast": real._replace(precision="bf16")})
    first, last, (default, output, reordered) = models.compare_losses(real, steps=20)
    assert last < 0.9 * first and default == output == 0 < reordered < 1e-5  # on the CPU, both run PyTorch's operation
    text = f"\n## Training losses, a GPU\n\n{models.losses_as_markdown(models.REAL_MODELS, steps=2)}\n"
    table = results.tables_of(text, "Training losses")["a GPU"]
    assert table.keys() == {"model", "---", "Small"} and len(table["Small"]) == 5
    tables = {
        "a GPU": {"model": ["-"] * 5, "A": ["7", "1", "3e-3", "1.7e-3", "4e-3"], "B": ["7", "1", "1", "2e-2", "3e-3"]}
    }
    expected = [
        "steps of A and B, losses with it differed from eager's by up to 0.02",
        "differently differed by up to 0.004",
    ]
    assert results.losses_sentences(tables) == expected and results.losses_sentences({}) == [results.PENDING]
    monkeypatch.setattr(models, "with_replaced_norms", lambda model, **_: nn.Sequential(*model[:2], nn.Identity()))
    assert models.compare_losses(real, steps=2)[2][0] > 0.01


def test_gains_of_models():
    for runs, cells in (
        ([(84, 80), (106, 100), (107, 100)], ("106.00", "100.00", "1.06", "0.010")),
        ([(90, 100), (46, 50), (150, 100)], ("90.00", "100.00", "0.90", "0.020")),
        ([(102, 100), (105, 100), (99, 100)], ("102.00", "100.00", "no change", "0.030")),
        ([(100.9, 100)] * 3, ("100.90", "100.00", "no change", "0.000")),
    ):
        assert models.gain_of(runs) == cells
        assert models.cells_of(runs, None) == [*cells, *["-"] * 6]
    runs, memory = [(100, 90, ms) for ms in (80, 81, 70)], (3, 2.5, 2)
    assert models.cells_of(runs, memory) == "100.00 90.00 1.11 0.000 80.00 1.25 0.015 3.00 2.50 2.00".split()


def test_polynomials_of_gelu():
    """They are those that the fit finds, up to the last digits, and fit_gelu.py finds all of them in the file."""
    done = run([sys.executable, ROOT / ".bench" / "fit_gelu.py", "--check"])
    assert done.returncode == 0, done.stderr


# ---- README, and how tests run ----


def test_the_commands_of_the_readme_are_there():
    pages = (ROOT / "README.md", *ROOT.glob(".*/*.md"))
    text = "".join(page.read_text() for page in pages)
    for script, option in re.findall(r"python (\S+\.py)(?:\s+(--[a-z-]+))?", text):
        assert (ROOT / script).exists(), script
        assert option in (ROOT / script).read_text(), (script, option)
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", text))
    tests = "".join(path.read_text() for path in (ROOT / ".tests").glob("*.py"))
    files = {path.stem for path in (*(ROOT / ".tests").glob("*.py"), *ROOT.glob("*.py"))}
    assert not [name for name in named - files if f"def {name}" not in tests]


@pytest.mark.full
def test_a_test_that_hangs_fails_alone(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time\nfrom conftest import time_limit\n"
        "def test_hangs():\n    time.sleep(600)\ndef test_goes_on():\n    pass\n"
    )
    environment = environment_with(TEST_TIME_LIMIT="2", PYTEST_ADDOPTS="", PYTHONPATH=f"{ROOT / '.tests'}:{ROOT}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout and "more than 2 s" in done.stdout, done.stdout


@pytest.mark.parametrize("required,outcome", [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_package_skips_a_test_or_fails_it_if_required(required, outcome, monkeypatch):
    monkeypatch.setenv("REQUIRE_PACKAGES", required)
    with pytest.raises(outcome, match="no_such_package is not installed"):
        package("no_such_package")
