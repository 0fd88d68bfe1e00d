// Around the tile engine's attention, for one head_dim: rotated query fragments before it, the
// merge of its pieces after it.
#pragma once

#include "src/attention/cuda/sm80/tile_common.cuh"
#include "src/attention/cuda/sm80/tile_params.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// --- queries ------------------------------------------------------------------------------------

inline constexpr int kRotateParts = 4;

// What runs beside the launches around it: the next one may start, and has ended before this one
// does whatever this one started beside.
__device__ __forceinline__ void open_early_launch() {
#if __CUDA_ARCH__ >= 900
  ptx::grid_dependency_launch();
#endif
}
__device__ __forceinline__ void end_early_launch() {
#if __CUDA_ARCH__ >= 900
  ptx::grid_dependency_wait();
#endif
}

// Opens a launch group: writes its contexts' views, and rotates the queries of its row blocks in
// fp32, scales each row's largest element into [8, 16) by a power of two, and writes fp16 mma
// fragments and the row's factor back to log2 units. Grid: (row blocks of the group, kRotateParts).
template <int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tile_rotate_kernel(const __grid_constant__ TileParams params,
                       const __grid_constant__ TileStep at_step) {
  open_early_launch();
  constexpr int kPer = kHeadDim / 32;
  constexpr int kSteps = kHeadDim / 16;
  const AttentionParams& call = params.call;
  const TilePlan& plan = params.plan;
  const SequenceInfo* sequences = params.sequences();
  const GroupRows group = group_rows(plan, sequences, at_step.context_group, at_step.row_chunk);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int64_t c = group.first_context + threadIdx.x; c < group.end_context; c += blockDim.x) {
      params.views()[c - group.first_context] =
          context_view(plan, sequences, params.mask, group, c);
    }
  }
  const int local = blockIdx.x;
  if (local >= group.end - group.begin) return end_early_launch();
  const int64_t context = context_of_row_block(plan, sequences, group, group.begin + local);
  const int seq = static_cast<int>(context / plan.num_kv_heads);
  const int head = static_cast<int>(context % plan.num_kv_heads);
  const SequenceInfo sequence = sequences[seq];
  const int first_row =
      (group.begin + local - row_blocks_before(plan, sequences, context)) * plan.rows();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* fragments = reinterpret_cast<uint32_t*>(params.query(local));

  const int warp_rows = plan.rows() / (kRotateParts * (kPrepareThreads / 32));
#pragma unroll 2
  for (int index = 0; index < warp_rows; ++index) {
    const int block_row = (blockIdx.y * (kPrepareThreads / 32) + warp) * warp_rows + index;
    const int row = first_row + block_row;
    float x[kPer] = {};
    float scale = 1.0f;
    if (row < sequence.q_len * plan.group) {
      const int64_t token = sequence.q_begin + row / plan.group;
      const int query_head = head * plan.group + row % plan.group;
      const int64_t at = token * call.query_stride_token + query_head * call.query_stride_head;
      float largest = 0.0f;
      bool finite = true;
      load_elements(call.query, call.dtype, at + kPer * lane, x);
#pragma unroll
      for (int e = 0; e < kPer; ++e) finite &= isfinite(x[e]);
      if (params.format.rotated()) rotate_row<kPer>(x);
#pragma unroll
      for (int e = 0; e < kPer; ++e) largest = fmaxf(largest, fabsf(x[e]));
#pragma unroll
      for (int half = 1; half < 32; half *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, half));
      }
      // largest * 2^exponent lies in [8, 16); 0 and subnormals take the smallest scale.
      const int exponent = min(130 - static_cast<int>(__float_as_uint(largest) >> 23), 126);
      const float factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
      const float inverse = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
      finite = __all_sync(0xffffffffu, finite) && isfinite(largest);
      const float sign = call.softmax_scale < 0.0f ? -1.0f : 1.0f;
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        x[e] = finite ? x[e] * factor * sign : __int_as_float(0x7fffffff);
      }
      const float per_score = params.softcap_log2 > 0.0f ? 2.0f / call.softcap : 1.0f;
      scale = finite ? fabsf(call.softmax_scale) * per_score * 1.4426950408889634f * inverse : 1.0f;
      // Kept above 0: a masked score must stay -inf.
      scale = fmaxf(scale, 1e-30f);
    }
#pragma unroll
    for (int e = 0; e < kPer; e += 2) {
      const int d = kPer * lane + e;
      const int g = block_row % 16;
      const int reg = g / 8 + (d % 16) / 8 * 2;
      const int target = (g % 8) * 4 + d % 8 / 2;
      fragments[(((block_row / 16) * kSteps + d / 16) * 32 + target) * 4 + reg] =
          ptx::cvt_half2(x[e], x[e + 1]);
    }
    if (lane == 0) params.row_scale(local)[block_row] = scale;
  }
  end_early_launch();
}

// --- merge --------------------------------------------------------------------------------------

