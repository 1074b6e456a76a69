// N ranks as threads of one process, over one shared mapping or over socket pairs: the real contexts, as in users'
// processes, but visible to the sanitizers. They may be configured to be on several hosts: then they share a mapping
// only with the ranks of their host, and have links to others, by TCP to other hosts: those with which ranks start, and
// those that operations ask for.
#pragma once

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "context/context.h"
#include "encrypted.h"
#include "late_connector.h"
#include "transport/memory/shared_region.h"

namespace world {

using namespace sirtaki;

enum class Over { memory, mapped, sockets };  // mapped: memory that each rank maps by itself, with an arena

struct Options {
  Over over = Over::memory;
  std::vector<std::pair<std::string, std::string>> knobs;
  std::function<void(int rank, Context&)> prepare;  // before start
  bool shut_down = true;  // shuts down each rank, after its body
  std::function<bool(int a, int b, int* ends)> connect = nullptr;  // for sockets: makes the pair between two ranks
  std::vector<int> hosts = {};  // by rank, numbered by their lowest rank; empty: all on one
};

// Makes two ends of a TCP connection over loopback.
inline bool tcp_pair(int* ends) {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  ends[0] = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(listener.get(), generic, length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &length) != 0 || ::connect(ends[0], generic, length) != 0)
    return false;
  ends[1] = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
  return ends[1] >= 0;
}

class World {
 public:
  World(int size, Options options) : size_(size), options_(std::move(options)) {
    for (const auto& [name, value] : options_.knobs)
      if (!config_.set(name, value).is_ok()) check::fail(__FILE__, __LINE__, "no such knob: " + name);
    options_.hosts.resize(static_cast<size_t>(size), 0);
    for (int rank = 0; rank < size; ++rank) {
      peers_.push_back({"here", 100 + rank, host_of(rank)});
      hosts_[host_of(rank)].ranks.push_back(rank);
      engine_bells_.push_back(::eventfd(0, EFD_NONBLOCK));
      waiter_bells_.push_back(::eventfd(0, EFD_NONBLOCK));
    }
    for (int rank = 0; rank < size; ++rank) make(rank);
    if (options_.over == Over::sockets || hosts_.size() > 1) connect_pairs();
    for (auto& context : contexts_)
      if (const Status status = context->start(); !status.is_ok()) check::fail(__FILE__, __LINE__, status.text());
    if (!options_.connect)
      for (auto& context : contexts_) late_.serve(*context);
  }

  ~World() {
    if (!options_.connect)
      for (int rank = 0; rank < size_; ++rank) late_.leave(rank);
    contexts_.clear();
    for (int fd : engine_bells_) ::close(fd);
    for (int fd : waiter_bells_) ::close(fd);
  }

  Context& operator[](int rank) { return *contexts_[static_cast<size_t>(rank)]; }

  // Destroys the rank without notice to its peers.
  void lose(int rank) {
    if (!options_.connect) late_.leave(rank);
    contexts_[static_cast<size_t>(rank)].reset();
  }

  // Makes the rank what it is in a forked child, where no thread of the parent exists.
  void fork_child(int rank) {
    if (!options_.connect) late_.leave(rank);
    (*this)[rank].fork_child();
  }

