/* The C interface of sirtaki's core.
 *
 * A context is one rank: one member of a training job. Any number of contexts may live in one process;
 * nothing is shared between them. The text between the two "declarations" marks holds declarations only
 * and is passed to cffi unchanged, which is why data pointers are uintptr_t.
 *
 * Every struct that a caller fills begins with struct_size, set to its sizeof, so that the struct can grow.
 * Every function may be called from any thread unless stated otherwise. No function throws or aborts.
 */
#ifndef SIRTAKI_H
#define SIRTAKI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* <declarations> */
typedef int32_t srt_status;   /* SRT_OK or a kind of failure; srt_status_get lists them */
typedef int64_t srt_handle;   /* one operation in flight; 0 is never a handle */
typedef struct srt_context srt_context;
typedef struct srt_config srt_config;
typedef struct srt_buffer srt_buffer;
typedef struct srt_tls srt_tls;
typedef struct srt_tls_session srt_tls_session;

enum {
  SRT_OK = 0,
  SRT_IN_PROGRESS = 1,        /* not finished yet; not a failure */
  SRT_INVALID_ARGUMENT = 2,   /* the caller's mistake; nothing was queued */
  SRT_UNSUPPORTED = 3,        /* a dtype, layout or machine that this build cannot serve */
  SRT_MISMATCH = 4,           /* ranks disagree about an operation; the context stays alive */
  SRT_PEER_FINISHED = 5,      /* a rank that is needed has already shut down; the context stays alive */
  SRT_PEER_LOST = 6,          /* a rank died or its link broke; the context is dead */
  SRT_TIMEOUT = 7,            /* a deadline passed; the context is dead */
  SRT_ABORTED = 8,            /* a rank gave up, by srt_abort or a failure of its own; the context is dead */
  SRT_SHUT_DOWN = 9,          /* the context was shut down before the operation ended */
  SRT_OUT_OF_MEMORY = 10,
  SRT_PROTOCOL = 11,          /* malformed bytes came from a peer; the context is dead */
  SRT_SYSTEM = 12,            /* the operating system refused something */
  SRT_FORKED = 13,            /* called in a forked child */
  SRT_INTERNAL = 14,          /* a bug in sirtaki */
  SRT_DEVICE = 15,            /* a GPU, or NCCL, failed; the context is dead */
  SRT_NOT_FINITE = 16         /* a rank would have added an infinity or a NaN to a sum; the context is dead */
};

enum {
  SRT_ALLREDUCE = 0,
  SRT_BROADCAST = 1,
  SRT_ALLGATHER = 2,
  SRT_BARRIER = 3,
  SRT_REDUCESCATTER = 4,      /* dimension 0 is cut; the first shape[0] % size ranks get one row more */
  SRT_ALLTOALL = 5,           /* dimension 0 is cut by splits */
  SRT_SEND = 6,               /* from root to destination; these two submit it, and no other rank does */
  SRT_ADD_PROCESS_SET = 7,    /* shape holds its ranks, ascending; all ranks submit it, with root 0, or only its
                                 ranks, with root 1 and a name that no other ranks use for a set of theirs: there
                                 may be several such sets of the same ranks. See srt_result_number */
  SRT_REMOVE_PROCESS_SET = 8, /* root holds its number; all ranks submit it */
  SRT_JOIN = 9                /* this rank has no more data for the process set: until all its members have joined,
                                 it takes part in their operations with neutral elements. See srt_result_number */
};
enum { SRT_SUM = 0, SRT_AVERAGE = 1, SRT_MIN = 2, SRT_MAX = 3, SRT_PRODUCT = 4, SRT_ADASUM = 5 };

/* The format in which an all-reduce sends its elements between ranks that share no memory. A format with blocks has one
 * scale for each block of a tensor, its largest magnitude, and one code per element. */
enum {
  SRT_WIRE_EXACT = 0,         /* as they are */
  SRT_WIRE_INT8 = 1,          /* integers from -127 to 127 */
  SRT_WIRE_FP8 = 2            /* 8-bit floats (e4m3) up to 448 */
};

