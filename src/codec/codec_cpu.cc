// CPU encode and decode, one body for every SIMD target. Encoding works on as many tokens as there
// are lanes, transposed, so that norm, Hadamard butterflies, bucketising and packing are all
// vertical; decoding unpacks through unpack-inl.h and transposes back.
#include "src/core/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/codec/codec_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target: per-target headers.
#include "src/codec/unpack-inl.h"

#ifndef KVTILE_CODEC_CPU_ONCE
#define KVTILE_CODEC_CPU_ONCE
#include <algorithm>
#include <cmath>
#include <cstring>

#include "src/codec/codec_kernels.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtile {
namespace HWY_NAMESPACE {

constexpr size_t kEncodeFloats = static_cast<size_t>(kMaxHeadDim) * kMaxLanes;

// One head of up to lane_count() tokens. Lane i belongs to slot slots[i]; null lanes are skipped.
struct EncodeBatch {
  const SlotFormat* format;
  std::byte* slots[kMaxLanes];
  int num_tokens;
};

inline int64_t count_lanes(hn::Mask<F32> mask) {
  return static_cast<int64_t>(hn::CountTrue(F32(), mask));
}

// Loads rows into x [head_dim][lanes]; absent lanes read as zero.
inline void load_transposed(const void* base, DType dtype, const int64_t* row_offsets,
                            const EncodeBatch& batch, float* x) {
  const size_t lanes = lane_count();
  const int head_dim = batch.format->head_dim;
  float row[kMaxHeadDim];
  std::memset(x, 0, sizeof(float) * lanes * static_cast<size_t>(head_dim));
  for (int i = 0; i < batch.num_tokens; ++i) {
    if (batch.slots[i] == nullptr) continue;
    load_row(element_ptr(base, row_offsets[i], dtype), dtype, head_dim, row);
    for (int d = 0; d < head_dim; ++d) x[static_cast<size_t>(d) * lanes + i] = row[d];
  }
}

// codes [head_dim][lanes] to little-endian runs of eight at byte_offset of each slot. A 3-bit run
// is written as four bytes: the fourth belongs to a later run or field and is written after.
template <int kBits>
void store_codes(const EncodeBatch& batch, const uint32_t* codes, int byte_offset) {
  const U32 du;
  const size_t lanes = lane_count();
  constexpr int kCodesPerWord = kBits == 8 ? 4 : 8;
  constexpr int kBytesPerWord = kBits == 8 ? 4 : kBits;
  uint32_t words[kMaxLanes] = {};
  for (int w = 0; w < batch.format->head_dim / kCodesPerWord; ++w) {
    VU packed = hn::Zero(du);
    for (int j = kCodesPerWord - 1; j >= 0; --j) {
      const size_t d = static_cast<size_t>(w * kCodesPerWord + j);
      packed = hn::Or(hn::ShiftLeft<kBits>(packed), hn::LoadU(du, codes + d * lanes));
    }
    hn::StoreU(packed, du, words);
    for (int i = 0; i < batch.num_tokens; ++i) {
      if (batch.slots[i] == nullptr) continue;
      std::memcpy(batch.slots[i] + byte_offset + w * kBytesPerWord, &words[i], 4);
    }
  }
}

template <int kBits>
void encode_rotated_keys(const EncodeBatch& batch, float* x, uint32_t* codes,
                         EncodeReport* report) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<F32> di;
  const SlotFormat& format = *batch.format;
  const size_t lanes = lane_count();
  const auto head_dim = static_cast<size_t>(format.head_dim);

