// The CUDA rows of the backend table: each engine by name, and "cuda", which takes the cheaper one.
// Only builds with CUDA have them; on a machine without a device they answer kUnavailable.
#pragma once

#include <span>

#include "src/attention/backends.h"

namespace kvtile {

// "cuda" first.
std::span<const Backend> cuda_backends();

// merge_states() on backend "cuda"; the call's host side is valid.
Status merge_states_cuda(const MergeCall& call, const RunOptions& options);

}  // namespace kvtile
