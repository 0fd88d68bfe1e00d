// The CPU backend row: workspace formula, host-side checks of lengths and tables, and the schedule.
// The schedule decides who computes what, never how: any split of rows and lanes over any number of
// threads gives the same bits.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <string_view>

#include "src/attention/attend.h"
#include "src/attention/backends.h"
#include "src/attention/cpu/kernel.h"
#include "src/attention/mask.h"
#include "src/core/cpu.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr int64_t kAlignment = 64;

// Below this many packed rows a call may split the lanes of a row over threads, storing their
// states; above, rows alone are work enough. Bounds the memory for stored states.
constexpr int kMaxSplitRows = 256;

// Scratch rows of one task: packed rows of one KV head, or a row tile for each of several heads.
int task_rows(const AttentionCall& call) {
  const int64_t group = call.num_heads / call.cache.num_kv_heads;
  const int64_t one_head = round_up64(std::max<int64_t>(1, call.total_q * group), kRowTile);
  const int64_t all_heads = int64_t{kRowTile} * call.cache.num_kv_heads;
  return static_cast<int>(
      std::min<int64_t>(std::max(one_head, all_heads), max_task_rows(call.cache.format.head_dim)));
}

int64_t stored_state_bytes(const AttentionCall& call) {
  return round_up64(state_floats(kMaxSplitRows, call.cache.format.head_dim) * 4 * kNumLanes,
                    kAlignment);
}

Status supports(const AttentionCall&, const RunOptions&) { return {}; }

// A call that splits lanes has few rows: its stored states lie where other calls have rows.
int split_task_rows(const AttentionCall& call) {
  return std::min(task_rows(call), round_up(kMaxSplitRows, kRowTile));
}

Status workspace(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  const int64_t threads = resolve_num_threads(options.num_threads);
  const auto scratch_bytes = [&](int rows) {
    return threads * carve_thread_scratch(call, rows, nullptr, nullptr);
  };
  *bytes = static_cast<size_t>(
      std::max(scratch_bytes(task_rows(call)),
               scratch_bytes(split_task_rows(call)) + stored_state_bytes(call)));
  return {};
}

// Lengths and table entries of visible pages, all read before anything is written.
Status check_batch(const AttentionCall& call) {
  if (call.num_seqs > 0 && call.cu_seqlens_q == nullptr) {
    return invalid("cu_seqlens_q", "null", "[num_seqs + 1] offsets");
  }
  if (call.num_seqs > 0 && call.seq_lens == nullptr) {
    return invalid("seq_lens", "null", "[num_seqs] lengths");
  }
  if (call.num_seqs > 0 && call.cu_seqlens_q[0] != 0) {
    return invalid("cu_seqlens_q[0]", call.cu_seqlens_q[0], "0");
  }
  const int block_size = call.cache.block_size;
  for (int s = 0; s < call.num_seqs; ++s) {
    const int64_t q_len = int64_t{call.cu_seqlens_q[s + 1]} - call.cu_seqlens_q[s];
    const int64_t seq_len = call.seq_lens[s];
    if (q_len < 0) {
      return invalid(fmt::format("cu_seqlens_q[{}]", s + 1), call.cu_seqlens_q[s + 1],
                     fmt::format(">= {}", call.cu_seqlens_q[s]));
    }
    if (seq_len < 0) return invalid(fmt::format("seq_lens[{}]", s), seq_len, ">= 0");
    const int64_t first = call.first_positions == nullptr ? 0 : call.first_positions[s];
    if (first < 0 || first % block_size != 0) {
      return invalid(fmt::format("first_positions[{}]", s), first,
                     fmt::format("a multiple of block_size {}", block_size));
    }
    if (q_len == 0) continue;
    const int64_t cached_len = seq_len - q_len;
    // A window's start only moves right, and a causal end too: the first row that sees anything and
    // the last row bound them all.
    const int64_t low = key_range(call.mask, std::max<int64_t>(0, cached_len), seq_len).begin;
    const int64_t high = call.chunk_key == nullptr ? seq_len : std::max<int64_t>(0, cached_len);
    if (low >= high) continue;
    if (low < first) {
      return invalid(fmt::format("first_positions[{}]", s), first,
                     fmt::format("<= {}, the first visible position", low));
    }
    if (call.block_table == nullptr) {
      return invalid("block_table", "null", "[num_seqs, max_blocks] pages");
    }
    const int64_t end_page = (high - first + block_size - 1) / block_size;
    if (end_page > call.max_blocks) {
      return Status(StatusCode::kOutOfRange,
                    fmt::format("block_table: got {} pages, wanted {} for sequence {} of {} tokens",
                                call.max_blocks, end_page, s, seq_len));
    }
    const int32_t* table = call.block_table + s * call.block_table_stride;
    for (int64_t page = (low - first) / block_size; page < end_page; ++page) {
      if (table[page] < 0 || table[page] >= call.cache.num_blocks) {
        return Status(StatusCode::kOutOfRange,
                      fmt::format("block_table[{}][{}]: got {}, wanted 0..{}", s, page, table[page],
                                  call.cache.num_blocks - 1));
      }
    }
  }
  if (call.num_seqs > 0 && call.cu_seqlens_q[call.num_seqs] > call.total_q) {
    return invalid(fmt::format("cu_seqlens_q[{}]", call.num_seqs), call.cu_seqlens_q[call.num_seqs],
                   fmt::format("<= total_q {}", call.total_q));
  }
  return {};
}

