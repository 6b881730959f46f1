"""Times LayerNorm in many shapes, forward and backward, beside eager PyTorch, torch.compile and a device copy.

    python .bench/sweep.py                  times everything, prints a table, and writes it to .bench/RESULTS.md
    python .bench/sweep.py --json FILE      also writes the table as JSON
    python .bench/sweep.py --autocast       only the norms under autocast (a minute); writes their section

    python .bench/sweep.py --only 8192x768:bf16                  times one shape, forward and backward; writes no file
    python .bench/sweep.py --only 8192x768:bf16 --against DIR    also times the layernorm_inline.py in folder DIR

The last form judges a change of the kernels: put the version before the change into DIR. Both versions run in one process,
in turns, on the same tensors.

The floor is the time in which a device copy moves the bytes that LayerNorm must move: in forward, input, output, weight and
bias; in backward, 1.5 times as many (input, grad_output and grad_input). A training step is forward and backward of the
norm alone. The copy is timed in the same run. milliseconds() in test_layernorm_inline.py says how times are measured. All
but the copy is replayed from CUDA graphs, because a call from Python can take longer than the kernel.
"""

import argparse
import copy
import functools
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

import layernorm_inline  # noqa: E402
from test_layernorm_inline import (  # noqa: E402
    captured,
    milliseconds,
    milliseconds_of_graphs,
    settings_34,
    settings_40,
    time_forward,
    versions,
)

