"""Training steps of torch models: without exchange, with sirtaki, and with DDP over a peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from sirtaki.bench.torch_implementations import TorchDistributed
from sirtaki.bindings._version import VERSION
from sirtaki.common import basics
from sirtaki.runner.bench.messages import EXCHANGE, OWN, SYNC, Plan, StepTimes
from sirtaki.runner.bench.peers import CPU, GLOO

_LEARNING_RATE = 0.01
_WARM_UP_ROUNDS = 3
_SEED = 1
_RTOL, _ATOL = 1e-4, 1e-6  # hosts may have processors that round differently


@dataclass(frozen=True)
class Model:
    """A model, and the shape of a rank's batch."""

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


# Few large gradients, and an ordinary mixture.
MODELS = {
    "linear": Model(lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), (16, 1024)),
    "transformer": Model(_transformer, (4, 32, 256)),
}


def versions(plan: Plan) -> dict[str, str]:
    """Returns the version of each implementation, and connects the peers. All ranks have to call it."""
    found = {OWN: f"{VERSION}, torch {torch.__version__}"}
    return found | ({GLOO: TorchDistributed(GLOO, CPU).version} if GLOO in plan.peers else {})


def measure_models(plan: Plan) -> Iterator[StepTimes | str]:
    """Measures each model; yields notes and results. All ranks have to go through them."""
    for name, model in MODELS.items():
        yield f"steps of {name}"
        torch.manual_seed(_SEED + basics.rank())  # every rank has a batch of its own
        steps = _Steps(model, torch.randn(model.batch), plan)
        times = steps.rounds(plan.rounds)
        parameters = list(steps.model.parameters())
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        yield StepTimes(name, len(parameters), size, _count_wrong(parameters), times)


class _Steps:
    """A model's copy for each kind of step. All ranks have to make the same calls."""

    def __init__(self, model: Model, batch: Tensor, plan: Plan) -> None:
        self._make, self._batch = model.make, batch
        self.model, own = self._copy()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        gradients = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self._calls: dict[str, Callable[[], object]] = {
            SYNC: self._without_exchange(),
            OWN: own,
            EXCHANGE: lambda: hvd.grouped_allreduce_(gradients, name="bench exchange"),
        }
        if GLOO in plan.peers:
            copy = nn.parallel.DistributedDataParallel(self._make())
            self._calls[GLOO] = self._step(copy, torch.optim.SGD(copy.parameters(), lr=_LEARNING_RATE))
        self.rounds(_WARM_UP_ROUNDS)

    def _copy(self) -> tuple[nn.Module, Callable[[], None]]:
        model = self._make()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        return model, self._step(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))

    def _without_exchange(self) -> Callable[[], None]:
        model = self._make()
        step = self._step(model, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE))

        def call() -> None:
            step()
            hvd.barrier()

        return call

    def _step(self, model: nn.Module, optimizer: Any) -> Callable[[], None]:
        def call() -> None:
            optimizer.zero_grad()
            model(self._batch).square().mean().backward()
            optimizer.step()

        return call

    def rounds(self, count: int) -> Mapping[str, tuple[float, ...]]:
        """Runs a step of each kind in each round; each round begins with another kind.

        Returns milliseconds on the slowest rank.
        """
        names = list(self._calls)
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(count):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                hvd.barrier()
                start = time.perf_counter()
                self._calls[name]()
                times[name].append((time.perf_counter() - start) * 1e3)
        table = torch.tensor(list(times.values()), dtype=torch.float64)
        slowest = hvd.allreduce(table, op=hvd.Max, name="bench times").tolist()
        return {name: tuple(row) for name, row in zip(names, slowest, strict=True)}


def _count_wrong(parameters: list[nn.Parameter]) -> int:
    """Returns how many elements, of all ranks, differ from rank 0's by more than rounding."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    first = hvd.broadcast(flat, root_rank=0, name="bench parameters")
    differing = torch.tensor([int((~torch.isclose(flat, first, rtol=_RTOL, atol=_ATOL)).sum())])
    return int(hvd.allreduce(differing, op=hvd.Sum, name="bench wrong")[0])
