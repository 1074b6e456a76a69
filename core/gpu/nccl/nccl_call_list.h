// The NCCL calls of a transfer. Large pieces of its tensors are sent directly. Small pieces are sent in one call:
// packed into scratch memory on the GPU and copied back, unless they lie next to each other in this rank's memory. The
// choice of calls depends on sizes alone, so that all ranks make the same calls; addresses are each rank's own. Equal
// parts of all members are gathered or scattered by one call.
#pragma once

#include <cstdint>
#include <vector>

#include "data/operation.h"
#include "gpu/device/gpu.h"

namespace sirtaki {

struct NcclCallList {
  struct NcclCall {
    const uint8_t* input;
    uint8_t* output;
    int64_t bytes;
    size_t member;  // the source (broadcast), the destination (reduce), or the other end (send, receive)
  };

  std::vector<GpuCopy> before, after;  // before: a copy from nullptr is of neutral elements
  std::vector<NcclCall> calls;        // all-reduce; broadcasts; reductions to one member
  std::vector<NcclCall> collectives;  // that gather or scatter equal parts; `bytes` is one member's part
  std::vector<NcclCall> sends, receives;

  bool has_no_calls() const { return calls.empty() && collectives.empty() && sends.empty() && receives.empty(); }
};

constexpr int64_t large_piece = 64 << 10;  // bytes from which a separate call costs less than two copies

// Returns the bytes of scratch memory that a transfer's calls need. `calls_nccl` is false for a single member that only
// copies.
size_t scratch_needed(const Transfer& transfer, bool calls_nccl);
NcclCallList make_call_list(const Transfer& transfer, bool calls_nccl, uint8_t* scratch);

}  // namespace sirtaki
