// Operations with a deadline: who contributes, and that every contribution is added at most once, for any timing.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "control/relay/relay.h"
#include "control_world.h"

using namespace sirtaki;

namespace {

Signature round_of(const std::string& name, uint64_t round, Nanoseconds after, int32_t quorum) {
  Signature signature = allreduce(name + round_suffix(round));
  signature.deadline = Deadline{after, quorum, round};
  return signature;
}

std::vector<int32_t> contributors(const Plan& plan) {
  std::vector<int32_t> ranks;
  std::set_difference(plan.members.begin(), plan.members.end(), plan.absentees.begin(), plan.absentees.end(),
                      std::back_inserter(ranks));
  return ranks;
}

// A rank that adds what a round left out to its next contribution, like an optimizer that accumulates.
struct LateRank {
  LateRank(int32_t number, int32_t size) : negotiator(number, size, {}, 64) {}

  Negotiator negotiator;
  std::deque<Bytes> up, down;
  std::deque<int32_t> unfinished;
  std::unique_ptr<Relay> relay;
  RankBits subtree;
  std::vector<int32_t> children;
  int32_t parent = 0;
  uint64_t rounds = 0;                              // begun
  Ticket in_flight = 0;
  int64_t payload = 0, residual = 0, given = 0;     // given: the sum of all that it ever wanted to contribute
  std::map<uint64_t, std::vector<int32_t>> kept;    // contributors, by round
  std::vector<std::vector<int32_t>> applied;        // contributors, by round: what the program has seen
  std::vector<int64_t> contributed;                 // by round; 0: nothing
};

struct Terms {
  int32_t size, quorum, most_missed;
  Nanoseconds after;
  bool is_tree = false;
};

class Program {
 public:
  static constexpr uint64_t most_rounds = 30;

  Program(const Terms& terms, uint32_t seed)
      : terms_(terms), random_(seed), coordinator_(rank_names(terms.size), {.late_results = terms.most_missed}) {
    for (int32_t rank = 0; rank < terms.size; ++rank) ranks_.push_back(std::make_unique<LateRank>(rank, terms.size));
    for (auto& rank : ranks_) pace_.push_back(2 + below(30)), rank->contributed.resize(most_rounds + 1);
    for (int32_t rank = 1; rank < terms.size; ++rank) ranks_[0]->children.push_back(rank);
    if (terms.is_tree) plant_tree();
  }

  void run() {
    for (size_t steps = 0; !is_over() && steps < 300'000; ++steps) {
      now_ += below(20'000);
      act(static_cast<int32_t>(below(ranks_.size())), below(100));
    }
    CHECK(is_over());
    check();
  }

  size_t late() const { return late_; }

 private:
  // Ranks 1 and 2 report through rank 1.
  void plant_tree() {
    LateRank& leader = *ranks_[1];
    leader.relay = std::make_unique<Relay>(std::vector<int32_t>{1, 2}, terms_.size, RelayRule{microseconds(50)}, 64);
    leader.subtree = RankBits(terms_.size);
    leader.subtree.add(1);
    leader.subtree.add(2);
    leader.children = {2};
    ranks_[2]->parent = 1;
    std::erase(ranks_[0]->children, 2);
  }

  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }

