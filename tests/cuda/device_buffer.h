// Device memory for tests: an allocation of its own between watched margins, filled with a pattern,
// so that stray writes and unwritten outputs show.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvtile::testing {

#define KVTILE_CUDA_OK(call) \
  ASSERT_EQ((call), cudaSuccess) << cudaGetErrorString(cudaGetLastError())

class DeviceBuffer {
 public:
  static constexpr size_t kMargin = 256;
  static constexpr int kPattern = 0xA5;

  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&base_, bytes + 2 * kMargin), cudaSuccess);
    EXPECT_EQ(cudaMemset(base_, kPattern, bytes + 2 * kMargin), cudaSuccess);
  }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
    upload(host.data());
  }
  ~DeviceBuffer() { cudaFree(base_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  size_t size() const { return bytes_; }
  template <typename T = std::byte>
  T* as() const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + kMargin);
  }
  void upload(const void* host) {
    EXPECT_EQ(cudaMemcpy(as<>(), host, bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  void fill(int byte) { EXPECT_EQ(cudaMemset(as<>(), byte, bytes_), cudaSuccess); }
  // Synchronises: work queued before has finished.
  std::vector<std::byte> download() const {
    std::vector<std::byte> host(bytes_);
    EXPECT_EQ(cudaMemcpy(host.data(), as<>(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }
  ::testing::AssertionResult margins_intact() const {
    std::byte before[kMargin], after[kMargin];
    const auto* base = static_cast<const std::byte*>(base_);
    EXPECT_EQ(cudaMemcpy(before, base, kMargin, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(after, base + kMargin + bytes_, kMargin, cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (size_t i = 0; i < kMargin; ++i) {
      if (before[i] != std::byte{kPattern} || after[i] != std::byte{kPattern}) {
        return ::testing::AssertionFailure() << "written " << i << " bytes outside the buffer";
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
  }
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvtile::testing
