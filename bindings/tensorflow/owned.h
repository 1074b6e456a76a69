// Owners of TensorFlow's objects, which they delete at the end of a scope.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "native/call_status.h"
#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { tf().delete_tensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

struct DeleteShape {
  void operator()(TF_ShapeHandle* shape) const { tf().delete_shape(shape); }
};
class Shape : public std::unique_ptr<TF_ShapeHandle, DeleteShape> {
 public:
  explicit Shape(TF_ShapeHandle* shape = tf().new_shape()) : unique_ptr(shape) {}
};

// Returns the code with which an operation fails: Horovod's in a process with its rules (adapters/common/semantics.py).
inline bindings::AbslCode code_of_failure(srt_status status) {
  using bindings::AbslCode;
  const AbslCode code = bindings::absl_code(status);
  const char* as_horovod = std::getenv("SIRTAKI_AS_HOROVOD");
  if (!as_horovod || std::string_view(as_horovod) != "1") return code;
  if (status == SRT_MISMATCH) return AbslCode::failed_precondition;
  return code == AbslCode::aborted || code == AbslCode::deadline_exceeded ? AbslCode::unknown : code;
}

inline bool is_ok(const TF_Status* status) { return tf().code_of(status) == static_cast<int>(bindings::AbslCode::ok); }

// The status of one or more calls; keeps the first failure.
class KeptStatus {
 public:
  KeptStatus() : status_(tf().new_status()) {}
  ~KeptStatus() { tf().delete_status(status_); }
  KeptStatus(const KeptStatus&) = delete;
  KeptStatus& operator=(const KeptStatus&) = delete;

  bool is_ok() const { return tensorflow::is_ok(status_); }
  void fail(const bindings::CallStatus& failure) {
    if (is_ok()) tf().set_status(status_, static_cast<int>(code_of_failure(failure.code)), failure.text.c_str());
  }
  TF_Status* get() const { return status_; }

 private:
  TF_Status* status_;
};

}  // namespace sirtaki::tensorflow
