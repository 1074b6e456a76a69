#include "context/context.h"

#include <algorithm>
#include <cstring>

#include "base/give.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_close = seconds(2);  // for communicators, which other ranks may close later
constexpr Nanoseconds longest_attempt = microseconds(200);  // about the time to wake a thread and be woken by it
constexpr int64_t most_attempted_elements = 16'384;
constexpr int32_t most_attempted_requests = 16;

RankLocation location_of(const srt_peer& peer) { return {printable(peer.host ? peer.host : "?", 64), peer.pid}; }

bool names_gpu(const srt_request& request) { return request.struct_size >= sizeof request && request.device >= 0; }

bool has_memory_on_gpu(const srt_request& request) {
  return names_gpu(request) && request.kind >= 0 && request.kind < static_cast<int32_t>(kind_count) &&
         moves_tensors(static_cast<Kind>(request.kind));
}

// Returns whether a request is small enough to end almost at once if all ranks have submitted it. make_entry()
// rejects invalid requests later.
bool is_small(const srt_request& request) {
  if (names_gpu(request)) return false;
  int64_t elements = 1;
  for (int32_t i = 0; i < std::min(request.dimensions, 16) && request.shape; ++i)
    elements = std::min(elements * std::clamp<int64_t>(request.shape[i], 0, most_attempted_elements + 1),
                        most_attempted_elements + 1);
  return elements <= most_attempted_elements;
}

std::string name_of(int32_t rank, const RankLocation& location) {
  return format("rank %d (pid %d on %s)", rank, location.pid, location.host.c_str());
}

}  // namespace

Status Context::create(const Config& config, const srt_topology& topology, std::unique_ptr<Context>& out) {
  if (topology.struct_size < sizeof(srt_topology))
    return {SRT_INVALID_ARGUMENT, "srt_topology.struct_size is too small"};
  if (topology.size < 1 || topology.rank < 0 || topology.rank >= topology.size)
    return {SRT_INVALID_ARGUMENT, format("rank %d does not fit a world of %d", topology.rank, topology.size)};
  if (!topology.peers) return {SRT_INVALID_ARGUMENT, "srt_topology.peers is missing"};
  out.reset(new Context(config, topology));
  return Status::ok();
}

Context::Context(const Config& config, const srt_topology& topology)
    : config_(config), topology_(topology), rank_(topology.rank), size_(topology.size),
      log_(static_cast<int>(config.integer(Knob::log_descriptor))),
      link_intake_({rank_, host_of_, config.integer(Knob::encrypt) != 0,
                    static_cast<size_t>(config.integer(Knob::sockets_per_link)),
                    Heartbeat::interval(config.time(Knob::heartbeat))}),
      links_(topology.size), kernels_(choose_kernels(config.text(Knob::kernel))),
      timeline_(rank_, size_, name_of(rank_, location_of(topology.peers[rank_])), log_), gpu_(config_),
      settings_(config),
      state_(topology.size, static_cast<size_t>(config.integer(Knob::recorder_operations)), timeline_, signals_) {
  topology_.peers = nullptr;
  for (int32_t rank = 0; rank < size_; ++rank) {
    const srt_peer& peer = topology.peers[rank];
    locations_.push_back(location_of(peer));
    names_.push_back(name_of(rank, locations_.back()));
    host_of_.push_back(peer.host_index);
    if (peer.host_index == topology.peers[rank_].host_index) local_ranks_.push_back(rank);
  }
  links_.count_in(sent_bytes_.emplace(host_of_));
}

Context::~Context() = default;

Status Context::change_setting(const char* name, const char* value) {
  SIRTAKI_TRY(usable());
  if (rank_ != coordinator_rank || !config_.integer(Knob::autotune))
    return {SRT_INVALID_ARGUMENT, "settings are changed by rank 0, in a job with the setting 'autotune'"};
  const std::optional<Knob> knob = live_knob(name);
  if (!knob) return {SRT_INVALID_ARGUMENT, format("setting '%s' cannot change while ranks run", name)};
  Config wish;
  SIRTAKI_TRY(wish.set(name, value));
  settings_.wish(*knob, wish.integer(*knob));
  return Status::ok();
}

