// Fibers (ucontext) in a fixed or shuffled order; a thread that waits lets the next one run.
#include <ucontext.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace kvtile::cuda {
// What the kernels declare as their dynamic shared memory.
alignas(1024) thread_local unsigned char shared_memory[emulator::kSharedBytes];
}  // namespace kvtile::cuda

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kLaneBytes = 64;

struct Copy {
  uint32_t shared;
  const void* global;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  unsigned thread = 0;
  bool done = false;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Warp {
  unsigned char data[2][32 * kLaneBytes];
  unsigned arrived = 0, generation = 0, lanes = 32;
};

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
  bool any = false, result = false;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  ucontext_t scheduler;
  Fiber* running = nullptr;
  unsigned index = 0, threads = 0;
  uint64_t progress = 0;
  const std::function<void()>* kernel = nullptr;
};

Block block;

void yield() { swapcontext(&block.running->context, &block.scheduler); }

void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memcpy(shared_bytes() + copy.shared, copy.global, static_cast<size_t>(copy.bytes));
  }
}

void run_fiber() {
  (*block.kernel)();
  block.running->done = true;
  ++block.progress;
  yield();
}

}  // namespace

Options& options() {
  static Options value;
  return value;
}

Index thread_index() { return {block.running->thread}; }
Index block_index() { return {block.index}; }
Index block_size() { return {block.threads}; }
unsigned char* shared_bytes() { return kvtile::cuda::shared_memory - kSharedBase; }

const unsigned char* exchange(const void* data, size_t bytes) {
  const unsigned lane = block.running->thread & 31;
  Warp& warp = block.warps[block.running->thread / 32];
  const unsigned generation = warp.generation;
  unsigned char* buffer = warp.data[generation & 1];
  std::memcpy(buffer + kLaneBytes * lane, data, bytes);
  ++block.progress;
  if (++warp.arrived == warp.lanes) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    while (warp.generation == generation) yield();
  }
  return buffer;
}

bool barrier(int id, int threads, bool predicate) {
  Barrier& b = block.barriers[id];
  const unsigned generation = b.generation;
  b.any = b.any || predicate;
  ++block.progress;
  if (++b.arrived == threads) {
    b.arrived = 0;
    b.result = b.any;
    b.any = false;
    ++b.generation;
  } else {
    while (b.generation == generation) yield();
  }
  return b.result;
}

void copy_async(uint32_t shared, const void* global, int bytes) {
  if (options().early_copies) {
    perform({{shared, global, bytes}});
  } else {
    block.running->open.push_back({shared, global, bytes});
  }
}

void commit_copies() {
  block.running->groups.push_back(std::move(block.running->open));
  block.running->open.clear();
}

void wait_copies(int pending) {
  auto& groups = block.running->groups;
  while (static_cast<int>(groups.size()) > pending) {
    perform(groups.front());
    groups.pop_front();
  }
}

void wait_until(const std::function<bool()>& so) {
  while (!so()) yield();
}

void progressed() { ++block.progress; }

void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  static std::mt19937 random;
  if (options().seed != 0) random.seed(options().seed);
  block.kernel = &kernel;
  block.threads = threads;
  block.fibers.resize(threads);
  for (auto& fiber : block.fibers) {
    if (fiber == nullptr) {
      fiber = std::make_unique<Fiber>();
      fiber->stack.resize(kStackBytes);
    }
  }
  for (block.index = 0; block.index < blocks; ++block.index) {
    // Stale shared memory must not matter.
    std::memset(kvtile::cuda::shared_memory, 0xff, kSharedBytes);
    block.warps.assign(threads / 32, Warp{});
    for (Barrier& b : block.barriers) b = Barrier{};
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *block.fibers[t];
      fiber.thread = t;
      fiber.done = false;
      fiber.groups.clear();
      fiber.open.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    std::vector<unsigned> order(threads);
    std::iota(order.begin(), order.end(), 0u);
    unsigned left = threads;
    while (left > 0) {
      if (options().seed != 0) {
        // Warps in any order; lanes of a warp together, for speed.
        std::vector<unsigned> warps(threads / 32);
        std::iota(warps.begin(), warps.end(), 0u);
        std::shuffle(warps.begin(), warps.end(), random);
        for (unsigned i = 0; i < threads; ++i) order[i] = warps[i / 32] * 32 + i % 32;
      }
      const uint64_t before = block.progress;
      for (const unsigned t : order) {
        Fiber& fiber = *block.fibers[t];
        if (fiber.done) continue;
        block.running = &fiber;
        swapcontext(&block.scheduler, &fiber.context);
        if (fiber.done) --left;
      }
      if (block.progress == before && left > 0) {
        std::fprintf(stderr, "emulator: block %u is stuck\n", block.index);
        std::abort();
      }
    }
  }
}

}  // namespace emulator
