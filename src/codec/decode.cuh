// Decoding 64 slots by one thread block of 128: packed bytes to shared memory by asynchronous
// copies, then each row's key scale in the fixed order of docs/format.md, then chunks of eight
// elements in whatever order the caller stores them. fp32 arithmetic, each element rounded once:
// the bits of the CPU decoder. Shared by decode_slots and the tile image.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvtile/slot.h"
#include "src/codec/codec_params.h"
#include "src/codec/quad.cuh"
#include "src/codec/unpack.cuh"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// What a row reads as. Zeros: a token nobody asked for; NaN: a token that should have had a slot.
enum class RowFill : uint8_t { kDecode = 0, kZeros = 1, kNaN = 2 };

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
struct RowDecoder {
  static constexpr SlotFormat kFormat{kHeadDim, kKey, kValue, false};
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRows = 64;
  static constexpr int kThreads = 128;
  static constexpr int kKeyBits = key_bits(kKey);
  static constexpr int kValueBits = value_bits(kValue);
  // The words a slot can touch, and one that is read past them; an odd pitch spreads rows over
  // banks.
  static constexpr int kSlotWords = (kFormat.slot_bytes() + 2 + 3) / 4;
  static constexpr int kPitch = (kSlotWords + 1) | 1;

  static constexpr int kLevelBytes = 128 << kKeyBits;
  struct Shared {
    const std::byte* slots[kRows];
    float key_scale[kRows];
    float2 value_scale_zero[kRows];
    // Byte position of a row's slot in `words`; its RowFill above kFillShift.
    uint32_t rows[kRows];
    // A copy of the levels for each bank: lookups by any codes are free of conflicts. The table
    // starts at the first multiple of its size, so that an address is its start with the code's
    // bits inserted; shared memory itself starts at no such multiple.
    std::byte level_room[is_fp8(kKey) ? 4 : 2 * kLevelBytes];
    uint32_t words[kRows * kPitch];
  };
  static constexpr int kFillShift = 24;
  static_assert(sizeof(uint32_t) * kRows * kPitch < (1u << kFillShift));

  Shared& shared;

