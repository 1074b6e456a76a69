// Where the program is: the Python frames of its main thread, taken without the interpreter's lock, so that it can be
// told even of a program that holds the lock and never lets go of it.
//
// Python's faulthandler installs a signal handler that writes all threads' stacks to a descriptor
// (https://docs.python.org/3/library/faulthandler.html). The thread that wants to know raises that signal for itself:
// the handler runs in it at once, and no other thread is interrupted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.h"
#include "base/status.h"
#include "observe/json.h"

namespace sirtaki {

// A function that has begun and not returned.
struct StackFrame {
  bool operator==(const StackFrame&) const = default;

  std::string function, file;
  int32_t line = 0;
};

constexpr size_t most_frames = 12;          // the innermost ones are kept
constexpr size_t longest_frame_text = 240;  // bytes of a function's name, or a file's

// The frames of one thread in what faulthandler writes, innermost first.
std::vector<StackFrame> parse_stack(std::string_view dump, uint64_t thread);

// As a list of {"function", "file", "line"}.
void put_stack(JsonWriter& json, const std::vector<StackFrame>& frames);

// What it finds of the program's stack.
struct StackSample {
  bool is_known = false;
  bool is_in_sirtaki = false;               // the program waits in a call of sirtaki's
  std::vector<StackFrame> frames;           // without sirtaki's own, innermost first
};

class ProgramStack {
 public:
  // The descriptor is duplicated. `thread` is the main thread as pthread_self() names it, `own_folder` where
  // sirtaki's own Python files lie.
  Status open(int descriptor, int signal_number, uint64_t thread, std::string own_folder);

  // Not known where there is no Python, or its handler is gone.
  StackSample sample();

 private:
  std::string read_dump();

  Descriptor descriptor_;
  int signal_ = 0;
  uint64_t thread_ = 0;
  std::string own_folder_;
};

}  // namespace sirtaki
