#include "context/state/memory_ranges.h"

#include <algorithm>

namespace sirtaki {

Ticket MemoryRanges::overlap(const Ranges& ranges, int64_t longest, uintptr_t begin, uintptr_t end) {
  const auto reach = static_cast<uintptr_t>(longest);
  for (auto it = ranges.lower_bound(begin > reach ? begin - reach : 0); it != ranges.end() && it->first < end; ++it)
    if (it->second.end > begin) return it->second.handle;
  return 0;
}

Ticket MemoryRanges::collision(const Use& use) const {
  if (use.writes()) {
    const uintptr_t end = use.output + static_cast<uintptr_t>(use.output_bytes);
    if (const Ticket other = overlap(writes_, longest_, use.output, end)) return other;
    if (const Ticket other = overlap(reads_, longest_, use.output, end)) return other;
  }
  if (!use.reads()) return 0;
  return overlap(writes_, longest_, use.input, use.input + static_cast<uintptr_t>(use.input_bytes));
}

void MemoryRanges::add(Ticket handle, const Use& use) {
  longest_ = std::max({longest_, use.input_bytes, use.output_bytes});
  if (use.writes()) writes_.emplace(use.output, Range{use.output + static_cast<uintptr_t>(use.output_bytes), handle});
  if (use.reads()) reads_.emplace(use.input, Range{use.input + static_cast<uintptr_t>(use.input_bytes), handle});
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
  if (use.writes()) erase(writes_, use.output, handle);
  if (use.reads()) erase(reads_, use.input, handle);
}

}  // namespace sirtaki
