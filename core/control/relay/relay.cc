#include "control/relay/relay.h"

#include <algorithm>

#include "control/relay/relay_state.h"

namespace sirtaki {
namespace {

constexpr int32_t own_place = 0;  // this rank's place in its subtree: children are higher than their parents

}  // namespace

std::vector<int32_t> participants_of(const Signature& signature) {
  if (!signature.is_addition_by_members()) return {signature.root, signature.destination};
  std::vector<int32_t> ranks;
  for (int64_t rank : signature.shape)
    if (rank == static_cast<int32_t>(rank)) ranks.push_back(static_cast<int32_t>(rank));
  return ranks;
}

Relay::State::State(const std::vector<int32_t>& subtree, int32_t world_size, RelayRule relay_rule,
                    uint32_t cache_capacity)
    : rule(relay_rule), ranks(subtree), place_by_rank(static_cast<size_t>(world_size), -1),
      places(static_cast<int32_t>(subtree.size())), finished(places), cache(cache_capacity), reached(subtree.size()),
      heard(places), one(places), batch(places) {
  RelayedSet& world = sets.emplace_back(RelayedSet{world_set, RankBits(places), RankBits(places)});
  for (int32_t place = 0; place < places; ++place) {
    place_by_rank[static_cast<size_t>(ranks[static_cast<size_t>(place)])] = place;
    world.members.add(place);
  }
}

RelayedSet* Relay::State::find_set(int32_t number) {
  if (number == world_set) return &sets.front();
  const auto found = std::lower_bound(sets.begin(), sets.end(), number,
                                      [](const RelayedSet& set, int32_t wanted) { return set.number < wanted; });
  return found != sets.end() && found->number == number ? &*found : nullptr;
}

RelayedOperation* Relay::State::find(const OperationKey& key) const {
  const auto found = operations.find(key);
  return found == operations.end() ? nullptr : found->second;
}

RelayedOperation& Relay::State::find_or_create(const Signature& signature) {
  if (RelayedOperation* found = find(key_of(signature))) return *found;
  RelayedOperation& operation = others.emplace_front();
  operation.place = others.begin();
  operation.process_set = signature.process_set;
  operation.kind = signature.kind;
  operation.name = signature.name;
  operation.by_id = HeldRequest(places);
  operation.held = operation.forwarded = RankBits(places);
  operation.has_deadline = signature.deadline.has_value();
  operation.is_of_some = traits(signature.kind).is_of_a_pair || signature.is_addition_by_members();
  if (operation.is_of_some) operation.participants = places_of(participants_of(signature));
  operations.emplace(operation.key(), &operation);
  return operation;
}

void Relay::State::drop_if_unused(RelayedOperation& operation) {
  const bool is_needed =
      operation.id || operation.is_released || !operation.held.are_none() || !operation.forwarded.are_none();
  if (is_needed) return;
  operations.erase(operation.key());
  others.erase(operation.place);
}

// ---- Incoming reports --------------------------------------------------------------------------------------

// Holds a request by id. A retired id is forwarded unchanged: the coordinator counts it, and the rank requests again
// in full.
Status Relay::State::hold_by_id(CacheId id, const HeldRequest& request, Nanoseconds now) {
  RelayedOperation* operation = cache.find(id);
  if (!operation) {
    lapsed.emplace_back(id, request);
    return {};
  }
  if (operation->held.overlaps(request.by)) return nonsense_report("a request that it cannot make twice");
  hold(*operation, operation->by_id, request, now);
  return {};
}

// Holds a full request. A ragged kind has one share for each rank, in the ranks' order.
Status Relay::State::hold_in_full(const SignaturePtr& signature, std::span<const RowShare> shares,
                                  const HeldRequest& request, Nanoseconds now) {
  RelayedOperation& operation = find_or_create(*signature);
  if (operation.held.overlaps(request.by)) return nonsense_report("a request that it cannot make twice");
  auto alike = std::find_if(operation.in_full.begin(), operation.in_full.end(), [&](const HeldFullRequest& known) {
    return known.signature == signature || are_alike(*known.signature, *signature);
  });
  if (alike == operation.in_full.end()) alike = operation.in_full.emplace(alike, places, signature);
  auto share = shares.begin();
  if (!shares.empty()) request.by.for_each([&](int32_t place) { alike->shares[place] = *share++; });
  hold(operation, *alike, request, now);
  return {};
}

void Relay::State::hold(RelayedOperation& operation, HeldRequest& same, const HeldRequest& request, Nanoseconds now) {
  if (operation.held.are_none()) held.splice(held.end(), others, operation.place);
  same.by |= request.by;
  same.absent |= request.absent;
  same.arrivals.merge(request.arrivals);
  operation.held |= request.by;
  operation.oldest = std::min(operation.oldest, request.arrivals.first);
  if (operation.has_deadline || is_complete(operation) || now - operation.oldest >= rule.hold) release(operation);
}

// Returns whether all ranks of the subtree that can still request the operation have done so.
bool Relay::State::is_complete(const RelayedOperation& operation) {
  const RelayedSet* set = find_set(operation.process_set);
  if (!set) return true;
  const RankBits& needed = operation.is_of_some ? operation.participants : set->members;
  return needed.are_within(operation.held, operation.forwarded, set->joined, finished);
}

void Relay::State::release(RelayedOperation& operation) {
  if (std::exchange(operation.is_released, true)) return;
  released.push_back(&operation);
}

void Relay::State::take(int32_t rank, RankNotices said) {
  if (said.are_none()) return;
  for (int32_t number : said.joined)
    if (RelayedSet* set = find_set(number)) set->joined.add(place_of(rank));
  if (said.goodbye) finished.add(place_of(rank));
  notices[rank].append(std::move(said));
}

HeldRequest Relay::State::local(const Aggregate::Senders& by) const {
  HeldRequest request(places);
  by.ranks.for_each([&](int32_t rank) { request.by.add(place_of(rank)); });
  by.absent.for_each([&](int32_t rank) { request.absent.add(place_of(rank)); });
  request.arrivals = by.arrivals;
  return request;
}

Status Relay::State::merge(Nanoseconds now) {
  for (const Aggregate::Reached& said : aggregate.reached)
    said.ranks.for_each([&](int32_t rank) {
      heard.add(place_of(rank));
      reached[static_cast<size_t>(place_of(rank))] = said.decision;
    });
  for (const Aggregate::CachedRequests& said : aggregate.cached_requests) {
    const HeldRequest request = local(said.by);
    for (CacheId id : said.ids) SIRTAKI_TRY(hold_by_id(id, request, now));
  }
  for (const Aggregate::FullRequest& said : aggregate.full_requests)
    SIRTAKI_TRY(hold_in_full(said.signature, said.shares, local(said.by), now));
  for (Aggregate::NoticesOfRank& said : aggregate.notices) take(said.rank, std::move(said.notices));
  return {};
}

Status Relay::State::merge_report(int32_t rank, Nanoseconds now) {
  const int32_t place = place_of(rank);
  heard.add(place);
  reached[static_cast<size_t>(place)] = report.last_decision;
  one.by.clear();
  one.by.add(place);
  one.absent.clear();
  one.arrivals = Arrivals::of(rank, now);
  for (CacheId id : report.present) SIRTAKI_TRY(hold_by_id(id, one, now));
  HeldRequest absent = one;
  absent.absent = one.by;
  for (CacheId id : report.absent) SIRTAKI_TRY(hold_by_id(id, absent, now));
  for (const Report::FullRequest& request : report.full_requests) {
    std::vector<RowShare> shares;
    if (is_ragged(request.signature->kind)) shares.push_back(share_of(*request.signature));
    SIRTAKI_TRY(hold_in_full(request.signature, shares, request.absent ? absent : one, now));
  }
  take(rank, std::move(report));
  return {};
}

// ---- Outgoing reports --------------------------------------------------------------------------------------

// Releases the requests that have been held for long enough, those to which a rank's notices apply, and those that
// the notices make complete.
void Relay::State::release_due(Nanoseconds now) {
  if (notices.empty() && (held.empty() || now - held.front().oldest < rule.hold)) return;
  RankBits urgent(places);
  for (const auto& [rank, said] : notices) urgent.add(place_of(rank));
  for (RelayedOperation& operation : held)
    if (now - operation.oldest >= rule.hold || operation.held.overlaps(urgent) || is_complete(operation))
      release(operation);
}

// Moves an operation's held requests to the aggregate. If the subtree's requests are not complete, keeps the ranks
// that have requested it in `forwarded`.
void Relay::State::give(RelayedOperation& operation) {
  operation.is_released = false;
  if (operation.held.are_none()) return drop_if_unused(operation);
  if (!operation.by_id.by.are_none()) {
    give_id(operation.id, operation.by_id);
    operation.by_id.by.clear();
    operation.by_id.absent.clear();
    operation.by_id.arrivals = {};
  }
  for (HeldFullRequest& request : operation.in_full) {
    Aggregate::FullRequest& given = aggregate.full_requests.emplace_back();
    given.by = senders(request);
    given.signature = std::move(request.signature);
    for (auto& [place, share] : request.shares) given.shares.push_back(std::move(share));
  }
  operation.in_full.clear();
  operation.forwarded |= operation.held;
  if (operation.has_deadline || is_complete(operation)) operation.forwarded.clear();
  operation.held.clear();
  operation.oldest = never;
  others.splice(others.begin(), held, operation.place);
  drop_if_unused(operation);
}

// Adds an id to the aggregate. Ids that the same ranks requested at the same times share one batch.
void Relay::State::give_id(CacheId id, const HeldRequest& request) {
  const bool is_same = !aggregate.cached_requests.empty() && request.by == batch.by && request.absent == batch.absent &&
                       request.arrivals == batch.arrivals;
  if (!is_same) {
    batch = request;
    aggregate.cached_requests.push_back({senders(request), {}});
  }
  aggregate.cached_requests.back().ids.push_back(id);
}

Aggregate::Senders Relay::State::senders(const HeldRequest& request) const {
  Aggregate::Senders senders;
  request.by.for_each([&](int32_t place) { senders.ranks.add(rank_in(place)); });
  request.absent.for_each([&](int32_t place) { senders.absent.add(rank_in(place)); });
  senders.arrivals = request.arrivals;
  return senders;
}

void Relay::State::give_reached() {
  std::map<uint64_t, RankRuns> by_decision;
  heard.for_each([&](int32_t place) { by_decision[reached[static_cast<size_t>(place)]].add(rank_in(place)); });
  for (auto& [decision, who] : by_decision) aggregate.reached.push_back({decision, std::move(who)});
  heard.clear();
}

Relay::Relay(const std::vector<int32_t>& subtree, int32_t world_size, RelayRule rule, uint32_t cache_capacity)
    : state_(std::make_unique<State>(subtree, world_size, rule, cache_capacity)) {}

Relay::~Relay() = default;

Status Relay::merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now) {
  if (!decode(report, state_->report)) return nonsense_report("its bytes are malformed");
  return state_->merge_report(rank, now);
}

