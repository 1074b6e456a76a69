// The response cache: ids instead of requests, equal on all ranks, never reused.
#include <set>

#include "control_world.h"

using namespace sirtaki;

namespace {

// Returns how a rank's last report sent its requests: "2 by id, 1 in full".
std::string asked(const World& world) {
  return std::to_string(world.last_report.present.size() + world.last_report.absent.size()) + " by id, " +
         std::to_string(world.last_report.full_requests.size()) + " in full";
}

void plan_together(World& world, const std::vector<std::string>& names) {
  for (const std::string& name : names) world.submit_all(allreduce(name));
  CHECK(world.round());
}

}  // namespace

TEST(a_known_request_goes_by_id) {
  World world(2);
  plan_together(world, {"a", "b"});
  CHECK_EQUAL(asked(world), "0 by id, 2 in full");
  CHECK_EQUAL(world.last_decision.responses.size(), 2u);
  for (int i = 0; i < 3; ++i) {
    plan_together(world, {"a", "b"});
    CHECK_EQUAL(asked(world), "2 by id, 0 in full");
    CHECK(world.last_decision.responses.empty());
    CHECK_EQUAL(world.plans(1), "a b");
    CHECK_EQUAL(world.outcome(1).plans[0].tensors[0].signature->shape, (std::vector<int64_t>{4}));
  }
}

TEST(every_property_of_a_cached_request_counts) {
  World world(1);
  const Signature known = allreduce("x");
  world.submit(0, known);
  world.round();
  for (int change = 0; change < 7; ++change) {
    Signature other = known;
    if (change == 0) other.shape = {5};
    if (change == 1) other.dtype = DType::int32;
    if (change == 2) other.reduce_op = ReduceOp::min;
    if (change == 3) other.postscale = 0.25;
    if (change == 4) other.layout = 1;
    if (change == 5) other = in_group(known, 3, 1);
    if (change == 6) other.wire_format = WireFormat::int8;
    for (const Signature& next : {other, known}) {
      world.submit(0, next);
      world.round();
      CHECK_EQUAL(asked(world), "0 by id, 1 in full");
      CHECK_EQUAL(world.last_decision.retired.size(), 1u);
      REQUIRE(world.outcome(0).plans.size() == 1);
      CHECK(*world.outcome(0).plans[0].tensors[0].signature == next);
    }
  }
}

TEST(properties_that_all_ranks_change_replace_the_entry) {
  World world(3);
  plan_together(world, {"x"});
  const CacheId old = world.last_decision.responses.at(0).id;
  world.submit_all(allreduce("x", {9}));
  CHECK(world.round());
  CHECK_EQUAL(world.last_decision.retired, std::vector<CacheId>{old});
  CHECK(world.last_decision.responses.at(0).id != old);
  world.submit_all(allreduce("x", {9}));
  world.round();
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  CHECK_EQUAL(world.outcome(2).plans.at(0).tensors[0].signature->shape, (std::vector<int64_t>{9}));
}

TEST(the_least_recently_planned_name_makes_room) {
  World world(2, {.cache_capacity = 2});
  plan_together(world, {"a"});
  plan_together(world, {"b"});
  plan_together(world, {"a"});
  plan_together(world, {"c"});  // instead of b
  CHECK_EQUAL(world.last_decision.retired.size(), 1u);
  plan_together(world, {"a"});
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  plan_together(world, {"c"});
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  plan_together(world, {"b"});
  CHECK_EQUAL(asked(world), "0 by id, 1 in full");
}

TEST(what_is_pending_is_never_evicted) {
  World world(2, {.cache_capacity = 1});
  plan_together(world, {"a"});
  world.submit(0, allreduce("a"));
  world.report(0);
  world.submit_from({0, 1}, allreduce("b"));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(1), "b");
  CHECK(world.last_decision.retired.empty());
  world.submit(1, allreduce("a"));
  CHECK(world.round());
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  CHECK_EQUAL(world.plans(0), "a");
}

