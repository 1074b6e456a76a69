// The opening of a caller's requests as entries of the handle table, with all checks that a single rank can make.
#pragma once

#include "base/status.h"
#include "context/state/caller_state.h"
#include "sirtaki.h"

namespace sirtaki {

struct Submission {
  const srt_request* requests;
  int32_t count;
  Ticket* out;
  std::vector<GpuEventPtr> inputs;  // by request, recorded behind the work on a GPU that produces its input; or empty
  bool is_attempted;  // the caller tries to complete it at once, without hooks
};

// The rank that makes a submission.
struct Caller {
  int32_t rank, world_size;
  CallerState& state;
};

// Opens handles for all requests, or for none if one of them is rejected.
Status open_all(Submission& submission, const Caller& caller);

}  // namespace sirtaki
