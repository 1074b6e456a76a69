// The kernels, written once; each kernel file includes this and compiles it for its own instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#include "data/kernels/float8.h"
#include "data/kernels/half.h"
#include "data/kernels/kernels.h"
#include "data/kernels/stream.h"

namespace {

using namespace sirtaki;

// Floats that are stored in 8 or 16 bits.
template <typename T>
constexpr bool is_small_float = !std::is_arithmetic_v<T>;
template <typename T>
constexpr bool is_small_integer = std::is_integral_v<T> && sizeof(T) < 4;
// The type that T is accumulated in. Integers wrap around like unsigned ones; those of 8 and 16 bits are truncated at
// the end.
template <typename T>
using Accumulator = std::conditional_t<is_small_float<T>, float, std::conditional_t<is_small_integer<T>, int32_t, T>>;

template <ReduceOp op, typename A>
inline A combine(A a, A b) {
  // A NaN on either side wins. The operator | serves vectors, too.
  if constexpr (op == ReduceOp::min) return ((a < b) | (a != a)) ? a : b;
  if constexpr (op == ReduceOp::max) return ((a > b) | (a != a)) ? a : b;
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    if constexpr (op == ReduceOp::sum) return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    if constexpr (op == ReduceOp::product) return static_cast<A>(static_cast<U>(a) * static_cast<U>(b));
  }
  if constexpr (op == ReduceOp::sum) return a + b;
  if constexpr (op == ReduceOp::product) return a * b;
}

template <ReduceOp op, typename A>
constexpr A neutral() {
  using Limits = std::numeric_limits<A>;
  if constexpr (op == ReduceOp::product) return 1;
  if constexpr (op == ReduceOp::min) return Limits::has_infinity ? Limits::infinity() : Limits::max();
  if constexpr (op == ReduceOp::max) return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  return 0;
}

// Converts a double to an integer. A value out of range saturates, because its conversion would be undefined.
template <typename A>
inline A to_integer(double value) {
  constexpr double most = static_cast<double>(std::numeric_limits<A>::max());
  constexpr double least = static_cast<double>(std::numeric_limits<A>::min());
  if (!(value > least)) return value != value ? A{0} : std::numeric_limits<A>::min();
  return value >= most ? std::numeric_limits<A>::max() : static_cast<A>(value);
}

// Functions of a block are not inlined: a call for each block costs nothing, and loops copied into each caller would
// double the time of compiling.
template <typename A>
[[gnu::noinline]] void scale_block(A* values, size_t count, Scale scale) {
  if constexpr (std::is_integral_v<A>) {
    if (scale.factor == 1.0) {
      const auto divisor = static_cast<A>(scale.divisor);
      for (size_t i = 0; i < count; ++i) values[i] /= divisor;
    } else {
      for (size_t i = 0; i < count; ++i)
        values[i] = to_integer<A>(static_cast<double>(values[i]) * scale.factor / static_cast<double>(scale.divisor));
    }
  } else {
    const auto factor = static_cast<A>(scale.factor), divisor = static_cast<A>(scale.divisor);
    if (divisor == 1)
      for (size_t i = 0; i < count; ++i) values[i] *= factor;
    else
      for (size_t i = 0; i < count; ++i) values[i] = values[i] * factor / divisor;
  }
}

constexpr size_t block = 1024;  // elements that stay in the first-level cache between steps

template <typename T, typename A>
[[gnu::noinline]] void load_block(A* __restrict out, const T* __restrict in, size_t count) {
  if constexpr (is_small_float<T>) widen_block(out, in, count);
  else std::copy_n(in, count, out);
}
template <typename T, typename A>
[[gnu::noinline]] void store_block(T* __restrict out, const A* __restrict in, size_t count) {
  if constexpr (is_small_float<T>) narrow_block(out, in, count);
  else std::copy_n(in, count, out);
}

// Gathers what a loop writes, to find out whether all of it is finite: a finite number minus itself has no bit that is
// set, an infinity or a NaN minus itself is a NaN. Integers are finite.
template <typename A>
struct FiniteBits {
  using Bits = std::conditional_t<std::is_same_v<A, Floats>, Words,
                                  std::conditional_t<std::is_same_v<A, double>, uint64_t, uint32_t>>;
  Bits bits = {};
  void add(A value) { bits |= std::bit_cast<Bits>(value - value); }
  bool are_finite() const {
    static constexpr Bits none = {};
    return !std::memcmp(&bits, &none, sizeof bits);
  }
};
template <typename A>
  requires std::is_integral_v<A>
struct FiniteBits<A> {
  void add(A) {}
  bool are_finite() const { return true; }
};

constexpr int few = 4;  // ranks

// Finds where the elements of each source from `at` on begin.
template <typename T>
inline void find_sources(const T** out, const void* const* sources, int count, size_t at) {
  for (int s = 0; s < count; ++s) out[s] = static_cast<const T*>(sources[s]) + at;
}

