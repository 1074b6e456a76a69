// Monitoring of the other ranks: processes that die, links that break, and deadlines. A rank that is lost, silent or
// late for too long fails the context.
#pragma once

#include "context/failure/deadline_monitor.h"
#include "context/failure/heartbeat.h"
#include "context/failure/pending_abort.h"
#include "context/state/event_waiter.h"

namespace sirtaki {

struct PeerMonitorParts {
  OwnRank own;
  SharedCallerState& state;
  Negotiation& negotiation;
  Execution& execution;
  EventWaiter& event_waiter;
  DeadlineMonitor& deadline_monitor;
  Heartbeat& heartbeat;
  PendingAbort& pending_abort;
  EngineFailure& failure;
};

// The monitor of a rank; for the driver only.
class PeerMonitor {
 public:
  static constexpr const char* process_ended =
      "its process ended, or the connection to it broke, without a goodbye. Its own output says why";

  explicit PeerMonitor(const PeerMonitorParts& parts) : parts_(parts) {}

  // Checks deadlines and deaths if a check is due, which is every 50 ms while busy. Returns whether the links, which
  // were read before, must be read again.
  bool check(Nanoseconds now) REQUIRES(driving);
  void check_soon() REQUIRES(driving) { next_check_ = 0; }  // called before and after sleep

  // Handles the loss of a rank. A failing rank sends its reason before it exits, so that reason is awaited: on this
  // host it is in shared memory already, and the next iteration reads it; from another host it may be in transit for
  // a moment.
  void lose(int32_t rank, Nanoseconds now, std::string how = process_ended) REQUIRES(driving);
  Nanoseconds next_due() const REQUIRES(driving);  // the end of that wait

 private:
  void check_deadlines(Nanoseconds now) REQUIRES(driving);
  int32_t finished_but_awaited() const;

  PeerMonitorParts parts_;
  Nanoseconds next_check_ GUARDED_BY(driving) = 0;
  int32_t suspect_ GUARDED_BY(driving) = -1;  // a rank whose link broke: its own abort is awaited until suspect_until_
  std::string suspected_because_ GUARDED_BY(driving);
  Nanoseconds suspect_until_ GUARDED_BY(driving) = 0;
};

}  // namespace sirtaki
