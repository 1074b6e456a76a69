// Ranks are numbered by their place in the subtree here, so that a set of one host's ranks fits into a single word.
#include "control/relay/relay.h"

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/messages/aggregate.h"

namespace sirtaki {

// Identical requests for one operation.
struct HeldRequest {
  explicit HeldRequest(int32_t places = 0) : by(places), absent(places) {}

  RankBits by, absent;
  Arrivals arrivals;
};

struct HeldFullRequest : HeldRequest {
  HeldFullRequest(int32_t places, SignaturePtr request) : HeldRequest(places), signature(std::move(request)) {}

  SignaturePtr signature;
  std::map<int32_t, RowShare> shares;    // ragged kinds only, by place
};

// One (process set, kind, name) that is cached, held, or forwarded by part of the subtree.
struct RelayedOperation {
  OperationKey key() const { return {process_set, kind, name}; }

  int32_t process_set = world_set;
  Kind kind = Kind::allreduce;
  std::string name;
  std::list<RelayedOperation>::iterator place;  // in one of the relay's two lists
  CacheId id = 0;
  bool is_of_some = false;               // only some ranks of the set take part: of a send, or of an addition
  RankBits participants;                 // those in this subtree, if it is_of_some
  HeldRequest by_id;
  std::vector<HeldFullRequest> in_full;
  RankBits held;                         // ranks whose requests are held
  RankBits forwarded;                    // ranks whose requests were forwarded while others are missing
  Nanoseconds oldest = never;            // earliest arrival of a held request
  bool is_released = false;
  bool has_deadline = false;             // forwarded at once, because the coordinator decides whom it waits for
};

struct RelayedSet {
  int32_t number;
  RankBits members, joined;              // ranks of the subtree
};

struct Relay::State {
  State(const std::vector<int32_t>& subtree, int32_t world_size, RelayRule relay_rule, uint32_t cache_capacity);

  // Incoming reports.
  Status hold_by_id(CacheId id, const HeldRequest& request, Nanoseconds now);
  Status hold_in_full(const SignaturePtr& signature, std::span<const RowShare> shares, const HeldRequest& request,
                      Nanoseconds now);
  void hold(RelayedOperation& operation, HeldRequest& same, const HeldRequest& request, Nanoseconds now);
  void take(int32_t rank, RankNotices said);
  Status merge_report(int32_t rank, Nanoseconds now);
  Status merge(Nanoseconds now);
  HeldRequest local(const Aggregate::Senders& by) const;
  bool is_complete(const RelayedOperation& operation);
  void release(RelayedOperation& operation);

  // Outgoing reports.
  void release_due(Nanoseconds now);
  void give(RelayedOperation& operation);
  void give_id(CacheId id, const HeldRequest& request);
  Aggregate::Senders senders(const HeldRequest& request) const;
  void give_reached();

  // Decisions on their way down.
  void forward_plans();
  void forward_refusals();
  Status pass_cache_changes();
  Status pass_set_changes();
  void remove_set(int32_t number);
  void lapse(RelayedOperation& operation, CacheId id);
  RankBits places_of(const std::vector<int32_t>& ranks) const;

  RelayedOperation* find(const OperationKey& key) const;
  RelayedOperation& find_or_create(const Signature& signature);
  RelayedSet* find_set(int32_t number);
  void drop_if_unused(RelayedOperation& operation);
  int32_t place_of(int32_t rank) const { return place_by_rank[static_cast<size_t>(rank)]; }
  int32_t rank_in(int32_t place) const { return ranks[static_cast<size_t>(place)]; }

  RelayRule rule;
  std::vector<int32_t> ranks;            // by place
  std::vector<int32_t> place_by_rank;    // -1: in another subtree
  int32_t places;
  RankBits finished;                     // ranks that have said goodbye
  std::vector<RelayedSet> sets;          // by number
  CacheTable<RelayedOperation> cache;
  std::list<RelayedOperation> held;      // the oldest first
  std::list<RelayedOperation> others;
  std::unordered_map<OperationKey, RelayedOperation*, OperationKeyHash> operations;
  std::vector<RelayedOperation*> released;       // sent with the next aggregate
  std::vector<std::pair<CacheId, HeldRequest>> lapsed;  // retired ids: the coordinator counts them
  std::map<int32_t, RankNotices> notices;    // by rank
  std::vector<uint64_t> reached;         // by place: the last Decision that the rank has applied
  RankBits heard;                        // ranks that have reported since the last aggregate
  Report report;                    // members from here on are kept for their memory
  Aggregate aggregate;
  HeldRequest one;                       // the request of the rank whose report is being merged
  HeldRequest batch;                     // the requests of the aggregate's last batch
  Decision decision;
};

namespace {

constexpr int32_t own_place = 0;  // this rank's place in its subtree: children are higher than their parents

// Returns the ranks that take part in an operation in which only some ranks of its set do.
std::vector<int32_t> participants_of(const Signature& signature) {
  if (!signature.is_addition_by_members()) return {signature.root, signature.destination};
  std::vector<int32_t> ranks;
  for (int64_t rank : signature.shape)
    if (rank == static_cast<int32_t>(rank)) ranks.push_back(static_cast<int32_t>(rank));
  return ranks;
}

}  // namespace

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

RankBits Relay::State::places_of(const std::vector<int32_t>& world_ranks) const {
  RankBits found(places);
  for (int32_t rank : world_ranks) {
    const bool exists = rank >= 0 && static_cast<size_t>(rank) < place_by_rank.size();
    if (exists && place_of(rank) >= 0) found.add(place_of(rank));
  }
  return found;
}

// ---- Incoming reports -------------------------------------------------------------------------------------

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

// ---- Outgoing reports -------------------------------------------------------------------------------------

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

// ---- Decisions on their way down --------------------------------------------------------------------------

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

// ---- The interface ----------------------------------------------------------------------------------------

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

Status Relay::forward(std::span<const uint8_t> decision) {
  State& state = *state_;
  if (!decode(decision, state.decision)) return nonsense_decision("its bytes are malformed");
  state.forward_plans();
  state.forward_refusals();
  SIRTAKI_TRY(state.pass_cache_changes());
  return state.pass_set_changes();
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
