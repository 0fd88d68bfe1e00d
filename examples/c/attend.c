/* The whole cycle in C: pack a sequence of keys and values into a paged cache, run a continuation
 * chunk over the packed past with the chunk's own keys and values raw, and check the result against
 * attention computed here, in double, from what the cache decodes to. Prints one line; exits 0 when
 * they agree. */
#include <kvtile/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 4, kKvHeads = 2, kHeadDim = 64, kBlockSize = 16, kCached = 100, kChunk = 5 };
enum { kTokens = kCached + kChunk, kBlocks = (kTokens + kBlockSize - 1) / kBlockSize };

static void check(kvtile_status status, const char* what) {
  if (status == KVTILE_OK) return;
  fprintf(stderr, "%s: %s\n", what, kvtile_last_error());
  exit(1);
}

/* Fills x with values in [-1, 1) from a small linear congruential generator. */
static void fill(float* x, int n, unsigned seed) {
  for (int i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

int main(void) {
  static float key[kTokens * kKvHeads * kHeadDim], value[kTokens * kKvHeads * kHeadDim];
  static float query[kChunk * kHeads * kHeadDim], out[kChunk * kHeads * kHeadDim];
  static float lse[kHeads * kChunk];
  fill(key, kTokens * kKvHeads * kHeadDim, 1);
  fill(value, kTokens * kKvHeads * kHeadDim, 2);
  fill(query, kChunk * kHeads * kHeadDim, 3);

  kvtile_cache cache = KVTILE_INIT(kvtile_cache);
  cache.format = KVTILE_INIT(kvtile_format);
  check(kvtile_parse_preset("4bit_nc", kHeadDim, KVTILE_KEY_FP8_E4M3, &cache.format), "preset");
  kvtile_slot_map map = KVTILE_INIT(kvtile_slot_map);
  check(kvtile_slot_layout(&cache.format, &map), "slot layout");
  cache.layout = KVTILE_TOKEN_MAJOR;
  cache.num_blocks = kBlocks;
  cache.block_size = kBlockSize;
  cache.num_kv_heads = kKvHeads;
  cache.pages_bytes = (int64_t)kBlocks * kBlockSize * kKvHeads * map.slot_bytes;
  cache.pages = calloc(1, (size_t)cache.pages_bytes);

  /* Store the cached tokens; the pages are used in reverse order to show the block table. */
  int64_t slots[kTokens];
  int32_t block_table[kBlocks];
  for (int b = 0; b < kBlocks; ++b) block_table[b] = kBlocks - 1 - b;
  for (int t = 0; t < kTokens; ++t) {
    slots[t] = (int64_t)block_table[t / kBlockSize] * kBlockSize + t % kBlockSize;
  }
  kvtile_encode_call store = KVTILE_INIT(kvtile_encode_call);
  store.dtype = KVTILE_FLOAT32;
  store.key = key;
  store.value = value;
  store.num_tokens = kCached;
  store.slot_mapping = slots;
  store.cache = cache;
  check(kvtile_encode(&store, NULL), "encode");

  const int32_t cu_seqlens_q[2] = {0, kChunk}, seq_lens[1] = {kTokens};
  kvtile_attention_call call = KVTILE_INIT(kvtile_attention_call);
  call.dtype = KVTILE_FLOAT32;
  call.query = query;
  call.out = out;
  call.lse = lse;
  call.num_seqs = 1;
  call.num_heads = kHeads;
  call.total_q = kChunk;
  call.softmax_scale = 0.125f; /* 1 / sqrt(head_dim) */
  call.causal = 1;
  call.cache = cache;
  call.block_table = block_table;
  call.max_blocks = kBlocks;
  call.cu_seqlens_q = cu_seqlens_q;
  call.seq_lens = seq_lens;
  call.chunk_key = key + kCached * kKvHeads * kHeadDim;
  call.chunk_value = value + kCached * kKvHeads * kHeadDim;
  check(kvtile_workspace_bytes(&call, &call.workspace_bytes), "workspace_bytes");
  call.workspace = aligned_alloc(64, (call.workspace_bytes + 63) / 64 * 64);
  kvtile_run_report report = KVTILE_INIT(kvtile_run_report);
  check(kvtile_attend(&call, &report), "attend");

  /* Read the cached tokens back and overwrite the raw copies: what attend() must have seen. */
  kvtile_decode_call load = KVTILE_INIT(kvtile_decode_call);
  load.dtype = KVTILE_FLOAT32;
  load.cache = cache;
  load.slot_mapping = slots;
  load.num_tokens = kCached;
  load.key = key;
  load.value = value;
  load.unrotate_keys = 1;
  check(kvtile_decode(&load), "decode");

  double worst = 0.0;
  for (int i = 0; i < kChunk; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      const int kv = h / (kHeads / kKvHeads), visible = kCached + i + 1;
      double sum = 0.0, expected[kHeadDim] = {0};
      for (int t = 0; t < visible; ++t) {
        double score = 0.0;
        for (int d = 0; d < kHeadDim; ++d) {
          score += (double)query[(i * kHeads + h) * kHeadDim + d] *
                   (double)key[(t * kKvHeads + kv) * kHeadDim + d];
        }
        const double weight = exp(0.125 * score);
        sum += weight;
        for (int d = 0; d < kHeadDim; ++d) {
          expected[d] += weight * (double)value[(t * kKvHeads + kv) * kHeadDim + d];
        }
      }
      for (int d = 0; d < kHeadDim; ++d) {
        const double error = fabs(expected[d] / sum - (double)out[(i * kHeads + h) * kHeadDim + d]);
        if (error > worst) worst = error;
      }
    }
  }
  printf("kvtile %s, %s: %d + %d tokens, %lld bytes packed, workspace %zu bytes, max error %.1e\n",
         kvtile_version(), report.backend, kCached, kChunk, (long long)cache.pages_bytes,
         report.workspace_bytes, worst);
  free(call.workspace);
  free(cache.pages);
  return worst < 1e-5 ? 0 : 1;
}
