// Packed bytes in shared memory to MMA fragments. Keys: a pair table indexed by the packed bits,
// one entry a lane so that no two lanes share a bank; FP8 by conversion. Values: codes of two
// tokens are paired before unpacking and left where they are as subnormal fp16 (code * 2^(shift -
// 24)), which the tensor core multiplies exactly; the power of two is undone once per output
// element. Which dimension a lane holds in which step is free: queries and outputs follow the order
// defined here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvtile/slot.h"
#include "src/attention/cuda/rows_state.cuh"
#include "src/codec/unpack.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// Named at namespace scope: the public header's constexpr functions are host functions to nvcc.
template <KeyCode kKey>
inline constexpr bool kRotatedKeys = !is_fp8(kKey);
template <KeyCode kKey>
inline constexpr int kKeyBits = key_bits(kKey);

// Entry of a byte of codes: for every 4-bit pair its levels; in the wide table of 3-bit codes, the
// pair in the byte's lower bits, and 128 bytes on the one in its upper bits.
template <KeyCode kKey>
__device__ inline void fill_key_table(const RowsParams& p, uint32_t table, int thread,
                                      int threads) {
  if constexpr (kRotatedKeys<kKey>) {
    constexpr int kBits = kKeyBits<kKey>;
    constexpr int kHalves = kRowsWide && kBits == 3 ? 2 : 1;
    constexpr int kEntries = kRowsWide ? 256 * kHalves : 1 << (2 * kBits);
    const auto level = [&](uint32_t code) {
      return (p.levels[(code >> 1) & 7] >> (16 * (code & 1))) & 0xffffu;
    };
    // Eight threads an entry, 16 bytes each.
    for (int i = thread; i < 8 * kEntries; i += threads) {
      const uint32_t entry = i >> 3;
      const uint32_t codes = entry / kHalves >> (2 * (entry % kHalves));
      const uint32_t pair =
          level(codes & ((1 << kBits) - 1)) | (level((codes >> kBits) & ((1 << kBits) - 1)) << 16);
      const uint32_t at = kRowsWide && kHalves == 1 ? 256 * entry : 128 * entry;
      ptx::st_shared4(table + at + 16 * (i & 7), pair, pair, pair, pair);
    }
  }
}

// Byte kByte of `codes` under the address of the lane's entry 0: the address of its entry.
template <int kByte>
__device__ inline uint32_t wide_entry(uint32_t codes, uint32_t lane_table) {
  return ptx::prmt(codes, lane_table, 0x7604 | kByte << 4);
}

// Place of a query dimension in the B fragments: step k, lane column c, register, half.
struct FragmentPlace {
  int step, column, reg, half;
};

template <KeyCode kKey, int kDim>
struct RowsKeys;

template <int kDim>
struct RowsKeys<KeyCode::kLloydMax4, kDim> {
  // Lane column c holds half words c, c + 4, ...: four codes, one step. The four lanes of a token
  // are two words apart at most, which spares bank conflicts whatever the tokens' distance.
  static constexpr int kBlocks = kDim / 32, kBlockSteps = 2, kLaneBytes = 2;
  uint32_t lane_table;

  __device__ explicit RowsKeys(uint32_t table) : lane_table(table + 4 * (threadIdx.x & 31)) {}

  static constexpr __device__ FragmentPlace place(int d) {
    const int half_word = d / 4;
    return {half_word / 4, half_word % 4, d % 4 / 2, d % 2};
  }

  __device__ uint32_t look_up_low(uint32_t half) const {
    return ptx::ld_shared(kRowsWide ? wide_entry<0>(half, lane_table)
                                    : ptx::mad(half & 0xff, 128, lane_table));
  }
  __device__ uint32_t look_up_high(uint32_t half) const {
    return ptx::ld_shared(kRowsWide ? wide_entry<1>(half, lane_table)
                                    : ptx::mad(half >> 8, 128, lane_table));
  }

  __device__ void load(uint32_t key0, uint32_t key1, int block, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t half0 = ptx::ld_shared_u16(key0 + 16 * block + 8 * s);
      const uint32_t half1 = ptx::ld_shared_u16(key1 + 16 * block + 8 * s);
      a[s][0] = look_up_low(half0);
      a[s][1] = look_up_low(half1);
      a[s][2] = look_up_high(half0);
      a[s][3] = look_up_high(half1);
    }
  }
};

