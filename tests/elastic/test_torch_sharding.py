"""Optimizers with shard= in elastic jobs: no loss of a rank loses a slice of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from elastic.torch_job import Job, Worker, assert_equal, batch, one_thread  # noqa: E402
from torch import nn  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import UnsupportedError  # noqa: E402
from sirtaki.common.elastic.slices import keeper_of  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here

STEPS = 3

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
KINDS = [("state", name) for name in OPTIMIZERS] + [("gradients", "AdamW")]


def layers() -> nn.Module:
    """Returns layers of which one is smaller than a block, so that most ranks have none of its elements."""
    return fill(nn.Sequential(nn.Linear(4, 90), nn.Tanh(), nn.Linear(90, 3)))


def made(shard: str | None, name: str) -> Callable[[Worker], None]:
    def make(worker: Worker) -> None:
        worker.model = layers()
        plain = OPTIMIZERS[name](worker.model.parameters())
        worker.optimizer = hvd.DistributedOptimizer(plain, worker.model.named_parameters(), shard=shard)
        worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer, batch=0)

    return make


def steps(worker: Worker) -> None:
    """Takes the next steps, and commits."""
    for number in range(worker.state.batch, worker.state.batch + STEPS):
        step(worker, number)
    worker.state.batch += STEPS
    worker.state.commit()


def everything(worker: Worker) -> Any:
    return copy.deepcopy((worker.model.state_dict(), hvd.full_state_dict(worker.optimizer)))


def trained(*, is_new: Callable[[], bool], has_lost: bool = False, all_current: bool = False) -> Any:
    """Returns a body: a rank receives the commit, trains and returns the state before and after."""

    def body(worker: Worker) -> Any:
        if has_lost and not is_new():
            worker.state.restore()
        worker.state.receive(GenerationStart(current(), not is_new(), all_current))
        before = everything(worker)
        steps(worker)
        hvd.check_parameters(worker.model)
        worker.state.prepare_change()
        return before, everything(worker)

    return body


def first(worker: Worker) -> Any:
    worker.state.receive(GenerationStart(current(), hvd.rank() == 0, hvd.size() == 1))
    steps(worker)
    return everything(worker)


def until_a_loss(worker: Worker) -> Any:
    """Works like `first`, and takes steps that no commit keeps."""
    committed = first(worker)
    for number in range(100, 102):
        step(worker, number)
    return committed


def step(worker: Worker, number: int) -> None:
    worker.optimizer.zero_grad()
    worker.model(batch(number)).square().mean().backward()
    worker.optimizer.step()


@pytest.mark.parametrize(("shard", "name"), KINDS)
def test_ranks_come_and_go_and_the_state_is_that_of_a_plain_optimizer(shard: str, name: str) -> None:
    """Worlds of 1, 2, 3, 1 and 2 ranks; the first of these always stays."""

    def run(shard: str | None) -> list[Any]:
        job, before, found = Job(made(shard, name)), 1, []
        found.append(job.run(1, first)[0])
        for size in (2, 3, 1, 2):
            known = before
            body = trained(is_new=lambda known=known: hvd.rank() >= known, all_current=size <= known)
            found += [result for _, result in job.run(size, body)]
            before = size
        return found

    for sharded, plain in zip(run(shard), run(None), strict=True):
        assert_close(sharded, plain)


def assert_close(actual: Any, expected: Any) -> None:
    """Checks nested values; tensors up to rounding, since gradients may be reduced in another order."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_close(actual[key], value)
    elif isinstance(expected, list | tuple):
        for own, other in zip(actual, expected, strict=True):
            assert_close(own, other)
    else:
        assert actual == expected


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize(("shard", "name"), KINDS)
def test_the_slices_of_a_lost_rank_are_on_another(shard: str, name: str, lost: int) -> None:
    job = Job(made(shard, name))
    committed = job.run(3, until_a_loss)
    del job.workers[lost]
    is_new = lambda: hvd.rank() == 2  # noqa: E731
    for before, _ in job.run(3, trained(is_new=is_new, has_lost=True)):
        assert_equal(before, committed[0])


def test_the_job_ends_with_what_was_lost_if_the_copies_are_lost_too() -> None:
    job = Job(made("state", "AdamW"))
    job.run(4, first)
    del job.workers[1:3]  # each on the host of the other: rank 2 had the copies of rank 1

    def body(worker: Worker) -> None:
        worker.state.restore()
        with pytest.raises(hvd.HorovodInternalError, match=r"the slices of rank 1 of 4 were on ranks that"):
            worker.state.receive(GenerationStart(current(), True, True))

    job.run(2, body)


def test_a_rank_that_has_not_completed_a_commit_has_its_slices_of_it() -> None:
    """A rank is lost while others have completed a commit, and one has not."""
    job = Job(made("state", "AdamW"))

    def commit(worker: Worker) -> Any:
        first(worker)
        step(worker, 50)
        if hvd.rank() == 1:  # its commit ends after the exchange of copies
            worker.state._land()
        else:
            worker.state.commit()
        return everything(worker)

    committed = job.run(3, commit)[0]
    del job.workers[2]

    def afterwards(worker: Worker) -> Any:
        worker.state.restore()
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        return everything(worker)

    for found in job.run(2, afterwards):
        assert_equal(found, committed)


def test_a_restore_in_the_same_world() -> None:
    def body(worker: Worker) -> Any:
        committed = until_a_loss(worker)
        worker.state.restore()
        assert_equal(everything(worker), committed)
        steps(worker)
        return everything(worker)

    def without(worker: Worker) -> Any:
        first(worker)
        steps(worker)
        return everything(worker)

    expected = Job(made("state", "AdamW")).run(3, without)
    assert_equal(Job(made("state", "AdamW")).run(3, body), expected)


def test_an_optimizer_outside_of_the_state_does_not_step() -> None:
    def make(worker: Worker) -> None:
        made("state", "AdamW")(worker)
        worker.state = hvd.elastic.TorchState(worker.model, batch=0)

    def body(worker: Worker) -> None:
        worker.model(batch(0)).square().mean().backward()
        with pytest.raises(UnsupportedError, match="is not part of the elastic state"):
            worker.optimizer.step()

    job = Job(make)
    job.run(2, lambda worker: None)
    job.run(2, body)


def test_checkpoints_of_slices_are_refused(tmp_path: Any) -> None:
    def body(worker: Worker) -> None:
        with pytest.raises(ValueError, match="cannot keep checkpoints"):
            worker.state.keep_checkpoints(tmp_path)

    Job(made("state", "AdamW")).run(2, body)


@pytest.mark.parametrize(
    ("hosts", "keepers"),
    [
        ([0, 0, 0], [1, 2, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
        ([0, 1, 2], [1, 2, 0]),
    ],
)
def test_copies_are_on_another_host(hosts: list[int], keepers: list[int]) -> None:
    assert [keeper_of(rank, hosts) for rank in range(len(hosts))] == keepers
