// The tile engines' schedule: sizes, workspace layout, and which thread block does what. Everything
// is a function of the call's shape and the device (TilePlan, made on the host) and of the lengths
// (read on the device); no function here touches anything else, so the host tests run this text.
// Vocabulary: a context is one (sequence, KV head); its packed rows (query token x head of the
// group) are cut into row blocks; keys come in blocks of the kernel's shape. A launch group is a
// few contexts and a run of their row blocks; a step is one tile of each context's tokens. Where
// launches may overlap and a kernel gains by it, a few SMs dequantise the next step's tile while
// the others attend over this one's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvtile/attention.h"
#include "src/attention/cuda/image.h"
#include "src/attention/cuda/params.h"
#include "src/attention/mask.h"
#include "src/core/cache_params.h"
#include "src/core/hd.h"

namespace kvtile::cuda {

inline constexpr int kFillTokens = 64;  // keys dequantised together
// The last tile of a context may be this much longer: a short tail is no step of its own.
inline constexpr int kTailTokens = 1024;
// Of a thread block, on the parts that have the least of it; every head_dim has kernels for these.
inline constexpr int kTileMinSharedBytes = 101376;
inline constexpr int64_t kTileScratchBytes = int64_t{64} << 20;  // of tiles up to the default
inline constexpr int64_t kTileCarriedBytes = int64_t{48} << 20;  // of it, for queries and states
inline constexpr int kProbabilityExponent = 12;  // probabilities are held times 2^12 in fp16

// What the plan needs of an attention kernel, as measured.
struct TileShape {
  int rows = 256;         // of a row block
  int block_tokens = 64;  // keys of one image sub-tile and of one softmax step, a power of two
  // Accumulators are fresh at every multiple of this position; a tile is as many of them.
  int span_tokens = 8192;
  // Up to this many rows of a context the next tile is dequantised beside the attention over this
  // one. With more, that costs less than the shorter tiles two images leave room for.
  int overlap_rows = 2048;
  int fill_rows = 160;  // attending with as many takes an SM as long as dequantising
  int piece_units = 3;  // of work that take as long as a further piece costs
};

// Which kernel attends over the image: of mma.sync (cuda/tile) or of wgmma (cuda/hopper).
enum class TileEngine { kPortable, kHopper };

// As many rows as leave the accumulators in registers.
KVTILE_HD constexpr TileShape portable_shape(int head_dim) {
  return {.rows = head_dim <= 128 ? 256 : 128};
}

KVTILE_HD constexpr TileShape hopper_shape(int head_dim) {
  return {.rows = head_dim <= 128 ? 192 : 128,
          .block_tokens = head_dim <= 128 ? 128 : 64,
          .span_tokens = 16384,
          .overlap_rows = 0,  // taking turns is faster at every size
          .piece_units = head_dim <= 128 ? 1 : 2};
}

KVTILE_HD constexpr TileShape tile_shape(TileEngine engine, int head_dim) {
  return engine == TileEngine::kHopper ? hopper_shape(head_dim) : portable_shape(head_dim);
}

// One sequence, sanitised: whatever the device arrays hold, indices built from these stay inside
// the call's tensors.
struct SequenceInfo {
  int q_begin = 0, q_len = 0;
  int seq_len = 0;
  int first_row_block = 0;  // row blocks of the sequences before this one (one KV head)
};

// The part of a context inside a launch group: its rows, the keys they see, and where its tiles
// start.
struct ContextView {
  int seq = 0, head = 0;
  int first_row = 0, end_row = 0;  // packed rows of the sequence that are in the group
  int begin = 0, end = 0;          // keys that any of them sees
  int base = 0;                    // position of step 0's first token, a multiple of the span
};

struct TilePlan {
  TileShape shape;
  int head_dim = 0, num_seqs = 0, num_kv_heads = 0, group = 1;
  int num_sms = 0;
  int num_ctas = 0;       // of the attention kernel, one an SM; the other SMs dequantise
  bool overlaps = false;  // launches may start before those ahead of them end
  int buffers = 1;        // images: two where the next step's is filled during this one
  int contexts = 1;       // of a launch group
  int row_blocks = 0;     // of a launch group, at most
  int row_chunks = 1;     // launch groups over the row blocks of the same contexts
  int num_context_groups = 0;
  int num_steps = 0;          // launch bound, from the hints; not part of the workspace
  int64_t tile_tokens = 0;    // of one context, but the last: see step_range()
  FastDivisor block_divisor;  // by fill_blocks()
  int64_t sequences_offset = 0, views_offset = 0, image_offset = 0, flags_offset = 0,
          lost_offset = 0, query_offset = 0, row_scale_offset = 0, carry_offset = 0,
          softmax_offset = 0;
  int64_t bytes = 0;