template <int kDim>
struct RowsKeys<KeyCode::kLloydMax3, kDim> {
  // Lane column c holds units c, c + 4, ... of 32 codes (12 bytes); head_dim 64 has 16 codes a
  // lane.
  static constexpr int kUnit = kDim == 64 ? 16 : 32;
  static constexpr int kBlocks = kDim / (4 * kUnit), kBlockSteps = kUnit / 4;
  static constexpr int kLaneBytes = kUnit * 3 / 8;
  uint32_t lane_table;  // no bits where the index goes

  __device__ explicit RowsKeys(uint32_t table) : lane_table(table + 4 * (threadIdx.x & 31)) {}

  static constexpr __device__ FragmentPlace place(int d) {
    const int unit = d / kUnit, pair = d % kUnit / 2;
    return {unit / 4 * kBlockSteps + pair / 2, unit % 4, pair % 2, d % 2};
  }

  template <int kPair>
  __device__ uint32_t look_up(const uint32_t (&words)[4]) const {
    if constexpr (kRowsWide) {
      // Pairs 0 and 3 of every 24 bits lie in a byte; 4 bits on, so do pairs 1 and 2.
      constexpr int kInner = (kPair + 1) % 4 / 2, kUnitBit = kPair / 4 * 24;
      constexpr int kStart = kInner != 0 ? kUnitBit + 4 : kUnitBit + kPair % 4 / 3 * 16;
      constexpr int kWord = kStart / 32, kShift = kStart % 32;
      const uint32_t codes = kInner == 0 ? words[kWord]
                             : kShift + 14 <= 32
                                 ? words[kWord] >> kShift
                                 : shift_words(words[kWord], words[kWord + 1], kShift);
      constexpr int kByte = kInner != 0 ? kPair % 2 == 0 : kShift / 8;
      constexpr int kHalf = kPair % 2 * 128;
      return ptx::ld_shared(wide_entry<kByte>(codes, lane_table) + kHalf);
    } else {
      constexpr int kBit = 6 * kPair % 32;
      const uint32_t low = words[6 * kPair / 32], high = words[6 * kPair / 32 + 1];
      uint32_t shifted;
      if constexpr (kBit < 7) {
        shifted = low << (7 - kBit);
      } else if constexpr (kBit + 6 <= 32) {
        shifted = low >> (kBit - 7);
      } else {
        shifted = shift_words(low, high, kBit - 7);
      }
      return ptx::ld_shared(and_or(shifted, 0x1f80, lane_table));
    }
  }

  template <int kPair>
  __device__ void look_up_all(const uint32_t (&words)[4], int reg,
                              uint32_t (&a)[kBlockSteps][4]) const {
    a[kPair / 2][kPair % 2 * 2 + reg] = look_up<kPair>(words);
    if constexpr (kPair + 1 < kUnit / 2) look_up_all<kPair + 1>(words, reg, a);
  }

  __device__ void load(uint32_t key0, uint32_t key1, int block,
                       uint32_t (&a)[kBlockSteps][4]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t unit = (t == 0 ? key0 : key1) + 4 * kLaneBytes * block;
      uint32_t words[4] = {};
#pragma unroll
      for (int h = 0; h < kLaneBytes / 2; h += 2) {
        words[h / 2] = ptx::ld_shared_u16(unit + 2 * h);
        if (h + 1 < kLaneBytes / 2) {
          words[h / 2] = permute_bytes(words[h / 2], ptx::ld_shared_u16(unit + 2 * h + 2), 0x5410);
        }
      }
      look_up_all<0>(words, t, a);
    }
  }
};

template <KeyCode kKey, int kDim>
struct RowsFp8Keys {
  // Lane column c holds words c, c + 4, ...: four codes, one step.
  static constexpr int kBlocks = kDim / 16, kBlockSteps = 1, kLaneBytes = 4;

  __device__ explicit RowsFp8Keys(uint32_t) {}

  static constexpr __device__ FragmentPlace place(int d) {
    const int word = d / 4;
    return {word / 4, word % 4, d % 4 / 2, d % 2};
  }

  __device__ void load(uint32_t key0, uint32_t key1, int block, uint32_t (&a)[1][4]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t word = (t == 0 ? key0 : key1) + 16 * block;
      uint32_t pairs[2];
      fp8_to_half2(kKey, ptx::ld_shared(word), pairs);
      a[0][t] = pairs[0];
      a[0][t + 2] = pairs[1];
    }
  }
};

