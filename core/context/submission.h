// The opening of a caller's requests as entries of the handle table, with all checks that one rank can make by itself.
#pragma once

#include "base/status.h"
#include "context/caller_state.h"
#include "sirtaki.h"

namespace sirtaki {

struct Submission {
  const srt_request* requests;
  int32_t count;
  Ticket* out;
  std::vector<GpuEventPtr> inputs;  // by request, recorded behind the work that produces its input on a GPU; or empty
  bool is_attempted;  // the caller tries to complete it at once, without hooks
};

// The rank that makes a submission.
struct Caller {
  int32_t rank, world_size;
  CallerState& state;
};

// Opens handles for all requests, or, if one of them is refused, for none.
Status open_all(Submission& submission, const Caller& caller);

}  // namespace sirtaki
