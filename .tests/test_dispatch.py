"""Tests of which kernels run, of constants, and of the plans of kernels whose blocks wait for each other."""

import collections
import contextlib
import ctypes
import functools
import itertools
import re
import threading
from pathlib import Path

import emulator
import launches
import pytest
import torch
from cases import CASES, FORMS, MAX_BLOCKS_PER_ROW, SHORT, SOME, TYPES, Case, this_gpu
from conftest import Backend
from processes import run_here
from reference import compare_with_float64, run_case
from test_convolution import INPUT_PRECISIONS, convolution_call, on_emulated

import layernorm_inline

FAMILIES = ("registers", "pipelined", "grid_resident", "two_pass", "convolution")


def family_of(kernel):
    """Returns the kernel family of a demangled kernel name, or None for a kernel that all families share."""
    name = kernel.split("<")[0]
    return next((family for family in FAMILIES if re.search(rf"\b{family}::\w+$", name)), None)


def demangled(name):
    """Returns a kernel's name as "family::name<template arguments>", after "epilogue::" for the second library."""
    if name.startswith("_Z"):
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        demangle.restype = ctypes.c_char_p
        name = demangle(name.encode(), None, None, None).decode()
    name = re.sub(r"\(anonymous namespace\)::|^void |\blayernorm_inline_[0-9a-f]+(_|::)", "", name)
    while (shorter := re.sub(r"\([^()]*\)", "", name)) != name:  # function arguments, innermost first
        name = shorter
    return name.replace(" >", ">")


def compiled_in_all():
    """Yields the kernels of each library."""
    layernorm_inline._load_epilogue()
    layernorm_inline._load_convolution()
    codes = layernorm_inline._codes(layernorm_inline._architectures())
    for ops in (layernorm_inline._ops, layernorm_inline._epilogue_ops, layernorm_inline._convolution_ops):
        library = Path(layernorm_inline._find_library(layernorm_inline._cache(ops.name), codes)).read_bytes()
        names = collections.Counter(re.findall(rb"(?<=\0)_ZN\d+layernorm_inline_\w+?_cuda_cu_\w+(?=\0)", library))
        # A kernel's name occurs twice: as a symbol, and where it is registered.
        yield {demangled(name.decode()) for name, times in names.items() if times > 1}


