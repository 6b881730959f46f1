"""Checks that the tests detect bugs: puts one at a time into layernorm_inline.py, and runs the tests that must fail.

    python .tests/mutants.py                  all mutants, on the GPU
    python .tests/mutants.py --only TEXT...   only mutants whose names contain one of the texts
    python .tests/mutants.py --cpu            kernels and binding on emulated GPUs, as on a machine without a GPU
    python .tests/mutants.py --check          builds nothing: checks that every bug can be applied and has tests

The same tests also run without a bug, and must pass. The exit status is 0 if every mutant was killed, that is, a test
failed, or survived for a reason that the table gives. Without a GPU, it is 1 for mutants that need one ("not tried").
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = "layernorm_inline.py", ".tests"
TESTS_ON_GPU = 12  # processes: most of their time is spent on the CPU
ONE_TEST, ALL_TESTS = 240, 600  # seconds; a test that takes longer fails, because it hangs

# Expressions for pytest -k. A case name begins with the GPU and the kernel families of forward and backward, such as
# hopper_2-registers-pipelined or cuda-registers-registers.
VALUES = "test_values[ and registers"
PIPELINED = "test_values[ and pipelined and not blackwell and not ada or random_calls"
GRID_RESIDENT = "grid_resident"
TWO_PASS = "test_values[ and two_pass or random_calls or outliers"
SHORT_CONSTANT = "give_bias and registers"
ACTIVATION = "test_activation or test_values[ and registers-registers and not mps"
CONVOLUTION = "test_conv and not compiled"
REPEATED = "streams_and_threads or graph_of_a_training_step or test_values[ and hopper_8"
OUTPUT_MASK = "output_mask"
BATCHES = "same_bits_in_every_batch"
TRANSFORMS = "test_every_transform and not fake"
BITS = "test_the_bits"
CONVERTED = "autograd converts the gradients that a node returns"
LAUNCHES = "launches_at_every_condition"
PLANNED = "a real GPU is one of the emulated ones"  # whose sizes and architectures the list of launches needs
BEFORE_HOPPER = "older_architecture or test_values[ and (ampere or ada)"

# Expression -> the one that replaces it on emulated GPUs; None if no test without a GPU detects the bug.
ON_THE_CPU = {
    "2_to_the_31": None,  # needs too much memory
    "not_current": "test_values[ and registers-registers and hopper_2 or test_conv_values",
    "current_stream and (registers or pipelined)": "test_values[ and registers-registers and hopper_2",
    "rounds_like_pytorch": None,  # compares with cuDNN's kernel
    "fake": None,  # needs kernels that are compiled for a GPU
    "fused_conditions": None,
    "rstd_is_accurate": None,  # the emulated rsqrtf is exact
}  # fmt: skip


class Mutant(NamedTuple):
    """A bug: the text `old` is replaced by `new`."""

    name: str
    old: str  # must occur exactly once; line breaks and indentation do not matter
    new: str
    tests: str  # the tests that must fail: an expression for pytest -k
    equivalent: str = ""  # the reason why it may survive
    emulated: str = ""  # the reason why a real GPU does not show it, so that it is tested on emulated GPUs
    mark: str = "not emulated"  # an expression for pytest -m


# ---- The bugs. If code has changed, replace the old text by the shortest text that occurs once. ----

MUTANTS = [
    Mutant("columns: last element before the first boundary left out", "(thread < V ? begin : row_cols)", "(thread < V ? begin - 1 : row_cols)", VALUES),
    Mutant("columns: last single element left out", "(thread < V ? begin : row_cols)", "(thread < V ? begin : row_cols - 1)", VALUES),
    Mutant("forward: input off a 16-byte boundary not copied", "const Tensor x = aligned(input), w = aligned(weight), b = aligned(bias)", "const Tensor x = input.contiguous(), w = aligned(weight), b = aligned(bias)", VALUES),
    Mutant("unaligned rows: weight and bias assumed to be aligned", "if (UNALIGNED && begin % V != 0) {", "if (false) {", VALUES),
    Mutant("forward: bias off a 16-byte boundary not copied", "const Tensor x = aligned(input), w = aligned(weight), b = aligned(bias)", "const Tensor x = aligned(input), w = aligned(weight), b = is_given(bias) ? bias->contiguous() : Tensor()", VALUES),
    Mutant("the switch against deadlocks ignored", "if (shape.kind == kCooperative && !allows_cooperative) return cudaErrorNotSupported;", "", "switch_against_deadlocks", emulated="its test runs on emulated GPUs only"),
    Mutant("the switch against deadlocks is on by default", "return value == nullptr ||", "return value != nullptr &&", "cases_launch_expected"),
    Mutant("backward: bias off a 16-byte boundary not copied", "x = aligned(input), stats = aligned(statistics), w = aligned(weight), b = aligned(bias)", "x = aligned(input), stats = aligned(statistics), w = aligned(weight), b = is_given(bias) ? bias->contiguous() : Tensor()", VALUES),
    Mutant("backward: grad_output off a 16-byte boundary not copied", "dy = aligned(grad_output)", "dy = grad_output.contiguous()", VALUES),
    Mutant("combine: weighted by the count of the wrong partner", "fraction = all.count * fast_reciprocal(", "fraction = more.count * fast_reciprocal(", TWO_PASS),
    Mutant("combine: count of a part left out", "parts[n].y + counts[n] * delta * delta", "parts[n].y + delta * delta", PIPELINED),
    Mutant("combine: warps without columns are counted", "return {count, total.x, total.y};", "return {max(count, 1.0f), total.x, total.y};", TWO_PASS, "on a GPU with 100 SMs, only 16-bit rows of 10^6 columns have such warps, and their count is then off by only seven"),
    Mutant("a NaN variance becomes 0", "return m2 < 0 ? 0 : m2;", "return fmaxf(m2, 0);", "saved_statistics"),
    Mutant("sum over a block: barrier left out", "__syncthreads(); const int warp = threadIdx.x % WARPS;", "const int warp = threadIdx.x % WARPS;", VALUES),
    Mutant("mean of equal float16 numbers is rounded as for bfloat16", "kMaxExactCols = 1 << 13", "kMaxExactCols = 1 << 16", "give_bias"),
    Mutant("rstd of float32 is approximate", ": __frsqrt_rn(variance)", ": rsqrtf(variance)", "rstd_is_accurate"),
    Mutant("scale dropped, forward", "z = z * call.scale", "z = z", ACTIVATION),
    Mutant("scale dropped, backward", "grad = grad * call.scale", "grad = grad", ACTIVATION),
    Mutant("derivative of GELU's tanh form without the factor 3", "0.21406444881780076f", "0.07135481627260025f", ACTIVATION),
    Mutant("registers: eps dropped", "rstd[r] = rstd_of<T>(m2, call.per_col, call.eps)", "rstd[r] = rstd_of<T>(m2, call.per_col, 0)", VALUES),
    Mutant("registers: RMS norm for 16-bit types", "mean[r] = rounded_quotient(mean[r], float(cols), per_col);", "mean[r] = 0;", VALUES),
    Mutant("registers: a thread's last row not written", "if (r >= team_rows) continue; Out* to", "if (r > 0 && r + 1 >= rows) continue; Out* to", VALUES),
    Mutant("registers: last incomplete group of rows left out", "batches = ceil_div(call.rows, int64_t(ROWS) << step_log2)", "batches = std::max<int64_t>(1, call.rows / (int64_t(ROWS) << step_log2))", VALUES),
    Mutant("registers: one pack too many", "return first + i * stride < end;", "return first + i * stride <= end;", VALUES),
    Mutant("registers: mean of a thread's first row saved for all", "save_statistics(call, row + r * step, mean[r], rstd[r])", "save_statistics(call, row + r * step, mean[0], rstd[r])", VALUES),
    Mutant("registers: a row past the end is written", "if (r >= team_rows) continue; Out* to", "Out* to", VALUES, emulated="on a real GPU, only memcheck shows it"),
    Mutant("registers: a thread's rows are all its first row", "f(i, r, input + r * row_stride + i * stride)", "f(i, r, input + i * stride)", VALUES),
    Mutant("registers: 32-bit offset", "input = static_cast<const T*>(call.input) + row * cols; Out* output", "input = static_cast<const T*>(call.input) + int(row * cols); Out* output", "2_to_the_31"),
    Mutant("pipelined: parity kept where the ring wraps", "RingPosition{next - slots, parity ^ 1}", "RingPosition{next - slots, parity}", PIPELINED),
    Mutant("pipelined: loader does not wait for a free stage", "barrier_wait(&control.empty[slot.index], slot.parity ^ 1);", ";", PIPELINED),
    Mutant("pipelined: eps dropped", "(total.y, call.per_col, call.eps)", "(total.y, call.per_col, 0)", PIPELINED),
    Mutant("pipelined: RMS norm", "row_stats[slot] = {total.x, rstd};", "row_stats[slot] = {0, rstd};", PIPELINED),
    Mutant("pipelined: last block's statistics left out", "counts[n] = columns_of_slice(cols, plan.slice_columns, peer + n * 32)", "counts[n] = columns_of_slice(cols, plan.slice_columns, peer + 1 + n * 32)", PIPELINED),
    Mutant("pipelined: last column left out", "min(slice, cols - rank * slice)", "min(slice, cols - 1 - rank * slice)", PIPELINED),
    Mutant("pipelined: 32-bit offset", "int64_t(row) * int(call.cols) + first", "row * int(call.cols) + first", "2_to_the_31"),
    Mutant("pipelined: more blocks per row than SMs", "std::min(device.sms, kMaxBlocksPerRow);", "kMaxBlocksPerRow;", TWO_PASS),
    Mutant("pipelined, backward: mean and rstd of the group's first row for all rows", "{block.call.mean[row], block.call.rstd[row]}", "{block.call.mean[blockIdx.y], block.call.rstd[blockIdx.y]}", PIPELINED),
    Mutant("pipelined, before Hopper: last copies not counted", "barrier_arrive_with_copies(full);", "barrier_arrive(full);", BEFORE_HOPPER),
    Mutant("pipelined, before Hopper: last units not copied", "int offset = 16 * thread; offset < copy.bytes;", "int offset = 16 * thread; offset < copy.bytes - 16;", BEFORE_HOPPER),
    Mutant("pipelined, backward: mean(wdy) dropped for 16-bit types", "constant = -means.wdy - stats.mean * x_factor", "constant = -stats.mean * x_factor", PIPELINED),
    Mutant("pipelined, backward: sums of many rows keep only the last 256 rows", "is_first ? sums[i] : sums[i] + widened(load<float, V>(to))", "sums[i]", "gradients_of_many_rows", emulated="no test on a real GPU has enough long rows"),
    Mutant("backward: all rows of a thread added to one sum", "kRowsPerSum = 256", "kRowsPerSum = 1 << 30", "gradients_of_many_rows", emulated="no test on a real GPU has enough long rows"),
    Mutant("backward: partial sums that nobody needs, registers", "const int64_t partial_rows = needs_gradient_sums(call) ? p.blocks : 0;", "const int64_t partial_rows = p.blocks;", "allocates_no_sums"),
    Mutant("backward: partial sums that nobody needs", "return needs_gradient_sums(call) && (groups > 1", "return (groups > 1", "allocates_no_sums"),
    Mutant("backward: no partial sums for several groups of few rows", "(groups > 1 || call.rows > kRowsPerSum) ? groups : 0", "call.rows > kRowsPerSum ? groups : 0", VALUES),
    Mutant("batch invariance: the ladder reads the number of rows", "kBatchInvariant ? 4096 : call.rows", "call.rows", BATCHES),
    Mutant("batch invariance: columns depend on where a row begins", "kHasEdges && !kBatchInvariant ? min(row_cols", "kHasEdges ? min(row_cols", BATCHES),
    Mutant("batch invariance: words in mid-word loaded as words", "if (begins_mid_word) { // All loads", "if (false) { // All loads", BATCHES),
    Mutant("batch invariance: words in mid-word stored as words", "Out* to = output + (offset + r * row_stride); if (begins_mid_word)", "Out* to = output + (offset + r * row_stride); if (false)", BATCHES),
    Mutant("batch invariance: the last pack of a row has no thread", "kBatchInvariant ? ceil_div(bytes, 16) : ", "", BATCHES),
    Mutant("batch invariance: more threads than the launch bound", "loads <= 2 * kMaxUnalignedRowThreads)", "loads <= 4 * kMaxUnalignedRowThreads)", BATCHES),
    Mutant("batch invariance: blocks per row depend on rows", "kForward && kBatchInvariant ? device.sms : ", "", BATCHES),
    Mutant("batch invariance: grid-resident kernel from four rows on", "if (kBatchInvariant || ", "if (", BATCHES),
    Mutant("batch invariance: the grid depends on rows", "Block::kForward && kBatchInvariant ? most_groups : ", "", "grid_of_blocks", emulated="a real GPU is never full"),
    Mutant("batch invariance: pieces depend on rows", "kForward && kBatchInvariant ? 16 : rows;", "rows;", BATCHES),
    Mutant("batch invariance: another copy's library is taken", ' + ("_batch_invariant" if _is_batch_invariant else "")', "", "name_of_the_ops"),
    Mutant("batch invariance: short rows left to Inductor", "if _is_batch_invariant: return False", "", "not_left_to_inductor"),
    Mutant("mailboxes: not emptied after an earlier call", "*mailbox_of(mailboxes, row, blockIdx.x) = kEmptyMailbox;", ";", REPEATED),
    Mutant("mailboxes: rows overlap if more than 16 blocks share one", "(blocks + 15) / 16 * 16", "16", PIPELINED),
    Mutant("grid-resident: last pack of a slice not written", "j * kBlockThreads<T> + block.thread < block.last_packs", "j * kBlockThreads<T> + block.thread < block.last_packs - 1", GRID_RESIDENT),
    Mutant("grid-resident: measures the previous stage", "block.stages + kStagesAhead<T>, plan.ring_slots)", "block.stages + kStagesAhead<T> - 1, plan.ring_slots)", GRID_RESIDENT),
    Mutant("grid-resident: statistics of the group's first row for all rows", "try_read(mailbox_of(mailboxes, row, 0)", "try_read(mailbox_of(mailboxes, blockIdx.y, 0)", GRID_RESIDENT),
    Mutant("grid-resident: statistics include those of the previous row", "moments = {}; if (lane == 0)", "if (lane == 0)", GRID_RESIDENT),
    Mutant("grid-resident: a ring one slot shorter than rule 1 allows", "p.ring_slots >= ahead + 2", "p.ring_slots >= ahead + 1", "plans_keep_their_rules", emulated="its test runs on emulated GPUs only"),
    Mutant("grid-resident: weight and bias of the last block not counted", "for (const int rank : {0, p.blocks_per_row - 1}) {", "for (const int rank : {0}) {", "plans_keep_their_rules", emulated="its test runs on emulated GPUs only"),
    Mutant("grid-resident: more blocks per row than one warp can read mailboxes of", "std::min<int64_t>(device.sms / groups, kMaxBlocksPerRow);", "device.sms / groups;", "plans_keep_their_rules", emulated="its test runs on emulated GPUs only"),
    Mutant("pipelined: rows of which only two stages fit are supported", "(3 * Block::kTensors)", "(2 * Block::kTensors)", "plans_keep_their_rules", emulated="its test runs on emulated GPUs only"),
    Mutant("two-pass: eps dropped", "(moments.m2, call.per_col, call.eps)", "(moments.m2, call.per_col, 0)", TWO_PASS),
    Mutant("two-pass: means of pieces left out", "all.mean = more.mean - delta * fraction;", "all.mean = -delta * fraction;", TWO_PASS),
    Mutant("two-pass: wrong count at the end of a row", "combine(moments, {float(count), origin + part.x, part.y})", "combine(moments, {float(V * kPacks), origin + part.x, part.y})", TWO_PASS),
    Mutant("two-pass: statistics read before they are written", "wait_for_previous(); const int64_t row = blockIdx.x; Stats stats", "const int64_t row = blockIdx.x; Stats stats", TWO_PASS),
    Mutant("two-pass, backward without grad_input: weight read before a kernel of the caller ends", "wait_for_previous(); const auto weight = columns.load_parameter(call, call.weight, 1);", "const auto weight = columns.load_parameter(call, call.weight, 1); wait_for_previous();", OUTPUT_MASK, emulated="on a real GPU, the kernel rarely starts that early"),
    Mutant("two-pass: statistics of a block's first row for all rows", "call.input, row), row_stats[row])", "call.input, row), row_stats[first_row])", TWO_PASS),
    Mutant("backward: mean(wdy) dropped for 16-bit types", "fmaf(-xhat[v], means.wdy_xhat, -means.wdy)", "(-xhat[v] * means.wdy_xhat)", VALUES),
    Mutant("backward: mean(wdy) dropped for float32", "(rounded_product(weight[v], grad_output[v]) - means.wdy - xhat[v] * means.wdy_xhat)", "(rounded_product(weight[v], grad_output[v]) - xhat[v] * means.wdy_xhat)", VALUES),
    Mutant("backward: last row left out of grad_weight", "pack.grads[0][v] += grad[v] * pack.xhat[r][v];", "if (row + r * row_distance != call.rows - 1) pack.grads[0][v] += grad[v] * pack.xhat[r][v];", VALUES),
    Mutant("backward, words: position of a row's start in a word ignored", "mid_word = kLoadsWords ? row * cols % 2 : 0", "mid_word = 0", VALUES),
    Mutant("backward, words: sums of the extra column lost", "gathered[pack.col + v] = pack.grads[n][v];", "if (pack.weight.kSize > 1) gathered[pack.col + v] = pack.grads[n][v];", VALUES),
    Mutant("backward: input off a 16-byte boundary not copied", "x = aligned(input), stats", "x = input.contiguous(), stats", VALUES),
    Mutant("backward, words: weight of inactive threads not set to 0", "if (kAddsZeros) packs[i].weight = {};", "", SHORT_CONSTANT, emulated="on a real GPU, a register rarely holds NaN by chance"),
    Mutant("backward, words: mean subtracted in inactive threads", "kAddsZeros && N > 1 ? next_mean[r] * float(pack.is_active) : next_mean[r]", "next_mean[r]", SHORT_CONSTANT),
    Mutant("backward, words: bias of the extra column lost", "store<float>(bias + pack.col, load_columns(pack, call.bias, 0));", "store<float>(bias + pack.col, pack.weight.kSize > 1 ? load_columns(pack, call.bias, 0) : decltype(pack.weight){});", VALUES),
    Mutant("backward: barrier left out of the sum of a block's rows", "__syncthreads(); if (threadIdx.y >= half) continue;", "if (threadIdx.y >= half) continue;", VALUES),
    Mutant("backward, words: an odd number of blocks", "if (sizeof(T) == 2 && V == 2) blocks += blocks % 2;", "", "odd_number_of_sms", emulated="needs an odd number of SMs"),
    Mutant("backward: a thread of the register kernels adds many rows", "blocks *= ceil_div(call.rows, blocks * rows * kRowsPerSum);", "", "many_rows", emulated="no test on a real GPU has enough rows"),
    Mutant("backward, two-pass: partial sums of earlier rows are overwritten", "const bool is_first = r == 0;", "const bool is_first = true;", "many_rows", emulated="no test on a real GPU has enough long rows"),
    Mutant("backward: last block's sums left out", "terms[i] = row + i * blockDim.y < partial_rows", "terms[i] = row + i * blockDim.y < partial_rows - 1", VALUES),
    Mutant("backward: barrier left out of the sum of all blocks", "__syncthreads(); if (threadIdx.y < half) *own_sum += own_sum[half * blockDim.x];", "if (threadIdx.y < half) *own_sum += own_sum[half * blockDim.x];", VALUES),
    Mutant("backward: gradients of no rows not written", "return launch_kernel(sum_partials, shape, context, call, nullptr, 0);", "return cudaSuccess;", "no_rows"),
    Mutant("convolution: taps in another order", "taps = 7 - i", "taps = i", "rounds_like_pytorch"),
    Mutant("convolution: no padding before the first depth", "d >= 0 && d < call.depth", "d < call.depth", CONVOLUTION),
    Mutant("convolution: no padding below the last line", "h >= 0 && h < call.height", "h >= 0 && h <= call.height", CONVOLUTION),
    Mutant("convolution: last line not written", "row / 2 < call.height - task.h", "row / 2 < call.height - task.h - 1", CONVOLUTION),
    Mutant("convolution: eps dropped", "(1.0f / kOutWidth) + call.eps", "(1.0f / kOutWidth)", CONVOLUTION),
    Mutant("convolution: input overwritten while it is read", "if (index > 0) named_barrier_wait(kEmpty + g);", "", CONVOLUTION),
    Mutant("convolution: NaN of arithmetic becomes a number", "if (isnan(x)) return __uint_as_float(0x7fc00000);", "", "conv_of_nan", emulated="its test runs on emulated GPUs only"),
    Mutant("convolution: NaN of the convolution's bias is lost", "weight = round_to_tf32(weight + (bias - bias));", "weight = round_to_tf32(weight);", "conv_of_nan", emulated="its test runs on emulated GPUs only"),
    Mutant("convolution: float32 always in TF32", "uses_tf32 || input.scalar_type() != at::kFloat", "true", CONVOLUTION),
    Mutant("binding: weight's strides ignored, forward", "const Tensor x = aligned(input), w = aligned(weight), b = aligned(bias)", "const Tensor x = aligned(input), w = is_given(weight) ? *weight : Tensor(), b = aligned(bias)", "stride"),
    Mutant("binding: weight's strides ignored, backward", "stats = aligned(statistics), w = aligned(weight)", "stats = aligned(statistics), w = is_given(weight) ? *weight : Tensor()", "stride"),
    Mutant("binding: strides of statistics ignored", "stats = aligned(statistics)", "stats = statistics", "other_strides"),
    Mutant("binding: grad_output's strides ignored", "dy = aligned(grad_output)", "dy = grad_output", "stride"),
    Mutant("binding: float32 bias without weight", "weight.defined() ? weight : bias;", "weight;", VALUES),
    Mutant("binding: device not made current", "const c10::cuda::CUDAGuard guard(input.device()); struct Scratch", "struct Scratch", "not_current"),
    Mutant("binding: device not made current, convolution", "const c10::cuda::CUDAGuard guard(input.device()); const bool uses_tf32", "const bool uses_tf32", "not_current", emulated="the GPUs of one machine are usually equal"),
    Mutant("binding: default stream", "allocate_scratch, c10::cuda::getCurrentCUDAStream()", "allocate_scratch, nullptr", "current_stream and (registers or pipelined)"),
    Mutant("binding: vmap does not cast under autocast", "if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA)) {", "if (false) {", "vmap or transforms"),
    Mutant("binding: forward mode takes input's rows for those of a matrix", "composed_output(xhat, input, shape, weight, bias, activation, scale, dtype), at::cat", "composed_output(as_matrix(xhat, shape), input, shape, weight, bias, activation, scale, dtype), at::cat", "forward_mode or transforms"),
    Mutant("binding: statistics are an input of the node", "collect_next_edges(inputs...)", "collect_next_edges(inputs..., statistics)", "node_in_the_autograd"),
    Mutant("binding: bias saved in weight's place", "backward, statistics, input, weight, bias);", "backward, statistics, input, bias, bias);", "vmap or " + OUTPUT_MASK),
    Mutant("binding: output_mask of weight and bias swapped", "task_should_compute_output(i);", "task_should_compute_output(i == 0 || i > 2 ? i : 3 - i);", OUTPUT_MASK),
    Mutant("binding: no gradient if only bias requires one", "compute_requires_grad(input, weight, bias) || has", "compute_requires_grad(input, weight) || has", OUTPUT_MASK),
    Mutant("binding: tangent of grad_output dropped", "if (has_tangent(grad_output, input, weight, bias) ||", "if (has_tangent(input, weight, bias) ||", "forward_over_reverse"),
    Mutant("binding: input not cast under autocast", "cast(input), shape", "input, shape", "autocast"),
    Mutant("binding: device of weight not checked", "check_device(name, t, input); TORCH_CHECK", "TORCH_CHECK", "bad_input"),
    Mutant("binding: backward checks nothing", "check_tensor(\"grad_output\", grad_output, input.sym_sizes(), grad_output.scalar_type(), input); check_tensor(\"statistics\", statistics, {2, row_count(input, shape)}, at::kFloat, input);", "", "backward_checks"),
    Mutant("binding: shape of grad_output and statistics not checked", "t.sym_sizes().equals(sizes)", "true", "backward_checks"),
    Mutant("binding: dtype of grad_output and statistics not checked", "t.scalar_type() == dtype, \"Expected", "true, \"Expected", "backward_checks"),
    Mutant("binding: device of grad_output and statistics not checked", "check_device(name, t, input); }", "}", "backward_checks"),
    Mutant("binding: copy-on-write tensors are copied", "t.unsafeGetTensorImpl()->data()", "t.data_ptr()", "copy_on_write"),
    Mutant("binding: tensors assumed to be aligned", "% 16 == 0 ? x : x.clone()", "% 16 == 0 ? x : x", CONVOLUTION),
    Mutant("meta: output has the strides of input", "return at::empty_symint(sizes, options)", "return at::empty_like(like, options)", "fake"),
    Mutant("meta: depth and height swapped", "input.sym_size(2) * 2, input.sym_size(3) * 2", "input.sym_size(3) * 2, input.sym_size(2) * 2", "fused_conditions"),
    Mutant("build: sm_90 instead of sm_90a", '"sm_90a" if code == "sm_90" else code', "code", "codes_follow"),
    Mutant("build: CUDA 11 accepted for Hopper", "if _architecture_number(code) >= 90 else", "if _architecture_number(code) > 90 else", "codes_follow"),
    Mutant("build: Turing left out", "if _architecture_number(code) >= 75}", "if _architecture_number(code) > 75}", "codes_follow"),
    Mutant("build: Volta accepted", "if _architecture_number(code) >= 75}", "if _architecture_number(code) >= 70}", "codes_follow"),
    Mutant("build: the list used although there is a GPU", "if gpus := _gpus():", 'if (gpus := _gpus()) and not os.environ.get("TORCH_CUDA_ARCH_LIST"):', "codes_follow"),
    Mutant("build: a list of only native not treated as empty", 'names in ([], ["native"])', "names == []", "codes_follow"),
    Mutant("build: a list that ends with a separator", 'TORCH_CUDA_ARCH_LIST=";".join(names)', 'TORCH_CUDA_ARCH_LIST=os.environ["TORCH_CUDA_ARCH_LIST"]', "codes_follow"),
    Mutant("build: hidden GPUs counted", 'if not re.match(r"\\s*\\+?\\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0")): return []', "", "without_initializing"),
    Mutant("build: GPUs that this process may not use counted", "if is_allowed and nvml", "if nvml", "without_initializing"),
    Mutant("build: driver that is too old accepted", "if knows_driver and driver.value // 1000 < _parse_version", "if False and driver.value // 1000 < _parse_version", "without_initializing"),
    Mutant("build: a driver whose version is refused counts as too old", "if knows_driver and driver", "if driver", "without_initializing"),
    Mutant("build: CUDA not asked if NVML names no GPU", "if capabilities: return capabilities", "return capabilities", "without_initializing"),
    Mutant("build: headers of conda's toolkit not found", 'glob.glob(f"{glob.escape(cuda_home)}/targets/*/include"),', "[],", "condas_toolkit"),
    Mutant("build: temporary files in a folder whose name may have a blank", 'TMPDIR="."', "TMPDIR=folder", "temporary_files"),
    Mutant("build: no GPU found without NVML", "for device in range(torch.cuda.device_count())]", "for device in []]", "without_initializing"),
    Mutant("build: one folder for all machines", '"\\n".join([*machine, *_CUDA_FLAGS', '"\\n".join([*_CUDA_FLAGS', "one_namespace"),
    Mutant("build: one folder for all flags of nvcc", "*machine, *_CUDA_FLAGS, *_CPP_FLAGS]", "*machine, *_CPP_FLAGS]", "one_namespace"),
    Mutant("build: one folder for all flags of the C++ compiler", "*_CUDA_FLAGS, *_CPP_FLAGS]", "*_CUDA_FLAGS]", "one_namespace"),
    Mutant("build: the filter for PyTorch's warning left", 'restored.callback(setattr, logger, "disabled", logger.disabled)', "", "error_of_the_build"),
    Mutant("build: a namespace for each machine", "_name_of(CUDA_SOURCE + CPP_SOURCE)", '_name_of(CUDA_SOURCE + CPP_SOURCE + os.environ.get("TORCH_CUDA_ARCH_LIST", ""))', "traced_program"),
    Mutant("build: library without code for all GPUs accepted", "if not lacking: return path", "if lacking < {*codes}: return path", "container"),
    Mutant("build: a library without a code is kept when nvcc supports it", "if _supported(lacking, _find_cuda_home()[0])[0]: continue", "...", "nvcc_supports"),
    Mutant("build: a library without a code is compiled in each process", "if lacking < {*codes} and", "if False and", "nvcc_supports"),
    Mutant("build: a library with no code for this machine is loaded", "if lacking < {*codes} and", "if", "nvcc_supports"),
    Mutant("build: a container's library not looked for", "lacking = {*codes} - {*names[path]}", "lacking = {*codes} ^ {*names[path][1:]}", "container"),
    Mutant("build: the library with the most architectures chosen", 'len(names[path])))', '-len(names[path])))', "container"),
    Mutant("build: library that others can write is loaded", "and not status.st_mode & 0o002", "", "only_trusted"),
    Mutant("build: library that a group can write is not loaded", "not status.st_mode & 0o002", "not status.st_mode & 0o022", "only_trusted"),
    Mutant("build: links followed", "status = os.lstat(path)", "status = os.stat(path)", "only_trusted"),
    Mutant("build: another user's library is loaded", "status.st_uid in (os.getuid(), 0) and", "", "only_trusted"),
    Mutant("build: root's library is not loaded", "status.st_uid in (os.getuid(), 0)", "status.st_uid == os.getuid()", "only_trusted"),
    Mutant("build: parent folder not checked", "if mode & 0o002 and not mode & 0o1000:", "if False:", "parent_of_the_cache"),
    Mutant("build: parent folder with the sticky bit rejected", "mode & 0o002 and not mode & 0o1000", "mode & 0o002", "parent_of_the_cache"),
    Mutant("build: creates a folder that others can write", "os.makedirs(path, 0o755, exist_ok=True)", "os.makedirs(path, exist_ok=True)", "built_once"),
    Mutant("build: creates a lock that others can hold", "os.open(path, flags, 0o600)", "os.open(path, flags, 0o644)", "built_once"),
    Mutant("build: does not wait for the lock", "fcntl.flock(file, fcntl.LOCK_EX) return lock", "return lock", "the_lock"),
    Mutant("build: files of an unfinished build kept", "lock.callback(shutil.rmtree, folder, ignore_errors=True)", "", "unfinished_build"),
    Mutant("build: a library that only its owner can read", 'os.chmod(f"{folder}/{library.name}.so", 0o644)', "None", "built_once"),
    Mutant("build: a library that cannot be loaded is kept", "or os.stat(path).st_ino == broken", "", "cannot_be_loaded"),
    Mutant("build: toolkit of another CUDA version accepted", "_parse_version(release)[0] == major and", "", "toolkit"),
    Mutant("build: nvcc that does not run raises", "with contextlib.suppress(OSError): return subprocess", "with contextlib.suppress():\n        return subprocess", "toolkit"),
    Mutant("build: PATH left changed", "self.callback(*restore)", "None", "reaches_the_user"),
    Mutant("build: CUDA_HOME left changed", 'restored.callback(setattr, cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)', "", "left_out"),
    Mutant("build: the second library compiled without its macro", 'CPP_SOURCE, CUDA_SOURCE, ["-DLAYERNORM_HAS_EPILOGUE"])', 'CPP_SOURCE, CUDA_SOURCE, [])', "sources_and_macros"),
    Mutant("build: Dynamo traces it", "_dynamo_marked_constant = True", "_dynamo_marked_constant = False", "first_use"),
    Mutant("binding: unknown activation accepted", "activation <= static_cast<int64_t>(Activation::GeluTanh)", "true", "only_what_its_library_has"),
    Mutant("binding: the first library accepts an activation", "kHasEpilogue || (activation == 0 && scale == 1)", "true", "only_what_its_library_has"),
    Mutant("build: a failed build is not tried again", "cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)", "", "rename_the_library"),
    Mutant("build: PyTorch's warning shown", "logger.disabled = True", "", "error_of_the_build"),
    Mutant("build: no lock between copies of the file", 'with vars(sys).setdefault("_layernorm_inline_lock", _thread.allocate_lock()):', "if True:", "threads_import_copies"),
    Mutant("build: nvcc's error swallowed", "printed: {listed}", "printed: ", "are_left_out"),
    Mutant("build: a relative CUDA_HOME stays relative", "os.path.abspath(home) for home in", "home for home in", "toolkit_must_match"),
    Mutant("build: missing stderr not handled", "if caught.error is not None: restored", "if False: restored", "cannot_be_flushed"),
    Mutant("build: what killed builds left is kept", "shutil.rmtree(unfinished, ignore_errors=True)", "None", "killed_build"),
    Mutant("build: the folder of another machine's build deleted", "/build-{os.uname().nodename}+", "/build-", "killed_build"),
    Mutant("build: the folder of a machine with a longer name deleted", "nodename}+", "nodename}_", "killed_build"),
    Mutant("build: a child deletes the folder of the build", "folder = tempfile.mkdtemp(prefix=prefix)", "temporary = tempfile.TemporaryDirectory(prefix=prefix)\n            folder = temporary.name", "another_thread_builds"),
    Mutant("build: a child waits for the lock of a thread that it does not have", 'vars(sys).pop("_layernorm_inline_lock", None)', "", "another_thread_builds"),
    Mutant("build: a child keeps the variables of the build", "environment.close()", "None", "another_thread_builds"),
    Mutant("build: a variable that another thread removed raises", "(os.environ.pop, name, None)", "(os.environ.pop, name)", "another_thread_removes"),
    Mutant("build: the home folder in TORCH_EXTENSIONS_DIR not found", "root = os.path.expanduser(os.environ", "root = (os.environ", "torch_extensions_dir"),
    Mutant("build: a folder with the name ~", 'if root.startswith("~"):', "if False:", "without_a_home"),
    Mutant("build: mounts without execution not noticed", "if os.statvfs(folder).f_flag & os.ST_NOEXEC:", "if False:", "noexec"),
    Mutant("build: messages need stderr", "with contextlib.suppress(AttributeError, OSError, ValueError):", "if True:", "flushed or needs_no_stderr"),
    Mutant("build: messages in the program's output", 'sys.stderr.write(f"layernorm_inline: {text}\\n")', 'print(f"layernorm_inline: {text}", file=sys.stderr)', "flushed or needs_no_stderr"),
    Mutant("build: a missing C++ compiler not noticed", "if shutil.which(compiler, path=path) is None:", "if False:", "compiler_if_it_is_missing"),
    Mutant("build: the switch ignored by layer_norm", "_is_disabled or not isinstance", "not isinstance", "switch"),
    Mutant("build: the switch on for every value", '_is_disabled = os.environ.get("LAYERNORM_INLINE_DISABLE") == "1"', '_is_disabled = "LAYERNORM_INLINE_DISABLE" in os.environ', "switch"),
    Mutant("build: implicit headers in every version", "if has_option else {}", "if False else {}", "second_library"),
    Mutant("Python: scale dropped on the CPU", "if (is_recorded and _is_symbolic(scale)) or scale != 1: y = y * scale", "", ACTIVATION),
    Mutant("Python: __torch_function__ overrides ignored", "has_torch_function_variadic(input, weight, bias):", "False:", "torchscript or overrides"),
    Mutant("Python: types of arguments not checked", "if not is_recorded and not _has_usual_types(", "if False and not _has_usual_types(", "bad_input"),
    Mutant("Python: type of scale not checked", "not isinstance(scale, (numbers.Real, torch.SymInt, torch.SymFloat)):", "False:", "bad_input"),
    Mutant("Python: float64 passed to the kernels", "or input.dtype is _float64 or input.is_nested", "or input.is_nested", "float64_runs"),
    Mutant("Python: the two forms of GELU swapped", '"gelu": (1, "none"), "gelu_tanh": (2, "tanh")', '"gelu": (2, "none"), "gelu_tanh": (1, "tanh")', VALUES),
    Mutant("Python: no call is left to Inductor", "or (is_recorded and _is_left_to_pytorch(input, normalized_shape, eps, scale))", "", "left_to_inductor"),
    Mutant("Python: rows of any alignment are left to Inductor", "and row_bytes % 16 == 0", "", "left_to_inductor"),
    Mutant("Python: rows of any length are left to Inductor", "row_bytes <= 16384 and", "", "left_to_inductor"),
    Mutant("Python: autocast ignored when choosing what is left to Inductor", "if torch.is_autocast_enabled(): return columns <= 16384", "", "left_to_inductor"),
    Mutant("Python: exported programs contain layernorm_inline's ops", "if _is_exporting() or _is_symbolic(columns)", "if _is_symbolic(columns)", "recorded_programs"),
    Mutant("Python: exported models contain layernorm_inline's convolution", "and not _is_exporting()", "", "recorded_programs"),
    Mutant("Python: nested tensors passed to the kernels", "or input.is_nested", "", "nested"),
    Mutant("Python: DTensor passed to the kernels", 'or (hasattr(input, "device_mesh") or', "or (", "distributed_tensors and not conv"),
    Mutant("load: the second library not loaded by the import", "_load(_EPILOGUE, may_compile=False)", "...", "stored_programs"),
    Mutant("load: the library of problem 34 not loaded by the import", "if hasattr(_epilogue_ops, _EPILOGUE.last_op):", "if False:", "stored_programs"),
    Mutant("load: folders made for libraries that were never compiled", 'if not may_compile and not os.path.isdir(f"{_cache_root()}/{library.name}"):', "if False:", "without_compiling"),
    Mutant("Python: DTensor weight passed to the kernels", ' or hasattr(weight, "device_mesh")', "", "implicitly_replicated"),
    Mutant("Python: DTensor bias passed to the kernels", ' or hasattr(bias, "device_mesh")', "", "implicitly_replicated"),
    Mutant("Python: Dynamo guards on the type of input", 'or (hasattr(input, "device_mesh")', 'or (type(input).__name__ == "DTensor"', "stored_programs"),
    Mutant("Python: DTensor passed to problem 34's kernel", ' and not hasattr(t, "device_mesh")', "", "distributed_tensors"),
    Mutant("Python: classes of before a reload are named as skipped", 'for base in type(norm).__mro__', 'for base in [type(norm)]', "after_a_reload"),
    Mutant("Python: traced programs contain layernorm_inline's ops", "or _get_tracing_state() is not None # torch.jit.trace", "# torch.jit.trace", "recorded_programs"),
    Mutant("Python: eps of a NumPy type passed to an op", "or _is_symbolic(eps) or", "or", "arguments_of_numpy"),
    Mutant("Python: state_dict names of the reference not renamed", 'if f"{prefix}ln.{name}" in state_dict:', "if False:", "reference_model"),
    Mutant("Python: nn.LayerNorm looked up by name", "_TorchLayerNorm = nn.modules.normalization.LayerNorm", "_TorchLayerNorm = nn.LayerNorm", "assigns_nn_layer_norm"),
    Mutant("vmap: statistics of samples in a wrong dimension", "reshape_symint({2, x.sym_size(0), rows}), 1, level)", "reshape_symint({2, rows, x.sym_size(0)}), 2, level)", "vmap"),
    Mutant("vmap: statistics treated as constants", "is_differentiated(input) ? Tensor() : statistics", "statistics", "mapped_gradients"),
    Mutant("double backward: covariance dropped", "xhat, covariance * rstd * rstd, -1)", "xhat, covariance * 0, -1)", "second_derivatives"),
    Mutant("double backward: products in 16 bits", "apply_weight(dy, w).to(at::kFloat), mean_wdy_xhat", "apply_weight(dy, w), mean_wdy_xhat", "large_float16"),
    Mutant("double backward: gradient through grad_bias dropped", "if (grad_mask[0] && g_db.defined()) add(grad_dy, g_db.expand_as(xhat));", "", "second_derivatives"),
    Mutant("double backward: statistics treated as constants", "at::GradMode::is_enabled() ? Tensor() : statistics", "statistics", "third_derivatives"),
    Mutant("double backward: first-order gradients use the composed formula", "if (!needs_grad) return gradients; const auto backward", "if (needs_grad) return composed_backward(grad_output, input, shape, {}, weight, bias, eps, activation, scale, output_mask); const auto backward", "first_order"),
    Mutant("Python: subclasses replaced as well", "if cls in classes and", "if issubclass(cls, tuple(classes)) and", "replace_layer_norm"),
    Mutant("Python: modules with a forward of their own replaced as well", '"forward" in vars(norm) or', "", "replace_layer_norm"),
    Mutant("Python: PyTorch's own subclasses replaced as well", '(cls is not _TorchLayerNorm and cls.__module__.startswith("torch."))', "False", "replace_layer_norm"),
    Mutant("Python: stride and padding of the convolution not checked", "and (conv.stride, conv.padding) == ((2, 2, 2), (1, 1, 1))", "", "fused_conditions"),
    Mutant("Python: dilation and output_padding of the convolution not checked", "and (conv.dilation, conv.output_padding) == ((1, 1, 1), (0, 0, 0))", "", "fused_conditions"),
    Mutant("Python: groups of the convolution not checked", "conv.groups, norm.normalized_shape) == ((32, 64, 4, 4, 4), 1, (64,))", "norm.normalized_shape) == ((32, 64, 4, 4, 4), (64,))", "fused_conditions"),
    Mutant("convolution: TF32 although cuDNN is disabled", "at::globalContext().userEnabledCuDNN() &&", "", "setting_of_convolutions"),
    Mutant("Python: hooks ignored", 'getattr(module, f"_{kind}") or', "", "fused_conditions or with_hooks"),
    Mutant("Python: global hooks ignored", 'or getattr(nn.modules.module, f"_global_{kind}")', "", "with_hooks"),
    Mutant("Python: patched forwards ignored", 'is_patched = "forward" in module.__dict__ or cls.forward is not _ORIGINAL_FORWARDS[cls]', "is_patched = False", "with_hooks"),
    Mutant("convolution, vmap: PyTorch's loop over the samples", "m.impl(name, dispatch(c10::DispatchKey::FuncTorchBatched, composed_convolution));", "", "conv_under_vmap_is_accurate"),
    Mutant("composed convolution: eps of 1e-5", "layer_norm.call(y, {64}, weight, bias, eps,", "layer_norm.call(y, {64}, weight, bias, 1e-5,", "conv_under_vmap"),
    Mutant("composed convolution: no bias of LayerNorm", "layer_norm.call(y, {64}, weight, bias, eps,", "layer_norm.call(y, {64}, weight, {}, eps,", "conv_under_vmap"),
    Mutant("load: problem 34's library without that with an activation", "_load_epilogue() _load_later(_CONVOLUTION,", "_load_later(_CONVOLUTION,", "first_step_of_problem_34"),
    Mutant("load: the constructor of problem 34 loads nothing", "self.scaling_factor = scaling_factor _load_convolution()", "self.scaling_factor = scaling_factor", "first_step_of_problem_34"),
    Mutant("load: the import loads problem 34's library without that with an activation", "if hasattr(_epilogue_ops, _EPILOGUE.last_op):", "if _ops is not None:", "first_step_of_problem_34"),
    Mutant("composed formula: eps of 1e-5", "(row_mean(centered * centered) + eps).rsqrt();", "(row_mean(centered * centered) + 1e-5).rsqrt();", "second_derivatives or third_derivatives or forward_mode"),
    Mutant("vmap with one weight per sample: eps of 1e-5", "OptionalTensor(), OptionalTensor(), eps, 0, 1,", "OptionalTensor(), OptionalTensor(), 1e-5, 0, 1,", "vmap"),
    Mutant("composed convolution: scale of 1", "static_cast<int64_t>(Activation::Gelu), scale, {})", "static_cast<int64_t>(Activation::Gelu), 1, {})", "conv_double_backward or conv_forward_mode"),
    Mutant("forward mode: input's tangent only", "if (has_tangent(input, weight, bias)) {", "if (has_tangent(input)) {", "forward_mode"),
    Mutant("autocast: weight not cast", "cast(weight), cast(bias)", "weight, cast(bias)", "autocast"),
    Mutant("registers, backward: 32-bit offset", "static_cast<T*>(call.grad_input) + (row * cols + packs[0].col)", "static_cast<T*>(call.grad_input) + int(row * cols + packs[0].col)", "2_to_the_31"),
    Mutant("grid-resident: 32-bit offset", "return row * call.cols + first_col + stage", "return row * int(call.cols) + first_col + stage", "2_to_the_31"),
    Mutant("an error in the look at a kernel is remembered", "device.initialized = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;", "cudaFuncGetAttributes(&attributes, kernel); device.initialized = true;", "looked_at_again", emulated="only"),
    Mutant("rejected launches do not clear their error", "if (cudaPeekAtLastError() == error) cudaGetLastError();", "", "test_values[ and mps", emulated="real GPUs reject cooperative launches only in special setups such as MPS"),
    Mutant("backward: one set of sums instead of two", "sum_row(sums, warp_sums[parity]);", "sum_row(sums, warp_sums[0]);", VALUES, emulated="on a real GPU, no warp is ever that far ahead"),
    Mutant("sums over rows: no wait for the previous kernel", "wait_for_previous(); float sum = 0; if (grad", "float sum = 0; if (grad", VALUES, emulated="on a real GPU, the kernel rarely starts that early"),
    Mutant("double backward: weight is not reshaped", "x = as_matrix(input, shape), w = as_float_row(weight, shape);", "x = as_matrix(input, shape), w = is_given(weight) ? weight.to(at::kFloat) : Tensor();", TRANSFORMS),
    Mutant("double backward: gradient of grad_weight is not reshaped", "const Tensor g_dw = as_float_row(grads[1], shape), g_db", "const Tensor g_dw = grads[1].defined() ? grads[1].to(at::kFloat) : Tensor(), g_db", TRANSFORMS),
    Mutant("double backward: gradient of grad_bias is not reshaped", "g_db = as_float_row(grads[2], shape);", "g_db = grads[2].defined() ? grads[2].to(at::kFloat) : Tensor();", TRANSFORMS),
    Mutant("double backward: gradients have float32", "t.reshape_symint(like.sym_sizes()).to(like.scalar_type()) : t;", "t.reshape_symint(like.sym_sizes()) : t;", TRANSFORMS, CONVERTED),
    Mutant("double backward: gradient of weight has input's dtype", "shaped_like(grad_w, weight)}", "shaped_like(grad_w, weight).to(input.scalar_type())}", TRANSFORMS),
    Mutant("double backward: gradient of weight is not reshaped", "shaped_like(grad_w, weight)}", "grad_w.defined() ? grad_w.to(weight.scalar_type()) : grad_w}", TRANSFORMS),
    Mutant("double backward: no gradient through grad_weight alone", "} else if (v.defined()) { grad_x = project(v, row_mean(v * xhat)); }", "}", TRANSFORMS),
    Mutant("double backward: weight left out of grad_output's gradient", "add(grad_dy, apply_weight(projected, w));", "add(grad_dy, projected);", TRANSFORMS),
    Mutant("binding: weight and bias saved without a version check", "node.saved = {{SavedVariable(inputs, /*is_output=*/false)...}};", "int index = 0; const auto copy = [&](const OptionalTensor& t) { return index++ == 0 || !is_given(t) ? t : OptionalTensor(t->variable_data()); }; node.saved = {{SavedVariable(copy(inputs), /*is_output=*/false)...}};", "change_in_place or step_of_an_optimizer"),
    Mutant("composed backward: grad_weight has input's dtype", "reshape_symint(shape).to(weight->scalar_type());", "reshape_symint(shape).to(input.scalar_type());", OUTPUT_MASK + " or " + TRANSFORMS),
    Mutant("composed backward: grad_bias has input's dtype", "reshape_symint(shape).to(bias->scalar_type());", "reshape_symint(shape).to(input.scalar_type());", OUTPUT_MASK + " or " + TRANSFORMS),
    Mutant("composed backward: grad_weight is not reshaped", "dw = (dy * xhat).sum(0).reshape_symint(shape).to(", "dw = (dy * xhat).sum(0).to(", TRANSFORMS),
    Mutant("composed backward: grad_input has float32", "dx = dx.reshape_symint(input.sym_sizes()).to(input.scalar_type());", "dx = dx.reshape_symint(input.sym_sizes());", OUTPUT_MASK),
    Mutant("composed backward: grad_weight without the epilogue's derivative", "dw = (dy * xhat).sum(0)", "dw = (as_matrix(grad_output, shape) * xhat).sum(0)", TRANSFORMS),
    Mutant("composed backward: scale before the activation's argument", "gelu_backward(dy, apply_affine(xhat, w, b), gelu_form(function))", "gelu_backward(dy, apply_affine(xhat, w, b) * scale, gelu_form(function))", TRANSFORMS),
    Mutant("composed output: scale before the activation", "y = at::gelu(y, gelu_form(function)); if (scale != 1) y = y * scale;", "y = at::gelu(y * scale, gelu_form(function)); else if (scale != 1) y = y * scale;", TRANSFORMS),
    Mutant("composed backward: 16-bit gradients are rounded before they are added up", "if (!statistics.defined()) {", "if (false) {", "rounded_once"),
    Mutant("composed output: float32 for 16-bit input", "return y.reshape_symint(input.sym_sizes()).to(dtype.value_or(input.scalar_type()));", "return y.reshape_symint(input.sym_sizes());", TRANSFORMS),
    Mutant("composed output: activation's forms swapped", 'return activation == Activation::Gelu ? "none" : "tanh";', 'return activation == Activation::Gelu ? "tanh" : "none";', TRANSFORMS),
    Mutant("vmap: activation dropped if weight is mapped", "composed_output(as_matrix(xhat, shape), input, shape, weight, bias, activation, scale, dtype)", "composed_output(as_matrix(xhat, shape), input, shape, weight, bias, 0, 1, dtype)", TRANSFORMS),
    Mutant("vmap: bias that is mapped alone is not noticed", "std::max(vmap_level(weight), vmap_level(bias)) >= level", "vmap_level(weight) >= level", TRANSFORMS),
    Mutant("vmap: weight of the same level as input taken for a constant", "vmap_level(bias)) >= level", "vmap_level(bias)) > level", TRANSFORMS),
    Mutant("vmap: statistics treated as constants under torch.func", "|| t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)", "", "does_not_differentiate"),
    Mutant("vmap: statistics treated as constants in forward mode", "t.requires_grad() || has_tangent(t) ||", "t.requires_grad() ||", TRANSFORMS, "a tensor with a tangent is inside of a wrapper of torch.func, too, or vmap does not see it"),
    Mutant("autocast: activation dropped", "cast(weight), cast(bias), eps, activation, scale, dtype);", "cast(weight), cast(bias), eps, 0, 1, dtype);", TRANSFORMS),
    Mutant("autocast: eps and scale swapped", "cast(weight), cast(bias), eps, activation, scale, dtype);", "cast(weight), cast(bias), scale, activation, eps, dtype);", TRANSFORMS),
    Mutant("autocast_output: both dtypes are written as float16", "kernel = layer_norm_rows<T, __nv_bfloat16,", "kernel = layer_norm_rows<T, __half,", BITS),
    Mutant("autocast_output: both dtypes are read as bfloat16", "p = plan_of<T, __half, V, kPacks, kRows>", "p = plan_of<T, __nv_bfloat16, V, kPacks, kRows>", BITS),
    Mutant("autocast_output: grad_output of long rows is not widened", "if (call.converts()) return cudaErrorNotSupported; if (const", "if (const", BITS),
    Mutant("autocast_output: grad_output of unaligned rows is not widened", "kRows>(call, context.device); } else if (call.converts()) { return cudaErrorNotSupported; }", "kRows>(call, context.device); }", BITS),
    Mutant("autocast_output: unaligned rows are written as float32", "kPacks, ROWS, KIND>; } else if (call.converts()) { return cudaErrorNotSupported; }", "kPacks, ROWS, KIND>; }", BITS),
    Mutant("autocast_output: long rows are written as float32", "if (call.converts()) return cudaErrorNotSupported; if constexpr", "if constexpr", BITS),
    Mutant("autocast_output: output is not converted beside the kernel", "output.copy_(unconverted);", "", BITS),
    Mutant("autocast_output: 16-bit weights, too", "!is_16_bits(weight) && !is_16_bits(bias) && !cannot", "!cannot", "as_by_default"),
    Mutant("autocast_output: 16-bit bias, too", "&& !is_16_bits(bias) && !cannot", "&& !cannot", "as_by_default"),
    Mutant("autocast_output: any 16-bit input is read directly", "input.scalar_type() == dtype &&", "dtype.has_value() && is_16_bits(input) &&", "as_by_default"),
    Mutant("autocast_output: 16-bit input is always converted", "bool is_read_directly = !kHasEpilogue &&", "bool is_read_directly = false &&", "read_directly or one_conversion"),
    Mutant("autocast_output: 16-bit input is read directly by default", "input.scalar_type() == dtype &&", "is_16_bits(input) && (!dtype || input.scalar_type() == dtype) &&", "in_place or autocast_computes"),
    Mutant("autocast_output: an inference tensor is saved", "cannot_be_saved = input.is_inference() &&", "cannot_be_saved = false &&", "inference_tensors"),
    Mutant("autocast_output: an inference tensor is always converted", "input.is_inference() && torch::autograd::compute_requires_grad(weight, bias);", "input.is_inference();", "inference_tensors"),
    Mutant("autocast_output: dtype dropped in forward mode", "activation, scale, dtype), at::cat", "activation, scale, {}), at::cat", TRANSFORMS),
    Mutant("autocast_output: dtype dropped if weight is mapped", "weight, bias, activation, scale, dtype), statistics}", "weight, bias, activation, scale, {}), statistics}", TRANSFORMS),
    Mutant("autocast_output: the ops accept any dtype", "check_output_dtype(\"dtype\", output_dtype, input);", "", "ops_are_checked"),
    Mutant("autocast_output: any grad_output is accepted", "check_output_dtype(\"grad_output\", grad_output.scalar_type(), input);", "", "ops_are_checked or backward_checks"),
    Mutant("autocast_output: recorded programs convert", "input.dtype is _float64 or _is_exporting() or _get_tracing_state() is not None: return None", "input.dtype is _float64: return None", "programs_ignore"),
    Mutant("autocast_output: float64 becomes 16 bits", "if not is_converted or input.dtype is _float64 or _is", "if not is_converted or _is", "option_does_nothing"),
    Mutant("autocast_output: CPU tensors, too", "is_autocast_enabled() and isinstance(input, torch.Tensor) and input.is_cuda", "is_autocast_enabled() and isinstance(input, torch.Tensor)", "left_alone"),
    Mutant("autocast_output: also without autocast", "is_converted = torch.is_autocast_enabled() and", "is_converted =", "option_does_nothing"),
    Mutant("autocast_output: float32 autocast", "return dtype if dtype in _16_BITS else None", "return dtype", "autocast_in_32_and_64_bits"),
    Mutant("autocast_output: PyTorch's output is not converted", "return y if dtype is None else y.to(dtype)", "return y", "nested_and_distributed or the_switch"),
    Mutant("autocast_output: dropped with an activation", "_ACTIVATIONS[activation][0], scale, dtype)", "_ACTIVATIONS[activation][0], scale)", "as_by_default"),
    Mutant("autocast_output: the module's attribute is ignored", "*arguments, autocast_output=self.autocast_output)", "*arguments)", "option_does_nothing"),
    Mutant("autocast_output: replace_layer_norm always sets it", "elif autocast_output is not None: norm.autocast_output = autocast_output", "else: norm.autocast_output = bool(autocast_output)", "the_attribute"),
    Mutant("autocast_output: norms that were converted before keep theirs", "elif autocast_output is not None: norm", "elif autocast_output is not None and cls is not LayerNorm: norm", "the_attribute"),
    Mutant("autocast: bias not cast", "cast(weight), cast(bias)", "cast(weight), bias", TRANSFORMS),
    Mutant("autograd: eps and scale swapped in backward", "saved_shape, saved_statistics, w, b, eps, activation, scale, output_mask)", "saved_shape, saved_statistics, w, b, scale, activation, eps, output_mask)", TRANSFORMS),
    Mutant("autograd: an activation's backward is not composed for second derivatives", "|| (kHasEpilogue && needs_grad)) {", ") {", TRANSFORMS),
    Mutant("autograd: a tangent of weight or bias is ignored", "compute_requires_grad(input, weight, bias) || has_tangent(input, weight, bias)) {", "compute_requires_grad(input, weight, bias) || has_tangent(input)) {", TRANSFORMS),
    Mutant("autograd: a tangent of bias is ignored in backward", "if (has_tangent(grad_output, input, weight, bias) ||", "if (has_tangent(grad_output, input, weight) ||", "results_of_the_backward_op"),
    Mutant("autograd: every gradient computed", "output_mask = {grad_mask[0], grad_mask[1], grad_mask[2]};", "output_mask = {true, true, true};", "only_needed"),
    Mutant("autograd: statistics saved when no gradient is needed", "if (torch::autograd::compute_requires_grad(input, weight, bias) || has_tangent(input, weight, bias)) {", "if (true) {", "only_needed"),
    Mutant("autograd: gradient of bias left out if weight needs none", "if (output_mask[2] && is_given(bias)) grad_bias", "if (output_mask[1] && output_mask[2] && is_given(bias)) grad_bias", OUTPUT_MASK),
    Mutant("binding: grad_weight in spite of the mask", "if (output_mask[1] && is_given(weight)) grad_weight", "if (is_given(weight)) grad_weight", OUTPUT_MASK),
    Mutant("binding: grad_bias in spite of the mask", "if (output_mask[2] && is_given(bias)) grad_bias", "if (is_given(bias)) grad_bias", OUTPUT_MASK),
    Mutant("binding: grad_input in spite of the mask", "if (output_mask[0]) grad_input", "grad_input", OUTPUT_MASK),
    Mutant("binding: grad_bias has input's dtype", "grad_bias = allocate_as(*bias);", "grad_bias = allocate(bias->sym_sizes(), input.scalar_type(), input);", TRANSFORMS),
    Mutant("convolution: stride and padding of one dimension", "conv_bias, {2, 2, 2}, {1, 1, 1})", "conv_bias, {1, 1, 1}, {2, 2, 2})", CONVOLUTION + " or samples_of_problem_34"),
    Mutant("grid-resident: float32 weight with 16-bit input accepted", "(sizeof(T) == 2 && call.affine_float32)", "false", LAUNCHES + " or expected_kernels", emulated=PLANNED),
    Mutant("grid-resident: rows of a group counted off by one", "call.rows < kMinRows * groups", "call.rows <= kMinRows * groups", LAUNCHES, emulated=PLANNED),
    Mutant("grid-resident: GPUs without large shared memory accepted", "if (!device.arch.has_large_shared || groups == 0", "if (groups == 0", LAUNCHES + " or plans_keep", emulated=PLANNED),
    Mutant("grid-resident: short slices accepted", "|| stages_of<T>(packs) <= kStagesAhead<T>) return {};", ") return {};", LAUNCHES + " or plans_keep", emulated=PLANNED),
    Mutant("pipelined: GPUs without asynchronous copies accepted", "return device.arch.has_async_copy && call.cols <=", "return call.cols <=", LAUNCHES, emulated=PLANNED),
    Mutant("pipelined: longest row off by one", "call.cols <= longest_slice<", "call.cols < longest_slice<", LAUNCHES, emulated=PLANNED),
    Mutant("pipelined: few rows do not use all SMs", "std::max(fewest, std::min(most, device.sms / rows))", "fewest", LAUNCHES, emulated=PLANNED),
    Mutant("backward: partial sums left out for many rows of one group", "(groups > 1 || call.rows > kRowsPerSum) ? groups : 0", "groups > 1 ? groups : 0", LAUNCHES + " or gradients_of_many_rows", emulated=PLANNED),
    Mutant("backward: partial sums added up though there are none", "if (partial_rows == 0) return cudaSuccess; int threads_per", "int threads_per", VALUES),
    Mutant("two-pass: one piece per row", "std::max<int64_t>(1, waves * kMeasureBlocks * sms / piece_rows)", "int64_t(1)", LAUNCHES, emulated=PLANNED),
    Mutant("registers: limit of aligned rows off by one", "loads_of(call) <= kMaxLoads *", "loads_of(call) < kMaxLoads *", LAUNCHES, emulated=PLANNED),
    Mutant("registers: late loads of float32 weight left out of the ladder", "if (k16Bits && call.affine_float32) return launch_rows<T, kMaxLoads, 1>(call, context);", "", LAUNCHES + " or " + VALUES, emulated=PLANNED),
    Mutant("registers: waves of short rows compared the other way", "if (loads <= 32 && waves <= 0.5)", "if (loads <= 32 && waves > 0.5)", LAUNCHES, emulated=PLANNED),
    Mutant("registers: a rung off by one", "if (loads <= 32 * 3) return", "if (loads < 32 * 3) return", LAUNCHES, emulated=PLANNED),
    Mutant("registers: waves left out of a rung", "if (loads <= 1024 && waves <= (k16Bits ? 1 : 8))", "if (loads <= 1024)", LAUNCHES, emulated=PLANNED),
    Mutant("registers: unaligned rows never share weight", "if (loads <= 1536 && waves > 1)", "if (false)", LAUNCHES, emulated=PLANNED),
    Mutant("backward: pipelined kernels begin with shorter rows", "> pipelined::kMinBackwardBytes", ">= pipelined::kMinBackwardBytes", LAUNCHES, emulated=PLANNED),
    Mutant("backward: rows that fit registers are never pipelined", "> pipelined::kMinBackwardBytes && pipelined", "> 2 * pipelined::kMinBackwardBytes && pipelined", LAUNCHES, emulated=PLANNED),
    Mutant("backward: longest row in registers off by one", "return call.cols <= columns * kBackwardThreads;", "return call.cols < columns * kBackwardThreads;", LAUNCHES, emulated=PLANNED),
    Mutant("backward: never one row of 16 columns", "if (call.cols > kBackwardColumns * kBackwardThreads || one_row.resident_rows > p.resident_rows)", "if (call.cols > kBackwardColumns * kBackwardThreads)", LAUNCHES, emulated=PLANNED),
    Mutant("Python: classes of packages whose names begin with torch are not converted", 'cls.__module__.startswith("torch.")', 'cls.__module__.startswith("torch")', "begin_with_torch"),
    Mutant("build: the name depends on the kernels only", "_name_of(CUDA_SOURCE + CPP_SOURCE)", "_name_of(CUDA_SOURCE)", "name_of_the_ops"),
    Mutant("build: the name depends on the binding only", "_name_of(CUDA_SOURCE + CPP_SOURCE)", "_name_of(CPP_SOURCE)", "name_of_the_ops"),
    Mutant("build: both libraries have one name", '_Library(_NAME + "_epilogue",', '_Library(_NAME,', "name_of_the_ops"),
    Mutant("build: a shared lock", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) return lock", "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n            return lock", "another_process_compiles"),
    Mutant("build: one lock for all libraries", 'file = open(f"{cache}/build.lock"', 'file = open(f"{cache}/../build.lock"', "built_once or own_folders"),
    Mutant("build: compiles again after waiting", "if path is None or os.stat(path).st_ino == broken: with", "if True:\n            with", "another_process_compiles"),
    Mutant("build: versions of CUDA share a library", "torch.__version__, torch.version.cuda, str(", "torch.__version__, str(", "one_namespace"),
    Mutant("build: versions of PyTorch share a library", "[os.uname().machine, torch.__version__, ", "[os.uname().machine, ", "one_namespace"),
    Mutant("Python: what is left to PyTorch returns input's dtype under autocast", "affine.dtype is torch.float32 and not torch.is_autocast_enabled():", "affine.dtype is torch.float32:", "left_to_pytorch"),
    Mutant("Python: a float32 bias without weight is not noticed", "affine = bias if weight is None else weight", "affine = weight", "left_to_pytorch"),
    Mutant("Python: float32 weight of bfloat16 input is not noticed", "input.is_cuda and input.dtype in _16_BITS", "input.is_cuda and input.dtype in _16_BITS[:1]", "left_to_pytorch"),
    Mutant("Python: batch invariance before torch.export", "if _is_exporting() or _is_symbolic(columns)", "if _is_batch_invariant: return False\n    if _is_exporting() or _is_symbolic(columns)", "left_to_pytorch"),
    Mutant("Python: torch.export without torch.compile is not noticed", "is_recorded = is_tracing or _is_exporting()", "is_recorded = is_tracing", "left_to_pytorch"),
    Mutant("Python: torch.jit.trace is not noticed", "or _get_tracing_state() is not None # torch.jit.trace", "# torch.jit.trace", "left_to_pytorch"),
    Mutant("Python: the limit under autocast is in bytes", "return columns <= 16384", "return columns * input.dtype.itemsize <= 16384", "left_to_pytorch or left_to_inductor"),
    Mutant("Python: problem 34 in one kernel under autocast", "and not torch.is_autocast_enabled() and (x.dim()", "and (x.dim()", "problem_34_is_left"),
    Mutant("Python: torch.export records the op of problem 34", "_ops is not None and not _is_exporting() and", "_ops is not None and", "problem_34_is_left"),
    Mutant("Python: some collections of types are rejected", "isinstance(types, Collection)", "isinstance(types, (list, tuple, set))", "any_collection"),
    Mutant("Python: an iterator of types is accepted", "isinstance(types, Collection)", "hasattr(types, '__iter__')", "any_collection"),
    Mutant("build: any value disables", 'os.environ.get("LAYERNORM_INLINE_DISABLE") == "1"', 'bool(os.environ.get("LAYERNORM_INLINE_DISABLE"))', "value_1"),
    Mutant("build: any value makes the kernels batch-invariant", 'os.environ.get("LAYERNORM_INLINE_BATCH_INVARIANT") == "1"', '"LAYERNORM_INLINE_BATCH_INVARIANT" in os.environ', "value_1"),
    Mutant("build: an empty TORCH_EXTENSIONS_DIR is the current folder", 'os.environ.get("TORCH_EXTENSIONS_DIR") or default', 'os.environ.get("TORCH_EXTENSIONS_DIR", default)', "unset_or_empty"),
    Mutant("build: an empty XDG_CACHE_HOME is the current folder", 'os.environ.get("XDG_CACHE_HOME") or "~/.cache"', 'os.environ.get("XDG_CACHE_HOME", "~/.cache")', "unset_or_empty"),
    Mutant("build: an empty CUDA_VISIBLE_DEVICES hides nothing", 'os.environ.get("CUDA_VISIBLE_DEVICES", "0"))', 'os.environ.get("CUDA_VISIBLE_DEVICES") or "0")', "without_initializing"),
    Mutant("build: architectures without a GPU and a list", 'os.environ.get("TORCH_CUDA_ARCH_LIST", "")', 'os.environ.get("TORCH_CUDA_ARCH_LIST", "8.0")', "codes_follow"),
    Mutant("build: a cache with wildcards in its name is not searched", 'glob.escape(cache), ["*"]', 'cache, ["*"]', "unset_or_empty"),
    Mutant("build: what killed builds left is kept if there are wildcards", 'f"{glob.escape(prefix)}*"', 'f"{prefix}*"', "unset_or_empty"),
    Mutant("build: headers of a toolkit with wildcards in its name are not found", 'f"{glob.escape(home)}/{p}', 'f"{home}/{p}', "wildcards_in_its_name"),
    Mutant("build: the runtime of a toolkit with wildcards in its name is not found", 'f"{glob.escape(cuda_home)}/lib', 'f"{cuda_home}/lib', "wildcards_in_its_name"),
    Mutant("build: CXX of two words is one program", '"c++").partition(" ")[0]', '"c++")', "first_word_of_cxx"),
    Mutant("build: the macro of batch invariance has another name in the sources", '"-DLAYERNORM_BATCH_INVARIANT"', '"-DLAYERNORM_BATCHINVARIANT"', "macro_that_python"),
    Mutant("build: the sources ask for another macro of the epilogue", "#ifdef LAYERNORM_HAS_EPILOGUE", "#ifdef LAYERNORM_EPILOGUE", "macro_that_python"),
    Mutant("launch: shared memory is allowed on one device only", "allowed.count({&device, kernel}) > 0", "[&] { for (const auto& pair : allowed) if (pair.second == kernel) return true; return false; }()", "raised_on_each_device", emulated="the GPUs of one machine are usually equal"),
    Mutant("launch: shared memory counts as allowed after an error", "error = cudaFuncSetAttribute(kernel,", "allowed.insert({&device, kernel});\n  error = cudaFuncSetAttribute(kernel,", "raised_on_each_device", emulated="a real GPU does not fail"),
    Mutant("launch: the properties of one device for all", "Device& device = devices[index];", "Device& device = devices[0];", LAUNCHES, emulated="the GPUs of one machine are usually equal"),
    Mutant("launch: an unsupported cooperative launch is an error", "error != cudaErrorCooperativeLaunchTooLarge && error != cudaErrorNotSupported", "error != cudaErrorCooperativeLaunchTooLarge", "rejects_cooperative", emulated="a real GPU supports them"),
    Mutant("launch: after any error, the next family runs", "pipelined::launch_pipelined<T>(call, context); !is_refused(error)) return error; } if (const cudaError_t error = grid", "pipelined::launch_pipelined<T>(call, context); error == cudaSuccess)\n        return error;\n      cudaGetLastError();\n    }\n    if (const cudaError_t error = grid", "error_of_each_launch", emulated="a real GPU does not fail"),
    Mutant("two-pass: the error of the first kernel is lost", "context, call, pieces, piece_stats); if (error != cudaSuccess) return error;", "context, call, pieces, piece_stats);", "error_of_each_launch", emulated="a real GPU does not fail"),
    Mutant("backward: float32 gradients stored as 16 bits without partial sums", "store_affine<T>(call.grad_weight, call.affine_float32, col, grad_weight);", "store_affine<T>(call.grad_weight, false, col, grad_weight);", VALUES.replace("registers", "(pipelined or two_pass)")),
    Mutant("backward: no gradient of bias without weight and without partial sums", "store_affine<T>(call.grad_bias, call.affine_float32, col, grad_bias);", "if (call.grad_weight != nullptr) store_affine<T>(call.grad_bias, call.affine_float32, col, grad_bias);", VALUES.replace("registers", "(pipelined or two_pass)")),
    Mutant("epilogue: not applied to the edge columns of unaligned rows", "apply_epilogue<T, ROWS == 1>(y, call);", "if (N > 1) apply_epilogue<T, ROWS == 1>(y, call);", VALUES),
    Mutant("convolution: backward does not leave autocast", "const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA); const Tensor y = at::conv_transpose3d", "// c10::DispatchKey::AutocastCUDA;\n  const Tensor y = at::conv_transpose3d", "inside_of_autocast"),
    Mutant("forward mode: gradients added up in 16 bits", "const Tensor x = as_matrix(input, shape).to(at::kFloat);", "const Tensor x = as_matrix(input, shape);", "gradients_in_forward_mode"),
    Mutant("vmap: xhat rounded to 16 bits before a mapped weight", "const Tensor x = input.to(at::kFloat);", "const Tensor x = input;", "xhat_of_mapped"),
    Mutant("double backward: statistics treated as constants for third derivatives", "at::GradMode::is_enabled() ? Tensor() : statistics, eps);", "statistics, eps);", "third_derivatives"),
    Mutant("composed: sums of 16 bits", "db = dy.sum(0, false, at::kFloat)", "db = dy.sum(0)", "sums_in_float32"),
    Mutant("composed: means of 16 bits", "return t.mean(1, /*keepdim=*/true, at::kFloat);", "return t.mean(1, /*keepdim=*/true);", TRANSFORMS),
]  # fmt: skip


# ---- Applying a bug ----


def mutated(mutant, source):
    """Returns the source with the bug. Raises ValueError or SyntaxError if the replacement cannot be applied."""
    found = list(re.finditer(r"\s+".join(map(re.escape, mutant.old.split())), source))
    if len(found) != 1:
        raise ValueError(f"occurs {len(found)} times: {mutant.old}")
    text = source[: found[0].start()] + mutant.new + source[found[0].end() :]
    compile(text, SOURCE, "exec")
    return text


def on_the_cpu(mutant, source):
    """Returns the mutant with tests that run without a GPU, or with tests=None if there are none."""
    before, after = (re.findall(r'r"""(.*?)"""', text, re.S) for text in (source, mutated(mutant, source)))
    # The strings with the binding and the kernels differ. Tests of the build compile none of them.
    is_emulated = before != after and not mutant.name.startswith("build:")
    return mutant._replace(tests=ON_THE_CPU.get(mutant.tests, mutant.tests), mark="emulated" if is_emulated else "")


def check(mutants, source):
    """Checks that each bug can be applied and that its tests exist. Prints the errors, and returns their number."""
    tests = "".join(path.read_text() for path in (ROOT / TESTS).glob("*.py") if path != Path(__file__).resolve())
    wrong = 0
    for mutant in mutants:
        try:
            mark = on_the_cpu(mutant, source).mark
            words = set(re.findall(r"\w+", f"{mutant.tests} {ON_THE_CPU.get(mutant.tests) or ''}"))
            unknown = sorted(word for word in words - {"and", "or", "not"} if re.sub(r"_\d+$", "", word) not in tests)
            if unknown:
                raise ValueError(f"no file of {TESTS} contains {', '.join(unknown)}")
            if mutant.emulated and mark != "emulated":
                raise ValueError("the bug is in Python code, and only kernels and binding are emulated")
        except (ValueError, SyntaxError) as error:
            print(f"{mutant.name} | does not apply: {error}")
            wrong += 1
    print(f"{len(mutants)} mutants, {wrong} are wrong")
    return wrong


# ---- Building and testing mutants ----

RUNNING = set()  # child processes; each is the leader of a process group


def run(command, folder, mark):
    """Runs a command, and returns (exit status, output). The status is "slow" if it ran for too long."""
    environment = {**os.environ, "COLUMNS": "250", "TEST_TIME_LIMIT": str(ONE_TEST)}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "cache")
    if mark != "not emulated":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment.pop("TORCH_CUDA_ARCH_LIST", None)  # only the architecture of the GPUs is compiled
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options)
    RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=ALL_TESTS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "slow", process.communicate()[0]
    finally:
        RUNNING.remove(process)


def verdict(status, output):
    """Returns ("killed", failed test), ("survived", "") or ("not tried", reason)."""
    test = r"\S+::(\w+(?:\[.*?\])?)"
    failed = re.search(rf"^(?:FAILED|ERROR) {test}(?: - (.*))?", output, re.M)
    started = re.findall(rf"^{test} (PASSED|SKIPPED)?", output, re.M)
    if failed and "out of memory" in (failed[2] or ""):
        return "not tried", "out of memory"  # tests of other mutants run on the same GPU
    if failed:
        return "killed", f"{failed[1]}: {(failed[2] or 'fails')[:120]}"
    if status == 0:
        passed = any(outcome == "PASSED" for _, outcome in started)
        return ("survived", "") if passed else ("not tried", "its tests are skipped on this machine")
    if status == "slow":
        return "not tried", f"its tests run for more than {ALL_TESTS} s"
    if started and not started[-1][1]:
        return "killed", f"{started[-1][0]}: exit status {status}"
    return "not tried", "no test matches" if status == 5 else output.strip().split("\n")[-1][:200]


class Runner:
    """Builds and tests mutants, several at the same time."""

    def __init__(self, work, source, has_gpu):
        self.work, self.source = Path(work), source
        jobs = max(1, os.cpu_count() // 2)
        self.builds = threading.BoundedSemaphore(jobs)
        self.tests = threading.BoundedSemaphore(TESTS_ON_GPU if has_gpu else max(1, jobs // 2))
        self.unchanged = self.work / "unchanged"
        shutil.copytree(ROOT, self.unchanged, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))

    def folder(self, name, text):
        """Returns a copy of the project and its libraries, in which layernorm_inline.py is the given text."""
        folder = self.work / re.sub(r"\W+", "_", name)
        shutil.copytree(self.unchanged, folder)
        (folder / SOURCE).write_text(text)
        return folder

    def build(self, folder, mark):
        """Builds the libraries in the folder. Returns the compiler's error, or "" if the build succeeds."""
        code = "import layernorm_inline"
        if mark == "emulated":
            code = "import sys; sys.path.insert(0, '.tests'); import emulator; module = emulator.load_module();"
            code += "[emulator.build_kernels(library=name) for name in emulator.sources()];"
            code += "module._load_epilogue(); module._load_convolution()"
        with self.builds:
            status, output = run(["nice", sys.executable, "-c", code], folder, mark)
        errors = re.findall(r"^.*\berror\b.*$", output, re.M | re.I) or [output.strip().split("\n")[-1]]
        return "" if status == 0 else errors[0][-200:]

    def test(self, folder, mark, expression, *options):
        """Runs the tests of an expression in the folder, and returns the result of run()."""
        pytest = [sys.executable, *"-m pytest --full -v --tb=no -rfE -p no:cacheprovider --rootdir=.".split()]
        command = [*pytest, *options, f"--basetemp={folder / 'temp'}", TESTS, "-k", expression, "-m", mark]
        with self.tests:
            return run(command, folder, mark)

    def baseline(self, mark, expression):
        """Runs the tests of an expression without a bug. Returns ("green", summary) or ("red", failed test)."""
        status, output = self.test(self.folder(f"baseline {mark} {expression}", self.source), mark, expression)
        last = output.strip().split("\n")[-1].strip("= ")
        return ("green", last) if status == 0 else ("red", f"{verdict(status, output)[1]} ({last})")

    def mutant(self, mutant):
        """Builds and tests a mutant. Returns (result, details)."""
        if mutant.tests is None:
            return "not tried", "needs a GPU"
        folder = self.folder(mutant.name, mutated(mutant, self.source))
        if error := self.build(folder, mutant.mark):
            return "does not build", error
        end, how = verdict(*self.test(folder, mutant.mark, mutant.tests, "-x"))
        shutil.rmtree(folder)
        return ("equivalent", mutant.equivalent) if end == "survived" and mutant.equivalent else (end, how)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose names contain one of these")
    parser.add_argument("--cpu", action="store_true", help="test kernels and binding on emulated GPUs")
    parser.add_argument("--check", action="store_true", help="build nothing: check that every bug can be applied")
    arguments = parser.parse_args()
    source = (ROOT / SOURCE).read_text()
    mutants = [m for m in MUTANTS if any(text in m.name for text in arguments.only)]
    wrong = check(mutants, source)
    if wrong or arguments.check or not mutants:
        return wrong > 0 or not mutants

    has_gpu = torch.cuda.is_available() and not arguments.cpu
    mutants = [m if has_gpu and not m.emulated else on_the_cpu(m, source) for m in mutants]
    runner = Runner(tempfile.mkdtemp(prefix="mutants_"), source, has_gpu)

    def stop(*_):
        for process in list(RUNNING):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers
        shutil.rmtree(runner.work, ignore_errors=True)
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    expressions = {(m.mark, m.tests) for m in mutants if m.tests}
    for mark in sorted({mark for mark, _ in expressions}):
        if error := runner.build(runner.unchanged, mark):
            return f"without a bug | does not build | {error}"
    ends = []
    with ThreadPoolExecutor(len(expressions) + len(mutants)) as pool:
        futures = {pool.submit(runner.baseline, *e): f"without a bug: -m '{e[0]}' -k '{e[1]}'" for e in expressions}
        futures.update({pool.submit(runner.mutant, mutant): mutant.name for mutant in mutants})
        for future in as_completed(futures):
            end, how = future.result()
            ends.append(end)
            print(f"{futures[future]} | {end}" + (f" | {how}" if how else ""), flush=True)
    shutil.rmtree(runner.work)
    print(f"{len(mutants)} mutants:", ", ".join(f"{ends.count(end)} {end}" for end in sorted({*ends} - {"green"})))
    if "red" in ends:
        print("TESTS FAIL WITHOUT A BUG, so the results mean nothing")
    return not {*ends} <= {"green", "killed", "equivalent"}


if __name__ == "__main__":
    sys.exit(main())
