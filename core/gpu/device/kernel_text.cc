#include "gpu/device/kernel_text.h"

namespace sirtaki {
namespace {

// A thread's first unit, and the loop over every unit of its piece that is its own: the threads of a row take turns.
constexpr const char* loop_begin =
    "  .reg .pred %is_over, %is_nan;\n"
    "  .reg .b16 %element<4>;\n"
    "  .reg .b32 %row, %block, %blocks, %thread, %threads, %bits, %odd;\n"
    "  .reg .b64 %piece, %from, %to, %units, %unit, %step, %offset, %source, %target;\n"
    "  .reg .f32 %number, %factor, %divisor;\n"
    "  mov.u32 %row, %ctaid.y;\n"
    "  mov.u64 %piece, argument;\n"
    "  mul.wide.u32 %offset, %row, 24;\n"
    "  add.u64 %piece, %piece, %offset;\n"
    "  ld.param.u64 %from, [%piece];\n"
    "  ld.param.u64 %to, [%piece+8];\n"
    "  ld.param.u64 %units, [%piece+16];\n"
    "  ld.param.f32 %factor, [argument+3072];\n"
    "  ld.param.f32 %divisor, [argument+3076];\n"
    "  cvta.to.global.u64 %from, %from;\n"
    "  cvta.to.global.u64 %to, %to;\n"
    "  mov.u32 %block, %ctaid.x;\n"
    "  mov.u32 %blocks, %nctaid.x;\n"
    "  mov.u32 %thread, %tid.x;\n"
    "  mov.u32 %threads, %ntid.x;\n"
    "  mad.lo.u32 %thread, %block, %threads, %thread;\n"
    "  cvt.u64.u32 %unit, %thread;\n"
    "  mul.wide.u32 %step, %blocks, %threads;\n"
    "NEXT:\n"
    "  setp.ge.u64 %is_over, %unit, %units;\n"
    "  @%is_over bra END;\n"
    "  mul.lo.u64 %offset, %unit, UNIT;\n"
    "  add.u64 %source, %from, %offset;\n"
    "  add.u64 %target, %to, %offset;\n"
    "  ld.global.TYPE ELEMENTS, [%source];\n";
constexpr const char* loop_end =
    "  st.global.TYPE [%target], ELEMENTS;\n"
    "  add.u64 %unit, %unit, %step;\n"
    "  bra NEXT;\n"
    "END:\n"
    "  ret;\n";
static_assert(sizeof(KernelPiece) == 24 && offsetof(KernelArgument, factor) == 3072 &&
              offsetof(KernelArgument, divisor) == 3076);

// With .rn, neither is merged with another instruction or approximated.
constexpr const char* scale =
    "  mul.rn.f32 %number, %number, %factor;\n"
    "  div.rn.f32 %number, %number, %divisor;\n";

constexpr const char* widen_float16 = "  cvt.f32.f16 %number, ELEMENT;\n";
constexpr const char* narrow_float16 = "  cvt.rn.f16.f32 ELEMENT, %number;\n";

// GPUs before sm_90 have no such conversions: a bfloat16 is the upper half of a float32, and is rounded to even by
// adding half a unit of it, less one bit if it is even.
constexpr const char* widen_bfloat16 =
    "  cvt.u32.u16 %bits, ELEMENT;\n"
    "  shl.b32 %bits, %bits, 16;\n"
    "  mov.b32 %number, %bits;\n";
constexpr const char* narrow_bfloat16 =
    "  mov.b32 %bits, %number;\n"
    "  shr.u32 %odd, %bits, 16;\n"
    "  and.b32 %odd, %odd, 1;\n"
    "  add.u32 %bits, %bits, 32767;\n"
    "  add.u32 %bits, %bits, %odd;\n"
    "  shr.u32 %bits, %bits, 16;\n"
    "  setp.nan.f32 %is_nan, %number, %number;\n"
    "  selp.b32 %bits, 32767, %bits, %is_nan;\n"
    "  cvt.u16.u32 ELEMENT, %bits;\n";

std::string replace(std::string text, const std::string& word, const std::string& by) {
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
  return text;
}

std::string change_of_element(KernelKind kind) {
  switch (kind) {
    case KernelKind::copy: return "";
    case KernelKind::scale_float16: return std::string(widen_float16) + scale + narrow_float16;
    case KernelKind::scale_bfloat16: return std::string(widen_bfloat16) + scale + narrow_bfloat16;
  }
  return "";
}

std::string kernel(KernelKind kind, bool is_wide) {
  std::string text = loop_begin;
  for (int i = 0; i < (is_wide ? 4 : 1); ++i)
    text += replace(change_of_element(kind), "ELEMENT", "%element" + std::to_string(i));
  text += loop_end;
  const int64_t unit = is_wide ? wide_unit : narrow_unit(kind);
  text = replace(std::move(text), "UNIT", std::to_string(unit));
  text = replace(std::move(text), "TYPE", is_wide ? "v4.u16" : "u" + std::to_string(8 * unit));
  text = replace(std::move(text), "ELEMENTS", is_wide ? "{%element0, %element1, %element2, %element3}" : "%element0");
  return ".visible .entry " + kernel_name(kind, is_wide) + "(.param .align 8 .b8 argument[" +
         std::to_string(sizeof(KernelArgument)) + "])\n{\n" + text + "}\n";
}

}  // namespace

std::string kernel_name(KernelKind kind, bool is_wide) {
  constexpr const char* names[kernel_kinds] = {"copy", "scale_float16", "scale_bfloat16"};
  return std::string(names[static_cast<int>(kind)]) + (is_wide ? "_wide" : "_narrow");
}

std::string kernel_text() {
  std::string text = ".version 6.0\n.target sm_52\n.address_size 64\n";
  for (int kind = 0; kind < kernel_kinds; ++kind)
    for (const bool is_wide : {false, true}) text += kernel(static_cast<KernelKind>(kind), is_wide);
  return text;
}

}  // namespace sirtaki
