// The tile engine's launch sequence and the kernels that do not depend on head_dim at compile time.
#include <algorithm>

#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/sm80/tile_prepare.cuh"
#include "src/codec/codebook.h"

namespace kvtile::cuda {
namespace {

template <int kKeyBits, int kValueBits>
cudaError_t launch_fill(const TileParams& params, int context_group, int step,
                        cudaStream_t stream) {
  const TilePlan& plan = params.plan;
  const dim3 grid(static_cast<unsigned>(plan.image_blocks()), static_cast<unsigned>(plan.contexts));
  const size_t shared =
      size_t{4} * kBlockTokens * DequantShared<kKeyBits, kValueBits>::pitch(plan.head_dim);
  const auto kernel = plan.head_dim == 64    ? tile_fill_kernel<kKeyBits, kValueBits, 64>
                      : plan.head_dim == 128 ? tile_fill_kernel<kKeyBits, kValueBits, 128>
                                             : tile_fill_kernel<kKeyBits, kValueBits, 256>;
  kernel<<<grid, image_threads(plan.head_dim), shared, stream>>>(params, context_group, step);
  return cudaGetLastError();
}

}  // namespace

const TileKernels& tile_kernels(int head_dim, int shared_bytes_per_block) {
  if (head_dim == 64) return kTileKernels64;
  if (head_dim == 256) return kTileKernels256;
  return shared_bytes_per_block < kTileKernels128.min_shared_bytes ? kTileKernels128Small
                                                                   : kTileKernels128;
}

cudaError_t launch_tile_sequences(const TileParams& params, cudaStream_t stream) {
  if (params.call.num_seqs > 0) tile_sequences_kernel<<<1, kPrepareThreads, 0, stream>>>(params);
  const int64_t rows = params.call.total_q * params.call.num_heads;
  const int64_t blocks = std::min<int64_t>(params.plan.num_ctas, (rows + 7) / 8);
  tile_padding_kernel<<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_tile_fill(const TileParams& params, int context_group, int step,
                             cudaStream_t stream) {
  const SlotFormat& format = params.format;
  const auto launch = is_fp8(format.key)              ? launch_fill<8, 4>
                      : key_bits(format.key) == 4     ? launch_fill<4, 4>
                      : value_bits(format.value) == 4 ? launch_fill<3, 4>
                                                      : launch_fill<3, 3>;
  return launch(params, context_group, step, stream);
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
    std::copy(std::begin(book.levels), std::end(book.levels), std::begin(params.levels));
  }
  return params;
}

#define KVTILE_RETURN_IF_CUDA_ERROR(expr)                                     \
  do {                                                                        \
    if (const cudaError_t error = (expr); error != cudaSuccess) return error; \
  } while (0)

cudaError_t run_tile(const TileParams& params, int shared_bytes_per_block, cudaStream_t stream) {
  const TilePlan& plan = params.plan;
  const TileKernels& kernels = tile_kernels(plan.head_dim, shared_bytes_per_block);
  KVTILE_RETURN_IF_CUDA_ERROR(kernels.prepare(shared_bytes_per_block));
  KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_sequences(params, stream));
  for (int group = 0; group < plan.num_context_groups; ++group) {
    for (int chunk = 0; chunk < plan.row_chunks; ++chunk) {
      KVTILE_RETURN_IF_CUDA_ERROR(kernels.rotate(params, group, chunk, stream));
      for (int step = 0; step < plan.num_steps; ++step) {
        KVTILE_RETURN_IF_CUDA_ERROR(launch_tile_fill(params, group, step, stream));
        KVTILE_RETURN_IF_CUDA_ERROR(
            kernels.attention(params, group, chunk, step, shared_bytes_per_block, stream));
      }
      KVTILE_RETURN_IF_CUDA_ERROR(kernels.merge(params, group, chunk, stream));
    }
  }
  return cudaSuccess;
}

}  // namespace kvtile::cuda