  bool is_over() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
      return rank->applied.size() == most_rounds && rank->up.empty() && rank->down.empty() &&
             rank->unfinished.empty() && rank->negotiator.report_due() == never &&
             (!rank->relay || rank->relay->report_due() == never);
    });
  }

  void act(int32_t number, size_t dice) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    if (dice < 30) return compute(number);
    if (dice < 45) return report(number);
    if (dice < 60) return arrive(number);
    if (dice < 70) return decide();
    if (dice < 90) return hear(number);
    if (rank.unfinished.empty()) return;
    rank.negotiator.plan_finished(rank.unfinished.front());
    rank.unfinished.pop_front();
  }

  // Begins the next round, at the rank's own pace.
  void compute(int32_t number) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    if (rank.in_flight || rank.rounds == most_rounds || below(pace_[static_cast<size_t>(number)]) != 0) return;
    const uint64_t round = ++rank.rounds;
    const auto gradient = static_cast<int64_t>(1 + below(1'000));
    rank.given += gradient;
    rank.payload = rank.residual + gradient;
    if (const auto kept = rank.kept.find(round); kept != rank.kept.end()) {
      apply_round(rank, kept->second, false);
      rank.kept.erase(kept);
      return;
    }
    rank.in_flight = ++last_ticket_;
    const Signature signature = round_of("gradients", round, terms_.after, terms_.quorum);
    rank.negotiator.submit({std::make_shared<Signature>(signature), rank.in_flight, false}, now_);
    if (below(2)) rank.negotiator.flush();
  }

  void apply_round(LateRank& rank, const std::vector<int32_t>& who, bool is_in) {
    rank.applied.push_back(who);
    if (is_in) rank.contributed[rank.applied.size()] = rank.payload;
    rank.residual = is_in ? 0 : rank.payload;
    late_ += !is_in;
  }

  void report(int32_t number) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    if (rank.negotiator.report_due() <= now_) {
      Bytes bytes;
      rank.negotiator.report(now_, bytes);
      if (!rank.relay) rank.up.push_back(std::move(bytes));
      else CHECK_EQUAL(std::string(rank.relay->merge(number, bytes, now_).text()), "");
    }
    if (rank.relay && rank.relay->report_due() <= now_) rank.relay->report(now_, rank.up.emplace_back());
  }

  void arrive(int32_t number) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    if (rank.up.empty()) return;
    LateRank& parent = *ranks_[static_cast<size_t>(rank.parent)];
    const Bytes& bytes = rank.up.front();
    const Status status = rank.relay     ? coordinator_.merge_aggregate(number, rank.subtree, bytes, now_)
                          : parent.relay ? parent.relay->merge(number, bytes, now_)
                                         : coordinator_.merge(number, bytes, now_);
    CHECK_EQUAL(std::string(status.text()), "");
    rank.up.pop_front();
  }

  void decide() {
    Bytes bytes;
    if (!coordinator_.decide(now_, bytes)) return;
    Decision decision;
    CHECK(decode(bytes, decision));
    CHECK(decision.retired.empty() && decision.stalls.empty() && decision.refusals.empty());
    for (const Response& response : decision.responses) CHECK_EQUAL(response.id, 0u);
    ranks_[0]->down.push_back(bytes);
  }

  void hear(int32_t number) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    if (rank.down.empty()) return;
    for (int32_t child : rank.children) ranks_[static_cast<size_t>(child)]->down.push_back(rank.down.front());
    if (rank.relay) CHECK_EQUAL(std::string(rank.relay->forward(rank.down.front()).text()), "");
    Outcome outcome;
    CHECK_EQUAL(std::string(rank.negotiator.apply(rank.down.front(), outcome).text()), "");
    rank.down.pop_front();
    for (const Plan& plan : outcome.plans) take(number, plan);
  }

  void take(int32_t number, const Plan& plan) {
    LateRank& rank = *ranks_[static_cast<size_t>(number)];
    rank.unfinished.push_back(plan.process_set);
    const PlannedTensor& tensor = plan.tensors.front();
    const std::vector<int32_t> who = contributors(plan);
    const bool is_in = std::binary_search(who.begin(), who.end(), number);
    CHECK_EQUAL(static_cast<int32_t>(who.size()), plan.contributors);
    CHECK(plan.contributors >= terms_.quorum);
    CHECK_EQUAL(tensor.is_kept, tensor.ticket == 0);
    if (tensor.is_kept) {
      CHECK(!is_in && tensor.signature->deadline->round > rank.rounds);
      rank.kept[tensor.signature->deadline->round] = who;
      CHECK(static_cast<int32_t>(rank.kept.size()) <= terms_.most_missed);
      return;
    }
    CHECK_EQUAL(tensor.ticket, rank.in_flight);
    CHECK_EQUAL(tensor.signature->deadline->round, rank.rounds);
    rank.in_flight = 0;
    apply_round(rank, who, is_in);
  }

  // Checks that all ranks saw the same contributors in the same order, that exactly these have counted, and that
  // nothing was lost: what the rounds did not take is what the ranks still have.
  void check() {
    int64_t wanted = 0, counted = 0;
    for (size_t number = 0; number < ranks_.size(); ++number) {
      const LateRank& rank = *ranks_[number];
      CHECK(rank.applied == ranks_[0]->applied);
      CHECK(rank.kept.empty());
      wanted += rank.given;
      counted += rank.residual;
      for (size_t round = 1; round <= most_rounds; ++round) {
        const auto& who = rank.applied[round - 1];
        const bool is_in = std::binary_search(who.begin(), who.end(), static_cast<int32_t>(number));
        CHECK_EQUAL(rank.contributed[round] != 0, is_in);
        counted += rank.contributed[round];
      }
    }
    CHECK_EQUAL(counted, wanted);
    CHECK_EQUAL(coordinator_.next_deadline(), never);
  }

  Terms terms_;
  std::mt19937 random_;
  Coordinator coordinator_;
  std::vector<std::unique_ptr<LateRank>> ranks_;
  std::vector<size_t> pace_;
  Nanoseconds now_ = seconds(1);
  Ticket last_ticket_ = 0;
  size_t late_ = 0;
};

