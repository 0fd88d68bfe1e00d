// Verify: 9 to 32 packed rows of a KV head by warpgroups. A warpgroup takes 64 tokens of one head
// at a time: tokens are the M dimension of S^T = K Q^T, value dimensions that of O^T = V^T P^T, and
// both A operands are dequantised straight into registers, so that nothing is unpacked twice and no
// rows are split over teams. Queries and weights are B operands in shared memory. A chunk of 64
// tokens arrives as one bulk copy a token; the last warp to leave it starts the copy that takes its
// place. docs/kernels/rows.md has the budget.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/rows_state.cuh"
#include "src/attention/cuda/sm80/rows_config.cuh"
#include "src/attention/cuda/sm80/rows_loader.cuh"
#include "src/attention/cuda/sm80/rows_unpack.cuh"
#include "src/attention/cuda/sm80/rows_warp.cuh"
#include "src/core/ptx.cuh"
#include "src/core/wgmma.cuh"

namespace kvtile::cuda {

// A quarter of 128 dimensions: a lane has four codes of a token.
template <bool kWords>
struct RowsValues<ValueCode::kUniform4, 32, kWords> : RowsValues<ValueCode::kUniform4, 64, false> {
  static constexpr int kBlocks = 1, kBlockTiles = 2, kSpanBytes = 16, kPairWords = 2;

  static __device__ uint32_t lane_offset(int g) { return 2 * g; }
  static __device__ int dim(int tile, int g) { return 4 * g + 2 * tile; }
  static __device__ void fetch(const uint32_t (&rows)[4], int, int,
                               uint32_t (&pairs)[2][kPairWords]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t low = ptx::ld_shared_u16(rows[2 * pair]);
      const uint32_t high = ptx::ld_shared_u16(rows[2 * pair + 1]);
      pairs[pair][0] = ptx::prmt(low, high, 0x2420);
      pairs[pair][1] = ptx::prmt(low, high, 0x2521);
    }
  }
  static __device__ void unpack(const uint32_t (&pairs)[2][kPairWords], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int byte = 0; byte < 2; ++byte) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        a[byte][2 * pair] = pairs[pair][byte];
        a[byte][2 * pair + 1] = pairs[pair][byte] & 0x00f000f0u;
      }
    }
  }
};

template <>
struct RowsValues<ValueCode::kUniform3, 32, false> {
  static constexpr float kCentre = 4.0f;
  static constexpr int kBlocks = 1, kBlockTiles = 2, kSpanBytes = 12, kPairWords = 1;

  // Twelve bits from bit 12g on lie in the two halves that start here.
  static __device__ uint32_t lane_offset(int g) { return 3 * g / 2 & ~1; }
  static __device__ int dim(int tile, int g) { return 4 * g + 2 * tile; }
  static __device__ float unit(int n) { return n % 3 == 0 ? 0x1p24f : n == 1 ? 0x1p21f : 0x1p18f; }
  static __device__ float centre(int tile, int odd) { return -kCentre / unit(2 * tile + odd); }
  static __device__ void decode(int tile, float even, float odd, float* low, float* high) {
    *low = even * unit(2 * tile);
    *high = odd * unit(2 * tile + 1);
  }
  static __device__ void fetch(const uint32_t (&rows)[4], int, int g,
                               uint32_t (&pairs)[2][kPairWords]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t run[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const uint32_t at = rows[2 * pair + t];
        run[t] = permute_bytes(ptx::ld_shared_u16(at), ptx::ld_shared_u16(at + 2), 0x5410) >>
                 (12 * g & 15);
      }
      pairs[pair][0] = permute_bytes(run[0], run[1], 0x5410);
    }
  }
  static __device__ void unpack(const uint32_t (&pairs)[2][kPairWords], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t x = pairs[pair][0];
      a[0][2 * pair] = x & 0x00070007u;
      a[0][2 * pair + 1] = x & 0x00380038u;
      a[1][2 * pair] = x & 0x01c001c0u;
      a[1][2 * pair + 1] = (x >> 9) & 0x00070007u;
    }
  }
};

