// Adasum: a sum that adapts to how much two gradients agree. Per tensor, orthogonal gradients are added and parallel
// ones are averaged:
//   adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
// After Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021), for any number of ranks:
// vectors are combined in pairs in rank order, then the results in pairs, and so on; a vector without a partner is
// carried over to the next level.
#pragma once

#include "data/operation.h"

namespace sirtaki {

// Makes an Adasum from transfers of the backend that would run it: an exchange of slices, a small sum of dot products
// per level, and an all-gather of the result. It computes each rank's slice in double precision and rounds once.
std::unique_ptr<Operation> make_adasum(Backend& backend, const Kernels& kernels, TransferPtr transfer);

}  // namespace sirtaki
