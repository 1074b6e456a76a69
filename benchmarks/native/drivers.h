// The common parts of the drivers: their arguments, NAME=NUMBER, a median, and an exit on errors.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
  std::_Exit(1);
}

class Numbers {
 public:
  // Creates them with their default values. Names in `positive` are at least 1, all others at least 0.
  Numbers(std::map<std::string, int64_t> defaults, const std::vector<std::string>& positive)
      : values_(std::move(defaults)), positive_(positive) {}

  void add(const std::string& name, int64_t value) { values_[name] = value; }

  void parse(int argument_count, char** arguments) {
    for (int i = 1; i < argument_count; ++i) {
      const std::string argument = arguments[i];
      const size_t equals = argument.find('=');
      const auto found = values_.find(argument.substr(0, equals));
      must(equals != std::string::npos && found != values_.end(), "each argument is NAME=NUMBER");
      found->second = std::atoll(argument.c_str() + equals + 1);
    }
    for (const std::string& name : positive_) must(values_.at(name) > 0, "a number is too small");
    for (const auto& [name, value] : values_) must(value >= 0, "a number is negative");
  }

  int64_t get(const std::string& name) const { return values_.at(name); }
  int32_t small(const std::string& name) const { return static_cast<int32_t>(get(name)); }

 private:
  std::map<std::string, int64_t> values_;
  std::vector<std::string> positive_;
};
