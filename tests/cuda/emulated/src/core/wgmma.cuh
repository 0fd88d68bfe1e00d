// Host forms of the warpgroup products that the emulated kernels use (src/core/wgmma.cuh): a warp's
// sixteen rows of the product depend on its own registers and on shared memory alone.
#pragma once

#include "src/core/matrix_descriptor.h"
#include "src/core/ptx.cuh"

namespace kvtile::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <typename T, int kCount>
void pin(T (&)[kCount][4]) {}

template <int kTransposed, int kTiles>
void wgmma_rs(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  const unsigned char* all = emulator::exchange(a, sizeof a);
  const auto field = [b](int bit) { return static_cast<uint32_t>(b >> bit & 0x3fff) << 4; };
  const auto left = [all](int row, int k) {
    uint32_t registers[4];
    std::memcpy(registers, all + 64 * (row % 8 * 4 + k % 8 / 2), sizeof registers);
    return detail::half_of(registers[row / 8 + k / 8 * 2], k % 2);
  };
  const auto right = [field](int k, int x) {
    const uint32_t core = field(0) + k / 8 * field(16) + x / 8 * field(32);
    return half_bits_to_float(
        load<uint16_t>(core + (kTransposed ? k % 8 * 16 + x % 8 * 2 : x % 8 * 16 + k % 8 * 2)));
  };
  const int lane = static_cast<int>(threadIdx.x & 31);
  for (int n = 0; n < kTiles; ++n) {
    for (int i = 0; i < 4; ++i) {
      double sum = accumulate ? d[n][i] : 0.0;
      for (int k = 0; k < 16; ++k) {
        sum += left(lane / 4 + i / 2 * 8, k) * right(k, 8 * n + lane % 4 * 2 + i % 2);
      }
      d[n][i] = round_to_zero(sum);
    }
  }
}

}  // namespace kvtile::ptx
