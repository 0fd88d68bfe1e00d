// wgmma reads key and value planes as matrix_descriptor.h says: one product of each against the
// host's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "src/core/float16.h"
#include "tests/cuda/device_buffer.h"
#include "tests/cuda/wgmma_probe.h"
#include "tests/testing/numbers.h"

namespace kvtile {
namespace {

using testing::DeviceBuffer;

TEST(WgmmaGpuTest, ReadsPlanesAsDescribed) {
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) GTEST_SKIP() << "wgmma is Hopper's";
  testing::Random random(5);
  const auto draw = [&random](size_t count) {
    std::vector<uint16_t> words(count);
    for (uint16_t& word : words) word = float_to_half(static_cast<float>(random.integer(-32, 32)));
    return words;
  };
  for (bool values : {false, true}) {
    const std::vector<uint16_t> a = draw(64 * 16), b = draw(128 * 16);
    const DeviceBuffer device_a(a), device_b(b);
    DeviceBuffer device_out(64 * 128 * sizeof(float));
    device_out.fill(0xff);
    ASSERT_EQ(testing::launch_wgmma_probe(device_a.as<uint16_t>(), device_b.as<uint16_t>(), values,
                                          device_out.as<float>()),
              cudaSuccess);
    const std::vector<std::byte> bytes = device_out.download();
    const auto* out = reinterpret_cast<const float*>(bytes.data());
    for (size_t row = 0; row < 64; ++row) {
      for (size_t x = 0; x < 128; ++x) {
        float want = 0.0f;  // small integers: exact
        for (size_t k = 0; k < 16; ++k) {
          want += half_to_float(a[row * 16 + k]) * half_to_float(b[x * 16 + k]);
        }
        ASSERT_EQ(out[row * 128 + x], want) << "values " << values << " " << row << " " << x;
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
