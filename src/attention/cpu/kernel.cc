// The CPU attention kernel, one body for every SIMD target. fp32 arithmetic on the exact codebook:
// scores with lanes over keys, outputs with lanes over coordinates, softmax between them while the
// scores of a row tile are in the first-level cache. The order of additions for a row is fixed by
// key positions (kernel.h), never by which rows share a tile.
#include "src/core/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/attention/cpu/kernel.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target: per-target headers.
#include "src/attention/cpu/direct-inl.h"
#include "src/codec/unpack-inl.h"

#ifndef KVTILE_ATTENTION_CPU_KERNEL_ONCE
#define KVTILE_ATTENTION_CPU_KERNEL_ONCE
#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "src/attention/cpu/kernel.h"
#include "src/attention/mask.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtile {
namespace HWY_NAMESPACE {

// Accumulators of a row tile: two vectors a row, plus two operands and a broadcast, must fit the
// register file (32 vectors, 16 on AVX2).
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR
constexpr int kRegisterRows = 6;
#else
constexpr int kRegisterRows = 12;
#endif
static_assert(kRowTile % kRegisterRows == 0);

// Per-row numbers of a tile as whole vectors.
constexpr int kPaddedRows = round_up(kRowTile, kMaxLanes);

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// 2^(difference * factor) for difference <= 0, never below 2^-125: a visible key keeps a positive
// weight, so that an infinite value it carries still reaches the row. NaN stays NaN. The product is
// not rounded before its fraction is taken. Relative error below 2e-8 besides the result's
// rounding.
class Exp2Weight {
 public:
  // `least` as least_difference() gives it: a division that loops over rows make once for all.
  Exp2Weight(VF factor, VF least) : factor_(factor), least_(least) {}
  explicit Exp2Weight(VF factor) : Exp2Weight(factor, least_difference(factor)) {}

  static HWY_INLINE VF least_difference(VF factor) {
    return hn::Div(hn::Set(F32(), -125.0f), factor);
  }

  HWY_INLINE VF operator()(VF difference) const {
    const F32 df;
    const hn::RebindToSigned<F32> di;
#if HWY_TARGET == HWY_SCALAR
    difference = hn::IfThenElse(hn::Lt(difference, least_), least_, difference);  // Max drops a NaN
#else
    difference = hn::Max(least_, difference);  // x86 returns the second operand if either is NaN
#endif
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const VF shifter = hn::Set(df, 0x1.8p23f);
    const VF shifted = hn::MulAdd(difference, factor_, shifter);
    const VF f = hn::MulSub(difference, factor_, hn::Sub(shifted, shifter));
    VF p = hn::Set(df, 0x1.444004p-13f);
    p = hn::MulAdd(p, f, hn::Set(df, 0x1.5f0896p-10f));
    p = hn::MulAdd(p, f, hn::Set(df, 0x1.3b2a1cp-7f));
    p = hn::MulAdd(p, f, hn::Set(df, 0x1.c6af6cp-5f));
    p = hn::MulAdd(p, f, hn::Set(df, 0x1.ebfbe0p-3f));
    p = hn::MulAdd(p, f, hn::Set(df, 0x1.62e430p-1f));
    p = hn::MulAdd(p, f, hn::Set(df, 1.0f));
    const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
    return hn::BitCast(df, hn::Add(hn::BitCast(di, p), exponent));
  }

 private:
  VF factor_, least_;
};

inline float exp2_weight(float difference, float factor) {
  return hn::GetLane(Exp2Weight(hn::Set(F32(), factor))(hn::Set(F32(), difference)));
}

// tanh, odd, to a few ulp: (1 - e) / (1 + e) with e = exp(-2|x|), and the cubic near zero, where
// the quotient would cancel.
HWY_INLINE VF tanh_score(VF x) {
  const F32 df;
  const VF magnitude = hn::Abs(x);
  const VF one = hn::Set(df, 1.0f);
  const VF e = Exp2Weight(hn::Set(df, 2.88539008f))(hn::Neg(magnitude));
  const VF large = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const VF square = hn::Mul(magnitude, magnitude);
  VF series = hn::Set(df, 62.0f / 2835.0f);
  series = hn::MulAdd(series, square, hn::Set(df, -17.0f / 315.0f));
  series = hn::MulAdd(series, square, hn::Set(df, 2.0f / 15.0f));
  series = hn::MulAdd(series, square, hn::Set(df, -1.0f / 3.0f));
  const VF small = hn::MulAdd(hn::Mul(series, square), magnitude, magnitude);
  const VF result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(df, 0.25f)), small, large);
  return hn::CopySignToAbs(result, x);
}

