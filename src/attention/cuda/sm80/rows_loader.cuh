// From pages to shared memory: which keys a block of the rows kernel sees, and how a warp's ring of
// packed groups is filled ahead of its use.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// The keys of a block: positions [begin, end), in groups of 16 counted from `origin`. Distances are
// counted from `begin`.
struct RowsRange {
  int origin, begin, end;
  int first_group, end_group;
  int to_table;                  // from a distance to a place in the table row
  int common_begin, common_end;  // positions every row of the tile sees
  // Distances of groups that every row sees whole, when there is no soft cap.
  int fast_begin;
  uint32_t fast_length;

  __device__ bool is_fast(int distance) const {
    return static_cast<uint32_t>(distance - fast_begin) < fast_length;
  }
  __device__ bool all_visible(int distance) const {
    const int position = begin + distance;
    return position >= common_begin && position + kRowsGroupTokens <= common_end;
  }
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
  // Where the table ends every key is lost, and one lost key already makes its readers NaN: a
  // length far beyond the table costs no walk over what is not there.
  const int64_t table_end =
      tile.table_position + int64_t{p.table_pages} * p.a.cache.block_divisor.divisor;
  end = min(end, max(table_end, begin) + kRowsMaxRows + kRowsGroupTokens);
  range.begin = static_cast<int>(min(begin, int64_t{0x7fffffff}));
  range.end = static_cast<int>(max(end, int64_t{0}));
  range.origin = range.begin & ~(kRowsGroupTokens - 1);
  if (range.end > range.begin) {
    const int groups = (range.end - range.origin - 1) / kRowsGroupTokens + 1;
    const int share = max((groups - 1) / p.plan.num_splits + 1, p.plan.min_groups);
    range.first_group = static_cast<int>(min(int64_t{split} * share, int64_t{groups}));
    range.end_group = min(range.first_group + share, groups);
  }
  range.to_table =
      static_cast<int>(max(int64_t{range.begin} - tile.table_position, int64_t{-0x40000000}));
  range.common_end = tile.first_position < 0 ? 0 : range.end;
  if (p.a.window > 0) range.common_begin = static_cast<int>(max(last - p.a.window + 1, int64_t{0}));
  if (p.a.causal) {
    range.common_end = static_cast<int>(min(tile.first_position + 1, int64_t{range.common_end}));
  }
  range.fast_begin = max(range.common_begin - range.begin, 0);
  const int fast_end = range.common_end - range.begin - kRowsGroupTokens + 1;
  // Unmasked scores round once less, and which groups are copied straight follows from their pages.
  if (!(p.a.softcap > 0.0f) && !p.plan.batch_invariant) {
    range.fast_length = static_cast<uint32_t>(max(fast_end - range.fast_begin, 0));
  }
  return range;
}

// Where a group's first token lies: its page (-1: none) and the place in it.
struct RowsPlace {
  int page;
  uint32_t offset;
};

// A walk along a sequence's table row, from a warp's group to its next.
struct RowsWalk {
  int index;        // in the table row
  uint32_t offset;  // in the page

  // To a place in the table row, in tokens.
  __device__ void begin(const RowsParams& p, int at) {
    const int block = static_cast<int>(p.a.cache.block_divisor.divisor);
    index = at >= 0 ? at / block : -((block - 1 - at) / block);
    offset = at - index * block;
  }
  // `bases`: shared address of the table row's own.
  __device__ int page(const RowsParams& p, uint32_t bases) const {
    if (static_cast<uint32_t>(index) >= p.table_pages) return -1;
    return __ldg(reinterpret_cast<const int32_t*>(ptx::ld_shared_u64(bases)) + index);
  }
  __device__ void step(const RowsParams& p) {
    index += p.step_pages;
    offset += p.step_tokens;
    if (offset >= p.a.cache.block_divisor.divisor) {
      offset -= p.a.cache.block_divisor.divisor;
      ++index;
    }
  }
};

// The page of one token, `at` in the table row, or -1; `slot` is the token's place in it.
__device__ inline int rows_page_of(const RowsParams& p, uint32_t bases, int at, uint32_t* slot) {
  const uint32_t block = p.a.cache.block_divisor.divide(static_cast<uint32_t>(at));
  *slot = at - block * p.a.cache.block_divisor.divisor;
  if (at < 0 || block >= p.table_pages) return -1;
  return __ldg(reinterpret_cast<const int32_t*>(ptx::ld_shared_u64(bases)) + block);
}

// Copies groups of packed slots into a warp's ring. The page of a group is read one group ahead of
// its copy. When a page holds whole groups, a full group is copied straight: neighbouring lanes
// take neighbouring granules, so that a row is one or two lines to the memory system. Groups that
// are cut by the range, straddle pages, lack one or touch the pool's ends take the careful path,
// where lane (g, c) takes granules c, c + 4, ... of tokens g and g + 8. Groups are named by the
// distance of their first token from range.begin.
template <class Config>
struct RowsLoader {
  // Granules of a row that a pass copies, and the rows it copies them of. A few granules more than
  // half a warp are copied as sixteen, and the rest of all rows by itself.
  static constexpr bool kRest = Config::kGranules > 16 && Config::kGranules <= 20;
  static constexpr int kRowLanes = kRest ? 16 : Config::kGranules;
  static constexpr int kPassRows = 32 / kRowLanes;
  static constexpr int kRestLanes = kRest ? Config::kGranules - 16 : 1;

