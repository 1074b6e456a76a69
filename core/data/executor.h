// The execution of plans, started in the order of their numbers; each is a resumable operation of a backend.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "data/operation.h"

namespace sirtaki {

class Executor {
 public:
  // Adds a backend. The first added one that serves a transfer runs it.
  void add_backend(std::unique_ptr<Backend> backend) { backends_.push_back(std::move(backend)); }

  // Adds a transfer; called in ascending order of plans.
  void add(TransferPtr transfer) { queue_.push_back(std::move(transfer)); }

  // Changes of plans, by their numbers.
  struct Changes {
    struct Launch {
      uint64_t plan;
      std::shared_ptr<GpuEvent> event;
    };
    struct Finish {
      uint64_t plan;
      BackendName backend;
      const char* algorithm;  // see Operation
    };
    std::vector<Launch> launched;  // on a device: the plan is finished after the event
    std::vector<Finish> finished;
    uint64_t failed = 0;               // the plan whose operation failed
    bool moved = false;

    // Clears the lists but keeps their capacity, because this is called in every iteration.
    void clear() {
      launched.clear();
      finished.clear();
      failed = 0;
      moved = false;
    }
  };

  // Starts the transfers that can start, and advances all running operations once.
  Status advance(Nanoseconds now, Changes& changes);

  bool is_idle() const { return queue_.empty() && active_.empty(); }
  Nanoseconds last_moved() const { return last_moved_; }
  bool must_be_polled() const;  // whether an operation waits for a device

  // The oldest unfinished plan, and what it waits for. If that is its own input on a device, the oldest plan that waits
  // for bytes of ranks takes its place, where there is one.
  struct Stuck {
    const Transfer* transfer = nullptr;  // nullptr: there is no plan
    std::vector<int32_t> waits_for = {};
    DeviceWait device_wait = DeviceWait::none;
  };
  Stuck stuck() const;

  // Cancels all operations, which are kept until they are quiet.
  void cancel();
  bool is_quiet();

 private:
  struct Active {
    TransferPtr transfer;
    const Backend* backend;
    std::unique_ptr<Operation> operation;
    unsigned needed_at_start;
    bool is_launched = false;
  };

  Status start_what_can(Nanoseconds now, Changes& changes);
  Status advance_one(Active& active, Nanoseconds now, Changes& changes, bool& is_done);
  bool is_taken(unsigned needs) const;

  std::vector<std::unique_ptr<Backend>> backends_;
  std::deque<TransferPtr> queue_;
  std::vector<Active> active_;
  Nanoseconds last_moved_ = 0;
};

}  // namespace sirtaki
