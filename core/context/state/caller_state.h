// The state that callers and the driver share, under one lock, which the driver takes once per plan and a caller once
// per call.
#pragma once

#include <string>
#include <vector>

#include "base/guarded.h"
#include "context/state/handle_table.h"
#include "context/state/process_set_table.h"
#include "observe/observer.h"

namespace sirtaki {

struct CallerState {
  CallerState(int32_t world_size, size_t recorded_operations, Timeline& timeline, HandleSignals& signals)
      : observer(world_size, recorded_operations, timeline), handles(observer, signals), sets(world_size) {}

  // Ends an operation that cannot take place. After a refused join this rank may submit again.
  void end_refused(Ticket ticket, const Status& status);
  // Ends all operations that are not part of a plan in the same way.
  void end_unplanned(const Status& status);
  // Returns the name of the oldest operation that is not part of a plan; "" if there is none.
  std::string oldest_unplanned();

  Observer observer;
  HandleTable handles;
  ProcessSetTable sets;
  std::vector<Ticket> submitted;  // opened handles that the driver has not taken yet, in order
  int64_t submitted_bytes = 0;
};

using SharedCallerState = Guarded<CallerState>;

}  // namespace sirtaki
