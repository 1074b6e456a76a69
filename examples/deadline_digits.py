"""Learns to read handwritten digits with steps that do not wait for a slow rank.

    hvdrun -np 4 python examples/deadline_digits.py --deadline 0 --delay 0.1

Every tenth step a rank sleeps for `--delay` seconds, each in its turn, as if its machine were busy.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from digits_data import options_of
from digits_torch import batches_of, make_model, report
from torch import nn

import sirtaki.torch as hvd


def train(model: nn.Module, optimizer: Any, batches: hvd.DataLoader, delay: float) -> tuple[float, int]:
    """One epoch; returns this rank's mean loss, and how many contributions were late on all ranks."""
    total, late = 0.0, 0
    for step, (images, labels) in enumerate(batches):
        if step % 10 == 0 and step // 10 % hvd.size() == hvd.rank():
            time.sleep(delay)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # without the ranks that are late
        late += hvd.size() - len(optimizer.contributors)
        total += loss.item()
    optimizer.flush()  # a step with what is left, so that no gradient is lost
    return total / len(batches), late


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.02)
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds that a step waits (0)")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds that a rank sleeps (0.1)")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    train_batches, test_batches = batches_of(options)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), deadline=options.deadline)

    for epoch in range(options.epochs):
        began = time.perf_counter()
        loss, late = train(model, optimizer, train_batches, options.delay)
        seconds = time.perf_counter() - began
        report(epoch, loss, model, test_batches)
        if hvd.is_root():
            print(f"  {seconds:.2f} s, {late} late contributions", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
