// The internals of a Relay, in two halves: reports arrive and are forwarded to the parent (relay.cc), Decisions are
// applied on their way down (relay_apply.cc).
//
// Ranks are numbered by their place in the subtree here, so that a set of one host's ranks fits into a single word.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/messages/aggregate.h"
#include "control/relay/relay.h"

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

// Returns the ranks that take part in an operation in which only some ranks of its set do.
std::vector<int32_t> participants_of(const Signature& signature);

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

}  // namespace sirtaki
