// Partial states for tests of merge_states().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvtile/attention.h"
#include "tests/testing/numbers.h"

namespace kvtile::testing {

// States of total_q x num_heads rows, contiguous, filled by hand.
struct PartialStates {
  PartialStates(int n, int64_t q, int h, int d) : num(n), total_q(q), num_heads(h), head_dim(d) {
    out.resize(static_cast<size_t>(n * q * h * d));
    lse.resize(static_cast<size_t>(n * q * h));
    merged_out.resize(static_cast<size_t>(q * h * d));
    merged_lse.resize(static_cast<size_t>(q * h));
  }

  float* out_row(int state, int64_t token, int head) {
    return out.data() + ((state * total_q + token) * num_heads + head) * head_dim;
  }
  float& lse_of(int state, int64_t token, int head) {
    return lse[static_cast<size_t>((int64_t{state} * num_heads + head) * total_q + token)];
  }
  float merged(int64_t token, int head, int d) const {
    return merged_out[static_cast<size_t>((token * num_heads + head) * head_dim + d)];
  }
  float merged_lse_of(int64_t token, int head) const {
    return merged_lse[static_cast<size_t>(head * total_q + token)];
  }

  MergeCall call() {
    partial.clear();
    for (int i = 0; i < num; ++i) {
      PartialState state;
      state.out = out_row(i, 0, 0);
      state.lse = &lse_of(i, 0, 0);
      partial.push_back(state);
    }
    MergeCall merge;
    merge.states = partial.data();
    merge.num_states = num;
    merge.total_q = total_q;
    merge.num_heads = num_heads;
    merge.head_dim = head_dim;
    merge.out = merged_out.data();
    merge.lse = merged_lse.data();
    return merge;
  }

  int num;
  int64_t total_q;
  int num_heads, head_dim;
  std::vector<float> out, lse, merged_out, merged_lse;
  std::vector<PartialState> partial;
};

inline void fill_random(PartialStates* states, uint64_t seed, double spread) {
  Random random(seed);
  for (float& x : states->out) x = static_cast<float>(random.normal());
  for (float& x : states->lse) x = static_cast<float>(spread * random.normal());
}

}  // namespace kvtile::testing
