#include "control/member.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "control/messages.h"

namespace sirtaki {
namespace {

Status nonsense(const std::string& what) {
  return Status(SRT_PROTOCOL, "the coordinator's decision makes no sense here: " + what);
}

// One (process set, kind, name) that is cached, in flight here, or both.
struct Operation {
  enum class Phase : uint8_t { idle, queued, reported, reported_by_id };

  OperationKey key() const { return {process_set, kind, name}; }
  bool is_reported() const { return phase == Phase::reported || phase == Phase::reported_by_id; }
  bool is_needed() const { return phase != Phase::idle || id != 0; }

  int32_t process_set;
  Kind kind;
  std::string name;
  Phase phase = Phase::idle;
  bool is_in_sweep = false;
  Request request;                   // in flight unless idle
  CacheId id = 0;
  SignaturePtr cached;
  std::vector<int64_t> first_dimensions;
};

struct MemberSet {
  bool has_something_queued() const { return !queue.empty() || join_is_queued; }

  int32_t number;
  std::vector<int32_t> members;
  size_t position = 0;               // of this rank among the members
  bool is_member = false;
  std::vector<Operation*> queue;
  int64_t queued_bytes = 0;
  Nanoseconds queued_since = never;
  bool is_flushed = false;
  int32_t unfinished_plans = 0;
  Ticket join_ticket = 0;            // 0: has not joined
  bool join_is_queued = false;
};

bool moves_data(Kind kind) { return kind != Kind::add_process_set && kind != Kind::remove_process_set; }

}  // namespace

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

  Operation& find_or_create(const OperationKey& key);
  Operation* find(const OperationKey& key);
  void sweep_later(Operation& operation);
  void sweep();
  Ticket take_ticket(Operation& operation);

  void report_operation(Operation& operation, size_t position);
  void report_queue(MemberSet& set);

  Status apply_plans(Outcome& outcome);
  Status apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome);
  Operation* operation_of(PlanItem item) const;
  Status apply_refusals(Outcome& outcome);
  Status apply_cache_changes();
  Status apply_joins(Outcome& outcome);
  Status apply_set_changes(Outcome& outcome);
  void remove_set(MemberSet& set, Outcome& outcome);

  int32_t rank;
  ReportRule rule;
  CacheTable<Operation> cache;
  std::vector<std::unique_ptr<MemberSet>> sets;  // by number
  std::unordered_map<OperationKey, std::unique_ptr<Operation>, OperationKeyHash> operations;
  std::vector<Operation*> resend;          // reported by an id that was retired meanwhile
  uint32_t lapsed = 0;
  uint64_t last_decision = 0;
  Report report;                           // these four are kept for their memory
  Decision decision;
  std::vector<Operation*> response_operations;
  std::vector<Operation*> to_sweep;
};

void Member::State::add_set(int32_t number, std::vector<int32_t> members) {
  auto set = std::make_unique<MemberSet>();
  const auto own = std::lower_bound(members.begin(), members.end(), rank);
  set->number = number;
  set->is_member = own != members.end() && *own == rank;
  set->position = static_cast<size_t>(own - members.begin());
  set->members = std::move(members);
  sets.push_back(std::move(set));
}

MemberSet* Member::State::find_set(int32_t number) {
  if (number == world_set) return sets.front().get();
  const auto found = std::lower_bound(sets.begin(), sets.end(), number,
                                      [](const auto& set, int32_t wanted) { return set->number < wanted; });
  return found != sets.end() && (*found)->number == number ? found->get() : nullptr;
}

Operation* Member::State::find(const OperationKey& key) {
  const auto found = operations.find(key);
  return found == operations.end() ? nullptr : found->second.get();
}

Operation& Member::State::find_or_create(const OperationKey& key) {
  if (Operation* found = find(key)) return *found;
  auto operation = std::make_unique<Operation>();
  operation->process_set = key.process_set;
  operation->kind = key.kind;
  operation->name = key.name;
  Operation& created = *operation;
  operations.emplace(created.key(), std::move(operation));
  return created;
}

