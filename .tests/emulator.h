// An emulated GPU: runs the kernels of CUDA_SOURCE on a CPU. emulator.py turns CUDA_SOURCE into C++ that includes this
// file, which provides threadIdx, shared memory, barriers, shuffles, copies, matrix products, and the CUDA runtime.
//
// Every CUDA thread is a fiber: a function call with its own stack, which runs until it must wait: at a barrier, in an
// instruction of the whole warp, for a copy, or before it reads what other blocks write. In each round, the scheduler
// (run_blocks) runs every fiber that can go on, in a new random order. A cooperative launch runs all blocks at once;
// other launches run four blocks at a time, in random order.
//
// How it exposes bugs. All random choices follow from a seed, so that a failure can be repeated.
//     Races       Random warps skip up to 63 rounds. An asynchronous copy arrives at a random moment; until then, its
//                 destination is NaN. For a kernel that may start before the previous one has ended, all that the call
//                 writes is NaN until it has waited, and what it writes there before is lost. So a missing barrier or a
//                 wrong count gives a wrong result or a deadlock, which is reported.
//     Memory      Every tensor, and scratch memory, lies between pages that cannot be accessed. Inputs cannot be written.
//                 Misaligned accesses, indices beyond an array, copies and prefetches that leave a tensor, and blocks
//                 that exceed the GPU's shared memory end the kernel.
//     Unset data  Shared memory, scratch memory, outputs, variables, and the memory beside tensors are NaN at first.
//
// What it does not model: the order of writes in memory, so that a missing fence is not detected; races between two
// instructions without a wait between them; the precision of ex2, rcp and rsqrt, which are exact here; inline assembly,
// which emulator.py replaces; asynchronous matrix products, which are computed at once; speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <cuda_runtime_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace emulator {

// Returns the bits of x as another type.
template <typename To, typename From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// Reports a condition that must hold in a kernel. On a real GPU, it is not checked.

// ---- Properties of the GPU, and settings ----

struct Gpu {
  int sms, l2_bytes, shared_bytes, code;
};
inline Gpu gpu;
inline cudaError_t cooperative_error = cudaSuccess;  // the result of cooperative launches
inline cudaError_t last_error = cudaSuccess;         // the result of the next cudaGetLastError
inline bool dry = false;                             // a launch runs one thread, which returns at once
inline std::string launches;                         // if dry: one line per launch

// The source of all random choices: splitmix64.
struct Random {
  using result_type = uint64_t;
  uint64_t state = 0;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t(0); }
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};
inline Random random_numbers;

// ---- Guarded memory ----

// Memory full of this value contains NaN of every dtype. It differs from the bits of an empty mailbox, kEmptyMailbox.
constexpr uint16_t kNan = 0xffc0;
// Bytes of a cache line. The behaviour of kernels may depend on an address modulo this number.
constexpr uintptr_t kLine = 128;

