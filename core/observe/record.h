// One operation of this rank as the flight recorder keeps it: what it is, and when it came how far.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"

namespace sirtaki {

// A name without memory of its own: one that is too long keeps its beginning and its end, where names differ.
class ShortName {
 public:
  ShortName() = default;
  explicit ShortName(std::string_view name);
  std::string_view view() const { return {text_.data(), length_}; }

 private:
  static constexpr size_t most_bytes = 79;
  std::array<char, most_bytes> text_;
  uint8_t length_ = 0;
};

// What is known of an operation when it is submitted.
struct Submitted {
  std::string_view name;
  const char* kind;       // "all-reduce"; lives as long as the program
  int32_t process_set;
  int64_t bytes;          // of this rank's tensor
};

// When the plan that an operation belongs to began to move, and where its time went. Packing is the copy into chunks
// that travel, unpacking is what is done with those that came: reducing or copying. Both are measured only while a
// timeline runs, and are 0 otherwise.
struct TransferTimes {
  Nanoseconds started = 0;
  Nanoseconds packing = 0, working = 0;  // working: packing and unpacking
  bool are_measured = false;
};

// Times are 0 until it happens. `number` counts operations from 1; 0 is an empty place.
struct OperationRecord {
  bool is_open() const { return number && !finished; }

  uint64_t number = 0;
  uint64_t plan = 0;      // 0: none yet
  Nanoseconds submitted = 0, reported = 0, decided = 0, finished = 0;
  TransferTimes transfer;
  int64_t bytes = 0;
  const char* kind = "";
  int32_t process_set = 0;
  int32_t fused = 0;      // tensors in its plan
  srt_status status = SRT_IN_PROGRESS;
  bool is_cached = false; // reported by its number in the response cache
  ShortName name;
};

}  // namespace sirtaki
