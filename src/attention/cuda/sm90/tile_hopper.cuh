// Dense attention over one step's tile image with wgmma, for sm_90a. A thread block walks its
// pieces (tile_plan.h): a producer warp describes them, one ahead, and keeps a ring of key and
// value planes full by bulk copies; two or three warpgroups own 64 packed rows each. A warpgroup
// issues the scores of the next key block before the product of this one's probabilities and
// values, and takes exponentials while the others' products run. Image planes are wgmma operands as
// they lie; scores, probabilities, references, spans and non-finite values are as in sm80/tile.cuh.
#pragma once

#include <cuda_runtime.h>

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/sm80/tile_params.h"
#include "src/attention/cuda/sm80/tile_state.cuh"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"
#include "src/core/wgmma.cuh"

namespace kvtile::cuda {

// Warpgroups that attend; the producer's follows.
constexpr int hopper_warpgroups(int head_dim) { return hopper_shape(head_dim).rows / 64; }
constexpr int hopper_threads(int head_dim) { return 128 * (hopper_warpgroups(head_dim) + 1); }
// Whether the scores of the next block are issued before the product of this one, so that one's
// exponentials run under the other. Otherwise a warpgroup issues a block's products one after the
// other and leaves it to the other two to fill the gaps: then the probabilities take the registers
// of the scores, and three warpgroups have room for 128 keys beside 128 dimensions.
constexpr bool hopper_scores_ahead(int head_dim) { return head_dim != 128; }
// Registers of a lane that attends, and of one that does not: together those of the launch.
constexpr int hopper_registers(int head_dim) {
  return hopper_warpgroups(head_dim) == 3 ? 160 : 224;
}
constexpr int hopper_producer_registers(int head_dim) {
  const int warpgroups = hopper_warpgroups(head_dim);
  return (warpgroups == 3 ? 4 * 128 : 3 * 168) - warpgroups * hopper_registers(head_dim);
}
inline constexpr int kHopperPieces = 2;  // descriptions in shared memory: in use, and the next
inline constexpr int kMaxPlanes = 16;

// What the producer tells the warpgroups about a piece.
struct HopperPiece {
  SequenceInfo sequence;
  BlockWalk walk;
  int local;      // row block within the group; negative: no piece is left
  int first_row;  // of the sequence's packed rows
  int slot;
  int index;        // of the context in the launch group
  int first_block;  // of the tile
  bool lossy;       // a key block of the tile has non-finite values
};

struct HopperShared {
  uint64_t full[kMaxPlanes], empty[kMaxPlanes];
  uint64_t described[kHopperPieces], done[kHopperPieces];
  HopperPiece pieces[kHopperPieces];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A place in a ring of `kSize`, and the parity of its phase.
template <int kSize>
struct RingPlace {
  int at = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      parity ^= 1;
    }
  }
};

// The producer's part of a thread block's walk: one warp.
template <int kHeadDim, int kPlanes>
struct HopperProducer {
  static constexpr int kRows = hopper_shape(kHeadDim).rows;
  static constexpr int kTokens = hopper_shape(kHeadDim).block_tokens;
  static constexpr int kPlaneBytes = plane_bytes(kTokens, kHeadDim);

  const TileParams& params;
  const TileStep& at;
  HopperShared& shared;
  uint32_t planes;

