// encode: raw key and value rows to packed slots, one quad of lanes a token-head (quad.cuh), one
// warp eight of them. A row is read once, by 16-byte asynchronous copies, and its slot is assembled
// in shared memory and written once, coalesced. Bytes are those of the CPU encoder: same operations
// in the same order, each rounded once. docs/kernels/codec.md has the budget.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvtile/slot.h"
#include "src/codec/codec_params.h"
#include "src/codec/quad.cuh"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

template <KeyCode kKey, ValueCode kValue, int kHeadDim, bool kWide>
struct EncodeShape {
  static constexpr SlotFormat kFormat{kHeadDim, kKey, kValue, false};
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRows = 8;  // a warp's
  static constexpr int kRowBytes = kHeadDim * (kWide ? 4 : 2);
  static constexpr int kRowPitch = kRowBytes + 16;  // an odd number of 16-byte units
  static constexpr int kSlotBytes = kFormat.slot_bytes();
  // Slots without gaps, a word before them, and what the last step of 32 lanes reads past the end.
  static constexpr int kSlotWords = 1 + (kRows * kSlotBytes / 4 + 1 + 31) / 32 * 32 + 1;
  struct WarpShared {
    alignas(16) std::byte key[kRows * kRowPitch];
    alignas(16) std::byte value[kRows * kRowPitch];
    Cell cells[kNumCells];
    uint32_t slots[kSlotWords];
  };
  static constexpr int kWarps = 4 * sizeof(WarpShared) <= 48 * 1024 ? 4 : 2;
  static_assert(kWarps * sizeof(WarpShared) <= 48 * 1024);
  // Blocks of an SM that registers must leave room for: enough rows in flight to hide memory.
  // Measured on sm_90; other compilations would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  static constexpr int kMinBlocks = kWide ? 1 : kHeadDim == 256 ? 4 : 7;
#else
  static constexpr int kMinBlocks = 1;
#endif
};

// A row's smallest and largest element; NaN or infinite if any element is.
struct RowRange {
  float low, high;
};

template <bool kWide, int kChunks>
__device__ __forceinline__ void read_row(const std::byte* rows, int row_pitch, int lane,
                                         uint32_t (&words)[kWide ? 2 * kChunks : kChunks]) {
  if constexpr (kWide) {
    const auto* row = reinterpret_cast<const float2*>(rows + (lane >> 2) * row_pitch) + (lane & 3);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const float2 pair = row[4 * k];
      words[2 * k] = __float_as_uint(pair.x);
      words[2 * k + 1] = __float_as_uint(pair.y);
    }
  } else {
    // Four chunks at once: lane 8m + r names row r of chunk m and receives its own row's pair.
    const uint32_t address = ptx::shared_address(rows) + (lane & 7) * row_pitch + (lane >> 3) * 16;
#pragma unroll
    for (int k = 0; k < kChunks; k += 4) {
      uint32_t four[4];
      ptx::ldmatrix_x4(four, address + k * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[k + i] = four[i];
    }
  }
}

template <bool kWide, int kChunks>
__device__ __forceinline__ void to_floats(const uint32_t (&words)[kWide ? 2 * kChunks : kChunks],
                                          bool bfloat16, float (&x)[2 * kChunks]) {
  if constexpr (kWide) {
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) x[i] = __uint_as_float(words[i]);
  } else if (bfloat16) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      x[2 * k] = __uint_as_float(words[k] << 16);
      x[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const float2 pair = __half22float2(device_half::as_half2(words[k]));
      x[2 * k] = pair.x;
      x[2 * k + 1] = pair.y;
    }
  }
}

