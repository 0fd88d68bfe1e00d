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
#include <limits>
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

// fp16 words at `offset` of each slot of the span, as fp32, into out[t]; out holds kTileTokens.
inline void load_halves(const std::byte* const* slots, TokenSpan span, int offset, float* out) {
  const F32 df;
  const hn::Rebind<hwy::float16_t, F32> df16;
  const hn::RebindToUnsigned<decltype(df16)> du16;
  const size_t lanes = lane_count();
  uint16_t words[kTileTokens] = {};
  for (int t = span.begin; t < span.end; ++t) words[t] = load_half_word(slots[t] + offset);
  for (size_t t = span.begin / lanes * lanes; t < static_cast<size_t>(span.end); t += lanes) {
    const auto halves = hn::BitCast(df16, hn::LoadU(du16, words + t));
    hn::StoreU(hn::PromoteTo(df, halves), df, out + t);
  }
}

// Calls sink(level) for each coordinate in order, lanes over slots, and returns the sum of squared
// levels (of rotated keys; FP8 keys have no use for it). The sum is the decode definition of
// docs/format.md, the same on every target and GPU: eight partial sums in coordinate order,
// multiply and add apart. fold() is called after every kScoreChain coordinates.
template <KeyCode kKey, class Sink, class Fold>
HWY_INLINE VF visit_keys(const SlotFormat& format, const LevelTable& table,
                         const std::byte* const* lane_slots, Sink sink, Fold fold) {
  constexpr int kBits = key_bits(kKey);
  constexpr int kBytesPerWord = kBits == 8 ? 4 : kBits;
  const int num_words = format.key_bytes() / kBytesPerWord;
  VF s0 = hn::Zero(F32()), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  for (int w = 0; w < num_words; w += kWordsPerLoad) {
    const WordGroup group = load_words<kBytesPerWord>(lane_slots, w);
#pragma GCC unroll 4
    for (int i = 0; i < kWordsPerLoad; ++i) {
      VU word = group.word[i];
      if constexpr (kBits == 8) {
        if (w + i >= num_words) break;  // FP8 rows may end within a load
        const auto next = [&]() {
          sink(decode_fp8<kKey>(word));
          word = hn::ShiftRight<8>(word);
        };
        next(), next(), next(), next();
      } else {
        const auto next = [&](VF& sum) {
          const VF level = table.lookup(word);
          word = hn::ShiftRight<kBits>(word);
          sum = hn::Add(sum, hn::Mul(level, level));
          sink(level);
        };
        next(s0), next(s1), next(s2), next(s3), next(s4), next(s5), next(s6), next(s7);
      }
    }
    constexpr int kCodesPerWord = kBits == 8 ? 4 : 8;
    if ((w + kWordsPerLoad) * kCodesPerWord % kScoreChain == 0) fold();
  }
  return hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
                 hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)));
}

// Visits the keys of the span a vector of tokens at a time: begin(t) returns the sink for tokens
// t.., fold() ends a chain of coordinates and end(t) the tokens. Fills key_scale, the factor of
// each token's levels.
template <KeyCode kKey, class Begin, class Fold, class End>
HWY_INLINE void visit_span(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                           float* key_scale, Begin begin, Fold fold, End end) {
  const F32 df;
  const size_t lanes = lane_count();
  const LevelTable table(is_fp8(kKey) ? Codebook{} : make_codebook(kKey, format.head_dim));
  if (format.rotated()) load_halves(slots, span, format.norm_offset(), key_scale);
  const std::byte* lane_slots[kMaxLanes];
  for (size_t t = span.begin / lanes * lanes; t < static_cast<size_t>(span.end); t += lanes) {
    clamp_slots(slots, span, t, lane_slots);
    const VF sum = visit_keys<kKey>(format, table, lane_slots, begin(t), fold);
    end(t);
    if constexpr (is_fp8(kKey)) {
      hn::StoreU(hn::Set(df, 1.0f), df, key_scale + t);
    } else if (format.norm_correction) {
      hn::StoreU(hn::Div(hn::LoadU(df, key_scale + t), hn::Sqrt(sum)), df, key_scale + t);
    }
  }
}

constexpr int kLineBytes = 64;

// Lines first, first + step.. of a slot. Slots of one head are far apart in token-major pages,
// where no hardware prefetcher follows them.
HWY_INLINE void prefetch_lines(const std::byte* slot, int slot_bytes, int first, int step) {
  // A slot that starts within a line ends in one more than its size suggests.
  for (int offset = first; offset < slot_bytes + kLineBytes; offset += step) {
    __builtin_prefetch(slot + std::min(offset, slot_bytes - 1), 0, 2);
  }
}

