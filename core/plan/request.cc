#include "plan/request.h"

#include "base/status.h"

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

std::string round_suffix(uint64_t round) { return format(" (round %llu)", static_cast<unsigned long long>(round)); }

std::string Signature::series() const {
  return deadline ? name.substr(0, name.size() - round_suffix(deadline->round).size()) : name;
}

}  // namespace sirtaki
