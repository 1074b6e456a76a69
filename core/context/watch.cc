#include "context/watch.h"

#include <algorithm>

namespace sirtaki {
namespace {

// The coordinator itself speaks up after stall_report; its silence is noticed a little later.
constexpr Nanoseconds coordinator_grace = seconds(2);

bool contains(const std::vector<int32_t>& ranks, int32_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

long long whole_seconds(Nanoseconds time) { return static_cast<long long>(time / seconds(1)); }

}  // namespace

Watch::Watch(int32_t rank, const RankNames& names, std::vector<int32_t> local_ranks, const Config& config,
             const Log& log)
    : rank_(rank), names_(names), local_ranks_(std::move(local_ranks)), log_(log),
      stall_report_(config.time(Knob::stall_report)), progress_deadline_(config.time(Knob::progress_deadline)),
      stall_deadline_(config.time(Knob::stall_deadline)) {}

bool Watch::speaks_for_host(const std::vector<int32_t>& late) const {
  for (int32_t local : local_ranks_)
    if (!contains(late, local)) return local == rank_;
  return false;
}

std::string Watch::name_all(const std::vector<int32_t>& ranks) const {
  constexpr size_t most = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), most); ++i) {
    if (i) text += i + 1 == ranks.size() ? " and " : ", ";
    text += names_[static_cast<size_t>(ranks[i])];
  }
  if (ranks.size() > most) text += format(" and %zu more", ranks.size() - most);
  return text;
}

void Watch::say(const Stall& stall) const {
  if (!speaks_for_host(stall.missing)) return;
  std::string tensors;
  for (size_t i = 0; i < stall.names.size(); ++i) tensors += (i ? ", '" : "'") + stall.names[i] + "'";
  if (stall.more_names) tensors += format(" and %d more", stall.more_names);
  log_.line(format(
      "after %lld s, %s %s not submitted %s; %s %s waiting for it. Does every rank take the same branches, and call "
      "the same operations?",
      static_cast<long long>(stall.seconds), name_all(stall.missing).c_str(), stall.missing.size() > 1 ? "have" : "has",
      tensors.c_str(), name_all(stall.waiting).c_str(), stall.waiting.size() > 1 ? "are" : "is"));
}

Status Watch::check(Nanoseconds now, const Execution& execution, Executor& executor, const Negotiation& negotiation,
                    const std::function<std::string()>& oldest_waiting) {
  SIRTAKI_TRY(check_progress(now, execution, executor));
  return check_coordinator(now, negotiation, oldest_waiting);
}

Status Watch::check_progress(Nanoseconds now, const Execution& execution, const Executor& executor) {
  std::vector<int32_t> late;
  const Transfer* stuck = executor.stuck(late);
  if (!stuck || late.empty()) return Status::ok();
  const Nanoseconds silent = now - executor.last_moved();
  if (stuck->plan != stuck_plan_) {
    stuck_plan_ = stuck->plan;
    next_progress_line_ = stall_report_;
  }
  if (silent < std::min(next_progress_line_, progress_deadline_)) return Status::ok();
  const std::string text = format(
      "no byte of '%s' has moved for %lld s: %s has not sent its part. Is that process stopped, or its machine "
      "overloaded?",
      execution.tensor_of(stuck->plan).c_str(), whole_seconds(silent), name_all(late).c_str());
  if (silent >= progress_deadline_) return {SRT_TIMEOUT, text};
  if (speaks_for_host(late)) log_.line(text);
  next_progress_line_ = 2 * std::max(silent, stall_report_);
  return Status::ok();
}

Status Watch::check_coordinator(Nanoseconds now, const Negotiation& negotiation,
                                const std::function<std::string()>& oldest_waiting) {
  if (rank_ == coordinator_rank || negotiation.heard_from_coordinator() >= negotiation.reported()) return Status::ok();
  if (asked_at_ != negotiation.reported()) {
    asked_at_ = negotiation.reported();
    next_coordinator_line_ = stall_report_ + coordinator_grace;
  }
  const Nanoseconds silent = now - asked_at_;
  const bool is_over = stall_deadline_ && silent > stall_deadline_ + progress_deadline_;
  if (silent < next_coordinator_line_ && !is_over) return Status::ok();
  next_coordinator_line_ = 2 * silent;
  const std::string name = oldest_waiting();
  if (name.empty()) return Status::ok();
  const std::string text = format("%s, which coordinates the job, has not answered for %lld s; '%s' is waiting for it",
                                  names_[coordinator_rank].c_str(), whole_seconds(silent), name.c_str());
  if (is_over) return {SRT_TIMEOUT, text};
  if (speaks_for_host({coordinator_rank})) log_.line(text + ". Is that process stopped?");
  return Status::ok();
}

}  // namespace sirtaki
