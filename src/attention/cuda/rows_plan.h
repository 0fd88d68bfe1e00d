// The plan of the rows kernel: how packed rows become tiles and how keys become splits. A pure
// function of shapes, launch hints and the device's size, evaluated on the host and used by the
// launch, the workspace size and the tests; device data never enters. Host and device share the
// mapping from tiles to queries.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvtile/slot.h"
#include "src/core/hd.h"

namespace kvtile::cuda {

inline constexpr int kRowsMaxRows = 32;      // packed rows (query x head of the group) of one tile
inline constexpr int kRowsGroupTokens = 16;  // tokens a warp takes at a time
inline constexpr int kRowsCombineDims = 64;  // of a block of combine
// Accumulators are flushed to fp32 state at least this often: the tensor core truncates.
inline constexpr int kRowsEpochTokens = 8192;
// Of a batch-invariant call: the fewest groups of a split, and the states a launch may have for
// each resident block.
inline constexpr int kRowsInvariantGroups = 32, kRowsInvariantWaves = 16;

// --- shared memory of a block, and how many warps a device holds ---------------------------------

// Stages of a warp's ring: with this many warps, one group a warp in flight covers the latency.
constexpr int rows_stages(int head_dim) { return head_dim == 256 ? 2 : 3; }

// 16-byte granules a slot can touch: it starts at any even byte.
constexpr int rows_granules(int slot_bytes) { return (slot_bytes + 14 + 15) / 16; }
// An odd number of granules a row spreads the rows of a group over the banks.
constexpr int rows_pitch(int slot_bytes) { return 16 * (rows_granules(slot_bytes) | 1); }
// Rows of a group, then where each row's slot starts.
constexpr int rows_stage_bytes(int slot_bytes) {
  return kRowsGroupTokens * (rows_pitch(slot_bytes) + 4);
}
constexpr int rows_slot_alignment(KeyCode key) { return is_fp8(key) ? 4 : 2; }
// Warps that share a team's rows: above eight rows, wide accumulators are split over several.
constexpr int rows_team_warps(int head_dim, int rows) {
  if (head_dim == 64 || rows == 8) return 1;
  return head_dim == 256 && rows == 32 ? 4 : 2;
}
// Row maxima and sums of a team of several.
constexpr int rows_team_scratch_bytes(int head_dim, int rows) {
  return 8 * rows * rows_team_warps(head_dim, rows);
}
// ... and its weights, 16 tokens a warp, twice.
constexpr int rows_team_bytes(int head_dim, int rows) {
  const int warps = rows_team_warps(head_dim, rows);
  return warps == 1 ? 0 : rows_team_scratch_bytes(head_dim, rows) + 2 * warps * 32 * rows;
}
// A warp's accumulators and row sums, as added up at the end of a block.
constexpr int rows_state_bytes(int head_dim, int rows) {
  return 128 * (head_dim / rows_team_warps(head_dim, rows) * rows / 32 + rows / 2);
}

// Where shared memory is large, a table row is 256 bytes, half of it idle or a second table, and
// the table starts at a multiple of 64 KiB: a byte of codes is then one of the four bytes of an
// address.
constexpr bool rows_wide_table(int arch) { return arch >= 90 && arch < 120; }
inline constexpr uint32_t kRowsWideTable = 1u << 16;

// Sizes in bytes of the parts of a block's shared memory.
struct RowsSizes {
  int query = 0;    // fp16 fragments
  int factors = 0;  // of each row
  int ranges = 0;   // visible positions of each row; as much again for sums
  int team = 0, team_warps = 1;
  int table = 0;  // the key pair table; FP8 keys need none
  int table_alignment = 16;
  int warp = 0;  // a ring, later a state
  bool wide = false;
};

constexpr RowsSizes rows_sizes(const SlotFormat& format, int rows, bool wide_table) {
  RowsSizes sizes;
  const int ring = rows_stages(format.head_dim) * rows_stage_bytes(format.slot_bytes());
  const int state = rows_state_bytes(format.head_dim, rows);
  sizes.query = rows * format.head_dim * 2;
  sizes.factors = rows * 4;
  sizes.ranges = rows * 8;
  sizes.team = rows_team_bytes(format.head_dim, rows);
  sizes.team_warps = rows_team_warps(format.head_dim, rows);
  sizes.warp = ring > state ? ring : state;
  if (is_fp8(format.key)) return sizes;
  sizes.wide = wide_table;
  // 2^(2 bits) entries of 32 lanes, or every byte's.
  sizes.table = wide_table ? 1 << 16 : (1 << (2 * key_bits(format.key))) * 128;
  // The narrow 3-bit table is indexed by bits in place, under an address that must not have them.
  if (wide_table) {
    sizes.table_alignment = 1 << 16;
  } else if (format.key == KeyCode::kLloydMax3) {
    sizes.table_alignment = sizes.table;
  }
  return sizes;
}

// Shared addresses of a block from `base` on, a multiple of 16.
struct RowsMemory {
  uint32_t bases = 0;  // of the sequence's table row and of the head's first slot
  uint32_t factors = 0, query = 0, ranges = 0, sums = 0, teams = 0, table = 0;
  uint32_t rings = 0, high_rings = 0;  // of the first warps, and of the others
  int low_warps = 0;
  uint32_t end = 0;

