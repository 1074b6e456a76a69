// A value with a lock, accessible only through an Access, which holds the lock: code that forgets the lock does not
// compile. A function that needs the lock takes a reference to the value.
#pragma once

#include <utility>

#include "base/thread_safety.h"

namespace sirtaki {

template <typename Value>
class Access;

template <typename Value>
class CAPABILITY("mutex") Guarded {
 public:
  template <typename... Arguments>
  explicit Guarded(Arguments&&... arguments) : value_(std::forward<Arguments>(arguments)...) {}

  // Returns the value without the lock, for a forked child: this is its only thread, and the lock may be held for
  // ever by a thread that does not exist there.
  Value& in_forked_child() { return value_; }

 private:
  friend class Access<Value>;
  Mutex mutex_;
  Value value_;
};

template <typename Value>
class SCOPED_CAPABILITY Access {
 public:
  explicit Access(Guarded<Value>& guarded) ACQUIRE(guarded) : value_(guarded.value_), lock_(guarded.mutex_) {}
  ~Access() RELEASE() {}
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

  Value& operator*() const { return value_; }
  Value* operator->() const { return &value_; }

  void wait_for(std::condition_variable& changed, Nanoseconds limit) { lock_.wait_for(changed, limit); }

 private:
  Value& value_;
  MutexLock lock_;
};

}  // namespace sirtaki
