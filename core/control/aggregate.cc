#include "control/aggregate.h"

#include "control/wire.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds no_age = -1;

Nanoseconds age_of(Nanoseconds moment, Nanoseconds now) {
  return moment == long_ago ? no_age : std::max<Nanoseconds>(now - moment, 0);
}

// Converts an age to a time. An age from before the clock began is clamped: it is impossible, and must not overflow.
Nanoseconds moment_of(Nanoseconds age, Nanoseconds now) {
  return age == no_age ? long_ago : std::max<Nanoseconds>(now - age, 0);
}

void put_arrivals(Writer& writer, const Arrivals& arrivals, Nanoseconds now) {
  writer.put(age_of(arrivals.first, now));
  writer.put(age_of(arrivals.latest, now));
  writer.put(age_of(arrivals.before_latest, now));
  writer.put(arrivals.last_rank);
}

Arrivals get_arrivals(Reader& reader, Nanoseconds now) {
  const auto first = reader.get<Nanoseconds>();
  const auto latest = reader.get<Nanoseconds>();
  const auto before_latest = reader.get<Nanoseconds>();
  const auto last_rank = reader.get<int32_t>();
  const bool is_ordered = latest >= 0 && latest <= first &&
                          (before_latest == no_age || (latest <= before_latest && before_latest <= first));
  if (is_ordered) return {moment_of(first, now), moment_of(latest, now), moment_of(before_latest, now), last_rank};
  reader.fail();
  return {};
}

// A reader of reporting ranks, which checks that they belong to the subtree.
class SendersReader {
 public:
  SendersReader(Reader& reader, const RankBits& subtree, Nanoseconds now)
      : reader_(reader), subtree_(subtree), now_(now) {}

  void get_ranks(RankRuns& ranks) {
    ranks.get(reader_, subtree_.capacity());
    ranks.for_each([&](int32_t rank) { is_known_ &= subtree_.has(rank); });
    if (!is_known_) reader_.fail();
  }

  void get(Aggregate::Senders& by) {
    get_ranks(by.ranks);
    get_ranks(by.absent);
    by.arrivals = get_arrivals(reader_, now_);
    if (!by.ranks.has_all(by.absent) || !by.ranks.has(by.arrivals.last_rank)) reader_.fail();
  }

 private:
  Reader& reader_;
  const RankBits& subtree_;
  Nanoseconds now_;
  bool is_known_ = true;
};

void put_senders(Writer& writer, const Aggregate::Senders& by, Nanoseconds now) {
  by.ranks.put(writer);
  by.absent.put(writer);
  put_arrivals(writer, by.arrivals, now);
}

void put_full_request(Writer& writer, const Aggregate::FullRequest& request) {
  put_signature(writer, *request.signature);
  put_each(writer, request.shares, [&](const RowShare& share) {
    writer.put(share.rows);
    put_list(writer, share.splits);
  });
}

void get_full_request(Reader& reader, Aggregate::FullRequest& request) {
  request.signature = get_signature(reader);
  get_each(reader, request.shares, [&](RowShare& share) {
    share.rows = reader.get<int64_t>();
    share.splits = reader.get_all<int64_t>();
  });
  if (!reader.ok()) return;
  const bool is_each = is_ragged(request.signature->kind);
  if (request.shares.size() != (is_each ? static_cast<size_t>(request.by.ranks.count()) : 0)) return reader.fail();
  for (const RowShare& share : request.shares)
    if (!is_sane(*with_share(request.signature, share))) return reader.fail();
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
  Writer writer(out);
  put_each(writer, aggregate.reached, [&](const Aggregate::Reached& reached) {
    writer.put(reached.decision);
    reached.ranks.put(writer);
  });
  put_each(writer, aggregate.cached_requests, [&](const Aggregate::CachedRequests& cached) {
    put_senders(writer, cached.by, now);
    put_list(writer, cached.ids);
  });
  put_each(writer, aggregate.full_requests, [&](const Aggregate::FullRequest& request) {
    put_senders(writer, request.by, now);
    put_full_request(writer, request);
  });
  put_each(writer, aggregate.notices, [&](const Aggregate::NoticesOfRank& entry) {
    writer.put(entry.rank);
    put_notices(writer, entry.notices);
  });
}

bool decode(std::span<const uint8_t> bytes, const RankBits& subtree, Nanoseconds now, Aggregate& aggregate) {
  Reader reader(bytes);
  SendersReader senders(reader, subtree, now);
  get_each(reader, aggregate.reached, [&](Aggregate::Reached& reached) {
    reached.decision = reader.get<uint64_t>();
    senders.get_ranks(reached.ranks);
  });
  get_each(reader, aggregate.cached_requests, [&](Aggregate::CachedRequests& cached) {
    senders.get(cached.by);
    reader.get_all_into(cached.ids);
  });
  get_each(reader, aggregate.full_requests, [&](Aggregate::FullRequest& request) {
    senders.get(request.by);
    get_full_request(reader, request);
  });
  get_each(reader, aggregate.notices, [&](Aggregate::NoticesOfRank& entry) {
    entry.rank = reader.get<int32_t>();
    const bool is_known = entry.rank >= 0 && entry.rank < subtree.capacity() && subtree.has(entry.rank);
    if (!is_known) return reader.fail();
    get_notices(reader, entry.notices);
  });
  return reader.ok() && reader.at_end();
}

}  // namespace sirtaki
