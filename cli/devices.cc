// kvtile devices: the CUDA devices this process sees, and which engines run on them. None at all is
// an error of one line, so that a script can ask.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/output.h"
#include "kvtile/attention.h"
#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// The backends that take a plain decode call on a device.
std::string backends_of(int ordinal) {
  AttentionCall call;
  call.cache = make_cache(nullptr, 0, 16, 8, SlotFormat{.head_dim = 128});
  call.num_seqs = 1;
  call.total_q = 1;
  call.num_heads = 32;
  std::string names;
  for (int i = 0; i + 1 < num_backends(); ++i) {
    if (!backend_supports(backend_name(i), call, ordinal).ok()) continue;
    names += (names.empty() ? "" : ", ") + std::string(backend_name(i));
  }
  return names;
}

int list_devices(const std::string& json_path) {
  if (Status s = check_json_path(json_path); !s.ok()) return report_error(s);
  const DeviceInfo* device;
  if (num_devices() == 0) return report_error(backend_device("cuda", -1, &device));
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  fmt::print("{}\n",
             coloured(fmt::format("{:<3} {:<28} {:<7} {:>4} {:>10} {:>9} {:>16}  {}", "#", "name",
                                  "arch", "SMs", "memory", "L2", "copy", "backends"),
                      Colour::kBold));
  for (int i = 0; i < num_devices(); ++i) {
    if (Status s = device_info(i, &device); !s.ok()) {
      fmt::print("{:<3} {}\n", i, s.message());
      list.push_back({{"ordinal", i}, {"error", s.message()}});
      continue;
    }
    const std::string backends = backends_of(i);
    fmt::print("{:<3} {:<28} {:<7} {:>4} {:>6.1f} GiB {:>5.1f} MiB {:>7.0f} GB/s{}  {}\n", i,
               device->name, fmt::format("sm_{}", device->arch), device->num_sms,
               static_cast<double>(device->memory_bytes) / (1 << 30),
               static_cast<double>(device->l2_bytes) / (1 << 20), device->copy_gb_per_s,
               device->copy_rate_measured ? "    " : " est", backends);
    list.push_back({{"ordinal", i},
                    {"name", device->name},
                    {"arch", device->arch},
                    {"num_sms", device->num_sms},
                    {"memory_bytes", device->memory_bytes},
                    {"l2_bytes", device->l2_bytes},
                    {"shared_bytes_per_block", device->shared_bytes_per_block},
                    {"copy_gb_per_s", device->copy_gb_per_s},
                    {"copy_rate_measured", device->copy_rate_measured},
                    {"backends", backends}});
  }
  if (Status s = write_json(json_path, {{"devices", list}}); !s.ok()) return report_error(s);
  return kExitOk;
}

}  // namespace

void add_devices_command(CLI::App& app, int* exit_code) {
  auto json = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("devices", "CUDA devices and the backends they run");
  command->add_option("--json", *json, "Also write the list to this file");
  command->callback([json, exit_code] { *exit_code = list_devices(*json); });
}

}  // namespace kvtile