// Reduces two to four ranks in one pass over memory, and returns whether all results are finite: to look at a result
// that is in a register anyway costs next to nothing. The destination may be the same memory as one of the sources.
template <ReduceOp op, typename T>
[[gnu::noinline]] bool reduce_few(T* out, const T* const* sources, int count, size_t n) {
  const T* a = sources[0];
  const T* b = sources[1];
  const T* c = count > 2 ? sources[2] : nullptr;
  const T* d = count > 3 ? sources[3] : nullptr;
  FiniteBits<T> results;
  if (count == 2) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) results.add(out[i] = combine<op>(a[i], b[i]));
  } else if (count == 3) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) results.add(out[i] = combine<op>(combine<op>(a[i], b[i]), c[i]));
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) results.add(out[i] = combine<op>(combine<op>(combine<op>(a[i], b[i]), c[i]), d[i]));
  }
  return results.are_finite();
}

template <typename T>
[[gnu::noinline]] bool are_finite_block(const T* values, size_t count) {
  FiniteBits<T> all;
  for (size_t i = 0; i < count; ++i) all.add(values[i]);
  return all.are_finite();
}

template <typename T>
void scale_copy(void* destination, const void* source, size_t elements, Scale scale) {
  Accumulator<T> values[block];
  for (size_t at = 0; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    load_block(values, static_cast<const T*>(source) + at, n);
    if (!scale.is_one()) scale_block(values, n, scale);
    store_block(static_cast<T*>(destination) + at, values, n);
  }
}

template <typename T>
bool are_finite(const void* source, size_t elements) {
  using A = Accumulator<T>;
  for (size_t at = 0; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    const T* in = static_cast<const T*>(source) + at;
    if constexpr (std::is_same_v<T, A>) {
      if (!are_finite_block(in, n)) return false;
    } else {
      A values[block];
      load_block(values, in, n);
      if (!are_finite_block(values, n)) return false;
    }
  }
  return true;
}

// The next register's elements, widened; meanwhile a processor loads what is read next. By itself it does not look far
// enough ahead, as it meets many instructions per byte.
template <typename T>
inline Widened widen_ahead(const void* source, size_t at) {
  constexpr size_t ahead = 2048 / sizeof(T);
  const T* in = static_cast<const T*>(source) + at;
  __builtin_prefetch(in + ahead);
  return widen_register(in);
}

template <typename T>
concept FitsRegisters = requires(T* elements) { narrow_register(elements, widen_register(elements)); };

// Reduces any number of ranks in one pass over memory, a register at a time. Returns how many elements fill registers.
template <ReduceOp op, FitsRegisters T>
[[gnu::noinline]] size_t reduce_registers(T* out, const void* const* sources, int count, size_t elements, Scale scale,
                                          bool& are_finite) {
  constexpr size_t each = register_bytes / sizeof(T);
  const auto factor = static_cast<float>(scale.factor), divisor = static_cast<float>(scale.divisor);
  FiniteBits<Floats> results;
  size_t at = 0;
  for (; at + each <= elements; at += each) {
    Widened sum = widen_ahead<T>(sources[0], at);
    for (int s = 1; s < count; ++s) {
      const Widened next = widen_ahead<T>(sources[s], at);
      sum = {combine<op>(sum.first, next.first), combine<op>(sum.second, next.second)};
    }
    results.add(sum.first);
    results.add(sum.second);
    if (!scale.is_one()) sum = {sum.first * factor / divisor, sum.second * factor / divisor};
    narrow_register(out + at, sum);
  }
  are_finite = results.are_finite();
  return at;
}

// Reduces any number of ranks whose elements must be converted: block by block what is not done in registers.
template <ReduceOp op, typename T>
bool reduce_converted(T* out, const void* const* sources, int count, size_t elements, Scale scale) {
  using A = Accumulator<T>;
  A sum[block], next[block];
  bool is_finite = true;
  size_t at = 0;
  if constexpr (FitsRegisters<T>) at = reduce_registers<op>(out, sources, count, elements, scale, is_finite);
  for (; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    load_block(sum, static_cast<const T*>(sources[0]) + at, n);
    for (int s = 1; s < count; ++s) {
      load_block(next, static_cast<const T*>(sources[s]) + at, n);
      for (size_t i = 0; i < n; ++i) sum[i] = combine<op>(sum[i], next[i]);
    }
    is_finite &= are_finite_block(sum, n);
    if (!scale.is_one()) scale_block(sum, n, scale);
    store_block(out + at, sum, n);
  }
  return is_finite;
}

// Reduces more than a few ranks, block by block: the first few, then the sum so far and some more at a time. The last
// pass writes the destination, which may be the same memory as any source.
template <ReduceOp op, typename T>
bool reduce_many(T* out, const void* const* sources, int count, size_t elements, Scale scale) {
  T sum[block];
  bool is_finite = true;
  for (size_t at = 0; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    const T* parts[few];
    find_sources(parts, sources, few, at);
    reduce_few<op>(sum, parts, few, n);
    for (int next = few; next < count; next += few - 1) {
      const int more = std::min(few - 1, count - next);
      parts[0] = sum;
      find_sources(parts + 1, sources + next, more, at);
      is_finite &= reduce_few<op>(next + more == count ? out + at : sum, parts, 1 + more, n);
    }
    if (!scale.is_one()) scale_block(out + at, n, scale);
  }
  return is_finite;
}

