// What a call may touch and what it refuses: exact workspace, hostile tables, malformed batches.
// A refused call has written nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvtile/codec.h"
#include "src/core/device.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::fails_with;
using testing::format_names;
using testing::FormatName;
using testing::is_ok;
using testing::SentinelBuffer;

AttentionCall shape_of(const SlotFormat& format, int num_heads, int num_kv_heads, int64_t total_q,
                       int block_size) {
  AttentionCall call;
  call.cache.format = format;
  call.cache.block_size = block_size;
  call.cache.num_kv_heads = num_kv_heads;
  call.num_heads = num_heads;
  call.num_seqs = 1;
  call.total_q = total_q;
  call.softmax_scale = 1.0f;
  return call;
}

TEST(Workspace, ComesFromTheShapeAloneAndIgnoresTheContext) {
  for (const FormatName& name : format_names()) {
    for (int64_t total_q : {1, 4, 129, 2048, 8192}) {
      AttentionCall call =
          shape_of(testing::make_format(name.preset, 128, name.fp8), 32, 8, total_q, 16);
      size_t first = 0, bytes = 0;
      ASSERT_TRUE(is_ok(workspace_bytes(call, {}, &first)));
      for (int64_t blocks : {1, 1024, 65536}) {
        for (int64_t seqs : {1, 256}) {
          call.max_blocks = blocks;
          call.max_seq_len = blocks * 16;
          call.num_seqs = static_cast<int>(seqs);
          call.cache.num_blocks = blocks * seqs;
          ASSERT_TRUE(is_ok(workspace_bytes(call, {}, &bytes)));
          EXPECT_EQ(bytes, first) << name.preset << " " << blocks << " " << seqs;
        }
      }
    }
  }
}

TEST(Workspace, IsAtMost64MiBAtTwoThreadsAndMonotoneInRows) {
  RunOptions options;
  options.num_threads = 2;
  for (const FormatName& name : format_names()) {
    for (int head_dim : testing::head_dims(name)) {
      const SlotFormat format = testing::make_format(name.preset, head_dim, name.fp8);
      for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {24, 4}, {71, 1}, {128, 8}}) {
        size_t previous = 0;
        for (int64_t total_q : {0, 1, 2, 16, 33, 1000, 8192, 1 << 20}) {
          for (bool raw : {false, true}) {
            AttentionCall call = shape_of(format, heads, kv_heads, total_q, 784);
            const char key = 0;
            if (raw) call.chunk_key = call.chunk_value = &key;
            size_t bytes = 0;
            ASSERT_TRUE(is_ok(workspace_bytes(call, options, &bytes)));
            EXPECT_LE(bytes, size_t{64} << 20) << head_dim << " " << heads << " " << total_q;
            EXPECT_GE(bytes, previous);
            if (raw) previous = bytes;
          }
        }
      }
    }
  }
}

TEST(Workspace, OneByteLessIsRefusedNamingBothNumbers) {
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      AttendSpec spec;
      spec.preset = name.preset;
      spec.fp8 = name.fp8;
      spec.raw_chunk = raw;
      AttendProblem problem(spec);
      size_t bytes = 0;
      ASSERT_TRUE(is_ok(workspace_bytes(problem.call, {}, &bytes)));
      ASSERT_GT(bytes, 0u);
      SentinelBuffer workspace(bytes);
      const Status status = attend(problem.call, Workspace{workspace.data(), bytes - 1});
      EXPECT_TRUE(fails_with(status, StatusCode::kWorkspaceTooSmall, std::to_string(bytes)));
      EXPECT_TRUE(fails_with(status, StatusCode::kWorkspaceTooSmall, std::to_string(bytes - 1)));
      EXPECT_TRUE(problem.outputs_untouched());
      EXPECT_TRUE(workspace.untouched());
      EXPECT_TRUE(fails_with(attend(problem.call, Workspace{nullptr, bytes}),
                             StatusCode::kInvalidArgument, "workspace"));
      EXPECT_TRUE(fails_with(attend(problem.call, Workspace{workspace.data() + 4, bytes}),
                             StatusCode::kInvalidArgument, "workspace"));
      EXPECT_TRUE(problem.outputs_untouched());
      // The process is alive and the next call works.
      EXPECT_TRUE(testing::runs_and_matches(&problem));
    }
  }
}

