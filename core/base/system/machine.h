// The resources of the machine that this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace sirtaki {

// Returns the number of cores allowed by this process's affinity and by the quotas of its control groups, at least 1.
int usable_cores();

// Returns how many of `cores` the quotas allow. Reads both versions of control groups, and the groups' parents;
// `root` is the folder in which proc and sys are searched for.
int cores_within_quotas(int cores, const std::string& root);

// Returns the number of online cores of the machine, regardless of this process's affinity and quotas: the same for
// all processes of a host.
int online_cores();

// Returns the size of a page of memory: 4 KiB, or up to 64 KiB on arm64.
int64_t page_bytes();

// Returns the size of a core's second-level cache, as the system reports it for the first core; 0 if unknown.
int64_t second_level_cache_bytes();

}  // namespace sirtaki
