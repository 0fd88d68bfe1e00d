// Inputs of the benchmarks: reproducible noise, packed caches with shuffled pages, and enough
// copies of them that a run rotating through the copies does not find its bytes in the L3.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kvtile/cache.h"
#include "kvtile/codec.h"

namespace kvtile::bench {

inline constexpr int kBlockSize = 16;

inline std::vector<float> noise(size_t count, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random);
  return values;
}

// bf16 words: the upper half of an fp32 word, rounded toward zero.
inline std::vector<uint16_t> bf16_noise(size_t count, uint32_t seed) {
  const std::vector<float> values = noise(count, seed);
  const auto* words = reinterpret_cast<const uint32_t*>(values.data());
  std::vector<uint16_t> halves(count);
  std::transform(words, words + count, halves.begin(),
                 [](uint32_t word) { return static_cast<uint16_t>(word >> 16); });
  return halves;
}

inline int64_t level3_bytes() {
  int64_t bytes = 32 << 20;
  for (const auto& cache : benchmark::CPUInfo::Get().caches) {
    if (cache.level == 3) bytes = cache.size;
  }
  return bytes;
}

// One sequence of num_tokens, encoded from noise.
struct PackedSequence {
  std::vector<std::byte> pages;
  std::vector<int32_t> block_table;
  std::vector<int64_t> slots;  // of each token
  PagedCache cache;

  PackedSequence(const SlotFormat& format, int64_t num_tokens, int num_kv_heads, uint32_t seed) {
    const int64_t num_blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
    pages.resize(num_blocks * kBlockSize * num_kv_heads * format.slot_bytes());
    cache = make_cache(pages.data(), num_blocks, kBlockSize, num_kv_heads, format);
    block_table.resize(num_blocks);
    std::iota(block_table.begin(), block_table.end(), 0);
    std::shuffle(block_table.begin(), block_table.end(), std::minstd_rand(seed + 1));
    slots.resize(num_tokens);
    for (int64_t i = 0; i < num_tokens; ++i) {
      slots[i] = int64_t{block_table[i / kBlockSize]} * kBlockSize + i % kBlockSize;
    }
  }

  EncodeCall encode_call(const void* key, const void* value, DType dtype) const {
    EncodeCall call;
    call.key = key;
    call.value = value;
    call.dtype = dtype;
    call.num_tokens = static_cast<int64_t>(slots.size());
    call.slot_mapping = slots.data();
    call.cache = cache;
    return call;
  }
};

inline benchmark::Counter per_second(double amount) {
  return benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate);
}

}  // namespace kvtile::bench
