#include "context/failure_report.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "observe/json.h"

namespace sirtaki {
namespace {

constexpr size_t most_finished = 256;  // finished operations that are reported
constexpr size_t most_unfinished = 1'000;

const char* state_of(const OperationRecord& operation) {
  if (operation.finished) return StatusTable::name(operation.status);
  if (operation.transfer.started) return "moving";
  if (operation.decided) return "agreed";
  return operation.reported ? "waiting for other ranks" : "queued";
}

// Writes the times that are known, by the monotonic clock, as timelines have them.
void put_times(JsonWriter& json, const OperationRecord& operation) {
  const std::pair<const char*, Nanoseconds> times[] = {{"submitted_ns", operation.submitted},
                                                       {"agreed_ns", operation.decided},
                                                       {"moved_ns", operation.transfer.started},
                                                       {"ended_ns", operation.finished}};
  for (const auto& [name, time] : times)
    if (time) json.member(name, time);
}

void put_operation(JsonWriter& json, const OperationRecord& operation, Nanoseconds now) {
  json.new_line().begin_object();
  json.member("name", operation.name.view()).member("kind", operation.kind).member("state", state_of(operation));
  json.member("submitted_seconds_ago", in_seconds(now - operation.submitted));
  if (operation.finished) json.member("took_seconds", in_seconds(operation.finished - operation.submitted));
  put_times(json, operation);
  json.member("bytes", operation.bytes).member("process_set", operation.process_set);
  if (operation.plan) json.member("plan", operation.plan).member("fused", operation.fused);
  if (operation.refused) put_refused(json, *operation.refused);
  json.end_object();
}

void put_statistics(JsonWriter& json, const Statistics& counted, Nanoseconds now) {
  json.new_line().key("statistics").begin_object();
  json.member("operations", counted.operations).member("failed", counted.failed).member("plans", counted.plans);
  json.member("bytes", counted.bytes).member("waiting_seconds", in_seconds(counted.waiting.until(now)));
  json.member("moving_seconds", in_seconds(counted.moving.until(now))).end_object();
}

}  // namespace

FailureReport::FailureReport(const FailureReportParts& parts, const Config& config)
    : parts_(parts), directory_(config.text(Knob::dump_directory)) {
  if (!directory_.empty()) path_ = format("%s/rank%d.json", directory_.c_str(), parts.rank);
}

void FailureReport::forget() const {
  if (is_wanted()) ::unlink(path_.c_str());
}

// Writes to a temporary name first, so that no reader sees a partial file.
void FailureReport::write(const AbortNotice& why) const {
  const std::string text = describe(why), fresh = path_ + ".new";
  ::mkdir(directory_.c_str(), 0777);  // may exist already
  ::unlink(fresh.c_str());  // in a folder that others can write to, it could be a link to any of this user's files
  const Descriptor file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  const bool is_written = file.is_open() &&
                          ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                          std::rename(fresh.c_str(), path_.c_str()) == 0;
  if (!is_written)
    parts_.log.line(format("what this rank did could not be written to %s: %s", path_.c_str(), std::strerror(errno)));
}

std::string FailureReport::describe(const AbortNotice& why) const {
  const StackSample stack = parts_.program_stack.sample();
  const Access state(parts_.state);
  const Nanoseconds moment = now();
  const RankLocation& location = parts_.locations[static_cast<size_t>(parts_.rank)];
  std::vector<const OperationRecord*> unfinished, finished;
  state->observer.recorder().visit(
      [&](const OperationRecord& operation) { (operation.is_open() ? unfinished : finished).push_back(&operation); });
  JsonWriter json;
  json.begin_object().member("rank", parts_.rank).member("size", parts_.locations.size());
  json.member("host", location.host).member("pid", location.pid);
  json.key("clock").begin_object().member("monotonic_ns", moment);
  json.member("wall_minus_monotonic_ns", wall_clock() - now()).end_object();
  json.new_line().member("status", StatusTable::name(why.status.code()));
  json.member("culprit", why.origin).member("reason", why.status.text());
  json.new_line().key("stack");
  put_stack(json, stack.frames);
  put_statistics(json, state->observer.statistics(), moment);
  json.new_line().key("unfinished").begin_array();
  for (size_t i = 0; i < std::min(unfinished.size(), most_unfinished); ++i) put_operation(json, *unfinished[i], moment);
  json.end_array().new_line().key("finished").begin_array();
  const size_t first = finished.size() > most_finished ? finished.size() - most_finished : 0;
  for (size_t i = first; i < finished.size(); ++i) put_operation(json, *finished[i], moment);
  return json.end_array().end_object().take() + "\n";
}

}  // namespace sirtaki