// scores[r][t] = key_scale[t] * (query row r . key t) for kRows rows and one panel of keys.
template <int kRows>
void score_panel(const float* HWY_RESTRICT query, const float* HWY_RESTRICT panel, int head_dim,
                 const float* HWY_RESTRICT key_scale, float* HWY_RESTRICT scores) {
  const F32 df;
  const size_t lanes = lane_count();
  for (int begin = 0; begin < head_dim; begin += kScoreChain) {
    VF acc0[kRows], acc1[kRows];
    KVTILE_UNROLL for (int r = 0; r < kRows; ++r) acc0[r] = acc1[r] = hn::Zero(df);
    const int end = std::min(head_dim, begin + kScoreChain);
    for (int d = begin; d < end; ++d, query += kRowTile, panel += 2 * lanes) {
      const VF key0 = hn::LoadU(df, panel);
      const VF key1 = hn::LoadU(df, panel + lanes);
      KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
        const VF q = hn::Set(df, query[r]);
        acc0[r] = hn::MulAdd(q, key0, acc0[r]);
        acc1[r] = hn::MulAdd(q, key1, acc1[r]);
      }
    }
    const bool last = end == head_dim;
    const VF scale0 = last ? hn::LoadU(df, key_scale) : hn::Set(df, 1.0f);
    const VF scale1 = last ? hn::LoadU(df, key_scale + lanes) : hn::Set(df, 1.0f);
    KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
      float* s = scores + r * kTileTokens;
      if (begin > 0) {
        acc0[r] = hn::Add(hn::LoadU(df, s), acc0[r]);
        acc1[r] = hn::Add(hn::LoadU(df, s + lanes), acc1[r]);
      }
      acc0[r] = hn::Mul(acc0[r], scale0);
      acc1[r] = hn::Mul(acc1[r], scale1);
      hn::StoreU(acc0[r], df, s);
      hn::StoreU(acc1[r], df, s + lanes);
    }
  }
}

// out[r] = out[r] * decay[r] + sum of weights[r][t] * values[t] over the span, from fresh
// accumulators. Where decay is 0 nothing came before, and out is not read.
template <int kRows>
void add_values(const float* HWY_RESTRICT weights, const float* HWY_RESTRICT values, size_t pitch,
                TokenSpan span, int head_dim, const float* HWY_RESTRICT decay,
                float* HWY_RESTRICT out) {
  const F32 df;
  const size_t lanes = lane_count();
  for (size_t c = 0; c < static_cast<size_t>(head_dim); c += 2 * lanes) {
    VF acc0[kRows], acc1[kRows];
    KVTILE_UNROLL for (int r = 0; r < kRows; ++r) acc0[r] = acc1[r] = hn::Zero(df);
    const float* row = values + static_cast<size_t>(span.begin) * pitch + c;
    for (int t = span.begin; t < span.end; ++t, row += pitch) {
      const VF value0 = hn::LoadU(df, row);
      const VF value1 = hn::LoadU(df, row + lanes);
      KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
        const VF weight = hn::Set(df, weights[r * kTileTokens + t]);
        acc0[r] = hn::MulAdd(weight, value0, acc0[r]);
        acc1[r] = hn::MulAdd(weight, value1, acc1[r]);
      }
    }
    KVTILE_UNROLL for (int r = 0; r < kRows; ++r) {
      float* o = out + static_cast<size_t>(r) * pitch + c;
      if (decay[r] != 0.0f) {
        const VF factor = hn::Set(df, decay[r]);
        acc0[r] = hn::MulAdd(hn::LoadU(df, o), factor, acc0[r]);
        acc1[r] = hn::MulAdd(hn::LoadU(df, o + lanes), factor, acc1[r]);
      }
      hn::StoreU(acc0[r], df, o);
      hn::StoreU(acc1[r], df, o + lanes);
    }
  }
}

using ScoreFn = void (*)(const float*, const float*, int, const float*, float*);
using ValueFn = void (*)(const float*, const float*, size_t, TokenSpan, int, const float*, float*);

template <int... kRows>
constexpr auto score_table(std::integer_sequence<int, kRows...>) {
  return std::array<ScoreFn, sizeof...(kRows)>{score_panel<kRows + 1>...};
}
template <int... kRows>
constexpr auto value_table(std::integer_sequence<int, kRows...>) {
  return std::array<ValueFn, sizeof...(kRows)>{add_values<kRows + 1>...};
}
constexpr auto kScoreFns = score_table(std::make_integer_sequence<int, kRegisterRows>());
constexpr auto kValueFns = value_table(std::make_integer_sequence<int, kRegisterRows>());

