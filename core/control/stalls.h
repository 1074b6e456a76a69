// Who keeps whom waiting, and when to say so.
#pragma once

#include "control/groups.h"
#include "control/messages.h"
#include "control/pending.h"
#include "control/process_sets.h"
#include "control/validation.h"

namespace sirtaki {

class StallWatch {
 public:
  // Zero for either: never.
  StallWatch(Nanoseconds report_after, Nanoseconds deadline) : report_after_(report_after), deadline_(deadline) {}

  // Something began to wait.
  void begun(Nanoseconds now);

  // A lower bound of when look() has something to say.
  Nanoseconds next(const EntryTable& table, const ProcessSets& sets) const;

  // Adds what is to be said at this time to a decision.
  void look(Nanoseconds now, EntryTable& table, const ProcessSets& sets, const Groups& groups, const RankNames& names,
            Decision& decision);

 private:
  // One reason for which requests wait: the same ranks are missing in the same set.
  struct Cause {
    ProcessSet* set;
    RankBits missing;
    RankBits waiting;
    std::vector<Entry*> entries;     // by the time of their first submission; none: the join waits
    Nanoseconds since;
    Nanoseconds next_report;         // 0: has not been reported
  };

  static std::vector<Cause> find_causes(EntryTable& table, const ProcessSets& sets, const Groups& groups);
  static Stall describe(const Cause& cause, Nanoseconds now);
  void report(Cause& cause, Nanoseconds now, Decision& decision);

  Nanoseconds report_after_;
  Nanoseconds deadline_;
  Nanoseconds next_report_ = never;
  bool is_over_ = false;             // the deadline has been told
};

}  // namespace sirtaki
