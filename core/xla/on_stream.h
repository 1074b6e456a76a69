// A call whose tensors are on a GPU: its results come in the stream in which XLA makes the operands.
#pragma once

#include "base/status.h"
#include "sirtaki.h"
#include "xla/call.h"

namespace sirtaki {

// Returns when the operations are on their way to the GPU, and the stream waits for them.
Status run_on_stream(srt_context* context, const XlaCallFrame& frame, XlaCall call);

}  // namespace sirtaki
