#include "control/messages.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"

namespace sirtaki {
namespace {

constexpr size_t most_splits = 1 << 20;
constexpr size_t smallest_item = 4;  // bytes of anything that a list holds: keeps a lie about its length cheap
constexpr uint8_t reports_goodbye = 1, reports_whereabouts = 2;  // flags of a report

template <typename T>
void put_list(Writer& writer, const std::vector<T>& values) {
  writer.put_all(std::span<const T>(values));
}

template <typename T, typename Put>
void put_each(Writer& writer, const std::vector<T>& values, Put put) {
  writer.put(static_cast<uint32_t>(values.size()));
  for (const T& value : values) put(value);
}

template <typename T, typename Get>
void get_each(Reader& reader, std::vector<T>& values, Get get) {
  const uint32_t count = reader.get_count(smallest_item);
  values.clear();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) get(values.emplace_back());
}

void put_signature(Writer& writer, const Signature& signature) {
  writer.put(signature.kind);
  writer.put(signature.dtype);
  writer.put(signature.reduce_op);
  writer.put(signature.process_set);
  writer.put(signature.root);
  writer.put(signature.destination);
  writer.put(signature.device);
  writer.put(signature.priority);
  writer.put(signature.group_size);
  writer.put(signature.group_id);
  writer.put(signature.layout);
  writer.put(signature.prescale);
  writer.put(signature.postscale);
  writer.put_text(signature.name);
  put_list(writer, signature.shape);
  put_list(writer, signature.splits);
}

// So that elements() and bytes() cannot overflow.
bool has_sane_shape(const Signature& signature) {
  if (changes_process_sets(signature.kind)) return true;
  if (signature.shape.size() > most_dimensions) return false;
  const bool is_cut = is_ragged(signature.kind) || signature.kind == Kind::reducescatter;
  if (is_cut && signature.shape.empty()) return false;
  int64_t bytes = static_cast<int64_t>(dtype_bytes(signature.dtype));
  for (int64_t extent : signature.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) return false;
  }
  return true;
}

// As many rows as the tensor has, at most.
bool has_sane_splits(const Signature& signature) {
  if (signature.splits.size() > most_splits) return false;
  if (signature.kind != Kind::alltoall) return true;
  int64_t left = signature.shape.empty() ? 0 : signature.shape.front();
  for (int64_t rows : signature.splits) {
    if (rows < 0 || rows > left) return false;
    left -= rows;
  }
  return true;
}

// There are kernels for it.
bool has_sane_reduction(const Signature& signature) {
  if (!reduces(signature.kind)) return true;
  if (signature.kind == Kind::reducescatter && signature.reduce_op == ReduceOp::adasum) return false;
  const srt_dtype* dtype = dtype_entry(static_cast<int>(signature.dtype));
  return (dtype->reduce_ops >> static_cast<int>(signature.reduce_op) & 1) != 0;
}

std::string get_name(Reader& reader) {
  std::string name = reader.get_text(longest_name);
  if (find_unprintable(name) != std::string::npos) reader.fail();
  return name;
}

// What a person will read.
std::string get_printable(Reader& reader, size_t limit) { return printable(reader.get_text(limit), limit); }

SignaturePtr get_signature(Reader& reader) {
  auto signature = std::make_shared<Signature>();
  signature->kind = reader.get_enum(last_requested_kind);
  signature->dtype = reader.get_enum(last_dtype);
  signature->reduce_op = reader.get_enum(last_reduce_op);
  signature->process_set = reader.get<int32_t>();
  signature->root = reader.get<int32_t>();
  signature->destination = reader.get<int32_t>();
  signature->device = reader.get<int32_t>();
  signature->priority = reader.get<int32_t>();
  signature->group_size = reader.get<int32_t>();
  signature->group_id = reader.get<int64_t>();
  signature->layout = reader.get<uint64_t>();
  signature->prescale = reader.get<double>();
  signature->postscale = reader.get<double>();
  signature->name = get_name(reader);
  signature->shape = reader.get_all<int64_t>();
  signature->splits = reader.get_all<int64_t>();
  const bool is_sane = !signature->name.empty() && std::isfinite(signature->prescale) &&
                       std::isfinite(signature->postscale) && has_sane_splits(*signature) &&
                       (signature->group_id == 0) == (signature->group_size == 0) && signature->group_size >= 0 &&
                       has_sane_shape(*signature) && has_sane_reduction(*signature);
  if (!is_sane) reader.fail();
  return signature;
}

