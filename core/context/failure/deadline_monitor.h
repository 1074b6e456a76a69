// Detection of late ranks: logs stalls of negotiation and execution, and returns an error at the deadline, so that
// nothing waits for ever.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/settings/knobs.h"
#include "context/plans/execution.h"
#include "context/plans/negotiation.h"

namespace sirtaki {

// The location of a rank, for the reports that are written to files.
struct RankLocation {
  std::string host;
  int32_t pid;
};

struct DeadlineMonitorParts {
  int32_t rank;
  const RankNames& names;
  const std::vector<RankLocation>& locations;
  const std::vector<int32_t>& local_ranks;
  const Log& log;
};

class DeadlineMonitor {
 public:
  DeadlineMonitor(const DeadlineMonitorParts& parts, const Config& config);

  // Reports a stall once per host, by its lowest rank that is not late itself: in the log, and as JSON if a file is
  // set.
  void report(const Stall& stall) const;

  // Counts the rounds in a row that were decided without a rank, and reports it once per host when they are many.
  void note_round(const Plan& plan);

  // Checks the deadlines. If one has passed, returns the reason and the responsible rank. `oldest_waiting` returns
  // the name of the oldest operation that waits for a Decision ("": none); it is called only if the coordinator is
  // silent, because it scans all operations in flight.
  std::optional<AbortNotice> check(Nanoseconds now, const Execution& execution, Executor& executor,
                                   const Negotiation& negotiation, const std::function<std::string()>& oldest_waiting);

 private:
  bool logs_for_host(const std::vector<int32_t>& late) const;
  std::string name_all(const std::vector<int32_t>& ranks) const;
  Nanoseconds deadline_of_progress(DeviceWait wait) const;
  std::optional<AbortNotice> check_progress(Nanoseconds now, const Execution& execution, const Executor& executor);
  // Describes the oldest unfinished transfer, which waits for the bytes of ranks or, if there are none, for GPUs.
  std::string describe_stuck(const Transfer& stuck, const std::vector<int32_t>& late, const std::string& tensor,
                             DeviceWait wait, Nanoseconds silent) const;
  std::optional<AbortNotice> check_coordinator(Nanoseconds now, const Negotiation& negotiation,
                                               const std::function<std::string()>& oldest_waiting);
  void log_end_of_silence(Nanoseconds heard);

  void append_to_file(const Stall& stall) const;

  DeadlineMonitorParts parts_;
  std::string report_file_;
  struct Missed {
    int64_t rounds = 0;       // in a row, so far
    int64_t next_report = 0;  // so many in a row; more than the last report, so that there are few
  };
  std::map<std::pair<std::string, int32_t>, Missed> missed_;  // by the name without its round, and the rank
  int64_t late_report_;
  Nanoseconds stall_report_, progress_deadline_, stall_deadline_;
  Nanoseconds next_progress_line_ = 0, next_coordinator_line_ = 0;
  uint64_t stuck_plan_ = 0;
  Nanoseconds asked_at_ = 0;  // time of the first report that the coordinator has not answered
  bool has_logged_silence_ = false;  // the coordinator's silence was logged
};

}  // namespace sirtaki
