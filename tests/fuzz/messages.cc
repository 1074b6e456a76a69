// Reports and Decisions: a message that decodes also encodes, to bytes that decode to the same message.
#include "control/control_messages.h"
#include "targets.h"

namespace sirtaki::fuzz {
namespace {

template <typename Message>
void go_round(Input input) {
  Message message;
  if (!decode(input, message)) return;
  const Bytes once = bytes_of(message);
  Message copy;
  CHECK(decode(once, copy));
  CHECK(bytes_of(copy) == once);
}

std::vector<Bytes> reports() { return {bytes_of(Report()), bytes_of(rich_report())}; }

std::vector<Bytes> decisions() { return {bytes_of(Decision()), bytes_of(rich_decision())}; }

}  // namespace

const Target report{"report", go_round<Report>, reports};
const Target decision{"decision", go_round<Decision>, decisions};

}  // namespace sirtaki::fuzz
