#include "observe/program_stack.h"

#include <signal.h>

#include <charconv>

#include "base/log.h"

namespace sirtaki {
namespace {

constexpr size_t longest_dump = 256 << 10;

std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

// Both "Thread 0x00007f… (most recent call first):" and "Current thread 0x00007f… …" name it the same way.
bool begins_thread(std::string_view line, uint64_t& thread) {
  constexpr std::string_view before = "hread 0x";
  const size_t at = line.find(before);
  if (at == std::string_view::npos || at > 9 || line.starts_with(' ')) return false;
  const char* begin = line.data() + at + before.size();
  return std::from_chars(begin, line.data() + line.size(), thread, 16).ec == std::errc();
}

// '  File "train.py", line 88 in evaluate'
bool parse_frame(std::string_view line, StackFrame& frame) {
  constexpr std::string_view before = "  File \"", between = "\", line ", after = " in ";
  if (!line.starts_with(before)) return false;
  const size_t file_end = line.rfind(between);
  if (file_end == std::string_view::npos || file_end < before.size()) return false;
  frame.file = printable(line.substr(before.size(), file_end - before.size()), longest_frame_text);
  std::string_view rest = line.substr(file_end + between.size());
  std::from_chars(rest.data(), rest.data() + rest.size(), frame.line);
  const size_t name = rest.find(after);
  frame.function =
      name == std::string_view::npos ? "?" : printable(rest.substr(name + after.size()), longest_frame_text);
  return true;
}

bool lies_in(const StackFrame& frame, const std::string& folder) {
  return frame.file.size() > folder.size() && frame.file.starts_with(folder) && frame.file[folder.size()] == '/';
}

}  // namespace

std::vector<StackFrame> parse_stack(std::string_view dump, uint64_t thread) {
  std::vector<StackFrame> frames;
  bool is_wanted = false;
  while (!dump.empty()) {
    const std::string_view line = take_line(dump);
    uint64_t number = 0;
    StackFrame frame;
    if (begins_thread(line, number)) is_wanted = number == thread;
    else if (is_wanted && frames.size() < most_frames && parse_frame(line, frame)) frames.push_back(std::move(frame));
  }
  return frames;
}

void put_stack(JsonWriter& json, const std::vector<StackFrame>& frames) {
  json.begin_array();
  for (const StackFrame& frame : frames)
    json.begin_object()
        .member("function", frame.function)
        .member("file", frame.file)
        .member("line", frame.line)
        .end_object();
  json.end_array();
}

Status ProgramStack::open(int descriptor, int signal_number, uint64_t thread, std::string own_folder) {
  if (signal_number < 1 || signal_number > SIGRTMAX)
    return {SRT_INVALID_ARGUMENT, format("there is no signal %d", signal_number)};
  Descriptor duplicate = Descriptor::duplicate(descriptor);
  if (!duplicate.is_open()) return {SRT_INVALID_ARGUMENT, format("descriptor %d is not open", descriptor)};
  descriptor_ = std::move(duplicate);
  signal_ = signal_number;
  thread_ = thread;
  own_folder_ = std::move(own_folder);
  return Status::ok();
}

StackSample ProgramStack::sample() {
  StackSample found;
  if (!descriptor_.is_open()) return found;
  std::vector<StackFrame> frames = parse_stack(read_dump(), thread_);
  found.is_known = !frames.empty();
  found.is_in_sirtaki = found.is_known && lies_in(frames.front(), own_folder_);
  std::erase_if(frames, [this](const StackFrame& frame) { return lies_in(frame, own_folder_); });
  found.frames = std::move(frames);
  return found;
}

std::string ProgramStack::read_dump() {
  struct sigaction handler;
  if (::sigaction(signal_, nullptr, &handler) != 0 || handler.sa_handler == SIG_DFL || handler.sa_handler == SIG_IGN)
    return {};
  if (::ftruncate(descriptor_.get(), 0) != 0 || ::lseek(descriptor_.get(), 0, SEEK_SET) != 0) return {};
  sigset_t wanted, before;
  sigemptyset(&wanted);
  sigaddset(&wanted, signal_);
  ::pthread_sigmask(SIG_UNBLOCK, &wanted, &before);
  ::raise(signal_);  // the handler has run when this returns
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::string dump(longest_dump, '\0');
  const ssize_t count = ::pread(descriptor_.get(), dump.data(), dump.size(), 0);
  dump.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return dump;
}

}  // namespace sirtaki
