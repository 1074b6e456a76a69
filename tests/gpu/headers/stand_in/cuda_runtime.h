// nccl.h wants the runtime's headers, and of them uses two handles only.
#pragma once
#include <cuda.h>

#define __CUDA_BF16_TYPES_EXIST__  // NCCL 2.19 has them only then

typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
