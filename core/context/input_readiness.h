// Requests whose input a GPU is still computing. They are reported once the input is ready, so that agreed operations
// can begin at once: operations that wait for one another on the GPUs could deadlock.
#pragma once

#include <vector>

#include "gpu/events.h"
#include "plan/request.h"

namespace sirtaki {

// A caller's request, and the event after which it may be reported.
struct QueuedRequest {
  Request request;
  GpuEventPtr ready;  // nullptr: it may be reported at once
};

class InputReadiness {
 public:
  // Returns whether a submission has to wait. A change of a process set, or a join, never overtakes other
  // submissions.
  bool must_wait(const QueuedRequest& submission) const {
    return submission.ready || (!is_empty() && comes_last(submission));
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

  static bool comes_last(const QueuedRequest& submission);
  static Status look(const QueuedRequest& submission, std::vector<CudaStream>& busy, bool& is_ready);

  std::vector<Waiting> waiting_;
};

}  // namespace sirtaki
