// Lateness per rank. The coordinator sees when each rank submits, and informs all ranks from time to time, so that
// each of them can report which rank the others wait for.
#pragma once

#include <vector>

#include "base/clock.h"
#include "plan/plan.h"

namespace sirtaki {

class LatenessTracker {
 public:
  explicit LatenessTracker(size_t ranks) : by_rank_(ranks), has_changed_(ranks) {}

  // Records that a rank submitted an operation last, `by` after the others.
  void was_last(int32_t rank, Nanoseconds by);

  // Appends the changes since the last call, at most twice a second: they only travel with a Decision that is sent
  // anyway.
  void publish(Nanoseconds now, std::vector<RankLateness>& out);

 private:
  std::vector<Lateness> by_rank_;
  std::vector<bool> has_changed_;
  bool any_changed_ = false;
  Nanoseconds next_ = 0;
};

}  // namespace sirtaki
