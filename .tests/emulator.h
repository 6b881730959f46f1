// A GPU for tests on machines without one: runs the kernels of CUDA_SOURCE on the CPU, compiled by g++.
//
// Each CUDA thread is a fiber. The fibers of a block, of all blocks in a cooperative launch, take turns in an
// order that is shuffled anew each time around, and only where they wait: at barriers, in shuffles, when they
// look at words of other blocks. Warps sleep at random, so that others are many rounds ahead of them. Copies
// in the background arrive late, at a random moment before they are waited for, and until then their
// destination is NaN. So are shared memory, scratch and outputs at first, and what lies beside every tensor.
// All that happens by chance follows from a seed. So a missing barrier, a wrong parity or a count that is off gives a
// wrong result or a deadlock here, too.
//
// Every tensor, and scratch, is in memory of its own between pages that cannot be touched; nothing but
// outputs and scratch can be written. An access that is not aligned, or an index beyond an array, ends the
// kernel, as do copies that are not of whole 16-byte units or floats of a tensor, prefetches that are not of
// whole units, and blocks that a GPU would have no room for.
//
// A kernel that may begin before the one before it has ended finds NaNs in scratch until it has waited for
// that.
//
// It does not model: fences (of memory, and between kinds of copies), as every write is seen at once; the
// accuracy of ex2, rcp and rsqrt, which are exact here; instructions in the wrong form (asm is replaced, see
// emulator.py); races between instructions; what Hopper's products meet in the background; speed.
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

template <typename To, typename From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

// ---- The GPU that host code asks about ----

struct Gpu {
  int sms, l2_bytes, shared_bytes, code;
};
inline Gpu gpu;
inline cudaError_t cooperative_error = cudaSuccess;  // what cooperative launches answer
inline cudaError_t last_error = cudaSuccess;         // until somebody asks
inline bool dry = false;                             // kernels only tell that they were launched

struct Random {  // splitmix64: order of threads, of copies
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

// ---- Memory of tensors ----

// A NaN of any type if repeated, and not those of words that are not published.
constexpr uint16_t kNan = 0xffc0;
// What kernels know of an address is where it lies in a line of so many bytes.
constexpr uintptr_t kLine = 128;

// A tensor, full of NaNs, that lies in a line as `like` does, and NaNs beside it to the end of its pages: at
// one end less than a line. The pages beside those cannot be touched.
class Guarded {
 public:
  Guarded(size_t bytes, const void* like) : bytes_(bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), pages = (bytes + 2 * kLine + page - 1) / page * page;
    inner_bytes_ = pages;
    map_bytes_ = pages + 2 * page;
    void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) fail("no memory");
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
  void forbid_writes() { mprotect(inner_, inner_bytes_, PROT_READ); }

  void check(const std::string& name) const {
    const auto at = [](unsigned char* p) { return reinterpret_cast<const uint16_t*>(p); };
    const auto is_written = [](uint16_t x) { return x != kNan; };
    const uint16_t *begin = at(data_), *last = at(inner_ + inner_bytes_);
    const uint16_t* found = std::find_if(at(inner_), begin, is_written);
    if (found == begin) found = std::find_if(at(data_ + bytes_), last, is_written);
    if (found == last) return;
    fail("a kernel has written " + std::to_string(2 * (found - begin)) + " bytes from the beginning of " +
         name + ", which has " + std::to_string(bytes_));
  }

  // Whether all of it is the tensor's, or in a line with its beginning.
  bool has(const void* p, int64_t count) const {
    const auto* begin = static_cast<const unsigned char*>(p);
    return begin >= data_ - uintptr_t(data_) % kLine && begin + count <= data_ + bytes_;
  }

 private:
  unsigned char *map_, *inner_, *data_;
  size_t map_bytes_, inner_bytes_, bytes_;
};

inline std::vector<std::unique_ptr<Guarded>> tensors;  // of a call, scratch last