  __device__ __forceinline__ void run() {
    const TilePlan& plan = params.plan;
    const SequenceInfo* sequences = params.sequences();
    const int lane = threadIdx.x % 32;
    const GroupRows group = group_rows(plan, sequences, at.context_group, at.row_chunk);
    const int num_row_blocks = group.end - group.begin;
    int64_t unit = lane_begin(plan, num_row_blocks, blockIdx.x);
    const int64_t end_unit = lane_begin(plan, num_row_blocks, blockIdx.x + 1);
    RingPlace<kPlanes> place;
    RingPlace<kHopperPieces> next;
    for (;; next.advance()) {
      HopperPiece& piece = shared.pieces[next.at];
      ptx::mbarrier_wait(ptx::shared_address(&shared.done[next.at]), next.parity ^ 1);
      const int local = unit < end_unit ? static_cast<int>(unit / plan.period_blocks()) : -1;
      if (local < 0) {
        if (lane == 0) {
          piece.local = -1;
          ptx::mbarrier_arrive(ptx::shared_address(&shared.described[next.at]));
        }
        return;
      }
      const int64_t context = context_of_row_block(plan, sequences, group, group.begin + local);
      const int index = static_cast<int>(context - group.first_context);
      const ContextView view = params.views()[index];
      const SequenceInfo sequence = sequences[view.seq];
      const StepRange range = step_range(plan, view, at.step);
      const int first_block = range.begin / kTokens;
      const int first_row =
          (group.begin + local - row_blocks_before(plan, sequences, context)) * kRows;
      BlockWalk walk;
      walk.period = plan.period_blocks();
      walk.first = static_cast<int>(unit % plan.period_blocks());
      walk.run = static_cast<int>(
          min(static_cast<int64_t>(plan.period_blocks() - walk.first), end_unit - unit));
      unit += walk.run;
      const KeyRange keys = rows_range(params.mask, sequence, plan.group, first_row, kRows);
      walk.set(max(static_cast<int>(keys.begin) / kTokens, first_block),
               min((static_cast<int>(keys.end) + kTokens - 1) / kTokens,
                   (range.end + kTokens - 1) / kTokens));
      const uint8_t* flags = params.flags(at.buffer, index);
      bool lossy = false;
      for (int b = lane; b < (range.end - range.begin + kFillTokens - 1) / kFillTokens; b += 32) {
        lossy |= flags[b] != 0;
      }
      lossy = __any_sync(0xffffffffu, lossy);
      if (lane == 0) {
        piece.sequence = sequence;
        piece.walk = walk;
        piece.local = local;
        piece.first_row = first_row;
        piece.slot = static_cast<int>(blockIdx.x) + local;
        piece.index = index;
        piece.first_block = first_block;
        piece.lossy = lossy;
        ptx::mbarrier_arrive(ptx::shared_address(&shared.described[next.at]));
        if (walk.count > 0) {
          fill(walk,
               params.image(at.buffer, index) - first_block * subtile_bytes(kTokens, kHeadDim),
               &place);
        }
      }
      __syncwarp();
    }
  }

  // In the order the warpgroups use them: keys of block k, and values of block k, or of k - 1 where
  // scores go ahead.
  __device__ __forceinline__ void fill(const BlockWalk& walk, const std::byte* image,
                                       RingPlace<kPlanes>* place) {
    const auto copy = [&](const std::byte* plane) {
      const uint32_t full = ptx::shared_address(&shared.full[place->at]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place->at]), place->parity ^ 1);
      ptx::mbarrier_arrive_expect(full, kPlaneBytes);
      ptx::bulk_copy(planes + place->at * kPlaneBytes, plane, kPlaneBytes, full);
      place->advance();
    };
    constexpr int kBehind = hopper_scores_ahead(kHeadDim) ? 1 : 0;
    int block = walk.block(0);
    const std::byte* values = nullptr;
#pragma unroll 1
    for (int k = 0; k < walk.count; ++k) {
      const std::byte* keys = image + block * subtile_bytes(kTokens, kHeadDim);
      copy(keys);
      if (k >= kBehind) copy(kBehind == 0 ? keys + kPlaneBytes : values);
      values = keys + kPlaneBytes;
      block = walk.after(block);
    }
    if (kBehind == 1) copy(values);
  }
};

// Not kept in a register.
__device__ __forceinline__ int thread() { return ptx::thread_index(); }

// Lane 0's, in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Named barriers: 1 to 3, the warpgroups' turns at issuing products; 4 to 6, each one's own.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  ptx::named_barrier_sync(4 + warpgroup, 128);
}
__device__ __forceinline__ void wait_turn(int warpgroup) {
  ptx::named_barrier_sync(1 + warpgroup, 256);
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  ptx::named_barrier_arrive(1 + warpgroup, 256);
}

