// The bound that the memory system sets: an all-reduce of float32 sums through one shared segment with nothing around
// it. There is no negotiation, no fusion and no error handling, and it waits without a deadline. It is the yardstick,
// not a product. benchmarks/common/memory_bound.py opens it.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace memory_bound {

constexpr size_t chunk_bytes = 256 << 10;
constexpr int most_ranks = 16;
constexpr int most_pauses = 10'000;  // a few hundred microseconds: by then, the other rank has lost its core

struct alignas(128) Flag {
  std::atomic<uint64_t> value;
};

struct Segment {
  Flag packed[most_ranks], reduced[most_ranks], copied[most_ranks];
  alignas(4096) char slots[most_ranks][2][chunk_bytes];
};

class Prototype {
 public:
  Prototype(Segment* segment, int rank, int size, bool yields)
      : segment_(*segment), rank_(rank), size_(size), yields_(yields) {}

  void allreduce(float* data, size_t count) {
    for (size_t at = 0; at < count; at += chunk_bytes / sizeof(float)) {
      const size_t n = std::min(count - at, chunk_bytes / sizeof(float));
      if (size_ == 2) pair(data + at, n);
      else sliced(data + at, n);
    }
  }

 private:
  float* slot(int rank) { return reinterpret_cast<float*>(segment_.slots[rank][turn_ % 2]); }

  void wait(const Flag& flag, uint64_t value) {
    for (int pauses = yields_ ? most_pauses : 0; flag.value.load(std::memory_order_acquire) < value;) {
      if (pauses == most_pauses) {
        sched_yield();
        continue;
      }
      ++pauses;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  // Copies the rank's own chunk in, raises the flag, and adds the peer's chunk straight into the user's buffer.
  void pair(float* data, size_t n) {
    std::memcpy(slot(rank_), data, n * sizeof(float));
    segment_.packed[rank_].value.store(turn_ + 1, std::memory_order_release);
    wait(segment_.packed[1 - rank_], turn_ + 1);
    const float* other = slot(1 - rank_);
    for (size_t i = 0; i < n; ++i) data[i] += other[i];
    ++turn_;
  }

  // Reduces this rank's slice, then copies the others'.
  void sliced(float* data, size_t n) {
    if (turn_ >= 2)
      for (int r = 0; r < size_; ++r) wait(segment_.copied[r], turn_ - 1);
    std::memcpy(slot(rank_), data, n * sizeof(float));
    segment_.packed[rank_].value.store(turn_ + 1, std::memory_order_release);
    const auto begin = [&](int r) { return n * static_cast<size_t>(r) / static_cast<size_t>(size_); };
    for (int r = 0; r < size_; ++r) wait(segment_.packed[r], turn_ + 1);
    float* mine = slot(rank_);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const float* other = slot(r);
      for (size_t i = begin(rank_); i < begin(rank_ + 1); ++i) mine[i] += other[i];
    }
    segment_.reduced[rank_].value.store(turn_ + 1, std::memory_order_release);
    for (int r = 0; r < size_; ++r) {
      wait(segment_.reduced[r], turn_ + 1);
      std::memcpy(data + begin(r), slot(r) + begin(r), (begin(r + 1) - begin(r)) * sizeof(float));
    }
    segment_.copied[rank_].value.store(turn_ + 1, std::memory_order_release);
    ++turn_;
  }

  Segment& segment_;
  int rank_, size_;
  bool yields_;
  uint64_t turn_ = 0;
};

}  // namespace memory_bound

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
