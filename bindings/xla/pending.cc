#include "xla/pending.h"

#include <new>

#include "native/requests.h"

namespace sirtaki::bindings {
XlaError* to_xla(const XlaApi& api, const CallStatus& status) {
  if (status.is_ok()) return nullptr;
  XlaErrorCreate error{{sizeof error, nullptr}, status.text.c_str(), absl_code(status.code)};
  return api.create_error(&error);
}

XlaPending::XlaPending(srt_context* context, const XlaApi& api, XlaFuture* future, XlaCall call)
    : context_(context), api_(api), future_(future), call_(std::move(call)), handles_(call_.requests().size()),
      left_(call_.requests().size()) {
  for (const XlaResult& result : call_.results()) tensors_.push_back({this, result, nullptr});
  for (size_t i = 0; i < tensors_.size(); ++i) {
    srt_request& request = call_.requests()[i];
    request.on_complete = complete;
    request.allocate = allocate;
    request.user = &tensors_[i];
  }
}

CallStatus XlaPending::start(srt_context* context, const XlaApi& api, XlaCall call, XlaFuture*& future) {
  if (call.requests().empty()) return {};
  XlaFutureCreate made{{sizeof made, nullptr}, nullptr};
  if (api.create_future(&made)) return {SRT_INTERNAL, "XLA could not make a future"};
  future = made.future;
  auto* pending = new XlaPending(context, api, made.future, std::move(call));
  // The last hook deletes the object, possibly before enqueue() returns.
  const bool is_in_flight = enqueue(context, pending->call_.requests(), pending->handles_,
                                    [pending](const CallStatus& failure) { pending->note(failure); });
  if (!is_in_flight) pending->finish();
  return {};
}

void XlaPending::complete(void* tensor, srt_status status, const char* error) {
  XlaPending& whole = *static_cast<Tensor*>(tensor)->whole;
  if (status != SRT_OK) whole.note({status, error});
  if (whole.left_.fetch_sub(1, std::memory_order_acq_rel) == 1) whole.finish();
}

uintptr_t XlaPending::allocate(void* user, const srt_tensor* output) {
  Tensor& tensor = *static_cast<Tensor*>(user);
  const uint64_t compiled = tensor.result.bytes;
  if (output->bytes == compiled && tensor.result.data) return reinterpret_cast<uintptr_t>(tensor.result.data);
  if (output->bytes != compiled)
    tensor.whole->note({SRT_INVALID_ARGUMENT, "the ranks' rows make " + std::to_string(output->bytes) +
                                                  " bytes, but the program was compiled for " +
                                                  std::to_string(compiled) +
                                                  "; compile it again, with equal numbers of rows on all ranks"});
  tensor.elsewhere.reset(new (std::nothrow) char[output->bytes]);
  return reinterpret_cast<uintptr_t>(tensor.elsewhere.get());
}

// Records a failure. Only the first one counts; the last hook reads it.
void XlaPending::note(const CallStatus& failure) {
  if (!has_failed_.exchange(true, std::memory_order_relaxed)) failure_ = failure;
}

// Completes the future and deletes this object. Code that waits for the future may run inside this function.
void XlaPending::finish() {
  const std::unique_ptr<XlaPending> self(this);
  if (failure_.is_ok()) call_.count_step(context_);
  srt_release(context_, handles_.data(), static_cast<int32_t>(handles_.size()));
  if (failure_.is_ok()) {
    XlaFutureSetAvailable available{{sizeof available, nullptr}, future_};
    api_.set_available(&available);
  } else {
    XlaFutureSetError failed{{sizeof failed, nullptr}, future_, to_xla(api_, failure_)};
    api_.set_error(&failed);
  }
}

}  // namespace sirtaki::bindings
