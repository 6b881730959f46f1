// An emulated GPU: runs the kernels of CUDA_SOURCE, which emulator.py turns into C++ that includes this file.
//
// Every CUDA thread is a fiber: a function call with its own stack, which runs until it must wait: at a barrier, in an
// instruction of the whole warp, for a copy, or before it reads what other blocks write. In each round, the scheduler
// (run_blocks) runs every fiber that can go on, in a new random order. A cooperative launch runs all blocks at once;
// other launches run four blocks at a time, in random order. All random choices follow from a seed.
//
// How it exposes bugs:
//     Races       Random warps skip up to 63 rounds. An asynchronous copy arrives at a random moment; until then, its
//                 destination is NaN. For a kernel that may start before the previous one has ended, all that the call
//                 writes is NaN until it has waited, and what it writes there before is lost. Deadlocks are reported.
//     Memory      Every tensor lies between pages that cannot be accessed. Inputs are read-only. Misaligned accesses,
//                 indices beyond an array, and copies or prefetches that leave a tensor end the kernel.
//     Unset data  Shared memory, scratch memory, outputs, variables, and the memory beside tensors are NaN at first.
//     Host code   Each GPU is a device of its own. A kernel has 48 KB of shared memory on each device until its limit is
//                 raised there. Cooperative launches fail with either of two errors, and any call of the runtime can.
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
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <cuda_runtime_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace emulator {

template <typename To, typename From> inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

struct Gpu {
  int device, sms, shared_bytes, code;
  cudaError_t cooperative_error;  // of all cooperative launches
};
inline Gpu gpu;                               // the current device: every emulated GPU is another device
inline cudaError_t last_error = cudaSuccess;  // the result of the next cudaGetLastError

// The next call but `calls_before_failure` of the function of the runtime with this name fails once.
inline std::string failing;
inline int calls_before_failure;
inline cudaError_t failure;
inline cudaError_t error_of(const char* function) {
  if (failing != function || calls_before_failure-- > 0) return cudaSuccess;
  failing.clear();
  return last_error = failure;
}

// Bytes of shared memory: static ones of each kernel that has run, which are unknown before, and the limit of dynamic
// ones, which a device has for each kernel.
inline std::map<const void*, int> static_bytes;
inline std::map<std::pair<int, const void*>, int> dynamic_limits;
constexpr int kDefaultSharedBytes = 48 << 10;
inline bool dry = false;                      // a launch runs one thread, which returns at once
inline std::string launches;                  // a line for each launch: kernel, blocks, threads, shared memory, kind
inline std::mt19937_64 random_numbers;        // the source of all random choices

// ---- Guarded memory ----

// Memory full of this value contains NaN of every dtype. It differs from the bits of an empty mailbox, kEmptyMailbox.
constexpr uint16_t kNan = 0xffc0;
// Bytes of a cache line. The behaviour of kernels may depend on an address modulo this number.
constexpr uintptr_t kLine = 128;

// Memory for a tensor of a call, at the same position in a cache line: full of NaN, or a copy of an input. It lies in
// pages of its own, whose remaining bytes are NaN. At one of the two ends, chosen at random, less than a line remains.
// The pages before and after cannot be accessed.
struct Guarded {
  const std::string name;
  const size_t bytes;
  const void* const original;  // null for scratch memory
  const bool is_input;
  unsigned char* data;

  Guarded(const char* name, size_t bytes, const void* original, bool is_input)
      : name(name), bytes(bytes), original(original), is_input(is_input) {
    const size_t page = sysconf(_SC_PAGESIZE);
    inner_bytes_ = (bytes + 2 * kLine + page - 1) / page * page;
    map_bytes_ = inner_bytes_ + 2 * page;
    void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) fail("mmap failed: not enough memory");
    map_ = static_cast<unsigned char*>(map);
    inner_ = map_ + page;
    mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE);
    std::fill_n(reinterpret_cast<uint16_t*>(inner_), inner_bytes_ / 2, kNan);
    const size_t first = uintptr_t(original) % kLine, slack = (inner_bytes_ - first - bytes) / kLine * kLine;
    data = inner_ + first + (random_numbers() % 2 == 0 ? slack : 0);
    if (is_input) memcpy(data, original, bytes);
    if (is_input) mprotect(inner_, inner_bytes_, PROT_READ);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(map_, map_bytes_); }

  // Replaces the contents by NaN until show() is called.
  void hide() {
    mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE);
    hidden_.assign(data, data + bytes);
    std::fill_n(reinterpret_cast<uint16_t*>(data), bytes / 2, kNan);
  }
  void show() {
    if (hidden_.empty()) return;
    std::copy(hidden_.begin(), hidden_.end(), data);
    hidden_.clear();
    if (is_input) mprotect(inner_, inner_bytes_, PROT_READ);
  }
  // Copies an output to the original. Fails if a kernel has written to the bytes beside the tensor.
  void finish() const {
    for (unsigned char* p = inner_; p < inner_ + inner_bytes_; p += 2) {
      if ((p < data || p >= data + bytes) && *reinterpret_cast<uint16_t*>(p) != kNan) {
        fail("a kernel wrote outside of " + name + ": at offset " + std::to_string(p - data));
      }
    }
    if (!is_input && original != nullptr) memcpy(const_cast<void*>(original), data, bytes);
  }
  // Returns true if all bytes belong to the tensor, or lie before it in the line in which it starts.
  bool contains(const void* p, int64_t count) const {
    const auto* begin = static_cast<const unsigned char*>(p);
    return begin >= data - uintptr_t(data) % kLine && begin + count <= data + bytes;
  }

 private:
  unsigned char *map_, *inner_;
  size_t map_bytes_, inner_bytes_;
  std::vector<unsigned char> hidden_;  // the contents, while they are hidden
};

