// A libcuda.so.1 whose GPUs are threads: memory on a device is the host's, and each stream has a thread that runs its
// tasks in order, late. It is stricter than the real library: what that tolerates or leaves undefined fails here.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "fake_gpu/fake.h"

namespace sirtaki {

struct CudaContextTag {
  int device = 0;
  int retained = 0;
  CudaStream default_stream = nullptr;
};

struct CudaStreamTag {
  CudaContext context;
  std::deque<fake::Task> tasks;  // the first one is running
  bool is_held = false, is_closed = false;
  std::condition_variable changed;  // for its thread alone: there may be hundreds of streams
};

struct CudaEventTag {
  CudaContext context;
  std::shared_ptr<bool> has_fired;  // of the last record; null: never recorded
};

}  // namespace sirtaki

namespace {

// Opens each function: counts the call, and returns the failure that a test asked for.
#define FAKE_GPU_ENTER() \
  if (const int failure = fake::enter(__func__)) return failure
#define FAKE_GPU_REQUIRE(condition, what, result) \
  if (!(condition)) return misuse(__func__, what, result)

using namespace sirtaki;
using fake::misuse;
using fake::Range;

constexpr CudaResult invalid_value = 1, no_device = 100, invalid_device = 101, invalid_context = 201,
                     invalid_handle = 400;

const std::map<CudaResult, const char*> texts = {
    {cuda_success, "no error"},
    {invalid_value, "invalid argument"},
    {cuda_out_of_memory, "out of memory"},
    {no_device, "no CUDA-capable device is detected"},
    {invalid_device, "invalid device ordinal"},
    {invalid_context, "invalid device context"},
    {invalid_handle, "invalid resource handle"},
    {cuda_not_ready, "device not ready"},
    {700, "an illegal memory access was encountered"},
    {719, "unspecified launch failure"},
    {999, "unknown error"},
};

struct Block {
  size_t bytes;
  int device;     // -1: pinned memory of the host
  bool is_owned;  // not lent by a test
};

struct Gpus {
  Gpus() {
    for (int device = 0; device < fake::most_devices; ++device) contexts[device].device = device;
  }

  std::mutex mutex;
  std::condition_variable task_done;
  CudaContextTag contexts[fake::most_devices];
  std::set<CudaStream> streams;
  std::set<CudaEvent> events;
  std::map<uintptr_t, Block> blocks;
  int alive = 0;
};

// Returns the GPUs. They are never destroyed: threads of streams live on while the process ends.
Gpus& gpus() {
  static Gpus* all = new Gpus;
  return *all;
}

thread_local std::vector<CudaContext> current;

CudaContext current_context() { return current.empty() ? nullptr : current.back(); }

const Block* block_of(Range range) {
  const auto address = reinterpret_cast<uintptr_t>(range.address);
  auto found = gpus().blocks.upper_bound(address);
  if (found == gpus().blocks.begin()) return nullptr;
  --found;
  return address + range.bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

bool is_in_use(uintptr_t begin, uintptr_t end) {
  for (CudaStream stream : gpus().streams)
    for (const fake::Task& task : stream->tasks)
      for (const Range& range : task.ranges) {
        const auto first = reinterpret_cast<uintptr_t>(range.address);
        if (first < end && begin < first + range.bytes) return true;
      }
  return false;
}

// Runs the thread of a stream.
void serve(CudaStream stream) {
  Gpus& all = gpus();
  std::unique_lock lock(all.mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return stream->tasks.empty() ? stream->is_closed : !stream->is_held; });
    if (stream->tasks.empty()) break;
    const fake::Task& task = stream->tasks.front();
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(fake::random_up_to(fake::setting("delay"))));
    task.work();
    lock.lock();
    stream->tasks.pop_front();
    all.task_done.notify_all();
  }
  all.streams.erase(stream);
  delete stream;
}

// Creates a stream. The lock is held here and in the functions that follow.
CudaStream make_stream(CudaContext context) {
  const CudaStream stream = new CudaStreamTag{context, {}};
  gpus().streams.insert(stream);
  std::thread(serve, stream).detach();
  return stream;
}

// Returns the stream, or nullptr if there is no such stream; `stream` nullptr means the context's default stream.
CudaStream find_stream(CudaStream stream, CudaContext context) {
  if (!stream && context) {
    if (!context->default_stream) context->default_stream = make_stream(context);
    return context->default_stream;
  }
  const bool is_there = gpus().streams.count(stream) && !stream->is_closed;
  return is_there && stream->context == context ? stream : nullptr;
}

bool is_event(CudaEvent event, CudaContext context) { return gpus().events.count(event) && event->context == context; }

