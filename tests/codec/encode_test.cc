// The store: bytes against an encoder written from the definition, ties, and every input the
// format cannot hold (counted, or refused when checked; never silent).
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvtile/codec.h"
#include "src/attention/reference.h"
#include "src/codec/codebook.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::double_to_half;
using testing::fails_with;
using testing::format_names;
using testing::FormatName;
using testing::fp8_to_double;
using testing::half_to_double;
using testing::head_dims;
using testing::is_ok;
using testing::make_format;
using testing::Random;
using testing::SentinelBuffer;
using testing::unpack_code;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// An fp32 transform leaves a coordinate this uncertain, in units of sigma.
constexpr double kTieWidth = 2e-6;

// One token after another, one head, fp32 input unless said otherwise, into sentinel pages.
struct Store {
  Store(const SlotFormat& f, int64_t n) : format(f), num_tokens(n) {
    key.assign(static_cast<size_t>(n * f.head_dim), 0.0f);
    value = key;
    pages = SentinelBuffer(static_cast<size_t>(n * f.slot_bytes()));
    for (int64_t i = 0; i < n; ++i) slots.push_back(i);
  }

  float* key_row(int64_t i) { return key.data() + i * format.head_dim; }
  float* value_row(int64_t i) { return value.data() + i * format.head_dim; }
  const std::byte* slot(int64_t i) const { return pages.data() + i * format.slot_bytes(); }
  uint16_t word(int64_t i, int offset) const {
    uint16_t w;
    std::memcpy(&w, slot(i) + offset, 2);
    return w;
  }
  uint16_t norm(int64_t i) const { return word(i, format.norm_offset()); }
  uint16_t scale(int64_t i) const { return word(i, format.scale_offset()); }
  uint16_t zero(int64_t i) const { return word(i, format.zero_offset()); }
  int key_code(int64_t i, int d) const { return unpack_code(slot(i), d, key_bits(format.key)); }
  int value_code(int64_t i, int d) const {
    return unpack_code(slot(i) + format.value_offset(), d, value_bits(format.value));
  }

  EncodeCall call() {
    EncodeCall encode;
    encode.key = key.data();
    encode.value = value.data();
    encode.dtype = DType::kFloat32;
    encode.num_tokens = num_tokens;
    encode.slot_mapping = slots.data();
    encode.cache = make_cache(pages.data(), num_tokens, 1, 1, format);
    return encode;
  }
  Status run() { return encode_slots(call(), &report); }

  SlotFormat format;
  int64_t num_tokens;
  std::vector<float> key, value;
  SentinelBuffer pages;
  std::vector<int64_t> slots;
  EncodeReport report;
};

// The value half of the definition in fp32, operation by operation. Divisions are multiplications
// by a reciprocal, as in the store whose bytes this one reproduces.
struct ValueWords {
  std::vector<int> codes;
  uint16_t scale, zero;
};
ValueWords expected_value(const float* value, int head_dim, int bits) {
  const float levels = static_cast<float>((1 << bits) - 1);
  const float low = *std::min_element(value, value + head_dim);
  const float high = *std::max_element(value, value + head_dim);
  const float scale = std::max((high - low) * (1.0f / levels), 1e-8f);
  const float inverse = 1.0f / scale;
  ValueWords words;
  for (int d = 0; d < head_dim; ++d) {
    const float x = (value[d] - low) * inverse + 0.5f;
    words.codes.push_back(std::clamp(static_cast<int>(x), 0, (1 << bits) - 1));
  }
  words.scale = double_to_half(static_cast<double>(scale));
  words.zero = double_to_half(static_cast<double>(low) + 0.0);  // -0 is stored as 0
  return words;
}

void fill_normal(Store* store, uint64_t seed, double scale = 1.0) {
  Random random(seed);
  for (float& x : store->key) x = static_cast<float>(scale * random.normal());
  for (float& x : store->value) x = static_cast<float>(random.normal());
}

TEST(Encode, ValuesAreExactForEveryFormatAndSize) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : head_dims(name)) {
      Store store(make_format(name.preset, head_dim, name.fp8), 40);
      fill_normal(&store, 100 + static_cast<uint64_t>(head_dim));
      ASSERT_TRUE(is_ok(store.run()));
      EXPECT_TRUE(store.pages.margins_intact());
      for (int64_t i = 0; i < store.num_tokens; ++i) {
        const ValueWords want =
            expected_value(store.value_row(i), head_dim, value_bits(store.format.value));
        ASSERT_EQ(store.scale(i), want.scale);
        ASSERT_EQ(store.zero(i), want.zero);
        for (int d = 0; d < head_dim; ++d) {
          ASSERT_EQ(store.value_code(i, d), want.codes[static_cast<size_t>(d)])
              << testing::format_label(name, head_dim) << " token " << i << " element " << d;
        }
      }
    }
  }
}