def profiled(calls):
    """Returns a list with the set of kernels that each call launched, from one run under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            torch.cuda._sleep(1)  # launches spin_kernel, which separates the kernels of two calls
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launched = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            launched.append(set())
        elif "layernorm_inline" in event.name:
            launched[-1].add(demangled(event.name))
    assert len(launched) == len(calls), "the profiler lost a call"
    return launched


def forward_and_backward(backend, case):
    """Returns two functions, which run forward and backward of the case if called in this order."""
    x, weight, bias, dy = case.tensors(emphasized=False)
    leaves = [t if t is None else t.requires_grad_() for t in (x, weight, bias)]
    outputs = []
    forward = functools.partial(backend.layer_norm, x, (case.cols,), *leaves[1:], 0.1, **case.epilogue)
    return lambda: outputs.append(forward()), lambda: outputs[0].backward(dy)


def unexpected(case, launched):
    """Yields a message for each direction that launched ([of forward, of backward]) kernels of another family."""
    for direction, family, kernels in zip(("forward", "backward"), (case.forward, case.backward), launched):
        if {family_of(kernel) for kernel in kernels} - {None} != {family}:
            yield f"{case}, {direction}: expected {family}, launched {sorted(kernels)}"


def recorded(calls, gpu):
    """Returns a list with the set of kernels that each call launches on an emulated GPU, where they do not run."""
    launched = []
    with emulator.on(gpu, dry=True) as libraries:
        for call in calls:
            call()
            launched.append(emulator.kernels(libraries))
    return launched


def launched_by(backend, cases):
    """Yields [the kernels that forward launches, those of backward] of each case."""
    if not backend.is_cuda:
        yield from (recorded(forward_and_backward(backend, case), case.gpu) for case in cases)
        return
    for begin in range(0, len(cases), 20):  # so that the tensors of only 20 cases exist at once
        part = cases[begin : begin + 20]
        backend.need_memory(sum(6 * case.elements * 4 for case in part))
        launched = profiled([call for case in part for call in forward_and_backward(backend, case)])
        yield from zip(launched[::2], launched[1::2])
        torch.cuda.empty_cache()


CONVERTING_GPU = emulator.GPUS["hopper"](2)


def converting_calls(backend):
    """Yields calls that launch each kernel that reads float32 and writes 16 bits, or reads a grad_output of 16 bits."""
    sms = (this_gpu() or [CONVERTING_GPU])[0].sms
    shapes = [(9, cols) for cols in (64, 256, 384, 512, 640, 1024, 8192)]
    shapes += [(waves * 2048 * sms // 256, 1024) for waves in (2, 9)] + [(2048 * sms // 16, 64)]
    for (rows, cols), dtype in itertools.product(shapes, (torch.float16, torch.bfloat16)):
        x = torch.randn(rows, cols, device=backend.device)
        options = (0.1, 0, 1.0, dtype)
        yield functools.partial(backend.ops.layer_norm, x, [cols], None, None, *options)
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.randn(9, 768, device=backend.device), torch.randn(768, device=backend.device)
        _, statistics = backend.ops.layer_norm_forward(x, [768], weight, None, *options[:3])
        arguments = (x.to(dtype), x, [768], statistics, weight, None, *options[:3], [True, True, False])
        yield functools.partial(backend.ops.layer_norm_backward, *arguments)


def test_cases_launch_expected_kernels(backend):
    """Each case launches kernels of the expected families, and together the cases launch every compiled kernel."""
    gpu = emulator.GPUS["hopper"](8)
    cases = [case for case in CASES if (case.gpu.name == "cuda") == backend.is_cuda]
    convolutions = [convolution_call(backend, name) for name in INPUT_PRECISIONS]
    reached, wrong = set.union(*(profiled(convolutions) if backend.is_cuda else recorded(convolutions, gpu))), []
    conversions = [*converting_calls(backend)]
    reached |= set.union(*(profiled(conversions) if backend.is_cuda else recorded(conversions, CONVERTING_GPU)))
    for case, pair in zip(cases, launched_by(backend, cases)):
        wrong += unexpected(case, pair)
        reached.update(*pair)
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong[:20])
    if backend.is_cuda:
        compiled = set.union(*compiled_in_all())
    else:
        with emulator.on(gpu) as libraries:
            compiled = emulator.kernels(libraries, every=True)
    if not backend.is_cuda or this_gpu()[0].code >= 90:  # libraries also contain kernels that only newer GPUs launch
        assert not compiled - reached, f"no case of the table launches {sorted(compiled - reached)}"
    assert not reached - compiled, f"launched, but not found in the library: {sorted(reached - compiled)}"
    in_first_library = [name for name in compiled if not name.startswith(("epilogue::", "convolution::"))]
    assert len(in_first_library) <= 90, "the first import has to compile them all, so their number is limited"


@on_emulated
def test_launches_at_every_condition(backend):
    """On each side of every condition of the host code, the kernels, blocks, threads and shared memory are as listed."""
    listed = Path(__file__).with_name("launches.txt").read_text().splitlines()
    assert list(launches.lines(backend)) == listed, "after retuning: python .tests/launches.py > .tests/launches.txt"


@pytest.mark.full
@on_emulated
@pytest.mark.parametrize("code", [100, 110])
def test_newer_gpus_with_large_shared_memory_launch_the_kernels_of_hopper(backend, code):
    """GPUs of sm_100 and sm_110 have all features that decide which family runs, like Hopper."""
    for case in (case for case in CASES if case.gpu.name == "hopper"):
        assert not [*unexpected(case, recorded(forward_and_backward(backend, case), case.gpu._replace(code=code)))]


@on_emulated
def test_code_that_could_not_be_loaded_is_looked_at_again(backend):
    """A thread remembers the architecture of the loaded code, but not after an error: the next call runs its kernels."""
    gpu, x, families = emulator.GPUS["hopper"](7), torch.empty(2, 20_008), []

    def call_with_and_without_an_error():
        with emulator.on(gpu, dry=True) as libraries:
            for code in (0, gpu.code):
                libraries[""].emulate_gpu(gpu.device, gpu.sms, code, gpu.shared_bytes, 0, 0, True)
                backend.layer_norm(x, x.shape[1:])
                families.append({launch.split("::")[0] for launch in emulator.launches(libraries)})

    thread = threading.Thread(target=call_with_and_without_an_error)  # it has looked at nothing
    thread.start()
    thread.join()
    assert families == [{"two_pass"}, {"pipelined"}]


@on_emulated
@pytest.mark.parametrize("value", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_the_switch_against_deadlocks(backend, value):
    """With LAYERNORM_INLINE_COOPERATIVE=0, calls run as on a GPU that rejects cooperative launches, with right values."""
    done = run_here(
        f"import test_dispatch; test_dispatch.run_with_switch({value!r})", LAYERNORM_INLINE_COOPERATIVE=value
    )
    assert done.returncode == 0, done.stderr


def run_with_switch(value):
    backend = Backend("emulated")
    cases = [case for case in SOME if case.gpu.name == "hopper" and case.elements < 10**6 and case.form == "plain"]
    cases = [case for case in cases if not {case.forward, case.backward} <= {"registers", "two_pass"}]
    assert {case.forward for case in cases} >= {"pipelined", "grid_resident"}
    cooperative = 0
    for case in cases:
        launched = []
        for gpu in (case.gpu, case.gpu._replace(cooperative_error=emulator.TOO_LARGE)):
            with emulator.on(gpu, dry=True) as libraries:
                for call in forward_and_backward(backend, case):
                    call()
                launched.append(emulator.launches(libraries))
        cooperative += sum("cooperative" in launch for launch in launched[0])
        assert value != "0" or launched[0] == launched[1]
    assert (cooperative == 0) == (value == "0")
    for direction, family in itertools.product(("forward", "backward"), ("pipelined", "grid_resident")):
        for case in [case for case in cases if getattr(case, direction) == family][:2]:
            with emulator.on(case.gpu):
                tensors = case.tensors()
                compare_with_float64([(run_case(backend.layer_norm, *tensors), tensors)])


@on_emulated
@pytest.mark.parametrize("error", ["mps", "vgpu"])
@pytest.mark.parametrize("rows,cols", [(2, 20_008), (8, 133_344)])
def test_calls_run_in_the_next_family_if_the_gpu_rejects_cooperative_launches(backend, rows, cols, error):
    """With either of the two errors that the driver returns, and in forward and backward."""
    gpu, cooperative = emulator.GPUS[error](8), emulator.GPUS["hopper"](8)
    case = Case(cooperative, rows, cols, "fp32", "plain")
    forward, backward = recorded(forward_and_backward(backend, case), cooperative)
    assert {*map(family_of, forward)} == {case.forward} and case.backward in map(family_of, backward)
    for kernels in recorded(forward_and_backward(backend, case), gpu):
        assert {*map(family_of, kernels)} - {None} == {"two_pass"}


@on_emulated
@pytest.mark.parametrize("error", ["cudaErrorLaunchFailure 719", "cudaErrorLaunchOutOfResources 701"])
def test_an_error_of_each_launch_reaches_the_user(backend, error):
    """A cooperative launch that fails with another error is not tried in the next family. The next call works."""
    number = int(error.split()[1])
    for case in (case for case in SHORT if case.affine == "both" and not case.off):
        with emulator.on(case.gpu, dry=True) as libraries:
            library = libraries["epilogue" if case.form != "plain" else ""]
            for is_backward in (False, True):
                for before in itertools.count():
                    emulator.launches(libraries)
                    calls = forward_and_backward(backend, case)
                    if is_backward:
                        calls[0]()
                    library.emulate_error(b"cudaLaunchKernelEx", before, number)
                    emulator.launches(libraries)
                    try:
                        calls[is_backward]()
                    except RuntimeError as raised:
                        assert f"cudaError {number}" in str(raised)
                        assert len(emulator.launches(libraries)) == before, "no other kernel is launched after an error"
                    else:
                        assert library.emulate_error(b"", 0, 0), f"{case}: the error of launch {before} is lost"
                        break
                assert before > 0


@on_emulated
def test_a_limit_of_shared_memory_is_raised_on_each_device_and_after_an_error(backend):
    """The limit of a kernel is 48 KB on each device until it is raised there. These GPUs are in no other test."""
    case = Case(emulator.GPUS["hopper"](10), 2, 20_008, "fp32", "plain")
    for failing in ("cudaFuncSetAttribute", "cudaFuncGetAttributes", None):
        for gpu in (emulator.GPUS["hopper"](sms) for sms in (10, 11, 12)):
            with emulator.on(gpu, dry=True) as libraries:
                if failing:
                    libraries[""].emulate_error(failing.encode(), 0, 999)
                forward, _ = forward_and_backward(backend, case._replace(gpu=gpu))
                with pytest.raises(RuntimeError, match="cudaError 999") if failing else contextlib.nullcontext():
                    forward()


def test_cases_cover_every_family_form_and_dtype():
    every = {*itertools.product(FAMILIES[:-1], TYPES, FORMS)}
    expected = {kind for kind in every if kind[0] in ("registers", "two_pass") or kind[2] == "plain"}
    assert {(case.forward, case.dtype, case.form) for case in CASES} == expected
    backward = {(case.backward, case.dtype, case.form) for case in CASES}
    assert backward == {kind for kind in expected if kind[0] != "grid_resident"}
    for direction in ("forward", "backward"):
        small, some = (
            {(case.gpu.code, getattr(case, direction)) for case in cases if case.elements < 4 * 10**7}
            for cases in (CASES, SOME)
        )
        assert small == some


@pytest.mark.emulated
@pytest.mark.skipif(not emulator.can_build(), reason="needs g++ and the headers of a CUDA toolkit")
@pytest.mark.parametrize("library", ["", "epilogue"], ids=["first library", "second library"])
def test_checks_of_constants(tmp_path, library):
    checks = f'#include "checks.h"\nstatic_assert(TORCH_EXTENSION_NAME::kMaxBlocksPerRow == {MAX_BLOCKS_PER_ROW});\n'
    source = emulator.sources()[library]
    (tmp_path / "checked.cpp").write_text(emulator.emulated(source.cuda) + checks)
    emulator.compile_with_gxx(tmp_path / "checked.cpp", None, "-fsyntax-only", *source.macros)


# C++ that follows the kernel families, in place of the section dispatch. broken_plan() returns the first condition of a
# plan that does not hold, or "". It tries all rows of a multiple of 16 bytes that a GPU supports.
PLANS = r"""
int plans = 0;  // how many were checked

