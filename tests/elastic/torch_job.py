"""Ranks as threads that keep their objects from world to world, as the processes of an elastic job do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases.torch_models import fill, generator
from torch import Tensor, nn
from world import world

import sirtaki.torch as hvd
from sirtaki.bindings.context import current, using
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.elastic.state import GenerationStart

ROWS = 12  # of a whole batch
Make = Callable[[nn.Module], Any]

KINDS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: ranks as threads already run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Makes the test a world of one rank."""
    with world(1) as ranks, using(ranks.contexts[0]):
        yield


def network(seed: int = 0) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)), seed)


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    """Takes a step with a batch of this number."""
    optimizer.zero_grad()
    model(torch.randn(6, 4, generator=generator(number))).square().mean().backward()
    optimizer.step()


class Worker:
    """One process of the job: whatever it has made, it keeps."""

    def __init__(self) -> None:
        self.survivors = Survivors()
        self.model = network()
        self.optimizer: Any = None
        self.state: Any = None
        self.result: Any = None


class Job:
    """The workers of a job, the oldest first."""

    def __init__(self, make: Callable[[Worker], None]) -> None:
        """`make` makes the objects of a worker, in its first world."""
        self._make = make
        self.workers: list[Worker] = []

    def run(self, size: int, body: Callable[[Worker], Any], **settings: str) -> list[Any]:
        """Runs a body on the first `size` workers, in a world of their own; returns the results."""
        del self.workers[size:]

        def as_worker() -> Any:
            context = current()
            worker = workers[context.rank]
            if worker.state is None and worker.optimizer is None:
                worker.survivors.move_to(context)
                self._make(worker)
                worker.survivors.begin()
            else:
                worker.survivors.move_to(context)
            return body(worker)

        self.workers += [Worker() for _ in range(size - len(self.workers))]
        workers = self.workers
        with world(size, **settings) as ranks:
            return ranks.run(as_worker)

    def through(self, sizes: Sequence[int], body: Callable[[Worker, int, int], Any]) -> list[list[Any]]:
        """Runs a body in one world after another; returns the results of each.

        The body has the number of its world, and the size of the world before; 0 in the first world.
        """
        worlds = enumerate(zip(sizes, [0, *sizes], strict=False))
        return [
            self.run(size, lambda worker, number=number, old=old: body(worker, number, old))  # type: ignore[misc]
            for number, (size, old) in worlds
        ]


def receive(worker: Worker, old: int = 0) -> None:
    """Begins a world to which `old` ranks have come with the commit."""
    is_current = hvd.rank() < max(old, 1)
    worker.state.receive(GenerationStart(current(), is_current, hvd.size() <= old))


def batch(step: int) -> Tensor:
    """Returns this rank's part of the batch of a step."""
    return torch.randn(ROWS, 4, generator=generator(step)).chunk(hvd.size())[hvd.rank()]


def train(worker: Worker, steps: range, *, commits: bool = False) -> None:
    """Takes these steps with the worker's model and optimizer."""
    for step in steps:
        worker.optimizer.zero_grad()
        worker.model(batch(step)).square().mean().backward()
        worker.optimizer.step()
        if commits:
            worker.state.batch = step + 1
            worker.state.commit()


def content(value: Any) -> Any:
    """Returns a copy of the state of a model or an optimizer."""
    return copy.deepcopy(value.state_dict())


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Checks nested values, and tensors to the bit."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), path
        assert actual.dtype == expected.dtype, path
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), path
        assert list(actual) == list(expected), path
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for place, value in enumerate(expected):
            assert_equal(actual[place], value, f"{path}.{place}")
    else:
        assert actual == expected, path