  VF largest = hn::Zero(df);
  auto finite = hn::Ge(largest, largest);
  for (size_t d = 0; d < head_dim; ++d) {
    const VF v = hn::Abs(hn::LoadU(df, x + d * lanes));
    finite = hn::And(finite, hn::Le(v, hn::Set(df, 3.40282347e38f)));
    largest = hn::Max(largest, v);
  }
  // Keys this large saturate their norm anyway; an exact power of two keeps their direction from
  // overflowing.
  const auto huge = hn::And(finite, hn::Ge(largest, hn::Set(df, 0x1p50f)));
  const VF shrink = hn::IfThenElse(huge, hn::Set(df, 0x1p-80f), hn::Set(df, 1.0f));
  // Eight partial sums, coordinate d to partial d mod 8, as in decoding: an order that vectors and
  // the lanes of a GPU can both follow.
  VF s0 = hn::Zero(df), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  for (size_t d = 0; d < head_dim; d += 8) {
    float* column = x + d * lanes;
    const auto next = [&](VF& sum) {
      const VF v = hn::IfThenElseZero(finite, hn::Mul(hn::LoadU(df, column), shrink));
      hn::StoreU(v, df, column);
      sum = hn::MulAdd(v, v, sum);
      column += lanes;
    };
    next(s0), next(s1), next(s2), next(s3), next(s4), next(s5), next(s6), next(s7);
  }
  const VF norm = hn::Sqrt(hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
                                   hn::Add(hn::Add(s4, s5), hn::Add(s6, s7))));
  hadamard_columns(df, x, format.head_dim, lanes);
  const VF inverse = hn::Div(hn::Set(df, 1.0f / std::sqrt(static_cast<float>(format.head_dim))),
                             hn::Add(norm, hn::Set(df, 1e-8f)));
  const Codebook book = make_codebook(format.key, format.head_dim);
  for (size_t d = 0; d < head_dim; ++d) {
    const VF y = hn::Mul(hn::LoadU(df, x + d * lanes), inverse);
    // A true comparison is all ones, -1: subtracting counts the bounds at or below y.
    auto code = hn::Zero(di);
    for (int b = 0; b < book.num_levels - 1; ++b) {
      code = hn::Sub(code,
                     hn::BitCast(di, hn::VecFromMask(df, hn::Ge(y, hn::Set(df, book.bounds[b])))));
    }
    const VU stored = hn::IfThenElseZero(hn::RebindMask(du, finite), hn::BitCast(du, code));
    hn::StoreU(stored, du, codes + d * lanes);
  }
  store_codes<kBits>(batch, codes, 0);

  float norms[kMaxLanes] = {}, finite_lanes[kMaxLanes] = {};
  hn::StoreU(hn::Div(norm, shrink), df, norms);
  hn::StoreU(hn::IfThenElseZero(finite, hn::Set(df, 1.0f)), df, finite_lanes);
  for (int i = 0; i < batch.num_tokens; ++i) {
    if (batch.slots[i] == nullptr) continue;
    const bool is_finite = finite_lanes[i] != 0.0f;
    report->non_finite_keys += is_finite ? 0 : 1;
    report->norms_saturated += is_finite && norms[i] > kHalfMax ? 1 : 0;
    store_half_word(batch.slots[i] + format.norm_offset(),
                    is_finite ? float_to_half(std::min(norms[i], kHalfMax)) : kHalfNaN);
  }
}

// The byte of a magnitude at most 448: to nearest even, as the hardware conversion does.
inline VU fp8_e4m3_magnitude(VF magnitude) {
  const F32 df;
  const U32 du;
  const VU bits = hn::BitCast(du, magnitude);
  const VU odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1));
  const VU rounded = hn::ShiftRight<20>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFF)), odd));
  const VU normal = hn::Sub(rounded, hn::Set(du, (127 - 7) << 3));
  // Below 2^-6 the step is 2^-9: adding 2^23 steps leaves the rounded count in the low bits.
  const VF magic = hn::Set(df, 0x1p14f);
  const VU subnormal = hn::And(hn::BitCast(du, hn::Add(magnitude, magic)), hn::Set(du, 0xFF));
  const auto is_normal = hn::RebindMask(du, hn::Ge(magnitude, hn::Set(df, 0x1p-6f)));
  return hn::IfThenElse(is_normal, normal, subnormal);
}

// The byte of a magnitude at most 1.75: ties away from zero, as the software conversion does (add
// half a step to the fp16 word, then shift).
inline VU fp8_e4b15_magnitude(VF magnitude) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<F32> di;
  const VU rounded = hn::ShiftRight<20>(hn::Add(hn::BitCast(du, magnitude), hn::Set(du, 0x80000)));
  const VU normal = hn::Sub(rounded, hn::Set(du, (127 - 15) << 3));
  const auto half_steps = hn::ConvertTo(di, hn::Mul(magnitude, hn::Set(df, 0x1p24f)));
  const VU subnormal = hn::ShiftRight<7>(hn::Add(hn::BitCast(du, half_steps), hn::Set(du, 64)));
  const auto is_normal = hn::RebindMask(du, hn::Ge(magnitude, hn::Set(df, 0x1p-14f)));
  return hn::IfThenElse(is_normal, normal, subnormal);
}

