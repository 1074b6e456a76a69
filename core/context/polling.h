// How long a driver polls before it sleeps.
//
// Falling asleep and being woken takes longer than most steps of an operation. So while an operation moves, a driver
// polls for as long as a peer may need for its next step: a multiple of what the latest steps have taken on this
// machine. A peer that needs longer than that has lost its core, or is stopped, and is waited for asleep. While nothing
// moves (a peer has yet to submit), a driver polls for the setting `spin`.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace sirtaki {

class Polling {
 public:
  // `is_crowded`: more ranks than cores, so that polling may keep a rank from running that has work.
  Polling(Nanoseconds spin, bool is_crowded) : spin_(spin), is_crowded_(is_crowded) {}

  // An operation begins where there was none.
  void began(Nanoseconds now) { last_moved_ = now; }

  // A look at the operations that run, from `begun` to `ended`, has moved one of them.
  void moved(Nanoseconds begun, Nanoseconds ended) {
    const Nanoseconds waited = begun - last_moved_, own = ended - begun;
    const bool was_late = waited > patience(true);  // it was waited for asleep, which says nothing of a step
    step_ = std::max({own, was_late ? 0 : waited, step_ - step_ / steps_remembered});
    last_moved_ = ended;
  }

  // For how long nothing may move before the driver sleeps.
  Nanoseconds patience(bool in_operation) const {
    if (!in_operation) return spin_;
    return std::clamp(margin * step_, spin_, std::max(spin_, longest));
  }

  // Whether a driver that has been idle for so long gives its core to whoever wants it between two looks. A peer that
  // was woken may have been put on this very core; and beside the engine's own thread (`is_engine`) the program
  // computes.
  bool yields(Nanoseconds idle_for, Nanoseconds now, bool is_engine) const {
    const bool keeps_core = !is_engine && now < keeps_core_until_;
    return is_crowded_ || (idle_for > pure_spin && !keeps_core);
  }

  // A caller's yield has ended. Peers give a core back soon, to poll or to sleep. Who keeps it for long is no rank, and
  // would do so at each yield: with cores enough for all ranks, this one then keeps its share of the core for a while.
  void yielded(Nanoseconds begun, Nanoseconds ended) {
    if (ended - begun >= long_yield) keeps_core_until_ = ended + kept_after_yield * (ended - begun);
  }

 private:
  static constexpr int64_t margin = 4;  // of a peer's step over the longest recent one
  static constexpr int64_t steps_remembered = 16;  // the longest of about so many
  static constexpr Nanoseconds longest = milliseconds(20);
  static constexpr Nanoseconds pure_spin = microseconds(4);  // a peer on another core answers within this

  static constexpr Nanoseconds long_yield = microseconds(500);  // time slices of Linux are 1.4 ms and longer
  static constexpr int64_t kept_after_yield = 64;  // times as long: such a yield costs 2 % then

  Nanoseconds spin_;
  bool is_crowded_;
  Nanoseconds step_ = 0;  // an estimate of the longest of the latest steps
  Nanoseconds last_moved_ = 0;
  Nanoseconds keeps_core_until_ = 0;
};

}  // namespace sirtaki
