"""overlap_forward in elastic jobs: the bits of the same job without it, whatever happens in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from cases.torch_overlap_models import in_flight  # noqa: E402
from elastic.torch_job import KINDS, Job, Worker, assert_equal, batch, content, one_thread, receive, train  # noqa: E402
from torch import nn  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import HorovodInternalError, NotInitializedError  # noqa: E402
from sirtaki.bindings.survivors import Membership  # noqa: E402
from sirtaki.torch.training.overlapped import flight  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here

SIZES = (1, 2, 3, 1, 2)


@pytest.fixture(autouse=True)
def without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets parameters be in flight, although other tests of this process compile models."""
    monkeypatch.setattr(flight, "has_compiled", lambda: False)


def layers() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def made(
    overlap: bool, kind: str = "SGD", *, has_optimizer: bool = True, copy: str = "auto", **options: Any
) -> Callable[[Worker], None]:
    def make(worker: Worker) -> None:
        worker.model = layers()
        worker.optimizer = hvd.DistributedOptimizer(
            KINDS[kind](worker.model),
            worker.model.named_parameters(),
            overlap_forward=overlap,
            **options,
        )
        optimizer = worker.optimizer if has_optimizer else None
        worker.state = hvd.elastic.TorchState(worker.model, optimizer, batch=0, copy=copy)

    return make


def everything(worker: Worker) -> tuple[Any, ...]:
    return worker.state.batch, content(worker.model), content(worker.optimizer)


def backward(worker: Worker, number: int) -> None:
    worker.optimizer.zero_grad()
    worker.model(batch(number)).square().mean().backward()


def commit(worker: Worker) -> None:
    worker.state.batch += 1
    worker.state.commit()


# ---- Worlds that change as planned ---------------------------------------------------------------------


def steps(worker: Worker, number: int) -> None:
    train(worker, range(4 * number, 4 * number + 4))


def accumulated(worker: Worker, number: int) -> None:
    """Takes steps of two passes; the last pass of each world belongs to no step."""
    for step in range(3):
        backward(worker, 100 * number + step)
        worker.model(batch(100 * number + step + 50)).square().mean().backward()
        worker.optimizer.step()
    worker.model(batch(7)).square().mean().backward()


def failing_forward(worker: Worker, number: int) -> None:
    """Catches exceptions of forward passes when some parameters are in flight, and others are not."""

    def fail(*_: Any) -> None:
        raise KeyError("of the program")

    for step in range(3):
        train(worker, range(3 * number + step, 3 * number + step + 1))
        hook = worker.model[2].register_forward_hook(fail)
        with pytest.raises(KeyError):
            worker.model(batch(step))
        hook.remove()


def before_the_step(worker: Worker, number: int) -> None:
    """Commits between a backward pass and its step, too."""
    for step in range(3):
        backward(worker, 3 * number + step)
        if step == 1:
            worker.state.commit()
        worker.optimizer.step()


def planned(overlap: bool, run: Callable[[Worker, int], None], *arguments: Any, **options: Any) -> list[Any]:
    """Returns everything on all ranks at the end of each world, and at its last commit."""
    return of_worlds(Job(made(overlap, *arguments, **options)), run)


def of_worlds(job: Job, run: Callable[[Worker, int], None]) -> list[Any]:
    before, found = 0, []
    for number, size in enumerate(SIZES):

        def body(worker: Worker, number: int = number, old: int = before) -> Any:
            receive(worker, old)
            run(worker, number)
            commit(worker)
            assert not in_flight(worker.model)
            assert worker.state.can_restore()
            train(worker, range(90, 92))  # steps that are lost
            return everything(worker)

        def restored(worker: Worker) -> Any:
            worker.state.restore()
            return everything(worker)

        found += job.run(size, body)
        found += [restored(worker) for worker in job.workers]
        before = size
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copy", ["auto", "always"])
def test_the_bits_are_those_without_it_when_ranks_come_and_go(kind: str, copy: str) -> None:
    assert_equal(planned(True, steps, kind, copy=copy), planned(False, steps, kind, copy=copy))


