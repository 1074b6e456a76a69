// The common parts of the drivers' ranks: a call, the statistics of its times, and an exit on errors.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sirtaki.h"

using Times = std::vector<double>;

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

// Sums the data over all ranks, in place.
inline void allreduce(srt_context* context, const char* name, std::vector<float>& data) {
  const auto count = static_cast<int64_t>(data.size());
  srt_request request{};
  request.struct_size = sizeof request;
  request.kind = SRT_ALLREDUCE;
  request.dtype = 10;  // float32
  request.device = -1;
  request.name = name;
  request.dimensions = 1;
  request.shape = &count;
  request.prescale = request.postscale = 1.0;
  request.input = request.output = reinterpret_cast<uintptr_t>(data.data());
  srt_handle handle = 0;
  srt_error error{};
  must(srt_run(context, &request, 1, 60'000, &handle, &error) == SRT_OK, error.text);
  srt_release(context, &handle, 1);
}
