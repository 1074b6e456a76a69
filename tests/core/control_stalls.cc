// Who is late is told, once a cause, at doubling intervals, until the deadline ends the job.
#include "control_world.h"

using namespace sirtaki;

TEST(nothing_pending_is_never_a_stall) {
  World world(2);
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.submit_all(allreduce("x"));
  world.round();
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.now += seconds(100);
  CHECK(!world.decide());
}

TEST(reports_come_at_five_ten_and_twenty_seconds) {
  World world(3);
  const Nanoseconds start = world.now;
  world.submit(0, allreduce("x"));
  world.submit(2, allreduce("x"));
  CHECK(!world.round());
  for (int64_t after : {5, 10, 20, 40, 80}) {
    CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(after));
    world.now = start + seconds(after) - 1;
    CHECK(!world.decide());
    world.now = start + seconds(after);
    CHECK(world.decide());
    for (int32_t rank : {0, 1, 2}) {
      REQUIRE(world.outcome(rank).stalls.size() == 1);
      const Stall& stall = world.outcome(rank).stalls[0];
      CHECK_EQUAL(stall.names, std::vector<std::string>{"x"});
      CHECK_EQUAL(stall.missing, std::vector<int32_t>{1});
      CHECK_EQUAL(stall.waiting, (std::vector<int32_t>{0, 2}));
      CHECK_EQUAL(stall.seconds, after);
    }
  }
  world.submit(1, allreduce("x"));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(1), "x");
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

TEST(one_cause_is_one_report) {
  World world(2);
  const Nanoseconds start = world.now;
  for (int i = 0; i < 12; ++i) {
    world.submit(0, allreduce("x" + std::to_string(i)));
    world.round();
    world.now += milliseconds(10);
  }
  world.now = start + seconds(5);
  CHECK(world.decide());
  REQUIRE(world.outcome(1).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(1).stalls[0].names.size(), 8u);
  CHECK_EQUAL(world.outcome(1).stalls[0].more_names, 4);
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(10));
}

TEST(different_causes_are_different_reports) {
  World world(3);
  world.submit(0, allreduce("x"));
  world.submit(0, allreduce("y"));
  world.submit(1, allreduce("y"));
  world.round();
  world.now += seconds(5);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 2);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, (std::vector<int32_t>{1, 2}));
  CHECK_EQUAL(world.outcome(0).stalls[1].missing, (std::vector<int32_t>{2}));
}

TEST(a_later_cause_is_reported_in_its_own_time) {
  World world(2);
  const Nanoseconds start = world.now;
  world.submit(0, allreduce("x"));
  world.round();
  world.now = start + seconds(5);
  CHECK(world.decide());
  world.now = start + seconds(7);
  world.submit(1, allreduce("y"));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(10));
  world.now = start + seconds(10);
  CHECK(world.decide());
  CHECK_EQUAL(world.outcome(0).stalls.size(), 1u);
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(12));
  world.now = start + seconds(12);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{0});
}

TEST(a_joined_rank_is_not_missing) {
  World world(3);
  world.join(1);
  world.submit(0, allreduce("x"));
  CHECK(!world.round());
  world.now += seconds(5);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{2});
  CHECK_EQUAL(world.outcome(0).stalls[0].names, std::vector<std::string>{"x"});
}

TEST(a_join_is_exempt_while_others_progress) {
  World world(2);
  world.join(0);
  CHECK(!world.round());
  for (int i = 0; i < 4; ++i) {
    world.now += seconds(4);
    world.submit(1, allreduce("x"));
    CHECK(world.round());
    CHECK(world.outcome(0).stalls.empty());
  }
  CHECK_EQUAL(world.coordinator.next_deadline(), world.now + seconds(5));
  world.now += seconds(5);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].names, std::vector<std::string>{"join"});
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{1});
  CHECK_EQUAL(world.outcome(0).stalls[0].waiting, std::vector<int32_t>{0});
}

TEST(a_waiting_group_names_who_owes_its_other_tensors) {
  World world(2);
  world.submit_all(in_group(allreduce("a"), 5, 2));
  world.submit(0, in_group(allreduce("b"), 5, 2));
  CHECK(!world.round());
  world.now += seconds(5);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{1});
  CHECK_EQUAL(world.outcome(0).stalls[0].waiting, std::vector<int32_t>{0});
  CHECK_EQUAL(world.outcome(0).stalls[0].names, (std::vector<std::string>{"a", "b"}));
}

TEST(the_deadline_ends_the_job) {
  World world(2, {.stall_report = 0, .stall_deadline = seconds(60)});
  const Nanoseconds start = world.now;
  world.submit(0, allreduce("x"));
  world.submit(0, allreduce("y"));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(60));
  world.now = start + seconds(60);
  CHECK(world.decide());
  for (int32_t rank : {0, 1}) {
    CHECK(world.outcome(rank).stalls.empty());
    CHECK_EQUAL(world.outcome(rank).fatal.code(), SRT_TIMEOUT);
    CHECK_EQUAL(std::string(world.outcome(rank).fatal.text()),
                "rank 1 (pid 71 on hostA) did not submit within 60 seconds what rank 0 (pid 70 on hostA) waited for: "
                "'x', 'y'");
  }
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

TEST(zero_means_never) {
  World world(2, {.stall_report = 0, .stall_deadline = 0});
  world.submit(0, allreduce("x"));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.now += seconds(100'000);
  CHECK(!world.decide());
}

CHECK_MAIN()
