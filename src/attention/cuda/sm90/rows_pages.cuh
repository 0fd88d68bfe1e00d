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

// A chunk's record: barrier, address, note, and how many warps have left it. A note that is not 0
// marks a chunk filled by hand; its low bits, tokens that are visible but have no page.
struct RowsRecord {
  static constexpr int kAddress = 8, kNote = 12, kLeft = 16;
  static constexpr uint32_t kByHand = 1u << 16;
};

// The warp's groups of one epoch: those of the block's [first_group, end_group) that its lane of
// pages takes. Distances are counted from range.begin.
template <class Config>
struct RowsPagesPipeline {
  using Warp = RowsWarp<Config>;
  // Wide accumulators leave no room for values that are read ahead.
  static constexpr bool kReadAhead = Config::kHeadDim <= 128;

  const RowsParams& p;
  const RowsRange& range;
  int lane, g, c, head, page_lane;
  uint32_t records;       // of the warp's lane of pages
  uint32_t key_offset;    // of token g's slot in a chunk
  uint32_t value_offset;  // of the lane's values of token 2c in a chunk
  uint32_t query;
  bool straight_groups;  // what lies in one page of its own can be copied whole
  // Of the epoch.
  int position, span;
  // Pages of the 32 groups that hold the next one to be copied, and of the 32 after: lane by lane.
  int pages, next_pages;
  int copied;  // groups that a copy was started for
  // Of the chunk that is read next; goes on from epoch to epoch.
  uint32_t record, parity;

  // Of the warp alone: the range need not be known yet.
  __device__ RowsPagesPipeline(const RowsParams& params, const RowsRange& keys, int kv_head,
                               int lane_of_pages, int lane_id)
      : p(params),
        range(keys),
        lane(lane_id),
        g(lane_id >> 2),
        c(lane_id & 3),
        head(kv_head),
        page_lane(lane_of_pages),
        parity(0) {
    records = record = p.pages_memory.records + page_lane * p.pages.stages * kRowsPagesRecord;
    const auto stride_token = static_cast<uint32_t>(p.a.cache.stride_token);
    key_offset = keep(head * p.chunk_head_stride + g * stride_token);
    value_offset =
        keep(head * p.chunk_head_stride + 2 * c * stride_token + Warp::value_offset(0, g));
    query = p.pages_memory.query + head * Config::kSizes.query + 16 * lane;
  }

  // The compiler would compute it again for every group.
  __device__ uint32_t keep(uint32_t x) const { return __shfl_sync(~0u, x, lane); }

  // Reads pages and starts the first copies.
  __device__ void start(const RowsTile& tile, int first_group, int end_group) {
    straight_groups = (tile.table_position & (kRowsGroupTokens - 1)) == 0;
    position = range.origin - range.begin + (first_group + page_lane) * kRowsGroupTokens;
    span = static_cast<int>(
        min(int64_t{range.end}, int64_t{range.origin} + int64_t{end_group} * kRowsGroupTokens) -
        range.begin);
    pages = locate(position + lane * stride());
    copied = p.pages.stages;
    if (head == 0) {
      uint32_t filled = record;
#pragma unroll 1
      for (int s = 0; s < p.pages.stages; ++s) {
        issue(position + s * stride(), __shfl_sync(~0u, pages, s), filled);
        filled = after(filled);
      }
    }
    next_pages = locate(position + (32 + lane) * stride());
  }

  // From a group of the warp to its next.
  __device__ int stride() const { return p.pages.lanes * kRowsGroupTokens; }

  __device__ uint32_t after(uint32_t r) const {
    r += kRowsPagesRecord;
    return r == records + p.pages.stages * kRowsPagesRecord ? records : r;
  }

  __device__ void run(Warp& state) {
    for (; position < span; position += stride()) {
      ptx::mbarrier_wait(record, static_cast<int>(parity));
      uint32_t chunk, note;
      ptx::ld_shared2(record + RowsRecord::kAddress, &chunk, &note);
      step(state, chunk, note, range.is_fast(position) && note == 0);
      record = after(record);
      if (record == records) parity ^= 1;
      if ((++copied & (kRowsCentreSteps - 1)) != 0) continue;
      state.centre();
      if ((copied & 31) == 0) {
        pages = next_pages;
        next_pages = locate(position + (p.pages.stages + 33 + lane) * stride());
      }
    }
  }

