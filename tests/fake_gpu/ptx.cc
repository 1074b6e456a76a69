#include "fake_gpu/ptx.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <regex>
#include <stdexcept>

namespace ptx {

struct Thread {
  std::vector<uint64_t> registers;
  const std::vector<char>& argument;
  std::vector<fake::Range>* trace;
  size_t next = 0;

  uint64_t in(const Operand& operand) const {
    const uint64_t held = operand.in_register < 0 ? 0 : registers[static_cast<size_t>(operand.in_register)];
    return held + operand.number;
  }
  void out(const Operand& operand, uint64_t value) { registers[static_cast<size_t>(operand.in_register)] = value; }
};

namespace {

float as_float(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
// A NaN that an instruction computes is always this one.
uint64_t as_bits(float value) { return std::isnan(value) ? 0x7fffffff : std::bit_cast<uint32_t>(value); }

float widened(uint64_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float infinite = fraction ? NAN : INFINITY;
  const float magnitude = exponent == 31 ? infinite
                                         : std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                                                      std::max(exponent, 1) - 25);
  return half >> 15 ? -magnitude : magnitude;
}

uint64_t narrowed(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const long units = std::lrint(std::ldexp(magnitude, 10 - exponent));  // to nearest even
  return sign | static_cast<uint64_t>((exponent + 14) * 1024 + units);
}

using Binary = uint64_t (*)(uint64_t, uint64_t);
template <Binary compute>
void binary(Thread& thread, const Instruction& the) {
  thread.out(the.operands[0], compute(thread.in(the.operands[1]), thread.in(the.operands[2])));
}
using Unary = uint64_t (*)(uint64_t);
template <Unary compute>
void unary(Thread& thread, const Instruction& the) {
  thread.out(the.operands[0], compute(thread.in(the.operands[1])));
}
constexpr Unary same = [](uint64_t a) { return a; };
constexpr uint64_t of_32_bits = 0xffffffff;

template <size_t bytes>
void load_parameter(Thread& thread, const Instruction& the) {
  uint64_t value = 0;
  std::memcpy(&value, &thread.argument.at(thread.in(the.operands[1]) + bytes - 1) - (bytes - 1), bytes);
  thread.out(the.operands[0], value);
}

// Loads or stores an array of elements.
template <size_t bytes, bool stores>
void access(Thread& thread, const Instruction& the) {
  const size_t count = the.operands.size() - 1;
  const uint64_t address = thread.in(the.operands[stores ? 0 : count]);
  if (address % (bytes * count)) throw std::runtime_error(the.name + " at an address that is no multiple of its size");
  char* const memory = reinterpret_cast<char*>(address);
  if (thread.trace) return thread.trace->push_back({memory, bytes * count, stores});
  for (size_t i = 0; i < count; ++i) {
    const Operand& element = the.operands[i + (stores ? 1 : 0)];
    uint64_t value = thread.in(element);
    if (stores) std::memcpy(memory + i * bytes, &value, bytes);
    else std::memcpy(&(value = 0), memory + i * bytes, bytes);
    if (!stores) thread.out(element, value);
  }
}

const std::map<std::string, void (*)(Thread&, const Instruction&)> known = {
    {"mov.u32", unary<same>},
    {"mov.u64", unary<same>},
    {"mov.b32", unary<same>},
    {"cvta.to.global.u64", unary<same>},
    {"cvt.u64.u32", unary<same>},
    {"cvt.u32.u16", unary<same>},
    {"cvt.u16.u32", unary<[](uint64_t a) { return a & 0xffff; }>},
    {"cvt.f32.f16", unary<[](uint64_t a) { return as_bits(widened(a)); }>},
    {"cvt.rn.f16.f32", unary<[](uint64_t a) { return narrowed(as_float(a)); }>},
    {"add.u32", binary<[](uint64_t a, uint64_t b) { return (a + b) & of_32_bits; }>},
    {"add.u64", binary<[](uint64_t a, uint64_t b) { return a + b; }>},
    {"mul.wide.u32", binary<[](uint64_t a, uint64_t b) { return a * b; }>},
    {"mul.lo.u64", binary<[](uint64_t a, uint64_t b) { return a * b; }>},
    {"and.b32", binary<[](uint64_t a, uint64_t b) { return a & b; }>},
    {"shl.b32", binary<[](uint64_t a, uint64_t b) { return (a << b) & of_32_bits; }>},
    {"shr.u32", binary<[](uint64_t a, uint64_t b) { return (a >> b); }>},
    {"mul.rn.f32", binary<[](uint64_t a, uint64_t b) { return as_bits(as_float(a) * as_float(b)); }>},
    {"div.rn.f32", binary<[](uint64_t a, uint64_t b) { return as_bits(as_float(a) / as_float(b)); }>},
    {"setp.ge.u64", binary<[](uint64_t a, uint64_t b) { return uint64_t{a >= b}; }>},
    {"setp.nan.f32",
     binary<[](uint64_t a, uint64_t b) { return uint64_t{std::isnan(as_float(a)) || std::isnan(as_float(b))}; }>},
    {"mad.lo.u32",
     [](Thread& thread, const Instruction& the) {
  const auto& in = the.operands;
  thread.out(in[0], (thread.in(in[1]) * thread.in(in[2]) + thread.in(in[3])) & of_32_bits);
}},
    {"selp.b32",
     [](Thread& thread, const Instruction& the) {
  const auto& in = the.operands;
  thread.out(in[0], thread.in(in[thread.in(in[3]) ? 1 : 2]));
}},
    {"bra", [](Thread& thread, const Instruction& the) { thread.next = thread.in(the.operands[0]); }},
    {"ret", [](Thread& thread, const Instruction&) { thread.next = SIZE_MAX; }},
    {"ld.param.u64", load_parameter<8>},
    {"ld.param.f32", load_parameter<4>},
    {"ld.global.u8", access<1, false>},
    {"ld.global.u16", access<2, false>},
    {"ld.global.v4.u16", access<2, false>},
    {"st.global.u8", access<1, true>},
    {"st.global.u16", access<2, true>},
    {"st.global.v4.u16", access<2, true>},
};

const std::regex head(R"(\.entry (\w+)\(\.param \.align 8 \.b8 (\w+)\[(\d+)\]\)\s*)");
const std::regex line(R"(\s*(?:(\w+):|\.reg [^;]*;|(?:@(%\w+) )?([\w.]+)([^;]*);))");
const std::regex operand(R"(([%\w.]+)(?:\+(\d+))?)");

Operand parse_operand(const std::smatch& found, Kernel& kernel, const std::map<std::string, uint64_t>& numbers) {
  Operand parsed;
  const std::string name = found[1];
  if (name[0] == '%')
    parsed.in_register = kernel.registers.try_emplace(name, static_cast<int>(kernel.registers.size())).first->second;
  else if (numbers.contains(name)) parsed.number = numbers.at(name);
  else parsed.number = std::stoull(name);
  if (found[2].matched) parsed.number += std::stoull(found[2]);
  return parsed;
}

Kernel parse_body(const std::string& body, const std::string& parameter) {
  Kernel kernel;
  std::map<std::string, uint64_t> numbers = {{parameter, 0}};  // of the parameter and of labels
  std::vector<std::smatch> lines;
  for (std::sregex_iterator at(body.begin(), body.end(), line), end; at != end; ++at) {
    if ((*at)[1].matched) numbers[(*at)[1]] = lines.size();
    else if ((*at)[3].matched) lines.push_back(*at);
  }
  for (const std::smatch& found : lines) {
    const std::string name = found[3], text = found[4];
    if (!known.contains(name)) throw std::runtime_error("the fake does not know the instruction " + name);
    Instruction made{known.at(name), name, -1, {}};
    if (found[2].matched)
      made.guard = kernel.registers.try_emplace(found[2], static_cast<int>(kernel.registers.size())).first->second;
    for (std::sregex_iterator at(text.begin(), text.end(), operand), end; at != end; ++at)
      made.operands.push_back(parse_operand(*at, kernel, numbers));
    kernel.instructions.push_back(std::move(made));
  }
  return kernel;
}

}  // namespace

std::map<std::string, Kernel> parse(const std::string& text) {
  std::map<std::string, Kernel> kernels;
  for (std::sregex_iterator at(text.begin(), text.end(), head), end; at != end; ++at) {
    const auto begin = static_cast<size_t>(at->position() + at->length());
    Kernel& kernel = kernels[(*at)[1]] = parse_body(text.substr(begin, text.find("\n}", begin) - begin), (*at)[2]);
    kernel.argument_bytes = std::stoull((*at)[3]);
  }
  return kernels;
}

void run(const Kernel& kernel, const Grid& grid, const std::vector<char>& argument, std::vector<fake::Range>* trace) {
  const auto place = [&](std::vector<uint64_t>& registers, const char* name, uint64_t value) {
    if (const auto found = kernel.registers.find(name); found != kernel.registers.end())
      registers[static_cast<size_t>(found->second)] = value;
  };
  for (unsigned row = 0; row < grid.rows; ++row)
    for (unsigned index = 0; index < grid.columns * grid.threads; ++index) {
      Thread thread{std::vector<uint64_t>(kernel.registers.size()), argument, trace};
      for (const auto& [name, value] : {std::pair{"%ctaid.x", index / grid.threads},
                                        {"%ctaid.y", row},
                                        {"%nctaid.x", grid.columns},
                                        {"%nctaid.y", grid.rows},
                                        {"%tid.x", index % grid.threads},
                                        {"%ntid.x", grid.threads}})
        place(thread.registers, name, value);
      while (thread.next < kernel.instructions.size()) {
        const Instruction& instruction = kernel.instructions[thread.next++];
        if (instruction.guard < 0 || thread.registers[static_cast<size_t>(instruction.guard)])
          instruction.run(thread, instruction);
      }
    }
}

}  // namespace ptx
