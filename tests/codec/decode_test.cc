// Decoding is total and exact: every code at every position, every 3-bit group, both FP8 flavours
// and every metadata word, through the public call, bit for bit against the written definition.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kvtile/codec.h"
#include "src/codec/codebook.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::format_label;
using testing::format_names;
using testing::FormatName;
using testing::fp8_to_double;
using testing::GuardedBuffer;
using testing::half_to_double;
using testing::head_dims;
using testing::is_ok;
using testing::make_format;
using testing::Random;
using testing::SentinelBuffer;
using testing::SlotContent;
using testing::unpack_code;
using testing::write_slot;

// The definition of docs/format.md in fp32, one element at a time.
void expected_slot(const SlotFormat& format, const std::byte* slot, float* key, float* value) {
  const int head_dim = format.head_dim;
  const auto word = [slot](int offset) {
    uint16_t w;
    std::memcpy(&w, slot + offset, 2);
    return static_cast<float>(half_to_double(w));
  };
  if (format.rotated()) {
    const Codebook book = make_codebook(format.key, head_dim);
    float partial[8] = {};
    for (int d = 0; d < head_dim; ++d) {
      key[d] = book.levels[unpack_code(slot, d, key_bits(format.key))];
      partial[d % 8] += key[d] * key[d];
    }
    const float sum = ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
                      ((partial[4] + partial[5]) + (partial[6] + partial[7]));
    const float norm = word(format.norm_offset());
    const float scale = format.norm_correction ? norm / std::sqrt(sum) : norm;
    for (int d = 0; d < head_dim; ++d) key[d] *= scale;
  } else {
    for (int d = 0; d < head_dim; ++d) {
      key[d] = static_cast<float>(fp8_to_double(std::to_integer<uint8_t>(slot[d]), format.key));
    }
  }
  const float scale = word(format.scale_offset()), zero = word(format.zero_offset());
  for (int d = 0; d < head_dim; ++d) {
    const auto code =
        static_cast<float>(unpack_code(slot + format.value_offset(), d, value_bits(format.value)));
    value[d] = std::fma(code, scale, zero);
  }
}

bool same_float(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// `num_slots` one-head slots back to back, ending at an unmapped page, decoded in order.
struct Pool {
  Pool(const SlotFormat& f, int64_t n) : format(f), num_slots(n) {
    pages = GuardedBuffer(static_cast<size_t>(n * f.slot_bytes()));
    slots.resize(static_cast<size_t>(n));
    std::iota(slots.begin(), slots.end(), 0);
    key = GuardedBuffer(static_cast<size_t>(n * f.head_dim) * 4);
    value = GuardedBuffer(static_cast<size_t>(n * f.head_dim) * 4);
  }

  std::byte* slot(int64_t i) { return pages.data() + i * format.slot_bytes(); }

  DecodeCall call(DType dtype = DType::kFloat32) {
    DecodeCall decode;
    decode.cache = make_cache(pages.data(), num_slots, 1, 1, format);
    decode.slot_mapping = slots.data();
    decode.num_tokens = num_slots;
    decode.key = key.data();
    decode.value = value.data();
    decode.dtype = dtype;
    return decode;
  }

  ::testing::AssertionResult decodes_as_defined() {
    const Status status = decode_slots(call());
    if (!status.ok()) return is_ok(status);
    std::vector<float> want_key(static_cast<size_t>(format.head_dim));
    std::vector<float> want_value(static_cast<size_t>(format.head_dim));
    for (int64_t i = 0; i < num_slots; ++i) {
      expected_slot(format, slot(i), want_key.data(), want_value.data());
      for (int d = 0; d < format.head_dim; ++d) {
        const float got_key = key.as<float>()[i * format.head_dim + d];
        const float got_value = value.as<float>()[i * format.head_dim + d];
        const auto n = static_cast<size_t>(d);
        if (!same_float(got_key, want_key[n]) || !same_float(got_value, want_value[n])) {
          return ::testing::AssertionFailure()
                 << format_name(format) << " d" << format.head_dim << " slot " << i << " element "
                 << d << ": key " << got_key << " wanted " << want_key[n] << ", value " << got_value
                 << " wanted " << want_value[n];
        }
      }
    }
    return ::testing::AssertionSuccess();
  }

  SlotFormat format;
  int64_t num_slots;
  GuardedBuffer pages, key, value;
  std::vector<int64_t> slots;
};

void set_word(std::byte* slot, int offset, uint16_t word) { std::memcpy(slot + offset, &word, 2); }

TEST(Decode, EveryByteAtEveryPositionOfEveryFormat) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : head_dims(name)) {
      const SlotFormat format = make_format(name.preset, head_dim, name.fp8);
      Pool pool(format, 256);
      for (int v = 0; v < 256; ++v) {
        std::byte* slot = pool.slot(v);
        for (int j = 0; j < format.slot_bytes(); ++j) {
          slot[j] = static_cast<std::byte>((v + 37 * j) & 255);
        }
        if (format.rotated()) {
          set_word(slot, format.norm_offset(), static_cast<uint16_t>(0x3C00 + 5 * v));
        }
        set_word(slot, format.scale_offset(), static_cast<uint16_t>(0x2000 + 7 * v));
        set_word(slot, format.zero_offset(), static_cast<uint16_t>(0xB000 + 3 * v));
      }
      EXPECT_TRUE(pool.decodes_as_defined());
    }
  }
}

