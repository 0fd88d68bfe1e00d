// SlotFormat: the packed record of one token of one KV head, and the only owner of its byte
// offsets. A slot is [key codes | norm fp16 | value codes | scale fp16 | zero fp16], rounded up to
// even bytes; FP8 keys carry no norm. docs/format.md has the byte map and a worked example.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvtile/status.h"

namespace kvtile {

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
const char* dtype_name(DType dtype);

// The two FP8 flavours share a width but not a meaning (byte 0x38 is 1.0 or 1/256): the flavour is
// part of the descriptor and never inferred from a device.
enum class KeyCode : uint8_t { kFp8E4M3 = 0, kFp8E4B15 = 1, kLloydMax4 = 2, kLloydMax3 = 3 };
enum class ValueCode : uint8_t { kUniform4 = 0, kUniform3 = 1 };

constexpr int key_bits(KeyCode code) {
  return code == KeyCode::kLloydMax4 ? 4 : code == KeyCode::kLloydMax3 ? 3 : 8;
}
constexpr int value_bits(ValueCode code) { return code == ValueCode::kUniform4 ? 4 : 3; }
constexpr bool is_fp8(KeyCode code) {
  return code == KeyCode::kFp8E4M3 || code == KeyCode::kFp8E4B15;
}

struct SlotFormat {
  int head_dim = 0;
  KeyCode key = KeyCode::kLloydMax4;
  ValueCode value = ValueCode::kUniform4;
  // The looked-up key vector is rescaled to unit length before the norm is applied ("nc").
  bool norm_correction = true;

  // Rotated keys are stored in the Hadamard space and met by a rotated query; FP8 keys are not.
  constexpr bool rotated() const { return !is_fp8(key); }
  constexpr int key_bytes() const { return head_dim * key_bits(key) / 8; }
  constexpr int value_bytes() const { return head_dim * value_bits(value) / 8; }
  constexpr int norm_offset() const { return key_bytes(); }
  constexpr int value_offset() const { return key_bytes() + (rotated() ? 2 : 0); }
  constexpr int scale_offset() const { return value_offset() + value_bytes(); }
  constexpr int zero_offset() const { return scale_offset() + 2; }
  constexpr int slot_bytes() const { return (zero_offset() + 2 + 1) & ~1; }

  friend bool operator==(const SlotFormat&, const SlotFormat&) = default;
};

// Codes are packed little-endian in runs of eight coordinates, so every field of eight starts on a
// byte: head_dim must be a multiple of 8, and a power of two in [32, 512] for rotated keys.
inline constexpr int kMinRotatedHeadDim = 32;
inline constexpr int kMaxHeadDim = 512;

// kInvalidArgument or kUnsupported naming the field; Ok for exactly the combinations of
// presets.inc (either FP8 flavour, norm correction on or off).
Status check_format(const SlotFormat& format);

// Names: k8v4, 4bit_nc, k3v4_nc, 3bit_nc, each with or without the prefix "turboquant_".
// `fp8` is used by k8v4 only and must be an FP8 code.
Status parse_preset(std::string_view name, int head_dim, SlotFormat* format,
                    KeyCode fp8 = KeyCode::kFp8E4M3);

int num_presets();
const char* preset_name(int index);  // in the order above, without the prefix
// The preset's name, with "/e4b15" appended for that flavour; "custom" if no preset matches.
std::string format_name(const SlotFormat& format);

}  // namespace kvtile
