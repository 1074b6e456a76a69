#include "transport/socket_pipe.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>

namespace sirtaki {
namespace {

ptrdiff_t moved(ssize_t result) {
  if (result >= 0) return result;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

}  // namespace

SocketPipe::SocketPipe(Descriptor socket) : socket_(std::move(socket)) {
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // refused by Unix sockets, which need none
}

ptrdiff_t SocketPipe::write(std::span<const uint8_t> bytes) {
  return moved(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
}

ptrdiff_t SocketPipe::read(std::span<uint8_t> bytes) {
  const ssize_t count = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  return count == 0 ? -1 : moved(count);  // 0 is the end of the stream
}

}  // namespace sirtaki
