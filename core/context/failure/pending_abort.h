// Aborts that have yet to end the context: the program's own, which any thread may request, and another rank's.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "context/failure/engine_failure.h"

namespace sirtaki {

class PendingAbort {
 public:
  PendingAbort(const OwnRank& own, Negotiation& negotiation, EngineFailure& failure)
      : own_(own), negotiation_(negotiation), failure_(failure) {}

  // Asks the driver to give up the job; callable from any thread. The first reason counts.
  void request(std::string reason);
  bool is_requested() const { return is_requested_.load(std::memory_order_seq_cst); }

  // Functions for the driver.

  // Fails the context if the program has requested it, and reads the abort that a local peer may have written.
  void look(Nanoseconds now) REQUIRES(driving);
  // Passes on another rank's abort, and records it, to act on it later. An abort may overtake the Decision that made
  // its origin give up, for instance a refusal on all ranks, because it takes another path. This rank's operations
  // should end with the result of that Decision.
  void receive(AbortNotice notice, Nanoseconds now) REQUIRES(driving);
  bool is_received() const REQUIRES(driving) { return received_.has_value(); }
  // Fails the context with the received abort once its Decision has arrived, or the time for that is up.
  void act(Nanoseconds now) REQUIRES(driving);
  Nanoseconds next_due() const REQUIRES(driving);  // the next time to call act()

 private:
  std::string reason();

  OwnRank own_;
  Negotiation& negotiation_;
  EngineFailure& failure_;
  std::atomic<bool> is_requested_{false};
  Mutex mutex_;
  std::string reason_ GUARDED_BY(mutex_);

  std::optional<AbortNotice> received_ GUARDED_BY(driving);
  Nanoseconds due_at_ GUARDED_BY(driving) = 0;
};

}  // namespace sirtaki
