// Ranks whose tensors are on GPUs of the fake libraries; each rank has its own GPU.
#pragma once

#include <sys/mman.h>

#include <cstring>

#include "data/kernels/kernels.h"
#include "fake_gpu/control.h"
#include "gpu/device/gpu.h"
#include "world.h"

namespace world {

using Knobs = std::vector<std::pair<std::string, std::string>>;

inline const std::string fake_folder = SIRTAKI_FAKE_GPU;

// The fake in its initial state, with one GPU per rank; any misuse meanwhile fails the test.
class Fake : public FakeGpu {
 public:
  explicit Fake(int devices = 4, const std::string& folder = fake_folder) : FakeGpu(folder) {
    const GpuLibraries opened(config());  // before there are threads: ThreadSanitizer does not see the loader's lock
    reset();
    set("devices", devices);
    alive_before_ = alive();
  }
  ~Fake() {
    CHECK_EQUAL(std::string(misuse()), "");
    if (!is_broken_) CHECK_EQUAL(alive(), alive_before_);
    reset();
  }

  static Config config() {
    Config config;
    std::ignore = config.set("gpu_libraries", fake_folder);
    return config;
  }

  // Announces that a GPU will fail; a failed GPU frees nothing.
  void is_to_break() { is_broken_ = true; }

 private:
  int alive_before_;
  bool is_broken_ = false;
};

inline Options on_gpus(Knobs knobs = {}, Over transport = Over::memory) {
  knobs.emplace_back("gpu_libraries", fake_folder);
  knobs.emplace_back("log_descriptor", "-1");
  return {transport, std::move(knobs), nullptr, true};
}

// Bytes that the fake takes to be on a GPU.
class OnGpu {
 public:
  OnGpu(FakeGpu& fake, int device, std::vector<uint8_t> bytes) : fake_(fake), bytes_(std::move(bytes)) {
    bytes_.resize(std::max<size_t>(bytes_.size(), 1));
    fake_.lend(bytes_.data(), bytes_.size(), device);
  }
  OnGpu(OnGpu&& other) noexcept : fake_(other.fake_), bytes_(std::move(other.bytes_)) {}
  ~OnGpu() {
    if (!bytes_.empty()) fake_.take_back(bytes_.data());
  }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(bytes_.data()); }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  FakeGpu& fake_;
  std::vector<uint8_t> bytes_;
};

