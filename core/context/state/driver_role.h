// The role of driving the engine's loop. One thread at a time holds it: the engine's own, or a caller that waits.
//
// `driving` represents the role in the compiler's analysis. Each context has its own role; a function deals with one.
#pragma once

#include "base/thread_safety.h"

namespace sirtaki {

struct CAPABILITY("role") Driving {};
inline constexpr Driving driving;

class DriverRole {
 public:
  // Takes the role, unless another thread holds it or it is closed.
  bool try_take() TRY_ACQUIRE(true, driving) NOT_ANALYZED {
    if (!mutex_.try_lock()) return false;
    if (!is_closed_) return true;
    mutex_.unlock();
    return false;
  }
  void give_up() RELEASE(driving) NOT_ANALYZED { mutex_.unlock(); }
  void close() REQUIRES(driving) { is_closed_ = true; }  // try_take() fails from now on

  // Blocks until the role is free, and holds it until the end of a scope.
  class SCOPED_CAPABILITY Scope {
   public:
    explicit Scope(DriverRole& role) ACQUIRE(driving) : lock_(role.mutex_) {}
    ~Scope() RELEASE() {}

   private:
    MutexLock lock_;
  };

 private:
  Mutex mutex_;
  bool is_closed_ GUARDED_BY(driving) = false;
};

}  // namespace sirtaki
