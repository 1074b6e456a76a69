"""Objects of torch that are made in one world and used in the next ones."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402
from elastic.torch_job import (  # noqa: E402
    KINDS,
    Job,
    Make,
    Worker,
    assert_equal,
    batch,
    content,
    network,
    one_thread,
    receive,
    train,
)
from torch import nn  # noqa: E402
from world import world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import HorovodInternalError, NotInitializedError  # noqa: E402
from sirtaki.bindings.survivors import Survivors  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here

SIZES = (1, 2, 1, 3, 2)
STEPS = 3


def layers() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def weights(model: nn.Module) -> list[Any]:
    return [one.tolist() for one in model.parameters()]


def made_again(make: Make, run: Callable[[Worker, int], None], **options: Any) -> list[list[Any]]:
    """Returns the weights after each world, if each begins with new objects and the old content."""
    kept = layers()
    last: tuple[Any, Any] = (content(kept), content(make(kept)))
    found = []
    for number, size in enumerate(SIZES):

        def body(last: tuple[Any, Any] = last, number: int = number) -> tuple[Any, Any, list[Any]]:
            worker = Worker()
            worker.model = layers()
            worker.optimizer = make(worker.model)
            worker.model.load_state_dict(last[0])
            worker.optimizer.load_state_dict(copy.deepcopy(last[1]))
            hvd.DistributedOptimizer(worker.optimizer, worker.model.named_parameters(), **options)
            run(worker, number)
            return content(worker.model), content(worker.optimizer), weights(worker.model)

        with world(size) as ranks:
            *last_content, after = ranks.run(body)[0]
        last = (last_content[0], last_content[1])
        found.append(after)
    return found


def moved(make: Make, run: Callable[[Worker, int], None], **options: Any) -> list[list[Any]]:
    """Returns the weights after each world, with objects that move from one to the next."""

    def make_all(worker: Worker) -> None:
        worker.model = layers()
        worker.optimizer = hvd.DistributedOptimizer(
            make(worker.model), worker.model.named_parameters(), **options
        )
        worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)

    def body(worker: Worker, number: int, old: int) -> list[Any]:
        receive(worker, old)
        run(worker, number)
        worker.state.commit()
        return weights(worker.model)

    found = Job(make_all).through(SIZES, body)
    for results in found:
        assert all(one == results[0] for one in results)
    return [results[0] for results in found]


def train_on(worker: Worker, number: int) -> None:
    train(worker, range(STEPS * number, STEPS * (number + 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_move_from_1_to_2_to_1_to_3_ranks(kind: str) -> None:
    assert moved(KINDS[kind], train_on) == made_again(KINDS[kind], train_on)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_an_optimizer_move_along(options: dict[str, Any]) -> None:
    assert moved(KINDS["SGD"], train_on, **options) == made_again(KINDS["SGD"], train_on, **options)


def accumulate(worker: Worker, number: int) -> None:
    """Takes steps of two passes; the last pass of each world belongs to no step."""
    model, optimizer = worker.model, worker.optimizer
    for step in range(2):
        optimizer.zero_grad()
        for half in range(2):
            model(batch(100 * number + 2 * step + half)).square().mean().backward()
        optimizer.step()
    model(batch(7)).square().mean().backward()


def test_windows_of_accumulation_begin_anew() -> None:
    passes = {"backward_passes_per_step": 2}
    assert moved(KINDS["SGD"], accumulate, **passes) == made_again(KINDS["SGD"], accumulate, **passes)


def without_sync(worker: Worker, number: int) -> None:
    worker.optimizer.zero_grad()
    with worker.optimizer.no_sync():
        worker.model(batch(2 * number)).square().mean().backward()
    worker.model(batch(2 * number + 1)).square().mean().backward()
    worker.optimizer.step()


def test_a_context_that_an_exception_has_left_is_left() -> None:
    def failing(worker: Worker, number: int) -> None:
        without_sync(worker, number)
        with pytest.raises(KeyError), worker.optimizer.no_sync(), worker.optimizer.skip_synchronize():
            raise KeyError

    assert moved(KINDS["SGD"], failing) == made_again(KINDS["SGD"], without_sync)


def test_a_loss_in_a_pass_and_the_same_steps_again() -> None:
    """Rank 2 is lost while the others exchange gradients; they go on from their last commit."""

    def make(worker: Worker) -> None:
        worker.optimizer = hvd.DistributedOptimizer(
            KINDS["fused"](worker.model), worker.model.named_parameters()
        )
        worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer, batch=0)

    def lose_rank_2(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        train(worker, range(4), commits=True)
        saved = content(worker.model), content(worker.optimizer)
        has_committed.wait()
        if hvd.rank() == 2:
            current().abort("this rank is lost")
            return None
        with pytest.raises(HorovodInternalError):
            train(worker, range(4, 6), commits=True)
        return saved

    job, has_committed = Job(make), threading.Barrier(3)
    saved = job.run(3, lose_rank_2)
    for worker in job.workers[:2]:
        assert worker.state.can_restore()
        worker.state.restore()  # in no world
        assert worker.state.batch == 4
    assert_equal((content(job.workers[0].model), content(job.workers[0].optimizer)), saved[0])

    def go_on(worker: Worker) -> list[Any]:
        worker.state.receive(GenerationStart(current(), True, True))
        train(worker, range(worker.state.batch, 8), commits=True)
        return weights(worker.model)

    first, second = job.run(2, go_on)
    assert first == second


def test_the_same_data_are_hinted_at_in_the_first_world_only() -> None:
    def train_alike(worker: Worker, number: int) -> None:
        for _ in range(3):
            worker.optimizer.zero_grad()
            worker.model(torch.ones(2, 4)).square().mean().backward()
            worker.optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved(KINDS["SGD"], train_alike)
    assert [str(one.message)[:34] for one in caught] == ["in two steps, all 2 ranks have com"]


def in_elastic_job(body: Callable[[], None], size: int = 2) -> None:
    """Runs a body on ranks of an elastic job."""

    def as_rank() -> None:
        current().survivors = Survivors()
        body()

    with world(size) as ranks:
        ranks.run(as_rank)


def refuses_use(optimizer: Any) -> None:
    group = {"params": [nn.Parameter(torch.ones(1))]}
    text = r"this Adam was made inside the training function.* before hvd\.elastic\.run"
    for use in (optimizer.step, optimizer.zero_grad, optimizer.synchronize):
        with pytest.raises(NotInitializedError, match=text):
            use()
    with pytest.raises(NotInitializedError, match=text):
        optimizer.add_param_group(group)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_optimizer_of_the_training_function_ends_with_it(is_new: bool) -> None:
    """Each execution makes a new optimizer, or makes the same one distributed."""

    def make(worker: Worker) -> None:
        worker.optimizer = KINDS["fused"](worker.model)
        worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer)

    def function(worker: Worker) -> Any:
        before = worker.optimizer
        if worker.result is not None:
            refuses_use(worker.optimizer)
        if is_new:
            worker.optimizer = KINDS["fused"](worker.model)
        worker.optimizer = hvd.DistributedOptimizer(worker.optimizer, worker.model.named_parameters())
        worker.state.optimizer = worker.optimizer
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        train(worker, range(2))
        worker.result = before
        return weights(worker.model)

    job = Job(make)
    for size in (2, 3, 1, 2):
        results = job.run(size, function)
        assert all(one == results[0] for one in results)


def test_samplers_and_loaders_of_the_training_function_end_with_it() -> None:
    data = list(range(8))

    def make(worker: Worker) -> None:
        worker.state = hvd.elastic.TorchState()

    def function(worker: Worker) -> None:
        for one in worker.result or ():
            with pytest.raises(NotInitializedError, match="was made inside the training function"):
                next(iter(one))
        worker.result = [
            hvd.elastic.ElasticSampler(data),
            hvd.DistributedSampler(data),
            hvd.DataLoader(data),
        ]
        for one in worker.result:
            next(iter(one))

    job = Job(make)
    for size in (2, 1):
        job.run(size, function)


@pytest.mark.parametrize("drop_last", [False, True])
def test_distributed_samplers_follow_the_ranks(drop_last: bool) -> None:
    data = list(range(22))

    def make(worker: Worker) -> None:
        worker.state = hvd.elastic.TorchState()
        worker.result = hvd.DataLoader(data, batch_size=2, shuffle=True, drop_last=drop_last)

    def epoch(worker: Worker) -> tuple[int, list[int], list[int]]:
        worker.result.set_epoch(4)
        expected = hvd.DataLoader(data, batch_size=2, shuffle=True, drop_last=drop_last)
        expected.set_epoch(4)
        samples, others = (
            [one for part in loader for one in part.tolist()] for loader in (worker.result, expected)
        )
        return len(worker.result), samples, others

    job = Job(make)
    for size in SIZES:
        results = job.run(size, epoch)
        assert [samples for _, samples, _ in results] == [others for _, _, others in results]
        assert len({length for length, _, _ in results}) == 1
        assert drop_last or {one for _, samples, _ in results for one in samples} == set(data)


def test_epochs_that_loaders_count_are_equal_on_ranks_that_join() -> None:
    data = list(range(22))

    def make(worker: Worker) -> None:
        worker.state = hvd.elastic.TorchState()
        worker.result = hvd.DataLoader(data, batch_size=2, shuffle=True)

    def epoch(worker: Worker) -> list[int]:
        return [one for part in worker.result for one in part.tolist()]

    job = Job(make)
    for size in SIZES:
        results = job.run(size, epoch)
        assert {one for samples in results for one in samples} == set(data)


def test_epochs_of_loaders_begin_with_the_one_set_before_the_first_world() -> None:
    data = list(range(22))

    def make(worker: Worker) -> None:
        worker.state = hvd.elastic.TorchState()
        worker.result = hvd.DataLoader(data, batch_size=2, shuffle=True)
        worker.result.set_epoch(5)

    def epoch(worker: Worker) -> list[int]:
        samples = [one for part in worker.result for one in part.tolist()]
        worker.result.set_epoch(9)  # in the training function: for this world only
        return samples

    job = Job(make)
    for size in SIZES:
        expected = torch.utils.data.DistributedSampler(data, size, 0, shuffle=True)
        expected.set_epoch(5)
        assert job.run(size, epoch)[0] == list(expected)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_loader_of_the_state_continues_at_the_commit(is_lost: bool) -> None:
    """Each sample counts once in an epoch, over worlds of other sizes, also if a batch is lost."""
    data, read = list(range(24)), []

    def make(worker: Worker) -> None:
        loader = hvd.DataLoader(data, shuffle=True, seed=5)
        worker.state = hvd.elastic.TorchState(loader=loader, epoch=0)

    def body(worker: Worker) -> list[int]:
        worker.state.receive(GenerationStart(current(), hvd.rank() < before, hvd.size() <= before))
        loader, taken = worker.state.loader, []
        worker.state.epoch = loader.epoch
        for number, part in enumerate(loader):
            taken += part.tolist() if number < 2 else []
            if number == 1:
                worker.state.commit()
            if number == 1 + is_lost:
                break
        return taken

    job, before = Job(make), 1
    for size in (*SIZES, 3, 2, 1):  # 24 samples, and 6 of the next epoch
        read += [sample for turn in zip(*job.run(size, body), strict=True) for sample in turn]
        for worker in job.workers if is_lost else ():
            worker.state.restore()  # in no world
        before = size
    orders = torch.utils.data.DistributedSampler(data, 1, 0, shuffle=True, seed=5)
    first = list(orders)
    orders.set_epoch(1)
    assert read == [*first, *list(orders)[:6]]
    assert [worker.state.epoch for worker in job.workers] == [1]


def test_normalisation_over_all_ranks_follows_them() -> None:
    def make(worker: Worker) -> None:
        worker.model = hvd.SyncBatchNorm.convert_sync_batchnorm(network()).double()
        worker.state = hvd.elastic.TorchState(worker.model)

    job = Job(make)
    for number, size in enumerate(SIZES):
        plain = network().double()
        if number:
            plain.load_state_dict(job.workers[0].model.state_dict())

        def normalise(worker: Worker, number: int = number) -> Any:
            worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
            return worker.model(batch(number).double())

        expected = plain(torch.cat([torch.zeros(0, 4), whole(number)]).double())
        torch.testing.assert_close(torch.cat(job.run(size, normalise)), expected)
        torch.testing.assert_close(job.workers[0].model[1].running_var, plain[1].running_var)


def whole(step: int) -> Any:
    """Returns the whole batch of a step."""
    with world(1) as ranks:
        return ranks.run(batch, step)[0]


def test_what_could_not_follow_the_ranks_is_refused() -> None:
    def refuse() -> None:
        optimizer = KINDS["SGD"](network())
        some = hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match="leave out process_set"):
            hvd.DistributedOptimizer(optimizer, process_set=some)
        for options in ({"num_replicas": 2}, {"rank": 0}, {"process_set": some}):
            with pytest.raises(ValueError, match="leave them out"):
                hvd.DistributedSampler([1, 2], **options)
        with pytest.raises(ValueError, match="leave them out"):
            hvd.DataLoader([1, 2], process_set=some)
        hvd.DistributedOptimizer(optimizer)  # a refusal has changed nothing

    in_elastic_job(refuse, 3)
