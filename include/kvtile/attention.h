// attend(): exact attention of a batch of query rows over a packed paged cache. Prefill chunk,
// speculative verify and decode are this one operation with different q_len. merge_states()
// combines partial results; workspace_bytes() announces, exactly, all scratch a call will use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvtile/cache.h"
#include "kvtile/run.h"
#include "kvtile/slot.h"
#include "kvtile/status.h"

namespace kvtile {

// Which keys a query position p of a sequence of seq_len tokens sees, always one interval:
// [max(0, p - window + 1), causal ? p + 1 : seq_len). Hidden keys are not read.
struct Mask {
  bool causal = true;
  int64_t window = 0;  // keys a row sees counting its own position; 0 = unlimited
};

inline constexpr int64_t kDefaultTileTokens = 32768;

// Row r of sequence s (cu_seqlens_q[s] <= r < cu_seqlens_q[s+1]) is the query at position
// seq_lens[s] - q_len + (r - cu_seqlens_q[s]); cached_len = seq_lens[s] - q_len. A row whose
// position is negative, or that sees no key, is written as zeros with lse -inf.
struct AttentionCall {
  const void* query = nullptr;  // [total_q, num_heads, head_dim] of dtype
  void* out = nullptr;          // [total_q, num_heads, head_dim] of dtype
  float* lse = nullptr;         // [num_heads, total_q] natural log, or null
  DType dtype = DType::kBFloat16;
  int num_seqs = 0;
  int64_t total_q = 0;
  int num_heads = 0;             // a multiple of cache.num_kv_heads
  float softmax_scale = 0.0f;    // scores are softmax_scale * dot(query, key)
  float softcap = 0.0f;          // > 0: score <- softcap * tanh(score / softcap)
  const float* sinks = nullptr;  // [num_heads] logit of a virtual key with zero value, or null
  Mask mask;

  PagedCache cache;
  const int32_t* block_table = nullptr;   // [num_seqs, max_blocks]: page of each run of block_size
  int64_t max_blocks = 0;                 // tokens. Entries of hidden pages are not read.
  int64_t block_table_stride = 0;         // entries between rows; 0 = max_blocks
  const int32_t* cu_seqlens_q = nullptr;  // [num_seqs + 1]
  const int32_t* seq_lens = nullptr;      // [num_seqs] tokens including the current chunk
  // [num_seqs] position of the first token of each table row (a multiple of block_size), for tables
  // that start at the window; null = 0.
  const int32_t* first_positions = nullptr;

  // Raw key/value of the current chunk, [total_q, num_kv_heads, head_dim] of dtype. With them,
  // positions >= cached_len are read here; without (both null), from the packed cache. The choice
  // is the caller's and never depends on a size.
  const void* chunk_key = nullptr;
  const void* chunk_value = nullptr;

  // Strides in elements; 0 = contiguous. The last dimension is contiguous. Strides of size-one
  // dimensions are ignored.
  int64_t query_stride_token = 0, query_stride_head = 0;
  int64_t out_stride_token = 0, out_stride_head = 0;
  int64_t chunk_key_stride_token = 0, chunk_key_stride_head = 0;
  int64_t chunk_value_stride_token = 0, chunk_value_stride_head = 0;
  int64_t lse_stride_head = 0, lse_stride_token = 0;

  // Cached tokens a backend may hold decoded at once, rounded up to whole blocks;
  // 0 = kDefaultTileTokens. Results do not depend on it, bit for bit.
  int64_t tile_tokens = 0;

  // Launch hints, never visibility: upper bounds, or 0 = unknown. A sequence longer than a hint
  // that is not 0 breaks the call's contract: on CUDA its rows are then NaN or miss keys (lengths
  // are device data, which no check on the host can see). max_q_len also decides which CUDA engine
  // runs; without it any sequence may own all total_q rows.
  int64_t max_q_len = 0;
  int64_t max_seq_len = 0;

  // Asks that the bits of a row follow from its own query, position and keys: not from batch-mates,
  // the number of rows, or where pages lie. The CPU always computes so. "cuda/rows" does when
  // asked, at a price: every row reads the cache for itself. Other CUDA engines refuse.
  bool batch_invariant = false;
};

struct Workspace {
  void* data = nullptr;  // 64-byte aligned
  size_t bytes = 0;
};

// Exact scratch of a call, from shapes, format, dtype, mask and options alone: no pointer is read
// and cached lengths do not enter. total_q is an upper bound: smaller calls fit in the same bytes.
Status workspace_bytes(const AttentionCall& call, const RunOptions& options, size_t* bytes);

// Validates everything before writing anything. The workspace is exclusive to one call in flight;
// its contents are undefined before and after. On CUDA every array is memory of the device
// (RunOptions::device) and "everything" is what the host can see: shapes, pointers, stream. Lengths
// and tables are read on the device; a visible token without a page makes its readers NaN.
Status attend(const AttentionCall& call, Workspace workspace, const RunOptions& options = {},
              RunReport* report = nullptr);

// Merging partial states (O, lse) of the same rows over disjoint key sets: weights exp(lse_i - M).
// The states form a commutative monoid with identity (anything, -inf): an empty state's payload is
// never read, merging with it copies exactly, and merging only empty states gives (0, -inf).
struct PartialState {
  const float* out = nullptr;                         // [total_q, num_heads, head_dim]
  const float* lse = nullptr;                         // [num_heads, total_q] natural log
  int64_t out_stride_token = 0, out_stride_head = 0;  // elements; 0 = contiguous
  int64_t lse_stride_head = 0, lse_stride_token = 0;
};

struct MergeCall {
  const PartialState* states = nullptr;  // [num_states], host memory on every backend
  int num_states = 0;
  int64_t total_q = 0;
  int num_heads = 0;
  int head_dim = 0;
  void* out = nullptr;  // [total_q, num_heads, head_dim] of dtype; may be a state's own buffer
  DType dtype = DType::kFloat32;
  float* lse = nullptr;  // [num_heads, total_q] or null
  int64_t out_stride_token = 0, out_stride_head = 0;
  int64_t lse_stride_head = 0, lse_stride_token = 0;
};

Status merge_states(const MergeCall& call, const RunOptions& options = {});

// The backend table: "cuda" (the cheapest of those that follow, by one cost estimate from the
// call's shape), "cuda/rows" (up to 256 packed rows, query x head of a group, a sequence),
// "cuda/tile", "cuda/hopper" (compute capability 9.0), and always last "cpu".
int num_backends();
const char* backend_name(int index);
// Ok if the named backend can run the call's shape on this machine (`device` as in RunOptions);
// else kUnsupported or kUnavailable naming the parameter. The same predicate serves every phase.
Status backend_supports(const char* name, const AttentionCall& call, int device = -1);

const char* version();

}  // namespace kvtile
