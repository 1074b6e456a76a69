// The interfaces of the data plane: a Backend starts Operations, and an Operation is a resumable state machine that
// never blocks. An operation through shared memory or sockets moves bytes inside advance(); one on a device that
// works by itself (a GPU) is only polled there.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "data/kernels/kernels.h"
#include "data/scatter.h"
#include "observe/records/record.h"
#include "plan/plan.h"

namespace sirtaki {

class GpuEvent;  // of core/gpu

// The first value of a plan's sums that is an infinity or a NaN.
struct NotFinite {
  bool is_there = false, is_nan = false;
  bool is_seen_by_all = false;  // by each rank, in the same place; else by the rank whose part of the sum it is
  int32_t rank = -1;     // whose value it is; -1: all ranks' are finite, and their sum is too large
  int64_t position = 0;  // in bytes, in what this rank receives
};

// A Plan with this rank's memory filled in, or one phase of it, if an algorithm consists of several transfers.
struct Transfer {
  uint64_t plan = 0;
  int32_t phase = 0;                 // phases of a plan run one after another; a phase may itself consist of phases
  bool is_last_phase = true;
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  // All-reduce: the format between ranks that share no memory. If it has blocks, each piece of the buffer is a tensor,
  // or begins with a block of one.
  WireFormat wire_format = WireFormat::exact;
  Scale prescale, postscale;
  int32_t device = -1;
  int64_t chunk_bytes = 0;           // see Plan
  std::vector<int32_t> members;      // world ranks, ascending
  size_t own = 0;                    // this rank's index among them
  size_t root = 0;                   // the root's index
  ScatterList buffer;                // all-reduce, broadcast: the tensors. All-gather: this rank's input
  TransferTimes* times = nullptr;    // filled in while the transfer runs; nullptr: not wanted
  WireBytes* wire_bytes = nullptr;   // likewise
  NotFinite* not_finite = nullptr;   // likewise: sums through the memory of one host
  std::vector<ScatterList> outgoing; // data for each member, where each gets its own. If the output is a
                                      // member's rows (plan/kind.h), this rank's own part has the output too
  std::vector<ScatterList> incoming;  // all-gather, all-to-all: memory for the data from each member. This rank's own
                                      // part has the input too
  std::vector<int64_t> flows;  // all-to-all: bytes from member i to member j, at i * members + j
  std::vector<int64_t> tensor_bytes;  // Adasum: the sizes of the tensors in the buffer
  std::vector<std::shared_ptr<GpuEvent>> inputs;  // on a GPU: events behind which the inputs are ready, each once

  int64_t flow(size_t from, size_t to) const { return flows[from * members.size() + to]; }
  size_t element_bytes() const { return dtype_bytes(dtype); }
};
using TransferPtr = std::shared_ptr<const Transfer>;

enum class Progress { blocked, moved, done };

// The resources that an operation uses exclusively while it runs, as a set of bits. Operations that need the same
// resource run one after another, others concurrently.
enum Needs : unsigned {
  needs_nothing = 0,
  needs_slots = 1,  // chunk slots in shared memory
  needs_links = 2,
  needs_launches = 4  // the order in which work is launched on the GPU
};

// Reasons for which an operation on a device waits, beside its own copies; the deadline of progress depends on them.
enum class DeviceWait {
  none,
  connection,  // of the members, which may take far longer than bytes
  input,  // of this rank: another stream of its device still computes it, for as long as the program needs
  peers  // whose devices may still compute their inputs
};

constexpr int steps_a_call = 8;  // of an operation, then the negotiation has its turn

class Operation {
 public:
  virtual ~Operation() = default;

  // Does at most a few chunks of work. A status that is not ok ends the context.
  virtual Status advance(Nanoseconds now, Progress& progress) = 0;

  // Cancels the operation. It must not be destroyed before is_quiet(), because its memory may still be in use.
  virtual void cancel() {}
  virtual bool is_quiet() const { return true; }

  // Returns the ranks whose bytes the operation waits for, for messages.
  virtual std::vector<int32_t> waits_for() const { return {}; }

  // Returns whether the operation waits for a device, which rings no doorbell and must be polled.
  virtual bool must_be_polled() const { return false; }

  virtual DeviceWait device_wait() const { return DeviceWait::none; }

  // Returns the part of `needed_at_start` that the operation still needs; it only shrinks.
  virtual unsigned still_needs(unsigned needed_at_start) const { return needed_at_start; }

  // Returns the name of the algorithm that moves the bytes, a static string; "" where there is only one.
  virtual const char* algorithm() const { return ""; }

  // Returns the event after which the operation is finished on a device, once everything is launched there.
  virtual std::shared_ptr<GpuEvent> launched() const { return nullptr; }
};

// The backend that has moved an operation's bytes, in statistics; through a GPU backend, the way that it has chosen.
enum class BackendName : uint8_t { none, single_rank, shared_memory, links, hierarchical, nccl, staged };
constexpr std::array<const char*, 7> backend_names = {"none",         "single rank", "shared memory", "links",
                                                      "hierarchical", "nccl",        "staged"};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendName name(const Transfer& transfer) const = 0;  // of a finished one
  virtual bool serves(const Transfer& transfer) const = 0;
  virtual std::unique_ptr<Operation> start(TransferPtr transfer) = 0;
  virtual unsigned needs(const Transfer& transfer) const = 0;  // to start it
};

}  // namespace sirtaki