// Memory for a tensor, full of NaN, at the same position in a cache line as `like`. It lies in pages of its own, whose
// remaining bytes are NaN. At one of the two ends, chosen at random, less than a line remains. The pages before and
// after cannot be accessed.
class Guarded {
 public:
  Guarded(size_t bytes, const void* like) : bytes_(bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), pages = (bytes + 2 * kLine + page - 1) / page * page;
    inner_bytes_ = pages;
    map_bytes_ = pages + 2 * page;
    void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) fail("mmap failed: not enough memory");
    map_ = static_cast<unsigned char*>(map);
    inner_ = map_ + page;
    mprotect(inner_, pages, PROT_READ | PROT_WRITE);
    std::fill_n(reinterpret_cast<uint16_t*>(inner_), pages / 2, kNan);
    const size_t first = uintptr_t(like) % kLine, slack = (pages - first - bytes) / kLine * kLine;
    data_ = inner_ + first + (random_numbers() % 2 == 0 ? slack : 0);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(map_, map_bytes_); }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool is_input() const { return is_input_; }
  void forbid_writes() {
    is_input_ = true;
    mprotect(inner_, inner_bytes_, PROT_READ);
  }
  // Replaces the contents by NaN until show() is called.
  void hide() {
    mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE);
    hidden_.assign(data_, data_ + bytes_);
    std::fill_n(reinterpret_cast<uint16_t*>(data_), bytes_ / 2, kNan);
  }
  void show() {
    std::copy(hidden_.begin(), hidden_.end(), data_);
    hidden_.clear();
    if (is_input_) forbid_writes();
  }

  // Fails if a kernel has written to the bytes beside the tensor.
  void check(const std::string& name) const {
    const auto words = [](unsigned char* p) { return reinterpret_cast<const uint16_t*>(p); };
    const auto is_written = [](uint16_t x) { return x != kNan; };
    const uint16_t *begin = words(data_), *last = words(inner_ + inner_bytes_);
    const uint16_t* found = std::find_if(words(inner_), begin, is_written);
    if (found == begin) found = std::find_if(words(data_ + bytes_), last, is_written);
    if (found == last) return;
    fail("a kernel wrote outside of " + name + ", which has " + std::to_string(bytes_) + " bytes: at offset " +
         std::to_string(2 * (found - begin)) + " bytes");
  }

  // Returns true if all bytes belong to the tensor, or lie before it in the line in which it starts.
  bool contains(const void* p, int64_t count) const {
    const auto* begin = static_cast<const unsigned char*>(p);
    return begin >= data_ - uintptr_t(data_) % kLine && begin + count <= data_ + bytes_;
  }

 private:
  unsigned char *map_, *inner_, *data_;
  size_t map_bytes_, inner_bytes_, bytes_;
  std::vector<unsigned char> hidden_;  // the contents, while they are hidden
  bool is_input_ = false;
};

inline std::vector<std::unique_ptr<Guarded>> tensors;  // those of the current call; scratch memory is the last

inline void check_units(const void* p, int64_t bytes, int unit = 16) {
  if ((uintptr_t(p) | uintptr_t(bytes)) % unit == 0 && bytes > 0) return;
  fail("a copy or prefetch must start at a multiple of " + std::to_string(unit) + " bytes and consist of such units");
}

inline bool lies_in_tensor(const void* p, int64_t bytes) {
  return std::any_of(tensors.begin(), tensors.end(), [&](auto& t) { return t->contains(p, bytes); });
}

inline void check_read(const void* p, int64_t bytes, int unit = 16) {
  check_units(p, bytes, unit);
  if (!lies_in_tensor(p, bytes)) fail("a copy reads outside of all tensors");
}

// A prefetch may extend to the end of the last 16-byte unit, because it does not return the data.
inline void check_prefetch(const void* p, int64_t bytes) {
  check_units(p, bytes);
  if (!lies_in_tensor(p, bytes - 15)) fail("a prefetch reads outside of all tensors");
}

// For a prefetch of the sector that contains this byte.
inline void check_prefetch(const void* p) {
  if (!lies_in_tensor(p, 1)) fail("a prefetch reads outside of all tensors");
}

// ---- Fibers ----

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPoisonedBytes = 16 << 10;  // the part of a stack that is filled with NaN: a kernel's variables

// A barrier of all threads of a warp, a block or a grid, without those that have ended. A thread that waits goes on
// when the phase has changed.
struct Barrier {
  int arrived = 0, participants = 0;
  unsigned phase = 0;
};

struct Warp {
  Barrier barrier;
  bool polls = false;  // it has read mailboxes of other blocks
  int rounds_to_skip = 0;
  uint64_t slots[2][32];  // one word per lane, for instructions that exchange data; even and odd phases alternate
};

struct NamedBarrier {
  int arrived = 0;
  unsigned phase = 0;
};

struct Block {
  uint3 index;
  Barrier barrier;
  std::vector<Warp> warps;
  std::map<int, NamedBarrier> named;
  std::map<const void*, std::unique_ptr<unsigned char[]>> shared;  // static shared memory of each declaration
  size_t shared_bytes;                                             // of static and dynamic shared memory
  std::vector<unsigned char> dynamic_memory;
  unsigned char *dynamic, *dynamic_end;
};