template <ReduceOp op, typename T>
bool reduce(void* destination, const void* const* sources, int count, size_t elements, Scale scale) {
  auto* out = static_cast<T*>(destination);
  if (count == 1) {
    scale_copy<T>(out, sources[0], elements, scale);
    return true;
  }
  if constexpr (!std::is_same_v<T, Accumulator<T>>) {
    return reduce_converted<op>(out, sources, count, elements, scale);
  } else if (count > few) {
    return reduce_many<op>(out, sources, count, elements, scale);
  } else {
    const size_t stride = scale.is_one() ? elements : block;  // blocks, so that scaling finds them in the cache
    bool is_finite = true;
    for (size_t at = 0; at < elements; at += stride) {
      const size_t n = std::min(stride, elements - at);
      const T* parts[few];
      find_sources(parts, sources, count, at);
      is_finite &= reduce_few<op>(out + at, parts, count, n);
      if (!scale.is_one()) scale_block(out + at, n, scale);
    }
    return is_finite;
  }
}

template <ReduceOp op, typename T>
void fill(void* destination, size_t elements) {
  T value;
  if constexpr (is_small_float<T>) {
    const float wide = neutral<op, float>();
    narrow_block(&value, &wide, 1);
  } else {
    value = neutral<op, T>();
  }
  std::fill_n(static_cast<T*>(destination), elements, value);
}

template <typename T>
void to_double(double* destination, const void* source, size_t elements) {
  using A = Accumulator<T>;
  A values[block];
  for (size_t at = 0; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    load_block(values, static_cast<const T*>(source) + at, n);
    std::copy_n(values, n, destination + at);
  }
}

template <typename T>
void from_double(void* destination, const double* source, size_t elements) {
  using A = Accumulator<T>;
  A values[block];
  for (size_t at = 0; at < elements; at += block) {
    const size_t n = std::min(block, elements - at);
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<A>(source[at + i]);
    store_block(static_cast<T*>(destination) + at, values, n);
  }
}

template <typename T>
constexpr FiniteKernel finite_check_for() {
  if constexpr (std::is_integral_v<T>) return nullptr;
  else return are_finite<T>;
}

template <typename T>
constexpr DTypeKernels kernels_for() {
  using enum ReduceOp;
  return {{reduce<sum, T>, reduce<sum, T>, reduce<min, T>, reduce<max, T>, reduce<product, T>},
          {fill<sum, T>, fill<sum, T>, fill<min, T>, fill<max, T>, fill<product, T>},
          scale_copy<T>,
          std::is_integral_v<T> ? nullptr : to_double<T>,
          std::is_integral_v<T> ? nullptr : from_double<T>,
          finite_check_for<T>()};
}

template <typename Part>
struct Complex;

// Returns kernels that treat a complex number as its two parts, which is sufficient for sums and for real factors.
template <typename Part>
constexpr DTypeKernels complex_kernels_for() {
  constexpr auto sum = [](void* destination, const void* const* sources, int count, size_t elements, Scale scale) {
    return reduce<ReduceOp::sum, Part>(destination, sources, count, 2 * elements, scale);
  };
  constexpr auto zeros = [](void* destination, size_t elements) {
    fill<ReduceOp::sum, Part>(destination, 2 * elements);
  };
  constexpr auto scaled = [](void* destination, const void* source, size_t elements, Scale scale) {
    scale_copy<Part>(destination, source, 2 * elements, scale);
  };
  constexpr auto finite = [](const void* source, size_t elements) { return are_finite<Part>(source, 2 * elements); };
  return {{sum, sum}, {zeros, zeros}, scaled, nullptr, nullptr, finite};
}

// The kernels of a row of dtype.h.
template <typename T>
struct Element {
  static constexpr DTypeKernels kernels() { return kernels_for<T>(); }
};
template <typename Part>
struct Element<Complex<Part>> {
  static constexpr DTypeKernels kernels() { return complex_kernels_for<Part>(); }
};
template <>
struct Element<void> {
  static constexpr DTypeKernels kernels() { return {}; }
};

// Rows by dtype code. Booleans are bytes: the minimum, maximum and product of 0 and 1.
#define SIRTAKI_KERNELS(code, name, bytes, ops, type) Element<type>::kernels(),
constexpr DTypeKernels table[] = {SIRTAKI_DTYPES(SIRTAKI_KERNELS)};
#undef SIRTAKI_KERNELS

const DTypeKernels* kernels_of(DType dtype) {
  const DTypeKernels& kernels = table[static_cast<size_t>(dtype)];
  return kernels.scale ? &kernels : nullptr;
}

}  // namespace