size_t count_late(const Terms& terms, uint32_t first_seed) {
  size_t late = 0;
  for (uint32_t seed = first_seed; seed < first_seed + check::seeds(60); ++seed) {
    const int before = check::failures();
    Program program(terms, seed);
    program.run();
    late += program.late();
    if (check::failures() == before) continue;
    std::fprintf(stderr, "seed %u\n", seed);
    break;
  }
  return late;
}

}  // namespace

TEST(a_round_waits_for_its_deadline_and_its_quorum) {
  World world(4);
  world.submit_from({0, 2}, round_of("g", 1, milliseconds(200), 2));
  CHECK(!world.round());
  CHECK_EQUAL(world.coordinator.next_deadline(), world.now + milliseconds(200));
  world.now += milliseconds(199);
  CHECK(!world.decide());
  world.now += milliseconds(1);
  CHECK(world.decide());
  const Plan& plan = world.outcome(2).plans.at(0);
  CHECK_EQUAL(contributors(plan), (std::vector<int32_t>{0, 2}));
  CHECK(plan.tensors[0].ticket != 0 && !plan.tensors[0].is_kept);
  CHECK(world.outcome(1).plans.at(0).tensors[0].is_kept);
}

TEST(without_a_quorum_a_round_waits_for_it_and_no_longer) {
  World world(4);
  world.submit(1, round_of("g", 1, 0, 2));
  CHECK(!world.round());
  world.now += seconds(1);
  CHECK(!world.decide());
  world.submit(3, round_of("g", 1, 0, 2));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).plans.at(0).absentees, (std::vector<int32_t>{0, 2}));
}

// The request of a late rank is on its way when its round is decided: it receives the result, and does not open the
// round again.
TEST(a_request_that_crosses_its_decision_is_late) {
  World world(3);
  world.submit_from({0, 1}, round_of("g", 1, 0, 2));
  const Ticket late = world.submit(2, round_of("g", 1, 0, 2));
  const Bytes crossing = world.take_report(2);
  world.report(0);
  world.report(1);
  CHECK(world.decide());
  CHECK_EQUAL(world.outcome(2).plans.at(0).tensors[0].ticket, late);
  CHECK_EQUAL(world.outcome(2).plans.at(0).absentees, (std::vector<int32_t>{2}));
  world.deliver(2, crossing);
  CHECK(!world.decide());
  CHECK_EQUAL(world.coordinator.next_deadline(), never);
  world.submit_all(round_of("g", 2, 0, 3));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(2).plans.at(0).contributors, 3);
}

TEST(a_queued_request_whose_round_is_decided_is_never_reported) {
  World world(2);
  world.submit(0, round_of("g", 1, 0, 1));
  world.report(0);
  const Ticket late = world.submit(1, round_of("g", 1, 0, 1));
  CHECK(world.decide());
  CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].ticket, late);
  CHECK_EQUAL(world.negotiators[1]->report_due(), never);
}

TEST(a_rank_that_has_missed_too_many_rounds_is_awaited) {
  World world(3, {.late_results = 2});
  for (uint64_t round = 1; round <= 2; ++round) {
    world.submit_from({0, 1}, round_of("g", round, 0, 1));
    CHECK(world.round());
  }
  world.submit_from({0, 1}, round_of("g", 3, 0, 1));
  CHECK(!world.round());
  world.now += seconds(1);
  CHECK(!world.decide());
  world.submit(2, round_of("g", 3, 0, 1));
  CHECK(world.round());
  CHECK_EQUAL(world.outcome(0).plans.at(0).contributors, 3);
  world.submit_from({0, 1}, round_of("g", 4, 0, 1));
  CHECK(world.round());
}

