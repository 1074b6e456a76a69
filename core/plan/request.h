// The request of one rank. The part that ranks have to agree on is the Signature.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtypes/dtype.h"
#include "base/dtypes/wire_format.h"
#include "plan/kind.h"
#include "sirtaki.h"

namespace sirtaki {

enum class ReduceOp : uint8_t {
  sum = SRT_SUM,
  average = SRT_AVERAGE,
  min = SRT_MIN,
  max = SRT_MAX,
  product = SRT_PRODUCT,
  adasum = SRT_ADASUM
};
constexpr ReduceOp last_reduce_op = ReduceOp::adasum;
constexpr size_t reduce_op_count = static_cast<size_t>(last_reduce_op) + 1;
const char* reduce_op_name(ReduceOp op);

// Returns whether a kind can reduce with this op: Adasum combines whole tensors.
inline bool reduces_with(Kind kind, ReduceOp op) {
  return op != ReduceOp::adasum || traits(kind).output == Output::whole;
}

// Returns the number of rows that one member keeps of a result that is cut into rows: the first members keep one
// more.
inline int64_t rows_of_member(int64_t rows, size_t members, size_t member) {
  const auto count = static_cast<int64_t>(members);
  return rows / count + (static_cast<int64_t>(member) < rows % count);
}

constexpr int32_t world_set = 0;           // the process set of all ranks
constexpr size_t longest_name = 1'024;     // bytes
constexpr size_t most_dimensions = 16;     // limit of a tensor; a process set's member list may be longer

// The terms under which an all-reduce is decided without some of its ranks. Each rank's n-th request of a name belongs
// to round n, and the round is part of the operation's name: rounds are operations of their own, so that a request that
// arrives after its round was decided is never taken for one of the next round.
struct Deadline {
  int64_t after = 0;  // nanoseconds from the first rank's request
  int32_t quorum = 1;  // ranks that must be there
  uint64_t round = 1;

  bool operator==(const Deadline&) const = default;
};

// Returns the part that a round appends to the name of its operation.
std::string round_suffix(uint64_t round);

struct Signature {
  std::string name;
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  int32_t process_set = world_set;
  int32_t root = 0;
  int32_t destination = 0;
  int32_t device = -1;
  int32_t priority = 0;
  int32_t group_size = 0;
  int64_t group_id = 0;
  uint64_t layout = 0;
  WireFormat wire_format = WireFormat::exact;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<int64_t> shape;
  std::vector<int64_t> splits;  // all-to-all only: rows for each member
  std::optional<Deadline> deadline;

  bool operator==(const Signature&) const = default;

  // Returns whether wire formats with blocks exist for it: sums of floats, which are then in host memory.
  bool may_be_encoded() const {
    return kind == Kind::allreduce && dtype == DType::float32 &&
           (reduce_op == ReduceOp::sum || reduce_op == ReduceOp::average);
  }

  // Returns whether it may have a deadline: a sum whose terms may be left out, of a tensor in host memory.
  bool may_have_deadline() const {
    return kind == Kind::allreduce && (reduce_op == ReduceOp::sum || reduce_op == ReduceOp::average) && device < 0 &&
           group_id == 0 && wire_format == WireFormat::exact && process_set == world_set;
  }

  // Returns the name without its round: all rounds of an operation with a deadline have the same.
  std::string series() const;

  // Returns whether only the ranks of the new process set submit it.
  bool is_addition_by_members() const { return kind == Kind::add_process_set && root != 0; }

  int64_t elements() const {
    if (changes_process_sets(kind)) return 0;  // its shape is a list of ranks
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    return count;
  }
  int64_t bytes() const { return elements() * static_cast<int64_t>(dtype_bytes(dtype)); }
  int64_t row_bytes() const {
    int64_t bytes = static_cast<int64_t>(dtype_bytes(dtype));
    for (size_t i = 1; i < shape.size(); ++i) bytes *= shape[i];
    return bytes;
  }
};

// Returns whether these are ranks of a world of this size, each once, in ascending order, and `rank` is one of them.
inline bool are_ranks_with(const std::vector<int64_t>& ranks, size_t world_size, int32_t rank) {
  const bool exist = !ranks.empty() && ranks.front() >= 0 && ranks.back() < static_cast<int64_t>(world_size);
  const bool ascend = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal()) == ranks.end();
  return exist && ascend && std::binary_search(ranks.begin(), ranks.end(), rank);
}

// A shared signature: it outlives the request in the response cache.
using SignaturePtr = std::shared_ptr<const Signature>;

// This rank's own number for one request in flight; 0: the rank has none (it has joined).
using Ticket = uint64_t;

struct Request {
  SignaturePtr signature;
  Ticket ticket = 0;
  bool absent = false;
};

}  // namespace sirtaki
