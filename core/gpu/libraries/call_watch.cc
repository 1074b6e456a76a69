#include "gpu/libraries/call_watch.h"

#include <string_view>
#include <system_error>

#include "base/status.h"
#include "base/system/thread.h"

namespace sirtaki {
namespace {

// Returns a function's name as its documentation has it.
std::string documented(std::string_view symbol) {
  return std::string(symbol.substr(0, symbol.ends_with("_v2") ? symbol.size() - 3 : symbol.size()));
}

}  // namespace

RunningCalls::Scope::Scope(RunningCalls* calls, const char* function) {
  if (!calls) return;
  for (Slot& slot : calls->slots) {
    const char* free = nullptr;
    if (slot.function.load(std::memory_order_relaxed) || !slot.function.compare_exchange_strong(free, function))
      continue;
    slot.since.store(now(), std::memory_order_release);
    slot_ = &slot;
    return;
  }
}

RunningCalls::Scope::~Scope() {
  if (!slot_) return;
  slot_->since.store(0, std::memory_order_release);
  slot_->function.store(nullptr, std::memory_order_release);
}

CallWatch::CallWatch(std::shared_ptr<const RunningCalls> calls, std::string rank, Log log, Nanoseconds limit)
    : calls_(std::move(calls)), rank_(std::move(rank)), log_(log), limit_(limit) {
  try {
    thread_ = start_thread([this] { run(); });
  } catch (const std::system_error&) {  // the limit of threads is reached: the rank works without
  }
}

CallWatch::~CallWatch() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void CallWatch::run() {
  MutexLock lock(mutex_);
  while (!is_stopping_) {
    lock.wait_for(changed_, limit_ / 4);
    for (size_t slot = 0; slot < told_.size(); ++slot) look(slot);
  }
}

void CallWatch::look(size_t slot) {
  const RunningCalls::Slot& call = calls_->slots[slot];
  const Nanoseconds since = call.since.load(std::memory_order_acquire);
  const char* function = call.function.load(std::memory_order_acquire);
  if (since == 0 || !function || call.since.load(std::memory_order_acquire) != since) return;  // it has just returned
  Told& told = told_[slot];
  const Nanoseconds lasted = now() - since;
  if (lasted < (told.since == since ? 2 * told.lasted : limit_)) return;
  told = {since, lasted};
  const bool is_nccl = std::string_view(function).starts_with("nccl");
  log_.line(format("%s has been in %s of %s for %.3g s. %s", rank_.c_str(), documented(function).c_str(),
                   is_nccl ? "NCCL" : "the CUDA driver", in_seconds(lasted),
                   is_nccl ? "NCCL_DEBUG=INFO logs what NCCL does"
                           : "If nvidia-smi does not answer on its host either, the GPU or its driver hangs"));
}

}  // namespace sirtaki
