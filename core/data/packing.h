// Copies between the users' tensors and the chunks in transit, the same for all transports.
#pragma once

#include <algorithm>
#include <cstring>

#include "data/operation.h"

namespace sirtaki {

using CopyKernel = void (*)(void* destination, const void* source, size_t bytes);

inline void copy_plainly(void* destination, const void* source, size_t bytes) {
  std::memcpy(destination, source, bytes);
}

// The conversion of a transfer's tensors to the bytes in transit.
struct Packing {
  const Transfer& transfer;
  const Kernels& kernels;
  CopyKernel copy = copy_plainly;

  // Packs the list's prescaled bytes [begin, end), and neutral elements for parts without an input.
  void pack(const ScatterList& list, int64_t begin, int64_t end, uint8_t* chunk) const {
    const DTypeKernels* arithmetic = kernels.of(transfer.dtype);
    const size_t element = transfer.element_bytes();
    list.visit(begin, end, [&](const uint8_t* input, uint8_t*, int64_t offset, int64_t bytes) {
      const auto count = static_cast<size_t>(bytes);
      if (!input) arithmetic->fill[static_cast<int>(transfer.reduce_op)](chunk + offset, count / element);
      else if (!transfer.prescale.is_one())
        arithmetic->scale(chunk + offset, input, count / element, transfer.prescale);
      else copy(chunk + offset, input, count);
    });
  }
};

// Copies results to the outputs of a scatter list: bytes [begin, end).
inline void unpack(const ScatterList& buffer, int64_t begin, int64_t end, const uint8_t* chunk) {
  buffer.visit(begin, end, [&](const uint8_t*, uint8_t* output, int64_t offset, int64_t bytes) {
    if (output) std::memcpy(output, chunk + offset, static_cast<size_t>(bytes));
  });
}

// Copies the data that a rank sends to itself.
inline void copy_own(const ScatterList& list, int64_t begin, int64_t end) {
  list.visit(begin, end, [](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
    if (input && output && input != output) std::memcpy(output, input, static_cast<size_t>(bytes));
  });
}

// A rank's share of a buffer.
struct Slice {
  int64_t begin, bytes;
};

// Returns a member's slice. Slices begin at multiples of 64 bytes, so that no element is cut and no two ranks write
// to the same cache line.
inline Slice slice_of(int64_t bytes, size_t members, size_t member) {
  const auto count = static_cast<int64_t>(members);
  const int64_t share = ((bytes + count - 1) / count + 63) / 64 * 64;
  const int64_t begin = std::min(bytes, share * static_cast<int64_t>(member));
  return {begin, std::min(bytes, begin + share) - begin};
}

}  // namespace sirtaki
