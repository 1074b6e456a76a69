#include "context/submission/input_readiness.h"

#include <algorithm>

#include "base/text.h"

namespace sirtaki {

std::vector<GpuEventPtr> InputReadiness::awaited_by_host(const HandleEntry& entry, HandleTable& handles) const {
  std::vector<GpuEventPtr> events;
  if (!backend_) return events;
  if (entry.signature->kind == Kind::join) {
    for (Ticket ticket : handles.unfinished())
      if (const GpuEventPtr& ready = handles.open_entry(ticket)->ready) events.push_back(ready);
  } else if (entry.ready) {
    const std::vector<int32_t>* members = negotiator_.members(entry.signature->process_set);
    if (!members || !backend_->launches_behind_inputs(*entry.signature, *members)) events.push_back(entry.ready);
  }
  return events;
}

bool InputReadiness::comes_last(const Signature& signature) {
  return changes_process_sets(signature.kind) || signature.kind == Kind::join;
}

void InputReadiness::flush() {
  for (Waiting& one : waiting_) one.wants_flush = true;
}

Status InputReadiness::take(Taken& taken) {
  std::vector<CudaStream> busy;  // streams with an event that has not fired: their later events need no query
  size_t kept = 0;
  for (Waiting& one : waiting_) {
    bool is_ready = kept == 0 || !comes_last(*one.submission.request.signature);
    if (is_ready) SIRTAKI_TRY(look(one.submission, busy, is_ready));
    if (is_ready) {
      taken.requests.push_back(std::move(one.submission.request));
      taken.wants_flush |= one.wants_flush;
    } else {
      std::swap(waiting_[kept++], one);
    }
  }
  waiting_.resize(kept);
  return Status::ok();
}

Status InputReadiness::look(const QueuedRequest& submission, std::vector<CudaStream>& busy, bool& are_ready) {
  are_ready = true;
  for (const GpuEventPtr& input : submission.inputs) {
    const CudaStream stream = input->stream();
    are_ready = std::find(busy.begin(), busy.end(), stream) == busy.end();
    if (!are_ready) return Status::ok();
    const Status status = input->look(are_ready);
    if (!are_ready) busy.push_back(stream);
    if (!status.is_ok())
      return {status.code(), format("the GPU failed before the input of '%s' was there: %s",
                                    printable(submission.request.signature->name, 200).c_str(), status.text())};
    if (!are_ready) return Status::ok();
  }
  return Status::ok();
}

}  // namespace sirtaki
