// One call of a compiled program, as requests: what its attributes say about its operands and results.
//
// Attributes: kind, reduce_op, root, process_set, members, number, count and device (integers), prescale and postscale
// (floats), names (a line for each tensor). The first `count` operands and results are tensors; any after them only
// order calls inside the program, and hold nothing.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "sirtaki.h"
#include "xla/ffi.h"

namespace sirtaki {

// Where a tensor's result belongs.
struct XlaResult {
  void* data = nullptr;
  uint64_t bytes = 0;
};

class XlaCall {
 public:
  // Reads a frame, which may go as soon as this returns.
  static Status read(const XlaCallFrame& frame, XlaCall& out);

  // Compiled for so many members of this process set; 0: for any number.
  int64_t members() const { return members_; }
  int32_t process_set() const { return process_set_; }

  const std::vector<XlaResult>& results() const { return results_; }

  // One for each tensor. Names and shapes stay this call's.
  std::vector<srt_request>& requests() { return requests_; }

 private:
  Status add(const XlaBuffer& operand, const XlaBuffer& result, const srt_request& like, size_t place);

  int64_t members_ = 0;
  int32_t process_set_ = 0;
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<XlaResult> results_;
  std::vector<srt_request> requests_;
};

}  // namespace sirtaki
