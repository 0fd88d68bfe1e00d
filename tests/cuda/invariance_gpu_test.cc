// Batch-invariant calls: a row's bits by itself, among batch-mates, and as one row of several.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/cuda/device_buffer.h"
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
using testing::fails_with;
using testing::format_names;
using testing::FormatName;
using testing::GpuProblem;
using testing::is_ok;
using testing::kGpuTolerance;
using testing::matches_reference;

// The problem's rows [row, row + count) of sequence `seq` in a call of their own; out and lse of
// all heads of the last of them.
std::vector<std::byte> last_row_alone(const AttendProblem& problem, const GpuProblem& gpu, int seq,
                                      int64_t count, int64_t row_of_seq) {
  AttentionCall call = gpu.call;
  const int64_t row_bytes =
      int64_t{call.num_heads} * problem.spec.head_dim * dtype_bytes(call.dtype);
  const int64_t first = problem.call.cu_seqlens_q[seq] + row_of_seq + 1 - count;
  const DeviceBuffer cu(std::vector<int32_t>{0, static_cast<int32_t>(count)});
  const DeviceBuffer len(
      std::vector<int32_t>{static_cast<int32_t>(problem.cached_len(seq) + row_of_seq + 1)});
  const DeviceBuffer out(static_cast<size_t>(count * row_bytes));
  const DeviceBuffer lse(static_cast<size_t>(count * call.num_heads) * sizeof(float));
  call.query = static_cast<const std::byte*>(call.query) + first * row_bytes;
  call.num_seqs = 1;
  call.total_q = call.max_q_len = count;
  const int64_t table_stride =
      call.block_table_stride > 0 ? call.block_table_stride : call.max_blocks;
  call.block_table += seq * table_stride;
  call.cu_seqlens_q = cu.as<int32_t>();
  call.seq_lens = len.as<int32_t>();
  call.out = out.as<>();
  call.lse = lse.as<float>();
  size_t bytes = 0;
  EXPECT_TRUE(is_ok(workspace_bytes(call, backend("cuda"), &bytes)));
  const DeviceBuffer workspace(bytes);
  EXPECT_TRUE(is_ok(attend(call, {workspace.as<>(), bytes}, backend("cuda"))));
  std::vector<std::byte> result = out.download();
  result.erase(result.begin(), result.end() - row_bytes);
  const std::vector<std::byte> lses = lse.download();
  for (int h = 0; h < call.num_heads; ++h) {
    const auto* at = lses.data() + (h * count + count - 1) * static_cast<int64_t>(sizeof(float));
    result.insert(result.end(), at, at + sizeof(float));
  }
  return result;
}

TEST(InvarianceGpuTest, BitsFollowFromTheRowAlone) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : {64, 128, 256}) {
      for (int group : {1, 4, 12}) {
        AttendSpec spec;
        spec.preset = name.preset;
        spec.fp8 = name.fp8;
        spec.head_dim = head_dim;
        spec.group = group;
        spec.num_kv_heads = group == 4 ? 8 : 2;  // 8: what is not asked takes all heads a block
        spec.dtype = DType::kBFloat16;
        // The oracle takes its time: the long sequence is for few heads.
        spec.seqs = {{group == 1 ? 9000 : 1100, 4}, {0, 3}, {61, 1}, {127, 5}, {517, 8}, {33, 2}};
        if (group == 12) spec.mask.window = 700;
        AttendProblem problem(spec);
        problem.call.batch_invariant = true;
        GpuProblem gpu(&problem);
        ASSERT_TRUE(is_ok(gpu.run(backend("cuda"))));
        EXPECT_TRUE(gpu.margins_intact());
        EXPECT_TRUE(matches_reference(problem, kGpuTolerance)) << describe(spec);
        const auto* out = static_cast<const std::byte*>(problem.call.out);
        const auto row_bytes = static_cast<size_t>(problem.call.num_heads) *
                               static_cast<size_t>(head_dim * dtype_bytes(spec.dtype));
        for (int seq = 0; seq < problem.num_seqs(); ++seq) {
          for (int64_t row = 0; row < problem.q_len(seq); ++row) {
            const auto at = static_cast<size_t>(problem.call.cu_seqlens_q[seq] + row);
            const std::vector<std::byte> one = last_row_alone(problem, gpu, seq, 1, row);
            EXPECT_EQ(std::memcmp(one.data(), out + at * row_bytes, row_bytes), 0)
                << describe(spec) << " sequence " << seq << " row " << row;
            if (row != 2) continue;
            EXPECT_EQ(last_row_alone(problem, gpu, seq, 3, row), one)
                << describe(spec) << " sequence " << seq << ", three rows";
          }
        }
      }
    }
  }
}

TEST(InvarianceGpuTest, IsRefusedWhereItCannotBeHad) {
  AttendSpec spec;
  spec.head_dim = 128;
  spec.seqs = {{300, 200}};
  AttendProblem problem(spec);
  GpuProblem gpu(&problem);
  EXPECT_TRUE(is_ok(backend_supports("cuda", gpu.call)));
  gpu.call.batch_invariant = true;
  for (const char* engine : {"cuda", "cuda/tile"}) {
    EXPECT_TRUE(fails_with(backend_supports(engine, gpu.call), StatusCode::kUnsupported,
                           "batch_invariant: got true"));
  }
  EXPECT_TRUE(
      fails_with(backend_supports("cuda/rows", gpu.call), StatusCode::kUnsupported, "max_q_len"));
  gpu.call.max_q_len = 8;
  EXPECT_TRUE(is_ok(backend_supports("cuda", gpu.call)));
}

}  // namespace
}  // namespace kvtile