// Warp w of a warpgroup scores tokens 16w to 16w + 15 and has a quarter of the value dimensions.
template <class Rows>
struct RowsVerifyConfig : Rows {
  static constexpr int kTeamWarps = 4;
  static constexpr int kWarpDims = Rows::kHeadDim / 4;
  static constexpr bool kQueryInRegisters = false;
  static constexpr int kThreads = 128 * rows_verify_warpgroups(Rows::kHeadDim);
  static constexpr int kQueryPitch = rows_verify_query_pitch(Rows::kKey);
  static constexpr int kQueryBytes = Rows::kHeadDim / 8 * Rows::kTiles * kQueryPitch;
  static constexpr int kScratch = 8 * Rows::kRows * 4;
  static constexpr int kWeights = kRowsVerifyTokens * Rows::kRows * 2;
  static constexpr int kStateBytes = rows_verify_state_bytes(Rows::kHeadDim, Rows::kRows);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// A chunk's record: the barriers of its arrival and of its last reader, the addresses of its
// groups, and a note of each. A note that is not 0 marks a group filled by hand; its low bits,
// tokens that are visible but have no page.
struct RowsVerifyRecord {
  static constexpr int kEmpty = 8, kAddress = 16, kNotes = 32;
  static constexpr uint32_t kByHand = 1u << kRowsGroupTokens;
};

// The chunks of one epoch that a warpgroup's lane takes.
template <class Config>
struct RowsVerifyPipeline {
  using Warp = RowsWarp<Config>;
  using Keys = typename Warp::Keys;
  using Values = typename Warp::Values;
  static constexpr int kTiles = Config::kTiles, kOutTiles = Warp::kOutTiles;
  static constexpr int kGroups = kRowsVerifyTokens / kRowsGroupTokens;
  // Products whose A operands are in registers at once.
  static constexpr int kBlocks = Keys::kBlockSteps >= 4 ? 1 : 4 / Keys::kBlockSteps;
  static constexpr int kKeySteps = kBlocks * Keys::kBlockSteps;
  // A batch is read while the products of the one before run, where registers allow it.
  static constexpr bool kAhead = kKeySteps <= 4;
  static constexpr int kValueGroups = kOutTiles == 2 ? 2 : 1;

  const RowsParams& p;
  const RowsRange& range;
  int lane, g, c, warp;  // of the warpgroup
  int warpgroup, head, chunk_lane;
  int first_head;    // of the block
  uint32_t records;  // of the lane
  // In a group, of token g, and of the lane's values of tokens 2c and 2c + 1. Eight tokens on, a
  // slot is as far from a granule.
  uint32_t key_offset, value_offset[2];
  uint32_t query, factors, scratch, weights;
  // Of the epoch.
  int position, span, group;
  // Of the chunk that is read next; goes on from epoch to epoch.
  uint32_t record, parity;
  uint32_t left;  // the chunk before it, of several heads; 0: none
  int turn;       // the head whose warpgroup starts the next copy

  __device__ RowsVerifyPipeline(const RowsParams& params, const RowsRange& keys, int block_head,
                                int thread)
      : p(params), range(keys), lane(thread & 31), first_head(block_head), parity(0) {
    g = lane >> 2;
    c = lane & 3;
    // Known to be the same in all lanes of a warp.
    warp = __shfl_sync(~0u, thread >> 5 & 3, 0);
    warpgroup = __shfl_sync(~0u, thread >> 7, 0);
    head = warpgroup % p.verify.heads;
    chunk_lane = warpgroup / p.verify.heads;
    records = record = p.verify_memory.records + chunk_lane * p.verify.stages * kRowsVerifyRecord;
    key_offset = keep(token_offset(g));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      value_offset[i] = keep(token_offset(2 * c + i) + Warp::value_offset(warp, g));
    }
    query = p.verify_memory.query + head * Config::kQueryBytes;
    factors = p.verify_memory.factors + head * 4 * Config::kRows;
    scratch = p.verify_memory.scratch + warpgroup * Config::kScratch;
    weights = p.verify_memory.weights + warpgroup * Config::kWeights;
    turn = 0;
  }

