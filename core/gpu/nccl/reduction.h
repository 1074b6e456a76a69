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
  Scale after;                // of the sums, by a kernel
};

// Returns a transfer's reduction; nothing if NCCL does not support the dtype, the reduce op or the factors. Transfers
// that do not reduce are made as bytes. `has_kernels`: all members can scale sums by kernels.
//
// NCCL multiplies the inputs of a sum by a factor of their own type, before the sum. So that results are the CPU's:
//
//   dtype                            before the sum, by NCCL              after it, by a kernel in float32
//   float32, float64                 all (within about a rounding)
//   bfloat16, if a power of two      all (exact: the range is float32's)
//   other bfloat16; float16          the power of two next to prescale    the rest
//
// Without kernels all of it comes before the sum: rounded to the type, and small products of float16 are lost.
std::optional<NcclReduction> nccl_reduction(const Transfer& transfer, bool has_kernels);

// Returns whether the result of a single member equals its input.
bool is_identity(const Transfer& transfer);

}  // namespace sirtaki
