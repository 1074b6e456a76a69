#include "data/error_feedback.h"

#include <algorithm>
#include <cmath>

namespace sirtaki {
namespace {

// Adds up squares in several lanes, which compilers turn into vectors without changing the order of additions.
class SquareSum {
 public:
  void add(const float* values, size_t count) {
    size_t i = 0;
    for (; i + lanes <= count; i += lanes)
      for (size_t lane = 0; lane < lanes; ++lane) sums_[lane] += double{values[i + lane]} * double{values[i + lane]};
    for (; i < count; ++i) sums_[0] += double{values[i]} * double{values[i]};
  }
  double total() const {
    double total = 0;
    for (double sum : sums_) total += sum;
    return total;
  }

 private:
  static constexpr size_t lanes = 8;
  double sums_[lanes] = {};
};

}  // namespace

QuantisedSquares quantise(const WireKernels& kernels, float* values, float* residuals, size_t count) {
  float wanted[wire_block], errors[wire_block];
  uint8_t encoded[encoded_size(wire_block)];
  SquareSum sum_of_wanted, sum_of_errors;
  for (size_t at = 0; at < count; at += wire_block) {
    const size_t n = std::min(wire_block, count - at);
    float* const rounded = values + at;
    for (size_t i = 0; i < n; ++i) wanted[i] = rounded[i] + (residuals ? residuals[at + i] : 0.0f);
    kernels.encode(encoded, wanted, n);
    kernels.decode(rounded, encoded, n);
    if (std::isnan(rounded[0])) continue;  // all of the block are NaN, or none is
    for (size_t i = 0; i < n; ++i) errors[i] = wanted[i] - rounded[i];
    if (residuals) std::copy_n(errors, n, residuals + at);
    sum_of_wanted.add(wanted, n);
    sum_of_errors.add(errors, n);
  }
  return {sum_of_wanted.total(), sum_of_errors.total()};
}

}  // namespace sirtaki
