// Connections over loopback.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "drivers.h"

struct Connection {
  int ends[2];
};

inline Connection connect_over_loopback() {
  Connection made;
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  made.ends[0] = ::socket(AF_INET, SOCK_STREAM, 0);
  must(::bind(listener, generic, length) == 0 && ::listen(listener, 1) == 0 &&
           ::getsockname(listener, generic, &length) == 0 && ::connect(made.ends[0], generic, length) == 0,
       "no connection over loopback");
  made.ends[1] = ::accept(listener, nullptr, nullptr);
  ::close(listener);
  return made;
}