@pytest.mark.parametrize(
    "options",
    [{"compression": hvd.Compression.fp16}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_move_along(options: dict[str, Any]) -> None:
    assert_equal(planned(True, steps, **options), planned(False, steps, **options))


def test_averages_may_divide_by_the_ranks_of_the_start() -> None:
    def over_two(overlap: bool) -> list[Any]:
        def make(worker: Worker) -> None:
            worker.survivors.averages_over_initial = True
            worker.survivors.membership = Membership(0, [], 2)
            made(overlap)(worker)

        return of_worlds(Job(make), steps)

    assert_equal(over_two(True), over_two(False))


def test_windows_of_accumulation_begin_anew() -> None:
    passes = {"backward_passes_per_step": 2}
    assert_equal(planned(True, accumulated, **passes), planned(False, accumulated, **passes))


@pytest.mark.parametrize("run", [failing_forward, before_the_step])
def test_commits_at_odd_moments(run: Callable[[Worker, int], None]) -> None:
    assert_equal(planned(True, run), planned(False, run))


# ---- Lost ranks ----------------------------------------------------------------------------------------


def in_the_next_pass(worker: Worker) -> None:
    worker.optimizer.step()
    yield_to_the_loss(worker)
    worker.model(batch(0))


def before_the_step_in_the_next_pass(worker: Worker) -> None:
    yield_to_the_loss(worker)
    worker.model(batch(0))


def in_another_operation(worker: Worker) -> None:
    """Leaves the world with all parameters in flight."""
    worker.optimizer.step()
    yield_to_the_loss(worker)
    try:
        hvd.allreduce(torch.ones(1))
    finally:
        assert len(in_flight(worker.model)) == 6


def before_the_step_in_another_operation(worker: Worker) -> None:
    yield_to_the_loss(worker)
    hvd.allreduce(torch.ones(1))


def in_the_commit(worker: Worker) -> None:
    worker.optimizer.step()
    yield_to_the_loss(worker)
    commit(worker)


def yield_to_the_loss(worker: Worker) -> None:
    assert len(in_flight(worker.model)) == 6  # its gradients cannot have been exchanged
    worker.result.wait()


PLACES = (
    in_the_next_pass,
    before_the_step_in_the_next_pass,
    in_another_operation,
    before_the_step_in_another_operation,
    in_the_commit,
)


def lose(worker: Worker, place: Callable[[Worker], None]) -> None:
    backward(worker, 9)  # fails without overlap_forward
    place(worker)


def lost(overlap: bool, place: Callable[[Worker], None], uncommitted: int, **options: Any) -> list[Any]:
    """Loses rank 2 of 3 without its gradients; returns everything restored, and everything at the end."""
    are_in_flight = threading.Barrier(3, timeout=60.0)

    def until_the_loss(worker: Worker) -> None:
        worker.result = are_in_flight
        receive(worker)
        train(worker, range(3))
        commit(worker)
        train(worker, range(3, 3 + uncommitted))
        if hvd.rank() == 2 or not overlap:
            are_in_flight.wait()
        if hvd.rank() == 2:
            current().abort("this rank is lost")
            return
        with pytest.raises(HorovodInternalError):
            lose(worker, place)
        assert worker.state.can_restore()

    def go_on(worker: Worker) -> Any:
        receive(worker, 2)
        train(worker, range(worker.state.batch, 6), commits=True)
        return everything(worker)

    def joined(worker: Worker) -> Any:
        receive(worker, 2)
        return everything(worker)

    job = Job(made(overlap, **options))
    job.run(3, until_the_loss)
    for worker in job.workers[:2]:
        worker.state.restore()  # in no world
        assert worker.state.batch == 1
        assert not in_flight(worker.model)
    restored = [everything(worker) for worker in job.workers[:2]]
    return [*restored, *job.run(2, go_on), *job.run(3, joined)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("uncommitted", [0, 2])
def test_a_rank_is_lost_while_parameters_are_in_flight(
    place: Callable[[Worker], None], uncommitted: int
) -> None:
    actual = lost(True, place, uncommitted)
    assert_equal(actual, lost(False, place, uncommitted))
    assert_equal(actual[1], actual[0])


@pytest.mark.parametrize("place", PLACES)
def test_the_state_has_the_model_alone(place: Callable[[Worker], None]) -> None:
    def parameters(everything: list[Any]) -> list[Any]:
        return [one[:2] for one in everything[:2]]

    actual, expected = (lost(overlap, place, 2, has_optimizer=False) for overlap in (True, False))
    assert_equal(parameters(actual), parameters(expected))


def test_a_training_that_commits_after_every_step_keeps_a_copy() -> None:
    """The next step may begin to write before all gradients have arrived."""
    are_in_flight = threading.Barrier(3, timeout=60.0)

    def body(worker: Worker) -> None:
        worker.result = are_in_flight
        receive(worker)
        for number in range(6):
            backward(worker, number)
            worker.optimizer.synchronize()  # these steps exchange nothing after they have begun to write
            worker.optimizer.step()
            commit(worker)
        if hvd.rank() == 2:
            are_in_flight.wait()
            current().abort("this rank is lost")
            return
        with pytest.raises(HorovodInternalError):
            lose(worker, in_the_next_pass)
        assert worker.state.can_restore()

    Job(made(True)).run(3, body)


# ---- Optimizers of the training function ---------------------------------------------------------------


def made_inside(overlap: bool) -> list[Any]:
    def make(worker: Worker) -> None:
        worker.model = layers()
        worker.state = hvd.elastic.TorchState(worker.model, batch=0)

    def function(worker: Worker) -> None:
        plain = KINDS["SGD"](worker.model)
        optimizer = hvd.DistributedOptimizer(plain, overlap_forward=overlap)
        receive(worker)
        if worker.optimizer is not None:
            with pytest.raises(NotInitializedError, match="was made inside the training function"):
                worker.optimizer.step()
        worker.optimizer = optimizer
        train(worker, range(3))
        assert len(in_flight(worker.model)) == 6 * overlap  # when the world ends

    job = Job(make)
    found = []
    for _ in range(2):
        job.run(2, function)
        found += [everything(worker) for worker in job.workers]
    return found


def test_an_optimizer_of_the_training_function_ends_with_it() -> None:
    assert_equal(made_inside(True), made_inside(False))
