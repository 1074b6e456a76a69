// A leader's report for its whole subtree: each item once, with the ranks to which it applies.
//
// Times are sent as ages, so that hosts need no common clock. The travel time of a message is not counted.
#pragma once

#include <span>
#include <vector>

#include "control/messages/arrivals.h"
#include "control/messages/messages.h"
#include "control/messages/rank_bits.h"
#include "control/messages/rank_runs.h"

namespace sirtaki {

// The part in which ranks' requests for one ragged operation may differ: their numbers of rows, in total and per
// member.
struct RowShare {
  int64_t rows = 0;                      // the first dimension
  std::vector<int64_t> splits;
};

// Returns whether two requests are equal except for the rows of a ragged one.
bool are_alike(const Signature& a, const Signature& b);

RowShare share_of(const Signature& signature);
SignaturePtr with_share(const SignaturePtr& signature, const RowShare& share);

struct Aggregate {
  // Ranks with the same request, and the times of their requests in this host's clock.
  struct Senders {
    RankRuns ranks;
    RankRuns absent;                     // those of the ranks that contribute nothing
    Arrivals arrivals;
  };
  struct CachedRequests {
    Senders by;
    std::vector<CacheId> ids;
  };
  struct FullRequest {
    Senders by;
    SignaturePtr signature;
    std::vector<RowShare> shares;        // ragged kinds only: one per rank, in their order
  };
  struct Reached {                       // the last Decision that these ranks have applied
    uint64_t decision = 0;
    RankRuns ranks;
  };
  struct NoticesOfRank {
    int32_t rank = 0;
    RankNotices notices;
  };

  // The order matters: a rank's notices apply to the requests that precede them.
  std::vector<Reached> reached;
  std::vector<CachedRequests> cached_requests;
  std::vector<FullRequest> full_requests;
  std::vector<NoticesOfRank> notices;

  void clear();
};

void encode(const Aggregate& aggregate, Nanoseconds now, Bytes& out);

// Returns false if the bytes are malformed, or concern ranks outside `subtree`.
bool decode(std::span<const uint8_t> bytes, const RankBits& subtree, Nanoseconds now, Aggregate& aggregate);

}  // namespace sirtaki
