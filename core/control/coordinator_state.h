// The internals of the coordinator: incoming reports (coordinator.cc), aggregates of many ranks (unrolling.cc), and
// outgoing decisions (settlement.cc).
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
  // The coordinator's state of one rank.
  struct Reporter {
    uint64_t last_decision = 0;
    int64_t lapsed = 0;                    // reported ids that had been retired and are not accounted for yet
    bool has_finished = false;
    std::vector<int32_t> waiting_joins;    // sets whose join waits until no id is lapsed
  };

  // One rank's request, by id or in full.
  struct Submission {
    int32_t rank;
    const SignaturePtr& signature;
    std::span<const int64_t> rows;         // ragged kinds only
    bool absent;
  };

  State(std::vector<std::string> rank_names, CoordinatorRules coordinator_rules, std::vector<int32_t> leaders);

  // Incoming reports.
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

  // Incoming aggregates.
  Status merge_many(Nanoseconds now);
  Status hear(const Aggregate::Speakers& by);
  Status submit_batch(const Aggregate::Batch& batch);
  Status submit_many_in_full(const Aggregate::FullRequest& request);
  Status submit_alike(Entry& entry, const SignaturePtr& signature, const Aggregate::Speakers& by);

  // Outgoing decisions.
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

  Decision decision;                       // the Decision being made
  std::vector<Entry*> candidates;          // entries that have changed
  std::vector<Entry*> agreed;              // entries that go into plans
  std::vector<Entry*> set_changes;         // agreed requests to add or remove sets
  std::vector<Entry*> answered;
  std::vector<ReadyEntry> ready;           // these are kept for their memory
  Report report;
  Aggregate aggregate;
  RankBits speakers, absentees;            // ranks of the part of the aggregate that is being merged
};

}  // namespace sirtaki
