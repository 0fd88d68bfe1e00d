// The cost estimates behind backend "cuda": they grow with rows and context, the choice has no
// cliff, does not follow lengths, and the figures are the measured ones.
#include "src/attention/cuda/cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "tests/cuda/parts.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile::cuda {
namespace {

using testing::h200;
using testing::small_part;

AttentionCall make_call(const SlotFormat& format, int num_kv_heads, int group, int num_seqs,
                        int64_t q_len) {
  AttentionCall call;
  call.cache = make_cache(nullptr, 0, 16, num_kv_heads, format);
  call.num_heads = num_kv_heads * group;
  call.num_seqs = num_seqs;
  call.total_q = num_seqs * q_len;
  call.max_q_len = q_len;
  call.softmax_scale = 1.0f;
  return call;
}

double chosen_us(const AttentionCall& call, int64_t seq_len, const DeviceInfo& device) {
  const bool rows = check_packed_rows(call).ok() && rows_are_cheaper(call, device);
  return rows ? rows_cost_us(call, seq_len, device)
              : tile_cost_us(cheaper_tile(device), call, seq_len, device);
}

using Cost = double(const AttentionCall&, int64_t, const DeviceInfo&);

double portable_cost_us(const AttentionCall& call, int64_t seq_len, const DeviceInfo& device) {
  return tile_cost_us(TileEngine::kPortable, call, seq_len, device);
}
double hopper_cost_us(const AttentionCall& call, int64_t seq_len, const DeviceInfo& device) {
  return tile_cost_us(TileEngine::kHopper, call, seq_len, device);
}

template <typename Visit>
void for_each_shape(const Visit& visit) {
  for (const DeviceInfo& device : {h200(), small_part()}) {
    for (const testing::FormatName& name : testing::format_names()) {
      for (int head_dim : {64, 128, 256}) {
        const SlotFormat format = testing::make_format(name.preset, head_dim, name.fp8);
        for (int group : {1, 3, 6, 16, 40}) {
          for (int num_seqs : {1, 16, 200}) {
            SCOPED_TRACE(device.name + " " + testing::format_label(name, head_dim) + " group " +
                         std::to_string(group) + " batch " + std::to_string(num_seqs));
            visit(device, format, group, num_seqs);
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CostTest, GrowsWithRowsAndContext) {
  for_each_shape([](const DeviceInfo& device, const SlotFormat& format, int group, int num_seqs) {
    for (Cost* cost :
         std::initializer_list<Cost*>{rows_cost_us, portable_cost_us, hopper_cost_us}) {
      for (bool raw : {false, true}) {
        double before = 0.0;
        for (int64_t q_len = 1; q_len <= 600; q_len += 1 + q_len / 40) {
          AttentionCall call = make_call(format, 4, group, num_seqs, q_len);
          const float row[1] = {};
          if (raw) call.chunk_key = call.chunk_value = row;
          double shorter = 0.0;
          for (int64_t seq_len = 16; seq_len <= int64_t{1} << 20; seq_len *= 2) {
            const double us = cost(call, seq_len, device);
            ASSERT_GE(us, shorter) << "q_len " << q_len << " seq_len " << seq_len;
            shorter = us;
          }
          ASSERT_GE(shorter, before) << "q_len " << q_len;
          before = shorter;
        }
      }
    }
  });
}

// One more query row costs at most one more pass over the slots: twice the time where there was
// one.
TEST(CostTest, ChoiceHasNoCliff) {
  for_each_shape([](const DeviceInfo& device, const SlotFormat& format, int group, int num_seqs) {
    for (int64_t seq_len : {1024, 32768, 1048576}) {
      double before = 0.0;
      for (int64_t q_len = 1; q_len <= 400; ++q_len) {
        const double us = chosen_us(make_call(format, 4, group, num_seqs, q_len), seq_len, device);
        if (q_len > 1) {
          ASSERT_LE(us, 2.05 * before) << "q_len " << q_len << " seq_len " << seq_len;
        }
        before = us;
      }
    }
  });
}

// More rows never lead back to the rows engine: the workspace of "cuda" counts on it.
TEST(CostTest, ChoiceSwitchesOnce) {
  for_each_shape([](const DeviceInfo& device, const SlotFormat& format, int, int num_seqs) {
    for (int group = 1; group <= 256; ++group) {
      bool rows = true;
      for (int64_t q_len = 1; q_len * group <= kRowsMaxPackedRows; ++q_len) {
        const bool now = rows_are_cheaper(make_call(format, 4, group, num_seqs, q_len), device);
        ASSERT_TRUE(rows || !now) << "group " << group << " q_len " << q_len;
        rows = now;
      }
    }
  });
}

TEST(CostTest, FewRowsGoToTheRowsEngineAndManyToTheTileEngine) {
  for (const testing::FormatName& name : testing::format_names()) {
    for (int head_dim : {64, 128, 256}) {
      const SlotFormat format = testing::make_format(name.preset, head_dim, name.fp8);
      for (int packed = 1; packed <= 32; ++packed) {
        EXPECT_TRUE(rows_are_cheaper(make_call(format, 8, 1, 1, packed), h200())) << packed;
        EXPECT_TRUE(rows_are_cheaper(make_call(format, 8, packed, 128, 1), h200())) << packed;
      }
      for (int64_t q_len : {256, 512, 8192}) {
        EXPECT_FALSE(rows_are_cheaper(make_call(format, 8, 4, 1, q_len), h200())) << q_len;
      }
    }
  }
}

// So the device alone decides between the tile engines.
TEST(CostTest, WgmmaIsNeverTheDearerTileEngine) {
  for_each_shape([](const DeviceInfo&, const SlotFormat& format, int group, int num_seqs) {
    for (int64_t q_len = 1; q_len <= 8192; q_len += 1 + q_len / 40) {
      const AttentionCall call = make_call(format, 4, group, num_seqs, q_len);
      ASSERT_LE(hopper_cost_us(call, kChoiceTokens, h200()),
                portable_cost_us(call, kChoiceTokens, h200()))
          << q_len;
    }
  });
}

TEST(CostTest, ChoiceFollowsNoLength) {
  const SlotFormat format = testing::make_format("4bit_nc", 128);
  for (int64_t q_len : {1, 8, 40, 60, 200}) {
    AttentionCall call = make_call(format, 8, 4, 2, q_len);
    const bool rows = rows_are_cheaper(call, h200());
    for (int64_t max_seq_len : {1, 100, 1 << 20}) {
      call.max_seq_len = max_seq_len;
      call.max_blocks = max_seq_len / 16 + 1;
      EXPECT_EQ(rows_are_cheaper(call, h200()), rows) << q_len;
    }
  }
}

TEST(CostTest, UnknownRowsAreBoundedByTheBatch) {
  AttentionCall call = make_call(testing::make_format("4bit_nc", 128), 8, 4, 16, 8);
  EXPECT_EQ(largest_q_len(call), 8);
  EXPECT_EQ(largest_packed_rows(call), 32);
  call.max_q_len = 0;
  EXPECT_EQ(largest_q_len(call), 128);
  call.max_q_len = 1000;
  EXPECT_EQ(largest_q_len(call), 128);
}

TEST(CostTest, RowsEngineRefusesByPackedRows) {
  const SlotFormat format = testing::make_format("4bit_nc", 128);
  EXPECT_TRUE(check_packed_rows(make_call(format, 8, 4, 1, 64)).ok());
  EXPECT_TRUE(check_packed_rows(make_call(format, 1, 256, 300, 1)).ok());
  EXPECT_TRUE(testing::fails_with(check_packed_rows(make_call(format, 8, 4, 1, 65)),
                                  StatusCode::kUnsupported, "max_q_len: got 65"));
  // A hint makes the difference: without it one sequence may own the batch.
  AttentionCall call = make_call(format, 8, 4, 128, 1);
  EXPECT_TRUE(check_packed_rows(call).ok());
  call.max_q_len = 0;
  EXPECT_FALSE(check_packed_rows(call).ok());
}

// Figures of docs/kernels, one H200.
TEST(CostTest, AgreesWithWhatWasMeasured) {
  struct Figure {
    Cost* cost;
    int head_dim, num_seqs;
    int64_t q_len, seq_len;
    double ms;
  };
  // 4bit_nc; shape A: 24/4 heads of 256, shape B: 32/8 heads of 128.
  for (const Figure& f :
       std::initializer_list<Figure>{{rows_cost_us, 256, 1, 1, 131072, 0.0579},
                                     {rows_cost_us, 128, 1, 1, 131072, 0.0574},
                                     {rows_cost_us, 256, 1, 1, 1009664, 0.3009},
                                     {rows_cost_us, 128, 1, 1, 1009664, 0.3267},
                                     {rows_cost_us, 128, 16, 1, 32768, 0.196},
                                     {rows_cost_us, 128, 128, 1, 4096, 0.194},
                                     {rows_cost_us, 256, 1, 5, 131072, 0.1063},
                                     {rows_cost_us, 128, 1, 8, 131072, 0.1161},
                                     {rows_cost_us, 128, 1, 8, 1009664, 0.5662},
                                     {portable_cost_us, 256, 1, 16, 65536, 0.448},
                                     {portable_cost_us, 256, 1, 40, 65536, 0.594},
                                     {portable_cost_us, 128, 1, 32, 65536, 0.579},
                                     {portable_cost_us, 256, 1, 1024, 131072, 9.73},
                                     {portable_cost_us, 256, 1, 8192, 131072, 78.0},
                                     {portable_cost_us, 128, 1, 1024, 131072, 6.73},
                                     {portable_cost_us, 128, 1, 8192, 131072, 49.2},
                                     {hopper_cost_us, 256, 1, 128, 131072, 1.084},
                                     {hopper_cost_us, 256, 1, 512, 131072, 2.73},
                                     {hopper_cost_us, 128, 1, 128, 131072, 0.944},
                                     {hopper_cost_us, 128, 1, 512, 131072, 2.15},
                                     {hopper_cost_us, 256, 1, 1024, 131072, 5.09},
                                     {hopper_cost_us, 256, 1, 8192, 131072, 41.7},
                                     {hopper_cost_us, 128, 1, 1024, 131072, 3.98},
                                     {hopper_cost_us, 128, 1, 8192, 131072, 30.7}}) {
    const bool a = f.head_dim == 256;
    const AttentionCall call = make_call(testing::make_format("4bit_nc", f.head_dim), a ? 4 : 8,
                                         a ? 6 : 4, f.num_seqs, f.q_len);
    const double ms = 1e-3 * f.cost(call, f.seq_len, h200());
    EXPECT_GT(ms, 0.65 * f.ms) << f.head_dim << " q_len " << f.q_len << " seq_len " << f.seq_len;
    EXPECT_LT(ms, 1.35 * f.ms) << f.head_dim << " q_len " << f.q_len << " seq_len " << f.seq_len;
  }
}

}  // namespace
}  // namespace kvtile::cuda