template <int kHeadDim, int kPlanes>
struct HopperConsumer {
  static constexpr int kTokens = hopper_shape(kHeadDim).block_tokens;
  static constexpr int kPlaneBytes = plane_bytes(kTokens, kHeadDim);
  static constexpr int kSteps = kHeadDim / 16;  // k16 steps of a score
  static constexpr int kSpanBlocks = hopper_shape(kHeadDim).span_tokens / kTokens;
  static constexpr int kWarpgroups = hopper_warpgroups(kHeadDim);
  static constexpr int kPart = kTokens / 16 / 4;  // k16 steps that follow their exponentials
  using Scores = float[kTokens / 8][4];

  const TileParams& params;
  HopperShared& shared;
  int warpgroup;
  uint32_t queries;  // of the warpgroup, 64 rows chunk-major
  uint32_t planes;
  RingPlace<kPlanes> place;  // of the next plane

  using Place = RingPlace<kPlanes>;

  __device__ __forceinline__ void wait_plane(const Place& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.at]), at.parity);
  }
  __device__ __forceinline__ void leave_plane(const Place& at) const {
    if (ptx::thread_index() % 32 == 0)
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[at.at]));
  }

  __device__ __forceinline__ void issue_scores(Scores& s, const Place& at) const {
    const uint64_t a = ptx::matrix_descriptor(ptx::hidden(queries), key_operand(64));
    const uint64_t b = ptx::matrix_descriptor(planes + at.at * kPlaneBytes, key_operand(kTokens));
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      ptx::wgmma_ss<0>(s, ptx::advance(a, chunk_offset(2 * kk, 0, 64)),
                       ptx::advance(b, chunk_offset(2 * kk, 0, kTokens)), kk > 0);
    }
    ptx::wgmma_commit();
  }

  // Of the block's k16 steps [begin, end).
  __device__ __forceinline__ void issue_values(float (&o)[kHeadDim / 8][4],
                                               const uint32_t (&p)[kTokens / 16][4],
                                               const Place& at, int begin = 0,
                                               int end = kTokens / 16) const {
    const uint64_t b = ptx::matrix_descriptor(planes + at.at * kPlaneBytes, value_operand(kTokens));
#pragma unroll
    for (int kk = begin; kk < end; ++kk) {
      ptx::wgmma_rs<1>(o, p[kk], ptx::advance(b, chunk_offset(0, 16 * kk, kTokens)), true);
    }
    ptx::wgmma_commit();
  }

  // The piece's queries from mma fragments to shared memory, where wgmma wants core matrices.
  __device__ __forceinline__ void load_queries(int local) const {
    const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
    const uint4* fragment = params.query(local) + warp * kSteps * 32 + lane;
    const uint32_t own = queries + chunk_offset(0, warp % 4 * 16 + lane / 4, 64) + lane % 4 * 4;
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      const uint4 word = __ldcg(fragment + kk * 32);
      ptx::st_shared(own + chunk_offset(2 * kk, 0, 64), word.x);
      ptx::st_shared(own + chunk_offset(2 * kk, 8, 64), word.y);
      ptx::st_shared(own + chunk_offset(2 * kk + 1, 0, 64), word.z);
      ptx::st_shared(own + chunk_offset(2 * kk + 1, 8, 64), word.w);
    }
    ptx::fence_proxy_async();
  }

  // Keys that a row of the warp sees.
  __device__ __forceinline__ int2 keys_of(const HopperPiece& piece, int row) const {
    const int packed_row = piece.first_row + ptx::thread_index() / 32 * 16 + row;
    KeyRange keys;
    if (packed_row < piece.sequence.q_len * params.plan.group) {
      keys = row_range(params.mask, piece.sequence, packed_row / params.plan.group);
    }
    return make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
  }

  // Keys that all of the warp's live rows see, the same in every lane. Both ends grow.
  __device__ __forceinline__ int2 common_keys(const HopperPiece& piece) const {
    const int first_row = piece.first_row + ptx::thread_index() / 32 * 16;
    const int num_live = min(piece.sequence.q_len * params.plan.group - first_row, 16);
    int2 common = make_int2(0, 0x7fffffff);
    if (num_live > 0) {
      common.x = keys_of(piece, num_live - 1).x;
      common.y = keys_of(piece, 0).y;
    }
    return make_int2(uniform(common.x), uniform(common.y));
  }

  __device__ __forceinline__ void attend(const HopperPiece& piece, const TileStep& at) {
    const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
    if (piece.walk.count <= 0) {
      if (at.step == 0 && lane < 16) {
        params.softmax(piece.slot)[warp * 16 + lane] = make_float2(negative_infinity(), 0.0f);
      }
      return;
    }
    sync_warpgroup(warpgroup);  // the piece before is read no more
    load_queries(piece.local);
    sync_warpgroup(warpgroup);

    const int2 common = common_keys(piece);  // blocks within need no mask
    float factor[2], m[1][2], l[1][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + r * 8 + lane / 4;
      factor[r] = __ldcg(params.row_scale(piece.local) + row);
      m[0][r] = at.step == 0 ? negative_infinity() : __ldcg(params.softmax(piece.slot) + row).x;
      l[0][r] = 0.0f;
    }
    float o[1][kHeadDim / 8][4];
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][j][e] = 0.0f;
    }
    bool moved = false;  // a reference, since the carried state was written
    bool carried = at.step > 0;
    Scores s;
    uint32_t p[kTokens / 16][4];

    // Sets the references of a block's rows. Scores times `by` are in log2 units then; `o` times
    // alpha is relative to the references.
    const auto refer = [&](int block, float(&by)[2], float(&alpha)[2]) {
      const int first_key = block * kTokens;
      by[0] = factor[0];
      by[1] = factor[1];
      if (params.softcap_log2 > 0.0f) {
        // cap * tanh(score / cap): the factor is 2 log2(e) / cap times the score's own.
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float t = ptx::rcp(ptx::ex2(s[n][e] * by[e / 2]) + 1.0f);
            s[n][e] = fmaf(-2.0f * params.softcap_log2, t, params.softcap_log2);
          }
        }
        by[0] = by[1] = 1.0f;
      }
      if (first_key < common.x || first_key + kTokens > common.y) {
        const int lane = ptx::thread_index() % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int2 keys = keys_of(piece, r * 8 + lane / 4);
          const int key = first_key + lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int position = key + 8 * n + e;
              if (position < keys.x || position >= keys.y) s[n][2 * r + e] = negative_infinity();
            }
          }
        }
      }
      float top[2];
      bool grows = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest[2] = {s[0][2 * r], s[1][2 * r]};
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
          largest[n % 2] = fmaxf(largest[n % 2], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        top[r] = fmaxf(largest[0], largest[1]);
        grows |= fmaf(top[r], by[r], -m[0][r]) > kLazyGrowth;
      }
      alpha[0] = alpha[1] = 1.0f;
      const bool moves = __any_sync(0xffffffffu, grows);
      if (moves) {
        moved = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float largest = top[r];
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
          if (fmaf(largest, by[r], -m[0][r]) > kLazyGrowth) {
            const float reference = largest * by[r];
            alpha[r] = m[0][r] == negative_infinity() ? 0.0f : ptx::ex2(m[0][r] - reference);
            m[0][r] = reference;
            l[0][r] *= alpha[r];
          }
        }
      }
      return moves;
    };
    // Scores of k16 steps [begin, end) to probabilities, in place.
    const auto exponentiate = [&](const float(&by)[2], int begin, int end) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float bias = static_cast<float>(kProbabilityExponent) -
                           (m[0][r] == negative_infinity() ? 0.0f : m[0][r]);
        float sum[2] = {};
