// The plan of the rows backend as arithmetic: tiles cover every query of every batch once, the
// workspace serves every smaller call, and every instance fits the devices it may meet.
#include "src/attention/cuda/rows_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvtile::cuda {
namespace {

constexpr KeyCode kKeys[] = {KeyCode::kFp8E4M3, KeyCode::kLloydMax4, KeyCode::kLloydMax3};
struct Device {
  int arch, shared_per_block;
};
constexpr Device kDevices[] = {{80, 166912}, {86, 101376}, {120, 101376}, {90, 232448}};

struct Region {
  uint32_t begin, end;
};
void expect_apart(std::vector<Region> regions, int limit) {
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < regions.size(); ++i) {
    // An empty region is nowhere.
    if (regions[i].begin == regions[i].end) continue;
    EXPECT_LE(regions[i].end, regions[i + 1].begin);
  }
  for (const Region& region : regions) EXPECT_LE(region.end, static_cast<uint32_t>(limit));
}

TEST(RowsPlanTest, TilesOfSequencesDoNotOverlap) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    RowsShape shape;
    shape.num_seqs = 1 + static_cast<int>(random() % 40);
    shape.group = 1 + static_cast<int>(random() % 40);
    shape.num_kv_heads = 1 + static_cast<int>(random() % 8);
    shape.head_dim = 128;
    std::vector<int64_t> cu = {0};
    int64_t longest = 0;
    for (int s = 0; s < shape.num_seqs; ++s) {
      const int64_t q_len = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 70);
      longest = std::max(longest, q_len);
      cu.push_back(cu.back() + q_len);
    }
    shape.total_q = cu.back() + static_cast<int64_t>(random() % 3);
    if (random() % 2 == 0) shape.max_q_len = longest + static_cast<int64_t>(random() % 4);
    const RowsPlan plan = make_rows_plan(shape, 264);
    EXPECT_LE(plan.queries_per_tile * plan.heads_per_tile, plan.rows);
    EXPECT_GE(plan.heads_per_tile * plan.num_subtiles, shape.group);
    int64_t free = 0;
    for (int s = 0; s < shape.num_seqs; ++s) {
      const int64_t q_len = cu[static_cast<size_t>(s) + 1] - cu[static_cast<size_t>(s)];
      const int64_t base =
          rows_tile_base(plan.queries_per_tile, plan.tiles_per_seq, cu[static_cast<size_t>(s)], s);
      EXPECT_GE(base, free);
      free = base + (q_len + plan.queries_per_tile - 1) / plan.queries_per_tile;
      EXPECT_LE(free, plan.num_tiles);
    }
  }
}

TEST(RowsPlanTest, WorkspaceServesSmallerCallsAndItsOwnStates) {
  for (int num_seqs : {1, 2, 7, 64, 300}) {
    for (int group : {1, 4, 6, 24, 64}) {
      for (bool raw_chunk : {false, true}) {
        for (int64_t hint : {-1, 0, 1, 8}) {
          // -1: one row a sequence, by blocks of all heads.
          size_t before = 0;
          for (int64_t total_q = 0; total_q <= 40 * num_seqs; total_q += 1 + num_seqs / 3) {
            RowsShape shape;
            shape.num_seqs = num_seqs;
            shape.group = group;
            shape.num_kv_heads = 4;
            shape.head_dim = 128;
            shape.total_q = total_q;
            shape.max_q_len = std::abs(hint);
            shape.pages = hint < 0;
            shape.raw_chunk = raw_chunk;
            const size_t bytes = rows_workspace_bytes(shape, 264);
            EXPECT_GE(bytes, before);
            before = bytes;
            for (int verify_heads : {0, 1, 2, 4}) {
              shape.verify_heads = verify_heads;
              EXPECT_EQ(rows_workspace_bytes(shape, 264), bytes);
              const RowsPlan plan = make_rows_plan(shape, 264);
              EXPECT_EQ(plan.verify_heads, plan.rows > 8 ? verify_heads : 0);
              const int64_t states =
                  plan.num_tiles * plan.num_subtiles * plan.num_states() * shape.num_kv_heads;
              EXPECT_LE(static_cast<size_t>(states) * rows_state_floats(plan.rows, shape.head_dim) *
                            sizeof(float),
                        bytes);
            }
          }
        }
      }
    }
  }
}

