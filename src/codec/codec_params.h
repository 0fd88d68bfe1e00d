// What the codec's kernels are given: plain data passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/codec/buckets.h"
#include "src/codec/codebook.h"
#include "src/core/cache_params.h"

namespace kvtile::cuda {

struct EncodeParams {
  CacheParams cache;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t key_stride_token = 0, key_stride_head = 0;  // bytes
  int64_t value_stride_token = 0, value_stride_head = 0;
  const int64_t* slot_mapping = nullptr;
  uint32_t num_items = 0;  // tokens * heads, below 2^31
  FastDivisor head_divisor;
  float inverse_root_dim = 0.0f;  // 1 / sqrt(head_dim), rounded as the CPU rounds it
  bool bfloat16 = true;           // 16-bit rows: bf16, else fp16
  bool early_launch = false;      // the device has programmatic dependent launch
  float slope = 0.0f;             // of `cells`
  CellTable cells;
};

struct DecodeLevels {
  float levels[16];
};

inline DecodeLevels make_decode_levels(const SlotFormat& format) {
  DecodeLevels table = {};
  if (!format.rotated()) return table;
  const Codebook book = make_codebook(format.key, format.head_dim);
  for (int i = 0; i < 16; ++i) table.levels[i] = book.levels[i];
  return table;
}

struct DecodeParams {
  CacheParams cache;
  const int64_t* slot_mapping = nullptr;
  void* key = nullptr;  // [num_tokens, num_kv_heads, head_dim] of dtype, or null
  void* value = nullptr;
  uint32_t num_items = 0;  // tokens * heads, below 2^31
  FastDivisor head_divisor;
  DecodeLevels levels;
  float inverse_root_dim = 0.0f;
  DType dtype = DType::kFloat32;
  bool norm_correction = true;
};

}  // namespace kvtile::cuda
