// One unit of CPU work: some packed rows of one KV head of one sequence, over some lanes of its
// keys. Called by driver.cc, implemented per SIMD target in kernel.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvtile/attention.h"
#include "src/codec/tile_layout.h"
#include "src/core/cpu.h"

// Every loop over a row tile must be unrolled, initialisation and epilogue too: an accumulator
// array that one rolled loop indexes stays in memory, and the inner loop then stores it each step.
#define KVTILE_UNROLL _Pragma("GCC unroll 16")

namespace kvtile {

// The order in which keys are added up is fixed by position alone, so that a row's bits depend on
// neither threads, batch, chunking nor tile (docs/numerics.md):
//   block   kTileTokens keys at absolute multiples, cut at cached_len when the chunk is raw;
//           fresh accumulators
//   segment kSegmentTokens keys; fresh state
//   lane    segments s with s % kNumLanes equal, merged in order
//   row     lanes merged in order
inline constexpr int64_t kSegmentTokens = 512;
inline constexpr int kNumLanes = 16;

// Rows a register tile covers at most; queries are stored in groups of this many.
inline constexpr int kRowTile = 12;

// Rows of one task: many enough to make decoding keys cheap, few enough that states and tiles stay
// in the second-level cache. Rounded up: packed row counts are often powers of two, and a short
// last task would decode every key again for a few rows.
constexpr int max_task_rows(int head_dim) {
  const int rows = round_up(65536 / head_dim, kRowTile);
  return std::clamp(rows, 4 * kRowTile, 43 * kRowTile);
}

// Un-normalised partial result of a set of rows: out [rows][pitch], planar columns; max and sum
// [rows]. A row is empty when its max is -inf; its other fields are then never read.
struct RowStates {
  float* out;
  float* max;
  float* sum;
};

constexpr int64_t state_floats(int rows, int head_dim) {
  return int64_t{rows} * (value_pitch(head_dim, kMaxLanes) + 2);
}

RowStates make_row_states(float* memory, int rows, int head_dim);

// A task takes a range of packed rows of one KV head, or few rows of several heads at once: then
// each token's slots are read together, as they lie in token-major pages.
struct RowTask {
  int seq;
  int kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;  // packed rows: query offset * group + head in group
  int lane_begin, lane_end;

  int rows_per_head() const { return static_cast<int>(row_end - row_begin); }
  // Heads start on a row tile of their own.
  int head_stride() const { return round_up(rows_per_head(), kRowTile); }
  // Rows of scratch in use, gaps between heads included.
  int num_rows() const {
    return (kv_head_end - kv_head_begin - 1) * head_stride() + rows_per_head();
  }
};

// One query row of a task and where its scratch row lies.
struct TaskRow {
  int index;
  int64_t token;  // in [0, total_q)
  int64_t head;
  int64_t position;  // in the sequence
};

// Calls visit(TaskRow) for each row of the task.
template <class Visit>
void for_each_row(const AttentionCall& call, const RowTask& task, Visit visit) {
  const int64_t group = call.num_heads / call.cache.num_kv_heads;
  const int64_t q_begin = call.cu_seqlens_q[task.seq];
  const int64_t cached_len = call.seq_lens[task.seq] - (call.cu_seqlens_q[task.seq + 1] - q_begin);
  for (int h = task.kv_head_begin; h < task.kv_head_end; ++h) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const int index =
          (h - task.kv_head_begin) * task.head_stride() + static_cast<int>(row - task.row_begin);
      visit(
          TaskRow{index, q_begin + row / group, h * group + row % group, cached_len + row / group});
    }
  }
}

// Scratch of one thread, carved from the workspace.
struct ThreadScratch {
  float* key_tile;
  float* value_tile;
  float* key_scale;
  float* value_scale;  // these two for blocks that are not unpacked
  float* value_zero;
  uint32_t* words;
  float* scores;       // [kRowTile][kTileTokens]
  float* query_rot;    // groups of kRowTile rows, [group][head_dim][kRowTile]
  float* query_raw;    // the same; equal to query_rot unless keys are rotated and the chunk is raw
  float* row_factor;   // log2 units of one score unit
  float* row_cap;      // score unit over softcap; used when softcap > 0, and then row_factor is 1
  int64_t* row_begin;  // visible keys of each row
  int64_t* row_end;
  RowStates segment, lane, total;
};

// Bytes of one thread's scratch for tasks of up to `rows` rows, and its carving. `memory` null only
// counts.
int64_t carve_thread_scratch(const AttentionCall& call, int rows, std::byte* memory,
                             ThreadScratch* scratch);

struct AttendKernels {
  // Attends the task's rows over its lanes into scratch.total.
  void (*attend_rows)(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch);
  // Merges `from` into `into`, row by row, in that order.
  void (*merge_rows)(const RowStates& from, const RowStates& into, int rows, int head_dim,
                     const float* row_factor);
  // Row factors (log2 units of a score) as attend_rows uses them, for merging stored states.
  void (*load_queries)(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch);
  // Normalises scratch.total and writes out and lse of the task's rows.
  void (*write_rows)(const AttentionCall& call, const RowTask& task, ThreadScratch& scratch);
};

AttendKernels attend_kernels(SimdTarget target);

}  // namespace kvtile
