// The controls by which tests drive the fakes. The fake libcuda.so.1 exports the functions, which are found by name:
// from C++ with FakeGpu, from Python with ctypes.
//
// Settings (`set`; SIRTAKI_FAKE_<NAME> in the environment for the whole process):
//   devices (2)           number of GPUs; 0: cuInit fails
//   parts (1)             so many devices in a row are parts of one GPU (MIG): they have one bus id
//   cuda_version (12080)  the driver's version; 12080 is 12.8
//   nccl_version (22803)  NCCL's version; 22803 is 2.28.3
//   init_result (0)       result of cuInit
//   delay (50)            microseconds; each task of a stream starts late, by a random time of at most this
//   seed (1)              seed of these random times, and of `polls`
//   polls (3)             ncclCommGetAsyncError returns "in progress" at most this many times, at random
//   hang (0)              1: NCCL kernels that start from now on do not end until their communicator is aborted
//   init_hang (0)         1: communicators that are not ready yet do not become so
//   capturing (0)         1: the program captures a stream in mode global, which forbids queries, allocations and frees
//                         to each thread whose own mode is not relaxed: a misuse
//   memory (0)            bytes that can be allocated on each GPU; 0: any number
//   implicit_waits (0)    1: frees of memory, and allocations of pinned memory, wait for all tasks on the GPU
//   free_limit (20000)    milliseconds; such a wait may take so long, and so may an abort's, which waits, as cudaFree
//   does, for
//                         all kernels of the process on its GPU. Longer is a misuse, because on a real GPU it would
//                         wait for ever
// In a process that was forked after cuInit, every CUDA function fails.
// SIRTAKI_FAKE_FAIL=function:nth:result in the environment calls `fail` at the start.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "gpu/libraries/cuda.h"

// X(member, symbol, result, parameters)
#define FAKE_GPU_CONTROLS(X)                                                                                   \
  X(set, fake_gpu_set, void, (const char* setting, int value))                                                 \
  /* Makes the nth call from now on (1: the next one) of a CUDA or NCCL function return this. With 700 to 719  \
     every later CUDA call does, too. For ncclCommGetAsyncError it is the state that the call reports. */      \
  X(fail, fake_gpu_fail, void, (const char* function, int nth, int result))                                    \
  /* Returns the number of calls of a function; of "ncclKernel": of NCCL kernels that have begun. */           \
  X(calls, fake_gpu_calls, int, (const char* function))                                                        \
  /* Returns the bytes that the driver was asked to copy, singly and in batches. */                            \
  X(copied, fake_gpu_copied, long long, ())                                                                    \
  /* Holds or releases a stream: a held one starts nothing (nullptr: the current context's default stream). */ \
  X(hold, fake_gpu_hold, void, (sirtaki::CudaStream, int held))                                                \
  /* Waits until a stream's tasks (nullptr: all) have ended, which orders none for the GPU or its program.     \
     Returns whether that came in time. */                                                                     \
  X(await_tasks, fake_gpu_await_tasks, int, (sirtaki::CudaStream, int seconds))                                \
  /* Holds or releases calls of a CUDA or NCCL function: they wait, and are a misuse after free_limit. */      \
  X(hold_calls, fake_gpu_hold_calls, void, (const char* function, int held))                                   \
  /* Declares that memory of the test is on a GPU, and that it no longer is. */                                \
  X(lend, fake_gpu_lend, void, (void* address, size_t bytes, int device))                                      \
  X(take_back, fake_gpu_take_back, void, (void* address))                                                      \
  /* Adds a read of this memory to a stream, for a read that the host makes in its place. */                   \
  X(read, fake_gpu_read, void, (sirtaki::CudaStream, const void* address, size_t bytes))                       \
  /* Adds a write to a stream of the current context. */                                                       \
  X(fill, fake_gpu_fill, int, (sirtaki::CudaStream, sirtaki::CudaMemory, int value, size_t bytes))             \
  /* Returns the first misuse: a use that CUDA or NCCL forbid; "": none. Two tasks of which one writes memory  \
     that the other uses, without an order between them, are one, whenever they really run. */                 \
  X(misuse, fake_gpu_misuse, const char*, ())                                                                  \
  /* Returns the GPUs of the contexts that the calling thread has pushed, as "0 1"; the last is current. */    \
  X(pushed, fake_gpu_pushed, const char*, ())                                                                  \
  /* Returns the number of streams, events, pieces of memory and communicators created and not destroyed, and  \
     of retained contexts. */                                                                                  \
  X(alive, fake_gpu_alive, int, ())                                                                            \
  /* Clears failures, calls and misuse, and resets all settings. */                                            \
  X(reset, fake_gpu_reset, void, ())

struct FakeGpu {
  // Opens the library in the folder, if it is not open yet.
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
