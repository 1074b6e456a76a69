// The attributes of one operation of a graph, read once.
#pragma once

#include <string>
#include <vector>

#include "sirtaki.h"
#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

struct Kernel {
  // Creates a kernel; returns nullptr, and fails the construction, if the attributes are invalid.
  static Kernel* create(int32_t kind, bool on_gpu, TF_OpKernelConstruction* construction);

  bool reduces() const { return kind == SRT_ALLREDUCE || kind == SRT_REDUCESCATTER; }
  // Returns whether an output has the input's shape, and may use its memory.
  bool keeps_shape() const { return kind == SRT_ALLREDUCE || kind == SRT_BROADCAST; }

  int32_t kind = SRT_ALLREDUCE;
  bool on_gpu = false;  // where its tensors are, but for the label
  int32_t process_set = 0;
  int32_t reduce_op = 0;
  int32_t root = 0;
  double prescale = 1.0, postscale = 1.0;
  std::vector<int32_t> dtypes;  // the core's dtype of each tensor
  std::vector<DataType> types;  // TensorFlow's type of each tensor
};

}  // namespace sirtaki::tensorflow
