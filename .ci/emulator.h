// A GPU for tests on machines without one: runs the kernels of CUDA_SOURCE on the CPU, compiled by a C++ compiler.
//
// Each CUDA thread is a fiber. The fibers of a block, of all blocks in a cooperative launch, take turns in an order
// that is shuffled anew each time around, and only where they wait: at barriers, in shuffles, when they look at
// words of other blocks. Copies in the background arrive late, at a random moment before they are waited for. Shared
// memory and scratch begin as NaNs. So a missing barrier, a wrong parity or a count that is off gives a wrong result
// or a deadlock here, too. What it cannot show: instructions in the wrong form, races between instructions, memory
// that is read beyond a tensor's end, speed.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>
#include <ucontext.h>
#include <cuda_runtime_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace emulator {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

// ---- Fibers ----

constexpr size_t kStackBytes = 128 << 10;

struct Barrier {  // of all threads of a warp, a block or a grid that still run
  int arrived = 0, live = 0;
  unsigned phase = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[32];
  uint32_t operands[32][6];
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
  unsigned char* dynamic = nullptr;
  std::vector<unsigned char> dynamic_memory;
};

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
  uint64_t* barrier;  // null: of cp.async
};

struct Fiber {
  ucontext_t context;
  char* stack = nullptr;
  uint3 thread_index;
  int linear;
  Block* block;
  bool done = false;
  std::vector<Copy> copies;  // of cp.async, not waited for yet
  std::exception_ptr error;
};

struct Grid {
  dim3 grid, block;
  Barrier barrier;
  std::vector<Fiber*> fibers;
  const std::function<void()>* kernel;
  uint64_t progress = 0;  // counts whatever lets somebody go on
};

inline Grid* grid = nullptr;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline std::mt19937 random_numbers;
inline std::vector<char*> free_stacks;
inline std::vector<Copy> bulk_copies;  // on their way

inline void yield() { swapcontext(&current->context, &scheduler); }

inline bool passed(Barrier& b, unsigned phase) {
  if (b.phase == phase && b.arrived > 0 && b.arrived >= b.live) b.arrived = 0, ++b.phase, ++grid->progress;
  return b.phase != phase;
}

inline void wait(Barrier& b) {
  const unsigned phase = b.phase;
  ++b.arrived;
  while (!passed(b, phase)) yield();
}

inline Warp& warp() { return current->block->warps[current->linear / 32]; }

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
  while (int(mbarrier(at).phase & 1) == parity) yield();
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

inline void check_units(const void* to, const void* from, int bytes) {
  if ((uintptr_t(to) | uintptr_t(from) | unsigned(bytes)) % 16 != 0 || bytes <= 0) {
    fail("a copy is not of whole 16-byte units");
  }
}

inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_units(to, from, bytes);
  bulk_copies.push_back({to, from, bytes, barrier});
}

inline void copy_async(void* to, const void* from, bool exists = true) {
  check_units(to, from, 16);
  current->copies.push_back({to, exists ? from : nullptr, 16, nullptr});
}

inline void wait_for_copies() {
  yield();
  for (const Copy& copy : current->copies) perform(copy);
  current->copies.clear();
}

inline void named_barrier(int name, int threads, bool waits) {
  NamedBarrier& b = current->block->named[name];
  const unsigned phase = b.phase;
  if (++b.arrived > threads) fail("more arrivals at a named barrier than it was told");
  if (b.arrived == threads) b.arrived = 0, ++b.phase, ++grid->progress;
  while (waits && b.phase == phase) yield();
}

// ---- Running a grid ----

inline void run_fiber() {
  try {
    (*grid->kernel)();
  } catch (...) {
    current->error = std::current_exception();
  }
  current->done = true;
  --warp().barrier.live, --current->block->barrier.live, --grid->barrier.live;
  ++grid->progress;
  swapcontext(&current->context, &scheduler);
}

