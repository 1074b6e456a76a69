"""Learns to read handwritten digits while the last rank is slow, and prints the steps of each rank.

    hvdrun -np 4 python examples/staleness_digits.py --staleness 3 --slow 0.02

With --staleness 0 all ranks wait for the slow one in each step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from digits_data import load, options_of
from torch import Tensor, nn

import sirtaki.torch as hvd


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
    )


def random_batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without an end, other ones on each rank: a fast rank takes more of them than a slow one."""
    source = torch.Generator().manual_seed(hvd.rank())
    while True:
        rows = torch.randint(len(labels), (size,), generator=source)
        yield images[rows], labels[rows]


def train(model: nn.Module, optimizer: Any, batches: Iterator[tuple[Tensor, Tensor]], options: Any) -> int:
    """Trains until the ranks have made `updates` updates; returns the number of steps of this rank."""
    steps = 0
    while (optimizer.clock() if options.staleness else steps) < options.updates:
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        if hvd.rank() == hvd.size() - 1:
            time.sleep(options.slow)  # as if its processor was slower
        optimizer.step()  # does not wait for the gradients of other ranks
        steps += 1
    optimizer.synchronize()  # the parameters are equal on all ranks from here on
    return steps


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.1)
    parser.add_argument("--staleness", type=int, default=3, help="how many updates old a gradient may be (3)")
    parser.add_argument("--updates", type=int, default=300, help="updates of the parameters (300)")
    parser.add_argument("--slow", type=float, default=0.02, help="seconds that the last rank loses in a step")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in load())
    images, test_images = images.view(-1, 1, 8, 8), test_images.view(-1, 1, 8, 8)

    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike
    inner = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), staleness=options.staleness)

    start = time.perf_counter()
    steps = train(model, optimizer, random_batches(images, labels, options.batch_size), options)
    seconds = time.perf_counter() - start
    counts = hvd.allgather_object(steps)
    if hvd.is_root():
        print(f"steps of the ranks: {counts}, {sum(counts) / seconds:.0f} in a second")
        print(f"test accuracy {accuracy(model, test_images, test_labels):.2%}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
