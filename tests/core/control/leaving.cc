// Ranks that have nothing to contribute, nothing more to contribute, or have exited: absent, joined, finished.
#include "control_world.h"

using namespace sirtaki;

TEST(absent_on_all_ranks_is_untouched) {
  World world(2);
  for (int i = 0; i < 2; ++i) {  // in full, then by id
    for (int32_t rank : {0, 1}) {
      world.submit(rank, allreduce("a"), true);
      world.submit(rank, allreduce("b"), true);
      world.submit(rank, allreduce("c"));
    }
    world.round();
    REQUIRE(world.outcome(0).plans.size() == 2);
    CHECK_EQUAL(world.plans(1), "a b | c");
    CHECK(world.outcome(1).plans[0].untouched);
    CHECK(!world.outcome(1).plans[1].untouched);
  }
}

TEST(absent_on_some_ranks_is_a_plan_of_all) {
  World world(3);
  for (int i = 0; i < 2; ++i) {
    for (int32_t rank : {0, 1, 2}) world.submit(rank, allreduce("a"), rank != 1);
    world.round();
    REQUIRE(world.outcome(0).plans.size() == 1);
    CHECK(!world.outcome(0).plans[0].untouched);
    CHECK_EQUAL(world.outcome(0).plans[0].contributors, 3);
  }
}

TEST(a_joined_rank_takes_part_without_a_ticket) {
  World world(3);
  world.join(1);
  CHECK(!world.round());
  world.submit_from({0, 2}, allreduce("a"));
  CHECK(world.round());
  for (int32_t rank : {0, 1, 2}) {
    REQUIRE(world.outcome(rank).plans.size() == 1);
    const Plan& plan = world.outcome(rank).plans[0];
    CHECK_EQUAL(plan.contributors, 2);
    CHECK_EQUAL(plan.tensors[0].ticket == 0, rank == 1);
    CHECK_EQUAL(plan.tensors[0].signature->name, "a");
    CHECK(world.outcome(rank).joins.empty());
  }
}

TEST(a_join_makes_waiting_requests_ready) {
  World world(2);
  const Ticket ticket = world.submit(0, allreduce("a"));
  CHECK(!world.round());
  world.join(1);
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).plans.at(0).tensors[0].ticket, ticket);
}

TEST(the_last_join_ends_all_and_names_its_rank) {
  World world(3);
  std::vector<Ticket> tickets(3);
  for (int32_t rank : {2, 0, 1}) {
    CHECK(!world.round());
    tickets[static_cast<size_t>(rank)] = world.join(rank);
  }
  CHECK(world.round());
  for (int32_t rank : {0, 1, 2}) {
    REQUIRE(world.outcome(rank).joins.size() == 1);
    CHECK_EQUAL(world.outcome(rank).joins[0].last_rank, 1);
    CHECK_EQUAL(world.outcome(rank).joins[0].ticket, tickets[static_cast<size_t>(rank)]);
  }
  world.submit(0, allreduce("a"));
  CHECK(!world.round());  // the join is over
  world.submit(1, allreduce("a"));
  world.submit(2, allreduce("a"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(1).plans.at(0).contributors, 3);
}

TEST(requests_before_a_join_keep_their_data) {
  World world(2);
  const Ticket first = world.submit(0, allreduce("a"));
  world.join(0);
  CHECK(!world.round());
  world.submit(1, allreduce("a"));
  world.submit(1, allreduce("b"));
  CHECK(world.round());
  REQUIRE(world.outcome(0).plans.size() == 2);  // not fused: one plan has two contributors, the other one
  CHECK_EQUAL(world.outcome(0).plans[0].contributors, 2);
  CHECK_EQUAL(world.outcome(0).plans[0].tensors[0].ticket, first);
  CHECK_EQUAL(world.outcome(0).plans[1].contributors, 1);
}

TEST(ranks_that_wait_crosswise_and_join_end) {
  World world(2);
  world.submit_each({allreduce("a"), allreduce("b")});
  CHECK(!world.round());
  world.join(0);
  world.join(1);
  CHECK(world.round());
  CHECK_EQUAL(world.plans(0), "a b");
  CHECK_EQUAL(world.outcome(0).joins.size(), 1u);
}

TEST(a_joined_rank_brings_no_rows) {
  World world(3);
  world.join(1);
  for (int32_t rank : {0, 2}) world.submit(rank, allgather("g", {rank + 1, 2}));
  world.round();
  CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].rows, (std::vector<int64_t>{1, 0, 3}));
}

