/* C ABI of kvtile. Plain structs, each opened by its own size for growth: set `size` to
 * sizeof(struct) (the KVTILE_INIT macro does) and zero the rest; fields added later read as zero
 * from older callers. A size the library does not know is KVTILE_INVALID_ARGUMENT naming both.
 * Every function returns a kvtile_status and never throws, prints or aborts; the text of the last
 * failure of the calling thread is kvtile_last_error(). Shapes, units and rules are those of
 * kvtile/attention.h and kvtile/codec.h. */
#ifndef KVTILE_C_API_H_
#define KVTILE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KVTILE_API
#else
#define KVTILE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVTILE_ABI_VERSION 1

/* Zero-initialises a struct and states its size: kvtile_cache cache = KVTILE_INIT(kvtile_cache); */
#ifdef __cplusplus
#define KVTILE_INIT(type)       \
  ([] {                         \
    type zeroed{};              \
    zeroed.size = sizeof(type); \
    return zeroed;              \
  }())
#else
#define KVTILE_INIT(type) ((type){.size = sizeof(type)})
#endif

typedef enum kvtile_status {
  KVTILE_OK = 0,
  KVTILE_INVALID_ARGUMENT = 1,
  KVTILE_UNSUPPORTED = 2,
  KVTILE_WORKSPACE_TOO_SMALL = 3,
  KVTILE_OUT_OF_RANGE = 4,
  KVTILE_VALUE_OVERFLOW = 5,
  KVTILE_NON_FINITE = 6,
  KVTILE_UNAVAILABLE = 7
} kvtile_status;

enum { KVTILE_FLOAT32 = 0, KVTILE_FLOAT16 = 1, KVTILE_BFLOAT16 = 2 };
enum {
  KVTILE_KEY_FP8_E4M3 = 0,
  KVTILE_KEY_FP8_E4B15 = 1,
  KVTILE_KEY_LLOYD_MAX4 = 2,
  KVTILE_KEY_LLOYD_MAX3 = 3
};
enum { KVTILE_VALUE_UNIFORM4 = 0, KVTILE_VALUE_UNIFORM3 = 1 };
enum { KVTILE_TOKEN_MAJOR = 0, KVTILE_HEAD_MAJOR = 1, KVTILE_STRIDED = 2 };

typedef struct kvtile_format {
  uint32_t size;
  int32_t head_dim;
  int32_t key;   /* KVTILE_KEY_* */
  int32_t value; /* KVTILE_VALUE_* */
  int32_t norm_correction;
} kvtile_format;

/* Byte map of one slot; norm_offset is -1 for FP8 keys. */
typedef struct kvtile_slot_map {
  uint32_t size;
  int32_t key_bytes, norm_offset, value_offset, scale_offset, zero_offset, slot_bytes;
} kvtile_slot_map;

typedef struct kvtile_cache {
  uint32_t size;
  int32_t layout; /* KVTILE_TOKEN_MAJOR, ... */
  void* pages;
  int64_t pages_bytes; /* 0 = not stated */
  int64_t num_blocks;
  int32_t block_size;
  int32_t num_kv_heads;
  int64_t stride_block, stride_token, stride_head; /* bytes; all 0 = dense in `layout` order */
  kvtile_format format;
} kvtile_cache;

typedef struct kvtile_encode_report {
  uint32_t size;
  int64_t tokens, skipped, non_finite_keys, non_finite_values, norms_saturated,
      key_elements_clamped, value_elements_clamped;
} kvtile_encode_report;

typedef struct kvtile_encode_call {
  uint32_t size;
  int32_t dtype;
  const void* key;
  const void* value;
  int64_t num_tokens;
  int64_t key_stride_token, key_stride_head, value_stride_token, value_stride_head;
  const int64_t* slot_mapping;
  kvtile_cache cache;
  int32_t checked;
  int32_t num_threads;
  const char* backend; /* null = "cpu" */
  void* stream;
  int32_t device_plus_one; /* CUDA ordinal + 1; 0 = the calling thread's current device */
  int32_t reserved;
} kvtile_encode_call;

typedef struct kvtile_decode_call {
  uint32_t size;
  int32_t dtype;
  kvtile_cache cache;
  const int64_t* slot_mapping;
  int64_t num_tokens;
  void* key;
  void* value;
  int32_t unrotate_keys;
  int32_t num_threads;
  const char* backend; /* null = "cpu" */
  void* stream;
  int32_t device_plus_one;
  int32_t reserved;
} kvtile_decode_call;

