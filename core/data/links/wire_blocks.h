// The blocks of a wire format in a buffer of tensors of floats. Each piece of the buffer's list is a tensor, or a part
// of one that begins with a block. Positions and sizes are in bytes of the buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/dtypes/wire_format.h"
#include "data/scatter.h"

namespace sirtaki {

class WireBlocks {
 public:
  static constexpr int64_t block_bytes = wire_block * sizeof(float);

  explicit WireBlocks(const ScatterList& buffer) {
    buffer.visit(0, buffer.bytes(), [&](const uint8_t*, const uint8_t*, int64_t offset, int64_t bytes) {
      ends_.push_back(offset + bytes);
    });
  }

  // Returns the position if a block begins there, else the end of the block that it is in.
  int64_t border(int64_t position) const {
    const auto tensor = std::upper_bound(ends_.begin(), ends_.end(), position);
    if (tensor == ends_.end()) return position;  // the end of the buffer
    const int64_t begin = tensor == ends_.begin() ? 0 : *(tensor - 1);
    return std::min(begin + (position - begin + block_bytes - 1) / block_bytes * block_bytes, *tensor);
  }

  // Returns the encoded size of the bytes between two borders.
  int64_t encoded_bytes(int64_t begin, int64_t end) const {
    int64_t bytes = 0;
    auto tensor = std::upper_bound(ends_.begin(), ends_.end(), begin);
    for (; begin < end; begin = std::min(*tensor++, end))
      bytes += static_cast<int64_t>(encoded_size(static_cast<size_t>(std::min(*tensor, end) - begin) / sizeof(float)));
    return bytes;
  }

 private:
  std::vector<int64_t> ends_;  // of the tensors
};

}  // namespace sirtaki