srt_status get_status(Reader& reader) {
  const auto code = reader.get<srt_status>();
  if (!StatusTable::entry(code)) reader.fail();
  return code;
}

void put_whereabouts(Writer& writer, const Whereabouts& whereabouts) {
  writer.put(whereabouts.rank);
  writer.put<uint8_t>(whereabouts.answers);
  writer.put_text(whereabouts.waits_for);
  put_each(writer, whereabouts.frames, [&](const StackFrame& frame) {
    writer.put_text(frame.function);
    writer.put_text(frame.file);
    writer.put(frame.line);
  });
}

void get_whereabouts(Reader& reader, Whereabouts& whereabouts) {
  whereabouts.rank = reader.get<int32_t>();
  whereabouts.answers = reader.get<uint8_t>() != 0;
  whereabouts.waits_for = get_name(reader);
  get_each(reader, whereabouts.frames, [&](StackFrame& frame) {
    frame.function = get_printable(reader, longest_frame_text);
    frame.file = get_printable(reader, longest_frame_text);
    frame.line = reader.get<int32_t>();
  });
  if (whereabouts.frames.size() > most_frames) reader.fail();
}

void put_stall(Writer& writer, const Stall& stall) {
  writer.put(stall.process_set);
  put_each(writer, stall.names, [&](const std::string& name) { writer.put_text(name); });
  writer.put(stall.more_names);
  put_list(writer, stall.missing);
  put_list(writer, stall.waiting);
  writer.put(stall.seconds);
  put_each(writer, stall.whereabouts, [&](const Whereabouts& one) { put_whereabouts(writer, one); });
}

void get_stall(Reader& reader, Stall& stall) {
  stall.process_set = reader.get<int32_t>();
  get_each(reader, stall.names, [&](std::string& name) { name = get_name(reader); });
  stall.more_names = reader.get<int32_t>();
  stall.missing = reader.get_all<int32_t>();
  stall.waiting = reader.get_all<int32_t>();
  stall.seconds = reader.get<int64_t>();
  get_each(reader, stall.whereabouts, [&](Whereabouts& one) { get_whereabouts(reader, one); });
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

void Report::clear() {
  last_decision = 0;
  goodbye = false;
  lapsed = 0;
  present.clear();
  absent.clear();
  full_requests.clear();
  joined.clear();
  whereabouts.reset();
}

void encode(const Report& report, Bytes& out) {
  Writer writer(out);
  writer.put(report.last_decision);
  writer.put<uint8_t>((report.goodbye ? reports_goodbye : 0) | (report.whereabouts ? reports_whereabouts : 0));
  writer.put(report.lapsed);
  put_list(writer, report.present);
  put_list(writer, report.absent);
  put_each(writer, report.full_requests, [&](const Report::FullRequest& request) {
    put_signature(writer, *request.signature);
    writer.put<uint8_t>(request.absent);
  });
  put_list(writer, report.joined);
  if (report.whereabouts) put_whereabouts(writer, *report.whereabouts);
}

bool decode(std::span<const uint8_t> bytes, Report& report) {
  Reader reader(bytes);
  report.clear();
  report.last_decision = reader.get<uint64_t>();
  const auto flags = reader.get<uint8_t>();
  report.goodbye = flags & reports_goodbye;
  report.lapsed = reader.get<uint32_t>();
  reader.get_all_into(report.present);
  reader.get_all_into(report.absent);
  get_each(reader, report.full_requests, [&](Report::FullRequest& request) {
    request.signature = get_signature(reader);
    request.absent = reader.get<uint8_t>() != 0;
  });
  reader.get_all_into(report.joined);
  if (flags & reports_whereabouts) get_whereabouts(reader, report.whereabouts.emplace());
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
  return reader.ok() && reader.at_end();
}

}  // namespace sirtaki
