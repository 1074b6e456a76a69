// All settings, one row each. The launcher's flags, the environment variables and the documentation are derived from
// this table: a new setting needs a row here, and the code that reads it.
//
// KNOB(name, type, default, choices, agreed or own, least, most, help): `agreed` settings must be equal on all ranks
// of a job; the bounds are in the setting's own unit.
#pragma once

// clang-format off
#define SIRTAKI_KNOBS(KNOB) \
  KNOB(fusion_threshold, "bytes", "64M", "", agreed, 0, 1e12,                                                          \
       "maximum bytes per fused operation; 0 disables fusion")                                                         \
  KNOB(cache_capacity, "integer", "8192", "", agreed, 0, 1e7,                                                          \
       "number of tensor names in the response cache; 0 disables the cache")                                           \
  KNOB(report_bytes, "bytes", "1M", "", own, 0, 1e12,                                                                  \
       "start negotiation as soon as this many bytes are queued")                                                      \
  KNOB(report_window, "seconds", "0.0003", "", own, 0, 10,                                                             \
       "start negotiation at the latest this long after the first tensor was queued")                                  \
  KNOB(plans_in_flight, "integer", "2", "", own, 1, 64,                                                                \
       "maximum plans in flight per process set; further tensors are batched until one finishes")                      \
  KNOB(partition_bytes, "bytes", "1M", "", agreed, 4'096, 1e12,                                                        \
       "with overlap_forward: gradients are sent in parts of at most this many bytes, the most urgent first")          \
  KNOB(control_fan_out, "integer", "16", "", agreed, 1, 4096,                                                          \
       "number of child hosts per node of the control tree")                                                           \
  KNOB(join_average, "choice", "all", "all|contributors", agreed, 0, 0,                                                \
       "divisor of an average after some ranks have joined: all ranks, or the ranks that still contribute")            \
  KNOB(late_results, "integer", "8", "", agreed, 1, 1'000,                                                             \
       "rounds in a row that may be decided without a rank that is late for a deadline, which keeps their results; "   \
       "beyond these, the other ranks wait for it")                                                                    \
  KNOB(late_report, "integer", "4", "", own, 1, 1e6,                                                                   \
       "report a rank that is late for a deadline this many times in a row, and again after twice as many")            \
  KNOB(transport, "choice", "auto", "auto|shm|socket|mpi", agreed, 0, 0,                                               \
       "data transport between ranks of one host: shared memory or sockets; mpi: MPI, which has started the ranks, "   \
       "moves the data between hosts")                                                                                 \
  KNOB(shared_tensors, "boolean", "1", "", agreed, 0, 1,                                                               \
       "let the ranks of a host share memory for tensors, which all-reduces then change where they are")               \
  KNOB(single_copy, "boolean", "1", "", agreed, 0, 1,                                                                  \
       "let the ranks of a host read each other's memory, where the system allows it, so that what only moves is "     \
       "copied once")                                                                                                  \
  KNOB(cpu_algorithm, "choice", "auto", "auto|direct|ring|recursive_doubling|hierarchical", agreed, 0, 0,              \
       "all-reduce algorithm between hosts: direct gives the same bits for every placement of ranks, auto selects "    \
       "the fastest")                                                                                                  \
  KNOB(gpu_backend, "choice", "auto", "auto|nccl|staged", agreed, 0, 0,                                                \
       "transport of tensors on GPUs: NCCL or staging through host memory; auto: NCCL if all ranks can use it")        \
  KNOB(gpu_libraries, "path", "", "", own, 0, 0,                                                                       \
       "colon-separated folders that are searched for libcuda.so.1 and libnccl.so.2 before the system's")              \
  KNOB(sockets_per_link, "integer", "1", "", agreed, 1, 16,                                                            \
       "number of connections between two ranks of different hosts")                                                   \
  KNOB(encrypt, "boolean", "0", "", agreed, 0, 1,                                                                      \
       "encrypt connections between hosts with TLS 1.3; requires OpenSSL and the job's key")                           \
  KNOB(chunk_bytes, "bytes", "0", "", agreed, 0, 64 << 20,                                                             \
       "size of the pieces in which tensors are transferred; 0: within a host what fits the processor's caches, "      \
       "between hosts 512K")                                                                                           \
  KNOB(kernel, "choice", "auto", "auto|baseline|avx2", own, 0, 0,                                                      \
       "instruction set of the reductions")                                                                            \
  KNOB(spin, "seconds", "0.0002", "", own, 0, 1,                                                                       \
       "how long a rank polls for the next operation before it sleeps; within an operation the time adapts to the "    \
       "duration of its steps")                                                                                        \
  KNOB(hand_over, "choice", "auto", "auto|early|late", own, 0, 0,                                                      \
       "torch: when the exchange of gradients starts: early, during the backward pass, late, at its end, or auto, by "  \
       "the cores that are free")                                                                                       \
  KNOB(autotune, "boolean", "0", "", agreed, 0, 1,                                                                     \
       "change settings while the job trains, and keep what makes its steps faster: docs/operations/autotune.md")          \
  KNOB(autotune_log, "path", "", "", own, 0, 0, "with autotune: a CSV file for rank 0's measurements and choice")      \
  KNOB(stall_report, "seconds", "5", "", own, 0.05, 1e6,                                                               \
       "report missing ranks after this long, and again after twice as long; a rank that does not answer is "          \
       "reported one second later")                                                                                    \
  KNOB(stall_deadline, "seconds", "1800", "", own, 0, 1e7,                                                             \
       "fail if a live rank has not submitted a tensor this long after the others; 0: never")                          \
  KNOB(progress_deadline, "seconds", "60", "", own, 0.05, 1e7,                                                         \
       "fail if a running operation has not moved a byte for this long; ten times as long while GPUs wait for others")   \
  KNOB(heartbeat, "seconds", "5", "", agreed, 0, 10'000,                                                              \
       "fail if another host's network stack has not answered for this long; 0: never")                                \
  KNOB(non_finite, "choice", "say", "say|stop|off", agreed, 0, 0,                                                 \
       "when a rank first adds an infinity or a NaN to a sum over ranks, in the CPU's memory: say which rank, tensor "  \
       "and line, stop the job before other ranks receive it, or off")                                                 \
  KNOB(log_descriptor, "integer", "2", "", own, -1, 1e6,                                                               \
       "file descriptor of the log; -1: no log")                                                                       \
  KNOB(recorder_operations, "integer", "4096", "", own, 1, 1e6,                                                        \
       "number of recent operations that each rank keeps for the failure report")                                      \
  KNOB(stall_report_file, "path", "", "", own, 0, 0,                                                                   \
       "also append each stall report to this file, as one line of JSON")                                              \
  KNOB(check_parameters, "integer", "-1", "", agreed, -1, 1e9,                                                         \
       "compare parameters across ranks every N gradient exchanges, starting with the second; -1: only in the "        \
       "second; 0: never, and check neither learning rates nor data")                                                  \
  KNOB(replay, "integer", "0", "", agreed, 0, 1e9,                                                                     \
       "every N steps of a DistributedOptimizer of torch, compute one batch again on all ranks, twice, and compare "    \
       "the bits: finds a machine that errs; 0: never")                                                                \
  KNOB(tensorflow_on_gpus, "boolean", "0", "", agreed, 0, 1,                                                           \
       "TensorFlow's tensors on GPUs stay there, by NCCL, in operations that know the sizes of their results; needs a " \
       "driver of CUDA 12.5")                                                                                          \
  KNOB(dump_directory, "path", "", "", own, 0, 0,                                                                      \
       "folder in which each rank writes its state to rank<N>.json if the job fails")
// clang-format on
