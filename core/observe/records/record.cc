#include "observe/records/record.h"

#include <algorithm>
#include <cstring>

namespace sirtaki {
namespace {

constexpr std::string_view gap = "...";

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

}  // namespace

ShortName::ShortName(std::string_view name) {
  if (name.size() <= most_bytes) {
    std::memcpy(text_.data(), name.data(), name.size());
    length_ = static_cast<uint8_t>(name.size());
    return;
  }
  size_t head = (most_bytes - gap.size()) / 2, tail = name.size() - (most_bytes - gap.size() - head);
  while (head > 0 && continues_character(name[head])) --head;  // no character is cut in two
  while (tail < name.size() && continues_character(name[tail])) ++tail;
  char* end = std::copy_n(name.begin(), head, text_.data());
  end = std::copy(gap.begin(), gap.end(), end);
  end = std::copy(name.begin() + static_cast<std::ptrdiff_t>(tail), name.end(), end);
  length_ = static_cast<uint8_t>(end - text_.data());
}

void put_refused(JsonWriter& json, const RefusedOperation& refused) {
  json.member("error", refused.reason).key("stack");
  put_stack(json, refused.stack);
}

}  // namespace sirtaki
