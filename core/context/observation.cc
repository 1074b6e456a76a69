#include "context/observation.h"

#include <algorithm>

#include "plan/kind.h"

namespace sirtaki {
namespace {

srt_histogram describe(const Histogram& histogram) {
  srt_histogram out{.total = in_seconds(histogram.total())};
  static_assert(std::size(decltype(out.bounds){}) == Histogram::bounds.size());
  std::transform(Histogram::bounds.begin(), Histogram::bounds.end(), out.bounds, in_seconds);
  std::copy(histogram.counts().begin(), histogram.counts().end(), out.counts);
  return out;
}

}  // namespace

void describe(const Statistics& counted, Nanoseconds now, srt_statistics& out, srt_lateness* by_rank) {
  out = {.struct_size = out.struct_size,
         .operations = counted.operations,
         .failed = counted.failed,
         .cache_hits = counted.cache_hits,
         .cache_misses = counted.cache_misses,
         .plans = counted.plans,
         .planned_tensors = counted.planned_tensors,
         .largest_plan = counted.largest_plan,
         .bytes = counted.bytes,
         .bus_bytes = counted.bus_bytes,
         .waiting = in_seconds(counted.waiting.until(now)),
         .moving = in_seconds(counted.moving.until(now)),
         .unencoded_bytes = counted.wire_bytes.unencoded,
         .encoded_bytes = counted.wire_bytes.encoded,
         .wait = describe(counted.wait),
         .transfer = describe(counted.transfer),
         .stalls = counted.stalls};
  if (!by_rank) return;
  for (const Lateness& late : counted.lateness)
    *by_rank++ = {late.times, in_seconds(late.total), in_seconds(late.longest)};
}

std::vector<srt_operation_count> describe(const OperationCounts& counts) {
  std::vector<srt_operation_count> rows;
  counts.visit([&](Kind kind, BackendName backend, const OperationCounts::Count& count) {
    const char* name = backend_names[static_cast<size_t>(backend)];
    rows.push_back({kind_name(kind), name, count.operations, count.failed, count.bytes, count.algorithm});
  });
  return rows;
}

std::vector<srt_sent_bytes> describe(const SentBytes& sent, const std::vector<RankLocation>& locations) {
  std::vector<srt_sent_bytes> rows;
  sent.visit([&](int32_t peer, Transport transport, int64_t bytes) {
    const char* host = locations[static_cast<size_t>(peer)].host.c_str();
    if (bytes) rows.push_back({host, transport_names[static_cast<size_t>(transport)], bytes});
  });
  return rows;
}

std::vector<srt_tensor_times> describe(const std::vector<TensorTimes>& tensors) {
  std::vector<srt_tensor_times> rows;
  for (const TensorTimes& one : tensors) {
    srt_tensor_times& row = rows.emplace_back();
    row = {one.operations, in_seconds(one.exposed), in_seconds(one.wait), in_seconds(one.transfer), {}};
    std::ranges::copy(one.name.view(), row.name);
  }
  return rows;
}

void describe(CallerState& state, Nanoseconds now, srt_activity& out) {
  out = {.struct_size = out.struct_size};
  const HandleEntry* oldest = nullptr;
  for (Ticket ticket : state.handles.unfinished()) {
    const HandleEntry* entry = state.handles.open_entry(ticket);
    ++out.operations;
    if (!oldest || entry->record < oldest->record) oldest = entry;
  }
  if (!oldest) return;
  out.is_agreed = oldest->state == HandleState::planned;
  out.process_set = oldest->signature->process_set;
  out.kind = kind_name(oldest->signature->kind);
  const ShortName name(oldest->signature->name);
  std::copy(name.view().begin(), name.view().end(), out.name);
  if (const OperationRecord* record = state.observer.recorder().find(oldest->record))
    out.seconds = in_seconds(now - record->submitted);
}

}  // namespace sirtaki
