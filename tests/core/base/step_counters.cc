// Counters of training steps: durations, and those that count as productive.
#include "observe/counters/step_counters.h"

#include <array>
#include <vector>

#include "check.h"

using namespace sirtaki;

namespace {

// Returns the counters after steps of these durations, in milliseconds. The first one has no beginning.
StepCounters after(const std::vector<int64_t>& durations) {
  StepCounters steps;
  Nanoseconds moment = seconds(100);
  steps.end(moment, 1);
  for (const int64_t duration : durations) steps.end(moment += milliseconds(duration), 1);
  return steps;
}

std::vector<int64_t> counts_of(const StepCounters& steps) {
  return {steps.times().counts().begin(), steps.times().counts().end()};
}

}  // namespace

TEST(a_step_lasts_from_the_end_of_the_one_before) {
  const StepCounters none;
  CHECK_EQUAL(none.number(), 0);
  CHECK_EQUAL(none.age(seconds(7)), 0);
  const StepCounters steps = after({250, 500, 1500});
  CHECK_EQUAL(steps.number(), 4);
  CHECK_EQUAL(steps.times().total(), milliseconds(2250));
  CHECK_EQUAL(steps.last(), milliseconds(1500));
  CHECK_EQUAL(steps.age(seconds(103)), milliseconds(750));
  CHECK_EQUAL(counts_of(steps), (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0}));
}

TEST(a_step_beyond_the_last_bound_is_counted) {
  const StepCounters steps = after({1'000'000});
  CHECK_EQUAL(counts_of(steps), (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(several_steps_that_end_at_once_share_their_time) {
  StepCounters steps;
  steps.end(seconds(1), 1);
  steps.end(seconds(3), 4);
  CHECK_EQUAL(steps.number(), 5);
  CHECK_EQUAL(steps.times().total(), seconds(2));
  CHECK_EQUAL(steps.last(), milliseconds(500));
  CHECK_EQUAL(steps.times().counts()[8], 4);
  steps.end(seconds(9), 0);  // no step
  CHECK_EQUAL(steps.age(seconds(4)), seconds(1));
}

TEST(a_long_step_is_as_productive_as_usual) {
  const StepCounters steps = after({1000, 1000, 2000, 60'000, 1000});  // 2 s are twice the median, and not more
  CHECK_EQUAL(steps.times().total(), seconds(65));
  CHECK_EQUAL(steps.productive(), seconds(6));
}

TEST(the_usual_duration_is_between_the_middle_two_of_an_even_number) {
  CHECK_EQUAL(after({1000, 1600, 2600}).productive(), milliseconds(5200));
  CHECK_EQUAL(after({1000, 1600, 2601}).productive(), milliseconds(3900));
}

TEST(steps_that_stay_longer_become_usual) {
  std::vector<int64_t> durations(15, 1000);
  durations.insert(durations.end(), 15, 4000);
  const Nanoseconds before = after(durations).productive();
  CHECK_EQUAL(before, seconds(15 + 8 + 7 * 4));  // the median of 15 changes with the eighth of the longer ones
  durations.push_back(4000);
  CHECK_EQUAL(after(durations).productive() - before, seconds(4));
}

TEST(the_latest_durations_of_an_optimizer_come_last) {
  StepCounters steps;
  std::array<Nanoseconds, 15> expected{};
  Nanoseconds moment = seconds(1);
  steps.end(moment, 1, 7);
  CHECK(steps.of_first().latest == expected);
  steps.end(moment += milliseconds(3), 1, 7);
  steps.end(moment += milliseconds(5), 1, 7);
  expected[13] = milliseconds(3);
  expected[14] = milliseconds(5);
  CHECK(steps.of_first().latest == expected);
  for (int64_t i = 1; i <= 20; ++i) steps.end(moment += milliseconds(i), 1, 7);
  for (size_t i = 0; i < 15; ++i) expected[i] = milliseconds(static_cast<int64_t>(i) + 6);
  CHECK(steps.of_first().latest == expected);
  CHECK_EQUAL(steps.of_first().number, 23);
  steps.end(moment += seconds(40), 20, 7);
  expected.fill(seconds(2));
  CHECK(steps.of_first().latest == expected);
}

TEST(the_steps_of_the_first_optimizer_include_those_of_others) {
  StepCounters steps;
  std::array<Nanoseconds, 15> expected{};
  steps.end(seconds(1), 1);  // it has no number
  CHECK_EQUAL(steps.of_first().optimizer, 0);
  for (const int64_t i : {2, 4, 6}) {
    steps.end(seconds(i), 1, 7);
    steps.end(seconds(i + 1), 1, 8);
    steps.end(seconds(i + 1), 1);
  }
  expected[13] = expected[14] = seconds(2);
  CHECK_EQUAL(steps.of_first().optimizer, 7);
  CHECK_EQUAL(steps.of_first().number, 3);
  CHECK(steps.of_first().latest == expected);
  CHECK_EQUAL(steps.number(), 10);
}

TEST(an_optimizer_that_takes_no_more_steps_is_no_longer_the_first) {
  for (const int64_t other : {8, 0}) {
    StepCounters steps;
    steps.end(seconds(1), 1, 7);
    steps.end(seconds(2), 1, 7);
    steps.end(seconds(3), 999, other);
    steps.end(seconds(4), 1, 7);  // in time
    steps.end(seconds(5), 999, other);
    CHECK_EQUAL(steps.of_first().optimizer, 7);
    CHECK_EQUAL(steps.of_first().number, 3);
    steps.end(seconds(6), 1, other);
    CHECK_EQUAL(steps.of_first().optimizer, other);
    CHECK_EQUAL(steps.of_first().number, other ? 1 : 0);
    CHECK((steps.of_first().latest == std::array<Nanoseconds, 15>{}));
    steps.end(seconds(7), 1, 9);
    CHECK_EQUAL(steps.of_first().optimizer, other ? other : 9);
  }
}
