// The kvtile command: parses the arguments, runs one subcommand and turns every failure into one
// line on stderr and exit code 2. Failed checks exit 1.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/staged.h"
#include "kvtile/attention.h"
#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {

void CacheOptions::add_to(CLI::App& command) {
  command.add_option("--preset", preset, "k8v4, 4bit_nc, k3v4_nc or 3bit_nc")->required();
  command.add_option("--fp8", fp8, "Flavour of FP8 keys: e4m3 or e4b15")->capture_default_str();
  command.add_option("--layout", layout, "Page order: token_major or head_major")
      ->capture_default_str();
  command.add_option("--block-size", block_size, "Tokens of one page")->capture_default_str();
}

Status CacheOptions::format(int head_dim, SlotFormat* format) const {
  KeyCode flavour = KeyCode::kFp8E4M3;
  if (fp8 == "e4b15") {
    flavour = KeyCode::kFp8E4B15;
  } else if (fp8 != "e4m3") {
    return invalid("--fp8", fp8, "e4m3 or e4b15");
  }
  return parse_preset(preset, head_dim, format, flavour);
}

Status CacheOptions::page_layout(int num_kv_heads, PageLayout* out) const {
  if (layout == "token_major") {
    *out = PageLayout::kTokenMajor;
  } else if (layout == "head_major") {
    *out = PageLayout::kHeadMajor;
  } else {
    return invalid("--layout", layout, "token_major or head_major");
  }
  KVTILE_RETURN_IF_ERROR(check_at_least("--num-kv-heads", num_kv_heads, 1));
  KVTILE_RETURN_IF_ERROR(check_at_least("--block-size", block_size, 1));
  constexpr int64_t kMaxPageSlots = int64_t{1} << 40;
  if (block_size > kMaxPageSlots / num_kv_heads) {
    return invalid("--block-size", block_size,
                   fmt::format("pages of at most 2^40 slots with {} KV heads", num_kv_heads));
  }
  return {};
}

Status check_at_least(const char* option, int64_t value, int64_t least) {
  return value >= least ? Status() : invalid(option, value, fmt::format(">= {}", least));
}

Status check_backend(const std::string& name) {
  std::string names;
  bool known = false;
  for (int i = 0; i < num_backends(); ++i) {
    known = known || name == backend_name(i);
    if (i > 0) names += ", ";
    names += backend_name(i);
  }
  if (!known) return invalid("--backend", name, fmt::format("one that this build has: {}", names));
  if (!is_cuda_backend(name.c_str())) return {};
  const DeviceInfo* device;
  return backend_device(name, -1, &device);
}

namespace {

int run(int argc, char** argv) {
  CLI::App app("Exact attention over a TurboQuant-compressed paged KV cache", "kvtile");
  app.set_version_flag("--version", std::string("kvtile ") + version());
  app.require_subcommand(1);
  int exit_code = kExitOk;
  add_prefill_command(app, &exit_code);
  add_verify_command(app, &exit_code);
  add_inspect_command(app, &exit_code);
  add_devices_command(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return report_error(std::string_view(error.what()));
  }
  return exit_code;
}

}  // namespace
}  // namespace kvtile

int main(int argc, char** argv) {
  // A file size limit is then an error of write() like a full disk, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  int code = 0;
  try {
    code = kvtile::run(argc, argv);
  } catch (const std::bad_alloc&) {
    code = kvtile::report_error("out of memory");
  } catch (const std::exception& error) {
    code = kvtile::report_error(error.what());
  }
  if (std::fflush(stdout) != 0 && code != kvtile::kExitBadInput) {
    code = kvtile::report_error(fmt::format("stdout: {}", std::strerror(errno)));
  }
  return code;
}
