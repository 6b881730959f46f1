"""A table of what is left to PyTorch: dtypes x weight x autocast x how a program is recorded x switches.

The tensors are fake CUDA tensors, so that PyTorch's rules for CUDA hold without a GPU, and nothing is computed.
"""

import contextlib
import itertools
import typing

import emulator
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
AUTOCAST = (None, BFLOAT16, FLOAT16)
SWITCHES = ("", "DISABLE", "BATCH_INVARIANT")


class Cell(typing.NamedTuple):
    cols: int
    dtype: torch.dtype
    affine: typing.Optional[torch.dtype]  # of weight and bias
    given: str = "wb"
    activation: typing.Optional[str] = None
    scale: float = 1.0
    option: bool = False  # autocast_output


def cells():
    """Yields rows that torch.compile should fuse, that are not a multiple of 16 bytes, and that are too long to fuse."""
    dtypes = {64: (FLOAT32, BFLOAT16), 31: (FLOAT32, FLOAT16, BFLOAT16, FLOAT64), 16392: (FLOAT32, BFLOAT16, FLOAT64)}
    for cols, dtype in ((cols, dtype) for cols, some in dtypes.items() for dtype in some):
        kinds = [(dtype, "wb"), (None, "")]
        if dtype in (FLOAT16, BFLOAT16):
            kinds += [(FLOAT32, "wb"), (FLOAT32, "w"), (FLOAT32, "b")]
        yield from (Cell(cols, dtype, affine, given) for affine, given in kinds)
        yield Cell(cols, dtype, kinds[-1][0], kinds[-1][1], "gelu", 2.0)
        yield from (
            Cell(cols, dtype, *kinds[i], *epilogue, option=True) for i, epilogue in ((0, ()), (-1, ("gelu", 2.0)))
        )


CELLS = [*cells()]


class Norms(torch.nn.Module):
    """Computes all cells, so that one program has all of them."""

    def __init__(self, layer_norm):
        super().__init__()
        self.layer_norm = layer_norm

    def forward(self, *tensors):
        given, outputs = iter(tensors), []
        for cell in CELLS:
            x = next(given)
            weight = next(given) if "w" in cell.given else None
            bias = next(given) if "b" in cell.given else None
            arguments = (cell.cols,), weight, bias, 1e-5, cell.activation, cell.scale
            outputs.append(self.layer_norm(x, *arguments, autocast_output=cell.option))
        return tuple(outputs)


def tensors():
    """Returns the arguments of Norms."""
    found = []
    for cell in CELLS:
        found.append(torch.empty(3, cell.cols, device="cuda", dtype=cell.dtype))
        found += [torch.empty(cell.cols, device="cuda", dtype=cell.affine) for _ in cell.given]
    return tuple(found)


def compiled(module, given, mode):
    recorded = []
    torch.compile(module, backend=lambda *program: recorded.append(program) or program[0], fullgraph=True)(*given)
    ((graph, inputs),) = recorded
    return lambda *_: graph(*inputs)


def exported(strict):
    def export(module, given, mode):
        with mode:
            return torch.export.export(module, given, strict=strict).module()

    return export


def traced(module, given, mode):
    """Returns a function that traces: TorchScript cannot run what it has traced while functions are noted."""

    def trace(*given):
        outputs = []
        torch.jit.trace(lambda *tensors: outputs.append(module(*tensors)) or outputs[0], given, check_trace=False)
        return outputs[0]

    return trace


RECORDERS = {
    "eager": lambda module, given, mode: module,
    "compile": compiled,
    "trace": traced,
    "export": exported(False),
    "strict export": exported(True),
}


def expected(cell, how, autocast, switch):
    """Returns (True if an op of layernorm_inline runs, the dtype of the output), as layer_norm's docstring promises."""
    dtype = FLOAT32 if autocast and cell.dtype != FLOAT64 else cell.dtype
    if cell.option and autocast and cell.dtype != FLOAT64 and how in ("eager", "compile"):
        dtype = autocast
    if switch == "DISABLE" or cell.dtype == FLOAT64 or how in ("trace", "export", "strict export"):
        return False, dtype
    if how == "compile" and switch != "BATCH_INVARIANT":
        row_bytes = cell.cols * cell.dtype.itemsize
        is_fused = cell.cols <= 16384 if autocast else row_bytes <= 16384 and row_bytes % 16 == 0
        return not is_fused, dtype
    return True, dtype