  // The ring of a warp; those of its team follow the first one's.
  KVTILE_HD constexpr uint32_t ring(int warp, int bytes) const {
    return warp < low_warps ? rings + warp * bytes : high_rings + (warp - low_warps) * bytes;
  }
};

KVTILE_HD constexpr RowsMemory rows_memory(const RowsSizes& sizes, uint32_t base, int warps) {
  RowsMemory memory;
  memory.bases = base;
  memory.factors = base + 16;
  memory.query = memory.factors + sizes.factors;
  memory.ranges = memory.query + sizes.query;
  memory.sums = memory.ranges + sizes.ranges;
  memory.teams = memory.sums + sizes.ranges;
  const uint32_t after = memory.teams + warps / sizes.team_warps * sizes.team;
  memory.low_warps = warps;
  if (sizes.wide) {
    // Whole teams below the table, the others above it.
    const int most = static_cast<int>(kRowsWideTable - after) / sizes.warp;
    if (most < warps) memory.low_warps = most / sizes.team_warps * sizes.team_warps;
    memory.table = kRowsWideTable;
    memory.rings = after;
    memory.high_rings = kRowsWideTable + sizes.table;
    memory.end = memory.high_rings + (warps - memory.low_warps) * sizes.warp;
  } else {
    memory.table = (after + sizes.table_alignment - 1) & ~(sizes.table_alignment - 1u);
    memory.rings = memory.table + sizes.table;
    memory.end = memory.rings + warps * sizes.warp;
  }
  return memory;
}

// The system keeps the first KiB, and what is static follows: addresses are counted from the
// second.
inline constexpr int kRowsSharedStart = 1024, kRowsSharedBase = 2048;
inline int rows_shared_bytes(const RowsSizes& sizes, int warps) {
  return static_cast<int>(rows_memory(sizes, kRowsSharedBase, warps).end) - kRowsSharedStart;
}

// Queries are prepared by at least this many warps.
constexpr int rows_min_warps(bool wide_table) { return wide_table ? 8 : 4; }
// Register budgets: 65536 over the threads of an SM, which holds one block.
constexpr int rows_max_warps(int head_dim, int rows) {
  if (rows == 8) return 12;
  if (rows == 16) return head_dim == 256 ? 8 : 12;
  return 8;
}

struct RowsResidency {
  int warps = 0;  // 0: the device cannot hold one team
  int shared_bytes = 0;
};

// The most warps a block that a device holds.
inline RowsResidency rows_residency(const SlotFormat& format, int rows, int shared_per_block,
                                    bool wide_table) {
  constexpr int kStaticBytes = 128;  // the tile and its range
  const RowsSizes sizes = rows_sizes(format, rows, wide_table);
  for (int warps = rows_max_warps(format.head_dim, rows); warps >= rows_min_warps(wide_table);
       warps -= sizes.team_warps) {
    const int bytes = rows_shared_bytes(sizes, warps);
    if (bytes + kStaticBytes <= shared_per_block) return {warps, bytes};
  }
  return {};
}

// The largest row capacity that a device holds; 0 if none.
inline int rows_max_capacity(const SlotFormat& format, int shared_per_block, bool wide_table) {
  for (int rows = kRowsMaxRows; rows >= 8; rows /= 2) {
    if (rows_residency(format, rows, shared_per_block, wide_table).warps > 0) return rows;
  }
  return 0;
}

// --- blocks of all KV heads ----------------------------------------------------------------------

// Where the heads of 16 tokens lie together, a block takes all of them, and a group's slots arrive
// as one bulk copy (or one a head): no lane's instructions, whole lines, and none of the sector by
// sector passage through the load pipeline that bounds copies of single rows.
inline constexpr int kRowsPagesWarps = 16, kRowsPagesMaxHeads = 8, kRowsPagesRows = 8,
                     kRowsPagesMaxStages = 5;
inline constexpr int kRowsPagesRecord = 32;  // what warps know of a chunk
// Chunks start at whole lines, as the pages do: bulk copies from lines to parts of two lines take
// a quarter longer.
KVTILE_HD constexpr uint32_t rows_whole_lines(uint32_t bytes) { return (bytes + 127) & ~127u; }

struct RowsPages {
  int warps = 0;  // 0: not this way
  int lanes = 0;  // warps of one head
  int stages = 0;
  int chunk_bytes = 0;  // a group of all heads
  int shared_bytes = 0;
};

struct RowsPagesMemory {
  uint32_t bases = 0;  // of the sequence's table row, and of the first head's first slot
  uint32_t factors = 0, query = 0, ranges = 0, records = 0, table = 0;
  uint32_t chunks = 0, high_chunks = 0;  // the first ones, and the others
  int low_chunks = 0;
  uint32_t end = 0;  // warps' states lie from the chunks on, when all are idle

