// Detection of machines that fall silent, as when a cable is pulled. Each connection is checked by itself, whether or
// not an operation is in flight.
#pragma once

#include <optional>

#include "context/plans/negotiation.h"
#include "transport/links/links.h"

namespace sirtaki {

class Heartbeat {
 public:
  // `limit`: the longest tolerated silence of a peer's machine; 0: no limit.
  Heartbeat(const Links& links, const RankNames& names, Nanoseconds limit)
      : links_(links), names_(names), limit_(limit) {}

  // Returns the interval at which an idle machine is probed; 0: never.
  static Nanoseconds interval(Nanoseconds limit) { return limit / 3; }

  // Checks once a second for a peer whose machine has been silent for too long, and probes one that has been for half
  // of that, at most 15 times: its probes may have been lost. The silence must show in two checks in a row: a
  // connection whose peer has no receive window is probed at growing intervals, and each probe is unanswered while it
  // is in transit.
  std::optional<AbortNotice> check(Nanoseconds now);

 private:
  const Links& links_;
  const RankNames& names_;
  Nanoseconds limit_, next_ = 0, next_probe_ = 0;
  std::vector<int32_t> suspects_;  // peers that were too silent at the last check
};

}  // namespace sirtaki
