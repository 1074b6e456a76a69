// Requests whose input a GPU is still making. They are reported once it is there, so that what is agreed on can begin
// at once: operations that wait for one another on the GPUs could do so for ever.
#pragma once

#include <vector>

#include "gpu/events.h"
#include "plan/request.h"

namespace sirtaki {

// What a caller has asked for, and when it may be reported.
struct Submission {
  Request request;
  GpuEventPtr ready;  // nullptr: at once
};

class Readiness {
 public:
  // Does it have to wait? A change of a process set, or the end of this rank's data, overtakes nothing.
  bool must_wait(const Submission& submission) const {
    return submission.ready || (!is_empty() && comes_last(submission));
  }

  void add(Submission submission) { waiting_.push_back({std::move(submission), false}); }
  void flush();  // what waits now is not to wait any longer once it is ready
  bool is_empty() const { return waiting_.empty(); }
  void clear() { waiting_.clear(); }

  struct Taken {
    std::vector<Request> requests;  // that are ready, in the order in which they were added
    bool wants_flush = false;
  };
  // Not ok when a GPU has failed.
  Status take(Taken& taken);

 private:
  struct Waiting {
    Submission submission;
    bool wants_flush;
  };

  static bool comes_last(const Submission& submission);
  static Status look(const Submission& submission, std::vector<CudaStream>& busy, bool& is_ready);

  std::vector<Waiting> waiting_;
};

}  // namespace sirtaki
