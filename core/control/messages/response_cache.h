// The response cache: an operation that was agreed on has an id, which replaces the full request from then on.
//
// The coordinator assigns and retires ids, each in a Decision; every rank applies every Decision, so all caches are
// equal. An id consists of a counter and a slot: it is never reused, and is found without a search.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "plan/request.h"

namespace sirtaki {

using CacheId = uint64_t;  // 0: none

// The key of an operation; at most one operation per key may be in flight on a rank.
struct OperationKey {
  int32_t process_set;
  Kind kind;
  std::string_view name;

  bool operator==(const OperationKey&) const = default;
};

struct OperationKeyHash {
  size_t operator()(const OperationKey& key) const {
    const auto place = static_cast<size_t>(key.process_set) * 16 + static_cast<size_t>(key.kind);
    return std::hash<std::string_view>()(key.name) ^ (place * 0x9e3779b97f4a7c15);
  }
};

inline OperationKey key_of(const Signature& signature) {
  return {signature.process_set, signature.kind, signature.name};
}

// Returns the row counts of a ragged request, row_counts_each() of them if it is valid.
std::span<const int64_t> rows_of(const Signature& signature);

// Returns the row counts of the member at `position` within those of all members.
std::span<const int64_t> rows_at(const Signature& signature, const std::vector<int64_t>& rows, size_t members,
                                 size_t position);

// Returns whether both are on the CPU, or both on a GPU. Ranks number their own devices, so GPUs are not compared.
inline bool same_kind_of_device(const Signature& a, const Signature& b) { return (a.device < 0) == (b.device < 0); }

// Returns whether two ranks' requests under one key can be one operation: they are equal except for the priority,
// which is a hint, and the rows of a ragged kind.
bool agree(const Signature& a, const Signature& b);

// Returns whether a cached response answers this request from the member at `position` of `members`.
bool answers(const Signature& cached, const std::vector<int64_t>& rows, const Signature& request, size_t members,
             size_t position);

constexpr uint32_t most_cached = 1 << 24;

inline uint32_t slot_of(CacheId id) { return static_cast<uint32_t>(id) & (most_cached - 1); }

// A table from ids to cached records: operations of a rank or entries of the coordinator.
template <typename Record>
class CacheTable {
 public:
  explicit CacheTable(uint32_t capacity) : capacity_(capacity < most_cached ? capacity : most_cached) {}

  uint32_t capacity() const { return capacity_; }
  uint32_t size() const { return size_; }

  Record* find(CacheId id) const {
    const uint32_t slot = slot_of(id);
    return slot < slots_.size() && slots_[slot].id == id ? slots_[slot].record : nullptr;
  }

  // Adds a record; returns false if the id is 0, beyond the capacity, or its slot is taken.
  bool put(CacheId id, Record* record) {
    const uint32_t slot = slot_of(id);
    if (id < most_cached || slot >= capacity_) return false;
    if (slot >= slots_.size()) slots_.resize(slot + 1);
    if (slots_[slot].id) return false;
    slots_[slot] = {id, record};
    ++size_;
    return true;
  }

  void remove(CacheId id) {
    if (!find(id)) return;
    slots_[slot_of(id)] = {};
    --size_;
  }

 private:
  struct Slot {
    CacheId id = 0;
    Record* record = nullptr;
  };
  std::vector<Slot> slots_;
  uint32_t capacity_;
  uint32_t size_ = 0;
};

// The generator of ids, which only the coordinator has.
class CacheIds {
 public:
  CacheId take() {
    uint32_t slot = next_slot_;
    if (free_slots_.empty()) {
      ++next_slot_;
    } else {
      slot = free_slots_.back();
      free_slots_.pop_back();
    }
    return ++issued_ * most_cached + slot;
  }
  void give_back(CacheId id) { free_slots_.push_back(slot_of(id)); }
  bool was_issued(CacheId id) const { return id >= most_cached && id / most_cached <= issued_; }

 private:
  std::vector<uint32_t> free_slots_;
  uint32_t next_slot_ = 0;
  uint64_t issued_ = 0;
};

}  // namespace sirtaki
