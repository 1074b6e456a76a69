// The costs of an all-reduce's parts in virtual time, and the transfers of a plan over a world of equal hosts.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "data/hierarchical/hierarchical.h"
#include "data/links/algorithm.h"
#include "data/links/link_operation.h"
#include "negotiating_world.h"
#include "transport/memory/shared_region.h"

namespace virtual_network {

constexpr int64_t chunk_bytes_of_links = 512 << 10;  // the core's default

// Returns the numbers that describe an all-reduce, with their default values. memory: megabytes per second that a host
// copies through shared memory, or all hosts together if they share processors; sums: megabytes per second that it
// reads to add them up, 0: as many as it copies; message: nanoseconds of a processor for each frame sent or received;
// stream: megabytes per second that a processor sends or receives, 0: no limit; look: nanoseconds of a shared processor
// for a rank that waits, when it has its turn; chunk: bytes of a chunk of shared memory.
inline Numbers allreduce_numbers() {
  Numbers numbers = world_numbers();
  numbers.add("bytes", 64 << 20);
  numbers.add("memory", 20'000);
  numbers.add("sums", 0);
  numbers.add("stream", 0);
  numbers.add("look", 2'000);
  numbers.add("chunk", 256 << 10);
  return numbers;
}

struct AllreduceCosts {
  explicit AllreduceCosts(const Numbers& numbers)
      : model(network_model(numbers)), stream(static_cast<double>(numbers.get("stream"))),
        message(numbers.get("message")), look(numbers.get("look")), chunk(numbers.get("chunk")) {
    must(numbers.get("memory") > 0, "memory is too small");
    must(chunk > 0, "chunk is too small");
    must(look > 0 || !numbers.get("processors"), "look is too small");
    const int64_t of_host = std::min(numbers.get("each"), numbers.get("ranks"));
    const auto sharers = static_cast<double>(numbers.get("processors") ? numbers.get("processors") : of_host);
    copied = static_cast<double>(numbers.get("memory")) / sharers;
    added = numbers.get("sums") ? static_cast<double>(numbers.get("sums")) / sharers : copied;
  }

  // Returns the time of a processor that copies bytes, or that reads them to add them up.
  Nanoseconds copying(int64_t bytes) const { return at_speed(bytes, copied); }
  Nanoseconds adding(int64_t bytes) const { return at_speed(bytes, added); }

  // Returns the processor time for frames that are sent or received.
  Nanoseconds processing(const Traffic& traffic) const {
    return message * traffic.frames + (stream > 0 ? at_speed(traffic.bytes, stream) : 0);
  }

  Model model;
  double copied, added, stream;  // MB/s, of a processor while all others work as well
  Nanoseconds message, look;
  int64_t chunk;  // bytes

 private:
  static Nanoseconds at_speed(int64_t bytes, double speed) {
    return static_cast<Nanoseconds>(static_cast<double>(bytes) * 1e3 / speed);
  }
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
