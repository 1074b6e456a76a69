// The coordinator's side of the negotiation: it merges the ranks' reports, validates and fuses the operations that
// all ranks have requested, and numbers the plans of all process sets in one order. Free of I/O, threads and clocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "base/settings/live_settings.h"
#include "base/status.h"
#include "control/messages/rank_bits.h"
#include "plan/request.h"

namespace sirtaki {

struct CoordinatorRules {
  int64_t fusion_threshold = 64 << 20;        // bytes of one plan; 0: no fusion
  uint32_t cache_capacity = 8'192;            // names in the response cache; 0: no cache
  Nanoseconds stall_report = seconds(5);      // first report; further ones at doubling times
  Nanoseconds stall_deadline = seconds(1'800);  // Outcome.fatal after it; 0: never
  int32_t late_results = 8;                   // rounds in a row that may be decided without a rank
};

class Coordinator {
 public:
  // Creates a coordinator. `rank_names`: the names of ranks in messages: "rank 2 (pid 71 on hostB)". `leaders`: by
  // rank, the rank that reports for it; -1, or an empty list: each rank reports for itself.
  Coordinator(std::vector<std::string> rank_names, CoordinatorRules rules, std::vector<int32_t> leaders = {});
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Returns whether a rank has said goodbye.
  bool has_left(int32_t rank) const;

  // Merges one rank's Report; SRT_PROTOCOL if it is invalid.
  Status merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now);

  // Merges a leader's aggregate as if each rank of its subtree had reported; SRT_PROTOCOL if it is invalid, or
  // concerns ranks outside the subtree.
  Status merge_aggregate(int32_t leader, const RankBits& subtree, std::span<const uint8_t> aggregate, Nanoseconds now);

  // Changes the live settings: the coordinator's own at once, those of all ranks with its next Decision.
  void change_settings(LiveValues values);

  // Appends a Decision if there is anything to send; otherwise returns false and appends nothing.
  bool decide(Nanoseconds now, Bytes& out);

  // Returns when decide() has something to send even if no report arrives: at the next stall report or deadline;
  // `never` if there is none.
  Nanoseconds next_deadline() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
