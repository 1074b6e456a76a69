// A communicator of MPI: some ranks of the world, in any order, which exchange data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mpi/transfer.h"
#include "native/call_status.h"
#include "sirtaki.h"

namespace sirtaki::bindings {

// Describes this process's rank. Its size is 0 if the process is not initialised.
srt_topology own_topology();

// The memory of a rank's part of an operation.
struct Buffers {
  const void* input;
  void* output;
};

class Communicator {
 public:
  // Makes a communicator of the ranks that pass the same color, in the order of their keys. All ranks of the world have
  // to call this, in the same order. XLA ignores a failure, so that the first use reports it.
  static std::unique_ptr<Communicator> split(int color, int key);
  // Makes all communicators fail from now on: the ranks that they know are about to end.
  static void end_all();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  CallStatus status() const;

  // `count`: elements of the input; for a reduce-scatter, of the output.
  CallStatus allreduce(const Buffers& buffers, int64_t count, const srt_dtype& dtype, int32_t reduce_op) const;
  CallStatus reducescatter(const Buffers& buffers, int64_t count, const srt_dtype& dtype, int32_t reduce_op) const;
  CallStatus allgather(const Buffers& buffers, int64_t count, const srt_dtype& dtype) const;

  // Describe one side of a message. The other rank describes the other side.
  Transfer send(const void* from, int64_t count, const srt_dtype& dtype, int to) const;
  Transfer receive(void* to, int64_t count, const srt_dtype& dtype, int from) const;

 private:
  CallStatus find_members(int color, int key);
  CallStatus add_process_set();
  bool is_ascending() const;
  Transfer collective(int32_t kind, std::vector<int64_t> shape, const srt_dtype& dtype, const Buffers& buffers) const;
  Transfer message(int from, int to, int64_t count, const srt_dtype& dtype, const Buffers& buffers) const;

  std::string name_;  // of its operations, too: XLA runs the collectives of a process one after another
  int generation_ = 0;
  CallStatus made_;
  std::vector<int32_t> members_;  // ranks of the world, in the communicator's order
  std::vector<size_t> order_;     // positions in members_, by ascending rank of the world: the core's order
  int rank_ = 0;
  int32_t process_set_ = 0;
};

}  // namespace sirtaki::bindings
