// The wait of a rank that has nothing to do: on doorbells, sockets, a timer and the exit of its local peers.
//
// Two threads may wait, each with a doorbell of its own: the engine's, and a caller's that drives the engine while it
// waits. The thread responsible for progress is named in this rank's attention word, and peers ring its doorbell.
#pragma once

#include <atomic>
#include <vector>

#include "base/clock.h"
#include "base/descriptor.h"
#include "base/status.h"
#include "transport/links.h"
#include "transport/local_peers.h"

namespace sirtaki {

class EventWaiter {
 public:
  EventWaiter(LocalPeers* local_peers, const Links& links) : local_peers_(local_peers), links_(links) {}

  Status open();
  void close();  // in a forked child

  // Publishes how deep a sleep begins; afterwards the caller checks once more whether there is work.
  void set_attention(Attention attention);
  Attention attention() const;

  // Block until a doorbell rings, a descriptor is ready or the time comes (`never`: no limit). The engine's
  // descriptors are one-shot.
  void engine_sleep(Nanoseconds until);
  void waiter_sleep(Nanoseconds until);

  // Marks the engine's descriptors as fired; rearm() arms them again when the driver is done.
  void disarmed() { disarmed_.store(true, std::memory_order_seq_cst); }
  void rearm();

  // Wakes the thread responsible in this process; does nothing if a thread polls.
  void wake();
  void ring_engine();

  // Sets the timer of the report window, at which the engine wakes. `never` disarms it.
  void set_timer(Nanoseconds delay);

  // The events of the descriptors since the last look; cheap if there are none. Each is reported once: the caller must
  // act.
  struct WakeEvents {
    bool of_links = false;   // bytes may be there to be read, or room to write
    std::vector<int> deaths;  // slots of dead local peers
  };
  WakeEvents take_events();

 private:
  Status watch(int fd, uint32_t events, uint64_t tag);
  void sleep(int epoll, int bell, Nanoseconds until);

  LocalPeers* local_peers_;
  const Links& links_;
  Descriptor sources_, engine_, waiter_, timer_;
  Descriptor engine_bell_, waiter_bell_;  // duplicates of those that the local peers know
  std::atomic<bool> disarmed_{false}, timer_set_{false};
  std::atomic<uint32_t> own_attention_{0};  // without shared memory
};

}  // namespace sirtaki
