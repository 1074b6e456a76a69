#include "observe/step_counters.h"

#include <algorithm>

namespace sirtaki {

void StepCounters::end(Nanoseconds moment, int64_t number, int64_t by) {
  if (number <= 0) return;
  const bool has_beginning = number_ != 0;
  const Nanoseconds duration = (moment - end_) / number;
  by_ = !has_beginning || by_ == by ? by : 0;
  number_ += number;
  end_ = moment;
  if (!has_beginning) return;
  const Nanoseconds expected = timed_ ? usual() : duration;
  times_.add(duration, number);
  last_ = duration;
  productive_ += number * (duration > 2 * expected ? expected : duration);
  recent_[timed_++ % recent_.size()] = duration;
}

std::array<Nanoseconds, 15> StepCounters::latest() const {
  auto ordered = recent_;
  std::ranges::rotate(ordered, ordered.begin() + static_cast<std::ptrdiff_t>(timed_ % ordered.size()));
  return ordered;
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
