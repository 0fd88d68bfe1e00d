// Runs CUDA kernels on the host, for tests on machines without a GPU: the kernels' own source is
// compiled as C++ against this header and emulated/src/core/ptx.cuh. The threads of a block are
// fibers of one OS thread; warp and block collectives are rendezvous. Blocks run one after another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Fibers of a block share their OS thread's variables.
#define __shared__ thread_local

namespace emulator {

struct Index {
  unsigned x, y = 0, z = 0;
};

// The running thread of the running block.
Index thread_index();
Index block_index();
Index block_size();

// Largest shared memory of a block, and where it starts: no address is zero.
inline constexpr uint32_t kSharedBase = 1024;
inline constexpr uint32_t kSharedBytes = 232448;
unsigned char* shared_bytes();

// Every lane of the warp gives `bytes` of data and gets all lanes' data, lane by lane.
const unsigned char* exchange(const void* data, size_t bytes);
// A barrier among `threads` threads of the block; the disjunction of what they bring.
bool barrier(int id, int threads, bool predicate);

// Asynchronous copies: queued until a wait, or made at once (late and early: both must give the
// same).
void copy_async(uint32_t shared, const void* global, int bytes);
void commit_copies();
void wait_copies(int pending);
// Lets the other threads run while something is not so yet.
void wait_until(const std::function<bool()>& so);
// Something that another thread may be waiting for has happened.
void progressed();

struct Options {
  bool early_copies = false;
  unsigned seed = 0;  // order in which threads run
};
Options& options();

void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

template <typename T>
T from_lane(T value, int lane) {
  T result;
  std::memcpy(&result, exchange(&value, sizeof value) + 64 * lane, sizeof value);
  return result;
}

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())

using std::max;
using std::min;

inline void __syncthreads() {
  emulator::barrier(0, static_cast<int>(emulator::block_size().x), false);
}
inline void __syncwarp() {
  int nothing = 0;
  emulator::exchange(&nothing, sizeof nothing);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator::from_lane(value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::from_lane(value, static_cast<int>(emulator::thread_index().x & 31) ^ mask);
}
inline uint32_t __ballot_sync(unsigned, bool predicate) {
  const int mine = predicate;
  const unsigned char* all = emulator::exchange(&mine, sizeof mine);
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (all[64 * lane] != 0 ? 1u : 0u) << lane;
  return votes;
}
inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) == ~0u;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const unsigned char* all = emulator::exchange(&value, sizeof value);
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t other;
    std::memcpy(&other, all + 64 * lane, sizeof other);
    value = std::max(value, other);
  }
  return value;
}
template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

// --- the runtime
// ----------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
using cudaStream_t = struct CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  // Of the alignment and, in multiples of 16 bytes, of the size that was asked for.
  *pointer = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return *pointer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  std::memset(pointer, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
