#include "control/lateness/deadlines.h"

#include <algorithm>

namespace sirtaki {
namespace {

// Returns when an entry's deadline passes.
Nanoseconds end_of(const OperationEntry& entry) {
  const Nanoseconds first = entry.arrivals.first, after = entry.proposed->deadline->after;
  return first < never - after ? first + after : never;
}

}  // namespace

const Deadlines::Series* Deadlines::find(const Signature& signature) const {
  const auto found = series_.find({signature.process_set, signature.series()});
  return found == series_.end() ? nullptr : &found->second;
}

bool Deadlines::is_over(const Signature& signature) const {
  if (!signature.deadline) return false;
  const Series* series = find(signature);
  return series && signature.deadline->round <= series->last_round;
}

Nanoseconds Deadlines::next() const {
  Nanoseconds first = never;
  for (const OperationEntry* entry : timed_)
    if (!entry->is_past_deadline) first = std::min(first, end_of(*entry));
  return first;
}

std::vector<OperationEntry*> Deadlines::take_passed(Nanoseconds now) {
  std::vector<OperationEntry*> passed;
  for (OperationEntry* entry : timed_) {
    if (entry->is_past_deadline || end_of(*entry) > now) continue;
    entry->is_past_deadline = true;
    passed.push_back(entry);
  }
  return passed;
}

bool Deadlines::may_proceed(const OperationEntry& entry) const {
  if (!entry.is_past_deadline || !entry.dissents.empty()) return false;
  const Deadline& deadline = *entry.proposed->deadline;
  const auto members = static_cast<int32_t>(entry.set->members.size());
  if (entry.submissions < std::min(deadline.quorum, members)) return false;
  const Series* series = find(*entry.proposed);
  if (!series || series->missed.empty()) return true;
  for (size_t i = 0; i < series->missed.size(); ++i)
    if (series->missed[i] >= most_missed_ && !entry.submitted.has(entry.set->members[i])) return false;
  return true;
}

void Deadlines::planned(const OperationEntry& entry) {
  Series& series = series_[{entry.set->number, entry.proposed->series()}];
  series.last_round = std::max(series.last_round, entry.proposed->deadline->round);
  const auto& members = entry.set->members;
  const bool is_whole = entry.submissions == static_cast<int32_t>(members.size());
  if (is_whole) return series.missed.clear();
  series.missed.resize(members.size());
  for (size_t i = 0; i < members.size(); ++i)
    series.missed[i] = entry.submitted.has(members[i]) ? 0 : series.missed[i] + 1;
}

}  // namespace sirtaki
