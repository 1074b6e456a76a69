// One rank of three, a leader or not, sends the coordinator arbitrary messages: its reports are rejected, or the
// Decisions that follow are valid for the two honest ranks.
#include <algorithm>

#include "control/control_belief.h"
#include "control/relay/relay.h"
#include "targets.h"

namespace sirtaki::fuzz {
namespace {

constexpr int32_t liar = 2;

// The first byte of a step of the input; the rest of a step is a byte, or for `lie` and `lead` a message.
enum CoordinatorStep : uint8_t { lie, ask, join, decide, pass_time, lead, coordinator_steps };

std::vector<Signature> signatures(int32_t rank) {
  return {allreduce("a"),
          allreduce("b", {2, 3}),
          allgather("g", {rank + 1, 2}),
          reducescatter("r"),
          alltoall("e", {1, rank, 2}),
          broadcast("c", 1),
          sending("s", 1, liar),
          sending("t", 0, 1),
          in_group(allreduce("x"), 7, 2),
          in_group(allreduce("y"), 7, 2),
          add_set({0, 1}),
          add_set({1, 2}),
          remove_set(1),
          in_set(allreduce("i"), 1),
          barrier("z")};
}

class Court {
 public:
  // Executes one step. Returns false once the liar is detected, which ends the world.
  bool take(Slices& slices) {
    switch (static_cast<CoordinatorStep>(slices.byte() % coordinator_steps)) {
      case lie: return world_.coordinator.merge(liar, slices.message(), world_.now).is_ok();
      case ask: submit(slices.byte()); return true;
      case join: begin_join(slices.byte() % 2); return true;
      case decide: settle(); return true;
      case pass_time: world_.now += seconds(slices.byte()); return true;
      case lead: return world_.coordinator.merge_aggregate(liar, subtree_, slices.message(), world_.now).is_ok();
      case coordinator_steps: break;
    }
    return true;
  }

  void settle() {
    Bytes bytes;
    while (world_.coordinator.decide(world_.now, bytes)) {
      for (int32_t rank : {0, 1}) hear(rank, bytes);
      bytes.clear();
    }
  }

  // Returns the report that the liar would send if it were honest.
  Bytes true_report(const std::vector<size_t>& numbers) {
    for (size_t number : numbers) {
      const Signature signature = signatures(liar)[number];
      const bool is_of_others = signature.kind == Kind::send && signature.destination != liar;
      if (!is_of_others) world_.submit(liar, signature);
    }
    return world_.take_report(liar);
  }

 private:
  struct Honest {
    Asked in_flight;
    Ticket join = 0;
    bool is_dead = false;
  };

  // Returns whether the request meets the conditions that the caller of Negotiator::submit has to ensure.
  bool may_ask(int32_t rank, const Signature& signature) {
    const Honest& honest = honest_[rank];
    const auto* members = world_.negotiators[static_cast<size_t>(rank)]->members(signature.process_set);
    const bool is_of_pair = rank == signature.root || rank == signature.destination;
    return !honest.join && members && std::binary_search(members->begin(), members->end(), rank) &&
           (signature.kind != Kind::send || is_of_pair) &&
           std::none_of(honest.in_flight.begin(), honest.in_flight.end(),
                        [&](const auto& other) { return key_of(other.second) == key_of(signature); });
  }

  void submit(uint8_t choice) {
    const int32_t rank = choice % 2;
    const std::vector<Signature> all = signatures(rank);
    const Signature& signature = all[choice / 2 % all.size()];
    if (honest_[rank].is_dead || !may_ask(rank, signature)) return;
    honest_[rank].in_flight[world_.submit(rank, signature)] = signature;
    world_.report(rank);
  }

  void begin_join(int32_t rank) {
    if (honest_[rank].join || honest_[rank].is_dead) return;
    honest_[rank].join = world_.join(rank);
    world_.report(rank);
  }

  void hear(int32_t rank, const Bytes& decision) {
    Honest& honest = honest_[rank];
    if (honest.is_dead) return;
    Outcome outcome;
    Negotiator& negotiator = *world_.negotiators[static_cast<size_t>(rank)];
    CHECK_EQUAL(std::string(negotiator.apply(decision, outcome).text()), "");
    for (const Plan& plan : outcome.plans) {
      check_believed(plan, rank, honest.in_flight, honest.join != 0);
      for (const PlannedTensor& tensor : plan.tensors) honest.in_flight.erase(tensor.ticket);
      negotiator.plan_finished(plan.process_set);
    }
    for (const Refusal& refusal : outcome.refusals) ended(honest, refusal.ticket);
    for (const JoinDone& done : outcome.joins) ended(honest, done.ticket);
    for (const ProcessSetChange& change : outcome.process_sets) ended(honest, change.ticket);
    honest.is_dead = !outcome.fatal.is_ok();
    if (negotiator.report_due() != never && !honest.is_dead) world_.report(rank);
  }

  static RankBits only(int32_t rank) {
    RankBits one(3);
    one.add(rank);
    return one;
  }

  static void ended(Honest& honest, Ticket ticket) {
    honest.in_flight.erase(ticket);
    if (honest.join == ticket) honest.join = 0;
  }

  World world_{3};
  RankBits subtree_ = only(liar);
  Honest honest_[2];
};

void hold_court(Input input) {
  Slices slices(input);
  Court court;
  while (!slices.at_end())
    if (!court.take(slices)) return;
  court.settle();
}

// Returns the aggregate that the liar would send up if it led a host of its own.
Bytes relayed(const Bytes& report) {
  Relay relay({liar}, 3, {0}, 64);
  CHECK(relay.merge(liar, report, seconds(100)).is_ok());
  Bytes aggregate;
  relay.report(seconds(100), aggregate);
  return aggregate;
}

// Returns seeds in which all ranks submit the same requests, and these are decided.
std::vector<Bytes> coordinator_seeds() {
  std::vector<Bytes> all;
  const std::vector<std::vector<size_t>> programs{{0, 1, 2, 3, 4, 5, 14}, {6, 7}, {8, 9}, {10, 12}, {11, 13}};
  for (const std::vector<size_t>& program : programs) {
    Bytes seed;
    for (size_t number : program)
      for (size_t rank : {0, 1}) seed.insert(seed.end(), {ask, static_cast<uint8_t>(2 * number + rank)});
    const Bytes report = Court().true_report(program);
    Bytes led = seed;
    seed.push_back(lie);
    put_message(seed, report);
    seed.push_back(decide);
    led.push_back(lead);
    put_message(led, relayed(report));
    led.push_back(decide);
    all.insert(all.end(), {seed, led});
  }
  Bytes& joining = all.emplace_back(Bytes{join, 0, join, 1, pass_time, 200, decide, lie});
  Report report;
  report.joined = {world_set};
  Bytes bytes;
  encode(report, bytes);
  put_message(joining, bytes);
  return all;
}

}  // namespace

const Target coordinator{"coordinator", hold_court, coordinator_seeds};

}  // namespace sirtaki::fuzz
