// Decode of up to eight packed rows a KV head where the heads of a page lie together: a block takes
// all heads of a range of keys. Groups of 16 tokens arrive as bulk copies of everything they hold;
// warp (lane of pages, head) reads its head's slots where they lie. The last warp to leave a group
// starts the copy that takes its place, so nobody waits for room. docs/kernels/rows.md says why.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"
#include "src/attention/cuda/sm80/rows_config.cuh"
#include "src/attention/cuda/sm80/rows_loader.cuh"
#include "src/attention/cuda/sm80/rows_unpack.cuh"
#include "src/attention/cuda/sm80/rows_warp.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

// A chunk's record: barrier, address, note, how many warps have left it, and the place of the first
// group it takes. A note that is not 0 marks a chunk filled by hand; its low bits, tokens that are
// visible but have no page.
struct RowsRecord {
  static constexpr int kAddress = 8, kNote = 12, kLeft = 16, kPlace = 24;
  static constexpr uint32_t kByHand = 1u << 16;
};

// The warp's groups of one epoch: those of the block's [first_group, end_group) that its lane of
// pages takes. Distances are counted from range.begin.
template <class Config>
struct RowsPagesPipeline {
  using Warp = RowsWarp<Config>;

  const RowsParams& p;
  const RowsRange& range;
  int lane, g, c, head;
  uint32_t records, records_end;  // of the warp's lane of pages
  uint32_t key_offset;            // of token g's slot in a chunk
  uint32_t value_offset;          // of the lane's values of token 2c in a chunk
  uint32_t query;
  bool straight_groups;
  // Of the epoch.
  int position, stride, span;
  RowsWalk walk;  // at the group that is located next
  RowsPlace next;
  // Of the chunk that is read next; goes on from epoch to epoch.
  uint32_t record, parity;

  __device__ RowsPagesPipeline(const RowsParams& params, const RowsTile& tile,
                               const RowsRange& keys, int warp, int lane_id)
      : p(params), range(keys), lane(lane_id), g(lane_id >> 2), c(lane_id & 3), parity(0) {
    head = warp % p.a.cache.num_kv_heads;
    const int page_lane = warp / p.a.cache.num_kv_heads;
    const int bytes = p.pages.stages * kRowsPagesRecord;
    records = record = p.pages_memory.records + page_lane * bytes;
    records_end = records + bytes;
    const auto stride_token = static_cast<uint32_t>(p.a.cache.stride_token);
    key_offset = keep(head * p.chunk_head_stride + g * stride_token);
    value_offset =
        keep(head * p.chunk_head_stride + 2 * c * stride_token + Warp::value_offset(0, g));
    query = p.pages_memory.query + head * Config::kSizes.query + 16 * lane;
    straight_groups = (tile.table_position & (kRowsGroupTokens - 1)) == 0;
  }

  // The compiler would compute it again for every group.
  __device__ uint32_t keep(uint32_t x) const { return __shfl_sync(~0u, x, lane); }

  // Reads pages and starts the first copies.
  __device__ void start(int first_group, int end_group) {
    const int page_lane =
        static_cast<int>(records - p.pages_memory.records) / (p.pages.stages * kRowsPagesRecord);
    stride = p.pages.lanes * kRowsGroupTokens;
    position = range.origin - range.begin + (first_group + page_lane) * kRowsGroupTokens;
    span = static_cast<int>(
        min(int64_t{range.end}, int64_t{range.origin} + int64_t{end_group} * kRowsGroupTokens) -
        range.begin);
    walk.begin(p, position + range.to_table);
    // All pages are asked for before one is waited for.
    uint32_t filled = record;
#pragma unroll
    for (int s = 0; s < kRowsPagesMaxStages; ++s) {
      if (s >= p.pages.stages) break;
      const RowsPlace place = locate(position + s * stride);
      if (head == 0) {
        ptx::st_shared2(filled + RowsRecord::kPlace, static_cast<uint32_t>(place.page),
                        place.offset);
      }
      filled = after(filled);
    }
    next = locate(position + p.pages.stages * stride);
    if (head != 0) return;
    __syncwarp();
#pragma unroll 1
    for (int s = 0; s < p.pages.stages; ++s) {
      uint32_t page;
      RowsPlace place;
      ptx::ld_shared2(filled + RowsRecord::kPlace, &page, &place.offset);
      place.page = static_cast<int>(page);
      issue(position + s * stride, place, filled);
      filled = after(filled);
    }
  }

