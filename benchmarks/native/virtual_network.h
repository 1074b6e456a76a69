// A network in virtual time: bytes that ranks write come out at the other end later, and no thread waits.
//
// The model: a host has one cable out and one in, each of which carries one message after another at its bandwidth;
// messages between two hosts also have a latency. Hosts are in racks. A rack's uplink, out and in, carries the messages
// to and from other racks one after another, at the bandwidth of its hosts' cables divided by the oversubscription: a
// fat tree of two levels. Inside a host a message takes a fixed time.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/codec.h"
#include "transport/links/link.h"

namespace virtual_network {

using namespace sirtaki;

struct Model {
  int32_t ranks_a_host;
  Nanoseconds latency;  // between two hosts
  Nanoseconds latency_inside;  // within one
  double gigabits;  // per second, of a host's cable in each direction
  int32_t hosts_a_rack = 0;  // 0: all hosts are in one rack
  double oversubscription = 1;

  int32_t host_of(int32_t rank) const { return rank / ranks_a_host; }
  int32_t rack_of(int32_t rank) const { return hosts_a_rack ? host_of(rank) / hosts_a_rack : 0; }
  double uplink_gigabits() const { return gigabits * hosts_a_rack / oversubscription; }
};

// Returns the time for which bytes occupy a cable.
inline Nanoseconds carrying(size_t bytes, double gigabits) {
  return static_cast<Nanoseconds>(static_cast<double>(bytes) * 8 / gigabits);
}

struct Traffic {
  int64_t frames = 0, bytes = 0;

  void add(const Bytes& message) {
    for (size_t at = 0; at < message.size(); ++frames) {
      FrameHeader header;
      std::memcpy(&header, message.data() + at, sizeof header);
      at += sizeof header + padded(header.length);
    }
    bytes += static_cast<int64_t>(message.size());
  }
};

class Pipe;

// The bytes that a rank writes to one peer at once.
struct Message {
  Pipe* to = nullptr;
  Bytes bytes;
  Nanoseconds begun = 0;  // by the writer's processor_time()
};

// Returns the processor time of this thread: other work on the machine is not counted.
inline Nanoseconds processor_time() {
  timespec moment;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &moment);
  return seconds(moment.tv_sec) + moment.tv_nsec;
}

// One end of a connection between two ranks; it belongs to a Link.
class Pipe : public BytePipe {
 public:
  // Creates an end whose writes are left in the outbox, for the other end.
  Pipe(int32_t owner, std::vector<Message>& outbox) : owner_(owner), outbox_(outbox) {}

  static void join(Pipe& one, Pipe& other) {
    one.other_ = &other;
    other.other_ = &one;
  }

  int32_t owner() const { return owner_; }

  // Receives a message; an empty one is the end of the stream.
  void arrive(const Bytes& bytes) {
    has_ended_ |= bytes.empty();
    inbox_.insert(inbox_.end(), bytes.begin(), bytes.end());
  }

  // Ends the stream to the other end.
  void end() { outbox_.push_back({other_, {}, processor_time()}); }

  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override {
    const bool follows = !outbox_.empty() && outbox_.back().to == other_;
    if (!follows) outbox_.push_back({other_, {}, processor_time()});
    Bytes& message = outbox_.back().bytes;
    message.insert(message.end(), bytes.begin(), bytes.end());
    return static_cast<ptrdiff_t>(bytes.size());
  }

  ptrdiff_t read(std::span<uint8_t> bytes) override {
    const size_t count = std::min(bytes.size(), inbox_.size() - taken_);
    if (count == 0 && has_ended_) return -1;
    std::copy_n(inbox_.begin() + static_cast<ptrdiff_t>(taken_), count, bytes.begin());
    taken_ += count;
    if (taken_ == inbox_.size()) {
      inbox_.clear();
      taken_ = 0;
    }
    return static_cast<ptrdiff_t>(count);
  }

 private:
  int32_t owner_;
  std::vector<Message>& outbox_;
  Pipe* other_ = nullptr;
  Bytes inbox_;
  size_t taken_ = 0;
  bool has_ended_ = false;
};

// The network, which delivers messages and timers in the order of their times.
class Network {
 public:
  Network(const Model& model, int32_t ranks)
      : model_(model), cables_(static_cast<size_t>(model.host_of(ranks - 1) + 1)),
        uplinks_(static_cast<size_t>(model.rack_of(ranks - 1) + 1)) {}

