// The device's unpackers, run on the host over emulated PRMT and fp16 arithmetic: exhaustive over
// nibble quads, 3-bit groups, FP8 codes and fp16 words, against the plain definitions.
#include "src/codec/unpack.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "src/codec/codebook.h"
#include "tests/testing/numbers.h"

namespace kvtile {
namespace {

using testing::double_to_half;
using testing::fp8_to_double;
using testing::half_to_double;
using testing::Random;

double half_of(uint32_t pair, int index) {
  return half_to_double(static_cast<uint16_t>(pair >> (16 * index)));
}

// Every 16-bit pattern in the low half, a different one in the high half.
template <typename Body>
void for_each_word(Body&& body) {
  for (uint32_t low = 0; low < 65536; ++low) body(low | ((low * 40503u) << 16));
}

int nibble(uint32_t word, int index) { return static_cast<int>((word >> (4 * index)) & 15); }

TEST(PermuteBytes, FollowsTheInstruction) {
  const uint32_t a = 0x83020100u, b = 0x07f60504u;
  EXPECT_EQ(permute_bytes(a, b, 0x3210), a);
  EXPECT_EQ(permute_bytes(a, b, 0x7654), b);
  EXPECT_EQ(permute_bytes(a, b, 0x0123), 0x00010283u);
  EXPECT_EQ(permute_bytes(a, b, 0xbf8e), 0xff0000ffu);  // sign replication of bytes 3, 7, 0, 6
}

TEST(ShiftWords, JoinsNeighbours) {
  EXPECT_EQ(shift_words(0x11112222u, 0x33334444u, 0), 0x11112222u);
  EXPECT_EQ(shift_words(0x11112222u, 0x33334444u, 16), 0x44441111u);
  EXPECT_EQ(shift_words(0x11112222u, 0x33334444u, 24), 0x33444411u);
}

TEST(Expand3Bit, EveryGroup) {
  for (uint32_t group = 0; group < (1u << 24); ++group) {
    const uint32_t nibbles = expand_3bit(group | 0xa5000000u);
    uint32_t expected = 0;
    for (int i = 0; i < 8; ++i) expected |= ((group >> (3 * i)) & 7) << (4 * i);
    ASSERT_EQ(nibbles, expected) << group;
  }
}

template <int kCentre>
void check_codes() {
  for_each_word([](uint32_t word) {
    uint32_t pairs[4];
    nibbles_to_codes<kCentre>(word, pairs);
    for (int i = 0; i < 8; ++i) {
      ASSERT_EQ(half_of(pairs[i % 4], i / 4), nibble(word, i) - kCentre) << word << " " << i;
    }
  });
}

TEST(NibblesToCodes, EveryQuad) { check_codes<0>(); }
TEST(NibblesToCodes, EveryQuadCentredAt8) { check_codes<8>(); }
TEST(NibblesToCodes, EveryQuadCentredAt4) { check_codes<4>(); }

TEST(LookupLevels, EveryQuadOfFourBitCodes) {
  for (int head_dim : {64, 128, 256}) {
    const Codebook book = make_codebook(KeyCode::kLloydMax4, head_dim);
    for (float factor : {1.0f, 1.3339f}) {
      const LevelPlanes planes = make_level_planes(KeyCode::kLloydMax4, head_dim, factor);
      for_each_word([&](uint32_t word) {
        uint32_t pairs[4];
        lookup_levels_4bit(word, planes, pairs);
        for (int i = 0; i < 8; ++i) {
          const double expected =
              half_to_double(double_to_half(book.levels[nibble(word, i)] * factor));
          ASSERT_EQ(half_of(pairs[i / 2], i % 2), expected) << word << " " << i;
        }
      });
    }
  }
}

TEST(LookupLevels, EveryQuadOfThreeBitCodes) {
  for (int head_dim : {64, 128, 256}) {
    const Codebook book = make_codebook(KeyCode::kLloydMax3, head_dim);
    const LevelPlanes planes = make_level_planes(KeyCode::kLloydMax3, head_dim, 1.6147f);
    for_each_word([&](uint32_t word) {
      const uint32_t nibbles = word & 0x77777777u;
      uint32_t pairs[4];
      lookup_levels_3bit(nibbles, planes, pairs);
      for (int i = 0; i < 8; ++i) {
        const double expected =
            half_to_double(double_to_half(book.levels[nibble(nibbles, i)] * 1.6147f));
        ASSERT_EQ(half_of(pairs[i / 2], i % 2), expected) << nibbles << " " << i;
      }
    });
  }
}

TEST(Fp8ToHalf2, EveryCodeOfBothFlavours) {
  for (KeyCode key : {KeyCode::kFp8E4M3, KeyCode::kFp8E4B15}) {
    for (uint32_t code = 0; code < 256; ++code) {
      const uint32_t other = (code * 7 + 3) & 255;
      uint32_t pairs[2];
      fp8_to_half2_shift(key, code | (other << 8) | (other << 16) | (code << 24), pairs);
      for (int i = 0; i < 4; ++i) {
        const double expected = fp8_to_double(static_cast<uint8_t>(i % 3 == 0 ? code : other), key);
        const double got = half_of(pairs[i / 2], i % 2);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(got)) << code;
        } else {
          ASSERT_EQ(got, expected) << code << " " << i;
          ASSERT_EQ(std::signbit(got), std::signbit(expected)) << code;
        }
      }
    }
  }
}

TEST(Half2, FusedMultiplyAddRoundsOnce) {
  // 4-bit codes times every scale plus awkward zeros: what decoding a value in fp16 would do.
  const uint16_t zeros[] = {0x0000, 0x8001, 0x03ff, 0x3c00, 0xbc01, 0x7bff, 0xfbff, 0x0401};
  for (uint32_t scale = 0; scale < 0x7c00; scale += 7) {
    for (int code : {0, 1, 7, 15}) {
      for (uint16_t zero : zeros) {
        const double exact =
            code * half_to_double(static_cast<uint16_t>(scale)) + half_to_double(zero);
        const uint16_t code_half = double_to_half(code);
        const uint32_t got =
            half2_fma(half2_broadcast(code_half), half2_broadcast(static_cast<uint16_t>(scale)),
                      half2_broadcast(zero));
        ASSERT_EQ(got & 0xffff, got >> 16);
        ASSERT_EQ(half_to_double(static_cast<uint16_t>(got)), half_to_double(double_to_half(exact)))
            << scale << " " << code << " " << zero;
      }
    }
  }
}

TEST(Half2, RandomWordsAgainstExactArithmetic) {
  Random random(5);
  for (int i = 0; i < 400000; ++i) {
    const auto a = static_cast<uint16_t>(random.bits());
    const auto b = static_cast<uint16_t>(random.bits());
    const double x = half_to_double(a), y = half_to_double(b);
    if (!std::isfinite(x) || !std::isfinite(y)) continue;
    // Sums and products of two halves are exact in double.
    EXPECT_EQ(half_of(half2_add(a, b), 0), half_to_double(double_to_half(x + y)));
    EXPECT_EQ(half_of(half2_mul(a, b), 0), half_to_double(double_to_half(x * y)));
  }
}

}  // namespace
}  // namespace kvtile
