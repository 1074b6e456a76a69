// A libnccl.so.2 over the fake libcuda.so.1: communicators, groups, and kernels that run in streams. Its background
// work progresses only while ncclCommGetAsyncError is called; launched calls are not in the stream until that returns
// "success".
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "fake_gpu/fake.h"
#include "fake_gpu/kernel.h"
#include "fake_gpu/reduction.h"

namespace sirtaki {

struct NcclCommunicatorTag {
  struct Launch {
    CudaStream stream;
    std::vector<fake::Call> calls;
  };
  enum class Stage { joining, ready, launching, finalizing, finalized };

  std::shared_ptr<fake::Room> room;
  int rank, device;
  bool is_blocking;
  Stage stage = Stage::joining;
  int polls_left = 0;
  int error = 0;
  std::vector<Launch> launches = {};                   // of the group in progress
  std::vector<std::vector<char>> factors = {};         // of the operators that the user created; empty: destroyed
  std::shared_ptr<fake::Fate> fate = std::make_shared<fake::Fate>();
};

}  // namespace sirtaki

namespace {

// Opens each function that takes a communicator.
#define FAKE_NCCL_ENTER(communicator)                                                 \
  const int failure = fake::enter(__func__); /* a call that is held holds no other */ \
  std::unique_lock lock(nccl().mutex);                                                \
  if (failure) return refuse("a test asked for it", failure);                         \
  if (!is_alive(communicator)) return misuse(__func__, "there is no such communicator")

using namespace sirtaki;
using fake::Call;
using fake::Kind;
using Stage = NcclCommunicatorTag::Stage;

constexpr NcclResult system_error = 2, invalid_argument = 4, invalid_usage = 5;
constexpr int shares_gpus = 23003;  // the oldest version that has NCCL_MULTI_RANK_GPU_ENABLE
constexpr int user_operators = 100;

struct Nccl {
  std::mutex mutex;
  std::set<NcclCommunicator> communicators;
  std::string last_error;
  std::atomic<int> kernels[fake::most_devices] = {};  // that have not ended, of this process, by GPU
};

Nccl& nccl() {
  static Nccl* all = new Nccl;
  return *all;
}

struct Group {
  int depth = 0;
  NcclResult error = nccl_success;
  std::vector<NcclCommunicator> order;    // in the order of their first calls
  std::vector<NcclCommunicator> aborted;  // freed at the group's end
};
thread_local Group group;

NcclResult misuse(const char* function, const std::string& what, NcclResult result = invalid_argument) {
  nccl().last_error = what;
  return fake::misuse(function, what, result);
}

// Rejects a call for which the user is responsible and which may be deliberate, so that it is no misuse.
NcclResult refuse(const std::string& what, NcclResult result) {
  nccl().last_error = what;
  return result;
}

bool is_alive(NcclCommunicator communicator) { return nccl().communicators.count(communicator) != 0; }

void take_polls(NcclCommunicator communicator) {
  communicator->polls_left = fake::random_up_to(fake::setting("polls"));
}

std::string name_of(Kind kind) {
  static const char* const names[] = {"ncclAllReduce",     "ncclBroadcast", "ncclReduce", "ncclAllGather",
                                      "ncclReduceScatter", "ncclSend",      "ncclRecv"};
  return names[static_cast<int>(kind)];
}

void submit_launches(NcclCommunicator communicator) {
  for (auto& launch : communicator->launches) {
    std::atomic<int>& kernels = nccl().kernels[communicator->device];
    ++communicator->fate->running;
    ++kernels;
    const std::string others = launch.calls.size() > 1 ? " and others of its group" : "";
    std::string name = name_of(launch.calls.front().kind) + others;
    auto ranges = fake::ranges_of(launch.calls, communicator->room->size());
    auto work = [room = communicator->room, rank = communicator->rank, fate = communicator->fate, &kernels,
                 calls = std::move(launch.calls)] {
      fake::run_kernel(*room, rank, *fate, calls);
      --fate->running;
      --kernels;
    };
    fake::submit(launch.stream, communicator->device, {std::move(name), std::move(ranges), std::move(work)});
  }
  communicator->launches.clear();
}

// Returns the host for which NCCL takes this process: NCCL_HOSTID, or that on which it runs, as 0.
uint64_t own_host() {
  const char* host_id = std::getenv("NCCL_HOSTID");
  return host_id ? std::hash<std::string>()(host_id) : 0;
}

// Returns whether the ranks can work together, once all have joined.
NcclResult check_seats(NcclCommunicator communicator) {
  fake::Room& room = *communicator->room;
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool may_share = fake::setting("nccl_version") >= shares_gpus && enabled && std::strcmp(enabled, "1") == 0;
  std::set<std::pair<uint64_t, int>> devices;  // by host
  for (int rank = 0; rank < room.size(); ++rank) {
    if (room.seat(rank).version != room.seat(0).version) return refuse("mismatched versions of NCCL", invalid_usage);
    if (!devices.emplace(room.seat(rank).host, room.seat(rank).device).second && !may_share)
      return refuse("Duplicate GPU detected", invalid_usage);
  }
  return nccl_success;
}

// Advances the work that the real library does in a thread of its own.
void go_on(NcclCommunicator communicator) {
  using Seat = fake::Room::Seat;
  fake::Room& room = *communicator->room;
  if (communicator->stage == Stage::finalizing && communicator->fate->running == 0)
    room.seat(communicator->rank).is_leaving = true;
  const bool waits =
      (communicator->stage == Stage::joining && (fake::setting("init_hang") || !room.all(&Seat::is_taken))) ||
      (communicator->stage == Stage::finalizing && !room.all(&Seat::is_leaving));
  if (waits || --communicator->polls_left >= 0) return;
  if (communicator->stage == Stage::joining) communicator->error = check_seats(communicator);
  if (communicator->stage == Stage::launching) submit_launches(communicator);
  communicator->stage = communicator->stage == Stage::finalizing ? Stage::finalized : Stage::ready;
}

NcclResult state_of(NcclCommunicator communicator) {
  if (communicator->error) return communicator->error;
  if (communicator->fate->error) return refuse("ranks made calls that do not fit together", communicator->fate->error);
  const bool is_idle = communicator->stage == Stage::ready || communicator->stage == Stage::finalized;
  return is_idle ? nccl_success : nccl_in_progress;
}

// Starts a call that continues in the background, and returns its result so far.
NcclResult start(NcclCommunicator communicator, Stage stage, std::unique_lock<std::mutex>& lock) {
  communicator->stage = stage;
  take_polls(communicator);
  if (communicator->polls_left == 0 && stage == Stage::launching) go_on(communicator);
  while (communicator->is_blocking && state_of(communicator) == nccl_in_progress) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
    go_on(communicator);
  }
  return state_of(communicator);
}

