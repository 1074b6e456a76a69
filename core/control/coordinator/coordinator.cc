#include "control/coordinator/coordinator.h"

#include <algorithm>

#include "control/coordinator/coordinator_state.h"

namespace sirtaki {
namespace {

bool is_of_pair(const Signature& signature, int32_t rank, const ProcessSet& set) {
  const auto has = [&](int32_t one) { return std::binary_search(set.members.begin(), set.members.end(), one); };
  return signature.root != signature.destination && has(signature.root) && has(signature.destination) &&
         (rank == signature.root || rank == signature.destination);
}

}  // namespace

Coordinator::State::State(std::vector<std::string> rank_names, CoordinatorRules coordinator_rules,
                          std::vector<int32_t> leaders)
    : names(std::move(rank_names)), rules(coordinator_rules), sets(static_cast<int32_t>(names.size())),
      table(static_cast<int32_t>(names.size()), rules.cache_capacity), deadlines(rules.late_results),
      stalls(rules.stall_report, rules.stall_deadline, std::move(leaders)), lateness(names.size()),
      reporters(names.size()), senders(static_cast<int32_t>(names.size())),
      absentees(static_cast<int32_t>(names.size())) {}

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
