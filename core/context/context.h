// One rank. The Context owns every part; parts receive the parts they need, never the Context.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "context/engine/shutdown.h"
#include "context/submission/inline_completion.h"
#include "context/submission/link_intake.h"
#include "context/submission/submission.h"
#include "data/operation.h"
#include "gpu/gpu_backend.h"
#include "observe/counters/tensor_times.h"
#include "sirtaki_observe.h"

namespace sirtaki {

class Context {
 public:
  static Status create(const Config& config, const srt_topology& topology, std::unique_ptr<Context>& out);
  ~Context();

  // Functions to be called before start(); links to sockets may be added later, too.
  Status link_socket(int32_t peer, int fd);
  Status link_tls(int32_t peer, int fd, std::unique_ptr<TlsSession>& session);  // takes ownership of both on success
  Status link_memory(const srt_memory& memory);
  Status link_mpi(const srt_mpi& mpi, std::span<const int32_t> peers);
  void add_backend(std::unique_ptr<Backend> backend) { extra_backends_.push_back(std::move(backend)); }
  Status watch_stack(const srt_stack_source& source);
  // Returns the peers to which start() needs links; others may be added later, if requests for them are allowed.
  std::vector<int32_t> first_links() const;
  void allow_link_requests() { link_intake_.allow_requests(); }
  Status start();

  // Functions for the threads that add links to a running rank; see LinkIntake.
  Status wait_for_link_requests(int32_t* out, int32_t capacity, int32_t& count, Nanoseconds timeout);
  void fail_link(int32_t peer, std::string text);

  // Allocates memory that the ranks of this host share, for tensors.
  Status allocate_shared(int64_t bytes, std::unique_ptr<SharedBuffer>& out);

  // The caller's next step after enqueue(). A caller that waits at once needs neither the timer nor the engine's
  // thread.
  enum class WaitMode { leave, wait_at_once, attempt };
  Status enqueue(const srt_request* requests, int32_t count, Ticket* out, WaitMode wait_mode = WaitMode::leave);
  // Enqueues for callers that have hooks and must not wait. Small operations may have ended on return (`have_ended`);
  // then no hook is called for any of them.
  Status enqueue_or_complete(const srt_request* requests, int32_t count, Ticket* out, bool& have_ended);
  Status wait(const Ticket* handles, int32_t count, Nanoseconds timeout);
  Status wait_on_stream(const Ticket* handles, int32_t count, uintptr_t stream, Nanoseconds timeout);
  // Makes wait_on_stream() return only when the operations have ended. Callable from any thread.
  void wait_on_host() { waits_on_host_ = true; }
  // Finds the GPU that holds this memory; uses no GPU. Callable from any thread.
  Status gpu_of(uintptr_t address, int32_t& gpu);
  Status poll(Ticket handle);
  // Has operations reported to wait_watched() when they end, or, on a GPU, are launched. Nobody need wait for them.
  Status watch(const Ticket* handles, int32_t count);
  // Sleeps, without driving, until watched operations can be reported. Fails when none can be any more.
  Status wait_watched(Ticket* out, int32_t capacity, int32_t& count, Nanoseconds timeout);
  Status output(Ticket handle, srt_tensor& out);
  uint32_t result(Ticket handle);
  int64_t result_number(Ticket handle);
  int32_t result_splits(Ticket handle, int64_t* out, int32_t capacity);
  int32_t result_contributors(Ticket handle, int32_t* out, int32_t capacity);
  int32_t process_set(int32_t number, int32_t* out, int32_t capacity);
  int64_t own_rows(int32_t process_set, int64_t rows);
  bool has_wire_format(int32_t process_set);
  const srt_topology& topology() const { return topology_; }  // without the peers
  const char* error(Ticket handle);
  void release(const Ticket* handles, int32_t count);
  void flush() { intake_->flush(); }
  // Changes a setting of all ranks while they run; for rank 0 of a context with the setting autotune.
  Status change_setting(const char* name, const char* value);
  // Returns the value in use of a setting that can be changed so; -1: there is no such setting.
  int64_t live_setting(const char* name) const;