  // One group. `fast`: every row sees all of it, and there is no soft cap.
  __device__ void step(Warp& state, uint32_t chunk, uint32_t note, bool fast) {
    const auto stride_token = static_cast<uint32_t>(p.a.cache.stride_token);
    float x[1][4], e[1][4];
    uint32_t weights[1][2], left = 0;
    typename Warp::Slots slots;
    const uint32_t slot = chunk + key_offset, value = chunk + value_offset;
    const uint32_t values[4] = {value, value + stride_token, value + 8 * stride_token,
                                value + 9 * stride_token};
    state.score(slot, slot + 8 * stride_token, p.pages_memory.table, query, p, c, x, &slots);
    typename Warp::FetchedValues fetched;
    if constexpr (kReadAhead) {
      state.fetch_values(values, g, fetched);
      left = leave();
    }
    if (__all_sync(~0u, fast)) [[likely]] {
      weigh<false>(state, x, slots, ~0u, e, weights);
    } else {
      // What no row sees, or nobody wrote, must not move the scale.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool lost = ((note >> (g + 8 * i)) & 1) != 0;
        if (lost) slots.key_scale[i] = NAN;
        if (lost || !sees(position + g + 8 * i)) slots.value_scale[i] = 0.0f;
      }
      const uint32_t visible =
          state.scale_and_hide(x, slots, p, range.all_visible(position),
                               p.pages_memory.ranges + 16 * c, range.begin + position + g);
      weigh<true>(state, x, slots, visible, e, weights);
    }
    if constexpr (kReadAhead) {
      refill(left);
      state.accumulate(fetched, weights);
    } else {
      state.accumulate_from(values, g, weights);
      refill(leave());
    }
  }

  // Scores to weights and row sums.
  template <bool kMasked>
  __device__ void weigh(Warp& state, float (&x)[1][4], const typename Warp::Slots& slots,
                        uint32_t visible, float (&e)[1][4], uint32_t (&weights)[1][2]) const {
    if (__any_sync(~0u, state.template exponentials<kMasked>(x, slots, visible, e))) [[unlikely]] {
      if constexpr (!kMasked) state.scale_scores(x, slots);
      state.rescale(x, slots, 0, 0, g, c, [] {});
      state.template exponentials<true>(x, slots, visible, e);
    }
    state.template pack<kMasked>(e, slots, visible, weights);
    state.template add<kMasked>(e, slots, visible);
  }

  // Says that the warp has read its chunk; in lane 0, how many warps said so before.
  __device__ uint32_t leave() const {
    __syncwarp();
    return lane != 0 ? 0
                     : ptx::shared_increment(record + RowsRecord::kLeft,
                                             static_cast<uint32_t>(p.a.cache.num_kv_heads - 1));
  }

  // The last warp to leave a chunk fills it again.
  __device__ void refill(uint32_t left) const {
    const auto last = static_cast<uint32_t>(p.a.cache.num_kv_heads - 1);
    if (!__any_sync(~0u, lane == 0 && left == last)) return;
    issue(position + p.pages.stages * stride(), __shfl_sync(~0u, pages, copied & 31), record);
  }

  __device__ bool sees(int distance) const { return distance >= 0 && distance < span; }

  // Page that holds the group at `distance`; -1: none, or not one.
  __device__ int locate(int distance) const {
    if (distance >= span || !straight_groups) return -1;
    uint32_t in_page;
    return rows_page_of(p, p.pages_memory.bases, distance + range.to_table, &in_page);
  }

  // By a whole warp: starts the copy of a group into the chunk of record `into`.
  __device__ void issue(int distance, int first_page, uint32_t into) const {
    if (distance >= span) return;
    const uint32_t chunk = ptx::ld_shared(into + RowsRecord::kAddress);
    if (static_cast<uint32_t>(first_page) < p.bulk_pages) {
      if (lane != 0) return;
      const auto at = static_cast<uint32_t>(distance + range.to_table);
      const uint32_t offset =
          at - p.a.cache.block_divisor.divide(at) * p.a.cache.block_divisor.divisor;
      const uint64_t source =
          ptx::ld_shared_u64(p.pages_memory.bases + 8) +
          static_cast<uint64_t>(static_cast<uint32_t>(first_page)) * p.page_stride +
          static_cast<uint64_t>(offset) * static_cast<uint32_t>(p.a.cache.stride_token);
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

// The states of a head's warps, added in index order, to the partial state of the block, or into
// what it holds already. The head's warps take output tiles in turn.
template <class Config>
__device__ void merge_page_lanes(const RowsWarp<Config>& state, const RowsParams& p,
                                 const RowsTile& tile, bool merge) {
  using Warp = RowsWarp<Config>;
  constexpr int kStateBytes = rows_state_bytes(Config::kHeadDim, Config::kRows);
  constexpr int kMost = Warp::kOutTiles / 2;  // there are at least two lanes of pages
  // Read back, so that nothing that follows from it takes registers in the main loop.
  const int thread = __shfl_sync(~0u, static_cast<int>(threadIdx.x), threadIdx.x);
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, c = lane & 3;
  const int heads = p.a.cache.num_kv_heads, lanes = p.pages.lanes;
  const int head = warp % heads, page_lane = warp / heads, num_rows = tile.num_rows();
  const RowsState partial =
      rows_state(p, int64_t{blockIdx.x} * heads + head, Config::kRows, Config::kHeadDim);
  const auto state_of = [&](int t) {
    return p.pages_memory.chunks + (t * heads + head) * kStateBytes + 4 * lane;
  };
  const auto out_of = [&](int r, int m) {
    return reinterpret_cast<float2*>(partial.out + (2 * c + r) * Config::kHeadDim +
                                     Warp::Values::dim(m, g));
  };
  state.store_state(state_of(page_lane));
  __syncthreads();
  bool owned[2];
  float old[2], high[2], l[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * c + r;
    owned[r] = row < num_rows;
    old[r] = merge && owned[r] ? partial.sums[2 * row] : -INFINITY;
    l[r] = merge && owned[r] ? partial.sums[2 * row + 1] : 0.0f;
    high[r] = old[r];
  }
  if (merge) __syncthreads();  // one warp writes the sums anew
#pragma unroll 1
  for (int first = 0; first < lanes; first += 4) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t at = state_of(min(first + t, lanes - 1));
      high[0] = fmaxf(high[0], ptx::ld_shared_float(at));
      high[1] = fmaxf(high[1], ptx::ld_shared_float(at + 128));
    }
  }
  float x[kMost][4] = {};
  if (merge) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weight = state_weight(old[r], high[r]);
      l[r] *= weight;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        const int m = page_lane + k * lanes;
        if (m >= Warp::kOutTiles || !owned[r]) continue;
        const float2 before = *out_of(r, m);
        x[k][r] = before.x * weight;
        x[k][r + 2] = before.y * weight;
      }
    }
  }
