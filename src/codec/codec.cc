// Codec entry points: validate everything, then run the SIMD kernels over fixed ranges of tokens.
#include "kvtile/codec.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <string_view>

#include "src/codec/codec_cuda.h"
#include "src/codec/codec_kernels.h"
#include "src/core/cpu.h"
#include "src/core/dtype.h"
#include "src/core/float16.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// Tokens a thread takes at a time; fixed, so that counters and bytes do not depend on threads.
constexpr int64_t kTokensPerTask = 256;

bool is_cuda(const RunOptions& options) {
  return options.backend != nullptr && std::string_view(options.backend) == "cuda";
}

Status pick_target(const RunOptions& options, SimdTarget* target) {
  const std::string_view name = options.backend == nullptr ? "cpu" : options.backend;
  if (parse_cpu_backend(name, target)) return {};
  return Status(
      StatusCode::kUnavailable,
      fmt::format("backend: got {}, wanted cuda, cpu or one of its SIMD targets on this machine",
                  name));
}

Status check_slots(const PagedCache& cache, const int64_t* slot_mapping, int64_t num_tokens) {
  if (num_tokens > 0 && slot_mapping == nullptr) {
    return invalid("slot_mapping", "null", "[num_tokens] slots");
  }
  const int64_t limit = cache.num_blocks * cache.block_size;
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (slot_mapping[t] >= limit) {
      return Status(StatusCode::kOutOfRange,
                    fmt::format("slot_mapping[{}]: got {}, wanted < {} ({} blocks of {})", t,
                                slot_mapping[t], limit, cache.num_blocks, cache.block_size));
    }
  }
  return {};
}

Status check_stride(const char* name, int64_t stride, int64_t size, int64_t least) {
  if (size > 1 && stride < least) return invalid(name, stride, fmt::format(">= {}", least));
  return {};
}

void fill_strides(int64_t* token, int64_t* head, int num_heads, int head_dim) {
  if (*head == 0) *head = head_dim;
  if (*token == 0) *token = int64_t{num_heads} * head_dim;
}

void add_counts(const EncodeReport& from, EncodeReport* to) {
  to->tokens += from.tokens;
  to->skipped += from.skipped;
  to->non_finite_keys += from.non_finite_keys;
  to->non_finite_values += from.non_finite_values;
  to->norms_saturated += from.norms_saturated;
  to->key_elements_clamped += from.key_elements_clamped;
  to->value_elements_clamped += from.value_elements_clamped;
}

// What a checked call refuses, found before a byte is written.
Status find_unstorable(const EncodeCall& call) {
  const SlotFormat& format = call.cache.format;
  const double largest_key = format.rotated()                  ? HUGE_VAL
                             : format.key == KeyCode::kFp8E4M3 ? 448.0
                                                               : 1.75;
  for (int64_t t = 0; t < call.num_tokens; ++t) {
    if (call.slot_mapping[t] < 0) continue;
    for (int head = 0; head < call.cache.num_kv_heads; ++head) {
      const int64_t key = t * call.key_stride_token + head * call.key_stride_head;
      const int64_t value = t * call.value_stride_token + head * call.value_stride_head;
      double sum = 0.0;
      for (int d = 0; d < format.head_dim; ++d) {
        const double k = load_element(call.key, key + d, call.dtype);
        const double v = load_element(call.value, value + d, call.dtype);
        if (!std::isfinite(k) || !std::isfinite(v)) {
          return Status(StatusCode::kNonFinite,
                        fmt::format("{}: got {} at token {} head {} coordinate {}, wanted finite",
                                    std::isfinite(k) ? "value" : "key", std::isfinite(k) ? v : k, t,
                                    head, d));
        }
        if (std::abs(k) > largest_key || std::abs(v) > kHalfMax) {
          const bool is_key = std::abs(k) > largest_key;
          return Status(
              StatusCode::kValueOverflow,
              fmt::format("{}: got {} at token {} head {} coordinate {}, wanted at most {}",
                          is_key ? "key" : "value", is_key ? k : v, t, head, d,
                          is_key ? largest_key : double{kHalfMax}));
        }
        sum += k * k;
      }
      if (format.rotated() && std::sqrt(sum) > kHalfMax) {
        return Status(StatusCode::kValueOverflow,
                      fmt::format("key norm: got {} at token {} head {}, wanted at most {}",
                                  std::sqrt(sum), t, head, kHalfMax));
      }
    }
  }
  return {};
}

}  // namespace

