// What one rank asks for. The part that ranks have to agree on is the Signature.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "sirtaki.h"

namespace sirtaki {

// The first four are the public srt kinds; the rest are the negotiator's own collectives.
enum class Kind : uint8_t {
  allreduce = SRT_ALLREDUCE,
  broadcast = SRT_BROADCAST,
  allgather = SRT_ALLGATHER,
  barrier = SRT_BARRIER,
  add_process_set,     // shape holds the member ranks, ascending
  remove_process_set,  // root holds the set's number
};
constexpr Kind last_kind = Kind::remove_process_set;
const char* kind_name(Kind kind);

// Ranks may bring different first dimensions.
inline bool is_ragged(Kind kind) { return kind == Kind::allgather; }

enum class ReduceOp : uint8_t {
  sum = SRT_SUM,
  average = SRT_AVERAGE,
  min = SRT_MIN,
  max = SRT_MAX,
  product = SRT_PRODUCT
};
constexpr ReduceOp last_reduce_op = ReduceOp::product;
const char* reduce_op_name(ReduceOp op);

constexpr int32_t world_set = 0;           // the process set of all ranks
constexpr size_t longest_name = 1'024;     // bytes
constexpr size_t most_dimensions = 16;     // of a tensor; a process set's member list may be longer

struct Signature {
  std::string name;
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  int32_t process_set = world_set;
  int32_t root = 0;
  int32_t device = -1;
  int32_t priority = 0;
  int32_t group_size = 0;
  int64_t group_id = 0;
  uint64_t layout = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<int64_t> shape;
  std::vector<int64_t> splits;  // of an all-to-all; in the wire format from the start

  bool operator==(const Signature&) const = default;

  int64_t elements() const {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    return count;
  }
  int64_t bytes() const { return elements() * static_cast<int64_t>(dtype_bytes(dtype)); }
};

// Shared, because it outlives the request in the response cache.
using SignaturePtr = std::shared_ptr<const Signature>;

// This rank's own number for one request in flight; 0 says that the rank has none (it has joined).
using Ticket = uint64_t;

struct Request {
  SignaturePtr signature;
  Ticket ticket = 0;
  bool absent = false;
};

}  // namespace sirtaki
