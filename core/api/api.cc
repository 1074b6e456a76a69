// The C functions: they convert arguments and results, contain no logic, and let no exception escape.
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "api/handles.h"
#include "base/dtypes/wire_format.h"
#include "base/settings/knobs.h"
#include "base/system/machine.h"
#include "data/error_feedback.h"
#include "data/kernels/kernels.h"
#include "gpu/libraries/libraries.h"
#include "sirtaki_observe.h"
#include "transport/memory/shared_region.h"

struct srt_config {
  sirtaki::Config config;
};

namespace {

using namespace sirtaki;

template <typename Entry>
srt_status copy_entry(const Entry* entry, Entry* out) {
  if (!entry || !out) return SRT_INVALID_ARGUMENT;
  *out = *entry;
  return SRT_OK;
}

int32_t give_descriptor(int fd, const char* what, srt_error* error) {
  if (fd < 0) give(system_call_failed(what), error);
  return fd;
}

const Ticket* tickets(const srt_handle* handles) { return reinterpret_cast<const Ticket*>(handles); }

// Copies as much of a text as fits, and fills the rest with zeros.
template <size_t capacity>
void copy_text(const std::string& text, char (&out)[capacity]) {
  const size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(out, text.data(), length);
  std::memset(out + length, 0, capacity - length);
}

void describe_library(const LibraryFound& found, srt_gpu_library* out) {
  if (!out) return;
  out->version = found.version;
  copy_text(found.path, out->path);
  copy_text(found.text, out->text);
}

// Returns the number of rows that a function has written; 0 if there was no memory for them.
template <typename Count>
int32_t count_rows(Count&& count) {
  int32_t rows = 0;
  std::ignore = guarded(nullptr, [&] {
    rows = count();
    return Status::ok();
  });
  return rows;
}

Nanoseconds from_milliseconds(int32_t time) { return time < 0 ? -1 : milliseconds(time); }

}  // namespace

extern "C" {

const char* srt_version(void) { return SIRTAKI_VERSION; }
int32_t srt_status_count(void) { return StatusTable::count(); }
srt_status srt_status_get(int32_t index, srt_status_entry* out) { return copy_entry(StatusTable::entry(index), out); }
int32_t srt_dtype_count(void) { return dtype_count; }
srt_status srt_dtype_get(int32_t index, srt_dtype* out) { return copy_entry(dtype_entry(index), out); }
int32_t srt_wire_format_count(void) { return wire_format_count; }
srt_status srt_wire_format_get(int32_t index, srt_wire_format* out) {
  return copy_entry(wire_format_entry(index), out);
}
int32_t srt_knob_count(void) { return knob_count; }
srt_status srt_knob_get(int32_t index, srt_knob* out) { return copy_entry(knob_entry(index), out); }
const char* srt_kernel_name(void) { return choose_kernels("auto").name; }
int32_t srt_usable_cores(void) { return usable_cores(); }

srt_config* srt_config_create(void) { return new (std::nothrow) srt_config; }
srt_status srt_config_set(srt_config* config, const char* name, const char* value, srt_error* error) {
  return guarded(error, [&] { return config->config.set(name, value); });
}
srt_status srt_config_get(const srt_config* config, const char* name, char* value, int32_t capacity) {
  const std::string* found = config->config.find(name);
  if (!found || static_cast<int32_t>(found->size()) >= capacity) return SRT_INVALID_ARGUMENT;
  std::memcpy(value, found->c_str(), found->size() + 1);
  return SRT_OK;
}
int64_t srt_config_integer(const srt_config* config, const char* name) { return config->config.integer(name); }
void srt_config_destroy(srt_config* config) { delete config; }

int64_t srt_memory_bytes(const srt_config* config, int32_t slot_count) {
  return SharedRegion::bytes_needed(config->config, slot_count);
}
int32_t srt_memory_create(const srt_config* config, int32_t slot_count, srt_error* error) {
  Descriptor memory;
  const auto create = [&] {
    return SharedRegion::create(SharedRegion::layout(config->config, slot_count), slot_count, memory);
  };
  if (guarded(error, create) != SRT_OK) return -1;
  return ::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0);
}
int32_t srt_doorbell_create(srt_error* error) {
  return give_descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd", error);
}
int32_t srt_process_open(srt_error* error) {
  return give_descriptor(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)), "pidfd_open", error);
}

