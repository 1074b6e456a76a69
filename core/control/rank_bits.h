// A set of ranks, one bit each.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace sirtaki {

class RankBits {
 public:
  explicit RankBits(int32_t size = 0) : words_((static_cast<size_t>(size) + 63) / 64) {}

  bool has(int32_t rank) const { return words_[word(rank)] >> (rank & 63) & 1; }
  void add(int32_t rank) { words_[word(rank)] |= uint64_t{1} << (rank & 63); }
  void clear() { words_.assign(words_.size(), 0); }
  bool operator==(const RankBits&) const = default;

  int32_t count() const {
    int32_t total = 0;
    for (uint64_t bits : words_) total += std::popcount(bits);
    return total;
  }

  RankBits& operator|=(const RankBits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
    return *this;
  }

  // Takes the other's ranks out.
  RankBits& operator-=(const RankBits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
    return *this;
  }

  std::vector<int32_t> ranks() const {
    std::vector<int32_t> found;
    for (size_t i = 0; i < words_.size(); ++i) {
      for (uint64_t bits = words_[i]; bits; bits &= bits - 1) {
        found.push_back(static_cast<int32_t>(i * 64) + std::countr_zero(bits));
      }
    }
    return found;
  }

 private:
  static size_t word(int32_t rank) { return static_cast<size_t>(rank) / 64; }

  std::vector<uint64_t> words_;
};

}  // namespace sirtaki
