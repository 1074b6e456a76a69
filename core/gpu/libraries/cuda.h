// The part of the CUDA driver's API that is used, declared here so that nothing of CUDA is needed to build. Names and
// meanings are those of NVIDIA's "CUDA Driver API" reference; tests/gpu/headers compares them with the real header.
//
// The driver's API and the runtime's, which frameworks use, share streams, events and a GPU's primary context.
#pragma once

#include <cstddef>

#include "gpu/libraries/call_watch.h"

namespace sirtaki {

using CudaResult = int;
using CudaDevice = int;
using CudaMemory = unsigned long long;  // an address on the device
using CudaContext = struct CudaContextTag*;
using CudaStream = struct CudaStreamTag*;
using CudaEvent = struct CudaEventTag*;
using CudaModule = struct CudaModuleTag*;
using CudaKernel = struct CudaKernelTag*;

struct CudaUuid {
  char bytes[16];
};

constexpr CudaResult cuda_success = 0, cuda_out_of_memory = 2, cuda_not_ready = 600;
constexpr unsigned cuda_stream_non_blocking = 1;   // does not wait for the default stream
constexpr unsigned cuda_event_disable_timing = 2;
constexpr unsigned cuda_memory_host_portable = 1;  // pinned for all contexts
constexpr int cuda_device_of_pointer = 9;        // an attribute: the ordinal of the memory's GPU, as an int
constexpr int cuda_capture_relaxed = 2;  // the thread's calls are allowed while a stream is captured into a graph
constexpr int cuda_source_in_stream_order = 1;  // a copy reads its source when the stream has reached it

// Attributes of the copies in a batch. The places are hints for managed memory.
struct CudaPlace {
  int type = 0, id = 0;
};
struct CudaCopyAttributes {
  int source_order = cuda_source_in_stream_order;
  CudaPlace from, to;
  unsigned flags = 0;
};

// X(member, symbol, parameters): each returns a CudaResult. The symbols are those of the newest ABI.
#define SIRTAKI_CUDA_FUNCTIONS(X)                                                           \
  X(init, cuInit, (unsigned flags))                                                         \
  X(driver_version, cuDriverGetVersion, (int* version))                                     \
  X(error_string, cuGetErrorString, (CudaResult, const char** text))                        \
  X(device_count, cuDeviceGetCount, (int* count))                                           \
  X(device, cuDeviceGet, (CudaDevice*, int ordinal))                                        \
  X(device_bus_id, cuDeviceGetPCIBusId, (char* text, int capacity, CudaDevice))             \
  X(device_uuid, cuDeviceGetUuid_v2, (CudaUuid*, CudaDevice))                               \
  X(context_retain, cuDevicePrimaryCtxRetain, (CudaContext*, CudaDevice))                   \
  X(context_release, cuDevicePrimaryCtxRelease_v2, (CudaDevice))                            \
  X(context_push, cuCtxPushCurrent_v2, (CudaContext))                                       \
  X(context_pop, cuCtxPopCurrent_v2, (CudaContext*))                                        \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                  \
  X(priority_range, cuCtxGetStreamPriorityRange, (int* least, int* greatest))               \
  X(stream_create, cuStreamCreateWithPriority, (CudaStream*, unsigned flags, int priority)) \
  X(stream_destroy, cuStreamDestroy_v2, (CudaStream))                                       \
  X(stream_wait_event, cuStreamWaitEvent, (CudaStream, CudaEvent, unsigned flags))          \
  X(event_create, cuEventCreate, (CudaEvent*, unsigned flags))                              \
  X(event_destroy, cuEventDestroy_v2, (CudaEvent))                                          \
  X(event_record, cuEventRecord, (CudaEvent, CudaStream))                                   \
  X(event_query, cuEventQuery, (CudaEvent))                                                 \
  X(pointer_attribute, cuPointerGetAttribute, (void* value, int attribute, CudaMemory))     \
  X(memory_allocate, cuMemAlloc_v2, (CudaMemory*, size_t bytes))                            \
  X(memory_free, cuMemFree_v2, (CudaMemory))                                                \
  X(host_allocate, cuMemHostAlloc, (void** address, size_t bytes, unsigned flags))          \
  X(host_free, cuMemFreeHost, (void* address))                                              \
  X(copy, cuMemcpyAsync, (CudaMemory to, CudaMemory from, size_t bytes, CudaStream))

// The functions that a driver may lack; the member is false then. A batch of copies, which run in any order, came
// with CUDA 12.8. CUDA 13 added a form without `failed` under another name, and drivers kept this form. Events of all
// streams of a context came with 12.5. What follows loads and launches kernels: `text` ends with a zero.
#define SIRTAKI_CUDA_LATER_FUNCTIONS(X)                                                                           \
  X(copy_batch, cuMemcpyBatchAsync,                                                                               \
    (CudaMemory * to, CudaMemory * from, size_t* bytes, size_t copies, CudaCopyAttributes*, size_t* first,        \
     size_t attributes, size_t* failed, CudaStream))                                                              \
  X(context_record_event, cuCtxRecordEvent, (CudaContext, CudaEvent))                                             \
  X(module_load, cuModuleLoadData, (CudaModule*, const void* text))                                               \
  X(module_unload, cuModuleUnload, (CudaModule))                                                                  \
  X(module_kernel, cuModuleGetFunction, (CudaKernel*, CudaModule, const char* name))                              \
  X(kernel_launch, cuLaunchKernel,                                                                                \
    (CudaKernel, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x, unsigned threads_y, \
     unsigned threads_z, unsigned shared_bytes, CudaStream, void** arguments, void** options))

struct CudaFunctions {
#define SIRTAKI_MEMBER(member, symbol, parameters) LibraryFunction<CudaResult parameters> member;
  SIRTAKI_CUDA_FUNCTIONS(SIRTAKI_MEMBER)
  SIRTAKI_CUDA_LATER_FUNCTIONS(SIRTAKI_MEMBER)
#undef SIRTAKI_MEMBER
};

}  // namespace sirtaki
