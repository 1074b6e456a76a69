// A host and its leader, in one thread.
#pragma once

#include "control/messages/aggregate.h"
#include "control/relay/relay.h"
#include "control_world.h"

namespace sirtaki {

// A world in which rank 0 coordinates and rank 1 leads ranks 1 to 3.
struct Host : World {
  explicit Host(CoordinatorRules rules = {}) : World(4, rules), subtree(4) {
    for (int32_t rank : {1, 2, 3}) subtree.add(rank);
  }

  void below(int32_t rank) { CHECK_EQUAL(std::string(relay.merge(rank, take_report(rank), now).text()), ""); }

  // Sends the relay's aggregate to the coordinator if it is due; returns whether it was.
  bool goes_up() {
    if (relay.report_due() > now) return false;
    sent.clear();
    relay.report(now, sent);
    CHECK(decode(sent, subtree, now, aggregate));
    CHECK_EQUAL(std::string(coordinator.merge_aggregate(1, subtree, sent, now).text()), "");
    return true;
  }

  // Makes one Decision, and passes it through the relay to every rank.
  bool decide() {
    Bytes bytes;
    for (Outcome& one : outcomes) one = {};
    if (!coordinator.decide(now, bytes)) return false;
    CHECK(decode(bytes, last_decision));
    CHECK_EQUAL(std::string(relay.forward(bytes).text()), "");
    for (int32_t rank = 0; rank < size(); ++rank) apply(rank, bytes);
    return true;
  }

  bool round(const Signature& signature) {
    submit_all(signature);
    report(0);
    for (int32_t rank : {3, 1, 2}) below(rank);
    return goes_up() && decide();
  }

  Relay relay{{1, 2, 3}, 4, {milliseconds(10)}, 64};
  RankBits subtree;
  Bytes sent;
  Aggregate aggregate;
};

// Returns an aggregate that contains every kind of entry.
inline Bytes rich_aggregate(Host& host) {
  host.round(allreduce("a"));
  host.round(allreduce("b"));
  for (int32_t rank : {1, 2, 3}) {
    host.submit(rank, allreduce("a"));
    host.submit(rank, allreduce("b"), rank == 2);
    host.submit(rank, allgather("g", {rank, 2}));
    host.submit(rank, alltoall("t", {rank, 0, 1, rank}));
    host.submit(rank, allreduce("new"));
    if (rank == 3) host.join(rank);
    host.below(rank);
    host.now += microseconds(100);
  }
  Bytes bytes;
  host.relay.report(host.now, bytes);
  return bytes;
}

}  // namespace sirtaki