#pragma unroll 1
  for (int t = 0; t < lanes; ++t) {
    const uint32_t at = state_of(t);
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = state_weight(ptx::ld_shared_float(at + 128 * r), high[r]);
      l[r] = fmaf(ptx::ld_shared_float(at + 128 * (2 + r)), weight[r], l[r]);
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int m = page_lane + k * lanes;
      if (m >= Warp::kOutTiles) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[k][i] = fmaf(ptx::ld_shared_float(at + 512 * (1 + m) + 128 * i), weight[i % 2], x[k][i]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!owned[r]) continue;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int m = page_lane + k * lanes;
      if (m >= Warp::kOutTiles) break;
      *out_of(r, m) = {x[k][r], x[k][r + 2]};
    }
    if (page_lane == 0 && g == 0) {
      partial.sums[4 * c + 2 * r] = high[r];
      partial.sums[4 * c + 2 * r + 1] = l[r];
    }
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
    if (warp != 0) {
      fill_key_table<Config::kKey>(p, memory.table, threadIdx.x - 32, blockDim.x - 32);
    }
    clear_queries(memory.factors, memory.ranges);
    const int chunks = p.pages.lanes * p.pages.stages;
    // By the last warps: the first one is awaited.
    const int chunk = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    if (chunk < chunks) {
      const uint32_t record = memory.records + chunk * kRowsPagesRecord;
      ptx::mbarrier_init(record, 1);
      ptx::st_shared(record + RowsRecord::kAddress, memory.chunk(chunk, p.pages.chunk_bytes));
      ptx::st_shared(record + RowsRecord::kLeft, 0);
      ptx::fence_mbarrier_init();
    }
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
    RowsPagesPipeline<Config> pipeline(p, range, head, page_lane, lane);
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
    // Queries are prepared by warps that start no copies; where each has some to start, by half of
    // them.
    const int lanes = p.pages.lanes;
    const int helper = heads == 1  ? page_lane - lanes / 2
                       : head != 0 ? page_lane * (heads - 1) + head - 1
                                   : -1;
    if (helper >= 0) {
      const QueryRows<Config> queries{p, tile, memory.query, memory.factors, lane};
      queries.prepare(0, heads, helper, heads == 1 ? lanes - lanes / 2 : lanes * (heads - 1));
    }
    for (int first = range.first_group; first < range.end_group; first += epoch_groups) {
      pipeline.start(tile, first, min(range.end_group, first + epoch_groups));
      if (first == range.first_group) {
        if (warp == 0) write_ranges<Config::kRows>(p, tile, memory.ranges, lane);
        __syncthreads();
        state.load_queries(pipeline.query, memory.factors + head * Config::kSizes.factors,
                           pipeline.c);
      }
      state.reset();
      pipeline.run(state);
      state.finish(0, 0, pipeline.g, pipeline.c, [] {});
      // Chunks and the key table are idle once every warp is here: states take their place.
      __syncthreads();
      merge_page_lanes(state, p, tile, first > range.first_group);
      if (first + epoch_groups >= range.end_group) return;
      __syncthreads();
      fill_key_table<Config::kKey>(p, memory.table, threadIdx.x, blockDim.x);
      ptx::fence_proxy_async();
      __syncthreads();
    }
  }
#endif
}

}  // namespace kvtile::cuda
