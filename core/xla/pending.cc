#include "xla/pending.h"

#include <new>

#include "base/text.h"

namespace sirtaki {
namespace {

XlaErrorCode code_of(srt_status status) {
  switch (status) {
    case SRT_INVALID_ARGUMENT:
    case SRT_MISMATCH: return XlaErrorCode::invalid_argument;
    case SRT_UNSUPPORTED: return XlaErrorCode::unimplemented;
    case SRT_PEER_FINISHED:
    case SRT_PEER_LOST:
    case SRT_ABORTED: return XlaErrorCode::aborted;
    case SRT_TIMEOUT: return XlaErrorCode::deadline_exceeded;
    case SRT_SHUT_DOWN:
    case SRT_FORKED: return XlaErrorCode::failed_precondition;
    case SRT_OUT_OF_MEMORY: return XlaErrorCode::resource_exhausted;
    default: return XlaErrorCode::internal;
  }
}

}  // namespace

XlaError* to_xla(const XlaApi& api, const Status& status) {
  if (status.is_ok()) return nullptr;
  XlaErrorCreate error{sizeof error, nullptr, status.text(), code_of(status.code())};
  return api.create_error(&error);
}

XlaPending::XlaPending(srt_context* context, const XlaApi& api, XlaFuture* future, XlaCall call)
    : context_(context), api_(api), future_(future), call_(std::move(call)), handles_(call_.requests().size()),
      left_(call_.requests().size()) {
  for (const XlaResult& result : call_.results()) parts_.push_back({this, result, nullptr});
  for (size_t i = 0; i < parts_.size(); ++i) {
    srt_request& request = call_.requests()[i];
    request.on_complete = complete;
    request.allocate = allocate;
    request.user = &parts_[i];
  }
}

Status XlaPending::start(srt_context* context, const XlaApi& api, XlaCall call, XlaFuture*& future) {
  const auto count = static_cast<int32_t>(call.requests().size());
  if (count == 0) return Status::ok();
  XlaFutureCreate made{sizeof made, nullptr, nullptr};
  if (api.create_future(&made)) return {SRT_INTERNAL, "XLA could not make a future"};
  future = made.future;
  auto* pending = new XlaPending(context, api, made.future, std::move(call));
  srt_error error;
  // The last hook deletes the object, possibly before this call returns.
  const srt_status status =
      srt_enqueue_or_complete(context, pending->call_.requests().data(), count, pending->handles_.data(), &error);
  if (status == SRT_IN_PROGRESS) return Status::ok();
  if (status == SRT_OK) {
    pending->note_failures();
  } else {
    pending->handles_.clear();
    pending->note({error.status, error.text});
  }
  pending->finish();
  return Status::ok();
}

void XlaPending::complete(void* part, srt_status status, const char* error) {
  XlaPending& whole = *static_cast<Part*>(part)->whole;
  if (status != SRT_OK) whole.note({status, error});
  if (whole.left_.fetch_sub(1, std::memory_order_acq_rel) == 1) whole.finish();
}

uintptr_t XlaPending::allocate(void* user, const srt_tensor* output) {
  Part& part = *static_cast<Part*>(user);
  if (output->bytes == part.result.bytes && part.result.data) return reinterpret_cast<uintptr_t>(part.result.data);
  if (output->bytes != part.result.bytes)
    part.whole->note(
        {SRT_INVALID_ARGUMENT,
         format("the ranks' rows make %llu bytes, but the program was compiled for %llu; compile it again, "
                "with rows alike on all ranks",
                static_cast<unsigned long long>(output->bytes), static_cast<unsigned long long>(part.result.bytes))});
  part.elsewhere.reset(new (std::nothrow) char[output->bytes]);
  return reinterpret_cast<uintptr_t>(part.elsewhere.get());
}

// Notes the failures of operations that have ended without a hook.
void XlaPending::note_failures() {
  for (const srt_handle handle : handles_)
    if (const srt_status status = srt_poll(context_, handle); status != SRT_OK)
      note({status, srt_handle_error(context_, handle)});
}

// Notes a failure. Only the first one counts; the last hook reads it.
void XlaPending::note(const Status& failure) {
  if (!has_failed_.exchange(true, std::memory_order_relaxed)) failure_ = failure;
}

// Completes the future and deletes this object. Code that waits for the future may run inside this function.
void XlaPending::finish() {
  const std::unique_ptr<XlaPending> self(this);
  srt_release(context_, handles_.data(), static_cast<int32_t>(handles_.size()));
  if (failure_.is_ok()) {
    XlaFutureSetAvailable available{sizeof available, nullptr, future_};
    api_.set_available(&available);
  } else {
    XlaFutureSetError failed{sizeof failed, nullptr, future_, to_xla(api_, failure_)};
    api_.set_error(&failed);
  }
}

}  // namespace sirtaki
