"""A rank of benchmarks/train_step.py: whole training steps with each kind of exchange, in turns.

Usage: python -m workers.train_step SOCKET NATIVE_FOLDER
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.memory_bound import MemoryBound
from common.models import MODELS, Step, deviation
from common.serving import bind, serve, training_ranks
from torch import nn

import sirtaki.torch as hvd

LEARNING_RATE = 0.01
WARM_UP_ROUNDS = 3


class Variant:
    """A copy of the model, and the exchange of its gradients between backward pass and step."""

    def __init__(self, step: Step) -> None:
        torch.manual_seed(0)  # all copies on all ranks start with equal parameters
        self.step = step
        self.model: nn.Module = step.make_model()
        self.rate = LEARNING_RATE
        self.exchange: Callable[[], object] = lambda: None

    def finish(self) -> Variant:
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        return self

    def run(self) -> None:
        """Runs one training step."""
        self.step.train(self.model, self.optimizer, self.exchange)


def with_barrier(step: Step, bound: MemoryBound) -> Variant:
    """Exchanges nothing: the ranks only meet in a barrier."""
    variant = Variant(step).finish()
    variant.exchange = bound.barrier
    return variant


def with_sirtaki(step: Step, **options: Any) -> Variant:
    variant = Variant(step).finish()
    names = variant.model.named_parameters()
    variant.optimizer = hvd.DistributedOptimizer(variant.optimizer, names, **options)
    return variant


def with_ddp(step: Step, group: Any = None) -> Variant:
    """Exchanges over a process group of torch.distributed; by default over gloo."""
    variant = Variant(step)
    variant.model = nn.parallel.DistributedDataParallel(variant.model, process_group=group)
    return variant.finish()


def with_prototype(step: Step, bound: MemoryBound) -> Variant:
    """Sums all gradients after the backward pass, in a fixed order, without negotiation.

    The sum is not divided: the learning rate compensates for that, so that averaging costs nothing.
    """
    variant = Variant(step)
    variant.rate = LEARNING_RATE / hvd.size()
    parameters = list(variant.model.parameters())
    counts = [parameter.numel() for parameter in parameters]

    def exchange() -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        bound.bind([gradient.data_ptr() for gradient in gradients], counts)()

    variant.exchange = exchange
    return variant.finish()


class Rank:
    """The orders that a rank executes."""

    def __init__(self, native: Path) -> None:
        hvd.init()
        self._rank = hvd.rank()
        self.bound = MemoryBound(native, self._rank, hvd.size(), partial(hvd.broadcast_object, root_rank=0))
        self._variants: dict[str, Variant] = {}
        self._bare: Callable[[], None] = lambda: None

    def variants(self, step: Step) -> dict[str, Variant]:
        """Returns a copy of the model for each kind of exchange; the one named sync exchanges nothing."""
        return {
            "sync": with_barrier(step, self.bound),
            "ddp": with_ddp(step),
            "sirtaki": with_sirtaki(step),
            "sirtaki, shared": with_sirtaki(step, gradients_in_shared_memory=True),
            "prototype": with_prototype(step, self.bound),
        }

    def prepare(self, model: str, keeps_gradients: bool) -> dict[str, int]:
        """Makes a copy of the model for each kind of exchange. Returns the amount of data to exchange."""
        torch.manual_seed(1 + self._rank)
        step = replace(MODELS[model](), keeps_gradients=keeps_gradients)
        self._variants.clear()
        gc.collect()
        self._variants.update(self.variants(step))
        counts = [parameter.numel() for parameter in self._variants["sync"].model.parameters()]
        self._flat = np.zeros(sum(counts), np.float32)
        self._bare = self.bound.bind([self._flat.ctypes.data], [self._flat.size])
        self.rounds(WARM_UP_ROUNDS)
        return {"parameters": sum(counts), "tensors": len(counts)}

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Runs one step of each kind per round; each round starts with another. Times in milliseconds."""
        calls = {name: variant.run for name, variant in self._variants.items()} | {"memory bound": self._bare}
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(count):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                self.bound.barrier()
                start = time.perf_counter()
                calls[name]()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def deviation(self) -> float:
        """Returns how far the copies that exchange have diverged."""
        return deviation([one.model for name, one in self._variants.items() if name != "sync"])

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "ddp": f"gloo of torch {torch.__version__}"}


def main(make_rank: Callable[[Path], Rank]) -> None:
    """Runs a rank until its connection ends."""
    path, native = sys.argv[1:]
    torch.set_num_threads(1)
    rank = make_rank(Path(native))
    with training_ranks("gloo", path):
        bind(hvd.rank(), hvd.size())
        serve(path, hvd.rank(), rank)


if __name__ == "__main__":
    main(Rank)
