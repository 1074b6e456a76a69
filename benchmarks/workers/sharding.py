"""A rank of benchmarks/sharding.py: training steps with the optimizer's data whole, and divided.

Usage: python -m workers.sharding SOCKET
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from common.models import MODELS
from common.serving import serve_alone
from torch import Tensor, nn

import sirtaki.torch as hvd

SHARDS = {"none": None, "state": "state", "gradients": "gradients"}
WARM_UP_ROUNDS = 3


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[nn.Module, Any]] = {}

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def prepare(self, model: str) -> dict[str, Any]:
        """Makes a copy of the model for each way; returns its size, and the bytes that this rank keeps."""
        self._copies.clear()
        gc.collect()
        self._step = MODELS[model]()
        for name, shard in SHARDS.items():
            torch.manual_seed(0)
            made = self._step.make_model()
            optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5)
            self._copies[name] = made, hvd.DistributedOptimizer(optimizer, shard=shard)
        self.rounds(WARM_UP_ROUNDS)
        kept = {name: _kept(*copy) for name, copy in self._copies.items()}
        return {"bytes": sum(map(_bytes, made.parameters())), "kept": kept}

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Runs one step of each kind per round; each round starts with another. Times in milliseconds."""
        times: dict[str, list[float]] = {name: [] for name in self._copies}
        names = list(self._copies)
        for turn in range(count):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                model, optimizer = self._copies[name]
                hvd.barrier()
                start = time.perf_counter()
                self._step.train(model, optimizer)
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def are_equal(self) -> bool:
        """Returns whether all copies have the same bits."""
        first, *others = [list(model.parameters()) for model, _ in self._copies.values()]
        return all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _kept(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Returns the bytes of state and of gradients between two steps."""
    state = [one for values in optimizer.state.values() for one in values.values()]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    own = [getattr(one, "own", one) for one in gradients]
    return {"state": sum(map(_bytes, state)), "gradients": sum(map(_bytes, own))}


if __name__ == "__main__":
    serve_alone(Rank())
