// The checks on a Decision that a rank has accepted.
#pragma once

#include <algorithm>
#include <map>

#include "control_world.h"

namespace sirtaki {

// The requests that a rank has submitted, by ticket.
using Asked = std::map<Ticket, Signature>;

// Checks that a plan which a rank of three has accepted can be executed with the memory of its requests.
inline void check_believed(const Plan& plan, int32_t rank, const Asked& asked, bool has_joined = false) {
  CHECK(std::binary_search(plan.members.begin(), plan.members.end(), rank));
  CHECK(plan.members.front() >= 0 && plan.members.back() < 3);
  CHECK(plan.contributors >= 1 && plan.contributors <= 3);
  for (const PlannedTensor& tensor : plan.tensors) {
    const size_t members = plan.members.size();
    if (is_ragged(plan.kind)) CHECK_EQUAL(tensor.rows.size(), members * row_counts_each(plan.kind, members));
    if (tensor.ticket == 0) {
      CHECK(has_joined);
      continue;
    }
    const auto found = asked.find(tensor.ticket);
    REQUIRE(found != asked.end());
    const Signature& own = found->second;
    CHECK_EQUAL(own.name, tensor.signature->name);
    CHECK(own.kind == plan.kind && agree(own, *tensor.signature));
    if (!is_ragged(plan.kind)) CHECK_EQUAL(own.shape, tensor.signature->shape);
  }
}

}  // namespace sirtaki