inline void check_units(const void* p, int64_t bytes, int unit = 16) {
  if ((uintptr_t(p) | uintptr_t(bytes)) % unit == 0 && bytes > 0) return;
  fail("a copy is not of whole units of " + std::to_string(unit) + " bytes");
}

inline bool is_tensors(const void* p, int64_t bytes) {
  return std::any_of(tensors.begin(), tensors.end(), [&](auto& t) { return t->has(p, bytes); });
}

inline void check_read(const void* p, int64_t bytes, int unit = 16) {
  check_units(p, bytes, unit);
  if (!is_tensors(p, bytes)) fail("a copy reads what is no tensor's");
}

// It may go on to the end of a unit, as nobody sees what it brings.
inline void check_prefetch(const void* p, int64_t bytes) {
  check_units(p, bytes);
  if (!is_tensors(p, bytes - 15)) fail("a prefetch is of what is no tensor's");
}

// Of the sector with this byte.
inline void check_prefetch(const void* p) {
  if (!is_tensors(p, 1)) fail("a prefetch is of what is no tensor's");
}

// ---- Fibers ----

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPoisonedBytes = 16 << 10;  // of them, for the kernel's own variables

// Whoever waits for a phase goes on when it has another number.
struct Barrier {  // of all threads of a warp, a block or a grid that still run
  int arrived = 0, live = 0;
  unsigned phase = 0;
};

struct Operands {  // of a matrix product
  float a[16][16], b[8][16];
};

struct Warp {
  Barrier barrier;
  bool polls = false;     // it has looked at words of other blocks
  int sleeps = 0;         // so many rounds more
  uint64_t slots[2][32];  // of an even phase, of an odd one
  Operands operands[2];
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
  std::map<const void*, std::unique_ptr<unsigned char[]>> shared;  // by declaration
  size_t shared_bytes;                                             // static and dynamic
  std::vector<unsigned char> dynamic_memory;
  unsigned char *dynamic, *dynamic_end;
};

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
  uint64_t* barrier;  // null: of cp.async
};

// Where a fiber, or the scheduler, goes on: for __builtin_setjmp, which other than swapcontext asks nothing
// of the kernel.
struct Place {
  void* words[5];
};

struct Fiber {
  ucontext_t begin;
  Place place;
  char* stack;
  uint3 thread_index;
  int linear;
  Block* block;
  bool started = false, done = false;
  const unsigned* phase = nullptr;  // it waits until this is no longer `seen`
  unsigned seen = 0;
  std::vector<Copy> copies;  // of cp.async, not waited for yet
  std::string error;
};

struct Grid {
  dim3 grid, block;
  size_t dynamic_bytes;
  Barrier barrier;
  bool early;  // begins while the kernel before it still runs
  const std::function<void()>* kernel;
  const std::string* name;
  std::vector<unsigned char> scratch;  // what the kernel before leaves, until all threads have waited for it
  uint64_t progress = 0;               // counts whatever lets somebody go on
};

inline Grid* grid = nullptr;
inline Fiber* current = nullptr;
inline Place scheduler;
inline std::vector<char*> free_stacks;
inline std::vector<Copy> bulk_copies;  // on their way

[[noreturn, gnu::noinline]] inline void go_to(Place& place) { __builtin_longjmp(place.words, 1); }

[[gnu::noinline]] inline void yield() {
  if (__builtin_setjmp(current->place.words) == 0) go_to(scheduler);
}

[[gnu::noinline]] inline void resume() {
  if (__builtin_setjmp(scheduler.words) != 0) return;
  if (current->started) go_to(current->place);
  current->started = true;
  setcontext(&current->begin);
}

inline void wait_for_change(const unsigned& phase, unsigned seen) {
  current->phase = &phase, current->seen = seen;
  while (phase == seen) yield();
  current->phase = nullptr;
}

inline bool complete(Barrier& b) {
  if (b.arrived == 0 || b.arrived < b.live) return false;
  b.arrived = 0, ++b.phase, ++grid->progress;
  return true;
}

