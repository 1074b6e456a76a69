// Names the calls of libcuda and libnccl that do not return. Such a call may hold the thread that drives the engine,
// and with that all of the rank's deadlines; other ranks see only that this rank is silent.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread_safety.h"

namespace sirtaki {

// The calls that a rank's threads are in.
class RunningCalls {
 public:
  struct Slot {
    std::atomic<const char*> function{nullptr};  // nullptr: free
    std::atomic<Nanoseconds> since{0};           // 0: not known yet, or no longer
  };

  // Lists a call while it lasts. Calls beyond the number of slots are not listed.
  class Scope {
   public:
    Scope(RunningCalls* calls, const char* function);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Slot* slot_ = nullptr;
  };

  std::array<Slot, 16> slots;
};

// A function of a library. Its calls are listed.
template <typename Signature>
struct LibraryFunction;
template <typename Result, typename... Parameters>
struct LibraryFunction<Result(Parameters...)> {
  Result operator()(Parameters... parameters) const {
    const RunningCalls::Scope scope(calls, symbol);
    return address(parameters...);
  }
  explicit operator bool() const { return address != nullptr; }

  // Sets the name and the list, and returns the place of the address.
  using Address = Result (*)(Parameters...);
  Address& named(const char* name, RunningCalls* list) {
    symbol = name;
    calls = list;
    return address;
  }

  Address address = nullptr;
  const char* symbol = nullptr;
  RunningCalls* calls = nullptr;
};

// A thread that logs the calls that last.
class CallWatch {
 public:
  // Logs a call once it has lasted for `limit`, and again whenever that time has doubled.
  CallWatch(std::shared_ptr<const RunningCalls> calls, std::string rank, Log log, Nanoseconds limit);
  ~CallWatch();

 private:
  void run();
  void look(size_t slot);

  const std::shared_ptr<const RunningCalls> calls_;
  const std::string rank_;
  const Log log_;
  const Nanoseconds limit_;
  struct Told {
    Nanoseconds since = 0, lasted = 0;  // the call that was logged last, and its length then
  };
  std::array<Told, std::tuple_size_v<decltype(RunningCalls::slots)>> told_;
  Mutex mutex_;
  std::condition_variable changed_;
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace sirtaki
