// The relay of a leader: it merges the reports of its subtree into one aggregate for its own parent, so that a step
// in which all ranks do the same is reported once. Free of I/O, threads and clocks, like Negotiator and Coordinator.
//
// A request is held until every participating rank of the subtree has made it. It is forwarded earlier in three
// cases: when a rank sends a notice that must not overtake it (a join, a goodbye, an answer for a stall report);
// after a short wait, so that the coordinator can see which ranks delay which; and when a Decision concerns it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "base/status.h"
#include "control/messages/rank_bits.h"

namespace sirtaki {

struct RelayRule {
  Nanoseconds hold = milliseconds(10);  // maximum wait for late ranks: far less than any stall_report
};

class Relay {
 public:
  // Creates a relay. `subtree`: the ranks for which it reports, ascending, including its own.
  Relay(const std::vector<int32_t>& subtree, int32_t world_size, RelayRule rule, uint32_t cache_capacity);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Merges the Report of one rank, or the aggregate of another relay; SRT_PROTOCOL if it is invalid.
  Status merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now);
  Status merge_aggregate(const RankBits& subtree, std::span<const uint8_t> aggregate, Nanoseconds now);

  // Returns whether a rank of the subtree has said goodbye.
  bool has_left(int32_t rank) const;

  // Applies a Decision on its way down: its changes of process sets and of the response cache.
  Status forward(std::span<const uint8_t> decision);

  // Returns when to call report(): `never` if there is nothing to report; a time in the past if a report is due.
  Nanoseconds report_due() const;

  // Appends one aggregate with everything that need not be held any longer.
  void report(Nanoseconds now, Bytes& out);

  // Stops relaying, because this rank leaves; nothing is held from now on. Descendants that would continue in their own
  // process sets are reported as leaving too: no news can reach them, and peers would otherwise wait indefinitely.
  void release_all();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
