#include "base/machine.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>

namespace sirtaki {

int usable_cores() {
  cpu_set_t cores;
  const int allowed = ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  double quota = allowed;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    double microseconds, period;
    if (std::fscanf(file, "%lf %lf", &microseconds, &period) == 2 && period > 0)
      quota = microseconds / period;  // "max": no limit
    std::fclose(file);
  }
  return std::max(1, std::min(allowed, static_cast<int>(quota)));
}

}  // namespace sirtaki
