"""A torch state in a new world: newcomers, ranks that are behind, failures in the middle, differences."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from elastic.torch_job import Job, Worker, assert_equal, content, network, one_thread, train  # noqa: E402
from torch import nn  # noqa: E402
from world import world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import HorovodInternalError, ParametersDifferError  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402
from sirtaki.torch.elastic import state  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here


def make(worker: Worker, **more: Any) -> None:
    """Makes the objects of a training with everything in its state."""
    parameters = worker.model.parameters()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(parameters, lr=0.01), worker.model.named_parameters()
    )
    worker.optimizer = optimizer
    worker.state = hvd.elastic.TorchState(
        worker.model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        average=torch.optim.swa_utils.AveragedModel(worker.model),
        source=torch.Generator().manual_seed(hvd.rank()),
        sampler=hvd.elastic.ElasticSampler(range(40)),
        batch=0,
        notes={"seen": []},
        **more,
    )


def receive(worker: Worker, is_current: bool, all_current: bool = False) -> None:
    worker.state.receive(GenerationStart(current(), is_current, all_current))


def replicated(worker: Worker) -> Any:
    """Returns a copy of everything in a worker's state that all ranks share."""
    state = worker.state
    objects = (state.model, state.optimizer, state.scheduler, state.scaler, state.average, state.sampler)
    return [content(one) for one in objects], state.batch, copy.deepcopy(state.notes)


def advance(worker: Worker, steps: range) -> None:
    """Trains, and commits at the end."""
    state = worker.state
    train(worker, steps)
    state.average.update_parameters(state.model)
    state.scheduler.step()
    state.sampler.record_batch(0, len(steps))
    state.notes["seen"].append(len(steps))
    state.batch = steps.stop
    state.commit()


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_newcomers_get_everything(transport: str) -> None:
    job = Job(make)
    job.run(2, lambda worker: advance(worker, range(3)), transport=transport)

    def join(worker: Worker) -> tuple[Any, Any, Any]:
        source = worker.state.source.get_state()
        tensors = [*worker.model.parameters()]
        receive(worker, hvd.rank() < 2)
        assert torch.equal(worker.state.source.get_state(), source)
        assert all(one is other for one, other in zip(worker.model.parameters(), tensors, strict=True))
        assert worker.state.can_restore()
        received = replicated(worker)
        advance(worker, range(3, 6))
        return received, replicated(worker), worker.model[0].weight.tolist()

    before = replicated(job.workers[0])
    results = job.run(4, join, transport=transport)
    for received, _, weights in results:
        assert_equal(received[0][:5], before[0][:5])
        assert received[0][5] == before[0][5]
        assert received[1:] == (3, {"seen": [3]})
        assert weights == results[0][2]


def test_a_restore_returns_to_what_was_received() -> None:
    job = Job(make)
    job.run(1, lambda worker: advance(worker, range(2)))

    def join(worker: Worker) -> None:
        receive(worker, hvd.rank() == 0)
        received = replicated(worker)
        train(worker, range(2, 4))
        worker.state.notes["seen"].append(9)
        worker.state.restore()
        assert_equal(replicated(worker), received)

    job.run(2, join)


def test_a_rank_that_is_behind() -> None:
    """It has neither the commit nor a copy, and gets the whole state; gradients of a failed step go."""
    job = Job(make)
    job.run(3, lambda worker: advance(worker, range(2)))

    def fall_behind(worker: Worker) -> Any:
        receive(worker, True, True)
        if hvd.rank() == 2:
            with torch.no_grad():
                worker.model[0].weight.add_(1)
            worker.optimizer.state[worker.model[0].weight]["exp_avg"].zero_()
            worker.optimizer.param_groups[0]["lr"] = 7.0
            worker.state.scheduler.step()
            worker.state.batch = 1
            assert not worker.state.can_restore()
        receive(worker, hvd.rank() != 2)
        assert all(one.grad is None for one in worker.model.parameters())
        return replicated(worker)

    before = replicated(job.workers[0])
    for after in job.run(3, fall_behind):
        assert_equal(after, before)


Exchange = Callable[..., Any]


