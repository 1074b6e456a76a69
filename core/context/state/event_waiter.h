// The wait of a rank that has nothing to do: on doorbells, sockets, a timer and the exit of its local peers.
//
// Two threads may wait, each on its own doorbell: the engine's thread, and a caller's thread that drives the engine
// while it waits. This rank's attention word names the thread responsible for progress, and peers ring its doorbell.
#pragma once

#include <atomic>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/system/descriptor.h"
#include "transport/links/links.h"
#include "transport/memory/local_peers.h"

namespace sirtaki {

class EventWaiter {
 public:
  EventWaiter(LocalPeers* local_peers, const Links& links) : local_peers_(local_peers), links_(links) {}

  Status open();
  void close();  // in a forked child
  Status watch_links();  // those that were added since open(), or since the last call

  // Publishes the depth of the coming sleep; afterwards the caller must check for work once more.
  void set_attention(Attention attention);
  Attention attention() const;

  // Block until a doorbell rings, a descriptor is ready or `until` has passed (`never`: no limit). The engine's
  // descriptors are one-shot.
  void engine_sleep(Nanoseconds until);
  void waiter_sleep(Nanoseconds until);

  // Records that the engine's descriptors have fired; rearm() arms them again when the driver is done.
  void disarmed() { disarmed_.store(true, std::memory_order_seq_cst); }
  void rearm();

  // Wakes the thread of this process that is responsible for progress; does nothing if a thread polls.
  void wake();
  void ring_engine();

  // Wakes the engine after `delay`, or before. The timer is not disarmed if no work is left by then, and not armed
  // again if it expires in time: programming it costs several microseconds on a virtual machine.
  void set_timer(Nanoseconds delay);

  // The events of the descriptors since the last call of take_events(), which is cheap if there are none. Each is
  // reported once, so the caller must act on it.
  struct WakeEvents {
    bool of_links = false;   // links may have become readable or writable
    std::vector<int> deaths;  // slots of dead local peers
  };
  WakeEvents take_events();

 private:
  Status watch(int fd, uint32_t events, uint64_t tag);

  LocalPeers* local_peers_;
  const Links& links_;
  size_t watched_links_ = 0;
  Descriptor sources_, engine_, timer_;
  Descriptor engine_bell_, waiter_bell_;  // duplicates of the descriptors that the local peers ring
  std::atomic<bool> disarmed_{false};
  std::atomic<Nanoseconds> expires_at_{never};  // of the timer, until its event has been taken
  std::atomic<uint32_t> own_attention_{0};  // without shared memory
};

}  // namespace sirtaki
