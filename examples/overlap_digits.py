"""Learns to read handwritten digits while gradients are still on their way in the next forward pass.

    hvdrun -np 2 -H hostA:1,hostB:1 python examples/overlap_digits.py
    hvdrun -np 2 -H hostA:1,hostB:1 python examples/overlap_digits.py --no-overlap

It prints the time of a step: it gets shorter where the network is slow, not on one host. The numbers that the
training prints are the same with both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from digits_data import options_of
from digits_torch import batches_of, make_model, report
from torch import nn

import sirtaki.torch as hvd


def train(model: nn.Module, optimizer: Any, batches: hvd.DataLoader) -> float:
    """One epoch; returns this rank's mean loss."""
    total = 0.0
    for images, labels in batches:
        optimizer.zero_grad()  # gradients that are still on their way are dropped after their use
        loss = nn.functional.cross_entropy(model(images), labels)  # each layer waits for its parameters
        loss.backward()
        optimizer.step()  # returns at once
        total += loss.item()
    return total / len(batches)


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.01)
    help_text = "exchange while the next forward pass runs (on)"
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True, help=help_text)
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    train_batches, test_batches = batches_of(options)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), overlap_forward=options.overlap)

    began, steps = time.perf_counter(), 0
    for epoch in range(options.epochs):
        loss = train(model, optimizer, train_batches)
        steps += len(train_batches)
        report(epoch, loss, model, test_batches)  # its forward passes wait as well
    optimizer.synchronize()  # the last step has reached all parameters from here on
    if hvd.is_root():
        print(f"{1000 * (time.perf_counter() - began) / steps:.1f} ms a step")
    hvd.shutdown()


if __name__ == "__main__":
    main()
