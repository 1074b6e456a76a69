// The choice between plain and streaming (non-temporal) stores, by the measured distance between the ranks' cores.
//
// A chunk slot that a local peer has read is in its caches. If the cores share a cache nearby (an L2, a chiplet's
// L3), the fastest way is to write the slot again and read it from there; if not, each line costs a round trip, and
// streaming stores are faster. This depends on where the operating system, or a hypervisor, places the ranks, and
// changes while they run. A rank therefore measures how long plain stores take, also with every 64th chunk while it
// uses streaming stores.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace sirtaki {

class StreamingStorePolicy {
 public:
  // Returns whether the next chunk, of this many bytes, is to be written with streaming stores.
  bool streams(int64_t bytes) {
    if (bytes < least_bytes || slow_writes_ < slow_writes_in_a_row) return false;
    return ++written_ % plain_every != 0;
  }

  // Records the time in which a chunk was written with plain stores.
  void noted(int64_t bytes, Nanoseconds took) {
    if (bytes < least_bytes) return;
    const bool is_slow = took * cache_line_bytes > bytes * slow_line;
    slow_writes_ = is_slow ? slow_writes_ + 1 : 0;  // a single slow write may be due to preemption
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
