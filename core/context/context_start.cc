// The start of a rank: its links, its parts and its backends.
#include <algorithm>
#include <unordered_map>

#include "base/give.h"
#include "base/system/machine.h"
#include "context/context.h"
#include "control/relay/first_links.h"
#include "data/hierarchical/hierarchical.h"
#include "data/links/algorithm.h"
#include "data/memory/memory_operation.h"
#include "data/single_rank_backend.h"
#include "transport/memory/ring_pipe.h"

namespace sirtaki {
namespace {

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

}  // namespace

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

}  // namespace sirtaki