  // Runs a body on each rank, and waits for all.
  void run(const std::function<void(int rank, Context&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank] {
        body(rank, (*this)[rank]);
        if (options_.shut_down) (*this)[rank].shutdown(seconds(20));
      });
    for (auto& thread : threads) thread.join();
  }

 private:
  // The memory that the ranks of one host share.
  struct Host {
    std::vector<int32_t> ranks;
    std::unique_ptr<uint8_t, void (*)(uint8_t*)> region{nullptr, [](uint8_t* memory) { std::free(memory); }};
    Descriptor memory;
  };

  int host_of(int rank) const { return options_.hosts[static_cast<size_t>(rank)]; }

  void make(int rank) {
    Host& host = hosts_[host_of(rank)];
    const auto slots = static_cast<int32_t>(host.ranks.size());
    const auto slot = static_cast<int32_t>(std::find(host.ranks.begin(), host.ranks.end(), rank) - host.ranks.begin());
    srt_topology topology{sizeof topology, rank, size_, slot, slots, host_of(rank), static_cast<int32_t>(hosts_.size()),
                          peers_.data()};
    std::unique_ptr<Context> context;
    if (const Status status = Context::create(config_, topology, context); !status.is_ok())
      check::fail(__FILE__, __LINE__, status.text());
    if (options_.over != Over::sockets && slots > 1) link_memory(*context, host, slot);
    if (options_.prepare) options_.prepare(rank, *context);
    contexts_.push_back(std::move(context));
  }

  void link_memory(Context& context, Host& host, int32_t slot) {
    // Zeroed by calloc and aligned by hand, to look like a fresh memfd mapping.
    const auto slots = static_cast<int32_t>(host.ranks.size());
    if (!host.region)
      host.region.reset(static_cast<uint8_t*>(
          std::calloc(1, static_cast<size_t>(SharedRegion::bytes_needed(config_, slots)) + 4096)));
    const auto base = (reinterpret_cast<uintptr_t>(host.region.get()) + 4095) / 4096 * 4096;
    std::vector<int32_t> engine_bells, waiter_bells;
    for (int32_t rank : host.ranks) {
      engine_bells.push_back(engine_bells_[static_cast<size_t>(rank)]);
      waiter_bells.push_back(waiter_bells_[static_cast<size_t>(rank)]);
    }
    srt_memory memory{sizeof memory,       -1,      base,   slot, slots, host.ranks.data(), engine_bells.data(),
                      waiter_bells.data(), nullptr, nullptr};
    if (options_.over == Over::mapped) {
      if (!host.memory.is_open())
        std::ignore = SharedRegion::create(SharedRegion::layout(config_, slots), slots, host.memory);
      memory.fd = host.memory.get();
      memory.address = 0;
    }
    if (const Status status = context.link_memory(memory); !status.is_ok())
      check::fail(__FILE__, __LINE__, status.text());
  }

  bool connect(int a, int b, int* ends) const {
    if (options_.connect) return options_.connect(a, b, ends);
    if (host_of(a) != host_of(b)) return tcp_pair(ends);
    return ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
  }

  // Makes the links with which the ranks start; all, if the test makes them by itself.
  void connect_pairs() {
    for (int a = 0; a < size_; ++a) {
      const std::vector<int32_t> peers = (*this)[a].first_links();
      if (!options_.connect) (*this)[a].allow_link_requests();
      const auto starts_linked = [&](int b) {
        const bool shares_memory = options_.over != Over::sockets && host_of(a) == host_of(b);
        return !shares_memory && std::ranges::count(peers, b);
      };
      for (int b = a + 1; b < size_; ++b)
        if (options_.connect || starts_linked(b)) link(a, b);
    }
  }

  void link(int a, int b) {
    int ends[2];
    const bool crosses = host_of(a) != host_of(b);
    for (int64_t i = 0; i < (crosses ? config_.integer(Knob::sockets_per_link) : 1); ++i) {
      if (!connect(a, b, ends)) check::fail(__FILE__, __LINE__, "no socket pair");
      if (crosses && config_.integer(Knob::encrypt)) {
        link_encrypted(a, b, ends);
        continue;
      }
      if (!(*this)[a].link_socket(b, ends[0]).is_ok()) ::close(ends[0]);
      if (!(*this)[b].link_socket(a, ends[1]).is_ok()) ::close(ends[1]);
    }
  }

  void link_encrypted(int a, int b, const int* ends) {
    encrypted::Sessions sessions = encrypted::establish({{ends[0], ends[1]}});
    std::ignore = (*this)[a].link_tls(b, ends[0], sessions.ends[0]);
    std::ignore = (*this)[b].link_tls(a, ends[1], sessions.ends[1]);
  }

  int size_;
  Options options_;
  Config config_;
  std::vector<srt_peer> peers_;
  std::vector<int32_t> engine_bells_, waiter_bells_;
  std::map<int, Host> hosts_;
  std::vector<std::unique_ptr<Context>> contexts_;
  LateConnector late_{[this](int low, int high) { link(low, high); }};
};

// Returns a request in which every field with a default is set.
inline srt_request request(int32_t kind, const char* name, const int64_t* shape, int32_t dimensions,
                           DType dtype = DType::float32) {
  srt_request made{};
  made.struct_size = sizeof made;
  made.kind = kind;
  made.dtype = static_cast<int32_t>(dtype);
  made.device = -1;
  made.name = name;
  made.dimensions = dimensions;
  made.shape = shape;
  made.prescale = made.postscale = 1.0;
  return made;
}

template <typename T>
srt_request in_place(int32_t kind, const char* name, std::vector<T>& data, const int64_t& count, DType dtype) {
  srt_request made = request(kind, name, &count, 1, dtype);
  made.input = made.output = reinterpret_cast<uintptr_t>(data.data());
  return made;
}

// Returns the request with these splits, one per member; the caller keeps them alive.
inline srt_request with_splits(srt_request request, const std::vector<int64_t>& splits) {
  request.splits = splits.data();
  request.split_count = static_cast<int32_t>(splits.size());
  return request;
}

template <typename T>
srt_request from_to(srt_request request, const std::vector<T>& input, std::vector<T>& output) {
  request.input = reinterpret_cast<uintptr_t>(input.data());
  request.output = reinterpret_cast<uintptr_t>(output.data());
  return request;
}

// Returns the elements of a finished handle's output.
template <typename T>
std::vector<T> output_of(Context& context, Ticket handle) {
  srt_tensor output{};
  if (!context.output(handle, output).is_ok() || !output.data) return {};
  const auto* first = reinterpret_cast<const T*>(output.data);
  return {first, first + output.bytes / sizeof(T)};
}

