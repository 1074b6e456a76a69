// One rank's handle of an NCCL communicator. It never blocks (config.blocking = 0): calls may continue in the
// background, until poll() reports that they are over. After the section "Fault Tolerance" of NVIDIA's NCCL user
// guide.
#pragma once

#include <optional>

#include "gpu/device/device.h"
#include "gpu/nccl/background_call.h"

namespace sirtaki {

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<const GpuDevice> device) : device_(std::move(device)) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Begins a communicator of all members, with the id that the first member created. It is usable once poll() reports
  // that the call is over.
  Status begin(const NcclUniqueId& id, size_t members, size_t own);

  // Returns whether the last call is over. Fails if anything has failed, here or at another member.
  Status poll(bool& is_over);

  // Checks the result of a call; also ok if the call continues in the background.
  Status check(NcclResult result, const char* attempt) const;

  bool is_open() const { return communicator_ || beginning_; }
  NcclCommunicator get() const { return communicator_; }
  const NcclFunctions& nccl() const { return device_->libraries().nccl(); }

  // Aborts its work on the GPU, whatever waits for that work. No other function may be called afterwards.
  void abort();
  // Finalizes it together with the other members; aborts it after the deadline.
  void finish(Nanoseconds deadline);

 private:
  struct Begun {
    Status status{SRT_OUT_OF_MEMORY, "no memory left for a communicator"};
    NcclCommunicator communicator = nullptr;
  };

  static void abort(const GpuDevice& device, NcclCommunicator communicator);

  std::shared_ptr<const GpuDevice> device_;
  std::optional<BackgroundCall<Begun>> beginning_;
  NcclCommunicator communicator_ = nullptr;  // once it has begun
};

}  // namespace sirtaki
