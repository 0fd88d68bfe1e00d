// From pages to shared memory: which keys a block of the rows kernel sees, and how a warp's ring of
// packed groups is filled ahead of its use.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// The keys of a block: positions [begin, end), in groups of 16 counted from `origin`.
struct RowsRange {
  int origin, begin, end;
  int first_group, end_group;
};

__device__ inline RowsRange rows_packed_range(const RowsParams& p, const RowsTile& tile,
                                              int split) {
  RowsRange range = {};
  const int64_t last = tile.first_position + tile.num_queries - 1;
  int64_t end = p.a.causal ? last + 1 : tile.seq_len;
  if (last < 0) end = 0;
  if (p.plan.raw_chunk) end = min(end, tile.cached_len);
  int64_t begin = p.a.window > 0 ? tile.first_position - p.a.window + 1 : 0;
  begin = max(begin, int64_t{0});
  range.begin = static_cast<int>(min(begin, int64_t{0x7fffffff}));
  range.end = static_cast<int>(max(end, int64_t{0}));
  range.origin = range.begin & ~(kRowsGroupTokens - 1);
  if (range.end > range.begin) {
    const int groups = (range.end - range.origin - 1) / kRowsGroupTokens + 1;
    const int share = (groups - 1) / p.plan.num_splits + 1;
    range.first_group = static_cast<int>(min(int64_t{split} * share, int64_t{groups}));
    range.end_group = min(range.first_group + share, groups);
  }
  return range;
}

// Copies groups of packed slots into a warp's ring. The page of a group is read one group ahead of
// its copy. When a page holds whole groups, a full group is copied straight: lane l of a pass takes
// one granule of row l / kRowLanes, so that a row is one or two lines to the memory system. Groups
// that are cut by the range, straddle pages, lack one or touch the pool's ends take the careful
// path, where lane (g, c) takes granules c, c + 4, ... of tokens g and g + 8. Groups are named by
// the distance of their first token from range.begin.
template <class Config>
struct RowsLoader {
  static constexpr int kRowLanes = Config::kRowLanes;
  static constexpr int kPassRows = 32 / kRowLanes;
  static constexpr int kPasses = kRowsGroupTokens / kPassRows;

  // Pages of the group's tokens g and g + 8 and where the tokens lie in them. Whole groups have one
  // page, page[0], and offset[0] is that of the group's first token.
  struct Place {
    int page[2];
    uint32_t offset[2];
  };

  const RowsParams& p;
  uint32_t bases;       // shared address of the sequence's table row and the head's first slot
  int span;             // tokens from range.begin that this block copies
  int to_table;         // from a distance to a place in the table row
  uint32_t lane_bytes;  // of the lane's row and granule, to the group's first slot
  uint32_t lane_row;    // the same in a stage
  int lane;
  bool straight_groups;

  __device__ RowsLoader(const RowsParams& params, const RowsTile& tile, const RowsRange& range,
                        uint32_t shared_bases, int end_group, int lane_id)
      : p(params), bases(shared_bases), lane(lane_id) {
    straight_groups = p.whole_groups && (tile.table_position & (kRowsGroupTokens - 1)) == 0;
    lane_bytes =
        lane / kRowLanes * static_cast<uint32_t>(p.a.cache.stride_token) + 16 * (lane % kRowLanes);
    lane_row = lane / kRowLanes * Config::kPitch + 16 * (lane % kRowLanes);
    const int64_t end =
        min(int64_t{range.end}, int64_t{range.origin} + int64_t{end_group} * kRowsGroupTokens);
    span = static_cast<int>(end - range.begin);
    to_table =
        static_cast<int>(max(int64_t{range.begin} - tile.table_position, int64_t{-0x40000000}));
  }

  __device__ bool sees(int distance) const { return distance >= 0 && distance < span; }

  __device__ void locate_token(int distance, bool seen, const int32_t* table_row, int* page,
                               uint32_t* offset) const {
    const int at = distance + to_table;
    const uint32_t index = p.a.cache.block_divisor.divide(static_cast<uint32_t>(at));
    *offset = at - index * p.a.cache.block_divisor.divisor;
    *page = seen ? -1 : 0;
    if (seen && at >= 0 && index < p.table_pages) *page = __ldg(table_row + index);
  }

  // A token that is not seen has no page read for it. kFast: straight_groups holds.
  template <bool kFast>
  __device__ void locate(int distance, Place* place) const {
    const auto* table_row = reinterpret_cast<const int32_t*>(ptx::ld_shared_u64(bases));
    if (kFast || straight_groups) {
      locate_token(distance, distance < span, table_row, &place->page[0], &place->offset[0]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = distance + (lane >> 2) + 8 * i;
        locate_token(at, sees(at), table_row, &place->page[i], &place->offset[i]);
      }
    }
  }

