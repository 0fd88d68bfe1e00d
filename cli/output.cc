// Terminal output and atomic JSON files.
#include "cli/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr std::string_view kJsonOption = "--json";

Status json_error(const std::string& path, int error) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: cannot write {}: {}", kJsonOption, path, std::strerror(error)));
}

std::string parent_directory(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// Writes and flushes to the disk, so that a full disk is an error here and not a lost tail later.
// Returns 0 or an errno.
int write_all(int fd, std::string_view text, bool sync) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return sync && fsync(fd) != 0 ? errno : 0;
}

}  // namespace

int report_error(std::string_view message) {
  std::string line(message);
  std::replace(line.begin(), line.end(), '\n', ' ');
  fmt::print(stderr, "kvtile: error: {}\n", line);
  return kExitBadInput;
}

int report_error(const Status& status) {
  // Library fields that a user sets through an option of another spelling.
  constexpr std::pair<std::string_view, std::string_view> kOptions[] = {
      {"head_dim", "--head-dim"},
      {"num_kv_heads", "--num-kv-heads"},
      {"num_heads", "--num-heads"},
      {"preset", "--preset"},
      {"block_size", "--block-size"},
      {"window", "--window"},
      {"softcap", "--softcap"},
      {"tile_tokens", "--tile"},
      {"fp8", "--fp8"},
      {"num_threads", "--threads"},
      {"backend", "--backend"},
      {"softmax_scale", "--softmax-scale"}};
  const std::string& message = status.message();
  for (const auto& [field, option] : kOptions) {
    if (message.size() > field.size() && message.compare(0, field.size(), field) == 0 &&
        message[field.size()] == ':') {
      return report_error(fmt::format("{}{}", option, message.substr(field.size())));
    }
  }
  return report_error(std::string_view(message));
}

std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  const size_t first = digits[0] == '-' ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double scaled = static_cast<double>(bytes);
  size_t unit = 0;
  while (scaled >= 1024 && unit + 1 < std::size(kUnits)) {
    scaled /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} bytes", bytes);
  return fmt::format("{:.2f} {} ({} bytes)", scaled, kUnits[unit], grouped(bytes));
}

std::string coloured(std::string_view text, Colour colour) {
  static const bool enabled = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  if (!enabled) return std::string(text);
  constexpr const char* kCodes[] = {"31", "32", "1", "2"};
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<int>(colour)], text);
}

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), active_(isatty(STDERR_FILENO) == 1 && total > 0) {}

Progress::~Progress() {
  if (active_ && last_permille_ >= 0) fmt::print(stderr, "\r\x1b[K");
}

void Progress::update(int64_t done) {
  if (!active_) return;
  const int permille =
      static_cast<int>(1000.0 * static_cast<double>(done) / static_cast<double>(total_));
  if (permille == last_permille_) return;
  last_permille_ = permille;
  constexpr int kWidth = 40;
  const int filled = kWidth * permille / 1000;
  fmt::print(stderr, "\r\x1b[K{} [{:=<{}}{:<{}}] {:5.1f} %", label_, "", filled, "",
             kWidth - filled, permille / 10.0);
}

Status check_json_path(const std::string& path) {
  if (path.empty()) return {};
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return json_error(path, EISDIR);
    if (!S_ISREG(info.st_mode)) return {};
  }
  const std::string directory = parent_directory(path);
  if (access(directory.c_str(), W_OK | X_OK) != 0) return json_error(path, errno);
  return {};
}

Status write_json(const std::string& path, const nlohmann::ordered_json& json) {
  if (path.empty()) return {};
  const std::string text =
      json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return json_error(path, errno);
    int error = write_all(fd, text, /*sync=*/false);
    if (::close(fd) != 0 && error == 0) error = errno;
    return error == 0 ? Status() : json_error(path, error);
  }

  std::string temporary = path + ".XXXXXX";
  const int fd = mkstemp(temporary.data());
  if (fd < 0) return json_error(path, errno);
  // mkstemp makes the file private; a report has the permissions any new file would.
  const mode_t mask = umask(0);
  umask(mask);
  int error = fchmod(fd, 0666 & ~mask) != 0 ? errno : write_all(fd, text, /*sync=*/true);
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return {};
  unlink(temporary.c_str());
  return json_error(path, error);
}

}  // namespace kvtile
