// How far apart the ranks' cores are, learnt from how long a neighbour's bytes take to read.
//
// A chunk that was just written lies dirty in its writer's cache. Where cores share one nearby (an L2, a chiplet's
// L3), reading it from there is the fastest way; where they do not, each line is a round trip, and it is better that
// the writer stores past its cache. Which it is depends on where the operating system, or the machine below a virtual
// one, puts the ranks, and changes while they run: so a far rank writes a chunk the plain way now and then, and
// whoever reads it looks at the clock.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace sirtaki {

class Distance {
 public:
  // Whether the next chunk of so many bytes is to be written past the cache.
  bool streams(int64_t bytes) {
    if (bytes < least_bytes || slow_reads_ < slow_reads_in_a_row) return false;
    return ++written_ % plain_every != 0;
  }

  // A neighbour's chunk, written the plain way, has been read.
  void noted(int64_t bytes, Nanoseconds took) {
    if (bytes < least_bytes) return;
    const bool is_slow = took * cache_line_bytes > bytes * slow_line;
    slow_reads_ = is_slow ? slow_reads_ + 1 : 0;  // one alone may be a thread that was put aside
  }

 private:
  static constexpr int64_t least_bytes = 32 << 10;
  static constexpr int64_t cache_line_bytes = 64;
  static constexpr Nanoseconds slow_line = 24;  // measured: 5 to 8 ns a line when near, 30 and more when far
  static constexpr int slow_reads_in_a_row = 3;
  static constexpr uint32_t plain_every = 64;

  int slow_reads_ = 0;
  uint32_t written_ = 0;
};

}  // namespace sirtaki
