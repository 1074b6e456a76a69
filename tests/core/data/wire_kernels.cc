// The arithmetic of wire formats, compared with a reference in plain loops, for each instruction set of this machine.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "data/kernels/float8.h"
#include "kernel_tables.h"
#include "wire_reference.h"

using namespace sirtaki;
using reference::formats;
using reference::same_bits;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();
// The blocks differ in their magnitudes, too.
std::vector<float> numbers_of_many_magnitudes(size_t count, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = std::ldexp(static_cast<float>(random() % 2'000'001) - 1e6f,
                           static_cast<int>(i / wire_block * 7 % 60) - 40 - static_cast<int>(random() % 12));
  return values;
}

std::vector<uint8_t> encoded(const WireKernels& kernels, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(encoded_size(values.size()));
  kernels.encode(bytes.data(), values.data(), values.size());
  return bytes;
}

std::vector<float> decoded(const WireKernels& kernels, const std::vector<uint8_t>& bytes, size_t count) {
  std::vector<float> values(count, -1.0f);
  kernels.decode(values.data(), bytes.data(), count);
  return values;
}

template <typename Body>
void for_all(Body&& body) {
  for (const Kernels* table : tables())
    for (WireFormat format : formats) body(*table->wire(format), format);
}

const std::vector<size_t> counts{0, 1, 2, 7, 8, 31, 255, 256, 257, 260, 511, 512, 513, 1000, 5000};

}  // namespace

TEST(exact_elements_need_no_kernels) {
  for (const Kernels* table : tables()) CHECK(table->wire(WireFormat::exact) == nullptr);
}

TEST(an_encoded_tensor_has_a_scale_for_each_block) {
  CHECK_EQUAL(encoded_size(0), size_t{0});
  CHECK_EQUAL(encoded_size(1), size_t{5});
  CHECK_EQUAL(encoded_size(256), size_t{260});
  CHECK_EQUAL(encoded_size(257), size_t{265});
}

TEST(blocks_of_every_length_match_the_reference) {
  for_all([](const WireKernels& kernels, WireFormat format) {
    for (size_t count : counts) {
      const std::vector<float> values = numbers_of_many_magnitudes(count, static_cast<uint32_t>(count));
      const std::vector<uint8_t> bytes = encoded(kernels, values);
      CHECK(bytes == reference::encode(format, values));
      CHECK(same_bits(decoded(kernels, bytes, count), reference::decode(format, bytes, count)));
    }
  });
}

TEST(addresses_need_no_alignment) {
  for_all([](const WireKernels& kernels, WireFormat format) {
    const std::vector<float> values = numbers_of_many_magnitudes(700);
    const std::vector<uint8_t> expected = reference::encode(format, values);
    for (size_t shift = 0; shift < 33; ++shift) {
      std::vector<uint8_t> bytes(expected.size() + 64, 0xee);
      kernels.encode(bytes.data() + shift, values.data(), values.size());
      CHECK(std::equal(expected.begin(), expected.end(), bytes.begin() + static_cast<ptrdiff_t>(shift)));
      CHECK_EQUAL(std::count(bytes.begin() + static_cast<ptrdiff_t>(shift + expected.size()), bytes.end(), 0xee),
                  static_cast<ptrdiff_t>(64 - shift));
      std::vector<float> room(values.size() + 16, -1.0f), back = reference::decode(format, expected, values.size());
      float* const out = room.data() + shift % 8;
      kernels.decode(out, bytes.data() + shift, values.size());
      CHECK_EQUAL(std::memcmp(out, back.data(), back.size() * sizeof(float)), 0);
      CHECK_EQUAL(out[values.size()], -1.0f);
    }
  });
}

TEST(what_was_decoded_encodes_without_an_error) {
  for_all([](const WireKernels& kernels, WireFormat) {
    for (uint32_t seed = 0; seed < 300; ++seed) {
      const std::vector<float> values = numbers_of_many_magnitudes(1'500, seed);
      const std::vector<uint8_t> bytes = encoded(kernels, values);
      const std::vector<float> once = decoded(kernels, bytes, values.size());
      CHECK(encoded(kernels, once) == bytes);
      CHECK(same_bits(decoded(kernels, encoded(kernels, once), values.size()), once));
    }
  });
}

// Every float may be the largest of its block: the scale follows from it alone.
TEST(any_largest_value_gives_a_stable_scale) {
  for_all([](const WireKernels& kernels, WireFormat) {
    std::mt19937 random(3);
    for (int i = 0; i < 200'000; ++i) {
      const float largest = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x7fffffff);
      if (!std::isfinite(largest)) continue;
      const std::vector<float> values{largest, -largest, largest * 0.37f, 0.0f};
      const std::vector<uint8_t> bytes = encoded(kernels, values);
      if (encoded(kernels, decoded(kernels, bytes, 4)) != bytes) return check::fail(__FILE__, __LINE__, "not stable");
    }
  });
}

TEST(the_largest_value_of_a_block_and_equal_ones_stay_as_they_are) {
  for_all([](const WireKernels& kernels, WireFormat) {
    for (float value : {1.0f, -3.0f, 0.1f, 1e30f}) {
      const std::vector<float> values{value, -value, value, 0.0f, value};
      CHECK(decoded(kernels, encoded(kernels, values), 5) == values);
    }
  });
}