class Record(TorchDispatchMode):
    """Notes each layer norm. Fails if one of PyTorch's has tensors of two dtypes, which its CUDA kernels do not accept."""

    def __init__(self):
        super().__init__()
        self.norms, self.functions = [], []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name()
        self.functions.append(name.split("::")[1].split(".")[0])
        if "layer_norm" in name and "conv" not in name:
            is_own = not name.startswith("aten::")
            dtypes = {t.dtype for t in arguments if isinstance(t, torch.Tensor)}
            assert is_own or len(dtypes) == 1, f"{name} of {dtypes}"
            self.norms.append(is_own)
        return function(*arguments, **(keywords or {}))


def wrong_cells(module, switch, recorders, dtypes):
    """Yields a sentence for each cell that runs on the wrong side, or returns the wrong dtype."""
    for autocast, how in itertools.product(dtypes, recorders):
        torch._dynamo.reset()
        mode, record = FakeTensorMode(), Record()
        with mode:
            given = tensors()
        with autocast_of_cuda(autocast):
            program = RECORDERS[how](Norms(module.layer_norm), given, mode)
            with mode, record, torch.no_grad():
                outputs = program(*given)
        assert len(record.norms) == len(CELLS), f"{how}, autocast {autocast}: {len(record.norms)} layer norms"
        for cell, is_own, output in zip(CELLS, record.norms, outputs):
            if (is_own, output.dtype) != expected(cell, how, autocast, switch):
                yield f"{cell}, {how}, autocast {autocast}: {'op' if is_own else 'PyTorch'}, {output.dtype}"


@contextlib.contextmanager
def autocast_of_cuda(dtype):
    """Like torch.autocast("cuda"), which does nothing without a GPU."""
    before = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
    torch.set_autocast_enabled(dtype is not None)
    torch.set_autocast_gpu_dtype(dtype or before[1])
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(before[0])
        torch.set_autocast_gpu_dtype(before[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.emulated
@pytest.mark.skipif(not emulator.can_build(), reason="needs g++ and the headers of a CUDA toolkit")
@pytest.mark.parametrize("switch,recorders,dtypes", [
    ("", ["eager", "compile", "trace"], AUTOCAST[:2]),
    ("DISABLE", ["eager"], AUTOCAST[:2]),
    ("BATCH_INVARIANT", ["eager", "compile", "export"], AUTOCAST[:1]),
    *(pytest.param(switch, [*RECORDERS], AUTOCAST, marks=pytest.mark.full) for switch in SWITCHES),
])  # fmt: skip
def test_what_is_left_to_pytorch(monkeypatch, switch, recorders, dtypes):
    for name in SWITCHES[1:]:
        monkeypatch.setenv(f"LAYERNORM_INLINE_{name}", str(int(name == switch)))
    problems = [*wrong_cells(emulator.load_for_fake_tensors(), switch, recorders, dtypes)]
    assert not problems, "\n".join(problems[:20])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.emulated
@pytest.mark.skipif(not emulator.can_build(), reason="needs g++ and the headers of a CUDA toolkit")
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_of_problem_34_is_left_to_pytorch(monkeypatch, switch):
    """One kernel runs it if no dtype differs, autocast is off, and torch.export does not record it."""
    for name in SWITCHES[1:]:
        monkeypatch.setenv(f"LAYERNORM_INLINE_{name}", str(int(name == switch)))
    layernorm_inline, wrong = emulator.load_for_fake_tensors(), []
    for dtype, parameters, autocast, how in itertools.product(
        (FLOAT32, BFLOAT16, FLOAT64), (FLOAT32, BFLOAT16, FLOAT64), AUTOCAST[:2], ("eager", "export")
    ):
        if dtype != parameters and not autocast or FLOAT64 in (dtype, parameters) and dtype != parameters:
            continue  # PyTorch's convolution does not accept it
        mode, record = FakeTensorMode(), Record()
        torch.set_default_dtype(parameters)
        with mode, torch.device("cuda"), torch.no_grad(), emulator.on(emulator.GPUS["hopper"](8)):
            model = layernorm_inline.ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1)
            given = (torch.empty(1, 32, 2, 2, 32, dtype=dtype),)
            with autocast_of_cuda(autocast):
                program = RECORDERS[how](model, given, mode)
                with record:
                    y = program(*given)
        is_one_kernel = "conv_transpose3d_layer_norm_gelu" in record.functions
        expected = switch != "DISABLE" and how == "eager" and not autocast and dtype != FLOAT64
        if is_one_kernel != expected or y.dtype != (FLOAT32 if autocast and dtype != FLOAT64 else dtype):
            wrong.append((dtype, parameters, autocast, how, y.dtype, record.functions))
    assert not wrong, wrong
