// Guard pages and sentinels.
#include "tests/testing/buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvtile::testing {
namespace {

constexpr std::byte kSentinel{0xA5};
constexpr size_t kMargin = 4096;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

GuardedBuffer::GuardedBuffer(size_t bytes) : size_(bytes) {
  const size_t page = page_bytes();
  const size_t body = (bytes + page - 1) / page * page;
  mapping_bytes_ = body + 2 * page;
  void* mapping =
      mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  data_ = mapping_ + page + body - bytes;
  if (body == 0) return;
  if (mprotect(mapping_ + page, body, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  std::memset(mapping_ + page, 0xFF, body);
}

GuardedBuffer::~GuardedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void GuardedBuffer::swap(GuardedBuffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
}

void GuardedBuffer::protect(bool read_only) {
  const size_t page = page_bytes();
  if (mapping_bytes_ <= 2 * page) return;
  mprotect(mapping_ + page, mapping_bytes_ - 2 * page,
           read_only ? PROT_READ : PROT_READ | PROT_WRITE);
}

SentinelBuffer::SentinelBuffer(size_t bytes)
    : storage_(bytes + 2 * kMargin + 64, kSentinel), size_(bytes) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data()) + kMargin;
  offset_ = kMargin + (64 - address % 64) % 64;
}

void SentinelBuffer::refill() { std::fill(storage_.begin(), storage_.end(), kSentinel); }

bool SentinelBuffer::margins_intact() const {
  const auto kept = [](std::byte b) { return b == kSentinel; };
  const auto begin = storage_.begin();
  return std::all_of(begin, begin + static_cast<int64_t>(offset_), kept) &&
         std::all_of(begin + static_cast<int64_t>(offset_ + size_), storage_.end(), kept);
}

bool SentinelBuffer::untouched(size_t first, size_t end) const {
  return std::all_of(data() + first, data() + end, [](std::byte b) { return b == kSentinel; });
}

}  // namespace kvtile::testing