inline Options over(Over transport, std::vector<std::pair<std::string, std::string>> knobs = {}) {
  return {transport, std::move(knobs), nullptr, true};
}

// The hosts of ranks, by rank: even hosts, uneven ones, ranks dealt out in turn, and one rank per host.
inline const std::vector<std::vector<int>> placements{{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1, 0}, {0, 1, 2}};

inline Options on_hosts(const std::vector<int>& hosts, std::vector<std::pair<std::string, std::string>> knobs = {}) {
  knobs.emplace_back("log_descriptor", "-1");
  return {Over::memory, std::move(knobs), nullptr, true, nullptr, hosts};
}

// Returns the options for the same ranks through shared memory, over sockets, and on two hosts.
inline std::vector<Options> everywhere(int size, const std::vector<std::pair<std::string, std::string>>& knobs = {}) {
  std::vector<int> halves;
  for (int rank = 0; rank < size; ++rank) halves.push_back(rank < (size + 1) / 2 ? 0 : 1);
  return {over(Over::memory, knobs), over(Over::sockets, knobs), on_hosts(halves, knobs)};
}

// Runs each variant of the data plane, with chunks so small that even small tensors take several rounds.
inline void on_each(const std::vector<int>& sizes, const std::function<void(World&, int size)>& body) {
  for (int size : sizes)
    for (const Options& options : {over(Over::memory), over(Over::memory, {{"chunk_bytes", "4096"}}),
                                   over(Over::sockets), over(Over::sockets, {{"chunk_bytes", "4096"}}),
                                   over(Over::sockets, {{"cpu_algorithm", "ring"}, {"chunk_bytes", "4096"}})}) {
      World ranks(size, options);
      body(ranks, size);
    }
  if (std::find_if(sizes.begin(), sizes.end(), [](int size) { return size > 1; }) == sizes.end()) return;
  for (const std::vector<int>& hosts : placements)
    for (const char* algorithm : {"auto", "direct", "recursive_doubling"}) {
      World ranks(static_cast<int>(hosts.size()),
                  on_hosts(hosts, {{"chunk_bytes", "4096"}, {"cpu_algorithm", algorithm}}));
      body(ranks, static_cast<int>(hosts.size()));
    }
}

inline Status run_one(Context& context, const srt_request& request, Ticket& handle, Nanoseconds timeout = seconds(60)) {
  Status status = context.enqueue(&request, 1, &handle);
  return status.is_ok() ? context.wait(&handle, 1, timeout) : status;
}

// Runs a request that must succeed, looks at its handle, and releases it.
inline void run_well(Context& context, const srt_request& request, const std::function<void(Ticket)>& look = {}) {
  Ticket handle = 0;
  expect_ok(run_one(context, request, handle));
  if (look) look(handle);
  if (handle) context.release(&handle, 1);
}

// Runs a request, and returns how it ended.
inline Status end_of(Context& context, const srt_request& request) {
  Ticket handle = 0;
  Status status = run_one(context, request, handle);
  if (handle) context.release(&handle, 1);
  return status;
}

// Submits a request, which must be accepted, and returns its handle.
inline Ticket start(Context& context, const srt_request& request) {
  Ticket handle = 0;
  expect_ok(context.enqueue(&request, 1, &handle));
  return handle;
}

// Runs requests that must succeed as one batch, looks at their handles, and releases them.
inline void run_batch_well(Context& context, const std::vector<srt_request>& requests,
                           const std::function<void(const std::vector<Ticket>&)>& look = {}) {
  const auto count = static_cast<int32_t>(requests.size());
  std::vector<Ticket> handles(requests.size());
  expect_ok(context.enqueue(requests.data(), count, handles.data()));
  expect_ok(context.wait(handles.data(), count, seconds(60)));
  if (look) look(handles);
  context.release(handles.data(), count);
}

// A sum of floats, in place.
struct FloatSum {
  explicit FloatSum(const char* name, int64_t elements = 10, float value = 0)
      : count(elements), data(static_cast<size_t>(elements), value),
        request(in_place(SRT_ALLREDUCE, name, data, count, DType::float32)) {}
  FloatSum(const FloatSum&) = delete;
  FloatSum& operator=(const FloatSum&) = delete;

  const int64_t count;
  std::vector<float> data;
  srt_request request;
};

// Returns numbers whose sum depends on the order in which they are added.
inline std::vector<float> delicate(int rank, int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values)
    value = std::ldexp(static_cast<float>(random() % 1'000'003), static_cast<int>(random() % 30));
  return values;
}

// Adds a process set, as all ranks do, and returns its number.
inline int32_t add_set(Context& context, const std::vector<int64_t>& ranks) {
  int64_t number = 0;
  const auto count = static_cast<int32_t>(ranks.size());
  run_well(context, request(SRT_ADD_PROCESS_SET, nullptr, ranks.data(), count),
           [&](Ticket handle) { number = context.result_number(handle); });
  return static_cast<int32_t>(number);
}

}  // namespace world
