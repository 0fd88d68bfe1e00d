// The tile image kernel: one thread block decodes 64 tokens of one head and stores them chunk by
// chunk, 32 consecutive tokens of a chunk (512 bytes) a warp.
#include "src/attention/cuda/tile_image.h"
#include "src/codec/codec_params.h"
#include "src/codec/decode.cuh"
#include "src/codec/formats.cuh"
#include "src/core/device.h"

namespace kvtile::cuda {
namespace {

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
__global__ void __launch_bounds__(128)
    tile_image_kernel(const __grid_constant__ AttentionParams attention,
                      const __grid_constant__ TileImageParams tile,
                      const __grid_constant__ DecodeLevels levels, const bool norm_correction) {
  using Decoder = RowDecoder<kKey, kValue, kHeadDim>;
  __shared__ typename Decoder::Shared shared;
  const Decoder decoder{shared};
  const int seq = tile.seq_begin + static_cast<int>(blockIdx.z);
  // Heads run fastest: rows of neighbouring heads share sectors of token-major pages.
  const int head = tile.head_begin + static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * Decoder::kRows;  // in the tile
  const int subtile = first / tile.subtile_tokens;
  const int subtile_first = first - subtile * tile.subtile_tokens;

  // Visibility comes from device lengths alone.
  const int64_t seq_len = attention.seq_lens[seq];
  const int64_t q_len = attention.cu_seqlens_q[seq + 1] - attention.cu_seqlens_q[seq];
  const int64_t cached_len = max(seq_len - q_len, int64_t{0});
  const int64_t end = min(attention.chunk_key != nullptr ? cached_len : seq_len,
                          tile.token_begin + tile.num_tokens);
  const int64_t begin =
      attention.window > 0 ? max(seq_len - q_len - attention.window + 1, int64_t{0}) : 0;
  const int64_t subtile_begin =
      tile.token_begin + static_cast<int64_t>(subtile) * tile.subtile_tokens;
  if (subtile_begin >= end || subtile_begin + tile.subtile_tokens <= begin) return;

  const int row = threadIdx.x % Decoder::kRows;
  if (threadIdx.x < Decoder::kRows) {
    const int64_t position = tile.token_begin + first + row;
    const std::byte* slot = nullptr;
    RowFill fill = RowFill::kZeros;
    if (position >= begin && position < end) {
      slot = attention.cache.slot_in_table(attention.table_row(seq), attention.max_blocks,
                                           position - attention.first_position(seq), head);
      fill = slot != nullptr ? RowFill::kDecode : RowFill::kNaN;
    }
    decoder.set_row(slot != nullptr ? slot : attention.cache.pages, fill);
  }
  decoder.load(levels, norm_correction);

  std::byte* key = tile.image + blockIdx.z * tile.stride_seq + blockIdx.x * tile.stride_head +
                   subtile * subtile_bytes(tile.subtile_tokens, kHeadDim);
  std::byte* value = key + plane_bytes(tile.subtile_tokens, kHeadDim);
  for (int chunk = threadIdx.x / Decoder::kRows; chunk < Decoder::kChunks;
       chunk += Decoder::kThreads / Decoder::kRows) {
    const int offset = chunk_offset(chunk, subtile_first + row, tile.subtile_tokens);
    float x[8];
    decoder.key_chunk(row, chunk, x);
    *reinterpret_cast<uint4*>(key + offset) = chunk_to_half(x);
    decoder.value_chunk(row, chunk, x);
    *reinterpret_cast<uint4*>(value + offset) = chunk_to_half(x);
  }
}

}  // namespace

Status launch_tile_image(const SlotFormat& format, const AttentionParams& attention,
                         const TileImageParams& tile, cudaStream_t stream) {
  if (tile.num_tokens == 0 || tile.num_kv_heads == 0 || tile.num_seqs == 0) return {};
  const Status known = for_format(format, [&](auto key, auto value, auto head_dim) {
    using Decoder = RowDecoder<key.value, value.value, head_dim.value>;
    const int subtiles = (tile.num_tokens + tile.subtile_tokens - 1) / tile.subtile_tokens;
    const dim3 grid(static_cast<unsigned>(tile.num_kv_heads),
                    static_cast<unsigned>(subtiles * (tile.subtile_tokens / Decoder::kRows)),
                    static_cast<unsigned>(tile.num_seqs));
    tile_image_kernel<key.value, value.value, head_dim.value>
        <<<grid, Decoder::kThreads, 0, stream>>>(attention, tile, make_decode_levels(format),
                                                 format.norm_correction);
  });
  if (!known.ok()) return known;
  return cuda_status("tile image launch", cudaGetLastError());
}

}  // namespace kvtile::cuda
