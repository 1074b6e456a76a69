#include "transport/sockets/tcp.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

namespace sirtaki {
namespace {

// The number of unanswered probes that breaks a connection. It exceeds the limit of any heartbeat, whose error is
// clearer.
constexpr int most_probes = 100;

bool set(int socket, int level, int option, int value) {
  return ::setsockopt(socket, level, option, &value, sizeof value) == 0;
}

bool look_at(int socket, tcp_info& info) {
  socklen_t length = sizeof info;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
}

}  // namespace

bool prepare_tcp(int socket, Nanoseconds probes_after) {
  if (!set(socket, IPPROTO_TCP, TCP_NODELAY, 1)) return false;
  if (!probes_after) return true;
  const auto every = static_cast<int>(std::clamp<Nanoseconds>(probes_after / seconds(1), 1, 32'767));
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, every);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, every);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, most_probes);
  return true;
}

Nanoseconds silence_of(const tcp_info& info) {
  const bool owes = info.tcpi_unacked > 0 || info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
  return owes ? milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv)) : 0;
}

Nanoseconds tcp_silence(int socket) {
  tcp_info info{};
  return look_at(socket, info) ? silence_of(info) : 0;
}

void probe_tcp(int socket) {
  int every = 0;
  socklen_t length = sizeof every;
  // Linux probes a connection, when this option is set, that has been idle for longer.
  if (::getsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &every, &length) == 0)
    set(socket, IPPROTO_TCP, TCP_KEEPIDLE, every);
}

bool is_settled(int socket) {
  tcp_info info{};
  int unanswered = 0;
  if (!look_at(socket, info) || info.tcpi_state == TCP_CLOSE) return true;
  return ::ioctl(socket, SIOCOUTQ, &unanswered) != 0 || unanswered == 0;
}

}  // namespace sirtaki
