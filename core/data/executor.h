// Runs plans: started in the order of their numbers, each a resumable operation of some backend.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "data/operation.h"

namespace sirtaki {

class Executor {
 public:
  // Asked in this order; the first that serves a transfer runs it.
  void add_backend(std::unique_ptr<Backend> backend) { backends_.push_back(std::move(backend)); }

  // Transfers come in ascending plan order.
  void add(std::shared_ptr<const Transfer> transfer) { queue_.push_back(std::move(transfer)); }

  // Does some work. Appends the numbers of plans that have finished.
  Status advance(Nanoseconds now, std::vector<uint64_t>& finished, bool& moved);

  bool is_idle() const { return queue_.empty() && active_.empty(); }
  Nanoseconds last_moved() const { return last_moved_; }

  // What the oldest unfinished plan waits for; nullptr if there is none.
  const Transfer* stuck(std::vector<int32_t>& waits_for) const;

  // Give up everything. Operations stay until they are quiet.
  void cancel();
  bool is_quiet();

 private:
  struct Active {
    std::shared_ptr<const Transfer> transfer;
    std::unique_ptr<Operation> operation;
    unsigned needs;
  };

  Status start_what_can(Nanoseconds now, std::vector<uint64_t>& finished, bool& moved);
  bool is_taken(unsigned needs) const;

  std::vector<std::unique_ptr<Backend>> backends_;
  std::deque<std::shared_ptr<const Transfer>> queue_;
  std::vector<Active> active_;
  Nanoseconds last_moved_ = 0;
};

}  // namespace sirtaki
