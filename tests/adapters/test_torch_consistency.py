"""Hints, which one rank prints, and the setting that checks more often, or never."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_consistency import step, train_and_join, train_with_rounding  # noqa: E402  # imports torch
from cases.torch_models import distributed, network, own_loss, sgd, train, whole_loss  # noqa: E402
from torch import nn  # noqa: E402
from world import world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.observing.observe import operation_counts  # noqa: E402
from sirtaki.common.exceptions import ParametersDifferError  # noqa: E402
from sirtaki.common.training import round_checks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def warnings_of(body: Callable[[], object], size: int = 2, **settings: str) -> list[str]:
    """Returns the warnings of all ranks together."""
    with warnings.catch_warnings(record=True) as caught, world(size, **settings) as ranks:
        warnings.simplefilter("always")
        ranks.run(body)
    assert all("/tests/" in one.filename for one in caught), caught  # a line of the program's own
    return [str(one.message) for one in caught]


def training(loss: Callable[..., torch.Tensor], **options: object) -> Callable[[], None]:
    """Returns the body of a rank that trains for four steps."""

    def body() -> None:
        model = network()
        train(model, distributed(model, **options), loss, steps=4)

    return body


def test_equal_batches_on_all_ranks_are_hinted_at_once() -> None:
    (text,) = warnings_of(training(whole_loss), 3)
    assert "all 3 ranks have computed the same gradients" in text
    assert "hvd.DistributedSampler(data)" in text


def test_equal_batches_with_adasum() -> None:
    (text,) = warnings_of(training(whole_loss, op=hvd.Adasum))
    assert "hvd.DistributedSampler(data)" in text


@pytest.mark.parametrize("size", [1, 2, 3])
def test_different_batches_are_nothing_to_speak_of(size: int) -> None:
    assert not warnings_of(training(own_loss), size)


def test_a_rank_whose_others_have_joined_has_nobody_to_be_equal_to() -> None:
    def body() -> None:
        model = network()
        train(model, distributed(model), own_loss, steps=4 if hvd.rank() == 0 else 0)
        hvd.join()

    assert not warnings_of(body)


@pytest.mark.parametrize("way", ["nothing", "all join equally", "join broadcasts", "the program broadcasts"])
def test_ranks_that_differ_after_a_join_and_end(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Saves after it differ, and no step follows in which the ranks would find out."""

    def body() -> None:
        model = network()
        optimizer = distributed(model)
        train(model, optimizer, own_loss, steps=3)
        hvd.join()
        train(model, optimizer, own_loss, steps=2 if way == "all join equally" else 2 + hvd.rank())
        if way == "join broadcasts":
            hvd.join(model=model, optimizer=optimizer)
        else:
            last = hvd.join()
        if way == "the program broadcasts":
            hvd.broadcast_parameters(model.state_dict(), last)
        hvd.allreduce(torch.ones(1))  # a metric

    assert not warnings_of(body)
    written = capfd.readouterr().err
    if way != "nothing":
        assert not written
        return
    assert written.startswith("sirtaki: rank 0 called hvd.join() in body() at test_torch_consistency.py:")
    assert "while other ranks still took steps, and nothing was broadcast afterwards" in written
    assert len(written.splitlines()) == 1


def test_equal_batches_where_they_are_no_mistake() -> None:
    def nothing_to_learn(model: torch.nn.Module, number: int) -> torch.Tensor:
        return 0.0 * whole_loss(model, number)

    def one_equal_batch(model: torch.nn.Module, number: int) -> torch.Tensor:
        return (own_loss if number else whole_loss)(model, number)

    def in_a_process_set() -> None:
        ranks = hvd.add_process_set([0, 1])
        model = network()
        train(model, distributed(model, process_set=ranks), whole_loss, steps=3)

    def one_rank_has_data() -> None:
        model = network()
        train(model, distributed(model), whole_loss, steps=4 * (1 - hvd.rank()))
        hvd.join()

    assert not warnings_of(training(nothing_to_learn))
    assert not warnings_of(training(one_equal_batch))
    assert not warnings_of(in_a_process_set, 3)
    assert not warnings_of(one_rank_has_data)


class Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Updates something else than its parameters."""


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_steps_that_train_nothing(options: dict[str, bool]) -> None:
    def training(kind: type[torch.optim.Optimizer], *, is_replaced: bool) -> None:
        model = network()
        optimizer = distributed(model, kind(model.parameters(), lr=0.01, **options))
        trained = copy.deepcopy(model) if is_replaced else model
        for number in range(5):
            trained.zero_grad()
            own_loss(trained, number).backward()
            optimizer.step()

    for kind in (torch.optim.SGD, torch.optim.Adam):
        (text,) = warnings_of(lambda kind=kind: training(kind, is_replaced=True))
        assert (
            f"3 steps of {kind.__name__} in which none of its 6 parameters had a gradient: the ranks" in text
        )
        assert not warnings_of(lambda kind=kind: training(kind, is_replaced=False))
    (text,) = warnings_of(lambda: training(Idle, is_replaced=False))
    assert "3 steps of Idle that changed none of its 6 parameters: the ranks train nothing" in text


class Dropping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


def test_a_step_that_drops_its_gradients_is_no_mistake() -> None:
    def body() -> None:
        model = network()
        train(model, distributed(model, Dropping(model.parameters(), lr=0.01)), own_loss)

    assert not warnings_of(body)


def test_ranks_that_are_not_connected() -> None:
    """Without DistributedOptimizer and allreduce, each rank trains a model of its own."""

    def plain() -> None:
        model = network()
        train(model, sgd(model), own_loss, steps=5)

    def averaged_by_hand() -> None:
        model = network()
        optimizer = sgd(model)
        for number in range(5):
            own_loss(model, number).backward()
            hvd.grouped_allreduce_([one.grad for one in model.parameters() if one.grad is not None])
            optimizer.step()

    (text,) = warnings_of(plain)
    assert "3 steps of SGD without any exchange between the 2 ranks" in text
    assert not warnings_of(averaged_by_hand)
    assert not warnings_of(plain, 1)


def plain_steps(steps: int, exchange: Callable[..., Any]) -> Callable[[], None]:
    """Returns the body of a rank that trains with a plain optimizer.

    `exchange` is called with model, loss and step, before the backward pass, and returns the loss to
    differentiate; then with None as loss, before the optimizer's step.
    """

    def body() -> None:
        model = network()
        optimizer = sgd(model)
        for number in range(steps):
            optimizer.zero_grad()
            exchange(model, own_loss(model, number), number).backward()
            exchange(model, None, number)
            optimizer.step()

    return body


def averaged_loss(model: torch.nn.Module, loss: torch.Tensor | None, number: int) -> torch.Tensor | None:
    return None if loss is None else hvd.allreduce(loss)


def averaged_metric(model: torch.nn.Module, loss: torch.Tensor | None, number: int) -> torch.Tensor | None:
    if loss is not None:
        hvd.allreduce(loss.detach(), name="metric")
    return loss


def test_ranks_that_average_the_loss_but_not_the_gradients() -> None:
    (text,) = warnings_of(plain_steps(3, averaged_loss))
    assert "3 steps of SGD in which the 2 ranks have exchanged only the loss or a metric" in text
    assert "averaging the loss does not average the gradients" in text
    assert not warnings_of(plain_steps(3, averaged_loss), 1)


def test_ranks_that_exchange_metrics_only() -> None:
    (text,) = warnings_of(plain_steps(100, averaged_metric))
    assert "100 steps of SGD in which the 2 ranks have exchanged at most a loss or metrics" in text


def test_exchanges_by_hand_are_no_mistake() -> None:
    def gradients_in_half_precision(model: torch.nn.Module, loss: torch.Tensor | None, number: int) -> object:
        if loss is None:
            halves = [one.grad.half() for one in model.parameters() if one.grad is not None]
            hvd.grouped_allreduce_(halves)
        return averaged_loss(model, loss, number)

    def parameters_now_and_then(model: torch.nn.Module, loss: torch.Tensor | None, number: int) -> object:
        if loss is None and number % 20 == 19:
            hvd.grouped_allreduce_([one.detach() for one in model.parameters()])
        return averaged_metric(model, loss, number)

    assert not warnings_of(plain_steps(5, gradients_in_half_precision))
    assert not warnings_of(plain_steps(105, parameters_now_and_then))


def test_plain_optimizers_beside_others() -> None:
    def two_that_are_averaged_by_hand() -> None:
        models = network(), network(width=9)
        optimizers = [sgd(model) for model in models]
        for number in range(5):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                hvd.allreduce(own_loss(model, number)).backward()
                hvd.grouped_allreduce_([one.grad for one in model.parameters() if one.grad is not None])
                optimizer.step()

    def one_is_distributed(by_hand: bool, steps: int = 105) -> None:
        generator, discriminator = network(), network(width=9)
        shared, alone = distributed(generator), sgd(discriminator)
        for number in range(steps):
            for model, optimizer in ((discriminator, alone), (generator, shared)):
                optimizer.zero_grad()
                own_loss(model, number).backward()
                if by_hand and optimizer is alone:
                    hvd.grouped_allreduce_([one.grad for one in model.parameters() if one.grad is not None])
                optimizer.step()

    def one_after_the_other() -> None:
        model = network()
        train(model, distributed(model), own_loss, steps=3)
        train(model, sgd(model), own_loss, steps=1)

    assert not warnings_of(two_that_are_averaged_by_hand)
    (text,) = warnings_of(lambda: one_is_distributed(by_hand=False))
    assert (
        "100 steps of SGD in which the 2 ranks have exchanged gradients of distributed optimizers only"
        in text
    )
    assert "Wrap this optimizer, too" in text
    assert not warnings_of(lambda: one_is_distributed(by_hand=True))
    assert not warnings_of(one_after_the_other)


def test_epochs_that_are_all_in_one_order() -> None:
    def forgotten() -> None:
        sampler = hvd.DistributedSampler(torch.utils.data.TensorDataset(torch.arange(9)))
        for _ in range(3):
            list(sampler)

    def in_order() -> None:
        for loader in (
            hvd.DataLoader(torch.utils.data.TensorDataset(torch.arange(9)), shuffle=True),
            hvd.DistributedSampler(torch.utils.data.TensorDataset(torch.arange(9)), shuffle=False),
        ):
            for _ in range(3):
                list(loader)

    (text,) = warnings_of(forgotten)
    assert "call sampler.set_epoch(epoch) before each epoch" in text
    assert not warnings_of(in_order)


def test_rounding_is_a_warning() -> None:
    (text,) = warnings_of(train_with_rounding)
    assert "no more than rounding" in text
    assert "'0.weight'" in text


def test_no_checks_at_all() -> None:
    def body() -> None:
        model = network(seed=hvd.rank())
        optimizer = distributed(model)
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 + hvd.rank()
            step(model, optimizer, number, whole_loss)

    assert not warnings_of(body, check_parameters="0")


def test_ranks_that_counted_differently_check_in_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins misses exchanges. This alone is not reported as a difference."""
    looked: list[int] = []
    monkeypatch.setattr(round_checks, "find_difference", lambda *_: looked.append(hvd.rank()))

    def body() -> None:
        train(*train_and_join(2), own_loss, steps=8)

    assert not warnings_of(body, check_parameters="2")
    assert not looked


