// What one launch of the rows kernel and its combine reads: the call, its plan, and constants
// worked out on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "src/attention/cuda/params.h"
#include "src/attention/cuda/rows_plan.h"

namespace kvtile::cuda {

struct RowsParams {
  AttentionParams a;
  RowsPlan plan;
  int64_t first_tile = 0;         // of the launch; where there are several, a tile is a row
  int64_t num_rows = 0;           // that combine writes, from row first_tile on
  RowsMemory memory;              // of a block of one head
  float* partial_out = nullptr;   // [state][rows][head_dim]
  float* partial_sums = nullptr;  // [state][rows][offset, l]
  const std::byte* pool_end = nullptr;
  uint32_t table_pages = 0;  // of a block table row that can hold a 31-bit position
  uint32_t pool_pages = 0;
  bool whole_groups = false;  // pages hold whole groups of 16 tokens and are less than 4 GiB apart
  uint32_t page_stride = 0;   // then, in bytes
  // From a warp's group to its next: whole pages, and tokens.
  uint32_t step_pages = 0, step_tokens = 0;
  uint32_t straight_pages = 0;  // pages whose slots' granules all lie inside the pool's bytes
  // Blocks of all heads (plan.pages): pages that can be copied whole, and a chunk's layout.
  RowsPages pages;
  RowsPagesMemory pages_memory;
  uint32_t bulk_pages = 0;
  int chunk_copies = 1;  // one, or one a head
  uint32_t chunk_head_stride = 0;
  // Blocks of warpgroups (plan.verify_heads): bulk_pages as above; of the first ones, granules past
  // the end of a row are the pool's too.
  uint32_t wide_pages = 0;
  RowsVerify verify;
  RowsVerifyMemory verify_memory;
  float key_gain = 1.0f;                // undoes the codebook's factor without norm correction
  float cap = 0.0f, cap_factor = 0.0f;  // the soft cap in log2 units, and what capped() wants
  bool norm_correction = true;
  bool early_launch = false;  // the device has programmatic dependent launch
  uint32_t levels[8] = {};    // fp16 codebook, 16 entries
};

cudaError_t launch_rows_combine(const RowsParams& params, int head_dim, cudaStream_t stream);

}  // namespace kvtile::cuda
