// The coordinator's side of the negotiation: it merges the ranks' reports, validates and fuses what is ready
// everywhere, and numbers the plans of all process sets in one order. Free of I/O, threads and clocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "base/status.h"
#include "control/rank_bits.h"
#include "plan/request.h"

namespace sirtaki {

struct CoordinatorRules {
  int64_t fusion_threshold = 64 << 20;        // bytes of one plan; 0: no fusion
  uint32_t cache_capacity = 8'192;            // response cache, names; 0: no cache
  Nanoseconds stall_report = seconds(5);      // then doubling
  Nanoseconds stall_deadline = seconds(1'800);  // Outcome.fatal after it; 0: never
};

class Coordinator {
 public:
  // rank_names are how messages name each rank: "rank 2 (pid 71 on hostB)". leaders: by rank, who reports for it; -1,
  // or none at all: it does so itself.
  Coordinator(std::vector<std::string> rank_names, CoordinatorRules rules, std::vector<int32_t> leaders = {});
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Takes one rank's Report in; SRT_PROTOCOL when its bytes make no sense.
  Status merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now);

  // Takes in what a leader reports for the ranks of its subtree, as if each of them had reported; SRT_PROTOCOL when it
  // makes no sense, or speaks for others.
  Status merge_aggregate(int32_t leader, const RankBits& subtree, std::span<const uint8_t> aggregate, Nanoseconds now);

  // Appends a Decision if there is anything to say; false, and nothing appended, if not.
  bool decide(Nanoseconds now, Bytes& out);

  // When decide() has something to say though no report comes: the next stall report or deadline, else `never`.
  Nanoseconds next_deadline() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
