# SPDX-License-Identifier: MIT
"""layernorm_inline: a drop-in nn.LayerNorm for NVIDIA GPUs, in one file.

What it is
    CUDA kernels for forward and backward, faster than PyTorch's own. CUDA tensors of dtype float32, float16 and
    bfloat16 run these kernels or raise an error. float64 and other devices run PyTorch's operations, and so do, in part,
    models under torch.compile and exported programs (see layer_norm). Gradients can be differentiated again, and work
    with torch.func and in forward mode.

How to use it
    Copy this file into your project. It needs PyTorch 2.0 or newer, ninja, a C++ compiler and nvcc. For a PyTorch that
    was built with CUDA 13, pip can install nvcc: `pip install "cuda-toolkit[nvcc,crt,cccl]"`.

        from layernorm_inline import LayerNorm, layer_norm, replace_layer_norm

        norm = LayerNorm(768).cuda()                  # the arguments of nn.LayerNorm
        y = norm(x)
        y = layer_norm(x, (768,), weight, bias)       # the arguments of PyTorch's function, and activation and scale
        replace_layer_norm(model)                     # converts every nn.LayerNorm inside, in place

    For KernelBench, ModelNew is level 1 problem 40, and ConvTranspose3dLayerNormGELUScaling is level 2 problem 34.

What the import does
    The first import compiles the kernels, which takes 15 to 30 s, and stores the library in TORCH_EXTENSIONS_DIR
    (default: ~/.cache/torch_extensions). Later imports load it. A second library, for activations, scale and
    the convolution, is compiled on their first use, or when ConvTranspose3dLayerNormGELUScaling is constructed.
    The import compiles for the GPUs of the machine, without initializing CUDA; if there are none, for the list in
    TORCH_CUDA_ARCH_LIST; without a list it compiles nothing. It raises if compiling fails, and leaves PyTorch and the
    environment as they were.

Reading it
    1 Python API, 2 Build, 3 Interface of the kernels and the binding, 4 C++ binding, 5 CUDA, 6 Load. CUDA is in rooms,
    each a string. _ELEMENTS, _STATISTICS, _EPILOGUE, _DEVICE and _ROWS are what kernels share. _DISPATCH asks in this
    order which room takes a call (each begins with which rows those are, and why that is fast):
        _REGISTERS     rows of up to 32 KB (unaligned: 28), backward 8 KB (16 without the pipeline)
        _SHARED        longer aligned rows without an epilogue, of up to 71 KB (16-bit: 43), many of them, forward
        _PIPELINE      longer aligned rows without an epilogue, from sm_80 on, forward and backward
        _JOINT         float32 rows too long for the pipeline, of up to 32768 columns an SM, sm_90 to sm_110, forward
        _SPREAD        all other rows, forward and backward
    _CONVOLUTION is ConvTranspose3d, LayerNorm, GELU and scaling in one kernel.

License: MIT. Copyright (c) 2026 the layernorm_inline authors

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation
    the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and
    to permit persons to whom the Software is furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial portions of
    the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
    THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
    AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
    CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
    IN THE SOFTWARE.
"""

import _thread
import contextlib
import ctypes
import fcntl
import functools
import glob
import hashlib
import importlib.util
import io
import logging
import numbers
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

import torch
from torch import _VF, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

__version__ = "0.2.0"
__all__ = ["ConvTranspose3dLayerNormGELUScaling", "LayerNorm", "ModelNew", "layer_norm", "replace_layer_norm"]
__all__ += ["CPP_SOURCE", "CUDA_SOURCE"]  # as compiled

# ============================================================================
# 1  Python API
# ============================================================================


# Activation name -> (device struct in the section _EPILOGUE, PyTorch's operation in Python and C++, and its gradient).
_ACTIVATIONS = {
    "gelu": ("Gelu", lambda z: torch.ops.aten.gelu(z), "at::gelu(z)", "at::gelu_backward(grad, z)"),
    "gelu_tanh": (
        "GeluTanh",
        lambda z: torch.ops.aten.gelu(z, approximate="tanh"),
        'at::gelu(z, "tanh")',
        'at::gelu_backward(grad, z, "tanh")',
    ),
}
_ACTIVATION_NAMES = (None, *_ACTIVATIONS)
_ACTIVATION_NUMBERS = {name: number for number, name in enumerate(_ACTIVATION_NAMES)}  # values of enum class Activation

# The classes that a model is built with, even if somebody assigns another class to nn.LayerNorm.
_TorchLayerNorm = nn.modules.normalization.LayerNorm
_TorchConvTranspose3d = nn.modules.conv.ConvTranspose3d

# torch.__version__ compares as a version, not as a string.
_OVERRIDES_ARE_TRACED = torch.__version__ >= "2.2"  # older Dynamo cannot trace has_torch_function_variadic
# Returns True while Dynamo traces, for torch.compile or for a strict torch.export.
_is_dynamo_tracing = torch.compiler.is_dynamo_compiling if torch.__version__ >= "2.5" else torch._utils.is_compiling
_tracing_state = torch._C._get_tracing_state  # returns None unless torch.jit.trace runs
_HAS_EXPORT_FLAG = torch.__version__ >= "2.7"


def _is_exporting():
    """Returns True while torch.export runs, strict or not. (torch.compiler.is_exporting is always True in some Dynamos.)"""
    return _HAS_EXPORT_FLAG and torch.compiler._is_exporting_flag


def _is_left_to_pytorch(input, normalized_shape, eps):
    """Returns True if PyTorch's layer_norm suits what torch.compile or torch.export traces better than an op of this file.

    Exported programs must load without this file. Inductor fuses layer_norm with the operations around it, such as the
    residual addition before it and, under autocast, the casts to float32 and back. Faster kernels outweigh this only
    for long rows, and for rows that are not a multiple of 16 bytes.
    """
    columns = 1
    for size in normalized_shape:
        if not isinstance(size, int):
            return True  # to Dynamo, a number of NumPy's is a tensor, which no op accepts
        columns = columns * size
    if _is_exporting() or not isinstance(eps, (float, int)):
        return True
    if torch.is_autocast_enabled():
        return columns <= 16384
    row_bytes = columns * input.element_size()
    return row_bytes <= 16384 and row_bytes % 16 == 0


def _torch_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale):
    """Computes layer_norm with PyTorch's operations."""
    y = _VF.layer_norm(input, normalized_shape, weight, bias, eps)
    if activation is not None:
        _, operation, _, _ = _ACTIVATIONS[activation]
        y = operation(y)
    return y if scale == 1 else y * scale


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
    activation: Optional[str] = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Applies layer normalization over the trailing dimensions `normalized_shape`, like PyTorch's function layer_norm.

    output = scale * activation((input - mean) / sqrt(variance + eps) * weight + bias), where variance is the biased
    one (Ba, Kiros, Hinton 2016, arXiv:1607.06450). The result can be differentiated to any order without an
    activation, and twice with one.

    CUDA tensors of dtype float32, float16 and bfloat16 run this file's kernels. PyTorch's operations are used for
    float64 and other devices. They are also used under torch.compile, which fuses them with the operations around them,
    for rows of at most 16 KB that are a multiple of 16 bytes, and under autocast for rows of at most 16384 columns; and
    in programs that torch.export, torch.onnx.export, torch.jit.trace or torch.jit.script record, so that these load
    without this file.

    Args:
        input: shape (*, *normalized_shape), any strides.
        normalized_shape: sequence of at least one int.
        weight, bias: shape normalized_shape, with input's dtype (or float32 if input has 16 bits), or None.
        eps: added to the variance, in units of input squared.
        activation: None, "gelu" (exact, with erf) or "gelu_tanh" (https://arxiv.org/abs/1606.08415).
        scale: a number. A Tensor is not accepted, because it would get no gradient.

    Returns:
        A contiguous Tensor of input's shape and dtype (float32 under CUDA autocast, like nn.LayerNorm). Statistics
        and arithmetic are float32 for every dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not match, or there are no kernels for input's GPU.
        TypeError: an argument has a type that PyTorch's layer_norm does not accept, or scale is not a number.
        ValueError: activation is unknown.

    Example:
        >>> x = torch.randn(32, 768, device="cuda")
        >>> y = layer_norm(x, (768,), torch.ones(768, device="cuda"), activation="gelu")
    """
    if (_OVERRIDES_ARE_TRACED or not _is_dynamo_tracing()) and has_torch_function_variadic(input, weight, bias):
        rest = dict(weight=weight, bias=bias, eps=eps, activation=activation, scale=scale)
        return handle_torch_function(layer_norm, (input, weight, bias), input, normalized_shape, **rest)
    if type(scale) is not float and not isinstance(scale, numbers.Real):
        raise TypeError(f"Expected scale to be a number, but got {type(scale).__name__}")
    if activation not in _ACTIVATION_NAMES:  # a tuple, because a dict raises TypeError for an unhashable activation
        raise ValueError(f"Expected activation to be one of {_ACTIVATION_NAMES}, but got {activation!r}")
    runs_on_cuda = isinstance(input, torch.Tensor) and input.is_cuda and input.dtype is not torch.float64
    if not runs_on_cuda or _tracing_state() is not None:  # torch.jit.trace, or torch.onnx.export without dynamo
        return _torch_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale)
    if _is_dynamo_tracing() or _is_exporting():
        if _is_left_to_pytorch(input, normalized_shape, eps):
            return _torch_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale)
    elif not _has_usual_types(normalized_shape, weight, bias, eps):
        _VF.layer_norm(input[None][:0], normalized_shape, weight, bias, eps)  # raises PyTorch's TypeError if it must
        normalized_shape, eps = [int(size) for size in normalized_shape], float(eps)
    if _layer_norm_op is None:
        raise RuntimeError(f"layernorm_inline: cannot run on {input.device}: {_why_not}")
    if activation is None and scale == 1:
        return _layer_norm_op(input, normalized_shape, weight, bias, eps)
    _load_epilogue()
    number = _ACTIVATION_NUMBERS[activation]
    return _epilogue_ops.layer_norm.default(input, normalized_shape, weight, bias, eps, number, scale)


def _has_usual_types(normalized_shape, weight, bias, eps):
    """Returns True if the op accepts these arguments as they are. If not, PyTorch decides what to do with them."""
    if type(normalized_shape) not in (tuple, list, torch.Size) or type(eps) not in (float, int):
        return False
    for size in normalized_shape:  # a small call has no time for all()
        if type(size) is not int:
            return False
    return (weight is None or isinstance(weight, torch.Tensor)) and (bias is None or isinstance(bias, torch.Tensor))


class LayerNorm(_TorchLayerNorm):
    """nn.LayerNorm with the forward and backward of this file.

    Everything but forward is inherited, so it accepts the arguments of the installed PyTorch's nn.LayerNorm. Shapes,
    dtypes and errors are those of layer_norm.

    Example:
        >>> norm = LayerNorm(768).cuda()
        >>> y = norm(torch.randn(32, 768, device="cuda"))
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous tensor of input's shape (*, *normalized_shape) and dtype, see layer_norm."""
        if torch.jit.is_scripting():
            return _VF.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        else:  # an else branch, because TorchScript compiles the code after a return
            return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class ModelNew(LayerNorm):
    """LayerNorm under KernelBench's name. It also loads the state_dict of problem 40's reference: ln.weight, ln.bias."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in ("weight", "bias"):
            if f"{prefix}ln.{name}" in state_dict:
                state_dict[prefix + name] = state_dict.pop(f"{prefix}ln.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def replace_layer_norm(
    module: nn.Module, types: Union[type[nn.Module], Sequence[type[nn.Module]]] = (_TorchLayerNorm,)
) -> nn.Module:
    """Converts every nn.LayerNorm inside `module`, and module itself, to LayerNorm in place. Returns module.

    Module objects, Parameters, hooks and attributes stay the same, so optimizers and references remain valid. Two kinds
    are skipped with a warning: subclasses of nn.LayerNorm that are not in `types`, because their forward may differ,
    and modules whose class or forward was already replaced (parametrize, FSDP's fully_shard, accelerate's hooks). Call
    replace_layer_norm before those.

    Args:
        module: an nn.Module.
        types: the exact class or classes to convert: nn.LayerNorm, or subclasses whose forward computes the same
            function. timm.layers.LayerNorm does; timm.layers.LayerNorm2d, which normalizes dimension 1, does not.

    Raises:
        TypeError: module is not an nn.Module, or types contains anything but nn.LayerNorm and its subclasses.

    Example:
        >>> model = replace_layer_norm(nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 768)).cuda())
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected module to be an nn.Module, but got {type(module).__name__}")
    classes = tuple(types) if isinstance(types, Collection) else (types,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, _TorchLayerNorm)):
            raise TypeError(f"Expected types to be nn.LayerNorm or subclasses of it, but got {types!r}")
    skipped = defaultdict(Counter)
    for child in (m for m in module.modules() if isinstance(m, _TorchLayerNorm) and not isinstance(m, LayerNorm)):
        cls = type(child)
        name = f"{cls.__module__}.{cls.__qualname__}"
        is_reloaded = name == f"{LayerNorm.__module__}.{LayerNorm.__qualname__}"  # this class, before a reload
        if "forward" in vars(child) or (cls is not _TorchLayerNorm and name.startswith("torch.")):
            skipped["modules whose class or forward was already replaced; call replace_layer_norm first"][name] += 1
        elif cls in classes or is_reloaded:
            child.__class__ = LayerNorm
        elif cls is not _TorchLayerNorm:
            skipped["subclasses; name those that compute the same in types=(nn.LayerNorm, ...)"][name] += 1
    report = [
        f"skipped {kind}: {', '.join(f'{name} ({count})' for name, count in names.items())}"
        for kind, names in skipped.items()
    ]
    if not report and not any(isinstance(m, LayerNorm) for m in module.modules()):
        report = [f"found no nn.LayerNorm in {type(module).__name__}"]
    if report:
        warnings.warn(f"replace_layer_norm {'. It '.join(report)}.", stacklevel=2)
    return module


_FORWARDS = {cls: cls.forward for cls in (_TorchConvTranspose3d, LayerNorm)}  # before anybody patches them
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def _is_plain(module, cls):
    """Returns True if calling the module runs cls.forward and nothing else (no subclass, no hooks, no patches)."""
    return (
        type(module) is cls
        and "forward" not in vars(module)
        and cls.forward is _FORWARDS[cls]
        and not any(getattr(module, f"_{hooks}") or getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOKS)
    )


class ConvTranspose3dLayerNormGELUScaling(nn.Module):
    """scaling_factor * GELU(LayerNorm(ConvTranspose3d(x))), the model of KernelBench's level 2 problem 34.

    LayerNorm normalizes the last dimension, the output's width W', which must equal out_channels (else RuntimeError).
    Parameters, state_dict keys and initialization are those of an nn.ConvTranspose3d `conv_transpose` and an
    nn.LayerNorm(out_channels) `layer_norm`.

    One kernel computes everything if all of these hold; float32 products are in TF32 if PyTorch's convolutions may
    use it:
      - 32 input and 64 output channels, kernel 4, stride 2, padding 1, input width 32
      - input and parameters have one dtype: float32, float16 or bfloat16, outside of autocast
      - the two modules have neither hooks nor patches
      - the GPU has the shared memory: 227 KB per block for float32, 115 KB for 16 bits
    Its backward recomputes the convolution, so neither the convolution's nor LayerNorm's output is kept. Everything
    else runs PyTorch's convolution, and LayerNorm, GELU and scaling in one kernel; or only PyTorch's operations, where
    layer_norm does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, bias: as for nn.ConvTranspose3d.
        eps: as for nn.LayerNorm.
        scaling_factor: a number. If it is set to a Tensor later, PyTorch multiplies by it.

    Example:
        >>> model = ConvTranspose3dLayerNormGELUScaling(32, 64, 4, 2, 1).cuda()
        >>> y = model(torch.randn(1, 32, 16, 32, 32, device="cuda"))  # (1, 64, 32, 64, 64)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Union[int, tuple[int, int, int]],
        stride: Union[int, tuple[int, int, int]],
        padding: Union[int, tuple[int, int, int]],
        bias: bool = True,
        eps: float = 1e-5,
        scaling_factor: float = 1.0,
    ):
        super().__init__()
        self.conv_transpose = _TorchConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.layer_norm = LayerNorm(out_channels, eps=eps)
        self.scaling_factor = scaling_factor
        _load_epilogue()

    def _in_one_kernel(self, x):
        conv, norm = self.conv_transpose, self.layer_norm
        return (
            _ops is not None
            and not _is_exporting()
            and _tracing_state() is None
            and isinstance(x, torch.Tensor)
            and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(t.is_cuda and t.dtype == x.dtype for t in (x, *self.parameters()))
            and not torch.is_autocast_enabled()
            and (x.dim() == 5 and x.shape[1] == 32 and x.shape[4] == 32)
            and (_is_plain(conv, _TorchConvTranspose3d) and _is_plain(norm, LayerNorm))
            and conv.weight.shape == (32, 64, 4, 4, 4)
            and (conv.stride, conv.padding, conv.output_padding) == ((2, 2, 2), (1, 1, 1), (0, 0, 0))
            and (conv.dilation, conv.groups, norm.normalized_shape) == ((1, 1, 1), 1, (64,))
            and isinstance(self.scaling_factor, numbers.Real)  # a Tensor may want a gradient
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (batch, out_channels, D', H', W') of x's dtype for x of shape (batch, in_channels, D, H, W)."""
        conv, norm = self.conv_transpose, self.layer_norm
        if self._in_one_kernel(x):
            _load_epilogue()
            op = _epilogue_ops.conv_transpose3d_layer_norm_gelu.default
            return op(x, conv.weight, conv.bias, norm.weight, norm.bias, norm.eps, self.scaling_factor)
        y = conv(x)
        if _is_plain(norm, LayerNorm) and not isinstance(self.scaling_factor, torch.Tensor):
            return layer_norm(y, norm.normalized_shape, norm.weight, norm.bias, norm.eps, "gelu", self.scaling_factor)
        return torch.ops.aten.gelu(norm(y)) * self.scaling_factor  # runs hooks and patches of norm


# ============================================================================
# 2  Build: compile once, cache, load
# ============================================================================

_CUDA_FLAGS = ["-O1"]  # for the host code; device code is always optimized
_CPP_FLAGS = ["-O2"]
_OLDEST_CUDA = (11, 8)  # the first version with cudaLaunchKernelExC
_ADVICE = "Name another folder in the environment variable TORCH_EXTENSIONS_DIR."

# A wrapper that is placed on PATH as `ninja`. If this Python process dies, the wrapper is killed and ninja receives
# SIGTERM, so that no compiler keeps running.
_NINJA = """#!/bin/sh
exec {python} -IS -c '
import ctypes, os, subprocess, sys
prctl = ctypes.CDLL(None).prctl
prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.getppid() == {parent} and sys.exit(subprocess.call(sys.argv[1:], preexec_fn=lambda: prctl(1, 15)))
' {ninja} "$@"
"""


class _Caught(contextlib.suppress):
    """contextlib.suppress that keeps what it suppressed in `error`."""

    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.error = error
        return super().__exit__(kind, error, traceback)


def _print(message):
    if sys.stderr is not None:  # None where the process was started without one
        print(f"layernorm_inline: {message}", file=sys.stderr)


def _output(*command):
    """Returns what a command prints to stdout, and to stderr if it fails; "" if it cannot be run."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return done.stdout + (done.stderr if done.returncode else "")
    return ""


def _version(text):
    """Returns (12, 4) for "12.4"."""
    return tuple(map(int, text.split(".")[:2]))


def _number(code):
    """Returns 90 for sm_90a (machine code) and for compute_90 (PTX)."""
    return int(re.sub(r"\D", "", code))


def _set_environment(restored, **variables):
    """Sets environment variables until the ExitStack `restored` is closed."""
    for name, value in variables.items():
        if name in os.environ:
            restored.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            restored.callback(os.environ.pop, name, None)
        os.environ[name] = value


def _cpp_extension():
    """Returns torch.utils.cpp_extension, without its warning that there is no GPU.

    It looks for GPUs when it is first imported. It must use NVML for that, so that CUDA is not initialized.
    """
    if importlib.util.find_spec("setuptools") is None:
        raise RuntimeError("layernorm_inline: PyTorch cannot compile without setuptools. Run: pip install setuptools")
    with contextlib.ExitStack() as restored:
        _set_environment(restored, PYTORCH_NVML_BASED_CUDA_CHECK="1")
        logger, reject = logging.getLogger("torch.utils.cpp_extension"), lambda record: False
        logger.addFilter(reject)
        restored.callback(logger.removeFilter, reject)
        from torch.utils import cpp_extension
    return cpp_extension


def _gpus():
    """Returns the compute capabilities of this machine's GPUs, for example [(9, 0)].

    NVML, which comes with the driver, answers without initializing CUDA, so that CUDA_VISIBLE_DEVICES can still be set
    after the import, and processes can be forked. Because of that all GPUs count, not only the visible ones. None
    counts if CUDA_VISIBLE_DEVICES hides all of them, or if the driver is older than PyTorch's CUDA.
    """
    if not re.match(r"\s*\+?\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0")):
        return []
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count, gpu = ctypes.c_uint(), ctypes.c_void_p()
        driver, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlInit_v2() == 0:
            capabilities = []
            nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(driver))
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            for index in range(count.value):
                if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) != 0:
                    continue  # this process may not use it
                if nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)) == 0:
                    capabilities.append((major.value, minor.value))
            nvml.nvmlShutdown()
            return capabilities if driver.value // 1000 >= _version(torch.version.cuda)[0] else []
    # No NVML, for example on Jetson.
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.cuda.get_device_capability(device) for device in devices]


def _architectures():
    """Returns the architectures of the GPUs, such as sm_90; without a GPU, those in TORCH_CUDA_ARCH_LIST.

    For example "8.0;9.0+PTX" names sm_80, sm_90 and compute_90.
    """
    gpus = _gpus()
    if gpus:
        return sorted({f"sm_{major}{minor}" for major, minor in gpus})
    names = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if names in ([], ["native"]):
        return []
    with contextlib.ExitStack() as restored:
        _set_environment(restored, TORCH_CUDA_ARCH_LIST=";".join(names))
        return re.findall(r",code=(\w+)", " ".join(_cpp_extension()._get_cuda_arch_flags()))


def _codes(architectures):
    """Returns what to compile: sm_90a for sm_90, because only that has wgmma, and nothing older than Turing."""
    codes = {"sm_90a" if code == "sm_90" else code for code in architectures if _number(code) >= 75}
    if _version(torch.version.cuda)[0] == 11:  # lacks instructions that the kernels use on Hopper
        codes = {"compute_80" if _number(code) >= 90 else code for code in codes}
    return sorted(codes, key=lambda code: (_number(code), code))


def _toolkits():
    """Yields folders that may hold a CUDA toolkit: where PyTorch looks, the nvcc on PATH, then where pip installs one."""
    yield _cpp_extension().CUDA_HOME
    # An nvcc on PATH can be a wrapper that is far from its toolkit. The toolkit's own nvcc prints where it is.
    top = re.search(r"^#\$ TOP=(.*)$", _output("nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null"), re.M)
    yield top and top[1]
    yield "/usr/local/cuda"
    yield from (os.path.join(path, "nvidia", f"cu{_version(torch.version.cuda)[0]}") for path in sys.path)


def _find_cuda_home():
    """Returns the folder and the version of a CUDA toolkit of PyTorch's major version."""
    major = _version(torch.version.cuda)[0]
    rejected = []
    for home in dict.fromkeys(os.path.abspath(home) for home in _toolkits() if home):
        nvcc = os.path.join(home, "bin", "nvcc")
        headers = [f"{glob.escape(home)}/{p}include/cuda_runtime_api.h" for p in ("", "targets/*/")]  # targets: conda
        if os.path.exists(nvcc) and any(map(glob.glob, headers)):
            said = _output(nvcc, "--version")
            release = re.search(r"release (\d+\.\d+)|$", said)[1]
            if release and _version(release)[0] == major and _version(release) >= _OLDEST_CUDA:
                return home, release
            problem = f"belongs to CUDA {release}" if release else f"does not run ({said.strip() or 'no output'})"
            rejected.append(f"the nvcc in {home} {problem}")
    missing = "nvcc was not found in CUDA_HOME, on PATH, in /usr/local/cuda or among the installed Python packages"
    advice = (
        f"Install NVIDIA's or conda's CUDA toolkit {'11.8' if major == 11 else major} and set CUDA_HOME to its folder."
    )
    if major >= 13:
        advice = 'Run: pip install "cuda-toolkit[nvcc,crt,cccl]"'
    built = (
        f"PyTorch {torch.__version__} was built with CUDA {torch.version.cuda} and needs an nvcc of that major version"
    )
    raise RuntimeError(f"layernorm_inline: {', '.join(rejected) or missing}; {built}. {advice}")


def _check_host_compiler():
    """Raises with advice if the C++ compiler, or the headers that it needs, are missing."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        advice = "Install one, for example with: apt install g++, or name it in the environment variable CXX."
        raise RuntimeError(f"layernorm_inline: the C++ compiler {compiler} was not found. {advice}")
    headers = sysconfig.get_path("include")
    if torch.__version__ < "2.8" and not os.path.exists(os.path.join(headers, "Python.h")):
        advice = "Install them, for example with: apt install python3-dev, or use PyTorch 2.8 or newer."
        raise RuntimeError(f"layernorm_inline: Python's headers (Python.h) were not found in {headers}. {advice}")


def _add_ninja_to_path(restored, folder):
    """Puts _NINJA on PATH, in front of the ninja that it calls, until the ExitStack `restored` is closed."""
    path = os.environ.get("PATH", os.defpath)
    # An older ninja package has a script on PATH, and the program in its data folder.
    places = [*(f"{p}/ninja/data/bin" for p in sys.path), path, sysconfig.get_path("scripts")]
    ninja = shutil.which("ninja", path=os.pathsep.join(places))
    python = shutil.which("python3", path=os.path.dirname(sys.executable or "") + os.pathsep + path)
    if ninja and python:
        words = dict(python=shlex.quote(python), parent=os.getpid(), ninja=shlex.quote(os.path.abspath(ninja)))
        Path(folder, "ninja").write_text(_NINJA.format(**words))
        os.chmod(f"{folder}/ninja", 0o755)
    _set_environment(restored, PATH=os.pathsep.join([folder, *places]))


def _library(folder):
    """Returns the path of a folder's library, which is named after the parent folder."""
    return f"{folder}/{os.path.basename(os.path.dirname(folder))}.so"


def _known_codes(cuda_home, release, codes):
    """Returns those of codes that nvcc can compile, and a remark about the others or "". Raises if none is left."""
    listed = _output(f"{cuda_home}/bin/nvcc", "--list-gpu-code")
    if "sm_" not in listed:
        raise RuntimeError(f"layernorm_inline: {cuda_home}/bin/nvcc --list-gpu-code failed: {listed.strip()}")
    known = [code for code in codes if f"sm_{_number(code)}" in listed.split()]
    unknown = ", ".join(code for code in codes if code not in known)
    remark = f"the nvcc of CUDA {release} does not know {unknown}: install a newer one" if unknown else ""
    if not known:
        raise RuntimeError(f"layernorm_inline: {remark}")
    return known, remark


