// The failure that ends a context. The first one wins: it is sent to the other ranks, and ends all operations.
#pragma once

#include <atomic>
#include <optional>

#include "context/failure/failure_report.h"
#include "context/plans/execution.h"
#include "context/plans/negotiation.h"
#include "context/state/caller_state.h"
#include "context/state/driver_role.h"
#include "context/state/own_rank.h"

namespace sirtaki {

// The ranks to notify of a failure: none if this rank leaves in good order; only its host if the news have been passed
// on already; else all linked peers, too.
enum class AbortScope { nobody, host, everyone };

// Returns the failure that is published in the host's shared memory; nullopt if there is none.
std::optional<AbortNotice> failure_of_host(const LocalPeers& peers);

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

  // Callable from any thread without a lock: members written before `has_happened_` do not change any more.
  bool has_happened() const { return has_happened_.load(std::memory_order_acquire); }
  AbortNotice notice() const { return has_happened() ? notice_ : AbortNotice(); }  // ok while the context is alive
  const char* text() const { return has_happened() ? notice_.status.text() : ""; }

  // Records a failure and notifies the ranks in `scope`; later failures change nothing. For the driver.
  void fail(const AbortNotice& notice, AbortScope scope, Nanoseconds now) REQUIRES(driving);
  // Fails and names this rank, or the status' culprit, as the cause.
  void fail(const Status& status, Nanoseconds now) REQUIRES(driving);
  void fail_without_memory(Nanoseconds now) REQUIRES(driving);
  // Ends all operations once no transfer uses their memory any more.
  void end_all_when_quiet() REQUIRES(driving);
  bool has_ended_all() const REQUIRES(driving) { return has_ended_all_; }

 private:
  AbortNotice blame(const Status& status) const;
  AbortNotice agree_with_host(const AbortNotice& notice) const;
  void notify(const AbortNotice& notice, AbortScope scope, Nanoseconds now) REQUIRES(driving);
  void end_unstarted() const;

  EngineFailureParts parts_;
  const AbortNotice no_memory_;  // allocated in advance, for failures without free memory
  std::atomic<bool> has_happened_{false};
  AbortNotice notice_;
  bool has_ended_all_ GUARDED_BY(driving) = false;
};

}  // namespace sirtaki
