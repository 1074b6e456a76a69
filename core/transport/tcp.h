// What only TCP sockets know: whether the other machine still answers.
#pragma once

#include <netinet/tcp.h>

#include "base/clock.h"

namespace sirtaki {

// Sends small writes at once, and, if `probes_after` is not 0, asks an idle peer's machine for a sign of life then.
// False: it is no TCP socket.
bool prepare_tcp(int socket, Nanoseconds probes_after);

// How long the peer's machine has been silent although it owes an answer; 0 if it owes none. A process that is stopped
// owes nothing: its machine goes on to acknowledge, and to say that it has no room.
Nanoseconds silence_of(const tcp_info& info);
Nanoseconds tcp_silence(int socket);  // 0 if the system does not know

// Whether all that was written has reached the other machine, or never will.
bool is_settled(int socket);

}  // namespace sirtaki
