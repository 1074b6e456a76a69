// Pinned memory of the host, mapped twice: tasks of streams use one mapping, the host the other, which is protected
// while the host does not know that a task that uses the memory has ended. So the host's accesses are checked as well,
// with happens-before: one that comes too early is a misuse.
#pragma once

#include <cstddef>
#include <string>

namespace fake {

enum class HostMay { write, read, nothing };

void* allocate_pinned(size_t bytes);  // aborts the process if there is no memory
void free_pinned(void* address);

// Returns where tasks find this address, or the address itself if it is not in pinned memory.
void* for_tasks(const void* address);

// `task`: the one because of which the host may do no more, for messages.
void protect_pinned(void* address, HostMay may, const std::string& task);

// Records the first access of the host that came too early since the last call as a misuse.
void report_early_access();

}  // namespace fake
