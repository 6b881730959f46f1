"""Can the tests fail? Puts one bug at a time into layernorm_inline.py, and runs the tests that concern it.

    python .ci/mutants.py                  all mutants; the tests run on all GPUs of this machine
    python .ci/mutants.py --only TEXT...   those whose names contain one of the texts
    python .ci/mutants.py --list           names, bugs, tests
    python .ci/mutants.py --cpu            without a GPU: bugs of the kernels are looked for by .ci/test_kernels.py on
                                           emulated GPUs, those of the binding by .ci/test_binding.py, the rest as ever;
                                           what needs a GPU is not tried, and the exit status of all mutants is then 1
    python .ci/mutants.py --green          the tests have just succeeded without a bug: half the time
    python .ci/mutants.py --check          builds nothing: does each replacement apply, do the words of its tests occur?

A mutant is built and tested in a folder of its own, beside others; a line is printed as soon as its end is known. What
no GPU shows (Mutant.emulated) is looked for on emulated GPUs, also without --cpu. The tests run without a mutant, too
(not with --green), and must succeed, or the rest says nothing. Exit status 0: every mutant was killed, or survived for
the reason that the table gives.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = "layernorm_inline.py", "test_layernorm_inline.py"
KERNEL_TESTS, BINDING_TESTS = ".ci/test_kernels.py", ".ci/test_binding.py"
TESTS_PER_GPU = 12  # processes: most of their time is the host's
QUIET, LONGEST = 120, 480  # seconds: see Mutant; all tests of a mutant

# ============================================================================
# Which tests: pytest -k, that is words in the names of tests and marks
# ============================================================================

VALUES = "test_values"  # rows in registers first; below, by the numbers of their columns
SHARED = "test_values and (9000 or 12288 or 16392 or 18432 or 20480) or rows_between_lines"
PIPELINE = "test_values and (8192 or 16384 or 16392 or 20001 or 50257 or 262144 or 1000003) or many_unaligned_rows"
TOGETHER = "many_sms_hold_together"
SPREAD = "test_values and (20001 or 1196040 or 1200001 or 4194304)"
CONSTANT = "give_bias and (9001 or 11000 or 16384 or 20480 or 20001 or 50257 or 194307 or 205923)"
OVERFLOW = "variance_that_overflows"
SHORT_CONSTANT = "give_bias and (5-7- or 2207-41 or 2211-255 or 40-2041)"
ACTIVATION = "test_activation and (cpu or 768 or 9000)"
CONVOLUTION = "test_problem_34 and not compiled"
REPEATED = "streams_and_threads or graph_of_a_training_step and (16392 or 20001 or 262144)"
ASKED_FOR = "asked_for and 64"
BEFORE_HOPPER = "older_architecture"

# The same of KERNEL_TESTS, whose tests are named after emulated GPUs and their SMs. None: nothing there sees it.
ON_THE_CPU = {
    VALUES: "test_values and not any_call and hopper_2 and not (9000 or 16392 or 16384 or 8200 or 6000 or 8192 or 40000) or no_rows",
    SHARED: "test_values and not any_call and (ampere or ada or hopper_2 and (9000 or 16392)) or test_large_mean and (9000 or 16392)",
    PIPELINE: "test_values and not any_call and (hopper_4 or hopper_8 or hopper_20 or blackwell or 8200 or 8192) and not 20000",
    TOGETHER: "test_values and (200004 or 200000 or 131136)",
    SPREAD: "test_values and not any_call and (turing or refusing or 70000 or 40000) and not 200004 or (test_eps or outliers) and turing",
    CONSTANT: "give_bias",
    SHORT_CONSTANT: "give_bias",
    OVERFLOW: "variance_that_overflows",
    ACTIVATION: "test_values and (40x64 or 5x104 or 41x65 or 3x9000)",
    CONVOLUTION: "test_convolution",
    REPEATED: "test_values and hopper_8 and not 20000",
    BEFORE_HOPPER: "test_values and not any_call and (ampere or ada)",
    "guard_bands": "test_values and 41",
    "memcheck": "test_values and (20001 or 7001)",
    "no_rows": "no_rows",
    "2_to_the_31": None,
}  # fmt: skip

# The same of BINDING_TESTS, whose tests have the names that they have in TESTS: where those of TESTS are not among them.
# Every call there asks whether the device was made current, and for the current stream.
IN_THE_BINDING = {
    VALUES: "test_values",
    "not_current": "test_values or test_problem_34 and arguments1",
    "current_stream and (64 or 768)": "test_values",
    ASKED_FOR: "asked_for",
    "vmap or " + ASKED_FOR: "vmap or asked_for",
    "float64_is_pytorchs": "float64_is_pytorchs",
    "bad_input": "bad_input",
    "with_hooks": "with_hooks",
}


class Mutant(NamedTuple):
    name: str
    old: str  # occurs exactly once; how it is broken into lines does not matter
    new: str
    tests: str  # pytest -k; of a bug of the kernels a key of ON_THE_CPU
    equivalent: str = ""  # why it may survive
    quiet: int = QUIET  # seconds without a test's beginning or end, after which it hangs
    emulated: str = ""  # of a bug of the kernels, why no GPU shows it: ON_THE_CPU[tests] runs instead, on the CPU
    file: str = TESTS  # where the tests are


# ============================================================================
# The bugs. To repair one whose code has changed: the shortest text that occurs once.
# ============================================================================

MUTANTS = [
    # ---- Elements, and rows that do not start on 16-byte boundaries ----
    Mutant("cut: element before the first boundary left out", "thread < begin ? thread : -1", "thread + 1 < begin ? thread : -1", VALUES),
    Mutant("cut: last single element left out", "(end + thread - unit < cols ?", "(end + thread - unit < cols - 1 ?", VALUES),
    Mutant("unaligned: odd start ignored", "words[w + 1], 16 * odd", "words[w + 1], 0 * odd", VALUES),
    Mutant("unaligned: bias taken to lie as weight does", "reinterpret_cast<uintptr_t>(w + begin) | reinterpret_cast<uintptr_t>(b + begin)", "reinterpret_cast<uintptr_t>(w + begin)", VALUES),
    Mutant("pack size: bias not asked, forward", "{call.input, call.weight, call.bias, call.output}", "{call.input, call.weight, call.output}", VALUES),
    Mutant("pack size: bias not asked, backward", "call.weight, call.bias, call.grad_input}", "call.weight, call.grad_input}", VALUES),
    Mutant("pack size: grad_output not asked", "{call.grad_output, call.input, call.weight,", "{call.input, call.weight,", VALUES),
    # ---- Statistics ----
    Mutant("combine: share of the wrong partner", "share = all.count * fast_reciprocal(", "share = count * fast_reciprocal(", SPREAD),
    Mutant("combine: count of a part left out", "moments[n].m2 + moments[n].count * delta * delta", "moments[n].m2 + delta * delta", PIPELINE),
    Mutant("combine: warps without columns count", "return {count, all.mean, all.m2};", "return all;", SPREAD, "on a GPU of 100 SMs only 16-bit rows of 10^6 columns have them: seven numbers too many"),
    Mutant("block's reduction: barrier left out", "__syncthreads(); const int slot = threadIdx.x % WARPS;", "const int slot = threadIdx.x % WARPS;", VALUES),
    Mutant("rounded sum of equal float16 numbers", "std::is_same_v<T, __half> ? 8192 : 65536", "65536", CONSTANT),
    Mutant("rstd of equal 16-bit numbers", "m2 == 0 ? rstd * 0 : rstd", "m2 == 0 ? rstd : rstd", CONSTANT),
    # ---- Epilogue ----
    Mutant("scale dropped, forward", "z[v] *= epilogue.scale", "z[v] *= 1", ACTIVATION),
    Mutant("scale dropped, backward", "grad[v] *= epilogue.scale", "grad[v] *= 1", ACTIVATION),
    Mutant("derivative of GELU's tanh form without the factor 3", "A(0.21406444881780076)", "A(0.07135481627260025)", ACTIVATION),
    # ---- Rows in registers, forward ----
    Mutant("registers: eps dropped", "settle(spread[r], mean[r], constants.per_col) * constants.per_col + constants.eps", "settle(spread[r], mean[r], constants.per_col) * constants.per_col", VALUES),
    Mutant("registers: RMS norm in 16 bits", "mean[r] = quotient(mean[r], A(cols), constants.per_col);", "mean[r] = 0;", VALUES),
    Mutant("registers: a thread's last row not written", "if (r == 0 || live_row(r))", "if (r == 0 || live_row(r + 1))", VALUES),
    Mutant("registers: last incomplete group of rows left out", "ceil_div(call.rows, step * p.rows) * step", "std::max<int64_t>(1, call.rows / (step * p.rows)) * step", VALUES),
    Mutant("registers: one pack too many", "live_pack = first_col + i * pack_step < end;", "live_pack = first_col + i * pack_step <= end;", VALUES),
    Mutant("registers: mean of a thread's first row saved for all", "r * step] = mean[r];", "r * step] = mean[0];", VALUES),
    Mutant("registers: a row past the end is written", "if (live_row(r)) narrow(y[0], output[cut.extra", "narrow(y[0], output[cut.extra", "guard_bands"),
    Mutant("registers: offset of 32 bits", "static_cast<const T*>(call.input) + block_row * cols", "static_cast<const T*>(call.input) + int(block_row * cols)", "2_to_the_31"),
    # ---- Rows in shared memory ----
    Mutant("shared memory: eps dropped", "rsqrt(m2 * constants.per_col + constants.eps)", "rsqrt(m2 * constants.per_col)", SHARED),
    Mutant("shared memory: RMS norm in 16 bits", "float mean = quotient(sum[0], float(cols), constants.per_col)", "float mean = 0", SHARED),
    Mutant("shared memory: last pack of some threads left out", "(cols - first_col + pack_step - 1) / pack_step", "(cols - first_col) / pack_step", SHARED),
    Mutant("shared memory: copy not waited for", "wait_for_copies(); const int packs", "const int packs", SHARED),
    # ---- Long rows in a pipeline ----
    Mutant("pipeline: parity kept where the ring wraps", "index = 0, parity ^= 1;", "index = 0;", PIPELINE),
    Mutant("pipeline: loader does not wait for a free stage", "barrier_wait(&control.applied[slot.index], slot.parity ^ 1)", "barrier_wait(&control.applied[slot.index], slot.parity)", PIPELINE),
    Mutant("pipeline: eps dropped", "1 / cols) : m2) + float(call.eps)", "1 / cols) : m2)", PIPELINE),
    Mutant("pipeline: RMS norm", "row_stats_of(from, off, applied", "row_stats_of(0.f, 0.f, applied", PIPELINE),
    Mutant("pipeline: last block's statistics left out", "if (peer < sharers) stats[i]", "if (peer + 1 < sharers) stats[i]", PIPELINE),
    Mutant("pipeline: last column left out", "min(int64_t(pipe.slice), cols - int64_t(rank) * pipe.slice)", "min(int64_t(pipe.slice), cols - 1 - int64_t(rank) * pipe.slice)", PIPELINE),
    Mutant("pipeline: base of a part that may have no columns", "measured[first_part].x", "measured[0].x", CONSTANT),
    Mutant("pipeline: reads past the tensor's end", "tensor_ends = row == call.rows - 1 && call.cols", "tensor_ends = false && call.cols", "memcheck", emulated="memcheck (2025.3) does not notice it in a bulk copy"),
    Mutant("pipeline: offset of 32 bits", "int64_t(row) * int(call.cols) + first", "row * int(call.cols) + first", "2_to_the_31"),
    Mutant("pipeline: more blocks to a row than there are SMs", "std::min(device.sms, kMostSharers);", "kMostSharers;", SPREAD),
    Mutant("pipeline, backward on Hopper: rstd of the group's first row", "*Pass::given_at(call, row, 1)", "*Pass::given_at(call, group, 1)", PIPELINE),
    Mutant("pipeline before Hopper: mean and rstd of the group's first row", "Pass::given_at(call, row, i)", "Pass::given_at(call, group, i)", BEFORE_HOPPER),
    Mutant("pipeline on Hopper: what is given is not waited for", "if (kCopiers<Pass> > 0) barrier_arrive_with_copies(&control.loaded[slot.index]);", "if (kCopiers<Pass> > 0) barrier_arrive(&control.loaded[slot.index]);", PIPELINE),
    Mutant("pipeline before Hopper: last copies not counted", "barrier_arrive_with_copies(&control.loaded[slot.index]);", "barrier_arrive(&control.loaded[slot.index]);", BEFORE_HOPPER, quiet=LONGEST),
    Mutant("pipeline before Hopper: last units not copied", "int left = bytes - 16 * thread; left > 0;", "int left = bytes - 16 * thread; left > 16;", BEFORE_HOPPER, quiet=LONGEST),
    Mutant("pipeline, backward: mean(wdy) dropped, 16 bits", "rest = -mean_wdy - mean * of_x", "rest = -mean * of_x", PIPELINE),
    Mutant("pipeline, backward: mean(wdy) dropped, float32", "dy[v]) - mean_wdy - xhat * mean_wdy_xhat", "dy[v]) - xhat * mean_wdy_xhat", PIPELINE),
    # ---- What blocks that share a row tell one another ----
    Mutant("pipeline: an infinite sum of squares becomes NaN", "(m2 < INFINITY ? quotient(m2, cols, 1 / cols) : m2)", "quotient(m2, cols, 1 / cols)", OVERFLOW),
    Mutant("words: of an earlier call", "words[row * words_per_row(sharers) + rank] = kUnpublished;", ";", REPEATED),
    Mutant("words: rows overlap where more than 16 blocks share one", "(group + 15) / 16 * 16", "16", PIPELINE),
    # ---- Rows that many SMs hold together ----
    Mutant("joint: last pack of a slice not written", "j * kThreads + thread < last_packs", "j * kThreads + thread < last_packs - 1", TOGETHER),
    Mutant("joint: measures the stage before", "measuring = slot_after(stages + kAhead)", "measuring = slot_after(stages + kAhead - 1)", TOGETHER),
    Mutant("joint: statistics of the group's first row", "peer < sharers ? words + row * words_per_row(sharers)", "peer < sharers ? words + blockIdx.y * words_per_row(sharers)", TOGETHER),
    Mutant("joint: statistics begin with those of the row before", "measured_part = {}; if (lane == 0)", "if (lane == 0)", TOGETHER),
    # ---- Rows spread over the GPU ----
    Mutant("spread: eps dropped", "m2 / A(call.cols) + A(call.eps)", "m2 / A(call.cols)", SPREAD),
    Mutant("spread: distances between pieces left out", "m2 += moments[piece].m2 + moments[piece].count * delta * delta;", "m2 += moments[piece].m2;", SPREAD),
    Mutant("spread: count where a row ends", "add_moments(moments, A(count), off, m2)", "add_moments(moments, A(V * PACKS), off, m2)", SPREAD),
    Mutant("spread: statistics read before they are written", "wait_for_previous(); const int64_t row = blockIdx.x; const Moments<A>*", "const int64_t row = blockIdx.x; const Moments<A>*", SPREAD),
    Mutant("spread: statistics of a block's first row", "RowStats<A> stats = row_stats[row];", "RowStats<A> stats = row_stats[first_row];", SPREAD),
    Mutant("spread, backward: mean(wdy) dropped", "- means.wdy - xhat[v] * means.wdy_xhat", "- xhat[v] * means.wdy_xhat", SPREAD),
    # ---- Backward: rows in registers, sums over rows ----
    Mutant("backward: mean(wdy) dropped, 16 bits", "fmaf(-xhat[v], mean_wdy_xhat, -mean_wdy)", "(-xhat[v] * mean_wdy_xhat)", VALUES),
    Mutant("backward: mean(wdy) dropped, float32", "- mean_wdy - xhat[v] * mean_wdy_xhat", "- xhat[v] * mean_wdy_xhat", VALUES),
    Mutant("backward: last row left out of grad_weight", "grad_weight[v] += grad[v] * xhat[v];", "if (row + r * next_row < call.rows - 1) grad_weight[v] += grad[v] * xhat[v];", VALUES),
    Mutant("backward, words: a row's begin is not asked for", "odd = kWords ? row * cols % 2 : 0", "odd = 0", VALUES),
    Mutant("backward, words: sums of the extra column lost", "if (has_extra) gathered[extra_col] =", "if (false) gathered[extra_col] =", VALUES),
    Mutant("backward, words: both moved tensors in one place", "std::exchange(scratch, scratch + room)", "scratch", VALUES),
    Mutant("backward, words: weight of those that are not live", "if (kZeros) weight[i][0] = weight[i][1] = 0;", "", SHORT_CONSTANT, emulated="a register seldom happens to hold NaN"),
    Mutant("backward, words: those that are not live have a mean", "kZeros ? next_mean[r] * A(live[i]) : next_mean[r]", "next_mean[r]", SHORT_CONSTANT),
    Mutant("backward, words: bias of the extra column lost", "share[cols - 1] = bias[0];", "share[cols - 1] = 0;", VALUES),
    Mutant("backward: barrier left out of the sum of a block's rows", "__syncthreads(); if (threadIdx.y >= half) continue;", "if (threadIdx.y >= half) continue;", VALUES),
    Mutant("backward: last block's sums left out", "terms[i] = row + i * blockDim.y < partial_rows", "terms[i] = row + i * blockDim.y < partial_rows - 1", VALUES),
    Mutant("backward: barrier left out of the sum of all blocks", "__syncthreads(); if (threadIdx.y != 0 || col >= call.cols) return;", "if (threadIdx.y != 0 || col >= call.cols) return;", VALUES),
    Mutant("backward: gradients of no rows not written", "const cudaError_t error = cudaMemsetAsync(grad, 0, bytes, stream);", "const cudaError_t error = cudaSuccess;", "no_rows"),
    # ---- Convolution ----
    Mutant("convolution: taps in another order", "taps = 7 - i / 2 / kChunks", "taps = i / 2 / kChunks", CONVOLUTION),
    Mutant("convolution: no padding before the first depth", "d >= 0 && d < call.depth", "d < call.depth", CONVOLUTION),
    Mutant("convolution: no padding below the last line", "h + line < call.height", "h + line <= call.height", CONVOLUTION),
    Mutant("convolution: last line not written", "line_of(row / 2) < call.height - p.h", "line_of(row / 2) < call.height - 1 - p.h", CONVOLUTION),
    Mutant("convolution: eps dropped", "(1.0f / kConvOut) + eps", "(1.0f / kConvOut)", CONVOLUTION),
    Mutant("convolution: input replaced while it is read", "if (round > 0) named_barrier_wait(was_read(to), kTwoGroups);", "", CONVOLUTION),
    Mutant("convolution: rstd of a thread's first row saved for all", "kConvOut] = rstd[row];", "kConvOut] = rstd[0];", CONVOLUTION),
    Mutant("convolution: float32 always in TF32", "call.tf32 = takes_tf32()", "call.tf32 = true", CONVOLUTION),
    # ---- Binding ----
    Mutant("binding: weight's strides ignored, forward", "const Tensor x = input.contiguous(); const OptionalTensor w = contiguous(weight)", "const Tensor x = input.contiguous(); const OptionalTensor w = weight", "stride"),
    Mutant("binding: weight's strides ignored, backward", "stats = statistics.contiguous(); const OptionalTensor w = contiguous(weight)", "stats = statistics.contiguous(); const OptionalTensor w = weight", "stride"),
    Mutant("binding: strides of statistics ignored", "stats = statistics.contiguous()", "stats = statistics", "changed_since"),
    Mutant("binding: grad_output's strides ignored", "dy = grad_output.contiguous()", "dy = grad_output", "stride"),
    Mutant("binding: float32 bias without weight", "present(w) ? w : b; Forward call", "w; Forward call", VALUES),
    Mutant("binding: device not made current", "const c10::cuda::CUDAGuard guard(input.device()); const Outputs outputs", "const Outputs outputs", "not_current"),
    Mutant("binding: device not made current, convolution", "const c10::cuda::CUDAGuard guard(input.device()); if (!fits_convolution(input))", "if (!fits_convolution(input))", "not_current"),
    Mutant("binding: default stream", "{allocate, &owner}, c10::cuda::getCurrentCUDAStream()", "{allocate, &owner}, nullptr", "current_stream and (64 or 768)"),
    Mutant("binding: bias saved in weight's place", "{{{input, false}, {weight, false}, {bias, false}, {statistics, false}, {}}}", "{{{input, false}, {bias, false}, {bias, false}, {statistics, false}, {}}}", "vmap or " + ASKED_FOR),
    Mutant("binding: wanted gradients of weight and bias swapped", "task_should_compute_output(i);", "task_should_compute_output(i == 0 || i > 2 ? i : 3 - i);", ASKED_FOR),
    Mutant("binding: gradient of bias alone", "has(input) || (present(weight) && has(*weight)) || (present(bias) && has(*bias))", "has(input) || (present(weight) && has(*weight))", ASKED_FOR),
    Mutant("binding: tangent of grad_output dropped", "&& !has_tangent(grad_outputs[0])", "", "forward_over_reverse"),
    Mutant("binding: input not cast under autocast", "at::autocast::cached_cast(at::kFloat, input), normalized_shape", "input, normalized_shape", "autocast"),
    Mutant("binding: weight on another device", "check_device(name, *affine, input);", "", "bad_dtypes_and_devices"),
    Mutant("binding: backward checks nothing", "check_backward(grad_output, input, normalized_shape, statistics, weight, bias); const", "const", "backward_checks"),
    Mutant("binding: backward of the convolution checks nothing", "check_tensor(\"grad_output\", grad_output, output_sizes(input), input.scalar_type(), input); const", "const", "backward_checks"),
    Mutant("binding: shape of grad_output and statistics", "t.sym_sizes().equals(sizes)", "true", "backward_checks"),
    Mutant("binding: dtype of grad_output and statistics", "t.scalar_type() == dtype, \"Expected", "true, \"Expected", "backward_checks"),
    Mutant("binding: device of grad_output and statistics", "check_device(name, t, input);", "", "backward_checks"),
    Mutant("binding: copies what is copied on write", "return t.const_data_ptr();", "return t.data_ptr();", "copy_on_write"),
    Mutant("binding: gradients of the batch's last part only", "sums[i].add_(added[i])", "sums[i].copy_(added[i])", CONVOLUTION),
    Mutant("binding: convolution's input taken to be aligned", "% 16 == 0 ? x : x.clone()", "% 16 == 0 ? x : x", CONVOLUTION),
    Mutant("meta: strides of input", "at::empty_symint(sizes, like.options().dtype(dtype))", "at::empty_like(like, like.options().dtype(dtype))", "fake"),
    Mutant("meta: depth and height swapped", "input.sym_size(2) * 2, input.sym_size(3) * 2", "input.sym_size(3) * 2, input.sym_size(2) * 2", "one_kernel"),
    # ---- Build ----
    Mutant("build: newer code for an older GPU of its family", "number // 10 == gpu // 10 and number <= gpu", "number // 10 == gpu // 10", "code_for"),
    Mutant("build: sm_90 instead of sm_90a", 'f"sm_{g}a" if g == 90 else', 'f"sm_{g}" if g == 90 else', "code_for or own_code"),
    Mutant("build: CUDA 11 for Hopper", "if _number(code) >= 90 else", "if _number(code) > 90 else", "code_for"),
    Mutant("build: Turing left out", "if _number(code) >= _OLDEST_CODE", "if _number(code) > _OLDEST_CODE", "code_for"),
    Mutant("build: PTX for the GPUs that the list excludes", "elif len(chosen) < len(gpus):", "elif len(chosen) > len(gpus):", "code_for"),
    Mutant("build: one name for all architectures", "*_CPP_FLAGS, *codes, *platform", "*_CPP_FLAGS, *platform", "another_library"),
    Mutant("build: library cut short is loaded", 'size.read() == b"%d" % os.path.getsize(library)', "bool(size.read())", "cut_short"),
    Mutant("build: library that a group can write is loaded", "status.st_mode & 0o022", "status.st_mode & 0o002", "others_can_write"),
    Mutant("build: folder that others can write", "os.makedirs(directory, 0o755", "os.makedirs(directory, 0o777", "umask"),
    Mutant("build: a container's library not looked for", "for c in (codes, _codes([], arch_list))", "for c in (codes,)", "container"),
    Mutant("build: toolkit of another CUDA", "_version(release)[0] == major and", "", "toolkit"),
    # ---- Python ----
    Mutant("Python: scale dropped on the CPU", "x if scale == 1 else x * scale", "x", ACTIVATION),
    Mutant("Python: overrides not asked", "_is_overridden(input, weight, bias):", "False:", "torchscript or overrides"),
    Mutant("Python: types of arguments not asked", "if not usual:", "if False:", "bad_input"),
    Mutant("Python: scale of any type", "not isinstance(scale, numbers.Real):", "False:", "scale_is_a_number"),
    Mutant("Python: float64 for the kernels", "or input.dtype is torch.float64", "", "float64_is_pytorchs"),
    Mutant("Python: the two forms of GELU swapped", '"gelu": 1, "gelu_tanh": 2', '"gelu": 2, "gelu_tanh": 1', VALUES),
    Mutant("Python: vmap's weights along the wrong dimension", "[1] * (none_of_x.dim() - 1 - len(normalized_shape))", "[1] * (none_of_x.dim() - len(normalized_shape))", "vmap"),
    Mutant("Python: subclasses replaced, too", "elif cls in classes:", "elif issubclass(cls, classes):", "replace_layer_norm"),
    Mutant("Python: modules with a forward of their own replaced, too", '"forward" in vars(child) or', "", "replace_layer_norm"),
    Mutant("Python: PyTorch's classes replaced, too", '(cls is not nn.LayerNorm and name.startswith("torch."))', "False", "replace_layer_norm"),
    Mutant("Python: convolution of any stride and padding", "and (conv.stride, conv.padding, conv.output_padding) == ((2, 2, 2), (1, 1, 1), (0, 0, 0))", "", "one_kernel"),
    Mutant("Python: convolution of any dilation and groups", "and (conv.dilation, conv.groups, norm.normalized_shape) == ((1, 1, 1), 1, (64,))", "", "one_kernel"),
    Mutant("convolution: TF32 without cuDNN", "at::globalContext().userEnabledCuDNN() &&", "", "setting_of_convolutions"),
    Mutant("Python: hooks left out", 'getattr(module, f"_{hooks}") or', "", "with_hooks"),
    Mutant("Python: global hooks left out", 'or getattr(nn.modules.module, f"_global_{hooks}")', "", "with_hooks"),
    Mutant("Python: patched forwards left out", "and module.forward == _FORWARDS[cls].__get__(module)", "", "with_hooks"),
]  # fmt: skip


# ============================================================================
# Applying
# ============================================================================


def mutated(mutant, source):
    """The source with the bug. ValueError or SyntaxError: the replacement does not apply."""
    found = list(re.finditer(r"\s+".join(map(re.escape, mutant.old.split())), source))
    if len(found) != 1:
        raise ValueError(f"occurs {len(found)} times: {mutant.old}")
    text = source[: found[0].start()] + mutant.new + source[found[0].end() :]
    compile(text, SOURCE, "exec")
    return text


def compiled_sources(text):
    return re.findall(r'r"""(.*?)"""', text, re.S)


def on_the_cpu(mutant, source):
    """The mutant with tests that need no GPU, if there are any."""
    try:
        text = mutated(mutant, source)
    except (ValueError, SyntaxError):  # Runner.mutant says so
        return mutant
    (*kernels, binding), (*bad_kernels, bad_binding) = map(compiled_sources, (source, text))
    if kernels != bad_kernels:
        return mutant._replace(tests=ON_THE_CPU[mutant.tests], file=KERNEL_TESTS)
    if (binding != bad_binding or mutant.tests in IN_THE_BINDING) and not mutant.name.startswith("meta"):
        return mutant._replace(tests=IN_THE_BINDING.get(mutant.tests, mutant.tests), file=BINDING_TESTS)
    return mutant


def check(mutants):
    """Prints what is wrong with the table; returns how many mutants that concerns."""
    source, tests = (ROOT / SOURCE).read_text(), (ROOT / TESTS).read_text()
    wrong = 0
    for mutant in mutants:
        try:
            mutated(mutant, source)
            words = set(re.findall(r"\w+", mutant.tests)) - {"and", "or", "not"}
            unknown = sorted(word for word in words if word not in tests)
            if unknown:
                raise ValueError(f"{TESTS} has no {', '.join(unknown)}")
            if on_the_cpu(mutant, source).file != KERNEL_TESTS and mutant.emulated:
                raise ValueError("it is no bug of the kernels, and only these are emulated")
        except KeyError:
            print(f"{mutant.name} | ON_THE_CPU has no {mutant.tests!r}")
            wrong += 1
        except (ValueError, SyntaxError) as error:
            print(f"{mutant.name} | does not apply: {error}")
            wrong += 1
    print(f"{len(mutants)} mutants, {wrong} are wrong")
    return wrong


# ============================================================================
# Building and testing
# ============================================================================

RUNNING = set()  # processes, each the leader of a group


def run(command, folder, environment, quiet, longest):
    """(exit status, output). The status is "hangs" without output for so long, "slow" without an end for so long."""
    began = changed = time.time()
    size = 0
    with open(folder / "output", "w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.add(process)
        status = None
        while status is None:
            time.sleep(0.2)
            status, now, before = process.poll(), time.time(), size
            size = os.fstat(output.fileno()).st_size
            changed = now if size != before else changed
            if status is None and (now - changed > quiet or now - began > longest):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = "hangs" if now - changed > quiet else "slow"
        RUNNING.remove(process)
        output.seek(0)
        return status, output.read()


def verdict(status, output):
    """("killed", by what), ("survived", ""), or ("not tried", why), of pytest's exit status and output."""
    test = r"\S+::(\w+(?:\[.*?\])?)"
    failed = re.search(rf"^(?:FAILED|ERROR) {test}(?: - (.*))?", output, re.M)
    started = re.findall(rf"^{test} (PASSED|SKIPPED)?", output, re.M)
    if failed and "out of memory" in (failed[2] or ""):
        return "not tried", "out of memory"  # beside the tests of other mutants
    if failed:
        return "killed", f"{failed[1]}: {(failed[2] or 'fails')[:120]}"
    if status == 0:
        passed = any(outcome == "PASSED" for _, outcome in started)
        return ("survived", "") if passed else ("not tried", "its tests are skipped here")
    if status == "slow":
        return "not tried", f"its tests take more than {LONGEST} s"
    if started and not started[-1][1]:
        return "killed", f"{started[-1][0]}: " + (status if status == "hangs" else f"exit status {status}")
    return "not tried", "no such tests" if status == 5 else output.strip().split("\n")[-1][:200]