// Frees all state of a communicator.
NcclResult forget(NcclCommunicator communicator) {
  nccl().communicators.erase(communicator);
  delete communicator;
  fake::count_alive(-1);
  return nccl_success;
}

// Frees an aborted communicator; its memory is freed when no kernel runs on the GPU.
void free_aborted(NcclCommunicator communicator, std::unique_lock<std::mutex>& lock) {
  const std::atomic<int>& kernels = nccl().kernels[communicator->device];
  const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(fake::setting("free_limit"));
  lock.unlock();
  while (kernels > 0 && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  lock.lock();
  if (kernels > 0) misuse("ncclCommAbort", "it waits for another communicator's kernel, which does not end");
  forget(communicator);
}

NcclResult end_group(std::unique_lock<std::mutex>& lock) {
  const Group ended = std::exchange(group, Group());
  NcclResult result = ended.error;
  for (NcclCommunicator communicator : ended.aborted) free_aborted(communicator, lock);
  for (NcclCommunicator communicator : ended.order) {
    if (ended.error) communicator->launches.clear();
    else if (const NcclResult one = start(communicator, Stage::launching, lock); one) result = one;
  }
  return result;
}

// Returns whether the smaller buffer is this rank's part of the larger one, or apart from it.
bool is_well_placed(const Call& call, int rank, int ranks) {
  if (call.kind != Kind::allgather && call.kind != Kind::reducescatter) return true;
  const bool gathers = call.kind == Kind::allgather;
  const size_t bytes = call.count * fake::size_of(call.type);
  const char *whole = gathers ? call.output : call.input, *part = gathers ? call.input : call.output;
  const std::less_equal<> is_up_to;
  return part == whole + static_cast<size_t>(rank) * bytes || is_up_to(part + bytes, whole) ||
         is_up_to(whole + static_cast<size_t>(ranks) * bytes, part);
}

// Validates a call, and clears the buffers that its rank does not use.
NcclResult check_call(const char* function, NcclCommunicator communicator, Call& call, CudaStream stream) {
  if (!is_alive(communicator)) return misuse(function, "there is no such communicator");
  if (communicator->stage != Stage::ready) return misuse(function, "the communicator is not ready", invalid_usage);
  if (call.kind == Kind::reduce && call.peer != communicator->rank) call.output = nullptr;
  if (call.kind == Kind::broadcast && call.peer != communicator->rank) call.input = nullptr;
  if (call.peer < 0 || call.peer >= communicator->room->size()) return misuse(function, "there is no such rank");
  if (fake::size_of(call.type) == 0) return misuse(function, "there is no such type");
  if (!fake::is_stream_of(stream, communicator->device)) return misuse(function, "this is no stream of that GPU");
  if (!is_well_placed(call, communicator->rank, communicator->room->size()))
    return misuse(function, "input and output overlap, and the smaller is not this rank's part of the larger");
  const auto ranges = fake::ranges_of({call}, communicator->room->size());
  const bool on_device = std::all_of(ranges.begin(), ranges.end(), [&](const fake::Range& range) {
    return fake::is_on_device(range, communicator->device);
  });
  return on_device ? nccl_success : misuse(function, "this memory is not on that GPU");
}

NcclResult find_operator(const char* function, NcclCommunicator communicator, Call& call) {
  if (call.operation < fake::built_in_operators) return nccl_success;
  const auto index = static_cast<size_t>(call.operation - user_operators);
  if (!is_alive(communicator) || index >= communicator->factors.size() || communicator->factors[index].empty())
    return misuse(function, "there is no such operator");
  call.operation = fake::scaled_sum;
  call.factor = communicator->factors[index];
  if (call.factor.size() != fake::size_of(call.type)) return misuse(function, "the operator is for another type");
  return nccl_success;
}

// Adds a call to the group. A call outside of a group is a group of its own.
NcclResult add(const char* function, NcclCommunicator communicator, Call call, CudaStream stream) {
  std::unique_lock lock(nccl().mutex);
  NcclResult result = fake::enter(function);
  if (!result) result = find_operator(function, communicator, call);
  if (!result) result = check_call(function, communicator, call, stream);
  if (result) {
    if (group.depth > 0) group.error = result;
    return result;
  }
  auto& launches = communicator->launches;
  if (launches.empty()) group.order.push_back(communicator);
  if (launches.empty() || launches.back().stream != stream) launches.push_back({stream, {}});
  launches.back().calls.push_back(std::move(call));
  return group.depth > 0 ? nccl_success : end_group(lock);
}

const char* bytes_of(const void* memory) { return static_cast<const char*>(memory); }

}  // namespace

