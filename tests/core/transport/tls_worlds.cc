// Worlds of several hosts whose links are encrypted.
#include <cstring>

#include "world.h"

using namespace world;

namespace {

template <typename T>
void check_sums(int rank, Context& context, DType dtype, int64_t count) {
  const std::string name = format("%d-%lld", static_cast<int>(dtype), static_cast<long long>(count));
  std::vector<T> data(static_cast<size_t>(count));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<T>(static_cast<int>(i % 11) + rank);
  run_well(context, in_place(SRT_ALLREDUCE, name.c_str(), data, count, dtype));
  srt_topology place = context.topology();
  const int size = place.size;
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i] != static_cast<T>(static_cast<int>(i % 11) * size + size * (size - 1) / 2))
      return check::fail(__FILE__, __LINE__, "a wrong sum in " + name);
}

}  // namespace

TEST(sums_over_encrypted_links_are_exact) {
  for (const std::vector<int>& hosts : {std::vector{0, 1}, std::vector{0, 0, 1, 1}, std::vector{0, 1, 2}})
    for (const char* sockets : {"1", "3"}) {
      World ranks(static_cast<int>(hosts.size()), on_hosts(hosts, {{"encrypt", "1"}, {"sockets_per_link", sockets}}));
      ranks.run([&](int rank, Context& context) {
        for (int64_t count : {1, 1000, 300'001}) {
          check_sums<float>(rank, context, DType::float32, count);
          check_sums<double>(rank, context, DType::float64, count);
          check_sums<int32_t>(rank, context, DType::int32, count);
          check_sums<uint8_t>(rank, context, DType::uint8, count);
        }
      });
    }
}

TEST(a_rank_that_is_gone_is_named_over_an_encrypted_link) {
  Options options = on_hosts({0, 1}, {{"encrypt", "1"}});
  options.shut_down = false;
  World ranks(2, std::move(options));
  ranks.run([&](int rank, Context& context) { check_sums<float>(rank, context, DType::float32, 1000); });
  ranks.lose(1);
  const int64_t count = 1000;
  std::vector<float> data(static_cast<size_t>(count));
  const Status status = end_of(ranks[0], in_place(SRT_ALLREDUCE, "lost", data, count, DType::float32));
  CHECK_EQUAL(status.code(), SRT_PEER_LOST);
  CHECK(contains(status, "rank 1 (pid 101 on "));
}

TEST(a_plain_link_between_hosts_is_refused_where_all_are_encrypted) {
  for (const char* encrypts : {"1", "0"}) {
    Config config;
    expect_ok(config.set("encrypt", encrypts));
    const srt_peer peers[] = {{"here", 1, 0}, {"there", 2, 1}};
    const srt_topology topology{sizeof topology, 0, 2, 0, 1, 0, 2, peers};
    std::unique_ptr<Context> context;
    expect_ok(Context::create(config, topology, context));
    int ends[2];
    REQUIRE(tcp_pair(ends));
    const Descriptor own(ends[0]), other(ends[1]);
    if (std::strcmp(encrypts, "1") == 0) {
      CHECK_EQUAL(std::string(context->link_socket(1, ends[0]).text()),
                  "the link to rank 1 has to be encrypted, and is not");
    } else {
      encrypted::Sessions sessions = encrypted::establish({{ends[0], ends[1]}});
      CHECK_EQUAL(std::string(context->link_tls(1, ends[0], sessions.ends[0]).text()),
                  "the link to rank 1 is encrypted, and should not be");
      CHECK(sessions.ends[0] != nullptr);
    }
  }
}
