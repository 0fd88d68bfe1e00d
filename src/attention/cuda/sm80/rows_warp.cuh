// The arithmetic of a warp of the rows kernel: dot products, weights and weighted values of 16
// tokens at a time, and how the states of a block's warps become one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"
#include "src/attention/cuda/sm80/rows_unpack.cuh"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// Weights are 2^(x - maximum + kRowsWeightBits): fp16 keeps what is 2^-36 of the largest. The
// maximum moves when a weight passes kRowsWeightLimit.
inline constexpr float kRowsWeightBits = 12.0f;
inline constexpr float kRowsWeightLimit = 32768.0f;
// Groups whose values are added before the middle code is taken off the accumulators.
inline constexpr int kRowsCentreSteps = 8;

// Largest over the eight lanes that hold a row.
__device__ inline float column_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ inline float column_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// 1 / x for a power of two, by its exponent.
__device__ inline float power_reciprocal(float x) {
  return bits_float(0x7f000000u - float_bits(x));
}

// The state of a warp: S^T and O^T accumulators in MMA layout. Lane (g, c) has rows 2c and 2c + 1
// of each column tile.
template <class Config>
struct RowsWarp {
  static constexpr int kTiles = Config::kTiles;
  static constexpr int kDim = Config::kHeadDim;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kOutTiles = Config::kWarpDims / 16;
  using Keys = RowsKeys<Config::kKey, kDim>;
  using Values = RowsValues<Config::kValue, Config::kWarpDims, Config::kSlotAlignment == 4>;

  float o[kOutTiles][kTiles][4];
  float weight_sum[kTiles][4];  // of the rounded weights since o was centred; two and two are equal
  float l[kTiles][2], z[kTiles][2];
  float factor[kTiles][2];  // log2 units per dot product
  float offset[kTiles][2];  // subtracted in the exponent: maximum - kRowsWeightBits; +inf: none yet
  float limit;              // power of two not below the finite value scales so far
  float ceiling;            // of a pair of weights; below zero while some row has no maximum
  uint32_t query[Config::kQueryInRegisters ? kSteps * kTiles * 2 : 1];

