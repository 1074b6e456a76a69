// The text of a stall report: which ranks wait for what, which ranks have not submitted it, and what those do
// instead.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace sirtaki {

// Returns "rank 0 (pid 70 on hostA) waits for 'loss'; rank 1 (pid 71 on hostA) has not submitted it and is in
// evaluate() at train.py:88". `names`: the names of ranks in messages.
std::string describe_stall(const Stall& stall, const std::vector<std::string>& names);

}  // namespace sirtaki
