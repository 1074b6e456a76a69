#include "control/stalls.h"

#include <algorithm>

namespace sirtaki {
namespace {

constexpr size_t most_names = 8;
constexpr Nanoseconds one_second = seconds(1);

Nanoseconds later(Nanoseconds moment, Nanoseconds by) { return by > 0 && moment < never - by ? moment + by : never; }

Status deadline_passed(const Stall& stall, const RankNames& names) {
  std::string tensors;
  for (const std::string& name : stall.names) tensors += (tensors.empty() ? "" : ", ") + quoted(name);
  if (stall.more_names) tensors += format(" and %d more", stall.more_names);
  return Status(SRT_TIMEOUT,
                bounded(list_ranks(stall.missing, names) + " did not submit within " + std::to_string(stall.seconds) +
                        " seconds what " + list_ranks(stall.waiting, names) + " waited for: " + tensors));
}

}  // namespace

void StallWatch::begun(Nanoseconds now) { next_report_ = std::min(next_report_, later(now, report_after_)); }

Nanoseconds StallWatch::next(const EntryTable& table, const ProcessSets& sets) const {
  if (is_over_) return never;
  Nanoseconds oldest = table.pending().empty() ? never : table.pending().front().since;
  if (sets.joining()) {
    for (const auto& set : sets.all()) {
      if (set->joined_count) oldest = std::min(oldest, set->join_waits_since);
    }
  }
  if (oldest == never) return never;
  return std::min(std::max(next_report_, later(oldest, report_after_)), later(oldest, deadline_));
}

void StallWatch::look(Nanoseconds now, EntryTable& table, const ProcessSets& sets, const Groups& groups,
                      const RankNames& names, Decision& decision) {
  next_report_ = never;
  for (Cause& cause : find_causes(table, sets, groups)) {
    report(cause, now, decision);
    if (is_over_ || later(cause.since, deadline_) > now) continue;
    is_over_ = true;
    const Status status = deadline_passed(describe(cause, now), names);
    decision.fatal = status.code();
    decision.fatal_text = status.text();
  }
}

std::vector<StallWatch::Cause> StallWatch::find_causes(EntryTable& table, const ProcessSets& sets,
                                                       const Groups& groups) {
  std::vector<Cause> causes;
  for (Entry& entry : table.pending()) {
    RankBits missing = entry.is_agreed ? groups.missing(entry) : entry.missing();
    auto cause = std::find_if(causes.begin(), causes.end(),
                              [&](const Cause& known) { return known.set == entry.set && known.missing == missing; });
    if (cause == causes.end()) {
      cause = causes.insert(cause,
                            {entry.set, std::move(missing), entry.submitted, {}, entry.since, entry.next_stall_report});
    }
    cause->waiting |= entry.submitted;
    cause->entries.push_back(&entry);
  }
  for (const auto& set : sets.all()) {
    const bool waits_for_entries =
        std::any_of(causes.begin(), causes.end(), [&](const Cause& cause) { return cause.set == set.get(); });
    if (!set->joined_count || waits_for_entries) continue;  // who waits for something else is not late to join
    RankBits missing = set->bits;
    missing -= set->joined;
    causes.push_back({set.get(), std::move(missing), set->joined, {}, set->join_waits_since, set->next_stall_report});
  }
  return causes;
}

Stall StallWatch::describe(const Cause& cause, Nanoseconds now) {
  Stall stall;
  stall.process_set = cause.set->number;
  for (size_t i = 0; i < cause.entries.size() && i < most_names; ++i) stall.names.push_back(cause.entries[i]->name);
  stall.more_names = static_cast<int32_t>(cause.entries.size() - stall.names.size());
  if (cause.entries.empty()) stall.names.push_back("join");
  if (cause.entries.empty()) stall.more_names = 0;
  stall.missing = cause.missing.ranks();
  RankBits waiting = cause.waiting;
  waiting -= cause.missing;
  stall.waiting = waiting.ranks();
  stall.seconds = (now - cause.since) / one_second;
  return stall;
}

// A cause is reported when its oldest request has waited long enough; what came later goes along.
void StallWatch::report(Cause& cause, Nanoseconds now, Decision& decision) {
  Nanoseconds next = cause.next_report ? cause.next_report : later(cause.since, report_after_);
  if (next <= now) {
    decision.stalls.push_back(describe(cause, now));
    Nanoseconds waited = report_after_;
    while (later(cause.since, waited) <= now) waited *= 2;
    next = later(cause.since, waited);
    for (Entry* entry : cause.entries) entry->next_stall_report = next;
    if (cause.entries.empty()) cause.set->next_stall_report = next;
  }
  next_report_ = std::min(next_report_, next);
}

}  // namespace sirtaki
