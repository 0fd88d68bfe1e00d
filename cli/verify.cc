// kvtile verify: golden files through every check, or a dumped pool of pages through a scan for
// non-finite metadata. One line a check or find; exit 1 if any check failed or any word was found.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/verify_golden.h"
#include "kvtile/codec.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

struct VerifyOptions {
  std::string vectors;
  std::string scan;
  CacheOptions cache;
  int head_dim = 0;
  int num_kv_heads = 0;
  std::string descriptor;
  int64_t max_listed = 1000;
  std::string backend = "cpu";
  int num_threads = 0;
  std::string json;
};

int verify_vectors(const VerifyOptions& options) {
  if (Status s = check_backend(options.backend); !s.ok()) return report_error(s);
  RunOptions run;
  run.backend = options.backend.c_str();
  run.num_threads = options.num_threads;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  int64_t failed = 0;
  std::vector<GoldenCheck> checks;
  const Status status = verify_golden(options.vectors, run, &checks, [&](const GoldenCheck& check) {
    failed += !check.ok;
    fmt::print("{} {:<46} {:<16} {}\n",
               check.ok ? coloured("ok  ", Colour::kGreen) : coloured("FAIL", Colour::kRed),
               check.case_name, check.check, check.detail);
    list.push_back({{"case", check.case_name},
                    {"check", check.check},
                    {"ok", check.ok},
                    {"detail", check.detail}});
  });
  if (!status.ok()) return report_error(status);
  fmt::print("{}\n", coloured(fmt::format("{} checks, {} failed", checks.size(), failed),
                              failed == 0 ? Colour::kGreen : Colour::kRed));
  const nlohmann::ordered_json report = {{"vectors", options.vectors},
                                         {"backend", options.backend},
                                         {"checks", checks.size()},
                                         {"failed", failed},
                                         {"results", list}};
  if (Status s = write_json(options.json, report); !s.ok()) return report_error(s);
  return failed == 0 ? kExitOk : kExitFailedCheck;
}

// A file mapped for reading; the library only reads pages it scans.
struct MappedPool {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  ~MappedPool() {
    if (data != nullptr) munmap(data, static_cast<size_t>(bytes));
  }
  Status open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
      return invalid("--scan", fmt::format("{} ({})", path, std::strerror(errno)),
                     "a readable file of packed pages");
    struct stat info = {};
    const bool usable = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
    void* mapping =
        usable ? mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0)
               : MAP_FAILED;
    ::close(fd);
    if (mapping == MAP_FAILED) {
      return invalid("--scan", path, "a regular, non-empty file of packed pages");
    }
    data = static_cast<std::byte*>(mapping);
    bytes = info.st_size;
    return {};
  }
};

Status describe_pool(const VerifyOptions& options, const MappedPool& pool, PagedCache* cache) {
  if (options.cache.preset.empty()) return invalid("--preset", "nothing", "the preset of the pool");
  if (options.head_dim == 0) return invalid("--head-dim", "nothing", "the head_dim of the pool");
  if (options.num_kv_heads == 0) {
    return invalid("--num-kv-heads", "nothing", "the KV heads of the pool");
  }
  SlotFormat format;
  PageLayout layout;
  KVTILE_RETURN_IF_ERROR(options.cache.format(options.head_dim, &format));
  KVTILE_RETURN_IF_ERROR(options.cache.page_layout(options.num_kv_heads, &layout));
  *cache = make_cache(pool.data, 1, options.cache.block_size, options.num_kv_heads, format, layout);
  if (pool.bytes % cache->stride_block != 0) {
    return invalid("--scan", fmt::format("{} of {} bytes", options.scan, pool.bytes),
                   fmt::format("whole pages of {} bytes", cache->stride_block));
  }
  cache->num_blocks = pool.bytes / cache->stride_block;
  cache->pages_bytes = pool.bytes;
  KVTILE_RETURN_IF_ERROR(check_cache(*cache));
  if (!options.descriptor.empty()) {
    std::ifstream file(options.descriptor);
    std::string line;
    if (!std::getline(file, line)) {
      return invalid("--descriptor", options.descriptor, "a file holding a cache descriptor");
    }
    KVTILE_RETURN_IF_ERROR(match_descriptor(*cache, line));
  }
  return {};
}

int scan_pool(const VerifyOptions& options) {
  MappedPool pool;
  PagedCache cache;
  if (Status s = pool.open(options.scan); !s.ok()) return report_error(s);
  if (Status s = describe_pool(options, pool, &cache); !s.ok()) return report_error(s);
  std::vector<NonFiniteWord> found;
  int64_t total = 0;
  const Status status = scan_slots(cache, options.max_listed, &found, &total, options.num_threads);
  if (!status.ok()) return report_error(status);

  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const NonFiniteWord& word : found) {
    fmt::print("{} block {} slot {} head {} field {} word {:#06x}\n",
               coloured("non-finite", Colour::kRed), word.block, word.token, word.head,
               slot_field_name(word.field), word.word);
    list.push_back({{"block", word.block},
                    {"slot", word.token},
                    {"head", word.head},
                    {"field", slot_field_name(word.field)},
                    {"word", word.word}});
  }
  const int64_t unlisted = total - static_cast<int64_t>(found.size());
  fmt::print("{} pages, {}: {} non-finite metadata words{}\n", grouped(cache.num_blocks),
             bytes_text(pool.bytes), total,
             unlisted > 0 ? fmt::format(" ({} not listed)", unlisted) : "");
  const nlohmann::ordered_json report = {{"pool", options.scan},
                                         {"descriptor", cache_descriptor(cache)},
                                         {"num_blocks", cache.num_blocks},
                                         {"non_finite", total},
                                         {"found", list}};
  if (Status s = write_json(options.json, report); !s.ok()) return report_error(s);
  return total == 0 ? kExitOk : kExitFailedCheck;
}

int verify(const VerifyOptions& options) {
  if (options.vectors.empty() == options.scan.empty()) {
    return report_error("--vectors or --scan: exactly one of them is required");
  }
  if (Status s = check_at_least("--threads", options.num_threads, 0); !s.ok()) {
    return report_error(s);
  }
  if (Status s = check_at_least("--max-listed", options.max_listed, 0); !s.ok()) {
    return report_error(s);
  }
  if (Status s = check_json_path(options.json); !s.ok()) return report_error(s);
  return options.scan.empty() ? verify_vectors(options) : scan_pool(options);
}

}  // namespace

void add_verify_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* command = app.add_subcommand("verify", "Check golden vectors, or scan a pool of pages");
  command->add_option("--vectors", options->vectors, "Golden safetensors file to check against");
  command->add_option("--scan", options->scan,
                      "Pool of packed pages to search for non-finite metadata");
  options->cache.add_to(*command);
  command->get_option("--preset")->required(false);
  command->add_option("--head-dim", options->head_dim, "Elements of one head (--scan)");
  command->add_option("--num-kv-heads", options->num_kv_heads, "KV heads of a page (--scan)");
  command->add_option("--descriptor", options->descriptor,
                      "File with the pool's descriptor line, which must match (--scan)");
  command->add_option("--max-listed", options->max_listed, "Words listed at most (--scan)")
      ->capture_default_str();
  command
      ->add_option("--backend", options->backend,
                   "Backend to check: cpu, cuda, cuda/rows, cuda/tile or cuda/hopper (--vectors)")
      ->capture_default_str();
  command->add_option("--threads", options->num_threads, "Threads; 0 = all");
  command->add_option("--json", options->json, "Also write the report to this file");
  command->callback([options, exit_code] { *exit_code = verify(*options); });
}

}  // namespace kvtile
