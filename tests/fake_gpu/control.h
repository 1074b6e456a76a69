// What tests make the fakes do. The functions are exported by the fake libcuda.so.1, and found by name: from C++ with
// FakeGpu, from Python with ctypes.
//
// Settings (`set`; SIRTAKI_FAKE_<NAME> in the environment for the whole process):
//   devices (2)           how many GPUs there are; 0: cuInit fails
//   cuda_version (12080)  what the driver says; 12080 is 12.8
//   nccl_version (22803)  what NCCL says; 22803 is 2.28.3
//   init_result (0)       what cuInit returns
//   delay (50)            microseconds; each task of a stream starts late, by a random time of up to so much
//   seed (1)              of those times, and of `polls`
//   polls (3)             ncclCommGetAsyncError says "in progress" up to so many times, at random
//   hang (0)              1: NCCL's kernels that start now never end, until their communicator is aborted
// SIRTAKI_FAKE_FAIL=function:nth:result is `fail` from the start.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "gpu/cuda.h"

// X(member, symbol, result, parameters)
#define FAKE_GPU_CONTROLS(X)                                                                                    \
  X(set, fake_gpu_set, void, (const char* setting, int value))                                                  \
  /* The nth call from now on (1: the next one) of a function of CUDA's or NCCL's returns this. With 700 to 719 \
     every later call of CUDA's does, too. For ncclCommGetAsyncError it is the state that it tells. */          \
  X(fail, fake_gpu_fail, void, (const char* function, int nth, int result))                                     \
  X(calls, fake_gpu_calls, int, (const char* function))                                                         \
  /* A held stream starts nothing (nullptr: the default stream of the current context). */                      \
  X(hold, fake_gpu_hold, void, (sirtaki::CudaStream, int held))                                                 \
  /* Says that memory of the test's is on a GPU, and that it is no more. */                                     \
  X(lend, fake_gpu_lend, void, (void* address, size_t bytes, int device))                                       \
  X(take_back, fake_gpu_take_back, void, (void* address))                                                       \
  /* What was first done that CUDA or NCCL forbid; "": nothing. */                                              \
  X(misuse, fake_gpu_misuse, const char*, ())                                                                   \
  /* Streams, events, pieces of memory and communicators that have been made and not given back. */             \
  X(alive, fake_gpu_alive, int, ())                                                                             \
  /* Forgets failures, calls and misuse, and sets all settings back. */                                         \
  X(reset, fake_gpu_reset, void, ())

struct FakeGpu {
  // The library in the folder is opened, if it is not yet.
  explicit FakeGpu(const std::string& folder) {
    void* library = ::dlopen((folder + "/libcuda.so.1").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(::dlerror());
#define FAKE_GPU_FIND(member, symbol, result, parameters) \
  member = reinterpret_cast<result(*) parameters>(::dlsym(library, #symbol));
    FAKE_GPU_CONTROLS(FAKE_GPU_FIND)
#undef FAKE_GPU_FIND
  }

#define FAKE_GPU_MEMBER(member, symbol, result, parameters) result(*member) parameters;
  FAKE_GPU_CONTROLS(FAKE_GPU_MEMBER)
#undef FAKE_GPU_MEMBER
};
