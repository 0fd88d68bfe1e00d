// attend() on the CUDA engines through the public interface: a parity matrix against the float64
// oracle and the CPU, the edges of memory (workspace, margins, poison, hostile tables), the choice
// of an engine, and typed refusals. Every engine that supports a case runs it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "src/core/device.h"
#include "tests/cuda/engines.h"
#include "tests/cuda/gpu_problem.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::backend;
using testing::DeviceBuffer;
using testing::engines;
using testing::engines_and_choice;
using testing::fails_with;
using testing::format_names;
using testing::FormatName;
using testing::GpuProblem;
using testing::is_ok;
using testing::kGpuTolerance;
using testing::Random;
using testing::same_bits;
using testing::SeqSpec;

constexpr int kHeadDims[] = {64, 128, 256};

// One engine on one case: status, margins, and every row against the oracle.
::testing::AssertionResult check(AttendProblem* problem, GpuProblem* gpu, const char* engine) {
  const Status status = gpu->run(backend(engine));
  ::testing::AssertionResult result = is_ok(status);
  if (result) result = gpu->margins_intact();
  if (result) result = matches_reference(*problem, kGpuTolerance);
  if (!result) result << " on " << engine << " for " << describe(problem->spec);
  return result;
}

// All cases on all engines, spread over the cores: the oracle takes the time.
void run_cases(const std::vector<AttendSpec>& cases) {
  const std::vector<const char*> names = engines();
  std::vector<int> ran(names.size(), 0);
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < cases.size(); ++i) {
    AttendProblem problem(cases[i]);
    GpuProblem gpu(&problem);
    for (size_t e = 0; e < names.size(); ++e) {
      const Status supported = backend_supports(names[e], gpu.call);
      if (!supported.ok()) {
        // Only the rows engine refuses, and only for its rows.
        EXPECT_EQ(e, 0u) << supported.message();
        EXPECT_TRUE(fails_with(supported, StatusCode::kUnsupported, "max_q_len"));
        continue;
      }
      EXPECT_TRUE(check(&problem, &gpu, names[e]));
#pragma omp atomic
      ++ran[e];
    }
  }
  EXPECT_GT(ran[0], 0);
  for (size_t e = 1; e < names.size(); ++e) EXPECT_EQ(ran[e], static_cast<int>(cases.size()));
}

AttendSpec base(const FormatName& name, int head_dim) {
  AttendSpec spec;
  spec.preset = name.preset;
  spec.fp8 = name.fp8;
  spec.head_dim = head_dim;
  return spec;
}

// Format x head_dim x group x block_size in full; masks, dtypes, layouts and chunks take turns.
std::vector<AttendSpec> matrix(int head_dim) {
  std::vector<AttendSpec> cases;
  int turn = 0;
  for (const FormatName& name : format_names()) {
    for (int group : {1, 3, 4, 6, 8, 16}) {
      for (int block_size : {1, 16, 17, 784}) {
        AttendSpec spec = base(name, head_dim);
        const int t = turn++;
        spec.group = group;
        spec.num_kv_heads = 1 + t % 2;
        spec.block_size = block_size;
        spec.dtype = static_cast<DType>(t % 3);
        spec.raw_chunk = t % 2 == 1;
        spec.layout = static_cast<PageLayout>(t / 2 % 3);
        spec.slot_padding = t % 5 == 0 ? 6 : 0;
        spec.strided = t % 4 == 3;
        switch (t % 7) {
          case 1:
            spec.mask.causal = false;
            break;
          case 2:
            spec.mask.window = 40;
            spec.short_tables = true;
            break;
          case 3:
            spec.softcap = 2.5f;
            break;
          case 4:
            spec.sinks = true;
            break;
          case 5:
            spec.mask = {false, 33};
            spec.sinks = true;
            break;
          default:
            break;
        }
        const int64_t page = block_size > 100 ? 100 : block_size;
        spec.seqs = {{0, 1}, {61, 2}, {127, 1}, {page - 1, 3}, {page, 1}, {page + 1, 1}, {0, 4}};
        spec.seed = static_cast<uint64_t>(1000 * head_dim + t);
        cases.push_back(spec);
      }
    }
  }
  return cases;
}

TEST(AttendGpuTest, MatrixHeadDim64) { run_cases(matrix(64)); }
TEST(AttendGpuTest, MatrixHeadDim128) { run_cases(matrix(128)); }
TEST(AttendGpuTest, MatrixHeadDim256) { run_cases(matrix(256)); }

