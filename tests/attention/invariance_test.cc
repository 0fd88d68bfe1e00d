// Same request, same bits: whatever the threads, batch-mates, chunking, tile, page order, layout,
// strides, hints and hidden bytes. Every comparison here is bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::format_names;
using testing::FormatName;
using testing::is_ok;
using testing::RowBits;
using testing::run_rows;
using testing::same_bits;

std::vector<AttendSpec> sample_specs() {
  std::vector<AttendSpec> specs;
  uint64_t seed = 40;
  for (const FormatName& name : format_names()) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      AttendSpec spec;
      spec.preset = name.preset;
      spec.fp8 = name.fp8;
      spec.dtype = dtype;
      spec.head_dim = dtype == DType::kFloat32 ? 64 : 128;
      spec.group = 3;
      spec.seqs = {{700, 4}, {0, 37}, {129, 1}, {300, 70}, {2, 2}};
      spec.seed = seed++;
      spec.sinks = seed % 2 == 0;
      spec.mask.window = seed % 3 == 0 ? 200 : 0;
      specs.push_back(spec);
    }
  }
  return specs;
}

// `query`, chunk and length arrays cut down to rows [first, first + count) of sequence `seq`, with
// the sequence ending where the last of them stands.
struct Cut {
  AttentionCall call;
  std::vector<int32_t> cu, lens, firsts;
};

void cut_rows(const AttendProblem& problem, int seq, int64_t first, int64_t count, Cut* cut) {
  const AttentionCall& from = problem.call;
  const int64_t row = from.cu_seqlens_q[seq] + first;
  const int bytes = dtype_bytes(from.dtype);
  cut->call = from;
  cut->cu = {0, static_cast<int32_t>(count)};
  cut->lens = {static_cast<int32_t>(problem.cached_len(seq) + first + count)};
  cut->call.num_seqs = 1;
  cut->call.total_q = count;
  cut->call.cu_seqlens_q = cut->cu.data();
  cut->call.seq_lens = cut->lens.data();
  const int64_t token = int64_t{from.num_heads} * from.cache.format.head_dim;
  cut->call.query = static_cast<const std::byte*>(from.query) + row * token * bytes;
  cut->call.block_table = from.block_table + seq * from.max_blocks;
  if (from.chunk_key != nullptr) {
    const int64_t kv = int64_t{from.cache.num_kv_heads} * from.cache.format.head_dim * bytes * row;
    cut->call.chunk_key = static_cast<const std::byte*>(from.chunk_key) + kv;
    cut->call.chunk_value = static_cast<const std::byte*>(from.chunk_value) + kv;
  }
}

TEST(Threads, CountDoesNotMatter) {
  for (AttendSpec spec : sample_specs()) {
    for (bool raw : {false, true}) {
      spec.raw_chunk = raw;
      AttendProblem problem(spec);
      RunOptions options;
      options.num_threads = 1;
      ASSERT_TRUE(is_ok(problem.run(options)));
      const std::vector<std::byte> want = problem.all_bits();
      for (int threads : {2, 3, 4, 7, 16}) {
        options.num_threads = threads;
        problem.refill_outputs();
        ASSERT_TRUE(is_ok(problem.run(options)));
        ASSERT_TRUE(same_bits(problem.all_bits(), want))
            << threads << " threads, " << testing::describe(spec);
      }
    }
  }
}

TEST(Threads, OneLongDecodeRowIsTheSameSplitOrNot) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec;
    spec.preset = name.preset;
    spec.fp8 = name.fp8;
    spec.num_kv_heads = 1;
    spec.group = 4;
    spec.seqs = {{40001, 1}};
    AttendProblem problem(spec);
    RowBits want, got;
    RunOptions options;
    options.num_threads = 1;
    ASSERT_TRUE(is_ok(run_rows(problem.call, options, &want)));
    for (int threads : {2, 5, 16}) {
      options.num_threads = threads;
      ASSERT_TRUE(is_ok(run_rows(problem.call, options, &got)));
      EXPECT_TRUE(same_bits(got[0], want[0])) << threads << " " << name.preset;
    }
  }
}