void Member::State::sweep_later(Operation& operation) {
  if (operation.is_in_sweep) return;
  operation.is_in_sweep = true;
  to_sweep.push_back(&operation);
}

// Forgets the operations that are neither cached nor in flight any more.
void Member::State::sweep() {
  for (Operation* operation : to_sweep) {
    operation->is_in_sweep = false;
    if (!operation->is_needed()) operations.erase(operation->key());
  }
  to_sweep.clear();
}

Ticket Member::State::take_ticket(Operation& operation) {
  const Ticket ticket = operation.request.ticket;
  operation.phase = Operation::Phase::idle;
  operation.request = {};
  if (!operation.id) sweep_later(operation);
  return ticket;
}

void Member::State::report_operation(Operation& operation, size_t position) {
  const Request& request = operation.request;
  if (operation.id && answers(*operation.cached, operation.first_dimensions, *request.signature, position)) {
    (request.absent ? report.absent : report.present).push_back(operation.id);
    operation.phase = Operation::Phase::reported_by_id;
  } else {
    report.full_requests.push_back({request.signature, request.absent});
    operation.phase = Operation::Phase::reported;
  }
}

void Member::State::report_queue(MemberSet& set) {
  for (Operation* operation : set.queue) report_operation(*operation, set.position);
  if (set.join_is_queued) report.joined.push_back(set.number);
  set.queue.clear();
  set.join_is_queued = false;
  set.queued_bytes = 0;
  set.queued_since = never;
  set.is_flushed = false;
}

Status Member::State::apply_plans(Outcome& outcome) {
  response_operations.clear();
  for (const Response& response : decision.responses) {
    response_operations.push_back(&find_or_create(key_of(*response.signature)));
    sweep_later(*response_operations.back());
  }
  for (size_t i = 0; i < decision.plans.size(); ++i) {
    SIRTAKI_TRY(apply_plan(decision.plans[i], decision.first_plan + i, outcome));
  }
  return {};
}

Operation* Member::State::operation_of(PlanItem item) const {
  if (!(item & is_response)) return cache.find(item);
  const PlanItem place = item & ~is_response;
  return place < response_operations.size() ? response_operations[place] : nullptr;
}

Status Member::State::apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome) {
  MemberSet* set = find_set(decided.process_set);
  if (!set || decided.items.empty()) return nonsense("a plan of an unknown process set, or an empty one");
  if (!set->is_member) return {};
  Plan& plan = outcome.plans.emplace_back();
  plan.number = number;
  plan.process_set = set->number;
  plan.members = set->members;
  plan.contributors = decided.contributors;
  plan.untouched = decided.untouched;
  plan.tensors.reserve(decided.items.size());
  for (PlanItem item : decided.items) {
    Operation* operation = operation_of(item);
    if (!operation || operation->process_set != set->number) return nonsense("a plan with an unknown tensor");
    PlannedTensor& tensor = plan.tensors.emplace_back();
    if (item & is_response) {
      const Response& response = decision.responses[item & ~is_response];
      tensor.signature = response.signature;
      tensor.first_dimensions = response.first_dimensions;
    } else {
      tensor.signature = operation->cached;
      tensor.first_dimensions = operation->first_dimensions;
    }
    if (operation->is_reported()) {
      tensor.ticket = take_ticket(*operation);
    } else if (!set->join_ticket || operation->phase != Operation::Phase::idle) {
      return nonsense("a plan with '" + operation->name + "', which this rank has not submitted");
    }
  }
  plan.kind = plan.tensors.front().signature->kind;
  ++set->unfinished_plans;
  return {};
}

