// A device of the type "GPU" for TensorFlow's CPU build: a GPU of the fake libcuda, that of the rank's local number.
// Its streams are the fake's, whose tasks run late. Its only kernel is that of tf.raw_ops.DeepCopy, in TensorFlow's
// stream.
//
// A plugin as TensorFlow's "StreamExecutor C API" describes it; the tests build it with the headers of the wheel.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "gpu/libraries/cuda.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/kernels.h"

using namespace sirtaki;

#define FAKE_GPU_DECLARE(member, symbol, parameters) extern "C" CudaResult symbol parameters;
SIRTAKI_CUDA_FUNCTIONS(FAKE_GPU_DECLARE)

struct SP_Stream_st {
  CudaStream stream;
};
struct SP_Event_st {
  CudaEvent event;
};

namespace {

void require(CudaResult result) {
  if (result != cuda_success) std::abort();
}

// Makes the device's context the thread's current one.
class Current {
 public:
  Current() { require(cuCtxPushCurrent_v2(context())); }
  ~Current() { require(cuCtxPopCurrent_v2(nullptr)); }

 private:
  static CudaContext context() {
    static const CudaContext retained = [] {
      CudaContext made = nullptr;
      require(cuInit(0));
      require(cuDevicePrimaryCtxRetain(&made, std::atoi(std::getenv("SIRTAKI_LOCAL_RANK"))));
      return made;
    }();
    return retained;
  }
};

CudaMemory memory_of(const void* address) { return reinterpret_cast<CudaMemory>(address); }

void* allocate_pinned(uint64_t bytes) {
  void* made = nullptr;
  const Current current;
  require(cuMemHostAlloc(&made, bytes, cuda_memory_host_portable));
  return made;
}

CudaEvent record(CudaStream stream) {
  CudaEvent event = nullptr;
  require(cuEventCreate(&event, cuda_event_disable_timing));
  require(cuEventRecord(event, stream));
  return event;
}

void finish(CudaEvent event) {
  while (cuEventQuery(event) == cuda_not_ready) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void finish(SP_Stream stream) {
  const Current current;
  const CudaEvent end = record(stream->stream);
  finish(end);
  require(cuEventDestroy_v2(end));
}

using Device = const SP_Device*;
using Memory = SP_DeviceMemoryBase*;

void fill_memory(SP_StreamExecutor& to) {
  to.allocate = [](Device, uint64_t size, int64_t, Memory out) {
    const Current current;
    CudaMemory made = 0;
    out->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    out->opaque = cuMemAlloc_v2(&made, size) == cuda_success ? reinterpret_cast<void*>(made) : nullptr;
    out->size = size;
  };
  to.deallocate = [](Device, Memory) {};  // when the process ends, at the earliest
  to.host_memory_allocate = [](Device, uint64_t size) { return std::malloc(size); };
  to.host_memory_deallocate = [](Device, void* memory) { std::free(memory); };
  to.get_allocator_stats = [](Device, SP_AllocatorStats*) -> TF_Bool { return 0; };
  to.device_memory_usage = [](Device, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = 256 << 20;
    return 1;
  };
  to.mem_zero = [](Device, SP_Stream stream, Memory out, uint64_t size, TF_Status*) {
    finish(stream);
    std::memset(out->opaque, 0, size);
  };
  to.memset = [](Device, SP_Stream stream, Memory out, uint8_t pattern, uint64_t size, TF_Status*) {
    finish(stream);
    std::memset(out->opaque, pattern, size);
  };
  to.memset32 = [](Device, SP_Stream stream, Memory out, uint32_t pattern, uint64_t size, TF_Status*) {
    finish(stream);
    std::fill_n(static_cast<uint32_t*>(out->opaque), size / sizeof pattern, pattern);
  };
}

void fill_streams(SP_StreamExecutor& to) {
  to.create_stream = [](Device, SP_Stream* out, TF_Status*) {
    const Current current;
    *out = new SP_Stream_st{};
    require(cuStreamCreateWithPriority(&(*out)->stream, cuda_stream_non_blocking, 0));
  };
  to.destroy_stream = [](Device, SP_Stream stream) {
    const Current current;
    require(cuStreamDestroy_v2(stream->stream));
    delete stream;
  };
  to.create_stream_dependency = [](Device, SP_Stream later, SP_Stream earlier, TF_Status*) {
    const Current current;
    const CudaEvent event = record(earlier->stream);
    require(cuStreamWaitEvent(later->stream, event, 0));
    require(cuEventDestroy_v2(event));
  };
  to.get_stream_status = [](Device, SP_Stream, TF_Status*) {};
}

void fill_events(SP_StreamExecutor& to) {
  to.create_event = [](Device, SP_Event* out, TF_Status*) {
    const Current current;
    *out = new SP_Event_st{};
    require(cuEventCreate(&(*out)->event, cuda_event_disable_timing));
  };
  to.destroy_event = [](Device, SP_Event event) {
    const Current current;
    require(cuEventDestroy_v2(event->event));
    delete event;
  };
  to.get_event_status = [](Device, SP_Event event) {
    const Current current;
    return cuEventQuery(event->event) == cuda_success ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  to.record_event = [](Device, SP_Stream stream, SP_Event event, TF_Status*) {
    const Current current;
    require(cuEventRecord(event->event, stream->stream));
  };
  to.wait_for_event = [](Device, SP_Stream stream, SP_Event event, TF_Status*) {
    const Current current;
    require(cuStreamWaitEvent(stream->stream, event->event, 0));
  };
}

void fill_copies(SP_StreamExecutor& to) {
  to.memcpy_dtoh = [](Device, SP_Stream stream, void* host, const SP_DeviceMemoryBase* from, uint64_t size,
                      TF_Status*) {
    finish(stream);
    std::memcpy(host, from->opaque, size);
  };
  to.memcpy_htod = [](Device, SP_Stream stream, Memory out, const void* host, uint64_t size, TF_Status*) {
    void* pinned = allocate_pinned(size);  // the GPU reads it late
    std::memcpy(pinned, host, size);
    const Current current;
    require(cuMemcpyAsync(memory_of(out->opaque), memory_of(pinned), size, stream->stream));
  };
  to.memcpy_dtod = [](Device, SP_Stream stream, Memory out, const SP_DeviceMemoryBase* from, uint64_t size,
                      TF_Status*) {
    const Current current;
    require(cuMemcpyAsync(memory_of(out->opaque), memory_of(from->opaque), size, stream->stream));
  };
  to.sync_memcpy_dtoh = [](Device, void* host, const SP_DeviceMemoryBase* from, uint64_t size, TF_Status*) {
    std::memcpy(host, from->opaque, size);
  };
  to.sync_memcpy_htod = [](Device, Memory out, const void* host, uint64_t size, TF_Status*) {
    std::memcpy(out->opaque, host, size);
  };
  to.sync_memcpy_dtod = [](Device, Memory out, const SP_DeviceMemoryBase* from, uint64_t size, TF_Status*) {
    std::memcpy(out->opaque, from->opaque, size);
  };
}

void fill_waits(SP_StreamExecutor& to) {
  to.block_host_for_event = [](Device, SP_Event event, TF_Status*) {
    const Current current;
    finish(event->event);
  };
  to.block_host_until_done = [](Device, SP_Stream stream, TF_Status*) { finish(stream); };
  to.synchronize_all_activity = [](Device, TF_Status*) {};
  to.host_callback = [](Device, SP_Stream stream, SE_StatusCallbackFn call, void* argument) -> TF_Bool {
    std::thread([=, event = [&] {
      const Current current;
      return record(stream->stream);
    }()] {
      const Current current;
      finish(event);
      require(cuEventDestroy_v2(event));
      TF_Status* status = TF_NewStatus();
      call(argument, status);
      TF_DeleteStatus(status);
    }).detach();
    return 1;
  };
}

void fill_platform(SP_PlatformFns& to) {
  using Platform = const SP_Platform*;
  to.get_device_count = [](Platform, int* count, TF_Status*) { *count = 1; };
  to.create_device = [](Platform, SE_CreateDeviceParams* out, TF_Status*) {
    out->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    out->device->hardware_name = "fake";
    out->device->device_vendor = "fake";
    out->device->pci_bus_id = "0";
  };
  to.destroy_device = [](Platform, SP_Device*) {};
  to.create_device_fns = [](Platform, SE_CreateDeviceFnsParams* out, TF_Status*) {
    *out->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE};
  };
  to.destroy_device_fns = [](Platform, SP_DeviceFns*) {};
  to.create_stream_executor = [](Platform, SE_CreateStreamExecutorParams* out, TF_Status*) {
    out->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    for (const auto fill : {fill_memory, fill_streams, fill_events, fill_copies, fill_waits})
      fill(*out->stream_executor);
  };
  to.destroy_stream_executor = [](Platform, SP_StreamExecutor*) {};
  to.create_timer_fns = [](Platform, SP_TimerFns*, TF_Status*) {};
  to.destroy_timer_fns = [](Platform, SP_TimerFns*) {};
}

void deep_copy(void*, TF_OpKernelContext* where) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* from = nullptr;
  TF_GetInput(where, 0, &from, status);
  std::vector<int64_t> shape;
  for (int i = 0; i < TF_NumDims(from); ++i) shape.push_back(TF_Dim(from, i));
  const size_t bytes = TF_TensorByteSize(from);
  TF_Tensor* to = TF_AllocateOutput(where, 0, TF_TensorType(from), shape.data(), TF_NumDims(from), bytes, status);
  const Current current;
  require(cuMemcpyAsync(memory_of(TF_TensorData(to)), memory_of(TF_TensorData(from)), bytes,
                        TF_GetStream(where, status)->stream));
  if (TF_GetCode(status) != TF_OK) std::abort();
  TF_DeleteTensor(from);
  TF_DeleteTensor(to);
  TF_DeleteStatus(status);
}

}  // namespace

extern "C" void TF_InitKernel() {
  TF_Status* status = TF_NewStatus();
  TF_KernelBuilder* kernel = TF_NewKernelBuilder(
      "DeepCopy", "GPU", [](TF_OpKernelConstruction*) -> void* { return nullptr; }, deep_copy, [](void*) {});
  TF_RegisterKernelBuilder("DeepCopy", kernel, status);
  TF_DeleteStatus(status);
}

extern "C" void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "FAKE";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = 1;
  params->platform->force_memory_growth = 1;
  params->platform_fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  fill_platform(*params->platform_fns);
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}
