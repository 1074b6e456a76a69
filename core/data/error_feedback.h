// Error feedback: what a wire format cannot express of a step's values is added to those of the next step.
#pragma once

#include <cstddef>

#include "data/kernels/kernels.h"

namespace sirtaki {

// Sums of squares, over blocks of finite numbers.
struct QuantisedSquares {
  double wanted = 0;  // of the values that were to be rounded
  double error = 0;   // of their differences from the rounded ones
};

// Adds the residuals to the values, replaces the sums by what an encoder makes of them, and the residuals by the
// differences. `residuals` may be nullptr: then there are none. In a block with a number that is not finite, all values
// become NaN, and the residuals stay as they were.
QuantisedSquares quantise(const WireKernels& kernels, float* values, float* residuals, size_t count);

}  // namespace sirtaki
