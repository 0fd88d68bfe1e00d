// Reader of the safetensors container: an 8-byte little-endian header length, a JSON header of
// {name: {dtype, shape, data_offsets}} with optional string metadata, then the data section.
#include "cli/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "src/core/status.h"

namespace kvtile {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
// The cap the format itself sets; a larger length is a corrupt file, not a large one.
constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int64_t kMaxTensorBytes = int64_t{1} << 56;

constexpr std::pair<std::string_view, int> kDTypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
    {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};

int element_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDTypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

Status bad(const std::string& subject, std::string_view field, const std::string& got,
           std::string_view wanted) {
  return invalid(fmt::format("{}: {}", subject, field), got, wanted);
}

std::string shape_string(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", join_numbers(shape));
}

// Reads an array of non-negative integers below kMaxTensorBytes.
bool read_integers(const json& array, std::vector<int64_t>* out) {
  if (!array.is_array()) return false;
  out->clear();
  for (const json& item : array) {
    if (!item.is_number_unsigned()) return false;
    const uint64_t value = item.get<uint64_t>();
    if (value > static_cast<uint64_t>(kMaxTensorBytes)) return false;
    out->push_back(static_cast<int64_t>(value));
  }
  return true;
}

// Replaces long JSON by its beginning, on one line.
std::string excerpt(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

Status map_file(const std::string& path, std::shared_ptr<const std::byte>* mapping, int64_t* size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return bad(path, "file", std::strerror(errno), "a readable safetensors file");
  struct stat info = {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (!regular) {
    ::close(fd);
    return bad(path, "file", "something that is not a regular file", "a safetensors file");
  }
  if (info.st_size < kLengthBytes) {
    ::close(fd);
    return bad(path, "file size", fmt::format("{} bytes", info.st_size),
               "at least 8 (truncated safetensors file?)");
  }
  const size_t bytes = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data == MAP_FAILED)
    return bad(path, "file", std::strerror(error), "a file that can be mapped");
  *mapping = std::shared_ptr<const std::byte>(
      static_cast<const std::byte*>(data),
      [bytes](const std::byte* p) { munmap(const_cast<std::byte*>(p), bytes); });
  *size = info.st_size;
  return {};
}

// One tensor entry against the data section of data_bytes.
Status read_tensor(const std::string& subject, const json& entry, const std::byte* data,
                   int64_t data_bytes, SafetensorsTensor* tensor, int64_t* begin) {
  if (!entry.is_object()) return bad(subject, "entry", excerpt(entry), "an object");
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string() ||
      element_bytes(dtype->get<std::string>()) == 0) {
    return bad(subject, "dtype", dtype == entry.end() ? "nothing" : excerpt(*dtype),
               "a safetensors dtype such as BF16, F16 or F32");
  }
  tensor->dtype = dtype->get<std::string>();
  const auto shape = entry.find("shape");
  if (shape == entry.end() || !read_integers(*shape, &tensor->shape)) {
    return bad(subject, "shape", shape == entry.end() ? "nothing" : excerpt(*shape),
               "an array of sizes");
  }
  int64_t wanted = element_bytes(tensor->dtype);
  for (int64_t dim : tensor->shape) {
    if (dim != 0 && wanted > kMaxTensorBytes / dim) {
      return bad(subject, "shape", excerpt(*shape), "a tensor that fits in memory");
    }
    wanted *= dim;
  }
  std::vector<int64_t> offsets;
  const auto range = entry.find("data_offsets");
  if (range == entry.end() || !read_integers(*range, &offsets) || offsets.size() != 2 ||
      offsets[0] > offsets[1]) {
    return bad(subject, "data_offsets", range == entry.end() ? "nothing" : excerpt(*range),
               "[begin, end] with begin <= end");
  }
  if (offsets[1] > data_bytes) {
    return bad(
        subject, "data_offsets", fmt::format("[{}, {}]", offsets[0], offsets[1]),
        fmt::format("an end within the {} data bytes of the file (truncated file?)", data_bytes));
  }
  tensor->bytes = offsets[1] - offsets[0];
  if (tensor->bytes != wanted) {
    return bad(subject, "data_offsets", fmt::format("{} bytes", tensor->bytes),
               fmt::format("{} for {} {}", wanted, tensor->dtype, shape_string(tensor->shape)));
  }
  tensor->data = data + offsets[0];
  *begin = offsets[0];
  return {};
}

// Parses the header, refusing a key that occurs twice: readers would disagree on which one counts.
Status parse_header(const std::string& path, const char* text, int64_t bytes, json* header) {
  std::set<std::string> names;
  std::string duplicate;
  bool has_duplicate = false;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth == 1 && event == json::parse_event_t::key && !has_duplicate &&
        !names.insert(parsed.get<std::string>()).second) {
      has_duplicate = true;
      duplicate = parsed.get<std::string>();
    }
    return true;
  };
  *header = json::parse(text, text + bytes, check, /*allow_exceptions=*/false);
  if (header->is_discarded() || !header->is_object()) {
    return bad(path, "header", fmt::format("{} bytes that are not a JSON object", bytes),
               "a safetensors header");
  }
  if (has_duplicate) {
    return bad(path, "header", fmt::format("tensor {} twice", quote_name(duplicate)),
               "each name once");
  }
  return {};
}

}  // namespace

