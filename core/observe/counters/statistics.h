// Totals of this rank so far.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "observe/counters/histogram.h"
#include "observe/records/record.h"

namespace sirtaki {

// The time during which at least one activity was in progress, however many ran at once.
class BusyTime {
 public:
  void begin(Nanoseconds moment) {
    if (running_++ == 0) since_ = moment;
  }
  void end(Nanoseconds moment) {
    if (--running_ == 0) total_ += std::max<Nanoseconds>(moment - since_, 0);
  }
  Nanoseconds until(Nanoseconds moment) const {
    return total_ + (running_ ? std::max<Nanoseconds>(moment - since_, 0) : 0);
  }

 private:
  int64_t running_ = 0;
  Nanoseconds since_ = 0, total_ = 0;
};

// The lateness of a rank: how often it was the last to submit an operation that all others had submitted, and by how
// much. During that time all others waited for this rank alone.
struct Lateness {
  bool operator==(const Lateness&) const = default;

  int64_t times = 0;
  Nanoseconds total = 0, longest = 0;
};

struct Statistics {
  int64_t operations = 0, failed = 0;        // finished operations; failed ones among these
  int64_t cache_hits = 0, cache_misses = 0;  // reported by number; reported in full
  int64_t plans = 0, planned_tensors = 0, largest_plan = 0;
  int64_t bytes = 0;                         // size of this rank's tensors in those plans
  double bus_bytes = 0;                      // bytes that a rank has to send at least, with any algorithm
  WireBytes wire_bytes;                      // sent in a wire format
  BusyTime waiting;                          // time of waiting for other ranks to submit an operation
  BusyTime moving;                           // time of moving data of agreed operations
  OperationTimes wait, transfer;             // of each ended operation: until it was agreed on, and from then on
  int64_t stalls = 0;                        // reports of stalls that named this rank as missing
  std::vector<Lateness> lateness;            // by rank, the same on all ranks
};

}  // namespace sirtaki