def some_tensors_only(original: Exchange) -> Exchange:
    """Makes a broadcast of tensors fail after the first half of them."""

    def exchange(context: Any, named: Any, root: int, process_set: Any) -> None:
        original(context, named[: len(named) // 2], root, process_set)
        losing_a_rank(original)(context, named[len(named) // 2 :], root, process_set)

    return exchange


def losing_a_rank(original: Exchange) -> Exchange:
    """Makes an exchange fail because rank 1 is lost."""

    def exchange(*arguments: Any) -> Any:
        if hvd.rank() == 1:
            current().abort("a rank is lost")
        return original(*arguments)

    return exchange


def failing(stage: str, failure: Callable[[Exchange], Exchange]) -> Any:
    """Makes this exchange of `receive` fail."""
    return mock.patch.object(state, stage, failure(getattr(state, stage)))


@pytest.mark.parametrize(
    ("stage", "failure"),
    [
        ("broadcast_object", losing_a_rank),
        ("broadcast_all", losing_a_rank),
        ("broadcast_all", some_tensors_only),
        ("gather_objects", losing_a_rank),
    ],
)
def test_a_failure_in_the_middle_changes_nothing(stage: str, failure: Callable[[Exchange], Exchange]) -> None:
    job = Job(make)
    job.run(1, lambda worker: advance(worker, range(4)))

    def fail(worker: Worker) -> None:
        if hvd.rank():
            worker.state.notes["seen"].append("of the newcomer")
            worker.state.commit()
        before = replicated(worker)
        with pytest.raises(HorovodInternalError):
            receive(worker, hvd.rank() == 0)
        assert_equal(replicated(worker), before)
        assert worker.state.can_restore()
        worker.state.restore()
        assert_equal(replicated(worker), before)

    with failing(stage, failure):
        job.run(3, fail)

    def succeed(worker: Worker) -> Any:
        receive(worker, hvd.rank() == 0)
        return replicated(worker)

    results = job.run(3, succeed)
    assert results[0][1:] == (4, {"seen": [4]})
    assert_equal(results[1:], [results[0]] * 2)


def test_a_rank_behind_keeps_its_own_commit_if_a_transfer_fails() -> None:
    job = Job(make)

    def start(worker: Worker) -> None:
        receive(worker, hvd.rank() == 0)
        advance(worker, range(2))

    def fall_behind(worker: Worker) -> None:
        mine = replicated(worker)
        train(worker, range(2, 4))  # with a copy: two steps without a commit
        if hvd.rank() == 0:
            worker.state.commit()
            mine = replicated(worker)
        with pytest.raises(HorovodInternalError):
            receive(worker, hvd.rank() == 0)
        worker.state.restore()
        assert_equal(replicated(worker), mine)

    job.run(2, start)
    with failing("broadcast_all", some_tensors_only):
        job.run(2, fall_behind)


def test_what_has_arrived_wrong_is_not_used() -> None:
    def corrupting(original: Exchange) -> Exchange:
        def exchange(context: Any, named: Any, root: int, process_set: Any) -> None:
            original(context, named, root, process_set)
            if context.rank == 2:
                named[3][1].add_(1)

        return exchange

    def body(worker: Worker) -> str:
        before = replicated(worker)
        with pytest.raises(ParametersDifferError, match=r"rank 2 .* with other bytes") as caught:
            receive(worker, hvd.rank() == 0)
        assert_equal(replicated(worker), before)
        return str(caught.value)

    with failing("broadcast_all", corrupting):
        texts = Job(make).run(3, body)
    assert texts == [texts[0]] * 3


def hints_of(body: Callable[[Worker], None], size: int = 3, **settings: str) -> list[str]:
    """Runs a body after a common start, and returns the warnings of all ranks."""
    job = Job(make)

    def start(worker: Worker) -> None:
        receive(worker, hvd.rank() == 0)
        advance(worker, range(3))

    job.run(size, start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run(size, body, **settings)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("all_current", [True, False])
def test_a_rank_that_has_diverged_is_repaired_and_reported(all_current: bool) -> None:
    def body(worker: Worker) -> None:
        weights = worker.model[0].weight
        expected = weights.detach().clone()
        if hvd.rank() == 1:
            weights.data[2, 1] += 0.5
            worker.optimizer.state[weights]["exp_avg_sq"].data.add_(2.0)
        receive(worker, hvd.rank() < 2, all_current)
        assert torch.equal(weights, expected)
        hvd.check_parameters(worker.optimizer)

    (text,) = hints_of(body)
    assert "'model.0.weight' (by up to 0.5) on rank 1 (pid" in text
    assert "'model.0.weight (exp_avg_sq)' (by up to 2) on rank 1" in text
    assert text.count("on rank") == 2


def test_a_stale_learning_rate_is_repaired_and_reported() -> None:
    def body(worker: Worker) -> None:
        if hvd.rank() == 2:
            worker.optimizer.param_groups[0]["lr"] = 0.25
        receive(worker, True, True)
        assert worker.optimizer.param_groups[0]["lr"] == 0.01

    (text,) = hints_of(body)
    assert "lr of parameter group 0 of 'optimizer' (by 0.25 instead of 0.01) on rank 2" in text


def test_equal_states_are_left_alone() -> None:
    """Buffers, which differ between ranks, stay those of each rank."""

    def body(worker: Worker) -> None:
        worker.model[1].running_mean.fill_(hvd.rank())
        worker.state.commit()
        receive(worker, True, True)
        assert (worker.model[1].running_mean == hvd.rank()).all()

    assert not hints_of(body)


def test_nothing_is_compared_with_the_setting_0() -> None:
    def body(worker: Worker) -> None:
        worker.model[0].weight.data += hvd.rank()
        before = worker.model[0].weight.detach().clone()
        receive(worker, True, True)
        assert torch.equal(worker.model[0].weight, before)

    assert not hints_of(body, check_parameters="0")


def wider(worker: Worker) -> None:
    worker.model = nn.Linear(4, 3 if hvd.rank() else 2)
    make(worker)


def more_layers(worker: Worker) -> None:
    worker.model = nn.Sequential(nn.Linear(4, 3), *([nn.Linear(3, 3)] if hvd.rank() else []))
    make(worker)


def another_optimizer(worker: Worker) -> None:
    kind = torch.optim.SGD if hvd.rank() else torch.optim.Adam
    worker.state = hvd.elastic.TorchState(worker.model, kind(worker.model.parameters(), lr=0.1))


def another_order(worker: Worker) -> None:
    parameters = [*worker.model.parameters()]
    optimizer = torch.optim.SGD(parameters[::-1] if hvd.rank() else parameters, lr=0.1)
    worker.state = hvd.elastic.TorchState(worker.model, optimizer)


def another_attribute(worker: Worker) -> None:
    worker.state = hvd.elastic.TorchState(**{"epoch" if hvd.rank() else "batch": 0})


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        (wider, r"'model.weight' is float32 of shape \[3, 4\] on rank 1 .* and float32 of shape \[2, 4\]"),
        (more_layers, r"'model.1.weight' is on rank 1 .* and not on rank 0"),
        (another_optimizer, r"'optimizer' is SGD on rank 1 .* and Adam on rank 0"),
        (another_order, r"'optimizer.0.0' is model.3.bias on rank 1 .* and model.0.weight on rank 0"),
        (another_attribute, r"'(epoch|batch)' is on rank [01]"),
    ],
)
def test_states_that_cannot_be_made_equal(differs: Callable[[Worker], None], text: str) -> None:
    def body() -> str:
        worker = Worker()
        differs(worker)
        with pytest.raises(ParametersDifferError, match=text) as caught:
            receive(worker, hvd.rank() == 0)
        return str(caught.value)

    with world(2) as ranks:
        texts = ranks.run(body)
    assert texts[0] == texts[1]
    assert "then call hvd.elastic.run" in texts[0]


def test_tensors_that_share_memory_and_strides_that_differ() -> None:
    def body() -> list[list[float]]:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        conv = nn.Conv2d(2, 2, 2)
        if hvd.rank():
            conv = conv.to(memory_format=torch.channels_last)
        strides = conv.weight.stride()
        with torch.no_grad():
            for one in (*model.parameters(), *conv.parameters()):
                one.fill_(hvd.rank() + 1.0)
        state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters()), conv=conv)
        state.sync()
        assert model[1].weight is model[0].weight
        assert conv.weight.stride() == strides
        return [one.flatten().tolist() for one in (*model.parameters(), *conv.parameters())]

    with world(3) as ranks:
        results = ranks.run(body)
    assert results[1:] == [results[0]] * 2


def test_a_state_of_a_model_alone() -> None:
    def body() -> None:
        model = network(hvd.rank())
        counts = Counter(samples=5 + hvd.rank())
        state = hvd.elastic.TorchState(model, best=[hvd.rank()], counts=counts, mean=torch.tensor(hvd.rank()))
        state.sync()
        assert_equal(content(model), content(network(0)))
        assert (state.best, state.counts["samples"], state.counts["none"]) == ([0], 5, 0)
        assert state.mean == 0

    with world(2) as ranks:
        ranks.run(body)
