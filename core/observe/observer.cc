#include "observe/observer.h"

namespace sirtaki {

uint64_t Observer::submitted(const Submitted& what) {
  statistics_.waiting.begin(moment_);
  return recorder_.begin(what, moment_).number;
}

void Observer::reported(uint64_t number, bool is_cached) {
  ++(is_cached ? statistics_.cache_hits : statistics_.cache_misses);
  OperationRecord* record = recorder_.find(number);
  if (!record) return;
  record->reported = moment_;
  record->is_cached = is_cached;
}

void Observer::decided(uint64_t number, uint64_t plan, size_t fused) {
  statistics_.waiting.end(moment_);
  OperationRecord* record = recorder_.find(number);
  if (!record) return;
  record->decided = moment_;
  record->plan = plan;
  record->fused = static_cast<int32_t>(fused);
}

void Observer::transferred(uint64_t number, const TransferTimes& times) {
  if (OperationRecord* record = recorder_.find(number)) record->transfer = times;
}

void Observer::ended(uint64_t number, bool was_decided, srt_status status) {
  if (!was_decided) statistics_.waiting.end(moment_);
  ++statistics_.operations;
  statistics_.failed += status != SRT_OK;
  OperationRecord* record = recorder_.find(number);
  if (!record) return;
  record->finished = moment_;
  record->status = status;
  if (was_decided) {
    statistics_.wait.add(record->decided - record->submitted);
    statistics_.transfer.add(record->finished - record->decided);
  }
  if (timeline_.is_running()) timeline_.add(*record);
}

void Observer::refused(uint64_t number, RefusedOperation why) {
  OperationRecord* record = recorder_.find(number);
  if (record) record->refused = std::make_shared<const RefusedOperation>(std::move(why));
}

void Observer::plan_begun(size_t tensors, int64_t bytes, double bus_bytes) {
  const auto count = static_cast<int64_t>(tensors);
  ++statistics_.plans;
  statistics_.planned_tensors += count;
  statistics_.largest_plan = std::max(statistics_.largest_plan, count);
  statistics_.bytes += bytes;
  statistics_.bus_bytes += bus_bytes;
  statistics_.moving.begin(moment_);
}

void Observer::plan_ended(const WireBytes& sent) {
  statistics_.wire_bytes.encoded += sent.encoded;
  statistics_.wire_bytes.unencoded += sent.unencoded;
  statistics_.moving.end(moment_);
}

void Observer::decision_applied() {
  if (timeline_.marks_decisions()) timeline_.add_decision(moment_);
}

void Observer::set_lateness(int32_t rank, const Lateness& lateness) {
  const auto index = static_cast<size_t>(rank);
  if (index < statistics_.lateness.size()) statistics_.lateness[index] = lateness;
}

}  // namespace sirtaki