// One vector of each row of a tile, and what becomes of it by reduce_rows.
struct RowVectors {
  alignas(64) float lanes[kRowTile][kMaxLanes];
};

// out[r] = op over the lanes of row r, four rows at a time: one by one, each row would wait for its
// own chain of shuffles. Writes up to the next multiple of four.
template <class Op>
HWY_INLINE void reduce_rows(const RowVectors& vectors, int count, Op op, float* HWY_RESTRICT out) {
  const F32 df;
  for (int first = 0; first < count; first += 4) {
    const auto row = [&](int i) {
      return hn::Load(df, vectors.lanes[std::min(first + i, count - 1)]);
    };
#if HWY_TARGET == HWY_SCALAR
    (void)op;
    for (int i = 0; i < 4; ++i) out[first + i] = hn::GetLane(row(i));
#else
    const hn::Repartition<uint64_t, F32> du64;
    const hn::Full128<float> block;
    const auto pair = [&](VF a, VF b) {
      return hn::BitCast(du64, op(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b)));
    };
    const auto rows01 = pair(row(0), row(1));
    const auto rows23 = pair(row(2), row(3));
    const VF four = op(hn::BitCast(df, hn::InterleaveLower(du64, rows01, rows23)),
                       hn::BitCast(df, hn::InterleaveUpper(du64, rows01, rows23)));
    alignas(64) float blocks[kMaxLanes];
    hn::Store(four, df, blocks);
    auto total = hn::Load(block, blocks);
    for (size_t i = 4; i < lane_count(); i += 4) total = op(total, hn::Load(block, blocks + i));
    hn::Store(total, block, out + first);
#endif
  }
}

// The rows of one tile in one block of keys, and their running state.
struct SoftmaxRows {
  int count;
  const TokenSpan* visible;  // columns each row sees
  const float* factor;       // log2 units of one score unit
  const float* cap;
  float* max;
  float* sum;
};

