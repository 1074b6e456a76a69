// Locks that the compiler checks: macros for the attributes of clang's thread-safety analysis
// (https://clang.llvm.org/docs/ThreadSafetyAnalysis.html), and a mutex that carries them. `make test-locks` runs the
// analysis, and so does each build with clang. GCC has no such analysis, and the macros expand to nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/clock.h"

#if defined(__clang__)
#define SIRTAKI_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define SIRTAKI_THREAD_SAFETY(attribute)
#endif

#define CAPABILITY(name) SIRTAKI_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY SIRTAKI_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(lock) SIRTAKI_THREAD_SAFETY(guarded_by(lock))
#define REQUIRES(...) SIRTAKI_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) SIRTAKI_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) SIRTAKI_THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) SIRTAKI_THREAD_SAFETY(release_capability(__VA_ARGS__))
// Marks a function whose locking the analysis cannot follow; a comment there says why it is right.
#define NOT_ANALYZED SIRTAKI_THREAD_SAFETY(no_thread_safety_analysis)

namespace sirtaki {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex for the length of a scope.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RELEASE() {}

  // Waits for a notification; the mutex is released meanwhile. Callers check conditions in their own scope, because
  // the analysis cannot see that a lambda runs with the lock held.
  void wait_for(std::condition_variable& changed, Nanoseconds limit) {
    changed.wait_for(lock_, std::chrono::nanoseconds(limit));
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace sirtaki
