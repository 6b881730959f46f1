# SPDX-License-Identifier: MIT
"""layernorm_inline: a drop-in nn.LayerNorm for NVIDIA GPUs, in one file.

What it is
    CUDA kernels for the forward and backward of layer normalization, which are faster than PyTorch's own. CUDA tensors
    of dtype float32, float16 and bfloat16 run these kernels or raise an error. PyTorch's operations are used for
    float64, for tensors on other devices, in exported programs, and for some rows under torch.compile (layer_norm lists
    the cases). Gradients can be differentiated again, and work with torch.func and in forward mode.

How to use it
    Copy this file into your project. It needs Linux, Python 3.9 or newer, PyTorch 2.0 or newer built with CUDA 11.8 or
    newer, ninja, setuptools, a C++ compiler, and an nvcc of the same major version as PyTorch's CUDA. If that is CUDA
    13, pip can install nvcc: `pip install "cuda-toolkit[nvcc,crt,cccl]"`. PyTorch before 2.8 also needs Python.h.

        from layernorm_inline import LayerNorm, layer_norm, replace_layer_norm

        norm = LayerNorm(768).cuda()                  # the arguments of nn.LayerNorm
        y = norm(x)
        y = layer_norm(x, (768,), weight, bias)       # the arguments of PyTorch's function; also activation and scale
        replace_layer_norm(model)                     # converts every nn.LayerNorm inside, in place

    For KernelBench, ModelNew is level 1 problem 40, and ConvTranspose3dLayerNormGELUScaling is level 2 problem 34.
    Otherwise they cost nothing: the convolution is part of the second library (see below).

What the import does
    The first import compiles the kernels in 15 to 30 s and stores the library in the folder TORCH_EXTENSIONS_DIR
    (default: ~/.cache/torch_extensions). Later imports load that library. A second library contains the kernels for
    activations, scale and the convolution. It is compiled on their first use, or when
    ConvTranspose3dLayerNormGELUScaling is constructed.
    The import compiles for all GPUs of the machine, which it finds without initializing CUDA (unless the driver lacks
    NVML, as on Jetson). On a machine without a GPU, it compiles for the architectures that the environment variable
    TORCH_CUDA_ARCH_LIST names. If that names none, nothing is compiled, and only calls with CUDA tensors raise an
    error. The import itself raises if compiling fails. It leaves PyTorch and the environment variables unchanged.

How to read it
    The file has six sections:
        1  Python API    what users call
        2  Build         finds the compiler, compiles a library once, keeps it in a cache
        3  Interface     the structs that describe a call: the binding fills them, the kernels read them
        4  C++ binding   checks, allocation, autograd, vmap and autocast; registers the ops with PyTorch's dispatcher
        5  CUDA          the kernels
        6  Load          the code that the import runs
    The CUDA section is a list of strings, which are compiled as one source. Start with _OVERVIEW. Its table shows the
    kernel families in the order in which _DISPATCH tries them, which rows each family supports, and why it is fast.
    Each family has one string, and uses strings that several families share. The first lines of a string name the
    earlier ones that it uses:
        shared by most     _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _EPILOGUE, _WEIGHT_GRADIENTS
        shared by some     _ROWS (whole rows), _ASYNC (asynchronous copies), _EXCHANGE (blocks that share a row)
        kernel families    _REGISTERS, _TWO_PASS, _SHARED_MEMORY, _PIPELINED, _GRID_RESIDENT, _CONVOLUTION
    To follow one call, read layer_norm in section 1, layer_norm_autograd and layer_norm_forward in section 4, launch
    and dispatch in _DISPATCH, and launch in the string of the kernel family (in _REGISTERS: launch_forward).
    .tests/README.md in the repository says which tests to run after a change of each part.

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

__version__ = "0.3.0"
__all__ = ["ConvTranspose3dLayerNormGELUScaling", "LayerNorm", "ModelNew", "layer_norm", "replace_layer_norm"]
__all__ += ["CPP_SOURCE", "CUDA_SOURCE"]  # the two sources that are compiled

# ============================================================================
# 1  Python API
# ============================================================================
#
# Safe changes, and what guards them:
#   - Every result must agree with nn.LayerNorm's: test_layer_norm_agrees_with_nn_layer_norm (test_modules.py), also on
#     the CPU (test_layer_norm_on_the_cpu_is_equal_to_pytorchs), and test_errors_on_the_cpu_equal_pytorchs
#     (test_binding.py) for errors.
#   - _is_left_to_pytorch decides only which kernels run under torch.compile, so any answer gives correct results there
#     if sizes are ints and eps is a float. For other types it must return True, because the ops reject them
#     (test_arguments_of_numpy_work_under_torch_compile). While exporting it must return True as well, so that programs
#     load without this file. test_rows_that_are_left_to_inductor and
#     test_recorded_programs_load_without_layernorm_inline (test_compile.py) state the answers. Time .bench/models.py
#     after a change.
#   - The order of the checks in layer_norm costs host time only, except that overrides of __torch_function__ come first
#     (test_layer_norm_calls_torch_function_overrides) and Dynamo must be able to trace what precedes the op
#     (test_torch_compile_in_one_graph_agrees_with_eager). Tests compare words of the messages.
#   - replace_layer_norm must not convert a class whose forward it does not know:
#     test_replace_layer_norm_warns_about_skipped_modules.
#   - ConvTranspose3dLayerNormGELUScaling: _in_one_kernel must not accept more than the kernel computes. The op
#     `convolution` in section 4 checks shapes, dtypes and devices only. It does not see the stride, padding,
#     output_padding, dilation, hooks and autocast, so if one of these is accepted wrongly, results are silently wrong
#     (test_conv_fused_conditions). If _in_one_kernel accepts less, PyTorch's convolution runs, which is slower.


# Maps the name of an activation to: the struct in the CUDA string _EPILOGUE that computes it, PyTorch's operation in
# Python, the same operation in C++, and its gradient in C++. z is the input of the activation, grad is the gradient of
# its output.
#
# To add an activation, add an entry here, its struct in _EPILOGUE, and `#include <ATen/ops/...>` in CPP_SOURCE for its
# two C++ operations; the enum class Activation and the checks of arguments are generated from this dict. Then add it to
# FORMS in .tests/cases.py and to ACTIVATIONS and `activated` in .tests/reference.py, so that the tests of all
# activations cover it, and to the docstring of layer_norm.
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
# The values of C++'s enum class Activation, whose enumerators _INTERFACE generates in the same order.
_ACTIVATION_NUMBERS = {name: number for number, name in enumerate(_ACTIVATION_NAMES)}

# PyTorch's own classes, from the modules that define them. A program can assign another class to the name nn.LayerNorm.
_TorchLayerNorm = nn.modules.normalization.LayerNorm
_TorchConvTranspose3d = nn.modules.conv.ConvTranspose3d

# The comparisons of torch.__version__ with a string compare version numbers, because it is a TorchVersion.
_OVERRIDES_ARE_TRACED = torch.__version__ >= "2.2"  # older versions of Dynamo cannot trace has_torch_function_variadic
# This function returns True while Dynamo traces, for torch.compile or for a strict torch.export.
_is_dynamo_tracing = torch.compiler.is_dynamo_compiling if torch.__version__ >= "2.5" else torch._utils.is_compiling
_tracing_state = torch._C._get_tracing_state  # this function returns None unless torch.jit.trace runs
_HAS_EXPORT_FLAG = torch.__version__ >= "2.7"  # the flag that _is_exporting reads

# The longest rows that _is_left_to_pytorch leaves to Inductor: in bytes, and under autocast in columns. Replaced models
# with such rows were 1% to 5% slower when the op ran them (GPT-2, ViT and ConvNeXt on an H200, training).
_INDUCTOR_ROW_BYTES, _INDUCTOR_AUTOCAST_COLUMNS = 16 << 10, 16 << 10


def _is_exporting():
    """Returns True while torch.export runs, strict or not.

    Reads the flag and does not call torch.compiler.is_exporting(), because some versions of Dynamo replace that call by
    True, also under torch.compile.
    """
    return _HAS_EXPORT_FLAG and torch.compiler._is_exporting_flag


def _is_left_to_pytorch(input, normalized_shape, eps):
    """Returns True if torch.compile or torch.export should record PyTorch's layer_norm instead of an op of this file.

    Exported programs must load without this file, so they do not contain its ops (with PyTorch 2.7 or newer; older
    versions do not tell that they export, see _is_exporting).

    Under torch.compile, Inductor fuses PyTorch's layer_norm with the operations around it, such as the residual
    addition before it and, under autocast, the casts to float32 and back. It cannot fuse an op of this file. The faster
    kernel outweighs that only for long rows and, without autocast, for rows that are not a multiple of 16 bytes.
    """
    columns = 1
    for size in normalized_shape:
        if not isinstance(size, int):
            return True  # Dynamo represents a NumPy number as a tensor, which the op does not accept as a size
        columns = columns * size
    if _is_exporting() or not isinstance(eps, (float, int)):
        return True
    if torch.is_autocast_enabled():
        return columns <= _INDUCTOR_AUTOCAST_COLUMNS
    row_bytes = columns * input.element_size()
    return row_bytes <= _INDUCTOR_ROW_BYTES and row_bytes % 16 == 0


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

    CUDA tensors of dtype float32, float16 and bfloat16 run this file's kernels. PyTorch's operations are used instead:
      - for float64 and on other devices
      - in forward mode, for the derivatives of gradients, and for gradients inside of torch.vmap; with an activation or
        scale also for gradients with create_graph=True
      - in programs that torch.export and torch.onnx.export (with PyTorch 2.7 or newer), torch.jit.trace or
        torch.jit.script record, so that these programs load without this file
      - under torch.compile, for rows of at most 16 KB whose size is a multiple of 16 bytes (with autocast: for rows of
        at most 16384 columns), because torch.compile fuses PyTorch's operation with those around it

    Numerics and determinism: statistics and arithmetic are float32 for every dtype. For float32 tensors, the largest
    error of a result is at most 1.5 times that of PyTorch's layer_norm, plus 1 ulp of the largest element (tested
    against float64). A row whose sum exceeds float32's 3.4e38 can become NaN where PyTorch's result stays finite.
    Forward and backward are deterministic: tensors of the same values, shapes, dtypes and alignment give the same bits
    in every run on the same GPU. Results are not batch-invariant: the last bits of a row can change with the number of
    rows beside it, because that number decides which kernel runs.

    Streams and memory: the kernels run on PyTorch's current stream, and CUDA graphs can capture them. Backward
    allocates up to about 32 MB of scratch memory, or 1/64 of input's bytes if that is more; forward needs less. Tensors
    that are not contiguous are copied first, and in backward also 16-bit tensors that do not start at a multiple of 4
    bytes. Several blocks can share an aligned row of at least 4096 columns, and wait for one another (a cooperative
    launch). Such a kernel starts when all of its blocks fit the GPU at once. If another kernel keeps a multiprocessor
    busy until work runs that is queued after the layer norm, neither ends.

    Args:
        input: shape (*, *normalized_shape), any strides.
        normalized_shape: sequence of at least one int.
        weight, bias: shape normalized_shape, or None. Their dtype is that of input; for float16 and bfloat16 input,
            float32 is allowed, too. If both are given, they have the same dtype.
        eps: added to the variance, in units of input squared.
        activation: None, "gelu" (exact, with erf) or "gelu_tanh" (https://arxiv.org/abs/1606.08415).
        scale: a number. A Tensor is not accepted, because it would get no gradient.

    Returns:
        A contiguous Tensor of input's shape and dtype (float32 under CUDA autocast, like nn.LayerNorm).

    Raises:
        RuntimeError: shapes, dtypes or devices do not match, or the kernels were not compiled for input's GPU.
            NotImplementedError, which is a RuntimeError, if the kernels do not support input's dtype.
        TypeError: an argument has a type that PyTorch's layer_norm does not accept, or scale is not a number.
        ValueError: activation is unknown.

    Example:
        >>> x = torch.randn(32, 768, device="cuda")
        >>> y = layer_norm(x, (768,), torch.ones(768, device="cuda"), activation="gelu")
    """
    if (_OVERRIDES_ARE_TRACED or not _is_dynamo_tracing()) and has_torch_function_variadic(input, weight, bias):
        keywords = dict(weight=weight, bias=bias, eps=eps, activation=activation, scale=scale)
        return handle_torch_function(layer_norm, (input, weight, bias), input, normalized_shape, **keywords)
    if type(scale) is not float and not isinstance(scale, numbers.Real):  # the first test is only for speed
        raise TypeError(f"Expected scale to be a number, but got {type(scale).__name__}")
    if activation not in _ACTIVATION_NAMES:  # a tuple, because a dict raises TypeError for an unhashable activation
        raise ValueError(f"Expected activation to be one of {_ACTIVATION_NAMES}, but got {activation!r}")
    runs_on_cuda = isinstance(input, torch.Tensor) and input.is_cuda and input.dtype is not torch.float64
    if not runs_on_cuda or _tracing_state() is not None:  # torch.jit.trace, or torch.onnx.export without dynamo
        return _torch_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale)
    if _is_dynamo_tracing() or _is_exporting():
        if _is_left_to_pytorch(input, normalized_shape, eps):  # also returns True for types that the op rejects
            return _torch_layer_norm(input, normalized_shape, weight, bias, eps, activation, scale)
    elif not _has_usual_types(normalized_shape, weight, bias, eps):
        # Calls PyTorch's function with no rows, and ignores the result. It raises a TypeError if it does not accept
        # the types.
        _VF.layer_norm(input[None][:0], normalized_shape, weight, bias, eps)
        normalized_shape, eps = [int(size) for size in normalized_shape], float(eps)
    if _layer_norm_op is None:
        raise RuntimeError(f"layernorm_inline: cannot run on {input.device}: {_why_not}.")
    if activation is None and scale == 1:
        return _layer_norm_op(input, normalized_shape, weight, bias, eps)
    _load_epilogue()
    activation_number = _ACTIVATION_NUMBERS[activation]
    return _epilogue_ops.layer_norm.default(input, normalized_shape, weight, bias, eps, activation_number, scale)


def _has_usual_types(normalized_shape, weight, bias, eps):
    """Returns True if the op accepts arguments of these types as they are.

    If not, layer_norm lets PyTorch check them, and converts them.
    """
    if type(normalized_shape) not in (tuple, list, torch.Size) or type(eps) not in (float, int):
        return False
    for size in normalized_shape:  # faster than all() with a generator, and every call runs it
        if type(size) is not int:
            return False
    return (weight is None or isinstance(weight, torch.Tensor)) and (bias is None or isinstance(bias, torch.Tensor))


class LayerNorm(_TorchLayerNorm):
    """nn.LayerNorm with the forward and backward of this file.

    Everything but forward is inherited, so the constructor accepts the arguments of the installed PyTorch's
    nn.LayerNorm. The docstring of layer_norm describes shapes, dtypes, errors, numerics and determinism.

    Example:
        >>> norm = LayerNorm(768).cuda()
        >>> y = norm(torch.randn(32, 768, device="cuda"))
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous Tensor of input's shape (*, *normalized_shape) and dtype. See layer_norm."""
        if torch.jit.is_scripting():
            return _VF.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        else:  # TorchScript does not compile this branch, but it would compile the code after a return
            return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class ModelNew(LayerNorm):
    """LayerNorm under the class name that KernelBench expects.

    It also loads the state_dict of problem 40's reference model, whose keys are ln.weight and ln.bias.
    """

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
    of modules are skipped with a warning: subclasses of nn.LayerNorm that are not in `types`, because their forward may
    differ, and modules whose class or forward was already replaced (parametrize, FSDP's fully_shard, accelerate's
    hooks). Call replace_layer_norm before those. A third warning says that no nn.LayerNorm was found.

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
        # True for an object that was made before importlib.reload defined the class LayerNorm again.
        is_reloaded = name == f"{LayerNorm.__module__}.{LayerNorm.__qualname__}"
        if "forward" in vars(child) or (cls is not _TorchLayerNorm and name.startswith("torch.")):
            skipped["modules whose class or forward was already replaced; call replace_layer_norm first"][name] += 1
        elif cls in classes or is_reloaded:
            child.__class__ = LayerNorm
        elif cls is not _TorchLayerNorm:
            kind = "subclasses; list those whose forward computes the same function in types=(nn.LayerNorm, ...)"
            skipped[kind][name] += 1
    report = [
        f"skipped {kind}: {', '.join(f'{name} ({count})' for name, count in names.items())}"
        for kind, names in skipped.items()
    ]
    if not report and not any(isinstance(m, LayerNorm) for m in module.modules()):
        report = [f"found no nn.LayerNorm in {type(module).__name__}"]
    if report:
        warnings.warn(f"replace_layer_norm {'. It '.join(report)}.", stacklevel=2)
    return module


# The methods as they are at the import. A program may patch them later.
_ORIGINAL_FORWARDS = {cls: cls.forward for cls in (_TorchConvTranspose3d, LayerNorm)}
_HOOK_KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def _is_plain(module, cls):
    """Returns True if calling the module runs cls.forward and nothing else (no subclass, no hooks, no patches)."""
    return (
        type(module) is cls
        and "forward" not in vars(module)
        and cls.forward is _ORIGINAL_FORWARDS[cls]
        and not any(
            getattr(module, f"_{hooks}") or getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOK_KINDS
        )
    )


class ConvTranspose3dLayerNormGELUScaling(nn.Module):
    """scaling_factor * GELU(LayerNorm(ConvTranspose3d(x))), the model of KernelBench's level 2 problem 34.

    LayerNorm normalizes the last dimension, which is the output's width W'. W' must equal out_channels, otherwise
    forward raises a RuntimeError. Parameters, state_dict keys and initialization are those of an nn.ConvTranspose3d
    named conv_transpose and an nn.LayerNorm(out_channels) named layer_norm.

    One kernel computes the whole model for CUDA tensors if all of these hold:
      - 32 input and 64 output channels, kernel 4, stride 2, padding 1, input width 32
      - input and parameters have the same dtype, which is float32, float16 or bfloat16, and autocast is off
      - the two modules have neither hooks nor patches, and scaling_factor is a number
      - the GPU has enough shared memory per block: 227 KB for float32 (214 KB without TF32), 115 KB for 16 bits
      - the model is not being recorded by torch.export or torch.jit.trace
    For float32, the kernel multiplies in TF32 if PyTorch allows it for convolutions. Its backward computes the
    convolution again, so neither the convolution's nor LayerNorm's output is kept for it.

    Otherwise PyTorch computes the convolution, and the function layer_norm computes LayerNorm, GELU and scaling, with
    one kernel or with PyTorch's operations. If the module layer_norm has hooks or patches, or if scaling_factor is a
    Tensor, LayerNorm, GELU and scaling are separate operations.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, bias: as for nn.ConvTranspose3d.
        eps: as for nn.LayerNorm.
        scaling_factor: a number. It can be replaced by a Tensor later.

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
        """Returns True if one kernel can compute the model for x. The op itself checks the GPU's shared memory."""
        conv, norm = self.conv_transpose, self.layer_norm
        return (
            _ops is not None
            and not _is_exporting()
            and _tracing_state() is None
            and isinstance(x, torch.Tensor)
            and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(t.is_cuda and t.dtype == x.dtype for t in (x, *self.parameters()))
            and not torch.is_autocast_enabled()
            and x.dim() == 5
            and x.shape[1] == x.shape[4] == 32
            and _is_plain(conv, _TorchConvTranspose3d)
            and _is_plain(norm, LayerNorm)
            and conv.weight.shape == (32, 64, 4, 4, 4)
            and (conv.stride, conv.padding, conv.output_padding) == ((2, 2, 2), (1, 1, 1), (0, 0, 0))
            and (conv.dilation, conv.groups, norm.normalized_shape) == ((1, 1, 1), 1, (64,))
            and isinstance(self.scaling_factor, numbers.Real)  # a Tensor may need a gradient
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
        return torch.ops.aten.gelu(norm(y)) * self.scaling_factor  # calling norm runs its hooks and patches


# ============================================================================
# 2  Build: compile once, cache, load
# ============================================================================
#
# _load(name) returns the ops of a library. The steps, with an example of what each returns:
#
#   _architectures()       the GPUs' architectures, or those in TORCH_CUDA_ARCH_LIST    ["sm_80", "sm_90"]
#   _codes(...)            the codes that nvcc must generate for them                   ["sm_80", "sm_90a"]
#   _find_library(...)     the folder of a finished library that has all these codes    None on the first import
#   _build(...)            the folder of a library that it compiles, if none was found
#
# "Code" is nvcc's word for one result of compiling: sm_90a is machine code for one architecture, and compute_90 is PTX,
# which the driver compiles for the GPU. One library can contain several codes. The layout of the cache:
#
#   $TORCH_EXTENSIONS_DIR/
#     layernorm_inline_<hash of the sources>/         _cache(name)
#       build.lock                                    locked by the process that compiles
#       <hash of versions and flags>-sm_80-sm_90a/    _library_folder(cache, codes), one per set of codes
#         layernorm_inline_<hash of the sources>.so   _library_path(folder)
#         complete                                    the size of the library in bytes, written last
#
# This file catches errors only with contextlib.suppress or _SuppressAndKeep (below), in this pattern:
#
#   with _SuppressAndKeep(OSError) as caught:
#       return steps()
#   raise RuntimeError(f"... {caught.error}")  # only if steps() raised an OSError; other errors are not caught
#
# Where the block does not return, the line after it is reached in both cases, and `error` is None if all went well.
#
# Safe changes, and what guards them. Tests without a file name are in .tests/test_build.py.
#   - Flags can be changed and added in _CUDA_FLAGS and _CPP_FLAGS, which are part of the folder's name, so that all
#     libraries are compiled again. If one of these is left out of the name,
#     test_one_namespace_of_ops_for_all_libraries fails. No test notices a flag that is added only in _compiler_flags.
#   - A library is found by the names of its folders and the file `complete`, without a lock. So everything that changes
#     what the library computes must be in these names (sources, versions, flags, codes), and `complete` must be written
#     last (tests with "incomplete_library" and "container" in their names). The compilers are not in the names: a
#     library is kept if another nvcc or g++ is installed.
#   - The supported architectures are decided in _codes. Its results are listed at
#     test_codes_follow_from_gpus_and_arch_list. The order of _toolkits is not tested, only that each toolkit is found.
#   - Compiling changes the process: environment variables (PATH, TORCH_CUDA_ARCH_LIST), cpp_extension.CUDA_HOME and a
#     logging filter. Every change must be registered with an ExitStack named `restored`, which undoes it. For variables
#     and CUDA_HOME, test_an_error_of_the_build_reaches_the_user_at_each_import fails otherwise. Run it alone: if
#     another test has left the same variable set, it notices nothing. For the filter,
#     test_looking_for_pytorchs_compiler_leaves_logging_unchanged fails.
#   - The _process_lock keeps two threads from compiling at the same time (test_threads_import_copies_of_the_file), and
#     build.lock does the same for processes (tests with "the_lock" and "many_processes" in their names).
#   - Any other way to catch errors makes test_file_follows_the_static_rules (test_kernelbench.py) fail.

_CUDA_FLAGS = ["-O1"]  # for host code; nvcc always optimizes device code
_CPP_FLAGS = ["-O2"]
_OLDEST_CUDA = (11, 8)  # the first version with cudaLaunchKernelExC
_CACHE_ADVICE = "Name another folder in the environment variable TORCH_EXTENSIONS_DIR."

# A wrapper that is placed on PATH as `ninja`. If this Python process dies, the wrapper is killed and ninja receives
# SIGTERM, so that no compiler keeps running. If this process has died before prctl is called, ninja is not started.
_NINJA_WRAPPER = """#!/bin/sh
exec {python} -IS -c '
import ctypes, os, subprocess, sys
prctl = ctypes.CDLL(None).prctl
prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.getppid() == {parent} and sys.exit(subprocess.call(sys.argv[1:], preexec_fn=lambda: prctl(1, 15)))
' {ninja} "$@"
"""


class _SuppressAndKeep(contextlib.suppress):
    """A contextlib.suppress that keeps the error that it suppressed in the attribute `error`.

    This file catches errors only with suppress, because KernelBench's static rules reject the usual statement.
    """

    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.error = error
        return super().__exit__(kind, error, traceback)


def _print(message):
    """Prints a message to stderr."""
    if sys.stderr is not None:  # None if the process was started without stderr
        print(f"layernorm_inline: {message}", file=sys.stderr)


def _output(*command):
    """Returns what a command prints to stdout and, if it fails, to stderr. Returns "" if it cannot be run."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return done.stdout + (done.stderr if done.returncode else "")
    return ""


def _parse_version(text):
    """Returns (12, 4) for "12.4"."""
    return tuple(map(int, text.split(".")[:2]))


def _architecture_number(code):
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
    """Imports torch.utils.cpp_extension and returns it.

    The module looks for GPUs when it is first imported. The environment variable makes PyTorch use NVML for that, which
    does not initialize CUDA. The filter hides the module's warning that the machine lacks a GPU.
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

    They are read from NVML, a library of the driver, because NVML does not initialize CUDA. CUDA_VISIBLE_DEVICES can
    therefore still be set after the import, and the process can still be forked. For the same reason the result
    contains all GPUs, not only the visible ones. It is empty if CUDA_VISIBLE_DEVICES hides all GPUs, or if the driver's
    major CUDA version is older than PyTorch's.
    """
    # CUDA hides all GPUs if the first entry is none of: a number as C's atoi reads it, GPU-<uuid>, MIG-<uuid>.
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
                    continue  # this process is not allowed to use this GPU
                if nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)) == 0:
                    capabilities.append((major.value, minor.value))
            nvml.nvmlShutdown()
            return capabilities if driver.value // 1000 >= _parse_version(torch.version.cuda)[0] else []
    # NVML is missing, for example on Jetson, so CUDA is used.
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.cuda.get_device_capability(device) for device in devices]


def _architectures():
    """Returns the architectures of this machine's GPUs, for example ["sm_80", "sm_90"].

    Without a GPU, returns those in TORCH_CUDA_ARCH_LIST, which PyTorch parses: "8.0;9.0+PTX" names sm_80, sm_90 and
    compute_90. A list that is empty or "native" names none.
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
    """Returns the codes that nvcc must generate for these architectures.

    That is sm_90a for sm_90, because only sm_90a has wgmma, and nothing for architectures older than Turing (7.5).
    CUDA 11 lacks instructions that the kernels use on Hopper, so it generates compute_80 for Hopper and newer GPUs.
    """
    codes = {"sm_90a" if code == "sm_90" else code for code in architectures if _architecture_number(code) >= 75}
    if _parse_version(torch.version.cuda)[0] == 11:
        codes = {"compute_80" if _architecture_number(code) >= 90 else code for code in codes}
    return sorted(codes, key=lambda code: (_architecture_number(code), code))


def _toolkits():
    """Yields folders that may contain a CUDA toolkit, in order of preference. Some may be None.

    These are the toolkit that PyTorch finds, the one of the nvcc on PATH, /usr/local/cuda, and those that pip installs.
    """
    yield _cpp_extension().CUDA_HOME
    # The nvcc on PATH can be a wrapper outside of the toolkit. A dry run prints the toolkit's folder.
    top = re.search(r"^#\$ TOP=(.*)$", _output("nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null"), re.M)
    yield top and top[1]
    yield "/usr/local/cuda"
    yield from (os.path.join(path, "nvidia", f"cu{_parse_version(torch.version.cuda)[0]}") for path in sys.path)


def _find_cuda_home():
    """Returns the folder and the version of the first CUDA toolkit that can compile for this PyTorch.

    It needs nvcc, headers and PyTorch's major CUDA version. Raises a RuntimeError that says how to install one if none
    is found.
    """
    major = _parse_version(torch.version.cuda)[0]
    rejected = []
    for home in dict.fromkeys(os.path.abspath(home) for home in _toolkits() if home):
        nvcc = os.path.join(home, "bin", "nvcc")
        # Conda's toolkit has its headers in a folder targets/*/include.
        headers = [f"{glob.escape(home)}/{p}include/cuda_runtime_api.h" for p in ("", "targets/*/")]
        if os.path.exists(nvcc) and any(map(glob.glob, headers)):
            version_text = _output(nvcc, "--version")
            release = re.search(r"release (\d+\.\d+)|$", version_text)[1]  # None if there is no release
            if release and _parse_version(release)[0] == major and _parse_version(release) >= _OLDEST_CUDA:
                return home, release
            problem = (
                f"belongs to CUDA {release}" if release else f"does not run ({version_text.strip() or 'no output'})"
            )
            rejected.append(f"the nvcc in {home} {problem}")
    missing = "nvcc was not found in CUDA_HOME, on PATH, in /usr/local/cuda or among the installed Python packages"
    needed = "11.8" if major == 11 else str(major)
    advice = f"Install NVIDIA's or conda's CUDA toolkit {needed} and set CUDA_HOME to its folder."
    if major >= 13:
        advice = 'Run: pip install "cuda-toolkit[nvcc,crt,cccl]"'
    built = f"PyTorch {torch.__version__} was built with CUDA {torch.version.cuda} and needs an nvcc of CUDA {needed}"
    raise RuntimeError(f"layernorm_inline: {', '.join(rejected) or missing}; {built}. {advice}")


def _check_host_compiler():
    """Raises a RuntimeError with advice if the C++ compiler or Python's headers are missing."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        advice = "Install one, for example with: apt install g++, or name it in the environment variable CXX."
        raise RuntimeError(f"layernorm_inline: the C++ compiler {compiler} was not found. {advice}")
    headers = sysconfig.get_path("include")
    if torch.__version__ < "2.8" and not os.path.exists(os.path.join(headers, "Python.h")):
        advice = "Install them, for example with: apt install python3-dev, or use PyTorch 2.8 or newer."
        raise RuntimeError(f"layernorm_inline: Python's headers (Python.h) were not found in {headers}. {advice}")


def _add_ninja_to_path(restored, folder):
    """Puts _NINJA_WRAPPER on PATH, before the ninja that it calls, until the ExitStack `restored` is closed."""
    path = os.environ.get("PATH", os.defpath)
    # In older ninja packages, the ninja on PATH is a Python script, and the program is in the data folder. The program
    # comes first, because a signal would end the script but not the program that it runs.
    places = [*(f"{p}/ninja/data/bin" for p in sys.path), path, sysconfig.get_path("scripts")]
    ninja = shutil.which("ninja", path=os.pathsep.join(places))
    python = shutil.which("python3", path=os.path.dirname(sys.executable or "") + os.pathsep + path)
    if ninja and python:
        values = dict(python=shlex.quote(python), parent=os.getpid(), ninja=shlex.quote(os.path.abspath(ninja)))
        Path(folder, "ninja").write_text(_NINJA_WRAPPER.format(**values))
        os.chmod(f"{folder}/ninja", 0o755)
    _set_environment(restored, PATH=os.pathsep.join([folder, *places]))


def _library_path(folder):
    """Returns the path of the library in a folder. The library is named after the parent folder."""
    return f"{folder}/{os.path.basename(os.path.dirname(folder))}.so"


def _supported_codes(cuda_home, release, codes):
    """Returns (the codes that nvcc can generate, a remark about the others or ""). Raises if it can generate none."""
    listed = _output(f"{cuda_home}/bin/nvcc", "--list-gpu-code")
    if "sm_" not in listed:
        raise RuntimeError(f"layernorm_inline: {cuda_home}/bin/nvcc --list-gpu-code failed: {listed.strip()}")
    supported = [code for code in codes if f"sm_{_architecture_number(code)}" in listed.split()]
    unsupported = ", ".join(code for code in codes if code not in supported)
    remark = f"the nvcc of CUDA {release} does not support {unsupported}: install a newer one" if unsupported else ""
    if not supported:
        raise RuntimeError(f"layernorm_inline: {remark}.")
    return supported, remark


def _compiler_flags(name, cuda_home, codes):
    """Returns the flags for the C++ compiler and those for nvcc.

    All of them follow from _CPP_FLAGS, _CUDA_FLAGS, the library's name and the codes, which name the library's folder,
    or do not change the machine code. Other flags must not be added here: a library in the cache would be loaded that
    was compiled without them.
    """
    macros = ["-DLAYERNORM_HAS_EPILOGUE"] if name.endswith("_epilogue") else []
    cuda_flags = [f"-gencode=arch={code.replace('sm', 'compute')},code={code}" for code in codes]
    if "--split-compile" in _output(f"{cuda_home}/bin/ptxas", "--help"):  # not in CUDA 11
        # Assembles the kernels in parallel, to the same machine code. Compiling then needs a third less time (measured
        # on 16 cores).
        cuda_flags += ["-Xptxas", f"--split-compile={min(8, len(os.sched_getaffinity(0)))}"]
    return [*_CPP_FLAGS, *macros], [*_CUDA_FLAGS, *macros, *cuda_flags]


def _load_inline(name, folder, cuda_home, compiled_for, cpp_flags, cuda_flags):
    """Calls PyTorch's load_inline, and undoes what it and this function change in the process."""
    cpp_extension = _cpp_extension()
    # PyTorch marks an extension as built as soon as its build starts. Without this line it would not build again after
    # a failure.
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
            extra_cflags=cpp_flags,
            extra_cuda_cflags=cuda_flags,
            extra_ldflags=["-L."],  # the folder, in which ninja runs the linker
            build_directory=folder,
            is_python_module=False,
            # CUDA_SOURCE does not need PyTorch's headers, and compiles faster without them. PyTorch versions before
            # 2.8 always include them.
            **({"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}),
        )
    if not os.path.exists(_library_path(folder)):
        function = cpp_extension.load_inline
        replacement = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(
            f"layernorm_inline: load_inline did not write {_library_path(folder)}. {replacement} of"
            f" {function.__module__} has replaced it; a replacement must keep the arguments name and build_directory."
        )


def _compile(folder, codes):
    """Compiles CPP_SOURCE and CUDA_SOURCE to the library in `folder`, which must be empty, and loads it.

    The name of the library says which one it is: the name of the second library, which contains the kernels for
    activations, scale and the convolution, ends with _epilogue.
    """
    name = os.path.basename(os.path.dirname(folder))
    kernels = "CUDA kernels for activations and scale" if name.endswith("_epilogue") else "CUDA kernels"
    _check_host_compiler()
    cuda_home, release = _find_cuda_home()
    codes, remark = _supported_codes(cuda_home, release, codes)
    # The folder is named after all requested codes, also those that this nvcc cannot generate, so that later imports
    # find the library and do not compile again. A newer nvcc is therefore only used once the folder is deleted.
    compiled_for = ", ".join(codes) + (
        f" ({remark}, and delete the folder {os.path.basename(folder)})" if remark else ""
    )
    # A rough estimate: one code needs 14 to 18 s (sm_90a, on different CPUs), and each further code adds about 10 s.
    _print(f"compiling {kernels} for {compiled_for}, about {10 + 10 * len(codes)} s, only this once")
    # The toolkit that pip installs has libcudart.so.13 but not libcudart.so, which the linker looks for.
    for library in glob.glob(f"{glob.escape(cuda_home)}/lib/libcudart.so.{_parse_version(release)[0]}*")[:1]:
        os.symlink(library, f"{folder}/libcudart.so")
    _load_inline(name, folder, cuda_home, compiled_for, *_compiler_flags(name, cuda_home, codes))


def _is_trusted(path):
    """Returns True if path belongs to this user or root, and users outside of its group cannot write to it.

    Loading a library that another user could have written would run that user's code as this user. The group is
    trusted, because containers and clusters give folders to a group. A symbolic link is not trusted.
    """
    status = os.lstat(path)  # of a link itself, whose mode is 0777
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o002


def _cache(name):
    """Returns the folder for all libraries of this name. Creates it if necessary.

    Raises a RuntimeError if the folder cannot be used, or if other users could replace what is in it.
    """
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    given = os.environ.get("TORCH_EXTENSIONS_DIR") or default
    if given.startswith("~"):
        raise RuntimeError(
            f"layernorm_inline: there is no home folder to keep the compiled kernels in. {_CACHE_ADVICE}"
        )
    root = os.path.realpath(given)
    folder = os.path.join(root, name)
    with _SuppressAndKeep(OSError) as caught:  # a RuntimeError is not suppressed
        for path in (root, folder):
            os.makedirs(path, 0o755, exist_ok=True)
        mode = os.stat(root).st_mode
        if not _is_trusted(folder):
            problem = "must belong to you or root, and must not be writable by others"
        elif mode & 0o002 and not mode & 0o1000:  # if root is sticky, like /tmp, only an owner can replace `folder`
            problem = "must not lie in a folder that others can write to, unless that folder is sticky like /tmp"
        elif os.statvfs(folder).f_flag & os.ST_NOEXEC:
            problem = "is on a file system that is mounted noexec, from which no library can be loaded"
        else:
            return folder
        raise RuntimeError(f"layernorm_inline: {folder} {problem}. {_CACHE_ADVICE}")
    raise RuntimeError(
        f"layernorm_inline: {folder} must be a folder that you can write to: {caught.error}. {_CACHE_ADVICE}"
    )


def _library_folder(cache, codes):
    """Returns the folder for a library with these codes in the cache.

    The cache's name identifies the sources. This folder's name contains what else the library depends on, apart from
    the compilers: a hash of the machine type, the versions of PyTorch and CUDA, the C++ ABI and the flags, and the
    codes.
    """
    machine = [os.uname().machine, torch.__version__, torch.version.cuda, str(torch.compiled_with_cxx11_abi())]
    key = hashlib.sha256("\n".join([*machine, *_CUDA_FLAGS, *_CPP_FLAGS]).encode()).hexdigest()[:8]
    return "-".join([f"{cache}/{key}", *codes])


def _is_built(folder):
    """Returns True if the folder contains a finished library.

    The file `complete`, which is written last, contains the size of the library. So an interrupted build and a
    truncated library do not count as finished.
    """
    library, complete = _library_path(folder), Path(folder, "complete")
    with contextlib.suppress(OSError):
        size = str(os.path.getsize(library)).encode()
        return all(map(_is_trusted, (folder, library, complete))) and complete.read_bytes() == size
    return False


def _find_library(cache, codes):
    """Returns the folder of a finished library that contains code for all of `codes`, or None.

    For example, a container image may contain a library for several architectures. If several libraries fit, returns
    the one with the fewest codes.
    """
    folders = glob.glob(glob.escape(_library_folder(cache, [])) + "-*")
    folders = [folder for folder in folders if {*codes} <= {*os.path.basename(folder).split("-")}]
    return min(filter(_is_built, folders), key=lambda folder: folder.count("-"), default=None)


def _acquire_lock(folder):
    """Waits until no other process or thread holds the lock of a folder, then returns the lock as an open file.

    Closing the file releases the lock.
    """
    with _SuppressAndKeep(OSError) as caught:
        # Mode 0600, so that other users cannot hold the lock. Opened for writing, because NFS grants an exclusive
        # lock only for a file that is open for writing.
        lock = open(f"{folder}/build.lock", "w", opener=functools.partial(os.open, mode=0o600))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        _print(f"waiting for another process, which compiles in {folder}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock
    raise RuntimeError(
        f"layernorm_inline: {folder} must be a folder that you can write and lock: {caught.error}. {_CACHE_ADVICE}"
    )


def _build(cache, codes):
    """Compiles the library and returns its folder.

    If several processes need the same library at the same time, one compiles it and the others wait.
    """
    folder = _library_folder(cache, codes)
    library, complete = _library_path(folder), Path(folder, "complete")
    with _acquire_lock(cache):
        if not _is_built(folder):
            shutil.rmtree(folder, ignore_errors=True)  # removes what an interrupted build left
            os.makedirs(folder, 0o755, exist_ok=True)
            _compile(folder, codes)
            os.chmod(library, 0o644)  # readable by other users, whatever the umask
            complete.write_text(str(os.path.getsize(library)))
            complete.chmod(0o644)
    return folder


# All copies of this file in a process use one lock, because building changes environment variables temporarily.
_process_lock = vars(sys).setdefault("_layernorm_inline_lock", _thread.allocate_lock())


def _load(name):
    """Returns (the ops of the library, None), or (None, the reason) if it cannot be compiled for any GPU."""
    with _process_lock:
        return _find_or_build(name)


def _find_or_build(name):
    """Loads the library from the cache, or compiles and loads it. Returns what _load returns."""
    ops = getattr(torch.ops, name)
    # This op is defined last, so the library is completely loaded if it exists. Another copy of this file may have
    # loaded it.
    if hasattr(ops, "layer_norm"):
        return ops, None
    if torch.version.cuda is None:
        return None, f"PyTorch {torch.__version__} is built without CUDA; install a version with CUDA"
    if _parse_version(torch.version.cuda) < _OLDEST_CUDA:
        return (
            None,
            f"PyTorch {torch.__version__} is built with CUDA {torch.version.cuda}, and 11.8 is the oldest supported"
            " version; install a newer PyTorch",
        )
    architectures = _architectures()
    if not architectures:
        problem = "there was no GPU when layernorm_inline was imported, and TORCH_CUDA_ARCH_LIST names none"
        return None, f"{problem}; import it on a machine with a GPU, or set TORCH_CUDA_ARCH_LIST first"
    codes = _codes(architectures)
    if not codes:
        found = ", ".join(architectures)
        return None, f"compute capability 7.5 is the oldest supported, and only {found} was found"
    cache = _cache(name)
    folder = _find_library(cache, codes)
    if folder is not None:
        with _SuppressAndKeep(OSError) as caught:
            torch.ops.load_library(_library_path(folder))
            return ops, None
        # The library may have been linked on another system. Without the file `complete` it counts as unfinished, so
        # _build compiles a new one.
        _print(f"cannot load {_library_path(folder)}, so it is compiled again: {caught.error}")
        with _SuppressAndKeep(OSError) as removing:
            Path(folder, "complete").unlink(missing_ok=True)  # another process may have removed it first
        if removing.error is not None:
            raise RuntimeError(
                f"layernorm_inline: cannot load {_library_path(folder)} ({caught.error}), and cannot discard it to"
                f" compile it again ({removing.error}). {_CACHE_ADVICE}"
            )
    torch.ops.load_library(_library_path(_build(cache, codes)))
    return ops, None


def _load_epilogue():
    """Loads the second library, if the import has loaded the first one. Does nothing if it is already loaded."""
    if _ops is None or hasattr(_epilogue_ops, "layer_norm"):
        return
    _, why_not = _load(_epilogue_ops.name)
    if why_not is not None:
        raise RuntimeError(f"layernorm_inline: the kernels for activations and scale were not compiled: {why_not}.")


# This attribute makes Dynamo call the function instead of tracing it. torch._dynamo.assume_constant_result sets it too,
# but importing torch._dynamo costs about a second.
_load_epilogue._dynamo_marked_constant = True


# ============================================================================
# 3  Interface between the kernels and the binding
# ============================================================================

# Both sources begin with this text: the arguments of the functions `launch`, which the binding calls and the CUDA
# source defines. It has no PyTorch types, because nvcc compiles much faster without PyTorch's headers.
#
# LAYERNORM_ACTIVATIONS(EACH) expands to EACH(struct, value, gradient) for every entry of _ACTIVATIONS, for example
# EACH(Gelu, at::gelu(z), at::gelu_backward(grad, z)).
_INTERFACE = (
    "#define LAYERNORM_ACTIVATIONS(EACH)"
    + "".join(f" EACH({struct}, {value}, {gradient})" for struct, _, value, gradient in _ACTIVATIONS.values())
    + r"""
#include <cstdint>
#include <functional>
#include <cuda_runtime_api.h>

// The extension's name contains a hash of its sources, so that two versions of them can be loaded into one process.
namespace TORCH_EXTENSION_NAME {

// An epilogue is what follows layer norm in the same kernel: an activation, a scale or both. Kernels with an epilogue,
// and the convolution, are compiled from the same text into a second library, with LAYERNORM_HAS_EPILOGUE defined.
#ifdef LAYERNORM_HAS_EPILOGUE
constexpr bool kHasEpilogue = true;
#else
constexpr bool kHasEpilogue = false;
#endif

enum class DType { Float32, Float16, BFloat16 };
#define LAYERNORM_STRUCT(Struct, value, gradient) Struct,
enum class Activation { None, LAYERNORM_ACTIVATIONS(LAYERNORM_STRUCT) Count };

// A call: output = scale * activation((input - mean) * rstd * weight + bias), and rstd = 1 / sqrt(variance + eps).
// mean and variance are those of a row. All tensors are contiguous and in device memory. A null pointer stands for an
// absent weight or bias, or for an output (mean, rstd, a gradient) that is not needed.
struct LayerNormCall {
  const void* input;   // (rows, cols), of dtype
  const void* weight;  // (cols), of dtype, or of float32 if affine_float32
  const void* bias;    // (cols), of weight's type; null in backward without activation, which does not depend on it
  int64_t rows, cols;
  double eps, scale;
  DType dtype;
  bool affine_float32;  // weight and bias are float32, whatever dtype is
  Activation activation;
};

struct Forward : LayerNormCall {
  void* output;        // (rows, cols), of dtype
  float *mean, *rstd;  // (rows)
};

struct Backward : LayerNormCall {
  const void* grad_output;   // (rows, cols), of dtype
  const float *mean, *rstd;  // (rows), as forward computed them; never null
  void* grad_input;          // (rows, cols), of dtype
  void* grad_weight;         // (cols), of weight's type
  void* grad_bias;           // (cols), of weight's type
};

// A call of the convolution: output = scale * gelu(layer norm(ConvTranspose3d(input))). The transposed convolution has
// kernel 4, stride 2 and padding 1. Layer norm is over the last dimension of its output, so a row has 64 columns.
// conv_bias adds the same number to a whole row, and subtracting the row's mean removes it. The kernel adds it for 16
// bits only, where the sum is rounded; for float32, only NaN and infinity in conv_bias have an effect.
//
// If rstd is not null, the call stops before it multiplies by rstd, for backward. It then returns
// output = ConvTranspose3d(input) - mean, and the rstd of each row.
struct Convolution {
  const void* input;        // (batch, 32, depth, height, 32), of dtype
  const void* conv_weight;  // (32, 64, 4, 4, 4), of dtype
  const void* conv_bias;    // (64), of dtype, or null
  const void* weight;       // (64), of dtype, or of float32 if affine_float32, or null
  const void* bias;         // (64), of weight's type, or null
  void* output;             // (batch, 64, 2 * depth, 2 * height, 64), of dtype
  float* rstd;              // (batch, 64, 2 * depth, 2 * height), or null
  int64_t batch;
  int depth, height;  // of input
  double eps, scale;
  DType dtype;
  bool affine_float32, tf32;  // tf32: float32 factors are rounded to TF32
};

// Returns device memory that remains valid until the stream has run the call. There is one such buffer per call: a
// second request releases the first.
using Allocate = std::function<void*(size_t bytes)>;

// Each of these launches the kernels of a call on the current device.
cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream);
cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream);
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream);

// Returns true if the current device has the shared memory that the convolution's kernel needs.
bool supports_convolution(DType dtype, bool tf32);

}  // namespace TORCH_EXTENSION_NAME
"""
)

# ============================================================================
# 4  C++ binding: checks, allocation, autograd, dispatcher registration
# ============================================================================

CPP_SOURCE = (
    _INTERFACE
    + r"""
// ==== Overview: PyTorch ops around the kernels ====
//
//   op                                function that launches kernels   function under vmap
//   layer_norm                        layer_norm_forward<false>        layer_norm_vmap<false>
//   layer_norm_forward                layer_norm_forward<true>         layer_norm_vmap<true>
//   layer_norm_backward               layer_norm_backward              layer_norm_backward_vmap
//   conv_transpose3d_layer_norm_gelu  convolution                      none
//   convolution_backward              convolution_backward             none
//
// Every op also has a function for autograd, for example layer_norm_autograd. It records what backward needs, and calls
// the op again below autograd. layer_norm_autocast is layer_norm's function under autocast.
//
// Example: in a training step, layer_norm_autograd finds an input that requires grad. So it runs the op
// layer_norm_forward, which also returns mean and rstd, and puts a node LayerNormBackward into the graph. In backward,
// the node calls the op layer_norm_backward. With create_graph=True, that op puts a node LayerNormBackwardBackward into
// the graph, which computes second derivatives with PyTorch's operations.
//
// The functions named composed_* compute the same formulas with PyTorch's operations. They replace the kernels
//   - in forward mode
//   - in layer_norm's backward under vmap, and in forward under vmap for weight, bias, activation and scale if weight
//     or bias differ between slices
//   - in backward with create_graph=True, if there is an activation, a scale or a convolution
//   - for the convolution: inside transforms of torch.func, and on GPUs that its kernel does not support
//
// Kernels accept contiguous tensors only, so the functions that launch them copy other tensors first.
//
// Safe changes, and what guards them. The tests are in .tests, mainly in test_binding.py, test_autograd.py and
// test_compile.py. They need no GPU, because this section is also compiled for CPU tensors (emulator.py).
//   - Parameters of an op. Its schema (m.def at the end), its functions for CUDA, autograd, autocast and vmap, and the
//     calls in Python, which are by position, must all have the same. If the types of a function differ from the
//     schema, the library cannot be loaded. If two parameters of one type are swapped, only the values of results show
//     it.
//   - Dispatch. A function for one dispatch key (autograd, vmap, autocast) must exclude this key before it calls the op
//     again. Without that it calls itself until the stack overflows, which ends the test process.
//   - composed_*. These can consist of any operations that PyTorch can differentiate. test_autograd.py compares their
//     derivatives with PyTorch's and float64's, also with activation and scale; test_convolution.py does for the
//     convolution.
//   - Copies of tensors that are not contiguous or not aligned, and all checks of arguments, must stay: see the mutants
//     with "binding" in their names (.tests/mutants.py; a mutant is a copy of this file with one bug).
//   - kDoubleBackwardElements, kConvolutionBytes. Any positive number is correct; they limit memory. Tests use smaller
//     ones: emulator.py replaces the two definitions, so edit BINDING there, too.
//   - Included headers must exist in the oldest supported PyTorch: `.ci/run headers` compiles this section with it.
//   - The op layer_norm must be the last one that is defined (see m.def; test_layer_norm_is_the_last_op).

#define AT_PER_OPERATOR_HEADERS  // allows ATen/ops/*.h; including ATen/ATen.h instead costs g++ 5 s
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
using Outputs = std::tuple<Tensor, Tensor>;            // output, and statistics of shape (2, rows): mean and rstd
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of input, weight and bias

bool is_given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// Returns "[2, 3]". All numbers in messages are converted to strings first, because writing them to a stream with <<
// crashed with PyTorch 2.11 on Ubuntu 24.04.
std::string format_sizes(SymIntArrayRef sizes) {
  const auto ints = c10::asIntArrayRefSlowOpt(sizes);
  if (!ints.has_value()) return "[symbolic sizes]";
  std::string list;
  for (const int64_t size : *ints) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

// ---- Checks ----
//
// Exception types are nn.LayerNorm's. Messages say what was expected and what was given.

void check_device(const char* name, const Tensor& t, const Tensor& input) {
  TORCH_CHECK(t.device() == input.device(), "Expected all tensors to be on the same device, but input is on ",
              input.device(), " and ", name, " is on ", t.device());
}

void check_tensor(const char* name, const Tensor& t, SymIntArrayRef sizes, at::ScalarType dtype, const Tensor& input) {
  TORCH_CHECK(t.sym_sizes().equals(sizes), "Expected ", name, " of shape ", format_sizes(sizes), ", but got ",
              format_sizes(t.sym_sizes()));
  TORCH_CHECK(t.scalar_type() == dtype, "Expected ", name, " of dtype ", dtype, ", but got ", t.scalar_type());
  check_device(name, t, input);
}

// Checks weight and bias fully, and the dtype of input, but not its shape.
void check_affine(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                              "Expected input of dtype Float, Half or BFloat16, but got ", dtype);
  for (const auto* affine : {&weight, &bias}) {
    if (!is_given(*affine)) continue;
    const char* name = affine == &weight ? "weight" : "bias";
    const Tensor& t = **affine;
    TORCH_CHECK(t.sym_sizes().equals(shape), "Expected ", name, " to be of same shape as normalized_shape, but got ",
                name, " of shape ", format_sizes(t.sym_sizes()), " and normalized_shape = ", format_sizes(shape));
    check_device(name, t, input);
    TORCH_CHECK(t.scalar_type() == dtype || t.scalar_type() == at::kFloat, "Expected ", name,
                " of dtype Float or of input's dtype (", dtype, "), but got ", t.scalar_type());
  }
  TORCH_CHECK(!is_given(weight) || !is_given(bias) || weight->scalar_type() == bias->scalar_type(),
              "Expected weight and bias of the same dtype, but got ", weight->scalar_type(), " and ",
              bias->scalar_type());
}

// Checks the tensors and the shape of a layer norm.
void check_inputs(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(!shape.empty(), "Expected normalized_shape to be at least 1-dimensional, but got normalized_shape = []");
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()).equals(shape),
              "Given normalized_shape=", format_sizes(shape), ", expected input with shape [*, ",
              format_sizes(shape).substr(1), ", but got input of size ", format_sizes(sizes));
  check_affine(input, shape, weight, bias);
}

SymInt element_count(SymIntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), SymInt(1), std::multiplies<SymInt>());
}

SymInt row_count(const Tensor& input, SymIntArrayRef shape) {
  return element_count(input.sym_sizes().slice(0, input.dim() - shape.size()));
}

// ---- Kernels ----
//
// For meta tensors (fake tensors of torch.compile and torch.export), these functions check and allocate, and launch
// nothing.

// Returns a contiguous tensor on like's device, uninitialized. CUDA memory is allocated without the dispatcher, which
// costs less host time (0.7 us per call for float32 input of 8 x 768 with gradient).
Tensor allocate(SymIntArrayRef sizes, at::ScalarType dtype, const Tensor& like) {
  const auto options = like.options().dtype(dtype);
  if (like.is_meta()) return at::empty_symint(sizes, options);
  return Tensor(at::detail::empty_cuda(C10_AS_INTARRAYREF_SLOW(sizes), options));
}

Tensor contiguous(const OptionalTensor& t) { return is_given(t) ? t->contiguous() : Tensor(); }

// Does what Tensor::const_data_ptr does, which PyTorch 2.0 lacks. Tensor::data_ptr would copy a copy-on-write tensor.
const void* const_ptr(const Tensor& t) { return t.defined() ? t.unsafeGetTensorImpl()->data() : nullptr; }
void* mutable_ptr(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

DType dtype_of(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == at::kHalf ? DType::Float16 : dtype == at::kBFloat16 ? DType::BFloat16 : DType::Float32;
}

// Converts and checks the op's argument. Only the second library has kernels for an activation or a scale.
Activation to_activation(int64_t activation, double scale) {
  const bool exists = activation >= 0 && activation < static_cast<int64_t>(Activation::Count);
  TORCH_CHECK(exists && (kHasEpilogue || (activation == 0 && scale == 1)), "Expected ",
              kHasEpilogue ? "activation to be from 0 to " + std::to_string(static_cast<int>(Activation::Count) - 1)
                           : std::string("activation 0 and scale 1 (for others, call layernorm_inline.layer_norm)"),
              ", but got activation ", std::to_string(activation), " and scale ", std::to_string(scale));
  return static_cast<Activation>(activation);
}

// Returns a call whose common fields are set. All tensors must be contiguous.
template <typename Call>
Call make_call(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps, double scale) {
  Call call = {};
  const Tensor& affine = weight.defined() ? weight : bias;
  call.input = const_ptr(input);
  call.weight = const_ptr(weight);
  call.bias = const_ptr(bias);
  call.eps = eps;
  call.scale = scale;
  call.dtype = dtype_of(input);
  call.affine_float32 = affine.defined() && affine.scalar_type() == at::kFloat;
  return call;
}

// Launches the kernels of a call on input's device and PyTorch's current stream. Raises if that fails. The build
// defines LAYERNORM_COMPILED_FOR, for example as "sm_80, sm_90a", followed by advice if nvcc could not compile for some
// GPU.
template <typename Call>
void launch_call(const Call& call, const Tensor& input) {
  const c10::cuda::CUDAGuard guard(input.device());
  Tensor scratch;
  const auto allocate_scratch = [&](size_t bytes) {
    scratch = allocate({static_cast<int64_t>(bytes)}, at::kByte, input);
    return scratch.data_ptr();
  };
  const cudaError_t error = launch(call, allocate_scratch, c10::cuda::getCurrentCUDAStream());
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // clears the error, so that the next CUDA call does not report it
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, input.device().index());
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, input.device().index());
    TORCH_CHECK(false, "layernorm_inline: cannot run on ", input.device(), ": its compute capability is ",
                std::to_string(major) + "." + std::to_string(minor),
                ", and the kernels were compiled for " LAYERNORM_COMPILED_FOR);
  }
  C10_CUDA_CHECK(error);
}

// The ops `layer_norm` (returns output) and, with SAVE_STATISTICS, `layer_norm_forward` (returns Outputs).
template <bool SAVE_STATISTICS>
auto layer_norm_forward(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  check_inputs(input, normalized_shape, weight, bias);
  const Activation function = to_activation(activation, scale);
  Tensor output = allocate(input.sym_sizes(), input.scalar_type(), input), statistics;
  if (SAVE_STATISTICS) statistics = allocate({2, row_count(input, normalized_shape)}, at::kFloat, input);
  if (!input.is_meta() && input.numel() > 0) {
    // Not make_aligned: the kernels of forward load rows that start at any element (struct Unaligned).
    const Tensor x = input.contiguous(), w = contiguous(weight), b = contiguous(bias);
    auto call = make_call<Forward>(x, w, b, eps, scale);
    call.output = mutable_ptr(output);
    call.cols = element_count(normalized_shape).expect_int();
    call.rows = input.numel() / call.cols;
    call.mean = static_cast<float*>(mutable_ptr(statistics));
    call.rstd = SAVE_STATISTICS ? call.mean + call.rows : nullptr;
    call.activation = function;
    launch_call(call, input);
  }
  if constexpr (SAVE_STATISTICS) {
    return Outputs(std::move(output), std::move(statistics));
  } else {
    return output;
  }
}

// Returns t if it is contiguous and starts at a multiple of `boundary` bytes, and a copy with these properties if not.
Tensor make_aligned(const Tensor& t, uintptr_t boundary) {
  const Tensor x = t.contiguous();
  return reinterpret_cast<uintptr_t>(const_ptr(x)) % boundary == 0 ? x : x.clone();
}

// The op `layer_norm_backward`. A gradient is an undefined tensor if output_mask excludes it or its input is absent.
Gradients layer_norm_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                              const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                              double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  // Saved tensors may have changed since forward: a parameter was converted to another dtype, or a hook for saved
  // tensors returned another tensor.
  check_inputs(input, normalized_shape, weight, bias);
  check_tensor("grad_output", grad_output, input.sym_sizes(), input.scalar_type(), input);
  check_tensor("statistics", statistics, {2, row_count(input, normalized_shape)}, at::kFloat, input);
  const Activation function = to_activation(activation, scale);
  const auto allocate_as = [](const Tensor& t) { return allocate(t.sym_sizes(), t.scalar_type(), t); };
  Gradients gradients;
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (output_mask[0]) grad_input = allocate_as(input);
  if (output_mask[1] && is_given(weight)) grad_weight = allocate_as(*weight);
  if (output_mask[2] && is_given(bias)) grad_bias = allocate_as(*bias);
  const SymInt cols = element_count(normalized_shape);
  if (input.is_meta() || cols == 0) return gradients;

  // Kernels load 16-bit elements in pairs, which must start at a multiple of 4 bytes.
  const Tensor dy = make_aligned(grad_output, 4), x = make_aligned(input, 4), stats = statistics.contiguous();
  const Tensor w = contiguous(weight), b = contiguous(bias);
  auto call = make_call<Backward>(x, w, b, eps, scale);
  call.grad_output = const_ptr(dy);
  call.grad_input = mutable_ptr(grad_input);
  call.grad_weight = mutable_ptr(grad_weight);
  call.grad_bias = mutable_ptr(grad_bias);
  call.cols = cols.expect_int();
  call.rows = input.numel() / call.cols;
  call.mean = static_cast<const float*>(const_ptr(stats));
  call.rstd = call.mean + call.rows;
  call.activation = function;
  if (call.activation == Activation::None) call.bias = nullptr;
  launch_call(call, input);
  return gradients;
}

// ---- Autograd ----

// Returns a handle with which to call one of this library's ops. The second argument is a function with the op's C++
// signature, F.
template <typename F>
auto find_op(const char* name, F*) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string(C10_STRINGIZE(TORCH_EXTENSION_NAME) "::") + name).c_str(), "")
      .typed<F>();
}

// The functions named composed_* consist of operations that PyTorch can differentiate again, also in forward mode and
// under vmap. at::layer_norm is not one of them, because its derivatives are wrong from the third on: it treats mean
// and rstd as constants.

// Returns scale * activation(z).
Tensor composed_epilogue(Tensor z, Activation activation, double scale) {
#define LAYERNORM_APPLY(Struct, value, gradient) \
  if (activation == Activation::Struct) z = value;
  LAYERNORM_ACTIVATIONS(LAYERNORM_APPLY)
  return scale == 1 ? z : z * scale;
}

// Returns the gradient of z. `grad` is the gradient of scale * activation(z).
Tensor composed_epilogue_backward(Tensor grad, const Tensor& z, Activation activation, double scale) {
  if (scale != 1) grad = grad * scale;
#define LAYERNORM_APPLY_GRADIENT(Struct, value, gradient) \
  if (activation == Activation::Struct) grad = gradient;
  LAYERNORM_ACTIVATIONS(LAYERNORM_APPLY_GRADIENT)
  return grad;
}

// Returns the tensor with shape (rows, cols). It keeps its dtype, because a float32 operand makes arithmetic float32
// without a converted copy.
Tensor as_matrix(const OptionalTensor& t, SymIntArrayRef shape) {
  const SymInt cols = element_count(shape), rows = is_given(t) ? row_count(*t, shape) : SymInt(0);
  return is_given(t) ? t->reshape_symint({rows, cols}) : Tensor();
}

// Returns weight or bias with shape (1, cols), in float32.
Tensor as_row(const OptionalTensor& t, SymIntArrayRef shape) {
  return is_given(t) ? t->reshape_symint({SymInt(1), element_count(shape)}).to(at::kFloat) : Tensor();
}

Tensor row_mean(const Tensor& t) { return t.mean(1, /*keepdim=*/true, at::kFloat); }

// Returns t * weight. An undefined weight counts as 1.
Tensor apply_weight(const Tensor& t, const Tensor& weight) { return weight.defined() ? t * weight : t; }

// Returns xhat = (x - mean) * rstd, of shape (rows, cols), and rstd = 1 / sqrt(variance + eps), of shape (rows, 1).
std::tuple<Tensor, Tensor> composed_normalized(const Tensor& x, double eps) {
  const Tensor centered = x - row_mean(x), rstd = (row_mean(centered * centered) + eps).rsqrt();
  return {centered * rstd, rstd};
}

// Returns the same from the statistics that forward saved. Autograd treats these as constants, so derivatives of the
// result with respect to x would be wrong.
std::tuple<Tensor, Tensor> saved_normalized(const Tensor& x, const Tensor& statistics) {
  const Tensor rstd = statistics[1].unsqueeze(1);
  return {(x - statistics[0].unsqueeze(1)) * rstd, rstd};
}

// Computes what the op `layer_norm` computes, with PyTorch's operations.
Tensor composed_layer_norm(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  check_inputs(input, shape, weight, bias);
  const Tensor xhat = std::get<0>(composed_normalized(as_matrix(input, shape), eps)), b = as_row(bias, shape);
  const Tensor z = apply_weight(xhat, as_row(weight, shape));
  const Tensor y = composed_epilogue(b.defined() ? z + b : z, to_activation(activation, scale), scale);
  return y.reshape_symint(input.sym_sizes()).to(input.scalar_type());
}

// Computes what the op `layer_norm_backward` computes, with PyTorch's operations. `statistics` are those that forward
// saved. They must be undefined if the gradients will be differentiated with respect to input: then statistics are
// computed from input.
Gradients composed_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef shape,
                            const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                            double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  check_inputs(input, shape, weight, bias);
  const Tensor x = as_matrix(input, shape), w = as_row(weight, shape), b = as_row(bias, shape);
  const auto [xhat, rstd] = statistics.defined() ? saved_normalized(x, statistics) : composed_normalized(x, eps);
  Tensor dy = as_matrix(grad_output, shape);
  if (kHasEpilogue) {  // in the first library, forward has checked that there is no activation and no scale
    const Tensor z = apply_weight(xhat, w);
    dy =
        composed_epilogue_backward(dy.to(at::kFloat), b.defined() ? z + b : z, to_activation(activation, scale), scale);
  }
  Gradients gradients;
  auto& [dx, dw, db] = gradients;
  if (output_mask[0]) {
    const Tensor wdy = apply_weight(dy, w);
    dx = (wdy - row_mean(wdy) - xhat * row_mean(wdy * xhat)) * rstd;
    dx = dx.reshape_symint(input.sym_sizes()).to(input.scalar_type());
  }
  if (output_mask[1] && w.defined()) dw = (dy * xhat).sum(0).reshape_symint(shape).to(weight->scalar_type());
  if (output_mask[2] && b.defined()) db = dy.sum(0, false, at::kFloat).reshape_symint(shape).to(bias->scalar_type());
  return gradients;
}

// Returns true if an input has a tangent of forward-mode differentiation. Kernels compute no tangents, so such calls
// run PyTorch's operations.
template <typename... Inputs>
bool has_tangent(const Inputs&... inputs) {
  const auto test = [](const OptionalTensor& t) { return is_given(t) && t->_fw_grad(/*level=*/0).defined(); };
  return (test(inputs) || ...);
}

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Tensors = std::array<Tensor, 5>;
using GradMask = std::array<bool, 5>;  // which of a node's inputs need a gradient

// Returns t in the form in which a node saves it. t must be an input of the node or a constant. A result of the node
// would need is_output = true: it refers to the node, so that neither would ever be freed.
SavedVariable to_saved(const OptionalTensor& t) { return {t, /*is_output=*/false}; }

// A node of the autograd graph that calls a function to compute its gradients. It is not a torch::autograd::Function,
// because that costs 3 us more host time per call (input of 8 x 768 with gradient).
template <typename Function>
struct FunctionNode : torch::autograd::Node {
  const char* label;
  Function function;  // variable_list function(grad_outputs, saved tensors, grad_mask) returns the inputs' gradients
  std::array<SavedVariable, 5> saved;  // the inputs, then a constant that the function reads

  FunctionNode(const char* label, Function function) : label(label), function(std::move(function)) {}
  std::string name() const override { return label; }

  // Saves a tensor that autograd treats as a constant, after the inputs. add_node has saved these.
  void save_constant(const Tensor& t) { saved.at(num_outputs()) = to_saved(t); }

  // Frees the saved tensors. PyTorch's lock is held, because another thread may be unpacking them.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // Computes the gradients of the inputs. They are undefined if all grad_outputs are.
  variable_list apply(variable_list&& grad_outputs) override {
    const size_t inputs = num_outputs();  // a node's outputs are the gradients of the inputs
    bool has_gradient = false;
    for (const Tensor& grad_output : grad_outputs) has_gradient |= grad_output.defined();
    if (!has_gradient) return variable_list(inputs);
    Tensors tensors;
    GradMask grad_mask = {};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < saved.size(); ++i) tensors[i] = saved[i].unpack();
    }
    for (size_t i = 0; i < inputs; ++i) grad_mask[i] = task_should_compute_output(i);
    // The lock is released first, because the function can wait for other nodes.
    variable_list gradients = function(grad_outputs, tensors, grad_mask);
    gradients.resize(inputs);
    return gradients;
  }
};

// Puts a node into the graph, which computes the gradients of `inputs` from those of `outputs`. Saves the inputs in it.
template <typename Function, typename... Inputs>
auto& add_node(const char* name, variable_list outputs, Function function, const Inputs&... inputs) {
  static_assert(sizeof...(inputs) <= std::tuple_size<Tensors>::value, "a node saves at most five tensors");
  using Pointer = decltype(torch::autograd::Edge::function);
  Pointer pointer;
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    // deleteNode frees a deep graph without recursion.
    pointer = Pointer(new FunctionNode<Function>(name, std::move(function)),
                      [](FunctionNode<Function>* node) { deleteNode(node); });
  } else {  // newer PyTorch
    pointer = c10::make_intrusive<FunctionNode<Function>>(name, std::move(function));
  }
  auto& node = static_cast<FunctionNode<Function>&>(*pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node.saved = {{to_saved(inputs)...}};
  torch::autograd::set_history(outputs, pointer);
  return node;
}

// Differentiates layer_norm_backward. Returns the gradients of its inputs dy (grad_output), x and weight, and receives
// those of its results: g_dx of grad_input, g_dw of grad_weight and g_db of grad_bias. The activation is None, and
// scale is 1.
//
// Let xhat = (x - mean) * rstd, wdy = weight * dy, and P the linear map of a row, which is symmetric,
//   P(v) = rstd * (v - mean(v) - xhat * mean(v * xhat))
// so that grad_input = P(wdy). The gradients are, with all means over a row,
//   grad_dy = weight * P(g_dx) + g_dw * xhat + g_db
//   grad_x  = P(g_dw * dy - rstd * (mean(wdy * xhat) * g_dx + mean(g_dx * xhat) * wdy))
//             - rstd^2 * xhat * (mean(g_dx * wdy) - mean(g_dx) * mean(wdy) - mean(g_dx * xhat) * mean(wdy * xhat))
//   grad_w  = sum over rows of dy * P(g_dx)
//
// These are PyTorch's operations, so they can be differentiated again. In that case mean and rstd are computed from x,
// so that gradients flow through them; otherwise the statistics that forward saved are used.
variable_list double_backward_rows(const variable_list& grads, const Tensor& dy, const Tensor& x, const Tensor& w,
                                   const Tensor& statistics, double eps, const GradMask& grad_mask) {
  const auto& g_dx = grads[0];
  const auto& g_dw = grads[1];
  const auto& g_db = grads[2];
  const auto [xhat, rstd] = at::GradMode::is_enabled() ? composed_normalized(x, eps) : saved_normalized(x, statistics);
  const auto project = [&, xhat = xhat, rstd = rstd](const Tensor& v, const Tensor& mean_v_xhat) {
    return at::addcmul(v - row_mean(v), xhat, mean_v_xhat, /*value=*/-1) * rstd;
  };

  Tensor grad_dy, grad_x, grad_w;
  if (g_dx.defined()) {
    const Tensor mean_g_xhat = row_mean(g_dx * xhat), projected = project(g_dx, mean_g_xhat);
    if (grad_mask[0]) grad_dy = apply_weight(projected, w);
    if (grad_mask[2] && w.defined()) grad_w = (projected * dy).sum(0);
    if (grad_mask[1]) {
      const Tensor wdy = apply_weight(dy, w), mean_wdy_xhat = row_mean(wdy * xhat);
      Tensor v = (g_dx * mean_wdy_xhat + wdy * mean_g_xhat) * -rstd;
      if (g_dw.defined()) v = v + dy * g_dw;
      const Tensor covariance = row_mean(g_dx * wdy) - row_mean(g_dx) * row_mean(wdy) - mean_g_xhat * mean_wdy_xhat;
      grad_x = at::addcmul(project(v, row_mean(v * xhat)), xhat, covariance * rstd * rstd, -1);
    }
  } else if (g_dw.defined() && grad_mask[1]) {
    const Tensor v = dy * g_dw;
    grad_x = project(v, row_mean(v * xhat));
  }
  const auto add_to_dy = [&](const Tensor& t) { grad_dy = grad_dy.defined() ? grad_dy + t : t; };
  if (grad_mask[0] && g_dw.defined()) add_to_dy(xhat * g_dw);
  if (grad_mask[0] && g_db.defined()) add_to_dy(g_db.expand_as(xhat));
  return {grad_dy, grad_x, grad_w};
}

// Elements of input per chunk of rows in double_backward, unless its results are differentiated again. With chunks, the
// float32 temporaries (16 MB each) need little memory and stay in L2.
constexpr int64_t kDoubleBackwardElements = 1 << 22;

// Does what double_backward_rows does, for tensors of the shapes that the op has, and in chunks of rows. Returns the
// gradients of grad_output, input and weight.
variable_list double_backward(const variable_list& grads, const Tensor& grad_output, const Tensor& input,
                              SymIntArrayRef shape, const Tensor& weight, const Tensor& statistics, double eps,
                              const GradMask& grad_mask) {
  const Tensor dy = as_matrix(grad_output, shape), x = as_matrix(input, shape), w = as_row(weight, shape);
  const Tensor g_dx = as_matrix(grads[0], shape), g_dw = as_row(grads[1], shape), g_db = as_row(grads[2], shape);
  variable_list results;
  if (at::GradMode::is_enabled() || x.sym_numel() <= kDoubleBackwardElements) {
    results = double_backward_rows({g_dx, g_dw, g_db}, dy, x, w, statistics, eps, grad_mask);
  } else {
    const int64_t rows = x.size(0), step = std::max<int64_t>(1, kDoubleBackwardElements / x.size(1));
    results.resize(3);
    for (int64_t first = 0; first < rows; first += step) {
      const auto chunk_of = [&](const Tensor& t, int64_t dim) {
        return t.defined() ? t.narrow(dim, first, std::min(step, rows - first)) : t;
      };
      const auto chunk_results = double_backward_rows({chunk_of(g_dx, 0), g_dw, g_db}, chunk_of(dy, 0), chunk_of(x, 0),
                                                      w, chunk_of(statistics, 1), eps, grad_mask);
      for (int i : {0, 1}) {
        if (chunk_results[i].defined() && first == 0) results[i] = at::empty_like(x);
        if (chunk_results[i].defined()) chunk_of(results[i], 0).copy_(chunk_results[i]);
      }
      if (chunk_results[2].defined()) results[2] = first == 0 ? chunk_results[2] : results[2] + chunk_results[2];
    }
  }
  const auto shaped_like = [](const Tensor& t, const Tensor& like) {
    return t.defined() ? t.reshape_symint(like.sym_sizes()).to(like.scalar_type()) : t;
  };
  return {shaped_like(results[0], input), shaped_like(results[1], input), shaped_like(results[2], weight)};
}

// The op `layer_norm_backward` for autograd: its results can be differentiated. In the first library, kernels compute
// the results and double_backward their gradients. In the second library, which has activations and scales,
// composed_backward computes results that need gradients, and PyTorch differentiates it.
Gradients layer_norm_backward_autograd(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                                       const Tensor& statistics, const OptionalTensor& weight,
                                       const OptionalTensor& bias, double eps, int64_t activation, double scale,
                                       std::array<bool, 3> output_mask) {
  static const auto op = find_op("layer_norm_backward", layer_norm_backward);
  const c10::SymDimVector shape(normalized_shape);
  const bool needs_grad = torch::autograd::compute_requires_grad(grad_output, input, weight, bias);
  if (has_tangent(grad_output, input, weight, bias) || (kHasEpilogue && needs_grad)) {
    return composed_backward(grad_output, input, shape, {}, weight, bias, eps, activation, scale, output_mask);
  }
  auto gradients = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(grad_output, input, normalized_shape, statistics, weight, bias, eps, activation, scale, output_mask);
  }();
  if (!needs_grad) return gradients;
  const auto backward = [=](const variable_list& grads, const Tensors& saved, const GradMask& grad_mask) {
    const auto& [dy, x, w, saved_statistics, unused] = saved;
    return double_backward(grads, dy, x, shape, w, saved_statistics, eps, grad_mask);
  };
  const auto& [dx, dw, db] = gradients;
  auto& node = add_node("LayerNormBackwardBackward", {dx, dw, db}, backward, grad_output, input, weight);
  node.save_constant(statistics);
  return gradients;
}

// The op `layer_norm_forward` for autograd: output can be differentiated, statistics cannot.
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
    const auto backward = [=, shape = c10::SymDimVector(normalized_shape)](
                              const variable_list& grads, const Tensors& saved, const GradMask& grad_mask) {
      const auto& [x, w, b, saved_statistics, unused] = saved;
      const auto [dx, dw, db] = backward_op.call(grads[0], x, shape, saved_statistics, w, b, eps, activation, scale,
                                                 {grad_mask[0], grad_mask[1], grad_mask[2]});
      return variable_list{dx, dw, db};
    };
    auto& node = add_node("LayerNormBackward", {output}, backward, input, weight, bias);
    node.save_constant(statistics);
  }
  return outputs;
}

// The op `layer_norm` for autograd. Computes and saves statistics only if a gradient is needed.
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

// The op `layer_norm` under autocast. Computes in float32 and returns float32, like nn.LayerNorm.
Tensor layer_norm_autocast(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op = find_op("layer_norm", layer_norm_forward<false>);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto cast = [](const OptionalTensor& t) {
    const bool casts = is_given(t) && t->is_floating_point() && t->scalar_type() != at::kDouble;
    return casts ? t->to(at::kFloat) : t.value_or(Tensor());
  };
  return op.call(cast(input), normalized_shape, cast(weight), cast(bias), eps, activation, scale);
}

// ---- torch.vmap ----
//
// Under vmap, a batched tensor shows the sizes of one slice, and hides a batch dimension that holds all slices. Nested
// vmaps have levels, and the innermost one has the highest.

// Returns the level of the innermost vmap over which the tensor is batched, or -1.
int64_t batch_level(const OptionalTensor& t) {
  const auto* batch = is_given(t) ? at::functorch::maybeGetBatchedImpl(*t) : nullptr;
  return batch == nullptr ? -1 : batch->level();
}

// Returns all slices of the vmap of this level in one tensor, along dimension 0, or t itself if it is the same for all.
OptionalTensor all_slices(const OptionalTensor& t, int64_t level) {
  if (batch_level(t) != level) return t;
  const auto* batch = at::functorch::maybeGetBatchedImpl(*t);
  return batch->value().movedim(batch->bdim(), 0);
}

// Returns scale * activation(xhat * weight + bias), where weight, bias or both differ between the slices. xhat holds
// all slices, each with row_dims dimensions before those of a row.
Tensor apply_sliced_affine(const Tensor& xhat, int64_t row_dims, const OptionalTensor& weight,
                           const OptionalTensor& bias, int64_t level, int64_t activation, double scale) {
  // Returns weight or bias with shape (slices, 1, ..., 1, *normalized_shape), so that a slice's rows share its own.
  const auto with_row_dims = [&](const OptionalTensor& t) {
    Tensor value = *all_slices(t, level);
    if (batch_level(t) == level) {
      for (int64_t i = 0; i < row_dims; ++i) value = value.unsqueeze(1);
    }
    return value;
  };
  Tensor z = xhat.to(at::kFloat);
  if (is_given(weight)) z = z * with_row_dims(weight);
  if (is_given(bias)) z = z + with_row_dims(bias);
  return composed_epilogue(z, to_activation(activation, scale), scale).to(xhat.scalar_type());
}

// The ops `layer_norm` and, with SAVE_STATISTICS, `layer_norm_forward` under vmap. The rows of all slices become the
// rows of one call. If weight or bias differ between slices, the kernels only normalize, and PyTorch's operations do
// the rest.
template <bool SAVE_STATISTICS>
auto layer_norm_vmap(const Tensor& input, SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps, int64_t activation, double scale) {
  static const auto op =
      find_op(SAVE_STATISTICS ? "layer_norm_forward" : "layer_norm", layer_norm_forward<SAVE_STATISTICS>);
  check_inputs(input, normalized_shape, weight, bias);  // sizes are those of one slice
  const SymInt rows = row_count(input, normalized_shape);
  const int64_t level = std::max({batch_level(input), batch_level(weight), batch_level(bias)});
  const bool input_is_batched = batch_level(input) == level;
  const bool affine_is_batched = batch_level(weight) == level || batch_level(bias) == level;
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(c10::DispatchKey::FuncTorchBatched);
  const Tensor x = *all_slices(input, level);
  Tensor output, statistics;
  const auto call = [&](const OptionalTensor& w, const OptionalTensor& b, int64_t act, double s) {
    if constexpr (SAVE_STATISTICS) {
      std::tie(output, statistics) = op.call(x, normalized_shape, w, b, eps, act, s);
    } else {
      output = op.call(x, normalized_shape, w, b, eps, act, s);
    }
  };
  if (affine_is_batched) {
    call({}, {}, 0, 1);
    const int64_t row_dims = input.dim() - static_cast<int64_t>(normalized_shape.size());
    output = apply_sliced_affine(output, row_dims, weight, bias, level, activation, scale);
  } else {
    call(weight, bias, activation, scale);
  }
  const auto wrap = [&](const Tensor& t, int64_t dim) { return at::functorch::makeBatched(t, dim, level); };
  output = wrap(output, 0);
  if constexpr (SAVE_STATISTICS) {
    // If only weight or bias differ between slices, the statistics are the same for all slices.
    if (input_is_batched) statistics = wrap(statistics.reshape_symint({2, x.sym_size(0), rows}), 1);
    return Outputs(output, statistics);
  } else {
    return output;
  }
}

// Returns true if autograd, forward mode or an outer transform differentiates the tensor that vmap has wrapped.
bool is_differentiated(const OptionalTensor& t) {
  if (!is_given(t)) return false;
  Tensor value = *t;
  while (const auto* batch = at::functorch::maybeGetBatchedImpl(value)) value = Tensor(batch->value());
  return value.requires_grad() || has_tangent(value) || value.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

// The op `layer_norm_backward` under vmap. Uses PyTorch's operations, because no kernel computes gradients of weight
// and bias per slice. The saved statistics are constants to autograd, so they are not used if input is differentiated.
Gradients layer_norm_backward_vmap(const Tensor& grad_output, const Tensor& input, SymIntArrayRef normalized_shape,
                                   const Tensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
                                   double eps, int64_t activation, double scale, std::array<bool, 3> output_mask) {
  return composed_backward(grad_output, input, normalized_shape, is_differentiated(input) ? Tensor() : statistics,
                           weight, bias, eps, activation, scale, output_mask);
}

#ifdef LAYERNORM_HAS_EPILOGUE
// ---- Convolution ----

constexpr auto kGelu = static_cast<int64_t>(Activation::Gelu);

void check_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(input.dim() == 5 && input.sym_size(1) == 32 && input.sym_size(4) == 32,
              "Expected input of shape [*, 32, *, *, 32], but got ", format_sizes(input.sym_sizes()));
  check_affine(input, {64}, weight, bias);
  check_tensor("conv_weight", conv_weight, {32, 64, 4, 4, 4}, input.scalar_type(), input);
  if (is_given(conv_bias)) check_tensor("conv_bias", *conv_bias, {64}, input.scalar_type(), input);
}

std::vector<SymInt> output_sizes(const Tensor& input) {
  return {input.sym_size(0), 64, input.sym_size(2) * 2, input.sym_size(3) * 2, 64};
}

// Returns the value of allowTF32CuDNN, which has three signatures in the supported PyTorch versions. The newer two name
// convolutions: without that, they raise if the settings of convolutions and RNNs differ.
bool tf32_allowed(bool (at::Context::*getter)() const) { return (at::globalContext().*getter)(); }
bool tf32_allowed(bool (at::Context::*getter)(const std::string&) const) {
  return (at::globalContext().*getter)("conv");
}
template <typename Op>
bool tf32_allowed(bool (at::Context::*getter)(c10::optional<Op>) const) {
  return (at::globalContext().*getter)(Op::CONV);
}

// Returns true if PyTorch would use TF32 for a float32 convolution, which only cuDNN does.
bool uses_tf32() { return at::globalContext().userEnabledCuDNN() && tf32_allowed(&at::Context::allowTF32CuDNN); }

// Returns true if input's device supports the convolution's kernel.
bool supports_convolution(const Tensor& input) {
  if (input.is_meta() || c10::cuda::device_count() == 0) return true;  // meta and fake tensors have no GPU
  const c10::cuda::CUDAGuard guard(input.device());
  return supports_convolution(dtype_of(input), uses_tf32());
}

// Returns true inside vmap, grad and the other transforms of torch.func. The op has no rules for them.
bool in_transform() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode); }

// Computes the model with PyTorch's convolution and the op `layer_norm` with GELU and scale. Used where the op cannot
// be used: for second derivatives, forward mode and transforms, and on GPUs that do not support its kernel.
Tensor composed_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  static const auto op = find_op("layer_norm", layer_norm_forward<false>);
  const Tensor y = at::conv_transpose3d(input, conv_weight, conv_bias, 2, 1);
  return op.call(y, {64}, weight, bias, eps, kGelu, scale);
}

// Runs the convolution's kernel. If rstd is given, the kernel stops before it multiplies by rstd (see struct
// Convolution).
Tensor run_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale,
                       void* rstd = nullptr) {
  const Tensor output = allocate(output_sizes(input), input.scalar_type(), input);
  if (output.is_meta() || output.numel() == 0) return output;
  const Tensor x = make_aligned(input, 16), conv = conv_weight.contiguous(), cb = contiguous(conv_bias);
  const Tensor w = contiguous(weight), b = contiguous(bias);
  auto call = make_call<Convolution>(x, w, b, eps, scale);
  call.conv_weight = const_ptr(conv);
  call.conv_bias = const_ptr(cb);
  call.output = mutable_ptr(output);
  call.rstd = static_cast<float*>(rstd);
  call.batch = input.size(0);
  call.depth = input.size(2);
  call.height = input.size(3);
  call.tf32 = uses_tf32();
  launch_call(call, input);
  return output;
}

// The op `conv_transpose3d_layer_norm_gelu`.
Tensor convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                   const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  check_convolution(input, conv_weight, conv_bias, weight, bias);
  if (supports_convolution(input)) return run_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return composed_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
}

// Backward recomputes the convolution in chunks of the batch. A chunk's output has at most this many bytes, unless one
// input has more. So neither the whole output nor cuDNN's copy of it is ever in memory.
constexpr int64_t kConvolutionBytes = int64_t(1) << 28;

// The op `convolution_backward`. For each chunk of the batch, it recomputes the convolution (minus the means of its
// rows) and rstd, then computes the gradients of GELU and layer norm, and then those of the convolution.
auto convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& conv_weight,
                          const OptionalTensor& conv_bias, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, double scale, std::array<bool, 5> output_mask) {
  check_convolution(input, conv_weight, conv_bias, weight, bias);
  check_tensor("grad_output", grad_output, output_sizes(input), input.scalar_type(), input);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto dtype = input.scalar_type();
  const auto cast = [](const Tensor& t, at::ScalarType to) { return t.defined() ? t.to(to) : t; };
  const Tensor w = contiguous(weight), b = contiguous(bias), w32 = cast(w, at::kFloat), b32 = cast(b, at::kFloat);
  // Gradients of parameters are sums over chunks, in float32 until the end.
  Tensor grad_input, grad_conv_weight, grad_conv_bias, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = allocate(input.sym_sizes(), dtype, input);
  // Also computed for conv_bias, whose gradient is NaN where that of conv_weight is (see the end).
  if (output_mask[1] || output_mask[2]) grad_conv_weight = at::zeros_like(conv_weight, at::kFloat);
  if (output_mask[3] && w.defined()) grad_weight = at::zeros_like(w32);
  if (output_mask[4] && b.defined()) grad_bias = at::zeros_like(b32);

  if (!input.is_meta() && grad_output.numel() > 0) {
    const bool needs_conv_grad = grad_input.defined() || grad_conv_weight.defined();
    const int64_t rows = grad_output[0].numel() / 64;  // per input of the batch
    const int64_t step = std::max<int64_t>(1, kConvolutionBytes / grad_output[0].nbytes());
    for (int64_t first = 0; first < input.size(0); first += step) {
      const int64_t count = std::min(step, input.size(0) - first);
      const Tensor x = make_aligned(input.narrow(0, first, count), 16), dy = grad_output.narrow(0, first, count);
      // run_convolution writes rows whose mean is 0, and fills in rstd.
      const Tensor statistics = at::zeros({2, count * rows}, x.options().dtype(at::kFloat));
      Tensor conv = run_convolution(x, conv_weight, conv_bias, {}, {}, eps, 1, mutable_ptr(statistics[1]));
      const auto [grad_conv, chunk_grad_weight, chunk_grad_bias] =
          layer_norm_backward(dy, conv, {64}, statistics, w32, b32, eps, kGelu, scale,
                              {needs_conv_grad, grad_weight.defined(), grad_bias.defined()});
      conv.reset();  // at::convolution_backward can reuse its memory
      if (grad_weight.defined()) grad_weight.add_(chunk_grad_weight);
      if (grad_bias.defined()) grad_bias.add_(chunk_grad_bias);
      if (!needs_conv_grad) continue;
      const auto [chunk_grad_input, chunk_grad_conv_weight, unused] =
          at::convolution_backward(grad_conv, x, conv_weight, c10::nullopt, 2, 1, 1, true, 0, 1,
                                   {grad_input.defined(), grad_conv_weight.defined(), false});
      if (grad_input.defined()) grad_input.narrow(0, first, count).copy_(chunk_grad_input);
      if (grad_conv_weight.defined()) grad_conv_weight.add_(chunk_grad_conv_weight);
    }
  }
  // conv_bias adds the same number to a whole row, and subtracting the row's mean removes it. So its gradient is 0, or
  // NaN where conv_weight's is.
  if (output_mask[2] && is_given(conv_bias)) grad_conv_bias = grad_conv_weight.sum({0, 2, 3, 4}).mul(0);
  if (!output_mask[1]) grad_conv_weight.reset();
  return std::make_tuple(grad_input, cast(grad_conv_weight, dtype), cast(grad_conv_bias, dtype),
                         cast(grad_weight, w.scalar_type()), cast(grad_bias, b.scalar_type()));
}

// Returns the gradients of composed_convolution's inputs. If gradients are enabled, they can be differentiated again.
variable_list composed_convolution_backward(const Tensor& grad_output, Tensors inputs, double eps, double scale,
                                            const GradMask& grad_mask) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode with_gradients(true);
  variable_list leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!grad_mask[i] || !inputs[i].defined()) continue;
    inputs[i] = inputs[i].alias();  // without an alias, grad() would also follow how one input depends on another
    inputs[i].requires_grad_();     // the user may have turned it off since forward
    leaves.push_back(inputs[i]);
  }
  const auto& [x, conv_weight, conv_bias, weight, bias] = inputs;
  const Tensor output = composed_convolution(x, conv_weight, conv_bias, weight, bias, eps, scale);
  auto gradients = torch::autograd::grad({output}, leaves, {grad_output}, /*retain_graph=*/create_graph, create_graph);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!grad_mask[i] || !inputs[i].defined()) gradients.insert(gradients.begin() + i, Tensor());
  }
  return gradients;
}

// The op `convolution_backward` for autograd. PyTorch's operations compute results that need gradients or tangents.
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

// The op `conv_transpose3d_layer_norm_gelu` for autograd.
Tensor convolution_autograd(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps, double scale) {
  static const auto op = find_op("conv_transpose3d_layer_norm_gelu", convolution);
  static const auto backward_op = find_op("convolution_backward", convolution_backward);
  const bool needs_grad = torch::autograd::compute_requires_grad(input, conv_weight, conv_bias, weight, bias);
  // Transforms and forward mode need PyTorch's operations. So does a GPU that does not support the kernel if a gradient
  // is needed: PyTorch then keeps the convolution's output, which is faster than recomputing it in backward.
  if (in_transform() || has_tangent(input, conv_weight, conv_bias, weight, bias) ||
      (needs_grad && !supports_convolution(input))) {
    return composed_convolution(input, conv_weight, conv_bias, weight, bias, eps, scale);
  }
  Tensor output = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(input, conv_weight, conv_bias, weight, bias, eps, scale);
  }();
  if (!needs_grad) return output;
  const auto backward = [=](const variable_list& grads, const Tensors& saved, const GradMask& grad_mask) {
    const auto& [x, cw, cb, w, b] = saved;
    const auto [dx, dcw, dcb, dw, db] = backward_op.call(grads[0], x, cw, cb, w, b, eps, scale, grad_mask);
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
#ifdef LAYERNORM_HAS_EPILOGUE
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
  // Defined last, because _find_or_build and _load_epilogue take this op as a sign that the library is loaded.
  // _load_epilogue looks for it without a lock, while another thread may still be loading.
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

_OVERVIEW = r"""
// ==== Overview: which kernels run which rows ====
//
// A row is what one mean and one variance are computed from. "Aligned" means that every row of every tensor starts on a
// 16-byte boundary. An epilogue is an activation or a scale that is applied to the result of layer normalization. The
// dispatch section tries the kernel families from top to bottom, except for (1), and uses the first that supports a
// call:
//
//   kernel family   rows                                                      input is read   why it is fast
//   registers       forward: up to 32 KB (28 KB if not aligned)               once            a row stays in registers
//                   backward: up to 4096 columns (aligned 16-bit rows: 8192)
//                   (1)
//   shared memory   forward, aligned, without epilogue, up to 71 KB           once            two rows per SM overlap
//                   (16 bits: 43 KB) (2), at least 15 rows per SM,
//                   sm_80 and newer
//   pipelined       aligned, without epilogue, up to 8192 columns per SM      once            loads never wait for
//                   (2), sm_80 and newer                                                      statistics
//   grid-resident   forward, aligned, without epilogue, float32, up to        once            many SMs together hold a
//                   32768 columns per SM, at least 4 rows (3), sm_90 to                       row on chip
//                   sm_110
//   two-pass        everything else, on every GPU                             twice           weight and bias stay in
//                                                                                             registers
//   convolution     ConvTranspose3d, LayerNorm, GELU and scaling in one       5 times,        no intermediate result
//                   kernel (KernelBench level 2, problem 34)                  mostly from     reaches memory
//                                                                             L2 (4)
//
// (1) In backward, aligned rows of more than 8 KB go to the pipelined kernels, if these support them.
// (2) Less on GPUs with little shared memory per block: two rows, or three stages of the pipeline, must fit. On a GPU
//     with more than 160 SMs, a row uses at most 160.
// (3) At least 4 rows for each group of SMs that shares rows.
// (4) Four blocks read each line of input, one for each parity of depth and height. Each of them reads five lines of
//     input for the four lines of output that it computes at once: 4 * 5/4 = 5. The four run at about the same time, so
//     that L2 has most lines.
//
// Numbers in comments were measured when the choice that they explain was made, often with an earlier version of this
// file. They show the difference between two settings, not today's speed: current speeds are in .bench/RESULTS.md.
//
// Words that all sections use:
//   pack            16 bytes of consecutive elements: 4 of float32 or 8 of 16 bits. One instruction loads it.
//   V               number of elements in a pack
//   affine          weight or bias, or both
//   unaligned       not aligned: at least one row of one tensor does not start on a 16-byte boundary
//   per_col         1 / cols, where cols is the length of a row
//   xhat            the normalized input, (x - mean) * rstd
//   wdy             weight * grad_output
//   spill           the compiler runs out of registers and keeps a variable in local memory, which is slower. It never
//                   changes a result. test_no_kernel_has_local_memory (.tests/test_build.py) fails if a kernel spills.
//                   It compiles for the architectures that it lists, and is skipped without nvcc on PATH. Add the
//                   number of a new row of kArchs there.
//   copy bandwidth  the speed of a device-to-device copy of the bytes that a kernel must read and write. Measurements
//                   are percentages of it.
//
// Words whose meaning depends on the section:
//   part    of a row       _STATISTICS: any numbers of a row that are measured together
//                          _PIPELINED: the columns of a slice that kLanesPerPart neighbouring lanes measure
//                          _TWO_PASS: the statistics of one piece of a row (the type Part)
//   slice   of a row       _EXCHANGE, _PIPELINED, _GRID_RESIDENT: the columns that one block has
//   chunk                  _TWO_PASS: the columns of a row that a block loads at once
//                          _CONVOLUTION: the input channels of one step, 16 (16 bits) or 8 (float32)
//   slot                   _STATISTICS and the families that call combine_row: where one warp of a row puts its result
//                          _EXCHANGE, _PIPELINED, _GRID_RESIDENT: where a ring holds one stage
//   stage                  _EXCHANGE: the data that a slot of a ring holds, or the slot itself
//                          _PIPELINED: a slot, and the slice in it. _GRID_RESIDENT: 8 KB of a slice, in a slot or not
//   round                  _EXCHANGE, _PIPELINED, _GRID_RESIDENT: one use of every slot of a ring
//   group                  _EXCHANGE, _PIPELINED, _GRID_RESIDENT: the blocks that share rows
//                          _CONVOLUTION: four warps of a block
//   tile                   _TWO_PASS: the columns that a block of the third kernel of backward handles
//                          _CONVOLUTION: 16 output channels of a line
//   line                   _MEMORY, _EXCHANGE, _PIPELINED: a cache line, 128 bytes. _CONVOLUTION: the columns of one
//                          batch, depth and height. In the choice tables of _REGISTERS: a line of the table
//   step                   _REGISTERS: the distance between a team's rows. _GRID_RESIDENT: an iteration of the loop
//                          _CONVOLUTION: a part of a product
//   wave                   _REGISTERS: one load by each of 2048 threads of every SM
//                          _TWO_PASS, _SHARED_MEMORY: the blocks that all SMs run at once
//   launch                 the host function of a kernel family that runs a call (of the register kernels:
//                          launch_forward and launch_backward), or a variable of type Launch, with which launch_kernel
//                          launches one kernel
//
// The strings below are sections of one source, in the order in which to read them. The line "Uses:" of a section names
// the earlier sections from which it needs a name (test_sections_name_what_they_use in .tests/test_dispatch.py compares
// it with the code). All sections use _INTERFACE and _OVERVIEW. The epilogue and the convolution are compiled into a
// second library, from the same text and with LAYERNORM_HAS_EPILOGUE defined.

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

// Loops over i from 0 to n - 1: unrolled completely, or not at all.
#define UNROLL(i, n) _Pragma("unroll") for (int i = 0; i < int(n); ++i)
#define ROLLED(i, n) _Pragma("unroll 1") for (int i = 0; i < int(n); ++i)
// A condition that holds wherever it is written. Emulated GPUs report an error if it does not (.tests/emulator.h); in
// code for a GPU it is nothing.
#ifndef LAYERNORM_CHECK
#define LAYERNORM_CHECK(condition)
#endif
#pragma nv_diag_suppress 177  // "declared but never referenced": some architectures lack all callers of a function

namespace TORCH_EXTENSION_NAME {
namespace {
"""

_ARCH = r"""
// ==== Architectures ====
// Uses: nothing.
//
// The table kArchs holds the differences between GPU architectures, except one: only sm_90a has wgmma (see
// kHasAsyncProducts below, and _codes in section 2). To support a new architecture, add a row with the features that it
// has, and its number to test_no_kernel_has_local_memory (.tests/test_build.py). Take the numbers of blocks of the
// nearest row, raise them as long as ptxas reports no spills, then measure.
//
// Safe changes, and what guards them. Run the tests with --full.
//   - Numbers of blocks affect only speed. They must be at least 1, and row_blocks at least 2, because some kernels are
//     compiled for one block less. The threads of these blocks must not exceed sm_threads, because ptxas would ignore
//     the bound. static_asserts check all this. If a number is too high, a kernel spills.
//   - affine_packs_float32 affects only speed and registers. If it is too high, a kernel can spill.
//   - sm_threads affects only the limits above and the launch bounds of the shared-memory kernel. No test checks it.
//   - has_async_copy and has_bulk_copy = true for a GPU that lacks the feature: ptxas reports an error when it compiles
//     for this GPU, also in test_no_kernel_has_local_memory.
//   - has_async_copy and has_large_shared decide which kernel families run. If one is wrong, other families run than
//     .tests/cases.py expects, and test_cases_launch_expected_kernels or, for sm_100 and 110,
//     test_newer_gpus_with_large_shared_memory_launch_the_kernels_of_hopper fails (.tests/test_dispatch.py). If
//     has_large_shared is true for a GPU that lacks it, ptxas reports an error before sm_90, and on sm_120 nothing
//     changes, because no plan fits its 99 KB. Emulated GPUs have the device code of the rows of 80 and 90 only (see
//     kArch). So branches for GPUs without has_async_copy are compiled, but run on a GPU before sm_80 only. Nothing
//     checks that has_bulk_copy is true where it could be.
//   - The order of the rows is guarded by a static_assert.

// One row of the table. Code for an architecture without a row of its own uses the nearest older row: sm_89 uses the
// row of 86.
struct Arch {
  int number;             // 90 for sm_90
  int sm_threads;         // maximum number of resident threads per SM
  bool has_async_copy;    // cp.async, mbarrier, L2 policies of loads, and L2 prefetches
  bool has_bulk_copy;     // cp.async.bulk, mbarrier transactions, and programmatic dependent launches
  bool has_large_shared;  // 227 KB of shared memory per block

  // Launch bounds: the number of blocks per SM that a kernel is compiled for. More blocks leave fewer registers per
  // thread. With these numbers, no kernel spills (nvcc 13.0). Changing one changes only speed. All are launch
  // bounds of the register kernels (see registers::Bounds); the two-pass and shared-memory kernels use row_blocks, too.
  // A load is 16 bytes.
  int row_blocks;                      // blocks of 512 threads where registers::Bounds has no other number
  int two_load_blocks[2];              // blocks of 512 threads with two loads each: [0] float32, [1] 16 bits
  int four_load_blocks_16_bits;        // blocks of 512 threads with four loads each, 16 bits
  int warp_four_load_blocks_16_bits;   // blocks of 128 threads with four loads each, one warp per row, 16 bits
  int short_blocks_16_bits;            // blocks of 128 threads with one load from each of several rows, 16 bits
  int short_unaligned_blocks_16_bits;  // the same for rows that are not aligned

  int affine_packs_float32;  // packs of weight and bias that a thread of the shared-memory kernel loads at once
};

// Sorted by number. arch_of relies on that. The order of the numbers in a row is that of the fields of Arch; the row of
// Hopper repeats their names.
//
// With 1 block, a kernel may use all registers that its number of threads allows: 255 per thread with 128 threads, and
// 128 with 512. The row of 80 has 1 in three places where the row of 86 has 2 or 5, because more blocks spilled with an
// earlier version of the kernels. With nvcc 13.0, the numbers of 86 do not spill today. They were not tried on an A100.
constexpr Arch kArchs[] = {
    {75, 1024, false, false, false, 2, {1, 1}, 1, 5, 5, 5, 2},  // Turing
    {80, 2048, true, false, false, 3, {1, 1}, 1, 1, 7, 1, 2},   // Ampere: A100
    {86, 1536, true, false, false, 3, {1, 1}, 2, 5, 7, 5, 2},   // Ampere and Ada
    {/* number */ 90, /* sm_threads */ 2048, /* has_async_copy */ true, /* has_bulk_copy */ true,
     /* has_large_shared */ true, /* row_blocks */ 3, /* two_load_blocks: float32, 16 bits */ {3, 2},
     /* four_load_blocks_16_bits */ 2, /* warp_four_load_blocks_16_bits */ 5, /* short_blocks_16_bits */ 7,
     /* short_unaligned_blocks_16_bits */ 6, /* affine_packs_float32 */ 2},  // Hopper
    {100, 2048, true, true, true, 3, {2, 2}, 2, 5, 7, 6, 1},                 // Blackwell: B200, B300
    {110, 1536, true, true, true, 3, {2, 2}, 2, 5, 7, 6, 1},                 // Blackwell: Thor
    {120, 1536, true, true, false, 2, {2, 2}, 1, 5, 7, 6, 1},                // Blackwell: RTX
};

// Returns the row for an architecture: the newest that is not newer than `number`.
constexpr Arch arch_of(int number) {
  Arch found = kArchs[0];
  for (const Arch& arch : kArchs) {
    if (arch.number <= number) found = arch;
  }
  return found;
}

constexpr bool archs_are_valid() {
  int number = 0;
  for (const Arch& arch : kArchs) {
    if (arch.number <= number || arch.row_blocks < 2 || arch.affine_packs_float32 < 1) return false;
    for (int blocks :
         {arch.two_load_blocks[0], arch.two_load_blocks[1], arch.four_load_blocks_16_bits,
          arch.warp_four_load_blocks_16_bits, arch.short_blocks_16_bits, arch.short_unaligned_blocks_16_bits}) {
      if (blocks < 1) return false;
    }
    const int large =
        std::max({arch.row_blocks, arch.two_load_blocks[0], arch.two_load_blocks[1], arch.four_load_blocks_16_bits});
    const int small =
        std::max({arch.warp_four_load_blocks_16_bits, arch.short_blocks_16_bits, arch.short_unaligned_blocks_16_bits});
    if (512 * large > arch.sm_threads || 128 * small > arch.sm_threads) return false;
    number = arch.number;
  }
  return true;
}
static_assert(archs_are_valid(),
              "kArchs: ascending numbers; row_blocks at least 2, others at least 1; no more threads than sm_threads");

// The architecture that device code is compiled for. Instructions that some architectures lack are inside an
// `if constexpr` on one of its fields.
//
// Host code is compiled once for all GPUs, so it cannot have the row of the GPU at compile time. In host code, kArch is
// always the row of sm_90, only so that expressions with kArch compile. Host code that needs the features of the GPU
// reads Device::arch. Host code must not use a number that depends on kArch: on another GPU, it would differ from the
// number in device code. Emulated GPUs do not show this mistake: they compile host and device code with the same
// row, that of sm_80 for sm_80 to sm_89, and that of sm_90 for all others. Where host code uses sizes that could
// come to depend on kArch, static_asserts compare them with numbers (see Control of the pipelined and the grid-resident
// kernels).
#ifdef __CUDA_ARCH__
constexpr Arch kArch = arch_of(__CUDA_ARCH__ / 10);
#else
constexpr Arch kArch = arch_of(90);
#endif

// True if the code may contain asynchronous matrix products (wgmma): only code for sm_90a may.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasAsyncProducts = true;
#else
constexpr bool kHasAsyncProducts = false;
#endif
"""

_ELEMENTS = r"""
// ==== Elements: vectors, packs, conversions, arithmetic ====
// Uses: nothing.
//
// Memory holds elements of type T: float, __half or __nv_bfloat16. A thread loads them as a Pack, converts the Pack to
// a Vec of floats with widened(), computes in float, converts the result with packed(), and stores it. Kernels keep a
// row in registers as Packs, where 16-bit elements need half the space, and convert them each time they need them.
//
// Safe changes, and what guards them. "A case" is a case of test_values in .tests/test_values.py.
//   - The order of elements in a word must be that in memory. Otherwise most 16-bit cases fail.
//   - fast_exp2, fast_reciprocal and inverse_root can become more exact. Emulated GPUs compute them exactly, so only a
//     real GPU shows if they become less exact: test_activation_of_every_argument_is_accurate for the first two,
//     test_rstd_of_long_rows_is_accurate for inverse_root. If you change inline assembly, emulator.py may not find the
//     text that it replaces; it then says what to edit (BODIES or STATEMENTS).
//   - rounded_product must not be fused with a subtraction. The cases with one column are there for this, but
//     need a real GPU: on emulated ones they succeed without the intrinsic, too.
//   - add_pairs must round each sum, as PyTorch's convolution does. Only test_conv_rounds_like_pytorch, which needs a
//     Hopper GPU, would show a difference.
//   - UNROLL must stay in loops over elements: an array whose index is not known at compile time goes to local memory,
//     which test_no_kernel_has_local_memory finds like a spill. opaque and keep_pointer are free (see there).

// ---- Vectors ----

// V numbers of type A. The operators +, - and * work element by element, and accept a single number on the right.
// Vec<float, V>() is all zeros, so Vec<float, V>() + x is V times the number x.
template <typename A, int V>
struct Vec {
  static constexpr int kSize = V;
  A data[V];
  __device__ A& operator[](int v) { return data[v]; }
  __device__ A operator[](int v) const { return data[v]; }
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

constexpr bool is_power_of_two(int x) { return x > 0 && (x & (x - 1)) == 0; }

// ---- Packs ----

// V consecutive elements in the layout that they have in memory. A pack of 16 bytes moves with one instruction. Two
// 16-bit elements share a 32-bit word, the first in its lower half, so that pairs are converted together. Taking
// elements out of words and putting them back one by one would be half of all instructions.
template <typename T, int V>
struct alignas(std::min<size_t>(16, sizeof(T) * V)) Pack {
  static constexpr bool kPairs = sizeof(T) == 2 && V > 1;
  std::conditional_t<kPairs, uint32_t, T> data[kPairs ? V / 2 : V];
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

// Converts two elements that share a word to float.
template <typename T>
__device__ float2 widen_pair(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(bit_cast<__half2>(bits));
  } else {  // a bfloat16 is the upper half of a float
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

// Adds two words of two elements each, rounding each sum to T. The compiler cannot fuse these additions with products.
template <typename T>
__device__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  return bit_cast<uint32_t>(__hadd2_rn(bit_cast<Pair>(a), bit_cast<Pair>(b)));
}

// Rounds x and y to T and returns them as one word, x in its lower half.
template <typename T>
__device__ uint32_t narrow_pair(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    return bit_cast<uint32_t>(__floats2half2_rn(x, y));
  } else {
    return bit_cast<uint32_t>(__floats2bfloat162_rn(x, y));
  }
}

// Converts a pack to floats.
template <typename T, int V>
__device__ Vec<float, V> widened(const Pack<T, V>& pack) {
  Vec<float, V> x;
  if constexpr (Pack<T, V>::kPairs) {
    UNROLL(n, V / 2) {
      const float2 two = widen_pair<T>(pack.data[n]);
      x[2 * n] = two.x;
      x[2 * n + 1] = two.y;
    }
  } else {
    UNROLL(v, V) x[v] = widen(pack.data[v]);
  }
  return x;
}

// Rounds floats to T and returns them as a pack.
template <typename T, int V>
__device__ Pack<T, V> packed(const Vec<float, V>& x) {
  Pack<T, V> pack;
  if constexpr (Pack<T, V>::kPairs) {
    UNROLL(n, V / 2) pack.data[n] = narrow_pair<T>(x[2 * n], x[2 * n + 1]);
  } else if constexpr (sizeof(T) == 2) {
    pack.data[0] = bit_cast<T>(uint16_t(narrow_pair<T>(x[0], x[0])));
  } else {
    UNROLL(v, V) pack.data[v] = x[v];
  }
  return pack;
}

// ---- Arithmetic ----

// The hardware's approximations of 2^x and 1 / x, within 2 units in the last place.
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

// Returns 1 / sqrt(x), more exactly than rsqrtf, whose error is up to 2 units in the last place. One Newton step
// refines rsqrtf's result y to y + y / 2 * (1 - x y^2). In 1 - x y^2 nearly all digits cancel, so x y is kept in two
// floats: `high` is the product, and `low` its rounding error. Used where rstd is computed once per row, not by every
// thread.
__device__ inline float inverse_root(float x) {
  const float estimate = rsqrtf(x), high = x * estimate, low = fmaf(x, estimate, -high);
  const float refined = fmaf(0.5f * estimate, fmaf(-high, estimate, 1) - low * estimate, estimate);
  return isnan(refined) ? estimate : refined;  // x was 0 or infinity
}

// Returns a * b, rounded to float. Without the intrinsic, the compiler could fuse the product with a later subtraction
// and keep its extra digits. grad_input of a row of one column is weight * grad_output minus the mean of that, which is
// the same product, rounded: with a fused product the difference would be the rounding error instead of 0. The cases of
// .tests/test_values.py include rows of one column.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }

template <int V>
__device__ Vec<float, V> rounded_product(Vec<float, V> a, const Vec<float, V>& b) {
  UNROLL(v, V) a[v] = rounded_product(a[v], b[v]);
  return a;
}

// opaque and keep_pointer return their argument. They change only which machine code nvcc generates, never a result, so
// you can add and remove calls freely. Judge by the registers and local memory that .tests/machine_code.py prints, and
// by the time that .bench/sweep.py prints. A newer nvcc may not need them.

// Returns x, but hides from the compiler where it came from. The compiler then neither recomputes x at each use, nor
// computes values that depend on x long before their use, where they would occupy registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns the pointer, but makes the compiler compute it only once, instead of once per pack that is loaded through it
// (H200, backward of bf16 rows of 2041: 79% -> 83% of copy bandwidth). Hiding a pointer also hides which address space
// it points to, so __builtin_assume states that it is global memory. (Do not use it for a pointer to shared memory.)
template <typename T>
__device__ T* keep_pointer(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}
"""

_MEMORY = r"""
// ==== Memory: loads, stores, L2 policies and prefetches, weight and bias ====
// Uses: _ARCH, _ELEMENTS.
//
// Safe changes, and what guards them. "A case" is a case of test_values in .tests/test_values.py;
// .tests/mutants.py lists bugs that the tests detect.
//   - L2 policies, EVICT_FIRST and prefetches affect only speed: compare with .bench/sweep.py. No test notices a
//     missing prefetch. On emulated GPUs, a case fails if a prefetch leaves all tensors or is not a multiple of 16
//     bytes.
//   - Inline assembly is replaced on emulated GPUs, so test a change of it on a real GPU.
//   - Unaligned must load the last 16 bits alone. With a whole word, emulated GPUs report an access outside of all
//     tensors, for example in the case 9x640-bf16-plain-w. The mutants with "unaligned rows" in their names change how
//     words are joined, and which rows count as aligned.
//   - with_same_dtype only saves instructions. Its conditions can be written differently if no kernel spills on any
//     architecture.
//   - The dtype and presence of weight and bias: cases have all combinations ("affine" in .tests/cases.py).

// ---- Loads and stores ----

// Loads V elements. p must be aligned to Pack<T, V>.
template <typename T, int V>
__device__ Pack<T, V> load(const T* p) {
  return *reinterpret_cast<const Pack<T, V>*>(p);
}

// Rounds x to T and stores it. p must be aligned to Pack<T, V>. With EVICT_FIRST, the written lines are the first that
// leave L2, if a pack has 16 bytes; smaller packs are stored as without it. It is meant for output so large that it
// leaves L2 before anything reads it.
template <typename T, int V, bool EVICT_FIRST = false>
__device__ void store(T* p, const Vec<float, V>& x) {
  const Pack<T, V> pack = packed<T>(x);
  if constexpr (EVICT_FIRST && sizeof(pack) == 16) {
    __stcs(reinterpret_cast<uint4*>(p), bit_cast<uint4>(pack));
  } else {
    *reinterpret_cast<Pack<T, V>*>(p) = pack;
  }
}

enum class L2Priority { EvictFirst, EvictLast };  // whether data leaves L2 first or last when L2 is full

// Returns the policy for loads and prefetches with a priority, or 0 before sm_80, where loads ignore it.
__device__ inline uint64_t l2_policy(L2Priority priority) {
  uint64_t first = 0, last = 0;  // both are created, because a branch would delay the first load
  if constexpr (kArch.has_async_copy) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  }
  return priority == L2Priority::EvictLast ? last : first;
}

// Loads V elements with an L2 policy, which only loads of 16 bytes use. p must be aligned to Pack<T, V>.
template <typename T, int V>
__device__ Pack<T, V> load(const T* p, uint64_t policy) {
  if constexpr (kArch.has_async_copy && sizeof(Pack<T, V>) == 16) {
    uint4 bits;
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(p), "l"(policy));
    return bit_cast<Pack<T, V>>(bits);
  } else {
    return load<T, V>(p);
  }
}

constexpr int kLineBytes = 128;   // size of a cache line
constexpr int kSectorBytes = 32;  // size of a sector, the part of a cache line that is read from memory by itself

// Starts to copy `bytes` bytes into L2. Needs sm_90; `global` and `bytes` must be multiples of 16. If you add a call
// inside an `if`, look at the machine code (cuobjdump -sass): every path to the instruction UBLKPF must set the
// register that holds `bytes`. In one such call, ptxas 13.0 set it on one path only, and four times as many bytes came.
__device__ inline void prefetch_to_l2(const void* global, int bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

// Returns true for the threads that call prefetch_range for their block. From sm_90 on, that is one thread, because one
// instruction prefetches the whole range. Before sm_90, it is all threads, each of which prefetches sectors of its own.
// Before sm_80, it is none.
__device__ inline bool is_prefetching_thread() {
  if constexpr (kArch.has_bulk_copy) return threadIdx.x + threadIdx.y == 0;
  if constexpr (kArch.has_async_copy) return true;
  return false;
}

// Starts to copy `bytes` bytes into L2; `global` and `bytes` must be multiples of 16. From sm_90 on, the calling thread
// prefetches all of them. Before sm_80, the call does nothing. In between, each of `threads` threads must make the
// call; thread number `thread` prefetches the sector at offset thread * step, and one every threads * step bytes from
// there on. (PTX does not say how many bytes the instruction for older GPUs fetches. With a step of two sectors, it
// seems to fetch both, see kPrefetchStep.) The instruction for older GPUs accepts no policy, but has variants with the
// priorities evict_last and evict_normal. The former is used here, which is also the priority of large input (see
// input_priority). This choice was not measured: no GPU before sm_90 was available.
__device__ inline void prefetch_range(const void* global, int bytes, uint64_t policy,
                                      int thread = threadIdx.y * blockDim.x + threadIdx.x,
                                      int threads = blockDim.x * blockDim.y, int step = kSectorBytes) {
  if constexpr (kArch.has_bulk_copy) {
    prefetch_to_l2(global, bytes, policy);
  } else if constexpr (kArch.has_async_copy) {
    for (int offset = thread * step; offset < bytes; offset += threads * step) {
      asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(static_cast<const char*>(global) + offset));
    }
  }
}

// Loads V elements and converts them to float. With AS_PACK, they are loaded as a Pack, to which p must be aligned.
// Otherwise they are loaded one by one.
template <int V, bool AS_PACK, typename T>
__device__ Vec<float, V> load_widened(const T* p) {
  if constexpr (AS_PACK) {
    return widened(load<T, V>(p));
  } else {
    Vec<float, V> x;
    UNROLL(v, V) x[v] = widen(p[v]);
    return x;
  }
}

// Returns `affine`[col .. col + V), where `affine` is weight or bias. If it is null, all V numbers are `fallback`. Its
// dtype is float32 if `affine_float32`, and T otherwise. AS_PACK: see load_widened.
template <typename T, int V, bool AS_PACK = true>
__device__ Vec<float, V> load_affine(const void* affine, bool affine_float32, int64_t col, float fallback) {
  if (affine == nullptr) return Vec<float, V>() + fallback;
  if (sizeof(T) == 2 && affine_float32) return load_widened<V, AS_PACK>(static_cast<const float*>(affine) + col);
  return load_widened<V, AS_PACK>(static_cast<const T*>(affine) + col);
}

// Stores x to `affine`[col .. col + V), the gradient of weight or bias, unless that is null.
template <typename T, int V>
__device__ void store_affine(void* affine, bool affine_float32, int64_t col, const Vec<float, V>& x) {
  if (affine == nullptr) return;
  if (sizeof(T) == 2 && affine_float32) {
    store<float, V>(static_cast<float*>(affine) + col, x);
  } else {
    store<T, V>(static_cast<T*>(affine) + col, x);
  }
}

// ---- Rows that do not all start on a 16-byte boundary ----

// V consecutive elements that start at any element of a row. load() reads the 32-bit words that hold them, and get()
// returns them as a Pack. The two are separate functions so that several loads can be in flight before the first get().
//
// A float32 element is a word by itself. If elements have 16 bits, the first may be the upper half of a word;
// `mid_word` is then 1. Example with V = 8, where e0 to e7 are the elements, and a dot is a neighbour that is not
// needed:
//                   word 0    word 1    word 2    word 3    word 4
//   mid_word = 0    e0 e1     e2 e3     e4 e5     e6 e7     e7         get() returns words 0 to 3
//   mid_word = 1    .  e0     e1 e2     e3 e4     e5 e6     e7         get() joins the upper half of each word with the
//                                                                      lower half of the next one
template <typename T, int V>
struct Unaligned {
  static constexpr int kWords = sizeof(T) * V / sizeof(uint32_t);
  uint32_t words[kWords + 1];

  static_assert(sizeof(T) == 4 || V % 2 == 0, "all packs of a row must have the same mid_word");

  // Returns mid_word for elements at p. All packs of a row have the same, because V is even for 16-bit elements.
  static __device__ int starts_mid_word(const T* p) {
    return sizeof(T) == 2 ? reinterpret_cast<uintptr_t>(p) / sizeof(T) % 2 : 0;
  }

  __device__ void load(const T* p, int mid_word) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(p - mid_word);
    UNROLL(w, kWords) words[w] = from[w];
    // Loads 16 bits, because the other half of the last element's word may be outside of the tensor. (The other half of
    // the first word may be, too, but it is in the same cache line, and it is not used.) With mid_word = 0
    // they are not needed, but a branch that skips them would make the loads wait for one another (H200, bf16 rows of
    // which only input is not aligned: 67% of copy bandwidth with the branch, 83% without it).
    if (sizeof(T) == 2) words[kWords] = reinterpret_cast<const uint16_t*>(p)[V - 1];
  }

  __device__ Pack<T, V> get(int mid_word) const {
    uint32_t joined[kWords];
    UNROLL(w, kWords) joined[w] = __funnelshift_r(words[w], words[w + 1], 16 * mid_word);
    return bit_cast<Pack<T, V>>(joined);
  }
};

// ---- Weight and bias of forward ----

// Calls f with std::true_type if weight and bias are both present and have the 16-bit dtype of input, and otherwise
// with std::false_type. f is compiled for both cases. Checking this at each load instead would be 1/5 of all
// instructions. EARLY: the kernel has loaded weight and bias before, so that f is compiled only for std::false_type.
template <typename T, bool EARLY = false, typename F>
__device__ void with_same_dtype(const Forward& call, F f) {
  // The condition is a lambda, because three kernels spill if it is written inside the `if` (nvcc 13.0; the results
  // are the same).
  const auto has_same_dtype = [&] { return call.weight != nullptr && call.bias != nullptr && !call.affine_float32; };
  if constexpr (sizeof(T) == 2 && !EARLY) {
    if (has_same_dtype()) return f(std::true_type());
  }
  f(std::false_type());
}

// Loads weight[col .. col + V) and bias[col .. col + V). SAME_DTYPE is the argument of with_same_dtype's f. UNALIGNED:
// the row is not aligned in input or in output. Its packs then start at column `begin`, the first that is 16-byte
// aligned in output: 7 if output begins 2 bytes after a 16-byte boundary and is 16-bit, 0 if output is aligned. col is
// begin plus a multiple of V. Aligned rows do not use `begin`.
template <typename T, int V, bool UNALIGNED, bool SAME_DTYPE>
__device__ void load_affine_pair(Vec<float, V>& weight, Vec<float, V>& bias, const Forward& call, int col, int begin) {
  const T *w = static_cast<const T*>(call.weight), *b = static_cast<const T*>(call.bias);
  if constexpr (SAME_DTYPE && UNALIGNED && V > 1) {
    // Where only input is not aligned, weight and bias are aligned and are loaded as packs, below (H200, bf16 rows of
    // 4096: 91% of copy bandwidth, 85% without this distinction).
    const auto bits = reinterpret_cast<uintptr_t>(w + begin) | reinterpret_cast<uintptr_t>(b + begin);
    if (bits % 16 != 0) {
      const auto load_words = [&](Vec<float, V>& x, const T* p) {
        Unaligned<T, V> words;
        const int mid_word = words.starts_mid_word(p + begin);
        words.load(p + col, mid_word);
        x = widened(words.get(mid_word));
      };
      load_words(weight, w);
      load_words(bias, b);
      return;
    }
  }
  if constexpr (SAME_DTYPE) {
    weight = widened(load<T, V>(w + col));
    bias = widened(load<T, V>(b + col));
  } else {
    constexpr int F = UNALIGNED ? 1 : V;  // elements per load
    UNROLL(n, V / F) {
      const auto some_weight = load_affine<T, F>(call.weight, call.affine_float32, col + n * F, 1);
      const auto some_bias = load_affine<T, F>(call.bias, call.affine_float32, col + n * F, 0);
      UNROLL(f, F) {
        weight[n * F + f] = some_weight[f];
        bias[n * F + f] = some_bias[f];
      }
    }
  }
}
"""

_STATISTICS = r"""
// ==== Statistics: mean, variance, reductions ====
// Uses: _ELEMENTS.
//
// A row x of n columns is normalized with two numbers:
//   mean = sum(x) / n
//   rstd = 1 / sqrt(m2 / n + eps), where m2 = sum((x - mean)^2), so that m2 / n is the variance
// This section computes sums, means and m2 in a thread, and combines them over the lanes of a warp, the warps of a
// block, and the parts of a row.
//
// ---- How accurate, and what may be changed ----
// The tests are in .tests/test_values.py. Most call compare_with_float64 (.tests/reference.py), which has two bounds:
//   - Every element of a result is within the error of float32 arithmetic (exact_parts): 64 roundings of each
//     intermediate result, and 16 of the mean. 16-bit results may be off by half a unit in the last place more.
//   - The largest error of a float32 result is at most 1.5 times PyTorch's, plus one unit in the last place of the
//     largest element. In many tests, a result that is within an eighth of the first bound need not satisfy this.
// Some tests are stricter: test_constant_rows_give_bias (exact), test_mean_is_more_precise_than_float32 (the mean
// within 0.05 units in the last place of a float, for rows that do not fit the register kernels) and
// test_rstd_of_long_rows_is_accurate (0.8 units; only on a real GPU).
//
// Safe changes, and what guards them:
//   - The order of additions is free within these bounds, but must not depend on timing. test_values (emulated GPUs)
//     and test_every_run_gives_the_same_bits (test_device.py, real GPUs) compare the bits of two runs. The sum of equal
//     numbers must be exact (see sum_of). Four equal float32 numbers, a pack, have an exact sum in any order: 3 x may
//     be rounded, but adding x then gives exactly 4 x. So no test notices if sum_of adds a pack one after the other.
//     With more numbers, only the tree is exact.
//   - reference_of and sampled_column can choose any number that is the same for all threads of the row and that, in a
//     row of equal numbers, is exactly this number. test_large_mean_is_accurate, test_outliers_do_not_spoil_their_row
//     and test_constant_rows_give_bias check the accuracy. test_outliers_do_not_spoil_their_row sets exactly the
//     columns that sampled_column returns, so change it with them. It fails if an outlier becomes the reference.
//   - Where a comment mentions overflow or NaN, the tests with "overflow", "huge" and "nan" in their names guard it.
//   - combine_row: the mutants with "barrier left out" and "one set of slots" (.tests/mutants.py) show that the tests
//     find a missing barrier, and slots that are used again too early. The second is found on emulated GPUs only.
//   - kMaxWarps can be 16 or 32; static_asserts say so. With 32 the slots need twice the shared memory.
//
// ---- Why not the sum of squares ----
// m2 equals sum(x^2) - n mean^2, but in float that difference has no correct digits if the mean is much larger than
// the spread. For the row {10000, 10001, 10002}, the two terms are 300060005 and 300060003. Neighbouring floats of that
// size are 32 apart, both terms are rounded to 300060000, and m2 would be 0 instead of 2.
//
// So a number close to the mean is always subtracted from x before the square is computed.
//
// Rows of equal numbers are the hardest case: PyTorch returns exactly bias for them. Their variance is 0, which makes
// rstd = 1 / sqrt(eps), for example 316 if eps is 1e-5. Such an rstd would magnify any error of the mean. Every method
// below computes the mean of such a row exactly, so that x - mean is 0.
//
// ---- Formulas ----
// (1) Shifted sum. For any number c,
//       mean = c + sum(x - c) / n.
//     If c is close to the mean, the terms are small, and so are their rounding errors.
//
// (2) Correction of a mean. A computed mean m is a little off, by rounding. With d = x - m,
//       offset = sum(d) / n,   true mean = m + offset,   m2 = sum(d^2) - n offset^2 = sum(d^2) - offset * sum(d).
//     The differences d are small and nearly exact, so that offset has several correct digits of its own.
//
// (3) Combination of two parts of a row, with counts na and nb, means ma and mb, and m2a and m2b about their own means
//     (Chan, Golub, LeVeque, 1979; with nb = 1 it is Welford's method). With delta = mb - ma and n = na + nb,
//       mean = mb - delta * na / n,   m2 = m2a + m2b + delta^2 * na nb / n.
//
// (4) Combination of many parts at once: (1) with c the mean of one part, then m2 about the result:
//       mean = c + sum(n_i (mean_i - c)) / n,   m2 = sum(m2_i + n_i (mean_i - mean)^2).
//
// Example for (3) and (4). The row {1, 3, 4, 6, 8} is measured in two parts:
//   part a = {1, 3}:     na = 2, ma = 2, m2a = 1 + 1 = 2
//   part b = {4, 6, 8}:  nb = 3, mb = 6, m2b = 4 + 0 + 4 = 8
//   (3)  delta = 4,   mean = 6 - 4 * 2/5 = 4.4,   m2 = 2 + 8 + 16 * 6/5 = 29.2
//   (4)  c = ma = 2,  mean = 2 + (2 * 0 + 3 * 4) / 5 = 4.4,   m2 = (2 + 2 * 2.4^2) + (8 + 3 * 1.6^2) = 29.2
//   Directly: 3.4^2 + 1.4^2 + 0.4^2 + 1.6^2 + 3.6^2 = 29.2. The variance is 29.2 / 5 = 5.84.
//
// ---- A mean as two floats ----
// Near 10000 neighbouring floats are 1/1024 apart, so a mean that is rounded to float is off by up to 0.0005. A row
// with that mean and a spread of 1 then has errors of up to 0.0005 in its output. The kernel families differ here:
//   - Registers, float32: the mean is one float. Formula (2) corrects it, and the result is rounded again, so that it
//     is off by little more than that rounding. This is acceptable because PyTorch's kernels round the mean, too.
//   - Shared memory, pipelined, grid-resident and two-pass, float32: the mean is the sum of two floats, base + offset,
//     where offset is small. Their methods compute it in this form. RowStats holds it in the form that normalization
//     needs.
//   - Convolution: the mean is one float. A row consists of sums of 256 products, which have rounding errors, too.
//   - All, 16 bits: the mean is one float, because the rounding of the output is a larger error.
// The mean that forward saves for backward is one float in every family.
//
// Example for (2) and RowStats, with eps = 1e-5. The row {10000, 10000, 10001} has the mean 10000.333333:
//   computed mean           m      = 10000.3330078125, the nearest float
//   differences             d      = {-0.33300781, -0.33300781, 0.66699219}
//   sums                    sum(d) = 0.00097656, sum(d^2) = 0.66666698
//   correction (2)          offset = 0.00032552, m2 = 0.66666698 - 0.00032552 * 0.00097656 = 0.66666667
//   RowStats                mean   = m, because m + offset is rounded to m; rstd = 2.1212726;
//                           shift  = -offset * rstd = -0.00069052
//   first output            (10000 - m) * rstd = -0.706400,   with shift -0.707091,   correct -0.707091
//
// ---- Which kernels use what ----
//   registers, shared memory      the mean of the whole row first, then the DistanceSums of the row (2)
//   two-pass, grid-resident       each thread: measure_packs for the packs that it loads at once; combine (3) adds the
//                                 result to the thread's Moments; then (4) over lanes, warps and blocks
//   pipelined                     each group of lanes: measure_packs for its part of a slice; then combine_means (4)
//                                 over the parts of a block and over the blocks of a row
//   two-pass, pipelined, float32  all of this with x - reference in place of x, as in (1); see reference_of
//   convolution                   the mean of the row's 64 columns with sum_of, then distances from it
//
// ---- Which function combines what ----
//   function         combines                                                    formula   used by
//   combine          two partial results: floats, or structs of two floats       sum       all
//                    two Moments                                                 (3)       two-pass, grid-resident
//   combine_lanes    one or R partial results per lane, over groups of lanes     sum       all
//                    one Moments per lane                                        (4)       two-pass, grid-resident
//   combine_means    N parts {mean, m2} per lane, over groups of lanes           (4)       pipelined, grid-resident
//   sum_of_terms     N partial results of one thread                             sum       pipelined, combine_means
//   combine_row      R partial results per thread, over all threads of a row     sum       registers, shared memory
// sum_lanes, sum_warp, broadcast_sums and combine_slots are steps of combine_row; the table at combine_row shows which
// of them run. The type of the argument selects the overload. Moments can never be summed by mistake: the functions for
// sums accept a float or a struct of exactly two floats, and sum_of_terms has a static_assert, so they do not compile
// for Moments.

// ---- Sums and means of a thread ----

// Returns the sum of x[0 .. N). The sum of equal numbers is exact. For float32, that needs a tree of additions, which
// only ever doubles equal numbers. Sums of equal 16-bit numbers are exact in any order while they fit the 24 bits of a
// float, so they are added one after the other (with the tree, forward of bf16 rows of 50257 was 1% slower, H200).
template <typename T, int N>
__device__ float sum_of(const Vec<float, N>& x) {
  static_assert(sizeof(T) == 2 || is_power_of_two(N), "the tree needs a power of two");
  // A copy: added up in place, the terms of the caller sum_partials would be in local memory (H100, backward of 8192
  // rows of 768 bf16 columns: 10% slower).
  float sums[N];
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

// Returns sum / count, rounded as a division would round it, where per_count = 1 / count. It refines the estimate
// sum * per_count: the inner fma computes its remainder with a single rounding, and the outer one adds remainder /
// count.
__device__ inline float rounded_quotient(float sum, float count, float per_count) {
  const float estimate = sum * per_count;
  return fma(fma(-estimate, count, sum), per_count, estimate);
}

// ---- Distances from a computed mean, formula (2) ----

// Sums over the numbers x of a row, or of a part of it, where d = x - m and m is the computed mean of the row.
struct SquaresAndSum {
  float squares;  // sum(d^2)
  float sum;      // sum(d): n times the correction that m needs
};

// Adds one number with the given distance from the mean.
__device__ inline void add_distance(SquaresAndSum& d, float distance) {
  d.squares += distance * distance;
  d.sum += distance;
}
__device__ inline void add_distance(float& squares, float distance) { squares += distance * distance; }

// The sums that kernels compute for rows of type T. 16-bit rows need only the squares: the sums that make their mean
// are exact, or nearly so (see row_means in _ROWS), and their output is rounded to 8 or 11 bits.
template <typename T>
using DistanceSums = std::conditional_t<sizeof(T) == 2, float, SquaresAndSum>;

// Returns the sums for V distances. Sum is float (squares only) or SquaresAndSum.
template <typename Sum, int V>
__device__ Sum distances_of(const Vec<float, V>& from_mean) {
  Sum sum = {};
  UNROLL(v, V) add_distance(sum, from_mean[v]);
  return sum;
}

// Returns the true mean minus the computed mean, for sums over a whole row. For 16-bit rows it counts as 0.
__device__ inline float mean_offset(const SquaresAndSum& d, float per_col) { return d.sum * per_col; }
__device__ inline float mean_offset(float, float) { return 0; }

// Adds the correction to `mean`, and returns m2 about the corrected mean, for sums over a whole row. The fma keeps an
// infinite d.squares infinite: offset * d.sum alone could overflow, too, and infinity - infinity is NaN. A result that
// rounding made negative becomes 0. max(squares, 0) would also turn NaN into 0; the comparison keeps NaN.
__device__ inline float correct_mean(const SquaresAndSum& d, float& mean, float per_col) {
  const float offset = mean_offset(d, per_col), squares = fma(-offset, d.sum, d.squares);
  mean += offset;
  return squares < 0 ? 0 : squares;
}
__device__ inline float correct_mean(float squares, float&, float) { return squares; }

// ---- Moments of parts of a row, formula (3) ----

// Describes a set of numbers. All zeros describe the empty set.
struct Moments {
  float count;  // how many numbers; exact up to 2^24, and within 1 part in 2^24 beyond
  float mean;   // their mean, or the mean of their distances from the row's reference, if the kernel has one
  float m2;     // the sum of their squared distances from their own mean
};

// Returns the moments of both sets together. `all` may be empty, but `more` may not.
__device__ inline Moments combine(Moments all, const Moments& more) {
  // na / n. It is 0 if `all` is empty, so that the result is exactly `more`.
  const float fraction = all.count * fast_reciprocal(all.count + more.count), delta = more.mean - all.mean;
  // delta^2 alone could overflow: with an empty `all` and more.mean = 1e20, infinity * 0 would make m2 NaN.
  all.m2 += more.m2 + delta * (delta * (more.count * fraction));
  all.mean = more.mean - delta * fraction;
  all.count += more.count;
  return all;
}

// ---- Reference of a float32 row, formula (1) ----

// A kernel may subtract any number from each element of a float32 row before it computes statistics, as long as all
// threads of the row subtract the same one. The two-pass and pipelined kernels subtract the median of three elements.
// It is usually near the mean, so that the differences are small, and so are the rounding errors of the means that
// blocks exchange (emulated GPU, one row of 85994 columns with mean 10^4: the mean was off by 0.1 units in the last
// place without a reference, and by 0.002 with it). A row of equal numbers becomes all 0, which makes its statistics
// exact.

// Returns the column of sample i of a row, i from 0 to 2: at 38%, 50% and 62% of the row. The ends of a row are
// avoided, because they may be padding.
__device__ inline int64_t sampled_column(int64_t cols, int i) { return cols * (10 + 3 * i) / 26; }
// Returns the median of the three samples, the reference of the row. One outlier or padded element among them does not
// matter.
__device__ inline float reference_of(float a, float b, float c) { return max(min(a, b), min(max(a, b), c)); }

// ---- Applying the statistics ----

// The two sums over a row that grad_input needs.
struct GradSums {
  float wdy;       // sum of weight * grad_output
  float wdy_xhat;  // sum of weight * grad_output * xhat
};
using GradMeans = GradSums;  // these sums divided by the number of columns

// The statistics that normalize a row: xhat = (x - mean) * rstd + shift. See "A mean as two floats" above. Aligned, so
// that one load reads all of it.
struct alignas(16) RowStats {
  float mean;   // rounded to float
  float shift;  // (mean - true mean) * rstd
  float rstd;
};

// Returns grad_input for V columns:
//   rstd * (wdy - mean(wdy) - xhat * mean(wdy * xhat)), where wdy = weight * grad_output
// `means` holds the two means over the row. With FUSED, the sum is computed with fused multiply-adds, which saves one
// instruction. Otherwise wdy is rounded first, so that the gradient of a row of one column is exactly 0.
template <bool FUSED, int V>
__device__ Vec<float, V> grad_input_of(const Vec<float, V>& weight, const Vec<float, V>& grad_output,
                                       const Vec<float, V>& xhat, const GradMeans& means, float rstd) {
  Vec<float, V> dx;
  UNROLL(v, V) {
    if constexpr (FUSED) {
      dx[v] = rstd * fmaf(weight[v], grad_output[v], fmaf(-xhat[v], means.wdy_xhat, -means.wdy));
    } else {
      dx[v] = rstd * (rounded_product(weight[v], grad_output[v]) - means.wdy - xhat[v] * means.wdy_xhat);
    }
  }
  return dx;
}

// Returns the RowStats of a row whose mean is base + offset. `residual` is what rounding base + offset has lost. It is
// exact if |offset| is at most |base|.
__device__ inline RowStats row_stats_of(float base, float offset, float rstd) {
  const float mean = base + offset, residual = offset - (mean - base);
  return {mean, -residual * rstd, rstd};
}

// Returns xhat for V columns.
template <typename T, int V>
__device__ Vec<float, V> normalized(Vec<float, V> x, const RowStats& row) {
  UNROLL(v, V) {
    const float distance = x[v] - row.mean;
    // 16-bit rows omit shift, because it is smaller than the rounding of their output.
    x[v] = sizeof(T) == 2 ? distance * row.rstd : fma(distance, row.rstd, row.shift);
  }
  return x;
}

// ---- Reductions between lanes of a warp ----
//
// combine(a, b) returns the sum of two partial results. exchange(x, offset) returns the x of the lane whose number is
// this lane's number ^ offset. Both accept a float, and structs of two floats: SquaresAndSum, GradSums and float2. For
// Moments, combine is defined above, and combine_lanes below.

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

// Combines each of the R values over groups of `width` neighbouring lanes. width is a power of two up to 32. All lanes
// of the warp must make the call. All lanes of a group receive the result. The order of additions is fixed, so that
// results are deterministic.
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

// Returns the sum of term(n) over n from 0 to N - 1. Four chains of additions run side by side, so that an addition
// seldom waits for the previous one. sum_of would need all terms at once, and 16 of them went to local memory (H200,
// bf16 rows of 32768: 93% of copy bandwidth, 68% with sum_of).
template <int N, typename F>
__device__ auto sum_of_terms(F term) {
  decltype(term(0)) sums[4] = {};
  static_assert(sizeof(sums[0]) <= sizeof(float2), "Moments are not summed.");
  UNROLL(n, N) sums[n % 4] = combine(sums[n % 4], term(n));
  return combine(combine(sums[0], sums[1]), combine(sums[2], sums[3]));
}

// Combines parts of a row by formula (4). Each of `width` lanes has N of them: parts[n] is {mean, m2} of counts[n]
// numbers, where counts[n] may be 0. (The arrays may have more entries, which are not used.) `count` is the sum of all
// counts of these lanes, or 1 if that is 0. Returns {base, offset, m2}, where base + offset is the mean: base, the
// constant c of the formula, is the mean of the first lane's first part. That part must not be empty, unless all are.
template <int N, int M>
__device__ float3 combine_means(const float2 (&parts)[M], const float (&counts)[M], float count, int width) {
  const float base = __shfl_sync(~0u, parts[0].x, 0, width);
  const float sum = sum_of_terms<N>([&](int n) { return counts[n] * (parts[n].x - base); });
  const float offset = combine_lanes(sum, width) * fast_reciprocal(count);
  const float m2 = sum_of_terms<N>([&](int n) {
    const float delta = parts[n].x - base - offset;
    return parts[n].y + counts[n] * delta * delta;
  });
  return {base, offset, combine_lanes(m2, width)};
}

// Combines the Moments of `width` lanes. Those of the first lane must not be empty, unless all are.
__device__ inline Moments combine_lanes(const Moments& moments, int width) {
  const float2 part[1] = {{moments.mean, moments.m2}};
  const float counts[1] = {moments.count};
  const float count = combine_lanes(moments.count, width);
  const float3 total = combine_means<1>(part, counts, max(count, 1.0f), width);  // at least 1: 0 / 0 would be NaN
  return {count, total.x + total.y, total.z};
}

// Returns {mean, m2} of the numbers in N packs of a thread, or of LANES neighbouring lanes together. x(i) returns pack
// i, and has(i) is false for packs that do not exist. `count` is how many numbers all these packs have, and per_count
// is 1 / count. 16-bit rows need the quotient to be rounded as a division, so that rows of equal numbers have exactly
// their mean. float32 rows do not, because count is a power of two, so that sum * per_count is exact, or because x is
// already relative to the row's reference, which makes equal numbers 0 (see reference_of).
template <typename T, int LANES, int N, typename X, typename Has>
__device__ float2 measure_packs(X x, Has has, float count, float per_count) {
  static_assert(LANES <= 32 && is_power_of_two(LANES), "combine_lanes needs a power of two");
  float sum = 0, m2 = 0;
  UNROLL(i, N) sum += has(i) ? sum_of<T>(x(i)) : 0;
  sum = combine_lanes(sum, LANES);
  const float mean = sizeof(T) == 2 ? rounded_quotient(sum, count, per_count) : sum * per_count;
  UNROLL(i, N) {
    if (has(i)) m2 += distances_of<float>(x(i) - mean);
  }
  return {mean, combine_lanes(m2, LANES)};
}

// Sums each of N numbers over the warp, N a power of two. Lane l receives the sum of number l / (32 / N), which is all
// that combine_row needs. At each of the first steps a lane sends half of its numbers, and keeps the other half. Four
// numbers need 6 exchanges; with combine_lanes they need 20. Which sums a lane holds, for the numbers a, b, c and d:
//   lanes               0-7     8-15    16-23   24-31
//   at first            abcd    abcd    abcd    abcd
//   after offset 16     ab      ab      cd      cd        2 exchanges
//   after offset 8      a       b       c       d         1 exchange
//   after 4, 2 and 1    a       b       c       d         3 exchanges, each sum now over the whole warp
template <int N>
__device__ float sum_lanes(float (&x)[N]) {
  static_assert(N <= 32 && is_power_of_two(N), "each step halves the numbers of a lane");
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

// ---- Reductions between warps of a block ----

constexpr int kMaxWarps = 16;  // maximum number of warps per block of the register kernels

// Sums a warp's N floats in x with sum_lanes. Lane n * 32 / N gets the sum of number n.
template <typename X, int R>
__device__ float sum_warp(const X (&x)[R]) {
  float numbers[sizeof(x) / sizeof(float)];
  memcpy(numbers, x, sizeof(numbers));
  return sum_lanes(numbers);
}

// Gives the sums that sum_warp left in N lanes to all lanes.
template <typename X, int R>
__device__ void broadcast_sums(X (&x)[R], float sum) {
  constexpr int N = sizeof(x) / sizeof(float);
  float numbers[N];
  UNROLL(n, N) numbers[n] = __shfl_sync(~0u, sum, n * (32 / N));
  memcpy(x, numbers, sizeof(numbers));
}

// Combines the slots of a row's warps. Lanes without a slot contribute an empty X.
template <int WARPS, typename X, int R>
__device__ void combine_slots(X (&x)[R], X (*row_slots)[R], int warps) {
  const int slot = threadIdx.x % WARPS;
  UNROLL(r, R) {
    x[r] = row_slots[min(slot, warps - 1)][r];
    if (slot >= warps) x[r] = X{};
  }
  combine_lanes(x, WARPS);
}

// Combines each of the R values in x over the threads of a row. All threads of the row receive the results. A block is
// blockDim.y rows of blockDim.x threads. blockDim.x is a multiple of 32, or a power of two below 32 (row_threads
// returns such numbers). X is a float or a struct of two floats, so that a thread has N = R or N = 2 R floats.
//
//   a row has             how                                                                    barrier   slots
//   less than one warp    combine_lanes over blockDim.x lanes                                    no        no
//   WARPS = 1, any N      combine_lanes over 32 lanes                                            no        no
//   one warp, N = 1       combine_lanes over 32 lanes                                            no        no
//   one warp, N > 1       sum_warp, then broadcast_sums                                          no        no
//   several warps, N = 1  combine_lanes over 32 lanes, one slot per warp, then combine_slots     yes       yes
//   several warps, N > 1  sum_warp, one slot per warp, then combine_slots                        yes       yes
//
// blockDim.x is the same for all threads of the block, so all of them use the same line of the table, and a barrier is
// reached by all or by none. All threads of the block must make the call. The warps of all rows of the block share
// WARPS slots in shared memory, so if rows have several warps, a block has at most WARPS warps. WARPS = 1 says at
// compile time that a row is one warp.
//
// Two calls in succession must use different slots: after the barrier of a call, slow warps still read its slots, and
// nothing waits for them before the next call writes. A third call can use the slots of the first, because the barrier
// of the second lies between.
//
// It is one function. With the part before the barrier in a function of its own, the machine code for sm_100 changed,
// and a kernel spilled (nvcc 13.0).
template <int WARPS, typename X, int R>
__device__ void combine_row(X (&x)[R], X (&slots)[WARPS][R]) {
  static_assert(WARPS <= 32 && is_power_of_two(WARPS), "combine_slots gives each slot a lane");
  if (WARPS == 1) return combine_lanes(x, 32);
  LAYERNORM_CHECK(blockDim.x <= 32 || blockDim.x * blockDim.y <= 32 * WARPS);
  constexpr int N = sizeof(x) / sizeof(float), kLanes = 32 / N;  // N floats in x; kLanes as in sum_lanes
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;    // warps of a row: 0 if a row has less than one
  X(*row_slots)[R] = slots + threadIdx.y * warps;
  if (N > 1 && warps > 0) {
    const float sum = sum_warp(x);
    if (warps == 1) return broadcast_sums(x, sum);
    if (lane % kLanes == 0) reinterpret_cast<float*>(row_slots[threadIdx.x / 32])[lane / kLanes] = sum;
  } else {
    if (N == 1 && warps > 0) {
      // A constant width lets the compiler unroll the loop (H200, bf16 rows of 768: 93% -> 95% of copy bandwidth).
      combine_lanes(x, 32);
    } else {
      combine_lanes(x, min(int(blockDim.x), 32));  // less than one warp; min is a bound for the compiler
    }
    if (warps <= 1) return;
    if (lane == 0) {
      UNROLL(r, R) row_slots[threadIdx.x / 32][r] = x[r];
    }
  }
  // Only rows of several warps get here, see the table.
  __syncthreads();
  combine_slots<WARPS>(x, row_slots, warps);
}

// Writes the statistics of a row for backward, if it needs them.
__device__ inline void save_statistics(const Forward& call, int64_t row, float mean, float rstd) {
  if (call.mean == nullptr) return;
  call.mean[row] = mean, call.rstd[row] = rstd;
}
"""

_LAUNCH = r"""
// ==== Launch: the device, and how kernels are launched ====
// Uses: _ARCH, _MEMORY.
//
// Programmatic dependent launches (sm_90 and newer). The blocks of a kernel can start while the last blocks of the
// previous kernel in the stream still run, which hides the launch latency. The rules:
//   1. A kernel starts early only if it is launched with kProgrammatic, and only after every block of the previous
//      kernel has called let_next_start() or has ended.
//   2. At least one thread of each block of such a kernel calls wait_for_previous(). Otherwise the kernel could end
//      before the previous one, and the kernel after it would start too early.
//   3. Before this call, a thread writes no global memory, and reads only what was complete when the previous kernel
//      started. For example, the two-pass kernels are launched in this order: measure_pieces (a plain launch, so it
//      starts after the caller's kernels have ended), finish_rows, normalize_columns. The last of them loads weight
//      before the call, because neither of the others writes weight. backward_columns must not do this, because it can
//      directly follow a kernel of the caller.
//   4. CUDA graphs support such launches from CUDA 12.3 on. With older versions, and on older GPUs, launch_kernel
//      makes a plain launch instead (Device::allows_programmatic), and wait_for_previous() returns at once.
//
// Cooperative launches. The rules:
//   5. A kernel whose blocks wait for one another is launched with kCooperative. It has one block per SM, and no more
//      blocks than the GPU has SMs.
//   6. Such a launch can fail: the blocks may not fit the SMs that this process may use (MPS, MIG, green contexts), or
//      the device does not support it (some virtual GPUs). A green context owns some of the device's SMs. If a launch
//      in it is captured into a CUDA graph, CUDA reports no error, and the graph would hang. launch_kernel therefore
//      returns the error itself (exceeds_green_context).
//   7. The cooperative kernel is the first launch of a call. If it fails, nothing of the call has run. Dispatch then
//      clears the error (cannot_cooperate) and runs the whole call with another kernel family.
//
// Safe changes, and what guards them. Emulated GPUs are described in .tests/emulator.h, mutants (copies of this
// file with one bug) in .tests/mutants.py.
//   - Calls of let_next_start() can be at any place or absent. They affect only speed.
//   - Rules 2 and 3. On an emulated GPU, everything that the call writes is NaN for a thread that has not called
//     wait_for_previous(), and what the thread writes there is lost. So test_values fails without the call (mutants
//     with "statistics read before" and "no wait for the previous" in their names). As long as all kernels of a call
//     were launched programmatically, the caller's kernels may not have ended either; then all tensors of the call are
//     NaN for such a thread (mutant with "weight read before"). Nothing detects a violation of rule 4.
//   - Rule 5. In a plain launch, an emulated GPU runs only four blocks at a time, in random order. With kPlain instead
//     of kCooperative, grid.sync() fails. An emulated GPU rejects cooperative launches of more blocks than it has SMs.
//     Then another family runs the call, and test_dispatch.py reports it.
//   - Rule 6. test_captured_calls_in_a_green_context_do_not_wait_for_missing_blocks (test_dispatch.py) runs calls in an
//     emulated green context.
//   - Rule 7. The emulated GPU "mps" rejects all cooperative launches, so test_values and test_dispatch.py check it.
//   - allow_shared_memory: test_threads_with_rows_of_different_lengths (test_device.py) needs a GPU.
//   - row_threads must return a power of two up to 32, or a multiple of 32 (see combine_row). Otherwise a static_assert
//     of the register kernels or test_values fails.
//   - input_priority affects only speed. No test checks it.

// ---- Programmatic dependent launch ----

// Lets the next kernel start as soon as every block of this one has called this function or has ended.
__device__ inline void let_next_start() {
  if constexpr (kArch.has_bulk_copy) asm volatile("griddepcontrol.launch_dependents;");
}

// Waits until the previous kernel has ended and its writes are visible. Returns at once in a plain launch.
__device__ inline void wait_for_previous() {
  if constexpr (kArch.has_bulk_copy) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Host side: the device ----

// Properties of one GPU, which current_device() reads when the GPU is first used.
struct Device {
  std::once_flag initialized;
  int sms = 1, l2_bytes = 0;         // number of SMs; size of the L2 cache
  int shared_bytes = 0;              // shared memory that one block can use; from sm_80 on, 1 KB less than the SM has
  Arch arch = {};                    // architecture that the loaded code was compiled for; the GPU itself may be newer
  bool allows_programmatic = false;  // supports programmatic dependent launches, also in a CUDA graph
};

// The device, the scratch allocator and the stream of a call. All launch functions receive it.
struct LaunchContext {
  const Device& device;
  const Allocate& allocate;  // allocates scratch memory
  cudaStream_t stream;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int size_of(DType dtype) { return dtype == DType::Float32 ? 4 : 2; }

// ---- Host side: launching ----

// Raises the kernel's limit of dynamic shared memory to everything that a block can use. A limit of only what one call
// needs would not be safe: before this thread launches the kernel, another thread with a shorter row could lower it.
cudaError_t allow_shared_memory(const void* kernel, const Device& device) {
  thread_local std::set<std::pair<const Device*, const void*>> allowed;  // of each thread, so that it needs no lock
  if (allowed.count({&device, kernel}) > 0) return cudaSuccess;
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int left = device.shared_bytes - int(attributes.sharedSizeBytes);  // sharedSizeBytes: static shared memory
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, left);
  if (error == cudaSuccess) allowed.insert({&device, kernel});
  return error;
}

// kProgrammatic: the kernel may start before the previous kernel in the stream has ended (rules 1 to 4). kCooperative:
// all blocks run at the same time, so that they can wait for one another (rules 5 to 7).
enum LaunchKind { kPlain, kProgrammatic, kCooperative };

struct Launch {
  dim3 grid, block;
  LaunchKind kind = kPlain;
  int shared_bytes = 0;  // dynamic shared memory
};

// Returns true if a launch is being captured into a CUDA graph and has more blocks than the stream's context has SMs
// (rule 6). This happens only in a green context, because of rule 5. Without a capture, the launch itself fails.
bool exceeds_green_context(const Launch& launch, cudaStream_t stream) {
#if CUDART_VERSION >= 12040
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status == cudaStreamCaptureStatusNone) return false;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);  // already loaded; linking with it would need its stub library
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

// Launches a kernel with the attributes that launch.kind needs.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Launch& launch, const LaunchContext& context,
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
  const unsigned attributes = attribute.id != cudaLaunchAttributeIgnore ? 1 : 0;  // how many there are
  const cudaLaunchConfig_t config = {launch.grid,    launch.block, size_t(launch.shared_bytes),
                                     context.stream, &attribute,   attributes};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Returns true if the error says that a cooperative launch is impossible (rule 6), and clears the error, so that
// another kernel family can run the call.
bool cannot_cooperate(cudaError_t error) {
  if (error != cudaErrorCooperativeLaunchTooLarge && error != cudaErrorNotSupported) return false;
  cudaGetLastError();
  return true;
}

// Returns how many threads share a row of `loads` loads if each thread has up to `loads_per_thread`: a power of two up
// to 32, or a multiple of 32.
constexpr int row_threads(int64_t loads, int loads_per_thread) {
  const int64_t threads = ceil_div(loads, loads_per_thread);
  if (threads > 32) return ceil_div(threads, 32) * 32;
  int power = 1;
  while (power < threads) power *= 2;
  return power;
}

// Returns the L2 priority with which input is read.
//
// Input of more than half of L2 gets EvictLast: when L2 is full, output then leaves it before input does. (Input is
// read once. But it is prefetched, and probably some of it would leave L2 before it is read.) With equal priority for
// both, forward was 4% slower (H200, float32 rows of 16 to 8192 columns).
//
// Smaller input gets EvictFirst: output then stays in L2 for the kernel that reads it next. EvictLast would push output
// out of L2: three layer norms of 16 MB, one after the other, needed 9% more time with EvictLast than with equal
// priority (H200, bf16).
L2Priority input_priority(const LayerNormCall& call, const Device& device) {
  const int64_t bytes = call.rows * call.cols * size_of(call.dtype);
  return bytes > device.l2_bytes / 2 ? L2Priority::EvictLast : L2Priority::EvictFirst;
}
"""

_EPILOGUE = r"""
// ==== Epilogue: scale * activation(z), where z is the result of layer normalization ====
// Uses: _ELEMENTS.
//
// Safe changes, and what guards them. The tests are in test_values.py, except where another file is named.
//   - The polynomials can be any whose errors stay within the bounds of test_activation_of_every_argument_is_accurate:
//     for GELU of float32, 2^-22 times the larger of |result| and 0.5; for GELU of 16 bits, 0.75 times the dtype's eps
//     (of torch.finfo) times |result|, plus 1e-6. The test bounds the derivatives and float32's tail, too. Emulated
//     GPUs compute ex2 and rcp exactly, so also run the test on a GPU. Only the convolution uses the tail of 5 digits:
//     test_conv_values (test_convolution.py) checks it.
//   - The forms of gelu_of_tail and of the derivatives determine the results for infinite and very large z. See
//     test_gelu_of_infinity_nan_and_zero, and the huge arguments of test_activation_of_every_argument_is_accurate.
//   - HIDDEN of opaque_activation never changes results, only the instructions (.tests/machine_code.py compares them).
//     If a kernel then spills, test_no_kernel_has_local_memory (test_build.py) fails.
//   - Mutants with "scale dropped" or "tanh" in their names (.tests/mutants.py) are versions with a wrong scale or
//     derivative. The tests must detect them. To add an activation, see "Activations" below.

// The epilogue of a call. Activation::None and scale 1 mean that there is none.
struct Epilogue {
  Activation activation;
  float scale;
};

// ---- GELU and its tail ----
//
// gelu(z) = z Phi(z), where Phi is the distribution function of the standard normal distribution. Both this form and
// the tanh form below are from Hendrycks and Gimpel (arXiv:1606.08415). Phi(z) is computed from the tail at t = |z|:
//   tail(t) = 1 - Phi(t)
//   Phi(z) = tail(t) if z < 0, and 1 - tail(t) otherwise
// The usual formula, (1 + erf(z / sqrt(2))) / 2, loses digits for negative z, where 1 and erf cancel. The base-2
// logarithm of the tail is nearly a parabola, so a polynomial of low degree approximates it well:
//   tail(t) = 2^polynomial(t)

// Returns the value at t of the polynomial with these coefficients, from the highest power to the constant. `sum` is
// the first coefficient.
template <typename... Coefficients>
__device__ float polynomial(float t, float sum, Coefficients... coefficients) {
  ((sum = sum * t + coefficients), ...);
  return sum;
}

// The functions below return tail(t) for t >= 0. Errors are those of the polynomial, before rounding to float32.

// For float32. The relative error is at most 5e-6 for t <= 5. The error of t * tail(t), and so of gelu, is at most 5e-9
// for all t. GELU makes forward of float32 rows of 64 columns 1% slower. With erff instead it was 13% slower (H200).
__device__ inline float normal_tail(float t) {
  return fast_exp2(polynomial(t, -3.25975087e-08f, 9.22804361e-07f, -1.13296328e-05f, 7.68243335e-05f, -0.000275404571f,
                              -1.93357664e-05f, 0.00698241359f, -0.0524731502f, -0.459207386f, -1.15110636f,
                              -0.99999994f));
}

// For the result of the convolution in TF32, which is less exact: TF32 rounds each factor by up to 5e-4, relatively.
// The relative error of this tail is at most 8.1e-6 for t <= 5.
__device__ inline float normal_tail_5_digits(float t) {
  return fast_exp2(polynomial(t, -1.57920796e-06f, 5.63387896e-05f, -0.000888035069f, 0.00833681464f, -0.0536014629f,
                              -0.458833878f, -1.15109677f, -1.00000961f));
}

// For 16-bit output. The relative error is at most 2.1e-4 for t <= 4.3; gelu(-4.3) = -3.7e-5 is already smaller than
// the normal numbers of float16. A formula of twice as many instructions made forward of bf16 rows of 1024 columns with
// GELU 8% slower (H200).
__device__ inline float normal_tail_16_bits(float t) {
  return fast_exp2(
      polynomial(t, -0.00024486499f, 0.0050223072f, -0.0452713919f, -0.46851703f, -1.14693902f, -1.00029845f));
}

// Returns z Phi(z), given the tail at |z|. Infinite z give PyTorch's results: infinity for infinity, NaN for -infinity.
// The shorter formula max(z, 0) - |z| * tail would give NaN for both.
__device__ inline float gelu_of_tail(float z, float tail) {
  const float step = z > 0;
  return z * fabsf(step - tail);
}

// ---- Activations ----
//
// Each activation of _ACTIVATIONS has a struct that computes its value and its derivative at z. T is the dtype of the
// tensors, which determines how exact the results must be. To add an activation, add a line to _ACTIVATIONS, a
// struct with the same two functions here, and what else the comment above _ACTIVATIONS names.

template <typename T>
struct Gelu {
  static __device__ float value(float z) {
    return gelu_of_tail(z, sizeof(T) == 2 ? normal_tail_16_bits(fabsf(z)) : normal_tail(fabsf(z)));
  }
  // gelu'(z) = Phi(z) + z phi(z), with phi(t) = exp(-t^2 / 2) / sqrt(2 pi). For negative z and t = |z| this is
  //   gelu'(-t) = tail(t) - t phi(t) = exp(-t^2 / 2) * ratio(t)
  // where a polynomial approximates ratio(t), so that one exponential is enough. For positive z, gelu'(t) is
  // 1 - gelu'(-t). Before rounding to float32, the error is at most 4e-6 for 16 bits and 7e-8 for float32.
  static __device__ float derivative(float z) {
    // From 40 on the exponential is 0. A finite |z| is cut off there, because the polynomial could overflow. Infinite z
    // gives 0 * infinity = NaN, as in PyTorch.
    const float t = fabsf(z) > 40 && fabsf(z) < INFINITY ? 40.0f : fabsf(z);
    const float density = fast_exp2(-0.72134752f * t * t);  // 0.7213 = log2(e) / 2
    const float ratio = sizeof(T) == 2
                            ? polynomial(t, -0.000168557133f, 0.00231906748f, -0.0139235938f, 0.0499400161f,
                                         -0.125826925f, 0.247959629f, -0.797662377f, 0.499996036f)
                            : polynomial(t, -3.15543332e-07f, 7.70878432e-06f, -8.47710398e-05f, 0.000563652953f,
                                         -0.00259009097f, 0.00900384877f, -0.0254718196f, 0.0619239323f, -0.13280578f,
                                         0.249972567f, -0.797882855f, 0.49999997f);
    return z < 0 ? density * ratio : 1 - density * ratio;
  }
};

// The tanh form is z * s(u), with the logistic function s(u) = 1 / (1 + exp(-u)) and
//   u = 2 sqrt(2 / pi) (z + 0.044715 z^3)
template <typename T>
struct GeluTanh {
  // Returns -u log2(e), so that exp(-u) = 2^exponent(z).
  static __device__ float exponent(float z) { return z * (-2.302208198144325f - 0.1029432395800235f * z * z); }
  static __device__ float value(float z) { return z * fast_reciprocal(1 + fast_exp2(exponent(z))); }
  // The derivative is s + z u' s (1 - s). The larger one of s and 1 - s is 1 / (1 + exp(-|u|)), and the smaller one is
  // exp(-|u|) times that. Computing the smaller one as a difference from 1 would lose its digits.
  static __device__ float derivative(float z) {
    const float minus_u = exponent(z), slope = 1.5957691216057308f + 0.21406444881780076f * z * z;  // slope: u'
    const float power = fast_exp2(-fabsf(minus_u)), larger = fast_reciprocal(1 + power);
    return (minus_u > 0 ? power * larger : larger) + z * power * slope * larger * larger;
  }
};

// Calls f with an object of the activation's struct. Does nothing if there is no activation.
template <typename T, typename F>
__device__ void with_activation(Activation activation, F f) {
#define LAYERNORM_CALL(Struct, value, gradient) \
  if (activation == Activation::Struct) return f(Struct<T>());
  LAYERNORM_ACTIVATIONS(LAYERNORM_CALL)
}

// If HIDDEN, returns the epilogue with an activation that the compiler cannot trace back to the kernel's parameters.
// Otherwise the compiler moves the branches on the activation out of the loops, and makes a copy of the loops for each
// combination of activation, scale, weight and bias (nvcc for sm_90, float32 rows with GELU: 6455 instructions ->
// 1463).
template <bool HIDDEN>
__device__ Epilogue opaque_activation(Epilogue epilogue) {
  if constexpr (HIDDEN) epilogue.activation = Activation(opaque(int(epilogue.activation)));
  return epilogue;
}

// Replaces z by scale * activation(z). In the library without epilogues it does nothing.
template <typename T, int V>
__device__ void apply_epilogue(Vec<float, V>& z, const Epilogue& epilogue) {
  if constexpr (kHasEpilogue) {
    with_activation<T>(epilogue.activation, [&](auto activation) { UNROLL(v, V) z[v] = activation.value(z[v]); });
    if (epilogue.scale != 1) z = z * epilogue.scale;
  }
}

// Replaces the gradient of scale * activation(z) by the gradient of z = xhat * weight + bias. The result is rounded to
// T, because in PyTorch the gradient of z is a tensor of dtype T.
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

_WEIGHT_GRADIENTS = r"""
// ==== Weight gradients: grad_weight and grad_bias from the partial sums of blocks ====
// Uses: _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH.
//
// grad_weight and grad_bias are sums over all rows. A backward kernel adds up the rows of each block, or of each group
// of blocks that share rows, and stores these sums in `partials`, a float32 array of shape (2, partial_rows, cols) that
// holds the sums for grad_weight, then those for grad_bias. A partial row is one row of it: the sums of one block (or
// group). A second kernel, sum_partials, adds up the partial rows and converts the sums to the dtype of weight. The
// order of the additions is fixed, so the results of a call are the same in every run on the same GPU.
//
// Example: backward of 8192 bf16 rows of 768 columns on 132 SMs. The register kernel has 660 blocks, so partials has
// shape (2, 660, 768). In sum_partials 32 threads share a column, so that a block of 512 threads has 16 columns and the
// grid has 48 x 2 blocks. A thread adds up 20 or 21 numbers.
//
// Safe changes, and what guards them:
//   - kRowsPerSum can be any number from 1 on, but sums of many rows lose digits. With 2^30,
//     test_gradients_of_many_rows_are_accurate (test_values.py) fails, which runs the register, pipelined and two-pass
//     kernels.
//   - kMaxThreadsPerColumn can be a power of two up to 64. With 128, row_threads could return 96, and the tree, which
//     needs a power of two, would leave out sums (static_assert).
//   - The condition that halves threads_per_column, and kTerms, affect only speed and the rounding of sums. kTerms must
//     be a power of two (static_assert in sum_of).
//   - The order of additions must be fixed. With atomic additions, test_values (on emulated GPUs, which run the threads
//     in two orders) and test_every_run_gives_the_same_bits (test_device.py, needs a GPU) would fail.
//   - The layout of partials must be that of the functions that write it: BackwardColumns::write_partial and
//     add_gradients. test_values fails if they disagree, and if a barrier, a block's sums, or the wait for the previous
//     kernel are left out (mutants with "sum of all blocks", "last block's sums" and "sums over rows" in their names).

// Rows that a thread adds up one by one, at most. Longer chains of additions are divided, because they lose digits: in
// the worst case, a sum of 256 equal numbers is off by 32 roundings of 2^-23, relative, and a sum of 2000 by
// 250. Kernels whose blocks have more rows add the sums of each kRowsPerSum rows to their partial row, or have more
// blocks.
constexpr int kRowsPerSum = 256;

// Adds a thread's sums of V columns to row blockIdx.y of partials, which has shape (2, gridDim.y, cols). If is_first,
// the sums overwrite the row, which is not initialized. If partials is null, the sums are final: they are stored as the
// gradients.
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

constexpr int kSumThreads = 512;          // per block of sum_partials
constexpr int kMaxThreadsPerColumn = 64;  // of sum_partials
static_assert(
    kSumThreads % kMaxThreadsPerColumn == 0 && is_power_of_two(kMaxThreadsPerColumn) && kMaxThreadsPerColumn <= 64,
    "kMaxThreadsPerColumn must be a power of two that divides kSumThreads, and row_threads must return powers "
    "of two up to it");

// Adds up the rows of partials, which has shape (2, partial_rows, cols), into one sum per column. blockIdx.y is 0 for
// grad_weight and 1 for grad_bias. A block has blockDim.x columns, and blockDim.y threads (a power of two) per column.
__global__ void __launch_bounds__(kSumThreads) sum_partials(Backward call, const float* partials, int partial_rows) {
  __shared__ float sums[kSumThreads];
  void* grad = blockIdx.y == 0 ? call.grad_weight : call.grad_bias;
  const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;

  // Each thread adds up every blockDim.y-th row of its column.
  wait_for_previous();
  float sum = 0;
  if (grad != nullptr && col < call.cols) {
    constexpr int kTerms = 16;  // loads in flight per thread
    const float* from = partials + (int64_t(blockIdx.y) * partial_rows + threadIdx.y) * call.cols + col;
    const int64_t step = blockDim.y * call.cols;
    for (int row = threadIdx.y; row < partial_rows; row += kTerms * blockDim.y, from += kTerms * step) {
      Vec<float, kTerms> terms;
      UNROLL(i, kTerms) terms[i] = row + i * blockDim.y < partial_rows ? from[i * step] : 0.0f;
      sum += sum_of<float>(terms);  // a tree: a thread can have thousands of terms, and a long chain loses digits
    }
  }

  // The threads of a column add up their sums in a tree.
  float* own_sum = sums + threadIdx.y * blockDim.x + threadIdx.x;
  *own_sum = sum;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) *own_sum += own_sum[half * blockDim.x];
  }

  if (threadIdx.y != 0 || col >= call.cols) return;
  const Vec<float, 1> total = {*own_sum};
  switch (call.dtype) {
    case DType::Float16: return store_affine<__half>(grad, call.affine_float32, col, total);
    case DType::BFloat16: return store_affine<__nv_bfloat16>(grad, call.affine_float32, col, total);
    default: return store_affine<float>(grad, true, col, total);
  }
}

// Launches sum_partials. Does nothing if the backward kernel has stored the gradients itself (partial_rows is 0), or if
// neither gradient is needed.
cudaError_t launch_sum_partials(const Backward& call, const float* partials, int64_t partial_rows,
                                const LaunchContext& context) {
  if (partial_rows == 0 || (call.grad_weight == nullptr && call.grad_bias == nullptr)) return cudaSuccess;
  // Threads per column: as many as there are partial rows, up to kMaxThreadsPerColumn, but halved until all columns
  // together use at most 512 threads per SM, a quarter of what an SM of 2048 threads holds. With up to 16 threads per
  // column and 2048 per SM, the whole of backward was 5% slower (H200, 32768 bf16 rows of 320).
  int threads_per_column = std::min(kMaxThreadsPerColumn, row_threads(partial_rows, 1));
  while (threads_per_column > 1 && 2 * call.cols * threads_per_column > 512 * context.device.sms)
    threads_per_column /= 2;
  const dim3 block(kSumThreads / threads_per_column, threads_per_column);
  return launch_kernel(sum_partials, {dim3(ceil_div(call.cols, block.x), 2), block, kProgrammatic}, context, call,
                       partials, int(partial_rows));
}
"""

_ROWS = r"""
// ==== Whole rows: shared by the forward kernels whose blocks hold whole rows (registers, shared memory) ====
// Uses: _ARCH, _MEMORY, _STATISTICS, _LAUNCH, _EPILOGUE.
//
// This section has what the two families share: prefetches, and the mean of a row. The sections of the families
// describe which columns of a row a thread has. RowConstants is also used by the grid-resident kernel.
//
// Safe changes, and what guards them:
//   - Prefetches affect only speed, and can be left out. kPrefetchBytes can be any number from 16 on. Prefetched bytes
//     must be inside of a tensor, and be whole 16-byte units (in prefetch_later_rows). Emulated GPUs report an error
//     otherwise, for example in test_values and in test_input_longer_than_the_l2_prefetch_distance (test_device.py).
//   - kMaxExactCols can be smaller, which costs a reduction, but not larger: test_constant_rows_give_bias
//     (test_values.py) would fail (mutant with "rounded as for bfloat16" in its name).
//   - Each reduction of a row needs its own array in RowSlots. If two in succession share one, warps overwrite it while
//     others still read it, and test_constant_rows_give_bias fails on emulated GPUs.

// Values that are the same for all rows. The host computes them once per call.
struct RowConstants {
  float eps, per_col;  // per_col: 1 / cols
  Epilogue epilogue;
  L2Priority priority;  // of input
};

// ---- Prefetches to L2 ----

// Which bytes of input each block prefetches to L2, for a block that starts later. A block can do nothing before its
// own rows have arrived, and few blocks fit an SM. Without prefetches there would be too few loads in flight (H200,
// forward: 15% slower for bf16 rows of 6001 columns, 5% slower for 2041 columns).
//
// Prefetches never change results, so the window may be any part of input.
struct PrefetchWindow {
  const char* begin;     // of block 0's prefetch, on a 16-byte boundary; block b is b * block_bytes further
  const char* end;       // of input
  unsigned block_bytes;  // bytes of the rows of one block
};

// Prefetches this block's part of the window, rounded to whole 16-byte units. Nothing is prefetched beyond the end of
// input.
__device__ inline void prefetch_later_rows(const PrefetchWindow& window, uint64_t policy) {
  const char* begin = window.begin + (uint64_t(blockIdx.x) * window.block_bytes) / 16 * 16;
  // Rounded up so that the rows are covered wherever they start. The first and last bytes may belong to other rows.
  const unsigned bytes = (window.block_bytes + 31) / 16 * 16;
  if (begin + bytes <= window.end) prefetch_range(begin, bytes, policy);
}

// Prefetches weight and bias to L2, so that they are there when the statistics are known and every block needs them.
// The kernel calls this in one block only. Without it, forward is 8% slower if nothing is in L2 (H200, 4096 bf16 rows
// of 4096).
template <typename T>
__device__ void prefetch_affine(const Forward& call) {
  if constexpr (!kArch.has_async_copy) return;
  const int bytes = int(call.cols) * int(call.affine_float32 ? sizeof(float) : sizeof(T));
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (const void* affine : {call.weight, call.bias}) {
    for (int offset = thread * kSectorBytes; affine != nullptr && offset < bytes; offset += threads * kSectorBytes) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(affine) + offset));
    }
  }
}

// ---- Statistics ----

// Shared memory in which the warps of a row exchange partial sums. Each reduction has its own array, because slow warps
// may still read the array of the previous reduction.
template <typename T, int ROWS, int WARPS>
struct RowSlots {
  float sum[WARPS][ROWS], residual[WARPS][ROWS];
  DistanceSums<T> distances[WARPS][ROWS];
};

// Computes the means of ROWS rows. sum[r] is the thread's sum over its `count` columns of row r. MAX_COLS is an upper
// bound of cols that is known at compile time.
//
// The mean of equal numbers must be exactly that number. For float32, correct_mean() ensures this later, from the sum
// of the distances. For 16-bit rows, the sum of up to kMaxExactCols equal numbers is exact, and so is the mean. In
// longer rows the mean is corrected here: each thread computes the residual sum - count * mean of its columns, and the
// sum of all residuals, divided by cols, is added to the mean.
template <typename T, int MAX_COLS, int ROWS, int WARPS>
__device__ void row_means(float (&mean)[ROWS], const float (&sum)[ROWS], int count, int cols, float per_col,
                          RowSlots<T, ROWS, WARPS>& slots) {
  UNROLL(r, ROWS) mean[r] = sum[r];
  combine_row(mean, slots.sum);
  UNROLL(r, ROWS) mean[r] = rounded_quotient(mean[r], float(cols), per_col);
  // A float has 24 significant bits, float16 has 11 and bfloat16 has 8, which leaves 13 and 16 bits for the count.
  constexpr int kMaxExactCols = std::is_same_v<T, __half> ? 8192 : 65536;
  if constexpr (sizeof(T) == 2 && MAX_COLS > kMaxExactCols) {
    if (cols <= kMaxExactCols) return;
    float residual[ROWS];
    UNROLL(r, ROWS) residual[r] = fma(-float(count), mean[r], sum[r]);
    combine_row(residual, slots.residual);
    UNROLL(r, ROWS) mean[r] += residual[r] * per_col;
  }
}

// ---- Host side ----

RowConstants row_constants(const Forward& call, const Device& device) {
  return {float(call.eps), 1.0f / float(call.cols), {call.activation, float(call.scale)}, input_priority(call, device)};
}

// How far ahead of its own rows a block prefetches, in bytes per SM, capped at 1/8 of L2 for the whole GPU. Compared
// with 40 KB, both 32 KB and 80 KB are 2% slower (32880 bf16 rows of 2041 columns); with 80 KB, rows leave L2 before
// they are read. 48 KB is 0.3% faster for these rows, but made inputs of 12 to 64 MB 2% slower (all on an H200).
constexpr int kPrefetchBytes = 40 << 10;

// Returns the window for blocks of `block_rows` rows.
PrefetchWindow prefetch_window(const Forward& call, int block_rows, const Device& device) {
  const int64_t row_bytes = call.cols * size_of(call.dtype);
  const char* input = static_cast<const char*>(call.input);
  const char* begin = input + std::min<int64_t>(int64_t(kPrefetchBytes) * device.sms, device.l2_bytes / 8);
  return {begin - reinterpret_cast<uintptr_t>(begin) % 16, input + call.rows * row_bytes,
          unsigned(block_rows * row_bytes)};
}
"""

_REGISTERS = r"""
// ==== Register kernels: short rows, forward and backward ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _EPILOGUE, _WEIGHT_GRADIENTS, _ROWS.

namespace registers {

// ---- Forward ----
//
// Supported rows: up to 4 loads of 16 bytes by each of 512 threads, which is 32 KB. Rows that are not aligned to 16
// bytes: up to 4 loads by each of 448 threads, which is 28 KB.
//
// How it works. The threads that share a row are called a team. A team loads a whole row into registers. Each thread
// sums its numbers, and the team combines the sums to the mean. Each thread then sums the squared distances of its
// numbers from the mean, and the team combines these sums to the variance. Finally the threads normalize their numbers
// and write them. Input is read once, and output is written once. A team can also handle several rows at once.
//
// Why it is fast. The time is that of a copy, as long as enough rows are in flight on every SM. Therefore a thread has
// few loads, blocks are small, and each block prefetches the rows of a later block into L2 (see PrefetchWindow).
//
// Example 1: 8192 bf16 rows of 768 columns. A row has 96 loads, each of V = 8 columns. One warp handles a row, with
// three loads per lane. A block has 32 x 4 threads and four rows: warp y of block b handles row 4 b + y.
//
//             load 0             load 1             load 2             load i
//   lane 0    columns 0-7        columns 256-263    columns 512-519
//   lane 1    columns 8-15       columns 264-271    columns 520-527
//   ...
//   lane 31   columns 248-255    columns 504-511    columns 760-767
//   lane l                                                             8 columns, from 8 (l + 32 i) on
//
// Example 2: 1048576 bf16 rows of 64 columns. A row has 8 loads, so that a team has 8 threads. A thread has one load of
// each of two rows, for which it loads weight and bias only once. A block has 8 x 16 threads and 32 rows: the team with
// threadIdx.y = y of block b handles the rows 32 b + y and 32 b + 16 + y.
//
// Example 3: 8192 bf16 rows of 4096 columns. A row has 512 loads and 128 threads, which is one block. A thread has four
// loads, 1024 columns apart.
//
// Safe changes, and what guards them. This list is also about backward, which follows below.
//   - The tables that choose a kernel: see "How to change the kernel for rows of one width". static_asserts check each
//     line, and the geometry of all its launches (geometry_of), for every row length.
//   - kShortRows, kBlockThreads, kUnalignedBlockThreads16Bits, kBackwardBlockThreads and kBackwardBlockThreads16Bits
//     affect only speed and the rounding of sums. All are powers of two. static_asserts check the blocks of all row
//     lengths.
//   - geometry_of and backward_block choose the block of a launch. static_asserts check their results for all row
//     lengths. The grid depends on the number of rows, so only the tests in test_values.py check it (mutants with "last
//     incomplete group of rows" and "an odd number of blocks" in their names).
//   - kMaxLoads, kMaxRowThreads and kMaxUnalignedRowThreads (backward: kBackwardColumns, kBackwardThreads and
//     kBytesBeforePipeline) determine which rows run here. If you change them, adapt the tables of forward
//     (static_asserts compare them), the overview, and forward_family and backward_family in .tests/cases.py. Otherwise
//     test_cases_launch_expected_kernels (test_dispatch.py) fails.
//   - Blocks per SM in Bounds, kEarly and kHidesActivation affect only speed and registers. kFloat32AffineChoices needs
//     kernels without kEarly (static_assert). test_no_kernel_has_local_memory (test_build.py) fails if a kernel spills.
//   - The columns and rows of a thread: see the numbered conditions at TeamRows, at ForwardColumns and in "Backward".
//     They say which of them static_asserts check. test_values (test_values.py) detects violations of the others
//     (mutants with "columns:", "registers:" and "backward" in their names; a mutant is a copy of this file with one
//     bug, see .tests/mutants.py).
//   - The offset of a row in a tensor needs 64 bits. Only test_more_than_2_to_the_31_elements (test_device.py, needs a
//     GPU) detects one of 32 bits.

// ---- Forward: configuration ----

// Loads per thread of the longest rows. Kernels with one warp per row may have more.
constexpr int kMaxLoads = 4;
// Threads per row of the longest rows. An SM holds several blocks of this size, so that one loads while another stores.
// For unaligned rows with two blocks per SM, the kernels would need local memory with 512 threads per block, but do not
// with 448.
constexpr int kMaxRowThreads = 512, kMaxUnalignedRowThreads = 448;
constexpr int kMaxRowLoads = kMaxLoads * kMaxRowThreads, kMaxUnalignedRowLoads = kMaxLoads * kMaxUnalignedRowThreads;
// Threads of a block with several teams. They are enough warps to hide the wait at a barrier, and few enough for blocks
// to fill an SM. Unaligned 16-bit rows have smaller blocks (H200, bf16 rows of 2041: 2% slower with 128 threads).
constexpr int kBlockThreads = 128, kUnalignedBlockThreads16Bits = 64;
// Rows per thread of aligned rows of up to 32 loads. The rows of a thread share one load of weight and bias, but more
// rows leave fewer threads (H200, 16384 bf16 rows of 256 in L2: 6% slower with four rows than with two). With an
// epilogue four are faster (H200, 1048576 bf16 rows of 64 with GELU: 10% slower with two rows than with four).
constexpr int kShortRows = kHasEpilogue ? 4 : 2;

// The launch bounds of a kernel: the most threads of a block, and the number of blocks per SM that the compiler must
// leave registers for. A thread then has at most 65536 / (threads * blocks) registers. More blocks hide more latency.
// The numbers were chosen so that no kernel needs local memory (nvcc 13.0). Those that depend on the GPU are in kArchs,
// the others are the same for all GPUs.
//
//   kernel (the first line that matches)                 threads              blocks per SM on sm_90
//   16 bits, one load of each of several rows            128                  7, unaligned 6
//   one warp per row, with 2, 3, 4, more loads per lane  128                  8, 7, 5, 4
//   other kernels with several rows per thread           512, unaligned 448   1
//   two loads per thread                                 512                  3 for float32, 2 for 16 bits
//   16 bits, four loads per thread                       512, unaligned 448   2
//   otherwise                                            512, unaligned 448   3, unaligned 2
//
// For 16 bits and one load of each of several rows, 7 blocks of 128 threads leave 72 registers per thread. Without this
// bound the compiler used 79 registers, only 6 blocks fit, and the kernel was 5% slower (H200, 1048576 bf16 rows of 64
// with GELU).
//
// The numbers of blocks never change results. If one is too high, a kernel needs local memory, and the test
// test_no_kernel_has_local_memory (test_build.py) fails. kMaxThreads limits which rows a kernel can run: see
// covers_row.
//
// The template parameters are those of layer_norm_rows.
template <typename T, int PACKS, int ROWS, bool UNALIGNED, bool IN_WARP>
struct Bounds {
  static constexpr bool kShort16Bits = sizeof(T) == 2 && PACKS == 1 && ROWS > 1;
  static constexpr int kMaxThreads = IN_WARP || kShort16Bits ? kBlockThreads
                                     : UNALIGNED             ? kMaxUnalignedRowThreads
                                                             : kMaxRowThreads;
  static constexpr int blocks() {
    constexpr bool k16Bits = sizeof(T) == 2;
    if (kShort16Bits) return UNALIGNED ? kArch.short_unaligned_blocks_16_bits : kArch.short_blocks_16_bits;
    if (IN_WARP && PACKS == kMaxLoads) return k16Bits ? kArch.warp_four_load_blocks_16_bits : 5;
    if (IN_WARP) return PACKS <= 2 ? 8 : PACKS == 3 ? 7 : 4;
    if (ROWS > 1) return 1;
    if (PACKS == 2) return kArch.two_load_blocks[k16Bits];
    if (k16Bits && PACKS == kMaxLoads) return kArch.four_load_blocks_16_bits;
    return UNALIGNED ? kArch.row_blocks - 1 : kArch.row_blocks;
  }
};

// The numbers that a thread holds in registers: its columns of ROWS rows, and weight and bias of these columns if they
// are loaded early. Packs and columns that do not exist are zeros, so that they can be summed.
template <typename T, int PACKS, int ROWS>
struct ForwardRegisters {
  static constexpr int V = 16 / sizeof(T);
  Pack<T, V> packs[PACKS][ROWS], weight[PACKS], bias[PACKS];
  Pack<T, 1> edge[ROWS];  // see ForwardColumns

  // Returns the sum of the thread's columns of row r, in two chains of additions that do not wait for each other.
  __device__ float sum_of_row(int r) const {
    float sum = widen(edge[r].data[0]), second = 0;
    UNROLL(i, PACKS) {
      const auto values = widened(packs[i][r]);
      UNROLL(v, V / 2) sum += values[2 * v], second += values[2 * v + 1];
    }
    return sum + second;
  }
};

// The rows of a team: first, first + step, and so on, `count` in all. With several rows per thread (ROWS > 1), `step`
// consecutive teams handle a batch of ROWS * step rows, and team k of them begins with row k of the batch.
//
// Example with ROWS = 2, step_log2 = 3 and two teams per block: teams 0 to 7, which are blocks 0 to 3, handle the
// batch of rows 0 to 15. Team 3 has rows 3 and 11. Team 11 has row 3 of the second batch, which is row 19, and
// row 27.
//
// Every row belongs to exactly one team, and all rows of a team have the same alignment. This follows from:
//   1. blockDim.y and step are powers of two with blockDim.y <= step, so that a block's teams are of one batch. Checked
//      by static_assert (divides_rows).
//   2. The grid has all teams of the last batch. launch_forward ensures it: it counts whole batches, and the blocks of
//      a batch are a whole number because of condition 1. Teams whose rows do not exist have count <= 0.
//   3. For unaligned rows, step is a multiple of V, so that `step` rows are a multiple of 16 bytes. Checked by
//      static_assert (divides_rows).
// A violation of 2, or an error in team_rows, makes test_values (test_values.py) fail. If you change these lines, run
// it for all register kernels on emulated GPUs, which also check every address:
//   python -m pytest --full .tests/test_values.py -k "test_values[ and registers"
struct TeamRows {
  int64_t first;
  int step, count;  // count: rows of the team that exist; may be 0 or less
};

// Returns the rows of the team that this thread belongs to. total_rows: rows of the call.
template <int ROWS>
__device__ TeamRows team_rows(int64_t total_rows, int step_log2) {
  const int64_t first_team = int64_t(blockIdx.x) * blockDim.y;  // of the block
  if (ROWS == 1) return {first_team + threadIdx.y, 1, first_team + threadIdx.y < total_rows};
  const int step = 1 << step_log2;
  // Earlier batches have ROWS rows per team, so that `first` is larger than the number of the team.
  const int64_t earlier_teams = first_team >> step_log2 << step_log2;
  const int64_t first = first_team + earlier_teams * (ROWS - 1) + threadIdx.y;
  // Rows from `first` to the end of the call, but at most ROWS * step, because the team has at most ROWS rows.
  const int64_t rows_left = min(total_rows - first, int64_t(ROWS * step));
  return {first, step, int(rows_left + step - 1) >> step_log2};  // rows_left / step, rounded up
}

// The columns of a row that a thread has.
//
// An aligned row consists of packs of V columns, 16 bytes each. A thread has the packs at first + i * stride.
//
// An unaligned row has up to V - 1 leading columns before the first 16-byte boundary of output, then packs, then up to
// V - 1 trailing columns. Packs are written with 16-byte stores. They are also read with 16-byte loads if input has the
// same offset from a 16-byte boundary as output (input_is_aligned), otherwise as words that are joined (see Unaligned).
// Leading and trailing columns are called edge columns. The first V threads may have one leading column each, and the
// next V threads one trailing column each.
//
// Example: row 1 of bf16 rows of 2041 columns (V = 8), where row 0 begins on a 16-byte boundary. Row 1 begins 2 bytes
// after one, so `begin` is 7 and `end` is 2039. The 254 packs are shared by 64 threads with stride = 512. They have
// four packs each, threads 62 and 63 only three.
//
//             leading    packs                                                      trailing
//   columns   0 ... 6    7-14       15-22     ...  511-518   519-526   ...  2031-2038   2039  2040
//   thread    0 ... 6    0          1         ...  63        0         ...  61          8     9
//   held in   edge       packs[0]   packs[0]  ...  packs[0]  packs[1]  ...  packs[3]    edge  edge
//
// Every column of a row belongs to exactly one thread of the team. This follows from:
//   1. begin < V and begin <= cols, so that the leading columns are those of threads 0 to begin - 1. A row that ends
//      before the first boundary has leading columns only: begin = end = cols.
//   2. end - begin is a multiple of V, so that a pack is either inside of the columns begin to end - 1 or outside.
//      Therefore has() only tests its first column.
//   3. cols - end < V, so that the trailing columns are those of threads V, V + 1, ..., at most 2 V - 2.
//   4. A team has at least 2 V threads if rows are unaligned. Checked by static_assert (covers_row).
//   5. blockDim.x * PACKS >= cols / V, the largest number of packs of a row. Checked by static_assert (covers_row).
//   6. All rows of a team have the same offset from a 16-byte boundary (see TeamRows), because `begin` and `end` are
//      computed from its first row only.
// If a column belongs to no thread, output keeps what was in memory. If it belongs to two, the statistics are wrong.
// Both make test_values (test_values.py) fail: cases.py has unaligned rows of 1, 9, 33, 41, 65, 255, ... columns, and
// tensors that are moved by one element.
template <typename T, bool UNALIGNED, bool IN_WARP>
struct ForwardColumns {
  static constexpr int V = 16 / sizeof(T);
  int begin = 0, end;    // the packs of the row are columns begin to end - 1
  int first, stride;     // the column of the thread's first pack; columns from one of its packs to the next
  int edge_column = -1;  // the thread's leading or trailing column, or -1

  // output_row: the row in output. cols: its columns, or 0 if the row does not exist.
  __device__ ForwardColumns(const T* output_row, int cols) {
    if (UNALIGNED) begin = min(cols, int(-reinterpret_cast<uintptr_t>(output_row) % 16 / sizeof(T)));
    end = UNALIGNED ? begin + (cols - begin) / V * V : cols;
    first = begin + int(threadIdx.x) * V, stride = (IN_WARP ? 32 : blockDim.x) * V;
    const int thread = threadIdx.x, col = thread < V ? thread : end + thread - V;
    if (UNALIGNED && col < (thread < V ? begin : cols)) edge_column = col;
  }
  __device__ int column(int i) const { return first + i * stride; }
  __device__ bool has(int i) const { return column(i) < end; }
  __device__ bool has_edge() const { return UNALIGNED && edge_column >= 0; }
  // Returns how many columns the thread has in its first PACKS packs, and at the edges.
  template <int PACKS>
  __device__ int count() const {
    int columns = has_edge();
    UNROLL(i, PACKS) columns += has(i) ? V : 0;
    return columns;
  }
};

// Loads, measures and writes the columns that a thread has in the rows of its team.
template <typename T, int PACKS, int ROWS, bool UNALIGNED, bool IN_WARP>
struct ForwardRows {
  using Registers = ForwardRegisters<T, PACKS, ROWS>;
  static constexpr int V = 16 / sizeof(T);
  // Weight and bias are loaded before the statistics, which hide their latency, if the kernel has registers for them.
  // Early loads read them in input's dtype. The choice of kernel ensures that they have it (kFloat32AffineChoices).
  static constexpr bool kEarly = !UNALIGNED && (PACKS < kMaxLoads || IN_WARP);
  const T* input;         // the thread's first pack in its first row
  T* output;              // the same place in output
  int row_stride, rows;   // elements from one of the thread's rows to the next; how many of its rows exist
  bool input_is_aligned;  // true if packs are 16-byte aligned in input, too
  ForwardColumns<T, UNALIGNED, IN_WARP> columns;

  // row: the first row. rows may be 0 or less; the thread then has no columns.
  __device__ ForwardRows(const Forward& call, int64_t row, int row_stride, int rows)
      : input(static_cast<const T*>(call.input) + row * int(call.cols)),
        output(static_cast<T*>(call.output) + row * int(call.cols)),
        row_stride(row_stride),
        rows(rows),
        columns(output, rows > 0 ? int(call.cols) : 0) {
    input_is_aligned = (reinterpret_cast<uintptr_t>(input) - reinterpret_cast<uintptr_t>(output)) % 16 == 0;
    input = keep_pointer(input + columns.first), output = keep_pointer(output + columns.first);
  }

  // Loads the columns of all rows. No branch separates the loads, so that all are in flight together.
  __device__ void load_rows(Registers& x, uint64_t policy) const {
    x = {};
    const auto each = [&](auto f) {
      UNROLL(i, PACKS) {
        UNROLL(r, ROWS) {
          if (columns.has(i) & (r < rows)) f(i, r, input + r * row_stride + i * columns.stride);
        }
      }
    };
    if (!UNALIGNED || input_is_aligned) {
      each([&](int i, int r, const T* from) { x.packs[i][r] = load<T, V>(from, policy); });
    } else {
      // First all loads, then all joins: a join waits for its words, and would delay the loads after it. Joining each
      // pack before the next load is 8% slower (H200, x[1:] of 16384 bf16 rows of 4096).
      Unaligned<T, V> words[PACKS][ROWS] = {};
      const int mid_word = Unaligned<T, V>::starts_mid_word(input);  // the same for all packs and rows of the thread
      each([&](int i, int r, const T* from) { words[i][r].load(from, mid_word); });
      UNROLL(i, PACKS) { UNROLL(r, ROWS) x.packs[i][r] = words[i][r].get(mid_word); }
    }
    UNROLL(r, ROWS) {
      if (columns.has_edge() && r < rows)
        x.edge[r] = load<T, 1>(input + r * row_stride + (columns.edge_column - columns.first));
    }
  }
  // Loads weight and bias of the thread's packs early, in input's dtype. Absent ones become 1 and 0.
  __device__ void load_affine_packs(Registers& x, const Forward& call, uint64_t policy) const {
    const auto ones = packed<T>(Vec<float, V>() + 1.0f);
    UNROLL(i, PACKS) {
      x.weight[i] = ones, x.bias[i] = {};
      const bool exists = columns.has(i);
      if (exists & (call.weight != nullptr))
        x.weight[i] = load<T, V>(static_cast<const T*>(call.weight) + columns.column(i), policy);
      if (exists & (call.bias != nullptr))
        x.bias[i] = load<T, V>(static_cast<const T*>(call.bias) + columns.column(i), policy);
    }
  }
  // Returns the sums over the columns of row r that are defined by DistanceSums: of the distances from the
  // mean, and of their squares. Packs that do not exist are left out: they are zeros, but their distances are not 0.
  __device__ DistanceSums<T> distances_of_row(const Registers& x, int r, float mean) const {
    DistanceSums<T> total = {};
    if (columns.has_edge()) add_distance(total, widen(x.edge[r].data[0]) - mean);
    UNROLL(i, PACKS) {
      const auto of_pack = distances_of<DistanceSums<T>>(widened(x.packs[i][r]) - mean);
      if (columns.has(i)) total = combine(total, of_pack);
    }
    return total;
  }

  // Normalizes and writes the columns of all rows. Loads weight and bias unless load_affine_packs did,
  // once per column for all rows. SAME_DTYPE: see with_same_dtype.
  template <bool SAME_DTYPE>
  __device__ void write_rows(const Forward& call, const Registers& x, const float (&mean)[ROWS],
                             const float (&rstd)[ROWS], const Epilogue& epilogue) const {
    const auto write = [&](int offset, const auto& elements, auto weight, auto bias) {
      constexpr int N = decltype(weight)::kSize;
      if constexpr (!kEarly)
        load_affine_pair<T, N, UNALIGNED, SAME_DTYPE>(weight, bias, call, columns.first + offset, columns.begin);
      // Hides the activation only if a thread has one row: for several rows, the compiler then tests it once for all.
      // Hiding it there, too, is 4% slower (H200, 1048576 bf16 rows of 64 with GELU, four per thread).
      constexpr bool kHidesActivation = kHasEpilogue && ROWS == 1;
      const Epilogue hidden = opaque_activation<kHidesActivation>(epilogue);
      UNROLL(r, ROWS) {
        auto y = (widened(elements[r]) - mean[r]) * rstd[r] * weight + bias;
        apply_epilogue<T>(y, hidden);
        if (r < rows) store<T>(output + (offset + r * row_stride), y);
      }
    };
    UNROLL(i, PACKS) {
      if (columns.has(i)) write(i * columns.stride, x.packs[i], widened(x.weight[i]), widened(x.bias[i]));
    }
    if (columns.has_edge()) write(columns.edge_column - columns.first, x.edge, Vec<float, 1>(), Vec<float, 1>());
  }
};

// Normalizes rows. PACKS: 16-byte loads per thread and row. ROWS: rows per team. UNALIGNED: rows need not begin on a
// 16-byte boundary. IN_WARP: a team is one warp; otherwise it is blockDim.x threads. blockDim.y: teams of a block. The
// rows of a team are 2^step_log2 apart (see TeamRows).
template <typename T, int PACKS, int ROWS, bool UNALIGNED, bool IN_WARP>
__global__ void __launch_bounds__(Bounds<T, PACKS, ROWS, UNALIGNED, IN_WARP>::kMaxThreads,
                                  Bounds<T, PACKS, ROWS, UNALIGNED, IN_WARP>::blocks())
    layer_norm_rows(Forward call, RowConstants constants, PrefetchWindow window, int step_log2) {
  using Rows = ForwardRows<T, PACKS, ROWS, UNALIGNED, IN_WARP>;
  __shared__ RowSlots<T, ROWS, IN_WARP ? 1 : kMaxWarps> slots;
  const int cols = call.cols;
  const uint64_t policy = l2_policy(constants.priority);
  const TeamRows team = team_rows<ROWS>(call.rows, step_log2);
  const Rows rows(call, team.first, cols * team.step, team.count);

  // Load.
  typename Rows::Registers x;
  if (!Rows::kEarly && blockIdx.x == 0) prefetch_affine<T>(call);
  rows.load_rows(x, policy);
  // Weight and bias stay in L2 longest, because all blocks read them.
  if (Rows::kEarly) rows.load_affine_packs(x, call, l2_policy(L2Priority::EvictLast));
  if (window.begin < window.end && is_prefetching_thread()) prefetch_later_rows(window, policy);

  // Measure: the mean first, then the distances from it.
  float sum[ROWS], mean[ROWS], rstd[ROWS];
  DistanceSums<T> distances[ROWS];
  UNROLL(r, ROWS) sum[r] = x.sum_of_row(r);
  const int count = rows.columns.template count<PACKS>();
  row_means<T, PACKS * kMaxRowThreads * Rows::V>(mean, sum, count, cols, constants.per_col, slots);
  UNROLL(r, ROWS) distances[r] = rows.distances_of_row(x, r, mean[r]);
  combine_row(distances, slots.distances);
  UNROLL(r, ROWS) {
    const float m2 = correct_mean(distances[r], mean[r], constants.per_col);  // also updates mean[r]
    rstd[r] = rsqrt(m2 * constants.per_col + constants.eps);
    if (threadIdx.x == 0 && r < team.count) save_statistics(call, team.first + r * team.step, mean[r], rstd[r]);
  }

  // Write.
  with_same_dtype<T, Rows::kEarly>(call, [&](auto same_dtype) {
    rows.template write_rows<same_dtype.value>(call, x, mean, rstd, constants.epilogue);
  });
}

// ---- Forward: choice of the kernel ----
//
// The four tables below state which kernel runs which rows. choose_kernel selects a table by dtype and alignment.
// choose_from computes two numbers of the call:
//
//   loads = max(1, cols * bytes per element / 16)    16-byte loads per row, rounded down (exact if rows are aligned)
//   waves = rows * loads / (2048 * SMs of the GPU)   a wave is one load by each of 2048 threads of every SM
//
// and uses the first line with min_loads <= loads <= max_loads and waves <= max_waves. Ranges may overlap: a line only
// receives the calls that no line above it received. Lines with plain_kernel do not exist in the epilogue library.
// Example: 8192 bf16 rows of 768 columns on 132 SMs have 96 loads per row and are 2.9 waves.
//
// How to change the kernel for rows of one width, for example for 16-bit rows of 768 columns:
//   1. Compute the loads: 768 * 2 / 16 = 96. Find the first line that matches: in k16BitChoices, {65, 96, kAnyWaves,
//      ...}.
//   2. Insert a line above it, and above its comment, that matches 96 loads only:
//          // 768 columns: one load per thread.
//          {96, 96, kAnyWaves, forward_kernel<T, 1, 1>()},
//      All other widths keep their kernels. If the matching line has no other width that you care about, edit it
//      instead. To change calls with few rows only, write a number of waves in place of kAnyWaves. The line changes
//      float16 and bfloat16 on all GPUs, also with an activation or a scale; write plain_kernel in place of
//      forward_kernel to leave these calls out. Rows of 768 columns that are not aligned, or whose weight and bias are
//      float32, use the other tables, so they keep their kernels, too. In kUnalignedChoices, 96 loads are eight widths:
//      768 to 775 columns of 16 bits.
//   3. The static_asserts below the tables check each line when the file is compiled:
//        - The kernel has a load for each 16 bytes of the longest rows of the line (covers_row):
//              with kOneWarp                                  max_loads <= 32 * (loads per thread)
//              16 bits, one load of each of several rows      max_loads <= 128
//              otherwise                                      max_loads <= 512 * (loads per thread); unaligned: 448
//        - Blocks and the distance between the rows of a team, which geometry_of computes for each number of loads of
//          the line, fulfil the conditions of the kernel (covers_row, divides_rows, can_reduce).
//        - A kernel of kUnalignedChoices has `true` as its last argument. Kernels of the other tables do not.
//        - A kernel of kFloat32AffineChoices has at least kMaxLoads loads per thread and no kOneWarp. All other kernels
//          for aligned rows load weight and bias early, in input's dtype (kEarly).
//        - Every number of loads that the table must support matches a line with kAnyWaves.
//   4. Check which calls changed:
//          python .tests/launches.py HEAD
//      It prints each call that launches another kernel, grid or block than in the last commit, and then its exit
//      status is 1. It makes calls of the
//      shapes in .tests/cases.py, and of float32 and bf16 rows of 8, 16, 24, ... 2560 columns with few and many rows.
//      So it covers only some of the longer rows and of the unaligned rows. For a line with such rows, first add the
//      widths at both ends of its range, and those just outside of it, to shapes() in .tests/cases.py. launches.py
//      needs two to three minutes and no GPU.
//   5. Check the results, first for this width. If no test is selected, add the width to shapes() in .tests/cases.py.
//          python -m pytest --full .tests/test_values.py -k x768-
//          python -m pytest --full -n 2 .tests/test_dispatch.py .tests/test_values.py
//      If no other line has the same template arguments, the file now compiles another kernel. Then test_dispatch.py
//      fails until some case launches it, and
//          python .tests/machine_code.py HEAD
//      prints its registers and its local memory. If it needs local memory, change Bounds. The number of kernels is
//      limited, too (test_libraries_contain_kernels_of_every_family in test_dispatch.py).
//   6. Time it on a GPU, against a folder DIR with the last commit:
//          git worktree add DIR HEAD
//          python .bench/sweep.py --only 8192x768:bf16 --against DIR
//      Use the numbers of rows that your model has, and one that is much larger, and repeat the run. Differences of
//      less than 1% are noise. L2 is overwritten before each call. For rows that are in L2, run .bench/sizes.py in both
//      folders (add the width to its COLUMNS). No script times an activation against another version.
//   7. If the line stays, mend the comments that describe these rows, such as Example 1 above.

struct ForwardKernel {
  void (*kernel)(Forward, RowConstants, PrefetchWindow, int) = nullptr;
  int element_bytes = 0;           // of T
  int loads = 0, rows = 0;         // 16-byte loads per thread and row; rows per thread; 0 if there is no kernel
  bool in_warp = false;            // true if one warp handles a row
  int max_threads = 0;             // of a block
  bool is_unaligned = false;       // true if it is compiled for unaligned rows
  bool loads_affine_late = false;  // true if it accepts weight and bias of another dtype than input's (not kEarly)
};

// A line of the tables below: the rows that a kernel is chosen for.
struct Choice {
  int min_loads, max_loads;  // 16-byte loads per row
  double max_waves;
  ForwardKernel kernel;  // if there is none, the line matches no call
};

constexpr int kWaveLoadsPerSm = 2048;  // also on GPUs whose SMs hold fewer threads
constexpr double kAnyWaves = 1e30;     // any number of waves

// The number of threads per row. kAsNeeded: as many as the loads of the row need, see row_threads.
enum ThreadsPerRow { kAsNeeded, kOneWarp };

template <typename T, int LOADS, int ROWS, ThreadsPerRow THREADS = kAsNeeded, bool UNALIGNED = false>
constexpr ForwardKernel forward_kernel() {
  constexpr bool kInWarp = THREADS == kOneWarp;
  return {layer_norm_rows<T, LOADS, ROWS, UNALIGNED, kInWarp>,
          sizeof(T),
          LOADS,
          ROWS,
          kInWarp,
          Bounds<T, LOADS, ROWS, UNALIGNED, kInWarp>::kMaxThreads,
          UNALIGNED,
          !ForwardRows<T, LOADS, ROWS, UNALIGNED, kInWarp>::kEarly};
}

// Returns a kernel that the epilogue library lacks. It would be no faster there than the kernels that the library has.
template <typename T, int LOADS, int ROWS, ThreadsPerRow THREADS = kAsNeeded, bool UNALIGNED = false>
constexpr ForwardKernel plain_kernel() {
  if constexpr (kHasEpilogue)
    return {};
  else
    return forward_kernel<T, LOADS, ROWS, THREADS, UNALIGNED>();
}

// Aligned rows of float32.
template <typename T>
constexpr Choice kFloatChoices[] = {
    // min and max loads per row, max waves, kernel<T, loads per thread, rows per thread, threads per row>
    // Few short rows: one row per thread, so that there are threads for all SMs.
    {1, 32, 0.5, forward_kernel<T, 1, 1>()},
    // Short rows: several per thread share one load of weight and bias (see kShortRows).
    {1, 32, kAnyWaves, forward_kernel<T, 1, kShortRows>()},
    // Up to 640 columns: one warp per row, which needs no barrier. Lanes have as few loads as the row allows, because
    // otherwise more of them would have nothing to load.
    {33, 64, kAnyWaves, plain_kernel<T, 2, 1, kOneWarp>()},
    // H200, 5461 rows of 384: 15% slower with two loads per thread.
    {65, 96, kAnyWaves, plain_kernel<T, 3, 1, kOneWarp>()},
    // 512 columns are exactly 4 x 32 loads.
    {97, 128, kAnyWaves, plain_kernel<T, 4, 1, kOneWarp>()},
    // H200, 6553 rows of 640 in L2: 17% slower with two loads per thread.
    {129, 160, kAnyWaves, plain_kernel<T, 5, 1, kOneWarp>()},
    // Up to 1024 columns, but few rows: one warp per row, too (H200, 1365 rows of 768: 10% slower with two loads per
    // thread).
    {161, 256, 1, plain_kernel<T, 8, 1, kOneWarp>()},
    // Up to 8 waves: two loads per thread leave more threads to each SM (H100, 4096 rows of 1024: 14% slower with four
    // loads). With more waves, four are faster (65536 rows: 4% slower with two).
    {161, 1024, 8, plain_kernel<T, 2, 1>()},
    // One wave or less: one load per thread. Only the epilogue library reaches this line.
    {33, 512, 1, forward_kernel<T, 1, 1>()},
    // All others: four loads in flight per thread.
    {33, 2048, kAnyWaves, forward_kernel<T, 4, 1>()},
};

// Aligned rows of float16 and bfloat16, with weight and bias (if any) of the same dtype.
template <typename T>
constexpr Choice k16BitChoices[] = {
    // min and max loads per row, max waves, kernel<T, loads per thread, rows per thread, threads per row>
    // Few short rows: one row per thread, so that there are threads for all SMs.
    {1, 32, 0.5, forward_kernel<T, 1, 1>()},
    // Short rows: several per thread share one load of weight and bias (see kShortRows).
    {1, 32, kAnyWaves, forward_kernel<T, 1, kShortRows>()},
    // Up to 1024 columns: one warp per row, which needs no barrier. Lanes have as few loads as the row allows, because
    // otherwise more of them would have nothing to load (H200, 26214 bf16 rows of 320 in L2: 31% slower with four loads
    // per lane).
    {33, 64, kAnyWaves, forward_kernel<T, 2, 1, kOneWarp>()},
    // 768 columns are exactly 3 x 32 loads (H200, 10922 bf16 rows of 768 in L2: 17% slower with four loads per lane).
    {65, 96, kAnyWaves, forward_kernel<T, 3, 1, kOneWarp>()},
    // 1024 columns are exactly 4 x 32 loads.
    {97, 128, kAnyWaves, forward_kernel<T, 4, 1, kOneWarp>()},
    // One wave or less: one load per thread, so that as many threads as possible load.
    {129, 512, 1, forward_kernel<T, 1, 1>()},
    // One wave or less, but more loads than a row can have threads: two loads per thread.
    {513, 1024, 1, plain_kernel<T, 2, 1>()},
    // All others: four loads in flight per thread.
    {129, 2048, kAnyWaves, forward_kernel<T, 4, 1>()},
};

// Aligned rows of float16 and bfloat16 with weight and bias of float32. Only kernels that load weight and bias late can
// convert them (see kEarly).
template <typename T>
constexpr Choice kFloat32AffineChoices[] = {{1, 2048, kAnyWaves, forward_kernel<T, 4, 1>()}};

// Unaligned rows of all dtypes.
template <typename T>
constexpr Choice kUnalignedChoices[] = {
    // min and max loads per row, max waves, kernel<T, loads per thread, rows per thread, threads per row, unaligned>
    // Short rows: one load of each of four rows, which share weight and bias (H200, bf16 rows of 255: 24% slower with
    // four loads of one row).
    {1, 32, kAnyWaves, forward_kernel<T, 1, 4, kAsNeeded, true>()},
    // One wave or less: one row per thread, so that there are twice as many threads.
    {33, 1536, 1, forward_kernel<T, 4, 1, kAsNeeded, true>()},
    // Two rows per thread: both share one load of weight and bias, which is slow because they are not aligned (H200,
    // 16384 float32 rows of 4099: 11% slower with one row per thread). For rows of more than 384 threads, one row per
    // thread is faster (float32 rows of 7001: 2% slower with two).
    {33, 1536, kAnyWaves, plain_kernel<T, 4, 2, kAsNeeded, true>()},
    // All others: four loads of one row.
    {33, 1792, kAnyWaves, forward_kernel<T, 4, 1, kAsNeeded, true>()},
};

// ---- Forward: geometry of a launch ----

// The block of a launch, and the distance between the rows of a team.
struct Geometry {
  int threads;      // of a team
  int block_teams;  // teams of a block
  int step_log2;    // the rows of a team are 2^step_log2 apart
};

// Returns how a kernel is launched for rows of `loads` loads (see loads_of). The static_asserts below check the results
// for all lines of the choice tables and all row lengths.
constexpr Geometry geometry_of(const ForwardKernel& kernel, int loads) {
  const bool is_16_bits = kernel.element_bytes == 2;
  const int V = 16 / kernel.element_bytes;
  int threads = kernel.in_warp ? 32 : row_threads(loads, kernel.loads);
  if (kernel.is_unaligned) threads = std::max(threads, 2 * V);  // at least one per edge column, see ForwardColumns
  const int block_threads = kernel.is_unaligned && is_16_bits ? kUnalignedBlockThreads16Bits : kBlockThreads;
  const int block_teams = std::max(1, block_threads / threads);
  const int min_step = std::max(block_teams, kernel.is_unaligned && kernel.rows > 1 ? V : 1);
  int step_log2 = 0;
  while (1 << step_log2 < min_step) ++step_log2;
  return {threads, block_teams, step_log2};
}

// Returns true if every column of a row belongs to one thread (conditions 4 and 5 of ForwardColumns), and if the block
// keeps to the launch bounds.
constexpr bool covers_row(const ForwardKernel& kernel, const Geometry& geometry, int loads) {
  const bool has_edge_threads = !kernel.is_unaligned || geometry.threads >= 2 * 16 / kernel.element_bytes;
  return geometry.threads * kernel.loads >= loads && has_edge_threads &&
         geometry.threads * geometry.block_teams <= kernel.max_threads;
}

// Returns true if every row belongs to one team, and all rows of a team have the same alignment (conditions 1 and 3 of
// TeamRows; step is a power of two because it is 2^step_log2).
constexpr bool divides_rows(const ForwardKernel& kernel, const Geometry& geometry) {
  const int step = 1 << geometry.step_log2;
  const bool keeps_alignment = !kernel.is_unaligned || kernel.rows == 1 || step % (16 / kernel.element_bytes) == 0;
  return is_power_of_two(geometry.block_teams) && geometry.block_teams <= step && keeps_alignment;
}

// Returns true if the reductions of a row work. combine_row requires that
//   - a team has a multiple of 32 threads, or a power of two below 32,
//   - the block has no incomplete warp, because all lanes of a warp exchange numbers,
//   - each warp of the block has a slot, or, in kernels with one warp per row, a team is one warp.
// row_means requires that a row is not longer than MAX_COLS. An unaligned row may have one incomplete pack more than it
// has loads.
constexpr bool can_reduce(const ForwardKernel& kernel, const Geometry& geometry, int loads) {
  const int threads = geometry.threads, block_threads = threads * geometry.block_teams;
  const bool has_team_size = threads % 32 == 0 || (threads < 32 && is_power_of_two(threads));
  const bool has_slots = kernel.in_warp ? threads == 32 : block_threads <= 32 * kMaxWarps;
  const bool keeps_max_cols = loads + kernel.is_unaligned <= kernel.loads * kMaxRowThreads;
  return has_team_size && block_threads % 32 == 0 && has_slots && keeps_max_cols;
}

// ---- Forward: checks of the tables ----
// Lines whose kernel the epilogue library lacks have loads == 0 and match no call, so that they need no check. The
// tables of bfloat16 have the same lines as those of float16.

// A condition that the geometry of a launch violates.
enum class GeometryError { kNone, kCoversRow, kDividesRows, kCanReduce };

// Returns the first condition that a launch for some line and some row length violates. Rows of (n - 1) * kernel.loads
// + 1 to n * kernel.loads loads have the same geometry. If the longest of them fulfil the conditions, all do. To
// compile faster, only these are checked, and the longest rows of the line.
template <size_t N>
constexpr GeometryError geometry_error(const Choice (&choices)[N]) {
  for (const Choice& choice : choices) {
    if (choice.kernel.loads == 0) continue;
    for (int loads = choice.min_loads; loads <= choice.max_loads; ++loads) {
      if (loads % choice.kernel.loads != 0 && loads != choice.max_loads) continue;
      const Geometry geometry = geometry_of(choice.kernel, loads);
      if (!covers_row(choice.kernel, geometry, loads)) return GeometryError::kCoversRow;
      if (!divides_rows(choice.kernel, geometry)) return GeometryError::kDividesRows;
      if (!can_reduce(choice.kernel, geometry, loads)) return GeometryError::kCanReduce;
    }
  }
  return GeometryError::kNone;
}
constexpr GeometryError kGeometryErrors[] = {
    geometry_error(kFloatChoices<float>), geometry_error(k16BitChoices<__half>),
    geometry_error(kFloat32AffineChoices<__half>), geometry_error(kUnalignedChoices<float>),
    geometry_error(kUnalignedChoices<__half>)};

constexpr bool geometry_has_error(GeometryError error) {
  for (const GeometryError found : kGeometryErrors) {
    if (found == error) return true;
  }
  return false;
}
static_assert(!geometry_has_error(GeometryError::kCoversRow),
              "A line of a choice table has a kernel with too few loads for the longest rows of the line, or "
              "geometry_of returns too few or too many threads.");
static_assert(!geometry_has_error(GeometryError::kDividesRows),
              "geometry_of violates a condition of TeamRows. For example, the teams of a block are a power of two only "
              "if kBlockThreads is one and is at most 256: a block of 512 threads would have 5 teams of 96.");
static_assert(!geometry_has_error(GeometryError::kCanReduce),
              "geometry_of returns a block that combine_row or row_means does not support (see can_reduce).");

// Returns true if the kernel of every line is compiled for unaligned rows (or, if `unaligned` is false, if none is).
template <size_t N>
constexpr bool kernels_are_unaligned(const Choice (&choices)[N], bool unaligned) {
  for (const Choice& choice : choices) {
    if (choice.kernel.loads > 0 && choice.kernel.is_unaligned != unaligned) return false;
  }
  return true;
}
static_assert(kernels_are_unaligned(kUnalignedChoices<float>, true) &&
                  kernels_are_unaligned(kUnalignedChoices<__half>, true),
              "Every kernel of kUnalignedChoices needs the template argument UNALIGNED = true.");
static_assert(kernels_are_unaligned(kFloatChoices<float>, false) &&
                  kernels_are_unaligned(k16BitChoices<__half>, false) &&
                  kernels_are_unaligned(kFloat32AffineChoices<__half>, false),
              "A kernel of a table for aligned rows is compiled for unaligned rows.");

// Returns true if the kernel of every line accepts weight and bias of another dtype than input's.
template <size_t N>
constexpr bool kernels_load_affine_late(const Choice (&choices)[N]) {
  for (const Choice& choice : choices) {
    if (choice.kernel.loads > 0 && !choice.kernel.loads_affine_late) return false;
  }
  return true;
}
static_assert(kernels_load_affine_late(kFloat32AffineChoices<__half>) &&
                  kernels_load_affine_late(kUnalignedChoices<__half>),
              "A kernel of kFloat32AffineChoices or kUnalignedChoices loads weight and bias in input's dtype (kEarly), "
              "but they can be float32.");

// Returns true if, whatever the number of waves, every number of loads from 1 to max_loads matches a line.
template <size_t N>
constexpr bool lines_match_every_row(const Choice (&choices)[N], int max_loads) {
  int matched = 0;  // 1 to `matched` loads match a line
  for (size_t i = 0; i < N; ++i) {
    for (const Choice& choice : choices) {
      const bool matches_next = choice.min_loads <= matched + 1 && choice.max_loads > matched;
      if (choice.kernel.loads > 0 && choice.max_waves >= kAnyWaves && matches_next) matched = choice.max_loads;
    }
  }
  return matched == max_loads;
}
static_assert(
    lines_match_every_row(kFloatChoices<float>, kMaxRowLoads) &&
        lines_match_every_row(k16BitChoices<__half>, kMaxRowLoads) &&
        lines_match_every_row(kFloat32AffineChoices<__half>, kMaxRowLoads) &&
        lines_match_every_row(kUnalignedChoices<float>, kMaxUnalignedRowLoads) &&
        lines_match_every_row(kUnalignedChoices<__half>, kMaxUnalignedRowLoads),
    "The lines with kAnyWaves of a choice table must match all rows that supports() accepts, and no longer ones.");

// ---- Forward: host side ----

// Returns the number of 16-byte loads per row, rounded down. An unaligned row has as many packs, or one less.
int64_t loads_of(const Forward& call) { return std::max<int64_t>(1, call.cols * size_of(call.dtype) / 16); }

// aligned: true if every row of every tensor starts on a 16-byte boundary.
bool supports(const Forward& call, bool aligned) {
  return loads_of(call) <= (aligned ? kMaxRowLoads : kMaxUnalignedRowLoads);
}

// Returns the kernel of the first line that matches the call. Every supported row matches one (lines_match_every_row).
template <size_t N>
ForwardKernel choose_from(const Choice (&choices)[N], const Forward& call, const Device& device) {
  const int64_t loads = loads_of(call);
  const double waves = double(call.rows) * loads / (kWaveLoadsPerSm * device.sms);
  for (const Choice& choice : choices) {
    const bool fits = loads >= choice.min_loads && loads <= choice.max_loads && waves <= choice.max_waves;
    if (fits && choice.kernel.loads > 0) return choice.kernel;
  }
  return choices[N - 1].kernel;  // never reached
}

template <typename T, bool UNALIGNED>
ForwardKernel choose_kernel(const Forward& call, const Device& device) {
  if constexpr (UNALIGNED)
    return choose_from(kUnalignedChoices<T>, call, device);
  else if constexpr (sizeof(T) == 4)
    return choose_from(kFloatChoices<T>, call, device);
  else if (call.affine_float32)
    return choose_from(kFloat32AffineChoices<T>, call, device);
  else
    return choose_from(k16BitChoices<T>, call, device);
}

template <typename T, bool UNALIGNED>
cudaError_t launch_forward(const Forward& call, const LaunchContext& context) {
  const ForwardKernel chosen = choose_kernel<T, UNALIGNED>(call, context.device);
  const Geometry geometry = geometry_of(chosen, int(loads_of(call)));
  const int64_t step = int64_t(1) << geometry.step_log2;
  const int64_t batches = ceil_div(call.rows, step * chosen.rows);
  const int64_t blocks = batches * (step / geometry.block_teams);
  return launch_kernel(chosen.kernel, {dim3(blocks), dim3(geometry.threads, geometry.block_teams)}, context, call,
                       row_constants(call, context.device),
                       prefetch_window(call, chosen.rows * geometry.block_teams, context.device), geometry.step_log2);
}

// ---- Backward ----
//
// With xhat = (input - mean) * rstd and wdy = weight * grad_output, over the N columns of a row:
//   grad_input  = rstd * (wdy - (sum(wdy) + xhat * sum(wdy * xhat)) / N)
//   grad_weight = sum over rows of grad_output * xhat
//   grad_bias   = sum over rows of grad_output
//
// Supported rows: up to 8 columns for each of 512 threads, 4096 columns. Aligned 16-bit rows: up to 16 columns per
// thread, 8192 columns. But aligned rows of more than 8 KB run in the pipelined kernels, if these support them
// (kBytesBeforePipeline).
//
// How it works. A thread has the same columns in all of its rows, of which there are at most 256. It keeps its columns
// of weight, and its sums of grad_weight and grad_bias, in registers. In each iteration it handles ROWS rows:
//   1. Compute xhat and wdy of the rows that have been loaded, and add them to the sums of the row and of the columns.
//   2. Start to load the ROWS rows of the next iteration.
//   3. Combine the sums of each row over its threads, which needs a barrier if a row has several warps.
//   4. Compute and write grad_input.
// Input and grad_output are read once. In the end each block writes its sums of grad_weight and grad_bias to
// `partials`, (2, gridDim.x, cols), and sum_partials adds these up.
//
// Why it is fast. The next rows are in flight while the threads of a row wait for one another, and ROWS rows share a
// barrier.
//
// Example: 65536 bf16 rows of 1024 columns on 132 SMs. A block has 128 threads, each with 8 columns of two rows. An SM
// holds four blocks, which makes 528 blocks. Each handles two rows per iteration, in 62 or 63 iterations.
//
// Unaligned 16-bit rows are loaded in words of 4 bytes, two columns each (H200, 32768 bf16 rows of 2041: 26% slower
// with one column per load). Words are aligned to 4 bytes, because the binding lets input and grad_output start at a
// multiple of 4 bytes (make_aligned), and allocates grad_input. If the number of columns is odd, one column of each row
// is outside of whole words: the last column of even rows and the first of odd rows. Thread 0 handles this edge column.
// A block has only even or only odd rows, so that its threads keep their columns.
//
//   Example: bf16 rows of 5 columns. Brackets are words.
//             columns              first byte of the row    edge column    handled by
//     row 0   [0 1] [2 3]  4        0                       4              blocks 0, 2, 4, ...
//     row 1    0  [1 2] [3 4]      10                       0              blocks 1, 3, 5, ...
//     row 2   [0 1] [2 3]  4       20                       4              blocks 0, 2, 4, ...
//
// Every column of a row belongs to exactly one thread, and every row to exactly one block. This follows from:
//   1. blockDim.x * PACKS * V >= cols. Checked by static_assert (backward_blocks_are_valid).
//   2. Packs of V columns cover an aligned row, because cols is a multiple of V. For unaligned float32 rows V is 1. For
//      unaligned 16-bit rows V is 2, and the edge column is the only column outside of whole words.
//   3. With words, gridDim.x is even, which plan() ensures. A block therefore keeps the parity of its first row, and
//      blocks 2 k and 2 k + 1 together handle consecutive rows.
// A violation of 2 makes test_values (test_values.py) fail. A violation of 3 shows only on GPUs with an odd number
// of SMs, and makes test_odd_rows_on_an_odd_number_of_sms fail.

// Columns per thread, and threads per SM. With 8 columns of two rows, a thread fits into 128 registers, so that an SM
// holds 512 threads. Aligned 16-bit rows can also have 16 columns of one row per thread. launch_backward chooses this
// if an SM then holds more rows. Both exist because each is slower for other rows (H200, bf16: with 8 columns of two
// rows, rows of 2560 are 13% slower; with 16 columns of one row, rows of 768 are 9% slower).
//
// kBackwardThreads is also the most threads of a block: for the longest rows, an SM has one block.
constexpr int kBackwardColumns = 8, kBackwardThreads = 512;
// Threads of a block with several rows. For float32, larger blocks are faster, because fewer blocks leave fewer partial
// sums (H200, rows of 64 to 1024: 2% faster with 256 than with 128 threads).
constexpr int kBackwardBlockThreads16Bits = 128, kBackwardBlockThreads = 256;
// Bytes of the longest aligned row for which the register kernels are preferred to the pipelined ones. An SM holds too
// few longer rows to load some of them while others are combined.
constexpr int64_t kBytesBeforePipeline = 8 << 10;

// Floats of shared memory of a backward kernel. thread_columns: V * PACKS. With an epilogue it holds bias during the
// loop. After the loop it holds the gradient sums of a block that has several rows.
constexpr int backward_shared_floats(int thread_columns) {
  return (kHasEpilogue ? kBackwardThreads : kBackwardBlockThreads) * thread_columns;
}

// True for unaligned 16-bit rows, whose packs are words of two columns.
template <typename T, int V>
constexpr bool kLoadsWords = sizeof(T) == 2 && V == 2;
// Distance between neighbouring rows of a block. With words it is 2: a block has only even or only odd rows.
template <typename T, int V>
constexpr int kRowSpacing = kLoadsWords<T, V> ? 2 : 1;
// True if a thread also computes with packs outside of the row, which are zeros. With words, branches that skip such
// packs would need as much time as their arithmetic. With an epilogue the arithmetic is longer, and branches skip it.
template <typename T, int V>
constexpr bool kAddsZeros = kLoadsWords<T, V> && !kHasEpilogue;

// Prefetches the rows that the block handles in one iteration into L2, if all of them exist. first_row is the first.
// Only kernels for aligned 16-bit rows without epilogue call it (H200, 65536 bf16 rows of 1024: 4% slower without it).
// It would slow down float32.
template <typename T, int ROWS>
__device__ void prefetch_rows(const Backward& call, int64_t first_row, uint64_t policy) {
  if (!is_prefetching_thread() || first_row + ROWS * blockDim.y > call.rows) return;
  const int64_t before = first_row * int(call.cols);
  const int bytes = ROWS * int(blockDim.y) * int(call.cols) * int(sizeof(T));
  prefetch_range(static_cast<const T*>(call.input) + before, bytes, policy);
  prefetch_range(static_cast<const T*>(call.grad_output) + before, bytes, policy);
}

// The numbers that a thread holds of N neighbouring columns: weight, gradient sums over all of its rows, the ROWS rows
// of this iteration, and the ROWS rows of the next one, which are being loaded.
template <typename T, int N, int ROWS>
struct BackwardRegisters {
  int col, offset;                                   // the first column; columns from the thread's first pack to it
  int is_active;                                     // 1 if all N columns are in the row; int because of opaque()
  Vec<float, N> weight, grads[2] = {};               // grads: the sums of grad_weight and of grad_bias
  Pack<T, N> next_x[ROWS] = {}, next_dy[ROWS] = {};  // input and grad_output of the next iteration
  Pack<T, N> dy[ROWS];
  Vec<float, N> xhat[ROWS];

  __device__ Vec<float, N> load_affine_columns(const Backward& call, const void* affine, float fallback) const {
    // Columns that are a whole word in input need not be one in weight.
    return load_affine<T, N, !kLoadsWords<T, N>>(affine, call.affine_float32, col, fallback);
  }
  __device__ Pack<T, N> of_row(const T* row, uint64_t policy) const { return load<T, N>(row + offset, policy); }

  // Computes xhat of the row that was loaded into next_x[r] and next_dy[r]. Adds its products to `sums`, the sums over
  // the row, and to `grads`, the sums over rows. bias: the row's bias as float, used only with an epilogue.
  __device__ void add_row(const Backward& call, int r, float mean, float rstd, const float* bias, GradSums& sums) {
    dy[r] = next_dy[r];
    // Inactive packs are zeros, from which 0 is subtracted instead of the mean, so that xhat is 0. The mean of bf16
    // rows can exceed 1e36: mean * rstd could be infinite, and its product with a gradient of 0 would be NaN.
    xhat[r] = (widened(next_x[r]) - (kAddsZeros<T, N> ? mean * float(is_active) : mean)) * rstd;
    if constexpr (kHasEpilogue) apply_derivative<T>(dy[r], xhat[r], weight, widened(load<float, N>(bias + col)), call);
    const Vec<float, N> grad = widened(dy[r]);
    UNROLL(v, N) {
      const float wdy = rounded_product(weight[v], grad[v]);
      sums.wdy += wdy, sums.wdy_xhat += wdy * xhat[r][v];
      grads[0][v] += grad[v] * xhat[r][v], grads[1][v] += grad[v];
    }
  }

  // Writes the pack's grad_input of row r. to: the thread's first pack in that row. means: the row's sums / cols.
  __device__ void write_grad_input(T* to, int r, float rstd, const GradMeans& means) const {
    // Saves an instruction per column (H200, 32768 bf16 rows of 2041: 1% slower without).
    constexpr bool kFused = sizeof(T) == 2 && N > 1;
    store<T>(to + offset, grad_input_of<kFused>(weight, widened(dy[r]), xhat[r], means, rstd));
  }
  // Writes the sums of grad_weight (n = 0) or grad_bias (n = 1) to an array of the row's columns.
  __device__ void write_sums(float* to, int n) const {
    if constexpr (kLoadsWords<T, N>) {
      to[col] = grads[n][0], to[col + 1] = grads[n][1];
    } else {
      store<float>(to + col, grads[n]);
    }
  }
};

// The columns of a thread: PACKS packs of V columns, blockDim.x * V columns apart, and, with words, the edge column.
template <typename T, int V, int PACKS, int ROWS>
struct BackwardColumns {
  BackwardRegisters<T, V, ROWS> packs[PACKS];
  BackwardRegisters<T, 1, ROWS> edge;
  float next_mean[ROWS], next_rstd[ROWS];  // of the rows of the next iteration

  // Calls f with each active pack, or with all packs (see kAddsZeros), and with the edge column if this thread has it.
  template <bool ALL_PACKS = false, typename F>
  __device__ void each(F f) {
    UNROLL(i, PACKS) {
      if (ALL_PACKS || packs[i].is_active) f(packs[i]);
    }
    if constexpr (kLoadsWords<T, V>) {
      if (edge.is_active) f(edge);
    }
  }

  // mid_word: 1 if the thread's rows begin in the middle of a word, otherwise 0.
  __device__ BackwardColumns(const Backward& call, int mid_word) {
    const int cols = call.cols, first = mid_word + threadIdx.x * V, stride = blockDim.x * V;
    UNROLL(i, PACKS) {
      packs[i].offset = i * stride, packs[i].col = first + i * stride;
      packs[i].is_active = packs[i].col + V <= cols;
      if (kAddsZeros<T, V>) packs[i].weight = {};
    }
    edge.col = mid_word ? 0 : cols - 1, edge.offset = edge.col - first;
    // opaque: otherwise the compiler compares again at each of five uses per iteration (H200, 32768 bf16 rows of 2041:
    // 2% slower).
    edge.is_active = kLoadsWords<T, V> ? opaque(int(cols % 2 != 0 && threadIdx.x == 0)) : 0;
    each([&](auto& pack) { pack.weight = pack.load_affine_columns(call, call.weight, 1); });
  }

  // Starts to load the rows row + r * next_row for r < ROWS.
  __device__ void load_rows(const Backward& call, int64_t row, int next_row, uint64_t policy) {
    const int row_step = next_row * int(call.cols);
    const int64_t offset = row * int(call.cols) + packs[0].col;
    UNROLL(r, ROWS) {
      if (row + r * next_row >= call.rows) continue;
      next_mean[r] = call.mean[row + r * next_row], next_rstd[r] = call.rstd[row + r * next_row];
      const T* x = keep_pointer(static_cast<const T*>(call.input) + offset + r * row_step);
      const T* dy = keep_pointer(static_cast<const T*>(call.grad_output) + offset + r * row_step);
      // First all packs of input, then all of grad_output, which is faster than alternating between them.
      each([&](auto& pack) { pack.next_x[r] = pack.of_row(x, policy); });
      each([&](auto& pack) { pack.next_dy[r] = pack.of_row(dy, policy); });
    }
  }

  // Adds up the block's sums of grad_weight (n = 0) or grad_bias (n = 1) per column, and writes them to `partial`,
  // (cols). shared: (blockDim.y, cols), used if the block has several rows.
  __device__ void write_partial(float* partial, float* shared, int n, int cols) {
    __syncthreads();
    float* gathered = blockDim.y == 1 ? partial : shared + threadIdx.y * cols;
    each([&](auto& pack) { pack.write_sums(gathered, n); });
    // Adds in a tree: adding up to 256 terms one by one would lose digits.
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y >= half) continue;
      for (int col = threadIdx.x; col < cols; col += blockDim.x) {
        const float total = shared[threadIdx.y * cols + col] + shared[(threadIdx.y + half) * cols + col];
        shared[threadIdx.y * cols + col] = total;
        if (half == 1) partial[col] = total;
      }
    }
  }
};

// Computes grad_input, and each block's partial sums of grad_weight and grad_bias: partials is (2, gridDim.x, cols).
// blockDim.x threads share a row, with PACKS packs of V columns each. blockDim.y: rows side by side in a block. ROWS:
// rows per thread and iteration.
template <typename T, int V, int PACKS, int ROWS>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_rows(Backward call, float* partials, L2Priority priority) {
  constexpr int kSpacing = kRowSpacing<T, V>;
  __shared__ GradSums slots[2][kMaxWarps][ROWS];
  __shared__ __align__(16) float shared[backward_shared_floats(V * PACKS)];
  const int cols = call.cols, first_row = threadIdx.y * kSpacing, next_row = blockDim.y * kSpacing;
  const float per_col = 1.0f / cols;
  const uint64_t policy = l2_policy(priority);

  // Find the thread's rows and columns.
  int64_t row = int64_t(blockIdx.x / kSpacing) * ROWS * next_row + blockIdx.x % kSpacing + first_row;
  const int64_t row_stride = int64_t(gridDim.x) * blockDim.y * ROWS;
  const int mid_word = kLoadsWords<T, V> ? row * cols % 2 : 0;
  BackwardColumns<T, V, PACKS, ROWS> columns(call, mid_word);
  // Shifted by mid_word, so that the two columns of a word are aligned to 8 bytes. mid_word is 1 only if cols is odd.
  // The last column is then in shared[cols], which exists (backward_blocks_are_valid).
  float* bias = shared + mid_word;
  if constexpr (kHasEpilogue) {
    // Bias is converted to float once, so that no load in the loop branches on its dtype (H200, 65536 bf16 rows of 1024
    // with GELU: 4% slower with such branches).
    columns.each([&](auto& pack) {
      if (threadIdx.y == 0) store<float>(bias + pack.col, pack.load_affine_columns(call, call.bias, 0));
    });
    __syncthreads();
  }
  // Starts to load the rows of an iteration, and prefetches those of the iteration after it.
  auto start_iteration = [&](int64_t row) {
    columns.load_rows(call, row, next_row, policy);
    if (sizeof(T) == 2 && V > 2 && !kHasEpilogue) prefetch_rows<T, ROWS>(call, row - first_row + row_stride, policy);
  };

  start_iteration(row);
  int parity = 0;  // alternates between two sets of slots, so that one barrier per iteration is enough
  // row - first_row is the same for all threads of the block, which the barrier in combine_row needs.
  for (; row - first_row < call.rows; row += row_stride, parity ^= 1) {
    // Add up.
    GradSums sums[ROWS] = {};
    float rstd[ROWS];
    UNROLL(r, ROWS) {
      rstd[r] = columns.next_rstd[r];
      if (row + r * next_row >= call.rows) continue;
      columns.template each<kAddsZeros<T, V>>(
          [&](auto& pack) { pack.add_row(call, r, columns.next_mean[r], rstd[r], bias, sums[r]); });
    }
    start_iteration(row + row_stride);
    if (call.grad_input == nullptr) continue;  // the same for all threads

    // Write grad_input.
    combine_row(sums, slots[parity]);
    T* grad_input = static_cast<T*>(call.grad_input) + (row * cols + columns.packs[0].col);
    UNROLL(r, ROWS) {
      if (row + r * next_row >= call.rows) continue;
      const GradMeans means = {sums[r].wdy * per_col, sums[r].wdy_xhat * per_col};
      T* to = keep_pointer(grad_input + r * (next_row * cols));
      columns.each([&](auto& pack) { pack.write_grad_input(to, r, rstd[r], means); });
    }
  }

  if (call.grad_weight == nullptr && call.grad_bias == nullptr) return;
  UNROLL(n, 2) columns.write_partial(partials + (n * gridDim.x + blockIdx.x) * int64_t(cols), shared, n, cols);
}

// ---- Backward: blocks ----

struct BackwardBlock {
  int threads, rows;  // threads per row; rows side by side
};

// Returns the block for rows of `cols` columns. thread_columns: V * PACKS of the kernel.
constexpr BackwardBlock backward_block(int64_t cols, int thread_columns, int element_bytes) {
  const int threads = row_threads(cols, thread_columns);
  const int block_threads = element_bytes == 2 ? kBackwardBlockThreads16Bits : kBackwardBlockThreads;
  return {threads, std::max(1, block_threads / threads)};
}

// Returns true if backward_block returns a valid block for every number of columns that a kernel supports. Rows of
// (n - 1) * thread_columns + 1 to n * thread_columns columns have the same block. Only the longest of them are checked:
// they need most threads and most shared memory.
constexpr bool backward_blocks_are_valid(int thread_columns, int element_bytes) {
  const int shared_floats = backward_shared_floats(thread_columns);
  for (int cols = thread_columns; cols <= thread_columns * kBackwardThreads; cols += thread_columns) {
    const BackwardBlock block = backward_block(cols, thread_columns, element_bytes);
    const int block_threads = block.threads * block.rows;
    // Every column belongs to a thread (condition 1 of "Backward").
    const bool covers_row = block.threads * thread_columns >= cols;
    // The block keeps to the launch bounds. combine_row needs whole warps, and a slot for each.
    const bool is_supported =
        block_threads <= kBackwardThreads && block_threads % 32 == 0 && block_threads <= 32 * kMaxWarps;
    // write_partial halves the number of rows, and gathers the sums of several rows in shared memory.
    const bool can_add_rows = is_power_of_two(block.rows) && (block.rows == 1 || block.rows * cols <= shared_floats);
    // Bias needs cols + 1 floats if mid_word is 1. Then cols is odd, and the longest rows have an even number of
    // columns, so that they are at least one column longer.
    const bool has_space_for_bias = !kHasEpilogue || (cols % 2 == 0 && cols <= shared_floats);
    if (!(covers_row && is_supported && can_add_rows && has_space_for_bias)) return false;
  }
  return true;
}
template <int THREAD_COLUMNS, int ELEMENT_BYTES>
constexpr bool kBackwardBlocksAreValid = backward_blocks_are_valid(THREAD_COLUMNS, ELEMENT_BYTES);

// ---- Backward: host side ----

struct BackwardPlan {
  void (*kernel)(Backward, float*, L2Priority);
  dim3 block;  // threads per row, rows side by side
  int64_t blocks;
  int resident_rows;  // rows in the registers of an SM
};

// aligned: true if every row of every tensor starts on a 16-byte boundary.
bool supports(const Backward& call, bool aligned) {
  const int columns = size_of(call.dtype) == 2 && aligned ? 2 * kBackwardColumns : kBackwardColumns;
  return call.cols <= columns * kBackwardThreads;
}

// Returns how a kernel is launched: with as many blocks as run at once, multiplied by a whole number if a thread would
// otherwise have more than kRowsPerSum rows.
template <typename T, int V, int PACKS, int ROWS>
BackwardPlan plan(const Backward& call, const Device& device) {
  static_assert(kBackwardBlocksAreValid<V * PACKS, sizeof(T)>,
                "backward_block violates a condition. For example, a block has a power of two of rows only if "
                "kBackwardBlockThreads is one and is at most 256: a block of 512 threads would have 5 rows of 96.");
  constexpr int kSpacing = kRowSpacing<T, V>;
  const auto [threads, rows] = backward_block(call.cols, V * PACKS, sizeof(T));
  const int sm_blocks = std::max(1, kBackwardThreads / (threads * rows));
  int64_t blocks = std::min<int64_t>(ceil_div(call.rows, rows), device.sms * sm_blocks);
  blocks *= ceil_div(call.rows, blocks * rows * kRowsPerSum);
  blocks = ceil_div(blocks, kSpacing) * kSpacing;  // with words, as many blocks for even rows as for odd rows
  return {layer_norm_backward_rows<T, V, PACKS, ROWS>, dim3(threads, rows), blocks, sm_blocks * rows * ROWS};
}

// Launches backward. V: columns of 16 bytes, or 1 if rows are not aligned.
//
// Each dtype and alignment has one kernel, except for aligned 16-bit rows, which have two. The second has 16 columns of
// one row per thread instead of 8 columns of two, and runs if an SM holds more rows with it, or if rows are too long
// for the first. To try the other kernel for one width, edit this condition, and follow steps 4 to 6 of "How to change
// the kernel for rows of one width" above.
template <typename T, int V>
cudaError_t launch_backward(const Backward& call, const LaunchContext& context) {
  // Columns per load, and rows per thread and iteration. Unaligned 16-bit rows are loaded in words of two columns.
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

_TWO_PASS = r"""
// ==== Two-pass kernels: every row that no other family supports, forward and backward ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _EPILOGUE, _WEIGHT_GRADIENTS.

namespace two_pass {

// Supported rows: all, on every GPU.
//
// How it works. Three kernels run one after the other:
//   1. measure_pieces divides each row into pieces. One block computes the partial statistics of one piece: its Moments
//      in forward, the two sums that grad_input needs in backward. The columns that a block loads at once are a chunk.
//      A piece is every `pieces`-th chunk of its row.
//   2. finish_rows combines the pieces of a row, one block per row.
//   3. normalize_columns (backward: backward_columns) gives each block a tile of columns and a range of rows. The block
//      loads weight and bias of its tile into registers once and then goes down its rows.
// Input is read twice, and in backward grad_output, too. Backward without grad_input needs only the third kernel.
//
// Why it is fast. Kernel 3 reads weight and bias once per range of rows. If it read them for each row, they would be as
// many bytes as input and output together. The time is nearly that of a copy of all bytes that the kernels move, those
// of the second read of input included.
//
// How blocks (letters, in the order of their numbers) divide rows and columns, with 3 pieces per row, 6 chunks and 6
// tiles. The chunks of kernel 1 and the tiles of kernel 3 may differ in length. Kernel 3 starts with the last tile,
// because L2 still holds the columns that kernel 1 read last:
//
//   1 measure_pieces       2 finish_rows    3 normalize_columns
//   row 0  A E I A E I     row 0  A         row 0  f e d c b a     2 rows per block
//   row 1  B F J B F J     row 1  B         row 1  f e d c b a
//   row 2  C G K C G K     row 2  C         row 2  l k j i h g
//   row 3  D H L D H L     row 3  D         row 3  l k j i h g
//
// Example: forward of 16 bf16 rows of 4194304 on 132 SMs. Kernel 1: a chunk is 8192 columns, so that a row has 512
// chunks. 33 blocks share a row, which makes 528 blocks, four per SM. Each measures 15 or 16 chunks. Kernel 2: 16
// blocks combine 33 pieces each. Kernel 3: 2048 blocks normalize a tile of 2048 columns each, in all 16 rows.
//
// Safe changes, and what guards them. "The tests" are the cases of test_values.py with "two_pass" in their names.
//   - kMeasureThreads must be 32 times a power of two, because combine_block combines the warps in a tree
//     (static_assert). A chunk must not be longer than kMinPieceColumns (static_assert).
//   - kTileColumns can be 2048 or a smaller multiple of 128 (static_assert).
//   - All other values of Config affect only speed and the rounding of sums. They must be at least 1. If a kernel then
//     spills, test_no_kernel_has_local_memory (test_build.py) fails.
//   - `pieces` can be 1 to the number of chunks of a row, because combine() needs pieces that are not empty.
//   - partials may be left out only if a column has a single sum, because add_gradients overwrites the gradients.
//     Otherwise, or with a wrong is_first, test_gradients_of_many_rows_are_accurate (test_values.py) fails.
//   - The order of the tiles and the calls of let_next_start() affect only speed. The tests detect a missing
//     wait_for_previous() (mutant with "statistics read before they are written"). On emulated GPUs, they also detect a
//     backward_columns that loads weight before it (mutant with "weight read before").

struct Config {
  static constexpr int kMeasureThreads = 256;  // per block of the first two kernels
  // Blocks of kernel 1 that an SM runs at once (launch bounds). On all SMs together they are a wave. launch() aims at
  // whole waves, because each wave costs the start and the end of its blocks.
  static constexpr int kMeasureBlocks = 4;
  // The launch bounds for unaligned rows in forward: loads of single elements need fewer registers, so more blocks fit.
  // launch() counts kMeasureBlocks for these rows, too.
  static constexpr int kUnalignedMeasureBlocks = 2 * kArch.row_blocks;
  // Columns of a piece, at least, unless the row is shorter. In a short piece the fixed cost of a block shows.
  static constexpr int64_t kMinPieceColumns = 8192;
  // Columns per block of kernel 3: one 16-byte load per thread. With two loads per thread, fewer threads would fit an
  // SM.
  static constexpr int kTileColumns = 2048;
  // Blocks per SM that kernel 3 should have. If there are fewer tiles, the rows are divided into ranges, too.
  static constexpr int64_t kColumnBlocksPerSm = 8;
};
static_assert(
    Config::kTileColumns % 128 == 0 && Config::kTileColumns <= 4 * 512,
    "The launch bounds of backward_columns are chosen for blocks of at most 512 threads with 4 columns each.");

// The columns that one thread has in a chunk of a row. A chunk is what a block of THREADS threads loads at once. Each
// thread has one pack of V columns or, for unaligned rows (V = 1), four single columns that are THREADS apart. The
// thread has no columns if first >= cols; all members but the constructor require first < cols.
template <typename T, int V, int THREADS = Config::kTileColumns / std::max(V, 4)>
struct StripedColumns {
  static constexpr int kThreads = THREADS, kPacks = std::max(1, 4 / V), kChunkColumns = kPacks * V * THREADS;
  using Numbers = Vec<float, kPacks * V>;
  int64_t first, cols;  // first: the thread's first column; cols: columns of a row

  __device__ StripedColumns(int64_t chunk, int64_t cols) : first(chunk * kChunkColumns + threadIdx.x * V), cols(cols) {}
  __device__ int64_t column(int i) const { return first + i * V * THREADS; }
  __device__ bool has(int i) const { return i == 0 || column(i) < cols; }
  // A Vec is only its array, so that V neighbouring numbers of x are a Vec, too.
  static __device__ Vec<float, V>& pack(Numbers& x, int i) { return reinterpret_cast<Vec<float, V>&>(x[i * V]); }

  // Returns load_pack(column) of each pack, and 0 for packs past the end of the row.
  template <typename F>
  __device__ Numbers load_packs(F load_pack) const {
    Numbers x = {};
    UNROLL(i, kPacks) {
      if (has(i)) pack(x, i) = load_pack(column(i));
    }
    return x;
  }
  // tensor: (rows, cols), of T.
  __device__ Numbers load_row(const void* tensor, int64_t row) const {
    const T* from = static_cast<const T*>(tensor) + row * cols;
    return load_packs([&](int64_t col) { return widened(load<T, V>(from + col)); });
  }
  // affine: weight or bias, or null, which stands for `fallback` in every column.
  __device__ Numbers load_parameter(const LayerNormCall& call, const void* affine, float fallback) const {
    return load_packs([&](int64_t col) { return load_affine<T, V>(affine, call.affine_float32, col, fallback); });
  }
  // Returns grad_output, multiplied by the derivative of the epilogue if there is one.
  __device__ Numbers load_gradient(const Backward& call, int64_t row, const Numbers& xhat,
                                   const Numbers& weight) const {
    const Numbers grad = load_row(call.grad_output, row);
    if constexpr (!kHasEpilogue) return grad;
    auto pack = packed<T>(grad);
    apply_derivative<T>(pack, xhat, weight, load_parameter(call, call.bias, 0), call);
    return widened(pack);
  }
  __device__ void store_row(void* tensor, int64_t row, Numbers x) const {
    T* to = static_cast<T*>(tensor) + row * cols;
    UNROLL(i, kPacks) {
      if (has(i)) store<T, V, true>(to + column(i), pack(x, i));
    }
  }
};

// ---- Kernel 1: the partial statistics of each piece ----

// Combines one part per thread over the block; every thread gets the result. Within each warp, the part of the first
// lane may be empty only if those of all lanes are, and the part of warp 0 only if all parts are.
template <typename Part>
__device__ Part combine_block(Part part) {
  constexpr int kWarps = Config::kMeasureThreads / 32;
  static_assert(Config::kMeasureThreads == 32 * kWarps && is_power_of_two(kWarps) && kWarps <= 32,
                "combine_lanes needs a power of two of warps");
  __shared__ Part warp_parts[kWarps];
  part = combine_lanes(part, 32);
  if (threadIdx.x % 32 == 0) warp_parts[threadIdx.x / 32] = part;
  __syncthreads();
  return combine_lanes(warp_parts[threadIdx.x % kWarps], kWarps);
}

// Forward: writes the moments of each piece to piece_moments, (rows, pieces). The means of float32 rows are measured
// from a reference, which row_stats[row].mean holds until finish() replaces it.
template <typename T, int V>
__global__ void __launch_bounds__(Config::kMeasureThreads,
                                  V == 1 ? Config::kUnalignedMeasureBlocks : Config::kMeasureBlocks)
    measure_pieces(Forward call, int pieces, Moments* piece_moments, RowStats* row_stats) {
  let_next_start();
  constexpr int kPacks = V == 1 ? 8 : 4;  // loads in flight per thread
  static_assert(kPacks * V * Config::kMeasureThreads <= Config::kMinPieceColumns,
                "A row of n pieces must have at least n chunks, because combine() needs pieces that are not empty.");
  const int64_t row = blockIdx.x % call.rows, cols = call.cols, chunk_columns = kPacks * V * Config::kMeasureThreads;
  const int piece = blockIdx.x / call.rows;
  const T* input = static_cast<const T*>(call.input) + row * cols;
  auto sampled = [&](int i) { return widen(input[sampled_column(cols, i)]); };
  const float reference = sizeof(T) == 2 ? 0 : reference_of(sampled(0), sampled(1), sampled(2));
  if (piece == 0 && threadIdx.x == 0) row_stats[row].mean = reference;
  Moments moments = {};
  for (int64_t first = piece * chunk_columns + threadIdx.x * V; first < cols; first += pieces * chunk_columns) {
    Pack<T, V> packs[kPacks];
    int count = 0;  // columns that this thread has in the chunk
    UNROLL(i, kPacks) {
      const int64_t col = first + i * V * Config::kMeasureThreads;
      if (i == 0 || col < cols) packs[i] = load<T, V>(input + col), count += V;
    }
    const auto x = [&](int i) { return widened(packs[i]) - reference; };
    const auto has = [&](int i) { return i * V < count; };
    const float2 part = measure_packs<T, 1, kPacks>(x, has, count, 1 / float(count));
    moments = combine(moments, {float(count), part.x, part.y});
  }
  moments = combine_block(moments);
  if (threadIdx.x == 0) piece_moments[row * pieces + piece] = moments;
}

// Backward: writes the sums of wdy and wdy * xhat over each piece to piece_sums, (rows, pieces). The unused parameter
// makes its signature that of forward.
template <typename T, int V>
__global__ void __launch_bounds__(Config::kMeasureThreads, Config::kMeasureBlocks)
    measure_pieces(Backward call, int pieces, GradSums* piece_sums, GradSums*) {
  let_next_start();
  const int64_t row = blockIdx.x % call.rows;
  const int piece = blockIdx.x / call.rows;
  const float mean = call.mean[row], rstd = call.rstd[row];
  GradSums sums = {};
  StripedColumns<T, V, Config::kMeasureThreads> columns(piece, call.cols);
  for (; columns.first < call.cols; columns.first += pieces * columns.kChunkColumns) {
    const auto weight = columns.load_parameter(call, call.weight, 1);
    const auto xhat = (columns.load_row(call.input, row) - mean) * rstd;
    const auto wdy = rounded_product(weight, columns.load_gradient(call, row, xhat, weight));
    // Added to `sums` at once: thousands of terms added one by one would lose digits. (No test on emulated GPUs shows
    // it.)
    GradSums chunk_sums = {};
    UNROLL(v, wdy.kSize) {
      if (columns.has(v / V)) chunk_sums.wdy += wdy[v], chunk_sums.wdy_xhat += wdy[v] * xhat[v];
    }
    sums = combine(sums, chunk_sums);
  }
  sums = combine_block(sums);
  if (threadIdx.x == 0) piece_sums[row * pieces + piece] = sums;
}

// ---- Kernel 2: one result per row ----

// Forward: turns the moments of a row into its RowStats, and saves mean and rstd for backward. On entry, stats.mean is
// the reference that the means of the pieces were measured from.
__device__ inline void finish(const Forward& call, int64_t row, const Moments& moments, RowStats& stats) {
  const float reference = stats.mean, rstd = inverse_root(moments.m2 / float(call.cols) + float(call.eps));
  stats = row_stats_of(reference, moments.mean, rstd);
  save_statistics(call, row, reference + moments.mean, rstd);
}
// Backward: turns the sums of a row into means.
__device__ inline void finish(const Backward& call, int64_t, const GradSums& sums, GradMeans& means) {
  means = {sums.wdy / float(call.cols), sums.wdy_xhat / float(call.cols)};
}

// Combines the pieces of row blockIdx.x, parts[row * pieces ...], into row_results[row].
template <typename Call, typename Part, typename RowResult>
__global__ void __launch_bounds__(Config::kMeasureThreads)
    finish_rows(Call call, int pieces, const Part* parts, RowResult* row_results) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  Part part = {};
  for (int i = threadIdx.x; i < pieces; i += Config::kMeasureThreads) part = combine(part, parts[row * pieces + i]);
  part = combine_block(part);
  if (threadIdx.x == 0) finish(call, row, part, row_results[row]);
}

// ---- Kernel 3: down the rows ----

// Forward: block (x, y) normalizes the rows of range y in one tile of columns. Blocks start with the last tile (see
// the diagram above).
template <typename T, int V>
__global__ void __launch_bounds__(StripedColumns<T, V>::kThreads)
    normalize_columns(Forward call, const RowStats* row_stats, int64_t rows_per_block) {
  const StripedColumns<T, V> columns(gridDim.x - 1 - blockIdx.x, call.cols);
  if (columns.first >= call.cols) return;
  const auto weight = columns.load_parameter(call, call.weight, 1), bias = columns.load_parameter(call, call.bias, 0);
  wait_for_previous();
  const int64_t first_row = blockIdx.y * rows_per_block;
  // Not unrolled: with the registers of several rows, fewer blocks would fit an SM.
  ROLLED(r, min(rows_per_block, call.rows - first_row)) {
    const int64_t row = first_row + r;
    const RowStats stats = row_stats[row];
    auto y = normalized<T>(columns.load_row(call.input, row), stats) * weight + bias;
    apply_epilogue<T>(y, opaque_activation<kHasEpilogue>(Epilogue{call.activation, float(call.scale)}));
    columns.store_row(call.output, row, y);
  }
}

// Backward: block (x, y) computes grad_input of the rows of range y in one tile of columns, and adds up grad_weight and
// grad_bias of these rows. Blocks start with the last tile, as in forward.
//
// The launch bounds let four blocks of 256 threads fit an SM (V = 8), or kArch.row_blocks blocks of 512 threads, which
// is three on sm_90. In the epilogue library it is one block of 512 threads less, because an activation needs more
// registers, and the kernel would spill.
template <typename T, int V>
__global__ void __launch_bounds__(StripedColumns<T, V>::kThreads, V == 8 ? 4 : kArch.row_blocks - kHasEpilogue)
    backward_columns(Backward call, const GradMeans* grad_means, int64_t rows_per_block, float* partials) {
  const StripedColumns<T, V> columns(gridDim.x - 1 - blockIdx.x, call.cols);
  if (columns.first >= call.cols) return;
  // Waits before it loads weight: without grad_input, the previous kernel is one of the caller's, and it may write
  // weight.
  wait_for_previous();
  const auto weight = columns.load_parameter(call, call.weight, 1);
  const int64_t first_row = blockIdx.y * rows_per_block;
  const int rows_here = min(rows_per_block, call.rows - first_row);  // may be 0 or less; the sums are 0 then
  int r = 0;
  // Each iteration adds up to kRowsPerSum rows to sums in registers, then these sums to the partials. Without any rows
  // there is still one iteration, because partials must be written.
  do {
    typename StripedColumns<T, V>::Numbers grad_weight = {}, grad_bias = {};
    const bool is_first = r == 0;
#pragma unroll 1
    for (const int end = min(r + kRowsPerSum, rows_here); r < end; ++r) {
      const int64_t row = first_row + r;
      const float mean = call.mean[row], rstd = call.rstd[row];
      const GradMeans means = call.grad_input != nullptr ? grad_means[row] : GradMeans{};
      const auto xhat = (columns.load_row(call.input, row) - mean) * rstd;
      const auto grad = columns.load_gradient(call, row, xhat, weight);
      const auto dx = grad_input_of<false>(weight, grad, xhat, means, rstd);
      grad_weight = grad_weight + grad * xhat, grad_bias = grad_bias + grad;
      if (call.grad_input != nullptr) columns.store_row(call.grad_input, row, dx);
    }
    UNROLL(i, columns.kPacks) {
      if (!columns.has(i)) continue;
      add_gradients<T>(call, partials, columns.column(i), columns.pack(grad_weight, i), columns.pack(grad_bias, i),
                       is_first);
    }
  } while (r < rows_here);
}

// ---- Host side ----

// Allocates scratch memory and launches the three kernels and, in backward, sum_partials. Scratch memory holds partials
// (backward: (2, row_blocks, cols)), row_results (rows) and parts (rows, pieces), in this order. In forward,
// row_results[row].mean is the row's reference until finish() replaces it.
template <typename T, int V, typename Call>
cudaError_t launch(const Call& call, const LaunchContext& context) {
  constexpr bool kForward = std::is_same_v<Call, Forward>;
  using Part = std::conditional_t<kForward, Moments, GradSums>;
  using RowResult = std::conditional_t<kForward, RowStats, GradMeans>;
  const int64_t rows = call.rows, cols = call.cols;
  const int64_t resident_blocks = Config::kMeasureBlocks * context.device.sms;  // of kernel 1, on all SMs
  // Takes the fewest waves that give each row at least 8 pieces, and then as many pieces per row as these waves can
  // hold. Short rows have fewer pieces, because a piece has at least kMinPieceColumns columns.
  const int64_t waves = ceil_div(8 * rows, resident_blocks);
  const int pieces =
      std::min(ceil_div(cols, Config::kMinPieceColumns), std::max<int64_t>(1, waves * resident_blocks / rows));
  const int64_t tiles = ceil_div(cols, Config::kTileColumns);
  // Ranges of rows, each with a block per tile: up to kColumnBlocksPerSm blocks per SM, or more if a range would
  // otherwise be much longer than kRowsPerSum.
  const int64_t wanted = std::min(rows, Config::kColumnBlocksPerSm * context.device.sms / tiles);
  const int64_t row_blocks = std::max<int64_t>({1, wanted, rows / kRowsPerSum});
  const int64_t rows_per_block = ceil_div(rows, row_blocks);
  // No partials if each column has a single sum: that sum is the gradient.
  const int64_t partial_rows = kForward || (row_blocks == 1 && rows <= kRowsPerSum) ? 0 : row_blocks;
  const int64_t partial_sums = 2 * partial_rows * cols;
  auto* partials = static_cast<float*>(
      context.allocate(partial_sums * sizeof(float) + rows * (sizeof(RowResult) + pieces * sizeof(Part))));
  // Scratch memory is a tensor of PyTorch, whose beginning is aligned for every type. In forward, row_results are at
  // its beginning, because partials are empty. In backward they follow an even number of floats.
  static_assert(alignof(Part) <= alignof(RowResult) && (kForward || alignof(RowResult) <= 2 * alignof(float)),
                "row_results and parts must be aligned");
  auto* row_results = reinterpret_cast<RowResult*>(partials + partial_sums);
  auto* parts = reinterpret_cast<Part*>(row_results + rows);
  bool needs_row_results = true;
  if constexpr (!kForward) needs_row_results = call.grad_input != nullptr;
  if (needs_row_results) {
    // A plain launch, so that the caller's kernels have ended before any of these kernels starts: measure_pieces never
    // waits for them, and normalize_columns loads weight before it waits (rule 3 of the launch section).
    // The type of the pointer selects forward's or backward's measure_pieces.
    void (*const measure)(Call, int, Part*, RowResult*) = measure_pieces<T, V>;
    const Launch measure_launch = {rows * pieces, Config::kMeasureThreads};
    cudaError_t error = launch_kernel(measure, measure_launch, context, call, pieces, parts, row_results);
    if (error != cudaSuccess) return error;
    const Launch finish_launch = {rows, Config::kMeasureThreads, kProgrammatic};
    error = launch_kernel(finish_rows<Call, Part, RowResult>, finish_launch, context, call, pieces, parts, row_results);
    if (error != cudaSuccess) return error;
  }
  const Launch column_launch = {dim3(tiles, row_blocks), StripedColumns<T, V>::kThreads, kProgrammatic};
  if constexpr (kForward) {
    return launch_kernel(normalize_columns<T, V>, column_launch, context, call, row_results, rows_per_block);
  } else {
    const cudaError_t error = launch_kernel(backward_columns<T, V>, column_launch, context, call, row_results,
                                            rows_per_block, partial_rows > 0 ? partials : nullptr);
    return error != cudaSuccess ? error : launch_sum_partials(call, partials, partial_rows, context);
  }
}

}  // namespace two_pass
"""

_ASYNC = r"""
// ==== Asynchronous copies and barriers (sm_80 and newer; bulk copies sm_90 and newer) ====
// Uses: _ARCH.
//
// Wrappers of PTX instructions. Copies run in the background. With wait_for_copies(), a thread waits for its own copies
// that used cp.async. With barrier_wait(), it waits for the copies of all threads, and for bulk copies.
//
// A barrier (mbarrier) lives in shared memory and goes through phases. A phase completes when there have been as many
// arrivals as barrier_init() was given, and when all bytes that barrier_arrive_expecting() has announced have landed.
// Then the next phase begins. Arrivals release and waits acquire, within the block: what a thread has written to shared
// memory before it arrives is visible to every thread that has waited for the phase. Copies that a phase waits for are
// visible, too.
//
// Safe changes: none that emulated GPUs check, because these replace the bodies of all functions here (BODIES in
// .tests/emulator.py). Run the tests with --full on a GPU of sm_80 to sm_89 and on one of sm_90 or newer.

// Address of p in the shared memory window, which is what the instructions below need.
__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// ---- Copies of up to 16 bytes ----

// Copies 16 bytes in the background if `exists`; otherwise writes 16 zero bytes and does not read `global`.
__device__ inline void copy_or_zero(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Copies 16 bytes in the background.
__device__ inline void copy_async(void* shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(policy)
               : "memory");
}

// Copies one float in the background.
__device__ inline void copy_float(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Waits until all copies of this thread by the three functions above have landed.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Barriers ----

// arrivals: the number of arrivals that complete a phase.
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialized barriers visible to bulk copies. Call it in the thread that called barrier_init, before a
// __syncthreads() and the first copy.
__device__ inline void barriers_initialized() {
  if constexpr (kArch.has_bulk_copy) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives as soon as all earlier copies of this thread (not bulk copies) have landed. Does not wait for that.
__device__ inline void barrier_arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Sets `done` to 1 if the phase of this parity has completed, and to 0 otherwise.
#define LAYERNORM_TEST_BARRIER(instruction)                                           \
  asm volatile("{ .reg .pred p; " instruction " p, [%1], %2; selp.u32 %0, 1, 0, p; }" \
               : "=r"(done)                                                           \
               : "r"(shared_address(barrier)), "r"(parity)                            \
               : "memory")

// Waits until the phase of this parity has completed. The first phase has parity 0, the second 1, the third 0, ... On a
// new barrier, waiting for parity 1 returns at once, as if a phase before the first had completed.
__device__ inline void barrier_wait(uint64_t* barrier, int parity) {
  unsigned done = 0;
  while (done == 0) {
    if constexpr (kArch.has_bulk_copy) {
      LAYERNORM_TEST_BARRIER("mbarrier.try_wait.parity.shared.b64");  // may suspend the thread for a while
    } else {
      LAYERNORM_TEST_BARRIER("mbarrier.test_wait.parity.shared.b64");
    }
  }
}

// ---- Bulk copies ----

// Arrives, and adds `bytes` to what bulk copies must bring before the phase can complete.
__device__ inline void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Copies `bytes`, a multiple of 16, in the background, and counts them at the barrier when they have landed. A copy
// that begins in the middle of a cache line reads 12% more sectors of L2. Callers can avoid that by copying from the
// line's beginning, which is faster (H200, float32 rows of 12300, most of which begin within a line: 6 points of copy
// bandwidth).
__device__ inline void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

struct Copy {
  unsigned char* shared;  // to here, on a 16-byte boundary
  const char* global;     // from here, on a 16-byte boundary
  int bytes;              // a multiple of 16
};

// Threads that start the copies of a stage: one thread if there are bulk copies, otherwise two warps, whose threads
// copy 16 bytes at a time.
constexpr int kCopyThreads = kArch.has_bulk_copy ? 1 : 64;

// Starts N copies. All kCopyThreads threads call it, with their number as `thread`. Thread 0 arrives at
// `full` once. With bulk copies (sm_90 and newer) it arrives before it starts them and announces their bytes, so that
// the phase waits for the bytes, too. Without them it arrives after the copies have been started, and each of the
// threads must then call barrier_arrive_with_copies(full), so that the phase waits for their copies.
template <int N>
__device__ void start_copies(const Copy (&copies)[N], uint64_t* full, int thread, uint64_t policy) {
  if constexpr (kArch.has_bulk_copy) {
    int total = 0;
    UNROLL(n, N) total += copies[n].bytes;
    barrier_arrive_expecting(full, total);
    UNROLL(n, N) bulk_copy(copies[n].shared, copies[n].global, copies[n].bytes, full, policy);
  } else {
    for (const Copy& copy : copies) {
#pragma unroll 8
      for (int offset = 16 * thread; offset < copy.bytes; offset += 16 * kCopyThreads) {
        copy_async(copy.shared + offset, copy.global + offset, policy);
      }
    }
    if (thread == 0) barrier_arrive(full);
  }
}

// Orders this thread's earlier ordinary writes to shared memory before asynchronous accesses that other threads start
// after a barrier. Without it, these may miss the writes, because they use another path to memory. The convolution
// needs it, because its asynchronous matrix products read what threads have written. A bulk copy into bytes that
// threads have only read does not need it: a barrier is enough.
__device__ inline void writes_before_async_accesses() {
  if constexpr (kArch.has_bulk_copy) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
"""

_SHARED_MEMORY = r"""
// ==== Shared-memory kernel: many rows of medium length, forward (sm_80 and newer) ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _ROWS, _ASYNC.

namespace shared_memory {

// Supported rows: aligned, without epilogue, too long for the register kernels, and up to 43 KB (16 bits) or 71 KB
// (float32). An SM must be able to hold two rows in shared memory, and there must be at least 15 rows per SM.
//
// How it works. Each block normalizes one row. Its threads copy the row to shared memory, wait, compute the mean, then
// the squared distances from the mean, and write the output. A thread reads only what it has copied itself, so the
// block needs no barrier after the copy, only in the two reductions.
//
// Why it is fast. Input is read once. A thread starts all its copies at once, and copies occupy no registers, so that
// as many bytes are in flight as fit an SM. While one block of an SM computes, the others load.
//
// Example: 4096 float32 rows of 12288 on 132 SMs. A row has 48 KB, or 3072 loads. 768 threads share it, four loads per
// thread. An SM runs two such blocks at once, because three would have more than 2048 threads.
//
// Safe changes, and what guards them. "The tests" are the cases of test_values.py with "shared_memory" in their
// names.
//   - kLoadsPerThread, kBlocksPerSm and kAffinePacks affect only speed and the rounding of sums. If a kernel then
//     spills, test_no_kernel_has_local_memory (test_build.py) fails.
//   - kMaxRowThreads of float32 can be 512 or 1024 (combine_row has a static_assert). That of 16 bits can be a multiple
//     of 32 that is not larger than that of float32, because the number for float32 determines how many warps have
//     slots (static_assert).
//   - kMaxRowBytes, kMinRowsPerSm and kControlBytes decide which rows run here. If you change them, adapt
//     has_shared_memory_kernel in .tests/cases.py (test_cases_launch_expected_kernels in test_dispatch.py fails
//     otherwise) and the overview. Two rows must fit, see supports().
//   - A thread may read only what it has copied itself. With other columns, a __syncthreads() is needed after
//     wait_for_copies(). In the tests, a copy that was not waited for is NaN (mutant with "copy not waited for").
//   - The mutants with "shared memory:" in their names (.tests/mutants.py) show which other bugs the tests detect.

template <typename T>
struct Config {
  static constexpr bool k16Bits = sizeof(T) == 2;
  // Loads per thread, more if the row has more than kMaxRowThreads * kLoadsPerThread.
  static constexpr int kLoadsPerThread = 4;
  // Threads per row, at most. An SM holds few long float32 rows, and each needs more threads (H200, float32 rows of
  // 16384: 3% slower with 512 threads).
  static constexpr int kMaxRowThreads = k16Bits ? 512 : 1024;
  // Blocks of kMaxRowThreads threads that an SM must be able to run (launch bounds). An SM with only 1536 threads runs
  // one block of 1024.
  static constexpr int kBlocksPerSm = k16Bits ? kArch.row_blocks : kArch.sm_threads < 2048 ? 1 : kArch.row_blocks - 1;
  // Bytes of a row, at most. An SM holds fewer of the longer rows, so that too little loads while it computes. For them
  // this kernel was slower than the pipelined kernels (H200, float32 rows of 72 KB: 1%, bf16 rows of 48 KB: 4%).
  static constexpr int kMaxRowBytes = (k16Bits ? 43 : 71) << 10;
  // Rows per SM, at least. Blocks run in waves of as many as fit on all SMs, and with few waves a last one that is not
  // full costs much. The pipelined kernels have no waves. For 8 rows per SM this kernel was 5% slower than they are,
  // for 17 rows per SM it was as fast (H200, 1024 and 2300 float32 rows of 16384). 15 is between these two.
  static constexpr int kMinRowsPerSm = 15;
  // Bytes of shared memory per block besides the row: its variables, and the 1 KB that CUDA reserves.
  static constexpr int kControlBytes = 2048;
  // Packs whose weight and bias a thread loads at once. Two are faster than one, because more loads are in flight. On
  // sm_100 and newer, float32 has registers for only one.
  static constexpr int kAffinePacks = k16Bits ? 2 : kArch.affine_packs_float32;
};

// Block b normalizes row b.
template <typename T>
__global__ void __launch_bounds__(Config<T>::kMaxRowThreads, Config<T>::kBlocksPerSm)
    layer_norm_shared_rows(Forward call, RowConstants constants, PrefetchWindow window) {
  if constexpr (!kArch.has_async_copy) return __trap();  // never launched there: see supports()
  constexpr int V = 16 / sizeof(T), kMaxRowWarps = Config<float>::kMaxRowThreads / 32;
  static_assert(Config<T>::kMaxRowThreads <= 32 * kMaxRowWarps, "a row must not have more warps than slots");
  extern __shared__ __align__(128) unsigned char row_bytes[];
  __shared__ RowSlots<T, 1, kMaxRowWarps> slots;
  static_assert(sizeof(slots) + 1024 <= Config<T>::kControlBytes, "kControlBytes must hold slots and CUDA's 1 KB");
  const int cols = call.cols;
  const T* input = static_cast<const T*>(call.input) + int64_t(blockIdx.x) * cols;
  const int first = int(threadIdx.x) * V, stride = int(blockDim.x) * V;  // columns of this thread's packs
  T* row = reinterpret_cast<T*>(row_bytes);

  // Load.
  const uint64_t policy = l2_policy(constants.priority);
  for (int col = first; col < cols; col += stride) copy_async(row + col, input + col, policy);
  if (is_prefetching_thread()) prefetch_later_rows(window, policy);
  wait_for_copies();

  // Measure: the mean first, then the distances from it.
  const int packs = (cols - first + stride - 1) / stride;  // of this thread
  const auto x = [&](int i) { return widened(load<T, V>(row + (first + i * stride))); };
  float sum[1] = {}, mean[1];
#pragma unroll(Config<T>::kLoadsPerThread)
  for (int i = 0; i < packs; ++i) sum[0] += sum_of<T>(x(i));
  row_means<T, INT_MAX>(mean, sum, packs * V, cols, constants.per_col, slots);
  DistanceSums<T> distances[1] = {};
#pragma unroll(Config<T>::kLoadsPerThread)
  for (int i = 0; i < packs; ++i) distances[0] = combine(distances[0], distances_of<DistanceSums<T>>(x(i) - mean[0]));
  combine_row(distances, slots.distances);
  const float first_mean = mean[0], m2 = correct_mean(distances[0], mean[0], constants.per_col);
  const float rstd = rsqrt(m2 * constants.per_col + constants.eps);
  const RowStats stats = row_stats_of(first_mean, mean_offset(distances[0], constants.per_col), rstd);
  if (threadIdx.x == 0) save_statistics(call, blockIdx.x, stats.mean, rstd);

  // Write.
  T* output = static_cast<T*>(call.output) + int64_t(blockIdx.x) * cols;
  with_same_dtype<T>(call, [&](auto same_dtype) {
#pragma unroll(Config<T>::kAffinePacks)
    for (int i = 0; i < packs; ++i) {
      const int col = first + i * stride;
      Vec<float, V> weight, bias;
      load_affine_pair<T, V, false, same_dtype.value>(weight, bias, call, col, 0);
      store<T, V>(output + col, normalized<T>(x(i), stats) * weight + bias);
    }
  });
}

// ---- Host side ----

// An SM must hold two rows, so that one is loaded while the other is computed. Two are enough: with two rows per SM,
// the pipelined kernels were 16% slower (code for sm_80 on an H200, limited to 99 KB of shared memory, float32 rows of
// 10240).
template <typename T>
bool supports(const Forward& call, const Device& device) {
  const int64_t bytes = call.cols * sizeof(T);
  return device.arch.has_async_copy && bytes <= Config<T>::kMaxRowBytes &&
         2 * (bytes + Config<T>::kControlBytes) <= device.shared_bytes &&
         call.rows >= int64_t(Config<T>::kMinRowsPerSm) * device.sms;
}

template <typename T>
cudaError_t launch(const Forward& call, const LaunchContext& context) {
  const int64_t bytes = call.cols * sizeof(T);
  const int threads = std::min(Config<T>::kMaxRowThreads, row_threads(bytes / 16, Config<T>::kLoadsPerThread));
  return launch_kernel(layer_norm_shared_rows<T>, {call.rows, threads, kPlain, int(bytes)}, context, call,
                       row_constants(call, context.device), prefetch_window(call, 1, context.device));
}

}  // namespace shared_memory
"""

_EXCHANGE = r"""
// ==== Exchange: rings of stages, and mailboxes of blocks that share a row ====
// Uses: _ELEMENTS. Used by _PIPELINED and _GRID_RESIDENT.
//
// A slice is the part of a row that one block has: the same columns of every row.
//
// Ring. A block copies its slices of successive rows into shared memory, in stages. In the pipelined kernels a stage is
// a whole slice, in the grid-resident kernel 8 KB of a slice. The ring is an array of slots, and a slot holds one
// stage. (The pipelined kernels also call a slot a stage.) A slot is reused as soon as its data is no longer needed. A
// round of the ring is one use of every slot. Each slot has barriers (mbarrier) that complete one phase per round. A
// thread waits for a round by its parity: 0 in the first round, then 1, 0, ... For a barrier that has not completed any
// phase yet, a wait for parity 1 returns at once, as if there had been a round before the first one. One bit is enough
// to tell rounds apart, because a thread that waits for a round is never a whole round late. For that, each kernel
// starts the next round of a slot only after all threads that wait for this round have passed their waits.
//
// Mailboxes. The gridDim.x blocks with the same blockIdx.y form a group, which shares rows. For each row, each block of
// the group has one mailbox in global memory: 8 bytes for a pair of floats, the statistics of its slice. In a launch, a
// mailbox is emptied once and then filled once, both by its own block, and read by all blocks of the group. The pair is
// written and read by one 8-byte access, so a reader sees all of it or none, and needs neither a flag nor a fence.
//
// The mailboxes of one row (33 blocks per row; 48 mailboxes, of which the last 15 are padding):
//   mailbox    0   1   2  ...  31 | 32 | 33 ... 47
//   written by block 0, 1, 2, ... 31, 32
//   read by    lane 0, 1, 2, ... 31 of one warp of every block; lane 0 also reads mailbox 32
//
// At the start of a kernel each block marks its own mailboxes as empty. Then all blocks of the grid wait for each other
// once, so that no block reads a value that an earlier use of the memory left there. Nothing is cleared afterwards.
//
// Safe changes, and what guards them:
//   - kPeers limits the blocks that share a row: 160 in this comment, in the overview and in _PIPELINED, and
//     MAX_BLOCKS_PER_ROW in .tests/cases.py (test_cases_know_the_most_blocks_per_row in test_dispatch.py). Then the
//     cases of test_values.py with "pipelined" or "grid_resident" in their names must succeed. Emulated GPUs have at
//     most 36 SMs, so that only a real one has rows of more blocks.
//   - Padding affects only speed; no test notices if it is missing. Mailboxes of two rows must not overlap, and all
//     must be emptied: mutants with "mailboxes" in their names (`python .tests/mutants.py --cpu --only mailboxes`).
//   - Not guarded: that a pair is one 8-byte access, and the caching of volatile accesses. Emulated GPUs do not model
//     them. Change them only on a GPU, and run the tests there with --full.

constexpr int kPeers = 5;                      // mailboxes that a lane reads at once
constexpr int kMaxBlocksPerRow = 32 * kPeers;  // 160: one warp reads all mailboxes of a row. An H200 has 132 SMs, a
                                               // B200 148. On a GPU with more than 160, a row still uses at most 160.

// Returns how many mailboxes a row has: none for one block, otherwise whole 128-byte lines. If two rows shared a line,
// blocks would poll the line that other blocks write.
__host__ __device__ inline int64_t mailboxes_per_row(int blocks) { return blocks <= 1 ? 0 : (blocks + 15) / 16 * 16; }

// Returns the number of columns in block `rank`'s slice of a row: `slice`, fewer for the last block that has columns,
// and 0 for ranks after that.
__host__ __device__ inline int columns_of_slice(int cols, int slice, int rank) {
  return max(0, min(slice, cols - rank * slice));
}

// A slot of a ring, and the parity of the current round for the slot's barriers. slots: the number of slots of the
// ring.
struct RingPosition {
  int index = 0, parity = 0;

  // Returns the position `steps` slots later. steps: 0 to `slots`, which is one round.
  __device__ RingPosition after(int steps, int slots) const {
    LAYERNORM_CHECK(steps >= 0 && steps <= slots);
    const int next = index + steps;
    return next < slots ? RingPosition{next, parity} : RingPosition{next - slots, parity ^ 1};
  }
  __device__ void advance(int slots) { *this = after(1, slots); }
};

// Marks an empty mailbox. As a pair it is two NaNs with all bits set. Arithmetic never returns this NaN (a GPU returns
// 0x7fffffff), so no published pair looks empty.
constexpr uint64_t kEmptyMailbox = ~uint64_t(0);

// Returns the mailbox of block `block` of the group for a row.
__device__ inline uint64_t* mailbox_of(uint64_t* mailboxes, int64_t row, int block) {
  return mailboxes + row * mailboxes_per_row(gridDim.x) + block;
}

// Empties this block's mailboxes for all rows of its group, then waits until all blocks of the grid have done so. Needs
// a cooperative launch. It costs 0.5 us; clearing the mailboxes with a memset before the kernel cost 2.1 us (H200).
__device__ inline void empty_mailboxes(uint64_t* mailboxes, int64_t rows) {
  const int step = gridDim.y;
#pragma unroll 1  // an unrolled loop would begin with a division
  for (int64_t row = blockIdx.y + threadIdx.x * step; row < rows; row += blockDim.x * step) {
    *mailbox_of(mailboxes, row, blockIdx.x) = kEmptyMailbox;
  }
  cooperative_groups::this_grid().sync();
}

// Writes a pair into a mailbox. Its floats must be results of arithmetic, see kEmptyMailbox.
__device__ inline void publish(uint64_t* mailbox, float2 pair) {
  const uint64_t bits = uint64_t(__float_as_uint(pair.y)) << 32 | __float_as_uint(pair.x);
  LAYERNORM_CHECK(bits != kEmptyMailbox);
  *const_cast<volatile uint64_t*>(mailbox) = bits;
}

// Reads the mailboxes of blocks first_peer, first_peer + 32, ... of a row into `pairs`. Returns false if any of them is
// still empty. Blocks that do not exist, and all blocks if `mailboxes` is null, count as having published {0, 0}. All
// loads are issued before any is used, because each needs a round trip to L2.
__device__ inline bool try_read(const uint64_t* mailboxes, int first_peer, float2 (&pairs)[kPeers]) {
  bool complete = true;
  UNROLL(i, kPeers) {
    const int block = first_peer + i * 32;
    const bool exists = mailboxes != nullptr && block < gridDim.x;
    const uint64_t bits = exists ? *const_cast<const volatile uint64_t*>(mailboxes + block) : 0;
    complete &= bits != kEmptyMailbox;
    pairs[i] = bit_cast<float2>(bits);
  }
  return complete;
}
"""

_PIPELINED = r"""
// ==== Pipelined kernels: long rows, forward and backward (sm_80 and newer) ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _WEIGHT_GRADIENTS, _ASYNC, _EXCHANGE.
//
// Supported rows: aligned, without epilogue, and with at most 8192 columns per SM of the GPU (at most 160 SMs count).
// The limit is lower where three stages of that length would not fit into shared memory: for float32, 6816 columns per
// SM in backward with 163 KB of shared memory per block (A100), 7904 in forward and 4096 in backward with 99 KB (sm_86,
// sm_120).
//
// Idea. A row may be too long for one SM, so a group of blocks on different SMs shares it, and each block owns the same
// slice of columns for the whole launch. It keeps the slice's weight and bias (forward), or weight and the sums for
// grad_weight and grad_bias (backward), in registers. The slices of successive rows stream through a ring in shared
// memory. The statistics of a row are known only after all blocks of its group have measured their slices and
// exchanged the results. Instead of waiting, a block first measures the slices of the next `delay` rows, and only then
// applies the statistics: forward normalizes and writes the output, backward writes grad_input.
//
// Why it is fast. Loads continue while statistics travel between SMs. Input (and grad_output) is copied from global
// memory into the ring once; measuring and applying both read it from there.
//
// There is one block per SM. Its 20 warps have four roles:
//   role        warps      warps        work for row t of the group (t from 0). Each role counts its own rows: the
//               sm_90 on   before       loader is ahead of the compute warps, and the publisher follows them
//   compute     0 to 15    0 to 15      measure the slice of row t, then apply the statistics of row t - delay
//   publisher   16         16           combines the parts that the compute warps measured, and fills the block's
//                                       mailbox; if a block has the whole row, finishes the row's statistics instead
//   gatherer    17, 18     17           polls the mailboxes of the group and finishes the row's statistics. Two
//                                       gatherers take turns with the rows; in float32 backward with many blocks per
//                                       row, only one works. If a block has the whole row, none does
//   loader      19         18, 19       copies the slice into stage t % stages: one thread with bulk copies (sm_90 on),
//                                       or 64 threads with 16-byte copies (cp.async)
//
// Timeline of one block with delay = 3, while two stages are in flight:
//   compute iteration    3            4            5            6
//   loader in flight     copy 4, 5    copy 5, 6    copy 6, 7    copy 7, 8
//   compute, first       measure 3    measure 4    measure 5    measure 6
//   publisher            publish 3    publish 4    publish 5    publish 6
//   compute, then        apply 0      apply 1      apply 2      apply 3
//   gatherers            |--- finish the statistics of row 3, before the end of this ---|
//
// Words. A stage is a slot of the ring, and also the slices in it (one of input, in backward also one of grad_output).
// A part is the columns of a slice that kLanesPerPart neighbouring lanes measure. "Row t" is the row of a group that
// its iteration t measures.
//
// Barriers of a stage. Each completes a phase once for each row that the stage holds:
//   barrier       arrivals that complete a phase               who waits
//   full          1 + kCopiers, and bytes (see below)          compute warps, before they measure; the loader, to bound
//                                                              the stages in flight; gatherers in float32 forward,
//                                                              before they read row_scalars
//   measured      one per part, after measuring: 256 (16-bit   publisher, before it combines the parts
//                 forward), 64 (float32 forward),
//                 16 (backward)
//   stats_ready   1: a gatherer, or the publisher of a block   compute warps, before they apply
//                 that has the whole row
//   empty         16: each compute warp, after applying        loader, before it reuses the stage
//
// The arrivals at `full`:
//   - 1 by the first loader thread, in start_copies: before it starts bulk copies (sm_90 on), or after it has started
//     its other copies.
//   - kCopiers, one by each thread that uses cp.async, when its copies have landed. Before sm_90 these are the 64
//     loader threads. From sm_90 on it is the one loader thread in float32 forward, where it copies row_scalars, and no
//     thread otherwise.
//   - From sm_90 on, the phase also waits for the bytes of the bulk copies.
//
// Bounds of `delay` (choose_delay applies them):
//   - Lower bound, speed: a row's statistics must be complete within `delay` iterations, or compute warps wait for
//     them. The exchange between blocks needs 3 to 6 iterations. A block that has whole rows waits only for its
//     publisher, and 2 iterations are enough.
//   - Upper bound, correctness: delay <= stages - 1. When iteration t begins, `delay` stages hold rows that are
//     measured but not applied, and row t needs a stage of its own.
//   - Upper bound, speed: normally delay <= stages - 2, so that another stage is loaded while row t is measured. If a
//     slice is so long that only three stages fit, delay is 1 (2 in backward with many blocks per row, from sm_90 on).
//
// Why it cannot deadlock. Row t of a group needs the stage of row t - stages. That row is applied in iteration
// t - stages + delay, which is before iteration t because delay < stages. Applying it needs its statistics, and these
// need only that every block of the group measures row t - stages. So a row only ever waits for earlier rows, in all
// blocks of the group, and the earliest unfinished row can always proceed. Four conditions must hold:
//   - All blocks of the grid run at the same time. The launch is cooperative if blocks share rows, and the grid has at
//     most one block per SM. If the device cannot run it, the launch fails and dispatch uses another family.
//   - delay < stages. With delay = stages, iteration t would wait for row t to load into the stage that it frees later.
//   - Every mailbox is filled with something other than kEmptyMailbox, and all blocks of a group have the same rows.
//   - All mailboxes are empty before the first one is filled. The grid meets at a barrier after it has emptied them.
//     Otherwise a gatherer could read a value that an earlier call left.
//
// Why stages and the arrays of Control can be reused. Rows t and t + stages of a group share a stage, its barriers, and
// its elements of row_scalars, parts and row_results. Each of these steps waits for the one before. Comments in the
// code name the step at each wait. The last lines of a step say what makes visible what it reads; arrivals release and
// waits acquire (see "Asynchronous copies").
//   1. Compute warps wait for `full`. They measure row t: they read the stage and row_scalars, and write parts.
//        the stage: `full` waits for the bytes of bulk copies, or for the arrivals of the threads that used cp.async
//        row_scalars: copied with cp.async, as above (kCopiers > 0). Or the loader stores them before its arrival
//   2. The publisher waits for `measured`, reads parts, and fills the block's mailbox of row t.
//        parts: the lane that writes a part arrives at `measured` itself. The same for part_columns, before row 0
//   3. A gatherer waits for the mailboxes of all blocks of the group, including that of its own block. It reads
//      row_scalars and writes row_results. If a block has the whole row, the publisher does that in step 2.
//        a mailbox: a single 8-byte access has the whole pair; nothing else is read because of it
//        row_scalars: in float32 forward, the gatherer also waits for `full`; other finish functions do not read them.
//        The publisher need not wait: compute warps have waited for `full` before they arrived at `measured`
//   4. Compute warps wait for `stats_ready`. They apply row t: they read the stage, row_scalars and row_results.
//        row_results: the thread that writes them arrives at `stats_ready` itself
//        the stage and row_scalars: the same threads have waited for them in step 1
//   5. The loader waits for `empty`. It overwrites row_scalars and the stage with those of row t + stages. Then step 1
//      follows for row t + stages.
//        that they are not read any more: __syncwarp() orders the reads of all lanes before lane 0's arrival at `empty`
// So nothing of row t is used any more when row t + stages overwrites it, and no barrier gets a whole round ahead of a
// thread that waits for it. To move an arrival or a wait, find the lines above that depend on it: emulated GPUs do not
// notice a write that is not visible. Threads only read the stage, therefore the bulk copies of step 5 need no fence
// after `empty` (see writes_before_async_accesses). A gatherer may poll rows that are more than `stages` ahead, because
// it uses only rows whose mailboxes are all filled. One of these mailboxes is that of its own block. So the block has
// measured the row, and by the steps above the row `stages` before it has been applied.
//
// Safe changes, and what guards them. "The tests" are the cases of test_values.py with "pipelined" in their names.
// Emulated GPUs run them with warps in random order, and report deadlocks, values that are read before they are
// written, and wrong results. They do not model the order of writes in memory, so a missing fence is not detected.
//   - The values of Config affect only speed and the rounding of sums. Delays must be at least 0, kPrefetchStep a
//     positive multiple of 16 (static_assert), and all other values at least 1. The tests must succeed with any such
//     values. .tests/launches.py lists the launches that change.
//   - kComputeWarps and kThreadColumns determine the longest slice, 8192 columns. The overview, MAX_SLICE in
//     .tests/cases.py and the introduction's example name it or follow from it. In forward, the sum of a part of
//     kLanesPerPart * kThreadColumns 16-bit numbers must be exact (see reference).
//   - choose_plan can return any plan for which is_valid() holds, and that fits: a stage holds a slice and one line,
//     the ring fits into shared memory, a slice is a whole number of packs, and a row has at most as many blocks as
//     there are SMs and kMaxBlocksPerRow. If is_valid() is false, launch() returns cudaErrorInvalidValue.
//     test_plans_keep_their_rules (test_dispatch.py) checks all this for many row lengths and GPUs.
//   - choose_delay can return any delay with 0 <= delay < stages. Otherwise the kernel would deadlock.
//   - kMaxStages can be 3 to 20, the number of warps, because each warp initializes the barriers of one stage. Control
//     must fit into the 48 KB of static shared memory. Both are static_asserts. A larger Control leaves less for the
//     ring, so that on GPUs with little shared memory fewer rows are supported. Then adapt `reserved` in cases.py, and
//     the numbers in the static_assert below Control.
//   - stages_in_flight can be 1 to stages - 1 (std::clamp in choose_plan). With 0 the loader would wait for the slice
//     that it is about to copy, and the tests would report a deadlock. With more than `stages`, after() would get a
//     negative number.
//   - kCopiers can be 0 or kCopyThreads, and must be kCopyThreads before sm_90. row_scalars are copied if it is not 0,
//     and otherwise loaded, for which there can be at most two scalars. So it must not be 0 in float32 forward.
//     static_asserts guard both. If it is not 0, all kCopyThreads threads must call barrier_arrive_with_copies once per
//     row. The tests detect an arrival that does not wait for the copies (see the mutants with "row_scalars" and "last
//     copies" in .tests/mutants.py; a mutant is a copy of this file with one bug). They do not detect it if the wait at
//     `full` in gather_rows is missing, which only makes row_scalars visible.
//   - kLanesPerPart can be any power of two up to 32. The number of arrivals at `measured` follows from it (kParts).
//     With fewer lanes there are more parts, and Control is larger (see kMaxStages).
//   - The number of gatherers can be 1 to kGatherers, and lanes_per_row any power of two up to 32 that is at least the
//     number of blocks per row, or 32. The tests fail otherwise.
//
// Example: backward of 4096 rows of 12288 bf16 columns on an H100 (132 SMs, 227 KB of shared memory per block).
//   Grid: a slice has 6144 columns, so two blocks share a row, and there are 66 groups with 62 or 63 rows each. Blocks
//   (0, 34) and (1, 34) handle rows 34, 100, 166, ...; row 100 is their iteration 1 and uses stage 1.
//   Ring: a stage has a slice of input and one of grad_output, 2 x (12288 + 128) bytes. Nine stages fit. Two are in
//   flight (64 KB / 24 KB), and delay is 3: before an iteration measures, three of the nine stages hold measured rows.
//   Threads: compute threads have two packs of 8 columns, those of warps 8 to 15 only one (512 x 8 = 4096 columns, then
//   256 x 8 = 2048). A gatherer uses 4 lanes per row and polls 8 rows at once.
//   Scratch memory: partial sums, 2 x 66 x 12288 floats (6.5 MB), then 16 mailboxes per row, 2 of them used (512 KB).

namespace pipelined {

// ---- Roles of warps, tuning constants, and the plan of a launch ----

// Indices of the first warp of each role. Before sm_90 copies need two loader warps, and the second replaces a gatherer
// (code for sm_80 on an H200, backward of bf16 rows of 8192: 17 points of copy bandwidth slower with one loader warp).
// So three warps follow the publisher on every GPU: two gatherers and one loader warp, or one and two.
constexpr int kComputeWarps = 16, kPublisher = kComputeWarps, kGatherer = kPublisher + 1,
              kBlockThreads = 32 * (kGatherer + 3);
constexpr int kGatherers = kCopyThreads > 32 ? 1 : 2, kLoader = kGatherer + kGatherers;
constexpr int kThreadColumns = 16, kMaxStages = 10;  // columns of a compute thread; stages of a ring, at most
constexpr int kMaxSlice = 32 * kComputeWarps * kThreadColumns;  // columns of a block, at most: 8192
static_assert(kMaxStages >= 3, "to load, to measure, and to wait for statistics");
static_assert(kMaxStages <= kBlockThreads / 32, "each warp initializes the barriers of one stage");
static_assert(kGatherers >= 1 && 32 * kLoader + kCopyThreads <= kBlockThreads, "every role must have its warps");
static_assert(kBlockThreads == 640, "The host launches this number of threads, so it must be the same on every GPU.");

// Tuning. "Points" are percentage points of copy bandwidth.
struct Config {
  // Bytes that are in flight into a block's ring at a time. Float32 forward is slower with 32 KB (H200, rows of
  // 262144: 0.9 points), and 16-bit forward is slower with 32 KB, too (H200, bf16 rows of 65536: 1 point). Backward is
  // slower with 128 KB (H200, float32 rows of 8192: 2 points).
  static constexpr int kBytesInFlight = 64 << 10, kForwardBytesInFlight16Bits = 48 << 10;
  // Iterations from measuring a row to applying its statistics, if blocks share rows. With fewer, compute warps wait
  // for the exchange. With more, fewer stages are left to load into.
  static constexpr int kForwardDelay = 5, kBackwardDelay = 3;
  // The same for a block that has whole rows and needs no exchange, only the publisher. In practice only backward has
  // such blocks, because forward rows that fit into one slice run in the register kernels.
  static constexpr int kDelayAlone = 2;
  // From this many blocks per row on, the delay is one iteration longer, because the exchange is slower (H200, backward
  // of bf16 rows of 1048576: 6 points faster). Forward follows the same rule. From sm_90 on, backward then also leaves
  // only one stage to load into (see choose_delay), and in float32 it has one gatherer (see gather_rows).
  static constexpr int kManyBlocks = 100;
  // Backward prefetches a slice into L2 before its stage is free, if at least this many blocks share a row (H200,
  // float32 rows of 1048576: 13 points faster). With fewer blocks, stages are free soon, and prefetching is slower
  // (H200, float32 rows of 8192: 5 points). Forward always prefetches (see load_slices).
  static constexpr int kBackwardPrefetchBlocks = 16;
  // Bytes between two prefetches before sm_90: two 32-byte sectors, so that the loader warps issue half as many (code
  // for sm_80 on an H200, float32 rows of 131072: 3 points faster than one sector).
  static constexpr int kPrefetchStep = 64;
  // choose_blocks_per_row uses the next two numbers. Each row costs a fixed time, in which a block could move this many
  // columns.
  static constexpr int64_t kRowCostInColumns = 2048;
  // A row is divided among more blocks than necessary only if slices then have at least this many columns.
  static constexpr int64_t kMinSlice = 2048;
};
static_assert(Config::kPrefetchStep > 0 && Config::kPrefetchStep % 16 == 0, "prefetch_range needs a multiple of 16.");

// Parameters of a launch, the same for all blocks. gridDim.x blocks form a group and share a row. The gridDim.y groups
// handle rows blockIdx.y, blockIdx.y + gridDim.y, ...
struct Plan {
  int slice_columns;     // columns of a block; the last block of a group may have fewer
  int slice_bytes;       // bytes of a stage per tensor: a slice and one line, a multiple of kLineBytes
  int stages;            // of the ring, 3 to kMaxStages
  int stages_in_flight;  // stages that are being copied at a time, at most: 1 to stages - 1
  int delay;             // iterations from measuring a row to applying its statistics: 0 to stages - 1
  int lanes_per_row;     // lanes of a gatherer that read one row's mailboxes: a power of two from 4 to 32
  L2Priority priority;   // of input and grad_output in L2
  int blocks_per_row;    // gridDim.x
};

// Returns true if a plan that fits the GPU (see "Safe changes") gives correct results and no deadlock. launch() checks
// it before every launch; emulated GPUs check it once more in the kernel.
__host__ __device__ inline bool is_valid(const Plan& plan) {
  return plan.stages <= kMaxStages &&                    // Control has kMaxStages of each barrier
         plan.delay >= 0 && plan.delay < plan.stages &&  // see "Why it cannot deadlock"
         plan.stages_in_flight >= 1 &&                   // or the loader would wait for its next copy
         plan.stages_in_flight < plan.stages &&          // with more than `stages`, after() would go backwards
         plan.slice_columns <= kMaxSlice &&              // the compute threads' packs
         is_power_of_two(plan.lanes_per_row) && plan.lanes_per_row <= 32 &&
         plan.lanes_per_row >= min(plan.blocks_per_row, 32);  // a lane for each mailbox, or all lanes
}

// One block's slice of one row, in the ring. A compute thread has up to kPacks packs of V columns of it; the packs of
// consecutive threads are adjacent.
template <typename T>
struct Slice {
  static constexpr int V = 16 / sizeof(T), kPacks = kThreadColumns / V;
  const T *x, *dy;  // input and grad_output (the same as x in forward), in shared memory
  int64_t offset;   // of the slice in the tensors, in elements; for row 0 of the tensors, the slice's first column
  int columns;      // of the slice

  __device__ int column(int i) const { return (i * 32 * kComputeWarps + threadIdx.x) * V; }  // of pack i, in the slice
  __device__ bool has(int i) const { return column(i) < columns; }
  // Returns pack i of x or dy, or zeros if this thread has no pack i.
  __device__ Vec<float, V> pack(const T* tensor, int i) const {
    return widened(has(i) ? load<T, V>(tensor + column(i)) : Pack<T, V>{});
  }
};

// ---- Forward and backward: the work of a compute thread ----
// ForwardWork and BackwardWork have the same members, so that the warps' roles are written once, for a template
// parameter Work:
//   tensor, kTensors       the tensors that are copied into the ring
//   scalar_at, kScalars    floats of a row that measuring needs; the loader puts them into row_scalars
//   constructor            loads what a compute thread keeps in registers
//   measure                returns the statistics of this thread's part of a slice: a pair of floats. A part belongs to
//                          kLanesPerPart neighbouring lanes, and all of them get the same pair
//   finish                 turns the combined pair of a whole row into the RowResult that apply needs
//   apply                  writes output or grad_input of a slice

// Pairs are {mean, m2}: the mean, and the sum of squared distances from it. The means of float32 rows are relative to a
// reference element of the row.
template <typename T>
struct ForwardWork {
  using Call = Forward;
  using Element = T;
  using RowResult = RowStats;
  static constexpr bool kForward = true;
  static constexpr int V = Slice<T>::V, kPacks = Slice<T>::kPacks, kTensors = 1;
  // Compute warps wait for the reduction over the lanes of a part in every iteration, and 16-bit rows leave little time
  // for it. So their parts have 2 lanes: one step of shuffles per sum, instead of five with 32 lanes. float32 rows have
  // more time per column, and use parts of 8 lanes, whose pairs need less shared memory.
  enum : int { kLanesPerPart = sizeof(T) == 2 ? 2 : 8, kScalars = sizeof(T) == 4 ? 3 : 0 };
  Vec<float, V> weight[kPacks], bias[kPacks];
  float count = 0, per_count;  // columns of this thread's part, and 1 / count

  static __device__ const void* tensor(const Call& call, int) { return call.input; }
  static __device__ const float* scalar_at(const Call& call, int64_t row, int i) {
    return static_cast<const float*>(call.input) + row * call.cols + sampled_column(call.cols, i);
  }

  // Returns the element from which the means of a float32 row are measured: the median of three. Without it a row of
  // equal numbers could get a variance above 0, because even a sum of three equal float32 numbers may be rounded.
  // 16-bit rows need no reference: the sum of a part, up to 32 equal 16-bit numbers, is exact in float's 24 bits.
  static __device__ float reference(const float4& x) { return kScalars > 0 ? reference_of(x.x, x.y, x.z) : 0; }

  __device__ ForwardWork(const Call& call, const Slice<T>& own_columns) {
    with_same_dtype<T>(call, [&](auto same_dtype) {
      UNROLL(i, kPacks) {
        // A thread without pack i loads the last pack of the slice instead. With a condition here the loads would wait
        // for one another (H200, bf16 rows of 65536: 4 points of copy bandwidth slower).
        const int col = own_columns.offset + min(own_columns.column(i), own_columns.columns - V);
        load_affine_pair<T, V, false, decltype(same_dtype)::value>(weight[i], bias[i], call, col, 0);
      }
    });
    UNROLL(i, kPacks) count += own_columns.has(i) ? V : 0;
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

  // Also saves the row's mean and rstd for backward, if `saves`.
  static __device__ RowResult finish(const Call& call, float2 total, const float4& row_scalars, int64_t row,
                                     bool saves) {
    const float from = reference(row_scalars), variance = total.y * (1 / float(call.cols)) + float(call.eps);
    const float rstd = sizeof(T) == 2 ? rsqrtf(variance) : inverse_root(variance);
    if (saves) save_statistics(call, row, from + total.x, rstd);
    return row_stats_of(from, total.x, rstd);
  }

  __device__ void apply(const Call& call, const Slice<T>& slice, const RowResult& stats, const float4&) const {
    T* output = static_cast<T*>(call.output) + slice.offset;
    UNROLL(i, kPacks) {
      const auto y = normalized<T>(slice.pack(slice.x, i), stats) * weight[i] + bias[i];
      if (slice.has(i)) store<T, V>(output + slice.column(i), y);
    }
  }
};

// Pairs are {sum(wdy), sum(wdy * xhat)}, where wdy is weight * grad_output and xhat is the normalized input.
// row_scalars are the row's mean and rstd, which forward saved.
template <typename T>
struct BackwardWork {
  using Call = Backward;
  using Element = T;
  using RowResult = GradMeans;
  static constexpr bool kForward = false;
  static constexpr int V = Slice<T>::V, kPacks = Slice<T>::kPacks, kTensors = 2;
  // Backward moves more bytes per column than forward, so that the reduction is hidden behind the copies. With the
  // largest parts, the publisher has the fewest pairs to combine (H200, bf16 rows of 1048576: 2 points of copy
  // bandwidth slower with 16 lanes).
  enum : int { kLanesPerPart = 32, kScalars = 2 };
  Vec<float, V> weight[kPacks], grad_weight[kPacks] = {}, grad_bias[kPacks] = {};
  float count = 0;  // stored in part_columns, which combine_pairs ignores in backward: sums need no count

  static __device__ const void* tensor(const Call& call, int t) { return t == 0 ? call.input : call.grad_output; }
  static __device__ const float* scalar_at(const Call& call, int64_t row, int i) {
    return (i == 0 ? call.mean : call.rstd) + row;
  }

  __device__ BackwardWork(const Call& call, const Slice<T>& own_columns) {
    UNROLL(i, kPacks) {
      const int64_t col = own_columns.offset + own_columns.column(i);
      if (own_columns.has(i)) weight[i] = load_affine<T, V>(call.weight, call.affine_float32, col, 1);
    }
  }

  // Also adds the row to this thread's sums for grad_weight and grad_bias.
  __device__ float2 measure(const Slice<T>& slice, const float4& row_scalars) {
    const float mean = row_scalars.x, rstd = row_scalars.y;
    float2 sums = {};
    UNROLL(i, kPacks) {
      if (!slice.has(i)) continue;
      const auto xhat = (slice.pack(slice.x, i) - mean) * rstd, dy = slice.pack(slice.dy, i);
      const auto wdy = rounded_product(weight[i], dy);
      UNROLL(v, V) {
        sums.x += wdy[v];
        sums.y += wdy[v] * xhat[v];
      }
      grad_weight[i] = grad_weight[i] + dy * xhat, grad_bias[i] = grad_bias[i] + dy;
    }
    return combine_lanes(sums, kLanesPerPart);
  }

  static __device__ RowResult finish(const Call& call, float2 total, const float4&, int64_t, bool) {
    const float per_col = fast_reciprocal(float(call.cols));
    return {total.x * per_col, total.y * per_col};
  }

  // Writes grad_input = rstd * (weight * dy - mean(wdy) - (x - mean) * rstd * mean(wdy * xhat)). 16-bit rows compute it
  // as rstd * (x * x_factor + (weight * dy + constant)): three instructions per element instead of six. The product
  // with rstd comes last, because the square of rstd overflows for rows of numbers below 1e-19 (if eps is as small).
  __device__ void apply(const Call& call, const Slice<T>& slice, const RowResult& means,
                        const float4& row_scalars) const {
    if (call.grad_input == nullptr) return;
    const float mean = row_scalars.x, rstd = row_scalars.y;
    const float x_factor = -rstd * means.wdy_xhat, constant = -means.wdy - mean * x_factor;
    UNROLL(i, kPacks) {
      if (!slice.has(i)) continue;
      const auto x = slice.pack(slice.x, i), dy = slice.pack(slice.dy, i);
      const auto dx = sizeof(T) == 2 ? (x * x_factor + (weight[i] * dy + constant)) * rstd
                                     : grad_input_of<false>(weight[i], dy, (x - mean) * rstd, means, rstd);
      store<T, V>(static_cast<T*>(call.grad_input) + slice.offset + slice.column(i), dx);
    }
  }

  // Adds this thread's sums over rows to the block's partial sums in global memory, and starts new sums.
  __device__ void add_sums_of_rows(const Call& call, float* partials, const Slice<T>& own_columns, bool is_first) {
    UNROLL(i, kPacks) {
      if (!own_columns.has(i)) continue;
      add_gradients<T>(call, partials, own_columns.offset + own_columns.column(i), grad_weight[i], grad_bias[i],
                       is_first);
      grad_weight[i] = grad_bias[i] = {};
    }
  }
};

// ---- State that the warps of a block share ----

// Shared memory beside the ring. Arrays have one element per stage.
template <typename Work>
struct alignas(kLineBytes) Control {
  static constexpr int kParts = 32 * kComputeWarps / Work::kLanesPerPart;  // of a slice
  // Threads that copy with cp.async, and so arrive at `full` when their copies have landed.
  //   - Before sm_90: all 64 loader threads.
  //   - From sm_90 on, in float32 forward: the loader thread, which copies the row_scalars. They are far apart in the
  //     row, so that loads would stall the loader.
  //   - From sm_90 on, in backward: none. Its row_scalars are usually in L2, and loads are faster than copies (H200,
  //     bf16 rows of 8192: 2.5 points of copy bandwidth).
  static constexpr int kCopiers = kCopyThreads > 1 || (Work::kForward && Work::kScalars > 0) ? kCopyThreads : 0;
  static_assert(kCopiers == kCopyThreads || (kCopiers == 0 && kArch.has_bulk_copy), "all loader threads, or none");
  // Barriers, see the table above.
  uint64_t full[kMaxStages], measured[kMaxStages], stats_ready[kMaxStages], empty[kMaxStages];
  float4 row_scalars[kMaxStages];                    // Work::kScalars floats; from the loader
  typename Work::RowResult row_results[kMaxStages];  // from a gatherer or the publisher
  float2 parts[kMaxStages][kParts];                  // pairs, from the compute warps
  float part_columns[kParts];                        // columns of each part, the same in all stages
};
// The host computes the size of the ring with these sizes. In host code kArch is always the row of sm_90, so the sizes
// must be the same in the code for every GPU.
static_assert(sizeof(Control<ForwardWork<float>>) == 6016 && sizeof(Control<ForwardWork<__half>>) == 22144 &&
                  sizeof(Control<BackwardWork<float>>) == 1920 && sizeof(Control<BackwardWork<__half>>) == 1920,
              "The size of Control must not depend on kArch. After an intended change, write the new sizes here.");

// The state that all warps of a block share. `iteration` counts the rows of the block's group.
template <typename Work>
struct BlockContext {
  using T = typename Work::Element;
  const typename Work::Call& call;
  const Plan& plan;
  Control<Work>& control;
  unsigned char* ring;
  uint64_t* mailboxes;
  int rank = blockIdx.x, groups = gridDim.y;
  // Rows of the group. call.rows fits an int: rows have more than 8 KB (see dispatch), so 2^31 of them would be 16 TB.
  int iterations = (int(call.rows) - int(blockIdx.y) + groups - 1) / groups;
  int64_t first_col = int64_t(rank) * plan.slice_columns;               // column at which the block's slice begins
  int columns = columns_of_slice(call.cols, plan.slice_columns, rank);  // of the block's slice

  __device__ int row(int iteration) const { return blockIdx.y + iteration * groups; }
  // Returns the offset of the slice in the tensors, in elements.
  __device__ int64_t offset(int row) const { return int64_t(row) * int(call.cols) + first_col; }

  // Returns the copy of tensor t's slice into a stage. It begins at the start of the 128-byte line in which the slice
  // begins, because such bulk copies are faster (see bulk_copy). So the copy may include up to 112 bytes before the
  // slice, which nobody uses. They may lie before the tensor, but a line is never divided between an accessible and an
  // inaccessible part of memory. The slice and its copy end at the same byte.
  __device__ Copy copy_of(int stage, int t, int row) const {
    const char* from = static_cast<const char*>(Work::tensor(call, t)) + offset(row) * sizeof(T);
    const int before = reinterpret_cast<uintptr_t>(from) % kLineBytes;
    return {ring + (stage * Work::kTensors + t) * plan.slice_bytes, from - before, before + columns * int(sizeof(T))};
  }

  // Returns the slice that a stage holds.
  __device__ Slice<T> slice(int stage, int row) const {
    const Copy x = copy_of(stage, 0, row), dy = copy_of(stage, Work::kTensors - 1, row);
    const auto begin = [&](const Copy& c) { return reinterpret_cast<T*>(c.shared + c.bytes) - columns; };
    return {begin(x), begin(dy), offset(row), columns};
  }

  // Hands the statistics of a row to the compute warps. `total` is the pair of the whole row. Only the first block of
  // the group saves mean and rstd.
  __device__ void finish_row(int stage, float2 total, int row) const {
    control.row_results[stage] = Work::finish(call, total, control.row_scalars[stage], row, rank == 0);
    barrier_arrive(&control.stats_ready[stage]);  // for step 4
  }
};

// ---- The roles of warps ----

// Loader threads: copy the block's slice of row after row, as stages become free.
template <typename Work>
__device__ void load_slices(const BlockContext<Work>& block, int thread) {
  constexpr int kLoadedScalars = Control<Work>::kCopiers > 0 ? 0 : Work::kScalars;  // the others are copied
  const Plan& plan = block.plan;
  auto& control = block.control;
  const uint64_t policy = l2_policy(plan.priority);
  const bool prefetches = Work::kForward || gridDim.x >= Config::kBackwardPrefetchBlocks;
  RingPosition stage;
  for (int iteration = 0; iteration < block.iterations; ++iteration, stage.advance(plan.stages)) {
    const int row = block.row(iteration);
    Copy copies[Work::kTensors];
    UNROLL(t, Work::kTensors) {
      // Prefetches the slice into L2 while it waits for a stage (H200, forward of float32 rows of 262144: 6 points of
      // copy bandwidth faster).
      copies[t] = block.copy_of(stage.index, t, row);
      if (prefetches)
        prefetch_range(copies[t].global, copies[t].bytes, policy, thread, kCopyThreads, Config::kPrefetchStep);
    }
    float scalars[2];  // loaded here, so that the loads overlap with the waits
    static_assert(kLoadedScalars <= 2);
    UNROLL(i, kLoadedScalars) scalars[i] = *Work::scalar_at(block.call, row, i);

    // Step 5: wait until the stage is free. In the first round this returns at once.
    barrier_wait(&control.empty[stage.index], stage.parity ^ 1);
    float* row_scalars = &control.row_scalars[stage.index].x;
    UNROLL(i, Work::kScalars - kLoadedScalars) {
      if (thread == 0) copy_float(row_scalars + i, Work::scalar_at(block.call, row, i));
    }
    // Wait until the slice of row t - stages_in_flight has landed. More copies in flight would delay the mailboxes'
    // traffic. after() only goes forward, so `landing` is the place of row t - stages_in_flight + stages. That row has
    // the same stage, one round later, so it has the other parity. Example: t = 10, nine stages, two in flight. Row 8
    // is in stage 8 in round 0 (parity 0). `landing` is the place of row 17: stage 8 in round 1 (parity 1).
    const RingPosition landing = stage.after(plan.stages - plan.stages_in_flight, plan.stages);
    barrier_wait(&control.full[landing.index], landing.parity ^ 1);

    UNROLL(i, kLoadedScalars) row_scalars[i] = scalars[i];
    start_copies(copies, &control.full[stage.index], thread, policy);
    if (control.kCopiers > 0) barrier_arrive_with_copies(&control.full[stage.index]);
  }
}

// Combines pairs over `width` neighbouring lanes with N pairs each. counts[n]: the columns behind pairs[n]. columns:
// the sum of all counts.
template <typename Work, int N, int M>
__device__ float2 combine_pairs(const float2 (&pairs)[M], const float (&counts)[M], int columns, int width) {
  if constexpr (Work::kForward) {
    const float3 total = combine_means<N>(pairs, counts, float(columns), width);
    return {total.x + total.y, total.z};
  }
  return combine_lanes(sum_of_terms<N>([&](int n) { return pairs[n]; }), width);
}

// Publisher warp: combines the parts of the block's slice, and publishes the pair. If the block has the whole row,
// finishes the row instead.
template <typename Work>
__device__ void publish_slices(const BlockContext<Work>& block, int lane) {
  constexpr int kParts = Control<Work>::kParts, kLanes = kParts < 32 ? kParts : 32, kPartsPerLane = kParts / kLanes;
  auto& control = block.control;
  float counts[kPartsPerLane];
  RingPosition stage;
  for (int iteration = 0; iteration < block.iterations; ++iteration, stage.advance(block.plan.stages)) {
    barrier_wait(&control.measured[stage.index], stage.parity);  // step 2
    float2 pairs[kPartsPerLane];
    UNROLL(i, kPartsPerLane) {
      const int part = i * kLanes + lane % kLanes;
      pairs[i] = control.parts[stage.index][part];
      if (iteration == 0) counts[i] = control.part_columns[part];  // written before the first arrivals at `measured`
    }
    const float2 total = combine_pairs<Work, kPartsPerLane>(pairs, counts, block.columns, kLanes);
    if (lane != 0) continue;
    if (gridDim.x == 1) {
      // In practice only backward gets here (see kDelayAlone), and its finish() does not read row_scalars. Forward
      // could: they are visible, because the compute warps waited for `full` before they arrived at `measured`.
      block.finish_row(stage.index, total, block.row(iteration));
    } else {
      publish(mailbox_of(block.mailboxes, block.row(iteration), block.rank), total);
    }
  }
}

// Gatherer warp: waits for the mailboxes of row after row, and finishes the rows. It polls 32 / lanes_per_row rows at
// once, because several may have been published since it last looked (H200, bf16 rows of 50176: 17 points of copy
// bandwidth faster than with one row at once). With two gatherers and 4 lanes per row, the last of these 8 rows is 7 *
// 2 = 14 iterations ahead of the first, which is more than the ring has stages. That is safe: see "Why stages and the
// arrays of Control can be reused".
template <typename Work>
__device__ void gather_rows(const BlockContext<Work>& block, int gatherer, int lane) {
  const Plan& plan = block.plan;
  // This lane reads mailboxes peer, peer + 32, ... of the row that is `ahead` rows after the gatherer's next one.
  const int peer = lane % plan.lanes_per_row, ahead = lane / plan.lanes_per_row, cols = block.call.cols;
  // Backward of float32 rows with many blocks has one gatherer, because two are slower (H200, rows of 1048576: 8 points
  // of copy bandwidth). For bf16, one is slower (H200, the same rows: 6 points).
  const int gatherers =
      !Work::kForward && sizeof(typename Work::Element) == 4 && gridDim.x >= Config::kManyBlocks ? 1 : kGatherers;
  if (gatherer >= gatherers) return;
  float2 pairs[kPeers];
  float counts[kPeers];
  UNROLL(i, kPeers) counts[i] = columns_of_slice(cols, plan.slice_columns, peer + i * 32);

  // Gatherers share the iterations: with two of them, one has the even ones and the other the odd ones.
  for (int next = gatherer; next < block.iterations;) {
    const int iteration = next + ahead * gatherers, row = block.row(iteration);
    const uint64_t* mailboxes = iteration < block.iterations ? mailbox_of(block.mailboxes, row, 0) : nullptr;
    const unsigned missing = __ballot_sync(~0u, !try_read(mailboxes, peer, pairs));
    // The number of complete rows before the first incomplete one. `missing` has lanes_per_row bits per row, and the
    // lowest bits belong to iteration `next`.
    const int rows = (missing == 0 ? 32 : __ffs(missing) - 1) / plan.lanes_per_row;
    if (rows == 0) {
      // A pause, because gatherers poll most of the time, and their reads compete with the stores to the mailboxes. It
      // is not critical (H100, rows of 1048576: within 2% of the speed without it).
      __nanosleep(32);
      continue;
    }
    const float2 total = gridDim.x <= 32 ? combine_pairs<Work, 1>(pairs, counts, cols, plan.lanes_per_row)
                                         : combine_pairs<Work, kPeers>(pairs, counts, cols, plan.lanes_per_row);
    if (peer == 0 && ahead < rows && iteration < block.iterations) {
      const int stage = iteration % plan.stages;
      // Step 3. In float32 forward, finish_row reads row_scalars. This wait makes them visible to this warp. It returns
      // at once, because the block has already measured the row.
      if (Work::kForward && Work::kScalars > 0) barrier_wait(&block.control.full[stage], iteration / plan.stages % 2);
      block.finish_row(stage, total, row);
    }
    next += rows * gatherers;
  }
}

// Compute warps: measure the slice of a row when it has landed, then apply the statistics of the row `delay` iterations
// before. The last `delay` iterations only apply.
template <typename Work>
__device__ void measure_and_apply(const BlockContext<Work>& block, float* partials, int lane) {
  const int iterations = block.iterations, delay = block.plan.delay, stages = block.plan.stages;
  const int part = threadIdx.x / Work::kLanesPerPart;
  const bool leads_part = lane % Work::kLanesPerPart == 0;
  auto& control = block.control;
  const auto own_columns = block.slice(0, 0);  // the slice of row 0 of the tensors: its offset is its first column
  Work work(block.call, own_columns);
  if (leads_part) control.part_columns[part] = work.count;
  RingPosition measuring, applying;
  ROLLED(iteration, iterations + delay) {
    if (iteration < iterations) {
      const int stage = measuring.index;
      const auto slice = block.slice(stage, block.row(iteration));
      barrier_wait(&control.full[stage], measuring.parity);  // step 1
      const float2 stats = work.measure(slice, control.row_scalars[stage]);
      if (leads_part) {
        control.parts[stage][part] = stats;
        barrier_arrive(&control.measured[stage]);  // makes the part visible in step 2
      }
      measuring.advance(stages);
      if constexpr (!Work::kForward) {
        if (iteration % kRowsPerSum == kRowsPerSum - 1 || iteration + 1 == iterations)
          work.add_sums_of_rows(block.call, partials, own_columns, iteration < kRowsPerSum);
      }
    }
    if (iteration >= delay) {
      const int stage = applying.index;
      const auto slice = block.slice(stage, block.row(iteration - delay));
      barrier_wait(&control.stats_ready[stage], applying.parity);  // step 4
      work.apply(block.call, slice, control.row_results[stage], control.row_scalars[stage]);
      __syncwarp();
      if (lane == 0) barrier_arrive(&control.empty[stage]);  // for step 5
      applying.advance(stages);
    }
  }
}

// ---- The kernel ----
// Grid: (blocks per row, groups). mailboxes: (rows, mailboxes_per_row), or not used if a block has whole rows.
// partials: (2, groups, cols) partial sums for grad_weight and grad_bias; if null, the sums are the gradients.

template <typename Work>
__global__ void __launch_bounds__(kBlockThreads, 1)
    layer_norm_pipelined_rows(typename Work::Call call, Plan plan, uint64_t* mailboxes, float* partials) {
  if constexpr (!kArch.has_async_copy) return __trap();  // supports() keeps calls away from such code
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control<Work> control;
  static_assert(sizeof(Control<Work>) <= 48 << 10, "the limit of static shared memory");
  LAYERNORM_CHECK(is_valid(plan) && plan.blocks_per_row == gridDim.x);
  const BlockContext<Work> block = {call, plan, control, ring, mailboxes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!Work::kForward) let_next_start();  // sum_partials starts early, and waits for this kernel's end

  // Each warp initializes the barriers of one stage. The lanes of a single warp would do so one after the other, which
  // needs 1 us in all (H200, bf16 rows of 32768: 1 point of copy bandwidth slower).
  if (lane == 0 && warp < plan.stages) {
    barrier_init(&control.full[warp], 1 + control.kCopiers);
    barrier_init(&control.measured[warp], control.kParts);
    barrier_init(&control.stats_ready[warp], 1);
    barrier_init(&control.empty[warp], kComputeWarps);
    barriers_initialized();
  }
  __syncthreads();
  if (gridDim.x > 1) empty_mailboxes(mailboxes, call.rows);

  if (warp < kComputeWarps) {
    measure_and_apply(block, partials, lane);
  } else if (warp == kPublisher) {
    publish_slices(block, lane);
  } else if (warp >= kLoader) {
    const int thread = threadIdx.x - 32 * kLoader;
    if (thread < kCopyThreads) load_slices(block, thread);
  } else if (gridDim.x > 1) {
    gather_rows(block, warp - kGatherer, lane);
  }
}

// ---- Host side ----

template <typename T, typename Call>
using WorkOf = std::conditional_t<std::is_same_v<Call, Forward>, ForwardWork<T>, BackwardWork<T>>;

// Returns the number of columns of the longest possible slice: at most what the compute threads can hold, and three
// stages must fit into shared memory (one to load, one to measure, one that waits for its statistics).
template <typename Work>
int64_t longest_slice(const Device& device) {
  const int bytes = (device.shared_bytes - int(sizeof(Control<Work>))) / (3 * Work::kTensors);
  return std::min(kMaxSlice, (bytes / kLineBytes - 1) * kLineBytes / int(sizeof(typename Work::Element)));
}

// Returns true if the kernels support a call with aligned rows and no epilogue.
template <typename T, typename Call>
bool supports(const Call& call, const Device& device) {
  return device.arch.has_async_copy &&
         call.cols <= longest_slice<WorkOf<T, Call>>(device) * std::min(device.sms, kMaxBlocksPerRow);
}

// Returns the number of blocks that share a row: the one with the shortest estimated time, from the fewest that can
// hold a row up to `most`. The time is estimated as the rows of a group times the columns of a slice plus the fixed
// time per row. More blocks than the fewest are worth trying in two cases:
//   - There are fewer rows than SMs, so that SMs would be idle.
//   - In backward, up to twice as many, because fewer SMs may then be idle: if 32 blocks share a row of 262144, four
//     groups use 128 of 132 SMs; if 33 share it, they use all. Forward moves half the bytes per row, which do not hide
//     a longer exchange (H200, bf16 rows of 1048576: 14 points of copy bandwidth slower with 132 blocks per row than
//     with 128).
template <typename Work>
int64_t choose_blocks_per_row(const typename Work::Call& call, const Device& device) {
  const int64_t rows = call.rows, cols = call.cols, sms = device.sms;
  const int64_t fewest = ceil_div(cols, longest_slice<Work>(device));
  const int64_t worth_trying = std::max((Work::kForward ? 1 : 2) * fewest, sms / std::min(rows, sms));
  const int64_t most = std::min({worth_trying, sms, int64_t(kMaxBlocksPerRow), cols / Config::kMinSlice});
  int64_t fastest = fewest, min_time = INT64_MAX;
  for (int64_t blocks = fewest; blocks <= most; ++blocks) {
    const int64_t time =
        ceil_div(rows, std::min(rows, sms / blocks)) * (ceil_div(cols, blocks) + Config::kRowCostInColumns);
    if (time < min_time) fastest = blocks, min_time = time;
  }
  return fastest;
}

// Returns the delay: the iterations that the exchange needs, at most as many as the ring allows. Two stages remain for
// loading, so that one lands while the other is measured. One remains in backward with many blocks per row, where the
// exchange is slower than loading (sm_90 and newer).
template <typename Work>
int choose_delay(int stages, int blocks_per_row, const Device& device) {
  const bool has_many_blocks = blocks_per_row >= Config::kManyBlocks;
  const int exchange = (Work::kForward ? Config::kForwardDelay : Config::kBackwardDelay) + has_many_blocks;
  const int stages_to_load = !Work::kForward && has_many_blocks && device.arch.has_bulk_copy ? 1 : 2;
  return std::min(stages - stages_to_load, blocks_per_row == 1 ? Config::kDelayAlone : exchange);
}

// Divides a row among blocks, and shared memory among stages.
template <typename Work>
Plan choose_plan(const typename Work::Call& call, const Device& device) {
  constexpr int kElementBytes = sizeof(typename Work::Element);
  constexpr int kLineColumns = kLineBytes / kElementBytes;  // slices start on lines if rows do
  Plan plan = {};
  const int64_t columns = ceil_div(call.cols, choose_blocks_per_row<Work>(call, device));
  plan.slice_columns = ceil_div(columns, kLineColumns) * kLineColumns;
  // One more line, because a slice may begin inside of one.
  plan.slice_bytes = plan.slice_columns * kElementBytes + kLineBytes;
  const int ring_bytes = device.shared_bytes - int(sizeof(Control<Work>));
  plan.stages = std::min(ring_bytes / (Work::kTensors * plan.slice_bytes), kMaxStages);  // at least 3: longest_slice
  const int bytes_in_flight =
      Work::kForward && kElementBytes == 2 ? Config::kForwardBytesInFlight16Bits : Config::kBytesInFlight;
  plan.stages_in_flight =
      std::clamp(bytes_in_flight / (Work::kTensors * kElementBytes * plan.slice_columns), 1, plan.stages - 1);
  plan.blocks_per_row = ceil_div(call.cols, plan.slice_columns);
  plan.delay = choose_delay<Work>(plan.stages, plan.blocks_per_row, device);
  plan.lanes_per_row = std::clamp(row_threads(plan.blocks_per_row, 1), 4, 32);
  plan.priority = input_priority(call, device);
  return plan;
}

// Launches the kernel, and in backward sum_partials if there are partial sums.
template <typename T, typename Call>
cudaError_t launch(const Call& call, const LaunchContext& context) {
  using Work = WorkOf<T, Call>;
  const Plan plan = choose_plan<Work>(call, context.device);
  const int blocks_per_row = plan.blocks_per_row;
  if (!is_valid(plan)) return cudaErrorInvalidValue;
  const int64_t groups = std::min<int64_t>(call.rows, context.device.sms / blocks_per_row);

  // Scratch memory: the partial sums of each group, then the mailboxes, which begin on a line. A single group with at
  // most kRowsPerSum rows adds to its sums only once, so that they are the gradients.
  const int64_t partial_rows = !Work::kForward && (groups > 1 || call.rows > kRowsPerSum) ? groups : 0;
  const int64_t partial_floats = ceil_div(2 * partial_rows * call.cols, 32) * 32;
  const int64_t bytes = 4 * partial_floats + 8 * call.rows * mailboxes_per_row(blocks_per_row);
  auto* scratch = static_cast<float*>(bytes > 0 ? context.allocate(bytes) : nullptr);
  auto* mailboxes = reinterpret_cast<uint64_t*>(scratch + partial_floats);
  float* partials = partial_rows > 0 ? scratch : nullptr;

  const Launch launch = {dim3(blocks_per_row, groups), kBlockThreads, blocks_per_row > 1 ? kCooperative : kPlain,
                         plan.stages * Work::kTensors * plan.slice_bytes};
  const cudaError_t error =
      launch_kernel(layer_norm_pipelined_rows<Work>, launch, context, call, plan, mailboxes, partials);
  if constexpr (!Work::kForward) {
    if (error == cudaSuccess) return launch_sum_partials(call, partials, partial_rows, context);
  }
  return error;
}

}  // namespace pipelined
"""

_GRID_RESIDENT = r"""
// ==== Grid-resident kernel: the longest float32 rows, forward (sm_90 to sm_110) ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _ROWS, _ASYNC, _EXCHANGE.

namespace grid_resident {

// Supported rows: aligned float32 rows without epilogue, of up to 32768 columns per SM, and at least four rows per
// group of blocks. (Rows of up to 8192 columns per SM run in the pipelined kernels, which dispatch tries first.) 16-bit
// rows run in the two-pass kernels: an SM has registers for the weight and bias of only a few warps, and so few warps
// are too slow for 16 bits, which means twice as many elements per byte (H200, 16 bf16 rows of 4194304: 24% slower than
// the two-pass kernels).
//
// ---- How it works ----
//
// A group of blocks, one per SM, shares a row. Each block owns the same slice of columns for the whole launch, and
// keeps the slice's weight and bias on chip: most in registers, the rest in shared memory. The slices of row after row
// move through a ring in shared memory, in stages of 8 KB. A slice stays in the ring until every block of the group has
// measured its own slice and published the result, because only then are the row's statistics known. While a block
// normalizes the stages of one row ("applies" them), it also measures stages of the next row. So the next row's
// statistics are exchanged before this row is finished.
//
// Why it is fast. Input is read from global memory once, and weight and bias once per group, not once per row. The
// exchange between blocks overlaps with the work on kStagesAhead stages. (H200, 16 rows of 4194304: the two-pass
// kernels are 23% slower. If the weight and bias that registers cannot hold were read from L2 for every row, the ring
// could be longer, but that was more than 50% slower.)
//
// The limit of its speed. A row cannot be applied before its exchange is over: the last block's result must reach all
// other blocks. In a kernel that only copies, with the same ring and exchange, the exchange lasts 1.5 us while input
// and output stay in L2, 2 us if they do not, and more than 4 us with five slots more. So neither a longer ring nor
// faster blocks make the kernel faster. Measured on an H200 with 16 rows of 4194304, which take 175 us:
//   - With one to five slots more it is 2% to 5% slower. (In this experiment weight and bias were not in shared memory,
//     to make space, and the results were wrong.)
//   - With a warp that does nothing but load it is 4% slower, although it needs 12% less time while input and output
//     stay in L2.
//   - The kernel that only copies needs 149 us, and 139 us without the exchange.
//
// Example: 16 rows of 4194304 on 132 SMs with 227 KB of shared memory per block. There is one group of 132 blocks. A
// slice has 31776 columns, which is 16 stages; the last stage is about half full. A thread keeps 31 packs of weight and
// 20 packs of bias in registers. 44 KB of shared memory hold the rest of the slice's weight and bias. The ring has 22
// slots.
//
// Timeline of one block in this example ("0.12" is stage 12 of row 0). Each iteration applies one stage:
//   apply   measure  load   prefetch   once per row
//   0.0     1.3      1.5    1.8        before: gather the statistics of row 0 from all blocks
//   ...     ...      ...    ...
//   0.12    1.15     2.1    2.4        after: publish this block's part of row 1, which is now measured completely
//   0.13    2.0      2.2    2.5
//   0.14    2.1      2.3    2.6
//   0.15    2.2      2.4    2.7
//   1.0     2.3      2.5    2.8        before: gather the statistics of row 1 from all blocks
// The 22 slots of the ring while 0.12 is applied:
//   | 0.12    | 0.13 to 0.15, 1.0 to 1.14 | 1.15      | 2.0      | 2.1         |
//   | applied | measured, must wait (18)  | measured  | landing  | load begins |
//
// The steps of an iteration, in this order:
//   load      Thread 0 waits until all warps have applied the stage of the previous iteration (`empty`), and starts to
//             copy another stage into that slot. Thread 32 starts a prefetch, kPrefetchStages further ahead.
//   wait      Every thread waits until the stage that it will measure has landed (`full`). It need not wait for the
//             stage that it will apply, because it has waited for that one before it measured it.
//   apply     Every thread normalizes its two packs of a stage and writes them.
//   measure   Every thread adds its two packs of the other stage to its moments. After the last stage of a row, the
//             warps combine their moments (`measured`), and the last warp publishes the result.
//   release   Every warp arrives at `empty` of the stage that it has applied.
//
// ---- Rules that keep it correct ----
//
// S is the number of stages of the block's slice, R the number of slots of the ring, and A is kStagesAhead. Number the
// stages that a block handles 0, 1, 2, ...: stage n belongs to row n / S of the group. It is in slot n % R of the ring.
// Iteration n applies stage n, measures stage n + S + A, and loads stage n + R - 1.
//
// choose_plan checks rules 1 to 3 (keeps_rules) for the first and the last block of a group, because only the last one
// can have a shorter slice than the others. test_plans_keep_their_rules (.tests/test_dispatch.py) checks them for every
// block.
//
//   1. R >= S + A + 2. The stage that iteration n measures was then loaded in the iteration before, or earlier. With
//      R = S + A + 1, each iteration would wait for its own load. With less, it would wait for a load that has not
//      begun, and hang. With 227 KB of shared memory per block it holds for all supported rows: a static_assert below
//      checks the longest.
//   2. S <= kSliceStages = 16. Registers cannot be indexed by a variable. So the loop over a slice is unrolled, with 16
//      places, and place p uses packs 2 p and 2 p + 1 of weight and bias. A shorter slice skips the *first* 16 - S
//      places. A skipped place neither loads, measures nor applies, and does not advance in the ring. Two things
//      follow. Place 15 is always the last stage, so it is the only one that can be incomplete, and the only one that
//      checks for it. And how much weight and bias a block keeps in shared memory depends on how full its last stage
//      is, not on S.
//   3. S > A. Place 15 - A measures the last stage of the next row, and publishes it. If that place were skipped, the
//      row would never be published, and its group would hang. Today the check never fails: choose_plan makes slices of
//      more than 10000 columns, which is five stages.
//   4. All blocks run at once (cooperative launch), and a block publishes its part of a row before it waits for the
//      other parts of that row. Without either, the blocks could wait for each other forever.
//   5. Control is reused from row to row. (Here r + 1 is the group's next row after r.) Warps write the moments of row
//      r + 1 while they apply row r, after the __syncthreads() that follows gather_row(r). The last warp calls
//      gather_row(r) only after it has read the moments of row r. `row_stats` has two entries, which consecutive rows
//      use alternately. One would be enough and is as fast: every warp reads the statistics of row r before it arrives
//      at `measured` for row r + 1, and the last warp waits for these arrivals before it gathers row r + 1. But
//      compute-sanitizer does not follow this order from the lanes of a warp through __syncwarp() to the arrival of one
//      lane, and reports a race.
//   6. The threads only read the ring, so a bulk copy may overwrite a slot without writes_before_async_accesses().
//      A thread reads only those packs of weight and bias in shared memory that it has written itself, so no barrier is
//      needed.
//
// ---- Registers ----
//
// A block has 256 threads and an SM to itself, so a thread can have 255 registers. Weight and bias need 204 of them:
// (31 + 20) packs x 4 floats. The other 51 hold two stages (16 floats), the moments, the statistics, and addresses. The
// compiler uses all 255 (nvcc 13.0, sm_90a), so even a small change of the loop can make it spill. A spill does not
// change results, but it costs time, because each thread reads the spilled word again and again (one word: 4% slower,
// see measure_stage). After a change, run
//   python .tests/machine_code.py HEAD --arch sm_90a sm_100
// It prints every kernel whose machine code has changed, with the numbers before and after the change. For this kernel,
// the line must end with "255 registers, 0 B local". "8 B local" would be a spill of two words per thread. If it
// spills, hide a value from the compiler with opaque(), as measure_stage and gather_row do, or keep one pack less of
// weight or bias in registers: that frees four registers, and needs 4 KB more of shared memory. There is space for one
// such pack. Each stage by which you reduce kStagesAhead makes space for two more.
//
// ---- Safe changes ----
//
//   kPrefetchStages            Any number from 0 on is correct.
//   kMinRows                   Any number from 1 on is correct; it only chooses between this kernel and the two-pass
//                              kernels. has_grid_resident_kernel in .tests/cases.py must say the same.
//   kStagesAhead, kWeightPacks, kBiasPacks
//                              Any numbers with which the static_asserts below hold. Then look for spills. With today's
//                              packs, kStagesAhead can be 0 to 3: the longest slice leaves 6.4 KB, less than a stage.
//   kSliceStages               Not without changing the register budget: each stage needs two packs more of weight and
//                              of bias.
//   kBlockThreads              Not without changing the register budget, the shared memory, and the size of Control.
//   kPacksPerThread            Not without changing measure_stage and BlockContext::load, and the register budget.
//
// To test a change: `python -m pytest --full .tests/test_values.py .tests/test_device.py -k grid_resident`. (Only
// test_device.py has calls with several groups of blocks.) Run it with emulated GPUs first, which report a hang as a
// deadlock, and a plan that breaks one of the rules 1 to 3; on a real GPU the test itself would hang. They do not
// detect spills or missing fences. If rows that should run here no longer do, .tests/test_dispatch.py fails.

struct Config {
  // Stages that a block applies between publishing a row and needing the row's statistics: the time that the exchange
  // has. With more of them, fewer slots are left to load into (H200, 16 rows of 4194304: 4% slower with 2 stages than
  // with 3, 3% slower with 4).
  static constexpr int kStagesAhead = 3;
  // Stages by which prefetches into L2 are ahead of loads into the ring (H200, 16 rows of 4194304: 1% slower with 4
  // stages than with 3, 5% slower with 6).
  static constexpr int kPrefetchStages = 3;
  // Packs of weight and of bias per thread that are in registers. The rest of a slice's are in shared memory.
  static constexpr int kWeightPacks = 31, kBiasPacks = 20;
  // Rows per group, at least. With fewer, there are too few rows to load one while another is applied (H200, rows of
  // 4194304: with one row this kernel is 10% slower than the two-pass kernels, and with three rows 1% slower. With 16
  // rows, the two-pass kernels are 23% slower).
  static constexpr int kMinRows = 4;
};

// Few threads, so that each can have 255 registers (see "Registers").
constexpr int kBlockThreads = 256, kWarps = kBlockThreads / 32;
constexpr int V = 4;                // floats of a 16-byte pack
constexpr int kPacksPerThread = 2;  // of a stage
static_assert(kPacksPerThread == 2, "measure_stage and BlockContext::load are written for two packs.");
static_assert(kWarps <= 32 && is_power_of_two(kWarps), "combine_lanes needs a power of two up to 32.");
static_assert(kBlockThreads > 32, "Thread 32 prefetches, see Fetch.");
constexpr int kStagePacks = kPacksPerThread * kBlockThreads;
constexpr int kStageColumns = kStagePacks * V, kStageBytes = 16 * kStagePacks;
// Stages of a slice, at most. With 17, the longest slice and its ring would not fit (see the static_assert below).
constexpr int kSliceStages = 16;
constexpr int kMaxRingSlots = (227 << 10) / kStageBytes;  // as many as fit into 227 KB: 28
static_assert(Config::kStagesAhead >= 0 && Config::kStagesAhead < kSliceStages, "See rule 3.");
static_assert(Config::kPrefetchStages >= 0, "A prefetch must not be later than the load.");
using FloatPack = Pack<float, V>;
using ThreadStage = Vec<FloatPack, kPacksPerThread>;  // the packs of a stage that one thread handles

// How a call is divided, chosen on the host.
struct Plan {
  int blocks_per_row;  // blocks of a group (gridDim.x); 0 if this kernel does not support the call
  int groups;          // gridDim.y; group g handles rows g, g + groups, g + 2 * groups, ...
  int slice;           // columns per block; the last block of a group may have fewer
  int ring_slots;
  int shared_bytes;  // dynamic shared memory: the ring, then bias and weight that registers do not hold
};

// Stages of a slice of `packs` packs. The last one may be incomplete.
__host__ __device__ inline int stages_of(int packs) { return (packs + kStagePacks - 1) / kStagePacks; }

// Packs of weight (or bias) of a slice of `packs` packs that are kept in shared memory, if each thread keeps
// `in_registers` of its packs in registers. Skipped places count as full stages, see rule 2.
__host__ __device__ inline int shared_packs(int packs, int in_registers) {
  return max(0, packs + (kSliceStages - stages_of(packs)) * kStagePacks - in_registers * kBlockThreads);
}

// Returns true if rules 1 to 3 hold for a block whose slice has `stages` stages. ring: slots of the ring.
__host__ __device__ inline bool keeps_rules(int stages, int ring) {
  return ring >= stages + Config::kStagesAhead + 2 &&  // rule 1: a slice, the stages that are measured early, one stage
                                                       // that lands, and one that is loaded
         stages <= kSliceStages &&                     // rule 2
         stages > Config::kStagesAhead;                // rule 3
}

struct alignas(kLineBytes) Control {
  uint64_t full[kMaxRingSlots];   // barriers of the slots: the stage in this slot has landed
  uint64_t empty[kMaxRingSlots];  // barriers of the slots: all warps have applied the stage in this slot
  uint64_t measured;              // barrier: all warps have written their moments of a row
  Moments moments[kWarps];        // of each warp's columns of the row that is measured
  RowStats row_stats[2];          // of the row that is applied, see rule 5
};
static_assert(
    sizeof(Control) == 640,
    "The host uses this size, so it must not depend on kArch. If you change Control, write its new size here.");
// The most bytes of weight and bias in shared memory: those of a full slice, less the packs in registers.
constexpr int kMostAffinePacks = 2 * kSliceStages * kPacksPerThread - Config::kWeightPacks - Config::kBiasPacks;
constexpr int kMostAffineBytes = 16 * kMostAffinePacks * kBlockThreads;
constexpr int kLongestRingBytes = (kSliceStages + Config::kStagesAhead + 2) * kStageBytes;  // that rule 1 needs
static_assert(int(sizeof(Control)) + kLongestRingBytes + kMostAffineBytes <= 227 << 10,
              "The longest slice, with a ring as in rule 1, must fit into the 227 KB of shared memory of a block. "
              "Otherwise rows of 32768 columns per SM would not run in this kernel.");
static_assert(Config::kWeightPacks <= kSliceStages * kPacksPerThread &&
                  Config::kBiasPacks <= kSliceStages * kPacksPerThread,
              "A thread has no more packs than these.");

// The arguments of the kernel, a block's shared memory, and its slice.
struct BlockContext {
  const Forward& call;
  const RowConstants& constants;
  const Plan& plan;
  unsigned char* ring;
  Control& control;
  uint64_t* mailboxes;
  int rank = blockIdx.x, thread = threadIdx.x;  // rank: of the block in its group
  int first_col = rank * plan.slice, packs = columns_of_slice(call.cols, plan.slice, rank) / V;
  int stages = stages_of(packs), last_packs = packs - (stages - 1) * kStagePacks;  // last_packs: of the last stage
  uint64_t policy = l2_policy(constants.priority);

  // Returns where a stage of the slice begins in input and output, in elements.
  __device__ int64_t offset(int row, int stage) const { return row * call.cols + first_col + stage * kStageColumns; }
  // Reads this thread's packs of the stage in a slot of the ring.
  __device__ ThreadStage load(int slot) const {
    const auto* from = reinterpret_cast<const FloatPack*>(ring + slot * kStageBytes) + thread;
    return {from[0], from[kBlockThreads]};
  }
};

// Copies a stage, `bytes` bytes at `from`, to a slot of the ring as soon as that is empty.
__device__ void load_stage(RingPosition slot, const float* from, int bytes, const BlockContext& block) {
  barrier_wait(&block.control.empty[slot.index], slot.parity ^ 1);  // returns at once in the first round
  barrier_arrive_expecting(&block.control.full[slot.index], bytes);
  bulk_copy(block.ring + slot.index * kStageBytes, from, bytes, &block.control.full[slot.index], block.policy);
}

// Brings stage after stage on chip. Two threads of a block use it, and each has a copy with a row and stage of its own:
// thread 0 copies stages to the ring, and thread 32 prefetches stages into L2, kPrefetchStages earlier. One function
// next() serves both: with one function for each, the kernel is 5% slower (H200, 16 rows of 4194304). It is always
// thread 0 that copies. That makes its warp the slowest of the block, so that the other warps have already emptied the
// slot when it waits for them (H200, 16 rows of 4194304: 33% slower if the warps copy in turn).
struct Fetch {
  const BlockContext& block;
  const bool loads = threadIdx.x == 0, prefetches = threadIdx.x == 32;
  int row = blockIdx.y, stage = 0;  // of the next call of next()

  // Thread 0: copies the next stage to `slot`. Thread 32: prefetches the next stage; `slot` is not used. Both do
  // nothing past the last row.
  __device__ void next(RingPosition slot) {
    if (row < block.call.rows) {
      const float* from = static_cast<const float*>(block.call.input) + block.offset(row, stage);
      const int bytes = 16 * (stage == block.stages - 1 ? block.last_packs : kStagePacks);
      if (loads) {
        load_stage(slot, from, bytes, block);
      } else {
        prefetch_to_l2(from, bytes, block.policy);
      }
    }
    if (++stage == block.stages) stage = 0, row += gridDim.y;
  }
  // Thread 0: copies the first stages, to all slots but the last. Thread 32: goes to the first stage that it
  // prefetches, kPrefetchStages after the one that thread 0 copies next.
  __device__ void begin() {
    const int ring = block.plan.ring_slots, first_prefetch = ring - 1 + Config::kPrefetchStages;
    if (prefetches) row += first_prefetch / block.stages * gridDim.y, stage = first_prefetch % block.stages;
    for (int slot = 0; loads && slot < ring - 1; ++slot) next({slot});
  }
};

// The packs of weight or bias that one thread needs. Pack i belongs to place i / kPacksPerThread of the slice (see rule
// 2). The first N packs are in registers, the others in shared memory.
template <int N>
struct SliceAffine {
  Vec<float, V> packs[N];
  FloatPack* shared;  // this thread's first pack in shared memory

  // tensor: weight or bias of all columns, or null. from_shared: the slice's packs in shared memory.
  __device__ SliceAffine(const BlockContext& block, const void* tensor, float fallback, FloatPack* from_shared) {
    shared = from_shared + block.thread;
    UNROLL(i, kSliceStages * kPacksPerThread) {
      const int pack = i * kBlockThreads - (kSliceStages - block.stages) * kStagePacks + block.thread;
      if (pack < 0 || pack >= block.packs) continue;
      const auto values = load_affine<float, V>(tensor, true, block.first_col + pack * V, fallback);
      if (i < N) {
        packs[i < N ? i : 0] = values;  // the index must be valid even where this branch is dead
      } else {
        shared[(i - N) * kBlockThreads] = packed<float>(values);
      }
    }
  }
  // Returns pack i. If the slice does not have it (`exists` is false), shared memory is not read.
  __device__ Vec<float, V> at(int i, bool exists) const {
    if (i < N) return packs[i < N ? i : 0];  // as above
    return exists ? widened(shared[(i - N) * kBlockThreads]) : Vec<float, V>();
  }
};

// ---- Statistics ----

// Adds a stage to this thread's moments of a row. is_last: it is the last stage of the slice and may be incomplete.
__device__ void measure_stage(Moments& moments, const ThreadStage& x, bool is_last, const BlockContext& block) {
  // Without opaque(), each thread spills one word (H200, 16 rows of 4194304: 4% slower).
  const int last_packs = opaque(block.last_packs);
  auto exists = [&](int i) { return !is_last || i * kBlockThreads + block.thread < last_packs; };
  const float count = exists(1) ? 2 * V : exists(0) ? V : 0;
  const auto pack = [&](int i) { return widened(x[i]); };
  const float per_count = exists(1) ? 0.5f / V : 1.f / V;
  const float2 part = measure_packs<float, 1, kPacksPerThread>(pack, exists, count, per_count);
  if (!is_last || count > 0) moments = combine(moments, {count, part.x, part.y});
}

// Combines the moments of all threads after the last stage of a row, and publishes them to the group. Sets this
// thread's moments to 0 for the next row. Only the last warp waits for the others. parity: of this row, which is 0 for
// the group's first row, then 1, 0, ...
__device__ void publish_row(Moments& moments, int row, int parity, const BlockContext& block) {
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
  __syncwarp();  // so that the lanes of the warp continue together; results do not need it
}

// In the last warp: waits until all blocks of the group have published a row, and writes its statistics to
// row_stats[parity]. The other warps return at once.
__device__ void gather_row(int row, int parity, const BlockContext& block) {
  if (block.thread / 32 != kWarps - 1) return;
  // This lane reads the mailboxes of blocks first_peer, first_peer + 32, ... opaque() keeps the compiler from computing
  // `counts` once for all rows, which would need registers during the whole kernel.
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

// ---- Output ----

using Weight = SliceAffine<Config::kWeightPacks>;
using Bias = SliceAffine<Config::kBiasPacks>;

// Normalizes this thread's packs of a stage and writes them. place: of the stage, 0 to kSliceStages - 1, see rule 2.
// output: where this thread's first pack of the stage belongs.
__device__ void apply_stage(float* output, const ThreadStage& x, int place, const RowStats& row_stats,
                            const Weight& weight, const Bias& bias, const BlockContext& block) {
  UNROLL(j, kPacksPerThread) {
    const int i = place * kPacksPerThread + j;
    const bool exists = place < kSliceStages - 1 || j * kBlockThreads + block.thread < block.last_packs;
    const auto y = normalized<float>(widened(x[j]), row_stats) * weight.at(i, exists) + bias.at(i, exists);
    if (exists) store<float, V, true>(output + j * kBlockThreads * V, y);
  }
}

// ---- The kernel ----

__device__ void init_barriers(const BlockContext& block) {
  if (block.thread == 0) {
    for (int i = 0; i < block.plan.ring_slots; ++i) barrier_init(&block.control.full[i], 1);
    for (int i = 0; i < block.plan.ring_slots; ++i) barrier_init(&block.control.empty[i], kWarps);
    barrier_init(&block.control.measured, kWarps);
    barriers_initialized();
  }
  __syncthreads();
}

// Measures the slice of the group's first row, publishes it, and measures the first kStagesAhead stages of the second
// row. `moments`, 0 on entry, are then this thread's moments of the second row.
__device__ void measure_first_row(Moments& moments, const BlockContext& block) {
  const int rows = int(block.call.rows), groups = gridDim.y;
  ROLLED(i, block.stages + Config::kStagesAhead) {
    const bool is_last = i == block.stages - 1;
    if (i >= block.stages && blockIdx.y + groups >= rows) break;  // the group has only one row
    barrier_wait(&block.control.full[i], 0);  // round 0: rule 1 makes the ring longer than stages + kStagesAhead
    measure_stage(moments, block.load(i), is_last, block);
    if (is_last) publish_row(moments, blockIdx.y, 0, block);
  }
}

// One iteration of the kernel: the stage that is applied, and where it belongs.
struct Step {
  RingPosition slot;  // of the stage that is applied
  int row, place;     // of this stage; place: as in apply_stage
  int row_parity;     // of `row`: 0 for the group's first row, then 1, 0, ...
  float* output;      // where this thread's first pack of the stage belongs
};

// Applies the stage of a step, and measures the one that is a slice and kStagesAhead stages further on. That one
// belongs to the group's next row or, in the last kStagesAhead places, to the row after it. If it is the last stage of
// a row, which is so in place kSliceStages - 1 - kStagesAhead (rule 3), publishes that row.
__device__ void apply_and_measure(const Step& step, Moments& moments, const RowStats& row_stats, const Weight& weight,
                                  const Bias& bias, const BlockContext& block) {
  const int rows = int(block.call.rows), groups = gridDim.y, next_row = step.row + groups;
  const int measured_row = step.row + (step.place + Config::kStagesAhead < kSliceStages ? 1 : 2) * groups;
  const bool is_measured = measured_row < rows;  // false past the group's last row
  const bool is_last = step.place == kSliceStages - 1 - Config::kStagesAhead;
  const RingPosition measuring = step.slot.after(block.stages + Config::kStagesAhead, block.plan.ring_slots);
  const ThreadStage x = block.load(step.slot.index);
  if (is_measured) barrier_wait(&block.control.full[measuring.index], measuring.parity);
  const ThreadStage x_ahead = block.load(measuring.index);  // past the last row: anything, and not used
  apply_stage(step.output, x, step.place, row_stats, weight, bias, block);
  if (!is_measured) return;
  measure_stage(moments, x_ahead, is_last, block);
  if (is_last) publish_row(moments, next_row, step.row_parity ^ 1, block);
}

// Block (x, y) has slice x of the rows of group y. T is float. The kernel is a template so that it is only compiled
// into a library that launches it.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    layer_norm_grid_resident_rows(Forward call, RowConstants constants, Plan plan, uint64_t* mailboxes) {
  if constexpr (!kArch.has_large_shared) return __trap();  // never launched there: see choose_plan()
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control control;
  const BlockContext block = {call, constants, plan, ring, control, mailboxes};
  const int rows = int(call.rows), groups = gridDim.y, skipped = kSliceStages - block.stages;
  LAYERNORM_CHECK(keeps_rules(block.stages, plan.ring_slots));
  init_barriers(block);

  Fetch fetch = {block};
  fetch.begin();
  empty_mailboxes(mailboxes, rows);
  FloatPack* affine = reinterpret_cast<FloatPack*>(ring + plan.ring_slots * kStageBytes);
  const Bias bias(block, call.bias, 0, affine);
  const Weight weight(block, call.weight, 1, affine + shared_packs(block.packs, Config::kBiasPacks));
  Moments moments = {};
  measure_first_row(moments, block);

  RingPosition slot;
  int row = blockIdx.y;
  for (int parity = 0; row < rows; row += groups, parity ^= 1) {
    gather_row(row, parity, block);
    __syncthreads();
    const RowStats row_stats = control.row_stats[parity];
    // The address for place 0. If places are skipped, it may be before output; skipped places do not use it.
    float* output = static_cast<float*>(call.output) + block.offset(row, -skipped) + threadIdx.x * V;
    UNROLL(place, kSliceStages) {
      if (place >= skipped) {
        // Loads into the slot before this one, whose stage was applied in the iteration before.
        if (fetch.loads || fetch.prefetches) fetch.next(slot.after(plan.ring_slots - 1, plan.ring_slots));
        apply_and_measure({slot, row, place, parity, output}, moments, row_stats, weight, bias, block);
        __syncwarp();  // all lanes have read the stage before lane 0 releases its slot
        if (threadIdx.x % 32 == 0) barrier_arrive(&control.empty[slot.index]);
        slot.advance(plan.ring_slots);
      }
      output += kStageColumns;
    }
  }
}

// ---- Host side ----

// Chooses as many groups as possible such that each can hold a row, and then as many blocks per group as there are SMs
// for. Returns a plan with blocks_per_row = 0 if this kernel does not support the call.
Plan choose_plan(const Forward& call, const Device& device) {
  const int64_t min_blocks = ceil_div(call.cols / V, kSliceStages * kStagePacks);  // that can hold a row
  const int64_t groups = std::min(call.rows, device.sms / min_blocks);
  if (!device.arch.has_large_shared || groups == 0 || call.rows < Config::kMinRows * groups) return {};
  const int64_t max_blocks = std::min<int64_t>(device.sms / groups, kMaxBlocksPerRow);
  // A multiple of 32 columns: slices start on cache lines if rows do.
  const int slice = ceil_div(ceil_div(call.cols, max_blocks), 32) * 32;
  Plan p = {int(ceil_div(call.cols, slice)), int(groups), slice};
  // Checks the slices of the first and of the last block: only the last one may be shorter. The shorter slice can need
  // more packs in shared memory, if its last stage is fuller (rule 2).
  int affine_packs = 0;
  const int first_packs = slice / V, last_packs = columns_of_slice(call.cols, slice, p.blocks_per_row - 1) / V;
  for (const int packs : {first_packs, last_packs}) {
    affine_packs =
        std::max(affine_packs, shared_packs(packs, Config::kBiasPacks) + shared_packs(packs, Config::kWeightPacks));
  }
  p.ring_slots =
      std::min(kMaxRingSlots, (device.shared_bytes - int(sizeof(Control)) - 16 * affine_packs) / kStageBytes);
  p.shared_bytes = p.ring_slots * kStageBytes + 16 * affine_packs;
  // A row of one block would have no mailboxes.
  const bool is_valid = p.blocks_per_row > 1 && keeps_rules(stages_of(first_packs), p.ring_slots) &&
                        keeps_rules(stages_of(last_packs), p.ring_slots);
  return is_valid ? p : Plan();
}

template <typename T>
cudaError_t launch(const Forward& call, const Plan& p, const LaunchContext& context) {
  const Launch launch = {dim3(p.blocks_per_row, p.groups), kBlockThreads, kCooperative, p.shared_bytes};
  auto* mailboxes = static_cast<uint64_t*>(context.allocate(8 * call.rows * mailboxes_per_row(p.blocks_per_row)));
  return launch_kernel(layer_norm_grid_resident_rows<T>, launch, context, call, row_constants(call, context.device), p,
                       mailboxes);
}

}  // namespace grid_resident
"""

_CONVOLUTION = r"""
// ==== Convolution: ConvTranspose3d, LayerNorm, GELU and scaling in one kernel ====
// Uses: _ARCH, _ELEMENTS, _MEMORY, _STATISTICS, _LAUNCH, _EPILOGUE, _ASYNC.

#ifdef LAYERNORM_HAS_EPILOGUE
namespace convolution {

// The introduction has seven parts. Each goes deeper than the one before, and you can stop after any of them: 1 what
// the kernel computes, 2 how the work is divided, 3 why it is fast, 4 how a block works over time, 5 where elements
// lie, 6 an example that follows one product, 7 what can be changed. The compiler checks parts 5 and 6: see "Checks of
// the layout".
//
// ---- 1. What the kernel computes ----
//
// Supported shapes: input (batch, 32, depth, height, 32), kernel 4, stride 2, padding 1 and 64 output channels. The
// output is (batch, 64, 2 depth, 2 height, 64). LayerNorm normalizes its last dimension, the 64 columns of the width.
// GELU and a multiplication by `scale` follow. In backward, the kernel runs once more, and then writes the distances
// from the mean and rstd instead, because forward saves only its input. All tensors are float16, bfloat16 or float32;
// weight and bias of LayerNorm may be float32 beside 16-bit tensors. d, h and w stand for depth, height and width.
//
// The transposed convolution becomes matrix products. Consider one dimension. With stride 2, padding 1 and kernel 4,
// input i adds to output o = 2 i - 1 + k through weight k (k = 0 to 3). Write an output position as o = 2 q + p, where
// p = 0 or 1 is its parity. Two weights reach it, and each of them is called a tap, t = 0 or 1:
//
//   weight k = 1 - p + 2 t multiplies input i = q + p - t. Inputs outside the tensor are 0.
//
//   output          tap 0                    tap 1
//   2 q      (p=0)  input q,     weight 1    input q - 1, weight 3
//   2 q + 1  (p=1)  input q + 1, weight 0    input q,     weight 2
//
// Example: output 5 (q = 2, p = 1) is input 3 times weight 0 plus input 2 times weight 2. In three dimensions an output
// has 2 x 2 x 2 taps. All outputs with the same parities of d, h and w use the same weights. So for each of the eight
// combinations of parities, the convolution is a matrix product C = A B:
//
//   A   weights   64 output channels x (8 taps x 32 input channels)
//   B   input     (8 taps x 32 input channels) x positions q; each tap shifts the input by p - t in each dimension
//   C   output    64 output channels x positions q
//
// ---- 2. How the work is divided ----
//
//   part      what it is                                                               how many
//   line      all channels and columns at one (batch, depth, height)                   input 32 x 32, output 64 x 64
//   row       one channel of an output line: what LayerNorm normalizes                 64 rows of 64 columns per line
//   block     computes outputs with one parity of d and one of h, and both parities    one per SM, rounded down to a
//             of w; keeps their weights on chip: 64 KB (16 bits) or 128 KB (float32)   multiple of 4
//   group     four warps of a block that compute together, 128 threads                 2 per block
//   strip     four neighbouring output lines of a block's parity (their q of h are     height / 4 per sample,
//             4 j to 4 j + 3), at all depths                                           rounded up
//   task      what a group computes at once: a strip at one q of d                     depth per strip
//   product   C = A B for one parity of w: 64 output channels x 256 (taps and input    2 per task
//             channels) x 128 positions (4 lines x 32 columns)
//   step      the part of both products for one tap of d, one tap of h and one chunk   8 (16 bits) or 16 (float32)
//             of 16 (16 bits) or 8 (float32) input channels                            per task
//   fragment  the part of A for one step, one parity of w and one tap of w:            4 per step
//             64 output channels x a chunk
//
// Steps are numbered (2 * (tap of d) + (tap of h)) * kChunks + chunk: Layout::step_of. Layout::tap_d, tap_h and chunk
// return the three parts of a step's number.
//
// The tasks of one parity are numbered strip by strip, and by depth within a strip. Each block computes a contiguous
// range of them: group 0 the first half, group 1 the second. So a group usually goes from one depth to the next. The
// task at q = d needs input at the depths d + p (tap 0) and d + p - 1 (tap 1). The second of these was tap 0 of the
// task before, so only one depth must be loaded per task. The first task of a group, and each task with d = 0, loads
// both. The four blocks 4 k to 4 k + 3 compute the same tasks, for the four parities of (d, h). So they read the same
// input, give or take one depth and height, at about the same time, and most of it comes from L2.
//
// There are two versions. Code for sm_90a uses wgmma, Hopper's asynchronous matrix products, and has four additional
// warps that load input (Layout::kAsync). All other code uses mma.sync, and each group loads its own input. So does
// float32 without TF32, which multiplies sums of two TF32 numbers (SPLIT).
//
// ---- 3. Why it is fast ----
//
// Four lanes of a warp together hold all 64 columns of a row in the registers to which the products are added.
// LayerNorm therefore needs two shuffles per sum and no memory, and neither the convolution's output nor LayerNorm's is
// written. Weights are read from global memory once per block. While one group multiplies, the other one normalizes and
// writes, so tensor cores and memory work at the same time.
//
// All measurements are of problem 34, which has input (32, 32, 16, 32, 32) and needs 137 GFLOP (2 x 268 million outputs
// x 256 products). They are of forward. The first one is that of README; each of the others compares two versions that
// differ only in the point named:
//
//   this kernel, TF32, H200                                 0.598 ms; eager PyTorch 9.29 ms, torch.compile 1.85 ms
//   the mma.sync version instead of wgmma, TF32, H200       53% slower
//   wgmma, but groups load their own input, TF32, H200      5% slower
//   scale applied only where a line exists, 16 bits, H100   9% slower, see write_rows
//   both groups may multiply at the same time, TF32         H200: 3% slower. H100: equal
//   the same, bf16                                          H200: 2% slower. H100: 1% slower
//
// No single resource limits it. In TF32 on an H100, tensor cores are busy for 46% of the time, schedulers issue an
// instruction in 42% of the cycles, the pipe of shared memory is busy for 58%, and writes use 52% of the bandwidth of
// global memory (ncu). Versions that leave out one part, and therefore have wrong results, are faster by: products 15%,
// GELU 13%, loading 13%, stores 7%, transposing input 7%.
//
// ---- 4. How a block works over time ----
//
// With wgmma. A and B are the tasks of groups 0 and 1. Time runs from left to right. A group multiplies (mult), and
// then normalizes, applies GELU and scale, and writes (write):
//
//   loading warps   load A0   load B0   load A1    load B1    load A2    load B2
//   group 0                   mult A0   write A0   mult A1    write A1   mult A2
//   group 1                             mult B0    write B0   mult B1    write B1
//
//   barrier            who arrives                            who waits
//   kFull + g          loading warps, after a load            group g, before it multiplies
//   kEmpty + g         group g, after multiplying             loading warps, before they load for group g again
//   kMayMultiply + g   the other group, after multiplying     group g, before it multiplies
//
// Each wait needs an arrival of the other side, or the block hangs. This holds because group 0 has as many tasks as
// group 1, or one more. The first load for a group does not wait at kEmpty, and the group does not arrive there after
// its last task. Group 0 does not wait at kMayMultiply before its first task, and no group arrives there if the other
// one has no task left, so that every arrival has its wait.
//
// With mma.sync, the groups do not wait for each other. A group starts the copies of its next task after multiplying,
// and they arrive while it normalizes and writes. Only its own 128 threads meet at kFull + g (the input of a task is
// ready) and at kEmpty + g (all warps have multiplied).
//
// ---- 5. Where elements lie ----
//
// Shared memory. A fragment has 2 KB. A slab is the input of a task at one depth. A group has two slabs. The input for
// tap t of d in its task number `index` is in slab (index + t) % 2, so the slab of tap 0 becomes that of tap 1:
//
//   fragments | LayerNorm's weight, bias | slab 0, slab 1 of group 0 | slab 0, slab 1 of group 1
//
//                                  wgmma, 16 bits   wgmma, TF32   mma.sync, 16 bits   mma.sync, float32
//   fragments (in shared memory)   32 (32)          64 (63)       32 (32)             64 (64)
//   units, bytes of a slab         804, 12864       1608, 25728   684, 10944          1368, 21888
//   bytes of shared memory         117504           232448        109824              219136
//
// Input in a slab. The smallest part is a unit: 16 bytes with neighbouring input channels of one position, 8 channels
// in 16 bits and 4 in float32. A plane holds the same channels of all positions; two planes are a chunk. A plane has 5
// lines: tap t of h reads slab line (output line + 1 - t). The units of one line of a plane ("-" is zero) are:
//
//   mma.sync  unit    0   1 ... 32  33
//             column  -   0 ... 31   -
//   wgmma     unit    0   1 ... 8  9  |  10  11 ... 18  19  |  20  21 ... 28  29  |  30  31 ... 38  39
//             column  -   0 ... 7  8  |   7   8 ... 15  16  |  15  16 ... 23  24  |  23  24 ... 31   -
//
// A product reads sets of eight neighbouring columns, shifted by p - t of w: by -1, 0 or 1. For wgmma, the columns of a
// set must be consecutive units, and the distance from set to set must be constant over all 16 sets of a task (4 lines
// x 4 sets). So each set has copies of its two neighbours, and a line has 40 units. Layout::unit_at computes a
// position, and column_at is its inverse.
//
// Weights in a fragment. Fragment 4 * step + 2 * (parity of w) + (tap of w) of a block has 128 units:
//
//   wgmma     unit    0 ... 63                                     |  64 ... 127
//             holds   plane 0 of the chunk, output channels 0-63   |  plane 1, output channels 0-63
//   mma.sync  unit    0 ... 31                       |  32 ... 63               |  64 ... 95      |  96 ... 127
//             holds   output channels 0-15 for       |  output channels 16-31   |  32-47          |  48-63
//                     lanes 0-31: the lane's four registers of the instruction
//
// Sums in registers. A tile is 16 output channels of one line, and a warp has 4 tiles: with wgmma the same 16 channels
// in all four lines, with mma.sync 32 channels in two lines. In a tile, lanes 4 l to 4 l + 3 share two rows: channel l,
// the threads' even row, and channel l + 8, their odd row. So a thread has a quarter of 8 rows. An instruction gives
// lane 4 l + j the positions 2 j and 2 j + 1 of each set of eight. With both parities of w, these are four neighbouring
// output columns, 16 bytes of float32:
//
//   column    0-3   4-7   8-11   12-15  |  16-19   20-23   24-27   28-31  |  32-35 ...
//   lane % 4   0     1     2       3    |    0       1       2       3    |    0   ...
//   number    0-3   0-3   0-3     0-3   |   4-7     4-7     4-7     4-7   |   8-11 ...   of the thread's 16 of the row
//
// ---- 6. Example: one product of problem 34 in TF32, on 132 SMs with wgmma ----
//
// There are 132 blocks, 33 per parity of (d, h). Each parity has 32 samples x 8 strips x 16 depths = 4096 tasks. The
// example follows the output at (batch 0, channel 21, depth 9, height 27, column 37), and one of its 256 products: tap
// 0 in each dimension, input channel 13. Numbers are counted from 0.
//
//   The output, and who computes it
//     q, p of depth              9 = 2 * 4 + 1              q = 4,  p = 1
//     q, p of height            27 = 2 * 13 + 1             q = 13, p = 1
//     q, p of column            37 = 2 * 18 + 1             q = 18, p = 1
//     strip, line in the strip  13 / 4, 13 % 4            = 3, 1
//     task                      strip * 16 + q of depth   = 3 * 16 + 4 = 52
//     block                     4 * 0 + 2 * 1 + 1         = 3     it has tasks 0 to 123
//     group                     52 < 124 / 2              = 0     so `index`, counted in the group, is also 52
//   The input
//     depth, height, column     q + p - t                 = 4 + 1, 13 + 1, 18 + 1 = 5, 14, 19
//     slab                      (index + t) % 2           = (52 + 0) % 2 = 0
//     line of the slab          line + 1 - t              = 1 + 1 - 0 = 2
//     plane, element of unit    13 / 4, 13 % 4            = 3, 1
//     unit of the slab          plane * 201 + line * 40 + column / 8 * 10 + column % 8 + 1
//                                                         = 603 + 80 + 20 + 3 + 1 = 707
//   The weight
//     d, h and w                1 - p + 2 t               = 0, 0, 0
//     chunk, plane in chunk     3 / 2, 3 % 2              = 1, 1
//     step                      (2 * 0 + 0) * 4 + chunk   = 1
//     fragment                  4 * step + 2 * 1 + 0      = 6
//     unit of the fragment      64 * plane + channel      = 64 * 1 + 21 = 85     element 1, as in the input
//   The sum
//     set, position in the set  18 / 8, 18 % 8            = 2, 2
//     warp of the group         21 / 16                   = 1     each has 16 channels
//     lane                      4 * (21 % 8) + 2 / 2      = 21
//     tile                      line                      = 1     with wgmma
//     row of the thread         2 * tile + 0              = 2     channel 21 % 16 = 5 < 8 is in the tile's even row
//     register                  16 * tile + 4 * set + 2 % 2 = 24   in data[p of column] = data[1]
//     number in the row         37 / 16 * 4 + 37 % 4      = 9     column 16 * (9 / 4) + 4 * (21 % 4) + 9 % 4 = 37
//
// ---- 7. Safe changes ----
//
//   GELU and scale          To any function of one element that _ACTIVATIONS has, and a factor. Change all of:
//                             1. write_rows, second half: the kernel
//                             2. kGelu in section 4: convolution_backward and composed_convolution use it
//                             3. ConvTranspose3dLayerNormGELUScaling.forward, the last two returns
//                             4. the references: Model34 in test_layernorm_inline.py, and test_convolution.py
//                           If they disagree, test_conv_values fails.
//   kComputeRegisters,      To numbers with which the static_asserts below hold. Afterwards run .tests/machine_code.py:
//   kLoadRegisters          every kernel must have 0 B of local memory.
//   Number of blocks        To any multiple of 4 (`blocks` in launch).
//   Order of taps, rounding The results stay accurate, but are no longer close enough to PyTorch's:
//                           test_conv_rounds_like_pytorch fails (it needs a Hopper GPU).
//   Layout                  Mappings to places in memory or registers have an inverse beside them, and static_asserts
//                           ("Checks of the layout") compare the two: matrix_unit and lane_unit in fragments, columns
//                           and copies in slabs, patches of threads, rows of threads, sums in registers. They also
//                           contain the table of part 5 and the example of part 6. So if you change one side, the
//                           compiler reports an error until you have changed the other. The compiler does not check
//                           that arrange_weights writes fragments in the order of fragment_of, nor the layouts that
//                           instructions expect. test_conv_values does, also on emulated GPUs. These do not check
//                           instructions and fences, so test on a Hopper GPU, too.
//   Barriers, slabs         On emulated GPUs, test_conv_blocks_that_compute_many_lines finds missing waits and arrivals
//                           (wrong results, or a deadlock). It does not find a superfluous arrival at the end.
//   Sizes                   Not by changing a constant: the instructions need groups of 128 threads, 64 output channels
//                           and 128 positions, and loading warps split 32 channels x 32 columns. static_asserts say so.
//
// All these tests need `python -m pytest --full .tests/test_convolution.py`.

// ---- Sizes and layout ----

constexpr int kInChannels = 32, kOutChannels = 64, kInWidth = 32, kOutWidth = 2 * kInWidth;
constexpr int kTaskLines = 4;                    // output lines per task
constexpr int kGroups = 2, kGroupThreads = 128;  // groups per block, threads per group
constexpr int kTileChannels = 16;                // output channels per tile, all of one line
constexpr int kWarpTiles = kTaskLines * kOutChannels / kTileChannels * 32 / kGroupThreads;  // tiles per warp: 4
constexpr int kThreadRows = 2 * kWarpTiles;       // rows of which a thread holds a quarter: 8
constexpr int kFragmentUnits = 2 * kOutChannels;  // units per fragment
using Unit = Pack<uint32_t, 4>;
static_assert(kOutChannels == 64 && kTaskLines * kInWidth == 128 && kGroupThreads == 128,
              "The instruction of multiply_add_async multiplies 64 output channels by 128 columns in 128 threads.");
static_assert(kInChannels == 32 && kInWidth == 32, "first_patch divides 32 channels and 32 columns among threads.");
static_assert(kGroups == 2, "The groups take turns: the other one of group g is group 1 - g.");

struct Config {
  // Registers per thread after setmaxnreg, with wgmma. The warps that load input use 54 (nvcc 13.0, 16 bits), so they
  // have the next multiple of 8. The groups have all that remain, (3 * 168 - 56) / 2. They use up to 207 (TF32), of
  // which 128 are sums.
  static constexpr int kComputeRegisters = 224, kLoadRegisters = 56;
};
// A block begins with equally many registers for each thread, a multiple of 8: 168. setmaxnreg only moves them from the
// loading warps to the groups. It waits until there are enough.
constexpr int kInitialRegisters = 65536 / (kGroupThreads * (kGroups + 1)) / 8 * 8;
static_assert(kGroups * Config::kComputeRegisters + Config::kLoadRegisters <= (kGroups + 1) * kInitialRegisters,
              "With more registers than the block has, setmaxnreg would wait forever.");
static_assert(Config::kComputeRegisters % 8 == 0 && Config::kLoadRegisters % 8 == 0 &&
                  Config::kComputeRegisters <= 256 && Config::kLoadRegisters >= 24,
              "setmaxnreg needs a multiple of 8 from 24 to 256.");

// Returns the weight k that a tap uses, in one dimension, for outputs with a parity: the table in part 1. The parity
// and the tap are the last bits of the arguments.
constexpr __host__ __device__ int kernel_position(int parity, int tap) { return 1 - parity % 2 + 2 * (tap % 2); }

// A part of a slab that one thread loads and transposes: kUnitElements channels (the units of one plane) times
// kUnitElements columns, from `column` on.
struct Patch {
  int plane, line, column;
};

// The layout of shared memory and the division of work, as parts 2 and 5 of the introduction describe. T: float, __half
// or __nv_bfloat16. SPLIT: float32 operands keep their digits, as sums of two TF32 numbers; otherwise they are rounded
// to TF32. ASYNC: wgmma and loading warps.
//
// Most functions that say where something lies have an inverse, or another function that must agree with them, beside
// them. static_asserts check that they agree ("Checks of the layout"), for 16 bits and float32, with and without wgmma.
template <typename T, bool SPLIT, bool ASYNC = !SPLIT && kHasAsyncProducts>
struct Layout {
  using Element = T;
  static constexpr bool kSplit = SPLIT, kAsync = ASYNC;
  static constexpr int kThreads = kGroupThreads * (kGroups + ASYNC);  // per block
  static constexpr int kSlabLines = kTaskLines + 1;                   // input lines per slab
  static constexpr int kUnitElements = 16 / sizeof(T);                // channels per unit
  static constexpr int kWordElements = 4 / sizeof(T);                 // channels per word, or register, of a unit
  static constexpr int kPlanes = kInChannels / kUnitElements;         // planes per slab
  static constexpr int kChunks = kPlanes / 2;                         // chunks of input channels, two planes each
  static constexpr int kSteps = 4 * kChunks;                          // steps: (tap of d, tap of h, chunk)
  static constexpr int kBlockFragments = 4 * kSteps;                  // fragments per block: (step, parity, tap of w)
  // Units from a set of eight columns to the next one. 10 leaves space for copies of both neighbours of a set.
  static constexpr int kSetStride = ASYNC ? 10 : 8;
  static constexpr int kLineStride = ASYNC ? 4 * kSetStride : kInWidth + 2;  // units from line to line of a plane
  // Units from plane to plane of a slab. It is odd, so that the same columns of four planes, which four neighbouring
  // threads write, are spread over the banks.
  static constexpr int kPlaneStride = kSlabLines * kLineStride | 1;
  static constexpr int kSlabUnits = kPlanes * kPlaneStride;
  // Fragments kept in registers: one where the shared memory of a block cannot hold all 64 and the slabs (TF32).
  static constexpr int kRegisterFragments = ASYNC && sizeof(T) == 4;
  static constexpr int kSharedFragments = kBlockFragments - kRegisterFragments;
  // Bytes of shared memory: fragments and slabs, and weight and bias of LayerNorm in float32.
  static constexpr int kBytes = 16 * (kSharedFragments * kFragmentUnits + kGroups * 2 * kSlabUnits) + 4 * 2 * kOutWidth;
  static constexpr int kWarpsPerLine = ASYNC ? 4 : 2;  // warps that share the channels of a line
  static constexpr int kLineTiles = kOutChannels / kTileChannels / kWarpsPerLine;  // tiles of a line per warp

  // Steps of a task: the number of a step, and its parts.
  static constexpr __host__ __device__ int step_of(int tap_d, int tap_h, int chunk) {
    return (2 * tap_d + tap_h) * kChunks + chunk;
  }
  static constexpr __host__ __device__ int tap_d(int step) { return step / (2 * kChunks); }
  static constexpr __host__ __device__ int tap_h(int step) { return step / kChunks % 2; }
  static constexpr __host__ __device__ int chunk(int step) { return step % kChunks; }

  // Fragments: where products read weights. Returns the number of a fragment in its block.
  static constexpr __host__ __device__ int fragment_of(int step, int parity_w, int tap_w) {
    return 4 * step + (2 * parity_w + tap_w);
  }
  // Returns the unit of a fragment that holds an output channel in the first or second plane of the chunk, for wgmma.
  static constexpr __host__ __device__ int matrix_unit(int plane, int out) { return plane * kOutChannels + out; }
  // Returns the unit of a fragment that holds a lane's four registers for a tile of output channels, for mma.sync.
  static constexpr __host__ __device__ int lane_unit(int channel_tile, int lane) { return channel_tile * 32 + lane; }
  // Return the output channel and the chunk's input channel of an element of a fragment, for wgmma: the inverse of
  // matrix_unit.
  static constexpr __host__ __device__ int matrix_out(int element) { return element / kUnitElements % kOutChannels; }
  static constexpr __host__ __device__ int matrix_in(int element) {
    return element / kUnitElements / kOutChannels * kUnitElements + element % kUnitElements;
  }

  // Return the same for mma.sync: the inverse of lane_unit. A lane's unit is four words: those of output channels
  // lane / 4 and lane / 4 + 8 of the tile in the first plane of the chunk, then the same in the second plane. A word
  // holds input channels from lane % 4 * kWordElements of the plane on.
  static constexpr __host__ __device__ int lane_out(int element) {
    const int word = element / kWordElements, lane = word / 4 % 32;
    return word / 128 * kTileChannels + word % 2 * 8 + lane / 4;
  }
  static constexpr __host__ __device__ int lane_in(int element) {
    const int word = element / kWordElements, lane = word / 4 % 32;
    return word / 2 % 2 * kUnitElements + lane % 4 * kWordElements + element % kWordElements;
  }

  // Slabs: where input is written. Returns the unit of an input column in its slab.
  static constexpr __host__ __device__ int unit_at(int plane, int line, int column) {
    return plane * kPlaneStride + line * kLineStride + column / 8 * kSetStride + column % 8 + 1;
  }
  // Units from the first column of a set back to its copy, which follows the last column of the set before. Also from
  // the last column of a set forward to its copy, which precedes the first column of the next set.
  static constexpr int kCopyDistance = kSetStride - 8;
  // Returns the column that a unit of the first line holds, also if it is a copy: the inverse of unit_at. Units for
  // columns -1 and 32 are always 0.
  static constexpr int column_at(int unit) { return unit / kSetStride * 8 + unit % kSetStride - 1; }
  // Slabs: where products read. Returns the unit that a step multiplies for line `line` of the task and q of w =
  // `column`, if p - t of w is 0. If p - t is -1 or 1, the unit is the one before or after it. This is the unit in the
  // first plane of the step's chunk; the one in the second plane is kPlaneStride units later.
  static constexpr __host__ __device__ int input_at(int step, int line, int column) {
    return unit_at(chunk(step) * 2, line + 1 - tap_h(step), column);
  }

  // Patches of a slab. The threads of a group divide them among themselves in kSweeps sweeps over the lines. In 16
  // bits, the 16 patches of a line are 4 planes x 4 sets of eight columns; in float32, the 64 patches are 8 planes x 4
  // sets x 2 halves of a set. Returns a thread's patch in the first sweep. In the next one, its line is kSweepLines
  // further on. The patch does not exist if its line is not below kSlabLines.
  static constexpr int kSetPatches = 8 / kUnitElements;  // patches side by side in a set: 1 or 2; also kPlanes / 4
  static constexpr int kLinePatches = kPlanes * 4 * kSetPatches;
  static constexpr int kSweepLines = kGroupThreads / kLinePatches;
  static constexpr int kSweeps = (kSlabLines + kSweepLines - 1) / kSweepLines;
  static constexpr __host__ __device__ Patch first_patch(int thread) {
    const int i = thread / kSetPatches;
    const int plane = i % 4 + i / 16 % kSetPatches * 4;
    const int column = i / 4 % 4 * 8 + thread % kSetPatches * kUnitElements;
    return {plane, thread / kLinePatches, column};
  }

  // Tiles and rows of a thread. Return the first channel and the first line of a warp's tiles.
  static constexpr __host__ __device__ int first_channel(int warp) {
    return warp % kWarpsPerLine * kLineTiles * kTileChannels;
  }
  static constexpr __host__ __device__ int first_line(int warp) {
    return warp / kWarpsPerLine * (kWarpTiles / kLineTiles);
  }
  // Returns the number of a warp's tile. `line` and `channel_tile` (16 channels) count from the warp's first line and
  // channel.
  static constexpr __host__ __device__ int warp_tile(int line, int channel_tile) {
    return line * kLineTiles + channel_tile;
  }
  // Return the channel and the line of a thread's row 0 to 7, relative to those of its row 0: the line is first_line,
  // and the channel is first_channel + lane / 4.
  static constexpr __host__ __device__ int channel_of(int row) {
    return row / 2 % kLineTiles * kTileChannels + row % 2 * 8;
  }
  static constexpr __host__ __device__ int line_of(int row) { return row / 2 / kLineTiles; }
};

// The sums of a thread for its kThreadRows rows, in the order in which the instructions return them: (parity of w,
// tile, set of eight columns, register). Registers 0 and 1 belong to the tile's even row, 2 and 3 to its odd row.
struct Accumulators {
  float data[2][16 * kWarpTiles];
  static_assert(16 * kWarpTiles == 64, "multiply_add_async returns 64 sums per thread.");

  // Returns the index of the first of a set's four registers in data[parity of w].
  static constexpr __host__ __device__ int first_of(int tile, int set) { return 16 * tile + 4 * set; }
  // Return where number i (0 to 15) of this thread in a row is: data[parity_of(i)][index_of(row, i)].
  static constexpr __host__ __device__ int parity_of(int i) { return i % 2; }
  static constexpr __host__ __device__ int index_of(int row, int i) {
    return first_of(row / 2, i / 4) + row % 2 * 2 + i / 2 % 2;
  }
  // Returns the row of the pair data[...][2 * pair] and data[...][2 * pair + 1].
  static constexpr __host__ __device__ int row_of_pair(int pair) { return pair / 8 * 2 + pair % 2; }
  // Returns the output column of a lane's number i in any of its rows.
  static constexpr __host__ __device__ int column_of(unsigned lane, int i) {
    return 16 * (i / 4) + 4 * (lane % 4) + i % 4;
  }

  // Returns number i of a row.
  __device__ float& operator()(int row, int i) { return data[parity_of(i)][index_of(row, i)]; }
  // Returns numbers i to i + 3 of a row.
  __device__ Vec<float, 4> four(int row, int i) {
    return {(*this)(row, i), (*this)(row, i + 1), (*this)(row, i + 2), (*this)(row, i + 3)};
  }
};

// ---- Checks of the layout, by the compiler ----

// Part 1: weight k multiplies input i = q + p - t for output o = 2 q + p, so o = 2 i - 1 + k. Here q = 0.
constexpr bool taps_reach_their_output() {
  for (int parity = 0; parity < 2; ++parity) {
    for (int tap = 0; tap < 2; ++tap) {
      if (2 * (parity - tap) - 1 + kernel_position(parity, tap) != parity) return false;
    }
  }
  return true;
}
static_assert(taps_reach_their_output(), "kernel_position contradicts the table in part 1.");

// Fragments: the parts of a number lead back to the number. For steps, these are taps and chunk; for elements of a
// fragment for wgmma, output channel and input channel. So each weight is in one place.
template <typename L>
constexpr bool parts_lead_back_to_numbers() {
  for (int step = 0; step < L::kSteps; ++step) {
    if (L::step_of(L::tap_d(step), L::tap_h(step), L::chunk(step)) != step) return false;
  }
  for (int element = 0; element < kFragmentUnits * L::kUnitElements; ++element) {
    const int out = L::matrix_out(element), in = L::matrix_in(element), plane = in / L::kUnitElements;
    if (L::matrix_unit(plane, out) * L::kUnitElements + in % L::kUnitElements != element) return false;
  }
  for (int element = 0; element < kFragmentUnits * L::kUnitElements; ++element) {
    const int out = L::lane_out(element), in = L::lane_in(element), column = in % L::kUnitElements;
    const int lane = out % 8 * 4 + column / L::kWordElements;
    const int word = 4 * L::lane_unit(out / kTileChannels, lane) + in / L::kUnitElements * 2 + out / 8 % 2;
    if (word * L::kWordElements + column % L::kWordElements != element) return false;
  }
  return true;
}

// Slabs: the patches of all threads together are each (plane, line, column) once, and the columns of a patch are
// consecutive units.
template <typename L>
constexpr bool patches_cover_a_slab() {
  bool seen[L::kSlabUnits] = {};
  int units = 0;
  for (int i = 0; i < kGroupThreads * L::kSweeps; ++i) {
    Patch patch = L::first_patch(i % kGroupThreads);
    patch.line += i / kGroupThreads * L::kSweepLines;
    if (patch.line >= L::kSlabLines) continue;
    for (int column = 0; column < L::kUnitElements; ++column, ++units) {
      const int unit = L::unit_at(patch.plane, patch.line, patch.column) + column;
      if (unit != L::unit_at(patch.plane, patch.line, patch.column + column) || seen[unit]) return false;
      seen[unit] = true;
    }
  }
  return units == L::kPlanes * L::kSlabLines * kInWidth;
}

// Slabs: the units that products read, for each set of eight columns shifted by -1, 0 and 1, hold the right columns.
// Columns -1 and 32 do not exist, and no column or copy is written to their units.
template <typename L>
constexpr bool columns_are_where_products_read_them() {
  bool written[L::kLineStride] = {};
  for (int column = 0; column < kInWidth; ++column) {
    const bool to_set_before = L::kAsync && column % 8 == 0 && column > 0;
    const bool to_next_set = L::kAsync && column % 8 == 7 && column < kInWidth - 1;
    const int unit = L::unit_at(0, 0, column);
    const int copy = to_set_before ? unit - L::kCopyDistance : to_next_set ? unit + L::kCopyDistance : unit;
    if (L::column_at(unit) != column || L::column_at(copy) != column) return false;
    written[unit] = written[copy] = true;
  }
  for (int i = 0; i < 3 * kInWidth; ++i) {
    const int shift = i / kInWidth - 1, column = i % kInWidth;
    const int unit = L::unit_at(0, 0, column / 8 * 8) + shift + column % 8;
    const bool exists = column + shift >= 0 && column + shift < kInWidth;
    if (L::column_at(unit) != column + shift || written[unit] != exists) return false;
  }
  return true;
}

// Rows: all threads of a group together have each channel of each line in one row, and a row is in the tile that
// products add to.
template <typename L>
constexpr bool rows_cover_a_task() {
  bool seen[kTaskLines * kOutChannels] = {};
  for (int i = 0; i < kTaskLines * kOutChannels; ++i) {
    const int warp = i / 64, lane = i / 8 % 8 * 4, row = i % 8;
    const int line = L::first_line(warp) + L::line_of(row);
    const int channel = L::first_channel(warp) + lane / 4 + L::channel_of(row);
    bool& here = seen[line * kOutChannels + channel];
    if (here || L::warp_tile(L::line_of(row), L::channel_of(row) / kTileChannels) != row / 2) return false;
    here = true;
  }
  return true;
}

// Sums: index_of and parity_of agree with row_of_pair and with the instructions. Register r of a set of eight columns
// belongs to the tile's even row (r < 2) or odd row, and to position 2 * (lane % 4) + r % 2 of the set.
constexpr bool sums_are_where_instructions_return_them() {
  for (int i = 0; i < kThreadRows * 16 * 4; ++i) {
    const int row = i / 64, number = i / 4 % 16, lane = i % 4;
    const int index = Accumulators::index_of(row, number), parity_w = Accumulators::parity_of(number);
    const int tile = index / 16, set = index / 4 % 4, r = index % 4;
    const int q = 8 * set + 2 * lane + r % 2;
    if (row != 2 * tile + r / 2 || row != Accumulators::row_of_pair(index / 2)) return false;
    if (Accumulators::column_of(lane, number) != 2 * q + parity_w) return false;
  }
  return true;
}
static_assert(sums_are_where_instructions_return_them(), "index_of and its inverses disagree.");

// Checks a layout, and its sizes against the table in part 5.
template <typename L>
constexpr bool layout_is_valid(int shared_fragments, int slab_units, int bytes) {
  static_assert(parts_lead_back_to_numbers<L>(), "A number of a step or an element has other parts.");
  static_assert(patches_cover_a_slab<L>(), "first_patch must divide all patches of a slab among the threads.");
  static_assert(columns_are_where_products_read_them<L>(), "unit_at, kCopyDistance and column_at disagree.");
  static_assert(rows_cover_a_task<L>(), "first_channel, first_line, channel_of and line_of must reach each row once.");
  return L::kSharedFragments == shared_fragments && L::kSlabUnits == slab_units && L::kBytes == bytes;
}
static_assert(layout_is_valid<Layout<__half, false, true>>(32, 804, 117504) &&
                  layout_is_valid<Layout<float, false, true>>(63, 1608, 232448) &&
                  layout_is_valid<Layout<__half, false, false>>(32, 684, 109824) &&
                  layout_is_valid<Layout<float, true, false>>(64, 1368, 219136),
              "The table in part 5 has other sizes.");
static_assert(
    Layout<float, false, true>::kBytes == 227 << 10,
    "The largest layout fills the 227 KB of shared memory that a block can have on Hopper, to the last byte.");

// The example of part 6: the input, the weight and the sum of one product.
using Example = Layout<float, false, true>;
static_assert(Example::unit_at(3, 2, 19) == 707 && Example::input_at(1, 1, 18) + 1 + Example::kPlaneStride == 707);
static_assert(Example::step_of(0, 0, 1) == 1 && Example::fragment_of(1, 1, 0) == 6);
static_assert(Example::matrix_unit(1, 21) == 85);
static_assert(Example::matrix_out(4 * 85 + 1) == 21 && Example::chunk(1) * 8 + Example::matrix_in(4 * 85 + 1) == 13);
static_assert(kernel_position(1, 0) == 0);
static_assert(Example::first_channel(1) + 21 / 4 + Example::channel_of(2) == 21);
static_assert(Example::first_line(1) + Example::line_of(2) == 1);
static_assert(Accumulators::index_of(2, 9) == 24 && Accumulators::parity_of(9) == 1);
static_assert(Accumulators::row_of_pair(24 / 2) == 2 && Accumulators::column_of(21, 9) == 37);

// ---- The kernel that arranges weights ----

// Returns x as an operand of tensor cores, which ignore the last 13 bits of a float32 number. If products use it in one
// part, not split into a sum of two TF32 numbers, x is rounded to the 10 bits of mantissa of TF32, ties to even. That
// is cuDNN's rounding; if ties were rounded up instead, one output in 850 would differ from PyTorch's by more than
// 1e-4.
__device__ inline uint32_t tf32_operand(uint32_t x, bool in_one_part) {
  // GPU arithmetic returns 0x7fffffff for NaN. Rounding that would carry into the sign bit and make it a number.
  if (isnan(__uint_as_float(x))) return 0x7fc00000;
  return in_one_part ? x + 0xfff + (x >> 13 & 1) : x;
}

// Writes the weights of the convolution as fragments, in the order (parity of d, parity of h, tap of d, tap of h,
// chunk, parity of w, tap of w): fragment_of, for the four parities of (d, h) one after the other. A block of threads
// writes one fragment, and each thread one element of it.
template <typename T>
__global__ void __launch_bounds__(kFragmentUnits * 16 / sizeof(T)) arrange_weights(Convolution call, T* arranged) {
  using L = Layout<T, false>;
  constexpr int kUnitElements = L::kUnitElements;
  const int element = threadIdx.x, fragment = blockIdx.x;
  const int bits = fragment / 4 / L::kChunks;  // four bits: parity of d, parity of h, tap of d, tap of h
  const bool in_one_part = sizeof(T) == 2 || call.tf32;
  const bool is_matrix = kHasAsyncProducts && in_one_part;  // the order for wgmma; the other one is for mma.sync
  const int out = is_matrix ? L::matrix_out(element) : L::lane_out(element);
  int in = is_matrix ? L::matrix_in(element) : L::lane_in(element);
  in += fragment / 4 % L::kChunks * 2 * kUnitElements;
  // kernel_position uses the last bit of each argument: of d, the parity is bit 3 of `bits` and the tap bit 1.
  const int d = kernel_position(bits / 8, bits / 2), h = kernel_position(bits / 4, bits);
  const int w = kernel_position(fragment / 2, fragment);
  T weight = static_cast<const T*>(call.conv_weight)[(((in * kOutChannels + out) * 4 + d) * 4 + h) * 4 + w];
  if constexpr (sizeof(T) == 4) {
    // A finite bias of the convolution has no effect (see struct Convolution). `bias - bias` is 0 for finite numbers,
    // and NaN otherwise, which makes the whole row NaN.
    const T bias = call.conv_bias == nullptr ? 0 : static_cast<const T*>(call.conv_bias)[out];
    weight += bias - bias;
    weight = __uint_as_float(tf32_operand(__float_as_uint(weight), in_one_part));
  }
  arranged[fragment * blockDim.x + element] = weight;
}

// ---- Instructions ----

#define LAYERNORM_MULTIPLY_ADD_SYNC(types)                                                        \
  asm volatile("mma.sync.aligned." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// Computes c += a * b in one warp: 16 output channels x a chunk, times a chunk x 8 columns.
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
#define LAYERNORM_MULTIPLY_ADD(types, operands, transposed, ...)                                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." types                             \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"     \
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,"         \
               "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, " operands ", p, 1, 1" transposed "; }" \
               : LAYERNORM_SUMS_16(0), LAYERNORM_SUMS_16(16), LAYERNORM_SUMS_16(32), LAYERNORM_SUMS_16(48)            \
               : __VA_ARGS__                                                                                          \
               : "memory")

// Starts c += a * b in one group: 64 output channels (16 per warp) x a chunk, times a chunk x 128 columns. a is the
// descriptor of a matrix in shared memory, or an array of registers. b is a descriptor.
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

// A named barrier of some warps. It opens when `threads` threads have called one of the two functions. Callers of
// named_barrier_arrive do not wait for that.
__device__ inline void named_barrier_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Names of barriers. Add the group's number, 0 or 1. Name 0 belongs to __syncthreads.
//   kMayMultiply   the tensor cores are free for this group
//   kFull          the group's input is in its slabs
//   kEmpty         the group has read its slabs
enum : int { kMayMultiply = 1, kFull = kMayMultiply + kGroups, kEmpty = kFull + kGroups };

// ---- Blocks and tasks ----

// A block's parities, its tasks and its shared memory, and where this thread's rows begin. The number of a task is
// (sample * strips + strip) * depth + q of d. Each block computes a contiguous range of tasks: group 0 the first half,
// group 1 the rest.
template <typename L>
struct BlockContext {
  const Convolution& call;
  const Unit* global_fragments;  // all fragments of this block, in global memory
  Unit* fragments;               // in shared memory: the fragments that are kept there
  float* affine = reinterpret_cast<float*>(fragments + L::kSharedFragments * kFragmentUnits);  // weight, then bias
  Unit* slabs = reinterpret_cast<Unit*>(affine + 2 * kOutWidth);                               // two per group
  int parity_d = blockIdx.x % 4 / 2, parity_h = blockIdx.x % 2;
  int strips = (call.height + kTaskLines - 1) / kTaskLines;  // strips per sample
  int first_task = tasks_before(blockIdx.x / 4);
  int all_tasks = tasks_before(blockIdx.x / 4 + 1) - first_task;
  int warp = threadIdx.x % kGroupThreads / 32;                         // in its group
  int thread_line = L::first_line(warp);                               // line of this thread's row 0
  int thread_channel = L::first_channel(warp) + threadIdx.x % 32 / 4;  // its channel

  __device__ int tasks_before(int block) const { return call.batch * strips * call.depth * block / (gridDim.x / 4); }
  __device__ int tasks(int group) const { return group == 0 ? all_tasks - all_tasks / 2 : all_tasks / 2; }
};

// A task of a group. Its outputs have q = d in depth, and q = h to h + 3 in height. Lines with q >= call.height do not
// exist, and are not written.
template <typename L>
struct Task {
  const BlockContext<L>& block;
  int group, index;  // index: counts the tasks of the group
  int number = block.first_task + group * block.tasks(0) + index;
  int strip = number / block.call.depth;  // counted over all samples
  int batch = strip / block.strips, d = number % block.call.depth;
  int h = strip % block.strips * kTaskLines;

  // Returns for how many taps of d a slab must be loaded. The second tap's slab was the first tap's in the task before,
  // except in a group's first task and at the first depth.
  __device__ int new_taps() const { return index == 0 || d == 0 ? 2 : 1; }
  __device__ Unit* slab(int tap) const { return block.slabs + (2 * group + (index + tap) % 2) * L::kSlabUnits; }
};

// ---- Input ----

// Calls f for each patch of a task's new slabs that this thread loads, with the first of its kUnitElements units, the
// tap of d and the patch.
template <typename L, typename F>
__device__ void for_each_patch(const Task<L>& task, F f) {
  const Patch first = L::first_patch(threadIdx.x % kGroupThreads);
  ROLLED(tap, task.new_taps()) {
    UNROLL(sweep, L::kSweeps) {
      const Patch patch = {first.plane, first.line + sweep * L::kSweepLines, first.column};
      if (patch.line < L::kSlabLines) {
        f(task.slab(tap) + L::unit_at(patch.plane, patch.line, patch.column), tap, patch);
      }
    }
  }
}

// Starts the copies of a task's input. In global memory 16 bytes are kUnitElements columns of one channel, but a unit
// needs kUnitElements channels of one column. So the channels of a patch are copied to where its columns belong, and
// prepare_input() exchanges them there.
template <typename L>
__device__ void fetch_input(const Task<L>& task) {
  const Convolution& call = task.block.call;
  const auto* input = static_cast<const typename L::Element*>(call.input);
  const int64_t channel_stride = int64_t(call.depth) * call.height * kInWidth;
  for_each_patch(task, [&](Unit* units, int tap, const Patch& patch) {
    const int d = task.d + task.block.parity_d - tap, h = task.h + task.block.parity_h - 1 + patch.line;
    const bool exists = d >= 0 && d < call.depth && h >= 0 && h < call.height;
    const int64_t first_channel = int64_t(task.batch) * kInChannels + patch.plane * L::kUnitElements;
    const auto* from = input + first_channel * channel_stride + patch.column +
                       (exists ? (int64_t(d) * call.height + h) * kInWidth : 0);
    UNROLL(i, L::kUnitElements) copy_or_zero(units + i, from + i * channel_stride, exists);
  });
}

// The elements of a patch: units of kUnitElements elements.
template <typename L>
struct PatchElements {
  static constexpr int kSize = L::kUnitElements;
  alignas(16) typename L::Element data[kSize][kSize];

  __device__ Unit& unit(int i) { return reinterpret_cast<Unit&>(data[i]); }
};

// Exchanges channels and columns of a patch. Rounds float32 to TF32 unless L::kSplit.
template <typename L>
__device__ PatchElements<L> transposed(PatchElements<L>& channels) {
  PatchElements<L> columns;
  UNROLL(column, L::kUnitElements) {
    UNROLL(channel, L::kUnitElements) {
      auto& x = columns.data[column][channel];
      x = channels.data[channel][column];
      if constexpr (sizeof(x) == 4) x = __uint_as_float(tf32_operand(__float_as_uint(x), !L::kSplit));
    }
  }
  return columns;
}

// Writes the columns of a patch to its units. For wgmma, also writes the copies for the neighbouring sets: of the first
// column of a set, and of the last one.
template <typename L>
__device__ void write_columns(Unit* units, PatchElements<L>& columns, int first_column) {
  constexpr int kLast = L::kUnitElements - 1;
  UNROLL(i, L::kUnitElements) units[i] = columns.unit(i);
  if (L::kAsync) {
    const int first_in_set = first_column % 8;
    if (first_in_set == 0 && first_column > 0) units[-L::kCopyDistance] = columns.unit(0);
    if (first_in_set + kLast == 7 && first_column < kInWidth - 8) units[kLast + L::kCopyDistance] = columns.unit(kLast);
  }
}

// Makes the copied input ready for products: waits for this thread's copies, and transposes its patches in their place.
// A thread only touches patches that it has copied itself, so no barrier is needed in between.
template <typename L>
__device__ void prepare_input(const Task<L>& task) {
  wait_for_copies();
  for_each_patch(task, [&](Unit* units, int, const Patch& patch) {
    PatchElements<L> channels;
    UNROLL(i, L::kUnitElements) channels.unit(i) = units[i];
    PatchElements<L> columns = transposed(channels);
    write_columns(units, columns, patch.column);
  });
  if (L::kAsync) writes_before_async_accesses();  // wgmma reads through the asynchronous proxy, as bulk copies do
}

// ---- Products with wgmma ----

// Keeps the compiler from moving the sums to other registers while products run. If it could, it would wait for each
// asynchronous product.
__device__ inline void keep_in_registers(Accumulators& accumulators) {
  UNROLL(parity_w, 2) { UNROLL(i, 16 * kWarpTiles) asm volatile("" : "+f"(accumulators.data[parity_w][i])::"memory"); }
}

// Returns an address in shared memory in units. All lanes use lane 0's, which shows the compiler that it is the same in
// the warp.
__device__ inline unsigned address_in_units(const Unit* p) { return __shfl_sync(~0u, shared_address(p) / 16, 0); }

// Returns the descriptor of a matrix in shared memory without swizzling. All three fields are in units: the address
// from bit 0 on, the distance to the second plane from bit 16 on (PTX: leading dimension byte offset), and the distance
// to the next 8 columns of input, or to the next 8 output channels of weights, from bit 32 on (stride dimension byte
// offset).
__device__ inline uint64_t descriptor(unsigned address, int plane_stride, int eight_stride) {
  return uint64_t(eight_stride) << 32 | (address + (plane_stride << 16));
}

// Computes a task's products with wgmma, and waits for them. Taps are added from last to first, and all chunks within
// each tap. This is the order of cuDNN's kernel on Hopper (in PyTorch 2.11), so the sums are equal to PyTorch's, bit
// for bit.
template <typename L>
__device__ void multiply_async(Accumulators& accumulators, const Task<L>& task,
                               const uint32_t (&register_fragment)[4]) {
  using T = typename L::Element;
  const unsigned slabs[2] = {address_in_units(task.slab(0)), address_in_units(task.slab(1))};
  const unsigned fragments = address_in_units(task.block.fragments);
  keep_in_registers(accumulators);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  UNROLL(i, 8) {
    const int taps = 7 - i, tap_d = taps / 4, tap_h = taps / 2 % 2, tap_w = taps % 2;
    UNROLL(chunk, L::kChunks) {
      UNROLL(parity_w, 2) {
        const int step = L::step_of(tap_d, tap_h, chunk);
        const unsigned columns = slabs[tap_d] + L::input_at(step, 0, 0) + parity_w - tap_w;
        const uint64_t b = descriptor(columns, L::kPlaneStride, L::kSetStride);
        // The position among the fragments in shared memory. It is -1 for the fragment that is kept in registers.
        const int fragment = L::fragment_of(step, parity_w, tap_w) - L::kRegisterFragments;
        if (fragment < 0) {
          multiply_add_async<T>(accumulators.data[parity_w], register_fragment, b);
        } else {
          const uint64_t a =
              descriptor(fragments + fragment * kFragmentUnits, L::matrix_unit(1, 0), L::matrix_unit(0, 8));
          multiply_add_async<T>(accumulators.data[parity_w], a, b);
        }
      }
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_registers(accumulators);
}

// ---- Products with mma.sync ----

// Splits float32 numbers into sums of two TF32 numbers, up to 2^-22 of their size. Adding 0x1000 rounds, because tensor
// cores ignore the last 13 bits. The asm is volatile so that `second` is computed where it is used: there are no
// registers to keep all of them.
template <int N>
__device__ void split(const uint32_t (&x)[N], uint32_t (&first)[N], uint32_t (&second)[N]) {
  UNROLL(i, N) {
    uint32_t high;
    first[i] = x[i] + 0x1000;
    asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(high) : "r"(first[i]));
    second[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high)) + 0x1000;
  }
}

// Computes c += a * b. If L::kSplit, splits a and b and adds three of the four products of their parts; the product of
// the two small parts is negligible (Ootomo, Yokota, 2022, arXiv:2203.03341).
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

// Adds the products of one step for a tile and a set of eight columns to a thread's four sums. weights: (tap of w).
// columns: (p - t of w, plus 1; plane).
template <typename L>
__device__ void multiply_add_taps(float* sums, const Unit (&weights)[2], const uint32_t (&columns)[3][2],
                                  int parity_w) {
  // Tensor cores truncate their sums. With SPLIT, the results of at most 6 instructions (2 taps x 3 products of parts)
  // are summed there, before an addition that rounds.
  float sum[4] = {};
  UNROLL(tap_w, 2) {
    multiply_add_parts<L>(L::kSplit ? sum : sums, weights[tap_w].data, columns[parity_w - tap_w + 1]);
  }
  UNROLL(i, L::kSplit ? 4 : 0) sums[i] += sum[i];
}

// Computes a task's products with mma.sync. Each warp holds the weights of one step for its 32 channels in registers,
// and multiplies them by all columns of its two lines.
template <typename L>
__device__ void multiply(Accumulators& accumulators, const Task<L>& task) {
  const int lane = threadIdx.x % 32, first_tile = task.block.thread_channel / kTileChannels;
  const Unit* first_weights = task.block.fragments + L::lane_unit(first_tile, lane);
  ROLLED(step, L::kSteps) {
    Unit weights[2][2][2];  // (parity of w, tile of channels, tap of w)
    UNROLL(i, 8) {
      const int parity_w = i / 4, tap_w = i / 2 % 2, tile = i % 2;
      const int fragment = L::fragment_of(step, 0, 0) + i / 2;  // fragment_of(step, parity_w, tap_w)
      weights[parity_w][tile][tap_w] = first_weights[fragment * kFragmentUnits + L::lane_unit(tile, 0)];
    }
    UNROLL(i, 8) {  // each time a set of eight columns in one of the two lines
      const int line = i / 4, set = i % 4;
      const Unit* units = task.slab(L::tap_d(step)) + L::input_at(step, task.block.thread_line + line, 8 * set);
      // Columns shifted by -1, 0 and 1. A lane reads word `lane` of the 8 units, which are 32 words.
      const auto* words = reinterpret_cast<const uint32_t*>(units - 1) + lane;
      uint32_t columns[3][2];  // (shift + 1, plane)
      UNROLL(shift, 3) { UNROLL(plane, 2) columns[shift][plane] = words[4 * (shift + plane * L::kPlaneStride)]; }
      UNROLL(tile, 2) {
        const int first = Accumulators::first_of(L::warp_tile(line, tile), set);
        UNROLL(parity_w, 2) {
          multiply_add_taps<L>(accumulators.data[parity_w] + first, weights[parity_w][tile], columns, parity_w);
        }
      }
    }
  }
}

// ---- From sums to output ----

// Loads the bias of the convolution for each row of a thread: a pair of two equal 16-bit numbers.
template <typename L>
__device__ void load_conv_bias(const BlockContext<L>& block, uint32_t (&conv_bias)[kThreadRows]) {
  using T = typename L::Element;
  UNROLL(row, kThreadRows) {
    const int channel = block.thread_channel + L::channel_of(row);
    const float bias = load_affine<T, 1>(block.call.conv_bias, false, channel, 0)[0];
    conv_bias[row] = narrow_pair<T>(bias, bias);
  }
}

// Adds the bias of the convolution, for 16 bits. Rounds to T before and after, as PyTorch does. Without this rounding,
// 0.07% of bfloat16 outputs would differ from PyTorch's by more than KernelBench allows.
template <typename T>
__device__ void add_conv_bias(Accumulators& accumulators, const uint32_t (&conv_bias)[kThreadRows]) {
  UNROLL(parity_w, 2) {
    UNROLL(pair, 8 * kWarpTiles) {
      float* sums = &accumulators.data[parity_w][2 * pair];  // two numbers of one row
      const uint32_t bias = conv_bias[Accumulators::row_of_pair(pair)];
      const float2 sum = widen_pair<T>(add_pairs<T>(narrow_pair<T>(sums[0], sums[1]), bias));
      sums[0] = sum.x;
      sums[1] = sum.y;
    }
  }
}

// Replaces a row by its distances from the mean, and returns rstd. A finite bias of the convolution would have no
// effect (see struct Convolution), so in float32 it was not added.
__device__ inline float center_row(Accumulators& accumulators, int row, float eps) {
  Vec<float, 4> sum_of_four;  // a tree of additions, which is exact for rows of equal numbers
  UNROLL(i, 4) sum_of_four[i] = sum_of<float>(accumulators.four(row, 4 * i));
  const float mean = combine_lanes(sum_of<float>(sum_of_four), 4) * (1.0f / kOutWidth);
  float m2 = 0;
  UNROLL(i, 16) {
    float& x = accumulators(row, i);
    x -= mean;
    m2 += x * x;
  }
  return rsqrtf(combine_lanes(m2, 4) * (1.0f / kOutWidth) + eps);
}

// The places of a thread's rows in the output.
template <typename L>
struct OutputRows {
  const Task<L>& task;
  const Convolution& call = task.block.call;
  int first_column = Accumulators::column_of(threadIdx.x, 0);
  int line = task.h + task.block.thread_line;  // q of h of row 0
  int64_t channel_stride = int64_t(call.depth) * 2 * call.height * 2 * kOutWidth;
  int64_t first = (int64_t(task.batch) * kOutChannels + task.block.thread_channel) * channel_stride +
                  (int64_t(2 * task.d + task.block.parity_d) * call.height + line) * 2 * kOutWidth +
                  task.block.parity_h * kOutWidth + first_column;

  // Returns the offset of number 0 of a row. Numbers 4 j to 4 j + 3 are 16 j elements further on.
  __device__ int64_t offset_of(int row) const {
    return first + L::channel_of(row) * channel_stride + L::line_of(row) * 2 * kOutWidth;
  }
  __device__ bool exists(int row) const { return L::line_of(row) < call.height - line; }
};

// Writes a thread's rows, given the distances from the mean: scale * GELU(LayerNorm). If call.rstd is set, for
// backward, it writes the distances and rstd instead. The polynomial for GELU has as many digits as the products: see
// kTail.
template <typename L>
__device__ void write_rows(const Task<L>& task, Accumulators& accumulators, const float (&rstd)[kThreadRows]) {
  using T = typename L::Element;
  const Convolution& call = task.block.call;
  const OutputRows<L> rows = {task};
  T* output = static_cast<T*>(call.output);
  if (call.rstd != nullptr) {
    UNROLL(row, kThreadRows) {
      if (!rows.exists(row)) continue;
      if (rows.first_column == 0) call.rstd[rows.offset_of(row) / kOutWidth] = rstd[row];
      UNROLL(j, 4) store<T, 4, true>(output + rows.offset_of(row) + 16 * j, accumulators.four(row, 4 * j));
    }
    return;
  }
  constexpr auto kTail = L::kSplit ? normal_tail : sizeof(T) == 4 ? normal_tail_5_digits : normal_tail_16_bits;
  UNROLL(j, 4) {
    const float* affine = task.block.affine + 16 * j + rows.first_column;
    const auto weight = widened(load<float, 4>(affine));
    const auto bias = widened(load<float, 4>(affine + kOutWidth));
    UNROLL(row, kThreadRows) {
      auto z = accumulators.four(row, 4 * j) * rstd[row] * weight + bias;
      // Scale is applied outside of the condition below, so that the compiler predicates the stores. Applied inside, it
      // made the compiler branch, which was 9% slower in 16 bits (see part 3).
      UNROLL(i, 4) z[i] = float(call.scale) * gelu_of_tail(z[i], kTail(fabsf(z[i])));
      if (rows.exists(row)) store<T, 4, true>(output + rows.offset_of(row) + 16 * j, z);
    }
  }
}

// ---- Roles of warps ----

// Fills the shared memory of a block before its first task: fragments, zeros in all slabs, weight and bias. The zeros
// beside the lines of a slab are never overwritten.
//
// All threads of the block write, and wgmma reads through the asynchronous proxy. PTX needs one proxy fence on the path
// from such a write to the read, in any thread. It is the one at the end of prepare_input: the loading warps call it
// after the __syncthreads() that follows fill_shared, and before they arrive at kFull, for which the groups wait.
template <typename L>
__device__ void fill_shared(const BlockContext<L>& block) {
  const Convolution& call = block.call;
  for (int i = threadIdx.x; i < L::kSharedFragments * kFragmentUnits; i += blockDim.x) {
    block.fragments[i] = block.global_fragments[L::kRegisterFragments * kFragmentUnits + i];
  }
  for (int i = threadIdx.x; i < kGroups * 2 * L::kSlabUnits; i += blockDim.x) block.slabs[i] = {};
  if (threadIdx.x < 2 * kOutWidth) {
    const void* affine = threadIdx.x < kOutWidth ? call.weight : call.bias;
    block.affine[threadIdx.x] = load_affine<typename L::Element, 1>(
        affine, call.affine_float32, threadIdx.x % kOutWidth, threadIdx.x < kOutWidth ? 1 : 0)[0];
  }
}

// Loads the first fragment into registers. Register i of the instruction holds, for the channels of the tile's even or
// odd row (i % 2), a word of the chunk's first or second plane (i / 2).
template <typename L>
__device__ void load_register_fragment(const BlockContext<L>& block, uint32_t (&fragment)[4]) {
  UNROLL(plane, 2) {
    UNROLL(row, 2) {
      const int unit = L::matrix_unit(plane, block.thread_channel + L::channel_of(row));
      fragment[2 * plane + row] = block.global_fragments[unit].data[threadIdx.x % 4];
    }
  }
}

// Loads the input of both groups, in the loading warps: one task of group 0, then one of group 1, and so on.
template <typename L>
__device__ void load_tasks(const BlockContext<L>& block) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kLoadRegisters));
  ROLLED(i, block.all_tasks) {
    const Task<L> task = {block, i % kGroups, i / kGroups};
    if (task.index > 0) named_barrier_wait(kEmpty + task.group, 2 * kGroupThreads);
    fetch_input(task);
    prepare_input(task);
    named_barrier_arrive(kFull + task.group, 2 * kGroupThreads);
  }
}

// Multiplies with wgmma when the loading warps have loaded the input and the other group has multiplied. Afterwards the
// loading warps may load this group's next task, and the other group may multiply, while this group normalizes and
// writes.
template <typename L>
__device__ void wait_and_multiply(Accumulators& accumulators, const Task<L>& task,
                                  const uint32_t (&register_fragment)[4]) {
  const BlockContext<L>& block = task.block;
  const int group = task.group, index = task.index;
  named_barrier_wait(kFull + group, 2 * kGroupThreads);
  if (group == 1 || index > 0) named_barrier_wait(kMayMultiply + group, 2 * kGroupThreads);
  multiply_async(accumulators, task, register_fragment);
  // The shorter condition 2 * index + group + 1 < all_tasks makes the compiler duplicate the loop (13% more code).
  const bool other_group_has_task = group == 0 ? index < block.tasks(1) : index + 1 < block.tasks(0);
  if (other_group_has_task) named_barrier_arrive(kMayMultiply + 1 - group, 2 * kGroupThreads);
  if (index + 1 < block.tasks(group)) named_barrier_arrive(kEmpty + group, 2 * kGroupThreads);
}

// Multiplies with mma.sync, and starts the copies of this group's next task, which arrive while it normalizes and
// writes.
template <typename L>
__device__ void multiply_and_fetch_next(Accumulators& accumulators, const Task<L>& task) {
  const BlockContext<L>& block = task.block;
  const int group = task.group, index = task.index;
  if (index == 0) fetch_input(task);
  prepare_input(task);
  named_barrier_wait(kFull + group, kGroupThreads);
  multiply(accumulators, task);
  named_barrier_wait(kEmpty + group, kGroupThreads);
  if (index + 1 < block.tasks(group)) fetch_input(Task<L>{block, group, index + 1});
}

// Multiplies, normalizes and writes all tasks of a group, in the group's warps.
template <typename L>
__device__ void compute_tasks(const BlockContext<L>& block, int group) {
  using T = typename L::Element;
  uint32_t conv_bias[kThreadRows] = {}, register_fragment[4] = {};
  if constexpr (sizeof(T) == 2) load_conv_bias(block, conv_bias);
  if constexpr (L::kRegisterFragments > 0) load_register_fragment(block, register_fragment);
  ROLLED(index, block.tasks(group)) {
    const Task<L> task = {block, group, index};
    Accumulators accumulators = {};
    if constexpr (L::kAsync) {
      wait_and_multiply(accumulators, task, register_fragment);
    } else {
      multiply_and_fetch_next(accumulators, task);
    }
    if constexpr (sizeof(T) == 2) add_conv_bias<T>(accumulators, conv_bias);
    float rstd[kThreadRows];
    UNROLL(row, kThreadRows) rstd[row] = center_row(accumulators, row, block.call.eps);
    write_rows(task, accumulators, rstd);
  }
}

// The kernel. `arranged` are the fragments that arrange_weights has written. One block runs per SM.
template <typename T, bool SPLIT>
__global__ void __launch_bounds__(Layout<T, SPLIT>::kThreads, 1)
    conv_transpose_layer_norm_gelu(Convolution call, const Unit* arranged) {
  if constexpr (!kArch.has_async_copy) return __trap();  // never called there: supports() returns false
  extern __shared__ __align__(128) Unit conv_shared[];
  using L = Layout<T, SPLIT>;
  const BlockContext<L> block = {call, arranged + blockIdx.x % 4 * (L::kBlockFragments * kFragmentUnits), conv_shared};
  const int group = threadIdx.x / kGroupThreads;
  fill_shared(block);
  __syncthreads();
  if constexpr (L::kAsync) {
    if (group == kGroups) return load_tasks(block);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kComputeRegisters));
  }
  compute_tasks(block, group);
}

// ---- Host side ----

// Calls f with a layout of the right element and precision, with wgmma where Hopper uses it. That layout needs the most
// shared memory, so it is also enough for code with mma.sync.
template <typename F>
auto with_layout(DType dtype, bool tf32, F f) {
  if (dtype == DType::Float16) return f(Layout<__half, false, true>());
  if (dtype == DType::BFloat16) return f(Layout<__nv_bfloat16, false, true>());
  return tf32 ? f(Layout<float, false, true>()) : f(Layout<float, true, false>());
}

bool supports(DType dtype, bool tf32, const Device& device) {
  const int shared_bytes = with_layout(dtype, tf32, [](auto layout) { return decltype(layout)::kBytes; });
  return device.arch.has_async_copy && device.shared_bytes >= shared_bytes;
}

// Launches both kernels. Weights are arranged anew in each call.
cudaError_t launch(const Convolution& call, const LaunchContext& context) {
  return with_layout(call.dtype, call.tf32, [&](auto layout) {
    using L = decltype(layout);
    using T = typename L::Element;
    constexpr int kFragments = 4 * L::kBlockFragments;            // of all four parities of d and h
    constexpr int kElements = kFragmentUnits * L::kUnitElements;  // elements per fragment
    T* arranged = static_cast<T*>(context.allocate(sizeof(T) * kFragments * kElements));
    cudaError_t error = launch_kernel(arrange_weights<T>, {kFragments, kElements}, context, call, arranged);
    if (error != cudaSuccess) return error;
    const auto kernel = conv_transpose_layer_norm_gelu<T, L::kSplit>;
    // The launch bounds of the loaded code tell whether it has loading warps (384 threads) or not (256).
    cudaFuncAttributes attributes = {};
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    const int blocks = std::max(1, context.device.sms / 4) * 4;  // the same number for each parity of d and h
    return launch_kernel(kernel, {blocks, attributes.maxThreadsPerBlock, kPlain, L::kBytes}, context, call,
                         reinterpret_cast<const Unit*>(arranged));
  });
}

}  // namespace convolution
#endif
"""

_DISPATCH = r"""
// ==== Dispatch: which kernel family runs a call ====
// Uses: _ARCH, _LAUNCH, _WEIGHT_GRADIENTS, and all kernel families: _REGISTERS, _TWO_PASS, _SHARED_MEMORY, _PIPELINED,
// _GRID_RESIDENT, _CONVOLUTION.
//
// Safe changes, and what guards them:
//   - The order of the families, and the conditions, decide which family runs a call. The two-pass kernels must be
//     last, because only they support every call. .tests/cases.py states the family of each call (forward_family and
//     backward_family). test_cases_launch_expected_kernels (test_dispatch.py) fails if another one runs, or if no case
//     launches some compiled kernel. .tests/launches.py lists the calls that change.
//   - After a family with cooperative launches, another one must be able to run the call (cannot_cooperate). The cases
//     of the emulated GPU "mps" in test_values.py and test_dispatch.py test this.
//   - `tensors` must list every tensor that a caller gives and that kernels load in packs. test_values (test_values.py)
//     moves each of them by one element, and fails if one is missing (mutants with "pack size:" in their names).
//     Outputs are aligned, because the binding allocates them.
//   - Device::arch must describe the loaded code, which can be older than the GPU. Only tests on a GPU check this:
//     test_ptx_of_an_older_architecture_runs (test_device.py) and test_code_for_an_older_architecture_runs
//     (test_build.py). No test runs CUDA before 12.3, for which allows_programmatic is false.
//   - Backward of no rows must write zeros: test_no_rows_give_empty_output_and_zero_gradients (test_binding.py).

// ---- The device ----

// Returns the current device. Its properties are read when it is first used, and not for all devices at once, because
// cudaFuncGetAttributes describes a kernel on the current device.
const Device& current_device() {
  static Device devices[128];  // PyTorch's device indices have 8 bits, with a sign
  int index = 0;
  cudaGetDevice(&index);
  Device& device = devices[index];
  std::call_once(device.initialized, [&] {
    cudaDeviceGetAttribute(&device.sms, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&device.l2_bytes, cudaDevAttrL2CacheSize, index);
    cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    // The attributes of any kernel show which architecture the loaded code was compiled for. If the library has no code
    // for this GPU, the query fails, arch is the row of sm_75, and the launch reports the error.
    cudaFuncAttributes attributes = {};
    cudaFuncGetAttributes(&attributes, sum_partials);
    device.arch = arch_of(attributes.ptxVersion);
    // CUDA graphs support programmatic dependent launches from CUDA 12.3 on, for both the runtime and the driver.
    int driver = 0;
    cudaDriverGetVersion(&driver);
    device.allows_programmatic = std::min(CUDART_VERSION, driver) >= 12030 && device.arch.has_bulk_copy;
  });
  return device;
}

// ---- The kernel family ----
// V is the number of elements per load: 16 bytes of elements if every row of every tensor starts on a 16-byte boundary,
// and otherwise 1. The kernel families are tried in the order of the table in the overview (with its note (1)). If a
// device rejects a cooperative launch, the next family that supports the call runs it. The two-pass kernels support
// every call.

template <typename T, int V>
cudaError_t dispatch(const Forward& call, const LaunchContext& context) {
  const Device& device = context.device;
  constexpr bool kAligned = V > 1;
  if (registers::supports(call, kAligned)) return registers::launch_forward<T, !kAligned>(call, context);
  if constexpr (kAligned && !kHasEpilogue) {
    if (shared_memory::supports<T>(call, device)) return shared_memory::launch<T>(call, context);
    if (pipelined::supports<T>(call, device)) {
      if (const cudaError_t error = pipelined::launch<T>(call, context); !cannot_cooperate(error)) return error;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (const grid_resident::Plan plan = grid_resident::choose_plan(call, device); plan.blocks_per_row > 0) {
        if (const cudaError_t error = grid_resident::launch<T>(call, plan, context); !cannot_cooperate(error))
          return error;
      }
    }
  }
  return two_pass::launch<T, V>(call, context);
}

// Unlike in forward, long aligned rows go to the pipelined kernels even if the register kernels support them.
template <typename T, int V>
cudaError_t dispatch(const Backward& call, const LaunchContext& context) {
  constexpr bool kAligned = V > 1;
  const bool in_registers = registers::supports(call, kAligned);
  if constexpr (kAligned && !kHasEpilogue) {
    const bool is_long = call.cols * int(sizeof(T)) > registers::kBytesBeforePipeline;
    if ((is_long || !in_registers) && pipelined::supports<T>(call, context.device)) {
      if (const cudaError_t error = pipelined::launch<T>(call, context); !cannot_cooperate(error)) return error;
    }
  }
  if (in_registers) return registers::launch_backward<T, V>(call, context);
  return two_pass::launch<T, V>(call, context);
}

// Chooses T from the call's dtype, and V from the addresses of `tensors` and the length of a row. Null pointers, of
// tensors that are absent, count as aligned.
template <typename Call>
cudaError_t dispatch(const Call& call, const LaunchContext& context, std::initializer_list<const void*> tensors) {
  uintptr_t address_bits = uintptr_t(call.cols) * size_of(call.dtype);
  for (const void* p : tensors) address_bits |= reinterpret_cast<uintptr_t>(p);
  const auto dispatch_as = [&](auto element) {
    using T = decltype(element);
    return address_bits % 16 == 0 ? dispatch<T, 16 / sizeof(T)>(call, context) : dispatch<T, 1>(call, context);
  };
  switch (call.dtype) {
    case DType::Float16: return dispatch_as(__half());
    case DType::BFloat16: return dispatch_as(__nv_bfloat16());
    default: return dispatch_as(float());
  }
}

}  // namespace

// ---- Entry points, which the binding calls ----

cudaError_t launch(const Forward& call, const Allocate& allocate, cudaStream_t stream) {
  return dispatch(call, {current_device(), allocate, stream}, {call.input, call.weight, call.bias, call.output});
}

cudaError_t launch(const Backward& call, const Allocate& allocate, cudaStream_t stream) {
  const LaunchContext context = {current_device(), allocate, stream};
  if (call.rows == 0) {  // the gradients of weight and bias are 0: sum_partials adds up no partial rows
    const Launch launch = {dim3(ceil_div(call.cols, kSumThreads), 2), kSumThreads};
    return launch_kernel(sum_partials, launch, context, call, nullptr, 0);
  }
  return dispatch(call, context, {call.grad_output, call.input, call.weight, call.bias, call.grad_input});
}

#ifdef LAYERNORM_HAS_EPILOGUE
cudaError_t launch(const Convolution& call, const Allocate& allocate, cudaStream_t stream) {
  return convolution::launch(call, {current_device(), allocate, stream});
}

bool supports_convolution(DType dtype, bool tf32) { return convolution::supports(dtype, tf32, current_device()); }
#endif

}  // namespace TORCH_EXTENSION_NAME
"""

CUDA_SOURCE = "".join(
    (
        _INTERFACE,
        _OVERVIEW,
        _ARCH,
        _ELEMENTS,
        _MEMORY,
        _STATISTICS,
        _LAUNCH,
        _EPILOGUE,
        _WEIGHT_GRADIENTS,
        _ROWS,
        _REGISTERS,
        _TWO_PASS,
        _ASYNC,
        _SHARED_MEMORY,
        _EXCHANGE,
        _PIPELINED,
        _GRID_RESIDENT,
        _CONVOLUTION,
        _DISPATCH,
    )
)

# ============================================================================
# 6  Load: what the import runs
# ============================================================================

# The name of the library, and of its ops in torch.ops. It depends only on the sources, so that a program that was saved
# on one machine finds the ops on another.
_NAME = "layernorm_inline_" + hashlib.sha256((CUDA_SOURCE + CPP_SOURCE).encode()).hexdigest()[:12]

_epilogue_ops = getattr(torch.ops, _NAME + "_epilogue")  # has no ops before _load_epilogue
_ops, _why_not = _load(_NAME)  # _why_not is the reason if _ops is None
_layer_norm_op = _ops and _ops.layer_norm.default  # looked up once, to keep the host time of small calls short