#define REQUIRE(condition) \
  if (!(condition)) return #condition

template <typename T> std::string broken_grid_resident_plan(const Forward& call, const Device& device) {
  using namespace grid_resident;
  const grid_resident::ResidentPlan plan = choose_plan<T>(call, device);
  if (plan.blocks_per_row == 0) return "";
  ++plans;
  REQUIRE(plan.blocks_per_row * plan.groups <= device.sms);
  REQUIRE(plan.shared_bytes + int(sizeof(Control<T>)) <= device.shared_bytes);
  REQUIRE(plan.ring_slots <= kMaxRingSlots<T>);
  REQUIRE(plan.blocks_per_row <= kMaxBlocksPerRow);
  int64_t columns = 0;
  for (int rank = 0; rank < plan.blocks_per_row; ++rank) {
    const int own = columns_of_slice(call.cols, plan.slice, rank), packs = own / kV<T>, stages = stages_of<T>(packs);
    const int affine = shared_packs<T>(packs, kWeightPacks<T>) + shared_packs<T>(packs, kBiasPacks<T>);
    REQUIRE(plan.ring_slots >= kRowsAhead<T> * stages + kStagesAhead<T> + 2);
    REQUIRE(stages <= kSliceStages<T> && stages > kStagesAhead<T>);
    REQUIRE(plan.ring_slots * kStageBytes<T> + 16 * affine <= plan.shared_bytes);
    columns += own;
  }
  REQUIRE(columns == call.cols);
  return "";
}

