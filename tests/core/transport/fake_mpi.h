// An MPI library between ranks of one process. Like real ones, it reads the sender's memory only when the receiver
// takes the message, moves nothing outside its functions, and must not be called by two threads of a rank at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "check.h"
#include "sirtaki.h"
#include "world.h"

namespace world {

class FakeMpi {
 public:
  struct Manner {
    int calls_to_leave = 0;    // of the sender, until a message leaves it
    int misses = 0;            // of iprobe, before it reports a message that is there
    int tests_to_receive = 0;  // of the receiver, until the bytes are there
    bool ends_early = false;   // a send ends once it is matched, while its bytes are still on their way
  };

  explicit FakeMpi(int size, Manner manner = {0, 0, 0, false}) : manner_(manner) {
    for (int rank = 0; rank < size; ++rank) endpoints_.push_back(std::make_unique<Endpoint>(*this, rank));
  }
  // Frees the buffers of requests that have not ended: nobody else may.
  ~FakeMpi() {
    for (const auto& request : requests_) {
      if (!request->has_ended) delete[] request->buffer;
    }
  }
  FakeMpi(const FakeMpi&) = delete;
  FakeMpi& operator=(const FakeMpi&) = delete;

  srt_mpi of(int rank, int tag = 7) {
    const auto endpoint = reinterpret_cast<intptr_t>(endpoints_[static_cast<size_t>(rank)].get());
    return {sizeof(srt_mpi), tag, endpoint, byte_type, issend, iprobe, irecv, test, get_count};
  }
  void fail(int rank) { endpoints_[static_cast<size_t>(rank)]->fails = true; }
  // Keeps a rank from seeing any message.
  void hold(int rank, bool is_held = true) { endpoints_[static_cast<size_t>(rank)]->is_held = is_held; }
  // Keeps a rank's receives from ending, while the sends of their messages have ended (`ends_early`).
  void stall(int rank, bool is_stalled = true) { endpoints_[static_cast<size_t>(rank)]->is_stalled = is_stalled; }
  // Forgets requests whose buffers have other owners.
  void forget() { requests_.clear(); }
  int64_t sent() const { return sent_; }  // number of messages
  int64_t calls(int rank) const { return endpoints_[static_cast<size_t>(rank)]->calls; }  // that it has made

 private:
  static constexpr intptr_t byte_type = 42;
  static constexpr int failure = 15;

  struct Request;
  struct Message {
    Request* send;
    int from, to, tag, bytes;
    int calls_to_leave, misses;
  };
  struct Endpoint {
    Endpoint(FakeMpi& mpi, int own) : library(mpi), rank(own) {}
    FakeMpi& library;
    const int rank;
    std::atomic<bool> fails{false}, is_held{false}, is_stalled{false}, is_called{false};
    std::atomic<int64_t> calls{0};
  };
  struct Request {
    Endpoint& owner;
    uint8_t* buffer;
    int bytes;
    Request* send = nullptr;  // of a receive: where its bytes come from
    int tests_left = 0;
    bool is_taken = false, has_ended = false;
    std::vector<uint8_t> on_the_way;
  };

  // One call of a function of MPI.
  class Call {
   public:
    explicit Call(Endpoint& endpoint)
        : endpoint_(endpoint), is_second_(endpoint.is_called.exchange(true)), lock_(endpoint.library.mutex_) {
      CHECK(!is_second_);
      ++endpoint.calls;
      for (Message& message : endpoint.library.messages_)
        if (message.from == endpoint.rank && message.calls_to_leave > 0) --message.calls_to_leave;
    }
    ~Call() { endpoint_.is_called = false; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Endpoint& endpoint_;
    const bool is_second_;  // while the rank is inside another
    std::lock_guard<std::mutex> lock_;
  };

  static Endpoint& endpoint_of(intptr_t comm) { return *reinterpret_cast<Endpoint*>(comm); }
  static Request* stored(const void* request) {
    Request* found = nullptr;
    std::memcpy(&found, request, sizeof found);
    return found;
  }

  Request& open(Endpoint& owner, uint8_t* buffer, int bytes, void* request) {
    requests_.emplace_back(new Request{.owner = owner, .buffer = buffer, .bytes = bytes, .on_the_way = {}});
    Request* made = requests_.back().get();
    std::memcpy(request, &made, sizeof made);
    return *made;
  }

  // Returns the oldest message from a rank to another.
  std::deque<Message>::iterator find(int from, int to, int tag) {
    return std::find_if(messages_.begin(), messages_.end(), [&](const Message& message) {
      return message.from == from && message.to == to && message.tag == tag;
    });
  }

