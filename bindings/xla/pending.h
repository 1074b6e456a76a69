// An asynchronous call, which exists until the last of its operations has ended, and then notifies XLA.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "native/call_status.h"
#include "xla/call.h"
#include "xla/ffi.h"

namespace sirtaki::bindings {

// Converts a status to XLA's error; nullptr for success.
XlaError* to_xla(const XlaApi& api, const CallStatus& status);

class XlaPending {
 public:
  // Queues the requests of a call. On success XLA waits for `future`.
  static CallStatus start(srt_context* context, const XlaApi& api, XlaCall call, XlaFuture*& future);

 private:
  // One tensor: the buffer for its result, and the call to notify when the result is complete.
  struct Tensor {
    XlaPending* whole;
    XlaResult result;
    std::unique_ptr<char[]> elsewhere;  // for a result whose size differs from the compiled one
  };

  XlaPending(srt_context* context, const XlaApi& api, XlaFuture* future, XlaCall call);

  static void complete(void* tensor, srt_status status, const char* error);
  static uintptr_t allocate(void* tensor, const srt_tensor* output);
  void note(const CallStatus& failure);
  void finish();

  srt_context* context_;
  const XlaApi& api_;
  XlaFuture* future_;
  XlaCall call_;
  std::vector<Tensor> tensors_;
  std::vector<srt_handle> handles_;
  std::atomic<size_t> left_;
  std::atomic<bool> has_failed_{false};
  CallStatus failure_;  // the first failure
};

}  // namespace sirtaki::bindings