// Turns raw scores into weights 2^((score - max) * factor) on each row's visible columns and 0
// elsewhere in `columns` (a whole number of vectors), against the running maximum, and updates max
// and sum. decay[r] is what earlier weights of the row must be multiplied by, 0 if there are none.
// All rows go through each step together, so that one row's reductions hide behind another's work.
void softmax_rows(const AttentionCall& call, TokenSpan columns, const SoftmaxRows& rows,
                  float* HWY_RESTRICT scores, float* HWY_RESTRICT decay) {
  const F32 df;
  const hn::RebindToSigned<F32> di;
  const size_t lanes = lane_count();
  const auto begin = static_cast<size_t>(columns.begin);
  const auto end = static_cast<size_t>(columns.end);
  const auto visible_mask = [&](TokenSpan visible, size_t t) {
    const auto position = hn::Iota(di, static_cast<int>(t));
    return hn::RebindMask(df, hn::And(hn::Gt(position, hn::Set(di, visible.begin - 1)),
                                      hn::Lt(position, hn::Set(di, visible.end))));
  };
  const auto is_whole = [&](TokenSpan visible, size_t t) {
    return static_cast<int>(t) >= visible.begin && static_cast<int>(t + lanes) <= visible.end;
  };
  // Most rows see every column; their loops have no test.
  const auto sees_all = [&](TokenSpan visible) {
    return columns.begin >= visible.begin && columns.end <= visible.end;
  };
  const VF infinity = hn::Set(df, kInfinity);
  const VF hidden = hn::Neg(infinity);
  alignas(64) float old_max[kPaddedRows] = {}, new_max[kPaddedRows];
  alignas(64) float factor[kPaddedRows] = {}, least[kPaddedRows];
  RowVectors vectors;
  for (int r = 0; r < rows.count; ++r) {
    const TokenSpan visible = rows.visible[r];
    float* row = scores + r * kTileTokens;
    VF max = hidden;
    if (call.softcap == 0.0f && sees_all(visible)) {
      for (size_t t = begin; t < end; t += lanes) max = hn::Max(max, hn::LoadU(df, row + t));
    } else {
      for (size_t t = begin; t < end; t += lanes) {
        VF s = hn::LoadU(df, row + t);
        if (call.softcap > 0.0f) {
          const VF capped = hn::Mul(tanh_score(hn::Mul(s, hn::Set(df, rows.cap[r]))),
                                    hn::Set(df, call.softcap * 1.44269504f));
          // NaN and infinity are not capped: they poison the row below.
          s = hn::IfThenElse(hn::Lt(hn::Abs(s), infinity), capped, s);
          hn::StoreU(s, df, row + t);
        }
        // Selection, not arithmetic: a hidden column may hold anything.
        if (!is_whole(visible, t)) s = hn::IfThenElse(visible_mask(visible, t), s, hidden);
        max = hn::Max(max, s);
      }
    }
    hn::Store(max, df, vectors.lanes[r]);
    old_max[r] = rows.max[r];
    factor[r] = rows.factor[r];
  }
  reduce_rows(
      vectors, rows.count, [](auto a, auto b) { return hn::Max(a, b); }, new_max);
  for (int r = 0; r < rows.count; r += static_cast<int>(lanes)) {
    const VF before = hn::Load(df, old_max + r);
    VF after = hn::Load(df, new_max + r);
    after = hn::IfThenElse(hn::Lt(before, after), after, before);  // a NaN from before stays
    hn::Store(after, df, new_max + r);
    const VF factors = hn::Load(df, factor + r);
    const VF leasts = Exp2Weight::least_difference(factors);
    hn::Store(leasts, df, least + r);
    const VF kept = Exp2Weight(factors, leasts)(hn::Sub(before, after));
    hn::Store(hn::IfThenZeroElse(hn::Eq(before, hidden), kept), df, decay + r);
  }
  for (int r = 0; r < rows.count; ++r) {
    const TokenSpan visible = rows.visible[r];
    float* row = scores + r * kTileTokens;
    VF sum = hn::Zero(df);
    if (new_max[r] == -kInfinity) {
      // No score, or only ones of -inf; a NaN among those may have escaped the maximum.
      for (size_t t = begin; t < end; t += lanes) {
        const VF s = hn::IfThenElseZero(visible_mask(visible, t), hn::LoadU(df, row + t));
        sum = hn::Add(sum, hn::IfThenElseZero(hn::IsNaN(s), s));
        hn::StoreU(hn::Zero(df), df, row + t);
      }
    } else {
      const VF maxes = hn::Set(df, new_max[r]);
      const Exp2Weight weight(hn::Set(df, factor[r]), hn::Set(df, least[r]));
      // Subtracting before scaling keeps huge scores from overflowing and is exact near the
      // maximum.
      if (sees_all(visible)) {
        for (size_t t = begin; t < end; t += lanes) {
          const VF p = weight(hn::Sub(hn::LoadU(df, row + t), maxes));
          sum = hn::Add(sum, p);
          hn::StoreU(p, df, row + t);
        }
      } else {
        for (size_t t = begin; t < end; t += lanes) {
          VF p = weight(hn::Sub(hn::LoadU(df, row + t), maxes));
          if (!is_whole(visible, t)) p = hn::IfThenElseZero(visible_mask(visible, t), p);
          sum = hn::Add(sum, p);
          hn::StoreU(p, df, row + t);
        }
      }
    }
    hn::Store(sum, df, vectors.lanes[r]);
  }
  alignas(64) float block_sum[kPaddedRows];
  reduce_rows(
      vectors, rows.count, [](auto a, auto b) { return hn::Add(a, b); }, block_sum);
  for (int r = 0; r < rows.count; ++r) {
    rows.sum[r] = rows.sum[r] * decay[r] + block_sum[r];
    // A score of NaN or +inf makes a weight NaN. Such a row is lost, and stays so: its maximum is
    // NaN from then on.
    rows.max[r] = block_sum[r] == block_sum[r] ? new_max[r] : kNaN;
  }
}

// One block of keys: positions [start, start + span.end), of which span is loaded.
struct Block {
  int64_t start;
  TokenSpan span;
  int kv_head;
  bool raw;                             // from chunk_key / chunk_value
  bool direct;                          // not unpacked: rows read the slots
  bool seen_by_all;                     // every row of the task sees every key of the span
  bool finite_values;                   // no NaN or infinity among the loaded values
  const std::byte* slots[kTileTokens];  // of a packed block, for tokens in the span
};

void find_slots(const AttentionCall& call, const RowTask& task, Block& block) {
  const PagedCache& cache = call.cache;
  const int64_t first = call.first_positions == nullptr ? 0 : call.first_positions[task.seq];
  const int32_t* table = call.block_table + task.seq * call.block_table_stride;
  int64_t position = block.start + block.span.begin - first;
  for (int t = block.span.begin; t < block.span.end;) {
    const int64_t page = position / cache.block_size;
    const int64_t offset = position % cache.block_size;
    const std::byte* slot = cache.pages + cache.slot_offset(table[page], offset, block.kv_head);
    const int run =
        static_cast<int>(std::min<int64_t>(block.span.end - t, cache.block_size - offset));
    for (int i = 0; i < run; ++i) block.slots[t + i] = slot + i * cache.stride_token;
    t += run;
    position += run;
  }
}

