#include "control/rank/negotiator.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/messages/messages.h"
#include "control/operations/validation.h"

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

namespace {

bool is_more_urgent(const NegotiatorOperation* a, const NegotiatorOperation* b) {
  return a->request.signature->priority > b->request.signature->priority;
}

// Returns the total bytes of all members' rows; -1 if they overflow.
int64_t total_bytes(const Signature& signature, const std::vector<int64_t>& rows) {
  int64_t total = 0;
  for (int64_t count : rows)
    if (count < 0 || __builtin_add_overflow(total, count, &total)) return -1;
  return __builtin_mul_overflow(total, signature.row_bytes(), &total) ? -1 : total;
}

bool has(const std::vector<int32_t>& ascending, int32_t rank) {
  return std::binary_search(ascending.begin(), ascending.end(), rank);
}

// Returns whether one transfer can move both tensors: they must agree in everything that a transfer takes from its
// first tensor.
bool can_be_fused(const Signature& a, const Signature& b) {
  if (a.kind != b.kind) return false;
  if (traits(a.kind).is_of_a_pair) return std::minmax(a.root, a.destination) == std::minmax(b.root, b.destination);
  return a.root == b.root && (!reduces(a.kind) || (a.dtype == b.dtype && a.reduce_op == b.reduce_op));
}

// Returns whether a rank that has joined can take part with neutral elements: it contributes no rows, and nothing
// that the others need.
bool can_join_in(const PlannedTensor& tensor, const NegotiatorSet& set, int32_t rank) {
  const Signature& signature = *tensor.signature;
  if (traits(signature.kind).is_of_a_pair) return false;
  if (traits(signature.kind).has_root) return signature.root != rank;
  if (!is_ragged(signature.kind)) return true;
  const auto own = rows_at(signature, tensor.rows, set.members.size(), set.position);
  return std::all_of(own.begin(), own.end(), [](int64_t rows) { return rows == 0; });
}

// Returns whether the absentees of a plan are members, and not more than do not contribute.
bool are_absentees_of(const DecidedPlan& plan, const NegotiatorSet& set) {
  const auto& absentees = plan.absentees;
  const bool ascend = std::adjacent_find(absentees.begin(), absentees.end(), std::greater_equal()) == absentees.end();
  return ascend && std::includes(set.members.begin(), set.members.end(), absentees.begin(), absentees.end()) &&
         absentees.size() + static_cast<size_t>(plan.contributors) == set.members.size();
}

}  // namespace

void Negotiator::State::add_set(int32_t number, std::vector<int32_t> members) {
  auto set = std::make_unique<NegotiatorSet>();
  const auto own = std::lower_bound(members.begin(), members.end(), rank);
  set->number = number;
  set->is_member = own != members.end() && *own == rank;
  set->position = static_cast<size_t>(own - members.begin());
  set->members = std::move(members);
  sets.push_back(std::move(set));
}

NegotiatorSet* Negotiator::State::find_set(int32_t number) {
  if (number == world_set) return sets.front().get();
  const auto found = std::lower_bound(sets.begin(), sets.end(), number,
                                      [](const auto& set, int32_t wanted) { return set->number < wanted; });
  return found != sets.end() && (*found)->number == number ? found->get() : nullptr;
}

NegotiatorOperation* Negotiator::State::find(const OperationKey& key) {
  const auto found = operations.find(key);
  return found == operations.end() ? nullptr : found->second.get();
}

NegotiatorOperation& Negotiator::State::find_or_create(const OperationKey& key) {
  if (NegotiatorOperation* found = find(key)) return *found;
  auto operation = std::make_unique<NegotiatorOperation>();
  operation->process_set = key.process_set;
  operation->kind = key.kind;
  operation->name = key.name;
  NegotiatorOperation& created = *operation;
  operations.emplace(created.key(), std::move(operation));
  return created;
}

void Negotiator::State::sweep_later(NegotiatorOperation& operation) {
  if (operation.is_in_sweep) return;
  operation.is_in_sweep = true;
  to_sweep.push_back(&operation);
}