template <KeyCode kKey>
void encode_fp8_keys(const EncodeBatch& batch, const float* x, uint32_t* codes,
                     EncodeReport* report) {
  const F32 df;
  const U32 du;
  constexpr bool kE4M3 = kKey == KeyCode::kFp8E4M3;
  const VF largest = hn::Set(df, kE4M3 ? 448.0f : 1.75f);
  const VF largest_float = hn::Set(df, 3.40282347e38f);
  const size_t lanes = lane_count();
  const auto head_dim = static_cast<size_t>(batch.format->head_dim);
  auto non_finite = hn::Ne(largest, largest);
  for (size_t d = 0; d < head_dim; ++d) {
    const VF value = hn::LoadU(df, x + d * lanes);
    const VF magnitude = hn::Abs(value);
    const auto is_nan = hn::IsNaN(value);
    const auto too_large = hn::Gt(magnitude, largest);
    non_finite = hn::Or(non_finite, hn::Not(hn::Le(magnitude, largest_float)));
    report->key_elements_clamped += count_lanes(too_large);
    const VF clamped = hn::IfThenElse(hn::Or(is_nan, too_large), largest, magnitude);
    VU code = kE4M3 ? fp8_e4m3_magnitude(clamped) : fp8_e4b15_magnitude(clamped);
    if constexpr (kE4M3) {
      code = hn::IfThenElse(hn::RebindMask(du, is_nan), hn::Set(du, 0x7F), code);
    }
    const VU sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80));
    hn::StoreU(hn::Or(code, sign), du, codes + d * lanes);
  }
  report->non_finite_keys += count_lanes(non_finite);
  store_codes<8>(batch, codes, 0);
}

template <int kBits>
void encode_values(const EncodeBatch& batch, float* x, uint32_t* codes, EncodeReport* report) {
  const F32 df;
  const U32 du;
  const hn::RebindToSigned<F32> di;
  const SlotFormat& format = *batch.format;
  const size_t lanes = lane_count();
  const auto head_dim = static_cast<size_t>(format.head_dim);
  constexpr float kLevels = (1 << kBits) - 1;

  // Clamping the inputs, not the stored zero alone, confines the damage of an outlier to itself.
  const VF limit = hn::Set(df, kHalfMax);
  VF low = hn::Set(df, 3.40282347e38f), high = hn::Neg(low);
  auto finite = hn::Eq(limit, limit);
  for (size_t d = 0; d < head_dim; ++d) {
    VF v = hn::LoadU(df, x + d * lanes);
    const auto is_finite = hn::Le(hn::Abs(v), hn::Set(df, 3.40282347e38f));
    finite = hn::And(finite, is_finite);
    report->value_elements_clamped += count_lanes(hn::And(is_finite, hn::Gt(hn::Abs(v), limit)));
    v = hn::IfThenElseZero(is_finite, hn::Min(hn::Max(v, hn::Neg(limit)), limit));
    hn::StoreU(v, df, x + d * lanes);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  }
  low = hn::Add(low, hn::Zero(df));  // -0 and 0 compare equal: store 0, whichever came first
  // The store this must match byte for byte divides by multiplying with a reciprocal, twice.
  const VF scale =
      hn::Max(hn::Mul(hn::Sub(high, low), hn::Set(df, 1.0f / kLevels)), hn::Set(df, 1e-8f));
  const VF inverse = hn::Div(hn::Set(df, 1.0f), scale);
  for (size_t d = 0; d < head_dim; ++d) {
    const VF v = hn::LoadU(df, x + d * lanes);
    const VF steps = hn::Add(hn::Mul(hn::Sub(v, low), inverse), hn::Set(df, 0.5f));
    auto code = hn::ConvertTo(di, steps);  // truncates; steps are positive
    code = hn::Min(code, hn::Set(di, static_cast<int>(kLevels)));
    const VU stored = hn::IfThenElseZero(hn::RebindMask(du, finite), hn::BitCast(du, code));
    hn::StoreU(stored, du, codes + d * lanes);
  }
  store_codes<kBits>(batch, codes, format.value_offset());

  float scales[kMaxLanes] = {}, zeros[kMaxLanes] = {}, finite_lanes[kMaxLanes] = {};
  hn::StoreU(scale, df, scales);
  hn::StoreU(low, df, zeros);
  hn::StoreU(hn::IfThenElseZero(finite, hn::Set(df, 1.0f)), df, finite_lanes);
  for (int i = 0; i < batch.num_tokens; ++i) {
    if (batch.slots[i] == nullptr) continue;
    const bool is_finite = finite_lanes[i] != 0.0f;
    if (!is_finite) ++report->non_finite_values;
    store_half_word(batch.slots[i] + format.scale_offset(),
                    is_finite ? float_to_half(scales[i]) : kHalfNaN);
    store_half_word(batch.slots[i] + format.zero_offset(),
                    is_finite ? float_to_half(zeros[i]) : kHalfNaN);
  }
}