def test_checks_every_few_steps() -> None:
    def body() -> None:
        model = network()
        optimizer = distributed(model)
        train(model, optimizer, own_loss, steps=3)
        with torch.no_grad():
            model[0].weight.add_(hvd.rank())
        step(model, optimizer, 3)
        step(model, optimizer, 4)
        with pytest.raises(ParametersDifferError, match=r"0\.weight"):
            step(model, optimizer, 5)

    assert not warnings_of(body, check_parameters="4")


@pytest.mark.parametrize("check_parameters", ["0", "-1"])
def test_a_step_sends_one_operation_beside_its_gradients(check_parameters: str) -> None:
    """The first step compares gradients, and tells which of them are sparse: both in one operation."""

    def body() -> None:
        model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 2))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        before = _allreduces()
        model(torch.tensor([hvd.rank()])).square().mean().backward()
        optimizer.step()
        assert _allreduces() - before == 3 + 1
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank()])).square().mean().backward()
        table: Any = model[0].weight
        assert table.grad.is_sparse
        assert len(table.grad.coalesce().indices()[0]) == hvd.size()

    assert not warnings_of(body, check_parameters=check_parameters)


def _allreduces() -> int:
    rows = operation_counts(current())
    return sum(row["operations"] for row in rows if row["kind"] == "all-reduce")
