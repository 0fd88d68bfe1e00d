// Names and validity of slot formats. The preset list is presets.inc, and nothing else.
#include "kvtile/slot.h"

#include "src/core/status.h"

namespace kvtile {
namespace {

struct PresetRow {
  const char* name;
  KeyCode key;
  ValueCode value;
};

constexpr PresetRow kPresets[] = {
#define KVTILE_PRESET(name, key, value) {name, key, value},
#include "src/core/presets.inc"
#undef KVTILE_PRESET
};

// Both FP8 flavours belong to the row that lists e4m3.
KeyCode preset_key(KeyCode key) { return key == KeyCode::kFp8E4B15 ? KeyCode::kFp8E4M3 : key; }

const PresetRow* find_row(const SlotFormat& format) {
  for (const PresetRow& row : kPresets) {
    if (row.key == preset_key(format.key) && row.value == format.value) return &row;
  }
  return nullptr;
}

bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

Status check_format(const SlotFormat& format) {
  if (static_cast<int>(format.key) > static_cast<int>(KeyCode::kLloydMax3)) {
    return invalid("key code", static_cast<int>(format.key), "0..3");
  }
  if (static_cast<int>(format.value) > static_cast<int>(ValueCode::kUniform3)) {
    return invalid("value code", static_cast<int>(format.value), "0..1");
  }
  if (find_row(format) == nullptr) {
    return unsupported("preset",
                       fmt::format("{}-bit keys with {}-bit values", key_bits(format.key),
                                   value_bits(format.value)),
                       "k8v4, 4bit_nc, k3v4_nc or 3bit_nc");
  }
  if (format.rotated()) {
    if (!is_power_of_two(format.head_dim) || format.head_dim < kMinRotatedHeadDim ||
        format.head_dim > kMaxHeadDim) {
      return unsupported("head_dim", format.head_dim,
                         "a power of two in 32..512 for rotated (codebook) keys");
    }
  } else if (format.head_dim < 8 || format.head_dim > kMaxHeadDim || format.head_dim % 8 != 0) {
    return unsupported("head_dim", format.head_dim, "a multiple of 8 in 8..512 for FP8 keys");
  }
  return {};
}

Status parse_preset(std::string_view name, int head_dim, SlotFormat* format, KeyCode fp8) {
  if (!is_fp8(fp8)) return invalid("fp8", static_cast<int>(fp8), "e4m3 or e4b15");
  std::string_view bare = name;
  constexpr std::string_view kPrefix = "turboquant_";
  if (bare.substr(0, kPrefix.size()) == kPrefix) bare.remove_prefix(kPrefix.size());
  for (const PresetRow& row : kPresets) {
    if (bare != row.name) continue;
    SlotFormat result{head_dim, is_fp8(row.key) ? fp8 : row.key, row.value, !is_fp8(row.key)};
    KVTILE_RETURN_IF_ERROR(check_format(result));
    *format = result;
    return {};
  }
  return invalid("preset", name, "k8v4, 4bit_nc, k3v4_nc or 3bit_nc");
}

int num_presets() { return static_cast<int>(std::size(kPresets)); }

const char* preset_name(int index) {
  return index >= 0 && index < num_presets() ? kPresets[index].name : "";
}

std::string format_name(const SlotFormat& format) {
  const PresetRow* row = find_row(format);
  if (row == nullptr || format.norm_correction == is_fp8(format.key)) return "custom";
  return format.key == KeyCode::kFp8E4B15 ? std::string(row->name) + "/e4b15" : row->name;
}

}  // namespace kvtile
