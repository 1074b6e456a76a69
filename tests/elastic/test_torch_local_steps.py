"""LocalSGD, DiLoCo and op=Adasum in elastic jobs: ranks come and go, and each keeps its optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from elastic.running import QUICK, REPAIRS, run_job  # noqa: E402
from elastic.torch_job import Job, Worker, assert_equal, one_thread, receive, step, train  # noqa: E402
from torch import nn  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402
from sirtaki.common.exceptions import NotInitializedError  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here

SIZES = (1, 2, 3, 1, 2)
EVERY = 3
WIDTH = 256  # of layers whose matrices may be compressed


def layers() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)))


def inner(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


Wrap = Callable[[nn.Module], Any]
KINDS: dict[str, Wrap] = {
    "LocalSGD": lambda model: hvd.LocalSGD(inner(model), EVERY, model=model),
    "DiLoCo": lambda model: hvd.DiLoCo(model, inner(model), every=EVERY),
    "fragments": lambda model: hvd.DiLoCo(model, inner(model), every=EVERY, fragments=2, overlap=0),
    "Adam outside": lambda model: hvd.DiLoCo(
        model, inner(model), torch.optim.Adam(model.parameters(), lr=0.1), every=EVERY
    ),
    "Adasum": lambda model: hvd.DistributedOptimizer(inner(model), model.named_parameters(), op=hvd.Adasum),
    "topk": lambda model: hvd.DiLoCo(
        model, inner(model), every=EVERY, compression=hvd.Compression.topk(0.05, start=0)
    ),
}


def window(worker: Worker, number: int) -> None:
    """Takes the steps between two synchronizations."""
    train(worker, range(EVERY * number, EVERY * (number + 1)))
    worker.optimizer.synchronize()


def everything(worker: Worker) -> tuple[Any, Any]:
    """Returns copies of the parameters, and of this rank's optimizer with what is equal on all ranks."""
    return copy.deepcopy(worker.model.state_dict()), copy.deepcopy(worker.optimizer.state_dict())


def made(kind: str, *, has_state: bool) -> Callable[[Worker], None]:
    def make(worker: Worker) -> None:
        worker.model = layers()
        worker.optimizer = KINDS[kind](worker.model)
        if has_state:
            worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)

    return make


def moved(kind: str) -> list[list[Any]]:
    """Returns all ranks' states after each world, with objects that move from world to world."""

    def body(worker: Worker, number: int, old: int) -> Any:
        receive(worker, old)
        window(worker, number)
        worker.state.commit()
        return everything(worker)

    return Job(made(kind, has_state=True)).through(SIZES, body)


