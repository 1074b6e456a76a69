#include "control/operations/operation_table.h"

namespace sirtaki {

RankBits OperationEntry::participants() const {
  if (!traits(kind).is_of_a_pair && !is_addition_by_members()) return set->bits;
  RankBits some = set->bits;
  some.clear();
  if (is_addition_by_members()) {
    for (int64_t rank : proposed->shape) some.add(static_cast<int32_t>(rank));
  } else {
    some.add(proposed->root);
    some.add(proposed->destination);
  }
  return some;
}

bool OperationEntry::is_broken() const {
  if (is_addition_by_members()) return set->finished.overlaps(participants());
  if (!traits(kind).is_of_a_pair) return set->is_broken();
  return set->finished.has(proposed->root) || set->finished.has(proposed->destination);
}

bool OperationEntry::is_complete() const {
  if (is_addition_by_members()) return missing().count() == 0;
  const auto needed = traits(kind).is_of_a_pair ? 2 : static_cast<int32_t>(set->members.size());
  if (submissions >= needed) return true;
  if (set->joined_count == 0 || submissions + set->joined_count < needed) return false;
  return missing().count() == 0;
}

RankBits OperationEntry::missing() const {
  RankBits ranks = participants();
  ranks -= submitted;
  if (!is_addition_by_members()) ranks -= set->joined;  // a rank that has joined may still add a set of its own
  return ranks;
}

RankBits OperationEntry::absentees() const {
  RankBits ranks = set->bits;
  ranks -= submitted;
  return ranks;
}

const Signature& OperationEntry::signature_of(int32_t rank) const {
  for (const Dissent& dissent : dissents) {
    if (dissent.rank == rank) return *dissent.signature;
  }
  return *proposed;
}

OperationEntry* OperationTable::find(const OperationKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

OperationEntry& OperationTable::find_or_create(const OperationKey& key, ProcessSet& set) {
  if (OperationEntry* found = find(key)) return *found;
  OperationEntry& entry = idle_.emplace_front();
  entry.place = idle_.begin();
  entry.set = &set;
  entry.kind = key.kind;
  entry.name = key.name;
  entry.same_name = &entry;
  entry.submitted = RankBits(world_size_);
  for (const KindTraits& other : kind_table) {
    const auto sibling = by_key_.find({key.process_set, other.kind, key.name});
    if (sibling == by_key_.end()) continue;
    entry.same_name = sibling->second->same_name;
    sibling->second->same_name = &entry;
    break;
  }
  by_key_.emplace(entry.key(), &entry);
  return entry;
}

void OperationTable::drop_if_unused(OperationEntry& entry) {
  if (!entry.is_pending() && !entry.id) erase(entry, idle_);
}

void OperationTable::open(OperationEntry& entry, SignaturePtr proposed) {
  pending_.splice(pending_.end(), idle_, entry.place);
  entry.priority = proposed->priority;
  if (is_ragged(entry.kind)) {
    const size_t members = entry.set->members.size();
    entry.rows.assign(members * row_counts_each(entry.kind, members), 0);
  }
  entry.proposed = std::move(proposed);
  entry.arrivals = {};
  entry.next_stall_report = 0;
}

void OperationTable::close(OperationEntry& entry) {
  entry.proposed.reset();
  entry.dissents.clear();
  entry.submitted.clear();
  entry.submissions = 0;
  entry.absences = 0;
  entry.is_past_deadline = false;
  entry.is_agreed = false;
  entry.is_answered = false;
  if (entry.id) {
    idle_.splice(idle_.end(), pending_, entry.place);
  } else {
    erase(entry, pending_);
  }
}

void OperationTable::remember(OperationEntry& entry, SignaturePtr signature, std::vector<CacheId>& retired) {
  forget(entry, retired);
  if (cache_.size() >= cache_.capacity()) {
    if (idle_.empty()) return;
    OperationEntry& oldest = idle_.front();
    forget(oldest, retired);
    erase(oldest, idle_);
  }
  entry.id = ids_.take();
  entry.cached = std::move(signature);
  entry.cached_rows = entry.rows;
  cache_.put(entry.id, &entry);
}

void OperationTable::forget(OperationEntry& entry, std::vector<CacheId>& retired) {
  if (!entry.id) return;
  retired.push_back(entry.id);
  cache_.remove(entry.id);
  ids_.give_back(entry.id);
  entry.id = 0;
  entry.cached.reset();
  entry.cached_rows.clear();
}

void OperationTable::forget_set(const ProcessSet& set, std::vector<CacheId>& retired) {
  for (auto next = idle_.begin(); next != idle_.end();) {
    OperationEntry& entry = *next++;
    if (entry.set != &set) continue;
    forget(entry, retired);
    erase(entry, idle_);
  }
}

void OperationTable::erase(OperationEntry& entry, std::list<OperationEntry>& list) {
  OperationEntry* before = &entry;
  while (before->same_name != &entry) before = before->same_name;
  before->same_name = entry.same_name;
  by_key_.erase(entry.key());
  list.erase(entry.place);
}

}  // namespace sirtaki