TEST(Batch, MatesDoNotMatter) {
  for (AttendSpec spec : sample_specs()) {
    for (bool raw : {false, true}) {
      spec.raw_chunk = raw;
      AttendProblem problem(spec);
      RowBits all, alone;
      ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &all)));
      for (int s = 0; s < problem.num_seqs(); ++s) {
        Cut cut;
        cut_rows(problem, s, 0, problem.q_len(s), &cut);
        ASSERT_TRUE(is_ok(run_rows(cut.call, {}, &alone)));
        for (int64_t r = 0; r < problem.q_len(s); ++r) {
          const auto row = static_cast<size_t>(problem.call.cu_seqlens_q[s] + r);
          ASSERT_TRUE(same_bits(alone[static_cast<size_t>(r)], all[row]))
              << "seq " << s << " row " << r << " of " << testing::describe(spec);
        }
      }
    }
  }
}

TEST(Chunking, VerifyRowsEqualSingleRows) {
  for (const AttendSpec& spec : sample_specs()) {
    AttendProblem problem(spec);
    RowBits all, one;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &all)));
    for (int s = 0; s < problem.num_seqs(); ++s) {
      for (int64_t r = 0; r < problem.q_len(s); ++r) {
        Cut cut;
        cut_rows(problem, s, r, 1, &cut);
        ASSERT_TRUE(is_ok(run_rows(cut.call, {}, &one)));
        const auto row = static_cast<size_t>(problem.call.cu_seqlens_q[s] + r);
        ASSERT_TRUE(same_bits(one[0], all[row]))
            << "seq " << s << " row " << r << " of " << testing::describe(spec);
      }
    }
  }
}

TEST(Chunking, AnySplitOfAPackedChunkGivesTheSameRows) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec;
    spec.preset = name.preset;
    spec.fp8 = name.fp8;
    spec.head_dim = 128;
    spec.group = 4;
    spec.seqs = {{4096, 129}};
    AttendProblem problem(spec);
    RowBits whole, part;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &whole)));
    for (const std::vector<int64_t>& chunks :
         std::vector<std::vector<int64_t>>{{128, 1}, {1, 128}, {64, 65}, {5, 5, 119}}) {
      int64_t first = 0;
      for (int64_t count : chunks) {
        Cut cut;
        cut_rows(problem, 0, first, count, &cut);
        ASSERT_TRUE(is_ok(run_rows(cut.call, {}, &part)));
        for (int64_t r = 0; r < count; ++r) {
          ASSERT_TRUE(
              same_bits(part[static_cast<size_t>(r)], whole[static_cast<size_t>(first + r)]))
              << name.preset << " row " << first + r;
        }
        first += count;
      }
    }
  }
}

TEST(Tiles, SizeDoesNotMatter) {
  for (AttendSpec spec : sample_specs()) {
    spec.seqs = {{3000, 5}, {1200, 33}, {100, 1}};
    for (bool raw : {false, true}) {
      spec.raw_chunk = raw;
      AttendProblem problem(spec);
      RowBits want, got;
      ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &want)));
      for (int64_t tile : {1, 16, 64, 100, 512, 1000, 1024, 4096, 1 << 30}) {
        AttentionCall call = problem.call;
        call.tile_tokens = tile;
        ASSERT_TRUE(is_ok(run_rows(call, {}, &got)));
        for (size_t r = 0; r < want.size(); ++r) {
          ASSERT_TRUE(same_bits(got[r], want[r]))
              << "tile " << tile << " row " << r << " of " << testing::describe(spec);
        }
      }
    }
  }
}

TEST(Pages, OrderInThePoolDoesNotMatter) {
  for (const AttendSpec& spec : sample_specs()) {
    AttendProblem problem(spec);
    const PagedCache& cache = problem.call.cache;
    RowBits want, got;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &want)));
    // Every page moves by a third of the pool.
    const int64_t n = cache.num_blocks, shift = n / 3 + 1;
    std::vector<std::byte> pages(static_cast<size_t>(n * cache.stride_block), std::byte{0xFF});
    for (int64_t b = 0; b < n; ++b) {
      std::memcpy(pages.data() + (b + shift) % n * cache.stride_block,
                  cache.pages + b * cache.stride_block, static_cast<size_t>(cache.stride_block));
    }
    std::vector<int32_t> table(
        problem.call.block_table,
        problem.call.block_table + problem.num_seqs() * problem.call.max_blocks);
    for (int32_t& page : table) {
      if (page >= 0 && page < n) page = static_cast<int32_t>((page + shift) % n);
    }
    AttentionCall call = problem.call;
    call.cache.pages = pages.data();
    call.block_table = table.data();
    ASSERT_TRUE(is_ok(run_rows(call, {}, &got)));
    for (size_t r = 0; r < want.size(); ++r) ASSERT_TRUE(same_bits(got[r], want[r]));
  }
}

