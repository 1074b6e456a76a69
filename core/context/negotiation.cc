#include "context/negotiation.h"

#include "base/log.h"

namespace sirtaki {
namespace {

constexpr size_t longest_reason = 4'000;

CoordinatorRules coordinator_rules(const Config& config) {
  return {config.integer(Knob::fusion_threshold), static_cast<uint32_t>(config.integer(Knob::cache_capacity)),
          config.time(Knob::stall_report), config.time(Knob::stall_deadline)};
}

ReportRule report_rule(const Config& config) {
  return {config.integer(Knob::report_bytes), config.time(Knob::report_window),
          static_cast<int32_t>(config.integer(Knob::plans_in_flight))};
}

void encode_abort(const AbortNotice& notice, Bytes& out) {
  Writer writer(out);
  writer.put(static_cast<int32_t>(notice.status.code()));
  writer.put(notice.origin);
  writer.put_text(std::string_view(notice.status.text()).substr(0, longest_reason));
}

std::optional<AbortNotice> decode_abort(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  const auto code = reader.get<int32_t>();
  const auto origin = reader.get<int32_t>();
  const std::string text = printable(reader.get_text(longest_reason), longest_reason);
  if (!reader.ok() || !StatusTable::is_fatal(code)) return std::nullopt;
  return AbortNotice{Status(code, text), origin};
}

}  // namespace

Negotiation::Negotiation(int32_t rank, const RankNames& names, const Config& config, Links& links,
                         Neighbours* neighbours)
    : rank_(rank), links_(links), neighbours_(neighbours), finished_(names.size()), lost_(names.size()) {
  const auto size = static_cast<int32_t>(names.size());
  member_ = std::make_unique<Member>(rank, size, report_rule(config),
                                     static_cast<uint32_t>(config.integer(Knob::cache_capacity)));
  if (rank == coordinator_rank) coordinator_ = std::make_unique<Coordinator>(names, coordinator_rules(config));
}

Status Negotiation::pass(Nanoseconds now, News& news) {
  for (const Links::Entry& entry : links_.all()) SIRTAKI_TRY(take_frames(entry, now, news));
  SIRTAKI_TRY(report(now, news));
  SIRTAKI_TRY(decide(now, news));
  send_out(now, news);
  return Status::ok();
}

Status Negotiation::take_frames(const Links::Entry& entry, Nanoseconds now, News& news) {
  Link& link = *entry.link;
  if (entry.is_ring && !link.readable()) return Status::ok();
  for (;;) {
    const Frame* frame = nullptr;
    SIRTAKI_TRY(link.front(frame));
    if (!frame) {
      if (!link.receive()) break;
      continue;
    }
    if (frame->header.kind == FrameKind::data) break;  // for the operation that runs, or will
    SIRTAKI_TRY(take_frame(entry, *frame, now, news));
    link.pop();
    news.moved = true;
  }
  const auto index = static_cast<size_t>(entry.peer);
  if (link.is_ended() && !has_finished(entry.peer) && !lost_[index]) {
    lost_[index] = true;
    news.lost.push_back(entry.peer);
  }
  return Status::ok();
}

Status Negotiation::take_frame(const Links::Entry& entry, const Frame& frame, Nanoseconds now, News& news) {
  const int32_t peer = entry.peer;
  const bool is_coordinator = peer == coordinator_rank;
  switch (frame.header.kind) {
    case FrameKind::report:
      if (coordinator_) return coordinator_->merge(peer, frame.body, now);
      break;
    case FrameKind::decision:
      if (!is_coordinator) break;
      heard_ = now;
      news.has_decided = true;
      return member_->apply(frame.body, news.outcome);
    case FrameKind::abort:
      if (auto notice = decode_abort(frame.body)) {
        if (!news.abort) news.abort = std::move(notice);
        return Status::ok();
      }
      break;
    case FrameKind::goodbye:
      // Each counts on the link of what comes before it: its data, its Decisions.
      if (!entry.is_ring || !links_.data(peer)) finished_[static_cast<size_t>(peer)] = true;
      if (is_coordinator && entry.link.get() == links_.control(peer)) news.coordinator_finished = true;
      return Status::ok();
    case FrameKind::data: break;
  }
  return {SRT_PROTOCOL,
          format("rank %d sent a frame of kind %d that it may not send", peer, static_cast<int>(frame.header.kind))};
}

Status Negotiation::report(Nanoseconds now, News& news) {
  if (member_->report_due() > now) return Status::ok();
  scratch_.clear();
  member_->report(scratch_);
  news.moved = news.has_reported = true;
  if (coordinator_) return coordinator_->merge(rank_, scratch_, now);
  reported_ = now;
  links_.control(coordinator_rank)->send({.kind = FrameKind::report}, scratch_);
  return Status::ok();
}

Status Negotiation::decide(Nanoseconds now, News& news) {
  if (!coordinator_) return Status::ok();
  scratch_.clear();
  if (!coordinator_->decide(now, scratch_)) return Status::ok();
  for (const Links::Entry& entry : links_.all())
    if (entry.link.get() == links_.control(entry.peer)) entry.link->send({.kind = FrameKind::decision}, scratch_);
  news.moved = news.has_decided = true;
  heard_ = now;
  return member_->apply(scratch_, news.outcome);
}

void Negotiation::send_out(Nanoseconds now, News& news) {
  for (const Links::Entry& entry : links_.all()) {
    if (!entry.link->unsent() || !entry.link->flush()) continue;
    news.moved = true;
    if (entry.is_ring) neighbours_->frames_sent(neighbours_->slot_of(entry.peer), now);
  }
}

void Negotiation::flush_links(Nanoseconds now) {
  News unused;
  send_out(now, unused);
}

bool Negotiation::has_finished(int32_t rank) const {
  if (finished_[static_cast<size_t>(rank)] || links_.data(rank)) return finished_[static_cast<size_t>(rank)];
  const int slot = neighbours_ ? neighbours_->slot_of(rank) : -1;
  return slot >= 0 && neighbours_->has_finished(slot);
}

Nanoseconds Negotiation::next_due() const {
  return coordinator_ ? std::min(member_->report_due(), coordinator_->next_deadline()) : member_->report_due();
}

void Negotiation::leave(Nanoseconds now) {
  scratch_.clear();
  member_->goodbye(scratch_);
  std::ignore = coordinator_->merge(rank_, scratch_, now);  // bytes of our own making
}

void Negotiation::say_goodbye(Nanoseconds now) {
  scratch_.clear();
  member_->goodbye(scratch_);
  if (!coordinator_) links_.control(coordinator_rank)->send({.kind = FrameKind::report}, scratch_);
  for (const Links::Entry& entry : links_.all()) entry.link->send({.kind = FrameKind::goodbye}, {});
  flush_links(now);
}

void Negotiation::send_abort(const AbortNotice& notice, Nanoseconds now) {
  scratch_.clear();
  encode_abort(notice, scratch_);
  for (const Links::Entry& entry : links_.all()) entry.link->send({.kind = FrameKind::abort}, scratch_);
  flush_links(now);
}

}  // namespace sirtaki
