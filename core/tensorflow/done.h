// A completion callback of TensorFlow's, kept beyond the call that brought it.
#pragma once

#include <functional>
#include <utility>

#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

// TensorFlow's C API hands over the address of a parameter on its own stack, a std::function<void()>, which is gone
// when the kernel returns; so it has to be moved away before. find_c_api() has checked that this is its type.
class Done {
 public:
  explicit Done(TF_AsyncOpKernelDoneCallback* done)
      : call_(std::move(*reinterpret_cast<std::function<void()>*>(done))) {}
  void operator()() const { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace sirtaki::tensorflow
