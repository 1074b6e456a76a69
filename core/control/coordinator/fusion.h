// Fusion of operations that are ready on all ranks into as few plans as the threshold allows.
#pragma once

#include <vector>

#include "control/messages/messages.h"
#include "control/operations/operation_table.h"

namespace sirtaki {

// An agreed entry that is to be planned.
struct ReadyEntry {
  OperationEntry* entry;
  PlanItem item;
};

// Appends plans that contain every ready entry once, ordered by descending priority, then by name, regardless of the
// order of `ready` (which it sorts).
void fuse(std::vector<ReadyEntry>& ready, int64_t threshold, std::vector<DecidedPlan>& plans);

}  // namespace sirtaki
