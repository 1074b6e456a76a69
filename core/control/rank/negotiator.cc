#include "control/rank/negotiator.h"

#include "control/rank/negotiator_state.h"

namespace sirtaki {
namespace {

bool is_more_urgent(const NegotiatorOperation* a, const NegotiatorOperation* b) {
  return a->request.signature->priority > b->request.signature->priority;
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

void Negotiator::plan_finished(int32_t process_set) {
  if (NegotiatorSet* set = state_->find_set(process_set); set && set->unfinished_plans > 0) --set->unfinished_plans;
}

const std::vector<int32_t>* Negotiator::members(int32_t process_set) const {
  const NegotiatorSet* set = state_->find_set(process_set);
  return set ? &set->members : nullptr;
}

}  // namespace sirtaki
