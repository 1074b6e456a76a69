// One execution of a kernel: converts TensorFlow's tensors to requests of the core, and their results to outputs.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "sirtaki.h"
#include "tensorflow/done.h"
#include "tensorflow/kernel.h"
#include "tensorflow/owned.h"

namespace sirtaki::tensorflow {

// An asynchronous call, on which no thread blocks. A TensorFlow thread creates it and continues; the call completes
// and deletes itself in the core's thread that ends its last request.
class Call {
 public:
  static void start(const Kernel& kernel, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done);

 private:
  struct Part {  // one request, passed to its hooks
    Call* call;
    int output;
  };
  struct Description {  // data that a request points to until it is queued
    std::string name;
    std::vector<int64_t> shape;
  };

  Call(const Kernel& kernel, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done)
      : kernel_(kernel), where_(where), done_(done) {}

  bool queue();  // false: it has ended already
  bool queue_in(srt_context* context);
  srt_request request_of(size_t index);
  void describe(srt_context* context, size_t index, Description& description, srt_request& request);
  void place_on_gpu(std::vector<srt_request>& requests);
  void add_splits(int place, srt_request& request);
  Tensor input(int index);
  Tensor output(int index, DataType type, const std::vector<int64_t>& shape, size_t bytes);
  uintptr_t own_part(srt_context* context, size_t index, std::vector<int64_t> shape, size_t bytes);
  uintptr_t same_as_input(int index, const std::vector<int64_t>& shape, uintptr_t input);

  static void on_complete(void* part, srt_status status, const char* error);
  static uintptr_t allocate(void* part, const srt_tensor* output);
  void take_results();
  void end();

  const Kernel& kernel_;
  TF_OpKernelContext* where_;
  Done done_;
  KeptStatus status_;
  srt_context* context_ = nullptr;
  std::vector<int64_t> splits_;
  std::vector<Part> parts_;
  std::vector<srt_handle> handles_;
  std::mutex mutex_;  // one request may allocate memory while another ends
  size_t left_ = 0;
};

}  // namespace sirtaki::tensorflow
