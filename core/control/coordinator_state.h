// The coordinator's inside: reports come in (coordinator.cc), those of many ranks at once too (unrolling.cc), and
// decisions go out (settlement.cc).
#pragma once

#include "control/aggregate.h"
#include "control/coordinator.h"
#include "control/fusion.h"
#include "control/groups.h"
#include "control/lateness.h"
#include "control/messages.h"
#include "control/pending.h"
#include "control/process_sets.h"
#include "control/stalls.h"
#include "control/validation.h"

namespace sirtaki {

inline Status nonsense_report(const std::string& what) {
  return Status(SRT_PROTOCOL, "its report makes no sense here: " + what);
}

struct Coordinator::State {
  // What is known of one rank.
  struct Reporter {
    uint64_t last_decision = 0;
    int64_t lapsed = 0;                    // reported ids that had been retired and have not been accounted for yet
    bool has_finished = false;
    std::vector<int32_t> waiting_joins;    // sets whose join waits until nothing is lapsed
  };

  // One rank's request, by whichever way it came.
  struct Submission {
    int32_t rank;
    const SignaturePtr& signature;
    std::span<const int64_t> rows;         // of a ragged kind
    bool absent;
  };

  State(std::vector<std::string> rank_names, CoordinatorRules coordinator_rules, std::vector<int32_t> leaders);

  // Reports come in.
  Status merge(int32_t rank, Nanoseconds now);
  Status reach(int32_t rank, uint64_t last_decision);
  Status submit_by_id(int32_t rank, CacheId id, bool absent, Nanoseconds moment);
  Status submit_in_full(int32_t rank, const Report::FullRequest& request, Nanoseconds moment);
  Status submit(Entry& entry, const Submission& submission, Nanoseconds moment);
  bool propose(Entry& entry, const SignaturePtr& signature, Nanoseconds moment);
  void arrive(Entry& entry, const Arrivals& arrivals);
  Status take(int32_t rank, Remarks& remarks, Nanoseconds now);
  Status join(int32_t rank, int32_t process_set, Nanoseconds now);
  void finish(int32_t rank);
  void refuse_joins(const ProcessSet& set, std::vector<int32_t> ranks);
  void consider(Entry& entry);

  // Many ranks report at once.
  Status merge_many(Nanoseconds now);
  Status hear(const Aggregate::Speakers& by);
  Status submit_batch(const Aggregate::Batch& batch);
  Status submit_many_in_full(const Aggregate::FullRequest& request);
  Status submit_alike(Entry& entry, const SignaturePtr& signature, const Aggregate::Speakers& by);

  // Decisions go out.
  bool has_work(Nanoseconds now) const;
  void settle_everything(Nanoseconds now);
  void reconsider_changed_sets();
  void settle(Entry& entry);
  bool refuse_different_kinds(Entry& entry);
  void refuse(Entry& entry, const Status& cause);
  void plan_agreed(Nanoseconds now);
  PlanItem item_of(Entry& entry);
  void settle_joins(Nanoseconds now);
  void settle_set_changes();
  void drop_removed_sets();
  void empty_set(ProcessSet& set);
  void answer(Entry& entry);
  void close_answered();

  RankNames names;
  CoordinatorRules rules;
  ProcessSets sets;
  EntryTable table;
  Groups groups;
  StallWatch stalls;
  LatenessWatch lateness;
  std::vector<Reporter> reporters;         // by rank
  bool sets_have_changed = false;
  uint64_t decisions = 0;
  uint64_t plans = 0;

  Decision decision;                       // in the making
  std::vector<Entry*> candidates;          // something happened to them
  std::vector<Entry*> agreed;              // go into plans
  std::vector<Entry*> set_changes;         // agreed requests to add or remove sets
  std::vector<Entry*> answered;
  std::vector<ReadyEntry> ready;           // these are kept for their memory
  Report report;
  Aggregate aggregate;
  RankBits speakers, absentees;            // of the part of the aggregate that is merged
};

}  // namespace sirtaki
