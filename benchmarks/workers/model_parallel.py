"""A rank of benchmarks/model_parallel.py: training steps of divided models, over one backend.

Usage: python -m workers.model_parallel SOCKET BACKEND
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common.models import difference, parts_of
from common.serving import bind, serve, training_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sirtaki.torch as hvd
import sirtaki.torch.backend  # noqa: F401  # registers the backend

WIDTH, INNER, PAIRS, ROWS, PARTS = 512, 2048, 6, 64, 8
WARM_UP_ROUNDS = 3

Step = Callable[[], object]


def make_model() -> nn.Sequential:
    """Returns pairs of layers; all copies on all ranks start with equal parameters."""
    torch.manual_seed(0)
    pairs = [[nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)] for _ in range(PAIRS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def tensor_parallel(group: Any) -> tuple[nn.Module, Step]:
    """Divides each pair of layers among the ranks of a group."""
    model, images = make_model(), batch()
    plan: dict[str, Any] = {}
    for first in range(0, 3 * PAIRS, 3):
        plan |= {str(first): ColwiseParallel(), str(first + 2): RowwiseParallel()}
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(images), images).backward()
        optimizer.step()

    return model, step


def pipeline(group: Any) -> tuple[nn.Module, Step]:
    """Gives each rank of a group consecutive layers."""
    whole, images = make_model(), batch()
    count = len(whole) // group.size()
    stage = whole[group.rank() * count : (group.rank() + 1) * count]
    piped = PipelineStage(stage, group.rank(), group.size(), torch.device("cpu"), group=group)
    schedule = Schedule1F1B(piped, n_microbatches=PARTS, loss_fn=loss_of)
    optimizer = sgd(stage)

    def step() -> None:
        optimizer.zero_grad()
        if piped.is_first:
            schedule.step(images)
        else:
            schedule.step(target=images)
        optimizer.step()

    return stage, step


DIVISIONS = {"tensor parallel": tensor_parallel, "pipeline": pipeline}


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._model: nn.Module
        self._step: Step

    def prepare(self, division: str) -> dict[str, str]:
        """Divides the model."""
        self._model, self._step = DIVISIONS[division](dist.group.WORLD)
        self.rounds(WARM_UP_ROUNDS)
        return {"model": f"{PAIRS} × Linear({WIDTH}, {INNER}) and back, batch {ROWS}"}

    def rounds(self, count: int) -> dict[str, Any]:
        """Runs some steps. Returns their times in ms, and the number of operations of sirtaki in them."""
        times, operations = [], 0
        for _ in range(count):
            hvd.barrier()
            before, start = hvd.stats()["operations"], time.perf_counter()
            self._step()
            times.append((time.perf_counter() - start) * 1e3)
            operations += hvd.stats()["operations"] - before
        return {"times": times, "operations": operations}

    def keep(self, path: str) -> None:
        """Writes this rank's parts of the weights to a file."""
        torch.save(parts_of(self._model), f"{path}.{hvd.rank()}")

    def deviation(self, path: str) -> float:
        """Returns how far this rank's parts of the weights have diverged from those of a file."""
        return difference([parts_of(self._model), torch.load(f"{path}.{hvd.rank()}")])

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}


def main() -> None:
    path, backend = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    with training_ranks(backend, path):
        bind(hvd.rank(), hvd.size())
        serve(path, hvd.rank(), Rank())


if __name__ == "__main__":
    main()
