// SafetensorsFile: a read-only, memory-mapped view of a safetensors file. The header is validated
// in full before any tensor can be seen: every offset lies inside the file, tensors tile the data
// section without overlap or gap, and each tensor's bytes are what its dtype and shape say. Errors
// are one line and name the file and, where there is one, the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvtile/status.h"

namespace kvtile {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // as written in the file: "BF16", "F16", "F32", "U8", "I32", ...
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // inside the mapping; not aligned to the element in general
  int64_t bytes = 0;

  int64_t num_elements() const;
  std::string shape_text() const;  // "[3, 2, 64]"

  // A copy as a vector of T; T must have the element size of dtype.
  template <typename T>
  std::vector<T> copy() const {
    std::vector<T> result(static_cast<size_t>(bytes) / sizeof(T));
    if (!result.empty()) std::memcpy(result.data(), data, result.size() * sizeof(T));
    return result;
  }
};

class SafetensorsFile {
 public:
  // On failure *out is unchanged.
  static Status open(const std::string& path, SafetensorsFile* out);

  // Null if there is no tensor of that name. Pointers live as long as any copy of this object.
  const SafetensorsTensor* find(std::string_view name) const;
  const std::map<std::string, SafetensorsTensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::shared_ptr<const std::byte> mapping_;
  std::map<std::string, SafetensorsTensor, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

// `text` in double quotes with control characters escaped, so that a name taken from a file cannot
// break an error out of its one line.
std::string quote_name(std::string_view text);
std::string join_numbers(const std::vector<int64_t>& numbers);  // "3, 2, 64"

}  // namespace kvtile
