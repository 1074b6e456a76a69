// The part of a peer's text that may be shown to a person.
#include "base/text.h"

#include "check.h"

using namespace sirtaki;

TEST(well_formed_sequences_have_their_length) {
  CHECK_EQUAL(utf8_length("a", 0), size_t{1});
  CHECK_EQUAL(utf8_length("\xc3\xa9", 0), size_t{2});
  CHECK_EQUAL(utf8_length("\xe2\x82\xac", 0), size_t{3});
  CHECK_EQUAL(utf8_length("\xf0\x9f\x98\x80", 0), size_t{4});
  for (const char* malformed : {"\x80", "\xc0\xaf", "\xc3", "\xc3(", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                                "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xff"})
    CHECK_EQUAL(utf8_length(malformed, 0), size_t{0});
}

TEST(what_a_terminal_would_obey_is_found) {
  CHECK_EQUAL(find_unprintable("gradient.w\xc3\xa9"), std::string_view::npos);
  CHECK_EQUAL(find_unprintable("a\nb"), size_t{1});
  CHECK_EQUAL(find_unprintable("a\x1b[2J"), size_t{1});
  CHECK_EQUAL(find_unprintable("ab\x7f"), size_t{2});
  CHECK_EQUAL(find_unprintable("a\xc2\x9b"
                               "2J"),
              size_t{1});       // U+009B: ESC [ in one character
  CHECK_EQUAL(find_unprintable("a\xe2\x80\xae"
                               "exe.txt"),
              size_t{1});  // U+202E: the text that follows is shown backwards
  CHECK_EQUAL(find_unprintable("a\x9b"), size_t{1});
}

TEST(what_is_shown_is_clean_and_bounded) {
  CHECK_EQUAL(printable("two\nlines", 100), "two\nlines");
  CHECK_EQUAL(printable("\x1b[31mred\xc2\x9b"
                        "0m\x07",
                        100),
              "?[31mred?0m?");
  CHECK_EQUAL(printable("\xe2\x80\xaetxt\xff\xc3", 100), "?txt??");
  CHECK_EQUAL(printable("abc", 2), "ab");
  CHECK_EQUAL(printable("ab\xe2\x82\xac", 4), "ab");  // not half a character
  CHECK_EQUAL(printable("ab\xe2\x82\xac", 5), "ab\xe2\x82\xac");
  CHECK_EQUAL(printable("", 0), "");
}

TEST(whatever_comes_out_may_be_shown) {
  for (unsigned code = 0; code < 0x10000; ++code) {
    const char bytes[] = {static_cast<char>(code), static_cast<char>(code >> 8), 'x', '\xe2', '\x80'};
    std::string shown = printable(std::string_view(bytes, sizeof bytes), 100);
    for (char& c : shown)
      if (c == '\n') c = ' ';
    CHECK_EQUAL(find_unprintable(shown), std::string::npos);
    CHECK(shown.size() <= sizeof bytes);
  }
}
