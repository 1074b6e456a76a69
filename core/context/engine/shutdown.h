// The shutdown of a rank: operations in flight complete, other process sets are served, and goodbyes are sent.
#pragma once

#include "context/engine/engine_loop.h"

namespace sirtaki {

struct ShutdownParts {
  OwnRank own;
  SharedCallerState& state;
  DriverRole& role;
  Intake& intake;
  Iteration& iteration;
  EngineLoop& loop;
  Negotiation& negotiation;
  Links& links;
  EngineFailure& failure;
};

class Shutdown {
 public:
  explicit Shutdown(const ShutdownParts& parts) : parts_(parts) {}

  // Completes the operations in flight by the deadline, says goodbye and stops. Later calls do nothing, and return
  // false. `all_here` is a barrier of all ranks that shut down, or 0: once it has ended, operations that some rank has
  // not submitted are not awaited.
  bool run(Nanoseconds deadline, Ticket all_here);

 private:
  void drain(Nanoseconds deadline, Ticket all_here);
  void end_all(Nanoseconds deadline) REQUIRES(driving);
  void serve_others(Nanoseconds deadline) REQUIRES(driving);
  void deliver_polled(Nanoseconds deadline) REQUIRES(driving);
  std::vector<int32_t> others_below();
  void deliver(Nanoseconds deadline) REQUIRES(driving);
  void close() REQUIRES(driving);

  ShutdownParts parts_;
  std::atomic<bool> has_begun_{false};
};

}  // namespace sirtaki
