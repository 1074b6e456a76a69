#include "mpi/transfer.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "native/requests.h"

namespace sirtaki::bindings {
namespace {

// The end of several operations. The thread that waits holds no reference to the context, so that it can be shut down.
class End {
 public:
  End(srt_context* context, size_t operations) : handles_(operations), context_(context), left_(operations) {}

  void start(std::vector<srt_request>& requests) {
    for (srt_request& request : requests) {
      request.on_complete = complete;
      request.user = this;
    }
    if (enqueue(context_, requests, handles_, [this](const CallStatus& failure) { note(failure); })) return;
    const std::lock_guard lock(mutex_);
    finish();
  }

  CallStatus wait(int64_t* number) {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return has_ended_; });
    if (number) *number = number_;
    return failure_;
  }

 private:
  static void complete(void* user, srt_status status, const char* error) {
    End& end = *static_cast<End*>(user);
    const std::lock_guard lock(end.mutex_);
    if (status != SRT_OK) end.note({status, error});
    if (--end.left_ == 0) end.finish();
  }

  void note(const CallStatus& failure) {
    if (failure_.is_ok()) failure_ = failure;
  }

  // To be called with the lock held: the thread that waits deletes this object as soon as it is free.
  void finish() {
    if (failure_.is_ok()) number_ = srt_result_number(context_, handles_.front());
    srt_release(context_, handles_.data(), static_cast<int32_t>(handles_.size()));
    has_ended_ = true;
    ended_.notify_one();
  }

  std::vector<srt_handle> handles_;
  srt_context* context_;
  size_t left_;
  CallStatus failure_;  // the first failure
  int64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
};

}  // namespace

Transfer::Transfer(int32_t kind, std::string called, std::vector<int64_t> dimensions, int32_t dtype)
    : request(new_request(kind)), name(std::move(called)), shape(std::move(dimensions)) {
  request.device = -1;
  request.prescale = request.postscale = 1.0;
  request.dtype = dtype;
}

CallStatus run(std::vector<Transfer> transfers, int64_t* number) {
  if (transfers.empty()) return {};
  std::vector<srt_request> requests;
  for (const Transfer& transfer : transfers) {
    requests.push_back(transfer.request);
    requests.back().name = transfer.name.c_str();
    requests.back().shape = transfer.shape.data();
    requests.back().dimensions = static_cast<int32_t>(transfer.shape.size());
  }
  std::optional<End> end;
  {
    const ProcessContext context;
    if (!context.get()) return not_initialised();
    end.emplace(context.get(), requests.size());
    end->start(requests);
  }
  return end->wait(number);
}

}  // namespace sirtaki::bindings
