// An interpreter of the instructions of PTX that the core's kernels consist of, one thread of a GPU after another. It
// knows no conversions of the core's: its results are those that NVIDIA's "Parallel Thread Execution ISA" promises.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fake_gpu/order.h"

namespace ptx {

struct Thread;

// A register plus a number; either may be absent. A parameter is at the number 0, a label at that of its instruction.
struct Operand {
  int in_register = -1;
  uint64_t number = 0;
};

struct Instruction {
  void (*run)(Thread&, const Instruction&);
  std::string name;
  int guard = -1;  // the register that has to be true
  std::vector<Operand> operands;  // those of a vector one by one
};

struct Kernel {
  std::vector<Instruction> instructions;
  std::map<std::string, int> registers;  // also those that tell a thread its place
  size_t argument_bytes = 0;
};

// A grid of blocks of threads, with two dimensions; blocks have one.
struct Grid {
  unsigned columns, rows, threads;
};

// Parses a text, or throws std::runtime_error, with what it does not know.
std::map<std::string, Kernel> parse(const std::string& text);

// Runs the kernel. With `trace`, it touches no memory, but adds what it would touch there.
void run(const Kernel& kernel, const Grid& grid, const std::vector<char>& argument, std::vector<fake::Range>* trace);

}  // namespace ptx
