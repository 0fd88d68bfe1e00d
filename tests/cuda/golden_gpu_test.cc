// Every check of the golden file on the GPU: decoded rows and encoded bytes bit for bit up to
// explained ties, attention within the engine's bound.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cli/verify_golden.h"
#include "tests/cuda/engines.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

TEST(GoldenGpuTest, EveryCheckOnEveryEngine) {
  const char* moved = std::getenv("KVTILE_GOLDEN_FILE");
  const std::string path = moved != nullptr ? moved : KVTILE_GOLDEN_FILE;
  for (const char* engine : testing::engines_and_choice()) {
    RunOptions options;
    options.backend = engine;
    std::vector<GoldenCheck> checks;
    ASSERT_TRUE(testing::is_ok(verify_golden(path, options, &checks)));
    int ran = 0;
    for (const GoldenCheck& check : checks) {
      EXPECT_TRUE(check.ok) << engine << " " << check.case_name << " " << check.check << ": "
                            << check.detail;
      ran += check.check == "attend_packed";
    }
    EXPECT_GT(ran, 0) << engine;
  }
}

}  // namespace
}  // namespace kvtile
