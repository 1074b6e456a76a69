"""A rank of benchmarks/train_step.py: whole training steps with each kind of exchange, in turns.

Usage: python -m workers.train_step SOCKET NATIVE_FOLDER
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common.jobs import bind, serve
from common.limit import Limit
from common.models import MODELS, Step
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
        self.optimizer.zero_grad()
        self.step.loss(self.model).backward()
        self.exchange()
        self.optimizer.step()


def with_barrier(step: Step, limit: Limit) -> Variant:
    """Exchanges nothing: the ranks only meet in a barrier."""
    variant = Variant(step).finish()
    variant.exchange = limit.barrier
    return variant


def with_sirtaki(step: Step) -> Variant:
    variant = Variant(step).finish()
    names = variant.model.named_parameters()
    variant.optimizer = hvd.DistributedOptimizer(variant.optimizer, names)
    return variant


def with_ddp(step: Step) -> Variant:
    variant = Variant(step)
    variant.model = nn.parallel.DistributedDataParallel(variant.model)
    return variant.finish()


def with_prototype(step: Step, limit: Limit) -> Variant:
    """Sums all gradients after the backward pass, in a fixed order, without negotiation.

    The sum is not divided: the learning rate compensates for that, so that averaging costs nothing.
    """
    variant = Variant(step)
    variant.rate = LEARNING_RATE / hvd.size()
    parameters = list(variant.model.parameters())
    counts = [parameter.numel() for parameter in parameters]

    def exchange() -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        limit.bind([gradient.data_ptr() for gradient in gradients], counts)()

    variant.exchange = exchange
    return variant.finish()


class Rank:
    """The orders that a rank executes."""

    def __init__(self, native: Path) -> None:
        hvd.init()
        self._rank = hvd.rank()
        self._limit = Limit(
            native, self._rank, hvd.size(), lambda own: hvd.broadcast_object(own, root_rank=0)
        )
        self._variants: dict[str, Variant] = {}
        self._bare: Callable[[], None] = lambda: None

    def prepare(self, model: str) -> dict[str, int]:
        """Makes a copy of the model for each kind of exchange. Returns the amount of data to exchange."""
        torch.manual_seed(1 + self._rank)
        step = MODELS[model]()
        self._variants.clear()
        gc.collect()
        self._variants.update(
            sync=with_barrier(step, self._limit),
            ddp=with_ddp(step),
            sirtaki=with_sirtaki(step),
            prototype=with_prototype(step, self._limit),
        )
        counts = [parameter.numel() for parameter in self._variants["sync"].model.parameters()]
        self._flat = np.zeros(sum(counts), np.float32)
        self._bare = self._limit.bind([self._flat.ctypes.data], [self._flat.size])
        self.rounds(WARM_UP_ROUNDS)
        return {"parameters": sum(counts), "tensors": len(counts)}

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Runs one step of each kind per round; each round starts with another. Times in milliseconds."""
        calls = {name: variant.run for name, variant in self._variants.items()} | {"limit": self._bare}
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(count):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                self._limit.barrier()
                start = time.perf_counter()
                calls[name]()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def deviation(self) -> float:
        """Returns how far the copies that exchange have diverged, relative to the largest weight."""
        found = 0.0
        exchanging = [self._variants[name].model.parameters() for name in ("sirtaki", "ddp", "prototype")]
        for one, *others in zip(*exchanging, strict=True):
            for other in others:
                difference = (one - other).abs().max() / one.abs().max().clamp_min(1e-12)
                found = max(found, difference.item())
        return found

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "ddp": f"gloo of torch {torch.__version__}"}


def main() -> None:
    path, native = sys.argv[1:]
    torch.set_num_threads(1)
    rank = Rank(Path(native))
    store = f"file://{Path(path).with_name('gloo')}"
    dist.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    bind(hvd.rank(), hvd.size())
    gc.disable()
    orders: dict[str, Callable[..., Any]] = {
        "versions": rank.versions,
        "prepare": rank.prepare,
        "rounds": rank.rounds,
        "deviation": rank.deviation,
    }
    serve(path, hvd.rank(), orders)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
