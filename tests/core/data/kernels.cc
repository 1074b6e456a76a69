// The arithmetic, compared element by element with a plain loop, for each instruction set of this machine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "data/kernels/half.h"
#include "kernel_tables.h"

using namespace sirtaki;

namespace {

double plain(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    case ReduceOp::product: return a * b;
    case ReduceOp::sum:
    case ReduceOp::average: return a + b;
    case ReduceOp::adasum: break;  // no kernel: it combines whole tensors
  }
  return std::numeric_limits<double>::quiet_NaN();
}

template <typename T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, Float16>) return narrow_float16(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, BFloat16>) return narrow_bfloat16(static_cast<float>(value));
  else return static_cast<T>(value);
}

template <typename T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) return widen(value);
  else return static_cast<double>(value);
}

// Checks reductions of small integers, which are exact in every dtype. Lengths lie around the vectors' widths and the
// block.
template <typename T>
void check_reductions(DType dtype) {
  for (const Kernels* table : tables())
    for (size_t op = 0; op < reduce_op_count; ++op) {
      const ReduceKernel reduce = table->of(dtype)->reduce[op];
      for (int sources = 1; reduce && sources <= 9; ++sources)
        for (size_t count :
             {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{33}, size_t{1023}, size_t{1025}, size_t{3000}}) {
          std::vector<std::vector<T>> inputs(static_cast<size_t>(sources), std::vector<T>(count));
          std::vector<const void*> pointers;
          std::vector<double> expected(count);
          for (size_t s = 0; s < inputs.size(); ++s) {
            for (size_t i = 0; i < count; ++i) {
              const double value = static_cast<double>((i * 7 + s * 3) % 5) - 2;
              inputs[s][i] = from_double<T>(value);
              expected[i] = s ? plain(static_cast<ReduceOp>(op), expected[i], value) : value;
            }
            pointers.push_back(inputs[s].data());
          }
          T* out = inputs[count % inputs.size()].data();  // in place of one of the sources
          reduce(out, pointers.data(), sources, count, {});
          int wrong = 0;
          for (size_t i = 0; i < count; ++i) wrong += to_double(out[i]) != expected[i];
          CHECK_EQUAL(wrong, 0);
        }
    }
}

}  // namespace

TEST(reductions_of_every_dtype) {
  check_reductions<int8_t>(DType::int8);
  check_reductions<int16_t>(DType::int16);
  check_reductions<int32_t>(DType::int32);
  check_reductions<int64_t>(DType::int64);
  check_reductions<float>(DType::float32);
  check_reductions<double>(DType::float64);
  check_reductions<Float16>(DType::float16);
  check_reductions<BFloat16>(DType::bfloat16);
}

TEST(the_table_says_what_can_be_reduced) {
  for (int code = 0; code < dtype_count; ++code)
    for (const Kernels* table : tables()) {
      const DTypeKernels* kernels = table->of(static_cast<DType>(code));
      const int32_t ops = dtype_entry(code)->reduce_ops & ~(1 << SRT_ADASUM);  // combines whole tensors
      CHECK_EQUAL(kernels != nullptr, ops != 0);
      for (size_t op = 0; op < reduce_op_count; ++op)
        if (ops & 1 << op) CHECK(kernels->reduce[op] && kernels->fill[op]);
    }
}

