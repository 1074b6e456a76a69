// Operations with a deadline: when they are decided without the ranks that are late, and which rounds are over.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "control/operations/operation_table.h"

namespace sirtaki {

class Deadlines {
 public:
  // Creates the records. `most_missed`: rounds in a row that may be decided without a rank, which keeps their results.
  explicit Deadlines(int32_t most_missed) : most_missed_(most_missed) {}

  // Returns whether a request belongs to a round that was decided without its rank.
  bool is_over(const Signature& signature) const;

  // Records that an entry has a deadline and became pending, or that it is not pending any more.
  void opened(OperationEntry& entry) { timed_.push_back(&entry); }
  void closed(const OperationEntry& entry) { std::erase(timed_, &entry); }

  // Returns a time at which take_passed() has something to return; `never` if there is none.
  Nanoseconds next() const;

  // Returns the entries whose deadline has passed since the last call.
  std::vector<OperationEntry*> take_passed(Nanoseconds now);

  // Returns whether an entry may be decided without the ranks that are missing: its deadline has passed, its quorum is
  // there, all requests agree, and none of the missing ranks has as many results to catch up with as it may keep.
  bool may_proceed(const OperationEntry& entry) const;

  // Records that an entry goes into a plan, with the ranks that have submitted it.
  void planned(const OperationEntry& entry);

 private:
  struct Series {
    uint64_t last_round = 0;       // the last one that was planned
    std::vector<int32_t> missed;   // rounds in a row that were planned without a rank, by member position; or empty
  };
  using Key = std::pair<int32_t, std::string>;  // the process set and the name without its round
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<std::string>()(key.second) ^ static_cast<size_t>(key.first) * 0x9e3779b97f4a7c15;
    }
  };

  const Series* find(const Signature& signature) const;

  int32_t most_missed_;
  std::vector<OperationEntry*> timed_;   // pending; few, because a rank has one round of a name in flight
  std::unordered_map<Key, Series, KeyHash> series_;
};

}  // namespace sirtaki
