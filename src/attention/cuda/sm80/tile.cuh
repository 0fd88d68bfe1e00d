// Dense attention over one step's tile image: mma.sync, fp16 operands, fp32 accumulation, for
// sm_80 and later. A thread block walks its pieces (tile_plan.h); eight warps own 16 or 32 packed
// rows each and drift apart freely: key and value sub-tiles arrive in a ring of stages, and the
// last warp to leave a stage refills it, so nobody waits for the slowest. Scores are in log2 units;
// probabilities are held times 2^kProbabilityExponent, and a row's reference only moves when its
// maximum grew by more than 3, which keeps them below 2^15. Accumulators are fresh at every
// span and are added to the carried fp32 state.
#pragma once

#include <cuda_runtime.h>

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/sm80/tile_params.h"
#include "src/attention/cuda/sm80/tile_state.cuh"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

inline constexpr int kTileWarps = 8;
inline constexpr int kTileThreads = 32 * kTileWarps;
inline constexpr int kBlockTokens = portable_shape(128).block_tokens;
inline constexpr int kSpanBlocks = portable_shape(128).span_tokens / kBlockTokens;
inline constexpr int kMaxStages = 16;

// Measured choices (docs/kernels/tile.md). k16 steps of probabilities that are ready before a turn
// begins; the others are computed while the first ones multiply. And the k16 step of the scores at
// which a warp lets the other one of its scheduler begin: the end of a turn leaves gaps.
KVTILE_HD constexpr int tile_held_steps(int head_dim) { return head_dim == 256 ? 1 : 4; }
KVTILE_HD constexpr int tile_hand_over_step(int head_dim) {
  return head_dim == 256 ? 12 : head_dim / 32;
}

// What the warps share. The piece's description lives here rather than in registers, which are all
// taken: it is read where it is needed, once a key block at most.
template <int kRows>
struct TileShared {
  uint64_t full[kMaxStages];
  uint32_t left[kMaxStages];     // warps that left the stage so far
  int2 warp_keys[kTileWarps];    // keys any row of a warp sees
  int2 common_keys[kTileWarps];  // keys all its live rows see
  int2 row_keys[kRows];          // keys [x, y) each packed row sees
  float row_scale[kRows];        // factor from a row's raw scores to log2 units
  BlockWalk walk;
  const std::byte* image;       // of the context
  const uint8_t* flags;         // of each key block of the tile: has non-finite values
  const uint64_t* lost_tokens;  // [key block][dimension]; see lose_non_finite()
  bool lossy;                   // any flag of the tile is set
  float4* carry;
  float2* softmax;
  int first_block, end_block;  // of the tile
  GroupRows group;
  SequenceInfo sequence;
  int64_t unit, end_unit;   // of this thread block's part of the group: see lane_begin()
  int local;                // row block within the group; negative: no piece is left
  int first_row, num_rows;  // packed rows of the sequence: first of the row block, all
};

// Describes the next piece, all but walk's range: one thread.
template <int kRows>
__device__ __forceinline__ void start_piece(const TileParams& params, const TileStep& at,
                                            TileShared<kRows>* shared) {
  const TilePlan& plan = params.plan;
  const SequenceInfo* sequences = params.sequences();
  shared->local = -1;
  if (shared->unit >= shared->end_unit) return;
  const int local = static_cast<int>(shared->unit / kSpanBlocks);
  const int first = static_cast<int>(shared->unit % kSpanBlocks);
  const int run = static_cast<int>(
      min(static_cast<int64_t>(kSpanBlocks - first), shared->end_unit - shared->unit));
  shared->unit += run;
  const GroupRows group = shared->group;
  const int64_t context = context_of_row_block(plan, sequences, group, group.begin + local);
  const int index = static_cast<int>(context - group.first_context);
  const ContextView view = params.views()[index];
  const int slot = static_cast<int>(blockIdx.x) + local;
  shared->local = local;
  shared->sequence = sequences[view.seq];
  shared->first_row = (group.begin + local - row_blocks_before(plan, sequences, context)) * kRows;
  shared->num_rows = shared->sequence.q_len * plan.group;
  shared->walk.period = kSpanBlocks;
  shared->walk.first = first;
  shared->walk.run = run;
  const StepRange range = step_range(plan, view, at.step);
  shared->first_block = range.begin / kBlockTokens;
  shared->end_block = (range.end + kBlockTokens - 1) / kBlockTokens;
  shared->image = params.image(at.buffer, index);
  shared->flags = params.flags(at.buffer, index);
  shared->lost_tokens = params.lost_tokens(at.buffer, index);
  shared->carry = params.carry(slot);
  shared->softmax = params.softmax(slot);
}

