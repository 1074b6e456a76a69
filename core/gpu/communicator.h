// One rank's end of an NCCL communicator. It never blocks (config.blocking = 0): calls may go on by themselves
// afterwards, and are over when poll() says so. After the section "Fault Tolerance" of NVIDIA's NCCL user guide.
#pragma once

#include "base/clock.h"
#include "gpu/device.h"

namespace sirtaki {

class Communicator {
 public:
  explicit Communicator(const GpuDevice& device) : device_(device) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // All members, with the id that the first of them made. It can be used when poll() says so.
  Status begin(const NcclUniqueId& id, size_t members, size_t own);
  bool has_begun() const { return communicator_ != nullptr; }

  // Is the last call over? Not ok when anything has failed, here or at another member.
  Status poll(bool& is_over) const;

  // Ok also for a call that goes on by itself.
  Status check(NcclResult result, const char* attempt) const;

  NcclCommunicator get() const { return communicator_; }
  const NcclFunctions& nccl() const { return device_.libraries().nccl(); }

  // Ends what it does on the GPU, whoever waits for it there. Nothing else may be called afterwards.
  void abort();
  // Ends it in good order, together with the other members; after the deadline alone.
  void finish(Nanoseconds deadline);

 private:
  const GpuDevice& device_;
  NcclCommunicator communicator_ = nullptr;
};

}  // namespace sirtaki