// An asynchronous copy that has not arrived yet.
struct Copy {
  void* to;
  const void* from;  // null: writes zeros
  int bytes;
  uint64_t* barrier;  // the mbarrier that counts its bytes; null for cp.async
};

// The buffer of __builtin_setjmp: where a fiber, or the scheduler, goes on. (Unlike swapcontext, it needs no system
// call.)
struct JumpBuffer {
  void* words[5];
};

struct Fiber {
  ucontext_t begin;
  JumpBuffer resume_point;
  char* stack;
  uint3 thread_index;
  int linear;  // index of the thread in its block
  Block* block;
  bool started = false, done = false;
  const unsigned* phase = nullptr;  // if not null, the fiber waits until *phase differs from `seen`
  unsigned seen = 0;
  std::vector<Copy> copies;  // its cp.async copies that it has not waited for yet
  std::string error;
};

struct Grid {
  dim3 grid, block;
  size_t dynamic_bytes;
  Barrier barrier;
  bool cooperative;
  bool early;  // may start before the previous kernel has ended (programmatic dependent launch)
  bool after_caller;  // if it starts early: the caller's kernels may not have ended either
  const std::function<void()>* kernel;
  const std::string* name;
  bool hides = false;     // hide_tensors was called, and the threads have not waited yet
  uint64_t progress = 0;  // counts the events that let a thread go on
};

inline Grid* grid = nullptr;      // the one that runs
inline Fiber* current = nullptr;  // the one that runs; null in the scheduler
inline JumpBuffer scheduler;
inline std::vector<char*> free_stacks;
inline std::vector<Copy> bulk_copies;  // not arrived yet, of all blocks

[[noreturn, gnu::noinline]] inline void jump_to(JumpBuffer& point) { __builtin_longjmp(point.words, 1); }

// Stops the current fiber, and goes on in the scheduler.
[[gnu::noinline]] inline void yield() {
  if (__builtin_setjmp(current->resume_point.words) == 0) jump_to(scheduler);
}

// Starts or continues the current fiber. Returns when it stops.
[[gnu::noinline]] inline void resume() {
  if (__builtin_setjmp(scheduler.words) != 0) return;
  if (current->started) jump_to(current->resume_point);
  current->started = true;
  setcontext(&current->begin);
}

// Waits until phase differs from seen.
inline void wait_for_change(const unsigned& phase, unsigned seen) {
  current->phase = &phase, current->seen = seen;
  while (phase == seen) yield();
  current->phase = nullptr;
}

// Starts the next phase if all participants have arrived.
inline bool complete(Barrier& b) {
  if (b.arrived == 0 || b.arrived < b.participants) return false;
  b.arrived = 0, ++b.phase, ++grid->progress;
  return true;
}

inline void wait(Barrier& b) {
  const unsigned phase = b.phase;
  ++b.arrived;
  complete(b);
  wait_for_change(b.phase, phase);
}

// Removes a thread that ends.
inline void leave(Barrier& b) {
  --b.participants;
  complete(b);
}

inline Warp& warp() { return current->block->warps[current->linear / 32]; }

// Waits for all lanes of the warp. This does not count as progress of a warp that polls other blocks. Otherwise, a
// deadlock of warps that poll forever would not be detected.
inline void wait(Warp& w) {
  const uint64_t before = grid->progress;
  const unsigned phase = w.barrier.phase;
  ++w.barrier.arrived;
  if (complete(w.barrier) && w.polls) grid->progress = before;
  wait_for_change(w.barrier.phase, phase);
}

// Called before a thread reads mailboxes of other blocks. Lets other threads run.
inline void poll() {
  warp().polls = true;
  yield();
}

// The bits of a result of arithmetic: on a GPU, every NaN result has the same bits.
inline uint32_t bits_of_arithmetic(float x) { return std::isnan(x) ? 0x7fffffff : bits_of<uint32_t>(x); }