inline std::vector<std::unique_ptr<Guarded>> tensors;  // those of the current call; scratch memory is the last

// Makes the pointer of a call point to guarded memory. T is const for an input.
template <typename T> void guard(T*& p, size_t bytes, const char* name) {
  if (p == nullptr) return;
  tensors.push_back(std::make_unique<Guarded>(name, bytes, p, std::is_const_v<T>));
  p = reinterpret_cast<T*>(tensors.back()->data);
}

inline void check_units(const void* p, int64_t bytes) {
  if (bytes <= 0 || (uintptr_t(p) | bytes) % 16 != 0) fail("a copy or prefetch is not of whole 16-byte units");
}

inline void check_in_tensor(const void* p, int64_t bytes) {
  const auto contains = [&](auto& tensor) { return tensor->contains(p, bytes); };
  if (!std::any_of(tensors.begin(), tensors.end(), contains)) fail("a copy or prefetch reads outside of all tensors");
}

// ---- Fibers ----

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPoisonedBytes = 16 << 10;  // the part of a stack that is filled with NaN: a kernel's variables

// A barrier of all threads of a warp, a block or a grid that have not ended, a named barrier, or an mbarrier.
// A thread that waits goes on when the phase has changed.
struct Barrier {
  int arrived = 0, participants = 0;
  int bytes = 0;  // that an mbarrier still waits for
  unsigned phase = 0;
  bool is_progress = true;  // a new phase counts as progress
};

struct Warp {
  Barrier barrier;
  int rounds_to_skip = 0;
  uint64_t slots[2][32];  // one word per lane, for instructions that exchange data; even and odd phases alternate
};

struct alignas(kLine) Line {
  unsigned char bytes[kLine];
  Line() { memset(bytes, 0xff, kLine); }
};

struct Block {
  uint3 index;
  Barrier barrier;
  std::vector<Warp> warps;
  std::map<int, Barrier> named;
  std::map<const void*, std::vector<Line>> shared;  // static shared memory of each declaration
  size_t shared_bytes;                              // of static and dynamic shared memory
  std::vector<Line> dynamic_lines;                  // dynamic shared memory and at least a line more
  unsigned char* dynamic;
};

// An asynchronous copy that has not arrived yet.
struct Copy {
  void* to;
  const void* from;  // null: zeros arrive
  int bytes;
  uint64_t* barrier;  // the mbarrier that counts its bytes; null for cp.async
};

// For __builtin_setjmp: where a fiber, or the scheduler, goes on. Unlike swapcontext, it needs no system call.
using JumpBuffer = void* [5];

struct Fiber {
  ucontext_t begin;
  JumpBuffer resume_point;
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
  bool cooperative;
  bool early;         // may start before the previous kernel has ended (programmatic dependent launch)
  bool after_caller;  // if it starts early: the caller's kernels may not have ended either
  const std::function<void()>& kernel;
  const void* address;  // of the kernel
  const std::string* name = nullptr;
  Barrier barrier = {};
  uint64_t progress = 0;  // counts the events that let a thread go on
};

