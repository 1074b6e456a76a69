// Text that may have come from somebody else: UTF-8 or not, and perhaps meant for a terminal to obey.
#pragma once

#include <string>
#include <string_view>

namespace sirtaki {

// The length of the UTF-8 sequence at `at`; 0 if it is malformed.
size_t utf8_length(std::string_view text, size_t at);

// Where the first byte is that a person should not be shown: malformed UTF-8, a control character, or one that
// changes the order in which others appear. npos if there is none.
size_t find_unprintable(std::string_view text);

// What came from a peer is bounded (in bytes) and stripped of such characters before a person sees it. Ends of lines
// stay.
std::string printable(std::string_view text, size_t limit);

}  // namespace sirtaki
