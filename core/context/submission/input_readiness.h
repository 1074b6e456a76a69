// The choice of what waits for the inputs that a GPU is still computing. Where an operation is launched on the GPU
// behind its inputs (NCCL), the GPU does: it is reported at once. The host does for the others, and reports them only
// when their inputs are ready, because they hold resources of the host while they run: staged operations, those whose
// members have not agreed on a transport yet, and joins, after which a rank has nothing left to do for the others.
#pragma once

#include <vector>

#include "context/state/caller_state.h"
#include "control/rank/negotiator.h"
#include "gpu/gpu_backend.h"

namespace sirtaki {

// A caller's request, and the events after which it may be reported.
struct QueuedRequest {
  Request request;
  std::vector<GpuEventPtr> inputs;
};

class InputReadiness {
 public:
  // `backend`: nullptr without GPUs.
  InputReadiness(const GpuBackend* backend, const Negotiator& negotiator)
      : backend_(backend), negotiator_(negotiator) {}

  // Returns the events for which the host waits before it reports a request: for a join, those of all operations in
  // flight.
  std::vector<GpuEventPtr> awaited_by_host(const HandleEntry& entry, HandleTable& handles) const;

  // Returns whether a submission has to wait. A change of a process set, or a join, never overtakes other
  // submissions.
  bool must_wait(const QueuedRequest& submission) const {
    return !submission.inputs.empty() || (!is_empty() && comes_last(*submission.request.signature));
  }

  void add(QueuedRequest submission) { waiting_.push_back({std::move(submission), false}); }
  void flush();  // reports the requests that wait now without delay once they are ready
  bool is_empty() const { return waiting_.empty(); }
  void clear() { waiting_.clear(); }

  struct Taken {
    std::vector<Request> requests;  // ready ones, in the order in which they were added
    bool wants_flush = false;
  };
  // Takes the requests that are ready. Fails if a GPU has failed.
  Status take(Taken& taken);

 private:
  struct Waiting {
    QueuedRequest submission;
    bool wants_flush;
  };

  static bool comes_last(const Signature& signature);
  static Status look(const QueuedRequest& submission, std::vector<CudaStream>& busy, bool& are_ready);

  const GpuBackend* backend_;
  const Negotiator& negotiator_;
  std::vector<Waiting> waiting_;
};

}  // namespace sirtaki