// A key with a non-finite norm has no score: inf * (q . levels) may be -inf, which would hide the
// key where float64 over the decoded elements finds NaN.
void poison_scales(TokenSpan span, float* key_scale) {
  for (int t = span.begin; t < span.end; ++t) key_scale[t] += key_scale[t] - key_scale[t];
}

void load_packed(const AttentionCall& call, Block& block, ThreadScratch& scratch) {
  const SlotFormat& format = call.cache.format;
  if (block.direct) {
    block.finite_values = load_value_factors(format, block.slots, block.span, scratch.value_scale,
                                             scratch.value_zero);
    return;
  }
  unpack_keys(format, block.slots, block.span, scratch.key_tile, scratch.key_scale);
  poison_scales(block.span, scratch.key_scale);
  block.finite_values =
      unpack_values(format, block.slots, block.span, scratch.words, scratch.value_tile);
}

void load_raw(const AttentionCall& call, const RowTask& task, int64_t cached_len, Block& block,
              ThreadScratch& scratch) {
  const int head_dim = call.cache.format.head_dim;
  const size_t panel = panel_tokens();
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim, static_cast<int>(lane_count())));
  const int num_words = head_dim / 8;
  float row[kMaxHeadDim];
  float excess = 0.0f;  // becomes NaN with the first non-finite value
  for (int i = block.span.begin; i < block.span.end; ++i) {
    const int64_t token = call.cu_seqlens_q[task.seq] + block.start + i - cached_len;
    const auto t = static_cast<size_t>(i);
    load_row(element_ptr(
                 call.chunk_key,
                 token * call.chunk_key_stride_token + block.kv_head * call.chunk_key_stride_head,
                 call.dtype),
             call.dtype, head_dim, row);
    float* column =
        scratch.key_tile + (t / panel) * panel * static_cast<size_t>(head_dim) + t % panel;
    for (int d = 0; d < head_dim; ++d) column[static_cast<size_t>(d) * panel] = row[d];
    scratch.key_scale[t] = 1.0f;
    load_row(element_ptr(call.chunk_value,
                         token * call.chunk_value_stride_token +
                             block.kv_head * call.chunk_value_stride_head,
                         call.dtype),
             call.dtype, head_dim, row);
    float* planar = scratch.value_tile + t * pitch;
    for (int w = 0; w < num_words; ++w) {
      for (int j = 0; j < 8; ++j) planar[j * num_words + w] = row[8 * w + j];
    }
    for (int d = 0; d < head_dim; ++d) excess += row[d] - row[d];
  }
  block.finite_values = excess == 0.0f;
}

// Scores of one row tile against the block's keys in `span`.
void score_rows(const AttentionCall& call, const Block& block, TokenSpan span, int rows,
                const float* query, ThreadScratch& scratch) {
  const SlotFormat& format = call.cache.format;
  if (block.direct) {
    score_slots_fn(format, rows)(format, block.slots, span, query, scratch.key_scale,
                                 scratch.scores);
    poison_scales(span, scratch.key_scale);
    for (int r = 0; r < rows; ++r) {
      float* row = scratch.scores + r * kTileTokens;
      for (int t = span.begin; t < span.end; ++t) row[t] *= scratch.key_scale[t];
    }
    return;
  }
  const auto panel = static_cast<int>(panel_tokens());
  for (int p = span.begin / panel; p * panel < span.end; ++p) {
    const float* keys =
        scratch.key_tile + static_cast<size_t>(p * panel) * static_cast<size_t>(format.head_dim);
    for (int r = 0; r < rows; r += kRegisterRows) {
      kScoreFns[std::min(kRegisterRows, rows - r) - 1](
          query + r, keys, format.head_dim, scratch.key_scale + p * panel,
          scratch.scores + r * kTileTokens + p * panel);
    }
  }
}

// out[r] = out[r] * decay[r] + weighted values of the block's keys in `span`.
void add_rows(const AttentionCall& call, const Block& block, const SlotsAhead& ahead,
              TokenSpan span, int rows, const float* weights, const float* decay, float* out,
              ThreadScratch& scratch) {
  const SlotFormat& format = call.cache.format;
  const size_t pitch =
      static_cast<size_t>(value_pitch(format.head_dim, static_cast<int>(lane_count())));
  if (block.direct) {
    add_slots_fn(format, rows)(format, block.slots, span, ahead, scratch.value_scale,
                               scratch.value_zero, weights, decay, pitch, out);
    return;
  }
  for (int r = 0; r < rows; r += kRegisterRows) {
    kValueFns[std::min(kRegisterRows, rows - r) - 1](weights + r * kTileTokens, scratch.value_tile,
                                                     pitch, span, format.head_dim, decay + r,
                                                     out + static_cast<size_t>(r) * pitch);
  }
}