enum {
  SRT_REQUEST_ABSENT = 1,     /* this rank contributes nothing new; see srt_request.flags */
  SRT_REQUEST_QUEUE_SAME_NAME = 2, /* a request whose name is in flight is queued, not rejected */
  SRT_REQUEST_DEADLINE = 4, /* the all-reduce may be decided without ranks that are late; see srt_request.deadline */
  SRT_REQUEST_AFTER_ALL_STREAMS = 8 /* on a GPU: all streams of its primary context may produce the input; needs a
                                       driver of CUDA 12.5 */
};
enum {
  SRT_RESULT_UNTOUCHED = 1, /* absent on all ranks: the output was not written */
  SRT_RESULT_LATE = 2, /* this rank was late: the result is that of the other ranks */
  SRT_RESULT_OFFERED = 4 /* all-gather, all-to-all: the result is in the request's output */
};

typedef struct srt_error {
  srt_status status;
  char text[2044];
} srt_error;

typedef struct srt_status_entry {
  srt_status status;
  const char *name; /* "mismatch" */
  int32_t fatal; /* 1: the context is dead after it */
} srt_status_entry;

typedef struct srt_dtype {
  int32_t code; /* the value for srt_request.dtype */
  const char *name; /* "float32" */
  int32_t bytes; /* size of one element */
  int32_t reduce_ops; /* bits 1 << SRT_SUM and so on: valid reductions; every dtype can be moved */
} srt_dtype;

typedef struct srt_wire_format {
  int32_t code; /* SRT_WIRE_*: the value for srt_request.wire_format */
  const char *name; /* "int8" */
  int32_t block_elements; /* elements with a common scale; 0: it has no blocks */
} srt_wire_format;

typedef struct srt_knob {
  const char *name; /* "fusion_threshold"; the environment variable is SIRTAKI_FUSION_THRESHOLD */
  const char *type; /* "integer", "bytes", "seconds", "boolean", "choice" or "path" */
  const char *default_value;
  const char *choices; /* "auto|shm|socket" for a choice, else "" */
  const char *help;
  int32_t agreed; /* 1: all ranks of a job must have the same value */
} srt_knob;

/* The identity of a rank in messages. */
typedef struct srt_peer {
  const char *host;
  int32_t pid, host_index;
} srt_peer;

typedef struct srt_topology {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
  const srt_peer *peers; /* `size` entries, by rank */
} srt_topology;

/* The MPI library of the program: its functions, and a communicator of sirtaki's own, in which ranks are those of the
 * world and errors are returned. A handle is passed as it is, whether it is a pointer or an int: on x86-64 and arm64
 * both arrive in one register of 64 bits. Requests (8 bytes) and statuses (64) are aligned memory of the core. */
