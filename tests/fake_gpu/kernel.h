// What NCCL does on the device: one or several calls at once, for one rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "fake_gpu/fake.h"
#include "fake_gpu/room.h"

namespace fake {

enum class Kind { allreduce, broadcast, reduce, send, receive };

// What all ranks that take part have to agree on. It travels before the data.
struct Signature {
  int kind, type, operation, root;
  uint64_t count;
  bool operator==(const Signature&) const = default;
};

struct Call {
  Kind kind;
  const char* input;
  char* output;
  size_t count;
  int type, operation;
  int peer;                  // send, receive; else the root
  std::vector<char> factor;  // scaled_sum
};

// What outlives a communicator's handle.
struct Fate {
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{0};    // ranks' calls do not fit together: the real library would only hang
  std::atomic<int> running{0};  // kernels that have not ended
};

std::vector<Range> ranges_of(const std::vector<Call>& calls);

// Ends when all has been moved, or the communicator is aborted: then outputs are as they were.
void run_kernel(Room& room, int rank, Fate& fate, const std::vector<Call>& calls);

}  // namespace fake