// The lists every backend is held to, where the CUDA engines have the head_dim.
TEST(AttendGpuTest, SharedCases) {
  std::vector<AttendSpec> cases;
  for (const std::vector<AttendSpec>& list :
       {testing::head_dim_cases(), testing::geometry_cases(), testing::length_cases(),
        testing::mask_cases(), testing::dtype_cases()}) {
    for (AttendSpec spec : list) {
      if (spec.head_dim == 32) spec.head_dim = 64;
      if (spec.head_dim == 64 || spec.head_dim == 128 || spec.head_dim == 256) {
        cases.push_back(spec);
      }
    }
  }
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    AttendSpec spec = testing::random_spec(seed);
    spec.head_dim = kHeadDims[seed % 3];
    cases.push_back(spec);
  }
  run_cases(cases);
}

// Longer than an epoch of the rows engine, a span and a tile of the tile engine, in one batch with
// decode rows; every engine against the CPU, whose own error is a hundred times smaller.
TEST(AttendGpuTest, LongMixedBatchesAgreeWithTheCpu) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : kHeadDims) {
      for (bool raw : {false, true}) {
        AttendSpec spec = base(name, head_dim);
        spec.num_kv_heads = 2;
        spec.group = head_dim == 256 ? 6 : 4;
        spec.dtype = DType::kFloat32;
        spec.raw_chunk = raw;
        spec.seqs = {{9000, 1}, {40000, 5}, {3000, 1}, {0, 1}};
        if (head_dim == 128) spec.seqs = {{20000, 100}, {9000, 1}, {70, 300}, {0, 0}};
        AttendProblem problem(spec);
        GpuProblem gpu(&problem);
        ASSERT_TRUE(is_ok(problem.run(backend("cpu"))));
        std::vector<double> want;
        const auto outputs = [&] {
          std::vector<double> all;
          for (int64_t r = 0; r < problem.call.total_q; ++r) {
            for (int h = 0; h < spec.num_heads(); ++h) {
              for (int d = 0; d < head_dim; ++d) all.push_back(problem.out(r, h, d));
            }
          }
          return all;
        };
        want = outputs();
        for (const char* engine : engines()) {
          if (!backend_supports(engine, gpu.call).ok()) continue;
          ASSERT_TRUE(is_ok(gpu.run(backend(engine)))) << engine << describe(spec);
          const std::vector<double> got = outputs();
          double error = 0.0, size = 0.0;
          for (size_t i = 0; i < got.size(); ++i) {
            error += (got[i] - want[i]) * (got[i] - want[i]);
            size += want[i] * want[i];
          }
          EXPECT_LT(std::sqrt(error / size), 1.5e-3) << engine << " " << describe(spec);
          EXPECT_TRUE(gpu.margins_intact());
        }
      }
    }
  }
}

// Results do not depend on tile_tokens, and neither do they on what the workspace held.
TEST(AttendGpuTest, TileSizeAndGarbageMoveNoBit) {
  for (int head_dim : kHeadDims) {
    AttendSpec spec = base(format_names()[2], head_dim);
    spec.seqs = {{20000, 70}, {300, 5}};
    spec.raw_chunk = true;
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    for (const char* engine : engines()) {
      gpu.call.tile_tokens = 0;
      if (!backend_supports(engine, gpu.call).ok()) continue;
      ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
      const auto bits = problem.all_bits();
      for (int64_t tile : {8192, 16384, 32768, 65536}) {
        gpu.call.tile_tokens = tile;
        ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
        EXPECT_TRUE(same_bits(problem.all_bits(), bits)) << engine << " " << tile;
      }
    }
  }
}

// Bytes that no visible position names cannot change a bit.
TEST(AttendGpuTest, PoisonMovesNoBit) {
  for (const FormatName& name : format_names()) {
    for (const char* engine : engines()) {
      std::vector<std::byte> bits;
      for (std::byte poison : {std::byte{0xFF}, std::byte{0x00}, std::byte{0x7C}}) {
        AttendSpec spec = base(name, 128);
        spec.seqs = {{500, 3}, {33, 1}, {0, 2}};
        spec.mask.window = 100;
        spec.slot_padding = 6;
        spec.poison = poison;
        AttendProblem problem(spec);
        GpuProblem gpu(&problem);
        ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
        if (bits.empty()) bits = problem.all_bits();
        EXPECT_TRUE(same_bits(problem.all_bits(), bits)) << engine << " " << describe(spec);
      }
    }
  }
}

