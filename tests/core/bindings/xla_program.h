// A stand-in for XLA: call frames as a compiled program makes them, and the functions that a handler calls.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sirtaki_observe.h"
#include "world.h"
#include "xla/ffi.h"
#include "xla/handler.h"

namespace sirtaki::bindings {

struct XlaError {
  AbslCode code;
  std::string message;
};

// The result of a call.
struct XlaFuture {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;
  XlaError* error = nullptr;

  void end(XlaError* with) {
    const std::lock_guard lock(mutex);
    error = with;
    is_over = true;
    changed.notify_all();
  }

  bool wait() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(60), [this] { return is_over; });
  }
};

struct XlaExecutionContext {
  void* stream = nullptr;
};

}  // namespace sirtaki::bindings

namespace program {

using namespace sirtaki;
using namespace sirtaki::bindings;

inline const XlaApi& api() {
  static const XlaApi functions = [] {
    XlaApi made{};
    made.struct_size = sizeof made;
    made.create_error = [](XlaErrorCreate* error) { return new XlaError{error->code, error->message}; };
    made.get_stream = [](XlaStreamGet* asked) -> XlaError* {
      asked->stream = asked->context->stream;
      return nullptr;
    };
    made.create_future = [](XlaFutureCreate* made) -> XlaError* {
      made->future = new XlaFuture;
      return nullptr;
    };
    made.set_available = [](XlaFutureSetAvailable* done) -> XlaError* {
      done->future->end(nullptr);
      return nullptr;
    };
    made.set_error = [](XlaFutureSetError* failed) -> XlaError* {
      failed->future->end(failed->error);
      return nullptr;
    };
    return made;
  }();
  return functions;
}

// An array of a program.
struct Array {
  std::vector<float> values;
  std::vector<int64_t> shape;

  explicit Array(std::vector<float> of) : values(std::move(of)), shape{static_cast<int64_t>(values.size())} {}
  XlaBuffer buffer(XlaDataType dtype = XlaDataType::f32) {
    return {sizeof(XlaBuffer), nullptr, dtype, values.data(), static_cast<int64_t>(shape.size()), shape.data()};
  }
};

// One call of a program: its attributes, operands and results, which all have to outlive it.
class Step {
 public:
  explicit Step(int32_t kind, const std::string& names, int64_t members = 0) : names_(names) {
    for (const auto& [name, value] : {std::pair<const char*, int64_t>{"kind", kind},
                                      {"reduce_op", SRT_SUM},
                                      {"root", 0},
                                      {"process_set", 0},
                                      {"members", members},
                                      {"number", 0},
                                      {"count", 0},
                                      {"ends_step", 0}})
      integers[name] = value;
    factors_["prescale"] = factors_["postscale"] = 1.0;
  }

  // Attributes of the call, which a test may change before it.
  std::map<std::string, int64_t> integers;
  XlaExecutionContext context;
  XlaDataType dtype = XlaDataType::f32;

  void add(Array& operand, Array& result) { add(operand.buffer(dtype), result.buffer(dtype)); }

  void add(const XlaBuffer& operand, const XlaBuffer& result) {
    operands_.push_back(operand);
    results_.push_back(result);
    ++integers["count"];
  }

  // Returns a frame with the addresses of this step, which must not move any more.
  XlaCallFrame frame() {
    scalars_.reserve(integers.size() + factors_.size());  // their addresses are taken while the vector is filled
    attribute_names_.reserve(scalars_.capacity() + 1);
    for (auto& [name, value] : integers)
      add_attribute(name, scalars_.emplace_back(XlaScalar{XlaDataType::s64, &value}));
    for (auto& [name, value] : factors_)
      add_attribute(name, scalars_.emplace_back(XlaScalar{XlaDataType::f64, &value}));
    text_ = {names_.data(), names_.size()};
    attribute_names_.push_back({"names", 5});
    types_.push_back(XlaAttributeType::string);
    attributes_.push_back(&text_);
    for (XlaText& name : attribute_names_) name_pointers_.push_back(&name);
    for (XlaBuffer& operand : operands_) operand_pointers_.push_back(&operand);
    for (XlaBuffer& result : results_) result_pointers_.push_back(&result);
    XlaCallFrame made{};
    made.struct_size = sizeof made;
    made.api = &api();
    made.context = &context;
    made.stage = XlaStage::execute;
    made.operands = buffers(operand_pointers_);
    made.results = buffers(result_pointers_);
    made.attributes = {sizeof made.attributes, nullptr,           static_cast<int64_t>(types_.size()), types_.data(),
                       name_pointers_.data(),  attributes_.data()};
    return made;
  }