namespace sirtaki {

int ncclGetVersion(int* version) {
  *version = fake::setting("nccl_version");
  return fake::enter(__func__);
}

int ncclGetUniqueId(NcclUniqueId* out) {
  if (const int failure = fake::enter(__func__)) return failure;
  return fake::Room::make_id(*out) ? nccl_success : system_error;
}

int ncclCommInitRankConfig(NcclCommunicator* out, int size, NcclUniqueId id, int rank, NcclConfig* config) {
  const int failure = fake::enter(__func__);  // where a test may hold it, and other calls go on
  std::unique_lock lock(nccl().mutex);
  *out = nullptr;
  if (failure) return refuse("a test asked for it", failure);
  const int device = fake::current_device();
  if (device < 0) return misuse(__func__, "there is no current context");
  if (rank < 0 || rank >= size || size > 64) return misuse(__func__, "there is no such rank");
  if (config->size != sizeof(NcclConfig) || config->magic != NcclConfig().magic || config->version < oldest_nccl)
    return misuse(__func__, "the configuration was not initialised");
  auto room = fake::Room::enter(id, size);
  if (!room) return refuse("the rank that made the unique id is gone", system_error);
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");  // overrides the caller's configuration
  *out = new NcclCommunicatorTag{std::move(room), rank, device, blocking ? *blocking == '1' : config->blocking != 0};
  nccl().communicators.insert(*out);
  fake::count_alive(+1);
  fake::Room::Seat& seat = (*out)->room->seat(rank);
  seat.device = device;
  seat.version = fake::setting("nccl_version");
  seat.host = own_host();
  if (seat.is_taken.exchange(true)) (*out)->error = misuse(__func__, "the rank is there already");
  return start(*out, Stage::joining, lock);
}

int ncclCommGetAsyncError(NcclCommunicator communicator, NcclResult* state) {
  const std::lock_guard lock(nccl().mutex);
  if (!is_alive(communicator)) return misuse(__func__, "there is no such communicator");
  if (const int failure = fake::enter(__func__)) communicator->error = refuse("a test asked for it", failure);
  if (!communicator->error && state_of(communicator) == nccl_in_progress) go_on(communicator);
  *state = state_of(communicator);
  return nccl_success;
}

int ncclCommFinalize(NcclCommunicator communicator) {
  FAKE_NCCL_ENTER(communicator);
  if (communicator->stage != Stage::ready) return misuse(__func__, "the communicator is not ready", invalid_usage);
  return start(communicator, Stage::finalizing, lock);
}

int ncclCommDestroy(NcclCommunicator communicator) {
  FAKE_NCCL_ENTER(communicator);
  if (communicator->stage != Stage::finalized)
    return misuse(__func__, "the communicator is not finalized", invalid_usage);
  return forget(communicator);
}

int ncclCommAbort(NcclCommunicator communicator) {
  FAKE_NCCL_ENTER(communicator);
  communicator->fate->is_aborted = true;
  nccl().communicators.erase(communicator);
  if (group.depth > 0 && fake::setting("nccl_version") >= groups_aborts_from) group.aborted.push_back(communicator);
  else free_aborted(communicator, lock);
  return nccl_success;
}

int ncclRedOpCreatePreMulSum(NcclReduceOp* out, void* factor, NcclDataType type, int residence,
                             NcclCommunicator communicator) {
  FAKE_NCCL_ENTER(communicator);
  if (residence != 1) return misuse(__func__, "the fake knows factors in the host's memory only");
  communicator->factors.emplace_back(bytes_of(factor), bytes_of(factor) + fake::size_of(type));
  *out = user_operators + static_cast<int>(communicator->factors.size()) - 1;
  return nccl_success;
}

int ncclRedOpDestroy(NcclReduceOp operation, NcclCommunicator communicator) {
  FAKE_NCCL_ENTER(communicator);
  const auto index = static_cast<size_t>(operation - user_operators);
  if (index >= communicator->factors.size() || communicator->factors[index].empty())
    return misuse(__func__, "there is no such operator");
  communicator->factors[index].clear();
  return nccl_success;
}

int ncclGroupStart() {
  const int failure = fake::enter(__func__);
  if (!failure) ++group.depth;
  return failure;
}

int ncclGroupEnd() {
  std::unique_lock lock(nccl().mutex);
  if (group.depth == 0) return misuse(__func__, "there is no group", invalid_usage);
  if (const int failure = fake::enter(__func__)) group.error = refuse("a test asked for it", failure);
  return --group.depth > 0 ? nccl_success : end_group(lock);
}

int ncclAllReduce(const void* input, void* output, size_t count, NcclDataType type, NcclReduceOp operation,
                  NcclCommunicator communicator, CudaStream stream) {
  return add(__func__, communicator,
             {Kind::allreduce, bytes_of(input), static_cast<char*>(output), count, type, operation, 0, {}}, stream);
}

int ncclBroadcast(const void* input, void* output, size_t count, NcclDataType type, int root,
                  NcclCommunicator communicator, CudaStream stream) {
  return add(__func__, communicator,
             {Kind::broadcast, bytes_of(input), static_cast<char*>(output), count, type, fake::sum, root, {}}, stream);
}

int ncclReduce(const void* input, void* output, size_t count, NcclDataType type, NcclReduceOp operation, int root,
               NcclCommunicator communicator, CudaStream stream) {
  return add(__func__, communicator,
             {Kind::reduce, bytes_of(input), static_cast<char*>(output), count, type, operation, root, {}}, stream);
}

int ncclAllGather(const void* input, void* output, size_t count, NcclDataType type, NcclCommunicator communicator,
                  CudaStream stream) {
  return add(__func__, communicator,
             {Kind::allgather, bytes_of(input), static_cast<char*>(output), count, type, fake::sum, 0, {}}, stream);
}

int ncclReduceScatter(const void* input, void* output, size_t count, NcclDataType type, NcclReduceOp operation,
                      NcclCommunicator communicator, CudaStream stream) {
  return add(__func__, communicator,
             {Kind::reducescatter, bytes_of(input), static_cast<char*>(output), count, type, operation, 0, {}}, stream);
}

int ncclSend(const void* input, size_t count, NcclDataType type, int peer, NcclCommunicator communicator,
             CudaStream stream) {
  return add(__func__, communicator, {Kind::send, bytes_of(input), nullptr, count, type, fake::sum, peer, {}}, stream);
}

int ncclRecv(void* output, size_t count, NcclDataType type, int peer, NcclCommunicator communicator,
             CudaStream stream) {
  return add(__func__, communicator,
             {Kind::receive, nullptr, static_cast<char*>(output), count, type, fake::sum, peer, {}}, stream);
}

extern "C" FAKE_GPU_EXPORTED const char* ncclGetErrorString(NcclResult result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && static_cast<size_t>(result) < std::size(texts) ? texts[result] : "unknown result code";
}

extern "C" FAKE_GPU_EXPORTED const char* ncclGetLastError(NcclCommunicator) {
  thread_local std::string words;
  const std::lock_guard lock(nccl().mutex);
  words = nccl().last_error;
  return words.c_str();
}

}  // namespace sirtaki
