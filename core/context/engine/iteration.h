// One iteration of the engine's loop: takes requests, negotiates and executes them, and monitors the peers. Never
// blocks.
#pragma once

#include "context/failure/deadline_monitor.h"
#include "context/failure/peer_monitor.h"
#include "context/submission/intake.h"
#include "context/submission/link_intake.h"
#include "observe/records/program_stack.h"

namespace sirtaki {

struct IterationParts {
  OwnRank own;
  SharedCallerState& state;
  LiveSettings& settings;
  Links& links;
  LinkIntake& link_intake;
  EventWaiter& event_waiter;
  Intake& intake;
  Negotiation& negotiation;
  Execution& execution;
  PeerMonitor& peer_monitor;
  PendingAbort& pending_abort;
  EngineFailure& failure;
  DeadlineMonitor& deadline_monitor;
  ProgramStack& program_stack;
};

// The body of the loop; for the driver only.
class Iteration {
 public:
  static constexpr Nanoseconds longest_sleep = seconds(1);  // deadlines are checked at least this often

  explicit Iteration(const IterationParts& parts) : parts_(parts) {}

  // Returns whether anything moved; the end of all operations by a failure counts, too, so that callers look for it.
  // Running out of memory fails the context like any other failure.
  bool run(Nanoseconds now) REQUIRES(driving);

  // Returns whether work has arrived since the last run. Called once the peers can see that this rank sleeps.
  bool must_run_again() REQUIRES(driving);
  bool has_work_left(Nanoseconds now) const REQUIRES(driving);
  bool must_read_links() const REQUIRES(driving) { return links_signalled_; }
  bool is_in_operation() const { return !parts_.execution.executor().is_idle(); }
  bool is_busy() const REQUIRES(driving) { return is_in_operation() || parts_.intake.awaits_inputs(); }

  // Returns for how long nothing has moved while a device is awaited, which rings no doorbell; -1: none is awaited.
  Nanoseconds device_awaited_for(Nanoseconds now) const REQUIRES(driving);
  // Returns the time at which run() must be called even if nothing arrives.
  Nanoseconds next_due(Nanoseconds now) const REQUIRES(driving);

 private:
  bool run_parts(Nanoseconds now) REQUIRES(driving);
  bool polls_links() const REQUIRES(driving);
  void take_links(Nanoseconds now) REQUIRES(driving);  // those that the program has made since the last run
  bool negotiate(Nanoseconds now) REQUIRES(driving);
  void act_on_events(Nanoseconds now) REQUIRES(driving);
  void observe(Nanoseconds now) REQUIRES(driving);
  // Applies the result of the negotiation. Fails if this rank cannot take part in a plan.
  Status apply(const Outcome& outcome, Nanoseconds now) REQUIRES(driving);
  void refuse(const std::vector<Refusal>& refusals);
  void settle_sets(const Outcome& outcome);
  StalledRankReport describe_wait();

  IterationParts parts_;
  NegotiationEvents events_ GUARDED_BY(driving);
  bool links_signalled_ GUARDED_BY(driving) = false;  // after the last run has read them; they do not signal it again
  Nanoseconds moved_at_ GUARDED_BY(driving) = 0;
};

}  // namespace sirtaki
