// Late ranks are reported, once per cause, at doubling intervals, until the deadline ends the job.
#include "control/lateness/stall_text.h"
#include "control_world.h"

using namespace sirtaki;

namespace {

// Rank 0 alone submits a request, and waits for so long: by default until the first report is due.
void let_rank_0_wait(World& world, Nanoseconds time = seconds(5)) {
  world.submit(0, allreduce("x"));
  CHECK(!world.round());
  world.now += time;
}

}  // namespace

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
    CHECK(world.tell_stalls());
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
  for (int32_t rank : {0, 1, 2}) {
    REQUIRE(world.outcome(rank).stalls.size() == 1);
    const Stall& end = world.outcome(rank).stalls[0];
    CHECK(end.is_over);
    CHECK_EQUAL(end.missing, std::vector<int32_t>{1});
    CHECK_EQUAL(end.seconds, 80);
  }
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

TEST(the_end_of_a_stall_is_told_once_and_only_if_it_was_reported) {
  World world(2);
  for (const char* name : {"x", "y"}) world.submit(0, allreduce(name));
  world.round();
  world.now += seconds(4);
  world.submit_all(allreduce("quick"));
  CHECK(world.round());
  CHECK(world.outcome(0).stalls.empty());
  world.now += seconds(1);
  CHECK(world.tell_stalls());
  world.now += seconds(2);
  for (const char* name : {"x", "y"}) world.submit(1, allreduce(name));
  CHECK(world.round());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK(world.outcome(0).stalls[0].is_over);
  CHECK_EQUAL(world.outcome(0).stalls[0].names, (std::vector<std::string>{"x", "y"}));
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  CHECK(world.outcome(0).stalls.empty());
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
  CHECK(world.tell_stalls());
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
  CHECK(world.tell_stalls());
  REQUIRE(world.outcome(0).stalls.size() == 2);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, (std::vector<int32_t>{1, 2}));
  CHECK_EQUAL(world.outcome(0).stalls[1].missing, (std::vector<int32_t>{2}));
}

TEST(a_later_cause_is_reported_in_its_own_time) {
  World world(2);
  const Nanoseconds start = world.now;
  let_rank_0_wait(world);
  CHECK(world.tell_stalls());
  world.now = start + seconds(7);
  world.submit(1, allreduce("y"));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(10));
  world.now = start + seconds(10);
  CHECK(world.tell_stalls());
  CHECK_EQUAL(world.outcome(0).stalls.size(), 1u);
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(12));
  world.now = start + seconds(12);
  CHECK(world.tell_stalls());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{0});
}

TEST(a_joined_rank_is_not_missing) {
  World world(3);
  world.join(1);
  let_rank_0_wait(world);
  CHECK(world.tell_stalls());
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
  CHECK(world.tell_stalls());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].names, std::vector<std::string>{"join"});
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{1});
  CHECK_EQUAL(world.outcome(0).stalls[0].waiting, std::vector<int32_t>{0});
}

TEST(the_end_of_a_join_that_stalled_is_told) {
  World world(2);
  world.join(0);
  CHECK(!world.round());
  world.now += seconds(5);
  CHECK(world.tell_stalls());
  world.submit(1, allreduce("x"));  // rank 1 proceeds, and so the join is not late any more
  CHECK(world.round());
  CHECK(world.outcome(0).stalls.empty());
  world.now += seconds(2);
  world.join(1);
  CHECK(world.round());
  for (int32_t rank : {0, 1}) {
    REQUIRE(world.outcome(rank).stalls.size() == 1);
    const Stall& end = world.outcome(rank).stalls[0];
    CHECK(end.is_over);
    CHECK_EQUAL(end.names, std::vector<std::string>{"join"});
    CHECK_EQUAL(end.missing, std::vector<int32_t>{1});
    CHECK_EQUAL(end.seconds, 7);
  }
  for (int32_t rank : {1, 0}) world.join(rank);
  CHECK(world.round());
  CHECK(world.outcome(0).stalls.empty());
}

