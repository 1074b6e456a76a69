// nccl.h wants the runtime's headers, and of them uses two handles only.
#pragma once
#include <cuda.h>

typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
