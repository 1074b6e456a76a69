// One rank's handle of an NCCL communicator. It never blocks (config.blocking = 0): calls may continue in the
// background, until poll() reports that they are over. After the section "Fault Tolerance" of NVIDIA's NCCL user
// guide.
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

  // Begins a communicator of all members, with the id that the first member created. It is usable once poll() reports
  // that the call is over.
  Status begin(const NcclUniqueId& id, size_t members, size_t own);

  // Returns whether the last call is over. Fails if anything has failed, here or at another member.
  Status poll(bool& is_over) const;

  // Checks the result of a call; also ok if the call continues in the background.
  Status check(NcclResult result, const char* attempt) const;

  NcclCommunicator get() const { return communicator_; }
  const NcclFunctions& nccl() const { return device_.libraries().nccl(); }

  // Aborts its work on the GPU, whatever waits for that work. No other function may be called afterwards.
  void abort();
  // Finalizes it together with the other members; aborts it after the deadline.
  void finish(Nanoseconds deadline);

 private:
  const GpuDevice& device_;
  NcclCommunicator communicator_ = nullptr;
};

}  // namespace sirtaki
