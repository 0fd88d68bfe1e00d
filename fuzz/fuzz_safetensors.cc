// Hostile files against the safetensors reader: whatever the bytes, open() returns a Status or a
// view whose every tensor lies inside the file. The input reaches the reader as a real file, since
// the mapping is part of what is tested.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cli/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = memfd_create("input", 0);
  if (fd < 0 || write(fd, data, size) != static_cast<ssize_t>(size)) abort();
  kvtile::SafetensorsFile file;
  if (kvtile::SafetensorsFile::open("/proc/self/fd/" + std::to_string(fd), &file).ok()) {
    unsigned sum = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      if (tensor.bytes < 0 || tensor.bytes > static_cast<int64_t>(size)) abort();
      for (int64_t i = 0; i < tensor.bytes; ++i) sum += static_cast<unsigned>(tensor.data[i]);
      if (file.find(name) == nullptr) abort();
    }
    volatile unsigned sink = sum;
    static_cast<void>(sink);
  }
  close(fd);
  return 0;
}
