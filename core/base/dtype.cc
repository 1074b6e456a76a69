#include "base/dtype.h"

#include <iterator>

namespace sirtaki {
namespace {

constexpr int32_t bit(int32_t op) { return 1 << op; }
constexpr int32_t sums = bit(SRT_SUM) | bit(SRT_AVERAGE);
constexpr int32_t numeric = sums | bit(SRT_MIN) | bit(SRT_MAX) | bit(SRT_PRODUCT);
constexpr int32_t floating = numeric | bit(SRT_ADASUM);
constexpr int32_t logical = bit(SRT_MIN) | bit(SRT_MAX) | bit(SRT_PRODUCT);
constexpr int32_t none = 0;

#define ENTRY(name, bytes, ops) {static_cast<int32_t>(DType::name), #name, bytes, ops}
constexpr srt_dtype table[] = {
    ENTRY(uint8, 1, numeric),
    ENTRY(int8, 1, numeric),
    ENTRY(uint16, 2, numeric),
    ENTRY(int16, 2, numeric),
    ENTRY(uint32, 4, numeric),
    ENTRY(int32, 4, numeric),
    ENTRY(uint64, 8, numeric),
    ENTRY(int64, 8, numeric),
    ENTRY(float16, 2, floating),
    ENTRY(bfloat16, 2, floating),
    ENTRY(float32, 4, floating),
    ENTRY(float64, 8, floating),
    {static_cast<int32_t>(DType::boolean), "bool", 1, logical},
    ENTRY(complex64, 8, sums),
    ENTRY(complex128, 16, sums),
    ENTRY(float8_e4m3fn, 1, numeric),
    ENTRY(float8_e4m3fnuz, 1, numeric),
    ENTRY(float8_e5m2, 1, numeric),
    ENTRY(float8_e5m2fnuz, 1, numeric),
    ENTRY(complex32, 4, sums),
    ENTRY(float8_e8m0fnu, 1, none),
    ENTRY(float4_e2m1fn_x2, 1, none),
};
#undef ENTRY

}  // namespace

int dtype_count() { return static_cast<int>(std::size(table)); }

const srt_dtype* dtype_entry(int code) { return code >= 0 && code < dtype_count() ? &table[code] : nullptr; }

}  // namespace sirtaki
