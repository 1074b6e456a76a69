#include "context/failure/failure_report.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/system/descriptor.h"
#include "observe/records/json.h"

namespace sirtaki {
namespace {

constexpr size_t most_finished_of_failure = 256;  // finished operations that are reported
constexpr size_t most_finished_of_recorder = 4'096;
constexpr size_t most_refusals = 256;  // with their reasons and stacks, which are long
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

void put_operation(JsonWriter& json, const OperationRecord& operation, Nanoseconds now, bool has_refusal = true) {
  json.new_line().begin_object();
  json.member("name", operation.name.view()).member("kind", operation.kind).member("state", state_of(operation));
  json.member("submitted_seconds_ago", in_seconds(now - operation.submitted));
  if (operation.finished) json.member("took_seconds", in_seconds(operation.finished - operation.submitted));
  put_times(json, operation);
  json.member("bytes", operation.bytes).member("process_set", operation.process_set);
  if (operation.plan) json.member("plan", operation.plan).member("fused", operation.fused);
  if (operation.refused && has_refusal) put_refused(json, *operation.refused);
  json.end_object();
}

void put_statistics(JsonWriter& json, const Statistics& counted, Nanoseconds now) {
  json.new_line().key("statistics").begin_object();
  json.member("operations", counted.operations).member("failed", counted.failed).member("plans", counted.plans);
  json.member("bytes", counted.bytes).member("waiting_seconds", in_seconds(counted.waiting.until(now)));
  json.member("moving_seconds", in_seconds(counted.moving.until(now))).end_object();
}

// Writes to a temporary name first, so that no reader sees a partial file.
Status write_whole(const std::string& path, const std::string& text) {
  const std::string fresh = path + ".new";
  ::unlink(fresh.c_str());  // in a folder that others can write to, it could be a link to any of this user's files
  const Descriptor file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  const bool is_written = file.is_open() &&
                          ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                          std::rename(fresh.c_str(), path.c_str()) == 0;
  if (is_written) return Status::ok();
  return {SRT_SYSTEM, format("what this rank did could not be written to %s: %s", printable(path, 400).c_str(),
                             std::strerror(errno))};
}

}  // namespace

FailureReport::FailureReport(const FailureReportParts& parts, const Config& config)
    : parts_(parts), directory_(config.text(Knob::dump_directory)) {
  if (!directory_.empty()) path_ = format("%s/rank%d.json", directory_.c_str(), parts.rank);
}

void FailureReport::forget() const {
  if (is_wanted()) ::unlink(path_.c_str());
}

void FailureReport::write(const AbortNotice& why) const {
  ::mkdir(directory_.c_str(), 0777);  // may exist already
  const Status written = write_whole(path_, describe(why, most_finished_of_failure));
  if (!written.is_ok()) parts_.log.line(written.text());
}

Status FailureReport::write_recorder(const std::string& path) const {
  return write_whole(path, describe({.status = Status::ok(), .origin = -1}, most_finished_of_recorder));
}

// Copies the records, so that no operation waits for the text.
std::string FailureReport::describe(const AbortNotice& why, size_t most_finished) const {
  const StackSample stack = parts_.program_stack.sample();
  std::vector<OperationRecord> unfinished, finished;
  Statistics counted;
  {
    const Access state(parts_.state);
    counted = state->observer.statistics();
    std::vector<const OperationRecord*> open, ended;
    state->observer.recorder().visit(
        [&](const OperationRecord& operation) { (operation.is_open() ? open : ended).push_back(&operation); });
    for (size_t i = 0; i < std::min(open.size(), most_unfinished); ++i) unfinished.push_back(*open[i]);
    for (size_t i = ended.size() - std::min(ended.size(), most_finished); i < ended.size(); ++i)
      finished.push_back(*ended[i]);
  }
  const Nanoseconds moment = now();
  const RankLocation& location = parts_.locations[static_cast<size_t>(parts_.rank)];
  JsonWriter json;
  json.begin_object().member("rank", parts_.rank).member("size", parts_.locations.size());
  json.member("host", location.host).member("pid", location.pid);
  json.key("clock").begin_object().member("monotonic_ns", moment);
  json.member("wall_minus_monotonic_ns", wall_clock() - now()).end_object();
  json.new_line().member("status", StatusTable::name(why.status.code()));
  json.member("culprit", why.origin).member("reason", why.status.text());
  json.new_line().key("stack");
  put_stack(json, stack.frames);
  put_statistics(json, counted, moment);
  json.new_line().key("unfinished").begin_array();
  for (const OperationRecord& operation : unfinished) put_operation(json, operation, moment);
  json.end_array().new_line().key("finished").begin_array();
  for (size_t i = 0; i < finished.size(); ++i)
    put_operation(json, finished[i], moment, finished.size() - i <= most_refusals);
  return json.end_array().end_object().take() + "\n";
}

}  // namespace sirtaki
