// Adasum: a sum that adapts to how much two gradients agree. Orthogonal ones add up, parallel ones average, per tensor:
//   adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
// After Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021). For any number of ranks: in rank
// order, local_peers combine in pairs, then pairs of pairs, and so on; a rank without a partner waits for the next
// level.
#pragma once

#include "data/operation.h"

namespace sirtaki {

// Makes an Adasum from transfers of the backend that would run it: an exchange of slices, a small sum of dot products
// per level, and an all-gather of the result. Works in double precision on each rank's slice; rounds once.
std::unique_ptr<Operation> make_adasum(Backend& backend, const Kernels& kernels, TransferPtr transfer);

}  // namespace sirtaki
