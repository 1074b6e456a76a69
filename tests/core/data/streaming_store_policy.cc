// The choice to store chunks past the cache: only between ranks whose cores are far apart, and never permanently.
#include "data/memory/streaming_store_policy.h"

#include "check.h"

using namespace sirtaki;

namespace {

constexpr int64_t chunk = 512 << 10;
constexpr Nanoseconds quick = chunk / 64 * 8, slow = chunk / 64 * 60;

}  // namespace

TEST(near_ranks_never_stream) {
  StreamingStorePolicy policy;
  for (int i = 0; i < 1000; ++i) {
    CHECK(!policy.streams(chunk));
    policy.noted(chunk, i % 3 == 2 ? quick : slow);  // the thread is preempted now and then
  }
}

TEST(far_ranks_stream_but_for_a_probe_now_and_then) {
  StreamingStorePolicy policy;
  for (int i = 0; i < 3; ++i) policy.noted(chunk, slow);
  int plain = 0;
  for (int i = 0; i < 640; ++i) plain += !policy.streams(chunk);
  CHECK_EQUAL(plain, 10);
  CHECK(!policy.streams(1024));  // not worth it for so few bytes
}

TEST(ranks_that_come_near_stop_streaming) {
  StreamingStorePolicy policy;
  for (int i = 0; i < 3; ++i) policy.noted(chunk, slow);
  CHECK(policy.streams(chunk));
  policy.noted(1024, quick);  // too few bytes to measure
  CHECK(policy.streams(chunk));
  policy.noted(chunk, quick);
  CHECK(!policy.streams(chunk));
}