srt_status srt_create(const srt_config* config, const srt_topology* topology, srt_context** out, srt_error* error) {
  *out = nullptr;
  return guarded(error, [&]() -> Status {
    auto made = std::make_unique<srt_context>();
    SIRTAKI_TRY(Context::create(config->config, *topology, made->context));
    *out = made.release();
    return Status::ok();
  });
}
srt_status srt_start(srt_context* c, srt_error* error) {
  return guarded(error, [&] { return c->context->start(); });
}
srt_status srt_abort(srt_context* c, const char* reason) {
  return guarded(nullptr, [&]() -> Status {
    if (!c->context->usable().is_ok()) return c->context->usable();
    c->context->abort(reason);
    return Status::ok();
  });
}
srt_status srt_shutdown(srt_context* c, int32_t timeout_ms) {
  return guarded(nullptr, [&] {
    c->context->shutdown(milliseconds(timeout_ms));
    return Status::ok();
  });
}
void srt_destroy(srt_context* c) { delete c; }
void srt_fork_child(srt_context* c) { c->context->fork_child(); }

srt_status srt_enqueue(srt_context* c, const srt_request* requests, int32_t count, srt_handle* out, srt_error* error) {
  return guarded(error, [&] { return c->context->enqueue(requests, count, reinterpret_cast<Ticket*>(out)); });
}
srt_status srt_run(srt_context* c, const srt_request* requests, int32_t count, int32_t timeout_ms, srt_handle* out,
                   srt_error* error) {
  return guarded(error, [&]() -> Status {
    SIRTAKI_TRY(c->context->enqueue(requests, count, reinterpret_cast<Ticket*>(out), Context::WaitMode::wait_at_once));
    return c->context->wait(tickets(out), count, from_milliseconds(timeout_ms));
  });
}
srt_status srt_enqueue_or_complete(srt_context* c, const srt_request* requests, int32_t count, srt_handle* out,
                                   srt_error* error) {
  return guarded(error, [&]() -> Status {
    bool have_ended = false;
    SIRTAKI_TRY(c->context->enqueue_or_complete(requests, count, reinterpret_cast<Ticket*>(out), have_ended));
    return have_ended ? Status::ok() : Status(SRT_IN_PROGRESS, "");
  });
}
void srt_flush(srt_context* c) {
  if (c->context->usable().is_ok()) c->context->flush();
}
srt_status srt_change_setting(srt_context* c, const char* name, const char* value, srt_error* error) {
  return guarded(error, [&] { return c->context->change_setting(name, value); });
}
int64_t srt_live_setting(srt_context* c, const char* name) { return c->context->live_setting(name); }
srt_status srt_poll(srt_context* c, srt_handle handle) {
  return guarded(nullptr, [&] { return c->context->poll(static_cast<Ticket>(handle)); });
}
srt_status srt_wait(srt_context* c, const srt_handle* handles, int32_t count, int32_t timeout_ms) {
  return guarded(nullptr, [&] { return c->context->wait(tickets(handles), count, from_milliseconds(timeout_ms)); });
}
srt_status srt_watch(srt_context* c, const srt_handle* handles, int32_t count, srt_error* error) {
  return guarded(error, [&] { return c->context->watch(tickets(handles), count); });
}
srt_status srt_wait_watched(srt_context* c, srt_handle* out, int32_t capacity, int32_t* count, int32_t timeout_ms) {
  return guarded(nullptr, [&] {
    return c->context->wait_watched(reinterpret_cast<Ticket*>(out), capacity, *count, from_milliseconds(timeout_ms));
  });
}
srt_status srt_wait_on_stream(srt_context* c, const srt_handle* handles, int32_t count, uintptr_t stream,
                              int32_t timeout_ms) {
  return guarded(nullptr, [&] {
    return c->context->wait_on_stream(tickets(handles), count, stream, from_milliseconds(timeout_ms));
  });
}
void srt_wait_on_host(srt_context* c) { c->context->wait_on_host(); }
srt_status srt_output(srt_context* c, srt_handle handle, srt_tensor* out) {
  return guarded(nullptr, [&] { return c->context->output(static_cast<Ticket>(handle), *out); });
}
uint32_t srt_result(srt_context* c, srt_handle handle) { return c->context->result(static_cast<Ticket>(handle)); }
int64_t srt_result_number(srt_context* c, srt_handle handle) {
  return c->context->result_number(static_cast<Ticket>(handle));
}
int32_t srt_result_splits(srt_context* c, srt_handle handle, int64_t* out, int32_t capacity) {
  return c->context->result_splits(static_cast<Ticket>(handle), out, capacity);
}
int32_t srt_result_contributors(srt_context* c, srt_handle handle, int32_t* out, int32_t capacity) {
  return c->context->result_contributors(static_cast<Ticket>(handle), out, capacity);
}
int32_t srt_process_set(srt_context* c, int32_t number, int32_t* out, int32_t capacity) {
  return c->context->process_set(number, out, capacity);
}
int64_t srt_own_rows(srt_context* c, int32_t process_set, int64_t rows) {
  return c->context->own_rows(process_set, rows);
}
int32_t srt_has_wire_format(srt_context* c, int32_t process_set) { return c->context->has_wire_format(process_set); }
void srt_get_topology(srt_context* c, srt_topology* out) { *out = c->context->topology(); }
const char* srt_handle_error(srt_context* c, srt_handle handle) {
  return c->context->error(static_cast<Ticket>(handle));
}
const char* srt_context_error(srt_context* c) { return c->context->death_text(); }
srt_status srt_context_failure(srt_context* c, int32_t* culprit) {
  const AbortNotice death = c->context->death();
  *culprit = death.origin;
  return death.status.code();
}
int32_t srt_has_missed_peer(srt_context* c) { return c->context->has_missed_peer(); }
int32_t srt_is_library(const char* file) { return is_library(file); }
void srt_release(srt_context* c, const srt_handle* handles, int32_t count) {
  c->context->release(tickets(handles), count);
}