#pragma unroll
        for (int n = 2 * begin; n < 2 * end; ++n) {
          s[n][2 * r] = ptx::ex2(fmaf(s[n][2 * r], by[r], bias));
          s[n][2 * r + 1] = ptx::ex2(fmaf(s[n][2 * r + 1], by[r], bias));
          sum[n % 2] += s[n][2 * r] + s[n][2 * r + 1];
        }
        l[0][r] += sum[0] + sum[1];
      }
    };
    const auto round = [&](int begin, int end) {
#pragma unroll
      for (int n = 2 * begin; n < 2 * end; ++n) {
        p[n / 2][n % 2 * 2] = ptx::cvt_half2(s[n][0], s[n][1]);
        p[n / 2][n % 2 * 2 + 1] = ptx::cvt_half2(s[n][2], s[n][3]);
      }
    };
    const auto rescale = [&](const float(&alpha)[2]) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[0][j][e] *= alpha[e / 2];
      }
    };
    const auto flush = [&] {
      // Addresses are made here, not kept for the loop.
      const int slot = static_cast<int>(ptx::hidden(piece.slot));
      flush_span<kHeadDim, 1>(o, l, m, params.carry(slot), params.softmax(slot), carried, moved);
      moved = false;
      carried = true;
    };

    int block = uniform(piece.walk.block(0));
    const int run = uniform(piece.walk.run), run_end = uniform(piece.walk.first) + run;
    int left = uniform(piece.walk.count);
    // To the next block of the walk; true if it lies in another span.
    const auto advance_block = [&] {
      const bool wraps = ((++block - run_end) & (kSpanBlocks - 1)) == 0;
      if (wraps) block += kSpanBlocks - run;
      return wraps;
    };
    float by[2], alpha[2];
    if constexpr (hopper_scores_ahead(kHeadDim)) {
      // The next two planes, where there are two: keys, and the values of the block before.
      const auto wait_planes = [&] {
        if (left == 1) return;
        Place next = place;
        wait_plane(next);
        next.advance();
        wait_plane(next);
      };
      wait_plane(place);
      ptx::wgmma_fence();
      issue_scores(s, place);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      leave_plane(place);
      place.advance();
      refer(block, by, alpha);
      exponentiate(by, 0, kTokens / 16);
      round(0, kTokens / 16);
      wait_planes();
      while (--left > 0) {
        const bool wraps = advance_block();
        const Place keys = place;
        place.advance();
        const Place values = place;
        place.advance();
        wait_turn(warpgroup);
        ptx::pin(s);
        ptx::pin(p);
        ptx::pin(o[0]);
        ptx::wgmma_fence();
        issue_scores(s, keys);
        issue_values(o[0], p, values);
        give_turn(warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1);
        wait_planes();
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        leave_plane(keys);
        if (wraps) {
          ptx::wgmma_wait<0>();
          ptx::pin(o[0]);
          flush();
        }
        const bool moves = refer(block, by, alpha);
        exponentiate(by, 0, kTokens / 16);
        ptx::wgmma_wait<0>();
        ptx::pin(o[0]);
        leave_plane(values);
        if (moves) rescale(alpha);
        round(0, kTokens / 16);
      }
      wait_plane(place);
      ptx::pin(p);
      ptx::pin(o[0]);
      ptx::wgmma_fence();
      issue_values(o[0], p, place);
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      leave_plane(place);
      place.advance();
    } else {
      for (;;) {
        wait_plane(place);
        // Overwritten: until here the probabilities may take these registers.
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
        }
        ptx::wgmma_fence();
        issue_scores(s, place);
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        leave_plane(place);
        place.advance();
        if (refer(block, by, alpha)) rescale(alpha);
        wait_plane(place);
        ptx::pin(o[0]);
#pragma unroll
        for (int part = 0; part < kTokens / 16; part += kPart) {
          exponentiate(by, part, part + kPart);
          round(part, part + kPart);
#pragma unroll
          for (int kk = part; kk < part + kPart; ++kk) ptx::pin(p[kk]);
          ptx::wgmma_fence();
          issue_values(o[0], p, place, part, part + kPart);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(o[0]);
        leave_plane(place);
        place.advance();
        if (--left == 0) break;
        if (advance_block()) flush();
      }
    }
    flush();
    if (piece.lossy) lose_non_finite(piece, at.buffer);
  }

  // Rows that see a non-finite value element are lost in its dimension: NaN in the carried state
  // stays NaN. The image holds 0 in its place and lost_tokens names it.
  __device__ __forceinline__ void lose_non_finite(const HopperPiece& piece, int buffer) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint8_t* flags = params.flags(buffer, piece.index);
    const uint64_t* lost_tokens = params.lost_tokens(buffer, piece.index);
    float4* carry = params.carry(piece.slot) + warp * (kHeadDim / 8) * 32 + lane;
    constexpr int kFills = kTokens / kFillTokens;
