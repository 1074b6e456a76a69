#include "gpu/nccl/nccl_call_list.h"

#include <algorithm>

namespace sirtaki {
namespace {

constexpr int64_t staging_alignment = 256;

struct Segment {
  const uint8_t* input;
  uint8_t* output;
  int64_t bytes;
};
using Segments = std::vector<Segment>;

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
    const std::vector<ScatterList>& lists = is_cut() ? transfer_.outgoing : transfer_.incoming;
    const std::vector<Segments> parts = parts_of(lists);
    if (calls_nccl_ && are_equal(parts)) return add_collectives(parts);
    for (size_t member = 0; member < lists.size(); ++member)
      add_calls(lists[member], role(member, is_cut() ? gives : gets), member);
  }

  // Returns whether each rank has all parts, and gets its own one of their sums; else it has its own, and gets all.
  bool is_cut() const { return traits(transfer_.kind).output == Output::rows; }

  bool is_own(size_t member) const { return member == transfer_.own; }

  void add_calls(const ScatterList& list, unsigned role, size_t member) {
    if (!calls_nccl_) return copy_own(list);
    for (const Segment& segment : cut(list, role))
      made.calls.push_back({segment.input, segment.output, segment.bytes, member});
  }

  static std::vector<Segments> parts_of(const std::vector<ScatterList>& lists) {
    std::vector<Segments> parts(lists.size());
    for (size_t member = 0; member < lists.size(); ++member)
      lists[member].visit(0, lists[member].bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
        parts[member].push_back({input, output, bytes});
      });
    return parts;
  }

  static bool are_equal(const std::vector<Segments>& parts) {
    const auto same_bytes = [](const Segment& a, const Segment& b) { return a.bytes == b.bytes; };
    return std::all_of(parts.begin(), parts.end(), [&](const Segments& part) {
      return std::equal(part.begin(), part.end(), parts.front().begin(), parts.front().end(), same_bytes);
    });
  }

  // Adds a call for each large piece of the members' parts, and another for all small pieces together.
  void add_collectives(const std::vector<Segments>& parts) {
    std::vector<size_t> small;
    for (size_t piece = 0; piece < parts.front().size(); ++piece) {
      if (parts.front()[piece].bytes < large_piece) small.push_back(piece);
      else add_collective(parts, {piece});
    }
    if (!small.empty()) add_collective(parts, small);
  }

  // Adds one call for these pieces of all parts. Where they do not lie in the order of ranks, scratch memory stands in.
  void add_collective(const std::vector<Segments>& parts, const std::vector<size_t>& pieces) {
    int64_t bytes = 0;
    for (size_t piece : pieces) bytes += parts.front()[piece].bytes;
    const Segment &first = parts.front()[pieces.front()], &own = parts[transfer_.own][pieces.front()];
    if (pieces.size() == 1 && is_contiguous(parts, pieces.front()) && own.input && own.output) {
      made.collectives.push_back({is_cut() ? first.input : own.input, is_cut() ? own.output : first.output, bytes, 0});
      return;
    }
    uintptr_t packed = take(bytes * static_cast<int64_t>(parts.size()));
    uint8_t* const all = at(packed);
    uint8_t* const own_part = at(packed + transfer_.own * static_cast<uintptr_t>(bytes));
    made.collectives.push_back({is_cut() ? all : own_part, is_cut() ? own_part : all, bytes, 0});
    for (size_t member = 0; member < parts.size(); ++member)
      for (size_t piece : pieces) {
        const Segment& segment = parts[member][piece];
        if (is_cut() || is_own(member)) made.before.push_back({at(packed), segment.input, segment.bytes});
        if ((!is_cut() || is_own(member)) && segment.output)
          made.after.push_back({segment.output, at(packed), segment.bytes});
        packed += static_cast<uintptr_t>(segment.bytes);
      }
  }

  // Returns whether the members' pieces with this index follow each other in the memory that holds all of them.
  bool is_contiguous(const std::vector<Segments>& parts, size_t piece) const {
    const auto address = [&](size_t member) {
      const Segment& segment = parts[member][piece];
      return reinterpret_cast<uintptr_t>(is_cut() ? segment.input : segment.output);
    };
    for (size_t member = 1; member < parts.size(); ++member)
      if (address(member) != address(member - 1) + static_cast<uintptr_t>(parts[member][piece].bytes)) return false;
    return address(0) != 0;
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

  // Returns all small pieces together as a segment, and each large piece as another.
  Segments cut(const ScatterList& list, unsigned role) {
    Segments segments, small, large;
    list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
      (bytes < large_piece ? small : large).push_back({input, output, bytes});
    });
    if (!small.empty()) segments.push_back(together(small, role));
    for (const Segment& piece : large) segments.push_back(whole(piece.input, piece.output, piece.bytes, role));
    return segments;
  }

  // Returns small pieces as one segment. They are packed into scratch memory, except where they lie next to each other.
  Segment together(const Segments& pieces, unsigned role) {
    Segment all{nullptr, nullptr, 0};
    for (const Segment& piece : pieces) all.bytes += piece.bytes;
    if (role & gives) all.input = range_of(pieces, &Segment::input);
    if (role & gets) all.output = range_of(pieces, &Segment::output);
    const bool packs = role & gives && !all.input, unpacks = role & gets && !all.output;
    uintptr_t packed = packs || unpacks ? take(all.bytes) : 0;
    if (packs) all.input = at(packed);
    if (unpacks) all.output = at(packed);
    for (const Segment& piece : pieces) {
      if (packs) made.before.push_back({at(packed), piece.input, piece.bytes});
      if (unpacks && piece.output) made.after.push_back({piece.output, at(packed), piece.bytes});
      packed += static_cast<uintptr_t>(piece.bytes);
    }
    return all;
  }

  // Returns the address of the memory that these inputs or outputs fill in their order, without gaps; else nullptr.
  template <typename Byte>
  static Byte* range_of(const Segments& pieces, Byte* Segment::* side) {
    Byte *const begin = pieces.front().*side, *end = begin;
    for (const Segment& piece : pieces) {
      if (!end || piece.*side != end) return nullptr;
      end += piece.bytes;
    }
    return begin;
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
