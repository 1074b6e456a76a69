// A scatter list: tensors anywhere in memory, seen as one buffer. Fusion needs no additional copies, because packing
// is the copy into the chunk that is sent, and unpacking is the reduction out of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace sirtaki {

class ScatterList {
 public:
  // Adds a piece. A null input reads as neutral elements, a null output is not written: a joined rank has neither.
  void add(const uint8_t* input, uint8_t* output, int64_t bytes) {
    if (bytes == 0) return;
    pieces_.push_back({input, output, total_, total_ + bytes});
    total_ += bytes;
  }

  int64_t bytes() const { return total_; }
  int64_t pieces() const { return static_cast<int64_t>(pieces_.size()); }

  void append(const ScatterList& other) {
    for (const Piece& piece : other.pieces_) add(piece.input, piece.output, piece.end - piece.begin);
  }

  // Returns a list of only the bytes [begin, end).
  ScatterList part(int64_t begin, int64_t end) const {
    ScatterList list;
    visit(begin, end,
          [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) { list.add(input, output, bytes); });
    return list;
  }

  // Returns the output of the bytes [begin, end) if it is contiguous, else an empty span.
  std::span<uint8_t> output_of(int64_t begin, int64_t end) const {
    std::span<uint8_t> found;
    visit(begin, end, [&](const uint8_t*, uint8_t* output, int64_t, int64_t bytes) {
      if (output && bytes == end - begin) found = {output, static_cast<size_t>(bytes)};
    });
    return found;
  }

  // Calls visit(input, output, offset from begin, bytes) for each contiguous part of [begin, end).
  template <typename Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit_part) const {
    if (begin >= end) return;
    auto piece =
        std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](int64_t at, const Piece& p) { return at < p.end; });
    for (; piece != pieces_.end() && piece->begin < end; ++piece) {
      const int64_t from = std::max(begin, piece->begin), to = std::min(end, piece->end);
      const int64_t skip = from - piece->begin;
      visit_part(piece->input ? piece->input + skip : nullptr, piece->output ? piece->output + skip : nullptr,
                 from - begin, to - from);
    }
  }

 private:
  struct Piece {
    const uint8_t* input;
    uint8_t* output;
    int64_t begin, end;  // positions in the whole buffer
  };
  std::vector<Piece> pieces_;
  int64_t total_ = 0;
};

}  // namespace sirtaki
