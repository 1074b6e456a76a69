// The flush rule, and a negotiator without peers.
#include "control_world.h"

using namespace sirtaki;

namespace {

Request request(const Signature& signature, Ticket ticket = 1) {
  return {std::make_shared<Signature>(signature), ticket, false};
}

size_t requests_in_report(Negotiator& negotiator) {
  Bytes bytes;
  Report report;
  negotiator.report(start_time, bytes);
  CHECK(decode(bytes, report));
  return report.full_requests.size() + report.present.size();
}

// The negotiator of a world of one, and the coordinator that answers it.
struct Loop {
  explicit Loop(ReportRule rule) : negotiator(0, 1, rule, 100), coordinator({"rank 0"}, {}) {}

  // Reports, and applies the decision; the plans stay unfinished.
  size_t negotiate() {
    Bytes report, decision;
    negotiator.report(start_time, report);
    CHECK(coordinator.merge(0, report, start_time).is_ok());
    if (!coordinator.decide(start_time, decision)) return 0;
    Outcome outcome;
    CHECK(negotiator.apply(decision, outcome).is_ok());
    return outcome.plans.size();
  }

  Negotiator negotiator;
  Coordinator coordinator;
};

}  // namespace

TEST(nothing_queued_is_never_due) {
  Negotiator negotiator(0, 2, {}, 100);
  CHECK_EQUAL(negotiator.report_due(), never);
  negotiator.flush();
  CHECK_EQUAL(negotiator.report_due(), never);
}

TEST(the_first_request_starts_the_window) {
  Negotiator negotiator(0, 2, {}, 100);
  negotiator.submit(request(allreduce("a")), start_time);
  negotiator.submit(request(allreduce("b")), start_time + microseconds(200));
  CHECK_EQUAL(negotiator.report_due(), start_time + microseconds(300));
  CHECK_EQUAL(requests_in_report(negotiator), 2u);
  CHECK_EQUAL(negotiator.report_due(), never);
  negotiator.submit(request(allreduce("c")), start_time + seconds(1));
  CHECK_EQUAL(negotiator.report_due(), start_time + seconds(1) + microseconds(300));
}