#pragma unroll 1
    for (int k = 0; k < kFills * piece.walk.count; ++k) {
      const int block = piece.walk.block(k / kFills);
      const int fill = (block - piece.first_block) * kFills + k % kFills;
      if (flags[fill] == 0) continue;
      const uint64_t* lost = lost_tokens + static_cast<int64_t>(fill) * kHeadDim + lane % 4 * 2;
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        const uint64_t tokens = seen_tokens(keys_of(piece, r * 8 + lane / 4),
                                            block * kTokens + k % kFills * kFillTokens);
#pragma unroll 1
        for (int d = 0; d < kHeadDim; d += 8) {
          float* pair = reinterpret_cast<float*>(carry + d / 8 * 32) + 2 * r;
          if ((lost[d] & tokens) != 0) pair[0] = __int_as_float(0x7fffffff);
          if ((lost[d + 1] & tokens) != 0) pair[1] = __int_as_float(0x7fffffff);
        }
      }
    }
  }
};

#endif  // sm_90a

template <int kHeadDim, int kPlanes>
__global__ void __launch_bounds__(hopper_threads(kHeadDim), 1)
    hopper_attention_kernel(const __grid_constant__ TileParams params,
                            const __grid_constant__ TileStep at) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Producer = HopperProducer<kHeadDim, kPlanes>;
  // Queries of the warpgroups, then the ring of planes.
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) std::byte shared_bytes[sizeof(HopperShared)];
  HopperShared& shared = *reinterpret_cast<HopperShared*>(shared_bytes);
  constexpr int kWarpgroups = hopper_warpgroups(kHeadDim), kWarps = 4 * kWarpgroups;
  constexpr int kQueryBytes = plane_bytes(64, kHeadDim);
  const uint32_t queries = ptx::shared_address(dynamic);
  const uint32_t planes = queries + kWarpgroups * kQueryBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPlanes; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), kWarps);
    }
    for (int i = 0; i < kHopperPieces; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.described[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.done[i]), 32 * kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // The step's tile and the states of the step before. Whoever waits here no longer needs the other
  // buffer, so the next step's dequantisation may begin.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  const int warp = threadIdx.x / 32;
  if (warp >= kWarps) {
    ptx::give_registers<hopper_producer_registers(kHeadDim)>();
    if (warp == kWarps) Producer{params, at, shared, planes}.run();
  } else {
    ptx::take_registers<hopper_registers(kHeadDim)>();
    const int warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);  // the same, in uniform registers
    HopperConsumer<kHeadDim, kPlanes> consumer{params, shared, warpgroup,
                                               queries + warpgroup * kQueryBytes, planes};
    constexpr bool kTurns = hopper_scores_ahead(kHeadDim);
    if (kTurns && warpgroup == kWarpgroups - 1) give_turn(0);
    for (RingPlace<kHopperPieces> next;; next.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.described[next.at]), next.parity);
      const HopperPiece& piece = shared.pieces[next.at];
      if (piece.local < 0) break;
      consumer.attend(piece, at);
      // Every lane for what it read: racecheck does not take one for all after __syncwarp().
      ptx::mbarrier_arrive(ptx::shared_address(&shared.done[next.at]));
    }
    if (kTurns && warpgroup == 0) wait_turn(0);
  }
#endif
}

}  // namespace kvtile::cuda
