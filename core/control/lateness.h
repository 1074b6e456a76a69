// Who comes last: the coordinator sees when each rank submits, and tells all ranks now and then, so that every one of
// them can say which rank the others wait for.
#pragma once

#include <vector>

#include "base/clock.h"
#include "plan/plan.h"

namespace sirtaki {

class LatenessWatch {
 public:
  explicit LatenessWatch(size_t ranks) : by_rank_(ranks), has_changed_(ranks) {}

  // A rank completed an operation that all others had submitted, so much later than the last of them.
  void was_last(int32_t rank, Nanoseconds by);

  // Adds what has changed since the last time, at most twice a second: it only travels with a Decision that is sent
  // anyway.
  void publish(Nanoseconds now, std::vector<RankLateness>& out);

 private:
  std::vector<Lateness> by_rank_;
  std::vector<bool> has_changed_;
  bool any_changed_ = false;
  Nanoseconds next_ = 0;
};

}  // namespace sirtaki