TEST(a_joined_root_has_nothing_to_broadcast) {
  World world(2);
  world.join(1);
  world.submit(0, broadcast("x", 1));
  world.round();
  CHECK(contains(world.refusal({0}, SRT_MISMATCH), "rank 1 (pid 71 on hostA) has joined and has nothing to send"));
  CHECK(world.outcome(1).refusals.empty());
  world.submit(0, broadcast("x", 0));
  world.round();
  CHECK_EQUAL(world.plans(1), "x");
}

TEST(joining_one_set_says_nothing_about_others) {
  World world(2);
  world.submit_all(add_set({0, 1}));
  CHECK(!world.round() || world.outcome(0).refusals.size() == 1);  // the world has these ranks already
  world.submit_all(add_set({1}));
  CHECK(world.round());
  world.join(1, world.outcome(0).process_sets.at(0).process_set);
  world.submit(0, allreduce("a"));
  CHECK(world.round());  // completes the join of the set with one member
  CHECK_EQUAL(world.outcome(1).joins.size(), 1u);
  CHECK(world.outcome(0).joins.empty());
  CHECK(world.outcome(0).plans.empty());
}

TEST(a_rank_that_finished_is_no_error_before_it_is_needed) {
  World world(3);
  world.submit_all(add_set({0, 2}));
  world.round();
  world.goodbye(1);
  CHECK(!world.round());
  world.submit_from({0, 2}, in_set(allreduce("x"), 1));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(2), "x");
  CHECK(world.outcome(0).refusals.empty());
}

TEST(who_needs_a_finished_rank_is_told_then_and_later) {
  World world(3);
  world.submit(0, allreduce("x"));
  world.report(0);
  CHECK(!world.decide());
  world.goodbye(1);
  CHECK(world.decide());
  const std::string text = world.refusal({0}, SRT_PEER_FINISHED);
  CHECK_EQUAL(text, "rank 1 (pid 71 on hostA) has finished and cannot take part in 'x'");
  CHECK(world.outcome(2).refusals.empty());
  world.submit(2, allreduce("x"));
  CHECK(world.round());
  CHECK_EQUAL(world.refusal({2}, SRT_PEER_FINISHED), text);
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
}

TEST(a_request_does_not_outlive_its_rank) {
  World world(2);
  world.submit(1, allreduce("x"));
  world.report(1);
  world.goodbye(1);
  world.submit(0, allreduce("x"));
  CHECK(world.round());
  CHECK(!world.refusal({0}, SRT_PEER_FINISHED).empty());
  CHECK(world.outcome(0).plans.empty());
}

TEST(a_join_that_needs_a_finished_rank_is_refused) {
  World world(3);
  world.join(0);
  CHECK(!world.round());
  world.goodbye(2);
  CHECK(world.decide());
  CHECK(contains(world.refusal({0}, SRT_PEER_FINISHED), "cannot take part in the join"));
  world.join(1);
  CHECK(world.round());
  CHECK(contains(world.refusal({1}, SRT_PEER_FINISHED), "cannot take part in the join"));
}

TEST(a_rank_says_goodbye_once) {
  World world(2);
  world.goodbye(1);
  Bytes bytes;
  world.negotiators[1]->goodbye(bytes);
  CHECK_EQUAL(world.coordinator.merge(1, bytes, world.now).code(), SRT_PROTOCOL);
}
