// The internals of a Negotiator, in two halves: outgoing reports (negotiator.cc), incoming Decisions
// (negotiator_apply.cc).
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/messages/messages.h"
#include "control/rank/negotiator.h"

namespace sirtaki {

// One (process set, kind, name) that is cached, in flight on this rank, or both.
struct NegotiatorOperation {
  enum class Stage : uint8_t { idle, queued, reported, reported_by_id };

  OperationKey key() const { return {process_set, kind, name}; }
  bool is_reported() const { return stage == Stage::reported || stage == Stage::reported_by_id; }
  bool is_needed() const { return stage != Stage::idle || id != 0; }

  int32_t process_set;
  Kind kind;
  std::string name;
  Stage stage = Stage::idle;
  bool is_in_sweep = false;
  Request request;                   // in flight unless the stage is idle
  CacheId id = 0;
  SignaturePtr cached;
  std::vector<int64_t> rows;
};

struct NegotiatorSet {
  bool has_something_queued() const { return !queue.empty() || !paced.empty() || join_is_queued; }

  // Returns the time before which nothing is due: that of the next portion if nothing else is queued.
  Nanoseconds gate() const { return queue.empty() && !paced.empty() ? next_portion : 0; }

  int32_t number;
  std::vector<int32_t> members;
  size_t position = 0;               // this rank's index among the members
  bool is_member = false;
  std::vector<NegotiatorOperation*> queue;
  std::vector<NegotiatorOperation*> paced;  // requests with a priority, the highest first
  int64_t queued_bytes = 0;                 // of both
  Nanoseconds next_portion = 0;             // the time before which no more paced requests are reported
  Nanoseconds queued_since = never;
  bool is_flushed = false;
  int32_t unfinished_plans = 0;
  Ticket join_ticket = 0;            // 0: this rank has not joined
  bool join_is_queued = false;
};

struct Negotiator::State {
  State(int32_t own_rank, int32_t size, ReportRule report_rule, uint32_t cache_capacity)
      : rank(own_rank), rule(report_rule), cache(cache_capacity) {
    std::vector<int32_t> world(static_cast<size_t>(size));
    for (int32_t i = 0; i < size; ++i) world[static_cast<size_t>(i)] = i;
    add_set(world_set, std::move(world));
  }

  void add_set(int32_t number, std::vector<int32_t> members);
  NegotiatorSet* find_set(int32_t number);
  bool is_withheld(const NegotiatorSet& set) const { return set.unfinished_plans >= rule.plans_in_flight; }

  NegotiatorOperation& find_or_create(const OperationKey& key);
  NegotiatorOperation* find(const OperationKey& key);
  void sweep_later(NegotiatorOperation& operation);
  void sweep();
  Ticket take_ticket(NegotiatorOperation& operation);

  void report_operation(NegotiatorOperation& operation, const NegotiatorSet& set);
  void report_queue(NegotiatorSet& set, Nanoseconds now);
  void report_portion(NegotiatorSet& set, Nanoseconds now);

  Status apply_settings(Outcome& outcome);
  Status apply_plans(Outcome& outcome);
  Status apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome);
  Status look_up(PlanItem item, const NegotiatorSet& set, PlannedTensor& tensor) const;
  Status take_part(PlanItem item, const NegotiatorSet& set, PlannedTensor& tensor);
  Status miss(PlanItem item, NegotiatorSet& set, PlannedTensor& tensor, Outcome& outcome);
  NegotiatorOperation* operation_of(PlanItem item) const;
  Status apply_refusals(Outcome& outcome);
  Status apply_cache_changes();
  Status apply_joins(Outcome& outcome);
  Status apply_set_changes(Outcome& outcome);
  Status apply_stalls(Outcome& outcome);
  void remove_set(NegotiatorSet& set, Outcome& outcome);
  bool are_ranks(const std::vector<int32_t>& numbers) const;

  int32_t rank;
  ReportRule rule;
  int64_t chunk_bytes = 0;           // of the next plans
  CacheTable<NegotiatorOperation> cache;
  std::vector<std::unique_ptr<NegotiatorSet>> sets;  // by number
  std::unordered_map<OperationKey, std::unique_ptr<NegotiatorOperation>, OperationKeyHash> operations;
  std::vector<NegotiatorOperation*> resend;          // operations reported by an id that has been retired since
  uint32_t lapsed = 0;
  uint64_t last_decision = 0;
  uint64_t last_plan = 0;                  // across all process sets
  std::optional<StalledRankReport> answer;       // for the next report
  std::vector<Reported> reported;
  Report report;                           // members from here on are kept for their memory
  Decision decision;
  std::vector<NegotiatorOperation*> response_operations;
  std::vector<NegotiatorOperation*> to_sweep;
};

}  // namespace sirtaki