  void abort(std::string reason);
  void shutdown(Nanoseconds timeout);
  void fork_child();
  // The reason why the context is dead; "" and ok while it is alive. Callable from any thread.
  const char* death_text() const { return failure_ ? failure_->text() : ""; }
  AbortNotice death() const { return failure_ && !forked_ ? failure_->notice() : AbortNotice(); }
  // Returns whether an operation has failed because a rank that it needs had finished; the context stays alive.
  bool has_missed_peer();
  Status start_timeline(const char* path, bool marks_decisions);
  void add_to_timeline(ProgramSlice slice) {
    if (!forked_) timeline_.add_program(std::move(slice));
  }
  void stop_timeline() {
    if (!forked_) timeline_.stop();
  }
  // Writes what the flight recorder holds, in the form of a failure report.
  Status write_recorder(const char* path);
  void statistics(srt_statistics& out, srt_lateness* by_rank);
  void activity(srt_activity& out);
  // Counts training steps that have just ended. Callable from hooks.
  void end_steps(int64_t number, int64_t by);
  void steps(srt_step_counts& out);
  // Write the rows that are not 0, at most `capacity`; return their count.
  int32_t count_operations(srt_operation_count* out, int32_t capacity);
  int32_t count_sent_bytes(srt_sent_bytes* out, int32_t capacity) const;
  // Writes the tensors among the last operations that have cost the most time; returns their number.
  int32_t slowest_tensors(std::span<const WaitSpan> waits, srt_tensor_times* out, int32_t capacity);

  // Returns an error when no operation may be submitted: before start, after shutdown, and in a forked child.
  Status usable() const;

 private:
  Context(const Config& config, const srt_topology& topology);
  Ticket meet_at_the_end();
  enum class Until { finished, launched };
  Status await(const Ticket* handles, int32_t count, Until until, Nanoseconds timeout);
  Status give_up(const Status& status);
  Status mark_inputs(Submission& submission);
  bool is_started() const { return shutdown_ != nullptr; }
  // Runs `read` with the caller state locked. A forked child takes no lock, because the thread that holds it may not
  // exist there.
  template <typename Result, typename Read>
  Result read(Result in_forked_child, Read read) {
    if (forked_) return in_forked_child;
    const Access state(state_);
    return read(*state);
  }
  ControlTree control_tree() const;
  void add_backends();
  void start_engine();

  Config config_;
  srt_topology topology_;
  int32_t rank_, size_;
  std::vector<RankLocation> locations_;
  RankNames names_;
  std::vector<int32_t> host_of_;  // by rank
  std::vector<int32_t> local_ranks_;
  Log log_;
  LinkIntake link_intake_;
  std::optional<SentBytes> sent_bytes_;
  Links links_;
  const Kernels& kernels_;
  Timeline timeline_;
  GpuChoice gpu_;
  LiveSettings settings_;
  HandleSignals signals_;
  SharedCallerState state_;
  std::unique_ptr<LocalPeers> local_peers_;
  std::vector<std::unique_ptr<Backend>> extra_backends_;
  GpuBackend* gpu_backend_ = nullptr;  // nullptr if another backend was added for GPUs
  std::unique_ptr<Negotiation> negotiation_;
  std::unique_ptr<FiniteCheck> finite_check_;
  std::unique_ptr<Execution> execution_;
  std::unique_ptr<EventWaiter> event_waiter_;
  ProgramStack program_stack_;
  std::unique_ptr<DeadlineMonitor> deadline_monitor_;
  std::unique_ptr<Heartbeat> heartbeat_;
  std::unique_ptr<FailureReport> failure_report_;

  // The engine: nullptr before start.
  DriverRole role_;
  std::unique_ptr<Intake> intake_;
  std::unique_ptr<EngineFailure> failure_;
  std::unique_ptr<PendingAbort> pending_abort_;
  std::unique_ptr<PeerMonitor> peer_monitor_;
  std::unique_ptr<Iteration> iteration_;
  std::unique_ptr<EngineLoop> loop_;
  std::unique_ptr<Shutdown> shutdown_;
  std::once_flag thread_started_;
  InlineCompletion inline_completion_;
  std::atomic<bool> waits_on_host_{false};
  bool forked_ = false;
};

}  // namespace sirtaki