TEST(a_waiting_group_names_who_owes_its_other_tensors) {
  World world(2);
  world.submit_all(in_group(allreduce("a"), 5, 2));
  world.submit(0, in_group(allreduce("b"), 5, 2));
  CHECK(!world.round());
  world.now += seconds(5);
  CHECK(world.tell_stalls());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(world.outcome(0).stalls[0].missing, std::vector<int32_t>{1});
  CHECK_EQUAL(world.outcome(0).stalls[0].waiting, std::vector<int32_t>{0});
  CHECK_EQUAL(world.outcome(0).stalls[0].names, (std::vector<std::string>{"a", "b"}));
}

TEST(the_deadline_ends_the_job_and_says_what_the_late_rank_does) {
  World world(2, {.stall_report = 0, .stall_deadline = seconds(60)});
  const Nanoseconds start = world.now;
  world.frames = {{"evaluate", "/home/user/train.py", 88}};
  world.submit(0, allreduce("x"));
  world.submit(0, allreduce("y"));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(60));
  world.now = start + seconds(60);
  CHECK(world.tell_stalls());
  for (int32_t rank : {0, 1}) {
    CHECK(world.outcome(rank).stalls.empty());
    CHECK_EQUAL(world.outcome(rank).fatal.code(), SRT_TIMEOUT);
    CHECK_EQUAL(world.outcome(rank).culprit, 1);
    CHECK_EQUAL(std::string(world.outcome(rank).fatal.text()),
                "given up after 60 seconds (stall_deadline): rank 0 (pid 70 on hostA) waits for 'x', 'y'; "
                "rank 1 (pid 71 on hostA) has not submitted them and is in evaluate() at train.py:88");
  }
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

// Ranks 0 and 1 wait for different tensors, and say so.
void let_two_ranks_wait(World& world) {
  world.submit(0, allreduce("x"));
  world.submit(1, allreduce("y"));
  CHECK(!world.round());
}

// Makes the decision that is due now. These ranks say that they wait for these tensors.
bool answer(World& world, const std::vector<std::pair<int32_t, std::string>>& waits) {
  if (!world.decide()) return false;
  for (const auto& [rank, name] : waits) {
    if (!world.outcome(rank).is_asked) continue;
    world.negotiators[static_cast<size_t>(rank)]->answer({rank, true, name, {{"step", "/home/user/train.py", 9}}});
    world.report(rank);
  }
  return world.decide();
}