int64_t Context::live_setting(const char* name) const {
  const std::optional<Knob> knob = live_knob(name);
  return knob ? settings_.in_use(*knob) : -1;
}

Status Context::usable() const {
  if (forked_)
    return {SRT_FORKED,
            "this is a forked child process: sirtaki belongs to its parent. Start workers with multiprocessing's "
            "'spawn', or do not call sirtaki in them"};
  if (!is_started()) return {SRT_INVALID_ARGUMENT, "the context is not started"};
  return failure_->notice().status;
}

Status Context::enqueue(const srt_request* requests, int32_t count, Ticket* out, WaitMode wait_mode) {
  if (count < 1 || !requests || !out) return {SRT_INVALID_ARGUMENT, "a submission has at least one request"};
  out[0] = 0;
  SIRTAKI_TRY(usable());
  Submission submission{requests, count, out, {}, wait_mode == WaitMode::attempt};
  SIRTAKI_TRY(mark_inputs(submission));
  Intake::WakeHint hint = Intake::WakeHint::none;
  {
    const Access state(state_);
    state->observer.set_moment(now());
    SIRTAKI_TRY(open_all(submission, {rank_, size_, *state}));
    hint = intake_->queue(out, count, *state);
  }
  // The engine's thread calls hooks, and launches operations on GPUs; a world of one rank starts it only now.
  const bool needs_thread = std::any_of(requests, requests + count, [](const srt_request& request) {
    return request.on_complete != nullptr || request.device >= 0;
  });
  if (needs_thread) std::call_once(thread_started_, [this] { loop_->start_thread(); });
  if (wait_mode == WaitMode::leave) intake_->deliver_hint(hint);
  return Status::ok();
}

Status Context::enqueue_or_complete(const srt_request* requests, int32_t count, Ticket* out, bool& have_ended) {
  have_ended = false;
  const bool are_few = count >= 1 && count <= most_attempted_requests;
  if (!are_few || !std::all_of(requests, requests + count, is_small) || !inline_completion_.begin()) {
    SIRTAKI_TRY(enqueue(requests, count, out));
    intake_->flush();
    return Status::ok();
  }
  const Status status = enqueue(requests, count, out, WaitMode::attempt);
  if (status.is_ok()) {
    std::ignore = wait(out, count, longest_attempt);  // each handle has its own status
    const Access state(state_);
    have_ended = state->handles.end_attempt(out, count);
  }
  inline_completion_.end(have_ended);
  if (status.is_ok() && !have_ended) intake_->flush();
  return status;
}

// Records an event behind each input on a GPU; inputs from one stream share an event.
Status Context::mark_inputs(Submission& submission) {
  if (!gpu_backend_) return Status::ok();
  std::vector<GpuEventPtr>& inputs = submission.inputs;
  for (int32_t i = 0; i < submission.count; ++i) {
    const srt_request& request = submission.requests[i];
    // A joining rank that cannot use the GPU takes part without NCCL.
    if (names_gpu(request) && request.kind == SRT_JOIN) std::ignore = gpu_.choose(request.device);
    if (!has_memory_on_gpu(request)) continue;
    SIRTAKI_TRY(gpu_.choose(request.device));
    inputs.resize(static_cast<size_t>(submission.count));
    const auto stream = reinterpret_cast<CudaStream>(request.stream);
    GpuEventPtr& input = inputs[static_cast<size_t>(i)];
    const auto known = std::find_if(inputs.begin(), inputs.begin() + i,
                                    [&](const GpuEventPtr& other) { return other && other->stream() == stream; });
    if (known != inputs.begin() + i) input = *known;
    else if (const Status status = gpu_.gpu()->events().record(stream, input); !status.is_ok()) return give_up(status);
  }
  return Status::ok();
}

// Aborts the rank, because a GPU has failed during a call.
Status Context::give_up(const Status& status) {
  abort(status.text());
  return status;
}

Status Context::wait(const Ticket* handles, int32_t count, Nanoseconds timeout) {
  return await(handles, count, Until::finished, timeout);
}

