// Element types, declared once: code, name and size; the reductions' kernels are chosen from the same list.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sirtaki.h"

namespace sirtaki {

enum class DType : uint8_t {
  // clang-format off
  uint8, int8, uint16, int16, uint32, int32, uint64, int64,
  float16, bfloat16, float32, float64, boolean, complex64, complex128,
  float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz,
  complex32, float8_e8m0fnu, float4_e2m1fn_x2,
  // clang-format on
};
constexpr DType last_dtype = DType::float4_e2m1fn_x2;

// Returns the dtype with this code, nullptr if there is none.
const srt_dtype* dtype_entry(int code);
int dtype_count();

inline size_t dtype_bytes(DType dtype) { return static_cast<size_t>(dtype_entry(static_cast<int>(dtype))->bytes); }
inline const char* dtype_name(DType dtype) { return dtype_entry(static_cast<int>(dtype))->name; }

}  // namespace sirtaki
