// Processes that a driver forks, and that begin a piece of work at the same moment.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "drivers.h"

// The state that the processes share from before they fork.
struct Gate {
  pthread_barrier_t barrier;
  int64_t start;  // ns, of CLOCK_MONOTONIC
  int64_t ends[];  // by process

  static Gate* create(int processes) {
    const size_t bytes = sizeof(Gate) + sizeof(int64_t) * static_cast<size_t>(processes);
    void* shared = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(shared != MAP_FAILED, "no shared memory");
    auto* gate = static_cast<Gate*>(shared);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    must(pthread_barrier_init(&gate->barrier, &attributes, static_cast<unsigned>(processes)) == 0, "no barrier");
    return gate;
  }

  static int64_t now() {
    timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return int64_t{1'000'000'000} * moment.tv_sec + moment.tv_nsec;
  }

  // Runs a piece of work in all processes, from the same moment on. Returns the microseconds until the last one has
  // finished it.
  template <typename Work>
  double timed(int process, int processes, Work&& work) {
    constexpr int64_t time_to_wake_up = 20'000'000;
    if (process == 0) start = now() + time_to_wake_up + 100'000 * processes;
    ::prctl(PR_SET_TIMERSLACK, 1UL);
    pthread_barrier_wait(&barrier);
    const timespec moment{static_cast<time_t>(start / 1'000'000'000), start % 1'000'000'000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr) != 0) continue;
    work();
    ends[process] = now();
    pthread_barrier_wait(&barrier);
    return static_cast<double>(*std::max_element(ends, ends + processes) - start) / 1e3;
  }
};

// Runs a body in this many processes, this one being the first. Returns whether all ended well.
inline bool run_processes(int count, const std::function<void(int process)>& body) {
  for (int process = 1; process < count; ++process) {
    const pid_t child = ::fork();
    must(child >= 0, "no process");
    if (child != 0) continue;
    body(process);
    std::_Exit(0);
  }
  body(0);
  int failed = 0, status = 0;
  while (::wait(&status) > 0) failed |= status;
  return failed == 0;
}