// Copies planes into a stage and completes `full`; called by one converged warp. A null plane is
// left out.
__device__ __forceinline__ void fill_stage(uint32_t stage, const std::byte* value,
                                           const std::byte* key, int plane, uint32_t full) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive_expect(full,
                                (value != nullptr ? plane : 0) + (key != nullptr ? plane : 0));
    if (value != nullptr) ptx::bulk_copy(stage, value, plane, full);
    if (key != nullptr) ptx::bulk_copy(stage + plane, key, plane, full);
  }
#else
  for (int at = (threadIdx.x % 32) * kChunkBytes; at < plane; at += 32 * kChunkBytes) {
    if (value != nullptr) ptx::cp_async<16>(stage + at, value + at);
    if (key != nullptr) ptx::cp_async<16>(stage + plane + at, key + at);
  }
  ptx::cp_async_mbarrier_arrive(full);
#endif
}

__device__ __forceinline__ int full_arrivals() {
#if __CUDA_ARCH__ >= 900
  return 1;
#else
  return 32;
#endif
}

// 0, by a path the compiler cannot see through: probabilities have clear sign bits. What depends on
// the result cannot be scheduled before every one of them is computed.
template <int kHeld, int kRowTiles, int kSteps>
__device__ __forceinline__ int after_all(const uint32_t (&p)[kRowTiles][kSteps][4]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int kk = 0; kk < kHeld; ++kk) {
#pragma unroll
      for (int e = 0; e < 4; ++e) any |= p[i][kk][e];
    }
  }
  return static_cast<int>(any >> 31);
}

// Rows that see a non-finite value element are lost in its dimension. The image holds 0 in its
// place (hidden elements must not reach a row as 0 * inf) and lost_tokens[d] names its token.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void lose_non_finite(float (&o)[kRowTiles][kHeadDim / 8][4],
                                                const uint64_t* lost_tokens, const int2* warp_keys,
                                                int first_key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint64_t tokens = seen_tokens(warp_keys[i * 16 + r * 8 + lane / 4], first_key);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((lost_tokens[8 * j + lane % 4 * 2 + e] & tokens) != 0) {
            o[i][j][2 * r + e] = __int_as_float(0x7fffffff);
          }
        }
      }
    }
  }
}

// kSharedSteps: k16 steps whose query fragments wait in shared memory (each lane reads back its own
// 16 bytes) because the registers are full.
template <int kHeadDim, int kRowTiles, int kSharedSteps>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_attention_kernel(const __grid_constant__ TileParams params,
                          const __grid_constant__ TileStep at, int num_stages) {
  constexpr int kRows = 16 * kTileWarps * kRowTiles;
  constexpr int kPlaneBytes = plane_bytes(kBlockTokens, kHeadDim);
  constexpr int kStageBytes = 2 * kPlaneBytes;
  constexpr int kChunks = kHeadDim / kChunkDims;
  constexpr int kSteps = kHeadDim / 16;  // k16 steps of a score
  // Query fragments [warp][row tile][k16 step][lane], then the ring of stages.
  extern __shared__ __align__(128) std::byte query_bytes[];
  constexpr int kQueryBytes = kTileWarps * kRowTiles * kSharedSteps * 32 * kChunkBytes;
  __shared__ __align__(16) std::byte shared_bytes[sizeof(TileShared<kRows>)];
  TileShared<kRows>& shared = *reinterpret_cast<TileShared<kRows>*>(shared_bytes);

  const TilePlan& plan = params.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t stages = ptx::shared_address(query_bytes) + kQueryBytes;
  const uint32_t full = ptx::shared_address(shared.full);
  if (threadIdx.x < num_stages) {
    ptx::mbarrier_init(full + 8 * threadIdx.x, full_arrivals());
    shared.left[threadIdx.x] = 0;
  }
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) ptx::fence_mbarrier_init();
#endif
  if (threadIdx.x == 0) {
    shared.group = group_rows(plan, params.sequences(), at.context_group, at.row_chunk);
    const int num_row_blocks = shared.group.end - shared.group.begin;
    shared.unit = lane_begin(plan, num_row_blocks, blockIdx.x);
    shared.end_unit = lane_begin(plan, num_row_blocks, blockIdx.x + 1);
  }

  // ldmatrix row addresses inside a stage: keys row-major (two 8-key groups x two chunks), values
  // transposed (two 8-key groups x two chunks).
  const uint32_t key_lane = chunk_offset((lane / 8) % 2, lane / 16 * 8 + lane % 8, kBlockTokens);
  const uint32_t value_lane = chunk_offset(lane / 16, (lane / 8) % 2 * 8 + lane % 8, kBlockTokens);

  int stage = 0, parity = 0;  // of the next sub-tile to consume
