// The coordinator's handling of aggregates: each is merged as if its ranks had reported one by one. Requests whose
// outcome depends only on the set of requesting ranks are submitted together.
#include "control/coordinator/coordinator_state.h"

namespace sirtaki {
namespace {

bool is_plain(const Signature& signature) {
  return !is_ragged(signature.kind) && !traits(signature.kind).is_of_a_pair && signature.group_id == 0;
}

// A time for each rank, such that merging these times reproduces the group's arrivals.
class Moments {
 public:
  explicit Moments(const Arrivals& arrivals) : arrivals_(arrivals) {}

  // Returns the time of a rank; called once per rank.
  Nanoseconds of(int32_t rank) {
    if (rank == arrivals_.last_rank) return arrivals_.latest;
    return std::exchange(is_next_to_last_told_, true) ? arrivals_.first : arrivals_.before_latest;
  }

 private:
  const Arrivals& arrivals_;
  bool is_next_to_last_told_ = false;
};

}  // namespace

Status Coordinator::State::merge_many(Nanoseconds now) {
  for (const Aggregate::Reached& reached : aggregate.reached) {
    Status status;
    reached.ranks.for_each([&](int32_t rank) {
      if (status.is_ok()) status = reach(rank, reached.decision);
    });
    SIRTAKI_TRY(status);
  }
  for (const Aggregate::CachedRequests& cached : aggregate.cached_requests) SIRTAKI_TRY(submit_cached(cached));
  for (const Aggregate::FullRequest& request : aggregate.full_requests) SIRTAKI_TRY(submit_many_in_full(request));
  for (Aggregate::NoticesOfRank& entry : aggregate.notices) SIRTAKI_TRY(take(entry.rank, entry.notices, now));
  return {};
}

// Reads the reporting ranks into `senders` and `absentees`; not ok if one of them has left.
Status Coordinator::State::read_senders(const Aggregate::Senders& by) {
  bool has_left = false;
  senders.clear();
  absentees.clear();
  by.ranks.for_each([&](int32_t rank) {
    senders.add(rank);
    has_left |= reporters[static_cast<size_t>(rank)].has_finished;
  });
  by.absent.for_each([&](int32_t rank) { absentees.add(rank); });
  return has_left ? nonsense_report("a rank requests something after its goodbye") : Status();
}

Status Coordinator::State::submit_cached(const Aggregate::CachedRequests& cached) {
  SIRTAKI_TRY(read_senders(cached.by));
  for (CacheId id : cached.ids) {
    OperationEntry* entry = table.find(id);
    if (entry && is_plain(*entry->cached)) {
      if (!senders.are_within(entry->set->bits))
        return nonsense_report("a cache id of a process set that they are not members of");
      SIRTAKI_TRY(submit_alike(*entry, entry->cached, cached.by));
      continue;
    }
    Moments moments(cached.by.arrivals);
    for (int32_t rank : senders.ranks()) SIRTAKI_TRY(submit_by_id(rank, id, absentees.has(rank), moments.of(rank)));
  }
  return {};
}

Status Coordinator::State::submit_many_in_full(const Aggregate::FullRequest& request) {
  SIRTAKI_TRY(read_senders(request.by));
  const Signature& signature = *request.signature;
  ProcessSet* set = sets.find(signature.process_set);
  if (set && is_plain(signature) && !changes_process_sets(signature.kind)) {
    if (!senders.are_within(set->bits)) return nonsense_report("a process set that they are not members of");
    if (deadlines.is_over(signature)) return {};
    return submit_alike(table.find_or_create(key_of(signature), *set), request.signature, request.by);
  }
  Moments moments(request.by.arrivals);
  auto share = request.shares.begin();
  for (int32_t rank : senders.ranks()) {
    const SignaturePtr own = is_ragged(signature.kind) ? with_share(request.signature, *share++) : request.signature;
    SIRTAKI_TRY(submit_in_full(rank, {own, absentees.has(rank)}, moments.of(rank)));
  }
  return {};
}

// Submits the same request for all ranks in `senders`.
Status Coordinator::State::submit_alike(OperationEntry& entry, const SignaturePtr& signature,
                                        const Aggregate::Senders& by) {
  if (entry.submitted.overlaps(senders) || entry.set->joined.overlaps(senders))
    return nonsense_report("a request that they cannot make twice");
  if (!propose(entry, signature, by.arrivals.first))
    by.ranks.for_each([&](int32_t rank) { entry.dissents.push_back({rank, signature}); });
  entry.submitted |= senders;
  entry.submissions += by.ranks.count();
  entry.absences += by.absent.count();
  arrive(entry, by.arrivals);
  return {};
}

}  // namespace sirtaki
