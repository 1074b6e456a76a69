// Invalid requests that a rank detects by itself.
#include <array>

#include "world.h"

using namespace sirtaki;
using namespace world;

TEST(a_shape_with_an_empty_dimension_still_has_bounds) {
  World ranks(1, over(Over::sockets));
  const int64_t shape[] = {int64_t{1} << 40, int64_t{1} << 40, 0};
  Ticket handle = 0;
  const Status status = ranks[0].enqueue(std::array{request(SRT_ALLREDUCE, "x", shape, 3)}.data(), 1, &handle);
  CHECK_EQUAL(status.code(), SRT_INVALID_ARGUMENT);
  CHECK(std::string(status.text()).find("'x': the tensor is larger than memory can be") == 0);
}

TEST(a_list_of_ranks_is_no_tensor) {
  Signature signature;
  signature.kind = Kind::add_process_set;
  for (int64_t rank = 1; rank < 1'000; ++rank) signature.shape.push_back(rank);  // the product overflows
  CHECK_EQUAL(signature.bytes(), 0);
}

namespace {

// A sum of `values` as a member of a group without a name.
srt_request member_of(int32_t size, std::vector<float>& values, const int64_t& count) {
  srt_request made = in_place(SRT_ALLREDUCE, nullptr, values, count, DType::float32);
  made.group_size = size;
  return made;
}

}  // namespace

TEST(a_group_without_a_name_is_submitted_as_a_whole) {
  World ranks(1, over(Over::sockets));
  std::vector<float> first{1}, second{2};
  const int64_t count = 1;
  const auto refusal_of = [&](std::vector<srt_request> requests) {
    std::vector<Ticket> handles(requests.size());
    const Status status = ranks[0].enqueue(requests.data(), static_cast<int32_t>(requests.size()), handles.data());
    CHECK_EQUAL(status.code(), SRT_INVALID_ARGUMENT);
    return std::string(status.text());
  };
  const std::string reason =
      "a group without a name consists of requests of one kind and process set, which are submitted together";
  CHECK_EQUAL(refusal_of({member_of(3, first, count), member_of(3, second, count)}), reason);
  srt_request other = member_of(2, second, count);
  other.kind = SRT_BROADCAST;
  CHECK_EQUAL(refusal_of({member_of(2, first, count), other}), reason);
  other = member_of(2, second, count);
  other.name = "second";
  CHECK_EQUAL(refusal_of({member_of(2, first, count), other}), reason);
}

TEST(groups_without_names_match_by_their_order) {
  constexpr int32_t groups = 150;  // their numbers recur meanwhile
  const int64_t count = 3;
  World ranks(2, over(Over::sockets));
  ranks.run([&](int rank, Context& context) {
    std::vector<std::vector<float>> values(2 * groups);
    std::vector<srt_request> requests;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].assign(count, static_cast<float>(i) + static_cast<float>(rank));
      requests.push_back(member_of(2, values[i], count));
    }
    std::vector<Ticket> handles(requests.size());
    const int32_t at_once = rank ? 2 : 2 * groups;  // rank 0 submits all by one call
    for (int32_t i = 0; i < 2 * groups; i += at_once)
      expect_ok(context.enqueue(&requests[static_cast<size_t>(i)], at_once, &handles[static_cast<size_t>(i)]));
    expect_ok(context.wait(handles.data(), 2 * groups, seconds(60)));
    for (size_t i = 0; i < values.size(); ++i) CHECK_EQUAL(values[i][2], 2 * static_cast<float>(i) + 1);
  });
}
