// The part of NCCL's API that is used, declared here so that nothing of NCCL is needed to build. Names and meanings
// are those of NVIDIA's "NCCL API" reference; tests/gpu/headers compares them with the real header.
#pragma once

#include <climits>
#include <cstddef>

#include "gpu/libraries/cuda.h"

namespace sirtaki {

using NcclResult = int;
using NcclCommunicator = struct NcclCommunicatorTag*;
using NcclDataType = int;
using NcclReduceOp = int;

constexpr NcclResult nccl_success = 0, nccl_in_progress = 7;
constexpr int oldest_nccl = 21900;        // 2.19.0
constexpr int groups_aborts_from = 22200;  // 2.22.0: aborts in a group take effect together, at its end

constexpr NcclDataType nccl_int8 = 0, nccl_uint8 = 1, nccl_int32 = 2, nccl_uint32 = 3, nccl_int64 = 4, nccl_uint64 = 5,
                       nccl_float16 = 6, nccl_float32 = 7, nccl_float64 = 8, nccl_bfloat16 = 9;
constexpr NcclReduceOp nccl_sum = 0, nccl_product = 1, nccl_max = 2, nccl_min = 3, nccl_average = 4;
constexpr int nccl_scalar_on_host = 1;  // NCCL reads it during the call

struct NcclUniqueId {
  char bytes[128];
};

// The layout of NCCL 2.19. The library reads `size` and `version`, and takes any further fields as not set.
struct NcclConfig {
  static constexpr int not_set = INT_MIN;
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = oldest_nccl;
  int blocking = 0;
  int cga_cluster_size = not_set, least_ctas = not_set, most_ctas = not_set;
  const char* network = nullptr;
  int split_share = not_set;
};

// X(member, symbol, parameters): each returns an NcclResult. `count` is the number of elements of the smaller buffer.
#define SIRTAKI_NCCL_FUNCTIONS(X)                                                                              \
  X(version, ncclGetVersion, (int* version))                                                                   \
  X(unique_id, ncclGetUniqueId, (NcclUniqueId*))                                                               \
  X(init, ncclCommInitRankConfig, (NcclCommunicator*, int size, NcclUniqueId, int rank, NcclConfig*))          \
  X(finalize, ncclCommFinalize, (NcclCommunicator))                                                            \
  X(destroy, ncclCommDestroy, (NcclCommunicator))                                                              \
  X(abort, ncclCommAbort, (NcclCommunicator))                                                                  \
  X(async_error, ncclCommGetAsyncError, (NcclCommunicator, NcclResult*))                                       \
  X(create_scaled_sum, ncclRedOpCreatePreMulSum,                                                               \
    (NcclReduceOp*, void* factor, NcclDataType, int residence, NcclCommunicator))                              \
  X(destroy_operator, ncclRedOpDestroy, (NcclReduceOp, NcclCommunicator))                                      \
  X(group_start, ncclGroupStart, ())                                                                           \
  X(group_end, ncclGroupEnd, ())                                                                               \
  X(allreduce, ncclAllReduce,                                                                                  \
    (const void* input, void* output, size_t count, NcclDataType, NcclReduceOp, NcclCommunicator, CudaStream)) \
  X(broadcast, ncclBroadcast,                                                                                  \
    (const void* input, void* output, size_t count, NcclDataType, int root, NcclCommunicator, CudaStream))     \
  X(reduce, ncclReduce,                                                                                        \
    (const void* input, void* output, size_t count, NcclDataType, NcclReduceOp, int root, NcclCommunicator,    \
     CudaStream))                                                                                              \
  X(allgather, ncclAllGather,                                                                                  \
    (const void* input, void* output, size_t count, NcclDataType, NcclCommunicator, CudaStream))               \
  X(reducescatter, ncclReduceScatter,                                                                          \
    (const void* input, void* output, size_t count, NcclDataType, NcclReduceOp, NcclCommunicator, CudaStream)) \
  X(send, ncclSend, (const void* input, size_t count, NcclDataType, int peer, NcclCommunicator, CudaStream))   \
  X(receive, ncclRecv, (void* output, size_t count, NcclDataType, int peer, NcclCommunicator, CudaStream))

struct NcclFunctions {
#define SIRTAKI_MEMBER(member, symbol, parameters) LibraryFunction<NcclResult parameters> member;
  SIRTAKI_NCCL_FUNCTIONS(SIRTAKI_MEMBER)
#undef SIRTAKI_MEMBER
  LibraryFunction<const char*(NcclResult)> error_string;        // ncclGetErrorString
  LibraryFunction<const char*(NcclCommunicator)> last_error;    // ncclGetLastError
};

}  // namespace sirtaki
