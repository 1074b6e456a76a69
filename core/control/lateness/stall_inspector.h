// Stall detection: decides which ranks wait for which others, and when to report it.
//
// When an operation has waited for too long, a Decision asks the missing ranks what they are doing; sirtaki's own
// thread answers there, even if the program is busy. Once all have answered, or a second later, a report says which
// ranks wait for what, and what the missing ranks are doing instead. Ranks that have waited for each other since twice
// the time of the first report cannot go on, which ends the job.
#pragma once

#include <vector>

#include "control/messages/messages.h"
#include "control/operations/groups.h"
#include "control/operations/operation_table.h"
#include "control/operations/process_sets.h"
#include "control/operations/validation.h"

namespace sirtaki {

// Adds to a decision that an entry with a reported stall is now complete, and which rank was last.
void report_end_of_stall(const OperationEntry& entry, Decision& decision);

// Adds the same for the reported stall of a join, once all members of the set have joined.
void report_end_of_stall(const ProcessSet& set, Nanoseconds now, Decision& decision);

class StallInspector {
 public:
  // Creates an inspector; a time of 0 disables the report or the deadline. `leaders`: as in Coordinator.
  StallInspector(Nanoseconds report_after, Nanoseconds deadline, std::vector<int32_t> leaders)
      : report_after_(report_after), deadline_(deadline), leaders_(std::move(leaders)) {}

  // Records that something began to wait.
  void begun(Nanoseconds now);

  // Records the answer of a rank that was asked what it is doing.
  void answered(StalledRankReport wait_report);

  // Returns a lower bound of the time at which inspect() has something to report.
  Nanoseconds next(const OperationTable& table, const ProcessSets& sets) const;

  // Adds to a decision everything that is due at this time.
  void inspect(Nanoseconds now, OperationTable& table, const ProcessSets& sets, const Groups& groups,
               const RankNames& names, Decision& decision);

 private:
  // One cause of a stall: the same ranks are missing in the same set.
  struct Cause {
    ProcessSet* set;
    RankBits missing;
    RankBits waiting;
    std::vector<OperationEntry*> entries;     // by the time of their first submission; none: the join waits
    Nanoseconds since;
    Nanoseconds next_report;         // 0: has not been reported
  };

  // The pending question to the missing ranks, and the answers so far.
  struct Inquiry {
    bool is_open = false;
    Nanoseconds until = 0;           // end of the wait for answers
    std::vector<int32_t> asked;
    std::vector<StalledRankReport> answers;
  };

  std::vector<Cause> find_causes(Nanoseconds now, OperationTable& table, const ProcessSets& sets,
                                 const Groups& groups) const;
  Stall describe(const Cause& cause, Nanoseconds now) const;
  // Returns the cause of a rank in a circle of ranks, each of which waits for an operation that the next has not
  // submitted; nullptr without a circle.
  const Cause* find_circle(const std::vector<Cause>& causes, Nanoseconds now) const;
  void end(const Cause& cause, const char* why, Nanoseconds now, const RankNames& names, Decision& decision);
  Nanoseconds due(const Cause& cause) const;
  bool is_awaiting(Nanoseconds now) const;
  void ask(const std::vector<Cause>& causes, Nanoseconds now, Decision& decision);
  void report(Cause& cause, Nanoseconds now, Decision& decision);

  Nanoseconds report_after_;
  Nanoseconds deadline_;
  std::vector<int32_t> leaders_;     // by rank
  Nanoseconds next_report_ = never;
  Inquiry inquiry_;
  bool is_over_ = false;             // the job ends
};

}  // namespace sirtaki