  // Thread t < 64 names its row before load(). The slot's bytes are read if fill is kDecode.
  __device__ void set_row(const std::byte* slot, RowFill fill) const {
    const auto phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(slot) & 2);
    shared.slots[threadIdx.x] = slot;
    shared.rows[threadIdx.x] =
        (threadIdx.x * kPitch * 4 + phase) | (static_cast<uint32_t>(fill) << kFillShift);
  }

  __device__ RowFill fill_of(uint32_t row_word) const {
    return static_cast<RowFill>(row_word >> kFillShift);
  }

  // Brings the rows in and computes their scales. Begins and ends with a block barrier.
  __device__ void load(const DecodeLevels& levels, bool norm_correction) const {
    __syncthreads();
    const int lane = threadIdx.x % 8;
#pragma unroll
    for (int first = 0; first < kRows; first += kThreads / 8) {
      const int row = first + threadIdx.x / 8;
      const std::byte* slot = shared.slots[row];
      const bool present = fill_of(shared.rows[row]) == RowFill::kDecode;
      const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(slot) & 2);
      const std::byte* source = slot - phase + 4 * lane;
      const uint32_t target = ptx::shared_address(shared.words + row * kPitch + lane);
      const int whole = present ? 4 : 0;
      // The last word may lie partly outside the slot: nothing past the end is read.
      const int last = present ? kFormat.slot_bytes() + phase - 4 * (kSlotWords - 1) : 0;
#pragma unroll
      for (int i = 0; i < kSlotWords; i += 8) {
        const int bytes = i + lane == kSlotWords - 1 ? last : whole;
        if (i + lane < kSlotWords) ptx::cp_async<4>(target + 4 * i, source + 4 * i, bytes);
      }
    }
    ptx::cp_async_commit();
    if constexpr (!is_fp8(kKey)) {
#pragma unroll
      for (int i = threadIdx.x / 32; i < (1 << kKeyBits); i += kThreads / 32) {
        ptx::store_shared(lane_levels() + 128 * i, levels.levels[i]);
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    compute_scales(norm_correction);
    __syncthreads();
  }

  // Where a row's slot begins in shared memory.
  struct Row {
    const uint32_t* words;
    uint32_t phase_bits;  // 0 or 16
    RowFill fill;

    // 32 bits from byte `offset` of the slot, for an offset known when the code is unrolled.
    __device__ uint32_t bits(int offset) const {
      if ((offset & 3) == 3) return bits_anywhere(offset);
      // The shift reaches 32 at most, where the clamping form returns the upper word.
      return __funnelshift_rc(words[offset >> 2], words[(offset >> 2) + 1],
                              phase_bits + 8 * (offset & 3));
    }
    __device__ uint32_t bits_anywhere(int offset) const {
      const uint32_t position = phase_bits / 8 + offset;
      return shift_words(words[position >> 2], words[(position >> 2) + 1], 8 * (position & 3));
    }
    __device__ float half(int offset) const {
      return half_bits_to_float(static_cast<uint16_t>(bits(offset)));
    }
  };

  __device__ Row row_at(int index) const {
    const uint32_t row_word = shared.rows[index];
    const uint32_t position = row_word & ((1u << kFillShift) - 1);
    return {shared.words + (position >> 2), 8 * (position & 3), fill_of(row_word)};
  }

  // This lane's copy of the first level.
  __device__ uint32_t lane_levels() const {
    const uint32_t room = ptx::shared_address(shared.level_room);
    return ((room + kLevelBytes - 1) & ~(kLevelBytes - 1u)) + 4 * (threadIdx.x % 32);
  }

  // The level of the code at bit kBit.
  template <int kBit>
  __device__ float level(uint32_t bits) const {
    constexpr uint32_t kMask = ((1u << kKeyBits) - 1) << 7;  // 128 bytes a level
    const uint32_t shifted =
        kBit >= 7 ? bits >> (kBit >= 7 ? kBit - 7 : 0) : bits << (kBit >= 7 ? 0 : 7 - kBit);
    return ptx::load_shared(and_or(shifted, kMask, lane_levels()));
  }

  // Two threads a row: coordinates 0..3 and 4..7 of each chunk.
  __device__ void compute_scales(bool norm_correction) const {
    const Row row = row_at(threadIdx.x / 2);
    const int upper = threadIdx.x % 2;
    if constexpr (!is_fp8(kKey)) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (norm_correction) {
        const auto add = [](float sum, float x) { return __fadd_rn(sum, __fmul_rn(x, x)); };
#pragma unroll 8
        for (int k = 0; k < kChunks; ++k) {
          const uint32_t bits = row.bits(kKeyBits * k) >> (upper * 4 * kKeyBits);
          sums[0] = add(sums[0], level<0>(bits));
          sums[1] = add(sums[1], level<kKeyBits>(bits));
          sums[2] = add(sums[2], level<2 * kKeyBits>(bits));
          sums[3] = add(sums[3], level<3 * kKeyBits>(bits));
        }
      }
      float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
      const float norm = row.half(kFormat.norm_offset());
      if (upper == 0) {
        shared.key_scale[threadIdx.x / 2] =
            norm_correction ? __fdiv_rn(norm, __fsqrt_rn(sum)) : norm;
      }
    }
    if (upper == 1) {
      shared.value_scale_zero[threadIdx.x / 2] =
          make_float2(row.half(kFormat.scale_offset()), row.half(kFormat.zero_offset()));
    }
  }

  // Eight consecutive coordinates of a key, in the space it is stored in.
  __device__ void key_chunk(int index, int chunk, float (&x)[8]) const {
    const Row row = row_at(index);
    if constexpr (is_fp8(kKey)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];
        fp8_to_half2(kKey, row.bits_anywhere(8 * chunk + 4 * half), pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 two = __half22float2(device_half::as_half2(pairs[i]));
          x[4 * half + 2 * i] = two.x;
          x[4 * half + 2 * i + 1] = two.y;
        }
      }
    } else {
      const uint32_t bits = row.bits_anywhere(kKeyBits * chunk);
      const float scale = shared.key_scale[index];
      x[0] = __fmul_rn(level<0>(bits), scale);
      x[1] = __fmul_rn(level<kKeyBits>(bits), scale);
      x[2] = __fmul_rn(level<2 * kKeyBits>(bits), scale);
      x[3] = __fmul_rn(level<3 * kKeyBits>(bits), scale);
      x[4] = __fmul_rn(level<4 * kKeyBits>(bits), scale);
      x[5] = __fmul_rn(level<5 * kKeyBits>(bits), scale);
      x[6] = __fmul_rn(level<6 * kKeyBits>(bits), scale);
      x[7] = __fmul_rn(level<7 * kKeyBits>(bits), scale);
    }
    apply_fill(row.fill, x);
  }

  __device__ void value_chunk(int index, int chunk, float (&x)[8]) const {
    const Row row = row_at(index);
    uint32_t bits = row.bits_anywhere(kFormat.value_offset() + kValueBits * chunk);
    if constexpr (kValueBits == 3) bits = expand_3bit(bits);
    uint32_t pairs[4];
    nibbles_to_codes<0>(bits, pairs);
    const float2 affine = shared.value_scale_zero[index];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 codes = __half22float2(device_half::as_half2(pairs[i]));
      x[i] = __fmaf_rn(codes.x, affine.x, affine.y);
      x[i + 4] = __fmaf_rn(codes.y, affine.x, affine.y);
    }
    apply_fill(row.fill, x);
  }

  // Replaces the elements of a row that is not decoded.
  __device__ void apply_fill(RowFill fill, float (&x)[8]) const {
    if (fill == RowFill::kDecode) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fill == RowFill::kZeros ? 0.0f : __uint_as_float(0x7fc00000);
  }
};

