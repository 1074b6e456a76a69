// The bytes that this rank has sent over its links, by host of the peer and transport.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sirtaki {

enum class Transport : uint8_t { ring, unix_socket, tcp, tls, mpi };
constexpr std::array<const char*, 5> transport_names = {"ring", "unix", "tcp", "tls", "mpi"};  // by transport

// A counter to which one thread at a time adds, the driver, and which any thread may read.
class SentCounter {
 public:
  void add(size_t bytes) { total_.store(total() + static_cast<int64_t>(bytes), std::memory_order_relaxed); }
  int64_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> total_{0};
};

class SentBytes {
 public:
  // `host_of`: the host of each rank of the world; any numbers.
  explicit SentBytes(const std::vector<int32_t>& host_of) {
    std::unordered_map<int32_t, size_t> places;
    for (size_t rank = 0; rank < host_of.size(); ++rank) {
      const auto [found, is_new] = places.try_emplace(host_of[rank], places.size());
      if (is_new) first_ranks_.push_back(static_cast<int32_t>(rank));
      place_of_.push_back(found->second);
    }
    counters_ = std::vector<std::array<SentCounter, transport_names.size()>>(places.size());
  }

  SentCounter& of(int32_t peer, Transport transport) {
    return counters_[place_of_[static_cast<size_t>(peer)]][static_cast<size_t>(transport)];
  }

  // Calls visit(peer, transport, total) for each counter; `peer` is the first rank of its host.
  template <typename Visit>
  void visit(Visit&& visit_total) const {
    for (size_t host = 0; host < counters_.size(); ++host)
      for (size_t transport = 0; transport < transport_names.size(); ++transport)
        visit_total(first_ranks_[host], static_cast<Transport>(transport), counters_[host][transport].total());
  }

 private:
  std::vector<int32_t> first_ranks_;  // by host
  std::vector<size_t> place_of_;      // by rank: the index of its host
  std::vector<std::array<SentCounter, transport_names.size()>> counters_;  // by host and transport
};

}  // namespace sirtaki
