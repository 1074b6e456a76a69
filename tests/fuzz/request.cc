// The structs of the C interface: any request is rejected with a text or executed, whatever its fields hold. Only its
// pointers have to be valid: the input says for each whether it is present.
#include <array>
#include <cstring>
#include <numeric>
#include <string>

#include "base/dtypes/dtype.h"
#include "base/status.h"
#include "sirtaki.h"
#include "targets.h"

namespace sirtaki::fuzz {
namespace {

constexpr size_t room = 4096;  // bytes of each tensor, at most

// A world of one rank.
class World {
 public:
  World() {
    srt_config* config = srt_config_create();
    srt_error error{};
    srt_config_set(config, "recorder_operations", "16", &error);
    const srt_peer self{"host", 1, 0};
    const srt_topology topology{sizeof topology, 0, 1, 0, 1, 0, 1, &self};
    CHECK_EQUAL(srt_create(config, &topology, &context_, &error), SRT_OK);
    CHECK_EQUAL(srt_start(context_, &error), SRT_OK);
    srt_config_destroy(config);
  }
  ~World() {
    srt_shutdown(context_, 0);
    srt_destroy(context_);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void ask(Slices& slices) {
    read(slices);
    srt_handle handle = 0;
    srt_error error{};
    const srt_status status = srt_run(context_, &request_, 1, 1, &handle, &error);
    CHECK(StatusTable::entry(status) != nullptr);
    CHECK(std::memchr(error.text, 0, sizeof error.text) != nullptr);
    if (handle == 0) {
      CHECK(status != SRT_OK && error.text[0] != 0);
      return;
    }
    srt_tensor output{};
    if (srt_output(context_, handle, &output) == SRT_OK && output.data) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(output.data);
      sum_ = std::accumulate(bytes, bytes + output.bytes, uint64_t{0});  // reads all bytes: they must be there
    }
    std::array<int64_t, 4> splits{};
    srt_result_splits(context_, handle, splits.data(), splits.size());
    std::array<int32_t, 4> ranks{};
    srt_process_set(context_, request_.process_set, ranks.data(), ranks.size());
    sum_ = std::strlen(srt_handle_error(context_, handle));
    srt_release(context_, &handle, 1);
  }

 private:
  void read(Slices& slices) {
    const uint8_t pointers = slices.byte();
    request_ = {};
    request_.struct_size = static_cast<uint32_t>(sizeof request_ - (pointers & 1));
    for (int32_t* field : {&request_.kind, &request_.dtype, &request_.reduce_op, &request_.root, &request_.destination,
                           &request_.process_set, &request_.device, &request_.priority, &request_.group_size})
      *field = slices.value<int32_t>();
    request_.flags = slices.value<uint32_t>();
    request_.group_id = slices.value<int64_t>();
    request_.layout = slices.value<uint64_t>();
    request_.prescale = slices.value<double>();
    request_.postscale = slices.value<double>();
    const Input name = slices.message();
    name_.assign(name.begin(), name.end());
    request_.name = pointers & 2 ? name_.c_str() : nullptr;
    read_numbers(slices, shape_);
    read_numbers(slices, splits_);
    request_.wire_format = slices.byte();
    request_.dimensions = static_cast<int32_t>(shape_.size());
    request_.shape = pointers & 4 ? nullptr : shape_.data();
    request_.split_count = static_cast<int32_t>(splits_.size());
    request_.splits = pointers & 8 ? splits_.data() : nullptr;
    const bool fits = bytes() <= room;
    request_.input = fits && !(pointers & 16) ? reinterpret_cast<uintptr_t>(input_.data()) : 0;
    request_.output = fits && !(pointers & 32) ? reinterpret_cast<uintptr_t>(output_.data()) : 0;
    if (fits && pointers & 64) request_.output = request_.input + (pointers & 128 ? 1 : 0);
  }

  static void read_numbers(Slices& slices, std::vector<int64_t>& out) {
    out.resize(slices.byte() % 20);
    for (int64_t& number : out) number = slices.value<int64_t>();
  }

  // Returns the bytes of the tensor; more than `room` if they are not known.
  size_t bytes() const {
    const srt_dtype* dtype = dtype_entry(request_.dtype);
    if (!dtype || request_.shape == nullptr) return room + 1;
    __int128 bytes = dtype->bytes;
    for (int64_t extent : shape_) {
      if (extent < 0) return room + 1;
      bytes *= extent;
      if (bytes > static_cast<__int128>(room)) return room + 1;
    }
    return static_cast<size_t>(bytes);
  }

  srt_context* context_ = nullptr;
  srt_request request_{};
  std::string name_;
  std::vector<int64_t> shape_, splits_;
  alignas(64) std::array<uint8_t, room + 64> input_{};
  alignas(64) std::array<uint8_t, room> output_{};
  volatile uint64_t sum_ = 0;  // keeps the compiler from removing the reads
};

void ask_anything(Input input) {
  World world;
  for (Slices slices(input); !slices.at_end();) world.ask(slices);
}

void put_request(Bytes& seed, int32_t kind, std::vector<int64_t> shape, std::vector<int64_t> splits = {}) {
  Writer writer(seed);
  writer.put(static_cast<uint8_t>(splits.empty() ? 2 : 2 | 8));
  for (int32_t value : {kind, static_cast<int32_t>(DType::float32), int32_t{SRT_SUM}, 0, 0, 0, -1, 0, 0, 0})
    writer.put(value);
  writer.put(int64_t{0});
  writer.put(uint64_t{0});
  writer.put(1.0);
  writer.put(1.0);
  put_message(seed, {'n'});
  for (const auto& numbers : {shape, splits}) {
    writer.put(static_cast<uint8_t>(numbers.size()));
    for (int64_t number : numbers) writer.put(number);
  }
}

std::vector<Bytes> request_seeds() {
  std::vector<Bytes> all(2);
  for (int32_t kind : {SRT_ALLREDUCE, SRT_BROADCAST, SRT_ALLGATHER, SRT_REDUCESCATTER})
    put_request(all[0], kind, {4, 3});
  put_request(all[1], SRT_ALLTOALL, {4, 3}, {4});
  put_request(all[1], SRT_ADD_PROCESS_SET, {0});
  put_request(all[1], SRT_JOIN, {});
  put_request(all[1], SRT_BARRIER, {});
  return all;
}

}  // namespace

const Target request{"request", ask_anything, request_seeds};

}  // namespace sirtaki::fuzz