inline void wait(Barrier& b) {
  const unsigned phase = b.phase;
  ++b.arrived;
  complete(b);
  wait_for_change(b.phase, phase);
}

inline void leave(Barrier& b) {
  --b.live;
  complete(b);
}

inline Warp& warp() { return current->block->warps[current->linear / 32]; }

// A warp in step. One that looks again and again does not get on by that.
inline void wait(Warp& w) {
  const uint64_t before = grid->progress;
  const unsigned phase = w.barrier.phase;
  ++w.barrier.arrived;
  if (complete(w.barrier) && w.polls) grid->progress = before;
  wait_for_change(w.barrier.phase, phase);
}

// Before a look at words of other blocks, which must get on meanwhile.
inline void poll() {
  warp().polls = true;
  yield();
}

// What arithmetic yields on a GPU: of all NaNs one.
inline uint32_t bits_of_arithmetic(float x) { return std::isnan(x) ? 0x7fffffff : bits_of<uint32_t>(x); }

// ---- mbarriers and copies ----

struct MBarrier {
  int count, pending, bytes;
  unsigned phase;
};
inline std::unordered_map<uint64_t*, MBarrier> mbarriers;

inline MBarrier& mbarrier(uint64_t* at) {
  const auto found = mbarriers.find(at);
  if (found == mbarriers.end()) fail("a barrier is used that nobody has initialized");
  return found->second;
}

inline void settle(MBarrier& b) {
  if (b.pending < 0) fail("more arrivals at a barrier than it was told");
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.phase, ++grid->progress;
}

inline void arrive(uint64_t* at, int bytes) {
  MBarrier& b = mbarrier(at);
  b.bytes += bytes, --b.pending;
  settle(b);
}

inline void wait(uint64_t* at, int parity) {
  const MBarrier& b = mbarrier(at);
  while (int(b.phase & 1) == parity) wait_for_change(b.phase, b.phase);
}

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

inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_units(to, bytes);
  check_read(from, bytes);
  memset(to, 0xff, bytes);
  bulk_copies.push_back({to, from, bytes, barrier});
}

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

// As soon as this thread's copies are there.
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
  if (++b.arrived > threads) fail("more arrivals at a named barrier than it was told");
  if (b.arrived == threads) b.arrived = 0, ++b.phase, ++grid->progress;
  if (waits) wait_for_change(b.phase, phase);
}

// ---- Running a grid ----

// A kernel that begins early finds NaNs in scratch until it has waited for the one before.
inline void hide_scratch() {
  auto* data = static_cast<unsigned char*>(tensors.back()->data());
  grid->scratch.assign(data, data + tensors.back()->bytes());
  std::fill_n(reinterpret_cast<uint16_t*>(data), grid->scratch.size() / 2, kNan);
}

inline void wait_for_previous() {
  if (!grid->early) return;
  wait(grid->barrier);
  if (grid->scratch.empty()) return;
  memcpy(tensors.back()->data(), grid->scratch.data(), grid->scratch.size());
  grid->scratch.clear();
}

struct End {};  // of a thread

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
  go_to(scheduler);
}

// A fiber that has touched what it must not ends there.
inline void on_signal(int number, siginfo_t* info, void*) {
  if (current == nullptr) {  // not a kernel's
    signal(number, SIG_DFL);
    return;
  }
  if (number == SIGSEGV || number == SIGBUS) {
    const auto* at = static_cast<const unsigned char*>(info->si_addr);
    current->error = "an access to memory that is no tensor's, or to an input to write it";
    for (const auto& t : tensors) {
      const int64_t from = at - static_cast<const unsigned char*>(t->data());
      if (from > -8192 && from < int64_t(t->bytes()) + 8192) {
        current->error +=
            ", " + std::to_string(from) + " bytes from the beginning of one of " + std::to_string(t->bytes());
      }
    }
  } else {  // the trap of -fsanitize
    current->error = "an access that is not aligned, or an index beyond an array";
  }
  current->done = true;
  go_to(scheduler);
}

