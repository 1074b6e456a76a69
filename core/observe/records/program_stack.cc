#include "observe/records/program_stack.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"

namespace sirtaki {
namespace {

constexpr size_t longest_dump = 256 << 10;
constexpr Nanoseconds patience = milliseconds(300);  // many times longer than Python code holds the GIL

std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

// Returns whether a line begins a thread: "Thread 0x00007f… (most recent call first):" or "Current thread 0x00007f…
// …".
bool begins_thread(std::string_view line, uint64_t& thread) {
  constexpr std::string_view before = "hread 0x";
  const size_t at = line.find(before);
  if (at == std::string_view::npos || at > 9 || line.starts_with(' ')) return false;
  const char* begin = line.data() + at + before.size();
  return std::from_chars(begin, line.data() + line.size(), thread, 16).ec == std::errc();
}

// Parses '  File "train.py", line 88 in evaluate'.
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

// Shortens a stack to most_frames by removing the outermost library frames: libraries call each other through many
// functions, which must not displace the user's own.
void shorten(std::vector<StackFrame>& frames) {
  while (frames.size() > most_frames) {
    const auto outermost =
        std::find_if(frames.rbegin(), frames.rend(), [](const StackFrame& frame) { return is_library(frame.file); });
    frames.erase(outermost == frames.rend() ? frames.end() - 1 : outermost.base() - 1);
  }
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
    else if (is_wanted && frames.size() < most_parsed_frames && parse_frame(line, frame))
      frames.push_back(std::move(frame));
  }
  return frames;
}

bool is_library(std::string_view file) {
  constexpr std::string_view folders[] = {"/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3"};
  constexpr std::string_view interactive[] = {"<stdin>", "<ipython-input"};  // "<string>" is often a library's
  const auto begins = [&](std::string_view name) { return file.starts_with(name); };
  const auto has = [&](std::string_view folder) { return file.find(folder) != std::string_view::npos; };
  if (begins("<")) return std::none_of(std::begin(interactive), std::end(interactive), begins);
  return std::any_of(std::begin(folders), std::end(folders), has);
}

std::string name_place(const std::vector<StackFrame>& frames) {
  const auto is_users = [](const StackFrame& frame) { return !is_library(frame.file); };
  const auto own = std::find_if(frames.begin(), frames.end(), is_users);
  const StackFrame& frame = own == frames.end() ? frames.front() : *own;
  const std::string file = frame.file.substr(frame.file.rfind('/') + 1);
  const std::string at = format("at %s:%d", file.c_str(), frame.line);
  return frame.function == "<module>" ? at : "in " + frame.function + "() " + at;
}

void put_stack(JsonWriter& json, const std::vector<StackFrame>& frames) {
  json.begin_array();
  for (const StackFrame& frame : frames)
    json.begin_object()
        .member("function", frame.function)
        .member("file", frame.file)
        .member("line", frame.line)
        .member("library", is_library(frame.file))
        .end_object();
  json.end_array();
}

Status ProgramStack::open(const srt_stack_source& source) {
  if (source.signal_number < 1 || source.signal_number > SIGRTMAX)
    return {SRT_INVALID_ARGUMENT, format("there is no signal %d", source.signal_number)};
  Descriptor interpreter = Descriptor::duplicate(source.interpreter_fd), file = Descriptor::duplicate(source.file_fd);
  if (!interpreter.is_open() || !file.is_open())
    return {SRT_INVALID_ARGUMENT, format("descriptor %d or %d is not open", source.interpreter_fd, source.file_fd)};
  interpreter_ = std::move(interpreter);
  file_ = std::move(file);
  signal_ = source.signal_number;
  thread_ = source.thread;
  own_folder_ = source.own_folder ? source.own_folder : "";
  return Status::ok();
}

StackSample ProgramStack::sample() {
  StackSample found;
  if (!file_.is_open()) return found;
  const MutexLock lock(mutex_);
  std::string dump = ask_interpreter();
  if (dump.empty()) dump = read_dump();
  std::vector<StackFrame> frames = parse_stack(dump, thread_);
  found.is_known = !frames.empty();
  found.is_in_sirtaki = found.is_known && lies_in(frames.front(), own_folder_);
  std::erase_if(frames, [this](const StackFrame& frame) { return lies_in(frame, own_folder_); });
  shorten(frames);
  found.frames = std::move(frames);
  return found;
}

// Asks the interpreter for its stack. The answer repeats the number of the question, so that a late answer is not
// mistaken for the answer to the next question.
std::string ProgramStack::ask_interpreter() {
  const uint32_t number = ++question_;
  if (::send(interpreter_.get(), &number, sizeof number, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return {};
  std::string answer(longest_dump, '\0');
  for (const Nanoseconds until = now() + patience;;) {
    const ssize_t count = ::recv(interpreter_.get(), answer.data(), answer.size(), MSG_DONTWAIT);
    if (count >= static_cast<ssize_t>(sizeof number) && std::memcmp(answer.data(), &number, sizeof number) == 0)
      return answer.substr(sizeof number, static_cast<size_t>(count) - sizeof number);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return {};
    const Nanoseconds left = until - now();
    if (left <= 0) return {};
    pollfd answers{interpreter_.get(), POLLIN, 0};
    ::poll(&answers, 1, static_cast<int>(left / milliseconds(1)) + 1);
  }
}

std::string ProgramStack::read_dump() {
  struct sigaction handler;
  if (::sigaction(signal_, nullptr, &handler) != 0 || handler.sa_handler == SIG_DFL || handler.sa_handler == SIG_IGN)
    return {};
  if (::ftruncate(file_.get(), 0) != 0 || ::lseek(file_.get(), 0, SEEK_SET) != 0) return {};
  sigset_t wanted, before;
  sigemptyset(&wanted);
  sigaddset(&wanted, signal_);
  ::pthread_sigmask(SIG_UNBLOCK, &wanted, &before);
  ::raise(signal_);  // the handler has run when this returns
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::string dump(longest_dump, '\0');
  const ssize_t count = ::pread(file_.get(), dump.data(), dump.size(), 0);
  dump.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return dump;
}

}  // namespace sirtaki
