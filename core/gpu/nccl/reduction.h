// The NCCL form of a reduction, if NCCL supports it: its data type and its operator.
#pragma once

#include <optional>

#include "data/operation.h"
#include "gpu/libraries/nccl.h"

namespace sirtaki {

struct NcclReduction {
  NcclDataType type = 0;
  int64_t element_bytes = 1;  // bytes of one element of that type: a complex number is two elements
  NcclReduceOp op = 0;        // unused if a factor needs an operator of its own
  bool has_factor = false;
  double factor = 1.0;        // each input is multiplied by it before the sum
  DType factor_dtype = DType::float32;
};

// Returns a transfer's reduction; nothing if NCCL does not support the dtype, the reduce op or the factors. Transfers
// that do not reduce are made as bytes.
std::optional<NcclReduction> nccl_reduction(const Transfer& transfer);

// Returns whether the result of a single member equals its input.
bool is_identity(const Transfer& transfer);

}  // namespace sirtaki