struct Signals {
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction before[4];
  Signals() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // as go_to does not return
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &action, &before[i]);
  }
  ~Signals() {
    for (int i = 0; i < 4; ++i) sigaction(kNumbers[i], &before[i], nullptr);
  }
};

inline std::unique_ptr<Block> new_block(const Grid& running, uint3 index, int threads) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->barrier.live = threads;
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
  ++block.warps[t / 32].barrier.live;
  if (free_stacks.empty()) free_stacks.push_back(static_cast<char*>(malloc(kStackBytes)));
  fiber->stack = free_stacks.back();
  free_stacks.pop_back();
  // NaN, of which a variable that nobody has written tells: 0 times what lay there is 0 most of the time.
  memset(fiber->stack + kStackBytes - kPoisonedBytes, 0xff, kPoisonedBytes);
  getcontext(&fiber->begin);
  fiber->begin.uc_stack.ss_sp = fiber->stack;
  fiber->begin.uc_stack.ss_size = kStackBytes;
  fiber->begin.uc_link = nullptr;
  makecontext(&fiber->begin, run_fiber, 0);
  return fiber;
}

// Lets warps sleep for some rounds: others are then rounds ahead of them, as on a GPU.
inline void send_to_sleep(const std::vector<std::unique_ptr<Block>>& blocks, bool all_awake) {
  for (const auto& block : blocks) {
    for (Warp& w : block->warps) {
      if (all_awake) {
        w.sleeps = 0;
      } else if (w.sleeps > 0) {
        --w.sleeps;
      } else if (random_numbers() % 64 == 0) {
        w.sleeps = random_numbers() % 64;
      }
    }
  }
}

