#include "base/settings/knobs.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace sirtaki {
namespace {

struct Bounds {
  double least, most;
};

struct Row {
  srt_knob knob;
  Bounds bounds;  // in the knob's own unit
};

constexpr size_t longest_path = 4'000;

#define SIRTAKI_ROW(name, type, initial, choices, scope, least, most, help) \
  {{#name, type, initial, choices, help, scope}, {least, most}},
constexpr int agreed = 1, own = 0;
constexpr Row rows[] = {SIRTAKI_KNOBS(SIRTAKI_ROW)};
#undef SIRTAKI_ROW

bool is_type(const srt_knob& knob, std::string_view type) { return type == knob.type; }

// Returns the position of a value among the choices, from 0; -1 if it is none of them.
int64_t choice_of(const srt_knob& knob, std::string_view value) {
  std::string_view choices = knob.choices;
  for (int64_t position = 0; !choices.empty(); ++position) {
    const size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return position;
    if (bar == std::string_view::npos) break;
    choices.remove_prefix(bar + 1);
  }
  return -1;
}

// Parses a number, with an optional suffix K, M or G (powers of 1,024) if `suffixes` is set.
bool parse_number(std::string_view text, bool suffixes, double& out) {
  double factor = 1;
  if (suffixes && !text.empty()) {
    const char last = static_cast<char>(text.back() & ~0x20);  // upper case
    factor = last == 'K' ? 1024.0 : last == 'M' ? 1024.0 * 1024 : last == 'G' ? 1024.0 * 1024 * 1024 : 1;
    if (factor != 1) text.remove_suffix(1);
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  out *= factor;
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(out);
}

Status refuse(const srt_knob& knob, std::string_view value, const std::string& reason) {
  return {SRT_INVALID_ARGUMENT,
          format("setting '%s' cannot be '%.*s': %s", knob.name, static_cast<int>(std::min<size_t>(value.size(), 100)),
                 value.data(), reason.c_str())};
}

}  // namespace

const srt_knob* knob_entry(int index) { return index >= 0 && index < knob_count ? &rows[index].knob : nullptr; }

bool may_have(Knob knob, int64_t value) {
  const Row& row = rows[static_cast<size_t>(knob)];
  const std::string_view choices = row.knob.choices;
  if (!choices.empty()) return value >= 0 && value <= std::count(choices.begin(), choices.end(), '|');
  const double number = static_cast<double>(value) / (is_type(row.knob, "seconds") ? 1e9 : 1);
  return number >= row.bounds.least && number <= row.bounds.most;
}

Config::Config() {
  for (const Row& row : rows) std::ignore = set(row.knob.name, row.knob.default_value);
}

Status Config::set(std::string_view name, std::string_view value) {
  for (int i = 0; i < knob_count; ++i) {
    const srt_knob& knob = rows[i].knob;
    if (name != knob.name) continue;
    Value parsed{std::string(value), 0};
    if (is_type(knob, "choice")) {
      parsed.integer = choice_of(knob, value);
      if (parsed.integer < 0) return refuse(knob, value, format("it takes one of %s", knob.choices));
    } else if (is_type(knob, "path")) {
      if (value.size() > longest_path) return refuse(knob, value, "the path is too long");
    } else {
      if (is_type(knob, "boolean") && value != "0" && value != "1") return refuse(knob, value, "it takes 0 or 1");
      double number = 0;
      if (!parse_number(value, is_type(knob, "bytes"), number))
        return refuse(knob, value, format("it takes a number (%s)", knob.type));
      if (number < rows[i].bounds.least || number > rows[i].bounds.most)
        return refuse(knob, value, format("it takes %g to %g", rows[i].bounds.least, rows[i].bounds.most));
      parsed.integer =
          static_cast<int64_t>(is_type(knob, "seconds") ? std::llround(number * 1e9) : std::llround(number));
    }
    values_[static_cast<size_t>(i)] = std::move(parsed);
    return Status::ok();
  }
  return {SRT_INVALID_ARGUMENT,
          format("there is no setting '%.*s'", static_cast<int>(std::min<size_t>(name.size(), 100)), name.data())};
}

const std::string* Config::find(std::string_view name) const {
  for (int i = 0; i < knob_count; ++i)
    if (name == rows[i].knob.name) return &values_[static_cast<size_t>(i)].text;
  return nullptr;
}

int64_t Config::integer(std::string_view name) const {
  for (int i = 0; i < knob_count; ++i)
    if (name == rows[i].knob.name) return values_[static_cast<size_t>(i)].integer;
  return -1;
}

}  // namespace sirtaki
