// What this process may use of the machine.
#pragma once

#include <cstdint>
#include <string>

namespace sirtaki {

// Cores by affinity and by the quotas of the control groups that this process is in, at least 1.
int usable_cores();

// What quotas leave of so many cores. Both versions of control groups are read, and the groups' parents; `root` is
// where proc and sys are looked for.
int cores_within_quotas(int cores, const std::string& root);

// Cores of the whole machine, whatever this process may use: alike for all processes of a host.
int online_cores();

// A core's second-level cache, as the system describes that of its first core; 0 if it does not say.
int64_t second_level_cache_bytes();

}  // namespace sirtaki
