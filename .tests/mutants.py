"""Can the tests fail? Puts one bug at a time into layernorm_inline.py, and runs the tests that concern it.

    python .tests/mutants.py                  all mutants; the tests run on all GPUs of this machine
    python .tests/mutants.py --only TEXT...   those whose names contain one of the texts
    python .tests/mutants.py --list           names, bugs, tests
    python .tests/mutants.py --cpu            without a GPU: bugs of kernels and binding are looked for on emulated GPUs,
                                              the rest as ever; what needs a GPU is not tried, and the exit status of all
                                              mutants is then 1
    python .tests/mutants.py --short          against the tests that run without --full, to see what these are worth
    python .tests/mutants.py --green          the tests have just succeeded without a bug: half the time
    python .tests/mutants.py --check          builds nothing: does each replacement apply, do the words of its tests occur?

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
SOURCE, TESTS = "layernorm_inline.py", ".tests"
TESTS_PER_GPU = 12  # processes: most of their time is the host's
QUIET, LONGEST = 120, 480  # seconds: see Mutant; all tests of a mutant

# ============================================================================
# Which tests: pytest -k, that is words in the names of tests and of their cases, which begin with the GPU and the rooms
# (hopper_2-shared-pipeline-..., cuda-registers-registers-...)
# ============================================================================

VALUES = "test_values[ and registers"
SHARED = "test_values[ and shared or rows_off_cache_lines"
PIPELINE = "test_values[ and pipeline and not blackwell and not ada or any_call"
TOGETHER = "joint"
SPREAD = "test_values[ and spread or any_call or far_from"
CONSTANT = "give_bias"
OVERFLOW = "variance_that_overflows"
SHORT_CONSTANT = "give_bias and registers"
ACTIVATION = "test_activation or test_values[ and registers-registers and not refusing"
CONVOLUTION = "test_conv and not compiled"
REPEATED = "streams_and_threads or graph_of_a_training_step or test_values[ and hopper_8"
ASKED_FOR = "output_mask"
BEFORE_HOPPER = "older_architecture or test_values[ and (ampere or ada)"

# What to run on emulated GPUs where that is something else. None: nothing there sees it.
ON_THE_CPU = {
    "guard_bands": "test_values[ and registers",
    "2_to_the_31": None,  # that much memory
    "memcheck": "test_values[ and pipeline",
    "not_current": "test_values[ and registers-registers and hopper_2 or test_conv_values",
    "current_stream and (registers or pipeline)": "test_values[ and registers-registers and hopper_2",
    "fake": None,  # built kernels
    "fused_conditions": None,
}  # fmt: skip


class Mutant(NamedTuple):
    name: str
    old: str  # occurs exactly once; how it is broken into lines does not matter
    new: str
    tests: str  # pytest -k
    equivalent: str = ""  # why it may survive
    quiet: int = QUIET  # seconds without a test's beginning or end, after which it hangs
    emulated: str = ""  # why no GPU shows it: emulated ones do
    mark: str = "not emulated"  # pytest -m


# ============================================================================
# The bugs. To repair one whose code has changed: the shortest text that occurs once.
# ============================================================================

MUTANTS = [
    # ---- Elements, and rows that do not start on 16-byte boundaries ----
    Mutant("columns: element before the first boundary left out", "(thread < V ? begin : cols)", "(thread < V ? begin - 1 : cols)", VALUES),
    Mutant("columns: last single element left out", "(thread < V ? begin : cols)", "(thread < V ? begin : cols - 1)", VALUES),
    Mutant("unaligned: odd start ignored", "words[w + 1], 16 * mid_word", "words[w + 1], 0 * mid_word", VALUES),
    Mutant("unaligned: bias taken to lie as weight does", "reinterpret_cast<uintptr_t>(w + begin) | reinterpret_cast<uintptr_t>(b + begin)", "reinterpret_cast<uintptr_t>(w + begin)", VALUES),
    Mutant("pack size: bias not asked, forward", "{call.input, call.weight, call.bias, call.output}", "{call.input, call.weight, call.output}", VALUES),
    Mutant("pack size: bias not asked, backward", "call.weight, call.bias, call.grad_input}", "call.weight, call.grad_input}", VALUES),
    Mutant("pack size: grad_output not asked", "{call.grad_output, call.input, call.weight,", "{call.input, call.weight,", VALUES),
    # ---- Statistics ----
    Mutant("combine: share of the wrong partner", "share = all.count * fast_reciprocal(", "share = more.count * fast_reciprocal(", SPREAD),
    Mutant("combine: count of a part left out", "parts[n].y + counts[n] * delta * delta", "parts[n].y + delta * delta", PIPELINE),
    Mutant("combine: warps without columns count", "return {all, total.x + total.y, total.z};", "return {max(all, 1.0f), total.x + total.y, total.z};", SPREAD, "on a GPU of 100 SMs only 16-bit rows of 10^6 columns have them: seven numbers too many"),
    Mutant("block's reduction: barrier left out", "__syncthreads(); const int slot = threadIdx.x % WARPS;", "const int slot = threadIdx.x % WARPS;", VALUES),
    Mutant("rounded sum of equal float16 numbers", "std::is_same_v<T, __half> ? 8192 : 65536", "65536", CONSTANT),
    # ---- Epilogue ----
    Mutant("scale dropped, forward", "z = z * epilogue.scale", "z = z", ACTIVATION),
    Mutant("scale dropped, backward", "grad = grad * epilogue.scale", "grad = grad", ACTIVATION),
    Mutant("derivative of GELU's tanh form without the factor 3", "0.21406444881780076f", "0.07135481627260025f", ACTIVATION),
    # ---- Rows in registers, forward ----
    Mutant("registers: eps dropped", "rstd[r] = rsqrt(m2 * constants.per_col + constants.eps)", "rstd[r] = rsqrt(m2 * constants.per_col)", VALUES),
    Mutant("registers: RMS norm in 16 bits", "mean[r] = quotient(mean[r], float(cols), per_col);", "mean[r] = 0;", VALUES),
    Mutant("registers: a thread's last row not written", "if (r < count) store<T>(output", "if (r == 0 || r + 1 < count) store<T>(output", VALUES),
    Mutant("registers: last incomplete group of rows left out", "ceil_div(call.rows, step * chosen.rows) * step", "std::max<int64_t>(1, call.rows / (step * chosen.rows)) * step", VALUES),
    Mutant("registers: one pack too many", "bool has(int i) const { return at(i) < end; }", "bool has(int i) const { return at(i) <= end; }", VALUES),
    Mutant("registers: mean of a thread's first row saved for all", "save_statistics(call, row + r * step, mean[r], rstd[r])", "save_statistics(call, row + r * step, mean[0], rstd[r])", VALUES),
    Mutant("registers: a row past the end is written", "if (r < count) store<T>(output", "store<T>(output", "guard_bands"),
    Mutant("registers: a thread's unaligned rows are its first", "x.packs[i][r] = words[i][r].get(mid_word)", "x.packs[i][r] = words[i][0].get(mid_word)", VALUES),
    Mutant("registers: offset of 32 bits", "input_row = static_cast<const T*>(call.input) + row * int(call.cols);", "input_row = static_cast<const T*>(call.input) + int(row * int(call.cols));", "2_to_the_31"),
    # ---- Rows in shared memory ----
    Mutant("shared memory: eps dropped", "const float rstd = rsqrt(m2 * constants.per_col + constants.eps)", "const float rstd = rsqrt(m2 * constants.per_col)", SHARED),
    Mutant("shared memory: distances from 0", "distances_of<DistanceSums<T>>(x(i) - mean[0])", "distances_of<DistanceSums<T>>(x(i))", SHARED),
    Mutant("shared memory: last pack of some threads left out", "(cols - first + stride - 1) / stride", "(cols - first) / stride", SHARED),
    Mutant("shared memory: copy not waited for", "prefetch_later_rows(window, policy); wait_for_copies();", "prefetch_later_rows(window, policy);", SHARED),
    # ---- Long rows in a pipeline ----
    Mutant("pipeline: parity kept where the ring wraps", "RingPosition{next - stages, parity ^ 1}", "RingPosition{next - stages, parity}", PIPELINE),
    Mutant("pipeline: loader does not wait for a free stage", "barrier_wait(&control.empty[stage.index], stage.parity ^ 1);", ";", PIPELINE),
    Mutant("pipeline: eps dropped", "(1 / float(call.cols)) + float(call.eps)", "(1 / float(call.cols))", PIPELINE),
    Mutant("pipeline: RMS norm", "return row_stats_of(from, total.x, rstd);", "return row_stats_of(0.f, 0.f, rstd);", PIPELINE),
    Mutant("pipeline: last block's statistics left out", "counts[i] = columns_of_slice(cols, pipe.slice, peer + i * 32)", "counts[i] = columns_of_slice(cols, pipe.slice, peer + 1 + i * 32)", PIPELINE),
    Mutant("pipeline: last column left out", "min(slice, cols - rank * slice)", "min(slice, cols - 1 - rank * slice)", PIPELINE),
    Mutant("pipeline: offset of 32 bits", "int64_t(row) * int(call.cols) + first", "row * int(call.cols) + first", "2_to_the_31"),
    Mutant("pipeline: more blocks to a row than there are SMs", "std::min(device.sms, kMaxBlocksPerRow);", "kMaxBlocksPerRow;", SPREAD),
    Mutant("pipeline, backward on Hopper: mean and rstd of the group's first row", "scalars[i] = *Pass::scalar_at(block.call, row, i)", "scalars[i] = *Pass::scalar_at(block.call, blockIdx.y, i)", PIPELINE),
    Mutant("pipeline before Hopper: mean and rstd of the group's first row", "row_scalars + i, Pass::scalar_at(block.call, row, i)", "row_scalars + i, Pass::scalar_at(block.call, blockIdx.y, i)", BEFORE_HOPPER, quiet=LONGEST),
    Mutant("pipeline on Hopper: row_scalars are not waited for", "if (control.kCopiers > 0) barrier_arrive_with_copies(", "if (control.kCopiers > 0) barrier_arrive(", PIPELINE),
    Mutant("pipeline before Hopper: last copies not counted", "if (control.kCopiers > 0) barrier_arrive_with_copies(", "if (control.kCopiers > 0) barrier_arrive(", BEFORE_HOPPER, quiet=LONGEST),
    Mutant("pipeline before Hopper: last units not copied", "int at = 16 * thread; at < copy.bytes;", "int at = 16 * thread; at < copy.bytes - 16;", BEFORE_HOPPER, quiet=LONGEST),
    Mutant("pipeline, backward: mean(wdy) dropped, 16 bits", "rest = -mean_wdy - mean * of_x", "rest = -mean * of_x", PIPELINE),
    Mutant("pipeline, backward: mean(wdy) dropped, float32", "product(weight[i], dy) - mean_wdy - (x", "product(weight[i], dy) - (x", PIPELINE),
    Mutant("pipeline, backward: sums of many rows begin with the last 256", "is_first ? sums[i] : sums[i] + widened(load<float, V>(to))", "sums[i]", "gradients_of_many_rows", emulated="no GPU test has so many long rows"),
    Mutant("backward: all rows of a thread added one by one", "kRowsPerSum = 256", "kRowsPerSum = 1 << 30", "gradients_of_many_rows", emulated="no GPU test has so many long rows"),
    # ---- What blocks that share a row tell one another ----
    Mutant("mailboxes: of an earlier call", "*mailbox_of(mailboxes, row, blockIdx.x) = kEmptyMailbox;", ";", REPEATED),
    Mutant("mailboxes: rows overlap where more than 16 blocks share one", "(blocks + 15) / 16 * 16", "16", PIPELINE),
    # ---- Rows that many SMs hold together ----
    Mutant("joint: last pack of a slice not written", "j * kThreads + block.thread < block.last_packs", "j * kThreads + block.thread < block.last_packs - 1", TOGETHER),
    Mutant("joint: measures the stage before", "slot.after(block.stages + kAhead, plan.ring)", "slot.after(block.stages + kAhead - 1, plan.ring)", TOGETHER),
    Mutant("joint: statistics of the group's first row", "try_read(mailbox_of(block.mailboxes, row, 0)", "try_read(mailbox_of(block.mailboxes, blockIdx.y, 0)", TOGETHER),
    Mutant("joint: statistics begin with those of the row before", "moments = {}; if (lane == 0)", "if (lane == 0)", TOGETHER),
    # ---- Rows spread over the GPU ----
    Mutant("spread: eps dropped", "m2 / float(call.cols) + float(call.eps)", "m2 / float(call.cols)", SPREAD),
    Mutant("spread: means of pieces left out", "all.mean = more.mean - delta * share;", "all.mean = -delta * share;", SPREAD),
    Mutant("spread: count where a row ends", "combine(moments, {float(count), part.x, part.y})", "combine(moments, {float(V * kPacks), part.x, part.y})", SPREAD),
    Mutant("spread: statistics read before they are written", "wait_for_previous(); const int64_t row = blockIdx.x; Part part", "const int64_t row = blockIdx.x; Part part", SPREAD),
    Mutant("spread: statistics of a block's first row", "stats = row_stats[row];", "stats = row_stats[first_row];", SPREAD),
    Mutant("spread, backward: mean(wdy) dropped", "product(weight, grad) - means.wdy - xhat", "product(weight, grad) - xhat", SPREAD),
    # ---- Backward: rows in registers, sums over rows ----
    Mutant("backward: mean(wdy) dropped, 16 bits", "fmaf(-xhat[r][v], means.wdy_xhat, -means.wdy)", "(-xhat[r][v] * means.wdy_xhat)", VALUES),
    Mutant("backward: mean(wdy) dropped, float32", "(product(weight[v], grad[v]) - means.wdy - xhat[r][v] * means.wdy_xhat)", "(product(weight[v], grad[v]) - xhat[r][v] * means.wdy_xhat)", VALUES),
    Mutant("backward: last row left out of grad_weight", "pack.add_row(call, r, columns.next_mean[r], rstd[r], bias, sums[r]);", "const auto before = pack.grads[0]; pack.add_row(call, r, columns.next_mean[r], rstd[r], bias, sums[r]); if (row + r * next_row == call.rows - 1) pack.grads[0] = before;", VALUES),
    Mutant("backward, words: a row's begin is not asked for", "mid_word = is_in_words<T, V> ? row * cols % 2 : 0", "mid_word = 0", VALUES),
    Mutant("backward, words: sums of the extra column lost", "each([&](auto& pack) { pack.write_sums(gathered, n); });", "UNROLL(i, PACKS) if (packs[i].live) packs[i].write_sums(gathered, n);", VALUES),
    Mutant("backward, words: input that begins off 4 bytes", "dy = aligned(grad_output, 4), x = aligned(input, 4)", "dy = grad_output.contiguous(), x = input.contiguous()", VALUES),
    Mutant("backward, words: weight of those that are not live", "if (kAddsZeros<T, V>) packs[i].weight = {};", "", SHORT_CONSTANT, emulated="a register seldom happens to hold NaN"),
    Mutant("backward, words: those that are not live have a mean", "kAddsZeros<T, N> ? mean * float(live) : mean", "mean", SHORT_CONSTANT),
    Mutant("backward, words: bias of the extra column lost", "store<float>(bias + pack.col, pack.load_affine_columns(call, call.bias, 0));", "store<float>(bias + pack.col, pack.xhat[0].kSize > 1 ? pack.load_affine_columns(call, call.bias, 0) : decltype(pack.weight){});", VALUES),
    Mutant("backward: barrier left out of the sum of a block's rows", "__syncthreads(); if (threadIdx.y >= half) continue;", "if (threadIdx.y >= half) continue;", VALUES),
    Mutant("backward: last block's sums left out", "terms[i] = row + i * blockDim.y < partial_rows", "terms[i] = row + i * blockDim.y < partial_rows - 1", VALUES),
    Mutant("backward: barrier left out of the sum of all blocks", "__syncthreads(); if (threadIdx.y < half) *own += own[half * blockDim.x];", "if (threadIdx.y < half) *own += own[half * blockDim.x];", VALUES),
    Mutant("backward: gradients of no rows not written", "return launch_kernel(sum_partials, launch, context, call, nullptr, 0);", "return cudaSuccess;", "no_rows"),
    # ---- Convolution ----
    Mutant("convolution: taps in another order", "taps = 7 - i / 2 / L::kChunks", "taps = i / 2 / L::kChunks", CONVOLUTION),
    Mutant("convolution: no padding before the first depth", "d >= 0 && d < call.depth", "d < call.depth", CONVOLUTION),
    Mutant("convolution: no padding below the last line", "h >= 0 && h < call.height", "h >= 0 && h <= call.height", CONVOLUTION),
    Mutant("convolution: last line not written", "line_of(row) < call.height - line", "line_of(row) < call.height - line - 1", CONVOLUTION),
    Mutant("convolution: eps dropped", "(1.0f / kOutWidth) + eps", "(1.0f / kOutWidth)", CONVOLUTION),
    Mutant("convolution: input replaced while it is read", "if (round.index > 0) named_barrier_wait(kEmpty + round.group, 2 * kGroupThreads);", "", CONVOLUTION),
    Mutant("convolution: rstd of a thread's first row saved for all", "kOutWidth] = rstd[row];", "kOutWidth] = rstd[0];", CONVOLUTION),
    Mutant("convolution: arithmetic's NaN becomes a number", "if (isnan(__uint_as_float(x))) return 0x7fc00000;", "", "conv_of_nan", emulated="its test has no GPU"),
    Mutant("convolution: NaN of the convolution's bias is lost", "weight += bias - bias;", "", "conv_of_nan", emulated="its test has no GPU"),
    Mutant("convolution: float32 always in TF32", "call.tf32 = takes_tf32()", "call.tf32 = true", CONVOLUTION),
    # ---- Binding ----
    Mutant("binding: weight's strides ignored, forward", "const Tensor x = input.contiguous(), w = contiguous(weight)", "const Tensor x = input.contiguous(), w = present(weight) ? *weight : Tensor()", "stride"),
    Mutant("binding: weight's strides ignored, backward", "stats = statistics.contiguous(); const Tensor w = contiguous(weight)", "stats = statistics.contiguous(); const Tensor w = present(weight) ? *weight : Tensor()", "stride"),
    Mutant("binding: strides of statistics ignored", "stats = statistics.contiguous()", "stats = statistics", "changed_since"),
    Mutant("binding: grad_output's strides ignored", "dy = aligned(grad_output, 4)", "dy = grad_output", "stride"),
    Mutant("binding: float32 bias without weight", "weight.defined() ? weight : bias;", "weight;", VALUES),
    Mutant("binding: device not made current", "const c10::cuda::CUDAGuard guard(input.device()); Tensor scratch;", "Tensor scratch;", "not_current"),
    Mutant("binding: device not made current, convolution", "const c10::cuda::CUDAGuard guard(input.device()); return fits_convolution", "return fits_convolution", "not_current", emulated="GPUs of one machine are alike"),
    Mutant("binding: default stream", "allocate_scratch, c10::cuda::getCurrentCUDAStream()", "allocate_scratch, nullptr", "current_stream and (registers or pipeline)"),
    Mutant("binding: bias saved in weight's place", "{output}, backward, input, weight, bias);", "{output}, backward, input, bias, bias);", "vmap or " + ASKED_FOR),
    Mutant("binding: wanted gradients of weight and bias swapped", "task_should_compute_output(i);", "task_should_compute_output(i == 0 || i > 2 ? i : 3 - i);", ASKED_FOR),
    Mutant("binding: gradient of bias alone", "if (torch::autograd::compute_requires_grad(input, weight, bias)) { return std::get<0>", "if (torch::autograd::compute_requires_grad(input, weight)) { return std::get<0>", ASKED_FOR),
    Mutant("binding: tangent of grad_output dropped", "if (has_tangent(grad_output, input, weight, bias) ||", "if (has_tangent(input, weight, bias) ||", "forward_over_reverse"),
    Mutant("binding: input not cast under autocast", "op.call(cast(input)", "op.call(input", "autocast"),
    Mutant("binding: weight on another device", "check_device(name, t, input); TORCH_CHECK", "TORCH_CHECK", "bad_dtypes_and_devices"),
    Mutant("binding: backward checks nothing", "check_tensor(\"grad_output\", grad_output, input.sym_sizes(), input.scalar_type(), input); check_tensor(\"statistics\", statistics, {2, row_count(input, normalized_shape)}, at::kFloat, input);", "", "backward_checks"),
    Mutant("binding: backward of the convolution checks nothing", "check_tensor(\"grad_output\", grad_output, output_sizes(input), input.scalar_type(), input); const", "const", "backward_checks"),
    Mutant("binding: shape of grad_output and statistics", "t.sym_sizes().equals(sizes)", "true", "backward_checks"),
    Mutant("binding: dtype of grad_output and statistics", "t.scalar_type() == dtype, \"Expected", "true, \"Expected", "backward_checks"),
    Mutant("binding: device of grad_output and statistics", "check_device(name, t, input); }", "}", "backward_checks"),
    Mutant("binding: copies what is copied on write", "t.unsafeGetTensorImpl()->data()", "t.data_ptr()", "copy_on_write"),
    Mutant("binding: gradients of the batch's last part only", "grad_conv_weight.add_(part_conv_weight)", "grad_conv_weight.copy_(part_conv_weight)", CONVOLUTION),
    Mutant("binding: convolution's input taken to be aligned", "% boundary == 0 ? x : x.clone()", "% boundary == 0 ? x : x", CONVOLUTION),
    Mutant("meta: strides of input", "return at::empty_symint(sizes, options)", "return at::empty_like(like, options)", "fake"),
    Mutant("meta: depth and height swapped", "input.sym_size(2) * 2, input.sym_size(3) * 2", "input.sym_size(3) * 2, input.sym_size(2) * 2", "fused_conditions"),
    # ---- Build ----
    Mutant("build: sm_90 instead of sm_90a", '"sm_90a" if code == "sm_90" else code', "code", "what_is_compiled"),
    Mutant("build: CUDA 11 for Hopper", "if _number(code) >= 90 else", "if _number(code) > 90 else", "what_is_compiled"),
    Mutant("build: Turing left out", "if _number(code) >= 75}", "if _number(code) > 75}", "what_is_compiled"),
    Mutant("build: Volta taken", "if _number(code) >= 75}", "if _number(code) >= 70}", "what_is_compiled"),
    Mutant("build: the list read beside a GPU", "if gpus: return sorted(", 'if gpus and not os.environ.get("TORCH_CUDA_ARCH_LIST"): return sorted(', "what_is_compiled"),
    Mutant("build: a list of nothing", 'names in ([], ["native"])', "names == []", "what_is_compiled"),
    Mutant("build: a list that ends with a separator", 'TORCH_CUDA_ARCH_LIST=";".join(names)', 'TORCH_CUDA_ARCH_LIST=os.environ["TORCH_CUDA_ARCH_LIST"]', "what_is_compiled"),
    Mutant("build: hidden GPUs count", 'if not re.match(r"\\s*\\+?\\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0")): return []', "", "without_initializing"),
    Mutant("build: GPUs that this process may not use count", "ctypes.byref(gpu)) != 0: continue", "ctypes.byref(gpu)) < 0: continue", "without_initializing"),
    Mutant("build: a driver that is too old", "capabilities if driver.value // 1000 >= _version(torch.version.cuda)[0] else []", "capabilities", "without_initializing"),
    Mutant("build: no NVML, no GPU", "devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)", "devices = range(0)", "without_initializing"),
    Mutant("build: one folder for all machines", '"\\n".join([*machine, *_CUDA_FLAGS', '"\\n".join([*_CUDA_FLAGS', "one_namespace"),
    Mutant("build: a namespace for each machine", "(CUDA_SOURCE + CPP_SOURCE).encode()", '(CUDA_SOURCE + CPP_SOURCE + os.environ.get("TORCH_CUDA_ARCH_LIST", "")).encode()', "traced_program"),
    Mutant("build: a library without the GPU's code", "if {*codes} <= {*", "if {*codes} & {*", "container"),
    Mutant("build: a container's library not looked for", 'if {*codes} <= {*os.path.basename(folder).split("-")}', 'if codes == os.path.basename(folder).split("-")[1:]', "container"),
    Mutant("build: any library that has the code", 'key=lambda folder: folder.count("-")', 'key=lambda folder: -folder.count("-")', "container"),
    Mutant("build: library cut short is loaded", "complete.read_bytes() == size", "complete.read_bytes()", "not_whole"),
    Mutant("build: library that others can write is loaded", "and not status.st_mode & 0o002", "", "only_trusted"),
    Mutant("build: library that a group can write is not loaded", "not status.st_mode & 0o002", "not status.st_mode & 0o022", "only_trusted"),
    Mutant("build: links followed", "status = os.lstat(path)", "status = os.stat(path)", "only_trusted"),
    Mutant("build: another user's library is loaded", "status.st_uid in (os.getuid(), 0) and", "", "only_trusted"),
    Mutant("build: root's library is not loaded", "status.st_uid in (os.getuid(), 0)", "status.st_uid == os.getuid()", "only_trusted"),
    Mutant("build: parent not looked at", "elif mode & 0o002 and not mode & 0o1000:", "elif False:", "parent_of_the_cache"),
    Mutant("build: sticky parent refused", "mode & 0o002 and not mode & 0o1000", "mode & 0o002", "parent_of_the_cache"),
    Mutant("build: compiles where nothing can be loaded", "os.statvfs(folder).f_flag & os.ST_NOEXEC", "False", "without_execution"),
    Mutant("build: a folder named ~", 'if given.startswith("~"):', "if False:", "no_home_folder"),
    Mutant("build: folder that others can write", "os.makedirs(folder, 0o755, exist_ok=True)", "os.makedirs(folder, exist_ok=True)", "built_once"),
    Mutant("build: lock that others can hold", "functools.partial(os.open, mode=0o600)", "functools.partial(os.open, mode=0o644)", "built_once"),
    Mutant("build: lock taken without waiting", "fcntl.flock(lock, fcntl.LOCK_EX) return lock", "return lock", "the_lock"),
    Mutant("build: what was left is built upon", "shutil.rmtree(folder, ignore_errors=True)", "", "not_whole"),
    Mutant("build: a library that cannot be loaded is kept", 'os.remove(f"{folder}/complete")', "None", "cannot_be_loaded"),
    Mutant("build: toolkit of another CUDA", "_version(release)[0] == major and", "", "toolkit"),
    Mutant("build: nvcc that does not run", "with contextlib.suppress(OSError): done =", "with contextlib.suppress():\n        done =", "toolkit"),
    Mutant("build: compilers outlive the process", "prctl(1, 9)", "prctl(1, 0)", "end_with_the_process"),
    Mutant("build: compilers outlive ninja's parent", "preexec_fn=lambda: prctl(1, 15)", "", "end_with_the_process"),
    Mutant("build: PATH left changed", "restored.callback(os.environ.__setitem__, name, os.environ[name])", "pass", "reaches_the_user"),
    Mutant("build: CUDA_HOME left changed", 'restored.callback(setattr, cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)', "", "left_out"),
    Mutant("build: the second library without its macro", '["-DLAYERNORM_WITH_EPILOGUE"], "CUDA', '[], "CUDA', "second_library"),
    Mutant("build: Dynamo traces it", "_dynamo_marked_constant = True", "_dynamo_marked_constant = False", "first_use"),
    Mutant("binding: takes an unknown activation", "activation < static_cast<int64_t>(Activation::Count)", "true", "only_what_its_library_has"),
    Mutant("binding: the import's library drops an activation", "kFused || (activation == 0 && scale == 1)", "true", "only_what_its_library_has"),
    Mutant("build: a failed build is not tried again", "cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)", "", "reaches_the_user"),
    Mutant("build: PyTorch's warning shown", "lambda record: False", "lambda record: True", "no_gpu_is_not_shown"),
    Mutant("build: no lock between copies of the file", "with _process_lock: return", "if True: return", "threads_import_copies"),
    Mutant("build: nvcc's error swallowed", "(done.stderr if done.returncode else \"\")", "\"\"", "error_of_nvcc"),
    Mutant("build: a relative CUDA_HOME", "os.path.abspath(home) for home in", "home for home in", "relative_cuda_home"),
    Mutant("build: a wrapper's toolkit not looked for", "yield top and top[1]", "yield None", "wrapper_on_path"),
    Mutant("build: no stderr", "if sys.stderr is None:", "if False:", "without_stderr"),
    Mutant("build: a library that was not written", "if not os.path.exists(_library(folder)):", "if False:", "replaced_load_inline"),
    Mutant("build: headers by the look of load_inline", 'if torch.__version__ >= "2.8" else {}', 'if "no_implicit_headers" in cpp_extension.load_inline.__code__.co_varnames else {}', "replaced_load_inline"),
    # ---- Python ----
    Mutant("Python: scale dropped on the CPU", "return y if scale == 1 else y * scale", "return y", ACTIVATION),
    Mutant("Python: overrides not asked", "has_torch_function_variadic(input, weight, bias):", "False:", "torchscript or overrides"),
    Mutant("Python: types of arguments not asked", "elif not _has_usual_types(normalized_shape, weight, bias, eps):", "elif False:", "bad_input"),
    Mutant("Python: scale of any type", "not isinstance(scale, numbers.Real):", "False:", "scale_is_a_number"),
    Mutant("Python: float64 for the kernels", "and input.dtype is not torch.float64", "", "float64_is_pytorchs"),
    Mutant("Python: the two forms of GELU swapped", "name: number for number", "name: number * 2 % 3 for number", VALUES),
    Mutant("Python: nothing is left to Inductor", "if _is_left_to_pytorch(input, normalized_shape, eps):", "if False:", "left_to_inductor"),
    Mutant("Python: rows of any alignment are left to Inductor", "and row_bytes % 16 == 0", "", "left_to_inductor"),
    Mutant("Python: rows of any length are left to Inductor", "row_bytes <= 16384 and", "", "left_to_inductor"),
    Mutant("Python: rows under autocast are like others", "if torch.is_autocast_enabled(): return columns <= 16384", "", "left_to_inductor"),
    Mutant("Python: exported programs have our ops", "if _is_exporting() or not isinstance(eps, (float, int)):", "if not isinstance(eps, (float, int)):", "recorded_programs"),
    Mutant("Python: exported models have our convolution", "and not _is_exporting()", "", "recorded_programs"),
    Mutant("Python: traced programs have our ops", "or _tracing_state() is not None:", ":", "recorded_programs"),
    Mutant("Python: NumPy's eps for an op", "or not isinstance(eps, (float, int)):", ":", "arguments_of_numpy"),
    Mutant("Python: the reference's names are not known", 'if f"{prefix}ln.{name}" in state_dict:', "if False:", "reference_model"),
    Mutant("Python: nn.LayerNorm is looked up", "_TorchLayerNorm = nn.modules.normalization.LayerNorm", "_TorchLayerNorm = nn.LayerNorm", "somebody_assigns"),
    Mutant("Python: a reloaded file does not know its class", "or is_reloaded", "", "reloaded"),
    Mutant("vmap: weights along the wrong dimension", "i < row_dims && batch_level(t) == level", "i <= row_dims && batch_level(t) == level", "vmap"),
    Mutant("vmap: statistics are constants", "is_differentiated(input) ? Tensor() : statistics", "statistics", "mapped_gradients"),
    Mutant("double backward: the covariance is dropped", "xhat, covariance * rstd * rstd, -1)", "xhat, covariance * 0, -1)", "second_derivatives"),
    Mutant("double backward: of grad_bias", "if (wanted[0] && g_db.defined()) add_to_dy(g_db.expand_as(xhat));", "", "second_derivatives"),
    Mutant("double backward: statistics are constants", "at::GradMode::is_enabled() ? composed_normalized(x, eps) : saved_normalized(x, statistics)", "saved_normalized(x, statistics)", "third_derivatives"),
    Mutant("double backward: of weight, the first rows only", "first == 0 ? parts[2] : results[2] + parts[2]", "first == 0 ? parts[2] : results[2]", "second_derivatives"),
    Mutant("double backward: composed", "if (!differentiable) return gradients; const auto backward", "if (differentiable) return composed_backward(grad_output, input, shape, {}, weight, bias, eps, activation, scale, output_mask); const auto backward", "first_order"),
    Mutant("Python: subclasses replaced, too", "elif cls in classes or is_reloaded:", "elif issubclass(cls, classes):", "replace_layer_norm"),
    Mutant("Python: modules with a forward of their own replaced, too", '"forward" in vars(child) or', "", "replace_layer_norm"),
    Mutant("Python: PyTorch's classes replaced, too", '(cls is not _TorchLayerNorm and name.startswith("torch."))', "False", "replace_layer_norm"),
    Mutant("Python: convolution of any stride and padding", "and (conv.stride, conv.padding, conv.output_padding) == ((2, 2, 2), (1, 1, 1), (0, 0, 0))", "", "fused_conditions"),
    Mutant("Python: convolution of any dilation and groups", "and (conv.dilation, conv.groups, norm.normalized_shape) == ((1, 1, 1), 1, (64,))", "", "fused_conditions"),
    Mutant("convolution: TF32 without cuDNN", "at::globalContext().userEnabledCuDNN() &&", "", "setting_of_convolutions"),
    Mutant("Python: hooks left out", 'getattr(module, f"_{hooks}") or', "", "fused_conditions or with_hooks"),
    Mutant("Python: global hooks left out", 'or getattr(nn.modules.module, f"_global_{hooks}")', "", "with_hooks"),
    Mutant("Python: patched forwards left out", 'and "forward" not in vars(module) and cls.forward is _FORWARDS[cls]', "", "with_hooks"),
    # ---- What the suite once let pass ----
    Mutant("composed formula: eps of 1e-5", "(row_mean(distance * distance) + eps).rsqrt();", "(row_mean(distance * distance) + 1e-5).rsqrt();", "second_derivatives or third_derivatives or functional_transforms or forward_mode"),
    Mutant("vmap with weights of its own: eps of 1e-5", "s) { if constexpr (SAVE_STATISTICS) { std::tie(output, statistics) = op.call(x, normalized_shape, w, b, eps, act, s); } else { output = op.call(x, normalized_shape, w, b, eps, act, s); }", "s) { if constexpr (SAVE_STATISTICS) { std::tie(output, statistics) = op.call(x, normalized_shape, w, b, 1e-5, act, s); } else { output = op.call(x, normalized_shape, w, b, 1e-5, act, s); }", "vmap"),
    Mutant("composed convolution: scale of 1", "return op.call(y, {64}, weight, bias, eps, kGelu, scale)", "return op.call(y, {64}, weight, bias, eps, kGelu, 1)", "conv_double_backward or conv_forward_mode"),
    Mutant("forward mode: input's tangent only", "if (has_tangent(input, weight, bias)) { return composed", "if (has_tangent(input)) { return composed", "forward_mode"),
    Mutant("autocast: weight not cast", "cast(weight), cast(bias)", "weight, cast(bias)", "autocast"),
    Mutant("registers, backward: offset of 32 bits", "static_cast<T*>(call.grad_input) + (row * cols + columns.packs[0].col)", "static_cast<T*>(call.grad_input) + int(row * cols + columns.packs[0].col)", "2_to_the_31"),
    Mutant("joint: offset of 32 bits", "return row * call.cols + first_col + stage", "return row * int(call.cols) + first_col + stage", "2_to_the_31"),
    Mutant("refused launches leave their error behind", "error != cudaErrorNotSupported) return false; cudaGetLastError();", "error != cudaErrorNotSupported) return false;", "test_values[ and refusing", emulated="a GPU that refuses (MPS) is not there"),
    Mutant("backward: one set of slots", "combine_row(sums, slots[turn]);", "combine_row(sums, slots[0]);", VALUES, emulated="no warp is ever so far ahead there"),
    Mutant("sums over rows: not waited for", "wait_for_previous(); float sum = 0; if (grad", "float sum = 0; if (grad", VALUES, emulated="seldom begins so early"),
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
    tests = ON_THE_CPU.get(mutant.tests, mutant.tests)
    return mutant._replace(tests=tests, mark="emulated" if is_compiled(mutant, source) else "")


def is_compiled(mutant, source):
    """Whether it is a bug of the kernels or of the binding."""
    try:
        return compiled_sources(source) != compiled_sources(mutated(mutant, source))
    except (ValueError, SyntaxError):  # Runner.mutant says so
        return False


def check(mutants):
    """Prints what is wrong with the table; returns how many mutants that concerns."""
    source = (ROOT / SOURCE).read_text()
    tests = "".join(path.read_text() for path in (ROOT / TESTS).glob("*.py") if path != Path(__file__).resolve())
    wrong = 0
    for mutant in mutants:
        try:
            mutated(mutant, source)
            words = set(re.findall(r"\w+", f"{mutant.tests} {ON_THE_CPU.get(mutant.tests) or ''}")) - {
                "and",
                "or",
                "not",
            }
            unknown = sorted(word for word in words if re.sub(r"_\d+$", "", word) not in tests)
            if unknown:
                raise ValueError(f"{TESTS} has no {', '.join(unknown)}")
            if mutant.emulated and not is_compiled(mutant, source):
                raise ValueError("it is no bug of the kernels, and only these are emulated")
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
    def __init__(self, work, jobs, selection=("--full",)):
        self.work = work
        self.selection = selection
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
        for name in (TESTS, ".bench"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / SOURCE).write_text(text)
        return folder

    def environment_of(self, folder, mark):
        environment = {**self.environment, "TORCH_EXTENSIONS_DIR": str(folder / "cache")}
        if mark != "not emulated":  # nothing is compiled for a GPU
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment.pop("TORCH_CUDA_ARCH_LIST", None)
        return environment

    def build(self, folder, mark):
        """What the compiler says where it fails, else nothing."""
        code = "import layernorm_inline"
        if mark == "emulated":
            code = (
                "import sys; sys.path.insert(0, '.tests'); import emulator; emulator.build_kernels();"
                "emulator.build_kernels(macros=tuple(emulator.EPILOGUE)); emulator.load_module()._load_epilogue()"
            )
        with self.builds:
            command = ["nice", sys.executable, "-c", code]
            status, output = run(command, folder, self.environment_of(folder, mark), LONGEST, LONGEST)
        errors = re.findall(r"^.*\berror\b.*$", output, re.M | re.I) or [output.strip().split("\n")[-1]]
        return "" if status == 0 else errors[0][-200:]

    def test(self, folder, mark, expression, quiet, *options):
        devices = self.places.get()
        environment = self.environment_of(folder, mark)
        if devices and mark == "not emulated":
            environment["CUDA_VISIBLE_DEVICES"] = devices
        command = [
            sys.executable,
            "-m",
            "pytest",
            *self.selection,
            "-v",
            "--tb=no",
            "-rfE",
            "-p",
            "no:cacheprovider",
            *options,
        ]
        command += ["--rootdir=.", f"--basetemp={folder / 'temp'}", TESTS, "-k", expression, "-m", mark]
        result = run(command, folder, environment, quiet, LONGEST)
        self.places.put(devices)
        return result

    def without(self, marks):
        """Builds the source as it is, for tests with these marks."""
        self.unchanged = self.folder("without a bug", self.source)
        error = "".join(self.build(self.unchanged, mark) for mark in marks)
        self.built.set()
        return error

    def copy_library(self, folder):
        self.built.wait()
        if (self.unchanged / "cache").exists():
            shutil.copytree(self.unchanged / "cache", folder / "cache")

    def baseline(self, part, mark, expression):
        """The tests of the expression without a bug: ("green", what ran) or ("red", what fails)."""
        folder = self.folder(f"baseline {part}", self.source)
        self.copy_library(folder)
        status, output = self.test(folder, mark, expression, LONGEST)
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
        if error := self.build(folder, mutant.mark):
            return "does not build", error
        end, how = verdict(*self.test(folder, mutant.mark, mutant.tests, mutant.quiet, "-x"))
        shutil.rmtree(folder)
        if end == "survived" and mutant.equivalent:
            return "equivalent", mutant.equivalent
        if end == "survived" and mutant.mark != "emulated" and not self.gpus:
            return "not tried", "there is no GPU here, and the other tests do not see it"
        return end, how


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose names contain one of these")
    parser.add_argument("--cpu", action="store_true", help="bugs of the kernels: tests on emulated GPUs")
    parser.add_argument("--short", action="store_true", help="only the tests that run without --full")
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
    if arguments.short:
        mutants = [m._replace(tests="test", quiet=LONGEST) for m in mutants]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.old}\n    {mutant.new or '(nothing)'}")
            print(f"    -m '{mutant.mark}' -k '{mutant.tests}'" if mutant.tests else "    needs a GPU")
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

    runner = Runner(work, arguments.jobs, () if arguments.short else ("--full",))
    # What is narrow first: a test runs once.
    expressions = sorted({(m.mark, m.tests) for m in mutants if m.tests}, key=lambda e: len(e[1]), reverse=True)
    ends = []
    with ThreadPoolExecutor(1 + len(expressions) + len(mutants)) as pool:
        unchanged = pool.submit(runner.without, sorted({mark for mark, _ in expressions}))
        futures = {}
        for i, (mark, expression) in enumerate([] if arguments.green else expressions):
            before = [e for of, e in expressions[:i] if of == mark]
            rest = " and not ".join(f"({e})" for e in [expression, *before])
            futures[pool.submit(runner.baseline, i, mark, rest)] = f"without a bug: -m '{mark}' -k '{expression}'"
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
