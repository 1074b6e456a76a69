// The training steps of this rank: updates by distributed optimizers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "observe/counters/histogram.h"

namespace sirtaki {

// The steps of the first optimizer that has a number. Each lasts from the end of its own step before.
struct OptimizerSteps {
  // Steps of others without one of its own after which it no longer counts as the first.
  static constexpr int64_t most_others = 1000;

  int64_t optimizer = 0, number = 0, others = 0;  // others: since the last of its own
  Nanoseconds end = 0;
  std::array<Nanoseconds, 15> latest{};  // the last durations, the latest last, after zeros while there are fewer
};

class StepCounters {
 public:
  // Counts a step, or as many equal ones, that have ended at `moment`. A step lasts from the end of the one before it.
  // The first one has no beginning: it is counted, not timed. `by`: the number of the optimizer; 0: it has none.
  void end(Nanoseconds moment, int64_t number, int64_t by = 0);

  int64_t number() const { return number_; }
  const StepTimes& times() const { return times_; }
  Nanoseconds last() const { return last_; }  // the duration of the last one
  // Returns the duration of all timed steps. One of more than twice the usual duration contains something else, such
  // as an evaluation, and counts as a usual one.
  Nanoseconds productive() const { return productive_; }
  const OptimizerSteps& of_first() const { return of_first_; }
  // Returns the time since the last one; 0 before the first.
  Nanoseconds age(Nanoseconds now) const { return number_ ? now - end_ : 0; }

 private:
  void end_of_optimizer(Nanoseconds moment, int64_t number, int64_t by);
  Nanoseconds usual() const;

  int64_t number_ = 0;
  StepTimes times_;
  Nanoseconds end_ = 0, last_ = 0, productive_ = 0;
  std::array<Nanoseconds, 15> recent_{};  // the last durations, as a ring
  size_t timed_ = 0;                      // durations that it has held
  OptimizerSteps of_first_;
};

}  // namespace sirtaki
