// A timeline of this rank's operations, for Perfetto (https://ui.perfetto.dev) or chrome://tracing, in the JSON array
// form of the Trace Event Format
// (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): one line per event, valid up to
// the last line even if the process is killed, because that form may end without its bracket.
//
// The engine passes finished operations to a separate thread, which writes them, so that a slow disk delays no rank.
// Operations beyond the buffer's capacity are dropped and counted.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "base/system/descriptor.h"
#include "base/thread_safety.h"
#include "observe/records/record.h"

namespace sirtaki {

// A time of the program outside of its operations, such as a collection of garbage.
struct ProgramSlice {
  std::string track, what;
  Nanoseconds begin = 0, end = 0;
};

class Timeline {
 public:
  // Creates a timeline of one of `world_size` ranks. `name` is how messages name this rank.
  Timeline(int32_t rank, int32_t world_size, std::string name, const Log& log)
      : rank_(rank), world_size_(world_size), name_(std::move(name)), log_(log) {}
  ~Timeline();

  // Begins a new file; a file that is being written is completed first.
  Status start(const std::string& path, bool marks_decisions);
  // Writes the remaining events and the end of the file. Does nothing if no file is being written.
  void stop();

  bool is_running() const { return is_running_.load(std::memory_order_relaxed); }
  bool marks_decisions() const { return is_running() && marks_decisions_.load(std::memory_order_relaxed); }

  // Each adds an event, without waiting for the disk.
  void add(const OperationRecord& operation);
  void add_decision(Nanoseconds moment);
  void add_program(ProgramSlice slice);

  // Forgets the thread in a forked child, where it does not exist. Takes no lock, because it may be held for ever
  // there.
  void forked() NOT_ANALYZED;

 private:
  struct Buffer {
    std::vector<OperationRecord> operations;
    std::vector<Nanoseconds> decisions;
    std::vector<ProgramSlice> program;
  };
  // The track of a tensor's events, and the time until which it is occupied: events of one track never overlap.
  struct Track {
    int32_t number;
    Nanoseconds busy_until;
  };
  using Tracks = std::unordered_map<std::string, Track>;
  static constexpr int32_t first_program_track = 1'000'000'000;  // those of tensors count from 1

  void write();
  bool take_events();
  void set_stopping();
  int64_t dropped_count();
  void write_head();
  void write_operation(const OperationRecord& operation);
  void write_phases(const OperationRecord& operation, Nanoseconds begin, int32_t track);
  void write_program(const ProgramSlice& slice);
  void write_event(std::string event);
  void write_slice(const char* name, Nanoseconds begin, Nanoseconds end, int32_t track);
  void flush();
  Track& track_of(std::string_view name) { return track_in(tracks_, 1, name); }
  Track& program_track_of(std::string_view name) { return track_in(program_tracks_, first_program_track, name); }
  Track& track_in(Tracks& tracks, int32_t first, std::string_view name);

  const int32_t rank_, world_size_;
  const std::string name_;
  const Log& log_;
  Mutex control_;  // serializes start and stop
  std::atomic<bool> is_running_{false}, marks_decisions_{false};

  Mutex mutex_;
  std::condition_variable changed_;
  Buffer filling_ GUARDED_BY(mutex_);
  int64_t dropped_ GUARDED_BY(mutex_) = 0;
  bool is_stopping_ GUARDED_BY(mutex_) = false;

  std::thread writer_ GUARDED_BY(control_);  // the rest belongs to the writer while it runs
  Buffer writing_;
  std::string path_, text_;
  Descriptor file_;
  bool has_events_ = false;
  Tracks tracks_, program_tracks_;
};

}  // namespace sirtaki
