// Where prefill's rows come from: a captured layer or a synthetic one. Both deliver ranges of
// tokens on demand, in the source's own dtype, so that no more raw rows are held than a caller asks
// for at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/safetensors.h"
#include "kvtile/slot.h"
#include "kvtile/status.h"

namespace kvtile {

struct LayerShape {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_tokens = 0;
  DType dtype = DType::kBFloat16;

  int64_t query_elements() const { return int64_t{num_heads} * head_dim; }  // of one token
  int64_t kv_elements() const { return int64_t{num_kv_heads} * head_dim; }
};

class LayerSource {
 public:
  virtual ~LayerSource() = default;
  // Rows of tokens [begin, begin + count): query [count, num_heads, head_dim], key and value
  // [count, num_kv_heads, head_dim], of shape.dtype. Reading a range twice gives the same bytes.
  virtual void read_query(int64_t begin, int64_t count, std::byte* query) const = 0;
  virtual void read_key_value(int64_t begin, int64_t count, std::byte* key,
                              std::byte* value) const = 0;

  LayerShape shape;
  std::string name;          // "layer 3", "synthetic"
  double softmax_scale = 0;  // what the source states; 0 = it states none
  int64_t window = 0;
  double softcap = 0;
};

// Standard normal elements, rounded to bf16, that depend on the seed and their index alone. The
// generator is integer arithmetic up to one exact conversion, so every machine makes the same bits.
std::unique_ptr<LayerSource> make_synthetic_layer(const LayerShape& shape, uint64_t seed,
                                                  int num_threads);

// The layers of a capture: tensors query, key and value, or layers.<i>.query and so on, in layer
// order; only layer `layer` if it is >= 0. Metadata softmax_scale, window and softcap (with the
// layer's prefix or for the whole file) are taken over. Refuses, naming the tensor, other shapes
// and dtypes, heads that do not divide, and NaN or infinity anywhere.
Status open_capture(const std::string& path, int64_t layer,
                    std::vector<std::unique_ptr<LayerSource>>* layers);

}  // namespace kvtile