TEST(Decode, All2To24ThreeBitGroups) {
  SlotFormat format = make_format("3bit_nc", 512);
  format.norm_correction = false;
  constexpr int kGroups = 64, kSlots = 4096;
  constexpr uint16_t kOne = 0x3C00;
  const Codebook book = make_codebook(format.key, 512);
  Pool pool(format, kSlots);
  uint32_t next = 0;
  int64_t wrong = 0;
  while (next < 1u << 24) {
    const uint32_t first = next;
    for (int s = 0; s < kSlots; ++s) {
      std::byte* slot = pool.slot(s);
      for (int g = 0; g < kGroups; ++g, ++next) {
        std::memcpy(slot + 3 * g, &next, 3);
        std::memcpy(slot + format.value_offset() + 3 * g, &next, 3);
      }
      set_word(slot, format.norm_offset(), kOne);
      set_word(slot, format.scale_offset(), kOne);
      set_word(slot, format.zero_offset(), 0);
    }
    ASSERT_TRUE(is_ok(decode_slots(pool.call())));
    const float* key = pool.key.as<float>();
    const float* value = pool.value.as<float>();
    for (uint32_t group = first; group < next; ++group, key += 8, value += 8) {
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = (group >> (3 * i)) & 7;
        wrong += key[i] != book.levels[code];
        wrong += value[i] != static_cast<float>(code);
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Decode, AllFp8CodesToEveryDType) {
  for (KeyCode flavour : {KeyCode::kFp8E4M3, KeyCode::kFp8E4B15}) {
    const SlotFormat format = make_format("k8v4", 256, flavour);
    Pool pool(format, 1);
    std::fill(pool.slot(0), pool.slot(0) + format.slot_bytes(), std::byte{0});
    for (int code = 0; code < 256; ++code) pool.slot(0)[code] = static_cast<std::byte>(code);
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      ASSERT_TRUE(is_ok(decode_slots(pool.call(dtype))));
      for (int code = 0; code < 256; ++code) {
        const double want = fp8_to_double(static_cast<uint8_t>(code), flavour);
        const double got = testing::load_element(pool.key.data(), dtype, code);
        if (std::isnan(want)) {
          EXPECT_TRUE(std::isnan(got)) << code;
        } else {
          EXPECT_EQ(got, want) << code << " " << dtype_name(dtype);
          EXPECT_EQ(std::signbit(got), std::signbit(want)) << code;
        }
      }
    }
  }
}

TEST(Decode, AllHalfWordsAsNormScaleAndZero) {
  for (const FormatName& name : format_names()) {
    const SlotFormat format = make_format(name.preset, 32, name.fp8);
    Random random(17);
    for (int field = 0; field < 3; ++field) {
      if (field == 0 && !format.rotated()) continue;
      Pool pool(format, 65536);
      const int offset = field == 0   ? format.norm_offset()
                         : field == 1 ? format.scale_offset()
                                      : format.zero_offset();
      for (int word = 0; word < 65536; ++word) {
        write_slot(format, testing::random_slot(format, &random), pool.slot(word));
        set_word(pool.slot(word), offset, static_cast<uint16_t>(word));
      }
      EXPECT_TRUE(pool.decodes_as_defined()) << "field " << field;
    }
  }
}

TEST(Decode, CodesRunningThroughTheirRangePositionByPosition) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : {128, 256}) {
      const SlotFormat format = make_format(name.preset, head_dim, name.fp8);
      if (!format.rotated()) continue;
      Pool pool(format, 1);
      SlotContent content;
      for (int d = 0; d < head_dim; ++d) {
        content.key_codes.push_back(d % (1 << key_bits(format.key)));
        content.value_codes.push_back(d % (1 << value_bits(format.value)));
      }
      content.norm = content.scale = 0x3C00;
      write_slot(format, content, pool.slot(0));
      ASSERT_TRUE(pool.decodes_as_defined());
      for (int d = 0; d < head_dim; ++d) {
        EXPECT_EQ(pool.value.as<float>()[d], content.value_codes[static_cast<size_t>(d)]);
      }
    }
  }
}

