// The tile engine's schedule, run on the host: the very functions the kernels call decide here
// which thread block attends which keys, and the test checks that every visible key block of every
// row block is attended exactly once, inside the image, in an order no tile size changes.
#include "src/attention/cuda/sm80/tile_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "src/codec/codebook.h"
#include "src/core/half2.h"

namespace kvtile::cuda {
namespace {

struct Shape {
  int head_dim = 128, num_kv_heads = 2, group = 4, block_size = 16, num_sms = 132;
  std::vector<int> q_lens, seq_lens;
  Mask mask;
  int64_t tile_tokens = 0;
  bool raw = true, hints = false, overlaps = true;
  TileEngine engine = TileEngine::kPortable;
};

constexpr TileEngine kEngines[] = {TileEngine::kPortable, TileEngine::kHopper};

AttentionCall make_call(const Shape& shape);

TilePlan plan_of(const Shape& shape) {
  return make_tile_plan(make_call(shape), TileDevice{shape.num_sms, shape.overlaps},
                        tile_shape(shape.engine, shape.head_dim));
}

AttentionCall make_call(const Shape& shape) {
  AttentionCall call;
  call.num_seqs = static_cast<int>(shape.q_lens.size());
  int longest = 0;
  for (size_t s = 0; s < shape.q_lens.size(); ++s) {
    call.total_q += shape.q_lens[s];
    longest = std::max(longest, shape.seq_lens[s]);
    if (shape.hints) call.max_q_len = std::max<int64_t>(call.max_q_len, shape.q_lens[s]);
  }
  if (shape.hints) call.max_seq_len = longest;
  call.num_heads = shape.num_kv_heads * shape.group;
  call.mask = shape.mask;
  call.tile_tokens = shape.tile_tokens;
  call.cache.num_kv_heads = shape.num_kv_heads;
  call.cache.block_size = shape.block_size;
  call.cache.format.head_dim = shape.head_dim;
  call.max_blocks = (longest + shape.block_size - 1) / shape.block_size;
  static const int kSomething = 0;
  if (shape.raw) call.chunk_key = call.chunk_value = &kSomething;
  return call;
}

std::vector<SequenceInfo> sequence_table(const Shape& shape, const TilePlan& plan) {
  std::vector<SequenceInfo> table;
  int begin = 0, blocks = 0;
  for (size_t s = 0; s < shape.q_lens.size(); ++s) {
    SequenceInfo info;
    info.q_begin = begin;
    info.q_len = shape.q_lens[s];
    info.seq_len = shape.seq_lens[s];
    info.first_row_block = blocks;
    table.push_back(info);
    begin += info.q_len;
    blocks += (info.q_len * plan.group + plan.rows() - 1) / plan.rows();
  }
  SequenceInfo last;
  last.first_row_block = blocks;
  table.push_back(last);
  return table;
}

// (context, row block of the context) -> key blocks in the order each piece attends them.
using Walked = std::map<std::pair<int64_t, int>, std::vector<std::vector<int>>>;

Walked walk_plan(const Shape& shape) {
  const TilePlan plan = plan_of(shape);
  const int block_tokens = plan.shape.block_tokens;
  const std::vector<SequenceInfo> table = sequence_table(shape, plan);
  Walked walked;
  for (int context_group = 0; context_group < plan.num_context_groups; ++context_group) {
    for (int chunk = 0; chunk < plan.row_chunks; ++chunk) {
      const GroupRows group = group_rows(plan, table.data(), context_group, chunk);
      const int count = group.end - group.begin;
      EXPECT_LE(count, plan.row_blocks);
      std::map<int, std::set<int>> slots_of;  // row block -> slots
      std::set<int> slots;
      std::map<std::pair<int, int>, std::vector<int>> pieces;
      for (int step = 0; step < plan.num_steps; ++step) {
        for (int cta = 0; cta < plan.num_ctas; ++cta) {
          int64_t unit = lane_begin(plan, count, cta);
          const int64_t end = lane_begin(plan, count, cta + 1);
          while (unit < end) {
            const int local = static_cast<int>(unit / plan.period_blocks());
            BlockWalk walk;
            walk.period = plan.period_blocks();
            walk.first = static_cast<int>(unit % plan.period_blocks());
            walk.run =
                static_cast<int>(std::min<int64_t>(plan.period_blocks() - walk.first, end - unit));
            EXPECT_EQ(lane_owner(plan, count, unit), cta);
            EXPECT_EQ(lane_owner(plan, count, unit + walk.run - 1), cta);
            unit += walk.run;
            const int slot = cta + local;
            EXPECT_LT(slot, plan.slots());
            if (step == 0) {
              EXPECT_TRUE(slots.insert(slot).second) << "two pieces share slot " << slot;
            }
            const int64_t context =
                context_of_row_block(plan, table.data(), group, group.begin + local);
            const ContextView view = context_view(plan, table.data(), shape.mask, group, context);
            const int row_block =
                group.begin + local - row_blocks_before(plan, table.data(), context);
            const SequenceInfo& sequence = table[static_cast<size_t>(view.seq)];
            const KeyRange seen =
                rows_range(shape.mask, sequence, plan.group, row_block * plan.rows(), plan.rows());
            for (int row = row_block * plan.rows(); row < (row_block + 1) * plan.rows(); ++row) {
              if (row >= sequence.q_len * plan.group) break;
              const KeyRange keys = row_range(shape.mask, sequence, row / plan.group);
              if (keys.empty()) continue;
              EXPECT_GE(keys.begin, seen.begin);
              EXPECT_LE(keys.end, seen.end);
              EXPECT_GE(keys.begin, view.begin);
              EXPECT_LE(keys.end, view.end);
            }
            const int first = static_cast<int>(seen.begin), last = static_cast<int>(seen.end);
            const StepRange range = step_range(plan, view, step);
            const int first_block = range.begin / block_tokens;
            walk.set(std::max(first / block_tokens, first_block),
                     std::min((last + block_tokens - 1) / block_tokens,
                              (range.end + block_tokens - 1) / block_tokens));
            int block = walk.count > 0 ? walk.block(0) : 0;
            for (int k = 0; k < walk.count; ++k) {
              EXPECT_EQ(block, walk.block(k));
              EXPECT_GE(block, first_block);
              EXPECT_LE((block - first_block + 1) * block_tokens, plan.fill_blocks() * kFillTokens);
              pieces[{local, cta}].push_back(block);
              block = walk.after(block);
            }
            if (step == 0) {
              const std::pair<int64_t, int> key{context, row_block};
              walked[key];
              slots_of[local].insert(slot);
            }
          }
        }
      }
      for (auto& [local_cta, blocks] : pieces) {
        const int64_t context =
            context_of_row_block(plan, table.data(), group, group.begin + local_cta.first);
        const int row_block =
            group.begin + local_cta.first - row_blocks_before(plan, table.data(), context);
        walked[{context, row_block}].push_back(blocks);
      }
      // The merge reads the slots from the first owner to the last, and no other piece's.
      for (const auto& [local, owned] : slots_of) {
        const int64_t unit = static_cast<int64_t>(local) * plan.period_blocks();
        const int begin = lane_owner(plan, count, unit) + local;
        const int end = lane_owner(plan, count, unit + plan.period_blocks() - 1) + local;
        EXPECT_EQ(*owned.begin(), begin);
        EXPECT_EQ(*owned.rbegin(), end);
        EXPECT_EQ(static_cast<int>(owned.size()), end - begin + 1);
      }
    }
  }
  // Every row block of every context, and every key block its rows see, exactly once.
  for (int64_t context = 0; context < int64_t{plan.num_seqs} * plan.num_kv_heads; ++context) {
    const SequenceInfo& sequence = table[static_cast<size_t>(context / plan.num_kv_heads)];
    const int num_rows = sequence.q_len * plan.group;
    for (int row_block = 0; row_block * plan.rows() < num_rows; ++row_block) {
      const auto found = walked.find({context, row_block});
      EXPECT_NE(found, walked.end()) << "context " << context << " row block " << row_block;
      if (found == walked.end()) continue;
      std::map<int, int> times;
      for (const auto& piece : found->second) {
        for (int block : piece) ++times[block];
      }
      for (int row = row_block * plan.rows();
           row < std::min(num_rows, (row_block + 1) * plan.rows()); ++row) {
        const KeyRange keys = row_range(shape.mask, sequence, row / plan.group);
        if (keys.empty()) continue;
        for (int64_t b = keys.begin / block_tokens; b * block_tokens < keys.end; ++b) {
          EXPECT_EQ(times[static_cast<int>(b)], 1) << "row " << row << " key block " << b;
        }
      }
    }
  }
  return walked;
}

TEST(TilePlan, EveryVisibleKeyOnceWhateverTheTile) {
  std::vector<Shape> shapes;
  Shape shape;
  shape.q_lens = {100};
  shape.seq_lens = {1100};
  shapes.push_back(shape);
  shape.seq_lens = {9000};
  shapes.push_back(shape);
  shape.q_lens = {1, 130, 0, 7, 300, 5};
  shape.seq_lens = {500, 130, 10, 3, 9000, 33000};
  shapes.push_back(shape);
  shape.head_dim = 256;
  shape.group = 6;
  shapes.push_back(shape);
  shape.mask.window = 777;
  shapes.push_back(shape);
  shape.mask.causal = false;
  shapes.push_back(shape);
  shape.mask = Mask();
  shape.num_kv_heads = 8;
  shape.head_dim = 64;
  shape.num_sms = 20;
  shapes.push_back(shape);
  shape.q_lens = {2000, 33};
  shape.seq_lens = {9000, 30000};
  shape.num_sms = 132;
  shape.head_dim = 128;
  shapes.push_back(shape);
  shape.q_lens = {50};
  shape.seq_lens = {20};  // rows before the sequence see nothing
  shapes.push_back(shape);
  const size_t num_shapes = shapes.size();
  for (size_t i = 0; i < num_shapes; ++i) {
    shapes.push_back(shapes[i]);
    shapes.back().engine = TileEngine::kHopper;
  }
  for (Shape& each : shapes) {
    const Walked walked = walk_plan(each);
    for (int64_t tile : {8192, 16384, 32768, 131072}) {
      each.tile_tokens = tile;
      EXPECT_EQ(walk_plan(each), walked) << "tile " << tile;
    }
    each.hints = true;
    EXPECT_EQ(walk_plan(each), walked) << "with hints";
    each.overlaps = false;
    walk_plan(each);
  }
}

TEST(TilePlan, ScratchStaysInBoundsAndIgnoresLengths) {
  struct Variant {
    int head_dim;
    bool overlaps;
    TileEngine engine;
  };
  std::vector<Variant> variants = {{128, false, TileEngine::kPortable},
                                   {256, false, TileEngine::kPortable}};
  for (TileEngine engine : kEngines) {
    for (int head_dim : {64, 128, 256}) variants.push_back({head_dim, true, engine});
  }
  for (auto [head_dim, overlaps, engine] : variants) {
    for (int q_len : {33, 256, 1024, 8192}) {
      Shape shape;
      shape.engine = engine;
      shape.overlaps = overlaps;
      shape.head_dim = head_dim;
      shape.num_kv_heads = head_dim == 256 ? 4 : 8;
      shape.group = head_dim == 256 ? 6 : 4;
      shape.q_lens = {q_len};
      int64_t bytes = 0;
      for (int cached : {0, 16384, 131072, 1009664}) {
        shape.seq_lens = {cached + q_len};
        const TilePlan plan = plan_of(shape);
        EXPECT_LE(plan.bytes, kTileScratchBytes) << head_dim << " " << q_len;
        if (bytes != 0) {
          EXPECT_EQ(plan.bytes, bytes);
        }
        bytes = plan.bytes;
      }
      // total_q is an upper bound: every smaller call fits in the same bytes.
      for (int64_t tile : {int64_t{0}, int64_t{8192}, int64_t{131072}}) {
        shape.tile_tokens = tile;
        shape.q_lens = {q_len};
        const int64_t planned = plan_of(shape).bytes;
        for (int smaller : {1, 33, 100, 500, 1000, 1024, 1100, 2000, 4000, 8000}) {
          if (smaller > q_len) break;
          shape.q_lens = {smaller};
          EXPECT_LE(plan_of(shape).bytes, planned);
        }
      }
      shape.tile_tokens = 0;
    }
  }
}

TEST(TilePlan, ScratchStaysInBoundsForEveryBatch) {
  for (TileEngine engine : kEngines) {
    for (int head_dim : {64, 128, 256}) {
      for (int num_seqs : {1, 3, 20, 64}) {
        for (bool overlaps : {true, false}) {
          Shape shape;
          shape.head_dim = head_dim;
          shape.num_kv_heads = 8;
          AttentionCall call = make_call(shape);
          call.num_seqs = num_seqs;
          for (call.total_q = 1; call.total_q < 20000; call.total_q += 1 + call.total_q / 16) {
            const TilePlan plan =
                make_tile_plan(call, TileDevice{132, overlaps}, tile_shape(engine, head_dim));
            EXPECT_LE(plan.bytes, kTileScratchBytes)
                << head_dim << " sequences " << num_seqs << " rows " << call.total_q;
          }
        }
      }
    }
  }
}

TEST(TilePlan, DequantisationHasSmsOfItsOwnWhereLaunchesOverlap) {
  for (TileEngine engine : kEngines) {
    const TileShape kernel = tile_shape(engine, 128);
    for (int q_len : {1, 64, 256, 500, 512, 513, 1024, 8192, 65536}) {
      Shape shape;
      shape.engine = engine;
      shape.num_kv_heads = 8;
      shape.q_lens = {q_len};
      shape.seq_lens = {131072 + q_len};
      const TilePlan plan = plan_of(shape);
      const int64_t rows =
          (q_len * int64_t{shape.group} + kernel.rows - 1) / kernel.rows * kernel.rows;
      const int filling = plan.num_sms - plan.num_ctas;
      if (rows <= kernel.overlap_rows) {
        EXPECT_EQ(plan.buffers, 2) << q_len;
        EXPECT_GE(plan.num_ctas, 1) << q_len;
        // Dequantising a step takes its SMs no longer than attending to it takes the others.
        EXPECT_GE(filling * (kernel.fill_rows + rows), int64_t{plan.num_sms} * kernel.fill_rows)
            << q_len;
      } else {
        EXPECT_EQ(plan.buffers, 1) << q_len;
        EXPECT_EQ(filling, 0) << q_len;
      }
      shape.overlaps = false;
      const TilePlan serial = plan_of(shape);
      EXPECT_EQ(serial.buffers, 1);
      EXPECT_EQ(serial.num_ctas, 132);
    }
  }
}

TEST(TileImage, ScaledLevelsAreNearlyFp16Numbers) {
  for (KeyCode key : {KeyCode::kLloydMax4, KeyCode::kLloydMax3}) {
    for (int head_dim : {64, 128, 256}) {
      const Codebook book = make_codebook(key, head_dim);
      const float factor = level_factor(key) * std::sqrt(static_cast<float>(head_dim));
      for (int i = 0; i < book.num_levels; ++i) {
        const float level = book.levels[i] * factor;
        const float half = half_bits_to_float(float_to_half_bits(level));
        EXPECT_LE(std::fabs(half / level - 1.0f), 7.5e-5f) << head_dim << " " << i;
      }
    }
  }
}

TEST(TilePlan, SharesAreEvenWithTheCostOfPieces) {
  TilePlan plan;
  for (TileShape kernel :
       {portable_shape(128), portable_shape(256), hopper_shape(128), hopper_shape(256)})
    for (int ctas : {1, 20, 108, 127, 132, 188}) {
      plan.shape = kernel;
      plan.num_ctas = ctas;
      for (int row_blocks : {1, 2, 3, 7, 32, 48, 64, 133, 1000}) {
        int64_t least = int64_t{1} << 40, most = 0;
        for (int cta = 0; cta < lane_ctas(plan, row_blocks); ++cta) {
          const int64_t begin = lane_begin(plan, row_blocks, cta);
          const int64_t end = lane_begin(plan, row_blocks, cta + 1);
          ASSERT_LE(begin, end);
          for (int64_t unit = begin; unit < end; ++unit) {
            ASSERT_EQ(lane_owner(plan, row_blocks, unit), cta);
          }
          int64_t further = 0;  // pieces after the first
          if (end > begin)
            further = (end - 1) / plan.period_blocks() - begin / plan.period_blocks();
          const int64_t cost = end - begin + further * kernel.piece_units;
          least = std::min(least, cost);
          most = std::max(most, cost);
        }
        EXPECT_LE(most, lane_cost(plan, row_blocks) / lane_ctas(plan, row_blocks) + 1);
        EXPECT_LE(most - least, 2 * kernel.piece_units) << ctas << " " << row_blocks;
      }
    }
}

}  // namespace
}  // namespace kvtile::cuda
