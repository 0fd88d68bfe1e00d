// attend() and workspace_bytes(): validate once, choose a row of the backend table, run it.
#include "src/attention/attend.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "src/attention/backends.h"
#if defined(KVTILE_CUDA)
#include "src/attention/cuda/backends_cuda.h"
#endif
#include "src/codec/tile_layout.h"
#include "src/core/dtype.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

std::span<const Backend> device_backends() {
#if defined(KVTILE_CUDA)
  return cuda_backends();
#else
  return {};
#endif
}

// The CPU is the last row.
const Backend& backend_row(int index) {
  const std::span<const Backend> devices = device_backends();
  const auto row = static_cast<size_t>(index);
  return row < devices.size() ? devices[row] : kCpuBackend;
}

constexpr uintptr_t kWorkspaceAlignment = 64;

// A row's name, or the CPU's with a SIMD target behind a slash ("cpu/avx2").
const Backend* find_row(std::string_view name) {
  for (int i = 0; i < num_backends(); ++i) {
    if (name == backend_name(i)) return &backend_row(i);
  }
  return name.substr(0, 4) == "cpu/" ? &kCpuBackend : nullptr;
}

Status choose_backend(const AttentionCall& call, const RunOptions& options, const Backend** row) {
  if (options.num_threads < 0) return invalid("num_threads", options.num_threads, ">= 0");
  *row = options.backend == nullptr ? &kCpuBackend : find_row(options.backend);
  if (*row != nullptr) return (*row)->supports(call, options);
  std::string names;
  for (int i = 0; i < num_backends(); ++i) {
    if (!names.empty()) names += ", ";
    names += backend_name(i);
  }
  return Status(
      StatusCode::kUnavailable,
      fmt::format("backend: got {}, wanted one of this build: {}", options.backend, names));
}

Status check_stride(const char* name, int64_t stride, int64_t size, int64_t least) {
  if (stride < 0 || (size > 1 && stride < least)) {
    return invalid(name, stride, fmt::format(">= {}", least));
  }
  return {};
}

// Strides of [total_q, heads, head_dim] arrays that are read may be anything that names elements
// (even 0 after defaults is taken); written ones must not fold rows onto each other.
Status check_row_strides(const char* name, int64_t token, int64_t head, int64_t total_q,
                         int64_t heads, int64_t head_dim) {
  KVTILE_RETURN_IF_ERROR(
      check_stride(fmt::format("{}_stride_token", name).c_str(), token, total_q, head_dim));
  return check_stride(fmt::format("{}_stride_head", name).c_str(), head, heads, head_dim);
}

}  // namespace

Status check_shape(const AttentionCall& call) {
  KVTILE_RETURN_IF_ERROR(check_format(call.cache.format));
  KVTILE_RETURN_IF_ERROR(check_dtype(call.dtype));
  if (call.num_seqs < 0) return invalid("num_seqs", call.num_seqs, ">= 0");
  if (call.total_q < 0 || call.total_q > std::numeric_limits<int32_t>::max()) {
    return invalid("total_q", call.total_q, "0..2147483647");
  }
  if (call.cache.num_kv_heads < 1) {
    return invalid("num_kv_heads", call.cache.num_kv_heads, ">= 1");
  }
  if (call.num_heads < 1 || call.num_heads % call.cache.num_kv_heads != 0) {
    return invalid("num_heads", call.num_heads,
                   fmt::format("a positive multiple of num_kv_heads {}", call.cache.num_kv_heads));
  }
  if (call.cache.block_size < 1) return invalid("block_size", call.cache.block_size, ">= 1");
  if (!std::isfinite(call.softmax_scale)) {
    return invalid("softmax_scale", call.softmax_scale, "a finite number");
  }
  if (!std::isfinite(call.softcap) || call.softcap < 0.0f) {
    return invalid("softcap", call.softcap, "0 (off) or a positive number");
  }
  if (call.mask.window < 0) return invalid("window", call.mask.window, "0 (unlimited) or more");
  if (call.max_blocks < 0) return invalid("max_blocks", call.max_blocks, ">= 0");
  if (call.tile_tokens < 0) return invalid("tile_tokens", call.tile_tokens, ">= 0");
  if (call.max_q_len < 0) return invalid("max_q_len", call.max_q_len, ">= 0");
  if (call.max_seq_len < 0) return invalid("max_seq_len", call.max_seq_len, ">= 0");
  if ((call.chunk_key == nullptr) != (call.chunk_value == nullptr)) {
    return invalid(call.chunk_key == nullptr ? "chunk_key" : "chunk_value", "null",
                   "both chunk_key and chunk_value, or neither");
  }
  return {};
}

