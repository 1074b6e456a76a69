// What a leader reports for its whole subtree: each thing once, with the ranks that say it.
//
// Times become ages on the wire, so that hosts need not agree on the time. What a message takes to travel is not
// counted.
#pragma once

#include <span>
#include <vector>

#include "control/arrivals.h"
#include "control/messages.h"
#include "control/rank_bits.h"
#include "control/rank_runs.h"

namespace sirtaki {

// In what ranks' requests for one ragged operation may differ: how many rows they bring, and for whom.
struct RowShare {
  int64_t rows = 0;                      // the first dimension
  std::vector<int64_t> splits;
};

// Whether two requests are the same in everything, but for a ragged one's rows.
bool are_alike(const Signature& a, const Signature& b);

RowShare share_of(const Signature& signature);
SignaturePtr with_share(const SignaturePtr& signature, const RowShare& share);

struct Aggregate {
  // Ranks that say the same, and when they said it here.
  struct Speakers {
    RankRuns ranks;
    RankRuns absent;                     // those of them that have nothing to give
    Arrivals arrivals;
  };
  struct Batch {
    Speakers by;
    std::vector<CacheId> ids;
  };
  struct FullRequest {
    Speakers by;
    SignaturePtr signature;
    std::vector<RowShare> shares;        // of a ragged kind: one for each rank, in their order
  };
  struct Reached {                       // the last Decision that these ranks have applied
    uint64_t decision = 0;
    RankRuns ranks;
  };
  struct Remarked {
    int32_t rank = 0;
    Remarks remarks;
  };

  // In this order: a rank's remarks hold for the requests that came before.
  std::vector<Reached> reached;
  std::vector<Batch> batches;
  std::vector<FullRequest> full_requests;
  std::vector<Remarked> remarks;

  void clear();
};

void encode(const Aggregate& aggregate, Nanoseconds now, Bytes& out);

// False if the bytes make no sense, or speak for other ranks than these.
bool decode(std::span<const uint8_t> bytes, const RankBits& subtree, Nanoseconds now, Aggregate& aggregate);

}  // namespace sirtaki
