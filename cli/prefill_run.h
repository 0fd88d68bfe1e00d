// One layer through a chunked prefill, as an engine does it: each chunk attends over the packed
// past and its own raw rows, then is stored. Memory is the packed cache, one chunk and the
// workspace; none of the rest grows with the context.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cli/prefill_check.h"
#include "cli/prefill_source.h"
#include "kvtile/codec.h"

namespace kvtile {

struct PrefillPlan {
  SlotFormat format;
  PageLayout layout = PageLayout::kTokenMajor;
  int block_size = 16;
  int64_t context = 0;  // tokens taken from the source
  int64_t chunk = 0;
  int64_t tile_tokens = 0;
  float softmax_scale = 0;
  float softcap = 0;
  int64_t window = 0;
  DType dtype = DType::kFloat32;  // of queries, outputs and raw chunk in attend()
  const char* backend = nullptr;
  int num_threads = 1;
  bool last_chunk_only = false;  // store everything before the last chunk without attending
  bool check = true;
  int64_t check_rows = 0;  // 0 = as many as take seconds
};

struct PrefillResult {
  std::string backend;
  int64_t tile_tokens = 0;
  int64_t query_tokens = 0;
  int64_t visible_pairs = 0;  // (query token, visible key) pairs, for each query head
  double attend_seconds = 0, encode_seconds = 0, fill_seconds = 0;
  int64_t cache_bytes = 0, dense_cache_bytes = 0;
  // 16-bit buffers of a form that decodes the whole past at once: keys and values decoded, and a
  // joined copy of each with the chunk.
  int64_t one_shot_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t peak_rss_bytes = 0;  // when the last chunk was stored
  EncodeReport encode;
  PrefillErrors errors;
};

// Called with a label and (done, total); the totals differ between labels.
using ProgressFn = std::function<void(std::string_view, int64_t, int64_t)>;

Status run_prefill(const LayerSource& source, const PrefillPlan& plan, const ProgressFn& progress,
                   PrefillResult* result);

}  // namespace kvtile
