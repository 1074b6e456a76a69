#include "gpu/device/device.h"

#include <tuple>

namespace sirtaki {

Status GpuDevice::open(const GpuLibraries& libraries, int ordinal, std::unique_ptr<GpuDevice>& out) {
  std::unique_ptr<GpuDevice> device(new GpuDevice(libraries, ordinal));
  SIRTAKI_TRY(device->retain());
  out = std::move(device);
  return Status::ok();
}

Status GpuDevice::retain() {
  char bus_id[32] = {};
  SIRTAKI_TRY(check(cuda().device(&device_, ordinal_), "cuDeviceGet"));
  SIRTAKI_TRY(check(cuda().device_bus_id(bus_id, sizeof bus_id - 1, device_), "cuDeviceGetPCIBusId"));
  bus_id_ = bus_id;
  SIRTAKI_TRY(check(cuda().device_uuid(&uuid_, device_), "cuDeviceGetUuid"));
  return check(cuda().context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

GpuDevice::~GpuDevice() {
  if (context_) std::ignore = cuda().context_release(device_);
}

GpuDevice::Scope::Scope(const GpuDevice* device) : device_(device) {
  if (!device_) return;
  status_ = device_->check(device_->cuda().context_push(device_->context_), "cuCtxPushCurrent");
  if (status_.is_ok()) std::ignore = device_->cuda().exchange_capture_mode(&capture_mode_);
}

GpuDevice::Scope::~Scope() {
  if (!device_ || !status_.is_ok()) return;
  CudaContext popped;
  std::ignore = device_->cuda().exchange_capture_mode(&capture_mode_);
  std::ignore = device_->cuda().context_pop(&popped);
}

}  // namespace sirtaki