TEST(errors_are_at_most_half_a_step) {
  for_all([](const WireKernels& kernels, WireFormat format) {
    const std::vector<float> values = numbers_of_many_magnitudes(50'000);
    const std::vector<float> back = decoded(kernels, encoded(kernels, values), values.size());
    int wrong = 0;
    for (size_t at = 0; at < values.size(); at += wire_block) {
      double largest = 0;
      const size_t end = std::min(at + wire_block, values.size());
      for (size_t i = at; i < end; ++i) largest = std::max(largest, std::fabs(double{values[i]}));
      for (size_t i = at; i < end; ++i) {
        const double size = std::fabs(double{values[i]}), error = std::fabs(double{back[i]} - values[i]);
        // int8: equal steps; fp8: a sixteenth of the value at most, and near zero half of 2^-9 of the scale.
        const double allowed =
            format == WireFormat::int8 ? largest / 127 / 2 : std::max(size / 16, largest / 448 * 0x1p-10);
        wrong += error > allowed * 1.0001;
      }
    }
    CHECK_EQUAL(wrong, 0);
  });
}

// float8_e4m3fn has an arithmetic of its own in this library, by a table.
TEST(the_codes_of_fp8_are_those_of_e4m3) {
  for (const Kernels* table : tables()) {
    std::vector<float> all(Float8E4M3fn::table.begin(), Float8E4M3fn::table.begin() + Float8E4M3fn::last_finite + 1);
    for (size_t code = 0; code + 1 < all.size() && code < 0x7e; ++code) {
      // Values between two codes, and their middle; 448 makes the scale 1.
      const float low = Float8E4M3fn::table[code], high = Float8E4M3fn::table[code + 1];
      const std::vector<float> values{
          448,  low,  (low + high) / 2, std::nextafter((low + high) / 2, 0.0f), std::nextafter((low + high) / 2, 1e9f),
          -low, -high};
      const std::vector<uint8_t> bytes = encoded(*table->wire(WireFormat::fp8), values);
      for (size_t i = 0; i < values.size(); ++i)
        CHECK_EQUAL(int{bytes[sizeof(float) + i]}, int{narrow_float8<Float8E4M3fn>(values[i])});
    }
  }
}

TEST(a_block_with_no_finite_number_is_nan_in_full_and_its_neighbours_are_not) {
  for_all([](const WireKernels& kernels, WireFormat) {
    for (float bad : {not_a_number, -not_a_number, infinity, -infinity})
      for (size_t place : {size_t{256}, size_t{300}, size_t{511}, size_t{600}, size_t{699}}) {
        std::vector<float> values = numbers_of_many_magnitudes(700);
        const std::vector<float> good = decoded(kernels, encoded(kernels, values), values.size());
        values[place] = bad;
        const std::vector<float> back = decoded(kernels, encoded(kernels, values), values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          const bool is_bad = i / wire_block == place / wire_block;
          CHECK_EQUAL(std::bit_cast<uint32_t>(back[i]), is_bad ? 0x7fc00000 : std::bit_cast<uint32_t>(good[i]));
        }
      }
  });
}

TEST(zeros_and_the_smallest_numbers_become_zeros) {
  for_all([](const WireKernels& kernels, WireFormat) {
    for (float tiny : {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), 5e-31f}) {
      const std::vector<uint8_t> bytes = encoded(kernels, std::vector<float>(300, tiny));
      CHECK(bytes == std::vector<uint8_t>(encoded_size(300), 0));
      CHECK(same_bits(decoded(kernels, bytes, 300), std::vector<float>(300, 0.0f)));
    }
  });
}

TEST(the_largest_numbers_stay_finite) {
  for_all([](const WireKernels& kernels, WireFormat) {
    const float most = std::numeric_limits<float>::max();
    for (float value : decoded(kernels, encoded(kernels, {most, -most, most / 3}), 3)) CHECK(std::isfinite(value));
  });
}

TEST(adding_decodes_and_adds) {
  for_all([](const WireKernels& kernels, WireFormat format) {
    for (size_t count : counts) {
      const std::vector<float> first = numbers_of_many_magnitudes(count, 5),
                               second = numbers_of_many_magnitudes(count, 6);
      std::vector<float> sum = first;
      const std::vector<uint8_t> bytes = encoded(kernels, second);
      kernels.add(sum.data(), bytes.data(), count);
      const std::vector<float> addend = reference::decode(format, bytes, count);
      std::vector<float> expected(count);
      for (size_t i = 0; i < count; ++i) expected[i] = first[i] + addend[i];
      CHECK(same_bits(sum, expected));
    }
  });
}

TEST(adding_a_block_of_nan_gives_nan) {
  for_all([](const WireKernels& kernels, WireFormat) {
    std::vector<float> sum(300, 1.0f), bad(300, 1.0f);
    bad[0] = infinity;
    kernels.add(sum.data(), encoded(kernels, bad).data(), 300);
    for (size_t i = 0; i < 300; ++i) CHECK_EQUAL(std::isnan(sum[i]), i < wire_block);
  });
}
