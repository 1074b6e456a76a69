// The functions of the fake libcuda.so.1 that allocate, free and write memory.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "fake_gpu/cuda_state.h"

using namespace fake;

namespace {

// Waits, where a test wants that, for all that the current GPU has to do.
void wait_for_tasks(const char* function) {
  if (!setting("implicit_waits")) return;
  const CudaContext context = current_context();
  std::unique_lock lock(gpus().mutex);
  const bool has_ended = gpus().task_done.wait_for(lock, std::chrono::milliseconds(setting("free_limit")), [&] {
    return std::none_of(gpus().streams.begin(), gpus().streams.end(),
                        [&](const CudaStream stream) { return stream->context == context && !stream->tasks.empty(); });
  });
  if (!has_ended) misuse(function, "it waits for a task on the GPU, which does not end", 0);
}

// Returns whether a copy uses memory that another one of its batch writes: the batch has no order.
bool has_conflict(const std::vector<Range>& ranges) {
  for (const Range& written : ranges)
    for (const Range& used : ranges)
      if (written.is_written && &written != &used && overlap(written, used)) return true;
  return false;
}

}  // namespace

namespace sirtaki {

int cuPointerGetAttribute(void* value, int attribute, CudaMemory memory) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(attribute == cuda_device_of_pointer, "the fake does not know this attribute", invalid_value);
  const std::lock_guard lock(gpus().mutex);
  const Block* block = block_of({reinterpret_cast<const void*>(memory), 1});
  FAKE_GPU_REQUIRE(block && block->device >= 0, "this memory is not on a GPU", invalid_value);
  *static_cast<int*>(value) = block->device;
  return cuda_success;
}

int cuMemAlloc_v2(CudaMemory* out, size_t bytes) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  FAKE_GPU_REQUIRE(bytes > 0, "no bytes", invalid_value);
  const auto limit = static_cast<size_t>(setting("memory"));
  const std::lock_guard lock(gpus().mutex);
  if (limit && allocated_on(current_context()->device) + bytes > limit) return cuda_out_of_memory;
  *out = reinterpret_cast<uintptr_t>(allocate(bytes, current_context()->device));
  return cuda_success;
}

int cuMemFree_v2(CudaMemory memory) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  wait_for_tasks(__func__);
  return free_block(__func__, reinterpret_cast<void*>(memory), false);
}

int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  FAKE_GPU_REQUIRE(bytes > 0, "no bytes", invalid_value);
  wait_for_tasks(__func__);
  const std::lock_guard lock(gpus().mutex);
  *out = allocate(bytes, -1);
  return cuda_success;
}

int cuMemFreeHost(void* address) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  wait_for_tasks(__func__);
  return free_block(__func__, address, true);
}

int cuMemcpyAsync(CudaMemory to, CudaMemory from, size_t bytes, CudaStream stream) {
  FAKE_GPU_ENTER();
  void* target = reinterpret_cast<void*>(to);
  const void* source = reinterpret_cast<const void*>(from);
  fake::count_copied(bytes);
  const auto work = [to = for_tasks(target), from = for_tasks(source), bytes] { std::memmove(to, from, bytes); };
  return enqueue(stream, {__func__, {{target, bytes, true}, {source, bytes}}, work});
}

int cuMemcpyBatchAsync(CudaMemory* to, CudaMemory* from, size_t* bytes, size_t copies, CudaCopyAttributes* attributes,
                       size_t* first, size_t kinds, size_t* failed, CudaStream stream) {
  FAKE_GPU_ENTER();
  *failed = SIZE_MAX;  // no copy in particular
  FAKE_GPU_REQUIRE(stream, "a batch cannot go to the default stream", invalid_value);
  FAKE_GPU_REQUIRE(copies > 0, "no copies", invalid_value);
  FAKE_GPU_REQUIRE(kinds == 1 && first[0] == 0, "the fake knows batches with equal attributes only", invalid_value);
  FAKE_GPU_REQUIRE(attributes->source_order == cuda_source_in_stream_order && attributes->flags == 0,
                   "the fake knows sources in the order of the stream only", invalid_value);
  std::vector<Range> ranges;
  std::vector<std::function<void()>> works;
  for (size_t i = 0; i < copies; ++i) {
    void* target = reinterpret_cast<void*>(to[i]);
    const void* source = reinterpret_cast<const void*>(from[i]);
    fake::count_copied(bytes[i]);
    ranges.insert(ranges.end(), {{target, bytes[i], true}, {source, bytes[i]}});
    works.push_back(
        [to = for_tasks(target), from = for_tasks(source), size = bytes[i]] { std::memmove(to, from, size); });
  }
  FAKE_GPU_REQUIRE(!has_conflict(ranges), "a copy uses memory that another one of the batch writes", invalid_value);
  // In another order than that of the arguments, which is no promise.
  return enqueue(stream, {__func__, ranges,
                          [works] { std::for_each(works.rbegin(), works.rend(), [](const auto& work) { work(); }); }});
}

}  // namespace sirtaki

extern "C" int fake_gpu_fill(CudaStream stream, sirtaki::CudaMemory memory, int value, size_t bytes) {
  void* target = reinterpret_cast<void*>(memory);
  const auto work = [to = for_tasks(target), value, bytes] { std::memset(to, value, bytes); };
  return enqueue(stream, {__func__, {{target, bytes, true}}, work});
}