Status Member::State::apply_refusals(Outcome& outcome) {
  for (const DecidedRefusal& refusal : decision.refusals) {
    if (!std::binary_search(refusal.ranks.begin(), refusal.ranks.end(), rank)) continue;
    Ticket ticket = 0;
    if (refusal.name.empty()) {
      MemberSet* set = find_set(refusal.process_set);
      if (!set || !set->join_ticket) return nonsense("it refuses a join that this rank has not asked for");
      ticket = std::exchange(set->join_ticket, 0);
    } else {
      Operation* operation = find({refusal.process_set, refusal.kind, refusal.name});
      if (!operation || !operation->is_reported()) {
        return nonsense("it refuses '" + refusal.name + "', which this rank has not submitted");
      }
      ticket = take_ticket(*operation);
    }
    outcome.refusals.push_back({ticket, Status(refusal.code, refusal.text)});
  }
  return {};
}

// Retired ids first: a new entry may take a retired one's slot. The coordinator never retires what it knows to be
// pending, so whatever was reported by a retired id has not reached it, and will mean nothing when it does.
Status Member::State::apply_cache_changes() {
  for (CacheId id : decision.retired) {
    Operation* operation = cache.find(id);
    if (!operation) return nonsense("it retires an unknown cache id");
    cache.remove(id);
    operation->id = 0;
    operation->cached.reset();
    operation->first_dimensions.clear();
    sweep_later(*operation);
    if (operation->phase != Operation::Phase::reported_by_id) continue;
    operation->phase = Operation::Phase::queued;
    resend.push_back(operation);
    ++lapsed;
  }
  for (size_t i = 0; i < decision.responses.size(); ++i) {
    Response& response = decision.responses[i];
    if (!response.id) continue;
    Operation& operation = *response_operations[i];
    if (operation.id || !cache.put(response.id, &operation)) return nonsense("a cache id is in use");
    operation.id = response.id;
    operation.cached = std::move(response.signature);
    operation.first_dimensions = std::move(response.first_dimensions);
  }
  return {};
}

Status Member::State::apply_joins(Outcome& outcome) {
  for (const DecidedJoin& join : decision.joins) {
    MemberSet* set = find_set(join.process_set);
    if (!set) return nonsense("a join of an unknown process set");
    if (!set->is_member) continue;
    if (!set->join_ticket) return nonsense("a join that this rank has not asked for");
    outcome.joins.push_back({set->number, std::exchange(set->join_ticket, 0), join.last_rank});
  }
  return {};
}

Status Member::State::apply_set_changes(Outcome& outcome) {
  for (DecidedSetChange& change : decision.set_changes) {
    const bool is_added = !change.members.empty();
    MemberSet* set = find_set(change.process_set);
    if (is_added ? change.process_set <= sets.back()->number : !set || set->number == world_set) {
      return nonsense("a process set that it adds exists, or one that it removes does not");
    }
    const Kind kind = is_added ? Kind::add_process_set : Kind::remove_process_set;
    Operation* operation = find({world_set, kind, change.name});
    const Ticket ticket = operation && operation->is_reported() ? take_ticket(*operation) : 0;
    outcome.process_sets.push_back({ticket, change.process_set, change.members});
    if (is_added) {
      add_set(change.process_set, std::move(change.members));
    } else {
      remove_set(*set, outcome);
    }
  }
  return {};
}

// What the coordinator has not heard of yet ends here: its reports will be ignored there.
void Member::State::remove_set(MemberSet& set, Outcome& outcome) {
  const size_t first = outcome.refusals.size();
  const auto refuse = [&](Ticket ticket, const std::string& what) {
    outcome.refusals.push_back({ticket, Status(SRT_INVALID_ARGUMENT, format("process set %d was removed before %s took "
                                                                            "place", set.number, what.c_str()))});
  };
  for (auto& [key, operation] : operations) {
    if (operation->process_set != set.number || operation->phase == Operation::Phase::idle) continue;
    refuse(take_ticket(*operation), "'" + operation->name + "'");
  }
  std::sort(outcome.refusals.begin() + static_cast<std::ptrdiff_t>(first), outcome.refusals.end(),
            [](const Refusal& a, const Refusal& b) { return a.ticket < b.ticket; });
  if (set.join_ticket) refuse(set.join_ticket, "the join");
  std::erase_if(resend, [&](const Operation* operation) { return operation->process_set == set.number; });
  std::erase_if(sets, [&](const auto& other) { return other.get() == &set; });
}

