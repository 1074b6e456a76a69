#include "context/failure/deadline_monitor.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/system/descriptor.h"
#include "control/lateness/stall_text.h"
#include "observe/records/json.h"

namespace sirtaki {
namespace {

// The time beyond stall_report after which the coordinator counts as silent: a running coordinator asks the missing
// ranks after stall_report, every rank sees that question, and the answers are due by then.
constexpr Nanoseconds coordinator_grace = seconds(1);

// The time beyond stall_deadline after which a rank gives up by itself. A running coordinator gives up before, when the
// answers are due, and names the rank that is late.
constexpr Nanoseconds verdict_grace = seconds(3);

bool contains(const std::vector<int32_t>& ranks, int32_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void put_missing(JsonWriter& json, int32_t rank, const RankLocation& location, const Stall& stall) {
  json.begin_object().member("rank", rank).member("host", location.host).member("pid", location.pid);
  const auto told = std::find_if(stall.rank_reports.begin(), stall.rank_reports.end(),
                                 [&](const StalledRankReport& known) { return known.rank == rank; });
  if (told != stall.rank_reports.end()) {
    json.member("answers", told->answers).member("waits_for", told->waits_for).key("stack");
    put_stack(json, told->frames);
  }
  json.end_object();
}

// For what this rank cannot see, in units of progress_deadline. NCCL searches the host's network devices and connects
// every pair of GPUs: minutes in a large job. A launched operation waits for the GPUs of other members to compute their
// inputs.
constexpr int remote_device_factor = 10;

long long whole_seconds(Nanoseconds time) { return static_cast<long long>(time / seconds(1)); }

// Adds when a wait ends the job, by which setting.
std::string with_end(const std::string& text, const char* setting, Nanoseconds deadline, long long waited_seconds) {
  const char* pause = text.ends_with('?') ? " " : ". ";
  if (!deadline) return text + format("%sNothing ends this wait: %s is 0", pause, setting);
  return text + format("%sIf nothing changes, the job ends in %lld s (%s)", pause,
                       std::max(whole_seconds(deadline) - waited_seconds, 0LL), setting);
}

}  // namespace

DeadlineMonitor::DeadlineMonitor(const DeadlineMonitorParts& parts, const Config& config)
    : parts_(parts), report_file_(config.text(Knob::stall_report_file)),
      late_report_(config.integer(Knob::late_report)), stall_report_(config.time(Knob::stall_report)),
      progress_deadline_(config.time(Knob::progress_deadline)), stall_deadline_(config.time(Knob::stall_deadline)) {}

bool DeadlineMonitor::logs_for_host(const std::vector<int32_t>& late) const {
  for (int32_t local : parts_.local_ranks)
    if (!contains(late, local)) return local == parts_.rank;
  return false;
}

std::string DeadlineMonitor::name_all(const std::vector<int32_t>& ranks) const {
  constexpr size_t most = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), most); ++i) {
    if (i) text += i + 1 == ranks.size() ? " and " : ", ";
    text += parts_.names[static_cast<size_t>(ranks[i])];
  }
  if (ranks.size() > most) text += format(" and %zu more", ranks.size() - most);
  return text;
}

void DeadlineMonitor::report(const Stall& stall) const {
  if (!logs_for_host(stall.missing)) return;
  if (stall.is_over) return parts_.log.line(describe_stall(stall, parts_.names));
  const auto waited = static_cast<long long>(stall.seconds);
  const std::string text = format("after %lld s, %s", waited, describe_stall(stall, parts_.names).c_str());
  parts_.log.line(with_end(text, "stall_deadline", stall_deadline_, waited));
  if (!report_file_.empty()) append_to_file(stall);
}

void DeadlineMonitor::note_round(const Plan& plan) {
  if (plan.absentees.empty() && missed_.empty()) return;
  const std::string series = plan.tensors.front().signature->series();
  for (auto& [key, missed] : missed_)
    if (key.first == series && !contains(plan.absentees, key.second)) missed.rounds = 0;
  for (int32_t rank : plan.absentees) {
    Missed& missed = missed_.try_emplace({series, rank}, Missed{0, late_report_}).first->second;
    if (++missed.rounds < missed.next_report) continue;
    missed.next_report *= 2;
    if (!logs_for_host({rank})) continue;
    parts_.log.line(
        format("%s was late for '%.160s' %lld times in a row, and its contributions were left out. Is its "
               "machine slower, or its share of the work larger?",
               parts_.names[static_cast<size_t>(rank)].c_str(), series.c_str(), static_cast<long long>(missed.rounds)));
  }
}