// Erases the operations that are no longer cached or in flight.
void Negotiator::State::sweep() {
  for (NegotiatorOperation* operation : to_sweep) {
    operation->is_in_sweep = false;
    if (!operation->is_needed()) operations.erase(operation->key());
  }
  to_sweep.clear();
}

Ticket Negotiator::State::take_ticket(NegotiatorOperation& operation) {
  const Ticket ticket = operation.request.ticket;
  operation.stage = NegotiatorOperation::Stage::idle;
  operation.request = {};
  if (!operation.id) sweep_later(operation);
  return ticket;
}

// ---- Outgoing reports -------------------------------------------------------------------------------------

void Negotiator::State::report_operation(NegotiatorOperation& operation, const NegotiatorSet& set) {
  const Request& request = operation.request;
  const bool by_id =
      operation.id && answers(*operation.cached, operation.rows, *request.signature, set.members.size(), set.position);
  reported.push_back({request.ticket, by_id});
  if (by_id) {
    (request.absent ? report.absent : report.present).push_back(operation.id);
    operation.stage = NegotiatorOperation::Stage::reported_by_id;
  } else {
    report.full_requests.push_back({request.signature, request.absent});
    operation.stage = NegotiatorOperation::Stage::reported;
  }
}

void Negotiator::State::report_queue(NegotiatorSet& set, Nanoseconds now) {
  for (NegotiatorOperation* operation : set.queue) report_operation(*operation, set);
  set.queue.clear();
  report_portion(set, now);
  set.queued_bytes = 0;
  for (const NegotiatorOperation* operation : set.paced) set.queued_bytes += operation->request.signature->bytes();
  if (!set.paced.empty()) {
    set.queued_since = now;
    return;  // a flush still holds, and a join comes after all requests
  }
  if (set.join_is_queued) report.joined.push_back(set.number);
  set.join_is_queued = false;
  set.queued_since = never;
  set.is_flushed = false;
}

// Reports requests of the highest priority until they fill a portion: one at least.
void Negotiator::State::report_portion(NegotiatorSet& set, Nanoseconds now) {
  if (set.paced.empty() || now < set.next_portion) return;
  int64_t bytes = 0;
  auto next = set.paced.begin();
  do {
    bytes += (*next)->request.signature->bytes();
    report_operation(**next++, set);
  } while (next != set.paced.end() && bytes + (*next)->request.signature->bytes() <= rule.portion);
  set.paced.erase(set.paced.begin(), next);
  set.next_portion = now + rule.window;
}

// ---- Incoming Decisions -----------------------------------------------------------------------------------

// Applies new settings before the plans of the same Decision, which need them.
Status Negotiator::State::apply_settings(Outcome& outcome) {
  const LiveValues& values = decision.settings;
  if (values.empty()) return {};
  if (values.size() != std::size(live_knobs)) return nonsense_decision("settings that do not exist");
  for (size_t i = 0; i < values.size(); ++i)
    if (!may_have(live_knobs[i], values[i])) return nonsense_decision("a setting out of bounds");
  rule.bytes = value_in(values, Knob::report_bytes);
  rule.window = value_in(values, Knob::report_window);
  chunk_bytes = value_in(values, Knob::chunk_bytes);
  outcome.settings = values;
  return {};
}

