// merge_states() on the GPU against the CPU's: the same float64 sums, so the same numbers up to the
// last bit of an exponential; identities and empty states exactly.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kvtile/attention.h"
#include "src/core/device.h"
#include "tests/cuda/device_buffer.h"
#include "tests/testing/compare.h"
#include "tests/testing/numbers.h"
#include "tests/testing/partial_states.h"

namespace kvtile {
namespace {

using testing::DeviceBuffer;
using testing::fails_with;
using testing::is_ok;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

RunOptions on_the_gpu() {
  RunOptions options;
  options.backend = "cuda";
  return options;
}

// Random states on both sides, some of them empty.
struct States : testing::PartialStates {
  States(int count, int64_t q_rows, int heads, int dim, uint64_t seed)
      : PartialStates(count, q_rows, heads, dim) {
    fill_random(this, seed, 20.0);
    // An empty state's payload is never read: poison it.
    for (int i = 0; i < count; ++i) {
      for (int h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < q_rows; ++t) {
          if ((t + h + i) % 3 != 0) continue;
          lse_of(i, t, h) = -kInf;
          for (int d = 0; d < dim; ++d) out_row(i, t, h)[d] = d % 2 == 0 ? kNaN : kInf;
        }
      }
    }
    device_out = DeviceBuffer(out);
    device_lse = DeviceBuffer(lse);
    for (int64_t i = 0; i < count; ++i) {
      device.push_back({device_out.as<float>() + i * q_rows * heads * dim,
                        device_lse.as<float>() + i * q_rows * heads});
    }
  }
  DeviceBuffer device_out, device_lse;
  std::vector<PartialState> device;
};

TEST(MergeGpuTest, AgreesWithTheCpu) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int count : {1, 2, 3, 64}) {
      for (int head_dim : {64, 128, 80, 256}) {
        const int64_t total_q = 37;
        const int heads = 6;
        States states(count, total_q, heads, head_dim, static_cast<uint64_t>(count + head_dim));
        const auto elements = static_cast<size_t>(total_q * heads * head_dim);
        const auto bytes = static_cast<size_t>(dtype_bytes(dtype));
        std::vector<std::byte> want(elements * bytes);
        const std::vector<float>& want_lse = states.merged_lse;
        DeviceBuffer got(elements * bytes), got_lse(want_lse.size() * 4);
        MergeCall call = states.call();
        call.dtype = dtype;
        call.out = want.data();
        ASSERT_TRUE(is_ok(merge_states(call)));
        call.states = states.device.data();
        call.out = got.as<>();
        call.lse = got_lse.as<float>();
        ASSERT_TRUE(is_ok(merge_states(call, on_the_gpu())));
        const auto host = got.download(), host_lse = got_lse.download();
        EXPECT_TRUE(got.margins_intact());
        EXPECT_TRUE(got_lse.margins_intact());
        for (size_t i = 0; i < elements; ++i) {
          const double w = testing::load_element(want.data(), dtype, static_cast<int64_t>(i));
          const double g = testing::load_element(host.data(), dtype, static_cast<int64_t>(i));
          ASSERT_NEAR(g, w, testing::spacing(dtype, std::fabs(w))) << i;
        }
        for (size_t i = 0; i < want_lse.size(); ++i) {
          const double g =
              testing::load_element(host_lse.data(), DType::kFloat32, static_cast<int64_t>(i));
          const double w = static_cast<double>(want_lse[i]);
          if (std::isinf(w)) {
            ASSERT_EQ(g, w);
          } else {
            ASSERT_NEAR(g, w, testing::spacing(DType::kFloat32, std::fabs(w)));
          }
        }
      }
    }
  }
}

TEST(MergeGpuTest, IdentityNaNAndAliasing) {
  const std::vector<float> a = {1.5f, -2.0f}, poison = {kNaN, kInf};
  const auto merge = [&](const std::vector<std::vector<float>>& outs,
                         const std::vector<float>& lses, float* lse) {
    std::vector<DeviceBuffer> buffers;
    std::vector<PartialState> states;
    for (size_t i = 0; i < outs.size(); ++i) {
      buffers.emplace_back(outs[i]);
      auto* out = buffers.back().as<float>();
      buffers.emplace_back(std::vector<float>{lses[i]});
      states.push_back({out, buffers.back().as<float>()});
    }
    MergeCall call;
    call.states = states.data();
    call.num_states = static_cast<int>(outs.size());
    call.total_q = call.num_heads = 1;
    call.head_dim = 2;
    call.out = buffers[0].as<>();  // a state's own buffers
    call.lse = buffers[1].as<float>();
    EXPECT_TRUE(is_ok(merge_states(call, on_the_gpu())));
    const auto out = buffers[0].download(), l = buffers[1].download();
    std::memcpy(lse, l.data(), 4);
    std::vector<float> result(2);
    std::memcpy(result.data(), out.data(), 8);
    return result;
  };
  float lse = 0.0f;
  EXPECT_EQ(merge({a, poison}, {3.25f, -kInf}, &lse), a);
  EXPECT_EQ(lse, 3.25f);
  EXPECT_EQ(merge({poison, a, poison}, {-kInf, 3.25f, -kInf}, &lse), a);
  EXPECT_EQ(lse, 3.25f);
  for (const std::vector<float>& special :
       {std::vector<float>{-0.0f, 0.0f}, {kNaN, -kNaN}, {kInf, 1.0e-45f}}) {
    const std::vector<float> copied = merge({poison, special}, {-kInf, -0.0f}, &lse);
    EXPECT_EQ(std::memcmp(copied.data(), special.data(), 8), 0) << special[0];
    EXPECT_TRUE(lse == 0.0f && std::signbit(lse));
  }
  EXPECT_EQ(merge({poison, poison}, {-kInf, -kInf}, &lse), (std::vector<float>{0.0f, 0.0f}));
  EXPECT_EQ(lse, -kInf);
  EXPECT_EQ(merge({a, {3.5f, 0.0f}}, {1.0f, 1.0f}, &lse), (std::vector<float>{2.5f, -1.0f}));
  EXPECT_TRUE(std::isnan(merge({a, a}, {1.0f, kNaN}, &lse)[0]));
  EXPECT_TRUE(std::isnan(lse));
  EXPECT_TRUE(std::isnan(merge({a, a}, {1.0f, kInf}, &lse)[1]));
}

TEST(MergeGpuTest, RefusesTyped) {
  States states(2, 3, 2, 64, 1);
  DeviceBuffer out(3 * 2 * 64 * 4);
  MergeCall call = states.call();
  call.states = states.device.data();
  call.out = out.as<>();
  call.lse = nullptr;
  RunOptions options = on_the_gpu();
  ASSERT_TRUE(is_ok(merge_states(call, options)));
  MergeCall wrong = call;
  wrong.states = states.partial.data();
  EXPECT_TRUE(
      fails_with(merge_states(wrong, options), StatusCode::kInvalidArgument, "states[0].out"));
  wrong = call;
  wrong.out = states.out.data();
  EXPECT_TRUE(fails_with(merge_states(wrong, options), StatusCode::kInvalidArgument, "out"));
  wrong = call;
  const std::vector<PartialState> many(65, states.device[0]);
  wrong.states = many.data();
  wrong.num_states = 65;
  EXPECT_TRUE(fails_with(merge_states(wrong, options), StatusCode::kUnsupported, "num_states"));
  options.device = num_devices();
  EXPECT_TRUE(fails_with(merge_states(call, options), StatusCode::kInvalidArgument, "device"));
}

}  // namespace
}  // namespace kvtile
