// Captured and synthetic rows.
#include "cli/prefill_source.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "cli/convert.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// A bijective mixer of 64 bits: xor-shifts and odd multipliers.
inline uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

// The sum of four 16-bit uniforms, centred and scaled to variance 1: close to normal, cut off at
// 3.46 sigma, and exact until the one rounding to bf16.
inline uint16_t normal_bfloat16(uint64_t index, uint64_t stream) {
  const uint64_t x = mix(index + stream);
  const int32_t sum =
      static_cast<int32_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48)) -
      2 * 0xffff;
  // One uniform has variance (2^32 - 1) / 12; four of them sum to this many units per sigma.
  constexpr float kInverseSigma = 1.0f / 37837.227f;
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(sum) * kInverseSigma);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

class SyntheticLayer : public LayerSource {
 public:
  SyntheticLayer(const LayerShape& layer_shape, uint64_t seed, int num_threads)
      : num_threads_(num_threads) {
    shape = layer_shape;
    name = "synthetic";
    for (uint64_t i = 0; i < 3; ++i) streams_[i] = mix(mix(seed) + i + 1) << 1;
  }

  void read_query(int64_t begin, int64_t count, std::byte* query) const override {
    generate(streams_[0], begin, count, shape.query_elements(), query);
  }
  void read_key_value(int64_t begin, int64_t count, std::byte* key,
                      std::byte* value) const override {
    generate(streams_[1], begin, count, shape.kv_elements(), key);
    generate(streams_[2], begin, count, shape.kv_elements(), value);
  }

 private:
  void generate(uint64_t stream, int64_t begin, int64_t count, int64_t elements,
                std::byte* out) const {
    const int64_t first = begin * elements, total = count * elements;
#pragma omp parallel for schedule(static) num_threads(num_threads_)
    for (int64_t i = 0; i < total; ++i) {
      const uint16_t word = normal_bfloat16(static_cast<uint64_t>(first + i), stream);
      std::memcpy(out + 2 * i, &word, sizeof(word));
    }
  }

  int num_threads_;
  uint64_t streams_[3];
};

class CapturedLayer : public LayerSource {
 public:
  CapturedLayer(SafetensorsFile file, const std::string& prefix)
      : file_(std::move(file)),
        query_(file_.find(prefix + "query")),
        key_(file_.find(prefix + "key")),
        value_(file_.find(prefix + "value")) {}

  void read_query(int64_t begin, int64_t count, std::byte* query) const override {
    copy_rows(*query_, begin, count, shape.query_elements(), query);
  }
  void read_key_value(int64_t begin, int64_t count, std::byte* key,
                      std::byte* value) const override {
    copy_rows(*key_, begin, count, shape.kv_elements(), key);
    copy_rows(*value_, begin, count, shape.kv_elements(), value);
  }

  Status check() {
    for (const auto& [tensor, what] :
         {std::pair(query_, "query"), std::pair(key_, "key"), std::pair(value_, "value")}) {
      if (tensor == nullptr) {
        return invalid(file_.path() + ": " + name, fmt::format("no tensor {}", what),
                       "query, key and value");
      }
      if (tensor->shape.size() != 3) {
        return invalid(subject(*tensor) + ": shape", tensor->shape_text(),
                       "[tokens, heads, head_dim]");
      }
      if (!dtype_from_name(tensor->dtype, &shape.dtype)) {
        return invalid(subject(*tensor) + ": dtype", tensor->dtype, "BF16, F16 or F32");
      }
      if (tensor->dtype != query_->dtype) {
        return invalid(subject(*tensor) + ": dtype", tensor->dtype, query_->dtype + " as of query");
      }
    }
    // Counts that fit an int leave room for every product below.
    constexpr int64_t kMaxCount = 1 << 30;
    for (int64_t dim : query_->shape) {
      if (dim < 1 || dim > kMaxCount) {
        return invalid(subject(*query_) + ": shape", query_->shape_text(), "sizes of at least 1");
      }
    }
    const int64_t tokens = query_->shape[0], heads = query_->shape[1], dim = query_->shape[2];
    const int64_t kv_heads = key_->shape[1];
    if (key_->shape[0] != tokens || key_->shape[2] != dim) {
      return invalid(subject(*key_) + ": shape", key_->shape_text(),
                     fmt::format("[{}, num_kv_heads, {}] as of query", tokens, dim));
    }
    if (value_->shape != key_->shape) {
      return invalid(subject(*value_) + ": shape", value_->shape_text(),
                     key_->shape_text() + " as of key");
    }
    if (kv_heads < 1 || heads % kv_heads != 0) {
      return invalid(subject(*key_) + ": num_kv_heads", kv_heads,
                     fmt::format("a divisor of num_heads, {}", heads));
    }
    shape.num_tokens = tokens;
    shape.num_heads = static_cast<int>(heads);
    shape.num_kv_heads = static_cast<int>(kv_heads);
    shape.head_dim = static_cast<int>(dim);
    for (const SafetensorsTensor* tensor : {query_, key_, value_}) {
      KVTILE_RETURN_IF_ERROR(check_finite(*tensor));
    }
    return {};
  }

