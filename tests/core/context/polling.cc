// The time for which a driver polls: it follows the duration of the operation's steps, on a simulated clock.
#include "context/engine/polling.h"

#include "check.h"

using namespace sirtaki;

namespace {

constexpr Nanoseconds spin = microseconds(200), first_moment = seconds(1);

// An operation in flight: a rank's own steps, alternating with those of its peer.
struct Moving {
  explicit Moving(Polling& polling) : polling(polling) { polling.began(clock); }

  void steps(int count, Nanoseconds own, Nanoseconds peer) {
    for (int i = 0; i < count; ++i) {
      const Nanoseconds begun = clock + peer;
      clock = begun + own;
      polling.moved(begun, clock);
    }
  }

  Polling& polling;
  Nanoseconds clock = first_moment;
};

}  // namespace

TEST(before_an_operation_a_driver_polls_for_the_setting) {
  Polling polling(spin, false);
  CHECK_EQUAL(polling.patience(false, first_moment), spin);
  Moving(polling).steps(100, milliseconds(2), milliseconds(2));
  CHECK_EQUAL(polling.patience(false, first_moment), spin);
}

TEST(nobody_sleeps_while_a_peer_works_on_a_chunk) {
  for (const Nanoseconds step : {microseconds(20), microseconds(190), microseconds(600), milliseconds(4)}) {
    Polling polling(spin, false);
    Moving moving(polling);
    moving.steps(1, step, 0);  // the rank's own first chunk
    for (int i = 0; i < 50; ++i) {
      CHECK(polling.patience(true, first_moment) > 2 * step);  // a peer may be half as fast
      CHECK(polling.patience(true, first_moment) >= spin);
      moving.steps(1, step, step);
    }
  }
}

TEST(a_peer_that_is_slower_from_step_to_step_is_followed) {
  Polling polling(spin, false);
  Moving moving(polling);
  moving.steps(1, microseconds(100), 0);
  for (Nanoseconds peer = microseconds(200); peer < milliseconds(4); peer *= 2) {
    CHECK(polling.patience(true, first_moment) >= peer);
    moving.steps(1, microseconds(100), peer);
  }
}

TEST(a_late_peer_is_waited_for_asleep_and_teaches_nothing) {
  Polling polling(spin, false);
  Moving moving(polling);
  moving.steps(10, microseconds(100), microseconds(100));
  const Nanoseconds before = polling.patience(true, first_moment);
  CHECK(before < milliseconds(1));
  moving.steps(1, microseconds(100), seconds(3));
  CHECK(polling.patience(true, first_moment) <= before);
}

TEST(polling_in_an_operation_is_bounded) {
  Polling polling(spin, false);
  Moving(polling).steps(10, seconds(1), seconds(1));
  CHECK(polling.patience(true, first_moment) <= milliseconds(20));
  Polling wished(milliseconds(500), false);  // except where the setting is longer
  Moving(wished).steps(10, seconds(1), seconds(1));
  CHECK_EQUAL(wished.patience(true, first_moment), milliseconds(500));
}

TEST(long_steps_are_forgotten_when_steps_are_short) {
  Polling polling(spin, false);
  Moving moving(polling);
  moving.steps(10, milliseconds(2), milliseconds(2));
  CHECK(polling.patience(true, first_moment) >= milliseconds(4));
  moving.steps(100, microseconds(1), microseconds(1));
  CHECK_EQUAL(polling.patience(true, first_moment), spin);
}

TEST(the_time_between_operations_is_no_step) {
  Polling polling(spin, false);
  for (int i = 0; i < 20; ++i) {
    Moving moving(polling);
    moving.clock = seconds(1 + i);
    polling.began(moving.clock);
    moving.steps(4, microseconds(3), microseconds(3));
  }
  CHECK_EQUAL(polling.patience(true, first_moment), spin);
}

TEST(a_core_that_others_may_want_is_yielded_soon) {
  CHECK(!Polling(spin, false).yields(microseconds(1), seconds(1), false));
  CHECK(Polling(spin, false).yields(microseconds(50), seconds(1), false));
  CHECK(Polling(spin, true).yields(0, seconds(1), false));
}

TEST(a_core_is_kept_from_somebody_who_does_not_give_it_back) {
  Polling polling(spin, false);
  const Nanoseconds begun = seconds(1), peer = begun + microseconds(100), slice = peer + milliseconds(4);
  polling.yielded(begun, peer);
  CHECK(polling.yields(microseconds(50), peer, false));
  polling.yielded(peer, slice);
  CHECK(!polling.yields(microseconds(50), slice, false));
  CHECK(!polling.yields(microseconds(50), slice + milliseconds(100), false));
  CHECK(polling.yields(microseconds(50), slice, true));  // the program computes beside the engine's thread
  CHECK(polling.yields(microseconds(50), slice + seconds(1), false));  // it may be gone by then
}

TEST(a_driver_whose_core_another_program_wants_sleeps_soon) {
  Polling polling(spin, false);
  Moving moving(polling);
  moving.steps(10, milliseconds(2), milliseconds(2));
  const Nanoseconds slice = moving.clock + milliseconds(4);
  CHECK(polling.patience(true, slice) > milliseconds(4));
  polling.yielded(moving.clock, slice);
  CHECK(polling.patience(true, slice) <= microseconds(50));
  CHECK(polling.patience(true, slice + milliseconds(100)) <= microseconds(50));
  CHECK(polling.patience(true, slice + seconds(1)) > milliseconds(4));  // the program may be gone by then
  CHECK_EQUAL(polling.patience(false, slice), spin);
}

TEST(ranks_that_share_cores_go_on_yielding) {
  Polling polling(spin, true);
  polling.yielded(seconds(1), seconds(2));
  CHECK(polling.yields(0, seconds(2), false));
}
