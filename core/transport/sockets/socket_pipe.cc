#include "transport/sockets/socket_pipe.h"

#include <sys/socket.h>

#include <cerrno>
#include <iterator>

namespace sirtaki {
namespace {

ptrdiff_t moved(ssize_t result) {
  if (result >= 0) return result;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

}  // namespace

ptrdiff_t SocketChannel::write(std::span<const uint8_t> bytes, bool more) {
  return moved(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | (more ? MSG_MORE : 0)));
}

ptrdiff_t SocketChannel::read(std::span<uint8_t> bytes) {
  const ssize_t received = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  return received == 0 ? -1 : moved(received);  // 0 is the end of the stream
}

SocketPipe::SocketPipe(std::vector<Descriptor> sockets, Nanoseconds probes_after)
    : StripedPipe({std::make_move_iterator(sockets.begin()), std::make_move_iterator(sockets.end())}, probes_after) {}

}  // namespace sirtaki
