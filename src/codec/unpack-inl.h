// SIMD unpacking of slots into fp32 tiles, one body for every Highway target. This is the CPU's
// only decoder: attend() and decode_slots() both read slots through it, so they see the same bits.
//
// Key tile: lanes are tokens. Panels of kPanel<d> tokens, [panel][head_dim][kPanel] fp32, hold
// the looked-up levels; the per-token factor is apart, in key_scale. Value tile: lanes are
// coordinates, [token][value_pitch] fp32, decoded values in "planar" column order (value_column).
// No include guard in the usual sense: included once per target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "src/codec/codebook.h"
#include "src/codec/tile_layout.h"
#include "src/core/float16.h"

#if defined(KVTILE_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTILE_UNPACK_INL_H_
#undef KVTILE_UNPACK_INL_H_
#else
#define KVTILE_UNPACK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtile {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;

inline size_t lane_count() { return hn::Lanes(F32()); }

// Two vectors of tokens: wide enough to reuse each broadcast query element twice, narrow enough for
// a panel to stay in the first-level cache.
inline size_t panel_tokens() { return 2 * lane_count(); }

inline uint32_t load_word(const std::byte* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// Sixteen levels, looked up by the low four bits of each lane; bits above are ignored.
class LevelTable {
 public:
  explicit LevelTable(const Codebook& book) {
    std::memcpy(levels_, book.levels, sizeof(levels_));
#if HWY_TARGET == HWY_AVX3
    all_ = hn::Load(F32(), levels_);
#elif HWY_TARGET == HWY_AVX2
    num_levels_ = book.num_levels;
    low_ = hn::Load(F32(), levels_);
    high_ = hn::Load(F32(), levels_ + 8);
#endif
  }

  VF lookup(VU codes) const {
    const F32 df;
    const U32 du;
#if HWY_TARGET == HWY_AVX3
    (void)df, (void)du;
    // The permute reads the low four bits of each lane; no mask is needed.
    return hn::TableLookupLanes(all_, hn::Indices512<float>{codes.raw});
#elif HWY_TARGET == HWY_AVX2
    const auto indices = hn::IndicesFromVec(df, hn::And(codes, hn::Set(du, 7)));
    const VF from_low = hn::TableLookupLanes(low_, indices);
    if (num_levels_ == 8) return from_low;
    const VF from_high = hn::TableLookupLanes(high_, indices);
    const auto is_high = hn::TestBit(codes, hn::Set(du, 8));
    return hn::IfThenElse(hn::RebindMask(df, is_high), from_high, from_low);
#else
    const hn::RebindToSigned<F32> di;
    return hn::GatherIndex(df, levels_, hn::BitCast(di, hn::And(codes, hn::Set(du, 15))));
#endif
  }

 private:
  alignas(64) float levels_[16];
#if HWY_TARGET == HWY_AVX3
  VF all_;
#elif HWY_TARGET == HWY_AVX2
  int num_levels_;
  VF low_, high_;
#endif
};

// The value of the FP8 byte in the low eight bits of each lane. Exact, and free of subnormal
// arithmetic, which a host that flushes denormals would get wrong.
template <KeyCode kKey>
HWY_INLINE VF decode_fp8(VU bytes) {
  const F32 df;
  const U32 du;
  constexpr uint32_t kBias = kKey == KeyCode::kFp8E4M3 ? 7 : 15;
  const VU magnitude = hn::And(bytes, hn::Set(du, 0x7F));
  const VU field = hn::ShiftLeft<20>(magnitude);
  // Exponent field 0 holds m/8 * 2^(1-bias): read it as 2^(1-bias) * (1 + m/8) and take 2^(1-bias)
  // away again.
  const auto is_subnormal = hn::Lt(magnitude, hn::Set(du, 8));
  const VU rebias = hn::IfThenElse(is_subnormal, hn::Set(du, (128 - kBias) << 23),
                                   hn::Set(du, (127 - kBias) << 23));
  const VF excess = hn::IfThenElseZero(hn::RebindMask(df, is_subnormal),
                                       hn::BitCast(df, hn::Set(du, (128 - kBias) << 23)));
  VF value = hn::Sub(hn::BitCast(df, hn::Add(field, rebias)), excess);
  if constexpr (kKey == KeyCode::kFp8E4M3) {
    const auto is_nan = hn::Eq(magnitude, hn::Set(du, 0x7F));
    value =
        hn::IfThenElse(hn::RebindMask(df, is_nan), hn::BitCast(df, hn::Set(du, 0x7FC00000)), value);
  }
  const VU sign = hn::ShiftLeft<24>(hn::And(bytes, hn::Set(du, 0x80)));
  return hn::Or(value, hn::BitCast(df, sign));
}

#if HWY_TARGET != HWY_SCALAR
// Sixteen bytes at `offset`, one slot a 128-bit block: block b reads slots[stride * b].
inline VU load_blocks(const std::byte* const* slots, int stride, int offset) {
  const hn::Full128<uint32_t> block;
  const auto load = [&](int b) {
    return hn::LoadU(block, reinterpret_cast<const uint32_t*>(slots[stride * b] + offset));
  };
#if HWY_TARGET == HWY_AVX3
  const hn::Full256<uint32_t> half;
  return hn::Combine(U32(), hn::Combine(half, load(3), load(2)),
                     hn::Combine(half, load(1), load(0)));
#elif HWY_TARGET == HWY_AVX2
  return hn::Combine(U32(), load(1), load(0));
#else
  return load(0);
#endif
}

// Spreads four 3-byte groups of each 128-bit block over its four lanes. The top byte of a lane is
// left over and ignored.
inline VU spread_groups(VU packed) {
  alignas(16) static constexpr uint8_t kBytes[16] = {0, 1, 2, 3, 3, 4,  5,  6,
                                                     6, 7, 8, 9, 9, 10, 11, 12};
  const hn::Repartition<uint8_t, U32> du8;
  return hn::BitCast(U32(),
                     hn::TableLookupBytes(hn::BitCast(du8, packed), hn::LoadDup128(du8, kBytes)));
}
#endif

// Words in which a vector of tokens is unpacked together: as many as a 128-bit load brings.
#if HWY_TARGET == HWY_SCALAR
constexpr int kWordsPerLoad = 1;
#else
constexpr int kWordsPerLoad = 4;
#endif

struct WordGroup {
  VU word[kWordsPerLoad];
};

// Words first_word.. of lane_count() slots, lanes over slots. A word is kBytesPerWord packed bytes;
// what a load reads beyond the key codes is a later field of the same slot.
template <int kBytesPerWord>
HWY_INLINE WordGroup load_words(const std::byte* const* slots, int first_word) {
  const U32 du;
  const int offset = first_word * kBytesPerWord;
  WordGroup group;
#if HWY_TARGET == HWY_SCALAR
  group.word[0] = hn::Set(du, load_word(slots[0] + offset));
#else
  // Block b of row i is slot i + 4 b, so that a 4x4 transpose of blocks puts slots in lane order.
  const hn::Repartition<uint64_t, U32> du64;
  VU rows[4];
  for (int i = 0; i < 4; ++i) {
    rows[i] = load_blocks(slots + i, 4, offset);
    if constexpr (kBytesPerWord == 3) rows[i] = spread_groups(rows[i]);
  }
  const auto lower01 = hn::BitCast(du64, hn::InterleaveLower(du, rows[0], rows[1]));
  const auto upper01 = hn::BitCast(du64, hn::InterleaveUpper(du, rows[0], rows[1]));
  const auto lower23 = hn::BitCast(du64, hn::InterleaveLower(du, rows[2], rows[3]));
  const auto upper23 = hn::BitCast(du64, hn::InterleaveUpper(du, rows[2], rows[3]));
  group.word[0] = hn::BitCast(du, hn::InterleaveLower(du64, lower01, lower23));
  group.word[1] = hn::BitCast(du, hn::InterleaveUpper(du64, lower01, lower23));
  group.word[2] = hn::BitCast(du, hn::InterleaveLower(du64, upper01, upper23));
  group.word[3] = hn::BitCast(du, hn::InterleaveUpper(du64, upper01, upper23));
#endif
  return group;
}

// slots[t..t + lanes), with lanes outside the span repeating a slot inside it.
inline void clamp_slots(const std::byte* const* slots, TokenSpan span, size_t t,
                        const std::byte** lane_slots) {
  for (size_t i = 0; i < lane_count(); ++i) {
    lane_slots[i] = slots[span.contains(t + i) ? t + i : static_cast<size_t>(span.begin)];
  }
}

template <int kBits>
void unpack_rotated_keys(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                         float* key_tile, float* key_scale) {
  const F32 df;
  const int head_dim = format.head_dim;
  const size_t lanes = lane_count();
  const size_t panel = panel_tokens();
  const LevelTable table(make_codebook(format.key, head_dim));
  const std::byte* lane_slots[kMaxLanes];
  for (size_t t = span.begin / lanes * lanes; t < static_cast<size_t>(span.end); t += lanes) {
    clamp_slots(slots, span, t, lane_slots);
    float* column = key_tile + (t / panel) * panel * static_cast<size_t>(head_dim) + t % panel;
    // Eight partial sums in coordinate order, multiply and add apart: the decode definition of
    // docs/format.md, the same on every target and GPU.
    VF s0 = hn::Zero(df), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (int w = 0; w < head_dim / 8; w += kWordsPerLoad) {
      const WordGroup group = load_words<kBits>(lane_slots, w);
#pragma GCC unroll 4
      for (int i = 0; i < kWordsPerLoad; ++i) {
        VU word = group.word[i];
        const auto next = [&](VF& sum) {
          const VF level = table.lookup(word);
          word = hn::ShiftRight<kBits>(word);
          sum = hn::Add(sum, hn::Mul(level, level));
          hn::StoreU(level, df, column);
          column += panel;
        };
        next(s0), next(s1), next(s2), next(s3), next(s4), next(s5), next(s6), next(s7);
      }
    }
    float norms[kMaxLanes];
    for (size_t i = 0; i < lanes; ++i) {
      norms[i] = half_to_float(load_half_word(lane_slots[i] + format.norm_offset()));
    }
    VF scale = hn::LoadU(df, norms);
    if (format.norm_correction) {
      const VF sum = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
                             hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)));
      scale = hn::Div(scale, hn::Sqrt(sum));
    }
    hn::StoreU(scale, df, key_scale + t);
  }
}

