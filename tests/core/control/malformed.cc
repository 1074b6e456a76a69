// Malformed messages of a rank or of the coordinator: requests and plans that fit nobody, rows that were never
// submitted, ranks that do not exist. All of them are rejected before any part of them is used.
#include <functional>
#include <random>

#include "control_belief.h"

using namespace sirtaki;

namespace {

constexpr int64_t huge = int64_t{1} << 62;

Signature with(Signature signature, const std::function<void(Signature&)>& change) {
  change(signature);
  return signature;
}

SignaturePtr shared(const Signature& signature) { return std::make_shared<Signature>(signature); }

// Returns the coordinator's status, in a world of three ranks, for a report of rank 0.
Status told(const Report& report) {
  Coordinator coordinator(rank_names(3), {});
  Bytes bytes;
  encode(report, bytes);
  return coordinator.merge(0, bytes, start_time);
}

Status told(const Signature& signature) {
  Report report;
  report.full_requests = {{shared(signature), false}};
  return told(report);
}

// Rank 0 of three, which has submitted a request and receives a Decision.
struct Listener {
  explicit Listener(const Signature& signature) {
    negotiator->submit({shared(signature), 1, false}, start_time);
    Bytes report;
    negotiator->report(0, report);
    decision.number = decision.first_plan = 1;
    decision.plans = {{world_set, 3, false, {is_response}}};
    decision.responses = {{shared(signature), {}, 0}};
  }

  explicit Listener(const Signature& signature, std::vector<int64_t> rows) : Listener(signature) {
    decision.responses[0].rows = std::move(rows);
  }

  static Listener joined(const Signature& signature, std::vector<int64_t> rows = {}) {
    Listener listener(barrier("before"));
    CHECK_EQUAL(listener.hear().code(), SRT_OK);
    listener.negotiator->join(world_set, 2, start_time);
    Bytes report;
    listener.negotiator->report(0, report);
    listener.decision.number = listener.decision.first_plan = 2;
    listener.decision.responses = {{shared(signature), std::move(rows), 0}};
    return listener;
  }

  Status hear() {
    Bytes bytes;
    encode(decision, bytes);
    outcome = {};
    return negotiator->apply(bytes, outcome);
  }

  Listener says(const std::function<void(Decision&)>& change) && {
    change(decision);
    return std::move(*this);
  }

  Listener says_of_tensor(const std::function<void(Signature&)>& change) && {
    decision.responses[0].signature = shared(with(*decision.responses[0].signature, change));
    return std::move(*this);
  }

  std::unique_ptr<Negotiator> negotiator = std::make_unique<Negotiator>(0, 3, ReportRule{}, 100);
  Decision decision;
  Outcome outcome;
};

void expect_lie(Listener listener, int line) {
  const Status status = listener.hear();
  if (status.code() != SRT_PROTOCOL || !listener.outcome.plans.empty())
    check::fail(__FILE__, line, "it was believed: " + std::string(status.text()));
}
#define LIE(...) expect_lie(__VA_ARGS__, __LINE__)

}  // namespace

TEST(requests_that_can_be_nobodys_are_refused_with_the_name_of_the_rank) {
  for (const Signature& signature : {
           alltoall("x", {1, 2}),
           alltoall("x", {1, 2, 3, 4}),
           alltoall("x", {}),
           with(alltoall("x", {1, 2, 3}), [](Signature& s) { s.splits = {-1, 4, 3}; }),
           with(alltoall("x", {1, 2, 3}), [](Signature& s) { s.shape[0] = 5; }),
           with(alltoall("x", {1, 2, 3}), [](Signature& s) { s.splits = {huge, huge, huge}; }),
           with(alltoall("x", {1, 2, 3}), [](Signature& s) { s.shape.clear(); }),
           reducescatter("x", {}),
           allgather("x", {}),
           with(reducescatter("x"), [](Signature& s) { s.reduce_op = ReduceOp::adasum; }),
           with(allreduce("x"), [](Signature& s) { s.dtype = DType::boolean; }),
           with(allreduce("x"), [](Signature& s) { s.dtype = DType::float8_e8m0fnu; }),
           with(reducescatter("x"), [](Signature& s) { s.dtype = DType::float4_e2m1fn_x2; }),
           sending("x", 1, 2),
           sending("x", 0, 0),
           sending("x", 0, 3),
           sending("x", 0, -1),
           sending("x", INT32_MIN, 0),
           sending("x", INT32_MAX, 0),
           in_group(sending("x", 0, 1), 5, 1),
       }) {
    const Status status = told(signature);
    CHECK_EQUAL(status.code(), SRT_PROTOCOL);
    CHECK(contains(status.text(), "rank 0 (pid 70 on hostA)"));
  }
  CHECK_EQUAL(told(alltoall("x", {0, 2, 3})).code(), SRT_OK);
  CHECK_EQUAL(told(reducescatter("x")).code(), SRT_OK);
  CHECK_EQUAL(told(sending("x", 2, 0)).code(), SRT_OK);
}