// A visible token without a page makes the rows that see it NaN; the others keep every bit, and
// nothing faults, whatever the tables and lengths say.
TEST(AttendGpuTest, HostileTablesAndLengthsDoNotFault) {
  for (const char* engine : engines()) {
    AttendSpec spec = base(format_names()[2], 128);
    spec.seqs = {{300, 2}, {200, 2}, {100, 2}};
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
    std::vector<std::vector<std::byte>> good;
    for (int64_t r = 0; r < 6; ++r) good.push_back(problem.row_bits(r));
    const auto* honest = gpu.call.block_table;
    std::vector<int32_t> table(static_cast<size_t>(3 * problem.call.max_blocks));
    for (int32_t bad : {-1, static_cast<int32_t>(problem.call.cache.num_blocks), 0x7FFFFFFF,
                        std::numeric_limits<int32_t>::min()}) {
      std::copy_n(problem.call.block_table, table.size(), table.begin());
      table[static_cast<size_t>(problem.call.max_blocks) + 3] = bad;  // sequence 1
      const DeviceBuffer device_table(table);
      gpu.call.block_table = device_table.as<int32_t>();
      ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
      for (int64_t r : {0, 1, 4, 5}) {
        EXPECT_TRUE(same_bits(problem.row_bits(r), good[static_cast<size_t>(r)])) << engine << bad;
      }
      for (int64_t r : {2, 3}) EXPECT_TRUE(std::isnan(problem.out(r, 0, 0))) << engine << bad;
    }
    gpu.call.block_table = honest;
    // Lengths beyond the table, negative, and offsets that do not ascend.
    for (const std::vector<int32_t>& lens : {std::vector<int32_t>{0x7FFFFFFF, 202, 102},
                                             {-5, 202, 102},
                                             {std::numeric_limits<int32_t>::min(), 0, 102}}) {
      const DeviceBuffer device_lens(lens);
      gpu.call.seq_lens = device_lens.as<int32_t>();
      ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
      EXPECT_TRUE(gpu.margins_intact());
      EXPECT_TRUE(same_bits(problem.row_bits(5), good[5])) << engine << lens[0];
    }
    const DeviceBuffer lens(std::vector<int32_t>{302, 202, 102});
    gpu.call.seq_lens = lens.as<int32_t>();
    for (const std::vector<int32_t>& cu :
         {std::vector<int32_t>{0, 100, -7, 6},
          {5, 4, 3, 2},
          {-100, 0x7FFFFFFF, std::numeric_limits<int32_t>::min(), 6}}) {
      const DeviceBuffer device_cu(cu);
      gpu.call.cu_seqlens_q = device_cu.as<int32_t>();
      ASSERT_TRUE(is_ok(gpu.run(backend(engine))));
      EXPECT_TRUE(gpu.margins_intact());
    }
  }
}

TEST(AttendGpuTest, WorkspaceIsExactAndOneByteLessIsRefused) {
  for (const char* engine : engines_and_choice()) {
    AttendSpec spec = base(format_names()[2], 128);
    spec.seqs = {{500, 4}, {70, 1}};
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    size_t bytes = 0;
    ASSERT_TRUE(is_ok(workspace_bytes(gpu.call, backend(engine), &bytes)));
    ASSERT_GT(bytes, 0u);
    DeviceBuffer workspace(bytes);
    gpu.upload_outputs();
    EXPECT_TRUE(fails_with(attend(gpu.call, {workspace.as<>(), bytes - 1}, backend(engine)),
                           StatusCode::kWorkspaceTooSmall, "workspace"));
    EXPECT_TRUE(fails_with(attend(gpu.call, {workspace.as<>() + 8, bytes}, backend(engine)),
                           StatusCode::kInvalidArgument, "workspace"));
    gpu.download();
    EXPECT_TRUE(problem.outputs_untouched()) << "a refused call wrote";
    ASSERT_TRUE(is_ok(attend(gpu.call, {workspace.as<>(), bytes}, backend(engine))));
    gpu.download();
    EXPECT_TRUE(workspace.margins_intact());
    EXPECT_TRUE(matches_reference(problem, kGpuTolerance));
    // The formula follows no length and serves every smaller total_q.
    AttentionCall call = gpu.call;
    for (int64_t max_seq_len : {0, 1, 1 << 20}) {
      call.max_seq_len = max_seq_len;
      size_t again = 0;
      ASSERT_TRUE(is_ok(workspace_bytes(call, backend(engine), &again)));
      EXPECT_EQ(again, bytes);
    }
  }
}

