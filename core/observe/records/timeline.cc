#include "observe/records/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/system/thread.h"
#include "observe/records/json.h"

namespace sirtaki {
namespace {

constexpr size_t most_buffered = 1 << 14;                            // operations, or Decisions
constexpr Nanoseconds between_writes = milliseconds(200);
constexpr int32_t decisions_track = 0;

// Formats a time in microseconds, the unit of the format, with nanosecond resolution.
std::string in_microseconds(Nanoseconds time) {
  return format("%lld.%03lld", static_cast<long long>(time / 1000), static_cast<long long>(time % 1000));
}

template <typename Buffer>
void prepare(Buffer& buffer) {
  buffer.operations.reserve(most_buffered);
  buffer.decisions.reserve(most_buffered);
  buffer.program.reserve(most_buffered);
}

}  // namespace

Timeline::~Timeline() { stop(); }

void Timeline::forked() {
  is_running_ = false;
  file_.close();
  if (writer_.joinable()) writer_.detach();
}

Status Timeline::start(const std::string& path, bool marks_decisions) {
  stop();
  const MutexLock control(control_);
  // A link may be another user's, and lead to any file of this user's.
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file.is_open())
    return {SRT_SYSTEM,
            format("the timeline cannot be written to '%s': %s", printable(path, 400).c_str(), std::strerror(errno))};
  file_ = std::move(file);
  path_ = path;
  has_events_ = false;
  tracks_.clear();
  program_tracks_.clear();
  prepare(writing_);
  {
    const MutexLock lock(mutex_);
    is_stopping_ = false;
    dropped_ = 0;
    prepare(filling_);
  }
  write_head();
  marks_decisions_ = marks_decisions;
  writer_ = start_thread([this] { write(); });
  is_running_ = true;
  return Status::ok();
}

void Timeline::stop() {
  const MutexLock control(control_);
  if (!writer_.joinable()) return;
  is_running_ = false;
  set_stopping();
  changed_.notify_one();
  writer_.join();
  if (const int64_t dropped = dropped_count())
    log_.line(format("%lld operations are missing in the timeline %s: its disk was too slow for them",
                     static_cast<long long>(dropped), path_.c_str()));
  text_ += "\n]\n";
  flush();
  file_.close();
}

void Timeline::set_stopping() {
  const MutexLock lock(mutex_);
  is_stopping_ = true;
}

int64_t Timeline::dropped_count() {
  const MutexLock lock(mutex_);
  return dropped_;
}

void Timeline::add(const OperationRecord& operation) {
  const MutexLock lock(mutex_);
  if (filling_.operations.size() == most_buffered) ++dropped_;
  else filling_.operations.push_back(operation);
  if (filling_.operations.size() == most_buffered / 2) changed_.notify_one();
}

void Timeline::add_decision(Nanoseconds moment) {
  const MutexLock lock(mutex_);
  if (filling_.decisions.size() < most_buffered) filling_.decisions.push_back(moment);
}

void Timeline::add_program(ProgramSlice slice) {
  if (!is_running() || slice.begin < 0 || slice.begin >= slice.end) return;
  const MutexLock lock(mutex_);
  if (filling_.program.size() < most_buffered) filling_.program.push_back(std::move(slice));
}

// Waits for events and takes them. Returns whether they are the last ones.
bool Timeline::take_events() {
  MutexLock lock(mutex_);
  if (!is_stopping_ && filling_.operations.size() < most_buffered / 2) lock.wait_for(changed_, between_writes);
  std::swap(filling_, writing_);
  return is_stopping_;
}

void Timeline::write() {
  for (bool is_last = false; !is_last;) {
    is_last = take_events();
    for (const OperationRecord& operation : writing_.operations) write_operation(operation);
    for (Nanoseconds moment : writing_.decisions)
      write_event(format(R"({"ph": "i", "name": "DECISION", "pid": %d, "tid": %d, "ts": %s, "s": "p"})", rank_,
                         decisions_track, in_microseconds(moment).c_str()));
    for (const ProgramSlice& slice : writing_.program) write_program(slice);
    writing_.operations.clear();
    writing_.decisions.clear();
    writing_.program.clear();
    flush();
  }
}

void Timeline::write_head() {
  text_ = "[\n";
  const auto describe = [&](const char* what, int32_t track, const char* field, auto value) {
    JsonWriter json;
    json.begin_object().member("ph", "M").member("name", what).member("pid", rank_).member("tid", track);
    json.key("args").begin_object().member(field, value).end_object().end_object();
    write_event(json.take());
  };
  describe("process_name", decisions_track, "name", name_);
  describe("process_sort_index", decisions_track, "sort_index", rank_);
  describe("thread_name", decisions_track, "name", "Decisions");
  describe("world", decisions_track, "size", world_size_);  // tells a reader whose files are missing
  // All ranks of a host share the monotonic clock; between hosts this value gives the offset of their clocks.
  describe("clock", decisions_track, "wall_minus_monotonic_ns", wall_clock() - now());
  flush();
}

