#include "control/messages/messages.h"

#include "control/messages/fields.h"

namespace sirtaki {
namespace {

void fields(auto& archive, MessageOf<Report> auto& report) {
  archive.number(report.last_decision);
  archive.list(report.present);
  archive.list(report.absent);
  archive.each(report.full_requests, [&](auto& request) {
    archive.shared(request.signature, [&](auto& signature) { fields(archive, signature); });
    archive.number(request.absent);
  });
  using Notices =
      std::conditional_t<std::is_const_v<std::remove_reference_t<decltype(report)>>, const RankNotices, RankNotices>;
  fields(archive, static_cast<Notices&>(report));
}

void fields(auto& archive, MessageOf<Stall> auto& stall) {
  archive.number(stall.is_over);
  archive.number(stall.process_set);
  archive.each(stall.names, [&](auto& name) { archive.name(name); });
  archive.number(stall.more_names);
  archive.list(stall.missing);
  archive.list(stall.waiting);
  archive.number(stall.seconds);
  archive.each(stall.rank_reports, [&](auto& report) { fields(archive, report); });
}

void agreements(auto& archive, MessageOf<Decision> auto& decision) {
  archive.each(decision.plans, [&](auto& plan) {
    archive.number(plan.process_set);
    archive.number(plan.contributors);
    bool untouched = plan.untouched, has_absentees = !plan.absentees.empty();
    archive.flags(untouched, has_absentees);
    if constexpr (!std::is_const_v<std::remove_reference_t<decltype(plan)>>) {
      plan.untouched = untouched;
      plan.absentees.clear();
    }
    archive.list(plan.items);
    if (has_absentees) archive.list(plan.absentees);
  });
  archive.each(decision.responses, [&](auto& response) {
    archive.shared(response.signature, [&](auto& signature) { fields(archive, signature); });
    archive.list(response.rows);
    archive.number(response.id);
  });
}

void endings(auto& archive, MessageOf<Decision> auto& decision) {
  archive.each(decision.refusals, [&](auto& refusal) {
    archive.number(refusal.process_set);
    archive.enumeration(refusal.kind, last_requested_kind);
    archive.name(refusal.name);
    archive.list(refusal.ranks);
    archive.number(refusal.code);
    archive.check(StatusTable::entry(refusal.code) != nullptr);
    archive.printable_text(refusal.text, longest_text);
  });
  archive.each(decision.joins, [&](auto& join) {
    archive.number(join.process_set);
    archive.number(join.last_rank);
  });
  archive.each(decision.set_changes, [&](auto& change) {
    archive.number(change.process_set);
    archive.name(change.name);
    archive.list(change.members);
  });
}

void fields(auto& archive, MessageOf<Decision> auto& decision) {
  archive.number(decision.number);
  archive.list(decision.settings);
  archive.number(decision.first_plan);
  agreements(archive, decision);
  archive.list(decision.retired);
  endings(archive, decision);
  archive.list(decision.asked);
  archive.each(decision.stalls, [&](auto& stall) { fields(archive, stall); });
  archive.each(decision.lateness, [&](auto& late) {
    archive.number(late.rank);
    archive.number(late.lateness.times);
    archive.number(late.lateness.total);
    archive.number(late.lateness.longest);
  });
  archive.number(decision.fatal);
  archive.check(StatusTable::entry(decision.fatal) != nullptr);
  archive.printable_text(decision.fatal_text, longest_text);
  archive.number(decision.culprit);
}

template <typename Message>
void append(const Message& message, Bytes& out) {
  Encoder encoder(out);
  fields(encoder, message);
}

template <typename Message>
bool read(std::span<const uint8_t> bytes, Message& message) {
  Decoder decoder(bytes);
  fields(decoder, message);
  return decoder.is_done();
}

template <typename Message>
void erase(Message& message) {
  Eraser eraser;
  fields(eraser, message);
}

}  // namespace

void RankNotices::append(RankNotices later) {
  goodbye |= later.goodbye;
  lapsed += later.lapsed;
  joined.insert(joined.end(), later.joined.begin(), later.joined.end());
  if (later.wait_report) wait_report = std::move(later.wait_report);
}

bool Decision::says_nothing() const {
  return plans.empty() && refusals.empty() && retired.empty() && joins.empty() && set_changes.empty() &&
         asked.empty() && stalls.empty() && fatal == SRT_OK;
}

void Report::clear() { erase(*this); }
void Decision::clear() { erase(*this); }

void encode(const Report& report, Bytes& out) { append(report, out); }
void encode(const Decision& decision, Bytes& out) { append(decision, out); }
bool decode(std::span<const uint8_t> bytes, Report& report) { return read(bytes, report); }
bool decode(std::span<const uint8_t> bytes, Decision& decision) { return read(bytes, decision); }

Status nonsense_report(const std::string& what) { return {SRT_PROTOCOL, "its report makes no sense here: " + what}; }
Status nonsense_decision(const std::string& what) {
  return {SRT_PROTOCOL, "the coordinator's decision makes no sense here: " + what};
}

}  // namespace sirtaki
