// The order of tasks by happens-before, whenever they really run: a vector clock for each stream and for the host.
//
// A stream's clock is joined with the host's when the host adds a task, and with an event's at a wait; an event has the
// clock of its stream at the record; the host's is joined with an event's when a query finds that it has fired. Threads
// of the host hand over what they have seen in ways that a driver does not see, so all threads that use a GPU share its
// clock: what one has seen, the next task of any of them comes after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake {

struct Range {
  const void* address;
  size_t bytes;
  bool is_written = false;
};

bool overlap(const Range& a, const Range& b);

// The tasks that precede a point: of each stream, by its number, so many of its first tasks.
class Clock {
 public:
  void join(const Clock& other);
  uint64_t tasks_of(int stream) const;
  uint64_t count(int stream) { return ++tasks_[stream]; }

 private:
  std::map<int, uint64_t> tasks_;
};

// The use of memory by a task.
struct Access {
  Range range;
  int stream;
  uint64_t task;  // the stream's first is 1
  std::string function;

  bool is_before(const Clock& clock) const { return task <= clock.tasks_of(stream); }
  std::string text() const;
};

// The accesses of a block of memory that a later one could still be in conflict with.
class Accesses {
 public:
  // Adds an access at a stream's clock. Returns the older one that conflicts with it, without an order between them;
  // "": there is none.
  std::string add(const Access& access, const Clock& clock, const Clock& host);

  // Returns an access that the host does not know to have ended, a write if there is one; nullptr: there is none.
  const Access* first_after(const Clock& host) const;

 private:
  std::vector<Access> all_;
};

}  // namespace fake