  __device__ void reset() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weight_sum[n][i] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        l[n][r] = z[n][r] = 0.0f;
        offset[n][r] = INFINITY;
      }
    }
    limit = 0x1p-24f;  // the smallest fp16
    ceiling = -1.0f;
  }

  // `query_shared`: the lane's part of the fragments. `factors`: of the rows.
  __device__ void load_queries(uint32_t query_shared, uint32_t factors, int c) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[n][r] = ptx::ld_shared_float(factors + 32 * n + 8 * c + 4 * r);
      }
    }
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int u = 0; u < kSteps * kTiles; ++u) {
        ptx::ld_shared2(query_shared + u / 2 * 512 + u % 2 * 8, &query[2 * u], &query[2 * u + 1]);
      }
    }
  }

  // What a group's slots say, for the lane's tokens g and g + 8.
  struct Slots {
    float key_scale[2], value_scale[2], value_zero[2];
  };

  // Dot products of the warp's 16 tokens with its rows, and the slots' constants. The lane's tokens
  // g and g + 8 lie at `slot0` and `slot1`.
  __device__ void score(uint32_t slot0, uint32_t slot1, uint32_t table, uint32_t query_shared,
                        const RowsParams& p, int c, float (&dot)[kTiles][4], Slots* slots) const {
    // One column tile alone would be a chain of dependent products.
    constexpr int kChains = kTiles == 1 ? 2 : 1;
    float chains[kChains][kTiles][4] = {};
    float norms[4] = {};
    const Keys keys(table);
    // The loop of a wide head would not fit the instruction cache.
    constexpr int kUnroll = kDim <= 128 ? Keys::kBlocks : (Keys::kBlocks + 1) / 2;
    uint32_t kept[4];
    const uint32_t key0 = slot0 + Keys::kLaneBytes * c, key1 = slot1 + Keys::kLaneBytes * c;
#pragma unroll kUnroll
    for (int block = 0; block < Keys::kBlocks; ++block) {
      uint32_t a[Keys::kBlockSteps][4], squares[4];
      keys.load(key0, key1, block, a);
#pragma unroll
      for (int s = 0; s < Keys::kBlockSteps; ++s) {
        const int k = block * Keys::kBlockSteps + s;
        uint32_t b[kTiles][2];
        query_fragments(query_shared, k, kept, b);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          ptx::mma_m16n8k16(chains[k % kChains][n], a[s], b[n][0], b[n][1]);
        }
        if constexpr (kRotatedKeys<Config::kKey>) {
          // |k|^2: two squares a half in fp16, the rest by the tensor core, which leaves the sum
          // with every lane of the token.
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            squares[s % 2 * 2 + t] =
                half2_fma(a[s][t + 2], a[s][t + 2], half2_mul(a[s][t], a[s][t]));
          }
          if (s % 2 == 1) {
            constexpr uint32_t kOne = half2_broadcast(0x3c00);
            ptx::mma_m16n8k16(norms, squares, kOne, kOne);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dot[n][i] = kChains == 1 ? chains[0][n][i] : chains[0][n][i] + chains[kChains - 1][n][i];
      }
    }
    read_slots(slot0, slot1, norms, p, slots);
  }

  // The slots' constants; `norms` as the tensor core left them.
  __device__ void read_slots(uint32_t slot0, uint32_t slot1, const float (&norms)[4],
                             const RowsParams& p, Slots* slots) const {
    if constexpr (kRotatedKeys<Config::kKey>) {
      float inverse0 = ptx::rsqrt(norms[0]), inverse1 = ptx::rsqrt(norms[2]);
      if (!p.norm_correction) inverse0 = inverse1 = p.key_gain;
      const float stored0 = ptx::ld_shared_half(slot0 + Config::kNormOffset);
      const float stored1 = ptx::ld_shared_half(slot1 + Config::kNormOffset);
      // A non-finite norm word makes every reader NaN, whatever the sign of its dot product.
      slots->key_scale[0] = fmaf(stored0, 0.0f, stored0 * inverse0);
      slots->key_scale[1] = fmaf(stored1, 0.0f, stored1 * inverse1);
    } else {
      slots->key_scale[0] = slots->key_scale[1] = 1.0f;
    }
    slots->value_scale[0] = ptx::ld_shared_half(slot0 + Config::kScaleOffset);
    slots->value_scale[1] = ptx::ld_shared_half(slot1 + Config::kScaleOffset);
    slots->value_zero[0] = fmaf(slots->value_scale[0], Values::kCentre,
                                ptx::ld_shared_half(slot0 + Config::kZeroOffset));
    slots->value_zero[1] = fmaf(slots->value_scale[1], Values::kCentre,
                                ptx::ld_shared_half(slot1 + Config::kZeroOffset));
  }

  // B fragments of step k. Two steps of a single column tile share a load: `kept` holds them.
  __device__ void query_fragments(uint32_t query_shared, int k, uint32_t (&kept)[4],
                                  uint32_t (&b)[kTiles][2]) const {
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        b[n][0] = query[(k * kTiles + n) * 2];
        b[n][1] = query[(k * kTiles + n) * 2 + 1];
      }
    } else if constexpr (kTiles == 1) {
      if (k % 2 == 0) {
        ptx::ld_shared4(query_shared + k * 256, &kept[0], &kept[1], &kept[2], &kept[3]);
      }
      b[0][0] = kept[k % 2 * 2];
      b[0][1] = kept[k % 2 * 2 + 1];
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        ptx::ld_shared4(query_shared + (k * kTiles + n) * 256, &b[n][0], &b[n][1], &b[n + 1][0],
                        &b[n + 1][1]);
      }
    }
  }

  // Dot products to log2 units.
  __device__ void scale_scores(float (&x)[kTiles][4], const Slots& slots) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] *= slots.key_scale[i / 2] * factor[n][i % 2];
    }
  }

  // The same, capped; what a row does not see becomes -inf. Returns a bit a score that its row
  // sees.
  __device__ uint32_t scale_and_hide(float (&x)[kTiles][4], const Slots& slots, const RowsParams& p,
                                     bool all_visible, uint32_t ranges, int position) const {
    scale_scores(x, slots);
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p.cap > 0.0f) x[n][i] = p.cap * capped(x[n][i], p.cap_factor);
        const uint32_t row = ranges + 64 * n + 8 * (i % 2);
        const int at = position + 8 * (i / 2);
        const bool sees = all_visible || (at >= static_cast<int>(ptx::ld_shared(row)) &&
                                          at < static_cast<int>(ptx::ld_shared(row + 4)));
        visible |= (sees ? 1u : 0u) << (4 * n + i);
        if (!sees) x[n][i] = -INFINITY;
      }
    }
    return visible;
  }

  // Exponentials of the scores, zero where the row does not see the token; not masked, of dot
  // products that are yet to be scaled. Whether one of the lane's, or a value scale, is out of
  // range; a non-finite scale asks in vain, each time it comes.
  template <bool kMasked>
  __device__ bool exponentials(const float (&x)[kTiles][4], const Slots& slots, uint32_t visible,
                               float (&e)[kTiles][4]) const {
    float high = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[n][i] = ptx::ex2(
            kMasked ? x[n][i] - offset[n][i % 2]
                    : fmaf(x[n][i], slots.key_scale[i / 2] * factor[n][i % 2], -offset[n][i % 2]));
        if (kMasked && ((visible >> (4 * n + i)) & 1) == 0) e[n][i] = 0.0f;
      }
      high = fmaxf(high, fmaxf(e[n][0] + e[n][2], e[n][1] + e[n][3]));
    }
    return high > ceiling ||
           fmaxf(fabsf(slots.value_scale[0]), fabsf(slots.value_scale[1])) > limit;
  }

  // Weights (exponential times value scale) as B fragments.
  template <bool kMasked>
  __device__ void pack(const float (&e)[kTiles][4], const Slots& slots, uint32_t visible,
                       uint32_t (&weights)[kTiles][2]) const {
    const float unlimit = power_reciprocal(limit);
    const float a[2] = {slots.value_scale[0] * unlimit, slots.value_scale[1] * unlimit};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = e[n][i] * a[i / 2];
        if (kMasked && ((visible >> (4 * n + i)) & 1) == 0) w[i] = 0.0f;
      }
      weights[n][0] = ptx::transpose_8x8(ptx::cvt_half2(w[0], w[1]));
      weights[n][1] = ptx::transpose_8x8(ptx::cvt_half2(w[2], w[3]));
    }
  }

  // Row sums.
  template <bool kMasked>
  __device__ void add(const float (&e)[kTiles][4], const Slots& slots, uint32_t visible) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float zero = slots.value_zero[i / 2];
        if (kMasked && ((visible >> (4 * n + i)) & 1) == 0) zero = 0.0f;
        z[n][i % 2] = fmaf(e[n][i], zero, z[n][i % 2]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) l[n][r] += e[n][r] + e[n][r + 2];
    }
  }

  // The larger finite value scale of the lane's tokens; non-finite ones go through as they are.
  static __device__ float scale_of(const Slots& slots) {
    const float a = fabsf(slots.value_scale[0]), b = fabsf(slots.value_scale[1]);
    return fmaxf(a < INFINITY ? a : 0.0f, b < INFINITY ? b : 0.0f);
  }

  // Rare: maxima and the scale limit move to where the team's group needs them. Hidden scores are
  // -inf. `scratch` is the team's: [warp][rows] maxima and [warp] scales.
  template <class SyncTeam>
  __device__ void rescale(const float (&x)[kTiles][4], const Slots& slots, uint32_t scratch,
                          int team_warp, int g, int c, const SyncTeam& sync_team) {
    float high[kTiles][2], scale = warp_max(scale_of(slots));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) high[n][r] = column_max(fmaxf(x[n][r], x[n][r + 2]));
    }
    if constexpr (Config::kTeamWarps > 1) {
      constexpr int kStride = 4 * Config::kRows + 16;
      const uint32_t mine = scratch + kStride * team_warp;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (g == 0) ptx::st_shared_float(mine + 32 * n + 8 * c + 4 * r, high[n][r]);
        }
      }
      if (g == 0 && c == 0) ptx::st_shared_float(mine + 4 * Config::kRows, scale);
      sync_team();