TEST(Workspace, PlannedForTheMostRowsServesFewer) {
  AttendSpec spec;
  spec.seqs = {{100, 300}};
  AttendProblem large(spec);
  size_t bytes = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(large.call, {}, &bytes)));
  SentinelBuffer workspace(bytes);
  for (int64_t q : {1, 7, 64, 299}) {
    spec.seqs = {{2000, q}};
    AttendProblem problem(spec);
    ASSERT_TRUE(is_ok(attend(problem.call, Workspace{workspace.data(), bytes})));
    EXPECT_TRUE(testing::rows_match_reference(problem, {0, q - 1}));
    EXPECT_TRUE(workspace.margins_intact());
  }
}

TEST(Workspace, TheLargestOfSeveralPoolsServesThemAllInTurn) {
  // A model that alternates windowed and full layers of different head sizes.
  AttendSpec windowed;
  windowed.head_dim = 256;
  windowed.mask.window = 512;
  windowed.seqs = {{1500, 9}};
  AttendSpec full = windowed;
  full.preset = "3bit_nc";
  full.head_dim = 512;
  full.mask.window = 0;
  AttendProblem a(windowed), b(full);
  size_t bytes_a = 0, bytes_b = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(a.call, {}, &bytes_a)));
  ASSERT_TRUE(is_ok(workspace_bytes(b.call, {}, &bytes_b)));
  const size_t bytes = std::max(bytes_a, bytes_b);
  SentinelBuffer workspace(bytes);
  std::vector<std::byte> want_a, want_b;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(is_ok(attend(a.call, Workspace{workspace.data(), bytes})));
    ASSERT_TRUE(is_ok(attend(b.call, Workspace{workspace.data(), bytes})));
    if (i == 0) {
      want_a = a.all_bits();
      want_b = b.all_bits();
    }
    EXPECT_TRUE(testing::same_bits(a.all_bits(), want_a));
    EXPECT_TRUE(testing::same_bits(b.all_bits(), want_b));
  }
  EXPECT_TRUE(workspace.margins_intact());
  EXPECT_TRUE(testing::rows_match_reference(a, {0, 8}));
  EXPECT_TRUE(testing::rows_match_reference(b, {0, 8}));
}

TEST(Workspace, HoldsAtEveryThreadCount) {
  AttendSpec spec;
  spec.seqs = {{300, 3}, {10, 70}, {900, 1}};
  AttendProblem problem(spec);
  for (int threads : {1, 2, 3, 5, 8}) {
    RunOptions options;
    options.num_threads = threads;
    problem.refill_outputs();
    EXPECT_TRUE(testing::runs_and_matches(&problem, options)) << threads;
  }
}

TEST(Tables, VisibleEntriesOutOfRangeAreRefused) {
  AttendSpec spec;
  spec.seqs = {{20, 2}, {100, 4}};
  AttendProblem problem(spec);
  const auto num_blocks = static_cast<int32_t>(problem.call.cache.num_blocks);
  std::vector<int32_t> table(problem.call.block_table,
                             problem.call.block_table + 2 * problem.call.max_blocks);
  problem.call.block_table = table.data();
  const size_t second = static_cast<size_t>(problem.call.max_blocks);
  for (size_t entry : {size_t{0}, size_t{1}, second, second + 3, second + 6}) {
    for (int32_t bad : {-1, num_blocks, 0x7FFFFFFF, std::numeric_limits<int32_t>::min()}) {
      const int32_t kept = table[entry];
      table[entry] = bad;
      const Status status = problem.run();
      EXPECT_TRUE(fails_with(status, StatusCode::kOutOfRange, "block_table")) << entry;
      EXPECT_TRUE(fails_with(status, StatusCode::kOutOfRange, std::to_string(bad)));
      EXPECT_TRUE(problem.outputs_untouched());
      table[entry] = kept;
    }
  }
  EXPECT_TRUE(testing::runs_and_matches(&problem));
}

TEST(Tables, HiddenEntriesMayBeAnything) {
  // Hidden by the window, by raw chunk tokens, by the end of a shorter neighbour: every hidden
  // entry of a problem is garbage already; here the table is rewritten with more of it.
  for (int32_t garbage : {0, 1, -1, 0x7FFFFFFF, std::numeric_limits<int32_t>::min()}) {
    for (bool raw : {false, true}) {
      AttendSpec spec;
      spec.raw_chunk = raw;
      spec.mask.window = 40;
      spec.seqs = {{500, 33}, {17, 2}, {0, 5}, {16, 1}};
      AttendProblem problem(spec);
      std::vector<int32_t> table(static_cast<size_t>(4 * problem.call.max_blocks), garbage);
      for (int s = 0; s < 4; ++s) {
        const int64_t begin = problem.packed_begin(s), end = problem.packed_end(s);
        for (int64_t p = begin; p < end; ++p) {
          table[static_cast<size_t>(s * problem.call.max_blocks + p / 16)] =
              static_cast<int32_t>(problem.slot_index(s, p) / 16);
        }
      }
      problem.call.block_table = table.data();
      EXPECT_TRUE(testing::runs_and_matches(&problem)) << garbage;
    }
  }
}

