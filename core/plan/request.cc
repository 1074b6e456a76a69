#include "plan/request.h"

namespace sirtaki {

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