TEST(Decode, NormCorrectionOffUsesTheNormAlone) {
  SlotFormat format = make_format("k3v4_nc", 64);
  format.norm_correction = false;
  Random random(5);
  Pool pool(format, 100);
  for (int i = 0; i < 100; ++i) {
    write_slot(format, testing::random_slot(format, &random), pool.slot(i));
  }
  EXPECT_TRUE(pool.decodes_as_defined());
}

TEST(Decode, NarrowOutputsRoundTheFp32ElementOnce) {
  for (const FormatName& name : format_names()) {
    const SlotFormat format = make_format(name.preset, 64, name.fp8);
    Random random(23);
    constexpr int kSlots = 500;
    Pool wide(format, kSlots), narrow(format, kSlots);
    for (int i = 0; i < kSlots; ++i) {
      SlotContent content = testing::random_slot(format, &random);
      // Some values overflow fp16 and some are subnormal there.
      if (i % 7 == 0) content.scale = 0x7BFF;
      if (i % 7 == 1) content.scale = 0x0003, content.zero = 0x0001;
      if (i % 7 == 2) content.norm = 0x7BFF;
      if (i % 7 == 3) content.norm = 0x0005;
      write_slot(format, content, wide.slot(i));
      std::memcpy(narrow.slot(i), wide.slot(i), static_cast<size_t>(format.slot_bytes()));
    }
    ASSERT_TRUE(is_ok(decode_slots(wide.call())));
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      ASSERT_TRUE(is_ok(decode_slots(narrow.call(dtype))));
      for (int i = 0; i < kSlots * 64; ++i) {
        ASSERT_EQ(testing::load_element(narrow.key.data(), dtype, i),
                  testing::round_to(dtype, static_cast<double>(wide.key.as<float>()[i])));
        ASSERT_EQ(testing::load_element(narrow.value.data(), dtype, i),
                  testing::round_to(dtype, static_cast<double>(wide.value.as<float>()[i])));
      }
    }
  }
}

TEST(Decode, UnrotateIsTheHadamardTransform) {
  for (const char* preset : {"4bit_nc", "k3v4_nc", "3bit_nc"}) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      const SlotFormat format = make_format(preset, head_dim);
      Random random(9);
      constexpr int kSlots = 20;
      Pool stored(format, kSlots), plain(format, kSlots);
      for (int i = 0; i < kSlots; ++i) {
        write_slot(format, testing::random_slot(format, &random), stored.slot(i));
        std::memcpy(plain.slot(i), stored.slot(i), static_cast<size_t>(format.slot_bytes()));
      }
      ASSERT_TRUE(is_ok(decode_slots(stored.call())));
      DecodeCall call = plain.call();
      call.unrotate_keys = true;
      ASSERT_TRUE(is_ok(decode_slots(call)));
      for (int i = 0; i < kSlots; ++i) {
        for (int j = 0; j < head_dim; ++j) {
          double sum = 0, squares = 0;
          for (int d = 0; d < head_dim; ++d) {
            const double x = stored.key.as<float>()[i * head_dim + d];
            sum += std::popcount(static_cast<unsigned>(j & d)) % 2 == 1 ? -x : x;
            squares += x * x;
          }
          ASSERT_NEAR(plain.key.as<float>()[i * head_dim + j], sum / std::sqrt(head_dim),
                      1e-6 * std::sqrt(squares))
              << preset << " " << head_dim;
        }
      }
    }
  }
}

// A cache of several blocks and heads with random slots, in the given layout.
struct Paged {
  Paged(const SlotFormat& format, PageLayout layout, int padding, int block_size = 5,
        int heads = 3) {
    const int stride = format.slot_bytes() + padding;
    cache = make_cache(nullptr, 4, block_size, heads, format, layout, stride);
    if (layout == PageLayout::kStrided) {
      cache.stride_token = stride;
      cache.stride_block = int64_t{stride} * block_size + 6;
      cache.stride_head = cache.stride_block * 4 + 10;
    }
    cache.pages_bytes = cache_extent_bytes(cache);
    pages = GuardedBuffer(static_cast<size_t>(cache.pages_bytes));
    cache.pages = pages.data();
    Random random(31);
    for (int b = 0; b < 4; ++b) {
      for (int t = 0; t < block_size; ++t) {
        for (int h = 0; h < heads; ++h) {
          write_slot(format, testing::random_slot(format, &random),
                     cache.pages + cache.slot_offset(b, t, h));
        }
      }
    }
  }

