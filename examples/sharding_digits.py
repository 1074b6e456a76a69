"""Learns to read handwritten digits with an optimizer whose state is divided among the ranks.

    hvdrun -np 2 python examples/sharding_digits.py --shard gradients --checkpoint /tmp/digits.pt
    hvdrun -np 3 python examples/sharding_digits.py --shard state --checkpoint /tmp/digits.pt

The second command continues where the first has ended, on another number of ranks.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from digits_data import options_of
from digits_torch import batches_of, make_model, report
from torch import nn

import sirtaki.torch as hvd


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: hvd.DataLoader) -> float:
    """One epoch; returns this rank's mean loss."""
    total = 0.0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        hvd.clip_grad_norm_(optimizer, 1.0)  # torch's function needs whole gradients
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def load_checkpoint(path: str, model: nn.Module, optimizer: Any) -> int:
    """Loads a file on all ranks, each of which keeps its slices; returns the number of epochs before."""
    if not path or not os.path.exists(path):
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


def save_checkpoint(path: str, model: nn.Module, optimizer: Any, epoch: int) -> None:
    """Writes a file that any number of ranks can load."""
    whole = hvd.full_state_dict(optimizer, root_rank=0)  # all ranks send their slices
    hvd.on_root(torch.save, {"model": model.state_dict(), "optimizer": whole, "epoch": epoch}, path)


def main() -> None:
    parser = options_of(__doc__)
    parser.set_defaults(lr=0.001)
    parser.add_argument("--shard", choices=("none", "state", "gradients"), default="gradients")
    parser.add_argument("--checkpoint", default="", help="a file to continue from, and to write")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    train_batches, test_batches = batches_of(options)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=options.lr),
        model.named_parameters(),
        shard=None if options.shard == "none" else options.shard,
    )
    done = load_checkpoint(options.checkpoint, model, optimizer)

    for epoch in range(done, done + options.epochs):
        loss = train(model, optimizer, train_batches)
        report(epoch, loss, model, test_batches)
    if options.checkpoint:
        save_checkpoint(options.checkpoint, model, optimizer, done + options.epochs)
    kept = [value for values in optimizer.state.values() for value in values.values()]
    if hvd.is_root():
        print(f"rank 0 keeps {sum(one.numel() * one.element_size() for one in kept):,} bytes of state")
    hvd.shutdown()


if __name__ == "__main__":
    main()
