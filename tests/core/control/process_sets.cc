// Process sets are added and removed by agreement of all ranks.
#include "control_world.h"

using namespace sirtaki;

namespace {

int32_t add(World& world, std::vector<int64_t> ranks) {
  world.submit_all(add_set(std::move(ranks)));
  CHECK(world.round());
  return world.outcome(0).process_sets.empty() ? -1 : world.outcome(0).process_sets[0].process_set;
}

}  // namespace

TEST(a_set_is_added_for_all) {
  World world(3);
  std::vector<Ticket> tickets;
  for (int32_t rank : {0, 1, 2}) tickets.push_back(world.submit(rank, add_set({0, 2})));
  CHECK(world.round());
  for (int32_t rank : {0, 1, 2}) {
    REQUIRE(world.outcome(rank).process_sets.size() == 1);
    const ProcessSetChange& change = world.outcome(rank).process_sets[0];
    CHECK_EQUAL(change.ticket, tickets[static_cast<size_t>(rank)]);
    CHECK_EQUAL(change.process_set, 1);
    CHECK_EQUAL(change.members, (std::vector<int32_t>{0, 2}));
    CHECK(world.outcome(rank).plans.empty());
  }
}

TEST(members_add_a_set_by_themselves) {
  World world(4);
  const Ticket first = world.submit(1, add_own_set({1, 3}));
  CHECK(!world.round());
  const Ticket second = world.submit(3, add_own_set({1, 3}));
  CHECK(world.round());
  for (int32_t rank : {0, 1, 2, 3}) {
    REQUIRE(world.outcome(rank).process_sets.size() == 1);
    const ProcessSetChange& change = world.outcome(rank).process_sets[0];
    CHECK_EQUAL(change.ticket, rank == 1 ? first : rank == 3 ? second : Ticket{0});
    CHECK_EQUAL(change.process_set, 1);
    CHECK_EQUAL(change.members, (std::vector<int32_t>{1, 3}));
  }
}

TEST(disjoint_members_add_sets_in_any_order_and_of_the_same_ranks) {
  World world(4);
  CHECK_EQUAL(add(world, {0, 1}), 1);
  world.submit(0, add_own_set({0, 1}, "a"));
  world.submit(2, add_own_set({2, 3}, "b"));
  world.submit(0, add_own_set({0}, "c"));
  CHECK(world.round());  // c is complete
  CHECK_EQUAL(world.outcome(1).process_sets.at(0).members, (std::vector<int32_t>{0}));
  world.submit(3, add_own_set({2, 3}, "b"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(1).process_sets.at(0).members, (std::vector<int32_t>{2, 3}));
  world.submit(1, add_own_set({0, 1}, "a"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(3).process_sets.at(0).process_set, 4);
  CHECK_EQUAL(add(world, {2, 3}), 5);  // all ranks may add the ranks that only their members have added
  world.submit(2, in_set(allreduce("x"), 3));
  world.submit(3, in_set(allreduce("x"), 3));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(2).plans.size(), 1u);
  CHECK(world.outcome(0).plans.empty());
}

TEST(a_rank_that_has_left_matters_for_its_own_sets_only) {
  World world(4);
  world.submit(0, add_own_set({0, 3}, "with 3"));
  world.report(0);
  world.goodbye(3);
  CHECK(world.decide());
  CHECK(contains(world.refusal({0}, SRT_PEER_FINISHED), "rank 3"));
  for (int32_t rank : {0, 1}) world.submit(rank, add_own_set({0, 1}, "without 3"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(1).process_sets.at(0).members, (std::vector<int32_t>{0, 1}));
}

TEST(a_rank_that_has_joined_adds_its_own_sets_afterwards) {
  World world(3);
  world.submit(0, add_own_set({0, 1}));
  world.join(1);
  world.report(0);
  world.report(1);
  CHECK(!world.decide());
  for (int32_t rank : {0, 2}) world.join(rank);
  CHECK(world.round());  // all have joined
  CHECK(world.outcome(0).process_sets.empty());
  CHECK(world.outcome(0).refusals.empty());
  world.submit(1, add_own_set({0, 1}));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(2).process_sets.at(0).members, (std::vector<int32_t>{0, 1}));
}

TEST(only_ranks_that_take_part_are_named_as_finished) {
  World world(4);
  for (int32_t rank : {1, 2, 3}) world.goodbye(rank);
  world.submit(0, add_own_set({0, 1}));
  CHECK(world.round());
  const std::string text = world.refusal({0}, SRT_PEER_FINISHED);
  CHECK(contains(text, "rank 1"));
  CHECK(contains(text, " has finished"));
  CHECK(!contains(text, "rank 2"));
}

TEST(members_that_name_other_ranks_are_refused) {
  World world(3);
  world.submit(0, add_own_set({0, 1}));
  world.submit(1, add_own_set({0, 1, 2}));
  CHECK(world.round());
  CHECK(contains(world.refusal({0, 1}, SRT_MISMATCH), "every rank must name the same ranks"));
}

TEST(numbers_are_never_reused) {
  World world(2);
  CHECK_EQUAL(add(world, {0}), 1);
  CHECK_EQUAL(add(world, {1}), 2);
  world.submit_all(remove_set(2));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(1).process_sets.at(0).process_set, 2);
  CHECK(world.outcome(1).process_sets.at(0).members.empty());
  CHECK(world.negotiators[1]->members(2) == nullptr);
  CHECK_EQUAL(add(world, {1}), 3);
}