__device__ __forceinline__ uint4 chunk_to_half(const float (&x)[8]) {
  return make_uint4(half2_from_floats(x[0], x[1]), half2_from_floats(x[2], x[3]),
                    half2_from_floats(x[4], x[5]), half2_from_floats(x[6], x[7]));
}

// Eight elements to a 16-byte aligned place in an array of dtype.
__device__ __forceinline__ void store_chunk(void* array, int64_t index, DType dtype,
                                            const float (&x)[8]) {
  if (dtype == DType::kFloat32) {
    auto* out = reinterpret_cast<float4*>(static_cast<float*>(array) + index);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(array) + index);
  if (dtype == DType::kFloat16) {
    *out = chunk_to_half(x);
  } else {
    *out = make_uint4(bfloat162_from_floats(x[0], x[1]), bfloat162_from_floats(x[2], x[3]),
                      bfloat162_from_floats(x[4], x[5]), bfloat162_from_floats(x[6], x[7]));
  }
}

// Names the block's 64 rows: items are (token, head) with the head fastest, as the output is.
template <class Decoder>
__device__ void set_decode_rows(const Decoder& decoder, const DecodeParams& params) {
  if (threadIdx.x >= Decoder::kRows) return;
  const uint32_t item = blockIdx.x * Decoder::kRows + threadIdx.x;
  const std::byte* slot = nullptr;
  RowFill fill = RowFill::kZeros;
  if (item < params.num_items) {
    const uint32_t token = params.head_divisor.divide(item);
    const int64_t entry = params.slot_mapping[token];
    slot =
        params.cache.slot_at(entry, static_cast<int>(item - token * params.head_divisor.divisor));
    if (entry >= 0) fill = slot != nullptr ? RowFill::kDecode : RowFill::kNaN;
  }
  decoder.set_row(slot != nullptr ? slot : params.cache.pages, fill);
}

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
__global__ void __launch_bounds__(128) decode_kernel(const __grid_constant__ DecodeParams params) {
  using Decoder = RowDecoder<kKey, kValue, kHeadDim>;
  __shared__ typename Decoder::Shared shared;
  const Decoder decoder{shared};
  set_decode_rows(decoder, params);
  decoder.load(params.levels, params.norm_correction);
  const uint32_t first = blockIdx.x * Decoder::kRows;
  const int rows = static_cast<int>(min(params.num_items - first, uint32_t{Decoder::kRows}));
  // A thread keeps its chunk and steps over rows: consecutive threads write consecutive chunks.
  constexpr int kStep = Decoder::kThreads / Decoder::kChunks;
  const int chunk = threadIdx.x % Decoder::kChunks;
  const auto each_row = [&](void* array, auto&& decode) {
#pragma unroll 2
    for (int row = threadIdx.x / Decoder::kChunks; row < rows; row += kStep) {
      float x[8];
      decode(row, x);
      store_chunk(array, (static_cast<int64_t>(first) + row) * kHeadDim + 8 * chunk, params.dtype,
                  x);
    }
  };
  if (params.key != nullptr) {
    each_row(params.key, [&](int row, float(&x)[8]) { decoder.key_chunk(row, chunk, x); });
  }
  if (params.value != nullptr) {
    each_row(params.value, [&](int row, float(&x)[8]) { decoder.value_chunk(row, chunk, x); });
  }
}

