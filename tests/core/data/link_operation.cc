// The checks on data that a peer sends: it must belong to the operation and the transfer that are due, and have their
// length.
#include "data/links/link_operation.h"

#include "check.h"
#include "pipe.h"

using namespace sirtaki;
using world::Pipe;

namespace {

constexpr int64_t bytes = 16;
constexpr uint64_t plan = 7;

// Receives the only chunk of a broadcast from rank 0, which sends a frame with this header.
Status receive(const FrameHeader& header) {
  auto there = std::make_shared<Bytes>(), back = std::make_shared<Bytes>();
  Link sender(std::make_unique<Pipe>(there, back));
  Links links(2);
  links.add_socket(0, std::make_unique<Pipe>(back, there));
  const RankNames names{"rank 0", "rank 1"};
  LinkBackend backend({links, baseline_kernels(), names, 4096}, {0, 1}, "auto");
  std::vector<uint8_t> output(bytes);
  auto transfer = std::make_shared<Transfer>();
  transfer->plan = plan;
  transfer->kind = Kind::broadcast;
  transfer->dtype = DType::uint8;
  transfer->members = {0, 1};
  transfer->own = 1;
  transfer->buffer.add(nullptr, output.data(), bytes);
  const std::unique_ptr<Operation> operation = backend.start(transfer);
  sender.send(header, std::vector<uint8_t>(header.length, 9));
  sender.flush();
  Progress progress = Progress::blocked;
  const Status status = operation->advance(0, progress);
  if (status.is_ok()) {
    CHECK(progress == Progress::done);
    CHECK_EQUAL(output, std::vector<uint8_t>(bytes, 9));
  }
  return status;
}

}  // namespace

TEST(data_of_another_transfer_is_refused) {
  CHECK(receive({bytes, FrameKind::data, 0, plan}).is_ok());
  for (const FrameHeader& other : {FrameHeader{bytes, FrameKind::data, 0, plan - 1},
                                   {bytes, FrameKind::data, 0, plan + 1},
                                   {bytes, FrameKind::data, 1, plan},
                                   {0, FrameKind::data, 0, plan},
                                   {bytes - 1, FrameKind::data, 0, plan},
                                   {bytes + 1, FrameKind::data, 0, plan},
                                   {2 * bytes, FrameKind::data, 0, plan},
                                   {bytes, static_cast<FrameKind>(0xff), 0, plan}}) {
    const Status status = receive(other);
    CHECK_EQUAL(status.code(), SRT_PROTOCOL);
    CHECK_EQUAL(status.culprit(), 0);
    const bool is_data = other.kind == FrameKind::data;
    CHECK(
        std::string(status.text()).find(is_data ? "rank 0: transfer " : "rank 0: a frame with an impossible header") ==
        0);
  }
}
