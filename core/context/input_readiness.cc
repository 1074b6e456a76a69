#include "context/input_readiness.h"

#include <algorithm>

#include "base/text.h"

namespace sirtaki {

bool InputReadiness::comes_last(const QueuedRequest& submission) {
  const Kind kind = submission.request.signature->kind;
  return changes_process_sets(kind) || kind == Kind::join;
}

void InputReadiness::flush() {
  for (Waiting& one : waiting_) one.wants_flush = true;
}

Status InputReadiness::take(Taken& taken) {
  std::vector<CudaStream> busy;  // streams with an event that has not fired: their later events need no query
  size_t kept = 0;
  for (Waiting& one : waiting_) {
    bool is_ready = kept == 0;
    if (one.submission.ready) SIRTAKI_TRY(look(one.submission, busy, is_ready));
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

Status InputReadiness::look(const QueuedRequest& submission, std::vector<CudaStream>& busy, bool& is_ready) {
  const CudaStream stream = submission.ready->stream();
  is_ready = false;
  if (std::find(busy.begin(), busy.end(), stream) != busy.end()) return Status::ok();
  const Status status = submission.ready->look(is_ready);
  if (!is_ready) busy.push_back(stream);
  if (status.is_ok()) return status;
  return {status.code(), format("the GPU failed before the input of '%s' was there: %s",
                                printable(submission.request.signature->name, 200).c_str(), status.text())};
}

}  // namespace sirtaki
