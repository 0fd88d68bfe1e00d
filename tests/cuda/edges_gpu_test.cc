// attend() on the CUDA engines where the case lists of attend_gpu_test.cc do not reach: windows and
// row blocks over many tiles, peaked and odd scales, wide batches, rows of no sequence, calls
// without a hint, formats without norm correction, and non-finite words in both engines.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "src/attention/reference.h"
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
using testing::engines;
using testing::format_names;
using testing::FormatName;
using testing::GpuProblem;
using testing::is_ok;
using testing::kGpuTolerance;
using testing::Random;
using testing::SeqSpec;

constexpr double kRelativeBar = 1.5e-3;

AttendSpec base(const FormatName& name, int head_dim, const std::vector<SeqSpec>& seqs) {
  return {.preset = name.preset, .fp8 = name.fp8, .head_dim = head_dim, .seqs = seqs, .mask = {}};
}

// Every step-th row, over all heads: the norm of the error over that of the float64 oracle.
double relative_error(const AttendProblem& problem, int64_t step) {
  const AttentionCall& call = problem.call;
  const int head_dim = problem.spec.head_dim;
  const int64_t items = (call.total_q + step - 1) / step * call.num_heads;
  double error = 0.0, size = 0.0;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : error, size)
  for (int64_t i = 0; i < items; ++i) {
    const int64_t row = i / call.num_heads * step;
    const int head = static_cast<int>(i % call.num_heads);
    std::vector<double> want(static_cast<size_t>(head_dim));
    double lse = 0.0;
    reference_attend_row(call, row, head, want.data(), &lse);
    for (int d = 0; d < head_dim; ++d) {
      const double w = want[static_cast<size_t>(d)], e = problem.out(row, head, d) - w;
      error += e * e;
      size += w * w;
    }
  }
  return std::sqrt(error / size);
}

// The engines that support the call, each held to the oracle on every step-th row.
void expect_close(AttendProblem* problem, int64_t step = 1) {
  GpuProblem gpu(problem);
  int ran = 0;
  for (const char* engine : engines()) {
    if (!backend_supports(engine, gpu.call).ok()) continue;
    ++ran;
    ASSERT_TRUE(is_ok(gpu.run(backend(engine)))) << engine;
    EXPECT_TRUE(gpu.margins_intact());
    EXPECT_TRUE(problem->outputs_contained());
    EXPECT_LE(relative_error(*problem, step), kRelativeBar)
        << engine << " " << describe(problem->spec);
  }
  EXPECT_GT(ran, 0);
}

TEST(AttendEdgesGpuTest, WindowsOverManyTiles) {
  for (int head_dim : {128, 256}) {
    for (int64_t window : {1, 100, 2000}) {
      for (int64_t q_len : {5, 200}) {
        AttendSpec spec = base(format_names()[2], head_dim,
                               {{20000 - q_len, q_len}, {0, std::min<int64_t>(q_len, 64)}});
        spec.mask.window = window;
        spec.group = 4;
        AttendProblem problem(spec);
        expect_close(&problem, 1 + q_len / 20);
      }
    }
    for (int64_t window : {0, 777}) {
      AttendSpec spec = base(format_names()[2], head_dim, {{2800, 200}, {0, 64}});
      spec.mask = {false, window};
      spec.group = 4;
      AttendProblem problem(spec);
      expect_close(&problem, 11);
    }
  }
}

TEST(AttendEdgesGpuTest, ManyRowBlocksOfSeveralHeads) {
  for (int head_dim : {128, 256}) {
    AttendSpec spec = base(format_names()[2], head_dim, {{7000, 2000}, {29967, 33}});
    spec.num_kv_heads = 4;
    spec.group = 4;
    spec.raw_chunk = true;
    AttendProblem problem(spec);
    expect_close(&problem, 127);
  }
}

TEST(AttendEdgesGpuTest, OddScales) {
  for (const FormatName& name : format_names()) {
    for (float scale : {0.0f, -0.3f, 1e-12f}) {
      AttendSpec spec = base(name, 128, {{300, 3}, {20, 1}});
      spec.sinks = true;
      AttendProblem problem(spec);
      problem.call.softmax_scale = scale;
      expect_close(&problem);
    }
  }
}

// A peaked softmax multiplies the rounding of a score by its size. The rows engine keeps its bar
// nearly as it is.
TEST(AttendEdgesGpuTest, PeakedRows) {
  for (int head_dim : {128, 256}) {
    AttendSpec spec = base(format_names()[2], head_dim, {{19998, 2}});
    spec.dtype = DType::kFloat16;
    spec.group = 4;
    AttendProblem rows(spec);
    rows.call.softmax_scale *= 22.0f;  // scores spread by 22
    GpuProblem rows_gpu(&rows);
    ASSERT_TRUE(is_ok(rows_gpu.run(backend("cuda/rows"))));
    EXPECT_LE(relative_error(rows, 1), 2e-3) << head_dim;
    spec.dtype = DType::kFloat32;
    spec.sinks = true;
    spec.seqs = {{1000, 100}};
    AttendProblem tile(spec);
    tile.call.softmax_scale *= 8.0f;
    GpuProblem tile_gpu(&tile);
    for (const char* engine : engines()) {
      if (!backend_supports(engine, tile_gpu.call).ok()) continue;
      ASSERT_TRUE(is_ok(tile_gpu.run(backend(engine))));
      EXPECT_LE(relative_error(tile, 7), 8 * kRelativeBar) << engine << " " << head_dim;
    }
  }
}

