"""Learns to read handwritten digits, on as many ranks as there are.

    hvdrun -np 2 python examples/pytorch_digits.py

`python examples/pytorch_digits.py` works too: that is a world of one. Each takes a GPU if there is one.
"""

from __future__ import annotations

import time

import torch
from digits_data import load, options_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch as hvd


def own_device() -> torch.device:
    """This rank's GPU, if this host has any: one for each rank, as long as there are enough."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> float:
    """One epoch; returns this rank's mean loss."""
    model.train()
    device = next(model.parameters()).device
    total = 0.0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # the gradients are averaged over the ranks when this returns
        optimizer.step()
        total += loss.item()
    return total / len(batches)


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """The share of this rank's test images that are read correctly."""
    model.eval()
    device = next(model.parameters()).device
    right = sum(
        (model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in batches
    )
    return right / len(batches.sampler)


def main() -> None:
    options = options_of(__doc__).parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in load())
    train_set = TensorDataset(images.view(-1, 1, 8, 8), labels)
    test_set = TensorDataset(test_images.view(-1, 1, 8, 8), test_labels)
    train_batches = hvd.DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True)
    test_batches = hvd.DataLoader(test_set, 256)

    model = make_model().to(own_device())
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start alike

    for epoch in range(options.epochs):
        start = time.perf_counter()
        loss = train(model, optimizer, train_batches)
        seconds = time.perf_counter() - start
        means = hvd.allreduce(torch.tensor([loss, accuracy(model, test_batches)]), name="means")
        if hvd.is_root():
            speed = len(train_batches) * options.batch_size * hvd.size() / seconds
            print(
                f"epoch {epoch + 1:2}: loss {means[0]:.4f}, test accuracy {means[1]:.2%}, "
                f"{speed:,.0f} images/s on {hvd.size()} rank(s)",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
