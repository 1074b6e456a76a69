#include "base/knobs.h"

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

constexpr int agreed = 1;
constexpr size_t longest_path = 4'000;

// The knobs, in the order of enum Knob.
// clang-format off
constexpr Row rows[] = {
    {{"fusion_threshold", "bytes", "64M", "",
      "maximum bytes per fused operation; 0 disables fusion", agreed}, {0, 1e12}},
    {{"cache_capacity", "integer", "8192", "",
      "number of tensor names in the response cache; 0 disables the cache", agreed}, {0, 1e7}},
    {{"report_bytes", "bytes", "1M", "",
      "start negotiation as soon as this many bytes are queued", 0}, {0, 1e12}},
    {{"report_window", "seconds", "0.0003", "",
      "start negotiation at the latest this long after the first tensor was queued", 0}, {0, 10}},
    {{"plans_in_flight", "integer", "2", "",
      "maximum plans in flight per process set; further tensors are batched until one finishes", 0}, {1, 64}},
    {{"control_fan_out", "integer", "16", "",
      "number of child hosts per node of the control tree", agreed}, {1, 4096}},
    {{"join_average", "choice", "all", "all|contributors",
      "divisor of an average after some ranks have joined: all ranks, or the ranks that still contribute", agreed}, {}},
    {{"transport", "choice", "auto", "auto|shm|socket",
      "data transport between ranks of one host: shared memory or sockets", agreed}, {}},
    {{"cpu_algorithm", "choice", "auto", "auto|direct|ring|recursive_doubling|hierarchical",
      "all-reduce algorithm between hosts: direct gives the same bits for every placement of ranks, auto selects "
      "the fastest", agreed}, {}},
    {{"gpu_backend", "choice", "auto", "auto|nccl|staged",
      "transport of tensors on GPUs: NCCL or staging through host memory; auto: NCCL if all ranks can use it", agreed}, {}},
    {{"gpu_libraries", "path", "", "",
      "colon-separated folders that are searched for libcuda.so.1 and libnccl.so.2 before the system's", 0}, {}},
    {{"sockets_per_link", "integer", "1", "",
      "number of connections between two ranks of different hosts", agreed}, {1, 16}},
    {{"encrypt", "boolean", "0", "",
      "encrypt connections between hosts with TLS 1.3; requires OpenSSL and the job's key", agreed}, {0, 1}},
    {{"chunk_bytes", "bytes", "0", "",
      "size of the pieces in which tensors are transferred; 0: within a host what fits the processor's caches, "
      "between hosts 512K", agreed}, {0, 64 << 20}},
    {{"kernel", "choice", "auto", "auto|baseline|avx2",
      "instruction set of the reductions", 0}, {}},
    {{"spin", "seconds", "0.0002", "",
      "how long a rank polls for the next operation before it sleeps; within an operation the time adapts to the "
      "duration of its steps", 0}, {0, 1}},
    {{"stall_report", "seconds", "5", "",
      "report missing ranks after this long, and again after twice as long; a rank that does not answer is "
      "reported one second later", 0}, {0.05, 1e6}},
    {{"stall_deadline", "seconds", "1800", "",
      "fail if a live rank has not submitted a tensor this long after the others; 0: never", 0}, {0, 1e7}},
    {{"progress_deadline", "seconds", "60", "",
      "fail if a running operation has not moved a byte for this long", 0}, {0.05, 1e7}},
    {{"heartbeat", "seconds", "15", "",
      "fail if another host's network stack has not answered for this long; 0: never", agreed}, {0, 10'000}},
    {{"log_descriptor", "integer", "2", "",
      "file descriptor of the log; -1: no log", 0}, {-1, 1e6}},
    {{"recorder_operations", "integer", "4096", "",
      "number of recent operations that each rank keeps for the failure report", 0}, {1, 1e6}},
    {{"stall_report_file", "path", "", "",
      "also append each stall report to this file, as one line of JSON", 0}, {}},
    {{"check_parameters", "integer", "-1", "",
      "compare parameters across ranks every N gradient exchanges, starting with the second; -1: only in the "
      "second; 0: never, and check neither learning rates nor data", agreed}, {-1, 1e9}},
    {{"dump_directory", "path", "", "",
      "folder in which each rank writes its state to rank<N>.json if the job fails", 0}, {}},
};
// clang-format on
static_assert(std::size(rows) == knob_count);

bool is_type(const srt_knob& knob, std::string_view type) { return type == knob.type; }

bool is_choice(const srt_knob& knob, std::string_view value) {
  std::string_view choices = knob.choices;
  while (!choices.empty()) {
    const size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return true;
    if (bar == std::string_view::npos) break;
    choices.remove_prefix(bar + 1);
  }
  return false;
}

// Parses a number, for bytes with an optional suffix K, M or G (powers of 1,024).
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

Config::Config() {
  for (const Row& row : rows) std::ignore = set(row.knob.name, row.knob.default_value);
}

Status Config::set(std::string_view name, std::string_view value) {
  for (int i = 0; i < knob_count; ++i) {
    const srt_knob& knob = rows[i].knob;
    if (name != knob.name) continue;
    Value parsed{std::string(value), 0};
    if (is_type(knob, "choice")) {
      if (!is_choice(knob, value)) return refuse(knob, value, format("it takes one of %s", knob.choices));
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

}  // namespace sirtaki
