// A stall as people read it: who waits for what, who has not come, and what those do instead.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace sirtaki {

// "rank 0 (pid 70 on hostA) waits for 'loss'; rank 1 (pid 71 on hostA) has not submitted it and is in evaluate() at
// train.py:88". `names` are how messages name each rank.
std::string describe_stall(const Stall& stall, const std::vector<std::string>& names);

}  // namespace sirtaki
