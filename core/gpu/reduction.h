// The form of a reduction in NCCL, if it supports it: which of its types, and which of its operators.
#pragma once

#include <optional>

#include "data/operation.h"
#include "gpu/nccl.h"

namespace sirtaki {

struct NcclReduction {
  NcclDataType type = 0;
  int64_t element_bytes = 1;  // bytes of that type: a complex number is two elements
  NcclReduceOp op = 0;        // unless a factor needs an operator of its own
  bool has_factor = false;
  double factor = 1.0;        // each input is multiplied with it before the sum
  DType factor_dtype = DType::float32;
};

// Returns a transfer's reduction; nothing if NCCL does not support the dtype, the reduce op or the factors. Transfers
// that do not reduce move as bytes.
std::optional<NcclReduction> nccl_reduction(const Transfer& transfer);

// Returns whether the result of a single member is its input.
bool is_identity(const Transfer& transfer);

}  // namespace sirtaki
