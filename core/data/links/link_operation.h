// The base of the collectives over links (sockets). The order of all transfers of a plan is fixed for all members, so
// frames need no matching: the plan and step of a frame are only checked.
#pragma once

#include <span>
#include <vector>

#include "data/operation.h"
#include "data/packing.h"
#include "transport/links/links.h"

namespace sirtaki {

struct LinkSetting {
  Links& links;
  const Kernels& kernels;
  const RankNames& names;
  int64_t chunk_bytes;
};

class LinkOperation : public Operation {
 public:
  LinkOperation(const LinkSetting& setting, TransferPtr transfer);

  Status advance(Nanoseconds now, Progress& progress) final;
  void cancel() final;
  std::vector<int32_t> waits_for() const final { return awaited_; }

 protected:
  // Returns whether the algorithm exchanges bytes with another member, which has to return the same about this one.
  virtual bool exchanges_with(size_t) const { return true; }
  // Runs one step of the algorithm. If `finished` stays false, the step has to wait, and is called again.
  virtual Status step(int64_t index, bool& finished) = 0;
  int64_t steps = 0;  // set by the constructor of the algorithm

  const Transfer& transfer() const { return *transfer_; }
  const DTypeKernels& arithmetic() const { return *kernels_; }
  const WireKernels& wire_kernels() const { return *setting_.kernels.wire(transfer_->wire_format); }
  size_t member_count() const { return transfer_->members.size(); }
  int64_t chunk_bytes() const { return setting_.chunk_bytes; }
  ReduceKernel reduce_kernel() const { return arithmetic().reduce[static_cast<int>(transfer_->reduce_op)]; }

  // Return whether a frame can be sent to a member (or to all) without queueing too many bytes; the space for a
  // frame's body.
  bool has_room(size_t member) const;
  bool all_have_room() const;
  std::span<uint8_t> compose(size_t member, int64_t tag, int64_t bytes);

  // Returns the body of the next frame from a member, which must have this tag and size; empty data() if it has not
  // arrived.
  Status arrived(size_t member, int64_t tag, int64_t bytes, std::span<const uint8_t>& body);
  void consume(size_t member) { link(member).pop(); }

  // The same for the next frames from all other members, with the bodies by member.
  Status all_arrived(int64_t tag, int64_t bytes, std::vector<const uint8_t*>& bodies, bool& all_here);
  void consume_all();

  // Send a list's bytes [begin, end): its prescaled inputs; its results, which are in `scratch` if the list has no
  // output for them. Bytes that can be sent unchanged from the users' memory are not copied.
  void send_inputs(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end);
  void send_results(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end,
                    const uint8_t* scratch);

  // Receives the next frame from a member into a list's outputs.
  Status take(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end, bool& finished);

  // Reduces the bodies of all members' frames (this rank's own is ignored) and a list's inputs into its outputs, or
  // into `scratch`, which grows as needed.
  void reduce(std::span<const uint8_t* const> bodies, const ScatterList& list, int64_t begin, int64_t end,
              std::vector<uint8_t>& scratch);

  // Packs a list's prescaled bytes [begin, end).
  void pack_bytes(const ScatterList& list, int64_t begin, int64_t end, uint8_t* out) const;

 private:
  bool measures() const { return transfer_->times && transfer_->times->are_measured; }
  FrameHeader header(int64_t tag, int64_t bytes) const;
  bool has_links();
  Link& link(size_t member) const { return *links_[member]; }

  LinkSetting setting_;
  TransferPtr transfer_;
  const DTypeKernels* kernels_;
  int64_t next_ = 0;
  std::vector<int32_t> awaited_;
  std::vector<Link*> links_;  // by member; nullptr: none is needed, or it is not there yet
  bool is_linked_ = false;
  std::vector<const void*> sources_;
  bool received_ = false;
};

class LinkBackend final : public Backend {
 public:
  // `host_of`: by rank of the world. `wish`: the knob cpu_algorithm.
  LinkBackend(const LinkSetting& setting, std::vector<int32_t> host_of, std::string wish)
      : setting_(setting), host_of_(std::move(host_of)), wish_(std::move(wish)) {}
  BackendName name(const Transfer&) const override { return BackendName::links; }
  bool serves(const Transfer& transfer) const override;
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_links; }

 private:
  std::unique_ptr<Operation> start_allreduce(TransferPtr transfer) const;

  LinkSetting setting_;
  std::vector<int32_t> host_of_;
  std::string wish_;
};

std::unique_ptr<Operation> make_direct_allreduce(const LinkSetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_ring_allreduce(const LinkSetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_recursive_doubling(const LinkSetting& setting, TransferPtr transfer);
// All-reduce in a wire format with blocks.
std::unique_ptr<Operation> make_quantised_allreduce(const LinkSetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_link_broadcast(const LinkSetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_link_reducescatter(const LinkSetting& setting, TransferPtr transfer);
// All-gather and all-to-all.
std::unique_ptr<Operation> make_link_exchange(const LinkSetting& setting, TransferPtr transfer);

}  // namespace sirtaki
