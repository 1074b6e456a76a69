// The kernels of each instruction set of this machine.
#pragma once

#include <vector>

#include "data/kernels/kernels.h"

namespace sirtaki {

inline std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> all{&baseline_kernels()};
  if (&choose_kernels("auto") != all.front()) all.push_back(&choose_kernels("auto"));
  return all;
}

}  // namespace sirtaki