template <int kDim>
struct RowsKeys<KeyCode::kFp8E4M3, kDim> : RowsFp8Keys<KeyCode::kFp8E4M3, kDim> {
  using RowsFp8Keys<KeyCode::kFp8E4M3, kDim>::RowsFp8Keys;
};
template <int kDim>
struct RowsKeys<KeyCode::kFp8E4B15, kDim> : RowsFp8Keys<KeyCode::kFp8E4B15, kDim> {
  using RowsFp8Keys<KeyCode::kFp8E4B15, kDim>::RowsFp8Keys;
};

// Hadamard transform of a row held as elements lane + 32 i, not normalised.
template <int kDim>
__device__ inline void transform_row(float (&x)[kDim / 32], int lane) {
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kDim / 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if ((i & step) != 0) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
}

// Zeros from `begin` to `end`, multiples of 16: factors and fragments of rows that are not there.
__device__ inline void clear_queries(uint32_t begin, uint32_t end) {
  for (uint32_t at = begin + 16 * threadIdx.x; at < end; at += 16 * blockDim.x) {
    ptx::st_shared4(at, 0, 0, 0, 0);
  }
}

// Queries of a tile: made into fp16 B fragments [pair of (step, tile of 8 rows)][lane][2 x 2
// registers] or, with kCorePitch, into the core matrices of a k-major wgmma operand, so many bytes
// apart, those of a k8 step side by side; rotated for rotated keys, each row scaled by a power of
// two to a largest element in [8, 16); with each row's factor from dot products to log2 units.
// Those of a KV head follow the one's before. The code runs once and cold: it is kept short.
template <class Config, int kCorePitch = 0>
struct QueryRows {
  static constexpr KeyCode kKey = Config::kKey;
  static constexpr int kDim = Config::kHeadDim, kTiles = Config::kTiles;
  using Keys = RowsKeys<kKey, kDim>;

  const RowsParams& p;
  const RowsTile& tile;
  uint32_t query, factors;
  int lane;

  // Bits of a dimension and of a row have places of their own in an address: those of (lane + 32 k)
  // are the sum of the lane's and of 32 k's.
  static constexpr __device__ uint32_t place(int d) {
    const FragmentPlace at = Keys::place(d);
    if constexpr (kCorePitch > 0) {
      return (2 * at.step + at.reg) * kTiles * kCorePitch + 4 * at.column + 2 * at.half;
    }
    const int pairs = kTiles == 1 ? at.step / 2 * 512 + at.step % 2 * 8 : at.step * kTiles * 256;
    return pairs + 16 * at.column + 4 * at.reg + 2 * at.half;
  }
  static __device__ uint32_t place_of_row(int row) {
    if constexpr (kCorePitch > 0) return row / 8 * kCorePitch + row % 8 * 16;
    return row / 16 * 512 + row / 8 % 2 * 8 + row % 8 * 64;
  }

  // Rows first, first + step, ... of those of the KV heads from `kv_head` on, head by head.
  __device__ void prepare(int kv_head, int heads, int first, int step) const {
    const int rows = tile.num_rows(), count = heads * rows;
    // The lane's is one of the warp's rows: where it is read, and where its fragments and factor
    // go.
    const int item = min(first + lane * step, count - 1), head = item / rows;
    const int row = item - head * rows, query_row = row / tile.num_heads;
    const int64_t source = query_offset(p, tile, kv_head + head, query_row, row);
    const uint32_t fragments = query + head * Config::kSizes.query + place_of_row(row);
    const uint32_t factor = factors + head * Config::kSizes.factors + 4 * row;
    float next[kDim / 32] = {};
#pragma unroll 1
    for (int i = -1; first + i * step < count; ++i) {
      float x[kDim / 32];
#pragma unroll
      for (int k = 0; k < kDim / 32; ++k) x[k] = next[k];
      if (first + (i + 1) * step < count) {
        load_row<kDim>(p.a.query, p.a.dtype, __shfl_sync(~0u, source, i + 1), lane, next);
      }
      if (i < 0) continue;
      write(x, __shfl_sync(~0u, fragments, i), __shfl_sync(~0u, factor, i));
    }
  }

