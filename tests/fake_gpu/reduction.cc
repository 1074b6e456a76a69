#include "fake_gpu/reduction.h"

#include <cstdint>
#include <type_traits>

#include "data/kernels/half.h"

namespace fake {
namespace {

template <typename T>
T widened(T value) {
  return value;
}
float widened(Float16 value) { return widen(value); }
float widened(BFloat16 value) { return widen(value); }

template <typename T, typename Wide>
T narrowed(Wide value) {
  if constexpr (std::is_same_v<T, Float16>) return narrow_float16(value);
  else if constexpr (std::is_same_v<T, BFloat16>) return narrow_bfloat16(value);
  else return static_cast<T>(value);
}

// Integers wrap around on overflow.
template <typename Wide>
struct Modular {
  using type = Wide;
};
template <typename Wide>
  requires std::is_integral_v<Wide>
struct Modular<Wide> {
  using type = std::make_unsigned_t<Wide>;
};

template <typename Wide>
Wide combined(int operation, Wide a, Wide b) {
  using Number = typename Modular<Wide>::type;
  const auto x = static_cast<Number>(a), y = static_cast<Number>(b);
  switch (operation) {
    case product: return static_cast<Wide>(x * y);
    case maximum: return a > b || b != b ? a : b;  // NaNs are ignored
    case minimum: return a < b || b != b ? a : b;
    default: return static_cast<Wide>(x + y);
  }
}

template <typename T>
struct Type {
  using type = T;
};

// Calls a function with the Type for a type number of nccl.h.
template <typename Call>
void with_type(int type, Call&& call) {
  switch (type) {
    case 0: return call(Type<int8_t>());
    case 1: return call(Type<uint8_t>());
    case 2: return call(Type<int32_t>());
    case 3: return call(Type<uint32_t>());
    case 4: return call(Type<int64_t>());
    case 5: return call(Type<uint64_t>());
    case 6: return call(Type<Float16>());
    case 7: return call(Type<float>());
    case 8: return call(Type<double>());
    case 9: return call(Type<BFloat16>());
    default: return;
  }
}

}  // namespace

size_t size_of(int type) {
  size_t size = 0;
  with_type(type, [&](auto of) { size = sizeof(typename decltype(of)::type); });
  return size;
}

void scale(int type, char* data, size_t count, const char* factor) {
  with_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    const auto by = widened(*reinterpret_cast<const T*>(factor));
    T* elements = reinterpret_cast<T*>(data);
    for (size_t i = 0; i < count; ++i) elements[i] = narrowed<T>(combined(product, widened(elements[i]), by));
  });
}

void reduce(int type, int operation, const std::vector<const char*>& inputs, size_t count, char* output) {
  with_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    using Wide = decltype(widened(T()));
    constexpr bool is_integral = std::is_integral_v<Wide>;
    T* results = reinterpret_cast<T*>(output);
    const auto input = [&](size_t rank, size_t i) {
      const Wide value = widened(reinterpret_cast<const T*>(inputs[rank])[i]);
      if (operation != average || is_integral) return value;
      const T part = narrowed<T>(1 / static_cast<Wide>(inputs.size()));
      return widened(narrowed<T>(combined(product, value, widened(part))));
    };
    for (size_t i = 0; i < count; ++i) {
      auto result = input(0, i);
      for (size_t rank = 1; rank < inputs.size(); ++rank) result = combined(operation, result, input(rank, i));
      if (operation == average && is_integral) result = static_cast<Wide>(result / static_cast<Wide>(inputs.size()));
      results[i] = narrowed<T>(result);
    }
  });
}

}  // namespace fake
