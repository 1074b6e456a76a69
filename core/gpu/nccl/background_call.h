// A call that may take seconds or hang, made in a thread of its own, so that the engine goes on and its deadlines hold.
// The first calls of NCCL load plugins and search the host for network interfaces.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "base/system/thread.h"

namespace sirtaki {

// `Result`: its default is the result of a call that has run out of memory.
template <typename Result>
class BackgroundCall {
 public:
  BackgroundCall() = default;
  // Abandons a call that is still running.
  ~BackgroundCall() {
    if (!thread_.joinable()) return;
    Stage running = Stage::running;
    if (state_->stage.compare_exchange_strong(running, Stage::abandoned)) thread_.detach();
    else thread_.join();
  }
  BackgroundCall(const BackgroundCall&) = delete;
  BackgroundCall& operator=(const BackgroundCall&) = delete;

  // Both functions must own what they use, because an abandoned call outlives this object. `drop` is given the result
  // of an abandoned call, in the call's thread.
  Status start(std::function<Result()> call, std::function<void(Result&)> drop) {
    state_ = std::make_shared<State>();
    try {
      thread_ =
          start_thread([state = state_, call = std::move(call), drop = std::move(drop)] { run(state, call, drop); });
    } catch (const std::system_error& problem) {
      return {SRT_SYSTEM, std::string("no thread could be started: ") + problem.what()};
    }
    return Status::ok();
  }

  bool has_started() const { return thread_.joinable(); }
  bool is_over() const { return state_ && state_->stage.load(std::memory_order_acquire) == Stage::over; }
  const Result& result() const { return state_->result; }  // valid once it is over

  // Waits for the end; returns whether it has come by the deadline.
  bool wait(Nanoseconds deadline) const {
    while (!is_over() && now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return is_over();
  }

 private:
  enum class Stage { running, over, abandoned };
  struct State {
    std::atomic<Stage> stage{Stage::running};
    Result result;
  };

  static void run(const std::shared_ptr<State>& state, const std::function<Result()>& call,
                  const std::function<void(Result&)>& drop) {
    try {
      state->result = call();
    } catch (const std::bad_alloc&) {
    }
    Stage running = Stage::running;
    if (!state->stage.compare_exchange_strong(running, Stage::over)) drop(state->result);
  }

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace sirtaki
