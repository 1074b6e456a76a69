// How what several messages are made of is written and read: lists, requests, and where a rank is. Reading checks
// every bound, and leaves the reader failed where bytes make no sense.
#pragma once

#include <string>
#include <vector>

#include "base/codec.h"
#include "plan/plan.h"

namespace sirtaki {

constexpr size_t smallest_item = 4;  // bytes of anything that a list holds: keeps a lie about its length cheap

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

// Whether numbers and lists fit one another, and nothing overflows that is computed of them.
bool is_sane(const Signature& signature);

void put_signature(Writer& writer, const Signature& signature);
SignaturePtr get_signature(Reader& reader);

void put_whereabouts(Writer& writer, const Whereabouts& whereabouts);
void get_whereabouts(Reader& reader, Whereabouts& whereabouts);

// A tensor's name, or none.
std::string get_name(Reader& reader);

// What a person will read.
std::string get_printable(Reader& reader, size_t limit);

}  // namespace sirtaki