// Merges the pieces of one row block in order, adds the sink, normalises and writes out and lse.
// Grid: (row blocks of the group, head_dim / 64).
template <int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tile_merge_kernel(const __grid_constant__ TileParams params,
                      const __grid_constant__ TileStep at_step) {
  open_early_launch();
  const AttentionParams& call = params.call;
  const TilePlan& plan = params.plan;
  const SequenceInfo* sequences = params.sequences();
  const GroupRows group = group_rows(plan, sequences, at_step.context_group, at_step.row_chunk);
  const int num_row_blocks = group.end - group.begin;
  const int local = blockIdx.x;
  if (local >= num_row_blocks) return;
  const int64_t context = context_of_row_block(plan, sequences, group, group.begin + local);
  // Not the view in the workspace: the next launch group may be opened meanwhile.
  const ContextView view = context_view(plan, sequences, params.mask, group, context);
  const SequenceInfo sequence = sequences[view.seq];
  const int first_row =
      (group.begin + local - row_blocks_before(plan, sequences, context)) * plan.rows();
  const int64_t unit = static_cast<int64_t>(local) * plan.period_blocks();
  const int first_slot = lane_owner(plan, num_row_blocks, unit) + local;
  const int last_slot = lane_owner(plan, num_row_blocks, unit + plan.period_blocks() - 1) + local;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float infinity = __int_as_float(0x7f800000);
  // Tokens past the last launched tile were not attended: lengths beyond the caller's bounds.
  const bool truncated = num_steps_of(view.end - view.base, plan.tile_tokens) > plan.num_steps;

  for (int tile = warp; tile < plan.rows() / 16; tile += kPrepareThreads / 32) {
    float reference[2], sum[2];
    int row[2];
    bool live[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int block_row = tile * 16 + r * 8 + lane / 4;
      row[r] = first_row + block_row;
      live[r] = row[r] < sequence.q_len * plan.group;
      const int head = view.head * plan.group + row[r] % plan.group;
      // Few rows have many pieces: several are asked for at once.
      float top = -infinity;
#pragma unroll 4
      for (int slot = first_slot; slot <= last_slot; ++slot) {
        top = fmaxf(top, params.softmax(slot)[block_row].x);
      }
      float total = 0.0f;
      bool visible = false;
      if (live[r]) visible = !row_range(params.mask, sequence, row[r] / plan.group).empty();
      const bool sink = call.sinks != nullptr && visible;
      const float sink_log2 = sink ? call.sinks[head] * 1.4426950408889634f : -infinity;
      if (sink) top = fmaxf(top, sink_log2);
      const float shift = top == -infinity ? 0.0f : top;
#pragma unroll 4
      for (int slot = first_slot; slot <= last_slot; ++slot) {
        const float2 piece = params.softmax(slot)[block_row];
        total = fmaf(ptx::ex2(piece.x - shift), piece.y, total);
      }
      if (sink) total += ptx::ex2(sink_log2 - shift + static_cast<float>(kProbabilityExponent));
      if (truncated) total = __int_as_float(0x7fffffff);
      reference[r] = shift;
      sum[r] = total;
      if (live[r] && call.lse != nullptr && blockIdx.y == 0 && lane % 4 == 0) {
        const int64_t token = sequence.q_begin + row[r] / plan.group;
        float lse = -infinity;
        if (visible && total != 0.0f) {
          lse = (shift + log2f(total) - static_cast<float>(kProbabilityExponent)) *
                0.6931471805599453f;
        }
        call.lse[head * call.lse_stride_head + token * call.lse_stride_token] = lse;
      }
      if (!visible) sum[r] = 0.0f;
    }

    float4 o[8] = {};
#pragma unroll 1
    for (int slot = first_slot; slot <= last_slot; ++slot) {
      float weight[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int block_row = tile * 16 + r * 8 + lane / 4;
        const float before = params.softmax(slot)[block_row].x;
        weight[r] = before == -infinity ? 0.0f : ptx::ex2(before - reference[r]);
      }
      const float4* fragment =
          params.carry(slot) + (tile * (kHeadDim / 8) + blockIdx.y * 8) * 32 + lane;
      // A piece without keys has written its softmax alone.
      if (!__any_sync(0xffffffffu, weight[0] != 0.0f || weight[1] != 0.0f)) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 piece = fragment[j * 32];
        if (weight[0] != 0.0f) {
          o[j].x = fmaf(piece.x, weight[0], o[j].x);
          o[j].y = fmaf(piece.y, weight[0], o[j].y);
        }
        if (weight[1] != 0.0f) {
          o[j].z = fmaf(piece.z, weight[1], o[j].z);
          o[j].w = fmaf(piece.w, weight[1], o[j].w);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!live[r]) continue;
      const int64_t token = sequence.q_begin + row[r] / plan.group;
      const int head = view.head * plan.group + row[r] % plan.group;
      const int64_t at = token * call.out_stride_token + head * call.out_stride_head;
      const float inverse = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int d = (static_cast<int>(blockIdx.y) * 8 + j) * 8 + lane % 4 * 2;
        const float x = r == 0 ? o[j].x : o[j].z, y = r == 0 ? o[j].y : o[j].w;
        store_element(call.out, call.dtype, at + d, sum[r] == 0.0f ? 0.0f : x * inverse);
        store_element(call.out, call.dtype, at + d + 1, sum[r] == 0.0f ? 0.0f : y * inverse);
      }
    }
  }
}

}  // namespace kvtile::cuda