// ---- mbarriers and asynchronous copies ----

struct MBarrier {
  int count, pending, bytes;  // arrivals per phase; arrivals and bytes that the current phase still waits for
  unsigned phase;
};
inline std::unordered_map<uint64_t*, MBarrier> mbarriers;

inline MBarrier& mbarrier(uint64_t* address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("a kernel uses an mbarrier that it has not initialized");
  return found->second;
}

// Starts the next phase if nothing is pending.
inline void settle(MBarrier& b) {
  if (b.pending < 0) fail("an mbarrier has more arrivals than it was initialized for");
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.phase, ++grid->progress;
}

inline void arrive(uint64_t* address, int bytes) {
  MBarrier& b = mbarrier(address);
  b.bytes += bytes, --b.pending;
  settle(b);
}

inline void wait(uint64_t* address, int parity) {
  const MBarrier& b = mbarrier(address);
  while (int(b.phase & 1) == parity) wait_for_change(b.phase, b.phase);
}

// Lets a copy arrive.
inline void perform(const Copy& copy) {
  if (copy.from != nullptr) {
    memcpy(copy.to, copy.from, copy.bytes);
  } else {
    memset(copy.to, 0, copy.bytes);
  }
  if (copy.barrier != nullptr) {
    MBarrier& b = mbarrier(copy.barrier);
    b.bytes -= copy.bytes;
    settle(b);
  }
  ++grid->progress;
}

// cp.async.bulk. The destination is NaN until the copy arrives.
inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_units(to, bytes);
  check_read(from, bytes);
  memset(to, 0xff, bytes);
  bulk_copies.push_back({to, from, bytes, barrier});
}

// cp.async. The destination is NaN until the thread waits for its copies, or until they arrive at an mbarrier.
inline void copy_async(void* to, const void* from, bool exists = true, int bytes = 16) {
  check_units(to, bytes, bytes);
  if (exists) check_read(from, bytes, bytes);
  memset(to, 0xff, bytes);
  current->copies.push_back({to, exists ? from : nullptr, bytes, nullptr});
}

inline void wait_for_copies() {
  yield();
  for (const Copy& copy : current->copies) perform(copy);
  current->copies.clear();
}

// Arrives at the mbarrier when all earlier copies of this thread have arrived.
inline void arrive_with_copies(uint64_t* barrier) {
  for (Copy copy : current->copies) {
    mbarrier(barrier).bytes += copy.bytes;
    copy.barrier = barrier;
    bulk_copies.push_back(copy);
  }
  current->copies.clear();
  arrive(barrier, 0);
}

inline void named_barrier(int name, int threads, bool waits) {
  NamedBarrier& b = current->block->named[name];
  const unsigned phase = b.phase;
  if (++b.arrived > threads) fail("a named barrier has more arrivals than threads");
  if (b.arrived == threads) b.arrived = 0, ++b.phase, ++grid->progress;
  if (waits) wait_for_change(b.phase, phase);
}

// ---- Running a grid ----

inline bool follows_caller = true;  // all kernels of the call so far, if any, could start before the caller's had ended

// Returns true if a tensor may still be written, or read, when the current kernel starts early: by an earlier kernel of
// the call, or by the caller's.
inline bool is_in_use(const Guarded& tensor) { return grid->after_caller || !tensor.is_input(); }

// Hides the tensors that are in use until the current kernel has waited for the previous one. If the kernel writes to
// them before it waits, the numbers are lost.
inline void hide_tensors() {
  for (auto& t : tensors) {
    if (is_in_use(*t)) t->hide();
  }
  grid->hides = true;
}

// Waits for all threads of the grid. The first thread to go on shows what was hidden.
inline void wait_for_previous() {
  if (!grid->early) return;
  wait(grid->barrier);
  if (!grid->hides) return;
  for (auto& t : tensors) {
    if (is_in_use(*t)) t->show();
  }
  grid->hides = false;
}

struct End {};  // thrown to end a thread