inline Grid* grid = nullptr;      // the one that runs
inline Fiber* current = nullptr;  // the one that runs; null in the scheduler
inline JumpBuffer scheduler;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the fibers
inline std::vector<Copy> bulk_copies;                // not arrived yet, of all blocks

[[noreturn, gnu::noinline]] inline void jump_to(JumpBuffer& point) { __builtin_longjmp(point, 1); }

// Stops the current fiber, and goes on in the scheduler.
[[gnu::noinline]] inline void yield() {
  if (__builtin_setjmp(current->resume_point) == 0) jump_to(scheduler);
}

// Starts or continues the current fiber. Returns when it stops.
[[gnu::noinline]] inline void resume() {
  if (__builtin_setjmp(scheduler) != 0) return;
  if (current->started) jump_to(current->resume_point);
  current->started = true;
  setcontext(&current->begin);
}

// Waits until phase differs from seen.
inline void wait_for_change(const unsigned& phase, unsigned seen) {
  current->phase = &phase;
  current->seen = seen;
  while (phase == seen) yield();
  current->phase = nullptr;
}

// Starts the next phase if all participants and bytes have arrived.
inline void complete(Barrier& b) {
  if (b.arrived > b.participants) fail("a barrier has more arrivals than it was initialized for");
  if (b.arrived == 0 || b.arrived < b.participants || b.bytes != 0) return;
  b.arrived = 0;
  ++b.phase;
  grid->progress += b.is_progress;
}

inline void arrive(Barrier& b, bool waits = true) {
  const unsigned phase = b.phase;
  ++b.arrived;
  complete(b);
  if (waits) wait_for_change(b.phase, phase);
}

inline void named_barrier(int name, int threads, bool waits) {
  Barrier& b = current->block->named[name];
  b.participants = threads;
  arrive(b, waits);
}

inline Warp& warp() { return current->block->warps[current->linear / 32]; }

// Called before a thread reads mailboxes of other blocks. What such a warp does is not progress: otherwise, a deadlock
// of warps that poll forever would not be detected.
inline void poll() {
  warp().barrier.is_progress = false;
  yield();
}

inline void sync_grid() {
  if (!grid->cooperative) fail("grid.sync() in a launch that is not cooperative");
  arrive(grid->barrier);
}

// The bits of two results of arithmetic: on a GPU, every NaN result has the same bits.
inline uint64_t bits_of_arithmetic(float2 pair) {
  const auto bits = [](float x) { return std::isnan(x) ? 0x7fffffffu : bits_of<uint32_t>(x); };
  return uint64_t(bits(pair.y)) << 32 | bits(pair.x);
}

// ---- mbarriers and asynchronous copies ----

inline std::map<uint64_t*, Barrier> mbarriers;

inline Barrier& mbarrier(uint64_t* address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("a kernel uses an mbarrier that it has not initialized");
  return found->second;
}

inline void arrive(uint64_t* address, int bytes) {
  Barrier& b = mbarrier(address);
  b.bytes += bytes;
  arrive(b, false);
}

inline void wait(uint64_t* address, int parity) {
  const Barrier& b = mbarrier(address);
  while (int(b.phase & 1) == parity) wait_for_change(b.phase, b.phase);
}

inline void perform(const Copy& copy) {
  if (copy.from != nullptr) memcpy(copy.to, copy.from, copy.bytes);
  if (copy.from == nullptr) memset(copy.to, 0, copy.bytes);
  if (copy.barrier != nullptr) {
    Barrier& b = mbarrier(copy.barrier);
    b.bytes -= copy.bytes;
    complete(b);
  }
  ++grid->progress;
}

// The destination is NaN until the copy arrives, or until the thread waits for its copies.
inline void start(const Copy& copy, std::vector<Copy>& copies) {
  check_units(copy.to, copy.bytes);
  if (copy.from != nullptr) {
    check_units(copy.from, copy.bytes);
    check_in_tensor(copy.from, copy.bytes);
  }
  memset(copy.to, 0xff, copy.bytes);
  copies.push_back(copy);
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

// ---- Running a grid ----

inline bool follows_caller = true;  // all kernels of the call so far, if any, could start before the caller's had ended

// Waits for all threads of the grid. The first thread to go on shows what was hidden.
inline void wait_for_previous() {
  if (!grid->early) return;
  arrive(grid->barrier);
  for (auto& tensor : tensors) tensor->show();
}

struct End {};  // thrown to end a thread

// The function of every fiber: runs one thread of the kernel.
inline void run_fiber() {
  try {
    grid->kernel();
  } catch (End) {
  } catch (const std::exception& e) {
    current->error = e.what();
  }
  current->done = true;
  for (Barrier* barrier : {&warp().barrier, &current->block->barrier, &grid->barrier}) {
    --barrier->participants;
    complete(*barrier);
  }
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
    for (const auto& tensor : tensors) {
      const int64_t offset = address - tensor->data;
      if (std::abs(offset) > int64_t(tensor->bytes) + 8192) continue;
      current->error += ", at offset " + std::to_string(offset) + " of " + tensor->name;
    }
  } else {  // -fsanitize executes a trap instruction
    current->error = "a misaligned access, or an index beyond the end of an array";
  }
  current->done = true;
  jump_to(scheduler);
}

