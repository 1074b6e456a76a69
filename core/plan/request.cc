#include "plan/request.h"

namespace sirtaki {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::allreduce: return "all-reduce";
    case Kind::broadcast: return "broadcast";
    case Kind::allgather: return "all-gather";
    case Kind::barrier: return "barrier";
    case Kind::reducescatter: return "reduce-scatter";
    case Kind::alltoall: return "all-to-all";
    case Kind::send: return "send";
    case Kind::add_process_set: return "add process set";
    case Kind::remove_process_set: return "remove process set";
    case Kind::join: return "join";
  }
  return "unknown kind";
}

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::average: return "average";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::product: return "product";
    case ReduceOp::adasum: return "adasum";
  }
  return "unknown reduce op";
}

}  // namespace sirtaki