TEST(Pages, LayoutPaddingAndBlockSizeDoNotMatter) {
  for (const AttendSpec& spec : sample_specs()) {
    AttendProblem problem(spec);
    RowBits want, got;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &want)));
    for (int block_size : {16, 1, 33, 784}) {
      for (PageLayout layout : {PageLayout::kTokenMajor, PageLayout::kHeadMajor}) {
        AttendSpec moved = spec;
        moved.block_size = block_size;
        moved.layout = layout;
        moved.slot_padding = block_size == 33 ? 14 : 0;
        AttendProblem other(moved);
        for (int s = 0; s < problem.num_seqs(); ++s) {
          for (int64_t p = problem.packed_begin(s); p < problem.packed_end(s); ++p) {
            for (int h = 0; h < spec.num_kv_heads; ++h) {
              std::memcpy(other.slot(s, p, h), problem.slot(s, p, h),
                          static_cast<size_t>(spec.format().slot_bytes()));
            }
          }
        }
        AttentionCall call = other.call;
        call.query = problem.call.query;
        call.sinks = problem.call.sinks;
        ASSERT_TRUE(is_ok(run_rows(call, {}, &got)));
        for (size_t r = 0; r < want.size(); ++r) {
          ASSERT_TRUE(same_bits(got[r], want[r]))
              << "row " << r << " of " << testing::describe(moved);
        }
      }
    }
  }
}

TEST(HiddenBytes, CannotChangeOneBit) {
  // Unused pages, slots and padding, recycled from anything: NaN, zero, finite, infinite, and the
  // bytes of an fp32 state.
  for (AttendSpec spec : sample_specs()) {
    for (bool raw : {false, true}) {
      spec.raw_chunk = raw;
      spec.block_size = 784;
      spec.slot_padding = 6;
      std::vector<std::byte> want;
      for (int poison : {0xFF, 0x00, 0x7C, 0x7E, 0x3C, 0xFC}) {
        spec.poison = static_cast<std::byte>(poison);
        AttendProblem problem(spec);
        ASSERT_TRUE(is_ok(problem.run()));
        if (want.empty()) want = problem.all_bits();
        ASSERT_TRUE(same_bits(problem.all_bits(), want))
            << "poison " << poison << ", " << testing::describe(spec);
      }
    }
  }
}

TEST(HiddenBytes, RawRowsBeyondTheDiagonalCannotChangeOneBit) {
  AttendSpec spec;
  spec.raw_chunk = true;
  spec.seqs = {{50, 21}};
  for (int64_t row : {0, 7, 19}) {
    AttendProblem clean(spec), poisoned(spec);
    ASSERT_TRUE(is_ok(clean.run()));
    for (int64_t later = row + 1; later < 21; ++later) {
      for (int d = 0; d < 64; ++d) {
        poisoned.set_chunk_key(later, 0, d, std::numeric_limits<double>::quiet_NaN());
        poisoned.set_chunk_value(later, 1, d, std::numeric_limits<double>::infinity());
      }
    }
    ASSERT_TRUE(is_ok(poisoned.run()));
    for (int64_t r = 0; r <= row; ++r) {
      EXPECT_TRUE(same_bits(poisoned.row_bits(r), clean.row_bits(r))) << r;
    }
  }
}

TEST(Strides, ViewsGiveTheBitsOfContiguousCopies) {
  for (AttendSpec spec : sample_specs()) {
    for (bool raw : {false, true}) {
      spec.raw_chunk = raw;
      spec.strided = false;
      AttendProblem dense(spec);
      spec.strided = true;
      AttendProblem views(spec);  // the same seed fills the same elements
      ASSERT_TRUE(is_ok(dense.run()));
      ASSERT_TRUE(is_ok(views.run()));
      ASSERT_TRUE(views.outputs_contained());
      ASSERT_TRUE(same_bits(views.all_bits(), dense.all_bits())) << testing::describe(spec);
    }
  }
}

