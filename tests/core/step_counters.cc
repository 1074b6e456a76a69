// Counters of training steps: durations, and those that count as productive.
#include "observe/step_counters.h"

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

TEST(the_latest_durations_come_last) {
  std::array<Nanoseconds, 15> expected{};
  expected[13] = milliseconds(3);
  expected[14] = milliseconds(5);
  CHECK(after({3, 5}).latest() == expected);
  std::vector<int64_t> durations;
  for (int64_t i = 1; i <= 20; ++i) durations.push_back(i);
  for (size_t i = 0; i < 15; ++i) expected[i] = milliseconds(static_cast<int64_t>(i) + 6);
  CHECK(after(durations).latest() == expected);
}

TEST(steps_are_those_of_an_optimizer_until_another_one_steps) {
  StepCounters steps;
  steps.end(seconds(1), 1, 7);
  CHECK_EQUAL(steps.by(), 7);
  steps.end(seconds(2), 1, 7);
  CHECK_EQUAL(steps.by(), 7);
  steps.end(seconds(3), 1, 8);
  CHECK_EQUAL(steps.by(), 0);
  steps.end(seconds(4), 1, 8);
  CHECK_EQUAL(steps.by(), 0);
}

CHECK_MAIN()