def visible_gpus():
    """As CUDA_VISIBLE_DEVICES names them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(i) for i in range(listed.count("UUID: GPU-"))]


class Runner:
    def __init__(self, work, jobs):
        self.work = work
        self.source = (ROOT / SOURCE).read_text()
        self.builds = threading.BoundedSemaphore(jobs)
        self.gpus = gpus = visible_gpus()
        self.places = queue.Queue()  # where tests run: CUDA_VISIBLE_DEVICES, this place's GPU first
        for _ in range(TESTS_PER_GPU if gpus else max(1, jobs // 2)):
            for i in range(max(1, len(gpus))):
                self.places.put(",".join(gpus[i:] + gpus[:i]))
        self.environment = {**os.environ, "COLUMNS": "250"}
        if gpus:
            self.environment.pop("TORCH_CUDA_ARCH_LIST", None)  # their own architecture only
        self.built = threading.Event()  # the source without a bug

    def folder(self, name, text):
        folder = self.work / re.sub(r"\W+", "_", name)
        folder.mkdir()
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy(path, folder)
        shutil.copytree(ROOT / ".ci", folder / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / SOURCE).write_text(text)
        return folder

    def environment_of(self, folder, file):
        environment = {**self.environment, "TORCH_EXTENSIONS_DIR": str(folder / "cache")}
        if file != TESTS:  # nothing is compiled for a GPU
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment.pop("TORCH_CUDA_ARCH_LIST", None)
        return environment

    def build(self, folder, file):
        """What the compiler says where it fails, else nothing."""
        code = "import layernorm_inline"
        if file != TESTS:
            what = "build" if file == KERNEL_TESTS else "load_binding"
            code = f"import sys; sys.path.insert(0, '.ci'); import emulator; emulator.{what}()"
        with self.builds:
            command = ["nice", sys.executable, "-c", code]
            status, output = run(command, folder, self.environment_of(folder, file), LONGEST, LONGEST)
        errors = re.findall(r"^.*\berror\b.*$", output, re.M | re.I) or [output.strip().split("\n")[-1]]
        return "" if status == 0 else errors[0][-200:]

    def test(self, folder, file, expression, quiet, *options):
        devices = self.places.get()
        environment = self.environment_of(folder, file)
        if devices and file == TESTS:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "-rfE", "-p", "no:cacheprovider", *options]
        command += ["--rootdir=.", f"--basetemp={folder / 'temp'}", file, "-k", expression]
        result = run(command, folder, environment, quiet, LONGEST)
        self.places.put(devices)
        return result

    def without(self, files):
        """Builds the source as it is, for tests in these files."""
        self.unchanged = self.folder("without a bug", self.source)
        error = "".join(self.build(self.unchanged, file) for file in files)
        self.built.set()
        return error

    def copy_library(self, folder):
        self.built.wait()
        if (self.unchanged / "cache").exists():
            shutil.copytree(self.unchanged / "cache", folder / "cache")

    def baseline(self, part, file, expression):
        """The tests of the expression without a bug: ("green", what ran) or ("red", what fails)."""
        folder = self.folder(f"baseline {part}", self.source)
        self.copy_library(folder)
        status, output = self.test(folder, file, expression, LONGEST)
        if status == 5:
            return "green", "none left"
        last = output.strip().split("\n")[-1].strip("= ")
        failed = verdict(status, output)[1]
        return ("green", last) if status == 0 else ("red", f"{failed} ({last})")

    def mutant(self, mutant):
        """(what became of it, how)."""
        try:
            text = mutated(mutant, self.source)
        except (ValueError, SyntaxError) as error:
            return "does not apply", str(error)
        if mutant.tests is None:
            return "not tried", "needs a GPU"
        folder = self.folder(mutant.name, text)
        if compiled_sources(text)[:-1] == compiled_sources(self.source)[:-1]:
            self.copy_library(folder)  # of the binding, the kernels
        if error := self.build(folder, mutant.file):
            return "does not build", error
        end, how = verdict(*self.test(folder, mutant.file, mutant.tests, mutant.quiet, "-x"))
        shutil.rmtree(folder)
        if end == "survived" and mutant.equivalent:
            return "equivalent", mutant.equivalent
        if end == "survived" and mutant.file == TESTS and not self.gpus:
            return "not tried", "there is no GPU here, and the other tests do not see it"
        return end, how


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose names contain one of these")
    parser.add_argument("--cpu", action="store_true", help="bugs of the kernels: tests on emulated GPUs")
    parser.add_argument("--green", action="store_true", help="the tests are known to succeed without a bug")
    parser.add_argument("--list", action="store_true", help="print names, bugs and tests")
    parser.add_argument("--check", action="store_true", help="build nothing: does each replacement apply?")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() // 2), help="builds at once")
    parser.add_argument("--output", metavar="FILE", help="where the lines are written, too")
    arguments = parser.parse_args()
    mutants = [m for m in MUTANTS if not arguments.only or any(text in m.name for text in arguments.only)]
    if not mutants:
        parser.error(f"no mutant's name contains {' or '.join(arguments.only)}")
    if arguments.check:
        return check(mutants) > 0
    source = (ROOT / SOURCE).read_text()
    mutants = [on_the_cpu(m, source) if arguments.cpu or m.emulated else m for m in mutants]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.old}\n    {mutant.new or '(nothing)'}")
            print(f"    {mutant.file} -k '{mutant.tests}'" if mutant.tests else "    needs a GPU")
        return 0

    began = time.time()
    mutants.sort(key=lambda mutant: -mutant.quiet)  # what takes longest first
    work = Path(tempfile.mkdtemp(prefix="mutants_"))

    def stop(*_):
        # ninja ends its compilers at the first signal, a test that hangs only at the second.
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in list(RUNNING):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(1)
        shutil.rmtree(work, ignore_errors=True)
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    lines = []

    def tell(line):
        print(line, flush=True)
        lines.append(line)
        if arguments.output:
            Path(arguments.output).write_text("\n".join(lines) + "\n")

    runner = Runner(work, arguments.jobs)
    # What is narrow first: a test runs once.
    expressions = sorted({(m.file, m.tests) for m in mutants if m.tests}, key=lambda e: len(e[1]), reverse=True)
    ends = []
    with ThreadPoolExecutor(1 + len(expressions) + len(mutants)) as pool:
        unchanged = pool.submit(runner.without, sorted({file for file, _ in expressions}))
        futures = {}
        for i, (file, expression) in enumerate([] if arguments.green else expressions):
            before = [e for of, e in expressions[:i] if of == file]
            rest = " and not ".join(f"({e})" for e in [expression, *before])
            futures[pool.submit(runner.baseline, i, file, rest)] = f"without a bug: {file} -k '{expression}'"
        for mutant in mutants:
            futures[pool.submit(runner.mutant, mutant)] = mutant.name
        for future in as_completed(futures):
            end, how = future.result()
            ends.append(end)
            tell(f"{futures[future]} | {end}" + (f" | {how}" if how else ""))
    shutil.rmtree(work)
    if unchanged.result():
        tell(f"without a bug | does not build | {unchanged.result()}")
    counts = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(sorted(ends)) if end not in ("green", "red"))
    green = "red" not in ends and not unchanged.result()
    baseline = "the tests succeed without a bug" if green else "the tests FAIL WITHOUT A BUG: this says nothing"
    if green and arguments.green:
        baseline = "the tests were said to succeed without a bug"
    tell(f"{len(mutants)} mutants: {counts}; {baseline}; {time.time() - began:.0f} s")
    return not green or any(end not in ("green", "killed", "equivalent") for end in ends)


if __name__ == "__main__":
    sys.exit(main())
