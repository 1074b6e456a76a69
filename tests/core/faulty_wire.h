// A wire between two ranks that misbehaves in one direction.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"

namespace world {

enum class Fault { delay, cut, corrupt, stall };

// A wire between two sockets. It carries a given number of bytes correctly before its fault shows.
class Wire {
 public:
  Wire(Fault fault, size_t after) : fault_(fault), left_(after) {
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, near_), 0);
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, far_), 0);
    threads_.emplace_back([this] { carry(far_[0], near_[0], true); });
    threads_.emplace_back([this] { carry(near_[0], far_[0], false); });
  }
  ~Wire() {
    cut();
    for (auto& thread : threads_) thread.join();
    ::close(near_[0]);
    ::close(far_[0]);
  }

  // Returns how to connect ranks if this wire leads from one to a victim, which reads what goes wrong, and all others
  // are connected directly.
  std::function<bool(int a, int b, int* ends)> between(int victim, int from) const {
    return [this, victim, from](int a, int b, int* ends) {
      if (std::minmax(a, b) != std::minmax(victim, from))
        return ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
      ends[0] = (a == victim ? near_ : far_)[1];
      ends[1] = (b == victim ? near_ : far_)[1];
      return true;
    };
  }

 private:
  void cut() const {
    ::shutdown(near_[0], SHUT_RDWR);
    ::shutdown(far_[0], SHUT_RDWR);
  }

  void carry(int from, int to, bool is_faulty) {
    std::vector<uint8_t> bytes(65536);
    for (;;) {
      const size_t most = is_faulty && left_ ? std::min(left_, bytes.size()) : bytes.size();
      const ssize_t count = ::recv(from, bytes.data(), most, 0);
      if (count <= 0) break;
      if (is_faulty && left_ == 0) {
        if (fault_ == Fault::stall) continue;  // swallowed
        if (fault_ == Fault::cut) break;
        if (fault_ == Fault::corrupt) bytes[0] ^= 0xff;
        if (fault_ == Fault::delay) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        left_ = SIZE_MAX;
      } else if (is_faulty) {
        left_ -= static_cast<size_t>(count);
      }
      for (ssize_t sent = 0; sent < count;) {
        const ssize_t n = ::send(to, bytes.data() + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
        if (n < 0) return cut();
        sent += n;
      }
    }
    // An end of the stream is passed on as such; a cut breaks both directions.
    if (is_faulty && left_ == 0 && fault_ == Fault::cut) cut();
    else ::shutdown(to, SHUT_WR);
  }

  Fault fault_;
  size_t left_;
  int near_[2], far_[2];
  std::vector<std::thread> threads_;
};

}  // namespace world
