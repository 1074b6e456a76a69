"""Learns to read handwritten digits with local steps, and prints how much the ranks have exchanged.

    hvdrun -np 2 python examples/local_sgd_digits.py --method diloco --every 20

Between hosts with a slow network, training gets faster by what is saved; on one host it does not.
"""

from __future__ import annotations

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
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # exchanges the parameters once in `every` steps
        total += loss.item()
    optimizer.synchronize()  # the parameters are equal on all ranks from here on
    return total / len(batches)


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.01)
    parser.add_argument("--method", choices=["local_sgd", "diloco"], default="local_sgd")
    parser.add_argument("--every", type=int, default=10, help="steps between two averages (10)")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    train_batches, test_batches = batches_of(options)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    if options.method == "local_sgd":
        optimizer = hvd.LocalSGD(optimizer, options.every)
    else:
        optimizer = hvd.DiLoCo(model, optimizer, every=options.every)

    for epoch in range(options.epochs):
        loss = train(model, optimizer, train_batches)
        report(epoch, loss, model, test_batches)
    if hvd.is_root():
        bytes_of_steps = sum(one.nbytes for one in model.parameters()) * options.epochs * len(train_batches)
        print(f"{hvd.stats()['bytes']:,} bytes were combined, by gradients it would be {bytes_of_steps:,}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
