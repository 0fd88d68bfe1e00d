// Decode and verify: up to 32 packed rows (query x head of a group) of one KV head against the
// packed cache, split over key ranges. A team of warps shares its rows; every warp owns a ring of
// packed groups of 16 tokens in shared memory, dequantises in registers and feeds mma.sync with
// tokens as the M dimension, so that eight rows cost one MMA column. docs/kernels/rows.md has the
// budget. Every slot is copied once per tile; hidden slots are not read; a visible token without a
// page turns its readers into NaN.
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

// The addresses and roles of a warp.
template <class Config>
struct RowsRole {
  static constexpr int kWarpBytes = Config::kSizes.warp;
  int lane, g, c, team, team_warp, teams;
  const RowsMemory& memory;
  uint32_t scratch, team_ring;  // of its team

  __device__ RowsRole(const RowsMemory& shared, int warp, int warps, int lane_id)
      : lane(lane_id),
        g(lane_id >> 2),
        c(lane_id & 3),
        team(warp / Config::kTeamWarps),
        team_warp(warp % Config::kTeamWarps),
        teams(warps / Config::kTeamWarps),
        memory(shared) {
    scratch = memory.teams + team * Config::kSizes.team;
    // Computed once: the compiler would do it again for every group.
    team_ring = __shfl_sync(~0u, memory.ring(team * Config::kTeamWarps, kWarpBytes), 0);
  }

  __device__ uint32_t own_ring() const { return team_ring + team_warp * kWarpBytes; }
  __device__ void sync_team() const {
    if constexpr (Config::kTeamWarps == 1) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(1 + team, 32 * Config::kTeamWarps);
    }
  }
};

// The main loop of a warp over the groups [first_group, end_group) of its block: group `i` of the
// block goes to warp i mod warps, so a team takes neighbouring groups.
template <class Config>
struct RowsPipeline {
  static constexpr int kStages = Config::kStages;
  using Loader = RowsLoader<Config>;

  const RowsParams& p;
  const RowsRole<Config>& role;
  const RowsRange& range;
  Loader loader;
  int position;        // of the warp's group: its first token's distance from range.begin
  int team_position;   // of the team's first group
  int stride;          // from a group to the warp's next
  int end;             // of the groups of this pipeline
  int careful_rounds;  // until the last careful copy has left the ring
  RowsPlace next;

