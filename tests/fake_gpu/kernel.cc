#include "fake_gpu/kernel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <tuple>

#include "fake_gpu/reduction.h"

namespace fake {
namespace {

constexpr int invalid_usage = 5;

Signature signature_of(const Call& call) {
  const bool is_exchange = call.kind == Kind::send || call.kind == Kind::receive;
  const int kind = static_cast<int>(is_exchange ? Kind::send : call.kind);
  return {kind, call.type, call.operation, is_exchange ? 0 : call.peer, call.count};
}

bool sends_to(const Call& call, int rank, int other) {
  switch (call.kind) {
    case Kind::allreduce:
    case Kind::allgather:
    case Kind::reducescatter: return other != rank;
    case Kind::broadcast: return other != rank && rank == call.peer;
    case Kind::reduce: return other != rank && other == call.peer;
    case Kind::send: return other == call.peer;
    default: return false;
  }
}

bool receives_from(const Call& call, int rank, int other) {
  if (call.kind == Kind::receive) return other == call.peer;
  return call.kind != Kind::send && sends_to(call, other, rank);  // the other ranks make the same call
}

struct Message {
  std::vector<char> bytes;  // the signature, then the data
  size_t done = 0;

  bool is_complete() const { return done == bytes.size(); }
  const char* data() const { return bytes.data() + sizeof(Signature); }
};

// One call of a kernel, as messages to and from other ranks.
class Exchange {
 public:
  Exchange(const Call& call, int rank, int size) : call_(call), rank_(rank) {
    if (call.kind != Kind::receive) own_ = {made(rank), 0};
    for (int other = 0; other < size; ++other) {
      if (sends_to(call, rank, other)) outgoing[other] = {made(other), 0};
      if (receives_from(call, rank, other)) incoming[other] = {std::vector<char>(sizeof(Signature) + bytes()), 0};
    }
  }

  bool fits(const Message& message) const {
    Signature signature;
    std::memcpy(&signature, message.bytes.data(), sizeof signature);
    return message.done < sizeof signature || signature == signature_of(call_);
  }

  // Writes the output, when all messages have arrived.
  void finish() const {
    if (call_.kind == Kind::send || (call_.kind == Kind::reduce && call_.peer != rank_)) return;
    if (call_.kind == Kind::broadcast || call_.kind == Kind::receive) {
      put(call_.output, incoming.empty() ? own_.data() : incoming.begin()->second.data());
      return;
    }
    std::map<int, const char*> by_rank = {{rank_, own_.data()}};
    for (const auto& [other, message] : incoming) by_rank[other] = message.data();
    std::vector<const char*> inputs;
    for (const auto& [other, data] : by_rank) inputs.push_back(data);
    if (call_.kind != Kind::allgather) return reduce(call_.type, call_.operation, inputs, call_.count, call_.output);
    for (size_t rank = 0; rank < inputs.size(); ++rank) put(call_.output + rank * bytes(), inputs[rank]);
  }

  std::map<int, Message> outgoing, incoming;  // by rank

 private:
  size_t bytes() const { return call_.count * size_of(call_.type); }

  void put(char* to, const char* data) const {
    if (bytes()) std::memcpy(to, data, bytes());
  }

  // Returns the message to a rank, or the own part of a result.
  std::vector<char> made(int receiver) const {
    const Signature signature = signature_of(call_);
    std::vector<char> message(sizeof signature + bytes());
    std::memcpy(message.data(), &signature, sizeof signature);
    const size_t begin = call_.kind == Kind::reducescatter ? static_cast<size_t>(receiver) * bytes() : 0;
    if (call_.input) put(message.data() + sizeof signature, call_.input + begin);
    if (!call_.factor.empty()) scale(call_.type, message.data() + sizeof signature, call_.count, call_.factor.data());
    return message;
  }

  const Call& call_;
  int rank_;
  Message own_;
};

// Moves the bytes that can be moved now between this rank and another; messages go in the order of the calls. Returns
// whether all have moved.
bool move_with(Room& room, int rank, int other, std::vector<Exchange>& exchanges, Fate& fate) {
  bool all_done = true;
  for (Exchange& exchange : exchanges) {
    const auto found = exchange.outgoing.find(other);
    if (found == exchange.outgoing.end() || found->second.is_complete()) continue;
    Message& message = found->second;
    message.done += room.channel(rank, other).write(&message.bytes[message.done], message.bytes.size() - message.done);
    if (!message.is_complete()) {
      all_done = false;
      break;
    }
  }
  for (Exchange& exchange : exchanges) {
    const auto found = exchange.incoming.find(other);
    if (found == exchange.incoming.end() || found->second.is_complete()) continue;
    Message& message = found->second;
    // The signature is read first: the data behind a signature that differs does not belong to this call.
    const size_t wanted = (message.done < sizeof(Signature) ? sizeof(Signature) : message.bytes.size()) - message.done;
    message.done += room.channel(other, rank).read(&message.bytes[message.done], wanted);
    if (!exchange.fits(message)) fate.error = invalid_usage;
    if (fate.error || !message.is_complete()) return false;
  }
  return all_done;
}

}  // namespace

std::vector<Range> ranges_of(const std::vector<Call>& calls, int ranks) {
  std::vector<Range> ranges;
  for (const Call& call : calls) {
    const size_t bytes = call.count * size_of(call.type);
    const auto bytes_of = [&](Kind whole) { return call.kind == whole ? bytes * static_cast<size_t>(ranks) : bytes; };
    if (call.input) ranges.push_back({call.input, bytes_of(Kind::reducescatter)});
    if (call.output) ranges.push_back({call.output, bytes_of(Kind::allgather), true});
  }
  return ranges;
}

void run_kernel(Room& room, int rank, Fate& fate, const std::vector<Call>& calls) {
  std::vector<Exchange> exchanges;
  for (const Call& call : calls) exchanges.emplace_back(call, rank, room.size());
  const bool hangs = setting("hang") != 0;
  std::ignore = enter("ncclKernel");
  for (bool is_done = false; hangs || !is_done;) {
    if (fate.is_aborted) return;
    is_done = fate.error == 0;
    for (int other = 0; other < room.size() && fate.error == 0; ++other)
      is_done = move_with(room, rank, other, exchanges, fate) && is_done;
    if (!is_done || hangs) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  for (const Exchange& exchange : exchanges) exchange.finish();
}

}  // namespace fake
