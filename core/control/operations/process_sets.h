// The coordinator's view of the process sets, and of their members that have joined or left.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "control/messages/rank_bits.h"
#include "plan/request.h"

namespace sirtaki {

struct ProcessSet {
  ProcessSet(int32_t number, std::vector<int32_t> members, int32_t world_size);

  bool has(int32_t rank) const { return bits.has(rank); }
  size_t position(int32_t rank) const;  // only for a member
  bool is_broken() const { return finished_count > 0; }

  int32_t number;
  std::vector<int32_t> members;         // ascending
  RankBits bits;                        // the members
  RankBits joined;
  int32_t joined_count = 0;
  int32_t last_joined = 0;
  Nanoseconds first_joined = 0;         // time when the first member joined
  Nanoseconds join_waits_since = 0;     // time of the first join, or of the last plan after it
  Nanoseconds next_stall_report = 0;    // time of the join's next report, after its first
  bool is_join_reported = false;        // the join was reported as a stall
  RankBits finished;                    // members that have said goodbye
  int32_t finished_count = 0;
  bool has_changed = false;             // a rank joined or left, which may complete pending operations
  bool is_of_its_members = false;       // its members have added it, and there may be others of the same ranks
  bool is_being_removed = false;        // removed by the decision that is being made
};

class ProcessSets {
 public:
  explicit ProcessSets(int32_t world_size);

  ProcessSet* find(int32_t number) const;
  bool was_removed(int32_t number) const { return number > 0 && number < next_number_ && !find(number); }
  const std::vector<std::unique_ptr<ProcessSet>>& all() const { return sets_; }

  // Returns the number of sets that some but not all members have joined.
  int32_t joining() const { return joining_; }
  void join(ProcessSet& set, int32_t rank, Nanoseconds now);
  void unjoin(ProcessSet& set);

  // Return ok if the request to add or remove a process set can be fulfilled, else the reason.
  Status check_addition(const Signature& request) const;
  Status check_removal(const Signature& request) const;

  ProcessSet& add(std::vector<int32_t> members);
  void remove(int32_t number);

 private:
  int32_t world_size_;
  int32_t next_number_ = 0;             // never reused
  int32_t joining_ = 0;
  std::vector<std::unique_ptr<ProcessSet>> sets_;  // by number
};

}  // namespace sirtaki