// Rows [row_begin, row_end) of scratch, all of the block's head.
void attend_block(const AttentionCall& call, const Block& block, const SlotsAhead& ahead,
                  int row_begin, int row_end, ThreadScratch& scratch) {
  const int head_dim = call.cache.format.head_dim;
  const auto lanes = static_cast<int>(lane_count());
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim, lanes));
  const float* queries = block.raw ? scratch.query_raw : scratch.query_rot;
  const int num_tiles = (row_end - row_begin + kRowTile - 1) / kRowTile;
  for (int first = row_begin; first < row_end; first += kRowTile) {
    const int rows = std::min(kRowTile, row_end - first);
    if (!block.direct) {
      // A few slots with each row tile; reading slots directly fetches on its own.
      const int tile = (first - row_begin) / kRowTile;
      const int fetch_end = (tile + 1) * kTileTokens / num_tiles;
      for (int t = tile * kTileTokens / num_tiles; t < fetch_end; ++t) {
        ahead.fetch(call.cache.format, t, 0, 1);
      }
    }
    TokenSpan visible[kRowTile];
    TokenSpan all{kTileTokens, 0};
    bool uniform = true;
    for (int r = 0; r < rows; ++r) {
      visible[r] = block.span;
      if (!block.seen_by_all) {
        visible[r].begin = static_cast<int>(std::clamp<int64_t>(
            scratch.row_begin[first + r] - block.start, block.span.begin, block.span.end));
        visible[r].end = static_cast<int>(std::clamp<int64_t>(
            scratch.row_end[first + r] - block.start, block.span.begin, block.span.end));
      }
      if (visible[r].begin < visible[r].end) {
        all.begin = std::min(all.begin, visible[r].begin);
        all.end = std::max(all.end, visible[r].end);
      }
      uniform &= visible[r].begin == visible[0].begin && visible[r].end == visible[0].end;
    }
    if (all.begin >= all.end) continue;

    score_rows(call, block, all, rows,
               queries + static_cast<size_t>(first) * static_cast<size_t>(head_dim), scratch);

    const TokenSpan columns{all.begin / lanes * lanes, round_up(all.end, lanes)};
    alignas(64) float decay[kPaddedRows];
    softmax_rows(call, columns,
                 {rows, visible, scratch.row_factor + first, scratch.row_cap + first,
                  scratch.segment.max + first, scratch.segment.sum + first},
                 scratch.scores, decay);

    float* out = scratch.segment.out + static_cast<size_t>(first) * pitch;
    if (block.finite_values || uniform) {
      add_rows(call, block, ahead, all, rows, scratch.scores, decay, out, scratch);
      continue;
    }
    // Weight 0 times an infinite value would reach rows that do not see it.
    for (int r = 0; r < rows; ++r) {
      if (visible[r].begin >= visible[r].end) continue;
      add_rows(call, block, ahead, visible[r], 1, scratch.scores + r * kTileTokens, decay + r,
               out + static_cast<size_t>(r) * pitch, scratch);
    }
  }
}

inline void clear_states(const RowStates& states, int rows) {
  std::fill_n(states.max, rows, -kInfinity);
  std::fill_n(states.sum, rows, 0.0f);
}

void merge_rows(const RowStates& from, const RowStates& into, int rows, int head_dim,
                const float* row_factor) {
  const F32 df;
  const size_t lanes = lane_count();
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim, static_cast<int>(lanes)));
  for (int r = 0; r < rows; ++r) {
    if (from.max[r] == -kInfinity) continue;
    const float* src = from.out + static_cast<size_t>(r) * pitch;
    float* dst = into.out + static_cast<size_t>(r) * pitch;
    if (into.max[r] == -kInfinity) {
      std::memcpy(dst, src, pitch * sizeof(float));
      into.max[r] = from.max[r];
      into.sum[r] = from.sum[r];
      continue;
    }
    // std::max would drop a NaN on one side only; poisoned rows keep theirs.
    const float max = from.max[r] != from.max[r] ? from.max[r] : std::max(into.max[r], from.max[r]);
    const float keep = exp2_weight(into.max[r] - max, row_factor[r]);
    const float add = exp2_weight(from.max[r] - max, row_factor[r]);
    into.max[r] = max;
    into.sum[r] = std::fma(from.sum[r], add, into.sum[r] * keep);
    const VF keeps = hn::Set(df, keep);
    const VF adds = hn::Set(df, add);
    for (size_t c = 0; c < pitch; c += lanes) {
      const VF kept = hn::Mul(hn::LoadU(df, dst + c), keeps);
      hn::StoreU(hn::MulAdd(hn::LoadU(df, src + c), adds, kept), df, dst + c);
    }
  }
}

