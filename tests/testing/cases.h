// Named lists of attention batches: one axis is swept densely while the others take a few
// awkward values, and random_spec() covers the joint space. The same lists serve every backend.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvtile/slot.h"
#include "tests/testing/generate.h"

namespace kvtile::testing {

// The four presets and the second FP8 flavour.
struct FormatName {
  const char* preset;
  KeyCode fp8;
};
const std::vector<FormatName>& format_names();
std::vector<int> head_dims(const FormatName& name);  // all rotated sizes; FP8 sizes of all residues
std::string format_label(const FormatName& name, int head_dim);

std::vector<AttendSpec> head_dim_cases();
std::vector<AttendSpec> geometry_cases();  // groups, heads, block sizes, layouts, strides
std::vector<AttendSpec> length_cases();    // cached and query lengths around every boundary
std::vector<AttendSpec> mask_cases();
std::vector<AttendSpec> dtype_cases();
AttendSpec random_spec(uint64_t seed);

}  // namespace kvtile::testing
