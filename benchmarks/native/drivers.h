// The common parts of the drivers: their arguments, a call, the statistics of its times, and an exit on errors.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "sirtaki.h"

using Clock = std::chrono::steady_clock;
using Times = std::vector<double>;  // microseconds

inline double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

inline double quantile(Times times, double q) {
  std::sort(times.begin(), times.end());
  return times[std::min(times.size() - 1, static_cast<size_t>(q * static_cast<double>(times.size())))];
}

inline double median(const Times& times) { return quantile(times, 0.5); }

inline void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
  std::_Exit(1);
}

// Prints a list in a JSON object.
inline void print_list(const char* name, const std::vector<double>& values) {
  std::printf(", \"%s\": [", name);
  for (size_t i = 0; i < values.size(); ++i) std::printf("%s%.4f", i ? ", " : "", values[i]);
  std::printf("]");
}

// Prints the end of a JSON object.
inline void print_ratios(const Times& ratios) {
  print_list("ratios", ratios);
  std::printf("}\n");
  std::fflush(stdout);
}

// The workload of a driver, from its arguments: settings of sirtaki, as in encrypt=1, and sizes in bytes.
struct Workload {
  srt_config* config = srt_config_create();
  std::vector<size_t> sizes;

  void set(const char* name, const char* value) {
    srt_error error{};
    must(srt_config_set(config, name, value, &error) == SRT_OK, error.text);
  }

  // Returns the value of a setting.
  std::string get(const char* name) const {
    char value[64] = "";
    must(srt_config_get(config, name, value, sizeof value) == SRT_OK, "no such setting");
    return value;
  }

  // Parses the arguments from the given one on; the sizes are the given ones if there are none.
  void parse(int first, int argument_count, char** arguments, const std::vector<size_t>& default_sizes) {
    for (int i = first; i < argument_count; ++i) {
      const std::string argument = arguments[i];
      const size_t equals = argument.find('=');
      if (equals == std::string::npos) sizes.push_back(std::strtoull(arguments[i], nullptr, 10));
      else set(argument.substr(0, equals).c_str(), arguments[i] + equals + 1);
    }
    if (sizes.empty()) sizes = default_sizes;
    must(*std::min_element(sizes.begin(), sizes.end()) >= sizeof(float), "a size has 4 bytes at least");
  }
};

// Sums floats over all ranks, in place.
inline void allreduce(srt_context* context, const char* name, float* data, int64_t count) {
  srt_request request{};
  request.struct_size = sizeof request;
  request.kind = SRT_ALLREDUCE;
  request.dtype = 10;  // float32
  request.device = -1;
  request.name = name;
  request.dimensions = 1;
  request.shape = &count;
  request.prescale = request.postscale = 1.0;
  request.input = request.output = reinterpret_cast<uintptr_t>(data);
  srt_handle handle = 0;
  srt_error error{};
  must(srt_run(context, &request, 1, 60'000, &handle, &error) == SRT_OK, error.text);
  srt_release(context, &handle, 1);
}

inline void allreduce(srt_context* context, const char* name, std::vector<float>& data) {
  allreduce(context, name, data.data(), static_cast<int64_t>(data.size()));
}

// Gives the data this many bytes, and checks a sum of ones over all ranks. Leaves zeros: other sums in place would
// overflow after many calls.
inline void prepare(srt_context* context, const char* name, std::vector<float>& data, size_t bytes, int ranks) {
  data.assign(std::max<size_t>(bytes / sizeof(float), 1), 1.0f);
  allreduce(context, name, data);
  const auto expected = static_cast<float>(ranks);
  must(std::all_of(data.begin(), data.end(), [&](float x) { return x == expected; }), "the sum is wrong");
  std::fill(data.begin(), data.end(), 0.0f);
}
