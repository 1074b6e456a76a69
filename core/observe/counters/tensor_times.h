// The tensors that have cost a rank the most time, by the records of its last operations.
#pragma once

#include <span>
#include <vector>

#include "observe/records/record.h"

namespace sirtaki {

// A time in which the program waited.
struct WaitSpan {
  Nanoseconds begin, end;
};

// The operations of one name: their number, the part of `waits` in which any of them was in flight, and how long they
// took until all ranks had agreed on them, and from then on.
struct TensorTimes {
  ShortName name;
  int64_t operations = 0;
  Nanoseconds exposed = 0, wait = 0, transfer = 0;
};

// Sums up by name the operations that have ended well, move tensors, and were submitted after the first wait. Returns
// at most `most` names, those with the longest exposed time first, or without waits those with the longest wait.
// `waits`: ascending, and apart from each other.
std::vector<TensorTimes> slowest_tensors(std::span<const OperationRecord> records, std::span<const WaitSpan> waits,
                                         size_t most);

}  // namespace sirtaki
