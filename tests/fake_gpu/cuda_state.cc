#include "fake_gpu/cuda_state.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace fake {

using sirtaki::cuda_success;

Gpus& gpus() {
  static Gpus* all = new Gpus;
  return *all;
}

std::vector<CudaContext>& contexts_of_thread() {
  thread_local std::vector<CudaContext> contexts;
  return contexts;
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

CudaContext current_context() { return contexts_of_thread().empty() ? nullptr : contexts_of_thread().back(); }

Block* block_of(Range range) {
  const auto address = reinterpret_cast<uintptr_t>(range.address);
  auto found = gpus().blocks.upper_bound(address);
  if (found == gpus().blocks.begin()) return nullptr;
  --found;
  return address + range.bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

// Runs the thread of a stream.
static void serve(CudaStream stream) {
  Gpus& all = gpus();
  std::unique_lock lock(all.mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return stream->tasks.empty() ? stream->is_closed : !stream->is_held; });
    if (stream->tasks.empty()) break;
    const Task& task = stream->tasks.front();
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(random_up_to(setting("delay"))));
    task.work();
    lock.lock();
    stream->tasks.pop_front();
    all.task_done.notify_all();
  }
  all.streams.erase(stream);
  delete stream;
}

CudaStream make_stream(CudaContext context) {
  const CudaStream stream = new sirtaki::CudaStreamTag{context, ++gpus().streams_made};
  gpus().streams.insert(stream);
  std::thread(serve, stream).detach();
  return stream;
}

CudaStream find_stream(CudaStream stream, CudaContext context) {
  if (!stream && context) {
    if (!context->default_stream) context->default_stream = make_stream(context);
    return context->default_stream;
  }
  const bool is_there = gpus().streams.count(stream) && !stream->is_closed;
  return is_there && stream->context == context ? stream : nullptr;
}

bool is_event(CudaEvent event, CudaContext context) { return gpus().events.count(event) && event->context == context; }

// Lets the host use the pinned memory of tasks whose end it has seen, as seen from a GPU that may have used it.
static void protect(uintptr_t address, const Block& block, const Clock& host) {
  const Access* use = block.accesses.first_after(host);
  const HostMay may = !use ? HostMay::write : use->range.is_written ? HostMay::nothing : HostMay::read;
  protect_pinned(reinterpret_cast<void*>(address), may, use ? use->text() : "");
}

void host_has_seen(CudaContext context, const Clock& clock) {
  context->host.join(clock);
  for (const auto& [address, block] : gpus().blocks)
    if (block.device < 0 && block.context == context) protect(address, block, context->host);
}

// Adds a task, which must come after all tasks in conflict with it.
void append(CudaStream stream, Task task) {
  const Clock& host = stream->context->host;
  stream->clock.join(host);
  const uint64_t number = stream->clock.count(stream->number);
  for (const Range& range : task.ranges) {
    if (range.bytes == 0) continue;
    const Access access{range, stream->number, number, task.function};
    Block& block = *block_of(range);
    const std::string other = block.accesses.add(access, stream->clock, host);
    if (block.device < 0) protect(block.address, block, host);
    if (!other.empty()) misuse(access.text().c_str(), "the same memory, in no order with it: " + other, 0);
  }
  stream->tasks.push_back(std::move(task));
  stream->changed.notify_one();
}

CudaResult free_block(const char* function, void* address, bool is_host) {
  const std::lock_guard lock(gpus().mutex);
  const auto found = gpus().blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == gpus().blocks.end() || !found->second.is_owned || (found->second.device < 0) != is_host)
    return misuse(function, "this memory was not allocated so", invalid_value);
  const CudaContext context = current_context();
  if (const Access* use = found->second.accesses.first_after(context->host))
    return misuse(function, "a stream still uses this memory: " + use->text(), invalid_value);
  if (is_host) free_pinned(address);
  else std::free(address);
  gpus().blocks.erase(found);
  --gpus().alive;
  return cuda_success;
}

size_t allocated_on(int device) {
  size_t bytes = 0;
  for (const auto& [address, block] : gpus().blocks)
    if (block.device == device && block.is_owned) bytes += block.bytes;
  return bytes;
}

void* allocate(size_t bytes, int device) {
  void* address = device < 0 ? allocate_pinned(bytes) : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(address, 0xa5, bytes);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  gpus().blocks[begin] = {bytes, device, true, current_context(), begin};
  ++gpus().alive;
  return address;
}

CudaResult enqueue(CudaStream stream, Task task) {
  const char* function = task.function.c_str();
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
