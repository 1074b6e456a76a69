"""Learns to read handwritten digits, on ranks that may be lost and join.

    hvdrun -np 3 --min-np 1 python examples/elastic_pytorch_digits.py

Kill one of its processes (`kill -9`): the others go on where they were, and a new one takes its place. Alone,
`python examples/elastic_pytorch_digits.py` works too.
"""

from __future__ import annotations

from typing import Any

import torch
from digits_data import load, options_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch as hvd


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
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of test images that are read correctly; each rank looks at its own part of them."""
    own = slice(hvd.rank(), None, hvd.size())
    right = (model(images[own]).argmax(1) == labels[own]).sum()
    return hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(labels)


@hvd.elastic.run
def train(state: Any, batches: DataLoader, test: tuple[torch.Tensor, torch.Tensor], options: Any) -> None:
    """Begins anew whenever the ranks have changed, and goes on from the state: the last commit."""
    for group in state.optimizer.param_groups:
        group["lr"] = options.lr * hvd.size() ** 0.5
    while state.epoch < options.epochs:
        for number, (images, labels) in enumerate(batches):  # those that are left of this epoch
            state.optimizer.zero_grad()
            nn.functional.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.sampler.record_batch(number, batches.batch_size)
            state.commit()  # costs nothing: the parameters are the commit until the next step
        share = accuracy(state.model, *test)
        if hvd.is_root():
            print(f"epoch {state.epoch + 1:2}: test accuracy {share:.2%} on {hvd.size()} rank(s)", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    options = options_of(__doc__).parse_args()
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in load())
    dataset = TensorDataset(images.view(-1, 1, 8, 8), labels)
    sampler = hvd.elastic.ElasticSampler(dataset)
    batches = DataLoader(dataset, options.batch_size, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    train(state, batches, (test_images.view(-1, 1, 8, 8), test_labels), options)
    hvd.shutdown()


if __name__ == "__main__":
    main()
