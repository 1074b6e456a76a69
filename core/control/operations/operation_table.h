// The coordinator's table of operations: the cached response of each, and the ranks that have submitted it so far.
#pragma once

#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "control/messages/arrivals.h"
#include "control/messages/rank_bits.h"
#include "control/messages/response_cache.h"
#include "control/operations/process_sets.h"

namespace sirtaki {

// One (process set, kind, name) that is pending, cached, or both.
struct OperationEntry {
  // A member whose request does not agree with the proposed one.
  struct Dissent {
    int32_t rank;
    SignaturePtr signature;
  };

  OperationKey key() const { return {set->number, kind, name}; }
  bool is_pending() const { return submissions > 0; }
  bool is_addition_by_members() const { return is_pending() && proposed->is_addition_by_members(); }
  RankBits participants() const;        // the set's members; the two ranks of a send; those of an addition
  bool is_complete() const;             // every participant has submitted or joined
  RankBits missing() const;             // participants that have done neither
  RankBits absentees() const;           // members that have not submitted
  bool is_broken() const;               // a participant has said goodbye
  const Signature& signature_of(int32_t rank) const;

  ProcessSet* set = nullptr;
  Kind kind = Kind::allreduce;
  std::string name;
  std::list<OperationEntry>::iterator place;     // in one of the table's two lists
  OperationEntry* same_name = nullptr;           // a ring of the entries that differ only in their kind

  CacheId id = 0;
  SignaturePtr cached;
  std::vector<int64_t> cached_rows;

  SignaturePtr proposed;                // the request of the first submitter
  std::vector<Dissent> dissents;
  RankBits submitted;
  int32_t submissions = 0;
  int32_t absences = 0;
  int32_t priority = 0;                 // the highest of all submissions
  std::vector<int64_t> rows;            // ragged kinds only: row_counts_each() per member, in member order
  Arrivals arrivals;                    // times of the submissions
  Nanoseconds next_stall_report = 0;
  bool is_past_deadline = false;        // it has a deadline, which has passed
  bool is_candidate = false;            // decide() examines it
  bool is_agreed = false;               // all members agree; only its group may still delay it
  bool is_answered = false;             // planned or refused; close() follows at the end of the decision
};

class OperationTable {
 public:
  OperationTable(int32_t world_size, uint32_t cache_capacity) : world_size_(world_size), cache_(cache_capacity) {}

  OperationEntry* find(CacheId id) const { return cache_.find(id); }
  bool was_issued(CacheId id) const { return ids_.was_issued(id); }
  OperationEntry* find(const OperationKey& key) const;
  OperationEntry& find_or_create(const OperationKey& key, ProcessSet& set);
  void drop_if_unused(OperationEntry& entry);    // drops it if it is neither pending nor cached

  // Makes an entry pending, with its first submission.
  void open(OperationEntry& entry, SignaturePtr proposed);

  // Closes an answered entry. It stays in the table only if it is cached.
  void close(OperationEntry& entry);

  // Caches what an entry's members agreed on, if there is room. Appends the ids that are retired for it to `retired`.
  void remember(OperationEntry& entry, SignaturePtr signature, std::vector<CacheId>& retired);
  void forget(OperationEntry& entry, std::vector<CacheId>& retired);

  // Drops the cached entries of a set that has no pending entries any more.
  void forget_set(const ProcessSet& set, std::vector<CacheId>& retired);

  std::list<OperationEntry>& pending() { return pending_; }
  const std::list<OperationEntry>& pending() const { return pending_; }

 private:
  void erase(OperationEntry& entry, std::list<OperationEntry>& list);

  int32_t world_size_;
  std::list<OperationEntry> pending_;            // by the time of the first submission
  std::list<OperationEntry> idle_;               // cached, the least recently planned first
  std::unordered_map<OperationKey, OperationEntry*, OperationKeyHash> by_key_;
  CacheTable<OperationEntry> cache_;
  CacheIds ids_;
};

}  // namespace sirtaki