  __device__ void write(float (&x)[kDim / 32], uint32_t fragments, uint32_t factor) const {
    if constexpr (kRotatedKeys<kKey>) transform_row<kDim>(x, lane);
    // Magnitudes compare as their bits do, and what is not finite as the largest.
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) top = max(top, float_bits(fabsf(x[k])));
    top = __reduce_max_sync(~0u, top);
    // Exponents are kept where both powers of two are normal.
    const int exponent =
        top == 0 ? 0 : min(max(3 - (static_cast<int>(top >> 23) - 127), -120), 120);
    float up = bits_float(static_cast<uint32_t>(127 + exponent) << 23);
    if (p.a.softmax_scale < 0.0f) up = -up;
    if (top >= 0x7f800000u) up = NAN;
    fragments += place(lane);
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      ptx::st_shared_u16(fragments + place(32 * k), float_to_half_bits(x[k] * up));
    }
    if (lane != 0) return;
    const float down = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    const float unit = kRotatedKeys<kKey> ? rsqrtf(static_cast<float>(kDim)) : 1.0f;
    ptx::st_shared_float(factor, fabsf(p.a.softmax_scale) * down * unit * kLog2e);
  }
};

// By a warp: the visible [begin, end) of every row.
template <int kRows>
__device__ inline void write_ranges(const RowsParams& p, const RowsTile& tile, uint32_t ranges,
                                    int row) {
  if (row >= kRows) return;
  int64_t begin = 0, end = 0;
  if (row < tile.num_rows()) row_range(p, tile, row / tile.num_heads, &begin, &end);
  if (p.plan.raw_chunk) end = min(end, tile.cached_len);
  const auto word = [](int64_t position) {
    return static_cast<uint32_t>(min(max(position, int64_t{0}), int64_t{0x7fffffff}));
  };
  ptx::st_shared2(ranges + 8 * row, word(begin), word(end));
}

// A fragments of V^T: registers 0, 1 are rows "even" and "odd" of dimensions dim(t, g) and
// dim(t, g) + 1 for tokens 2c and 2c + 1, registers 2, 3 the same for tokens 2c + 8 and 2c + 9.
// kDim: the dimensions of the warp. The lane's run of 2 kBlockTiles of them starts at run(block,
// g); `rows` are the value codes of its four tokens at lane_offset(g). kWords: the slots are
// word-aligned. fetch() reads them and pairs tokens, unpack() makes fragments. centre(t, odd) times
// the sum of the weights takes kCentre off every code; decode(even, odd) turns two accumulators
// into centred sums of codes.
template <ValueCode kValue, int kDim, bool kWords>
struct RowsValues;

template <int kDim, bool kWords>
struct RowsValues<ValueCode::kUniform4, kDim, kWords> {
  static constexpr float kCentre = 8.0f;
  static constexpr int kBlocks = kDim / 64, kBlockTiles = 4, kSpanBytes = kDim / 2;
  static constexpr int kPairWords = 4;

  static __device__ uint32_t lane_offset(int g) { return kWords ? 4 * g : 2 * g; }
  // Half words of a lane are 16 bytes apart: see the keys.
  static __device__ int dim(int tile, int g) {
    const int block = tile / 4, t = tile % 4;
    return kWords ? 8 * (g + 8 * block) + 2 * t : 64 * block + 32 * (t / 2) + 4 * g + 2 * (t % 2);
  }

  // The even row holds a whole byte, code 2t + 16 code 2t + 1; the odd row its upper half.
  static __device__ float centre(int, int odd) { return odd != 0 ? -0x1p-17f : -0x1.1p-17f; }
  static __device__ void decode(int, float even, float odd, float* low, float* high) {
    *low = (even - odd) * 0x1p24f;
    *high = odd * 0x1p20f;
  }

  // A byte of each of two tokens, a half apart.
  static __device__ void fetch(const uint32_t (&rows)[4], int block, int,
                               uint32_t (&pairs)[2][kPairWords]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t codes[2][2];  // [token][half]
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const uint32_t row = rows[2 * pair + t] + 32 * block;
        if constexpr (kWords) {
          codes[t][0] = ptx::ld_shared(row);
        } else {
          codes[t][0] = ptx::ld_shared_u16(row);
          codes[t][1] = ptx::ld_shared_u16(row + 16);
        }
      }
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        // In whole words, what lies between the bytes is masked off.
        pairs[pair][byte] =
            kWords ? ptx::prmt(codes[0][0], codes[1][0], byte * 0x1111 + 0x4400) & 0x00ff00ffu
                   : ptx::prmt(codes[0][byte / 2], codes[1][byte / 2],
                               byte % 2 == 0 ? 0x2420 : 0x2521);
      }
    }
  }
  static __device__ void unpack(const uint32_t (&pairs)[2][kPairWords], uint32_t (&a)[4][4]) {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        a[byte][2 * pair] = pairs[pair][byte];
        a[byte][2 * pair + 1] = pairs[pair][byte] & 0x00f000f0u;
      }
    }
  }
};