Status Context::await(const Ticket* handles, int32_t count, Until until, Nanoseconds timeout) {
  int32_t over = 0;
  Status first;
  const auto done = [&](CallerState& state) {
    for (; over < count; ++over) {
      HandleEntry* entry = state.handles.find(handles[over]);
      if (!entry) {
        if (first.is_ok()) first = {SRT_INVALID_ARGUMENT, "there is no such handle; was it released?"};
      } else if (!entry->is_finished()) {
        if (until == Until::finished || !entry->launched) return false;
      } else if (first.is_ok() && !entry->status.is_ok()) {
        first = entry->status;
      }
    }
    return true;
  };
  if (forked_) return usable();  // before any lock: the thread that holds it may not exist here
  {
    const Access state(state_);
    if (done(*state)) return first;
  }
  const bool all = loop_->wait(done, timeout < 0 ? never : now() + timeout);
  return all ? first : Status(SRT_IN_PROGRESS, "still in flight");
}

// Makes the stream wait: work that the caller adds to it from now on runs after the operations.
Status Context::wait_on_stream(const Ticket* handles, int32_t count, uintptr_t stream, Nanoseconds timeout) {
  SIRTAKI_TRY(await(handles, count, waits_on_host_ ? Until::finished : Until::launched, timeout));
  const auto cuda_stream = reinterpret_cast<CudaStream>(stream);
  std::vector<GpuEventPtr> events;
  {
    const Access state(state_);
    for (int32_t i = 0; i < count; ++i) {
      HandleEntry* entry = state->handles.find(handles[i]);
      if (!entry) continue;
      if (entry->gpu_output) entry->gpu_output->used_on(cuda_stream);
      if (entry->is_finished()) continue;
      if (events.empty() || events.back() != entry->launched) events.push_back(entry->launched);
    }
  }
  for (const GpuEventPtr& event : events)
    if (const Status status = event->hold_back(cuda_stream); !status.is_ok()) return give_up(status);
  const Access state(state_);
  for (int32_t i = 0; i < count; ++i) state->handles.free_early(handles[i]);
  return Status::ok();
}

Status Context::gpu_of(uintptr_t address, int32_t& gpu) {
  SIRTAKI_TRY(usable());
  return gpu_.find(address, gpu);
}

Status Context::poll(Ticket handle) {
  if (forked_) return usable();
  const auto look = [&]() -> Status {
    const Access state(state_);
    const HandleEntry* entry = state->handles.find(handle);
    if (!entry) return {SRT_INVALID_ARGUMENT, "there is no such handle; was it released?"};
    return entry->is_finished() ? entry->status : Status(SRT_IN_PROGRESS, "still in flight");
  };
  Status status = look();
  if (status.code() != SRT_IN_PROGRESS) return status;
  loop_->poll();
  return look();
}

Status Context::output(Ticket handle, srt_tensor& out) {
  if (forked_) return usable();
  const Access state(state_);
  const HandleEntry* entry = state->handles.find(handle);
  if (!entry) return {SRT_INVALID_ARGUMENT, "there is no such handle; was it released?"};
  if (!entry->is_finished() && !entry->launched) return {SRT_IN_PROGRESS, "still in flight"};
  out = entry->described;
  return entry->status;
}

uint32_t Context::result(Ticket handle) {
  return read(0u, [&](CallerState& state) {
    const HandleEntry* entry = state.handles.find(handle);
    return entry ? entry->result : 0;
  });
}

int64_t Context::result_number(Ticket handle) {
  return read(int64_t{0}, [&](CallerState& state) {
    const HandleEntry* entry = state.handles.find(handle);
    return entry ? entry->number : 0;
  });
}

int32_t Context::result_splits(Ticket handle, int64_t* out, int32_t capacity) {
  return read(0, [&](CallerState& state) {
    const HandleEntry* entry = state.handles.find(handle);
    return entry ? give(entry->received, out, capacity) : 0;
  });
}

int32_t Context::result_contributors(Ticket handle, int32_t* out, int32_t capacity) {
  return read(0, [&](CallerState& state) {
    const HandleEntry* entry = state.handles.find(handle);
    return entry ? give(entry->contributors, out, capacity) : 0;
  });
}

