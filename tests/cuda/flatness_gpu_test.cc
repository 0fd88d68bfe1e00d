// Error does not grow with the context: equal scores over constant and uniform values, 16K to 1M
// cached, against the mean of the decoded values in float64. A tensor core truncates what it
// accumulates, so an engine that never starts afresh fails here.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/codec.h"
#include "tests/cuda/device_buffer.h"
#include "tests/cuda/engines.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::DeviceBuffer;
using testing::engines;
using testing::is_ok;

constexpr int64_t kMost = 1 << 20;
constexpr int kBlockSize = 16;
constexpr int kGroup = 4;

// A one-head pool of kMost tokens in page order: one piece of kPiece tokens, again and again.
constexpr int64_t kPiece = 1 << 16;
constexpr int64_t kShortest = 1 << 14;

struct Pool {
  Pool(const SlotFormat& format, bool uniform) : head_dim(format.head_dim) {
    cache = make_cache(nullptr, kMost / kBlockSize, kBlockSize, 1, format);
    pages = DeviceBuffer(static_cast<size_t>(cache.pages_bytes));
    cache.pages = pages.as<>();
    RunOptions options;
    options.backend = "cuda";
    testing::Random random(11);
    std::vector<float> rows(static_cast<size_t>(kPiece * head_dim));
    for (float& x : rows) x = uniform ? static_cast<float>(random.uniform(0.0, 1.0)) : 1.0f;
    const DeviceBuffer key(std::vector<float>(rows.size(), 0.0f)), value(rows);
    DeviceBuffer decoded(rows.size() * 4), slots(kPiece * 8);
    std::vector<int64_t> mapping(kPiece);
    for (int64_t first = 0; first < kMost; first += kPiece) {
      for (int64_t i = 0; i < kPiece; ++i) mapping[static_cast<size_t>(i)] = first + i;
      slots.upload(mapping.data());
      EncodeCall encode;
      encode.key = key.as<>();
      encode.value = value.as<>();
      encode.dtype = DType::kFloat32;
      encode.num_tokens = kPiece;
      encode.slot_mapping = slots.as<int64_t>();
      encode.cache = cache;
      EXPECT_TRUE(is_ok(encode_slots(encode, nullptr, options)));
    }
    DecodeCall decode;
    decode.cache = cache;
    decode.slot_mapping = slots.as<int64_t>();
    decode.num_tokens = kPiece;
    decode.value = decoded.as<>();
    EXPECT_TRUE(is_ok(decode_slots(decode, options)));
    const std::vector<std::byte> bytes = decoded.download();
    const auto* x = reinterpret_cast<const float*>(bytes.data());
    std::vector<double> sum(static_cast<size_t>(head_dim), 0.0);
    for (int64_t i = 0; i < kPiece; ++i) {
      for (size_t d = 0; d < sum.size(); ++d) {
        sum[d] += static_cast<double>(*x++);
        if (i + 1 == kShortest) short_mean.push_back(sum[d] / kShortest);
        if (i + 1 == kPiece) piece_mean.push_back(sum[d] / kPiece);
      }
    }
    std::vector<int32_t> entries(static_cast<size_t>(cache.num_blocks));
    for (size_t i = 0; i < entries.size(); ++i) entries[i] = static_cast<int32_t>(i);
    table = DeviceBuffer(entries);
  }

  const std::vector<double>& mean(int64_t tokens) const {
    return tokens == kShortest ? short_mean : piece_mean;
  }

  int head_dim;
  PagedCache cache;
  DeviceBuffer pages, table;
  std::vector<double> short_mean, piece_mean;
};

// Relative error of q_len rows that see `tokens` keys each, without a mask between them.
double relative_error(const Pool& pool, const char* engine, int64_t q_len, int64_t tokens) {
  const int64_t elements = q_len * kGroup * pool.head_dim;
  testing::Random random(5);
  std::vector<float> queries(static_cast<size_t>(elements));
  for (float& x : queries) x = static_cast<float>(random.normal());
  const DeviceBuffer query(queries);
  const DeviceBuffer cu(std::vector<int32_t>{0, static_cast<int32_t>(q_len)});
  const DeviceBuffer lens(std::vector<int32_t>{static_cast<int32_t>(tokens)});
  DeviceBuffer out(static_cast<size_t>(elements) * 4);
  AttentionCall call;
  call.query = query.as<>();
  call.out = out.as<>();
  call.dtype = DType::kFloat32;
  call.num_seqs = 1;
  call.total_q = call.max_q_len = q_len;
  call.num_heads = kGroup;
  call.softmax_scale = 1.0f / std::sqrt(static_cast<float>(pool.head_dim));
  call.mask.causal = false;
  call.cache = pool.cache;
  call.block_table = pool.table.as<int32_t>();
  call.max_blocks = pool.cache.num_blocks;
  call.cu_seqlens_q = cu.as<int32_t>();
  call.seq_lens = lens.as<int32_t>();
  RunOptions options;
  options.backend = engine;
  size_t bytes = 0;
  EXPECT_TRUE(is_ok(workspace_bytes(call, options, &bytes)));
  DeviceBuffer workspace(bytes);
  EXPECT_TRUE(is_ok(attend(call, {workspace.as<>(), bytes}, options)));
  const std::vector<std::byte> result = out.download();
  const auto* got = reinterpret_cast<const float*>(result.data());
  const std::vector<double>& want = pool.mean(tokens);
  double error = 0.0, size = 0.0;
  for (int64_t i = 0; i < elements; ++i) {
    const double w = want[static_cast<size_t>(i % pool.head_dim)];
    error += (static_cast<double>(got[i]) - w) * (static_cast<double>(got[i]) - w);
    size += w * w;
  }
  return std::sqrt(error / size);
}

TEST(FlatnessGpuTest, ErrorAtAMillionTokensIsThatAtSixteenThousand) {
  for (const char* preset : {"4bit_nc", "k8v4", "k3v4_nc", "3bit_nc"}) {
    for (int head_dim : {128, 256}) {
      for (bool uniform : {false, true}) {
        const Pool pool(testing::make_format(preset, head_dim), uniform);
        for (const char* engine : engines()) {
          const int64_t q_len = engine[5] == 'r' ? 8 : 64;
          double shortest = 0.0;
          for (int64_t tokens : {kShortest, int64_t{1} << 17, kMost}) {
            const double error = relative_error(pool, engine, q_len, tokens);
            std::printf("flatness %s d%d %s %s %7lld tokens: %.2e\n", preset, head_dim,
                        uniform ? "uniform" : "constant", engine, static_cast<long long>(tokens),
                        error);
            if (tokens == kShortest) shortest = error;
            EXPECT_LE(error, 1.5e-3);
            // Below a hundredth of the bar there is nothing to grow.
            EXPECT_LE(error, std::max(1.2 * shortest, 1.5e-5));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
