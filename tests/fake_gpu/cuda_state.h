// The state of the fake libcuda.so.1: GPUs whose memory is the host's, and streams with a thread each, which runs their
// tasks in order, late. It is stricter than the real library: what that tolerates or leaves undefined fails here.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fake_gpu/fake.h"
#include "fake_gpu/pinned.h"

// Opens each function: counts the call, and returns the failure that a test asked for.
#define FAKE_GPU_ENTER() \
  if (const int failure = fake::enter(__func__)) return failure
#define FAKE_GPU_UNSAFE_IN_CAPTURE()                                                      \
  FAKE_GPU_REQUIRE(!fake::setting("capturing") || capture_mode() == cuda_capture_relaxed, \
                   "this thread does not allow it during the capture of a graph", fake::unsupported_in_capture)
#define FAKE_GPU_REQUIRE(condition, what, result) \
  if (!(condition)) return fake::misuse(__func__, what, result)

namespace sirtaki {

struct CudaContextTag {
  int device = 0;
  int retained = 0;
  CudaStream default_stream = nullptr;
  fake::Clock host;  // of the tasks whose end the host has seen
};

struct CudaStreamTag {
  CudaContext context;
  int number;
  std::deque<fake::Task> tasks = {};  // the first one is running
  fake::Clock clock = {};  // of all its tasks
  bool is_held = false, is_closed = false;
  std::condition_variable changed = {};  // for its thread alone: there may be hundreds of streams
};

struct CudaEventTag {
  CudaContext context;
  std::shared_ptr<bool> has_fired;  // of the last record; null: never recorded
  fake::Clock clock = {};  // of the last record
};

}  // namespace sirtaki

namespace fake {

using sirtaki::CudaContext;
using sirtaki::CudaEvent;
using sirtaki::CudaResult;
using sirtaki::CudaStream;

constexpr CudaResult invalid_value = 1, no_device = 100, invalid_device = 101, invalid_context = 201,
                     invalid_handle = 400, unsupported_in_capture = 900;

struct Block {
  size_t bytes;
  int device;  // -1: pinned memory of the host
  bool is_owned;  // not lent by a test
  CudaContext context = nullptr;  // of the GPU for which it was allocated
  uintptr_t address = 0;
  Accesses accesses = {};
};

struct Gpus {
  Gpus() {
    for (int device = 0; device < most_devices; ++device) contexts[device].device = device;
  }

  std::mutex mutex;
  std::condition_variable task_done;
  sirtaki::CudaContextTag contexts[most_devices];
  std::set<CudaStream> streams;
  std::set<CudaEvent> events;
  std::map<uintptr_t, Block> blocks;
  int alive = 0, streams_made = 0;
};

// Returns the GPUs. They are never destroyed: threads of streams live on while the process ends.
Gpus& gpus();

CudaContext current_context();
std::vector<CudaContext>& contexts_of_thread();  // the last one is current
int& capture_mode();  // of this thread; 0: global

// The lock of the GPUs is held in the functions that follow, but for free_block() and enqueue(), which take it.
Block* block_of(Range range);  // nullptr: the fake does not know this memory
CudaStream make_stream(CudaContext context);

// Returns the stream, or nullptr if there is no such stream; `stream` nullptr means the context's default stream.
CudaStream find_stream(CudaStream stream, CudaContext context);
bool is_event(CudaEvent event, CudaContext context);
void append(CudaStream stream, Task task);
void host_has_seen(CudaContext context, const Clock& clock);

// Allocates memory that holds garbage, so that no caller can rely on zeros.
void* allocate(size_t bytes, int device);
size_t allocated_on(int device);  // bytes
CudaResult free_block(const char* function, void* address, bool is_host);

// Enqueues a task that works on memory, after checking that CUDA may use this memory.
CudaResult enqueue(CudaStream stream, Task task);

}  // namespace fake