Status Negotiator::State::apply_plans(Outcome& outcome) {
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

NegotiatorOperation* Negotiator::State::operation_of(PlanItem item) const {
  if (!(item & is_response)) return cache.find(item);
  const PlanItem place = item & ~is_response;
  return place < response_operations.size() ? response_operations[place] : nullptr;
}

Status Negotiator::State::apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome) {
  NegotiatorSet* set = find_set(decided.process_set);
  if (!set || decided.items.empty()) return nonsense_decision("a plan of an unknown process set, or an empty one");
  if (number != last_plan + 1) return nonsense_decision("a plan out of order");
  last_plan = number;
  if (!set->is_member) return {};
  if (decided.contributors < 1 || decided.contributors > static_cast<int32_t>(set->members.size()))
    return nonsense_decision("a plan of nobody, or of more ranks than its process set has");
  Plan plan;
  plan.number = number;
  plan.process_set = set->number;
  plan.members = set->members;
  plan.contributors = decided.contributors;
  plan.untouched = decided.untouched;
  plan.chunk_bytes = chunk_bytes;
  plan.absentees = decided.absentees;
  if (!plan.absentees.empty() && (!are_absentees_of(decided, *set) || decided.items.size() != 1))
    return nonsense_decision("a plan without ranks that do not exist, or of several tensors");
  plan.tensors.resize(decided.items.size());
  for (size_t i = 0; i < decided.items.size(); ++i) {
    SIRTAKI_TRY(look_up(decided.items[i], *set, plan.tensors[i]));
    if (!can_be_fused(*plan.tensors[0].signature, *plan.tensors[i].signature))
      return nonsense_decision("a plan of tensors that do not go together");
  }
  const Signature& first = *plan.tensors[0].signature;
  plan.kind = first.kind;
  if (traits(plan.kind).is_of_a_pair) {
    if (rank != first.root && rank != first.destination) return {};
    plan.members = {std::min(first.root, first.destination), std::max(first.root, first.destination)};
  }
  if (has(plan.absentees, rank)) {
    SIRTAKI_TRY(miss(decided.items.front(), *set, plan.tensors.front(), outcome));
  } else {
    for (size_t i = 0; i < decided.items.size(); ++i) SIRTAKI_TRY(take_part(decided.items[i], *set, plan.tensors[i]));
  }
  outcome.plans.push_back(std::move(plan));
  ++set->unfinished_plans;
  return {};
}

// Resolves a plan's item to a tensor.
Status Negotiator::State::look_up(PlanItem item, const NegotiatorSet& set, PlannedTensor& tensor) const {
  const NegotiatorOperation* operation = operation_of(item);
  if (!operation || operation->process_set != set.number) return nonsense_decision("a plan with an unknown tensor");
  const bool is_new = item & is_response;
  const Response* response = is_new ? &decision.responses[item & ~is_response] : nullptr;
  tensor.signature = is_new ? response->signature : operation->cached;
  tensor.rows = is_new ? response->rows : operation->rows;
  const Signature& signature = *tensor.signature;
  if (changes_process_sets(signature.kind)) return nonsense_decision("a plan that changes process sets");
  const KindTraits& kind = traits(signature.kind);
  if (kind.has_root && !has(set.members, signature.root)) return nonsense_decision("a plan whose root is not a member");
  if (kind.is_of_a_pair && (!has(set.members, signature.destination) || signature.root == signature.destination))
    return nonsense_decision("a send to nobody");
  if (!is_ragged(signature.kind)) return {};
  const size_t expected = set.members.size() * row_counts_each(signature.kind, set.members.size());
  const bool is_sane =
      tensor.rows.size() == expected && !signature.shape.empty() && total_bytes(signature, tensor.rows) >= 0;
  return is_sane ? Status() : nonsense_decision("a plan without the rows of each member");
}

// Takes this rank's own request for a tensor, if it has not joined. The plan must match the request, whose memory is
// no larger than its own tensor.
Status Negotiator::State::take_part(PlanItem item, const NegotiatorSet& set, PlannedTensor& tensor) {
  NegotiatorOperation& operation = *operation_of(item);
  if (operation.is_reported()) {
    const Signature& own = *operation.request.signature;
    const bool was_compared = operation.stage == NegotiatorOperation::Stage::reported_by_id && !(item & is_response);
    if (!was_compared && !answers(*tensor.signature, tensor.rows, own, set.members.size(), set.position))
      return nonsense_decision("a plan with another '" + operation.name + "' than this rank has submitted");
    tensor.ticket = take_ticket(operation);
  } else if (!set.join_ticket || operation.stage != NegotiatorOperation::Stage::idle ||
             !can_join_in(tensor, set, rank)) {
    return nonsense_decision("a plan with '" + operation.name + "', which this rank has not submitted");
  }
  return {};
}

