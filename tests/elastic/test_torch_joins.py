"""The cost of a join for a torch training: copies of the state, and memory for what a new rank receives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from elastic.torch_job import Job, Worker, assert_equal, content, one_thread, train  # noqa: E402
from torch import nn  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here

WIDTH = 600  # a weight of 1.4 MB, for which a rank provides memory before it receives it


def make(worker: Worker) -> None:
    """Makes a training with Adam, one of whose weights is large and not row-major."""
    worker.model = fill(nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)), 0)
    with torch.no_grad():
        weight = worker.model[1].weight
        worker.model[1].weight = nn.Parameter(weight.t().contiguous().t())
    worker.optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(worker.model.parameters(), lr=0.01), worker.model.named_parameters()
    )
    worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)


def receive(worker: Worker, is_current: bool) -> None:
    worker.state.receive(GenerationStart(current(), is_current, all_current=False))


def take_steps(worker: Worker) -> list[bool]:
    """Commits after each of four steps; returns whether there was a copy of each commit."""
    has_copy = []
    for step in range(4):
        train(worker, range(step, step + 1))
        has_copy.append(worker.state.can_restore())  # the optimizer has written
        worker.state.commit()
    return has_copy


def test_a_join_takes_no_copy_in_a_loop_that_commits_every_step() -> None:
    """A copy of Adam's state, in new memory, took longer than its transfer."""
    job = Job(make)

    def join(worker: Worker) -> list[bool]:
        receive(worker, hvd.rank() < 2)
        return take_steps(worker)

    assert job.run(2, take_steps) == [[True, True, False, False]] * 2
    assert job.run(3, join) == [[False] * 4] * 3


def test_large_tensors_reach_a_new_rank_with_their_strides() -> None:
    job = Job(make)

    def join(worker: Worker) -> Any:
        receive(worker, hvd.rank() == 0)
        return content(worker.model), content(worker.optimizer), worker.model[1].weight.stride()

    job.run(1, lambda worker: train(worker, range(2), commits=False) or worker.state.commit())
    old, new = job.run(2, join)
    assert_equal(new[:2], old[:2])
    assert new[2] == old[2] == (1, WIDTH)
