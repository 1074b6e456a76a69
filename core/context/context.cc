#include "context/context.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_map>

#include "base/give.h"
#include "base/system/machine.h"
#include "context/observation.h"
#include "control/relay/first_links.h"
#include "data/hierarchical/hierarchical.h"
#include "data/links/algorithm.h"
#include "data/memory/memory_operation.h"
#include "data/single_rank_backend.h"
#include "transport/memory/ring_pipe.h"

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

std::vector<RankLocation> locations_of(const srt_topology& topology) {
  std::vector<RankLocation> locations;
  std::transform(topology.peers, topology.peers + topology.size, std::back_inserter(locations), location_of);
  return locations;
}

RankNames names_of(const std::vector<RankLocation>& locations) {
  RankNames names;
  for (const auto& [host, pid] : locations)
    names.push_back(format("rank %zu (pid %d on %s)", names.size(), pid, host.c_str()));
  return names;
}

// Returns the chunk size of links, which is the same on all hosts, whatever their caches. Larger chunks save little
// and arrive later.
int64_t chunk_bytes_of_links(const Config& config) {
  constexpr int64_t usual = 512 << 10;
  const int64_t wish = config.integer(Knob::chunk_bytes);
  return wish ? std::max<int64_t>(wish / 4096, 1) * 4096 : usual;
}

// Returns the number of ranks of the host that has most of them.
int most_on_a_host(const std::vector<int32_t>& host_of) {
  std::unordered_map<int32_t, int> counts;
  int most = 0;
  for (int32_t host : host_of) most = std::max(most, ++counts[host]);
  return most;
}

constexpr size_t most_summed_operations = 1024;  // copied in some 20 µs

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
      locations_(locations_of(topology)), names_(names_of(locations_)),
      log_(static_cast<int>(config.integer(Knob::log_descriptor))),
      link_intake_({rank_, host_of_, config.integer(Knob::encrypt) != 0,
                    static_cast<size_t>(config.integer(Knob::sockets_per_link)),
                    Heartbeat::interval(config.time(Knob::heartbeat))}),
      links_(topology.size), kernels_(choose_kernels(config.text(Knob::kernel))),
      timeline_(rank_, size_, names_[static_cast<size_t>(rank_)], log_),
      gpu_(config_, names_[static_cast<size_t>(rank_)], log_), settings_(config),
      state_(topology.size, static_cast<size_t>(config.integer(Knob::recorder_operations)), timeline_, signals_) {
  topology_.peers = nullptr;
  for (int32_t rank = 0; rank < size_; ++rank) {
    host_of_.push_back(topology.peers[rank].host_index);
    if (host_of_.back() == topology.peers[rank_].host_index) local_ranks_.push_back(rank);
  }
  links_.count_in(sent_bytes_.emplace(host_of_));
}

Context::~Context() = default;

// ---- Links, memory and the start --------------------------------------------------------------------------

Status Context::link_socket(int32_t peer, int fd) {
  bool is_complete = false;
  SIRTAKI_TRY(link_intake_.add_socket(peer, fd, is_complete));
  if (is_complete) event_waiter_->wake();
  return Status::ok();
}

Status Context::link_tls(int32_t peer, int fd, std::unique_ptr<TlsSession>& session) {
  bool is_complete = false;
  SIRTAKI_TRY(link_intake_.add_tls(peer, fd, session, is_complete));
  if (is_complete) event_waiter_->wake();
  return Status::ok();
}

Status Context::wait_for_link_requests(int32_t* out, int32_t capacity, int32_t& count, Nanoseconds timeout) {
  count = 0;
  SIRTAKI_TRY(usable());
  if (!out || capacity < 1) return {SRT_INVALID_ARGUMENT, "there is no room for a peer"};
  std::vector<int32_t> peers;
  SIRTAKI_TRY(link_intake_.wait_for_requests(static_cast<size_t>(capacity), timeout, peers));
  count = give(peers, out, capacity);
  return Status::ok();
}

void Context::fail_link(int32_t peer, std::string text) {
  if (!usable().is_ok() || peer < 0 || peer >= size_) return;
  link_intake_.fail(peer, printable(text, text.size()));
  event_waiter_->wake();
}

ControlTree Context::control_tree() const {
  return {host_of_, static_cast<int32_t>(config_.integer(Knob::control_fan_out))};
}

std::vector<int32_t> Context::first_links() const {
  const auto few = static_cast<size_t>(config_.integer(Knob::control_fan_out));  // as many as a leader may have anyway
  return sirtaki::first_links(rank_, host_of_, control_tree(), few);
}

