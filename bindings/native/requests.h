// Requests of compiled programs: they use the process's context, and hooks complete them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "native/call_status.h"
#include "sirtaki.h"

namespace sirtaki::bindings {

// A reference to the process's context, held while a call needs it; empty if the process is not a rank.
class ProcessContext {
 public:
  ProcessContext() : context_(srt_acquire_process_context()) {}
  ~ProcessContext() {
    if (context_) srt_release_process_context();
  }
  ProcessContext(const ProcessContext&) = delete;
  ProcessContext& operator=(const ProcessContext&) = delete;

  srt_context* get() const { return context_; }

 private:
  srt_context* context_;
};

// Returns a request of this kind. A program may run an operation again before its previous run has ended, as in
// loops; the second run then waits for the name.
inline srt_request new_request(int32_t kind) {
  srt_request request{};
  request.struct_size = sizeof request;
  request.kind = kind;
  request.flags = SRT_REQUEST_QUEUE_SAME_NAME;
  return request;
}

// Finds the GPU that holds a call's tensors. Frameworks do not tell it: all ranks compile the same program. A call
// without elements stays on the CPU, on all ranks alike.
inline CallStatus find_gpu(srt_context* context, const std::vector<srt_request>& requests, int32_t& gpu) {
  gpu = -1;
  const auto holds_elements = [](const srt_request& request) {
    return std::find(request.shape, request.shape + request.dimensions, 0) == request.shape + request.dimensions;
  };
  const auto first = std::find_if(requests.begin(), requests.end(), holds_elements);
  if (first == requests.end()) return {};
  srt_error error;
  if (srt_gpu_of(context, first->input, &gpu, &error) == SRT_OK) return {};
  return {error.status, error.text};
}

// Enqueues requests that have hooks. Returns true if the hooks will be called, possibly before this returns: the
// caller must not access anything that they may delete. Returns false if all requests have ended or were rejected;
// each failure is passed to `note`.
template <typename Note>
bool enqueue(srt_context* context, const std::vector<srt_request>& requests, std::vector<srt_handle>& handles,
             const Note& note) {
  srt_error error{};
  const auto count = static_cast<int32_t>(requests.size());
  const srt_status status = srt_enqueue_or_complete(context, requests.data(), count, handles.data(), &error);
  if (status == SRT_IN_PROGRESS) return true;
  if (status != SRT_OK) {
    handles.clear();
    note(CallStatus{status, error.text});
    return false;
  }
  for (const srt_handle handle : handles)
    if (const srt_status ended = srt_poll(context, handle); ended != SRT_OK)
      note(CallStatus{ended, srt_handle_error(context, handle)});
  return false;
}

}  // namespace sirtaki::bindings