TEST(Encode, RotatedKeysDifferFromExactArithmeticOnlyAtTies) {
  for (const char* preset : {"4bit_nc", "k3v4_nc", "3bit_nc"}) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      Store store(make_format(preset, head_dim), 200);
      fill_normal(&store, 7 + static_cast<uint64_t>(head_dim), 3.0);
      ASSERT_TRUE(is_ok(store.run()));
      const Codebook book = make_codebook(store.format.key, head_dim);
      const double sigma = 1.0 / std::sqrt(head_dim);
      int64_t ties = 0, norm_ties = 0;
      std::vector<double> y(static_cast<size_t>(head_dim));
      for (int64_t i = 0; i < store.num_tokens; ++i) {
        double squares = 0;
        for (int d = 0; d < head_dim; ++d) {
          y[static_cast<size_t>(d)] = static_cast<double>(store.key_row(i)[d]);
          squares += y[static_cast<size_t>(d)] * y[static_cast<size_t>(d)];
        }
        const double norm = std::sqrt(squares);
        if (store.norm(i) != double_to_half(norm)) {
          // Only a norm within fp32 rounding of a half-way point may fall either side.
          ++norm_ties;
          ASSERT_NEAR(half_to_double(store.norm(i)), norm,
                      (0.5 + 1e-3) * testing::spacing(DType::kFloat16, norm));
        }
        reference_hadamard(y.data(), head_dim);
        for (int d = 0; d < head_dim; ++d) {
          const double x = y[static_cast<size_t>(d)] / norm;
          const int want = static_cast<int>(
              std::upper_bound(book.bounds, book.bounds + book.num_levels - 1, x) - book.bounds);
          const int got = store.key_code(i, d);
          if (got == want) continue;
          ++ties;
          ASSERT_EQ(std::abs(got - want), 1);
          ASSERT_LE(std::fabs(x - static_cast<double>(book.bounds[std::min(got, want)])),
                    kTieWidth * sigma);
        }
      }
      EXPECT_LE(ties, 1 + store.num_tokens * head_dim / 10000);
      EXPECT_LE(norm_ties, 2);
    }
  }
}

TEST(Encode, StoreThenDecodeIsCloseToTheInput) {
  // Mean squared error of a Lloyd-Max quantiser on a normal source: 0.009501 and 0.03454.
  const struct {
    const char* preset;
    double low, high;
  } kTable[] = {{"4bit_nc", 0.007, 0.012}, {"3bit_nc", 0.027, 0.042}};
  for (const auto& row : kTable) {
    Store store(make_format(row.preset, 128), 300);
    fill_normal(&store, 41);
    ASSERT_TRUE(is_ok(store.run()));
    std::vector<double> key(128);
    double error = 0, power = 0;
    for (int64_t i = 0; i < store.num_tokens; ++i) {
      reference_decode_slot(store.format, store.slot(i), key.data(), nullptr);
      reference_hadamard(key.data(), 128);
      for (int d = 0; d < 128; ++d) {
        const double x = static_cast<double>(store.key_row(i)[d]);
        error += (key[static_cast<size_t>(d)] - x) * (key[static_cast<size_t>(d)] - x);
        power += x * x;
      }
    }
    EXPECT_GT(error / power, row.low);
    EXPECT_LT(error / power, row.high);
  }
}

