// The CUDA rows of the backend table: the engines, the checks of pointers and stream that come
// before their launches, and the choice between them. Nothing here touches the memory the pointers
// name.
#include "src/attention/cuda/backends_cuda.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <utility>

#include "src/attention/cuda/cost.h"
#include "src/attention/cuda/rows.h"
#include "src/attention/cuda/supports.h"
#include "src/attention/cuda/tile_backend.h"
#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr char kAny[] = "cuda";

// What sets an engine apart; the checks before it are shared.
struct Engine {
  const char* name;
  Status (*supports)(const AttentionCall& call, const DeviceInfo& device);
  Status (*workspace_bytes)(const AttentionCall& call, const DeviceInfo& device, size_t* bytes);
  Status (*run)(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                cudaStream_t stream, int64_t* tile_tokens);
};

// The engine for few rows, then those for any number of them: "cuda" takes the first of these that
// supports a call.
constexpr Engine kEngines[] = {
    {cuda::kRowsName, cuda::cuda_rows_supports, cuda::cuda_rows_workspace_bytes,
     [](const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
        cudaStream_t stream,
        int64_t*) { return cuda::cuda_rows_run(call, workspace, device, stream); }},
    {cuda::kTileName, cuda::cuda_tile_supports, cuda::cuda_tile_workspace_bytes,
     cuda::cuda_tile_run},
};
constexpr const Engine& kRows = kEngines[0];

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

Status supports(const Engine& engine, const AttentionCall& call, const RunOptions& options,
                const DeviceInfo** device) {
  KVTILE_RETURN_IF_ERROR(backend_device(engine.name, options.device, device));
  return engine.supports(call, **device);
}

Status workspace_of(const Engine& engine, const AttentionCall& call, const RunOptions& options,
                    size_t* bytes) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(supports(engine, call, options, &device));
  return engine.workspace_bytes(call, *device, bytes);
}

Status run_on(const Engine& engine, const AttentionCall& call, Workspace workspace,
              const RunOptions& options, RunReport* report) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(supports(engine, call, options, &device));
  KVTILE_RETURN_IF_ERROR(check_memory(call, workspace, options, *device));
  int64_t* tile_tokens = nullptr;
  if (report != nullptr) {
    report->backend = engine.name;
    report->num_threads = 0;
    tile_tokens = &report->tile_tokens;
  }
  const CurrentDevice current(*device);
  return engine.run(call, workspace, *device, static_cast<cudaStream_t>(options.stream),
                    tile_tokens);
}

template <size_t kIndex>
constexpr Backend backend_of() {
  return {
      kEngines[kIndex].name,
      [](const AttentionCall& call, const RunOptions& options) {
        const DeviceInfo* device;
        return supports(kEngines[kIndex], call, options, &device);
      },
      [](const AttentionCall& call, const RunOptions& options, size_t* bytes) {
        return workspace_of(kEngines[kIndex], call, options, bytes);
      },
      [](const AttentionCall& call, Workspace workspace, const RunOptions& options,
         RunReport* report) { return run_on(kEngines[kIndex], call, workspace, options, report); }};
}

// The cheaper of the engines that support the call.
Status choose(const AttentionCall& call, const RunOptions& options, const Engine** chosen) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(backend_device(kAny, options.device, &device));
  *chosen = nullptr;
  Status refusal;
  for (const Engine& engine : std::span(kEngines).subspan(1)) {
    refusal = engine.supports(call, *device);
    if (!refusal.ok()) continue;
    *chosen = &engine;
    break;
  }
  if (kRows.supports(call, *device).ok() &&
      (*chosen == nullptr || cuda::rows_are_cheaper(call, *device))) {
    *chosen = &kRows;
  }
  return *chosen != nullptr ? Status() : refusal;
}

Status any_supports(const AttentionCall& call, const RunOptions& options) {
  const Engine* engine;
  return choose(call, options, &engine);
}

Status any_workspace(const AttentionCall& call, const RunOptions& options, size_t* bytes) {
  const Engine* engine;
  KVTILE_RETURN_IF_ERROR(choose(call, options, &engine));
  KVTILE_RETURN_IF_ERROR(workspace_of(*engine, call, options, bytes));
  if (engine == &kRows) return {};
  // A smaller total_q may go to the rows engine and must fit in the same bytes.
  AttentionCall smaller = call;
  const int64_t group = call.num_heads / call.cache.num_kv_heads;
  smaller.total_q = std::min(call.total_q, cuda::kRowsMaxPackedRows / group);
  size_t rows_bytes = 0;
  if (smaller.total_q > 0 && workspace_of(kRows, smaller, options, &rows_bytes).ok()) {
    *bytes = std::max(*bytes, rows_bytes);
  }
  return {};
}

Status any_run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
               RunReport* report) {
  const Engine* engine;
  KVTILE_RETURN_IF_ERROR(choose(call, options, &engine));
  return run_on(*engine, call, workspace, options, report);
}

template <size_t... kIndex>
constexpr std::array<Backend, 1 + sizeof...(kIndex)> backends(std::index_sequence<kIndex...>) {
  return {{{kAny, any_supports, any_workspace, any_run}, backend_of<kIndex>()...}};
}

constexpr auto kBackends = backends(std::make_index_sequence<std::size(kEngines)>());

}  // namespace

std::span<const Backend> cuda_backends() { return kBackends; }

}  // namespace kvtile