TEST(impossible_changes_are_refused) {
  World world(3);
  CHECK_EQUAL(add(world, {0, 1}), 1);
  const std::vector<std::pair<Signature, const char*>> cases{
      {add_set({0, 1}), "process set 1 has these ranks already"},
      {add_set({0, 1, 2}), "process set 0 has these ranks already"},
      {add_set({}), "at least one rank"},
      {add_set({0, 3}), "rank 3 is not in this job (ranks 0 to 2)"},
      {add_set({1, 1}), "rank 1 comes after 1"},
      {add_set({1, 0}), "rank 0 comes after 1"},
      {remove_set(0), "cannot be removed"},
      {remove_set(7), "no process set 7"},
      {remove_set(-1), "no process set -1"},
  };
  for (const auto& [signature, text] : cases) {
    world.submit_all(signature);
    CHECK(world.round());
    if (!contains(world.refusal({0, 1, 2}, SRT_INVALID_ARGUMENT), text)) CHECK_EQUAL("", text);
    CHECK(world.outcome(0).process_sets.empty());
  }
}

TEST(two_changes_in_one_decision_see_each_other) {
  World world(2);
  world.submit_all(add_set({1}, "first"));
  world.submit_all(add_set({1}, "second"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).process_sets.size(), 1u);
  CHECK(!world.refusal({0, 1}, SRT_INVALID_ARGUMENT).empty());
  world.submit_all(remove_set(1, "first"));
  world.submit_all(remove_set(1, "second"));
  world.submit_all(add_set({1}, "third"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).process_sets.size(), 2u);
  CHECK_EQUAL(world.outcome(0).process_sets[1].process_set, 2);
  CHECK(!world.refusal({0, 1}, SRT_INVALID_ARGUMENT).empty());
}

TEST(removing_a_set_retires_its_names) {
  World world(2);
  add(world, {0});
  world.submit(0, in_set(allreduce("x"), 1));
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  world.submit_all(remove_set(1));
  CHECK(world.round());
  CHECK_EQUAL(world.last_decision.retired.size(), 1u);
  world.submit_all(allreduce("x"));
  CHECK(world.round());
  CHECK_EQUAL(world.last_report.present.size(), 1u);
}

TEST(removing_a_set_refuses_what_is_pending_in_it) {
  World world(3);
  add(world, {0, 1});
  const Ticket merged = world.submit(0, in_set(allreduce("x"), 1));
  const Ticket join = world.join(1, 1);
  world.report(0);
  world.submit_all(remove_set(1));
  for (int32_t rank : {0, 2}) world.report(rank);
  const Bytes late = world.take_report(1);
  Report report;
  REQUIRE(decode(late, report));
  report.joined.clear();  // the join has not arrived yet
  Bytes without_join;
  encode(report, without_join);
  world.deliver(1, without_join);
  CHECK(world.decide());
  CHECK(contains(world.refusal({0}, SRT_INVALID_ARGUMENT), "process set 1 was removed before 'x' took place"));
  CHECK_EQUAL(world.outcome(0).refusals.at(0).ticket, merged);
  CHECK(contains(world.refusal({1}, SRT_INVALID_ARGUMENT), "process set 1 was removed before the join took place"));
  CHECK_EQUAL(world.outcome(1).refusals.at(0).ticket, join);
  CHECK(world.outcome(2).refusals.empty());
  CHECK_EQUAL(world.coordinator.next_deadline(), never);  // nothing that could stall is pending any more
}

TEST(late_reports_about_a_removed_set_are_ignored) {
  World world(2);
  add(world, {0});
  for (const char* name : {"cached", "evicts nothing"}) {
    world.submit(0, in_set(allreduce(name), 1));
    CHECK(world.round());
  }
  world.submit_all(remove_set(1));
  for (int32_t rank : {0, 1}) world.report(rank);
  world.submit(0, in_set(allreduce("cached"), 1));
  world.submit(0, in_set(allreduce("new"), 1));
  world.submit(0, allreduce("kept"));
  const Bytes late = world.take_report(0);
  CHECK(world.decide());
  CHECK_EQUAL(world.outcome(0).refusals.size(), 2u);
  world.deliver(0, late);
  CHECK(!world.decide());
  world.submit(1, allreduce("kept"));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(0), "kept");
  CHECK_EQUAL(world.last_report.last_decision + 1, world.last_decision.number);
  world.join(0);
  world.join(1);
  CHECK(world.round());  // the lapsed id of the removed set does not delay the join
  CHECK_EQUAL(world.outcome(0).joins.size(), 1u);
}

TEST(plans_of_the_same_decision_precede_a_removal) {
  World world(2);
  add(world, {1});
  world.submit(1, in_set(allreduce("x"), 1));
  world.submit_all(remove_set(1));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(1), "x");
  CHECK_EQUAL(world.outcome(1).process_sets.size(), 1u);
}

TEST(no_set_is_added_once_a_rank_has_finished) {
  World world(3);
  world.goodbye(2);
  world.submit_from({0, 1}, add_set({0, 1}));
  CHECK(world.round());
  CHECK(!world.refusal({0, 1}, SRT_PEER_FINISHED).empty());
}
