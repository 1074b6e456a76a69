#include "mpi/communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <utility>

#include "native/dtype_map.h"
#include "native/requests.h"

namespace sirtaki::bindings {
namespace {

std::atomic<int> splits;       // so far; equal on all ranks, as they all call split
std::atomic<int> generations;  // of communicators that have ended
std::atomic<int32_t> whole;    // the process set of a communicator of all ranks; 0: not made yet

uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

const srt_dtype& int32() {
  static const DTypeMap known(std::initializer_list<std::pair<int, const char*>>{{0, "int32"}});
  return *known.find(0);
}

// A color and a key, as one rank passes them to a split.
struct Place {
  int32_t color, key;
};

// Gathers what each rank of the world has passed.
CallStatus gather(const std::string& name, const Place& own, std::vector<Place>& all) {
  Transfer transfer(SRT_ALLGATHER, name, {1, 2}, int32().code);
  transfer.request.process_set = whole;
  transfer.request.input = address(&own);
  transfer.request.output = address(all.data());
  transfer.request.output_bytes = static_cast<int64_t>(all.size() * sizeof(Place));
  return run({std::move(transfer)});
}

}  // namespace

srt_topology own_topology() {
  srt_topology topology{};
  topology.struct_size = sizeof topology;
  const ProcessContext context;
  if (context.get()) srt_get_topology(context.get(), &topology);
  return topology;
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  auto made = std::make_unique<Communicator>();
  made->name_ = "jax collective, group " + std::to_string(++splits);
  made->generation_ = generations;
  made->made_ = made->find_members(color, key);
  if (made->made_.is_ok()) made->made_ = made->add_process_set();
  return made;
}

void Communicator::end_all() {
  ++generations;
  whole = 0;
}

CallStatus Communicator::status() const {
  if (generation_ == generations) return made_;
  return {SRT_SHUT_DOWN, "JAX's collectives have ended with the ranks: hvd.shutdown() was called"};
}

CallStatus Communicator::find_members(int color, int key) {
  const srt_topology world = own_topology();
  std::vector<Place> all(static_cast<size_t>(world.size));
  if (CallStatus status = gather(name_ + ", being formed by all ranks", {color, key}, all); !status.is_ok())
    return status;
  for (int32_t rank = 0; rank < world.size; ++rank)
    if (all[static_cast<size_t>(rank)].color == color) members_.push_back(rank);
  const auto key_of = [&all](int32_t rank) { return all[static_cast<size_t>(rank)].key; };
  std::sort(members_.begin(), members_.end(), [&](int32_t a, int32_t b) { return key_of(a) < key_of(b); });
  rank_ = key;
  for (int i = 0; i < size(); ++i)
    if (key_of(members_[static_cast<size_t>(i)]) != i)
      return {SRT_MISMATCH, name_ +
                                ": the ranks run programs over different devices at the same time. Each program "
                                "over a part of the devices has to start in the same order on all ranks"};
  return {};
}

// Uses no set of the world's: a rank that has joined would take part in it with neutral elements.
CallStatus Communicator::add_process_set() {
  order_.resize(members_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [this](size_t a, size_t b) { return members_[a] < members_[b]; });
  std::vector<int64_t> ranks;
  for (const size_t position : order_) ranks.push_back(members_[position]);
  Transfer add(SRT_ADD_PROCESS_SET, name_ + " from rank " + std::to_string(ranks.front()), ranks, 0);
  add.request.root = 1;
  int64_t number = 0;
  CallStatus status = run({std::move(add)}, &number);
  process_set_ = static_cast<int32_t>(number);
  if (size() == own_topology().size) whole = process_set_;
  return status;
}

bool Communicator::is_ascending() const { return std::is_sorted(order_.begin(), order_.end()); }

Transfer Communicator::collective(int32_t kind, std::vector<int64_t> shape, const srt_dtype& dtype,
                                  const Buffers& buffers) const {
  Transfer made(kind, name_, std::move(shape), dtype.code);
  made.request.process_set = process_set_;
  made.request.input = address(buffers.input);
  made.request.output = address(buffers.output);
  return made;
}

CallStatus Communicator::allreduce(const Buffers& buffers, int64_t count, const srt_dtype& dtype,
                                   int32_t reduce_op) const {
  Transfer reduce = collective(SRT_ALLREDUCE, {count}, dtype, buffers);
  reduce.request.reduce_op = reduce_op;
  return run({std::move(reduce)});
}

CallStatus Communicator::reducescatter(const Buffers& buffers, int64_t count, const srt_dtype& dtype,
                                       int32_t reduce_op) const {
  const auto part = static_cast<size_t>(count * dtype.bytes);
  std::vector<char> ordered(is_ascending() ? 0 : part * members_.size());
  for (size_t i = 0; i < order_.size() && !ordered.empty(); ++i)
    std::memcpy(&ordered[part * i], static_cast<const char*>(buffers.input) + part * order_[i], part);
  const void* input = ordered.empty() ? buffers.input : ordered.data();
  Transfer reduce = collective(SRT_REDUCESCATTER, {size(), count}, dtype, {input, buffers.output});
  reduce.request.reduce_op = reduce_op;
  return run({std::move(reduce)});
}

CallStatus Communicator::allgather(const Buffers& buffers, int64_t count, const srt_dtype& dtype) const {
  const auto part = static_cast<size_t>(count * dtype.bytes);
  std::vector<char> ordered(is_ascending() ? 0 : part * members_.size());
  void* output = ordered.empty() ? buffers.output : ordered.data();
  Transfer gather = collective(SRT_ALLGATHER, {1, count}, dtype, {buffers.input, output});
  gather.request.output_bytes = static_cast<int64_t>(part * members_.size());
  CallStatus status = run({std::move(gather)});
  for (size_t i = 0; i < order_.size() && !ordered.empty() && status.is_ok(); ++i)
    std::memcpy(static_cast<char*>(buffers.output) + part * order_[i], &ordered[part * i], part);
  return status;
}

Transfer Communicator::send(const void* from, int64_t count, const srt_dtype& dtype, int to) const {
  return message(rank_, to, count, dtype, {from, nullptr});
}

Transfer Communicator::receive(void* to, int64_t count, const srt_dtype& dtype, int from) const {
  return message(from, rank_, count, dtype, {nullptr, to});
}

Transfer Communicator::message(int from, int to, int64_t count, const srt_dtype& dtype, const Buffers& buffers) const {
  Transfer made(SRT_SEND, name_ + ", " + std::to_string(from) + " to " + std::to_string(to), {count}, dtype.code);
  made.request.root = members_[static_cast<size_t>(from)];
  made.request.destination = members_[static_cast<size_t>(to)];
  made.request.input = address(buffers.input);
  made.request.output = address(buffers.output);
  return made;
}

}  // namespace sirtaki::bindings
