// Threads of the core's own.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace sirtaki {

// Starts a thread that no signal reaches: signals are for the program's own threads. Throws std::system_error.
template <typename Function>
std::thread start_thread(Function&& function) {
  struct Mask {
    Mask() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Mask() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Mask inherited;
  return std::thread(std::forward<Function>(function));
}

}  // namespace sirtaki
