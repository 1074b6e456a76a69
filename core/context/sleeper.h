// Where a rank waits when there is nothing to do: on doorbells, sockets, a timer and the neighbours' lives.
//
// Two threads may wait, each with a doorbell of its own: the engine's, and a caller's that drives the engine while
// it waits. Whoever is responsible for progress says so in this rank's attention word, and peers ring that bell.
#pragma once

#include <atomic>
#include <vector>

#include "base/clock.h"
#include "base/descriptor.h"
#include "base/status.h"
#include "transport/links.h"
#include "transport/neighbours.h"

namespace sirtaki {

class Sleeper {
 public:
  Sleeper(Neighbours* neighbours, const Links& links) : neighbours_(neighbours), links_(links) {}

  Status open();
  void close();  // in a forked child

  // Notes how deep a sleep begins; after it, the caller looks once more whether there is work.
  void set_attention(Attention attention);
  Attention attention() const;

  // Sleep until a bell, a descriptor or the time (`never` for none). The engine's sleep arms the descriptors.
  void engine_sleep(Nanoseconds until);
  void waiter_sleep(Nanoseconds until);

  // The engine's descriptors fire once and are armed again when whoever drives is done.
  void disarmed() { disarmed_.store(true, std::memory_order_seq_cst); }
  void rearm();

  // Wakes whoever is responsible in this process; nothing if someone polls.
  void wake();
  void ring_engine();

  // The report window: the engine wakes then. `never` disarms it.
  void set_timer(Nanoseconds delay);

  // What the descriptors have told since the last look, cheap if nothing. They tell it once: whoever looks has to act.
  struct Signs {
    bool of_links = false;   // something may be there to be read, or room to write
    std::vector<int> deaths;  // slots of neighbours
  };
  Signs look();

 private:
  Status watch(int fd, uint32_t events, uint64_t tag);
  void sleep(int epoll, int bell, Nanoseconds until);

  Neighbours* neighbours_;
  const Links& links_;
  Descriptor sources_, engine_, waiter_, timer_;
  Descriptor engine_bell_, waiter_bell_;  // duplicates of those that the neighbours know
  std::atomic<bool> disarmed_{false}, timer_set_{false};
  std::atomic<uint32_t> own_attention_{0};  // without shared memory
};

}  // namespace sirtaki