  KVTILE_HD int rows() const { return shape.rows; }
  // Key blocks over which a row block's work is cut; see lane_begin().
  KVTILE_HD int period_blocks() const { return shape.span_tokens / shape.block_tokens; }
  KVTILE_HD int slots() const { return row_blocks + num_ctas - 1; }
  KVTILE_HD int fill_blocks() const {  // of kFillTokens, that an image of one context has room for
    return static_cast<int>((tile_tokens + kTailTokens) / kFillTokens);
  }
  KVTILE_HD int64_t context_image_bytes() const {
    return fill_blocks() * subtile_bytes(kFillTokens, head_dim);
  }
};

// What the plan needs of a device.
struct TileDevice {
  int num_sms = 1;
  bool overlaps = false;  // launches may start before those ahead of them end: sm_90 and later
};

// What one launch works on. Steps of a call are numbered through; `buffer` is the step's number
// modulo the plan's buffers.
struct TileStep {
  int context_group = 0, row_chunk = 0, step = 0, buffer = 0;
};

// Steps over a span of tokens: whole tiles, the last one up to kTailTokens longer.
KVTILE_HD constexpr int num_steps_of(int64_t span, int64_t tile_tokens) {
  const int64_t whole = (span - kTailTokens + tile_tokens - 1) / tile_tokens;
  return whole < 1 ? 1 : static_cast<int>(whole);
}

// Row blocks of one KV head over the whole batch, for any split of total_q into sequences.
inline int64_t row_block_bound(int64_t total_q, int group, int num_seqs, int rows) {
  return (total_q * group + static_cast<int64_t>(num_seqs) * (rows - 1)) / rows;
}

// SMs that dequantise while the others attend: as many as keep step with them.
inline int filling_sms(int num_sms, int fill_rows, int64_t rows) {
  return static_cast<int>((int64_t{num_sms} * fill_rows + fill_rows + rows - 1) /
                          (fill_rows + rows));
}

inline TilePlan make_tile_plan(const AttentionCall& call, const TileDevice& device,
                               const TileShape& shape) {
  TilePlan plan;
  plan.shape = shape;
  const int head_dim = call.cache.format.head_dim;
  plan.head_dim = head_dim;
  plan.num_seqs = call.num_seqs;
  plan.num_kv_heads = call.cache.num_kv_heads;
  plan.group = call.num_heads / call.cache.num_kv_heads;
  plan.num_sms = device.num_sms;
  const int rows = shape.rows, span_tokens = shape.span_tokens;
  const int heads = plan.num_kv_heads;
  const int64_t num_contexts = static_cast<int64_t>(plan.num_seqs) * heads;
  const int64_t batch_blocks = row_block_bound(call.total_q, plan.group, plan.num_seqs, rows);
  const int64_t context_blocks =
      std::max<int64_t>(1, (batch_blocks + plan.num_seqs - 1) / std::max(1, plan.num_seqs));

  plan.overlaps = device.overlaps;
  plan.buffers = device.overlaps && context_blocks * rows <= shape.overlap_rows ? 2 : 1;
  int attending = device.num_sms;
  if (plan.buffers > 1) {
    attending -= filling_sms(device.num_sms, shape.fill_rows, context_blocks * rows);
  }
  plan.num_ctas = std::max(attending, 1);

  const int64_t slot_bytes = static_cast<int64_t>(rows) * (4 * head_dim + 8);
  const int64_t query_bytes = static_cast<int64_t>(rows) * (2 * head_dim + 4);
  const int64_t block_bytes = subtile_bytes(kFillTokens, head_dim) + 1 + 8 * head_dim;
  const auto images_bytes = [&plan, block_bytes](int64_t contexts, int64_t tokens) {
    return plan.buffers * contexts * ((tokens + kTailTokens) / kFillTokens) * block_bytes;
  };
  const auto group_blocks_of = [&](int64_t contexts) {
    return std::max<int64_t>(1, std::min<int64_t>(contexts, heads) * batch_blocks);
  };
  constexpr int64_t kSmallBytes = 1 << 16;  // tables and rounding
  // Beside the images, which are two where dequantisation overlaps.
  const int64_t carried_bytes =
      std::min(kTileCarriedBytes, kTileScratchBytes - kSmallBytes - images_bytes(1, span_tokens));
  const int64_t affordable =
      std::max<int64_t>(plan.num_ctas / 2, (carried_bytes - (plan.num_ctas - 1) * slot_bytes) /
                                               (slot_bytes + query_bytes));
  const auto choose_contexts = [&](int64_t contexts) {
    contexts = std::clamp<int64_t>(contexts, 1, std::max<int64_t>(1, num_contexts));
    if (contexts >= heads) contexts -= contexts % heads;
    while (contexts < heads && heads % contexts != 0) --contexts;
    plan.contexts = static_cast<int>(contexts);
    plan.num_context_groups = static_cast<int>((num_contexts + contexts - 1) / contexts);
    const int64_t blocks = group_blocks_of(contexts);
    plan.row_chunks = static_cast<int>((blocks + affordable - 1) / affordable);
    plan.row_blocks = static_cast<int>((blocks + plan.row_chunks - 1) / plan.row_chunks);
    return plan.row_blocks * query_bytes + plan.slots() * slot_bytes +
           images_bytes(contexts, span_tokens);
  };
  // Few row blocks: several contexts share a launch, so that a thread block carries the state of
  // one row block rather than of a sliver of many. Many: one context, and the longest tile.
  int64_t least_bytes = choose_contexts(device.num_sms / 2 / context_blocks);
  while (plan.contexts > 1 && least_bytes + kSmallBytes > kTileScratchBytes) {
    least_bytes = choose_contexts(plan.contexts - 1);
  }
  const int64_t contexts = plan.contexts;

  int64_t offset = 0;
  const auto take = [&offset](int64_t bytes) {
    const int64_t at = offset;
    offset += (bytes + 255) & ~int64_t{255};
    return at;
  };
  plan.sequences_offset =
      take((int64_t{plan.num_seqs} + 1) * static_cast<int64_t>(sizeof(SequenceInfo)));
  plan.views_offset = take(contexts * static_cast<int64_t>(sizeof(ContextView)));
  plan.query_offset = take(plan.row_blocks * static_cast<int64_t>(rows) * head_dim * 2);
  plan.row_scale_offset = take(plan.row_blocks * static_cast<int64_t>(rows) * 4);
  plan.carry_offset = take(plan.slots() * static_cast<int64_t>(rows) * head_dim * 4);
  plan.softmax_offset = take(plan.slots() * static_cast<int64_t>(rows) * 8);
  // The caller's tile is an upper bound. Up to the default one, all scratch together is
  // kTileScratchBytes whatever the call; beyond, the images of a launch group share it.
  const int64_t asked = call.tile_tokens > 0 ? call.tile_tokens : kDefaultTileTokens;
  const bool bounded = asked < kDefaultTileTokens + call.cache.block_size;
  const int64_t most = bounded ? asked : asked / (plan.buffers * contexts);
  int64_t tile = span_tokens;
  while (tile + span_tokens <= most &&
         (!bounded ||
          offset + images_bytes(contexts, tile + span_tokens) + 1024 <= kTileScratchBytes)) {
    tile += span_tokens;
  }
  plan.tile_tokens = tile;
  plan.block_divisor = FastDivisor(static_cast<uint32_t>(plan.fill_blocks()));
  const int64_t images = plan.buffers * contexts;
  plan.image_offset = take(images * plan.context_image_bytes());
  plan.flags_offset = take(images * plan.fill_blocks());
  plan.lost_offset = take(images * plan.fill_blocks() * 8 * head_dim);
  // The same for every total_q that fits, so that a workspace serves smaller calls.
  const int64_t least = bounded
                            ? kTileScratchBytes
                            : kTileScratchBytes + (asked + kTailTokens) / kFillTokens * block_bytes;
  plan.bytes = std::max(offset, least);

  // Launch bounds. A window bounds the span of keys the rows of a launch group can see.
  const int64_t chunk = call.chunk_key != nullptr ? call.total_q : 0;
  int64_t span = call.max_blocks * call.cache.block_size + chunk;
  if (call.max_seq_len > 0) span = std::min(span, call.max_seq_len);
  const int64_t max_q = call.max_q_len > 0 ? std::min(call.max_q_len, call.total_q) : call.total_q;
  if (call.mask.window > 0 && (call.mask.window < span || call.first_positions != nullptr)) {
    const int64_t windowed = call.mask.window + max_q + span_tokens;
    span = call.first_positions != nullptr ? windowed : std::min(span, windowed);
  }
  plan.num_steps = num_steps_of(span, tile);
  const int64_t hinted =
      std::min(group_blocks_of(contexts), contexts * ((max_q * plan.group + rows - 1) / rows));
  plan.row_chunks =
      static_cast<int>(std::max<int64_t>(1, (hinted + plan.row_blocks - 1) / plan.row_blocks));
  return plan;
}

// The row blocks before context `context` (sequence-major), over all sequences and heads.
KVTILE_HD inline int row_blocks_before(const TilePlan& plan, const SequenceInfo* sequences,
                                       int64_t context) {
  const int heads = plan.num_kv_heads;
  const int seq = static_cast<int>(context / heads), head = static_cast<int>(context % heads);
  const int first = sequences[seq].first_row_block;
  if (head == 0) return heads * first;
  return heads * first + head * (sequences[seq + 1].first_row_block - first);
}

// Row blocks [begin, end) of a launch group in the numbering of row_blocks_before().
struct GroupRows {
  int begin = 0, end = 0;
  int64_t first_context = 0, end_context = 0;
};

KVTILE_HD inline GroupRows group_rows(const TilePlan& plan, const SequenceInfo* sequences,
                                      int context_group, int row_chunk) {
  GroupRows rows;
  const int64_t num_contexts = static_cast<int64_t>(plan.num_seqs) * plan.num_kv_heads;
  rows.first_context = static_cast<int64_t>(context_group) * plan.contexts;
  rows.end_context = rows.first_context + plan.contexts;
  if (rows.end_context > num_contexts) rows.end_context = num_contexts;
  const int limit = row_blocks_before(plan, sequences, rows.end_context);
  rows.begin = row_blocks_before(plan, sequences, rows.first_context) + row_chunk * plan.row_blocks;
  if (rows.begin > limit) rows.begin = limit;
  rows.end = rows.begin + plan.row_blocks < limit ? rows.begin + plan.row_blocks : limit;
  return rows;
}

KVTILE_HD inline KeyRange row_range(const Mask& mask, const SequenceInfo& sequence, int token) {
  return key_range(mask, static_cast<int64_t>(sequence.seq_len) - sequence.q_len + token,
                   sequence.seq_len);
}

// Keys that any of the packed rows [first_row, first_row + rows) of a sequence sees. The first rows
// may lie before the sequence and see nothing: the range starts at the first that sees anything.
// Both ends grow with the row.
KVTILE_HD inline KeyRange rows_range(const Mask& mask, const SequenceInfo& sequence, int group,
                                     int first_row, int rows) {
  const int num_rows = sequence.q_len * group;
  const int end_row = first_row + rows < num_rows ? first_row + rows : num_rows;
  int first_token = first_row / group;
  if (first_token < sequence.q_len - sequence.seq_len) {
    first_token = sequence.q_len - sequence.seq_len;
  }
  const int last_token = (end_row - 1) / group;
  if (first_row >= end_row || first_token > last_token) return {};
  return {row_range(mask, sequence, first_token).begin, row_range(mask, sequence, last_token).end};
}

KVTILE_HD inline ContextView context_view(const TilePlan& plan, const SequenceInfo* sequences,
                                          const Mask& mask, const GroupRows& group,
                                          int64_t context) {
  ContextView view;
  view.seq = static_cast<int>(context / plan.num_kv_heads);
  view.head = static_cast<int>(context % plan.num_kv_heads);
  const SequenceInfo sequence = sequences[view.seq];
  const int before = row_blocks_before(plan, sequences, context);
  const int count = sequences[view.seq + 1].first_row_block - sequence.first_row_block;
  const int first = group.begin > before ? group.begin - before : 0;
  const int end = group.end - before < count ? group.end - before : count;
  if (first >= end) return view;
  view.first_row = first * plan.rows();
  view.end_row = end * plan.rows();
  const int num_rows = sequence.q_len * plan.group;
  if (view.end_row > num_rows) view.end_row = num_rows;
  const KeyRange keys =
      rows_range(mask, sequence, plan.group, view.first_row, view.end_row - view.first_row);
  view.begin = static_cast<int>(keys.begin);
  view.end = static_cast<int>(keys.end);
  view.base = view.begin / plan.shape.span_tokens * plan.shape.span_tokens;
  return view;
}

// Tokens [begin, end) of a context that step `step` holds in the image; empty past its last step.
struct StepRange {
  int begin = 0, end = 0;
};

KVTILE_HD inline StepRange step_range(const TilePlan& plan, const ContextView& view, int step) {
  const int steps = num_steps_of(view.end - view.base, plan.tile_tokens);
  StepRange range;
  if (view.begin >= view.end || step >= steps) return range;
  range.begin = view.base + step * static_cast<int>(plan.tile_tokens);
  range.end = step + 1 == steps ? view.end : range.begin + static_cast<int>(plan.tile_tokens);
  return range;
}

// The context that owns row block `flat` of a launch group.
KVTILE_HD inline int64_t context_of_row_block(const TilePlan& plan, const SequenceInfo* sequences,
                                              const GroupRows& group, int flat) {
  const int heads = plan.num_kv_heads;
  int low = static_cast<int>(group.first_context / heads);
  int high = static_cast<int>((group.end_context - 1) / heads);
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (heads * sequences[middle].first_row_block <= flat) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int first = sequences[low].first_row_block;
  const int count = sequences[low + 1].first_row_block - first;
  return static_cast<int64_t>(low) * heads + (flat - heads * first) / count;
}

// How a launch group's work is cut: (row block, key block modulo period_blocks) pairs in row-block
// order, shared out evenly, so every thread block has the same amount whatever the row blocks'
// number, and a cut does not move with the tile. A thread block's part of one row block is a piece;
// piece (thread block c, row block f) keeps its state in slot c + f. Where a share runs into the
// next row block it is shorter by what the further piece costs.
KVTILE_HD inline int64_t lane_units(const TilePlan& plan, int num_row_blocks) {
  return static_cast<int64_t>(num_row_blocks) * plan.period_blocks();
}

// Units of work and the cost of pieces together, and how much of that lies before a unit.
KVTILE_HD inline int64_t lane_cost(const TilePlan& plan, int num_row_blocks) {
  return static_cast<int64_t>(num_row_blocks) * (plan.period_blocks() + plan.shape.piece_units);
}

KVTILE_HD inline int64_t lane_cost_before(const TilePlan& plan, int64_t unit) {
  return unit + (unit / plan.period_blocks() + 1) * plan.shape.piece_units;
}

KVTILE_HD inline int lane_ctas(const TilePlan& plan, int num_row_blocks) {
  const int64_t units = lane_units(plan, num_row_blocks);
  return units < plan.num_ctas ? static_cast<int>(units) : plan.num_ctas;
}

// The first unit of a thread block; one whose share is all cost of a piece has no unit.
KVTILE_HD inline int64_t lane_begin(const TilePlan& plan, int num_row_blocks, int cta) {
  const int ctas = lane_ctas(plan, num_row_blocks);
  if (cta >= ctas) return lane_units(plan, num_row_blocks);
  const int64_t cost = lane_cost(plan, num_row_blocks) * cta / ctas;
  const int64_t row_block = cost / (plan.period_blocks() + plan.shape.piece_units);
  const int64_t unit =
      cost - row_block * (plan.period_blocks() + plan.shape.piece_units) - plan.shape.piece_units;
  return row_block * plan.period_blocks() + (unit > 0 ? unit : 0);
}

// The thread block that owns unit `unit`.
KVTILE_HD inline int lane_owner(const TilePlan& plan, int num_row_blocks, int64_t unit) {
  return static_cast<int>(
      ((lane_cost_before(plan, unit) + 1) * lane_ctas(plan, num_row_blocks) - 1) /
      lane_cost(plan, num_row_blocks));
}

// The key blocks x in [begin, end) with x mod period in [first, first + run), in order.
struct BlockWalk {
  int period = 1, first = 0, run = 1;
  int skipped = 0, count = 0;

  KVTILE_HD int below(int x) const {
    int part = x % period - first;
    part = part < 0 ? 0 : part > run ? run : part;
    return x / period * run + part;
  }
  KVTILE_HD void set(int begin, int end) {
    skipped = below(begin);
    count = end > begin ? below(end) - skipped : 0;
  }
  KVTILE_HD int block(int k) const {
    const int n = skipped + k;
    return n / run * period + first + n % run;
  }
  // The block after `x` in the walk; the period is a power of two.
  KVTILE_HD int after(int x) const {
    ++x;
    return ((x - first - run) & (period - 1)) == 0 ? x + period - run : x;
  }
};

}  // namespace kvtile::cuda