void load_queries(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch) {
  const hn::CappedTag<float, 4> narrow;
  const SlotFormat& format = call.cache.format;
  const int head_dim = format.head_dim;
  const int64_t seq_len = call.seq_lens[task.seq];
  const size_t group_floats = static_cast<size_t>(head_dim) * kRowTile;
  float row[kMaxHeadDim];
  for_each_row(call, task, [&](const TaskRow& at) {
    const int r = at.index;
    load_row(element_ptr(call.query,
                         at.token * call.query_stride_token + at.head * call.query_stride_head,
                         call.dtype),
             call.dtype, head_dim, row);
    float largest = 0.0f;
    for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::abs(row[d]));
    // An exact power of two brings the row to [1, 2), so that no product or sum can overflow; the
    // factor applied to score differences takes it back.
    int exponent = 0;
    if (largest > 0.0f && largest <= FLT_MAX) exponent = std::clamp(std::ilogb(largest), -120, 127);
    const double shrink = std::ldexp(call.softmax_scale < 0.0f ? -1.0 : 1.0, -exponent);
    const double unit = std::ldexp(std::abs(static_cast<double>(call.softmax_scale)), exponent);
    if (call.softcap > 0.0f) {
      scratch.row_factor[r] = 1.0f;
      scratch.row_cap[r] =
          static_cast<float>(std::min(unit / call.softcap, static_cast<double>(FLT_MAX)));
    } else {
      scratch.row_factor[r] =
          static_cast<float>(std::min(unit * 1.4426950408889634, static_cast<double>(FLT_MAX)));
      scratch.row_cap[r] = 0.0f;
    }
    float* column = scratch.query_raw + static_cast<size_t>(r / kRowTile) * group_floats +
                    static_cast<size_t>(r % kRowTile);
    for (int d = 0; d < head_dim; ++d) {
      column[static_cast<size_t>(d) * kRowTile] = static_cast<float>(row[d] * shrink);
    }
    const KeyRange visible = key_range(call.mask, at.position, seq_len);
    scratch.row_begin[r] = visible.begin;
    scratch.row_end[r] = visible.end;
  });
  if (!format.rotated()) return;
  // The orthonormal factor is left to one multiplication after the butterflies.
  const float orthonormal = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int first = 0; first < task.num_rows(); first += kRowTile) {
    const float* raw = scratch.query_raw + static_cast<size_t>(first / kRowTile) * group_floats;
    float* rotated = scratch.query_rot + static_cast<size_t>(first / kRowTile) * group_floats;
    std::memcpy(rotated, raw, group_floats * sizeof(float));
    hadamard_columns(narrow, rotated, head_dim, kRowTile);
    for (size_t i = 0; i < group_floats; i += hn::Lanes(narrow)) {
      hn::StoreU(hn::Mul(hn::LoadU(narrow, rotated + i), hn::Set(narrow, orthonormal)), narrow,
                 rotated + i);
    }
  }
}