  PagedCache cache;
  GuardedBuffer pages;
};

TEST(Decode, EveryLayoutAndPaddingReadsTheNamedSlot) {
  for (const FormatName& name : format_names()) {
    const SlotFormat format = make_format(name.preset, 64, name.fp8);
    for (PageLayout layout :
         {PageLayout::kTokenMajor, PageLayout::kHeadMajor, PageLayout::kStrided}) {
      for (int padding : {0, 2, 58}) {
        Paged paged(format, layout, padding);
        const std::vector<int64_t> slots = {19, 0, -1, 7, 7, 13, -9, 4};
        const size_t count = slots.size() * 3 * 64;
        SentinelBuffer key(count * 4), value(count * 4);
        DecodeCall call;
        call.cache = paged.cache;
        call.slot_mapping = slots.data();
        call.num_tokens = static_cast<int64_t>(slots.size());
        call.key = key.data();
        call.value = value.data();
        for (int threads : {1, 2, 3}) {
          key.refill();
          value.refill();
          RunOptions options;
          options.num_threads = threads;
          ASSERT_TRUE(is_ok(decode_slots(call, options)));
          EXPECT_TRUE(key.margins_intact() && value.margins_intact());
          std::vector<float> want_key(64), want_value(64);
          for (size_t i = 0; i < slots.size(); ++i) {
            for (int h = 0; h < 3; ++h) {
              std::fill(want_key.begin(), want_key.end(), 0.0f);
              std::fill(want_value.begin(), want_value.end(), 0.0f);
              if (slots[i] >= 0) {
                expected_slot(
                    format,
                    paged.cache.pages + paged.cache.slot_offset(slots[i] / 5, slots[i] % 5, h),
                    want_key.data(), want_value.data());
              }
              const size_t row = (i * 3 + static_cast<size_t>(h)) * 64 * 4;
              ASSERT_EQ(std::memcmp(key.data() + row, want_key.data(), 256), 0);
              ASSERT_EQ(std::memcmp(value.data() + row, want_value.data(), 256), 0);
            }
          }
        }
      }
    }
  }
}

TEST(Decode, EitherOutputMayBeNull) {
  const SlotFormat format = make_format("4bit_nc", 64);
  Random random(2);
  Pool pool(format, 3), both(format, 3);
  for (int i = 0; i < 3; ++i) {
    write_slot(format, testing::random_slot(format, &random), pool.slot(i));
    std::memcpy(both.slot(i), pool.slot(i), static_cast<size_t>(format.slot_bytes()));
  }
  ASSERT_TRUE(is_ok(decode_slots(both.call())));
  DecodeCall call = pool.call();
  call.value = nullptr;
  ASSERT_TRUE(is_ok(decode_slots(call)));
  EXPECT_EQ(std::memcmp(pool.key.data(), both.key.data(), pool.key.size()), 0);
  call = pool.call();
  call.key = nullptr;
  ASSERT_TRUE(is_ok(decode_slots(call)));
  EXPECT_EQ(std::memcmp(pool.value.data(), both.value.data(), pool.value.size()), 0);
}

TEST(Decode, EverySimdTargetGivesTheSameBits) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : head_dims(name)) {
      const SlotFormat format = make_format(name.preset, head_dim, name.fp8);
      constexpr int kSlots = 150;
      Pool pool(format, kSlots);
      Random random(13);
      for (int i = 0; i < kSlots; ++i) {
        write_slot(format, testing::random_slot(format, &random), pool.slot(i));
      }
      for (bool unrotate : {false, true}) {
        DecodeCall call = pool.call();
        call.unrotate_keys = unrotate;
        ASSERT_TRUE(is_ok(decode_slots(call)));
        std::vector<std::byte> want(pool.key.data(), pool.key.data() + pool.key.size());
        want.insert(want.end(), pool.value.data(), pool.value.data() + pool.value.size());
        for (const char* backend : {"cpu/avx3", "cpu/avx2", "cpu/neon", "cpu/scalar"}) {
          RunOptions options;
          options.backend = backend;
          const Status status = decode_slots(call, options);
          if (status.code() == StatusCode::kUnavailable) continue;
          ASSERT_TRUE(is_ok(status));
          std::vector<std::byte> got(pool.key.data(), pool.key.data() + pool.key.size());
          got.insert(got.end(), pool.value.data(), pool.value.data() + pool.value.size());
          ASSERT_TRUE(testing::same_bits(got, want))
              << format_label(name, head_dim) << " " << backend;
        }
      }
    }
  }
}

