// What the commands share in talking to a person: errors of one line, colour and progress on a
// terminal only, and JSON reports that appear whole or not at all.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "kvtile/status.h"

namespace kvtile {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailedCheck = 1;  // the input was good, a result was not
inline constexpr int kExitBadInput = 2;     // arguments, files, disk

// Prints "kvtile: error: <message>" on one line of stderr and returns kExitBadInput.
int report_error(std::string_view message);
// The same for a library status, whose leading argument name becomes the command-line option.
int report_error(const Status& status);

// "1,234,567" and "1.18 GiB (1,234,567 bytes)".
std::string grouped(int64_t value);
std::string bytes_text(int64_t bytes);

enum class Colour { kRed, kGreen, kBold, kDim };
// `text` in colour if stdout is a terminal and NO_COLOR is unset, else unchanged.
std::string coloured(std::string_view text, Colour colour);

// A bar on stderr while it is a terminal; silent otherwise. The destructor erases it.
class Progress {
 public:
  Progress(std::string label, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(int64_t done);

 private:
  std::string label_;
  int64_t total_;
  int last_permille_ = -1;
  bool active_;
};

// Fails early where writing `path` is bound to fail, so that a long run is not lost at its end. An
// empty path is fine: no report was asked for.
Status check_json_path(const std::string& path);
// Writes through a temporary file beside `path` and a rename; on failure nothing is left behind.
// Special files (a pipe, /dev/null) are written in place. An empty path writes nothing.
Status write_json(const std::string& path, const nlohmann::ordered_json& json);

}  // namespace kvtile