#if __CUDA_ARCH__ >= 900
  // The step's tile and the states of the step before. Whoever waits here no longer needs the other
  // buffer, so the next step's dequantisation may begin.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
#endif

  for (;;) {
    __syncthreads();  // every warp has left the previous piece
    if (threadIdx.x == 0) start_piece(params, at, &shared);
    __syncthreads();
    if (shared.local < 0) break;
    for (int row = threadIdx.x; row < kRows; row += kTileThreads) {
      KeyRange keys;
      if (shared.first_row + row < shared.num_rows) {
        keys = row_range(params.mask, shared.sequence, (shared.first_row + row) / plan.group);
      }
      shared.row_scale[row] = params.row_scale(shared.local)[row];
      shared.row_keys[row] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
    }
    __syncthreads();

    if (lane < 16 * kRowTiles) {
      const int2 keys = shared.row_keys[warp * 16 * kRowTiles + lane];
      const bool live = keys.x < keys.y;
      // Rows past the sequence are computed and never written: they need no mask.
      const bool junk = shared.first_row + warp * 16 * kRowTiles + lane >= shared.num_rows;
      const unsigned mask = kRowTiles == 2 ? 0xffffffffu : 0xffffu;
      int2 range, common;
      range.x = __reduce_min_sync(mask, live ? keys.x : 0x7fffffff);
      range.y = __reduce_max_sync(mask, live ? keys.y : 0);
      common.x = __reduce_max_sync(mask, keys.x);
      common.y = __reduce_min_sync(mask, junk ? 0x7fffffff : keys.y);
      if (lane == 0) {
        shared.warp_keys[warp] = range;
        shared.common_keys[warp] = common;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int begin = 0x7fffffff, end = 0;
      for (int w = 0; w < kTileWarps; ++w) {
        begin = min(begin, shared.warp_keys[w].x);
        end = max(end, shared.warp_keys[w].y);
      }
      shared.walk.set(max(begin / kBlockTokens, shared.first_block),
                      min((end + kBlockTokens - 1) / kBlockTokens, shared.end_block));
    }
    __syncthreads();
    int flagged = 0;
    for (int b = threadIdx.x; b < shared.end_block - shared.first_block; b += kTileThreads) {
      flagged |= shared.flags[b];
    }
    flagged = __syncthreads_or(flagged);
    if (threadIdx.x == 0) shared.lossy = flagged != 0;
    if (shared.walk.count <= 0) {
      if (at.step == 0) {
        for (int row = threadIdx.x; row < kRows; row += kTileThreads) {
          shared.softmax[row] = make_float2(negative_infinity(), 0.0f);
        }
      }
      continue;
    }

    // Item n of the piece's ring: the values of its key block n - 1 and the keys of key block n,
    // which a warp multiplies in one turn.
    const auto fill = [&](int item, int into) {
      const std::byte *value = nullptr, *key = nullptr;
      if (item > 0) {
        value = shared.image +
                static_cast<int64_t>(shared.walk.block(item - 1) - shared.first_block) *
                    (2 * kPlaneBytes) +
                kPlaneBytes;
      }
      if (item < shared.walk.count) {
        key = shared.image + static_cast<int64_t>(shared.walk.block(item) - shared.first_block) *
                                 (2 * kPlaneBytes);
      }
      fill_stage(stages + into * kStageBytes, value, key, kPlaneBytes, full + 8 * into);
    };
    if (warp == 0) {
      int into = stage;
      for (int item = 0; item < min(shared.walk.count + 1, num_stages); ++item) {
        fill(item, into);
        into = into + 1 == num_stages ? 0 : into + 1;
      }
    }
    // The last of the warps to leave a stage refills it.
    const auto leave_stage = [&](int item) {
      uint32_t left = 0;
      __syncwarp();
      if (lane == 0) {
        left = ptx::shared_increment(ptx::shared_address(&shared.left[stage]), kTileWarps - 1);
      }
#if __CUDA_ARCH__ < 900
      left = __shfl_sync(0xffffffffu, left, 0);
#endif
      if (left == kTileWarps - 1 && item + num_stages <= shared.walk.count) {
        fill(item + num_stages, stage);
      }
      if (++stage == num_stages) {
        stage = 0;
        parity ^= 1;
      }
    };

    uint4* own_query =
        reinterpret_cast<uint4*>(query_bytes) + warp * kRowTiles * kSharedSteps * 32 + lane;
    uint32_t q[kRowTiles][kSteps - kSharedSteps + (kSharedSteps == kSteps)][4];
    float m[kRowTiles][2], l[kRowTiles][2];
    bool moved = false;  // a reference, since the carried state was written
    float o[kRowTiles][kHeadDim / 8][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint4* fragment =
          params.query(shared.local) + ((warp * kRowTiles + i) * kSteps) * 32 + lane;
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        const uint4 word = fragment[kk * 32];
        if (kk < kSharedSteps) {
          own_query[(i * kSharedSteps + kk) * 32] = word;
        } else {
          q[i][kk - kSharedSteps][0] = word.x;
          q[i][kk - kSharedSteps][1] = word.y;
          q[i][kk - kSharedSteps][2] = word.z;
          q[i][kk - kSharedSteps][3] = word.w;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = (warp * kRowTiles + i) * 16 + r * 8 + lane / 4;
        m[i][r] = at.step == 0 ? negative_infinity() : shared.softmax[row].x;
        l[i][r] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][j][e] = 0.0f;
      }
    }
    // The two warps of a scheduler take turns with the tensor cores: while one multiplies, the
    // other takes exponentials. The first of them goes first.
    const int own_turn = 1 + warp % 4 * 2 + warp / 4, other_turn = 1 + warp % 4 * 2 + 1 - warp / 4;
    if (warp >= 4) ptx::named_barrier_arrive(other_turn, 64);

    // Scores of the key sub-tile at the head of the ring.
    float s[kRowTiles][kBlockTokens / 8][4];
    const auto score = [&](uint32_t keys, bool hand_over) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kBlockTokens / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][n][e] = 0.0f;
        }
      }
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        if (hand_over && kk == tile_hand_over_step(kHeadDim))
          ptx::named_barrier_arrive(other_turn, 64);
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          if (kk < kSharedSteps) {
            const uint4 word = own_query[(i * kSharedSteps + kk) * 32];
            a[i][0] = word.x;
            a[i][1] = word.y;
            a[i][2] = word.z;
            a[i][3] = word.w;
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[i][e] = q[i][kk - kSharedSteps][e];
          }
        }
