// The tensors that have cost the most time, by made-up records.
#include "observe/counters/tensor_times.h"
#include "check.h"

using namespace sirtaki;

namespace {

// Returns the record of an operation that ended well.
OperationRecord ended(std::string_view name, Nanoseconds submitted, Nanoseconds decided, Nanoseconds finished) {
  OperationRecord record;
  record.number = 1;
  record.name = ShortName(name);
  record.bytes = 4;
  record.submitted = submitted;
  record.decided = decided;
  record.finished = finished;
  record.status = SRT_OK;
  return record;
}

std::string told(const std::vector<TensorTimes>& found) {
  std::string text;
  for (const TensorTimes& one : found) {
    const auto number = [](int64_t value) { return std::to_string(value) + " "; };
    text += std::string(one.name.view()) + " " + number(one.operations) + number(one.exposed) + number(one.wait) +
            number(one.transfer);
  }
  return text;
}

}  // namespace

TEST(tensors_are_ordered_by_the_time_in_which_the_program_waited) {
  const std::vector<OperationRecord> records = {ended("hidden", 10, 60, 70), ended("loss", 90, 95, 120),
                                                ended("loss", 190, 200, 230)};
  const std::vector<WaitSpan> waits = {{0, 15}, {100, 110}, {115, 118}, {200, 300}};
  CHECK_EQUAL(told(slowest_tensors(records, waits, 10)), "loss 2 43 15 55 hidden 1 5 50 10 ");
  CHECK_EQUAL(told(slowest_tensors(records, waits, 1)), "loss 2 43 15 55 ");
}

TEST(without_waits_tensors_are_ordered_by_their_own_wait) {
  const std::vector<OperationRecord> records = {ended("a", 0, 10, 1000), ended("b", 0, 20, 30), ended("c", 0, 20, 40)};
  CHECK_EQUAL(told(slowest_tensors(records, {}, 10)), "b 1 0 20 10 c 1 0 20 20 a 1 0 10 990 ");
}

TEST(operations_that_tell_nothing_are_left_out) {
  std::vector<OperationRecord> records(4, ended("x", 10, 20, 30));
  records[0].status = SRT_MISMATCH;
  records[1].finished = 0;
  records[2].bytes = 0;    // a barrier
  records[3].decided = 0;  // it ended before all ranks had agreed
  CHECK_EQUAL(told(slowest_tensors(records, {}, 10)), "");
  const std::vector<WaitSpan> waits = {{100, 110}};
  records = {ended("early", 90, 105, 120), ended("x", 100, 105, 120)};
  CHECK_EQUAL(told(slowest_tensors(records, waits, 10)), "x 1 10 5 15 ");
}