TEST(RowsPlanTest, BatchInvariantSplitsFollowFromNothingOfTheBatch) {
  for (int group : {1, 4, 24, 64}) {
    for (int num_kv_heads : {1, 3, 8, 200}) {
      RowsShape shape;
      shape.num_seqs = 1;
      shape.total_q = 1;
      shape.num_kv_heads = num_kv_heads;
      shape.group = group;
      shape.head_dim = 128;
      shape.batch_invariant = true;
      const RowsPlan one = make_rows_plan(shape, 132);
      EXPECT_EQ(one.queries_per_tile, 1);
      EXPECT_EQ(one.num_tiles, 1);
      size_t before = rows_workspace_bytes(shape, 132);
      for (int num_seqs : {1, 5, 300}) {
        for (int64_t max_q_len : {0, 1, 7}) {
          for (int64_t total_q : {1, 16, 700}) {
            shape.num_seqs = num_seqs;
            shape.max_q_len = max_q_len;
            shape.total_q = total_q;
            shape.pages = total_q > 1;
            const RowsPlan plan = make_rows_plan(shape, 132);
            EXPECT_EQ(plan.queries_per_tile, 1);
            EXPECT_EQ(plan.tiles_per_seq, 0);
            EXPECT_EQ(plan.num_tiles, total_q);  // a tile is a row
            EXPECT_EQ(plan.num_splits, one.num_splits);
            EXPECT_EQ(plan.rows, one.rows);
            EXPECT_FALSE(plan.pages);
            EXPECT_GE(plan.launch_tiles, 1);
            EXPECT_LE(plan.launch_tiles, total_q);
            // One tile, or what the device's share of states allows.
            const int64_t states =
                plan.launch_tiles * plan.num_subtiles * num_kv_heads * plan.num_states();
            EXPECT_LE(states, std::max<int64_t>(kRowsInvariantWaves * 132,
                                                int64_t{plan.num_subtiles} * num_kv_heads));
            EXPECT_GE(rows_workspace_bytes(shape, 132), before);
          }
        }
      }
    }
  }
}

TEST(RowsPlanTest, OneSequenceFillsTheDevice) {
  RowsShape shape;
  shape.num_seqs = 1;
  shape.total_q = 1;
  shape.num_kv_heads = 8;
  shape.group = 4;
  shape.head_dim = 128;
  const RowsPlan plan = make_rows_plan(shape, 264);
  EXPECT_EQ(plan.rows, 8);
  EXPECT_EQ(plan.num_tiles, 1);
  EXPECT_EQ(plan.num_splits, 33);
}

TEST(RowsPlanTest, EveryDeviceHoldsEveryFormat) {
  for (const auto& device : kDevices) {
    const bool wide = rows_wide_table(device.arch);
    for (KeyCode key : kKeys) {
      for (int head_dim : {64, 128, 256}) {
        const SlotFormat format{head_dim, key, ValueCode::kUniform4, true};
        const int most = rows_max_capacity(format, device.shared_per_block, wide);
        EXPECT_GE(most, 8) << device.arch << " " << head_dim;
        for (int rows = 8; rows <= most; rows *= 2) {
          const RowsSizes sizes = rows_sizes(format, rows, wide);
          const RowsResidency residency =
              rows_residency(format, rows, device.shared_per_block, wide);
          EXPECT_GE(residency.warps, rows_min_warps(wide));
          EXPECT_EQ(residency.warps % sizes.team_warps, 0);
          EXPECT_LE(residency.shared_bytes, device.shared_per_block);
          EXPECT_LE(residency.warps / sizes.team_warps, 15);  // named barriers

          const RowsMemory memory = rows_memory(sizes, kRowsSharedBase, residency.warps);
          std::vector<Region> regions = {
              {kRowsSharedBase, memory.teams + residency.warps / sizes.team_warps * sizes.team},
              {memory.table, memory.table + sizes.table}};
          EXPECT_EQ(memory.table % sizes.table_alignment, 0);
          for (int warp = 0; warp < residency.warps; ++warp) {
            const uint32_t ring = memory.ring(warp, sizes.warp);
            EXPECT_EQ(ring % 16, 0u);
            regions.push_back({ring, ring + sizes.warp});
            if (warp % sizes.team_warps != 0) {
              EXPECT_EQ(ring, memory.ring(warp - 1, sizes.warp) + sizes.warp);
            }
          }
          expect_apart(regions, kRowsSharedStart + residency.shared_bytes);
        }
      }
    }
  }
}

