// Every operation in flight, by handle: opened once when it is queued, ended exactly once, released once.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "context/state/memory_ranges.h"
#include "data/operation.h"
#include "gpu/device/gpu.h"
#include "observe/observer.h"
#include "plan/kind.h"
#include "plan/request.h"

namespace sirtaki {

// Memory that the core allocates for an output whose size is known only after negotiation, aligned to 64 bytes.
struct AlignedFree {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};
using AlignedMemory = std::unique_ptr<void, AlignedFree>;

// The stages of an operation, in order. An operation may skip some.
enum class HandleState {
  waits_for_name,  // behind another operation of its name
  queued,          // holds its name; is reported and negotiated
  planned,         // part of a plan
  finished,
};

// Describes a whole tensor of a signature in memory.
void describe(const Signature& signature, uintptr_t data, srt_tensor& out);

// The point at which an operation is reported to the thread that collects the watched ones.
enum class Watch { no, until_launched, until_finished };

struct HandleEntry {
  bool is_finished() const { return state == HandleState::finished; }
  MemoryRanges::Use memory_use() const {
    return {input, offered ? offered : output, input ? signature->bytes() : 0, output_bytes};
  }

  SignaturePtr signature;
  uintptr_t input = 0, output = 0;
  uintptr_t offered = 0;        // the caller's memory for a result whose size is known only when it is planned
  int64_t output_bytes = 0;
  bool is_absent = false;
  srt_complete_hook on_complete = nullptr;
  srt_allocate_hook allocate = nullptr;
  void* user = nullptr;
  bool is_attempted = false;    // the submitting thread still tries to complete it without a hook

  uint64_t record = 0;          // the observer's record
  HandleState state = HandleState::waits_for_name;
  BackendName backend = BackendName::none;  // of a plan that has finished
  Watch watch = Watch::no;
  bool is_freed = false;        // its name and memory may be used by others
  bool is_released = false;     // released by its caller; discarded once finished
  Status status;
  std::string error;            // the status' text, with this operation's name
  uint32_t result = 0;          // SRT_RESULT_*
  int64_t number = 0;           // the added set's number, or the rank that joined last
  std::vector<int64_t> received;  // all-to-all: rows from each member
  std::vector<int32_t> contributors;  // an operation with a deadline: the ranks whose data is in the result
  srt_tensor described{};       // the output, once finished
  AlignedMemory memory;

  // On a GPU only.
  GpuEventPtr ready;            // fires when the input is ready
  GpuEventPtr launched;         // fires when the operation is done; nullptr until all of it is launched
  std::unique_ptr<GpuOutput> gpu_output;
};

// The completion of a native caller's operation, whose hook the engine's own thread calls.
struct Completion {
  srt_complete_hook hook;
  void* user;
  Status status;
  std::string error;
};

// Properties of the table that threads may read without its lock.
struct HandleSignals {
  std::atomic<bool> has_turns{false};  // take_turns() would return operations
  std::atomic<int64_t> hooks{0};       // hooks of operations in flight, which have not been called
};

// The ended operations of this rank by kind and backend, and the bytes of its tensors in their plans.
class OperationCounts {
 public:
  struct Count {
    int64_t operations = 0, failed = 0;  // failed ones among these
    int64_t bytes = 0;
    const char* algorithm = "";  // of the last one that moved bytes
  };

  Count& of(Kind kind, BackendName backend) { return counts_[static_cast<size_t>(kind)][static_cast<size_t>(backend)]; }

  // Calls visit(kind, backend, count) for each count that is not 0.
  template <typename Visit>
  void visit(Visit&& visit_count) const {
    for (size_t kind = 0; kind < kind_count; ++kind)
      for (size_t backend = 0; backend < backend_names.size(); ++backend)
        if (const Count& count = counts_[kind][backend]; count.operations || count.bytes)
          visit_count(static_cast<Kind>(kind), static_cast<BackendName>(backend), count);
  }

 private:
  std::array<std::array<Count, backend_names.size()>, kind_count> counts_{};
};

// A table without a lock of its own: it is part of the CallerState, whose lock protects it.
class HandleTable {
 public:
  HandleTable(Observer& observer, HandleSignals& signals) : observer_(observer), signals_(signals) {}
  static constexpr int64_t numbers_before_wrap = 1024;
  static constexpr int64_t groups_before_wrap = 64;