TEST(plans_without_ranks_are_only_for_rounds_of_members) {
  const auto without = [](const Signature& signature, std::vector<int32_t> absentees, int32_t contributors) {
    return Listener(signature).says([&](Decision& decision) {
      decision.plans[0].absentees = absentees;
      decision.plans[0].contributors = contributors;
    });
  };
  Signature round = allreduce("x (round 1)");
  round.deadline = Deadline{0, 1, 1};
  CHECK_EQUAL(without(round, {1}, 2).hear().code(), SRT_OK);
  CHECK_EQUAL(without(round, {0}, 2).hear().code(), SRT_OK);
  LIE(without(allreduce("x"), {0}, 2));
  LIE(without(round, {1}, 3));
  LIE(without(round, {0}, 1));
  LIE(without(round, {3}, 2));
  LIE(without(round, {-1}, 2));
  LIE(without(round, {2, 1}, 1));
  LIE(without(round, {1, 1}, 1));
}

TEST(a_cached_send_is_not_for_others_to_repeat) {
  World world(3);
  world.submit_from({0, 1}, sending("x", 0, 1));
  CHECK(world.round());
  REQUIRE(world.last_decision.responses.size() == 1);
  Report report;
  report.last_decision = 1;
  report.present = {world.last_decision.responses[0].id};
  Bytes bytes;
  encode(report, bytes);
  CHECK_EQUAL(world.coordinator.merge(2, bytes, world.now).code(), SRT_PROTOCOL);
}

TEST(what_a_set_does_is_for_its_members) {
  World world(3);
  world.submit_from({0, 1, 2}, add_set({1, 2}));
  CHECK(world.round());
  world.submit_from({1, 2}, in_set(allreduce("x"), 1));
  CHECK(world.round());
  REQUIRE(world.last_decision.responses.size() == 1);
  Report by_id, in_full, join;
  by_id.present = {world.last_decision.responses[0].id};
  in_full.full_requests = {{std::make_shared<Signature>(in_set(allreduce("y"), 1)), false}};
  join.joined = {1};
  for (Report report : {by_id, in_full, join}) {
    report.last_decision = 2;
    Bytes bytes;
    encode(report, bytes);
    CHECK_EQUAL(world.coordinator.merge(0, bytes, world.now).code(), SRT_PROTOCOL);
  }
}

TEST(a_third_rank_in_a_pair_leaves_nobody_waiting) {
  World world(3);
  world.submit(0, sending("x", 0, 1));
  world.submit(2, sending("x", 2, 1));  // under a name that belongs to another pair
  world.submit(1, sending("x", 0, 1));
  CHECK(world.round());
  CHECK(!world.refusal({0, 1, 2}, SRT_MISMATCH).empty());
}

TEST(what_fits_is_believed) {
  CHECK_EQUAL(Listener(alltoall("x", {1, 2, 0}), {1, 2, 0, 9, 9, 9, 0, 0, 0}).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener(allgather("x", {4, 2}), {4, 0, 7}).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener(sending("x", 0, 2)).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener(broadcast("x", 2)).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener::joined(alltoall("x", {1, 2, 0}), {0, 0, 0, 9, 9, 9, 0, 0, 0}).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener::joined(broadcast("x", 2)).hear().code(), SRT_OK);
  CHECK_EQUAL(Listener::joined(reducescatter("x")).hear().code(), SRT_OK);
}

