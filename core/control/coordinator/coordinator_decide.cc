// The half of the coordinator that makes Decisions: complete operations are planned or refused, and all ranks are
// notified.
#include <algorithm>

#include "control/coordinator/coordinator_state.h"

namespace sirtaki {
namespace {

// Returns whether the members agreed on the cached response.
bool is_as_cached(const OperationEntry& entry) {
  if (is_ragged(entry.kind) && entry.rows != entry.cached_rows) return false;
  if (entry.proposed == entry.cached) return true;
  return agree(*entry.proposed, *entry.cached);
}

}  // namespace

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

}  // namespace sirtaki