// Smallest and largest element of the lane's part of a row; NaN wins.
template <bool kWide, int kChunks>
__device__ __forceinline__ RowRange
lane_range(const uint32_t (&words)[kWide ? 2 * kChunks : kChunks], bool bfloat16) {
  if constexpr (kWide) {
    RowRange range{__uint_as_float(words[0]), __uint_as_float(words[0])};
#pragma unroll
    for (int i = 1; i < 2 * kChunks; ++i) {
      range.low = ptx::min_nan(range.low, __uint_as_float(words[i]));
      range.high = ptx::max_nan(range.high, __uint_as_float(words[i]));
    }
    return range;
  } else {
    uint32_t low = words[0], high = words[0];
    if (bfloat16) {
#pragma unroll
      for (int k = 1; k < kChunks; ++k) {
        low = ptx::min_nan_bf16x2(low, words[k]);
        high = ptx::max_nan_bf16x2(high, words[k]);
      }
      return {ptx::min_nan(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u)),
              ptx::max_nan(__uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u))};
    }
#pragma unroll
    for (int k = 1; k < kChunks; ++k) {
      low = ptx::min_nan_f16x2(low, words[k]);
      high = ptx::max_nan_f16x2(high, words[k]);
    }
    const float2 lows = __half22float2(device_half::as_half2(low));
    const float2 highs = __half22float2(device_half::as_half2(high));
    return {ptx::min_nan(lows.x, lows.y), ptx::max_nan(highs.x, highs.y)};
  }
}

__device__ __forceinline__ RowRange quad_range(RowRange range) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    range.low = ptx::min_nan(range.low, __shfl_xor_sync(kFullMask, range.low, step));
    range.high = ptx::max_nan(range.high, __shfl_xor_sync(kFullMask, range.high, step));
  }
  return range;
}

__device__ __forceinline__ bool is_finite(RowRange range) {
  constexpr float kLargest = 3.40282347e38f;
  return fabsf(range.low) <= kLargest && fabsf(range.high) <= kLargest;
}

// Chunk word of eight nibbles to kBits * 8 packed bits.
template <int kBits>
__device__ __forceinline__ uint32_t pack_nibbles(uint32_t nibbles) {
  if constexpr (kBits == 4) return nibbles;
  uint32_t x = (nibbles & 0x07070707u) | ((nibbles >> 1) & 0x38383838u);
  x = (x & 0x003f003fu) | ((x >> 2) & 0x0fc00fc0u);
  return (x & 0x00000fffu) | ((x >> 4) & 0x00fff000u);
}

// Writes the codes of one field. codes[j] holds, of chunks 4j..4j+3, this lane's two nibbles.
template <int kBits, int kChunks>
__device__ __forceinline__ void store_codes(const uint32_t (&codes)[kChunks / 4], int quad_lane,
                                            std::byte* field) {
#pragma unroll
  for (int j = 0; j < kChunks / 4; ++j) {
    const uint32_t packed = pack_nibbles<kBits>(transpose_quad(codes[j], quad_lane));
    std::byte* chunk = field + (4 * j + quad_lane) * kBits;
    if constexpr (kBits == 4) {
      auto* halves = reinterpret_cast<uint16_t*>(chunk);
      halves[0] = static_cast<uint16_t>(packed);
      halves[1] = static_cast<uint16_t>(packed >> 16);
    } else {
      chunk[0] = static_cast<std::byte>(packed & 0xff);
      chunk[1] = static_cast<std::byte>((packed >> 8) & 0xff);
      chunk[2] = static_cast<std::byte>((packed >> 16) & 0xff);
    }
  }
}

// Sum of squares of the row, in the order of docs/format.md.
template <int kChunks>
__device__ __forceinline__ float square_sum(const float (&x)[2 * kChunks]) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    even = __fmaf_rn(x[2 * k], x[2 * k], even);
    odd = __fmaf_rn(x[2 * k + 1], x[2 * k + 1], odd);
  }
  return sum_of_eight(even, odd);
}