#pragma unroll
        for (int n = 0; n < kBlockTokens / 8; n += 2) {
          uint32_t b[4];
          ptx::ldmatrix_x4(b, keys + chunk_offset(2 * kk, 8 * n, kBlockTokens));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            ptx::mma_m16n8k16(s[i][n], a[i], b[0], b[1]);
            ptx::mma_m16n8k16(s[i][n + 1], a[i], b[2], b[3]);
          }
        }
      }
    };
    int block = shared.walk.block(0);
    ptx::mbarrier_wait(full + 8 * stage, parity);
    score(stages + stage * kStageBytes + kPlaneBytes + key_lane, false);
    leave_stage(0);
    for (int k = 0;; ++k) {
      const int first_key = block * kBlockTokens;
      ptx::mbarrier_wait(full + 8 * stage, parity);  // this turn's values, and the next keys
      uint32_t p[kRowTiles][kBlockTokens / 16][4];
      {
        const int2 common = shared.common_keys[warp];
        const bool partial = first_key < common.x || first_key + kBlockTokens > common.y;
        float factor[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            factor[i][r] = shared.row_scale[(warp * kRowTiles + i) * 16 + r * 8 + lane / 4];
          }
        }
        if (params.softcap_log2 > 0.0f) {
          // cap * tanh(score / cap): the factor is 2 log2(e) / cap times the score's own.
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kBlockTokens / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const float t = ptx::rcp(ptx::ex2(s[i][n][e] * factor[i][e / 2]) + 1.0f);
                s[i][n][e] = fmaf(-2.0f * params.softcap_log2, t, params.softcap_log2);
              }
            }
            factor[i][0] = factor[i][1] = 1.0f;
          }
        }
        if (partial) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int2 keys = shared.row_keys[(warp * kRowTiles + i) * 16 + r * 8 + lane / 4];
              const int key = first_key + lane % 4 * 2;