TEST(Encode, OneHotKeysDecodeExactlyAndConstantKeysDoNot) {
  // A one-hot key spreads evenly over the rotated space, a constant one lands on one coordinate
  // beyond the codebook: the worst case of a rotation without random signs.
  for (int head_dim : {64, 128, 256}) {
    for (const char* preset : {"4bit_nc", "3bit_nc"}) {
      Store store(make_format(preset, head_dim), 2);
      store.key_row(0)[5] = 3.0f;
      std::fill(store.key_row(1), store.key_row(1) + head_dim, 0.5f);
      ASSERT_TRUE(is_ok(store.run()));
      std::vector<double> key(static_cast<size_t>(head_dim));
      reference_decode_slot(store.format, store.slot(0), key.data(), nullptr);
      reference_hadamard(key.data(), head_dim);
      for (int d = 0; d < head_dim; ++d) {
        EXPECT_NEAR(key[static_cast<size_t>(d)], d == 5 ? 3.0 : 0.0, 1e-6);
      }
      reference_decode_slot(store.format, store.slot(1), key.data(), nullptr);
      reference_hadamard(key.data(), head_dim);
      double dot = 0, squares = 0;
      for (double x : key) {
        dot += x;
        squares += x * x;
      }
      const double cosine = dot / std::sqrt(squares * head_dim);
      if (head_dim == 64) continue;
      const bool three_bit = std::string(preset) == "3bit_nc";
      const double want =
          head_dim == 128 ? (three_bit ? 0.614 : 0.884) : (three_bit ? 0.482 : 0.800);
      EXPECT_NEAR(cosine, want, 2e-3);
    }
  }
}

TEST(Encode, ValueTiesRoundUp) {
  for (const char* preset : {"k8v4", "3bit_nc"}) {
    const SlotFormat format = make_format(preset, 32);
    const int top = (1 << value_bits(format.value)) - 1;
    Store store(format, 1);
    // Range 0..top, so the scale is 1 and k + 1/2 is an exact tie.
    for (int d = 0; d < 32; ++d) {
      store.value_row(0)[d] = static_cast<float>(d % top) + 0.5f;
    }
    store.value_row(0)[0] = 0.0f;
    store.value_row(0)[1] = static_cast<float>(top);
    ASSERT_TRUE(is_ok(store.run()));
    EXPECT_EQ(store.scale(0), 0x3C00);
    EXPECT_EQ(store.zero(0), 0x0000);
    for (int d = 2; d < 32; ++d) EXPECT_EQ(store.value_code(0, d), d % top + 1) << d;
  }
}

TEST(Encode, ZeroCoordinatesOfRotatedKeysTakeTheUpperCode) {
  for (const char* preset : {"4bit_nc", "3bit_nc"}) {
    Store store(make_format(preset, 64), 2);
    // Token 0: the zero vector. Token 1: x0 = x1, so half of the rotated coordinates are exactly 0.
    store.key_row(1)[0] = store.key_row(1)[1] = 1.0f;
    ASSERT_TRUE(is_ok(store.run()));
    const int upper = 1 << (key_bits(store.format.key) - 1);
    EXPECT_EQ(store.norm(0), 0);
    for (int d = 0; d < 64; ++d) {
      EXPECT_EQ(store.key_code(0, d), upper);
      if (d % 2 == 1) {
        EXPECT_EQ(store.key_code(1, d), upper);
      }
    }
  }
}

TEST(Encode, ExactTiesOnEveryDecisionBoundGoUp) {
  // Where a coordinate computes to a bound exactly, the code above it is stored. Scaling a one-hot
  // key cannot reach a bound, so two coordinates share the norm: y is the smaller one's share.
  for (const char* preset : {"4bit_nc", "3bit_nc"}) {
    const SlotFormat format = make_format(preset, 64);
    const Codebook book = make_codebook(format.key, 64);
    for (int b = 0; b + 1 < book.num_levels; ++b) {
      const auto bound = static_cast<double>(book.bounds[b]);
      // Rotated target: coordinate 0 at bound * (1 +- 1e-4), the rest of the unit norm elsewhere.
      Store store(format, 2);
      for (int side = 0; side < 2; ++side) {
        std::vector<double> y(64, 0.0);
        y[0] = bound + (side == 0 ? -1e-5 : 1e-5);
        y[1] = std::sqrt(1.0 - y[0] * y[0]);
        reference_hadamard(y.data(), 64);
        for (int d = 0; d < 64; ++d) {
          store.key_row(side)[d] = static_cast<float>(y[static_cast<size_t>(d)]);
        }
      }
      ASSERT_TRUE(is_ok(store.run()));
      EXPECT_EQ(store.key_code(0, 0), b);
      EXPECT_EQ(store.key_code(1, 0), b + 1);
    }
  }
}