#pragma unroll 1
      for (int w = 0; w < Config::kTeamWarps; ++w) {
        const uint32_t theirs = scratch + kStride * w;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            high[n][r] = fmaxf(high[n][r], ptx::ld_shared_float(theirs + 32 * n + 8 * c + 4 * r));
          }
        }
        scale = fmaxf(scale, ptx::ld_shared_float(theirs + 4 * Config::kRows));
      }
    }
    float scale_change = 1.0f;
    if (scale > limit) {
      const float next = bits_float((float_bits(scale) + 0x007fffffu) & 0x7f800000u);
      scale_change = limit * power_reciprocal(next);
      limit = next;
    }
    bool none = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float change[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        change[r] = 1.0f;
        if (high[n][r] > -INFINITY) {
          const float next = high[n][r] - kRowsWeightBits;
          if (!(next <= offset[n][r]) || offset[n][r] == INFINITY) {
            change[r] = ptx::ex2(offset[n][r] - next);
            // Nothing was added before the first maximum.
            if (offset[n][r] == INFINITY) change[r] = 0.0f;
            offset[n][r] = next;
          }
        }
        none |= offset[n][r] == INFINITY;
        l[n][r] *= change[r];
        z[n][r] *= change[r];
        change[r] *= scale_change;
      }
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
        o[m][n][0] *= change[0];
        o[m][n][1] *= change[1];
        o[m][n][2] *= change[0];
        o[m][n][3] *= change[1];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weight_sum[n][i] *= change[i % 2];
    }
    ceiling = __any_sync(~0u, none) ? -1.0f : kRowsWeightLimit;
  }

  // The lane's place in the values of a slot.
  static __device__ uint32_t value_offset(int team_warp, int g) {
    return Config::kValueOffset + Values::lane_offset(g) + team_warp * Values::kSpanBytes;
  }

  // The values of 16 tokens as read: the lane's part of the warp's dimensions.
  using FetchedValues = uint32_t[Values::kBlocks][2][Values::kPairWords];

  // `rows`: the lane's places in tokens 2c, 2c + 1, 2c + 8 and 2c + 9.
  static __device__ void fetch_values(const uint32_t (&rows)[4], int g, FetchedValues& values) {
#pragma unroll
    for (int block = 0; block < Values::kBlocks; ++block) {
      Values::fetch(rows, block, g, values[block]);
    }
  }

  // O^T += V^T P^T for 16 tokens of the team: the warp's dimensions.
  __device__ void accumulate(const FetchedValues& values, const uint32_t (&weights)[kTiles][2]) {
#pragma unroll
    for (int block = 0; block < Values::kBlocks; ++block) {
      accumulate_block(block, values[block], weights);
    }
    add_weights(weights);
  }

  // The same, of values that are read as they are needed.
  __device__ void accumulate_from(const uint32_t (&rows)[4], int g,
                                  const uint32_t (&weights)[kTiles][2]) {
#pragma unroll
    for (int block = 0; block < Values::kBlocks; ++block) {
      uint32_t values[2][Values::kPairWords];
      Values::fetch(rows, block, g, values);
      accumulate_block(block, values, weights);
    }
    add_weights(weights);
  }

  __device__ void accumulate_block(int block, const uint32_t (&values)[2][Values::kPairWords],
                                   const uint32_t (&weights)[kTiles][2]) {
    uint32_t a[Values::kBlockTiles][4];
    Values::unpack(values, a);
#pragma unroll
    for (int t = 0; t < Values::kBlockTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::mma_m16n8k16(o[block * Values::kBlockTiles + t][n], a[t], weights[n][0],
                          weights[n][1]);
      }
    }
  }

  __device__ void add_weights(const uint32_t (&weights)[kTiles][2]) {
    constexpr uint32_t kOne = half2_broadcast(0x3c00), kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      ptx::mma_m16n8k16(weight_sum[n], kOnes, weights[n][0], weights[n][1]);
    }
  }

  // Takes the middle code off what was added since the last time: called every kRowsCentreSteps
  // times 16 tokens, it keeps what the tensor core truncates as small as the values' spread.
  __device__ void centre() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          o[m][n][i] = fmaf(Values::centre(m, i / 2), weight_sum[n][i % 2], o[m][n][i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weight_sum[n][i] = 0.0f;
    }
  }

  // Accumulators to plain sums of weight * value, row sums over lanes and team.
  template <class SyncTeam>
  __device__ void finish(uint32_t scratch, int team_warp, int g, int c, const SyncTeam& sync_team) {
    centre();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        l[n][r] = column_sum(l[n][r]);
        z[n][r] = column_sum(z[n][r]);
      }
    }
    if constexpr (Config::kTeamWarps > 1) {
      sync_team();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t at = scratch + 8 * (team_warp * Config::kRows + 8 * n + 2 * c + r);
          if (g == 0) ptx::st_shared2(at, float_bits(l[n][r]), float_bits(z[n][r]));
          l[n][r] = z[n][r] = 0.0f;
        }
      }
      sync_team();