// The function of every fiber: runs one thread of the kernel.
inline void run_fiber() {
  try {
    (*grid->kernel)();
  } catch (End) {
  } catch (const std::exception& e) {
    current->error = e.what();
  }
  current->done = true;
  leave(warp().barrier), leave(current->block->barrier), leave(grid->barrier);
  ++grid->progress;
  jump_to(scheduler);
}

// Handles a forbidden access: ends the fiber with an error, and goes on in the scheduler.
inline void on_signal(int number, siginfo_t* info, void*) {
  if (current == nullptr) {  // the access is not a kernel's
    signal(number, SIG_DFL);
    return;
  }
  if (number == SIGSEGV || number == SIGBUS) {
    const auto* address = static_cast<const unsigned char*>(info->si_addr);
    current->error = "an access outside of all tensors, or a write to an input";
    for (const auto& t : tensors) {
      const int64_t offset = address - static_cast<const unsigned char*>(t->data());
      if (offset > -8192 && offset < int64_t(t->bytes()) + 8192) {
        current->error +=
            ", at offset " + std::to_string(offset) + " of a tensor of " + std::to_string(t->bytes()) + " bytes";
      }
    }
  } else {  // -fsanitize executes a trap instruction
    current->error = "a misaligned access, or an index beyond the end of an array";
  }
  current->done = true;
  jump_to(scheduler);
}

// Installs on_signal, and restores the previous handlers at the end.
struct SignalHandlers {
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction before[4];
  SignalHandlers() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // SA_NODEFER: jump_to does not return from the handler
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &action, &before[i]);
  }
  ~SignalHandlers() {
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &before[i], nullptr);
  }
};

inline std::unique_ptr<Block> new_block(const Grid& running, uint3 index, int threads) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->barrier.participants = threads;
  block->warps.resize((threads + 31) / 32);
  block->shared_bytes = running.dynamic_bytes;
  block->dynamic_memory.assign(running.dynamic_bytes + 2 * kLine, 0xff);
  block->dynamic = block->dynamic_memory.data();
  while (uintptr_t(block->dynamic) % kLine != 0) ++block->dynamic;
  block->dynamic_end = block->dynamic + running.dynamic_bytes;
  return block;
}

inline std::unique_ptr<Fiber> new_fiber(const Grid& running, Block& block, unsigned t) {
  auto fiber = std::make_unique<Fiber>();
  const dim3 size = running.block;
  fiber->linear = t;
  fiber->block = &block;
  fiber->thread_index = {t % size.x, t / size.x % size.y, t / size.x / size.y};
  ++block.warps[t / 32].barrier.participants;
  if (free_stacks.empty()) free_stacks.push_back(static_cast<char*>(malloc(kStackBytes)));
  fiber->stack = free_stacks.back();
  free_stacks.pop_back();
  // NaN, so that the use of an uninitialized variable shows in the results. Ordinary numbers could hide it, because a
  // kernel may multiply the variable by 0.
  memset(fiber->stack + kStackBytes - kPoisonedBytes, 0xff, kPoisonedBytes);
  getcontext(&fiber->begin);
  fiber->begin.uc_stack.ss_sp = fiber->stack;
  fiber->begin.uc_stack.ss_size = kStackBytes;
  fiber->begin.uc_link = nullptr;
  makecontext(&fiber->begin, run_fiber, 0);
  return fiber;
}

// Lets random warps skip some rounds, so that other warps get ahead of them, as on a GPU. skips_none: every warp runs.
inline void choose_skipped_rounds(const std::vector<std::unique_ptr<Block>>& blocks, bool skips_none) {
  for (const auto& block : blocks) {
    for (Warp& w : block->warps) {
      if (skips_none) {
        w.rounds_to_skip = 0;
      } else if (w.rounds_to_skip > 0) {
        --w.rounds_to_skip;
      } else if (random_numbers() % 64 == 0) {
        w.rounds_to_skip = random_numbers() % 64;
      }
    }
  }
}

