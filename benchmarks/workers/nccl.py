"""A rank of benchmarks/nccl.py: one GPU, and each operation through sirtaki and through plain NCCL.

Usage: python -m workers.nccl SOCKET cuda|cpu
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.collectives import COLLECTIVES, Call, check, pattern
from common.models import MODELS, Step, deviation
from common.peers import Peer, Sirtaki, TorchDistributed
from common.serving import serve
from torch import nn

import sirtaki.torch as hvd

LEARNING_RATE = 0.01
WARM_UP = 5


class Rank:
    """The orders that a rank executes."""

    def __init__(self, peers: dict[str, Peer], device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._calls: dict[str, Call] = {}
        self._steps: dict[str, Call] = {}
        self._models: list[nn.Module] = []

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__}
        if self._device.type == "cuda":
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) + " of torch"
            versions["GPU"] = torch.cuda.get_device_name()
        return versions

    def prepare(self, collective: str, size: int) -> list[str]:
        """Makes each peer's call on `size` bytes, and checks its result. Returns the peers."""
        count = size // 4
        for call in self._make(collective, count).values():
            check(collective, call().cpu(), count, hvd.rank(), hvd.size())
        self._calls = self._make(collective, count)  # makes new inputs, for the calls that worked in place
        _warm_up(self._calls)
        return list(self._calls)

    def _make(self, collective: str, count: int) -> dict[str, Call]:
        input_count = COLLECTIVES[collective].input_count(count, hvd.size())
        made = {
            who: peer.bind(collective, pattern(input_count, hvd.rank())) for who, peer in self._peers.items()
        }
        return {who: call for who, call in made.items() if call is not None}

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each call until the GPU has finished it, in microseconds."""
        return self._timed(self._calls[who], calls, 1e6)

    def prepare_steps(self, model: str) -> list[str]:
        """Makes two copies of the model, one for each kind of exchange. Returns the kinds."""
        torch.manual_seed(1 + hvd.rank())
        made = MODELS[model]()
        step = Step(made.make_model, made.batch.to(self._device))
        self._steps.clear()
        self._models.clear()
        gc.collect()
        for who in ("sirtaki", "ddp"):
            torch.manual_seed(0)
            copy = step.make_model().to(self._device)
            if who == "ddp":
                gpus = None if self._device.index is None else [self._device.index]
                copy = nn.parallel.DistributedDataParallel(copy, device_ids=gpus)
            optimizer: Any = torch.optim.SGD(copy.parameters(), lr=LEARNING_RATE)
            if who == "sirtaki":
                optimizer = hvd.DistributedOptimizer(optimizer, copy.named_parameters())
            self._models.append(copy)
            self._steps[who] = partial(step.train, copy, optimizer)
        _warm_up(self._steps)
        return list(self._steps)

    def steps(self, who: str, count: int) -> list[float]:
        """Returns the duration of each step, in milliseconds."""
        return self._timed(self._steps[who], count, 1e3)

    def deviation(self) -> float:
        return deviation(self._models)

    def _timed(self, call: Call, calls: int, unit: float) -> list[float]:
        synchronize = torch.cuda.synchronize if self._device.type == "cuda" else _nothing
        times = []
        for _ in range(calls):
            synchronize()
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times.append((time.perf_counter() - start) * unit)
        return times


def _nothing() -> None:
    """Waits for nothing: the CPU has finished an operation when it returns."""


def _warm_up(calls: dict[str, Call]) -> None:
    for call in calls.values():
        for _ in range(WARM_UP):
            call()


def main() -> None:
    path, kind = sys.argv[1:]
    hvd.init()
    device, backend = torch.device("cpu"), "gloo"
    if kind == "cuda":
        device, backend = torch.device("cuda", hvd.local_rank()), "nccl"
        torch.cuda.set_device(device)
    rank, size = hvd.rank(), hvd.size()
    peers: dict[str, Peer] = {
        "sirtaki": Sirtaki("torch", rank, size, str(device)),
        backend: TorchDistributed(backend, rank, size, Path(path).parent, str(device)),
    }
    gc.disable()
    serve(path, rank, Rank(peers, device))
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
