// Host forms of the instructions that the emulated kernels use (src/core/ptx.cuh). The tensor core
// adds products exactly in double and rounds toward zero once, the direction real ones lean to.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "src/core/half2.h"

namespace kvtile::ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulator::shared_bytes());
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t source = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    d |= static_cast<uint32_t>((source >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  }
  return d;
}
inline uint32_t mad(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
inline float ex2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float rcp(float x) { return 1.0f / x; }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t cvt_half2(float low, float high) { return half2_from_floats(low, high); }

inline float round_to_zero(double x) {
  const float y = static_cast<float>(x);
  if (!std::isfinite(y) || std::fabs(static_cast<double>(y)) <= std::fabs(x)) return y;
  return std::nextafterf(y, 0.0f);
}

namespace detail {
struct Fragments {
  uint32_t a[4], b[2];
};
inline double half_of(uint32_t pair, int high) {
  return half_bits_to_float(static_cast<uint16_t>(pair >> (16 * high)));
}
// D[row][column] += sum over kSteps k of A and B, fragments as in the PTX manual.
template <int kSteps>
void mma(float (&d)[4], const Fragments& mine) {
  const unsigned char* all = emulator::exchange(&mine, sizeof mine);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const auto fragments = [all](int l) {
    Fragments f;
    std::memcpy(&f, all + 64 * l, sizeof f);
    return f;
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int c = 0; c < 4; ++c) {
      const Fragments a = fragments(row % 8 * 4 + c), b = fragments(column * 4 + c);
      for (int k = 0; k < kSteps; ++k) {
        const uint32_t left = a.a[2 * k + row / 8], right = b.b[k];
        sum += half_of(left, 0) * half_of(right, 0) + half_of(left, 1) * half_of(right, 1);
      }
    }
    d[i] = round_to_zero(sum);
  }
}
}  // namespace detail

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  detail::mma<2>(d, {{a[0], a[1], a[2], a[3]}, {b0, b1}});
}
inline void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  detail::mma<1>(d, {{a0, a1, 0, 0}, {b, 0}});
}
inline uint32_t transpose_8x8(uint32_t fragment) {
  const unsigned char* all = emulator::exchange(&fragment, sizeof fragment);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const auto element = [all](int row, int column) {
    uint32_t pair;
    std::memcpy(&pair, all + 64 * (row * 4 + column / 2), sizeof pair);
    return (pair >> (16 * (column % 2))) & 0xffffu;
  };
  return element(lane % 4 * 2, lane / 4) | (element(lane % 4 * 2 + 1, lane / 4) << 16);
}

template <typename T>
T load(uint32_t address) {
  T x;
  std::memcpy(&x, emulator::shared_bytes() + address, sizeof x);
  return x;
}
template <typename T>
void store(uint32_t address, T x) {
  std::memcpy(emulator::shared_bytes() + address, &x, sizeof x);
}

inline uint32_t ld_shared(uint32_t address) { return load<uint32_t>(address); }
inline uint32_t ld_shared_u16(uint32_t address) { return load<uint16_t>(address); }
inline uint64_t ld_shared_u64(uint32_t address) { return load<uint64_t>(address); }
inline float ld_shared_float(uint32_t address) { return load<float>(address); }
inline float ld_shared_half(uint32_t address) {
  return half_bits_to_float(load<uint16_t>(address));
}
inline void ld_shared2(uint32_t address, uint32_t* x, uint32_t* y) {
  *x = ld_shared(address);
  *y = ld_shared(address + 4);
}
inline void ld_shared4(uint32_t address, uint32_t* x, uint32_t* y, uint32_t* z, uint32_t* w) {
  ld_shared2(address, x, y);
  ld_shared2(address + 8, z, w);
}
inline void st_shared(uint32_t address, uint32_t x) { store(address, x); }
inline void st_shared_u16(uint32_t address, uint16_t x) { store(address, x); }
inline void st_shared_u64(uint32_t address, uint64_t x) { store(address, x); }
inline void st_shared_float(uint32_t address, float x) { store(address, x); }
inline void st_shared2(uint32_t address, uint32_t x, uint32_t y) {
  store(address, x);
  store(address + 4, y);
}
inline void st_shared4(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  st_shared2(address, x, y);
  st_shared2(address + 8, z, w);
}
inline void max_shared(uint32_t address, uint32_t x) {
  store(address, std::max(ld_shared(address), x));
}

inline void cp_async16(uint32_t shared, uint64_t global) {
  emulator::copy_async(shared, reinterpret_cast<const void*>(global), 16);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_copies(kPending);
}
inline void named_barrier_sync(int id, int threads) { emulator::barrier(id, threads, false); }
inline bool named_barrier_or(int id, int threads, bool predicate) {
  return emulator::barrier(id, threads, predicate);
}

// A barrier in its 8 bytes: arrivals still missing, arrivals of a phase, bytes still missing,
// phase.
struct Barrier {
  uint16_t missing, arrivals;
  int16_t bytes_16;
  uint16_t phase;
};
inline void settle(uint32_t barrier, Barrier b) {
  if (b.missing == 0 && b.bytes_16 == 0) {
    b.missing = b.arrivals;
    b.phase ^= 1;
  }
  store(barrier, b);
  emulator::progressed();
}
inline void mbarrier_init(uint32_t barrier, int arrivals) {
  const auto count = static_cast<uint16_t>(arrivals);
  store(barrier, Barrier{count, count, 0, 0});
}
inline void mbarrier_arrive(uint32_t barrier) {
  Barrier b = load<Barrier>(barrier);
  --b.missing;
  settle(barrier, b);
}
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  Barrier b = load<Barrier>(barrier);
  --b.missing;
  b.bytes_16 = static_cast<int16_t>(b.bytes_16 + bytes / 16);
  settle(barrier, b);
}
inline void mbarrier_wait(uint32_t barrier, int parity) {
  emulator::wait_until([=] { return load<Barrier>(barrier).phase != parity; });
}
inline void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  if (shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
    std::abort();
  }
  std::memcpy(emulator::shared_bytes() + shared, global, static_cast<size_t>(bytes));
  Barrier b = load<Barrier>(barrier);
  b.bytes_16 = static_cast<int16_t>(b.bytes_16 - bytes / 16);
  settle(barrier, b);
}
inline void bulk_copy_of_warp(uint32_t shared, uint64_t global, int bytes, uint32_t barrier) {
  if ((threadIdx.x & 31) == 0) {
    bulk_copy(shared, reinterpret_cast<const void*>(global), bytes, barrier);
  }
}
inline uint32_t shared_increment(uint32_t counter, uint32_t last) {
  const uint32_t before = ld_shared(counter);
  st_shared(counter, before >= last ? 0 : before + 1);
  return before;
}
inline void fence_proxy_async() {}
inline void fence_mbarrier_init() {}

}  // namespace kvtile::ptx