// Installs on_signal, and restores the previous handlers at the end.
struct SignalHandlers {
  std::map<int, struct sigaction> before;
  SignalHandlers() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // SA_NODEFER: jump_to does not return from the handler
    for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP}) sigaction(number, &action, &before[number]);
  }
  ~SignalHandlers() {
    for (const auto& [number, action] : before) sigaction(number, &action, nullptr);
  }
};

// Runs the blocks with these indices, all at once, until their threads have ended. This is the scheduler.
inline void run_blocks(Grid& running, const std::vector<uint3>& indices) {
  grid = &running;
  const unsigned width = running.block.x, threads = width * running.block.y;
  std::deque<Block> blocks;
  std::deque<Fiber> fibers;
  std::vector<Fiber*> left;
  for (const uint3 index : indices) {
    Block& block = blocks.emplace_back();
    block.index = index;
    block.barrier.participants = threads;
    block.warps.resize((threads + 31) / 32);
    block.shared_bytes = running.dynamic_bytes;
    block.dynamic_lines.resize(running.dynamic_bytes / kLine + 2);
    block.dynamic = block.dynamic_lines[0].bytes;
    for (unsigned t = 0; t < threads; ++t) {
      if (stacks.size() == fibers.size()) stacks.emplace_back(new char[kStackBytes]);
      char* stack = stacks[fibers.size()].get();
      // NaN, because the use of an uninitialized variable is hidden if the kernel multiplies it by 0.
      memset(stack + kStackBytes - kPoisonedBytes, 0xff, kPoisonedBytes);
      Fiber& fiber = fibers.emplace_back();
      left.push_back(&fiber);
      fiber.linear = t;
      fiber.block = &block;
      fiber.thread_index = {t % width, t / width};
      ++block.warps[t / 32].barrier.participants;
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = stack;
      fiber.begin.uc_stack.ss_size = kStackBytes;
      fiber.begin.uc_link = nullptr;
      makecontext(&fiber.begin, run_fiber, 0);
    }
  }
  running.barrier = {};
  running.barrier.participants = int(fibers.size());
  for (auto& tensor : tensors) {
    // An earlier kernel of the call, or of the caller, may still write or read the tensor.
    if (running.early && (running.after_caller || !tensor->is_input)) tensor->hide();
  }
  uint64_t progress = ~uint64_t(0);
  int idle = 0;
  std::string error;
  while (!left.empty() && error.empty()) {
    for (Block& block : blocks) {
      for (Warp& w : block.warps) {
        w.rounds_to_skip = std::max(0, w.rounds_to_skip - 1);
        if (w.rounds_to_skip == 0 && random_numbers() % 64 == 0) w.rounds_to_skip = random_numbers() % 64;
      }
    }
    std::shuffle(left.begin(), left.end(), random_numbers);
    for (Fiber* fiber : left) {
      // No warp skips rounds before a deadlock is reported.
      if (fiber->block->warps[fiber->linear / 32].rounds_to_skip > 0 && idle <= 100) continue;
      if (fiber->phase != nullptr && *fiber->phase == fiber->seen) continue;
      current = fiber;
      resume();
      current = nullptr;
      error = fiber->error;
      if (!error.empty()) break;
    }
    left.erase(std::remove_if(left.begin(), left.end(), [](Fiber* f) { return f->done; }), left.end());
    idle = running.progress == progress ? idle + 1 : 0;
    progress = running.progress;
    if (idle > 200 && bulk_copies.empty() && error.empty()) {
      error = "deadlock: " + std::to_string(left.size()) + " threads wait, and none can go on";
    }
    for (const Copy& copy : std::exchange(bulk_copies, {})) {
      if (random_numbers() % 4 == 0) {
        perform(copy);
      } else {
        bulk_copies.push_back(copy);
      }
    }
  }
  if (error.empty() && !bulk_copies.empty()) error = "a block ended before its copies arrived";
  for (const Block& block : blocks) {
    const unsigned char *end = block.dynamic + running.dynamic_bytes, *last = block.dynamic_lines.back().bytes + kLine;
    const bool is_intact = std::all_of(end, last, [](unsigned char c) { return c == 0xff; });
    if (!is_intact) error = "a block wrote beyond its shared memory";
  }
  bulk_copies.clear();
  mbarriers.clear();
  grid = nullptr;
  if (!error.empty()) fail(*running.name + ": " + error);
}