Member::Member(int32_t rank, int32_t size, ReportRule rule, uint32_t cache_capacity)
    : state_(std::make_unique<State>(rank, size, rule, cache_capacity)) {}

Member::~Member() = default;

void Member::submit(Request request, Nanoseconds now) {
  MemberSet* set = state_->find_set(request.signature->process_set);
  if (!set) return;
  Operation& operation = state_->find_or_create(key_of(*request.signature));
  if (moves_data(operation.kind)) set->queued_bytes += request.signature->bytes();
  operation.request = std::move(request);
  operation.phase = Operation::Phase::queued;
  set->queue.push_back(&operation);
  set->queued_since = std::min(set->queued_since, now);
}

void Member::join(int32_t process_set, Ticket ticket, Nanoseconds now) {
  MemberSet* set = state_->find_set(process_set);
  if (!set) return;
  set->join_ticket = ticket;
  set->join_is_queued = true;
  set->queued_since = std::min(set->queued_since, now);
}

void Member::flush() {
  for (auto& set : state_->sets) set->is_flushed |= set->has_something_queued();
}

Nanoseconds Member::report_due() const {
  if (state_->lapsed) return 0;
  Nanoseconds first = never;
  int64_t bytes = 0;
  for (const auto& set : state_->sets) {
    if (!set->has_something_queued() || state_->is_withheld(*set)) continue;
    if (set->is_flushed) return 0;
    bytes += set->queued_bytes;
    first = std::min(first, set->queued_since);
  }
  if (first == never) return never;
  return bytes >= state_->rule.bytes ? 0 : first + state_->rule.window;
}

void Member::report(Bytes& out) {
  Report& report = state_->report;
  report.clear();
  report.last_decision = state_->last_decision;
  report.lapsed = std::exchange(state_->lapsed, 0);
  for (Operation* operation : state_->resend) {
    state_->report_operation(*operation, state_->find_set(operation->process_set)->position);
  }
  state_->resend.clear();
  for (auto& set : state_->sets) {
    if (set->has_something_queued() && !state_->is_withheld(*set)) state_->report_queue(*set);
  }
  encode(report, out);
}

void Member::goodbye(Bytes& out) {
  Report& report = state_->report;
  report.clear();
  report.last_decision = state_->last_decision;
  report.goodbye = true;
  encode(report, out);
}

Status Member::apply(std::span<const uint8_t> decision, Outcome& outcome) {
  outcome = {};
  State& state = *state_;
  if (!decode(decision, state.decision)) return nonsense("its bytes are malformed");
  if (state.decision.number != state.last_decision + 1) {
    return nonsense(format("number %llu came after number %llu",
                           static_cast<unsigned long long>(state.decision.number),
                           static_cast<unsigned long long>(state.last_decision)));
  }
  state.last_decision = state.decision.number;
  SIRTAKI_TRY(state.apply_plans(outcome));
  SIRTAKI_TRY(state.apply_refusals(outcome));
  SIRTAKI_TRY(state.apply_cache_changes());
  SIRTAKI_TRY(state.apply_joins(outcome));
  SIRTAKI_TRY(state.apply_set_changes(outcome));
  state.sweep();
  outcome.stalls = std::move(state.decision.stalls);
  if (state.decision.fatal != SRT_OK) outcome.fatal = Status(state.decision.fatal, state.decision.fatal_text);
  return {};
}

void Member::plan_finished(int32_t process_set) {
  if (MemberSet* set = state_->find_set(process_set); set && set->unfinished_plans > 0) --set->unfinished_plans;
}

const std::vector<int32_t>* Member::members(int32_t process_set) const {
  const MemberSet* set = state_->find_set(process_set);
  return set ? &set->members : nullptr;
}

}  // namespace sirtaki