TEST(Encode, Fp8KeysRoundToTheNearestCodeForEveryHalfWord) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const SlotFormat format = make_format("k8v4", 512);
    Store store(format, 128);
    std::vector<uint16_t> words(65536), zeros(65536, 0);
    for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>(i);
    EncodeCall call = store.call();
    call.key = words.data();
    call.value = zeros.data();
    call.dtype = dtype;
    EncodeReport report;
    ASSERT_TRUE(is_ok(encode_slots(call, &report)));
    int64_t beyond = 0, bad_rows = 0;
    for (int row = 0; row < 128; ++row) {
      bool bad = false;
      for (int d = 0; d < 512; ++d) {
        const int i = row * 512 + d;
        const double x = testing::load_element(words.data(), dtype, i);
        const int code = store.key_code(row, d);
        if (std::isnan(x)) {
          bad = true;
          ASSERT_EQ(code & 0x7f, 0x7f) << i;
          continue;
        }
        if (std::isinf(x)) bad = true;
        ASSERT_EQ((code & 0x80) != 0, std::signbit(x)) << i;
        if (std::fabs(x) >= 448) {
          if (std::fabs(x) > 448) ++beyond;
          ASSERT_EQ(code & 0x7f, 0x7e) << x;
          continue;
        }
        // Nearest, ties to even: no neighbour is closer, and an equally close one is odd.
        const int magnitude = code & 0x7f;
        const double error = std::fabs(fp8_to_double(static_cast<uint8_t>(code), format.key) - x);
        for (int other : {magnitude - 1, magnitude + 1}) {
          if (other < 0 || other > 0x7e) continue;
          const double there =
              std::fabs(fp8_to_double(static_cast<uint8_t>(other | (code & 0x80)), format.key) - x);
          ASSERT_LE(error, there) << x;
          ASSERT_TRUE(error < there || magnitude % 2 == 0) << x;
        }
      }
      bad_rows += bad;
    }
    EXPECT_EQ(report.tokens, 128);
    EXPECT_EQ(report.non_finite_keys, bad_rows);
    EXPECT_EQ(report.non_finite_values, 0);
    EXPECT_GE(report.key_elements_clamped, 1);
    EXPECT_LE(report.key_elements_clamped, beyond);
  }
}

TEST(Encode, E4b15KeysRoundTiesAwayWithinTheirRangeAndClampBeyond) {
  const SlotFormat format = make_format("k8v4", 512, KeyCode::kFp8E4B15);
  Store store(format, 128);
  std::vector<uint16_t> words(65536), zeros(65536, 0);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>(i);
  EncodeCall call = store.call();
  call.key = words.data();
  call.value = zeros.data();
  call.dtype = DType::kFloat16;
  ASSERT_TRUE(is_ok(encode_slots(call)));
  for (int i = 0; i < 65536; ++i) {
    const double x = half_to_double(static_cast<uint16_t>(i));
    const double got =
        fp8_to_double(static_cast<uint8_t>(store.key_code(i / 512, i % 512)), format.key);
    if (std::isnan(x)) {
      ASSERT_EQ(std::fabs(got), 1.75) << i;
    } else if (std::fabs(x) >= 1.75) {
      ASSERT_EQ(got, std::copysign(1.75, x)) << i;
    } else {
      // To nearest on the grid of x's binade, ties away from zero.
      const int exponent = std::max(x == 0 ? -14 : std::ilogb(x), -14);
      const double step = std::ldexp(1.0, exponent - 3);
      ASSERT_EQ(got, std::copysign(std::floor(std::fabs(x) / step + 0.5) * step, x)) << x;
    }
  }
}

TEST(Encode, KeysAboveTheE4b15RangeAreCounted) {
  const struct {
    KeyCode flavour;
    int64_t clamped;
  } kTable[] = {{KeyCode::kFp8E4M3, 1}, {KeyCode::kFp8E4B15, 4}};
  for (const auto& row : kTable) {
    Store store(make_format("k8v4", 64, row.flavour), 1);
    const float keys[] = {1.75f, 1.76f, -2.0f, 300.0f, -1000.0f};
    std::copy(std::begin(keys), std::end(keys), store.key_row(0));
    ASSERT_TRUE(is_ok(store.run()));
    EXPECT_EQ(store.report.key_elements_clamped, row.clamped);
    EXPECT_EQ(store.report.tokens, 1);
  }
}

