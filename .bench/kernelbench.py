"""Runs KernelBench's own evaluator and static checker on layernorm_inline.py, from a clone of KernelBench.

    git clone https://github.com/ScalingIntelligence/KernelBench
    git -C KernelBench checkout 423217d
    pip install pydantic numpy
    python .bench/kernelbench.py --problem 40 KernelBench     prints a table, and writes it to .bench/RESULTS.md
    python .bench/kernelbench.py --problem 34 KernelBench     appends the line that README names
    python .bench/kernelbench.py --problem 40 --precision bf16 KernelBench      only this precision; writes nothing

The evaluator checks five inputs, and takes the mean of 100 runs with each of two clocks: cuda_event, its default, and
do_bench of Triton. torch.compile is KernelBench's measurement of its reference. The exit status is 1 if a result is wrong,
or if the static checker finds an error.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from test_layernorm_inline import versions  # noqa: E402

SOURCE = Path(__file__).parent.parent / "layernorm_inline.py"
PROBLEMS = {  # number: (reference in the clone, text that is appended to the submission)
    40: ("level1/40_LayerNorm.py", ""),
    34: (
        "level2/34_ConvTranspose3d_LayerNorm_GELU_Scaling.py",
        "\nModelNew = ConvTranspose3dLayerNormGELUScaling\n",
    ),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLOCKS = ("cuda_event", "do_bench")
UNUSED = ("openai", "litellm", "dotenv", "datasets", "tqdm", "requests")  # imported by KernelBench for language models
COLUMNS = ["precision", "clock", "correct", "eager, ms", "torch.compile, ms", "layernorm_inline, ms"]
COLUMNS += ["times as fast as eager", "times as fast as torch.compile"]


def kernelbench(folder):
    """Returns KernelBench's functions (evaluate, check, time_reference). Empty modules stand in for unused packages."""
    sys.path.insert(0, str(folder / "src"))
    absent = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    sys.modules.update({name: MagicMock() for name in absent})
    from kernelbench.eval import eval_kernel_against_ref
    from kernelbench.kernel_static_checker import validate_kernel_static
    from kernelbench.timing import measure_ref_program_time

    for name in absent:
        del sys.modules[name]
    return eval_kernel_against_ref, validate_kernel_static, measure_ref_program_time


def evaluated(folder, problem, precisions):
    """Evaluates one problem, and prints the results. Returns (rows of the table, whether everything is right)."""
    evaluate, check, time_reference = kernelbench(folder)
    path, appended = PROBLEMS[problem]
    reference, submission = (folder / "KernelBench" / path).read_text(), SOURCE.read_text() + appended
    rows, right = [], True
    for precision in precisions:
        valid, errors, warnings = check(submission, backend="cuda", precision=precision)
        print(
            f"Static checker, {precision}: {len(errors)} errors, {len(warnings)} warnings",
            *errors,
            *warnings,
            sep="\n    ",
        )
        right &= valid
        for clock in CLOCKS:
            common = dict(timing_method=clock, precision=PRECISIONS[precision])
            result = evaluate(
                reference,
                submission,
                num_correct_trials=5,
                num_perf_trials=100,
                measure_performance=True,
                backend="cuda",
                **common,
            )
            if result is None or not result.correctness:
                print(f"WRONG: problem {problem}, {precision}, {clock}: {getattr(result, 'metadata', 'no result')}")
                right = False
                continue
            compiled = time_reference(path, reference, use_torch_compile=True, **common)["mean"]
            times = [result.ref_runtime, compiled, result.runtime]
            ratios = [f"{ms / result.runtime:#.3g}" for ms in times[:2]]
            rows.append([precision, clock, "yes", *(f"{ms:#.3g}" for ms in times), *ratios])
            print(f"Problem {problem}, " + ", ".join(f"{n}: {cell}" for n, cell in zip(COLUMNS, rows[-1])), flush=True)
    return rows, right


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a clone of KernelBench, commit 423217d")
    parser.add_argument("--problem", type=int, choices=PROBLEMS, required=True, help="KernelBench's number")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: all. With it, nothing is written")
    arguments = parser.parse_args()
    if not (arguments.folder / "KernelBench" / PROBLEMS[arguments.problem][0]).exists():
        parser.error(f"{arguments.folder} is not a clone of KernelBench")
    if importlib.util.find_spec("pydantic") is None:
        parser.error("KernelBench's evaluator needs pydantic: pip install pydantic")
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    precisions = [arguments.precision] if arguments.precision else PRECISIONS
    rows, right = evaluated(arguments.folder.resolve(), arguments.problem, precisions)
    if right and not arguments.precision:
        text = f"{versions()}\n\nKernelBench's commit 423217d.\n\n{results.markdown_table(COLUMNS, rows)}"
        results.write_section(f"Evaluator of problem {arguments.problem}, {torch.cuda.get_device_name()}", text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
