// Encoding and decoding of the parts that several messages share: lists, requests, and where a rank is. Reading checks
// every bound, and leaves the reader failed where bytes are malformed.
#pragma once

#include <string>
#include <vector>

#include "base/codec.h"
#include "plan/plan.h"

namespace sirtaki {

constexpr size_t smallest_item = 4;  // bytes of any list element: bounds the allocation that a false length causes

template <typename T>
void put_list(Writer& writer, const std::vector<T>& values) {
  writer.put_all(std::span<const T>(values));
}

template <typename T, typename Put>
void put_each(Writer& writer, const std::vector<T>& values, Put put) {
  writer.put(static_cast<uint32_t>(values.size()));
  for (const T& value : values) put(value);
}

template <typename T, typename Get>
void get_each(Reader& reader, std::vector<T>& values, Get get) {
  const uint32_t count = reader.get_count(smallest_item);
  values.clear();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) get(values.emplace_back());
}

// Returns whether numbers and lists are consistent, and no value computed from them overflows.
bool is_sane(const Signature& signature);

void put_signature(Writer& writer, const Signature& signature);
SignaturePtr get_signature(Reader& reader);

void put_rank_report(Writer& writer, const StalledRankReport& wait_report);
void get_rank_report(Reader& reader, StalledRankReport& wait_report);

// Returns a tensor's name, or an empty one.
std::string get_name(Reader& reader);

// Returns text that a person will read.
std::string get_printable(Reader& reader, size_t limit);

}  // namespace sirtaki
