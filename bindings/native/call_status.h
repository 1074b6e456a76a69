// The result of one step of a binding: success, or a status code of the core with its message. Frameworks receive it
// as one of Abseil's canonical error codes (absl/status/status.h), which TensorFlow and XLA share.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "sirtaki.h"

namespace sirtaki::bindings {

struct CallStatus {
  srt_status code = SRT_OK;
  std::string text;

  bool is_ok() const { return code == SRT_OK; }
};

// Returns the failure of a call without a process's context. A worker of an elastic job, to which hvdrun has given a
// number, has none between init() and hvd.elastic.run either.
inline CallStatus not_initialised() {
  if (std::getenv("SIRTAKI_WORKER"))
    return {
        SRT_SHUT_DOWN,
        "this rank exchanges data outside of hvd.elastic.run: in a job with --min-np, ranks exist only inside the "
        "function that @hvd.elastic.run decorates. Move this call into it; the state is sent to all ranks before it "
        "starts"};
  return {SRT_SHUT_DOWN, "sirtaki is not initialised in this process: call init() in every rank, before anything else"};
}

enum class AbslCode : int32_t {
  ok = 0,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  resource_exhausted = 8,
  failed_precondition = 9,
  aborted = 10,
  unimplemented = 12,
  internal = 13,
};

inline AbslCode absl_code(srt_status status) {
  switch (status) {
    case SRT_OK: return AbslCode::ok;
    case SRT_INVALID_ARGUMENT:
    case SRT_MISMATCH:
    case SRT_NOT_FINITE: return AbslCode::invalid_argument;
    case SRT_UNSUPPORTED: return AbslCode::unimplemented;
    case SRT_TIMEOUT: return AbslCode::deadline_exceeded;
    case SRT_OUT_OF_MEMORY: return AbslCode::resource_exhausted;
    case SRT_SHUT_DOWN:
    case SRT_FORKED: return AbslCode::failed_precondition;
    case SRT_PEER_FINISHED:
    case SRT_PEER_LOST:
    case SRT_ABORTED: return AbslCode::aborted;
    default: return AbslCode::internal;
  }
}

}  // namespace sirtaki::bindings