TEST(Tables, RowsEndingAtAnUnmappedPageAreNotOverrun) {
  // The last row's last entry is the last mapped word: block_table is guarded by construction.
  for (int block_size : {1, 16, 17}) {
    for (int64_t len : {15, 16, 17, 255, 256, 257}) {
      AttendSpec spec;
      spec.block_size = block_size;
      spec.seqs = {{len - 1, 1}};
      AttendProblem problem(spec);
      EXPECT_EQ(problem.call.max_blocks, (len + block_size - 1) / block_size);
      EXPECT_TRUE(testing::runs_and_matches(&problem));
    }
  }
}

TEST(Tables, MayEndBeforeTheRawChunk) {
  AttendSpec spec;
  spec.raw_chunk = true;
  spec.seqs = {{32, 40}};
  AttendProblem problem(spec);
  std::vector<int32_t> table(problem.call.block_table, problem.call.block_table + 2);
  problem.call.block_table = table.data();
  problem.call.max_blocks = 2;
  EXPECT_TRUE(testing::runs_and_matches(&problem));
  problem.call.max_blocks = 1;
  EXPECT_TRUE(fails_with(problem.run(), StatusCode::kOutOfRange, "block_table"));
}

TEST(Tables, NothingCachedNeedsNoPoolAndNoTable) {
  AttendSpec spec;
  spec.raw_chunk = true;
  spec.seqs = {{0, 9}};
  AttendProblem problem(spec);
  problem.call.block_table = nullptr;
  problem.call.max_blocks = 0;
  problem.call.cache.pages = nullptr;
  problem.call.cache.num_blocks = 0;
  problem.call.cache.pages_bytes = 0;
  EXPECT_TRUE(testing::runs_and_matches(&problem));
}

TEST(Batch, EachMalformedFieldIsRefusedByNameBeforeAnythingIsWritten) {
  AttendSpec spec;
  spec.seqs = {{40, 3}, {20, 2}};
  spec.raw_chunk = true;
  spec.sinks = true;
  AttendProblem problem(spec);
  const AttentionCall good = problem.call;
  size_t bytes = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(good, {}, &bytes)));
  SentinelBuffer workspace(bytes);
  const auto refused = [&](const char* argument, auto change,
                           StatusCode code = StatusCode::kInvalidArgument) {
    AttentionCall call = good;
    change(&call);
    EXPECT_TRUE(fails_with(attend(call, Workspace{workspace.data(), bytes}), code, argument));
    EXPECT_TRUE(problem.outputs_untouched()) << argument;
    EXPECT_TRUE(workspace.untouched()) << argument;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  refused("query", [](AttentionCall* c) { c->query = nullptr; });
  refused("out", [](AttentionCall* c) { c->out = nullptr; });
  refused("cu_seqlens_q", [](AttentionCall* c) { c->cu_seqlens_q = nullptr; });
  refused("seq_lens", [](AttentionCall* c) { c->seq_lens = nullptr; });
  refused("block_table", [](AttentionCall* c) { c->block_table = nullptr; });
  refused("pages", [](AttentionCall* c) { c->cache.pages = nullptr; });
  refused("chunk_value", [](AttentionCall* c) { c->chunk_value = nullptr; });
  refused("chunk_key", [](AttentionCall* c) { c->chunk_key = nullptr; });
  refused("dtype", [](AttentionCall* c) { c->dtype = static_cast<DType>(9); });
  refused("num_seqs", [](AttentionCall* c) { c->num_seqs = -1; });
  refused("total_q", [](AttentionCall* c) { c->total_q = -5; });
  refused("total_q", [](AttentionCall* c) { c->total_q = 4; });
  refused("num_heads", [](AttentionCall* c) { c->num_heads = 3; });
  refused("num_heads", [](AttentionCall* c) { c->num_heads = 0; });
  refused("num_kv_heads", [](AttentionCall* c) { c->cache.num_kv_heads = 0; });
  refused("block_size", [](AttentionCall* c) { c->cache.block_size = 0; });
  refused("softmax_scale", [&](AttentionCall* c) { c->softmax_scale = nan; });
  refused("softmax_scale", [&](AttentionCall* c) { c->softmax_scale = inf; });
  refused("softcap", [](AttentionCall* c) { c->softcap = -1.0f; });
  refused("softcap", [&](AttentionCall* c) { c->softcap = nan; });
  refused("softcap", [&](AttentionCall* c) { c->softcap = inf; });
  refused("window", [](AttentionCall* c) { c->mask.window = -1; });
  refused("max_blocks", [](AttentionCall* c) { c->max_blocks = -1; });
  refused("tile_tokens", [](AttentionCall* c) { c->tile_tokens = -1; });
  refused("max_q_len", [](AttentionCall* c) { c->max_q_len = -1; });
  refused("max_seq_len", [](AttentionCall* c) { c->max_seq_len = -1; });
  refused("query_stride_head", [](AttentionCall* c) { c->query_stride_head = -64; });
  refused("out_stride_head", [](AttentionCall* c) { c->out_stride_head = 63; });
  refused("out_stride_token", [](AttentionCall* c) { c->out_stride_token = 63; });
  refused("chunk_key_stride_token", [](AttentionCall* c) { c->chunk_key_stride_token = -1; });
  refused("chunk_value_stride_head", [](AttentionCall* c) { c->chunk_value_stride_head = -1; });
  refused("block_table_stride", [](AttentionCall* c) { c->block_table_stride = 1; });
  refused(
      "head_dim", [](AttentionCall* c) { c->cache.format.head_dim = 80; },
      StatusCode::kUnsupported);
  refused("stride_head", [](AttentionCall* c) { c->cache.stride_head = 1; });
  refused("pages_bytes", [](AttentionCall* c) { c->cache.pages_bytes -= 1; });
  refused(
      "block_table", [](AttentionCall* c) { c->max_blocks = 1; }, StatusCode::kOutOfRange);
}