template <typename T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const uint8_t*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> values_in(const std::vector<uint8_t>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// A program's own stream on a GPU.
class UserStream {
 public:
  UserStream(FakeGpu& fake, int device) : fake_(fake) {
    libraries_ = std::make_unique<GpuLibraries>(Fake::config());
    if (const Status status = GpuDevice::open(*libraries_, device, device_); !status.is_ok())
      check::fail(__FILE__, __LINE__, status.text());
    const GpuDevice::Scope scope(device_.get());
    CHECK_EQUAL(device_->cuda().stream_create(&stream_, cuda_stream_non_blocking, 0), cuda_success);
  }
  ~UserStream() {
    hold(false);
    finish();
    const GpuDevice::Scope scope(device_.get());
    CHECK_EQUAL(device_->cuda().stream_destroy(stream_), cuda_success);
  }

  CudaStream get() const { return stream_; }
  const GpuDevice& device() const { return *device_; }
  uintptr_t number() const { return reinterpret_cast<uintptr_t>(stream_); }
  void hold(bool held) { fake_.hold(stream_, held); }

  void copy(OnGpu& to, const OnGpu& from) {
    const GpuDevice::Scope scope(device_.get());
    CHECK_EQUAL(device_->cuda().copy(to.address(), from.address(), to.bytes().size(), stream_), cuda_success);
  }

  // Waits for all work in the stream.
  void finish() {
    EventPool events(*device_);
    GpuEventPtr end;
    CHECK(events.record(stream_, end).is_ok());
    for (bool is_over = false; !is_over && end->look(is_over).is_ok();) std::this_thread::yield();
  }

 private:
  FakeGpu& fake_;
  std::unique_ptr<GpuLibraries> libraries_;
  std::unique_ptr<GpuDevice> device_;
  CudaStream stream_ = nullptr;
};

inline srt_request on_gpu(srt_request request, int device, uintptr_t stream = 0) {
  request.device = device;
  request.stream = stream;
  return request;
}

// A float tensor on a GPU, reduced in place.
inline srt_request in_place(int32_t kind, const char* name, const OnGpu& data, const int64_t& count, int device,
                            uintptr_t stream = 0) {
  srt_request made = on_gpu(request(kind, name, &count, 1), device, stream);
  made.input = made.output = data.address();
  return made;
}

constexpr Nanoseconds patience = seconds(60);

inline std::vector<uint8_t> floats(int64_t count, float value) {
  return bytes_of(std::vector<float>(static_cast<size_t>(count), value));
}

// A sum of floats on a GPU, in place. It is to outlive the streams that use its memory.
struct GpuSum {
  GpuSum(FakeGpu& fake, int device, const char* name, int64_t elements = 100, float value = 1)
      : count(elements), data(fake, device, floats(elements, value)),
        request(in_place(SRT_ALLREDUCE, name, data, count, device)) {}
  GpuSum(const GpuSum&) = delete;
  GpuSum& operator=(const GpuSum&) = delete;

  // Returns the request of a sum whose input is computed in a stream.
  const srt_request& in(const UserStream& stream) {
    request.stream = stream.number();
    return request;
  }
  std::vector<float> values() { return values_in<float>(data.bytes()); }

  const int64_t count;
  OnGpu data;
  srt_request request;
};

// A sum that is in flight on a rank's GPU.
struct Launched {
  Launched(Fake& fake, Context& context, int rank, int64_t count = 100, int32_t process_set = 0)
      : sum(fake, rank, "x", count), stream(fake, rank) {
    sum.request.process_set = process_set;
    handle = start(context, sum.in(stream));
    expect_ok(context.wait_on_stream(&handle, 1, stream.number(), patience));
  }

  GpuSum sum;
  UserStream stream;
  Ticket handle = 0;
};

// The log of a world's ranks.
class Said {
 public:
  Said() : file_(::memfd_create("log", MFD_CLOEXEC)) {}
  std::pair<std::string, std::string> knob() const { return {"log_descriptor", std::to_string(file_.get())}; }

  int times(const std::string& part) const {
    const std::string all = text();
    int found = 0;
    for (size_t at = all.find(part); at != std::string::npos; at = all.find(part, at + 1)) ++found;
    return found;
  }
  std::string text() const {
    std::string all(1 << 16, '\0');
    const ssize_t bytes = ::pread(file_.get(), all.data(), all.size(), 0);
    all.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
    return all;
  }

 private:
  Descriptor file_;
};

inline Options saying(const Said& said, Knobs knobs = {}) {
  Options options = on_gpus(std::move(knobs));
  options.knobs.push_back(said.knob());
  return options;
}

// Runs one all-reduce of small and large tensors, and an all-gather; the default stream waits for them.
inline Status step(FakeGpu& fake, Context& context, int device) {
  const int64_t counts[] = {50, 20'000};
  OnGpu small(fake, device, floats(counts[0], 1)), large(fake, device, floats(counts[1], 1));
  OnGpu part(fake, device, floats(counts[0], 1));
  srt_request requests[] = {in_place(SRT_ALLREDUCE, "small", small, counts[0], device),
                            in_place(SRT_ALLREDUCE, "large", large, counts[1], device),
                            on_gpu(request(SRT_ALLGATHER, "gather", &counts[0], 1), device)};
  requests[0].prescale = requests[1].prescale = 0.5;
  requests[2].input = part.address();
  Ticket handles[3];
  Status status = context.enqueue(requests, 3, handles);
  if (!status.is_ok()) {
    context.abort(status.text());
    return status;
  }
  status = context.wait_on_stream(handles, 3, 0, patience);
  const Status ended = context.wait(handles, 3, patience);
  context.release(handles, 3);
  return status.is_ok() ? ended : status;
}

}  // namespace world
