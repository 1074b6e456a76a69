// The path of requests from callers to the driver, which reports them: submissions, wake-ups and flushes.
#pragma once

#include <atomic>
#include <vector>

#include "base/settings/live_settings.h"
#include "context/state/caller_state.h"
#include "context/state/driver_role.h"
#include "context/state/event_waiter.h"
#include "context/submission/input_readiness.h"
#include "context/submission/late_results.h"
#include "control/rank/negotiator.h"

namespace sirtaki {

class Intake {
 public:
  Intake(SharedCallerState& state, HandleSignals& signals, EventWaiter& event_waiter, Negotiator& negotiator,
         LateResults& late_results, const LiveSettings& settings, const GpuBackend* gpus);

  // Functions for callers, on any thread.

  // The wake-up that a submission requires if its caller does not wait at once.
  enum class WakeHint { none, arm_window, wake };
  // Queues opened handles, in order.
  WakeHint queue(const Ticket* handles, int32_t count, CallerState& state);
  // Delivers the hint; called after the state's lock is released.
  void deliver_hint(WakeHint hint);
  // Makes the driver report everything that is queued without delay. A caller that drives next need not wake another
  // thread.
  void want_flush() { flush_wanted_.store(true, std::memory_order_seq_cst); }
  void flush();
  bool has_work() const;

  // Functions for the driver.

  // Takes the requests that callers have submitted; discards them if the context is dead. Returns whether there were
  // any.
  bool take(Nanoseconds now, bool is_dead) REQUIRES(driving);
  // Submits requests that have waited for inputs on a GPU, which are ready now. Fails if a GPU has failed.
  Status take_ready(Nanoseconds now, bool is_dead, bool& moved) REQUIRES(driving);
  bool awaits_inputs() const REQUIRES(driving) { return !input_readiness_.is_empty(); }
  // Rejects all operations that are not part of a plan, now and later.
  void close(const Status& reason) REQUIRES(driving);
  bool is_closed() const REQUIRES(driving) { return !closed_because_.is_ok(); }

 private:
  std::vector<QueuedRequest> take_submitted() REQUIRES(driving);
  void submit(Request request, Nanoseconds now) REQUIRES(driving);
  void flush_all() REQUIRES(driving);

  SharedCallerState& state_;
  HandleSignals& signals_;
  EventWaiter& event_waiter_;
  Negotiator& negotiator_;
  LateResults& late_results_;
  const LiveSettings& settings_;
  std::atomic<bool> flush_wanted_{false}, has_submissions_{false};

  std::vector<Ticket> taken_ GUARDED_BY(driving);
  InputReadiness input_readiness_ GUARDED_BY(driving);
  Status closed_because_ GUARDED_BY(driving);
};

}  // namespace sirtaki
