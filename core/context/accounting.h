// What the observer is told of a plan that begins and of one that is over.
#pragma once

#include <vector>

#include "base/clock.h"
#include "context/handle_table.h"
#include "data/operation.h"
#include "plan/plan.h"

namespace sirtaki {

// A plan with these handles of this rank was agreed on. `transfer`: nullptr if it moves no data.
void note_plan_begun(const Plan& plan, const std::vector<Ticket>& handles, const Transfer* transfer, HandleTable& table,
                     Nanoseconds now);

// The bytes that each rank has to send and receive at least, as NCCL's performance tests count them ("busbw",
// https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
double bus_bytes(const Transfer& transfer);

}  // namespace sirtaki