  Ticket open(HandleEntry entry);                       // returns the handle; its memory is in use from now on
  const MemoryRanges& memory() const { return memory_; }
  HandleEntry* find(Ticket handle);                     // nullptr if never opened, or released
  HandleEntry* open_entry(Ticket handle);               // includes released ones that have not ended
  void end(Ticket handle, const Status& status);  // idempotent; wakes waiters, frees name and memory
  // Frees name and memory before the operation has ended, for a caller whose stream waits for it.
  void free_early(Ticket handle);
  void release(Ticket handle);
  std::vector<Ticket> unfinished() const;
  bool any_unfinished() const { return unfinished_ > 0; }
  bool has_missed_peer() const { return has_missed_peer_; }
  OperationCounts& counts() { return counts_; }
  std::vector<Completion> take_completions() { return std::move(completions_); }
  bool has_completions() const { return !completions_.empty(); }
  void forget_hook(HandleEntry& entry);  // without calling it
  // Ends an attempt. Returns true if all operations have ended, and then no hook is called; otherwise all their hooks
  // are.
  bool end_attempt(const Ticket* handles, int32_t count);

  // Watched operations are reported once, in the order in which they end.
  void watch(Ticket handle, Watch until);  // reported at once if it is already there
  void set_launched(Ticket handle, const GpuEventPtr& event);
  bool any_watched() const { return watched_ > 0; }
  int32_t take_reports(Ticket* out, int32_t capacity);  // returns how many
  // Waits until an operation is reported or wake_collectors() is called; see wait().
  template <typename Access>
  void wait_for_reports(Access& access, Nanoseconds limit) {
    ++collectors_;
    access.wait_for(reported_, limit);
    --collectors_;
  }
  void wake_collectors() { reported_.notify_all(); }

  // Names in flight. A request whose name is taken is either rejected or waits for its turn.
  bool is_name_taken(const Signature& signature) const;
  // Takes the operation's name. If another holds it, this one waits behind it until take_turns() returns it.
  void take_name(Ticket handle);
  std::vector<Ticket> take_turns();

  // Returns the next number for an unnamed operation. Numbers count per process set, kind and pair of ranks, and wrap,
  // so that the names of one step recur in the next ones and are found in the response cache.
  using Series = std::array<int32_t, 4>;  // process set, kind, and for a send the two ranks
  int64_t next_number(const Series& series) { return numbers_[series]++ % numbers_before_wrap; }
  // Works like next_number(), for a group of unnamed operations. A group has many names, and all are to be found in the
  // cache, so that fewer numbers recur.
  int64_t next_group(int32_t process_set, int32_t kind) {
    return numbers_[{process_set, kind, of_groups, 0}]++ % groups_before_wrap;
  }
  // Called when the rank joins: until then ranks may have submitted different numbers of operations.
  void restart_numbers(int32_t process_set) {
    std::erase_if(numbers_, [process_set](const auto& entry) { return entry.first[0] == process_set; });
  }

  // Rounds of operations with a deadline, by their name without the round: they count on each rank.
  uint64_t next_round(const std::string& name) const;
  void begin_round(const std::string& name) { ++rounds_[name]; }
  bool has_rounds() const { return !rounds_.empty(); }

  // Waits until an operation ends or wake_waiters() is called. `access` holds the lock, which is released meanwhile.
  template <typename Access>
  void wait(Access& access, Nanoseconds limit) {
    ++waiters_;
    access.wait_for(changed_, limit);
    --waiters_;
  }
  void wake_waiters() { changed_.notify_all(); }
  int waiters() const { return waiters_; }

 private:
  struct NameKey {
    int32_t process_set;
    Kind kind;
    std::string_view name;  // lies in the entry's signature
    bool operator==(const NameKey&) const = default;
  };
  struct NameHash {
    size_t operator()(const NameKey& key) const;
  };
  struct Slot {
    std::unique_ptr<HandleEntry> entry;
    uint32_t generation = 1;
  };

  struct Holder {
    Ticket handle;
    std::vector<Ticket> behind;  // operations that wait for the name, the next one first
  };

  static NameKey key_of(const Signature& signature) { return {signature.process_set, signature.kind, signature.name}; }
  Slot* slot_of(Ticket handle);
  void call_hook(HandleEntry& entry);
  void report_if_due(HandleEntry& entry, Ticket handle);
  void free_name_and_memory(HandleEntry& entry, Ticket handle);
  void pass_name_on(const HandleEntry& entry, Ticket handle);
  void discard(Ticket handle);

  Observer& observer_;
  HandleSignals& signals_;
  std::condition_variable changed_;
  int waiters_ = 0;
  std::condition_variable reported_;
  int collectors_ = 0;  // threads that wait for reports
  int64_t watched_ = 0;  // operations that have not been reported yet
  std::deque<Ticket> reports_;
  int64_t unfinished_ = 0;
  OperationCounts counts_;
  bool has_missed_peer_ = false;  // an operation has ended because a rank that it needs had finished
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::unordered_map<NameKey, Holder, NameHash> names_;
  std::vector<Ticket> turns_;  // operations whose name has become free
  MemoryRanges memory_;
  static constexpr int32_t of_groups = -1;  // in place of the sending rank
  std::map<Series, int64_t> numbers_;
  std::unordered_map<std::string, uint64_t> rounds_;  // the last round that was begun
  std::vector<Completion> completions_;
};

}  // namespace sirtaki
