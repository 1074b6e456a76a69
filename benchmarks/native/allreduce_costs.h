// The costs of an all-reduce's parts in virtual time, and the transfers of a plan over a world of equal hosts.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "data/algorithm.h"
#include "data/hierarchical.h"
#include "data/link_operation.h"
#include "negotiating_world.h"

namespace virtual_network {

constexpr int64_t chunk_bytes_of_links = 512 << 10;  // the core's default

// Returns the numbers that describe an all-reduce, with their default values. memory: megabytes per second that a host
// copies through shared memory, or all hosts together if they share processors; message: nanoseconds of a processor for
// each frame sent or received; stream: megabytes per second that a processor sends or receives, 0: no limit.
inline Numbers allreduce_numbers() {
  Numbers numbers = world_numbers();
  numbers.add("bytes", 64 << 20);
  numbers.add("memory", 20'000);
  numbers.add("stream", 0);
  return numbers;
}

struct AllreduceCosts {
  explicit AllreduceCosts(const Numbers& numbers)
      : model(network_model(numbers)), memory(static_cast<double>(numbers.get("memory"))),
        stream(static_cast<double>(numbers.get("stream"))), message(numbers.get("message")) {
    must(memory > 0, "memory is too small");
    if (numbers.get("processors")) memory /= model.host_of(numbers.small("ranks") - 1) + 1;
  }

  // Returns the time that all members of a host need to pass a transfer through shared memory: each byte of the buffer
  // is copied once for each member.
  Nanoseconds through_memory(const Transfer& transfer) const {
    int64_t bytes = transfer.buffer.bytes() * static_cast<int64_t>(transfer.members.size());  // all-gather: of each
    for (const ScatterList& list : transfer.outgoing) bytes += list.bytes();
    return static_cast<Nanoseconds>(static_cast<double>(bytes) * static_cast<double>(transfer.members.size()) * 1e3 /
                                    memory);
  }

  // Returns the processor time for frames that are sent or received.
  Nanoseconds processing(const Traffic& traffic) const {
    const double copying = stream > 0 ? static_cast<double>(traffic.bytes) * 1e3 / stream : 0;
    return message * traffic.frames + static_cast<Nanoseconds>(copying);
  }

  Model model;
  double memory, stream;  // MB/s
  Nanoseconds message;
};

// Returns an all-reduce in place of one rank, among all ranks.
inline std::shared_ptr<Transfer> make_allreduce(const Numbers& numbers, int32_t rank, uint8_t* memory) {
  auto transfer = std::make_shared<Transfer>();
  transfer->plan = 1;
  transfer->own = static_cast<size_t>(rank);
  transfer->members.resize(static_cast<size_t>(numbers.get("ranks")));
  std::iota(transfer->members.begin(), transfer->members.end(), 0);
  transfer->buffer.add(memory, memory, numbers.get("bytes"));
  return transfer;
}

inline std::vector<int32_t> hosts_of(const Numbers& numbers) {
  std::vector<int32_t> hosts;
  for (int32_t rank = 0; rank < numbers.small("ranks"); ++rank) hosts.push_back(rank / numbers.small("each"));
  return hosts;
}

inline Algorithm choose_for(const Transfer& transfer, const std::vector<int32_t>& hosts) {
  return choose_algorithm("auto", count_members(transfer.members, hosts), transfer.buffer.bytes());
}

// Returns whether all ranks share a host, and therefore memory.
inline bool is_on_one_host(const Numbers& numbers) { return numbers.get("ranks") <= numbers.get("each"); }

// Returns the bytes of a frame on the wire.
inline int64_t frame_bytes(int64_t body) {
  return static_cast<int64_t>(sizeof(FrameHeader) + padded(static_cast<size_t>(body)));
}

// Returns the frames that a member of a transfer between hosts sends, by the algorithm that links choose: pairwise
// exchange in rounds of a chunk per member, or recursive doubling between two. Counts those to `is_wanted` members.
template <typename IsWanted>
Traffic frames_between(const Transfer& transfer, const std::vector<int32_t>& hosts, IsWanted&& is_wanted) {
  Traffic sent;
  const size_t members = transfer.members.size();
  const int64_t total = transfer.buffer.bytes();
  const bool is_direct = choose_for(transfer, hosts) == Algorithm::direct;
  must(is_direct || members == 2, "an algorithm has no schedule here");
  const int64_t round = chunk_bytes_of_links * (is_direct ? static_cast<int64_t>(members) : 1);
  for (int64_t begin = 0; begin < total; begin += round) {
    const int64_t bytes = std::min(round, total - begin);
    const int64_t own = is_direct ? slice_of(bytes, members, transfer.own).bytes : 0;
    for (size_t member = 0; member < members; ++member) {
      if (member == transfer.own || !is_wanted(transfer.members[member])) continue;
      sent.frames += is_direct ? 2 : 1;
      sent.bytes +=
          is_direct ? frame_bytes(slice_of(bytes, members, member).bytes) + frame_bytes(own) : frame_bytes(bytes);
    }
  }
  return sent;
}

// The results of an all-reduce: frames and bytes that leave the first host, and the time until all ranks have the sum.
struct AllreduceResult {
  Traffic of_host;
  Nanoseconds took = 0;
};

}  // namespace virtual_network
