// A leader's aggregation of its host's reports into one aggregate, held no longer than the rule allows.
#include "control/relay/relay.h"

#include <random>

#include "control/relay/tree.h"
#include "control_host.h"

using namespace sirtaki;

namespace {

std::vector<int32_t> list(const RankRuns& runs) {
  std::vector<int32_t> ranks;
  runs.for_each([&](int32_t rank) { ranks.push_back(rank); });
  return ranks;
}

using Ranks = std::vector<int32_t>;

}  // namespace

TEST(what_all_ask_for_goes_up_once) {
  Host host;
  for (const std::string name : {"a", "b"}) CHECK(host.round(allreduce(name)));
  CHECK_EQUAL(host.aggregate.full_requests.size(), 1u);
  CHECK_EQUAL(list(host.aggregate.full_requests[0].by.ranks), (Ranks{1, 2, 3}));
  for (const std::string name : {"a", "b"}) host.submit_all(allreduce(name));
  for (int32_t rank : {1, 2}) {
    host.below(rank);
    CHECK(!host.goes_up());
  }
  host.below(3);
  CHECK(host.goes_up());
  REQUIRE(host.aggregate.cached_requests.size() == 1);
  CHECK_EQUAL(host.aggregate.cached_requests[0].ids.size(), 2u);
  CHECK_EQUAL(list(host.aggregate.cached_requests[0].by.ranks), (Ranks{1, 2, 3}));
  CHECK(host.aggregate.full_requests.empty() && host.aggregate.notices.empty());
  REQUIRE(host.aggregate.reached.size() == 1);
  CHECK_EQUAL(host.aggregate.reached[0].decision, 2u);
  host.report(0);
  CHECK(host.decide());
  CHECK_EQUAL(host.plans(3), "a b");
  CHECK_EQUAL(host.relay.report_due(), never);
}

TEST(absent_ranks_and_rows_of_each_arrive) {
  Host host;
  for (int32_t rank = 0; rank < 4; ++rank) {
    host.submit(rank, allreduce("a"), rank == 2);
    host.submit(rank, allgather("g", {rank, 2}));
    host.submit(rank, alltoall("t", {rank, 0, 1, rank}));
    if (rank) host.below(rank);
    else host.report(0);
  }
  CHECK(host.goes_up());
  CHECK_EQUAL(host.aggregate.full_requests.size(), 3u);
  CHECK_EQUAL(list(host.aggregate.full_requests[0].by.absent), (Ranks{2}));
  CHECK(host.decide());
  for (const Response& response : host.last_decision.responses) {
    if (response.signature->name == "g") CHECK_EQUAL(response.rows, (std::vector<int64_t>{0, 1, 2, 3}));
    if (response.signature->name == "t")
      CHECK_EQUAL(response.rows, (std::vector<int64_t>{0, 0, 1, 0, 1, 0, 1, 1, 2, 0, 1, 2, 3, 0, 1, 3}));
  }
  CHECK_EQUAL(host.last_decision.responses.size(), 3u);
  CHECK(host.round(allgather("g", {1, 2})));  // rows that differ from the first round's
}

TEST(nothing_is_held_for_ever) {
  Host host;
  CHECK(host.round(allreduce("a")));
  host.submit_from({0, 1, 2}, allreduce("a"));
  host.report(0);
  for (int32_t rank : {1, 2}) host.below(rank);
  CHECK_EQUAL(host.relay.report_due(), host.now + milliseconds(10));
  host.now += milliseconds(10);
  CHECK(host.goes_up());
  CHECK_EQUAL(list(host.aggregate.cached_requests[0].by.ranks), (Ranks{1, 2}));
  CHECK_EQUAL(host.relay.report_due(), never);
  host.now += milliseconds(590);
  host.submit(3, allreduce("a"));  // the last rank's request is not held
  host.below(3);
  CHECK(host.goes_up());
  CHECK_EQUAL(list(host.aggregate.cached_requests[0].by.ranks), (Ranks{3}));
  CHECK(host.decide());
  REQUIRE(host.outcome(0).lateness.size() == 1);
  CHECK_EQUAL(host.outcome(0).lateness[0].rank, 3);
  CHECK(host.outcome(0).lateness[0].lateness == (Lateness{2, milliseconds(600), milliseconds(600)}));
}

// The coordinator receives requests late, but learns since when every rank has waited.
TEST(times_go_up_as_ages) {
  Host host({.stall_report = milliseconds(60)});
  host.submit_from({0, 1}, allreduce("x"));
  host.below(1);
  host.now += milliseconds(8);
  host.submit(3, allreduce("x"));
  host.below(3);
  host.now += milliseconds(2);
  CHECK(host.goes_up());
  const Arrivals& arrivals = host.aggregate.full_requests[0].by.arrivals;
  CHECK(arrivals ==
        (Arrivals{host.now - milliseconds(10), host.now - milliseconds(2), host.now - milliseconds(10), 3}));
  CHECK_EQUAL(host.coordinator.next_deadline(), host.now + milliseconds(50));
}

