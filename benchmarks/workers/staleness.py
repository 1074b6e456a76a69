"""A rank of benchmarks/staleness.py: a training on handwritten digits whose steps also sleep.

Usage: python -m workers.staleness SOCKET
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common.serving import serve
from torch import Tensor, nn

import sirtaki.torch as hvd

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from digits_data import load

ROWS = 16  # of a rank's batch
LEARNING_RATE = 0.2  # at the beginning


@dataclass
class Training:
    """A training of a rank. Slow is no rank ("none"), the last one ("one"), or another each step ("each")."""

    staleness: int
    slow: str
    updates: int
    seconds: float
    seed: int

    def __post_init__(self) -> None:
        self.images, self.test_images, self.labels, self.test_labels = map(torch.from_numpy, load())
        self.source = torch.Generator().manual_seed(1000 * self.seed + hvd.rank())
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.steps = 0

    def compute(self) -> None:
        """Computes gradients, and sleeps: `seconds`, or twice as long on a slow rank."""
        rows = torch.randint(len(self.labels), (ROWS,), generator=self.source)
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(self.images[rows]), self.labels[rows]).backward()
        time.sleep(self.seconds * (2 if self._is_slow() else 1))
        self.steps += 1

    def _is_slow(self) -> bool:
        if self.slow == "one":
            return hvd.rank() == hvd.size() - 1
        return self.slow == "each" and self.steps % hvd.size() == hvd.rank()

    def with_optimizer(self) -> float:
        """Trains with a distributed optimizer; returns the duration."""
        staleness, named = self.staleness, self.model.named_parameters()
        optimizer = decaying(
            hvd.DistributedOptimizer(sgd(self.model.parameters()), named, staleness=staleness), self.updates
        )
        hvd.barrier()
        start = time.perf_counter()
        while (optimizer.clock() if staleness else self.steps) < self.updates:
            self.compute()
            optimizer.step()
        optimizer.synchronize()
        return time.perf_counter() - start

    def with_table(self) -> float:
        """Trains with a parameter server; returns the duration."""
        updates = self.updates  # servers get the function, with all that it refers to
        table = hvd.ParameterServer(
            self.model.named_parameters(), lambda params: decaying(sgd(params), updates), self.staleness
        )
        hvd.barrier()
        start = time.perf_counter()
        while self.steps < self.updates:
            table.pull()
            self.compute()
            table.push()
        table.finish()
        return time.perf_counter() - start

    @torch.no_grad()
    def accuracy(self) -> float:
        return (self.model(self.test_images).argmax(1) == self.test_labels).float().mean().item()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5)


def decaying(optimizer: Any, updates: int) -> Any:
    """Returns the optimizer, whose learning rate falls to a tenth with the updates."""
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)
    optimizer.register_step_post_hook(lambda *_: decay.step())
    return optimizer


class Rank:
    """The orders that a rank executes."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def train(self, method: str, **how: Any) -> dict[str, Any]:
        """Trains; returns the duration, this rank's steps, and the accuracy."""
        training = Training(**how)
        seconds = training.with_table() if method == "table" else training.with_optimizer()
        hvd.check_parameters(training.model.state_dict())
        return {"seconds": seconds, "steps": training.steps, "accuracy": training.accuracy()}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    serve(sys.argv[1], hvd.rank(), Rank())
    hvd.shutdown()


if __name__ == "__main__":
    main()
