// The links that a rank has from the start: few, however many ranks there are. Operations ask for others.
#pragma once

#include <cstdint>
#include <vector>

#include "control/relay/tree.h"

namespace sirtaki {

// Returns the peers of a rank's first links, ascending:
// * its parent and its children in the control tree;
// * the ranks before and after it in a ring of its host's ranks;
// * the ranks at its place on other hosts: on all of them if there are at most `few`, because an all-reduce needs these
//   links, else on the hosts before and after its own. Of two hosts, the places of the larger one are dealt out to the
//   ranks of the smaller one.
// The news of a failure therefore reach every rank even if one process of the tree is stopped. `hosts`: for each rank,
// the number of its host. Ranks that share memory need no link.
std::vector<int32_t> first_links(int32_t rank, const std::vector<int32_t>& hosts, const ControlTree& tree, size_t few);

}  // namespace sirtaki
