// What a leader does for the ranks below it: it gathers their reports into one aggregate for its own parent, so that a
// step in which all ranks do the same is told upwards once. Free of I/O, threads and clocks, like Member and
// Coordinator.
//
// A request is held until every rank of the subtree that belongs to it has made it. It goes up earlier when a rank has
// something to say that must not overtake it (a join, a goodbye, where it is), when it has waited for a short while, so
// that the coordinator knows who keeps whom waiting, and when a Decision concerns it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "base/status.h"
#include "control/rank_bits.h"

namespace sirtaki {

struct RelayRule {
  Nanoseconds hold = milliseconds(10);  // at most, for ranks that are late: far less than any stall is told after
};

class Relay {
 public:
  // `subtree`: the ranks for which it speaks, ascending, its own among them.
  Relay(const std::vector<int32_t>& subtree, int32_t world_size, RelayRule rule, uint32_t cache_capacity);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Takes in the Report of one rank, or what another relay reports for its own subtree; SRT_PROTOCOL when that makes no
  // sense.
  Status merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now);
  Status merge_aggregate(const RankBits& subtree, std::span<const uint8_t> aggregate, Nanoseconds now);

  // A Decision passes on its way down: what it says of process sets and of the response cache is learned here.
  Status pass(std::span<const uint8_t> decision);

  // When to call report(): `never` if nothing is to be said, a time in the past if it is due.
  Nanoseconds report_due() const;

  // Appends one aggregate with everything that need not be held any longer.
  void report(Nanoseconds now, Bytes& out);

  // Stops relaying, because this rank leaves; nothing is held from now on. Descendants that would continue in their own
  // process sets are reported as leaving too: no news can reach them, and peers would otherwise wait indefinitely.
  void let_go();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
