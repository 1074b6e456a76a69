// Facts of the world, as they are when a graph runs: after another init() they may be others.
#pragma once

#include "tensorflow/c_api.h"

namespace sirtaki::tensorflow {

// Output: this process's rank, size, local rank, local size, cross rank and cross size.
void compute_place(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done);
// Input: the number of a process set. Output: its ranks, ascending.
void compute_members(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done);

}  // namespace sirtaki::tensorflow
