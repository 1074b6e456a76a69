#include "control/member_state.h"

namespace sirtaki {
namespace {

Status nonsense(const std::string& what) {
  return Status(SRT_PROTOCOL, "the coordinator's decision makes no sense here: " + what);
}

// Of all members' rows together; -1 if that is more than there can be.
int64_t total_bytes(const Signature& signature, const std::vector<int64_t>& rows) {
  int64_t total = 0;
  for (int64_t count : rows)
    if (count < 0 || __builtin_add_overflow(total, count, &total)) return -1;
  return __builtin_mul_overflow(total, signature.row_bytes(), &total) ? -1 : total;
}

}  // namespace

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

MemberOperation* Member::State::operation_of(PlanItem item) const {
  if (!(item & is_response)) return cache.find(item);
  const PlanItem place = item & ~is_response;
  return place < response_operations.size() ? response_operations[place] : nullptr;
}

Status Member::State::apply_plan(const DecidedPlan& decided, uint64_t number, Outcome& outcome) {
  MemberSet* set = find_set(decided.process_set);
  if (!set || decided.items.empty()) return nonsense("a plan of an unknown process set, or an empty one");
  if (!set->is_member) return {};
  Plan plan;
  plan.number = number;
  plan.process_set = set->number;
  plan.members = set->members;
  plan.contributors = decided.contributors;
  plan.untouched = decided.untouched;
  plan.tensors.resize(decided.items.size());
  for (size_t i = 0; i < decided.items.size(); ++i) {
    SIRTAKI_TRY(look_up(decided.items[i], *set, plan.tensors[i]));
    const Signature& signature = *plan.tensors[i].signature;
    if (i == 0) plan.kind = signature.kind;
    if (signature.kind != plan.kind) return nonsense("a plan of two kinds");
    if (plan.kind == Kind::send) {
      if (rank != signature.root && rank != signature.destination) return {};
      const auto [low, high] = std::minmax(signature.root, signature.destination);
      if (i > 0 && plan.members != std::vector{low, high}) return nonsense("a plan of sends between different pairs");
      plan.members = {low, high};
    }
    SIRTAKI_TRY(take_part(decided.items[i], *set, plan.tensors[i]));
  }
  outcome.plans.push_back(std::move(plan));
  ++set->unfinished_plans;
  return {};
}

// What an item of a plan stands for.
Status Member::State::look_up(PlanItem item, const MemberSet& set, PlannedTensor& tensor) const {
  const MemberOperation* operation = operation_of(item);
  if (!operation || operation->process_set != set.number) return nonsense("a plan with an unknown tensor");
  const bool is_new = item & is_response;
  const Response* response = is_new ? &decision.responses[item & ~is_response] : nullptr;
  tensor.signature = is_new ? response->signature : operation->cached;
  tensor.rows = is_new ? response->rows : operation->rows;
  const Signature& signature = *tensor.signature;
  if (!is_ragged(signature.kind)) return {};
  const size_t expected = set.members.size() * row_counts_each(signature.kind, set.members.size());
  const bool is_sane =
      tensor.rows.size() == expected && !signature.shape.empty() && total_bytes(signature, tensor.rows) >= 0;
  return is_sane ? Status() : nonsense("a plan without the rows of each member");
}

// This rank's own request for it; none if it has joined.
Status Member::State::take_part(PlanItem item, const MemberSet& set, PlannedTensor& tensor) {
  MemberOperation& operation = *operation_of(item);
  if (operation.is_reported()) {
    tensor.ticket = take_ticket(operation);
  } else if (!set.join_ticket || operation.phase != MemberOperation::Phase::idle) {
    return nonsense("a plan with '" + operation.name + "', which this rank has not submitted");
  }
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
      MemberOperation* operation = find({refusal.process_set, refusal.kind, refusal.name});
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
    MemberOperation* operation = cache.find(id);
    if (!operation) return nonsense("it retires an unknown cache id");
    cache.remove(id);
    operation->id = 0;
    operation->cached.reset();
    operation->rows.clear();
    sweep_later(*operation);
    if (operation->phase != MemberOperation::Phase::reported_by_id) continue;
    operation->phase = MemberOperation::Phase::queued;
    resend.push_back(operation);
    ++lapsed;
  }
  for (size_t i = 0; i < decision.responses.size(); ++i) {
    Response& response = decision.responses[i];
    if (!response.id) continue;
    MemberOperation& operation = *response_operations[i];
    if (operation.id || !cache.put(response.id, &operation)) return nonsense("a cache id is in use");
    operation.id = response.id;
    operation.cached = std::move(response.signature);
    operation.rows = std::move(response.rows);
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
    MemberOperation* operation = find({world_set, kind, change.name});
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
    const std::string text = format("process set %d was removed before %s took place", set.number, what.c_str());
    outcome.refusals.push_back({ticket, Status(SRT_INVALID_ARGUMENT, text)});
  };
  for (auto& [key, operation] : operations) {
    if (operation->process_set != set.number || operation->phase == MemberOperation::Phase::idle) continue;
    refuse(take_ticket(*operation), "'" + operation->name + "'");
  }
  std::sort(outcome.refusals.begin() + static_cast<std::ptrdiff_t>(first), outcome.refusals.end(),
            [](const Refusal& a, const Refusal& b) { return a.ticket < b.ticket; });
  if (set.join_ticket) refuse(set.join_ticket, "the join");
  std::erase_if(resend, [&](const MemberOperation* operation) { return operation->process_set == set.number; });
  std::erase_if(sets, [&](const auto& other) { return other.get() == &set; });
}

Status Member::apply(std::span<const uint8_t> decision, Outcome& outcome) {
  State& state = *state_;
  if (!decode(decision, state.decision)) return nonsense("its bytes are malformed");
  if (state.decision.number != state.last_decision + 1) {
    return nonsense(format("number %llu came after number %llu", static_cast<unsigned long long>(state.decision.number),
                           static_cast<unsigned long long>(state.last_decision)));
  }
  state.last_decision = state.decision.number;
  SIRTAKI_TRY(state.apply_plans(outcome));
  SIRTAKI_TRY(state.apply_refusals(outcome));
  SIRTAKI_TRY(state.apply_cache_changes());
  SIRTAKI_TRY(state.apply_joins(outcome));
  SIRTAKI_TRY(state.apply_set_changes(outcome));
  state.sweep();
  std::move(state.decision.stalls.begin(), state.decision.stalls.end(), std::back_inserter(outcome.stalls));
  const auto& asked = state.decision.asked;
  outcome.is_asked |= std::find(asked.begin(), asked.end(), state.rank) != asked.end();
  outcome.lateness.insert(outcome.lateness.end(), state.decision.lateness.begin(), state.decision.lateness.end());
  if (state.decision.fatal != SRT_OK) outcome.fatal = Status(state.decision.fatal, state.decision.fatal_text);
  return {};
}

}  // namespace sirtaki
