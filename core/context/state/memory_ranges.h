// The memory that operations in flight read and write. Several operations may read the same memory, but while one
// writes it, no other may read or write it.
#pragma once

#include <cstdint>
#include <map>

#include "plan/request.h"

namespace sirtaki {

class MemoryRanges {
 public:
  struct Use {
    uintptr_t input = 0, output = 0;
    int64_t input_bytes = 0, output_bytes = 0;

    bool reads() const { return input && input_bytes && !(input == output && input_bytes <= output_bytes); }
    bool writes() const { return output && output_bytes; }
  };

  // Returns the operation in flight that conflicts with `use`; 0 if there is none.
  Ticket collision(const Use& use) const;
  void add(Ticket handle, const Use& use);
  void remove(Ticket handle, const Use& use);

 private:
  struct Range {
    uintptr_t end;
    Ticket handle;
  };
  using Ranges = std::multimap<uintptr_t, Range>;

  static Ticket overlap(const Ranges& ranges, int64_t longest, uintptr_t begin, uintptr_t end);
  static void erase(Ranges& ranges, uintptr_t begin, Ticket handle);

  Ranges reads_, writes_;
  int64_t longest_ = 0;  // bytes of the longest range so far: an overlap begins at most this far before an address
};

}  // namespace sirtaki