// Every code of every 8-bit format converts to its value and back, and the middle of two values rounds to the even one.
TEST(the_smallest_floats_round_to_the_nearest_even) {
  for (const Kernels* table : tables())
    for (DType dtype : {DType::float8_e4m3fn, DType::float8_e4m3fnuz, DType::float8_e5m2, DType::float8_e5m2fnuz}) {
      const DTypeKernels& kernels = *table->of(dtype);
      std::vector<uint8_t> codes(256), back(256);
      for (size_t i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
      std::vector<double> meanings(256);
      kernels.to_double(meanings.data(), codes.data(), 256);
      kernels.from_double(back.data(), meanings.data(), 256);
      for (size_t i = 0; i < 256; ++i)
        if (!std::isnan(meanings[i])) CHECK_EQUAL(int{back[i]}, int{codes[i]});
      for (size_t i = 0; i + 1 < 0x7b; ++i) {
        const double middle = (meanings[i] + meanings[i + 1]) / 2;
        uint8_t rounded = 0;
        kernels.from_double(&rounded, &middle, 1);
        CHECK_EQUAL(int{rounded}, static_cast<int>(i + i % 2));
      }
    }
}

// 8-bit integers are added in 32 bits, so their average is right although the sum would overflow.
TEST(small_integers_average_without_wrapping) {
  for (const Kernels* table : tables()) {
    const std::vector<int8_t> a(50, 100), b(50, 110), c(50, 120);
    std::vector<int8_t> out(50);
    const void* const sources[] = {a.data(), b.data(), c.data()};
    table->of(DType::int8)->reduce[SRT_AVERAGE](out.data(), sources, 3, 50, {1.0, 3});
    CHECK_EQUAL(out, std::vector<int8_t>(50, 110));
  }
}

TEST(integers_average_toward_zero_and_exactly) {
  for (const Kernels* table : tables()) {
    const int64_t big = int64_t{1} << 60;
    const std::vector<int64_t> a{7, -7, 1, -1, big + 1}, b{0, 0, 0, 0, big + 2}, c{1, -1, 1, -1, big};
    std::vector<int64_t> out(5);
    const void* const sources[] = {a.data(), b.data(), c.data()};
    table->of(DType::int64)->reduce[SRT_AVERAGE](out.data(), sources, 3, 5, {1.0, 3});
    CHECK_EQUAL(out, (std::vector<int64_t>{2, -2, 0, 0, big + 1}));
    std::vector<int32_t> scaled{5, -5, 2'000'000'000, -2'000'000'000};
    table->of(DType::int32)->scale(scaled.data(), scaled.data(), 4, {1.5, 1});
    CHECK_EQUAL(scaled, (std::vector<int32_t>{7, -7, INT32_MAX, INT32_MIN}));  // truncated, saturated
  }
}

TEST(a_nan_wins_in_min_and_max) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* table : tables())
    for (int op : {SRT_MIN, SRT_MAX}) {
      std::vector<float> a(40, 1.0f), b(40, 2.0f), out(40);
      a[3] = b[17] = nan;
      const void* const sources[] = {a.data(), b.data()};
      table->of(DType::float32)->reduce[op](out.data(), sources, 2, 40, {});
      for (size_t i = 0; i < 40; ++i) CHECK_EQUAL(std::isnan(out[i]), i == 3 || i == 17);
    }
}

// Lengths lie around the vectors' widths and the block, and the value lies anywhere.
template <typename T>
void check_finding(DType dtype, const std::vector<double>& largest_finite) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const Kernels* table : tables())
    for (size_t count : {1, 7, 8, 33, 1023, 1025, 3000}) {
      for (double value : largest_finite) {
        std::vector<T> values(count, from_double<T>(value));
        CHECK(table->of(dtype)->are_finite(values.data(), count));
      }
      for (double value : {infinity, -infinity, nan})
        for (size_t at : {size_t{0}, count / 2, count - 1})
          for (int ranks = 2; ranks <= 6; ++ranks) {
            std::vector<T> good(count, from_double<T>(1)), bad(good), out(count);
            bad[at] = from_double<T>(value);
            std::vector<const void*> sources(static_cast<size_t>(ranks), good.data());
            const auto reduce = table->of(dtype)->reduce[SRT_SUM];
            CHECK(reduce(out.data(), sources.data(), ranks, count, {}));
            sources[at % sources.size()] = bad.data();
            CHECK(!reduce(out.data(), sources.data(), ranks, count, {0.5, 3}));
            CHECK(!table->of(dtype)->are_finite(bad.data(), count));
          }
    }
}

TEST(infinities_and_nans_are_found) {
  check_finding<float>(DType::float32, {0, -3.4028234e38, 1e-45});
  check_finding<double>(DType::float64, {0, -1.7976931348623157e308, 5e-324});
  check_finding<Float16>(DType::float16, {0, -65504, 6e-8});
  check_finding<BFloat16>(DType::bfloat16, {0, -3.3895314e38, 1e-40});
}

TEST(many_ranks_are_reduced_in_their_order) {
  const auto fold = [](int op, float a, float b) {
    if (op == SRT_MIN) return a < b || a != a ? a : b;
    if (op == SRT_MAX) return a > b || a != a ? a : b;
    return op == SRT_PRODUCT ? a * b : a + b;
  };
  const size_t count = 1500;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Kernels* table : tables())
    for (int op : {SRT_SUM, SRT_MIN, SRT_MAX, SRT_PRODUCT})
      for (size_t ranks = 5; ranks <= 9; ++ranks)
        for (const Scale scale : {Scale{}, Scale{0.5, 3}}) {
          std::vector<std::vector<float>> inputs(ranks, std::vector<float>(count));
          std::vector<const void*> sources;
          for (std::vector<float>& input : inputs) {
            std::ranges::generate(input, [&] { return normal(random); });
            sources.push_back(input.data());
          }
          for (size_t i = 0; i < ranks; ++i) inputs[i][100 + i] = std::numeric_limits<float>::quiet_NaN();
          std::vector<float> expected(inputs[0]), out(count);
          for (size_t rank = 1; rank < ranks; ++rank)
            for (size_t i = 0; i < count; ++i) expected[i] = fold(op, expected[i], inputs[rank][i]);
          if (!scale.is_one())
            for (float& value : expected) value = value * 0.5f / 3.0f;
          table->of(DType::float32)->reduce[op](out.data(), sources.data(), static_cast<int>(ranks), count, scale);
          CHECK_EQUAL(std::memcmp(out.data(), expected.data(), count * sizeof(float)), 0);
        }
}