def made_again(kind: str) -> list[list[Any]]:
    """Returns the same, if each world begins with new objects and what its ranks had; others had rank 0's."""
    last: list[Any] = []
    found = []
    for number, size in enumerate(SIZES):

        def body(worker: Worker, number: int = number, last: list[Any] = last) -> Any:
            if last:
                model, optimizer = last[hvd.rank() if hvd.rank() < len(last) else 0]
                worker.model.load_state_dict(model)
                worker.optimizer.load_state_dict(copy.deepcopy(optimizer))
            window(worker, number)
            return everything(worker)

        last = Job(made(kind, has_state=False)).run(size, body)
        found.append(last)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_move_from_1_to_2_to_3_to_1_rank(kind: str) -> None:
    for actual, expected in zip(moved(kind), made_again(kind), strict=True):
        assert_equal(actual, expected)
        for model, _ in actual:
            assert_equal(model, actual[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_lost_between_two_synchronizations(kind: str) -> None:
    def until_the_loss(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        window(worker, 0)
        worker.state.commit()
        committed = everything(worker)
        for number in range(EVERY - 1):  # steps that are lost
            step(worker.model, worker.optimizer, number)
        return committed

    def afterwards(worker: Worker) -> Any:
        worker.state.restore()
        worker.state.receive(GenerationStart(current(), True, True))
        restored = everything(worker)
        window(worker, 1)
        worker.state.commit()
        return restored, everything(worker)

    def without_a_loss(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), True, True))
        window(worker, 1)
        return everything(worker)

    job = Job(made(kind, has_state=True))
    committed = job.run(3, until_the_loss)
    after = job.run(2, afterwards)
    assert_equal([restored for restored, _ in after], committed[:2])

    other = Job(made(kind, has_state=True))
    other.run(3, lambda worker: (until_the_loss(worker), worker.state.restore()))
    assert_equal([result for _, result in after], other.run(2, without_a_loss))


def test_what_a_rank_has_left_out_moves_with_its_process() -> None:
    """Rank 0 is lost after an average that was not committed, and a new rank comes."""

    def left_out(worker: Worker) -> Any:
        return copy.deepcopy(worker.optimizer.state_dict()["compression"]["residuals"])

    def until_the_loss(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        window(worker, 0)
        worker.state.commit()
        committed = left_out(worker)
        assert all(one.any() for one in committed.values())
        window(worker, 1)
        return committed

    def afterwards(worker: Worker) -> Any:
        is_new = hvd.rank() == 2
        if not is_new:
            worker.state.restore()
        worker.state.receive(GenerationStart(current(), not is_new, False))
        restored = left_out(worker)
        window(worker, 1)
        hvd.check_parameters(worker.model)
        return restored

    job = Job(made("topk", has_state=True))
    committed = job.run(3, until_the_loss)
    del job.workers[0]
    assert_equal(job.run(3, afterwards), [committed[1], committed[2], {}])


def test_a_commit_needs_equal_parameters() -> None:
    def body(worker: Worker) -> None:
        worker.state.receive(GenerationStart(current(), True, True))
        step(worker.model, worker.optimizer)
        for commit in (worker.state.commit, worker.state.check_host_updates):
            with pytest.raises(ValueError, match="commit when optimizer"):
                commit()
        worker.optimizer.synchronize()
        worker.state.commit()

    Job(made("DiLoCo", has_state=True)).run(2, body)


@pytest.mark.parametrize(
    "wrap",
    [lambda plain: hvd.LocalSGD(plain, EVERY), lambda plain: hvd.DistributedOptimizer(plain, shard="state")],
    ids=["LocalSGD", "shard"],
)
def test_a_state_has_to_know_the_wrapped_optimizer(wrap: Callable[[Any], Any]) -> None:
    def make(worker: Worker) -> None:
        worker.model = layers()
        worker.optimizer = inner(worker.model)
        worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)
        wrap(worker.optimizer)

    def body(worker: Worker) -> None:
        with pytest.raises(ValueError, match="make the state after it"):
            worker.state.commit()

    Job(make).run(2, body)


def test_an_optimizer_of_the_training_function_ends_with_it() -> None:
    def first(worker: Worker) -> None:
        worker.result = hvd.LocalSGD(inner(worker.model), EVERY)
        step(worker.model, worker.result)

    def second(worker: Worker) -> None:
        with pytest.raises(NotInitializedError, match="made inside the training function"):
            step(worker.model, worker.result)

    job = Job(made("LocalSGD", has_state=True))
    job.run(2, first)
    job.run(2, second)


def test_a_job_goes_on_from_the_last_synchronization() -> None:
    """Rank 0 is killed in the third window; the job waits for the replacement before the sixth."""
    options = ("-np", "3", "--min-np", "1", *QUICK)
    job = run_job(options, "torch_local_steps.py", 8, f"0:{2 * 4 + 2}", HOLD="5:3")
    assert job.code == 0, job.text
    assert "rank 0 was lost" in job.text
    assert len(job.results) == 3, job.text
    assert len({result["digest"] for result in job.results}) == 1, job.text
    assert all(result["difference"] < 1e-9 for result in job.results), job.text
    sizes = [size for _, (size,) in job.results[0]["steps"]]
    assert len(sizes) == 8
    assert sizes[:2] == [3, 3]
    assert sizes[-3:] == [3, 3, 3]
    assert not any(repair in job.text for repair in REPAIRS), job.text
