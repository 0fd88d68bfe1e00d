// What every kernel of the tile engine reads, by value: the call, the plan, and the workspace cut
// up by the plan's offsets.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "src/attention/cuda/params.h"
#include "src/attention/cuda/sm80/tile_plan.h"

namespace kvtile::cuda {

struct TileParams {
  AttentionParams call;
  TilePlan plan;
  Mask mask;
  SlotFormat format;
  float levels[16] = {};  // of a rotated key code, times 1 / level_scale
  float level_scale = 0.0f;
  float softcap_log2 = 0.0f;  // softcap * log2(e), or 0
  std::byte* workspace = nullptr;

  KVTILE_HD SequenceInfo* sequences() const {
    return reinterpret_cast<SequenceInfo*>(workspace + plan.sequences_offset);
  }
  // The contexts of the launch group.
  KVTILE_HD ContextView* views() const {
    return reinterpret_cast<ContextView*>(workspace + plan.views_offset);
  }
  // Image and non-finite flags of context `index` of the launch group, in one of the buffers.
  KVTILE_HD int64_t image_index(int buffer, int index) const {
    return static_cast<int64_t>(buffer) * plan.contexts + index;
  }
  KVTILE_HD std::byte* image(int buffer, int index) const {
    return workspace + plan.image_offset + image_index(buffer, index) * plan.context_image_bytes();
  }
  KVTILE_HD uint8_t* flags(int buffer, int index) const {
    return reinterpret_cast<uint8_t*>(workspace + plan.flags_offset) +
           image_index(buffer, index) * plan.fill_blocks();
  }
  // One bit per token of a fill block and dimension: the value element is not finite. Written and
  // read only where the block's flag is set.
  KVTILE_HD uint64_t* lost_tokens(int buffer, int index) const {
    return reinterpret_cast<uint64_t*>(workspace + plan.lost_offset) +
           image_index(buffer, index) * plan.fill_blocks() * plan.head_dim;
  }
  // Rotated queries of a row block in mma A-fragment order: [16 rows][k16 step][lane].
  KVTILE_HD uint4* query(int row_block) const {
    return reinterpret_cast<uint4*>(workspace + plan.query_offset) +
           static_cast<int64_t>(row_block) * plan.rows() * plan.head_dim / 8;
  }
  // Factor from a row's raw scores to log2 units (its power of two and the softmax scale).
  KVTILE_HD float* row_scale(int row_block) const {
    return reinterpret_cast<float*>(workspace + plan.row_scale_offset) + row_block * plan.rows();
  }
  // Carried outputs of a piece in mma C-fragment order: [16 rows][8 dims][lane], and
  // (reference, sum) of each row; both times 2^kProbabilityExponent.
  KVTILE_HD float4* carry(int slot) const {
    return reinterpret_cast<float4*>(workspace + plan.carry_offset) +
           static_cast<int64_t>(slot) * plan.rows() * plan.head_dim / 4;
  }
  KVTILE_HD float2* softmax(int slot) const {
    return reinterpret_cast<float2*>(workspace + plan.softmax_offset) +
           static_cast<int64_t>(slot) * plan.rows();
  }
};

}  // namespace kvtile::cuda
