// A leader receives arbitrary messages from below and from above: it rejects them, or sends its parent a valid
// aggregate.
#include "control/control_host.h"
#include "targets.h"

namespace sirtaki::fuzz {
namespace {

constexpr Nanoseconds moment = seconds(100);

RankBits ranks_1_to_3() {
  RankBits ranks(4);
  for (int32_t rank : {1, 2, 3}) ranks.add(rank);
  return ranks;
}

void go_round_aggregate(Input input) {
  Aggregate heard, copy;
  if (!decode(input, ranks_1_to_3(), moment, heard)) return;
  Bytes once, twice;
  encode(heard, moment, once);
  CHECK(decode(once, ranks_1_to_3(), moment, copy));
  encode(copy, moment, twice);
  CHECK(once == twice);
}

std::vector<Bytes> aggregates() {
  Host host;
  host.now = moment;
  return {rich_aggregate(host)};
}

// The first byte of a step of the input; a message, or for `wait` a byte, follows.
enum RelayStep : uint8_t { hear_rank, hear_leader, pass, wait, relay_steps };

// Feeds the input to rank 1, which leads ranks 1 to 3; ranks 2 and 3 may be a host with a leader of its own.
void relay_anything(Input input) {
  Relay relay({1, 2, 3}, 4, {milliseconds(10)}, 64);
  RankBits below(4);
  for (int32_t rank : {2, 3}) below.add(rank);
  Nanoseconds now = moment;
  Aggregate told;
  for (Slices slices(input); !slices.at_end();) {
    Status status;
    switch (static_cast<RelayStep>(slices.byte() % relay_steps)) {
      case hear_rank: status = relay.merge(1, slices.message(), now); break;
      case hear_leader: status = relay.merge_aggregate(below, slices.message(), now); break;
      case pass: status = relay.forward(slices.message()); break;
      case wait: now += milliseconds(slices.byte()); break;
      case relay_steps: break;
    }
    if (!status.is_ok()) {
      CHECK_EQUAL(status.code(), SRT_PROTOCOL);
      return;
    }
    if (relay.report_due() > now) continue;
    Bytes bytes;
    relay.report(now, bytes);
    CHECK(decode(bytes, ranks_1_to_3(), now, told));
  }
}

// Returns the seed of a host whose ranks submit the same request twice, the second time by number; then a set is added
// and removed.
std::vector<Bytes> hosts() {
  Bytes seed;
  World world(2);
  Relay leader({1}, 4, {0}, 64);
  const auto say = [&](RelayStep step, const Bytes& message) {
    seed.push_back(step);
    put_message(seed, message);
  };
  for (const Signature& signature : {allreduce("a"), allreduce("a"), allgather("g", {2, 3}), add_set({1}),
                                     in_set(allreduce("i"), 1), remove_set(1)}) {
    for (int32_t rank : {0, 1}) {
      if (rank == 0 && signature.process_set != world_set) continue;
      world.submit(rank, signature);
      const Bytes report = world.take_report(rank);
      world.deliver(rank, report);
      if (rank == 1) say(hear_rank, report);
    }
    Bytes decision;
    CHECK(world.coordinator.decide(world.now, decision));
    for (int32_t rank : {0, 1}) world.apply(rank, decision);
    say(pass, decision);
    seed.insert(seed.end(), {wait, 20});
  }
  Host host;
  host.now = moment;
  Bytes led;
  Relay below({2, 3}, 4, {0}, 64);
  for (int32_t rank : {2, 3}) {
    host.submit(rank, allreduce("a"));
    host.submit(rank, allgather("g", {rank, 2}));
    CHECK(below.merge(rank, host.take_report(rank), moment).is_ok());
  }
  Bytes aggregate;
  below.report(moment, aggregate);
  led.push_back(hear_leader);
  put_message(led, aggregate);
  led.insert(led.end(), {wait, 20});
  return {seed, led};
}

}  // namespace

const Target aggregate{"aggregate", go_round_aggregate, aggregates};
const Target relay{"relay", relay_anything, hosts};

}  // namespace sirtaki::fuzz