inline cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel, const void* address) {
  if (const cudaError_t error = error_of("cudaLaunchKernelEx")) return error;
  const dim3 size = config.gridDim, block = config.blockDim;
  const auto attribute = config.numAttrs > 0 ? config.attrs[0].id : cudaLaunchAttributeIgnore;
  const bool cooperative = attribute == cudaLaunchAttributeCooperative;
  const bool early = attribute == cudaLaunchAttributeProgrammaticStreamSerialization;
  Grid running = {size, block, config.dynamicSmemBytes, cooperative, early, follows_caller, kernel, address};
  if (cooperative && gpu.cooperative_error) return last_error = gpu.cooperative_error;
  if (cooperative && int(size.x * size.y) > gpu.sms) return last_error = cudaErrorCooperativeLaunchTooLarge;
  const auto limit = dynamic_limits.find({gpu.device, address});
  const int allowed = limit != dynamic_limits.end() ? limit->second : kDefaultSharedBytes - static_bytes[address];
  if (int64_t(config.dynamicSmemBytes) > allowed) return last_error = cudaErrorInvalidValue;
  follows_caller = follows_caller && early;
  if (size.x == 0 || size.y == 0 || size.y > 65535) fail("a grid has no blocks, or too many");
  std::vector<uint3> indices;
  for (unsigned i = 0; i < size.x * size.y; ++i) indices.push_back({i % size.x, i / size.x});
  std::shuffle(indices.begin(), indices.end(), random_numbers);
  const SignalHandlers handlers;
  if (dry) {
    running.block = 1;
    indices.resize(1);
  }
  const size_t at_once = cooperative ? indices.size() : 4;
  for (size_t i = 0; i < indices.size(); i += at_once) {
    run_blocks(running, {indices.begin() + i, indices.begin() + std::min(indices.size(), i + at_once)});
  }
  std::ostringstream line;
  line << *running.name << ' ' << size.x << 'x' << size.y << ' ' << block.x << 'x' << block.y << ' '
       << config.dynamicSmemBytes << (cooperative ? " cooperative" : early ? " early" : "") << '\n';
  launches += line.str();
  return cudaSuccess;
}

// Returns the block's shared memory for the declaration in a line.
template <typename T, int LINE> T& shared() {
  static const char declaration = 0;
  Block& block = *current->block;
  auto& memory = block.shared[&declaration];
  if (memory.empty()) {
    block.shared_bytes += (sizeof(T) + 15) / 16 * 16;
    int& known = static_bytes[grid->address];
    known = std::max(known, int(block.shared_bytes - grid->dynamic_bytes));
    if (block.shared_bytes > size_t(gpu.shared_bytes)) fail("a block uses too much shared memory");
    memory.resize((sizeof(T) + kLine - 1) / kLine);
  }
  return *reinterpret_cast<T*>(memory[0].bytes);
}

// ---- The list of kernels, and which of them ran ----

struct Kernel {
  std::string name;
  bool ran = false;

  static inline Kernel* last = nullptr;
  Kernel* const previous = std::exchange(last, this);

  // printed: the text "... [with Here = emulated::{anonymous}::family::kernel<...>(parameters)::Here]"
  explicit Kernel(const std::string& printed) {
    const size_t from = printed.find("Here = ") + 7;
    name = printed.substr(from, printed.find('(', from) - from);
    for (const std::string scope : {"emulated::", "{anonymous}::", "<unnamed>::"}) {
      for (size_t at; (at = name.find(scope)) != std::string::npos;) name.erase(at, scope.size());
    }
  }
};

// Registers a kernel when the library is loaded, even if it is never launched. Here is an empty struct that is declared
// inside the kernel: its name contains the kernel's.
template <typename Here> const char* printed_name() { return __PRETTY_FUNCTION__; }
template <typename Here> inline Kernel kernel_of{printed_name<Here>()};

