// The kernels that run on GPUs, as text in NVIDIA's PTX, which the driver compiles for its GPU: nothing of CUDA is
// needed to build. After NVIDIA's "Parallel Thread Execution ISA". The instructions are those of version 6.0 and of all
// GPUs since Maxwell (sm_52), so that drivers of CUDA 11 and later accept the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sirtaki {

enum class KernelKind { copy, scale_float16, scale_bfloat16 };
constexpr int kernel_kinds = 3;

// Memory that a kernel reads and writes, unit by unit.
struct KernelPiece {
  uint64_t from, to, units;
};

// The argument of each kernel, whose grid has a row of blocks for each piece.
struct KernelArgument {
  KernelPiece pieces[128];  // a kernel's parameters may have 4 KiB
  float factor, divisor;  // to scale: element * factor / divisor, in float32
};

// There are two kernels of each kind. A unit of the wide kernel is `wide_unit` bytes, at a multiple of that; a unit of
// the other is an element (to copy: a byte).
constexpr int64_t wide_unit = 8;
constexpr int64_t narrow_unit(KernelKind kind) { return kind == KernelKind::copy ? 1 : 2; }

std::string kernel_name(KernelKind kind, bool is_wide);
std::string kernel_text();  // of all kernels

}  // namespace sirtaki
