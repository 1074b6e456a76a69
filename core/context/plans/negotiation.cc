#include "context/plans/negotiation.h"

#include <algorithm>

#include "base/blame.h"
#include "base/log.h"

namespace sirtaki {
namespace {

constexpr size_t longest_reason = 4'000;

CoordinatorRules coordinator_rules(const Config& config) {
  return {config.integer(Knob::fusion_threshold), static_cast<uint32_t>(config.integer(Knob::cache_capacity)),
          config.time(Knob::stall_report), config.time(Knob::stall_deadline),
          static_cast<int32_t>(config.integer(Knob::late_results))};
}

ReportRule report_rule(const Config& config) {
  return {config.integer(Knob::report_bytes), config.time(Knob::report_window),
          static_cast<int32_t>(config.integer(Knob::plans_in_flight)), config.integer(Knob::partition_bytes)};
}

std::vector<int32_t> leaders(const ControlTree& tree) {
  std::vector<int32_t> found;
  for (int32_t rank = 0; rank < tree.size(); ++rank) {
    const int32_t parent = tree.parent(rank);
    found.push_back(parent == coordinator_rank ? -1 : parent);
  }
  return found;
}

void encode_abort(const AbortNotice& notice, Bytes& out) {
  Writer writer(out);
  writer.put(static_cast<int32_t>(notice.status.code()));
  writer.put(notice.origin);
  writer.put(notice.decision);
  writer.put_text(std::string_view(notice.status.text()).substr(0, longest_reason));
}

std::optional<AbortNotice> decode_abort(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  const auto code = reader.get<int32_t>();
  const auto origin = reader.get<int32_t>();
  const auto decision = reader.get<uint64_t>();
  const std::string text = printable(reader.get_text(longest_reason), longest_reason);
  if (!reader.ok() || !StatusTable::is_fatal(code)) return std::nullopt;
  return AbortNotice{Status(code, text), origin, decision};
}

}  // namespace

Negotiation::Negotiation(NegotiationParts parts, const Config& config)
    : rank_(parts.rank), names_(parts.names), links_(parts.links), local_peers_(parts.local_peers),
      parent_rank_(parts.tree.parent(rank_)), subtree_(parts.tree.subtree(rank_)),
      first_link_count_(parts.links.all().size()), finished_(parts.names.size()), lost_(parts.names.size()) {
  const auto size = static_cast<int32_t>(names_.size());
  const auto cache_capacity = static_cast<uint32_t>(config.integer(Knob::cache_capacity));
  negotiator_ = std::make_unique<Negotiator>(rank_, size, report_rule(config), cache_capacity);
  if (rank_ == coordinator_rank)
    coordinator_ = std::make_unique<Coordinator>(names_, coordinator_rules(config), leaders(parts.tree));
  else parent_ = links_.control(parent_rank_);
  for (int32_t below : parts.tree.children(rank_))
    children_.push_back({below, links_.control(below), parts.tree.subtree_bits(below)});
  if (!coordinator_ && !children_.empty())
    relay_ = std::make_unique<Relay>(subtree_, size, RelayRule{}, cache_capacity);
}

Status Negotiation::advance(Nanoseconds now, NegotiationEvents& events) {
  links_.look();
  for (const Links::PeerLink& entry : links_.all()) {
    const Status status = take_frames(entry, now, events);
    if (!status.is_ok()) return {status.code(), status.text(), entry.peer};
  }
  SIRTAKI_TRY(report(now, events));
  relay(now, events);
  SIRTAKI_TRY(decide(now, events));
  send_out(now, events);
  return Status::ok();
}

Status Negotiation::take_frames(const Links::PeerLink& entry, Nanoseconds now, NegotiationEvents& events) {
  Link& link = *entry.link;
  if (entry.is_ring && !link.readable()) return Status::ok();
  for (;;) {
    const Frame* frame = nullptr;
    if (const Status status = link.front(frame); !status.is_ok()) return blame(names_, entry.peer, status);
    if (!frame) {
      // Only operations receive from a link that is polled: a rank without any leaves MPI alone.
      if (link.is_polled() || !link.receive()) break;
      continue;
    }
    if (frame->header.kind == FrameKind::data) break;  // for an operation that is running or will run
    SIRTAKI_TRY(take_frame(entry, *frame, now, events));
    link.pop();
    events.moved = true;
  }
  const auto index = static_cast<size_t>(entry.peer);
  if (!link.is_ended() || lost_[index]) return Status::ok();
  const bool is_polite = has_finished(entry.peer) || (finished_[index] && !link.is_polled());
  if (!is_polite) {
    lost_[index] = true;
    events.lost.push_back({entry.peer, link.trouble()});
  }
  return Status::ok();
}

Status Negotiation::take_frame(const Links::PeerLink& entry, const Frame& frame, Nanoseconds now,
                               NegotiationEvents& events) {
  const int32_t peer = entry.peer;
  if (entry.link->is_polled()) return {SRT_PROTOCOL, format("rank %d sent a frame over MPI that is no data", peer)};
  const bool is_parent = entry.link.get() == parent_;
  switch (frame.header.kind) {
    case FrameKind::report:
    case FrameKind::aggregate:
      if (child(peer)) return take_report(peer, frame, now);
      break;
    case FrameKind::decision:
      if (is_parent) return take_decision(frame.body, now, events);
      break;
    case FrameKind::abort:
      if (auto notice = decode_abort(frame.body)) {
        if (!events.abort) events.abort = std::move(notice);
        return Status::ok();
      }
      break;
    case FrameKind::goodbye: return take_goodbye(entry, frame, events);
    case FrameKind::cut_off:
      if (!is_parent || frame.body.size() != sizeof(int32_t)) break;
      events.finished_above = Reader(frame.body).get<int32_t>();
      if (events.finished_above < 0 || static_cast<size_t>(events.finished_above) >= names_.size()) break;
      send_to_children(FrameKind::cut_off, frame.body);
      return Status::ok();
    case FrameKind::data: break;
  }
  return {SRT_PROTOCOL,
          format("rank %d sent a frame of kind %d that it may not send", peer, static_cast<int>(frame.header.kind))};
}

// Merges a child's report. Apart from the coordinator, exactly the ranks that have children have a relay.
Status Negotiation::take_report(int32_t peer, const Frame& frame, Nanoseconds now) {
  const Child& from = *child(peer);
  const bool is_aggregate = frame.header.kind == FrameKind::aggregate;
  if (coordinator_)
    return is_aggregate ? coordinator_->merge_aggregate(peer, from.subtree, frame.body, now)
                        : coordinator_->merge(peer, frame.body, now);
  const Status status =
      is_aggregate ? relay_->merge_aggregate(from.subtree, frame.body, now) : relay_->merge(peer, frame.body, now);
  if (status.is_ok()) return status;
  return blame(names_, peer, status);
}

// Applies a Decision. It is forwarded first, because the ranks of the subtree wait for it, too.
Status Negotiation::take_decision(std::span<const uint8_t> decision, Nanoseconds now, NegotiationEvents& events) {
  heard_ = now;
  events.has_decided = true;
  if (relay_) {
    send_to_children(FrameKind::decision, decision);
    send_out(now, events);
    SIRTAKI_TRY(relay_->forward(decision));
  }
  return negotiator_->apply(decision, events.outcome);
}

// Handles a goodbye. It counts on the link whose last frame it is: that of the peer's data for operations, which may be
// on its way, that to the parent for Decisions. If MPI moves the data, it says how many frames MPI has moved.
Status Negotiation::take_goodbye(const Links::PeerLink& entry, const Frame& frame, NegotiationEvents& events) {
  if (links_.is_over_mpi(entry.peer)) {
    Reader reader(frame.body);
    links_.note_last_frame(entry.peer, reader.get<uint64_t>());
    if (!reader.ok())
      return {SRT_PROTOCOL, format("rank %d said goodbye without the number of its frames", entry.peer)};
  }
  if (!entry.is_ring || !(links_.data(entry.peer) || links_.awaits(entry.peer)))
    finished_[static_cast<size_t>(entry.peer)] = true;
  if (entry.link.get() != parent_) return Status::ok();
  events.finished_above = entry.peer;
  scratch_.clear();
  Writer(scratch_).put(entry.peer);
  send_to_children(FrameKind::cut_off, scratch_);
  return Status::ok();
}

void Negotiation::send_to_children(FrameKind kind, std::span<const uint8_t> body) {
  for (const Child& below : children_) below.link->send({.kind = kind}, body);
}

const Negotiation::Child* Negotiation::child(int32_t rank) const {
  const auto found = std::lower_bound(children_.begin(), children_.end(), rank,
                                      [](const Child& below, int32_t wanted) { return below.rank < wanted; });
  return found != children_.end() && found->rank == rank ? &*found : nullptr;
}

// Reports what is due. A question that crosses this rank's goodbye remains unanswered.
Status Negotiation::report(Nanoseconds now, NegotiationEvents& events) {
  if (has_left_ || negotiator_->report_due() > now) return Status::ok();
  scratch_.clear();
  negotiator_->report(now, scratch_);
  events.moved = events.has_reported = true;
  if (coordinator_) return coordinator_->merge(rank_, scratch_, now);
  reported_ = now;
  if (relay_) return relay_->merge(rank_, scratch_, now);
  parent_->send({.kind = FrameKind::report}, scratch_);
  return Status::ok();
}

// Reports for the ranks of the subtree.
void Negotiation::relay(Nanoseconds now, NegotiationEvents& events) {
  if (!relay_ || relay_->report_due() > now) return;
  scratch_.clear();
  relay_->report(now, scratch_);
  parent_->send({.kind = FrameKind::aggregate}, scratch_);
  events.moved = true;
}

Status Negotiation::decide(Nanoseconds now, NegotiationEvents& events) {
  if (!coordinator_) return Status::ok();
  scratch_.clear();
  if (!coordinator_->decide(now, scratch_)) return Status::ok();
  send_to_children(FrameKind::decision, scratch_);
  send_out(now, events);
  events.moved = events.has_decided = true;
  heard_ = now;
  return negotiator_->apply(scratch_, events.outcome);
}

void Negotiation::send_out(Nanoseconds now, NegotiationEvents& events) {
  for (const Links::PeerLink& entry : links_.all()) {
    if (!entry.link->unsent() || !entry.link->flush()) continue;
    events.moved = true;
    if (entry.is_ring) local_peers_->frames_sent(local_peers_->slot_of(entry.peer), now);
  }
}

void Negotiation::flush_links(Nanoseconds now) {
  NegotiationEvents unused;
  send_out(now, unused);
}

bool Negotiation::has_finished(int32_t rank) const {
  if (finished_[static_cast<size_t>(rank)]) return links_.has_all_frames(rank);
  if (links_.data(rank) || links_.awaits(rank)) return false;  // its last bytes may be on their way
  const int slot = local_peers_ ? local_peers_->slot_of(rank) : -1;
  return slot >= 0 && local_peers_->has_finished(slot);
}

bool Negotiation::has_left(int32_t rank) const {
  return coordinator_ ? coordinator_->has_left(rank) : relay_ && relay_->has_left(rank);
}

Nanoseconds Negotiation::next_due() const {
  return std::min(negotiator_->report_due(), coordinator_ ? coordinator_->next_deadline() : relay_due());
}

// Sends this rank's goodbye into the negotiation. This rank has written the bytes itself, so merging them succeeds.
void Negotiation::leave(Nanoseconds now) {
  if (std::exchange(has_left_, true)) return;
  scratch_.clear();
  negotiator_->goodbye(scratch_);
  if (coordinator_) std::ignore = coordinator_->merge(rank_, scratch_, now);
  else if (relay_) std::ignore = relay_->merge(rank_, scratch_, now);
  else parent_->send({.kind = FrameKind::report}, scratch_);
}

void Negotiation::say_goodbye(Nanoseconds now) {
  leave(now);
  if (relay_) {
    relay_->release_all();
    NegotiationEvents unused;
    relay(now, unused);
  }
  for (const Links::PeerLink& entry : links_.all()) {
    if (entry.link->is_polled()) continue;
    scratch_.clear();
    if (links_.is_over_mpi(entry.peer)) Writer(scratch_).put(links_.frames_over_mpi(entry.peer));
    entry.link->send({.kind = FrameKind::goodbye}, scratch_);
  }
  flush_links(now);
}

void Negotiation::send_abort(const AbortNotice& notice, Nanoseconds now) {
  send_abort_over(links_.all().size(), notice, now);
}

void Negotiation::pass_on(const AbortNotice& notice, Nanoseconds now) {
  send_abort_over(first_link_count_, notice, now);
}

void Negotiation::send_abort_over(size_t links, const AbortNotice& notice, Nanoseconds now) {
  scratch_.clear();
  encode_abort(notice, scratch_);
  for (size_t i = 0; i < links; ++i)
    if (Link& link = *links_.all()[i].link; !link.is_polled()) link.send({.kind = FrameKind::abort}, scratch_);
  flush_links(now);
}

}  // namespace sirtaki
