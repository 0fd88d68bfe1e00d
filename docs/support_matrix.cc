// Prints the support matrix of README.md in Markdown. Every cell is an answer of the library's own
// predicates (check_format, backend_supports, those of the CUDA engines), so the table cannot claim
// what a call would refuse. The CUDA columns ask about descriptions of devices: no GPU is needed.
#include <cstdio>
#include <string>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/cache.h"
#include "kvtile/slot.h"
#include "src/attention/cuda/supports.h"

namespace kvtile {
namespace {

// One part of each compute capability that has code, by what predicates look at.
struct Part {
  int arch, num_sms, shared_bytes_per_block;
};
constexpr Part kParts[] = {
    {80, 108, 166912}, {86, 84, 101376}, {89, 142, 101376}, {90, 132, 232448}, {120, 188, 101376}};

using Predicate = Status (*)(const AttentionCall& call, const DeviceInfo& device);

// Whether an engine takes the call on every part, or on every one of an architecture.
template <Predicate kEngine, int kArch = 0>
bool on_every_part(const AttentionCall& call) {
  for (const Part& part : kParts) {
    if (kArch != 0 && part.arch != kArch) continue;
    DeviceInfo device;
    device.arch = part.arch;
    device.num_sms = part.num_sms;
    device.shared_bytes_per_block = part.shared_bytes_per_block;
    if (!kEngine(call, device).ok()) return false;
  }
  return true;
}

struct Column {
  const char* name;
  bool (*supports)(const AttentionCall& call);
};
// The CPU row answers the same on every machine. "cuda" is the union of the other CUDA columns.
const Column kColumns[] = {
    {"cpu", [](const AttentionCall& call) { return backend_supports("cpu", call).ok(); }},
    {cuda::kRowsName, on_every_part<cuda::cuda_rows_supports>},
    {cuda::kTileName, on_every_part<cuda::cuda_tile_supports>},
    {cuda::kHopperName, on_every_part<cuda::cuda_hopper_supports, 90>},
};

AttentionCall base_call(const SlotFormat& format) {
  AttentionCall call;
  call.cache = make_cache(nullptr, 0, 16, 2, format);
  call.num_seqs = 1;
  call.total_q = 1;
  call.num_heads = 8;
  call.softmax_scale = 1.0f;
  return call;
}

std::string supported_head_dims(const char* preset, const Column& column) {
  std::string list;
  int count = 0, first = 0, last = 0;
  for (int head_dim = 1; head_dim <= 2 * kMaxHeadDim; ++head_dim) {
    SlotFormat format;
    if (!parse_preset(preset, head_dim, &format).ok()) continue;
    if (!column.supports(base_call(format))) continue;
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
    {"slots of an odd stride",
     [](AttentionCall* c) {
       c->cache = make_cache(nullptr, 2, 16, 2, c->cache.format, PageLayout::kTokenMajor, 255);
     }},
    {"block_size 1",
     [](AttentionCall* c) { c->cache = make_cache(nullptr, 0, 1, 2, c->cache.format); }},
    {"block_size 784",
     [](AttentionCall* c) { c->cache = make_cache(nullptr, 0, 784, 2, c->cache.format); }},
    {"7 query heads a KV head", [](AttentionCall* c) { c->num_heads = 14; }},
    {"16 query heads a KV head", [](AttentionCall* c) { c->num_heads = 32; }},
    {"64 query rows of 4 heads a KV head", [](AttentionCall* c) { c->total_q = 64; }},
    {"more rows than that", [](AttentionCall* c) { c->total_q = 65; }},
    {"batch-invariant bits", [](AttentionCall* c) { c->batch_invariant = true; }},
};

// The feature in a one-row call of every preset at head_dim 128.
std::string answer(const Column& column, const Feature& feature) {
  int yes = 0;
  for (int i = 0; i < num_presets(); ++i) {
    SlotFormat format;
    static_cast<void>(parse_preset(preset_name(i), 128, &format));
    AttentionCall call = base_call(format);
    feature.apply(&call);
    yes += column.supports(call);
  }
  return yes == num_presets() ? "yes" : yes == 0 ? "no" : "some presets";
}

void print_matrix() {
  std::string names, head_dims, rule;
  for (const Column& column : kColumns) {
    names += std::string(" ") + column.name + " |";
    head_dims += std::string(" head_dim on ") + column.name + " |";
    rule += "---|";
  }
  std::printf("| preset |%s slot bytes at head_dim 64 / 128 / 256 |\n|---|%s---|\n",
              head_dims.c_str(), rule.c_str());
  for (int i = 0; i < num_presets(); ++i) {
    std::printf("| `%s` |", preset_name(i));
    for (const Column& column : kColumns) {
      std::printf(" %s |", supported_head_dims(preset_name(i), column).c_str());
    }
    std::printf(" %s |\n", slot_bytes(preset_name(i)).c_str());
  }
  std::printf("\n| feature |%s\n|---|%s\n", names.c_str(), rule.c_str());
  for (const Feature& feature : kFeatures) {
    std::printf("| %s |", feature.name);
    for (const Column& column : kColumns) std::printf(" %s |", answer(column, feature).c_str());
    std::printf("\n");
  }
}

}  // namespace
}  // namespace kvtile

int main() { kvtile::print_matrix(); }