  struct Turn {
    Nanoseconds at;
    int32_t rank;
    Traffic arrived;  // with the message that arrives, if one does
  };

  void wake(int32_t rank, Nanoseconds at) { push({at, Step::wakes, rank, {}}); }

  void send(int32_t from, Message message, Nanoseconds at) {
    ++under_way_;
    push({at, Step::leaves, from, std::move(message)});
  }

  bool is_idle() const { return under_way_ == 0; }

  // Finds the next rank for which a message arrives, or that wakes up; returns false if there is none before that
  // moment.
  bool next(Turn& turn, Nanoseconds before) {
    while (!events_.empty() && events_.front().at < before) {
      std::pop_heap(events_.begin(), events_.end(), is_later);
      Event event = std::move(events_.back());
      events_.pop_back();
      if (event.step == Step::leaves) leave(std::move(event));
      else if (event.step == Step::climbs) climb(std::move(event));
      else if (event.step == Step::descends) descend(std::move(event));
      else if (event.step == Step::reaches) reach(std::move(event));
      else {
        turn = {event.at, event.rank, {}};
        if (event.step == Step::arrives) arrive(std::move(event), turn.arrived);
        return true;
      }
    }
    return false;
  }

 private:
  // The events: a message leaves a rank, its first byte reaches the uplink of its rack, that of another rack, and
  // another host, its last byte arrives; a rank wakes up.
  enum class Step { leaves, climbs, descends, reaches, arrives, wakes };

  struct Event {
    Nanoseconds at;
    Step step;
    int32_t rank;  // the rank that sends, receives, or wakes up
    Message message;
    uint64_t number = 0;
  };

  struct Cables {
    Nanoseconds out_is_free = 0, in_is_free = 0;
  };

  static bool is_later(const Event& a, const Event& b) { return a.at != b.at ? a.at > b.at : a.number > b.number; }

  void push(Event event) {
    event.number = ++events_ever_;
    events_.push_back(std::move(event));
    std::push_heap(events_.begin(), events_.end(), is_later);
  }

  Cables& cables_of(int32_t rank) { return cables_[static_cast<size_t>(model_.host_of(rank))]; }
  Cables& uplinks_of(int32_t rank) { return uplinks_[static_cast<size_t>(model_.rack_of(rank))]; }

  // Occupies a cable from a moment on, as soon as it is free. Returns when the first byte is on it.
  static Nanoseconds pass(Nanoseconds& is_free, Nanoseconds at, const Message& message, double gigabits) {
    const Nanoseconds begun = std::max(at, is_free);
    is_free = begun + carrying(message.bytes.size(), gigabits);
    return begun;
  }

  void leave(Event event) {
    const int32_t from = event.rank, to = event.message.to->owner();
    if (model_.host_of(from) == model_.host_of(to))
      return push({event.at + model_.latency_inside, Step::arrives, to, std::move(event.message)});
    const Nanoseconds at = pass(cables_of(from).out_is_free, event.at, event.message, model_.gigabits);
    if (model_.rack_of(from) != model_.rack_of(to))
      return push({at + model_.latency / 2, Step::climbs, from, std::move(event.message)});
    push({at + model_.latency, Step::reaches, to, std::move(event.message)});
  }

  void climb(Event event) {
    const int32_t to = event.message.to->owner();
    const Nanoseconds at = pass(uplinks_of(event.rank).out_is_free, event.at, event.message, model_.uplink_gigabits());
    push({at + model_.latency - model_.latency / 2, Step::descends, to, std::move(event.message)});
  }

  void descend(Event event) {
    const Nanoseconds at = pass(uplinks_of(event.rank).in_is_free, event.at, event.message, model_.uplink_gigabits());
    push({at, Step::reaches, event.rank, std::move(event.message)});
  }

  void reach(Event event) {
    Nanoseconds& is_free = cables_of(event.rank).in_is_free;
    pass(is_free, event.at, event.message, model_.gigabits);
    push({is_free, Step::arrives, event.rank, std::move(event.message)});
  }

  void arrive(Event event, Traffic& arrived) {
    --under_way_;
    arrived.add(event.message.bytes);
    event.message.to->arrive(event.message.bytes);
  }

  Model model_;
  std::vector<Cables> cables_, uplinks_;  // by host, by rack
  std::vector<Event> events_;  // a heap
  uint64_t events_ever_ = 0;
  size_t under_way_ = 0;
};

}  // namespace virtual_network