  __device__ uint32_t after(uint32_t r) const {
    return r + kRowsPagesRecord == records_end ? records : r + kRowsPagesRecord;
  }

  __device__ void run(Warp& state) {
    for (; position < span; position += stride) {
      ptx::mbarrier_wait(record, static_cast<int>(parity));
      uint32_t chunk, note;
      ptx::ld_shared2(record + RowsRecord::kAddress, &chunk, &note);
      const bool fast = range.is_fast(position) && note == 0;
      if (__all_sync(~0u, fast)) [[likely]] {
        step<true>(state, chunk, note);
      } else {
        step<false>(state, chunk, note);
      }
      // Every lane has read what it needs.
      __syncwarp();
      uint32_t left = 0;
      if (lane == 0) {
        left = ptx::shared_increment(record + RowsRecord::kLeft,
                                     static_cast<uint32_t>(p.a.cache.num_kv_heads - 1));
      }
      const int ahead = position + p.pages.stages * stride;
      if (__shfl_sync(~0u, left, 0) == static_cast<uint32_t>(p.a.cache.num_kv_heads - 1)) {
        issue(ahead, next, record);
      }
      next = locate(ahead + stride);
      record = after(record);
      if (record == records) parity ^= 1;
    }
  }

  // One group. kFast: every row sees all of it, no soft cap.
  template <bool kFast>
  __device__ void step(Warp& state, uint32_t chunk, uint32_t note) {
    constexpr bool kMasked = !kFast;
    const auto stride_token = static_cast<uint32_t>(p.a.cache.stride_token);
    float x[1][4], e[1][4];
    uint32_t weights[1][2];
    typename Warp::Slots slots;
    const uint32_t slot = chunk + key_offset;
    const bool lost[2] = {((note >> g) & 1) != 0, ((note >> (g + 8)) & 1) != 0};
    state.template score<kFast>({{slot, slot + 8 * stride_token}, {lost[0], lost[1]}},
                                p.pages_memory.table, query, p, g, c, x, &slots);
    uint32_t visible = ~0u;
    if constexpr (!kFast) {
      // What no row sees, or nobody wrote, must not move the scale.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lost[i] || !sees(position + g + 8 * i)) slots.value_scale[i] = 0.0f;
      }
      visible = state.scale_and_hide(x, slots, p.a.softcap, range.all_visible(position),
                                     p.pages_memory.ranges + 16 * c, range.begin + position + g);
    }
    if (__any_sync(~0u, state.template exponentials<kMasked>(x, slots, visible, e))) [[unlikely]] {
      if constexpr (kFast) state.scale_scores(x, slots);
      state.rescale(x, slots, 0, 0, g, c, [] {});
      state.template exponentials<true>(x, slots, visible, e);
    }
    state.template pack<kMasked>(e, slots, visible, weights);
    state.template add<kMasked>(e, slots, visible);
    const uint32_t values = chunk + value_offset;
    state.accumulate(
        {values, values + stride_token, values + 8 * stride_token, values + 9 * stride_token},
        weights, g);
  }

  __device__ bool sees(int distance) const { return distance >= 0 && distance < span; }

  // Reads the page of the next group, which is at `distance`.
  __device__ RowsPlace locate(int distance) {
    RowsPlace place = {-1, walk.offset};
    if (distance < span) place.page = walk.page(p, p.pages_memory.bases);
    walk.step(p);
    return place;
  }

  // By a whole warp: starts the copy of a group into the chunk of record `into`.
  __device__ void issue(int distance, const RowsPlace& place, uint32_t into) const {
    if (distance >= span) return;
    const uint32_t chunk = ptx::ld_shared(into + RowsRecord::kAddress);
    if (straight_groups && static_cast<uint32_t>(place.page) < p.bulk_pages) {
      if (lane != 0) return;
      const uint64_t source =
          ptx::ld_shared_u64(p.pages_memory.bases + 8) +
          static_cast<uint64_t>(static_cast<uint32_t>(place.page)) * p.page_stride +
          static_cast<uint64_t>(place.offset) * static_cast<uint32_t>(p.a.cache.stride_token);
      ptx::st_shared(into + RowsRecord::kNote, 0);
      ptx::mbarrier_arrive_expect(into, p.pages.chunk_bytes);
      const int bytes = p.pages.chunk_bytes / p.chunk_copies;
#pragma unroll 1
      for (int i = 0; i < p.chunk_copies; ++i) {
        ptx::bulk_copy(chunk + i * bytes,
                       reinterpret_cast<const void*>(source + i * p.a.cache.stride_head), bytes,
                       into);
      }
      return;
    }
    uint32_t lost = 0;
#pragma unroll 1
    for (int token = 0; token < kRowsGroupTokens; ++token) {
      if (!sees(distance + token)) continue;
      uint32_t in_page;
      const int page =
          rows_page_of(p, p.pages_memory.bases, distance + token + range.to_table, &in_page);
      if (static_cast<uint32_t>(page) >= p.pool_pages) {
        lost |= 1u << token;
        continue;
      }
      const auto* slots =
          reinterpret_cast<const std::byte*>(ptx::ld_shared_u64(p.pages_memory.bases + 8)) +
          static_cast<uint32_t>(page) * p.a.cache.stride_block + in_page * p.a.cache.stride_token;
#pragma unroll 1
      for (int h = 0; h < p.a.cache.num_kv_heads; ++h) {
        const uint32_t target =
            chunk + h * p.chunk_head_stride + token * static_cast<uint32_t>(p.a.cache.stride_token);
#pragma unroll 1
        for (int byte = 2 * lane; byte < Config::kSlotBytes; byte += 64) {
          ptx::st_shared_u16(
              target + byte,
              __ldg(reinterpret_cast<const uint16_t*>(slots + h * p.a.cache.stride_head + byte)));
        }
      }
    }
    // The bytes are seen by the other warps, and overwritten by later bulk copies.
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::st_shared(into + RowsRecord::kNote, RowsRecord::kByHand | lost);
      ptx::mbarrier_arrive(into);
    }
  }
};

