// A stall in words: which ranks wait for what, which have not submitted it, and what those do instead.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace sirtaki {

// Returns "rank 0 (pid 70 on hostA) waits for 'loss'; rank 1 (pid 71 on hostA) has not submitted it and is in
// evaluate() at train.py:88". `names` are how messages name each rank.
std::string describe_stall(const Stall& stall, const std::vector<std::string>& names);

}  // namespace sirtaki
