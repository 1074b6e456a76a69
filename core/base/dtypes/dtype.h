// Element types: their codes, names and sizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sirtaki.h"

// All element types, one row each, in the order of their codes; new ones go to the end.
//
// DTYPE(enumerator, name, bytes, reductions, kernel): the reductions are groups of dtype.cc; the kernel is the type
// with which data/kernels/body.h computes, void for types that are only moved. The dtype numbers of the frameworks
// are in bindings/tensorflow/kernel.cc and bindings/xla/call.cc, those of NCCL in gpu/nccl/reduction.cc.
// clang-format off
#define SIRTAKI_DTYPES(DTYPE) \
  DTYPE(uint8,            "uint8",            1,  numeric,  uint8_t)           \
  DTYPE(int8,             "int8",             1,  numeric,  int8_t)            \
  DTYPE(uint16,           "uint16",           2,  numeric,  uint16_t)          \
  DTYPE(int16,            "int16",            2,  numeric,  int16_t)           \
  DTYPE(uint32,           "uint32",           4,  numeric,  uint32_t)          \
  DTYPE(int32,            "int32",            4,  numeric,  int32_t)           \
  DTYPE(uint64,           "uint64",           8,  numeric,  uint64_t)          \
  DTYPE(int64,            "int64",            8,  numeric,  int64_t)           \
  DTYPE(float16,          "float16",          2,  floating, Float16)           \
  DTYPE(bfloat16,         "bfloat16",         2,  floating, BFloat16)          \
  DTYPE(float32,          "float32",          4,  floating, float)             \
  DTYPE(float64,          "float64",          8,  floating, double)            \
  DTYPE(boolean,          "bool",             1,  logical,  uint8_t)           \
  DTYPE(complex64,        "complex64",        8,  sums,     Complex<float>)    \
  DTYPE(complex128,       "complex128",       16, sums,     Complex<double>)   \
  DTYPE(float8_e4m3fn,    "float8_e4m3fn",    1,  numeric,  Float8E4M3fn)      \
  DTYPE(float8_e4m3fnuz,  "float8_e4m3fnuz",  1,  numeric,  Float8E4M3fnuz)    \
  DTYPE(float8_e5m2,      "float8_e5m2",      1,  numeric,  Float8E5M2)        \
  DTYPE(float8_e5m2fnuz,  "float8_e5m2fnuz",  1,  numeric,  Float8E5M2fnuz)    \
  DTYPE(complex32,        "complex32",        4,  sums,     Complex<Float16>)  \
  DTYPE(float8_e8m0fnu,   "float8_e8m0fnu",   1,  none,     void)              \
  DTYPE(float4_e2m1fn_x2, "float4_e2m1fn_x2", 1,  none,     void)
// clang-format on

namespace sirtaki {

#define SIRTAKI_CODE(code, ...) code,
enum class DType : uint8_t { SIRTAKI_DTYPES(SIRTAKI_CODE) count_ };
#undef SIRTAKI_CODE
constexpr int dtype_count = static_cast<int>(DType::count_);
constexpr DType last_dtype = static_cast<DType>(dtype_count - 1);

// Returns the dtype with this code, nullptr if there is none.
const srt_dtype* dtype_entry(int code);

inline size_t dtype_bytes(DType dtype) { return static_cast<size_t>(dtype_entry(static_cast<int>(dtype))->bytes); }
inline const char* dtype_name(DType dtype) { return dtype_entry(static_cast<int>(dtype))->name; }

}  // namespace sirtaki
