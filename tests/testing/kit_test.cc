// The kit judges the library, so it is checked first: number formats against the compiler's own
// conversions, guard pages and sentinels against deliberate trespass.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/testing/buffers.h"
#include "tests/testing/cases.h"
#include "tests/testing/generate.h"
#include "tests/testing/numbers.h"

namespace kvtile::testing {
namespace {

TEST(Numbers, EveryHalfWordSurvivesARoundTrip) {
  for (uint32_t word = 0; word < 65536; ++word) {
    const double x = half_to_double(static_cast<uint16_t>(word));
    if (std::isnan(x)) continue;
    ASSERT_EQ(double_to_half(x), word);
    ASSERT_EQ(spacing(DType::kFloat16, x) * std::nearbyint(x / spacing(DType::kFloat16, x)), x);
  }
}

TEST(Numbers, FloatsAgreeWithTheCompiler) {
  Random random(3);
  for (int i = 0; i < 100000; ++i) {
    const auto word = static_cast<uint32_t>(random.bits());
    const float x = std::bit_cast<float>(word);
    if (std::isnan(x)) continue;
    ASSERT_EQ(decode_ieee(word, 8, 23), static_cast<double>(x));
    const double y = static_cast<double>(x) * (1.0 + 1e-8 * random.normal());
    const auto narrow = static_cast<float>(y);
    ASSERT_EQ(encode_ieee(y, 8, 23), std::bit_cast<uint32_t>(narrow));
  }
}

TEST(Numbers, HalvesRoundToNearestEvenAndOverflow) {
  EXPECT_EQ(double_to_half(1.0 + 0x1p-11), 0x3C00);
  EXPECT_EQ(double_to_half(1.0 + 3 * 0x1p-11), 0x3C02);
  EXPECT_EQ(double_to_half(65519.99), 0x7BFF);
  EXPECT_EQ(double_to_half(65520.0), 0x7C00);
  EXPECT_EQ(double_to_half(0x1p-25), 0x0000);
  EXPECT_EQ(double_to_half(0x1.8p-25), 0x0001);
  EXPECT_EQ(double_to_half(-0.0), 0x8000);
}

TEST(Numbers, Fp8Landmarks) {
  EXPECT_EQ(fp8_to_double(0x38, KeyCode::kFp8E4M3), 1.0);
  EXPECT_EQ(fp8_to_double(0x38, KeyCode::kFp8E4B15), 1.0 / 256);
  EXPECT_EQ(fp8_to_double(0x7e, KeyCode::kFp8E4M3), 448.0);
  EXPECT_EQ(fp8_to_double(0x7e, KeyCode::kFp8E4B15), 1.75);
  EXPECT_TRUE(std::isnan(fp8_to_double(0xff, KeyCode::kFp8E4M3)));
  EXPECT_EQ(fp8_to_double(0xff, KeyCode::kFp8E4B15), -1.875);
  EXPECT_EQ(fp8_to_double(0x01, KeyCode::kFp8E4M3), 0x1p-9);
}

TEST(Numbers, PackingIsLittleEndianInRunsOfEight) {
  std::byte bytes[3];
  pack_codes({1, 2, 3, 4, 5, 6, 7, 0}, 3, bytes);
  const uint32_t word = 1 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12 | 6 << 15 | 7 << 18;
  EXPECT_EQ(std::to_integer<uint32_t>(bytes[0]), word & 0xff);
  EXPECT_EQ(std::to_integer<uint32_t>(bytes[1]), (word >> 8) & 0xff);
  EXPECT_EQ(std::to_integer<uint32_t>(bytes[2]), word >> 16);
  EXPECT_EQ(unpack_code(bytes, 6, 3), 7);
  pack_codes({0xA, 0x5}, 4, bytes);
  EXPECT_EQ(bytes[0], std::byte{0x5A});
}

TEST(GuardedBuffer, EndsAtAnUnmappedPage) {
  GuardedBuffer buffer(130);
  EXPECT_EQ(buffer.data()[129], std::byte{0xFF});
  EXPECT_EQ((reinterpret_cast<uintptr_t>(buffer.data()) + 130) % 4096, 0u);
  EXPECT_DEATH(*const_cast<volatile std::byte*>(buffer.data() + 130), "");
  buffer.protect(true);
  EXPECT_DEATH(*const_cast<volatile std::byte*>(buffer.data()) = std::byte{1}, "");
}

TEST(SentinelBuffer, NoticesOneByte) {
  SentinelBuffer buffer(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  EXPECT_TRUE(buffer.untouched());
  buffer.data()[3] = std::byte{1};
  EXPECT_FALSE(buffer.untouched(3, 4));
  EXPECT_TRUE(buffer.untouched(4, 100));
  EXPECT_TRUE(buffer.margins_intact());
  buffer.data()[-1] = std::byte{1};
  EXPECT_FALSE(buffer.margins_intact());
  buffer.refill();
  buffer.data()[100] = std::byte{1};
  EXPECT_FALSE(buffer.margins_intact());
}

TEST(AttendProblem, VisibleSlotsAreFiniteAndTheRestIsPoison) {
  AttendSpec spec;
  spec.seqs = {{40, 3}};
  spec.mask.window = 5;
  spec.short_tables = true;
  AttendProblem problem(spec);
  EXPECT_EQ(problem.packed_begin(0), 36);
  EXPECT_EQ(problem.packed_end(0), 43);
  EXPECT_EQ(problem.call.first_positions[0], 32);
  EXPECT_EQ(problem.call.max_blocks, 1);
  const SlotFormat format = spec.format();
  int finite = 0;
  for (int64_t b = 0; b < problem.call.cache.num_blocks; ++b) {
    for (int t = 0; t < spec.block_size; ++t) {
      const std::byte* slot = problem.call.cache.pages + problem.call.cache.slot_offset(b, t, 0);
      uint16_t norm;
      std::memcpy(&norm, slot + format.norm_offset(), 2);
      finite += norm != 0xFFFF;
    }
  }
  EXPECT_EQ(finite, 7);
}

TEST(Cases, CoverTheSpaceWithoutDuplicates) {
  EXPECT_EQ(format_names().size(), 5u);
  for (const auto& list :
       {head_dim_cases(), geometry_cases(), length_cases(), mask_cases(), dtype_cases()}) {
    EXPECT_GT(list.size(), 40u);
    for (size_t i = 1; i < list.size(); ++i) EXPECT_NE(list[i - 1].seed, list[i].seed);
  }
}

}  // namespace
}  // namespace kvtile::testing
