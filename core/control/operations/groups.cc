#include "control/operations/groups.h"

#include <algorithm>

namespace sirtaki {
void Groups::drop_settled(Group& group) {
  std::erase_if(group.refused, [](const Refused& refused) {
    return std::all_of(refused.owed.begin(), refused.owed.end(), [](int32_t count) { return count == 0; });
  });
}

Status Groups::submitted(const ProcessSet& set, int32_t rank, const Signature& signature) {
  const Key key{set.number, signature.group_id};
  Group& group = groups_[key];
  const size_t position = set.position(rank);
  for (Refused& earlier : group.refused) {
    if (earlier.owed[position] == 0) continue;
    --earlier.owed[position];
    const Status cause = earlier.cause;
    drop_settled(group);
    drop_if_empty(key);
    return cause;
  }
  if (group.shares.empty()) group.shares.resize(set.members.size());
  RankProgress& share = group.shares[position];
  if (share.expected && share.submitted >= share.expected) {
    return Status(SRT_MISMATCH,
                  format("group %lld has %d tensors already, so '%.160s' cannot be one of them; a group "
                         "id may be used again only when its tensors are complete",
                         static_cast<long long>(signature.group_id), share.expected, signature.name.c_str()));
  }
  share.expected = signature.group_size;
  ++share.submitted;
  return {};
}

void Groups::add(OperationEntry& entry, int64_t group_id) {
  std::vector<OperationEntry*>& entries = groups_[{entry.set->number, group_id}].entries;
  const bool is_new = !entry.is_pending() || std::find(entries.begin(), entries.end(), &entry) == entries.end();
  if (is_new) entries.push_back(&entry);
}

void Groups::agreed(OperationEntry& entry, std::vector<OperationEntry*>& complete) {
  const Key key{entry.set->number, entry.proposed->group_id};
  Group& group = groups_[key];
  if (++group.agreed < static_cast<size_t>(entry.proposed->group_size)) return;
  std::erase_if(group.entries, [&](OperationEntry* member) {
    if (member->is_agreed) complete.push_back(member);
    return member->is_agreed;
  });
  group.agreed = 0;
  if (group.entries.empty()) group.shares.clear();
  drop_if_empty(key);
}

void Groups::refused(const OperationEntry& culprit, const Status& cause, std::vector<OperationEntry*>& refused) {
  const auto refuse = [&](const Signature& signature) {
    const Key key{culprit.set->number, signature.group_id};
    const auto found = groups_.find(key);
    if (found == groups_.end() || found->second.entries.empty()) return;
    refuse_group(found->second, culprit, cause, refused);
    drop_if_empty(key);
  };
  refuse(*culprit.proposed);
  for (const OperationEntry::Dissent& dissent : culprit.dissents) refuse(*dissent.signature);
}

void Groups::refuse_group(Group& group, const OperationEntry& culprit, const Status& cause,
                          std::vector<OperationEntry*>& refused) {
  refused.insert(refused.end(), group.entries.begin(), group.entries.end());
  const ProcessSet& set = *culprit.set;
  Refused& record = group.refused.emplace_back(Refused{cause, std::vector<int32_t>(set.members.size(), 0)});
  for (size_t i = 0; i < set.members.size(); ++i) {
    const RankProgress share = group.shares.empty() ? RankProgress{} : group.shares[i];
    if (!set.joined.has(set.members[i])) record.owed[i] = debt_of(set.members[i], share, culprit);
  }
  drop_settled(group);
  group.entries.clear();
  group.shares.clear();
  group.agreed = 0;
}

// Returns how many tensors of the culprit's group a rank has yet to submit. A rank that submitted the culprit in
// another group, or in none, does not take part in this group; a rank that submitted it for another kind of operation
// does, with the remaining tensors.
int32_t Groups::debt_of(int32_t rank, const RankProgress& share, const OperationEntry& culprit) {
  if (share.expected == 0 && culprit.submitted.has(rank)) return 0;
  int32_t owed = (share.expected ? share.expected : culprit.proposed->group_size) - share.submitted;
  for (const OperationEntry* other = culprit.same_name; other != &culprit; other = other->same_name) {
    if (!other->is_pending() || !other->submitted.has(rank)) continue;
    if (other->signature_of(rank).group_id != culprit.proposed->group_id) --owed;
  }
  return std::max(owed, 0);
}

RankBits Groups::missing(const OperationEntry& entry) const {
  RankBits ranks = entry.missing();
  const auto found = groups_.find({entry.set->number, entry.proposed->group_id});
  if (found == groups_.end()) return ranks;
  const Group& group = found->second;
  for (size_t i = 0; i < group.shares.size(); ++i) {
    const int32_t rank = entry.set->members[i];
    if (group.shares[i].submitted < entry.proposed->group_size && !entry.set->joined.has(rank)) ranks.add(rank);
  }
  return ranks;
}

void Groups::rank_joined(const ProcessSet& set, int32_t rank) {
  const size_t position = set.position(rank);
  for (auto next = groups_.begin(); next != groups_.end();) {
    auto& [key, group] = *next;
    if (key.process_set == set.number) {
      for (Refused& refused : group.refused) refused.owed[position] = 0;
      drop_settled(group);
    }
    const bool is_empty = group.refused.empty() && group.entries.empty();
    next = is_empty ? groups_.erase(next) : std::next(next);
  }
}

void Groups::drop_set(const ProcessSet& set) {
  std::erase_if(groups_, [&](const auto& item) { return item.first.process_set == set.number; });
}

void Groups::drop_if_empty(const Key& key) {
  const auto found = groups_.find(key);
  if (found == groups_.end()) return;
  const Group& group = found->second;
  if (group.refused.empty() && group.entries.empty() && group.shares.empty()) groups_.erase(found);
}

}  // namespace sirtaki
