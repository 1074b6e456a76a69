// Groups of tensors that complete together: they are planned in one Decision, or refused for one cause.
#pragma once

#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "control/operations/operation_table.h"

namespace sirtaki {

class Groups {
 public:
  // Records that a rank submitted a member of a group. Fails if the group was refused before: this request is then
  // refused too.
  Status submitted(const ProcessSet& set, int32_t rank, const Signature& signature);

  // Records a pending entry that a rank requested as a member of this group.
  void add(OperationEntry& entry, int64_t group_id);

  // Records that all ranks agree on an entry. If it was the last entry of its group, appends the group's entries to
  // `complete`.
  void agreed(OperationEntry& entry, std::vector<OperationEntry*>& complete);

  // Records that an entry is refused. Appends the entries that share a group with it to `refused`, and keeps the
  // cause for the ranks that have yet to submit members of these groups.
  void refused(const OperationEntry& culprit, const Status& cause, std::vector<OperationEntry*>& refused);

  // Returns the ranks that an agreed entry's group waits for.
  RankBits missing(const OperationEntry& entry) const;

  // Records that a rank has joined, and so will submit no more members of groups.
  void rank_joined(const ProcessSet& set, int32_t rank);

  // Drops all groups of a set, which will never be complete.
  void drop_set(const ProcessSet& set);

 private:
  struct Key {
    int32_t process_set;
    int64_t group_id;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<int64_t>()(key.group_id) ^ (static_cast<size_t>(key.process_set) * 0x9e3779b97f4a7c15);
    }
  };
  // The progress of one rank in submitting a group.
  struct RankProgress {
    int32_t expected = 0;               // 0: unknown before the rank's first submission
    int32_t submitted = 0;
  };
  // A refused group of which some ranks have yet to submit members.
  struct Refused {
    Status cause;
    std::vector<int32_t> owed;          // by member position: number of further tensors to refuse
  };
  struct Group {
    std::vector<OperationEntry*> entries;
    std::vector<RankProgress> shares;          // by member position
    size_t agreed = 0;
    std::vector<Refused> refused;       // the earliest first
  };

  static int32_t debt_of(int32_t rank, const RankProgress& share, const OperationEntry& culprit);
  static void drop_settled(Group& group);
  void refuse_group(Group& group, const OperationEntry& culprit, const Status& cause,
                    std::vector<OperationEntry*>& refused);
  void drop_if_empty(const Key& key);

  std::unordered_map<Key, Group, KeyHash> groups_;
};

}  // namespace sirtaki
