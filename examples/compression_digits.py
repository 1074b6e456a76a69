"""Learns to read handwritten digits with compressed gradients, and prints what that saves.

    hvdrun -np 2 python examples/compression_digits.py --compression powersgd

Between hosts with a slow network, a step gets faster by what is saved; ranks of one host share memory, and
need no compression. `python examples/compression_digits.py` works too: a world of one exchanges nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from digits_data import options_of
from digits_torch import batches_of, make_model, report
from torch import nn

import sirtaki.torch as hvd

EXACT = 20  # exchanges at the start, while gradients change fastest
COMPRESSIONS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "int8": hvd.Compression.int8(),
    "fp8": hvd.Compression.fp8(),
    "powersgd": hvd.Compression.powersgd(rank=4, start=EXACT),
    "topk": hvd.Compression.topk(0.02, start=EXACT),
    "onebit": hvd.Compression.onebit(start=EXACT),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: hvd.DataLoader) -> float:
    """One epoch; returns this rank's mean loss."""
    total = 0.0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # exchanges the gradients; what is left out is added to the next ones
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.02)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="powersgd")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    train_batches, test_batches = batches_of(options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=COMPRESSIONS[options.compression]
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike

    for epoch in range(options.epochs):
        loss = train(model, optimizer, train_batches)
        report(epoch, loss, model, test_batches)
    counted = hvd.stats()["compression"]
    if hvd.is_root() and counted["exchanges"]:
        print(
            f"{counted['exchanges']} exchanges were compressed: {counted['sent_bytes']:,} bytes instead of "
            f"{counted['exact_bytes']:,}; the last one has left out {counted['relative_error']:.0%}"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