template <int kDim>
struct RowsValues<ValueCode::kUniform3, kDim, false> {
  static constexpr float kCentre = 4.0f;
  static constexpr int kRun = kDim == 64 ? 8 : 16;
  static constexpr int kBlocks = kDim / (8 * kRun), kBlockTiles = kRun / 2;
  static constexpr int kSpanBytes = kDim * 3 / 8, kPairWords = 3;

  static __device__ uint32_t lane_offset(int g) { return kRun == 16 ? 6 * g : 3 * g & ~1; }
  static __device__ int dim(int tile, int g) {
    return kRun * (g + 8 * (tile / kBlockTiles)) + 2 * (tile % kBlockTiles);
  }

  // Bit at which code n of a run is left in its half: 0 3 6 0 3 0 2 5 0 3 0 1 4 7 0 3, a digit
  // each.
  static __device__ int shift(int n) {
    return static_cast<int>(0x3074103052030630ull >> (4 * n)) & 15;
  }
  static __device__ float centre(int tile, int odd) {
    return -kCentre / unit(2 * (tile % kBlockTiles) + odd);
  }
  static __device__ void decode(int tile, float even, float odd, float* low, float* high) {
    *low = even * unit(2 * (tile % kBlockTiles));
    *high = odd * unit(2 * (tile % kBlockTiles) + 1);
  }
  static __device__ float unit(int n) {
    return bits_float(static_cast<uint32_t>(127 + 24 - shift(n)) << 23);
  }

  // Halves of the run, token 2c low and 2c + 1 high.
  static __device__ void fetch(const uint32_t (&rows)[4], int block, int g,
                               uint32_t (&pairs)[2][kPairWords]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t(&x)[kPairWords] = pairs[pair];
      if constexpr (kRun == 16) {
#pragma unroll
        for (int h = 0; h < 3; ++h) {
          const uint32_t at = 48 * block + 2 * h;
          x[h] = permute_bytes(ptx::ld_shared_u16(rows[2 * pair] + at),
                               ptx::ld_shared_u16(rows[2 * pair + 1] + at), 0x5410);
        }
      } else {
        // 24 bits at byte 3g: the two halves that hold them, shifted by a byte for odd g.
        uint32_t run[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint32_t at = rows[2 * pair + t] + 24 * block;
          run[t] = permute_bytes(ptx::ld_shared_u16(at), ptx::ld_shared_u16(at + 2), 0x5410) >>
                   (8 * (g & 1));
        }
        x[0] = permute_bytes(run[0], run[1], 0x5410);
        x[1] = permute_bytes(run[0], run[1], 0x7632) & 0x00ff00ffu;
        x[2] = 0;
      }
    }
  }
  static __device__ void unpack(const uint32_t (&pairs)[2][kPairWords],
                                uint32_t (&a)[kBlockTiles][4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t(&x)[kPairWords] = pairs[pair];
      uint32_t codes[16];
      codes[0] = x[0] & 0x00070007u;
      codes[1] = x[0] & 0x00380038u;
      codes[2] = x[0] & 0x01c001c0u;
      codes[3] = (x[0] >> 9) & 0x00070007u;
      codes[4] = (x[0] >> 9) & 0x00380038u;
      codes[5] = ((x[0] >> 15) & 0x00010001u) | ((x[1] << 1) & 0x00060006u);
      codes[6] = x[1] & 0x001c001cu;
      codes[7] = x[1] & 0x00e000e0u;
      codes[8] = (x[1] >> 8) & 0x00070007u;
      codes[9] = (x[1] >> 8) & 0x00380038u;
      codes[10] = ((x[1] >> 14) & 0x00030003u) | ((x[2] << 2) & 0x00040004u);
      codes[11] = x[2] & 0x000e000eu;
      codes[12] = x[2] & 0x00700070u;
      codes[13] = x[2] & 0x03800380u;
      codes[14] = (x[2] >> 10) & 0x00070007u;
      codes[15] = (x[2] >> 10) & 0x00380038u;
#pragma unroll
      for (int t = 0; t < kBlockTiles; ++t) {
        a[t][2 * pair] = codes[2 * t];
        a[t][2 * pair + 1] = codes[2 * t + 1];
      }
    }
  }
};

}  // namespace kvtile::cuda
