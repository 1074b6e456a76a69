// Accounting of plans: records for the observer which plans begin, and the bytes that they move.
#pragma once

#include <vector>

#include "base/clock.h"
#include "context/state/caller_state.h"
#include "data/operation.h"
#include "plan/plan.h"

namespace sirtaki {

// Records an agreed plan with these handles of this rank; returns the size of this rank's tensors in it. `transfer` is
// nullptr if the plan moves no data.
int64_t note_plan_begun(const Plan& plan, const std::vector<Ticket>& handles, const Transfer* transfer,
                        SharedCallerState& shared, Nanoseconds now);

// Returns the bytes that each rank has to send and receive at least, as NCCL's performance tests count them ("busbw",
// https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
double bus_bytes(const Transfer& transfer);

}  // namespace sirtaki
