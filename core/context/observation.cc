#include "context/observation.h"

#include <algorithm>

#include "plan/kind.h"

namespace sirtaki {
namespace {

// Writes a histogram into a struct with its fields.
template <auto longest, typename Out>
void describe(const Histogram<longest>& histogram, Out& out) {
  static_assert(std::size(decltype(out.bounds){}) == longest.size());
  std::ranges::transform(longest, out.bounds, in_seconds);
  std::ranges::copy(histogram.counts(), out.counts);
  out.total = in_seconds(histogram.total());
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
         .stalls = counted.stalls};
  describe(counted.wait, out.wait);
  describe(counted.transfer, out.transfer);
  if (!by_rank) return;
  for (const Lateness& late : counted.lateness)
    *by_rank++ = {late.times, in_seconds(late.total), in_seconds(late.longest)};
}

void describe(const StepCounters& counted, Nanoseconds now, srt_step_counts& out) {
  out = {.struct_size = out.struct_size,
         .number = counted.number(),
         .last = in_seconds(counted.last()),
         .age = in_seconds(counted.age(now)),
         .productive = in_seconds(counted.productive()),
         .optimizer = counted.of_first().optimizer,
         .optimizer_steps = counted.of_first().number};
  describe(counted.times(), out);
  std::ranges::transform(counted.of_first().latest, out.latest, in_seconds);
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
