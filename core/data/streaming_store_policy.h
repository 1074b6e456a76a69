// The distance between the ranks' cores, learnt from how long it takes to write where a local peer has read.
//
// A chunk slot that a local peer has read lies in its caches. Where cores share one nearby (an L2, a chiplet's L3),
// writing it again and reading it from there is the fastest way; where they do not, each line is a round trip, and it
// is better to store past the caches. The case depends on where the operating system, or the machine below a virtual
// one, puts the ranks, and changes while they run: so a far rank writes a chunk with plain stores now and then, and
// measures the time.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace sirtaki {

class StreamingStorePolicy {
 public:
  // Returns whether the next chunk, of so many bytes, is to be written past the cache.
  bool streams(int64_t bytes) {
    if (bytes < least_bytes || slow_writes_ < slow_writes_in_a_row) return false;
    return ++written_ % plain_every != 0;
  }

  // Notes the time of a chunk that was written with plain stores.
  void noted(int64_t bytes, Nanoseconds took) {
    if (bytes < least_bytes) return;
    const bool is_slow = took * cache_line_bytes > bytes * slow_line;
    slow_writes_ = is_slow ? slow_writes_ + 1 : 0;  // a single one may be a thread that was preempted
  }

 private:
  static constexpr int64_t least_bytes = 32 << 10;
  static constexpr int64_t cache_line_bytes = 64;
  static constexpr Nanoseconds slow_line = 16;  // measured: 2 to 5 ns a line when near, 30 and more when far
  static constexpr int slow_writes_in_a_row = 3;
  static constexpr uint32_t plain_every = 64;

  int slow_writes_ = 0;
  uint32_t written_ = 0;
};

}  // namespace sirtaki
