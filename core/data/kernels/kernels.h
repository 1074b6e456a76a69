// Arithmetic on elements: one function table per instruction set, chosen at run time. Each kernel file is compiled
// for its own instruction set and exports only its table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtypes/dtype.h"
#include "base/dtypes/wire_format.h"
#include "plan/request.h"

namespace sirtaki {

// The factor and the divisor of a reduced element. An average is a sum with a divisor, so that integers are divided
// exactly (truncating toward zero).
struct Scale {
  double factor = 1.0;
  int64_t divisor = 1;
  bool is_one() const { return factor == 1.0 && divisor == 1; }
};

// destination[i] = op over sources[0..count)[i] in that order, scaled. 16-bit floats are accumulated in 32 bits and
// rounded once. The destination may be one of the sources. Returns whether all results of several sources are finite
// before they are scaled.
using ReduceKernel = bool (*)(void* destination, const void* const* sources, int count, size_t elements, Scale scale);
// destination[i] = source[i] scaled
using ScaleKernel = void (*)(void* destination, const void* source, size_t elements, Scale scale);
// destination[i] = the op's neutral element
using FillKernel = void (*)(void* destination, size_t elements);

// Returns whether no element is an infinity or a NaN.
using FiniteKernel = bool (*)(const void* source, size_t elements);

struct DTypeKernels {
  ReduceKernel reduce[reduce_op_count] = {};  // by ReduceOp; average is sum; nullptr: not supported, or Adasum
  FillKernel fill[reduce_op_count] = {};
  ScaleKernel scale = nullptr;
  void (*to_double)(double* destination, const void* source, size_t elements) = nullptr;    // floating dtypes only
  void (*from_double)(void* destination, const double* source, size_t elements) = nullptr;  // rounds once, or twice
  FiniteKernel are_finite = nullptr;  // floating and complex dtypes only
};

// The kernels of a wire format that has blocks, for tensors or parts of them that begin with a block. `elements` are
// floats; their encoded form has encoded_size(elements) bytes, at any address.
struct WireKernels {
  void (*encode)(uint8_t* destination, const float* source, size_t elements) = nullptr;
  void (*decode)(float* destination, const uint8_t* source, size_t elements) = nullptr;
  void (*add)(float* destination, const uint8_t* source, size_t elements) = nullptr;  // adds what decode() writes
};

struct Kernels {
  const char* name;
  const DTypeKernels* (*of)(DType dtype);  // nullptr: not reducible
  // Copies data that another core reads next.
  void (*stream)(void* destination, const void* source, size_t bytes);
  const WireKernels* (*wire)(WireFormat format);  // nullptr: exact
};

const Kernels& baseline_kernels();
#ifdef SIRTAKI_HAVE_AVX2
const Kernels& avx2_kernels();
#endif

// Returns the table with this name, or the best one for "auto"; the baseline if this processor lacks the
// instructions.
const Kernels& choose_kernels(std::string_view wish);

}  // namespace sirtaki