TEST(Encode, NormsBeyondHalfSaturateAndCount) {
  for (const char* preset : {"4bit_nc", "k3v4_nc", "3bit_nc"}) {
    Store store(make_format(preset, 128), 3);
    std::fill(store.key_row(0), store.key_row(0) + 128, 6187.2f);
    std::fill(store.key_row(1), store.key_row(1) + 128, 5000.0f);
    std::fill(store.key_row(2), store.key_row(2) + 128, 3.0e38f);
    ASSERT_TRUE(is_ok(store.run()));
    EXPECT_EQ(store.norm(0), 0x7BFF);
    EXPECT_EQ(store.norm(1), double_to_half(5000 * std::sqrt(128.0)));
    EXPECT_EQ(store.norm(2), 0x7BFF);
    EXPECT_EQ(store.report.norms_saturated, 2);
    EXPECT_EQ(store.report.non_finite_keys, 0);
  }
}

TEST(Encode, ValueOutliersAreClampedBeforeTheRangeIsTaken) {
  for (const char* preset : {"k8v4", "3bit_nc"}) {
    Store store(make_format(preset, 128), 2);
    fill_normal(&store, 3);
    store.value_row(0)[17] = -125000.0f;
    store.value_row(1)[3] = 125000.0f;
    ASSERT_TRUE(is_ok(store.run()));
    EXPECT_EQ(store.report.value_elements_clamped, 2);
    EXPECT_EQ(store.zero(0), 0xFBFF);
    for (int64_t i = 0; i < 2; ++i) {
      store.value_row(i)[i == 0 ? 17 : 3] = i == 0 ? -65504.0f : 65504.0f;
      const ValueWords want =
          expected_value(store.value_row(i), 128, value_bits(store.format.value));
      EXPECT_EQ(store.scale(i), want.scale);
      EXPECT_EQ(store.zero(i), want.zero);
      for (int d = 0; d < 128; ++d) {
        EXPECT_EQ(store.value_code(i, d), want.codes[static_cast<size_t>(d)]);
      }
    }
  }
}

TEST(Encode, NonFiniteInputIsMarkedAndCounted) {
  for (const FormatName& name : format_names()) {
    for (float bad : {kNaN, kInf, -kInf}) {
      Store store(make_format(name.preset, 64, name.fp8), 4);
      fill_normal(&store, 8, 0.3);
      store.key_row(1)[63] = bad;
      store.value_row(2)[0] = bad;
      ASSERT_TRUE(is_ok(store.run()));
      EXPECT_EQ(store.report.tokens, 4);
      EXPECT_EQ(store.report.non_finite_keys, 1);
      EXPECT_EQ(store.report.non_finite_values, 1);
      EXPECT_EQ(store.scale(2), 0x7E00);
      EXPECT_EQ(store.zero(2), 0x7E00);
      for (int d = 0; d < 64; ++d) EXPECT_EQ(store.value_code(2, d), 0);
      if (store.format.rotated()) {
        EXPECT_EQ(store.norm(1), 0x7E00);
        for (int d = 0; d < 64; ++d) EXPECT_EQ(store.key_code(1, d), 0);
      }
      // The neighbours are what they are without the bad token.
      Store clean(store.format, 4);
      fill_normal(&clean, 8, 0.3);
      ASSERT_TRUE(is_ok(clean.run()));
      for (int64_t i : {0, 3}) {
        EXPECT_EQ(std::memcmp(store.slot(i), clean.slot(i),
                              static_cast<size_t>(store.format.slot_bytes())),
                  0);
      }
    }
  }
}

TEST(Encode, SmallAndSubnormalInputsAreDefined) {
  for (const FormatName& name : format_names()) {
    Store store(make_format(name.preset, 64, name.fp8), 5);
    for (int d = 0; d < 64; ++d) {
      const float sign = d % 2 == 0 ? 1.0f : -1.0f;
      store.key_row(0)[d] = store.value_row(0)[d] = sign * 1e-40f;
      store.key_row(1)[d] = store.value_row(1)[d] = sign * 1e-7f;
      store.key_row(2)[d] = store.value_row(2)[d] = -0.0f;
      store.value_row(3)[d] = 0.333f;
      store.value_row(4)[d] = 1.0f + static_cast<float>(d) * 1e-6f;
    }
    ASSERT_TRUE(is_ok(store.run()));
    std::vector<double> key(64), value(64);
    for (int64_t i = 0; i < 5; ++i) {
      reference_decode_slot(store.format, store.slot(i), key.data(), value.data());
      for (int d = 0; d < 64; ++d) {
        EXPECT_TRUE(std::isfinite(key[static_cast<size_t>(d)]));
        // A range this narrow collapses to its minimum: fp16 cannot hold the scale.
        EXPECT_NEAR(value[static_cast<size_t>(d)], static_cast<double>(store.value_row(i)[d]),
                    i < 3 ? 2.3e-7 : 3e-4);
      }
      const ValueWords want =
          expected_value(store.value_row(i), 64, value_bits(store.format.value));
      EXPECT_EQ(store.scale(i), want.scale) << i;
      EXPECT_EQ(store.zero(i), want.zero) << i;
    }
    if (store.format.rotated()) {
      EXPECT_EQ(store.norm(0), 0);
      EXPECT_EQ(store.norm(2), 0);
      EXPECT_EQ(store.norm(1), double_to_half(8e-7));
    }
    EXPECT_EQ(store.report.non_finite_keys + store.report.non_finite_values, 0);
  }
}