  // Whole granules that hold the block's heads of a token.
  __device__ uint32_t row_bytes(uint32_t phase) const {
    return (phase + p.verify.row_bytes + 15) & ~15u;
  }

  // The compiler would compute it again for every group.
  __device__ uint32_t keep(uint32_t x) const { return __shfl_sync(~0u, x, lane); }

  // Place of a token's slot in a group; its row there keeps its distance from a granule.
  __device__ uint32_t row_phase(int token) const {
    return (token * static_cast<uint32_t>(p.a.cache.stride_token) +
            first_head * static_cast<uint32_t>(p.a.cache.stride_head)) &
           15;
  }
  __device__ uint32_t token_offset(int token) const {
    return token * p.verify.pitch + row_phase(token) +
           head * static_cast<uint32_t>(p.a.cache.stride_head);
  }

  __device__ void sync() const { ptx::named_barrier_sync(1 + warpgroup, 128); }
  __device__ int stride() const { return p.verify.lanes * kRowsVerifyTokens; }
  __device__ bool sees(int distance) const { return distance >= 0 && distance < span; }
  __device__ uint32_t page_word(int group_index) const {
    return p.verify_memory.pages + 4 * group_index;
  }

  // By the whole block: reads the epoch's pages, and starts the first copies.
  __device__ void start(const RowsTile& tile, int first_group, int end_group) {
    const int first = range.origin - range.begin + first_group * kRowsGroupTokens;
    span = static_cast<int>(
        min(int64_t{range.end}, int64_t{range.origin} + int64_t{end_group} * kRowsGroupTokens) -
        range.begin);
    const bool straight = (tile.table_position & (kRowsGroupTokens - 1)) == 0;
    for (int i = static_cast<int>(threadIdx.x); i < end_group - first_group;
         i += static_cast<int>(blockDim.x)) {
      const int distance = first + i * kRowsGroupTokens;
      uint32_t in_page;
      const int page =
          straight ? rows_page_of(p, p.verify_memory.bases, distance + range.to_table, &in_page)
                   : -1;
      ptx::st_shared(page_word(i), static_cast<uint32_t>(page));
    }
    __syncthreads();
    group = chunk_lane * kGroups;
    position = first + group * kRowsGroupTokens;
    uint32_t filled = record;
#pragma unroll 1
    for (int s = 0; s < p.verify.stages; ++s) {
      if (take_turn()) issue(s, filled);
      filled = after(filled);
    }
  }

  __device__ bool take_turn() {
    const bool mine = head == turn;
    turn = turn + 1 == p.verify.heads ? 0 : turn + 1;
    return mine;
  }

  __device__ uint32_t after(uint32_t r) const {
    r += kRowsVerifyRecord;
    return r == records + p.verify.stages * kRowsVerifyRecord ? records : r;
  }

  __device__ void run(Warp& state) {
    left = 0;
    for (; position < span; position += stride(), group += p.verify.lanes * kGroups) {
      ptx::mbarrier_wait(record, static_cast<int>(parity));
      step(state);
      record = after(record);
      if (record == records) parity ^= 1;
    }
  }

