// NCCL's arithmetic, element by element. Types and operators have the numbers of nccl.h.
#pragma once

#include <cstddef>
#include <vector>

namespace fake {

enum Operator { sum, product, maximum, minimum, average, scaled_sum };
constexpr int built_in_operators = scaled_sum;

size_t size_of(int type);  // 0: there is no such type

// Multiplies each element by one of the same type.
void scale(int type, char* data, size_t count, const char* factor);

// Combines one input per rank, in the order of ranks; 16-bit floats are combined in 32 bits. An average of floats
// multiplies them before the sum, in their own type.
void reduce(int type, int operation, const std::vector<const char*>& inputs, size_t count, char* output);

}  // namespace fake
