// kvtile inspect: where every byte of a slot and a page lies, and what a token costs. All numbers
// come from SlotFormat and PagedCache.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

struct InspectOptions {
  CacheOptions cache;
  int head_dim = 0;
  int num_kv_heads = 1;
  std::string json;
};

struct Field {
  const char* name;
  int offset, bytes;
  std::string content;
};

std::vector<Field> slot_fields(const SlotFormat& f) {
  const std::string key = f.rotated() ? fmt::format("{} x {}-bit Lloyd-Max code of the rotated key",
                                                    f.head_dim, key_bits(f.key))
                                      : fmt::format("{} x FP8 {}", f.head_dim,
                                                    f.key == KeyCode::kFp8E4M3 ? "e4m3" : "e4b15");
  std::vector<Field> fields = {{"key", 0, f.key_bytes(), key}};
  if (f.rotated()) fields.push_back({"key norm", f.norm_offset(), 2, "fp16"});
  fields.push_back({"value", f.value_offset(), f.value_bytes(),
                    fmt::format("{} x {}-bit uniform code", f.head_dim, value_bits(f.value))});
  fields.push_back({"value scale", f.scale_offset(), 2, "fp16"});
  fields.push_back({"value zero", f.zero_offset(), 2, "fp16"});
  const int end = f.zero_offset() + 2;
  if (end < f.slot_bytes()) fields.push_back({"padding", end, f.slot_bytes() - end, "not read"});
  return fields;
}

int inspect(const InspectOptions& options) {
  SlotFormat format;
  if (Status s = options.cache.format(options.head_dim, &format); !s.ok()) return report_error(s);
  PageLayout layout;
  if (Status s = options.cache.page_layout(options.num_kv_heads, &layout); !s.ok()) {
    return report_error(s);
  }
  if (Status s = check_json_path(options.json); !s.ok()) return report_error(s);
  std::byte page{};  // make_cache wants an address; only sizes are read
  PagedCache cache =
      make_cache(&page, 1, options.cache.block_size, options.num_kv_heads, format, layout);
  if (Status s = check_cache(cache); !s.ok()) return report_error(s);

  constexpr int64_t kMillion = 1'000'000;
  const int64_t token_bytes = int64_t{format.slot_bytes()} * options.num_kv_heads;
  const int64_t dense_token_bytes = int64_t{2} * 2 * format.head_dim * options.num_kv_heads;
  const double ratio = static_cast<double>(dense_token_bytes) / static_cast<double>(token_bytes);

  nlohmann::ordered_json report = {
      {"preset", format_name(format)},        {"head_dim", format.head_dim},
      {"num_kv_heads", options.num_kv_heads}, {"block_size", options.cache.block_size},
      {"layout", options.cache.layout},       {"slot_bytes", format.slot_bytes()}};
  fmt::print("{}\n", coloured(fmt::format("Slot of {}, head_dim {}: {} bytes", format_name(format),
                                          format.head_dim, format.slot_bytes()),
                              Colour::kBold));
  fmt::print("  {:<12} {:<12} {}\n", "bytes", "field", "content");
  for (const Field& field : slot_fields(format)) {
    fmt::print("  {:<12} {:<12} {}\n",
               fmt::format("{}..{}", field.offset, field.offset + field.bytes - 1), field.name,
               field.content);
    report["fields"].push_back({{"name", field.name},
                                {"offset", field.offset},
                                {"bytes", field.bytes},
                                {"content", field.content}});
  }
  fmt::print("{}\n", coloured(fmt::format("Page of {} tokens x {} KV heads, {}: {} bytes",
                                          cache.block_size, cache.num_kv_heads,
                                          options.cache.layout, grouped(cache.stride_block)),
                              Colour::kBold));
  fmt::print("  slot (block, token, head) at block * {} + token * {} + head * {}\n",
             cache.stride_block, cache.stride_token, cache.stride_head);
  fmt::print("{}\n", coloured("Per layer", Colour::kBold));
  fmt::print("  {:<20} {:>14}   16-bit {:>14}   {:.2f}x smaller\n", "bytes per token",
             grouped(token_bytes), grouped(dense_token_bytes), ratio);
  fmt::print("  {:<20} {:>14}   16-bit {:>14}\n", "per million tokens",
             grouped(token_bytes * kMillion), grouped(dense_token_bytes * kMillion));
  fmt::print("{}\n", cache_descriptor(cache));

  report["page_bytes"] = cache.stride_block;
  report["stride_block"] = cache.stride_block;
  report["stride_token"] = cache.stride_token;
  report["stride_head"] = cache.stride_head;
  report["bytes_per_token"] = token_bytes;
  report["bytes_per_million_tokens"] = token_bytes * kMillion;
  report["dense_bytes_per_token"] = dense_token_bytes;
  report["dense_bytes_per_million_tokens"] = dense_token_bytes * kMillion;
  report["ratio"] = ratio;
  report["descriptor"] = cache_descriptor(cache);
  if (Status s = write_json(options.json, report); !s.ok()) return report_error(s);
  return kExitOk;
}

}  // namespace

void add_inspect_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Byte map of a slot and a page");
  options->cache.add_to(*command);
  command->add_option("--head-dim", options->head_dim, "Elements of one head")->required();
  command->add_option("--num-kv-heads", options->num_kv_heads, "KV heads of the page")
      ->capture_default_str();
  command->add_option("--json", options->json, "Also write the report to this file");
  command->callback([options, exit_code] { *exit_code = inspect(*options); });
}

}  // namespace kvtile
