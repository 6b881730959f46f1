// Checks of CUDA_SOURCE by the compiler: constants whose wrong values would not always show in a result.
// test_checks_of_constants (test_dispatch.py) compiles this after CUDA_SOURCE. If a name has changed, change it here.
namespace TORCH_EXTENSION_NAME {
namespace {

// ---- Statistics, launch, weight gradients ----

static_assert(kSumThreads % 32 == 0 && kRowsPerSum >= 1);

// sum_row needs a power of two up to 32 threads, or whole warps with a slot each.
constexpr bool can_reduce(int threads) {
  return (threads <= 32 ? is_power_of_two(threads) : threads % 32 == 0) && threads <= 32 * kMaxWarps;
}

// ---- Register kernels ----

namespace registers {

// Rows of every length that `packs` loads per thread support: a team holds the row, and a block has 2^n teams.
constexpr bool teams_hold_their_rows(int packs, int max_threads) {
  for (int loads = 1; loads <= packs * max_threads; ++loads) {
    const int threads = row_threads(loads, packs);
    const int teams = std::max(1, kTeamsThreads / threads);
    if (threads * packs < loads || threads > std::max(32, max_threads)) return false;
    if (!can_reduce(threads) || !is_power_of_two(teams) || teams * threads > std::max(kTeamsThreads, threads)) return false;
  }
  return true;
}
static_assert(teams_hold_their_rows(1, kMaxRowThreads) && teams_hold_their_rows(2, kMaxRowThreads) &&
              teams_hold_their_rows(3, kMaxRowThreads) && teams_hold_their_rows(4, kMaxRowThreads));
static_assert(teams_hold_their_rows(kMaxLoads, kMaxUnalignedRowThreads) && teams_hold_their_rows(1, 32));
static_assert(is_power_of_two(kShortRows), "teams share batches of 2^n rows");

// The launch bounds are no smaller than the blocks.
constexpr bool bounds_allow_all_blocks(int element_bytes) {
  for (int packs = 1; packs <= kMaxLoads; ++packs) {
    for (int rows = 1; rows <= 4; ++rows) {
      for (const RowKind kind : {kAligned, kInWarp, kUnaligned}) {
        const int threads = max_threads(element_bytes, packs, rows, kind);
        const int blocks = min_blocks(element_bytes, packs, rows, kind);
        if (threads < kTeamsThreads || blocks < 1) return false;
      }
    }
  }
  return true;
}
static_assert(bounds_allow_all_blocks(2) && bounds_allow_all_blocks(4));

// The rows of a block that backward adds in a tree, and the bias, fit the array `shared`.
constexpr bool backward_blocks_are_valid(int thread_columns, int block_threads) {
  const int shared_floats = (kHasEpilogue ? kBackwardThreads : kBackwardBlockThreads) * thread_columns;
  for (int cols = thread_columns; cols <= thread_columns * kBackwardThreads; cols += thread_columns) {
    const int threads = row_threads(cols, thread_columns);
    const int rows = std::max(1, block_threads / threads);
    if (threads * thread_columns < cols || !can_reduce(threads) || threads * rows % 32 != 0) return false;
    if (threads * rows > kBackwardThreads || !is_power_of_two(rows)) return false;
    if ((rows > 1 && rows * cols > shared_floats) || (kHasEpilogue && cols > shared_floats)) return false;
  }
  return true;
}
static_assert(backward_blocks_are_valid(kBackwardColumns, kBackwardBlockThreads) &&
              backward_blocks_are_valid(kBackwardColumns, kBackwardBlockThreads16Bits) &&
              backward_blocks_are_valid(2 * kBackwardColumns, kBackwardBlockThreads16Bits));

}  // namespace registers

// ---- Two-pass kernels ----

namespace two_pass {
static_assert(kBlockColumns % 128 == 0 && kBlockColumns <= 2048, "a block has at most 256 threads of one load");
static_assert(kMeasureBlocks * kMeasureThreads <= 2048 && kColumnBlocksPerSm >= 1);
}  // namespace two_pass

// ---- Pipelined kernels ----

namespace pipelined {
static_assert(kGatherers >= 1);
static_assert(kThreadColumns % 8 == 0 && kMaxSlice == 32 * kComputeWarps * kThreadColumns);
static_assert(kMaxBlocksPerRow % 32 == 0, "the lanes of a warp read the mailboxes of a row");
}  // namespace pipelined

// ---- Grid-resident kernel ----

namespace grid_resident {
template <typename T> constexpr bool constants_are_valid() {
  constexpr int kMaxPacks = kThreadPacks<T> * kSliceStages<T>;  // of a thread's weight
  constexpr int kSharedPacks = 2 * kMaxPacks - kWeightPacks<T> - kBiasPacks<T>;
  constexpr int kSlots = kRowsAhead<T> * kSliceStages<T> + kStagesAhead<T> + 2;
  static_assert(int(sizeof(Control<T>)) + kSlots * kStageBytes<T> + 16 * kBlockThreads<T> * kSharedPacks <= 227 << 10,
                "the longest slice, with a ring as in rule 1, fits into shared memory");
  return true;
}
static_assert(constants_are_valid<float>() && constants_are_valid<__half>());
}  // namespace grid_resident

}  // namespace
}  // namespace TORCH_EXTENSION_NAME
