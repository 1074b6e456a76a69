// The functions of the fake libcuda.so.1, on top of cuda_state.h.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "fake_gpu/cuda_state.h"

using namespace fake;

namespace {

using namespace sirtaki;

const std::map<CudaResult, const char*> texts = {
    {cuda_success, "no error"},
    {invalid_value, "invalid argument"},
    {cuda_out_of_memory, "out of memory"},
    {3, "initialization error"},
    {no_device, "no CUDA-capable device is detected"},
    {invalid_device, "invalid device ordinal"},
    {invalid_context, "invalid device context"},
    {invalid_handle, "invalid resource handle"},
    {cuda_not_ready, "device not ready"},
    {700, "an illegal memory access was encountered"},
    {719, "unspecified launch failure"},
    {unsupported_in_capture, "operation not permitted when stream is capturing"},
    {222, "the provided PTX was compiled with an unsupported toolchain."},
    {999, "unknown error"},
};

}  // namespace

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
  const int bus = device / fake::setting("parts") + 1;
  const int length = std::snprintf(text, static_cast<size_t>(capacity), "0000:%02X:00.0", bus);
  return length < capacity ? cuda_success : invalid_value;
}

int cuDeviceGetUuid_v2(CudaUuid* out, CudaDevice device) {
  FAKE_GPU_ENTER();
  std::memset(out->bytes, device + 1, sizeof out->bytes);
  return cuda_success;
}

int cuDevicePrimaryCtxRetain(CudaContext* out, CudaDevice device) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(device >= 0 && device < fake::most_devices, "there is no such GPU", invalid_device);
  *out = &gpus().contexts[device];
  ++(*out)->retained;
  ++gpus().alive;
  return cuda_success;
}

int cuDevicePrimaryCtxRelease_v2(CudaDevice device) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(gpus().contexts[device].retained > 0, "released more often than retained", invalid_context);
  --gpus().contexts[device].retained;
  --gpus().alive;
  return cuda_success;
}

int cuCtxPushCurrent_v2(CudaContext context) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(context && context->retained > 0, "this context is not retained", invalid_context);
  contexts_of_thread().push_back(context);
  return cuda_success;
}

int cuCtxPopCurrent_v2(CudaContext* out) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(!contexts_of_thread().empty(), "there is no current context", invalid_context);
  if (out) *out = contexts_of_thread().back();
  contexts_of_thread().pop_back();
  return cuda_success;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  FAKE_GPU_ENTER();
  FAKE_GPU_REQUIRE(*mode >= 0 && *mode <= cuda_capture_relaxed, "there is no such mode", invalid_value);
  std::swap(*mode, capture_mode());
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
  if (event->has_fired) {
    found->clock.join(event->clock);
    append(found, {__func__, {}, [fired = event->has_fired] {
      std::unique_lock waiting(gpus().mutex);
      gpus().task_done.wait(waiting, [&] { return *fired; });
    }});
  }
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

int cuCtxRecordEvent(CudaContext context, CudaEvent event) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(context == current_context() && is_event(event, context), "no event of the current context",
                   invalid_handle);
  event->has_fired = std::make_shared<bool>(false);
  event->clock = {};
  const auto left = std::make_shared<size_t>(1);
  const auto count_down = [left, fired = event->has_fired] { *fired = --*left == 0; };
  for (CudaStream stream : gpus().streams) {
    if (stream->context != context) continue;
    ++*left;
    append(stream, {__func__, {}, [count_down] {
      const std::lock_guard firing(gpus().mutex);
      count_down();
    }});
    event->clock.join(stream->clock);
  }
  count_down();
  return cuda_success;
}

int cuEventRecord(CudaEvent event, CudaStream stream) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  const CudaStream found = find_stream(stream, current_context());
  FAKE_GPU_REQUIRE(found && is_event(event, current_context()), "no stream or event of the current context",
                   invalid_handle);
  event->has_fired = std::make_shared<bool>(false);
  append(found, {__func__, {}, [fired = event->has_fired] {
    const std::lock_guard firing(gpus().mutex);
    *fired = true;
  }});
  event->clock = found->clock;
  return cuda_success;
}

int cuEventQuery(CudaEvent event) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(is_event(event, current_context()), "this is no event of the current context", invalid_handle);
  if (event->has_fired && !*event->has_fired) return cuda_not_ready;
  host_has_seen(current_context(), event->clock);
  return cuda_success;
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

int fake_gpu_await_tasks(CudaStream of, int seconds) {
  std::unique_lock lock(gpus().mutex);
  return gpus().task_done.wait_for(lock, std::chrono::seconds(seconds), [of] {
    return std::all_of(gpus().streams.begin(), gpus().streams.end(),
                       [of](CudaStream stream) { return (of && stream != of) || stream->tasks.empty(); });
  });
}

void fake_gpu_lend(void* address, size_t bytes, int device) {
  const std::lock_guard lock(gpus().mutex);
  Block& block = gpus().blocks[reinterpret_cast<uintptr_t>(address)];
  if (block.bytes != bytes || block.device != device || block.is_owned) block = {bytes, device, false};
}

void fake_gpu_take_back(void* address) {
  const std::lock_guard lock(gpus().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto found = gpus().blocks.find(begin);
  if (found == gpus().blocks.end()) return;
  Clock host;  // of streams of other GPUs, too
  for (const sirtaki::CudaContextTag& context : gpus().contexts) host.join(context.host);
  if (const Access* use = found->second.accesses.first_after(host))
    misuse(__func__, "a stream still uses this memory: " + use->text(), 0);
  gpus().blocks.erase(found);
}

void fake_gpu_read(CudaStream stream, const void* address, size_t bytes) {
  const std::lock_guard lock(gpus().mutex);
  const CudaStream found = find_stream(stream, stream ? stream->context : current_context());
  if (found && block_of({address, bytes})) append(found, {__func__, {{address, bytes}}, [] {}});
}

const char* fake_gpu_pushed() {
  thread_local std::string devices;
  devices.clear();
  for (const CudaContext context : contexts_of_thread())
    devices += (devices.empty() ? "" : " ") + std::to_string(context->device);
  return devices.c_str();
}

int fake_gpu_alive() {
  const std::lock_guard lock(gpus().mutex);
  return gpus().alive;
}

}  // extern "C"
