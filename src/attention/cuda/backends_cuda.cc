// The CUDA rows of the backend table: what each supports, the checks of pointers and stream that
// come before its launches, and the choice between the engines. Nothing here touches the memory the
// pointers name.
#include "src/attention/cuda/backends_cuda.h"

#include <algorithm>
#include <cstdint>

#include "src/attention/cuda/cost.h"
#include "src/attention/cuda/rows.h"
#include "src/attention/cuda/tile_backend.h"
#include "src/core/cache_params.h"
#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr char kAny[] = "cuda", kRows[] = "cuda/rows", kTile[] = "cuda/tile",
               kHopper[] = "cuda/hopper";

Status rows_device(const AttentionCall& call, const RunOptions& options,
                   const DeviceInfo** device) {
  KVTILE_RETURN_IF_ERROR(backend_device(kRows, options.device, device));
  KVTILE_RETURN_IF_ERROR(cuda::check_word_cache(call.cache, kRows));
  KVTILE_RETURN_IF_ERROR(cuda::check_packed_rows(call));
  return cuda::cuda_rows_supports(call, **device);
}

template <cuda::TileEngine kEngine>
constexpr const char* tile_name() {
  return kEngine == cuda::TileEngine::kHopper ? kHopper : kTile;
}

template <cuda::TileEngine kEngine>
Status tile_device(const AttentionCall& call, const RunOptions& options,
                   const DeviceInfo** device) {
  KVTILE_RETURN_IF_ERROR(backend_device(tile_name<kEngine>(), options.device, device));
  KVTILE_RETURN_IF_ERROR(cuda::check_word_cache(call.cache, tile_name<kEngine>()));
  return cuda::cuda_tile_supports(kEngine, call, **device);
}

Status check_pointers(const AttentionCall& call, Workspace workspace, const DeviceInfo& device) {
  struct Argument {
    const char* name;
    const void* pointer;
    bool required;
  };
  const bool tables = call.num_seqs > 0;
  for (const Argument& argument :
       {Argument{"query", call.query, true}, Argument{"out", call.out, true},
        Argument{"lse", call.lse, false}, Argument{"sinks", call.sinks, false},
        Argument{"pages", call.cache.pages, call.cache.num_blocks > 0},
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
  return {};
}

Status check_memory(const AttentionCall& call, Workspace workspace, const RunOptions& options,
                    const DeviceInfo& device) {
  KVTILE_RETURN_IF_ERROR(check_stream(options.stream, device));
  return call.total_q > 0 ? check_pointers(call, workspace, device) : Status();
}

void fill_report(const char* backend, RunReport* report) {
  if (report == nullptr) return;
  report->backend = backend;
  report->num_threads = 0;
}

Status rows_supports(const AttentionCall& call, const RunOptions& options) {
  const DeviceInfo* device;
  return rows_device(call, options, &device);
}

Status rows_workspace(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(rows_device(call, options, &device));
  return cuda::cuda_rows_workspace_bytes(call, *device, bytes);
}

Status rows_run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
                RunReport* report) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(rows_device(call, options, &device));
  KVTILE_RETURN_IF_ERROR(check_memory(call, workspace, options, *device));
  fill_report(kRows, report);
  const CurrentDevice current(*device);
  return cuda::cuda_rows_run(call, workspace, *device, static_cast<cudaStream_t>(options.stream));
}

template <cuda::TileEngine kEngine>
Status tile_supports(const AttentionCall& call, const RunOptions& options) {
  const DeviceInfo* device;
  return tile_device<kEngine>(call, options, &device);
}

template <cuda::TileEngine kEngine>
Status tile_workspace(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(tile_device<kEngine>(call, options, &device));
  return cuda::cuda_tile_workspace_bytes(kEngine, call, *device, bytes);
}

template <cuda::TileEngine kEngine>
Status tile_run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
                RunReport* report) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(tile_device<kEngine>(call, options, &device));
  KVTILE_RETURN_IF_ERROR(check_memory(call, workspace, options, *device));
  fill_report(tile_name<kEngine>(), report);
  const CurrentDevice current(*device);
  return cuda::cuda_tile_run(kEngine, call, workspace, *device,
                             static_cast<cudaStream_t>(options.stream),
                             report != nullptr ? &report->tile_tokens : nullptr);
}

// The cheaper of the engines that support the call.
Status choose(const AttentionCall& call, const RunOptions& options, const Backend** engine) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(backend_device(kAny, options.device, &device));
  const Backend* tile = cuda::cheaper_tile(*device) == cuda::TileEngine::kHopper
                            ? &kCudaHopperBackend
                            : &kCudaTileBackend;
  const Status rows = rows_supports(call, options), tile_status = tile->supports(call, options);
  if (!rows.ok() && !tile_status.ok()) return tile_status;
  const bool take_rows = rows.ok() && (!tile_status.ok() || cuda::rows_are_cheaper(call, *device));
  *engine = take_rows ? &kCudaRowsBackend : tile;
  return {};
}

Status any_supports(const AttentionCall& call, const RunOptions& options) {
  const Backend* engine;
  return choose(call, options, &engine);
}

Status any_workspace(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  const Backend* engine;
  KVTILE_RETURN_IF_ERROR(choose(call, options, &engine));
  KVTILE_RETURN_IF_ERROR(engine->workspace_bytes(call, options, bytes));
  if (engine == &kCudaRowsBackend) return {};
  // A smaller total_q may go to the rows engine and must fit in the same bytes.
  AttentionCall smaller = call;
  const int64_t group = call.num_heads / call.cache.num_kv_heads;
  smaller.total_q = std::min(call.total_q, cuda::kRowsMaxPackedRows / group);
  size_t rows_bytes = 0;
  if (smaller.total_q > 0 && rows_workspace(smaller, options, &rows_bytes).ok()) {
    *bytes = std::max(*bytes, rows_bytes);
  }
  return {};
}

Status any_run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
               RunReport* report) {
  const Backend* engine;
  KVTILE_RETURN_IF_ERROR(choose(call, options, &engine));
  return engine->run(call, workspace, options, report);
}

}  // namespace

const Backend kCudaBackend = {kAny, any_supports, any_workspace, any_run};
const Backend kCudaRowsBackend = {kRows, rows_supports, rows_workspace, rows_run};
const Backend kCudaTileBackend = {
    kTile, tile_supports<cuda::TileEngine::kPortable>, tile_workspace<cuda::TileEngine::kPortable>,
    tile_run<cuda::TileEngine::kPortable>};
const Backend kCudaHopperBackend = {
    kHopper, tile_supports<cuda::TileEngine::kHopper>, tile_workspace<cuda::TileEngine::kHopper>,
    tile_run<cuda::TileEngine::kHopper>};

}  // namespace kvtile
