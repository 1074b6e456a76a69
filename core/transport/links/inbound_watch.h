// Finds which of many links have bytes to receive, with one system call instead of one for each link.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/system/descriptor.h"

struct epoll_event;

namespace sirtaki {

class InboundWatch {
 public:
  InboundWatch();
  ~InboundWatch();

  Status open();
  bool is_open() const { return epoll_.is_open(); }
  void close();

  // Adds a socket of a link, which look() then returns by this index. A link may have several sockets.
  Status add(int socket, size_t link);

  // Returns the links of which a socket has bytes, has ended or has failed. Never blocks.
  std::span<const size_t> look();

 private:
  Descriptor epoll_;
  std::vector<epoll_event> events_;  // room for one of each socket
  std::vector<size_t> found_;
};

}  // namespace sirtaki
