// The training steps of this rank: updates by distributed optimizers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "observe/histogram.h"

namespace sirtaki {

class StepCounters {
 public:
  // Counts a step, or as many equal ones, that have ended at `moment`. A step lasts from the end of the one before it.
  // The first one has no beginning: it is counted, not timed. `by`: the number of the optimizer; 0: not known.
  void end(Nanoseconds moment, int64_t number, int64_t by = 0);

  int64_t number() const { return number_; }
  const StepTimes& times() const { return times_; }
  Nanoseconds last() const { return last_; }  // the duration of the last one
  // Returns the duration of all timed steps. One of more than twice the usual duration contains something else, such
  // as an evaluation, and counts as a usual one.
  Nanoseconds productive() const { return productive_; }
  // Returns the optimizer that has ended all of them; 0: several, or one that is not known.
  int64_t by() const { return by_; }
  // Returns the durations of the last ones, the latest last, after zeros while there are fewer.
  std::array<Nanoseconds, 15> latest() const;
  // Returns the time since the last one; 0 before the first.
  Nanoseconds age(Nanoseconds now) const { return number_ ? now - end_ : 0; }

 private:
  Nanoseconds usual() const;

  int64_t number_ = 0, by_ = 0;
  StepTimes times_;
  Nanoseconds end_ = 0, last_ = 0, productive_ = 0;
  std::array<Nanoseconds, 15> recent_{};  // of latest(), as a ring
  size_t timed_ = 0;                      // durations that it has held
};

}  // namespace sirtaki