TEST(Batch, MalformedLengthsAreRefused) {
  AttendSpec spec;
  spec.seqs = {{40, 3}, {20, 2}};
  AttendProblem problem(spec);
  const auto refused = [&](const char* argument, std::vector<int32_t> cu, std::vector<int32_t> lens,
                           StatusCode code = StatusCode::kInvalidArgument) {
    const AttentionCall good = problem.call;
    problem.call.cu_seqlens_q = cu.data();
    problem.call.seq_lens = lens.data();
    EXPECT_TRUE(fails_with(problem.run(), code, argument));
    EXPECT_TRUE(problem.outputs_untouched());
    problem.call = good;
  };
  refused("cu_seqlens_q[0]", {1, 3, 5}, {43, 22});
  refused("cu_seqlens_q[0]", {-1, 3, 5}, {43, 22});
  refused("cu_seqlens_q[2]", {0, 3, 2}, {43, 22});
  refused("cu_seqlens_q[1]", {0, -3, 5}, {43, 22});
  refused("cu_seqlens_q[2]", {0, 3, 6}, {43, 22});
  refused("cu_seqlens_q", {0, 3, 0x7FFFFFFF}, {43, 22});
  refused("seq_lens[1]", {0, 3, 5}, {43, -1});
  refused("block_table", {0, 3, 5}, {49, 22}, StatusCode::kOutOfRange);
  refused("block_table", {0, 3, 5}, {0x7FFFFFFF, 22}, StatusCode::kOutOfRange);
  refused("block_table", {0, 3, 5}, {43, 1 << 30}, StatusCode::kOutOfRange);
}

TEST(Batch, FirstPositionsAreCheckedAgainstTheWindow) {
  AttendSpec spec;
  spec.seqs = {{100, 2}};
  spec.mask.window = 20;
  spec.short_tables = true;
  AttendProblem problem(spec);  // first visible position 81, table from 80
  const auto refused = [&](int32_t first, StatusCode code, const char* argument) {
    problem.call.first_positions = &first;
    EXPECT_TRUE(fails_with(problem.run(), code, argument)) << first;
    EXPECT_TRUE(problem.outputs_untouched());
  };
  refused(96, StatusCode::kInvalidArgument, "first_positions[0]");
  refused(81, StatusCode::kInvalidArgument, "first_positions[0]");
  refused(-16, StatusCode::kInvalidArgument, "first_positions[0]");
  // A table that starts earlier than it says ends before the last key.
  refused(64, StatusCode::kOutOfRange, "block_table");
}

