// The plan of the rows backend as arithmetic: tiles cover every query of every batch once, the
// workspace serves every smaller call, and every instance fits the devices it may meet.
#include "src/attention/cuda/rows_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace kvtile::cuda {
namespace {

constexpr KeyCode kKeys[] = {KeyCode::kFp8E4M3, KeyCode::kLloydMax4, KeyCode::kLloydMax3};
// Shared memory of a block and of an SM: sm_80, sm_86, sm_89 and sm_120, sm_90.
constexpr int kDevices[][2] = {{166912, 167936}, {101376, 102400}, {232448, 233472}};

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
        for (int64_t hint : {0, 1, 8}) {
          size_t before = 0;
          for (int64_t total_q = 0; total_q <= 40 * num_seqs; total_q += 1 + num_seqs / 3) {
            RowsShape shape;
            shape.num_seqs = num_seqs;
            shape.group = group;
            shape.num_kv_heads = 4;
            shape.head_dim = 128;
            shape.total_q = total_q;
            shape.max_q_len = hint;
            shape.raw_chunk = raw_chunk;
            const size_t bytes = rows_workspace_bytes(shape, 264);
            EXPECT_GE(bytes, before);
            before = bytes;
            const RowsPlan plan = make_rows_plan(shape, 264);
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
    for (KeyCode key : kKeys) {
      for (int head_dim : {64, 128, 256}) {
        const SlotFormat format{head_dim, key, ValueCode::kUniform4, true};
        const int most = rows_max_capacity(format, device[0], device[1]);
        EXPECT_GE(most, 8) << device[0] << " " << head_dim;
        for (int rows = 8; rows <= most; rows *= 2) {
          const RowsResidency residency = rows_residency(format, rows, device[0], device[1]);
          EXPECT_GE(residency.warps, kRowsMinWarps);
          EXPECT_EQ(residency.warps % rows_team_warps(head_dim, rows), 0);
          EXPECT_LE(residency.shared_bytes, device[0]);
          EXPECT_LE(residency.warps / rows_team_warps(head_dim, rows), 15);  // named barriers
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile::cuda
