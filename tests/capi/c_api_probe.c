/* The C ABI as a C program sees it: the header compiles as C, KVTILE_INIT initialises, and a store
 * followed by attention runs with nothing but the public header. Called by c_api_test.cc. */
#include "tests/capi/c_api_probe.h"

#include <stdlib.h>
#include <string.h>

#include "kvtile/c_api.h"

kvtile_status kvtile_probe(const float* key, const float* value, const float* query, int tokens,
                           float* out, float* lse) {
  kvtile_cache cache = KVTILE_INIT(kvtile_cache);
  cache.format = KVTILE_INIT(kvtile_format);
  kvtile_status status =
      kvtile_parse_preset("turboquant_4bit_nc", 64, KVTILE_KEY_FP8_E4M3, &cache.format);
  if (status != KVTILE_OK) return status;
  kvtile_slot_map map = KVTILE_INIT(kvtile_slot_map);
  status = kvtile_slot_layout(&cache.format, &map);
  if (status != KVTILE_OK) return status;

  cache.layout = KVTILE_HEAD_MAJOR;
  cache.block_size = 16;
  cache.num_kv_heads = 2;
  cache.num_blocks = (tokens + 15) / 16;
  cache.pages_bytes = cache.num_blocks * 16 * 2 * map.slot_bytes;
  cache.pages = malloc((size_t)cache.pages_bytes);
  int64_t* slots = malloc((size_t)tokens * sizeof *slots);
  int32_t* table = malloc((size_t)cache.num_blocks * sizeof *table);
  void* workspace = NULL;
  if (cache.pages == NULL || slots == NULL || table == NULL) {
    status = KVTILE_UNAVAILABLE;
    goto done;
  }
  memset(cache.pages, 0xFF, (size_t)cache.pages_bytes);
  for (int t = 0; t < tokens; ++t) slots[t] = t;
  for (int b = 0; b < cache.num_blocks; ++b) table[b] = b;

  kvtile_encode_call encode = KVTILE_INIT(kvtile_encode_call);
  encode.dtype = KVTILE_FLOAT32;
  encode.key = key;
  encode.value = value;
  encode.num_tokens = tokens;
  encode.slot_mapping = slots;
  encode.cache = cache;
  kvtile_encode_report report = KVTILE_INIT(kvtile_encode_report);
  status = kvtile_encode(&encode, &report);
  if (status != KVTILE_OK || report.tokens != 2 * (int64_t)tokens) goto done;

  const int32_t cu_seqlens_q[2] = {0, 1};
  kvtile_attention_call call = KVTILE_INIT(kvtile_attention_call);
  call.dtype = KVTILE_FLOAT32;
  call.query = query;
  call.out = out;
  call.lse = lse;
  call.num_seqs = 1;
  call.num_heads = 4;
  call.total_q = 1;
  call.softmax_scale = 0.125f;
  call.causal = 1;
  call.cache = cache;
  call.block_table = table;
  call.max_blocks = cache.num_blocks;
  call.cu_seqlens_q = cu_seqlens_q;
  call.seq_lens = &tokens;
  status = kvtile_workspace_bytes(&call, &call.workspace_bytes);
  if (status != KVTILE_OK) goto done;
  workspace = aligned_alloc(64, (call.workspace_bytes + 63) / 64 * 64);
  call.workspace = workspace;
  status = kvtile_attend(&call, NULL);

done:
  free(workspace);
  free(table);
  free(slots);
  free(cache.pages);
  return status;
}
