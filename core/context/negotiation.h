// Ties the negotiation's state machines to the links: reports go up to the coordinator, Decisions come down.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/knobs.h"
#include "control/coordinator.h"
#include "control/member.h"
#include "data/link_operation.h"
#include "transport/links.h"
#include "transport/neighbours.h"

namespace sirtaki {

constexpr int32_t coordinator_rank = 0;

// Why the job was given up, as it travels from the first rank that failed to all others.
struct AbortNotice {
  Status status;
  int32_t origin = 0;
};

// What one pass brought.
struct News {
  Outcome outcome;
  std::optional<AbortNotice> abort;
  std::vector<int32_t> lost;       // ranks whose link ended without a goodbye
  bool coordinator_finished = false;
  bool has_reported = false;       // the member says of what
  bool has_decided = false;        // a Decision was applied
  bool moved = false;
};

class Negotiation {
 public:
  Negotiation(int32_t rank, const RankNames& names, const Config& config, Links& links, Neighbours* neighbours);

  Member& member() { return *member_; }

  // Frames in, reports and Decisions made and applied, frames out. Never blocks.
  Status pass(Nanoseconds now, News& news);

  // When pass() has to be called though nothing arrives.
  Nanoseconds next_due() const;

  void flush_links(Nanoseconds now);
  bool has_finished(int32_t rank) const;       // it has said goodbye
  void say_goodbye(Nanoseconds now);

  // On the coordinator's rank: takes part in nothing any more, but goes on deciding.
  void leave(Nanoseconds now);
  void send_abort(const AbortNotice& notice, Nanoseconds now);
  Nanoseconds heard_from_coordinator() const { return heard_; }
  Nanoseconds reported() const { return reported_; }

 private:
  Status take_frames(const Links::Entry& entry, Nanoseconds now, News& news);
  Status take_frame(const Links::Entry& entry, const Frame& frame, Nanoseconds now, News& news);
  Status report(Nanoseconds now, News& news);
  Status decide(Nanoseconds now, News& news);
  void send_out(Nanoseconds now, News& news);

  int32_t rank_;
  Links& links_;
  Neighbours* neighbours_;  // nullptr without shared memory
  std::unique_ptr<Member> member_;
  std::unique_ptr<Coordinator> coordinator_;  // on the coordinator's rank only
  std::vector<bool> finished_, lost_;         // by rank
  Bytes scratch_;
  Nanoseconds heard_ = 0, reported_ = 0;
};

}  // namespace sirtaki
