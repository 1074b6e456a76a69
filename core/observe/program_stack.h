// Where the program is: the Python frames of its main thread, told even of a program that holds the interpreter's lock
// and never lets go of it.
//
// First a Python thread that waits for nothing else is asked, over a socket: it needs the lock, and frames do not
// change while it has it. If it does not answer in time, then whoever holds the lock executes no Python code, since
// that would give the lock away every few milliseconds; so frames do not change now either, and can be read without it:
// Python's faulthandler (https://docs.python.org/3/library/faulthandler.html) has installed a signal handler that
// writes all threads' stacks to a file. The thread that wants to know raises that signal for itself, so no other is
// interrupted. (Frames that do change must not be read in this way: that would crash the program, sooner or later.)
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

constexpr size_t most_frames = 12;  // in a sample: the user's own and the innermost ones are kept
constexpr size_t most_parsed_frames = 100;
constexpr size_t longest_frame_text = 240;  // bytes of a function's name, or a file's

// The frames of one thread in what faulthandler writes, innermost first.
std::vector<StackFrame> parse_stack(std::string_view dump, uint64_t thread);

// Whether a Python file belongs to the standard library or to an installed package, and not to the user's program.
bool is_library(std::string_view file);

// As a list of {"function", "file", "line", "library"}.
void put_stack(JsonWriter& json, const std::vector<StackFrame>& frames);

// What it finds of the program's stack.
struct StackSample {
  bool is_known = false;
  bool is_in_sirtaki = false;  // the program waits in a call of sirtaki's
  std::vector<StackFrame> frames;  // without sirtaki's own, innermost first
};

class ProgramStack {
 public:
  // The descriptors are duplicated: the interpreter's end of a sequenced-packet socket, and the file that the handler
  // of the signal writes to. `thread` is the main thread as pthread_self() names it, `own_folder` where sirtaki's own
  // Python files lie.
  Status open(const srt_stack_source& source);

  // Not known where there is no Python, or its handler is gone.
  StackSample sample();

 private:
  std::string ask_interpreter();
  std::string read_dump();

  Descriptor interpreter_, file_;
  uint32_t question_ = 0;  // the number of the last one
  int signal_ = 0;
  uint64_t thread_ = 0;
  std::string own_folder_;
};

}  // namespace sirtaki