void encode_tokens(const EncodeCall& call, int64_t begin, int64_t end, EncodeReport* report) {
  const PagedCache& cache = call.cache;
  const SlotFormat& format = cache.format;
  alignas(64) float x[kEncodeFloats];
  alignas(64) uint32_t codes[kEncodeFloats];
  const auto lanes = static_cast<int64_t>(lane_count());
  for (int64_t first = begin; first < end; first += lanes) {
    EncodeBatch batch;
    batch.format = &format;
    batch.num_tokens = static_cast<int>(std::min(lanes, end - first));
    int64_t offsets[kMaxLanes];
    int64_t live = 0;
    for (int i = 0; i < batch.num_tokens; ++i) live += call.slot_mapping[first + i] >= 0 ? 1 : 0;
    report->skipped += batch.num_tokens - live;
    report->tokens += live * cache.num_kv_heads;
    for (int head = 0; head < cache.num_kv_heads; ++head) {
      for (int i = 0; i < batch.num_tokens; ++i) {
        const int64_t slot = call.slot_mapping[first + i];
        batch.slots[i] = slot < 0 ? nullptr
                                  : cache.pages + cache.slot_offset(slot / cache.block_size,
                                                                    slot % cache.block_size, head);
        offsets[i] = (first + i) * call.key_stride_token + head * call.key_stride_head;
      }
      load_transposed(call.key, call.dtype, offsets, batch, x);
      switch (format.key) {
        case KeyCode::kFp8E4M3:
          encode_fp8_keys<KeyCode::kFp8E4M3>(batch, x, codes, report);
          break;
        case KeyCode::kFp8E4B15:
          encode_fp8_keys<KeyCode::kFp8E4B15>(batch, x, codes, report);
          break;
        case KeyCode::kLloydMax4:
          encode_rotated_keys<4>(batch, x, codes, report);
          break;
        case KeyCode::kLloydMax3:
          encode_rotated_keys<3>(batch, x, codes, report);
          break;
      }
      for (int i = 0; i < batch.num_tokens; ++i) {
        offsets[i] = (first + i) * call.value_stride_token + head * call.value_stride_head;
      }
      load_transposed(call.value, call.dtype, offsets, batch, x);
      if (format.value == ValueCode::kUniform4) {
        encode_values<4>(batch, x, codes, report);
      } else {
        encode_values<3>(batch, x, codes, report);
      }
    }
  }
}

// Scales the unpacked levels of one tile in place and, if asked, rotates them back.
void finish_keys(const SlotFormat& format, int num_tokens, bool unrotate, const float* key_scale,
                 float* key_tile) {
  const F32 df;
  const size_t panel = panel_tokens();
  const size_t lanes = lane_count();
  const auto head_dim = static_cast<size_t>(format.head_dim);
  const float orthonormal = 1.0f / std::sqrt(static_cast<float>(format.head_dim));
  for (size_t t = 0; t < static_cast<size_t>(num_tokens); t += panel) {
    float* tile = key_tile + t * head_dim;
    const VF scale0 = hn::LoadU(df, key_scale + t);
    const VF scale1 = hn::LoadU(df, key_scale + t + lanes);
    for (size_t d = 0; d < head_dim; ++d) {
      float* p = tile + d * panel;
      hn::StoreU(hn::Mul(hn::LoadU(df, p), scale0), df, p);
      hn::StoreU(hn::Mul(hn::LoadU(df, p + lanes), scale1), df, p + lanes);
    }
    if (!unrotate) continue;
    hadamard_columns(df, tile, format.head_dim, panel);
    for (size_t i = 0; i < head_dim * panel; i += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(df, tile + i), hn::Set(df, orthonormal)), df, tile + i);
    }
  }
}

