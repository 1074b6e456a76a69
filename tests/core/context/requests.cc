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
