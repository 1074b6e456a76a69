// The common part of the two fakes. libnccl.so.2 uses that of libcuda.so.1, as the real library does.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fake_gpu/control.h"
#include "fake_gpu/order.h"
#include "gpu/libraries/cuda.h"
#include "gpu/libraries/nccl.h"

#define FAKE_GPU_EXPORTED __attribute__((visibility("default")))

// The functions are declared from the core's tables: a definition with other parameters does not compile.
#define FAKE_GPU_DECLARE(member, symbol, parameters) extern "C" FAKE_GPU_EXPORTED int symbol parameters;
namespace sirtaki {
SIRTAKI_CUDA_FUNCTIONS(FAKE_GPU_DECLARE)
SIRTAKI_CUDA_LATER_FUNCTIONS(FAKE_GPU_DECLARE)
SIRTAKI_NCCL_FUNCTIONS(FAKE_GPU_DECLARE)
}  // namespace sirtaki
#define FAKE_GPU_DECLARE_CONTROL(member, symbol, result, parameters) \
  extern "C" FAKE_GPU_EXPORTED result symbol parameters;
FAKE_GPU_CONTROLS(FAKE_GPU_DECLARE_CONTROL)

namespace fake {

constexpr int most_devices = 16;

int setting(const std::string& name) FAKE_GPU_EXPORTED;
int random_up_to(int most) FAKE_GPU_EXPORTED;

// Counts a call, at the beginning of each function. A result other than 0 is a failure that a test asked for.
int enter(const char* function) FAKE_GPU_EXPORTED;

void count_copied(size_t bytes) FAKE_GPU_EXPORTED;

// Records a use that the real library forbids, and returns the result that the real one would return.
int misuse(const char* function, const std::string& what, int result) FAKE_GPU_EXPORTED;

// A task of a stream; it may use its memory until it has ended.
struct Task {
  std::string function;  // that has added it
  std::vector<Range> ranges;
  std::function<void()> work;
};

int current_device() FAKE_GPU_EXPORTED;  // -1: there is no current context
bool is_on_device(Range, int device) FAKE_GPU_EXPORTED;
bool is_stream_of(sirtaki::CudaStream, int device) FAKE_GPU_EXPORTED;
void submit(sirtaki::CudaStream, int device, Task) FAKE_GPU_EXPORTED;
void count_alive(int change) FAKE_GPU_EXPORTED;

}  // namespace fake