// Puts n rows in order of coordinates with fill(i, row) and stores row i at element rows[i] of dst.
// Several rows are filled before the first is read back as vectors: reading at once would wait for
// the scalar stores.
template <class Fill>
HWY_INLINE void store_rows(const DecodeCall& call, int n, const int64_t* rows, void* dst,
                           Fill fill) {
  constexpr int kBatch = 8;
  const int head_dim = call.cache.format.head_dim;
  float batch[kBatch * kMaxHeadDim];
  for (int first = 0; first < n; first += kBatch) {
    const int count = std::min(kBatch, n - first);
    for (int i = 0; i < count; ++i) fill(first + i, batch + i * head_dim);
    for (int i = 0; i < count; ++i) {
      store_row(batch + i * head_dim, call.dtype, head_dim, dst, rows[first + i]);
    }
  }
}

void decode_tokens(const DecodeCall& call, int64_t begin, int64_t end, float* scratch) {
  const PagedCache& cache = call.cache;
  const SlotFormat& format = cache.format;
  const int head_dim = format.head_dim;
  const size_t panel = panel_tokens();
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim, static_cast<int>(lane_count())));
  float* key_tile = scratch;
  float* value_tile = key_tile + key_tile_floats(head_dim);
  float* key_scale = value_tile + value_tile_floats(head_dim);
  auto* words = reinterpret_cast<uint32_t*>(key_scale + kTileTokens);
  const std::byte* slots[kTileTokens];
  int64_t rows[kTileTokens];
  for (int head = 0; head < cache.num_kv_heads; ++head) {
    for (int64_t first = begin; first < end; first += kTileTokens) {
      int n = 0;
      for (int64_t t = first; t < std::min(end, first + kTileTokens); ++t) {
        const int64_t slot = call.slot_mapping[t];
        const int64_t offset = (t * cache.num_kv_heads + head) * head_dim;
        if (slot >= 0) {
          slots[n] = cache.pages +
                     cache.slot_offset(slot / cache.block_size, slot % cache.block_size, head);
          rows[n++] = offset;
          continue;
        }
        for (int d = 0; d < head_dim; ++d) {
          if (call.key != nullptr) store_element(call.key, offset + d, call.dtype, 0.0f);
          if (call.value != nullptr) store_element(call.value, offset + d, call.dtype, 0.0f);
        }
      }
      if (n == 0) continue;
      if (call.key != nullptr) {
        unpack_keys(format, slots, TokenSpan{0, n}, key_tile, key_scale);
        finish_keys(format, n, call.unrotate_keys && format.rotated(), key_scale, key_tile);
        store_rows(call, n, rows, call.key, [&](int i, float* row) {
          const auto t = static_cast<size_t>(i);
          const float* column =
              key_tile + (t / panel) * panel * static_cast<size_t>(head_dim) + t % panel;
          for (int d = 0; d < head_dim; ++d) row[d] = column[static_cast<size_t>(d) * panel];
        });
      }
      if (call.value != nullptr) {
        unpack_values(format, slots, TokenSpan{0, n}, words, value_tile);
        store_rows(call, n, rows, call.value, [&](int i, float* row) {
          const float* planar = value_tile + static_cast<size_t>(i) * pitch;
          const int num_words = head_dim / 8;
          for (int w = 0; w < num_words; ++w) {
            for (int j = 0; j < 8; ++j) row[8 * w + j] = planar[j * num_words + w];
          }
        });
      }
    }
  }
}

CodecKernels make_codec_kernels() { return {encode_tokens, decode_tokens}; }

}  // namespace HWY_NAMESPACE
}  // namespace kvtile
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtile {

int64_t decode_scratch_floats(int head_dim) {
  return key_tile_floats(head_dim) + value_tile_floats(head_dim) + kTileTokens +
         tile_words(head_dim);
}

CodecKernels codec_kernels(SimdTarget target) {
#if HWY_TARGETS & HWY_AVX3
  if (target == SimdTarget::kAvx3) return N_AVX3::make_codec_kernels();
#endif
#if HWY_TARGETS & HWY_AVX2
  if (target == SimdTarget::kAvx2) return N_AVX2::make_codec_kernels();
#endif
  (void)target;
  return HWY_STATIC_DISPATCH(make_codec_kernels)();
}

}  // namespace kvtile
#endif  // HWY_ONCE
