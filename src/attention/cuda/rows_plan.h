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
// Accumulators are flushed to fp32 state at least this often: the tensor core truncates.
inline constexpr int kRowsEpochTokens = 8192;

// --- shared memory of a block, and how many warps and blocks a device holds
// -----------------------

// Stages of a warp's ring.
constexpr int rows_stages(int head_dim) { return head_dim == 256 ? 3 : 4; }

// 16-byte granules a slot can touch: it starts at any even byte.
constexpr int rows_granules(int slot_bytes) { return (slot_bytes + 14 + 15) / 16; }
// An odd number of granules a row spreads the rows of a group over the banks.
constexpr int rows_pitch(int slot_bytes) { return 16 * (rows_granules(slot_bytes) | 1); }
// Lanes that copy a row together, and the rows of one pass of a warp.
constexpr int rows_row_lanes(int slot_bytes) {
  return rows_granules(slot_bytes) <= 8 ? 8 : rows_granules(slot_bytes) <= 16 ? 16 : 32;
}
constexpr int rows_pass_rows(int slot_bytes) { return 32 / rows_row_lanes(slot_bytes); }
// Rows of a group, then where each row's slot starts.
constexpr int rows_stage_bytes(int slot_bytes) {
  return kRowsGroupTokens * (rows_pitch(slot_bytes) + 4);
}
// The key pair table: 2^(2 bits) entries of 32 lanes; FP8 keys need none.
constexpr int rows_table_bytes(KeyCode key) {
  return is_fp8(key) ? 0 : (1 << (2 * key_bits(key))) * 128;
}
// The 3-bit table is indexed by bits in place, under an address that must not have them.
constexpr int rows_table_alignment(KeyCode key) {
  return key == KeyCode::kLloydMax3 ? rows_table_bytes(key) : 16;
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

constexpr int rows_shared_bytes(const SlotFormat& format, int rows, int warps) {
  const int teams = warps / rows_team_warps(format.head_dim, rows);
  const int ring = warps * rows_stages(format.head_dim) * rows_stage_bytes(format.slot_bytes());
  const int exchange = warps * rows_state_bytes(format.head_dim, rows) + 8 * rows;
  return rows_table_bytes(format.key) + rows_table_alignment(format.key) + 32 +
         rows * (format.head_dim * 2 + 8) + teams * rows_team_bytes(format.head_dim, rows) +
         (ring > exchange ? ring : exchange);
}

// Queries are prepared by at least this many warps.
inline constexpr int kRowsMinWarps = 4;
// Register budgets: 65536 over the threads of an SM.
constexpr int rows_max_warps(int head_dim, int rows) {
  if (rows == 32) return head_dim == 256 ? 8 : 4;
  return head_dim == 256 && rows == 16 ? 4 : 6;
}
constexpr int rows_blocks_per_sm(int head_dim, int rows) {
  return head_dim == 256 && rows == 32 ? 1 : 2;
}

struct RowsResidency {
  int warps = 0;  // 0: the device cannot hold one team
  int blocks_per_sm = 0;
  int shared_bytes = 0;
};

// The most blocks an SM, then the most warps a block, that a device holds.
inline RowsResidency rows_residency(const SlotFormat& format, int rows, int shared_per_block,
                                    int shared_per_sm) {
  constexpr int kStaticBytes = 128;     // the tile and its range
  constexpr int kReservedBytes = 1024;  // the system's share of a block
  const int most = rows_max_warps(format.head_dim, rows),
            team = rows_team_warps(format.head_dim, rows);
  for (int blocks = rows_blocks_per_sm(format.head_dim, rows); blocks >= 1; --blocks) {
    for (int warps = most; warps >= kRowsMinWarps; warps -= team) {
      const int bytes = rows_shared_bytes(format, rows, warps);
      const int whole = bytes + kStaticBytes;
      if (whole <= shared_per_block && blocks * (whole + kReservedBytes) <= shared_per_sm) {
        return {warps, blocks, bytes};
      }
    }
  }
  return {};
}

// The largest row capacity that a device holds; 0 if none.
inline int rows_max_capacity(const SlotFormat& format, int shared_per_block, int shared_per_sm) {
  for (int rows = kRowsMaxRows; rows >= 8; rows /= 2) {
    if (rows_residency(format, rows, shared_per_block, shared_per_sm).warps > 0) return rows;
  }
  return 0;
}

// --- the plan
// --------------------------------------------------------------------------------------

struct RowsShape {
  int num_seqs = 0;
  int64_t total_q = 0;
  int64_t max_q_len = 0;  // hint, 0 = unknown
  int num_kv_heads = 1;
  int group = 1;
  int head_dim = 0;
  int max_rows = kRowsMaxRows;  // of a tile that the device holds: 8, 16 or 32
  bool raw_chunk = false;
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
  bool raw_chunk = false;

  KVTILE_HD int num_states() const { return num_splits + (raw_chunk ? 1 : 0); }
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
  if (shape.max_q_len <= 0) return by_rows;
  const int64_t each = (shape.max_q_len + queries_per_tile - 1) / queries_per_tile;
  const int64_t by_hint = each * shape.num_seqs;
  if (by_hint > by_rows) return by_rows;
  *tiles_per_seq = static_cast<int>(each);
  return by_hint;
}

inline RowsPlan make_rows_plan(const RowsShape& shape, int resident_blocks) {
  RowsPlan plan;
  plan.raw_chunk = shape.raw_chunk;
  plan.queries_per_tile = rows_queries_per_tile(shape);
  plan.heads_per_tile = std::min(shape.group, shape.max_rows);
  plan.num_subtiles = (shape.group - 1) / plan.heads_per_tile + 1;
  plan.rows = rows_capacity(plan.queries_per_tile * plan.heads_per_tile);
  plan.num_tiles = rows_num_tiles(shape, plan.queries_per_tile, shape.total_q, &plan.tiles_per_seq);
  const int64_t units = plan.num_tiles * plan.num_subtiles * shape.num_kv_heads;
  // Blocks of the raw chunk are part of the wave.
  const int64_t chunk_units = plan.raw_chunk ? units : 0;
  // Up to four waves: the fewest whose last one is nearly full, else the fullest.
  double best = 0.0;
  for (int wave = 1; wave <= 4; ++wave) {
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
  return std::max<int64_t>(units * (shape.raw_chunk ? 2 : 1), int64_t{4} * resident_blocks);
}

// Partial O [rows][head_dim] and (m, l) [rows][2] of every state, fp32.
inline size_t rows_state_floats(int rows, int head_dim) {
  return static_cast<size_t>(rows) * static_cast<size_t>(head_dim + 2);
}

inline size_t rows_workspace_bytes(const RowsShape& shape, int resident_blocks) {
  const RowsPlan plan = make_rows_plan(shape, resident_blocks);
  return static_cast<size_t>(rows_max_states(shape, resident_blocks)) *
         rows_state_floats(plan.rows, shape.head_dim) * sizeof(float);
}

}  // namespace kvtile::cuda
