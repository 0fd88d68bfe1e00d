// The rows kernel's own source under the emulator, on a small made-up device: every case of
// rows_cases.h, with asynchronous copies made as late and as early as they may be and warps in
// different orders; the bits must not change.
#include <gtest/gtest.h>

#include <string>

#include "src/attention/cuda/combine.cuh"
#include "src/attention/cuda/sm80/rows.cuh"
#include "src/attention/cuda/sm80/rows_launch.h"
#include "src/attention/cuda/sm90/rows_pages.cuh"
#include "src/attention/cuda/sm90/rows_verify.cuh"
#include "tests/cuda/parts.h"
#include "tests/cuda/rows_cases.h"

namespace kvtile {

Status cuda_status(const char*, int) { return {}; }

namespace cuda {

template <class Config>
void emulate(const RowsParams& params, const RowsResidency& residency, int64_t blocks) {
  emulator::launch(static_cast<unsigned>(blocks), static_cast<unsigned>(32 * residency.warps),
                   [&params] {
                     if constexpr (Config::kTiles == 1) {
                       if (params.plan.pages) return rows_pages_kernel<Config>(params);
                     } else if constexpr (Config::kHeadDim >= 128) {
                       if (params.plan.verify_heads > 0) return rows_verify_kernel<Config>(params);
                     }
                     rows_kernel<Config>(params);
                   });
}

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
cudaError_t launch_rows(const RowsParams& params, const RowsResidency& residency, int64_t blocks,
                        cudaStream_t) {
  switch (params.plan.rows) {
    case 8:
      emulate<RowsConfig<kKey, kValue, kHeadDim, 1>>(params, residency, blocks);
      break;
    case 16:
      emulate<RowsConfig<kKey, kValue, kHeadDim, 2>>(params, residency, blocks);
      break;
    default:
      emulate<RowsConfig<kKey, kValue, kHeadDim, 4>>(params, residency, blocks);
  }
  return cudaSuccess;
}

#define KVTILE_EMULATED_INSTANCES(key, value)                                                \
  template cudaError_t launch_rows<key, value, 64>(const RowsParams&, const RowsResidency&,  \
                                                   int64_t, cudaStream_t);                   \
  template cudaError_t launch_rows<key, value, 128>(const RowsParams&, const RowsResidency&, \
                                                    int64_t, cudaStream_t);                  \
  template cudaError_t launch_rows<key, value, 256>(const RowsParams&, const RowsResidency&, \
                                                    int64_t, cudaStream_t);
KVTILE_EMULATED_INSTANCES(KeyCode::kFp8E4M3, ValueCode::kUniform4)
KVTILE_EMULATED_INSTANCES(KeyCode::kFp8E4B15, ValueCode::kUniform4)
KVTILE_EMULATED_INSTANCES(KeyCode::kLloydMax4, ValueCode::kUniform4)
KVTILE_EMULATED_INSTANCES(KeyCode::kLloydMax3, ValueCode::kUniform4)
KVTILE_EMULATED_INSTANCES(KeyCode::kLloydMax3, ValueCode::kUniform3)

cudaError_t launch_rows_combine(const RowsParams& params, int head_dim, cudaStream_t) {
  const auto blocks =
      static_cast<unsigned>(params.num_rows * params.a.num_heads * (head_dim / kRowsCombineDims));
  const auto threads =
      32u * static_cast<unsigned>(std::min(kCombineMaxWarps, params.plan.num_states()));
  emulator::launch(blocks, threads, [&] {
    head_dim == 64    ? rows_combine_kernel<64>(params)
    : head_dim == 128 ? rows_combine_kernel<128>(params)
                      : rows_combine_kernel<256>(params);
  });
  return cudaSuccess;
}

}  // namespace cuda

namespace rows_test {

// Few SMs: few blocks to emulate.
DeviceInfo small_device() {
  DeviceInfo device = testing::h200();
  device.num_sms = 3;
  return device;
}

// Every case takes seconds here; those of head_dim 64 reach all of the kernel's paths but teams.
bool wanted(const Case& c) {
  const char* only = std::getenv("KVTILE_CASE");
  if (only != nullptr) {
    return std::string(only) == "all" || std::string(c.name).find(only) != std::string::npos;
  }
  int64_t tokens = 0;
  for (const Sequence& s : c.seqs) tokens += s.seq_len;
  const std::string name = c.name;
  return tokens < 1500 && (c.head_dim == 64 || name.find("4bit_nc d256 verify") == 0 ||
                           name.find("3bit_nc d128 verify") == 0 || name.find(" d") == name.npos);
}

TEST(RowsEmulatedTest, Cases) {
  const DeviceInfo device = small_device();
  uint32_t seed = 1;
  for (const Case& c : cases()) {
    ++seed;
    if (!wanted(c)) continue;
    emulator::options() = {};
    const int before = failures;
    const std::vector<uint8_t> late = check(c, device, seed);
    emulator::options() = {true, seed};
    const std::vector<uint8_t> early = check(c, device, seed);
    EXPECT_EQ(failures, before) << c.name;
    EXPECT_EQ(early, late) << c.name;
  }
}

// A length far beyond the table must not be walked: its rows are NaN, the other sequence's bits
// stay.
TEST(RowsEmulatedTest, LengthsBeyondTheTableEnd) {
  const DeviceInfo device = small_device();
  emulator::options() = {};
  for (int max_q_len : {0, 2}) {  // one head a block, all heads a block
    for (int64_t window : {0, 30}) {
      Case c;
      c.head_dim = 64;
      c.max_q_len = max_q_len;
      c.window = window;
      c.dtype = DType::kFloat32;
      c.seqs = {{300, 2}, {100, 2}};
      rows_test::Run run;
      build(c, &run, 7);
      ASSERT_TRUE(launch(&run, device));
      const std::vector<uint8_t> good = run.out.download();
      for (int32_t length : {0x7fffffff, 0x7fffff00, 1 << 24, -5, -0x7fffffff - 1}) {
        run.lens.upload({length, 100});
        run.call.seq_lens = run.lens.data;
        ASSERT_TRUE(launch(&run, device));
        const std::vector<uint8_t> out = run.out.download();
        const size_t half = out.size() / 2;
        EXPECT_TRUE(std::equal(out.begin() + half, out.end(), good.begin() + half)) << length;
        const auto* rows = reinterpret_cast<const float*>(out.data());
        for (size_t i = 0; i < half / sizeof(float); ++i) {
          ASSERT_TRUE(length > 0 ? std::isnan(rows[i]) : rows[i] == 0.0f) << length << " " << i;
        }
      }
    }
  }
}

// Bits of a row in a batch-invariant call: by itself, among others, as one of several rows.
TEST(RowsEmulatedTest, BatchInvariantBits) {
  const DeviceInfo device = small_device();
  emulator::options() = {};
  for (int group : {2, 12}) {
    Case c;
    c.head_dim = 64;
    c.num_heads = group;
    c.num_kv_heads = 1;
    c.dtype = DType::kFloat32;
    // More rows than a launch takes: 3 SMs have 48 states at most.
    for (int i = 0; i < 6; ++i) c.seqs.push_back({900 + 37 * i, 1 + i});
    rows_test::Run run;
    build(c, &run, 11);
    run.call.batch_invariant = true;
    ASSERT_TRUE(launch(&run, device));
    const std::vector<uint8_t> all = run.out.download();
    const size_t row_bytes = all.size() / static_cast<size_t>(run.call.total_q);
    const std::vector<int32_t> cu = run.cu.download(), lens = run.lens.download();
    const auto* query = static_cast<const std::byte*>(run.call.query);
    const int32_t* table = run.call.block_table;
    run.call.num_seqs = 1;
    run.call.total_q = 1;
    for (size_t seq = 0; seq + 1 < cu.size(); ++seq) {
      for (int32_t row = cu[seq]; row < cu[seq + 1]; ++row) {
        run.call.query = query + static_cast<size_t>(row) * row_bytes;
        run.call.block_table = table + static_cast<int64_t>(seq) * run.call.max_blocks;
        run.cu.upload({0, 1});
        run.lens.upload({lens[seq] - (cu[seq + 1] - 1 - row)});
        run.call.cu_seqlens_q = run.cu.data;
        run.call.seq_lens = run.lens.data;
        ASSERT_TRUE(launch(&run, device));
        const std::vector<uint8_t> one = run.out.download();
        EXPECT_TRUE(std::equal(one.begin(), one.begin() + static_cast<int64_t>(row_bytes),
                               all.begin() + static_cast<int64_t>(row * row_bytes)))
            << "group " << group << " seq " << seq << " row " << row;
      }
    }
  }
}

}  // namespace rows_test
}  // namespace kvtile
