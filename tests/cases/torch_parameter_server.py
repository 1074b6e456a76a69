"""The parameter server: its table is that of one process that is given the same pushes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import OPTIMIZERS, network
from cases.torch_staleness import gradients
from sirtaki.bindings.bootstrap.tables import count_servers
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.training.groups import owners_of

Versions = list[list[Tensor]]


def values(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


class Worker:
    """The training of this rank, with a record of its pulls: the number of updates before each push."""

    def __init__(self, staleness: int, optimizer: str = "SGD") -> None:
        self.model = network()
        self.table = hvd.ParameterServer(self.model.parameters(), OPTIMIZERS[optimizer], staleness)
        self.pulled: list[int] = []
        self.seen: list[list[Tensor]] = []

    def step(self) -> None:
        self.pulled.append(self.table.pull())
        self.seen.append(values(self.model))
        gradients(self.model, hvd.rank(), self.table.clock())
        self.table.push()


def simulated(pulled: list[list[int]], optimizer: str = "SGD") -> Versions:
    """Returns the table after each update, computed in one process from the pulls of all workers."""
    server, worker = network(), network()
    steps = OPTIMIZERS[optimizer](server.parameters())
    versions = [values(server)]
    for clock in range(max(map(len, pulled))):
        total = [torch.zeros_like(one) for one in versions[0]]
        for rank, pulls in enumerate(pulled):
            if clock < len(pulls):
                with torch.no_grad():
                    for one, value in zip(worker.parameters(), versions[pulls[clock]], strict=True):
                        one.copy_(value)
                for one, gradient in zip(total, gradients(worker, rank, clock), strict=True):
                    one += gradient
        for one, mean in zip(server.parameters(), total, strict=True):
            one.grad = mean / len(pulled)
        hvd.barrier()  # a plain optimizer that steps without any exchange is reported
        steps.step()
        versions.append(values(server))
    return versions


def assert_simulated(worker: Worker, staleness: int, optimizer: str = "SGD") -> None:
    """Compares a finished training with its simulation, bit for bit, and its pulls with the promise."""
    pulled = hvd.allgather_object(worker.pulled)
    versions = simulated(pulled, optimizer)
    for number, seen in zip([*worker.pulled, -1], [*worker.seen, values(worker.model)], strict=True):
        assert all(torch.equal(one, two) for one, two in zip(seen, versions[number], strict=True))
    assert all(updates >= clock - staleness for clock, updates in enumerate(worker.pulled))


@case(2, staleness=[0, 1, 3])
def the_table_is_that_of_one_process(staleness: int) -> None:
    worker, pauses = Worker(staleness), random.Random(hvd.rank())
    for _ in range(8):
        time.sleep(pauses.choice((0, 0, 0.002, 0.006)))
        worker.step()
    assert worker.table.finish() == 8
    assert_simulated(worker, staleness)


@case(optimizer=["SGD", "Adam"])
def without_staleness_it_is_synchronous_training(optimizer: str) -> None:
    worker, model = Worker(0, optimizer), network()
    synchronous = hvd.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()))
    for step in range(5):
        worker.step()
        gradients(model, hvd.rank(), step)
        synchronous.step()
    worker.table.finish()
    assert all(torch.equal(*pair) for pair in zip(values(worker.model), values(model), strict=True))


@case(2)
def workers_with_fewer_pushes_do_not_stop_the_others() -> None:
    worker = Worker(1)
    for _ in range(max(7 - 4 * hvd.rank(), 0)):
        worker.step()
    assert worker.table.finish() == 7
    assert worker.table.finish() == 7  # changes nothing
    assert_simulated(worker, 1)
    with pytest.raises(ValueError, match=r"has called finish\(\)"):
        worker.table.push()


@case(2)
def a_pull_waits_for_the_slowest_worker_only() -> None:
    """Rank 0 computes nothing until the others have pushed as often as staleness=2 lets them: three times."""
    worker = Worker(2)
    if hvd.rank() == 0:
        for rank in range(1, hvd.size()):
            assert hvd.recv(torch.zeros(1), rank).item() == 3
        for _ in range(4):
            worker.step()
    else:
        for _ in range(3):
            worker.step()
        assert worker.pulled == [0, 0, 0]
        hvd.send(torch.tensor([float(worker.table.clock())]), 0)
        worker.step()
        assert worker.pulled[-1] >= 1
    worker.table.finish()
    assert_simulated(worker, 2)


@case(2)
def several_dtypes_and_absent_gradients_work_as_on_one_device() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [torch.ones(size, dtype=dtype) for size in (3, 0, 5) for dtype in dtypes]
    table = hvd.ParameterServer(params, lambda own: torch.optim.SGD(own, lr=1.0, weight_decay=0.5))
    given = [torch.full_like(one, 2) if place % 2 else None for place, one in enumerate(params)]
    table.push(given if hvd.rank() == 0 else [None] * len(params))
    assert table.finish() == 1
    for place, one in enumerate(params):
        expected = torch.full_like(one, 0.5 - 2 / hvd.size()) if place % 2 else torch.ones_like(one)
        torch.testing.assert_close(one, expected)


@case()
def a_scheduler_follows_the_updates() -> None:
    def halving(own: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(own, lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    params = [torch.zeros(2), torch.zeros(1)]
    table = hvd.ParameterServer(params, halving)
    for _ in range(3):
        table.push([torch.ones_like(one) for one in params])
        table.pull()
    table.finish()
    assert [one.tolist() for one in params] == [[-1.75, -1.75], [-1.75]]


@case()
def tables_are_independent() -> None:
    workers = [Worker(0, "Adam"), Worker(1)]
    for step in range(6):
        workers[step % 2].step()
    for worker, staleness, made_with in zip(workers, (0, 1), ("Adam", "SGD"), strict=True):
        assert worker.table.finish() == 3
        assert_simulated(worker, staleness, made_with)


@case()
def a_rank_may_serve_nothing() -> None:
    params = [torch.ones(2)]
    table = hvd.ParameterServer(params, lambda own: torch.optim.SGD(own, lr=1.0))
    is_served_here = hvd.rank() == 0 and not count_servers()
    assert (table.optimizer is not None) == is_served_here
    table.push([torch.ones(2)])
    table.finish()
    assert params[0].tolist() == [0, 0]


@case()
def parameters_are_divided_by_bytes() -> None:
    params = [torch.ones(size) for size in (4, 1, 7, 2, 4, 6)]
    loads = [0, 0, 0]
    for one, owner in zip(params, owners_of([one.nbytes for one in params], 3), strict=True):
        loads[owner] += one.numel()
    assert max(loads) - min(loads) <= 2


@case(2)
def unequal_starts_are_refused() -> None:
    with pytest.raises(ParametersDifferError, match="broadcast_parameters"):
        hvd.ParameterServer(network(seed=hvd.rank()).parameters(), OPTIMIZERS["SGD"])


@case()
def wrong_arguments_are_refused() -> None:
    model, layer = network(), hvd.SyncBatchNorm(2)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.ParameterServer(model.parameters(), OPTIMIZERS["SGD"], -1), "number of updates"),
        (lambda: hvd.ParameterServer([], OPTIMIZERS["SGD"]), "unique names"),
        (lambda: hvd.ParameterServer(model, torch.optim.SGD(model.parameters(), 1.0)), "a function"),  # type: ignore[arg-type]
        (lambda: hvd.ParameterServer(layer.parameters(), OPTIMIZERS["SGD"]), "use BatchNorm"),
    ]
    for make, text in refused:
        with pytest.raises(ValueError, match=text):
            make()
    params = [torch.ones(2)]
    table = hvd.ParameterServer(params, OPTIMIZERS["SGD"])
    mistakes = {
        "0 gradients for 1": [],
        "the parameter is": [torch.ones(3)],
        "sparse": [params[0].to_sparse()],
    }
    for text, pushed in mistakes.items():
        with pytest.raises(ValueError, match=text):
            table.push(pushed)
    table.finish()


@case()
def elastic_jobs_are_refused() -> None:
    context = current()
    context.survivors = Survivors()
    try:
        with pytest.raises(ValueError, match="not available in an elastic job"):
            hvd.ParameterServer(network().parameters(), OPTIMIZERS["SGD"])
    finally:
        context.survivors = None