Timeline::Track& Timeline::track_in(Tracks& tracks, int32_t first, std::string_view name) {
  const auto next = static_cast<int32_t>(tracks.size()) + first;
  const auto [found, is_new] = tracks.try_emplace(std::string(name), Track{next, 0});
  if (is_new) {
    JsonWriter json;
    json.begin_object().member("ph", "M").member("name", "thread_name").member("pid", rank_).member("tid", next);
    json.key("args").begin_object().member("name", name).end_object().end_object();
    write_event(json.take());
  }
  return found->second;
}

void Timeline::write_operation(const OperationRecord& operation) {
  Track& track = track_of(operation.name.view());
  // An operation may have waited for another of the same name: its event begins when that one ends.
  const Nanoseconds begin = std::max(operation.submitted, track.busy_until);
  const Nanoseconds end = std::max(operation.finished, begin);
  track.busy_until = end;
  JsonWriter facts;
  facts.begin_object().member("bytes", operation.bytes).member("process_set", operation.process_set);
  facts.member("plan", operation.plan).member("fused", operation.fused).member("cached", operation.is_cached);
  facts.member("status", StatusTable::name(operation.status));
  if (operation.refused) put_refused(facts, *operation.refused);
  facts.end_object();
  write_event(format(R"({"ph": "X", "name": "%s", "pid": %d, "tid": %d, "ts": %s, "dur": %s, "args": %s})",
                     operation.kind, rank_, track.number, in_microseconds(begin).c_str(),
                     in_microseconds(end - begin).c_str(), facts.text().c_str()));
  write_phases(operation, begin, track.number);
}

// Writes the phases of an operation. Chunks are packed and unpacked in turn, so PACK and UNPACK are sums: PACK is
// drawn from the start of the first packing, UNPACK up to the end of the last unpacking, and the gap between them is
// the time in which neither was done.
void Timeline::write_phases(const OperationRecord& operation, Nanoseconds begin, int32_t track) {
  const Nanoseconds end = std::max(operation.finished, begin);
  const auto within = [&](Nanoseconds moment) { return std::clamp(moment, begin, end); };
  const Nanoseconds decided = operation.decided ? within(operation.decided) : end;
  write_slice("NEGOTIATE", begin, decided, track);
  if (!operation.transfer.started) return;
  const Nanoseconds started = std::max(within(operation.transfer.started), decided);
  const Nanoseconds packed = std::min(started + operation.transfer.packing, end);
  const Nanoseconds unpacking = operation.transfer.working - operation.transfer.packing;
  const Nanoseconds unpacked = std::clamp(end - unpacking, packed, end);
  write_slice("QUEUE", decided, started, track);
  write_slice("PACK", started, packed, track);
  write_slice("TRANSFER", packed, unpacked, track);
  write_slice("UNPACK", unpacked, end, track);
}

void Timeline::write_slice(const char* name, Nanoseconds begin, Nanoseconds end, int32_t track) {
  if (begin >= end) return;
  write_event(format(R"({"ph": "X", "name": "%s", "pid": %d, "tid": %d, "ts": %s, "dur": %s})", name, rank_, track,
                     in_microseconds(begin).c_str(), in_microseconds(end - begin).c_str()));
}

void Timeline::write_program(const ProgramSlice& slice) {
  Track& track = program_track_of(slice.track);
  const Nanoseconds begin = std::max(slice.begin, track.busy_until);
  if (begin >= slice.end) return;
  track.busy_until = slice.end;
  JsonWriter what;
  what.value(slice.what);
  write_event(format(R"({"ph": "X", "name": %s, "cat": "program", "pid": %d, "tid": %d, "ts": %s, "dur": %s})",
                     what.text().c_str(), rank_, track.number, in_microseconds(begin).c_str(),
                     in_microseconds(slice.end - begin).c_str()));
}

void Timeline::write_event(std::string event) {
  if (has_events_) text_ += ",\n";
  has_events_ = true;
  text_ += event;
}

void Timeline::flush() {
  for (size_t at = 0; at < text_.size() && file_.is_open();) {
    const ssize_t count = ::write(file_.get(), text_.data() + at, text_.size() - at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      log_.line(format("the timeline %s ends here: %s", path_.c_str(), std::strerror(errno)));
      file_.close();
      break;
    }
    at += static_cast<size_t>(count);
  }
  text_.clear();
}

}  // namespace sirtaki