  __device__ void step(Warp& state) {
    float x[kTiles][4];
    typename Warp::Slots slots;
    const uint32_t keys = ptx::ld_shared(record + RowsVerifyRecord::kAddress + 4 * warp);
    const uint32_t note = ptx::ld_shared(record + RowsVerifyRecord::kNotes + 4 * warp);
    score(state, keys + key_offset, keys + key_offset + 8 * p.verify.pitch, x, &slots);
    // Kept in registers for the exponentials alone.
    state.load_queries(0, factors, c);
    const int mine = position + kRowsGroupTokens * warp;
    if (__all_sync(~0u, range.is_fast(mine) && mine + kRowsGroupTokens <= span && note == 0))
        [[likely]] {
      weigh<false>(state, x, slots, ~0u);
    } else {
      // What no row sees, or nobody wrote, must not move the scale.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool lost = ((note >> (g + 8 * i)) & 1) != 0;
        if (lost) slots.key_scale[i] = NAN;
        if (lost || !sees(mine + g + 8 * i)) slots.value_scale[i] = 0.0f;
      }
      // A chunk may end after the last group.
      const bool none = mine >= span;
      const uint32_t visible = state.scale_and_hide(x, slots, p, !none && range.all_visible(mine),
                                                    p.verify_memory.ranges + 16 * c,
                                                    none ? 0x7fffff00 : range.begin + mine + g);
      weigh<true>(state, x, slots, visible);
    }
    accumulate(state);
  }

  static __device__ void load_keys(const Keys& keys, uint32_t key0, uint32_t key1, int batch,
                                   uint32_t (&a)[kKeySteps][4]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t loaded[Keys::kBlockSteps][4];
      keys.load(key0, key1, batch * kBlocks + b, loaded);
#pragma unroll
      for (int s = 0; s < Keys::kBlockSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[b * Keys::kBlockSteps + s][i] = loaded[s][i];
      }
    }
  }

  // S^T of the warpgroup's 64 tokens.
  __device__ void score(const Warp& state, uint32_t slot0, uint32_t slot1, float (&x)[kTiles][4],
                        typename Warp::Slots* slots) const {
    const Keys keys(p.verify_memory.table);
    const uint64_t queries =
        ptx::matrix_descriptor(query, {kTiles * Config::kQueryPitch, Config::kQueryPitch});
    const uint32_t key0 = slot0 + Keys::kLaneBytes * c, key1 = slot1 + Keys::kLaneBytes * c;
    float norms[4] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = 0.0f;
    }
    constexpr int kBatches = Keys::kBlocks / kBlocks;
    uint32_t a[kAhead ? 2 : 1][kKeySteps][4];
    load_keys(keys, key0, key1, 0, a[0]);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      constexpr int kLast = kBatches - 1;
      uint32_t(&mine)[kKeySteps][4] = a[kAhead ? batch % 2 : 0];
      if (!kAhead && batch > 0) load_keys(keys, key0, key1, batch, mine);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        ptx::wgmma_rs<0>(
            x, mine[s],
            ptx::advance(queries, (batch * kKeySteps + s) * 2 * kTiles * Config::kQueryPitch),
            true);
      }
      ptx::wgmma_commit();
      if (kAhead && batch < kLast) load_keys(keys, key0, key1, batch + 1, a[(batch + 1) % 2]);
      if constexpr (kRotatedKeys<Config::kKey>) {
        // As in RowsWarp::score().
        constexpr uint32_t kOne = half2_broadcast(0x3c00);
        uint32_t squares[4];
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            squares[s % 2 * 2 + t] =
                half2_fma(mine[s][t + 2], mine[s][t + 2], half2_mul(mine[s][t], mine[s][t]));
          }
          if (s % 2 == 1) ptx::mma_m16n8k16(norms, squares, kOne, kOne);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::pin(mine);
    }
    ptx::pin(x);
    state.read_slots(slot0, slot1, norms, p, slots);
  }

  // Scores to weights in shared memory and row sums.
  template <bool kMasked>
  __device__ void weigh(Warp& state, float (&x)[kTiles][4], const typename Warp::Slots& slots,
                        uint32_t visible) const {
    float e[kTiles][4];
    const bool out_of_range = state.template exponentials<kMasked>(x, slots, visible, e);
    // Everyone is here: nobody's products read the last weights any more.
    if (ptx::named_barrier_or(1 + warpgroup, 128, out_of_range)) [[unlikely]] {
      if constexpr (!kMasked) state.scale_scores(x, slots);
      state.rescale(x, slots, scratch, warp, g, c, [this] { sync(); });
      state.template exponentials<true>(x, slots, visible, e);
    }
    const float unlimit = power_reciprocal(state.limit);
    const uint32_t token = weights + chunk_offset(0, kRowsGroupTokens * warp + g, 64) + 4 * c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = slots.value_scale[i] * unlimit;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float w[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          w[r] = e[n][2 * i + r] * scale;
          if (kMasked && ((visible >> (4 * n + 2 * i + r)) & 1) == 0) w[r] = 0.0f;
        }
        ptx::st_shared(token + chunk_offset(n, 8 * i, 64), ptx::cvt_half2(w[0], w[1]));
      }
    }
    ptx::fence_proxy_async();
    state.template add<kMasked>(e, slots, visible);
  }

  // The packed values of some groups.
  using Packed = uint32_t[kValueGroups][Values::kBlocks][2][Values::kPairWords];
  __device__ void fetch_values(int batch, Packed& packed) const {
#pragma unroll
    for (int k = 0; k < kValueGroups; ++k) {
      const uint32_t values =
          ptx::ld_shared(record + RowsVerifyRecord::kAddress + 4 * (batch * kValueGroups + k));
      const uint32_t row0 = values + value_offset[0], row1 = values + value_offset[1];
      const uint32_t rows[4] = {row0, row1, row0 + 8 * p.verify.pitch, row1 + 8 * p.verify.pitch};
#pragma unroll
      for (int block = 0; block < Values::kBlocks; ++block) {
        Values::fetch(rows, block, g, packed[k][block]);
      }
    }
  }

  // O^T += V^T P^T for the 64 tokens, then takes the middle code off. Values are read one batch
  // ahead, the first one before the weights of the other warps are there.
  __device__ void accumulate(Warp& state) {
    constexpr uint32_t kOne = half2_broadcast(0x3c00), kOnes[4] = {kOne, kOne, kOne, kOne};
    constexpr int kBatches = kGroups / kValueGroups;
    const uint64_t probabilities = ptx::matrix_descriptor(weights, value_operand(64));
    Packed packed;
    fetch_values(0, packed);
    sync();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.weight_sum[n][i] = 0.0f;
    }
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      uint32_t a[kValueGroups][Values::kBlocks][Values::kBlockTiles][4];
#pragma unroll
      for (int k = 0; k < kValueGroups; ++k) {
#pragma unroll
        for (int block = 0; block < Values::kBlocks; ++block) {
          Values::unpack(packed[k][block], a[k][block]);
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kValueGroups; ++k) {
        const uint64_t b = ptx::advance(
            probabilities, chunk_offset(0, kRowsGroupTokens * (batch * kValueGroups + k), 64));
#pragma unroll
        for (int m = 0; m < kOutTiles; ++m) {
          ptx::wgmma_rs<1>(state.o[m], a[k][m / Values::kBlockTiles][m % Values::kBlockTiles], b,
                           true);
        }
        ptx::wgmma_rs<1>(state.weight_sum, kOnes, b, true);
      }
      ptx::wgmma_commit();
      if (batch + 1 < kBatches) {
        fetch_values(batch + 1, packed);
      } else {
        leave();
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int k = 0; k < kValueGroups; ++k) {
#pragma unroll
        for (int block = 0; block < Values::kBlocks; ++block) ptx::pin(a[k][block]);
      }
    }
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) ptx::pin(state.o[m]);
    ptx::pin(state.weight_sum);
    state.centre();
  }

  // The warp has read its chunk. What everyone has left is filled again: by several warpgroups, who
  // are not in step, the chunk before.
  __device__ void leave() {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(record + RowsVerifyRecord::kEmpty);
    const bool alone = p.verify.heads == 1;
    const uint32_t free = alone ? record : left;
    const int ahead = alone ? p.verify.stages : p.verify.stages - 1;
    left = record;
    if (!take_turn() || free == 0 || position + ahead * stride() >= span) return;
    const uint32_t phase = !alone && record == records ? parity ^ 1 : parity;
    ptx::mbarrier_wait(free + RowsVerifyRecord::kEmpty, static_cast<int>(phase));
    issue(ahead, free);
  }

  // By a warpgroup, a group a warp: starts the copy of the chunk that is so many chunks ahead.
  __device__ void issue(int ahead, uint32_t into) const {
    const int distance = position + ahead * stride() + kRowsGroupTokens * warp;
    if (distance - kRowsGroupTokens * warp >= span) return;
    if (distance >= span) {
      // Not a group of the range.
      if (lane == 0) ptx::mbarrier_arrive(into);
      return;
    }
    const uint32_t page = __shfl_sync(
        ~0u, ptx::ld_shared(page_word(group + ahead * p.verify.lanes * kGroups + warp)), 0);
    if (page >= p.bulk_pages) [[unlikely]]
      return fill_by_hand(distance, into);
    const uint32_t target =
        __shfl_sync(~0u, ptx::ld_shared(into + RowsVerifyRecord::kAddress + 4 * warp), 0);
    const auto at = static_cast<uint32_t>(distance + range.to_table);
    const uint32_t in_page =
        at - p.a.cache.block_divisor.divide(at) * p.a.cache.block_divisor.divisor;
    const uint64_t source = reinterpret_cast<uint64_t>(p.a.cache.pages) +
                            static_cast<uint64_t>(first_head * p.a.cache.stride_head) +
                            uint64_t{page} * p.page_stride +
                            uint64_t{in_page} * static_cast<uint32_t>(p.a.cache.stride_token);
    if (page < p.wide_pages) [[likely]] {
      copy_rows<true>(source, target, into);
    } else {
      copy_rows<false>(source, target, into);
    }
  }

  // kWide: the same number of granules of every row.
  template <bool kWide>
  __device__ void copy_rows(uint64_t source, uint32_t target, uint32_t into) const {
    if (lane == 0) {
      int bytes = kRowsGroupTokens * p.verify.copy_bytes;
      if constexpr (!kWide) {
        bytes = 0;
        for (int t = 0; t < kRowsGroupTokens; ++t) bytes += row_bytes(row_phase(t));
      }
      ptx::st_shared(into + RowsVerifyRecord::kNotes + 4 * warp, 0);
      ptx::mbarrier_arrive_expect(into, bytes);
    }
    __syncwarp();
    constexpr int kUnroll = kWide ? 8 : 1;
#pragma unroll kUnroll
    for (int t = 0; t < kRowsGroupTokens; ++t) {
      const uint32_t phase = static_cast<uint32_t>(source) & 15;
      ptx::bulk_copy_of_warp(target, source & ~uint64_t{15},
                             kWide ? p.verify.copy_bytes : static_cast<int>(row_bytes(phase)),
                             into);
      source += static_cast<uint32_t>(p.a.cache.stride_token);
      target += p.verify.pitch;
    }
  }

  // The warp's group of a chunk, slot by slot.
  __device__ void fill_by_hand(int distance, uint32_t into) const {
    uint32_t note = RowsVerifyRecord::kByHand;
    const uint32_t group_address = ptx::ld_shared(into + RowsVerifyRecord::kAddress + 4 * warp);
#pragma unroll 1
    for (int t = 0; t < kRowsGroupTokens; ++t) {
      if (!sees(distance + t)) continue;
      uint32_t in_page;
      const int page =
          rows_page_of(p, p.verify_memory.bases, distance + t + range.to_table, &in_page);
      if (static_cast<uint32_t>(page) >= p.pool_pages) {
        note |= 1u << t;
        continue;
      }
      const std::byte* slots = p.a.cache.slot(static_cast<uint32_t>(page), in_page, first_head);
      const uint32_t target = group_address + t * p.verify.pitch + row_phase(t);
#pragma unroll 1
      for (int h = 0; h < p.verify.heads; ++h) {
        const auto head_offset = static_cast<uint32_t>(h * p.a.cache.stride_head);
#pragma unroll 1
        for (int byte = 2 * lane; byte < Config::kSlotBytes; byte += 64) {
          ptx::st_shared_u16(target + head_offset + byte,
                             __ldg(reinterpret_cast<const uint16_t*>(slots + head_offset + byte)));
        }
      }
    }
    // The bytes are seen by the other warps, and overwritten by later bulk copies.
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::st_shared(into + RowsVerifyRecord::kNotes + 4 * warp, note);
      ptx::mbarrier_arrive(into);
    }
  }
};