TEST(ranks_that_wait_for_each_other_end_the_job_at_the_second_report) {
  World world(2);
  const Nanoseconds start = world.now;
  let_two_ranks_wait(world);
  world.now = start + seconds(5);
  CHECK(answer(world, {{0, "x"}, {1, "y"}}));
  CHECK_EQUAL(world.outcome(0).stalls.size(), size_t{2});
  CHECK_EQUAL(world.outcome(0).fatal.code(), SRT_OK);
  world.now = start + seconds(10);
  CHECK(answer(world, {{0, "x"}, {1, "y"}}));
  for (int32_t rank : {0, 1}) {
    CHECK_EQUAL(world.outcome(rank).fatal.code(), SRT_TIMEOUT);
    CHECK_EQUAL(
        std::string(world.outcome(rank).fatal.text()),
        "given up after 10 seconds (ranks wait for each other): rank 0 (pid 70 on hostA) waits for 'x'; rank 1 "
        "(pid 71 on hostA) has not submitted it: it waits for 'y' in step() at train.py:9. The ranks have taken "
        "different branches: each has to make the same calls");
  }
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

TEST(circles_of_ranks_with_different_beginnings_end_the_job) {
  World world(4);
  const Nanoseconds start = world.now;
  world.submit(0, allreduce("x"));
  CHECK(!world.round());
  world.now = start + seconds(3);
  for (int32_t rank : {1, 2, 3}) world.submit(rank, allreduce("y"));
  CHECK(!world.round());
  const std::vector<std::pair<int32_t, std::string>> waits{{0, "x"}, {1, "y"}, {2, "y"}, {3, "y"}};
  for (int64_t after : {5, 8, 10}) {
    world.now = start + seconds(after);
    CHECK(answer(world, waits));
    CHECK_EQUAL(world.outcome(0).fatal.code(), SRT_OK);
  }
  world.now = start + seconds(13);
  CHECK(answer(world, waits));
  CHECK_EQUAL(world.outcome(2).fatal.code(), SRT_TIMEOUT);
}

TEST(ranks_of_which_one_may_go_on_are_awaited) {
  const std::vector<std::vector<std::pair<int32_t, std::string>>> answers{
      {{0, "x"}, {1, ""}},   // rank 1 computes, or moves data
      {{0, "x"}, {1, "z"}},  // an operation that moves on
      {{0, "x"}},            // rank 1 does not answer
  };
  for (const auto& waits : answers) {
    World world(2);
    const Nanoseconds start = world.now;
    let_two_ranks_wait(world);
    for (int64_t after : {5, 10, 20, 40}) {
      world.now = start + seconds(after);
      if (!answer(world, waits)) {  // a second for the rank that does not answer
        world.now += seconds(1);
        CHECK(world.decide());
      }
      CHECK_EQUAL(world.outcome(0).fatal.code(), SRT_OK);
    }
  }
}

TEST(a_rank_that_does_not_answer_is_awaited_for_a_second) {
  World world(3);
  const Nanoseconds start = world.now;
  let_rank_0_wait(world);
  CHECK(world.decide());
  CHECK(!world.outcome(0).is_asked && world.outcome(1).is_asked && world.outcome(2).is_asked);
  CHECK(world.outcome(0).stalls.empty());
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(6));
  world.negotiators[1]->answer({1, true, {}, {{"load", "data.py", 3}}});
  world.report(1);
  CHECK(!world.decide());
  world.now = start + seconds(6);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  const Stall& stall = world.outcome(0).stalls[0];
  REQUIRE(stall.rank_reports.size() == 2);
  CHECK(stall.rank_reports[0].answers && !stall.rank_reports[1].answers);
  CHECK(stall.rank_reports[0].frames == (std::vector<StackFrame>{{"load", "data.py", 3}}));
  CHECK_EQUAL(world.coordinator.next_deadline(), start + seconds(10));
}

TEST(nothing_is_told_of_what_has_come_meanwhile) {
  World world(2);
  let_rank_0_wait(world);
  CHECK(world.decide());
  CHECK(world.outcome(1).is_asked);
  world.submit(1, allreduce("x"));
  world.negotiators[1]->answer({1, true, {}, {}});
  CHECK(world.round());
  CHECK_EQUAL(world.plans(0), "x");
  CHECK(world.outcome(0).stalls.empty());
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.submit(0, allreduce("y"));
  world.round();
  world.now += seconds(1);
  CHECK(!world.decide());
  world.now += seconds(4);
  CHECK(world.decide());
  CHECK(world.outcome(1).is_asked);
}

TEST(an_answer_that_nobody_has_asked_for_is_ignored) {
  World world(2);
  world.submit(0, allreduce("x"));
  world.negotiators[1]->answer({1, true, "other", {}});
  CHECK(!world.round());
  world.report(1);
  world.now += seconds(5);
  CHECK(world.decide());
  world.negotiators[0]->answer({0, true, "other", {}});
  world.report(0);
  CHECK(!world.decide());
}

