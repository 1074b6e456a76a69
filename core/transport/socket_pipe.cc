#include "transport/socket_pipe.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transport/tcp.h"

namespace sirtaki {
namespace {

constexpr size_t stripe_bytes = 64 << 10;

ptrdiff_t moved(ssize_t result) {
  if (result >= 0) return result;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

}  // namespace

SocketPipe::SocketPipe(std::vector<Descriptor> sockets, Nanoseconds probes_after)
    : sockets_(std::move(sockets)), out_{0, stripe_bytes}, in_{0, stripe_bytes} {
  for (const Descriptor& socket : sockets_) {
    ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    is_tcp_ = prepare_tcp(socket.get(), probes_after);
  }
}

void SocketPipe::advance(Place& place, size_t count) const {
  if (sockets_.size() == 1) return;
  place.left -= count;
  if (place.left) return;
  place.socket = (place.socket + 1) % sockets_.size();
  place.left = stripe_bytes;
}

ptrdiff_t SocketPipe::write(std::span<const uint8_t> bytes, bool more) {
  size_t total = 0;
  while (total < bytes.size()) {
    const size_t most = sockets_.size() == 1 ? bytes.size() : std::min(bytes.size() - total, out_.left);
    // Not at the end of a stripe: a socket would hold its bytes back until its turn comes again.
    const bool goes_on = (more || total + most < bytes.size()) && (sockets_.size() == 1 || most < out_.left);
    const int flags = MSG_NOSIGNAL | (goes_on ? MSG_MORE : 0);
    const ptrdiff_t count = moved(::send(sockets_[out_.socket].get(), bytes.data() + total, most, flags));
    if (count <= 0) return total ? static_cast<ptrdiff_t>(total) : count;
    advance(out_, static_cast<size_t>(count));
    total += static_cast<size_t>(count);
    if (static_cast<size_t>(count) < most) break;
  }
  return static_cast<ptrdiff_t>(total);
}

ptrdiff_t SocketPipe::read(std::span<uint8_t> bytes) {
  size_t total = 0;
  while (total < bytes.size()) {
    const size_t most = sockets_.size() == 1 ? bytes.size() : std::min(bytes.size() - total, in_.left);
    const ssize_t received = ::recv(sockets_[in_.socket].get(), bytes.data() + total, most, 0);
    const ptrdiff_t count = received == 0 ? -1 : moved(received);  // 0 is the end of the stream
    if (count <= 0) return total ? static_cast<ptrdiff_t>(total) : count;
    advance(in_, static_cast<size_t>(count));
    total += static_cast<size_t>(count);
    if (static_cast<size_t>(count) < most) break;
  }
  return static_cast<ptrdiff_t>(total);
}

std::vector<int> SocketPipe::descriptors() const {
  std::vector<int> all;
  for (const Descriptor& socket : sockets_) all.push_back(socket.get());
  return all;
}

void SocketPipe::end_writing() {
  for (const Descriptor& socket : sockets_) ::shutdown(socket.get(), SHUT_WR);
}

// A socket that is closed with unread bytes in it forgets what it has not delivered yet.
bool SocketPipe::is_delivered() const {
  if (!is_tcp_) return true;
  return std::all_of(sockets_.begin(), sockets_.end(),
                     [](const Descriptor& socket) { return is_settled(socket.get()); });
}

Nanoseconds SocketPipe::silence() const {
  Nanoseconds longest = 0;
  if (is_tcp_)
    for (const Descriptor& socket : sockets_) longest = std::max(longest, tcp_silence(socket.get()));
  return longest;
}

}  // namespace sirtaki
