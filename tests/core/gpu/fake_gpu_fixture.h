// The fakes of tests/fake_gpu as the core opens them, with GPUs, arrays and communicators for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "check.h"
#include "data/kernels/half.h"
#include "fake_gpu/control.h"
#include "gpu/libraries/libraries.h"

namespace fixture {

using namespace sirtaki;

constexpr NcclResult invalid_argument = 4, invalid_usage = 5;
constexpr int float32 = 7, sum = 0;

// The fakes, as the core opens them. At the end there must be no misuse, and no objects left.
struct Fakes {
  Fakes() : control(SIRTAKI_FAKE_GPU), libraries(config()) { control.reset(); }
  ~Fakes() {
    CHECK_EQUAL(std::string(control.misuse()), "");
    CHECK_EQUAL(control.alive(), 0);
  }

  static Config config() {
    Config made;
    std::ignore = made.set("gpu_libraries", SIRTAKI_FAKE_GPU);
    return made;
  }

  // Returns the misuse so far, and clears it.
  std::string take_misuse() {
    const std::string text = control.misuse();
    control.reset();
    return text;
  }

  const CudaFunctions& cuda() const { return libraries.cuda(); }
  const NcclFunctions& nccl() const { return libraries.nccl(); }

  FakeGpu control;
  GpuLibraries libraries;
};

inline void check_ok(int result, int line) {
  if (result != 0) check::fail(__FILE__, line, "result " + std::to_string(result));
}
#define OK(result) check_ok((result), __LINE__)

// The context of a GPU, current in this thread, with a stream of its own.
struct TestGpu {
  TestGpu(Fakes& fakes, int device) : cuda(fakes.cuda()), device(device) {
    OK(cuda.context_retain(&context, device));
    OK(cuda.context_push(context));
    OK(cuda.stream_create(&stream, cuda_stream_non_blocking, 0));
  }
  ~TestGpu() {
    wait(record());
    OK(cuda.stream_destroy(stream));
    OK(cuda.context_pop(nullptr));
    OK(cuda.context_release(device));
  }

  CudaEvent record() const {
    CudaEvent event = nullptr;
    OK(cuda.event_create(&event, cuda_event_disable_timing));
    OK(cuda.event_record(event, stream));
    return event;
  }
  void wait(CudaEvent event) const {
    while (cuda.event_query(event) == cuda_not_ready) std::this_thread::yield();
    OK(cuda.event_query(event));
    OK(cuda.event_destroy(event));
  }

  const CudaFunctions& cuda;
  int device;
  CudaContext context = nullptr;
  CudaStream stream = nullptr;
};

// Device memory for elements.
template <typename T>
struct DeviceArray {
  DeviceArray(const TestGpu& gpu, const std::vector<T>& values) : cuda(gpu.cuda), values(values.size()) {
    OK(cuda.memory_allocate(&memory, values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), data());
  }
  ~DeviceArray() { OK(cuda.memory_free(memory)); }
  T* data() const { return reinterpret_cast<T*>(memory); }
  std::vector<T> get() const { return {data(), data() + values}; }

  const CudaFunctions& cuda;
  size_t values;
  CudaMemory memory = 0;
};

// One rank of a communicator, which is created and destroyed as NCCL requires.
struct TestCommunicator {
  TestCommunicator(Fakes& fakes, int size, const NcclUniqueId& id, int rank) : nccl(fakes.nccl()) {
    NcclConfig config;
    CHECK_EQUAL(nccl.init(&handle, size, id, rank, &config), nccl_in_progress);
    state = settle();
  }
  ~TestCommunicator() {
    if (state != nccl_success) abort();
    if (!handle) return;
    nccl.finalize(handle);
    OK(settle());
    OK(nccl.destroy(handle));
  }

  void abort() {
    OK(nccl.abort(handle));
    handle = nullptr;
  }

  NcclResult settle() const {
    NcclResult now = nccl_in_progress;
    while (nccl.async_error(handle, &now) == nccl_success && now == nccl_in_progress) std::this_thread::yield();
    return now;
  }

  const NcclFunctions& nccl;
  NcclCommunicator handle = nullptr;
  NcclResult state = nccl_in_progress;
};

using Body = std::function<void(int rank, TestGpu&, TestCommunicator&)>;

// Runs ranks as threads, each with a GPU of its own.
inline void run_ranks(Fakes& fakes, int size, const Body& body) {
  NcclUniqueId id;
  OK(fakes.nccl().unique_id(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      TestGpu gpu(fakes, rank);
      TestCommunicator communicator(fakes, size, id, rank);
      CHECK_EQUAL(communicator.state, nccl_success);
      body(rank, gpu, communicator);
    });
  for (auto& thread : threads) thread.join();
}

// Waits until the launched calls are in the stream, and then until the stream has completed them.
inline void finish(const TestGpu& gpu, const TestCommunicator& communicator) {
  OK(communicator.settle());
  gpu.wait(gpu.record());
}

}  // namespace fixture