template <KeyCode kKey, int kHeadDim>
__device__ __forceinline__ void encode_rotated_key(float (&x)[kHeadDim / 4],
                                                   const EncodeParams& params, const Cell* cells,
                                                   int quad_lane, std::byte* slot) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kBits = key_bits(kKey);
  bool finite = true, huge = false;
  float sum = square_sum<kChunks>(x);
  // An element of 2^50 makes the sum 2^100; NaN fails the comparison too. Such keys saturate their
  // norm anyway: an exact power of two keeps their direction from overflowing.
  if (__any_sync(kFullMask, !(sum < 0x1p100f))) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) largest = ptx::max_nan(largest, fabsf(x[i]));
    largest = ptx::max_nan(largest, __shfl_xor_sync(kFullMask, largest, 1));
    largest = ptx::max_nan(largest, __shfl_xor_sync(kFullMask, largest, 2));
    finite = largest <= 3.40282347e38f;
    huge = finite && largest >= 0x1p50f;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      x[i] = finite ? __fmul_rn(x[i], huge ? 0x1p-80f : 1.0f) : 0.0f;
    }
    sum = square_sum<kChunks>(x);
  }
  const float norm = __fsqrt_rn(sum);
  const float inverse = __fdiv_rn(params.inverse_root_dim, __fadd_rn(norm, 1e-8f));
  hadamard_quad<kChunks>(x, quad_lane);
  const uint32_t first_cell = ptx::shared_address(cells);
  uint32_t codes[kChunks / 4];
#pragma unroll
  for (int j = 0; j < kChunks / 4; ++j) {
    codes[j] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float y = __fmul_rn(x[8 * j + i], inverse);
      const uint2 cell = ptx::load_shared_table(
          first_cell + cell_index(y, params.slope) * static_cast<uint32_t>(sizeof(Cell)));
      codes[j] += cell.y << (4 * i);
      if (y >= __uint_as_float(cell.x)) codes[j] += 1u << (4 * i);
    }
    if (!finite) codes[j] = 0;
  }
  store_codes<kBits, kChunks>(codes, quad_lane, slot);
  if (quad_lane == 0) {
    const float stored = fminf(huge ? __fmul_rn(norm, 0x1p80f) : norm, kHalfMax);
    constexpr int kOffset = SlotFormat{kHeadDim, kKey, ValueCode::kUniform4, false}.norm_offset();
    *reinterpret_cast<uint16_t*>(slot + kOffset) = finite ? float_to_half_bits(stored) : kHalfNaN;
  }
}

// The byte of |x|, clamped to the flavour's largest magnitude. e4m3 rounds to nearest even, e4b15
// ties away from zero; both on the fp32 bits for normal results and by counting steps below.
template <KeyCode kKey>
__device__ __forceinline__ uint32_t encode_fp8(float x, uint32_t sign) {
  constexpr bool kE4M3 = kKey == KeyCode::kFp8E4M3;
  constexpr uint32_t kBias = kE4M3 ? 7 : 15;
  const float magnitude = fminf(fabsf(x), kE4M3 ? 448.0f : 1.75f);  // NaN gives the largest
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t half_step = kE4M3 ? 0x7ffffu + ((bits >> 20) & 1) : 0x80000u;
  const uint32_t normal = ((bits + half_step) >> 20) - ((127 - kBias) << 3);
  uint32_t subnormal;
  if constexpr (kE4M3) {
    // Adding 2^23 steps of 2^-9 leaves the rounded count in the low bits.
    subnormal = __float_as_uint(__fadd_rn(magnitude, 0x1p14f)) & 0xff;
  } else {
    subnormal = (static_cast<uint32_t>(__float2int_rz(__fmul_rn(magnitude, 0x1p24f))) + 64) >> 7;
  }
  uint32_t code = magnitude >= (kE4M3 ? 0x1p-6f : 0x1p-14f) ? normal : subnormal;
  if (kE4M3 && x != x) code = 0x7f;
  return code | sign;
}

template <KeyCode kKey, int kHeadDim, bool kWide>
__device__ __forceinline__ void encode_fp8_key(
    const uint32_t (&words)[kWide ? kHeadDim / 4 : kHeadDim / 8], const float (&x)[kHeadDim / 4],
    int quad_lane, std::byte* slot) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 8; ++k) {
    // Signs come from the input's own bits: a conversion may drop a NaN's.
    const uint32_t even = kWide ? words[kWide ? 2 * k : 0] >> 24 : words[k] >> 8;
    const uint32_t odd = kWide ? words[kWide ? 2 * k + 1 : 0] >> 24 : words[k] >> 24;
    const uint32_t pair =
        encode_fp8<kKey>(x[2 * k], even & 0x80) | (encode_fp8<kKey>(x[2 * k + 1], odd & 0x80) << 8);
    *reinterpret_cast<uint16_t*>(slot + 8 * k + 2 * quad_lane) = static_cast<uint16_t>(pair);
  }
}

