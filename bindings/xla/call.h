// One call of a compiled program, converted to requests from its attributes, operands and results.
//
// Attributes: kind, reduce_op, root, process_set, members, number, count and ends_step (integers), prescale and
// postscale (floats), names (one line per tensor). The first `count` operands and results are tensors; any further
// ones only order calls inside the program, and hold no data. ends_step is 0, or the number of the optimizer whose step
// ends with the call: 1 for all optimizers that autotune does not measure.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "native/call_status.h"
#include "sirtaki_observe.h"
#include "xla/ffi.h"

namespace sirtaki::bindings {

// The buffer for a tensor's result.
struct XlaResult {
  void* data = nullptr;
  uint64_t bytes = 0;
};

class XlaCall {
 public:
  // Reads a frame, which may be freed as soon as this returns.
  static CallStatus read(const XlaCallFrame& frame, XlaCall& out);

  // Returns the number of members of this process set that the program was compiled for; 0: any number.
  int64_t members() const { return members_; }
  int32_t process_set() const { return process_set_; }

  // Counts a training step if this is what a distributed optimizer exchanges in one. To be called once it has ended,
  // on a GPU at the earliest once it is in the program's stream.
  void count_step(srt_context* context) const {
    if (ends_step_) srt_end_steps(context, 1, ends_step_ > 1 ? ends_step_ : 0);
  }

  const std::vector<XlaResult>& results() const { return results_; }

  // Returns one request per tensor. Names and shapes stay owned by this call.
  std::vector<srt_request>& requests() { return requests_; }

 private:
  CallStatus add(const XlaBuffer& operand, const XlaBuffer& result, const srt_request& like, size_t index);

  int64_t members_ = 0;
  int32_t process_set_ = 0;
  int64_t ends_step_ = 0;
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<XlaResult> results_;
  std::vector<srt_request> requests_;
};

}  // namespace sirtaki::bindings
