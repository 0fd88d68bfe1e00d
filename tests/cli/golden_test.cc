// Golden caches written by the TurboQuant store: the same checks as `kvtile verify`, on the sample
// in tests/data; and proof that the checks can fail.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "cli/safetensors.h"
#include "cli/verify_golden.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::is_ok;

TEST(Golden, EveryCheckOfEveryCaseHolds) {
  std::vector<GoldenCheck> checks;
  ASSERT_TRUE(is_ok(verify_golden(KVTILE_GOLDEN_FILE, {}, &checks)));
  std::set<std::string> cases;
  for (const GoldenCheck& check : checks) {
    EXPECT_TRUE(check.ok) << check.case_name << " " << check.check << ": " << check.detail;
    cases.insert(check.case_name);
  }
  EXPECT_EQ(cases.size(), 24u);  // 23 of the file, and the shares over all
  EXPECT_GE(checks.size(), 23u * 6);
}

// A copy of the sample with one byte of one tensor changed.
class TamperedFile {
 public:
  TamperedFile(const std::string& tensor, int64_t offset) {
    SafetensorsFile file;
    EXPECT_TRUE(is_ok(SafetensorsFile::open(KVTILE_GOLDEN_FILE, &file)));
    const SafetensorsTensor* found = file.find(tensor);
    std::ifstream in(KVTILE_GOLDEN_FILE, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    EXPECT_NE(found, nullptr) << tensor;
    if (found != nullptr) {
      const auto position = bytes.find(std::string(reinterpret_cast<const char*>(found->data),
                                                   static_cast<size_t>(found->bytes)));
      EXPECT_NE(position, std::string::npos);
      bytes[position + static_cast<size_t>(offset)] =
          static_cast<char>(bytes[position + static_cast<size_t>(offset)] ^ 0x04);
    }
    path_ = ::testing::TempDir() + "kvtile_tampered_" + std::to_string(getpid()) + ".safetensors";
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~TamperedFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Golden, OneChangedByteFailsItsCaseAndNoOther) {
  const std::string victim = "3bit_nc_d64_hq4_hk4_b16_c45_q9_fp16";
  for (const char* tensor : {"key_dequant", "value_dequant", "packed_output", "continuation_lse"}) {
    // Byte 3 of a 32-bit element or 1 of a 16-bit one holds exponent bits.
    const TamperedFile file(victim + "/" + tensor, 3);
    std::vector<GoldenCheck> checks;
    ASSERT_TRUE(is_ok(verify_golden(file.path(), {}, &checks)));
    int failed = 0;
    for (const GoldenCheck& check : checks) {
      if (check.ok) continue;
      ++failed;
      EXPECT_EQ(check.case_name, victim) << check.check;
    }
    EXPECT_GE(failed, 1) << tensor;
  }
}

TEST(Golden, AFileThatIsNotOneIsRefused) {
  std::vector<GoldenCheck> checks;
  EXPECT_FALSE(verify_golden("/nonexistent.safetensors", {}, &checks).ok());
  const std::string path =
      ::testing::TempDir() + "kvtile_short_" + std::to_string(getpid()) + ".safetensors";
  std::ofstream(path, std::ios::binary) << "short";
  EXPECT_FALSE(verify_golden(path, {}, &checks).ok());
  std::remove(path.c_str());
  EXPECT_TRUE(checks.empty());
}

}  // namespace
}  // namespace kvtile
