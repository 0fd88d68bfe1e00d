// kvtile prefill: a chunked prefill of captured or synthetic rows over the packed cache, timed, and
// checked against float64. Options are validated here in full before any memory is taken; the run
// itself is prefill_run.h.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/prefill_run.h"
#include "cli/staged.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

using nlohmann::ordered_json;

struct PrefillOptions {
  std::string input;
  std::optional<int64_t> layer;
  bool synthetic = false;
  std::optional<int64_t> num_heads, num_kv_heads, head_dim, context;
  uint64_t seed = 0;

  CacheOptions cache;
  int64_t chunk = 512;
  int64_t tile = 0;
  std::optional<int64_t> window;
  std::optional<double> softcap, softmax_scale;
  std::string dtype = "float32";
  std::string backend = "cpu";
  int num_threads = 0;
  bool last_chunk = false;
  bool no_check = false;
  int64_t check_rows = 0;
  std::string json;
};

constexpr int64_t kMaxThreads = 1024;

// A size option of --synthetic: stated, and in 1..most.
Status required_size(const char* option, const std::optional<int64_t>& value, int64_t most,
                     int64_t* out) {
  if (!value) return invalid(option, "nothing", "a value with --synthetic");
  KVTILE_RETURN_IF_ERROR(check_at_least(option, *value, 1));
  if (*value > most) return invalid(option, *value, fmt::format("at most {}", most));
  *out = *value;
  return {};
}

Status synthetic_layer(const PrefillOptions& options, int num_threads,
                       std::vector<std::unique_ptr<LayerSource>>* layers) {
  int64_t num_heads, num_kv_heads, head_dim, context;
  KVTILE_RETURN_IF_ERROR(required_size("--num-heads", options.num_heads, 1 << 16, &num_heads));
  KVTILE_RETURN_IF_ERROR(
      required_size("--num-kv-heads", options.num_kv_heads, 1 << 16, &num_kv_heads));
  KVTILE_RETURN_IF_ERROR(required_size("--head-dim", options.head_dim, 1 << 16, &head_dim));
  KVTILE_RETURN_IF_ERROR(required_size("--context", options.context, int64_t{1} << 40, &context));
  if (num_heads % num_kv_heads != 0) {
    return invalid("--num-heads", num_heads,
                   fmt::format("a multiple of --num-kv-heads {}", num_kv_heads));
  }
  const LayerShape shape{static_cast<int>(num_heads), static_cast<int>(num_kv_heads),
                         static_cast<int>(head_dim), context, DType::kBFloat16};
  layers->push_back(make_synthetic_layer(shape, options.seed, num_threads));
  return {};
}

Status open_layers(const PrefillOptions& options, int num_threads,
                   std::vector<std::unique_ptr<LayerSource>>* layers) {
  if (options.input.empty() == !options.synthetic) {
    return Status(StatusCode::kInvalidArgument,
                  "--input or --synthetic: exactly one of them is required");
  }
  if (options.synthetic) return synthetic_layer(options, num_threads, layers);
  if (options.layer) KVTILE_RETURN_IF_ERROR(check_at_least("--layer", *options.layer, 0));
  return open_capture(options.input, options.layer.value_or(-1), layers);
}

// Everything that does not depend on the layer.
Status check_options(const PrefillOptions& options) {
  KVTILE_RETURN_IF_ERROR(check_backend(options.backend));
  KVTILE_RETURN_IF_ERROR(check_at_least("--chunk", options.chunk, 1));
  KVTILE_RETURN_IF_ERROR(check_at_least("--tile", options.tile, 0));
  KVTILE_RETURN_IF_ERROR(check_at_least("--check-rows", options.check_rows, 0));
  if (options.context) KVTILE_RETURN_IF_ERROR(check_at_least("--context", *options.context, 1));
  if (options.window) KVTILE_RETURN_IF_ERROR(check_at_least("--window", *options.window, 0));
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return invalid("--threads", options.num_threads, fmt::format("0..{}", kMaxThreads));
  }
  if (options.softcap && !(std::isfinite(*options.softcap) && *options.softcap >= 0)) {
    return invalid("--softcap", *options.softcap, "a finite number >= 0");
  }
  if (options.softmax_scale &&
      !(std::isfinite(*options.softmax_scale) && *options.softmax_scale > 0)) {
    return invalid("--softmax-scale", *options.softmax_scale, "a finite number > 0");
  }
  if (options.dtype != "float32" && options.dtype != "input") {
    return invalid("--dtype", options.dtype, "float32 or input");
  }
  return check_json_path(options.json);
}