TEST(Encode, CheckedStoreRefusesNamesTheTokenAndWritesNothing) {
  const struct {
    const char* preset;
    bool in_key;
    float bad;
    StatusCode code;
  } kTable[] = {{"4bit_nc", true, 70000.0f, StatusCode::kValueOverflow},
                {"4bit_nc", true, kNaN, StatusCode::kNonFinite},
                {"4bit_nc", false, 125000.0f, StatusCode::kValueOverflow},
                {"3bit_nc", false, -kInf, StatusCode::kNonFinite},
                {"k8v4", true, 449.0f, StatusCode::kValueOverflow},
                {"k8v4", true, kInf, StatusCode::kNonFinite},
                {"k8v4", false, -70000.0f, StatusCode::kValueOverflow}};
  for (const auto& row : kTable) {
    Store store(make_format(row.preset, 64), 30);
    fill_normal(&store, 6);
    (row.in_key ? store.key_row(23) : store.value_row(23))[9] = row.bad;
    EncodeCall call = store.call();
    call.checked = true;
    const Status status = encode_slots(call, &store.report);
    EXPECT_TRUE(fails_with(status, row.code, "23")) << row.preset << " " << row.bad;
    EXPECT_NE(status.message().find("token"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("head"), std::string::npos) << status.message();
    EXPECT_TRUE(store.pages.untouched());
  }
  Store clean(make_format("4bit_nc", 64), 5), unchecked(make_format("4bit_nc", 64), 5);
  fill_normal(&clean, 6);
  fill_normal(&unchecked, 6);
  EncodeCall call = clean.call();
  call.checked = true;
  ASSERT_TRUE(is_ok(encode_slots(call)));
  ASSERT_TRUE(is_ok(unchecked.run()));
  EXPECT_EQ(std::memcmp(clean.pages.data(), unchecked.pages.data(), clean.pages.size()), 0);
}

TEST(Encode, NegativeSlotsAreSkippedAndNeighboursUntouched) {
  Store store(make_format("k3v4_nc", 64), 6);
  fill_normal(&store, 12);
  store.slots = {0, -1, 4, -1000000, 2, -1};
  // What is skipped may be anything.
  store.key_row(1)[0] = kNaN;
  ASSERT_TRUE(is_ok(store.run()));
  const auto slot_bytes = static_cast<size_t>(store.format.slot_bytes());
  EXPECT_EQ(store.report.skipped, 3);
  EXPECT_EQ(store.report.tokens, 3);
  EXPECT_EQ(store.report.non_finite_keys, 0);
  for (size_t s : {1, 3, 5}) {
    EXPECT_TRUE(store.pages.untouched(s * slot_bytes, (s + 1) * slot_bytes));
  }
  EXPECT_TRUE(store.pages.margins_intact());
}

TEST(Encode, ReportAddsUp) {
  Store store(make_format("4bit_nc", 64), 3);
  fill_normal(&store, 1);
  ASSERT_TRUE(is_ok(store.run()));
  ASSERT_TRUE(is_ok(store.run()));
  EXPECT_EQ(store.report.tokens, 6);
}

TEST(Encode, RefusesWhatItCannotStoreAndWritesNothing) {
  Store store(make_format("4bit_nc", 64), 4);
  fill_normal(&store, 2);
  const auto refused = [&](StatusCode code, const char* argument, auto change) {
    EncodeCall call = store.call();
    change(&call);
    EXPECT_TRUE(fails_with(encode_slots(call), code, argument));
    EXPECT_TRUE(store.pages.untouched()) << argument;
  };
  std::vector<int64_t> late = {0, 1, 2, 4};
  std::vector<int64_t> huge = {0, std::numeric_limits<int64_t>::max(), 1, 2};
  refused(StatusCode::kOutOfRange, "slot", [&](EncodeCall* c) { c->slot_mapping = late.data(); });
  refused(StatusCode::kOutOfRange, "slot", [&](EncodeCall* c) { c->slot_mapping = huge.data(); });
  refused(StatusCode::kInvalidArgument, "key", [](EncodeCall* c) { c->key = nullptr; });
  refused(StatusCode::kInvalidArgument, "value", [](EncodeCall* c) { c->value = nullptr; });
  refused(StatusCode::kInvalidArgument, "slot_mapping",
          [](EncodeCall* c) { c->slot_mapping = nullptr; });
  refused(StatusCode::kInvalidArgument, "num_tokens", [](EncodeCall* c) { c->num_tokens = -4; });
  refused(StatusCode::kInvalidArgument, "dtype",
          [](EncodeCall* c) { c->dtype = static_cast<DType>(3); });
  refused(StatusCode::kInvalidArgument, "pages", [](EncodeCall* c) { c->cache.pages = nullptr; });
  refused(StatusCode::kInvalidArgument, "stride_block",
          [](EncodeCall* c) { c->cache.stride_block = 69; });
  refused(StatusCode::kUnsupported, "head_dim",
          [](EncodeCall* c) { c->cache.format.head_dim = 96; });
}

TEST(Encode, StridesLayoutsAndThreadsDoNotChangeTheBytes) {
  for (const FormatName& name : format_names()) {
    const SlotFormat format = make_format(name.preset, 64, name.fp8);
    constexpr int kTokens = 37, kHeads = 3, kBlock = 8;
    Random random(55);
    std::vector<float> dense(kTokens * kHeads * 64 * 2);
    for (float& x : dense) x = static_cast<float>(random.normal());
    const float* key = dense.data();
    const float* value = dense.data() + kTokens * kHeads * 64;
    // A fused projection: key and value interleaved per token with different head strides.
    constexpr int kKeyHead = 66, kValueHead = 71, kRow = kHeads * (kKeyHead + kValueHead) + 5;
    std::vector<float> fused(kTokens * kRow, kNaN);
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        std::copy_n(key + (t * kHeads + h) * 64, 64, fused.data() + t * kRow + h * kKeyHead);
        std::copy_n(value + (t * kHeads + h) * 64, 64,
                    fused.data() + t * kRow + kHeads * kKeyHead + h * kValueHead);
      }
    }
    std::vector<int64_t> slots;
    for (int t = 0; t < kTokens; ++t) slots.push_back((t * 11) % 40);
    std::vector<std::byte> want;
    for (PageLayout layout : {PageLayout::kTokenMajor, PageLayout::kHeadMajor}) {
      for (int padding : {0, 10}) {
        for (bool strided : {false, true}) {
          for (int threads : {1, 2, 5}) {
            PagedCache cache = make_cache(nullptr, 5, kBlock, kHeads, format, layout,
                                          format.slot_bytes() + padding);
            SentinelBuffer pages(static_cast<size_t>(cache.pages_bytes));
            cache.pages = pages.data();
            EncodeCall call;
            call.dtype = DType::kFloat32;
            call.num_tokens = kTokens;
            call.slot_mapping = slots.data();
            call.cache = cache;
            call.key = strided ? fused.data() : key;
            call.value = strided ? fused.data() + kHeads * kKeyHead : value;
            if (strided) {
              call.key_stride_token = call.value_stride_token = kRow;
              call.key_stride_head = kKeyHead;
              call.value_stride_head = kValueHead;
            }
            RunOptions options;
            options.num_threads = threads;
            ASSERT_TRUE(is_ok(encode_slots(call, nullptr, options)));
            ASSERT_TRUE(pages.margins_intact());
            std::vector<std::byte> got;
            size_t written = 0;
            for (int64_t slot : slots) {
              for (int h = 0; h < kHeads; ++h) {
                const int64_t offset = cache.slot_offset(slot / kBlock, slot % kBlock, h);
                got.insert(got.end(), pages.data() + offset,
                           pages.data() + offset + format.slot_bytes());
                const auto end = static_cast<size_t>(offset + format.slot_bytes());
                EXPECT_TRUE(pages.untouched(end, end + static_cast<size_t>(padding)));
                ++written;
              }
            }
            EXPECT_EQ(written, static_cast<size_t>(kTokens * kHeads));
            if (want.empty()) want = got;
            ASSERT_TRUE(testing::same_bits(got, want));
          }
        }
      }
    }
  }
}