TEST(zero_means_never) {
  World world(2, {.stall_report = 0, .stall_deadline = 0});
  let_rank_0_wait(world, 0);
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.now += seconds(100'000);
  CHECK(!world.decide());
}

// The rank's leader may be the cause, and is named in that case.
TEST(who_reports_for_a_rank_that_does_not_answer_is_known) {
  World world(4, {}, {}, {-1, -1, 1, 1});
  let_rank_0_wait(world);
  CHECK(world.decide());
  world.negotiators[3]->answer({3, true, "y", {}});
  world.report(3);
  world.now += seconds(1);
  CHECK(world.decide());
  REQUIRE(world.outcome(0).stalls.size() == 1);
  std::vector<int32_t> leaders;
  for (const StalledRankReport& one : world.outcome(0).stalls[0].rank_reports) leaders.push_back(one.leader);
  CHECK_EQUAL(leaders, (std::vector<int32_t>{-1, 1, -1}));
}

// ---- In words -------------------------------------------------------------------------------------------------

namespace {

const std::vector<StackFrame> evaluating{{"wait", "/usr/lib/python3.11/threading.py", 320},
                                         {"evaluate", "/home/user/train.py", 88},
                                         {"<module>", "/home/user/train.py", 120}};

std::string words(Stall stall) { return describe_stall(stall, rank_names(6)); }

}  // namespace

TEST(words_name_who_waits_who_is_missing_and_where_it_is) {
  CHECK_EQUAL(words({0, {"w"}, 0, {2}, {0, 1, 3}, 5, {{2, true, {}, evaluating}}}),
              "ranks 0, 1 and 3 wait for 'w'; rank 2 (pid 72 on hostA) has not submitted it and is in evaluate() at "
              "train.py:88");
  CHECK_EQUAL(words({0, {"a", "b", "c", "d"}, 7, {1}, {0}, 5, {{1, true, {}, {evaluating[2]}}}}),
              "rank 0 (pid 70 on hostA) waits for 'a', 'b', 'c' (and 8 more); rank 1 (pid 71 on hostA) has not "
              "submitted them and is at train.py:120");
}

TEST(words_say_when_ranks_wait_for_each_other) {
  CHECK_EQUAL(words({0, {"x"}, 0, {1}, {0}, 5, {{1, true, "y", {evaluating[1]}}}}),
              "rank 0 (pid 70 on hostA) waits for 'x'; rank 1 (pid 71 on hostA) has not submitted it: it waits for 'y' "
              "in evaluate() at train.py:88. The ranks have taken different branches: each has to make the same calls");
}

TEST(words_group_ranks_that_do_the_same) {
  CHECK_EQUAL(words({0,
                     {"x"},
                     0,
                     {1, 2, 3},
                     {0},
                     5,
                     {{1, true, {}, {evaluating[1]}}, {2, false, {}, {}}, {3, true, {}, {evaluating[1]}}}}),
              "rank 0 (pid 70 on hostA) waits for 'x'; rank 1 (pid 71 on hostA), rank 3 (pid 73 on hostA) have not "
              "submitted it and are in evaluate() at train.py:88; rank 2 (pid 72 on hostA) has not submitted it and "
              "does not answer. Is that process stopped?");
}

TEST(words_name_who_reports_for_those_that_do_not_answer) {
  CHECK_EQUAL(
      words({0, {"x"}, 0, {1, 2, 3}, {0}, 5, {{1, false, {}, {}}, {2, false, {}, {}, 1}, {3, false, {}, {}, 1}}}),
      "rank 0 (pid 70 on hostA) waits for 'x'; rank 1 (pid 71 on hostA) has not submitted it and does not "
      "answer. Is that process stopped?; rank 2 (pid 72 on hostA), rank 3 (pid 73 on hostA) have not submitted "
      "it and do not answer. Are those processes stopped, or rank 1 (pid 71 on hostA), which reports for them?");
}

TEST(words_say_that_a_stall_is_over) {
  Stall stall{0, {"x", "y"}, 0, {1}, {}, 7, {}};
  stall.is_over = true;
  CHECK_EQUAL(words(stall), "rank 1 (pid 71 on hostA) came after 7 s: 'x', 'y' can go on");
}

TEST(words_ask_where_nothing_is_known) {
  CHECK_EQUAL(words({0, {"x"}, 0, {1}, {0}, 5, {}}),
              "rank 0 (pid 70 on hostA) waits for 'x'; rank 1 (pid 71 on hostA) has not submitted it. Does every rank "
              "take the same branches, and make the same calls?");
}
