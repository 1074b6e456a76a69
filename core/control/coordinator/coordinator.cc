#include "control/coordinator/coordinator.h"

#include <algorithm>

#include "control/coordinator/fusion.h"
#include "control/lateness/deadlines.h"
#include "control/lateness/lateness_tracker.h"
#include "control/lateness/stall_inspector.h"
#include "control/messages/aggregate.h"
#include "control/messages/messages.h"
#include "control/operations/groups.h"
#include "control/operations/operation_table.h"
#include "control/operations/process_sets.h"
#include "control/operations/validation.h"

namespace sirtaki {

struct Coordinator::State {
  // The coordinator's state of one rank.
  struct Reporter {
    uint64_t last_decision = 0;
    int64_t lapsed = 0;                    // reported ids that had been retired and are not accounted for yet
    bool has_finished = false;
    std::vector<int32_t> waiting_joins;    // sets whose join waits until `lapsed` is 0
  };

  // One rank's request, by id or in full.
  struct RankSubmission {
    int32_t rank;
    const SignaturePtr& signature;
    std::span<const int64_t> rows;         // ragged kinds only
    bool absent;
  };

  State(std::vector<std::string> rank_names, CoordinatorRules coordinator_rules, std::vector<int32_t> leaders);

  // Incoming reports.
  Status merge(int32_t rank, Nanoseconds now);
  Status reach(int32_t rank, uint64_t last_decision);
  Status submit_by_id(int32_t rank, CacheId id, bool absent, Nanoseconds moment);
  Status submit_in_full(int32_t rank, const Report::FullRequest& request, Nanoseconds moment);
  Status submit(OperationEntry& entry, const RankSubmission& submission, Nanoseconds moment);
  bool propose(OperationEntry& entry, const SignaturePtr& signature, Nanoseconds moment);
  void arrive(OperationEntry& entry, const Arrivals& arrivals);
  Status take(int32_t rank, RankNotices& notices, Nanoseconds now);
  Status join(int32_t rank, int32_t process_set, Nanoseconds now);
  void finish(int32_t rank);
  void refuse_joins(const ProcessSet& set, std::vector<int32_t> ranks);
  void consider(OperationEntry& entry);

  // Incoming aggregates.
  Status merge_many(Nanoseconds now);
  Status read_senders(const Aggregate::Senders& by);
  Status submit_cached(const Aggregate::CachedRequests& batch);
  Status submit_many_in_full(const Aggregate::FullRequest& request);
  Status submit_alike(OperationEntry& entry, const SignaturePtr& signature, const Aggregate::Senders& by);

  // Outgoing decisions.
  bool has_work(Nanoseconds now) const;
  void settle_everything(Nanoseconds now);
  void pass_deadlines(Nanoseconds now);
  void reconsider_changed_sets();
  void settle(OperationEntry& entry);
  bool refuse_different_kinds(OperationEntry& entry);
  void refuse(OperationEntry& entry, const Status& cause);
  void plan_agreed(Nanoseconds now);
  PlanItem item_of(OperationEntry& entry);
  void settle_joins(Nanoseconds now);
  void settle_set_changes();
  void drop_removed_sets();
  void empty_set(ProcessSet& set);
  void answer(OperationEntry& entry);
  void close_answered();

  RankNames names;
  CoordinatorRules rules;
  ProcessSets sets;
  OperationTable table;
  Groups groups;
  Deadlines deadlines;
  StallInspector stalls;
  LatenessTracker lateness;
  std::vector<Reporter> reporters;         // by rank
  bool sets_have_changed = false;
  uint64_t decisions = 0;
  uint64_t plans = 0;