srt_status srt_gpu_libraries(const srt_config* config, srt_gpu_library* cuda, srt_gpu_library* nccl, int32_t* devices) {
  return guarded(nullptr, [&] {
    const GpuLibraries found(config->config);
    describe_library(found.found_cuda(), cuda);
    describe_library(found.found_nccl(), nccl);
    if (devices) *devices = found.device_count();
    return Status::ok();
  });
}

srt_status srt_gpu_of(srt_context* c, uintptr_t address, int32_t* gpu, srt_error* error) {
  return guarded(error, [&] { return c->context->gpu_of(address, *gpu); });
}

srt_status srt_quantise(int32_t wire_format, uintptr_t values, uintptr_t residuals, int64_t count, double* squares) {
  if (!wire_format_entry(wire_format) || count < 0) return SRT_INVALID_ARGUMENT;
  const WireKernels* kernels = choose_kernels("auto").wire(static_cast<WireFormat>(wire_format));
  if (!kernels) return SRT_INVALID_ARGUMENT;  // exact values are not rounded
  const QuantisedSquares found = quantise(*kernels, reinterpret_cast<float*>(values),
                                          reinterpret_cast<float*>(residuals), static_cast<size_t>(count));
  if (squares) {
    squares[0] = found.wanted;
    squares[1] = found.error;
  }
  return SRT_OK;
}

srt_status srt_stats(srt_context* c, srt_statistics* out, srt_lateness* by_rank) {
  if (!out || out->struct_size < sizeof(srt_statistics)) return SRT_INVALID_ARGUMENT;
  c->context->statistics(*out, by_rank);
  return SRT_OK;
}

srt_status srt_get_activity(srt_context* c, srt_activity* out) {
  if (!out || out->struct_size < sizeof(srt_activity)) return SRT_INVALID_ARGUMENT;
  c->context->activity(*out);
  return SRT_OK;
}

void srt_end_steps(srt_context* c, int32_t number, int64_t by) { c->context->end_steps(number, by); }

srt_status srt_get_steps(srt_context* c, srt_step_counts* out) {
  if (!out || out->struct_size < sizeof(srt_step_counts)) return SRT_INVALID_ARGUMENT;
  c->context->steps(*out);
  return SRT_OK;
}

int32_t srt_count_operations(srt_context* c, srt_operation_count* out, int32_t capacity) {
  return count_rows([&] { return c->context->count_operations(out, capacity); });
}

int32_t srt_count_sent_bytes(srt_context* c, srt_sent_bytes* out, int32_t capacity) {
  return count_rows([&] { return c->context->count_sent_bytes(out, capacity); });
}

int32_t srt_slowest_tensors(srt_context* c, const int64_t* waits, int32_t count, srt_tensor_times* out,
                            int32_t capacity) {
  return count_rows([&] {
    std::vector<WaitSpan> spans;
    for (int32_t i = 0; i < count; ++i) spans.push_back({waits[2 * i], waits[2 * i + 1]});
    return c->context->slowest_tensors(spans, out, capacity);
  });
}

srt_status srt_watch_stack(srt_context* c, const srt_stack_source* source, srt_error* error) {
  return guarded(error, [&] { return c->context->watch_stack(*source); });
}

srt_status srt_write_recorder(srt_context* c, const char* path, srt_error* error) {
  return guarded(error, [&] { return c->context->write_recorder(path); });
}

srt_status srt_timeline_start(srt_context* c, const char* path, int32_t marks_decisions, srt_error* error) {
  return guarded(error, [&] { return c->context->start_timeline(path, marks_decisions != 0); });
}
void srt_timeline_program(srt_context* c, const char* track, const char* what, int64_t begin, int64_t end) {
  c->context->add_to_timeline({track ? track : "", what ? what : "", begin, end});
}
void srt_timeline_stop(srt_context* c) { c->context->stop_timeline(); }

}  // extern "C"