int32_t Context::process_set(int32_t number, int32_t* out, int32_t capacity) {
  return read(-1, [&](CallerState& state) {
    const ProcessSetEntry* set = state.sets.find(number);
    return set ? give(set->members, out, capacity) : -1;
  });
}

int64_t Context::own_rows(int32_t process_set, int64_t rows) {
  return read(int64_t{0}, [&](CallerState& state) -> int64_t {
    const ProcessSetEntry* set = state.sets.find(process_set);
    if (!set || !set->has(rank_)) return 0;
    const auto found = std::lower_bound(set->members.begin(), set->members.end(), rank_);
    return rows_of_member(rows, set->members.size(), static_cast<size_t>(found - set->members.begin()));
  });
}

bool Context::has_wire_format(int32_t process_set) {
  return read(false, [&](CallerState& state) {
    const ProcessSetEntry* set = state.sets.find(process_set);
    if (!set || !set->has(rank_) || set->members.size() < 2) return false;
    return !local_peers_ || std::any_of(set->members.begin(), set->members.end(),
                                        [&](int32_t member) { return local_peers_->slot_of(member) < 0; });
  });
}

const char* Context::error(Ticket handle) {
  return read("", [&](CallerState& state) {
    const HandleEntry* entry = state.handles.find(handle);
    return entry ? entry->error.c_str() : "";
  });
}

void Context::release(const Ticket* handles, int32_t count) {
  if (forked_) return;
  const Access state(state_);
  for (int32_t i = 0; i < count; ++i) state->handles.release(handles[i]);
}

void Context::abort(std::string reason) {
  pending_abort_->request(std::move(reason));
  loop_->wait([this](CallerState& state) { return failure_->has_happened() && !state.handles.any_unfinished(); },
              now() + seconds(2));
}

void Context::shutdown(Nanoseconds timeout) {
  if (forked_ || !is_started()) return;
  const Nanoseconds deadline = now() + timeout;
  const bool has_run = shutdown_->run(deadline, meet_at_the_end());
  link_intake_.close();
  if (!has_run) return;
  const bool in_good_order = failure_->notice().status.code() == SRT_SHUT_DOWN;
  if (gpu_backend_ && in_good_order) gpu_backend_->finish(std::min(deadline, now() + longest_close));
  else if (gpu_backend_) gpu_backend_->abort();
  if (gpu_backend_) gpu_backend_->await_abort();
  timeline_.stop();
}

// Queues a barrier of the ranks that are shutting down if operations are in flight; otherwise returns 0.
Ticket Context::meet_at_the_end() {
  {
    const Access state(state_);
    if (!state->handles.any_unfinished()) return 0;
  }
  constexpr int64_t no_elements = 0;
  srt_request request{};
  request.struct_size = sizeof request;
  request.kind = SRT_BARRIER;
  request.dtype = static_cast<int32_t>(DType::uint8);
  request.name = "shutdown";
  request.dimensions = 1;
  request.shape = &no_elements;
  request.device = -1;
  request.prescale = request.postscale = 1.0;
  Ticket ticket = 0;
  return enqueue(&request, 1, &ticket).is_ok() ? ticket : 0;  // for example, a joined rank cannot take part
}

// Closes only the descriptors that the parent's peers watch: no other thread exists, and any lock may be held for
// ever.
void Context::fork_child() {
  forked_ = true;
  if (loop_) loop_->forked();
  gpu_.forked();
  timeline_.forked();
  if (event_waiter_) event_waiter_->close();
  if (local_peers_) local_peers_->close();
  link_intake_.forked();
  links_.close();
}

bool Context::has_missed_peer() {
  return read(false, [](CallerState& state) { return state.handles.has_missed_peer(); });
}

Status Context::start_timeline(const char* path, bool marks_decisions) {
  SIRTAKI_TRY(usable());
  if (!path || !*path) return {SRT_INVALID_ARGUMENT, "a timeline needs the path of a file"};
  return timeline_.start(path, marks_decisions);
}

}  // namespace sirtaki
