// Calls whose tensors are on a GPU: results are delivered on the stream on which XLA produces the operands.
#pragma once

#include "native/call_status.h"
#include "sirtaki.h"
#include "xla/call.h"

namespace sirtaki::bindings {

// Blocks until the operations are launched on the GPU and the stream waits for them.
CallStatus run_on_stream(srt_context* context, const XlaCallFrame& frame, XlaCall call);

}  // namespace sirtaki::bindings