TEST(Encode, EverySimdTargetWritesTheSameBytes) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : head_dims(name)) {
      Store store(make_format(name.preset, head_dim, name.fp8), 70);
      fill_normal(&store, 90 + static_cast<uint64_t>(head_dim));
      ASSERT_TRUE(is_ok(store.run()));
      const std::vector<std::byte> want(store.pages.data(),
                                        store.pages.data() + store.pages.size());
      for (const char* backend : {"cpu/avx3", "cpu/avx2", "cpu/neon", "cpu/scalar"}) {
        RunOptions options;
        options.backend = backend;
        store.pages.refill();
        const Status status = encode_slots(store.call(), nullptr, options);
        if (status.code() == StatusCode::kUnavailable) continue;
        ASSERT_TRUE(is_ok(status));
        const std::vector<std::byte> got(store.pages.data(),
                                         store.pages.data() + store.pages.size());
        ASSERT_TRUE(testing::same_bits(got, want))
            << testing::format_label(name, head_dim) << " " << backend;
      }
    }
  }
}

TEST(Encode, SixteenBitInputEqualsItsFp32Image) {
  for (const FormatName& name : format_names()) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      Store wide(make_format(name.preset, 64, name.fp8), 50);
      Store narrow(wide.format, 50);
      fill_normal(&wide, 19, 2.0);
      std::vector<uint16_t> key(wide.key.size()), value(wide.value.size());
      for (size_t i = 0; i < key.size(); ++i) {
        const auto n = static_cast<int64_t>(i);
        testing::store_element(key.data(), dtype, n, static_cast<double>(wide.key[i]));
        testing::store_element(value.data(), dtype, n, static_cast<double>(wide.value[i]));
        wide.key[i] = static_cast<float>(testing::load_element(key.data(), dtype, n));
        wide.value[i] = static_cast<float>(testing::load_element(value.data(), dtype, n));
      }
      EncodeCall call = narrow.call();
      call.key = key.data();
      call.value = value.data();
      call.dtype = dtype;
      ASSERT_TRUE(is_ok(encode_slots(call)));
      ASSERT_TRUE(is_ok(wide.run()));
      EXPECT_EQ(std::memcmp(wide.pages.data(), narrow.pages.data(), wide.pages.size()), 0);
    }
  }
}