#pragma unroll 1
      for (int w = 0; w < Config::kTeamWarps; ++w) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t at = scratch + 8 * (w * Config::kRows + 8 * n + 2 * c + r);
            l[n][r] += ptx::ld_shared_float(at);
            z[n][r] += ptx::ld_shared_float(at + 4);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float low, high;
          Values::decode(m, o[m][n][r], o[m][n][r + 2], &low, &high);
          o[m][n][r] = fmaf(low, limit, z[n][r]);
          o[m][n][r + 2] = fmaf(high, limit, z[n][r]);
        }
      }
    }
    // From here on an empty state is offset -inf; a row that is NaN is not empty.
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (offset[n][r] == INFINITY) offset[n][r] = l[n][r] == 0.0f ? -INFINITY : 0.0f;
      }
    }
  }

  // After finish(): the state, lane-contiguous: offsets and sums of the lane's rows, accumulators.
  __device__ void store_state(uint32_t address) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::st_shared_float(address + 128 * (4 * n + r), offset[n][r]);
        ptx::st_shared_float(address + 128 * (4 * n + 2 + r), l[n][r]);
      }
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::st_shared_float(address + 128 * (4 * kTiles + (n * kOutTiles + m) * 4 + i),
                               o[m][n][i]);
        }
      }
    }
  }

  // Adds a stored state of the same layout to this one.
  __device__ void merge_state(uint32_t address) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float mine[2], theirs[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float other = ptx::ld_shared_float(address + 128 * (4 * n + r));
        const float high = fmaxf(offset[n][r], other);
        mine[r] = state_weight(offset[n][r], high);
        theirs[r] = state_weight(other, high);
        offset[n][r] = high;
        l[n][r] = fmaf(ptx::ld_shared_float(address + 128 * (4 * n + 2 + r)), theirs[r],
                       l[n][r] * mine[r]);
      }
