// The request of one rank. The part that ranks have to agree on is the Signature.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
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
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<int64_t> shape;
  std::vector<int64_t> splits;  // all-to-all only: rows for each member

  bool operator==(const Signature&) const = default;

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
