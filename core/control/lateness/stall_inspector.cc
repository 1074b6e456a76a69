#include "control/lateness/stall_inspector.h"

#include <algorithm>

#include "control/lateness/stall_text.h"

namespace sirtaki {
namespace {

constexpr size_t most_names = 8;
constexpr char join_name[] = "join";
constexpr size_t most_rank_reports = 64;             // in one stall
constexpr Nanoseconds one_second = seconds(1);
constexpr Nanoseconds answer_time = seconds(1);     // a rank that takes longer does not answer

Nanoseconds later(Nanoseconds moment, Nanoseconds by) { return by > 0 && moment < never - by ? moment + by : never; }

// Adds the end of a stall to a decision. Stalls of one set that the same rank has ended are reported together.
void add_end(const ProcessSet& set, int32_t last_rank, Nanoseconds waited, const std::string& name,
             Decision& decision) {
  const std::vector<int32_t> last{last_rank};
  auto& stalls = decision.stalls;
  auto end = std::find_if(stalls.begin(), stalls.end(), [&](const Stall& known) {
    return known.is_over && known.missing == last && known.process_set == set.number;
  });
  if (end == stalls.end()) {
    Stall stall;
    stall.is_over = true;
    stall.process_set = set.number;
    stall.missing = last;
    stall.seconds = waited / one_second;
    end = stalls.insert(end, std::move(stall));
  }
  if (end->names.size() < most_names) end->names.push_back(name);
  else ++end->more_names;
}

}  // namespace

void report_end_of_stall(const OperationEntry& entry, Decision& decision) {
  const Arrivals& all = entry.arrivals;
  add_end(*entry.set, all.last_rank, all.latest - all.first, entry.name, decision);
}

void report_end_of_stall(const ProcessSet& set, Nanoseconds now, Decision& decision) {
  add_end(set, set.last_joined, now - set.first_joined, join_name, decision);
}

void StallInspector::begun(Nanoseconds now) { next_report_ = std::min(next_report_, later(now, report_after_)); }

Nanoseconds StallInspector::next(const OperationTable& table, const ProcessSets& sets) const {
  if (is_over_) return never;
  Nanoseconds oldest = table.pending().empty() ? never : table.pending().front().arrivals.first;
  if (sets.joining()) {
    for (const auto& set : sets.all()) {
      if (set->joined_count) oldest = std::min(oldest, set->join_waits_since);
    }
  }
  if (oldest == never) return never;
  if (inquiry_.is_open) return inquiry_.asked.size() == inquiry_.answers.size() ? 0 : inquiry_.until;
  return std::min(std::max(next_report_, later(oldest, report_after_)), later(oldest, deadline_));
}

void StallInspector::answered(StalledRankReport wait_report) {
  const auto is_same = [&](int32_t rank) { return rank == wait_report.rank; };
  const bool is_wanted = inquiry_.is_open && std::any_of(inquiry_.asked.begin(), inquiry_.asked.end(), is_same) &&
                         std::none_of(inquiry_.answers.begin(), inquiry_.answers.end(),
                                      [&](const StalledRankReport& known) { return is_same(known.rank); });
  if (is_wanted) inquiry_.answers.push_back(std::move(wait_report));
}

void StallInspector::inspect(Nanoseconds now, OperationTable& table, const ProcessSets& sets, const Groups& groups,
                             const RankNames& names, Decision& decision) {
  if (is_awaiting(now)) return;
  std::vector<Cause> causes = find_causes(now, table, sets, groups);
  next_report_ = never;
  const bool any_due = std::any_of(causes.begin(), causes.end(), [&](const Cause& cause) { return due(cause) <= now; });
  if (any_due && !inquiry_.is_open) return ask(causes, now, decision);
  for (Cause& cause : causes) {
    report(cause, now, decision);
    if (!is_over_ && later(cause.since, deadline_) <= now) end(cause, "stall_deadline", now, names, decision);
  }
  if (const Cause* cause = is_over_ ? nullptr : find_circle(causes, now))
    end(*cause, "ranks wait for each other", now, names, decision);
  inquiry_ = {};
}

void StallInspector::end(const Cause& cause, const char* why, Nanoseconds now, const RankNames& names,
                         Decision& decision) {
  is_over_ = true;
  const Stall stall = describe(cause, now);
  decision.culprit = stall.missing.front();
  decision.fatal = SRT_TIMEOUT;
  decision.fatal_text = bounded("given up after " + std::to_string(stall.seconds) + " seconds (" + why +
                                "): " + describe_stall(stall, names));
}

const StallInspector::Cause* StallInspector::find_circle(const std::vector<Cause>& causes, Nanoseconds now) const {
  // Keeps the causes of which a missing rank itself waits for a kept cause, until no further cause falls away.
  std::vector<const Cause*> stuck;
  for (const Cause& cause : causes)
    if (report_after_ > 0 && later(cause.since, 2 * report_after_) <= now) stuck.push_back(&cause);
  const auto waits_for = [](const StalledRankReport& answer, const Cause& cause) {
    return std::any_of(cause.entries.begin(), cause.entries.end(), [&](const OperationEntry* entry) {
      return entry->name == answer.waits_for && entry->submitted.has(answer.rank);
    });
  };
  for (std::vector<const Cause*> before; before.size() != stuck.size();) {
    before = stuck;
    std::erase_if(stuck, [&](const Cause* cause) {
      return std::none_of(inquiry_.answers.begin(), inquiry_.answers.end(), [&](const StalledRankReport& answer) {
        return cause->missing.has(answer.rank) &&
               std::any_of(before.begin(), before.end(), [&](const Cause* other) { return waits_for(answer, *other); });
      });
    });
  }
  return stuck.empty() ? nullptr : stuck.front();
}

Nanoseconds StallInspector::due(const Cause& cause) const {
  const Nanoseconds report = cause.next_report ? cause.next_report : later(cause.since, report_after_);
  return std::min(report, later(cause.since, deadline_));
}

bool StallInspector::is_awaiting(Nanoseconds now) const {
  return inquiry_.is_open && now < inquiry_.until && inquiry_.answers.size() < inquiry_.asked.size();
}

void StallInspector::ask(const std::vector<Cause>& causes, Nanoseconds now, Decision& decision) {
  inquiry_ = {true, now + answer_time, {}, {}};
  for (const Cause& cause : causes) {
    // Includes causes that become due during the wait, and those that may belong to a circle with one that is due.
    if (due(cause) > later(now, answer_time) && later(cause.since, report_after_) > now) continue;
    for (int32_t rank : cause.missing.ranks())
      if (std::find(inquiry_.asked.begin(), inquiry_.asked.end(), rank) == inquiry_.asked.end())
        inquiry_.asked.push_back(rank);
  }
  decision.asked = inquiry_.asked;
}

std::vector<StallInspector::Cause> StallInspector::find_causes(Nanoseconds now, OperationTable& table,
                                                               const ProcessSets& sets, const Groups& groups) const {
  std::vector<Cause> causes;
  for (OperationEntry& entry : table.pending()) {
    const bool has_time = entry.proposed->deadline && !entry.is_past_deadline;
    if (has_time && now < later(entry.arrivals.first, deadline_)) continue;  // its deadline takes care of late ranks
    RankBits missing = entry.is_agreed ? groups.missing(entry) : entry.missing();
    auto cause = std::find_if(causes.begin(), causes.end(),
                              [&](const Cause& known) { return known.set == entry.set && known.missing == missing; });
    if (cause == causes.end()) {
      cause = causes.insert(
          cause, {entry.set, std::move(missing), entry.submitted, {}, entry.arrivals.first, entry.next_stall_report});
    }
    cause->waiting |= entry.submitted;
    cause->entries.push_back(&entry);
  }
  for (const auto& set : sets.all()) {
    const bool waits_for_entries =
        std::any_of(causes.begin(), causes.end(), [&](const Cause& cause) { return cause.set == set.get(); });
    if (!set->joined_count || waits_for_entries) continue;  // ranks that wait for entries are not late to join
    RankBits missing = set->bits;
    missing -= set->joined;
    causes.push_back({set.get(), std::move(missing), set->joined, {}, set->join_waits_since, set->next_stall_report});
  }
  return causes;
}

Stall StallInspector::describe(const Cause& cause, Nanoseconds now) const {
  Stall stall;
  stall.process_set = cause.set->number;
  for (size_t i = 0; i < cause.entries.size() && i < most_names; ++i) stall.names.push_back(cause.entries[i]->name);
  stall.more_names = static_cast<int32_t>(cause.entries.size() - stall.names.size());
  if (cause.entries.empty()) stall.names.push_back(join_name);
  if (cause.entries.empty()) stall.more_names = 0;
  stall.missing = cause.missing.ranks();
  RankBits waiting = cause.waiting;
  waiting -= cause.missing;
  stall.waiting = waiting.ranks();
  stall.seconds = (now - cause.since) / one_second;
  for (int32_t rank : stall.missing) {
    const auto is_same = [&](const StalledRankReport& answer) { return answer.rank == rank; };
    const auto answer = std::find_if(inquiry_.answers.begin(), inquiry_.answers.end(), is_same);
    const bool was_asked = std::find(inquiry_.asked.begin(), inquiry_.asked.end(), rank) != inquiry_.asked.end();
    if (!was_asked || stall.rank_reports.size() == most_rank_reports) continue;
    const int32_t leader = leaders_.empty() ? -1 : leaders_[static_cast<size_t>(rank)];
    stall.rank_reports.push_back(answer == inquiry_.answers.end() ? StalledRankReport{rank, false, {}, {}, leader}
                                                                  : *answer);
  }
  return stall;
}

// Reports a cause, with its later requests, once its oldest request has waited long enough.
void StallInspector::report(Cause& cause, Nanoseconds now, Decision& decision) {
  Nanoseconds next = cause.next_report ? cause.next_report : later(cause.since, report_after_);
  if (next <= now) {
    decision.stalls.push_back(describe(cause, now));
    Nanoseconds waited = report_after_;
    while (later(cause.since, waited) <= now) waited *= 2;
    next = later(cause.since, waited);
    for (OperationEntry* entry : cause.entries) entry->next_stall_report = next;
    if (cause.entries.empty()) {
      cause.set->next_stall_report = next;
      cause.set->is_join_reported = true;
    }
  }
  next_report_ = std::min(next_report_, next);
}

}  // namespace sirtaki
