#include "base/dtypes/dtype.h"

namespace sirtaki {
namespace {

// The groups of reduce ops that dtype.h names.
constexpr int32_t bit(int32_t op) { return 1 << op; }
constexpr int32_t sums = bit(SRT_SUM) | bit(SRT_AVERAGE);
constexpr int32_t numeric = sums | bit(SRT_MIN) | bit(SRT_MAX) | bit(SRT_PRODUCT);
constexpr int32_t floating = numeric | bit(SRT_ADASUM);
constexpr int32_t logical = bit(SRT_MIN) | bit(SRT_MAX) | bit(SRT_PRODUCT);
constexpr int32_t none = 0;

#define SIRTAKI_ENTRY(code, name, bytes, ops, kernel) {static_cast<int32_t>(DType::code), name, bytes, ops},
constexpr srt_dtype dtypes[] = {SIRTAKI_DTYPES(SIRTAKI_ENTRY)};
#undef SIRTAKI_ENTRY

}  // namespace

const srt_dtype* dtype_entry(int code) { return code >= 0 && code < dtype_count ? &dtypes[code] : nullptr; }

}  // namespace sirtaki
