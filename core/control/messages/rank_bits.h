// A set of ranks, one bit each.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sirtaki {

class RankBits {
 public:
  explicit RankBits(int32_t size = 0) : words_((static_cast<size_t>(size) + 63) / 64) {}

  int32_t capacity() const { return static_cast<int32_t>(words_.size() * 64); }
  bool has(int32_t rank) const { return words_[word(rank)] >> (rank & 63) & 1; }
  void add(int32_t rank) { words_[word(rank)] |= uint64_t{1} << (rank & 63); }
  void clear() { words_.assign(words_.size(), 0); }
  bool operator==(const RankBits&) const = default;

  bool overlaps(const RankBits& other) const {
    uint64_t common = 0;
    for (size_t i = 0; i < words_.size(); ++i) common |= words_[i] & other.words_[i];
    return common != 0;
  }

  // Returns whether each of these ranks is in at least one of the others.
  template <typename... Others>
  bool are_within(const Others&... others) const {
    uint64_t outside = 0;
    for (size_t i = 0; i < words_.size(); ++i) outside |= words_[i] & ~(others.words_[i] | ...);
    return outside == 0;
  }

  bool are_none() const {
    uint64_t any = 0;
    for (uint64_t bits : words_) any |= bits;
    return any == 0;
  }

  int32_t count() const {
    int32_t total = 0;
    for (uint64_t bits : words_) total += std::popcount(bits);
    return total;
  }

  RankBits& operator|=(const RankBits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
    return *this;
  }

  RankBits& operator&=(const RankBits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
    return *this;
  }

  // Removes the other's ranks.
  RankBits& operator-=(const RankBits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
    return *this;
  }

  // Visits the ranks in ascending order.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      for (uint64_t bits = words_[i]; bits; bits &= bits - 1) {
        visit(static_cast<int32_t>(i * 64) + std::countr_zero(bits));
      }
    }
  }

  std::vector<int32_t> ranks() const {
    std::vector<int32_t> found;
    for_each([&](int32_t rank) { found.push_back(rank); });
    return found;
  }

 private:
  static size_t word(int32_t rank) { return static_cast<size_t>(rank) / 64; }

  std::vector<uint64_t> words_;
};

}  // namespace sirtaki