// All blocks of `indices` at once.
inline void run_blocks(dim3 grid_size, dim3 block_size, size_t shared_bytes, const std::vector<uint3>& indices,
                       const std::function<void()>& kernel) {
  const int threads = block_size.x * block_size.y * block_size.z;
  Grid running = {grid_size, block_size, {}, {}, &kernel};
  grid = &running;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (const uint3 index : indices) {
    blocks.push_back(std::make_unique<Block>());
    Block& block = *blocks.back();
    block.index = index;
    block.barrier.live = threads;
    block.warps.resize((threads + 31) / 32);
    block.dynamic_memory.assign(shared_bytes + 128, 0xff);
    block.dynamic = block.dynamic_memory.data();
    while (uintptr_t(block.dynamic) % 128 != 0) ++block.dynamic;
    for (int t = 0; t < threads; ++t) {
      fibers.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *fibers.back();
      fiber.linear = t;
      fiber.block = &block;
      fiber.thread_index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
      ++block.warps[t / 32].barrier.live;
      if (free_stacks.empty()) free_stacks.push_back(static_cast<char*>(malloc(kStackBytes)));
      fiber.stack = free_stacks.back();
      free_stacks.pop_back();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack;
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
      running.fibers.push_back(&fiber);
    }
  }
  running.barrier.live = int(fibers.size());
  std::vector<Fiber*> left = running.fibers;
  uint64_t progress = ~uint64_t(0);
  int idle = 0;
  std::string error;
  while (!left.empty() && error.empty()) {
    std::shuffle(left.begin(), left.end(), random_numbers);
    for (Fiber* fiber : left) {
      current = fiber;
      swapcontext(&scheduler, &fiber->context);
      if (fiber->error) {
        try {
          std::rethrow_exception(fiber->error);
        } catch (const std::exception& e) {
          error = e.what();
        }
        break;
      }
    }
    left.erase(std::remove_if(left.begin(), left.end(), [](Fiber* f) { return f->done; }), left.end());
    idle = running.progress == progress ? idle + 1 : 0;
    progress = running.progress;
    if (idle > 200 && bulk_copies.empty()) error = "deadlock: all threads wait";
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
  const bool copies_left = !bulk_copies.empty();
  bulk_copies.clear();
  mbarriers.clear();
  grid = nullptr, current = nullptr;
  if (!error.empty()) fail(error);
  if (copies_left) fail("a block has ended before its copies arrived");
}

inline std::set<std::string> kernels_run;  // names as the compiler prints them

inline void run(dim3 grid_size, dim3 block_size, size_t shared_bytes, bool together, const std::function<void()>& kernel) {
  std::vector<uint3> indices;
  for (unsigned z = 0; z < grid_size.z; ++z) {
    for (unsigned y = 0; y < grid_size.y; ++y) {
      for (unsigned x = 0; x < grid_size.x; ++x) indices.push_back({x, y, z});
    }
  }
  if (indices.empty()) fail("a grid without blocks");
  if (together) return run_blocks(grid_size, block_size, shared_bytes, indices, kernel);
  std::shuffle(indices.begin(), indices.end(), random_numbers);
  for (size_t i = 0; i < indices.size(); i += 4) {
    run_blocks(grid_size, block_size, shared_bytes,
               {indices.begin() + i, indices.begin() + std::min(indices.size(), i + 4)}, kernel);
  }
}

template <typename T>
T& shared(const void* declaration) {
  auto& memory = current->block->shared[declaration];
  if (memory == nullptr) {
    memory.reset(new unsigned char[sizeof(T) + 128]);
    memset(memory.get(), 0xff, sizeof(T) + 128);
  }
  return *reinterpret_cast<T*>((uintptr_t(memory.get()) + 127) / 128 * 128);
}

// ---- The GPU that host code asks about ----

struct Gpu {
  int sms = 8, l2_bytes = 1 << 20, shared_bytes = 227 << 10, code = 90;
};
inline Gpu gpu;
inline cudaError_t cooperative_error = cudaSuccess;  // what cooperative launches answer

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  bool together = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeCooperative) together = config->attrs[i].val.cooperative;
  }
  if (together && cooperative_error != cudaSuccess) return cooperative_error;
  const dim3 g = config->gridDim;
  if (together && int(g.x * g.y * g.z) > gpu.sms) return cudaErrorCooperativeLaunchTooLarge;
  if (config->dynamicSmemBytes > size_t(gpu.shared_bytes)) return cudaErrorInvalidValue;
  run(g, config->blockDim, config->dynamicSmemBytes, together, [=] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
}

// ---- What a warp does together ----

template <typename Value>
inline Value of_lane(Value value, int lane) {
  static_assert(sizeof(Value) <= 8);
  Warp& w = warp();
  wait(w.barrier);
  memcpy(&w.slots[current->linear % 32], &value, sizeof(value));
  wait(w.barrier);
  Value result;
  memcpy(&result, &w.slots[lane & 31], sizeof(value));
  return result;
}

// c += a * b, a of 16 rows and b of 8 columns, as mma.sync has them in registers, EACH numbers in a register.
template <int EACH, typename Widen>
void multiply_add(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2], Widen widen) {
  Warp& w = warp();
  const int own = current->linear % 32;
  wait(w.barrier);
  std::copy(a, a + 4, w.operands[own]);
  std::copy(b, b + 2, w.operands[own] + 4);
  wait(w.barrier);
  for (int i = 0; i < 4; ++i) {
    const int row = own / 4 + i / 2 * 8, col = own % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * EACH; ++k) {
      const int half = k / (4 * EACH), lane = k / EACH % 4, part = k % EACH;
      c[i] += widen(w.operands[row % 8 * 4 + lane][row / 8 + 2 * half], part) *
              widen(w.operands[col * 4 + lane][4 + half], part);
    }
  }
}

template <typename T>
void multiply_add(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, float>) {  // tensor cores ignore the last 13 bits
    multiply_add<1>(c, a, b, [](uint32_t x, int) {
      x &= 0xffffe000u;
      float f;
      memcpy(&f, &x, 4);
      return f;
    });
  } else {
    multiply_add<2>(c, a, b, [](uint32_t x, int part) {
      T pair[2];
      memcpy(pair, &x, 4);
      return float(pair[part]);
    });
  }
}

}  // namespace emulator

// ---- What CUDA C++ has and C++ lacks ----

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// An index that is looked up when it is read.
#define EMULATED_INDEX(name, of)                                       \
  inline const struct {                                                \
    struct {                                                           \
      operator unsigned() const { return emulator::of.x; }             \
    } x;                                                               \
    struct {                                                           \
      operator unsigned() const { return emulator::of.y; }             \
    } y;                                                               \
  } name {}
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

template <typename To, typename From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
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
inline void __stcs(T* p, T x) { *p = x; }

inline void __syncthreads() { emulator::wait(emulator::current->block->barrier); }
inline void __syncwarp() { emulator::wait(emulator::warp().barrier); }
template <typename T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return emulator::of_lane(x, emulator::current->linear % 32 / width * width + lane % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T x, int mask) { return emulator::of_lane(x, emulator::current->linear % 32 ^ mask); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const auto& w = emulator::warp();
  emulator::of_lane(uint64_t(x), 0);
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(w.slots[lane] != 0) << lane;
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
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrMultiProcessorCount ? emulator::gpu.sms
           : what == cudaDevAttrL2CacheSize       ? emulator::gpu.l2_bytes
                                                  : emulator::gpu.shared_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = emulator::gpu.code;
  attributes->maxThreadsPerBlock = 256;  // of the convolution, which has no loading warps here
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  return emulator::launch(config, kernel, arguments...);
}