Status Relay::merge_aggregate(const RankBits& subtree, std::span<const uint8_t> aggregate, Nanoseconds now) {
  if (!decode(aggregate, subtree, now, state_->aggregate))
    return nonsense_report("its bytes are malformed, or speak for ranks that are not its own");
  return state_->merge(now);
}

bool Relay::has_left(int32_t rank) const {
  const int32_t place = state_->place_of(rank);
  return place >= 0 && state_->finished.has(place);
}

Nanoseconds Relay::report_due() const {
  const State& state = *state_;
  if (!state.released.empty() || !state.lapsed.empty() || !state.notices.empty()) return 0;
  return state.held.empty() ? never : state.held.front().oldest + state.rule.hold;
}

void Relay::report(Nanoseconds now, Bytes& out) {
  State& state = *state_;
  Aggregate& aggregate = state.aggregate;
  aggregate.clear();
  state.release_due(now);
  state.give_reached();
  for (RelayedOperation* operation : state.released) state.give(*operation);
  state.released.clear();
  for (const auto& [id, request] : state.lapsed) state.give_id(id, request);
  state.lapsed.clear();
  for (auto& [rank, notices] : state.notices) aggregate.notices.push_back({rank, std::move(notices)});
  state.notices.clear();
  encode(aggregate, now, out);
}

void Relay::release_all() {
  State& state = *state_;
  state.rule.hold = 0;
  RankBits cut_off(state.places);
  for (const RelayedSet& set : state.sets)
    if (!set.members.has(own_place)) cut_off |= set.members;
  cut_off -= state.finished;
  cut_off.for_each([&](int32_t place) {
    RankNotices goodbye;
    goodbye.goodbye = true;
    state.take(state.rank_in(place), std::move(goodbye));
  });
}

}  // namespace sirtaki