// The states of a head's warps become one, always in the same order; the first warp has it.
template <class Config>
__device__ void merge_page_lanes(RowsWarp<Config>& state, uint32_t exchange, int heads, int lanes,
                                 int page_lane, int head, int lane) {
  constexpr int kStateBytes = rows_state_bytes(Config::kHeadDim, Config::kRows);
  for (int live = lanes; live > 1;) {
    const int half = (live + 1) / 2;
    if (page_lane >= half && page_lane < live) {
      state.store_state(exchange + ((page_lane - half) * heads + head) * kStateBytes + 4 * lane);
    }
    __syncthreads();
    if (page_lane + half < live) {
      state.merge_state(exchange + (page_lane * heads + head) * kStateBytes + 4 * lane);
    }
    __syncthreads();
    live = half;
  }
}

#endif  // sm_90

template <class Config>
__global__ void __launch_bounds__(32 * kRowsPagesWarps, 1)
    rows_pages_kernel(const __grid_constant__ RowsParams p) {
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
  if constexpr (kRowsWide) {
    __shared__ RowsTile tile;
    __shared__ RowsRange range;
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31;
    const int heads = p.a.cache.num_kv_heads, head = warp % heads, page_lane = warp / heads;
    const RowsPagesMemory& memory = p.pages_memory;

    uint32_t block = blockIdx.x;
    const int split = block % p.plan.num_states();
    block /= p.plan.num_states();
    fill_key_table<Config::kKey>(p, memory.table, threadIdx.x, blockDim.x);
    const int chunks = p.pages.lanes * p.pages.stages;
    if (static_cast<int>(threadIdx.x) < chunks) {
      const uint32_t record = memory.records + threadIdx.x * kRowsPagesRecord;
      ptx::mbarrier_init(record, 1);
      ptx::st_shared(record + RowsRecord::kAddress, memory.chunk(threadIdx.x, p.pages.chunk_bytes));
      ptx::st_shared(record + RowsRecord::kLeft, 0);
      ptx::fence_mbarrier_init();
    }
    if (static_cast<int>(threadIdx.x) < heads)
      ptx::st_shared(memory.factors + 8 * threadIdx.x + 4, 0);
#if __CUDA_ARCH__ >= 900
    // Nothing before this is read from memory. Combine may settle where blocks leave room.
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
#endif
    if (warp == 0) {
      const RowsTile found =
          find_rows_tile(p, block / p.plan.num_subtiles, block % p.plan.num_subtiles, lane);
      if (lane == 0) {
        tile = found;
        range = rows_packed_range(p, found, split);
        ptx::st_shared_u64(memory.bases, reinterpret_cast<uint64_t>(p.a.table_row(found.seq)));
        ptx::st_shared_u64(memory.bases + 8, reinterpret_cast<uint64_t>(p.a.cache.pages));
      }
    }
    __syncthreads();
    if (tile.num_queries <= 0) return;

    const auto partial_of = [&](int h) {
      return rows_state(p, int64_t{blockIdx.x} * heads + h, Config::kRows, Config::kHeadDim);
    };
    if (p.plan.raw_chunk && split == p.plan.num_splits) {
      for (int h = 0; h < heads; ++h) {
        raw_chunk_state<Config::kHeadDim>(p, tile, h, partial_of(h), warp, warps, lane);
      }
      return;
    }
    if (range.first_group >= range.end_group) {
      for (int h = 0; h < heads; ++h) {
        store_empty_state<Config::kHeadDim>(partial_of(h), tile.num_rows());
      }
      return;
    }

    const int epoch_groups = p.pages.lanes * (kRowsEpochTokens / kRowsGroupTokens);
    RowsWarp<Config> state;
    RowsPagesPipeline<Config> pipeline(p, tile, range, warp, lane);
    for (int first = range.first_group; first < range.end_group; first += epoch_groups) {
      pipeline.start(first, min(range.end_group, first + epoch_groups));
      if (first == range.first_group) {
        constexpr int kMostRows = kRowsPagesRows / (kRowsPagesWarps / kRowsPagesMaxHeads);
        QueryRows<Config::kHeadDim, Config::kRows, kMostRows> queries(p, tile, head, page_lane,
                                                                      p.pages.lanes, lane);
        queries.template prepare<Config::kKey>(p, tile, memory.query + head * Config::kSizes.query,
                                               head == 0 ? memory.ranges : 0,
                                               memory.factors + 8 * head, lane);
        state.factor = ptx::ld_shared_float(memory.factors + 8 * head);
        state.load_queries(pipeline.query);
      }
      state.reset();
      pipeline.run(state);
      state.finish(0, 0, pipeline.g, pipeline.c, [] {});
      // Chunks are idle once every warp is here, and free again when the states are out.
      __syncthreads();
      merge_page_lanes(state, memory.exchange, heads, p.pages.lanes, page_lane, head, lane);
      if (page_lane == 0) {
        state.write_state(partial_of(head), tile.num_rows(), first > range.first_group, lane);
      }
      ptx::fence_proxy_async();
      __syncthreads();
    }
  }
#endif
}

}  // namespace kvtile::cuda