  // Whether issue<true>() serves the group: one whole page's, clear of the pool's ends, or past the
  // range.
  __device__ bool is_straight(int distance, const Place& place) const {
    const bool cut = distance < 0 || static_cast<uint32_t>(distance - (span - 15)) < 15u;
    return straight_groups && !cut && static_cast<uint32_t>(place.page[0]) < p.straight_pages;
  }

  // False after a careful copy, whose rows may be marked as missing.
  template <bool kFast>
  __device__ bool issue(int distance, const Place& place, uint32_t stage) const {
    if constexpr (!kFast) {
      if (!__all_sync(~0u, is_straight(distance, place))) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          const int token = (lane >> 2) + 8 * i;
          copy_carefully(straight_groups || i == 0 ? place.page[0] : place.page[1],
                         straight_groups ? place.offset[0] + token
                         : i == 0        ? place.offset[0]
                                         : place.offset[1],
                         sees(distance + token), stage, token);
        }
        return false;
      }
    }
    const uint32_t stride = static_cast<uint32_t>(p.a.cache.stride_token);
    const uint64_t first =
        ptx::ld_shared_u64(bases + 8) +
        static_cast<uint32_t>(place.page[0]) * static_cast<uint64_t>(p.a.cache.stride_block) +
        static_cast<uint64_t>(place.offset[0]) * stride;
    if (lane % kRowLanes < Config::kGranules && distance < span) {
      const uint32_t row = stage + lane_row;
      if (p.steady_phase) {
        // Rows of even passes start alike within their granules, and so do those of odd ones.
        uint64_t source[2] = {first + lane_bytes, first + lane_bytes + kPassRows * stride};
        source[0] &= ~uint64_t{15};
        source[1] &= ~uint64_t{15};
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          ptx::cp_async16(row + pass * kPassRows * Config::kPitch, source[pass % 2]);
          source[pass % 2] += 2 * kPassRows * stride;
        }
      } else {
        uint64_t source = first + lane_bytes;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          ptx::cp_async16(row + pass * kPassRows * Config::kPitch, source & ~uint64_t{15});
          source += kPassRows * stride;
        }
      }
    }
    // Two lanes a token write the same word.
    note(stage, lane & 15, (static_cast<uint32_t>(first) + (lane & 15) * stride) & 15);
    return true;
  }

  // Where the token's slot starts in its stage; the top bit marks a visible token without a page.
  __device__ void note(uint32_t stage, int token, uint32_t phase) const {
    ptx::st_shared(stage + kRowsGroupTokens * Config::kPitch + 4 * token,
                   token * Config::kPitch + phase);
  }

  __device__ void copy_carefully(int page, uint32_t offset, bool seen, uint32_t stage,
                                 int token) const {
    const int c = lane & 3;
    const uint32_t row = stage + token * Config::kPitch;
    uint32_t phase = 0;
    if (seen && static_cast<uint32_t>(page) < p.pool_pages) {
      const auto* slot = reinterpret_cast<const std::byte*>(ptx::ld_shared_u64(bases + 8)) +
                         static_cast<uint32_t>(page) * p.a.cache.stride_block +
                         offset * p.a.cache.stride_token;
      phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(slot)) & 15;
      const std::byte* aligned = slot - phase;
      const bool inside = aligned >= p.a.cache.pages &&
                          aligned + (phase + Config::kSlotBytes + 15) / 16 * 16 <= p.pool_end;
      if (inside && phase % Config::kSlotAlignment == 0) {
        for (int byte = 16 * c; byte < static_cast<int>(phase) + Config::kSlotBytes; byte += 64) {
          ptx::cp_async16(row + byte, reinterpret_cast<uint64_t>(aligned + byte));
        }
      } else {
        phase -= phase % Config::kSlotAlignment;
#pragma unroll 1
        for (int byte = 2 * c; byte < Config::kSlotBytes; byte += 8) {
          ptx::st_shared_u16(row + phase + byte,
                             __ldg(reinterpret_cast<const uint16_t*>(slot + byte)));
        }
      }
    } else {
      if (seen) phase = 0x80000000u;
#pragma unroll 1
      for (int byte = 16 * c; byte < Config::kPitch; byte += 64) {
        ptx::st_shared4(row + byte, 0, 0, 0, 0);
      }
    }
    if (c == 0) note(stage, token, phase);
  }
};

}  // namespace kvtile::cuda