void append(CudaStream stream, fake::Task task) {
  stream->tasks.push_back(std::move(task));
  stream->changed.notify_one();
}

CudaResult free_block(const char* function, void* address, bool is_host) {
  const std::lock_guard lock(gpus().mutex);
  const auto found = gpus().blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == gpus().blocks.end() || !found->second.is_owned || (found->second.device < 0) != is_host)
    return misuse(function, "this memory was not allocated so", invalid_value);
  if (is_in_use(found->first, found->first + found->second.bytes))
    return misuse(function, "a stream still uses this memory", invalid_value);
  std::free(address);
  gpus().blocks.erase(found);
  --gpus().alive;
  return cuda_success;
}

// Allocates memory that holds garbage, so that no caller can rely on zeros.
void* allocate(size_t bytes, int device) {
  void* address = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(address, 0xa5, bytes);
  gpus().blocks[reinterpret_cast<uintptr_t>(address)] = {bytes, device, true};
  ++gpus().alive;
  return address;
}

// Enqueues a task that works on memory, after checking that CUDA may use this memory.
CudaResult enqueue(const char* function, CudaStream stream, fake::Task task) {
  const std::lock_guard lock(gpus().mutex);
  const CudaContext context = current_context();
  const CudaStream found = find_stream(stream, context);
  if (!found) return misuse(function, "this is no stream of the current context", invalid_handle);
  for (const Range& range : task.ranges) {
    const Block* block = block_of(range);
    if (range.bytes == 0) continue;
    if (!block || (block->device >= 0 && block->device != context->device))
      return misuse(function, "this memory is neither this GPU's nor pinned", invalid_value);
  }
  append(found, std::move(task));
  return cuda_success;
}

}  // namespace

namespace fake {

int current_device() { return current_context() ? current_context()->device : -1; }

bool is_on_device(Range range, int device) {
  const std::lock_guard lock(gpus().mutex);
  const Block* block = block_of(range);
  return range.bytes == 0 || (block && block->device == device);
}

bool is_stream_of(CudaStream stream, int device) {
  const std::lock_guard lock(gpus().mutex);
  return find_stream(stream, &gpus().contexts[device]) != nullptr;
}

void submit(CudaStream stream, int device, Task task) {
  const std::lock_guard lock(gpus().mutex);
  append(find_stream(stream, &gpus().contexts[device]), std::move(task));
}

void count_alive(int change) {
  const std::lock_guard lock(gpus().mutex);
  gpus().alive += change;
}

}  // namespace fake

namespace sirtaki {

int cuInit(unsigned) {
  FAKE_GPU_ENTER();
  const int result = fake::setting("init_result");
  return result == cuda_success && fake::setting("devices") == 0 ? no_device : result;
}

int cuDriverGetVersion(int* version) {
  FAKE_GPU_ENTER();
  *version = fake::setting("cuda_version");
  return cuda_success;
}

int cuGetErrorString(CudaResult result, const char** text) {
  const auto found = texts.find(result);
  *text = found == texts.end() ? nullptr : found->second;
  return *text ? cuda_success : invalid_value;
}

int cuDeviceGetCount(int* count) {
  FAKE_GPU_ENTER();
  *count = fake::setting("devices");
  return cuda_success;
}

int cuDeviceGet(CudaDevice* device, int ordinal) {
  FAKE_GPU_ENTER();
  *device = ordinal;
  return ordinal >= 0 && ordinal < fake::setting("devices") ? cuda_success : invalid_device;
}

int cuDeviceGetPCIBusId(char* text, int capacity, CudaDevice device) {
  FAKE_GPU_ENTER();
  const int length = std::snprintf(text, static_cast<size_t>(capacity), "0000:%02X:00.0", device + 1);
  return length < capacity ? cuda_success : invalid_value;
}

int cuDevicePrimaryCtxRetain(CudaContext* out, CudaDevice device) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(device >= 0 && device < fake::most_devices, "there is no such GPU", invalid_device);
  *out = &gpus().contexts[device];
  ++(*out)->retained;
  return cuda_success;
}

int cuDevicePrimaryCtxRelease_v2(CudaDevice device) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(gpus().contexts[device].retained > 0, "released more often than retained", invalid_context);
  --gpus().contexts[device].retained;
  return cuda_success;
}

int cuCtxPushCurrent_v2(CudaContext context) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(context && context->retained > 0, "this context is not retained", invalid_context);
  current.push_back(context);
  return cuda_success;
}

int cuCtxPopCurrent_v2(CudaContext* out) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(!current.empty(), "there is no current context", invalid_context);
  if (out) *out = current.back();
  current.pop_back();
  return cuda_success;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  *least = 0;
  *greatest = -5;
  return cuda_success;
}