TEST(what_waits_is_told_with_the_ranks_that_keep_it_waiting) {
  Host host({.stall_report = milliseconds(100)});
  host.submit_from({0, 1, 3}, allreduce("x"));
  host.report(0);
  for (int32_t rank : {1, 3}) host.below(rank);
  host.now += milliseconds(100);
  CHECK(host.goes_up());
  CHECK(host.decide());
  CHECK_EQUAL(host.last_decision.asked, (Ranks{2}));
  REQUIRE(host.outcome(2).is_asked);
  host.negotiators[2]->answer({2, true, "other", {}});
  host.below(2);
  CHECK_EQUAL(host.relay.report_due(), 0);  // not held
  CHECK(host.goes_up());
  CHECK(host.decide());
  REQUIRE(host.outcome(0).stalls.size() == 1);
  CHECK_EQUAL(host.outcome(0).stalls[0].missing, (Ranks{2}));
  CHECK_EQUAL(host.outcome(0).stalls[0].waiting, (Ranks{0, 1, 3}));
  REQUIRE(host.outcome(0).stalls[0].rank_reports.size() == 1);
  CHECK_EQUAL(host.outcome(0).stalls[0].rank_reports[0].waits_for, "other");
}

TEST(a_join_or_a_goodbye_overtakes_nothing) {
  Host host;
  CHECK(host.round(allreduce("a")));
  host.submit(2, allreduce("a"));
  host.submit(2, allreduce("b"));
  host.below(2);
  host.join(3);
  host.below(3);
  CHECK(host.goes_up());  // rank 3 will not submit "a" any more, but rank 1 may
  CHECK(host.aggregate.cached_requests.empty());
  REQUIRE(host.aggregate.notices.size() == 1);
  CHECK_EQUAL(host.aggregate.notices[0].rank, 3);
  host.submit(1, allreduce("a"));
  host.below(1);
  CHECK(host.goes_up());  // every rank that still may submit it has done so
  CHECK_EQUAL(list(host.aggregate.cached_requests[0].by.ranks), (Ranks{1, 2}));
  Bytes goodbye;
  host.negotiators[2]->goodbye(goodbye);
  CHECK(host.relay.merge(2, goodbye, host.now).is_ok());
  CHECK(host.goes_up());
  CHECK_EQUAL(list(host.aggregate.full_requests[0].by.ranks), (Ranks{2}));
  CHECK(host.aggregate.notices[0].notices.goodbye);
}

TEST(members_of_other_sets_are_not_awaited) {
  Host host;
  CHECK(host.round(add_set({0, 2, 3})));
  const int32_t set = host.outcome(0).process_sets[0].process_set;
  host.submit(2, in_set(allreduce("x"), set));
  host.below(2);
  CHECK(!host.goes_up());
  host.submit(3, in_set(allreduce("x"), set));
  host.below(3);
  CHECK(host.goes_up());
  host.submit(2, sending("s", 2, 0));
  host.below(2);
  CHECK(host.goes_up());  // the pair's other rank is on another host
  CHECK(host.round(remove_set(set)));
  host.submit(2, sending("s", 2, 3));
  host.below(2);
  CHECK(!host.goes_up());
}

// After a Decision that retires an id, ranks submit again in full and count their lapsed requests; requests that the
// relay holds by that id must be counted, too.
TEST(ids_that_are_retired_while_they_are_held_lapse) {
  Host host({.cache_capacity = 1});
  CHECK(host.round(allreduce("a")));
  host.submit_from({1, 2}, allreduce("a"));
  for (int32_t rank : {1, 2}) host.below(rank);
  host.submit_all(allreduce("b"));
  host.report(0);
  for (int32_t rank : {1, 2, 3}) host.below(rank);
  CHECK(host.goes_up());
  CHECK(host.aggregate.cached_requests.empty());
  CHECK(host.decide());
  CHECK_EQUAL(host.last_decision.retired.size(), 1u);
  for (int32_t rank : {1, 2}) {
    host.below(rank);
    CHECK_EQUAL(host.last_report.lapsed, 1u);
  }
  CHECK(host.goes_up());
  REQUIRE(host.aggregate.cached_requests.size() == 1);
  CHECK_EQUAL(list(host.aggregate.cached_requests[0].by.ranks), (Ranks{1, 2}));
  CHECK_EQUAL(host.aggregate.full_requests.size(), 1u);
}

TEST(ranks_that_disagree_are_told_apart) {
  Host host;
  for (int32_t rank = 0; rank < 4; ++rank) host.submit(rank, allreduce("x", {rank == 2 ? 5 : 4}));
  host.report(0);
  for (int32_t rank : {1, 2, 3}) host.below(rank);
  CHECK(host.goes_up());
  CHECK_EQUAL(host.aggregate.full_requests.size(), 2u);
  CHECK(host.decide());
  const std::string text = host.refusal({0, 1, 2, 3}, SRT_MISMATCH);
  CHECK(contains(text, "rank 2 (pid 72 on hostA) has float32 of shape [5]"));
}