TEST(Strides, OfSizeOneDimensionsAreIgnored) {
  AttendSpec spec;
  spec.num_kv_heads = 1;
  spec.group = 1;
  spec.seqs = {{99, 1}};
  for (bool raw : {false, true}) {
    spec.raw_chunk = raw;
    AttendProblem problem(spec);
    RowBits want, got;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &want)));
    AttentionCall call = problem.call;
    call.query_stride_token = 4608;
    call.query_stride_head = 7;
    call.chunk_key_stride_token = 1 << 20;
    call.chunk_key_stride_head = 3;
    call.chunk_value_stride_token = 5;
    call.chunk_value_stride_head = 1 << 20;
    call.cache.stride_head = 7;
    call.block_table_stride = 1;
    ASSERT_TRUE(is_ok(run_rows(call, {}, &got)));
    EXPECT_TRUE(same_bits(got[0], want[0]));
  }
}

TEST(Hints, AreNeverVisibility) {
  for (AttendSpec spec : sample_specs()) {
    AttendProblem problem(spec);
    RowBits want, got;
    ASSERT_TRUE(is_ok(run_rows(problem.call, {}, &want)));
    for (const auto& [q, seq] : {std::pair<int64_t, int64_t>{70, 770}, {100000, 65536}, {128, 0}}) {
      AttentionCall call = problem.call;
      call.max_q_len = q;
      call.max_seq_len = seq;
      ASSERT_TRUE(is_ok(run_rows(call, {}, &got)));
      for (size_t r = 0; r < want.size(); ++r) ASSERT_TRUE(same_bits(got[r], want[r]));
    }
  }
}

TEST(Repeat, AgainInTheSameWorkspaceWhateverItHeld) {
  AttendSpec spec;
  spec.seqs = {{1500, 3}, {10, 64}};
  AttendProblem problem(spec);
  ASSERT_TRUE(is_ok(problem.run()));
  const std::vector<std::byte> want = problem.all_bits();
  size_t bytes = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(problem.call, {}, &bytes)));
  testing::SentinelBuffer workspace(bytes);
  for (int i = 0; i < 50; ++i) {
    if (i % 10 == 0) std::memset(workspace.data(), i % 20 == 0 ? 0xFF : 0x7F, bytes);
    problem.refill_outputs();
    ASSERT_TRUE(is_ok(attend(problem.call, Workspace{workspace.data(), bytes})));
    ASSERT_TRUE(same_bits(problem.all_bits(), want)) << i;
  }
}

TEST(Repeat, ConcurrentCallsWithTheirOwnWorkspaces) {
  AttendSpec spec;
  spec.seqs = {{500, 2}, {64, 40}};
  AttendProblem problem(spec);
  RowBits want;
  RunOptions options;
  options.num_threads = 2;
  ASSERT_TRUE(is_ok(run_rows(problem.call, options, &want)));
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        RowBits got;
        wrong[t] += !run_rows(problem.call, options, &got).ok() || got != want;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int w : wrong) EXPECT_EQ(w, 0);
}

TEST(SimdTargets, EachAgreesWithTheOracle) {
  // Every target the machine runs, forced by name, meets the same bound.
  int ran = 0;
  for (const char* backend : {"cpu/avx3", "cpu/avx2", "cpu/neon", "cpu/scalar"}) {
    RunOptions options;
    options.backend = backend;
    for (uint64_t seed = 5000; seed < 5060; ++seed) {
      AttendProblem problem(testing::random_spec(seed));
      size_t bytes = 0;
      ASSERT_TRUE(is_ok(workspace_bytes(problem.call, options, &bytes)));
      if (problem.run(options).code() == StatusCode::kUnavailable) break;
      ++ran;
      ASSERT_TRUE(testing::runs_and_matches(&problem, options)) << backend;
    }
  }
  EXPECT_GE(ran, 60);
}

}  // namespace
}  // namespace kvtile
