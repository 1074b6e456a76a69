// Fusion of operations that are ready on all ranks into as few plans as the threshold allows.
#pragma once

#include <vector>

#include "control/messages.h"
#include "control/operation_table.h"

namespace sirtaki {

// An agreed entry on its way into a plan.
struct ReadyEntry {
  OperationEntry* entry;
  PlanItem item;
};

// Appends plans that hold every ready entry once: higher priority first, then by name, whatever the order of `ready`
// (which it sorts).
void fuse(std::vector<ReadyEntry>& ready, int64_t threshold, std::vector<DecidedPlan>& plans);

}  // namespace sirtaki
