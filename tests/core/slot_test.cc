// Slot formats: byte maps against the published table, names, and the exact set of what is refused.
#include "kvtile/slot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::is_ok;
using testing::make_format;

TEST(SlotFormat, BytesPerTokenAndHead) {
  const struct {
    int head_dim, k8v4, k4v4, k3v4, k3v3;
  } kTable[] = {{64, 100, 70, 62, 54},
                {128, 196, 134, 118, 102},
                {256, 388, 262, 230, 198},
                {512, 772, 518, 454, 390}};
  for (const auto& row : kTable) {
    EXPECT_EQ(make_format("k8v4", row.head_dim).slot_bytes(), row.k8v4);
    EXPECT_EQ(make_format("4bit_nc", row.head_dim).slot_bytes(), row.k4v4);
    EXPECT_EQ(make_format("k3v4_nc", row.head_dim).slot_bytes(), row.k3v4);
    EXPECT_EQ(make_format("3bit_nc", row.head_dim).slot_bytes(), row.k3v3);
  }
  EXPECT_EQ(make_format("k8v4", 80).slot_bytes(), 124);
  EXPECT_EQ(make_format("k8v4", 96).slot_bytes(), 148);
  EXPECT_EQ(make_format("k8v4", 192).slot_bytes(), 292);
}

TEST(SlotFormat, FieldsAreAdjacentAndInOrder) {
  for (int i = 0; i < num_presets(); ++i) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      const SlotFormat f = make_format(preset_name(i), head_dim);
      EXPECT_EQ(f.key_bytes() * 8, head_dim * key_bits(f.key));
      EXPECT_EQ(f.norm_offset(), f.key_bytes());
      EXPECT_EQ(f.value_offset(), f.key_bytes() + (f.rotated() ? 2 : 0));
      EXPECT_EQ(f.scale_offset(), f.value_offset() + f.value_bytes());
      EXPECT_EQ(f.zero_offset(), f.scale_offset() + 2);
      EXPECT_GE(f.slot_bytes(), f.zero_offset() + 2);
      EXPECT_LE(f.slot_bytes(), f.zero_offset() + 3);
      EXPECT_EQ(f.slot_bytes() % 2, 0);
    }
  }
}

TEST(SlotFormat, NamesWithAndWithoutPrefix) {
  const std::vector<std::string> names = {"k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"};
  ASSERT_EQ(num_presets(), 4);
  for (int i = 0; i < num_presets(); ++i) {
    EXPECT_EQ(preset_name(i), names[static_cast<size_t>(i)]);
    SlotFormat bare, prefixed;
    ASSERT_TRUE(is_ok(parse_preset(preset_name(i), 64, &bare)));
    ASSERT_TRUE(is_ok(parse_preset(std::string("turboquant_") + preset_name(i), 64, &prefixed)));
    EXPECT_EQ(bare, prefixed);
    EXPECT_EQ(format_name(bare), preset_name(i));
    EXPECT_EQ(bare.norm_correction, bare.rotated());
  }
  EXPECT_STREQ(preset_name(-1), "");
  EXPECT_STREQ(preset_name(4), "");
}

TEST(SlotFormat, Fp8FlavourIsAFieldOfTheDescriptor) {
  const SlotFormat e4m3 = make_format("k8v4", 96);
  const SlotFormat e4b15 = make_format("k8v4", 96, KeyCode::kFp8E4B15);
  EXPECT_EQ(e4m3.key, KeyCode::kFp8E4M3);
  EXPECT_EQ(e4b15.key, KeyCode::kFp8E4B15);
  EXPECT_NE(e4m3, e4b15);
  EXPECT_EQ(format_name(e4b15), "k8v4/e4b15");
  SlotFormat format;
  EXPECT_TRUE(fails_with(parse_preset("k8v4", 96, &format, KeyCode::kLloydMax4),
                         StatusCode::kInvalidArgument, "fp8"));
}

TEST(SlotFormat, UnknownNamesAreRefusedAndLeaveTheOutputAlone) {
  for (const char* name : {"", "4bit", "turboquant_", "turboquant_4bit", "4BIT_NC", "k8v4 ",
                           "turboquant_turboquant_k8v4", "auto"}) {
    SlotFormat format{7, KeyCode::kLloydMax3, ValueCode::kUniform3, false};
    const SlotFormat before = format;
    EXPECT_TRUE(
        fails_with(parse_preset(name, 128, &format), StatusCode::kInvalidArgument, "preset"));
    EXPECT_EQ(format, before);
  }
}

TEST(SlotFormat, TheFullHeadDimMatrix) {
  const std::vector<int> rotated = {32, 64, 128, 256, 512};
  for (int i = 0; i < num_presets(); ++i) {
    for (int head_dim = -8; head_dim <= 1100; ++head_dim) {
      SlotFormat format;
      const Status status = parse_preset(preset_name(i), head_dim, &format);
      const bool wanted =
          i == 0 ? head_dim >= 8 && head_dim <= 512 && head_dim % 8 == 0
                 : std::find(rotated.begin(), rotated.end(), head_dim) != rotated.end();
      ASSERT_EQ(status.ok(), wanted) << preset_name(i) << " " << head_dim;
      if (!wanted) {
        ASSERT_TRUE(fails_with(status, StatusCode::kUnsupported, "head_dim"));
        ASSERT_NE(status.message().find(std::to_string(head_dim)), std::string::npos);
      }
    }
  }
}

TEST(SlotFormat, OnlyListedCombinationsAreFormats) {
  for (int key = 0; key < 6; ++key) {
    for (int value = 0; value < 4; ++value) {
      for (bool norm_correction : {false, true}) {
        const SlotFormat format{64, static_cast<KeyCode>(key), static_cast<ValueCode>(value),
                                norm_correction};
        const bool wanted = (key <= 3 && value == 0) || (key == 3 && value == 1);
        EXPECT_EQ(check_format(format).ok(), wanted) << key << " " << value;
      }
    }
  }
}

TEST(DType, NamesAndSizes) {
  EXPECT_STREQ(dtype_name(DType::kFloat32), "float32");
  EXPECT_STREQ(dtype_name(DType::kFloat16), "float16");
  EXPECT_STREQ(dtype_name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(dtype_bytes(DType::kFloat32), 4);
  EXPECT_EQ(dtype_bytes(DType::kFloat16), 2);
  EXPECT_EQ(dtype_bytes(DType::kBFloat16), 2);
}

}  // namespace
}  // namespace kvtile
