// The records of one rank's operations: the recorder, the statistics and the timeline; and those of its steps.
//
// Every part that advances an operation writes to it. It has no lock of its own: it is part of the CallerState, whose
// lock those parts take anyway.
#pragma once

#include "observe/counters/statistics.h"
#include "observe/counters/step_counters.h"
#include "observe/records/recorder.h"
#include "observe/records/timeline.h"

namespace sirtaki {

class Observer {
 public:
  // Creates an observer. `timeline` must outlive it.
  Observer(int32_t world_size, size_t recorded_operations, Timeline& timeline)
      : recorder_(recorded_operations), timeline_(timeline) {
    statistics_.lateness.resize(static_cast<size_t>(world_size));
  }

  // Sets the time of the events that follow. The caller sets it once when it takes the lock, because reading the
  // clock takes time.
  void set_moment(Nanoseconds moment) { moment_ = moment; }

  // Each records a stage of an operation. submitted() returns the number of the operation's record.
  uint64_t submitted(const Submitted& what);
  void reported(uint64_t number, bool is_cached);
  void decided(uint64_t number, uint64_t plan, size_t fused);
  void transferred(uint64_t number, const TransferTimes& times);
  void ended(uint64_t number, bool was_decided, srt_status status);

  // Records why an operation is refused, before it ends.
  void refused(uint64_t number, RefusedOperation why);

  // Each records a stage of a plan.
  void plan_begun(size_t tensors, int64_t bytes, double bus_bytes);
  void plan_ended(const WireBytes& sent = {});

  void decision_applied();

  // Counts a report of a stall that names this rank as missing.
  void stalled() { ++statistics_.stalls; }

  void set_lateness(int32_t rank, const Lateness& lateness);

  // Counts training steps that end at `moment`.
  void steps_ended(Nanoseconds moment, int64_t number, int64_t by) { steps_.end(moment, number, by); }

  const StepCounters& steps() const { return steps_; }
  const Statistics& statistics() const { return statistics_; }
  const Recorder& recorder() const { return recorder_; }

 private:
  Recorder recorder_;
  Timeline& timeline_;
  Statistics statistics_;
  StepCounters steps_;
  Nanoseconds moment_ = 0;
};

}  // namespace sirtaki
