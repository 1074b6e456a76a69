// An asynchronous call: it lives until the last of its operations has ended, and then notifies XLA.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "xla/call.h"
#include "xla/ffi.h"

namespace sirtaki {

// Converts a Status to XLA's error; nullptr for ok.
XlaError* to_xla(const XlaApi& api, const Status& status);

class XlaPending {
 public:
  // Queues the requests of a call. Afterwards either XLA waits for `future`, or the status says why not.
  static Status start(srt_context* context, const XlaApi& api, XlaCall call, XlaFuture*& future);

 private:
  // One tensor: the buffer for its result, and the call to notify when the result is complete.
  struct Part {
    XlaPending* whole;
    XlaResult result;
    std::unique_ptr<char[]> elsewhere;  // for a result whose size differs from the compiled one
  };

  XlaPending(srt_context* context, const XlaApi& api, XlaFuture* future, XlaCall call);

  static void complete(void* part, srt_status status, const char* error);
  static uintptr_t allocate(void* part, const srt_tensor* output);
  void note(const Status& failure);
  void note_failures();
  void finish();

  srt_context* context_;
  const XlaApi& api_;
  XlaFuture* future_;
  XlaCall call_;
  std::vector<Part> parts_;
  std::vector<srt_handle> handles_;
  std::atomic<size_t> left_;
  std::atomic<bool> has_failed_{false};
  Status failure_;  // the first failure
};

}  // namespace sirtaki