std::string quote_name(std::string_view text) {
  return json(text).dump(-1, ' ', true, json::error_handler_t::replace);
}

std::string join_numbers(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t number : numbers) {
    if (!text.empty()) text += ", ";
    text += std::to_string(number);
  }
  return text;
}

int64_t SafetensorsTensor::num_elements() const {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

std::string SafetensorsTensor::shape_text() const { return shape_string(shape); }

const SafetensorsTensor* SafetensorsFile::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Status SafetensorsFile::open(const std::string& path, SafetensorsFile* out) {
  SafetensorsFile file;
  file.path_ = path;
  int64_t file_bytes = 0;
  KVTILE_RETURN_IF_ERROR(map_file(path, &file.mapping_, &file_bytes));
  const std::byte* base = file.mapping_.get();

  uint64_t header_bytes = 0;
  for (int i = 0; i < kLengthBytes; ++i) {
    header_bytes |= static_cast<uint64_t>(base[i]) << (8 * i);
  }
  const int64_t room = std::min(file_bytes - kLengthBytes, kMaxHeaderBytes);
  if (header_bytes > static_cast<uint64_t>(room)) {
    return bad(path, "header length", fmt::format("{}", header_bytes),
               fmt::format("at most {} in a file of {} bytes (truncated, or not safetensors?)",
                           room, file_bytes));
  }
  json header;
  KVTILE_RETURN_IF_ERROR(parse_header(path, reinterpret_cast<const char*>(base) + kLengthBytes,
                                      static_cast<int64_t>(header_bytes), &header));

  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(header_bytes);
  const int64_t data_bytes = file_bytes - data_begin;
  std::vector<std::pair<int64_t, const SafetensorsTensor*>> order;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) return bad(path, name, excerpt(entry), "an object of strings");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) {
          return bad(path, fmt::format("__metadata__ {}", quote_name(key)), excerpt(value),
                     "a string");
        }
        file.metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    SafetensorsTensor tensor;
    tensor.name = name;
    int64_t begin = 0;
    KVTILE_RETURN_IF_ERROR(read_tensor(fmt::format("{}: tensor {}", path, quote_name(name)), entry,
                                       base + data_begin, data_bytes, &tensor, &begin));
    order.emplace_back(begin, &(file.tensors_[name] = std::move(tensor)));
  }

  // Tensors must tile the data section: overlap would let one name change another's bytes, and a
  // gap or tail is data nobody declared.
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second->bytes) < std::pair(b.first, b.second->bytes);
  });
  int64_t end = 0;
  for (const auto& [begin, tensor] : order) {
    if (begin != end) {
      return bad(fmt::format("{}: tensor {}", path, quote_name(tensor->name)), "data_offsets",
                 fmt::format("begin {}", begin),
                 fmt::format("{} ({})", end,
                             begin < end ? "it overlaps the tensor before it"
                                         : "there is a gap before it"));
    }
    end = begin + tensor->bytes;
  }
  if (end != data_bytes) {
    return bad(path, "file size", fmt::format("{} bytes", file_bytes),
               fmt::format("{}, the end of the last tensor", data_begin + end));
  }
  *out = std::move(file);
  return {};
}

}  // namespace kvtile
