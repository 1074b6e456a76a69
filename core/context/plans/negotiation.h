// The connection between the state machines of the negotiation and the links: reports go up to the coordinator,
// through leaders if the ranks are on several hosts, and Decisions come down.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/settings/knobs.h"
#include "control/coordinator/coordinator.h"
#include "control/rank/negotiator.h"
#include "control/relay/relay.h"
#include "control/relay/tree.h"
#include "data/links/link_operation.h"
#include "transport/links/links.h"
#include "transport/memory/local_peers.h"

namespace sirtaki {

constexpr int32_t coordinator_rank = 0;

// The reason why the job was given up, as sent by the first rank that noticed to all others.
struct AbortNotice {
  Status status;
  int32_t origin = 0;  // the rank that caused it: it failed, was lost or is late
  uint64_t decision = 0;  // the abort takes effect after this Decision, whose refusals may be its cause
};

struct LostPeer {
  int32_t rank;
  std::string because;  // empty: its link ended
};

// The results of one call of advance().
struct NegotiationEvents {
  Outcome outcome;
  std::optional<AbortNotice> abort;
  std::vector<LostPeer> lost;  // whose link ended without a goodbye
  int32_t finished_above = -1;  // the coordinator, or a rank on the path to it, that has left; -1: none
  bool has_reported = false;  // Negotiator::reported() has the details
  bool has_decided = false;  // a Decision was applied
  bool moved = false;

  void clear() {
    outcome.clear();
    abort.reset();
    lost.clear();
    finished_above = -1;
    has_reported = has_decided = moved = false;
  }
};

struct NegotiationParts {
  int32_t rank;
  const RankNames& names;
  ControlTree tree;
  Links& links;
  LocalPeers* local_peers;  // nullptr without shared memory
};

class Negotiation {
 public:
  Negotiation(NegotiationParts parts, const Config& config);

  Negotiator& negotiator() { return *negotiator_; }
  const Negotiator& negotiator() const { return *negotiator_; }

  // Changes the live settings of all ranks; on the coordinator's rank only.
  void change_settings(LiveValues values) { coordinator_->change_settings(std::move(values)); }

  // Receives frames, makes and applies reports and Decisions, sends frames. Never blocks.
  Status advance(Nanoseconds now, NegotiationEvents& events);

  // Returns when advance() must be called even if nothing arrives; relay_due(): because of reports held for other
  // ranks.
  Nanoseconds next_due() const;
  Nanoseconds relay_due() const { return relay_ ? relay_->report_due() : never; }

  void flush_links(Nanoseconds now);
  bool has_finished(int32_t rank) const;  // whether it has said goodbye to this rank
  bool has_left(int32_t rank) const;  // whether a rank of the subtree takes part in no further negotiation
  void say_goodbye(Nanoseconds now);

  // Returns the rank that this one reports to; -1: it is the coordinator.
  int32_t parent() const { return parent_rank_; }

  // Returns the ranks that receive Decisions through this one, itself among them.
  const std::vector<int32_t>& subtree() const { return subtree_; }

  // Ends this rank's part in operations; it continues to serve the ranks of its subtree.
  void leave(Nanoseconds now);
  // Sends an abort to all linked peers; passes on another rank's, over the links that there were at the start.
  void send_abort(const AbortNotice& notice, Nanoseconds now);
  void pass_on(const AbortNotice& notice, Nanoseconds now);
  Nanoseconds heard_from_coordinator() const { return heard_; }
  Nanoseconds reported() const { return reported_; }

 private:
  // A rank that reports to this one.
  struct Child {
    int32_t rank;
    Link* link;
    RankBits subtree;
  };

  Status take_frames(const Links::PeerLink& entry, Nanoseconds now, NegotiationEvents& events);
  Status take_frame(const Links::PeerLink& entry, const Frame& frame, Nanoseconds now, NegotiationEvents& events);
  Status take_report(int32_t peer, const Frame& frame, Nanoseconds now);
  Status take_decision(std::span<const uint8_t> decision, Nanoseconds now, NegotiationEvents& events);
  Status take_goodbye(const Links::PeerLink& entry, const Frame& frame, NegotiationEvents& events);
  Status report(Nanoseconds now, NegotiationEvents& events);
  void relay(Nanoseconds now, NegotiationEvents& events);
  Status decide(Nanoseconds now, NegotiationEvents& events);
  void send_abort_over(size_t links, const AbortNotice& notice, Nanoseconds now);
  void send_to_children(FrameKind kind, std::span<const uint8_t> body);
  const Child* child(int32_t rank) const;
  void send_out(Nanoseconds now, NegotiationEvents& events);

  int32_t rank_;
  const RankNames& names_;
  Links& links_;
  LocalPeers* local_peers_;
  Link* parent_ = nullptr;  // nullptr: this is the coordinator
  int32_t parent_rank_;
  std::vector<Child> children_;  // by rank
  std::vector<int32_t> subtree_;
  size_t first_link_count_;  // those that there were at the start come first
  std::unique_ptr<Negotiator> negotiator_;
  std::unique_ptr<Coordinator> coordinator_;  // on the coordinator's rank only
  std::unique_ptr<Relay> relay_;  // on other ranks with children
  std::vector<bool> finished_, lost_;  // by rank
  bool has_left_ = false;
  Bytes scratch_;
  Nanoseconds heard_ = 0, reported_ = 0;
};

}  // namespace sirtaki
