// The effects of what was negotiated on this rank: plans start, refused operations and changes of process sets end,
// stalls are reported and answered.
#pragma once

#include "context/caller_state.h"
#include "context/deadline_monitor.h"
#include "context/driver_role.h"
#include "observe/program_stack.h"

namespace sirtaki {

struct OutcomeHandlerParts {
  int32_t rank;
  SharedCallerState& state;
  Negotiator& negotiator;
  Execution& execution;
  const DeadlineMonitor& deadline_monitor;
  ProgramStack& program_stack;
};

// For the driver only.
class OutcomeHandler {
 public:
  explicit OutcomeHandler(const OutcomeHandlerParts& parts) : parts_(parts) {}

  // Fails when this rank cannot take part in a plan.
  Status apply(const NegotiationEvents& events, Nanoseconds now) REQUIRES(driving);

 private:
  void observe(const NegotiationEvents& events, Nanoseconds now);
  void settle_sets(const Outcome& outcome);
  StalledRankReport describe_wait();

  OutcomeHandlerParts parts_;
};

}  // namespace sirtaki
