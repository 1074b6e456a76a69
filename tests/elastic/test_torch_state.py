"""A torch state's commits, on one rank: what is copied when, and what a restore brings back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import generator  # noqa: E402
from elastic.torch_job import alone, assert_equal, content, network, one_thread, step  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from world import world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import HorovodInternalError  # noqa: E402

__all__ = ["alone", "one_thread"]  # fixtures that apply to all tests here

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True, amsgrad=True),
    "tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False),
}


def training(kind: str = "Adam", **options: Any) -> tuple[nn.Module, Any, Any]:
    """Returns a model, its optimizer and their state."""
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters())
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, batch=0, **options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_restore_returns_to_the_commit_in_place(kind: str, steps: int) -> None:
    model, optimizer, state = training(kind)
    for number in range(3):
        step(model, optimizer, number)
    state.batch = 3
    state.commit()
    saved = content(model), content(optimizer)
    tensors = [*model.state_dict(keep_vars=True).values(), *optimizer.state[model[0].weight].values()]
    for number in range(3, 3 + steps):
        step(model, optimizer, number)
        optimizer.param_groups[0]["lr"] *= 0.5
        state.batch += 1
    assert not torch.equal(model[0].weight, saved[0]["0.weight"])
    state.restore()
    assert_equal((content(model), content(optimizer), state.batch), (*saved, 3))
    now = [*model.state_dict(keep_vars=True).values(), *optimizer.state[model[0].weight].values()]
    assert all(one is other for one, other in zip(now, tensors, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_that_the_first_step_has_made_is_removed(kind: str) -> None:
    model, optimizer, state = training(kind)
    saved = content(model)
    step(model, optimizer)
    assert optimizer.state
    state.restore()
    assert not optimizer.state
    assert_equal(content(model), saved)
    other, alone, _ = training(kind)
    for _ in range(2):
        step(model, optimizer)
        step(other, alone)
    assert_equal((content(model), content(optimizer)), (content(other), content(alone)))


def test_a_restore_may_be_repeated() -> None:
    model, optimizer, state = training()
    saved = content(model)
    for _ in range(3):
        step(model, optimizer)
        state.restore()
        assert_equal(content(model), saved)


def copies_of(steps: Sequence[int], between: Callable[[], object] = lambda: None) -> list[bool]:
    """Returns whether there is a copy before each commit, with these numbers of steps before each."""
    model, optimizer, state = training()
    has_copy = []
    for count in steps:
        for number in range(count):
            step(model, optimizer, number)
        between()
        has_copy.append(state.can_restore())  # the optimizer has written, so that it needs a copy
        state.commit()
        assert state.can_restore()
    return has_copy


def test_a_loop_that_commits_every_step_ends_its_copies() -> None:
    assert copies_of([1] * 6) == [True, True, False, False, False, False]


def test_irregular_steps_take_copies_again() -> None:
    assert copies_of([1, 1, 2, 1, 1, 1, 1, 1]) == [True, True, False, True, True, True, True, False]


def test_a_loop_that_commits_at_batch_0_and_every_3_has_copies() -> None:
    assert copies_of([1, 3, 3, 2, 1, 3, 3, 2, 1]) == [True] * 9


def test_a_commit_without_a_step_changes_nothing() -> None:
    assert copies_of([1, 0, 1, 0, 1, 1]) == [True, True, True, True, False, False]


def test_operations_between_a_step_and_its_commit_take_copies() -> None:
    assert copies_of([1] * 5, between=lambda: hvd.allreduce(torch.ones(1))) == [True] * 5


def test_a_change_by_hand_in_every_step_takes_copies() -> None:
    model, optimizer, state = training()
    for _ in range(4):
        step(model, optimizer)
        assert state.can_restore()
        state.commit()
        with torch.no_grad():
            model[0].weight.mul_(2)
        step(model, optimizer)
        state.commit()


def test_a_closure_takes_a_copy_for_once() -> None:
    model, optimizer, state = training()
    for _ in range(4):
        step(model, optimizer)
        state.commit()
    optimizer.step(lambda: torch.ones(1))
    assert state.can_restore()


def test_a_state_without_a_copy_is_not_restored() -> None:
    model, optimizer, state = training()
    for count in (1, 1, 2):
        state.commit()
        for _ in range(count):
            step(model, optimizer)
    with pytest.raises(RuntimeError, match='copy="always"'):
        state.restore()


def test_copies_at_each_commit() -> None:
    model, optimizer, state = training(copy="always")
    for _ in range(3):
        step(model, optimizer)
        state.commit()
    saved = content(model), content(optimizer)
    model[0].weight.data.mul_(2)  # unseen
    step(model, optimizer)
    state.restore()
    assert_equal((content(model), content(optimizer)), saved)


def test_changes_by_hand_make_a_commit_unusable_until_the_next() -> None:
    model, optimizer, state = training()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert not state.can_restore()
    step(model, optimizer)
    assert not state.can_restore()  # no copy of what is not the commit
    state.commit()
    saved = content(model)
    step(model, optimizer)
    state.restore()
    assert_equal(content(model), saved)


def test_closures_always_take_copies() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(6, 4) * torch.arange(6).view(-1, 1)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        saved = content(model), content(optimizer)
        optimizer.step(closure)
        assert state.can_restore()
        state.restore()
        assert_equal((content(model), content(optimizer)), saved)
        optimizer.step(closure)
        state.commit()


def test_windows_of_accumulation_begin_anew() -> None:
    def body() -> None:
        passes = {"backward_passes_per_step": 2}
        models = network(), network()
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(one.parameters(), lr=0.1), one.named_parameters(), **passes
            )
            for one in models
        ]
        state = hvd.elastic.TorchState(models[0], optimizers[0])
        backward(models[0], 9)
        state.restore()
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in range(2):
                backward(model, number)
            optimizer.step()
        assert_equal(content(models[0]), content(models[1]))

    with world(2) as ranks:
        ranks.run(body)


def backward(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 4, generator=generator(2 * number + hvd.rank()))).square().mean().backward()


def test_several_optimizers_always_take_copies() -> None:
    models = network(), network()
    first, second = (torch.optim.Adam(model.parameters()) for model in models)
    state = hvd.elastic.TorchState(models[0], first, other=models[1], second=second)
    for _ in range(3):
        saved = [content(one) for one in (*models, first, second)]
        step(models[0], first)
        step(models[1], second)
        assert state.can_restore()
        state.restore()
        assert_equal([content(one) for one in (*models, first, second)], saved)
        step(models[1], second)
        state.commit()


def test_adasum_always_takes_copies() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    state = hvd.elastic.TorchState(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
        assert state.can_restore()
        state.commit()


def test_the_write_begins_after_the_exchange() -> None:
    """A loss that shows in the exchange leaves the commit intact, also if the state was made first."""

    def body() -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        state = hvd.elastic.TorchState(model, optimizer)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for number in range(3):
            step(model, optimizer, 2 * number + hvd.rank())
            state.commit()
        saved = content(model), content(optimizer)
        has_committed.wait()
        if hvd.rank() == 1:
            current().abort("this rank is lost")
            return
        with optimizer.no_sync():
            model(torch.rand(3, 4)).sum().backward()
        with pytest.raises(HorovodInternalError, match="this rank is lost"):
            optimizer.step()
        assert state.can_restore()
        state.restore()
        assert_equal((content(model), content(optimizer)), saved)

    has_committed = threading.Barrier(2)
    with world(2) as ranks:
        ranks.run(body)