template <typename T, typename Call> std::string broken_pipelined_plan(const Call& call, const Device& device) {
  using namespace pipelined;
  using Block = PipelineBlock<T, Call>;
  if (!pipelined::supports<T>(call, device)) return "";
  ++plans;
  const pipelined::PipelinePlan plan = choose_plan<T>(call, device);
  const int blocks = ceil_div(call.cols, plan.slice_columns), lanes = plan.lanes_per_row;
  const int bytes = plan.slots * Block::kTensors * plan.slice_bytes + int(sizeof(typename Block::Control));
  REQUIRE(plan.blocks_per_row == blocks && blocks <= std::min(device.sms, kMaxBlocksPerRow));
  REQUIRE(plan.slots >= 3 && plan.slots <= kMaxSlots);
  REQUIRE(plan.delay >= 0 && plan.delay < plan.slots);
  REQUIRE(plan.stages_in_flight >= 1 && plan.stages_in_flight < plan.slots);
  REQUIRE((lanes & (lanes - 1)) == 0 && lanes <= 32 && lanes >= std::min(blocks, 32));
  REQUIRE(plan.slice_columns <= kMaxSlice && plan.slice_columns % (16 / sizeof(T)) == 0);
  REQUIRE(plan.slice_bytes >= int(sizeof(T)) * plan.slice_columns + kLineBytes);
  REQUIRE(bytes <= device.shared_bytes);
  return "";
}