TEST(AttendEdgesGpuTest, WideAndRaggedBatches) {
  std::vector<SeqSpec> wide, ragged;
  for (int64_t i = 0; i < 100; ++i) {
    const int64_t seq_len = 37 * i % 301, q_len = std::min<int64_t>(seq_len, 1);
    wide.push_back({seq_len - q_len, q_len});
  }
  for (int64_t i = 0; i < 70; ++i) ragged.push_back({50 + 2 * i, i % 7});
  for (const FormatName& name : format_names()) {
    for (const std::vector<SeqSpec>& seqs : {wide, ragged}) {
      AttendProblem problem(base(name, 128, seqs));
      expect_close(&problem);
    }
  }
}

// Pages whose heads lie together, at most eight rows: the blocks that take all KV heads.
TEST(AttendEdgesGpuTest, FewRowsOfAllHeads) {
  for (PageLayout layout : {PageLayout::kTokenMajor, PageLayout::kHeadMajor}) {
    for (int num_kv_heads : {1, 2, 5, 8}) {
      for (int block_size : {16, 32}) {
        for (bool raw : {false, true}) {
          AttendSpec spec = base(format_names()[2], 128, {{527, 3}, {0, 2}, {128, 1}, {1496, 4}});
          spec.layout = layout;
          spec.num_kv_heads = num_kv_heads;
          spec.block_size = block_size;
          spec.raw_chunk = raw;
          spec.mask.window = raw ? 200 : 0;
          spec.sinks = raw;
          spec.softcap = raw ? 20.0f : 0.0f;
          AttendProblem problem(spec);
          expect_close(&problem);
        }
      }
    }
  }
}

TEST(AttendEdgesGpuTest, WithoutNormCorrection) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : {64, 128, 256}) {
      AttendSpec spec = base(name, head_dim, {{398, 3}, {61, 2}});
      AttendProblem problem(spec);
      if (!spec.format().rotated()) continue;
      problem.call.cache.format.norm_correction = false;
      expect_close(&problem);
    }
  }
}

TEST(AttendEdgesGpuTest, WithoutAHint) {
  for (const char* engine : engines()) {
    AttendSpec spec = base(format_names()[2], 128, {{300, 40}, {0, 0}, {90, 7}, {1000, 1}});
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    gpu.call.max_q_len = 0;
    ASSERT_TRUE(is_ok(gpu.run(backend(engine)))) << engine;
    EXPECT_TRUE(matches_reference(problem, kGpuTolerance)) << engine;
  }
}

// Rows behind the last sequence are zeros with lse -inf; the others are what they were.
TEST(AttendEdgesGpuTest, RowsOfNoSequence) {
  for (const char* engine : engines()) {
    AttendSpec spec = base(format_names()[2], 128, {{200, 3}, {70, 40}, {10, 5}});
    AttendProblem problem(spec);
    GpuProblem gpu(&problem);
    gpu.call.num_seqs = 2;
    ASSERT_TRUE(is_ok(gpu.run(backend(engine)))) << engine;
    std::vector<int64_t> rows;
    for (int64_t r = 0; r < 43; ++r) rows.push_back(r);
    EXPECT_TRUE(rows_match_reference(problem, rows, kGpuTolerance)) << engine;
    for (int64_t r = 43; r < 48; ++r) {
      for (int head = 0; head < spec.num_heads(); ++head) {
        EXPECT_EQ(problem.lse(r, head), -std::numeric_limits<double>::infinity()) << engine;
        for (int d = 0; d < spec.head_dim; ++d) ASSERT_EQ(problem.out(r, head, d), 0.0) << engine;
      }
    }
  }
}

TEST(AttendEdgesGpuTest, NonFiniteWordsReachTheRowsThatSeeThem) {
  constexpr uint16_t kWords[] = {0x7E00, 0x7C00, 0xFC00};
  for (const FormatName& name : format_names()) {
    for (int head_dim : {64, 128, 256}) {
      for (int64_t window : {0, 50}) {
        for (int64_t q_len : {3, 300}) {
          AttendSpec spec =
              base(name, head_dim, {{330 - q_len, q_len}, {1960, std::min<int64_t>(q_len, 40)}});
          spec.mask.window = window;
          AttendProblem problem(spec);
          const SlotFormat format = spec.format();
          Random random(static_cast<uint64_t>(head_dim + window + q_len));
          for (int i = 0; i < 6; ++i) {
            const int seq = i % 2;
            const int64_t position =
                random.integer(problem.packed_begin(seq), problem.packed_end(seq) - 1);
            const int offset = i == 0 && format.rotated() ? format.norm_offset()
                               : i % 3 == 1               ? format.zero_offset()
                                                          : format.scale_offset();
            std::memcpy(problem.slot(seq, position, i / 2 % 2) + offset, &kWords[i % 3], 2);
          }
          GpuProblem gpu(&problem);
          for (const char* engine : engines()) {
            if (!backend_supports(engine, gpu.call).ok()) continue;
            ASSERT_TRUE(is_ok(gpu.run(backend(engine)))) << engine;
            EXPECT_TRUE(matches_reference(problem, kGpuTolerance))
                << engine << " " << describe(spec);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