 private:
  std::string subject(const SafetensorsTensor& tensor) const {
    return fmt::format("{}: tensor {}", file_.path(), quote_name(tensor.name));
  }

  Status check_finite(const SafetensorsTensor& tensor) const {
    const int64_t row = tensor.shape[1] * tensor.shape[2];
    std::vector<float> wide(static_cast<size_t>(row));
    for (int64_t t = 0; t < tensor.shape[0]; ++t) {
      widen(tensor.data + t * row * dtype_bytes(shape.dtype), shape.dtype, row, wide.data());
      const auto bad =
          std::find_if(wide.begin(), wide.end(), [](float x) { return !std::isfinite(x); });
      if (bad != wide.end()) {
        const int64_t i = bad - wide.begin();
        return invalid(fmt::format("{}: token {} head {} element {}", subject(tensor), t,
                                   i / tensor.shape[2], i % tensor.shape[2]),
                       std::isnan(*bad) ? "NaN" : "infinity", "a finite value");
      }
    }
    return {};
  }

  void copy_rows(const SafetensorsTensor& tensor, int64_t begin, int64_t count, int64_t elements,
                 std::byte* out) const {
    const int64_t row_bytes = elements * dtype_bytes(shape.dtype);
    std::memcpy(out, tensor.data + begin * row_bytes, static_cast<size_t>(count * row_bytes));
  }

  SafetensorsFile file_;
  const SafetensorsTensor *query_, *key_, *value_;
};

// "layers.12.query" -> 12; -1 for any other name.
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "layers.";
  if (name.compare(0, kPrefix.size(), kPrefix) != 0) return -1;
  int64_t layer = -1;
  const char* end = name.data() + name.size();
  const auto [next, error] = std::from_chars(name.data() + kPrefix.size(), end, layer);
  return error == std::errc() && next != end && *next == '.' && layer >= 0 ? layer : -1;
}

// A non-negative number of the metadata, the layer's own before the file's; unchanged if absent.
Status read_metadata(const SafetensorsFile& file, const std::string& prefix, const char* field,
                     double* out) {
  auto it = file.metadata().find(prefix + field);
  if (it == file.metadata().end()) it = file.metadata().find(field);
  if (it == file.metadata().end()) return {};
  char* end = nullptr;
  const double number = std::strtod(it->second.c_str(), &end);
  if (end == it->second.c_str() || *end != '\0' || !std::isfinite(number) || number < 0) {
    return invalid(fmt::format("{}: metadata {}", file.path(), quote_name(it->first)),
                   quote_name(it->second), "a number >= 0");
  }
  *out = number;
  return {};
}

Status add_layer(const SafetensorsFile& file, const std::string& prefix, const std::string& name,
                 std::vector<std::unique_ptr<LayerSource>>* layers) {
  auto layer = std::make_unique<CapturedLayer>(file, prefix);
  layer->name = name;
  KVTILE_RETURN_IF_ERROR(layer->check());
  double window = 0;
  KVTILE_RETURN_IF_ERROR(read_metadata(file, prefix, "softmax_scale", &layer->softmax_scale));
  KVTILE_RETURN_IF_ERROR(read_metadata(file, prefix, "softcap", &layer->softcap));
  KVTILE_RETURN_IF_ERROR(read_metadata(file, prefix, "window", &window));
  layer->window = static_cast<int64_t>(std::min(window, 0x1p62));
  layers->push_back(std::move(layer));
  return {};
}

}  // namespace

std::unique_ptr<LayerSource> make_synthetic_layer(const LayerShape& shape, uint64_t seed,
                                                  int num_threads) {
  return std::make_unique<SyntheticLayer>(shape, seed, num_threads);
}

Status open_capture(const std::string& path, int64_t layer,
                    std::vector<std::unique_ptr<LayerSource>>* layers) {
  SafetensorsFile file;
  KVTILE_RETURN_IF_ERROR(SafetensorsFile::open(path, &file));
  std::map<int64_t, std::string> prefixes;
  for (const auto& [name, tensor] : file.tensors()) {
    if (const int64_t i = layer_of(name); i >= 0) prefixes[i] = fmt::format("layers.{}.", i);
  }
  if (prefixes.empty()) {
    double number = 0;
    KVTILE_RETURN_IF_ERROR(read_metadata(file, "", "layer", &number));
    prefixes[static_cast<int64_t>(std::min(number, 0x1p30))] = "";
  }
  if (layer >= 0 && prefixes.count(layer) == 0) {
    std::vector<int64_t> present;
    for (const auto& [i, prefix] : prefixes) present.push_back(i);
    return invalid("--layer", layer, fmt::format("one of {}", join_numbers(present)));
  }
  for (const auto& [i, prefix] : prefixes) {
    if (layer >= 0 && i != layer) continue;
    KVTILE_RETURN_IF_ERROR(add_layer(file, prefix, fmt::format("layer {}", i), layers));
  }
  return {};
}

}  // namespace kvtile