template <ValueCode kValue, int kHeadDim>
__device__ __forceinline__ void encode_value(float (&x)[kHeadDim / 4], RowRange range,
                                             int quad_lane, std::byte* field) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kBits = value_bits(kValue);
  constexpr float kLevels = (1 << kBits) - 1;
  const bool finite = is_finite(range);
  const bool outlier = finite && fmaxf(-range.low, range.high) > kHalfMax;
  if (__any_sync(kFullMask, outlier || !finite)) {
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      x[i] = finite ? fminf(fmaxf(x[i], -kHalfMax), kHalfMax) : 0.0f;
    }
    range.low = finite ? fminf(fmaxf(range.low, -kHalfMax), kHalfMax) : 0.0f;
    range.high = finite ? fminf(fmaxf(range.high, -kHalfMax), kHalfMax) : 0.0f;
  }
  const float low = __fadd_rn(range.low, 0.0f);  // -0 becomes 0
  const float scale = fmaxf(__fmul_rn(__fsub_rn(range.high, low), 1.0f / kLevels), 1e-8f);
  const float inverse = __fdiv_rn(1.0f, scale);
  uint32_t codes[kChunks / 4];
#pragma unroll
  for (int j = 0; j < kChunks / 4; ++j) {
    codes[j] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float steps = __fadd_rn(__fmul_rn(__fsub_rn(x[8 * j + i], low), inverse), 0.5f);
      // 2^23 + trunc(steps): the code is in the low bits, under the exponent of 2^23.
      codes[j] += __float_as_uint(__fadd_rz(steps, 8388608.0f)) << (4 * i);
    }
    // The eight exponents, shifted with their codes.
    constexpr uint32_t kExponents = 0x4b000000u + (0x4b000000u << 4);
    codes[j] = finite ? codes[j] - kExponents : 0;
  }
  store_codes<kBits, kChunks>(codes, quad_lane, field);
  if (quad_lane == 0) {
    auto* words = reinterpret_cast<uint16_t*>(field + kHeadDim * kBits / 8);
    words[0] = finite ? float_to_half_bits(scale) : kHalfNaN;
    words[1] = finite ? float_to_half_bits(low) : kHalfNaN;
  }
}

// kBytes bytes from byte `first` of shared words (one word before them can be read) to a 2-byte
// aligned target, by kLanes lanes. Words straddling the target's ends are written as halves:
// nothing outside it is touched.
template <int kBytes, int kLanes>
__device__ __forceinline__ void write_bytes(const uint32_t* words, int first, std::byte* target,
                                            int lane) {
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(target) & 2);
  auto* aligned = reinterpret_cast<uint32_t*>(target - phase);
  const uint32_t* source = words + ((first - phase) >> 2);
  const int shift = 8 * ((first - phase) & 2);
#pragma unroll
  for (int begin = 0; begin < (kBytes + 5) / 4; begin += kLanes) {
    const int w = begin + lane;
    const uint32_t word = __funnelshift_r(source[w], source[w + 1], shift);
    const int left = kBytes + phase - 4 * w;
    const bool head = begin == 0 && w == 0 && phase != 0;
    const bool inside = 4 * (begin + kLanes) <= kBytes;  // whatever the lane and phase
    if (!head && (inside || left >= 4)) aligned[w] = word;
    if (begin == 0 || !inside) {
      auto* half = reinterpret_cast<uint16_t*>(aligned + w) + (head ? 1 : 0);
      if (head || left == 2) *half = static_cast<uint16_t>(head ? word >> 16 : word);
    }
  }
}

