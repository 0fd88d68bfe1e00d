// The backend table: one row answers "supported?", "how much workspace?" and "run", so that
// dispatch, planner, tests and plugin cannot disagree. The CPU is the last row. attend() has
// validated the call's shape, strides and workspace before run() is called; what a backend's memory
// must be, run() checks itself before it launches or writes anything.
#pragma once

#include <cstddef>

#include "kvtile/attention.h"
#include "kvtile/run.h"
#include "kvtile/status.h"

namespace kvtile {

struct Backend {
  const char* name;
  Status (*supports)(const AttentionCall& call, const RunOptions& options);
  Status (*workspace_bytes)(const AttentionCall& call, const RunOptions& options, size_t* bytes);
  Status (*run)(const AttentionCall& call, Workspace workspace, const RunOptions& options,
                RunReport* report);
};

extern const Backend kCpuBackend;

}  // namespace kvtile
