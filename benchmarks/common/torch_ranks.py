"""Ranks of sirtaki for torch, which measure training steps."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import sirtaki.torch as hvd
from common.measure import timed
from common.models import Step

MakeOptimizer = Callable[[nn.Module], Any]


class TorchRank:
    """A rank with one thread."""

    def __init__(self, folder: Path) -> None:
        hvd.init()
        torch.set_num_threads(1)
        self.folder, self.number, self.size = folder, hvd.rank(), hvd.size()

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def join_group(self, backend: str = "gloo") -> None:
        """Makes the ranks a group of torch.distributed, which meets through a file in their common folder."""
        meeting = f"file://{self.folder / backend}"
        dist.init_process_group(backend, meeting, rank=self.number, world_size=self.size)
        atexit.register(dist.destroy_process_group)


def alternate_steps(
    steps: Mapping[str, Callable[[], object]], rounds: int, meet: Callable[[], object] = hvd.barrier
) -> dict[str, list[float]]:
    """Runs one step of each kind per round; each round starts with another. Returns milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        for name in order:
            meet()
            start = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
        order = [*order[1:], order[0]]
    return times


class StepRank(TorchRank):
    """A rank whose training steps are measured, with one way of exchanging gradients after another.

    Attributes:
        models, ways: what `prepare` takes.
        warm_up: the number of steps before those that are measured.
    """

    models: ClassVar[Mapping[str, Callable[[], Step]]]
    ways: ClassVar[Mapping[str, MakeOptimizer]]
    warm_up: ClassVar[int]

    def prepare(self, model: str, way: str) -> None:
        """Makes a model and its optimizer, and takes the steps that are not measured."""
        self._step: Callable[[], None] = lambda: None
        self._optimizer = None  # the last one's optimizer releases its parameters
        torch.manual_seed(0)
        step = self.models[model]()
        made = step.make_model()
        self.use(way, made)
        self._optimizer = self.ways[way](made)
        self._step = lambda: step.train(made, self._optimizer)
        timed(self._step, self.warm_up)

    def use(self, way: str, model: nn.Module) -> None:
        """Called with each model before it is trained."""

    def steps(self, calls: int) -> dict[str, Any]:
        """Returns the duration of each step, in microseconds."""
        return {"times": timed(self._step, calls)}
