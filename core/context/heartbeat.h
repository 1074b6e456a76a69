// Machines that fall silent without a word, as when a cable is pulled: noticed on each connection by itself, whether
// anything is under way or not.
#pragma once

#include <optional>

#include "context/negotiation.h"
#include "transport/links.h"

namespace sirtaki {

class Heartbeat {
 public:
  // A peer's machine may be silent for so long; 0: for ever.
  Heartbeat(const Links& links, const RankNames& names, Nanoseconds limit)
      : links_(links), names_(names), limit_(limit) {}

  // How often an idle machine is asked for a sign of life; 0: never.
  static Nanoseconds interval(Nanoseconds limit) { return limit / 3; }

  // Whose machine has been silent for too long, looked for once a second. It has to be so twice in a row: a connection
  // without room is probed at growing distances, and each time an answer is owed for as long as it travels.
  std::optional<AbortNotice> check(Nanoseconds now);

 private:
  const Links& links_;
  const RankNames& names_;
  Nanoseconds limit_, next_ = 0;
  std::vector<int32_t> suspects_;  // who were too silent at the last look
};

}  // namespace sirtaki
