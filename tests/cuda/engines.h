// The engines that every parametrised GPU test runs over, and the options that name one.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "kvtile/attention.h"

namespace kvtile::testing {

inline RunOptions backend(const char* name) {
  RunOptions options;
  options.backend = name;
  return options;
}

// The rows of the backend table that name one engine, as far as this device has it.
inline std::vector<const char*> engines() {
  int major = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  std::vector<const char*> names = {"cuda/rows", "cuda/tile"};
  if (major == 9) names.push_back("cuda/hopper");
  return names;
}

inline std::vector<const char*> engines_and_choice() {
  std::vector<const char*> names = engines();
  names.insert(names.begin(), "cuda");
  return names;
}

}  // namespace kvtile::testing
