#include "base/status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace sirtaki {
namespace {

constexpr srt_status_entry statuses[] = {
    {SRT_OK, "ok", 0},
    {SRT_IN_PROGRESS, "in_progress", 0},
    {SRT_INVALID_ARGUMENT, "invalid_argument", 0},
    {SRT_UNSUPPORTED, "unsupported", 0},
    {SRT_MISMATCH, "mismatch", 0},
    {SRT_PEER_FINISHED, "peer_finished", 0},
    {SRT_PEER_LOST, "peer_lost", 1},
    {SRT_TIMEOUT, "timeout", 1},
    {SRT_ABORTED, "aborted", 1},
    {SRT_SHUT_DOWN, "shut_down", 1},
    {SRT_OUT_OF_MEMORY, "out_of_memory", 1},
    {SRT_PROTOCOL, "protocol", 1},
    {SRT_SYSTEM, "system", 1},
    {SRT_FORKED, "forked", 0},
    {SRT_INTERNAL, "internal", 1},
    {SRT_DEVICE, "device", 1},
    {SRT_NOT_FINITE, "not_finite", 1},
};

constexpr bool codes_are_positions() {
  for (size_t i = 0; i < std::size(statuses); ++i)
    if (statuses[i].status != static_cast<srt_status>(i)) return false;
  return true;
}
static_assert(codes_are_positions());

}  // namespace

int StatusTable::count() { return static_cast<int>(std::size(statuses)); }

const srt_status_entry* StatusTable::entry(int index) {
  return index >= 0 && index < count() ? &statuses[index] : nullptr;
}

const char* StatusTable::name(srt_status code) {
  const srt_status_entry* found = entry(code);
  return found ? found->name : "unknown";
}

bool StatusTable::is_fatal(srt_status code) {
  const srt_status_entry* found = entry(code);
  return found && found->fatal;
}

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

Status system_call_failed(const char* call) {
  return {SRT_SYSTEM, format("%s failed: %s", call, std::strerror(errno))};
}

}  // namespace sirtaki