int cuStreamCreateWithPriority(CudaStream* out, unsigned, int) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  const std::lock_guard lock(gpus().mutex);
  *out = make_stream(current_context());
  ++gpus().alive;
  return cuda_success;
}

int cuStreamDestroy_v2(CudaStream stream) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(stream && find_stream(stream, current_context()), "this is no stream of the current context",
                   invalid_handle);
  stream->is_closed = true;  // its queued tasks run first
  stream->is_held = false;
  stream->changed.notify_one();
  --gpus().alive;
  return cuda_success;
}

int cuStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  const CudaStream found = find_stream(stream, current_context());
  FAKE_GPU_REQUIRE(found && is_event(event, current_context()), "no stream or event of the current context",
                   invalid_handle);
  if (event->has_fired)
    append(found, {{}, [fired = event->has_fired] {
      std::unique_lock waiting(gpus().mutex);
      gpus().task_done.wait(waiting, [&] { return *fired; });
    }});
  return cuda_success;
}

int cuEventCreate(CudaEvent* out, unsigned) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  const std::lock_guard lock(gpus().mutex);
  *out = new CudaEventTag{current_context(), nullptr};
  gpus().events.insert(*out);
  ++gpus().alive;
  return cuda_success;
}

int cuEventDestroy_v2(CudaEvent event) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(is_event(event, current_context()), "this is no event of the current context", invalid_handle);
  gpus().events.erase(event);
  delete event;
  --gpus().alive;
  return cuda_success;
}

int cuEventRecord(CudaEvent event, CudaStream stream) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  const CudaStream found = find_stream(stream, current_context());
  FAKE_GPU_REQUIRE(found && is_event(event, current_context()), "no stream or event of the current context",
                   invalid_handle);
  event->has_fired = std::make_shared<bool>(false);
  append(found, {{}, [fired = event->has_fired] {
    const std::lock_guard firing(gpus().mutex);
    *fired = true;
  }});
  return cuda_success;
}

int cuEventQuery(CudaEvent event) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(is_event(event, current_context()), "this is no event of the current context", invalid_handle);
  return !event->has_fired || *event->has_fired ? cuda_success : cuda_not_ready;
}

int cuMemAlloc_v2(CudaMemory* out, size_t bytes) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  FAKE_GPU_REQUIRE(bytes > 0, "no bytes", invalid_value);
  const std::lock_guard lock(gpus().mutex);
  *out = reinterpret_cast<uintptr_t>(allocate(bytes, current_context()->device));
  return cuda_success;
}

int cuMemFree_v2(CudaMemory memory) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  return free_block(__func__, reinterpret_cast<void*>(memory), false);
}

int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  FAKE_GPU_REQUIRE(bytes > 0, "no bytes", invalid_value);
  const std::lock_guard lock(gpus().mutex);
  *out = allocate(bytes, -1);
  return cuda_success;
}

int cuMemFreeHost(void* address) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  return free_block(__func__, address, true);
}

int cuMemcpyAsync(CudaMemory to, CudaMemory from, size_t bytes, CudaStream stream) {
  FAKE_GPU_ENTER();
  void* target = reinterpret_cast<void*>(to);
  const void* source = reinterpret_cast<const void*>(from);
  return enqueue(__func__, stream, {{{target, bytes}, {source, bytes}}, [=] { std::memmove(target, source, bytes); }});
}

int cuMemsetD8Async(CudaMemory memory, unsigned char value, size_t count, CudaStream stream) {
  FAKE_GPU_ENTER();
  void* target = reinterpret_cast<void*>(memory);
  return enqueue(__func__, stream, {{{target, count}}, [=] { std::memset(target, value, count); }});
}

}  // namespace sirtaki

extern "C" {

void fake_gpu_hold(CudaStream stream, int held) {
  const std::lock_guard lock(gpus().mutex);
  const CudaStream found = find_stream(stream, stream ? stream->context : current_context());
  if (!found) return;
  found->is_held = held;
  found->changed.notify_one();
}

void fake_gpu_lend(void* address, size_t bytes, int device) {
  const std::lock_guard lock(gpus().mutex);
  gpus().blocks[reinterpret_cast<uintptr_t>(address)] = {bytes, device, false};
}

void fake_gpu_take_back(void* address) {
  const std::lock_guard lock(gpus().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto found = gpus().blocks.find(begin);
  if (found == gpus().blocks.end()) return;
  if (is_in_use(begin, begin + found->second.bytes)) misuse(__func__, "a stream still uses this memory", 0);
  gpus().blocks.erase(found);
}

int fake_gpu_alive() {
  const std::lock_guard lock(gpus().mutex);
  return gpus().alive;
}

}  // extern "C"