def _compile(folder, codes):
    """Compiles the two sources to the library in `folder`, which must be empty, and loads it."""
    name = os.path.basename(os.path.dirname(folder))
    macros, kernels = [], "CUDA kernels"
    if name.endswith("_epilogue"):
        macros, kernels = ["-DLAYERNORM_WITH_EPILOGUE"], "CUDA kernels for activations and scale"
    _check_host_compiler()
    cuda_home, release = _find_cuda_home()
    codes, remark = _known_codes(cuda_home, release, codes)
    compiled_for = ", ".join(codes) + (
        f" ({remark}, and delete the folder {os.path.basename(folder)})" if remark else ""
    )
    # Measured for sm_90a: 14 s on two cores of a server, 18 s with 16 slower ones; each further code adds 10 s.
    _print(f"compiling {kernels} for {compiled_for}, about {10 + 10 * len(codes)} s, only this once")
    cuda_flags = [f"-gencode=arch={code.replace('sm', 'compute')},code={code}" for code in codes]
    if "--split-compile" in _output(f"{cuda_home}/bin/ptxas", "--help"):  # not in CUDA 11
        # Assembles kernels in parallel, to the same machine code (16 cores, 141 kernels: 44 s -> 30 s).
        cuda_flags += ["-Xptxas", f"--split-compile={min(8, len(os.sched_getaffinity(0)))}"]
    # pip's toolkit has libcudart.so.13 but no libcudart.so.
    for library in glob.glob(f"{glob.escape(cuda_home)}/lib/libcudart.so.{_version(release)[0]}*")[:1]:
        os.symlink(library, f"{folder}/libcudart.so")
    cpp_extension = _cpp_extension()
    # PyTorch marks an extension as built as soon as its build starts. After a failure it must start again.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    with contextlib.ExitStack() as restored:
        restored.callback(setattr, cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)
        cpp_extension.CUDA_HOME = cuda_home
        _add_ninja_to_path(restored, folder)
        if sys.stderr is None:  # load_inline flushes it
            restored.enter_context(contextlib.redirect_stderr(io.StringIO()))
        cpp_extension.load_inline(
            name,
            cpp_sources=[f'#define LAYERNORM_COMPILED_FOR "{compiled_for}"', CPP_SOURCE],
            cuda_sources=CUDA_SOURCE,
            extra_cflags=[*_CPP_FLAGS, *macros],
            extra_cuda_cflags=[*_CUDA_FLAGS, *macros, *cuda_flags],
            extra_ldflags=["-L."],  # ninja links in the folder
            build_directory=folder,
            is_python_module=False,
            # Without PyTorch's headers nvcc needs less time. Older versions always include them.
            **({"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}),
        )
    if not os.path.exists(_library(folder)):
        name = getattr(cpp_extension.load_inline, "__qualname__", type(cpp_extension.load_inline).__qualname__)
        raise RuntimeError(
            f"layernorm_inline: load_inline did not write {_library(folder)}. {name} of {cpp_extension.load_inline.__module__}"
            " has replaced it; a replacement must keep the arguments name and build_directory."
        )


def _is_trusted(path):
    """Returns True if path (links do not count) belongs to this user or root, and others cannot write it.

    Loading a library that another user could have written would run that user's code as this one. The group is
    trusted, because containers and clusters give folders to a group.
    """
    status = os.lstat(path)
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o002


def _cache(name):
    """Returns the folder for the libraries of this name. Creates it if necessary."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    given = os.environ.get("TORCH_EXTENSIONS_DIR") or default
    if given.startswith("~"):
        raise RuntimeError(f"layernorm_inline: there is no home folder to keep the compiled kernels in. {_ADVICE}")
    root = os.path.realpath(given)
    folder = os.path.join(root, name)
    with _Caught(OSError) as caught:
        for path in (root, folder):
            os.makedirs(path, 0o755, exist_ok=True)
        mode = os.stat(root).st_mode
        if not _is_trusted(folder):
            problem = "must belong to you or root, and must not be writable by others"
        elif mode & 0o002 and not mode & 0o1000:  # in a sticky folder, such as /tmp, only an owner can replace it
            problem = "must not lie in a folder that others can write, unless that is sticky like /tmp"
        elif os.statvfs(folder).f_flag & os.ST_NOEXEC:
            problem = "is on a file system that is mounted noexec, from which no library can be loaded"
        else:
            return folder
        raise RuntimeError(f"layernorm_inline: {folder} {problem}. {_ADVICE}")
    raise RuntimeError(f"layernorm_inline: {folder} must be a folder that you can write: {caught.error}. {_ADVICE}")


def _folder(cache, codes):
    """Returns the folder for a library in the cache. Its name contains everything else that changes the library."""
    machine = [os.uname().machine, torch.__version__, torch.version.cuda, str(torch.compiled_with_cxx11_abi())]
    key = hashlib.sha256("\n".join([*machine, *_CUDA_FLAGS, *_CPP_FLAGS]).encode()).hexdigest()[:8]
    return "-".join([f"{cache}/{key}", *codes])


def _is_built(folder):
    """Returns True if the folder has a finished library. The file `complete`, with its size, is written last."""
    library, complete = _library(folder), Path(folder, "complete")
    with contextlib.suppress(OSError):
        size = str(os.path.getsize(library)).encode()
        return all(map(_is_trusted, (folder, library, complete))) and complete.read_bytes() == size
    return False


def _find(cache, codes):
    """Returns the folder of a finished library that contains code for all of `codes`, or None.

    A container image may hold a library for several architectures. Of all that fit, the one with the fewest is chosen.
    """
    folders = glob.glob(glob.escape(_folder(cache, [])) + "-*")
    folders = [folder for folder in folders if {*codes} <= {*os.path.basename(folder).split("-")}]
    return min(filter(_is_built, folders), key=lambda folder: folder.count("-"), default=None)


def _lock(folder):
    """Returns the folder's lock as soon as no other process or thread has it. Closing the file releases it."""
    with _Caught(OSError) as caught:
        # Mode 0600, so that nobody else can hold it. Opened for writing, because NFS locks nothing else.
        lock = open(f"{folder}/build.lock", "w", opener=functools.partial(os.open, mode=0o600))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        _print(f"waiting for another process, which compiles in {folder}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock
    raise RuntimeError(
        f"layernorm_inline: {folder} must be a folder that you can write and lock: {caught.error}. {_ADVICE}"
    )


def _build(cache, codes):
    """Compiles the library, in one process if several need it at the same time. Returns its folder."""
    folder = _folder(cache, codes)
    library, complete = _library(folder), Path(folder, "complete")
    with _lock(cache):
        if not _is_built(folder):
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted build
            os.makedirs(folder, 0o755, exist_ok=True)
            _compile(folder, codes)
            os.chmod(library, 0o644)  # independent of the umask
            complete.write_text(str(os.path.getsize(library)))
            complete.chmod(0o644)
    return folder


# One lock for all copies of this file in a process, because loading changes environment variables for a moment.
_process_lock = vars(sys).setdefault("_layernorm_inline_lock", _thread.allocate_lock())


def _load(name):
    """Returns (the library's ops, None), or (None, the reason) if there is nothing to compile for."""
    with _process_lock:
        return _find_or_build(name)


def _find_or_build(name):
    ops = getattr(torch.ops, name)
    if hasattr(ops, "layer_norm"):  # another copy of this file has loaded it; this op is defined last
        return ops, None
    if torch.version.cuda is None:
        return None, f"PyTorch {torch.__version__} is built without CUDA"
    if _version(torch.version.cuda) < _OLDEST_CUDA:
        return (
            None,
            f"PyTorch {torch.__version__} is built with CUDA {torch.version.cuda}, and 11.8 is the oldest supported",
        )
    architectures = _architectures()
    if not architectures:
        return None, "there was no GPU when layernorm_inline was imported, and TORCH_CUDA_ARCH_LIST names none"
    codes = _codes(architectures)
    if not codes:
        return None, f"compute capability 7.5 is the oldest supported, and there was only {', '.join(architectures)}"
    cache = _cache(name)
    folder = _find(cache, codes)
    if folder is not None:
        with _Caught(OSError) as caught:
            torch.ops.load_library(_library(folder))
            return ops, None
        # It may have been linked on another system. It is built once more, if it can be replaced.
        _print(f"cannot load {_library(folder)}, so it is compiled again: {caught.error}")
        with _Caught(OSError) as removing:
            os.remove(f"{folder}/complete")
        if removing.error is not None:
            raise RuntimeError(
                f"layernorm_inline: cannot load {_library(folder)} ({caught.error}), nor compile it again"
                f" ({removing.error}). {_ADVICE}"
            )
    torch.ops.load_library(_library(_build(cache, codes)))
    return ops, None


def _load_epilogue():
    """Loads the second library on its first use, if the import has loaded the first one."""
    if _ops is None or hasattr(_epilogue_ops, "layer_norm"):
        return
    _, why_not = _load(_epilogue_ops.name)
    if why_not is not None:
        raise RuntimeError(f"layernorm_inline: no kernels with activations and scale: {why_not}")


# Does what torch._dynamo.assume_constant_result does, without an import that takes a second: Dynamo calls the function
# instead of tracing it.
_load_epilogue._dynamo_marked_constant = True


# ============================================================================
# 3  Interface between the kernels and the binding
# ============================================================================

_INTERFACE = (
    "#define LAYERNORM_ACTIVATIONS(EACH)"
    + "".join(f" EACH({struct}, {value}, {gradient})" for struct, _, value, gradient in _ACTIVATIONS.values())
    + r"""
#include <cstdint>
#include <functional>
#include <cuda_runtime_api.h>

// The extension's name carries a hash of its sources: two versions live in one process.
namespace TORCH_EXTENSION_NAME {

// The second library, of what has an epilogue (an activation, a scale) and the convolution, has the same text.
#ifdef LAYERNORM_WITH_EPILOGUE
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

enum class DType { Float32, Float16, BFloat16 };
#define LAYERNORM_STRUCT(Struct, value, gradient) Struct,
enum class Activation { None, LAYERNORM_ACTIVATIONS(LAYERNORM_STRUCT) Count };

// Tensors are contiguous. A null pointer: one that is absent (weight, bias) or not wanted (mean, rstd, gradients).
struct LayerNormCall {
  const void* input;   // (rows, cols) of dtype
  const void* weight;  // (cols) of dtype, or float32 where affine_float32
  const void* bias;    // as weight; backward's is null where there is no activation
  int64_t rows, cols;  // each row is normalized
  double eps, scale;
  DType dtype;
  bool affine_float32;
  Activation activation;  // output = scale * activation(layer norm)
};

struct Forward : LayerNormCall {
  void* output;        // (rows, cols) of dtype
  float *mean, *rstd;  // (rows)
};

struct Backward : LayerNormCall {
  const void* grad_output;   // (rows, cols) of dtype
  const float *mean, *rstd;  // (rows)
  void* grad_input;          // (rows, cols) of dtype
  void* grad_weight;         // (cols), as weight
  void* grad_bias;           // (cols), as weight
};

// ConvTranspose3d (kernel 4, stride 2, padding 1), LayerNorm over the width of its output, exact GELU and scaling.
struct Convolution {
  const void* input;        // (batch, 32, depth, height, 32) of dtype: float32, float16 or bfloat16
  const void* conv_weight;  // (32, 64, 4, 4, 4) of dtype
  const void* conv_bias;    // (64) of dtype or null; of float32 only NaN and infinity matter
  const void* weight;       // (64) of dtype or null, or float32 where affine_float32
  const void* bias;         // as weight
  void* output;             // (batch, 64, 2 depth, 2 height, 64) of dtype
  float* rstd;  // (batch, 64, 2 depth, 2 height) or null; given, output is the convolution's less its row's mean
  int64_t batch;
  int depth, height;
  double eps, scale;
  DType dtype;
  bool affine_float32, tf32;
};

// Allocates device memory until the stream has run the call: one piece, asking again gives up the one before.
using Allocate = std::function<void*(size_t bytes)>;

cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream);
cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream);
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream);
bool fits_convolution(DType dtype, bool tf32);  // the current device has the shared memory that it takes

}  // namespace TORCH_EXTENSION_NAME
"""
)

# ============================================================================
# 4  C++ binding: checks, allocation, autograd, dispatcher registration
# ============================================================================

CPP_SOURCE = (
    _INTERFACE
    + r"""
#define AT_PER_OPERATOR_HEADERS  // instead of ATen/ATen.h, which alone takes g++ 5 s
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/conv_transpose3d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <numeric>

namespace TORCH_EXTENSION_NAME {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using OptionalTensor = c10::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;  // output and statistics, (2, rows): mean, rstd
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// Numbers reach messages as strings: a stream's << crashed on them with PyTorch 2.11 on Ubuntu 24.04.
std::string text(SymIntArrayRef sizes) {
  const auto ints = c10::asIntArrayRefSlowOpt(sizes);
  if (!ints.has_value()) return "[symbolic sizes]";
  std::string list;
  for (const int64_t size : *ints) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

// ---- Checks: nn.LayerNorm's exception types, with what was given and what was expected ----

void check_device(const char* name, const Tensor& t, const Tensor& input) {
  TORCH_CHECK(t.device() == input.device(), "Expected all tensors to be on the same device, but input is on ",
              input.device(), " and ", name, " is on ", t.device());
}

void check_tensor(const char* name, const Tensor& t, SymIntArrayRef sizes, at::ScalarType dtype, const Tensor& input) {
  TORCH_CHECK(t.sym_sizes().equals(sizes), "Expected ", name, " of shape ", text(sizes), ", but got ",
              text(t.sym_sizes()));
  TORCH_CHECK(t.scalar_type() == dtype, "Expected ", name, " of dtype ", dtype, ", but got ", t.scalar_type());
  check_device(name, t, input);
}

// Checks weight and bias fully, and the dtype of input.
void check_affine(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                              "Expected input of dtype Float, Half or BFloat16, but got ", dtype);
  for (const auto* affine : {&weight, &bias}) {
    if (!present(*affine)) continue;
    const char* name = affine == &weight ? "weight" : "bias";
    const Tensor& t = **affine;
    TORCH_CHECK(t.sym_sizes().equals(shape), "Expected ", name, " to be of same shape as normalized_shape, but got ",
                name, " of shape ", text(t.sym_sizes()), " and normalized_shape = ", text(shape));
    check_device(name, t, input);
    TORCH_CHECK(t.scalar_type() == dtype || t.scalar_type() == at::kFloat, "Expected ", name,
                " of dtype Float or the input's (", dtype, "), but got ", t.scalar_type());
  }
  TORCH_CHECK(!present(weight) || !present(bias) || weight->scalar_type() == bias->scalar_type(),
              "Expected weight and bias of the same dtype, but got ", weight->scalar_type(), " and ",
              bias->scalar_type());
}

void check(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(!shape.empty(), "Expected normalized_shape to be at least 1-dimensional, but got normalized_shape = []");
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()).equals(shape),
              "Given normalized_shape=", text(shape), ", expected input with shape [*, ", text(shape).substr(1),
              ", but got input of size ", text(sizes));
  check_affine(input, shape, weight, bias);
}

SymInt product(SymIntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), SymInt(1), std::multiplies<SymInt>());
}

SymInt row_count(const Tensor& input, SymIntArrayRef shape) {
  return product(input.sym_sizes().slice(0, input.dim() - shape.size()));
}

// ---- Kernels. Of meta tensors (torch.compile, export, fake tensors) their outputs' shapes and dtypes only ----

// Contiguous, whatever like's strides. Not through the dispatcher: 8 x 768 with gradient takes 14.2 us, not 14.9.
Tensor allocate(SymIntArrayRef sizes, at::ScalarType dtype, const Tensor& like) {
  const auto options = like.options().dtype(dtype);
  if (like.is_meta()) return at::empty_symint(sizes, options);
  return Tensor(at::detail::empty_cuda(C10_AS_INTARRAYREF_SLOW(sizes), options));
}

Tensor contiguous(const OptionalTensor& t) { return present(t) ? t->contiguous() : Tensor(); }

// const_data_ptr, which PyTorch 2.0 does not have. data_ptr gives a copy-on-write tensor a copy of its own.
const void* read(const Tensor& t) { return t.defined() ? t.unsafeGetTensorImpl()->data() : nullptr; }
void* write(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

DType dtype_of(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == at::kHalf ? DType::Float16 : dtype == at::kBFloat16 ? DType::BFloat16 : DType::Float32;
}

// Only the second library has kernels for an activation or a scale.
Activation to_activation(int64_t activation, double scale) {
  const bool exists = activation >= 0 && activation < static_cast<int64_t>(Activation::Count);
  TORCH_CHECK(exists && (kFused || (activation == 0 && scale == 1)), "No kernels for activation ",
              std::to_string(activation), " and scale ", std::to_string(scale));
  return static_cast<Activation>(activation);
}

// What all calls have. The tensors are contiguous.
template <typename Call>
Call call_of(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps, double scale) {
  Call call = {};
  const Tensor& affine = weight.defined() ? weight : bias;
  call.input = read(input);
  call.weight = read(weight);
  call.bias = read(bias);
  call.eps = eps;
  call.scale = scale;
  call.dtype = dtype_of(input);
  call.affine_float32 = affine.defined() && affine.scalar_type() == at::kFloat;
  return call;
}

template <typename Call>
void run(const Call& call, const Tensor& input) {
  const c10::cuda::CUDAGuard guard(input.device());
  Tensor scratch;
  const auto allocate_scratch = [&](size_t bytes) {
    scratch = allocate({static_cast<int64_t>(bytes)}, at::kByte, input);
    return scratch.data_ptr();
  };
  const cudaError_t error = launch(call, allocate_scratch, c10::cuda::getCurrentCUDAStream());
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // the next call must not find it
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, input.device().index());
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, input.device().index());
    TORCH_CHECK(false, "layernorm_inline: cannot run on ", input.device(), ": its compute capability is ",
                std::to_string(major) + "." + std::to_string(minor),
                ", and the kernels were compiled for " LAYERNORM_COMPILED_FOR);
  }
  C10_CUDA_CHECK(error);
}

template <bool SAVE_STATISTICS>
auto layer_norm_forward(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  check(input, normalized_shape, weight, bias);
  Tensor output = allocate(input.sym_sizes(), input.scalar_type(), input), statistics;
  if (SAVE_STATISTICS) statistics = allocate({2, row_count(input, normalized_shape)}, at::kFloat, input);
  if (!input.is_meta() && input.numel() > 0) {
    const Tensor x = input.contiguous(), w = contiguous(weight), b = contiguous(bias);
    auto call = call_of<Forward>(x, w, b, eps, scale);
    call.output = write(output);
    call.cols = product(normalized_shape).expect_int();
    call.rows = input.numel() / call.cols;
    call.mean = static_cast<float*>(write(statistics));
    call.rstd = SAVE_STATISTICS ? call.mean + call.rows : nullptr;
    call.activation = to_activation(activation, scale);
    run(call, input);
  }
  if constexpr (SAVE_STATISTICS) {
    return Outputs(std::move(output), std::move(statistics));
  } else {
    return output;
  }
}

// Returns t, or a copy, so that it is contiguous and starts on a boundary of that many bytes.
Tensor aligned(const Tensor& t, uintptr_t boundary) {
  const Tensor x = t.contiguous();
  return reinterpret_cast<uintptr_t>(read(x)) % boundary == 0 ? x : x.clone();
}

Gradients layer_norm_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                              const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                              double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  // Saved tensors may have changed since forward: a parameter was converted, or a hook returned another tensor.
  check(input, normalized_shape, weight, bias);
  check_tensor("grad_output", grad_output, input.sym_sizes(), input.scalar_type(), input);
  check_tensor("statistics", statistics, {2, row_count(input, normalized_shape)}, at::kFloat, input);
  const auto allocate_as = [](const Tensor& t) { return allocate(t.sym_sizes(), t.scalar_type(), t); };
  Gradients gradients;
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (output_mask[0]) grad_input = allocate_as(input);
  if (output_mask[1] && present(weight)) grad_weight = allocate_as(*weight);
  if (output_mask[2] && present(bias)) grad_bias = allocate_as(*bias);
  const SymInt cols = product(normalized_shape);
  if (input.is_meta() || cols == 0) return gradients;

  // Kernels read two 16-bit numbers at a time.
  const Tensor dy = aligned(grad_output, 4), x = aligned(input, 4), stats = statistics.contiguous();
  const Tensor w = contiguous(weight), b = contiguous(bias);
  auto call = call_of<Backward>(x, w, b, eps, scale);
  call.grad_output = read(dy);
  call.grad_input = write(grad_input);
  call.grad_weight = write(grad_weight);
  call.grad_bias = write(grad_bias);
  call.cols = cols.expect_int();
  call.rows = input.numel() / call.cols;
  call.mean = static_cast<const float*>(read(stats));
  call.rstd = call.mean + call.rows;
  call.activation = to_activation(activation, scale);
  if (call.activation == Activation::None) call.bias = nullptr;
  run(call, input);
  return gradients;
}

// ---- Autograd ----

template <typename F>
auto find_op(const char* name, F*) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string(C10_STRINGIZE(TORCH_EXTENSION_NAME) "::") + name).c_str(), "")
      .typed<F>();
}

// The functions named composed_* consist of operations that PyTorch can differentiate to any order, also in forward
// mode and under vmap. at::layer_norm is wrong from the third derivative on: it treats mean and rstd as constants.

// scale * activation(z)
Tensor composed_epilogue(Tensor z, Activation activation, double scale) {
#define LAYERNORM_APPLY(Struct, value, gradient) \
  if (activation == Activation::Struct) z = value;
  LAYERNORM_ACTIVATIONS(LAYERNORM_APPLY)
  return scale == 1 ? z : z * scale;
}

// The gradient of z for the gradient of scale * activation(z).
Tensor composed_epilogue_backward(Tensor grad, const Tensor& z, Activation activation, double scale) {
  if (scale != 1) grad = grad * scale;
#define LAYERNORM_APPLY_GRADIENT(Struct, value, gradient) \
  if (activation == Activation::Struct) grad = gradient;
  LAYERNORM_ACTIVATIONS(LAYERNORM_APPLY_GRADIENT)
  return grad;
}

// The tensor as (rows, cols). It keeps its dtype: arithmetic with a float32 operand is float32, and needs no copy.
Tensor as_matrix(const OptionalTensor& t, SymIntArrayRef shape) {
  const SymInt cols = product(shape), rows = present(t) ? row_count(*t, shape) : SymInt(0);
  return present(t) ? t->reshape_symint({rows, cols}) : Tensor();
}
Tensor as_row(const OptionalTensor& t, SymIntArrayRef shape) {
  return present(t) ? t->reshape_symint({SymInt(1), product(shape)}).to(at::kFloat) : Tensor();
}
Tensor row_mean(const Tensor& t) { return t.mean(1, /*keepdim=*/true, at::kFloat); }
Tensor times(const Tensor& a, const Tensor& b) { return b.defined() ? a * b : a; }  // b: weight, or undefined

// Returns xhat = (x - mean) * rstd, (rows, cols), and rstd = 1 / sqrt(variance + eps), (rows, 1).
std::tuple<Tensor, Tensor> composed_normalized(const Tensor& x, double eps) {
  const Tensor distance = x - row_mean(x), rstd = (row_mean(distance * distance) + eps).rsqrt();
  return {distance * rstd, rstd};
}
// The same from statistics that forward saved. The result does not depend on x for autograd.
std::tuple<Tensor, Tensor> saved_normalized(const Tensor& x, const Tensor& statistics) {
  const Tensor rstd = statistics[1].unsqueeze(1);
  return {(x - statistics[0].unsqueeze(1)) * rstd, rstd};
}

Tensor composed_layer_norm(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  check(input, shape, weight, bias);
  const Tensor xhat = std::get<0>(composed_normalized(as_matrix(input, shape), eps)), b = as_row(bias, shape);
  const Tensor z = times(xhat, as_row(weight, shape));
  const Tensor y = composed_epilogue(b.defined() ? z + b : z, to_activation(activation, scale), scale);
  return y.reshape_symint(input.sym_sizes()).to(input.scalar_type());
}

// The gradients of composed_layer_norm. statistics: of forward, or undefined if this is differentiated itself.
Gradients composed_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef shape,
                            const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                            double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  check(input, shape, weight, bias);
  const Tensor x = as_matrix(input, shape), w = as_row(weight, shape), b = as_row(bias, shape);
  const auto [xhat, rstd] = statistics.defined() ? saved_normalized(x, statistics) : composed_normalized(x, eps);
  Tensor dy = as_matrix(grad_output, shape);
  if (kFused) {
    const Tensor z = times(xhat, w);
    dy =
        composed_epilogue_backward(dy.to(at::kFloat), b.defined() ? z + b : z, to_activation(activation, scale), scale);
  }
  Gradients gradients;
  auto& [dx, dw, db] = gradients;
  if (output_mask[0]) {
    const Tensor wdy = times(dy, w);
    dx = (wdy - row_mean(wdy) - xhat * row_mean(wdy * xhat)) * rstd;
    dx = dx.reshape_symint(input.sym_sizes()).to(input.scalar_type());
  }
  if (output_mask[1] && w.defined()) dw = (dy * xhat).sum(0).reshape_symint(shape).to(weight->scalar_type());
  if (output_mask[2] && b.defined()) db = dy.sum(0, false, at::kFloat).reshape_symint(shape).to(bias->scalar_type());
  return gradients;
}

// Returns true if the result must come from PyTorch's operations: kernels compute no tangents of forward mode.
template <typename... Inputs>
bool has_tangent(const Inputs&... inputs) {
  const auto test = [](const OptionalTensor& t) { return present(t) && t->_fw_grad(/*level=*/0).defined(); };
  return (test(inputs) || ...);
}

using torch::autograd::variable_list;
using Tensors = std::array<Tensor, 5>;
using Wanted = std::array<bool, 5>;

// A node of the graph whose gradients a function computes. A torch::autograd::Function would cost a call of 8 x 768
// 3 us more.
template <typename Backward>
struct Node : torch::autograd::Node {
  const char* label;
  Backward backward;                                    // (grad_outputs, saved, wanted) returns the inputs' gradients
  std::array<torch::autograd::SavedVariable, 5> saved;  // the inputs, and what else backward reads

  Node(const char* label, Backward backward) : label(label), backward(std::move(backward)) {}
  std::string name() const override { return label; }

  // Holds PyTorch's lock, because another thread may be unpacking.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grad_outputs) override {
    const size_t count = num_outputs();
    bool has_gradient = false;
    for (const Tensor& grad_output : grad_outputs) has_gradient |= grad_output.defined();
    if (!has_gradient) return variable_list(count);
    Tensors tensors;
    Wanted wanted = {};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < saved.size(); ++i) tensors[i] = saved[i].unpack();
    }
    for (size_t i = 0; i < count; ++i) wanted[i] = task_should_compute_output(i);
    // Not locked: backward can wait for other nodes.
    variable_list gradients = backward(grad_outputs, tensors, wanted);
    gradients.resize(count);
    return gradients;
  }
};

// Puts a node into the graph, which computes the gradients of `inputs` from those of `outputs`, and saves the inputs.
template <typename Backward, typename... Inputs>
auto& add_node(const char* name, variable_list outputs, Backward backward, const Inputs&... inputs) {
  using Pointer = decltype(torch::autograd::Edge::function);
  Pointer pointer;
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    pointer = Pointer(new Node<Backward>(name, std::move(backward)),
                      [](Node<Backward>* node) { deleteNode(node); });  // a deep graph without recursion
  } else {
    pointer = c10::make_intrusive<Node<Backward>>(name, std::move(backward));
  }
  auto& node = static_cast<Node<Backward>&>(*pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node.saved = {{{inputs, false}...}};
  torch::autograd::set_history(outputs, pointer);
  return node;
}

// Gradients of layer_norm_backward's inputs, for gradients of its results: g_dx of grad_input, g_dw of grad_weight,
// g_db of grad_bias. With xhat = (input - mean) * rstd, dy = grad_output, wdy = weight * dy, and the symmetric
//   P(v) = rstd * (v - mean(v) - xhat * mean(v * xhat))     (grad_input is P(wdy))
// they are, over each row,
//   of dy:      weight * P(g_dx) + g_dw * xhat + g_db
//   of input:   P(g_dw * dy - rstd * (mean(wdy * xhat) * g_dx + mean(g_dx * xhat) * wdy))
//               - rstd^2 * xhat * (mean(g_dx * wdy) - mean(g_dx) * mean(wdy) - mean(g_dx * xhat) * mean(wdy * xhat))
//   of weight:  sum over rows of dy * P(g_dx)
// All of these are PyTorch's operations, so they can be differentiated again. Then mean and rstd are computed anew from
// input; otherwise those that forward saved are used.
variable_list double_backward_rows(const variable_list& grads, const Tensor& dy, const Tensor& x, const Tensor& w,
                                   const Tensor& statistics, double eps, const Wanted& wanted) {
  const auto& g_dx = grads[0];
  const auto& g_dw = grads[1];
  const auto& g_db = grads[2];
  const auto [xhat, rstd] = at::GradMode::is_enabled() ? composed_normalized(x, eps) : saved_normalized(x, statistics);
  const auto project = [&, xhat = xhat, rstd = rstd](const Tensor& v, const Tensor& mean_v_xhat) {
    return at::addcmul(v - row_mean(v), xhat, mean_v_xhat, /*value=*/-1) * rstd;
  };

  Tensor of_dy, of_x, of_w;
  if (g_dx.defined()) {
    const Tensor mean_g_xhat = row_mean(g_dx * xhat), projected = project(g_dx, mean_g_xhat);
    if (wanted[0]) of_dy = times(projected, w);
    if (wanted[2] && w.defined()) of_w = (projected * dy).sum(0);
    if (wanted[1]) {
      const Tensor wdy = times(dy, w), mean_wdy_xhat = row_mean(wdy * xhat);
      Tensor v = (g_dx * mean_wdy_xhat + wdy * mean_g_xhat) * -rstd;
      if (g_dw.defined()) v = v + dy * g_dw;
      const Tensor covariance = row_mean(g_dx * wdy) - row_mean(g_dx) * row_mean(wdy) - mean_g_xhat * mean_wdy_xhat;
      of_x = at::addcmul(project(v, row_mean(v * xhat)), xhat, covariance * rstd * rstd, -1);
    }
  } else if (g_dw.defined() && wanted[1]) {
    const Tensor v = dy * g_dw;
    of_x = project(v, row_mean(v * xhat));
  }
  const auto add_to_dy = [&](const Tensor& t) { of_dy = of_dy.defined() ? of_dy + t : t; };
  if (wanted[0] && g_dw.defined()) add_to_dy(xhat * g_dw);
  if (wanted[0] && g_db.defined()) add_to_dy(g_db.expand_as(xhat));
  return {of_dy, of_x, of_w};
}

// Elements of input that double_backward treats at once if nothing is differentiated again. Its float32 temporaries
// stay in L2, and need little memory.
constexpr int64_t kDoubleBackwardElements = 1 << 22;

variable_list double_backward(const variable_list& grads, const Tensor& grad_output, const Tensor& input,
                              SymIntArrayRef shape, const Tensor& weight, const Tensor& statistics, double eps,
                              const Wanted& wanted) {
  const Tensor dy = as_matrix(grad_output, shape), x = as_matrix(input, shape), w = as_row(weight, shape);
  const Tensor g_dx = as_matrix(grads[0], shape), g_dw = as_row(grads[1], shape), g_db = as_row(grads[2], shape);
  variable_list results;
  if (at::GradMode::is_enabled() || x.sym_numel() <= kDoubleBackwardElements) {
    results = double_backward_rows({g_dx, g_dw, g_db}, dy, x, w, statistics, eps, wanted);
  } else {
    const int64_t rows = x.size(0), step = std::max<int64_t>(1, kDoubleBackwardElements / x.size(1));
    results.resize(3);
    for (int64_t first = 0; first < rows; first += step) {
      const auto part_of = [&](const Tensor& t, int64_t dim) {
        return t.defined() ? t.narrow(dim, first, std::min(step, rows - first)) : t;
      };
      const auto parts = double_backward_rows({part_of(g_dx, 0), g_dw, g_db}, part_of(dy, 0), part_of(x, 0), w,
                                              part_of(statistics, 1), eps, wanted);
      for (int i : {0, 1}) {
        if (parts[i].defined() && first == 0) results[i] = at::empty_like(x);
        if (parts[i].defined()) part_of(results[i], 0).copy_(parts[i]);
      }
      if (parts[2].defined()) results[2] = first == 0 ? parts[2] : results[2] + parts[2];
    }
  }
  const auto finished = [](const Tensor& t, const Tensor& like) {
    return t.defined() ? t.reshape_symint(like.sym_sizes()).to(like.scalar_type()) : t;
  };
  return {finished(results[0], input), finished(results[1], input), finished(results[2], weight)};
}

// The op `layer_norm_backward` with gradients of its own.
Gradients layer_norm_backward_autograd(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                                       const Tensor& statistics, const OptionalTensor& weight,
                                       const OptionalTensor& bias, double eps, int64_t activation, double scale,
                                       std::array<bool, 3> output_mask) {
  static const auto op = find_op("layer_norm_backward", layer_norm_backward);
  const c10::SymDimVector shape(normalized_shape);
  const bool differentiable = torch::autograd::compute_requires_grad(grad_output, input, weight, bias);
  if (has_tangent(grad_output, input, weight, bias) || (kFused && differentiable)) {
    return composed_backward(grad_output, input, shape, {}, weight, bias, eps, activation, scale, output_mask);
  }
  auto gradients = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(grad_output, input, normalized_shape, statistics, weight, bias, eps, activation, scale, output_mask);
  }();
  if (!differentiable) return gradients;
  const auto backward = [=](const variable_list& grads, const Tensors& saved, const Wanted& wanted) {
    const auto& [dy, x, w, stats, none] = saved;
    return double_backward(grads, dy, x, shape, w, stats, eps, wanted);
  };
  const auto& [dx, dw, db] = gradients;
  auto& node = add_node("LayerNormBackwardBackward", {dx, dw, db}, backward, grad_output, input, weight);
  node.saved[3] = {statistics, false};
  return gradients;
}

// The op `layer_norm_forward` with gradients for output; statistics have none.
Outputs layer_norm_forward_autograd(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                    const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op = find_op("layer_norm_forward", layer_norm_forward<true>);
  static const auto backward_op = find_op("layer_norm_backward", layer_norm_backward);
  Outputs outputs = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(input, normalized_shape, weight, bias, eps, activation, scale);
  }();
  auto& [output, statistics] = outputs;
  if (has_tangent(input, weight, bias)) {
    output = composed_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale);
  } else if (torch::autograd::compute_requires_grad(input, weight, bias)) {
    const auto backward = [=, shape = c10::SymDimVector(normalized_shape)](const variable_list& grads,
                                                                           const Tensors& saved, const Wanted& wanted) {
      const auto& [x, w, b, stats, none] = saved;
      const auto [dx, dw, db] =
          backward_op.call(grads[0], x, shape, stats, w, b, eps, activation, scale, {wanted[0], wanted[1], wanted[2]});
      return variable_list{dx, dw, db};
    };
    auto& node = add_node("LayerNormBackward", {output}, backward, input, weight, bias);
    node.saved[3] = {statistics, false};
  }
  return outputs;
}

Tensor layer_norm_autograd(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op = find_op("layer_norm", layer_norm_forward<false>);
  if (torch::autograd::compute_requires_grad(input, weight, bias)) {
    return std::get<0>(layer_norm_forward_autograd(input, normalized_shape, weight, bias, eps, activation, scale));
  }
  if (has_tangent(input, weight, bias)) {
    return composed_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, normalized_shape, weight, bias, eps, activation, scale);
}

// Computes in float32 and returns float32, like nn.LayerNorm under autocast.
Tensor layer_norm_autocast(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op = find_op("layer_norm", layer_norm_forward<false>);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto cast = [](const OptionalTensor& t) {
    const bool casts = present(t) && t->is_floating_point() && t->scalar_type() != at::kDouble;
    return casts ? t->to(at::kFloat) : t.value_or(Tensor());
  };
  return op.call(cast(input), normalized_shape, cast(weight), cast(bias), eps, activation, scale);
}

// ---- torch.vmap: the ops for tensors with a batch dimension ----

int64_t batch_level(const OptionalTensor& t) {
  const auto* batch = present(t) ? at::functorch::maybeGetBatchedImpl(*t) : nullptr;
  return batch == nullptr ? -1 : batch->level();
}

// The slices of a batch become more rows of one call. Weights and biases that differ between slices are applied by
// PyTorch's operations.
template <bool SAVE_STATISTICS>
auto layer_norm_vmap(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op =
      find_op(SAVE_STATISTICS ? "layer_norm_forward" : "layer_norm", layer_norm_forward<SAVE_STATISTICS>);
  check(input, normalized_shape, weight, bias);  // the shapes of one slice
  const SymInt rows = row_count(input, normalized_shape);
  const int64_t level = std::max({batch_level(input), batch_level(weight), batch_level(bias)});  // the innermost vmap
  const bool is_batched = batch_level(input) == level;
  // Returns all slices in one tensor, along dimension 0; or t itself, if it is the same for all.
  const auto unwrap = [&](const OptionalTensor& t) -> OptionalTensor {
    if (batch_level(t) != level) return t;
    const auto* batch = at::functorch::maybeGetBatchedImpl(*t);
    return batch->value().movedim(batch->bdim(), 0);
  };
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(c10::DispatchKey::FuncTorchBatched);
  const auto wrap = [&](const Tensor& t, int64_t dim) { return at::functorch::makeBatched(t, dim, level); };
  const Tensor x = *unwrap(input);
  const bool same_affine = batch_level(weight) != level && batch_level(bias) != level;
  Tensor output, statistics;
  const auto call = [&](const OptionalTensor& w, const OptionalTensor& b, int64_t act, double s) {
    if constexpr (SAVE_STATISTICS) {
      std::tie(output, statistics) = op.call(x, normalized_shape, w, b, eps, act, s);
    } else {
      output = op.call(x, normalized_shape, w, b, eps, act, s);
    }
  };
  if (same_affine) {
    call(weight, bias, activation, scale);
  } else {
    call({}, {}, 0, 1);
    // A slice's rows share its weight: (slices, 1, ..., 1, *normalized_shape).
    const int64_t row_dims = input.dim() - static_cast<int64_t>(normalized_shape.size());
    const auto with_row_dims = [&](const OptionalTensor& t) {
      Tensor value = *unwrap(t);
      for (int64_t i = 0; i < row_dims && batch_level(t) == level; ++i) value = value.unsqueeze(1);
      return value;
    };
    output = output.to(at::kFloat);
    if (present(weight)) output = output * with_row_dims(weight);
    if (present(bias)) output = output + with_row_dims(bias);
    output = composed_epilogue(output, to_activation(activation, scale), scale).to(input.scalar_type());
  }
  output = wrap(output, 0);
  if constexpr (SAVE_STATISTICS) {
    if (is_batched) statistics = wrap(statistics.reshape_symint({2, x.sym_size(0), rows}), 1);
    return Outputs(output, statistics);
  } else {
    return output;
  }
}

// Returns true if another transform, or autograd, differentiates the tensor that vmap has wrapped.
bool is_differentiated(const OptionalTensor& t) {
  if (!present(t)) return false;
  Tensor value = *t;
  while (const auto* batch = at::functorch::maybeGetBatchedImpl(value)) value = Tensor(batch->value());
  return value.requires_grad() || has_tangent(value) || value.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

// PyTorch's operations: no kernel computes the gradients of weight and bias for each slice.
Gradients layer_norm_backward_vmap(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                                   const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                                   double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  return composed_backward(grad_output, input, normalized_shape, is_differentiated(input) ? Tensor() : statistics,
                           weight, bias, eps, activation, scale, output_mask);
}

#ifdef LAYERNORM_WITH_EPILOGUE
// ---- Convolution ----

constexpr auto kGelu = static_cast<int64_t>(Activation::Gelu);

void check_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(input.dim() == 5 && input.sym_size(1) == 32 && input.sym_size(4) == 32,
              "Expected input of shape [*, 32, *, *, 32], but got ", text(input.sym_sizes()));
  check_affine(input, {64}, weight, bias);
  check_tensor("conv_weight", conv_weight, {32, 64, 4, 4, 4}, input.scalar_type(), input);
  if (present(conv_bias)) check_tensor("conv_bias", *conv_bias, {64}, input.scalar_type(), input);
}

std::vector<SymInt> output_sizes(const Tensor& input) {
  return {input.sym_size(0), 64, input.sym_size(2) * 2, input.sym_size(3) * 2, 64};
}

// Whether PyTorch allows TF32: three generations of it; newer ones, asked for all of cuDNN, may raise.
bool tf32_allowed(bool (at::Context::*ask)() const) { return (at::globalContext().*ask)(); }
bool tf32_allowed(bool (at::Context::*ask)(const std::string&) const) { return (at::globalContext().*ask)("conv"); }
template <typename Op>
bool tf32_allowed(bool (at::Context::*ask)(c10::optional<Op>) const) {
  return (at::globalContext().*ask)(Op::CONV);
}
bool takes_tf32() {  // only cuDNN's convolutions do
  return at::globalContext().userEnabledCuDNN() && tf32_allowed(&at::Context::allowTF32CuDNN);
}

bool fits_convolution(const Tensor& input) {
  if (input.is_meta() || c10::cuda::device_count() == 0) return true;  // fake tensors
  const c10::cuda::CUDAGuard guard(input.device());
  return fits_convolution(dtype_of(input), takes_tf32());
}

// Returns true inside vmap, grad and the other transforms of torch.func, of which the op supports none.
bool in_transform() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode); }

// The model as several PyTorch operations: for second derivatives, and for GPUs that the kernel does not fit.
Tensor composed_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  static const auto op = find_op("layer_norm", layer_norm_forward<false>);
  const Tensor y = at::conv_transpose3d(input, conv_weight, conv_bias, 2, 1);
  return op.call(y, {64}, weight, bias, eps, kGelu, scale);
}

Tensor run_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale,
                       void* rstd = nullptr) {
  const Tensor output = allocate(output_sizes(input), input.scalar_type(), input);
  if (output.is_meta() || output.numel() == 0) return output;
  const Tensor x = aligned(input, 16), conv = conv_weight.contiguous(), cb = contiguous(conv_bias);
  const Tensor w = contiguous(weight), b = contiguous(bias);
  auto call = call_of<Convolution>(x, w, b, eps, scale);
  call.conv_weight = read(conv);
  call.conv_bias = read(cb);
  call.output = write(output);
  call.rstd = static_cast<float*>(rstd);
  call.batch = input.size(0);
  call.depth = input.size(2);
  call.height = input.size(3);
  call.tf32 = takes_tf32();
  run(call, input);
  return output;
}

Tensor convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                   const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  check_convolution(input, conv_weight, conv_bias, weight, bias);
  if (fits_convolution(input)) return run_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return composed_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
}

// Of the convolution's output that backward computes again at a time: neither all of it nor cuDNN's copy is ever there.
constexpr int64_t kConvolutionBytes = int64_t(1) << 28;

auto convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& conv_weight,
                          const OptionalTensor& conv_bias, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, double scale, std::array<bool, 5> output_mask) {
  check_convolution(input, conv_weight, conv_bias, weight, bias);
  check_tensor("grad_output", grad_output, output_sizes(input), input.scalar_type(), input);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto dtype = input.scalar_type();
  const auto cast = [](const Tensor& t, at::ScalarType to) { return t.defined() ? t.to(to) : t; };
  const Tensor w = contiguous(weight), b = contiguous(bias), w32 = cast(w, at::kFloat), b32 = cast(b, at::kFloat);
  // Of parameters the sums over parts of the batch: they are float32 until the end.
  Tensor grad_input, grad_conv_weight, grad_conv_bias, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = allocate(input.sym_sizes(), dtype, input);
  if (output_mask[1] || output_mask[2]) grad_conv_weight = at::zeros_like(conv_weight, at::kFloat);
  if (output_mask[3] && w.defined()) grad_weight = at::zeros_like(w32);
  if (output_mask[4] && b.defined()) grad_bias = at::zeros_like(b32);

  if (!input.is_meta() && grad_output.numel() > 0) {
    const bool wants_conv = grad_input.defined() || grad_conv_weight.defined();
    const int64_t rows = grad_output[0].numel() / 64;  // of one input
    const int64_t step = std::max<int64_t>(1, kConvolutionBytes / grad_output[0].nbytes());
    for (int64_t first = 0; first < input.size(0); first += step) {
      const int64_t count = std::min(step, input.size(0) - first);
      const Tensor x = aligned(input.narrow(0, first, count), 16), dy = grad_output.narrow(0, first, count);
      const Tensor statistics = at::zeros({2, count * rows}, x.options().dtype(at::kFloat));
      Tensor conv = run_convolution(x, conv_weight, conv_bias, {}, {}, eps, 1, write(statistics[1]));
      const auto [part, part_weight, part_bias] =
          layer_norm_backward(dy, conv, {64}, statistics, w32, b32, eps, kGelu, scale,
                              {wants_conv, grad_weight.defined(), grad_bias.defined()});
      conv.reset();  // its memory is free for what follows
      if (grad_weight.defined()) grad_weight.add_(part_weight);
      if (grad_bias.defined()) grad_bias.add_(part_bias);
      if (!wants_conv) continue;
      const auto [part_input, part_conv_weight, none] =
          at::convolution_backward(part, x, conv_weight, c10::nullopt, 2, 1, 1, true, 0, 1,
                                   {grad_input.defined(), grad_conv_weight.defined(), false});
      if (grad_input.defined()) grad_input.narrow(0, first, count).copy_(part_input);
      if (grad_conv_weight.defined()) grad_conv_weight.add_(part_conv_weight);
    }
  }
  // conv_bias leaves with the mean of a row: its gradient is 0, but NaN where conv_weight's is.
  if (output_mask[2] && present(conv_bias)) grad_conv_bias = grad_conv_weight.sum({0, 2, 3, 4}).mul(0);
  if (!output_mask[1]) grad_conv_weight.reset();
  return std::make_tuple(grad_input, cast(grad_conv_weight, dtype), cast(grad_conv_bias, dtype),
                         cast(grad_weight, w.scalar_type()), cast(grad_bias, b.scalar_type()));
}

// Gradients of composed_convolution. With gradients enabled they can be differentiated again.
variable_list composed_convolution_backward(const Tensor& grad_output, Tensors inputs, double eps, double scale,
                                            const Wanted& wanted) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode with_gradients(true);
  variable_list leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!wanted[i] || !inputs[i].defined()) continue;
    inputs[i] = inputs[i].alias();  // grad() would also follow how one input was computed from another
    inputs[i].requires_grad_();     // the user may have turned it off since
    leaves.push_back(inputs[i]);
  }
  const auto& [x, conv_weight, conv_bias, weight, bias] = inputs;
  const Tensor output = composed_convolution(x, conv_weight, conv_bias, weight, bias, eps, scale);
  auto gradients = torch::autograd::grad({output}, leaves, {grad_output}, /*retain_graph=*/create_graph, create_graph);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!wanted[i] || !inputs[i].defined()) gradients.insert(gradients.begin() + i, Tensor());
  }
  return gradients;
}

// The op `convolution_backward`, whose results can be differentiated again if PyTorch's operations compute them.
auto convolution_backward_autograd(const Tensor& grad_output, const Tensor& input, const Tensor& conv_weight,
                                   const OptionalTensor& conv_bias, const OptionalTensor& weight,
                                   const OptionalTensor& bias, double eps, double scale,
                                   std::array<bool, 5> output_mask) {
  static const auto op = find_op("convolution_backward", convolution_backward);
  if (has_tangent(grad_output, input, conv_weight, conv_bias, weight, bias) ||
      torch::autograd::compute_requires_grad(grad_output, input, conv_weight, conv_bias, weight, bias)) {
    const auto tensor = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
    const Tensors inputs = {input, conv_weight, tensor(conv_bias), tensor(weight), tensor(bias)};
    const auto list = composed_convolution_backward(grad_output, inputs, eps, scale, output_mask);
    return std::make_tuple(list[0], list[1], list[2], list[3], list[4]);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(grad_output, input, conv_weight, conv_bias, weight, bias, eps, scale, output_mask);
}

Tensor convolution_autograd(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  static const auto op = find_op("conv_transpose3d_layer_norm_gelu", convolution);
  static const auto backward_op = find_op("convolution_backward", convolution_backward);
  const bool saves = torch::autograd::compute_requires_grad(input, conv_weight, conv_bias, weight, bias);
  // Where the kernel does not run, the convolution's output is better kept than computed again.
  if (in_transform() || has_tangent(input, conv_weight, conv_bias, weight, bias) ||
      (saves && !fits_convolution(input))) {
    return composed_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
  }
  Tensor output = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(input, conv_weight, conv_bias, weight, bias, eps, scale);
  }();
  if (!saves) return output;
  const auto backward = [=](const variable_list& grads, const Tensors& saved, const Wanted& wanted) {
    const auto& [x, cw, cb, w, b] = saved;
    const auto [dx, dcw, dcb, dw, db] = backward_op.call(grads[0], x, cw, cb, w, b, eps, scale, wanted);
    return variable_list{dx, dcw, dcb, dw, db};
  };
  add_node("ConvTranspose3dLayerNormGELUBackward", {output}, backward, input, conv_weight, conv_bias, weight, bias);
  return output;
}
#endif

}  // namespace

// ---- The ops ----

TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  using torch::dispatch;
  m.def(
      "layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps,"
      " int activation, float scale) -> (Tensor output, Tensor statistics)");
  m.def(
      "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor statistics,"
      " Tensor? weight, Tensor? bias, float eps, int activation, float scale, bool[3] output_mask)"
      " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.impl("layer_norm", dispatch(c10::DispatchKey::Autograd, layer_norm_autograd));
  m.impl("layer_norm_forward", dispatch(c10::DispatchKey::Autograd, layer_norm_forward_autograd));
  m.impl("layer_norm_backward", dispatch(c10::DispatchKey::Autograd, layer_norm_backward_autograd));
  m.impl("layer_norm", dispatch(c10::DispatchKey::AutocastCUDA, layer_norm_autocast));
  m.impl("layer_norm", dispatch(c10::DispatchKey::FuncTorchBatched, layer_norm_vmap<false>));
  m.impl("layer_norm_forward", dispatch(c10::DispatchKey::FuncTorchBatched, layer_norm_vmap<true>));
  m.impl("layer_norm_backward", dispatch(c10::DispatchKey::FuncTorchBatched, layer_norm_backward_vmap));
  for (const auto device : {c10::kCUDA, c10::kMeta}) {
    m.impl("layer_norm", dispatch(device, layer_norm_forward<false>));
    m.impl("layer_norm_forward", dispatch(device, layer_norm_forward<true>));
    m.impl("layer_norm_backward", dispatch(device, layer_norm_backward));
  }
#ifdef LAYERNORM_WITH_EPILOGUE
  m.def(
      "conv_transpose3d_layer_norm_gelu(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor? weight,"
      " Tensor? bias, float eps, float scale) -> Tensor");
  m.def(
      "convolution_backward(Tensor grad_output, Tensor input, Tensor conv_weight, Tensor? conv_bias,"
      " Tensor? weight, Tensor? bias, float eps, float scale, bool[5] output_mask) -> (Tensor grad_input,"
      " Tensor grad_conv_weight, Tensor grad_conv_bias, Tensor grad_weight, Tensor grad_bias)");
  m.impl("conv_transpose3d_layer_norm_gelu", dispatch(c10::DispatchKey::Autograd, convolution_autograd));
  m.impl("convolution_backward", dispatch(c10::DispatchKey::Autograd, convolution_backward_autograd));
  for (const auto device : {c10::kCUDA, c10::kMeta}) {
    m.impl("conv_transpose3d_layer_norm_gelu", dispatch(device, convolution));
    m.impl("convolution_backward", dispatch(device, convolution_backward));
  }
#endif
  // Defined last: a thread that finds this op while another one loads the library finds all of it.
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps,"
      " int activation=0, float scale=1.0) -> Tensor");
}

}  // namespace TORCH_EXTENSION_NAME
"""
)

# ============================================================================
# 5  CUDA
# ============================================================================

_ELEMENTS = r"""
#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include <dlfcn.h>
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define UNROLL(i, n) _Pragma("unroll") for (int i = 0; i < int(n); ++i)
#define ROLLED(i, n) _Pragma("unroll 1") for (int i = 0; i < int(n); ++i)
#pragma nv_diag_suppress 177  // "declared but never referenced": some architectures lack a function's callers

namespace TORCH_EXTENSION_NAME {
namespace {

// The architecture compiled for. What it lacks instructions for is called only behind kArch, or its kernel behind #if.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = 900;
#endif

// ---- Elements: vectors of numbers ----

// V numbers, with arithmetic element by element.
template <typename A, int V>
struct Vec {
  static constexpr int kSize = V;
  A at[V];
  __device__ A& operator[](int v) { return at[v]; }
  __device__ A operator[](int v) const { return at[v]; }
};

#define LAYERNORM_ELEMENTWISE(op)                                     \
  template <typename A, int V>                                        \
  __device__ Vec<A, V> operator op(Vec<A, V> a, const Vec<A, V>& b) { \
    UNROLL(v, V) a[v] = a[v] op b[v];                                 \
    return a;                                                         \
  }                                                                   \
  template <typename A, int V>                                        \
  __device__ Vec<A, V> operator op(Vec<A, V> a, A b) {                \
    UNROLL(v, V) a[v] = a[v] op b;                                    \
    return a;                                                         \
  }
LAYERNORM_ELEMENTWISE(+)
LAYERNORM_ELEMENTWISE(-)
LAYERNORM_ELEMENTWISE(*)

// ---- Elements: packs of them, loads and stores, conversions ----
// Memory is read and written 16 bytes at a time, as a Pack of V elements of type T; arithmetic is in float.

// Two 16-bit elements share a register: packing them one by one would be half of all instructions.
template <typename T, int V>
struct alignas(std::min<size_t>(16, sizeof(T) * V)) Pack {
  static constexpr bool kPairs = sizeof(T) == 2 && V > 1;
  std::conditional_t<kPairs, uint32_t, T> at[kPairs ? V / 2 : V];
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename To, typename From>
__device__ To bit_cast(const From& from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Hides x from the compiler: it can neither hoist what depends on x into scarce registers nor recompute x at every use.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Computes a pointer once, not anew for each pack (backward of bf16 rows of 2041: 0.79 of copy speed -> 0.83).
template <typename T>
__device__ T* keep_pointer(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

template <typename T, int V>
__device__ Pack<T, V> load(const T* p) {
  return *reinterpret_cast<const Pack<T, V>*>(p);
}

enum class L2Priority { First, Last };  // to leave L2 when it is full

__device__ inline uint64_t l2_policy(L2Priority priority) {
  uint64_t first = 0, last = 0;  // both, as a branch would delay the first load
  if constexpr (kArch >= 800) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  }
  return priority == L2Priority::Last ? last : first;
}

template <typename T, int V>
__device__ Pack<T, V> load(const T* p, uint64_t policy) {
  if constexpr (kArch >= 800 && sizeof(Pack<T, V>) == 16) {
    uint4 bits;
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(p), "l"(policy));
    return bit_cast<Pack<T, V>>(bits);
  } else {
    return load<T, V>(p);
  }
}

template <typename T>
__device__ float2 widen_pair(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(bit_cast<__half2>(bits));
  } else {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

template <typename T>
__device__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  return bit_cast<uint32_t>(__hadd2_rn(bit_cast<Pair>(a), bit_cast<Pair>(b)));
}

template <typename T>
__device__ uint32_t narrow_pair(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    return bit_cast<uint32_t>(__floats2half2_rn(x, y));
  } else {
    return bit_cast<uint32_t>(__floats2bfloat162_rn(x, y));
  }
}

template <typename T, int V>
__device__ Vec<float, V> widened(const Pack<T, V>& pack) {
  Vec<float, V> x;
  if constexpr (Pack<T, V>::kPairs) {
    UNROLL(n, V / 2) {
      const float2 two = widen_pair<T>(pack.at[n]);
      x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
  } else {
    UNROLL(v, V) x[v] = widen(pack.at[v]);
  }
  return x;
}

template <typename T, int V>
__device__ Pack<T, V> packed(const Vec<float, V>& x) {
  Pack<T, V> pack;
  if constexpr (Pack<T, V>::kPairs) {
    UNROLL(n, V / 2) pack.at[n] = narrow_pair<T>(x[2 * n], x[2 * n + 1]);
  } else if constexpr (sizeof(T) == 2) {
    pack.at[0] = bit_cast<T>(uint16_t(narrow_pair<T>(x[0], x[0])));
  } else {
    UNROLL(v, V) pack.at[v] = x[v];
  }
  return pack;
}

// EVICT_FIRST: the first to leave L2, as nobody reads it again before it would leave.
template <typename T, int V, bool EVICT_FIRST = false>
__device__ void store(T* p, const Vec<float, V>& x) {
  const Pack<T, V> pack = packed<T>(x);
  if constexpr (EVICT_FIRST && sizeof(pack) == 16) {
    __stcs(reinterpret_cast<uint4*>(p), bit_cast<uint4>(pack));
  } else {
    *reinterpret_cast<Pack<T, V>*>(p) = pack;
  }
}

// weight[col .. col + V) or bias[...]; `fallback` where the tensor is null.
template <typename T, int V>
__device__ Vec<float, V> load_affine(const void* affine, bool affine_float32, int64_t col, float fallback) {
  if (affine == nullptr) return Vec<float, V>() + fallback;
  if (sizeof(T) == 2 && affine_float32) return widened(load<float, V>(static_cast<const float*>(affine) + col));
  return widened(load<T, V>(static_cast<const T*>(affine) + col));
}

template <typename T, int V>
__device__ void store_affine(void* affine, bool affine_float32, int64_t col, const Vec<float, V>& x) {
  if (affine == nullptr) return;
  if (sizeof(T) == 2 && affine_float32) {
    store<float, V>(static_cast<float*>(affine) + col, x);
  } else {
    store<T, V>(static_cast<T*>(affine) + col, x);
  }
}

// ---- Elements: rows that do not all start on a 16-byte boundary ----
// V elements at any address, as the words that hold them. get() joins these later, so that loads can overlap.
template <typename T, int V>
struct Unaligned {
  static constexpr int kWords = sizeof(T) * V / sizeof(uint32_t);
  uint32_t words[kWords + 1];

  // 1 where elements at p start in the middle of a word: the same for all packs of a row.
  static __device__ int starts_mid_word(const T* p) {
    return sizeof(T) == 2 ? reinterpret_cast<uintptr_t>(p) / sizeof(T) % 2 : 0;
  }

  __device__ void load(const T* p, int mid_word) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(p - mid_word);
    UNROLL(w, kWords) words[w] = from[w];
    // The last element alone, as its word may end outside the tensor. Always: else loads wait (0.67 -> 0.83).
    if (sizeof(T) == 2) words[kWords] = reinterpret_cast<const uint16_t*>(p)[V - 1];
  }

  __device__ Pack<T, V> get(int mid_word) const {
    uint32_t joined[kWords];
    UNROLL(w, kWords) joined[w] = __funnelshift_r(words[w], words[w + 1], 16 * mid_word);
    return bit_cast<Pack<T, V>>(joined);
  }
};

// Calls f with whether weight and bias are there, of input's 16-bit dtype: asked at each load, 1/5 of all instructions.
template <typename T, bool EARLY = false, typename F>
__device__ void with_same_dtype(const Forward& call, F f) {
  // A function, as three kernels spill with the condition in its place.
  const auto has_same_dtype = [&] { return call.weight != nullptr && call.bias != nullptr && !call.affine_float32; };
  if constexpr (sizeof(T) == 2 && !EARLY) {
    if (has_same_dtype()) return f(std::true_type());
  }
  f(std::false_type());
}

// weight[col .. col + V) and bias[...], col a multiple of V after `begin`.
template <typename T, int V, bool SHIFTED, bool SAME_DTYPE>
__device__ void load_affine_pair(Vec<float, V>& weight, Vec<float, V>& bias, const Forward& call, int col, int begin) {
  const T *w = static_cast<const T*>(call.weight), *b = static_cast<const T*>(call.bias);
  if constexpr (SAME_DTYPE && SHIFTED && V > 1) {
    // Aligned where only input is not (bf16 rows of 4096: 0.85 of copy speed -> 0.91).
    const auto bits = reinterpret_cast<uintptr_t>(w + begin) | reinterpret_cast<uintptr_t>(b + begin);
    if (bits % 16 != 0) {
      const auto load_words = [&](Vec<float, V>& x, const T* p) {
        Unaligned<T, V> words;
        const int mid_word = words.starts_mid_word(p + begin);
        words.load(p + col, mid_word);
        x = widened(words.get(mid_word));
      };
      return load_words(weight, w), load_words(bias, b);
    }
  }
  if constexpr (SAME_DTYPE) {
    weight = widened(load<T, V>(w + col)), bias = widened(load<T, V>(b + col));
  } else {
    constexpr int F = SHIFTED ? 1 : V;
    UNROLL(n, V / F) {
      const auto some_weight = load_affine<T, F>(call.weight, call.affine_float32, col + n * F, 1);
      const auto some_bias = load_affine<T, F>(call.bias, call.affine_float32, col + n * F, 0);
      UNROLL(f, F) weight[n * F + f] = some_weight[f], bias[n * F + f] = some_bias[f];
    }
  }
}

// ---- Elements: arithmetic ----

// Fast, within 2 units in the last place.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x), for one thread a row: rsqrtf, off by up to 2 units in the last place, and a step of Newton's.
__device__ inline float inverse_root(float x) {
  const float near = rsqrtf(x), high = x * near, low = fmaf(x, near, -high);
  const float better = fmaf(0.5f * near, fmaf(-high, near, 1) - low * near, near);
  return isnan(better) ? near : better;  // x was 0 or infinity
}

// Rounded by itself: fused into a later subtraction, grad_input of a row of one column would not be 0.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }

template <int V>
__device__ Vec<float, V> product(Vec<float, V> a, const Vec<float, V>& b) {
  UNROLL(v, V) a[v] = product(a[v], b[v]);
  return a;
}
"""

_STATISTICS = r"""
// ---- Statistics: mean, distances from it, moments ----
// Never a raw sum of squares, which loses every digit of rows whose mean is large against their spread. Two ways, both
// exact for rows of equal numbers, whose distances from the mean must be 0:
//   - Threads that hold a row take its mean first, then distances from it: sum_of, quotient, Distances.
//   - Parts of a row, each measured from its own mean, are Moments, which combine as in Chan, Golub, LeVeque
//     (1979): m2 grows by the squared distances between the means.

// Exact for N equal numbers, N a power of two: of 16 bits in any order, so without the tree (1% of rows of 50257).
template <typename T, int N>
__device__ float sum_of(const Vec<float, N>& x) {
  float sums[N];  // a copy: in place, sum_partials would keep its terms in local memory
  UNROLL(n, N) sums[n] = x[n];
  if constexpr (sizeof(T) == 2) {
    UNROLL(n, N - 1) sums[0] += sums[n + 1];
  } else {
    for (int left = N / 2; left > 0; left /= 2) {
      UNROLL(n, left) sums[n] += sums[left + n];
    }
  }
  return sums[0];
}

// Rounds as a division would.
__device__ inline float quotient(float sum, float count, float per_count) {
  const float near = sum * per_count;
  return fma(fma(-near, count, sum), per_count, near);
}

struct Distances {  // from a mean: the sums of their squares and of themselves, how far off rounding put the mean
  float squares, sum;
};

__device__ inline void add_distance(Distances& d, float distance) {
  d.squares += distance * distance;
  d.sum += distance;
}
__device__ inline void add_distance(float& squares, float distance) { squares += distance * distance; }

template <typename T>
using DistanceSums = std::conditional_t<sizeof(T) == 2, float, Distances>;

template <typename Sum, int V>
__device__ Sum distances_of(const Vec<float, V>& from_mean) {
  Sum sum = {};
  UNROLL(v, V) add_distance(sum, from_mean[v]);
  return sum;
}

// How far the true mean is from the one that distances were measured from. 16-bit rows do without it.
__device__ inline float mean_offset(const Distances& d, float per_col) { return d.sum * per_col; }
__device__ inline float mean_offset(float, float) { return 0; }

// Returns the sum of squares about the true mean, which `mean` becomes. The fma keeps an infinite sum infinite, and the
// comparison keeps NaN.
__device__ inline float correct_mean(const Distances& d, float& mean, float per_col) {
  const float off = mean_offset(d, per_col), squares = fma(-off, d.sum, d.squares);
  mean += off;
  return squares < 0 ? 0 : squares;
}
__device__ inline float correct_mean(float squares, float&, float) { return squares; }

struct Moments {
  float count, mean, m2;  // count: as a float exact to 2^24, then to 1 part in 2^24
};

// Adds the moments of more numbers, at least one.
__device__ inline Moments combine(Moments all, const Moments& more) {
  // The share of what came before: 0 of nothing, which keeps the first mean to the bit.
  const float share = all.count * fast_reciprocal(all.count + more.count), delta = more.mean - all.mean;
  // delta is not squared alone: of a first mean of 1e20 that would be infinity, times 0.
  all.m2 += more.m2 + delta * (delta * (more.count * share));
  all.mean = more.mean - delta * share;
  all.count += more.count;
  return all;
}

// Element i of three near the middle of a float32 row: its ends may be padding.
__device__ inline int64_t sampled_column(int64_t cols, int i) { return cols * (10 + 3 * i) / 26; }
// Their median. Means are counted from it, so that blocks exchange small numbers (1 x 85994: 0.1 ulp off -> 0.002).
__device__ inline float reference_of(float a, float b, float c) { return max(min(a, b), min(max(a, b), c)); }

// The two sums over a row that grad_input needs.
struct Sums {
  float wdy, wdy_xhat;  // of weight * grad_output, and of that times the normalized input
};

// What a row is normalized with. A mean that is rounded to float would be off by 5e-4 for rows with mean 10^4, so
// `shift` corrects it: it is rstd times what rounding added to the mean.
struct alignas(16) RowStats {  // aligned, so that it is one load
  float mean, shift, rstd;
};

// The row's mean is first + off.
__device__ inline RowStats row_stats_of(float first, float off, float rstd) {
  const float mean = first + off, rest = off - (mean - first);
  return {mean, -rest * rstd, rstd};
}

template <typename T, int V>
__device__ Vec<float, V> normalized(Vec<float, V> x, const RowStats& row) {
  UNROLL(v, V) {
    const float distance = x[v] - row.mean;
    // For 16-bit rows the correction is less than the rounding of the output.
    x[v] = sizeof(T) == 2 ? distance * row.rstd : fma(distance, row.rstd, row.shift);
  }
  return x;
}

// ---- Statistics: between lanes of a warp ----

// Of a float, or of a struct of two (Distances, Sums).
__device__ inline float combine(float a, float b) { return a + b; }
template <typename X>
__device__ X combine(const X& a, const X& b) {
  const auto& [a0, a1] = a;
  const auto& [b0, b1] = b;
  return {a0 + b0, a1 + b1};
}

__device__ inline float exchange(float x, int offset) { return __shfl_xor_sync(~0u, x, offset); }
template <typename X>
__device__ X exchange(const X& x, int offset) {
  const auto& [x0, x1] = x;
  return {exchange(x0, offset), exchange(x1, offset)};
}

// Combines over groups of `width` neighbouring lanes, a power of two up to 32, in a fixed order. All get the result.
template <typename X, int R>
__device__ void combine_lanes(X (&x)[R], int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    UNROLL(r, R) x[r] = combine(x[r], exchange(x[r], offset));
  }
}

template <typename X>
__device__ X combine_lanes(X x, int width) {
  X values[1] = {x};
  combine_lanes(values, width);
  return values[0];
}

// The sum of term(n), in four chains of additions (bf16 rows of 32768: 0.93 of copy speed, 0.68 with sum_of's terms).
template <int N, typename F>
__device__ auto sum_of_terms(F term) {
  decltype(term(0)) sums[4] = {};
  UNROLL(n, N) sums[n % 4] = combine(sums[n % 4], term(n));
  return combine(combine(sums[0], sums[1]), combine(sums[2], sums[3]));
}

// Combines {mean, m2} of N parts per lane over `width` lanes. Returns {first, off, m2}, where the mean is first + off:
// means are measured from that of the first part, which keeps their digits.
template <int N, int M>
__device__ float3 combine_means(const float2 (&parts)[M], const float (&counts)[M], float count, int width) {
  const float first = __shfl_sync(~0u, parts[0].x, 0, width);
  const float sum = sum_of_terms<N>([&](int n) { return counts[n] * (parts[n].x - first); });
  const float off = combine_lanes(sum, width) * fast_reciprocal(count);
  const float m2 = sum_of_terms<N>([&](int n) {
    const float delta = parts[n].x - first - off;
    return parts[n].y + counts[n] * delta * delta;
  });
  return {first, off, combine_lanes(m2, width)};
}

// One a lane; the first lane's is empty only if all are.
__device__ inline Moments combine_lanes(const Moments& moments, int width) {
  const float2 part[1] = {{moments.mean, moments.m2}};
  const float count[1] = {moments.count}, all = combine_lanes(moments.count, width);
  const float3 total = combine_means<1>(part, count, max(all, 1.0f), width);
  return {all, total.x + total.y, total.z};  // of nothing: count 0
}

// {mean, m2} of N packs of a thread, or of LANES threads together, which have `count` columns in them.
template <typename T, int LANES, int N, typename X, typename Has>
__device__ float2 measure_packs(X x, Has has, float count, float per_count) {
  float sum = 0, m2 = 0;
  UNROLL(i, N) sum += has(i) ? sum_of<T>(x(i)) : 0;
  sum = combine_lanes(sum, LANES);
  const float mean = sizeof(T) == 2 ? quotient(sum, count, per_count) : sum * per_count;
  UNROLL(i, N) {
    if (has(i)) m2 += distances_of<float>(x(i) - mean);
  }
  return {mean, combine_lanes(m2, LANES)};
}

// Sums N = 2^k numbers over a warp; lane l gets that of number l / (32 / N). Four take 6 exchanges instead of 20.
template <int N>
__device__ float sum_lanes(float (&x)[N]) {
  int offset = 16;
  for (int left = N / 2; left > 0; left /= 2, offset /= 2) {
    const bool upper = threadIdx.x & offset;
    UNROLL(n, left) {
      const float kept = upper ? x[left + n] : x[n], sent = upper ? x[n] : x[left + n];
      x[n] = kept + exchange(sent, offset);
    }
  }
  for (; offset > 0; offset /= 2) x[0] += exchange(x[0], offset);
  return x[0];
}

// ---- Statistics: between warps of a block ----

constexpr int kMaxWarps = 16;  // of a block, unless said otherwise

// Combines over the blockDim.x threads of a row: up to WARPS whole warps, or a power of two up to 32. slots: not those
// of the call before, from which slow warps may still read.
template <int WARPS, typename X, int R>
__device__ void combine_row(X (&x)[R], X (&slots)[WARPS][R]) {
  if (WARPS == 1) return combine_lanes(x, 32);
  constexpr int N = sizeof(x) / sizeof(float), kLanes = 32 / N;
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  X(*row_slots)[R] = slots + threadIdx.y * warps;
  if (N > 1 && warps > 0) {
    float numbers[N];
    memcpy(numbers, x, sizeof(numbers));
    const float sum = sum_lanes(numbers);
    if (warps == 1) {
      UNROLL(n, N) numbers[n] = __shfl_sync(~0u, sum, n * kLanes);
      memcpy(x, numbers, sizeof(numbers));
      return;
    }
    if (lane % kLanes == 0) reinterpret_cast<float*>(row_slots[threadIdx.x / 32])[lane / kLanes] = sum;
  } else {
    if (N == 1 && warps > 0) {
      combine_lanes(x, 32);  // unrolled, as 32 is a constant (bf16 rows of 768: 0.93 of copy speed -> 0.95)
    } else {
      combine_lanes(x, min(int(blockDim.x), 32));
    }
    if (warps <= 1) return;
    if (lane == 0) {
      UNROLL(r, R) row_slots[threadIdx.x / 32][r] = x[r];
    }
  }
  __syncthreads();
  const int slot = threadIdx.x % WARPS;
  UNROLL(r, R) {
    x[r] = row_slots[min(slot, warps - 1)][r];
    if (slot >= warps) x[r] = X{};
  }
  combine_lanes(x, WARPS);
}
"""

_EPILOGUE = r"""
// ---- Epilogue: scale * activation(z), z the layer norm ----
// gelu(z) = z Phi(z), Phi the normal distribution function, or its tanh form (Hendrycks, Gimpel, arXiv:1606.08415). Phi
// comes from its tail at |z|, as 1 + erf loses digits below 0. The tail's log2 is nearly a parabola: a polynomial fits.

struct Epilogue {
  Activation activation;
  float scale;
};

// Of t, highest power first.
template <typename... Coefficients>
__device__ float polynomial(float t, float sum, Coefficients... coefficients) {
  ((sum = sum * t + coefficients), ...);
  return sum;
}

// The tail 1 - Phi(t), t >= 0: within 5e-6 of it up to 5, t times it within 5e-9 (costs rows of 64 1%, erff 13%).
__device__ inline float normal_tail(float t) {
  return fast_exp2(polynomial(t, -3.25975087e-08f, 9.22804361e-07f, -1.13296328e-05f, 7.68243335e-05f, -0.000275404571f,
                              -1.93357664e-05f, 0.00698241359f, -0.0524731502f, -0.459207386f, -1.15110636f,
                              -0.99999994f));
}

// After a convolution in TF32: within 8e-6 of the tail.
__device__ inline float normal_tail_5_digits(float t) {
  return fast_exp2(polynomial(t, -1.57920796e-06f, 5.63387896e-05f, -0.000888035069f, 0.00833681464f, -0.0536014629f,
                              -0.458833878f, -1.15109677f, -1.00000961f));
}

// For output of 16 bits: within 2.1e-4 of the tail up to 4.3, where float16 ends (bf16 rows of 1024: 83 us -> 76).
__device__ inline float normal_tail_16_bits(float t) {
  return fast_exp2(
      polynomial(t, -0.00024486499f, 0.0050223072f, -0.0452713919f, -0.46851703f, -1.14693902f, -1.00029845f));
}

// At infinity as PyTorch: infinity, and NaN at -infinity. max(z, 0) - |z| tail would be NaN at both.
__device__ inline float gelu_of_tail(float z, float tail) {
  const float step = z > 0;
  return z * fabsf(step - tail);
}

// What each of _ACTIVATIONS computes of z, for tensors of T.
template <typename T>
struct Gelu {
  static __device__ float value(float z) {
    return gelu_of_tail(z, sizeof(T) == 2 ? normal_tail_16_bits(fabsf(z)) : normal_tail(fabsf(z)));
  }
  // At -t the tail less t times the density, in one exponential: within 4e-6 for 16 bits and 7e-8 for float32.
  static __device__ float derivative(float z) {
    // Beyond 40 the density is 0. At infinity, as PyTorch's, it is NaN: infinity times 0.
    const float t = fabsf(z) > 40 && fabsf(z) < INFINITY ? 40.0f : fabsf(z);
    const float density = fast_exp2(-0.72134752f * t * t);
    const float ratio = sizeof(T) == 2
                            ? polynomial(t, -0.000168557133f, 0.00231906748f, -0.0139235938f, 0.0499400161f,
                                         -0.125826925f, 0.247959629f, -0.797662377f, 0.499996036f)
                            : polynomial(t, -3.15543332e-07f, 7.70878432e-06f, -8.47710398e-05f, 0.000563652953f,
                                         -0.00259009097f, 0.00900384877f, -0.0254718196f, 0.0619239323f, -0.13280578f,
                                         0.249972567f, -0.797882855f, 0.49999997f);
    return z < 0 ? density * ratio : 1 - density * ratio;
  }
};

template <typename T>
struct GeluTanh {
  // z / (1 + exp(-u)) with u = 2 sqrt(2 / pi) (z + 0.044715 z^3); returns -u in powers of two.
  static __device__ float exponent(float z) { return z * (-2.302208198144325f - 0.1029432395800235f * z * z); }
  static __device__ float value(float z) { return z * fast_reciprocal(1 + fast_exp2(exponent(z))); }
  // With s = 1 / (1 + exp(-u)): s + z u' s (1 - s). From exp(-|u|), as 1 - s would lose its digits.
  static __device__ float derivative(float z) {
    const float u = exponent(z), slope = 1.5957691216057308f + 0.21406444881780076f * z * z;
    const float power = fast_exp2(-fabsf(u)), larger = fast_reciprocal(1 + power);
    return (u > 0 ? power * larger : larger) + z * power * slope * larger * larger;
  }
};

// Calls f with the activation's struct, and does nothing where there is none.
template <typename T, typename F>
__device__ void with_activation(Activation activation, F f) {
#define LAYERNORM_CALL(Struct, value, gradient) \
  if (activation == Activation::Struct) return f(Struct<T>());
  LAYERNORM_ACTIVATIONS(LAYERNORM_CALL)
}

// HIDDEN: else the compiler copies the kernel for each activation (float32 rows: 6455 instructions instead of 1463).
template <bool HIDDEN>
__device__ Epilogue opaque_activation(Epilogue epilogue) {
  if constexpr (HIDDEN) epilogue.activation = Activation(opaque(int(epilogue.activation)));
  return epilogue;
}

template <typename T, int V>
__device__ void apply_epilogue(Vec<float, V>& z, const Epilogue& epilogue) {
  if constexpr (kFused) {
    with_activation<T>(epilogue.activation, [&](auto activation) { UNROLL(v, V) z[v] = activation.value(z[v]); });
    if (epilogue.scale != 1) z = z * epilogue.scale;
  }
}

// Turns the gradient of scale * activation(z) into that of z = xhat * weight + bias, rounded as PyTorch's.
template <typename T, int V>
__device__ void apply_derivative(Pack<T, V>& grad_output, const Vec<float, V>& xhat, const Vec<float, V>& weight,
                                 const Vec<float, V>& bias, const Backward& call) {
  const Epilogue epilogue = opaque_activation<true>(Epilogue{call.activation, float(call.scale)});
  if (epilogue.activation == Activation::None && epilogue.scale == 1) return;
  auto grad = widened(grad_output);
  with_activation<T>(epilogue.activation, [&](auto activation) {
    UNROLL(v, V) grad[v] *= activation.derivative(xhat[v] * weight[v] + bias[v]);
  });
  if (epilogue.scale != 1) grad = grad * epilogue.scale;
  grad_output = packed<T>(grad);
}
"""

_DEVICE = r"""
// ---- Device: copies and barriers (sm_80 and up, in bulk sm_90 and up), dependent launches ----

constexpr int kLineBytes = 128;  // of a cache line

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Copies 16 bytes in the background, or writes zeros where there is nothing to copy.
__device__ inline void copy_or_zero(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
}

__device__ inline void copy_async(void* shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(policy)
               : "memory");
}

// Copies one number in the background.
__device__ inline void copy_float(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// To be called by the thread that has initialized barriers, before bulk copies count at them.
__device__ inline void barriers_initialized() {
  if constexpr (kArch >= 900) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives when all that this thread has copied with copy_async and copy_float is there.
__device__ inline void barrier_arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits for the phase of this parity: 0 for the first completion, then 1, 0, ...
__device__ inline void barrier_wait(uint64_t* barrier, int parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"  // sleeps a while
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, p; }\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

__device__ inline void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Copies whole 16-byte units and counts them at the barrier. Callers begin on a line (rows of 50257: 0.87 -> 0.92).
__device__ inline void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Takes whole 16-byte units. Check a conditional call's machine code: ptxas 13.0 set `bytes` in one case only.
__device__ inline void prefetch_to_l2(const void* global, int bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

struct Copy {
  unsigned char* shared;
  const char* global;
  int bytes;  // of whole 16-byte units
};

// Starts N copies, by kCopyThreads threads. Before sm_90 each must arrive at `full` with its copies, too.
constexpr int kCopyThreads = kArch >= 900 ? 1 : 64;
template <int N>
__device__ void start_copies(const Copy (&copies)[N], uint64_t* full, int thread, uint64_t policy) {
  if constexpr (kArch >= 900) {
    int total = 0;
    UNROLL(n, N) total += copies[n].bytes;
    barrier_arrive_expecting(full, total);
    UNROLL(n, N) bulk_copy(copies[n].shared, copies[n].global, copies[n].bytes, full, policy);
  } else {
    for (const Copy& copy : copies) {
#pragma unroll 8
      for (int at = 16 * thread; at < copy.bytes; at += 16 * kCopyThreads) {
        copy_async(copy.shared + at, copy.global + at, policy);
      }
    }
    if (thread == 0) barrier_arrive(full);
  }
}

// Orders this thread's writes to shared memory before bulk copies and matrix products that it lets others begin.
__device__ inline void writes_before_copies() {
  if constexpr (kArch >= 900) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Programmatic dependent launch (sm_90 and up): blocks of the next kernel start while the last ones of this one run.
__device__ inline void let_next_start() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.launch_dependents;");
}

__device__ inline void wait_for_previous() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Device: mailboxes of blocks that share a row ----
// gridDim.x blocks share a row. Each publishes a pair of floats in its own mailbox, and reads all until none is empty.

constexpr int kPeers = 5;  // mailboxes that a lane reads at once
constexpr int kMaxBlocksPerRow = 32 * kPeers;

// Rows share no 128-byte line, which both would poll and write.
__host__ __device__ inline int64_t mailboxes_per_row(int blocks) { return blocks <= 1 ? 0 : (blocks + 15) / 16 * 16; }

// Of a block's slice of a row; that of the last block may be shorter, and others have none.
__host__ __device__ inline int columns_of_slice(int cols, int slice, int rank) {
  return max(0, min(slice, cols - rank * slice));
}

// A stage of a ring and the parity of its barriers.
struct RingPosition {
  int index = 0, parity = 0;
  __device__ RingPosition after(int steps, int stages) const {
    const int next = index + steps;
    return next < stages ? RingPosition{next, parity} : RingPosition{next - stages, parity ^ 1};
  }
  __device__ void advance(int stages) { *this = after(1, stages); }
};

constexpr uint64_t kEmptyMailbox = ~uint64_t(0);  // two NaNs that no arithmetic yields

__device__ inline uint64_t* mailbox_of(uint64_t* mailboxes, int64_t row, int block) {
  return mailboxes + row * mailboxes_per_row(gridDim.x) + block;
}

// Empties this block's mailboxes before any block reads: the grid meets once (0.5 us; a memset took 2.1).
__device__ inline void empty_mailboxes(uint64_t* mailboxes, int64_t rows) {
  const int step = gridDim.y;
#pragma unroll 1  // unrolled, it would begin with a division
  for (int64_t row = blockIdx.y + threadIdx.x * step; row < rows; row += blockDim.x * step) {
    *mailbox_of(mailboxes, row, blockIdx.x) = kEmptyMailbox;
  }
  cooperative_groups::this_grid().sync();
}

__device__ inline void publish(uint64_t* mailbox, float2 pair) {
  *const_cast<volatile uint64_t*>(mailbox) = uint64_t(__float_as_uint(pair.y)) << 32 | __float_as_uint(pair.x);
}

// Reads a row's mailboxes (null: none) of blocks first, first + 32, ... at once, as each is slow. False: one is empty.
__device__ inline bool try_read(const uint64_t* mailboxes, int first, float2 (&pairs)[kPeers]) {
  bool complete = true;
  UNROLL(i, kPeers) {
    const int block = first + i * 32;
    const bool exists = mailboxes != nullptr && block < gridDim.x;
    const uint64_t bits = exists ? *const_cast<const volatile uint64_t*>(mailboxes + block) : 0;
    complete &= bits != kEmptyMailbox;
    pairs[i] = bit_cast<float2>(bits);
  }
  return complete;
}

// ---- Device: for kernels whose blocks hold whole rows ----

// Blocks of 512 threads that an SM should hold without spilling registers.
constexpr int kRowBlocks = kArch == 750 || kArch >= 1200 ? 2 : 3;

// The same for all rows, computed once on the host.
struct RowConstants {
  float eps, per_col;  // per_col: 1 / cols
  Epilogue epilogue;
  L2Priority priority;  // of input
};

// Whether a thread prefetches: from sm_90 on one for the block, on sm_80 each its own sectors, on sm_75 none.
__device__ inline bool is_prefetching_thread() { return kArch >= 900 ? threadIdx.x + threadIdx.y == 0 : kArch >= 800; }

// Brings whole 16-byte units to L2, before sm_90 as evict_last: with evict_normal float32 rows of 16 to 8192 lose 4%.
constexpr int kSectorBytes = 32;
__device__ inline void prefetch_units(const void* global, int bytes, uint64_t policy,
                                      int thread = threadIdx.y * blockDim.x + threadIdx.x,
                                      int threads = blockDim.x * blockDim.y, int step = kSectorBytes) {
  if constexpr (kArch >= 900) {
    prefetch_to_l2(global, bytes, policy);
  } else if constexpr (kArch >= 800) {
    for (int at = thread * step; at < bytes; at += threads * step) {
      asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(static_cast<const char*>(global) + at));
    }
  }
}

// Each block prefetches a later one's rows: few blocks fit an SM, and each waits for its own (6001: 0.75 -> 0.88).
struct PrefetchWindow {
  const char* begin;     // of what block 0 prefetches, on a 16-byte boundary
  const char* end;       // of input
  unsigned block_bytes;  // of a block's rows
};

__device__ inline void prefetch_later_rows(const PrefetchWindow& window, uint64_t policy) {
  const char* begin = window.begin + uint64_t(blockIdx.x) * window.block_bytes / 16 * 16;
  const unsigned bytes = (window.block_bytes + 31) / 16 * 16;  // its ends may be of other blocks' rows
  if (begin + bytes <= window.end) prefetch_units(begin, bytes, policy);
}

// Weight and bias come to L2 while blocks wait for input (L2 flushed, 4096 x 4096 bf16: 20.8 us -> 19.1).
template <typename T>
__device__ void prefetch_affine(const Forward& call) {
  if (kArch < 800) return;
  const int bytes = int(call.cols) * int(call.affine_float32 ? sizeof(float) : sizeof(T));
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (const void* affine : {call.weight, call.bias}) {
    for (int at = thread * kSectorBytes; affine != nullptr && at < bytes; at += threads * kSectorBytes) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(affine) + at));
    }
  }
}

// ---- Device: the GPU and the call ----

struct Device {
  std::once_flag asked;
  int sms = 1, l2_bytes = 0, shared_bytes = 0;  // shared_bytes: of a block, at most; 1 KB less than an SM has
  int code = 0;                      // architecture of the code that runs, 90 for sm_90: the device may be newer
  bool allows_programmatic = false;  // dependent launches, which CUDA graphs take from CUDA 12.3 on
};

struct Context {
  const Device& device;
  const Allocate& allocate;
  cudaStream_t stream;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int size_of(DType dtype) { return dtype == DType::Float32 ? 4 : 2; }

// Last where input exceeds half of L2 (float32 rows of 1024: 0.98 -> 1.01); else output stays for its next reader.
L2Priority input_priority(const LayerNormCall& call, const Device& device) {
  const int64_t bytes = call.rows * call.cols * size_of(call.dtype);
  return bytes > device.l2_bytes / 2 ? L2Priority::Last : L2Priority::First;
}

// Threads that share a row, `each` loads a thread: a power of two up to a warp, or whole warps.
int row_threads(int64_t loads, int each) {
  const int64_t threads = ceil_div(loads, each);
  if (threads > 32) return ceil_div(threads, 32) * 32;
  int power = 1;
  while (power < threads) power *= 2;
  return power;
}

// ---- Device: launching ----

// Sets the limit to all there is: set to what a call needs, another thread could lower it just before the launch.
cudaError_t allow_shared_memory(const void* kernel, const Device& device) {
  thread_local std::set<std::pair<const Device*, const void*>> allowed;
  if (allowed.count({&device, kernel}) > 0) return cudaSuccess;
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int left = device.shared_bytes - int(attributes.sharedSizeBytes);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, left);
  if (error == cudaSuccess) allowed.insert({&device, kernel});
  return error;
}

// kProgrammatic: starts while the kernel before ends, and waits itself. kCooperative: all blocks run at once.
enum LaunchKind { kPlain, kProgrammatic, kCooperative };

struct Launch {
  dim3 grid, block;
  LaunchKind kind = kPlain;
  int shared_bytes = 0;  // dynamic shared memory
};

// Returns true for a launch that is captured into a CUDA graph and has more blocks than the stream's context has SMs.
// Only a green context has fewer than the device. Outside of a capture the launch itself fails; a graph would hang.
bool exceeds_green_context(const Launch& launch, cudaStream_t stream) {
#if CUDART_VERSION >= 12040
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status == cudaStreamCaptureStatusNone) return false;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);  // loaded already; linking with it would need its stub
  using GetContext = CUresult (*)(CUstream, CUcontext*);
  using GetResource = CUresult (*)(CUcontext, CUdevResource*, CUdevResourceType);
  const auto get_context = reinterpret_cast<GetContext>(dlsym(driver, "cuStreamGetCtx"));
  const auto get_resource = reinterpret_cast<GetResource>(dlsym(driver, "cuCtxGetDevResource"));
  CUcontext context = nullptr;
  CUdevResource resource = {};
  return get_context != nullptr && get_resource != nullptr && get_context(stream, &context) == CUDA_SUCCESS &&
         get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS &&
         launch.grid.x * launch.grid.y > resource.sm.smCount;
#else
  return false;
#endif
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Launch& launch, const Context& context,
                          Arguments... arguments) {
  if (launch.shared_bytes > 0) {
    const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), context.device);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute = {};
  if (launch.kind == kCooperative) {
    if (exceeds_green_context(launch, context.stream)) return cudaErrorCooperativeLaunchTooLarge;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (launch.kind == kProgrammatic && context.device.allows_programmatic) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaLaunchConfig_t config = {launch.grid,    launch.block, size_t(launch.shared_bytes),
                                     context.stream, &attribute,   attribute.id != cudaLaunchAttributeIgnore};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// True if the device has no room for all blocks (MPS, MIG) or no such launches (some virtual GPUs).
bool cannot_cooperate(cudaError_t error) {
  if (error != cudaErrorCooperativeLaunchTooLarge && error != cudaErrorNotSupported) return false;
  cudaGetLastError();
  return true;
}

RowConstants row_constants(const Forward& call, const Device& device) {
  return {float(call.eps), 1.0f / float(call.cols), {call.activation, float(call.scale)}, input_priority(call, device)};
}

// How far ahead rows come to L2, for each SM, at most 1/8 of L2 (bf16 rows of 2041: 0.969 of copy speed, 80 KB 0.951).
constexpr int kPrefetchBytes = 40 << 10;

PrefetchWindow prefetch_window(const Forward& call, int block_rows, const Device& device) {
  const int64_t row_bytes = call.cols * size_of(call.dtype);
  const char* input = static_cast<const char*>(call.input);
  const char* begin = input + std::min<int64_t>(int64_t(kPrefetchBytes) * device.sms, device.l2_bytes / 8);
  return {begin - reinterpret_cast<uintptr_t>(begin) % 16, input + call.rows * row_bytes,
          unsigned(block_rows * row_bytes)};
}

// ---- Device: grad_weight and grad_bias from partial sums of a kernel's blocks ----

// Rows that a thread adds up before it adds to its partials (256 equal ones: off by 32 roundings, 2000 by 250).
constexpr int kRowsPerSum = 256;

// Adds a thread's sums of V columns to its partials, (2, gridDim.y, cols). Without partials they are the gradients.
template <typename T, int V>
__device__ void add_gradients(const Backward& call, float* partials, int64_t col, const Vec<float, V>& grad_weight,
                              const Vec<float, V>& grad_bias, bool is_first) {
  if (partials == nullptr) {
    store_affine<T>(call.grad_weight, call.affine_float32, col, grad_weight);
    store_affine<T>(call.grad_bias, call.affine_float32, col, grad_bias);
  } else {
    const Vec<float, V> sums[2] = {grad_weight, grad_bias};
    UNROLL(i, 2) {
      float* to = partials + (blockIdx.y + int64_t(i) * gridDim.y) * call.cols + col;
      store<float, V>(to, is_first ? sums[i] : sums[i] + widened(load<float, V>(to)));
    }
  }
}

// partials: (2, partial_rows, cols), blockIdx.y the first index. blockDim.y threads share a column.
constexpr int kSumThreads = 512, kSumRows = 64;
static_assert(kSumThreads % kSumRows == 0 && (kSumRows & (kSumRows - 1)) == 0, "no thread is left over");

__global__ void __launch_bounds__(kSumThreads) sum_partials(Backward call, const float* partials, int partial_rows) {
  __shared__ float share[kSumThreads];
  void* grad = blockIdx.y == 0 ? call.grad_weight : call.grad_bias;
  const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous();
  float sum = 0;
  if (grad != nullptr && col < call.cols) {
    constexpr int kTerms = 16;  // in flight
    const float* from = partials + (int64_t(blockIdx.y) * partial_rows + threadIdx.y) * call.cols + col;
    const int64_t step = blockDim.y * call.cols;
    for (int row = threadIdx.y; row < partial_rows; row += kTerms * blockDim.y, from += kTerms * step) {
      Vec<float, kTerms> terms;
      UNROLL(i, kTerms) terms[i] = row + i * blockDim.y < partial_rows ? from[i * step] : 0.0f;
      sum += sum_of<float>(terms);  // not one by one: there can be thousands
    }
  }
  float* own = share + threadIdx.y * blockDim.x + threadIdx.x;
  *own = sum;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) *own += own[half * blockDim.x];
  }
  if (threadIdx.y != 0 || col >= call.cols) return;
  const Vec<float, 1> total = {*own};
  switch (call.dtype) {
    case DType::Float16: return store_affine<__half>(grad, call.affine_float32, col, total);
    case DType::BFloat16: return store_affine<__nv_bfloat16>(grad, call.affine_float32, col, total);
    default: return store_affine<float>(grad, true, col, total);
  }
}

cudaError_t launch_sum_partials(const Backward& call, const float* partials, int64_t partial_rows,
                                const Context& context) {
  if (partial_rows == 0 || (call.grad_weight == nullptr && call.grad_bias == nullptr)) return cudaSuccess;
  // Threads of a column: no more in all than a quarter of what run at once (32768 x 320 bf16: 28.3 us -> 27.0).
  int threads_per_column = std::min(kSumRows, row_threads(partial_rows, 1));
  while (threads_per_column > 1 && 2 * call.cols * threads_per_column > 512 * context.device.sms)
    threads_per_column /= 2;
  const dim3 block(kSumThreads / threads_per_column, threads_per_column);
  return launch_kernel(sum_partials, {dim3(ceil_div(call.cols, block.x), 2), block, kProgrammatic}, context, call,
                       partials, int(partial_rows));
}
"""

_ROWS = r"""
// ---- Rows: statistics of rows that threads hold ----

// What warps of a row leave for one another.
template <typename T, int ROWS, int WARPS>
struct RowSlots {
  float sum[WARPS][ROWS], off[WARPS][ROWS];
  DistanceSums<T> distances[WARPS][ROWS];
};

// Means of ROWS rows from each thread's sums over its `count` columns. MOST: upper bound of cols.
template <typename T, int MOST, int ROWS, int WARPS>
__device__ void row_means(float (&mean)[ROWS], const float (&sum)[ROWS], int count, int cols, float per_col,
                          RowSlots<T, ROWS, WARPS>& slots) {
  UNROLL(r, ROWS) mean[r] = sum[r];
  combine_row(mean, slots.sum);
  UNROLL(r, ROWS) mean[r] = quotient(mean[r], float(cols), per_col);
  // Up to so many equal numbers have an exact sum: a float has 24 bits, float16 11, bfloat16 8.
  constexpr int kExact = std::is_same_v<T, __half> ? 8192 : 65536;
  if constexpr (sizeof(T) == 2 && MOST > kExact) {
    if (cols <= kExact) return;
    float off[ROWS];
    UNROLL(r, ROWS) off[r] = fma(-float(count), mean[r], sum[r]);
    combine_row(off, slots.off);
    UNROLL(r, ROWS) mean[r] += off[r] * per_col;
  }
}

__device__ inline void save_statistics(const Forward& call, int64_t row, float mean, float rstd) {
  if (call.mean == nullptr) return;
  call.mean[row] = mean, call.rstd[row] = rstd;
}
"""

_REGISTERS = r"""
namespace registers {

// ---- Rows in registers, forward ----
// Takes rows of up to 4 x 512 loads of 16 bytes: 32 KB, or 28 KB where rows do not start on 16-byte boundaries
// (SHIFTED). The threads of a row hold it in registers: input is read once and output written once, at the speed of a
// copy as long as enough rows are in flight. So a thread has few loads, blocks are small, and each prefetches to L2 the
// rows of a later one. Statistics are the textbook ones: the mean, then distances from it.
// Example: bf16 rows of 4096 are 512 loads. 128 threads share a row, 4 loads each.

// Loads of a thread. Of short rows one of each of several (four: unaligned bf16 rows of 255 0.84 -> 0.93).
constexpr int kLoads = 4, kShortLoads = 32;
constexpr int kShortRows = kFused ? 4 : 2, kShortShiftedRows = 4;  // GELU of bf16 rows of 64 with 2: 0.97 -> 0.87
// Unaligned rows of up to so many threads: two a thread share weight and bias (float32 rows of 4099: 0.84 -> 0.94).
constexpr int kTwoRowsThreads = 384;
// A block of several rows: enough warps to hide a barrier, small enough to pack an SM.
constexpr int kBlockThreads = 128, kShiftedBlockThreads16Bits = 64;
// Threads of the longest rows. An SM has room for several such blocks: one loads while another stores.
constexpr int kThreads = 512;
constexpr int kShiftedThreads = 448;  // two blocks of 512 would spill

// Threads that an SM holds. For up to 8 turns of them float32 rows have two loads a thread (4096 x 1024: 0.88 -> 1.02).
constexpr int kSmThreads = 2048, kTwoLoadsTurns = 8;
constexpr int kWarpLoads = 8;  // of a lane, for float32 rows of up to 256 loads, if few bytes move
static_assert(kThreads <= 32 * kMaxWarps && kShiftedThreads <= kThreads, "a row has more warps than slots");
static_assert(kShortLoads <= kBlockThreads, "a short row has more loads than its block has threads");

// The launch bounds: threads of a block, blocks of an SM (7 of short 16-bit rows: with GELU 79 us -> 75).
template <typename T, int PACKS, int ROWS, bool SHIFTED, bool IN_WARP>
struct Bounds {
  static constexpr bool kShort16Bits = sizeof(T) == 2 && PACKS == 1 && ROWS > 1;
  static constexpr int kMaxThreads = IN_WARP || kShort16Bits ? kBlockThreads : SHIFTED ? kShiftedThreads : kThreads;
  static constexpr int blocks() {
    if (kArch == 800 && sizeof(T) == 2 && (SHIFTED || PACKS == kLoads)) return 1;
    if (kArch != 900 && PACKS == 2 && !IN_WARP) return kArch < 900 ? 1 : 2;
    if (kShort16Bits) return kArch < 800 || (SHIFTED && kArch >= 860 && kArch < 900) ? 5 : SHIFTED ? 6 : 7;
    if (IN_WARP) return PACKS < kLoads ? 10 - PACKS : PACKS == kLoads ? 5 : 4;  // as many as do not spill
    if (ROWS > 1) return 1;
    return SHIFTED || (sizeof(T) == 2 && PACKS > 1) ? kRowBlocks - 1 : kRowBlocks;
  }
};

// What a thread holds of ROWS rows: zeros where there is nothing; weight and bias if they are loaded early.
template <typename T, int PACKS, int ROWS>
struct ForwardParts {
  static constexpr int V = 16 / sizeof(T);
  Pack<T, V> packs[PACKS][ROWS], weight[PACKS], bias[PACKS];
  Pack<T, 1> extra[ROWS];

  __device__ float sum_of_row(int r) const {
    float sum = widen(extra[r].at[0]), second = 0;  // chains of additions
    UNROLL(i, PACKS) {
      const auto values = widened(packs[i][r]);
      UNROLL(v, V / 2) sum += values[2 * v], second += values[2 * v + 1];
    }
    return sum + second;
  }
};

// A thread's columns of ROWS rows: packs of V at first + i * stride, 16-byte aligned in output. Of rows that are not
// aligned (SHIFTED), the first 2 V threads have a column each before and after the packs: `extra`.
template <typename T, int PACKS, int ROWS, bool SHIFTED, bool IN_WARP>
struct ForwardColumns {
  using Parts = ForwardParts<T, PACKS, ROWS>;
  static constexpr int V = 16 / sizeof(T);
  // Whether weight and bias, of input's dtype, are loaded before the statistics, which hide their latency.
  static constexpr bool kEarly = !SHIFTED && (PACKS < kLoads || IN_WARP);
  const T* input;         // the first pack in the first row
  T* output;              // likewise
  int row_stride, count;  // elements from one row to the next; rows that exist
  bool aligned;           // whether packs are 16-byte aligned in input, too
  int begin = 0, end, first, stride, extra = -1;

  __device__ ForwardColumns(const Forward& call, int64_t row, int row_stride, int count)
      : row_stride(row_stride), count(count) {
    const T* input_row = static_cast<const T*>(call.input) + row * int(call.cols);
    T* output_row = static_cast<T*>(call.output) + row * int(call.cols);
    const int cols = count > 0 ? call.cols : 0;
    if (SHIFTED) begin = min(cols, int(-reinterpret_cast<uintptr_t>(output_row) % 16 / sizeof(T)));
    end = SHIFTED ? begin + (cols - begin) / V * V : cols;
    first = begin + int(threadIdx.x) * V, stride = (IN_WARP ? 32 : blockDim.x) * V;
    const int thread = threadIdx.x, col = thread < V ? thread : end + thread - V;
    if (SHIFTED && col < (thread < V ? begin : cols)) extra = col;
    aligned = (reinterpret_cast<uintptr_t>(input_row) - reinterpret_cast<uintptr_t>(output_row)) % 16 == 0;
    input = keep_pointer(input_row + first), output = keep_pointer(output_row + first);
  }
  __device__ int at(int i) const { return first + i * stride; }
  __device__ bool has(int i) const { return at(i) < end; }
  __device__ bool has_extra() const { return SHIFTED && extra >= 0; }
  __device__ int columns_per_row() const {
    int count = has_extra();
    UNROLL(i, PACKS) count += has(i) ? V : 0;
    return count;
  }

  __device__ void load_rows(Parts& x, uint64_t policy) const {  // no branch separates the loads
    x = {};
    const auto each = [&](auto f) {
      UNROLL(i, PACKS) {
        UNROLL(r, ROWS) {
          if (has(i) & (r < count)) f(i, r, input + r * row_stride + i * stride);
        }
      }
    };
    if (!SHIFTED || aligned) {
      each([&](int i, int r, const T* from) { x.packs[i][r] = load<T, V>(from, policy); });
    } else {  // all loads, then all joins (x[1:] of bf16 rows of 4096: 0.86 of copy speed -> 0.93)
      Unaligned<T, V> words[PACKS][ROWS] = {};
      const int mid_word = Unaligned<T, V>::starts_mid_word(input);  // the same for all of a thread's rows
      each([&](int i, int r, const T* from) { words[i][r].load(from, mid_word); });
      UNROLL(i, PACKS) { UNROLL(r, ROWS) x.packs[i][r] = words[i][r].get(mid_word); }
    }
    UNROLL(r, ROWS) {
      if (has_extra() && r < count) x.extra[r] = load<T, 1>(input + r * row_stride + (extra - first));
    }
  }
  __device__ void load_affine_packs(Parts& x, const Forward& call, uint64_t policy) const {
    const auto ones = packed<T>(Vec<float, V>() + 1.0f);
    UNROLL(i, PACKS) {
      x.weight[i] = ones, x.bias[i] = {};
      const bool has = this->has(i);
      if (has & (call.weight != nullptr)) x.weight[i] = load<T, V>(static_cast<const T*>(call.weight) + at(i), policy);
      if (has & (call.bias != nullptr)) x.bias[i] = load<T, V>(static_cast<const T*>(call.bias) + at(i), policy);
    }
  }
  __device__ DistanceSums<T> distances_of_row(const Parts& x, int r, float mean) const {
    DistanceSums<T> total = {};
    if (has_extra()) add_distance(total, widen(x.extra[r].at[0]) - mean);
    UNROLL(i, PACKS) {
      const auto here = distances_of<DistanceSums<T>>(widened(x.packs[i][r]) - mean);
      if (has(i)) total = combine(total, here);
    }
    return total;
  }

  template <bool SAME_DTYPE>
  __device__ void write_rows(const Forward& call, const Parts& x, const float (&mean)[ROWS], const float (&rstd)[ROWS],
                             const Epilogue& epilogue) const {
    const auto write = [&](int offset, const auto& part, auto weight, auto bias) {
      constexpr int N = decltype(weight)::kSize;
      if constexpr (!kEarly) load_affine_pair<T, N, SHIFTED, SAME_DTYPE>(weight, bias, call, first + offset, begin);
      constexpr bool kAsksAnew = kFused && ROWS == 1;  // several rows share one branch
      const Epilogue asked = opaque_activation<kAsksAnew>(epilogue);
      UNROLL(r, ROWS) {
        auto y = (widened(part[r]) - mean[r]) * rstd[r] * weight + bias;
        apply_epilogue<T>(y, asked);
        if (r < count) store<T>(output + (offset + r * row_stride), y);
      }
    };
    UNROLL(i, PACKS) {
      if (has(i)) write(i * stride, x.packs[i], widened(x.weight[i]), widened(x.bias[i]));
    }
    if (has_extra()) write(extra - first, x.extra, Vec<float, 1>(), Vec<float, 1>());
  }
};

template <typename T, int PACKS, int ROWS, bool SHIFTED, bool IN_WARP>
__global__ void __launch_bounds__(Bounds<T, PACKS, ROWS, SHIFTED, IN_WARP>::kMaxThreads,
                                  Bounds<T, PACKS, ROWS, SHIFTED, IN_WARP>::blocks())
    layer_norm_rows(Forward call, RowConstants constants, PrefetchWindow window, int step_log2) {
  using Columns = ForwardColumns<T, PACKS, ROWS, SHIFTED, IN_WARP>;
  __shared__ RowSlots<T, ROWS, IN_WARP ? 1 : kMaxWarps> slots;
  const int cols = call.cols;
  const uint64_t policy = l2_policy(constants.priority);

  // Which rows: ROWS of a thread, 2^step_log2 apart, so that all of them have the same alignment.
  int64_t row = int64_t(blockIdx.x) * blockDim.y;
  if (ROWS > 1) row += (row >> step_log2 << step_log2) * (ROWS - 1);
  row += threadIdx.y;
  const int step = ROWS > 1 ? 1 << step_log2 : 1;
  const int count =
      ROWS == 1 ? row < call.rows : int(min(call.rows - row, int64_t(ROWS * step)) + step - 1) >> step_log2;
  const Columns columns(call, row, cols * step, count);

  // Load.
  typename Columns::Parts x;
  if (!Columns::kEarly && blockIdx.x == 0) prefetch_affine<T>(call);
  columns.load_rows(x, policy);
  if (Columns::kEarly) columns.load_affine_packs(x, call, l2_policy(L2Priority::Last));  // other blocks read them, too
  if (window.begin < window.end && is_prefetching_thread()) prefetch_later_rows(window, policy);

  // Measure: the mean first, then distances from it.
  float sum[ROWS], mean[ROWS], rstd[ROWS];
  DistanceSums<T> distances[ROWS];
  UNROLL(r, ROWS) sum[r] = x.sum_of_row(r);
  row_means<T, PACKS * kThreads * Columns::V>(mean, sum, columns.columns_per_row(), cols, constants.per_col, slots);
  UNROLL(r, ROWS) distances[r] = columns.distances_of_row(x, r, mean[r]);
  combine_row(distances, slots.distances);
  UNROLL(r, ROWS) {
    const float m2 = correct_mean(distances[r], mean[r], constants.per_col);  // corrects mean, too
    rstd[r] = rsqrt(m2 * constants.per_col + constants.eps);
    if (threadIdx.x == 0 && r < count) save_statistics(call, row + r * step, mean[r], rstd[r]);
  }

  // Write, with weight and bias for all of the thread's rows.
  with_same_dtype<T, Columns::kEarly>(call, [&](auto same_dtype) {
    columns.template write_rows<same_dtype.value>(call, x, mean, rstd, constants.epilogue);
  });
}

// ---- Rows in registers, forward: host side ----

struct ForwardKernel {
  void (*kernel)(Forward, RowConstants, PrefetchWindow, int);
  int loads, rows;  // of a thread
  bool in_warp;     // 32 threads share a row
};

template <typename T, int LOADS, int ROWS, bool SHIFTED, bool IN_WARP = false>
ForwardKernel forward_kernel() {
  return {layer_norm_rows<T, LOADS, ROWS, SHIFTED, IN_WARP>, LOADS, ROWS, IN_WARP};
}

// Loads of a row, of an unaligned one only the whole packs.
int64_t loads_of(const Forward& call) { return std::max<int64_t>(1, call.cols * size_of(call.dtype) / 16); }

bool takes(const Forward& call, bool shifted) {
  return loads_of(call) <= kLoads * (shifted ? kShiftedThreads : kThreads);
}

// Short rows have one load a thread, rows of up to 128 loads a warp each; few bytes have fewer loads a thread, so that
// all SMs have work; all others four, as 16-bit rows with float32 weight. kFused lacks kernels that gain nothing there.
template <typename T, bool SHIFTED>
ForwardKernel choose_kernel(const Forward& call, const Device& device) {
  const int64_t loads = loads_of(call), all_loads = call.rows * loads, places = int64_t(kSmThreads) * device.sms;
  constexpr bool kFloat = sizeof(T) == 4;
  if constexpr (SHIFTED) {
    if (loads <= kShortLoads) return forward_kernel<T, 1, kShortShiftedRows, true>();
    if constexpr (!kFused) {
      if (all_loads > places && row_threads(loads, kLoads) <= kTwoRowsThreads)
        return forward_kernel<T, kLoads, 2, true>();
    }
  } else if (kFloat || !call.affine_float32) {  // these load weight and bias early, as input's dtype
    if (loads <= kShortLoads)
      return all_loads <= places / 2 ? forward_kernel<T, 1, 1, false>() : forward_kernel<T, 1, kShortRows, false>();
    if constexpr (!kFloat || !kFused) {
      if (loads <= 32 * 2) return forward_kernel<T, 2, 1, false, true>();
      if (loads <= 32 * 3) return forward_kernel<T, 3, 1, false, true>();
      if (loads <= 32 * kLoads) return forward_kernel<T, kLoads, 1, false, true>();
    }
    if constexpr (kFloat && !kFused) {
      if (loads <= 32 * 5) return forward_kernel<T, 5, 1, false, true>();
      if (loads <= 32 * kWarpLoads && all_loads <= places) return forward_kernel<T, kWarpLoads, 1, false, true>();
      if (loads <= 2 * kThreads && all_loads <= kTwoLoadsTurns * places) return forward_kernel<T, 2, 1, false>();
    }
    if (loads <= kThreads && all_loads <= places) return forward_kernel<T, 1, 1, false>();
    if constexpr (!kFloat && !kFused) {
      if (loads <= 2 * kThreads && all_loads <= places) return forward_kernel<T, 2, 1, false>();
    }
  }
  return forward_kernel<T, kLoads, 1, SHIFTED>();
}

template <typename T, bool SHIFTED>
cudaError_t launch(const Forward& call, const Context& context) {
  constexpr int V = 16 / sizeof(T);
  const ForwardKernel chosen = choose_kernel<T, SHIFTED>(call, context.device);
  int threads = chosen.in_warp ? 32 : row_threads(loads_of(call), chosen.loads);
  if (SHIFTED) threads = std::max(threads, 2 * V);  // see ForwardColumns
  const int block_rows = std::max(1, (V == 8 && SHIFTED ? kShiftedBlockThreads16Bits : kBlockThreads) / threads);
  // A thread's rows are `step` apart, a power of two; unaligned at least V, as V rows are whole 16 bytes.
  const int min_step = SHIFTED && chosen.rows > 1 ? V : 1;
  int step_log2 = 0;
  while (1 << step_log2 < std::max(block_rows, min_step)) ++step_log2;
  const int64_t step = int64_t(1) << step_log2;
  const int64_t units = ceil_div(call.rows, step * chosen.rows) * step;  // of `threads`
  return launch_kernel(chosen.kernel, {dim3(ceil_div(units, block_rows)), dim3(threads, block_rows)}, context, call,
                       row_constants(call, context.device),
                       prefetch_window(call, chosen.rows * block_rows, context.device), step_log2);
}

// ---- Rows in registers, backward ----
// With xhat = (input - mean) * rstd and wdy = weight * grad_output, over the N columns of a row:
//   grad_input  = rstd * (wdy - (sum(wdy) + xhat * sum(wdy * xhat)) / N)
//   grad_weight = sum over rows of grad_output * xhat,  grad_bias = sum over rows of grad_output
// Takes rows of up to 8 x 512 columns (aligned 16-bit rows 16 x 512). A thread keeps its columns for up to 256 rows,
// whose shares of grad_weight and grad_bias gather in registers; input and grad_output are read once. ROWS rows share a
// barrier, while the next ROWS are in flight. Each block leaves its sums in partials, (2, gridDim.x, cols).
// 16-bit rows that are not aligned come in words, two elements each (bf16 rows of 2041: 0.60 of copy speed -> 0.83).
// Where cols is odd, every other row begins in the middle of a word: a block has only rows of the one kind or of the
// other, so that a thread keeps its columns. The column outside of whole words is the extra, of thread 0.

// Columns of a thread: what it has of them in two rows fits 128 registers, so that an SM has 512 threads. Of 16 bits
// also 16 columns of one row, where that leaves fewer threads idle (rows of 2560: 0.77 of copy speed -> 0.89).
constexpr int kBackwardColumns = 8, kBackwardThreads = 512;
// Larger blocks of short float32 rows leave fewer partial sums (rows of 64 to 1024: 2%).
constexpr int kBackwardBlockThreads16Bits = 128, kBackwardBlockThreads = 256;
static_assert((kBackwardBlockThreads & (kBackwardBlockThreads - 1)) == 0 &&
                  (kBackwardBlockThreads16Bits & (kBackwardBlockThreads16Bits - 1)) == 0 &&
                  kBackwardBlockThreads <= 256,
              "a block's rows are added up in a tree: a power of two; 512 threads would hold 5 rows of 96");
static_assert(kBackwardBlockThreads16Bits <= kBackwardBlockThreads && kBackwardThreads <= 32 * kMaxWarps,
              "a block's sums and a row's warps have room in shared memory");
// Of longer rows an SM holds too few to load while it reduces: the pipeline takes them, where there is one.
constexpr int64_t kBytesBeforePipeline = 8 << 10;

template <typename T, int V>
constexpr bool is_in_words = sizeof(T) == 2 && V == 2;
template <typename T, int V>
constexpr int kRowsApart = is_in_words<T, V> ? 2 : 1;  // a block's rows
// Words outside of a row take part as zeros: branches round each would take as long as their arithmetic.
template <typename T, int V>
constexpr bool kAddsZeros = is_in_words<T, V> && !kFused;

// The turn after the next comes to L2, of 16 bits (rows of 1024: 0.94 of copy speed -> 0.98; float32 would lose).
template <typename T, int ROWS>
__device__ void prefetch_rows(const Backward& call, int64_t first_row, uint64_t policy) {
  if (!is_prefetching_thread() || first_row + ROWS * blockDim.y > call.rows) return;
  const int64_t before = first_row * int(call.cols);
  const int bytes = ROWS * int(blockDim.y) * int(call.cols) * int(sizeof(T));
  prefetch_units(static_cast<const T*>(call.input) + before, bytes, policy);
  prefetch_units(static_cast<const T*>(call.grad_output) + before, bytes, policy);
}

// What a thread has of N neighbouring columns: weight, sums over all rows, and ROWS rows of this turn and of the next.
template <typename T, int N, int ROWS>
struct BackwardPack {
  int col, offset;                                   // the first column; its distance from the thread's first one
  int live;                                          // inside of the row
  Vec<float, N> weight, grads[2] = {};               // grads: sums of weight's and of bias's gradient
  Pack<T, N> next_x[ROWS] = {}, next_dy[ROWS] = {};  // in flight
  Pack<T, N> dy[ROWS];
  Vec<float, N> xhat[ROWS];

  __device__ Vec<float, N> load_affine_columns(const Backward& call, const void* affine, float fallback) const {
    constexpr int F = is_in_words<T, N> ? 1 : N;  // a word of input need not be one of weight
    Vec<float, N> w;
    UNROLL(n, N / F) {
      const auto part = load_affine<T, F>(affine, call.affine_float32, col + n * F, fallback);
      UNROLL(f, F) w[n * F + f] = part[f];
    }
    return w;
  }
  __device__ Pack<T, N> of_row(const T* row, uint64_t policy) const { return load<T, N>(row + offset, policy); }

  // xhat of the row that was loaded, and its shares of the row's sums and of the columns' gradients.
  __device__ void add_row(const Backward& call, int r, float mean, float rstd, const float* bias, Sums& sums) {
    dy[r] = next_dy[r];
    // Words outside of the row subtract 0: a mean of bf16 rows can exceed 1e36, and times rstd overflow.
    xhat[r] = (widened(next_x[r]) - (kAddsZeros<T, N> ? mean * float(live) : mean)) * rstd;
    if constexpr (kFused) apply_derivative<T>(dy[r], xhat[r], weight, widened(load<float, N>(bias + col)), call);
    const Vec<float, N> grad = widened(dy[r]);
    UNROLL(v, N) {
      const float wdy = product(weight[v], grad[v]);
      sums.wdy += wdy, sums.wdy_xhat += wdy * xhat[r][v];
      grads[0][v] += grad[v] * xhat[r][v], grads[1][v] += grad[v];
    }
  }

  // means: the row's sums over its columns.
  __device__ void write_grad_input(T* to, int r, float rstd, const Sums& means) const {
    const Vec<float, N> grad = widened(dy[r]);
    Vec<float, N> dx;
    UNROLL(v, N) {
      if constexpr (sizeof(T) == 2 && N > 1) {  // an instruction less (bf16 rows of 2041: 0.806 -> 0.814)
        dx[v] = rstd * fmaf(weight[v], grad[v], fmaf(-xhat[r][v], means.wdy_xhat, -means.wdy));
      } else {  // see product
        dx[v] = rstd * (product(weight[v], grad[v]) - means.wdy - xhat[r][v] * means.wdy_xhat);
      }
    }
    store<T>(to + offset, dx);
  }
  __device__ void write_sums(float* to, int n) const {
    if constexpr (is_in_words<T, N>) {
      to[col] = grads[n][0], to[col + 1] = grads[n][1];
    } else {
      store<float>(to + col, grads[n]);
    }
  }
};

// A thread's columns: packs of V, and an extra one.
template <typename T, int V, int PACKS, int ROWS>
struct BackwardColumns {
  BackwardPack<T, V, ROWS> packs[PACKS];
  BackwardPack<T, 1, ROWS> extra;
  float next_mean[ROWS], next_rstd[ROWS];

  // Calls f with each pack that is live, or with all, and with the extra column if this thread has it.
  template <bool ALL_PACKS = false, typename F>
  __device__ void each(F f) {
    UNROLL(i, PACKS) {
      if (ALL_PACKS || packs[i].live) f(packs[i]);
    }
    if constexpr (is_in_words<T, V>) {
      if (extra.live) f(extra);
    }
  }

  __device__ BackwardColumns(const Backward& call, int mid_word) {
    const int cols = call.cols, first = mid_word + threadIdx.x * V, stride = blockDim.x * V;
    UNROLL(i, PACKS) {
      packs[i].offset = i * stride, packs[i].col = first + i * stride;
      packs[i].live = packs[i].col + V <= cols;
      if (kAddsZeros<T, V>) packs[i].weight = {};
    }
    extra.col = mid_word ? 0 : cols - 1, extra.offset = extra.col - first;
    // Computed once: the compiler would compare anew five times a turn (bf16 rows of 2041: 0.814 -> 0.830).
    extra.live = is_in_words<T, V> ? opaque(int(cols % 2 != 0 && threadIdx.x == 0)) : 0;
    each([&](auto& pack) { pack.weight = pack.load_affine_columns(call, call.weight, 1); });
  }

  // Starts loading rows row + r * next_row.
  __device__ void load_rows(const Backward& call, int64_t row, int next_row, uint64_t policy) {
    const int row_step = next_row * int(call.cols);
    const int64_t at = row * int(call.cols) + packs[0].col;
    UNROLL(r, ROWS) {
      if (row + r * next_row >= call.rows) continue;
      next_mean[r] = call.mean[row + r * next_row], next_rstd[r] = call.rstd[row + r * next_row];
      const T* x = keep_pointer(static_cast<const T*>(call.input) + at + r * row_step);
      const T* dy = keep_pointer(static_cast<const T*>(call.grad_output) + at + r * row_step);
      // First all of input, then all of grad_output (bf16 rows of 2041: 1% faster than in turns).
      each([&](auto& pack) { pack.next_x[r] = pack.of_row(x, policy); });
      each([&](auto& pack) { pack.next_dy[r] = pack.of_row(dy, policy); });
    }
  }

  // Adds up the block's sums of each column, of weight's (n = 0) or bias's gradient, and leaves them in `partial`.
  __device__ void write_partial(float* partial, float* share, int n, int cols) {
    __syncthreads();
    float* gathered = blockDim.y == 1 ? partial : share + threadIdx.y * cols;
    each([&](auto& pack) { pack.write_sums(gathered, n); });
    // A tree over the block's rows: 256 terms one by one would lose digits.
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y >= half) continue;
      for (int col = threadIdx.x; col < cols; col += blockDim.x) {
        const float total = share[threadIdx.y * cols + col] + share[(threadIdx.y + half) * cols + col];
        share[threadIdx.y * cols + col] = total;
        if (half == 1) partial[col] = total;
      }
    }
  }
};

template <typename T, int V, int PACKS, int ROWS>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_rows(Backward call, float* partials, L2Priority priority) {
  // First bias, then sums: columns times rows of a block with several rows.
  constexpr int kShared = (kFused ? kBackwardThreads : kBackwardBlockThreads) * V * PACKS;
  constexpr int kApart = kRowsApart<T, V>;
  __shared__ Sums slots[2][kMaxWarps][ROWS];
  __shared__ __align__(16) float share[kShared];
  const int cols = call.cols, first_row = threadIdx.y * kApart, next_row = blockDim.y * kApart;
  const float per_col = 1.0f / cols;
  const uint64_t policy = l2_policy(priority);

  // Which rows and columns.
  int64_t row = int64_t(blockIdx.x / kApart) * ROWS * next_row + blockIdx.x % kApart + first_row;
  const int64_t row_stride = int64_t(gridDim.x) * blockDim.y * ROWS;
  const int mid_word = is_in_words<T, V> ? row * cols % 2 : 0;
  BackwardColumns<T, V, PACKS, ROWS> columns(call, mid_word);
  float* bias = share + mid_word;  // two floats of a word begin on 8 bytes
  if constexpr (kFused) {
    // As float, so that no load branches on its dtype (bf16 rows of 1024, GELU: 0.71 of copy speed -> 0.74).
    columns.each([&](auto& pack) {
      if (threadIdx.y == 0) store<float>(bias + pack.col, pack.load_affine_columns(call, call.bias, 0));
    });
    __syncthreads();
  }
  auto start_turn = [&](int64_t row) {
    columns.load_rows(call, row, next_row, policy);
    if (sizeof(T) == 2 && V > 2 && !kFused) prefetch_rows<T, ROWS>(call, row - first_row + row_stride, policy);
  };

  start_turn(row);
  int turn = 0;  // of the two sets of slots: one barrier a turn is enough
  for (; row - first_row < call.rows; row += row_stride, turn ^= 1) {
    // Add up.
    Sums sums[ROWS] = {};
    float rstd[ROWS];
    UNROLL(r, ROWS) {
      rstd[r] = columns.next_rstd[r];
      if (row + r * next_row >= call.rows) continue;
      columns.template each<kAddsZeros<T, V>>(
          [&](auto& pack) { pack.add_row(call, r, columns.next_mean[r], rstd[r], bias, sums[r]); });
    }
    start_turn(row + row_stride);
    if (call.grad_input == nullptr) continue;

    // Write grad_input.
    combine_row(sums, slots[turn]);
    T* grad_input = static_cast<T*>(call.grad_input) + (row * cols + columns.packs[0].col);
    UNROLL(r, ROWS) {
      if (row + r * next_row >= call.rows) continue;
      const Sums means = {sums[r].wdy * per_col, sums[r].wdy_xhat * per_col};
      T* to = keep_pointer(grad_input + r * (next_row * cols));
      columns.each([&](auto& pack) { pack.write_grad_input(to, r, rstd[r], means); });
    }
  }

  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return;
  UNROLL(n, 2) columns.write_partial(partials + (n * gridDim.x + blockIdx.x) * int64_t(cols), share, n, cols);
}

// ---- Rows in registers, backward: host side ----

struct BackwardPlan {
  void (*kernel)(Backward, float*, L2Priority);
  dim3 block;  // threads of a row, rows side by side
  int64_t blocks;
  int resident_rows;  // that an SM holds
};

bool takes(const Backward& call, int pack) {
  const int columns = size_of(call.dtype) == 2 && pack > 1 ? 2 * kBackwardColumns : kBackwardColumns;
  return call.cols <= columns * kBackwardThreads;
}

template <typename T, int V, int PACKS, int ROWS>
BackwardPlan plan(const Backward& call, const Device& device) {
  constexpr int kApart = kRowsApart<T, V>;
  const int threads = row_threads(call.cols, V * PACKS);
  const int rows = std::max(1, (sizeof(T) == 2 ? kBackwardBlockThreads16Bits : kBackwardBlockThreads) / threads);
  const int sm_blocks = std::max(1, kBackwardThreads / (threads * rows));
  int64_t blocks = std::min<int64_t>(ceil_div(call.rows, rows), device.sms * sm_blocks);
  blocks *= ceil_div(call.rows, blocks * rows * kRowsPerSum);  // at most so many rows a thread
  blocks = ceil_div(blocks, kApart) * kApart;
  return {layer_norm_backward_rows<T, V, PACKS, ROWS>, dim3(threads, rows), blocks, sm_blocks * rows * ROWS};
}

template <typename T, int V>
cudaError_t launch(const Backward& call, const Context& context) {
  constexpr int kPack = sizeof(T) == 2 && V == 1 ? 2 : V, kRows = kPack > 1 ? 2 : 1;
  BackwardPlan p = plan<T, kPack, kBackwardColumns / kPack, kRows>(call, context.device);
  if constexpr (sizeof(T) == 2 && V > 1) {
    const BackwardPlan one_row = plan<T, V, 2, 1>(call, context.device);
    if (call.cols > kBackwardColumns * kBackwardThreads || one_row.resident_rows > p.resident_rows) p = one_row;
  }
  auto* partials = static_cast<float*>(context.allocate(2 * p.blocks * call.cols * sizeof(float)));
  const auto priority = input_priority(call, context.device);
  const cudaError_t error = launch_kernel(p.kernel, {dim3(p.blocks), p.block}, context, call, partials, priority);
  return error != cudaSuccess ? error : launch_sum_partials(call, partials, p.blocks, context);
}

}  // namespace registers
"""

_SHARED = r"""
namespace shared {

// ---- Rows in shared memory, forward (sm_80 and up) ----
// Takes aligned rows that are too long for registers and of which an SM's shared memory holds two. A thread loads
// all its packs at once, so that as much is in flight as fits an SM, and only reads what it has copied itself.
// Example: 4096 float32 rows of 12288. 768 threads share a row, 4 packs each; an SM holds 2 rows of 48 KB.

constexpr int kLoads = 4;  // of a thread, more where the row is longer
// Rows for each SM, as the last wave may be a small one (1024 float32 rows of 16384: 0.88, pipeline 0.93).
constexpr int kRowsForEachSm = 15;
constexpr int kControlBytes = 2048;  // of shared memory, beside a row

template <typename T>
struct Limits {
  static constexpr bool k16Bits = sizeof(T) == 2, kSmHas1536 = (kArch >= 860 && kArch < 900) || kArch == 1100;
  // Of a row (float32 rows of 16384: 0.94 of copy speed with 512, 0.967 with 1024).
  static constexpr int kThreads = k16Bits ? 512 : 1024;
  // Of kThreads, that an SM must hold; some SMs have room for only 1536 threads.
  static constexpr int kBlocks = k16Bits ? kRowBlocks : kSmHas1536 ? 1 : kRowBlocks - 1;
  // Of a row: of longer ones too little loads while an SM computes (float32 rows of 18432: 0.938, pipeline 0.949).
  static constexpr int kBytes = (k16Bits ? 43 : 71) << 10;
  // Packs whose weight and bias are loaded at once (16-bit rows: 0.87 -> 0.90); float32 would spill from sm_100 on.
  static constexpr int kAtOnce = k16Bits || kArch < 1000 ? 2 : 1;
};

template <typename T>
__global__ void __launch_bounds__(Limits<T>::kThreads, Limits<T>::kBlocks)
    layer_norm_shared_rows(Forward call, RowConstants constants, PrefetchWindow window) {
  if constexpr (kArch < 800) return __trap();  // takes() keeps calls away from such code
  constexpr int V = 16 / sizeof(T), kMaxWarps = Limits<float>::kThreads / 32;
  extern __shared__ __align__(128) unsigned char row_bytes[];
  __shared__ RowSlots<T, 1, kMaxWarps> slots;
  const int cols = call.cols;
  const T* input = static_cast<const T*>(call.input) + int64_t(blockIdx.x) * cols;
  const int first = int(threadIdx.x) * V, stride = int(blockDim.x) * V;  // of a thread's packs
  T* row = reinterpret_cast<T*>(row_bytes);

  // Load.
  const uint64_t policy = l2_policy(constants.priority);
  for (int col = first; col < cols; col += stride) copy_async(row + col, input + col, policy);
  if (is_prefetching_thread()) prefetch_later_rows(window, policy);
  wait_for_copies();

  // Measure: the mean first, then distances from it.
  const int packs = (cols - first + stride - 1) / stride;  // of this thread
  const auto x = [&](int i) { return widened(load<T, V>(row + (first + i * stride))); };
  float sum[1] = {}, mean[1];
#pragma unroll(kLoads)
  for (int i = 0; i < packs; ++i) sum[0] += sum_of<T>(x(i));
  row_means<T, INT_MAX>(mean, sum, packs * V, cols, constants.per_col, slots);
  DistanceSums<T> distances[1] = {};
#pragma unroll(kLoads)
  for (int i = 0; i < packs; ++i) distances[0] = combine(distances[0], distances_of<DistanceSums<T>>(x(i) - mean[0]));
  combine_row(distances, slots.distances);
  const float first_mean = mean[0], m2 = correct_mean(distances[0], mean[0], constants.per_col);
  const float rstd = rsqrt(m2 * constants.per_col + constants.eps);
  const RowStats stats = row_stats_of(first_mean, mean_offset(distances[0], constants.per_col), rstd);
  if (threadIdx.x == 0) save_statistics(call, blockIdx.x, stats.mean, rstd);

  // Write.
  T* output = static_cast<T*>(call.output) + int64_t(blockIdx.x) * cols;
  with_same_dtype<T>(call, [&](auto same_dtype) {
#pragma unroll(Limits<T>::kAtOnce)
    for (int i = 0; i < packs; ++i) {
      const int col = first + i * stride;
      Vec<float, V> weight, bias;
      load_affine_pair<T, V, false, same_dtype.value>(weight, bias, call, col, 0);
      store<T, V>(output + col, normalized<T>(x(i), stats) * weight + bias);
    }
  });
}

// ---- Rows in shared memory, forward: host side ----

// An SM must hold two rows (code for sm_80 with 99 KB, two float32 rows of 10240: 0.98, pipeline 0.82).
template <typename T>
bool takes(const Forward& call, const Device& device) {
  const int64_t bytes = call.cols * sizeof(T);
  return device.code >= 80 && bytes <= Limits<T>::kBytes && 2 * (bytes + kControlBytes) <= device.shared_bytes &&
         call.rows >= int64_t(kRowsForEachSm) * device.sms;
}

template <typename T>
cudaError_t launch(const Forward& call, const Context& context) {
  const int64_t bytes = call.cols * sizeof(T);
  const int threads = std::min(Limits<T>::kThreads, row_threads(bytes / 16, kLoads));
  return launch_kernel(layer_norm_shared_rows<T>, {call.rows, threads, kPlain, int(bytes)}, context, call,
                       row_constants(call, context.device), prefetch_window(call, 1, context.device));
}

}  // namespace shared
"""

_PIPELINE = r"""
namespace pipeline {

// ---- Long rows in a pipeline, forward and backward (sm_80 and up) ----
// Takes aligned rows of up to 8192 columns for each SM. Blocks on several SMs share a row; each has a slice of the
// columns, with weight, bias or their gradients in registers for the whole run. The loader copies slices of row after
// row to a ring of stages in shared memory. 16 warps measure a slice when it has arrived, one more combines and
// publishes what they measured, one or two gather what the row's blocks have published. The 16 apply a slice `delay`
// stages later: nobody waits for the exchange, and each byte moves once.
// Example: backward of 4096 rows of 12288 bf16 on 132 SMs. 2 blocks share a row, in slices of 6144: 66 groups of them.
// A stage has both tensors' slices, 24 KB; 9 fit, 2 are being copied, each is applied 3 after it is measured.

// Warps: 16 compute, one publishes, two gather, one loads. Before Hopper two load and one gathers (0.67 -> 0.84).
constexpr int kWarps = 16, kPublisher = kWarps, kGatherer = kPublisher + 1, kThreads = 32 * (kGatherer + 3);
constexpr int kGatherers = kCopyThreads > 32 ? 1 : 2, kLoader = kGatherer + kGatherers;
constexpr int kThreadColumns = 16, kMaxStages = 10;
constexpr int kMaxSlice = 32 * kWarps * kThreadColumns;  // columns of a block: 8192
constexpr int kPrefetchStep = 64;  // two sectors, before Hopper (float32 rows of 131072: 0.89 of copy speed -> 0.92)

// Bytes in flight into a block's ring (float32 rows of 262144 with half: 0.965 of copy speed -> 0.956).
constexpr int kFlightBytes = 64 << 10, kForwardFlightBytes16Bits = 48 << 10;
// Stages between measuring and applying, in a group of blocks (forward with 6: 1.5% slower) and of a block alone.
constexpr int kForwardDelay = 5, kBackwardDelay = 3, kDelayAlone = 2;
// From so many blocks of a row on the exchange takes a stage more (backward, bf16 rows of 1048576: 0.88 -> 0.94).
constexpr int kManyBlocks = 100;
// Backward prefetches rows of so many blocks (float32: 1048576 columns 0.63 of copy speed -> 0.76, 8192 0.98 -> 0.93).
constexpr int kBackwardPrefetchBlocks = 16;
constexpr int64_t kMinSlice = 2048;  // a row's fixed cost, in columns' time; so also the shortest slice

// A group of gridDim.x blocks shares a row; gridDim.y groups take turns at the rows.
struct Pipeline {
  int slice;            // columns of a block; the last one of a group may have fewer
  int slice_bytes;      // room for one tensor's slice of a row, a multiple of kLineBytes
  int stages;           // of the ring
  int flight;           // stages on their way at once
  int delay;            // stages between measuring and applying, less than stages
  int lanes;            // of a gatherer for a row: a power of two, 4 to 32, for as many blocks
  L2Priority priority;  // of input
};

// A block's slice of a row, in the ring. A thread has packs of V columns.
template <typename T>
struct Slice {
  static constexpr int V = 16 / sizeof(T), kPacks = kThreadColumns / V;
  const T *x, *dy;  // dy: grad_output, in backward
  int64_t offset;   // in the tensors, in elements; of row 0: the slice's first column
  int columns;

  __device__ int at(int i) const { return (i * 32 * kWarps + threadIdx.x) * V; }
  __device__ bool has(int i) const { return at(i) < columns; }
  __device__ Vec<float, V> pack(const T* tensor, int i) const {  // zeros where it has none
    return widened(has(i) ? load<T, V>(tensor + at(i)) : Pack<T, V>{});
  }
};

// ---- Pipeline: forward and backward, as the roles see them ----
// A pass measures parts of a slice, as pairs of floats, makes a row's statistics of their total (finish), applies them.

// Pairs are {mean, m2}; means of float32 are distances from the row's reference.
template <typename T>
struct ForwardPass {
  using Call = Forward;
  using Element = T;
  using ForRow = RowStats;
  static constexpr int V = Slice<T>::V, kPacks = Slice<T>::kPacks, kTensors = 1;
  // Lanes that measure a part together (bf16 rows of 65536 with 32: 0.84 of copy speed, 2: 0.89; float32 has no room).
  enum : int { kLanesPerPart = sizeof(T) == 2 ? 2 : 8, kScalars = sizeof(T) == 4 ? 3 : 0 };
  static constexpr bool kForward = true;
  Vec<float, V> weight[kPacks], bias[kPacks];
  float count = 0, per_count;  // columns of this thread's part, and their inverse

  static __device__ const void* tensor(const Call& call, int) { return call.input; }
  static __device__ const float* scalar_at(const Call& call, int64_t row, int i) {
    return static_cast<const float*>(call.input) + row * call.cols + sampled_column(call.cols, i);
  }
  // Float32 means count from it, as sums of 12 equal numbers already round; 16-bit numbers sum exactly in 24 bits.
  static __device__ float reference(const float4& x) { return kScalars > 0 ? reference_of(x.x, x.y, x.z) : 0; }

  __device__ ForwardPass(const Call& call, const Slice<T>& row_0) {
    with_same_dtype<T>(call, [&](auto same_dtype) {
      UNROLL(i, kPacks) {
        // Always inside the slice, so that no condition delays loads (bf16 rows of 65536: 0.83 -> 0.87).
        const int col = row_0.offset + min(row_0.at(i), row_0.columns - V);
        load_affine_pair<T, V, false, decltype(same_dtype)::value>(weight[i], bias[i], call, col, 0);
      }
    });
    UNROLL(i, kPacks) count += row_0.has(i) ? V : 0;
    count = combine_lanes(count, kLanesPerPart);
    per_count = 1 / max(count, 1.f);
  }

  __device__ float2 measure(const Slice<T>& slice, const float4& row_scalars) const {
    Vec<float, V> packs[kPacks];
    UNROLL(i, kPacks) packs[i] = slice.pack(slice.x, i) - reference(row_scalars);
    const auto x = [&](int i) { return packs[i]; };
    const auto has = [&](int i) { return slice.has(i); };
    return measure_packs<T, kLanesPerPart, kPacks>(x, has, count, per_count);
  }

  static __device__ ForRow finish(const Call& call, float2 total, const float4& row_scalars, int64_t row, bool saves) {
    const float from = reference(row_scalars), variance = total.y * (1 / float(call.cols)) + float(call.eps);
    const float rstd = sizeof(T) == 2 ? rsqrtf(variance) : inverse_root(variance);
    if (saves) save_statistics(call, row, from + total.x, rstd);
    return row_stats_of(from, total.x, rstd);
  }

  __device__ void apply(const Call& call, const Slice<T>& slice, const ForRow& stats, const float4&) const {
    T* output = static_cast<T*>(call.output) + slice.offset;
    UNROLL(i, kPacks) {
      const auto y = normalized<T>(slice.pack(slice.x, i), stats) * weight[i] + bias[i];
      if (slice.has(i)) store<T, V>(output + slice.at(i), y);
    }
  }
};

// Pairs are {sum(wdy), sum(wdy * xhat)}, row_scalars mean and rstd.
template <typename T>
struct BackwardPass {
  using Call = Backward;
  using Element = T;
  using ForRow = float2;  // the means of the two
  static constexpr int V = Slice<T>::V, kPacks = Slice<T>::kPacks, kTensors = 2;
  static constexpr bool kForward = false;
  enum : int { kLanesPerPart = 32, kScalars = 2 };  // 16 lanes: bf16 rows of 1048576 0.98 -> 0.96
  Vec<float, V> weight[kPacks], grad_weight[kPacks] = {}, grad_bias[kPacks] = {};
  float count = 0;  // sums do without

  static __device__ const void* tensor(const Call& call, int t) { return t == 0 ? call.input : call.grad_output; }
  static __device__ const float* scalar_at(const Call& call, int64_t row, int i) {
    return (i == 0 ? call.mean : call.rstd) + row;
  }

  __device__ BackwardPass(const Call& call, const Slice<T>& row_0) {
    UNROLL(i, kPacks) {
      const int64_t col = row_0.offset + row_0.at(i);
      if (row_0.has(i)) weight[i] = load_affine<T, V>(call.weight, call.affine_float32, col, 1);
    }
  }

  __device__ float2 measure(const Slice<T>& slice, const float4& row_scalars) {
    const float mean = row_scalars.x, rstd = row_scalars.y;
    float2 sums = {};
    UNROLL(i, kPacks) {
      if (!slice.has(i)) continue;
      const auto xhat = (slice.pack(slice.x, i) - mean) * rstd, dy = slice.pack(slice.dy, i);
      const auto wdy = product(weight[i], dy);
      UNROLL(v, V) sums.x += wdy[v], sums.y += wdy[v] * xhat[v];
      grad_weight[i] = grad_weight[i] + dy * xhat, grad_bias[i] = grad_bias[i] + dy;
    }
    return combine_lanes(sums, kLanesPerPart);
  }

  static __device__ ForRow finish(const Call& call, float2 total, const float4&, int64_t, bool) {
    const float per_col = fast_reciprocal(float(call.cols));
    return {total.x * per_col, total.y * per_col};
  }

  __device__ void apply(const Call& call, const Slice<T>& slice, const ForRow& means, const float4& row_scalars) const {
    if (call.grad_input == nullptr) return;
    const float mean_wdy = means.x, mean_wdy_xhat = means.y, mean = row_scalars.x, rstd = row_scalars.y;
    // 16 bits take three instructions instead of six. rstd comes last: squared, it overflows for numbers below 1e-19.
    const float of_x = -rstd * mean_wdy_xhat, rest = -mean_wdy - mean * of_x;
    UNROLL(i, kPacks) {
      if (!slice.has(i)) continue;
      const auto x = slice.pack(slice.x, i), dy = slice.pack(slice.dy, i);
      const auto dx = sizeof(T) == 2 ? x * of_x + (weight[i] * dy + rest)
                                     : product(weight[i], dy) - mean_wdy - (x - mean) * rstd * mean_wdy_xhat;
      store<T, V>(static_cast<T*>(call.grad_input) + slice.offset + slice.at(i), dx * rstd);
    }
  }

  __device__ void add_sums_of_rows(const Call& call, float* partials, const Slice<T>& row_0, bool is_first) {
    UNROLL(i, kPacks) {
      if (!row_0.has(i)) continue;
      add_gradients<T>(call, partials, row_0.offset + row_0.at(i), grad_weight[i], grad_bias[i], is_first);
      grad_weight[i] = grad_bias[i] = {};
    }
  }
};

// ---- Pipeline: what the warps of a block share ----

template <typename Pass>
struct alignas(kLineBytes) Control {
  static constexpr int kParts = 32 * kWarps / Pass::kLanesPerPart;
  // Threads that copy in the background, and so arrive at `full` once more. From Hopper on only the one of float32's
  // forward, whose scalars are far apart (rows of 28672 with loads: 0.96 of copy speed -> 0.93; backward gains 3%).
  static constexpr int kCopiers = kCopyThreads > 1 || (Pass::kForward && Pass::kScalars > 0) ? kCopyThreads : 0;
  // Barriers of a stage: the slice has landed (for the 16 warps), its parts are there (for the publisher), the row's
  // statistics are there (for the 16 warps), it is applied (for the loader).
  uint64_t full[kMaxStages], measured[kMaxStages], stats_ready[kMaxStages], empty[kMaxStages];
  float4 row_scalars[kMaxStages];
  typename Pass::ForRow row_stats[kMaxStages];
  float2 parts[kMaxStages][kParts];
  float part_columns[kParts];
};

// A block's share of the work: in each turn, its slice of the row that its group has.
template <typename Pass>
struct Block {
  using T = typename Pass::Element;
  const typename Pass::Call& call;
  const Pipeline& pipe;
  Control<Pass>& control;
  unsigned char* ring;
  uint64_t* mailboxes;
  int rank = blockIdx.x, groups = gridDim.y, turns = (int(call.rows) - int(blockIdx.y) + groups - 1) / groups;
  int64_t first = int64_t(rank) * pipe.slice;  // column
  int columns = columns_of_slice(call.cols, pipe.slice, rank);

  __device__ int row(int turn) const { return blockIdx.y + turn * groups; }
  __device__ int64_t offset(int row) const { return int64_t(row) * int(call.cols) + first; }
  __device__ Copy copy(int stage, int t, int row) const {  // begins where the slice's first cache line does
    const char* from = static_cast<const char*>(Pass::tensor(call, t)) + offset(row) * sizeof(T);
    const int before = reinterpret_cast<uintptr_t>(from) % kLineBytes;
    return {ring + (stage * Pass::kTensors + t) * pipe.slice_bytes, from - before, before + columns * int(sizeof(T))};
  }
  __device__ Slice<T> slice(int stage, int row) const {
    const Copy x = copy(stage, 0, row), dy = copy(stage, Pass::kTensors - 1, row);
    const auto begin = [&](const Copy& c) { return reinterpret_cast<T*>(c.shared + c.bytes) - columns; };
    return {begin(x), begin(dy), offset(row), columns};
  }
  __device__ void finish_row(int stage, float2 total, int row) const {
    control.row_stats[stage] = Pass::finish(call, total, control.row_scalars[stage], row, rank == 0);
    barrier_arrive(&control.stats_ready[stage]);
  }
};

// ---- Pipeline: roles of warps ----

// The loading threads: a slice of row after row, as stages become free.
template <typename Pass>
__device__ void load_slices(const Block<Pass>& block, int thread) {
  constexpr int kLoaded = Control<Pass>::kCopiers > 0 ? 0 : Pass::kScalars;
  const Pipeline& pipe = block.pipe;
  auto& control = block.control;
  const uint64_t policy = l2_policy(pipe.priority);
  const bool prefetches = Pass::kForward || gridDim.x >= kBackwardPrefetchBlocks;
  RingPosition stage;
  for (int turn = 0; turn < block.turns; ++turn, stage.advance(pipe.stages)) {
    const int row = block.row(turn);
    Copy copies[Pass::kTensors];
    UNROLL(t, Pass::kTensors) {
      // While the row waits for a stage it comes to L2 (float32 rows of 262144: 0.89 of copy speed -> 0.95).
      const Copy& copy = copies[t] = block.copy(stage.index, t, row);
      if (prefetches) prefetch_units(copy.global, copy.bytes, policy, thread, kCopyThreads, kPrefetchStep);
    }
    float scalars[2];  // in flight while this thread waits
    UNROLL(i, kLoaded) scalars[i] = *Pass::scalar_at(block.call, row, i);
    barrier_wait(&control.empty[stage.index], stage.parity ^ 1);  // at once in the first round
    float* row_scalars = &control.row_scalars[stage.index].x;
    UNROLL(i, Pass::kScalars - kLoaded) {
      if (thread == 0) copy_float(row_scalars + i, Pass::scalar_at(block.call, row, i));
    }
    // Waits until the slice of `flight` turns ago has landed: more copies would delay what the group publishes.
    const RingPosition landing = stage.after(pipe.stages - pipe.flight, pipe.stages);  // a round later
    barrier_wait(&control.full[landing.index], landing.parity ^ 1);
    UNROLL(i, kLoaded) row_scalars[i] = scalars[i];
    start_copies(copies, &control.full[stage.index], thread, policy);
    if (control.kCopiers > 0) barrier_arrive_with_copies(&control.full[stage.index]);
  }
}

// Combines N pairs a lane, of counts[n] of the columns each, over `width` lanes.
template <typename Pass, int N, int M>
__device__ float2 combine_pairs(const float2 (&pairs)[M], const float (&counts)[M], int columns, int width) {
  if constexpr (Pass::kForward) {
    const float3 total = combine_means<N>(pairs, counts, float(columns), width);
    return {total.x + total.y, total.z};
  }
  return combine_lanes(sum_of_terms<N>([&](int n) { return pairs[n]; }), width);
}

// A warp that combines the parts of a slice, and publishes the pair.
template <typename Pass>
__device__ void publish_slices(const Block<Pass>& block, int lane) {
  constexpr int kParts = Control<Pass>::kParts, kWidth = kParts < 32 ? kParts : 32, kEach = kParts / kWidth;
  auto& control = block.control;
  float counts[kEach];
  RingPosition stage;
  for (int turn = 0; turn < block.turns; ++turn, stage.advance(block.pipe.stages)) {
    barrier_wait(&control.measured[stage.index], stage.parity);
    float2 pairs[kEach];
    UNROLL(i, kEach) {
      const int part = i * kWidth + lane % kWidth;
      pairs[i] = control.parts[stage.index][part];
      if (turn == 0) counts[i] = control.part_columns[part];
    }
    const float2 total = combine_pairs<Pass, kEach>(pairs, counts, block.columns, kWidth);
    if (lane != 0) continue;
    if (gridDim.x == 1) {  // row_scalars are there: who measured has waited for them
      block.finish_row(stage.index, total, block.row(turn));
    } else {
      publish(mailbox_of(block.mailboxes, block.row(turn), block.rank), total);
    }
  }
}

// A warp that gathers what the group publishes, of 32 / lanes rows at once (bf16 rows of 50176: 0.68 -> 0.85).
template <typename Pass>
__device__ void gather_rows(const Block<Pass>& block, int gatherer, int lane) {
  const Pipeline& pipe = block.pipe;
  const int peer = lane % pipe.lanes, ahead = lane / pipe.lanes, cols = block.call.cols;
  // Two are slower in backward of float32 rows of many blocks (of 1048576: 0.86 of copy speed -> 0.78).
  const int gatherers = !Pass::kForward && Pass::V == 4 && gridDim.x >= kManyBlocks ? 1 : kGatherers;
  if (gatherer >= gatherers) return;
  float2 pairs[kPeers];
  float counts[kPeers];
  UNROLL(i, kPeers) counts[i] = columns_of_slice(cols, pipe.slice, peer + i * 32);
  for (int next = gatherer; next < block.turns;) {
    const int turn = next + ahead * gatherers, row = block.row(turn);
    const uint64_t* mailboxes = turn < block.turns ? mailbox_of(block.mailboxes, row, 0) : nullptr;
    const unsigned missing = __ballot_sync(~0u, !try_read(mailboxes, peer, pairs));
    const int rows = (missing == 0 ? 32 : __ffs(missing) - 1) / pipe.lanes;  // complete ones
    if (rows == 0) {  // polled all the time, mailboxes would fill late (backward of float32 rows of 1048576)
      __nanosleep(32);
      continue;
    }
    const float2 total = gridDim.x <= 32 ? combine_pairs<Pass, 1>(pairs, counts, cols, pipe.lanes)
                                         : combine_pairs<Pass, kPeers>(pairs, counts, cols, pipe.lanes);
    if (peer == 0 && ahead < rows && turn < block.turns) {
      const int stage = turn % pipe.stages;
      // It was loaded long ago; so row_scalars are seen.
      if (Pass::kForward && Pass::kScalars > 0) barrier_wait(&block.control.full[stage], turn / pipe.stages % 2);
      block.finish_row(stage, total, row);
    }
    next += rows * gatherers;
  }
}

// The other warps: measure slices as they arrive, and apply the row of `delay` turns before.
template <typename Pass>
__device__ void measure_and_apply(const Block<Pass>& block, float* partials, int lane) {
  const int turns = block.turns, delay = block.pipe.delay, stages = block.pipe.stages;
  const int part = threadIdx.x / Pass::kLanesPerPart;
  const bool leads_part = lane % Pass::kLanesPerPart == 0;
  auto& control = block.control;
  const auto row_0 = block.slice(0, 0);
  Pass job(block.call, row_0);
  if (leads_part) control.part_columns[part] = job.count;
  RingPosition measuring, applying;
  ROLLED(turn, turns + delay) {
    if (turn < turns) {
      const int stage = measuring.index;
      const auto slice = block.slice(stage, block.row(turn));
      barrier_wait(&control.full[stage], measuring.parity);
      const float2 stats = job.measure(slice, control.row_scalars[stage]);
      if (leads_part) {
        control.parts[stage][part] = stats;
        barrier_arrive(&control.measured[stage]);
      }
      measuring.advance(stages);
      if constexpr (!Pass::kForward) {
        if (turn % kRowsPerSum == kRowsPerSum - 1 || turn + 1 == turns)
          job.add_sums_of_rows(block.call, partials, row_0, turn < kRowsPerSum);
      }
    }
    if (turn >= delay) {
      const int stage = applying.index;
      const auto slice = block.slice(stage, block.row(turn - delay));
      barrier_wait(&control.stats_ready[stage], applying.parity);
      job.apply(block.call, slice, control.row_stats[stage], control.row_scalars[stage]);
      __syncwarp();
      if (lane == 0) barrier_arrive(&control.empty[stage]);
      applying.advance(stages);
    }
  }
}

template <typename Pass>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_pipeline(typename Pass::Call call, Pipeline pipe, uint64_t* mailboxes, float* partials) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control<Pass> control;
  const Block<Pass> block = {call, pipe, control, ring, mailboxes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!Pass::kForward) let_next_start();  // sum_partials (2048 x 8192 bf16: 35.6 us -> 34.6)

  // A warp for each stage, as lanes would take turns, 1 us in all (bf16 rows of 32768: 0.925 -> 0.935).
  if (lane == 0 && warp < pipe.stages) {
    barrier_init(&control.full[warp], 1 + control.kCopiers);
    barrier_init(&control.measured[warp], control.kParts);
    barrier_init(&control.stats_ready[warp], 1);
    barrier_init(&control.empty[warp], kWarps);
    barriers_initialized();
  }
  __syncthreads();
  if (gridDim.x > 1) empty_mailboxes(mailboxes, call.rows);

  if (warp < kWarps) {
    measure_and_apply(block, partials, lane);
  } else if (warp == kPublisher) {
    publish_slices(block, lane);
  } else if (warp >= kLoader) {
    const int thread = threadIdx.x - 32 * kLoader;
    if (thread < kCopyThreads) load_slices(block, thread);
  } else if (gridDim.x > 1) {
    gather_rows(block, warp - kGatherer, lane);
  }
#else
  __trap();  // takes() keeps calls away from such code
#endif
}

// ---- Pipeline: host side ----

template <typename T, typename Call>
using PassOf = std::conditional_t<std::is_same_v<Call, Forward>, ForwardPass<T>, BackwardPass<T>>;

// The longest slice that threads can take and of which three stages fit: to load, to measure, to wait.
template <typename Pass>
int64_t longest_slice(const Device& device) {
  const int bytes = (device.shared_bytes - int(sizeof(Control<Pass>))) / (3 * Pass::kTensors);
  return std::min(kMaxSlice, (bytes / kLineBytes - 1) * kLineBytes / int(sizeof(typename Pass::Element)));
}

template <typename T, typename Call>
bool takes(const Call& call, const Device& device) {
  return device.code >= 80 &&
         call.cols <= longest_slice<PassOf<T, Call>>(device) * std::min(device.sms, kMaxBlocksPerRow);
}

// As few as hold a row, one an SM; more if that leaves fewer SMs idle: where rows are few, and in backward, where two
// tensors' bytes hide the exchange (rows of 262144: 33 blocks use 132 SMs, 32 only 128).
template <typename Pass>
int64_t blocks_of_row(const typename Pass::Call& call, const Device& device) {
  const int64_t rows = call.rows, cols = call.cols, sms = device.sms;
  const int64_t fewest = ceil_div(cols, longest_slice<Pass>(device));
  const int64_t worth_trying = std::max(Pass::kTensors * fewest, sms / std::min(rows, sms));
  const int64_t most = std::min({worth_trying, sms, int64_t(kMaxBlocksPerRow), cols / kMinSlice});
  int64_t fastest = fewest, min_time = INT64_MAX;
  for (int64_t blocks = fewest; blocks <= most; ++blocks) {
    const int64_t time = ceil_div(rows, std::min(rows, sms / blocks)) * (ceil_div(cols, blocks) + kMinSlice);
    if (time < min_time) fastest = blocks, min_time = time;
  }
  return fastest;
}

template <typename T, typename Call>
cudaError_t launch(const Call& call, const Context& context) {
  using Pass = PassOf<T, Call>;
  constexpr bool kForward = Pass::kForward;
  constexpr int kBytes = Pass::kTensors * sizeof(T);    // of a column
  constexpr int kLineColumns = kLineBytes / sizeof(T);  // slices start on lines where rows do
  const Device& device = context.device;
  Pipeline p = {};
  p.slice = ceil_div(ceil_div(call.cols, blocks_of_row<Pass>(call, device)), kLineColumns) * kLineColumns;
  p.slice_bytes = p.slice * sizeof(T) + kLineBytes;  // it may begin inside of a line
  const int blocks_per_row = ceil_div(call.cols, p.slice);
  const int64_t groups = std::min<int64_t>(call.rows, device.sms / blocks_per_row);
  const int ring_bytes = device.shared_bytes - int(sizeof(Control<Pass>));
  p.stages = std::min(ring_bytes / (Pass::kTensors * p.slice_bytes), kMaxStages);  // at least three, see longest_slice
  const int flight_bytes = kForward && sizeof(T) == 2 ? kForwardFlightBytes16Bits : kFlightBytes;
  p.flight = std::clamp(flight_bytes / (kBytes * p.slice), 1, p.stages - 1);
  // Leaves two stages to load into, one where the exchange is slower (float32 rows of 1048576: 0.78 -> 0.90).
  const bool many = blocks_per_row >= kManyBlocks;
  const int delay = blocks_per_row == 1 ? kDelayAlone : (kForward ? kForwardDelay : kBackwardDelay) + many;
  p.delay = std::min(p.stages - (!kForward && many && device.code >= 90 ? 1 : 2), delay);
  p.lanes = std::clamp(row_threads(blocks_per_row, 1), 4, 32);
  p.priority = input_priority(call, device);

  const int64_t partial_rows = !kForward && (groups > 1 || call.rows > kRowsPerSum) ? groups : 0;
  const int64_t sums = ceil_div(2 * partial_rows * call.cols, 32) * 32;  // mailboxes begin on a line
  const int64_t bytes = 4 * sums + 8 * call.rows * mailboxes_per_row(blocks_per_row);
  auto* scratch = static_cast<float*>(bytes > 0 ? context.allocate(bytes) : nullptr);
  auto* mailboxes = reinterpret_cast<uint64_t*>(scratch + sums);
  float* partials = partial_rows > 0 ? scratch : nullptr;
  const Launch launch = {dim3(blocks_per_row, groups), kThreads, blocks_per_row > 1 ? kCooperative : kPlain,
                         p.stages * Pass::kTensors * p.slice_bytes};
  const cudaError_t error = launch_kernel(layer_norm_pipeline<Pass>, launch, context, call, p, mailboxes, partials);
  if constexpr (!kForward) {
    if (error == cudaSuccess) return launch_sum_partials(call, partials, partial_rows, context);
  }
  return error;
}

}  // namespace pipeline
"""

_JOINT = r"""
namespace joint {

// ---- Rows that many SMs hold together, forward, float32 (sm_90 to sm_110) ----
// Takes aligned rows of 8192 to 32768 columns for each SM, four and more of them to a group of blocks. A group, a block
// on each SM, shares a row; each block keeps its slice in shared memory until the group knows the row's statistics, so
// that each byte moves once (16 rows of 4194304: 0.176 ms, spread 0.216; bf16 this way would be slower: 0.146, 0.118).
// A slice moves in stages through a ring. Warps apply a stage and measure the one a slice and kAhead stages further on:
// the next row's exchange is under way before this row is done.
// Example: those 16 rows on 132 SMs. One group; a slice of 31776 columns is 16 stages of 8 KB; a ring has 22. A thread
// has 31 packs of weight and 20 of bias in registers; shared memory has the other 44 KB.

// Stages that are measured ahead (2: 0.184 ms, 3: 0.177, 4: 0.182), and on their way to L2 (4: 2 us more).
constexpr int kAhead = 3, kPrefetch = 3;
constexpr int kThreads = 256, kWarps = kThreads / 32;  // of 255 registers each, as weight and bias need them
// V: floats of a 16-byte pack. Packs of a stage (a thread's, a block's); stages of a slice and of the ring, at most.
constexpr int V = 4, kStagePacks = 2, kStageSize = kStagePacks * kThreads, kStages = 16, kRing = 28;
constexpr int kStageBytes = 16 * kStageSize, kStageColumns = kStageSize * V;
constexpr int kWeights = 31, kBiases = 20;  // packs in a thread's registers; the rest are in shared memory
constexpr int kLeastRows = 4;               // of a group (three rows of 4194304: 0.73 of copy speed, spread 0.74)

struct Plan {
  int blocks_per_row, groups;  // blocks_per_row 0: another room takes the call
  int slice;                   // columns of a block; the last one of a group may have fewer
  int ring, shared_bytes;      // ring: stages
};

__host__ __device__ inline int stages_of(int packs) { return (packs + kStageSize - 1) / kStageSize; }

// Packs of weight, or bias, of a slice that have no room in registers.
__host__ __device__ inline int shared_packs(int packs, int in_registers) {
  return max(0, packs + (kStages - stages_of(packs)) * kStageSize - in_registers * kThreads);
}

struct alignas(kLineBytes) Control {
  uint64_t full[kRing], empty[kRing], measured;  // barriers
  Moments moments[kWarps];
  RowStats row_stats[2];  // of rows in turns
};

using Packed = Pack<float, V>;
using StagePart = Vec<Packed, kStagePacks>;  // of a thread

// A block's slice of its group's rows.
struct Block {
  const Forward& call;
  const RowConstants& constants;
  const Plan& plan;
  unsigned char* ring;
  Control& control;
  uint64_t* mailboxes;
  int rank = blockIdx.x, thread = threadIdx.x;
  int first_col = rank * plan.slice, packs = columns_of_slice(call.cols, plan.slice, rank) / V;
  int stages = stages_of(packs), last_packs = packs - (stages - 1) * kStageSize;
  uint64_t policy = l2_policy(constants.priority);

  __device__ int64_t offset(int row, int stage) const { return row * call.cols + first_col + stage * kStageColumns; }
  __device__ StagePart load(int slot) const {
    const auto* from = reinterpret_cast<const Packed*>(ring + slot * kStageBytes) + thread;
    return {from[0], from[kThreads]};
  }
};

// Brings stages: thread 0 to the ring, thread 32 to L2, kPrefetch stages earlier (warps in turns: 1.3 times slower).
struct Fetch {
  const Block& block;
  const bool loads = threadIdx.x == 0, prefetches = threadIdx.x == 32;
  int row = blockIdx.y, stage = 0;

  __device__ void next(RingPosition slot) {
    if (row < block.call.rows) {
      const float* from = static_cast<const float*>(block.call.input) + block.offset(row, stage);
      const int bytes = 16 * (stage == block.stages - 1 ? block.last_packs : kStageSize);
      if (loads) {
        barrier_wait(&block.control.empty[slot.index], slot.parity ^ 1);  // at once in the first round
        barrier_arrive_expecting(&block.control.full[slot.index], bytes);
        bulk_copy(block.ring + slot.index * kStageBytes, from, bytes, &block.control.full[slot.index], block.policy);
      } else {
        prefetch_to_l2(from, bytes, block.policy);
      }
    }
    if (++stage == block.stages) stage = 0, row += gridDim.y;
  }
  __device__ void begin() {
    const int ring = block.plan.ring, first = ring + kPrefetch - 1;  // of those to L2
    if (prefetches) row += first / block.stages * gridDim.y, stage = first % block.stages;
    for (int slot = 0; loads && slot < ring - 1; ++slot) next({slot});
  }
};

// weight or bias of a slice, whose stages take the last of kStages places, so that only the last can be incomplete.
template <int N>
struct Affine {
  Vec<float, V> packs[N];
  Packed* shared;

  __device__ Affine(const Block& block, const void* tensor, float fallback, Packed* first) {
    shared = first + block.thread;
    UNROLL(i, kStages * kStagePacks) {
      const int pack = i * kThreads - (kStages - block.stages) * kStageSize + block.thread;
      if (pack < 0 || pack >= block.packs) continue;
      const auto values = load_affine<float, V>(tensor, true, block.first_col + pack * V, fallback);
      if (i < N) {
        packs[i < N ? i : 0] = values;
      } else {
        shared[(i - N) * kThreads] = packed<float>(values);
      }
    }
  }
  __device__ Vec<float, V> at(int i, bool exists) const {
    if (i < N) return packs[i < N ? i : 0];
    return exists ? widened(shared[(i - N) * kThreads]) : Vec<float, V>();
  }
};

// Adds a stage to this thread's moments of a row.
__device__ void measure_stage(Moments& moments, const StagePart& x, bool is_last, const Block& block) {
  const int last_packs = opaque(block.last_packs);  // else one spilled word a thread: 0.179 ms -> 0.187
  auto exists = [&](int i) { return !is_last || i * kThreads + block.thread < last_packs; };
  const float count = exists(1) ? 2 * V : exists(0) ? V : 0;
  const auto pack = [&](int i) { return widened(x[i]); };
  const float per_count = exists(1) ? 0.5f / V : 1.f / V;
  const float2 stage = measure_packs<float, 1, kStagePacks>(pack, exists, count, per_count);
  if (!is_last || count > 0) moments = combine(moments, {count, stage.x, stage.y});
}

// A row is measured: the last warp tells the group what this block has of it.
__device__ void publish_row(Moments& moments, int row, int parity, const Block& block) {
  const int warp = block.thread / 32, lane = block.thread % 32;
  Moments total = combine_lanes(moments, 32);
  moments = {};
  if (lane == 0) {
    block.control.moments[warp] = total;
    barrier_arrive(&block.control.measured);
  }
  if (warp != kWarps - 1) return;
  barrier_wait(&block.control.measured, parity);
  total = combine_lanes(block.control.moments[lane % kWarps], kWarps);
  if (lane == 0) publish(mailbox_of(block.mailboxes, row, block.rank), {total.mean, total.m2});
  __syncwarp();
}

// The last warp makes statistics of what the group has published. Others may still read the row's before.
__device__ void gather_row(int row, int parity, const Block& block) {
  if (block.thread / 32 != kWarps - 1) return;
  const int first_peer = opaque(block.thread % 32);
  float2 pairs[kPeers];
  float counts[kPeers];
  UNROLL(i, kPeers) counts[i] = columns_of_slice(block.call.cols, block.plan.slice, first_peer + i * 32);
  while (!try_read(mailbox_of(block.mailboxes, row, 0), first_peer, pairs)) {
  }
  const float3 total = combine_means<kPeers>(pairs, counts, float(block.call.cols), 32);
  const float rstd = inverse_root(total.z * block.constants.per_col + block.constants.eps);
  if (first_peer != 0) return;
  block.control.row_stats[parity] = row_stats_of(total.x, total.y, rstd);
  if (block.rank == 0) save_statistics(block.call, row, total.x + total.y, rstd);
}

// `stage` is one of the kStages places.
__device__ void apply_stage(float* output, const StagePart& x, int stage, const RowStats& row_stats,
                            const Affine<kWeights>& weight, const Affine<kBiases>& bias, const Block& block) {
  UNROLL(j, kStagePacks) {
    const int i = stage * kStagePacks + j;
    const bool exists = stage < kStages - 1 || j * kThreads + block.thread < block.last_packs;
    const auto y = normalized<float>(widened(x[j]), row_stats) * weight.at(i, exists) + bias.at(i, exists);
    if (exists) store<float, V, true>(output + j * kThreads * V, y);
  }
}

template <typename T>  // float: as a template it is compiled only where it is launched
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_joint_rows(Forward call, RowConstants constants, Plan plan, uint64_t* mailboxes) {
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control control;
  const Block block = {call, constants, plan, ring, control, mailboxes};
  const int rows = int(call.rows), groups = gridDim.y, skipped = kStages - block.stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.ring; ++i) barrier_init(&control.full[i], 1);
    for (int i = 0; i < plan.ring; ++i) barrier_init(&control.empty[i], kWarps);
    barrier_init(&control.measured, kWarps);
    barriers_initialized();
  }
  __syncthreads();

  Fetch fetch = {block};
  fetch.begin();
  empty_mailboxes(mailboxes, rows);
  Packed* affine = reinterpret_cast<Packed*>(ring + plan.ring * kStageBytes);
  const Affine<kBiases> bias(block, call.bias, 0, affine);
  const Affine<kWeights> weight(block, call.weight, 1, affine + shared_packs(block.packs, kBiases));
  Moments moments = {};               // this thread's columns of the row that is measured
  ROLLED(i, block.stages + kAhead) {  // of the group's first row, and the beginning of the second
    const bool is_last = i == block.stages - 1;
    if (i >= block.stages && blockIdx.y + groups >= rows) break;
    barrier_wait(&control.full[i], 0);
    measure_stage(moments, block.load(i), is_last, block);
    if (is_last) publish_row(moments, blockIdx.y, 0, block);
  }

  RingPosition slot;
  int row = blockIdx.y;
  for (int parity = 0; row < rows; row += groups, parity ^= 1) {
    gather_row(row, parity, block);
    __syncthreads();
    const RowStats row_stats = control.row_stats[parity];
    float* output = static_cast<float*>(call.output) + block.offset(row, -skipped) + threadIdx.x * V;
    UNROLL(stage, kStages) {
      if (stage >= skipped) {
        // Into the slot before this one, which all warps have applied, or are about to.
        if (fetch.loads || fetch.prefetches) fetch.next(slot.after(plan.ring - 1, plan.ring));
        const int ahead = stage + kAhead;
        const bool measures = row + (ahead < kStages ? 1 : 2) * groups < rows;
        const bool measures_last = ahead % kStages == kStages - 1;
        const RingPosition measuring = slot.after(block.stages + kAhead, plan.ring);
        const StagePart x = block.load(slot.index);
        if (measures) barrier_wait(&control.full[measuring.index], measuring.parity);
        const StagePart x_ahead = block.load(measuring.index);
        apply_stage(output, x, stage, row_stats, weight, bias, block);
        if (measures || !measures_last) measure_stage(moments, x_ahead, measures_last, block);
        if (measures && measures_last) publish_row(moments, row + groups, parity ^ 1, block);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&control.empty[slot.index]);
        slot.advance(plan.ring);
      }
      output += kStageColumns;
    }
  }
#else
  __trap();  // plan() keeps calls away from such code
#endif
}

// As many groups as can each hold a row, with all blocks in them.
Plan plan(const Forward& call, const Device& device) {
  const int64_t least_group = ceil_div(call.cols / V, kStages * kStageSize);
  const int64_t groups = std::min(call.rows, device.sms / least_group);
  if (device.code < 90 || device.code >= 120 || groups == 0 || call.rows < kLeastRows * groups) return {};
  const int64_t most_blocks = std::min<int64_t>(device.sms / groups, kMaxBlocksPerRow);
  const int slice = ceil_div(ceil_div(call.cols, most_blocks), 32) * 32;  // slices start on lines where rows do
  Plan p = {int(ceil_div(call.cols, slice)), int(groups), slice};
  int affine_packs = 0;
  for (const int rank : {0, p.blocks_per_row - 1}) {
    const int packs = columns_of_slice(call.cols, slice, rank) / V, stages = stages_of(packs);
    if (stages <= kAhead || stages > kStages) return {};
    affine_packs = std::max(affine_packs, shared_packs(packs, kBiases) + shared_packs(packs, kWeights));
  }
  p.ring = std::min(kRing, (device.shared_bytes - int(sizeof(Control)) - 16 * affine_packs) / kStageBytes);
  p.shared_bytes = p.ring * kStageBytes + 16 * affine_packs;
  return p.blocks_per_row > 1 && p.ring >= stages_of(slice / V) + kAhead + 2 ? p : Plan();
}

template <typename T>
cudaError_t launch(const Forward& call, const Plan& p, const Context& context) {
  const Launch launch = {dim3(p.blocks_per_row, p.groups), kThreads, kCooperative, p.shared_bytes};
  auto* mailboxes = static_cast<uint64_t*>(context.allocate(8 * call.rows * mailboxes_per_row(p.blocks_per_row)));
  return launch_kernel(layer_norm_joint_rows<T>, launch, context, call, row_constants(call, context.device), p,
                       mailboxes);
}

}  // namespace joint
"""

_SPREAD = r"""
namespace spread {

// ---- Rows spread over the GPU, forward and backward ----
// Takes every row that no other room takes, on every GPU. A first kernel reads input and measures each piece of a row
// (of what a block loads at once every `pieces`-th); a second combines a row's pieces; a third goes down the rows with
// weight and bias of its columns in registers: read for each row they would cost as much as it. Input is read twice.
// Example: 16 bf16 rows of 4194304 on 132 SMs. 33 blocks measure a row, 8192 columns at once; one more makes its
// statistics; 2048 blocks normalize 2048 columns each, of all rows.

constexpr int kThreads = 256;                     // of the first two kernels
constexpr int kMeasuringBlocks = 4;               // of the first kernel, on an SM at once: a second wave would cost 1%
constexpr int kUnalignedBlocks = 2 * kRowBlocks;  // the same, forward: loads of single elements leave registers
constexpr int64_t kLeastPiece = 8192;             // columns: in shorter pieces a block's fixed cost shows
constexpr int kTileColumns = 2048;                // of the third kernel's blocks: one 16-byte load a thread
constexpr int64_t kBlocksPerSm = 8;               // of the third kernel: blocks share rows to have so many

// A thread's columns of those that a block loads at once: a pack of V or, where V = 1, four; none if first >= cols.
template <typename T, int V, int THREADS = kTileColumns / std::max(V, 4)>
struct Columns {
  static constexpr int kThreads = THREADS, kPacks = std::max(1, 4 / V), kStep = kPacks * V * THREADS;
  using Numbers = Vec<float, kPacks * V>;
  int64_t first, cols;

  __device__ Columns(int64_t step, int64_t cols) : first(step * kStep + threadIdx.x * V), cols(cols) {}
  __device__ int64_t at(int i) const { return first + i * V * THREADS; }
  __device__ bool has(int i) const { return i == 0 || at(i) < cols; }
  static __device__ Vec<float, V>& pack(Numbers& x, int i) { return reinterpret_cast<Vec<float, V>&>(x[i * V]); }
  template <typename F>
  __device__ Numbers load_packs(F load_pack) const {  // load_pack(column)
    Numbers x = {};
    UNROLL(i, kPacks) {
      if (has(i)) pack(x, i) = load_pack(at(i));
    }
    return x;
  }
  __device__ Numbers load_row(const void* tensor, int64_t row) const {
    const T* from = static_cast<const T*>(tensor) + row * cols;
    return load_packs([&](int64_t col) { return widened(load<T, V>(from + col)); });
  }
  __device__ Numbers load_parameter(const LayerNormCall& call, const void* affine, float fallback) const {
    return load_packs([&](int64_t col) { return load_affine<T, V>(affine, call.affine_float32, col, fallback); });
  }
  // grad_output, or what the epilogue's derivative makes of it.
  __device__ Numbers load_gradient(const Backward& call, int64_t row, const Numbers& xhat,
                                   const Numbers& weight) const {
    const Numbers grad = load_row(call.grad_output, row);
    if constexpr (!kFused) return grad;
    auto pack = packed<T>(grad);
    apply_derivative<T>(pack, xhat, weight, load_parameter(call, call.bias, 0), call);
    return widened(pack);
  }
  __device__ void store_row(void* tensor, int64_t row, Numbers x) const {
    T* to = static_cast<T*>(tensor) + row * cols;
    UNROLL(i, kPacks) {
      if (has(i)) store<T, V, true>(to + at(i), pack(x, i));
    }
  }
};

// ---- Spread: first kernel ----

// Combines a block's parts; the first thread's is empty only if all are.
template <typename Part>
__device__ Part combine_block(Part part) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Part of_warps[kWarps];
  part = combine_lanes(part, 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = part;
  __syncthreads();
  return combine_lanes(of_warps[threadIdx.x % kWarps], kWarps);
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, V == 1 ? kUnalignedBlocks : kMeasuringBlocks)
    measure_pieces(Forward call, int pieces, Moments* moments_of_pieces, RowStats* row_stats) {
  let_next_start();
  constexpr int kPacks = V == 1 ? 8 : 4;
  const int64_t row = blockIdx.x % call.rows, cols = call.cols, step = kPacks * V * kThreads;
  const int piece = blockIdx.x / call.rows;
  const T* input = static_cast<const T*>(call.input) + row * cols;
  auto sampled = [&](int i) { return widen(input[sampled_column(cols, i)]); };
  const float reference = sizeof(T) == 2 ? 0 : reference_of(sampled(0), sampled(1), sampled(2));
  if (piece == 0 && threadIdx.x == 0) row_stats[row].mean = reference;  // until finish()
  Moments moments = {};
  for (int64_t first = piece * step + threadIdx.x * V; first < cols; first += pieces * step) {
    Pack<T, V> packs[kPacks];
    int count = 0;
    UNROLL(i, kPacks) {
      const int64_t col = first + i * V * kThreads;
      if (i == 0 || col < cols) packs[i] = load<T, V>(input + col), count += V;
    }
    const auto x = [&](int i) { return widened(packs[i]) - reference; };
    const auto has = [&](int i) { return i * V < count; };
    const float2 part = measure_packs<T, 1, kPacks>(x, has, count, 1 / float(count));
    moments = combine(moments, {float(count), part.x, part.y});
  }
  moments = combine_block(moments);
  if (threadIdx.x == 0) moments_of_pieces[row * pieces + piece] = moments;
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kMeasuringBlocks)
    measure_pieces(Backward call, int pieces, Sums* sums_of_pieces, Sums*) {
  let_next_start();
  const int64_t row = blockIdx.x % call.rows;
  const int piece = blockIdx.x / call.rows;
  const float mean = call.mean[row], rstd = call.rstd[row];
  Sums sums = {};
  Columns<T, V, kThreads> columns(piece, call.cols);
  for (; columns.first < call.cols; columns.first += pieces * columns.kStep) {
    const auto weight = columns.load_parameter(call, call.weight, 1);
    const auto xhat = (columns.load_row(call.input, row) - mean) * rstd;
    const auto wdy = product(weight, columns.load_gradient(call, row, xhat, weight));
    Sums here = {};  // short sums first: thousands of terms one by one would lose digits
    UNROLL(v, wdy.kSize) {
      if (columns.has(v / V)) here.wdy += wdy[v], here.wdy_xhat += wdy[v] * xhat[v];
    }
    sums = combine(sums, here);
  }
  sums = combine_block(sums);
  if (threadIdx.x == 0) sums_of_pieces[row * pieces + piece] = sums;
}

// ---- Spread: second kernel ----

__device__ inline void finish(const Forward& call, int64_t row, const Moments& moments, RowStats& stats) {
  const float reference = stats.mean, rstd = inverse_root(moments.m2 / float(call.cols) + float(call.eps));
  stats = row_stats_of(reference, moments.mean, rstd);
  save_statistics(call, row, reference + moments.mean, rstd);
}
__device__ inline void finish(const Backward& call, int64_t, const Sums& sums, Sums& means) {
  means = {sums.wdy / float(call.cols), sums.wdy_xhat / float(call.cols)};
}

template <typename Call, typename Part, typename ForRow>
__global__ void __launch_bounds__(kThreads) finish_rows(Call call, int pieces, const Part* parts, ForRow* for_rows) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  Part part = {};
  for (int i = threadIdx.x; i < pieces; i += kThreads) part = combine(part, parts[row * pieces + i]);
  part = combine_block(part);
  if (threadIdx.x == 0) finish(call, row, part, for_rows[row]);
}

// ---- Spread: third kernel ----

template <typename T, int V>
__global__ void __launch_bounds__(512)
    normalize_columns(Forward call, const RowStats* row_stats, int64_t rows_per_block) {
  const Columns<T, V> columns(gridDim.x - 1 - blockIdx.x, call.cols);  // from the last back, which L2 still holds
  if (columns.first >= call.cols) return;
  const auto weight = columns.load_parameter(call, call.weight, 1), bias = columns.load_parameter(call, call.bias, 0);
  wait_for_previous();
  const int64_t first_row = blockIdx.y * rows_per_block;
  ROLLED(r, min(rows_per_block, call.rows - first_row)) {  // unrolled, fewer blocks fit an SM
    const int64_t row = first_row + r;
    const RowStats stats = row_stats[row];
    auto y = normalized<T>(columns.load_row(call.input, row), stats) * weight + bias;
    apply_epilogue<T>(y, opaque_activation<kFused>(Epilogue{call.activation, float(call.scale)}));
    columns.store_row(call.output, row, y);
  }
}

// The bounds let a third block of 512 threads fit an SM (of 256: a fourth); with an activation a third would spill.
template <typename T, int V>
__global__ void __launch_bounds__(Columns<T, V>::kThreads, V == 8 ? 4 : kRowBlocks - kFused)
    backward_columns(Backward call, const Sums* row_means, int64_t rows_per_block, float* partials) {
  const Columns<T, V> columns(gridDim.x - 1 - blockIdx.x, call.cols);  // from the last back, which L2 still holds
  if (columns.first >= call.cols) return;
  wait_for_previous();  // also for weight: where grad_input is not wanted, its writer may be the previous kernel
  const auto weight = columns.load_parameter(call, call.weight, 1);
  const int64_t first_row = blockIdx.y * rows_per_block;
  const int rows_here = min(rows_per_block, call.rows - first_row);  // 0 or less: this block's sums are 0
  int r = 0;
  do {
    typename Columns<T, V>::Numbers grad_weight = {}, grad_bias = {};
    const bool is_first = r == 0;
#pragma unroll 1
    for (const int end = min(r + kRowsPerSum, rows_here); r < end; ++r) {
      const int64_t row = first_row + r;
      const float mean = call.mean[row], rstd = call.rstd[row];
      const Sums means = call.grad_input != nullptr ? row_means[row] : Sums{};
      const auto xhat = (columns.load_row(call.input, row) - mean) * rstd;
      const auto grad = columns.load_gradient(call, row, xhat, weight);
      const auto dx = (product(weight, grad) - means.wdy - xhat * means.wdy_xhat) * rstd;
      grad_weight = grad_weight + grad * xhat, grad_bias = grad_bias + grad;
      if (call.grad_input != nullptr) columns.store_row(call.grad_input, row, dx);
    }
    UNROLL(i, columns.kPacks) {
      if (!columns.has(i)) continue;
      add_gradients<T>(call, partials, columns.at(i), columns.pack(grad_weight, i), columns.pack(grad_bias, i),
                       is_first);
    }
  } while (r < rows_here);
}

// ---- Spread: host side ----

template <typename T, int V, typename Call>
cudaError_t launch(const Call& call, const Context& context) {
  constexpr bool kForward = std::is_same_v<Call, Forward>;
  using Part = std::conditional_t<kForward, Moments, Sums>;
  using ForRow = std::conditional_t<kForward, RowStats, Sums>;
  const int64_t rows = call.rows, cols = call.cols, places = kMeasuringBlocks * context.device.sms;
  const int64_t waves = ceil_div(8 * rows, places);  // whole ones, for 8 pieces a row: at most 1/9 idle
  const int pieces = std::min(ceil_div(cols, kLeastPiece), std::max<int64_t>(1, waves * places / rows));
  const int64_t tiles = ceil_div(cols, kTileColumns);
  const int64_t wanted = std::min(rows, kBlocksPerSm * context.device.sms / tiles);
  const int64_t row_blocks = std::max<int64_t>({1, wanted, rows / kRowsPerSum});
  const int64_t rows_per_block = ceil_div(rows, row_blocks);
  // With a single sum per column, that is the gradient.
  const int64_t partial_rows = kForward || (row_blocks == 1 && rows <= kRowsPerSum) ? 0 : row_blocks;
  const int64_t sums_of_columns = 2 * partial_rows * cols;
  auto* partials = static_cast<float*>(
      context.allocate(sums_of_columns * sizeof(float) + rows * (sizeof(ForRow) + pieces * sizeof(Part))));
  auto* for_rows = reinterpret_cast<ForRow*>(partials + sums_of_columns);
  auto* parts = reinterpret_cast<Part*>(for_rows + rows);
  bool is_measured = true;
  if constexpr (!kForward) is_measured = call.grad_input != nullptr;
  if (is_measured) {
    measure_pieces<T, V><<<rows * pieces, kThreads, 0, context.stream>>>(call, pieces, parts, for_rows);
    launch_kernel(finish_rows<Call, Part, ForRow>, {rows, kThreads, kProgrammatic}, context, call, pieces, parts,
                  for_rows);
  }
  const Launch by_columns = {dim3(tiles, row_blocks), Columns<T, V>::kThreads, kProgrammatic};
  if constexpr (kForward) {
    launch_kernel(normalize_columns<T, V>, by_columns, context, call, for_rows, rows_per_block);
  } else {
    launch_kernel(backward_columns<T, V>, by_columns, context, call, for_rows, rows_per_block,
                  partial_rows > 0 ? partials : nullptr);
    launch_sum_partials(call, partials, partial_rows, context);
  }
  return cudaGetLastError();  // that of any of these launches
}

}  // namespace spread
"""

_CONVOLUTION = r"""
#ifdef LAYERNORM_WITH_EPILOGUE
namespace convolution {

// ---- Convolution: ConvTranspose3d, then LayerNorm, GELU and scaling (sm_80 and up) ----
// With kernel 4, stride 2 and padding 1, output 2 q + p of a dimension is, over taps t = 0 and 1, the sum of input q +
// p - t times weight 1 - p + 2 t: output 5 reads inputs 3 and 2, with weights 0 and 2. So outputs of one parity p in
// each dimension are a dense convolution, and one line of them, all columns of 64 channels, is a product of matrices:
// channels x (taps, input channels) x columns. A block keeps the weights of one parity of depth and of height on chip.
// Its two groups of four warps take four lines a round, two apart in height, and in the next round those at the next
// depth: one of the two depths that they read is there already. Four lanes hold a row of LayerNorm, 64 columns of one
// channel, in registers. T is of 16 bits or float; float is rounded to TF32 or, if SPLIT, keeps its digits.

constexpr int kInChannels = 32, kOutChannels = 64, kInWidth = 32, kOutWidth = 2 * kInWidth;
constexpr int kLines = 4;                                                           // of a round
constexpr int kGroups = 2, kGroupThreads = 128;                                     // of a block
constexpr int kTileChannels = 16;                                                   // a tile has them of one line
constexpr int kTiles = kLines * kOutChannels / kTileChannels * 32 / kGroupThreads;  // of a warp
constexpr int kRows = 2 * kTiles;                                                   // of a lane: a quarter of each
constexpr int kFragment = 2 * kOutChannels;  // units: a product's weights for one tap of w
using Unit = Pack<uint32_t, 4>;

// Products of sm_90a (wgmma) read shared memory themselves; four more warps load for them (TF32: 0.61 ms -> 0.58).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasAsyncProducts = true;
#else
constexpr bool kHasAsyncProducts = false;
#endif
constexpr int kComputingRegisters = 224, kLoadingRegisters = 56;
static_assert(kGroupThreads * (kGroups * kComputingRegisters + kLoadingRegisters) <= 65536, "an SM's");

// A slab is a round's input of one depth: units of kUnit channels, and zeros beside the first and last column.
template <typename T, bool SPLIT, bool ASYNC = !SPLIT && kHasAsyncProducts>
struct Layout {
  using Element = T;
  static constexpr bool kSplit = SPLIT, kAsync = ASYNC;
  static constexpr int kThreads = kGroupThreads * (kGroups + ASYNC), kSlabLines = kLines + 1;
  static constexpr int kUnit = 16 / sizeof(T), kPlanes = kInChannels / kUnit, kChunks = kPlanes / 2;
  static constexpr int kSteps = 4 * kChunks;         // of four fragments: a tap of d, a tap of h, two planes
  static constexpr int kEightStep = ASYNC ? 10 : 8;  // units from 8 columns to the next; 10 with copies of neighbours
  static constexpr int kLineStep = ASYNC ? 4 * kEightStep : kInWidth + 2;
  static constexpr int kPlaneStep = kSlabLines * kLineStep | 1;       // odd: four planes are spread over the banks
  static constexpr int kRegisterFragments = ASYNC && sizeof(T) == 4;  // no room in shared memory
  static constexpr int kUnits = kPlanes * kPlaneStep, kSharedFragments = 4 * kSteps - kRegisterFragments;
  static constexpr int kBytes = 16 * (kSharedFragments * kFragment + kGroups * 2 * kUnits) + 4 * 2 * kOutWidth;
  static constexpr int kWarpsAcross = ASYNC ? 4 : 2;  // share a line, each with kTilesAcross of its tiles
  static constexpr int kTilesAcross = kOutChannels / kTileChannels / kWarpsAcross;

  static __device__ int unit_at(int plane, int line, int column) {
    return plane * kPlaneStep + line * kLineStep + column / 8 * kEightStep + column % 8 + 1;
  }
  // What a step's product with tap 0 of w, parity 0, takes for an output line: its first unit.
  static __device__ int input_at(int step, int line, int column) {
    return unit_at(step % kChunks * 2, line + 1 - step / kChunks % 2, column);
  }
  // Channel and line of a thread's row, from those of its first row.
  static __device__ int channel_of(int row) { return row / 2 % kTilesAcross * kTileChannels + row % 2 * 8; }
  static __device__ int line_of(int row) { return row / 2 / kTilesAcross; }
};
static_assert(Layout<float, false, true>::kBytes <= 227 << 10, "Hopper's");

// Tensor cores take 10 bits of mantissa. Ties go to even, as in cuDNN: up, one output of 850 would be off by > 1e-4.
__device__ inline uint32_t factor_of(uint32_t x, bool rounded) {
  if (isnan(__uint_as_float(x))) return 0x7fc00000;  // arithmetic's, 0x7fffffff, would carry into the sign
  return rounded ? x + 0xfff + (x >> 13 & 1) : x;
}

// Weights as products take them: (parity of d, of h, tap of d, of h, chunk of two planes, parity of w, tap of w, i).
template <typename T>
__global__ void __launch_bounds__(kFragment * 16 / sizeof(T)) arrange_weights(Convolution call, T* arranged) {
  using L = Layout<T, false>;
  constexpr int kUnit = L::kUnit, kWord = 4 / sizeof(T);  // channels in a unit, in a register
  const int i = threadIdx.x, fragment = blockIdx.x, taps = fragment / 4 / L::kChunks;
  const bool rounded = sizeof(T) == 2 || call.tf32;
  const int word = i / kWord, lane = word / 4 % 32;  // of mma.sync's (16 output channels, lane, register)
  int out = word / 128 * kTileChannels + word % 2 * 8 + lane / 4;
  int in = word / 2 % 2 * kUnit + lane % 4 * kWord + i % kWord;
  if (kHasAsyncProducts && rounded) {  // wgmma's (unit, output channel, input channel in the unit)
    out = i / kUnit % kOutChannels, in = i / kUnit / kOutChannels * kUnit + i % kUnit;
  }
  in += fragment / 4 % L::kChunks * 2 * kUnit;
  auto weight_at = [](int parity, int tap) { return 1 - parity % 2 + 2 * (tap % 2); };
  const int d = weight_at(taps / 8, taps / 2), h = weight_at(taps / 4, taps);
  const int w = weight_at(fragment / 2, fragment);
  T weight = static_cast<const T*>(call.conv_weight)[(((in * kOutChannels + out) * 4 + d) * 4 + h) * 4 + w];
  if constexpr (sizeof(T) == 4) {
    const T bias = call.conv_bias == nullptr ? 0 : static_cast<const T*>(call.conv_bias)[out];
    weight += bias - bias;  // leaves with the mean of a row, unless it is NaN or infinite
    weight = __uint_as_float(factor_of(__float_as_uint(weight), rounded));
  }
  arranged[fragment * blockDim.x + i] = weight;
}

// ---- Convolution: instructions ----

#define LAYERNORM_MULTIPLY_ADD_SYNC(types)                                                        \
  asm volatile("mma.sync.aligned." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// c += a * b, of 16 rows, two units and 8 columns.
template <typename T>
__device__ inline void multiply_add(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, float>) {
    LAYERNORM_MULTIPLY_ADD_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32");
  } else if constexpr (std::is_same_v<T, __half>) {
    LAYERNORM_MULTIPLY_ADD_SYNC("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    LAYERNORM_MULTIPLY_ADD_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32");
  }
}

#define LAYERNORM_SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define LAYERNORM_SUMS_16(i) \
  LAYERNORM_SUMS_4(i), LAYERNORM_SUMS_4(i + 4), LAYERNORM_SUMS_4(i + 8), LAYERNORM_SUMS_4(i + 12)
#define LAYERNORM_MULTIPLY_ADD(types, factors, transposed, ...)                                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." types                            \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"    \
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,"        \
               "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, " factors ", p, 1, 1" transposed "; }" \
               : LAYERNORM_SUMS_16(0), LAYERNORM_SUMS_16(16), LAYERNORM_SUMS_16(32), LAYERNORM_SUMS_16(48)           \
               : __VA_ARGS__                                                                                         \
               : "memory")

// c += a * b: 64 rows, 16 a warp, of two units by two units of 128 columns. A: registers or a matrix in shared memory.
template <typename T, typename A>
__device__ void multiply_add_async(float (&c)[64], const A& a, uint64_t b) {
  if constexpr (std::is_array_v<A>) {
    LAYERNORM_MULTIPLY_ADD("m64n128k8.f32.tf32.tf32", "{%64, %65, %66, %67}, %68", "", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                           "r"(a[3]), "l"(b));
  } else if constexpr (std::is_same_v<T, float>) {
    LAYERNORM_MULTIPLY_ADD("m64n128k8.f32.tf32.tf32", "%64, %65", "", "l"(a), "l"(b));
  } else if constexpr (std::is_same_v<T, __half>) {
    LAYERNORM_MULTIPLY_ADD("m64n128k16.f32.f16.f16", "%64, %65", ", 0, 0", "l"(a), "l"(b));
  } else {
    LAYERNORM_MULTIPLY_ADD("m64n128k16.f32.bf16.bf16", "%64, %65", ", 0, 0", "l"(a), "l"(b));
  }
}

// A barrier of some warps: `threads` threads wait at it, or only arrive.
__device__ inline void named_barrier_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Of group 0, and the next of group 1: may multiply, input is there, input was read. 0 is __syncthreads.
enum : int { kTurn = 1, kFull = kTurn + kGroups, kEmpty = kFull + kGroups };

// ---- Convolution: what the steps share ----

// Outputs of one parity of d and of h, in a range of rounds, through depths first; group 0 takes its first half.
template <typename L>
struct Block {
  const Convolution& call;
  const Unit* fragments;  // of its weights
  Unit* weights;          // in shared memory, as the next two
  float* affine = reinterpret_cast<float*>(weights + L::kSharedFragments * kFragment);
  Unit* slabs = reinterpret_cast<Unit*>(affine + 2 * kOutWidth);
  int parity_d = blockIdx.x % 4 / 2, parity_h = blockIdx.x % 2;
  int line_groups = (call.height + kLines - 1) / kLines;
  int first_round = rounds_before(blockIdx.x / 4);
  int all_rounds = rounds_before(blockIdx.x / 4 + 1) - first_round;
  int warp = threadIdx.x % kGroupThreads / 32;
  int first_line = warp / L::kWarpsAcross * (kTiles / L::kTilesAcross);  // of this thread's rows, as first_channel
  int first_channel = warp % L::kWarpsAcross * L::kTilesAcross * kTileChannels + threadIdx.x % 32 / 4;

  __device__ int rounds_before(int block) const {
    return call.batch * line_groups * call.depth * block / (gridDim.x / 4);
  }
  __device__ int rounds(int group) const { return group == 0 ? all_rounds - all_rounds / 2 : all_rounds / 2; }
};

// A round of a group: its outputs are at q = d of depth, and from q = h of height on.
template <typename L>
struct Round {
  const Block<L>& block;
  int group, index;
  int place = block.first_round + group * block.rounds(0) + index, lines = place / block.call.depth;
  int batch = lines / block.line_groups, d = place % block.call.depth, h = lines % block.line_groups * kLines;

  // Of d. The second tap's slab is the first tap's of the round before, but for the first depth.
  __device__ int new_taps() const { return index == 0 || d == 0 ? 2 : 1; }
  __device__ Unit* slab(int tap) const { return block.slabs + (2 * group + (index + tap) % 2) * L::kUnits; }
};

// A thread's sums, of kRows rows: (parity of w, tile, 8 columns of a parity, register).
struct Sums {
  float at[2][16 * kTiles];

  // Number i of 16 of a row: column 16 (i / 4) + 4 (lane % 4) + i % 4.
  __device__ float& operator()(int row, int i) { return at[i % 2][row / 2 * 16 + i / 4 * 4 + row % 2 * 2 + i / 2 % 2]; }
  __device__ Vec<float, 4> four(int row, int i) {  // from number i on
    return {(*this)(row, i), (*this)(row, i + 1), (*this)(row, i + 2), (*this)(row, i + 3)};
  }
};

// ---- Convolution: input ----

// Calls f for what this thread brings of a round's input: kUnit channels of a plane, kUnit columns, of some lines.
template <typename L, typename F>
__device__ void for_share(const Round<L>& round, F f) {
  constexpr int kHalves = 8 / L::kUnit;  // of 8 columns, and of planes
  constexpr int kLineThreads = 16 * kHalves * kHalves, kSweep = kGroupThreads / kLineThreads;
  const int thread = threadIdx.x % kGroupThreads, i = thread / kHalves;
  const int plane = i % 4 + i / 16 % kHalves * 4, column = i / 4 % 4 * 8 + thread % kHalves * L::kUnit;
  ROLLED(tap, round.new_taps()) {
    UNROLL(sweep, (L::kSlabLines + kSweep - 1) / kSweep) {
      const int line = thread / kLineThreads + sweep * kSweep;
      if (line < L::kSlabLines) f(round.slab(tap) + L::unit_at(plane, line, column), tap, plane, line, column);
    }
  }
}

// Starts copies of a round's input; kUnit columns of a channel go where kUnit channels of a column will be.
template <typename L>
__device__ void fetch(const Round<L>& round) {
  const Convolution& call = round.block.call;
  const auto* input = static_cast<const typename L::Element*>(call.input);
  const int64_t channel_step = int64_t(call.depth) * call.height * kInWidth;
  for_share(round, [&](Unit* units, int tap, int plane, int line, int column) {
    const int d = round.d + round.block.parity_d - tap, h = round.h + round.block.parity_h - 1 + line;
    const bool exists = d >= 0 && d < call.depth && h >= 0 && h < call.height;
    const auto* from = input + (int64_t(round.batch) * kInChannels + plane * L::kUnit) * channel_step + column +
                       (exists ? (int64_t(d) * call.height + h) * kInWidth : 0);
    UNROLL(i, L::kUnit) copy_or_zero(units + i, from + i * channel_step, exists);
  });
}

// Transposes what this thread has fetched, and rounds it.
template <typename L>
__device__ void arrange(const Round<L>& round) {
  using T = typename L::Element;
  constexpr int kUnit = L::kUnit;
  wait_for_copies();
  for_share(round, [&](Unit* units, int, int, int, int column) {
    alignas(16) T channels[kUnit][kUnit], columns[kUnit][kUnit];
    UNROLL(i, kUnit) reinterpret_cast<Unit&>(channels[i]) = units[i];
    UNROLL(i, kUnit * kUnit) {
      T& x = columns[i / kUnit][i % kUnit] = channels[i % kUnit][i / kUnit];
      if constexpr (sizeof(T) == 4) x = __uint_as_float(factor_of(__float_as_uint(x), !L::kSplit));
    }
    auto write = [&](int to, int i) { units[to] = reinterpret_cast<const Unit&>(columns[i]); };
    UNROLL(i, kUnit) write(i, i);
    if (L::kAsync) {  // copies beside the 8 columns before, and the next 8
      if (column % 8 == 0 && column > 0) write(-2, 0);
      if (column % 8 == 8 - kUnit && column < kInWidth - 8) write(kUnit + 1, kUnit - 1);
    }
  });
  if (L::kAsync) writes_before_copies();
}

// ---- Convolution: products ----

// The compiler would wait for each async product if it could move the sums.
__device__ inline void keep_in_registers(Sums& sums) {
  UNROLL(i, 2 * 16 * kTiles) asm volatile("" : "+f"(sums.at[i / 64][i % 64])::"memory");
}

// Taps from last to first, channels in each: cuDNN's order on Hopper, which makes sums PyTorch's, bit for bit.
template <typename L>
__device__ void multiply_async(Sums& sums, const Round<L>& round, const uint32_t (&register_fragment)[4]) {
  using T = typename L::Element;
  // Addresses are in units, and lane 0's: the compiler then knows that all lanes have the same.
  auto address = [](const Unit* p) { return __shfl_sync(~0u, shared_address(p) / 16, 0); };
  const unsigned slabs[2] = {address(round.slab(0)), address(round.slab(1))};
  const unsigned weights = address(round.block.weights);
  keep_in_registers(sums);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  UNROLL(i, 4 * L::kSteps) {
    const int parity_w = i % 2, chunk = i / 2 % L::kChunks, taps = 7 - i / 2 / L::kChunks;
    const int step = taps / 2 * L::kChunks + chunk, tap_w = taps % 2;
    const int fragment = 4 * step + 2 * parity_w + tap_w - L::kRegisterFragments;
    const unsigned columns = slabs[step / L::kPlanes] + L::input_at(step, 0, 0) + parity_w - tap_w;
    // A matrix: where it begins, the step to the next plane, that to the next 8 columns or channels.
    const uint64_t b = uint64_t(L::kEightStep) << 32 | (columns + (L::kPlaneStep << 16));
    const uint64_t a = uint64_t(8) << 32 | (weights + fragment * kFragment + (kOutChannels << 16));
    if (fragment < 0) {
      multiply_add_async<T>(sums.at[parity_w], register_fragment, b);
    } else {
      multiply_add_async<T>(sums.at[parity_w], a, b);
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_registers(sums);
}

// Float32 as the sum of two numbers of 10 bits, to 2^-22 of it. Volatile: no registers are left to keep all `second`.
template <int N>
__device__ void split(const uint32_t (&x)[N], uint32_t (&first)[N], uint32_t (&second)[N]) {
  UNROLL(i, N) {
    uint32_t high;
    first[i] = x[i] + 0x1000;
    asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(high) : "r"(first[i]));
    second[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high)) + 0x1000;
  }
}

// c += a * b; if SPLIT, three products of parts (Ootomo, Yokota, 2022, arXiv:2203.03341).
template <typename L>
__device__ void multiply_add_parts(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  using T = typename L::Element;
  if (!L::kSplit) return multiply_add<T>(c, a, b);
  uint32_t a1[4], a2[4], b1[2], b2[2];
  split(a, a1, a2);
  split(b, b1, b2);
  multiply_add<T>(c, a2, b1);
  multiply_add<T>(c, a1, b2);
  multiply_add<T>(c, a1, b1);
}

// A step at a time, with all weights of the step in registers.
template <typename L>
__device__ void multiply(Sums& sums, const Round<L>& round) {
  const int lane = threadIdx.x % 32, first_line = round.block.first_line;
  const Unit* weights = round.block.weights + round.block.first_channel / kTileChannels * 32 + lane;
  ROLLED(step, L::kSteps) {
    Unit a[2][2][2];  // parity of w, 16 of the channels, tap of w
    UNROLL(i, 8) a[i / 4][i % 2][i / 2 % 2] = weights[(4 * step + i / 2) * kFragment + i % 2 * 32];
    UNROLL(i, 8) {  // 8 columns of one of two lines
      const Unit* units = round.slab(step / L::kPlanes) + L::input_at(step, first_line + i / 4, i % 4 * 8);
      const auto* from = reinterpret_cast<const uint32_t*>(units - 1) + lane;
      uint32_t b[3][2];  // shifted by -1, 0, 1
      UNROLL(k, 6) b[k / 2][k % 2] = from[4 * (k / 2 + k % 2 * L::kPlaneStep)];
      UNROLL(k, 4) {
        const int channels = k / 2, parity_w = k % 2;
        float* c = sums.at[parity_w] + (i / 4 * 2 + channels) * 16 + i % 4 * 4;
        float sum[4] = {};  // tensor cores truncate: no more than 6 products before a rounded addition
        UNROLL(tap, 2) {
          multiply_add_parts<L>(L::kSplit ? sum : c, a[parity_w][channels][tap].at, b[1 + parity_w - tap]);
        }
        UNROLL(n, L::kSplit ? 4 : 0) c[n] += sum[n];
      }
    }
  }
}

// ---- Convolution: from sums to output ----

// Rounds as PyTorch does, before and after adding the bias: unrounded, 0.07% of bfloat16 outputs would be too far off.
template <typename T>
__device__ void add_conv_bias(Sums& sums, const uint32_t (&conv_bias)[kRows]) {
  UNROLL(i, 16 * kTiles) {
    float* pair = &sums.at[i / 32][i % 32 * 2];  // of one row
    const uint32_t bias = conv_bias[i % 32 / 8 * 2 + i % 2];
    const float2 sum = widen_pair<T>(add_pairs<T>(narrow_pair<T>(pair[0], pair[1]), bias));
    pair[0] = sum.x, pair[1] = sum.y;
  }
}

// A row becomes its distances from the mean, with which float32's conv_bias would leave. Returns rstd.
__device__ inline float center_row(Sums& sums, int row, float eps) {
  Vec<float, 4> sum_of_four;  // in a tree, which is exact for equal numbers
  UNROLL(i, 4) sum_of_four[i] = sum_of<float>(sums.four(row, 4 * i));
  float m2 = 0;
  const float mean = combine_lanes(sum_of<float>(sum_of_four), 4) * (1.0f / kOutWidth);
  UNROLL(i, 16) sums(row, i) -= mean, m2 += sums(row, i) * sums(row, i);
  return rsqrtf(combine_lanes(m2, 4) * (1.0f / kOutWidth) + eps);
}

// Distances and rstd where backward asks for them, else GELU of the layer norm, with the digits of products.
template <typename L>
__device__ void write_rows(const Round<L>& round, Sums& sums, const float (&rstd)[kRows]) {
  using T = typename L::Element;
  const Block<L>& block = round.block;
  const Convolution& call = block.call;
  const int quarter = threadIdx.x % 4 * 4, line = round.h + block.first_line;
  const int64_t step = int64_t(call.depth) * 2 * call.height * 2 * kOutWidth;  // to the next channel
  const int64_t first = (int64_t(round.batch) * kOutChannels + block.first_channel) * step +
                        (int64_t(2 * round.d + block.parity_d) * call.height + line) * 2 * kOutWidth +
                        block.parity_h * kOutWidth + quarter;
  auto at = [&](int row) { return first + L::channel_of(row) * step + L::line_of(row) * 2 * kOutWidth; };
  auto exists = [&](int row) { return L::line_of(row) < call.height - line; };
  T* output = static_cast<T*>(call.output);
  if (call.rstd != nullptr) {
    UNROLL(row, kRows) {
      if (!exists(row)) continue;
      if (quarter == 0) call.rstd[at(row) / kOutWidth] = rstd[row];
      UNROLL(i, 4) store<T, 4, true>(output + at(row) + 16 * i, sums.four(row, 4 * i));
    }
    return;
  }
  constexpr auto kTail = L::kSplit ? normal_tail : sizeof(T) == 4 ? normal_tail_5_digits : normal_tail_16_bits;
  UNROLL(j, 4) {
    const float* affine = block.affine + 16 * j + quarter;
    const auto weight = widened(load<float, 4>(affine)), bias = widened(load<float, 4>(affine + kOutWidth));
    UNROLL(row, kRows) {
      auto z = sums.four(row, 4 * j) * rstd[row] * weight + bias;
      UNROLL(i, 4) z[i] = float(call.scale) * gelu_of_tail(z[i], kTail(fabsf(z[i])));
      if (exists(row)) store<T, 4, true>(output + at(row) + 16 * j, z);
    }
  }
}

// ---- Convolution: what warps do ----

// All of a block, before its first round.
template <typename L>
__device__ void fill_shared(const Block<L>& block) {
  const Convolution& call = block.call;
  for (int i = threadIdx.x; i < L::kSharedFragments * kFragment; i += blockDim.x) {
    block.weights[i] = block.fragments[L::kRegisterFragments * kFragment + i];
  }
  for (int i = threadIdx.x; i < kGroups * 2 * L::kUnits; i += blockDim.x) block.slabs[i] = {};
  if (threadIdx.x < 2 * kOutWidth) {
    const void* affine = threadIdx.x < kOutWidth ? call.weight : call.bias;
    block.affine[threadIdx.x] = load_affine<typename L::Element, 1>(
        affine, call.affine_float32, threadIdx.x % kOutWidth, threadIdx.x < kOutWidth ? 1 : 0)[0];
  }
}

// The loading warps: both groups' input, a round of each in turns.
template <typename L>
__device__ void load_rounds(const Block<L>& block) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadingRegisters));
  ROLLED(i, block.all_rounds) {
    const Round<L> round = {block, i % kGroups, i / kGroups};
    if (round.index > 0) named_barrier_wait(kEmpty + round.group, 2 * kGroupThreads);
    fetch(round);
    arrange(round);
    named_barrier_arrive(kFull + round.group, 2 * kGroupThreads);
  }
}

// A group's warps: multiply, normalize, write.
template <typename L>
__device__ void compute_rounds(const Block<L>& block, int group) {
  using T = typename L::Element;
  const Convolution& call = block.call;
  uint32_t conv_bias[kRows] = {}, register_fragment[4] = {};  // conv_bias: of a row, twice
  UNROLL(row, sizeof(T) == 2 ? kRows : 0) {
    const float bias = load_affine<T, 1>(call.conv_bias, false, block.first_channel + L::channel_of(row), 0)[0];
    conv_bias[row] = narrow_pair<T>(bias, bias);
  }
  UNROLL(i, 4 * L::kRegisterFragments) {
    const Unit* unit = block.fragments + i / 2 * kOutChannels + block.first_channel + L::channel_of(i % 2);
    register_fragment[i] = unit->at[threadIdx.x % 4];
  }
  ROLLED(index, block.rounds(group)) {
    const Round<L> round = {block, group, index};
    Sums sums = {};
    if constexpr (L::kAsync) {  // while the other group normalizes and writes
      named_barrier_wait(kFull + group, 2 * kGroupThreads);
      if (group == 1 || index > 0) named_barrier_wait(kTurn + group, 2 * kGroupThreads);
      multiply_async(sums, round, register_fragment);
      // Where another turn follows. With 2 * index + group the compiler copies the loop (13% more code).
      if (group == 0 ? index < block.rounds(1) : index + 1 < block.rounds(0)) {
        named_barrier_arrive(kTurn + 1 - group, 2 * kGroupThreads);
      }
      if (index + 1 < block.rounds(group)) named_barrier_arrive(kEmpty + group, 2 * kGroupThreads);
    } else {  // the next round's input comes while this group normalizes and writes
      if (index == 0) fetch(round);
      arrange(round);
      named_barrier_wait(kFull + group, kGroupThreads);
      multiply(sums, round);
      named_barrier_wait(kEmpty + group, kGroupThreads);
      if (index + 1 < block.rounds(group)) fetch(Round<L>{block, group, index + 1});
    }
    if constexpr (sizeof(T) == 2) add_conv_bias<T>(sums, conv_bias);
    float rstd[kRows];
    UNROLL(row, kRows) rstd[row] = center_row(sums, row, call.eps);
    write_rows(round, sums, rstd);
  }
}

template <typename T, bool SPLIT>
__global__ void __launch_bounds__(Layout<T, SPLIT>::kThreads, 1)
    conv_transpose_layer_norm_gelu(Convolution call, const Unit* arranged) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) Unit conv_shared[];
  using L = Layout<T, SPLIT>;
  const Block<L> block = {call, arranged + blockIdx.x % 4 * (4 * L::kSteps * kFragment), conv_shared};
  const int group = threadIdx.x / kGroupThreads;
  fill_shared(block);
  __syncthreads();
  if constexpr (L::kAsync) {
    if (group == kGroups) return load_rounds(block);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
  }
  compute_rounds(block, group);
#else
  __trap();  // fits() keeps calls away from such code
#endif
}

// ---- Convolution: host side ----

// Calls f with the layout of Hopper's code, which takes the most shared memory.
template <typename F>
auto with_layout(DType dtype, bool tf32, F f) {
  if (dtype == DType::Float16) return f(Layout<__half, false, true>());
  if (dtype == DType::BFloat16) return f(Layout<__nv_bfloat16, false, true>());
  return tf32 ? f(Layout<float, false, true>()) : f(Layout<float, true, false>());
}

bool fits(DType dtype, bool tf32, const Device& device) {
  const int shared_bytes = with_layout(dtype, tf32, [](auto layout) { return decltype(layout)::kBytes; });
  return device.code >= 80 && device.shared_bytes >= shared_bytes;
}

cudaError_t launch(const Convolution& call, const Context& context) {
  return with_layout(call.dtype, call.tf32, [&](auto layout) {
    using L = decltype(layout);
    using T = typename L::Element;
    constexpr int kFragments = 4 * 4 * L::kSteps, kElements = kFragment * L::kUnit;  // kElements: of each
    T* arranged = static_cast<T*>(context.allocate(sizeof(T) * kFragments * kElements));
    arrange_weights<T><<<kFragments, kElements, 0, context.stream>>>(call, arranged);
    const auto kernel = conv_transpose_layer_norm_gelu<T, L::kSplit>;
    cudaFuncAttributes attributes = {};  // compiled with loading warps or without
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    const int blocks = std::max(1, context.device.sms / 4) * 4;  // as many of each parity
    return launch_kernel(kernel, {blocks, attributes.maxThreadsPerBlock, kPlain, L::kBytes}, context, call,
                         reinterpret_cast<const Unit*>(arranged));
  });
}

}  // namespace convolution
#endif
"""

_DISPATCH = r"""
// ---- Dispatch: the GPU ----

const Device& current_device() {
  static Device devices[128];  // PyTorch numbers them in 8 bits
  int d = 0;
  cudaGetDevice(&d);
  Device& device = devices[d];
  std::call_once(device.asked, [&] {  // now: cudaFuncGetAttributes asks about the current device
    cudaDeviceGetAttribute(&device.sms, cudaDevAttrMultiProcessorCount, d);
    cudaDeviceGetAttribute(&device.l2_bytes, cudaDevAttrL2CacheSize, d);
    cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, d);
    cudaFuncAttributes attributes = {};
    cudaFuncGetAttributes(&attributes, sum_partials);
    device.code = attributes.ptxVersion;
    int driver = 0;
    cudaDriverGetVersion(&driver);
    device.allows_programmatic = std::min(CUDART_VERSION, driver) >= 12030 && device.code >= 90;
  });
  return device;
}

// ---- Dispatch: which room takes a call ----

// Rows are spread where no other room takes them, or the device refuses blocks that wait for one another.
template <typename T, int V>
cudaError_t dispatch(const Forward& call, const Context& context) {
  const Device& device = context.device;
  constexpr bool kAligned = V > 1;
  if (registers::takes(call, !kAligned)) return registers::launch<T, !kAligned>(call, context);
  if constexpr (kAligned && !kFused) {
    if (shared::takes<T>(call, device)) return shared::launch<T>(call, context);
    if (pipeline::takes<T>(call, device)) {
      if (const cudaError_t error = pipeline::launch<T>(call, context); !cannot_cooperate(error)) return error;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (const joint::Plan plan = joint::plan(call, device); plan.blocks_per_row > 0) {
        if (const cudaError_t error = joint::launch<T>(call, plan, context); !cannot_cooperate(error)) return error;
      }
    }
  }
  return spread::launch<T, V>(call, context);
}

// Long aligned rows go to the pipeline, where there is one, even if registers could hold them.
template <typename T, int V>
cudaError_t dispatch(const Backward& call, const Context& context) {
  constexpr bool kAligned = V > 1;
  const bool in_registers = registers::takes(call, V);
  if constexpr (kAligned && !kFused) {
    const bool is_long = call.cols * int(sizeof(T)) > registers::kBytesBeforePipeline;
    if ((is_long || !in_registers) && pipeline::takes<T>(call, context.device)) {
      if (const cudaError_t error = pipeline::launch<T>(call, context); !cannot_cooperate(error)) return error;
    }
  }
  if (in_registers) return registers::launch<T, V>(call, context);
  return spread::launch<T, V>(call, context);
}

// V elements a load: 16 bytes where every row of every tensor starts on a 16-byte boundary, else 1.
template <typename Call>
cudaError_t dispatch(const Call& call, const Context& context, std::initializer_list<const void*> tensors) {
  uintptr_t bits = uintptr_t(call.cols) * size_of(call.dtype);
  for (const void* p : tensors) bits |= reinterpret_cast<uintptr_t>(p);
  const auto dispatch_as = [&](auto element) {
    using T = decltype(element);
    return bits % 16 == 0 ? dispatch<T, 16 / sizeof(T)>(call, context) : dispatch<T, 1>(call, context);
  };
  switch (call.dtype) {
    case DType::Float16: return dispatch_as(__half());
    case DType::BFloat16: return dispatch_as(__nv_bfloat16());
    default: return dispatch_as(float());
  }
}

}  // namespace

cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream) {
  return dispatch(call, {current_device(), allocate, stream}, {call.input, call.weight, call.bias, call.output});
}

cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream) {
  const Context context = {current_device(), allocate, stream};
  if (call.rows == 0) {  // the gradients of weight and bias are sums of nothing
    const Launch launch = {dim3(ceil_div(call.cols, kSumThreads), 2), kSumThreads};
    return launch_kernel(sum_partials, launch, context, call, nullptr, 0);
  }
  return dispatch(call, context, {call.grad_output, call.input, call.weight, call.bias, call.grad_input});
}

#ifdef LAYERNORM_WITH_EPILOGUE
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream) {
  return convolution::launch(call, {current_device(), allocate, stream});
}

bool fits_convolution(DType dtype, bool tf32) { return convolution::fits(dtype, tf32, current_device()); }
#endif

}  // namespace TORCH_EXTENSION_NAME
"""

_ROOMS = (_ELEMENTS, _STATISTICS, _EPILOGUE, _DEVICE, _ROWS, _REGISTERS, _SHARED, _PIPELINE, _JOINT, _SPREAD)
CUDA_SOURCE = "".join((_INTERFACE, *_ROOMS, _CONVOLUTION, _DISPATCH))

# ============================================================================
# 6  Load: at the import
# ============================================================================

# Names the ops, after the sources alone: a program that was saved on one machine finds them on another.
_NAME = "layernorm_inline_" + hashlib.sha256((CUDA_SOURCE + CPP_SOURCE).encode()).hexdigest()[:12]

_epilogue_ops = getattr(torch.ops, _NAME + "_epilogue")  # empty before _load_epilogue
_ops, _why_not = _load(_NAME)
_layer_norm_op = _ops and _ops.layer_norm.default  # looked up once, because a small call takes only 16 us
