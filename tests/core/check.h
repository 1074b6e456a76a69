// A small test framework. TEST(name) { ... } defines a case; CHECK(condition) and CHECK_EQUAL(a, b) fail it and
// continue, REQUIRE(condition) also leaves it.
//
// A program consists of the cases of a folder of tests/core. A case is called FILE.NAME: `test_transport --list` prints
// these names, `test_transport links.a_link_ends` runs a case, `test_transport links` the cases of links.cc, and
// `test_transport` all cases, each of several cases in a process of its own: libraries that a case has loaded stay, as
// do its threads. The exit code is 1 if a case failed.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

namespace check {

// Programs with sanitizers, which take several times as long, run a part of what the plain ones run.
#ifdef SIRTAKI_SANITIZED
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

// Returns how many seeds a random test takes, or how many rounds another one.
constexpr uint32_t seeds(uint32_t all) { return is_sanitized ? (all + 3) / 4 : all; }

// Returns which of several values, the most telling last, a test takes: with sanitizers the last `few`.
template <typename T>
std::vector<T> of(std::vector<T> all, size_t few = 1) {
  if (is_sanitized) all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(few));
  return all;
}

struct Case {
  std::string file;  // without folder and suffix
  std::string name;  // FILE.NAME
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
  Registration(const char* path, const char* name, void (*run)()) {
    const std::string file = std::filesystem::path(path).stem();
    cases().push_back({file, file + "." + name, run});
  }
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

inline bool passes(const Case& test) {
  test.run();
  if (failures()) std::fprintf(stderr, "FAILED: %s\n", test.name.c_str());
  return !failures();
}

inline bool passes_in_child(const Case& test) {
  const pid_t child = ::fork();
  if (child == 0) std::exit(passes(test) ? 0 : 1);
  int ended = 0;
  if (child < 0 || ::waitpid(child, &ended, 0) != child) return false;
  if (!WIFEXITED(ended)) std::fprintf(stderr, "ENDED BY SIGNAL %d: %s\n", WTERMSIG(ended), test.name.c_str());
  return ended == 0;
}

inline int main(int count, char** arguments) {
  const std::string wanted = count > 1 ? arguments[1] : "";
  if (wanted == "--list") {
    for (const Case& test : cases()) std::puts(test.name.c_str());
    return 0;
  }
  bool found = false, all_pass = true;
  for (const Case& test : cases()) {
    if (!wanted.empty() && wanted != test.file && wanted != test.name) continue;
    found = true;
    all_pass &= wanted == test.name ? passes(test) : passes_in_child(test);
  }
  if (!found) std::fprintf(stderr, "there is no case %s\n", wanted.c_str());
  return found && all_pass ? 0 : 1;
}

}  // namespace check

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The number lets two files that are compiled together use the same name.
#define TEST(name) CHECK_CASE(name, __COUNTER__)
#define CHECK_CASE(name, number) CHECK_NUMBERED_CASE(name, number)
#define CHECK_NUMBERED_CASE(name, number)                                                           \
  static void test_##name##_##number();                                                             \
  static const check::Registration case_##name##_##number(__FILE__, #name, test_##name##_##number); \
  static void test_##name##_##number()
#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) return check::fail(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQUAL(a, b) check::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
