// Prints the support matrix of README.md in Markdown. Every cell is an answer of the library's own
// predicates (check_format, backend_supports), so the table cannot claim what a call would refuse.
#include <cstdio>
#include <string>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/cache.h"
#include "kvtile/slot.h"

namespace kvtile {
namespace {

std::string supported_head_dims(const char* preset) {
  std::string list;
  int count = 0, first = 0, last = 0;
  for (int head_dim = 1; head_dim <= 2 * kMaxHeadDim; ++head_dim) {
    SlotFormat format;
    if (!parse_preset(preset, head_dim, &format).ok()) continue;
    if (count++ == 0) first = head_dim;
    last = head_dim;
    list += (list.empty() ? "" : ", ") + std::to_string(head_dim);
  }
  if (count == last / 8 && first == 8) return "multiples of 8 up to " + std::to_string(last);
  return list;
}

std::string slot_bytes(const char* preset) {
  std::string list;
  for (const int head_dim : {64, 128, 256}) {
    SlotFormat format;
    if (!parse_preset(preset, head_dim, &format).ok()) continue;
    list += (list.empty() ? "" : " / ") + std::to_string(format.slot_bytes());
  }
  return list;
}

// A one-row call of every supported preset at head_dim 128, the base each feature varies.
AttentionCall base_call(const char* preset) {
  AttentionCall call;
  SlotFormat format;
  static_cast<void>(parse_preset(preset, 128, &format));
  call.cache = make_cache(nullptr, 0, 16, 2, format);
  call.num_seqs = 1;
  call.total_q = 1;
  call.num_heads = 8;
  call.softmax_scale = 1.0f;
  return call;
}

struct Feature {
  const char* name;
  void (*apply)(AttentionCall*);
};

const float kSinks[32] = {};

const Feature kFeatures[] = {
    {"bf16 queries and outputs", [](AttentionCall* c) { c->dtype = DType::kBFloat16; }},
    {"fp16", [](AttentionCall* c) { c->dtype = DType::kFloat16; }},
    {"fp32", [](AttentionCall* c) { c->dtype = DType::kFloat32; }},
    {"non-causal", [](AttentionCall* c) { c->mask.causal = false; }},
    {"sliding window", [](AttentionCall* c) { c->mask.window = 1024; }},
    {"logits soft cap", [](AttentionCall* c) { c->softcap = 30.0f; }},
    {"attention sinks", [](AttentionCall* c) { c->sinks = kSinks; }},
    {"raw current chunk", [](AttentionCall* c) { c->chunk_key = c->chunk_value = kSinks; }},
    {"head-major pages",
     [](AttentionCall* c) {
       c->cache = make_cache(nullptr, 0, 16, 2, c->cache.format, PageLayout::kHeadMajor);
     }},
    {"padded slots",
     [](AttentionCall* c) {
       c->cache = make_cache(nullptr, 0, 16, 2, c->cache.format, PageLayout::kTokenMajor, 256);
     }},
    {"block_size 1",
     [](AttentionCall* c) { c->cache = make_cache(nullptr, 0, 1, 2, c->cache.format); }},
    {"block_size 784",
     [](AttentionCall* c) { c->cache = make_cache(nullptr, 0, 784, 2, c->cache.format); }},
    {"7 query heads a KV head", [](AttentionCall* c) { c->num_heads = 14; }},
    {"16 query heads a KV head", [](AttentionCall* c) { c->num_heads = 32; }},
};

std::string answer(const char* backend, const Feature& feature) {
  int yes = 0;
  for (int i = 0; i < num_presets(); ++i) {
    AttentionCall call = base_call(preset_name(i));
    feature.apply(&call);
    yes += backend_supports(backend, call).ok();
  }
  return yes == num_presets() ? "yes" : yes == 0 ? "no" : "some presets";
}

void print_matrix() {
  std::printf("| preset | head_dim | slot bytes at head_dim 64 / 128 / 256 |\n|---|---|---|\n");
  for (int i = 0; i < num_presets(); ++i) {
    std::printf("| `%s` | %s | %s |\n", preset_name(i), supported_head_dims(preset_name(i)).c_str(),
                slot_bytes(preset_name(i)).c_str());
  }
  // The CPU row answers the same on every machine; rows of devices depend on what is plugged in.
  const char* backend = backend_name(num_backends() - 1);
  std::printf("\n| feature | %s |\n|---|---|\n", backend);
  for (const Feature& feature : kFeatures) {
    std::printf("| %s | %s |\n", feature.name, answer(backend, feature).c_str());
  }
}

}  // namespace
}  // namespace kvtile

int main() { kvtile::print_matrix(); }
