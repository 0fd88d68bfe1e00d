// The commands of kvtile. Each adds one subcommand with its options to the application and, when
// the subcommand is parsed, runs and leaves its exit code in *exit_code.
#pragma once

#include <CLI/CLI.hpp>

#include "kvtile/cache.h"
#include "kvtile/slot.h"

namespace kvtile {

void add_prefill_command(CLI::App& app, int* exit_code);
void add_verify_command(CLI::App& app, int* exit_code);
void add_inspect_command(CLI::App& app, int* exit_code);
void add_devices_command(CLI::App& app, int* exit_code);

// Options that describe how a cache's bytes are to be read; the same in every command.
struct CacheOptions {
  std::string preset;
  std::string fp8 = "e4m3";
  std::string layout = "token_major";
  int block_size = 16;

  // Adds the options; --preset is required.
  void add_to(CLI::App& command);
  Status format(int head_dim, SlotFormat* format) const;
  // Checks the page shape and gives the layout id.
  Status page_layout(int num_kv_heads, PageLayout* layout) const;
};

// "option: got value, wanted >= least" unless value >= least.
Status check_at_least(const char* option, int64_t value, int64_t least);

// A backend of this build that this machine has a device for.
Status check_backend(const std::string& name);

}  // namespace kvtile