// The tasks of a call in a fixed order: sequence, then block of rows, then KV heads. Sequences of
// one row tile a head put up to max_heads heads in a task.
class Schedule {
 public:
  Schedule(const AttentionCall& call, int max_rows, int max_heads)
      : call_(&call),
        group_(call.num_heads / call.cache.num_kv_heads),
        max_rows_(max_rows),
        max_heads_(max_heads) {
    for (int s = 0; s < call.num_seqs; ++s) {
      num_tasks_ += tasks_of(s);
      largest_task_ = std::max<int64_t>(
          largest_task_,
          std::min<int64_t>(round_up64(rows_of(s), kRowTile), max_rows_) * heads_of(s));
    }
  }

  int64_t num_tasks() const { return num_tasks_; }
  // Scratch rows of the largest task.
  int64_t largest_task() const { return largest_task_; }

  // Each thread asks for tasks in increasing order, so the walk over sequences is resumed. Loops
  // over tasks must say `monotonic`: a dynamic schedule alone may hand out iterations in any order.
  struct Cursor {
    int seq = 0;
    int64_t first_task = 0;
  };
  RowTask task(int64_t index, Cursor& cursor) const {
    while (index - cursor.first_task >= tasks_of(cursor.seq)) {
      cursor.first_task += tasks_of(cursor.seq++);
    }
    const int heads = heads_of(cursor.seq);
    const int64_t head_tasks = (call_->cache.num_kv_heads + heads - 1) / heads;
    const int64_t local = index - cursor.first_task;
    RowTask task;
    task.seq = cursor.seq;
    task.kv_head_begin = static_cast<int>(local % head_tasks) * heads;
    task.kv_head_end = std::min(task.kv_head_begin + heads, call_->cache.num_kv_heads);
    task.row_begin = local / head_tasks * max_rows_;
    task.row_end = std::min(rows_of(cursor.seq), task.row_begin + max_rows_);
    task.lane_begin = 0;
    task.lane_end = kNumLanes;
    return task;
  }

 private:
  int64_t rows_of(int seq) const {
    return (int64_t{call_->cu_seqlens_q[seq + 1]} - call_->cu_seqlens_q[seq]) * group_;
  }
  int heads_of(int seq) const { return rows_of(seq) <= kRowTile ? max_heads_ : 1; }
  int64_t tasks_of(int seq) const {
    const int64_t heads = heads_of(seq);
    return (rows_of(seq) + max_rows_ - 1) / max_rows_ *
           ((call_->cache.num_kv_heads + heads - 1) / heads);
  }

  const AttentionCall* call_;
  int64_t group_;
  int64_t max_rows_;
  int max_heads_;
  int64_t num_tasks_ = 0, largest_task_ = 0;
};

// Rows that belong to no sequence.
void write_padding_rows(const AttentionCall& call) {
  const int64_t used = call.num_seqs > 0 ? call.cu_seqlens_q[call.num_seqs] : 0;
  const auto row_bytes = static_cast<size_t>(call.cache.format.head_dim) * dtype_bytes(call.dtype);
  for (int64_t token = used; token < call.total_q; ++token) {
    for (int64_t head = 0; head < call.num_heads; ++head) {
      std::memset(static_cast<std::byte*>(call.out) +
                      (token * call.out_stride_token + head * call.out_stride_head) *
                          dtype_bytes(call.dtype),
                  0, row_bytes);
      if (call.lse != nullptr) {
        call.lse[head * call.lse_stride_head + token * call.lse_stride_token] =
            -std::numeric_limits<float>::infinity();
      }
    }
  }
}