Status Context::link_memory(const srt_memory& memory) {
  if (is_started() || local_peers_) return {SRT_INVALID_ARGUMENT, "the shared memory is linked once, before srt_start"};
  const bool fits = memory.struct_size >= sizeof(srt_memory) && memory.slot_count > 1 && memory.slot >= 0 &&
                    memory.slot < memory.slot_count && memory.ranks && memory.engine_doorbells &&
                    memory.waiter_doorbells && memory.ranks[memory.slot] == rank_;
  if (!fits) return {SRT_INVALID_ARGUMENT, "srt_memory is incomplete, or its slot is not this rank's"};
  SIRTAKI_TRY(LocalPeers::open(config_, memory, local_peers_));
  for (int slot = 0; slot < memory.slot_count; ++slot)
    if (slot != memory.slot && (slot == 0 || memory.slot == 0))
      links_.add_ring(memory.ranks[slot], std::make_unique<RingPipe>(local_peers_->region(), memory.slot, slot));
  return Status::ok();
}

Status Context::link_mpi(const srt_mpi& mpi, std::span<const int32_t> peers) {
  if (is_started()) return {SRT_INVALID_ARGUMENT, "links over MPI are added before srt_start"};
  const bool is_complete = mpi.struct_size >= sizeof(srt_mpi) && mpi.issend && mpi.iprobe && mpi.irecv && mpi.test &&
                           mpi.get_count && mpi.tag >= 0;
  if (!is_complete) return {SRT_INVALID_ARGUMENT, "srt_mpi is incomplete"};
  for (int32_t peer : peers)
    if (peer < 0 || peer >= size_ || host_of_[static_cast<size_t>(peer)] == host_of_[static_cast<size_t>(rank_)])
      return {SRT_INVALID_ARGUMENT, format("MPI links ranks of different hosts only, not rank %d", peer)};
  if (!peers.empty() && config_.integer(Knob::encrypt))
    return {SRT_INVALID_ARGUMENT, "links over MPI are not encrypted, and links between hosts should be"};
  links_.use_mpi(mpi, peers);
  return Status::ok();
}

Status Context::allocate_shared(int64_t bytes, std::unique_ptr<SharedBuffer>& out) {
  if (forked_) return {SRT_FORKED, "a forked child has no ranks to share memory with"};
  if (bytes < 0) return {SRT_INVALID_ARGUMENT, "memory has at least 0 bytes"};
  if (!local_peers_) return {SRT_UNSUPPORTED, "this rank shares its host's memory with no other"};
  return local_peers_->arena().allocate(bytes, out);
}

Status Context::watch_stack(const srt_stack_source& source) {
  if (is_started()) return {SRT_INVALID_ARGUMENT, "the stack is watched from before srt_start on"};
  return program_stack_.open(source);
}

Status Context::start() {
  if (is_started()) return {SRT_INVALID_ARGUMENT, "the context is started already"};
  link_intake_.start(links_);
  ControlTree tree = control_tree();
  for (int32_t peer = 0; peer < size_; ++peer)
    if ((peer == tree.parent(rank_) || rank_ == tree.parent(peer)) && !links_.control(peer))
      return {SRT_INVALID_ARGUMENT, format("the link to rank %d is missing", peer)};
  negotiation_ = std::make_unique<Negotiation>(
      NegotiationParts{rank_, names_, std::move(tree), links_, local_peers_.get()}, config_);
  const OwnRank own{rank_, names_, local_peers_.get()};
  finite_check_ = std::make_unique<FiniteCheck>(FiniteCheckParts{own, kernels_, state_, program_stack_, log_}, config_);
  execution_ = std::make_unique<Execution>(
      ExecutionParts{rank_, state_, negotiation_->negotiator(), timeline_, gpu_, *finite_check_},
      config_.text(Knob::join_average) == "contributors");
  event_waiter_ = std::make_unique<EventWaiter>(local_peers_.get(), links_);
  SIRTAKI_TRY(event_waiter_->open());
  // After the waiter: the kernel reports bytes to the set that was made last first, so what wakes this rank is also
  // what look() finds.
  SIRTAKI_TRY(links_.watch());
  deadline_monitor_ =
      std::make_unique<DeadlineMonitor>(DeadlineMonitorParts{rank_, names_, locations_, local_ranks_, log_}, config_);
  heartbeat_ = std::make_unique<Heartbeat>(links_, names_, config_.time(Knob::heartbeat));
  failure_report_ =
      std::make_unique<FailureReport>(FailureReportParts{rank_, locations_, state_, program_stack_, log_}, config_);
  failure_report_->forget();
  add_backends();
  start_engine();
  return Status::ok();
}

