// The device side of NCCL: one or several calls at once, for one rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "fake_gpu/fake.h"
#include "fake_gpu/room.h"

namespace fake {

enum class Kind { allreduce, broadcast, reduce, allgather, reducescatter, send, receive };

// The properties on which all participating ranks have to agree. They travel before the data.
struct Signature {
  int kind, type, operation, root;
  uint64_t count;
  bool operator==(const Signature&) const = default;
};

struct Call {
  Kind kind;
  const char* input;
  char* output;
  size_t count;              // of one rank's part
  int type, operation;
  int peer;                  // send, receive; else the root
  std::vector<char> factor;  // scaled_sum
};

// The state of a communicator that outlives its handle.
struct Fate {
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{0};    // the ranks' calls do not match: the real library would only hang
  std::atomic<int> running{0};  // kernels that have not ended
};

// Returns the memory that calls use, in a communicator of so many ranks.
std::vector<Range> ranges_of(const std::vector<Call>& calls, int ranks);

// Runs the calls until all data has been moved, or the communicator is aborted: then the outputs are unchanged.
void run_kernel(Room& room, int rank, Fate& fate, const std::vector<Call>& calls);

}  // namespace fake
