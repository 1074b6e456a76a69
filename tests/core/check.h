// A small test framework. TEST(name) { ... } defines a case; CHECK(condition) and CHECK_EQUAL(a, b) fail it and
// continue, REQUIRE(condition) also leaves it. CHECK_MAIN() defines the program: --list prints the cases' names, NAME
// runs one of them, no argument runs all; the exit code is 1 if any failed.
#pragma once

#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

template <typename T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& stream) { stream << value; }) {
    std::ostringstream stream;
    stream << std::boolalpha << value;
    return stream.str();
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       }) {
    std::string text = "[";
    for (const auto& item : value) text += (text.size() > 1 ? ", " : "") + show(item);
    return text + "]";
  } else {
    return "(a value)";
  }
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + show(a) + " is not " + show(b));
}

inline int main(int count, char** arguments) {
  const char* wanted = count > 1 ? arguments[1] : nullptr;
  const bool lists = wanted && std::strcmp(wanted, "--list") == 0;
  bool found = !wanted || lists;
  for (const Case& test : cases()) {
    if (lists) std::puts(test.name);
    if (lists || (wanted && std::strcmp(wanted, test.name) != 0)) continue;
    found = true;
    const int before = failures();
    test.run();
    if (failures() != before) std::fprintf(stderr, "FAILED: %s\n", test.name);
  }
  if (!found) fail("", 0, std::string("there is no case ") + wanted);
  return failures() ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                                  \
  static void test_##name();                                        \
  static const check::Registration case_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) return check::fail(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQUAL(a, b) check::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_MAIN() \
  int main(int count, char** arguments) { return check::main(count, arguments); }