# (rows, cols, dtypes)
FORWARD = [
    *[(2**26 // n, n, "fp32 bf16 fp16") for n in (64, 256, 1024)],
    *[(8192, n, "bf16") for n in (768, 1024)],
    (65536, 768, "fp32 bf16"),
    (32768, 1536, "fp32"),
    (32768, 2041, "fp32 bf16 fp16"),
    (32768, 2047, "fp32 bf16"),
    (16384, 4096, "fp32 bf16 fp16"),
    (16384, 4099, "fp32 bf16"),
    (8192, 5120, "fp32"),
    *[(2**26 // n, n, "fp32 bf16") for n in (8192, 16384, 32768)],
    (1024, 50257, "fp32 bf16"),
    *[(2**26 // n, n, "fp32 bf16") for n in (65536, 262144, 1048576)],
    (512, 131072, "fp32"),
    (4194304, 16, "fp32"),
    (16, 4194304, "fp32"),
    (4, 16777216, "fp32"),
    (1, 67108864, "fp32"),
    *[(rows, cols, "fp16") for rows, cols in results.TRITONBENCH],
]
UNALIGNED = [(16384, 4096, "fp32 bf16")]  # rows start one element past a 16-byte boundary
BACKWARD = [
    *[(2**26 // n, n, "fp32 bf16") for n in (64, 256, 1024, 4096, 8192, 16384, 32768)],
    (8192, 768, "bf16"),
    (65536, 768, "fp32 bf16"),
    (32768, 320, "bf16"),
    (32768, 2041, "fp32 bf16"),
    *[(2**26 // n, n, "fp32 bf16") for n in (131072, 262144, 1048576)],
    (16, 4194304, "fp32"),
]
TRAINING = [(8192, 1024, "bf16"), (65536, 1024, "bf16")]
GELU = [*[(2**26 // n, n, "fp32 bf16") for n in (64, 1024, 4096, 16384, 65536)], (16, 4194304, "fp32")]
AUTOCAST = [  # dtypes of input; for float32, autocast's dtype is bfloat16
    (25216, 768, "fp32"),  # ViT-B/16, 128 images
    (8192, 768, "fp32"),  # GPT-2 124M, 8 x 1024 tokens
    (8192, 1600, "fp32"),  # GPT-2 XL
    (4096, 2048, "fp32"),
    (401408, 96, "bf16 fp16"),  # ConvNeXt-S, 128 images, and the next two
    (100352, 192, "bf16 fp16"),
    (25088, 384, "bf16 fp16"),
    (8192, 1024, "bf16 fp16"),
]
AUTOCAST_ERRORS = [(25216, 768, "fp32"), (8192, 768, "fp32"), (401408, 96, "bf16"), (25088, 384, "bf16")]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cases():
    """Yields (operation, rows, cols, dtype name)."""
    for operation, shapes in (
        ("forward", FORWARD),
        ("forward x[1:]", UNALIGNED),
        ("backward", BACKWARD),
        ("training step", TRAINING),
        ("forward GELU", GELU),
        ("backward GELU", GELU),
    ):
        for dtype in DTYPES:
            for rows, cols, dtypes in sorted(shapes, key=lambda shape: shape[1]):
                if dtype in dtypes.split():
                    yield operation, rows, cols, dtype


def module_functions(cols, gelu, options, compiled, files):
    """Returns (weight, bias, functions of the input). All functions use the same weight and bias.

    options: dtype and device; compiled: also returns torch.compile of the eager function; files: pairs (name,
    layernorm_inline module).
    """
    norm = nn.LayerNorm(cols, **options)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)

    def gelu_of(x):
        return nn.functional.gelu(norm(x))

    functions = {"eager": gelu_of if gelu else norm}
    if compiled:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(functions["eager"], dynamic=False)
    for name, file in files:
        if gelu:
            functions[name] = lambda x, file=file: file.layer_norm(
                x, (cols,), norm.weight, norm.bias, norm.eps, activation="gelu"
            )
        else:
            functions[name] = file.replace_layer_norm(copy.copy(norm))
    return norm.weight, norm.bias, functions


def time_case(operation, rows, cols, dtype, compiled=True, files=(("new", layernorm_inline),)):
    """Returns a dict: the case, and milliseconds of the floor, eager PyTorch, torch.compile and each of `files`."""
    torch.cuda.empty_cache()  # so that memory addresses depend less on earlier cases
    options = dict(device="cuda", dtype=DTYPES[dtype])
    flat = torch.randn(rows * cols + 1, **options)
    x = (flat[1:] if "x[1:]" in operation else flat[:-1]).view(rows, cols)
    weight, bias, functions = module_functions(cols, "GELU" in operation, options, compiled, files)
    # The copy is called, not replayed: in a CUDA graph it runs as other kernels, which are slower for some sizes
    # (PyTorch's issue 191284).
    source, target = flat[:-1].view(rows, cols), torch.empty_like(x)
    runs = {"floor": lambda: target.copy_(source)}
    step, stream = operation.split()[0], torch.cuda.Stream()  # step: forward, backward or training
    if step != "forward":
        x.requires_grad_()
        grad_output = torch.randn_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    # Only a side stream can be captured, and autograd runs backward on the stream of forward.
    with torch.cuda.stream(stream), torch.set_grad_enabled(step != "forward"):
        for name, function in functions.items():
            run = functools.partial(function, x)
            if step != "forward":
                y = function(x) if step == "backward" else None
                # A library may need a weight and bias of another dtype.
                leaves = x, getattr(function, "weight", weight), getattr(function, "bias", bias)

                def run(function=function, y=y, leaves=leaves):
                    output = function(x) if y is None else y
                    torch.autograd.grad(output, leaves, grad_output, retain_graph=y is not None)

            runs[name] = captured(run)
        times = milliseconds(runs)
    copies = {"forward": 1, "backward": 1.5, "training": 2.5}[step]
    times["floor"] *= copies * (1 + 1 / rows)  # weight and bias are as long as one row of input and output
    return {"operation": operation, "rows": rows, "cols": cols, "dtype": dtype, **times}


def host_microseconds(modules, x, calls=100, repeats=41):
    """Returns the median host time of a call of each module, measured in turns while the GPU keeps up."""
    times = [[] for _ in modules]
    for _ in range(repeats):
        for module, of_module in zip(modules, times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                module(x)
            of_module.append((time.perf_counter() - start) / calls * 1e6)
    return [statistics.median(t) for t in times]


def host_lines():
    """Yields sentences about the host time of a call, without and with gradients."""
    x = torch.randn(8, 768, device="cuda")
    for grad in (False, True):
        eager = nn.LayerNorm(768, device="cuda")
        modules = eager, layernorm_inline.replace_layer_norm(copy.deepcopy(eager))
        with torch.set_grad_enabled(grad):
            old, new = host_microseconds(modules, x)
        state = "on" if grad else "off"
        yield f"Host time of a call, 8 x 768 fp32, grad {state}: eager {old:.1f} us, layernorm_inline {new:.1f} us."


def fractions(row):
    """Returns the fractions of copy bandwidth of eager PyTorch, torch.compile and layernorm_inline."""
    return [f"{row['floor'] / row[name]:.3f}" for name in ("eager", "compile", "new")]


def sweep():
    """Times all cases and prints the table. Returns (its rows, sentences about host time)."""
    todo, table = list(cases()), []
    print(versions())
    print(
        f"{'':14}{'rows x cols':>20} {'dtype':5} {'floor ms':>9} | fraction of copy bandwidth: eager, torch.compile, new"
    )
    for i, case in enumerate(todo):
        print(f"\r[{i + 1}/{len(todo)}]", end=" ", file=sys.stderr, flush=True)
        row = time_case(*case)
        table.append(row)
        shape = f"{row['rows']:>11} x {row['cols']:<8}"
        print(
            f"{row['operation']:14}{shape} {row['dtype']:5} {row['floor']:9.4f} | {'  '.join(fractions(row))}",
            flush=True,
        )
    host = list(host_lines())
    print(*host, sep="\n")
    return table, host


def as_markdown(table, host):
    """Returns the text of the sweep's section in RESULTS.md."""
    names = ["eager", "torch.compile", "layernorm_inline"]
    columns = ["operation", "rows x cols", "dtype", *[f"{name}, ms" for name in ["floor", *names]], *names]
    rows = []
    for r in table:
        times = [f"{r[name]:.4f}" for name in ("floor", "eager", "compile", "new")]
        rows.append([r["operation"], f"{r['rows']} x {r['cols']}", r["dtype"], *times, *fractions(r)])
    text = (
        "Milliseconds, and fractions of copy bandwidth (floor / time). The floor is the time of a device copy of the bytes "
        "that must move. x[1:]: rows start one element past a 16-byte boundary."
    )
    return f"{versions()}\n\n{text}\n\n{results.markdown_table(columns, rows)}\n\n" + "\n".join(host)


def problems_as_markdown():
    """Times KernelBench's problems 40 and 34, prints the table, and returns it as Markdown."""
    rows = []
    for problem, settings in ((40, settings_40), (34, settings_34)):
        for setting in settings("cuda"):
            ms = time_forward(setting, ["default"])
            rows.append(
                [f"problem {problem}, {setting.name}", *(f"{ms[k]:.4f}" for k in ("original", "compile", "new"))]
            )
            print(*rows[-1], flush=True)
    columns = ["forward, ms", "eager", "torch.compile", "layernorm_inline"]
    return f"{versions()}\n\n{results.markdown_table(columns, rows)}"


# ---- Norms under autocast, with the conversion that the next linear layer does ----

WAYS = ["nn.LayerNorm", "layernorm_inline", "autocast_output", "all in 16 bits"]


def autocast_norms(cols, dtype, device):
    """Returns (weight and bias, {way: function of the input that returns 16 bits}).

    "all in 16 bits": MosaicML Composer's LowPrecisionLayerNorm, which converts input, weight and bias.
    """
    norm = nn.LayerNorm(cols, device=device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    lower = torch.float16 if dtype is torch.float16 else torch.bfloat16

    def under_autocast(module, x):
        with torch.autocast(torch.device(device).type, lower, cache_enabled=False):
            return module(x).to(lower)

    def in_16_bits(x):
        affine = norm.weight.to(lower), norm.bias.to(lower)
        return nn.functional.layer_norm(x.to(lower), norm.normalized_shape, *affine, norm.eps)

    replaced = layernorm_inline.replace_layer_norm
    modules = norm, replaced(copy.copy(norm)), replaced(copy.copy(norm), autocast_output=True)
    functions = [functools.partial(under_autocast, module) for module in modules]
    return (norm.weight, norm.bias), dict(zip(WAYS, [*functions, in_16_bits]))


def autocast_tensors(rows, cols, dtype, device):
    """Returns (input, gradient of the 16-bit output)."""
    x = torch.randn(rows, cols, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(rows, cols, device=device).to(torch.float16 if dtype is torch.float16 else torch.bfloat16)


def time_autocast(rows, cols, dtype, device="cuda"):
    """Returns {operation: {way: milliseconds}}."""
    affine, functions = autocast_norms(cols, dtype, device)
    x, grad_output = autocast_tensors(rows, cols, dtype, device)
    runs = {}
    for way, function in functions.items():

        def forward(function=function):
            with torch.no_grad():
                function(x)

        @functools.lru_cache(None)  # the first call, which is not captured, is on the stream of the graph
        def output(function=function):
            return function(x)

        def backward(output=output):
            torch.autograd.grad(output(), (x, *affine), grad_output, retain_graph=True)

        runs["forward", way], runs["backward", way] = forward, backward
    times = milliseconds_of_graphs(runs)
    return {operation: {way: times[operation, way] for way in WAYS} for operation in ("forward", "backward")}


def autocast_errors(rows, cols, dtype, device="cuda"):
    """Returns {result: {way: largest difference from float64, over the largest number of the exact result}}."""
    (weight, bias), functions = autocast_norms(cols, dtype, device)
    x, grad_output = autocast_tensors(rows, cols, dtype, device)
    tensors = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = nn.functional.layer_norm(tensors[0], (cols,), *tensors[1:])
    exact = [y.detach(), *torch.autograd.grad(y, tensors, grad_output.double())]
    errors = {}
    for way, function in functions.items():
        y = function(x)
        results_of_way = [y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad_output)]
        names = ("output", "gradient of input", "gradient of weight", "gradient of bias")
        for name, actual, expected in zip(names, results_of_way, exact):
            error = (actual.double() - expected).abs().max() / expected.abs().max()
            errors.setdefault(name, {})[way] = error.item()
    return errors


def autocast_cases(shapes):
    """Yields (rows, cols, dtype name)."""
    for rows, cols, dtypes in shapes:
        for dtype in dtypes.split():
            yield rows, cols, dtype


def autocast_as_markdown(device="cuda"):
    """Times all ways and measures their errors, prints the tables, and returns them as Markdown."""
    tables = {time_autocast: [], autocast_errors: []}
    for measure, shapes, form in ((time_autocast, AUTOCAST, "{:.4f}"), (autocast_errors, AUTOCAST_ERRORS, "{:.1e}")):
        for rows, cols, dtype in autocast_cases(shapes):
            torch.manual_seed(0)
            for operation, numbers in measure(rows, cols, DTYPES[dtype], device).items():
                cells = [form.format(numbers[way]) for way in WAYS]
                tables[measure].append([operation, f"{rows} x {cols}", dtype, *cells])
                print(*tables[measure][-1], flush=True)
    times, errors = tables.values()
    text = (
        "Milliseconds of a norm under autocast, with the conversion to 16 bits that the next linear layer does, and in "
        "backward from its 16-bit gradient. Autocast's dtype is bfloat16, for float16 input float16. All in 16 bits: "
        "autocast is off, and input, weight and bias are converted (MosaicML Composer's LowPrecisionLayerNorm)."
    )
    errors_text = "Largest difference from float64, over the largest number of the exact result."
    columns = ["rows x cols", "input", *WAYS]
    times = results.markdown_table(["operation", *columns], times)
    errors = results.markdown_table(["error of", *columns], errors)
    return f"{versions()}\n\n{text}\n\n{times}\n\n{errors_text}\n\n{errors}"


# ---- One shape, perhaps of two versions ----


def parsed_shape(text):
    """Returns (rows, cols, dtype name) of a text such as 8192x768:bf16. Raises argparse.ArgumentTypeError."""
    shape, _, dtype = text.partition(":")
    sizes = shape.split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes) or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected ROWSxCOLS:DTYPE with DTYPE one of {', '.join(DTYPES)}, but got {text!r}"
        )
    return int(sizes[0]), int(sizes[1]), dtype


def loaded(folder):
    """Returns the module layernorm_inline of another folder, beside the one that is already imported."""
    spec = importlib.util.spec_from_file_location("layernorm_inline_against", Path(folder) / "layernorm_inline.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_only(shapes, against):
    """Prints microseconds of the given shapes, forward and backward, and of the version in folder `against` if given."""
    files = [("new", layernorm_inline), *([("against", loaded(against))] if against else [])]
    print(versions())
    for rows, cols, dtype in shapes:
        for operation in ("forward", "backward"):
            ms = time_case(operation, rows, cols, dtype, compiled=not against, files=files)
            names = [name for name in ("floor", "eager", "compile", "against", "new") if name in ms]
            line = f"{operation:8} {rows} x {cols} {dtype}: " + ", ".join(f"{n} {ms[n] * 1e3:.2f} us" for n in names)
            if against:
                line += f"; against / new = {ms['against'] / ms['new']:.3f} (above 1: this version is faster)"
            print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the sweep as JSON")
    parser.add_argument(
        "--only", metavar="ROWSxCOLS:DTYPE", type=parsed_shape, nargs="+", help="time only these shapes; writes no file"
    )
    parser.add_argument(
        "--autocast", action="store_true", help="time only norms under autocast, and write their section"
    )
    parser.add_argument("--against", metavar="DIR", help="with --only: also time the layernorm_inline.py in DIR")
    arguments = parser.parse_args()
    if file := arguments.json:  # checked now, not after minutes
        if not os.access(os.path.dirname(os.path.abspath(file)), os.W_OK) or os.path.isdir(file):
            parser.error(f"cannot write to {file}")
    if arguments.only and arguments.json:
        parser.error("--only prints its result, so it cannot be combined with --json")
    if arguments.autocast and (arguments.only or arguments.json):
        parser.error("--autocast times one section, so it cannot be combined with --only or --json")
    if arguments.against and not arguments.only:
        parser.error("--against needs --only")
    if arguments.against and not (Path(arguments.against) / "layernorm_inline.py").exists():
        parser.error(f"there is no layernorm_inline.py in {arguments.against}")
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    if arguments.only:
        time_only(arguments.only, arguments.against)
        return 0
    gpu = torch.cuda.get_device_name()
    if arguments.autocast:
        results.write_section(f"Autocast, {gpu}", autocast_as_markdown())
        return 0
    table, host = sweep()
    results.write_section(f"Sweep, {gpu}", as_markdown(table, host))
    results.write_section(f"KernelBench, {gpu}", problems_as_markdown())
    results.write_section(f"Autocast, {gpu}", autocast_as_markdown())
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"versions": versions(), "rows": table}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
