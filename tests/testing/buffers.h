// Memory that tells on its users: GuardedBuffer ends at an unmapped page, SentinelBuffer watches
// the bytes around an output. Inputs of every attention test live in the first, outputs in the
// second.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtile::testing {

// `bytes` bytes followed by (and, a page or less earlier, preceded by) unmapped memory. Filled
// with 0xFF. The start is as aligned as the size allows.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept { swap(other); }
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

  void protect(bool read_only);  // a write then faults

 private:
  void swap(GuardedBuffer& other) noexcept;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

// `bytes` bytes at a 64-byte boundary, filled with a pattern, between watched margins.
class SentinelBuffer {
 public:
  SentinelBuffer() = default;
  explicit SentinelBuffer(size_t bytes);
  SentinelBuffer(SentinelBuffer&&) = default;
  SentinelBuffer& operator=(SentinelBuffer&&) = default;

  std::byte* data() { return storage_.data() + offset_; }
  const std::byte* data() const { return storage_.data() + offset_; }
  size_t size() const { return size_; }
  void refill();                                   // pattern again, margins included
  bool margins_intact() const;                     // nothing was written outside
  bool untouched(size_t first, size_t end) const;  // bytes [first, end) still hold the pattern
  bool untouched() const { return margins_intact() && untouched(0, size_); }

 private:
  std::vector<std::byte> storage_;
  size_t offset_ = 0;
  size_t size_ = 0;
};

}  // namespace kvtile::testing
