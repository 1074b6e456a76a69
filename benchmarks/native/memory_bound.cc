// The memory-bound prototype as plain C, for the benchmarks' Python processes. benchmarks/common/memory_bound.py opens
// it.
#include "memory_bound.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns a descriptor of an empty segment that other processes may open; -1 on failure.
EXPORT int memory_bound_segment() {
  const int fd = ::memfd_create("sirtaki-memory-bound", MFD_CLOEXEC);
  if (fd >= 0 && ::ftruncate(fd, sizeof(memory_bound::Segment)) == 0) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

// Opens this process's end of a segment; returns null on failure.
EXPORT void* memory_bound_open(int fd, int rank, int size, int yields) {
  void* at = ::mmap(nullptr, sizeof(memory_bound::Segment), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  return new memory_bound::Prototype(static_cast<memory_bound::Segment*>(at), rank, size, yields != 0);
}

EXPORT void memory_bound_allreduce(void* prototype, float* const* tensors, const int64_t* counts, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    static_cast<memory_bound::Prototype*>(prototype)->allreduce(tensors[i], static_cast<size_t>(counts[i]));
}
