// Checks of CUDA_SOURCE by the compiler: constants whose wrong values would not always show in a result.
// test_checks_of_constants (test_dispatch.py) compiles this after CUDA_SOURCE. If a name has changed, change it here.
namespace TORCH_EXTENSION_NAME {
namespace {

constexpr bool has_one_bit(int x) { return x > 0 && (x & (x - 1)) == 0; }

// ---- Statistics, launch, weight gradients ----

static_assert(has_one_bit(kMaxWarps) && kMaxWarps <= 32, "combine_row gives each slot a lane, and halves them");
static_assert(has_one_bit(kMaxThreadsPerColumn) && kMaxThreadsPerColumn <= 64, "sum_partials adds in a tree");
static_assert(kSumThreads % 32 == 0 && kSumThreads >= kMaxThreadsPerColumn && kRowsPerSum >= 1);

// combine_row needs a power of two up to 32 threads, or whole warps with a slot each.
constexpr bool can_reduce(int threads) {
  return (threads <= 32 ? has_one_bit(threads) : threads % 32 == 0) && threads <= 32 * kMaxWarps;
}

// ---- Register kernels ----

namespace registers {

// Rows of every length that `packs` loads per thread support: a team holds the row, and a block has 2^n teams.
constexpr bool teams_hold_their_rows(int packs, int max_threads) {
  for (int loads = 1; loads <= packs * max_threads; ++loads) {
    const int threads = row_threads(loads, packs);
    const int teams = std::max(1, kBlockThreads / threads);
    if (threads * packs < loads || threads > std::max(32, max_threads)) return false;
    if (!can_reduce(threads) || !has_one_bit(teams) || teams * threads > std::max(kBlockThreads, threads)) return false;
  }
  return true;
}
static_assert(teams_hold_their_rows(1, kMaxRowThreads) && teams_hold_their_rows(2, kMaxRowThreads) &&
              teams_hold_their_rows(3, kMaxRowThreads) && teams_hold_their_rows(4, kMaxRowThreads));
static_assert(teams_hold_their_rows(kMaxLoads, kMaxUnalignedRowThreads) && teams_hold_their_rows(1, 32));
static_assert(has_one_bit(kShortRows) && has_one_bit(kBlockThreads), "teams share batches of 2^n rows");

// The launch bounds are no smaller than the blocks, and no SM has more than 2048 threads.
constexpr bool bounds_allow_all_blocks(int element_bytes) {
  for (int packs = 1; packs <= kMaxLoads; ++packs) {
    for (int rows = 1; rows <= 4; ++rows) {
      for (const RowKind kind : {kAligned, kInWarp, kUnaligned}) {
        const int threads = max_threads(element_bytes, packs, rows, kind);
        const int blocks = min_blocks(element_bytes, packs, rows, kind);
        if (threads < kBlockThreads || blocks < 1 || threads * blocks > 2048) return false;
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
    if (threads * rows > kBackwardThreads || !has_one_bit(rows)) return false;
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
static_assert(kMeasureThreads % 32 == 0 && has_one_bit(kMeasureThreads / 32) && kMeasureThreads <= 1024);
static_assert(8 * kMeasureThreads <= kMinPieceColumns, "a chunk is not longer than a piece");
static_assert(kBlockColumns % 128 == 0 && kBlockColumns <= 2048, "a block has at most 256 threads of one load");
static_assert(kMeasureBlocks * kMeasureThreads <= 2048 && kColumnBlocksPerSm >= 1);
}  // namespace two_pass

// ---- Pipelined kernels ----

namespace pipelined {
static_assert(kBlockThreads == 640, "The host launches this number, so it must be the same on every GPU.");
static_assert(kGatherers >= 1 && 32 * kLoader < kBlockThreads, "every role has its warps");
static_assert(kMaxStages >= 3, "one to load, one to measure, and one that waits for statistics");
static_assert(kMaxStages <= kBlockThreads / 32, "each warp initializes the barriers of one stage");
static_assert(kThreadColumns % 8 == 0 && kMaxSlice == 32 * kComputeWarps * kThreadColumns);
static_assert(kMaxBlocksPerRow % 32 == 0, "the lanes of a warp read the mailboxes of a row");
}  // namespace pipelined

// ---- Grid-resident kernel ----

namespace grid_resident {
template <typename T> constexpr bool constants_are_valid() {
  constexpr int kMaxPacks = kThreadPacks<T> * kSliceStages<T>;  // of a thread's weight
  constexpr int kSharedPacks = 2 * kMaxPacks - kWeightPacks<T> - kBiasPacks<T>;
  constexpr int kSlots = kRowsAhead<T> * kSliceStages<T> + kStagesAhead<T> + 2;
  static_assert(kWarps<T> <= 32 && has_one_bit(kWarps<T>), "combine_lanes needs a power of two up to 32");
  static_assert(kBlockThreads<T> > 32, "thread 32 prefetches");
  static_assert(kStagesAhead<T> >= 0 && kStagesAhead<T> < kSliceStages<T>, "rule 3");
  static_assert(kRowsAhead<T> == 1 || kRowsAhead<T> == 2, "the first rows are measured before the loop");
  static_assert(kPrefetchStages<T> >= 0, "a prefetch must not be later than the copy");
  static_assert(kWeightPacks<T> <= kMaxPacks && kBiasPacks<T> <= kMaxPacks, "a thread has no more packs");
  static_assert(int(sizeof(Control<T>)) + kSlots * kStageBytes<T> + 16 * kBlockThreads<T> * kSharedPacks <= 227 << 10,
                "the longest slice, with a ring as in rule 1, fits into shared memory");
  return true;
}
static_assert(constants_are_valid<float>() && constants_are_valid<__half>());
}  // namespace grid_resident

}  // namespace
}  // namespace TORCH_EXTENSION_NAME
