// Makes the links that running ranks ask for, as the program of a user does: one thread for each rank.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "context/context.h"

namespace world {

using namespace sirtaki;

class LateConnector {
 public:
  // `connect` links two ranks; it is called by one thread at a time.
  explicit LateConnector(std::function<void(int low, int high)> connect) : connect_(std::move(connect)) {}
  ~LateConnector() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) leave(static_cast<int>(rank));
  }

  // Serves ranks, in ascending order, each until its context needs no further link.
  void serve(Context& context) {
    const auto rank = static_cast<int>(ranks_.size());
    ranks_.push_back(std::make_unique<Rank>());
    ranks_.back()->thread = std::thread([this, rank, &context, &left = ranks_.back()->has_left] {
      while (!left && take_requests(rank, context)) {
      }
    });
  }

  // Ends the thread of a rank, before its context is destroyed. No link to it is made afterwards.
  void leave(int rank) {
    Rank& gone = *ranks_[static_cast<size_t>(rank)];
    {
      const std::lock_guard lock(mutex_);
      gone.has_left = true;
    }
    if (gone.thread.joinable()) gone.thread.join();
  }

 private:
  struct Rank {
    std::atomic<bool> has_left{false};
    std::thread thread;
  };

  bool take_requests(int rank, Context& context) {
    int32_t peers[16];
    int32_t count = 0;
    const Status status = context.wait_for_link_requests(peers, 16, count, milliseconds(20));
    for (int32_t i = 0; i < count; ++i) {
      const std::lock_guard lock(mutex_);
      if (peers[i] < rank && !ranks_[static_cast<size_t>(peers[i])]->has_left) connect_(peers[i], rank);
    }
    return status.is_ok() || status.code() == SRT_IN_PROGRESS;
  }

  std::function<void(int low, int high)> connect_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace world