TEST(Batch, UnknownBackendsAndThreadCountsAreRefused) {
  AttendSpec spec;
  AttendProblem problem(spec);
  RunOptions options;
  options.backend = "gpu9000";
  EXPECT_TRUE(fails_with(problem.run(options), StatusCode::kUnavailable, "gpu9000"));
  options.backend = "cpu/none";
  EXPECT_TRUE(fails_with(problem.run(options), StatusCode::kUnavailable, "cpu/none"));
  options = {};
  options.num_threads = -2;
  EXPECT_TRUE(fails_with(problem.run(options), StatusCode::kInvalidArgument, "num_threads"));
  EXPECT_TRUE(problem.outputs_untouched());
}

TEST(Batch, EmptyBatchesAndEmptySequencesAreFine) {
  AttendSpec spec;
  spec.seqs = {};
  AttendProblem none(spec);
  EXPECT_TRUE(testing::runs_and_matches(&none));
  spec.seqs = {{5, 0}, {0, 0}};
  AttendProblem no_rows(spec);
  EXPECT_TRUE(testing::runs_and_matches(&no_rows));
  EXPECT_TRUE(no_rows.outputs_untouched());
}

TEST(Batch, PaddedRowsAreWrittenAsEmpty) {
  // A batch padded to more rows than its sequences own, or with zero-length sequences: every row of
  // the output is written by the call.
  AttendSpec spec;
  spec.seqs = {{4095, 1}, {-1, 1}, {-3, 3}};
  spec.sinks = true;
  for (bool raw : {false, true}) {
    spec.raw_chunk = raw;
    AttendProblem problem(spec);
    std::vector<int32_t> cu = {0, 1, 1, 1};
    const std::vector<int32_t> lens = {4096, 0, 0};
    ASSERT_TRUE(testing::runs_and_matches(&problem));
    const std::vector<std::byte> empty_row = problem.row_bits(1);
    problem.refill_outputs();
    problem.call.cu_seqlens_q = cu.data();
    problem.call.seq_lens = lens.data();
    ASSERT_TRUE(is_ok(problem.run()));
    for (int64_t r = 1; r < 5; ++r) {
      EXPECT_TRUE(testing::same_bits(problem.row_bits(r), empty_row));
      for (int head = 0; head < 4; ++head) {
        EXPECT_EQ(problem.lse(r, head), -std::numeric_limits<double>::infinity());
        for (int d = 0; d < 64; ++d) EXPECT_EQ(problem.out(r, head, d), 0.0);
      }
    }
  }
}

TEST(Outputs, LseIsOptional) {
  AttendSpec spec;
  AttendProblem with(spec), without(spec);
  ASSERT_TRUE(is_ok(with.run()));
  without.call.lse = nullptr;
  ASSERT_TRUE(is_ok(without.run()));
  for (int64_t r = 0; r < 3; ++r) {
    for (int d = 0; d < 64; ++d) EXPECT_EQ(without.out(r, 2, d), with.out(r, 2, d));
  }
}

TEST(Pools, ReadPastTwoAndFourGiB) {
  // UNI with constant 5 in a sparse pool whose named pages sit at either side of the 32-bit edges.
  const SlotFormat format = testing::make_format("k8v4", 128);
  constexpr int kBlock = 16;
  const int64_t block_bytes = int64_t{format.slot_bytes()} * kBlock;
  const int64_t num_blocks = (int64_t{5} << 30) / block_bytes;
  const auto bytes = static_cast<size_t>(num_blocks * block_bytes);
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  AttendSpec spec;
  spec.preset = "k8v4";
  spec.head_dim = 128;
  spec.num_kv_heads = 1;
  spec.group = 2;
  std::vector<int32_t> table;
  for (int64_t edge : {int64_t{1} << 31, int64_t{1} << 32, int64_t{5} << 30}) {
    for (int delta : {-1, 0, 1}) {
      const int64_t block = edge / block_bytes + delta;
      if (block < num_blocks) table.push_back(static_cast<int32_t>(block));
    }
  }
  const auto tokens = static_cast<int64_t>(table.size()) * kBlock;
  spec.seqs = {{tokens - 1, 1}};
  AttendProblem problem(spec);
  problem.call.cache = make_cache(static_cast<std::byte*>(mapping), num_blocks, kBlock, 1, format);
  problem.call.block_table = table.data();
  problem.call.max_blocks = static_cast<int64_t>(table.size());
  testing::SlotContent content;
  content.key_codes.assign(128, 0);
  content.value_codes.assign(128, 0);
  for (size_t b = 0; b < table.size(); ++b) {
    content.zero = testing::double_to_half(static_cast<double>(b));
    for (int t = 0; t < kBlock; ++t) {
      write_slot(format, content,
                 problem.call.cache.pages + problem.call.cache.slot_offset(table[b], t, 0));
    }
  }
  ASSERT_TRUE(is_ok(problem.run()));
  EXPECT_NEAR(problem.out(0, 1, 77), static_cast<double>(table.size() - 1) / 2, 1e-5);
  EXPECT_NEAR(problem.lse(0, 0), std::log(static_cast<double>(tokens)), 1e-5);
  munmap(mapping, bytes);
}

