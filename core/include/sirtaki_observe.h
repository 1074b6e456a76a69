/* Observations of a rank by its own process: totals, what it does now, and its timeline. A part of the interface that
 * sirtaki.h describes, whose rules hold here, too.
 */
#ifndef SIRTAKI_OBSERVE_H
#define SIRTAKI_OBSERVE_H

#include "sirtaki.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* <declarations> */
/* Durations in seconds, counted by range: counts[i] is the number of those up to bounds[i] and above bounds[i - 1]; the
 * last range has no bound. */
typedef struct srt_histogram {
  double bounds[13], total; /* total: the sum of all durations */
  int64_t counts[14];
} srt_histogram;

/* Totals of this rank so far. Times are in seconds. */
typedef struct srt_statistics {
  uint32_t struct_size;
  int64_t operations, failed; /* finished operations; failed ones among these */
  int64_t cache_hits, cache_misses; /* operations reported by their number in the response cache; in full */
  int64_t plans, planned_tensors, largest_plan; /* fused tensors count as one plan; tensors in all, in the largest */
  int64_t bytes; /* size of this rank's tensors in these plans */
  double bus_bytes; /* bytes that a rank has to send at least, with any algorithm */
  double waiting, moving; /* time in which any operation waited for another rank to submit it; in which data moved */
  int64_t unencoded_bytes, encoded_bytes; /* what this rank has sent in a wire format: without it; as sent */
  srt_histogram wait, transfer; /* of each ended operation: until all ranks had agreed on it; from then on */
  int64_t stalls; /* reports of stalls that named this rank as missing */
} srt_statistics;

/* Lateness of a rank: how often it was the last to submit an operation, and how much later than all others. */
typedef struct srt_lateness {
  int64_t times;
  double total, longest; /* seconds */
} srt_lateness;

/* Writes the statistics. by_rank: NULL, or room for one entry per rank; the same on all ranks, which receive updates at
 * most twice a second. */
srt_status srt_stats(srt_context *, srt_statistics *out, srt_lateness *by_rank);

/* The training steps of this rank, as its optimizers count them. A step lasts from the end of the one before it; the
 * first has no beginning, and is not timed. Durations are in seconds, and counted by range as in srt_histogram. */
typedef struct srt_step_counts {
  uint32_t struct_size;
  int64_t number;
  double bounds[15], total;
  int64_t counts[16];
  double last, age; /* the duration of the last one; the time since it has ended */
  double productive; /* total, in which one of more than twice the median of the 15 before it counts as that median */
  /* The first optimizer that has a number (0: none), and its steps. It is no longer the first one after 1,000 steps of
   * others without one of its own. Its steps last from the end of its own step before; latest: the durations of the
   * last ones, the latest last, after zeros while there are fewer. */
  int64_t optimizer, optimizer_steps;
  double latest[15];
} srt_step_counts;

/* Counts a step, or as many equal ones, that have just ended. by: the number of the optimizer; 0: it has none. Callable
 * from hooks. */
void srt_end_steps(srt_context *, int32_t number, int64_t by);
srt_status srt_get_steps(srt_context *, srt_step_counts *out);

/* The operations of one kind that have ended, by the backend that has moved them. */
typedef struct srt_operation_count {
  const char *kind; /* such as "all-reduce" */
  const char *backend; /* such as "shared memory"; "none" for operations that move nothing, or failed */
  int64_t operations, failed; /* failed ones among these */
  int64_t bytes; /* size of this rank's tensors in their plans */
  const char *algorithm; /* of the last one, such as "ring"; "" where the backend has only one */
} srt_operation_count;

/* The bytes that this rank has sent over links to the ranks of one host, control frames and headers included, before
 * any encryption. */
typedef struct srt_sent_bytes {
  const char *peer_host; /* valid as long as the context */
  const char *transport; /* "tcp", "tls", "unix" or, through a ring in shared memory, "ring" */
  int64_t bytes;
} srt_sent_bytes;

/* Each writes the rows that are not 0, at most `capacity`, and returns their count. */
int32_t srt_count_operations(srt_context *, srt_operation_count *out, int32_t capacity);
int32_t srt_count_sent_bytes(srt_context *, srt_sent_bytes *out, int32_t capacity);

/* The operations of one name among the last 1,024 of this rank: those that have ended well, and move a tensor. */
typedef struct srt_tensor_times {
  int64_t operations;
  double exposed; /* seconds of `waits` in which any of them was in flight, added up over the operations */
  double wait, transfer; /* seconds until all ranks had agreed on them; from then on */
  char name[80];
} srt_tensor_times;

/* Writes the tensors with the longest exposed time, or without waits with the longest wait, and returns how many: at
 * most `capacity`. waits: begin and end of each time in which the program waited, nanoseconds of CLOCK_MONOTONIC,
 * ascending; operations from before the first one are left out. */
int32_t srt_slowest_tensors(srt_context *, const int64_t *waits, int32_t wait_count, srt_tensor_times *out,
                            int32_t capacity);

/* The operations of this rank that have not ended. */
typedef struct srt_activity {
  uint32_t struct_size;
  int64_t operations; /* their number; without any, the rest is 0 */
  int32_t is_agreed, process_set; /* of the oldest one. 1: all ranks have submitted it; 0: it waits for other ranks */
  double seconds; /* since it was submitted; 0 if the recorder has forgotten that */
  const char *kind; /* its kind, such as "all-reduce" */
  char name[80]; /* its name, shortened where that is too long */
} srt_activity;

srt_status srt_get_activity(srt_context *, srt_activity *out);

/* Two sources of the program's stack, read while other ranks wait for this one. Both use the format of Python's
 * faulthandler. */
typedef struct srt_stack_source {
  int32_t interpreter_fd; /* a SOCK_SEQPACKET socket: the answer to 4 bytes repeats them, followed by the main
                             thread's stack; there is no answer while the GIL is unavailable */
  int32_t file_fd; /* the file to which the signal's handler writes the stacks of all threads */
  int32_t signal_number;
  uint64_t thread; /* the main thread: pthread_self() */
  const char *own_folder; /* the folder of sirtaki's own Python files */
} srt_stack_source;

/* Sets the source of the program's stack. Must precede srt_start. */
srt_status srt_watch_stack(srt_context *, const srt_stack_source *, srt_error *);

/* Writes a file with the last 4096 operations of the flight recorder, those in flight and the program's stack, in the
 * form of a failure report (JSON) of status "ok". Readers never see a part of it. */
srt_status srt_write_recorder(srt_context *, const char *path, srt_error *);

/* Starts a timeline of this rank's operations, in Chrome's trace format. Starting ends a running timeline; stopping
 * does nothing if there is none. srt_shutdown stops it. srt_timeline_program adds what the program did, to a track of
 * such slices that never overlap; times are nanoseconds of CLOCK_MONOTONIC. */
srt_status srt_timeline_start(srt_context *, const char *path, int32_t marks_decisions, srt_error *);
void srt_timeline_program(srt_context *, const char *track, const char *what, int64_t begin, int64_t end);
void srt_timeline_stop(srt_context *);
/* </declarations> */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