#pragma unroll
              for (int n = 0; n < kBlockTokens / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int at = key + 8 * n + e;
                  if (at < keys.x || at >= keys.y) s[i][n][2 * r + e] = negative_infinity();
                }
              }
            }
          }
        }

        // Lazy reference: only a row whose maximum grew by more than kLazyGrowth moves it.
        float top[kRowTiles][2];
        bool grows = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float largest = s[i][0][2 * r];
#pragma unroll
            for (int n = 0; n < kBlockTokens / 8; ++n) {
              largest = fmaxf(largest, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
            }
            top[i][r] = largest;
            grows |= fmaf(largest, factor[i][r], -m[i][r]) > kLazyGrowth;
          }
        }
        if (__any_sync(0xffffffffu, grows)) {
          moved = true;
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float largest = top[i][r];
              largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
              largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
              if (fmaf(largest, factor[i][r], -m[i][r]) > kLazyGrowth) {
                const float reference = largest * factor[i][r];
                const float alpha =
                    m[i][r] == negative_infinity() ? 0.0f : ptx::ex2(m[i][r] - reference);
                m[i][r] = reference;
                l[i][r] *= alpha;
#pragma unroll
                for (int j = 0; j < kHeadDim / 8; ++j) {
                  o[i][j][2 * r] *= alpha;
                  o[i][j][2 * r + 1] *= alpha;
                }
              }
            }
          }
        }

#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float bias = static_cast<float>(kProbabilityExponent) -
                               (m[i][r] == negative_infinity() ? 0.0f : m[i][r]);
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kBlockTokens / 8; ++n) {
              const float p0 = ptx::ex2(fmaf(s[i][n][2 * r], factor[i][r], bias));
              const float p1 = ptx::ex2(fmaf(s[i][n][2 * r + 1], factor[i][r], bias));
              sum += p0 + p1;
              p[i][n / 2][n % 2 * 2 + r] = ptx::cvt_half2(p0, p1);
            }
            l[i][r] += sum;
          }
        }
      }

      // Everything a turn needs is in registers or in shared memory before it begins: the
      // probabilities, both sub-tiles, and the first value fragments.
      const int next_block = shared.walk.after(block);
      const bool last = k + 1 == shared.walk.count;
      const bool span_ends = last || next_block / kSpanBlocks != block / kSpanBlocks;
      const bool pause = span_ends || shared.lossy;
      const uint32_t values = stages + stage * kStageBytes + value_lane;
      const uint32_t keys = stages + stage * kStageBytes + kPlaneBytes + key_lane;
      uint32_t first_values[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::ldmatrix_x4_trans(first_values[j], values + chunk_offset(2 * j, 0, kBlockTokens));
      }
      ptx::named_barrier_sync(own_turn + after_all<tile_held_steps(kHeadDim)>(p), 64);
#pragma unroll
      for (int kk = 0; kk < kBlockTokens / 16; ++kk) {
#pragma unroll
        for (int j = 0; j < kChunks; j += 2) {
          uint32_t b[4];
          if (kk == 0 && j < 8) {
#pragma unroll
            for (int e = 0; e < 4; ++e) b[e] = first_values[j / 2][e];
          } else {
            ptx::ldmatrix_x4_trans(b, values + chunk_offset(j, 16 * kk, kBlockTokens));
          }
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            ptx::mma_m16n8k16(o[i][j], p[i][kk], b[0], b[1]);
            ptx::mma_m16n8k16(o[i][j + 1], p[i][kk], b[2], b[3]);
          }
        }
      }
      if (pause) {
        if (shared.lossy && shared.flags[block - shared.first_block] != 0) {
          lose_non_finite<kHeadDim, kRowTiles>(
              o, shared.lost_tokens + static_cast<int64_t>(block - shared.first_block) * kHeadDim,
              shared.row_keys + warp * kRowTiles * 16, first_key);
        }
        if (span_ends) {
          const bool carried =
              at.step > 0 || block / kSpanBlocks != shared.walk.block(0) / kSpanBlocks;
          flush_span<kHeadDim, kRowTiles>(o, l, m, shared.carry, shared.softmax, carried, moved);
          moved = false;
          if (last) break;
        }
      }
      score(keys, true);
      leave_stage(k + 1);
      block = next_block;
    }
    leave_stage(shared.walk.count);
    if (warp < 4) ptx::named_barrier_arrive(other_turn, 64);
  }
}

}  // namespace kvtile::cuda