TEST(integers_wrap_around) {
  for (const Kernels* table : tables()) {
    std::vector<int32_t> a{INT32_MAX}, b{1};
    const void* const sources[] = {a.data(), b.data()};
    table->of(DType::int32)->reduce[SRT_SUM](a.data(), sources, 2, 1, {});
    CHECK_EQUAL(a[0], INT32_MIN);
  }
}

TEST(neutral_elements_change_nothing) {
  for (const Kernels* table : tables())
    for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::int32})
      for (int op = 0; op < 5; ++op) {
        std::vector<uint8_t> value(dtype_bytes(dtype) * 4), neutral(value.size()), out(value.size());
        for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<uint8_t>(i % 2 ? 0x3f : 0x80);
        table->of(dtype)->fill[op](neutral.data(), 4);
        const void* const sources[] = {neutral.data(), value.data()};
        table->of(dtype)->reduce[op](out.data(), sources, 2, 4, {});
        CHECK(out == value);
      }
}

TEST(sixteen_bit_sums_are_rounded_once) {
  // 2048 + 1 + 1 in float16: rounding after each addition loses both ones.
  for (const Kernels* table : tables()) {
    const std::vector<Float16> big(20, narrow_float16(2048)), one(20, narrow_float16(1));
    std::vector<Float16> out(20);
    const void* const sources[] = {big.data(), one.data(), one.data()};
    table->of(DType::float16)->reduce[SRT_SUM](out.data(), sources, 3, 20, {});
    for (Float16 value : out) CHECK_EQUAL(widen(value), 2050.0f);
  }
}

// Registers of 16-bit floats are reduced by code of their own, an element alone is not.
template <typename T>
void check_registers(DType dtype) {
  std::vector<T> a(0x10000), b(a.size()), out(a.size());
  for (size_t i = 0; i < a.size(); ++i) a[i].bits = static_cast<uint16_t>(i);
  b = a;
  std::shuffle(b.begin(), b.end(), std::mt19937(5));
  for (const Kernels* table : tables())
    for (int op : {SRT_SUM, SRT_MIN, SRT_MAX, SRT_PRODUCT})
      for (const Scale scale : {Scale{}, Scale{0.5, 3}}) {
        const auto reduce = table->of(dtype)->reduce[op];
        const void* const sources[] = {a.data(), b.data(), b.data()};
        reduce(out.data(), sources, 3, out.size(), scale);
        int differ = 0;
        for (size_t i = 0; i < out.size(); ++i) {
          const void* const parts[] = {&a[i], &b[i], &b[i]};
          T alone;
          reduce(&alone, parts, 3, 1, scale);  // NaNs may differ in their payload
          differ += out[i].bits != alone.bits && !(std::isnan(widen(out[i])) && std::isnan(widen(alone)));
        }
        CHECK_EQUAL(differ, 0);
      }
}