// Keys rotated back out of the Hadamard space, a quad of lanes a row.
template <KeyCode kKey, ValueCode kValue, int kHeadDim>
__global__ void __launch_bounds__(128)
    decode_unrotated_kernel(const __grid_constant__ DecodeParams params) {
  using Decoder = RowDecoder<kKey, kValue, kHeadDim>;
  constexpr int kChunks = Decoder::kChunks;
  __shared__ typename Decoder::Shared shared;
  const Decoder decoder{shared};
  set_decode_rows(decoder, params);
  decoder.load(params.levels, params.norm_correction);
  const int quad_lane = threadIdx.x % 4;
  for (int row = threadIdx.x / 4; row < Decoder::kRows; row += Decoder::kThreads / 4) {
    float x[2 * kChunks];
    const typename Decoder::Row packed = decoder.row_at(row);
    const float scale = shared.key_scale[row];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const uint32_t bits =
          packed.bits(Decoder::kKeyBits * k) >> (2 * Decoder::kKeyBits * quad_lane);
      x[2 * k] = __fmul_rn(decoder.template level<0>(bits), scale);
      x[2 * k + 1] = __fmul_rn(decoder.template level<Decoder::kKeyBits>(bits), scale);
    }
    hadamard_quad<kChunks>(x, quad_lane);
    const uint32_t item = blockIdx.x * Decoder::kRows + row;
    if (item >= params.num_items) continue;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float a = __fmul_rn(x[2 * k], params.inverse_root_dim);
      float b = __fmul_rn(x[2 * k + 1], params.inverse_root_dim);
      if (packed.fill != RowFill::kDecode) {
        a = b = packed.fill == RowFill::kZeros ? 0.0f : __uint_as_float(0x7fc00000);
      }
      const int64_t index = static_cast<int64_t>(item) * kHeadDim + 8 * k + 2 * quad_lane;
      if (params.dtype == DType::kFloat32) {
        *reinterpret_cast<float2*>(static_cast<float*>(params.key) + index) = make_float2(a, b);
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.key) + index) =
            params.dtype == DType::kFloat16 ? half2_from_floats(a, b) : bfloat162_from_floats(a, b);
      }
    }
  }
}

}  // namespace kvtile::cuda