TEST(rows_that_nobody_brought_are_refused) {
  const Signature exchange = alltoall("x", {1, 2, 0});
  LIE(Listener(exchange, {}));
  LIE(Listener(exchange, {1, 2, 0}));
  LIE(Listener(exchange, {1, 2, 0, 9, 9, 9, 0, 0}));
  LIE(Listener(exchange, {1, 2, 0, 9, 9, 9, 0, 0, 0, 0}));
  LIE(Listener(exchange, {1, 3, 0, 9, 9, 9, 0, 0, 0}));
  LIE(Listener(exchange, {1, 2, 0, 9, -9, 9, 0, 0, 0}));
  LIE(Listener(exchange, {1, 2, 0, huge, huge, huge, 0, 0, 0}));
  LIE(Listener(exchange, {1, 2, 0, huge, 0, 0, 0, 0, 0}));  // too many bytes
  LIE(Listener(allgather("x", {4, 2}), {5, 0, 7}));
  LIE(Listener(allgather("x", {4, 2}), {4, 0}));
  LIE(Listener::joined(exchange, {1, 0, 0, 9, 9, 9, 0, 0, 0}));
  LIE(Listener::joined(allgather("x", {4, 2}), {1, 0, 7}));
}

TEST(tensors_other_than_those_asked_for_are_refused) {
  const auto grown = [](Signature& s) { s.shape[0] += 1; };
  const auto widened = [](Signature& s) { s.dtype = DType::float64; };
  for (const Signature& asked : {allreduce("x"), reducescatter("x"), broadcast("x", 1), sending("x", 0, 1)}) {
    LIE(Listener(asked).says_of_tensor(grown));
    LIE(Listener(asked).says_of_tensor(widened));
    LIE(Listener(asked).says_of_tensor([](Signature& s) { s.name = "y"; }));
    LIE(Listener(asked).says_of_tensor([](Signature& s) { s.kind = Kind::add_process_set; }));
  }
  for (int32_t wild : {0, 3, -1, INT32_MAX, INT32_MIN})
    LIE(Listener(sending("x", 0, 1)).says_of_tensor([=](Signature& s) { s.destination = wild; }));
  for (int32_t wild : {3, -1, INT32_MAX, INT32_MIN}) {
    LIE(Listener(broadcast("x", 1)).says_of_tensor([=](Signature& s) { s.root = wild; }));
    LIE(Listener::joined(broadcast("x", wild)));
  }
  LIE(Listener::joined(sending("x", 0, 1)));
  LIE(Listener::joined(broadcast("x", 0)));
  LIE(Listener::joined(with(allreduce("x"), [](Signature& s) { s.dtype = DType::boolean; })));
  LIE(Listener::joined(reducescatter("x", {})));
}

TEST(plans_that_no_coordinator_makes_are_refused) {
  for (int32_t count : {0, -1, 4, INT32_MAX})
    LIE(Listener(allreduce("x")).says([=](Decision& d) { d.plans[0].contributors = count; }));
  for (uint64_t number : {uint64_t{0}, uint64_t{2}, UINT64_MAX})
    LIE(Listener(allreduce("x")).says([=](Decision& d) { d.first_plan = number; }));
  LIE(Listener(allreduce("x")).says([](Decision& d) { d.plans[0].items = {is_response, is_response}; }));
  LIE(Listener(allreduce("x")).says([](Decision& d) { d.plans[0].items = {is_response | 1}; }));
  const auto with_another = [](const Signature& other) {
    return Listener::joined(allreduce("x")).says([&](Decision& d) {
      d.plans[0].items = {is_response, is_response | 1};
      d.responses.push_back({shared(other), {}, 0});
    });
  };
  LIE(with_another(reducescatter("y")));
  LIE(with_another(with(allreduce("y"), [](Signature& s) { s.dtype = DType::float16; })));
  LIE(with_another(with(allreduce("y"), [](Signature& s) { s.reduce_op = ReduceOp::max; })));
  CHECK_EQUAL(with_another(allreduce("y")).hear().code(), SRT_OK);
}

TEST(ranks_that_do_not_exist_are_refused) {
  for (const std::vector<int32_t>& wild :
       std::vector<std::vector<int32_t>>{{3}, {-1, 0}, {0, 0}, {2, 1}, {0, INT32_MAX}}) {
    Listener listener(allreduce("x"));
    listener.decision.set_changes = {{1, "add", wild}};
    CHECK_EQUAL(listener.hear().code(), SRT_PROTOCOL);
  }
  for (int32_t wild : {3, -1, INT32_MAX}) {
    for (const Stall& stall : {Stall{0, {"x"}, 0, {wild}, {0}, 5, {}}, Stall{0, {"x"}, 0, {1}, {0, wild}, 5, {}},
                               Stall{0, {"x"}, 0, {1}, {0}, 5, {{wild, true, "", {}}}}}) {
      Listener listener(allreduce("x"));
      listener.decision.stalls = {stall};
      CHECK_EQUAL(listener.hear().code(), SRT_PROTOCOL);
    }
  }
  for (int32_t wild : {3, -2, INT32_MAX}) {
    Listener listener(allreduce("x"));
    listener.decision.stalls = {Stall{0, {"x"}, 0, {1}, {0}, 5, {{1, false, "", {}, wild}}}};
    CHECK_EQUAL(listener.hear().code(), SRT_PROTOCOL);
  }
}