typedef struct kvtile_attention_call {
  uint32_t size;
  int32_t dtype;
  const void* query;
  void* out;
  float* lse;
  int32_t num_seqs;
  int32_t num_heads;
  int64_t total_q;
  float softmax_scale;
  float softcap;
  const float* sinks;
  int32_t causal;
  int32_t batch_invariant; /* as AttentionCall::batch_invariant */
  int64_t window;
  kvtile_cache cache;
  const int32_t* block_table;
  int64_t max_blocks;
  int64_t block_table_stride;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int32_t* first_positions;
  const void* chunk_key;
  const void* chunk_value;
  int64_t query_stride_token, query_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t chunk_key_stride_token, chunk_key_stride_head;
  int64_t chunk_value_stride_token, chunk_value_stride_head;
  int64_t lse_stride_head, lse_stride_token;
  int64_t tile_tokens;
  int64_t max_q_len;
  int64_t max_seq_len;
  /* Run options. */
  const char* backend; /* null = "cpu"; "cuda" = the cheaper CUDA engine */
  int32_t num_threads;
  int32_t device_plus_one; /* CUDA ordinal + 1; 0 = the calling thread's current device */
  void* stream;            /* cudaStream_t; null = the default stream */
  void* workspace;         /* 64-byte aligned */
  size_t workspace_bytes;
} kvtile_attention_call;

typedef struct kvtile_run_report {
  uint32_t size;
  int32_t num_threads;
  const char* backend;
  size_t workspace_bytes;
  int64_t tile_tokens;
} kvtile_run_report;

typedef struct kvtile_partial_state {
  uint32_t size;
  const float* out;
  const float* lse;
  int64_t out_stride_token, out_stride_head, lse_stride_head, lse_stride_token;
} kvtile_partial_state;

typedef struct kvtile_merge_call {
  uint32_t size;
  int32_t dtype;
  const kvtile_partial_state* states;
  int32_t num_states;
  int32_t num_heads;
  int64_t total_q;
  int32_t head_dim;
  int32_t num_threads;
  void* out;
  float* lse;
  int64_t out_stride_token, out_stride_head, lse_stride_head, lse_stride_token;
  const char* backend; /* null = "cpu" */
  void* stream;
  int32_t device_plus_one;
  int32_t reserved;
} kvtile_merge_call;

/* A CUDA device as the library sees it; copy_gb_per_s counts bytes read plus bytes written. */
typedef struct kvtile_device {
  uint32_t size;
  int32_t arch; /* 10 * major + minor */
  int32_t num_sms;
  int32_t shared_bytes_per_block; /* the most one block may have */
  int32_t shared_bytes_per_sm;
  int32_t copy_rate_measured; /* 0: derived from the memory clock */
  int64_t l2_bytes, memory_bytes;
  double copy_gb_per_s;
  const char* name; /* valid for the life of the process */
} kvtile_device;

KVTILE_API const char* kvtile_version(void);
KVTILE_API int kvtile_abi_version(void);
/* Text of the calling thread's last failure, "" if none; valid until its next kvtile call. */
KVTILE_API const char* kvtile_last_error(void);
KVTILE_API const char* kvtile_status_name(kvtile_status status);

KVTILE_API int kvtile_num_presets(void);
KVTILE_API const char* kvtile_preset_name(int index);
/* `fp8` is KVTILE_KEY_FP8_E4M3 or _E4B15 and is used by k8v4 only. */
KVTILE_API kvtile_status kvtile_parse_preset(const char* name, int head_dim, int fp8,
                                             kvtile_format* format);
KVTILE_API kvtile_status kvtile_slot_layout(const kvtile_format* format, kvtile_slot_map* map);
/* Writes the cache's one-line descriptor and its NUL into buffer; *needed gets the full size. */
KVTILE_API kvtile_status kvtile_cache_descriptor(const kvtile_cache* cache, char* buffer,
                                                 size_t buffer_bytes, size_t* needed);
KVTILE_API kvtile_status kvtile_match_descriptor(const kvtile_cache* cache, const char* descriptor);

KVTILE_API kvtile_status kvtile_encode(const kvtile_encode_call* call,
                                       kvtile_encode_report* report);
KVTILE_API kvtile_status kvtile_decode(const kvtile_decode_call* call);
KVTILE_API kvtile_status kvtile_workspace_bytes(const kvtile_attention_call* call, size_t* bytes);
KVTILE_API kvtile_status kvtile_attend(const kvtile_attention_call* call,
                                       kvtile_run_report* report);
KVTILE_API kvtile_status kvtile_merge(const kvtile_merge_call* call);

/* CUDA devices of this process; 0 without a CUDA build, driver or device. */
KVTILE_API int kvtile_num_devices(void);
/* KVTILE_UNSUPPORTED for an architecture this build has no code for. */
KVTILE_API kvtile_status kvtile_device_info(int ordinal, kvtile_device* device);

KVTILE_API int kvtile_num_backends(void);
KVTILE_API const char* kvtile_backend_name(int index);
KVTILE_API kvtile_status kvtile_backend_supports(const char* backend,
                                                 const kvtile_attention_call* call);

#ifdef __cplusplus
}
#endif
#endif /* KVTILE_C_API_H_ */
