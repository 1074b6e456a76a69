// A rank in the middle of a job receives Decisions that no coordinator has made: it rejects them, or can execute them.
#include "control/control_belief.h"
#include "targets.h"

namespace sirtaki::fuzz {
namespace {

// Ranks 0, 1 and 2; rank 0 receives the Decisions. Their previous operations depend on the scene.
struct Scene {
  enum Situation : uint8_t { fresh, cached, in_a_set, joined, grouped, count };

  explicit Scene(uint8_t number) {
    switch (static_cast<Situation>(number % count)) {
      case fresh: submit_everything(); break;
      case cached: replay(); break;
      case in_a_set: open_set(); break;
      case joined: join(); break;
      case grouped: submit_group(); break;
      case count: break;
    }
  }

  void submit(int32_t rank, const Signature& signature) {
    const Ticket ticket = world.submit(rank, signature);
    if (rank == 0) asked[ticket] = signature;
  }

  void submit_everything() {
    for (int32_t rank : {0, 1, 2}) {
      for (const Signature& signature : {allreduce("a"), reducescatter("r"), alltoall("e", {rank, 1, 2}),
                                         allgather("g", {rank, 2}), broadcast("b", 1), sending("s", 0, 2)})
        if (signature.kind != Kind::send || rank != 1) submit(rank, signature);
    }
  }

  void replay() {
    submit_everything();
    world.round();
    submit_everything();
  }

  void open_set() {
    world.submit_all(add_set({0, 2}));
    world.round();
    for (int32_t rank : {0, 2}) {
      submit(rank, in_set(allreduce("a"), 1));
      submit(rank, in_set(allgather("g", {rank, 2}), 1));
    }
    for (int32_t rank : {0, 1, 2}) submit(rank, remove_set(1));
  }

  void join() {
    submit(0, allreduce("a"));
    for (int32_t rank : {1, 2}) world.submit(rank, allreduce("a"));
    world.round();
    has_joined = true;
    world.join(0);
    for (int32_t rank : {1, 2}) {
      for (const Signature& signature : {allreduce("a"), allgather("g", {rank, 2}), broadcast("b", 1)})
        submit(rank, signature);
    }
  }

  void submit_group() {
    for (int32_t rank : {0, 1, 2}) {
      submit(rank, in_group(allreduce("x"), 7, 2));
      submit(rank, in_group(allreduce("y"), 7, 2));
      submit(rank, barrier("z"));
    }
  }

  // Returns the next Decision of the real coordinator.
  Bytes truth() {
    for (int32_t rank : {0, 1, 2}) world.report(rank);
    Bytes bytes;
    CHECK(world.coordinator.decide(world.now, bytes));
    return bytes;
  }

  World world{3};
  Asked asked;
  bool has_joined = false;
};

void apply_decisions(Input input) {
  Slices slices(input);
  Scene scene(slices.byte());
  for (int32_t rank : {0, 1, 2}) scene.world.take_report(rank);
  Negotiator& negotiator = *scene.world.negotiators[0];
  while (!slices.at_end()) {
    Outcome outcome;
    const Status status = negotiator.apply(slices.message(), outcome);
    for (const Plan& plan : outcome.plans) {
      check_believed(plan, 0, scene.asked, scene.has_joined);
      negotiator.plan_finished(plan.process_set);
    }
    for (const Refusal& refusal : outcome.refusals) CHECK(scene.asked.contains(refusal.ticket) || scene.has_joined);
    for (const ProcessSetChange& change : outcome.process_sets)
      for (int32_t rank : change.members) CHECK(rank >= 0 && rank < 3);
    if (!status.is_ok()) {
      CHECK_EQUAL(status.code(), SRT_PROTOCOL);
      return;
    }
    scene.world.take_report(0);
  }
}

std::vector<Bytes> negotiator_seeds() {
  std::vector<Bytes> all;
  for (uint8_t number = 0; number < Scene::count; ++number) {
    Bytes& seed = all.emplace_back(Bytes{number});
    put_message(seed, Scene(number).truth());
  }
  return all;
}

}  // namespace

const Target negotiator{"negotiator", apply_decisions, negotiator_seeds};

}  // namespace sirtaki::fuzz
