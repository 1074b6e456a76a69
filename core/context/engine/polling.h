// The policy that decides how long a driver polls before it sleeps.
//
// Falling asleep and being woken takes longer than most steps of an operation. While an operation is in progress, a
// driver therefore polls for as long as a peer may need for its next step: a multiple of the time that the latest
// steps have taken on this machine. A peer that needs longer has lost its core, or is stopped, and the driver sleeps.
// While no operation is in progress (a peer has yet to submit), a driver polls for the setting `spin`.
//
// Where another program competes for the core, polling may keep a peer from running: a rank of another host in another
// container of this machine, say. In an operation, a driver then polls for no longer than being woken takes.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace sirtaki {

class Polling {
 public:
  // `is_crowded`: there are more ranks than cores, so that polling may keep a rank that has work from running.
  Polling(Nanoseconds spin, bool is_crowded) : spin_(spin), is_crowded_(is_crowded) {}

  void set_spin(Nanoseconds spin) { spin_ = spin; }

  // Records that an operation begins while none was in progress.
  void began(Nanoseconds now) { last_moved_ = now; }

  // Records that an iteration from `begun` to `ended` has moved an operation.
  void moved(Nanoseconds begun, Nanoseconds ended) {
    const Nanoseconds waited = begun - last_moved_, own = ended - begun;
    const bool was_late = waited > patience(true, begun);  // the driver slept, so this time is not that of a step
    step_ = std::max({own, was_late ? 0 : waited, step_ - step_ / steps_remembered});
    last_moved_ = ended;
  }

  // Returns how long a driver without progress polls before it sleeps.
  Nanoseconds patience(bool in_operation, Nanoseconds now) const {
    if (!in_operation) return spin_;
    const Nanoseconds usual = std::clamp(margin * step_, spin_, std::max(spin_, longest));
    return is_contested(now) ? std::min(usual, waking) : usual;
  }

  // Returns whether a driver that has been idle for this long yields its core between two polls. A peer that was
  // woken may have been scheduled on the same core, and the program computes beside the engine's own thread
  // (`is_engine`).
  bool yields(Nanoseconds idle_for, Nanoseconds now, bool is_engine) const {
    const bool keeps_core = !is_engine && is_contested(now);
    return is_crowded_ || (idle_for > pure_spin && !keeps_core);
  }

  // Records that a caller's yield has ended. Peers give a core back soon, to poll or to sleep. A thread that keeps it
  // for long belongs to no rank of this host, and would do so at each yield: if there are enough cores for all ranks,
  // this rank then does not yield for a while.
  void yielded(Nanoseconds begun, Nanoseconds ended) {
    if (ended - begun >= long_yield) contested_until_ = ended + kept_after_yield * (ended - begun);
  }

 private:
  bool is_contested(Nanoseconds now) const { return now < contested_until_; }

  static constexpr int64_t margin = 4;  // a peer's step may take this many times the longest recent one
  static constexpr int64_t steps_remembered = 16;  // step_ is the longest of about this many
  static constexpr Nanoseconds longest = milliseconds(20);
  static constexpr Nanoseconds pure_spin = microseconds(4);  // a peer on another core answers within this
  static constexpr Nanoseconds waking = microseconds(50);  // measured: 30 to 60 on virtual machines

  static constexpr Nanoseconds long_yield = microseconds(500);  // time slices of Linux are 1.4 ms and longer
  static constexpr int64_t kept_after_yield = 64;  // times as long as the yield, which then costs 2 %

  Nanoseconds spin_;
  bool is_crowded_;
  Nanoseconds step_ = 0;  // an estimate of the longest of the latest steps
  Nanoseconds last_moved_ = 0;
  Nanoseconds contested_until_ = 0;
};

}  // namespace sirtaki