template <KeyCode kKey, ValueCode kValue, int kHeadDim, bool kWide>
__global__ void __launch_bounds__(EncodeShape<kKey, kValue, kHeadDim, kWide>::kWarps * 32,
                                  EncodeShape<kKey, kValue, kHeadDim, kWide>::kMinBlocks)
    encode_kernel(const __grid_constant__ EncodeParams params) {
  using Shape = EncodeShape<kKey, kValue, kHeadDim, kWide>;
  constexpr int kChunks = Shape::kChunks;
  __shared__ typename Shape::WarpShared warps[Shape::kWarps];
  typename Shape::WarpShared& shared = warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const int row = lane / 4, quad_lane = lane % 4;
  const uint32_t item = (blockIdx.x * Shape::kWarps + threadIdx.x / 32) * Shape::kRows + row;

  // Rows past the end repeat the last one. A skipped row is read too: waiting for its slot first
  // would put two memory latencies in sequence.
  const uint32_t row_item = min(item, params.num_items - 1);
  const int64_t token = params.head_divisor.divide(row_item);
  const int head =
      static_cast<int>(row_item - static_cast<uint32_t>(token) * params.head_divisor.divisor);
  const auto stage = [&](std::byte* to, const std::byte* from) {
    const uint32_t target = ptx::shared_address(to + row * Shape::kRowPitch);
#pragma unroll
    for (int i = quad_lane * 16; i < Shape::kRowBytes; i += 64) {
      ptx::cp_async<16>(target + i, from + i);
    }
    ptx::cp_async_commit();
  };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Nothing before this is read from memory.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
#endif
  stage(shared.key, params.key + token * params.key_stride_token + head * params.key_stride_head);
  stage(shared.value,
        params.value + token * params.value_stride_token + head * params.value_stride_head);
  std::byte* slot = params.cache.slot_at(params.slot_mapping[token], head);
  if (item >= params.num_items) slot = nullptr;

  if constexpr (!is_fp8(kKey)) shared.cells[lane] = params.cells.cells[lane];
  auto* out = reinterpret_cast<std::byte*>(shared.slots + 1) + row * Shape::kSlotBytes;
  ptx::cp_async_wait<1>();
  __syncwarp();
  {
    uint32_t words[kWide ? 2 * kChunks : kChunks];
    float x[2 * kChunks];
    read_row<kWide, kChunks>(shared.key, Shape::kRowPitch, lane, words);
    to_floats<kWide, kChunks>(words, params.bfloat16, x);
    if constexpr (is_fp8(kKey)) {
      encode_fp8_key<kKey, kHeadDim, kWide>(words, x, quad_lane, out);
    } else {
      encode_rotated_key<kKey, kHeadDim>(x, params, shared.cells, quad_lane, out);
    }
  }
  ptx::cp_async_wait<0>();
  __syncwarp();
  {
    uint32_t words[kWide ? 2 * kChunks : kChunks];
    float x[2 * kChunks];
    read_row<kWide, kChunks>(shared.value, Shape::kRowPitch, lane, words);
    to_floats<kWide, kChunks>(words, params.bfloat16, x);
    const RowRange range = quad_range(lane_range<kWide, kChunks>(words, params.bfloat16));
    encode_value<kValue, kHeadDim>(x, range, quad_lane, out + Shape::kFormat.value_offset());
  }
  __syncwarp();
  // The heads of a token lie side by side in token-major pages: one run of bytes.
  const auto address = reinterpret_cast<unsigned long long>(slot);
  const unsigned long long before = __shfl_up_sync(kFullMask, address, 4);
  const bool follows = address != 0 && (row == 0 || address == before + Shape::kSlotBytes);
  if (__all_sync(kFullMask, follows)) {
    const unsigned long long first = __shfl_sync(kFullMask, address, 0);
    write_bytes<Shape::kRows * Shape::kSlotBytes, 32>(shared.slots + 1, 0,
                                                      reinterpret_cast<std::byte*>(first), lane);
    return;
  }
#pragma unroll 1
  for (int first = 0; first < Shape::kRows; first += 2) {
    const int source = first + lane / 16;
    const auto target = reinterpret_cast<std::byte*>(__shfl_sync(kFullMask, address, 4 * source));
    if (target == nullptr) continue;
    write_bytes<Shape::kSlotBytes, 16>(shared.slots + 1, source * Shape::kSlotBytes, target,
                                       lane % 16);
  }
}

}  // namespace kvtile::cuda