TEST(Backends, TableEndsWithTheCpuAndAnswersSupport) {
  ASSERT_GE(num_backends(), 1);
  EXPECT_STREQ(backend_name(num_backends() - 1), "cpu");
  EXPECT_STREQ(backend_name(-1), "");
  EXPECT_STREQ(backend_name(num_backends()), "");
  AttentionCall call = shape_of(testing::make_format("4bit_nc", 128), 32, 8, 4, 16);
  EXPECT_TRUE(is_ok(backend_supports("cpu", call)));
  EXPECT_TRUE(fails_with(backend_supports("none", call), StatusCode::kUnavailable, "none"));
  call.num_heads = 30;
  EXPECT_TRUE(fails_with(backend_supports("cpu", call), StatusCode::kInvalidArgument, "num_heads"));
  EXPECT_STRNE(version(), "");
}

// Asked for CUDA where there is none: one typed refusal that names the backend, from every entry.
TEST(Backends, CudaWithoutADeviceIsUnavailable) {
  if (num_devices() > 0) GTEST_SKIP() << "this machine has one";
  AttendSpec spec;
  spec.head_dim = 128;
  AttendProblem problem(spec);
  for (const char* backend : {"cuda", "cuda/rows", "cuda/tile", "cuda/hopper"}) {
    RunOptions options;
    options.backend = backend;
    const std::string got = std::string("backend: got ") + backend;
    EXPECT_TRUE(fails_with(problem.run(options), StatusCode::kUnavailable, got));
    EXPECT_TRUE(fails_with(backend_supports(backend, problem.call), StatusCode::kUnavailable, got));
    size_t bytes = 0;
    EXPECT_TRUE(
        fails_with(workspace_bytes(problem.call, options, &bytes), StatusCode::kUnavailable, got));
  }
  EXPECT_TRUE(problem.outputs_untouched());
  RunOptions options;
  options.backend = "cuda";
  EXPECT_TRUE(fails_with(decode_slots({.cache = problem.call.cache}, options),
                         StatusCode::kUnavailable, "backend: got cuda"));
  EXPECT_TRUE(fails_with(encode_slots({.cache = problem.call.cache}, nullptr, options),
                         StatusCode::kUnavailable, "backend: got cuda"));
  float out[1] = {}, lse[1] = {};
  const PartialState state = {out, lse};
  EXPECT_TRUE(fails_with(merge_states({.states = &state,
                                       .num_states = 1,
                                       .total_q = 1,
                                       .num_heads = 1,
                                       .head_dim = 1,
                                       .out = out},
                                      options),
                         StatusCode::kUnavailable, "backend: got cuda"));
}

TEST(Backends, ReportSaysWhatRan) {
  AttendSpec spec;
  spec.tile_tokens = 100;
  AttendProblem problem(spec);
  RunOptions options;
  options.backend = "cpu";
  options.num_threads = 2;
  RunReport report;
  ASSERT_TRUE(is_ok(problem.run(options, &report)));
  ASSERT_NE(report.backend, nullptr);
  EXPECT_EQ(std::string(report.backend).substr(0, 4), "cpu/");
  EXPECT_EQ(report.num_threads, 2);
  EXPECT_GE(report.tile_tokens, 100);
  EXPECT_EQ(report.tile_tokens % spec.block_size, 0);
  size_t bytes = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(problem.call, options, &bytes)));
  EXPECT_EQ(report.workspace_bytes, bytes);
  // The name it reports is one it accepts.
  options.backend = report.backend;
  EXPECT_TRUE(is_ok(problem.run(options)));
}

}  // namespace
}  // namespace kvtile