// Appends a line with a single write(), because the ranks of a job may share the file.
void DeadlineMonitor::append_to_file(const Stall& stall) const {
  JsonWriter json;
  json.begin_object().member("seconds", stall.seconds).member("process_set", stall.process_set);
  json.key("tensors").begin_array();
  for (const std::string& name : stall.names) json.value(name);
  json.end_array().member("more_tensors", stall.more_names);
  json.key("waiting").begin_array();
  for (int32_t rank : stall.waiting) json.value(rank);
  json.end_array().key("missing").begin_array();
  for (int32_t rank : stall.missing) put_missing(json, rank, parts_.locations[static_cast<size_t>(rank)], stall);
  json.end_array().end_object();
  const std::string line = json.take() + "\n";
  const Descriptor file(::open(report_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file.is_open() || ::write(file.get(), line.data(), line.size()) < 0)
    parts_.log.line(format("the report could not be written to %s: %s", report_file_.c_str(), std::strerror(errno)));
}

std::optional<AbortNotice> DeadlineMonitor::check(Nanoseconds now, const Execution& execution, Executor& executor,
                                                  const Negotiation& negotiation,
                                                  const std::function<std::string()>& oldest_waiting) {
  if (auto notice = check_progress(now, execution, executor)) return notice;
  return check_coordinator(now, negotiation, oldest_waiting);
}

// Returns the longest time without progress. The own program's kernels may run for as long as it needs.
Nanoseconds DeadlineMonitor::deadline_of_progress(DeviceWait wait) const {
  switch (wait) {
    case DeviceWait::none: return progress_deadline_;
    case DeviceWait::input: return never;
    default: return remote_device_factor * progress_deadline_;
  }
}

std::optional<AbortNotice> DeadlineMonitor::check_progress(Nanoseconds now, const Execution& execution,
                                                           const Executor& executor) {
  const auto [stuck, late, wait] = executor.stuck();
  const bool waits_for_gpu = late.empty() && executor.must_be_polled();
  if (!stuck || (late.empty() && !waits_for_gpu)) return std::nullopt;
  const Nanoseconds silent = now - executor.last_moved();
  if (stuck->plan != stuck_plan_) {
    stuck_plan_ = stuck->plan;
    next_progress_line_ = stall_report_;
  }
  const Nanoseconds deadline = deadline_of_progress(wait);
  if (silent < std::min(next_progress_line_, deadline)) return std::nullopt;
  const std::string text = describe_stuck(*stuck, late, execution.tensor_of(stuck->plan), wait, silent);
  if (silent >= deadline) return AbortNotice{{SRT_TIMEOUT, text}, late.empty() ? parts_.rank : late.front()};
  if (wait == DeviceWait::input) parts_.log.line(text);
  else if (logs_for_host(late)) parts_.log.line(with_end(text, "progress_deadline", deadline, whole_seconds(silent)));
  next_progress_line_ = 2 * std::max(silent, stall_report_);
  return std::nullopt;
}

std::string DeadlineMonitor::describe_stuck(const Transfer& stuck, const std::vector<int32_t>& late,
                                            const std::string& tensor, DeviceWait wait, Nanoseconds silent) const {
  if (!late.empty())
    return format(
        "no byte of '%s' has moved for %lld s: %s has not sent its part. Is that process stopped, or its machine "
        "overloaded?",
        tensor.c_str(), whole_seconds(silent), name_all(late).c_str());
  if (wait == DeviceWait::input)
    return format("the GPU of %s has been computing the input of '%s' for %lld s; other ranks may be waiting for it",
                  name_all({parts_.rank}).c_str(), tensor.c_str(), whole_seconds(silent));
  const std::string members = name_all(stuck.members);
  if (wait == DeviceWait::connection)
    return format(
        "NCCL has been connecting the GPUs of %s for %lld s, for '%s'. Can their hosts reach each other through the "
        "network interface that NCCL has chosen (NCCL_SOCKET_IFNAME)? NCCL_DEBUG=INFO logs its choice",
        members.c_str(), whole_seconds(silent), tensor.c_str());
  return format(
      "'%s' has not ended on the GPUs of %s for %lld s. Is one of these processes stopped, or its GPU busy with "
      "something that does not end?",
      tensor.c_str(), members.c_str(), whole_seconds(silent));
}

void DeadlineMonitor::log_end_of_silence(Nanoseconds heard) {
  if (!std::exchange(has_logged_silence_, false)) return;
  parts_.log.line(format("%s, which coordinates the job, answers again after %lld s",
                         parts_.names[coordinator_rank].c_str(), whole_seconds(heard - asked_at_)));
}

std::optional<AbortNotice> DeadlineMonitor::check_coordinator(Nanoseconds now, const Negotiation& negotiation,
                                                              const std::function<std::string()>& oldest_waiting) {
  if (parts_.rank == coordinator_rank) return std::nullopt;
  if (negotiation.heard_from_coordinator() >= negotiation.reported()) {
    log_end_of_silence(negotiation.heard_from_coordinator());
    return std::nullopt;
  }
  if (asked_at_ <= negotiation.heard_from_coordinator()) {  // later reports do not prolong the silence
    asked_at_ = negotiation.reported();
    next_coordinator_line_ = stall_report_ + coordinator_grace;
  }
  const Nanoseconds silent = now - asked_at_;
  const bool is_over = stall_deadline_ && silent > stall_deadline_ + verdict_grace;
  if (silent < next_coordinator_line_ && !is_over) return std::nullopt;
  next_coordinator_line_ = 2 * silent;
  const std::string name = oldest_waiting();
  if (name.empty()) return std::nullopt;
  const int32_t parent = negotiation.parent();
  const std::string coordinator = parts_.names[coordinator_rank] + ", which coordinates the job,";
  const bool has_leader = parent != coordinator_rank;
  const std::string who = has_leader ? "neither " + parts_.names[static_cast<size_t>(parent)] +
                                           ", which reports for this rank, nor " + coordinator + " has"
                                     : coordinator + " has not";
  constexpr char is_stopped[] = ". Is that process stopped?";
  const std::string text =
      format("%s answered for %lld s; '%s' is waiting for it", who.c_str(), whole_seconds(silent), name.c_str());
  if (is_over)
    return AbortNotice{{SRT_TIMEOUT, "given up (stall_deadline): " + text + (has_leader ? "" : is_stopped)},
                       coordinator_rank};
  if (logs_for_host({coordinator_rank, parent})) {
    has_logged_silence_ = true;
    parts_.log.line(with_end(text + (has_leader ? ". Is one of those processes stopped?" : is_stopped),
                             "stall_deadline", stall_deadline_, whole_seconds(silent)));
  }
  return std::nullopt;
}

}  // namespace sirtaki
