// encode_slots (store), decode_slots (read back) and scan_slots (find non-finite metadata).
// Decoding is total: every byte pattern has one defined value, the same in every backend
// (docs/format.md). Encoding follows the TurboQuant store: Zandieh et al., arXiv:2504.19874.
#pragma once

#include <cstdint>
#include <vector>

#include "kvtile/cache.h"
#include "kvtile/run.h"
#include "kvtile/slot.h"
#include "kvtile/status.h"

namespace kvtile {

// What encoding had to bend. A call adds to the counters; the caller zeroes them.
struct EncodeReport {
  int64_t tokens = 0;                  // token-heads written
  int64_t skipped = 0;                 // tokens with a negative slot
  int64_t non_finite_keys = 0;         // token-heads whose key holds NaN or infinity
  int64_t non_finite_values = 0;       // token-heads whose value holds NaN or infinity
  int64_t norms_saturated = 0;         // rotated keys with an L2 norm above 65504
  int64_t key_elements_clamped = 0;    // FP8 elements beyond the flavour's largest magnitude
  int64_t value_elements_clamped = 0;  // value elements beyond +-65504
};

struct EncodeCall {
  const void* key = nullptr;    // [num_tokens, num_kv_heads, head_dim], raw (after RoPE)
  const void* value = nullptr;  // the same shape
  DType dtype = DType::kBFloat16;
  int64_t num_tokens = 0;
  // Strides in elements; 0 = contiguous. The last dimension is contiguous.
  int64_t key_stride_token = 0, key_stride_head = 0;
  int64_t value_stride_token = 0, value_stride_head = 0;
  const int64_t* slot_mapping = nullptr;  // [num_tokens], block * block_size + offset; < 0 = skip
  PagedCache cache;
  // Refuse (kValueOverflow, kNonFinite: token and head named, nothing written) what would
  // otherwise be stored bent and counted.
  bool checked = false;
};

// Two tokens of one call must not name the same slot. Slots out of range: kOutOfRange, nothing
// written.
Status encode_slots(const EncodeCall& call, EncodeReport* report = nullptr,
                    const RunOptions& options = {});

struct DecodeCall {
  PagedCache cache;
  const int64_t* slot_mapping = nullptr;  // [num_tokens]; < 0 writes a row of zeros
  int64_t num_tokens = 0;
  void* key = nullptr;    // [num_tokens, num_kv_heads, head_dim] or null; rotated keys stay in the
  void* value = nullptr;  // Hadamard space unless unrotate_keys. value: the same shape, or null.
  DType dtype = DType::kFloat32;
  bool unrotate_keys = false;
};

Status decode_slots(const DecodeCall& call, const RunOptions& options = {});

enum class SlotField : uint8_t { kNorm = 0, kScale = 1, kZero = 2, kKeyByte = 3 };
const char* slot_field_name(SlotField field);

struct NonFiniteWord {
  int64_t block;
  int token, head;
  SlotField field;
  uint16_t word;
};

// Every non-finite metadata word (and NaN FP8 key byte, first of a slot) in blocks [0, num_blocks),
// in (block, token, head) order; at most max_found are kept, *total counts all.
Status scan_slots(const PagedCache& cache, int64_t max_found, std::vector<NonFiniteWord>* found,
                  int64_t* total, int num_threads = 0);

}  // namespace kvtile