template <typename T, typename Call, typename BrokenPlan>
std::string first_broken(const Device& device, int shortest_bytes, BrokenPlan broken_plan) {
  for (int64_t cols = shortest_bytes / sizeof(T); cols <= 40000 * int64_t(device.sms); cols += 16 / sizeof(T)) {
    for (const int64_t rows : {1, 4, 9, 1000}) {
      Call call = {};
      call.rows = rows, call.cols = cols, call.dtype = sizeof(T) == 4 ? DType::Float32 : DType::Float16;
      const std::string broken = broken_plan(call, device);
      if (!broken.empty()) return std::to_string(rows) + " x " + std::to_string(cols) + ": " + broken;
    }
  }
  return "";
}
}  // namespace

extern "C" const char* broken_plan(bool is_grid_resident, int sms, int shared_bytes, int code) {
  static std::string broken;
  Device device;
  device.sms = sms, device.l2_bytes = 50 << 20, device.shared_bytes = shared_bytes, device.arch = arch_of(code);
  plans = 0;
  if (is_grid_resident) {
    broken = first_broken<float, Forward>(device, 16, broken_grid_resident_plan<float>) +
             first_broken<__half, Forward>(device, 16, broken_grid_resident_plan<__half>);
  } else {
    broken = first_broken<float, Forward>(device, 8192, broken_pipelined_plan<float, Forward>) +
             first_broken<float, Backward>(device, 8192, broken_pipelined_plan<float, Backward>) +
             first_broken<__half, Forward>(device, 8192, broken_pipelined_plan<__half, Forward>) +
             first_broken<__half, Backward>(device, 8192, broken_pipelined_plan<__half, Backward>);
  }
  return broken.c_str();
}
extern "C" int number_of_plans() { return plans; }
}  // namespace TORCH_EXTENSION_NAME
"""


@pytest.mark.full
@pytest.mark.emulated
@pytest.mark.skipif(not emulator.can_build(), reason="needs g++ and the headers of a CUDA toolkit")
@pytest.mark.parametrize("family, sms, shared_bytes, code", [
    ("grid_resident", 132, 227 << 10, 90), ("grid_resident", 148, 227 << 10, 100), ("grid_resident", 114, 227 << 10, 90),
    ("grid_resident", 20, 190 << 10, 90),  # less shared memory than any such GPU has, so that some rows do not fit
    ("grid_resident", 170, 227 << 10, 100),  # more multiprocessors than a row can have blocks
    ("pipelined", 132, 227 << 10, 90), ("pipelined", 108, 163 << 10, 80), ("pipelined", 170, 99 << 10, 120),
])  # fmt: skip
def test_plans_keep_their_rules(family, sms, shared_bytes, code):
    """For rows of every multiple of 16 bytes, all blocks of a launch keep the rules that prevent a deadlock."""
    families = emulator.emulated(emulator.sources()[""].cuda).partition("// ==== Dispatch:")[0]
    text = families.replace('#include "emulator.h"', '#include "emulator.h"\n#include <string>', 1) + PLANS
    path = emulator.cache("plans", text) / "plans.so"
    with emulator.building(path, "the plans of two families"):
        if not path.exists():
            path.with_suffix(".cpp").write_text(text)
            emulator.compile_with_gxx(path.with_suffix(".cpp"), path)
    library = ctypes.CDLL(str(path))
    library.broken_plan.restype = ctypes.c_char_p
    assert library.broken_plan(family == "grid_resident", sms, shared_bytes, code) == b""
    assert library.number_of_plans() > 10000
