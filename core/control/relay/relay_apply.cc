// The half of a relay that applies Decisions on their way down.
#include <algorithm>

#include "control/relay/relay_state.h"

namespace sirtaki {

RankBits Relay::State::places_of(const std::vector<int32_t>& world_ranks) const {
  RankBits found(places);
  for (int32_t rank : world_ranks) {
    const bool exists = rank >= 0 && static_cast<size_t>(rank) < place_by_rank.size();
    if (exists && place_of(rank) >= 0) found.add(place_of(rank));
  }
  return found;
}

// Clears `forwarded` for planned operations: every rank that could request them has done so.
void Relay::State::forward_plans() {
  for (const DecidedPlan& plan : decision.plans) {
    for (PlanItem item : plan.items) {
      const size_t response = item & ~is_response;
      const bool is_new = item & is_response;
      if (is_new && response >= decision.responses.size()) continue;
      RelayedOperation* operation = is_new ? find(key_of(*decision.responses[response].signature)) : cache.find(item);
      if (!operation) continue;
      operation->forwarded.clear();
      drop_if_unused(*operation);
    }
  }
}

// Allows refused ranks to request again. Releases held requests, so that ranks that have yet to request get the same
// answer sooner.
void Relay::State::forward_refusals() {
  for (const DecidedRefusal& refusal : decision.refusals) {
    const RankBits refused = places_of(refusal.ranks);
    if (refusal.name.empty()) {
      if (RelayedSet* set = find_set(refusal.process_set)) set->joined -= refused;
      continue;
    }
    RelayedOperation* operation = find({refusal.process_set, refusal.kind, refusal.name});
    if (!operation) continue;
    operation->forwarded -= refused;
    if (!operation->held.are_none()) release(*operation);
    drop_if_unused(*operation);
  }
}

// Moves the requests that are held under a retired id to `lapsed`.
void Relay::State::lapse(RelayedOperation& operation, CacheId id) {
  if (operation.by_id.by.are_none()) return;
  operation.held -= operation.by_id.by;
  lapsed.emplace_back(id, std::exchange(operation.by_id, HeldRequest(places)));
  if (!operation.held.are_none()) return;
  operation.oldest = never;
  others.splice(others.begin(), held, operation.place);
}

Status Relay::State::pass_cache_changes() {
  for (CacheId id : decision.retired) {
    RelayedOperation* operation = cache.find(id);
    if (!operation) return nonsense_decision("it retires an unknown cache id");
    cache.remove(id);
    operation->id = 0;
    lapse(*operation, id);
    drop_if_unused(*operation);
  }
  for (const Response& response : decision.responses) {
    if (!response.id) continue;
    RelayedOperation& operation = find_or_create(*response.signature);
    if (operation.id || !cache.put(response.id, &operation)) return nonsense_decision("a cache id is in use");
    operation.id = response.id;
    if (operation.is_of_some) operation.participants = places_of(participants_of(*response.signature));
  }
  return {};
}

Status Relay::State::pass_set_changes() {
  for (const DecidedJoin& join : decision.joins)
    if (RelayedSet* set = find_set(join.process_set)) set->joined.clear();
  for (const DecidedSetChange& change : decision.set_changes) {
    const bool is_added = !change.members.empty();
    const bool makes_sense = is_added ? change.process_set > sets.back().number : change.process_set != world_set;
    if (!makes_sense) return nonsense_decision("a process set that it adds exists, or one that it removes does not");
    if (is_added) sets.push_back({change.process_set, places_of(change.members), RankBits(places)});
    else remove_set(change.process_set);
  }
  return {};
}

// Removes a set and its requests, which the Decision that removes it answers.
void Relay::State::remove_set(int32_t number) {
  const auto is_of_set = [&](const RelayedOperation& operation) { return operation.process_set == number; };
  std::erase_if(released, [&](const RelayedOperation* operation) { return is_of_set(*operation); });
  std::erase_if(operations, [&](const auto& item) {
    if (is_of_set(*item.second)) cache.remove(item.second->id);
    return is_of_set(*item.second);
  });
  held.remove_if(is_of_set);
  others.remove_if(is_of_set);
  std::erase_if(sets, [&](const RelayedSet& set) { return set.number == number; });
}

Status Relay::forward(std::span<const uint8_t> decision) {
  State& state = *state_;
  if (!decode(decision, state.decision)) return nonsense_decision("its bytes are malformed");
  state.forward_plans();
  state.forward_refusals();
  SIRTAKI_TRY(state.pass_cache_changes());
  return state.pass_set_changes();
}

}  // namespace sirtaki