  KVTILE_HD constexpr uint32_t chunk(int index, int bytes) const {
    const uint32_t pitch = rows_whole_lines(bytes);
    return index < low_chunks ? chunks + index * pitch : high_chunks + (index - low_chunks) * pitch;
  }
};

KVTILE_HD constexpr RowsPagesMemory rows_pages_memory(const RowsSizes& sizes, int state_bytes,
                                                      uint32_t base, int heads, int lanes,
                                                      int stages, int chunk_bytes) {
  RowsPagesMemory memory;
  const int count = lanes * stages;
  memory.bases = base;
  memory.factors = base + 16;
  memory.query = memory.factors + heads * sizes.factors;
  memory.ranges = memory.query + heads * sizes.query;
  memory.records = memory.ranges + sizes.ranges;
  memory.chunks = rows_whole_lines(memory.records + count * kRowsPagesRecord);
  memory.low_chunks = count;
  const uint32_t pitch = rows_whole_lines(chunk_bytes);
  uint32_t end = memory.chunks + count * pitch;
  if (sizes.wide) {
    const int most = static_cast<int>((kRowsWideTable - memory.chunks) / pitch);
    if (most < count) memory.low_chunks = most;
    memory.table = kRowsWideTable;
    memory.high_chunks = kRowsWideTable + sizes.table;
    end = memory.high_chunks + (count - memory.low_chunks) * pitch;
  }
  const uint32_t states = memory.chunks + heads * lanes * state_bytes;
  memory.end = end > states ? end : states;
  return memory;
}

inline RowsPages rows_pages(const SlotFormat& format, int num_kv_heads, int64_t chunk_bytes,
                            int shared_per_block, bool wide_table) {
  constexpr int kStaticBytes = 128;
  if (!wide_table || num_kv_heads > kRowsPagesMaxHeads || chunk_bytes > shared_per_block) return {};
  RowsPages pages;
  pages.lanes = kRowsPagesWarps / num_kv_heads;
  pages.warps = pages.lanes * num_kv_heads;
  pages.chunk_bytes = static_cast<int>(chunk_bytes);
  const RowsSizes sizes = rows_sizes(format, kRowsPagesRows, wide_table);
  for (pages.stages = kRowsPagesMaxStages; pages.stages >= 2; --pages.stages) {
    const uint32_t end =
        rows_pages_memory(sizes, rows_state_bytes(format.head_dim, kRowsPagesRows), kRowsSharedBase,
                          num_kv_heads, pages.lanes, pages.stages, pages.chunk_bytes)
            .end;
    pages.shared_bytes = static_cast<int>(end) - kRowsSharedStart;
    if (pages.shared_bytes + kStaticBytes <= shared_per_block) return pages;
  }
  return {};
}

// --- blocks of warpgroups ------------------------------------------------------------------------

// Above eight rows, where the tensor core takes products of a warpgroup: a warpgroup takes 64
// tokens of one head at a time. A block has several heads that lie side by side, so that a token's
// copy is long, times several lanes of chunks.
inline constexpr int kRowsVerifyTokens = 64;
inline constexpr int kRowsVerifyMaxStages = 4;
inline constexpr int kRowsVerifyRecord = 48;  // what warps know of a chunk
inline constexpr int kRowsVerifyEpochGroups = kRowsEpochTokens / kRowsGroupTokens;  // of a lane

struct RowsVerify {
  int warps = 0;  // 0: not this way
  int heads = 0;  // of a block
  int lanes = 0;  // warpgroups of one head
  int stages = 0;
  int row_bytes = 0;   // of a token: from the block's first head to the end of its last
  int copy_bytes = 0;  // granules that hold any such row
  int pitch = 0;       // from a token to the next in a chunk
  int shared_bytes = 0;
};

// Registers allow four warpgroups, three of a wide head.
constexpr int rows_verify_warpgroups(int head_dim) { return head_dim == 256 ? 3 : 4; }
// An entry of the wide table of 4-bit keys leaves half of its 256 bytes to a core matrix of
// queries.
constexpr int rows_verify_query_pitch(KeyCode key) {
  return key == KeyCode::kLloydMax4 ? 256 : 128;
}
constexpr int rows_verify_state_bytes(int head_dim, int rows) {
  return 128 * (head_dim / 4 * rows / 32 + rows / 2);
}

struct RowsVerifyMemory {
  uint32_t bases = 0;  // of the sequence's table row
  uint32_t factors = 0, ranges = 0, records = 0, scratch = 0;
  uint32_t pages = 0;  // of the groups of an epoch
  uint32_t weights = 0, query = 0, table = 0;
  uint32_t groups = 0, high_groups = 0;  // the first ones, and the others
  int low_groups = 0;
  uint32_t exchange = 0;  // over groups, when all are idle
  uint32_t end = 0;