  static int issend(const void* from, int count, intptr_t type, int rank, int tag, intptr_t comm, void* request) {
    Endpoint& own = endpoint_of(comm);
    FakeMpi& library = own.library;
    const Call call(own);
    CHECK_EQUAL(type, byte_type);
    if (own.fails) return failure;
    auto* buffer = static_cast<uint8_t*>(const_cast<void*>(from));
    Request& send = library.open(own, buffer, count, request);
    library.messages_.push_back(
        {&send, own.rank, rank, tag, count, library.manner_.calls_to_leave, library.manner_.misses});
    ++library.sent_;
    return 0;
  }

  static int iprobe(int rank, int tag, intptr_t comm, int* flag, void* status) {
    Endpoint& own = endpoint_of(comm);
    FakeMpi& library = own.library;
    const Call call(own);
    if (own.fails) return failure;
    *flag = 0;
    const auto found = library.find(rank, own.rank, tag);
    if (own.is_held || found == library.messages_.end() || found->calls_to_leave || found->misses-- > 0) return 0;
    found->misses = 0;
    *flag = 1;
    std::memcpy(static_cast<uint8_t*>(status) + 48, &found->bytes, sizeof found->bytes);
    return 0;
  }

  static int irecv(void* to, int count, intptr_t type, int rank, int tag, intptr_t comm, void* request) {
    Endpoint& own = endpoint_of(comm);
    FakeMpi& library = own.library;
    const Call call(own);
    CHECK_EQUAL(type, byte_type);
    if (own.fails) return failure;
    const auto found = library.find(rank, own.rank, tag);
    CHECK(found != library.messages_.end());
    CHECK_EQUAL(found->bytes, count);
    Request& receive = library.open(own, static_cast<uint8_t*>(to), count, request);
    receive.send = found->send;
    if (library.manner_.ends_early) {
      receive.on_the_way.assign(found->send->buffer, found->send->buffer + count);
      found->send->is_taken = true;
    }
    receive.tests_left = library.manner_.tests_to_receive;
    library.messages_.erase(found);
    return 0;
  }

  static int test(void* request, int* flag, void*) {
    Request& tested = *stored(request);
    const Call call(tested.owner);
    *flag = 0;
    if (tested.owner.fails) return failure;
    if (tested.send && !tested.owner.is_stalled && tested.tests_left-- <= 0) {
      const uint8_t* from = tested.on_the_way.empty() ? tested.send->buffer : tested.on_the_way.data();
      std::memcpy(tested.buffer, from, static_cast<size_t>(tested.bytes));
      tested.send->is_taken = tested.is_taken = true;
    }
    *flag = tested.has_ended = tested.is_taken;
    return 0;
  }

  static int get_count(const void* status, intptr_t type, int* count) {
    CHECK_EQUAL(type, byte_type);
    std::memcpy(count, static_cast<const uint8_t*>(status) + 48, sizeof *count);
    return 0;
  }

  const Manner manner_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::mutex mutex_;
  std::deque<Message> messages_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::atomic<int64_t> sent_{0};
};

// Returns the options for ranks on several hosts, between which MPI moves the data.
inline Options over_mpi(FakeMpi& mpi, const std::vector<int>& hosts,
                        std::vector<std::pair<std::string, std::string>> knobs = {}) {
  Options options = on_hosts(hosts, std::move(knobs));
  options.prepare = [&mpi, hosts](int rank, Context& context) {
    std::vector<int32_t> others;
    for (int32_t peer = 0; peer < static_cast<int32_t>(hosts.size()); ++peer)
      if (hosts[static_cast<size_t>(peer)] != hosts[static_cast<size_t>(rank)]) others.push_back(peer);
    const Status status = context.link_mpi(mpi.of(rank), others);
    CHECK_EQUAL(std::string(status.text()), "");
  };
  return options;
}

constexpr FakeMpi::Manner prompt{0, 0, 0, false}, slow{3, 2, 2, false};
inline const std::vector<std::pair<std::string, std::string>> small_chunks{{"chunk_bytes", "4096"}};

inline int64_t sent_over(Context& context, std::string_view transport) {
  srt_sent_bytes sent[8];
  int64_t bytes = 0;
  for (int32_t row = 0, count = context.count_sent_bytes(sent, 8); row < count; ++row)
    if (transport == sent[row].transport) bytes += sent[row].bytes;
  return bytes;
}

}  // namespace world
