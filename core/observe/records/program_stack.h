// The current position of the program: the Python frames of its main thread, found even if the program holds the GIL
// and never releases it.
//
// First, a Python thread that only waits for this is asked over a socket. It needs the GIL, and frames do not change
// while it holds it. If it does not answer in time, the thread that holds the GIL executes no Python code, since that
// would release the GIL every few milliseconds. So frames do not change now either, and can be read without the GIL:
// Python's faulthandler (https://docs.python.org/3/library/faulthandler.html) has installed a signal handler that
// writes all threads' stacks to a file. The asking thread raises that signal for itself, so no other thread is
// interrupted. (Frames that do change must not be read in this way: that would crash the program sooner or later.)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/system/descriptor.h"
#include "base/thread_safety.h"
#include "observe/records/json.h"
#include "sirtaki_observe.h"

namespace sirtaki {

// A function that has started and not returned.
struct StackFrame {
  bool operator==(const StackFrame&) const = default;

  std::string function, file;
  int32_t line = 0;
};

constexpr size_t most_frames = 12;  // in a sample: the user's own and the innermost ones are kept
constexpr size_t most_parsed_frames = 100;
constexpr size_t longest_frame_text = 240;  // bytes of a function's or a file's name

// Returns the frames of one thread from faulthandler's output, innermost first.
std::vector<StackFrame> parse_stack(std::string_view dump, uint64_t thread);

// Returns whether a Python file belongs to the standard library or to an installed package, and not to the user's
// program.
bool is_library(std::string_view file);

// Returns the innermost function of the user's own, or else the innermost of all: "in step() at train.py:88".
std::string name_place(const std::vector<StackFrame>& frames);

// Writes frames as a list of {"function", "file", "line", "library"}.
void put_stack(JsonWriter& json, const std::vector<StackFrame>& frames);

// One sample of the program's stack.
struct StackSample {
  bool is_known = false;
  bool is_in_sirtaki = false;  // the program is inside a call of sirtaki
  std::vector<StackFrame> frames;  // frames without sirtaki's own, innermost first
};

class ProgramStack {
 public:
  // Opens the source and duplicates its descriptors: the interpreter's end of a sequenced-packet socket, and the file
  // that the signal handler writes to. `thread` is the main thread's pthread_self(), `own_folder` the folder of
  // sirtaki's own Python files.
  Status open(const srt_stack_source& source);

  // Returns a sample; it is not known if there is no Python, or if the signal handler was removed. Callable from any
  // thread.
  StackSample sample();

 private:
  std::string ask_interpreter();
  std::string read_dump();

  Descriptor interpreter_, file_;
  uint32_t question_ = 0;  // the number of the last question
  int signal_ = 0;
  uint64_t thread_ = 0;
  std::string own_folder_;
  Mutex mutex_;  // one question at a time
};

}  // namespace sirtaki
