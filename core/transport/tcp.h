// Functions for TCP sockets only: whether the other machine still answers.
#pragma once

#include <netinet/tcp.h>

#include "base/clock.h"

namespace sirtaki {

// Makes a socket send small writes at once, and, if `probes_after` is not 0, probe an idle peer's machine then. Returns
// false if it is no TCP socket.
bool prepare_tcp(int socket, Nanoseconds probes_after);

// Return how long the peer's machine has been silent although it owes an answer; 0 if it owes none. A stopped process
// owes nothing: its machine continues to acknowledge, and to report that it has no room.
Nanoseconds silence_of(const tcp_info& info);
Nanoseconds tcp_silence(int socket);  // 0 if the system does not know

// Returns whether all that was written has reached the other machine, or never will.
bool is_settled(int socket);

}  // namespace sirtaki