// Takes part in a round that was decided without this rank. If its request is on its way, the request receives the
// result; otherwise the result is kept for it.
Status Negotiator::State::miss(PlanItem item, NegotiatorSet& set, PlannedTensor& tensor, Outcome& outcome) {
  if (!tensor.signature->deadline) return nonsense_decision("a plan without this rank, but without a deadline");
  NegotiatorOperation& operation = *operation_of(item);
  if (operation.stage == NegotiatorOperation::Stage::idle) {
    tensor.is_kept = true;
    return {};
  }
  if (operation.stage == NegotiatorOperation::Stage::queued) {
    std::erase(set.queue, &operation);
    std::erase(set.paced, &operation);
  }
  const SignaturePtr own = operation.request.signature;
  const Ticket ticket = take_ticket(operation);
  if (agree(*tensor.signature, *own)) tensor.ticket = ticket;
  else outcome.refusals.push_back({ticket, decided_differently(*tensor.signature, *own)});
  return {};
}

Status Negotiator::State::apply_refusals(Outcome& outcome) {
  for (const DecidedRefusal& refusal : decision.refusals) {
    if (!std::binary_search(refusal.ranks.begin(), refusal.ranks.end(), rank)) continue;
    Ticket ticket = 0;
    if (refusal.name.empty()) {
      NegotiatorSet* set = find_set(refusal.process_set);
      if (!set || !set->join_ticket) return nonsense_decision("it refuses a join that this rank has not asked for");
      ticket = std::exchange(set->join_ticket, 0);
    } else {
      NegotiatorOperation* operation = find({refusal.process_set, refusal.kind, refusal.name});
      if (!operation || !operation->is_reported()) {
        return nonsense_decision("it refuses '" + refusal.name + "', which this rank has not submitted");
      }
      ticket = take_ticket(*operation);
    }
    outcome.refusals.push_back({ticket, Status(refusal.code, refusal.text)});
  }
  return {};
}

// Applies the cache changes, retired ids first, because a new entry may reuse a retired slot. The coordinator never
// retires an entry that is pending there, so a request that was reported by a retired id has not reached it, and will
// be ignored when it does.
Status Negotiator::State::apply_cache_changes() {
  for (CacheId id : decision.retired) {
    NegotiatorOperation* operation = cache.find(id);
    if (!operation) return nonsense_decision("it retires an unknown cache id");
    cache.remove(id);
    operation->id = 0;
    operation->cached.reset();
    operation->rows.clear();
    sweep_later(*operation);
    if (operation->stage != NegotiatorOperation::Stage::reported_by_id) continue;
    operation->stage = NegotiatorOperation::Stage::queued;
    resend.push_back(operation);
    ++lapsed;
  }
  for (size_t i = 0; i < decision.responses.size(); ++i) {
    Response& response = decision.responses[i];
    if (!response.id) continue;
    NegotiatorOperation& operation = *response_operations[i];
    if (operation.id || !cache.put(response.id, &operation)) return nonsense_decision("a cache id is in use");
    operation.id = response.id;
    operation.cached = std::move(response.signature);
    operation.rows = std::move(response.rows);
  }
  return {};
}

Status Negotiator::State::apply_joins(Outcome& outcome) {
  for (const DecidedJoin& join : decision.joins) {
    NegotiatorSet* set = find_set(join.process_set);
    if (!set) return nonsense_decision("a join of an unknown process set");
    if (!set->is_member) continue;
    if (!set->join_ticket) return nonsense_decision("a join that this rank has not asked for");
    outcome.joins.push_back({set->number, std::exchange(set->join_ticket, 0), join.last_rank});
  }
  return {};
}