// The slots that are read next, slots[t] for t in the span. Whoever reads tokens fetches these on
// the way, a few lines with each: all at once they would fill the queue of outstanding lines and
// stall.
struct SlotsAhead {
  const std::byte* const* slots = nullptr;
  TokenSpan span{0, 0};

  // Lines first, first + step.. of the slot that takes token t's place.
  HWY_INLINE void fetch(const SlotFormat& format, int t, int first, int step) const {
    if (span.contains(static_cast<size_t>(t))) {
      prefetch_lines(slots[t], format.slot_bytes(), first * kLineBytes, step * kLineBytes);
    }
  }
};

template <KeyCode kKey>
void unpack_key_tile(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                     float* key_tile, float* key_scale) {
  const size_t panel = panel_tokens();
  const auto head_dim = static_cast<size_t>(format.head_dim);
  visit_span<kKey>(
      format, slots, span, key_scale,
      [=](size_t t) {
        float* column = key_tile + (t / panel) * panel * head_dim + t % panel;
        return [=](VF level) mutable {
          hn::StoreU(level, F32(), column);
          column += panel;
        };
      },
      [] {}, [](size_t) {});
}

// Keys of slots[t] into column t, for t in the span; other columns of the vectors touched are left
// undefined.
inline void unpack_keys(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                        float* key_tile, float* key_scale) {
  switch (format.key) {
    case KeyCode::kFp8E4M3:
      return unpack_key_tile<KeyCode::kFp8E4M3>(format, slots, span, key_tile, key_scale);
    case KeyCode::kFp8E4B15:
      return unpack_key_tile<KeyCode::kFp8E4B15>(format, slots, span, key_tile, key_scale);
    case KeyCode::kLloydMax4:
      return unpack_key_tile<KeyCode::kLloydMax4>(format, slots, span, key_tile, key_scale);
    case KeyCode::kLloydMax3:
      return unpack_key_tile<KeyCode::kLloydMax3>(format, slots, span, key_tile, key_scale);
  }
}

// Scales and zeros of the span's values. False if any is not finite.
inline bool load_value_factors(const SlotFormat& format, const std::byte* const* slots,
                               TokenSpan span, float* scales, float* zeros) {
  load_halves(slots, span, format.scale_offset(), scales);
  load_halves(slots, span, format.zero_offset(), zeros);
  float excess = 0.0f;  // becomes NaN with the first non-finite factor
  for (int t = span.begin; t < span.end; ++t) {
    excess += (scales[t] - scales[t]) + (zeros[t] - zeros[t]);
  }
  return excess == 0.0f;
}

// Whether the value codes of a slot fill whole vectors of words; elsewhere a vector load would
// leave the slot.
inline bool whole_value_vectors(const SlotFormat& format) {
  return static_cast<size_t>(format.head_dim / 8) % lane_count() == 0;
}

// Words w.. of one slot's value codes, lanes over words; needs whole_value_vectors.
template <int kBits>
HWY_INLINE VU load_value_words(const std::byte* codes, size_t w) {
  const std::byte* p = codes + w * kBits;
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(U32(), load_word(p));
#else
  if constexpr (kBits == 4) {
    return hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(p));
  } else {
    const std::byte* blocks[4] = {p, p + 12, p + 24, p + 36};
    return spread_groups(load_blocks(blocks, 1, 0));
  }
#endif
}

// The values one token's codes stand for, of the low kBits of each word. The product is exact
// (4-bit code, 11-bit scale), so fused or not is the same, and so is looking the result up.
template <int kBits>
class ValueDecoder {
 public:
#if HWY_TARGET == HWY_AVX3
  ValueDecoder(float scale, float zero) {
    const F32 df;
    // The permute reads four bits: three-bit codes repeat, so that the bit above does not matter.
    alignas(64) static constexpr float kCodes[2][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7},
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    values_ = hn::MulAdd(hn::Load(df, kCodes[kBits - 3]), hn::Set(df, scale), hn::Set(df, zero));
  }
  VF decode(VU words) const {
    return hn::TableLookupLanes(values_, hn::Indices512<float>{words.raw});
  }

 private:
  VF values_;
#else
  ValueDecoder(float scale, float zero)
      : scale_(hn::Set(F32(), scale)), zero_(hn::Set(F32(), zero)) {}
  VF decode(VU words) const {
    const hn::RebindToSigned<F32> di;
    const VU codes = hn::And(words, hn::Set(U32(), (1u << kBits) - 1));
    return hn::MulAdd(hn::ConvertTo(F32(), hn::BitCast(di, codes)), scale_, zero_);
  }

