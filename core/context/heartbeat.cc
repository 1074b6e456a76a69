#include "context/heartbeat.h"

#include <algorithm>

namespace sirtaki {
namespace {

constexpr Nanoseconds between_looks = seconds(1);
constexpr Nanoseconds least_limit = seconds(2);  // the system counts its probes in whole seconds

}  // namespace

std::optional<AbortNotice> Heartbeat::check(Nanoseconds now) {
  if (!limit_ || now < next_) return std::nullopt;
  next_ = now + between_looks;
  for (const Links::Entry& entry : links_.all()) {
    const Nanoseconds silence = entry.link->silence();
    if (silence < std::max(limit_, least_limit)) continue;
    constexpr char text[] =
        "%s was lost: its machine has not answered for %lld s, not even to say that the process is busy. Is it "
        "switched "
        "off, or the network to it cut?";
    return AbortNotice{{SRT_PEER_LOST, format(text, names_[static_cast<size_t>(entry.peer)].c_str(),
                                              static_cast<long long>(silence / seconds(1)))},
                       entry.peer};
  }
  return std::nullopt;
}

}  // namespace sirtaki