  KVTILE_HD constexpr uint32_t group(int index, int bytes) const {
    return index < low_groups ? groups + index * bytes : high_groups + (index - low_groups) * bytes;
  }
};

constexpr RowsVerifyMemory rows_verify_memory(const SlotFormat& format, int rows, uint32_t base,
                                              const RowsVerify& verify) {
  const RowsSizes sizes = rows_sizes(format, rows, true);
  const int warpgroups = verify.heads * verify.lanes;
  const int count = verify.lanes * verify.stages * (kRowsVerifyTokens / kRowsGroupTokens);
  const int group_bytes = kRowsGroupTokens * verify.pitch;
  RowsVerifyMemory memory;
  memory.bases = base;
  memory.factors = base + 16;
  memory.ranges = memory.factors + verify.heads * sizes.factors;
  memory.records = memory.ranges + sizes.ranges;
  memory.scratch = memory.records + verify.lanes * verify.stages * kRowsVerifyRecord;
  memory.pages = memory.scratch + warpgroups * 8 * rows * 4;
  memory.weights = rows_whole_lines(memory.pages + 4 * verify.lanes * kRowsVerifyEpochGroups);
  uint32_t end = memory.weights + warpgroups * kRowsVerifyTokens * rows * 2;
  if (rows_verify_query_pitch(format.key) == 256) {
    memory.query = kRowsWideTable + 128;
  } else {
    memory.query = end;
    end += verify.heads * sizes.query;
  }
  memory.groups = memory.exchange = end;
  memory.low_groups = count;
  end += count * group_bytes;
  if (sizes.wide) {
    const int most =
        (static_cast<int>(kRowsWideTable) - static_cast<int>(memory.groups)) / group_bytes;
    memory.low_groups = most < count ? most : count;
    memory.table = kRowsWideTable;
    memory.high_groups = memory.exchange = kRowsWideTable + sizes.table;
    end = memory.high_groups + (count - memory.low_groups) * group_bytes;
  }
  const uint32_t exchanged =
      memory.exchange +
      (verify.lanes > 1 ? verify.heads * 4 * rows_verify_state_bytes(format.head_dim, rows) : 0);
  memory.end = end > exchanged ? end : exchanged;
  return memory;
}

// `row_bytes` of a token for so many heads; `granules`, the most that such rows touch.
inline RowsVerify rows_verify(const SlotFormat& format, int rows, int heads, int row_bytes,
                              int granules, int shared_per_block) {
  constexpr int kStaticBytes = 128;
  RowsVerify verify;
  verify.heads = heads;
  verify.lanes = rows_verify_warpgroups(format.head_dim) / heads;
  verify.warps = 4 * heads * verify.lanes;
  verify.row_bytes = row_bytes;
  verify.copy_bytes = 16 * granules;
  verify.pitch = 16 * (granules | 1);
  for (verify.stages = kRowsVerifyMaxStages; verify.stages >= 2; --verify.stages) {
    const RowsVerifyMemory memory = rows_verify_memory(format, rows, kRowsSharedBase, verify);
    verify.shared_bytes = static_cast<int>(memory.end) - kRowsSharedStart;
    if (memory.low_groups >= 0 && verify.shared_bytes + kStaticBytes <= shared_per_block) {
      return verify;
    }
  }
  return {};
}

// --- the plan
// --------------------------------------------------------------------------------------

inline constexpr int kRowsMaxWaves = 4;

struct RowsShape {
  int num_seqs = 0;
  int64_t total_q = 0;
  int64_t max_q_len = 0;  // hint, 0 = unknown
  int num_kv_heads = 1;
  int group = 1;
  int head_dim = 0;
  int max_rows = kRowsMaxRows;  // of a tile that the device holds: 8, 16 or 32
  bool pages = false;           // a block takes all KV heads, where eight rows are enough
  int verify_heads = 0;  // of a block of warpgroups, where eight rows are not enough; 0: no such
  bool raw_chunk = false;
  bool batch_invariant = false;
};

struct RowsPlan {
  int queries_per_tile = 1;
  int heads_per_tile = 1;  // of one group; a group above max_rows heads takes several sub-tiles
  int num_subtiles = 1;
  int rows = 8;           // row capacity of the kernel instance: 8, 16 or 32
  int64_t num_tiles = 0;  // upper bound over every way total_q can fall into sequences
  int tiles_per_seq =
      0;               // 0: a sequence's tiles follow from cu_seqlens; else max_q_len bounds them
  int num_splits = 1;  // key ranges of a tile; the raw chunk is one more
  int min_groups = 1;  // of a split
  int64_t launch_tiles = 0;  // tiles of a launch: all, but in a batch-invariant call
  bool raw_chunk = false;
  bool pages = false;
  bool batch_invariant = false;
  int verify_heads = 0;  // not 0: blocks of warpgroups, of so many KV heads