// Runs the blocks with these indices, all at once, until their threads have ended. This is the scheduler.
inline void run_blocks(Grid& running, const std::vector<uint3>& indices) {
  const int threads = running.block.x * running.block.y * running.block.z;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> left;
  for (const uint3 index : indices) {
    blocks.push_back(new_block(running, index, threads));
    for (int t = 0; t < threads; ++t) {
      fibers.push_back(new_fiber(running, *blocks.back(), t));
      left.push_back(fibers.back().get());
    }
  }
  running.barrier = {};
  running.barrier.participants = int(fibers.size());
  grid = &running;
  if (running.early) hide_tensors();
  uint64_t progress = ~uint64_t(0);
  int idle = 0;
  std::string error;
  while (!left.empty() && error.empty()) {
    std::shuffle(left.begin(), left.end(), random_numbers);
    choose_skipped_rounds(blocks, idle > 100);  // all warps run before a deadlock is reported
    for (Fiber* fiber : left) {
      if (fiber->block->warps[fiber->linear / 32].rounds_to_skip > 0) continue;
      if (fiber->phase != nullptr && *fiber->phase == fiber->seen) continue;
      current = fiber;
      resume();
      current = nullptr;
      if (!fiber->error.empty()) {
        error = fiber->error;
        break;
      }
    }
    left.erase(std::remove_if(left.begin(), left.end(), [](Fiber* f) { return f->done; }), left.end());
    idle = running.progress == progress ? idle + 1 : 0;
    progress = running.progress;
    if (idle > 200 && bulk_copies.empty() && error.empty()) {
      error = "deadlock: " + std::to_string(left.size()) + " threads wait, and none can go on";
    }
    std::vector<Copy> arriving;
    arriving.swap(bulk_copies);
    for (const Copy& copy : arriving) {
      if (random_numbers() % 4 == 0) {
        perform(copy);
      } else {
        bulk_copies.push_back(copy);
      }
    }
  }
  for (auto& fiber : fibers) free_stacks.push_back(fiber->stack);
  if (error.empty() && !bulk_copies.empty()) error = "a block ended before its copies arrived";
  for (const auto& block : blocks) {
    const unsigned char *end = block->dynamic_end, *last = &block->dynamic_memory.back();
    if (std::any_of(end, last, [](unsigned char c) { return c != 0xff; })) {
      error = "a block wrote beyond its shared memory";
    }
  }
  bulk_copies.clear();
  mbarriers.clear();
  grid = nullptr;
  if (!error.empty()) fail(*running.name + ": " + error);
}

// Cooperative: all blocks run at once. Early: the kernel may start before the previous one has ended.
enum class Launch { Plain, Cooperative, Early };

// Runs a grid. kernel: runs one thread.
inline void run(dim3 grid_size, dim3 block_size, size_t dynamic_bytes, Launch how,
                const std::function<void()>& kernel) {
  std::vector<uint3> indices;
  for (unsigned z = 0; z < grid_size.z; ++z) {
    for (unsigned y = 0; y < grid_size.y; ++y) {
      for (unsigned x = 0; x < grid_size.x; ++x) indices.push_back({x, y, z});
    }
  }
  if (indices.empty()) fail("a grid has no blocks");
  if (grid_size.y > 65535 || grid_size.z > 65535) fail("a grid is too large");
  if (dynamic_bytes > size_t(gpu.shared_bytes)) fail("a launch requests too much dynamic shared memory");
  const SignalHandlers handlers;
  const bool after_caller = follows_caller;
  if (how != Launch::Early) follows_caller = false;
  Grid running = {grid_size, block_size, dynamic_bytes, {}, how == Launch::Cooperative, how == Launch::Early,
                  after_caller, &kernel, nullptr};
  if (dry) {
    const auto sizes = [](dim3 size) { return " " + std::to_string(size.x) + "x" + std::to_string(size.y); };
    launches +=
        sizes(grid_size) + " blocks of" + sizes(block_size) + " threads, " + std::to_string(dynamic_bytes) + " B: ";
    running.block = 1, indices.resize(1);
  }
  if (how == Launch::Cooperative) return run_blocks(running, indices);
  std::shuffle(indices.begin(), indices.end(), random_numbers);
  for (size_t i = 0; i < indices.size(); i += 4) {
    run_blocks(running, {indices.begin() + i, indices.begin() + std::min(indices.size(), i + 4)});
  }
}