TEST(a_late_rank_with_another_shape_is_refused_alone) {
  World world(2);
  world.submit(0, round_of("g", 1, 0, 1));
  world.report(0);
  Signature other = round_of("g", 1, 0, 1);
  other.shape = {5};
  world.submit(1, other);
  CHECK(world.decide());
  CHECK(contains(world.refusal({1}, SRT_MISMATCH), "was decided without this rank"));
  CHECK_EQUAL(world.outcome(1).plans.at(0).tensors[0].ticket, 0u);
  CHECK(world.outcome(0).refusals.empty());
}

// A round without rank 1, but with rank 2, ends the row of rank 2.
TEST(a_rank_that_contributes_again_may_miss_as_many_rounds) {
  World world(3, {.late_results = 1});
  for (const auto& [round, late] : {std::pair{1, 2}, {2, 1}, {3, 2}}) {
    world.submit_from({0, 3 - late}, round_of("g", static_cast<uint64_t>(round), 0, 1));
    CHECK(world.round());
    CHECK_EQUAL(world.outcome(0).plans.at(0).absentees, std::vector<int32_t>{late});
  }
}

TEST(ranks_that_are_late_within_a_deadline_are_not_stalled) {
  World world(2, {.stall_report = seconds(5)});
  world.submit(0, round_of("g", 1, seconds(20), 2));
  CHECK(!world.round());
  world.now += seconds(15);
  CHECK(!world.tell_stalls());
  world.now += seconds(6);  // the deadline has passed, but its quorum is not there
  CHECK(!world.tell_stalls());
  world.now += seconds(6);
  CHECK(world.tell_stalls());
  CHECK_EQUAL(world.last_decision.stalls.size(), 1u);
  CHECK_EQUAL(world.last_decision.stalls[0].missing, (std::vector<int32_t>{1}));
}

TEST(a_rank_that_has_joined_refuses_rounds) {
  World world(2);
  world.join(1);
  world.submit(0, round_of("g", 1, 0, 1));
  CHECK(world.round());
  CHECK(contains(world.refusal({0}, SRT_MISMATCH), "join() and deadlines cannot be combined"));
}

TEST(a_rank_that_has_finished_is_an_error) {
  World world(2);
  world.submit(0, round_of("g", 1, seconds(9), 1));
  CHECK(!world.round());
  world.goodbye(1);
  CHECK(world.decide());
  CHECK(contains(world.refusal({0}, SRT_PEER_FINISHED), "has finished"));
}

TEST(rounds_are_not_fused_and_leave_the_cache_alone) {
  World world(2, {.cache_capacity = 1});
  world.submit_all(allreduce("a"));
  CHECK(world.round());
  world.submit_all(round_of("g", 1, 0, 2));
  world.submit_all(round_of("h", 1, 0, 2));
  world.submit_all(allreduce("a"));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(0), "a | g (round 1) | h (round 1)");
  CHECK(world.last_decision.retired.empty());
}

TEST(nothing_is_lost_or_added_twice) {
  CHECK(count_late({.size = 4, .quorum = 2, .most_missed = 8, .after = 0}, 1'000) > 0);
  CHECK(count_late({.size = 3, .quorum = 1, .most_missed = 3, .after = microseconds(300)}, 2'000) > 0);
  CHECK(count_late({.size = 5, .quorum = 3, .most_missed = 1, .after = microseconds(40)}, 3'000) > 0);
  CHECK_EQUAL(count_late({.size = 3, .quorum = 3, .most_missed = 8, .after = 0}, 4'000), 0u);
}

TEST(nothing_is_lost_or_added_twice_behind_a_leader) {
  CHECK(count_late({.size = 4, .quorum = 2, .most_missed = 8, .after = 0, .is_tree = true}, 5'000) > 0);
  CHECK(count_late({.size = 4, .quorum = 1, .most_missed = 2, .after = microseconds(100), .is_tree = true}, 6'000) > 0);
}
