// Every check of a golden file: packed caches written by the TurboQuant store, what its reader made
// of them, and float64 attention over both. A decoder must reproduce the rows bit for bit, an
// encoder the bytes, up to counted and explained ties; attend() is held to the file's outputs at
// their own rounding and to the oracle at the engine's bound. Used by `kvtile verify` and by the
// tests.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvtile/run.h"
#include "kvtile/status.h"

namespace kvtile {

struct GoldenCheck {
  std::string case_name;
  std::string check;
  bool ok = false;
  std::string detail;  // the measured figure and its bound, on one line
};

// Appends one entry a check, cases in name order. Not Ok if the file does not have the documented
// layout (the message names the tensor or field); a check that fails is an entry with ok = false.
// `on_check`, if set, sees each entry as it is made.
Status verify_golden(const std::string& path, const RunOptions& options,
                     std::vector<GoldenCheck>* checks,
                     const std::function<void(const GoldenCheck&)>& on_check = {});

}  // namespace kvtile
