// Element types: the codes, names and sizes of dtype_table.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtypes/dtype_table.h"
#include "sirtaki.h"

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
