// The progress engine: one loop that negotiates and executes, driven by one thread at a time: its own, or a caller
// that waits (so that a small synchronous operation needs no other thread).
//
// A driver polls while progress is expected soon, then sleeps; one that leaves hands the work on. State that the loop
// touches (negotiation, executor, links) belongs to the driver; state that callers touch (handles, submissions) has a
// lock of its own.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/knobs.h"
#include "base/log.h"
#include "context/deadline_monitor.h"
#include "context/event_waiter.h"
#include "context/execution.h"
#include "context/failure_report.h"
#include "context/handle_table.h"
#include "context/heartbeat.h"
#include "context/input_readiness.h"
#include "context/negotiation.h"
#include "context/polling.h"
#include "context/process_set_table.h"

namespace sirtaki {

struct EngineParts {
  HandleTable& handles;
  ProcessSetTable& sets;
  Links& links;
  Negotiation& negotiation;
  Execution& execution;
  EventWaiter& event_waiter;
  DeadlineMonitor& deadline_monitor;
  Heartbeat& heartbeat;
  FailureReport& failure_report;
  ProgramStack& program_stack;
  LocalPeers* local_peers;  // nullptr without shared memory
  const RankNames& names;
  int32_t rank;
};

class Engine {
 public:
  Engine(const EngineParts& parts, const Config& config, int ranks_on_this_host);
  ~Engine();

  void start_thread();

  // The wake-up that a submission requires if its caller does not wait at once.
  enum class WakeHint { none, arm_window, wake };

  // Queues opened handles, in order. The caller holds the handle table's lock.
  WakeHint submit(const Ticket* handles, int32_t count);
  // Delivers the hint, after that lock is released.
  void deliver_hint(WakeHint hint);
  void flush();

  // Drives, or waits for the current driver, until `done` (called with the handle table's lock) or the deadline.
  bool wait(const std::function<bool()>& done, Nanoseconds deadline);
  void poll();  // runs one pass if no thread drives

  void abort(std::string reason);
  // Completes what is in flight by the deadline, says goodbye and stops. Later calls do nothing. `all_here` is a
  // barrier of all ranks that shut down, or 0: once it has ended, operations that some rank has not submitted are not
  // awaited.
  void shutdown(Nanoseconds deadline, Ticket all_here);

  // Returns why the context is dead, and because of which rank; ok while it is alive.
  AbortNotice death() const;
  bool is_dead() const { return dead_.load(std::memory_order_acquire); }
  // Returns why it is dead; "" while it is alive. Needs no lock: what is written before `dead_` does not change any
  // more.
  const char* death_text() const { return is_dead() ? death_.status.text() : ""; }

  void forked() { forked_ = true; }

 private:
  // The ranks to notify of a failure: none if this rank leaves in good order; its host if all are notified anyway.
  enum class AbortScope { nobody, host, everyone };

  // Makes this thread the driver, unless there is one or the engine is closed.
  bool take_role();
  // Runs one iteration of the loop and returns whether anything moved. Driver only, like all below it. Running out of
  // memory in it fails the context as any other failure does.
  bool pass(Nanoseconds now);
  bool iterate(Nanoseconds now);
  void fail_without_memory(Nanoseconds now);
  bool take_submissions(Nanoseconds now);
  bool take_ready(Nanoseconds now);
  void flush_all();
  void act_on(NegotiationEvents& events, Nanoseconds now);
  void observe(const NegotiationEvents& events, Nanoseconds now);
  void settle_sets(const Outcome& outcome);
  void submit_to_member(Request request, Nanoseconds now);
  void poll_shared_abort(Nanoseconds now);
  void receive_abort(AbortNotice notice, AbortScope scope, Nanoseconds now);
  void act_on_abort(Nanoseconds now);
  bool check_peers(Nanoseconds now);
  void check_deadlines(Nanoseconds now);
  int32_t finished_but_awaited() const;
  void handle_lost_rank(int32_t rank, Nanoseconds now);

  void fail(const AbortNotice& notice, AbortScope scope, Nanoseconds now);
  void end_all_when_quiet();
  void end_unplanned(const Status& status);
  void end_refused(Ticket ticket, const Status& status);
  AbortNotice failure(const Status& status) const;

  void drain(Nanoseconds deadline, Ticket all_here);
  void serve_others(Nanoseconds deadline);
  void deliver(Nanoseconds deadline);
  Status nothing_is_decided() const;
  bool drive(const std::function<bool()>& done, Nanoseconds deadline, bool is_engine);
  bool must_not_sleep();
  bool awaits_device() const;
  bool has_work_left();
  void leave();
  bool polls(Nanoseconds moment, Nanoseconds busy_at, bool is_engine) const;
  Nanoseconds relax(Nanoseconds moment, Nanoseconds idle_for, bool is_engine);
  Nanoseconds next_due(Nanoseconds moment) const;
  void run();
  bool run_completions();
  std::string oldest_waiting();
  StalledRankReport describe_wait();

  EngineParts parts_;
  const int64_t report_bytes_;
  const Nanoseconds report_window_;

  std::mutex driver_;            // held by the driver
  std::thread thread_;
  Nanoseconds hooked_at_ = 0;    // when thread_ last ran a hook; used by that thread only
  std::atomic<bool> stopping_{false}, flush_wanted_{false}, has_submissions_{false};
  std::atomic<bool> dead_{false}, abort_wanted_{false}, shut_down_{false};
  bool forked_ = false;

  // Guarded by the handle table's lock.
  std::vector<Ticket> submissions_;
  int64_t submitted_bytes_ = 0;
  std::string abort_reason_;
  AbortNotice death_;

  // Used by the driver only.
  std::vector<Ticket> taken_;
  InputReadiness input_readiness_;
  NegotiationEvents events_;
  Polling polling_;
  Nanoseconds next_look_ = 0, moved_at_ = 0;
  int32_t suspect_ = -1;          // a rank whose link broke: its own abort is awaited until suspect_until_
  Nanoseconds suspect_until_ = 0;
  // An abort by another rank, acted on after a Decision that has yet to come, or at abort_due_at_.
  std::optional<AbortNotice> received_abort_;
  AbortScope received_scope_ = AbortScope::host;
  Nanoseconds abort_due_at_ = 0;
  bool all_ended_ = false;
  bool closed_ = false;           // shut down with its links closed: no thread drives any more
  int32_t finished_above_ = -1;   // a rank through which this one negotiated has left: nothing is decided any more
};

}  // namespace sirtaki
