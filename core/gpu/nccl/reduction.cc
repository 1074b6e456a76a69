#include "gpu/nccl/reduction.h"

#include <algorithm>
#include <cmath>

namespace sirtaki {
namespace {

struct NcclType {
  DType dtype;
  NcclDataType type;
  DType part;  // the type of an element's parts
  bool takes_factors;
};

// The supported dtypes. Minimum, maximum and product of booleans (0 and 1) are those of bytes.
constexpr NcclType types[] = {
    {DType::int8, nccl_int8, DType::int8, false},
    {DType::uint8, nccl_uint8, DType::uint8, false},
    {DType::boolean, nccl_uint8, DType::uint8, false},
    {DType::int32, nccl_int32, DType::int32, false},
    {DType::uint32, nccl_uint32, DType::uint32, false},
    {DType::int64, nccl_int64, DType::int64, false},
    {DType::uint64, nccl_uint64, DType::uint64, false},
    {DType::float16, nccl_float16, DType::float16, true},
    {DType::complex32, nccl_float16, DType::float16, true},
    {DType::float32, nccl_float32, DType::float32, true},
    {DType::complex64, nccl_float32, DType::float32, true},
    {DType::float64, nccl_float64, DType::float64, true},
    {DType::complex128, nccl_float64, DType::float64, true},
    {DType::bfloat16, nccl_bfloat16, DType::bfloat16, true},
};

double whole_factor(const Transfer& transfer) { return transfer.prescale.factor * transfer.postscale.factor; }

bool is_power_of_two(double value) {
  int exponent;
  return std::frexp(value, &exponent) == 0.5;
}

// Divides the factors of 16-bit floats in what NCCL multiplies exactly before the sum, and the rest.
void divide_factors(const Transfer& transfer, NcclReduction& out) {
  const double prescale = std::abs(transfer.prescale.factor);
  const int least = out.factor_dtype == DType::float16 ? -14 : -126;  // of the numbers with all their bits
  const double next = prescale > 0 ? std::round(std::log2(prescale)) : 0;
  out.factor = std::exp2(std::clamp<double>(next, least, 1 - least));
  out.has_factor = out.factor != 1.0;
  out.op = nccl_sum;
  out.after = {whole_factor(transfer) / out.factor, transfer.postscale.divisor};
  if (out.after.factor == static_cast<double>(out.after.divisor)) out.after = {};
}

// Returns whether NCCL has the reduction, with the CPU's result. It sums 8-bit integers in 8 bits, so that an average
// of 100 and 100 would be -28.
bool choose_operator(const Transfer& transfer, bool takes_factors, bool has_kernels, NcclReduction& out) {
  const double factor = whole_factor(transfer);
  const int64_t divisor = transfer.postscale.divisor;
  switch (transfer.reduce_op) {
    case ReduceOp::min: out.op = nccl_min; return factor == 1.0;
    case ReduceOp::max: out.op = nccl_max; return factor == 1.0;
    case ReduceOp::product: out.op = nccl_product; return factor == 1.0;
    case ReduceOp::adasum: return false;
    case ReduceOp::sum:
    case ReduceOp::average: break;
  }
  const bool has_factors = !transfer.prescale.is_one() || !transfer.postscale.is_one();
  const bool is_exact = out.factor_dtype == DType::bfloat16 && is_power_of_two(factor / static_cast<double>(divisor));
  if (has_kernels && has_factors && takes_factors && out.element_bytes == 2 && !is_exact) {
    divide_factors(transfer, out);
    return true;
  }
  if (factor == 1.0 && (divisor == 1 || divisor == static_cast<int64_t>(transfer.members.size()))) {
    out.op = divisor == 1 ? nccl_sum : nccl_average;
    return divisor == 1 || out.element_bytes > 1;
  }
  out.has_factor = true;
  out.factor = factor / static_cast<double>(divisor);
  return takes_factors;
}

}  // namespace

std::optional<NcclReduction> nccl_reduction(const Transfer& transfer, bool has_kernels) {
  NcclReduction reduction;
  if (!reduces(transfer.kind)) {
    reduction.type = nccl_uint8;
    return reduction;
  }
  for (const NcclType& known : types) {
    if (known.dtype != transfer.dtype) continue;
    reduction.type = known.type;
    reduction.element_bytes = static_cast<int64_t>(dtype_bytes(known.part));
    reduction.factor_dtype = known.part;
    if (choose_operator(transfer, known.takes_factors, has_kernels, reduction)) return reduction;
  }
  return std::nullopt;
}

bool is_identity(const Transfer& transfer) {
  return !reduces(transfer.kind) || (whole_factor(transfer) == 1.0 && transfer.postscale.divisor == 1);
}

}  // namespace sirtaki