 private:
  VF scale_, zero_;
#endif
};

template <int kBits>
bool unpack_value_tile(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                       uint32_t* words, float* value_tile) {
  const F32 df;
  const U32 du;
  const auto num_words = static_cast<size_t>(format.head_dim / 8);
  const size_t lanes = lane_count();
  const size_t pitch = static_cast<size_t>(value_pitch(format.head_dim, static_cast<int>(lanes)));
  const size_t word_pitch = num_words + lanes;
  float scales[kTileTokens], zeros[kTileTokens];
  const bool all_finite = load_value_factors(format, slots, span, scales, zeros);
  for (int first = span.begin; first < span.end; first += kValueBatch) {
    const int batch = std::min(span.end - first, kValueBatch);
    // Words are copied for a batch of tokens before any is read back as a vector: reading at once
    // would wait for the stores.
    for (int i = 0; i < batch; ++i) {
      const std::byte* codes = slots[first + i] + format.value_offset();
      uint32_t* row = words + static_cast<size_t>(i) * word_pitch;
      if (whole_value_vectors(format)) {
        for (size_t w = 0; w < num_words; w += lanes) {
          hn::StoreU(load_value_words<kBits>(codes, w), du, row + w);
        }
        continue;
      }
      for (size_t w = 0; w < num_words; ++w) row[w] = load_word(codes + w * kBits);
    }
    for (int i = 0; i < batch; ++i) {
      const ValueDecoder<kBits> values(scales[first + i], zeros[first + i]);
      float* row = value_tile + static_cast<size_t>(first + i) * pitch;
      const uint32_t* row_words = words + static_cast<size_t>(i) * word_pitch;
      // Where head_dim/8 is no multiple of the lane count, a store's tail lanes spill into the next
      // run of columns (or the row's padding) and are overwritten by the next store.
      const auto store_run = [&](auto index) {
        constexpr int kIndex = decltype(index)::value;
        for (size_t w = 0; w < num_words; w += lanes) {
          const VU word = hn::ShiftRight<kIndex * kBits>(hn::LoadU(du, row_words + w));
          hn::StoreU(values.decode(word), df, row + kIndex * num_words + w);
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
// `words` is scratch of tile_words(head_dim) elements. Fetches every other line of the slots ahead.
inline bool unpack_values(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                          uint32_t* words, float* value_tile) {
  return format.value == ValueCode::kUniform4
             ? unpack_value_tile<4>(format, slots, span, words, value_tile)
             : unpack_value_tile<3>(format, slots, span, words, value_tile);
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

// n fp32 elements to dtype, to nearest even; every NaN becomes the canonical quiet one, so that
// what a slot decodes to is the same on every target.
inline void store_row(const float* src, DType dtype, int n, void* dst, int64_t first) {
  const F32 df;
  const hn::Rebind<hwy::float16_t, F32> df16;
  const hn::RebindToUnsigned<decltype(df16)> du16;
  const VF quiet = hn::BitCast(df, hn::Set(U32(), 0x7FC00000));
  const size_t lanes = lane_count();
  const auto count = static_cast<size_t>(n);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const VF raw = hn::LoadU(df, src + i);
    const VF v = hn::IfThenElse(hn::Eq(raw, raw), raw, quiet);
    if (dtype == DType::kFloat32) {
      hn::StoreU(v, df, static_cast<float*>(dst) + first + i);
    } else if (dtype == DType::kFloat16) {
      const auto halves = hn::BitCast(du16, hn::DemoteTo(df16, v));
      hn::StoreU(halves, du16, static_cast<uint16_t*>(dst) + first + i);
    } else {
      // To nearest even: half an ulp less one, and one more where the kept part is odd. The quiet
      // NaN has no bits to carry from.
      const U32 du;
      const VU bits = hn::BitCast(du, v);
      const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
      const VU rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd));
      const auto words = hn::DemoteTo(du16, hn::BitCast(hn::RebindToSigned<F32>(), rounded));
      hn::StoreU(words, du16, static_cast<uint16_t*>(dst) + first + i);
    }
  }
  for (; i < count; ++i) {
    const float v = src[i] == src[i] ? src[i] : std::numeric_limits<float>::quiet_NaN();
    store_element(dst, first + static_cast<int64_t>(i), dtype, v);
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