// All blocks of `indices` at once.
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
  running.barrier.live = int(fibers.size());
  grid = &running;
  if (running.early) hide_scratch();
  uint64_t progress = ~uint64_t(0);
  int idle = 0;
  std::string error;
  while (!left.empty() && error.empty()) {
    std::shuffle(left.begin(), left.end(), random_numbers);
    send_to_sleep(blocks, idle > 100);  // before it is taken for a deadlock
    for (Fiber* fiber : left) {
      if (fiber->block->warps[fiber->linear / 32].sleeps > 0) continue;
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
      error = "deadlock: " + std::to_string(left.size()) + " threads wait";
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
  if (error.empty() && !bulk_copies.empty()) error = "a block has ended before its copies arrived";
  for (const auto& block : blocks) {
    const unsigned char *end = block->dynamic_end, *last = &block->dynamic_memory.back();
    if (std::any_of(end, last, [](unsigned char c) { return c != 0xff; })) {
      error = "a block has written beyond its shared memory";
    }
  }
  bulk_copies.clear();
  mbarriers.clear();
  grid = nullptr;
  if (!error.empty()) fail(*running.name + ": " + error);
}

enum class Launch { Plain, Together, Early };

inline void run(dim3 grid_size, dim3 block_size, size_t dynamic_bytes, Launch how,
                const std::function<void()>& kernel) {
  std::vector<uint3> indices;
  for (unsigned z = 0; z < grid_size.z; ++z) {
    for (unsigned y = 0; y < grid_size.y; ++y) {
      for (unsigned x = 0; x < grid_size.x; ++x) indices.push_back({x, y, z});
    }
  }
  if (indices.empty()) fail("a grid without blocks");
  if (grid_size.y > 65535 || grid_size.z > 65535) fail("a grid is too large");
  if (dynamic_bytes > size_t(gpu.shared_bytes)) fail("a block asks for more shared memory than there is");
  const Signals signals;
  Grid running = {grid_size, block_size, dynamic_bytes, {}, how == Launch::Early, &kernel, nullptr};
  if (dry) running.block = 1, indices.resize(1);
  if (how == Launch::Together) return run_blocks(running, indices);
  std::shuffle(indices.begin(), indices.end(), random_numbers);
  for (size_t i = 0; i < indices.size(); i += 4) {
    run_blocks(running, {indices.begin() + i, indices.begin() + std::min(indices.size(), i + 4)});
  }
}

template <typename T>
T& shared(const void* declaration) {
  Block& block = *current->block;
  auto& memory = block.shared[declaration];
  if (memory == nullptr) {
    block.shared_bytes += (sizeof(T) + 15) / 16 * 16;
    if (block.shared_bytes > size_t(gpu.shared_bytes)) fail("a block has more shared memory than there is");
    memory.reset(new unsigned char[sizeof(T) + kLine]);
    memset(memory.get(), 0xff, sizeof(T) + kLine);
  }
  return *reinterpret_cast<T*>((uintptr_t(memory.get()) + kLine - 1) / kLine * kLine);
}

// ---- Which kernels there are, and which ran ----

struct Kernel {
  std::string name;
  bool ran = false;

  static std::vector<Kernel*>& all() {
    static std::vector<Kernel*> kernels;
    return kernels;
  }
  // printed: "... [with Here = emulated::{anonymous}::room::kernel<...>(parameters)::Here]"
  explicit Kernel(const std::string& printed) {
    const size_t from = printed.find("Here = ") + 7;
    name = printed.substr(from, printed.find('(', from) - from);
    for (const std::string scope : {"emulated::", "{anonymous}::"}) {
      for (size_t at; (at = name.find(scope)) != std::string::npos;) name.erase(at, scope.size());
    }
    all().push_back(this);
  }
};

// Here: a struct that is declared in the kernel. There is one for each of its instantiations in the library,
// whether it is launched or not.
template <typename Here>
struct KernelOf {
  static const char* printed() { return __PRETTY_FUNCTION__; }
  static inline Kernel kernel{printed()};
};

// Every kernel begins with it. most_threads: of its launch bounds.
template <typename Here>
void begin(int most_threads, int = 0) {
  Kernel& kernel = KernelOf<Here>::kernel;
  kernel.ran = true;
  grid->name = &kernel.name;
  const int threads = grid->block.x * grid->block.y * grid->block.z;
  if (threads > most_threads) fail("a block has more threads than its launch bounds");
  if (dry) throw End();
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  Launch how = Launch::Plain;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative) how = Launch::Together;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) how = Launch::Early;
  }
  const dim3 g = config->gridDim;
  if (how == Launch::Together) {
    if (int(g.x * g.y * g.z) > gpu.sms) last_error = cudaErrorCooperativeLaunchTooLarge;
    if (cooperative_error != cudaSuccess) last_error = cooperative_error;
    if (last_error != cudaSuccess) return last_error;
  }
  run(g, config->blockDim, config->dynamicSmemBytes, how, [=] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
}

// ---- What a warp does together ----

// What all lanes have given, after it.
template <typename Value>
const uint64_t* exchange(Value value) {
  static_assert(sizeof(Value) <= 8, "a lane exchanges one word");
  Warp& w = warp();
  uint64_t* slots = w.slots[w.barrier.phase % 2];
  memcpy(&slots[current->linear % 32], &value, sizeof(value));
  wait(w);
  return slots;
}

template <typename Value>
Value of_lane(Value value, int lane) {
  Value result;
  memcpy(&result, &exchange(value)[lane & 31], sizeof(value));
  return result;
}

// What products take of a number: of TF32 the last 13 bits are ignored.
template <typename T>
float factor(T x) {
  if constexpr (sizeof(T) == 4) return bits_of<float>(bits_of<uint32_t>(x) & 0xffffe000u);
  return float(x);
}