Status make_plan(const PrefillOptions& options, const LayerSource& source, int num_threads,
                 PrefillPlan* plan) {
  const LayerShape& shape = source.shape;
  KVTILE_RETURN_IF_ERROR(options.cache.format(shape.head_dim, &plan->format));
  KVTILE_RETURN_IF_ERROR(options.cache.page_layout(shape.num_kv_heads, &plan->layout));
  plan->block_size = options.cache.block_size;
  plan->context = options.context.value_or(shape.num_tokens);
  if (plan->context > shape.num_tokens) {
    return invalid("--context", plan->context,
                   fmt::format("at most the {} tokens of {}", shape.num_tokens, options.input));
  }
  plan->chunk = std::min(options.chunk, plan->context);
  plan->tile_tokens = options.tile;
  const double scale = options.softmax_scale.value_or(source.softmax_scale);
  plan->softmax_scale =
      static_cast<float>(scale > 0 ? scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
  plan->softcap = static_cast<float>(options.softcap.value_or(source.softcap));
  plan->window = options.window.value_or(source.window);
  plan->dtype = options.dtype == "float32" ? DType::kFloat32 : shape.dtype;
  plan->backend = options.backend.c_str();
  plan->num_threads = num_threads;
  plan->last_chunk_only = options.last_chunk;
  plan->check = !options.no_check;
  plan->check_rows = options.check_rows;
  return {};
}

// Figures of one layer, or of several added up.
struct Summary {
  int64_t query_tokens = 0, pairs = 0;
  double flops = 0;
  double attend_seconds = 0, encode_seconds = 0, fill_seconds = 0;
  int64_t cache_bytes = 0, dense_cache_bytes = 0, one_shot_bytes = 0;
  int64_t workspace_bytes = 0, peak_rss_bytes = 0;
  int64_t bent = 0;
  PrefillErrors errors;

  void add(const PrefillResult& r, const LayerShape& shape) {
    query_tokens += r.query_tokens;
    pairs += r.visible_pairs;
    flops +=
        4.0 * static_cast<double>(r.visible_pairs) * static_cast<double>(shape.query_elements());
    attend_seconds += r.attend_seconds;
    encode_seconds += r.encode_seconds;
    fill_seconds += r.fill_seconds;
    cache_bytes += r.cache_bytes;
    dense_cache_bytes += r.dense_cache_bytes;
    // Layers run one after another and share these.
    one_shot_bytes = std::max(one_shot_bytes, r.one_shot_bytes);
    workspace_bytes = std::max(workspace_bytes, r.workspace_bytes);
    peak_rss_bytes = std::max(peak_rss_bytes, r.peak_rss_bytes);
    bent += r.encode.non_finite_keys + r.encode.non_finite_values + r.encode.norms_saturated +
            r.encode.key_elements_clamped + r.encode.value_elements_clamped;
    errors.add(r.errors);
  }

  double ns_per_query_token_layer() const {
    return attend_seconds * 1e9 / static_cast<double>(pairs);
  }
  double gflops() const { return flops / attend_seconds * 1e-9; }
  double tokens_per_second() const {
    return static_cast<double>(query_tokens) / (attend_seconds + encode_seconds);
  }
};

bool within_bounds(const PrefillErrors& errors, const PrefillPlan& plan) {
  const EngineBound bound = engine_bound(plan.backend, plan.dtype);
  return errors.max_error_of_peak <= bound.output && errors.max_lse_error <= bound.lse;
}

// The error keys are absent without a check: no number is better than a zero nobody measured.
void add_errors(const PrefillErrors& errors, ordered_json* json) {
  if (errors.rows == 0) return;
  (*json)["max_abs_error"] = errors.max_abs_error;
  (*json)["rel_error"] = errors.kernel.value();
  (*json)["preset_rel_error"] = errors.preset.value();
  (*json)["max_error_of_peak_value"] = errors.max_error_of_peak;
  (*json)["max_lse_error"] = errors.max_lse_error;
  (*json)["softmax_distance_mean"] = errors.distance_mean();
  (*json)["softmax_distance_max"] = errors.distance_max;
  (*json)["key_cosine"] = errors.key_cosine.mean();
  (*json)["checked_rows"] = errors.rows;
}

ordered_json summary_json(const Summary& s) {
  ordered_json json = {{"ns_per_query_token_layer", s.ns_per_query_token_layer()},
                       {"gflops", s.gflops()},
                       {"tokens_per_second", s.tokens_per_second()},
                       {"cache_bytes", s.cache_bytes},
                       {"dense_cache_bytes", s.dense_cache_bytes},
                       {"workspace_bytes", s.workspace_bytes},
                       {"one_shot_bytes", s.one_shot_bytes},
                       {"peak_rss_bytes", s.peak_rss_bytes}};
  add_errors(s.errors, &json);
  json["query_tokens"] = s.query_tokens;
  json["visible_pairs"] = s.pairs;
  json["attend_seconds"] = s.attend_seconds;
  json["encode_seconds"] = s.encode_seconds;
  json["fill_seconds"] = s.fill_seconds;
  json["bent_elements"] = s.bent;
  return json;
}

void print_line(const char* name, const std::string& text) {
  fmt::print("  {:<14} {}\n", name, text);
}

void print_errors(const PrefillErrors& e, const PrefillPlan& plan) {
  if (e.rows == 0) {
    print_line("errors", "not checked");
    return;
  }
  const bool ok = within_bounds(e, plan);
  print_line("kernel error",
             fmt::format("max abs {:.2e}, relative {:.2e}; {:.1e} of the largest |value| (bound "
                         "{:.1e}), lse {:.1e} {}",
                         e.max_abs_error, e.kernel.value(), e.max_error_of_peak,
                         engine_bound(plan.backend, plan.dtype).output, e.max_lse_error,
                         ok ? coloured("ok", Colour::kGreen) : coloured("FAIL", Colour::kRed)));
  print_line(
      "preset error",
      fmt::format("relative {:.2e}; attention distributions differ by {:.4f}, at most {:.4f} "
                  "(total variation); key cosine {:.4f}",
                  e.preset.value(), e.distance_mean(), e.distance_max, e.key_cosine.mean()));
  print_line("", fmt::format("{} sampled rows against float64", e.rows));
}

void print_summary(const Summary& s, const PrefillPlan& plan, const PrefillResult& last) {
  print_line("backend", fmt::format("{}, {} threads, tile of {} tokens", last.backend,
                                    plan.num_threads, grouped(last.tile_tokens)));
  print_line("time", fmt::format("{:.4f} ns per query token, key and layer; {:.1f} GFLOP/s; {:.1f} "
                                 "tokens/s a layer (attend {:.3f} s, store {:.3f} s)",
                                 s.ns_per_query_token_layer(), s.gflops(), s.tokens_per_second(),
                                 s.attend_seconds, s.encode_seconds));
  if (s.fill_seconds > 0) {
    print_line("fill",
               fmt::format("{:.2f} s to store the context before the last chunk", s.fill_seconds));
  }
  print_line("cache", fmt::format("{}; at 16 bits {}: {:.2f}x smaller", bytes_text(s.cache_bytes),
                                  bytes_text(s.dense_cache_bytes),
                                  static_cast<double>(s.dense_cache_bytes) /
                                      static_cast<double>(s.cache_bytes)));
  print_line("workspace", fmt::format("{}; decoding the past at once needs {} of 16-bit buffers",
                                      bytes_text(s.workspace_bytes), bytes_text(s.one_shot_bytes)));
  print_line("peak RSS", bytes_text(s.peak_rss_bytes));
  if (s.bent > 0) print_line("bent", fmt::format("{} rows or elements clamped", grouped(s.bent)));
  print_errors(s.errors, plan);
}

Status run_layers(const PrefillOptions& options, bool* ok) {
  const int num_threads = options.num_threads > 0
                              ? options.num_threads
                              : std::clamp(omp_get_max_threads(), 1, static_cast<int>(kMaxThreads));
  KVTILE_RETURN_IF_ERROR(check_options(options));
  std::vector<std::unique_ptr<LayerSource>> layers;
  KVTILE_RETURN_IF_ERROR(open_layers(options, num_threads, &layers));
  // Every layer's plan is made before the first one runs, so that a bad one costs no time.
  std::vector<PrefillPlan> plans(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    KVTILE_RETURN_IF_ERROR(make_plan(options, *layers[i], num_threads, &plans[i]));
  }

  Summary total;
  ordered_json layer_list = ordered_json::array();
  PrefillResult last;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSource& layer = *layers[i];
    const LayerShape& shape = layer.shape;
    const PrefillPlan& plan = plans[i];
    std::unique_ptr<Progress> bar;
    std::string bar_label;
    const ProgressFn progress = [&](std::string_view label, int64_t done, int64_t of) {
      if (bar == nullptr || bar_label != label) {
        bar_label = label;
        bar.reset();
        bar = std::make_unique<Progress>(fmt::format("{} {}", layer.name, label), of);
      }
      bar->update(done);
    };
    PrefillResult result;
    KVTILE_RETURN_IF_ERROR(run_prefill(layer, plan, progress, &result));
    bar.reset();
    Summary one;
    one.add(result, shape);
    total.add(result, shape);
    *ok = *ok && within_bounds(result.errors, plan);

    fmt::print("{}\n",
               coloured(fmt::format("{}: {} query and {} KV heads, head_dim {}, {} tokens, {}, "
                                    "chunk {}{}",
                                    layer.name, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                                    grouped(plan.context), format_name(plan.format),
                                    grouped(plan.chunk), plan.last_chunk_only ? ", last only" : ""),
                        Colour::kBold));
    print_summary(one, plan, result);
    ordered_json entry = {{"name", layer.name},
                          {"softmax_scale", plan.softmax_scale},
                          {"window", plan.window},
                          {"softcap", plan.softcap}};
    entry.update(summary_json(one));
    layer_list.push_back(std::move(entry));
    last = std::move(result);
  }
  if (layers.size() > 1) {
    fmt::print("{}\n", coloured(fmt::format("all {} layers", layers.size()), Colour::kBold));
    print_summary(total, plans.back(), last);
  }

  const LayerShape& shape = layers.front()->shape;
  const PrefillPlan& plan = plans.front();
  ordered_json report = {{"backend", last.backend}};
  report.update(summary_json(total));
  report["preset"] = format_name(plan.format);
  report["num_heads"] = shape.num_heads;
  report["num_kv_heads"] = shape.num_kv_heads;
  report["head_dim"] = shape.head_dim;
  report["context"] = plan.context;
  report["chunk"] = plan.chunk;
  report["block_size"] = plan.block_size;
  report["layout"] = options.cache.layout;
  report["tile_tokens"] = last.tile_tokens;
  report["threads"] = num_threads;
  report["dtype"] = dtype_name(plan.dtype);
  report["source"] =
      options.synthetic ? fmt::format("synthetic, seed {}", options.seed) : options.input;
  report["version"] = version();
  report["layers"] = std::move(layer_list);
  return write_json(options.json, report);
}