  XlaError* call(bool on_gpu = false) {
    auto* handler = reinterpret_cast<XlaHandler*>(sirtaki_xla_handler(0, 1, on_gpu));
    XlaCallFrame made = frame();
    XlaError* error = handler(&made);
    future = made.future;
    return error;
  }

  // Returns the call's error; "" if it succeeded.
  std::string outcome() {
    if (!future) return "";
    if (!future->wait()) return "it has not ended";
    const std::unique_ptr<XlaFuture> over(future);
    if (!over->error) return "";
    const std::unique_ptr<XlaError> error(over->error);
    return std::to_string(static_cast<int>(error->code)) + " " + error->message;
  }

  XlaFuture* future = nullptr;

 private:
  static XlaBuffers buffers(std::vector<void*>& pointers) {
    return {sizeof(XlaBuffers), nullptr, static_cast<int64_t>(pointers.size()), nullptr, pointers.data()};
  }

  void add_attribute(const std::string& name, XlaScalar& value) {
    attribute_names_.push_back({name.data(), name.size()});
    types_.push_back(XlaAttributeType::scalar);
    attributes_.push_back(&value);
  }

  std::string names_;
  std::map<std::string, double> factors_;
  std::vector<XlaBuffer> operands_, results_;
  std::vector<void*> operand_pointers_, result_pointers_;
  std::vector<XlaScalar> scalars_;
  XlaText text_{};
  std::vector<XlaText> attribute_names_;
  std::vector<XlaText*> name_pointers_;
  std::vector<XlaAttributeType> types_;
  std::vector<void*> attributes_;
};

// The ranks of a world through the C interface, linked by sockets.
class Ranks {
 public:
  explicit Ranks(int size, world::Options options = world::over(world::Over::sockets)) {
    srt_config* config = srt_config_create();
    for (const auto& [name, value] : options.knobs)
      CHECK_EQUAL(srt_config_set(config, name.c_str(), value.c_str(), nullptr), SRT_OK);
    const std::vector<srt_peer> peers(static_cast<size_t>(size), srt_peer{"here", 100, 0});
    for (int rank = 0; rank < size; ++rank) {
      const srt_topology topology{sizeof topology, rank, size, rank, size, 0, 1, peers.data()};
      CHECK_EQUAL(srt_create(config, &topology, &contexts_.emplace_back(nullptr), nullptr), SRT_OK);
    }
    srt_config_destroy(config);
    for (int a = 0; a < size; ++a)
      for (int b = a + 1; b < size; ++b) {
        int ends[2];
        CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        CHECK_EQUAL(srt_link_socket((*this)[a], b, ends[0], nullptr), SRT_OK);
        CHECK_EQUAL(srt_link_socket((*this)[b], a, ends[1], nullptr), SRT_OK);
      }
    for (srt_context* context : contexts_) CHECK_EQUAL(srt_start(context, nullptr), SRT_OK);
  }

  ~Ranks() {
    srt_set_process_context(nullptr);
    std::vector<std::thread> leaving;
    for (srt_context* context : contexts_) leaving.emplace_back([context] { srt_shutdown(context, 10'000); });
    for (std::thread& thread : leaving) thread.join();
    for (srt_context* context : contexts_) srt_destroy(context);
  }

  srt_context* operator[](int rank) { return contexts_[static_cast<size_t>(rank)]; }

  // Calls the step of one rank's program.
  void call(int rank, Step& step) {
    srt_set_process_context((*this)[rank]);
    CHECK(step.call() == nullptr);
  }

 private:
  std::vector<srt_context*> contexts_;
};

inline srt_step_counts step_counts_of(srt_context* context) {
  srt_step_counts counts{};
  counts.struct_size = sizeof counts;
  CHECK_EQUAL(srt_get_steps(context, &counts), SRT_OK);
  return counts;
}

// Returns the number of training steps of a rank.
inline int64_t steps_of(srt_context* context) { return step_counts_of(context).number; }

}  // namespace program