AttentionCall with_defaults(const AttentionCall& call) {
  AttentionCall result = call;
  const int64_t head_dim = call.cache.format.head_dim;
  const auto fill = [head_dim](int64_t& token, int64_t& head, int64_t heads) {
    if (head == 0) head = head_dim;
    if (token == 0) token = heads * head_dim;
  };
  fill(result.query_stride_token, result.query_stride_head, call.num_heads);
  fill(result.out_stride_token, result.out_stride_head, call.num_heads);
  fill(result.chunk_key_stride_token, result.chunk_key_stride_head, call.cache.num_kv_heads);
  fill(result.chunk_value_stride_token, result.chunk_value_stride_head, call.cache.num_kv_heads);
  if (result.lse_stride_token == 0) result.lse_stride_token = 1;
  if (result.lse_stride_head == 0) result.lse_stride_head = call.total_q;
  if (result.block_table_stride == 0) result.block_table_stride = call.max_blocks;
  const int64_t tile = call.tile_tokens == 0 ? kDefaultTileTokens : call.tile_tokens;
  result.tile_tokens = round_up64(std::max<int64_t>(tile, kTileTokens), call.cache.block_size);
  return result;
}

Status workspace_bytes(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  KVTILE_RETURN_IF_ERROR(check_shape(call));
  const Backend* row;
  KVTILE_RETURN_IF_ERROR(choose_backend(call, options, &row));
  return row->workspace_bytes(with_defaults(call), options, bytes);
}

Status attend(const AttentionCall& original, Workspace workspace, const RunOptions& options,
              RunReport* report) {
  KVTILE_RETURN_IF_ERROR(check_shape(original));
  KVTILE_RETURN_IF_ERROR(check_cache(original.cache));
  const AttentionCall call = with_defaults(original);
  const Backend* row;
  KVTILE_RETURN_IF_ERROR(choose_backend(call, options, &row));

  const int head_dim = call.cache.format.head_dim;
  const int num_kv_heads = call.cache.num_kv_heads;
  if (call.total_q > 0) {
    if (call.query == nullptr) return invalid("query", "null", "[total_q, num_heads, head_dim]");
    if (call.out == nullptr) return invalid("out", "null", "[total_q, num_heads, head_dim]");
  }
  KVTILE_RETURN_IF_ERROR(check_row_strides("query", call.query_stride_token, call.query_stride_head,
                                           call.total_q, call.num_heads, head_dim));
  KVTILE_RETURN_IF_ERROR(check_row_strides("out", call.out_stride_token, call.out_stride_head,
                                           call.total_q, call.num_heads, head_dim));
  if (call.chunk_key != nullptr) {
    KVTILE_RETURN_IF_ERROR(check_row_strides("chunk_key", call.chunk_key_stride_token,
                                             call.chunk_key_stride_head, call.total_q, num_kv_heads,
                                             head_dim));
    KVTILE_RETURN_IF_ERROR(check_row_strides("chunk_value", call.chunk_value_stride_token,
                                             call.chunk_value_stride_head, call.total_q,
                                             num_kv_heads, head_dim));
  }
  if (call.lse != nullptr && call.total_q > 0) {
    KVTILE_RETURN_IF_ERROR(
        check_stride("lse_stride_token", call.lse_stride_token, call.total_q, 1));
    KVTILE_RETURN_IF_ERROR(
        check_stride("lse_stride_head", call.lse_stride_head, call.num_heads, 1));
  }
  if (call.num_seqs > 1 && call.block_table_stride < call.max_blocks) {
    return invalid("block_table_stride", call.block_table_stride,
                   fmt::format(">= max_blocks {}", call.max_blocks));
  }

  size_t needed = 0;
  KVTILE_RETURN_IF_ERROR(row->workspace_bytes(call, options, &needed));
  if (workspace.bytes < needed) {
    return Status(StatusCode::kWorkspaceTooSmall,
                  fmt::format("workspace: got {} bytes, wanted {}", workspace.bytes, needed));
  }
  if (needed > 0 && (workspace.data == nullptr ||
                     reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0)) {
    return invalid("workspace", workspace.data, "a 64-byte aligned address");
  }
  if (report != nullptr) {
    report->workspace_bytes = needed;
    report->tile_tokens = call.tile_tokens;
  }
  return row->run(call, workspace, options, report);
}

int num_backends() { return static_cast<int>(device_backends().size()) + 1; }

const char* backend_name(int index) {
  return index >= 0 && index < num_backends() ? backend_row(index).name : "";
}

Status backend_supports(const char* name, const AttentionCall& call, int device) {
  KVTILE_RETURN_IF_ERROR(check_shape(call));
  RunOptions options;
  options.backend = name;
  options.device = device;
  const Backend* row;
  return choose_backend(with_defaults(call), options, &row);
}

const char* version() { return KVTILE_VERSION; }

}  // namespace kvtile
