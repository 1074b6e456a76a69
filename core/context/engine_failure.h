// The failure that ends a context. The first one wins: it is sent to the other ranks, and ends all operations.
#pragma once

#include <atomic>

#include "context/caller_state.h"
#include "context/driver_role.h"
#include "context/execution.h"
#include "context/failure_report.h"
#include "context/negotiation.h"
#include "context/own_rank.h"

namespace sirtaki {

// The ranks to notify of a failure: none if this rank leaves in good order; its host if all are notified anyway.
enum class AbortScope { nobody, host, everyone };

struct EngineFailureParts {
  OwnRank own;
  SharedCallerState& state;
  Negotiation& negotiation;
  Execution& execution;
  const FailureReport& report;
};

class EngineFailure {
 public:
  explicit EngineFailure(const EngineFailureParts& parts);

  // For any thread, without a lock: what is written before `has_happened_` does not change any more.
  bool has_happened() const { return has_happened_.load(std::memory_order_acquire); }
  AbortNotice notice() const { return has_happened() ? notice_ : AbortNotice(); }  // ok while the context is alive
  const char* text() const { return has_happened() ? notice_.status.text() : ""; }

  // For the driver. Later failures change nothing.
  void fail(const AbortNotice& notice, AbortScope scope, Nanoseconds now) REQUIRES(driving);
  // Fails because of this rank, or of the status' culprit.
  void fail(const Status& status, Nanoseconds now) REQUIRES(driving);
  void fail_without_memory(Nanoseconds now) REQUIRES(driving);
  // Ends all operations once no transfer uses their memory any more.
  void end_all_when_quiet() REQUIRES(driving);
  bool has_ended_all() const REQUIRES(driving) { return has_ended_all_; }

 private:
  AbortNotice blame(const Status& status) const;
  AbortNotice agree_with_host(const AbortNotice& notice) const;

  EngineFailureParts parts_;
  const AbortNotice no_memory_;  // made in advance, for when nothing can be allocated
  std::atomic<bool> has_happened_{false};
  AbortNotice notice_;
  bool has_ended_all_ GUARDED_BY(driving) = false;
};

}  // namespace sirtaki
