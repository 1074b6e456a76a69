#include "data/links/algorithm.h"

#include <algorithm>
#include <map>

#include "base/status.h"

namespace sirtaki {
namespace {

constexpr int64_t few_bytes = 64 << 10;  // measured over loopback: equal at 256 KiB, a seventh less time at 16 KiB

}  // namespace

Algorithm choose_algorithm(std::string_view wish, const std::vector<int>& members_per_host, int64_t bytes) {
  const bool is_spread = members_per_host.size() > 1;
  const bool shares_hosts = std::any_of(members_per_host.begin(), members_per_host.end(), [](int n) { return n > 1; });
  if (wish == "direct") return Algorithm::direct;
  if (wish == "ring") return Algorithm::ring;
  if (wish == "recursive_doubling") return Algorithm::recursive_doubling;
  // Every byte then travels between two hosts once in each direction, however many members a host has.
  if (is_spread && shares_hosts) return Algorithm::hierarchical;
  // A sum of two numbers does not depend on their order. With more members, the bits would depend on which tensors
  // are fused, and thus on when they were ready.
  return members_per_host.size() == 2 && bytes <= few_bytes ? Algorithm::recursive_doubling : Algorithm::direct;
}

std::vector<int> count_members(const std::vector<int32_t>& members, const std::vector<int32_t>& host_of) {
  std::map<int32_t, int> counts;
  for (int32_t member : members) ++counts[host_of[static_cast<size_t>(member)]];
  std::vector<int> numbers;
  for (const auto& [host, count] : counts) numbers.push_back(count);
  return numbers;
}

std::string describe_algorithm(std::string_view wish, const std::vector<int>& ranks_per_host,
                               std::string_view transport) {
  int ranks = 0;
  for (int count : ranks_per_host) ranks += count;
  const char* network = transport == "mpi" ? "MPI" : "TCP";
  std::string way;
  switch (choose_algorithm(wish, ranks_per_host, INT64_MAX)) {
    case Algorithm::direct: way = format("over %s between hosts (direct)", network); break;
    case Algorithm::ring: way = format("over %s between hosts (ring)", network); break;
    case Algorithm::recursive_doubling: way = format("over %s between hosts (recursive_doubling)", network); break;
    case Algorithm::hierarchical:
      way = format("through %s inside a host and over %s between hosts (hierarchical)",
                   transport == "socket" ? "Unix sockets" : "shared memory", network);
  }
  return format("%d ranks on %zu hosts: all-reduce goes %s; SIRTAKI_CPU_ALGORITHM changes that", ranks,
                ranks_per_host.size(), way.c_str());
}

}  // namespace sirtaki
