// A completion callback of TensorFlow that outlives the call which passed it.
#pragma once

#include <functional>
#include <utility>

#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

// An owned callback. TensorFlow's C API passes the address of a parameter on its own stack, a std::function<void()>,
// which is destroyed when the kernel returns, so the function is moved out before. CApi has checked its type.
class Done {
 public:
  explicit Done(TF_AsyncOpKernelDoneCallback* done)
      : call_(std::move(*reinterpret_cast<std::function<void()>*>(done))) {}
  void operator()() const { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace sirtaki::tensorflow
