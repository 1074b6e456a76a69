#include "observe/counters/tensor_times.h"

#include <algorithm>
#include <unordered_map>

namespace sirtaki {
namespace {

Nanoseconds overlap(const OperationRecord& record, std::span<const WaitSpan> waits) {
  Nanoseconds total = 0;
  for (const WaitSpan& wait : waits)
    total += std::max<Nanoseconds>(std::min(record.finished, wait.end) - std::max(record.submitted, wait.begin), 0);
  return total;
}

}  // namespace

std::vector<TensorTimes> slowest_tensors(std::span<const OperationRecord> records, std::span<const WaitSpan> waits,
                                         size_t most) {
  std::unordered_map<std::string_view, TensorTimes> by_name;
  for (const OperationRecord& record : records) {
    if (!record.finished || !record.decided || !record.bytes || record.status != SRT_OK) continue;
    if (!waits.empty() && record.submitted < waits.front().begin) continue;
    TensorTimes& times = by_name[record.name.view()];
    times.name = record.name;
    ++times.operations;
    times.exposed += overlap(record, waits);
    times.wait += record.decided - record.submitted;
    times.transfer += record.finished - record.decided;
  }
  std::vector<TensorTimes> found;
  for (const auto& [name, times] : by_name) found.push_back(times);
  const auto cost = [&](const TensorTimes& times) { return waits.empty() ? times.wait : times.exposed; };
  std::ranges::sort(found, [&](const TensorTimes& a, const TensorTimes& b) {
    return cost(a) != cost(b) ? cost(a) > cost(b) : a.name.view() < b.name.view();
  });
  found.resize(std::min(found.size(), most));
  return found;
}

}  // namespace sirtaki
