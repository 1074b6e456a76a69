// The policy for completing an operation in the thread that submits it, before the engine's thread takes over.
#pragma once

#include <atomic>
#include <cstdint>

namespace sirtaki {

// Credit for attempts. Waking the engine's thread and being woken by it takes longer than a small operation between
// ranks that arrive together. A thread that must not wait therefore tries to complete its operation for about that
// long, as long as attempts succeed: after three failures in a row only one operation of many is tried. One thread
// tries at a time; operations that other threads submit meanwhile are independent of it.
class InlineCompletion {
 public:
  bool begin() {
    const int32_t before = credit_.load(std::memory_order_relaxed);
    if (before < 0) credit_.store(before + 1, std::memory_order_relaxed);  // a lost update does no harm
    return before >= 0 && !is_one_made_.exchange(true, std::memory_order_relaxed);
  }
  void end(bool has_succeeded) {
    const int32_t left = has_succeeded ? full : credit_.load(std::memory_order_relaxed) - 1;
    credit_.store(left < 0 ? pause : left, std::memory_order_relaxed);
    is_one_made_.store(false, std::memory_order_relaxed);
  }

 private:
  static constexpr int32_t full = 2, pause = -64;  // pause: operations not tried after failures
  std::atomic<int32_t> credit_{full};
  std::atomic<bool> is_one_made_{false};
};

}  // namespace sirtaki