// Returns the block's shared memory for a declaration, which is identified by an address.
template <typename T>
T& shared(const void* declaration) {
  Block& block = *current->block;
  auto& memory = block.shared[declaration];
  if (memory == nullptr) {
    block.shared_bytes += (sizeof(T) + 15) / 16 * 16;
    if (block.shared_bytes > size_t(gpu.shared_bytes)) fail("a block uses too much shared memory");
    memory.reset(new unsigned char[sizeof(T) + kLine]);
    memset(memory.get(), 0xff, sizeof(T) + kLine);
  }
  return *reinterpret_cast<T*>((uintptr_t(memory.get()) + kLine - 1) / kLine * kLine);
}

// ---- The list of kernels, and which of them ran ----

struct Kernel {
  std::string name;
  bool ran = false;

  static std::vector<Kernel*>& all() {
    static std::vector<Kernel*> kernels;
    return kernels;
  }
  // printed: the text "... [with Here = emulated::{anonymous}::family::kernel<...>(parameters)::Here]"
  explicit Kernel(const std::string& printed) {
    const size_t from = printed.find("Here = ") + 7;
    name = printed.substr(from, printed.find('(', from) - from);
    for (const std::string scope : {"emulated::", "{anonymous}::", "<unnamed>::"}) {
      for (size_t at; (at = name.find(scope)) != std::string::npos;) name.erase(at, scope.size());
    }
    all().push_back(this);
  }
};

// Registers a kernel when the library is loaded. Here is an empty struct that is declared inside the kernel: its name
// contains the kernel's. Every instantiation of a kernel has its own, even if it is never launched.
template <typename Here>
struct KernelOf {
  static const char* printed() { return __PRETTY_FUNCTION__; }
  static inline Kernel kernel{printed()};
};

// The first statement of every kernel. The arguments are the kernel's launch bounds.
template <typename Here>
void begin(int max_threads, int = 0) {
  Kernel& kernel = KernelOf<Here>::kernel;
  kernel.ran = true;
  grid->name = &kernel.name;
  const int threads = grid->block.x * grid->block.y * grid->block.z;
  if (threads > max_threads) fail("a block has more threads than its launch bounds allow");
  if (dry) launches += kernel.name + "\n";
  if (dry) throw End();
}

// cudaLaunchKernelEx.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  Launch how = Launch::Plain;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative) how = Launch::Cooperative;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) how = Launch::Early;
  }
  const dim3 g = config->gridDim;
  if (how == Launch::Cooperative) {
    if (int(g.x * g.y * g.z) > gpu.sms) last_error = cudaErrorCooperativeLaunchTooLarge;
    if (cooperative_error != cudaSuccess) last_error = cooperative_error;
    if (last_error != cudaSuccess) return last_error;
  }
  run(g, config->blockDim, config->dynamicSmemBytes, how, [=] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
}

// ---- Instructions of a whole warp ----

// Waits for all lanes, and returns the values that they passed.
template <typename Value>
const uint64_t* exchange(Value value) {
  static_assert(sizeof(Value) <= 8, "a lane exchanges one word");
  Warp& w = warp();
  uint64_t* slots = w.slots[w.barrier.phase % 2];
  memcpy(&slots[current->linear % 32], &value, sizeof(value));
  wait(w);
  return slots;
}

// Returns the value that a lane passed.
template <typename Value>
Value value_of_lane(Value value, int lane) {
  Value result;
  memcpy(&result, &exchange(value)[lane & 31], sizeof(value));
  return result;
}

