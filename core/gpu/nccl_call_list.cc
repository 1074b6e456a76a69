#include "gpu/nccl_call_list.h"

namespace sirtaki {
namespace {

constexpr int64_t staging_alignment = 256;

struct Segment {
  const uint8_t* input;
  uint8_t* output;
  int64_t bytes;
};

// This rank's use of a list's memory. Scratch memory replaces the memory of a rank that has joined.
enum Role : unsigned { gives = 1, gets = 2 };

class CallListBuilder {
 public:
  CallListBuilder(const Transfer& transfer, bool calls_nccl, uintptr_t scratch)
      : transfer_(transfer), calls_nccl_(calls_nccl), next_(scratch) {
    run();
  }

  NcclCallList made;
  uintptr_t scratch_end() const { return next_; }

 private:
  void run() {
    const KindTraits& kind = traits(transfer_.kind);
    const auto role = [this](size_t member, Role others) { return is_own(member) ? gives | gets : others; };
    if (kind.has_splits) return add_exchange();
    if (kind.output == Output::whole)
      return add_calls(transfer_.buffer, kind.has_root ? role(transfer_.root, gets) : gives | gets,
                       kind.has_root ? transfer_.root : 0);
    const bool is_cut = kind.output == Output::rows;
    for (size_t member = 0; member < transfer_.members.size(); ++member)
      add_calls(is_cut ? transfer_.outgoing[member] : transfer_.incoming[member], role(member, is_cut ? gives : gets),
                member);
  }

  bool is_own(size_t member) const { return member == transfer_.own; }

  void add_calls(const ScatterList& list, unsigned role, size_t member) {
    if (!calls_nccl_) return copy_own(list);
    for (const Segment& segment : cut(list, role))
      made.calls.push_back({segment.input, segment.output, segment.bytes, member});
  }

  void add_exchange() {
    for (size_t member = 0; member < transfer_.members.size(); ++member) {
      if (is_own(member)) {
        copy_own(transfer_.incoming[member]);
        continue;
      }
      for (const Segment& segment : cut(transfer_.outgoing[member], gives))
        made.sends.push_back({segment.input, nullptr, segment.bytes, member});
      for (const Segment& segment : cut(transfer_.incoming[member], gets))
        made.receives.push_back({nullptr, segment.output, segment.bytes, member});
    }
  }

  void copy_own(const ScatterList& list) {
    list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
      if (input && output && input != output) made.before.push_back({output, input, bytes});
    });
  }

  // Returns each large piece as a segment, and all small ones together as one.
  std::vector<Segment> cut(const ScatterList& list, unsigned role) {
    std::vector<Segment> segments;
    int64_t small = 0;
    list.visit(0, list.bytes(), [&](const uint8_t*, uint8_t*, int64_t, int64_t bytes) {
      if (bytes < large_piece) small += bytes;
    });
    uintptr_t packed = take(small);
    if (small) segments.push_back({at(packed), at(packed), small});
    list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
      if (bytes >= large_piece) {
        segments.push_back(whole(input, output, bytes, role));
        return;
      }
      if (role & gives) made.before.push_back({at(packed), input, bytes});
      if (role & gets && output) made.after.push_back({output, at(packed), bytes});
      packed += static_cast<uintptr_t>(bytes);
    });
    return segments;
  }

  Segment whole(const uint8_t* input, uint8_t* output, int64_t bytes, unsigned role) {
    const bool lacks_input = role & gives && !input, lacks_output = role & gets && !output;
    uint8_t* stand_in = at(lacks_input || lacks_output ? take(bytes) : 0);
    if (lacks_input) {
      made.before.push_back({stand_in, nullptr, bytes});
      input = stand_in;
    }
    if (lacks_output) output = stand_in;
    return {input, output, bytes};
  }

  uintptr_t take(int64_t bytes) {
    const uintptr_t taken = next_;
    next_ += static_cast<uintptr_t>((bytes + staging_alignment - 1) / staging_alignment * staging_alignment);
    return taken;
  }

  static uint8_t* at(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

  const Transfer& transfer_;
  const bool calls_nccl_;
  uintptr_t next_;  // scratch memory from here on is free
};

}  // namespace

// Builds the list at address 0, because the size does not depend on the scratch memory's address.
size_t scratch_needed(const Transfer& transfer, bool calls_nccl) {
  return CallListBuilder(transfer, calls_nccl, 0).scratch_end();
}

NcclCallList make_call_list(const Transfer& transfer, bool calls_nccl, uint8_t* scratch) {
  return std::move(CallListBuilder(transfer, calls_nccl, reinterpret_cast<uintptr_t>(scratch)).made);
}

}  // namespace sirtaki