void Context::start_engine() {
  const OwnRank own{rank_, names_, local_peers_.get()};
  intake_ = std::make_unique<Intake>(state_, signals_, *event_waiter_, negotiation_->negotiator(),
                                     execution_->late_results(), settings_, gpu_backend_);
  failure_ =
      std::make_unique<EngineFailure>(EngineFailureParts{own, state_, *negotiation_, *execution_, *failure_report_});
  pending_abort_ = std::make_unique<PendingAbort>(own, *negotiation_, *failure_);
  peer_monitor_ =
      std::make_unique<PeerMonitor>(PeerMonitorParts{own, state_, *negotiation_, *execution_, *event_waiter_,
                                                     *deadline_monitor_, *heartbeat_, *pending_abort_, *failure_});
  iteration_ = std::make_unique<Iteration>(
      IterationParts{own, state_, settings_, links_, link_intake_, *event_waiter_, *intake_, *negotiation_, *execution_,
                     *peer_monitor_, *pending_abort_, *failure_, *deadline_monitor_, program_stack_});
  const bool is_crowded = static_cast<int>(local_ranks_.size()) > usable_cores();
  loop_ =
      std::make_unique<EngineLoop>(EngineLoopParts{state_, signals_, settings_, role_, *intake_, *iteration_,
                                                   *peer_monitor_, *negotiation_, *event_waiter_, local_peers_.get()},
                                   Polling(config_.time(Knob::spin), is_crowded));
  // With autotune, chunks may be smaller than the slots of the shared region, here or on another host.
  const int crowd = most_on_a_host(host_of_);
  if (rank_ == coordinator_rank && crowd > 1 && config_.integer(Knob::autotune) &&
      config_.text(Knob::transport) != "socket")
    settings_.wish(Knob::chunk_bytes, SharedRegion::initial_chunk_bytes(config_, crowd));
  shutdown_ = std::make_unique<Shutdown>(
      ShutdownParts{own, state_, role_, *intake_, *iteration_, *loop_, *negotiation_, links_, *failure_});
  if (size_ > 1) std::call_once(thread_started_, [this] { loop_->start_thread(); });
}

// Adds the backends; the first one that serves a transfer runs it.
void Context::add_backends() {
  Executor& executor = execution_->executor();
  const bool others_serve_gpus = !extra_backends_.empty();
  for (auto& backend : extra_backends_) executor.add_backend(std::move(backend));
  GpuParts gpu{gpu_, kernels_, log_, names_, host_of_, rank_, {}};
  const auto add = [&](std::unique_ptr<Backend> backend) {
    gpu.on_cpu.push_back(backend.get());
    executor.add_backend(std::move(backend));
  };
  add(std::make_unique<SingleRankBackend>(kernels_));
  const std::string& wish = config_.text(Knob::cpu_algorithm);
  const LinkSetting setting{links_, kernels_, names_, chunk_bytes_of_links(config_)};
  auto over_links = std::make_unique<LinkBackend>(setting, host_of_, wish);
  HierarchyParts hierarchy{{}, over_links.get(), host_of_, wish};
  if (local_peers_) {
    auto through_memory = std::make_unique<MemoryBackend>(*local_peers_, kernels_);
    hierarchy.inside.push_back(through_memory.get());
    add(std::move(through_memory));
  }
  hierarchy.inside.push_back(over_links.get());
  add(std::make_unique<HierarchicalBackend>(std::move(hierarchy)));
  add(std::move(over_links));
  if (!others_serve_gpus) {
    auto on_gpus = std::make_unique<GpuBackend>(std::move(gpu), config_);
    gpu_backend_ = on_gpus.get();
    executor.add_backend(std::move(on_gpus));
  }
  const std::vector<int32_t> world_members =
      read(std::vector<int32_t>(), [](CallerState& state) { return state.sets.find(world_set)->members; });
  const std::vector<int> ranks_per_host = count_members(world_members, host_of_);
  if (rank_ == coordinator_rank && ranks_per_host.size() > 1)
    log_.line(describe_algorithm(wish, ranks_per_host, config_.text(Knob::transport)));
}

// ---- Operations -------------------------------------------------------------------------------------------

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
    const bool is_after_all = request.flags & SRT_REQUEST_AFTER_ALL_STREAMS;
    const auto stream = is_after_all ? all_streams() : reinterpret_cast<CudaStream>(request.stream);
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

