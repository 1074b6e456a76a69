// Compiles if our declarations of CUDA's and NCCL's functions, constants and structures are those of the real headers.
#define __CUDA_API_VERSION_INTERNAL  // declares also functions that a newer form has replaced
#include <cuda.h>
#include <nccl.h>

#include <cstddef>
#include <cstdio>

#include "declarations.h"
#include "gpu/libraries/cuda.h"
#include "gpu/libraries/nccl.h"

namespace {

using declarations::fits, declarations::same_calls;

constexpr sirtaki::CudaFunctions cuda;
constexpr sirtaki::NcclFunctions nccl;

#define COMPARE_CUDA(member, symbol, parameters) \
  static_assert(same_calls(cuda.member.address, decltype (&::symbol)()), #symbol " is declared differently");
#define COMPARE_NCCL(member, symbol, parameters) \
  static_assert(same_calls(nccl.member.address, decltype (&::symbol)()), #symbol " is declared differently");
SIRTAKI_CUDA_FUNCTIONS(COMPARE_CUDA)
SIRTAKI_CUDA_LATER_FUNCTIONS(COMPARE_CUDA)
SIRTAKI_NCCL_FUNCTIONS(COMPARE_NCCL)
static_assert(same_calls(nccl.error_string.address, decltype (&::ncclGetErrorString)()));
static_assert(same_calls(nccl.last_error.address, decltype (&::ncclGetLastError)()));

static_assert(sirtaki::cuda_success == CUDA_SUCCESS && sirtaki::cuda_not_ready == CUDA_ERROR_NOT_READY);
static_assert(sirtaki::cuda_out_of_memory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(sirtaki::cuda_stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(sirtaki::cuda_event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(sirtaki::cuda_device_of_pointer == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(sirtaki::cuda_capture_relaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sirtaki::cuda_source_in_stream_order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(sirtaki::cuda_memory_host_portable == CU_MEMHOSTALLOC_PORTABLE);

static_assert(sirtaki::nccl_success == ncclSuccess && sirtaki::nccl_in_progress == ncclInProgress);
static_assert(sirtaki::nccl_int8 == ncclInt8 && sirtaki::nccl_uint8 == ncclUint8);
static_assert(sirtaki::nccl_int32 == ncclInt32 && sirtaki::nccl_uint32 == ncclUint32);
static_assert(sirtaki::nccl_int64 == ncclInt64 && sirtaki::nccl_uint64 == ncclUint64);
static_assert(sirtaki::nccl_float16 == ncclFloat16 && sirtaki::nccl_bfloat16 == ncclBfloat16);
static_assert(sirtaki::nccl_float32 == ncclFloat32 && sirtaki::nccl_float64 == ncclFloat64);
static_assert(sirtaki::nccl_sum == ncclSum && sirtaki::nccl_product == ncclProd);
static_assert(sirtaki::nccl_max == ncclMax && sirtaki::nccl_min == ncclMin && sirtaki::nccl_average == ncclAvg);
static_assert(sirtaki::nccl_scalar_on_host == ncclScalarHostImmediate);
static_assert(sizeof(sirtaki::NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(sirtaki::NcclConfig::not_set == NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_VERSION_CODE >= sirtaki::oldest_nccl);

constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(sirtaki::NcclConfig().magic == theirs.magic);
static_assert(sizeof(sirtaki::NcclConfig) <= sizeof(ncclConfig_t));  // newer ones have more at their end

#define COMPARE_FIELD_OF(our_type, ours, their_type, theirs)                \
  static_assert(offsetof(our_type, ours) == offsetof(their_type, theirs) && \
                fits<decltype(our_type::ours), decltype(their_type::theirs)>())
#define COMPARE_FIELD(ours, theirs) COMPARE_FIELD_OF(sirtaki::NcclConfig, ours, ncclConfig_t, theirs)
COMPARE_FIELD(size, size);
COMPARE_FIELD(magic, magic);
COMPARE_FIELD(version, version);
COMPARE_FIELD(blocking, blocking);
COMPARE_FIELD(cga_cluster_size, cgaClusterSize);
COMPARE_FIELD(least_ctas, minCTAs);
COMPARE_FIELD(most_ctas, maxCTAs);
COMPARE_FIELD(network, netName);
COMPARE_FIELD(split_share, splitShare);

#define COMPARE_ATTRIBUTE(ours, theirs) COMPARE_FIELD_OF(sirtaki::CudaCopyAttributes, ours, CUmemcpyAttributes, theirs)
static_assert(sizeof(sirtaki::CudaCopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(sizeof(sirtaki::CudaPlace) == sizeof(CUmemLocation));
COMPARE_ATTRIBUTE(source_order, srcAccessOrder);
COMPARE_ATTRIBUTE(from, srcLocHint);
COMPARE_ATTRIBUTE(to, dstLocHint);
COMPARE_ATTRIBUTE(flags, flags);

}  // namespace

// Says what was compared with.
int main() { std::printf("CUDA %d, NCCL %d\n", CUDA_VERSION, NCCL_VERSION_CODE); }