TEST(RowsPlanTest, BlocksOfAllHeadsFitTheirMemory) {
  int served = 0;
  for (const auto& device : kDevices) {
    for (KeyCode key : kKeys) {
      for (int head_dim : {64, 128, 256}) {
        for (int heads = 1; heads <= 16; ++heads) {
          const SlotFormat format{head_dim, key, ValueCode::kUniform4, true};
          const int64_t chunk = int64_t{kRowsGroupTokens} * heads * format.slot_bytes();
          const bool wide = rows_wide_table(device.arch);
          const RowsPages pages = rows_pages(format, heads, chunk, device.shared_per_block, wide);
          if (pages.warps == 0) continue;
          EXPECT_TRUE(wide && heads <= kRowsPagesMaxHeads);
          ++served;
          EXPECT_EQ(pages.warps, pages.lanes * heads);
          EXPECT_GE(pages.stages, 2);
          EXPECT_LE(pages.stages, kRowsPagesMaxStages);
          EXPECT_LE(pages.shared_bytes, device.shared_per_block);
          const RowsSizes sizes = rows_sizes(format, kRowsPagesRows, wide);
          const int state = rows_state_bytes(head_dim, kRowsPagesRows);
          const RowsPagesMemory memory = rows_pages_memory(
              sizes, state, kRowsSharedBase, heads, pages.lanes, pages.stages, pages.chunk_bytes);
          const int count = pages.lanes * pages.stages;
          std::vector<Region> regions = {
              {kRowsSharedBase, memory.records + count * kRowsPagesRecord},
              {memory.table, memory.table + sizes.table}};
          for (int i = 0; i < count; ++i) {
            const uint32_t at = memory.chunk(i, pages.chunk_bytes);
            EXPECT_EQ(at % 16, 0u);
            regions.push_back({at, at + pages.chunk_bytes});
          }
          expect_apart(regions, kRowsSharedStart + pages.shared_bytes);
          // States take the place of chunks and table.
          regions.resize(1);
          regions.push_back({memory.chunks, memory.chunks + pages.warps * state});
          expect_apart(regions, kRowsSharedStart + pages.shared_bytes);
        }
      }
    }
  }
  EXPECT_GT(served, 40);
}

TEST(RowsPlanTest, BlocksOfWarpgroupsFitTheirMemory) {
  for (KeyCode key : kKeys) {
    for (int head_dim : {128, 256}) {
      for (int heads = 1; heads <= (head_dim == 128 ? 4 : 1); heads *= 2) {
        for (int rows : {16, 32}) {
          for (int phase : {0, 14}) {
            const SlotFormat format{head_dim, key, ValueCode::kUniform4, true};
            const int row_bytes = heads * format.slot_bytes();
            const RowsVerify verify =
                rows_verify(format, rows, heads, row_bytes, (phase + row_bytes + 15) / 16, 232448);
            ASSERT_GT(verify.warps, 0);
            EXPECT_EQ(verify.warps, head_dim == 128 ? 16 : 12);
            EXPECT_EQ(verify.warps, 4 * verify.heads * verify.lanes);
            EXPECT_GE(verify.stages, 2);
            EXPECT_LE(verify.shared_bytes, 232448);
            EXPECT_GE(verify.pitch, verify.copy_bytes);
            EXPECT_GE(verify.copy_bytes, phase + row_bytes);
            // Eight rows are read at once: an odd number of granules apart.
            EXPECT_EQ(verify.pitch % 32, 16);
            const RowsVerifyMemory memory =
                rows_verify_memory(format, rows, kRowsSharedBase, verify);
            const int tiles = rows / 8, count = verify.lanes * verify.stages * 4;
            const uint32_t weights = heads * verify.lanes * kRowsVerifyTokens * rows * 2;
            std::vector<Region> regions = {{kRowsSharedBase, memory.weights},
                                           {memory.weights, memory.weights + weights}};
            EXPECT_EQ(memory.records % 16, 0u);
            EXPECT_EQ(memory.weights % 128, 0u);
            // Queries, a core matrix each, and the entries of the table.
            const int pitch = rows_verify_query_pitch(key);
            for (int core = 0; core < heads * head_dim / 8 * tiles; ++core) {
              const uint32_t at = memory.query + core * pitch;
              EXPECT_EQ(at % 128, 0u);
              regions.push_back({at, at + 128});
            }
            for (uint32_t entry = 0; !is_fp8(key) && entry < 256; ++entry) {
              const uint32_t bytes = key == KeyCode::kLloydMax4 ? 128 : 256;
              regions.push_back({memory.table + 256 * entry, memory.table + 256 * entry + bytes});
            }
            const size_t fixed = regions.size();
            for (int i = 0; i < count; ++i) {
              const uint32_t at = memory.group(i, kRowsGroupTokens * verify.pitch);
              EXPECT_EQ(at % 16, 0u);
              regions.push_back({at, at + kRowsGroupTokens * verify.pitch});
            }
            expect_apart(regions, kRowsSharedStart + verify.shared_bytes);
            // States are exchanged over chunks, clear of the rest.
            regions.resize(fixed);
            const uint32_t states =
                verify.lanes > 1 ? heads * 4 * rows_verify_state_bytes(head_dim, rows) : 0;
            regions.push_back({memory.exchange, memory.exchange + states});
            expect_apart(regions, kRowsSharedStart + verify.shared_bytes);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile::cuda