TEST(AttendGpuTest, WorkspaceGrowsWithTheBatchAlone) {
  for (int head_dim : kHeadDims) {
    for (int64_t max_q_len : {0, 1, 5, 64, 4096}) {
      AttentionCall call;
      call.cache = make_cache(nullptr, 0, 16, 8, testing::make_format("4bit_nc", head_dim));
      call.num_heads = 32;
      call.num_seqs = 20;
      call.max_q_len = max_q_len;
      call.softmax_scale = 1.0f;
      size_t before = 0;
      for (call.total_q = 1; call.total_q < 5000; call.total_q += 1 + call.total_q / 16) {
        size_t bytes = 0;
        ASSERT_TRUE(is_ok(workspace_bytes(call, backend("cuda"), &bytes)));
        EXPECT_GE(bytes, before) << head_dim << " hint " << max_q_len << " rows " << call.total_q;
        before = bytes;
      }
      EXPECT_LE(before, size_t{65} << 20);
    }
  }
}

TEST(AttendGpuTest, ChoosesRowsForDecodeAndTilesForPrefill) {
  for (int64_t q_len : {1, 4, 8, 512}) {
    AttendSpec spec = base(format_names()[2], 128);
    spec.group = 4;
    spec.seqs = {{700, q_len}, {90, 1}};
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    RunReport report;
    ASSERT_TRUE(is_ok(gpu.run(backend("cuda"), &report)));
    EXPECT_STREQ(report.backend, q_len > 100 ? engines().back() : "cuda/rows");
    EXPECT_TRUE(matches_reference(problem, kGpuTolerance));
  }
}

TEST(AttendGpuTest, RefusesWhatItCannotDoBeforeWriting) {
  AttendSpec spec = base(format_names()[2], 128);
  spec.raw_chunk = true;
  spec.sinks = true;
  AttendProblem problem(spec);
  GpuProblem gpu(&problem);
  for (const char* engine : engines_and_choice()) {
    const RunOptions options = backend(engine);
    size_t bytes = 0;
    ASSERT_TRUE(is_ok(workspace_bytes(gpu.call, options, &bytes)));
    DeviceBuffer workspace(bytes);
    gpu.upload_outputs();
    const auto refused = [&](auto&& change, StatusCode code, const char* argument) {
      AttentionCall call = gpu.call;
      RunOptions with = options;
      change(&call, &with);
      EXPECT_TRUE(fails_with(attend(call, {workspace.as<>(), bytes}, with), code, argument));
    };
    constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
    const AttentionCall& host = problem.call;
    using Call = AttentionCall;
    using Run = RunOptions;
    refused([&](Call* c, Run*) { c->query = host.query; }, kInvalid, "query");
    refused([&](Call* c, Run*) { c->out = host.out; }, kInvalid, "out");
    refused([&](Call* c, Run*) { c->lse = host.lse; }, kInvalid, "lse");
    refused([&](Call* c, Run*) { c->sinks = host.sinks; }, kInvalid, "sinks");
    refused([&](Call* c, Run*) { c->cache.pages = host.cache.pages; }, kInvalid, "pages");
    refused([&](Call* c, Run*) { c->block_table = host.block_table; }, kInvalid, "block_table");
    refused([&](Call* c, Run*) { c->cu_seqlens_q = host.cu_seqlens_q; }, kInvalid, "cu_seqlens_q");
    refused([&](Call* c, Run*) { c->seq_lens = host.seq_lens; }, kInvalid, "seq_lens");
    refused([&](Call* c, Run*) { c->seq_lens = nullptr; }, kInvalid, "seq_lens");
    refused([&](Call* c, Run*) { c->chunk_value = host.chunk_value; }, kInvalid, "chunk_value");
    refused([&](Call*, Run* r) { r->device = num_devices(); }, kInvalid, "device");
    refused([&](Call*, Run* r) { r->device = -2; }, kInvalid, "device");
    refused([&](Call* c, Run*) { c->cache.pages += 1; }, StatusCode::kUnsupported, "pages");
    refused(
        [&](Call* c, Run*) {
          c->cache.stride_block += 1;
          c->cache.pages_bytes = 0;  // unknown: the pool would be too small for such a stride
        },
        StatusCode::kUnsupported, "stride_block");
    if (num_devices() > 1) {
      refused([&](Call*, Run* r) { r->device = 1; }, kInvalid, "memory of device");
    }
    std::vector<std::byte> host_workspace(bytes + 64);
    auto* aligned = reinterpret_cast<std::byte*>(
        (reinterpret_cast<uintptr_t>(host_workspace.data()) + 63) / 64 * 64);
    EXPECT_TRUE(fails_with(attend(gpu.call, {aligned, bytes}, options), kInvalid, "workspace"));
    gpu.download();
    EXPECT_TRUE(problem.outputs_untouched()) << engine;
  }
  AttentionCall call = gpu.call;
  call.cache = make_cache(call.cache.pages, 1, 16, 2, testing::make_format("k8v4", 80));
  for (const char* engine : engines_and_choice()) {
    EXPECT_TRUE(fails_with(backend_supports(engine, call), StatusCode::kUnsupported, "head_dim"));
  }
  call = gpu.call;
  call.max_q_len = call.total_q = 129;
  EXPECT_TRUE(
      fails_with(backend_supports("cuda/rows", call), StatusCode::kUnsupported, "max_q_len"));
  EXPECT_TRUE(is_ok(backend_supports("cuda", call)));
  EXPECT_TRUE(
      fails_with(backend_supports("cuda/other", call), StatusCode::kUnavailable, "backend"));
}

