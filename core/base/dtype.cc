#include "base/dtype.h"

#include <iterator>

namespace sirtaki {
namespace {

#define ENTRY(name, bytes, reducible) {static_cast<int32_t>(DType::name), #name, bytes, reducible}
constexpr srt_dtype table[] = {
    ENTRY(uint8, 1, 0),
    ENTRY(int8, 1, 0),
    ENTRY(uint16, 2, 0),
    ENTRY(int16, 2, 0),
    ENTRY(uint32, 4, 0),
    ENTRY(int32, 4, 1),
    ENTRY(uint64, 8, 0),
    ENTRY(int64, 8, 1),
    ENTRY(float16, 2, 1),
    ENTRY(bfloat16, 2, 1),
    ENTRY(float32, 4, 1),
    ENTRY(float64, 8, 1),
    {static_cast<int32_t>(DType::boolean), "bool", 1, 0},
    ENTRY(complex64, 8, 0),
    ENTRY(complex128, 16, 0),
    ENTRY(float8_e4m3fn, 1, 0),
    ENTRY(float8_e4m3fnuz, 1, 0),
    ENTRY(float8_e5m2, 1, 0),
    ENTRY(float8_e5m2fnuz, 1, 0),
};
#undef ENTRY

}  // namespace

int dtype_count() { return static_cast<int>(std::size(table)); }

const srt_dtype* dtype_entry(int code) { return code >= 0 && code < dtype_count() ? &table[code] : nullptr; }

}  // namespace sirtaki