template <KeyCode kKey>
void unpack_fp8_keys(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                     float* key_tile, float* key_scale) {
  const F32 df;
  const int num_words = format.head_dim / 4;
  const size_t lanes = lane_count();
  const size_t panel = panel_tokens();
  const std::byte* lane_slots[kMaxLanes];
  for (size_t t = span.begin / lanes * lanes; t < static_cast<size_t>(span.end); t += lanes) {
    clamp_slots(slots, span, t, lane_slots);
    float* column =
        key_tile + (t / panel) * panel * static_cast<size_t>(format.head_dim) + t % panel;
    for (int w = 0; w < num_words; w += kWordsPerLoad) {
      const WordGroup group = load_words<4>(lane_slots, w);
      for (int i = 0; i < kWordsPerLoad && w + i < num_words; ++i) {
        VU word = group.word[i];
        for (int j = 0; j < 4; ++j) {
          hn::StoreU(decode_fp8<kKey>(word), df, column);
          word = hn::ShiftRight<8>(word);
          column += panel;
        }
      }
    }
    hn::StoreU(hn::Set(df, 1.0f), df, key_scale + t);
  }
}

// Keys of slots[t] into column t, for t in the span; other columns of the vectors touched are left
// undefined.
inline void unpack_keys(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                        float* key_tile, float* key_scale) {
  switch (format.key) {
    case KeyCode::kFp8E4M3:
      return unpack_fp8_keys<KeyCode::kFp8E4M3>(format, slots, span, key_tile, key_scale);
    case KeyCode::kFp8E4B15:
      return unpack_fp8_keys<KeyCode::kFp8E4B15>(format, slots, span, key_tile, key_scale);
    case KeyCode::kLloydMax4:
      return unpack_rotated_keys<4>(format, slots, span, key_tile, key_scale);
    case KeyCode::kLloydMax3:
      return unpack_rotated_keys<3>(format, slots, span, key_tile, key_scale);
  }
}

