#include "context/failure/heartbeat.h"

#include <algorithm>
#include <utility>

namespace sirtaki {
namespace {

constexpr Nanoseconds between_looks = seconds(1);
constexpr Nanoseconds least_limit = seconds(2);  // the kernel counts its probes in whole seconds

}  // namespace

std::optional<AbortNotice> Heartbeat::check(Nanoseconds now) {
  if (!limit_ || now < next_) return std::nullopt;
  next_ = now + between_looks;
  const std::vector<int32_t> before = std::exchange(suspects_, {});
  const bool probes = now >= next_probe_;
  for (const Links::PeerLink& entry : links_.all()) {
    const Nanoseconds silence = entry.link->silence();
    if (probes && silence >= limit_ / 2) {
      entry.link->probe();
      next_probe_ = now + std::max(between_looks, limit_ / 30);  // the system gives up after prepare_tcp's most probes
    }
    if (silence < std::max(limit_, least_limit)) continue;
    suspects_.push_back(entry.peer);
    if (std::find(before.begin(), before.end(), entry.peer) == before.end()) continue;
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
