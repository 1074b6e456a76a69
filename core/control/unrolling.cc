// The coordinator's handling of aggregates: a leader's report is taken apart, and submitted as if each rank had
// reported. Where only the set of requesting ranks matters, these are submitted together.
#include "control/coordinator_state.h"

namespace sirtaki {
namespace {

bool is_plain(const Signature& signature) {
  return !is_ragged(signature.kind) && signature.kind != Kind::send && signature.group_id == 0;
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
  for (const Aggregate::Batch& batch : aggregate.batches) SIRTAKI_TRY(submit_batch(batch));
  for (const Aggregate::FullRequest& request : aggregate.full_requests) SIRTAKI_TRY(submit_many_in_full(request));
  for (Aggregate::Remarked& remarked : aggregate.remarks) SIRTAKI_TRY(take(remarked.rank, remarked.remarks, now));
  return {};
}

// Reads the reporting ranks into `speakers` and `absentees`; not ok if one of them has left.
Status Coordinator::State::hear(const Aggregate::Speakers& by) {
  bool has_left = false;
  speakers.clear();
  absentees.clear();
  by.ranks.for_each([&](int32_t rank) {
    speakers.add(rank);
    has_left |= reporters[static_cast<size_t>(rank)].has_finished;
  });
  by.absent.for_each([&](int32_t rank) { absentees.add(rank); });
  return has_left ? nonsense_report("a rank requests something after its goodbye") : Status();
}

Status Coordinator::State::submit_batch(const Aggregate::Batch& batch) {
  SIRTAKI_TRY(hear(batch.by));
  for (CacheId id : batch.ids) {
    Entry* entry = table.find(id);
    if (entry && is_plain(*entry->cached)) {
      if (!speakers.are_within(entry->set->bits))
        return nonsense_report("a cache id of a process set that they are not members of");
      SIRTAKI_TRY(submit_alike(*entry, entry->cached, batch.by));
      continue;
    }
    Moments moments(batch.by.arrivals);
    for (int32_t rank : speakers.ranks()) SIRTAKI_TRY(submit_by_id(rank, id, absentees.has(rank), moments.of(rank)));
  }
  return {};
}

Status Coordinator::State::submit_many_in_full(const Aggregate::FullRequest& request) {
  SIRTAKI_TRY(hear(request.by));
  const Signature& signature = *request.signature;
  ProcessSet* set = sets.find(signature.process_set);
  if (set && is_plain(signature) && !changes_process_sets(signature.kind)) {
    if (!speakers.are_within(set->bits)) return nonsense_report("a process set that they are not members of");
    return submit_alike(table.find_or_create(key_of(signature), *set), request.signature, request.by);
  }
  Moments moments(request.by.arrivals);
  auto share = request.shares.begin();
  for (int32_t rank : speakers.ranks()) {
    const SignaturePtr own = is_ragged(signature.kind) ? with_share(request.signature, *share++) : request.signature;
    SIRTAKI_TRY(submit_in_full(rank, {own, absentees.has(rank)}, moments.of(rank)));
  }
  return {};
}

// Submits the same request for all ranks in `speakers`.
Status Coordinator::State::submit_alike(Entry& entry, const SignaturePtr& signature, const Aggregate::Speakers& by) {
  if (entry.submitted.overlaps(speakers) || entry.set->joined.overlaps(speakers))
    return nonsense_report("a request that they cannot make twice");
  if (!propose(entry, signature, by.arrivals.first))
    by.ranks.for_each([&](int32_t rank) { entry.dissents.push_back({rank, signature}); });
  entry.submitted |= speakers;
  entry.submissions += by.ranks.count();
  entry.absences += by.absent.count();
  arrive(entry, by.arrivals);
  return {};
}

}  // namespace sirtaki
