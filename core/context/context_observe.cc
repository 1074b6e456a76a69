// A rank's observations of itself: what it has counted, and what it does now.
#include "base/give.h"
#include "context/context.h"
#include "context/observation.h"

namespace sirtaki {
namespace {

constexpr size_t most_summed_operations = 1024;  // copied in some 20 µs

}  // namespace

void Context::statistics(srt_statistics& out, srt_lateness* by_rank) {
  if (forked_) return describe(state_.in_forked_child().observer.statistics(), now(), out, by_rank);
  const Access state(state_);
  describe(state->observer.statistics(), now(), out, by_rank);
}

void Context::activity(srt_activity& out) {
  if (forked_) return describe(state_.in_forked_child(), now(), out);
  const Access state(state_);
  describe(*state, now(), out);
}

void Context::end_steps(int64_t number, int64_t by) {
  if (forked_) return;
  const Access state(state_);
  state->observer.steps_ended(now(), number, by);
}

void Context::steps(srt_step_counts& out) {
  if (forked_) return describe(state_.in_forked_child().observer.steps(), now(), out);
  const Access state(state_);
  describe(state->observer.steps(), now(), out);
}

int32_t Context::count_operations(srt_operation_count* out, int32_t capacity) {
  OperationCounts counts;
  if (forked_) counts = state_.in_forked_child().handles.counts();
  else counts = Access(state_)->handles.counts();
  return give(describe(counts), out, capacity);
}

int32_t Context::count_sent_bytes(srt_sent_bytes* out, int32_t capacity) const {
  return give(describe(*sent_bytes_, locations_), out, capacity);
}

Status Context::write_recorder(const char* path) {
  if (!path || !*path) return {SRT_INVALID_ARGUMENT, "a recorder needs the path of a file"};
  return failure_report_ && !forked_ ? failure_report_->write_recorder(path) : usable();
}

// Copies the records, so that no operation waits for the sums.
int32_t Context::slowest_tensors(std::span<const WaitSpan> waits, srt_tensor_times* out, int32_t capacity) {
  std::vector<OperationRecord> records;
  records.reserve(most_summed_operations);
  read(0, [&](const CallerState& state) {
    const auto keep = [&](const OperationRecord& record) { records.push_back(record); };
    state.observer.recorder().visit(keep, most_summed_operations);
    return 0;
  });
  const auto most = static_cast<size_t>(std::max(capacity, 0));
  return give(describe(sirtaki::slowest_tensors(records, waits, most)), out, capacity);
}

}  // namespace sirtaki
