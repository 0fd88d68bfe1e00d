// The backend table: one row answers "supported?", "how much workspace?" and "run", so that
// dispatch, planner, tests and plugin cannot disagree. Rows are in order of preference; the last is
// the CPU. attend() has validated everything a host can see before run() is called.
#pragma once

#include <cstddef>

#include "kvtile/attention.h"
#include "kvtile/run.h"
#include "kvtile/status.h"

namespace kvtile {

struct Backend {
  const char* name;
  Status (*supports)(const AttentionCall& call);
  Status (*workspace_bytes)(const AttentionCall& call, const RunOptions& options, size_t* bytes);
  Status (*run)(const AttentionCall& call, Workspace workspace, const RunOptions& options,
                RunReport* report);
};

extern const Backend kCpuBackend;

}  // namespace kvtile
