#include "control/messages.h"

#include "control/wire.h"

namespace sirtaki {
namespace {

constexpr uint8_t has_goodbye = 1, has_wait_report = 2;  // flags of notices

srt_status get_status(Reader& reader) {
  const auto code = reader.get<srt_status>();
  if (!StatusTable::entry(code)) reader.fail();
  return code;
}

void put_stall(Writer& writer, const Stall& stall) {
  writer.put<uint8_t>(stall.is_over);
  writer.put(stall.process_set);
  put_each(writer, stall.names, [&](const std::string& name) { writer.put_text(name); });
  writer.put(stall.more_names);
  put_list(writer, stall.missing);
  put_list(writer, stall.waiting);
  writer.put(stall.seconds);
  put_each(writer, stall.rank_reports, [&](const StalledRankReport& one) { put_rank_report(writer, one); });
}

void get_stall(Reader& reader, Stall& stall) {
  stall.is_over = reader.get<uint8_t>() != 0;
  stall.process_set = reader.get<int32_t>();
  get_each(reader, stall.names, [&](std::string& name) { name = get_name(reader); });
  stall.more_names = reader.get<int32_t>();
  stall.missing = reader.get_all<int32_t>();
  stall.waiting = reader.get_all<int32_t>();
  stall.seconds = reader.get<int64_t>();
  get_each(reader, stall.rank_reports, [&](StalledRankReport& one) { get_rank_report(reader, one); });
}

void put_lateness(Writer& writer, const RankLateness& late) {
  writer.put(late.rank);
  writer.put(late.lateness.times);
  writer.put(late.lateness.total);
  writer.put(late.lateness.longest);
}

void get_lateness(Reader& reader, RankLateness& late) {
  late.rank = reader.get<int32_t>();
  late.lateness.times = reader.get<int64_t>();
  late.lateness.total = reader.get<Nanoseconds>();
  late.lateness.longest = reader.get<Nanoseconds>();
}

void put_agreements(Writer& writer, const Decision& decision) {
  put_each(writer, decision.plans, [&](const DecidedPlan& plan) {
    writer.put(plan.process_set);
    writer.put(plan.contributors);
    writer.put<uint8_t>(plan.untouched);
    put_list(writer, plan.items);
  });
  put_each(writer, decision.responses, [&](const Response& response) {
    put_signature(writer, *response.signature);
    put_list(writer, response.rows);
    writer.put(response.id);
  });
}

void get_agreements(Reader& reader, Decision& decision) {
  get_each(reader, decision.plans, [&](DecidedPlan& plan) {
    plan.process_set = reader.get<int32_t>();
    plan.contributors = reader.get<int32_t>();
    plan.untouched = reader.get<uint8_t>() != 0;
    plan.items = reader.get_all<PlanItem>();
  });
  get_each(reader, decision.responses, [&](Response& response) {
    response.signature = get_signature(reader);
    response.rows = reader.get_all<int64_t>();
    response.id = reader.get<CacheId>();
  });
}

void put_endings(Writer& writer, const Decision& decision) {
  put_each(writer, decision.refusals, [&](const DecidedRefusal& refusal) {
    writer.put(refusal.process_set);
    writer.put(refusal.kind);
    writer.put_text(refusal.name);
    put_list(writer, refusal.ranks);
    writer.put(refusal.code);
    writer.put_text(refusal.text);
  });
  put_each(writer, decision.joins, [&](const DecidedJoin& join) {
    writer.put(join.process_set);
    writer.put(join.last_rank);
  });
  put_each(writer, decision.set_changes, [&](const DecidedSetChange& change) {
    writer.put(change.process_set);
    writer.put_text(change.name);
    put_list(writer, change.members);
  });
}

void get_endings(Reader& reader, Decision& decision) {
  get_each(reader, decision.refusals, [&](DecidedRefusal& refusal) {
    refusal.process_set = reader.get<int32_t>();
    refusal.kind = reader.get_enum(last_requested_kind);
    refusal.name = get_name(reader);
    refusal.ranks = reader.get_all<int32_t>();
    refusal.code = get_status(reader);
    refusal.text = get_printable(reader, longest_text);
  });
  get_each(reader, decision.joins, [&](DecidedJoin& join) {
    join.process_set = reader.get<int32_t>();
    join.last_rank = reader.get<int32_t>();
  });
  get_each(reader, decision.set_changes, [&](DecidedSetChange& change) {
    change.process_set = reader.get<int32_t>();
    change.name = get_name(reader);
    change.members = reader.get_all<int32_t>();
  });
}

}  // namespace

void RankNotices::clear() {
  goodbye = false;
  lapsed = 0;
  joined.clear();
  wait_report.reset();
}

void RankNotices::append(RankNotices later) {
  goodbye |= later.goodbye;
  lapsed += later.lapsed;
  joined.insert(joined.end(), later.joined.begin(), later.joined.end());
  if (later.wait_report) wait_report = std::move(later.wait_report);
}

void Report::clear() {
  RankNotices::clear();
  last_decision = 0;
  present.clear();
  absent.clear();
  full_requests.clear();
}

void put_notices(Writer& writer, const RankNotices& notices) {
  writer.put<uint8_t>((notices.goodbye ? has_goodbye : 0) | (notices.wait_report ? has_wait_report : 0));
  writer.put(notices.lapsed);
  put_list(writer, notices.joined);
  if (notices.wait_report) put_rank_report(writer, *notices.wait_report);
}

void get_notices(Reader& reader, RankNotices& notices) {
  const auto flags = reader.get<uint8_t>();
  notices.goodbye = flags & has_goodbye;
  notices.lapsed = reader.get<uint32_t>();
  reader.get_all_into(notices.joined);
  notices.wait_report.reset();
  if (flags & has_wait_report) get_rank_report(reader, notices.wait_report.emplace());
}

void encode(const Report& report, Bytes& out) {
  Writer writer(out);
  writer.put(report.last_decision);
  put_list(writer, report.present);
  put_list(writer, report.absent);
  put_each(writer, report.full_requests, [&](const Report::FullRequest& request) {
    put_signature(writer, *request.signature);
    writer.put<uint8_t>(request.absent);
  });
  put_notices(writer, report);
}

bool decode(std::span<const uint8_t> bytes, Report& report) {
  Reader reader(bytes);
  report.clear();
  report.last_decision = reader.get<uint64_t>();
  reader.get_all_into(report.present);
  reader.get_all_into(report.absent);
  get_each(reader, report.full_requests, [&](Report::FullRequest& request) {
    request.signature = get_signature(reader);
    request.absent = reader.get<uint8_t>() != 0;
  });
  get_notices(reader, report);
  return reader.ok() && reader.at_end();
}

bool Decision::says_nothing() const {
  return plans.empty() && refusals.empty() && retired.empty() && joins.empty() && set_changes.empty() &&
         asked.empty() && stalls.empty() && fatal == SRT_OK;
}

void Decision::clear() {
  plans.clear();
  responses.clear();
  refusals.clear();
  retired.clear();
  joins.clear();
  set_changes.clear();
  asked.clear();
  stalls.clear();
  lateness.clear();
  fatal = SRT_OK;
  fatal_text.clear();
  culprit = 0;
}

void encode(const Decision& decision, Bytes& out) {
  Writer writer(out);
  writer.put(decision.number);
  writer.put(decision.first_plan);
  put_agreements(writer, decision);
  put_list(writer, decision.retired);
  put_endings(writer, decision);
  put_list(writer, decision.asked);
  put_each(writer, decision.stalls, [&](const Stall& stall) { put_stall(writer, stall); });
  put_each(writer, decision.lateness, [&](const RankLateness& late) { put_lateness(writer, late); });
  writer.put(decision.fatal);
  writer.put_text(decision.fatal_text);
  writer.put(decision.culprit);
}

bool decode(std::span<const uint8_t> bytes, Decision& decision) {
  Reader reader(bytes);
  decision.clear();
  decision.number = reader.get<uint64_t>();
  decision.first_plan = reader.get<uint64_t>();
  get_agreements(reader, decision);
  reader.get_all_into(decision.retired);
  get_endings(reader, decision);
  reader.get_all_into(decision.asked);
  get_each(reader, decision.stalls, [&](Stall& stall) { get_stall(reader, stall); });
  get_each(reader, decision.lateness, [&](RankLateness& late) { get_lateness(reader, late); });
  decision.fatal = get_status(reader);
  decision.fatal_text = get_printable(reader, longest_text);
  decision.culprit = reader.get<int32_t>();
  return reader.ok() && reader.at_end();
}

}  // namespace sirtaki