TEST(a_leader_speaks_for_its_own_ranks_only) {
  Host host;
  Relay other({0, 1, 2, 3}, 4, {}, 64);
  Bytes bytes;
  for (int32_t rank : {0, 1, 2, 3}) {
    host.submit(rank, allreduce("x"));
    CHECK(other.merge(rank, host.take_report(rank), host.now).is_ok());
  }
  other.report(host.now, bytes);
  const Status status = host.coordinator.merge_aggregate(1, host.subtree, bytes, host.now);
  CHECK_EQUAL(status.code(), SRT_PROTOCOL);
  CHECK(contains(status.text(), "rank 1 (pid 71 on hostA)"));
  CHECK_EQUAL(Relay({1, 2, 3}, 4, {}, 64).merge_aggregate(host.subtree, bytes, host.now).code(), SRT_PROTOCOL);
  CHECK(!host.decide());
}

TEST(a_request_made_twice_is_noticed) {
  Host host;
  host.submit(2, allreduce("x"));
  const Bytes report = host.take_report(2);
  CHECK(host.relay.merge(2, report, host.now).is_ok());
  CHECK_EQUAL(host.relay.merge(2, report, host.now).code(), SRT_PROTOCOL);
  Host knows;
  CHECK(knows.round(allreduce("x")));
  knows.submit(2, allreduce("x"));
  const Bytes by_id = knows.take_report(2);
  CHECK(knows.relay.merge(2, by_id, knows.now).is_ok());
  CHECK_EQUAL(knows.relay.merge(2, by_id, knows.now).code(), SRT_PROTOCOL);
}

TEST(aggregates_survive_the_wire) {
  Host host;
  const Bytes bytes = rich_aggregate(host);
  REQUIRE(decode(bytes, host.subtree, host.now, host.aggregate));
  Bytes again;
  encode(host.aggregate, host.now, again);
  CHECK(again == bytes);
  for (size_t length = 0; length < bytes.size(); ++length)
    CHECK(!decode(std::span(bytes).first(length), host.subtree, host.now, host.aggregate));
}

TEST(mutated_aggregates_do_no_harm) {
  for (uint32_t seed = 0; seed < check::seeds(4'000); ++seed) {
    std::mt19937 random(seed);
    Host host;
    Bytes bytes = rich_aggregate(host);
    for (uint32_t changes = random() % 3 + 1; changes > 0; --changes)
      bytes[random() % bytes.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    Relay above({1, 2, 3}, 4, {0}, 64);
    if (above.merge_aggregate(host.subtree, bytes, host.now).is_ok()) {
      Bytes forwarded;
      above.report(host.now, forwarded);
      CHECK(decode(forwarded, host.subtree, host.now, host.aggregate));
    }
    if (!host.coordinator.merge_aggregate(1, host.subtree, bytes, host.now).is_ok()) continue;
    Bytes decision;
    for (const char* name : {"a", "b", "new"}) host.submit(0, allreduce(name));
    if (!host.coordinator.merge(0, host.take_report(0), host.now).is_ok()) continue;
    if (!host.coordinator.decide(host.now, decision)) continue;
    decision[random() % decision.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    (void)host.relay.forward(decision).is_ok();
  }
}

TEST(arrivals_merge_in_any_order) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000; ++i) {
    std::vector<Arrivals> parts;
    Arrivals expected;
    for (int32_t rank = 0; rank < 6; ++rank) {
      parts.push_back(Arrivals::of(rank, static_cast<Nanoseconds>(random() % 8)));
      expected.merge(parts.back());
    }
    while (parts.size() > 1) {
      std::shuffle(parts.begin(), parts.end(), random);
      const Arrivals last = parts.back();
      parts.pop_back();
      parts.back().merge(last);
    }
    CHECK(parts[0] == expected);
  }
}

TEST(hosts_form_a_tree_of_their_lowest_ranks) {
  const ControlTree one_host({0, 0, 0}, 16);
  CHECK_EQUAL(one_host.children(0), (Ranks{1, 2}));
  CHECK_EQUAL(one_host.parent(0), -1);
  // Hosts of 2, 1, 3, 1 and 1 ranks, which are not numbered consecutively.
  const ControlTree tree({0, 1, 2, 0, 2, 3, 4, 2}, 2);
  CHECK_EQUAL(tree.children(0), (Ranks{1, 2, 3}));  // two leaders, and rank 3 of its own host
  CHECK_EQUAL(tree.children(1), (Ranks{5, 6}));
  CHECK_EQUAL(tree.children(2), (Ranks{4, 7}));
  CHECK_EQUAL(tree.subtree(1), (Ranks{1, 5, 6}));
  CHECK_EQUAL(tree.subtree_bits(2).ranks(), (Ranks{2, 4, 7}));
}