Status encode_slots(const EncodeCall& original, EncodeReport* report, const RunOptions& options) {
  EncodeCall call = original;
  KVTILE_RETURN_IF_ERROR(check_cache(call.cache));
  KVTILE_RETURN_IF_ERROR(check_dtype(call.dtype));
  if (call.num_tokens < 0) return invalid("num_tokens", call.num_tokens, ">= 0");
  if (call.num_tokens > 0 && call.key == nullptr) return invalid("key", "null", "an array");
  if (call.num_tokens > 0 && call.value == nullptr) return invalid("value", "null", "an array");
  const int num_kv_heads = call.cache.num_kv_heads;
  const int head_dim = call.cache.format.head_dim;
  fill_strides(&call.key_stride_token, &call.key_stride_head, num_kv_heads, head_dim);
  fill_strides(&call.value_stride_token, &call.value_stride_head, num_kv_heads, head_dim);
  for (auto [name, stride, size] :
       {std::tuple{"key_stride_token", call.key_stride_token, call.num_tokens},
        std::tuple{"value_stride_token", call.value_stride_token, call.num_tokens},
        std::tuple{"key_stride_head", call.key_stride_head, int64_t{num_kv_heads}},
        std::tuple{"value_stride_head", call.value_stride_head, int64_t{num_kv_heads}}}) {
    KVTILE_RETURN_IF_ERROR(check_stride(name, stride, size, head_dim));
  }
  if (is_cuda(options)) return encode_slots_cuda(call, report, options);
  SimdTarget target;
  KVTILE_RETURN_IF_ERROR(pick_target(options, &target));
  KVTILE_RETURN_IF_ERROR(check_slots(call.cache, call.slot_mapping, call.num_tokens));
  if (call.checked) KVTILE_RETURN_IF_ERROR(find_unstorable(call));

  const CodecKernels kernels = codec_kernels(target);
  const int64_t num_tasks = (call.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  EncodeReport total;
#pragma omp parallel num_threads(resolve_num_threads(options.num_threads)) if (num_tasks > 1)
  {
    EncodeReport mine;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const int64_t begin = task * kTokensPerTask;
      kernels.encode(call, begin, std::min(call.num_tokens, begin + kTokensPerTask), &mine);
    }
#pragma omp critical
    add_counts(mine, &total);
  }
  if (report != nullptr) add_counts(total, report);
  return {};
}

Status decode_slots(const DecodeCall& call, const RunOptions& options) {
  KVTILE_RETURN_IF_ERROR(check_cache(call.cache));
  KVTILE_RETURN_IF_ERROR(check_dtype(call.dtype));
  if (call.num_tokens < 0) return invalid("num_tokens", call.num_tokens, ">= 0");
  if (is_cuda(options)) return decode_slots_cuda(call, options);
  SimdTarget target;
  KVTILE_RETURN_IF_ERROR(pick_target(options, &target));
  KVTILE_RETURN_IF_ERROR(check_slots(call.cache, call.slot_mapping, call.num_tokens));

  const CodecKernels kernels = codec_kernels(target);
  const int64_t num_tasks = (call.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const int num_threads = static_cast<int>(
      std::min<int64_t>(resolve_num_threads(options.num_threads), std::max<int64_t>(1, num_tasks)));
  const int64_t scratch_floats = decode_scratch_floats(call.cache.format.head_dim);
  const std::unique_ptr<float[]> scratch(
      new (std::nothrow) float[static_cast<size_t>(scratch_floats * num_threads)]);
  if (scratch == nullptr) {
    return Status(StatusCode::kUnavailable, fmt::format("memory: got none, wanted {} bytes",
                                                        scratch_floats * num_threads * 4));
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
  for (int64_t task = 0; task < num_tasks; ++task) {
    const int64_t begin = task * kTokensPerTask;
    kernels.decode(call, begin, std::min(call.num_tokens, begin + kTokensPerTask),
                   scratch.get() + scratch_floats * omp_get_thread_num());
  }
  return {};
}

const char* slot_field_name(SlotField field) {
  switch (field) {
    case SlotField::kNorm:
      return "norm";
    case SlotField::kScale:
      return "scale";
    case SlotField::kZero:
      return "zero";
    case SlotField::kKeyByte:
      return "key";
  }
  return "unknown";
}

Status scan_slots(const PagedCache& cache, int64_t max_found, std::vector<NonFiniteWord>* found,
                  int64_t* total, int num_threads) {
  KVTILE_RETURN_IF_ERROR(check_cache(cache));
  if (max_found < 0) return invalid("max_found", max_found, ">= 0");
  const SlotFormat& format = cache.format;
  const auto scan_block = [&](int64_t block, auto&& visit) {
    for (int token = 0; token < cache.block_size; ++token) {
      for (int head = 0; head < cache.num_kv_heads; ++head) {
        const std::byte* slot = cache.pages + cache.slot_offset(block, token, head);
        const auto check = [&](SlotField field, int offset) {
          const uint16_t word = load_half_word(slot + offset);
          if ((word & 0x7C00) == 0x7C00) visit(NonFiniteWord{block, token, head, field, word});
        };
        if (format.rotated()) {
          check(SlotField::kNorm, format.norm_offset());
        } else if (format.key == KeyCode::kFp8E4M3) {
          for (int d = 0; d < format.head_dim; ++d) {
            const auto byte = static_cast<uint16_t>(slot[d]);
            if ((byte & 0x7F) != 0x7F) continue;
            visit(NonFiniteWord{block, token, head, SlotField::kKeyByte, byte});
            break;
          }
        }
        check(SlotField::kScale, format.scale_offset());
        check(SlotField::kZero, format.zero_offset());
      }
    }
  };
  int64_t count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count) \
    num_threads(resolve_num_threads(num_threads))
  for (int64_t block = 0; block < cache.num_blocks; ++block) {
    scan_block(block, [&](const NonFiniteWord&) { ++count; });
  }
  *total = count;
  found->clear();
  if (count == 0 || max_found == 0) return {};
  // A second, ordered pass only when there is something to list.
  for (int64_t block = 0; block < cache.num_blocks; ++block) {
    scan_block(block, [&](const NonFiniteWord& word) {
      if (static_cast<int64_t>(found->size()) < max_found) found->push_back(word);
    });
    if (static_cast<int64_t>(found->size()) >= max_found) break;
  }
  return {};
}

}  // namespace kvtile
