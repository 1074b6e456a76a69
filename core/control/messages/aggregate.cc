#include "control/messages/aggregate.h"

#include <algorithm>

#include "control/messages/fields.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds no_age = -1;

Nanoseconds age_of(Nanoseconds moment, Nanoseconds now) {
  return moment == long_ago ? no_age : std::max<Nanoseconds>(now - moment, 0);
}

// Converts an age to a time. An age from before the clock began is impossible, and is clamped so that it cannot
// overflow.
Nanoseconds moment_of(Nanoseconds age, Nanoseconds now) {
  return age == no_age ? long_ago : std::max<Nanoseconds>(now - age, 0);
}

void arrivals(Encoder& encoder, const Arrivals& arrivals, Nanoseconds now) {
  encoder.number(age_of(arrivals.first, now));
  encoder.number(age_of(arrivals.latest, now));
  encoder.number(age_of(arrivals.before_latest, now));
  encoder.number(arrivals.last_rank);
}

void arrivals(Decoder& decoder, Arrivals& arrivals, Nanoseconds now) {
  Nanoseconds first, latest, before_latest;
  decoder.number(first);
  decoder.number(latest);
  decoder.number(before_latest);
  decoder.number(arrivals.last_rank);
  const bool is_ordered = latest >= 0 && latest <= first &&
                          (before_latest == no_age || (latest <= before_latest && before_latest <= first));
  decoder.check(is_ordered);
  if (!is_ordered) return;  // the time of any other age may overflow
  arrivals.first = moment_of(first, now);
  arrivals.latest = moment_of(latest, now);
  arrivals.before_latest = moment_of(before_latest, now);
}

// The archive of an aggregate, with the context that its fields need: the time, and the ranks that may report.
template <typename Archive>
struct AggregateArchive : Archive {
  template <typename Argument>
  AggregateArchive(Argument& bytes, const RankBits* ranks, Nanoseconds moment)
      : Archive(bytes), subtree(ranks), now(moment) {}

  void ranks(const RankRuns& runs) { runs.put(this->bytes()); }
  void ranks(RankRuns& runs) {
    runs.get(this->bytes(), subtree->capacity());
    runs.for_each([&](int32_t rank) { this->check(subtree->has(rank)); });
  }

  const RankBits* subtree;  // nullptr while encoding
  Nanoseconds now;
};

void senders(auto& archive, auto& by) {
  archive.ranks(by.ranks);
  archive.ranks(by.absent);
  arrivals(archive, by.arrivals, archive.now);
  archive.check(by.ranks.has_all(by.absent) && by.ranks.has(by.arrivals.last_rank));
}

// Returns whether each rank of a ragged request has a valid share.
bool has_sane_shares(const Aggregate::FullRequest& request) {
  const bool is_each = is_ragged(request.signature->kind);
  if (request.shares.size() != (is_each ? static_cast<size_t>(request.by.ranks.count()) : 0)) return false;
  return std::all_of(request.shares.begin(), request.shares.end(),
                     [&](const RowShare& share) { return is_sane(*with_share(request.signature, share)); });
}

bool is_member(const RankBits* subtree, int32_t rank) {
  return !subtree || (rank >= 0 && rank < subtree->capacity() && subtree->has(rank));
}

void fields(auto& archive, MessageOf<Aggregate> auto& aggregate) {
  archive.each(aggregate.reached, [&](auto& reached) {
    archive.number(reached.decision);
    archive.ranks(reached.ranks);
  });
  archive.each(aggregate.cached_requests, [&](auto& cached) {
    senders(archive, cached.by);
    archive.list(cached.ids);
  });
  archive.each(aggregate.full_requests, [&](auto& request) {
    senders(archive, request.by);
    archive.shared(request.signature, [&](auto& signature) { fields(archive, signature); });
    archive.each(request.shares, [&](auto& share) {
      archive.number(share.rows);
      archive.list(share.splits);
    });
    archive.validate([&] { return has_sane_shares(request); });
  });
  archive.each(aggregate.notices, [&](auto& entry) {
    archive.number(entry.rank);
    archive.check(is_member(archive.subtree, entry.rank));
    fields(archive, entry.notices);
  });
}

}  // namespace

bool are_alike(const Signature& a, const Signature& b) {
  if (a.kind != b.kind || !is_ragged(a.kind)) return a == b;
  Signature same = a;
  same.shape.front() = b.shape.empty() ? 0 : b.shape.front();
  same.splits = b.splits;
  return same == b;
}

RowShare share_of(const Signature& signature) { return {signature.shape.front(), signature.splits}; }

SignaturePtr with_share(const SignaturePtr& signature, const RowShare& share) {
  if (signature->shape.front() == share.rows && signature->splits == share.splits) return signature;
  auto own = std::make_shared<Signature>(*signature);
  own->shape.front() = share.rows;
  own->splits = share.splits;
  return own;
}

void Aggregate::clear() {
  reached.clear();
  cached_requests.clear();
  full_requests.clear();
  notices.clear();
}

void encode(const Aggregate& aggregate, Nanoseconds now, Bytes& out) {
  AggregateArchive<Encoder> archive(out, nullptr, now);
  fields(archive, aggregate);
}

bool decode(std::span<const uint8_t> bytes, const RankBits& subtree, Nanoseconds now, Aggregate& aggregate) {
  AggregateArchive<Decoder> archive(bytes, &subtree, now);
  fields(archive, aggregate);
  return archive.is_done();
}

}  // namespace sirtaki