// An operand of a matrix product as a float. Float32 operands are TF32: the hardware ignores their last 13 bits.
template <typename T>
float operand(T x) {
  if constexpr (sizeof(T) == 4) return bits_of<float>(bits_of<uint32_t>(x) & 0xffffe000u);
  return float(x);
}

// Returns an element of a matrix in shared memory. matrix: a descriptor of wgmma, with three fields in units of 16
// bytes: the address, the step to the next unit of a row, and the step to the next 8 rows.
template <typename T>
float element_of(uint64_t matrix, int row, int k) {
  constexpr int kEach = 16 / sizeof(T);
  auto field = [&](int bit) { return int(matrix >> bit & 0x3fff); };
  const int unit = field(0) + k / kEach * field(16) + row / 8 * field(32) + row % 8;
  T number;
  memcpy(&number, current->block->dynamic + 16 * unit + k % kEach * sizeof(T), sizeof(T));
  return operand(number);
}

// c += a * b for a with 64 rows, 16 per warp, and b with 128 columns: wgmma, but computed at once.
template <typename T, typename A>
void multiply_add_async(float (&c)[64], const A& a, uint64_t b) {
  const int lane = current->linear % 32, first_row = current->linear / 32 % 4 * 16 + lane / 4;
  for (int k = 0; k < int(32 / sizeof(T)); ++k) {
    for (int half = 0; half < 2; ++half) {
      float number;
      if constexpr (std::is_same_v<A, uint64_t>) {
        number = element_of<T>(a, first_row + 8 * half, k);
      } else {  // a is in registers
        number = operand(bits_of<float>(value_of_lane(a[half + k / 4 * 2], lane / 4 * 4 + k % 4)));
      }
      for (int i = 0; i < 32; ++i) {
        c[i / 2 * 4 + half * 2 + i % 2] += number * element_of<T>(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
      }
    }
  }
}

}  // namespace emulator

// ---- Built-in names and functions of CUDA C++ ----

#undef __launch_bounds__
#define __launch_bounds__(...)

// threadIdx and the like: objects whose members read the current fiber's values.
#define EMULATED_INDEX(name, of)                           \
  inline const struct {                                    \
    struct {                                               \
      operator unsigned() const { return emulator::of.x; } \
    } x;                                                   \
    struct {                                               \
      operator unsigned() const { return emulator::of.y; } \
    } y;                                                   \
  } name {                                                 \
  }
EMULATED_INDEX(threadIdx, current->thread_index);
EMULATED_INDEX(blockIdx, current->block->index);
EMULATED_INDEX(blockDim, grid->block);
EMULATED_INDEX(gridDim, grid->grid);

using std::max;
using std::min;
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::abs;
using std::isnan;

inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
// A function of its own, so that g++ does not fuse the product with an addition.
[[gnu::noinline]] inline float __fmul_rn(float a, float b) { return a * b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

template <typename T>
inline void __stcs(T* p, T x) {
  *p = x;
}

inline void __nanosleep(unsigned) {}
inline void __syncthreads() { emulator::wait(emulator::current->block->barrier); }
inline void __syncwarp() { emulator::wait(emulator::warp()); }
template <typename T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return emulator::value_of_lane(x, emulator::current->linear % 32 / width * width + lane % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::value_of_lane(x, emulator::current->linear % 32 ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const uint64_t* of_lanes = emulator::exchange(uint64_t(x));
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(of_lanes[lane] != 0) << lane;
  return bits;
}
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

namespace cooperative_groups {
struct EmulatedGrid {
  void sync() const {
    if (!emulator::grid->cooperative) emulator::fail("grid.sync() in a launch that is not cooperative");
    emulator::wait(emulator::grid->barrier);
  }
};
inline EmulatedGrid this_grid() { return {}; }
}  // namespace cooperative_groups

// ---- The CUDA runtime: the functions that host code calls ----

extern "C" {
cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulator::gpu.sms
           : attribute == cudaDevAttrL2CacheSize       ? emulator::gpu.l2_bytes
                                                       : emulator::gpu.shared_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = emulator::gpu.code;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  return emulator::launch(config, kernel, arguments...);
}