  Decision decision;                       // the Decision that is being made
  std::vector<OperationEntry*> candidates;          // entries that may be ready for a decision
  std::vector<OperationEntry*> agreed;              // entries that go into plans
  std::vector<OperationEntry*> set_changes;         // agreed requests to add or remove sets
  std::vector<OperationEntry*> answered;
  std::vector<ReadyEntry> ready;           // members from here on are kept for their memory
  Report report;
  Aggregate aggregate;
  RankBits senders, absentees;            // ranks of the part of the aggregate that is being merged
};

namespace {

bool is_of_pair(const Signature& signature, int32_t rank, const ProcessSet& set) {
  const auto has = [&](int32_t one) { return std::binary_search(set.members.begin(), set.members.end(), one); };
  return signature.root != signature.destination && has(signature.root) && has(signature.destination) &&
         (rank == signature.root || rank == signature.destination);
}

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

// Returns whether the members agreed on the cached response.
bool is_as_cached(const OperationEntry& entry) {
  if (is_ragged(entry.kind) && entry.rows != entry.cached_rows) return false;
  if (entry.proposed == entry.cached) return true;
  return agree(*entry.proposed, *entry.cached);
}

}  // namespace

Coordinator::State::State(std::vector<std::string> rank_names, CoordinatorRules coordinator_rules,
                          std::vector<int32_t> leaders)
    : names(std::move(rank_names)), rules(coordinator_rules), sets(static_cast<int32_t>(names.size())),
      table(static_cast<int32_t>(names.size()), rules.cache_capacity), deadlines(rules.late_results),
      stalls(rules.stall_report, rules.stall_deadline, std::move(leaders)), lateness(names.size()),
      reporters(names.size()), senders(static_cast<int32_t>(names.size())),
      absentees(static_cast<int32_t>(names.size())) {}

// ---- Incoming reports -------------------------------------------------------------------------------------

Status Coordinator::State::merge(int32_t rank, Nanoseconds now) {
  SIRTAKI_TRY(reach(rank, report.last_decision));
  for (CacheId id : report.present) SIRTAKI_TRY(submit_by_id(rank, id, false, now));
  for (CacheId id : report.absent) SIRTAKI_TRY(submit_by_id(rank, id, true, now));
  for (const Report::FullRequest& request : report.full_requests) SIRTAKI_TRY(submit_in_full(rank, request, now));
  return take(rank, report, now);
}

Status Coordinator::State::reach(int32_t rank, uint64_t last_decision) {
  Reporter& reporter = reporters[static_cast<size_t>(rank)];
  if (reporter.has_finished) return nonsense_report("it has said goodbye before");
  if (last_decision < reporter.last_decision || last_decision > decisions) {
    return nonsense_report("it knows a decision that was never made, or has forgotten one");
  }
  reporter.last_decision = last_decision;
  return {};
}

// Submits a request by id. A retired id is dropped: the Decision that retired it makes the rank request again, in
// full.
Status Coordinator::State::submit_by_id(int32_t rank, CacheId id, bool absent, Nanoseconds moment) {
  OperationEntry* entry = table.find(id);
  if (!entry) {
    if (!table.was_issued(id)) return nonsense_report("an unknown cache id");
    ++reporters[static_cast<size_t>(rank)].lapsed;
    return {};
  }
  if (!entry->set->has(rank)) return nonsense_report("a cache id of a process set that it is not a member of");
  if (traits(entry->kind).is_of_a_pair && !is_of_pair(*entry->cached, rank, *entry->set))
    return nonsense_report("a send of others");
  const size_t members = entry->set->members.size();
  const auto rows = rows_at(*entry->cached, entry->cached_rows, members, entry->set->position(rank));
  return submit(*entry, {rank, entry->cached, rows, absent}, moment);
}

Status Coordinator::State::submit_in_full(int32_t rank, const Report::FullRequest& request, Nanoseconds moment) {
  const Signature& signature = *request.signature;
  ProcessSet* set = sets.find(signature.process_set);
  if (!set) {
    if (sets.was_removed(signature.process_set)) return {};  // the Decision that removed it answers this request
    return nonsense_report("an unknown process set");
  }
  if (!set->has(rank)) return nonsense_report("a process set that it is not a member of");
  if (changes_process_sets(signature.kind) && set->number != world_set)
    return nonsense_report("a process set is added to a set");
  if (signature.is_addition_by_members() && !are_ranks_with(signature.shape, set->members.size(), rank))
    return nonsense_report("a process set of others, added by its members");
  if (is_ragged(signature.kind) && rows_of(signature).size() != row_counts_each(signature.kind, set->members.size()))
    return nonsense_report("an all-to-all that does not say what each member gets");
  if (traits(signature.kind).is_of_a_pair && !is_of_pair(signature, rank, *set))
    return nonsense_report("a send between ranks of which it is none, or that are not members");
  if (!traits(signature.kind).is_groupable && signature.group_id != 0)
    return nonsense_report("a send in a group of all members");
  if (deadlines.is_over(signature)) return {};  // the Decision that planned the round answers this request
  OperationEntry& entry = table.find_or_create(key_of(signature), *set);
  return submit(entry, {rank, request.signature, rows_of(signature), request.absent}, moment);
}

Status Coordinator::State::submit(OperationEntry& entry, const RankSubmission& submission, Nanoseconds moment) {
  const int32_t rank = submission.rank;
  const Signature& signature = *submission.signature;
  if (entry.submitted.has(rank) || entry.set->joined.has(rank))
    return nonsense_report("a request that it cannot make twice");
  const bool is_grouped = signature.group_id != 0 && !changes_process_sets(entry.kind) && !entry.set->is_broken();
  if (is_grouped) {
    const Status refused = groups.submitted(*entry.set, rank, signature);
    if (!refused.is_ok()) {
      decision.refusals.push_back({entry.set->number, entry.kind, entry.name, {rank}, refused.code(), refused.text()});
      table.drop_if_unused(entry);
      return {};
    }
    groups.add(entry, signature.group_id);
  }
  if (!propose(entry, submission.signature, moment)) entry.dissents.push_back({rank, submission.signature});
  if (is_ragged(entry.kind)) {
    const auto first = static_cast<ptrdiff_t>(entry.set->position(rank) * submission.rows.size());
    std::copy(submission.rows.begin(), submission.rows.end(), entry.rows.begin() + first);
  }
  entry.submitted.add(rank);
  ++entry.submissions;
  entry.absences += submission.absent;
  arrive(entry, Arrivals::of(rank, moment));
  return {};
}

// Opens an entry with its first request; returns false if this is a later request that does not agree with it.
bool Coordinator::State::propose(OperationEntry& entry, const SignaturePtr& signature, Nanoseconds moment) {
  if (!entry.is_pending()) {
    table.open(entry, signature);
    if (signature->deadline) deadlines.opened(entry);
    stalls.begun(moment);
    return true;
  }
  entry.priority = std::max(entry.priority, signature->priority);
  return signature == entry.proposed || agree(*entry.proposed, *signature);
}

// Records the times of submissions; called after the submissions were added.
void Coordinator::State::arrive(OperationEntry& entry, const Arrivals& arrivals) {
  entry.arrivals.merge(arrivals);
  const Arrivals& all = entry.arrivals;
  if (entry.submissions > 1 && entry.is_complete()) lateness.was_last(all.last_rank, all.latest - all.before_latest);
  if (entry.next_stall_report && entry.is_complete()) report_end_of_stall(entry, decision);
  consider(entry);
}

// Marks an entry for examination if it may be ready for a decision.
void Coordinator::State::consider(OperationEntry& entry) {
  if (entry.is_candidate) return;
  const bool may_settle =
      entry.is_complete() || entry.is_broken() || entry.same_name != &entry || deadlines.may_proceed(entry);
  if (!may_settle) return;
  entry.is_candidate = true;
  candidates.push_back(&entry);
}

// Applies a rank's notices; called after its requests.
Status Coordinator::State::take(int32_t rank, RankNotices& notices, Nanoseconds now) {
  Reporter& reporter = reporters[static_cast<size_t>(rank)];
  if (reporter.has_finished) return nonsense_report("it has said goodbye before");
  reporter.lapsed -= notices.lapsed;
  if (reporter.lapsed < 0) return nonsense_report("it counts more lapsed cache ids than there were");
  reporter.waiting_joins.insert(reporter.waiting_joins.end(), notices.joined.begin(), notices.joined.end());
  if (reporter.lapsed == 0) {
    for (int32_t process_set : reporter.waiting_joins) SIRTAKI_TRY(join(rank, process_set, now));
    reporter.waiting_joins.clear();
  }
  if (notices.wait_report) {
    notices.wait_report->rank = rank;
    notices.wait_report->leader = -1;
    stalls.answered(std::move(*notices.wait_report));
  }
  if (notices.goodbye) finish(rank);
  return {};
}

Status Coordinator::State::join(int32_t rank, int32_t process_set, Nanoseconds now) {
  ProcessSet* set = sets.find(process_set);
  if (!set) {
    if (sets.was_removed(process_set)) return {};
    return nonsense_report("it joins an unknown process set");
  }
  if (!set->has(rank) || set->joined.has(rank)) return nonsense_report("it joins a set twice, or one of others");
  if (set->is_broken()) {
    refuse_joins(*set, {rank});
    return {};
  }
  sets.join(*set, rank, now);
  groups.rank_joined(*set, rank);
  stalls.begun(now);
  sets_have_changed = true;
  return {};
}

void Coordinator::State::finish(int32_t rank) {
  reporters[static_cast<size_t>(rank)].has_finished = true;
  for (const auto& set : sets.all()) {
    if (!set->has(rank)) continue;
    set->finished.add(rank);
    ++set->finished_count;
    set->has_changed = true;
    groups.drop_set(*set);
    if (set->joined_count) refuse_joins(*set, set->joined.ranks());
    sets.unjoin(*set);
  }
  sets_have_changed = true;
}

// Refuses joins of a set that a rank has left. They are refused at once, and from then on no rank counts as joined,
// because members may still send to one another.
void Coordinator::State::refuse_joins(const ProcessSet& set, std::vector<int32_t> ranks) {
  const Status status = peer_finished(set.finished, "the join", names);
  decision.refusals.push_back({set.number, Kind::barrier, "", std::move(ranks), status.code(), status.text()});
}

// ---- Incoming aggregates ----------------------------------------------------------------------------------

// Merges an aggregate as if its ranks had reported one by one. Requests whose outcome depends only on the set of
// requesting ranks are submitted together.
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

// ---- Outgoing Decisions -----------------------------------------------------------------------------------

bool Coordinator::State::has_work(Nanoseconds now) const {
  return !candidates.empty() || sets_have_changed || !decision.refusals.empty() ||
         now >= std::min(stalls.next(table, sets), deadlines.next());
}

void Coordinator::State::settle_everything(Nanoseconds now) {
  if (sets_have_changed) reconsider_changed_sets();
  if (now >= deadlines.next()) pass_deadlines(now);
  for (OperationEntry* entry : candidates) settle(*entry);
  candidates.clear();
  plan_agreed(now);
  if (!set_changes.empty()) settle_set_changes();
  if (sets_have_changed) settle_joins(now);
  close_answered();
  if (now >= stalls.next(table, sets)) stalls.inspect(now, table, sets, groups, names, decision);
  sets_have_changed = false;
}

// Examines the operations whose deadline has passed. From now on those that cannot proceed count as stalled.
void Coordinator::State::pass_deadlines(Nanoseconds now) {
  for (OperationEntry* entry : deadlines.take_passed(now)) {
    consider(*entry);
    if (!entry->is_candidate) stalls.begun(now);
  }
}

void Coordinator::State::reconsider_changed_sets() {
  for (OperationEntry& entry : table.pending()) {
    if (entry.set->has_changed) consider(entry);
  }
}

void Coordinator::State::settle(OperationEntry& entry) {
  entry.is_candidate = false;
  if (entry.is_answered) return;
  if (entry.is_broken()) return refuse(entry, peer_finished(entry, names));
  if (entry.is_agreed) return;
  if (entry.same_name != &entry && refuse_different_kinds(entry)) return;
  if (!entry.is_complete() && !deadlines.may_proceed(entry)) return;
  if (const Status status = validate(entry, names); !status.is_ok()) return refuse(entry, status);
  entry.is_agreed = true;
  if (changes_process_sets(entry.kind)) {
    set_changes.push_back(&entry);
  } else if (entry.proposed->group_id != 0) {
    groups.agreed(entry, agreed);
  } else {
    agreed.push_back(&entry);
  }
}

// Refuses the entries of one name if every member has submitted exactly one of them, but not all the same.
bool Coordinator::State::refuse_different_kinds(OperationEntry& entry) {
  std::vector<OperationEntry*> entries;
  RankBits ready = entry.set->joined;
  RankBits silent = entry.set->joined;  // ranks that have joined and submitted none of them
  int32_t submissions = 0;
  OperationEntry* next = &entry;
  do {
    if (next->is_pending() && !next->is_answered && !next->is_agreed) {
      entries.push_back(next);
      ready |= next->submitted;
      silent -= next->submitted;
      submissions += next->submissions;
    }
    next = next->same_name;
  } while (next != &entry);
  const auto members = static_cast<int32_t>(entry.set->members.size());
  const bool each_once = submissions + silent.count() == members;
  if (entries.size() < 2 || ready.count() < members || !each_once) return false;
  const Status status = kinds_differ(entries, names);
  for (OperationEntry* refused : entries) refuse(*refused, status);
  return true;
}

// Refuses an entry, and all entries that share a group with it.
void Coordinator::State::refuse(OperationEntry& entry, const Status& cause) {
  std::vector<OperationEntry*> doomed{&entry};
  for (size_t i = 0; i < doomed.size(); ++i) {
    OperationEntry& refused = *doomed[i];
    if (refused.is_answered) continue;
    decision.refusals.push_back(
        {refused.set->number, refused.kind, refused.name, refused.submitted.ranks(), cause.code(), cause.text()});
    if (!refused.set->is_broken()) groups.refused(refused, cause, doomed);
    answer(refused);
  }
}

void Coordinator::State::plan_agreed(Nanoseconds now) {
  if (agreed.empty()) return;
  ready.clear();
  for (OperationEntry* entry : agreed) {
    ready.push_back({entry, item_of(*entry)});
    entry->set->join_waits_since = now;
    entry->set->next_stall_report = 0;
    if (entry->proposed->deadline) deadlines.planned(*entry);
  }
  fuse(ready, rules.fusion_threshold, decision.plans);
  decision.first_plan = plans + 1;
  plans += decision.plans.size();
  for (OperationEntry* entry : agreed) answer(*entry);
  agreed.clear();
}

// Returns an entry's item in a plan: its cache id if the cached response is the agreed one, else a new response.
PlanItem Coordinator::State::item_of(OperationEntry& entry) {
  if (entry.id && is_as_cached(entry)) return entry.id;
  SignaturePtr signature = entry.proposed;
  if (entry.priority != signature->priority) {
    auto copy = std::make_shared<Signature>(*signature);
    copy->priority = entry.priority;
    signature = std::move(copy);
  }
  // A round never comes again, so that its response would only displace others from the cache.
  if (!signature->deadline) table.remember(entry, signature, decision.retired);
  decision.responses.push_back({std::move(signature), entry.rows, entry.id});
  return is_response | (decision.responses.size() - 1);
}

// Completes the join of each set that all members have joined.
void Coordinator::State::settle_joins(Nanoseconds now) {
  for (const auto& set : sets.all()) {
    if (!std::exchange(set->has_changed, false) || !set->joined_count) continue;
    if (set->joined_count < static_cast<int32_t>(set->members.size())) continue;
    for (OperationEntry& entry : table.pending()) {
      if (entry.set != set.get() || entry.is_answered || entry.is_addition_by_members()) continue;
      constexpr char why[] = " belongs to a group that no rank has submitted whole, and all ranks have joined";
      refuse(entry, Status(SRT_MISMATCH, quoted(entry.name) + why));
    }
    decision.joins.push_back({set->number, set->last_joined});
    if (set->is_join_reported) report_end_of_stall(*set, now, decision);
    sets.unjoin(*set);
  }
}

void Coordinator::State::settle_set_changes() {
  for (OperationEntry* request : set_changes) {
    const bool adds = request->kind == Kind::add_process_set;
    const Status status = adds ? sets.check_addition(*request->proposed) : sets.check_removal(*request->proposed);
    if (!status.is_ok()) {
      refuse(*request, status);
    } else if (adds) {
      ProcessSet& set = sets.add({request->proposed->shape.begin(), request->proposed->shape.end()});
      set.is_of_its_members = request->proposed->is_addition_by_members();
      decision.set_changes.push_back({set.number, request->name, set.members});
      answer(*request);
    } else {
      decision.set_changes.push_back({request->proposed->root, request->name, {}});
      empty_set(*sets.find(request->proposed->root));
      answer(*request);
    }
  }
  set_changes.clear();
  close_answered();
  drop_removed_sets();
}

void Coordinator::State::drop_removed_sets() {
  for (const DecidedSetChange& change : decision.set_changes) {
    if (!change.members.empty()) continue;
    table.forget_set(*sets.find(change.process_set), decision.retired);
    for (Response& response : decision.responses) {  // responses of this decision are not cached after all
      if (response.signature->process_set != change.process_set) continue;
      std::erase(decision.retired, response.id);
      response.id = 0;
    }
    sets.remove(change.process_set);
  }
}

// Refuses all pending entries of a set that is being removed.
void Coordinator::State::empty_set(ProcessSet& set) {
  set.is_being_removed = true;
  for (OperationEntry& entry : table.pending()) {
    if (entry.set != &set || entry.is_answered) continue;
    refuse(entry, Status(SRT_INVALID_ARGUMENT, format("process set %d was removed before %s took place", set.number,
                                                      quoted(entry.name).c_str())));
  }
  groups.drop_set(set);
}

void Coordinator::State::answer(OperationEntry& entry) {
  entry.is_answered = true;
  answered.push_back(&entry);
}

void Coordinator::State::close_answered() {
  for (OperationEntry* entry : answered) {
    if (entry->proposed->deadline) deadlines.closed(*entry);
    table.close(*entry);
  }
  answered.clear();
}

// ---- The interface ----------------------------------------------------------------------------------------

Coordinator::Coordinator(std::vector<std::string> rank_names, CoordinatorRules rules, std::vector<int32_t> leaders)
    : state_(std::make_unique<State>(std::move(rank_names), rules, std::move(leaders))) {}

Coordinator::~Coordinator() = default;

Status Coordinator::merge(int32_t rank, std::span<const uint8_t> report, Nanoseconds now) {
  const std::string& name = state_->names[static_cast<size_t>(rank)];
  if (!decode(report, state_->report)) return Status(SRT_PROTOCOL, name + " sent a report of malformed bytes");
  const Status status = state_->merge(rank, now);
  return status.is_ok() ? status : Status(status.code(), name + ": " + status.text());
}

Status Coordinator::merge_aggregate(int32_t leader, const RankBits& subtree, std::span<const uint8_t> aggregate,
                                    Nanoseconds now) {
  const std::string& name = state_->names[static_cast<size_t>(leader)];
  if (!decode(aggregate, subtree, now, state_->aggregate))
    return Status(SRT_PROTOCOL, name + " reported malformed bytes for its host, or for ranks that are not its own");
  const Status status = state_->merge_many(now);
  return status.is_ok() ? status : Status(status.code(), name + ", for the ranks below it: " + status.text());
}

void Coordinator::change_settings(LiveValues values) {
  state_->rules.fusion_threshold = value_in(values, Knob::fusion_threshold);
  state_->decision.settings = std::move(values);
}

bool Coordinator::has_left(int32_t rank) const { return state_->reporters[static_cast<size_t>(rank)].has_finished; }

bool Coordinator::decide(Nanoseconds now, Bytes& out) {
  State& state = *state_;
  if (!state.has_work(now)) return false;
  state.settle_everything(now);
  if (state.decision.says_nothing()) return false;
  state.lateness.publish(now, state.decision.lateness);
  state.decision.number = ++state.decisions;
  encode(state.decision, out);
  state.decision.clear();
  return true;
}

Nanoseconds Coordinator::next_deadline() const {
  return std::min(state_->stalls.next(state_->table, state_->sets), state_->deadlines.next());
}

}  // namespace sirtaki
