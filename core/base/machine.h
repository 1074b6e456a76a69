// The resources of the machine that this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace sirtaki {

// Returns the number of cores by affinity and by the quotas of the control groups that this process is in, at least 1.
int usable_cores();

// Returns how many of `cores` the quotas allow. Both versions of control groups are read, and the groups' parents;
// `root` is the folder in which proc and sys are searched for.
int cores_within_quotas(int cores, const std::string& root);

// Returns the number of cores of the whole machine, whatever this process may use: the same for all processes of a
// host.
int online_cores();

// Returns the size of a core's second-level cache, as the system describes that of its first core; 0 if unknown.
int64_t second_level_cache_bytes();

}  // namespace sirtaki
