"""Which kernels run: each case of the table launches those of the rooms that it names, and every kernel that is in the
library is launched by some case."""

import collections
import ctypes
import functools
import re

import emulator
import pytest
import torch
from cases import CASES, FORMS, SOME, TYPES, this_gpu
from test_convolution import INPUT_PRECISIONS, convolution_call

import layernorm_inline

ROOMS = ("registers", "shared", "pipeline", "joint", "spread", "convolution")


def room_of(kernel):
    """None of a kernel that all rooms share."""
    name = kernel.split("<")[0]
    return next((room for room in ROOMS if re.search(rf"\b{room}::\w+$", name)), None)


def demangled(names):
    """Names of kernels as C++ writes them, from the room on (in the second library after "epilogue::"), without arguments."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    for name in names:
        if name.startswith("_Z"):
            status = ctypes.c_int()
            text = demangle(name.encode(), None, None, ctypes.byref(status))
            name = ctypes.string_at(text).decode()
        name = re.sub(r"\(anonymous namespace\)::|^void |\blayernorm_inline_[0-9a-f]+(_|::)", "", name)
        while (shorter := re.sub(r"\([^()]*\)", "", name)) != name:  # arguments, also those of types in them
            name = shorter
        yield name.replace(" >", ">")


def compiled_kernels(ops):
    """Of a library: the name of each stands there twice, as a symbol and as what it registers as."""
    (path,) = (path for path in torch.ops.loaded_libraries if path.endswith(f"/{ops.name}.so"))
    with open(path, "rb") as library:
        names = re.findall(rb"(?<=\0)_ZN\d+layernorm_inline_\w+?_cuda_cu_\w+(?=\0)", library.read())
    return set(demangled(name.decode() for name, times in collections.Counter(names).items() if times > 1))


def compiled_in_both():
    """(kernels of the import's library, those of the second)."""
    layernorm_inline._load_epilogue()
    return [compiled_kernels(ops) for ops in (layernorm_inline._ops, layernorm_inline._epilogue_ops)]


def profiled(calls):
    """The kernels that each of the calls launched, from one run under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            torch.cuda._sleep(1)  # a kernel of its own: between those of two calls
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launched = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            launched.append(set())
        elif "layernorm_inline" in event.name:
            launched[-1].update(demangled([event.name]))
    assert len(launched) == len(calls), "the profiler lost a call"
    return launched


def forward_and_backward(backend, case):
    """Two functions, to be called one after the other."""
    x, weight, bias, dy = case.tensors(telling=False)
    leaves = [t if t is None else t.requires_grad_() for t in (x, weight, bias)]
    outputs = []
    forward = functools.partial(backend.layer_norm, x, (case.cols,), *leaves[1:], 0.1, **case.epilogue)
    return lambda: outputs.append(forward()), lambda: outputs[0].backward(dy)


def unexpected(case, launched):
    """A sentence for each room that is not the one that the table names; launched: kernels of forward, of backward."""
    for what, room, kernels in zip(("forward", "backward"), (case.forward, case.backward), launched):
        rooms = {room_of(kernel) for kernel in kernels} - {None}
        if rooms != {room}:
            yield f"{case}, {what}: {room} expected, launched {sorted(kernels)}"


def launched_on_the_gpu(backend):
    """(kernels, what was not expected)."""
    reached, wrong, cases = set(), [], [case for case in CASES if case.gpu.name == "cuda"]
    for begin in range(0, len(cases), 20):  # the tensors of so many at a time
        part = cases[begin : begin + 20]
        backend.ask_for(sum(6 * case.elements * 4 for case in part))
        calls = [call for case in part for call in forward_and_backward(backend, case)]
        launched = profiled(calls)
        for case, pair in zip(part, zip(launched[::2], launched[1::2])):
            wrong += unexpected(case, pair)
            reached.update(*pair)
        torch.cuda.empty_cache()
    for kernels in profiled([convolution_call(backend, name) for name in INPUT_PRECISIONS]):
        reached |= kernels
    return reached, wrong


def launched_on_emulated_gpus(backend):
    """Kernels end as they begin. Those of code for sm_80 have the names of the others."""
    reached, wrong = set(), []
    for case in (case for case in CASES if case.gpu.name != "cuda"):
        with emulator.on(case.gpu, dry=True) as gpu:
            pair = []
            for call in forward_and_backward(backend, case):
                call()
                pair.append(emulator.kernels(gpu))
        wrong += unexpected(case, pair)
        reached.update(*pair)
    for name in INPUT_PRECISIONS:
        with emulator.on(emulator.GPUS["hopper"](8), dry=True) as gpu:
            convolution_call(backend, name)()
            reached |= emulator.kernels(gpu)
    return reached, wrong


def test_cases_launch_expected_kernels(backend):
    """And all kernels that there are."""
    if backend.is_cuda:
        (reached, wrong), compiled = launched_on_the_gpu(backend), set.union(*compiled_in_both())
    else:
        reached, wrong = launched_on_emulated_gpus(backend)
        with emulator.on(emulator.GPUS["hopper"](8)) as gpu:
            compiled = emulator.kernels(gpu, every=True)
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong[:20])
    if not backend.is_cuda or this_gpu()[0].code >= 90:  # an older GPU has kernels that only newer ones launch
        assert not compiled - reached, f"no case of the table launches {sorted(compiled - reached)}"
    assert not reached - compiled, f"launched, but not found in the library: {sorted(reached - compiled)}"


@pytest.mark.skipif(layernorm_inline._ops is None, reason=f"kernels not built: {layernorm_inline._why_not}")
def test_the_libraries_have_kernels_of_every_room():
    plain, fused = compiled_in_both()
    assert {room_of(name) for name in plain} - {None} == set(ROOMS) - {"convolution"}
    assert {room_of(name) for name in fused} >= {"registers", "spread", "convolution"}
    assert len(plain) <= 75, "the import waits for them"


def test_the_table_has_every_room_form_and_dtype():
    """Whatever lines come and go."""
    assert len(CASES) > 500 and len(SOME) > 50
    for direction, rooms in (("forward", ROOMS[:5]), ("backward", ("registers", "pipeline", "spread"))):
        for room in rooms:
            here = [case for case in CASES if getattr(case, direction) == room]
            assert here, f"no case is for {room}, {direction}"
            dtypes = {case.dtype for case in here}
            for dtype in dtypes:
                forms = {case.form for case in here if case.dtype == dtype}
                assert forms in ({*FORMS}, {"plain"}), f"{room}, {direction}, {dtype}: {sorted(forms)}"
    assert {case.dtype for case in CASES} == {*TYPES}
    assert any(case.gpu.refuses for case in CASES)
