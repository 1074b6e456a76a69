// Properties of the world, read each time a graph runs, because they may change with another init().
#pragma once

#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

// Outputs this process's rank, size, local rank, local size, cross rank and cross size.
void compute_place(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done);
// Outputs the ranks of a process set, ascending. Input: its number.
void compute_members(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done);

}  // namespace sirtaki::tensorflow
