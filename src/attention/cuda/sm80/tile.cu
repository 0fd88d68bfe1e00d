// The tile engine's launch sequence and the kernels that do not depend on head_dim at compile time.
#include <algorithm>
#include <cmath>

#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/sm80/tile_fill.cuh"
#include "src/attention/cuda/sm80/tile_prepare.cuh"
#include "src/codec/codebook.h"

namespace kvtile::cuda {
namespace {

#define KVTILE_RETURN_IF_CUDA_ERROR(expr)                                     \
  do {                                                                        \
    if (const cudaError_t error = (expr); error != cudaSuccess) return error; \
  } while (0)

template <int kKeyBits, int kValueBits, int kHeadDim>
cudaError_t launch_fill(const TileParams& params, const TileStep& at, bool early,
                        cudaStream_t stream) {
  const TilePlan& plan = params.plan;
  const int sms =
      early && plan.buffers > 1 ? std::max(1, plan.num_sms - plan.num_ctas) : plan.num_sms;
  const int blocks =
      std::min(sms * fill_blocks_of_sm(kHeadDim), plan.contexts * plan.fill_blocks());
  const size_t shared = fill_dynamic_bytes(
      kKeyBits, fill_format(kKeyBits, kValueBits, kHeadDim).slot_bytes(), plan.contexts);
  return launch_kernel<tile_fill_kernel<kKeyBits, kValueBits, kHeadDim>>(
      dim3(static_cast<unsigned>(blocks)), fill_threads(kHeadDim), shared, early, stream, params,
      at);
}

using LaunchFill = cudaError_t (*)(const TileParams& params, const TileStep& at, bool early,
                                   cudaStream_t stream);

template <int kKeyBits, int kValueBits>
LaunchFill fill_of_bits(int head_dim) {
  return head_dim == 64    ? launch_fill<kKeyBits, kValueBits, 64>
         : head_dim == 128 ? launch_fill<kKeyBits, kValueBits, 128>
                           : launch_fill<kKeyBits, kValueBits, 256>;
}

LaunchFill fill_of(const SlotFormat& format) {
  return is_fp8(format.key)              ? fill_of_bits<8, 4>(format.head_dim)
         : key_bits(format.key) == 4     ? fill_of_bits<4, 4>(format.head_dim)
         : value_bits(format.value) == 4 ? fill_of_bits<3, 4>(format.head_dim)
                                         : fill_of_bits<3, 3>(format.head_dim);
}

// The step after `at` in the order of a call: steps, then row chunks, then context groups.
TileStep step_after(const TilePlan& plan, TileStep at) {
  at.buffer = (at.buffer + 1) % plan.buffers;
  if (++at.step < plan.num_steps) return at;
  at.step = 0;
  if (++at.row_chunk < plan.row_chunks) return at;
  at.row_chunk = 0;
  ++at.context_group;
  return at;
}

}  // namespace

const TileAttention& tile_attention(int head_dim, int shared_bytes_per_block) {
  if (head_dim == 64) return kTileAttention64;
  if (head_dim == 256) return kTileAttention256;
  return shared_bytes_per_block < kTileAttention128.min_shared_bytes ? kTileAttention128Small
                                                                     : kTileAttention128;
}

const TileAttention& hopper_attention(int head_dim) {
  return head_dim == 64    ? kHopperAttention64
         : head_dim == 128 ? kHopperAttention128
                           : kHopperAttention256;
}

cudaError_t launch_tile_sequences(const TileParams& params, cudaStream_t stream) {
  const int64_t rows = params.call.total_q * params.call.num_heads;
  const int64_t blocks = std::min<int64_t>(params.plan.num_ctas, (rows + 7) / 8);
  tile_open_kernel<<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_tile_fill(const TileParams& params, const TileStep& at, bool early,
                             cudaStream_t stream) {
  return fill_of(params.format)(params, at, early, stream);
}

TileParams make_tile_params(const AttentionCall& call, const TilePlan& plan, void* workspace) {
  TileParams params;
  params.call = make_attention_params(call);
  params.plan = plan;
  params.mask = call.mask;
  params.format = call.cache.format;
  params.softcap_log2 = call.softcap * 1.4426950408889634f;
  params.workspace = static_cast<std::byte*>(workspace);
  if (params.format.rotated()) {
    const Codebook book = make_codebook(params.format.key, params.format.head_dim);
    const float factor =
        level_factor(params.format.key) * std::sqrt(static_cast<float>(params.format.head_dim));
    std::transform(std::begin(book.levels), std::end(book.levels), std::begin(params.levels),
                   [factor](float level) { return level * factor; });
    params.level_scale = 1.0f / factor;
  }
  return params;
}

cudaError_t run_tile(const TileParams& params, const TileAttention& attention,
                     int shared_bytes_per_block, cudaStream_t stream) {
  const TilePlan& plan = params.plan;
  KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_sequences(params, stream));
  for (TileStep at, next; at.context_group < plan.num_context_groups; at = next) {
    next = step_after(plan, at);
    const bool opens = at.step == 0, first = opens && at.row_chunk == 0 && at.context_group == 0;
    // A launch group is opened beside the merge of the one before.
    if (opens) {
      KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_rotate(params, at, plan.overlaps && !first, stream));
    }
    if (first || plan.buffers == 1) {
      const bool early = plan.overlaps && plan.buffers == 1;
      KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_fill(params, at, early, stream));
    }
    KVTILE_RETURN_IF_CUDA_ERROR(
        attention.launch(params, at, shared_bytes_per_block, plan.overlaps, stream));
    if (plan.buffers > 1 && next.context_group < plan.num_context_groups) {
      KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_fill(params, next, true, stream));
    }
    if (next.step == 0) KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_merge(params, at, stream));
  }
  return cudaSuccess;
}

}  // namespace kvtile::cuda
