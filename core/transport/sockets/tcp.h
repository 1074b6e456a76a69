// Functions for TCP sockets only: configuration, and whether the other machine still answers.
#pragma once

#include <netinet/tcp.h>

#include "base/clock.h"

namespace sirtaki {

// Makes a socket send small writes at once and, if `probes_after` is not 0, probe an idle peer's machine after that
// time. Returns false if it is not a TCP socket.
bool prepare_tcp(int socket, Nanoseconds probes_after);

// Return how long the peer's machine has been silent although it should answer; 0 if it has nothing to answer. A
// stopped process does not count as silent: its machine continues to acknowledge, and to report a full receive
// window.
Nanoseconds silence_of(const tcp_info& info);
Nanoseconds tcp_silence(int socket);  // 0 if the system cannot tell

// Probes an idle peer's machine at once, besides the probes of `prepare_tcp`. Where thousands of connections of one
// machine are idle from the same moment on, their probes meet in the system's queue (1,000 packets for loopback, by
// net.core.netdev_max_backlog): the same ones are lost each time.
void probe_tcp(int socket);

// Returns whether all written bytes have reached the other machine, or never will.
bool is_settled(int socket);

}  // namespace sirtaki
