"""The residuals of a compression, when the ranks of an elastic job change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from elastic.torch_job import Job, Worker, batch, network, one_thread, receive

import sirtaki.torch as hvd

__all__ = ["one_thread"]  # a fixture that applies to all tests here

START = 2
STEPS = 4


def make(worker: Worker) -> None:
    worker.model = network()
    plain = torch.optim.SGD(worker.model.parameters(), lr=0.05, momentum=0.9)
    compression = hvd.Compression.powersgd(1, start=START)
    worker.optimizer = hvd.DistributedOptimizer(
        plain, worker.model.named_parameters(), compression=compression
    )
    worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)


def memory(worker: Worker) -> dict[str, Any]:
    return copy.deepcopy(worker.optimizer.compression_state_dict())


def continued(old: int) -> Any:
    """Returns a body for a world that `old` ranks have come to: it trains, and returns what it has seen."""

    def body(worker: Worker) -> tuple[dict[str, Any], ...]:
        receive(worker, old)
        found = [memory(worker)]
        for step in range(STEPS):
            worker.optimizer.zero_grad()
            worker.model(batch(step)).square().mean().backward()
            worker.optimizer.step()
            found.append(memory(worker))
        worker.state.commit()
        hvd.check_parameters(worker.model)
        return tuple(found)

    return body


def assert_same_residuals(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["residuals"].keys() == other["residuals"].keys()
    for place, residual in one["residuals"].items():
        assert torch.equal(residual, other["residuals"][place])


def test_ranks_keep_what_they_have_left_out_and_new_ones_begin_with_nothing() -> None:
    job = Job(make)
    first = job.run(2, continued(0))
    assert [[one["exchanges"] for one in rank] for rank in first] == [[0, 1, 2, 3, 4]] * 2
    assert all(rank[-1]["residuals"] for rank in first)

    second = job.run(3, continued(2))
    for old, new in zip(first, second, strict=False):
        assert_same_residuals(old[-1], new[0])
        assert_same_residuals(old[-1], new[1])  # the first exchange of a world is exact
    newcomer = second[2]
    assert (newcomer[0]["exchanges"], newcomer[0]["residuals"]) == (0, {})
    assert [one["exchanges"] for one in newcomer[1:]] == [5, 6, 7, 8]  # the others' number
    assert newcomer[1]["residuals"] == {}
    assert newcomer[2]["residuals"]

    third = job.run(2, continued(3))
    for old, new in zip(second, third, strict=False):
        assert_same_residuals(old[-1], new[0])
        assert new[-1]["exchanges"] == 12