  KVTILE_HD int num_states() const { return num_splits + (raw_chunk ? 1 : 0); }
  // Of one launch.
  int64_t launch_states(int num_kv_heads) const {
    return launch_tiles * num_subtiles * num_states() * num_kv_heads;
  }
  int block_heads(int num_kv_heads) const {
    return pages ? num_kv_heads : verify_heads > 0 ? verify_heads : 1;
  }
};

// First tile of a sequence whose first query row is `cu_q`: never before the end of the tiles of
// the sequence before it, so that a tile finds its sequence from cu_seqlens alone.
KVTILE_HD inline int64_t rows_tile_base(int queries_per_tile, int tiles_per_seq, int64_t cu_q,
                                        int seq) {
  if (tiles_per_seq > 0) return int64_t{seq} * tiles_per_seq;
  return (cu_q + int64_t{seq} * (queries_per_tile - 1)) / queries_per_tile;
}

inline int rows_capacity(int packed_rows) {
  return packed_rows <= 8 ? 8 : packed_rows <= 16 ? 16 : 32;
}

inline int rows_queries_per_tile(const RowsShape& shape) {
  if (shape.batch_invariant) return 1;
  const int most = std::max(1, shape.max_rows / shape.group);
  const int64_t guess = shape.max_q_len > 0
                            ? shape.max_q_len
                            : (shape.total_q + shape.num_seqs - 1) / std::max(1, shape.num_seqs);
  return static_cast<int>(std::clamp<int64_t>(guess, 1, most));
}

// Tiles of any batch of at most total_q rows; *tiles_per_seq as in RowsPlan.
inline int64_t rows_num_tiles(const RowsShape& shape, int queries_per_tile, int64_t total_q,
                              int* tiles_per_seq) {
  const int64_t by_rows = rows_tile_base(queries_per_tile, 0, total_q, shape.num_seqs);
  *tiles_per_seq = 0;
  if (shape.num_seqs == 0) return 0;
  if (shape.max_q_len <= 0 || shape.batch_invariant) return by_rows;
  const int64_t each = (shape.max_q_len + queries_per_tile - 1) / queries_per_tile;
  const int64_t by_hint = each * shape.num_seqs;
  if (by_hint > by_rows) return by_rows;
  *tiles_per_seq = static_cast<int>(each);
  return by_hint;
}

// Nothing a row's bits follow from may depend on the batch: a tile is one query row, splits follow
// from the heads, the device and the row's own keys, and what the workspace bounds is the number of
// tiles in a launch.
inline void plan_invariant_splits(RowsPlan* plan, int64_t units_of_tile, int resident_blocks) {
  plan->num_splits = static_cast<int>(std::max<int64_t>(1, resident_blocks / units_of_tile));
  plan->min_groups = kRowsInvariantGroups;
  const int64_t most = int64_t{kRowsInvariantWaves} * resident_blocks;
  plan->launch_tiles = std::clamp<int64_t>(most / (units_of_tile * plan->num_states()), 1,
                                           std::max<int64_t>(1, plan->num_tiles));
}

inline RowsPlan make_rows_plan(const RowsShape& shape, int resident_blocks) {
  RowsPlan plan;
  plan.raw_chunk = shape.raw_chunk;
  plan.batch_invariant = shape.batch_invariant;
  plan.queries_per_tile = rows_queries_per_tile(shape);
  plan.heads_per_tile = std::min(shape.group, shape.max_rows);
  plan.num_subtiles = (shape.group - 1) / plan.heads_per_tile + 1;
  plan.rows = rows_capacity(plan.queries_per_tile * plan.heads_per_tile);
  plan.num_tiles = rows_num_tiles(shape, plan.queries_per_tile, shape.total_q, &plan.tiles_per_seq);
  plan.launch_tiles = plan.num_tiles;
  if (shape.batch_invariant) {
    plan_invariant_splits(&plan, int64_t{plan.num_subtiles} * shape.num_kv_heads, resident_blocks);
    return plan;
  }
  plan.pages = shape.pages && plan.rows == kRowsPagesRows;
  if (plan.rows > kRowsPagesRows) plan.verify_heads = shape.verify_heads;
  const int64_t units = plan.num_tiles * plan.num_subtiles *
                        (shape.num_kv_heads / plan.block_heads(shape.num_kv_heads));
  // Blocks of the raw chunk are part of the wave.
  const int64_t chunk_units = plan.raw_chunk ? units : 0;
  // Up to kRowsMaxWaves: the fewest whose last one is nearly full, else the fullest.
  double best = 0.0;
  // Blocks of several heads write as many states each, and the workspace holds kRowsMaxWaves of
  // one.
  const int waves = plan.verify_heads > 0 ? kRowsMaxWaves / plan.verify_heads : kRowsMaxWaves;
  for (int wave = 1; wave <= waves; ++wave) {
    const int64_t slots = static_cast<int64_t>(wave) * resident_blocks;
    const int64_t splits = units > 0 ? (slots - chunk_units) / units : 0;
    if (splits < 1) continue;
    const double filled = static_cast<double>(splits * units + chunk_units) / slots;
    if (filled > best + 0.05) {
      best = filled;
      plan.num_splits = static_cast<int>(splits);
    }
    if (best >= 0.93) break;
  }
  return plan;
}

// States (tile x sub-tile x head x split) the plan of this shape, or of one with a smaller total_q,
// can have: monotone in total_q and free of lengths.
inline int64_t rows_max_states(const RowsShape& shape, int resident_blocks) {
  // More queries a tile need fewer tiles: the most are at the last total_q of a smaller count.
  const int queries = rows_queries_per_tile(shape);
  int per_seq;
  int64_t tiles = 0;
  for (int q = 1; q <= queries; ++q) {
    const int64_t rows =
        q < queries ? std::min(shape.total_q, int64_t{q} * shape.num_seqs) : shape.total_q;
    tiles = std::max(tiles, rows_num_tiles(shape, q, rows, &per_seq));
  }
  const int64_t subtiles = (shape.group - 1) / std::min(shape.group, shape.max_rows) + 1;
  const int64_t units = tiles * subtiles * shape.num_kv_heads;
  return std::max<int64_t>(units * (shape.raw_chunk ? 2 : 1),
                           int64_t{kRowsMaxWaves} * resident_blocks);
}

// Partial O [rows][head_dim] and (m, l) [rows][2] of every state, fp32.
inline size_t rows_state_floats(int rows, int head_dim) {
  return static_cast<size_t>(rows) * static_cast<size_t>(head_dim + 2);
}

inline size_t rows_workspace_bytes(const RowsShape& shape, int resident_blocks) {
  const RowsPlan plan = make_rows_plan(shape, resident_blocks);
  if (plan.batch_invariant) {
    return static_cast<size_t>(plan.launch_states(shape.num_kv_heads)) *
           rows_state_floats(plan.rows, shape.head_dim) * sizeof(float);
  }
  // Whether a call has blocks of all heads depends on its addresses: room for either.
  const int64_t page_rows =
      shape.num_kv_heads <= kRowsPagesMaxHeads && shape.group <= kRowsPagesRows
          ? int64_t{kRowsMaxWaves} * resident_blocks * shape.num_kv_heads * kRowsPagesRows
          : 0;
  const int64_t rows = std::max(rows_max_states(shape, resident_blocks) * plan.rows, page_rows);
  return static_cast<size_t>(rows) * rows_state_floats(1, shape.head_dim) * sizeof(float);
}

}  // namespace kvtile::cuda