// The states of a head's warpgroups become one, in the order of the lanes.
template <class Config>
__device__ void merge_verify_lanes(RowsWarp<Config>& state, const RowsVerifyPipeline<Config>& at) {
  const uint32_t exchange =
      at.p.verify_memory.exchange + (4 * at.head + at.warp) * Config::kStateBytes + 4 * at.lane;
#pragma unroll 1
  for (int l = 1; l < at.p.verify.lanes; ++l) {
    if (at.chunk_lane == l) state.store_state(exchange);
    __syncthreads();
    if (at.chunk_lane == 0) state.merge_state(exchange);
    __syncthreads();
  }
}

// A warpgroup's state to a partial state, or into what it holds already: each warp has a quarter of
// the dimensions of all rows.
template <class Config>
__device__ void write_verify_state(const RowsWarp<Config>& state,
                                   const RowsVerifyPipeline<Config>& at, const RowsState& partial,
                                   int num_rows, bool merge) {
  using Values = typename RowsWarp<Config>::Values;
  float mine[Config::kTiles][2], theirs[Config::kTiles][2], high[Config::kTiles][2],
      sum[Config::kTiles][2];
#pragma unroll
  for (int n = 0; n < Config::kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * n + 2 * at.c + r;
      high[n][r] = state.offset[n][r];
      sum[n][r] = state.l[n][r];
      mine[n][r] = 1.0f;
      theirs[n][r] = 0.0f;
      if (merge && row < num_rows) {
        const float other = partial.sums[2 * row];
        high[n][r] = fmaxf(high[n][r], other);
        mine[n][r] = state_weight(state.offset[n][r], high[n][r]);
        theirs[n][r] = state_weight(other, high[n][r]);
        sum[n][r] = fmaf(partial.sums[2 * row + 1], theirs[n][r], sum[n][r] * mine[n][r]);
      }
    }
  }
  at.sync();
