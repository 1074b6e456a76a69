// MPI over the rank of this process, behind the names of MPItrampoline's interface: jaxlib opens the library that
// MPITRAMPOLINE_LIB names, and XLA calls the functions below, from any of its threads. Each other function fails.
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "mpi/communicator.h"
#include "native/dtype_map.h"

namespace {

using namespace sirtaki::bindings;

using Comm = uintptr_t;
using Type = uintptr_t;
using Op = uintptr_t;

constexpr int failed = 1;                  // the only error code: the thread's last error has the text
constexpr size_t longest_text = 1024;      // that XLA has room for, with its end
constexpr uintptr_t unused = UINTPTR_MAX;  // the value of constants that XLA does not use
constexpr Comm world = 1;

thread_local std::string last_error;
thread_local std::vector<Transfer> messages;  // which this thread has described, and not exchanged

int result(const CallStatus& status) {
  if (status.is_ok()) return 0;
  last_error = status.text;
  messages.clear();  // XLA does not wait for them after a failure
  return failed;
}

int unsupported(const char* function) {
  return result({SRT_UNSUPPORTED, std::string(function) + ": sirtaki has only the functions of MPI that JAX calls"});
}

// XLA's dtypes: the value and the name of MPI's constant, and the core's name.
#define SRT_DTYPES(row)                                                                                       \
  row(0, BYTE, "uint8") row(1, INT8_T, "int8") row(2, INT16_T, "int16") row(3, INT32_T, "int32")              \
      row(4, INT64_T, "int64") row(5, UINT8_T, "uint8") row(6, UINT16_T, "uint16") row(7, UINT32_T, "uint32") \
          row(8, UINT64_T, "uint64") row(9, FLOAT, "float32") row(10, DOUBLE, "float64")                      \
              row(11, C_COMPLEX, "complex64") row(12, C_DOUBLE_COMPLEX, "complex128")

CallStatus find_dtype(Type type, const srt_dtype*& out) {
#define SRT_PAIR(value, name, core_name) {value, core_name},
  static const DTypeMap known(std::initializer_list<std::pair<int, const char*>>{SRT_DTYPES(SRT_PAIR)});
  out = known.find(static_cast<int32_t>(type));
  return out ? CallStatus{} : CallStatus{SRT_UNSUPPORTED, "sirtaki does not know this dtype of MPI"};
}

template <typename Action>
int guarded(const Action& action) {
  try {
    return result(action());
  } catch (const std::exception& problem) {
    return result({SRT_INTERNAL, std::string("unexpected in a collective of JAX: ") + problem.what()});
  }
}

// Calls `action` with a communicator and a dtype.
template <typename Action>
int with(Comm comm, Type type, const Action& action) {
  return guarded([&] {
    const auto& communicator = *reinterpret_cast<const Communicator*>(comm);
    const srt_dtype* dtype = nullptr;
    CallStatus status = communicator.status();
    if (status.is_ok()) status = find_dtype(type, dtype);
    return status.is_ok() ? action(communicator, *dtype) : status;
  });
}

}  // namespace

#define SRT_FUNCTION(name) \
  int MPIABI_##name() { return unsupported("MPI_" #name); }
#define SRT_CONSTANT(name)              \
  extern const uintptr_t MPIABI_##name; \
  const uintptr_t MPIABI_##name = unused;
#define SRT_VALUE(name, value)          \
  extern const uintptr_t MPIABI_##name; \
  const uintptr_t MPIABI_##name = value;

#pragma GCC visibility push(default)
extern "C" {

// The versions of the interface, and of what is behind it.
extern const int mpiabi_version_major, mpiabi_version_minor, mpiabi_version_patch;
extern const int mpiwrapper_version_major, mpiwrapper_version_minor, mpiwrapper_version_patch;
const int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 9, mpiwrapper_version_patch = 0;
void mpiwrapper_export_fortran_constants_() {}
int MPIXABI_Query_cuda_support() { return 0; }
int MPIXABI_Query_hip_support() { return 0; }
int MPIXABI_Query_ze_support() { return 0; }

#include "mpi/names.inc"
SRT_VALUE(SUCCESS, 0)
SRT_VALUE(UNDEFINED, unused)  // the color of ranks without a communicator
SRT_VALUE(COMM_WORLD, world)
#define SRT_DTYPE(value, name, core_name) SRT_VALUE(name, value)
SRT_DTYPES(SRT_DTYPE)
SRT_VALUE(SUM, SRT_SUM)
SRT_VALUE(MIN, SRT_MIN)
SRT_VALUE(MAX, SRT_MAX)
SRT_VALUE(PROD, SRT_PRODUCT)

int MPIABI_Init_thread(int*, char***, int required, int* provided) {
  *provided = required;
  return 0;
}
int MPIABI_Finalize() {
  Communicator::end_all();
  return 0;
}
// XLA makes communicators only in a thread that this confirms; here each thread may.
int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}
int MPIABI_Get_library_version(char* text, int* length) {
  *length = static_cast<int>(std::string_view("sirtaki").copy(text, 7));
  text[*length] = 0;
  return 0;
}
int MPIABI_Error_string(int, char* text, int* length) {
  *length = static_cast<int>(last_error.copy(text, longest_text - 1));
  text[*length] = 0;
  return 0;
}

int MPIABI_Comm_split(Comm, int color, int key, Comm* out) {
  *out = reinterpret_cast<Comm>(Communicator::split(color, key).release());
  return 0;
}
int MPIABI_Comm_free(Comm* comm) {
  delete reinterpret_cast<Communicator*>(*comm);
  return 0;
}
int MPIABI_Comm_rank(Comm comm, int* rank) {
  *rank = comm == world ? own_topology().rank : reinterpret_cast<const Communicator*>(comm)->rank();
  return 0;
}
int MPIABI_Comm_size(Comm comm, int* size) {
  *size = comm == world ? own_topology().size : reinterpret_cast<const Communicator*>(comm)->size();
  return 0;
}

int MPIABI_Allreduce(const void* from, void* to, int count, Type type, Op op, Comm comm) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    return ranks.allreduce({from, to}, count, dtype, static_cast<int32_t>(op));
  });
}
int MPIABI_Reduce_scatter(const void* from, void* to, const int* counts, Type type, Op op, Comm comm) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    return ranks.reducescatter({from, to}, counts[0], dtype, static_cast<int32_t>(op));
  });
}
int MPIABI_Allgather(const void* from, int count, Type type, void* to, int, Type, Comm comm) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    return ranks.allgather({from, to}, count, dtype);
  });
}
int MPIABI_Sendrecv(const void* from, int sent, Type type, int target, int, void* to, int received, Type, int source,
                    int, Comm comm, void*) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    return run({ranks.send(from, sent, dtype, target), ranks.receive(to, received, dtype, source)});
  });
}
// Messages start when their thread waits for one of them: XLA describes a permutation, and then waits for all of it.
int MPIABI_Isend(const void* from, int count, Type type, int target, int, Comm comm, uintptr_t*) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    messages.push_back(ranks.send(from, count, dtype, target));
    return CallStatus{};
  });
}
int MPIABI_Irecv(void* to, int count, Type type, int source, int, Comm comm, uintptr_t*) {
  return with(comm, type, [&](const Communicator& ranks, const srt_dtype& dtype) {
    messages.push_back(ranks.receive(to, count, dtype, source));
    return CallStatus{};
  });
}
int MPIABI_Wait(uintptr_t*, void*) {
  return guarded([] { return run(std::exchange(messages, {})); });
}

}  // extern "C"
#pragma GCC visibility pop
