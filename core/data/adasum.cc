#include "data/adasum.h"

#include <algorithm>

#include "data/packing.h"

namespace sirtaki {
namespace {

// The dot products needed to combine two vectors.
struct Dots {
  double ab = 0, aa = 0, bb = 0;
};

class Adasum final : public Operation {
 public:
  Adasum(Backend& backend, const Kernels& kernels, TransferPtr whole)
      : backend_(backend), kernels_(kernels), whole_(std::move(whole)), members_(whole_->members.size()),
        own_(slice(whole_->own)), elements_(static_cast<size_t>(own_.bytes) / whole_->element_bytes()) {
    cut_tensors();
  }

  Status advance(Nanoseconds now, Progress& progress) override {
    progress = Progress::moved;
    if (!running_ && !start_phase()) {
      progress = Progress::done;
      return Status::ok();
    }
    Progress inner = Progress::done;
    if (running_) SIRTAKI_TRY(running_->advance(now, inner));
    progress = inner == Progress::blocked ? Progress::blocked : Progress::moved;
    if (inner != Progress::done) return Status::ok();
    running_.reset();
    finish_phase();
    if (phase_ > last_phase()) progress = Progress::done;
    return Status::ok();
  }

  void cancel() override {
    if (running_) running_->cancel();
  }
  bool is_quiet() const override { return !running_ || running_->is_quiet(); }
  std::vector<int32_t> waits_for() const override { return running_ ? running_->waits_for() : std::vector<int32_t>{}; }

 private:
  // Phase 0 exchanges slices, phases 1 to levels() sum the dot products of one level each, and the last one gathers
  // the result.
  int32_t levels() const {
    int32_t count = 0;
    for (size_t vectors = members_; vectors > 1; vectors = (vectors + 1) / 2) ++count;
    return count;
  }
  int32_t last_phase() const { return levels() + 1; }

  bool start_phase() {
    if (phase_ > last_phase()) return false;
    auto transfer = std::make_shared<Transfer>();
    transfer->plan = whole_->plan;
    transfer->phase = whole_->phase + phase_;
    transfer->is_last_phase = phase_ == last_phase() && whole_->is_last_phase;
    transfer->dtype = whole_->dtype;
    transfer->chunk_bytes = whole_->chunk_bytes;
    transfer->members = whole_->members;
    transfer->own = whole_->own;
    transfer->times = whole_->times;
    if (phase_ == 0) fill_exchange(*transfer);
    else if (phase_ == last_phase()) fill_gather(*transfer);
    else fill_sum(*transfer);
    running_ = backend_.start(std::move(transfer));
    return true;
  }

  void finish_phase() {
    if (phase_ == 0) widen();
    else if (phase_ < last_phase()) combine_level();
    ++phase_;
  }

  Slice slice(size_t member) const { return slice_of(whole_->buffer.bytes(), members_, member); }

  void fill_exchange(Transfer& transfer) {
    transfer.kind = Kind::alltoall;
    raw_.assign(members_, std::vector<uint8_t>(static_cast<size_t>(own_.bytes)));
    for (size_t member = 0; member < members_; ++member) {
      const Slice part = slice(member);
      transfer.outgoing.push_back(whole_->buffer.part(part.begin, part.begin + part.bytes));
      uint8_t* to = member == whole_->own ? nullptr : raw_[member].data();
      transfer.incoming.emplace_back().add(nullptr, to, own_.bytes);
      for (size_t to_member = 0; to_member < members_; ++to_member) transfer.flows.push_back(slice(to_member).bytes);
    }
    Packing{transfer, kernels_}.pack(whole_->buffer, own_.begin, own_.begin + own_.bytes, raw_[whole_->own].data());
  }

  void widen() {
    const DTypeKernels& arithmetic = *kernels_.of(whole_->dtype);
    for (std::vector<uint8_t>& bytes : raw_) {
      std::vector<double>& vector = vectors_.emplace_back(elements_);
      arithmetic.to_double(vector.data(), bytes.data(), elements_);
      multiply(vector, whole_->prescale);
    }
    raw_.clear();
    raw_.shrink_to_fit();
  }

  // Computes the position of each tensor in this rank's slice, in elements.
  void cut_tensors() {
    const auto element = static_cast<int64_t>(whole_->element_bytes());
    int64_t begin = 0;
    for (int64_t bytes : whole_->tensor_bytes) {
      const int64_t first = std::clamp<int64_t>(begin - own_.begin, 0, own_.bytes);
      const int64_t last = std::clamp<int64_t>(begin + bytes - own_.begin, 0, own_.bytes);
      tensors_.push_back({first / element, (last - first) / element});
      begin += bytes;
    }
  }

