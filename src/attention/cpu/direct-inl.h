// Attention of a few rows straight from the packed slots: each code is decoded into a register and
// used there, where a tile would be written once and read once. Per row and coordinate the
// operations and their order are those of the tile path (kernel.cc), so the bits are the same.

#include "src/attention/cpu/kernel.h"
#include "src/codec/unpack-inl.h"

#if defined(KVTILE_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTILE_DIRECT_INL_H_
#undef KVTILE_DIRECT_INL_H_
#else
#define KVTILE_DIRECT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtile {
namespace HWY_NAMESPACE {

// Beyond this many rows the decoded tile is reused often enough to pay for itself, or accumulators
// would leave the register file.
#if HWY_TARGET == HWY_AVX3
constexpr int kDirectRows = kRowTile;
#else
constexpr int kDirectRows = 4;
#endif

// scores[r][t] = query row r . levels of slot t, and key_scale[t], for t in the span.
template <KeyCode kKey, int kRows>
void score_slots(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
                 const float* query, float* key_scale, float* scores) {
  const F32 df;
  VF acc[kRows], total[kRows];
  const auto fold = [&] {
    KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
      total[r] = hn::Add(total[r], acc[r]);
      acc[r] = hn::Zero(df);
    }
  };
  visit_span<kKey>(
      format, slots, span, key_scale,
      [&](size_t) {
        KVTILE_UNROLL for (int r = 0; r < kRows; ++r) total[r] = acc[r] = hn::Zero(df);
        return [&, q = query](VF level) mutable {
          KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
            acc[r] = hn::MulAdd(hn::Set(df, q[r]), level, acc[r]);
          }
          q += kRowTile;
        };
      },
      fold,
      [&](size_t t) {
        fold();
        KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
          hn::StoreU(total[r], df, scores + r * kTileTokens + t);
        }
      });
}

// What add_values does, on values decoded here. Needs whole_value_vectors. Fetches the slots ahead.
template <int kBits, int kRows>
void add_slots(const SlotFormat& format, const std::byte* const* slots, TokenSpan span,
               const SlotsAhead& ahead, const float* scales, const float* zeros,
               const float* weights, const float* decay, size_t pitch, float* out) {
  const F32 df;
  // Runs of columns decoded together: their accumulators must fit the register file.
  constexpr int kRuns = HWY_TARGET == HWY_AVX2 ? (kRows <= 1   ? 8
                                                  : kRows <= 2 ? 4
                                                               : 2)
                                               : (kRows <= 2   ? 8
                                                  : kRows <= 4 ? 4
                                                               : 2);
  const auto num_words = static_cast<size_t>(format.head_dim / 8);
  const int num_passes = static_cast<int>(num_words / lane_count()) * (8 / kRuns);
  int pass = 0;
  for (size_t w = 0; w < num_words; w += lane_count()) {
    for (int run = 0; run < 8; run += kRuns) {
      VF acc[kRows][kRuns];
      KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
        KVTILE_UNROLL for (int j = 0; j < kRuns; ++j) acc[r][j] = hn::Zero(df);
      }
      const int first_line = pass++;
      for (int t = span.begin; t < span.end; ++t) {
        ahead.fetch(format, t, first_line, num_passes);
        VU word = hn::ShiftRightSame(load_value_words<kBits>(slots[t] + format.value_offset(), w),
                                     run * kBits);
        const ValueDecoder<kBits> values(scales[t], zeros[t]);
        KVTILE_UNROLL for (int j = 0; j < kRuns; ++j) {
          const VF value = values.decode(word);
          word = hn::ShiftRight<kBits>(word);
          KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
            acc[r][j] = hn::MulAdd(hn::Set(df, weights[r * kTileTokens + t]), value, acc[r][j]);
          }
        }
      }
      KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
        KVTILE_UNROLL for (int j = 0; j < kRuns; ++j) {
          float* o =
              out + static_cast<size_t>(r) * pitch + static_cast<size_t>(run + j) * num_words + w;
          if (decay[r] != 0.0f) {
            acc[r][j] = hn::MulAdd(hn::LoadU(df, o), hn::Set(df, decay[r]), acc[r][j]);
          }
          hn::StoreU(acc[r][j], df, o);
        }
      }
    }
  }
}

using ScoreSlotsFn = void (*)(const SlotFormat&, const std::byte* const*, TokenSpan, const float*,
                              float*, float*);
using AddSlotsFn = void (*)(const SlotFormat&, const std::byte* const*, TokenSpan,
                            const SlotsAhead&, const float*, const float*, const float*,
                            const float*, size_t, float*);

template <KeyCode kKey, int... kRows>
ScoreSlotsFn score_slots_for(int rows, std::integer_sequence<int, kRows...>) {
  constexpr ScoreSlotsFn kFns[] = {score_slots<kKey, kRows + 1>...};
  return kFns[rows - 1];
}

inline ScoreSlotsFn score_slots_fn(const SlotFormat& format, int rows) {
  constexpr std::make_integer_sequence<int, kDirectRows> counts;
  switch (format.key) {
    case KeyCode::kFp8E4M3:
      return score_slots_for<KeyCode::kFp8E4M3>(rows, counts);
    case KeyCode::kFp8E4B15:
      return score_slots_for<KeyCode::kFp8E4B15>(rows, counts);
    case KeyCode::kLloydMax4:
      return score_slots_for<KeyCode::kLloydMax4>(rows, counts);
    case KeyCode::kLloydMax3:
      break;
  }
  return score_slots_for<KeyCode::kLloydMax3>(rows, counts);
}

template <int kBits, int... kRows>
AddSlotsFn add_slots_for(int rows, std::integer_sequence<int, kRows...>) {
  constexpr AddSlotsFn kFns[] = {add_slots<kBits, kRows + 1>...};
  return kFns[rows - 1];
}

inline AddSlotsFn add_slots_fn(const SlotFormat& format, int rows) {
  constexpr std::make_integer_sequence<int, kDirectRows> counts;
  return format.value == ValueCode::kUniform4 ? add_slots_for<4>(rows, counts)
                                              : add_slots_for<3>(rows, counts);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvtile
HWY_AFTER_NAMESPACE();

#endif  // KVTILE_DIRECT_INL_H_
