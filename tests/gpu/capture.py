"""Step 6: a CUDA graph is captured in mode global while an all-reduce waits for a kernel of one second.

The engine's thread asks for events meanwhile, and launches the all-reduce: neither may disturb the capture.
"""

from __future__ import annotations

import torch
from card import own_card

import sirtaki.torch as hvd

KERNEL_SECONDS, CAPTURE_SECONDS = 1.0, 2.0


def main() -> None:
    hvd.init()
    with own_card(hvd.local_rank()) as card:
        tensor = torch.ones(1 << 16, device=card.device)
        hvd.allreduce_(tensor, op=hvd.Sum, name="first")  # connects
        card.work_for(0.01)
        card.synchronize()
        card.work_for(KERNEL_SECONDS)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="behind a kernel")
        assert not hvd.poll(handle)
        card.capture(CAPTURE_SECONDS)
        assert hvd.poll(handle), "the all-reduce has not ended during the capture"
        hvd.synchronize(handle)
        assert tensor.cpu().eq(hvd.size() ** 2).all()
    hvd.shutdown()


if __name__ == "__main__":
    main()