  void fill_sum(Transfer& transfer) {
    const size_t pairs = vectors_.size() / 2;
    dots_.assign(pairs * tensors_.size(), {});
    for (size_t pair = 0; pair < pairs; ++pair)
      for (size_t tensor = 0; tensor < tensors_.size(); ++tensor)
        dots_[pair * tensors_.size() + tensor] = dots_of(vectors_[2 * pair], vectors_[2 * pair + 1], tensors_[tensor]);
    auto* bytes = reinterpret_cast<uint8_t*>(dots_.data());
    transfer.dtype = DType::float64;
    transfer.buffer.add(bytes, bytes, static_cast<int64_t>(dots_.size() * sizeof(Dots)));
  }

  static Dots dots_of(const std::vector<double>& a, const std::vector<double>& b, const Slice& tensor) {
    Dots dots;
    for (auto i = static_cast<size_t>(tensor.begin); i < static_cast<size_t>(tensor.begin + tensor.bytes); ++i) {
      dots.ab += a[i] * b[i];
      dots.aa += a[i] * a[i];
      dots.bb += b[i] * b[i];
    }
    return dots;
  }

  void combine_level() {
    const size_t pairs = vectors_.size() / 2;
    for (size_t pair = 0; pair < pairs; ++pair)
      for (size_t tensor = 0; tensor < tensors_.size(); ++tensor)
        combine(vectors_[2 * pair], vectors_[2 * pair + 1], tensors_[tensor], dots_[pair * tensors_.size() + tensor]);
    for (size_t kept = 1; 2 * kept < vectors_.size(); ++kept) vectors_[kept] = std::move(vectors_[2 * kept]);
    vectors_.resize((vectors_.size() + 1) / 2);
  }

  static void combine(std::vector<double>& a, const std::vector<double>& b, const Slice& tensor, const Dots& dots) {
    const double of_a = dots.aa > 0 ? 1 - dots.ab / (2 * dots.aa) : 1;
    const double of_b = dots.bb > 0 ? 1 - dots.ab / (2 * dots.bb) : 1;
    for (auto i = static_cast<size_t>(tensor.begin); i < static_cast<size_t>(tensor.begin + tensor.bytes); ++i)
      a[i] = of_a * a[i] + of_b * b[i];
  }

  void fill_gather(Transfer& transfer) {
    transfer.kind = Kind::allgather;
    multiply(vectors_.front(), whole_->postscale);
    result_.resize(static_cast<size_t>(own_.bytes));
    kernels_.of(whole_->dtype)->from_double(result_.data(), vectors_.front().data(), elements_);
    unpack(whole_->buffer, own_.begin, own_.begin + own_.bytes, result_.data());
    transfer.buffer.add(result_.data(), nullptr, own_.bytes);
    for (size_t member = 0; member < members_; ++member) {
      const Slice part = slice(member);
      if (member == whole_->own) transfer.incoming.emplace_back().add(nullptr, nullptr, part.bytes);
      else transfer.incoming.push_back(whole_->buffer.part(part.begin, part.begin + part.bytes));
    }
  }

  static void multiply(std::vector<double>& vector, Scale scale) {
    if (scale.is_one()) return;
    for (double& value : vector) value = value * scale.factor / static_cast<double>(scale.divisor);
  }

  Backend& backend_;
  const Kernels& kernels_;
  TransferPtr whole_;
  size_t members_;
  Slice own_;                                  // this rank's slice, in bytes
  size_t elements_;
  std::vector<Slice> tensors_;                 // parts of tensors in the slice, in elements
  std::vector<std::vector<uint8_t>> raw_;      // by member: its version of the slice, as received
  std::vector<std::vector<double>> vectors_;   // vectors that are still to be combined
  std::vector<Dots> dots_;                     // dot products of this level, by pair and tensor
  std::vector<uint8_t> result_;
  int32_t phase_ = 0;
  std::unique_ptr<Operation> running_;
};

}  // namespace

std::unique_ptr<Operation> make_adasum(Backend& backend, const Kernels& kernels, TransferPtr transfer) {
  return std::make_unique<Adasum>(backend, kernels, std::move(transfer));
}

}  // namespace sirtaki