TEST(Encode, SlotsBeyondTwoGiBLandAtTheir64BitOffset) {
  const SlotFormat format = make_format("4bit_nc", 128);
  const int64_t slot_bytes = format.slot_bytes();
  const int64_t num_slots = (int64_t{5} << 30) / slot_bytes;
  const auto bytes = static_cast<size_t>(num_slots * slot_bytes);
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  auto* pages = static_cast<std::byte*>(mapping);
  Store near(format, 6);
  fill_normal(&near, 4);
  ASSERT_TRUE(is_ok(near.run()));
  std::vector<int64_t> slots;
  for (int64_t edge : {int64_t{1} << 31, int64_t{1} << 32}) {
    for (int64_t delta : {-1, 0, 1}) slots.push_back(edge / slot_bytes + delta);
  }
  EncodeCall call = near.call();
  call.cache = make_cache(pages, num_slots, 1, 1, format);
  slots[1] = -1;
  call.slot_mapping = slots.data();
  ASSERT_TRUE(is_ok(encode_slots(call)));
  for (int64_t i = 0; i < 6; ++i) {
    if (i == 1) continue;
    EXPECT_EQ(std::memcmp(pages + slots[static_cast<size_t>(i)] * slot_bytes, near.slot(i),
                          static_cast<size_t>(slot_bytes)),
              0);
  }
  // The skipped slot between its neighbours, and the 2^32 aliases, are still zero.
  const auto is_zero = [pages, slot_bytes](int64_t slot) {
    const std::byte* p = pages + slot * slot_bytes;
    return std::all_of(p, p + slot_bytes, [](std::byte b) { return b == std::byte{0}; });
  };
  EXPECT_TRUE(is_zero((int64_t{1} << 31) / slot_bytes));
  EXPECT_TRUE(is_zero(0));
  EXPECT_TRUE(is_zero(1));
  munmap(mapping, bytes);
}

}  // namespace
}  // namespace kvtile