TEST(AttendGpuTest, RunsOnTheDeviceItIsToldTo) {
  AttendSpec spec = base(format_names()[2], 128);
  AttendProblem problem(spec);
  GpuProblem gpu(&problem);
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  RunOptions options = backend("cuda");
  options.device = current;
  ASSERT_TRUE(is_ok(gpu.run(options)));
  EXPECT_TRUE(matches_reference(problem, kGpuTolerance));
  if (num_devices() < 2) GTEST_SKIP() << "one device";
  // The other device's arrays, called from a thread whose current device is this one.
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  {
    GpuProblem other(&problem);
    size_t bytes = 0;
    options.device = 1;
    ASSERT_TRUE(is_ok(workspace_bytes(other.call, options, &bytes)));
    DeviceBuffer workspace(bytes);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_TRUE(is_ok(attend(other.call, {workspace.as<>(), bytes}, options)));
    ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0);
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    other.download();
    EXPECT_TRUE(matches_reference(problem, kGpuTolerance));
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

// For compute-sanitizer: little work, every kernel, and a workspace nobody has written, so that
// initcheck sees what is read before it is made.
TEST(SanitizerGpuTest, SmallShapesOnFreshMemory) {
  for (const char* engine : engines()) {
    for (const FormatName& name : format_names()) {
      for (int head_dim : kHeadDims) {
        for (bool raw : {false, true}) {
          AttendSpec spec = base(name, head_dim);
          spec.raw_chunk = raw;
          spec.sinks = raw;
          spec.seqs = {{150, 3}, {0, 2}, {17, 1}};
          if (engine[5] == 't') spec.seqs.push_back({70, 40});
          AttendProblem problem(spec);
          GpuProblem gpu(&problem);
          size_t bytes = 0;
          ASSERT_TRUE(is_ok(workspace_bytes(gpu.call, backend(engine), &bytes)));
          void* workspace = nullptr;
          ASSERT_EQ(cudaMalloc(&workspace, bytes), cudaSuccess);
          EXPECT_TRUE(is_ok(attend(gpu.call, {workspace, bytes}, backend(engine))));
          gpu.download();
          EXPECT_EQ(cudaFree(workspace), cudaSuccess);
          EXPECT_TRUE(matches_reference(problem, kGpuTolerance)) << engine << describe(spec);
        }
      }
    }
  }
}

TEST(AttendGpuTest, EmptyBatches) {
  for (const char* engine : engines()) {
    AttendSpec spec = base(format_names()[2], 128);
    spec.seqs = {{0, 0}, {10, 0}};
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    EXPECT_TRUE(is_ok(gpu.run(backend(engine)))) << engine;
    // Rows of no sequence are zeros with lse -inf.
    spec.seqs = {{20, 3}};
    AttendProblem rows(spec);
    GpuProblem none(&rows);
    none.call.num_seqs = 0;
    ASSERT_TRUE(is_ok(none.run(backend(engine)))) << engine;
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(rows.out(r, 1, 5), 0.0) << engine;
      EXPECT_EQ(rows.lse(r, 1), -std::numeric_limits<double>::infinity()) << engine;
    }
  }
}

}  // namespace
}  // namespace kvtile
