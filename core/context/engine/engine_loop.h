// The engine's loop: which thread drives it, when the driver polls, when it sleeps, and how it hands over the role.
//
// A driver polls while progress is expected soon, then sleeps; a driver that leaves hands its work over. A caller
// that waits drives the loop itself, so that a small synchronous operation needs no other thread.
#pragma once

#include <atomic>
#include <thread>

#include "base/function_ref.h"
#include "context/engine/iteration.h"
#include "context/engine/polling.h"

namespace sirtaki {

struct EngineLoopParts {
  SharedCallerState& state;
  const HandleSignals& signals;
  const LiveSettings& settings;
  DriverRole& role;
  Intake& intake;
  Iteration& iteration;
  PeerMonitor& peer_monitor;
  Negotiation& negotiation;
  EventWaiter& event_waiter;
  LocalPeers* local_peers;  // nullptr without shared memory
};

class EngineLoop {
 public:
  EngineLoop(const EngineLoopParts& parts, const Polling& polling) : parts_(parts), polling_(polling) {}
  ~EngineLoop();

  void start_thread();
  void stop_thread();

  // A predicate: whether a wait is over.
  using Condition = FunctionRef<bool(CallerState&)>;
  // Drives, or waits for the current driver, until `done` or the deadline. Returns whether `done` holds.
  bool wait(Condition done, Nanoseconds deadline);
  void poll();  // runs one iteration if no thread drives

  // Runs the hooks of native callers, without holding any lock that callers take. Returns whether there were any.
  bool run_hooks();

  void forked() { is_forked_ = true; }

 private:
  bool drive(Condition done, Nanoseconds deadline, bool is_engine) REQUIRES(driving);
  bool polls(Nanoseconds moment, Nanoseconds busy_at, bool is_engine) const REQUIRES(driving);
  Nanoseconds relax(Nanoseconds moment, Nanoseconds idle_for, bool is_engine) REQUIRES(driving);
  Nanoseconds sleep(Nanoseconds deadline, Nanoseconds moment) REQUIRES(driving);
  void leave() RELEASE(driving);
  void run();
  Nanoseconds drive_if_free();
  Nanoseconds drive_in_thread() RELEASE(driving);

  EngineLoopParts parts_;
  std::thread thread_;
  std::atomic<bool> is_stopping_{false};
  Nanoseconds hooked_at_ = 0;  // when thread_ last ran a hook; used by that thread only
  bool is_forked_ = false;

  Polling polling_ GUARDED_BY(driving);
};

}  // namespace sirtaki