#pragma unroll
      for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x =
              ptx::ld_shared_float(address + 128 * (4 * kTiles + (n * kOutTiles + m) * 4 + i));
          o[m][n][i] = fmaf(x, theirs[i % 2], o[m][n][i] * mine[i % 2]);
        }
      }
    }
  }
};

// The stored states of all teams, added in index order, to the partial state of the block, or into
// what it holds already. A warp takes (row parity, warp of the team, column tile, output tile) in
// turn.
template <class Config>
__device__ void merge_teams(const RowsMemory& memory, int teams, const RowsState& partial,
                            const RowsTile& tile, bool merge, int warp, int warps, int lane) {
  using Warp = RowsWarp<Config>;
  using Values = typename Warp::Values;
  constexpr int kTiles = Config::kTiles, kOutTiles = Warp::kOutTiles;
  constexpr int kWarpBytes = Config::kSizes.warp;
  const int g = lane >> 2, c = lane & 3;
  // Row sums first: when merging, every warp reads the old ones before one writes.
  for (int item = warp; item < 2 * Config::kTeamWarps * kTiles * kOutTiles; item += warps) {
    const int r = item % 2, m = item / 2 % kOutTiles, n = item / (2 * kOutTiles) % kTiles;
    const int team_warp = item / (2 * kOutTiles * kTiles);
    const int row = 8 * n + 2 * c + r;
    if (row >= tile.num_rows()) continue;
    const int d = team_warp * Config::kWarpDims + Values::dim(m, g);
    const auto state_of = [&](int t) {
      return memory.ring(t * Config::kTeamWarps + team_warp, kWarpBytes) + 4 * lane;
    };
    float high = merge ? partial.sums[2 * row] : -INFINITY;
#pragma unroll 4
    for (int t = 0; t < teams; ++t) {
      high = fmaxf(high, ptx::ld_shared_float(state_of(t) + 128 * (4 * n + r)));
    }
    float2* out = reinterpret_cast<float2*>(partial.out + row * Config::kHeadDim + d);
    float2 x = {0.0f, 0.0f};
    float l = 0.0f;
    if (merge) {
      const float weight = state_weight(partial.sums[2 * row], high);
      const float2 old = *out;
      x = {old.x * weight, old.y * weight};
      l = partial.sums[2 * row + 1] * weight;
    }
#pragma unroll 4
    for (int t = 0; t < teams; ++t) {
      const uint32_t at = state_of(t);
      const float weight = state_weight(ptx::ld_shared_float(at + 128 * (4 * n + r)), high);
      const uint32_t values = at + 128 * (4 * kTiles + (n * kOutTiles + m) * 4 + r);
      l = fmaf(ptx::ld_shared_float(at + 128 * (4 * n + 2 + r)), weight, l);
      x.x = fmaf(ptx::ld_shared_float(values), weight, x.x);
      x.y = fmaf(ptx::ld_shared_float(values + 256), weight, x.y);
    }
    *out = x;
    if (m == 0 && team_warp == 0 && g == 0) {
      ptx::st_shared_float(memory.sums + 8 * row, high);
      ptx::st_shared_float(memory.sums + 8 * row + 4, l);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * tile.num_rows(); i += blockDim.x) {
    partial.sums[i] = ptx::ld_shared_float(memory.sums + 4 * i);
  }
}

}  // namespace kvtile::cuda
