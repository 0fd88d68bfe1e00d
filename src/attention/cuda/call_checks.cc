// Checks of a call's device side; nothing here touches the memory the pointers name.
#include "src/attention/cuda/call_checks.h"

#include <cstdint>

#include "src/core/status.h"

namespace kvtile::cuda {

Status check_even_strides(const char* backend, const PagedCache& cache) {
  struct Stride {
    const char* name;
    int64_t bytes, size;
  };
  for (const Stride& stride : {Stride{"stride_block", cache.stride_block, cache.num_blocks},
                               Stride{"stride_token", cache.stride_token, cache.block_size},
                               Stride{"stride_head", cache.stride_head, cache.num_kv_heads}}) {
    if (stride.size > 1 && stride.bytes % 2 != 0) {
      return unsupported(stride.name, stride.bytes,
                         fmt::format("an even number of bytes on backend {}", backend));
    }
  }
  return {};
}

Status check_call_pointers(const char* backend, const AttentionCall& call, Workspace workspace,
                           const DeviceInfo& device) {
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
        Argument{"workspace", workspace.data, workspace.bytes > 0}}) {
    if (argument.pointer == nullptr) {
      if (argument.required) return invalid(argument.name, "null", "a device pointer");
      continue;
    }
    KVTILE_RETURN_IF_ERROR(check_device_pointer(argument.name, argument.pointer, device));
  }
  if (reinterpret_cast<uintptr_t>(call.cache.pages) % 2 != 0) {
    return unsupported("pages", "an odd address",
                       fmt::format("a 2-byte aligned one on backend {}", backend));
  }
  return {};
}

}  // namespace kvtile::cuda