typedef struct srt_mpi {
  uint32_t struct_size;
  int32_t tag; /* of all messages of this world: a communicator may serve several worlds in turn */
  intptr_t comm;
  intptr_t byte_type; /* MPI_BYTE */
  int (*issend)(const void *from, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
  int (*iprobe)(int rank, int tag, intptr_t comm, int *flag, void *status);
  int (*irecv)(void *to, int count, intptr_t type, int rank, int tag, intptr_t comm, void *request);
  int (*test)(void *request, int *flag, void *status);
  int (*get_count)(const void *status, intptr_t type, int *count);
} srt_mpi;

/* Resources shared by the ranks of one host. Descriptors are duplicated: the caller may close its own. The rank in slot
 * 0 links them first, so that the others can find out whether they may read its memory. */
typedef struct srt_memory {
  uint32_t struct_size;
  int32_t fd; /* from srt_memory_create, mapped by the core; -1 with an address */
  uintptr_t address; /* an existing mapping (ranks as threads of one process), else 0 */
  int32_t slot; /* this rank's index in the following arrays */
  int32_t slot_count;
  const int32_t *ranks; /* the rank in each slot, ascending */
  const int32_t *engine_doorbells; /* one eventfd per slot: wakes that rank's engine thread */
  const int32_t *waiter_doorbells; /* one eventfd per slot: wakes that rank's waiting caller */
  const int32_t *process_fds; /* one pidfd per slot (readable when that process has ended); -1: none */
  const int32_t *socket_fds; /* one stream socket per slot, to that rank, watched only for end-of-stream; -1: none */
} srt_memory;

typedef struct srt_tensor {
  uintptr_t data;
  int32_t dtype, dimensions;
  int64_t shape[16];
  uint64_t bytes;
} srt_tensor;

/* Completion hook: called once, from the engine's own thread, with no lock held; must not call into Python. */
typedef void (*srt_complete_hook)(void *user, srt_status status, const char *error);
/* Allocation hook: returns memory for an output whose size is known only now; 0 if there is none. */
typedef uintptr_t (*srt_allocate_hook)(void *user, const srt_tensor *output);

typedef struct srt_request {
  uint32_t struct_size;
  int32_t kind, dtype;
  int32_t reduce_op; /* all-reduce, reduce-scatter */
  int32_t root; /* broadcast, send: a rank of the world; process sets: see their kinds */
  int32_t destination; /* send: a rank of the world */
  int32_t process_set; /* 0: all ranks */
  int32_t device; /* -1: the CPU; else the GPU that the memory is on. A rank uses one GPU. Join: the GPU on which
                     this rank takes part in GPU operations of other ranks, if it has not used one yet */
  int32_t priority; /* higher is sent first. Requests above 0 are negotiated in portions of
                       partition_bytes, so that later ones of a higher priority overtake them */
  uint32_t flags; /* SRT_REQUEST_*. An absent request contributes its input as it is or, without an input, neutral
                     elements (all-reduce). If it is absent on all ranks, nothing happens (SRT_RESULT_UNTOUCHED) */
  int32_t group_size; /* members of the group; 0 without a group */
  int64_t group_id; /* members of a group complete together. The same on all ranks; 0: none, or a group without
                       names, which is numbered as a whole: requests of one kind that are submitted together */
  const char *name; /* UTF-8, 1 to 1,024 bytes; NULL: numbered per process set and kind */
  int32_t dimensions; /* up to 16 */
  const int64_t *shape;
  uint64_t layout; /* 0: row-major; else any number that identifies the stride order */
  const int64_t *splits; /* all-to-all: rows of dimension 0 for each member of the process set */
  int32_t split_count;
  int32_t wire_format; /* SRT_WIRE_*. All-reduce of float32 on the CPU, SRT_SUM or SRT_AVERAGE; else
                          SRT_WIRE_EXACT */
  double prescale, postscale; /* all-reduce, reduce-scatter; 1.0 for none */
  uintptr_t input;
  uintptr_t output; /* may be the input. Reduce-scatter: this rank's rows. All-gather, all-to-all: 0, or
                       memory for a result of output_bytes bytes. The core allocates another result if
                       it has another size, or would overwrite an input: see srt_output */
  int64_t output_bytes; /* all-gather, all-to-all with an output */
  uintptr_t stream; /* on a GPU: the CUDA stream whose work queued so far produces the input */
  srt_complete_hook on_complete; /* native callers only, else NULL */
  srt_allocate_hook allocate; /* native callers only, else NULL */
  void *user;
  double deadline; /* with SRT_REQUEST_DEADLINE: seconds from the first rank's request, after which the
                      all-reduce is decided without the ranks that are missing, if `quorum` ranks are there.
                      Each rank's n-th request of a name belongs to round n: a late rank receives the
                      result of each round that it has missed when it submits that round, with
                      SRT_RESULT_LATE. An average divides by the contributors: srt_result_contributors */
  int32_t quorum;
} srt_request;

/* Tables. Each count and entry is fixed for a build. */
const char *srt_version(void);
int32_t srt_status_count(void);
srt_status srt_status_get(int32_t index, srt_status_entry *out);
int32_t srt_dtype_count(void);
srt_status srt_dtype_get(int32_t index, srt_dtype *out);
int32_t srt_wire_format_count(void);
srt_status srt_wire_format_get(int32_t index, srt_wire_format *out);
int32_t srt_knob_count(void);
srt_status srt_knob_get(int32_t index, srt_knob *out);
const char *srt_kernel_name(void); /* the instruction set that reductions use here: "avx2" or "baseline" */
int32_t srt_usable_cores(void); /* by affinity and cgroup quotas, at least 1 */

/* Configuration: knobs by name, each checked when it is set. */
srt_config *srt_config_create(void);
srt_status srt_config_set(srt_config *, const char *name, const char *value, srt_error *);
srt_status srt_config_get(const srt_config *, const char *name, char *value, int32_t capacity);
int64_t srt_config_integer(const srt_config *, const char *name); /* bytes, ns, a choice's position; -1: no such knob */
void srt_config_destroy(srt_config *);

/* Descriptors that bootstrap makes and passes between processes; each function returns -1 on failure. */
int64_t srt_memory_bytes(const srt_config *, int32_t slot_count);
int32_t srt_memory_create(const srt_config *, int32_t slot_count, srt_error *); /* a sealed memfd, zeroed */
int32_t srt_doorbell_create(srt_error *); /* an eventfd */
int32_t srt_process_open(srt_error *); /* a pidfd of the calling process */

/* Encryption: TLS 1.3, by OpenSSL, which is opened at run time. Each process generates its own certificate; both sides
 * of a connection receive the fingerprint (32 bytes, SHA-256) of the peer's beforehand, and accept no other. */
srt_tls *srt_tls_create(const char *library, srt_error *); /* NULL: libssl.so.3, else libssl.so.1.1 */
void srt_tls_fingerprint(const srt_tls *, uint8_t *out);
void srt_tls_destroy(srt_tls *); /* its sessions may outlive it */
/* Opens a session on a connected stream socket, which the caller still owns. A session is for one thread at a time, and
 * never blocks. */
srt_tls_session *srt_tls_open(const srt_tls *, int32_t fd, int32_t accepts, const uint8_t *peer, srt_error *);
/* Advances the handshake. SRT_IN_PROGRESS: call again when the socket is readable, or writable if srt_tls_wants_write.
 * SRT_PEER_LOST: the peer has closed the connection. */
srt_status srt_tls_handshake(srt_tls_session *, srt_error *);
int32_t srt_tls_wants_write(const srt_tls_session *);
/* Returns the number of bytes moved, 0 if none can move now, -1 at the end. After a partial write, the next write must
 * begin with the rest. */
int64_t srt_tls_write(srt_tls_session *, const void *from, int64_t bytes);
int64_t srt_tls_read(srt_tls_session *, void *to, int64_t bytes);
int64_t srt_tls_unread(const srt_tls_session *); /* 0 if everything received from the socket was read */
void srt_tls_close(srt_tls_session *); /* sends nothing to the peer */

/* Life cycle of a rank: create, add links, start, use, shut down, destroy. */
srt_status srt_create(const srt_config *, const srt_topology *, srt_context **out, srt_error *);
srt_status srt_link_socket(srt_context *, int32_t peer, int32_t fd, srt_error *); /* takes ownership of fd on success */
srt_status srt_link_tls(srt_context *, int32_t peer, int32_t fd, srt_tls_session *, srt_error *); /* takes over both */
srt_status srt_link_memory(srt_context *, const srt_memory *, srt_error *);
/* Has MPI move the data to and from `count` peers on other hosts. They need the links of srt_first_links as well, which
 * then carry control frames only. Needs MPI_THREAD_MULTIPLE: the thread that drives the context calls MPI. The
 * communicator must exist for as long as the context, and longer if a rank fails. */
srt_status srt_link_mpi(srt_context *, const int32_t *peers, int32_t count, const srt_mpi *, srt_error *);
/* Writes the peers to which srt_start needs a link, ascending, at most `capacity`; returns their count. Ranks that
 * share memory need no other link. All others are needed as well, unless srt_allow_link_requests is called before
 * srt_start: then operations ask for links that are missing, on both ranks of each. A link is complete when the
 * connections of the setting sockets_per_link are there, or one within a host, in the same order on both sides. */
int32_t srt_first_links(const srt_context *, int32_t *out, int32_t capacity);
void srt_allow_link_requests(srt_context *);
/* Sleeps until links are asked for, and writes their peers; `count` receives how many. SRT_IN_PROGRESS: the time is up.
 * Any other failure: no further link is needed. */
srt_status srt_wait_link_requests(srt_context *, int32_t *out, int32_t capacity, int32_t *count, int32_t timeout_ms);
void srt_fail_link(srt_context *, int32_t peer, const char *text); /* it cannot be made: the peer counts as lost */
srt_status srt_start(srt_context *, srt_error *);
/* Allocates zeroed memory that the ranks of this host share. An all-reduce of tensors that lie in it on all ranks, and
 * whose results replace them, works there, without copies. It outlives the context. NULL: none, see the error. */
srt_buffer *srt_buffer_create(srt_context *, int64_t bytes, srt_error *);
uintptr_t srt_buffer_address(const srt_buffer *);
void srt_buffer_fork_child(srt_buffer *); /* in a forked child: what it writes from now on stays there */
void srt_buffer_destroy(srt_buffer *); /* no operation may use it */
srt_status srt_abort(srt_context *, const char *reason); /* all open handles of all ranks fail with this text */
srt_status srt_shutdown(srt_context *, int32_t timeout_ms); /* waits for operations in flight, then says goodbye */
void srt_destroy(srt_context *); /* no other call may be running */
void srt_fork_child(srt_context *); /* in a forked child: closes descriptors, takes no lock */

/* Sets the process's context, for operations inside programs that a framework has compiled: these outlive contexts, and
 * cannot refer to one. NULL clears it, which must precede srt_destroy. Returns when no thread uses the old one. */
void srt_set_process_context(srt_context *);
/* Acquires the process's context briefly, on one thread: to queue operations, never to wait for them. NULL: there
 * is no context, and nothing to release. */
srt_context *srt_acquire_process_context(void);
void srt_release_process_context(void);

/* Operations. Either all requests of a call are queued, or none. */
srt_status srt_enqueue(srt_context *, const srt_request *, int32_t count, srt_handle *out, srt_error *);
/* Enqueues and waits, without waking the engine's thread. After SRT_IN_PROGRESS the handles are valid; out[0] is 0 if
 * nothing was queued. The status is that of the first handle that failed. */
srt_status srt_run(srt_context *, const srt_request *, int32_t count, int32_t timeout_ms, srt_handle *out, srt_error *);
/* Starts operations of native callers that must not wait, and whose requests have hooks. SRT_IN_PROGRESS: the hooks
 * will be called. SRT_OK: all operations ended within microseconds, successfully or not, and no hook is called. Any
 * other status: nothing was queued. */
srt_status srt_enqueue_or_complete(srt_context *, const srt_request *, int32_t count, srt_handle *out, srt_error *);
void srt_flush(srt_context *); /* negotiates what is queued, without waiting for more */
/* Changes a setting of all ranks from rank 0's next Decision on, in a job with the setting autotune. */
srt_status srt_change_setting(srt_context *, const char *name, const char *value, srt_error *);
int64_t srt_live_setting(srt_context *, const char *name); /* in use, as by srt_config_integer; -1: unknown */
srt_status srt_poll(srt_context *, srt_handle); /* SRT_IN_PROGRESS, or the operation's final status */
/* Waits for all handles; the status is that of the first handle that failed. */
srt_status srt_wait(srt_context *, const srt_handle *, int32_t count, int32_t timeout_ms);
/* Watches operations that nobody waits for: srt_wait_watched reports each once, when it has ended or, on a GPU, as soon
 * as srt_wait_on_stream would not block. Negotiates what is queued, without waiting for more. */
srt_status srt_watch(srt_context *, const srt_handle *, int32_t count, srt_error *);
/* Sleeps until watched operations can be reported, and writes their handles, in the order of their ends; `count`
 * receives how many. It never drives the engine. SRT_IN_PROGRESS: the time is up. Any other failure is why the context
 * is dead: all watched operations have been reported. */
srt_status srt_wait_watched(srt_context *, srt_handle *out, int32_t capacity, int32_t *count, int32_t timeout_ms);
/* Blocks until operations on GPU tensors are launched; from then on the CUDA stream waits for them, not the
 * host. A later failure ends the context, and is reported by the next call. */
srt_status srt_wait_on_stream(srt_context *, const srt_handle *, int32_t count, uintptr_t stream, int32_t timeout_ms);
/* Makes srt_wait_on_stream block until the operations have ended, from now on, so that it reports every failure. */
void srt_wait_on_host(srt_context *);
srt_status srt_output(srt_context *, srt_handle, srt_tensor *out); /* valid until the handle is released */
uint32_t srt_result(srt_context *, srt_handle); /* SRT_RESULT_* of a finished handle; on a GPU of a launched handle */
int64_t srt_result_number(srt_context *, srt_handle); /* the rank that joined last, or the added process set */
/* Writes the rows received from each member in a finished all-to-all, at most `capacity` numbers; returns how many. */
int32_t srt_result_splits(srt_context *, srt_handle, int64_t *out, int32_t capacity);
/* Writes the contributors to an all-reduce with a deadline, ascending, at most `capacity`; returns their count. */
int32_t srt_result_contributors(srt_context *, srt_handle, int32_t *out, int32_t capacity);
/* Writes the ranks of a process set, ascending, at most `capacity`; returns their count, -1 if there is no such set. */
int32_t srt_process_set(srt_context *, int32_t number, int32_t *out, int32_t capacity);
int64_t srt_own_rows(srt_context *, int32_t process_set, int64_t rows); /* this rank's after a reduce-scatter */
/* Returns 1 if wire formats affect this rank's all-reduces in a process set: not all of its ranks share memory. */
int32_t srt_has_wire_format(srt_context *, int32_t process_set);
void srt_get_topology(srt_context *, srt_topology *out); /* of this rank; peers is NULL */
const char *srt_handle_error(srt_context *, srt_handle); /* "" if none; valid until it is released */
const char *srt_context_error(srt_context *); /* why the context is dead; "" if it is alive */
/* Returns the failure that ended the context, or SRT_OK if it is alive. `culprit`: the rank that failed, was lost or
 * was too late (the first of several). */
srt_status srt_context_failure(srt_context *, int32_t *culprit);
int32_t srt_has_missed_peer(srt_context *); /* 1: an operation has failed with SRT_PEER_FINISHED */
int32_t srt_is_library(const char *file); /* 1: a Python file of the standard library or an installed package */
void srt_release(srt_context *, const srt_handle *, int32_t count); /* an unfinished handle is released when it ends */

typedef struct srt_gpu_library { /* opened when the first tensor on a GPU is submitted */
  int32_t version; /* libcuda: 12080 is 12.8; libnccl: 22803 is 2.28.3; 0: it cannot be used */
  char path[1024]; /* the file; "" if there is none */
  char text[3064]; /* one line: what was found, or what was searched for, where, and why it cannot be used */
} srt_gpu_library;

/* Searches for both libraries, and counts the GPUs, without using any. */
srt_status srt_gpu_libraries(const srt_config *, srt_gpu_library *cuda, srt_gpu_library *nccl, int32_t *devices);

/* Finds the GPU that holds this memory, for srt_request.device. Opens libcuda, but uses no GPU. */
srt_status srt_gpu_of(srt_context *, uintptr_t address, int32_t *gpu, srt_error *);

/* Error feedback: adds the residuals of the previous step to values, rounds the sums to what a wire format can express,
 * and keeps the differences as the new residuals. An all-reduce then encodes the values without a further error. In a
 * block with a NaN or an infinity all values become NaN, and the residuals remain as they were.
 * values, residuals: addresses of `count` floats; residuals 0: there are none. squares: NULL, or room for the sums of
 * squares of what was to be rounded and of the differences, over all other blocks. */
srt_status srt_quantise(int32_t wire_format, uintptr_t values, uintptr_t residuals, int64_t count, double *squares);
/* </declarations> */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#include "sirtaki_observe.h"

#endif
