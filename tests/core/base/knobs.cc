// Settings, given as text and as numbers.
#include "base/settings/knobs.h"

#include "check.h"

using namespace sirtaki;

TEST(bytes_have_suffixes_that_are_powers_of_1024) {
  Config config;
  for (const auto& [text, bytes] : std::vector<std::pair<const char*, int64_t>>{
           {"4096", 4096}, {"3K", 3 << 10}, {"2M", 2 << 20}, {"2m", 2 << 20}, {"1.5M", 3 << 19}, {"1G", 1 << 30}}) {
    CHECK(config.set("fusion_threshold", text).is_ok());
    CHECK_EQUAL(config.integer(Knob::fusion_threshold), bytes);
    CHECK_EQUAL(config.integer("fusion_threshold"), bytes);
  }
}

TEST(numbers_that_are_none_are_refused) {
  for (const char* text : {"", "M", "12x", "1e999", "inf", "nan", "-1", "1KK", "2e12"}) {
    Config config;
    CHECK_EQUAL(config.set("fusion_threshold", text).code(), SRT_INVALID_ARGUMENT);
    CHECK_EQUAL(config.integer(Knob::fusion_threshold), 64 << 20);
  }
}

TEST(numbers_are_found_by_name) {
  Config config;
  CHECK_EQUAL(config.integer("progress_deadline"), seconds(60));
  CHECK_EQUAL(config.integer("no_such_setting"), -1);
}
