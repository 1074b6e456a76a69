#include "fake_gpu/order.h"

#include <algorithm>

namespace fake {
namespace {

bool covers(const Access& later, const Access& earlier) {
  return later.stream == earlier.stream && later.range.address == earlier.range.address &&
         later.range.bytes == earlier.range.bytes && later.range.is_written >= earlier.range.is_written;
}

}  // namespace

bool overlap(const Range& a, const Range& b) {
  const auto first = reinterpret_cast<uintptr_t>(a.address), second = reinterpret_cast<uintptr_t>(b.address);
  return first < second + b.bytes && second < first + a.bytes;
}

void Clock::join(const Clock& other) {
  for (const auto& [stream, count] : other.tasks_) tasks_[stream] = std::max(tasks_[stream], count);
}

uint64_t Clock::tasks_of(int stream) const {
  const auto found = tasks_.find(stream);
  return found == tasks_.end() ? 0 : found->second;
}

std::string Access::text() const {
  return function + " (task " + std::to_string(task) + " of stream " + std::to_string(stream) + ") " +
         (range.is_written ? "writes" : "reads");
}

std::string Accesses::add(const Access& access, const Clock& clock, const Clock& host) {
  std::erase_if(all_, [&](const Access& older) { return older.is_before(host) || covers(access, older); });
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const Access& older) {
    return overlap(older.range, access.range) && (older.range.is_written || access.range.is_written) &&
           !older.is_before(clock);
  });
  const std::string conflict = found == all_.end() ? "" : found->text();
  all_.push_back(access);
  return conflict;
}

const Access* Accesses::first_after(const Clock& host) const {
  const Access* found = nullptr;
  for (const Access& one : all_)
    if (!one.is_before(host) && (!found || one.range.is_written > found->range.is_written)) found = &one;
  return found;
}

}  // namespace fake
