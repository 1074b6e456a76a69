// The tensors of a group are planned together or rejected together.
#include "control_world.h"

using namespace sirtaki;

namespace {

Signature member(const std::string& name, int32_t size = 2, int64_t id = 5) {
  return in_group(allreduce(name), id, size);
}

void submit_both(World& world, int32_t rank) {
  for (const char* name : {"a", "b"}) world.submit(rank, member(name));
}

// Runs a round that plans these tensors on both ranks.
void expect_planned(World& world, const char* plans) {
  CHECK(world.round());
  for (int32_t rank : {0, 1}) CHECK_EQUAL(world.plans(rank), plans);
}

// Submits a group on both ranks, which is planned even if the same names were refused before.
void expect_planned_together(World& world) {
  for (int32_t rank : {0, 1}) submit_both(world, rank);
  expect_planned(world, "a b");
}

// Joins both ranks; an open group ends with the second join only.
void join_one_by_one(World& world) {
  world.join(1);
  CHECK(!world.round());
  world.join(0);
  CHECK(world.round());
}

}  // namespace

TEST(a_group_waits_for_all_its_tensors) {
  World world(2, {.fusion_threshold = 0});
  for (int i = 0; i < 3; ++i) {
    world.submit_all(member("a"));
    CHECK(!world.round());
    world.submit(0, member("b"));
    CHECK(!world.round());
    world.submit(1, member("b"));
    expect_planned(world, "a | b");
  }
}

TEST(groups_do_not_mix) {
  World world(2);
  world.submit_all(member("a", 2, 5));
  world.submit_all(member("b", 2, 6));
  CHECK(!world.round());
  world.submit_all(member("c", 2, 6));
  expect_planned(world, "b c");
  world.submit_all(member("d", 2, 5));
  expect_planned(world, "a d");
}

TEST(a_group_is_refused_whole) {
  World world(2);
  world.submit_all(member("a"));
  CHECK(!world.round());
  world.submit_each({member("b"), in_group(allreduce("b", {9}), 5, 2)});
  CHECK(world.round());
  for (int32_t rank : {0, 1}) {
    REQUIRE(world.outcome(rank).refusals.size() == 2);
    for (const Refusal& refusal : world.outcome(rank).refusals) {
      CHECK_EQUAL(refusal.status.code(), SRT_MISMATCH);
      CHECK(contains(refusal.status.text(), "ranks disagree about 'b'"));
    }
  }
  expect_planned_together(world);
}

TEST(late_members_of_a_refused_group_are_refused_on_every_rank) {
  World world(2);
  world.submit_each({member("a"), in_group(allreduce("a", {9}), 5, 2)});
  CHECK(world.round());
  const std::string cause = world.refusal({0, 1}, SRT_MISMATCH);
  CHECK(!cause.empty());
  world.submit(0, member("b"));
  CHECK(world.round());
  CHECK_EQUAL(world.refusal({0}, SRT_MISMATCH), cause);
  submit_both(world, 0);  // rank 0 retries before rank 1 has sent all
  CHECK(!world.round());
  world.submit(1, member("b"));
  CHECK(world.round());
  CHECK_EQUAL(world.refusal({1}, SRT_MISMATCH), cause);
  CHECK(world.outcome(0).refusals.empty());
  submit_both(world, 1);
  expect_planned(world, "a b");
}

TEST(ranks_that_group_differently_are_told_and_owe_nothing) {
  World world(2);
  world.submit(0, member("a"));
  world.submit_each({member("b"), allreduce("a")});
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).refusals.size(), 2u);
  CHECK(contains(world.refusal({1}, SRT_MISMATCH), "rank 0 (pid 70 on hostA) has group 5 of 2 tensors"));
  expect_planned_together(world);
}

TEST(another_kind_of_operation_refuses_the_rest_of_the_group) {
  World world(2);
  world.submit_each({member("a"), barrier("a")});
  CHECK(world.round());
  const std::string cause = world.refusal({0, 1}, SRT_MISMATCH);
  CHECK(contains(cause, "the kind barrier"));
  world.submit_all(member("b"));
  CHECK(world.round());
  CHECK_EQUAL(world.refusal({0, 1}, SRT_MISMATCH), cause);
  expect_planned_together(world);
}

TEST(a_rank_that_joins_owes_a_refused_group_nothing) {
  World world(2);
  submit_both(world, 0);
  world.submit(1, in_group(allreduce("a", {9}), 5, 2));
  CHECK(world.round());
  join_one_by_one(world);
  expect_planned_together(world);
}

TEST(a_group_has_no_more_tensors_than_it_says) {
  World world(2);
  for (const char* name : {"a", "b", "c"}) world.submit(0, member(name));
  CHECK(world.round());
  CHECK(contains(world.refusal({0}, SRT_MISMATCH), "group 5 has 2 tensors already, so 'c'"));
  submit_both(world, 1);
  expect_planned(world, "a b");
}

TEST(a_joined_rank_counts_in_a_group) {
  World world(2);
  world.join(1);
  submit_both(world, 0);
  expect_planned(world, "a b");
}

TEST(a_group_that_nobody_completes_ends_with_the_join) {
  World world(2);
  world.submit(0, member("a"));
  join_one_by_one(world);
  CHECK(contains(world.refusal({0}, SRT_MISMATCH), "'a' belongs to a group"));
  CHECK_EQUAL(world.outcome(0).joins.size(), 1u);
  expect_planned_together(world);
}

TEST(a_group_ends_with_a_rank_that_left) {
  World world(2);
  world.submit_all(member("a"));
  CHECK(!world.round());
  world.goodbye(1);
  CHECK(world.decide());
  CHECK(!world.refusal({0}, SRT_PEER_FINISHED).empty());
  world.submit(0, member("b"));
  CHECK(world.round());
  CHECK_EQUAL(world.refusal({0}, SRT_PEER_FINISHED),
              "rank 1 (pid 71 on hostA) has finished and cannot take part in 'b'");
}
