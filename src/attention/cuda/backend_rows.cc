// The row "cuda/rows" of the backend table: what it supports, and the checks of pointers and stream
// that come before its launches. Without a CUDA build it is unavailable.
#include <cstdint>

#include "src/attention/cuda/backends_cuda.h"
#include "src/core/device.h"
#include "src/core/status.h"

#if defined(KVTILE_CUDA)
#include "src/attention/cuda/rows.h"
#endif

namespace kvtile {
namespace {

#if defined(KVTILE_CUDA)

// Slots are read by 2-byte words.
Status check_even_strides(const PagedCache& cache) {
  struct Stride {
    const char* name;
    int64_t bytes, size;
  };
  for (const Stride& stride : {Stride{"stride_block", cache.stride_block, cache.num_blocks},
                               Stride{"stride_token", cache.stride_token, cache.block_size},
                               Stride{"stride_head", cache.stride_head, cache.num_kv_heads}}) {
    if (stride.size > 1 && stride.bytes % 2 != 0) {
      return unsupported(stride.name, stride.bytes, "an even number of bytes on backend cuda/rows");
    }
  }
  return {};
}

Status supports(const AttentionCall& call) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  KVTILE_RETURN_IF_ERROR(check_even_strides(call.cache));
  return cuda::cuda_rows_supports(call, *device);
}

Status rows_workspace(const AttentionCall& call, const RunOptions&, size_t* bytes) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  return cuda::cuda_rows_workspace_bytes(call, *device, bytes);
}

Status check_pointers(const AttentionCall& call, Workspace workspace, const DeviceInfo& device) {
  struct Argument {
    const char* name;
    const void* pointer;
    bool required;
  };
  const bool cached = call.cache.num_blocks > 0;
  const bool tables = call.num_seqs > 0;
  for (const Argument& argument :
       {Argument{"query", call.query, true}, Argument{"out", call.out, true},
        Argument{"lse", call.lse, false}, Argument{"sinks", call.sinks, false},
        Argument{"pages", call.cache.pages, cached},
        Argument{"block_table", call.block_table, tables && call.max_blocks > 0},
        Argument{"cu_seqlens_q", call.cu_seqlens_q, tables},
        Argument{"seq_lens", call.seq_lens, tables},
        Argument{"first_positions", call.first_positions, false},
        Argument{"chunk_key", call.chunk_key, false},
        Argument{"chunk_value", call.chunk_value, false},
        Argument{"workspace", workspace.data, true}}) {
    if (argument.pointer == nullptr) {
      if (argument.required) return invalid(argument.name, "null", "a device pointer");
      continue;
    }
    KVTILE_RETURN_IF_ERROR(check_device_pointer(argument.name, argument.pointer, device));
  }
  if (reinterpret_cast<uintptr_t>(call.cache.pages) % 2 != 0) {
    return unsupported("pages", "an odd address", "a 2-byte aligned one on backend cuda/rows");
  }
  return {};
}

Status run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
           RunReport* report) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  KVTILE_RETURN_IF_ERROR(check_stream(options.stream, *device));
  if (call.total_q > 0) KVTILE_RETURN_IF_ERROR(check_pointers(call, workspace, *device));
  if (report != nullptr) {
    report->backend = kCudaRowsBackend.name;
    report->num_threads = 0;
  }
  return cuda::cuda_rows_run(call, workspace, *device, static_cast<cudaStream_t>(options.stream));
}

#else

Status unavailable() {
  return Status(StatusCode::kUnavailable,
                "backend: got cuda/rows, wanted one of this build: it was made without CUDA");
}
Status supports(const AttentionCall&) { return unavailable(); }
Status rows_workspace(const AttentionCall&, const RunOptions&, size_t*) { return unavailable(); }
Status run(const AttentionCall&, Workspace, const RunOptions&, RunReport*) { return unavailable(); }

#endif

}  // namespace

const Backend kCudaRowsBackend = {"cuda/rows", supports, rows_workspace, run};

}  // namespace kvtile
