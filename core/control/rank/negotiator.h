// A rank's side of the negotiation: it reports this rank's requests, and applies the coordinator's Decisions. Free of
// I/O, threads and clocks: bytes in, bytes out, times as arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "base/status.h"
#include "plan/plan.h"
#include "plan/request.h"

namespace sirtaki {

// The rule that decides when a rank reports; the same on all ranks.
struct ReportRule {
  int64_t bytes = 1 << 20;                    // report once this much is queued
  Nanoseconds window = microseconds(300);     // or this long after the first queued request
  int32_t plans_in_flight = 2;                // while a set has this many unfinished plans, its reports wait
  int64_t portion = 1 << 20;                  // bytes of requests with a priority that are reported at once
};

class Negotiator {
 public:
  Negotiator(int32_t rank, int32_t size, ReportRule rule, uint32_t cache_capacity);
  ~Negotiator();
  Negotiator(const Negotiator&) = delete;
  Negotiator& operator=(const Negotiator&) = delete;

  // Queues a request. The caller has checked that no request of its (set, kind, name) is in flight on this rank, that
  // the set exists, and that this rank is a member of it and has not joined it.
  void submit(Request request, Nanoseconds now);

  // Joins a set: this rank has no more data for it, and counts as ready for all its operations until all have joined.
  void join(int32_t process_set, Ticket ticket, Nanoseconds now);

  // Makes the queued requests due as soon as their sets allow, because a caller waits.
  void flush();

  // Returns when to call report(): `never` if there is nothing to report; a time in the past if a report is due.
  Nanoseconds report_due() const;

  // Appends one Report with all queued requests that are not withheld. Of requests with a priority above 0, only the
  // first portion is reported, by priority, and the next one a window later: those that are submitted meanwhile with
  // a higher priority overtake the rest. The rest of a rank never waits for another rank, so that ranks that report
  // different requests first do not wait for each other forever.
  void report(Nanoseconds now, Bytes& out);

  // Tickets covered by the last report, and whether each was sent as a cache id.
  struct Reported {
    Ticket ticket;
    bool by_id;
  };
  const std::vector<Reported>& reported() const;

  // Appends a Report that says goodbye: this rank takes part in no later Decision.
  void goodbye(Bytes& out);

  // Returns the number of the last Decision that was applied; 0: none.
  uint64_t last_decision() const;

  // Applies one Decision and adds its consequences for this rank to `outcome`; SRT_PROTOCOL if it is invalid.
  Status apply(std::span<const uint8_t> decision, Outcome& outcome);

  // Adds the answer to Outcome::is_asked to the next report, which is due at once.
  void answer(StalledRankReport wait_report);

  // Records that the data plane has finished a plan of this set.
  void plan_finished(int32_t process_set);

  // Returns the members of a process set; nullptr if there is no such set.
  const std::vector<int32_t>* members(int32_t process_set) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