template <int kBits>
bool unpack_uniform_values(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                           uint32_t* words, float* value_tile) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<F32> di;
  const auto num_words = static_cast<size_t>(format.head_dim / 8);
  const size_t lanes = lane_count();
  const size_t pitch = static_cast<size_t>(value_pitch(format.head_dim, static_cast<int>(lanes)));
  const size_t word_pitch = num_words + lanes;
  const VU mask = hn::Set(du, (1u << kBits) - 1);
  // Vector loads stay inside the slot only where its codes fill whole vectors.
  [[maybe_unused]] const bool whole_vectors = num_words % lanes == 0;
  bool all_finite = true;
  for (int first = span.begin; first < span.end; first += kValueBatch) {
    const int batch = std::min(span.end - first, kValueBatch);
    // Words are copied for a batch of tokens before any is read back as a vector: reading at once
    // would wait for the stores.
    for (int i = 0; i < batch; ++i) {
      const std::byte* codes = slots[first + i] + format.value_offset();
      uint32_t* row = words + static_cast<size_t>(i) * word_pitch;
#if HWY_TARGET != HWY_SCALAR
      if (whole_vectors) {
        for (size_t w = 0; w < num_words; w += lanes, codes += lanes * kBits) {
          if constexpr (kBits == 4) {
            hn::StoreU(hn::LoadU(du, reinterpret_cast<const uint32_t*>(codes)), du, row + w);
          } else {
            const std::byte* blocks[4] = {codes, codes + 12, codes + 24, codes + 36};
            hn::StoreU(spread_groups(load_blocks(blocks, 1, 0)), du, row + w);
          }
        }
        continue;
      }
#endif
      for (size_t w = 0; w < num_words; ++w, codes += kBits) row[w] = load_word(codes);
    }
    for (int i = 0; i < batch; ++i) {
      const std::byte* slot = slots[first + i];
      const float scale = half_to_float(load_half_word(slot + format.scale_offset()));
      const float zero = half_to_float(load_half_word(slot + format.zero_offset()));
      all_finite &= scale - scale == 0.0f && zero - zero == 0.0f;
      const VF scales = hn::Set(df, scale);
      const VF zeros = hn::Set(df, zero);
      float* row = value_tile + static_cast<size_t>(first + i) * pitch;
      const uint32_t* row_words = words + static_cast<size_t>(i) * word_pitch;
      // Where head_dim/8 is no multiple of the lane count, a store's tail lanes spill into the next
      // run of columns (or the row's padding) and are overwritten by the next store.
      const auto store_run = [&](auto index) {
        constexpr int kIndex = decltype(index)::value;
        for (size_t w = 0; w < num_words; w += lanes) {
          const VU word = hn::LoadU(du, row_words + w);
          const VU codes = hn::And(hn::ShiftRight<kIndex * kBits>(word), mask);
          const VF code = hn::ConvertTo(df, hn::BitCast(di, codes));
          // The product is exact (4-bit code, 11-bit scale), so fused or not is the same.
          hn::StoreU(hn::MulAdd(code, scales, zeros), df, row + kIndex * num_words + w);
        }
      };
      store_run(std::integral_constant<int, 0>());
      store_run(std::integral_constant<int, 1>());
      store_run(std::integral_constant<int, 2>());
      store_run(std::integral_constant<int, 3>());
      store_run(std::integral_constant<int, 4>());
      store_run(std::integral_constant<int, 5>());
      store_run(std::integral_constant<int, 6>());
      store_run(std::integral_constant<int, 7>());
    }
  }
  return all_finite;
}