TEST(without_a_cache_everything_goes_in_full) {
  World world(2, {.cache_capacity = 0});
  for (int i = 0; i < 3; ++i) {
    plan_together(world, {"a", "b"});
    CHECK_EQUAL(asked(world), "0 by id, 2 in full");
    CHECK_EQUAL(world.plans(0), "a b");
  }
}

TEST(ids_are_never_reused) {
  World world(1, {.cache_capacity = 2});
  std::set<CacheId> seen;
  for (int i = 0; i < 50; ++i) {
    plan_together(world, {"x" + std::to_string(i)});
    CHECK(seen.insert(world.last_decision.responses.at(0).id).second);
  }
}

TEST(a_late_report_of_a_retired_id_is_sent_again_in_full) {
  World world(2, {.cache_capacity = 1});
  plan_together(world, {"a"});
  const Ticket late = world.submit(1, allreduce("a"));
  const Bytes on_its_way = world.take_report(1);
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  plan_together(world, {"b"});  // retires a, before the report arrives
  world.deliver(1, on_its_way);
  CHECK(!world.decide());
  CHECK(world.negotiators[1]->report_due() <= world.now);
  world.report(1);
  CHECK_EQUAL(asked(world), "0 by id, 1 in full");
  CHECK_EQUAL(world.last_report.lapsed, 1u);
  world.submit(0, allreduce("a"));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].ticket, late);
}

TEST(a_join_waits_for_what_lapsed_before_it) {
  World world(2, {.cache_capacity = 1});
  plan_together(world, {"a"});
  const Ticket late = world.submit(1, allreduce("a"));
  const Bytes on_its_way = world.take_report(1);
  plan_together(world, {"b"});
  world.deliver(1, on_its_way);
  world.submit(0, allreduce("a"));
  world.join(1);
  Bytes joined;
  {
    Report report;
    report.last_decision = world.last_report.last_decision;
    report.joined = {world_set};
    encode(report, joined);  // sent before this rank learns that its id was retired
  }
  world.report(0);
  world.deliver(1, joined);
  CHECK(!world.decide());
  Bytes again = world.take_report(1);
  CHECK_EQUAL(world.last_report.joined.size(), 1u);
  world.last_report.joined.clear();
  Bytes resent;
  encode(world.last_report, resent);
  world.deliver(1, resent);
  CHECK(world.decide());
  CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].ticket, late);
  CHECK_EQUAL(world.outcome(1).plans.at(0).contributors, 2);
}

TEST(ragged_requests_go_by_id_while_their_first_dimension_stays) {
  World world(2);
  const auto gather = [&](int64_t first, int64_t second) {
    world.submit_each({allgather("g", {first, 3}), allgather("g", {second, 3})});
    CHECK(world.round());
    CHECK_EQUAL(world.outcome(0).plans.at(0).tensors[0].rows, (std::vector<int64_t>{first, second}));
    CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].rows, (std::vector<int64_t>{first, second}));
  };
  gather(2, 5);
  CHECK_EQUAL(asked(world), "0 by id, 1 in full");
  gather(2, 5);
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  gather(2, 0);  // rank 0 reports by id, rank 1 in full
  CHECK_EQUAL(asked(world), "0 by id, 1 in full");
  CHECK_EQUAL(world.last_decision.retired.size(), 1u);
  gather(4, 0);
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  gather(4, 0);
  CHECK(world.last_decision.responses.empty());
}

TEST(every_rank_caches_what_a_set_agreed_on) {
  World world(3, {.cache_capacity = 3});
  world.submit_all(add_set({0, 1}));
  world.round();
  for (int i = 0; i < 2; ++i) {
    world.submit_from({0, 1}, in_set(allreduce("x"), 1));
    CHECK(world.round());
    CHECK(world.outcome(2).plans.empty());
  }
  CHECK_EQUAL(asked(world), "1 by id, 0 in full");
  plan_together(world, {"a", "b", "c"});  // evicts it on all three ranks, or rank 2 would report an error
  CHECK_EQUAL(world.last_decision.retired.size(), 1u);
}
