#pragma once

#include <cstdint>
#include <random>
#include <vector>

inline std::vector<uint8_t> random_bytes(size_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}
