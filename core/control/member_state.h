// The internals of a Member, in two halves: outgoing reports (member.cc), incoming decisions (member_apply.cc).
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/member.h"
#include "control/messages.h"

namespace sirtaki {

// One (process set, kind, name) that is cached, in flight on this rank, or both.
struct MemberOperation {
  enum class Phase : uint8_t { idle, queued, reported, reported_by_id };

  OperationKey key() const { return {process_set, kind, name}; }
  bool is_reported() const { return phase == Phase::reported || phase == Phase::reported_by_id; }
  bool is_needed() const { return phase != Phase::idle || id != 0; }

  int32_t process_set;
  Kind kind;
  std::string name;
  Phase phase = Phase::idle;
  bool is_in_sweep = false;
  Request request;                   // in flight unless the phase is idle
  CacheId id = 0;
  SignaturePtr cached;
  std::vector<int64_t> rows;
};

struct MemberSet {
  bool has_something_queued() const { return !queue.empty() || join_is_queued; }

  int32_t number;
  std::vector<int32_t> members;
  size_t position = 0;               // this rank's index among the members
  bool is_member = false;
  std::vector<MemberOperation*> queue;
  int64_t queued_bytes = 0;
  Nanoseconds queued_since = never;
  bool is_flushed = false;
  int32_t unfinished_plans = 0;
  Ticket join_ticket = 0;            // 0: this rank has not joined
  bool join_is_queued = false;
};

struct Member::State {
  State(int32_t own_rank, int32_t size, ReportRule report_rule, uint32_t cache_capacity)
      : rank(own_rank), rule(report_rule), cache(cache_capacity) {
    std::vector<int32_t> world(static_cast<size_t>(size));
    for (int32_t i = 0; i < size; ++i) world[static_cast<size_t>(i)] = i;
    add_set(world_set, std::move(world));
  }

  void add_set(int32_t number, std::vector<int32_t> members);
  MemberSet* find_set(int32_t number);
  bool is_withheld(const MemberSet& set) const { return set.unfinished_plans >= rule.plans_in_flight; }

  MemberOperation& find_or_create(const OperationKey& key);
  MemberOperation* find(const OperationKey& key);
  void sweep_later(MemberOperation& operation);
  void sweep();
  Ticket take_ticket(MemberOperation& operation);

  void report_operation(MemberOperation& operation, const MemberSet& set);
  void report_queue(MemberSet& set);

  Status apply_plans(Outcome& outcome);
  Status apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome);
  Status look_up(PlanItem item, const MemberSet& set, PlannedTensor& tensor) const;
  Status take_part(PlanItem item, const MemberSet& set, PlannedTensor& tensor);
  MemberOperation* operation_of(PlanItem item) const;
  Status apply_refusals(Outcome& outcome);
  Status apply_cache_changes();
  Status apply_joins(Outcome& outcome);
  Status apply_set_changes(Outcome& outcome);
  Status apply_stalls(Outcome& outcome);
  void remove_set(MemberSet& set, Outcome& outcome);
  bool are_ranks(const std::vector<int32_t>& numbers) const;

  int32_t rank;
  ReportRule rule;
  CacheTable<MemberOperation> cache;
  std::vector<std::unique_ptr<MemberSet>> sets;  // by number
  std::unordered_map<OperationKey, std::unique_ptr<MemberOperation>, OperationKeyHash> operations;
  std::vector<MemberOperation*> resend;          // operations reported by an id that was retired meanwhile
  uint32_t lapsed = 0;
  uint64_t last_decision = 0;
  uint64_t last_plan = 0;                  // across all process sets
  std::optional<Whereabouts> answer;       // for the next report
  std::vector<Reported> reported;
  Report report;                           // these four are kept for their memory
  Decision decision;
  std::vector<MemberOperation*> response_operations;
  std::vector<MemberOperation*> to_sweep;
};

}  // namespace sirtaki
