// Copies a list to the array of a C caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace sirtaki {

// Writes at most `capacity` values; returns how many there are.
template <typename T>
int32_t give(const std::vector<T>& values, T* out, int32_t capacity) {
  std::copy_n(values.begin(), std::clamp<ptrdiff_t>(capacity, 0, std::ssize(values)), out);
  return static_cast<int32_t>(values.size());
}

}  // namespace sirtaki