TEST(enough_bytes_are_due_at_once) {
  Negotiator negotiator(0, 2, {}, 100);
  negotiator.submit(request(allreduce("a", {131'072})), start_time);  // 512 KiB
  CHECK_EQUAL(negotiator.report_due(), start_time + microseconds(300));
  negotiator.submit(request(allreduce("b", {131'072})), start_time);
  CHECK(negotiator.report_due() <= start_time);
}

TEST(a_flush_is_due_at_once_and_ends_with_the_report) {
  Negotiator negotiator(0, 2, {}, 100);
  negotiator.submit(request(allreduce("a")), start_time);
  negotiator.flush();
  CHECK(negotiator.report_due() <= start_time);
  requests_in_report(negotiator);
  negotiator.submit(request(allreduce("b")), start_time);
  CHECK_EQUAL(negotiator.report_due(), start_time + microseconds(300));
}

TEST(a_join_is_reported_like_a_request) {
  Negotiator negotiator(0, 2, {}, 100);
  negotiator.join(world_set, 1, start_time);
  CHECK_EQUAL(negotiator.report_due(), start_time + microseconds(300));
  negotiator.flush();
  CHECK(negotiator.report_due() <= start_time);
}

TEST(requests_wait_while_two_plans_of_their_set_are_unfinished) {
  Loop loop({});
  for (const char* name : {"a", "b"}) {
    loop.negotiator.submit(request(barrier(name)), start_time);
    CHECK_EQUAL(loop.negotiate(), 1u);
  }
  loop.negotiator.submit(request(allreduce("c", {1 << 20})), start_time);
  CHECK_EQUAL(loop.negotiator.report_due(), never);
  CHECK_EQUAL(requests_in_report(loop.negotiator), 0u);
  loop.negotiator.plan_finished(world_set);
  CHECK(loop.negotiator.report_due() <= start_time);
  CHECK_EQUAL(requests_in_report(loop.negotiator), 1u);
}

TEST(a_flush_survives_withholding) {
  Loop loop({.plans_in_flight = 1});
  loop.negotiator.submit(request(barrier("a")), start_time);
  CHECK_EQUAL(loop.negotiate(), 1u);
  loop.negotiator.submit(request(allreduce("b")), start_time);
  loop.negotiator.flush();
  CHECK_EQUAL(loop.negotiator.report_due(), never);
  loop.negotiator.plan_finished(world_set);
  CHECK(loop.negotiator.report_due() <= start_time);
}

TEST(a_join_waits_behind_withheld_requests) {
  Loop loop({.plans_in_flight = 1});
  loop.negotiator.submit(request(barrier("a")), start_time);
  CHECK_EQUAL(loop.negotiate(), 1u);
  loop.negotiator.submit(request(allreduce("b")), start_time);
  loop.negotiator.join(world_set, 9, start_time);
  Bytes bytes;
  Report report;
  loop.negotiator.report(start_time, bytes);
  REQUIRE(decode(bytes, report));
  CHECK(report.joined.empty() && report.full_requests.empty());
  loop.negotiator.plan_finished(world_set);
  bytes.clear();
  loop.negotiator.report(start_time, bytes);
  REQUIRE(decode(bytes, report));
  CHECK(report.joined.size() == 1 && report.full_requests.size() == 1);
}

TEST(each_set_is_withheld_for_itself) {
  World world(2, {}, {.plans_in_flight = 1});
  world.submit_all(add_set({0}));
  world.round();
  const int32_t set = world.outcome(0).process_sets.at(0).process_set;
  Negotiator& negotiator = *world.negotiators[0];
  world.submit_all(barrier("a"));
  Bytes decision;
  for (int32_t rank : {0, 1}) world.report(rank);
  REQUIRE(world.coordinator.decide(world.now, decision));
  Outcome outcome;
  CHECK(negotiator.apply(decision, outcome).is_ok());
  world.submit(0, allreduce("b"));
  CHECK_EQUAL(negotiator.report_due(), never);
  world.submit(0, in_set(allreduce("c"), set));
  CHECK_EQUAL(negotiator.report_due(), world.now + microseconds(300));
  CHECK_EQUAL(requests_in_report(negotiator), 1u);
  negotiator.plan_finished(world_set);
  CHECK_EQUAL(requests_in_report(negotiator), 1u);
}

TEST(members_of_sets_are_known_to_all) {
  World world(3);
  CHECK_EQUAL(world.negotiators[0]->members(world_set)->size(), 3u);
  CHECK(world.negotiators[0]->members(1) == nullptr);
  world.submit_all(add_set({1, 2}));
  world.round();
  REQUIRE(world.negotiators[0]->members(1) != nullptr);
  CHECK_EQUAL(*world.negotiators[0]->members(1), (std::vector<int32_t>{1, 2}));
}

TEST(decisions_out_of_order_are_refused) {
  World world(2);
  world.submit_all(allreduce("a"));
  for (int32_t rank : {0, 1}) world.report(rank);
  Bytes decision;
  REQUIRE(world.coordinator.decide(world.now, decision));
  Outcome outcome;
  CHECK(world.negotiators[0]->apply(decision, outcome).is_ok());
  CHECK_EQUAL(world.negotiators[0]->apply(decision, outcome).code(), SRT_PROTOCOL);
}

TEST(reports_that_make_no_sense_are_refused) {
  const auto refused = [](const Report& report) {
    Coordinator coordinator(rank_names(2), {});
    Bytes bytes;
    encode(report, bytes);
    return coordinator.merge(0, bytes, start_time).code() == SRT_PROTOCOL;
  };
  const auto full = [](const Signature& signature) {
    return Report::FullRequest{std::make_shared<Signature>(signature), false};
  };
  Report report;
  CHECK(!refused(report));
  report.present = {CacheId{1} << 24};
  CHECK(refused(report));
  report = {};
  report.last_decision = 1;
  CHECK(refused(report));
  report = {};
  report.lapsed = 1;
  CHECK(refused(report));
  report = {};
  report.joined = {0, 0};
  CHECK(refused(report));
  report.joined = {3};
  CHECK(refused(report));
  report = {};
  report.full_requests = {full(allreduce("a")), full(allreduce("a"))};
  CHECK(refused(report));
  report.full_requests = {full(in_set(allreduce("a"), 4))};
  CHECK(refused(report));
  Coordinator coordinator(rank_names(2), {});
  const Bytes garbage{1, 2, 3};
  const Status status = coordinator.merge(1, garbage, start_time);
  CHECK_EQUAL(status.code(), SRT_PROTOCOL);
  CHECK(contains(status.text(), "rank 1 (pid 71 on hostA)"));
}

namespace {

Signature urgent(const std::string& name, int32_t priority, int64_t elements = 1 << 17) {  // 512 KiB
  Signature signature = allreduce(name, {elements});
  signature.priority = priority;
  return signature;
}

std::vector<std::string> names_in_report(Negotiator& negotiator, Nanoseconds now) {
  Bytes bytes;
  Report report;
  negotiator.report(now, bytes);
  CHECK(decode(bytes, report));
  std::vector<std::string> names;
  for (const auto& one : report.full_requests) names.push_back(one.signature->name);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST(requests_with_a_priority_leave_in_portions_and_the_most_urgent_first) {
  Negotiator negotiator(0, 2, {}, 100);
  Ticket ticket = 0;
  for (int32_t priority : {1, 3, 2, 4, 3}) {
    ++ticket;
    negotiator.submit(request(urgent("p" + std::to_string(priority) + "." + std::to_string(ticket), priority), ticket),
                      start_time);
  }
  CHECK(names_in_report(negotiator, start_time) == (Names{"p4.4", "p3.2"}));
  const Nanoseconds next = start_time + microseconds(300);
  CHECK_EQUAL(negotiator.report_due(), next);
  CHECK(names_in_report(negotiator, next - 1).empty());  // for another reason, such as an answer
  negotiator.submit(request(urgent("late", 9), ++ticket), next - 1);
  CHECK(names_in_report(negotiator, next) == (Names{"late", "p3.5"}));
  CHECK(names_in_report(negotiator, next + microseconds(300)) == (Names{"p2.3", "p1.1"}));
  CHECK_EQUAL(negotiator.report_due(), never);
}

TEST(others_do_not_wait_for_a_portion) {
  Negotiator negotiator(0, 2, {}, 100);
  for (Ticket ticket = 1; ticket <= 3; ++ticket)
    negotiator.submit(request(urgent("p" + std::to_string(ticket), 1), ticket), start_time);
  CHECK(names_in_report(negotiator, start_time) == (Names{"p1", "p2"}));
  negotiator.flush();
  CHECK_EQUAL(negotiator.report_due(), start_time + microseconds(300));
  negotiator.submit(request(allreduce("plain"), 4), start_time);
  CHECK(negotiator.report_due() <= start_time);
  CHECK(names_in_report(negotiator, start_time) == (Names{"plain"}));
  CHECK(names_in_report(negotiator, start_time + microseconds(300)) == (Names{"p3"}));
}

TEST(a_request_above_the_size_of_a_portion_leaves_alone) {
  Negotiator negotiator(0, 2, {.portion = 1'000}, 100);
  negotiator.submit(request(urgent("large", 2, 1'000), 1), start_time);
  negotiator.submit(request(urgent("small", 1, 1), 2), start_time);
  CHECK(names_in_report(negotiator, start_time) == (Names{"large"}));
  CHECK(names_in_report(negotiator, start_time + microseconds(300)) == (Names{"small"}));
}

TEST(a_join_comes_after_the_last_portion) {
  Negotiator negotiator(0, 2, {}, 100);
  for (Ticket ticket = 1; ticket <= 3; ++ticket)
    negotiator.submit(request(urgent("p" + std::to_string(ticket), 1), ticket), start_time);
  negotiator.join(world_set, 9, start_time);
  for (const bool is_last : {false, true}) {
    Bytes bytes;
    Report report;
    negotiator.report(start_time + (is_last ? microseconds(300) : 0), bytes);
    CHECK(decode(bytes, report));
    CHECK_EQUAL(report.joined.size(), is_last ? 1u : 0u);
  }
}

// Ranks that begin with different requests, which none of the others has submitted, still finish all of them.
TEST(portions_in_different_orders_complete) {
  World world(3);
  const int32_t count = 9;
  for (int32_t rank = 0; rank < world.size(); ++rank)
    for (int32_t number = 0; number < count; ++number)
      world.submit(rank, urgent("t" + std::to_string(number), 1 + (number + 3 * rank) % count));
  size_t planned = 0;
  for (int32_t turn = 0; turn < count && planned < count; ++turn) {
    for (int32_t rank = 0; rank < world.size(); ++rank) world.report(rank);
    if (world.decide())
      for (const auto& plan : world.outcome(0).plans) planned += plan.tensors.size();
    world.now += microseconds(300);
  }
  CHECK_EQUAL(planned, static_cast<size_t>(count));
}