namespace {

// Replaces one field of a valid Decision by an arbitrary number.
void falsify(Decision& decision, std::mt19937& random) {
  const auto number = [&]() -> int64_t {
    const int64_t wild[] = {-1, 0, 1, 2, 3, 5, INT32_MAX, INT32_MIN, huge, INT64_MIN, static_cast<int64_t>(random())};
    return wild[random() % std::size(wild)];
  };
  Response& response = decision.responses[random() % decision.responses.size()];
  DecidedPlan& plan = decision.plans[random() % decision.plans.size()];
  Signature signature = *response.signature;
  switch (random() % 10) {
    case 0: response.rows.resize(static_cast<size_t>(random() % 12)); break;
    case 1:
      if (!response.rows.empty()) response.rows[random() % response.rows.size()] = number();
      break;
    case 2:
      if (!signature.shape.empty()) signature.shape[random() % signature.shape.size()] = number();
      break;
    case 3:
      if (!signature.splits.empty()) signature.splits[random() % signature.splits.size()] = number();
      break;
    case 4: signature.root = static_cast<int32_t>(number()); break;
    case 5: signature.destination = static_cast<int32_t>(number()); break;
    case 6: signature.kind = static_cast<Kind>(random() % (static_cast<uint32_t>(last_requested_kind) + 1)); break;
    case 7: signature.dtype = static_cast<DType>(random() % (static_cast<uint32_t>(last_dtype) + 1)); break;
    case 8: plan.contributors = static_cast<int32_t>(number()); break;
    default: plan.items[random() % plan.items.size()] = static_cast<PlanItem>(number()) | is_response; break;
  }
  response.signature = shared(signature);
}

}  // namespace

TEST(falsified_decisions_are_refused_or_harmless) {
  int believed = 0, refused = 0;
  for (uint32_t seed = 0; seed < check::seeds(10'000); ++seed) {
    std::mt19937 random(seed);
    World world(3);
    Asked asked;
    for (int32_t rank : {0, 1, 2}) {
      for (const Signature& signature : {allreduce("a"), reducescatter("r"), alltoall("e", {rank, 1, 2}),
                                         allgather("g", {rank, 2}), broadcast("b", 1), sending("s", 0, 2)})
        if (signature.kind != Kind::send || rank != 1) asked[world.submit(rank, signature)] = signature;
      world.report(rank);
    }
    Bytes bytes;
    REQUIRE(world.coordinator.decide(world.now, bytes));
    Decision decision;
    REQUIRE(decode(bytes, decision));
    for (uint32_t lies = random() % 3; lies > 0; --lies) falsify(decision, random);
    bytes.clear();
    encode(decision, bytes);
    for (int32_t rank : {0, 1, 2}) {
      Outcome outcome;
      const Status status = world.negotiators[static_cast<size_t>(rank)]->apply(bytes, outcome);
      ++(status.is_ok() ? believed : refused);
      CHECK(status.is_ok() || status.code() == SRT_PROTOCOL);
      for (const Plan& plan : outcome.plans) check_believed(plan, rank, asked);
    }
  }
  CHECK(believed > 1'000 && refused > 1'000);
}

TEST(settings_that_do_not_exist_or_are_out_of_bounds_are_refused) {
  const LiveValues usual = {64 << 20, 1 << 20, 300'000, 0, 200'000, 0};
  const auto with_settings = [](LiveValues values) {
    return Listener(allreduce("x")).says([&](Decision& decision) { decision.settings = std::move(values); });
  };
  CHECK_EQUAL(with_settings(usual).hear().code(), SRT_OK);
  LIE(with_settings({1}));
  for (size_t place = 0; place < usual.size(); ++place)
    for (const int64_t value : {int64_t{-1}, huge}) {
      LiveValues values = usual;
      values[place] = value;
      LIE(with_settings(values));
    }
}
