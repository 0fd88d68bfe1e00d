// Shape checks and defaults shared by every entry point that takes an AttentionCall.
#pragma once

#include "kvtile/attention.h"
#include "kvtile/status.h"

namespace kvtile {

// Everything a call states about its shape; reads no array.
Status check_shape(const AttentionCall& call);

// The call with strides and tile_tokens filled in: 0 becomes what it stands for.
AttentionCall with_defaults(const AttentionCall& call);

}  // namespace kvtile