// c += a * b, a of 16 rows and b of 8 columns, as mma.sync has them in registers: of 16 bits two numbers in one.
template <typename T>
void multiply_add(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int kEach = 4 / sizeof(T),
                kHalf = 4 * kEach;  // half of the numbers that are multiplied for a sum
  const int lane = current->linear % 32, lane_row = lane / 4, lane_col = lane % 4;
  Warp& w = warp();
  Operands& all = w.operands[w.barrier.phase % 2];
  for (int i = 0; i < 6; ++i) {
    const uint32_t bits = i < 4 ? a[i] : b[i - 4];
    T numbers[kEach];
    memcpy(numbers, &bits, 4);
    for (int k = 0; k < kEach; ++k) {
      const float number = factor(numbers[k]);
      const int place = lane_col * kEach + k;
      if (i < 4) {
        all.a[lane_row + i % 2 * 8][i / 2 * kHalf + place] = number;
      } else {
        all.b[lane_row][(i - 4) * kHalf + place] = number;
      }
    }
  }
  wait(w);
  for (int i = 0; i < 4; ++i) {
    const float *row = all.a[lane_row + i / 2 * 8], *col = all.b[lane_col * 2 + i % 2];
    for (int k = 0; k < 2 * kHalf; ++k) c[i] += row[k] * col[k];
  }
}

// A number of a matrix in shared memory as wgmma takes it: described, in units of 16 bytes, by where it begins,
// the step to a row's next unit, that to the next 8 rows.
template <typename T>
float number_of(uint64_t matrix, int row, int k) {
  constexpr int kEach = 16 / sizeof(T);
  auto step = [&](int bit) { return int(matrix >> bit & 0x3fff); };
  const int unit = step(0) + k / kEach * step(16) + row / 8 * step(32) + row % 8;
  T number;
  memcpy(&number, current->block->dynamic + 16 * unit + k % kEach * sizeof(T), sizeof(T));
  return factor(number);
}

// c += a * b, a of 64 rows, 16 a warp, and b of 128 columns: at once, not in the background.
template <typename T, typename A>
void multiply_add_async(float (&c)[64], const A& a, uint64_t b) {
  const int lane = current->linear % 32, first_row = current->linear / 32 % 4 * 16 + lane / 4;
  for (int k = 0; k < int(32 / sizeof(T)); ++k) {
    for (int half = 0; half < 2; ++half) {
      float number;
      if constexpr (std::is_same_v<A, uint64_t>) {
        number = number_of<T>(a, first_row + 8 * half, k);
      } else {  // in registers
        number = factor(bits_of<float>(of_lane(a[half + k / 4 * 2], lane / 4 * 4 + k % 4)));
      }
      for (int i = 0; i < 32; ++i) {
        c[i / 2 * 4 + half * 2 + i % 2] += number * number_of<T>(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
      }
    }
  }
}

}  // namespace emulator

// ---- What CUDA C++ has and C++ lacks ----

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// An index that is looked up when it is read.
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
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::abs;
using std::isnan;

inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
inline int __float_as_int(float x) { return emulator::bits_of<int>(x); }
// Not fused with what follows.
[[gnu::noinline]] inline float __fmul_rn(float a, float b) { return a * b; }
[[gnu::noinline]] inline double __dmul_rn(double a, double b) { return a * b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
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
  return emulator::of_lane(x, emulator::current->linear % 32 / width * width + lane % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::of_lane(x, emulator::current->linear % 32 ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const uint64_t* of_lanes = emulator::exchange(uint64_t(x));
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(of_lanes[lane] != 0) << lane;
  return bits;
}
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

namespace cooperative_groups {
struct EmulatedGrid {
  void sync() const { emulator::wait(emulator::grid->barrier); }
};
inline EmulatedGrid this_grid() { return {}; }
}  // namespace cooperative_groups

// The CUDA runtime, as far as it is asked.
extern "C" {
cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrMultiProcessorCount ? emulator::gpu.sms
           : what == cudaDevAttrL2CacheSize       ? emulator::gpu.l2_bytes
                                                  : emulator::gpu.shared_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = emulator::gpu.code;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
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
  return emulator::launch(config, kernel, arguments...);
}
