// Untrusted text: it may not be UTF-8, and may contain escape sequences for a terminal.
#pragma once

#include <string>
#include <string_view>

namespace sirtaki {

// Returns the length of the UTF-8 sequence at `at`; 0 if it is malformed.
size_t utf8_length(std::string_view text, size_t at);

// Returns the position of the first byte that must not be shown: of malformed UTF-8, a control character, or a
// character that reorders its line; npos if there is none.
size_t find_unprintable(std::string_view text);

// Returns a peer's text, at most `limit` bytes of it, with each such character replaced by '?'. Line ends are kept.
std::string printable(std::string_view text, size_t limit);

}  // namespace sirtaki