// Values of slots[t] into row t, for t in the span. False if any scale or zero is not finite.
// `words` is scratch of tile_words(head_dim) elements.
inline bool unpack_values(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                          uint32_t* words, float* value_tile) {
  return format.value == ValueCode::kUniform4
             ? unpack_uniform_values<4>(format, slots, span, words, value_tile)
             : unpack_uniform_values<3>(format, slots, span, words, value_tile);
}

// n contiguous elements of dtype to fp32.
inline void load_row(const void* src, DType dtype, int n, float* dst) {
  const F32 df;
  const size_t lanes = lane_count();
  const auto count = static_cast<size_t>(n);
  if (dtype == DType::kFloat32) {
    std::memcpy(dst, src, count * sizeof(float));
    return;
  }
  const auto* words = static_cast<const uint16_t*>(src);
  size_t i = 0;
  if (dtype == DType::kBFloat16) {
    const hn::Rebind<uint16_t, F32> du16;
    const U32 du;
    for (; i + lanes <= count; i += lanes) {
      const VU wide = hn::PromoteTo(du, hn::LoadU(du16, words + i));
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(wide)), df, dst + i);
    }
    for (; i < count; ++i) dst[i] = bfloat_to_float(words[i]);
  } else {
    const hn::Rebind<hwy::float16_t, F32> df16;
    const hn::RebindToUnsigned<decltype(df16)> du16;
    for (; i + lanes <= count; i += lanes) {
      hn::StoreU(hn::PromoteTo(df, hn::BitCast(df16, hn::LoadU(du16, words + i))), df, dst + i);
    }
    for (; i < count; ++i) dst[i] = half_to_float(words[i]);
  }
}

// Unnormalised Sylvester Hadamard transform down the columns of x [n][width], width lanes a row.
template <class D>
void hadamard_columns(D d, float* x, int n, size_t width) {
  for (int half = 1; half < n; half *= 2) {
    for (int i = 0; i < n; i += 2 * half) {
      for (int j = i; j < i + half; ++j) {
        float* a = x + static_cast<size_t>(j) * width;
        float* b = a + static_cast<size_t>(half) * width;
        for (size_t c = 0; c < width; c += hn::Lanes(d)) {
          const auto u = hn::LoadU(d, a + c);
          const auto v = hn::LoadU(d, b + c);
          hn::StoreU(hn::Add(u, v), d, a + c);
          hn::StoreU(hn::Sub(u, v), d, b + c);
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtile
HWY_AFTER_NAMESPACE();

#endif  // KVTILE_UNPACK_INL_H_
