#include "context/memory_ranges.h"

#include <algorithm>

namespace sirtaki {

Ticket MemoryRanges::overlap(const Ranges& ranges, int64_t longest, uintptr_t begin, uintptr_t end) {
  const auto reach = static_cast<uintptr_t>(longest);
  for (auto it = ranges.lower_bound(begin > reach ? begin - reach : 0); it != ranges.end() && it->first < end; ++it)
    if (it->second.end > begin) return it->second.handle;
  return 0;
}

Ticket MemoryRanges::collision(const Use& use) const {
  if (use.bytes == 0) return 0;
  const auto bytes = static_cast<uintptr_t>(use.bytes);
  if (use.output) {
    if (const Ticket other = overlap(writes_, longest_, use.output, use.output + bytes)) return other;
    if (const Ticket other = overlap(reads_, longest_, use.output, use.output + bytes)) return other;
  }
  if (use.input && use.input != use.output) return overlap(writes_, longest_, use.input, use.input + bytes);
  return 0;
}

void MemoryRanges::add(Ticket handle, const Use& use) {
  if (use.bytes == 0) return;
  const auto bytes = static_cast<uintptr_t>(use.bytes);
  longest_ = std::max(longest_, use.bytes);
  if (use.output) writes_.emplace(use.output, Range{use.output + bytes, handle});
  if (use.input && use.input != use.output) reads_.emplace(use.input, Range{use.input + bytes, handle});
}

void MemoryRanges::erase(Ranges& ranges, uintptr_t begin, Ticket handle) {
  const auto [first, last] = ranges.equal_range(begin);
  for (auto it = first; it != last; ++it)
    if (it->second.handle == handle) {
      ranges.erase(it);
      return;
    }
}

void MemoryRanges::remove(Ticket handle, const Use& use) {
  if (use.bytes == 0) return;
  if (use.output) erase(writes_, use.output, handle);
  if (use.input && use.input != use.output) erase(reads_, use.input, handle);
}

}  // namespace sirtaki
