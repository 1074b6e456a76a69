// The flight recorder: the last operations of this rank, always on. It is a ring of records, allocated once; an
// operation's record is filled while the operation proceeds, and is reused after `capacity` further operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "observe/records/record.h"

namespace sirtaki {

class Recorder {
 public:
  explicit Recorder(size_t capacity) : ring_(capacity ? capacity : 1) {}

  OperationRecord& begin(const Submitted& what, Nanoseconds moment) {
    OperationRecord& record = place_of(++last_);
    record = {};
    record.number = last_;
    record.submitted = moment;
    record.kind = what.kind;
    record.process_set = what.process_set;
    record.bytes = what.bytes;
    record.name = ShortName(what.name);
    return record;
  }

  // Returns an operation's record; nullptr if a newer operation has replaced it.
  OperationRecord* find(uint64_t number) {
    OperationRecord& record = place_of(number);
    return record.number == number && number ? &record : nullptr;
  }

  const OperationRecord* find(uint64_t number) const { return const_cast<Recorder*>(this)->find(number); }

  // Calls visit(record) for each remembered operation, the oldest first; for the last `most` of them.
  template <typename Visit>
  void visit(Visit&& visit_record, size_t most = SIZE_MAX) const {
    const size_t count = std::min(ring_.size(), most);
    const uint64_t first = last_ > count ? last_ - count + 1 : 1;
    for (uint64_t number = first; number <= last_; ++number) visit_record(ring_[number % ring_.size()]);
  }

  size_t capacity() const { return ring_.size(); }

 private:
  OperationRecord& place_of(uint64_t number) { return ring_[number % ring_.size()]; }

  std::vector<OperationRecord> ring_;
  uint64_t last_ = 0;
};

}  // namespace sirtaki
