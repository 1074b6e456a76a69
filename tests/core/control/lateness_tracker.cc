// All ranks receive the same report of the last rank and of its lateness.
#include "control_world.h"

using namespace sirtaki;

TEST(the_last_rank_is_charged_with_what_all_others_waited) {
  World world(3);
  world.submit(0, allreduce("x"));
  world.report(0);
  world.now += milliseconds(30);
  world.submit(2, allreduce("x"));
  world.report(2);
  world.now += milliseconds(200);
  world.submit(1, allreduce("x"));
  CHECK(world.round());
  for (int32_t rank : {0, 1, 2}) {
    REQUIRE(world.outcome(rank).lateness.size() == 1);
    CHECK_EQUAL(world.outcome(rank).lateness[0].rank, 1);
    CHECK(world.outcome(rank).lateness[0].lateness == (Lateness{1, milliseconds(200), milliseconds(200)}));
  }
}

TEST(lateness_travels_at_most_twice_a_second) {
  World world(2);
  int told = 0;
  for (int i = 0; i < 20; ++i) {
    world.submit_all(allreduce("x"));
    CHECK(world.round());
    told += static_cast<int>(world.outcome(0).lateness.size());
    world.now += milliseconds(100);
  }
  CHECK_EQUAL(told, 4);
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  REQUIRE(world.outcome(1).lateness.size() == 1);
  CHECK_EQUAL(world.outcome(1).lateness[0].lateness.times, 21);
}

TEST(lateness_alone_is_no_reason_to_say_anything) {
  World world(2);
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  world.now += seconds(1);
  CHECK(!world.decide());
}

TEST(a_world_of_one_is_never_late) {
  World world(1);
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  CHECK(world.outcome(0).lateness.empty());
}