TEST(half_precision_round_trips_and_rounds_to_even) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    const bool half_nan = (bits & 0x7fff) > 0x7c00, brain_nan = (bits & 0x7fff) > 0x7f80;
    if (half_nan) CHECK(std::isnan(widen(narrow_float16(widen(half)))));
    else CHECK_EQUAL(narrow_float16(widen(half)).bits, bits);
    if (brain_nan) CHECK(std::isnan(widen(narrow_bfloat16(widen(brain)))));
    else CHECK_EQUAL(narrow_bfloat16(widen(brain)).bits, bits);
  }
  CHECK_EQUAL(widen(Float16{0x0001}), 0x1p-24f);
  CHECK_EQUAL(widen(Float16{0x3555}), 0.333251953125f);
  CHECK_EQUAL(narrow_float16(65'519.0f).bits, 0x7bff);
  CHECK_EQUAL(narrow_float16(65'520.0f).bits, 0x7c00);
  CHECK_EQUAL(narrow_float16(1.0f + 0x1p-11f).bits, 0x3c00);              // a tie, to even
  CHECK_EQUAL(narrow_float16(1.0f + 0x1p-10f + 0x1p-11f).bits, 0x3c02);
  CHECK_EQUAL(narrow_bfloat16(1.0f + 0x1p-8f).bits, 0x3f80);
}

TEST(registers_of_sixteen_bit_floats_give_the_bits_of_single_elements) {
  check_registers<Float16>(DType::float16);
  check_registers<BFloat16>(DType::bfloat16);
}

TEST(streaming_copies_every_byte_and_no_other) {
  std::vector<uint8_t> from(1000), to(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + 1);
  for (const Kernels* table : tables())
    for (size_t source : {size_t{0}, size_t{3}, size_t{64}})
      for (size_t target = 0; target < 70; target += 3)
        for (size_t count : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{128}, size_t{500}}) {
          std::fill(to.begin(), to.end(), uint8_t{0});
          table->stream(to.data() + target, from.data() + source, count);
          CHECK(std::equal(from.begin() + static_cast<ptrdiff_t>(source),
                           from.begin() + static_cast<ptrdiff_t>(source + count),
                           to.begin() + static_cast<ptrdiff_t>(target)));
          CHECK_EQUAL(std::count(to.begin(), to.end(), uint8_t{0}) >= static_cast<ptrdiff_t>(1000 - count), true);
          CHECK(target == 0 || to[target - 1] == 0);
          CHECK_EQUAL(to[target + count], uint8_t{0});
        }
}

TEST(every_instruction_set_gives_the_same_bits) {
  if (tables().size() < 2) return;  // this machine has only one
  std::vector<float> values(4096);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] =
        std::ldexp(static_cast<float>(i * 2'654'435'761u % 1000) - 500.0f, static_cast<int>(i % 41) - 20) * 1.37f;
  for (DType dtype : {DType::float32, DType::float16, DType::bfloat16})
    for (int op = 0; op < 5; ++op) {
      std::vector<std::vector<uint8_t>> results;
      for (const Kernels* table : tables()) {
        std::vector<uint8_t> out(1000 * dtype_bytes(dtype));
        const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
        const void* const sources[] = {bytes, bytes + 4000, bytes + 8000};
        table->of(dtype)->reduce[op](out.data(), sources, 3, 1000, {0.3, 3});
        results.push_back(out);
      }
      int differ = 0;
      for (size_t i = 0; i < 1000; ++i) {
        const size_t n = dtype_bytes(dtype);
        const bool same = std::memcmp(&results[0][i * n], &results[1][i * n], n) == 0;
        if (same) continue;
        float a, b;  // NaNs may differ in their payload
        if (n == 4) {
          std::memcpy(&a, &results[0][i * n], 4);
          std::memcpy(&b, &results[1][i * n], 4);
        } else {
          uint16_t x, y;
          std::memcpy(&x, &results[0][i * n], 2);
          std::memcpy(&y, &results[1][i * n], 2);
          a = dtype == DType::float16 ? widen(Float16{x}) : widen(BFloat16{x});
          b = dtype == DType::float16 ? widen(Float16{y}) : widen(BFloat16{y});
        }
        differ += !(std::isnan(a) && std::isnan(b));
      }
      CHECK_EQUAL(differ, 0);
    }
}

// Compares a digest (FNV-1a, 64 bits) of results in every floating dtype with that of x86-64. No 16-bit or wider result
// is a NaN: its sign differs between processors.
TEST(every_processor_gives_the_same_bits) {
  constexpr size_t count = 1000;
  std::vector<double> values(3 * count);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(static_cast<double>(i * 2'654'435'761u % 1000) - 500.5, -static_cast<int>(i % 17)) * 1.37;
  for (const Kernels* table : tables()) {
    uint64_t digest = 0xcbf29ce484222325;
    for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::float8_e4m3fn,
                        DType::float8_e4m3fnuz, DType::float8_e5m2, DType::float8_e5m2fnuz})
      for (int op = 0; op < 5; ++op) {
        const size_t bytes = count * dtype_bytes(dtype);
        std::vector<uint8_t> in(3 * bytes), out(bytes);
        table->of(dtype)->from_double(in.data(), values.data(), values.size());
        const void* const sources[] = {in.data(), in.data() + bytes, in.data() + 2 * bytes};
        table->of(dtype)->reduce[op](out.data(), sources, 3, count, {0.3, 3});
        for (uint8_t byte : out) digest = (digest ^ byte) * 0x100000001b3;
      }
    CHECK_EQUAL(digest, uint64_t{1456565177258990164});
  }
}