  const RowsParams& p;
  uint32_t bases;         // shared address of the sequence's table row and the head's first slot
  int span;               // tokens from range.begin that this block copies
  int to_table;           // from a distance to a place in the table row
  RowsWalk walk;          // at the group that is located next
  uint32_t lane_offset;   // of the lane's row and granule from the group's first slot
  uint32_t lane_target;   // the same in a stage
  uint32_t token_offset;  // of token lane mod 16
  int lane;
  bool straight_groups;

  // `distance` is that of the first group to be located.
  __device__ RowsLoader(const RowsParams& params, const RowsTile& tile, const RowsRange& range,
                        uint32_t shared_bases, int end_group, int distance, int lane_id)
      : p(params), bases(shared_bases), lane(lane_id) {
    // Slots that are read as whole words must lie on them.
    const int64_t strides = p.a.cache.stride_block | p.a.cache.stride_token | p.a.cache.stride_head;
    straight_groups = p.whole_groups && (tile.table_position & (kRowsGroupTokens - 1)) == 0 &&
                      strides % Config::kSlotAlignment == 0;
    const auto stride = static_cast<uint32_t>(p.a.cache.stride_token);
    // Computed once: the compiler would do it again for every group.
    lane_offset = keep(lane / kRowLanes * stride + 16 * (lane % kRowLanes));
    lane_target = keep(lane / kRowLanes * Config::kPitch + 16 * (lane % kRowLanes));
    token_offset = keep((lane & 15) * stride);
    const int64_t end =
        min(int64_t{range.end}, int64_t{range.origin} + int64_t{end_group} * kRowsGroupTokens);
    span = static_cast<int>(end - range.begin);
    to_table = range.to_table;
    walk.begin(p, distance + to_table);
  }

  __device__ uint32_t keep(uint32_t x) const { return __shfl_sync(~0u, x, lane); }

  __device__ bool sees(int distance) const { return distance >= 0 && distance < span; }

  // Reads the page of the warp's next group, which is at `distance`. A group past the range has
  // page 0, and only one that lies in a whole page of its own is copied from here.
  __device__ RowsPlace locate(int distance) {
    RowsPlace place = {0, walk.offset};
    if (distance < span && straight_groups) place.page = walk.page(p, bases);
    walk.step(p);
    return place;
  }

  // Whether issue<true>() serves the group: one whole page's, clear of the pool's ends, or past the
  // range.
  __device__ bool is_straight(int distance, const RowsPlace& place) const {
    const bool cut = distance < 0 || static_cast<uint32_t>(distance - (span - 15)) < 15u;
    return straight_groups && !cut && static_cast<uint32_t>(place.page) < p.straight_pages;
  }

  // False after a careful copy, whose rows may be marked as missing.
  template <bool kFast>
  __device__ bool issue(int distance, const RowsPlace& place, uint32_t stage) const {
    if constexpr (!kFast) {
      if (!__all_sync(~0u, is_straight(distance, place))) {
#pragma unroll 1
        for (int token = lane >> 2; token < kRowsGroupTokens; token += 8) {
          copy_carefully(distance + token, stage, token);
        }
        return false;
      }
    }
    const uint32_t stride = static_cast<uint32_t>(p.a.cache.stride_token);
    const uint64_t first =
        ptx::ld_shared_u64(bases + 8) +
        static_cast<uint64_t>(static_cast<uint32_t>(place.page)) * p.page_stride +
        static_cast<uint64_t>(place.offset) * stride;
    if (distance < span) {
      copy_rows<kRowLanes>(first + lane_offset, stage + lane_target, lane / kRowLanes);
      if constexpr (kRest) {
        const int row = lane / kRestLanes, at = 16 * (16 + lane % kRestLanes);
        copy_rows<kRestLanes>(first + row * stride + at, stage + row * Config::kPitch + at, row);
      }
    }
    // Two lanes a token write the same word.
    note(stage, lane & 15, (static_cast<uint32_t>(first) + token_offset) & 15);
    return true;
  }

  // Granules of every row, `kLanes` of each: the lane's are at `source`, of `row` and what follows.
  template <int kLanes>
  __device__ void copy_rows(uint64_t source, uint32_t target, int row) const {
    constexpr int kRows = 32 / kLanes, kPasses = (kRowsGroupTokens - 1) / kRows + 1;
    const uint32_t step = kRows * static_cast<uint32_t>(p.a.cache.stride_token);
    if (row >= kRows) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass * kRows + kRows <= kRowsGroupTokens || pass * kRows + row < kRowsGroupTokens) {
        ptx::cp_async16(target + pass * kRows * Config::kPitch, source & ~uint64_t{15});
      }
      source += step;
    }
  }

  // Where the token's slot starts in its stage; the top bit marks a visible token without a page.
  __device__ void note(uint32_t stage, int token, uint32_t phase) const {
    ptx::st_shared(stage + kRowsGroupTokens * Config::kPitch + 4 * token,
                   token * Config::kPitch + phase);
  }

  // By the four lanes of a token.
  __device__ void copy_carefully(int distance, uint32_t stage, int token) const {
    const int c = lane & 3;
    const uint32_t row = stage + token * Config::kPitch;
    const bool seen = sees(distance);
    uint32_t phase = 0, slot_index = 0;
    const int page = seen ? rows_page_of(p, bases, distance + to_table, &slot_index) : -1;
    if (static_cast<uint32_t>(page) < p.pool_pages) {
      const auto* slot = reinterpret_cast<const std::byte*>(ptx::ld_shared_u64(bases + 8)) +
                         static_cast<uint32_t>(page) * p.a.cache.stride_block +
                         slot_index * p.a.cache.stride_token;
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
