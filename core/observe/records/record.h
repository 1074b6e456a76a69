// The flight recorder's record of one operation of this rank: its properties, and the time of each stage.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "observe/records/program_stack.h"

namespace sirtaki {

// A name without allocated memory. A name that is too long keeps its beginning and its end, since names differ there.
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

// The properties of an operation that are known when it is submitted.
struct Submitted {
  std::string_view name;
  const char* kind;       // "all-reduce"; a static string
  int32_t process_set;
  int64_t bytes;          // size of this rank's tensor
};

// The times of the plan that an operation belongs to. Packing is the copy into chunks that are sent; unpacking is the
// processing of received chunks, by reducing or copying. Both are measured only while a timeline runs, and are 0
// otherwise.
struct TransferTimes {
  Nanoseconds started = 0;
  Nanoseconds packing = 0, working = 0;  // working: packing and unpacking
  bool are_measured = false;
};

// The bytes that a plan has sent in a wire format: as sent, and as they would have been sent otherwise.
struct WireBytes {
  int64_t encoded = 0, unencoded = 0;
};

// The reason why an operation was refused, and the program's stack when this rank learnt of it.
struct RefusedOperation {
  std::string reason;
  std::vector<StackFrame> stack;
};

// Writes the members "error" and "stack".
void put_refused(JsonWriter& json, const RefusedOperation& refused);

// The record of one operation. A time is 0 until its event happens. `number` counts operations from 1; 0 marks an
// empty slot.
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
  std::shared_ptr<const RefusedOperation> refused;  // nullptr: not refused
};

}  // namespace sirtaki
