// Memory for the ranks of one host, each with a mapping of its own as in processes, without engines.
#pragma once

#include <sys/eventfd.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "transport/memory/local_peers.h"

namespace world {

constexpr int64_t KiB = 1024;

class HostMemory {
 public:
  explicit HostMemory(int ranks, const std::vector<std::pair<std::string, std::string>>& knobs = {}) {
    for (const auto& [name, value] : knobs) CHECK(config_.set(name, value).is_ok());
    CHECK(sirtaki::SharedRegion::create(sirtaki::SharedRegion::layout(config_, ranks), ranks, memory_).is_ok());
    std::vector<int32_t> numbers(static_cast<size_t>(ranks)), bells(static_cast<size_t>(ranks), bell_.get());
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int slot = 0; slot < ranks; ++slot) {
      const srt_memory memory{sizeof memory, memory_.get(), 0,       slot,   ranks, numbers.data(),
                              bells.data(),  bells.data(),  nullptr, nullptr};
      CHECK(sirtaki::LocalPeers::open(config_, memory, peers.emplace_back()).is_ok());
    }
  }

  sirtaki::SharedArena& arena(int slot) { return peers[static_cast<size_t>(slot)]->arena(); }
  sirtaki::PeerMemory& memory(int slot) { return peers[static_cast<size_t>(slot)]->memory(); }

  std::vector<std::unique_ptr<sirtaki::LocalPeers>> peers;

 private:
  sirtaki::Config config_;
  sirtaki::Descriptor memory_, bell_{::eventfd(0, EFD_NONBLOCK)};
};

}  // namespace world
