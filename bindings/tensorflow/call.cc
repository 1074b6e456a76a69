#include "tensorflow/call.h"

#include <cstring>
#include <string_view>

#include "native/requests.h"

namespace sirtaki::tensorflow {
namespace {

constexpr int first_tensor = 1;  // input 0 is the label: the name by which the ranks match the operation

// Returns a group id, the same on all ranks: FNV-1a, see Fowler, Noll and Vo, draft-eastlake-fnv. Never 0, never
// negative.
int64_t group_of(int32_t kind, std::string_view label) {
  uint64_t hash = 0xcbf29ce484222325u ^ static_cast<uint64_t>(kind);
  for (const char byte : label) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
  return static_cast<int64_t>(hash >> 1 | 1);
}

std::string_view bytes_of(const Tensor& tensor) {
  return {static_cast<const char*>(tf().tensor_data(tensor.get())), tf().tensor_bytes(tensor.get())};
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(static_cast<size_t>(tf().tensor_dimensions(tensor.get())));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = tf().tensor_dimension(tensor.get(), static_cast<int>(i));
  return shape;
}

uintptr_t address_of(const Tensor& tensor) {
  return tensor ? reinterpret_cast<uintptr_t>(tf().tensor_data(tensor.get())) : 0;
}

}  // namespace

void Call::start(const Kernel& kernel, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done) {
  auto* call = new Call(kernel, where, done);
  if (!call->queue()) call->end();
}

// Queues the requests. From then on the call may end and delete itself at any time.
bool Call::queue() {
  const bindings::ProcessContext context;
  if (context.get()) return queue_in(context.get());
  status_.fail(bindings::not_initialised());
  return false;
}

bool Call::queue_in(srt_context* context) {
  context_ = context;
  const bool has_tensors = kernel_.kind != SRT_BARRIER && kernel_.kind != SRT_JOIN;
  const size_t count = has_tensors ? kernel_.dtypes.size() : 1;
  const Tensor label = input(0);
  if (!count || !label) return false;
  std::vector<Description> descriptions(count);
  std::vector<srt_request> requests(count);
  parts_.resize(count);
  handles_.resize(count);
  left_ = count;
  for (size_t i = 0; i < count; ++i) {
    requests[i] = request_of(i);
    descriptions[i].name = bytes_of(label);
    if (count > 1) {
      requests[i].group_id = group_of(kernel_.kind, bytes_of(label));
      requests[i].group_size = static_cast<int32_t>(count);
      descriptions[i].name += "." + std::to_string(i);
    }
    if (!descriptions[i].name.empty()) requests[i].name = descriptions[i].name.c_str();
    if (has_tensors) describe(context, i, descriptions[i], requests[i]);
    if (kernel_.keeps_shape())
      requests[i].output = same_as_input(static_cast<int>(i), descriptions[i].shape, requests[i].input);
    if (!status_.is_ok()) return false;
  }
  if (kernel_.on_gpu) place_on_gpu(requests);
  if (!status_.is_ok()) return false;
  const auto note = [this](const bindings::CallStatus& failure) { status_.fail(failure); };
  if (bindings::enqueue(context, requests, handles_, note)) return true;
  if (!handles_.empty()) take_results();
  return false;
}

srt_request Call::request_of(size_t index) {
  parts_[index] = {this, static_cast<int>(index)};
  srt_request request = bindings::new_request(kernel_.kind);
  request.process_set = kernel_.process_set;
  request.device = -1;
  request.reduce_op = kernel_.reduce_op;
  request.root = kernel_.root;
  request.prescale = kernel_.prescale;
  request.postscale = kernel_.postscale;
  request.on_complete = on_complete;
  request.user = &parts_[index];
  return request;
}

void Call::describe(srt_context* context, size_t index, Description& description, srt_request& request) {
  const int place = static_cast<int>(index) + first_tensor;
  const Tensor tensor = input(place);
  if (!tensor) return;
  description.shape = shape_of(tensor);
  request.dtype = kernel_.dtypes[index];
  request.dimensions = static_cast<int32_t>(description.shape.size());
  request.shape = description.shape.data();
  request.input = address_of(tensor);  // TensorFlow keeps the inputs alive until the call has ended
  if (kernel_.kind == SRT_ALLTOALL) add_splits(place + 1, request);
  if (kernel_.kind == SRT_REDUCESCATTER && !description.shape.empty())
    request.output = own_part(context, index, description.shape, tf().tensor_bytes(tensor.get()));
  else if (!kernel_.keeps_shape()) request.allocate = allocate;
}

// TensorFlow does not tell a kernel its streams. When the operations have ended, work in any stream may follow.
void Call::place_on_gpu(std::vector<srt_request>& requests) {
  int32_t gpu = -1;
  if (const auto found = bindings::find_gpu(context_, requests, gpu); !found.is_ok()) return status_.fail(found);
  for (srt_request& request : requests) {
    request.device = gpu;
    request.flags |= SRT_REQUEST_AFTER_ALL_STREAMS;
  }
}

void Call::add_splits(int place, srt_request& request) {
  const Tensor splits = input(place);
  if (!splits) return;
  const auto* rows = static_cast<const int64_t*>(tf().tensor_data(splits.get()));
  splits_.assign(rows, rows + tf().tensor_bytes(splits.get()) / sizeof(int64_t));
  if (splits_.empty()) return;  // no splits were given: equal parts for all
  request.splits = splits_.data();
  request.split_count = static_cast<int32_t>(splits_.size());
}

Tensor Call::input(int index) {
  TF_Tensor* tensor = nullptr;
  if (status_.is_ok()) tf().input(where_, index, &tensor, status_.get());
  return Tensor(tensor);
}

Tensor Call::output(int index, DataType type, const std::vector<int64_t>& shape, size_t bytes) {
  if (!status_.is_ok()) return nullptr;
  return Tensor(
      tf().allocate_output(where_, index, type, shape.data(), static_cast<int>(shape.size()), bytes, status_.get()));
}

// Returns the output memory of a reduce-scatter: this rank's rows of a tensor of this shape.
uintptr_t Call::own_part(srt_context* context, size_t index, std::vector<int64_t> shape, size_t bytes) {
  const int64_t rows = shape[0];
  shape[0] = srt_own_rows(context, kernel_.process_set, rows);
  const size_t own_bytes = rows ? bytes / static_cast<size_t>(rows) * static_cast<size_t>(shape[0]) : 0;
  return address_of(output(static_cast<int>(index), kernel_.types[index], shape, own_bytes));
}

// Returns the memory of an output: the input's own if nothing else uses the input, so code here must not hold a
// reference to it.
uintptr_t Call::same_as_input(int index, const std::vector<int64_t>& shape, uintptr_t input) {
  const int candidate = index + first_tensor;
  int forwarded = -1;
  if (!status_.is_ok()) return 0;
  const Tensor tensor(tf().forward_or_allocate(where_, &candidate, 1, index, shape.data(),
                                               static_cast<int>(shape.size()), &forwarded, status_.get()));
  return forwarded == candidate ? input : address_of(tensor);
}

uintptr_t Call::allocate(void* user, const srt_tensor* described) {
  auto* part = static_cast<Part*>(user);
  const std::vector<int64_t> shape(described->shape, described->shape + described->dimensions);
  Call& call = *part->call;
  const DataType type = call.kernel_.types[static_cast<size_t>(part->output)];
  const std::lock_guard lock(call.mutex_);
  const Tensor tensor = call.output(part->output, type, shape, described->bytes);
  if (!call.status_.is_ok()) return 0;
  return described->bytes ? address_of(tensor) : reinterpret_cast<uintptr_t>(part);  // not null, and never accessed
}

void Call::on_complete(void* user, srt_status status, const char* error) {
  Call* call = static_cast<Part*>(user)->call;
  {
    const std::lock_guard lock(call->mutex_);
    if (status != SRT_OK) call->status_.fail({status, error});
    if (--call->left_) return;
  }
  call->take_results();
  call->end();
}

void Call::take_results() {
  if (status_.is_ok() && kernel_.kind == SRT_ALLTOALL) {
    const int32_t count = srt_result_splits(context_, handles_[0], nullptr, 0);
    const Tensor received = output(1, type_int64, {count}, static_cast<size_t>(count) * sizeof(int64_t));
    if (received)
      srt_result_splits(context_, handles_[0], static_cast<int64_t*>(tf().tensor_data(received.get())), count);
  }
  if (status_.is_ok() && kernel_.kind == SRT_JOIN) {
    const auto last = static_cast<int32_t>(srt_result_number(context_, handles_[0]));
    const Tensor rank = output(0, type_int32, {}, sizeof last);
    if (rank) std::memcpy(tf().tensor_data(rank.get()), &last, sizeof last);
  }
  srt_release(context_, handles_.data(), static_cast<int32_t>(handles_.size()));
}

void Call::end() {
  if (!status_.is_ok()) tf().compute_failed(where_, status_.get());
  const Done done = std::move(done_);
  delete this;
  done();  // may free the kernel
}

}  // namespace sirtaki::tensorflow
