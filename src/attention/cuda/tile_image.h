// tile_image: decodes cached tokens once into the fp16 image (image.h) that the tile engine reads.
// Key elements are level * scale, value elements code * scale + zero, both rounded once from fp32:
// the same bits decode_slots writes as fp16. Keys stay in the Hadamard space.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kvtile/slot.h"
#include "kvtile/status.h"
#include "src/attention/cuda/image.h"
#include "src/attention/cuda/params.h"

namespace kvtile::cuda {

// One launch fills, for each of num_seqs sequences and num_kv_heads heads, the sub-tiles that cover
// the positions [token_begin, token_begin + num_tokens) of the sequence. A sequence's packed end is
// seq_len, or cached_len when the chunk is raw, both read on the device. Sub-tiles past that end,
// or wholly before the first position any row's window sees, are left untouched; in the others,
// tokens outside [first visible, end) are written as zeros. A visible token whose table entry names
// no page is written as NaN.
struct TileImageParams {
  std::byte* image = nullptr;  // [num_seqs][num_kv_heads][sub-tile][key, value]; 16-byte aligned
  int64_t stride_seq = 0;      // bytes
  int64_t stride_head = 0;     // bytes
  int seq_begin = 0, num_seqs = 1;
  int head_begin = 0, num_kv_heads = 1;
  int64_t token_begin = 0;  // a multiple of subtile_tokens
  int num_tokens = 0;       // capacity of the tile
  int subtile_tokens = 64;  // N of image.h: a multiple of 64
};

// Launches only: no allocation, no synchronisation.
Status launch_tile_image(const SlotFormat& format, const AttentionParams& attention,
                         const TileImageParams& tile, cudaStream_t stream);

}  // namespace kvtile::cuda