Status Negotiator::State::apply_set_changes(Outcome& outcome) {
  for (DecidedSetChange& change : decision.set_changes) {
    const bool is_added = !change.members.empty();
    NegotiatorSet* set = find_set(change.process_set);
    if (is_added ? change.process_set <= sets.back()->number : !set || set->number == world_set) {
      return nonsense_decision("a process set that it adds exists, or one that it removes does not");
    }
    const auto& members = change.members;
    if (!are_ranks(members) ||
        std::adjacent_find(members.begin(), members.end(), std::greater_equal()) != members.end())
      return nonsense_decision("a process set of other ranks than there are");
    const Kind kind = is_added ? Kind::add_process_set : Kind::remove_process_set;
    NegotiatorOperation* operation = find({world_set, kind, change.name});
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

bool Negotiator::State::are_ranks(const std::vector<int32_t>& numbers) const {
  const auto size = static_cast<int32_t>(sets.front()->members.size());
  return std::all_of(numbers.begin(), numbers.end(), [&](int32_t number) { return number >= 0 && number < size; });
}

Status Negotiator::State::apply_stalls(Outcome& outcome) {
  for (Stall& stall : decision.stalls) {
    std::vector<int32_t> told;
    for (const StalledRankReport& one : stall.rank_reports) {
      told.push_back(one.rank);
      if (one.leader != -1) told.push_back(one.leader);
    }
    if (!are_ranks(stall.missing) || !are_ranks(stall.waiting) || !are_ranks(told))
      return nonsense_decision("ranks that are late, but do not exist");
    outcome.stalls.push_back(std::move(stall));
  }
  return {};
}

// Removes a set, and refuses the requests that the coordinator has not received yet, because it will ignore their
// reports.
void Negotiator::State::remove_set(NegotiatorSet& set, Outcome& outcome) {
  const size_t first = outcome.refusals.size();
  const auto refuse = [&](Ticket ticket, const std::string& what) {
    const std::string text = format("process set %d was removed before %s took place", set.number, what.c_str());
    outcome.refusals.push_back({ticket, Status(SRT_INVALID_ARGUMENT, text)});
  };
  for (auto& [key, operation] : operations) {
    if (operation->process_set != set.number || operation->stage == NegotiatorOperation::Stage::idle) continue;
    refuse(take_ticket(*operation), "'" + operation->name + "'");
  }
  std::sort(outcome.refusals.begin() + static_cast<std::ptrdiff_t>(first), outcome.refusals.end(),
            [](const Refusal& a, const Refusal& b) { return a.ticket < b.ticket; });
  if (set.join_ticket) refuse(set.join_ticket, "the join");
  std::erase_if(resend, [&](const NegotiatorOperation* operation) { return operation->process_set == set.number; });
  std::erase_if(sets, [&](const auto& other) { return other.get() == &set; });
}

// ---- The interface ----------------------------------------------------------------------------------------

Negotiator::Negotiator(int32_t rank, int32_t size, ReportRule rule, uint32_t cache_capacity)
    : state_(std::make_unique<State>(rank, size, rule, cache_capacity)) {}

Negotiator::~Negotiator() = default;

void Negotiator::submit(Request request, Nanoseconds now) {
  NegotiatorSet* set = state_->find_set(request.signature->process_set);
  if (!set) return;
  NegotiatorOperation& operation = state_->find_or_create(key_of(*request.signature));
  if (!changes_process_sets(operation.kind)) set->queued_bytes += request.signature->bytes();
  operation.request = std::move(request);
  operation.stage = NegotiatorOperation::Stage::queued;
  if (operation.request.signature->priority > 0) {
    set->paced.insert(std::upper_bound(set->paced.begin(), set->paced.end(), &operation, is_more_urgent), &operation);
  } else {
    set->queue.push_back(&operation);
  }
  set->queued_since = std::min(set->queued_since, now);
}

void Negotiator::join(int32_t process_set, Ticket ticket, Nanoseconds now) {
  NegotiatorSet* set = state_->find_set(process_set);
  if (!set) return;
  set->join_ticket = ticket;
  set->join_is_queued = true;
  set->queued_since = std::min(set->queued_since, now);
}

uint64_t Negotiator::last_decision() const { return state_->last_decision; }

void Negotiator::answer(StalledRankReport wait_report) { state_->answer = std::move(wait_report); }

void Negotiator::flush() {
  for (auto& set : state_->sets) set->is_flushed |= set->has_something_queued();
}

Nanoseconds Negotiator::report_due() const {
  if (state_->lapsed || state_->answer) return 0;
  const ReportRule& rule = state_->rule;
  Nanoseconds due = never, earliest = never;
  int64_t bytes = 0;
  for (const auto& set : state_->sets) {
    if (!set->has_something_queued() || state_->is_withheld(*set)) continue;
    const Nanoseconds gate = set->gate();
    bytes += set->queued_bytes;
    earliest = std::min(earliest, gate);
    due = std::min(due, set->is_flushed ? gate : std::max(gate, set->queued_since + rule.window));
  }
  return bytes >= rule.bytes ? std::min(due, earliest) : due;
}

void Negotiator::report(Nanoseconds now, Bytes& out) {
  Report& report = state_->report;
  report.clear();
  state_->reported.clear();
  report.last_decision = state_->last_decision;
  report.lapsed = std::exchange(state_->lapsed, 0);
  report.wait_report = std::exchange(state_->answer, std::nullopt);
  for (NegotiatorOperation* operation : state_->resend) {
    state_->report_operation(*operation, *state_->find_set(operation->process_set));
  }
  state_->resend.clear();
  for (auto& set : state_->sets) {
    if (set->has_something_queued() && !state_->is_withheld(*set)) state_->report_queue(*set, now);
  }
  encode(report, out);
}

const std::vector<Negotiator::Reported>& Negotiator::reported() const { return state_->reported; }

void Negotiator::goodbye(Bytes& out) {
  Report& report = state_->report;
  report.clear();
  report.last_decision = state_->last_decision;
  report.goodbye = true;
  encode(report, out);
}

Status Negotiator::apply(std::span<const uint8_t> decision, Outcome& outcome) {
  State& state = *state_;
  if (!decode(decision, state.decision)) return nonsense_decision("its bytes are malformed");
  if (state.decision.number != state.last_decision + 1) {
    return nonsense_decision(format("number %llu came after number %llu",
                                    static_cast<unsigned long long>(state.decision.number),
                                    static_cast<unsigned long long>(state.last_decision)));
  }
  state.last_decision = state.decision.number;
  SIRTAKI_TRY(state.apply_settings(outcome));
  SIRTAKI_TRY(state.apply_plans(outcome));
  SIRTAKI_TRY(state.apply_refusals(outcome));
  SIRTAKI_TRY(state.apply_cache_changes());
  SIRTAKI_TRY(state.apply_joins(outcome));
  SIRTAKI_TRY(state.apply_set_changes(outcome));
  state.sweep();
  SIRTAKI_TRY(state.apply_stalls(outcome));
  const auto& asked = state.decision.asked;
  outcome.is_asked |= std::find(asked.begin(), asked.end(), state.rank) != asked.end();
  outcome.lateness.insert(outcome.lateness.end(), state.decision.lateness.begin(), state.decision.lateness.end());
  if (state.decision.fatal == SRT_OK) return {};
  if (!state.are_ranks({state.decision.culprit})) return nonsense_decision("it blames a rank that does not exist");
  outcome.fatal = Status(state.decision.fatal, state.decision.fatal_text);
  outcome.culprit = state.decision.culprit;
  return {};
}

void Negotiator::plan_finished(int32_t process_set) {
  if (NegotiatorSet* set = state_->find_set(process_set); set && set->unfinished_plans > 0) --set->unfinished_plans;
}

const std::vector<int32_t>* Negotiator::members(int32_t process_set) const {
  const NegotiatorSet* set = state_->find_set(process_set);
  return set ? &set->members : nullptr;
}

}  // namespace sirtaki