int prefill(const PrefillOptions& options) {
  bool ok = true;
  if (Status s = run_layers(options, &ok); !s.ok()) return report_error(s);
  return ok ? kExitOk : kExitFailedCheck;
}

}  // namespace

void add_prefill_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<PrefillOptions>();
  CLI::App* command = app.add_subcommand(
      "prefill", "Chunked prefill over a packed cache: time, memory and exactness");
  CLI::Option* input = command->add_option("--input", options->input,
                                           "Capture: query, key, value or layers.<i>.query, ...");
  CLI::Option* layer =
      command->add_option("--layer", options->layer, "Layer of the capture; all by default");
  CLI::Option* synthetic =
      command->add_flag("--synthetic", options->synthetic, "Seeded normal rows instead");
  input->excludes(synthetic);
  layer->needs(input);
  for (CLI::Option* option :
       {command->add_option("--num-heads", options->num_heads, "Query heads"),
        command->add_option("--num-kv-heads", options->num_kv_heads, "KV heads"),
        command->add_option("--head-dim", options->head_dim, "Elements of one head"),
        command->add_option("--seed", options->seed, "Seed of the rows")}) {
    option->excludes(input);
  }
  command->add_option("--context", options->context,
                      "Tokens, the last chunk included; of a capture, its first tokens");
  options->cache.add_to(*command);
  command->add_option("--chunk", options->chunk, "Query tokens of one call")->capture_default_str();
  command->add_option("--tile", options->tile, "Cached tokens decoded at once; 0 = default");
  command->add_option("--window", options->window,
                      "Keys a token sees, itself included; 0 = all; default: the capture's");
  command->add_option("--softcap", options->softcap, "Soft cap of scores; 0 = none");
  command->add_option("--softmax-scale", options->softmax_scale,
                      "Default: the capture's, or 1/sqrt(head_dim)");
  command
      ->add_option("--dtype", options->dtype,
                   "Queries and outputs: float32, or input for the source's own")
      ->capture_default_str();
  command
      ->add_option("--backend", options->backend,
                   "Backend to run on: cpu, cuda, cuda/rows, cuda/tile or cuda/hopper")
      ->capture_default_str();
  command->add_option("--threads", options->num_threads, "Threads; 0 = all");
  command->add_flag("--last-chunk", options->last_chunk,
                    "Store all but the last chunk, then attend it alone");
  command->add_flag("--no-check", options->no_check, "Leave out the float64 checks");
  command->add_option("--check-rows", options->check_rows,
                      "Rows checked; 0 = a few seconds' worth");
  command->add_option("--json", options->json, "Also write the report to this file");
  command->callback([options, exit_code] { *exit_code = prefill(*options); });
}

}  // namespace kvtile