TEST(Decode, RefusesWhatItCannotReadAndWritesNothing) {
  const SlotFormat format = make_format("4bit_nc", 64);
  Pool pool(format, 4);
  SentinelBuffer key(4 * 64 * 4), value(4 * 64 * 4);
  const auto refused = [&](StatusCode code, const char* argument, auto change) {
    DecodeCall call = pool.call();
    call.key = key.data();
    call.value = value.data();
    change(&call);
    EXPECT_TRUE(fails_with(decode_slots(call), code, argument));
    EXPECT_TRUE(key.untouched() && value.untouched()) << argument;
  };
  std::vector<int64_t> late = {0, 1, 2, 4};
  std::vector<int64_t> huge = {0, 1, std::numeric_limits<int64_t>::max(), 2};
  refused(StatusCode::kOutOfRange, "slot", [&](DecodeCall* c) { c->slot_mapping = late.data(); });
  refused(StatusCode::kOutOfRange, "slot", [&](DecodeCall* c) { c->slot_mapping = huge.data(); });
  refused(StatusCode::kInvalidArgument, "slot_mapping",
          [](DecodeCall* c) { c->slot_mapping = nullptr; });
  refused(StatusCode::kInvalidArgument, "num_tokens", [](DecodeCall* c) { c->num_tokens = -1; });
  refused(StatusCode::kInvalidArgument, "pages", [](DecodeCall* c) { c->cache.pages = nullptr; });
  refused(StatusCode::kInvalidArgument, "dtype",
          [](DecodeCall* c) { c->dtype = static_cast<DType>(7); });
  refused(StatusCode::kUnsupported, "head_dim",
          [](DecodeCall* c) { c->cache.format.head_dim = 80; });
  refused(StatusCode::kInvalidArgument, "pages_bytes",
          [](DecodeCall* c) { c->cache.pages_bytes = 4 * 70 - 1; });
}

TEST(Decode, NothingToDoIsNotAnError) {
  const SlotFormat format = make_format("4bit_nc", 64);
  Pool pool(format, 1);
  DecodeCall call = pool.call();
  call.num_tokens = 0;
  call.slot_mapping = nullptr;
  EXPECT_TRUE(is_ok(decode_slots(call)));
}

TEST(Decode, PoolsBeyondFourGiB) {
  // A sparse pool: only the touched pages exist. 5 GiB puts byte offsets past 2^32.
  const SlotFormat format = make_format("k8v4", 128);
  constexpr int kBlock = 16;
  const int64_t block_bytes = int64_t{format.slot_bytes()} * kBlock;
  const int64_t num_blocks = (int64_t{5} << 30) / block_bytes;
  const auto bytes = static_cast<size_t>(num_blocks * block_bytes);
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const PagedCache cache =
      make_cache(static_cast<std::byte*>(mapping), num_blocks, kBlock, 1, format);
  Random random(77);
  std::vector<int64_t> slots;
  std::vector<SlotContent> contents;
  for (int64_t edge : {int64_t{1} << 31, int64_t{1} << 32, int64_t{5} << 30}) {
    for (int64_t delta : {-1, 0, 1}) {
      const int64_t slot = edge / format.slot_bytes() + delta;
      if (slot >= num_blocks * kBlock) continue;
      slots.push_back(slot);
      contents.push_back(testing::random_slot(format, &random));
      write_slot(format, contents.back(), cache.pages + slot * format.slot_bytes());
    }
  }
  std::vector<float> key(slots.size() * 128), want_key(128), want_value(128);
  DecodeCall call;
  call.cache = cache;
  call.slot_mapping = slots.data();
  call.num_tokens = static_cast<int64_t>(slots.size());
  call.key = key.data();
  ASSERT_TRUE(is_ok(decode_slots(call)));
  for (size_t i = 0; i < slots.size(); ++i) {
    expected_slot(format, cache.pages + slots[i] * format.slot_bytes(), want_key.data(),
                  want_value.data());
    EXPECT_EQ(std::memcmp(key.data() + i * 128, want_key.data(), 512), 0) << slots[i];
  }
  munmap(mapping, bytes);
}

}  // namespace
}  // namespace kvtile