void attend_rows(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch) {
  const int head_dim = call.cache.format.head_dim;
  const int num_rows = task.num_rows();
  const int64_t cached_len =
      call.seq_lens[task.seq] - (call.cu_seqlens_q[task.seq + 1] - call.cu_seqlens_q[task.seq]);
  const bool raw_chunk = call.chunk_key != nullptr;
  load_queries(call, task, scratch);
  clear_states(scratch.total, num_rows);
  int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
  int64_t seen_from = 0, seen_to = std::numeric_limits<int64_t>::max();  // by every row
  for (int r = 0; r < task.rows_per_head(); ++r) {                       // the same for every head
    seen_from = std::max(seen_from, scratch.row_begin[r]);
    seen_to = std::min(seen_to, scratch.row_end[r]);
    if (scratch.row_begin[r] >= scratch.row_end[r]) continue;
    low = std::min(low, scratch.row_begin[r]);
    high = std::max(high, scratch.row_end[r]);
  }
  if (low >= high) return;

  const bool direct = task.rows_per_head() <= kDirectRows && whole_value_vectors(call.cache.format);
  // The block that holds position `begin`: it ends with its kTileTokens, its segment or the rows'
  // last key, and never mixes packed and raw keys.
  const auto block_at = [&](int64_t begin, int kv_head) {
    Block block;
    block.kv_head = kv_head;
    block.raw = raw_chunk && begin >= cached_len;
    block.direct = direct && !block.raw;
    block.start = begin / kTileTokens * kTileTokens;
    int64_t end = std::min(high, block.start + kTileTokens);
    if (block.raw) block.start = std::max(block.start, std::max<int64_t>(cached_len, 0));
    if (raw_chunk && !block.raw) end = std::min(end, cached_len);
    block.span = {static_cast<int>(begin - block.start), static_cast<int>(end - block.start)};
    block.seen_by_all = seen_from <= begin && end <= seen_to;
    if (!block.raw) find_slots(call, task, block);
    return block;
  };

  for (int lane = task.lane_begin; lane < task.lane_end; ++lane) {
    clear_states(scratch.lane, num_rows);
    const int64_t low_segment = low / kSegmentTokens;
    const int64_t first_segment =
        low_segment + (lane - low_segment % kNumLanes + kNumLanes) % kNumLanes;
    for (int64_t segment = first_segment; segment * kSegmentTokens < high; segment += kNumLanes) {
      clear_states(scratch.segment, num_rows);
      const int64_t segment_end = std::min(high, (segment + 1) * kSegmentTokens);
      int64_t begin = std::max(low, segment * kSegmentTokens);
      Block block = block_at(begin, task.kv_head_begin);
      while (begin < segment_end) {
        const int64_t end = block.start + block.span.end;
        for (int head = task.kv_head_begin; head < task.kv_head_end; ++head) {
          // What comes next: this block's next head, or the next block.
          const bool last_head = head + 1 == task.kv_head_end;
          const int64_t next = !last_head          ? begin
                               : end < segment_end ? end
                                                   : (segment + kNumLanes) * kSegmentTokens;
          Block following{};
          SlotsAhead ahead;
          if (next < high) {
            following = block_at(next, last_head ? task.kv_head_begin : head + 1);
            if (!following.raw) ahead = {following.slots, following.span};
          }
          if (block.raw) {
            load_raw(call, task, cached_len, block, scratch);
          } else {
            load_packed(call, block, scratch);
          }
          const int first_row = (head - task.kv_head_begin) * task.head_stride();
          attend_block(call, block, ahead, first_row, first_row + task.rows_per_head(), scratch);
          block = following;
        }
        begin = end;
      }
      if (segment == first_segment) {
        std::swap(scratch.segment, scratch.lane);
      } else {
        merge_rows(scratch.segment, scratch.lane, num_rows, head_dim, scratch.row_factor);
      }
    }
    merge_rows(scratch.lane, scratch.total, num_rows, head_dim, scratch.row_factor);
  }
}

void write_rows(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch) {
  constexpr double kLn2 = 0.6931471805599453;
  const int head_dim = call.cache.format.head_dim;
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim, static_cast<int>(lane_count())));
  for_each_row(call, task, [&](const TaskRow& at) {
    const int r = at.index;
    const float* row = scratch.total.out + static_cast<size_t>(r) * pitch;
    const bool empty = scratch.total.max[r] == -kInfinity;
    double lse = -std::numeric_limits<double>::infinity();
    float sum = scratch.total.sum[r];
    float weight = 1.0f;  // of the keys, once a sink outweighs them
    if (!empty) {
      const double max = static_cast<double>(scratch.total.max[r]) * scratch.row_factor[r] * kLn2;
      lse = max + std::log(static_cast<double>(sum));
      if (call.sinks != nullptr) {
        const double sink = call.sinks[at.head];
        const double top = std::max(max, sink);
        weight = static_cast<float>(std::exp(max - top));
        const double total = sum * std::exp(max - top) + std::exp(sink - top);
        lse = top + std::log(total);
        sum = static_cast<float>(total);
      }
    }
    const int64_t out = at.token * call.out_stride_token + at.head * call.out_stride_head;
    for (int d = 0; d < head_dim; ++d) {
      // Adding +0 turns a negative zero into zero, whatever rounding led to it.
      const float value = empty ? 0.0f : row[value_column(head_dim, d)] * weight / sum + 0.0f;
      store_element(call.out, out + d, call.dtype, value);
    }
    if (call.lse != nullptr) {
      call.lse[at.head * call.lse_stride_head + at.token * call.lse_stride_token] =
          static_cast<float>(lse);
    }
  });
}

AttendKernels make_attend_kernels() { return {attend_rows, merge_rows, load_queries, write_rows}; }

}  // namespace HWY_NAMESPACE
}  // namespace kvtile
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtile {

AttendKernels attend_kernels(SimdTarget target) {
#if HWY_TARGETS & HWY_AVX3
  if (target == SimdTarget::kAvx3) return N_AVX3::make_attend_kernels();
#endif
#if HWY_TARGETS & HWY_AVX2
  if (target == SimdTarget::kAvx2) return N_AVX2::make_attend_kernels();
#endif
  (void)target;
  return HWY_STATIC_DISPATCH(make_attend_kernels)();
}

}  // namespace kvtile
#endif  // HWY_ONCE