#pragma unroll
  for (int n = 0; n < Config::kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * n + 2 * at.c + r;
      if (row >= num_rows) continue;
#pragma unroll
      for (int m = 0; m < RowsWarp<Config>::kOutTiles; ++m) {
        const int d = at.warp * Config::kWarpDims + Values::dim(m, at.g);
        float2* out = reinterpret_cast<float2*>(partial.out + row * Config::kHeadDim + d);
        float2 x = {state.o[m][n][r] * mine[n][r], state.o[m][n][r + 2] * mine[n][r]};
        if (merge) {
          const float2 old = *out;
          x = {fmaf(old.x, theirs[n][r], x.x), fmaf(old.y, theirs[n][r], x.y)};
        }
        *out = x;
      }
      if (at.warp == 0 && at.g == 0) {
        partial.sums[2 * row] = high[n][r];
        partial.sums[2 * row + 1] = sum[n][r];
      }
    }
  }
}

#endif  // sm_90a

template <class Rows>
__global__ void __launch_bounds__(RowsVerifyConfig<Rows>::kThreads, 1)
    rows_verify_kernel(const __grid_constant__ RowsParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
  using Config = RowsVerifyConfig<Rows>;
  __shared__ RowsTile tile;
  __shared__ RowsRange range;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  const int heads = p.verify.heads;
  const RowsVerifyMemory& memory = p.verify_memory;

  // Heads vary fastest: neighbouring heads of a token share sectors.
  const uint32_t head_blocks = p.a.cache.num_kv_heads / heads;
  const int first_head = static_cast<int>(blockIdx.x % head_blocks) * heads;
  uint32_t block = blockIdx.x / head_blocks;
  const int64_t first_state = int64_t{block} * p.a.cache.num_kv_heads + first_head;
  const int split = block % p.plan.num_states();
  block /= p.plan.num_states();
  if (warp != 0) {
    fill_key_table<Config::kKey>(p, memory.table, threadIdx.x - 32, blockDim.x - 32);
  }
  clear_queries(memory.factors, memory.ranges);
  const int cores = heads * Config::kQueryBytes / Config::kQueryPitch;
  for (int i = threadIdx.x; i < 8 * cores; i += blockDim.x) {
    ptx::st_shared4(memory.query + i / 8 * Config::kQueryPitch + i % 8 * 16, 0, 0, 0, 0);
  }
  // By the last warps: the first one is awaited.
  const int chunk = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (chunk < p.verify.lanes * p.verify.stages) {
    const uint32_t record = memory.records + chunk * kRowsVerifyRecord;
    ptx::mbarrier_init(record, 4);
    ptx::mbarrier_init(record + RowsVerifyRecord::kEmpty, 4 * heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::st_shared(record + RowsVerifyRecord::kAddress + 4 * i,
                     memory.group(4 * chunk + i, kRowsGroupTokens * p.verify.pitch));
    }
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
    }
  }
  __syncthreads();
  if (tile.num_queries <= 0) return;

  const auto partial_of = [&](int h) {
    return rows_state(p, first_state + h, Config::kRows, Config::kHeadDim);
  };
  if (p.plan.raw_chunk && split == p.plan.num_splits) {
    for (int h = 0; h < heads; ++h) {
      raw_chunk_state<Config::kHeadDim>(p, tile, first_head + h, partial_of(h), warp, warps, lane);
    }
    return;
  }
  if (range.first_group >= range.end_group) {
    for (int h = 0; h < heads; ++h) {
      store_empty_state<Config::kHeadDim>(partial_of(h), tile.num_rows());
    }
    return;
  }

  const int epoch_groups = p.verify.lanes * kRowsVerifyEpochGroups;
  RowsWarp<Config> state;
  RowsVerifyPipeline<Config> pipeline(p, range, first_head, threadIdx.x);
  for (int first = range.first_group; first < range.end_group; first += epoch_groups) {
    pipeline.start(tile, first, min(range.end_group, first + epoch_groups));
    if (first == range.first_group) {
      const QueryRows<Config, Config::kQueryPitch> queries{p, tile, pipeline.query,
                                                           pipeline.factors, lane};
      queries.prepare(first_head + pipeline.head, 1, 4 * pipeline.chunk_lane + pipeline.warp,
                      4 * p.verify.lanes);
      if (warp == 0) write_ranges<Config::kRows>(p, tile, memory.ranges, lane);
      ptx::fence_proxy_async();
      __syncthreads();
    }
    state.reset();
    pipeline.run(state);
    state.finish(pipeline.scratch, pipeline.warp, pipeline.g, pipeline.c,
                 [&pipeline] { pipeline.sync(); });
    // Chunks are idle once every warp is here, and free again when the states are out.
    __syncthreads();
    merge_verify_lanes<Config>(state, pipeline);
    if (pipeline.chunk_lane == 0) {
      write_verify_state<Config>(state, pipeline, partial_of(pipeline.head), tile.num_rows(),
                                 first > range.first_group);
    }
    ptx::fence_proxy_async();
    __syncthreads();
  }
#endif
}

}  // namespace kvtile::cuda
