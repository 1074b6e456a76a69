"""A rank of benchmarks/nccl.py: one GPU, and each operation through sirtaki and through plain NCCL.

Usage: python -m workers.nccl SOCKET
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.collectives import check, pattern
from common.jobs import serve
from common.models import MODELS, Step
from torch import Tensor, nn

import sirtaki.torch as hvd

LEARNING_RATE = 0.01
WARM_UP = 5


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._rank, self._size = hvd.rank(), hvd.size()
        self._device = torch.device("cuda", hvd.local_rank())
        self._calls: dict[str, Callable[[], Any]] = {}
        self._steps: dict[str, Callable[[], None]] = {}
        self._models: list[nn.Module] = []

    def versions(self) -> dict[str, str]:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"torch": torch.__version__, "nccl": f"{nccl} of torch", "GPU": torch.cuda.get_device_name()}

    def prepare(self, collective: str, count: int) -> list[str]:
        """Makes the calls of one operation on `count` elements of float32, and checks their results."""
        makers: dict[str, Callable[[int], dict[str, Callable[[], Any]]]] = {
            "allreduce": self._allreduce,
            "broadcast": self._broadcast,
            "allgather": self._allgather,
            "reducescatter": self._reducescatter,
            "alltoall": self._alltoall,
        }
        for call in makers[collective](count).values():
            check(collective, call().cpu(), count, self._rank, self._size)
        self._calls = makers[collective](count)  # makes new inputs, for the calls that worked in place
        for call in self._calls.values():
            for _ in range(WARM_UP):
                call()
        return list(self._calls)

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each call until the GPU has finished it, in microseconds."""
        return self._timed(self._calls[who], calls, 1e6)

    def _timed(self, call: Callable[[], Any], calls: int, unit: float) -> list[float]:
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * unit)
        return times

    def _given(self, count: int) -> Tensor:
        return torch.from_numpy(pattern(count, self._rank)).to(self._device)

    def _allreduce(self, count: int) -> dict[str, Callable[[], Any]]:
        mine, its = self._given(count), self._given(count)

        def plain() -> Tensor:
            dist.all_reduce(its)
            return its

        return {"sirtaki": lambda: hvd.allreduce_(mine, op=hvd.Sum, name="benchmark"), "nccl": plain}

    def _broadcast(self, count: int) -> dict[str, Callable[[], Any]]:
        mine, its = self._given(count), self._given(count)

        def plain() -> Tensor:
            dist.broadcast(its, 0)
            return its

        return {"sirtaki": lambda: hvd.broadcast_(mine, 0, name="benchmark"), "nccl": plain}

    def _allgather(self, count: int) -> dict[str, Callable[[], Any]]:
        given, result = self._given(count // self._size), torch.empty(count, device=self._device)

        def plain() -> Tensor:
            dist.all_gather_into_tensor(result, given)
            return result

        return {"sirtaki": lambda: hvd.allgather(given, name="benchmark"), "nccl": plain}

    def _reducescatter(self, count: int) -> dict[str, Callable[[], Any]]:
        given, result = self._given(count), torch.empty(count // self._size, device=self._device)

        def plain() -> Tensor:
            dist.reduce_scatter_tensor(result, given)
            return result

        return {"sirtaki": lambda: hvd.reducescatter(given, op=hvd.Sum, name="benchmark"), "nccl": plain}

    def _alltoall(self, count: int) -> dict[str, Callable[[], Any]]:
        given, result = self._given(count), torch.empty(count, device=self._device)

        def plain() -> Tensor:
            dist.all_to_all_single(result, given)
            return result

        return {"sirtaki": lambda: hvd.alltoall(given, name="benchmark"), "nccl": plain}

    def prepare_steps(self, model: str) -> None:
        """Makes two copies of the model, one for each kind of exchange."""
        torch.manual_seed(1 + self._rank)
        made = MODELS[model]()
        step = Step(made.make_model, made.batch.to(self._device))
        self._steps.clear()
        self._models.clear()
        gc.collect()
        for who in ("sirtaki", "ddp"):
            torch.manual_seed(0)
            copy = step.make_model().to(self._device)
            if who == "ddp":
                copy = nn.parallel.DistributedDataParallel(copy, device_ids=[self._device.index])
            optimizer: Any = torch.optim.SGD(copy.parameters(), lr=LEARNING_RATE)
            if who == "sirtaki":
                optimizer = hvd.DistributedOptimizer(optimizer, copy.named_parameters())
            self._models.append(copy)
            self._steps[who] = _step(step, copy, optimizer)
        for call in self._steps.values():
            for _ in range(WARM_UP):
                call()

    def steps(self, who: str, count: int) -> list[float]:
        """Returns the duration of each step, in milliseconds."""
        return self._timed(self._steps[who], count, 1e3)

    def deviation(self) -> float:
        """Returns how far the copies' weights have diverged, relative to the largest weight of a tensor."""
        mine, its = (model.parameters() for model in self._models)
        pairs = zip(mine, its, strict=True)
        return max(
            float((one - other).abs().max() / one.abs().max().clamp_min(1e-12)) for one, other in pairs
        )


def _step(step: Step, model: nn.Module, optimizer: Any) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        step.loss(model).backward()
        optimizer.step()

    return run


def main() -> None:
    path = sys.argv[1]
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    store = f"file://{Path(path).with_name('nccl')}"
    dist.init_process_group("nccl", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    rank = Rank()
    gc.disable()
    orders: dict[str, Callable[..., Any]] = {
        name: getattr(rank, name)
        for name in ("versions", "prepare", "block", "prepare_steps", "steps", "deviation")
    }
    serve(path, hvd.rank(), orders)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
