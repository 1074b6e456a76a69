// Error feedback: values become what a wire format can express, and residuals keep the rest.
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "sirtaki.h"
#include "wire_reference.h"

using namespace sirtaki;

namespace {

using Values = std::vector<float>;

constexpr int32_t format_codes[] = {SRT_WIRE_INT8, SRT_WIRE_FP8};

Values numbers_around_zero(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Values values(count);
  for (float& value : values) value = static_cast<float>(random() % 20'001) * 1e-4f - 1;
  return values;
}

uintptr_t address(Values& values) { return reinterpret_cast<uintptr_t>(values.data()); }

srt_status quantise(int32_t format, Values& values, Values& residuals, double* squares = nullptr) {
  return srt_quantise(format, address(values), address(residuals), static_cast<int64_t>(values.size()), squares);
}

}  // namespace

TEST(values_are_rounded_and_residuals_keep_the_rest) {
  for (int32_t format : format_codes)
    for (size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{1'000}}) {
      const Values first = numbers_around_zero(count, 1), before = numbers_around_zero(count, 2);
      Values values = first, residuals = before, wanted(count);
      double squares[2] = {-1, -1}, wanted_squares = 0, error_squares = 0;
      for (size_t i = 0; i < count; ++i) wanted[i] = first[i] + before[i];
      const Values rounded = reference::round(static_cast<WireFormat>(format), wanted);
      CHECK_EQUAL(quantise(format, values, residuals, squares), SRT_OK);
      CHECK(values == rounded);
      for (size_t i = 0; i < count; ++i) {
        CHECK_EQUAL(residuals[i], wanted[i] - rounded[i]);
        wanted_squares += double{wanted[i]} * double{wanted[i]};
        error_squares += double{residuals[i]} * double{residuals[i]};
      }
      CHECK(std::fabs(squares[0] - wanted_squares) <= 1e-12 * wanted_squares);
      CHECK(std::fabs(squares[1] - error_squares) <= 1e-12 * error_squares);
    }
}

TEST(rounded_values_stay_as_they_are) {
  for (int32_t format : format_codes) {
    Values values = numbers_around_zero(5'000, 3), residuals(values.size());
    CHECK_EQUAL(quantise(format, values, residuals), SRT_OK);
    const Values rounded = values;
    std::fill(residuals.begin(), residuals.end(), 0.0f);
    double squares[2];
    CHECK_EQUAL(quantise(format, values, residuals, squares), SRT_OK);
    CHECK(values == rounded);
    CHECK(residuals == Values(values.size()));
    CHECK_EQUAL(squares[1], 0.0);
  }
}

// The sum over many steps of what was sent follows the sum of what should have been, however coarse each step is.
TEST(no_part_of_a_value_is_lost_over_many_steps) {
  for (int32_t format : format_codes) {
    Values residuals(300), sent(300);
    const Values each = numbers_around_zero(300, 4);
    constexpr int steps = 200;
    for (int step = 0; step < steps; ++step) {
      Values values = each;
      CHECK_EQUAL(quantise(format, values, residuals), SRT_OK);
      for (size_t i = 0; i < sent.size(); ++i) sent[i] += values[i];
    }
    for (size_t i = 0; i < sent.size(); ++i) CHECK(std::fabs(sent[i] + residuals[i] - steps * each[i]) < 1e-3f);
  }
}

TEST(a_block_that_is_not_finite_keeps_its_residuals) {
  const float most = std::numeric_limits<float>::max(), infinity = std::numeric_limits<float>::infinity();
  for (int32_t format : format_codes)
    for (float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), most}) {
      const Values before = numbers_around_zero(700, 5);
      Values values = numbers_around_zero(700, 6), residuals = before;
      residuals[300] = bad == most ? most : before[300];  // their sum is too large
      values[300] = bad;
      const Values kept = residuals;
      double squares[2];
      CHECK_EQUAL(quantise(format, values, residuals, squares), SRT_OK);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK_EQUAL(std::isnan(values[i]), i / wire_block == 1);
        if (i / wire_block == 1) CHECK_EQUAL(residuals[i], kept[i]);
        else CHECK(residuals[i] != before[i]);
      }
      CHECK(std::isfinite(squares[0]) && std::isfinite(squares[1]));
    }
}

TEST(residuals_are_optional) {
  for (int32_t format : format_codes) {
    Values values = numbers_around_zero(1'000, 7);
    const Values rounded = reference::round(static_cast<WireFormat>(format), values);
    CHECK_EQUAL(srt_quantise(format, address(values), 0, 1'000, nullptr), SRT_OK);
    CHECK(values == rounded);
  }
}

TEST(only_formats_with_blocks_round) {
  Values values = numbers_around_zero(10, 8), residuals(10);
  const Values before = values;
  for (int32_t format : {SRT_WIRE_EXACT + 0, -1, srt_wire_format_count()})
    CHECK_EQUAL(quantise(format, values, residuals), SRT_INVALID_ARGUMENT);
  CHECK_EQUAL(srt_quantise(SRT_WIRE_INT8, address(values), 0, -1, nullptr), SRT_INVALID_ARGUMENT);
  CHECK(values == before);
}

TEST(the_formats_are_listed_by_name) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < srt_wire_format_count(); ++i) {
    srt_wire_format format{};
    CHECK_EQUAL(srt_wire_format_get(i, &format), SRT_OK);
    CHECK_EQUAL(format.code, i);
    CHECK_EQUAL(format.block_elements, i ? 256 : 0);
    names.push_back(format.name);
  }
  CHECK_EQUAL(names, (std::vector<std::string>{"exact", "int8", "fp8"}));
  srt_wire_format none{};
  CHECK_EQUAL(srt_wire_format_get(srt_wire_format_count(), &none), SRT_INVALID_ARGUMENT);
}
