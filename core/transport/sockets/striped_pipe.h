// One or more connections to one peer as a BytePipe. With several, the stream is distributed round-robin in stripes
// of one size, so that both ends can compute the connection of each byte without a header.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "transport/links/link.h"
#include "transport/sockets/tcp.h"

namespace sirtaki {

// A Channel is one connection, with is_encrypted, socket(), and with write(), read() and end_writing() like those of a
// BytePipe. An encrypted one has holds_inbound(), too.
template <typename Channel>
class StripedPipe : public BytePipe {
 public:
  // Makes the sockets non-blocking. If `probes_after` is not 0, an idle TCP peer's machine is probed after that time.
  StripedPipe(std::vector<Channel> channels, Nanoseconds probes_after)
      : channels_(std::move(channels)), out_{0, stripe_bytes}, in_{0, stripe_bytes} {
    for (const Channel& channel : channels_) {
      const int socket = channel.socket();
      ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
      is_tcp_ = prepare_tcp(socket, probes_after);
    }
  }

  Transport transport() const override {
    return Channel::is_encrypted ? Transport::tls : is_tcp_ ? Transport::tcp : Transport::unix_socket;
  }

  ptrdiff_t write(std::span<const uint8_t> bytes, bool more) override {
    size_t total = 0;
    while (total < bytes.size()) {
      const size_t most = channels_.size() == 1 ? bytes.size() : std::min(bytes.size() - total, out_.left);
      // Never sets `more` at the end of a stripe: the socket would hold its bytes back until its next turn.
      const bool goes_on = (more || total + most < bytes.size()) && (channels_.size() == 1 || most < out_.left);
      const ptrdiff_t count = channels_[out_.channel].write(bytes.subspan(total, most), goes_on);
      if (count <= 0) return total ? static_cast<ptrdiff_t>(total) : count;
      advance(out_, static_cast<size_t>(count));
      total += static_cast<size_t>(count);
      if (static_cast<size_t>(count) < most) break;
    }
    return static_cast<ptrdiff_t>(total);
  }

  ptrdiff_t read(std::span<uint8_t> bytes) override {
    size_t total = 0;
    while (total < bytes.size()) {
      const size_t most = channels_.size() == 1 ? bytes.size() : std::min(bytes.size() - total, in_.left);
      const ptrdiff_t count = channels_[in_.channel].read(bytes.subspan(total, most));
      if (count <= 0) return total ? static_cast<ptrdiff_t>(total) : count;
      advance(in_, static_cast<size_t>(count));
      total += static_cast<size_t>(count);
      if (static_cast<size_t>(count) < most) break;
    }
    return static_cast<ptrdiff_t>(total);
  }

  bool holds_inbound() const override {
    if constexpr (Channel::is_encrypted)
      return std::ranges::any_of(channels_, [](const Channel& channel) { return channel.holds_inbound(); });
    return false;
  }

  std::vector<int> descriptors() const override {
    std::vector<int> all;
    for (const Channel& channel : channels_) all.push_back(channel.socket());
    return all;
  }

  void end_writing() override {
    for (Channel& channel : channels_) {
      channel.end_writing();
      ::shutdown(channel.socket(), SHUT_WR);
    }
  }

  // Returns whether all bytes are delivered: a socket that is closed with unread bytes discards what it has not
  // delivered.
  bool is_delivered() const override {
    if (!is_tcp_) return true;
    return std::all_of(channels_.begin(), channels_.end(),
                       [](const Channel& channel) { return is_settled(channel.socket()); });
  }

  Nanoseconds silence() const override {
    Nanoseconds longest = 0;
    if (is_tcp_)
      for (const Channel& channel : channels_) longest = std::max(longest, tcp_silence(channel.socket()));
    return longest;
  }

  void probe() const override {
    if (is_tcp_)
      for (const Channel& channel : channels_) probe_tcp(channel.socket());
  }

 private:
  static constexpr size_t stripe_bytes = 64 << 10;

  // The position in one direction of the stream.
  struct Place {
    size_t channel = 0;
    size_t left;  // bytes left of the stripe
  };

  void advance(Place& place, size_t count) const {
    if (channels_.size() == 1) return;
    place.left -= count;
    if (place.left) return;
    place.channel = (place.channel + 1) % channels_.size();
    place.left = stripe_bytes;
  }

  std::vector<Channel> channels_;
  bool is_tcp_ = false;
  Place out_, in_;
};

}  // namespace sirtaki
