// Bits that must not move: graph replay after lengths, tables and queries changed equals the eager
// call, and repeated runs are equal whatever else the GPU is doing.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/core/device.h"
#include "tests/cuda/engines.h"
#include "tests/cuda/gpu_problem.h"
#include "tests/cuda/jitter.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::DeviceBuffer;
using testing::engines;
using testing::GpuProblem;
using testing::is_ok;
using testing::kGpuTolerance;
using testing::same_bits;
using testing::SeqSpec;

RunOptions on(const char* engine, cudaStream_t stream) {
  RunOptions options;
  options.backend = engine;
  options.stream = stream;
  return options;
}

class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Graph {
 public:
  template <typename Body>
  Graph(cudaStream_t stream, const Body& body) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    body();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) { EXPECT_EQ(cudaGraphLaunch(exec_, stream), cudaSuccess); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

AttendSpec batch(int head_dim, bool raw, const std::vector<SeqSpec>& seqs, uint64_t seed) {
  AttendSpec spec;
  spec.head_dim = head_dim;
  spec.group = head_dim == 256 ? 6 : 4;
  spec.dtype = DType::kBFloat16;
  spec.raw_chunk = raw;
  spec.seqs = seqs;
  spec.seed = seed;
  return spec;
}

// The graph is captured on one batch and replayed on others of the same shape: other lengths,
// tables, pages, queries, and another split of the rows into sequences. The captured call is the
// first one that touches the engine's code with this shape: no warm-up.
TEST(ReplayGpuTest, ReplayEqualsEagerAfterEverythingChanged) {
  const std::vector<std::vector<SeqSpec>> batches = {
      {{9000, 4}, {3000, 1}, {0, 3}}, {{5, 1}, {8999, 6}, {120, 1}}, {{0, 0}, {700, 8}, {0, 0}}};
  for (const char* engine : engines()) {
    for (int head_dim : {64, 128, 256}) {
      for (bool raw : {false, true}) {
        SCOPED_TRACE(std::string(engine) + " d" + std::to_string(head_dim) +
                     (raw ? " raw" : " packed"));
        // Pools and tables of one size, so that the call keeps its shape.
        std::vector<AttendProblem> problems;
        int64_t pages_bytes = 0, max_blocks = 0;
        for (size_t i = 0; i < batches.size(); ++i) {
          problems.emplace_back(batch(head_dim, raw, batches[i], 40 + i));
          pages_bytes = std::max(pages_bytes, problems.back().call.cache.pages_bytes);
          max_blocks = std::max(max_blocks, problems.back().call.max_blocks);
        }
        // Device arrays at fixed addresses, refilled for each batch.
        const AttentionCall& first = problems[0].call;
        const int64_t row = first.num_heads * head_dim * 2, kv_row = 2 * head_dim * 2;
        DeviceBuffer pages(static_cast<size_t>(pages_bytes)), query(static_cast<size_t>(8 * row)),
            key(static_cast<size_t>(8 * kv_row)), value(static_cast<size_t>(8 * kv_row)),
            table(static_cast<size_t>(3 * max_blocks * 4)), cu(16), lens(12),
            out(static_cast<size_t>(8 * row)), lse(static_cast<size_t>(8 * first.num_heads * 4));
        AttentionCall call = first;
        call.cache.pages = pages.as<>();
        call.cache.pages_bytes = pages_bytes;
        call.cache.num_blocks = pages_bytes / call.cache.stride_block;
        call.query = query.as<>();
        call.out = out.as<>();
        call.lse = lse.as<float>();
        call.block_table = table.as<int32_t>();
        call.max_blocks = max_blocks;
        call.cu_seqlens_q = cu.as<int32_t>();
        call.seq_lens = lens.as<int32_t>();
        if (raw) {
          call.chunk_key = key.as<>();
          call.chunk_value = value.as<>();
        }
        call.max_q_len = 8;
        const auto load = [&](AttendProblem& p) {
          std::vector<std::byte> pool(static_cast<size_t>(pages_bytes), std::byte{0xFF});
          std::copy_n(p.call.cache.pages, p.call.cache.pages_bytes, pool.begin());
          pages.upload(pool.data());
          query.upload(p.call.query);
          if (raw) {
            key.upload(p.call.chunk_key);
            value.upload(p.call.chunk_value);
          }
          std::vector<int32_t> entries(static_cast<size_t>(3 * max_blocks), -1);
          for (int64_t s = 0; s < 3; ++s) {
            std::copy_n(p.call.block_table + s * p.call.max_blocks, p.call.max_blocks,
                        entries.begin() + s * max_blocks);
          }
          table.upload(entries.data());
          cu.upload(p.call.cu_seqlens_q);
          lens.upload(p.call.seq_lens);
          out.fill(0xFF);
          lse.fill(0xFF);
        };
        Stream stream;
        const RunOptions options = on(engine, stream);
        size_t bytes = 0;
        ASSERT_TRUE(is_ok(workspace_bytes(call, options, &bytes)));
        DeviceBuffer workspace(bytes);
        load(problems[0]);
        Graph graph(stream, [&] {
          EXPECT_TRUE(is_ok(attend(call, {workspace.as<>(), bytes}, options)));
        });
        for (AttendProblem& p : problems) {
          load(p);
          workspace.fill(0xFF);
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          graph.launch(stream);
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          const auto replayed = out.download(), replayed_lse = lse.download();
          load(p);
          workspace.fill(0x7B);
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          ASSERT_TRUE(is_ok(attend(call, {workspace.as<>(), bytes}, options)));
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          EXPECT_TRUE(same_bits(out.download(), replayed));
          EXPECT_TRUE(same_bits(lse.download(), replayed_lse));
          EXPECT_TRUE(out.margins_intact());
          EXPECT_TRUE(workspace.margins_intact());
          // And both are right.
          std::copy(replayed.begin(), replayed.end(), p.output_regions()[0].data);
          std::copy(replayed_lse.begin(), replayed_lse.end(), p.output_regions()[1].data);
          EXPECT_TRUE(matches_reference(p, kGpuTolerance));
        }
      }
    }
  }
}

TEST(ReplayGpuTest, AHundredJitteredRunsGiveTheSameBits) {
  const DeviceInfo* device = nullptr;
  ASSERT_TRUE(is_ok(device_info(-1, &device)));
  for (const char* engine : engines()) {
    for (int head_dim : {128, 256}) {
      AttendProblem problem(batch(head_dim, true, {{20000, 4}, {3000, 1}, {64, 8}, {9000, 2}}, 7));
      GpuProblem gpu(&problem);
      Stream stream, other;
      const RunOptions options = on(engine, stream);
      size_t bytes = 0;
      ASSERT_TRUE(is_ok(workspace_bytes(gpu.call, options, &bytes)));
      DeviceBuffer workspace(bytes);
      std::vector<std::byte> bits;
      testing::Random random(3);
      for (int run = 0; run < 100; ++run) {
        gpu.upload_outputs();
        workspace.fill(run % 2 == 0 ? 0xFF : 0x3C);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ASSERT_EQ(testing::launch_jitter(static_cast<int>(random.integer(1, 8 * device->num_sms)),
                                         random.integer(100, 100000), other),
                  cudaSuccess);
        ASSERT_TRUE(is_ok(attend(gpu.call, {workspace.as<>(), bytes}, options)));
        gpu.download();
        if (run == 0) {
          bits = problem.all_bits();
          EXPECT_TRUE(rows_match_reference(problem, {4, 5, 13}, kGpuTolerance));
        }
        ASSERT_TRUE(same_bits(problem.all_bits(), bits)) << engine << " run " << run;
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
