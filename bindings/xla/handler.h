// The one function of libsirtaki_xla.so.
#pragma once

#include <cstdint>

// Returns the handler that programs compiled by XLA call, as a PyCapsule holds it for jax.ffi.register_ffi_target;
// its attributes are listed in call.h. The version is that of the interface which the installed XLA declares
// (XLA_FFI_API_MAJOR and _MINOR). Returns NULL if it is older than 0.1, the oldest supported version.
extern "C" __attribute__((visibility("default"))) void* sirtaki_xla_handler(int32_t major, int32_t minor,
                                                                            int32_t on_gpu);
