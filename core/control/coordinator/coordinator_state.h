// The internals of the coordinator: reports (coordinator.cc), aggregates (coordinator_aggregate.cc), and Decisions
// (coordinator_decide.cc).
#pragma once

#include "control/coordinator/coordinator.h"
#include "control/coordinator/fusion.h"
#include "control/lateness/deadlines.h"
#include "control/lateness/lateness_tracker.h"
#include "control/lateness/stall_inspector.h"
#include "control/messages/aggregate.h"
#include "control/messages/messages.h"
#include "control/operations/groups.h"
#include "control/operations/operation_table.h"
#include "control/operations/process_sets.h"
#include "control/operations/validation.h"

namespace sirtaki {

struct Coordinator::State {
  // The coordinator's state of one rank.
  struct Reporter {
    uint64_t last_decision = 0;
    int64_t lapsed = 0;                    // reported ids that had been retired and are not accounted for yet
    bool has_finished = false;
    std::vector<int32_t> waiting_joins;    // sets whose join waits until `lapsed` is 0
  };

  // One rank's request, by id or in full.
  struct RankSubmission {
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
  Status submit(OperationEntry& entry, const RankSubmission& submission, Nanoseconds moment);
  bool propose(OperationEntry& entry, const SignaturePtr& signature, Nanoseconds moment);
  void arrive(OperationEntry& entry, const Arrivals& arrivals);
  Status take(int32_t rank, RankNotices& notices, Nanoseconds now);
  Status join(int32_t rank, int32_t process_set, Nanoseconds now);
  void finish(int32_t rank);
  void refuse_joins(const ProcessSet& set, std::vector<int32_t> ranks);
  void consider(OperationEntry& entry);

  // Incoming aggregates.
  Status merge_many(Nanoseconds now);
  Status read_senders(const Aggregate::Senders& by);
  Status submit_cached(const Aggregate::CachedRequests& batch);
  Status submit_many_in_full(const Aggregate::FullRequest& request);
  Status submit_alike(OperationEntry& entry, const SignaturePtr& signature, const Aggregate::Senders& by);

  // Outgoing decisions.
  bool has_work(Nanoseconds now) const;
  void settle_everything(Nanoseconds now);
  void pass_deadlines(Nanoseconds now);
  void reconsider_changed_sets();
  void settle(OperationEntry& entry);
  bool refuse_different_kinds(OperationEntry& entry);
  void refuse(OperationEntry& entry, const Status& cause);
  void plan_agreed(Nanoseconds now);
  PlanItem item_of(OperationEntry& entry);
  void settle_joins(Nanoseconds now);
  void settle_set_changes();
  void drop_removed_sets();
  void empty_set(ProcessSet& set);
  void answer(OperationEntry& entry);
  void close_answered();

  RankNames names;
  CoordinatorRules rules;
  ProcessSets sets;
  OperationTable table;
  Groups groups;
  Deadlines deadlines;
  StallInspector stalls;
  LatenessTracker lateness;
  std::vector<Reporter> reporters;         // by rank
  bool sets_have_changed = false;
  uint64_t decisions = 0;
  uint64_t plans = 0;

  Decision decision;                       // the Decision that is being made
  std::vector<OperationEntry*> candidates;          // entries that may be ready for a decision
  std::vector<OperationEntry*> agreed;              // entries that go into plans
  std::vector<OperationEntry*> set_changes;         // agreed requests to add or remove sets
  std::vector<OperationEntry*> answered;
  std::vector<ReadyEntry> ready;           // members from here on are kept for their memory
  Report report;
  Aggregate aggregate;
  RankBits senders, absentees;            // ranks of the part of the aggregate that is being merged
};

}  // namespace sirtaki
