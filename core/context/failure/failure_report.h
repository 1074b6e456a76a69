// A JSON report of what a rank was doing when its job failed: operations in flight, finished ones, and the program's
// stack. The core writes it without the Python interpreter. The same form has what the flight recorder holds of a rank
// whose job runs, when somebody asks for it.
#pragma once

#include <string>

#include "base/log.h"
#include "base/settings/knobs.h"
#include "context/failure/deadline_monitor.h"
#include "context/state/caller_state.h"
#include "observe/records/program_stack.h"

namespace sirtaki {

struct FailureReportParts {
  int32_t rank;
  const std::vector<RankLocation>& locations;
  SharedCallerState& state;
  ProgramStack& program_stack;
  const Log& log;
};

class FailureReport {
 public:
  // Writes nothing unless the setting dump_directory is set.
  FailureReport(const FailureReportParts& parts, const Config& config);

  // Removes the report of an earlier world of this rank, so that it is not mistaken for this world's.
  void forget() const;
  bool is_wanted() const { return !path_.empty(); }
  void write(const AbortNotice& why) const;
  // Callable from any thread.
  Status write_recorder(const std::string& path) const;

 private:
  std::string describe(const AbortNotice& why, size_t most_finished) const;

  FailureReportParts parts_;
  std::string directory_, path_;
};

}  // namespace sirtaki