// The first statement of every kernel. The arguments are the kernel's launch bounds.
template <typename Here> void begin(int max_threads, int = 0) {
  Kernel& kernel = kernel_of<Here>;
  kernel.ran = true;
  grid->name = &kernel.name;
  if (int(grid->block.x * grid->block.y) > max_threads) fail("a block has more threads than its launch bounds allow");
  if (dry) throw End();
}

// ---- Instructions of a whole warp ----

// Waits for all lanes, and returns the values that they passed.
template <typename Value> const uint64_t* exchange(Value value) {
  static_assert(sizeof(Value) <= 8, "a lane exchanges one word");
  Warp& w = warp();
  uint64_t* slots = w.slots[w.barrier.phase % 2];
  memcpy(&slots[current->linear % 32], &value, sizeof(value));
  arrive(w.barrier);
  return slots;
}

// Returns the value that a lane passed.
template <typename Value> Value value_of_lane(Value value, int lane) {
  Value result;
  memcpy(&result, &exchange(value)[lane & 31], sizeof(value));
  return result;
}

// An operand of a matrix product as a float. Float32 operands are TF32: the hardware ignores their last 13 bits.
template <typename T> float operand(T x) {
  if constexpr (sizeof(T) == 4) return bits_of<float>(bits_of<uint32_t>(x) & 0xffffe000u);
  return float(x);
}

// Returns an element of a matrix in shared memory. matrix: a descriptor of wgmma, with three fields in units of 16
// bytes: the address, the step to the next unit of a row, and the step to the next 8 rows.
template <typename T> float element_of(uint64_t matrix, int row, int k) {
  constexpr int kEach = 16 / sizeof(T);
  auto field = [&](int bit) { return int(matrix >> bit & 0x3fff); };
  const int unit = field(0) + k / kEach * field(16) + row / 8 * field(32) + row % 8;
  T number;
  memcpy(&number, current->block->dynamic + 16 * unit + k % kEach * sizeof(T), sizeof(T));
  return operand(number);
}

// c += a * b for a with 64 rows, 16 per warp, and b with 128 columns: wgmma, but computed at once.
template <typename T, typename A> void multiply_add_async(float (&c)[64], const A& a, uint64_t b) {
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

#define threadIdx (emulator::current->thread_index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::grid->block)
#define gridDim (emulator::grid->grid)

using std::max;
using std::min;
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1 / std::sqrt(double(x))); }
using std::isnan;

inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
// A function of its own, so that g++ does not fuse the product with an addition.
[[gnu::noinline]] inline float __fmul_rn(float a, float b) { return a * b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

template <typename T> inline void __stcs(T* p, T x) { *p = x; }

inline void __nanosleep(unsigned) {}
inline void __syncthreads() { emulator::arrive(emulator::current->block->barrier); }
inline void __syncwarp() { emulator::arrive(emulator::warp().barrier); }
template <typename T> inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return emulator::value_of_lane(x, emulator::current->linear % 32 / width * width + lane % width);
}
template <typename T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::value_of_lane(x, emulator::current->linear % 32 ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const uint64_t* of_lanes = emulator::exchange(uint64_t(x));
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(of_lanes[lane] != 0) << lane;
  return bits;
}
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

// ---- The CUDA runtime: the functions that host code calls ----

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = emulator::gpu.device, cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return emulator::last_error; }
cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != emulator::gpu.device) return cudaErrorInvalidDevice;
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulator::gpu.sms
           : attribute == cudaDevAttrL2CacheSize       ? 1 << 20
                                                       : emulator::gpu.shared_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  if (const cudaError_t error = emulator::error_of(__func__)) return error;
  attributes->ptxVersion = emulator::gpu.code;
  attributes->sharedSizeBytes = emulator::static_bytes[kernel];
  return emulator::gpu.code == 0 ? cudaErrorInvalidDeviceFunction : cudaSuccess;  // 0: the code cannot be loaded now
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (const cudaError_t error = emulator::error_of(__func__)) return error;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > emulator::gpu.shared_bytes - emulator::static_bytes[kernel]) {
    return emulator::last_error = cudaErrorInvalidValue;
  }
  emulator::dynamic_limits[{emulator::gpu.device, kernel}] = value;
  return cudaSuccess;
}
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  const auto* address = reinterpret_cast<const void*>(kernel);
  return emulator::launch(*config, [=] { kernel(Parameters(arguments)...); }, address);
}