Status run(const AttentionCall& call, Workspace ws, const RunOptions& options, RunReport* report) {
  SimdTarget target;
  if (!parse_cpu_backend(options.backend == nullptr ? "cpu" : options.backend, &target)) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("backend: got {}, wanted cpu or a SIMD target of this machine",
                              options.backend));
  }
  KVTILE_RETURN_IF_ERROR(check_batch(call));
  const int num_threads = resolve_num_threads(options.num_threads);
  if (report != nullptr) {
    report->backend = cpu_backend_name(target);
    report->num_threads = num_threads;
  }
  write_padding_rows(call);

  const AttendKernels kernels = attend_kernels(target);
  const int head_dim = call.cache.format.head_dim;
  auto* base = static_cast<std::byte*>(ws.data);

  // Smaller tasks when there would be too few to go round; bits do not depend on it. Lanes can be
  // dealt out too while their states fit the store.
  int max_rows = task_rows(call);
  int max_heads = std::min(call.cache.num_kv_heads, max_rows / kRowTile);
  Schedule schedule(call, max_rows, max_heads);
  const auto can_split = [&] {
    return num_threads > 1 && schedule.num_tasks() * schedule.largest_task() <= kMaxSplitRows;
  };
  const auto too_few = [&] {
    return schedule.num_tasks() * (can_split() ? kNumLanes : 1) < 4 * int64_t{num_threads};
  };
  while (too_few() && (max_heads > 1 || max_rows > 4 * kRowTile)) {
    max_heads = (max_heads + 1) / 2;
    max_rows = std::max(4 * kRowTile, round_up(max_rows / 2, kRowTile));
    schedule = Schedule(call, max_rows, max_heads);
  }
  const int64_t num_tasks = schedule.num_tasks();
  const bool split = can_split() && num_tasks < 4 * int64_t{num_threads};
  const int scratch_rows = split ? split_task_rows(call) : task_rows(call);
  const int64_t scratch_bytes = carve_thread_scratch(call, scratch_rows, nullptr, nullptr);
  auto* stored = reinterpret_cast<float*>(base + scratch_bytes * num_threads);
  const auto stored_rows = static_cast<int>(schedule.largest_task());
  const auto stored_states = [&](int64_t task, int lane) {
    return make_row_states(stored + (task * kNumLanes + lane) * state_floats(stored_rows, head_dim),
                           stored_rows, head_dim);
  };

#pragma omp parallel num_threads(num_threads)
  {
    ThreadScratch scratch;
    carve_thread_scratch(call, scratch_rows, base + scratch_bytes * omp_get_thread_num(), &scratch);
    if (split) {
      Schedule::Cursor cursor;
#pragma omp for schedule(monotonic : dynamic, 1)
      for (int64_t unit = 0; unit < num_tasks * kNumLanes; ++unit) {
        RowTask task = schedule.task(unit / kNumLanes, cursor);
        task.lane_begin = static_cast<int>(unit % kNumLanes);
        task.lane_end = task.lane_begin + 1;
        const RowStates kept = scratch.total;
        scratch.total = stored_states(unit / kNumLanes, task.lane_begin);
        kernels.attend_rows(call, task, scratch);
        scratch.total = kept;
      }
    }
    Schedule::Cursor cursor;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t index = 0; index < num_tasks; ++index) {
      const RowTask task = schedule.task(index, cursor);
      if (split) {
        const int num_rows = task.num_rows();
        kernels.load_queries(call, task, scratch);
        std::fill_n(scratch.total.max, num_rows, -std::numeric_limits<float>::infinity());
        for (int lane = 0; lane < kNumLanes; ++lane) {
          kernels.merge_rows(stored_states(index, lane), scratch.total, num_rows, head_dim,
                             scratch.row_factor);
        }
      } else {
        kernels.attend_rows(call, task, scratch);
      }
      kernels.write_rows(call, task, scratch);
    }
  }
  return {};
}

}  // namespace

RowStates make_row_states(float* memory, int rows, int head_dim) {
  RowStates states;
  states.out = memory;
  states.max = memory + int64_t{rows} * value_pitch(head_dim, kMaxLanes);
  states.sum = states.max + rows;
  return states;
}

int64_t carve_thread_scratch(const AttentionCall& call, int rows, std::byte* memory,
                             ThreadScratch* scratch) {
  const int head_dim = call.cache.format.head_dim;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    std::byte* p = memory == nullptr ? nullptr : memory + used;
    used += round_up64(bytes, kAlignment);
    return p;
  };
  ThreadScratch carved;
  const auto floats = [&](int64_t n) { return reinterpret_cast<float*>(take(n * 4)); };
  carved.key_tile = floats(key_tile_floats(head_dim));
  carved.value_tile = floats(value_tile_floats(head_dim));
  carved.key_scale = floats(kTileTokens);
  carved.value_scale = floats(kTileTokens);
  carved.value_zero = floats(kTileTokens);
  carved.words = reinterpret_cast<uint32_t*>(take(tile_words(head_dim) * 4));
  carved.scores = floats(kRowTile * kTileTokens);
  carved.query_raw = floats(int64_t{rows} * head_dim);
  carved.query_rot =
      call.cache.format.rotated() ? floats(int64_t{rows} * head_dim) : carved.query_raw;
  carved.row_factor = floats(rows);
  carved.row_cap = floats(rows);
  carved.row_begin = reinterpret_cast<int64_t*>(take(rows * int64_t{8}));
  carved.row_end = reinterpret_cast<int64_t*>(take(rows * int64_t{8}));
  for (RowStates* states : {&carved.segment, &carved.lane, &carved.total}) {
    float* state = floats(state_floats(rows, head_dim));
    if (memory != nullptr) *states = make_row_states(state, rows, head_dim);
  }
  if (scratch != nullptr) *scratch = carved;
  return used;
}

const Backend kCpuBackend = {"cpu", supports, workspace, run};

}  // namespace kvtile
