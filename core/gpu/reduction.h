// How NCCL does a reduction, if it can: in which of its types, with which of its operators.
#pragma once

#include <optional>

#include "data/operation.h"
#include "gpu/nccl.h"

namespace sirtaki {

struct NcclReduction {
  NcclDataType type = 0;
  int64_t element_bytes = 1;  // of that type: a complex number is two
  NcclReduceOp op = 0;        // where no factor has to be made an operator of its own
  bool has_factor = false;
  double factor = 1.0;        // each input is multiplied with it before the sum
  DType factor_dtype = DType::float32;
};

// Nothing: the dtype, the reduce op or the factors are beyond NCCL. What does not reduce, moves as bytes.
std::optional<NcclReduction> nccl_reduction(const Transfer& transfer);

// Among one: is the result the input?
bool is_identity(const Transfer& transfer);

}  // namespace sirtaki
