// How many durations were in each of a few ranges, from microseconds to seconds.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace sirtaki {

// Counts durations by range. `longest`: the longest duration of each range, ascending; the last range has none.
template <std::array longest>
class Histogram {
 public:
  static constexpr auto bounds = longest;

  // Adds a duration, or as many equal ones.
  void add(Nanoseconds duration, int64_t number = 1) {
    duration = std::max<Nanoseconds>(duration, 0);  // the clock may have been read a little earlier
    const auto range = std::lower_bound(bounds.begin(), bounds.end(), duration) - bounds.begin();
    counts_[static_cast<size_t>(range)] += number;
    total_ += number * duration;
  }

  const std::array<int64_t, bounds.size() + 1>& counts() const { return counts_; }
  Nanoseconds total() const { return total_; }

 private:
  std::array<int64_t, bounds.size() + 1> counts_{};
  Nanoseconds total_ = 0;
};

// The durations of operations.
using OperationTimes = Histogram<std::array<Nanoseconds, 13>{
    microseconds(10), microseconds(50), microseconds(100), microseconds(500), milliseconds(1), milliseconds(5),
    milliseconds(10), milliseconds(50), milliseconds(100), milliseconds(500), seconds(1), seconds(5), seconds(10)}>;

// The durations of training steps.
using StepTimes = Histogram<std::array<Nanoseconds, 15>{
    milliseconds(1), microseconds(2'500), milliseconds(5), milliseconds(10), milliseconds(25), milliseconds(50),
    milliseconds(100), milliseconds(250), milliseconds(500), seconds(1), milliseconds(2'500), seconds(5), seconds(10),
    seconds(30), seconds(60)}>;

}  // namespace sirtaki
