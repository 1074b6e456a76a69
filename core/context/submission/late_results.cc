#include "context/submission/late_results.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/text.h"
#include "control/messages/response_cache.h"
#include "control/operations/validation.h"

namespace sirtaki {

void end_late(Ticket ticket, const std::vector<int32_t>& contributors, CallerState& state) {
  if (HandleEntry* entry = state.handles.open_entry(ticket)) {
    entry->result = SRT_RESULT_LATE;
    entry->contributors = contributors;
  }
  state.handles.end(ticket, Status::ok());
}

Status LateResults::keep(const SignaturePtr& signature, const std::vector<int32_t>& contributors, uint8_t*& memory) {
  const auto bytes = static_cast<size_t>(std::max<int64_t>(signature->bytes(), 1));
  AlignedMemory kept(::operator new(bytes, std::align_val_t{64}, std::nothrow));
  if (!kept)
    return {SRT_OUT_OF_MEMORY, format("there is no memory for the %zu bytes of '%s', which this rank is late for",
                                      bytes, signature->name.c_str())};
  memory = static_cast<uint8_t*>(kept.get());
  const bool is_new = results_.try_emplace(signature->name, Result{signature, contributors, std::move(kept)}).second;
  return is_new ? Status() : Status(SRT_PROTOCOL, "'" + signature->name + "' was decided twice");
}

void LateResults::finished(const std::string& round) {
  const auto found = results_.find(round);
  if (found == results_.end()) return;
  found->second.is_there = true;
  if (!found->second.ticket) return;
  deliver(found->second);
  results_.erase(found);
}

bool LateResults::claim(const Request& request) {
  if (!request.signature->deadline || results_.empty()) return false;
  const auto found = results_.find(request.signature->name);
  if (found == results_.end()) return false;
  Result& result = found->second;
  {
    const Access state(state_);
    if (!agree(*result.signature, *request.signature)) {
      state->handles.end(request.ticket, decided_differently(*result.signature, *request.signature));
      if (result.is_there) results_.erase(found);  // otherwise its memory is being written
      return true;
    }
    if (HandleEntry* entry = state->handles.open_entry(request.ticket)) entry->state = HandleState::planned;
  }
  result.ticket = request.ticket;
  if (!result.is_there) return true;
  deliver(result);
  results_.erase(found);
  return true;
}

// Copies a result to the memory of the request that has waited for it. That memory is in use until the request ends.
void LateResults::deliver(const Result& result) {
  uintptr_t output = 0;
  {
    const Access state(state_);
    if (HandleEntry* entry = state->handles.open_entry(result.ticket)) {
      output = entry->output;
      describe(*entry->signature, output, entry->described);
    }
  }
  const auto bytes = static_cast<size_t>(result.signature->bytes());
  if (output) std::memcpy(reinterpret_cast<void*>(output), result.memory.get(), bytes);
  const Access state(state_);
  end_late(result.ticket, result.contributors, *state);
}

}  // namespace sirtaki
