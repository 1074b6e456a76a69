#include "xla/on_stream.h"

#include <vector>

#include "native/requests.h"

namespace sirtaki::bindings {
namespace {

constexpr int32_t slice_ms = 1'000;  // the core's own deadlines end the operations, and so the wait

// The operations of one call, which are released on every path.
class Launch {
 public:
  Launch(srt_context* context, size_t count) : context_(context), handles_(count) {}
  ~Launch() { srt_release(context_, handles_.data(), count()); }
  Launch(const Launch&) = delete;

  CallStatus start(const srt_request* requests) {
    srt_error error;
    if (srt_enqueue(context_, requests, count(), handles_.data(), &error) == SRT_OK) return {};
    handles_.clear();
    return {error.status, error.text};
  }

  CallStatus wait(uintptr_t stream) {
    srt_status status = SRT_IN_PROGRESS;
    while (status == SRT_IN_PROGRESS) status = srt_wait_on_stream(context_, handles_.data(), count(), stream, slice_ms);
    return status == SRT_OK ? CallStatus{} : first_failure(status);
  }

 private:
  int32_t count() const { return static_cast<int32_t>(handles_.size()); }

  CallStatus first_failure(srt_status otherwise) const {
    for (const srt_handle handle : handles_)
      if (const srt_status status = srt_poll(context_, handle); status != SRT_OK && status != SRT_IN_PROGRESS)
        return {status, srt_handle_error(context_, handle)};
    return {otherwise, srt_context_error(context_)};
  }

  srt_context* context_;
  std::vector<srt_handle> handles_;
};

// Returns XLA's result buffer for gathered and exchanged rows; 0 if its size differs from that in the compiled
// program.
uintptr_t allocate(void* user, const srt_tensor* output) {
  const auto& result = *static_cast<const XlaResult*>(user);
  return output->bytes == result.bytes ? reinterpret_cast<uintptr_t>(result.data) : 0;
}

}  // namespace

CallStatus run_on_stream(srt_context* context, const XlaCallFrame& frame, XlaCall call) {
  if (call.requests().empty()) return {};
  XlaStreamGet stream{{sizeof stream, nullptr}, frame.context, nullptr};
  if (frame.api->get_stream(&stream)) return {SRT_INTERNAL, "XLA did not report the stream of a call"};
  int32_t gpu = -1;
  if (CallStatus status = find_gpu(context, call.requests(), gpu); !status.is_ok()) return status;
  for (size_t i = 0; i < call.requests().size(); ++i) {
    srt_request& request = call.requests()[i];
    request.device = gpu;
    request.stream = reinterpret_cast<uintptr_t>(stream.stream);
    request.allocate = allocate;
    request.user = const_cast<XlaResult*>(&call.results()[i]);
  }
  Launch launch(context, call.requests().size());
  if (CallStatus status = launch.start(call.requests().data()); !status.is_ok()) return status;
  const CallStatus status = launch.wait(reinterpret_cast<uintptr_t>(stream.stream));
  if (status.is_ok()) call.count_step(context);
  return status;
}

}  // namespace sirtaki::bindings