// ---- Watched operations -----------------------------------------------------------------------------------

// A thread that sleeps meanwhile learns of their ends, and the engine's own thread drives them.
Status Context::watch(const Ticket* handles, int32_t count) {
  if (forked_ || !is_started()) return usable();
  const Watch until = waits_on_host_ ? Watch::until_finished : Watch::until_launched;
  {
    const Access state(state_);
    if (!std::all_of(handles, handles + count, [&](Ticket handle) { return state->handles.find(handle); }))
      return {SRT_INVALID_ARGUMENT, "there is no such handle; was it released?"};
    for (int32_t i = 0; i < count; ++i) state->handles.watch(handles[i], until);
    if (!state->handles.any_watched() || failure_->has_happened()) return Status::ok();
  }
  std::call_once(thread_started_, [this] { loop_->start_thread(); });  // a world of one rank may have none yet
  intake_->flush();
  return Status::ok();
}

Status Context::wait_watched(Ticket* out, int32_t capacity, int32_t& count, Nanoseconds timeout) {
  count = 0;
  if (forked_ || !is_started()) return usable();
  if (!out || capacity < 1) return {SRT_INVALID_ARGUMENT, "there is no room for a handle"};
  const Nanoseconds deadline = timeout < 0 ? never : now() + timeout;
  Access state(state_);
  for (;;) {
    count = state->handles.take_reports(out, capacity);
    if (count) return Status::ok();
    if (failure_->has_happened() && !state->handles.any_watched()) return failure_->notice().status;
    const Nanoseconds left = deadline == never ? seconds(1) : deadline - now();
    if (left <= 0) return {SRT_IN_PROGRESS, "still in flight"};
    state->handles.wait_for_reports(state, left);
  }
}

// ---- The end ----------------------------------------------------------------------------------------------

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

// ---- Settings and observations ----------------------------------------------------------------------------

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

bool Context::has_missed_peer() {
  return read(false, [](CallerState& state) { return state.handles.has_missed_peer(); });
}

Status Context::start_timeline(const char* path, bool marks_decisions) {
  SIRTAKI_TRY(usable());
  if (!path || !*path) return {SRT_INVALID_ARGUMENT, "a timeline needs the path of a file"};
  return timeline_.start(path, marks_decisions);
}

void Context::statistics(srt_statistics& out, srt_lateness* by_rank) {
  if (forked_) return describe(state_.in_forked_child().observer.statistics(), now(), out, by_rank);
  const Access state(state_);
  describe(state->observer.statistics(), now(), out, by_rank);
}

void Context::activity(srt_activity& out) {
  if (forked_) return describe(state_.in_forked_child(), now(), out);
  const Access state(state_);
  describe(*state, now(), out);
}

void Context::end_steps(int64_t number, int64_t by) {
  if (forked_) return;
  const Access state(state_);
  state->observer.steps_ended(now(), number, by);
}

void Context::steps(srt_step_counts& out) {
  if (forked_) return describe(state_.in_forked_child().observer.steps(), now(), out);
  const Access state(state_);
  describe(state->observer.steps(), now(), out);
}

int32_t Context::count_operations(srt_operation_count* out, int32_t capacity) {
  OperationCounts counts;
  if (forked_) counts = state_.in_forked_child().handles.counts();
  else counts = Access(state_)->handles.counts();
  return give(describe(counts), out, capacity);
}

int32_t Context::count_sent_bytes(srt_sent_bytes* out, int32_t capacity) const {
  return give(describe(*sent_bytes_, locations_), out, capacity);
}

Status Context::write_recorder(const char* path) {
  if (!path || !*path) return {SRT_INVALID_ARGUMENT, "a recorder needs the path of a file"};
  return failure_report_ && !forked_ ? failure_report_->write_recorder(path) : usable();
}

// Copies the records, so that no operation waits for the sums.
int32_t Context::slowest_tensors(std::span<const WaitSpan> waits, srt_tensor_times* out, int32_t capacity) {
  std::vector<OperationRecord> records;
  records.reserve(most_summed_operations);
  read(0, [&](const CallerState& state) {
    const auto keep = [&](const OperationRecord& record) { records.push_back(record); };
    state.observer.recorder().visit(keep, most_summed_operations);
    return 0;
  });
  const auto most = static_cast<size_t>(std::max(capacity, 0));
  return give(describe(sirtaki::slowest_tensors(records, waits, most)), out, capacity);
}

}  // namespace sirtaki
