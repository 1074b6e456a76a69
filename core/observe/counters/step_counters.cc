#include "observe/counters/step_counters.h"

#include <algorithm>

namespace sirtaki {

void StepCounters::end(Nanoseconds moment, int64_t number, int64_t by) {
  if (number <= 0) return;
  end_of_optimizer(moment, number, by);
  const bool has_beginning = number_ != 0;
  const Nanoseconds duration = (moment - end_) / number;
  number_ += number;
  end_ = moment;
  if (!has_beginning) return;
  const Nanoseconds expected = timed_ ? usual() : duration;
  times_.add(duration, number);
  last_ = duration;
  productive_ += number * (duration > 2 * expected ? expected : duration);
  recent_[timed_++ % recent_.size()] = duration;
}

void StepCounters::end_of_optimizer(Nanoseconds moment, int64_t number, int64_t by) {
  if (!by || (of_first_.optimizer && by != of_first_.optimizer)) {
    of_first_.others += number;
    if (of_first_.others < OptimizerSteps::most_others) return;
    of_first_ = {};
    if (!by) return;
  }
  const bool has_beginning = of_first_.number != 0;
  const Nanoseconds duration = (moment - of_first_.end) / number;
  of_first_.optimizer = by;
  of_first_.number += number;
  of_first_.others = 0;
  of_first_.end = moment;
  for (int64_t i = 0; has_beginning && i < std::min(number, std::ssize(of_first_.latest)); ++i) {
    std::shift_left(of_first_.latest.begin(), of_first_.latest.end(), 1);
    of_first_.latest.back() = duration;
  }
}

// Returns the median of the recent durations.
Nanoseconds StepCounters::usual() const {
  auto sorted = recent_;
  const auto count = static_cast<std::ptrdiff_t>(std::min(timed_, sorted.size()));
  const auto upper = sorted.begin() + count / 2;
  std::nth_element(sorted.begin(), upper, sorted.begin() + count);
  if (count % 2) return *upper;
  return (*std::max_element(sorted.begin(), upper) + *upper) / 2;
}

}  // namespace sirtaki
