// Who keeps whom waiting, and when to say so.
//
// When something has waited for too long, the missing ranks are asked where they are, through a Decision; sirtaki's
// own thread answers there, whatever the program does. Once all have answered, or a second later, it is said who waits
// for what, and what the missing ones do instead.
#pragma once

#include <vector>

#include "control/groups.h"
#include "control/messages.h"
#include "control/pending.h"
#include "control/process_sets.h"
#include "control/validation.h"

namespace sirtaki {

// Adds to a decision that an entry whose stall was reported is complete now, and which rank came last.
void tell_end_of_stall(const Entry& entry, Decision& decision);

// The same for a reported stall of a join, once all members of the set have joined.
void tell_end_of_stall(const ProcessSet& set, Nanoseconds now, Decision& decision);

class StallWatch {
 public:
  // Zero for either: never. leaders: as in the coordinator.
  StallWatch(Nanoseconds report_after, Nanoseconds deadline, std::vector<int32_t> leaders)
      : report_after_(report_after), deadline_(deadline), leaders_(std::move(leaders)) {}

  // Something began to wait.
  void begun(Nanoseconds now);

  // A rank that was asked says where it is.
  void answered(Whereabouts whereabouts);

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

  // The question that is out, and what is known of where the missing ranks are.
  struct Inquiry {
    bool is_open = false;
    Nanoseconds until = 0;           // later answers are not awaited
    std::vector<int32_t> asked;
    std::vector<Whereabouts> answers;
  };

  static std::vector<Cause> find_causes(EntryTable& table, const ProcessSets& sets, const Groups& groups);
  Stall describe(const Cause& cause, Nanoseconds now) const;
  Nanoseconds due(const Cause& cause) const;
  bool is_awaiting(Nanoseconds now) const;
  void ask(const std::vector<Cause>& causes, Nanoseconds now, Decision& decision);
  void report(Cause& cause, Nanoseconds now, Decision& decision);

  Nanoseconds report_after_;
  Nanoseconds deadline_;
  std::vector<int32_t> leaders_;     // by rank
  Nanoseconds next_report_ = never;
  Inquiry inquiry_;
  bool is_over_ = false;             // the deadline has been told
};

}  // namespace sirtaki
