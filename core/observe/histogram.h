// How many durations were in each of a few ranges, from microseconds to seconds.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace sirtaki {

class Histogram {
 public:
  // The longest duration of each range; the last range has none.
  static constexpr std::array<Nanoseconds, 13> bounds = {
      microseconds(10), microseconds(50), microseconds(100), microseconds(500), milliseconds(1),
      milliseconds(5),  milliseconds(10), milliseconds(50),  milliseconds(100), milliseconds(500),
      seconds(1),       seconds(5),       seconds(10)};

  void add(Nanoseconds duration) {
    duration = std::max<Nanoseconds>(duration, 0);  // the clock may have been read a little earlier
    const auto range = std::lower_bound(bounds.begin(), bounds.end(), duration) - bounds.begin();
    ++counts_[static_cast<size_t>(range)];
    total_ += duration;
  }

  const std::array<int64_t, bounds.size() + 1>& counts() const { return counts_; }
  Nanoseconds total() const { return total_; }

 private:
  std::array<int64_t, bounds.size() + 1> counts_{};
  Nanoseconds total_ = 0;
};

}  // namespace sirtaki