  // Reads pages and starts the first copies.
  __device__ RowsPipeline(const RowsParams& params, const RowsRole<Config>& warp_role,
                          const RowsTile& tile, const RowsRange& keys, int first_group,
                          int end_group)
      : p(params),
        role(warp_role),
        range(keys),
        loader(params, tile, range, warp_role.memory.bases, end_group,
               first_distance(range, first_group,
                              warp_role.team * Config::kTeamWarps + warp_role.team_warp),
               warp_role.lane),
        position(first_distance(range, first_group,
                                warp_role.team * Config::kTeamWarps + warp_role.team_warp)),
        team_position(first_distance(range, first_group, warp_role.team * Config::kTeamWarps)),
        stride(warp_role.teams * Config::kTeamWarps * kRowsGroupTokens),
        end(range.origin + end_group * kRowsGroupTokens - range.begin) {
    careful_rounds = 0;
    RowsPlace places[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) places[s] = loader.locate(position + s * stride);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (!loader.template issue<false>(position + s * stride, places[s],
                                        role.own_ring() + s * Config::kStageBytes)) {
        careful_rounds = kStages;
      }
      ptx::cp_async_commit();
    }
    next = places[kStages - 1];
  }

  __device__ void run(RowsWarp<Config>& state) {
    constexpr int kCentreRounds = kRowsCentreSteps / Config::kTeamWarps;
    uint32_t stage = 0, fill = (kStages - 1) * Config::kStageBytes, parity = 0;
    int rounds = 0;
    for (; team_position < end; team_position += stride, position += stride) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();
      const int ahead = position + (kStages - 1) * stride;
      const bool fast = position < end && range.is_fast(position) && careful_rounds <= 0 &&
                        loader.is_straight(ahead, next);
      --careful_rounds;
      if (__all_sync(~0u, fast)) [[likely]] {
        step<true>(state, 0, true, stage, fill, parity);
      } else {
        // A warp without a group in its team's last round sees nothing.
        const bool none = position >= end;
        step<false>(state, none ? 0x7fffff00 : range.begin + position,
                    !none && range.all_visible(position), stage, fill, parity);
      }
      if (++rounds % kCentreRounds == 0) state.centre();
      parity ^= 1;
      stage = stage + Config::kStageBytes == Config::kRingBytes ? 0 : stage + Config::kStageBytes;
      fill = fill + Config::kStageBytes == Config::kRingBytes ? 0 : fill + Config::kStageBytes;
    }
    ptx::cp_async_wait<0>();
  }

  static __device__ int first_distance(const RowsRange& range, int first_group, int warp) {
    return range.origin - range.begin + (first_group + warp) * kRowsGroupTokens;
  }

  // One group. kFast: every row sees all of it, no soft cap, and the next copy is straight.
  template <bool kFast>
  __device__ void step(RowsWarp<Config>& state, int base, bool all_visible, uint32_t stage,
                       uint32_t fill, uint32_t parity) {
    constexpr int kTiles = Config::kTiles;
    constexpr bool kMasked = !kFast;
    const uint32_t ring = role.own_ring();
    // The stage that the warp, and its partner, left in the last round.
    if constexpr (Config::kTeamWarps == 1) refill<kFast>(ring + fill);
    float x[kTiles][4], e[kTiles][4];
    uint32_t weights[kTiles][2];
    typename RowsWarp<Config>::Slots slots;
    const uint32_t notes = ring + stage + kRowsGroupTokens * Config::kPitch + 4 * role.g;
    const uint32_t note[2] = {ptx::ld_shared(notes), ptx::ld_shared(notes + 32)};
    state.score(ring + stage + row_offset<kFast>(note[0]),
                ring + stage + row_offset<kFast>(note[1]), role.memory.table,
                role.memory.query + 16 * role.lane, p, role.c, x, &slots);
    uint32_t visible = ~0u;
    if constexpr (!kFast) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (static_cast<int>(note[i]) < 0) slots.key_scale[i] = NAN;
      }
      // A stage that holds no group of this round still holds an older one, or nothing.
      if (position >= end) slots.value_scale[0] = slots.value_scale[1] = 0.0f;
      visible = state.scale_and_hide(x, slots, p, all_visible, role.memory.ranges + 16 * role.c,
                                     base + role.g);
    }
    const bool out_of_range = state.template exponentials<kMasked>(x, slots, visible, e);
    if constexpr (Config::kTeamWarps == 1) {
      if (__any_sync(~0u, out_of_range)) [[unlikely]]
        move<kFast>(state, x, slots, visible, e);
      state.template pack<kMasked>(e, slots, visible, weights);
      state.template add<kMasked>(e, slots, visible);
      accumulate<kFast>(state, ring + stage, weights);
    } else {
      // Weights change hands through shared memory; a maximum that moves moves for both.
      const uint32_t buffer = role.scratch + Config::kScratchBytes +
                              parity * Config::kTeamWarps * Config::kWeightBytes + 8 * role.lane;
      const uint32_t mine = buffer + role.team_warp * Config::kWeightBytes;
      state.template pack<kMasked>(e, slots, visible, weights);
      hand_over(mine, weights);
      if (ptx::named_barrier_or(1 + role.team, 32 * Config::kTeamWarps, out_of_range))
          [[unlikely]] {
        move<kFast>(state, x, slots, visible, e);
        state.template pack<true>(e, slots, visible, weights);
        hand_over(mine, weights);
        role.sync_team();
      }
      refill<kFast>(ring + fill);
      state.template add<kMasked>(e, slots, visible);
#pragma unroll 1
      for (int t = 0; t < Config::kTeamWarps; ++t) {
        uint32_t packed[kTiles][2];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          ptx::ld_shared2(buffer + t * Config::kWeightBytes + 256 * n, &packed[n][0],
                          &packed[n][1]);
        }
        accumulate<false>(state, role.team_ring + t * RowsRole<Config>::kWarpBytes + stage, packed);
      }
    }
  }

  // From what the loader noted of a stage's rows.
  template <bool kPresent>
  static __device__ uint32_t row_offset(uint32_t note) {
    return kPresent ? note : note & 0x7fffffffu;
  }
  template <bool kPresent>
  __device__ void accumulate(RowsWarp<Config>& state, uint32_t stage,
                             const uint32_t (&weights)[Config::kTiles][2]) const {
    const uint32_t notes = stage + kRowsGroupTokens * Config::kPitch + 8 * role.c;
    uint32_t rows[4];
    ptx::ld_shared2(notes, &rows[0], &rows[1]);
    ptx::ld_shared2(notes + 32, &rows[2], &rows[3]);
    const uint32_t first = stage + RowsWarp<Config>::value_offset(role.team_warp, role.g);
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = first + row_offset<kPresent>(rows[i]);
    state.accumulate_from(rows, role.g, weights);
  }

  template <bool kFast>
  __device__ void refill(uint32_t stage) {
    if (!loader.template issue<kFast>(position + (kStages - 1) * stride, next, stage)) {
      careful_rounds = kStages;
    }
    ptx::cp_async_commit();
    next = loader.locate(position + kStages * stride);
  }

  template <bool kFast>
  __device__ void move(RowsWarp<Config>& state, float (&x)[Config::kTiles][4],
                       const typename RowsWarp<Config>::Slots& slots, uint32_t visible,
                       float (&e)[Config::kTiles][4]) {
    if constexpr (kFast) state.scale_scores(x, slots);
    state.rescale(x, slots, role.scratch, role.team_warp, role.g, role.c,
                  [this] { role.sync_team(); });
    state.template exponentials<true>(x, slots, visible, e);
  }

  __device__ void hand_over(uint32_t address, const uint32_t (&weights)[Config::kTiles][2]) const {
#pragma unroll
    for (int n = 0; n < Config::kTiles; ++n) {
      ptx::st_shared2(address + 256 * n, weights[n][0], weights[n][1]);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, 1)
    rows_kernel(const __grid_constant__ RowsParams p) {
  // Kept out of the registers of the main loop.
  __shared__ RowsTile tile;
  __shared__ RowsRange range;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const RowsRole<Config> role(p.memory, warp, warps, threadIdx.x & 31);

  // Heads vary fastest: neighbouring heads of a token share sectors.
  uint32_t block = blockIdx.x;
  const int kv_head = block % p.a.cache.num_kv_heads;
  block /= p.a.cache.num_kv_heads;
  const int split = block % p.plan.num_states();
  block /= p.plan.num_states();
  if (warp != 0)
    fill_key_table<Config::kKey>(p, role.memory.table, threadIdx.x - 32, blockDim.x - 32);
  clear_queries(role.memory.factors, role.memory.ranges);
#if __CUDA_ARCH__ >= 900
  // Nothing before this is read from memory. Combine may settle where blocks leave room.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
#endif
  if (warp == 0) {
    const RowsTile found =
        find_rows_tile(p, block / p.plan.num_subtiles, block % p.plan.num_subtiles, role.lane);
    if (role.lane == 0) {
      tile = found;
      range = rows_packed_range(p, found, split);
      ptx::st_shared_u64(role.memory.bases, reinterpret_cast<uint64_t>(p.a.table_row(found.seq)));
      ptx::st_shared_u64(
          role.memory.bases + 8,
          reinterpret_cast<uint64_t>(p.a.cache.pages + kv_head * p.a.cache.stride_head));
    }
  }
  __syncthreads();
  if (tile.num_queries <= 0) return;

  const RowsState partial = rows_state(p, blockIdx.x, Config::kRows, Config::kHeadDim);
  if (p.plan.raw_chunk && split == p.plan.num_splits) {
    raw_chunk_state<Config::kHeadDim>(p, tile, kv_head, partial, warp, warps, role.lane);
    return;
  }
  if (range.first_group >= range.end_group) {
    store_empty_state<Config::kHeadDim>(partial, tile.num_rows());
    return;
  }

  const int epoch_groups = warps * (kRowsEpochTokens / kRowsGroupTokens);
  RowsWarp<Config> state;
  for (int first = range.first_group; first < range.end_group; first += epoch_groups) {
    RowsPipeline<Config> pipeline(p, role, tile, range, first,
                                  min(range.end_group, first + epoch_groups));
    if (first == range.first_group) {
      const QueryRows<Config> queries{p, tile, role.memory.query, role.memory.factors, role.lane};
      queries.prepare(kv_head, 1, warp, warps);
      if (warp == warps - 1) write_ranges<Config::kRows>(p, tile, role.memory.ranges, role.lane);
      __syncthreads();
      state.load_queries(role.memory.query + 16 * role.lane, role.memory.factors, role.c);
    }
    state.reset();
    pipeline.run(state);
    const auto sync_team = [&role] { role.sync_team(); };
    state.finish(role.scratch, role.team_warp, role.g, role.c, sync_team);

    // Rings are idle once every warp is here.
    __syncthreads();
    state.store_state(role.own_ring() + 4 * role.lane);
    __syncthreads();
    merge_teams<Config>(role.memory, role.teams, partial, tile, first > range.first_group, warp,
                        warps, role.lane);
    __syncthreads();
  }
}

}  // namespace kvtile::cuda
