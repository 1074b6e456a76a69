// What one operation of a graph asks for: its attributes, read once.
#pragma once

#include <string>
#include <vector>

#include "sirtaki.h"
#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

struct Kernel {
  // nullptr, and the construction has failed, if the attributes make no sense.
  static Kernel* create(int32_t kind, TF_OpKernelConstruction* construction);

  bool reduces() const { return kind == SRT_ALLREDUCE || kind == SRT_REDUCESCATTER; }
  // Whether an output has the input's shape, and may take its memory.
  bool keeps_shape() const { return kind == SRT_ALLREDUCE || kind == SRT_BROADCAST; }

  int32_t kind = SRT_ALLREDUCE;
  int32_t process_set = 0;
  int32_t reduce_op = 0;
  int32_t root = 0;
  double prescale = 1.0, postscale = 1.0;
  std::vector<int32_t> dtypes;  // the core's, of each tensor
  std::vector<DataType> types;  // TensorFlow's
};

}  // namespace sirtaki::tensorflow
