// Connected stream sockets (TCP or Unix) to one peer as a BytePipe.
#pragma once

#include "base/system/descriptor.h"
#include "transport/sockets/striped_pipe.h"

namespace sirtaki {

class SocketChannel {
 public:
  static constexpr bool is_encrypted = false;

  explicit SocketChannel(Descriptor socket) : socket_(std::move(socket)) {}

  int socket() const { return socket_.get(); }
  ptrdiff_t write(std::span<const uint8_t> bytes, bool more);
  ptrdiff_t read(std::span<uint8_t> bytes);
  void end_writing() {}

 private:
  Descriptor socket_;
};

class SocketPipe final : public StripedPipe<SocketChannel> {
 public:
  SocketPipe(std::vector<Descriptor> sockets, Nanoseconds probes_after);
};

}  // namespace sirtaki
